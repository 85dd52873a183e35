"""Chat data of today through the trainer: tools, reasoning, few trained tokens, completions of one token."""

import json
from pathlib import Path

import numpy as np
import pytest
import trl
from datasets import Dataset
from support.models import build_tiny_model, build_tokenizer
from support.rounding import loss_difference, tolerance, weight_difference
from support.runs import config, documents_of, start_weights, trainer, weights

from trl_packfix import SFTTrainer

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]


def agent_trace(first, second, third):
    """A question, a call, its result, an answer with reasoning, and another turn."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": first, "b": second}}}
    return [
        {"role": "system", "content": "You add."},
        {"role": "user", "content": f"What is {first} and {second}?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": f"RESULT {first + second}"},
        {"role": "assistant", "content": f"It is {first + second}."},
        {"role": "user", "content": f"And with {third}?"},
        {
            "role": "assistant",
            "reasoning_content": f"REASON {first + second} plus {third}",
            "content": f"Then {first + second + third}!",
        },
    ]


def traces():
    rng = np.random.default_rng(0)
    return Dataset.from_list(
        [{"messages": agent_trace(*map(int, row)), "tools": json.dumps(TOOLS)} for row in rng.integers(0, 999, (9, 3))]
    )


@pytest.mark.parametrize("template", ["qwen3", "qwen3_6"])
def test_agent_traces_train_on_what_the_assistant_says(template, tmp_path):
    """The templates as models ship them have no generation markers; TRL brings its own for training."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    assert "generation %}" not in tokenizer.chat_template
    settings = {"max_length": 1500, "assistant_only_loss": True, "num_train_epochs": 1}
    args = config(tmp_path, packing_strategy="stream", **settings)
    run = SFTTrainer(build_tiny_model(), args, train_dataset=traces(), processing_class=tokenizer)
    stock = trl.SFTTrainer(
        build_tiny_model(),
        trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[], **settings),
        train_dataset=traces(),
        processing_class=tokenizer,
    )
    packed = sorted(document for batch in run.get_train_dataloader() for document in documents_of(batch))
    unpacked = [(list(row["input_ids"]), [-100, *row["labels"][1:]]) for row in stock.train_dataset]
    assert packed == sorted(unpacked) and len(packed) == 9
    for tokens, labels in packed:
        trained = tokenizer.decode([token for token in labels if token != -100])
        assert "add" in trained and "It is" in trained and "REASON" in trained and "Then" in trained
        assert "What is" not in trained and "RESULT" not in trained and "You add" not in trained
        assert "RESULT" in tokenizer.decode(tokens)
    run.train()
    assert np.isfinite(run.state.log_history[-1]["train_loss"])


def sparse(kind):
    """Rows of which little is trained: the last twentieth, or one token."""
    rng, rows = np.random.default_rng(0), []
    for length in rng.integers(20, 200, 24):
        tokens = rng.integers(4, 260, length).tolist()
        trained = 1 if kind == "one token" else -(-int(length) // 20)
        rows.append({"input_ids": tokens, "labels": [-100] * (length - trained) + tokens[-trained:]})
    return Dataset.from_list(rows)


@pytest.mark.parametrize("weighting", ["token", "document"])
@pytest.mark.parametrize("kind", ["one token", "five percent"])
def test_few_trained_tokens_train_as_unpacked(kind, weighting, tmp_path):
    data, runs = sparse(kind), []
    unpacked = {"packing": False, "gradient_accumulation_steps": 2}
    regrouped = {"packing": False, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    packed = {"packing_strategy": "minibatch", "gradient_accumulation_steps": 2}
    for settings in (unpacked, regrouped, packed):
        run = trainer(
            tmp_path,
            data,
            max_length=200,
            max_steps=4,
            optim="sgd",
            learning_rate=0.3,
            document_weighting=weighting,
            trainer_kwargs={"eval_dataset": data},
            **settings,
        )
        run.train()
        runs.append(run)
    unpacked, regrouped, packed = runs
    count = [entry["trained_tokens"] for entry in packed.state.log_history if "loss" in entry]
    assert count == [entry["trained_tokens"] for entry in unpacked.state.log_history if "loss" in entry]
    if kind == "one token":
        assert count == [4] * 4
    rounding, found = (
        weight_difference(weights(run), weights(unpacked), start_weights()) for run in (regrouped, packed)
    )
    assert found <= tolerance(rounding)
    losses = [run.evaluate()["eval_loss"] for run in runs]
    assert losses[2] == pytest.approx(losses[0], rel=tolerance(loss_difference(losses[1:2], losses[:1])))


def test_completions_of_one_token(tmp_path):
    """Yes-or-no data: what is trained is the answer and the end of the turn, never the prompt."""
    data = Dataset.from_dict({"prompt": [f"is {n} even? " for n in range(20)], "completion": ["y", "n"] * 10})
    run = trainer(tmp_path, data, packing_strategy="stream")
    for batch in run.get_train_dataloader():
        for _, labels in documents_of(batch):
            trained = [token for token in labels if token != -100]
            assert len(trained) == 2 and run.processing_class.decode(trained) in ("y<|im_end|>", "n<|im_end|>")
    run.train()
    assert run.packing_report.num_trained_tokens == 40
