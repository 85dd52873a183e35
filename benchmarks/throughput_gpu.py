"""Training of one contender on one GPU, for the parts of `evidence.py`.

Models have random weights in the shapes of released ones, bf16 and, unless a contender says otherwise, gradient
checkpointing and no LoRA dropout. Random tokens; the lengths are those of real data if a folder is given, else
lognormal. On Hopper cuDNN, which `sdpa` prefers there, makes a plan for each new shape of a batch, in seconds, most of
a short padded run. So padded runs are measured without it, too.

`tokens_per_s` counts real tokens. A run sees few batches, and how much of them is padding differs between runs by a
quarter, so for padded runs it is the speed of *computed* tokens over what the whole table has of them per real one
(`computed_over_real`); `documents_per_s` follows from the mean length. `share` is the speed-up over padded, without
cuDNN, divided by `computed_over_real`, the largest speed-up that removing padding can give; the target is 0.95.
`real_tflops` counts real tokens only, as the trainer's log does (`tflops_per_second_per_rank`): forward and backward of
each document alone, by the cost model of the config, without recomputation. `mfu` is its share of the card's peak where
the package knows that, `mfu_of_ceiling` its share of the measured rate of products.

`host_bound` is the share of one more step, under torch's profiler, in which the GPU ran no kernel: near 0 the GPU was
measured, near 1 the host. The profiler slows the host, so it is an upper bound; without a GPU it is 1. A step is timed
from the moment its batch is ready (without fetching and collation) to a synchronisation at its end. One or two warm-up
steps are not timed. `peak_gib` is what tensors took, `reserved_gib` what the allocator held for them.
"""

import gc
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# One process trains on one GPU: with several, the Trainer would wrap the model in DataParallel, which TRL refuses
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
# Packs of `minibatch` have another length in every step, which fragments fixed segments
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import numpy as np
import torch
import transformers
import trl
from common import Row, file_lengths
from datasets import Dataset
from peft import LoraConfig
from support.models import build_tokenizer, select_attention
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, TrainerCallback
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

import trl_packfix
from trl_packfix.attention.forwards import mark_packed_forwards
from trl_packfix.data.collator import PackedDataCollator
from trl_packfix.data.model_costs import make_cost_model
from trl_packfix.isolation.isolation_report import IsolationReport
from trl_packfix.isolation.packed_model import PackedModel
from trl_packfix.training.flops import own_peak_tflops, trained_share, training_flops

WARM_UP = 2  # steps, at most; torch.compile compiles in the first ones
TIMED = 20
QWEN = Qwen2Config(
    vocab_size=151936,
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
LLAMA = LlamaConfig(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    max_position_embeddings=4096,
)
TINY = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1}
LLAMA_3 = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
)


class Contender(NamedTuple):
    """A trainer with settings; `published` are the tokens per second that its makers give for an H100."""

    package: Any
    batch_size: int
    settings: dict[str, Any]
    dropout: float = 0.0
    published: float | None = None


PACKED: dict[str, Any] = {"packing": True, "packing_report": False}
NO_CHECKPOINTING = PACKED | {"gradient_checkpointing": False}
LIGER = {"use_liger_kernel": True}
NO_CUDNN = "padded without cuDNN"
# The same documents per step, then packs of the same capacity. After a comma: how it differs from what it is named for
AT_16 = {
    NO_CUDNN: Contender(trl, 16, {}),
    "ours": Contender(trl_packfix, 16, PACKED | {"packing_strategy": "minibatch"}),
}
AT_4 = {f"{NO_CUDNN}, 4": Contender(trl, 4, {}), "ours stream": Contender(trl_packfix, 4, PACKED)}
WITH_TRL = {name: Contender(trl, 4, {"packing": True}) for name in ("TRL bfd flash", "TRL bfd")}
WITH_TRL |= {"padded": Contender(trl, 16, {}), "padded, 4": Contender(trl, 4, {})}
# Packs of 2 x 4,096 tokens. NeMo AutoModel's benchmark of LoRA on Llama-3-8B has these, rank 16 on all layers, dropout
# 0.1, no recomputation, fused kernels, and full sequences: 12,473 tokens/s, 402 TFLOP/s. Liger's kernels are last: they
# stay in the classes of transformers
RECIPES = {
    "ours stream": Contender(trl_packfix, 2, PACKED),
    "no checkpointing": Contender(trl_packfix, 2, NO_CHECKPOINTING),
    "dropout 0.05": Contender(trl_packfix, 2, PACKED, 0.05),
    "liger": Contender(trl_packfix, 2, PACKED | LIGER),
    "as NeMo AutoModel": Contender(trl_packfix, 2, NO_CHECKPOINTING | LIGER, 0.1, 12473),
}
COMPILED = {
    "ours stream": RECIPES["ours stream"],
    "torch_compile": Contender(trl_packfix, 2, PACKED | {"torch_compile": True}),
}
CONSTANT = {"constant shapes": Contender(trl_packfix, 4, PACKED | {"pad_documents_to_multiple_of": 128})}


