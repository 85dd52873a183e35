"""Which tokens of a conversation are trained: TRL's labels where TRL has them, and hand-made masks elsewhere."""

import itertools
import json
import re

import numpy as np
import pytest
import trl
from datasets import Dataset, load_from_disk
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support import vision
from support.chats import TEMPLATES, answer, tokenizer_with, user
from support.features import needs
from support.models import build_tokenizer
from support.runs import all_documents, build_trainer, samples_of

from trl_packfix.samples.conversation import Conversation
from trl_packfix.samples.recipes import MaskedTurns
from trl_packfix.samples.row import AssistantTurnCounts
from trl_packfix.samples.turns import TurnRule

pytestmark = pytest.mark.slow

CHATML = tokenizer_with(None)
PLAIN = tokenizer_with("plain")
THINKING = tokenizer_with("qwen3")  # removes earlier thinking, and writes an empty one
THINKING.chat_template += "{# changed #}"  # unknown to TRL
CHAT = [user("Q1"), answer("A1"), user("Q2"), answer("A2"), user("Q3"), answer("A3")]


def weighted(*weights, messages=CHAT, key="weight"):
    """Return the conversation with a weight for each answer; None gives an answer no weight."""
    next_weights = iter(weights)
    return [m if m["role"] != "assistant" or (w := next(next_weights)) is None else m | {key: w} for m in messages]


def trained_texts(row, tokenizer):
    """Return the texts of the runs of trained tokens."""
    label_runs = itertools.groupby(row["labels"], lambda label: label != -100)
    return [tokenizer.decode([*label_run]) for is_trained, label_run in label_runs if is_trained]


def sample(messages, tokenizer, template=None, **rule):
    (turns,) = MaskedTurns(TurnRule(**rule), tokenizer, template).samples({"messages": messages}, 0)
    return {name: values.tolist() for name, values in turns.columns.items()}


def run_of(folder, data, **settings):
    settings = {"max_length": 512, "assistant_only_loss": True, "processing_class": PLAIN} | settings
    return build_trainer(folder, data, **settings)


# One conversation


@st.composite
def conversations(draw):
    """Draw messages of random roles with texts that may be empty or hold line breaks, and weights of answers."""
    text = st.text("ab \n", max_size=6)
    messages = [{"role": "system", "content": draw(text)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 6))):
        role = draw(st.sampled_from(["user", "assistant", "assistant", "tool"]))
        message = {"role": role, "content": draw(text)}
        weight = draw(st.sampled_from([None, 0, 1, True, False, 0.0]))
        messages.append(message | ({"weight": weight} if weight is not None and role == "assistant" else {}))
    return [*messages, answer(draw(text))]


def by_hand(messages, last):
    """Return tokens and labels of ChatML, one token per byte.

    Of an answer its text is trained, and its end with the line break.
    """
    tokens = []
    labels = []
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for i, message in enumerate(messages):
        head = f"<|im_start|>{message['role']}\n"
        body = f"{message['content']}<|im_end|>\n"
        head, body = (CHATML(text, add_special_tokens=False)["input_ids"] for text in (head, body))
        is_trained = i in answers and message.get("weight") in (None, 1) and (not last or i == answers[-1])
        tokens += head + body
        labels += [-100] * len(head) + (body if is_trained else [-100] * len(body))
    return tokens, labels


@hypothesis_settings(max_examples=60)
@given(messages=conversations(), last=st.booleans())
def test_labels_are_a_mask_made_by_hand(messages, last):
    labelled = sample(messages, PLAIN, assistant_turns="last" if last else "all")
    assert (labelled["input_ids"], labelled["labels"]) == by_hand(messages, last)
    marked = sample(messages, CHATML, assistant_turns="last" if last else "all")  # by its generation markers
    tokens, labels = by_hand(messages, last)
    ends = [i for i, label in enumerate(labels) if label != -100 and CHATML.decode([tokens[i - 1]]) == "<|im_end|>"]
    assert (marked["input_ids"], marked["labels"]) == (tokens, [-100 if i in ends else x for i, x in enumerate(labels)])


TRAINING = sorted(path.stem for path in TEMPLATES.glob("*_training.jinja") if "llava" not in path.stem)
# Templates whose turns are found one by one exactly as TRL's template for training marks them
SAME = {
    name for name in TRAINING if name.startswith(("cohere", "gemma", "diffusion", "lfm", "llama", "phi", "qwen2_5_vl"))
}
SAME |= {"idefics3_training", "smolvlm_training", "qwen3_instruct_2507_training", "qwen3_vl_training"}


