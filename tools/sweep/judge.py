"""The judge of a packed model: compare logits and every gradient of a pack with those of the model as it was given.

That model has its own attention. It gets each document in the rows of unpacked TRL, padded and masked, and also alone
without padding. The first of these decides; most models give the same on both.

It shares no code with the leak probe. The probe runs a few forwards of one model before training. The judge has a
second, unchanged copy of the model. It compares everything that training uses, including the backward pass, on
documents that neither the probe nor a repair has seen. `make sweep` and the tests use it to check the
results of the probe.
"""

import resource
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from trl_packfix.data.collator import IGNORE_INDEX, PackedDataCollator
from trl_packfix.feature import Feature, features_of
from trl_packfix.layout import layout_of

from .double import in_double
from .zoo import FIRST_WORD, VOCABULARY, WIDTH

TOLERANCE = 1e-4  # relative, in fp32
EXACT = 1e-9  # relative, in fp64, used if fp32 gives no clear result
PLAIN = 0.1  # relative; larger than any rounding, so fp64 is not needed
FLOOR = 1e-3  # the error of a gradient is relative to at least this share of the largest gradient

ALONE = "alone"  # a document alone without padding, and in a padded row of unpacked TRL
GIVEN = "given"
PADDING = 2  # tokens of padding behind each document
MEMORY = 16 * 2**30  # limit of data per process, in bytes

Truth = dict[str, tuple[Tensor, dict[str, Tensor]]]  # by case: the logits and the gradients of the parameters
# Documents -> a batch. A document is its tokens, (n,), or with images a dict with the tokens as `input_ids`.
Feed = Callable[[list[Any]], dict[str, Any]]


@dataclass(frozen=True)
class Judgement:
    """The result of the judge.

    Attributes:
        error: largest relative difference between a pack and its documents alone; inf if the model raised or gave nan.
        where: the case and the tensor with the difference that decides: "logits" or the name of a parameter.
        refusal: the error that the model raised on a pack; None if it raised none.
        dtype: the dtype in which `error` was measured.
        given: the same against the padded rows of unpacked TRL; None if the model raises on those.
    """

    error: float
    where: str
    refusal: str | None = None
    dtype: torch.dtype = torch.float32
    given: float | None = None

    @property
    def decisive(self) -> float:
        """The difference from unpacked TRL: `given`, or `error` where the model takes no padding."""
        return self.error if self.given is None else self.given

    @property
    def right(self) -> bool:
        """Whether packs equal unpacked training, up to rounding."""
        return self.decisive <= (TOLERANCE if self.dtype == torch.float32 else EXACT)

    @property
    def of_stock(self) -> str:
        """What TRL's packs do on an unchanged model: "refuses", "isolated" or "leaks"."""
        return "refuses" if self.refusal else "isolated" if self.right else "leaks"


