"""Models that several ranks divide (`DistributedConfig` of transformers); `test_model_parallelism.py` launches them.

    python tests/model_parallel.py FOLDER [ENGINE/NAME ...]
    python tests/model_parallel.py FOLDER --stock

One process forks all ranks. Each scenario trains on them what one process trains; the main process saves what it
returns as FOLDER/ENGINE/NAME.pt. With `--stock` it is TRL's own trainer, unpacked.
"""

import os
import sys
import warnings
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import torch.distributed as dist
import trl
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import LoraConfig
from support import vision
from support.launch import fork_ranks
from support.models import build_tiny_model, build_tokenizer
from support.prefixes import forest
from support.runs import config, texts
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from trl_packfix import SFTTrainer, compat
from trl_packfix.training.groups import SamePackCheck
from trl_packfix.training.totals import TrainingTotals

NUM_STEPS, NUM_EVALUATED = 3, 11
ON_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LORA = LoraConfig(r=4, target_modules=[*ON_ATTENTION, "down_proj"], task_type="CAUSAL_LM")
LORA_ON_ATTENTION = LoraConfig(r=4, target_modules=ON_ATTENTION, task_type="CAUSAL_LM")
TOKENIZER = build_tokenizer()
LOGGED = ("loss", "entropy", "aux_loss", "loss/a", "num_tokens", "trained_tokens", "documents_per_step", "efficiency")

# How ranks divide the model: fields of `DistributedConfig`
ENGINES = {
    "one": {},
    "tp": {"tp_size": 2},
    "tp_ep": {"tp_size": 2, "ep_size": 2},
    "ep_fsdp": {"ep_size": 2, "fsdp_size": 2},
    "tp_fsdp": {"tp_size": 2, "fsdp_size": 2},
    "tp_ep_fsdp": {"tp_size": 2, "ep_size": 2, "fsdp_size": 2},
}
LAUNCHES = {1: ["one"], 2: ["tp", "tp_ep", "ep_fsdp"], 4: ["tp_fsdp", "tp_ep_fsdp"]}
WINDOWED = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "llama": ("llama", {}),
    "sinks": ("granite_swa", WINDOWED),
    "softcap": ("gemma2", WINDOWED | {"head_dim": 8, "attn_logit_softcapping": 2.0}),
    "experts": ("qwen3_moe", {}),
}
KINDS: dict[str, dict] = {
    "full": {"predicts": True},
    "lora": {"peft_config": LORA, "learning_rate": 1.0},
    "lora_experts": {
        "model": "experts",
        "peft_config": LORA_ON_ATTENTION,
        "learning_rate": 1.0,
        "router_aux_loss_coef": 0.0,
    },
    "sinks": {"model": "sinks"},
    "softcap": {"model": "softcap"},
    "weighted": {"weight_column": "weight", "source_column": "source", "document_weighting": "document"},
    "unpacked": {"packing": False},
    "alike": {"rows": "alike", "share_prefixes": "pack", "max_length": 96},
    "noise": {"by_name": True, "neftune_noise_alpha": 5.0},
    "checkpointed": {"gradient_checkpointing": True, "max_grad_norm": 1.0, "eval_on_start": True},
    "images": {"rows": "images", "model": "llava", "max_length": 200, "learning_rate": 0.02},
    "stream": {"packing_strategy": "stream", "streams": True},
    "experts": {"model": "experts", "router_aux_loss_coef": 0.0},
    "routed": {"model": "experts", "router_aux_loss_coef": 0.1},  # the statistic of the router is that of a micro-batch
}
# What TRL's own trainer trains unpacked, compared with itself on one process
STOCK = {
    "tp": ["llama", "experts", "lora"],
    "tp_ep": ["experts"],
    "ep_fsdp": ["experts"],
    "tp_fsdp": ["llama"],
    "tp_ep_fsdp": ["experts"],
}
OF_ENGINES = {
    "tp": [kind for kind in KINDS if kind not in ("lora", "softcap", "experts", "lora_experts")],
    "tp_ep": ["routed", "lora_experts"],
    "ep_fsdp": ["experts", "lora_experts"],
    "tp_fsdp": ["full", "stream"],
    "tp_ep_fsdp": ["experts"],
}
# What a fault replaces
FAULTS = {
    "other_texts": (SamePackCheck, "check", lambda *given: None),
    "counted_twice": (
        TrainingTotals,
        "gather",
        lambda totals, accelerator, copies, gather=TrainingTotals.gather: gather(totals, accelerator),
    ),
    "summed_twice": (compat, "SUMMED_BY_RANKS", "no style"),
}


PLANTED_IN = {"other_texts": "weighted", "counted_twice": "weighted", "summed_twice": "experts"}


class Reversed(SFTTrainer):
    """Adds up the gradients of an optimizer step in the opposite order, which changes nothing but their rounding."""

    def get_batch_samples(self, *given):
        batches, num_items = super().get_batch_samples(*given)
        return batches[::-1], num_items