@pytest.mark.parametrize("template", TRAINING)
def test_labels_are_those_of_trl_for_every_template(template):
    """The labels of all turns must be those of TRL, and the labels of each turn alone must together be those of all."""
    tokenizer = tokenizer_with(template)
    stock = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    labels = [t if bit else -100 for t, bit in zip(stock["input_ids"], stock["assistant_masks"], strict=True)]
    assert sample(CHAT, tokenizer)["labels"] == labels
    assert max(labels) >= 0
    labels_of_turns = [sample(weighted(*row), tokenizer)["labels"] for row in np.eye(3, dtype=int).tolist()]
    for i, turn_labels in enumerate(labels_of_turns):
        text = tokenizer.decode([label for label in turn_labels if label != -100])
        has_text = "idefics" not in template and "smolvlm" not in template  # which leave out content that is text
        assert [f"A{k}" in text for k in (1, 2, 3)] == [has_text and k == i + 1 for k in (1, 2, 3)]
    assert np.max(labels_of_turns, 0).tolist() == labels
    assert sample(CHAT, tokenizer, assistant_turns="last")["labels"] == labels_of_turns[2]
    if template in SAME:
        plain = tokenizer_with(template.removesuffix("_training"))
        assert sample(CHAT, plain) == {"input_ids": stock["input_ids"], "labels": labels}