class Judge:
    """Computes each document alone on `pristine`, a copy of the model without packing, in fp32 on the CPU.

    Raises any error that `pristine` raises on an unpacked document: such a model cannot be judged, or trained on text.
    With `decides_only` it computes documents in padded rows alone, which is what decides. Then `error` is `given`.
    """

    def __init__(self, pristine: nn.Module, *, decides_only: bool = False):
        generator = torch.Generator().manual_seed(2026)
        # No token twice in a document: models that pick tokens by content (doge) break ties by the length of the row.
        cases = {
            name: [drawn(generator)[:n] for n in lengths] for name, lengths in unseen_lengths(WIDTH, generator).items()
        }
        rows = {GIVEN: padded_by_trl} if decides_only else {ALONE: alone, GIVEN: padded_by_trl}
        self._start(pristine, cases, packed, rows)

    def _start(self, pristine: nn.Module, cases: dict[str, list[Any]], packs: Feed, rows: dict[str, Feed]) -> None:
        self.pristine = pristine.train()
        self.cases = cases
        self._packs = packs
        self._truths: dict[torch.dtype, dict[str, Truth]] = {}
        self._rows = rows
        try:
            self._compute_truths(torch.float32)
        except Exception:
            if GIVEN not in rows:
                raise
            self._rows = {ALONE: alone}  # it takes no padding
            self._compute_truths(torch.float32)

    def judge(self, model: nn.Module, feed: Feed | None = None) -> Judgement:
        """Compare packs on `model`, in training mode, with unpacked training of the model as it was given.

        `feed` makes a batch of documents (default: that of training). If the error in fp32 may be rounding, the
        comparison is repeated in fp64, in which also computes what the model computes in fp32 in any dtype.
        """
        found = self._compare(model, self._packs if feed is None else feed, torch.float32)
        if found.right or found.decisive > PLAIN:
            return found
        try:
            finer = self.compare(model, torch.float64, feed)
            return found if finer.refusal else finer
        except RuntimeError:  # a model that requires fp32 somewhere
            return found

    def compare(self, model: nn.Module, dtype: torch.dtype, feed: Feed | None = None) -> Judgement:
        """Compare as `judge` does, but in this dtype only; the model is in fp32 before and after it."""
        try:
            with throughout(dtype, model, self.pristine):
                self._compute_truths(dtype)
                return self._compare(model.to(dtype), self._packs if feed is None else feed, dtype)
        finally:
            model.float()
            self.pristine.float()

    def _compute_truths(self, dtype: torch.dtype) -> None:
        if dtype in self._truths:
            return
        self.pristine.to(dtype)
        truths: dict[str, Truth] = {}
        for kind, row in self._rows.items():
            truths[kind] = {}
            for name, documents in self.cases.items():
                self.pristine.zero_grad()
                logits = [self._train_on(self.pristine, row([each]), [each]) for each in documents]
                truths[kind][name] = torch.cat(logits), _gradients(self.pristine)
        self.pristine.zero_grad()
        self._truths[dtype] = truths

    def _compare(self, model: nn.Module, feed: Feed, dtype: torch.dtype) -> Judgement:
        model.train()
        worst = dict.fromkeys(self._rows, (0.0, ""))  # (difference, where)
        for name, documents in self.cases.items():
            model.zero_grad()
            try:
                logits = self._train_on(model, feed(documents), documents)
            except Exception as error:  # any error that a model raises on a pack is recorded
                text = " ".join(f"{type(error).__name__}: {error}".split())
                return Judgement(float("inf"), name, refusal=text, dtype=dtype)
            gradients = _gradients(model)
            for kind, truth in self._truths[dtype].items():
                true_logits, true_gradients = truth[name]
                floor = FLOOR * max(value.abs().max().item() for value in true_gradients.values())
                gaps = [(_gap(logits, true_logits, 0.0), f"{name}: logits")]
                for key, value in true_gradients.items():
                    found = gradients.get(key, torch.zeros_like(value))
                    gaps.append((_gap(found, value, floor), f"{name}: {key}"))
                worst[kind] = max(worst[kind], *gaps, key=lambda pair: pair[0])
        model.zero_grad()
        difference, where = worst[GIVEN if GIVEN in worst else ALONE]
        given = difference if GIVEN in worst else None
        return Judgement(worst.get(ALONE, (difference,))[0], where, dtype=dtype, given=given)

    @staticmethod
    def _train_on(model: nn.Module, batch: dict[str, Any], documents: list[Any]) -> Tensor:
        """Add the gradients of the summed loss of `documents`, and return the logits, (T, V), without padding."""
        dtype = next(model.parameters()).dtype
        pixels = {name: value.to(dtype) for name, value in batch.items() if _is_float(value)}
        tokens = [_tokens(each) for each in documents]
        logits = model(**(batch | pixels)).logits[0, : sum(map(len, tokens))]
        targets = torch.cat([torch.cat([ids[1:], ids.new_tensor([IGNORE_INDEX])]) for ids in tokens])
        loss = nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
        loss.backward()
        return logits.detach()


class ImageJudge(Judge):
    """A `Judge` of packs with images, in layouts that differ from document to document.

    Args:
        examples: an `ImageExamples`, which makes documents through the processor, and the packs of training.
    """

    def __init__(self, pristine: nn.Module, examples: Any, first_token: int, last_token: int):
        generator = torch.Generator().manual_seed(7)

        def tokens(num: int) -> Tensor:
            return first_token + torch.randperm(last_token - first_token, generator=generator)[:num]

        def images(*sizes: tuple[int, int]) -> list[Any]:
            return [examples.image(*size) for size in sizes]

        # By the processor as a whole: text of the chat template around the images
        chats = [([(40, 24)], "abc"), ([(24, 56), (30, 30)], "de fgh"), ([(24, 24)], "i"), ([(56, 24), (24, 40)], "")]
        # An image at an end beside one at a beginning, images with one token between, text alone, one token
        placed: list[list[Any]] = [
            [tokens(4), *images((24, 48))],
            [*images((48, 24)), tokens(7)],
            [tokens(13)],
            [tokens(2), *images((30, 24)), tokens(1), *images((24, 24)), tokens(3)],
            [tokens(1)],
            [*images((24, 30)), tokens(5), *images((60, 30))],
        ]
        cases = {
            "chats": [examples.document(images(*sizes), text) for sizes, text in chats],
            "placed": [examples.join_content(parts) for parts in placed],
        }
        self._start(
            pristine, cases, examples.packed_batch, {ALONE: lambda documents: examples.unpacked_batch(documents[0])}
        )


class OnePack(Judge):
    """A `Judge` of one pack of `documents`, each the tokens of one, (n,), where all cases would take too long."""

    def __init__(self, pristine: nn.Module, documents: list[Tensor]):
        self._start(pristine, {"": documents}, packed, {ALONE: alone})


class PrefixJudge(Judge):
    """A `Judge` of packs whose documents share prefixes; it compares the logits that predict a token."""

    def __init__(self, pristine: nn.Module):
        self._start(pristine, alike_documents(torch.Generator().manual_seed(17)), with_prefixes, {ALONE: alone})

    @staticmethod
    def _train_on(model: nn.Module, batch: dict[str, Any], documents: list[Any]) -> Tensor:
        """Add the gradients of the summed loss of `documents`, and return the logits, document after document."""
        layout = layout_of(batch)
        rows = torch.cat([layout.predicting_rows(i) for i in range(len(documents))])
        logits = model(**batch).logits[0][rows]
        targets = torch.cat([ids[1:] for ids in documents])
        nn.functional.cross_entropy(logits, targets, reduction="sum").backward()
        return logits.detach()


