"""One sample per assistant turn: what generation sees at each turn, the turn after it, and nothing twice."""

import json
import re
from itertools import islice

import numpy as np
import pytest
import trl
from datasets import Dataset, IterableDataset, load_from_disk
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support.chats import TEMPLATES, tokenizer_with, user
from support.chats import answer as spoken
from support.models import build_tiny_model, build_tokenizer
from support.paths import ROOT
from support.runs import all_documents, build_trainer, config, documents_of, samples_of

from trl_packfix.cli import main
from trl_packfix.samples.conversation import Conversation
from trl_packfix.samples.dataset_warnings import find_end_without_token
from trl_packfix.samples.turns import TurnRule

pytestmark = pytest.mark.slow

TOOLS = json.dumps([{"type": "function", "function": {"name": "add", "description": "Adds", "parameters": {}}}])
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


TOKENIZERS = {name: tokenizer_with(name) for name in ("qwen3", "qwen3_6", "gptoss")}
CHATML = build_tokenizer()


def answer(text, thinking=None):
    return spoken(text) if thinking is None else spoken(text, reasoning_content=thinking)


def chat(num_turns, name="", thinks=True):
    """Return thought k and answer k of each turn, as T1., A1., ... with the name of the conversation."""
    messages = []
    for k in range(1, num_turns + 1):
        messages += [user(f"{name}Q{k}."), answer(f"{name}A{k}.", f"{name}T{k}." if thinks else None)]
    return messages


def chats(num=10, **kwargs):
    sizes = np.random.default_rng(0).integers(1, 5, num)
    return Dataset.from_list(
        [{"messages": chat(int(size), f"c{i}", **kwargs), "id": i} for i, size in enumerate(sizes)]
    )


def turns_of(data):
    return [(row, k) for row in data for k, message in enumerate(row["messages"]) if message["role"] == "assistant"]


def by_hand(row, k, tokenizer):
    """Return (tokens, labels) of a turn: the prompt that generation gets, and the rest of the rendered conversation."""
    messages = [{key: v for key, v in message.items() if v is not None} for message in row["messages"]]
    prompt = tokenizer.apply_chat_template(messages[:k], add_generation_prompt=True, return_dict=False)
    tokens = tokenizer.apply_chat_template(messages[: k + 1], return_dict=False)
    assert tokens[: len(prompt)] == prompt
    assert len(tokens) > len(prompt)
    return tokens, [-100] * len(prompt) + tokens[len(prompt) :]


@st.composite
def conversations(draw):
    """Draw rounds of a question, up to three tool calls with their results, and an answer; each turn may think."""
    messages = [{"role": "system", "content": "SYS"}] if draw(st.booleans()) else []
    for number in range(draw(st.integers(1, 4))):
        messages.append(user(f"Q{number}."))
        for _ in range(draw(st.integers(0, 3))):
            thinking = f"<T{len(messages)}>" if draw(st.booleans()) else None
            messages += [answer("", thinking) | {"tool_calls": [CALL]}, {"role": "tool", "name": "add", "content": "R"}]
        if draw(st.booleans()) or number == 0:
            messages.append(answer(f"<A{len(messages)}>", f"<T{len(messages)}>" if draw(st.booleans()) else None))
        else:
            break  # without an answer, only at its end
    return messages


ENDS = {"qwen3": "<|im_end|>\n", "qwen3_6": "<|im_end|>\n", "gptoss": ("<|call|>", "<|return|>")}


