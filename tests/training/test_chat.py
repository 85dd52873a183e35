"""Chat data of today through the trainer: tools, reasoning, roles of ShareGPT, fields that templates leave out."""

import itertools
import json

import numpy as np
import pytest
import trl
from datasets import Dataset, Features, IterableDataset, Json, List
from support.chats import tokenizer_with
from support.models import build_tokenizer
from support.runs import all_documents, build_trainer, stock

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


@pytest.mark.parametrize("template", ["qwen3", "qwen3_6"])
def test_agent_traces_train_on_what_the_assistant_says(template, tmp_path):
    """Templates as models ship them have no generation markers; TRL brings its own for training."""
    tokenizer = tokenizer_with(template)
    assert "generation %}" not in tokenizer.chat_template
    settings = {"max_length": 1500, "assistant_only_loss": True, "num_train_epochs": 1}
    trainer = build_trainer(tmp_path, traces(), processing_class=tokenizer, **settings)
    rows = stock(tmp_path, traces(), processing_class=tokenizer, **settings).train_dataset
    packed = all_documents(trainer)
    unpacked = [(list(row["input_ids"]), [-100, *row["labels"][1:]]) for row in rows]
    assert packed == sorted(unpacked)
    assert len(packed) == 9
    for tokens, labels in packed:
        trained = tokenizer.decode([token for token in labels if token != -100])
        assert "add" in trained
        assert "It is" in trained
        assert "REASON" in trained
        assert "Then" in trained
        assert "What is" not in trained
        assert "RESULT" not in trained
        assert "You add" not in trained
        assert "RESULT" in tokenizer.decode(tokens)


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
    assert [each[:39] for each in more] == ["4 more warnings of TRL about the train "]
    num_passes = 2  # of which TRL's own reads one row; a stream counts in each
    assert len(warnings_of(thinking_prompts("stream" + bad_rows).to_iterable_dataset())) == num_passes


# Roles of ShareGPT, and fields that a template leaves out

KEYS = ("from", "value")
FIELDS = ("reasoning_content", "tool_calls")


def sharegpt(num=6, roles=("human", "gpt"), keys=KEYS):
    """Return rows of one to three rounds; every third has the roles `user` and `assistant` already."""
    rows = []
    for i in range(num):
        asks, answers = roles if i % 3 else ("user", "assistant")
        turns = [(asks, f"q{i}{k}") if k % 2 == 0 else (answers, f"a{i}{k}") for k in range(2 + 2 * (i % 3))]
        rows.append({"conversations": [dict(zip(keys, turn, strict=True)) for turn in turns]})
    return rows


def tables(rows, column):
    """Yield the rows as a table of structs, of JSON (which `load_dataset` makes of uneven rows), and streamed."""
    table = Dataset.from_list(rows)
    yield table
    yield Dataset.from_list(rows, features=Features({**table.features, column: List(Json())}))
    yield table.to_iterable_dataset()


def rows_of(trainer):
    return [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]


def test_roles_of_sharegpt_are_renamed_as_their_keys_are(tmp_path, caplog):
    settings = {"packing": False, "max_length": 200, "max_steps": 1}
    plain = Dataset.from_list(sharegpt(roles=("user", "assistant"), keys=("role", "content")))
    expected = rows_of(build_trainer(tmp_path, plain.rename_column("conversations", "messages"), **settings))
    plain_trl = build_trainer(tmp_path, Dataset.from_list(sharegpt()), trainer_class=trl.SFTTrainer, **settings)
    assert "<|im_start|>human" in build_tokenizer().decode(rows_of(plain_trl)[1][0])
    assert "renamed" not in caplog.text
    for table in tables(sharegpt(), "conversations"):
        trainer = build_trainer(tmp_path, table, **settings)
        assert rows_of(trainer) == expected
        assert (
            "4 rows have the roles `human` or `gpt` in `conversations`, which are renamed"
            in trainer.data.data_report.line()
        )
        turns = build_trainer(tmp_path, table, per_turn=True, **settings)
        assert sum(max(labels) >= 0 for _, labels in rows_of(turns)) == 12
    thought = {"from": "assistant", "value": "s", "reasoning_content": "t"}
    conversations = [{"conversations": [*row["conversations"], thought]} for row in sharegpt()]
    text_before = json.dumps(conversations)
    stream = IterableDataset.from_generator(lambda: iter(conversations))  # yields objects of the user
    prove_data(stream, "train", Rendering(build_tokenizer(), per_turn=True))
    assert json.dumps(conversations) == text_before
    caplog.clear()
    bad = [*sharegpt(), {"conversations": None}, {"conversations": [None]}]
    assert rows_of(build_trainer(tmp_path, Dataset.from_list(bad), bad_rows="drop", **settings)) == expected


