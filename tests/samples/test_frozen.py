"""What rows become is what `frozen.json` says: texts with their trained tokens, columns, counts and messages.

The file is for reading, so that a test that fails shows which text, label or message changed. In its texts, what stands
between ⟦ and ⟧ is trained, and a token that is repeated often is written once with its number. `FREEZE=1 pytest` writes
the file anew: read its diff then, as if it were code.
"""

import itertools
import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from datasets import Dataset
from support import vision
from support.chats import tokenizer_with
from support.features import needs
from support.runs import TOOL, build_trainer
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
    good_rows = [row(form, i, weight=rule != "all") | {"id": i} for i in range(5)]
    return [*good_rows[:3], bad(form, good_rows[3]), *good_rows[4:]] if has_bad else good_rows


def text_of(tokens, labels, tokenizer):
    """Return the text of a document, with its trained tokens between ⟦ and ⟧: "user q0 ⟦a0⟧"."""
    spans = []
    for is_trained, pairs in itertools.groupby(zip(tokens, labels, strict=True), key=lambda pair: pair[1] != -100):
        pairs = list(pairs)
        if is_trained:
            assert [label for _, label in pairs] == [token for token, _ in pairs]
        words = []
        for token, repeats in itertools.groupby(token for token, _ in pairs):
            number = len(list(repeats))
            word = tokenizer.decode([token])
            words += [f"{word}*{number}"] if number > 5 else [word] * number
        text = "".join(words)
        spans.append(f"⟦{text}⟧" if is_trained else text)
    return "".join(spans)


def fields_of(counts):
    return None if counts is None else asdict(counts)


FORMS = {"chat": (None, "plain", "qwen3"), "chat prompt": (None, "qwen3"), "tools": ("qwen3",)}
FORMS["sharegpt"] = ("plain",)
CASES = {
    f"{form}, {rule}, {template or 'marked'}": (form, rule, template)
    for form, rule in itertools.product(FORMS, RULES)
    for template in FORMS[form]
}
CASES |= {f"{form}, all, marked": (form, "all", None) for form in ("text", "prompt")}
KINDS = [*itertools.product(("table", "stream"), ("good", "raise", "drop")), ("unpacked", "good"), ("unpacked", "drop")]


def outcome_of(case, kind, bad_rows, caplog, folder):
    form, rule, template = CASES[case]
    data = Dataset.from_list(rows(form, rule, bad_rows != "good"))
    data = data.to_iterable_dataset() if kind == "stream" else data
    settings = RULES[rule] | {"max_length": 500, "max_steps": 1, "packing": kind != "unpacked"}
    settings["bad_rows"] = "drop" if bad_rows == "drop" else "raise"
    tokenizer = tokenizer_with(template)
    caplog.clear()
    try:
        trainer = build_trainer(folder, data, processing_class=tokenizer, **settings)
        texts = [text_of(row["input_ids"], row["labels"], tokenizer) for row in trainer.train_dataset]
        columns = " ".join(sorted(next(iter(trainer.train_dataset))))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "texts": texts,
        "columns": columns,
        "turns": fields_of(trainer.data.turn_counts),
        "trained": fields_of(trainer.data.trained_summary.counts),
        "messages": sorted({entry.getMessage() for entry in caplog.records if entry.name.startswith("trl")}),
    }


def outcome_of_images(rule, kind, bad_rows, folder):
    data = vision.growing(3) if rule != "per turn" else vision.conversations(3)
    processor = vision.stripping(vision.build_processor("llava"))
    if bad_rows != "good":
        data = Dataset.from_list([*data, {**data[0], "images": []}], features=data.features)
    settings = RULES[rule] | {"max_length": 500, "max_steps": 2, "bad_rows": "drop" if bad_rows == "drop" else "raise"}
    data = data.to_iterable_dataset() if kind == "stream" else data
    try:
        trainer = build_trainer(folder, data, vision.build_model("llava"), processing_class=processor, **settings)
        batches = list(itertools.islice(trainer.get_train_dataloader(), 2))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "texts": [
            text_of(batch["input_ids"][0, span].tolist(), batch["labels"][0, span].tolist(), processor.tokenizer)
            for batch in batches
            for span in itertools.starmap(slice, itertools.pairwise(batch["cu_seq_lens_q"].tolist()))
        ],
        "sums of pixels": [round(float(batch["pixel_values"].double().sum()), 3) for batch in batches],
        "turns": fields_of(trainer.data.turn_counts),
        "trained": fields_of(trainer.data.trained_summary.counts),
    }


def compare(case, outcomes):
    """Compare what each kind of run makes of the rows with the file.

    There an outcome stands once, under the names of all kinds that have it.
    """
    frozen = json.loads(FROZEN.read_text())
    if "FREEZE" in os.environ:
        groups = {}
        for kind, outcome in outcomes.items():
            groups.setdefault(json.dumps(outcome), []).append(kind)
        frozen[case] = {", ".join(kinds): json.loads(outcome) for outcome, kinds in groups.items()}
        FROZEN.write_text(json.dumps(dict(sorted(frozen.items())), indent=1, ensure_ascii=False) + "\n")
    expected = {kind: outcome for kinds, outcome in frozen[case].items() for kind in kinds.split(", ")}
    assert expected.keys() == outcomes.keys()
    for kind, outcome in outcomes.items():
        assert outcome == expected[kind], kind


@pytest.mark.parametrize("case", CASES)
def test_samples_are_the_frozen_ones(case, tmp_path, caplog):
    compare(
        case, {f"{kind} {bad_rows}": outcome_of(case, kind, bad_rows, caplog, tmp_path) for kind, bad_rows in KINDS}
    )


@needs("images")
@pytest.mark.parametrize("rule", RULES)
def test_samples_of_images_are_the_frozen_ones(rule, tmp_path):
    kinds = [kind for kind in KINDS if kind[0] != "unpacked"]
    compare(f"images, {rule}", {" ".join(kind): outcome_of_images(rule, *kind, tmp_path) for kind in kinds})
