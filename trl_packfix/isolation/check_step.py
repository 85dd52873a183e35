"""Which law a training step breaks, from its gradients alone: for any training loop, with torch only.

`check_isolation` looks at a model. Half of the silent packing bugs that projects found in themselves lie behind it, in
labels, loss, and the weights of micro-batches and ranks. A right step obeys laws that need no knowledge of the loop:

    scale      one document alone is trained with the gradient of its own loss
    shift      a label is predicted from the tokens before it, the nearest included
    isolation  neighbours whose labels are masked do not move a document
    content    nor do they if nothing but the given boundaries says where documents end
    labels     a pack is the sum of its documents
    order      in any order
    grouping   over micro-batches, and over ranks, of unequal tokens as in one
    masked     a micro-batch without a trained token adds nothing

All are linear in the summed gradient (the gradient of a step times its trained tokens), so products with a few random
vectors stand for it: no copy of the gradients is needed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .gradients import gradient_products, largest_gap

IGNORE_INDEX = -100
ROUNDING_FACTOR = 10.0  # of the measured rounding, which is one sample of many
SMALLEST_TOLERANCE = 1e-6  # relative; sums in fp32 may agree by chance
NUM_DRAWS = 3
NUM_SHOWN = 5  # parameters that are named
LARGEST_USEFUL_TOLERANCE = 0.05  # a tolerance above it hides errors worth finding: nothing is said to hold

Document = dict[str, list[int]]


@dataclass(frozen=True)
class Law:
    """A law, and how far the step is from it."""

    name: str  # "scale", "shift", "isolation", "content", "labels", "order", "grouping" or "masked"
    error: float  # relative difference of gradients; infinite if they are not finite or the step raised
    sentence: str  # what it says, or what the step raised


@dataclass(frozen=True)
class StepReport:
    """What `check_step` found.

    Attributes:
        laws: in the order in which they name a cause: the first broken one is the cause, later ones may follow from it.
        tolerance: relative; ten times what rounding alone, or a repeated step, was measured to make.
        unseen: what these laws could not see here, and why, as sentences.

    >>> from trl_packfix.isolation.check_step import Law
    >>> StepReport((Law("scale", 2e-7, "..."), Law("labels", 0.3, "...")), tolerance=1e-6).broken
    ('labels',)
    """

    laws: tuple[Law, ...]
    tolerance: float
    unseen: tuple[str, ...] = ()

    @property
    def broken(self) -> tuple[str, ...]:
        """Names of the broken laws, the cause first. A law is broken if its error is not finite, too."""
        return tuple(law.name for law in self.laws if not (isfinite(law.error) and law.error <= self.tolerance))

    @property
    def is_judged(self) -> bool:
        """Whether the tolerance is at most 5 %: above it an error worth finding could hide."""
        return self.tolerance <= LARGEST_USEFUL_TOLERANCE

    @property
    def holds(self) -> bool:
        """Whether the step could be judged and no law is broken."""
        return self.is_judged and not self.broken

    def __str__(self) -> str:
        verdict = "holds" if self.is_judged else "unknown"
        rows = [
            f"{'BROKEN' if law.name in self.broken else verdict:<7} {law.name:<10} {law.error:.1e}  {law.sentence}"
            for law in self.laws
        ]
        rows.append(f"tolerance {self.tolerance:.1e}" + ("" if self.is_judged else ": nothing can be said to hold"))
        return "\n".join([*rows, *(f"not seen: {sentence}" for sentence in self.unseen)])


def check_step(
    step: Callable[[list[Any]], Any],
    collate: Callable[[list[Document]], Any],
    documents: Sequence[Document],
    model: nn.Module,
    *,
    reference: Callable[[Document], Tensor] | None = None,
) -> StepReport:
    """Test which law a packed training step breaks.

    The loss must be a mean over the trained tokens of the step, and the model causal. Switch off what makes a gradient
    random or no sum over documents: dropout, clipping, an auxiliary loss of a router. Where equal steps differ by more
    than 0.5 %, nothing is said to hold. Gradients are left in the parameters.

    In a distributed run every rank calls it with the same documents, and `step` ends with gradients that are equal on
    all ranks, as DDP leaves them, or sharded (`DTensor`).

    Args:
        step: forward and backward of the micro-batches between two optimizer steps, with all of their weights. It
            leaves gradients in the parameters of `model`.
        collate: one micro-batch, a pack, of some documents.
        documents: four or more, of unequal lengths, as dicts of lists `input_ids` and `labels` of one length, not
            shifted; labels of -100 are not trained.
        model: its parameters with `requires_grad` are compared.
        reference: the summed loss of one document, computed by the model itself. Without it a factor or a term that is
            always there cannot be seen.

    Raises:
        ValueError: the documents are too few or too alike, or the step leaves no gradient.

    Source: silent bugs of 16 projects, November 2025 to September 2026.

    >>> import torch
    >>> from torch.nn.functional import cross_entropy
    >>> model = torch.nn.Embedding(9, 9)  # predicts each token from the one before it
    >>> def collate(documents):
    ...     return [(torch.tensor(each["input_ids"]), torch.tensor(each["labels"])) for each in documents]
    >>> def step(micro_batches):
    ...     total = sum((labels[1:] != -100).sum() for pack in micro_batches for _, labels in pack)
    ...     for pack in micro_batches:
    ...         for ids, labels in pack:
    ...             loss = cross_entropy(model(ids[:-1]), labels[1:], reduction="sum") / total
    ...             (loss / len(micro_batches)).backward()
    >>> documents = [{"input_ids": [*range(n)], "labels": [-100, *range(1, n)]} for n in (3, 8, 5, 4)]
    >>> check_step(step, collate, documents, model).broken  # it divides by the number of micro-batches once too often
    ('grouping', 'masked')
    """
    documents = [{name: list(each[name]) for name in ("input_ids", "labels")} for each in documents]
    _check_documents(documents)
    probe = _StepProbe(step, collate, model, reference, documents)
    if not any(each.any() for each in probe.each_alone):
        raise ValueError(
            f"`step` was given {len(documents)} documents one by one, and left no gradient in the parameters of "
            "`model`. Laws are tested on gradients. Let it run the backward, leave out `optimizer.zero_grad()` at its "
            "end, and give the model whose parameters it trains."
        )
    laws = tuple(probe.laws())
    repeated = probe.repeated()
    tolerance = max(SMALLEST_TOLERANCE, ROUNDING_FACTOR * max(repeated, probe.rounding()))
    return StepReport(laws, tolerance, tuple(probe.unseen(laws, tolerance, repeated)))


class _StepProbe:
    """The step, and the products of its gradients (`gradients.py`)."""

    def __init__(
        self,
        step: Callable[[list[Any]], Any],
        collate: Callable[[list[Document]], Any],
        model: nn.Module,
        reference: Callable[[Document], Tensor] | None,
        documents: list[Document],
    ):
        self.step = step
        self.collate = collate
        self.model = model
        self.reference = reference
        is_distributed = dist.is_available() and dist.is_initialized()
        self.rank, self.num_ranks = (dist.get_rank(), dist.get_world_size()) if is_distributed else (0, 1)
        self.documents = documents
        self.each_alone = [self.summed([[each]]) for each in documents]
        self.total = torch.stack(self.each_alone).sum(0)

    def laws(self) -> Iterator[Law]:
        """All laws, in the order in which they name a cause."""
        documents = self.documents
        if self.reference is not None:
            pairs = zip(self.each_alone, documents, strict=True)
            gap = max(largest_gap(found, self.alone(each)) for found, each in pairs)
            yield Law("scale", gap, "one document alone has the gradient of its own loss")
        by_last_input = self.moved_by_last_input()
        if not self.nearest_counts():
            yield Law(
                "shift", inf, "a label is predicted from the token before it; it was not: are labels shifted twice?"
            )
        elif by_last_input is not None:
            yield Law("shift", by_last_input, "a label is predicted from the tokens before it")
        gap = self.moved(documents, range(len(documents)))
        yield Law("isolation", gap, "masked neighbours do not move a document")
        varied = {kind: self.moved(each, (0, 2)) for kind, each in _misleading_packs(documents).items()}
        kind = max(varied, key=varied.__getitem__)
        yield Law("content", varied[kind], f"nor where documents {kind}")
        packs = documents, [each | {"labels": [each["input_ids"][0], *each["labels"][1:]]} for each in documents]
        yield Law("labels", self.gap([[pack] for pack in packs]), "a pack is the sum of its documents")
        orders = [documents[::-1], documents[1:] + documents[:1], documents[::2] + documents[1::2]]
        yield Law("order", self.gap([[pack] for pack in orders]), "in any order")
        groupings = [[documents[:k], documents[k:]] for k in sorted({1, len(documents) // 2, len(documents) - 1})]
        groupings.append([[each] for each in documents])
        gap = self.gap(groupings)
        over = "micro-batches"
        if self.num_ranks > 1:
            over = "micro-batches and ranks"
            gap = max(gap, *(self.gap_over_ranks(each) for each in ([documents], *groupings)))
        yield Law("grouping", gap, f"over {over} of unequal tokens as in one")
        longest = _mask_labels(max(documents, key=lambda each: len(each["input_ids"])))
        sentence = "a micro-batch without a trained token adds nothing"
        try:
            gap = self.gap(([documents, [longest]], [[longest], documents]))
        except Exception as error:  # of the loop under test
            gap = inf
            sentence = f"{sentence}; the step raised {type(error).__name__}: {error}"
        yield Law("masked", gap, sentence)

    def moved_by_last_input(self) -> float | None:
        """How much the last token of a document, as an input, moves the gradient of its own label.

        A right step predicts the label from the tokens before it, so that this input changes nothing. None if that
        cannot be seen: the step takes the values of its targets from the inputs, or all tokens are equal.
        """
        document, tokens = self.last_label_alone()
        other = self.other_than(tokens[-1])
        if other is None:
            return None
        wanted = self.summed([[document]])
        other_label = self.summed([[document | {"labels": [*document["labels"][:-1], other]}]])
        if largest_gap(other_label, wanted) <= LARGEST_USEFUL_TOLERANCE:
            return None
        return largest_gap(self.summed([[document | {"input_ids": [*tokens[:-1], other]}]]), wanted)

    def nearest_counts(self) -> bool:
        """Whether the token before the last one of a document moves the gradient of the last label.

        Where labels are shifted by the data and by the model, the state that predicts a label has not seen this token.
        True if all tokens are equal, so that it cannot be seen.
        """
        document, tokens = self.last_label_alone()
        other = self.other_than(tokens[-2])
        if other is None:
            return True
        changed = document | {"input_ids": [*tokens[:-2], other, tokens[-1]]}
        return largest_gap(self.summed([[changed]]), self.summed([[document]])) > LARGEST_USEFUL_TOLERANCE

    def last_label_alone(self) -> tuple[Document, list[int]]:
        """The longest document, of which the last label only is trained, and its tokens."""
        tokens = max(self.documents, key=lambda each: len(each["input_ids"]))["input_ids"]
        return {"input_ids": tokens, "labels": [IGNORE_INDEX] * (len(tokens) - 1) + tokens[-1:]}, tokens

    def other_than(self, token: int) -> int | None:
        """The first token of all documents that differs from this one; None if all are equal."""
        return next((each for document in self.documents for each in document["input_ids"] if each != token), None)

    def unseen(self, laws: Sequence[Law], tolerance: float, repeated: float) -> Iterator[str]:
        """What the laws cannot see on this step and model, and why."""
        if not isfinite(tolerance):
            yield "any error, because gradients are not finite"
        elif ROUNDING_FACTOR * repeated > LARGEST_USEFUL_TOLERANCE:
            rates = {name: each.p for name, each in self.model.named_modules() if _is_active_dropout(each)}
            named = ", ".join(f"`{name}` with p={rate}" for name, rate in rates.items())
            cause = f"dropout is on in {named}" if named else "for example dropout"
            yield (
                f"errors below {tolerance:.0%}, because two equal steps differ by {repeated:.1%}: the step draws "
                f"random numbers ({cause}). Switch them off"
            )
        elif tolerance > LARGEST_USEFUL_TOLERANCE:
            yield f"errors below {tolerance:.0%}, because rounding explains them. Run it in fp32"
        if self.reference is None:
            yield "a factor or a term that every document has. Give `reference`"
        if "shift" not in [law.name for law in laws]:
            yield "whether a label is predicted from the tokens before it: the step takes targets from `input_ids`"
        trained = [name for name, each in self.model.named_parameters() if each.requires_grad]
        reached = torch.stack(self.each_alone).ne(0).any(-1).any(0).tolist()
        missed = [name for name, has_gradient in zip(trained, reached, strict=True) if not has_gradient]
        if missed:
            shown = ", ".join(f"`{name}`" for name in missed[:NUM_SHOWN]) + (", ..." if len(missed) > NUM_SHOWN else "")
            yield (
                f"{len(missed)} of {len(trained)} parameters, to which no document gives a gradient ({shown}): they "
                "are not trained, for example because their output is detached"
            )

    def products(self, run: Callable[[], Any]) -> Tensor:
        """Of the gradients that `run` leaves."""
        self.model.zero_grad(set_to_none=True)
        run()
        return gradient_products([each for each in self.model.parameters() if each.requires_grad])

    def summed(self, groups: Sequence[Sequence[Document]]) -> Tensor:
        """The gradient of the summed loss of all groups, each of which is a micro-batch of one step."""
        count = sum(_num_trained(document) for group in groups for document in group)
        return self.products(lambda: self.step([self.collate(list(group)) for group in groups])) * count

    def gap(self, steps: Sequence[Sequence[Sequence[Document]]]) -> float:
        """How far the gradient of any of these steps on all documents is from the sum of theirs alone."""
        return max(largest_gap(self.summed(groups), self.total) for groups in steps)

    def gap_over_ranks(self, groups: Sequence[Sequence[Document]]) -> float:
        """The same with the documents of each group dealt to the ranks; no rank is without one."""
        dealt = [[*group, *([group[0]] * (self.num_ranks - len(group)))] for group in groups]
        flat = [document for group in dealt for document in group]
        run = [self.collate(group[self.rank :: self.num_ranks]) for group in dealt]
        wanted = torch.stack([self.each_alone[self.documents.index(document)] for document in flat]).sum(0)
        return largest_gap(self.products(lambda: self.step(run)) * sum(map(_num_trained, flat)), wanted)

    def alone(self, document: Document) -> Tensor:
        """The gradient of the summed loss of one document: by the reference, or as the only one of a step."""
        reference = self.reference
        if reference is None:
            return self.summed([[document]])
        return self.products(lambda: reference(document).backward())

    def moved(self, documents: list[Document], which: Sequence[int]) -> float:
        """How far each of these is from itself alone, but for a factor, if the labels of all others are masked.

        First labels are masked, too, so that no label in the wrong place can look like a leak. A factor is no leak: it
        breaks the law of labels.
        """
        documents = [each | {"labels": [IGNORE_INDEX, *each["labels"][1:]]} for each in documents]
        gaps = [0.0]
        for i in which:
            if _num_trained(documents[i]):
                pack = [each if j == i else _mask_labels(each) for j, each in enumerate(documents)]
                found = self.summed([pack])
                wanted = self.alone(documents[i])
                factor = (found * wanted).sum() / (wanted * wanted).sum()
                gaps.append(largest_gap(found, factor * wanted) if factor > 0 else inf)
        return max(gaps)

    def repeated(self) -> float:
        """How far two equal steps are apart."""
        return largest_gap(self.summed([self.documents]), self.summed([self.documents]))

    def rounding(self) -> float:
        """What half a unit in the last place of every module's output changes in a step, the largest of some draws."""
        wanted = self.summed([self.documents])
        found = 0.0
        for seed in range(NUM_DRAWS):
            with _rounding_noise(self.model, seed):
                found = max(found, largest_gap(self.summed([self.documents]), wanted))
        return found


