"""Training throughput on one GPU: padded, TRL's packing and ours, at most 8 minutes. NOT MEASURED YET: no GPU was here.

    python benchmarks/throughput_gpu.py --data DIR --csv throughput_gpu.csv
    python benchmarks/throughput_gpu.py --smoke   # tiny sizes on the CPU: runs every part, measures nothing

If the GPU is available for 10 minutes only, and `pytest tests/gpu` runs as well, use `--minutes 5`.

Parts, the most important first. A run that fails (also out of memory) or does not fit the time becomes a row with the
reason. So does a run of ours that was unpacked, because it measures padding. The CSV is written after every row. The
exit status is 1 if the ceiling, the exactness or one of the methods has no row with figures.
  ceiling    8192^3 matrix products in bf16: the rate that this GPU reaches, in TFLOP/s
  exactness  logits and gradients of packed documents in bf16 against each document alone in fp32, over the error that
             the document alone has in bf16 itself: about 1 means that packing adds nothing to rounding
  train      `Trainer.train()` of models with random weights in the shapes of Qwen2.5-1.5B (full, AdamW) and Llama-2-7B
             (LoRA), bf16, gradient checkpointing, the 7B model and batch size 16 first, then 8 and 4; lengths of
             t0_p3_sample (FLAN-like,
             max_length 2048) and gsm8k_train (OrcaMath-like, 1024), random tokens:
      padded         TRL unpacked, sdpa
      ours           `minibatch`: the same documents per step as padded, no padding
      TRL bfd        TRL's packing with its defaults, sdpa
      TRL bfd flash  the same on our kernels (flash_attention_2 if it is installed)
      ours stream    packs of the same capacity as TRL's
Rows of ours also have the probe's result (`isolated`, `equal`, `max_difference` beside its `tolerance`), the number of
repaired modules, whether documents were unpacked, and the time of the probe (`probe_s`, not in the step times). `share`
is the speed-up over padded (in real tokens/s) divided by padded/real tokens, the largest speed-up that removing padding
can give; the target is 0.95. It counts tokens and not documents, because a run ends after some seconds and each method
has seen other documents by then. `real_tflops` counts
real tokens only, as the trainer's log does (`tflops_per_second_per_rank`): forward and backward of each document alone,
by the cost model of the config, without recomputation. `mfu` is its share of the card's peak where that is known (the
table of the package), `mfu_of_ceiling` its share of the measured ceiling. `host_bound` is the
share of one more step, under torch's profiler, in which the GPU ran no kernel: near 0 the GPU was measured, near 1 the
host. The profiler slows the host, so it is an upper bound; without a GPU it is 1. A step is timed from the moment its
batch is ready (without fetching and collation) to a synchronisation at its end. One or two warm-up steps are not timed.
A run is ended after 40 s, of which sdpa on 16 x 2048 tokens of the 7B model may need all.
"""

import gc
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# One process trains on one GPU: with several, the Trainer would wrap the model in DataParallel, which TRL refuses
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]

import numpy as np
import torch
import transformers
import trl
from common import Row, describe, hide_progress, json_rows, make_parser, tell, write_csv
from datasets import Dataset
from peft import LoraConfig
from support.models import build_tokenizer, select_attention
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel, Qwen2Config, TrainerCallback
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

import trl_packfix
from trl_packfix.attention.forwards import mark_packed_forwards
from trl_packfix.data.collator import PackedDataCollator
from trl_packfix.data.model_costs import make_cost_model
from trl_packfix.isolation.isolation_report import IsolationReport
from trl_packfix.isolation.packed_model import PackedModel
from trl_packfix.training.flops import own_peak_tflops, trained_share, training_flops

WARM_UP, TIMED = 2, 20  # steps, at most
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
CONTENDERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "padded": (trl, {}),
    "ours": (trl_packfix, {"packing": True, "packing_strategy": "minibatch", "packing_report": False}),
    "TRL bfd": (trl, {"packing": True}),
    "TRL bfd flash": (trl, {"packing": True}),
    "ours stream": (trl_packfix, {"packing": True, "packing_report": False}),
}
OURS = CONTENDERS["ours stream"]
# Only in `evidence.py`
WITH_KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ours stream, static shapes": (OURS[0], OURS[1] | {"pad_documents_to_multiple_of": 128}),
    "ours stream, liger": (OURS[0], OURS[1] | {"use_liger_kernel": True}),
}
LENGTHS = {"t0_p3_sample": (114, 1.27, 2048), "gsm8k_train": (165, 0.38, 1024)}  # median, sigma, max_length


@dataclass(frozen=True)
class Machine:
    device: str
    dtype: torch.dtype
    smoke: bool
    seconds: float  # timed steps of one contender, at most about this
    limit: float  # seconds of one contender with its warm-up; the last step may exceed it

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return (4,) if self.smoke else (16, 8, 4)

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


