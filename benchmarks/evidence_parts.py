"""The parts of `evidence.py`, run one after another in this process. Each yields rows; see there what they show."""

import dataclasses
import importlib.util
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from common import Row, hide_progress
from evidence_attention import Rows, device_of_kernels, kernels, launches, million_tokens, prefixes, timed, wide_heads
from throughput_gpu import (
    LENGTHS,
    LLAMA,
    ON_FLASH,
    PACKED,
    QWEN,
    TRAININGS,
    Contender,
    Machine,
    Training,
    ceiling,
    compare,
    document_lengths,
    exactness,
    train,
)

# isort: split
import numpy as np
import pytest
import torch
import trl
from support import memory
from support.host_reads import ReadsOfSteps
from support.liger import liger_played
from support.models import build_tiny_model
from support.runs import build_trainer, texts

import trl_packfix
from trl_packfix.attention import choice, varlen
from trl_packfix.compat import scores_tokens
from trl_packfix.data.model_memory import GIB, TrainingMethod, count_model, predict_peak

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(sys.argv[sys.argv.index("--data") + 1]) if "--data" in sys.argv else None  # real lengths


def machine_rates(machine: Machine) -> Rows:
    card = {"card": torch.cuda.get_device_name() if machine.device == "cuda" else "CPU"}
    yield {"case": "products, TFLOP/s", "rate": ceiling(machine)} | card
    source = torch.ones(2**20 if machine.smoke else 2**30, dtype=torch.bfloat16, device=machine.device)
    target = torch.empty_like(source)
    row = timed(machine, lambda: target.copy_(source))
    yield {"case": "copies, GB/s", "rate": 2 * source.nbytes / row["ms"] / 1e6} | card


def training(machine: Machine, given: Training) -> Rows:
    """`Trainer.train()` of each contender."""
    max_length = 256 if machine.smoke else LENGTHS[given.lengths][2]
    sizes = np.minimum(document_lengths(DATA, given.lengths, 200 if machine.smoke else 2000), max_length)
    config, is_lora, rows = (
        machine.config(given.config, None if machine.smoke else given.layers),
        given.config is not QWEN,
        [],
    )
    for case, contender in given.contenders.items():
        if machine.smoke:
            contender = contender._replace(batch_size=max(1, contender.batch_size // 4))
        row: Row = {"case": case, "method": case.split(",")[0], "batch_size": contender.batch_size}
        uses_liger = contender.settings.get("use_liger_kernel")
        if uses_liger and not machine.smoke and importlib.util.find_spec("liger_kernel") is None:
            row |= {"optional": True, "reason": "liger-kernel is not installed"}
        else:
            try:
                machine.tidy()
                with ExitStack() as stack:
                    if row["method"] == ON_FLASH:
                        stack.enter_context(device_of_kernels(machine))
                    if uses_liger and machine.smoke:
                        stack.enter_context(liger_played())
                    row |= train(machine, row["method"], contender, config, is_lora, sizes, max_length, given.least)
            except Exception as error:
                row["reason"] = describe_error(error)
        rows.append(row)
        compare(rows)
        yield row


def exactness_in_bf16(machine: Machine) -> Rows:
    lengths = np.minimum(document_lengths(DATA, "t0_p3_sample", 8), 64 if machine.smoke else 2048)
    yield {"case": "packed over alone"} | exactness(machine, lengths)


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
            tiny = build_tiny_model(**model)
            build_trainer(folder, texts(60), tiny, trainer_class=kind, callbacks=[watch], **settings).train()
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
                partial(memory.fused_peaks, config, memory.LORA, True, 512)
                if lora
                else partial(memory.packed_peaks, config, True, 512)
            )
            predicted, counted = peaks()
            row: Row = {"tokens": 512}
        else:
            # full training under autocast has weights in fp32
            own = dataclasses.replace(machine, dtype=torch.bfloat16 if lora else torch.float32, seconds=1.0)
            batch_size = 8
            max_length = 2048
            ours = Contender(trl_packfix, batch_size, PACKED)
            row = train(own, "ours stream", ours, config, lora, np.full(200, max_length), max_length)
            method = TrainingMethod(lora, "DDP")
            tokens = batch_size * max_length
            peak = predict_peak(
                count_model(config, method), method, tokens=tokens, gpus=1, checkpointing=True, documents=batch_size
            )
            predicted = peak.total
            counted = row["peak_gib"] * GIB
            row = {"tokens": tokens}
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
            "repair": ("test_repair_gpu.py", "bloom"),
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
    "wide": wide_heads,
    "prefixes": prefixes,
    "million": million_tokens,
    "exactness": exactness_in_bf16,
    "reads": reads,
    "memory": memory_of_a_step,
    "tests": tests,
    **{name: partial(training, given=given) for name, given in TRAININGS.items()},
}


def describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"


def write(path: Path, **record: Any) -> None:
    """Another process reads the file at any time."""
    path.with_suffix(".new").write_text(json.dumps(record, default=float))
    path.with_suffix(".new").rename(path)


def main(folder: Path, names: list[str], machine: Machine) -> None:
    for name in names:
        path = folder / f"{name}.json"
        began = time.time()
        rows = []
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
        if "liger_kernel" in sys.modules:
            return  # the next part gets another process


if __name__ == "__main__":
    hide_progress()
    is_smoke = "--smoke" in sys.argv
    if is_smoke:
        torch.set_num_threads(1)
        here = Machine("cpu", torch.float32, True, 0.0, 60.0)
    else:
        here = Machine("cuda", torch.bfloat16, False, 3.0, 60.0)
    main(Path(sys.argv[sys.argv.index("--out") + 1]), sys.argv[sys.argv.index("--parts") + 1 :], here)
