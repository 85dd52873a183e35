"""Every field of TrainingArguments, SFTConfig and ModelConfig is tested; docs/settings.md says what packing changes."""

import importlib.util
import inspect
import json
import os
import re
from collections import Counter
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from support.models import build_tiny_model, build_tokenizer
from support.paths import ROOT
from support.rounding import weight_difference
from support.runs import ANSWER, PROMPT, build_trainer, config, run_training, start_weights, texts, weights
from support.versions import scores_tokens, selects_checkpoints
from transformers import BitsAndBytesConfig, TrainingArguments, logging
from trl import ModelConfig

import trl_packfix
from trl_packfix import PackingLeakError, SFTConfig
from trl_packfix.cli import main
from trl_packfix.cli import train as train_command
from trl_packfix.cli.configs import machine_settings, parse_configs
from trl_packfix.training.checks import check_quantisation
from trl_packfix.training.config import check_devices
from trl_packfix.training.loading import TrainingData

pytestmark = pytest.mark.slow

OF_TRANSFORMERS = {field.name for field in fields(TrainingArguments)}
FIELDS = {
    "TrainingArguments": OF_TRANSFORMERS,
    "SFTConfig": {field.name for field in fields(SFTConfig)} - OF_TRANSFORMERS,
    "ModelConfig": {field.name for field in fields(ModelConfig)},
}


def table(heading: str) -> list[tuple[list[str], str]]:
    """Return fields and remark of each row under a heading of docs/settings.md."""
    text = (ROOT / "docs" / "settings.md").read_text()
    part = text[text.index(f"## {heading}\n") :].removeprefix("## ").split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("| `")
    ]
    return [(re.findall(r"`(\w+)`", named), remark) for named, remark in rows]


def test_the_help_of_every_field_of_packing_is_its_text_on_the_api_page(monkeypatch, capsys):
    own_names = {name for name in SFTConfig.__annotations__ if name not in trl.SFTConfig.__annotations__}
    assert {"overlong", "per_turn", "exchange_speeds"} <= own_names
    page = " ".join(inspect.getdoc(SFTConfig).split())
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for field in fields(SFTConfig):
        if field.name in own_names | {"packing_strategy"}:
            text = field.metadata["help"]
            described = text.removeprefix("Experimental, several GPUs have not run it yet. ")  # a label of help only
            assert re.search(rf" {field.name} \([^)]*\): {re.escape(described)} (\w+ \(|Example:)", page), field.name
            assert f"--{field.name}" in shown, field.name
            assert text in shown, field.name
    assert "One of stream, bfd, bfd_split, wrapped, minibatch" in shown
    assert "One of truncate, split, drop, raise" in shown


@scores_tokens  # the fields of the versions in constraints.txt
@pytest.mark.parametrize("heading", FIELDS)
def test_every_field_is_accounted_for(heading):
    named = Counter(name for names, *_ in table(heading) for name in names)
    unnamed = FIELDS[heading] - named.keys()
    unknown = named.keys() - FIELDS[heading]
    assert not unknown, f"these fields no longer exist: {sorted(unknown)}"
    assert max(named.values()) == 1
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("*.py"))
    untested = [name for name in sorted(unnamed) if not re.search(rf"\b{name}\b", tests)]
    assert not untested, (
        f"train with these in a test, or say in docs/settings.md what packing does with them: {untested}"
    )
    for names, remark in table(heading):
        assert remark == "untried" or [name for name in names if not re.search(rf"\b{name}\b", tests)] == [], names
        assert remark, names


# Fields that change no weight

BASE = {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant", "max_steps": 3}
BASE |= {"gradient_accumulation_steps": 2, "packing_strategy": "minibatch"}
EVALUATES = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}


def on(names: str) -> dict[str, bool]:
    return dict.fromkeys(names.split(), True)


def off(names: str) -> dict[str, bool]:
    return dict.fromkeys(names.split(), False)


