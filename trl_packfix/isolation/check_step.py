"""Test which law a training step breaks, from its gradients alone: for any training loop, with torch only.

`check_isolation` tests a model. Half of the silent packing bugs that projects found in themselves come after the
forward of the model: in labels, loss, and the weights of micro-batches and ranks. A right step obeys laws that hold for
every loop:

    scale      a document alone is trained with the gradient of its own loss
    shift      a label is predicted from the tokens before it, and the last of these tokens has an effect
    isolation  neighbours whose labels are masked do not change the gradient of a document
    content    masked neighbours do not change it either if the tokens of the documents are misleading: a loop that
               guesses from tokens where documents end would guess wrong
    labels     the gradient of a pack is the sum of the gradients of its documents
    order      it is the same sum in any order of the documents
    grouping   it is the same sum if the documents are in several micro-batches, or on several ranks
    masked     a micro-batch without a trained token adds nothing to the sum

The user's step and documents come into `check_step`, and a `StepReport` goes out. The module uses nothing else of this
package but `gradients.py`. There the products of a gradient with a few random vectors stand for the gradient, so no
copy of it is needed: different gradients have equal products only by an unlikely chance. Laws compare sums of *summed
gradients* (the gradient of a step times its number of trained tokens), and products can be summed in their place.

Words: a *trained token* is one whose label is not -100. A *pack* is the list of documents in one micro-batch, and the
*groups* of a step are its packs. A document *alone* is the only one of a step. A *gap* is a relative difference between
two gradients.
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
ROUNDING_FACTOR = 10.0  # tolerance in multiples of the measured rounding, which is one sample of many
SMALLEST_TOLERANCE = 1e-6  # relative; sums in fp32 may agree by chance, so that no rounding is measured
NUM_DRAWS = 3  # random roundings under which a step is repeated
NUM_SHOWN = 5  # parameters that a sentence names
LARGEST_USEFUL_TOLERANCE = 0.05  # a larger tolerance hides errors worth finding, so no law is said to hold

Document = dict[str, list[int]]  # `input_ids` and `labels`, of one length
Groups = Sequence[Sequence[Document]]  # the documents of each micro-batch of a step
Finding = tuple[float, str]  # how far a step is from a law (the largest gap), and what the law says


@dataclass(frozen=True)
class Law:
    """A law, and how far the step is from it."""

    name: str  # a key of `LAWS`
    error: float  # relative difference of gradients; infinite if they are not finite or the step raised
    sentence: str  # what the law says, or what the step raised


@dataclass(frozen=True)
class StepReport:
    """The result of [`check_step`]: how far a training step is from each law. `print(report)` shows a table.

    Attributes:
        laws (`tuple[Law, ...]`):
            The tested laws, each with its `name`, `error` and `sentence`. If several are broken, the first one is the
            cause, and later ones may follow from it.
        tolerance (`float`):
            The relative error up to which a law holds. It is ten times the measured change of gradients by rounding
            alone, or between two equal steps.
        unseen (`tuple[str, ...]`):
            Sentences that say which errors these laws could not see on this step and model, and why.

    Example:

    >>> from trl_packfix.isolation.check_step import Law
    >>> StepReport((Law("scale", 2e-7, "..."), Law("labels", 0.3, "...")), tolerance=1e-6).broken
    ('labels',)
    """

    laws: tuple[Law, ...]
    tolerance: float
    unseen: tuple[str, ...] = ()

    @property
    def broken(self) -> tuple[str, ...]:
        """Names of the broken laws, the cause first. A law whose error is not finite is broken, too."""
        return tuple(law.name for law in self.laws if not (isfinite(law.error) and law.error <= self.tolerance))

    @property
    def is_judged(self) -> bool:
        """Whether the tolerance is at most 5 %. A larger tolerance could hide an error worth finding."""
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
    """Test which law a packed training step breaks, in any training loop.

    The step runs on packs of your documents in many arrangements, and its gradients are compared. The module
    `trl_packfix.isolation.check_step` lists the laws; they come from silent bugs of 16 projects, November 2025 to
    September 2026.

    The loss must be a mean over the trained tokens of the step, and the model must be causal. Switch off everything
    that makes a gradient random, or that is not a sum over documents: dropout, gradient clipping, the auxiliary loss of
    a router. If equal steps differ by more than 0.5 %, no law is said to hold. The gradients of the last step remain in
    the parameters.

    In a distributed run every rank calls this function with the same documents. `step` must then end with gradients
    that are equal on all ranks, as with DDP, or sharded (`DTensor`).

    Args:
        step (`Callable`):
            Runs forward and backward of the micro-batches between two optimizer steps, given as a list. It weighs their
            losses as in training. It must not zero the gradients at its end.
        collate (`Callable`):
            Makes one micro-batch, a pack, of a list of documents.
        documents (`Sequence[dict[str, list[int]]]`):
            Four or more documents, of at least three lengths. Each has the lists `input_ids` and `labels` of one
            length. Labels are not shifted, and labels of -100 are not trained.
        model (`nn.Module`):
            The model that `step` trains. The gradients of its parameters with `requires_grad` are compared.
        reference (`Callable`, *optional*):
            Returns the summed loss of one document, computed by the model itself. If `None`, a factor or a term that
            every document has cannot be seen.

    Returns:
        [`StepReport`]: The laws, the broken ones among them, and what could not be tested.

    Raises:
        ValueError: If the documents are too few or too alike, or the step leaves no gradient.

    Example:

    >>> import torch
    >>> from torch.nn.functional import cross_entropy
    >>> model = torch.nn.Embedding(9, 9)  # predicts each token from the one before it
    >>> def collate(documents):
    ...     return [(torch.tensor(doc["input_ids"]), torch.tensor(doc["labels"])) for doc in documents]
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
    documents = [{name: list(document[name]) for name in ("input_ids", "labels")} for document in documents]
    _check_documents(documents)
    probe = _StepProbe(step, collate, model, reference, documents)
    if not any(gradient.any() for gradient in probe.gradients_alone):
        raise ValueError(
            f"`step` was given {len(documents)} documents one by one, and left no gradient in the parameters of "
            "`model`. Laws are tested on gradients. Let it run the backward, leave out `optimizer.zero_grad()` at its "
            "end, and give the model whose parameters it trains."
        )
    laws = tuple(probe.test_laws())
    repetition = probe.measure_repetition()
    tolerance = max(SMALLEST_TOLERANCE, ROUNDING_FACTOR * max(repetition, probe.measure_rounding()))
    return StepReport(laws, tolerance, tuple(probe.explain_unseen(laws, tolerance, repetition)))


