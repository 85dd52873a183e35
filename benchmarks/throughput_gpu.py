"""Training of one contender on one GPU, for the parts of `evidence.py`.

Models have random weights in the shapes of released ones, bf16 and, unless a contender says otherwise, gradient
checkpointing and no LoRA dropout. Random tokens; the lengths are those of real data if a folder is given, else
lognormal. On Hopper cuDNN, which `sdpa` prefers there, makes a plan for each new shape of a batch, in seconds, most of
a short padded run. So padded runs are measured without it, and on the FlashAttention-2 kernels that packs run on
(`padded_flash.py`).

Padded runs and `minibatch` have the same documents in every step. `same_batches` says whether they had: it compares
`step_tokens`, the real tokens of each timed step. `stream` and TRL's packing make their own steps of the same table;
their capacity is that of about as many documents (`documents_per_step`), and no step of 34 documents stands beside one
of 4.

Four warm-up steps are not timed, then at least six are, or twelve where a part says so. A step is timed on the device,
from the moment its batch is there to the end of its optimizer step, without a synchronisation in between; `step_ms` has
all of them, `ms` is their median, `ms_range` the shortest and the longest. `tokens_per_s` are the real tokens of the
timed steps over their time. `computed_over_real` is what the model computed in them over that, with padding. `share` is
the speed-up over padded on the same kernels, divided by the padded run's `computed_over_real`, the largest speed-up
that removing padding can give; the target is 0.95. `real_tflops` counts real tokens only, as the trainer's log does
(`tflops_per_second_per_rank`): forward and backward of each document alone, by the cost model of the config, without
recomputation. `mfu` is its share of the card's peak where the package knows that, `mfu_of_ceiling` its share of the
measured rate of products.

`host_bound` is the share of one more step, under torch's profiler, in which the GPU ran no kernel: near 0 the GPU was
measured, near 1 the host. The profiler slows the host, so it is an upper bound; without a GPU it is 1. `peak_gib` is
what tensors took, `reserved_gib` what the allocator held for them.
"""

import gc
import os
import statistics
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
import padded_flash
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

WARM_UP = 4  # steps; torch.compile compiles in the second
LEAST_TIMED = 6
MOST_TIMED = 12
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
MINIBATCH = PACKED | {"packing_strategy": "minibatch"}
NO_CHECKPOINTING = PACKED | {"gradient_checkpointing": False}
LIGER = {"use_liger_kernel": True}
NO_CUDNN = "padded sdpa"
ON_FLASH = "padded flash_attention_2"
OURS = "ours minibatch"
AT_4 = ", 4"  # the end of the name of a contender with four documents in a step


def fair_contenders(packs: int, **settings: Any) -> dict[str, Contender]:
    """Contenders on the same documents, 16 and 4 in a step; `packs` x max_length tokens hold about 16 of them.

    After a comma: how a contender differs from what it is named for.
    """
    found = {
        NO_CUDNN: Contender(trl, 16, settings),
        ON_FLASH: Contender(trl, 16, settings),
        OURS: Contender(trl_packfix, 16, MINIBATCH | settings),
        "ours stream": Contender(trl_packfix, packs, PACKED | settings),
        "TRL bfd flash": Contender(trl, packs, {"packing": True} | settings),
    }
    at_4 = {f"{name}{AT_4}": found[name]._replace(batch_size=4) for name in (NO_CUDNN, ON_FLASH, OURS)}
    return found | at_4


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
    "torch_compile, no checkpointing": Contender(trl_packfix, 2, NO_CHECKPOINTING | {"torch_compile": True}),
}
FULL = {
    NO_CUDNN: Contender(trl, 16, {}),
    OURS: Contender(trl_packfix, 16, MINIBATCH),
    f"{OURS}, no checkpointing": Contender(trl_packfix, 16, MINIBATCH | {"gradient_checkpointing": False}),
    "ours stream": Contender(trl_packfix, 4, PACKED),
    "ours stream, no checkpointing": Contender(trl_packfix, 4, NO_CHECKPOINTING),
    "constant shapes": Contender(trl_packfix, 4, PACKED | {"pad_documents_to_multiple_of": 128}),
}


class Training(NamedTuple):
    """A part of `evidence.py`: `layers` if it is not all of them, and the fewest timed steps of a contender."""

    config: transformers.PretrainedConfig
    contenders: dict[str, Contender]
    lengths: str
    layers: int | None = None
    least: int = LEAST_TIMED


