"""One model type after another: what packing does on a tiny random model of it, and whether its verdict is true."""

import multiprocessing
import queue
import resource
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import inf
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers

from ..isolation.packed_model import PackedModel
from ..isolation.report import IsolationReport, finite
from . import zoo
from .judge import Judge, Judgement, packed_by_trl

MAX_LENGTH = 64  # tokens; every threshold of the tiny models lies below it
MEMORY = 16 * 2**30  # bytes of data that a process of the sweep may hold
VERDICTS = ("native", "varlen", "repaired", "unpack only", "refused", "no text")


@dataclass(frozen=True)
class Row:
    """What was found for one model type: the columns of docs/compatibility.csv.

    Attributes:
        kind: "causal" or "image-text": the auto class that loads it.
        verdict: on what it trains packed: "native" (its own attention is right, too), "varlen" (only ours is),
            "repaired", "unpack only" (documents as rows of padded batches), "refused" (by the probe, or by the model on
            a pack that the probe did not try), or "no text" (it cannot be built or takes no text alone).
        error: largest relative difference of this training from each document alone, by the judge; where it is.
        stock_trl: the untouched model on TRL's own batches: "isolated", "leaks" or "refuses"; by how much.
        false_negatives: probes that found nothing where the judge did: silent leaks. Of up to three: the model's own
            attention, ours, and after the repair.
        false_positives: probes that found something where the judge did not.
        repairs: what sees each document by itself, and how.
        reason: why its own attention is not enough ("varlen"), why ours alone is not, or why it is refused.
    """

    model_type: str
    kind: str
    verdict: str
    attention: str = ""
    error: float = 0.0
    where: str = ""
    stock_trl: str = ""
    stock_error: float = 0.0
    probes: int = 0
    false_negatives: int = 0
    false_positives: int = 0
    repairs: str = ""
    reason: str = ""

    @property
    def is_right(self) -> bool:
        """Whether it trains packed, and every document as it is alone."""
        return self.verdict in VERDICTS[:4] and not self.false_negatives

    def to_dict(self) -> dict[str, Any]:
        return finite(asdict(self))


@dataclass(frozen=True)
class _Attempt:
    report: IsolationReport
    judgement: Judgement
    attention: str = ""
    repairs: str = ""
    unpacked: bool = False

    @property
    def proved(self) -> bool:
        return self.report.isolated and self.report.equal

    @property
    def is_silent_leak(self) -> bool:
        return self.proved and not self.judgement.right and self.judgement.refusal is None

    @property
    def summary(self) -> str:
        if self.proved and self.judgement.refusal is not None:
            return f"proved on the packs of the probe, but raises on others: {self.judgement.refusal}"
        return self.report.summary()

    @property
    def verdict(self) -> str:
        """Of an attempt that was free to repair."""
        if not self.proved or self.judgement.refusal:
            return "refused"
        return "unpack only" if self.unpacked else "repaired" if self.repairs else "native"


def sweep_type(model_type: str, kind: str = "causal", on_leak: str | None = None, seed: int = 0) -> Row:
    """Judge one model type, in fp32 on the CPU, with `on_leak` of `SFTConfig` (None: its default)."""
    try:
        pristine = zoo.build_model(model_type, kind, seed)
        judge = Judge(pristine, zoo.WIDTH, zoo.FIRST_WORD, zoo.VOCABULARY)
    except Exception as error:  # anything a model's own code raises is its reason
        return Row(model_type, kind, "no text", reason=_message(error))
    stock = judge.judge(pristine, packed_by_trl)

    def attempt(**settings: Any) -> _Attempt:
        model = zoo.build_model(model_type, kind, seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # enforce_flash_attention=False warns of its price
            try:
                packed = PackedModel(model, torch.float32, "cpu", MAX_LENGTH, **settings)
                report = packed.prove(model)
            except Exception as error:
                return _Attempt(_crash(error), judge.judge(model))
            repairs = "; ".join(map(str, packed.repaired))
            unpacked = packed.is_unpacked
            return _Attempt(report, judge.judge(model), packed.attention.name, repairs, unpacked)

    own, ours = attempt(on_leak="raise", enforce_flash_attention=False), attempt(on_leak="raise")
    attempts = [own, ours]
    if not ours.proved:
        attempts.append(attempt(**({} if on_leak is None else {"on_leak": on_leak})))
    final = attempts[-1]
    verdict = "varlen" if final is ours and final.verdict == "native" and not own.proved else final.verdict
    told = {"varlen": own, "refused": final}.get(verdict, ours)
    return Row(
        model_type,
        kind,
        verdict,
        attention=final.attention,
        error=final.judgement.error,
        where=final.judgement.where,
        stock_trl="refuses" if stock.refusal else "isolated" if stock.right else "leaks",
        stock_error=stock.error,
        probes=len(attempts),
        false_negatives=sum(each.is_silent_leak for each in attempts),
        false_positives=sum(not each.proved and each.judgement.right for each in attempts),
        repairs=final.repairs,
        reason="" if verdict == "native" else told.summary,
    )


def _crash(error: Exception) -> IsolationReport:
    return IsolationReport(False, False, inf, inf, None, 0.0, "", error=f"the probe itself raised {_message(error)}")


def _message(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


Task = tuple[str, str]  # model type, kind


def all_types() -> list[Task]:
    """Every model type of the installed transformers, as a causal LM and as an image-text model trained on text."""
    causal = [(name, "causal") for name in zoo.causal_types()]
    return causal + [(name, "image-text") for name in zoo.image_text_types()]


def sweep(
    tasks: Sequence[Task], on_leak: str | None = None, workers: int = 1, time_limit: float = 120.0
) -> Iterator[Row]:
    """Rows of `tasks`, as they come in, from `workers` processes.

    A type that takes longer than `time_limit` seconds, more than `MEMORY`, or its process with it, becomes a row of its
    own; the sweep goes on in a fresh process.
    """
    waiting: queue.Queue[Task] = queue.Queue()
    found: queue.Queue[Row] = queue.Queue()
    for task in tasks:
        waiting.put(task)
    for _ in range(min(workers, len(tasks))):
        threading.Thread(target=_supervise, args=(waiting, found, on_leak, time_limit), daemon=True).start()
    for _ in tasks:
        yield found.get()


def _supervise(waiting: queue.Queue, found: queue.Queue, on_leak: str | None, time_limit: float) -> None:
    context = multiprocessing.get_context("spawn")
    process = None
    while True:
        try:
            task = waiting.get_nowait()
        except queue.Empty:
            break
        if process is None:
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, on_leak), daemon=True)
            process.start()
            theirs.close()
            ours.recv()  # it is ready: imports are not the model's time
        ours.send(task)
        try:
            row = (
                ours.recv()
                if ours.poll(time_limit)
                else Row(task[0], task[1], "refused", reason=f"longer than {time_limit:g} s")
            )
        except EOFError:
            row = Row(task[0], task[1], "refused", reason="its process died")
        found.put(row)
        if row.reason.startswith(("longer than", "its process")):
            process.kill()
            process = None
    if process is not None:
        process.kill()


def _work(connection: Connection, on_leak: str | None) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    torch.set_num_threads(1)  # tiny matrices: threads would wait for each other
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    connection.send("ready")
    while True:
        task = connection.recv()
        try:
            row = sweep_type(task[0], task[1], on_leak)
        except Exception as error:  # of ours, not the model's: shown, and the sweep goes on
            row = Row(task[0], task[1], "refused", reason=f"the sweep itself raised {_message(error)}")
        connection.send(row)
