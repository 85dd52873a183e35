"""Scenarios of the trainer that run on any number of ranks; `test_distributed.py` launches them on two.

    python tests/two_ranks.py FOLDER
    torchrun --standalone --nproc_per_node 2 tests/two_ranks.py die_ddp FOLDER
    deepspeed --num_gpus 2 tests/two_ranks.py die_zero3 FOLDER

FOLDER holds `documents`, a dataset on disk; `model`, `tied` and `leaking`, tiny Llamas (the second with one matrix for
embeddings and LM head) and a bloom; `mamba` and `lfm2`; and a DeepSpeed config for each engine of DeepSpeed. A pair of
forks runs all scenarios of its engines, because starting one takes longer than the scenarios; `die_ddp` and `die_zero3`
have pairs of their own, of a launcher. Each scenario returns a dictionary that the main process saves as
FOLDER/ENGINE/NAME.pt; the first that raises ends its launch. A test calls the same functions in its own process for the
numbers of one rank.
"""

import faulthandler
import importlib.util
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # DeepSpeed's launcher shows its ranks the GPUs that the test has hidden

import numpy as np
import torch
import trl
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, gather_object
from datasets import Dataset, load_from_disk
from peft import LoraConfig
from support import engine_state
from support.launch import fork_ranks
from support.models import build_tiny_model, build_tokenizer
from support.prefixes import forest
from support.versions import SHARDS_GRADIENTS_ON_CPUS, load_on_cpu_ranks, run_deepspeed_on_cpus
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader
from transformers import EvalPrediction, TrainerCallback

import trl_packfix.data.epochs
from trl_packfix import check_isolation
from trl_packfix.data.collator import PackedDataCollator
from trl_packfix.isolation import check_isolation as isolation
from trl_packfix.training.checks import synchronisation

ROOT = Path(__file__).parent.parent

# The engines of one process pair, in the order in which they run
LAUNCHES = {"ddp": ["ddp"], "deepspeed": ["zero3", "zero1", "zero2", "zero3_offload"], "fsdp2": ["fsdp2"]}
if not SHARDS_GRADIENTS_ON_CPUS:
    LAUNCHES["deepspeed"] = ["zero3", "zero3_offload"]

load_on_cpu_ranks()
TOKENIZER = build_tokenizer()
NUM_EVALUATED = 23
DIGITS = 3

# 37 documents, 8 in a step: the last step has 5, which 2 ranks x 2 micro-batches x 2 cannot share evenly.
FIVE_STEPS = {
    "num_documents": 37,
    "max_steps": 5,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "packing_strategy": "minibatch",
}

THREE_EPOCHS = {"num_train_epochs": 3, "num_documents": 60, "learning_rate": 1e-2}


def documents(num: int, seed: int = 0) -> Dataset:
    """Texts of 3 to 60 letters, so many tokens plus one; each begins with its own number."""
    rng = np.random.default_rng(seed)
    letters = ("".join(rng.choice(list("abcdef "), n)) for n in rng.integers(0, 58, num))
    return Dataset.from_dict({"text": [f"{i:0{DIGITS}d}{text}" for i, text in enumerate(letters)]})