KEEP_WEIGHTS = {
    "logging": on("logging_first_step logging_nan_inf_filter")
    | off("log_on_each_node disable_tqdm")
    | {"logging_strategy": "epoch", "logging_steps": 2, "log_level": "error", "log_level_replica": "error"}
    | {"report_to": "none", "run_name": "a run", "project": "a project", "include_num_input_tokens_seen": "all"}
    | dict.fromkeys("trackio_space_id trackio_bucket_id trackio_static_space_id".split(), "a/b"),
    "evaluation": EVALUATES
    | on("prediction_loss_only eval_on_start eval_use_gather_object batch_eval_metrics bf16_full_eval")
    | on("do_eval do_predict")
    | off("eval_do_concat_batches eval_packing")
    | {"eval_delay": 1, "per_device_eval_batch_size": 2, "eval_accumulation_steps": 1}
    | {"include_for_metrics": ["loss"], "label_names": ["labels"]},
    "fp16 in evaluation": EVALUATES | {"fp16_full_eval": True},
    "saving": EVALUATES
    | on("save_on_each_node enable_jit_checkpoint restore_callback_states_from_checkpoint ignore_data_skip")
    | off("load_best_model_at_end greater_is_better")
    | {"save_total_limit": 1, "metric_for_best_model": "loss"},
    "weights only": EVALUATES | {"save_only_model": True},
    "loading": off("dataloader_pin_memory dataloader_in_order remove_unused_columns shuffle_dataset")
    | off("completion_only_loss")
    | {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "dataloader_prefetch_factor": 3}
    | {"length_column_name": "size", "dataset_num_proc": 2, "dataset_text_field": "text", "dataset_kwargs": {}}
    | {"eos_token": "<|im_end|>", "pad_token": "<|pad|>"},
    "memory": on("gradient_checkpointing auto_find_batch_size use_cache")
    | {"gradient_checkpointing_kwargs": {"use_reentrant": True}, "torch_empty_cache_steps": 1},
    "selective checkpointing": {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False, "selective": True},
    },
    "processes": on("ddp_static_graph use_cpu trust_remote_code")
    | off("ddp_find_unused_parameters ddp_broadcast_buffers tf32")
    | {"ddp_bucket_cap_mb": 1, "ddp_timeout": 60, "local_rank": 0},
    "debugging": on("full_determinism do_train") | {"debug": "underflow_overflow"},
    "hub": on("hub_private_repo hub_always_push")
    | {"push_to_hub": False, "hub_model_id": "a/b", "hub_strategy": "end", "hub_token": "secret"}
    | {"hub_revision": "main"},
}
MARKS = {"selective checkpointing": selects_checkpoints}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> torch.Tensor:
    trainer = run_training(tmp_path_factory.mktemp("plain"), texts(), **BASE)
    assert weight_difference(weights(trainer), start_weights(), start_weights() + 1, 0) > 0
    return weights(trainer)


@pytest.fixture
def restored():
    """Put back `full_determinism`, `tf32` and `log_level`, which are settings of the process."""
    yield
    logging.set_verbosity_warning()
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.fp32_precision = "none"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", [pytest.param(name, marks=MARKS.get(name, ())) for name in KEEP_WEIGHTS])
def test_settings_that_keep_the_weights(group, plain, restored, tmp_path):
    """To the bit, packed, with every setting of the group at another value than its default."""
    settings = KEEP_WEIGHTS[group]
    defaults = config(tmp_path)
    options = {"eval_dataset": texts(10, 1)} if "eval_strategy" in settings else {}
    trainer = build_trainer(tmp_path, texts(), **BASE | settings | options)
    for name, value in settings.items():
        assert getattr(trainer.args, name) == value or name in ("report_to", "debug", "log_level", "hub_strategy"), name
    assert any(getattr(defaults, name) != value for name, value in settings.items())
    trainer.train()
    assert trainer.state.global_step == 3
    assert torch.equal(weights(trainer), plain)


# Fields that change the optimizer or the adapters are rows of the table of equivalences


@pytest.mark.parametrize(
    "settings", [{"packing_report": True}, {"config_class": trl.SFTConfig}], ids=["ours", "of TRL"]
)
def test_numbers_of_numpy_are_those_of_python(settings, tmp_path):
    """For example, `max_length` may be a percentile of lengths."""
    settings |= {"max_length": np.int64(64), "logging_steps": np.float32(1), "max_steps": 1}
    trainer = run_training(tmp_path, texts(8), **settings)
    assert json.loads((tmp_path / "packing_report.json").read_text())["max_length"] == 64
    assert type(trainer.args.max_length) is int
    assert type(trainer.args.logging_steps) in (int, float)


def test_speeds_of_numpy_are_taken(tmp_path):
    speeds = {"flops": np.float32(1e12), "ranks_per_node": np.int64(4)}
    sizes = {"tokens_per_rank": np.int64(64), "max_length": np.int64(128), "per_device_train_batch_size": 1}
    args = config(tmp_path, **sizes, exchange_speeds=speeds)
    assert args.tokens_per_rank == 64
    types = {name: type(value) for name, value in args.exchange_speeds.items()}
    assert types == {"flops": float, "ranks_per_node": int}


