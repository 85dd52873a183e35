"""Configs of widely used checkpoints: probed, trained on packs, and judged from the config alone.

`--data`/configs/tiny holds configs in which only sizes are small, `full` the same at their real sizes. Rules that need
no such file have small literal configs here.
"""

import json
import warnings
from pathlib import Path

import pytest
import torch
import transformers
import trl
from conftest import build_tiny_model, build_tokenizer
from datasets import Dataset
from test_trainer import config
from transformers import AutoConfig, AutoModelForCausalLM

from trl_packfix import SFTTrainer, zoo
from trl_packfix.checking import check_model, tiny_model
from trl_packfix.cli import main
from trl_packfix.proving import PackedModel

MAX_LENGTH = 48
LENGTHS = (40, 7, 19, 30, 3, 45, 11, 24)  # two steps of four documents
VOCABULARY = 256  # words below the special tokens of every tiny config

# What the installed transformers cannot build, and why
NOT_BUILT = {
    "deepseek-7b": "model type 'deepseek' has code of its own",
    "kimi-k2": "model type 'kimi_k2' has code of its own",
    "mimo-7b": "model type 'mimo' has code of its own",
    "minimax-m3": "model type 'minimax_m3' is not in this transformers",
    "ministral3-3b": "`model_type` is that of the text part, the rest that of Mistral3",
    "nemotron-super-49b": "model type 'nemotron-nas' has code of its own",
}
# Where the tiny config does not hold all that the full one does
JUDGED_APART = {"deepseek-v4-flash": "its two layers are of the first kind; compressed ones come later"}


def pytest_generate_tests(metafunc):
    folder = metafunc.config.getoption("--data")
    for which in ("tiny", "full"):
        if f"{which}_config" in metafunc.fixturenames:
            files = sorted(Path(folder, "configs", which).glob("*.json")) if folder else []
            reason = pytest.mark.skip(reason="needs real configs: run pytest with --data DIR")
            found = [pytest.param(file, id=file.stem) for file in files] or [pytest.param(None, marks=reason)]
            metafunc.parametrize(f"{which}_config", found)


def read(file):
    fields = {name: value for name, value in json.loads(file.read_text()).items() if not name.startswith("_")}
    found = AutoConfig.for_model(**fields)
    for vision in ("vision_config", "audio_config"):  # left out of some tiny configs, and then of full size
        part = vars(found).get(vision)
        if part is not None:
            setattr(found, vision, type(part)(**zoo.shrink(part)))
    return found


def build(file, dtype=torch.float32, seed=0):
    found = read(file)
    known = getattr(transformers, (found.architectures or [""])[0], None)
    auto = AutoModelForCausalLM.from_config
    return zoo.random_model(lambda: known(found) if known else auto(found), seed).to(dtype)


def proved(model, folder, dtype):
    args = config(folder, max_length=MAX_LENGTH)
    packed = PackedModel(model, args, dtype)
    return packed, packed.prove(model)


def documents(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    high = min(VOCABULARY, model.config.get_text_config(decoder=True).vocab_size)
    rows = [torch.randint(16, high, (n,), generator=generator).tolist() for n in LENGTHS]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def trained(model, folder, kind=SFTTrainer, batch=4, accumulation=1, **settings):
    """Losses of two SGD steps, the change of all weights, and the trainer."""
    before = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    tokenizer = build_tokenizer()
    args = config(
        folder,
        max_length=MAX_LENGTH,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_steps=2,
        optim="sgd",
        learning_rate=1e-2,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        shuffle_dataset=False,
        seed=3,
        router_aux_loss_coef=0.0,  # a statistic of a micro-batch
        **settings,
    )
    run = kind(model, args, train_dataset=documents(model), processing_class=tokenizer)
    run.train()
    after = torch.cat([p.detach().double().flatten() for p in run.model.parameters()])
    return [log["loss"] for log in run.state.log_history if "loss" in log], after - before, run