def weighted_texts(num: int, seed: int = 0) -> Dataset:
    dataset = texts(num, seed)
    dataset = dataset.add_column("weight", [(3.0, 0.25, 1.0)[i % 3] for i in range(num)])
    return dataset.add_column("source", ["ab"[i % 5 > 1] for i in range(num)])


ROWS = {"texts": weighted_texts, "alike": forest, "images": vision.rows}


def whole(parameter: torch.Tensor) -> torch.Tensor:
    value = parameter.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).flatten().float().clone()


def weights(run: SFTTrainer) -> torch.Tensor:
    return torch.cat([whole(parameter) for parameter in run.model.parameters()])


def make_trainer(
    folder: Path,
    engine: str,
    model: str = "llama",
    cls: type = SFTTrainer,
    rows: str = "texts",
    dataset: Dataset | None = None,
    streams: bool = False,
    by_name: bool = False,
    **settings,
) -> SFTTrainer:
    sizes = ENGINES[engine]
    on_ranks = {}
    if sizes:
        # accelerate divides models only where it believes in GPUs; the rest of it runs on a CPU as it is
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState(cpu=True, backend="gloo")
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        on_ranks = {"accelerator_config": {"use_configured_state": True}, "ddp_timeout": 90}
    dataset = ROWS[rows](40) if dataset is None else dataset
    num_ranks = sizes.get("fsdp_size", 1)
    defaults = {
        "packing_strategy": "minibatch",  # the same documents in each step, on any number of ranks
        "per_device_train_batch_size": 2 // num_ranks,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "max_steps": NUM_STEPS,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "learning_rate": 0.1,
    }
    if cls is trl.SFTTrainer:
        del defaults["packing_strategy"]
        settings |= {"packing": False, "config_class": trl.SFTConfig}
    peft_config = settings.pop("peft_config", None)
    torch.manual_seed(0)  # for the adapters
    given = {"dtype": torch.float32} | ({"distributed_config": sizes} if sizes else {})
    name, processor = folder / "models" / model, TOKENIZER
    if rows == "images":
        loaded, processor = AutoModelForImageTextToText.from_pretrained(name, **given), vision.build_processor(model)
    elif by_name:
        loaded, settings = str(name), settings | {"model_init_kwargs": given}
    else:
        loaded = AutoModelForCausalLM.from_pretrained(name, **given)
    return cls(
        loaded,
        config(folder / "runs", **defaults | on_ranks | settings),
        train_dataset=dataset.to_iterable_dataset(num_shards=2) if streams else dataset,
        eval_dataset=ROWS[rows](NUM_EVALUATED, seed=1),
        processing_class=processor,
        peft_config=peft_config,
    )


def other_texts() -> Dataset:
    """On every second rank the texts are reversed, so that packs differ and their shapes do not."""
    is_second = int(os.environ["RANK"]) % 2
    return weighted_texts(40).map(lambda row: {"text": row["text"][::-1] if is_second else row["text"]})


def set_adapters(model: torch.nn.Module) -> None:
    """Set adapters to the same numbers on any ranks: peft draws what a rank has of them in its own size."""
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            continue
        drawn = 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        if isinstance(parameter, DTensor):
            drawn = distribute_tensor(drawn, parameter.device_mesh, parameter.placements, src_data_rank=None)
        with torch.no_grad():
            parameter.copy_(drawn)


def train(folder: Path, engine: str, predicts: bool = False, fault: str | None = None, **settings) -> dict:
    if fault == "other_texts":
        settings["dataset"] = other_texts()
    with mock.patch.object(*FAULTS[fault]) if fault else nullcontext():
        run = make_trainer(folder, engine, **settings)
        set_adapters(run.model)
        start = weights(run)
        run.train()
    history = [entry for entry in run.state.log_history if "loss" in entry]
    found = {
        "start": start,
        "end": weights(run),
        "logged": [{name: entry.get(name) for name in LOGGED} for entry in history],
        "eval": run.evaluate(),
        "num_input_tokens": run.state.num_input_tokens_seen,
    }
    if run.packing_report is not None:
        isolation = run.packing_report.isolation
        found["proof"] = (isolation.isolated, isolation.equal, isolation.attention)
        found["report"] = run.packing_report.to_dict()
    if predicts:
        found["predicted"] = torch.from_numpy(run.predict(run.eval_dataset).predictions).clone()
    divided = [parameter for parameter in run.model.parameters() if isinstance(parameter, DTensor)]
    return found | {"divided": len(divided), "tp_size": run.get_tp_size()}


def other_packs(folder: Path, engine: str) -> dict:
    """What each rank says when the second of a group has other documents."""
    run = make_trainer(folder, engine, dataset=other_texts())
    message = None
    try:
        run.train()
    except ValueError as error:
        message = str(error)
    messages = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    return {"messages": messages, "step": run.state.global_step}


