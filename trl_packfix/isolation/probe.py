"""Run small packs through a model for the leak probe: collated as in training, on the model as it will train.

A `RunPair` is what is compared. `check_isolation.py` judges the cases, and `tracing.py` finds the modules where
information crosses.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..attention.kernel_errors import KernelError
from ..attention.mixers import tokens_summed_in_common
from ..data.collator import PackedDataCollator
from ..data.rank_share import cut_part
from .probed_model import LOCAL_RANK, CannotRun, LocalRank, ProbedModel, largest_distance
from .randomness import watching_draws

DOCUMENT_LENGTHS = (13, 1, 11, 22)  # documents of the small pack: 47 tokens, a prime that no hidden size equals
DOCUMENT_LENGTHS_OVER_RANKS = (
    13,
    1,
    11,
    28,
)  # the same for more than two ranks: the last one fills a part and goes on, 53 tokens
NUM_EXTRA_TOKENS = 3  # tokens by which a document is longer than the one in whose place it is put
NUM_PADDING_TOKENS = 2  # tokens behind a document in a padded row
READS_AHEAD = 1e-3  # a change of earlier states, relative to the largest, that is no rounding
# Relative difference of gradients that is never rounding in fp64, where some modules compute in fp32
SMALLEST_ROUNDING = 1e-4
T = TypeVar("T")
Documents = list[Any]  # of a pack; in the probe for images they are no tensors
Examples = tuple[Documents, list[Documents]]  # a pack, and the same pack with other documents in some places


@dataclass(frozen=True)
class RunPair:
    """Two runs that should give the same states of the documents that both have.

    Attributes:
        documents: the pack of the first run.
        others: that of the second, in which some documents are different; or one document, which runs alone.
        large: whether the packs are long, so that recording all modules would need too much memory.
    """

    documents: Documents
    others: Documents
    alone: bool = False
    large: bool = False

    @property
    def common_documents(self) -> list[tuple[int, int]]:
        """The documents that both runs have, by their indices in the first and in the second."""
        return [(i, j) for i, one in enumerate(self.documents) for j, other in enumerate(self.others) if one is other]

    @property
    def spans(self) -> list[tuple[slice, slice]]:
        """Their tokens in both packs."""
        first, second = (
            [slice(end - len(ids), end) for ids, end in zip(pack, accumulate(map(len, pack)), strict=True)]
            for pack in (self.documents, self.others)
        )
        return [(first[i], second[j]) for i, j in self.common_documents]

    @property
    def same_length(self) -> bool:
        return not self.alone and [*map(len, self.documents)] == [*map(len, self.others)]

    def first_states(self, probe: "Probe") -> list[Tensor]:
        """The states of these documents in the first run."""
        states = probe.forward_packed(self.documents)
        return [states[i] for i, _ in self.common_documents]

    def second_states(self, probe: "Probe") -> list[Tensor]:
        """The same in the second run."""
        if self.alone:
            return [probe.forward_alone(self.others[0])]
        states = probe.forward_packed(self.others)
        return [states[j] for _, j in self.common_documents]


def replace_documents(documents: Documents, others: dict[int, Any]) -> Documents:
    """The pack with other documents in these places."""
    return [others.get(i, document) for i, document in enumerate(documents)]


class Probe(ProbedModel):
    """Runs small packs through a model. Each run raises `CannotRun` if the model raises, of parts on any rank.

    Attributes:
        reads_ahead: whether a token changes earlier states of its document, in the rows of unpacked TRL.
        dtype: the coarsest of the outputs of modules, from the first run of `silenced`.
        silent: the modules that draw random numbers in training mode, from there, too.
    """

    dtype: torch.dtype
    traces_leaks = True  # whether the tokens of a pack are the documents, one after the other

    def __init__(self, model: nn.Module, degree: int = 1, user_attention: str | None = None):
        super().__init__(model, degree, user_attention)
        self.reads_ahead = False
        self.silent: list[nn.Module] = []
        self._generator = torch.Generator().manual_seed(0)
        special = set(_special_tokens(self.inner.config)) | set(_special_tokens(self.config))
        num_tokens = self.config.vocab_size
        low = max((token for token in special if token < num_tokens // 2), default=0) + 1
        self._words = torch.tensor([token for token in range(low, num_tokens) if token not in special])

    @property
    def _collate(self) -> PackedDataCollator:
        return PackedDataCollator(pad_to_multiple_of=self.degree)

    def tokens(self, length: int) -> Tensor:
        """A random document without special tokens, (length,), on the CPU. All ranks get the same one."""
        return self._words[torch.randint(len(self._words), (length,), generator=self._generator)]

    def examples(self, max_length: int | None) -> Examples:
        """Documents of text, each of at most `max_length` tokens, and changes of them."""
        lengths = [
            min(n, max_length or n) for n in (DOCUMENT_LENGTHS if self.degree <= 2 else DOCUMENT_LENGTHS_OVER_RANKS)
        ]
        documents = [self.tokens(n) for n in lengths]
        # Others around two documents, of the same lengths; and a longer one between. The gradient tests all pairs.
        around = {i: self.tokens(lengths[i]) for i in (0, 3)}
        return documents, [
            replace_documents(documents, around),
            replace_documents(documents, {2: self.tokens(lengths[2] + NUM_EXTRA_TOKENS)}),
        ]

    def image_examples(self) -> Examples | None:
        """Documents with images in unequal places, and changes of them; None for a probe of text."""
        return None

    def long_examples(self, threshold: int) -> Examples:
        """Three documents, the second at least as long as the threshold, and the pack with another in its place."""
        documents = [self.tokens(7), self.tokens(threshold), self.tokens(9)]
        return documents, [replace_documents(documents, {1: self.tokens(8)})]

    def forward_packed(self, documents: list[Tensor], gradient: bool = False) -> list[Tensor]:
        """Last hidden states of each document in one pack, (length, hidden) each."""
        lengths = [len(ids) for ids in documents]
        padded = -(-sum(lengths) // self.degree) * self.degree
        states = self._of_rows(documents, padded, gradient=gradient)
        return list(states[: sum(lengths)].split(lengths))

    def _of_rows(self, documents: list[Tensor], num_rows: int, *, gradient: bool) -> Tensor:
        """Last hidden states of the rows of a pack, of all ranks that share it, (rows, hidden)."""
        with torch.set_grad_enabled(gradient):
            states = self.ranks.states(lambda: self.states(self._make_batch(documents, self.ranks)))[0]
        if len(states) != num_rows:
            raise CannotRun(f"the LM head gets {len(states)} states for a pack of {num_rows} tokens")
        return states

    def forward_alone(self, ids: Tensor) -> Tensor:
        """Last hidden states of a document in unpacked training of the model as it was given: (n,) -> (n, hidden)."""
        with self.unpacked(len(ids)), torch.no_grad():
            return self.states(self.make_row(ids))[0][: len(ids)]

    def forward_rows(self, ids: Tensor) -> None:
        """Run rows without boundaries, (B, n), with the attention of packs."""
        with self.evaluating(), torch.no_grad():
            self.states({"input_ids": ids.to(self.device), "use_cache": False})

    def error_unpacked(self) -> str | None:
        """What the model raises on a row in training mode, without packing and with its own attention; None if nothing.

        `forward_alone` runs in eval mode without gradients, and so without checkpointing. An engine would wait for a
        backward.
        """
        ids = self.tokens(DOCUMENT_LENGTHS[0])
        try:
            with self.as_given(len(ids)), torch.set_grad_enabled(not self.has_engine):
                self.states(self.make_row(ids))
        except (CannotRun, KernelError) as error:
            return str(error)
        return None

    def make_row(self, ids: Tensor) -> dict[str, Any]:
        """The batch of a document alone, (1, n), or of several of equal length, (B, n), with PADDING if needed."""
        return self._make_rows(ids.reshape(-1, ids.shape[-1]), self._is_padded)

    def _make_rows(self, ids: Tensor, padded: bool) -> dict[str, Any]:
        """The unpacked batch of rows of equal length, (B, n)."""
        if not padded:
            return {"input_ids": ids.to(self.device), "use_cache": False}
        tokens = torch.cat([ids, ids[:, -1:].expand(-1, NUM_PADDING_TOKENS)], dim=1).to(self.device)
        mask = torch.ones_like(tokens)
        mask[:, -NUM_PADDING_TOKENS:] = 0
        return {"input_ids": tokens, "attention_mask": mask, "use_cache": False}

    @cached_property
    def _is_padded(self) -> bool:
        """Whether documents alone are padded: where a token changes earlier states in a row without padding.

        Unpacked TRL pads its rows. In nearly all models that changes nothing. But transformers drops a mask that hides
        nothing, and then the text part of PaliGemma is not causal.
        """
        ids = self.tokens(9)
        rows = torch.stack([ids, torch.cat([ids[:-2], self.tokens(2)])])

        def moves(padded: bool) -> bool:
            first, second = self.states(self._make_rows(rows, padded))[:, :7]
            return self.on_any_rank(largest_distance([first], [second]) > READS_AHEAD * first.abs().max().item())

        with self.unpacked(len(ids)), torch.no_grad():
            self.reads_ahead = moves(padded=False)
            if not self.reads_ahead:
                return False
            try:
                self.reads_ahead = moves(padded=True)
            except CannotRun:  # TRL trains it on rows of equal length only
                return False
        return True

    def forward_padded(self, documents: list[Tensor]) -> None:
        """Run the pack on each rank as a whole, with the padding that a pack of this degree has."""
        with torch.no_grad():
            self.states(self._make_batch(documents))

    def _make_batch(self, documents: list[Tensor], ranks: LocalRank = LOCAL_RANK) -> dict[str, Any]:
        batch = cut_part(self._collate([{"input_ids": ids} for ids in documents]), ranks.degree, ranks.index)
        return self.move_batch({name: value for name, value in batch.items() if name not in ("labels", "shift_labels")})

    def silenced(self, run: Callable[[], T]) -> T:
        """What `run` returns, after modules that draw random numbers in it were set to eval mode; `dtype` is noted.

        They are routers with jitter or sampling, and NEFTune's noise. `undisturbed` restores the modes.
        """
        with watching_draws(self.inner, self.device) as (kinds, dtypes):
            found = run()
        self.dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        self.silent = [module for module in self.inner.modules() if type(module) in kinds]
        self.silence()
        return run() if kinds else found

    def silence(self, *call: object) -> None:
        """Set what `silenced` found to eval mode again, as a hook of the model's forward, too."""
        for module in self.silent:
            module.training = False  # not of its children: they may not draw

    def gradient(self, documents: list[Tensor]) -> float | None:
        """Largest gradient of one document's states with respect to the embeddings of another before it.

        One backward is of the documents whose index has a bit set, and for each pair there is a bit in which they
        differ. With several ranks one is of each document, and what differs from the gradient of a document alone, if
        it is no rounding, counts, too: a gradient that is not sent back to its rank moves no other document. None if
        the model does not support it.
        """
        rows = torch.arange(sum(map(len, documents)), device=self.device).split([len(ids) for ids in documents])
        places: list[tuple[Any, Tensor, int]] = [(ids, of_one, 0) for ids, of_one in zip(documents, rows, strict=True)]
        limit = self.ranks.gradient_limit(self.rounding)
        if limit is None:
            bits = range((len(rows) - 1).bit_length())
            places = [(None, torch.cat([one for i, one in enumerate(rows) if i >> bit & 1]), 0) for bit in bits]
        try:
            return self._wrong_gradient(
                self._make_batch(documents, self.ranks),
                places,
                limit=limit,
                rounding=tokens_summed_in_common(self.inner) * torch.finfo(torch.float32).eps,
            )
        except KernelError:
            raise
        except ValueError as error:  # from a repaired module that is recomputed
            raise CannotRun(str(error)) from error

    def _wrong_gradient(
        self, batch: dict[str, Any], places: list[tuple[Any, Tensor, int]], *, limit: float | None, rounding: float = 0
    ) -> float | None:
        """What is wrong with the gradients of documents with respect to the rows of their pack; 0 if nothing.

        It is the largest one of rows of other documents (above `rounding` times the largest), or the difference from
        the gradient of a document alone, relative to its largest and above `limit`, unless that is None.

        Args:
            places: documents, their rows, and the first of these whose states are differentiated.
        """
        largest = 0.0
        gradients = self.embedding_gradients(batch, [rows[first:] for _, rows, first in places], self.ranks)
        if gradients is None or (limit is None and len(gradients[0]) != batch["input_ids"].shape[1]):
            return None  # in the second case the backbone gets documents as padded rows, not the pack
        for gradient, (ids, rows, first) in zip(gradients, places, strict=True):
            mine = gradient[rows]
            gradient[rows] = 0
            others = gradient.abs().max().item()
            scale = mine.abs().max().item()
            if limit is not None:
                own = torch.arange(first, len(rows), device=self.device)
                with self.unpacked(len(ids)):
                    found = self.embedding_gradients(self.make_row(ids), [own])
                if found is None:
                    return None
                alone = found[0][: len(rows)]
                scale = alone.abs().max().item()
                is_lost = ((mine == 0).all(-1) & (alone != 0).any(-1)).any().item()
                gap = inf if is_lost else (mine - alone).abs().max().item() / scale
                largest = max(largest, gap if gap > limit or is_lost else 0.0)
            largest = max(largest, others if others > rounding * scale else 0.0)
        return largest

    @property
    def rounding(self) -> float:
        """Relative change that another order of the same sums may cause: 32 roundings in fp32, 4 in half precision.

        With Mamba-2's kernel as many as a chunk has tokens: it sums over documents.
        """
        eps = torch.finfo(self.dtype).eps
        return 4 * eps if eps > 1e-4 else max(32, tokens_summed_in_common(self.inner)) * eps


def _special_tokens(config: PreTrainedConfig) -> Iterator[int]:
    """Token ids with a meaning in the config: end of text (several in some models), image, padding."""
    for name, value in vars(config).items():
        if name.endswith(("token_id", "token_ids", "token_index")):
            yield from (token for token in (value if isinstance(value, list | tuple) else [value]) if token is not None)
