"""Rows that are prepared without a trainer are those of a trainer, which leaves the tokenizer to TRL's constructor."""

import importlib

import pytest
from datasets import Dataset, load_from_disk
from support.models import build_tokenizer
from support.runs import ANSWER, PROMPT, build_trainer, config

from trl_packfix.training.preparation import prepare_rows

pytestmark = pytest.mark.slow

TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content + '|' }}{% endfor %}"
CHATS = Dataset.from_list([{"messages": PROMPT + ANSWER}, {"messages": (PROMPT + ANSWER) * 2}])
PAIRS = Dataset.from_dict({"prompt": ["ab c", "d"], "completion": [" ef", " g h"]})


def of_file(folder):
    (folder / "template.jinja").write_text(TEMPLATE)
    return {"chat_template_path": str(folder / "template.jinja")}


def of_tokenizer(folder):
    """Name a tokenizer with a template, a token and an EOS token of its own."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["|"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.eos_token = "|"
    tokenizer.save_pretrained(folder / "tokenizer")
    return {"chat_template_path": str(folder / "tokenizer")}


@pytest.mark.parametrize(
    "data, settings",
    [
        (CHATS, lambda folder: {}),
        (CHATS, of_file),
        (CHATS, of_tokenizer),
        (CHATS, lambda folder: {"eos_token": "<|pad|>", "pad_token": "<|im_end|>"}),
        (CHATS, lambda folder: {"assistant_only_loss": True, "assistant_turns": "last"}),
        (PAIRS, lambda folder: {}),
        (PAIRS, lambda folder: {"completion_only_loss": False}),
        (PAIRS, lambda folder: {"eos_token": "<|pad|>"}),
    ],
    ids=["chat", "file", "tokenizer", "tokens", "last", "pairs", "whole pairs", "pairs, eos"],
)
def test_rows_and_tokenizer_are_those_of_a_trainer(data, settings, tmp_path):
    def prepared(**settings):
        tokenizer = build_tokenizer()
        rows, _ = prepare_rows(data, tokenizer, config(tmp_path, **settings))
        return outcome(rows, tokenizer)

    settings = settings(tmp_path)
    trainer = build_trainer(tmp_path, data, **settings)
    assert prepared(**settings) == outcome(trainer.train_dataset, trainer.processing_class)
    assert (prepared(**settings) != prepared()) is bool(settings), "the settings change nothing here"


def outcome(rows, tokenizer):
    tokens = [[list(values) for values in rows[name]] for name in ("input_ids", "labels")]
    return tokens, tokenizer.chat_template, tokenizer.eos_token, tokenizer.pad_token


def test_another_formatting_function_of_the_same_name_makes_other_tokens(tmp_path, monkeypatch):
    """`datasets` hashes a function of a module by its name."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)  # both files are written in the same second
    Dataset.from_dict({"a": ["ab c", "d"]}).save_to_disk(tmp_path / "data")
    code = tmp_path / "edited_formatting.py"
    code.write_text("def formatted(row): return row['a']")
    module = importlib.import_module("edited_formatting")

    def lengths():
        trainer = build_trainer(tmp_path, load_from_disk(tmp_path / "data"), formatting_func=module.formatted)
        assert trainer.data.data_report.num_rendered == 1  # its texts are followed through the function
        return [len(tokens) for tokens in trainer.train_dataset["input_ids"]]

    first = lengths()
    code.write_text("def formatted(row): return row['a'] * 2")
    importlib.reload(module)
    assert sum(lengths()) > sum(first)
