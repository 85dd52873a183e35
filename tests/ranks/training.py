"""One training of a row of the table, on any ranks: packed, or unpacked as its reference."""

import copy
import warnings
import zlib
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import trl
from accelerate.utils import gather_object
from packaging.version import Version
from support import engine_state, vision
from support.models import build_tokenizer
from support.runs import PLAIN_RUN, plain_sgd
from support.user_code import USER_CODE
from support.versions import TRL
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PrinterCallback, TrainerCallback
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

import trl_packfix
from trl_packfix import check_isolation
from trl_packfix.layout import layout_of

from . import faults
from .engines import DIVIDING, data_ranks_of, engine_of, engine_settings, gathered, ranks_of, weights_of
from .table import ADAPTERS, NUM_STEPS, Row, build_model

COMMON = plain_sgd(0.5) | PLAIN_RUN | {"max_length": 96, "max_steps": NUM_STEPS}
COMMON["ddp_timeout"] = 90  # turns a hang into an error
RATES = dict.fromkeys(("lora", "dora", "dora_attention", "rslora", "inputs"), 2.0)
RATES |= dict.fromkeys(("attention", "language", "towers"), 1.0) | {"ia3": 100.0}


class Packed(trl_packfix.SFTTrainer):
    """Notes the engine, and of every micro-batch the degree and the shapes."""

    def get_batch_samples(self, *args):
        batches, num_items = super().get_batch_samples(*args)
        self.engine = engine_of(self.model_wrapped)
        for batch in batches:
            layout = layout_of(batch)
            self.seen.append((layout.group.size, layout.group.rank, layout.document_count))
            self.shapes.add((layout.group.size, batch["input_ids"].shape[1], batch.get("max_length_q")))
            self.with_images.append("pixel_values" in batch)
        return batches, num_items


