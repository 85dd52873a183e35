"""Hold the document boundaries of the packed forward that is running.

A packed forward is a forward of a model on a pack: several documents, end to end in one row of T tokens. Attention and
recurrent mixers must know where each document begins, and many models do not pass this on to them. So the hooks of
`forwards.py` enter a `PackedForward` here when a forward begins and leave it when the forward ends, and the modules
inside read it with `running_forward` or `running_pack`. What modules derive from the boundaries is computed once per
pack (`once_per_pack`) and not in every layer.

Words:

    repaired module  a module that mixes tokens of different documents, and cannot be given boundaries. The repair
                     (`isolation/repair.py`) runs it on batches of several rows, one document per row, padded on the
                     right. Elsewhere a pack is a batch of one row
    leak probe       the test of a model that finds such modules before training (`isolation/probe.py`)
    mixer            a layer that mixes tokens without attention, by a convolution or a recurrence (`mixer_support.py`)
    part             with sequence parallelism several neighbouring ranks share a pack, and each holds a part of its
                     tokens
    run              the tokens of a document that no document before it in the pack has. Where documents share a
                     prefix, the first of them is a whole run, and the run of a later one begins behind the prefix
    running          a packed forward is running from the time it was entered until it is left
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

from ..compat import ReplacedValues
from ..group import ALONE, Group
from .rows import DocumentRows

# The name of the attention implementation that reads boundaries (`varlen.py`). The name must not contain "flash",
# "sdpa" or "flex_attention", because transformers treats such names differently.
ATTENTION_NAME = "packfix_varlen"
# The entries of a packed batch that flash attention in transformers takes as boundaries
CU_SEQ_LENS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# These and the entry that some mixers take. (`position_ids` also restart in each document, but are not meant here.)
BOUNDARIES = (*CU_SEQ_LENS, "seq_idx")
# The argument of a model that holds the cache of generation: its name up to transformers 5.23, and its name from 5.24
CACHE_NAMES = ("past_key_values", "cache")

PackFunction = TypeVar("PackFunction", bound=Callable[..., Any])
# The end of messages about batches that are not right for a packed forward
PACK_REMEDY = (
    "Feed one packed row (1, T) with cu_seq_lens_q/k, max_length_q/k, use_cache=False and no attention_mask; for "
    "anything else call model.eval(), or set model.set_attn_implementation('sdpa')."
)


def once_per_pack(function: PackFunction) -> PackFunction:
    """Cache the results of a function in the pack that is its first argument, by the function's other arguments.

    The key contains the name of the function, so the names of such functions differ, also between modules.
    """

    @wraps(function)
    def cached_function(pack: "PackedForward", *args: Any) -> Any:
        key = (function.__name__, *args)
        if key not in pack.derived:
            pack.derived[key] = function(pack, *args)
        return pack.derived[key]

    return cast(PackFunction, cached_function)


@dataclass(eq=False)
class PackedForward:
    """The boundaries of one packed forward. Where ranks share the pack, they describe the whole pack.

    Only `derived` changes after construction, but the dataclass is not frozen. torch 2.11 would treat all fields of a
    frozen dataclass as constants of a graph, and would compile again for each new length of the longest document.

    Attributes:
        cu_seq_lens_q, cu_seq_lens_k: where the queries and where the keys of each document begin, and T at the end.
            int32, (N + 1,) for N documents. Both are equal, unless documents share prefixes; see `kv_index`.
        max_length_q, max_length_k: the most queries and the most keys of a document, in tokens.
        num_rows: inside a repaired module, the number of rows of the batch, with one document per row, right-padded to
            `max_length_q`. `cu_seq_lens_q` then holds the boundaries of these rows laid end to end. None elsewhere.
        ignores_masks: whether attention ignores masks that the model makes itself, because the leak probe found that
            they say no more than the boundaries.
        group: the ranks that share the pack; a group of one rank if the rank has the pack for itself.
        part_tokens: the number of tokens that each of these ranks holds; 0 if the rank has the pack for itself.
        kv_index: if documents share prefixes, the positions in the pack of the keys of all runs, end to end
            (`features/prefixes`), int64, (cu_seq_lens_k[-1],). `cu_seq_lens_q` then holds the boundaries of runs, and
            `cu_seq_lens_k` the boundaries of their keys. For example, a run at positions 0 to 3, and a run at
            positions 4 and 5 of a document with the prefix at 0 and 1, have the keys [0, 1, 2, 3] and [0, 1, 4, 5].
        run_lengths: the number of queries and the number of keys of each run, (runs, 2), on the host.
        launches: the launches of the flash kernel, each on neighbouring documents of similar length, because a launch
            wastes time on documents that are much shorter than its longest (planned by `data/by_length.py`). Each is
            (first document, last document + 1, first token, last token + 1, tokens of the longest document), on the
            host. (): one launch of all documents.
        mixers: the functions that the model's mixers call: `enter` replaces them for this forward, and `leave`
            restores them. The default is None, because torch.compile cannot construct a default that is an
            object.
        derived: the cached results of functions that are `once_per_pack`.
    """

    cu_seq_lens_q: Tensor
    cu_seq_lens_k: Tensor
    max_length_q: int
    max_length_k: int
    num_rows: int | None = None
    ignores_masks: bool = False
    group: Group = field(kw_only=True)  # no default, because torch does not compile a default that is an object
    part_tokens: int = 0
    kv_index: Tensor | None = None
    run_lengths: Tensor | None = None
    launches: tuple[tuple[int, int, int, int, int], ...] = ()
    mixers: ReplacedValues | None = field(default=None, repr=False, compare=False)
    derived: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def in_repaired_module(self) -> bool:
        """Whether this is the forward of a repaired module, on rows with one document each."""
        return self.num_rows is not None

    @cached_property
    def bounds(self) -> list[int]:
        """`cu_seq_lens_q` as a list, without empty documents at the end. The first access waits for the device.

        Collators may add empty documents, so that `cu_seq_lens_q` has the same shape in all packs.
        """
        bounds = self.cu_seq_lens_q.tolist()
        while len(bounds) > 2 and bounds[-2] == bounds[-1]:
            bounds.pop()
        return bounds

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each document, without the empty documents at the end, on the host."""
        return [stop - start for start, stop in pairwise(self.bounds)]

    @property
    def num_tokens(self) -> int:
        """T, from the boundaries."""
        return self.bounds[-1]

    @once_per_pack
    def document_rows(self, budget: float) -> DocumentRows:
        """Return the documents as rows of right-padded batches, one document per row.

        Args:
            budget: the most tokens of a batch, padding included; 0 for one document per batch, infinity for one batch.
        """
        # The budget also depends on `all_in_one_batch`, which is entered or left only between forwards. So the cached
        # result of this pack stays right.
        return DocumentRows(self.lengths, self.cu_seq_lens_q.device, undivided_budget(budget))

    @once_per_pack
    def repaired_batches(self, budget: float) -> "tuple[DocumentRows, list[PackedForward]]":
        """Return `document_rows`, and for each of its batches the packed forward in which a repaired module runs it.

        Raises:
            ValueError: documents share prefixes, or ranks share the pack, so that documents are not whole.
        """
        if self.kv_index is not None:
            raise ValueError(
                f"a repaired module got a pack of {len(self.lengths)} runs whose documents share prefixes: it runs on "
                'whole documents, and a run is the end of one. Set share_prefixes="off".'
            )
        if not self.group.is_alone:
            raise ValueError(
                f"a repaired module got a part of a pack that {self.group.size} ranks share: it runs on whole "
                "documents, and some of their tokens are on other ranks. Set tokens_per_rank=None."
            )
        rows = self.document_rows(budget)
        forwards = []
        for batch in rows.padded_batches:  # each of `num_rows` rows, as long as the longest document of the batch
            num_rows = batch.num_rows
            longest = batch.longest
            bounds = torch.arange(num_rows + 1, dtype=torch.int32, device=self.cu_seq_lens_q.device) * longest
            forwards.append(PackedForward(bounds, bounds, longest, longest, num_rows=num_rows, group=ALONE))
        return rows, forwards