class Training(NamedTuple):
    """A part of `evidence.py`; `layers` if it is not all of them."""

    config: transformers.PretrainedConfig
    contenders: dict[str, Contender]
    lengths: str
    layers: int | None = None


TRAININGS = {
    "7b-flan": Training(LLAMA, AT_16 | AT_4 | WITH_TRL, "t0_p3_sample"),
    "8b-lora": Training(LLAMA_3, RECIPES, "oasst1_en_val_threads"),
    "7b-orcamath": Training(LLAMA, AT_16 | AT_4, "gsm8k_train"),
    "compile": Training(LLAMA_3, COMPILED, "oasst1_en_val_threads", layers=4),
    "1.5b-flan": Training(QWEN, AT_16 | AT_4 | CONSTANT, "t0_p3_sample"),
}
# Median, sigma, max_length
LENGTHS = {
    "t0_p3_sample": (114, 1.27, 2048),
    "gsm8k_train": (165, 0.38, 1024),
    "oasst1_en_val_threads": (323, 0.68, 4096),
}


@dataclass(frozen=True)
class Machine:
    device: str
    dtype: torch.dtype
    smoke: bool
    seconds: float  # timed steps of one contender, at most about this
    limit: float  # seconds of one contender with its warm-up; the last step may exceed it

    def config(self, config: transformers.PretrainedConfig, layers: int | None = None) -> transformers.PretrainedConfig:
        changes = dict(TINY) if self.smoke else {}
        if layers is not None:
            changes["num_hidden_layers"] = layers
        kept = {key: value for key, value in config.to_diff_dict().items() if key != "layer_types"}  # one per layer
        return type(config)(**(kept | changes))

    def build(self, config: transformers.PretrainedConfig, dtype: torch.dtype | None = None) -> PreTrainedModel:
        torch.manual_seed(0)
        with torch.device(self.device):
            return AutoModelForCausalLM.from_config(config, dtype=dtype or self.dtype, attn_implementation="sdpa")

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def tidy(self) -> None:
        """Free the memory of finished runs: trainers are in reference cycles."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def ceiling(machine: Machine) -> float:
    """The rate of matrix products in TFLOP/s."""
    size = 256 if machine.smoke else 8192
    a, b = (torch.randn(size, size, device=machine.device, dtype=machine.dtype) for _ in range(2))
    best = float("inf")
    for _ in range(3):
        machine.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            a @ b
        machine.synchronize()
        best = min(best, (time.perf_counter() - start) / 10)
    return 2 * size**3 / best / 1e12


def document_lengths(folder: Path | None, name: str, num: int) -> np.ndarray:
    """Tokens of `num` documents in random order: from the file if a folder is given, else lognormal."""
    median, sigma, max_length = LENGTHS[name]
    rng = np.random.default_rng(0)
    if folder is None:
        return np.clip(rng.lognormal(np.log(median), sigma, num), 2, max_length).astype(int)
    ((_, lengths),) = file_lengths(folder, f"{name}.jsonl")
    return np.clip(rng.permutation(lengths)[:num], 2, max_length)


def exactness(machine: Machine, lengths: np.ndarray) -> Row:
    """Largest error over the documents (logits) and of the summed gradient, packed over alone, both against fp32."""
    config = machine.config(QWEN, layers=2 if machine.smoke else 4)
    rng = np.random.default_rng(0)
    documents = [{"input_ids": rng.integers(3, 300, n)} for n in lengths[:8]]
    batch = PackedDataCollator()(documents)
    batch = {k: v.to(machine.device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    ids = [torch.from_numpy(document["input_ids"])[None].to(machine.device) for document in documents]

    def run(dtype: torch.dtype, packed: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
        model = machine.build(config, torch.float32).to(dtype)  # the same weights, rounded
        if packed:
            select_attention(model)
            mark_packed_forwards(model)
            logits = (
                model(**{k: v for k, v in batch.items() if k != "labels"}).logits[0].split([i.shape[1] for i in ids])
            )
        else:
            logits = [model(i).logits[0] for i in ids]
        pairs = zip(logits, ids, strict=True)
        loss = sum(functional.cross_entropy(x[:-1].float(), i[0, 1:], reduction="sum") for x, i in pairs)
        loss.backward()
        gradient = torch.cat([p.grad.float().flatten() for p in model.parameters()])
        return [x.detach().float() for x in logits], gradient

    def error(got: Any, expected: Any) -> tuple[float, float]:
        pairs = list(zip(got[0], expected[0], strict=True))
        logits = max(((x - y).norm() / y.norm()).item() for x, y in pairs)
        return logits, ((got[1] - expected[1]).norm() / expected[1].norm()).item()

    truth = run(torch.float32, packed=False)
    (alone_logits, alone_gradient), (logits, gradient) = (
        error(run(torch.bfloat16, packed), truth) for packed in (False, True)
    )
    row = {"documents": len(documents), "tokens": int(lengths[:8].sum())}
    row |= {"alone_logits": alone_logits, "alone_gradient": alone_gradient}
    return row | {"packed_over_alone_logits": logits / alone_logits, "packed_over_alone": gradient / alone_gradient}


class Clock(TrainerCallback):
    """Times steps after the warm-up, each up to a synchronisation, and stops the run after enough of them."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.seconds = 0.0
        self.steps = 0
        self.computed = 0
        self.begun: float | None = None  # the first step
        self.attention = ""  # of the last step: ours restores the model's own after training
        self.is_warm = self.is_timed = False
        self.profiler: torch.profiler.profile | None = None  # of the step after the timed ones
        self.host_bound: float | None = None

    def count(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.computed += 0 if self.is_timed else kwargs["input_ids"].numel()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.attention = kwargs["model"].config._attn_implementation
        self.machine.synchronize()
        if self.is_timed:
            kinds = torch.profiler.ProfilerActivity
            self.profiler = torch.profiler.profile(
                activities=[kinds.CUDA if self.machine.device == "cuda" else kinds.CPU]
            )
            self.profiler.start()
        self.started = time.perf_counter()
        self.begun = self.begun or self.started
        slow = state.global_step > 0 and self.started - self.begun > 2 * self.machine.seconds
        enough = state.global_step == 2 * WARM_UP if args.torch_compile else slow or state.global_step == WARM_UP
        if not self.is_warm and enough:
            self.is_warm = True
            self.computed = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.machine.synchronize()
        now = time.perf_counter()
        if self.profiler is not None:
            self.profiler.stop()
            busy = sum(event.self_device_time_total for event in self.profiler.key_averages()) / 1e6
            self.host_bound = max(0.0, 1 - busy / (now - self.started))
            control.should_training_stop = True
            return
        if self.is_warm:
            self.seconds = self.seconds + now - self.started
            self.steps = self.steps + 1
        enough = self.seconds > self.machine.seconds or self.steps == TIMED
        self.is_timed = enough
        control.should_training_stop = now - self.begun > self.machine.limit


def watch(packed: PackedModel) -> Callable[[], Row]:
    """Times the probe of a run. The returned function gives the row of its result."""
    prove = packed.prove
    seconds = []

    def timed(wrapped: torch.nn.Module) -> IsolationReport:
        start = time.perf_counter()
        report = prove(wrapped)
        seconds.append(time.perf_counter() - start)
        return report

    packed.prove = timed

    def verdict() -> Row:
        report = packed.isolation
        row = {"isolated": report.isolated, "equal": report.equal, "unpacked": packed.is_unpacked}
        row |= {"repaired_modules": sum(repair.count for repair in packed.repaired)}
        row |= {"max_difference": report.max_difference, "tolerance": report.tolerance, "probe_s": sum(seconds)}
        return row | ({"reason": packed.attention.reason} if packed.is_unpacked else {})

    return verdict


def add_boundaries(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Older versions of TRL leave them to transformers' flash attention, which reads them from the positions."""
    if kwargs.get("cu_seq_lens_q") is None:
        bounds, longest = prepare_fa_kwargs_from_position_ids(kwargs["position_ids"])
        names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
        kwargs |= dict(zip(names, (*bounds, *map(int, longest)), strict=True))
    return args, kwargs


def padded_over_real(lengths: np.ndarray, batch_size: int) -> float:
    """Of batches in random order, each padded to its longest document."""
    whole = len(lengths) // batch_size * batch_size
    orders = [np.random.default_rng(i).permutation(lengths)[:whole].reshape(-1, batch_size) for i in range(50)]
    return float(batch_size * sum(order.max(1).sum() for order in orders) / sum(order.sum() for order in orders))


def train(
    machine: Machine, method: str, given: Contender, config: Any, lora: bool, lengths: np.ndarray, max_length: int
) -> Row:
    package, batch_size, settings, dropout, published = given
    table = Dataset.from_dict({"input_ids": [np.random.default_rng(0).integers(3, 300, n) for n in lengths]})
    model = machine.build(config)
    torch.backends.cuda.enable_cudnn_sdp(method != NO_CUDNN)
    if method == "TRL bfd flash":
        select_attention(model)
    clock = Clock(machine)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        usual = {
            "max_length": max_length,
            "per_device_train_batch_size": batch_size,
            "max_steps": 2 * WARM_UP + TIMED + 1,
            "bf16": machine.device == "cuda",
            "use_cpu": machine.device == "cpu",
            "optim": "adamw_torch_fused" if machine.device == "cuda" else "adamw_torch",
            "gradient_checkpointing": True,
            "torch_compile_backend": "eager" if machine.smoke and settings.get("torch_compile") else None,
            "report_to": [],
            "save_strategy": "no",
            "logging_strategy": "no",
            "disable_tqdm": True,
        }
        adapter = {"r": 16, "lora_alpha": 32, "lora_dropout": dropout, "target_modules": "all-linear"}
        trainer = package.SFTTrainer(
            model,
            package.SFTConfig(folder, **usual | settings),
            train_dataset=table,
            processing_class=build_tokenizer(),
            peft_config=LoraConfig(**adapter, task_type="CAUSAL_LM") if lora else None,
            callbacks=[clock],
        )
        if method == "TRL bfd flash":
            model.register_forward_pre_hook(add_boundaries, with_kwargs=True)
            mark_packed_forwards(trainer.model)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.model.register_forward_pre_hook(clock.count, with_kwargs=True)
        verdict = watch(trainer.packed_model) if package is trl_packfix else dict
        machine.tidy()
        trainer.train()
    proved = verdict()
    if "reason" in proved:
        return proved
    if not clock.steps:
        return proved | {"reason": f"no step was timed within {machine.limit:g} s"}
    ratio = 1.0 if settings.get("packing") else padded_over_real(lengths, batch_size)
    tokens_per_s = clock.computed / clock.seconds / ratio
    row = proved | {"tokens_per_s": tokens_per_s, "documents_per_s": tokens_per_s / lengths.mean()}
    row |= {"steps": clock.steps, "computed_over_real": ratio, "host_bound": clock.host_bound}
    row["attention"] = clock.attention
    if published is not None:
        row |= {"published": published, "over published": tokens_per_s / published}
    if machine.device == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    costs = training_flops(make_cost_model(model.config), lengths.astype(float), trained_share(trainer.model))
    row["real_tflops"] = costs.sum() / lengths.sum() * tokens_per_s / 1e12
    peak = own_peak_tflops(torch.device(machine.device), machine.dtype)
    return row if peak is None else row | {"mfu": row["real_tflops"] / peak}


def compare(rows: list[Row]) -> None:
    """Speed-ups among rows of the same batch size, and the share of the possible one that removing padding gave."""
    by_size: dict[int, dict[str, Row]] = {}
    for row in rows:
        if "tokens_per_s" in row:
            by_size.setdefault(row["batch_size"], {})[row["method"]] = row
    for methods in by_size.values():
        for method, row in methods.items():
            for other in ("padded", NO_CUDNN, "TRL bfd", "TRL bfd flash", "ours stream"):
                if other in methods and other != method:
                    row[f"over {other}"] = row["tokens_per_s"] / methods[other]["tokens_per_s"]
            if f"over {NO_CUDNN}" in row:
                row["share"] = row[f"over {NO_CUDNN}"] / methods[NO_CUDNN]["computed_over_real"]
