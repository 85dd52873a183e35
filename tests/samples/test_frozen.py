"""Tokens, labels, columns, counts and messages that are made of rows are the frozen ones.

They are those of the code before recipes, but for columns that are not read. `FREEZE=1 pytest` writes them anew.
"""

import hashlib
import itertools
import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from datasets import Dataset
from support import vision
from support.chats import tokenizer_with
from support.runs import TOOL, trainer
from support.versions import scores_tokens

pytestmark = [pytest.mark.slow, scores_tokens]  # templates and their texts are those of the versions in constraints.txt

FROZEN = Path(__file__).with_name("frozen.json")
RULES = {
    "all": {},
    "masked": {"assistant_only_loss": True},
    "masked last": {"assistant_only_loss": True, "assistant_turns": "last"},
    "per turn": {"per_turn": True, "train_empty_thinking": False},
}


def chat(i, weight):
    messages = [{"role": "system", "content": "s"}] if i % 2 else []
    for k in range(1 + i % 3):
        messages += [{"role": "user", "content": f"q{i}{k}"}, {"role": "assistant", "content": f"a{i}{k}"}]
        if weight and k == 0 and i % 3 == 2:
            messages[-1]["weight"] = 0
    return messages


def row(form, i, weight):
    messages = chat(i, weight)
    if form == "text":
        return {"text": f"words {i}"}
    if form == "prompt":
        return {"prompt": f"words {i}", "completion": " more"}
    if form == "chat prompt":
        return {"prompt": messages[:-1], "completion": messages[-1:]}
    if form == "sharegpt":
        names = {"user": "human", "assistant": "gpt"}
        return {"conversations": [{"from": names.get(m["role"], m["role"]), "value": m["content"]} for m in messages]}
    if form == "tools":
        messages = [*messages, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "four"}]
        return {"messages": messages, "tools": TOOL, "chat_template_kwargs": {"enable_thinking": False}}
    return {"messages": messages}


def bad(form, good):
    column = next(iter(good))
    if isinstance(good[column], str):
        return good | {column: None}
    key = "value" if form == "sharegpt" else "content"
    return good | {column: [good[column][0] | {key: None}, *good[column][1:]]}


def rows(form, rule, has_bad):
    given = [row(form, i, weight=rule != "all") | {"id": i} for i in range(5)]
    return [*given[:3], bad(form, given[3]), *given[4:]] if has_bad else given


def digest(value):
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


FORMS = {"chat": (None, "plain", "qwen3"), "chat prompt": (None, "qwen3"), "tools": ("qwen3",)}
FORMS["sharegpt"] = ("plain",)
CASES = {
    f"{form}, {rule}, {template or 'marked'}": (form, rule, template)
    for form, rule in itertools.product(FORMS, RULES)
    for template in FORMS[form]
}
CASES |= {f"{form}, all, marked": (form, "all", None) for form in ("text", "prompt")}
KINDS = [*itertools.product(("table", "stream"), ("good", "raise", "drop")), ("unpacked", "good"), ("unpacked", "drop")]


def found(case, kind, bad_rows, caplog, folder):
    form, rule, template = CASES[case]
    data = Dataset.from_list(rows(form, rule, bad_rows != "good"))
    data = data.to_iterable_dataset() if kind == "stream" else data
    settings = RULES[rule] | {"max_length": 500, "max_steps": 1, "packing": kind != "unpacked"}
    settings["bad_rows"] = "drop" if bad_rows == "drop" else "raise"
    caplog.clear()
    try:
        run = trainer(folder, data, processing_class=tokenizer_with(template), **settings)
        samples = [(row["input_ids"], row["labels"]) for row in run.train_dataset]
        columns = sorted(next(iter(run.train_dataset)))
    except Exception as error:
        return {"error": digest(f"{type(error).__name__} {error}"), "text": str(error)[:40]}
    counts = [None if each is None else asdict(each) for each in (run.data.turns, run.data.trained.counts)]
    said = sorted({record.getMessage() for record in caplog.records if record.name.startswith("trl")})
    return {
        "samples": digest(samples),
        "columns": columns,
        "counts": digest(counts),
        "said": [s[:40] for s in said],
        "messages": digest(said),
    }


def found_of_images(rule, kind, bad_rows, folder):
    data = vision.growing(3) if rule != "per turn" else vision.conversations(3)
    processor = vision.stripping(vision.build_processor("llava"))
    if bad_rows != "good":
        data = Dataset.from_list([*data, {**data[0], "images": []}], features=data.features)
    settings = RULES[rule] | {"max_length": 500, "max_steps": 2, "bad_rows": "drop" if bad_rows == "drop" else "raise"}
    data = data.to_iterable_dataset() if kind == "stream" else data
    try:
        run = trainer(folder, data, vision.build_model("llava"), processing_class=processor, **settings)
        batches = list(itertools.islice(run.get_train_dataloader(), 2))
    except Exception as error:
        return {"error": digest(f"{type(error).__name__} {error}"), "text": str(error)[:40]}
    samples = [[batch["input_ids"].tolist(), batch["labels"].tolist()] for batch in batches]
    pixels = [float(batch["pixel_values"].double().sum()) for batch in batches if "pixel_values" in batch]
    counts = [None if each is None else asdict(each) for each in (run.data.turns, run.data.trained.counts)]
    return {"samples": digest(samples), "pixels": digest(pixels), "counts": digest(counts)}


def compare(case, found):
    frozen = json.loads(FROZEN.read_text())
    if "FREEZE" in os.environ:
        lines = (f"{json.dumps(name)}: {json.dumps(each)}" for name, each in sorted((frozen | {case: found}).items()))
        FROZEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    assert {key: value for key, value in found.items() if frozen[case][key] != value} == {}


@pytest.mark.parametrize("case", CASES)
def test_samples_are_the_frozen_ones(case, tmp_path, caplog):
    compare(case, {f"{kind} {bad_rows}": found(case, kind, bad_rows, caplog, tmp_path) for kind, bad_rows in KINDS})


@pytest.mark.parametrize("rule", RULES)
def test_samples_of_images_are_the_frozen_ones(rule, tmp_path):
    kinds = [kind for kind in KINDS if kind[0] != "unpacked"]
    compare(f"images, {rule}", {" ".join(kind): found_of_images(rule, *kind, tmp_path) for kind in kinds})
