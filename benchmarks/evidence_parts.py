"""The parts of `evidence.py`, run one after another in this process. Each yields rows; see there what they show."""

import dataclasses
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]

from common import Row, hide_progress
from throughput_gpu import (
    CONTENDERS,
    LENGTHS,
    LLAMA,
    QWEN,
    WITH_KERNELS,
    Machine,
    ceiling,
    document_lengths,
    exactness,
    shares,
    train,
)

# isort: split
import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from support import memory
from support.host_reads import ReadsOfSteps
from support.models import build_tiny_model
from support.runs import texts, trainer
from support.strict_varlen import StrictVarlen
from torch import Tensor

import trl_packfix
from trl_packfix.attention import choice, runs, varlen
from trl_packfix.attention.kernels import Launch, attend_on_cpu, attend_on_cuda
from trl_packfix.attention.packed_forward import PackedForward
from trl_packfix.attention.runs import attend_shared_on_cuda
from trl_packfix.compat import scores_tokens
from trl_packfix.data import by_length
from trl_packfix.data.model_memory import GIB, Method, count_model, predict_peak
from trl_packfix.data.prefix_collator import PrefixCollator
from trl_packfix.layout import LAYOUT

ROOT = Path(__file__).resolve().parents[1]
HEADS = 32, 8, 128  # query heads, key heads, dimensions of Llama 3 8B
SMALL_HEADS = 4, 2, 8
Rows = Iterator[Row]
Attend = Callable[..., Tensor]


# Calls of attention


def device_of_kernels(machine: Machine) -> AbstractContextManager[Any]:
    """On a CPU a stand-in that is as strict as the kernels takes their place, so that their callers run."""
    return nullcontext() if machine.device == "cuda" else StrictVarlen()