def ceiling(machine: Machine) -> Row:
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
    return {"part": "ceiling", "tflops": 2 * size**3 / best / 1e12}


def document_lengths(folder: Path | None, name: str, num: int) -> np.ndarray:
    """Tokens of `num` documents in random order: from the file if a folder is given, else lognormal."""
    median, sigma, max_length = LENGTHS[name]
    rng = np.random.default_rng(0)
    if folder is None:
        return np.clip(rng.lognormal(np.log(median), sigma, num), 2, max_length).astype(int)
    tokenizer = AutoTokenizer.from_pretrained(next(folder.glob("*tokenizer*")))
    rows = list(json_rows(folder / f"{name}.jsonl"))
    rows = [rows[i] for i in rng.permutation(len(rows))[:num]]
    texts = [
        "\n".join(turn["content"] for turn in row["messages"])
        if "messages" in row
        else row["prompt"] + row["completion"]
        for row in rows
    ]
    return np.clip([len(ids) for ids in tokenizer(texts)["input_ids"]], 2, max_length)


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
    row = {"part": "exactness", "documents": len(documents), "tokens": int(lengths[:8].sum())}
    row |= {"alone_logits": alone_logits, "alone_gradient": alone_gradient}
    return row | {"packed_over_alone_logits": logits / alone_logits, "packed_over_alone": gradient / alone_gradient}