WITHOUT_EFFECT = {
    "completions": (
        {"completion_only_loss": True},
        Dataset.from_dict({"messages": [PROMPT + ANSWER] * 3}),
        r"`completion_only_loss=True` was given, and the train dataset has the columns \['messages'\]",
        "every token, because no row has a `prompt` and a `completion`; `assistant_only_loss=True` trains",
    ),
    "smoothing": (
        {"loss_type": "dft", "label_smoothing_factor": 0.1},
        texts(3),
        "`label_smoothing_factor=0.1` was given with `loss_type='dft'`",
        "every token",
    ),
    "mask": (
        {},
        Dataset.from_dict({"input_ids": [[5, 6, 7]] * 3, "completion_mask": [[0, 0, 1]] * 3}),
        "The train dataset has a column `completion_mask`, which is not read",
        "every token, because `completion_mask` is read with `completion_only_loss=True`",
    ),
}


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_what_has_no_effect_in_trl_is_said(name, packing, tmp_path):
    settings, data, message, rule = WITHOUT_EFFECT[name]
    with pytest.warns(UserWarning, match=message):
        trainer = build_trainer(tmp_path, data, packing=packing, **settings)
    assert trainer.data.trained_summary.rule.startswith(rule)


@pytest.mark.parametrize(
    "settings, data",
    [
        ({}, Dataset.from_dict({"messages": [PROMPT + ANSWER] * 3})),
        ({"completion_only_loss": True}, Dataset.from_dict({"prompt": ["a"] * 3, "completion": ["b"] * 3})),
        ({"completion_only_loss": True}, Dataset.from_dict({"input_ids": [[5, 6]], "completion_mask": [[0, 1]]})),
        ({"completion_only_loss": False}, Dataset.from_dict({"input_ids": [[5, 6]], "completion_mask": [[0, 1]]})),
        ({"completion_only_loss": True}, Dataset.from_dict({"input_ids": [[5, 6]], "labels": [[-100, 6]]})),
        ({"label_smoothing_factor": 0.1}, texts(3)),
    ],
)
def test_what_has_an_effect_is_not_warned_of(settings, data, tmp_path, recwarn):
    build_trainer(tmp_path, data, **settings)
    assert not [str(warning.message) for warning in recwarn if warning.category is UserWarning]


def test_offloading_on_a_cpu_is_refused(tmp_path):
    trainer = build_trainer(
        tmp_path, texts(), gradient_checkpointing=True, gradient_checkpointing_kwargs={"offload": True}, max_steps=1
    )
    with pytest.raises(PackingLeakError, match=r"without packing, and it failed: pin_memory=True .* not the cause"):
        trainer.train()


@pytest.mark.parametrize("packing", [True, False])
def test_several_gpus_in_one_process_are_refused(packing, tmp_path, monkeypatch):
    """Below 1.15 TRL does not refuse them. They are counted here behind its constructor, which has no GPU to count."""
    prepare = TrainingData.prepare_run

    def prepare_with_gpus(data):
        data.args._n_gpu = 2
        prepare(data)

    monkeypatch.setattr(TrainingData, "prepare_run", prepare_with_gpus)
    with pytest.raises(
        ValueError, match=r"^2 GPUs are visible to a single process.*`DataParallel`.*`accelerate launch`"
    ):
        build_trainer(tmp_path, texts(), packing=packing)


def test_four_bits_on_a_cpu_that_would_change_them_are_refused():
    model = build_tiny_model()
    check_quantisation(model, "cpu")
    model.lm_head.support_avx512bf16_for_cpu = True  # as bitsandbytes marks its modules
    check_quantisation(model, "cuda")
    with pytest.raises(ValueError, match="The model has 1 modules in 4 bits, and runs on a CPU.*Train it on a GPU"):
        check_quantisation(model, "cpu")