TRAININGS = {
    "7b-flan": Training(LLAMA, fair_contenders(2), "t0_p3_sample"),
    "8b-lora": Training(LLAMA_3, RECIPES, "oasst1_en_val_threads", least=MOST_TIMED),
    # Short documents leave memory, so that nothing is computed twice
    "7b-orcamath": Training(LLAMA, fair_contenders(3, gradient_checkpointing=False), "gsm8k_train"),
    "compile": Training(LLAMA_3, COMPILED, "oasst1_en_val_threads"),
    "1.5b-flan": Training(QWEN, FULL, "t0_p3_sample", least=MOST_TIMED),
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

    @property
    def warm_up(self) -> int:
        """Steps that are not timed."""
        return 2 if self.smoke else WARM_UP

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
    """Times steps after the warm-up on the device, and stops the run after enough of them."""

    def __init__(self, machine: Machine, least: int):
        self.machine = machine
        self.least = 2 if machine.smoke else least
        self.num_begun = 0
        self.marks: list[tuple[Any, Any]] = []  # beginning and end of each timed step
        self.tokens: list[list[Any]] = []  # of each timed step, for each forward: computed and real
        self.started = 0.0  # of the first timed step, on the host
        self.begun: float | None = None  # the first step
        self.attention = ""  # of the last step: ours restores the model's own after training
        self.is_timed = False  # whether all are
        self.profiler: torch.profiler.profile | None = None  # of the step after the timed ones
        self.host_bound: float | None = None

    def mark(self) -> Any:
        """A moment on the device, for which the host does not wait."""
        if self.machine.device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def count(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self.num_begun > self.machine.warm_up and not self.is_timed:
            computed = kwargs["input_ids"].numel()
            mask = kwargs.get("attention_mask")
            self.tokens[-1].append((computed, computed if mask is None else mask.sum()))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.attention = kwargs["model"].config._attn_implementation
        self.begun = self.begun or time.perf_counter()
        self.num_begun += 1
        if self.is_timed:
            self.machine.synchronize()
            kinds = torch.profiler.ProfilerActivity
            self.profiler = torch.profiler.profile(
                activities=[kinds.CUDA if self.machine.device == "cuda" else kinds.CPU]
            )
            self.profiler.start()
            self.started = time.perf_counter()
        elif self.num_begun > self.machine.warm_up:
            if not self.marks:
                self.machine.synchronize()
                self.started = time.perf_counter()
            self.tokens.append([])
            self.first_mark = self.mark()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.profiler is not None:
            self.machine.synchronize()
            seconds = time.perf_counter() - self.started
            self.profiler.stop()
            busy = sum(event.self_device_time_total for event in self.profiler.key_averages()) / 1e6
            self.host_bound = max(0.0, 1 - busy / seconds)
            control.should_training_stop = True
            return
        now = time.perf_counter()
        if self.num_begun > self.machine.warm_up:
            self.marks.append((self.first_mark, self.mark()))
            is_late = len(self.marks) >= self.least and now - self.started > self.machine.seconds
            self.is_timed = is_late or len(self.marks) == MOST_TIMED
        control.should_training_stop = now - self.begun > self.machine.limit

    def figures(self) -> Row:
        """Milliseconds and real tokens of the timed steps, and what the model computed over real tokens."""
        self.machine.synchronize()
        on_cuda = self.machine.device == "cuda"
        ms = [start.elapsed_time(end) if on_cuda else 1e3 * (end - start) for start, end in self.marks]
        real = [sum(int(tokens) for _, tokens in step) for step in self.tokens]
        computed = sum(tokens for step in self.tokens for tokens, _ in step)
        row: Row = {"tokens_per_s": 1e3 * sum(real) / sum(ms), "computed_over_real": computed / sum(real)}
        row |= {"steps": len(ms), "ms": statistics.median(ms), "ms_range": f"{min(ms):.1f} to {max(ms):.1f}"}
        row["step_ms"] = " ".join(f"{each:.1f}" for each in ms)
        return row | {"step_tokens": " ".join(map(str, real))}


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


def train(
    machine: Machine,
    method: str,
    given: Contender,
    config: Any,
    lora: bool,
    lengths: np.ndarray,
    max_length: int,
    least: int = LEAST_TIMED,
) -> Row:
    package, batch_size, settings, dropout, published = given
    table = Dataset.from_dict({"input_ids": [np.random.default_rng(0).integers(3, 300, n) for n in lengths]})
    model = machine.build(config)
    torch.backends.cuda.enable_cudnn_sdp(method != NO_CUDNN)
    if method == "TRL bfd flash":
        select_attention(model)
    if method == ON_FLASH:
        model.set_attn_implementation(padded_flash.NAME)
    clock = Clock(machine, least)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        usual = {
            "max_length": max_length,
            "per_device_train_batch_size": batch_size,
            "max_steps": machine.warm_up + MOST_TIMED + 1,
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
    if len(clock.marks) < min(clock.least, LEAST_TIMED):
        return proved | {"reason": f"{len(clock.marks)} steps were timed within {machine.limit:g} s"}
    row = proved | clock.figures()
    tokens_per_s = row["tokens_per_s"]
    row["documents_per_s"] = tokens_per_s / lengths.mean()
    row["documents_per_step"] = np.mean([int(n) for n in row["step_tokens"].split()]) / lengths.mean()
    row["host_bound"] = clock.host_bound
    if package is trl_packfix and settings.get("torch_compile"):
        row["compiled"] = trainer.packing_report.compiled
        row["compiled_layers"] = int(row["compiled"].split()[0])
        if row["compiled_layers"] < model.config.num_hidden_layers and machine.device == "cuda":
            return {"reason": row["compiled"]}
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
    """Speed-ups among rows of as many documents, and the share of the possible one that removing padding gave."""
    groups: dict[bool, dict[str, Row]] = {}
    for row in rows:
        if "tokens_per_s" in row:
            groups.setdefault(row["case"].endswith(AT_4), {})[row["case"].removesuffix(AT_4)] = row
    for cases in groups.values():
        for case, row in cases.items():
            for other in (NO_CUDNN, ON_FLASH, "TRL bfd flash", "ours stream", OURS):
                if other in cases and other != case:
                    row[f"over {other}"] = row["tokens_per_s"] / cases[other]["tokens_per_s"]
            if f"over {ON_FLASH}" in row:
                row["share"] = row[f"over {ON_FLASH}"] / cases[ON_FLASH]["computed_over_real"]
            if row["method"] in (ON_FLASH, OURS) and NO_CUDNN in cases:
                pairs = zip(row["step_tokens"].split(), cases[NO_CUDNN]["step_tokens"].split(), strict=False)
                row["same_batches"] = all(tokens == others for tokens, others in pairs)