@contextmanager
def throughout(dtype: torch.dtype, *models: nn.Module) -> Iterator[None]:
    """Within this context, models compute in `dtype` only, in fp64 also what they compute in fp32 in any dtype.

    The gated delta rule, norms and routers are such islands of fp32: their rounding would be taken for a leak.
    """
    if dtype is not torch.float64:
        yield
        return
    before = [model.config._experts_implementation for model in models]
    for model in models:
        model.set_experts_implementation("eager")  # the grouped matrix product has no float64
    try:
        with in_double():
            yield
    finally:
        for model, implementation in zip(models, before, strict=True):
            model.set_experts_implementation(implementation)


def unseen_lengths(hidden_size: int, generator: torch.Generator) -> dict[str, list[int]]:
    """Return lengths of documents, in tokens, by case: packing defects have appeared in one of these cases only."""
    third = hidden_size // 3
    return {
        "mixed": [25, 3, 17, 40],
        "one token": [7, 1, 12, 5],
        "T = hidden size": [third - 3, third + 5, hidden_size - 2 * third - 2],
        "equal lengths": [11] * 4,
        "64 short": torch.randint(1, 7, (64,), generator=generator).tolist(),
        "one document": [19],  # transformers drops a mask that hides nothing
    }


def drawn(generator: torch.Generator) -> Tensor:
    """Return the words of a tiny model in random order."""
    return FIRST_WORD + torch.randperm(VOCABULARY - FIRST_WORD, generator=generator)


def alike_documents(generator: torch.Generator) -> dict[str, list[Tensor]]:
    """Return documents that begin alike, by case: branches of branches and equal documents, and the turns of a chat."""
    trunk = drawn(generator)
    other = drawn(generator)
    rest = [[word for word in drawn(generator).tolist() if word not in set(trunk[:40].tolist())] for _ in range(4)]
    ends = [torch.tensor(words) for words in rest]
    tree = [
        torch.cat([trunk[:30], ends[0][:5]]),
        torch.cat([trunk[:18], ends[1][:9]]),
        torch.cat([trunk[:30], ends[2][:11]]),
        trunk[:25].clone(),
        torch.cat([trunk[:30], ends[0][:5]]),
        other[:7].clone(),
        torch.cat([trunk[:30], ends[2][:6], ends[2][20:24]]),
    ]
    return {"branches": tree, "turns": [other[:n].clone() for n in (5, 9, 14, 33)]}


def with_prefixes(documents: list[Tensor]) -> dict[str, Any]:
    """Return the packed batch of a run with `share_prefixes`, with every common beginning shared."""
    return packed(documents, replace(prefix_sharing().make_collator(PackedDataCollator()), min_shared=1))


def prefix_sharing() -> Feature:
    """Return the feature of a run with `share_prefixes="pack"`."""
    return features_of(SimpleNamespace(share_prefixes="pack"))


def packed(documents: list[Tensor], collate: PackedDataCollator | None = None) -> dict[str, Any]:
    """Return the packed batch of `PackedDataCollator`, or of another collator."""
    batch = (collate or PackedDataCollator())([{"input_ids": ids} for ids in documents])
    del batch["labels"]
    return batch


def packed_by_trl(documents: list[Tensor]) -> dict[str, Any]:
    """Return the padding-free batch that TRL's own collator makes of the same documents."""
    row = {"input_ids": torch.cat(documents).tolist(), "seq_lengths": [len(ids) for ids in documents]}
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)([row])
    del batch["labels"]
    return dict(batch) | {"use_cache": False}


def padded_by_trl(documents: list[Tensor]) -> dict[str, Any]:
    """Return the padded, masked row that TRL's own collator makes of one document."""
    (document,) = documents
    collator = DataCollatorForLanguageModeling(pad_token_id=0, pad_to_multiple_of=len(document) + PADDING)
    batch = collator([{"input_ids": document.tolist()}])
    del batch["labels"]
    return dict(batch) | {"use_cache": False}


def alone(documents: list[Tensor]) -> dict[str, Any]:
    """Return an unpacked, unpadded batch of one document."""
    return {"input_ids": documents[0][None], "use_cache": False}


def settle_process() -> None:
    """Limit a process that judges types in its memory, and to one thread, for tiny matrices; silence warnings."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")


def _tokens(document: Any) -> Tensor:
    if isinstance(document, dict):
        return torch.as_tensor(document["input_ids"], dtype=torch.int64)
    return document


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _gap(found: Tensor, wanted: Tensor, floor: float) -> float:
    scale = max(wanted.abs().max().item(), floor, torch.finfo(wanted.dtype).tiny)
    gap = (found - wanted).abs().max().item() / scale
    return float("inf") if gap != gap else gap