class Clock(TrainerCallback):
    """Times steps after the warm-up, each up to a synchronisation, and stops the run after enough of them."""

    def __init__(self, machine: Machine):
        self.machine, self.seconds, self.steps, self.batches = machine, 0.0, 0, []
        self.begun: float | None = None  # the first step
        self.attention = ""  # of the last step: ours restores the model's own after training
        self.is_warm = self.is_timed = False
        self.profiler: torch.profiler.profile | None = None  # of the step after the timed ones
        self.host_bound: float | None = None

    def count(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Counts of a micro-batch, as tensors on its device: reading them here would synchronise with the GPU."""
        if self.is_timed:
            return
        ids, mask = kwargs["input_ids"], kwargs.get("attention_mask")
        starts = kwargs["position_ids"] == 0 if kwargs.get("position_ids") is not None else None
        documents = starts.sum() if starts is not None and mask is None else ids.shape[0]
        self.batches.append((documents, ids.numel() if mask is None else mask.sum(), ids.numel()))

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
        if not self.is_warm and (state.global_step == WARM_UP or slow):
            self.is_warm = True
            self.batches.clear()

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
            self.seconds, self.steps = self.seconds + now - self.started, self.steps + 1
        enough = self.seconds > self.machine.seconds or self.steps == TIMED
        self.is_timed = enough
        control.should_training_stop = now - self.begun > self.machine.limit


def watch(packed: PackedModel) -> Callable[[], Row]:
    """Times the probe of a run. The returned function gives the row of its result."""
    prove, seconds = packed.prove, []

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
    machine: Machine, name: str, config: Any, lora: bool, table: Dataset, batch_size: int, max_length: int
) -> Row:
    package, settings = (CONTENDERS | WITH_KERNELS)[name]
    model = machine.build(machine.config(config))
    if name == "TRL bfd flash":
        select_attention(model)
    clock = Clock(machine)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = package.SFTConfig(
            folder,
            max_length=max_length,
            per_device_train_batch_size=batch_size,
            max_steps=WARM_UP + TIMED + 1,
            bf16=machine.device == "cuda",
            use_cpu=machine.device == "cpu",
            optim="adamw_torch_fused" if machine.device == "cuda" else "adamw_torch",
            gradient_checkpointing=True,  # the name that every transformers of pyproject.toml has
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            **settings,
        )
        adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
        trainer = package.SFTTrainer(
            model,
            args,
            train_dataset=table,
            processing_class=build_tokenizer(),
            peft_config=adapter,
            callbacks=[clock],
        )
        if name == "TRL bfd flash":
            model.register_forward_pre_hook(add_boundaries, with_kwargs=True)
            mark_packed_forwards(trainer.model)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.model.register_forward_pre_hook(clock.count, with_kwargs=True)
        verdict = watch(trainer.packed_model) if package is trl_packfix and trainer.args.packing else dict
        machine.tidy()
        trainer.train()
    proved = verdict()
    if "reason" in proved:
        return proved
    if not clock.steps:
        return proved | {"reason": f"no step was timed within {machine.limit:g} s"}
    documents, tokens, computed = (sum(int(batch[i]) for batch in clock.batches) for i in range(3))
    row = proved | {
        "steps": clock.steps,
        "documents_per_s": documents / clock.seconds,
        "tokens_per_s": tokens / clock.seconds,
    }
    row |= {"computed_over_real": computed / tokens, "attention": clock.attention, "host_bound": clock.host_bound}
    if machine.device == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    lengths = np.array([len(ids) for ids in table["input_ids"]], dtype=float)
    costs = training_flops(make_cost_model(model.config), lengths, trained_share(trainer.model))
    flops = costs.sum() / lengths.sum() * tokens
    row["real_tflops"] = flops / clock.seconds / 1e12
    peak = own_peak_tflops(torch.device(machine.device), machine.dtype)
    return row if peak is None else row | {"mfu": row["real_tflops"] / peak}


def shares(rows: list[Row]) -> None:
    """Speed-ups over padded, and their share of the possible speed-up, if both were measured."""
    by_case: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        if row["part"] == "train" and "tokens_per_s" in row:
            by_case.setdefault((row["model"], row["lengths"], row["batch_size"]), {})[row["method"]] = row
    for case in by_case.values():
        for row in case.values():
            for other in ("padded", "TRL bfd", "TRL bfd flash"):
                if other in case:
                    row[f"over {other}"] = row["tokens_per_s"] / case[other]["tokens_per_s"]
            if "padded" in case:
                row["share"] = row["over padded"] / case["padded"]["computed_over_real"]


def without_figures(rows: list[Row], smoke: bool) -> list[str]:
    """The parts and methods of which no row has figures; with `smoke`, of which a row has none."""
    names = {True: set(), False: set()}
    for row in rows:
        names["reason" in row].add(row.get("method", row["part"]))
    measured = names[False] - (names[True] if smoke else set())
    return [name for name in ("ceiling", "exactness", *CONTENDERS) if name not in measured]


def main() -> None:
    parser = make_parser(__doc__, "JSONL files and a tokenizer; else lognormal lengths")
    parser.add_argument("--minutes", type=float, default=8.0, help="nothing is started after this")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU, in seconds; measures nothing")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device, so nothing can be measured. `--smoke` exercises the parts.")

    hide_progress()
    if args.smoke:
        torch.set_num_threads(1)
        machine = Machine("cpu", torch.float32, True, 0.0, 60.0)
    else:
        machine = Machine("cuda", torch.bfloat16, False, 4.0, 40.0)
    card = {"card": "CPU, smoke: not a measurement" if args.smoke else torch.cuda.get_device_name()}
    print(describe(), card["card"], sep=", ")
    deadline, rows, top = time.perf_counter() + 60 * args.minutes, [], float("nan")

    def attempt(row: Row, measure: Callable[[], Row]) -> Row:
        """A row in every case: with figures, or with the reason for their absence."""
        if time.perf_counter() > deadline:
            row["reason"] = "not measured: out of time"
        else:
            try:
                machine.tidy()  # also here: after some errors the GPU is unusable, which is a reason like others
                row |= measure()
            except Exception as error:
                row["reason"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        if "real_tflops" in row:
            row["mfu_of_ceiling"] = row["real_tflops"] / top
        rows.append(row | card)
        shares(rows)
        tell({key: value for key, value in rows[-1].items() if key != "card"}, ".3g")
        write_csv(args.csv, rows)
        return row

    top = attempt({"part": "ceiling"}, lambda: ceiling(machine)).get("tflops", top)
    num = 200 if args.smoke else 2000
    tables = {}
    for name, (_, _, max_length) in list(LENGTHS.items())[: 1 if args.smoke else 2]:
        max_length = 256 if args.smoke else max_length
        lengths = np.minimum(document_lengths(args.data, name, num), max_length)
        ids = [np.random.default_rng(0).integers(3, 300, n) for n in lengths]
        tables[name] = Dataset.from_dict({"input_ids": ids}), max_length
        if name == "t0_p3_sample":
            attempt({"part": "exactness"}, lambda lengths=lengths: exactness(machine, lengths))
    models = {"Llama-2-7B": (LLAMA, True), "Qwen2.5-1.5B": (QWEN, False)}  # small models measure the host
    for batch_size in machine.batch_sizes:
        for model, (config, lora) in models.items():
            for name, (table, max_length) in tables.items():
                for method in CONTENDERS:
                    case = (machine, method, config, lora, table, batch_size, max_length)
                    row = {"part": "train", "model": model, "training": "LoRA" if lora else "full", "lengths": name}
                    row |= {"batch_size": batch_size, "method": method}
                    attempt(row, lambda case=case: train(*case))
    print(f"{len(rows)} rows, {sum('reason' in row for row in rows)} without figures")
    if missing := without_figures(rows, args.smoke):
        raise SystemExit(f"no figures of: {', '.join(missing)}")


if __name__ == "__main__":
    main()