class CountTiles(TrainerCallback):
    """Counts the tiles or patches that the vision tower computes on this rank in optimizer steps."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.handles = []

    def on_step_begin(self, *call, **kwargs):
        modules = self.trainer.accelerator.unwrap_model(self.trainer.model).named_modules()
        first = [module for name, module in modules if name.endswith(("patch_embed", "patch_embedding"))]
        self.handles = [module.register_forward_pre_hook(self.count) for module in first]

    def on_step_end(self, *call, **kwargs):
        for handle in self.handles:
            handle.remove()

    def count(self, module, args):
        self.trainer.computed.append(len(args[0]))


def save_model(folder: Path, name: str) -> None:
    if not (folder / "models" / name).is_dir():
        build_model(name).save_pretrained(folder / "models" / name)


def load_model(folder: Path, row: Row, engine: str | None) -> Any:
    """Load the same weights on any ranks: under ZeRO-3 a model that is built would be drawn in parts."""
    kind = AutoModelForImageTextToText if row.has_images else AutoModelForCausalLM
    more = {"distributed_config": DIVIDING[engine]} if engine in DIVIDING else {}
    return kind.from_pretrained(folder / "models" / row.model, dtype=row.dtype, **more)


def processor_of(row: Row) -> Any:
    if not row.has_images:
        return build_tokenizer()
    processor = vision.build_processor(row.model)
    return vision.stripping(processor) if row.data == "screens" else processor


def set_adapters(model: torch.nn.Module) -> None:
    """Set adapters to the same numbers on any ranks: peft draws what a rank has of them in its own size."""
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            continue
        with gathered(parameter, changes=True), torch.no_grad():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            drawn = (0.1 * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                drawn = distribute_tensor(drawn, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(drawn)


def make_trainer(
    folder: Path,
    row: Row,
    engine: str | None = None,
    cls: type = Packed,
    data: Any = None,
    eval_data: Any = None,
    model: Any = None,
    callbacks: Any = None,
    **more: Any,
) -> Any:
    """Make a trainer of a row on the ranks of `engine`, with the data and settings of the row, or with others."""
    data = row.documents() if data is None else data
    make_class, loss_func, _ = USER_CODE[row.code]
    cls = make_class(cls)
    size = ceil(row.size / (data_ranks_of(engine) * row.micro_batches))
    settings = COMMON | {"per_device_train_batch_size": size, "gradient_accumulation_steps": row.micro_batches}
    settings |= {"learning_rate": RATES[row.adapter]} if row.adapter else {}
    settings |= {"max_length": row.shares or 384, "learning_rate": 0.1} if row.has_images else {}
    settings |= row.given
    if not issubclass(cls, trl_packfix.SFTTrainer):
        config = trl.SFTConfig
        settings["packing"] = False
        settings |= {"max_length": None} if row.has_images else {}
        if Version("1.15") > TRL:  # the default loss, in chunks, reads what some models do not have
            settings |= {"loss_type": "nll"}
    else:
        config = trl_packfix.SFTConfig
        settings |= {"packing": True, "packing_report": False, "packing_strategy": "minibatch"}
        if row.shares:
            settings |= {"packing_strategy": "stream", "tokens_per_rank": row.shares // ranks_of(engine)}
            settings |= {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}
        if row.shards:
            settings["packing_strategy"] = "stream"
            data = data.to_iterable_dataset(row.shards)
        settings |= row.ours
    settings |= engine_settings(engine, folder) | more
    if settings.pop("by_name", False):  # as users give it
        model = str(folder / "models" / row.model)
        settings["model_init_kwargs"] = {"dtype": row.dtype, "distributed_config": DIVIDING[engine]}
    settings["output_dir"] = str(folder / settings.get("output_dir", "runs"))
    if settings.pop("recomputes", False):
        settings["fsdp_config"] = settings["fsdp_config"] | {"activation_checkpointing": True}
    if eval_data is None and (row.evaluates or settings.get("eval_on_start")):
        eval_data = row.documents(seed=1)
    args = config(**settings)
    trainer = cls(
        load_model(folder, row, engine) if model is None else model,
        args,
        train_dataset=data,
        eval_dataset=eval_data,
        processing_class=processor_of(row),
        peft_config=copy.copy(ADAPTERS[row.adapter]) if row.adapter else None,
        callbacks=callbacks,
        compute_loss_func=loss_func,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(CountTiles(trainer))
    set_adapters(trainer.model)
    trainer.engine = None
    trainer.seen = []
    trainer.shapes = set()
    trainer.computed = []
    trainer.with_images = []
    if not row.proves:
        trainer.packed_model.prove_degree = lambda wrapped, degree: None
    return trainer


@contextmanager
def in_little_memory(tiles: int):
    """Run the MLP in tiles, and count what is offloaded.

    Under ZeRO-3 all ranks must call a layer equally often, so tiles have a number, not a size. transformers pins what
    is offloaded, which torch cannot do without an accelerator, so say that there is none.
    """
    forward_at_once = Qwen3MLP.forward

    def tiled(self, x):
        return torch.cat([forward_at_once(self, tile) for tile in x.tensor_split(tiles, dim=1)], dim=1)

    with (
        mock.patch.object(Qwen3MLP, "forward", tiled),
        mock.patch.object(torch.cpu, "is_available", return_value=False) as asked,
    ):
        yield asked


def outcome(trainer: Any) -> dict[str, Any]:
    """Return the weights, and what is logged of each step. All ranks must call this."""
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {"end": weights_of(trainer), "logged": entries}


def train(folder: Path, row: Row, engine: str | None = None, data: Any = None, **more: Any) -> dict[str, Any]:
    """Train a row, on the ranks that run this."""
    trainer = make_trainer(folder, row, engine, data=data, **more)
    offloads = (trainer.args.gradient_checkpointing_kwargs or {}).get("offload")
    with in_little_memory(tiles=3) if offloads else nullcontext() as offloaded:
        trainer.train()
    verdicts = verdicts_of_engine(trainer, row.finds) if row.finds else None
    report = getattr(trainer, "packing_report", None)  # of packs
    isolation = trainer.packed_model.isolation if trainer.args.packing else None
    result = outcome(trainer) | {
        "engine": trainer.engine,
        "verdicts": verdicts,
        "offloaded": offloaded.call_count if offloads else 0,
        "seen": trainer.seen,
        "shapes": trainer.shapes,
        "with_images": gather_object([trainer.with_images]),
        "proof": isolation and (isolation.isolated, isolation.equal, isolation.attention),
        "proved": sorted(trainer.packed_model._proved_degrees) if row.shares else [],
        "report": report.to_dict() if report else {},
        "eval": trainer.evaluate() if row.evaluates else {},
        "tiles": sum(gather_object([sum(trainer.computed)])),
        "unpacked": trainer.args.packing and trainer.packed_model.is_unpacked,
        "divided": sum(isinstance(parameter, DTensor) for parameter in trainer.model.parameters()),
    }
    return result


def verdicts_of_engine(trainer: Any, fault: str) -> dict[str | None, Any]:
    """Return what the proof on two ranks per pack says of gradients and states, without and with a fault.

    The list "changed" names what the proof changed of the engine's state.
    """
    verdicts: dict[str | None, Any] = {}
    before = engine_state.snapshot(trainer)
    with trainer.packed_model.attending():
        for planted in (None, fault):
            with faults.ALL[planted]() if planted else nullcontext():
                report = check_isolation(trainer.model_wrapped, 64, degree=2)
            verdicts[planted] = report.max_gradient, report.max_change <= report.tolerance and report.equal
    changed = gather_object([engine_state.changed(before, engine_state.snapshot(trainer))])
    return verdicts | {"changed": sum(changed, [])}


def train_unpacked(folder: Path, row: Row, halves: bool = False) -> dict[str, Any]:
    """Train the reference with TRL: unpacked, all documents of a step in one micro-batch.

    With `halves` there are two micro-batches, which measures rounding.

    Where TRL lacks a setting it is ours, unpacked, as is the loss of evaluation in any case: TRL's is a mean of means.
    """
    save_model(folder, row.model)
    sizes = {"per_device_train_batch_size": ceil(row.size / (1 + halves)), "gradient_accumulation_steps": 1 + halves}
    if "neftune_noise_alpha" in row.given:
        trainer = make_trainer(folder, replace(row, ours={}))
        start_weights = weights_of(trainer)
        trainer.train()
        return outcome(trainer) | {"start": start_weights}
    unpacked = row.unpacked
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(folder, unpacked, cls=trl.SFTTrainer if unpacked.is_in_trl else Packed, **sizes)
        if row.has_images:
            trainer.model_accepts_loss_kwargs = halves  # the mean over the step: TRL's is one of micro-batches
        start_weights = weights_of(trainer)
        trainer.train()
        result = outcome(trainer) | {"start": start_weights}
        if row.evaluates:
            padded = {"packing": row.has_images, "eval_packing": False}  # unpacked, images are left to TRL
            result["eval"] = make_trainer(
                folder, replace(unpacked, ours=padded, evaluates=True), model=trainer.model
            ).evaluate()
    return result
