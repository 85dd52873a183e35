"""Test packing on a tiny random model of every model type, and check each result of the probe with the judge."""

import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import PreTrainedModel

from trl_packfix.isolation.isolation_report import IsolationReport
from trl_packfix.isolation.packed_model import PackedModel
from trl_packfix.reporting.numbers import finite

from . import image_families, zoo
from .judge import ImageJudge, Judge, Judgement, PrefixJudge, packed_by_trl, prefix_sharing, settle_process

MAX_LENGTH = 64  # tokens; every threshold of the tiny models lies below it
WRONG = "wrong"
MAX_LENGTH_WITH_IMAGES = 512  # tokens; documents with images are longer
NOT_TESTED = "not tested"  # the verdict with images, where there is no tiny processor
VERDICTS = ("native", "varlen", "repaired", "unpack only", "refused", "no text")


@dataclass(frozen=True)
class Row:
    """The result for one model type: the columns of docs/compatibility.csv.

    Errors are the largest relative difference, by the judge. A verdict is one of `VERDICTS`: "native": isolated with
    `packfix_varlen` and with its own attention. "varlen": with `packfix_varlen` only (with images: the judge found its
    own wrong). "unpack only": documents as rows of padded batches. "refused": by the probe, or by the model on a pack
    of the judge. "no text": it cannot be built, or does not accept text alone.

    Attributes:
        kind: "causal" or "image-text": the auto class that loads it.
        attention: the implementation that packed training uses.
        error: between this training and each document alone without padding.
        given: the same against the model as it was given, on the padded rows of unpacked TRL; None if the model raises
            on those. This one decides whether training is right.
        where: the case and the tensor with the difference that decides.
        stock_trl, images_stock: the unchanged model on TRL's packs: "isolated", "leaks" or "refuses".
        probes: how many ran on text: with the model's own attention, with ours, after the repair; and with images.
        false_negatives: probes that found no leak where the judge found one: silent leaks. `false_positives`: reverse.
        repairs: the modules that run on each document separately, and how.
        shared, prefixes: whether two ranks can share a pack, and documents prefixes: "yes", "no", or "" if it was not
            tested; "wrong" if the probe allows it and the judge does not.
        with_kernels: the verdict of a type with mixers with the packages of their kernels
            (`tests/features/hybrids/on_kernels.py`).
        reason: why its own attention is not enough ("varlen"), why ours alone is not, or why it is refused.
        images: the verdict on packs with images, or "not tested"; "" for causal types.
    """

    model_type: str
    kind: str
    verdict: str
    attention: str = ""
    error: float = 0.0
    given: float | None = None
    where: str = ""
    stock_trl: str = ""
    stock_error: float = 0.0
    probes: int = 0
    false_negatives: int = 0
    false_positives: int = 0
    repairs: str = ""
    reason: str = ""
    shared: str = ""
    prefixes: str = ""
    prefix_error: float = 0.0
    images: str = ""
    images_error: float = 0.0
    images_stock: str = ""
    images_stock_error: float = 0.0
    images_reason: str = ""
    with_kernels: str = ""

    @property
    def is_right(self) -> bool:
        """Whether it trains packed, with the results of each document alone."""
        return self.verdict in VERDICTS[:4] and not self.false_negatives and self.prefixes != WRONG

    @property
    def is_right_with_images(self) -> bool:
        """Whether it trains packs with images, with the results of each document alone."""
        return self.images in VERDICTS[:4] and not self.false_negatives

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
    def is_silent_leak(self) -> bool:
        return self.report.passed and not self.judgement.right and self.judgement.refusal is None

    @property
    def is_false_alarm(self) -> bool:
        return self.judgement.right and not self.report.passed

    @property
    def summary(self) -> str:
        if self.report.passed and self.judgement.refusal is not None:
            return f"proved on the packs of the probe, but raises on others: {self.judgement.refusal}"
        return self.report.summary()

    @property
    def verdict(self) -> str:
        """The verdict of an attempt in which repairs were allowed."""
        if not self.report.passed or self.judgement.refusal:
            return "refused"
        return "unpack only" if self.unpacked else "repaired" if self.repairs else "native"


def sweep_type(model_type: str, kind: str = "causal", on_leak: str = "repair") -> Row:
    """Test one model type, in fp32 on the CPU, with `on_leak` of `SFTConfig`."""
    row = _sweep_text(model_type, kind, on_leak)
    return _sweep_images(row, on_leak) if kind == "image-text" else row


