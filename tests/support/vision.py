"""Rows with images, made offline, for the tiny models of `sweep.image_families`."""

import json
from typing import Any

import numpy as np
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Picture
from sweep.image_families import build_model as build_model
from sweep.image_families import build_processor as build_processor

from .runs import build_trainer

# Those of most tests; all others are in `image_families.FAMILIES`
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "llava", "llava_next", "idefics3", "gemma3", "qwen3_5")


def picture(width: int, height: int, seed: int) -> Picture.Image:
    """Return an image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Picture.fromarray(pixels)


IMAGE = {"type": "image", "text": None}


def message(role: str, text: str, num_images: int = 0) -> dict[str, Any]:
    """Return a message whose images come before its text."""
    return {"role": role, "content": [IMAGE] * num_images + [{"type": "text", "text": text}]}


MESSAGES = List({"role": Value("string"), "content": List({"type": Value("string"), "text": Value("string")})})
FEATURES = Features({"images": List(Image()), "messages": MESSAGES})
SIZES = ((24, 24), (40, 24), (24, 48), (56, 40), (30, 30))


def rows(num: int = 16, seed: int = 0, counts: tuple[int, ...] = (0, 1, 1, 2)) -> Dataset:
    """Return conversations with as many images as one of `counts`, of several sizes, which are encoded as PNG."""
    rng = np.random.default_rng(seed)
    table = []
    for _ in range(num):
        count = int(rng.choice(counts))
        sizes = [SIZES[i] for i in rng.integers(0, len(SIZES), count)]
        images = [picture(*size, seed=int(rng.integers(1 << 30))) for size in sizes]
        text = "".join(rng.choice(list("abcdef "), rng.integers(3, 30)))
        answer = "".join(rng.choice(list("xyz "), rng.integers(2, 12)))
        table.append({"images": images, "messages": [message("user", text, count), message("assistant", answer)]})
    return Dataset.from_list(table, features=FEATURES)


PICTURES = [picture(24, 24, seed) for seed in range(3)]  # of one size: 16 placeholders each on llava
HEAD = "look at this picture, then answer: "


def questions(num: int = 24) -> Dataset:
    """Return several questions about each image, which all have one size, behind the same words."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(num):
        asked = "".join(rng.choice(list("abc "), rng.integers(3, 12)))
        content = [{"type": "text", "text": HEAD}, IMAGE, {"type": "text", "text": " now " + asked}]
        user = {"role": "user", "content": content}
        answer = message("assistant", "".join(rng.choice(list("xyz"), rng.integers(3, 9))))
        rows.append({"images": [PICTURES[int(rng.integers(3))]], "messages": [user, answer]})
    return Dataset.from_list(rows, features=FEATURES)


AS_SEEN = "as seen, "  # what the template strips from earlier turns
STRIPPING = "{{ part['text'] if loop_of_messages.last else part['text'] | replace('as seen, ', '') }}"


def stripping(processor: Any) -> Any:
    """Give the processor a template that strips `AS_SEEN` from all messages but the last, and return it."""
    template = processor.chat_template.replace("{{ part['text'] }}", STRIPPING)
    loop = "{%- for message in messages %}"
    assert STRIPPING in template
    assert loop in template
    processor.chat_template = template.replace(loop, loop + "{%- set loop_of_messages = loop %}")
    return processor


def conversations(num: int = 6) -> Dataset:
    """Return conversations of three turns, each with an image of its own; the column `share` is their number."""
    table = []
    for i in range(num):
        messages = []
        for turn in range(3):
            messages += [message("user", f"turn {turn}", 1), message("assistant", f"{i} {AS_SEEN}then {turn}")]
        images = [picture(24, 24, seed=10 * i + turn) for turn in range(3)]
        table.append({"images": images, "messages": messages, "share": float(i)})
    return Dataset.from_list(table, features=Features(FEATURES | {"share": Value("float64")}))


def by_turn(num: int = 6) -> Dataset:
    """Return the turns of `conversations` made by hand: prompts and completions for a template that strips nothing."""
    table = []
    for row in conversations(num):
        for k in range(1, 6, 2):
            prompt = json.loads(json.dumps(row["messages"][:k]).replace(AS_SEEN, ""))
            table.append({"images": row["images"][: k // 2 + 1], "prompt": prompt, "completion": [row["messages"][k]]})
    return Dataset.from_list(
        table, features=Features({"images": List(Image()), "prompt": MESSAGES, "completion": MESSAGES})
    )


def growing(num: int = 6) -> Dataset:
    """Return conversations of one to three turns with an image each; last answers are longer than in a history."""
    table = [{"images": row["images"], "messages": row["prompt"] + row["completion"]} for row in by_turn(num)]
    return Dataset.from_list(table, features=FEATURES)


ROWS = rows(40)
QUESTIONS = questions()
SGD = {"optim": "sgd", "learning_rate": 0.3, "lr_scheduler_type": "constant", "max_grad_norm": 1e9, "max_steps": 5}
LANGUAGE = r".*language_model.*(q_proj|v_proj)"  # modules for adapters


def make(folder, family="qwen2_5_vl", dataset=ROWS, model=None, processor=None, **kwargs):
    """Return a trainer on rows with images; by default a batch has four documents of at most 200 tokens each."""
    settings = {"max_length": 200, "per_device_train_batch_size": 4} | kwargs
    model = build_model(family) if model is None else model
    return build_trainer(folder, dataset, model, processing_class=processor or build_processor(family), **settings)
