"""Collate small packs as in training, and run them through the model as it will train, for the leak probe.

The leak probe tests whether a document in a pack has the states that it has alone. It has three layers. `ProbedModel`
(`probed_model.py`) computes the states and gradients of one batch, and `Probe` (here) builds packs and runs them on it.
`check_isolation.py` decides which packs are run, and judges what they give. `tracing.py` uses the same runs to find the
modules where information crosses. `features/images` and `features/prefixes` have subclasses of `Probe` for packs with
images, and for packs whose documents share prefixes.

Words: a *document* is one training example, here a tensor of random tokens. A *pack* is one sequence of documents, one
after the other. A document runs *alone* as TRL without packing would train it. The *degree* is the number of ranks that
share each pack (sequence parallelism), and these ranks are a *group*. *States* are last hidden states, before the LM
head. A *run* is one forward of the model. The *rows* of a document are the positions of its tokens in the pack, and so
also in its states and gradients, (T, hidden). An *engine* is DDP, DeepSpeed or FSDP. *Rounding* is the relative change
that another order of the same sums may cause, so a smaller change is no defect.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import inf, isnan
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..attention.kernel_errors import KernelError
from ..attention.mixer_support import mixer_support
from ..data.collator import PackedDataCollator
from ..data.rank_share import cut_part
from ..group import ALONE, Group
from .probed_model import NOT_FINITE, CannotRun, ProbedModel, gather_values, largest_distance
from .randomness import watching_draws

# Tokens of each document of the small pack: 47 in sum, a prime. No hidden size is 47, so the axis of tokens cannot be
# confused with the axis of hidden values.
DOCUMENT_LENGTHS = (13, 1, 11, 22)
# Tokens of each document if more than two ranks share the pack: 53 in sum, also a prime. The last document fills the
# part of one rank and goes on in the next part.
DOCUMENT_LENGTHS_OVER_RANKS = (13, 1, 11, 28)
NUM_EXTRA_TOKENS = 3  # tokens by which a document is longer than the one in whose place it is put
NUM_PADDING_TOKENS = 2  # tokens of padding behind a document alone
# A larger change of earlier states, relative to the largest state, is no rounding
READ_AHEAD_THRESHOLD = 1e-3
# The gradients of a document in a pack and alone may differ by this many times the rounding of states
GRADIENT_ROUNDING_FACTOR = 64
# If they may differ by more than this, as in half precision, the difference is no longer judged. Then the gradient of a
# token is an error only if it is *lost*: 0 in the pack, and not 0 alone
LARGEST_GRADIENT_LIMIT = 1e-2
# Below this relative difference of gradients, a difference can be rounding even if the model is in fp64, because some
# modules compute in fp32. The probes of two features use it
SMALLEST_ROUNDING = 1e-4
T = TypeVar("T")
Documents = list[Any]  # the documents of a pack: tensors of tokens, or in a subclass of `Probe` other objects
Examples = tuple[Documents, list[Documents]]  # a pack, and variants of it with other documents in some places


@dataclass(frozen=True)
class RunPair:
    """Two runs that should give the same states for the documents that both have.

    Attributes:
        first_documents: the documents of the first run, a pack.
        second_documents: the documents of the second run. It is a pack with other documents in some places or, if
            `is_alone`, a single document of the first pack.
        is_alone: whether the second run is a document alone.
        is_large: whether the packs are so long that `tracing.py` must not record the values of all modules on the
            device, which would need too much memory.
    """

    first_documents: Documents
    second_documents: Documents
    is_alone: bool = False
    is_large: bool = False

    @property
    def common_documents(self) -> list[tuple[int, int]]:
        """The documents that both runs have, as pairs of their indices in the first and in the second run."""
        return [
            (i, j)
            for i, first in enumerate(self.first_documents)
            for j, second in enumerate(self.second_documents)
            if first is second
        ]

    @property
    def common_spans(self) -> list[tuple[slice, slice]]:
        """The tokens of the documents that both runs have, as pairs of slices of the first and of the second pack."""
        first_spans = _token_spans(self.first_documents)
        second_spans = _token_spans(self.second_documents)
        return [(first_spans[i], second_spans[j]) for i, j in self.common_documents]

    @property
    def has_equal_lengths(self) -> bool:
        """Whether both runs are packs with the same document lengths, so that only tokens differ."""
        lengths = [len(ids) for ids in self.first_documents]
        return not self.is_alone and lengths == [len(ids) for ids in self.second_documents]

    def run_first(self, probe: "Probe") -> list[Tensor]:
        """Do the first run, and return the states of the common documents, (length, hidden) each."""
        states = probe.forward_packed(self.first_documents)
        return [states[i] for i, _ in self.common_documents]

    def run_second(self, probe: "Probe") -> list[Tensor]:
        """Do the second run, and return the states of the common documents, (length, hidden) each."""
        if self.is_alone:
            return [probe.forward_alone(self.second_documents[0])]
        states = probe.forward_packed(self.second_documents)
        return [states[j] for _, j in self.common_documents]


def _token_spans(documents: Documents) -> list[slice]:
    """Return the slice of the pack's tokens that each document fills."""
    return [slice(stop - len(ids), stop) for ids, stop in zip(documents, accumulate(map(len, documents)), strict=True)]