def test_a_template_that_rewrites_the_history_is_refused_with_the_turn():
    with pytest.raises(ValueError, match=r"renders `messages\[:2\]` in another way once `messages\[2\]` follows: '<th"):
        sample(CHAT, THINKING)
    assert trained_texts(sample(CHAT[:2], THINKING), THINKING) == ["<think>\n\n</think>\n\nA1<|im_end|>\n"]
    assert trained_texts(sample(CHAT, THINKING, assistant_turns="last"), THINKING)[0].endswith("A3<|im_end|>\n")
    other_tokenizer = build_tokenizer()
    head = "'<|im_start|>assistant\n'"
    other_tokenizer.chat_template = PLAIN.chat_template.replace(head, head[:-1] + "<think>'")
    message = r"ends the prompt of `messages\[1\]` with '<think>', and with this turn .*'A1"
    with pytest.raises(ValueError, match=message):
        sample(CHAT, other_tokenizer)
    other_tokenizer.chat_template = (  # marks the first answer only when it is the last
        "{% for m in messages %}{% if loop.first or loop.last %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(ValueError, match="marks other text in `messages"):
        sample(weighted(1, 0, 1), other_tokenizer)


def test_an_empty_thinking_of_the_template_can_be_left_untrained():
    for template in (None, (TEMPLATES / "qwen3_training.jinja").read_text()):
        for message, text_kept in (
            (answer("A1"), "A1<|im_end|>\n"),
            (answer("A1", reasoning_content="T"), "<think>\nT\n</think>\n\nA1<|im_end|>\n"),
        ):
            labelled = sample([user("Q"), message], THINKING, template, train_empty_thinking=False)
            unmasked = sample([user("Q"), message], THINKING, template)
            assert labelled["input_ids"] == unmasked["input_ids"]
            assert trained_texts(labelled, THINKING) == [text_kept]
            assert "<think>" in trained_texts(unmasked, THINKING)[0]


def test_an_empty_thinking_can_be_left_untrained_in_one_sample_per_turn():
    _, labels = Conversation.from_row({"messages": CHAT}).tokenize_turn(5, THINKING)
    assert "<think>" in trained_texts({"labels": labels}, THINKING)[0]
    TurnRule(train_empty_thinking=False).mask_thinking(labels, CHAT[5], THINKING)
    assert trained_texts({"labels": labels}, THINKING) == ["A3<|im_end|>\n"]


def test_a_weight_that_is_no_weight_is_refused():
    for weight in (0.5, "0", 2):
        with pytest.raises(ValueError, match=r"`messages\[1\]` has `weight: .*, which is neither 0 nor 1"):
            sample(weighted(weight, 1, 1), PLAIN)
    every = [f"A{k}<|im_end|>\n" for k in (1, 2, 3)]
    assert trained_texts(sample(weighted(0.5, 1, 0), PLAIN, message_train_key=None), PLAIN) == every


# Through the trainer


def chats(*rows):
    return Dataset.from_list([{"messages": row, "id": i} for i, row in enumerate(rows)])


ROWS = chats(CHAT, weighted(0, None, 1), weighted(None, None, 0), weighted(0, 0, 0))


@pytest.mark.parametrize("last", [False, True])
def test_packs_and_evaluation_have_the_same_labels(last, tmp_path):
    """Unpacked runs and streams have them, too (`samples/test_frozen.py`)."""
    expected = [by_hand(row["messages"], last) for row in ROWS]
    sets = {"table": ROWS, "stream": ROWS.to_iterable_dataset()}
    trainer = run_of(tmp_path, ROWS, eval_dataset=sets, assistant_turns="last" if last else "all")
    assert all_documents(trainer) == sorted((tokens, labels) for tokens, labels in expected if max(labels) >= 0)
    for dataset in trainer.eval_dataset.values():
        assert samples_of(dataset) == expected
    assert trainer.data.trained_summary.counts == AssistantTurnCounts(turns=12, context=5, earlier=5 if last else 0)


def test_the_report_and_an_unpacked_run_say_what_is_trained(tmp_path, capsys):
    trainer = run_of(tmp_path, ROWS, max_steps=1, packing_report=True)
    trainer.train()
    labels = [label for _, labels in all_documents(trainer) for label in labels]
    share = sum(label != -100 for label in labels) / len(labels)
    line = f"{share * 100:.1f} %: assistant turns (`assistant_only_loss`), 7 of 12; not trained: 5 with `weight` 0"
    assert dict(trainer.packing_report.lines())["trained tokens"] == line
    assert json.loads((tmp_path / "packing_report.json").read_text())["trained"]["counts"]["context"] == 5
    assert line in " ".join(capsys.readouterr().out.split())
    run_of(tmp_path, ROWS, max_steps=1, packing=False).train()
    assert f"Trained tokens: {line}" in capsys.readouterr().out
    plain = chats(CHAT, CHAT)  # the first token of a row is no target
    run_of(tmp_path, plain, max_steps=1, packing=False, assistant_only_loss=False).train()
    assert "Trained tokens: 98.7 %: every token; `assistant_only" in capsys.readouterr().out


def test_weights_that_would_not_be_read_are_refused(tmp_path):
    message = r"2 of 4 rows of the train dataset have messages with `weight` 0, which is not read.*`assistant_only_loss"
    data = chats(CHAT, weighted(1, 1, 1), weighted(0, 1, 1), weighted(0, 0, 0))
    with pytest.raises(ValueError, match=message):
        run_of(tmp_path, data, assistant_only_loss=False)
    run_of(tmp_path, data, message_train_key=None, assistant_only_loss=False)
    prompts = Dataset.from_list([{"prompt": weighted(0, 0, 1)[:5], "completion": CHAT[5:]}])
    assert len(all_documents(run_of(tmp_path, prompts, assistant_only_loss=False))) == 1


@pytest.mark.parametrize("settings", [{}, {"per_turn": True, "assistant_only_loss": False}], ids=str)
def test_weights_of_another_key_are_refused(settings, tmp_path):
    data = chats(CHAT, [CHAT[0], CHAT[1] | {"train": False}, *CHAT[2:]])
    message = "1 of 2 rows .* has messages with `train` 0, .*`message_train_key='weight'` reads another key.*Set"
    with pytest.raises(ValueError, match=message):
        run_of(tmp_path, data, **settings)
    run_of(tmp_path, data, message_train_key="train", **settings)


def test_texts_have_no_assistant(tmp_path):
    with pytest.raises(ValueError, match="`assistant_only_loss=True` was given, and the train dataset has the columns"):
        run_of(tmp_path, Dataset.from_dict({"text": ["a b c"]}))


def test_a_changed_mask_is_not_read_from_the_cache(tmp_path):
    chats(weighted(0, 1, 1, messages=weighted(1, 0, 1, key="train"))).save_to_disk(tmp_path / "data")
    data = load_from_disk(tmp_path / "data")
    cases = set()
    rules = [{}, {"assistant_turns": "last"}, {"message_train_key": "train"}, {"message_train_key": None}]
    for rule in [*rules, *rules]:
        trainer = run_of(tmp_path, data, shuffle_dataset=False, **rule)
        expected = [sample(row, PLAIN, **rule) for row in data["messages"]]
        assert [{key: row[key] for key in expected[0]} for row in trainer.train_dataset] == expected
        cases.add(json.dumps(expected))
    assert len(cases) == 4


# Images


def without_first_answers(folder, key):
    """Return conversations with images, of which the first answer has the weight 0; and the texts of the others."""
    data = vision.growing(3)
    messages = [[m | {key: int(k != 1)} for k, m in enumerate(row)] for row in data["messages"]]
    data.remove_columns("messages").add_column("messages", messages).save_to_disk(folder / "data")
    return load_from_disk(folder / "data"), [[m["content"][0]["text"] for m in row[3::2]] for row in messages]


def rows_of(trainer):
    reader = trainer.data.source.reader
    return [reader.read(i, 0, int(n))["labels"].tolist() for i, n in enumerate(reader.lengths)]


def joined(labels):
    return "".join(trained_texts({"labels": labels}, CHATML))


@needs("images")
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_turns_of_rows_with_images(family, tmp_path):
    """Answers of a conversation are trained, or not, around the placeholders of images; packed and unpacked."""
    data, expected = without_first_answers(tmp_path, "train")
    settings = {"dataset": data, "max_length": 4000, "assistant_only_loss": True, "message_train_key": "train"}
    trainer = vision.make(tmp_path, family, **settings)
    rows = rows_of(trainer)
    for labels, texts in zip(rows, expected, strict=True):
        text_found = joined(labels)
        assert [text in text_found for text in texts] == [True] * len(texts)
        assert "turn" not in text_found
        assert text_found.count("then") == len(texts)
    unpacked = vision.make(tmp_path, family, packing=False, **settings | {"max_length": None})
    batch = unpacked.data_collator([data[i] for i in range(len(data))])
    for i, labels in enumerate(rows):
        assert batch["labels"][i][batch["attention_mask"][i].bool()].tolist() == labels
    assert trainer.data.trained_summary.counts == AssistantTurnCounts(turns=18, context=9, earlier=0)
    # Reads no `train`, nor the cache
    every = vision.make(tmp_path, family, **settings | {"message_train_key": None})
    assert every.data.source.documents.trained.sum() > trainer.data.source.documents.trained.sum()


@needs("images")
@pytest.mark.parametrize("last", [False, True])
def test_samples_of_rows_with_images_are_of_the_trained_turns(last, tmp_path):
    """Under `per_turn` a turn of weight 0, or an earlier one, makes no sample and is context of the other turns."""
    data, expected = without_first_answers(tmp_path, "weight")
    expected = [texts[-1:] if last else texts for texts in expected]
    settings = {"max_length": 4000, "per_turn": True, "assistant_turns": "last" if last else "all"}
    trainer = vision.make(tmp_path, "llava", data, **settings)
    trained = list(filter(None, map(joined, rows_of(trainer))))
    assert [text.count("then") for text in trained] == [1] * sum(map(len, expected))
    assert all(want in got for want, got in zip(sum(expected, []), trained, strict=True))
    assert trainer.data.turn_counts.left_out == 18 - sum(map(len, expected)) > 0
    assert trainer.data.turn_counts.without_turn == sum(not texts for texts in expected) == 3


@needs("images")
def test_labels_of_rows_with_images_are_those_of_trl(tmp_path):
    """TRL's collator and ours on a template with markers, and ours turn by turn without them, must agree."""
    marked, plain = (vision.build_processor("qwen2_5_vl") for _ in range(2))
    parts = re.fullmatch(r"(?s)(.*?\}\}\n)(.*<\|im_end\|>\\n' \}\})(\{% endfor.*)", plain.chat_template)
    head, body, tail = parts.groups()
    body = body.replace("{%- if", "{% if", 1)
    answer = "{%- if message['role'] == 'assistant' %}{% generation %}" + body + "{% endgeneration %}{% else %}"
    marked.chat_template = head + answer + body + "{% endif %}" + tail
    data = vision.growing(3)
    batches = []
    stock = {"trainer_class": trl.SFTTrainer, "config_class": trl.SFTConfig, "processor": marked}
    for how in (stock, {"processor": marked}, {"processor": plain}):
        settings = {"packing": False, "max_length": None, "assistant_only_loss": True} | how
        trainer = vision.make(tmp_path, dataset=data, **settings)
        batches.append(trainer.data_collator([data[i] for i in range(len(data))]))
    assert (batches[0]["labels"] != -100).sum() > 100
    for batch, name in itertools.product(batches[1:], ("input_ids", "labels")):
        assert batch[name].equal(batches[0][name])