@pytest.mark.parametrize("template", ENDS)
@hypothesis_settings(max_examples=40)
@given(messages=conversations())
def test_each_turn_is_one_sample_with_the_prompt_that_generation_sees(template, messages):
    tokenizer = TOKENIZERS[template]
    conversation = Conversation.from_row({"messages": messages, "tools": TOOLS})
    assert conversation.turns == [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for turn in conversation.turns:
        tokens, labels = conversation.tokenize_turn(turn, tokenizer)
        trained = [token for token in labels if token != -100]
        first = len(labels) - len(trained)
        prompt = tokenizer.apply_chat_template(
            messages[:turn], tools=json.loads(TOOLS), add_generation_prompt=True, return_dict=False
        )
        assert tokens[:first] == prompt
        assert tokens[first:] == trained
        said = tokenizer.decode(trained)
        for mark in ("A", "T"):  # of this turn and of no other
            marks = [f"<{mark}{i}>" for i in conversation.turns if f"<{mark}{i}>" in said]
            assert marks == [f"<{mark}{turn}>"] * (f"<{mark}{turn}>" in json.dumps(messages[turn]))
        assert said.endswith(ENDS[template])
        assert "Q" not in said


@pytest.fixture(scope="module")
def rows_of_trl(tmp_path_factory):
    """Return TRL's own preparation of rows with a prompt and a completion, as a function of them and of a tokenizer."""
    args = config(tmp_path_factory.mktemp("trl"), packing=False, max_length=None)
    row = {"prompt": [user("a")], "completion": [answer("b")]}
    stock = trl.SFTTrainer(build_tiny_model(), args, train_dataset=Dataset.from_list([row]), processing_class=CHATML)
    return lambda rows, tokenizer: samples_of(
        stock._prepare_dataset(Dataset.from_list(rows), tokenizer, args, False, None, "train")
    )


@pytest.mark.parametrize("template", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_samples_are_rows_of_trl_wherever_the_prompt_is_their_beginning(template, rows_of_trl, caplog):
    """A sample must be TRL's row with every template of TRL and with thinking, or the prompt is not its beginning."""
    tokenizer = tokenizer_with(template)
    messages = chat(3)
    conversation = Conversation.from_row({"messages": messages})
    rows = [{"prompt": messages[:k], "completion": [messages[k]]} for k in conversation.turns]
    ours = []
    problems = []
    for turn in conversation.turns:
        try:
            ours.append(conversation.tokenize_turn(turn, tokenizer))
        except Exception as error:
            problems.append(error)
    if problems:
        assert not ours, "a template renders all turns of this conversation alike"
        assert all("the template ends the prompt of" in str(error) for error in problems) or template.startswith(
            "llava"
        )
        return
    assert rows_of_trl(rows, tokenizer) == ours
    assert len(ours) == 3
    assert "is not a prefix" not in caplog.text


# Once an answer is there, the thoughts of the calls before it are rendered as empty (Kimi-K2-Thinking) or not at all,
# and an assistant's block stays open over its tools (Apertus).
LAST = """{%- set last = namespace(answer=-1, is_open=false) %}{% for m in messages %}
{%- if m.role == 'assistant' and not m.tool_calls %}{% set last.answer = loop.index0 %}{% endif %}{% endfor %}
"""
EMPTIED = (
    LAST
    + """{%- for m in messages %}<{{ m.role }}>
{%- if m.role == 'assistant' %}<think>{{ m.reasoning_content if loop.index0 > last.answer }}</think>{% endif %}
{{- m.content }}{{ m.tool_calls | tojson if m.tool_calls }}<end>
{%- endfor %}{{ '<assistant>' if add_generation_prompt }}"""
)
OPEN = (
    LAST
    + """{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<assistant>' if not last.is_open }}{% set last.is_open = true %}
{{- '<inner>' ~ m.reasoning_content ~ '</inner>' if loop.last or loop.index0 > last.answer }}
{{- m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}<end>{% set last.is_open = false %}{% endif %}
{%- elif m.role == 'tool' %}[{{ m.content | trim }}]
{%- else %}<user>{{ m.content }}<end>{% endif %}
{%- endfor %}{{ '<assistant>' if add_generation_prompt and not last.is_open }}"""
)


@pytest.mark.parametrize("template", ["gptoss", EMPTIED, OPEN], ids=["gptoss", "emptied", "open"])
def test_a_turn_follows_its_prompt_where_the_template_drops_thoughts_of_the_history(template):
    """The prompt must be, to the token, what generation sees; what follows is the turn as the template renders it."""
    tokenizer = tokenizer_with("gptoss")
    tokenizer.chat_template = tokenizer.chat_template if template == "gptoss" else template
    call = answer("", "<T2>") | {"tool_calls": [CALL]}
    result = {"role": "tool", "name": "add", "content": "R \n"}
    messages = [user("Q1"), call, result, answer("", "<T4>") | {"tool_calls": [CALL]}, result, answer("A6", "<T6>")]
    messages += [user("Q7"), answer("A8", "<T8>")]
    conversation = Conversation.from_row({"messages": messages, "tools": TOOLS})
    num_changed = 0
    texts = {}
    for turn in conversation.turns:
        given = {"tools": json.loads(TOOLS), "tokenize": False}
        prompt = tokenizer.apply_chat_template(messages[:turn], add_generation_prompt=True, **given)
        whole = tokenizer.apply_chat_template(messages[: turn + 1], **given)
        num_changed += not whole.startswith(prompt)
        tokens, labels = conversation.tokenize_turn(turn, tokenizer)
        texts[turn] = tokenizer.decode([token for token in labels if token != -100])
        assert tokenizer.decode(tokens) == prompt + texts[turn]
        assert whole.endswith(texts[turn])
    assert num_changed == 1
    assert "<T4>" not in whole
    assert ["<T2>" in texts[1], "<T4>" in texts[3], "A6" in texts[5], "A8" in texts[7]] == [True] * 4
    assert all("Q" not in text and "R" not in text and text.count("<T") <= 1 for text in texts.values())
    if template != EMPTIED:  # which renders an answer without its thought, too
        assert "<T6>" in texts[5]
        assert "<T8>" in texts[7]


def test_a_greeting_is_a_turn_with_an_empty_prompt():
    greeting = Conversation.from_row({"messages": [answer("hello"), *chat(1)]})
    assert greeting.turns == [0, 2]
    tokens, _ = greeting.tokenize_turn(0, CHATML)
    assert CHATML.decode(tokens) == "<|im_start|>assistant\nhello<|im_end|>\n"


def test_a_turn_that_thinks_although_its_prompt_says_that_it_does_not_is_refused():
    row = {"messages": chat(2), "chat_template_kwargs": {"enable_thinking": False}}
    with pytest.raises(ValueError, match=r"the prompt of `messages\[3\]` with .*continues with .*T2"):
        Conversation.from_row(row).tokenize_turn(3, TOKENIZERS["qwen3"])


def run_per_turn(folder, data, template="qwen3", **settings):
    settings = {"max_length": 512, "per_turn": True, "processing_class": tokenizer_with(template)} | settings
    return build_trainer(folder, data, **settings)


def test_training_and_evaluation_have_each_turn_once(tmp_path):
    data = chats()
    expected = [by_hand(row, k, TOKENIZERS["qwen3"]) for row, k in turns_of(data)]
    assert len(expected) > len(data) + 5
    silent = {"messages": [user("only a question")], "id": 99}
    sets = {"table": data, "stream": data.to_iterable_dataset()}
    trainer = run_per_turn(tmp_path, Dataset.from_list([*data.to_list(), silent]), eval_dataset=sets)
    assert samples_of(trainer.eval_dataset["table"]) == samples_of(trainer.eval_dataset["stream"]) == expected
    assert trainer.train_dataset["id"][: len(expected)] == [row["id"] for row, _ in turns_of(data)]
    assert all_documents(trainer) == sorted(expected)
    report = trainer.packing_report
    assert report.ledger.given.documents == len(expected) + 1
    assert report.ledger.kept.documents == len(expected)
    assert report.ledger.dropped["untrained"].documents == 1
    assert report.ledger.dropped["untrained"].tokens > 20
    assert dict(report.lines())["conversations"] == (
        f"11, one document for each of their {len(expected)} assistant turns; 1 without an assistant turn"
    )
    assert report.to_dict()["turns"]["samples"] == len(expected)
    assert trainer.evaluate(data, metric_key_prefix="new")["new_loss"] == trainer.evaluate(sets)["eval_table_loss"]
    with pytest.raises(ValueError, match=r"per_turn=True.*the eval dataset has the columns \['text'\]"):
        trainer.evaluate(Dataset.from_dict({"text": ["a"]}))


def test_without_stripping_it_trains_the_answers_of_assistant_only_loss_and_says_so(tmp_path, caplog):
    data = chats(6, thinks=False)
    trainer = run_per_turn(tmp_path, data, template=None, packing=False)
    assert "of the first 6 conversations of the train dataset" in caplog.text
    caplog.clear()
    unsplit = run_per_turn(tmp_path, data, template=None, packing=False, per_turn=False, assistant_only_loss=True)
    run_per_turn(tmp_path, chats(6), packing=False)
    assert "renders each turn as the beginning" not in caplog.text
    turns = [[token for token in labels if token != -100] for _, labels in samples_of(trainer.train_dataset)]
    newline = CHATML("\n")["input_ids"]  # the template has it behind the turn, outside its generation markers
    assert all(turn[-1:] == newline for turn in turns)
    answers = [token for turn in turns for token in turn[:-1]]
    assert answers == [token for _, labels in samples_of(unsplit.train_dataset) for token in labels if token != -100]
    assert len(answers) > 50


@pytest.mark.parametrize("is_stream", [False, True])
def test_turns_without_an_end_are_said(is_stream, tmp_path, caplog):
    """GLM renders what ends a turn in front of the next message; the template that TRL trains with does not."""
    silent = Dataset.from_list([{"messages": [user("only a question")]}])
    data = Dataset.from_list([*silent.to_list(), *chats(3).remove_columns("id").to_list()])
    data = data.to_iterable_dataset() if is_stream else data
    for template, is_said in (("glm4moe", True), ("glm4moe_training", False), ("qwen3", False)):
        tokenizer = tokenizer_with(template)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
        caplog.clear()
        run_per_turn(tmp_path, data, processing_class=tokenizer, max_steps=1)
        assert ("without an end-of-turn token: one ends in '" in caplog.text) == is_said
        assert ("</think>\\nc0A1.'" in caplog.text) == is_said


def test_only_special_tokens_end_a_turn():
    """`</tool_call>` is an added token, and a template may end answers and not calls."""
    tokenizer = tokenizer_with("qwen3")
    tokenizer.add_tokens(["</tool_call>"])
    call = tokenizer("weather</tool_call>")["input_ids"]
    assert find_end_without_token(call, tokenizer) == "weather</tool_call>"
    assert find_end_without_token([*call, tokenizer.eos_token_id], tokenizer) is None


def test_one_condition_makes_the_template_of_deepseek_r1_keep_the_thoughts_of_the_last_turn():
    """The change that docs/per_turn.md names must keep the thoughts of the last turn."""
    if not (TEMPLATES / "deepseek_r1_distill.jinja").exists():
        pytest.skip("this version of TRL does not have the template")
    page = (ROOT / "docs" / "per_turn.md").read_text()
    before, after = re.findall(r"`({% if '</think>' in content.*?%})`", page)
    tokenizer = tokenizer_with("deepseek_r1_distill")
    messages = chat(2, thinks=False)
    for k in (1, 3):
        messages[k]["content"] = f"<think>\nT{k // 2 + 1}.\n</think>\n\n{messages[k]['content']}"
    conversation = Conversation.from_row({"messages": messages})
    with pytest.raises(ValueError, match=r"the prompt of `messages\[1\]` with '<think>"):
        conversation.tokenize_turn(1, tokenizer)
    assert tokenizer.chat_template.count(before) == 1
    tokenizer.chat_template = tokenizer.chat_template.replace(before, after)
    texts = [tokenizer.decode(conversation.tokenize_turn(turn, tokenizer)[0]) for turn in conversation.turns]
    assert "T1." in texts[0]
    assert "T1." not in texts[1]
    assert "A1." in texts[1]
    assert "T2." in texts[1]


BAD = [user("x"), answer("<think>\nthoughts\n</think>\n\nno"), user("y"), answer("yes")]


def rows_with_bad(num=8):
    """Return rows; in rows 2 and 5 the first turn thinks, although `enable_thinking` is False for all."""
    rows = chats(num, thinks=False).to_list()
    rows[2]["messages"] = rows[5]["messages"] = BAD
    for row in rows:
        row["messages"] = [{"role": m["role"], "content": m["content"]} for m in row["messages"]]
        row["chat_template_kwargs"] = {"enable_thinking": False}
    return rows


def test_a_turn_after_another_prompt_is_named_or_dropped(tmp_path, caplog):
    data = Dataset.from_list(rows_with_bad())
    said = r"2 of 8 rows of the {} dataset cannot be tokenised; the first are \[2, 5\]\. Row 2: .*`messages\[1\]`"
    with pytest.raises(ValueError, match=said.format("train")):
        run_per_turn(tmp_path, data)
    good = data.select([0, 1, 3])
    with pytest.raises(ValueError, match=said.format("eval")):
        run_per_turn(tmp_path, good, eval_dataset=data)
    trainer = run_per_turn(tmp_path, data, bad_rows="drop")
    assert "2 turns in 2 of 8 conversations of the train dataset cannot be rendered and are dropped" in caplog.text
    trainer.get_train_dataloader()
    report = trainer.packing_report
    assert report.ledger.dropped["bad_row"].documents == 2
    assert report.ledger.kept.documents == len(turns_of(data)) - 2
    assert "2 turns cannot be rendered" in dict(report.lines())["conversations"]


@pytest.mark.slow
def test_streams_are_split_while_they_are_read(tmp_path):
    read = []

    def rows():
        for row in chats(150).to_list():
            read.append(row["id"])
            yield row

    trainer = run_per_turn(tmp_path, IterableDataset.from_generator(rows), max_steps=4, per_device_train_batch_size=1)
    assert max(read) < 100, "more of a stream is read before training than its data are proved by"
    batches = [documents_of(batch) for batch in islice(trainer.get_train_dataloader(), 3)]
    expected = [by_hand(row, k, TOKENIZERS["qwen3"]) for row, k in turns_of(chats(150))]
    assert all(document in expected for batch in batches for document in batch)
    assert sum(map(len, batches)) > 4


MESSAGES = Dataset.from_list([{"messages": chat(1)}] * 2)
TEXT = Dataset.from_dict({"text": ["a"]})
PAIR = Dataset.from_dict({"prompt": ["a"], "completion": ["b"]})
FOREIGN = Dataset.from_list([{"messages": [{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}]}])
# Settings that go with no turns are in `training/test_combinations.py`
WITHOUT_TURNS = {
    "text": (TEXT, {}, r"train dataset has the columns \['text'\].*no conversations.*Give"),
    "text to evaluate": (MESSAGES, {"eval_dataset": TEXT}, r"the eval dataset has the columns \['text'\]"),
    "prompts of text": (PAIR, {}, "Its rows are no conversations"),
    "prompts alone": (Dataset.from_dict({"prompt": [chat(1)]}), {}, "Its rows are no conversations"),
    "tokens": (Dataset.from_dict({"input_ids": [[5, 6]]}), {}, "it is tokenised.*Give the conversations.*--per-turn"),
    "roles": (
        FOREIGN,
        {},
        r"none of the 1 .* role `assistant` to train \(roles of row 0: gpt, human\).*Rename",
    ),
}


@pytest.mark.parametrize("data, settings, message", WITHOUT_TURNS.values(), ids=WITHOUT_TURNS)
def test_what_has_no_turns_is_refused(data, settings, message, tmp_path):
    with pytest.raises(ValueError, match=f"(?s)`per_turn=True`.*{message}"):
        build_trainer(tmp_path, data, per_turn=True, **settings)


def test_prepare_counts_conversations_and_turns(tmp_path, capsys):
    tokenizer_with("qwen3").save_pretrained(tmp_path / "tokenizer")
    good = chats()
    Dataset.from_list([*good, {"messages": [user("only a question")], "id": 99}]).to_json(tmp_path / "good.jsonl")
    Dataset.from_list(rows_with_bad()).to_json(tmp_path / "bad.jsonl")
    expected = [by_hand(row, k, TOKENIZERS["qwen3"]) for row, k in turns_of(good)]
    num_rows = len(expected) + len(turns_of(rows_with_bad())) - 2
    words = [str(tmp_path / "good.jsonl"), str(tmp_path / "bad.jsonl"), "--tokenizer", str(tmp_path / "tokenizer")]
    assert main(["prepare", *words, "--per-turn", "--bad-rows=drop", "--output", str(tmp_path / "table")]) == 0
    printed = capsys.readouterr()
    assert f"11, one document for each of their {len(expected)} assistant turns; 1 without an" in printed.err
    assert f"19 conversations, one row for each of their {num_rows} assistant turns; 1 without" in printed.out
    manifest = json.loads((tmp_path / "table" / "prepared.json").read_text())
    assert manifest["conversations"] == 19
    assert manifest["rows"] == num_rows + 1
    assert manifest["settings"]["per_turn"]
    assert manifest["documents_without_a_trained_token"] == 1
    assert manifest["bad_rows_dropped"] == 2
    table = load_from_disk(tmp_path / "table")
    assert table.column_names == ["input_ids", "labels"]
    assert samples_of(table)[: len(expected)] == expected


def test_turns_of_a_file_of_lengths_are_not_known(tmp_path, capsys):
    (tmp_path / "lengths.txt").write_text("5\n6\n")
    assert main(["plan", str(tmp_path / "lengths.txt"), "--per-turn"]) == 2
    assert "a file of 2 lengths. The turns of a conversation are not known" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, content, untrained",
    [
        ("<think>\n\n</think>\n\nyes", "yes", "<think>\n\n</think>\n\n"),
        ("<think>\n\n</think>\n\n  yes", "  yes", "<think>\n\n</think>\n\n"),  # its own spaces are trained
        ("<think>\n\n</think>\n\nSay: yes", "yes", "<think>\n\n</think>\n\n"),  # what the template adds is trained
        ("<think>\n\n</think>\n\n<tool_call>", "", "<think>\n\n</think>\n\n"),
        ("<think>\n\n</think>\n\nthink", "think", "<think>\n\n</think>\n\n"),  # the answer is a part of the block
        ("</think>\n\n>", ">", "</think>\n\n"),
        ("<think>\n\n</think>\n\nyes", "<think>\n\n</think>\n\nyes", ""),  # the user's own block
        ("yes</think>", "yes</think>", ""),
    ],
)
def test_an_empty_thinking_block_ends_where_the_template_or_the_answer_goes_on(text, content, untrained):
    start, stop = TurnRule(train_empty_thinking=False).without_thinking(text, (0, len(text)), spoken(content))
    assert text[:start] == untrained
    assert stop == len(text)
    assert TurnRule().without_thinking(text, (0, len(text)), spoken(content)) == (0, len(text))