def test_roles_that_the_template_does_not_know_are_said(tmp_path, caplog):
    rows = [{"messages": row["conversations"]} for row in sharegpt(keys=("role", "content"))]
    warning = "rows of the train dataset have the role `gpt`, which the chat template renders as it renders any unknown"
    for table, count in zip(tables(rows, "messages"), ("4 of 6", "4 of 6", "4 of the first 6"), strict=True):
        caplog.clear()
        build_trainer(tmp_path, table, packing=False, max_length=200, max_steps=1)
        assert f"{count} {warning}" in caplog.text
        assert f"{count} {warning}".replace("gpt", "human") in caplog.text
    known = build_tokenizer()
    head = "{{ '[Q]' if m.role in ('user', 'human') else '[A]' }}"
    known.chat_template = f"{{% for m in messages %}}{head}{{{{ m.content }}}}{{% endfor %}}"
    caplog.clear()
    build_trainer(tmp_path, Dataset.from_list(rows), processing_class=known, max_length=200, packing=False)
    assert "have the role" not in caplog.text


def thinking_traces(num=4):
    """Return traces of which every second thinks, also in its first answer."""
    rows = []
    for i in range(num):
        messages = agent_trace(i, 2 * i, 3 * i)
        if i % 2:
            messages[4]["reasoning_content"] = "EARLIER"
        else:
            del messages[6]["reasoning_content"]
        rows.append({"messages": messages, "tools": json.dumps(TOOLS)})
    return rows


# template: whether it leaves out the first of two thoughts of a conversation, both, and calls
LEFT_OUT = {
    "qwen3": ("first", False),  # because a question follows
    "qwen3_training": (None, False),
    "qwen2_5": ("both", False),
    "phi3_5": ("both", True),
    "gptoss": ("first", False),
}


@pytest.mark.parametrize("template", LEFT_OUT)
def test_fields_that_the_template_leaves_out_are_said_with_their_rows(template, tmp_path, caplog):
    tokenizer = tokenizer_with(template)
    thoughts, leaves_calls = LEFT_OUT[template]
    for table, per_turn in itertools.product(tables(thinking_traces(), "messages"), (False, True)):
        caplog.clear()
        settings = {"packing": False, "max_length": 4000, "max_steps": 1, "per_turn": per_turn, "bad_rows": "drop"}
        trainer = build_trainer(tmp_path, table, processing_class=tokenizer, **settings)
        messages_logged = [record.getMessage() for record in caplog.records if "leaves out" in record.getMessage()]
        of_thoughts, of_calls = (
            [message for message in messages_logged if f"have `{key}`" in message] for key in FIELDS
        )
        total = "4 rows of" if isinstance(table, Dataset) else "the first 4 rows of"
        is_said = thoughts == "both" or (thoughts == "first" and not per_turn)
        assert [finding.startswith(f"2 of {total}") for finding in of_thoughts] == [True] * is_said
        assert [finding.startswith(f"4 of {total}") for finding in of_calls] == [True] * leaves_calls
        assert all(("Set `per_turn=True`" in finding) == (thoughts == "first") for finding in of_thoughts)
        texts = [tokenizer.decode(tokens) for tokens, _ in rows_of(trainer)]
        assert any("EARLIER" in text for text in texts) != is_said