class ThreadState(threading.local):
    """The packed forwards that are running in this thread.

    Each thread has its own state, because one thread may evaluate, or train another model, while another thread trains.
    The backward of CUDA tensors runs in a thread of torch. A checkpointed layer that is recomputed there enters its
    packed forward again.

    Attributes:
        packed_forwards: the packed forwards that are running, the innermost last. A repaired module runs one inside of
            the model's forward.
        num_undivided: how many contexts of `all_in_one_batch` are open, one inside of another. Above 0, documents are
            not divided among batches by a budget.
    """

    def __init__(self) -> None:
        self.packed_forwards: list[PackedForward] = []
        self.num_undivided = 0


this_thread = ThreadState()


@contextmanager
def all_in_one_batch() -> Iterator[None]:
    """Make `document_rows` put all documents into one batch within this context, unless the budget is 0.

    The leak probe uses this context, so that its few documents, of very different lengths, share a batch. So it tests
    all pairs of documents in a batch, because any two documents may come into one batch in training.
    """
    this_thread.num_undivided += 1
    try:
        yield
    finally:
        this_thread.num_undivided -= 1


def undivided_budget(budget: float) -> float:
    """Return `budget`, the most tokens of a padded batch, or infinity inside of `all_in_one_batch`.

    A budget of 0 means one document per batch, and stays 0.
    """
    return inf if budget and this_thread.num_undivided else budget


def running_forward() -> PackedForward | None:
    """Return the innermost packed forward that is running in this thread; None outside of packed forwards."""
    return this_thread.packed_forwards[-1] if this_thread.packed_forwards else None


def running_pack() -> PackedForward | None:
    """Return the running packed forward if a module has to separate the documents of its input, else None.

    Inside of a repaired module the result is None, because there each row of the input is one document.
    """
    running = running_forward()
    return None if running is None or running.in_repaired_module else running


def enter_packed_forward(running: PackedForward) -> None:
    """Make `running` the packed forward from which modules read their boundaries, until `leave_packed_forward`."""
    this_thread.packed_forwards.append(running)
    if running.mixers is not None:
        running.mixers.enter()  # replaces the functions of mixers by functions that start anew in each document


def leave_packed_forward(running: PackedForward) -> None:
    """End the packed forward `running`, and all inside of it that were interrupted (see `ModelHooks`).

    Without effect if it is not running in this thread.
    """
    forwards = this_thread.packed_forwards
    is_left = all(forward is not running for forward in forwards)
    while not is_left:
        innermost = forwards.pop()
        if innermost.mixers is not None:
            innermost.mixers.leave()
        is_left = innermost is running


@contextmanager
def packed_forward_entered(running: PackedForward) -> Iterator[None]:
    """Make `running` the packed forward from which modules read their boundaries, within this context."""
    enter_packed_forward(running)
    try:
        yield
    finally:
        leave_packed_forward(running)


def in_backward() -> bool:
    """Return whether a backward pass is running. A forward inside of it recomputes a checkpointed layer."""
    return torch._C._current_graph_task_id() != -1