def refusals(folder: Path, engine: str) -> dict:
    """What is said to settings that cannot work."""
    found = {}
    for name, settings in {
        "tokens_per_rank": {"tokens_per_rank": 32, "packing_strategy": "stream", "per_device_train_batch_size": 1},
        "odd": {"per_device_eval_batch_size": 3},
        "inputs": {"include_for_metrics": ["inputs"]},
        "restart": {"save_strategy": "steps"},
    }.items():
        try:
            run = make_trainer(folder, engine, **settings)
            run.predict(run.eval_dataset)
        except ValueError as error:
            found[name] = str(error)
    return found


def train_stock(folder: Path, engine: str, kind: str) -> dict:
    """The weights that TRL's own trainer trains from the same documents per step, or why it cannot."""
    settings = {"lora": {"peft_config": LORA, "learning_rate": 1.0}}.get(kind, {"model": kind})
    run = make_trainer(folder, engine, cls=trl.SFTTrainer, **settings)
    set_adapters(run.model)
    start = weights(run)
    try:
        run.train()
    except RuntimeError as error:
        return {"error": str(error)}
    return {"start": start, "end": weights(run)}


def scenarios(num_ranks: int) -> dict[str, Callable[[Path], dict]]:
    """By engine and name, in the order in which they run."""
    found: dict[str, Callable[[Path], dict]] = {}
    for engine in LAUNCHES[num_ranks]:
        for kind, settings in KINDS.items():
            if engine == "one":
                found[f"one/{kind}"] = partial(train, engine=engine, **settings)
                again = {key: value for key, value in settings.items() if key != "predicts"} | {"cls": Reversed}
                found[f"one/{kind}_reversed"] = partial(train, engine=engine, **again)
            elif kind in OF_ENGINES[engine]:
                found[f"{engine}/{kind}"] = partial(train, engine=engine, **settings)
    if num_ranks == 2:
        for fault in FAULTS:
            found[f"tp/{fault}"] = partial(train, engine="tp", fault=fault, **KINDS[PLANTED_IN[fault]])
        found["tp/other_packs"] = partial(other_packs, engine="tp")
        found["tp/refusals"] = partial(refusals, engine="tp")
    return found


def stock_scenarios(num_ranks: int) -> dict[str, Callable[[Path], dict]]:
    found: dict[str, Callable[[Path], dict]] = {}
    for engine in LAUNCHES[num_ranks]:
        for kind in STOCK.get(engine, STOCK["tp"]):
            found[f"{engine}/stock_{kind}"] = partial(train_stock, engine=engine, kind=kind)
    return found


def run_rank(num_ranks: int, folder: Path, only: list[str]) -> None:
    of_stock = only == ["--stock"]
    for name, scenario in (stock_scenarios if of_stock else scenarios)(num_ranks).items():
        if only and name not in only and not of_stock:
            continue
        result = scenario(folder)
        if int(os.environ.get("RANK", 0)) == 0:
            (folder / name).parent.mkdir(exist_ok=True)
            torch.save(result, folder / f"{name}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


def print_table(folder: Path) -> None:
    """The largest figures of docs/model_parallelism.md: differences from one process, and the rounding of one."""
    for file in sorted(file for engine in OF_ENGINES for file in (folder / engine).glob("*.pt")):
        if file.stem in KINDS:
            names = [file, *(folder / "one" / f"{file.stem}{again}.pt" for again in ("", "_reversed"))]
            found, expected, again = (torch.load(name) for name in names)
            change = (expected["end"] - expected["start"]).norm()
            difference, rounding = ((each["end"] - expected["end"]).norm() / change for each in (found, again))
            print(f"{file.parent.name} {file.stem}: weights differ by {difference:.1e}, rounding {rounding:.1e}")


def print_stock(folder: Path) -> None:
    """What TRL trains on ranks that divide a model, against what it trains on one process."""
    for engine, kinds in STOCK.items():
        for kind in kinds:
            trained, expected = (torch.load(folder / of / f"stock_{kind}.pt") for of in (engine, "one"))
            if "error" in trained:
                print(f"{engine} {kind}: {trained['error']}")
                continue
            difference = (trained["end"] - expected["end"]).norm() / (expected["end"] - expected["start"]).norm()
            print(f"{engine} {kind}: weights differ by {difference:.1e}")


def main(folder: Path, only: list[str]) -> int:
    warnings.simplefilter("ignore")
    for name, (model_type, sizes) in MODELS.items():
        build_tiny_model(model_type, **sizes).save_pretrained(folder / "models" / name)
    vision.build_model("llava").save_pretrained(folder / "models" / "llava")
    of_stock = only == ["--stock"]
    launches = [num for num in LAUNCHES if not only or of_stock or set(only) & scenarios(num).keys()]
    ended = [fork_ranks(num, partial(run_rank, num, folder, only)) for num in launches]
    if of_stock:
        print_stock(folder)
    elif not only:
        print_table(folder)
    return int(not all(ended))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
