"""Configs of widely used checkpoints: probed, trained on packs, and judged from the config alone.

`--data`/*configs*/tiny holds configs in which only sizes are small, `full` the same at their real sizes. Those that
showed a defect are in every run, all are in `make sweep`. Rules that need no such file have small literal configs here.
"""

import json
import re
import warnings
from functools import partial
from math import isfinite
from pathlib import Path

import pytest
import torch
import transformers
from datasets import Dataset
from support.runs import build_trainer, proved, stock
from sweep import zoo
from transformers import AutoConfig, AutoModelForCausalLM

from trl_packfix.cli.check_model import check_model, tiny_model
from trl_packfix.cli.configs import parse_configs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("precision_of_its_own")]

MAX_LENGTH = 48
LENGTHS = (40, 7, 19, 30, 3, 45, 11, 24)  # two steps of four documents
VOCABULARY = 256  # words below the special tokens of every tiny config

# What the installed transformers cannot build or run, and why
NOT_RUN = {
    "deepseek-7b": "model type 'deepseek' has code of its own",
    "kimi-k2": "model type 'kimi_k2' has code of its own",
    "llama-4-scout": "transformers 5.24.0 looks for `image_outputs` in an output of text, which has none",
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
            files = sorted(Path(folder).glob(f"*configs*/{which}/*.json")) if folder else []
            reason = pytest.mark.skip(reason="needs real configs: run pytest with --data DIR")
            marks = {True: (), False: pytest.mark.sweep}  # by whether the config showed a defect
            configs = [
                pytest.param(file, id=file.stem, marks=marks[file.parts[-3] == "defect_configs"]) for file in files
            ]
            metafunc.parametrize(f"{which}_config", configs or [pytest.param(None, marks=reason)])


def fields_of(file):
    return {name: value for name, value in json.loads(file.read_text()).items() if not name.startswith("_")}


def read(file):
    config = AutoConfig.for_model(**fields_of(file))
    for name in ("vision_config", "audio_config"):  # left out of some tiny configs, and then of full size
        tower = vars(config).get(name)
        if tower is not None:
            setattr(config, name, type(tower).from_dict(tower.to_dict() | zoo.shrink(tower)))
    return config


def build(file, dtype=torch.float32, seed=0):
    config = read(file)
    build_known = getattr(transformers, (config.architectures or [""])[0], AutoModelForCausalLM.from_config)
    return zoo.random_model(lambda: build_known(config), seed).to(dtype)


def documents(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    high = min(VOCABULARY, model.config.get_text_config(decoder=True).vocab_size)
    rows = [torch.randint(16, high, (n,), generator=generator).tolist() for n in LENGTHS]
    # GPT-2's unpacked loss counts the first token as a target; where it is none, all agree.
    return Dataset.from_dict({"input_ids": rows, "labels": [[-100, *row[1:]] for row in rows]})


packed = partial(build_trainer, packing_strategy="minibatch")


def trained(file, folder, make=packed, dtype=torch.float32):
    """Return the trainer after two steps of SGD, of which the first is compared with unpacked training."""
    model = build(file)
    sgd = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.05, "lr_scheduler_type": "constant"}
    settings = {"max_length": MAX_LENGTH, "per_device_train_batch_size": 4, "bf16": dtype == torch.bfloat16}
    settings["router_aux_loss_coef"] = 0.0  # a statistic of each micro-batch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make(folder, documents(model), model, **sgd, **settings)
        trainer.train()
    return trainer


def check_training(file, folder, dtype=torch.float32):
    """Check that the model is packed and its first step that of unpacked training; skip what stock TRL cannot train."""
    if file.stem in NOT_RUN:
        pytest.skip(NOT_RUN[file.stem])
    try:
        trainer = trained(file, folder, dtype=dtype)
    except Exception as error:
        with pytest.raises(type(error), match=re.escape(str(error)[:80])):
            trained(file, folder, stock, dtype)
        pytest.skip(f"stock TRL cannot train it: {error}")
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert len(losses) == 2
    assert all(map(isfinite, losses))
    assert losses[0] != losses[1]
    assert trainer.packed_model.is_proved
    assert not trainer.packed_model.is_unpacked
    first_step = trainer.packing_report.first_step
    assert re.match(r"loss .* packed, .*; gradients", first_step), first_step


def test_is_proved_in_bf16(tiny_config):
    """Models must be proved with weights in bf16; in fp32 and under autocast the trainer proves them below."""
    if tiny_config.stem in NOT_RUN:
        pytest.skip(NOT_RUN[tiny_config.stem])
    report = proved(build(tiny_config, torch.bfloat16), dtype=torch.bfloat16, max_length=MAX_LENGTH)[1]
    assert report.passed, report.summary()


def test_trains_packed_as_unpacked(tiny_config, tmp_path):
    check_training(tiny_config, tmp_path)


@pytest.mark.sweep
def test_trains_in_bf16(tiny_config, tmp_path):
    check_training(tiny_config, tmp_path, torch.bfloat16)


def checked(name, max_length, *flags):
    configs = parse_configs([f"--max_length={max_length}", *flags])
    return check_model(name, configs, config_only=True)


def test_the_config_alone_is_judged_as_the_tiny_model(full_config, tmp_path):
    name = literal(tmp_path, fields_of(full_config))
    if full_config.stem in NOT_RUN:
        with pytest.raises((ValueError, OSError)):
            checked(name, MAX_LENGTH)
        return
    result = checked(name, MAX_LENGTH)
    assert result.in_training.passed
    tiny = full_config.parent.parent / "tiny" / full_config.name
    if tiny.exists() and full_config.stem not in JUDGED_APART:
        packed, report = proved(build(tiny), max_length=MAX_LENGTH)
        assert report.passed
        assert {repair.module for repair in packed.repaired} == {r.module for r in result.in_training.repaired}


# Without files

LONGROPE = {
    "model_type": "phi3",
    "architectures": ["Phi3ForCausalLM"],
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32064,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 256,
    "pad_token_id": 32000,
    "eos_token_id": [32000, 32001, 32007],
    "sliding_window": None,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0 + i / 8 for i in range(48)]},
}


