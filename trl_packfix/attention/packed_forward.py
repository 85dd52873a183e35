"""The packed forward that is running: its document boundaries, and what modules derive from them once per pack.

Many models do not pass boundaries on to the modules that need them. So `forwards.py` records them here while a forward
runs, and attention and mixers read them here.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, wraps
from itertools import pairwise
from math import inf
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ..compat import ReplacedFunctions
from .rows import DocumentRows

# The attention implementation that reads boundaries (`varlen.py`). The name must not contain "flash", "sdpa" or
# "flex_attention": transformers runs other code for such names.
ATTENTION_NAME = "packfix_varlen"
# The entries of a packed batch that hold boundaries, except position_ids
CU_SEQ_LENS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
BOUNDARIES = (*CU_SEQ_LENS, "seq_idx")
# The argument of a model that holds the cache of generation: its name up to transformers 5.23, and from 5.24 on
CACHE_NAMES = ("past_key_values", "cache")

PackFunction = TypeVar("PackFunction", bound=Callable[..., Any])
FEED_A_PACK = (
    "Feed one packed row (1, T) with cu_seq_lens_q/k, max_length_q/k, use_cache=False and no attention_mask; for "
    "anything else call model.eval(), or set model.set_attn_implementation('sdpa')."
)


def once_per_pack(function: PackFunction) -> PackFunction:
    """Make a function of a pack compute its result once for each pack, and for equal other arguments."""

    @wraps(function)
    def derived(pack: "PackedForward", *args: Any) -> Any:
        name = (function.__name__, *args)
        if name not in pack.derived:
            pack.derived[name] = function(pack, *args)
        return pack.derived[name]

    return cast(PackFunction, derived)


@dataclass(eq=False)
class PackedForward:
    """Boundaries of a packed forward that is running; with several ranks those of the whole pack.

    It does not change, but it is not frozen: torch 2.11 makes all fields of a frozen dataclass constants of a
    graph, and would compile anew for each longest document.

    Attributes:
        rows: inside a repaired module the number of rows of a batch, one document each, right-padded to
            `max_length_q`. `cu_seq_lens_q` then holds the boundaries of these rows laid end to end.
        ignores_masks: whether masks that the model makes itself are ignored, because the leak probe found nothing but
            the boundaries in them.
        degree, index, part_tokens: how many ranks share the pack, which of them this one is, and the tokens of each, if
            there are several.
        kv_index: if documents share prefixes, the rows that are the keys of each run (`data/prefix_collator.py`),
            int64, shape (cu_seq_lens_k[-1],). `cu_seq_lens_q` then holds the boundaries of runs.
        run_lengths: rows and keys of each run on the host, (runs, 2).
        launches: of a flash kernel, as (first document, last + 1, first token, last + 1, longest), on the host; () for
            one launch of all documents.
        mixers: the functions of mixers that are replaced during this forward; None in a batch of a repaired module.
        derived: what functions that are `once_per_pack` returned.
    """

    cu_seq_lens_q: Tensor
    cu_seq_lens_k: Tensor
    max_length_q: int
    max_length_k: int
    rows: int | None = None
    ignores_masks: bool = False
    degree: int = 1
    index: int = 0
    part_tokens: int = 0
    kv_index: Tensor | None = None
    run_lengths: Tensor | None = None
    launches: tuple[tuple[int, int, int, int, int], ...] = ()
    mixers: ReplacedFunctions | None = field(default=None, repr=False, compare=False)
    derived: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def bounds(self) -> list[int]:
        """`cu_seq_lens_q` on the host, without the empty documents at the end. The first use waits for the device."""
        bounds = self.cu_seq_lens_q.tolist()
        while len(bounds) > 2 and bounds[-2] == bounds[-1]:
            bounds.pop()
        return bounds

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document, on the host, without the empty ones that pad."""
        return [stop - start for start, stop in pairwise(self.bounds)]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @once_per_pack
    def document_rows(self, budget: float) -> DocumentRows:
        """The rows of documents in batches of at most `budget` padded tokens."""
        return DocumentRows(self.lengths, self.cu_seq_lens_q.device, undivided_budget(budget))

    @once_per_pack
    def documents(self, budget: float) -> "tuple[DocumentRows, list[PackedForward]]":
        """`document_rows`, and the packed forward in which a repaired module computes each of its batches."""
        if self.kv_index is not None:
            raise ValueError(
                f"a repaired module got a pack of {len(self.lengths)} runs whose documents share prefixes: it runs on "
                'whole documents, and a run is the end of one. Set share_prefixes="off".'
            )
        if self.degree > 1:
            raise ValueError(
                f"a repaired module got a part of a pack that {self.degree} ranks share: it runs on whole documents, "
                "and some of their tokens are on other ranks. Set tokens_per_rank=None."
            )
        rows = self.document_rows(budget)
        forwards = []
        for group in rows.groups:
            count = group.num_rows
            longest = group.longest
            bounds = torch.arange(count + 1, dtype=torch.int32, device=self.cu_seq_lens_q.device) * longest
            forwards.append(PackedForward(bounds, bounds, longest, longest, rows=count))
        return rows, forwards


class ThreadState(threading.local):
    """What is running in this thread. Each thread has its own: two may train, or one may evaluate while one trains.

    The backward of CUDA tensors runs in a thread of torch. A layer that is recomputed there enters its forward there.

    Attributes:
        packed_forwards: those that are running, the innermost last.
        num_undivided: how many `all_in_one_batch` are entered.
    """

    def __init__(self) -> None:
        self.packed_forwards: list[PackedForward] = []
        self.num_undivided = 0


this_thread = ThreadState()


@contextmanager
def all_in_one_batch() -> Iterator[None]:
    """All documents that may share a padded batch share one, as training may bring any two lengths together."""
    this_thread.num_undivided += 1
    try:
        yield
    finally:
        this_thread.num_undivided -= 1


def undivided_budget(budget: float) -> float:
    """The budget of a padded batch, unlimited within `all_in_one_batch`. 0, one document per batch, stays 0."""
    return inf if budget and this_thread.num_undivided else budget


def running_forward() -> PackedForward | None:
    """The innermost packed forward that is running in this thread; None outside of packs."""
    return this_thread.packed_forwards[-1] if this_thread.packed_forwards else None


def running_pack() -> PackedForward | None:
    """The packed forward whose documents a module must separate; None outside of packs and in repaired modules."""
    running = running_forward()
    return None if running is None or running.rows is not None else running


def enter_packed_forward(running: PackedForward) -> None:
    """Make `running` the packed forward from which modules read their boundaries, until `leave_packed_forward`."""
    this_thread.packed_forwards.append(running)
    if running.mixers is not None:
        running.mixers.enter()


def leave_packed_forward() -> None:
    running = this_thread.packed_forwards.pop()
    if running.mixers is not None:
        running.mixers.leave()


@contextmanager
def packed_forward_entered(running: PackedForward) -> Iterator[None]:
    enter_packed_forward(running)
    try:
        yield
    finally:
        leave_packed_forward()


def in_backward() -> bool:
    """Whether a backward pass is running, so that a forward is a recomputation of a checkpointed layer."""
    return torch._C._current_graph_task_id() != -1