def replace_documents(documents: Documents, replacements: dict[int, Any]) -> Documents:
    """Return the pack with the documents of `replacements` in the places that are its keys."""
    return [replacements.get(i, document) for i, document in enumerate(documents)]


class GradientRows(NamedTuple):
    """The rows of a document in a pack, or of several documents, whose states are differentiated together."""

    document: Any  # the document that has these rows; None if they belong to several documents
    rows: Tensor  # indices in the pack, in the order of the document's tokens
    num_shared: int = 0  # rows at the beginning that belong to another document, too, and are not differentiated


class Probe(ProbedModel):
    """A model with the packs that are run through it. Each run raises `CannotRun` if the model raises on any rank.

    Three contexts of `ProbedModel` set the model up. `as_given` gives it the attention with which the user gave it, and
    keeps its mode. `evaluating` sets it to eval mode, and keeps the attention of packs. `unpacked` is both together.

    Args:
        model: the causal LM, bare or wrapped.
        degree: number of ranks that share each pack.
        user_attention: name of the attention with which the user gave the model, for example "sdpa"; see `ProbedModel`.

    Attributes:
        group: the ranks that share each pack.
        reads_ahead: whether a token changes earlier states of its document, with the padding that unpacked TRL uses.
        dtype: the coarsest dtype among the outputs of modules. The first call of `run_without_draws` sets it.
        drawing_modules: the modules that draw random numbers even in training without dropout. The same call sets it.
    """

    dtype: torch.dtype
    traces_leaks = True  # whether `tracing.py` can find the modules of a leak. It cannot if documents have common rows
    has_further_examples = False  # whether packs of documents that hold more than text are tested, after packs of text

    def __init__(self, model: nn.Module, degree: int = 1, user_attention: str | None = None):
        super().__init__(model, degree, user_attention)
        self.reads_ahead = False
        self.drawing_modules: list[nn.Module] = []
        self._generator = torch.Generator().manual_seed(0)
        special = set(_special_tokens(self.inner.config)) | set(_special_tokens(self.config))
        vocab_size = self.config.vocab_size
        # All tokens up to the last special token in the first half of the vocabulary are left out, because tokenizers
        # put their special tokens at the beginning. Special tokens in the second half are left out one by one.
        first_word = max((token for token in special if token < vocab_size // 2), default=0) + 1
        self._words = torch.tensor([token for token in range(first_word, vocab_size) if token not in special])

    @property
    def _collate(self) -> PackedDataCollator:
        """The collator, called with documents, that makes the batch of their pack."""
        return PackedDataCollator(pad_to_multiple_of=self.degree)

    def tokens(self, length: int) -> Tensor:
        """Draw a random document without special tokens, (length,), on the CPU. All ranks get the same document."""
        return self._words[torch.randint(len(self._words), (length,), generator=self._generator)]

    def examples(self, max_length: int | None) -> Examples:
        """Draw a pack of text, whose documents have at most `max_length` tokens, and two variants of the pack."""
        full_lengths = DOCUMENT_LENGTHS if self.degree <= 2 else DOCUMENT_LENGTHS_OVER_RANKS
        lengths = [min(n, max_length or n) for n in full_lengths]
        documents = [self.tokens(n) for n in lengths]
        # The first variant has other documents of the same lengths around the two in the middle, the second a longer
        # document in the place of one of these two. Not every document is tested with every other one in this way, but
        # `gradient` tests all pairs.
        outer_documents = {i: self.tokens(lengths[i]) for i in (0, 3)}
        return documents, [
            replace_documents(documents, outer_documents),
            replace_documents(documents, {2: self.tokens(lengths[2] + NUM_EXTRA_TOKENS)}),
        ]

    def further_examples(self) -> Examples:
        """Return a pack of documents that hold more than text, and variants of it, if `has_further_examples`."""
        raise NotImplementedError

    def long_examples(self, threshold: int) -> Examples:
        """Draw three documents, the second with `threshold` tokens, and a variant with a short one in its place."""
        documents = [self.tokens(7), self.tokens(threshold), self.tokens(9)]
        return documents, [replace_documents(documents, {1: self.tokens(8)})]

    def forward_packed(self, documents: list[Tensor], gradient: bool = False) -> list[Tensor]:
        """Return the states of each document in one pack, (length, hidden) each; differentiable if `gradient`."""
        lengths = [len(ids) for ids in documents]
        num_tokens = sum(lengths)
        num_rows = -(-num_tokens // self.degree) * self.degree  # the pack is padded to a multiple of the degree
        states = self._row_states(documents, num_rows, gradient=gradient)
        return list(states[:num_tokens].split(lengths))

    def _row_states(self, documents: list[Tensor], num_rows: int, *, gradient: bool) -> Tensor:
        """Return the states of all rows of a pack, (num_rows, hidden), gathered from the ranks that share the pack."""
        states: Any = None
        problem = ""
        with torch.set_grad_enabled(gradient):
            try:
                states = self.states(self._make_batch(documents, self.group))
            except CannotRun as error:
                if self.group.is_alone:
                    raise
                problem = str(error)
            if not self.group.is_alone:
                # An error of the model on one rank is raised on all ranks, which would wait for its states.
                problems = gather_values(problem)
                if any(problems):
                    raise CannotRun(next(filter(None, problems)))
            (states,) = self.group.gather(states, dim=1)  # (1, rows of a part, hidden) -> (num_rows, hidden)
        if len(states) != num_rows:
            raise CannotRun(f"the LM head gets {len(states)} states for a pack of {num_rows} tokens")
        return states

    def forward_alone(self, ids: Tensor) -> Tensor:
        """Return the states that a document, (n,), has alone: (n, hidden)."""
        with self.unpacked(len(ids)), torch.no_grad():
            return self.states(self.make_unpacked_batch(ids))[0][: len(ids)]

    def forward_without_boundaries(self, ids: Tensor) -> None:
        """Run documents of equal length as an unpacked batch, (B, n), with the attention of packs.

        Nothing is returned: `axes.py` records the shapes in modules by hooks.
        """
        with self.evaluating(), torch.no_grad():
            self.states({"input_ids": ids.to(self.device), "use_cache": False})

    def error_unpacked(self) -> str | None:
        """Return what is wrong with the model on a document without packing in training mode, or None.

        That is the error that it raises, or that its states are no numbers. The model has the user's attention.

        `forward_alone` would not do, because it runs in eval mode without gradients, and so without checkpointing. Here
        gradients are enabled, except with an engine (DDP, DeepSpeed or FSDP), which would wait for a backward.
        """
        ids = self.tokens(DOCUMENT_LENGTHS[0])
        problem = None
        try:
            with self.as_given(len(ids)), torch.set_grad_enabled(not self.has_engine):
                states = self.states(self.make_unpacked_batch(ids))
            if not states.isfinite().all():
                problem = NOT_FINITE
        except (CannotRun, KernelError) as error:
            problem = str(error)
        return next(filter(None, self.values_of_ranks(problem)), None)

    def make_unpacked_batch(self, ids: Tensor) -> dict[str, Any]:
        """Return the unpacked batch of a document, (1, n), or of several of equal length, (B, n), padded if needed."""
        return self._unpacked_batch(ids.reshape(-1, ids.shape[-1]), self._needs_padding)

    def _unpacked_batch(self, ids: Tensor, padded: bool) -> dict[str, Any]:
        """Return the unpacked batch of B documents, (B, n), with `NUM_PADDING_TOKENS` behind each if `padded`."""
        if not padded:
            return {"input_ids": ids.to(self.device), "use_cache": False}
        tokens = torch.cat([ids, ids[:, -1:].expand(-1, NUM_PADDING_TOKENS)], dim=1).to(self.device)
        mask = torch.ones_like(tokens)
        mask[:, -NUM_PADDING_TOKENS:] = 0
        return {"input_ids": tokens, "attention_mask": mask, "use_cache": False}

    @cached_property
    def _needs_padding(self) -> bool:
        """Whether documents alone are padded, which is so if the model is not causal without padding.

        It is measured once, when the first document runs alone. The measurement also sets `reads_ahead`: whether a
        token changes earlier states, with padding if documents are padded.

        Unpacked TRL pads the documents of a batch, with a mask that hides the padding. In nearly all models padding
        changes no state. But transformers drops a mask that hides nothing, and the text part of PaliGemma is causal
        only by its mask.
        """
        ids = self.tokens(9)
        # Two documents that differ in their last two tokens, so that the first seven states should be equal
        documents = torch.stack([ids, torch.cat([ids[:-2], self.tokens(2)])])

        def changes_earlier_states(padded: bool) -> bool:
            first, second = self.states(self._unpacked_batch(documents, padded))[:, :7]
            return self.on_any_rank(
                largest_distance([first], [second]) > READ_AHEAD_THRESHOLD * first.abs().max().item()
            )

        with self.unpacked(len(ids)), torch.no_grad():
            self.reads_ahead = changes_earlier_states(padded=False)
            if not self.reads_ahead:
                return False
            try:
                self.reads_ahead = changes_earlier_states(padded=True)
            except CannotRun:  # it cannot run with padding: TRL trains such a model on documents of equal length only
                return False
        return True

    def forward_padded(self, documents: list[Tensor]) -> None:
        """Run the whole pack on each rank, with the padding that packs of this degree have.

        `tracing.py` compares the values of modules in this run with the values of the parts that ranks compute.
        """
        with torch.no_grad():
            self.states(self._make_batch(documents))

    def _make_batch(self, documents: list[Tensor], group: Group = ALONE) -> dict[str, Any]:
        """Return the batch, without labels, that this rank of the group gets for a pack of documents."""
        pack = self._collate([{"input_ids": ids} for ids in documents])
        batch = cut_part(pack, group)  # the part of this rank
        return self.move_batch({name: value for name, value in batch.items() if name not in ("labels", "shift_labels")})

    def run_without_draws(self, run_model: Callable[[], T]) -> T:
        """Call `run_model` without random draws of the model, and return its result.

        First `run_model` is called while the modules that draw random numbers are noted in `drawing_modules`, and the
        coarsest dtype of outputs in `dtype`. Modules that draw are routers with jitter or sampling, and the noise of
        NEFTune. If there are any, they are set to eval mode and `run_model` is called again. This method is called
        inside of the context `undisturbed` (`probed_model.py`), which restores their modes.
        """
        with watching_draws(self.inner, self.device) as (drawing_classes, dtypes):  # both sets are filled by the run
            result = run_model()
        self.dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        # All modules of a class that has drawn, because another one may draw in another run
        self.drawing_modules = [module for module in self.inner.modules() if type(module) in drawing_classes]
        self.silence()
        return run_model() if drawing_classes else result

    def silence(self, *call: object) -> None:
        """Set the `drawing_modules` to eval mode again.

        It takes any arguments, because `training/first_step.py` calls it as a hook before each forward: training steps
        set all modules to train mode.
        """
        for module in self.drawing_modules:
            module.training = False  # without `eval()`, which would include children that may not draw

    def gradient(self, documents: list[Tensor]) -> float | None:
        """Return the largest gradient of one document's states with respect to another document's embeddings.

        On one rank there are few backwards: backward b sums the states of the documents whose index has bit b set. Two
        documents have different indices, so some backward contains one of them and not the other. Four documents, for
        example, need two backwards: of the documents 1 and 3, and of 2 and 3. In a group of ranks there is one backward
        per document. Its gradient is also compared with the gradient of the document alone, because a gradient that is
        not sent back to its rank changes no gradient of another document, and would go unnoticed.

        Returns:
            The largest gradient that should be 0 or, if it is larger, the largest relative difference beyond rounding
            between the gradients of a document in the pack and alone. None if the model supports no such gradients.
        """
        rows = torch.arange(sum(map(len, documents)), device=self.device).split([len(ids) for ids in documents])
        limit: float | None = None
        if self.group.is_alone:  # the gradients of documents alone are not compared
            num_bits = (len(rows) - 1).bit_length()
            targets = [
                GradientRows(None, torch.cat([own_rows for i, own_rows in enumerate(rows) if i >> bit & 1]))
                for bit in range(num_bits)
            ]
        else:
            # In half precision the limit is large, and rounding may make a router choose other experts, so that
            # gradients differ by any amount. So no limit is set there, and only lost gradients are found.
            limit = GRADIENT_ROUNDING_FACTOR * self.rounding
            limit = limit if limit < LARGEST_GRADIENT_LIMIT else inf
            targets = [GradientRows(ids, own_rows) for ids, own_rows in zip(documents, rows, strict=True)]
        try:
            batch = self._make_batch(documents, self.group)
            # A kernel of recurrent layers may sum tokens of several documents, and subtract those of other documents
            # again. Up to one eps per token remains of them.
            crossing_limit = mixer_support().tokens_summed_in_common(self.inner) * torch.finfo(torch.float32).eps
            return self._gradient_error(batch, targets, limit=limit, crossing_limit=crossing_limit)
        except KernelError:  # a `ValueError`, too; `packed_model.py` then chooses another attention
            raise
        except ValueError as error:
            # Raised by a repaired module (`repair.py`) if checkpointing recomputes it without the packed forward
            raise CannotRun(str(error)) from error

    def _gradient_error(
        self, batch: dict[str, Any], targets: list[GradientRows], *, limit: float | None, crossing_limit: float = 0
    ) -> float | None:
        """Return the largest error in the gradients of documents with respect to the embeddings of their pack.

        There are two kinds of error: a gradient in rows that are not the document's, which should be 0; and a
        difference from the gradient of the document alone, relative to the largest value of that gradient.

        Args:
            batch: the pack, or the part of it that this rank has.
            targets: the rows that are differentiated, one gradient for each.
            limit: the largest relative difference between the gradient of a document in the pack and alone that is no
                error; None does not compare them.
            crossing_limit: size of a gradient in other documents' rows, relative to the largest, up to which it is no
                error.

        Returns:
            The largest error of both kinds, infinity if it is NaN, 0 if there is none, or None if the model has no
            such gradients.
        """
        error = 0.0
        # For each target the gradient with respect to the embeddings of the whole pack, (T, hidden)
        gradients = self.embedding_gradients(
            batch, [target.rows[target.num_shared :] for target in targets], self.group
        )
        if gradients is None:
            return None
        # If the model leaks, hooks may run its backbone on the documents as a padded batch (`unpacking.py`). Then the
        # embeddings are not the rows of the pack. A limit is given only where ranks share packs or documents share
        # rows, and such a model is never run in this way.
        if limit is None and len(gradients[0]) != batch["input_ids"].shape[1]:
            return None
        for gradient, (ids, rows, num_shared) in zip(gradients, targets, strict=True):
            # First, separate the gradient in the document's rows from the gradient in all other rows, which crosses.
            gradient_in_pack = gradient[rows]
            gradient[rows] = 0
            crossing = gradient.abs().max().item()
            scale = gradient_in_pack.abs().max().item()
            # Then compare the document's rows with the gradient of the document alone.
            if limit is not None:
                own_rows = torch.arange(num_shared, len(rows), device=self.device)
                with self.unpacked(len(ids)):
                    gradients_alone = self.embedding_gradients(self.make_unpacked_batch(ids), [own_rows])
                if gradients_alone is None:
                    return None
                gradient_alone = gradients_alone[0][: len(rows)]
                # From here on this is also the scale by which `crossing` is judged. It is not 0, because states depend
                # on the embeddings of their tokens
                scale = gradient_alone.abs().max().item()
                # A gradient of 0 in a row that has one alone was not sent back to its rank.
                is_lost = ((gradient_in_pack == 0).all(-1) & (gradient_alone != 0).any(-1)).any().item()
                gap = (gradient_in_pack - gradient_alone).abs().max().item() / scale
                if is_lost or not gap <= limit:
                    error = max(error, inf if is_lost or isnan(gap) else gap)
            if crossing and not crossing <= crossing_limit * scale:
                error = max(error, inf if isnan(crossing) else crossing)
        return error

    @property
    def rounding(self) -> float:
        """Relative change that another order of the same sums may cause: 32 eps in fp32, 4 eps in half precision.

        In fp32 it is at least one eps per token that a kernel of recurrent layers sums, of several documents together.
        """
        eps = torch.finfo(self.dtype).eps
        return 4 * eps if eps > 1e-4 else max(32, mixer_support().tokens_summed_in_common(self.inner)) * eps


def _special_tokens(config: PreTrainedConfig) -> Iterator[int]:
    """Yield the token ids with a meaning in the config: end of text (some models have several), image, padding."""
    for name, value in vars(config).items():
        if name.endswith(("token_id", "token_ids", "token_index")):
            ids = value if isinstance(value, list | tuple) else [value]
            yield from (token for token in ids if token is not None)