def literal(folder, fields):
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


def test_a_leak_by_real_rope_is_found_from_the_config_alone(tmp_path):
    name = literal(tmp_path, LONGROPE)
    assert checked(name, 200).verdict == "isolated"
    result = checked(name, 300, "--on_leak=raise")
    assert result.verdict == "leaks"
    assert [leak.name for leak in result.as_it_is.leaks] == ["model.rotary_emb"]
    assert checked(name, 300).in_training.passed


def test_only_sizes_shrink():
    full = AutoConfig.for_model(**LONGROPE)
    small = tiny_model(full).config
    expected = {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 128, "eos_token_id": [7, 8, 9]}
    expected |= {"sliding_window": None, "original_max_position_embeddings": 256, "max_position_embeddings": 4096}
    assert {name: getattr(small, name) for name in expected} == expected
    assert small.rope_parameters["rope_type"] == "longrope"
    assert small.rope_parameters["long_factor"] == [full.rope_parameters["long_factor"][i] for i in (0, 12, 24, 36)]


@pytest.mark.parametrize(
    "model_type, fields, expected",
    [
        ("granite", {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0078125}, {}),
        ("phimoe", {"router_jitter_noise": 0.01, "rope_parameters": {"rope_theta": 1e4}}, {}),
        # A character for each layer
        ("llama", {"num_hidden_layers": 4, "layer_pattern": "MEM*"}, {"layer_pattern": "ME", "hidden_act": "silu"}),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 0] * 9, "pad_token_id": 0}, {"no_rope_layers": [1, 1, 1, 0]}),
    ],
)
def test_what_is_no_size_stays(model_type, fields, expected):
    config = tiny_model(AutoConfig.for_model(model_type, **fields)).config
    numbers = {name: value for name, value in fields.items() if isinstance(value, float)}
    assert {name: getattr(config, name) for name in numbers | expected} == numbers | expected


def test_a_layer_of_each_kind_stays():
    moe = AutoConfig.for_model("deepseek_v3", first_k_dense_replace=3, num_hidden_layers=61)
    assert [type(layer.mlp).__name__ for layer in tiny_model(moe).model.layers][-2:] == [
        "DeepseekV3MLP",
        "DeepseekV3MoE",
    ]
    gemma = AutoConfig.for_model("gemma3_text", num_hidden_layers=26)
    assert tiny_model(gemma).config.layer_types == ["sliding_attention"] * 5 + ["full_attention"]


def test_what_cannot_be_built_is_a_message(tmp_path, output_of):
    name = literal(tmp_path, {"model_type": "llama", "architectures": ["GPT2LMHeadModel"]})
    assert "cannot build a tiny model of type 'llama'" in output_of("check", name, "--config-only", code=2)