@contextmanager
def _rounding_noise(model: nn.Module, seed: int) -> Iterator[None]:
    """Every number that a module without parts returns changes by up to half a unit in its last place."""
    generator = torch.Generator().manual_seed(seed)

    def disturb(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        factor = 1 + torch.finfo(output.dtype).eps * (torch.rand(output.shape, generator=generator) - 0.5)
        wide = torch.promote_types(output.dtype, torch.float32)
        return (output.to(wide) * factor.to(output.device, wide)).to(output.dtype)

    with ExitStack() as hooks:
        for each in model.modules():
            if not any(each.children()):
                hooks.enter_context(each.register_forward_hook(disturb))
        yield


def _is_active_dropout(module: nn.Module) -> bool:
    """Whether a module is a dropout that is switched on."""
    rate = getattr(module, "p", 0.0)
    return module.training and "Dropout" in type(module).__name__ and isinstance(rate, float) and rate > 0


def _num_trained(document: Document) -> int:
    """Tokens with a label; the first token of a document is no target."""
    return sum(label != IGNORE_INDEX for label in document["labels"][1:])


def _mask_labels(document: Document) -> Document:
    return document | {"labels": [IGNORE_INDEX] * len(document["labels"])}


def _misleading_packs(documents: list[Document]) -> dict[str, list[Document]]:
    """Packs of three documents that mislead a loop which guesses boundaries, by what is odd in their content."""
    longest = sorted(documents, key=lambda each: len(each["input_ids"]))[-3:]

    def each(change: Callable[[list[int]], list[int]]) -> list[Document]:
        return [{name: change(values) for name, values in document.items()} for document in longest]

    head = longest[0]["input_ids"]
    zeros = each(list)
    for document in zeros:
        middle = len(document["input_ids"]) // 2
        document["input_ids"][middle] = 0
        if document["labels"][middle] != IGNORE_INDEX:
            document["labels"][middle] = 0
    masks = [IGNORE_INDEX] * len(head)
    alike = [{"input_ids": head + one["input_ids"], "labels": masks + one["labels"]} for one in longest]
    return {
        "are cut in the middle": each(lambda values: values[: max(2, len(values) // 2)]),
        "lack their first token": each(lambda values: values[min(1, len(values) - 2) :]),
        "have their first and last token inside": each(lambda values: values * 2),
        "are equal": [longest[-1]] * 3,
        "begin alike": alike,
        "have the token 0 inside": zeros,
    }


def _check_documents(documents: list[Document]) -> None:
    lengths = [len(each["input_ids"]) for each in documents]
    uneven = [i for i, each in enumerate(documents) if len(each["labels"]) != lengths[i]]
    if uneven:
        i = uneven[0]
        raise ValueError(
            f"Document {i} was given with {lengths[i]} tokens and {len(documents[i]['labels'])} labels. Each token has "
            "a label of its own, -100 where it is not trained. Give labels that are not shifted."
        )
    usable = sum(n >= 2 and _num_trained(each) > 0 for n, each in zip(lengths, documents, strict=True))
    if usable < 4 or usable < len(documents) or len(set(lengths)) < 3:
        raise ValueError(
            f"{len(documents)} documents were given, {usable} of them with a trained token, of {len(set(lengths))} "
            "lengths. A wrong weight or boundary shows only where documents differ. Give four or more, of three "
            "lengths at least, each with a trained token behind its first."
        )