@pytest.mark.skipif(not importlib.util.find_spec("bitsandbytes"), reason="bitsandbytes is not installed")
@pytest.mark.filterwarnings("ignore")
def test_qlora_trains_as_unpacked(tmp_path, monkeypatch):
    """NF4, `use_bnb_nested_quant`: on the CPU kernels of bitsandbytes, without their format for inference."""
    from bitsandbytes.nn import modules

    monkeypatch.setattr(modules, "has_avx512bf16", lambda: False)
    build_tiny_model(hidden_size=64).save_pretrained(tmp_path / "model")
    quantised = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    settings = {name: value for name, value in BASE.items() if name != "packing_strategy"} | {"learning_rate": 1.0}
    ends = {}
    for name, package in (("start", trl), ("unpacked", trl), ("packed", trl_packfix)):
        more = {"packing": True, "packing_strategy": "minibatch"} if name == "packed" else {"packing": False}
        zero = {"learning_rate": 0.0} if name == "start" else {}
        torch.manual_seed(0)
        trainer = package.SFTTrainer(
            str(tmp_path / "model"),
            config(tmp_path / name, package.SFTConfig, **settings | more | zero),
            train_dataset=texts(),
            processing_class=build_tokenizer(),
            quantization_config=BitsAndBytesConfig(**quantised, bnb_4bit_compute_dtype=torch.float32),
            peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        assert sum("4bit" in type(module).__name__ for module in trainer.model.modules()) == 2 * 14  # and PEFT's
        trainer.train()
        ends[name] = torch.cat([p.detach().flatten() for p in trainer.model.parameters() if p.requires_grad])
    assert weight_difference(ends["packed"], ends["unpacked"], ends["start"]) < 1e-2  # the rest of the model is bf16


def test_documents_beyond_the_positions_need_a_rope_that_stretches(tmp_path):
    """Dynamic RoPE is made for them. Its angles depend on the longest row, so documents get their own."""
    rope = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
    model = build_tiny_model("qwen2", max_position_embeddings=32, **rope)
    trainer = build_trainer(tmp_path, texts(12), model=model, max_length=60, max_steps=1)
    assert trainer.data.source.documents.lengths.max() > 32
    trainer.train()
    assert trainer.packed_model.is_proved
    assert [repair.count for repair in trainer.packed_model.repaired] == [1]


@pytest.fixture
def processes_without_a_gpu(monkeypatch):
    for name in ("ACCELERATE_USE_CPU", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


def test_processes_without_a_gpu_are_refused_before_they_meet(processes_without_a_gpu, tmp_path):
    with pytest.raises(ValueError, match=r"8 processes were started, and no GPU was found .*set `use_cpu=True`, also"):
        SFTConfig(str(tmp_path), bf16=False)


def test_a_config_for_a_gpu_names_what_is_missing_where_there_is_none(monkeypatch, tmp_path):
    """Name the driver and the default where the first lines of README fail. The message of transformers names neither
    the driver nor the default.
    """
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    for options in ({}, {"bf16": True}):
        with pytest.raises(ValueError, match=r"`bf16=True` was given or is the default, without `use_cpu`, and no GPU"):
            SFTConfig(str(tmp_path), packing=True, **options)
    for options in ({"use_cpu": True}, {"bf16": False}):
        assert SFTConfig(str(tmp_path), packing=True, **options).packing


ASKED = {
    "use_cpu": lambda patch: {"use_cpu": True},
    "ddp_backend": lambda patch: {"ddp_backend": "gloo"},
    "accelerate": lambda patch: patch.setenv("ACCELERATE_USE_CPU", "true"),
    "deepspeed": lambda patch: patch.setenv("DS_ACCELERATOR", "cpu"),
    "one process": lambda patch: patch.setenv("WORLD_SIZE", "1"),
    "a GPU": lambda patch: patch.setattr(torch.accelerator, "is_available", lambda: True),
}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_processes_on_cpus_train_where_they_were_asked_for(ask, processes_without_a_gpu, monkeypatch):
    arguments = {"use_cpu": False, "ddp_backend": None}
    check_devices(SimpleNamespace(**arguments | (ask(monkeypatch) or {})))


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_the_command_does_not_ask_for_cpus_itself(launcher, processes_without_a_gpu, monkeypatch, tmp_path):
    if launcher == "deepspeed":
        monkeypatch.setenv("CROSS_SIZE", "1")
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "")  # both are set again by the command, and then restored
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")
    with pytest.raises(ValueError, match="8 processes were started, and no GPU was found"):
        parse_configs(["--output_dir", str(tmp_path), "--packing", "true"])
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    asked = machine_settings()
    assert asked.get("use_cpu") or asked.get("ddp_backend") == "gloo"


def test_importing_deepspeed_does_not_ask_for_cpus(processes_without_a_gpu):
    pytest.importorskip("deepspeed")
    train_command._import_deepspeed()
    assert "DS_ACCELERATOR" not in os.environ