class _StepProbe:
    """Runs the step on packs of the documents and compares the products of its gradients (`gradients.py`).

    A "gradient" below is a tensor of products, (parameters, vectors): `gradient_products` multiplies the gradient of
    each parameter by a few random vectors.

    Attributes:
        gradients_alone: the summed gradient of each document as the only one of a step.
        total: the sum of `gradients_alone`, which the summed gradient of every step on all documents should equal.
    """

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
        self.gradients_alone = [self.summed_gradient([[document]]) for document in documents]
        self.total = torch.stack(self.gradients_alone).sum(0)

    def test_laws(self) -> Iterator[Law]:
        """Yield the laws that can be tested, with their errors, in the order of `LAWS`."""
        for name, test in LAWS.items():
            finding = test(self)
            if finding is not None:
                error, sentence = finding
                yield Law(name, error, sentence)

    def test_scale(self) -> Finding | None:
        """Compare each document alone with the reference; None without one."""
        if self.reference is None:
            return None
        pairs = zip(self.gradients_alone, self.documents, strict=True)
        gap = max(largest_gap(gradient, self.reference_gradient(document)) for gradient, document in pairs)
        return gap, "one document alone has the gradient of its own loss"

    def test_shift(self) -> Finding | None:
        """Change one input at a time of the longest document, whose only label is that of its last token.

        First the input before the last is changed. It must change the gradient, because the label is predicted there.
        If labels are shifted both by the data and by the model, the state that predicts the label is one token earlier
        and has not seen this input. The gap is then infinite. Second the last input is changed, the token of the label
        itself. It must change nothing, so its effect is the gap.

        The result is None if the step takes the values of its targets from the inputs, or all tokens of all documents
        are equal: then an effect of the last input cannot be seen.
        """
        tokens = max(self.documents, key=document_length)["input_ids"]
        document = {"input_ids": tokens, "labels": [IGNORE_INDEX] * (len(tokens) - 1) + tokens[-1:]}
        gradient = self.summed_gradient([[document]])

        def effect(name: str, place: int, token: int) -> float:
            """Return how much another token at a place of the inputs or of the labels changes the gradient."""
            values = [*document[name]]
            values[place] = token
            return largest_gap(self.summed_gradient([[document | {name: values}]]), gradient)

        # An effect up to the largest tolerance could be rounding.
        new_token = self._other_token(tokens[-2])
        if new_token is not None and effect("input_ids", -2, new_token) <= LARGEST_USEFUL_TOLERANCE:
            return inf, "a label is predicted from the token before it; it was not: are labels shifted twice?"
        new_token = self._other_token(tokens[-1])
        # If another last label changes nothing, the step takes its targets from the inputs.
        if new_token is None or effect("labels", -1, new_token) <= LARGEST_USEFUL_TOLERANCE:
            return None
        return effect("input_ids", -1, new_token), "a label is predicted from the tokens before it"

    def test_isolation(self) -> Finding:
        """Compare each document among masked neighbours with the document alone."""
        gap = self.effect_of_neighbours(self.documents, range(len(self.documents)))
        return gap, "masked neighbours do not move a document"

    def test_content(self) -> Finding:
        """Compare documents whose content misleads about their boundaries, among masked neighbours, with them alone."""
        packs = _misleading_packs(self.documents)
        # Of the three documents of each pack, one has neighbours behind it, and one before it. The middle one has both.
        first_and_last = (0, 2)
        gaps = {kind: self.effect_of_neighbours(pack, first_and_last) for kind, pack in packs.items()}
        kind = max(gaps, key=gaps.__getitem__)
        return gaps[kind], f"nor where documents {kind}"  # goes on with the sentence of `test_isolation`

    def test_labels(self) -> Finding:
        """Compare one pack of all documents with the sum of the documents alone."""
        # Nothing predicts the first token of a document, so its label must not count. A second step has such labels.
        with_first_labels = [
            document | {"labels": [document["input_ids"][0], *document["labels"][1:]]} for document in self.documents
        ]
        one_pack_each = [[self.documents], [with_first_labels]]  # two steps of one pack
        return self.gap_to_total(one_pack_each), "a pack is the sum of its documents"

    def test_order(self) -> Finding:
        """Compare packs of the documents in other orders with the sum of the documents alone."""
        documents = self.documents
        orders = [documents[::-1], documents[1:] + documents[:1], documents[::2] + documents[1::2]]
        return self.gap_to_total([[pack] for pack in orders]), "in any order"

    def test_grouping(self) -> Finding:
        """Compare the documents in several micro-batches, and on the ranks, with the sum of the documents alone."""
        documents = self.documents
        groupings = [[documents[:k], documents[k:]] for k in sorted({1, len(documents) // 2, len(documents) - 1})]
        groupings.append([[document] for document in documents])
        gap = self.gap_to_total(groupings)
        divided = "micro-batches"
        if self.num_ranks > 1:
            divided = "micro-batches and ranks"
            gap = max(gap, *(self.gap_over_ranks(groups) for groups in ([documents], *groupings)))
        return gap, f"over {divided} of unequal tokens as in one"

    def test_masked(self) -> Finding:
        """Compare a step with a micro-batch without a trained token with the sum of the documents alone."""
        documents = self.documents
        untrained = mask_labels(max(documents, key=document_length))
        sentence = "a micro-batch without a trained token adds nothing"
        try:
            return self.gap_to_total([[documents, [untrained]], [[untrained], documents]]), sentence
        except Exception as error:  # any error of the loop under test
            return inf, f"{sentence}; the step raised {type(error).__name__}: {error}"

    def _other_token(self, token: int) -> int | None:
        """Return the first token of all documents that differs from `token`, or None if all are equal."""
        return next((other for document in self.documents for other in document["input_ids"] if other != token), None)

    def explain_unseen(self, laws: Sequence[Law], tolerance: float, repetition: float) -> Iterator[str]:
        """Yield sentences that say what the laws cannot see on this step and model, and why.

        Args:
            repetition: relative difference of two equal steps.
        """
        if not isfinite(tolerance):
            yield "any error, because gradients are not finite"
        elif ROUNDING_FACTOR * repetition > LARGEST_USEFUL_TOLERANCE:
            rates = {name: module.p for name, module in self.model.named_modules() if _is_active_dropout(module)}
            modules = ", ".join(f"`{name}` with p={rate}" for name, rate in rates.items())
            cause = f"dropout is on in {modules}" if modules else "for example dropout"
            yield (
                f"errors below {tolerance:.0%}, because two equal steps differ by {repetition:.1%}: the step draws "
                f"random numbers ({cause}). Switch them off"
            )
        elif tolerance > LARGEST_USEFUL_TOLERANCE:
            yield f"errors below {tolerance:.0%}, because rounding explains them. Run it in fp32"
        if self.reference is None:
            yield "a factor or a term that every document has. Give `reference`"
        if "shift" not in [law.name for law in laws]:
            first_token = self.documents[0]["input_ids"][0]
            cause = "the step takes targets from `input_ids`"
            if self._other_token(first_token) is None:
                cause = f"all tokens of the documents are {first_token}. Give documents of different tokens"
            yield f"whether a label is predicted from the tokens before it: {cause}"
        parameters = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        products = torch.stack(self.gradients_alone)  # (documents, parameters, vectors)
        gets_gradient = products.ne(0).any(-1).any(0).tolist()  # of each parameter, whether any document gives it one
        missed = [name for name, has_gradient in zip(parameters, gets_gradient, strict=True) if not has_gradient]
        if missed:
            names = ", ".join(f"`{name}`" for name in missed[:NUM_SHOWN])
            if len(missed) > NUM_SHOWN:
                names += ", ..."
            yield (
                f"{len(missed)} of {len(parameters)} parameters, to which no document gives a gradient ({names}): they "
                "are not trained, for example because their output is detached"
            )

    def gradient_after(self, run_step: Callable[[], Any]) -> Tensor:
        """Call `run_step`, and return the products of the gradients that it leaves in the parameters."""
        self.model.zero_grad(set_to_none=True)
        run_step()
        return gradient_products([parameter for parameter in self.model.parameters() if parameter.requires_grad])

    def summed_gradient(self, groups: Groups) -> Tensor:
        """Return the gradient of the summed loss of one step, with one micro-batch for each group of documents."""
        num_trained = sum(count_trained(document) for group in groups for document in group)
        return self.gradient_after(lambda: self.step([self.collate(list(group)) for group in groups])) * num_trained

    def gap_to_total(self, steps: Sequence[Groups]) -> float:
        """Return the largest gap between the summed gradient of a step, on all documents in groups, and `total`."""
        return max(largest_gap(self.summed_gradient(groups), self.total) for groups in steps)

    def gap_over_ranks(self, groups: Groups) -> float:
        """Return the gap between the gradient of a step whose groups ranks divide, and the sum of its documents.

        If a group has fewer documents than there are ranks, its first document is repeated, so that each rank has one.
        """
        # Ranks may get different numbers of documents of a group, as in training.
        padded_groups = [[*group, *([group[0]] * (self.num_ranks - len(group)))] for group in groups]
        documents = [document for group in padded_groups for document in group]
        num_trained = sum(map(count_trained, documents))
        micro_batches = [self.collate(group[self.rank :: self.num_ranks]) for group in padded_groups]
        expected = torch.stack([self.gradients_alone[self.documents.index(document)] for document in documents]).sum(0)
        return largest_gap(self.gradient_after(lambda: self.step(micro_batches)) * num_trained, expected)

    def reference_gradient(self, document: Document) -> Tensor:
        """Return the gradient of the summed loss of a document, by the reference or, without one, by a step on it."""
        reference = self.reference
        if reference is None:
            return self.summed_gradient([[document]])
        return self.gradient_after(lambda: reference(document).backward())

    def effect_of_neighbours(self, documents: list[Document], indices: Sequence[int]) -> float:
        """Return the largest gap between the gradient of a document in a pack, with all others masked, and alone.

        If the gradients differ only by a positive factor, there is no gap: a wrong factor is no leak, and the law of
        labels finds it. First labels are masked, too, so that no label in the wrong place can look like a leak.

        Args:
            documents: the pack.
            indices: the documents of the pack that are tested, one after the other.
        """
        documents = [document | {"labels": [IGNORE_INDEX, *document["labels"][1:]]} for document in documents]
        gaps = [0.0]
        for i in indices:
            if count_trained(documents[i]):
                pack = [document if j == i else mask_labels(document) for j, document in enumerate(documents)]
                gradient_in_pack = self.summed_gradient([pack])
                gradient_alone = self.reference_gradient(documents[i])
                # The factor with which the gradient alone is nearest to the gradient in the pack
                factor = (gradient_in_pack * gradient_alone).sum() / (gradient_alone * gradient_alone).sum()
                gaps.append(largest_gap(gradient_in_pack, factor * gradient_alone) if factor > 0 else inf)
        return max(gaps)

    def measure_repetition(self) -> float:
        """Return the gap between the gradients of two equal steps."""
        return largest_gap(self.summed_gradient([self.documents]), self.summed_gradient([self.documents]))

    def measure_rounding(self) -> float:
        """Return the largest change of a step's gradient under random roundings of every module's output."""
        gradient = self.summed_gradient([self.documents])
        largest = 0.0
        for seed in range(NUM_DRAWS):
            with _rounding_noise(self.model, seed):
                largest = max(largest, largest_gap(self.summed_gradient([self.documents]), gradient))
        return largest


# What tests each law, by its name. A test returns the error and a sentence, or None if the law cannot be tested on this
# step. The order is the order in which laws name a cause: a broken law may follow from the laws before it.
LAWS: dict[str, Callable[[_StepProbe], Finding | None]] = {
    "scale": _StepProbe.test_scale,
    "shift": _StepProbe.test_shift,
    "isolation": _StepProbe.test_isolation,
    "content": _StepProbe.test_content,
    "labels": _StepProbe.test_labels,
    "order": _StepProbe.test_order,
    "grouping": _StepProbe.test_grouping,
    "masked": _StepProbe.test_masked,
}


@contextmanager
def _rounding_noise(model: nn.Module, seed: int) -> Iterator[None]:
    """Within this context, the numbers that innermost modules return change by up to half a unit in the last place.

    Innermost modules contain no other modules. `seed` sets the random changes.
    """
    generator = torch.Generator().manual_seed(seed)

    def disturb(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        factor = 1 + torch.finfo(output.dtype).eps * (torch.rand(output.shape, generator=generator) - 0.5)
        wide_dtype = torch.promote_types(output.dtype, torch.float32)
        return (output.to(wide_dtype) * factor.to(output.device, wide_dtype)).to(output.dtype)

    with ExitStack() as hooks:
        for module in model.modules():
            if not any(module.children()):  # an empty `ModuleList` is false, so it does not count as a child
                hooks.enter_context(module.register_forward_hook(disturb))
        yield


def _is_active_dropout(module: nn.Module) -> bool:
    """Return whether a module is a dropout that is switched on."""
    rate = getattr(module, "p", 0.0)
    return module.training and "Dropout" in type(module).__name__ and isinstance(rate, float) and rate > 0


def document_length(document: Document) -> int:
    """Return the number of tokens of a document."""
    return len(document["input_ids"])


def count_trained(document: Document) -> int:
    """Return the number of trained tokens of a document. Its first token is never one."""
    return int((torch.tensor(document["labels"])[1:] != IGNORE_INDEX).sum())


def mask_labels(document: Document) -> Document:
    """Return a copy of a document without a trained token."""
    return document | {"labels": [IGNORE_INDEX] * document_length(document)}


def _misleading_packs(documents: list[Document]) -> dict[str, list[Document]]:
    """Return packs of three documents each, with content that misleads a loop which guesses boundaries from it.

    The keys say what is unusual, in words that follow "documents". Each document has at least two tokens.
    """
    longest = sorted(documents, key=document_length)[-3:]

    def change_lists(change: Callable[[list[int]], list[int]]) -> list[Document]:
        """Return the three documents with their tokens and labels changed in the same way."""
        return [{name: change(values) for name, values in document.items()} for document in longest]

    with_zeros = change_lists(list)  # copies
    for document in with_zeros:
        middle = len(document["input_ids"]) // 2
        document["input_ids"][middle] = 0
        if document["labels"][middle] != IGNORE_INDEX:
            document["labels"][middle] = 0
    prefix = longest[0]["input_ids"]
    prefix_labels = [IGNORE_INDEX] * len(prefix)
    with_prefix = [
        {"input_ids": prefix + document["input_ids"], "labels": prefix_labels + document["labels"]}
        for document in longest
    ]
    return {
        "are cut in the middle": change_lists(lambda values: values[: max(2, len(values) // 2)]),
        # A document of two tokens stays whole
        "lack their first token": change_lists(lambda values: values[min(1, len(values) - 2) :]),
        # Each document twice, one behind the other, as one document
        "have their first and last token inside": change_lists(lambda values: values * 2),
        "are equal": [longest[-1]] * 3,
        "begin alike": with_prefix,
        "have the token 0 inside": with_zeros,
    }


def _check_documents(documents: list[Document]) -> None:
    """Raise ValueError for documents on which the laws cannot be tested."""
    lengths = [document_length(document) for document in documents]
    uneven = [i for i, document in enumerate(documents) if len(document["labels"]) != lengths[i]]
    if uneven:
        i = uneven[0]
        raise ValueError(
            f"Document {i} was given with {lengths[i]} tokens and {len(documents[i]['labels'])} labels. Each token has "
            "a label of its own, -100 where it is not trained. Give labels that are not shifted."
        )
    num_usable = sum(document_length(document) >= 2 and count_trained(document) > 0 for document in documents)
    if num_usable < 4 or num_usable < len(documents) or len(set(lengths)) < 3:
        raise ValueError(
            f"{len(documents)} documents were given, {num_usable} of them with a trained token, of {len(set(lengths))} "
            "lengths. A wrong weight or boundary shows only where documents differ. Give four or more, of three "
            "lengths at least, each with a trained token behind its first."
        )
