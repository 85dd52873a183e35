"""Chat data of today through the trainer: tools, reasoning, roles of ShareGPT, fields that templates leave out."""

import json

import numpy as np
import pytest
import trl
from datasets import Dataset, Features, IterableDataset, Json, List
from support.chats import tokenizer_with
from support.models import build_tokenizer
from support.runs import all_documents, build_trainer, documents_of_rows, samples_of, stock

from trl_packfix import SFTTrainer
from trl_packfix.samples.data_proof import prove_data
from trl_packfix.samples.rendering import Rendering

pytestmark = pytest.mark.slow

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds", "parameters": PARAMETERS}}]


def agent_trace(first, second, third):
    """Return a question, a call, its result, an answer, and another turn, whose answer has reasoning."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": first, "b": second}}}
    thought = f"REASON {first + second} plus {third}"
    return [
        {"role": "system", "content": "You add."},
        {"role": "user", "content": f"What is {first} and {second}?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": f"RESULT {first + second}"},
        {"role": "assistant", "content": f"It is {first + second}."},
        {"role": "user", "content": f"And with {third}?"},
        {"role": "assistant", "reasoning_content": thought, "content": f"Then {first + second + third}!"},
    ]


def traces():
    rng = np.random.default_rng(0)
    return Dataset.from_list(
        [{"messages": agent_trace(*map(int, row)), "tools": json.dumps(TOOLS)} for row in rng.integers(0, 999, (9, 3))]
    )


# Whether these words of a trace are trained
OF_TRACES = dict.fromkeys(("add", "It is", "REASON", "Then"), True)
OF_TRACES |= dict.fromkeys(("What is", "RESULT", "You add"), False)


@pytest.mark.parametrize("template", ["qwen3", "qwen3_6"])
def test_agent_traces_train_on_what_the_assistant_says(template, tmp_path):
    """Templates as models ship them have no generation markers; TRL brings its own for training."""
    tokenizer = tokenizer_with(template)
    assert "generation %}" not in tokenizer.chat_template
    settings = {"max_length": 1500, "assistant_only_loss": True, "num_train_epochs": 1}
    trainer = build_trainer(tmp_path, traces(), processing_class=tokenizer, **settings)
    packed = all_documents(trainer)
    assert packed == documents_of_rows(stock(tmp_path, traces(), processing_class=tokenizer, **settings).train_dataset)
    assert len(packed) == 9
    for tokens, labels in packed:
        text = tokenizer.decode([token for token in labels if token != -100])
        for words, is_trained in OF_TRACES.items():
            assert (words in text) is is_trained, words
            assert words in tokenizer.decode(tokens)


# What other libraries say


def thinking_prompts(name):
    """Return rows whose prompt does not begin the conversation: Qwen3 drops its thought before the next question."""
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    rows = []
    for i in range(5):
        prompt[1] = prompt[1] | {"reasoning_content": f"T{name}{i}"}
        completion = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        rows.append({"prompt": [*prompt, {"role": "tool", "content": "b"}], "completion": completion})
    return Dataset.from_list(rows)


@pytest.mark.parametrize("bad_rows", ["raise", "drop"])
def test_warnings_of_trl_about_every_row_are_counted(bad_rows, tmp_path, caplog):
    options = {"packing": False, "max_length": 500, "max_steps": 1, "bad_rows": bad_rows}
    options["processing_class"] = tokenizer_with("qwen3")

    def warnings_of(data, trainer_class=SFTTrainer):
        caplog.clear()
        trainer = build_trainer(tmp_path, data, trainer_class=trainer_class, **options)
        assert len(list(trainer.train_dataset)) == 5
        return [message for message in map(str, caplog.messages) if "tokenized prompt is not a pre" in message]

    assert (
        len(warnings_of(thinking_prompts("stock" + bad_rows), trl.SFTTrainer)) == 5
    )  # TRL shows each text once in a process
    first, *more = warnings_of(thinking_prompts("table" + bad_rows))
    assert "is not a prefix of" in first
    assert [message[:39] for message in more] == ["4 more warnings of TRL about the train "]
    num_passes = 2  # of which TRL's own reads one row; a stream counts in each
    assert len(warnings_of(thinking_prompts("stream" + bad_rows).to_iterable_dataset())) == num_passes


# Roles of ShareGPT

KEYS = ("from", "value")


def sharegpt(num=6, roles=("human", "gpt"), keys=KEYS):
    """Return rows of one to three rounds; every third has the roles `user` and `assistant` already."""
    rows = []
    for i in range(num):
        asks, answers = roles if i % 3 else ("user", "assistant")
        turns = [(asks, f"q{i}{k}") if k % 2 == 0 else (answers, f"a{i}{k}") for k in range(2 + 2 * (i % 3))]
        rows.append({"conversations": [dict(zip(keys, turn, strict=True)) for turn in turns]})
    return rows


def tables(rows):
    """Yield the rows as a table of structs, of JSON (which `load_dataset` makes of uneven rows), and streamed."""
    table = Dataset.from_list(rows)
    yield table
    yield Dataset.from_list(rows, features=Features({"conversations": List(Json())}))
    yield table.to_iterable_dataset()


def test_roles_of_sharegpt_are_renamed_as_their_keys_are(tmp_path, caplog):
    settings = {"packing": False, "max_length": 200, "max_steps": 1}
    plain = Dataset.from_list(sharegpt(roles=("user", "assistant"), keys=("role", "content")))
    expected = samples_of(
        build_trainer(tmp_path, plain.rename_column("conversations", "messages"), **settings).train_dataset
    )
    plain_trl = build_trainer(tmp_path, Dataset.from_list(sharegpt()), trainer_class=trl.SFTTrainer, **settings)
    assert "<|im_start|>human" in build_tokenizer().decode(samples_of(plain_trl.train_dataset)[1][0])
    assert "renamed" not in caplog.text
    for table in tables(sharegpt()):
        trainer = build_trainer(tmp_path, table, **settings)
        assert samples_of(trainer.train_dataset) == expected
        assert (
            "4 rows have the roles `human` or `gpt` in `conversations`, which are renamed"
            in trainer.data.data_report.line()
        )
    thought = {"from": "assistant", "value": "s", "reasoning_content": "t"}
    conversations = [{"conversations": [*row["conversations"], thought]} for row in sharegpt()]
    text_before = json.dumps(conversations)
    stream = IterableDataset.from_generator(lambda: iter(conversations))  # yields objects of the user
    prove_data(stream, "train", Rendering(build_tokenizer(), per_turn=True))
    assert json.dumps(conversations) == text_before


def test_roles_that_the_template_does_not_know_are_said(tmp_path, caplog):
    rows = Dataset.from_list([{"messages": row["conversations"]} for row in sharegpt(keys=("role", "content"))])
    build_trainer(tmp_path, rows, packing=False, max_length=200)
    for role in ("human", "gpt"):
        warning = f"4 of 6 rows of the train dataset have the role `{role}`, which the chat template renders as it"
        assert warning in caplog.text
    known = build_tokenizer()
    head = "{{ '[Q]' if m.role in ('user', 'human') else '[A]' }}"
    known.chat_template = f"{{% for m in messages %}}{head}{{{{ m.content }}}}{{% endfor %}}"
    caplog.clear()
    build_trainer(tmp_path, rows, processing_class=known, max_length=200, packing=False)
    assert "have the role" not in caplog.text