def with_values(dataset: Dataset) -> Dataset:
    """Weights and sources by the number of the document; neither is the same on two neighbours."""
    numbers = range(len(dataset))
    dataset = dataset.add_column("share", [(0.0, 3.0, 0.25, 1.0, 9.0)[i % 5] for i in numbers])
    return dataset.add_column("source", [("a", "b", "c")[i % 7 // 3] for i in numbers])


def document_ids(batch: dict) -> list[int]:
    """The numbers of the documents of a batch, packed or padded; dummies, which begin with padding, have none."""
    rows = batch["input_ids"]
    if "cu_seq_lens_q" in batch:
        rows = rows[0].split(batch["cu_seq_lens_q"].diff().tolist())
    starts = (TOKENIZER.decode(row[:DIGITS]) for row in rows)
    return [int(start) for start in starts if start.isdigit()]


def engine_of(model: torch.nn.Module) -> str:
    """What wraps the model that trains, as the engine itself says it."""
    if isinstance(model, FSDPModule):
        return "FSDP2"
    if hasattr(model, "zero_optimization_stage"):
        offload = " offload" if model.zero_offload_optimizer() else ""
        return f"{type(model).__name__} {model.zero_optimization_stage()}{offload}"
    return type(model).__name__


def deepspeed_config(engine: str) -> dict:
    """The config that this repository ships, as a CPU can run it; ZeRO-1 is ZeRO-2 with another number."""
    config = json.loads((ROOT / "deepspeed_configs" / f"{engine.replace('zero1', 'zero2')}.json").read_text())
    zero = config["zero_optimization"]
    zero["stage"] = int(engine.removesuffix("_offload")[-1])
    zero["overlap_comm"] = False  # wants streams, which a CPU has not
    for name in ("offload_optimizer", "offload_param"):
        if name in zero:
            zero[name]["pin_memory"] = False
            config["zero_force_ds_cpu_optimizer"] = False  # which would be compiled for minutes; torch's does
    return config


def engine_settings(engine: str | None, folder: Path) -> dict:
    """What `engine` wants of the config and of its surroundings, before the config is made; None is one process."""
    if engine == "fsdp2":
        # accelerate shards only where it believes in GPUs; the rest of FSDP2 runs on a CPU as it is.
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState(cpu=True, backend="gloo")
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        keep = {"use_configured_state": True}
        return {"use_cpu": True, "accelerator_config": keep, "fsdp": True, "fsdp_config": {"version": 2}}
    if engine in LAUNCHES["deepspeed"]:
        # Under DeepSpeed `use_cpu` would hide the ranks; its launcher needs the backend named where there is no GPU.
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(folder / f"{engine}.json")
        return {"ddp_backend": "gloo"}
    return {"use_cpu": True}


class Recorded:
    """Notes the engine that trains and the documents of every micro-batch that reaches it."""

    engine = None

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.engine = engine_of(model)
        self.seen.append(document_ids(inputs))
        return super().training_step(model, inputs, num_items_in_batch)


class Packed(Recorded, trl_packfix.SFTTrainer):
    pass


class Reversed(Packed):
    """Adds up the gradients of an optimizer step in the opposite order, which changes nothing but their rounding."""

    def get_batch_samples(self, *given):
        batches, num_items = super().get_batch_samples(*given)
        return batches[::-1], num_items


class Stock(Recorded, trl.SFTTrainer):
    pass


class Alternating(Packed):
    """Ranks hold 1, 3 and 20 documents in turn, and never as many as each other; one process trains the same steps."""

    COUNTS = (1, 3, 20)

    def get_train_dataloader(self) -> DataLoader:
        super().get_train_dataloader()  # makes the report
        tokens = iter(self.train_dataset["input_ids"])
        batches = []
        for micro_step in range(6):
            for rank in (0, 1):
                count = self.COUNTS[(micro_step + rank) % 3]
                batch = [{"input_ids": next(tokens)} for _ in range(count)]
                if self.args.world_size == 1 or rank == self.args.process_index:
                    batches.append(PackedDataCollator()(batch))
        return DataLoader(batches, batch_size=None)


class ReversedAlternating(Alternating, Reversed):
    pass


def make_trainer(
    folder: Path,
    name: str,
    cls: type = Packed,
    engine: str | None = None,
    model: str = "model",
    num_documents: int = 97,
    dataset: Dataset | None = None,
    eval_dataset: Dataset | None = None,
    lora: bool = False,
    **settings,
) -> Packed | Stock:
    """A trainer on `folder / model` that writes to `folder / name`."""
    config = trl.SFTConfig
    if issubclass(cls, Packed):
        config = trl_packfix.SFTConfig
        settings = {"packing": True, "packing_report": False} | settings
    defaults = {
        "max_length": 64,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 2.0 if lora else 0.5,
        "gradient_checkpointing": False,
        "bf16": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "ddp_timeout": 90,  # turns a hang into an error
        **engine_settings(engine, folder),
    }
    args = config(str(folder / name), **(defaults | settings))
    torch.manual_seed(0)  # for the adapters, which TRL makes before it sets the seed
    trainer = cls(
        str(folder / model),
        args,
        train_dataset=documents(num_documents) if dataset is None else dataset,
        eval_dataset=documents(NUM_EVALUATED, seed=1) if eval_dataset is None else eval_dataset,
        processing_class=TOKENIZER,
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None,
    )
    trainer.seen = []
    return trainer


def outcome(trainer: Packed | Stock, **further) -> dict:
    """What every scenario tells; `seen` is [rank][micro-batch][document], `isolation` the verdict of the leak probe."""
    report = getattr(trainer, "packing_report", None)  # made when training starts; stock TRL has none
    isolation = report.isolation if report else None
    return {
        "folder": trainer.args.output_dir,
        "world_size": trainer.args.world_size,
        "process_group": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
        "engine": trainer.engine,
        "synchronisation": synchronisation(trainer.accelerator, trainer.model),
        "seen": gather_object([trainer.seen]),
        "num_steps": trainer.state.global_step,
        "isolation": isolation and (isolation.isolated, isolation.equal, isolation.attention),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "num_tokens": [entry["num_tokens"] for entry in trainer.state.log_history if "loss" in entry],
        "logged": [
            [entry.get(name) for name in ("entropy", "mean_token_accuracy", "trained_tokens", "documents_per_step")]
            for entry in trainer.state.log_history
            if "loss" in entry
        ],
    } | further


def evaluation(trainer: Packed) -> dict:
    """Numbers of an evaluation packed, padded, and padded for a metric; documents that the metric and `predict` got."""
    rows = []

    def count_rows(prediction: EvalPrediction) -> dict:
        rows.append(document_ids({"input_ids": torch.from_numpy(prediction.label_ids)}))
        return {"rows": len(prediction.predictions)}

    results = {}
    for name, packing, metric in (("packed", True, None), ("padded", False, None), ("metric", True, count_rows)):
        trainer.args.eval_packing, trainer.compute_metrics = packing, metric
        trainer.evaluate()
        logged = trainer.state.log_history[-1]
        results[name] = {key: logged[f"eval_{key}"] for key in ("loss", "mean_token_accuracy", "entropy")}
    results["rows"] = rows[0]
    predicted = trainer.predict(trainer.eval_dataset)
    results["predicted"] = document_ids({"input_ids": torch.from_numpy(predicted.label_ids)})
    return results


# The scenarios


def epochs(folder: Path, cls: type = Packed, **settings) -> dict:
    """Two epochs."""
    trainer = make_trainer(folder, "epochs", cls, num_train_epochs=2, learning_rate=1e-2, **settings)
    trainer.train()
    return outcome(trainer)


def kept(folder: Path, **settings) -> dict:
    """The same of documents on a disk, beside which their plans are kept."""
    many, trl_packfix.data.epochs.MANY = trl_packfix.data.epochs.MANY, 10
    found = epochs(folder, dataset=load_from_disk(folder / "documents"), **settings)
    trl_packfix.data.epochs.MANY = many
    return found | {"kept": len(list((folder / "documents").glob("cache-packfix-packs-*")))}


def drop_last(folder: Path, name: str, **settings) -> dict:
    """An epoch without its last, incomplete step, with what the report says of it; and one with that step."""
    results = []
    for drop in (True, False):
        trainer = make_trainer(folder, name, num_train_epochs=1, dataloader_drop_last=drop, **settings)
        trainer.train()
        results.append(outcome(trainer, report=trainer.packing_report.to_dict()))
    return results[0] | {"whole": results[1]}


def five_steps(folder: Path, name: str, evaluates_first: bool = False, **settings) -> dict:
    """Five optimizer steps of SGD; the model is saved as `folder / name` and evaluated."""
    trainer = make_trainer(folder, name, **FIVE_STEPS | settings)
    if evaluates_first:
        trainer.evaluate()
    trainer.train()
    trainer.save_model()
    parameters = [float(p.detach().double().norm()) for p in trainer.model.parameters()]
    return outcome(trainer, evaluation=evaluation(trainer), norms=gather_object([parameters]))


def five_steps_unpacked(folder: Path, name: str, **settings) -> dict:
    """The same in TRL, padded; the model is saved before, too, as `folder / name / "start"`."""
    ours = ("packing_strategy", "on_leak")
    settings = {key: value for key, value in (FIVE_STEPS | settings).items() if key not in ours}
    trainer = make_trainer(folder, name, Stock, **settings)
    trainer.save_model(str(folder / name / "start"))
    trainer.train()
    trainer.save_model()
    return outcome(trainer)


def shared(folder: Path, name: str, **settings) -> dict:
    """The same of documents that begin alike; the model is saved as `folder / name`."""
    sets = {"dataset": forest(37), "eval_dataset": forest(NUM_EVALUATED, seed=1), "max_length": 96}
    return weighted(folder, name, **sets | {"share_prefixes": "pack"} | settings)


def weighted(folder: Path, name: str, **settings) -> dict:
    """Five steps with weights and sources, and an evaluation; the model is saved as `folder / name`."""
    values = {"weight_column": "share", "source_column": "source"}
    sets = {"dataset": with_values(documents(37)), "eval_dataset": with_values(documents(NUM_EVALUATED, seed=1))}
    trainer = make_trainer(folder, name, **FIVE_STEPS | values | sets | settings)
    trainer.train()
    trainer.save_model()
    by_source = [
        {key: entry[key] for key in entry if "/" in key} for entry in trainer.state.log_history if "loss" in entry
    ]
    shares = [entry["computed_share"] for entry in trainer.state.log_history if "computed_share" in entry]
    return outcome(trainer, by_source=by_source, computed=shares, evaluated=trainer.evaluate())


def alternating(folder: Path, name: str, model: str, cls: type = Alternating, **settings) -> dict:
    """Three optimizer steps on packs of 1, 3 and 20 documents; the model is saved as `folder / name`."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    settings = FIVE_STEPS | {"max_steps": 3, "num_documents": 97, "gradient_accumulation_steps": 4 // ranks} | settings
    trainer = make_trainer(folder, name, cls, model=model, learning_rate=0.1, **settings)
    trainer.train()
    trainer.save_model()
    return outcome(trainer, repaired=[repair.module for repair in trainer.packing_report.isolation.repaired])


def evaluate_first(folder: Path, **settings) -> dict:
    """Evaluation of a model that no engine has trained."""
    trainer = make_trainer(folder, "evaluate", **settings)
    return outcome(trainer, evaluation=evaluation(trainer))


def restart(folder: Path, name: str, **settings) -> dict:
    """Three epochs whole, then again from a checkpoint in the middle of the second; both models are saved."""
    settings = THREE_EPOCHS | {"save_strategy": "steps"} | settings
    whole = make_trainer(folder, f"{name}/whole", **settings)
    per_epoch = len(whole.get_train_dataloader()) // whole.args.gradient_accumulation_steps
    stop = per_epoch + per_epoch // 2
    whole.state.save_steps = whole.args.save_steps = stop
    whole.train()
    whole.save_model()
    resumed = make_trainer(folder, f"{name}/resumed", **settings | {"save_strategy": "no"})
    resumed.train(resume_from_checkpoint=str(folder / name / "whole" / f"checkpoint-{stop}"))
    resumed.save_model()
    return outcome(resumed, whole=outcome(whole), per_epoch=per_epoch, stop=stop)


class StopsAt(TrainerCallback):
    """Saves and ends the run after a step, as if it had been killed behind its checkpoint."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = control.should_training_stop = state.global_step == self.step


# A run on one rank, on two and on one again; each stops in the second epoch.
LEGS = {"one": {"gradient_accumulation_steps": 3}, "two": {}, "one_again": {"per_device_train_batch_size": 1}}
STOPS = {"one": 7, "two": 9}


def elastic(folder: Path, name: str, before: str | None = None, **settings) -> dict:
    """Leg `name` of a run of three epochs, from the checkpoint in which leg `before` ended."""
    trainer = make_trainer(folder, f"elastic/{name}", **THREE_EPOCHS | LEGS[name] | settings)
    if name in STOPS:
        trainer.add_callback(StopsAt(STOPS[name]))
    trainer.train(before and str(folder / "elastic" / before / f"checkpoint-{STOPS[before]}"))
    return outcome(trainer, accumulation=trainer.args.gradient_accumulation_steps, total=trainer.state.max_steps)


class Watched(TrainerCallback):
    """Notes the state of the engine before and after each probe: the trainer's own, one more, and one in training.

    It is called twice for each event, before and after all other callbacks.
    """

    def __init__(self, trainer: Packed):
        self.trainer, self.states = trainer, []

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer.packed_model.attend()  # adds hooks, and is not the probe
        self.states.append(engine_state.snapshot(self.trainer))
        if len(self.states) == 2:
            self.probe()

    def on_step_end(self, args, state, control, **kwargs):
        if len(self.states) == 3:
            self.states.append(engine_state.snapshot(self.trainer))
            self.probe()

    def probe(self) -> None:
        assert trl_packfix.check_isolation(self.trainer.model_wrapped, self.trainer.args.max_length).isolated
        self.states.append(engine_state.snapshot(self.trainer))


def probed(folder: Path, **settings) -> dict:
    """What the probes changed of the engine's state, and what an optimizer step did, on any rank."""
    trainer = make_trainer(folder, "probed", **FIVE_STEPS | {"max_steps": 2, "optim": "adamw_torch"} | settings)
    watched = Watched(trainer)
    trainer.callback_handler.callbacks.insert(0, watched)
    trainer.callback_handler.callbacks.append(watched)
    trainer.train()
    names = ("first probe", "second probe", "step", "probe after the step")
    changed = [sorted(engine_state.changed(*pair)) for pair in pairwise(watched.states)]
    counts = {name: len(values) for name, values in watched.states[0].items()}
    ranks = gather_object([dict(zip(names, changed, strict=True))])
    return outcome(trainer, changed={name: [rank[name] for rank in ranks] for name in names}, counts=counts)


def rounded(folder: Path, engine: str) -> dict:
    """The verdict of each rank on a model that leaks in bf16, where rank 1 sees nothing move at the model's end."""
    settings = FIVE_STEPS | {"model": "leaking", "bf16": True, "on_leak": "unpack", "max_steps": 1}
    trainer = make_trainer(folder, "rounded", engine=engine, **settings)
    measured = isolation.distance
    if trainer.args.process_index == 1:
        isolation.distance = lambda *given: 0.0
    verdicts = []

    class Judge(TrainerCallback):
        def on_train_begin(self, *given, **kwargs):
            with trainer.packed_model.attending(), trainer.compute_loss_context_manager():
                verdicts.append(check_isolation(trainer.model_wrapped, trainer.args.max_length))
            isolation.distance = measured

    trainer.callback_handler.callbacks.insert(0, Judge())
    trainer.train()
    leaks = [leak.module.removeprefix("FSDP") for leak in verdicts[0].leaks]
    return outcome(trainer, verdicts=gather_object([[verdicts[0].isolated, verdicts[0].max_change, leaks]]))


def refused(folder: Path, engine: str) -> dict:
    """What is said to a loss that would depend on how documents are spread over ranks."""
    try:
        make_trainer(folder, "refused", engine=engine, average_tokens_across_devices=False)
    except ValueError as error:
        return {"message": str(error)}
    return {"message": ""}


class Dies(TrainerCallback):
    """Rank 1 gets SIGKILL in the middle of an optimizer step; `folder / "killed"` says when."""

    STEP = 7

    def __init__(self, folder: Path):
        self.folder = folder

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == self.STEP and args.process_index == 1:
            (self.folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)


def die(folder: Path, engine: str) -> None:
    """Train with a checkpoint every second step, until rank 1 dies."""
    settings = THREE_EPOCHS | {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    trainer = make_trainer(folder, "run", engine=engine, **settings)
    trainer.add_callback(Dies(folder))
    trainer.train()


STRATEGIES = ("stream", "minibatch")
WORKERS = {"stream": (0, 2), "minibatch": (0,)}  # what workers are sent does not depend on the strategy
DROPPING = (*STRATEGIES, "bfd")  # with an incomplete last step
CHECKPOINTED = {"gradient_checkpointing": True}  # TRL's default, and with LoRA under ZeRO-3 the reentrant kind
KINDS = {
    "full": {},
    "full_checkpointed": CHECKPOINTED,
    "lora": {"lora": True},
    "lora_checkpointed": {"lora": True} | CHECKPOINTED,
    "tied": {"model": "tied"} | CHECKPOINTED,
    "idle": {"num_documents": 3},  # one of the four micro-batches of 2 ranks has no document
    "unpacked": {"model": "leaking", "on_leak": "unpack"},
    "repaired": {"model": "leaking"},
}
BY_DOCUMENT = {"document_weighting": "document"}
PADDED = {"packing": False}


HALF = ("ddp", "fsdp2")  # DeepSpeed asks for a GPU before it allows bf16
ALTERNATING = ("model", "leaking", "mamba", "lfm2")


def strategies(engine: str) -> tuple[str, ...]:
    """What is planned, and how it is loaded, does not depend on the engine: one runs them all."""
    return STRATEGIES if engine == "ddp" else ("stream",)


def scenarios(engine: str) -> dict[str, Callable[[Path], dict]]:
    """By name, in the order in which they run."""
    found = {
        f"five_{kind}": partial(five_steps, name=f"{engine}/five_{kind}", engine=engine, **settings)
        for kind, settings in KINDS.items()
    }
    if engine in ("zero1", "zero2", "zero3_offload"):
        return {f"five_{kind}": found[f"five_{kind}"] for kind in ("full_checkpointed", "lora", "idle")}
    if engine == "zero3":  # what is trained with checkpointing
        del found["five_full"], found["five_lora"]
    if engine != "fsdp2":  # accelerate 1.15 does not prepare a model for FSDP2 without an optimizer
        found["evaluate_first"] = partial(evaluate_first, engine=engine)
    found["five_document"] = partial(five_steps, name=f"{engine}/five_document", engine=engine, **BY_DOCUMENT)
    found["weighted"] = partial(weighted, name=f"{engine}/weighted", engine=engine)
    found["shared"] = partial(shared, name=f"{engine}/shared", engine=engine)
    if engine == "zero3":
        found["prefetches"] = lambda folder: prefetches()
    if engine == "ddp":
        settings = {"packing_strategy": "stream", "document_weighting": "document"}
        found["weighted_documents"] = partial(weighted, name="ddp/weighted_documents", engine=engine, **settings)
    for strategy in strategies(engine):
        settings = {"packing_strategy": strategy, "engine": engine}
        found[f"epochs_{strategy}"] = partial(epochs, **settings)
        if engine == "ddp":
            found[f"few_{strategy}"] = partial(epochs, num_documents=3, gradient_accumulation_steps=4, **settings)
        for workers in WORKERS[strategy] if engine == "ddp" else (0,):
            name = f"restart_{strategy}_{workers}"
            more = settings | {"dataloader_num_workers": workers}
            found[name] = partial(restart, name=f"{engine}/{name}", **more)
    found["probed"] = partial(probed, engine=engine)
    for model in ALTERNATING if engine != "ddp" else ():
        name = f"alternating_{model}"
        found[name] = partial(alternating, name=f"{engine}/{name}", model=model, engine=engine)
    if engine in HALF:
        found["five_bf16"] = partial(five_steps, name=f"{engine}/five_bf16", engine=engine, bf16=True)
        leaking = {"model": "leaking", "engine": engine, "bf16": True}
        found["rounded"] = partial(rounded, engine=engine)
        found["leaking_bf16"] = partial(alternating, name=f"{engine}/leaking_bf16", **leaking)
    if engine == "ddp":
        found["elastic"] = partial(elastic, name="two", before="one", engine=engine)
        found["five_padded"] = partial(five_steps, name="ddp/five_padded", engine=engine, **PADDED)
        for name, settings in {"full_evaluated": {}, "padded_evaluated": PADDED}.items():
            settings = {"evaluates_first": True, "engine": engine} | settings
            found[f"five_{name}"] = partial(five_steps, name=f"ddp/five_{name}", **settings)
        found["epochs_stock"] = partial(epochs, cls=Stock, engine=engine)
        found["kept"] = partial(kept, engine=engine)
        found["refused"] = partial(refused, engine=engine)
        for strategy in DROPPING:
            settings = {"packing_strategy": strategy, "engine": engine}
            found[f"drop_last_{strategy}"] = partial(drop_last, name=f"{engine}/drop_last_{strategy}", **settings)
    return found


HEAD = 1.25e9  # numbers of the LM head of Qwen2.5-72B


def prefetches() -> dict[str, Any]:
    """Prefetches in the third step, with DeepSpeed's default of `stage3_max_live_parameters` and with the shipped one.

    Both are scaled by the LM head, as if that of the tiny model were of a model with 72B parameters.
    """
    import deepspeed

    shipped = deepspeed_config("zero3")["zero_optimization"]["stage3_max_live_parameters"]
    found = {}
    for name, live in (("default", 1e9), ("shipped", shipped)):
        model = build_tiny_model()
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 3600}
        head = model.lm_head.weight
        numbers = getattr(head, "ds_numel", head.numel())  # a scenario before this one may have left ZeRO-3's `Init` on
        zero |= {"stage3_max_live_parameters": int(live * numbers / HEAD)}
        zero |= {"stage3_max_reuse_distance": 0, "reduce_bucket_size": 4096}
        config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "zero_optimization": zero}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        deepspeed.zero.register_external_parameter(model, model.lm_head.weight)  # as `gather_lm_head_with_model` does
        coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
        profiler = coordinator._PartitionedParameterCoordinator__profiler
        events = []
        stop = profiler.stop_event
        profiler.stop_event = lambda event, size, stop=stop, events=events: (events.append(event), stop(event, size))
        for _ in range(3):  # DeepSpeed records the order of modules in the first ones
            events.clear()
            engine.backward(engine(input_ids=torch.ones(1, 16, dtype=torch.long)).logits.sum())
            engine.step()
        found[name] = sum("prefetch" in event for event in events)
        found["engine"] = engine_of(engine)
    return found


def run_rank(launch: str, folder: Path) -> None:
    warnings.simplefilter("ignore")
    engines = LAUNCHES.get(launch, [launch.removeprefix("die_")])
    if engines[0] in LAUNCHES["deepspeed"]:
        run_deepspeed_on_cpus()
    if launch.startswith("die_"):
        die(folder, engines[0])
    for engine in engines:
        for name, scenario in scenarios(engine).items():
            start = time.monotonic()
            faulthandler.dump_traceback_later(80)  # a hang says where, before `ddp_timeout` ends it
            result = scenario(folder)
            faulthandler.cancel_dump_traceback_later()
            if os.environ["RANK"] == "0":
                torch.save(result, folder / engine / f"{name}.pt")
                print(f"scenario {engine} {name}: {time.monotonic() - start:.1f} s", flush=True)
    torch.distributed.destroy_process_group()


def main(folder: Path) -> int:
    launches = [name for name in LAUNCHES if name != "deepspeed" or importlib.util.find_spec("deepspeed")]
    ended = [fork_ranks(2, partial(run_rank, launch, folder)) for launch in launches]
    return int(not all(ended))


if __name__ == "__main__":
    if "RANK" in os.environ:  # of a launcher
        run_rank(sys.argv[-2], Path(sys.argv[-1]))
    else:
        sys.exit(main(Path(sys.argv[-1])))