def random_tensors(
    machine: Machine, tokens: int, heads: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """Queries, keys and values, (1, H, T, D)."""
    generator = torch.Generator().manual_seed(0)
    query_heads, key_heads, dim = heads
    shapes = [(1, number, tokens, dim) for number in (query_heads, key_heads, key_heads)]
    return [torch.randn(*shape, generator=generator).to(machine.device, dtype) for shape in shapes]


def forward_and_backward(attend: Attend, tensors: list[Tensor]) -> list[Tensor]:
    """The output and the gradients."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    out = attend(*tensors)
    weights = torch.linspace(-1, 1, out.shape[-1], device=out.device, dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, weights.expand_as(out))]


def bounds_of(lengths: list[int], device: str) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).to(device)


def timed(machine: Machine, function: Callable[[], Any]) -> Row:
    """Median milliseconds of a call, after one that is not counted; on CUDA the memory at its peak, too."""
    function()
    machine.synchronize()
    if machine.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    rounds = [0.0] * (1 if machine.smoke else 15)
    for i in range(len(rounds)):
        start = time.perf_counter()
        function()
        machine.synchronize()
        rounds[i] = 1e3 * (time.perf_counter() - start)
    row = {"ms": statistics.median(rounds)}
    return row | ({"peak_gib": torch.cuda.max_memory_allocated() / GIB} if machine.device == "cuda" else {})


# The parts


def machine_rates(machine: Machine) -> Rows:
    card = {"card": torch.cuda.get_device_name() if machine.device == "cuda" else "CPU"}
    yield {"case": "products, TFLOP/s", "rate": ceiling(machine)["tflops"]} | card
    source = torch.ones(2**20 if machine.smoke else 2**30, dtype=torch.bfloat16, device=machine.device)
    target = torch.empty_like(source)
    row = timed(machine, lambda: target.copy_(source))
    yield {"case": "copies, GB/s", "rate": 2 * source.nbytes / row["ms"] / 1e6} | card


def kernels(machine: Machine) -> Rows:
    lengths = [2, 40, 3] if machine.smoke else [1, 300, 17, 129, 1024, 64, 1]
    cases = [
        (heads, window, sinks, dtype)
        for heads in ((8, 2, 64), (4, 4, 128))
        for window in (None, 16 if machine.smoke else 128)
        for sinks in (False, True)
        for dtype in (torch.bfloat16, torch.float16)
        if dtype == torch.bfloat16 or window is None
    ]
    wrong = []
    for heads, window, with_sinks, dtype in cases:
        tensors = random_tensors(machine, sum(lengths), heads, dtype)
        if with_sinks:  # fp32, as under autocast
            tensors.append(torch.linspace(-1, 1, heads[0]).to(machine.device))
        options = {"scale": heads[2] ** -0.5, "window": window}

        def on_cpu(*tensors: Tensor, options: Row = options) -> Tensor:
            return attend_on_cpu(*tensors[:3], lengths, sinks=tensors[3] if tensors[3:] else None, **options)

        def on_cuda(*tensors: Tensor, options: Row = options) -> Tensor:
            launch = one_launch(bounds_of(lengths, machine.device), max(lengths))
            return attend_on_cuda(*tensors[:3], launch, sinks=tensors[3] if tensors[3:] else None, **options)

        exact = forward_and_backward(on_cpu, [x.cpu().double() for x in tensors])
        rounded = forward_and_backward(on_cpu, [x.cpu() for x in tensors])
        with device_of_kernels(machine):
            found = forward_and_backward(on_cuda, tensors)
        errors, roundings = (
            [((x.cpu().double() - right).norm() / right.norm()).item() for x, right in zip(xs, exact, strict=True)]
            for xs in (found, rounded)
        )
        name = f"{heads[0]}:{heads[1]} x {heads[2]}, {str(dtype).removeprefix('torch.')}"
        name += f"{', window' if window else ''}{', sinks' if with_sinks else ''}"
        yield {"case": name, "error": max(errors), "rounding": max(roundings), "tokens": sum(lengths)}
        if any(not error <= 3 * rounding + 1e-3 for error, rounding in zip(errors, roundings, strict=True)):
            wrong.append(name)
    assert not wrong, f"further from fp64 than 3 times what rounding makes: {'; '.join(wrong)}"


def one_launch(bounds: Tensor, longest: int) -> list[Launch]:
    return [Launch((bounds, bounds), (longest, longest))]


def launches(machine: Machine) -> Rows:
    """Forward and backward of attention."""
    unit = 16 if machine.smoke else 512
    packs = {
        f"{16 * unit} and 16 x {unit} tokens": ([16 * unit, *[unit] * 16], 16 * unit),
        f"{unit} tokens, 640 documents": ([unit] * 16 + [0] * 624, 16 * unit),
    }
    sizes = {"CLASSES": (24, 40), "TILE": 4} if machine.smoke else {}
    heads = SMALL_HEADS if machine.smoke else HEADS
    for name, (lengths, longest) in packs.items():
        bounds = bounds_of(lengths, machine.device)
        with mock.patch.multiple(by_length, **sizes):
            divided = by_length.launches(bounds.cpu().numpy(), longest)
            tile = by_length.TILE
        assert divided, "these lengths need one launch only"
        by_class = varlen.launches_of(
            PackedForward(bounds, bounds, longest, longest, launches=divided), None, sum(lengths)
        )
        contenders = {
            name: partial(attend_on_cuda, launches=given, scale=heads[2] ** -0.5)
            for name, given in (("one launch", one_launch(bounds, longest)), ("by length", by_class))
        }
        blocks = {
            "one launch": len(lengths) * -(-longest // tile),
            "by length": sum((last - first) * -(-most // tile) for first, last, *_, most in divided),
        }
        working = sum(-(-length // tile) for length in lengths)
        tensors = random_tensors(machine, sum(lengths), heads)
        with device_of_kernels(machine):
            found = {kind: forward_and_backward(attend, tensors) for kind, attend in contenders.items()}
            for kind, attend in contenders.items():
                row = {"case": f"{name}, {kind}", "tokens": sum(lengths), "idle_blocks": blocks[kind] - working}
                pairs = zip(found[kind], found["one launch"], strict=True)
                row["difference"] = max((x - y).abs().max().item() for x, y in pairs)
                yield row | timed(machine, partial(forward_and_backward, attend, tensors))


def prefixes(machine: Machine) -> Rows:
    """Forward and backward of attention on chats with one sample per turn."""
    unit, own, chats, heads = (8, 3, 2, SMALL_HEADS) if machine.smoke else (1024, 128, 2, HEADS)
    samples = [
        {"input_ids": [*range(100_000 * chat, 100_000 * chat + unit * n), *([9_000_000 + n] * own)]}
        for chat in range(chats)
        for n in range(1, 9)
    ]
    batch = PrefixCollator()(samples)
    shared = batch[LAYOUT].to(machine.device)
    bounds = tuple(batch[name].to(machine.device) for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    longest = batch["max_length_q"], batch["max_length_k"]
    documents = [len(sample["input_ids"]) for sample in samples]
    whole = bounds_of(documents, machine.device)
    num_rows, num_keys = int(bounds[0][-1]), len(shared.kv_index)
    scale = heads[2] ** -0.5

    def on_shared(most_keys: int) -> Attend:
        def attend(*tensors: Tensor) -> Tensor:
            pack = PackedForward(*bounds, *longest, **shared.attention())
            with mock.patch.object(runs, "most_copied_keys", lambda *tensors: most_keys):
                return attend_shared_on_cuda(*tensors, pack, scale=scale)

        return attend

    contenders = {
        "one launch": (on_shared(num_keys), num_rows),
        "several launches": (on_shared(num_keys // 4), num_rows),
        "whole documents": (
            partial(attend_on_cuda, launches=one_launch(whole, max(documents)), scale=scale),
            sum(documents),
        ),
    }
    found = {}
    for name, (attend, tokens) in contenders.items():
        machine.tidy()
        tensors = random_tensors(machine, tokens, heads)
        with device_of_kernels(machine):
            found[name] = forward_and_backward(attend, tensors)
            row = timed(machine, partial(forward_and_backward, attend, tensors))
        row = {"case": name, "tokens": tokens, "keys_per_row": num_keys / num_rows} | row
        if name == "several launches":
            pairs = zip(found["several launches"], found["one launch"], strict=True)
            row["difference"] = max(((x - y).float().norm() / y.float().norm()).item() for x, y in pairs)
        yield row


def training(machine: Machine, config: Any, lora: bool, lengths: str, extra: tuple[str, ...] = ()) -> Rows:
    """`Trainer.train()` of each contender at batch size 16."""
    max_length = 256 if machine.smoke else LENGTHS[lengths][2]
    sizes = np.minimum(document_lengths(None, lengths, 200 if machine.smoke else 2000), max_length)
    table = Dataset.from_dict({"input_ids": [np.random.default_rng(0).integers(3, 300, n) for n in sizes]})
    batch_size = machine.batch_sizes[0]
    rows: list[Row] = []
    slowest = "TRL bfd"  # its mask covers all pairs of 32,768 tokens: it may exceed the limit, and so it comes last
    for method in (*(name for name in CONTENDERS if name != slowest), *extra, slowest):
        row: Row = {"part": "train", "case": method, "method": method, "model": type(config).model_type}
        row |= {"lengths": lengths, "batch_size": batch_size}
        if method == "ours stream, liger" and importlib.util.find_spec("liger_kernel") is None:
            row |= {"optional": True, "reason": "liger-kernel is not installed"}
        else:
            try:
                machine.tidy()
                row |= train(machine, method, config, lora, table, batch_size, max_length)
            except Exception as error:
                row["reason"] = describe_error(error)
        rows.append(row)
        shares(rows)
        yield row


def exactness_in_bf16(machine: Machine) -> Rows:
    lengths = np.minimum(document_lengths(None, "t0_p3_sample", 8), 64 if machine.smoke else 2048)
    yield {"case": "packed over alone"} | {k: v for k, v in exactness(machine, lengths).items() if k != "part"}


@contextmanager
def waits(machine: Machine, watch: ReadsOfSteps) -> Iterator[list[Any]]:
    """On CUDA: torch's warnings where the host waits, in the steps that `watch` counts."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if machine.device == "cuda":
            watch.switch = lambda is_on: torch.cuda.set_sync_debug_mode("warn" if is_on else "default")
        yield found


def reads(machine: Machine) -> Rows:
    """Per micro-batch of a tiny model."""
    contenders = {
        "TRL unpacked": (trl.SFTTrainer, {"config_class": trl.SFTConfig, "packing": False}),
        "ours minibatch": (trl_packfix.SFTTrainer, {"packing_strategy": "minibatch"}),
        "ours stream": (trl_packfix.SFTTrainer, {}),
        "ours, shared prefixes": (trl_packfix.SFTTrainer, {"share_prefixes": "family"}),
    }
    on_cuda = machine.device == "cuda"
    model = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    for name, (kind, settings) in contenders.items():
        watch = ReadsOfSteps()
        settings = {"max_steps": 7, "logging_steps": 100, "bf16": True, "use_cpu": not on_cuda} | settings
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            if not on_cuda:
                stack.enter_context(mock.patch.object(choice, "cuda_varlen_problem", lambda: None))
                stack.enter_context(mock.patch.object(varlen, "FLASH_DEVICES", {"cpu"}))
            stack.enter_context(device_of_kernels(machine))
            found = stack.enter_context(waits(machine, watch))
            tiny, callbacks = build_tiny_model(**model), {"callbacks": [watch]}
            trainer(folder, texts(60), tiny, callbacks, kind, **settings).train()
        row: Row = {"case": name, "reads": sum(watch.per_micro_batch.values())}
        if on_cuda:
            row["waits"] = sum("synchronizing" in str(each.message) for each in found) / watch.micro_batches
        yield row | {"places": "; ".join(f"{place} {n:g}" for place, n in watch.per_micro_batch.items())}


def memory_of_a_step(machine: Machine) -> Rows:
    """The largest allocation of a training against `plan --memory`; on the CPU what torch counts on meta tensors."""
    cases = {"7B, LoRA": (LLAMA, True), "1.5B, full": (QWEN, False)}
    for name, (config, lora) in cases.items():
        config = machine.config(config)
        if machine.smoke:
            if lora and not scores_tokens():
                yield {"case": name, "optional": True, "reason": "TRL before 1.16 has no fused LM head on a CPU"}
                continue
            peaks = (
                partial(memory.fused_peaks, config, True, True, 512)
                if lora
                else partial(memory.packed_peaks, config, True, 512)
            )
            predicted, counted = peaks()
            row: Row = {"tokens": 512}
        else:
            # full training under autocast has weights in fp32
            own = dataclasses.replace(machine, dtype=torch.bfloat16 if lora else torch.float32, seconds=1.0)
            batch_size, max_length = 8, 2048
            ids = [np.random.default_rng(i).integers(3, 300, max_length) for i in range(200)]
            table = Dataset.from_dict({"input_ids": ids})
            row = train(own, "ours stream", config, lora, table, batch_size, max_length)
            method = Method(lora, "DDP")
            tokens = batch_size * max_length
            peak = predict_peak(
                count_model(config, method), method, tokens=tokens, gpus=1, checkpointing=True, documents=batch_size
            )
            predicted, counted, row = peak.total, row["peak_gib"] * GIB, {"tokens": tokens}
        row |= {"predicted_gib": predicted / GIB, "counted_gib": counted / GIB, "ratio": predicted / counted}
        yield {"case": name} | row


class Outcomes:
    """Counts the tests of a run of pytest."""

    def __init__(self) -> None:
        self.passed = self.skipped = 0
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed
        self.skipped += report.skipped
        if report.failed:
            self.failed.append(report.nodeid.split("::")[-1])


def tests(machine: Machine) -> Rows:
    selections = {
        "training": ("test_training_gpu.py", "packed_training and llama and (full or lora) and reentrant"),
        "repair": ("test_repair_gpu.py", ""),
    }
    if machine.smoke:
        os.environ["GPU_TESTS_ON_CPU"] = "1"
        selections = {
            "training": ("test_training_gpu.py", "packed_training and llama and full and chosen and non-reentrant"),
            "repair": ("test_repair_gpu.py", "falcon"),
        }
    wrong = []
    for name, (file, selected) in selections.items():
        outcomes = Outcomes()
        arguments = ["-q", "-rs", "-p", "no:cacheprovider", str(ROOT / "tests" / "gpu" / file), "-k", selected]
        code = pytest.main(arguments, plugins=[outcomes])
        row: Row = {"case": name, "skipped": outcomes.skipped, "failed": len(outcomes.failed)}
        yield row | ({"passed": outcomes.passed} if outcomes.passed else {"reason": f"pytest ended with {code}"})
        wrong += outcomes.failed
    assert not wrong, f"{len(wrong)} failed: {', '.join(wrong)}"


MEASURES: dict[str, Callable[[Machine], Rows]] = {
    "machine": machine_rates,
    "kernels": kernels,
    "launches": launches,
    "prefixes": prefixes,
    "7b-flan": partial(training, config=LLAMA, lora=True, lengths="t0_p3_sample"),
    "7b-orcamath": partial(training, config=LLAMA, lora=True, lengths="gsm8k_train"),
    "1.5b-flan": partial(training, config=QWEN, lora=False, lengths="t0_p3_sample", extra=tuple(WITH_KERNELS)),
    "exactness": exactness_in_bf16,
    "reads": reads,
    "memory": memory_of_a_step,
    "tests": tests,
}


def describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"


def write(path: Path, **record: Any) -> None:
    """Another process reads the file at any time."""
    path.with_suffix(".new").write_text(json.dumps(record, default=float))
    path.with_suffix(".new").rename(path)


def main(folder: Path, names: list[str], machine: Machine) -> None:
    for name in names:
        path, began, rows = folder / f"{name}.json", time.time(), []
        record: Row = {"rows": rows, "began": began}
        write(path, state="running", **record)
        print(f"== {name}", flush=True)
        try:
            machine.tidy()
            for row in MEASURES[name](machine):
                rows.append(row)
                print(row, flush=True)
                write(path, state="running", **record)
            write(path, state="passed", ended=time.time(), **record)
        except Exception as error:
            import traceback

            traceback.print_exc()
            write(path, state="failed", reason=describe_error(error), ended=time.time(), **record)
            machine.synchronize()  # raises after some errors, which leave the GPU unusable for this process


if __name__ == "__main__":
    hide_progress()
    is_smoke = "--smoke" in sys.argv
    if is_smoke:
        torch.set_num_threads(1)
        here = Machine("cpu", torch.float32, True, 0.0, 60.0)
    else:
        here = Machine("cuda", torch.bfloat16, False, 3.0, 40.0)
    main(Path(sys.argv[sys.argv.index("--out") + 1]), sys.argv[sys.argv.index("--parts") + 1 :], here)