def _sweep_text(model_type: str, kind: str, on_leak: str) -> Row:
    build = partial(zoo.build_model, model_type, kind)
    try:
        pristine = build()
        judge = Judge(pristine)
    except Exception as error:  # any error of the model's code is the reason
        return Row(model_type, kind, "no text", reason=_message(error))
    stock = judge.judge(pristine, packed_by_trl)

    attempt = partial(_attempt, build, judge, MAX_LENGTH)
    own = attempt(on_leak="raise", enforce_flash_attention=False)
    ours = attempt(on_leak="raise")
    attempts = [own, ours]
    if not ours.report.passed:
        attempts.append(attempt(on_leak=on_leak))
    final = attempts[-1]
    verdict = "varlen" if final is ours and final.verdict == "native" and not own.report.passed else final.verdict
    explained = {"varlen": own, "refused": final}.get(verdict, ours)
    prefixes = "no"
    prefix_error = 0.0
    if ours.report.passed:
        prefixes, prefix_error = _judge_prefixes(build(), pristine)
    return Row(
        model_type,
        kind,
        verdict,
        attention=final.attention,
        error=final.judgement.error,
        given=final.judgement.given,
        where=final.judgement.where,
        stock_trl=stock.of_stock,
        stock_error=stock.decisive,
        probes=len(attempts),
        false_negatives=sum(each.is_silent_leak for each in attempts),
        false_positives=sum(each.is_false_alarm for each in attempts),
        repairs=final.repairs,
        reason="" if verdict == "native" else explained.summary,
        prefixes=prefixes,
        prefix_error=prefix_error,
    )


def _judge_prefixes(model: PreTrainedModel, pristine: PreTrainedModel) -> tuple[str, float]:
    """Whether documents may share prefixes, and the error of the judge if they may; see `Row`."""
    packed = PackedModel(model, torch.float32, "cpu", MAX_LENGTH, on_leak="raise", feature=prefix_sharing())
    packed.prove(model)
    if packed.prove_feature(model) is not None:
        return "no", 0.0
    found = PrefixJudge(pristine).judge(model)
    return "yes" if found.right else WRONG, found.error


def _sweep_images(row: Row, on_leak: str) -> Row:
    """Return the row with the results of packs with images."""
    if row.model_type not in image_families.FAMILIES:
        return replace(row, images=NOT_TESTED, images_reason=image_families.why_not(row.model_type))

    build = partial(image_families.build_model, row.model_type)
    pristine = build()
    try:
        examples = image_families.make_examples(row.model_type, pristine)
    except ValueError as error:  # the outputs of the processor cannot be joined
        return replace(row, images="refused", images_reason=_message(error))
    judge = ImageJudge(pristine, examples, image_families.FIRST_WORD, image_families.LAST_WORD)
    stock = judge.judge(pristine)

    attempt = partial(_attempt, build, judge, MAX_LENGTH_WITH_IMAGES, feature=examples)
    attempts = [attempt(on_leak="raise")]
    if not attempts[0].report.passed:
        attempts.append(attempt(on_leak=on_leak))
    final = attempts[-1]
    verdict = "varlen" if final.verdict == "native" and not stock.right else final.verdict
    why = "; ".join(text for text in (final.repairs, attempts[0].summary) if text)
    return replace(
        row,
        images=verdict,
        images_error=final.judgement.error,
        images_stock=stock.of_stock,
        images_stock_error=stock.error,
        images_reason="" if final is attempts[0] and final.verdict == "native" else why,
        probes=row.probes + len(attempts),
        false_negatives=row.false_negatives + sum(each.is_silent_leak for each in attempts),
        false_positives=row.false_positives + sum(each.is_false_alarm for each in attempts),
    )


def _attempt(build: Callable[[], PreTrainedModel], judge: Judge, max_length: int, **settings: Any) -> _Attempt:
    """Prove a new model with these settings of `PackedModel`, and judge it."""
    model = build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # enforce_flash_attention=False warns about its cost
        try:
            packed = PackedModel(model, torch.float32, "cpu", max_length, **settings)
            report = packed.prove(model)
        except Exception as error:
            return _Attempt(_crash(error), judge.judge(model))
        repairs = "; ".join(map(str, packed.repaired))
        unpacked = packed.is_unpacked
        return _Attempt(report, judge.judge(model), packed.attention.name, repairs, unpacked)


def _crash(error: Exception) -> IsolationReport:
    return IsolationReport(False, False, inf, inf, None, 0.0, "", error=f"the probe itself raised {_message(error)}")


def _message(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


Task = tuple[str, str]  # model type, kind


def sweep(tasks: Sequence[Task], on_leak: str = "repair", workers: int = 1, time_limit: float = 120.0) -> Iterator[Row]:
    """Yield the rows of `tasks` as they are finished, from `workers` processes at once, one for each type.

    A type that takes longer than `time_limit` seconds, needs too much memory, or crashes its process gives a row that
    says so.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # so the time limit does not include imports

    def row_of(task: Task) -> Row:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(theirs, task, on_leak), daemon=True)
        process.start()
        theirs.close()
        try:
            if ours.poll(time_limit):
                return ours.recv()
            return Row(*task, "refused", reason=f"longer than {time_limit:g} s")
        except EOFError:
            return Row(*task, "refused", reason="its process died")
        finally:
            process.kill()

    with ThreadPoolExecutor(workers) as threads:
        for done in as_completed([threads.submit(row_of, task) for task in tasks]):
            yield done.result()


def _work(connection: Connection, task: Task, on_leak: str) -> None:
    settle_process()
    try:
        row = sweep_type(*task, on_leak)
    except Exception as error:  # an error of this package: reported, and the sweep continues
        row = Row(*task, "refused", reason=f"the sweep itself raised {_message(error)}")
    connection.send(row)
