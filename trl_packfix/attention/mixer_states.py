"""Scans of hybrid models over ranks that send states: each rank computes its own tokens, with all heads.

Where ranks exchange tokens for heads, each sends all of its tokens. The state of a scan has a constant size, so long
parts send less if they send states. A scan is linear in the state: a part of a document that begins with the state S
ends with U + M S. So a rank computes the documents that begin in its part first, and sends (U, M) to the others. Then
it computes the document that began in an earlier part, from the state that this one comes with.

    document of the last token of a part    U                       M
    begins in the part, goes on             its state               0
    fills the part, goes on                 its state from zeros    what the part does to a state
    ends with the part                      0                       0

T tokens of the pack, s ranks that share it, H heads of values, K x V numbers of the state of a head.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .exchange import Volume, exchange_pieces, group_of
from .mixer_prefixes import batches_of, padded_by_zeros, run_batches
from .packed_forward import PackedForward
from .scan import Scan


def volume_of(scan: Scan, degree: int) -> Volume:
    """The volume of a scan on so many ranks; shapes and dtypes are all that it reads."""
    assert scan.transition is not None
    like, copies = scan.values[0], max(1.0, degree / scan.keys[0].shape[2])
    sizes = [x[0, 0].numel() * x.element_size() for x in (like, *scan.values)]  # the first one for the outputs
    keys = [x[0, 0].numel() * x.element_size() * copies for x in scan.keys]
    numbers = [
        like.shape[2] * height * width for height, width in (scan.transition.of_state, scan.transition.of_itself)
    ]
    # A scan in chunks: products of keys and values with the state, and within a chunk about as many
    return Volume(sum(sizes) + sum(keys), sum(numbers) * max(like.element_size(), 4), 2 * 8.0 * numbers[0])


def sends_states(scan: Scan, running: PackedForward) -> bool:
    """Whether this scan sends states to the other ranks of the group."""
    choose, tokens = running.sends_states, running.part_tokens
    if running.degree == 1 or running.kv_index is not None or scan.transition is None or choose is None or not tokens:
        return False
    return choose(volume_of(scan, running.degree), tokens, running.degree)


@dataclass(frozen=True)
class OwnDocuments:
    """The documents of a part.

    Attributes:
        came_in: tokens of the document that began in an earlier part; 0 if there is none.
        batches: the calls for those that begin here.
        place: where their rows are in the outputs of all calls, laid end to end.
        last: the number of the last one among them, in the order of the calls; None if none begins here.
        goes_on: whether the last token's document has more tokens in the next part.
    """

    came_in: int
    batches: list[Tensor]
    place: Tensor
    last: int | None
    goes_on: bool


def own_documents(running: PackedForward) -> OwnDocuments:
    """The documents of the part of this rank; once per pack. The host waits for the boundaries."""
    if "own documents" not in running.derived:
        assert running.part_tokens is not None
        first, size = running.index * running.part_tokens, running.part_tokens
        device = running.cu_seq_lens_q.device
        documents = [(start - first, stop - first) for start, stop in pairwise(running.bounds)]
        spans = [(max(start, 0), min(stop, size)) for start, stop in documents if 0 <= start < size]
        came_in = next((min(stop, size) for start, stop in documents if start < 0 < stop), 0)
        place = torch.zeros(size, dtype=torch.int64)
        batches, order = batches_of([[span] for span in spans], size, place, end=0, device=device)
        running.derived["own documents"] = OwnDocuments(
            came_in,
            batches,
            place[came_in:].to(device),
            order.index(len(spans) - 1) if spans else None,
            any(start < size < stop for start, stop in documents),
        )
    return running.derived["own documents"]


def run_parts(scan: Scan, running: PackedForward) -> Tensor:
    """Run a scan on the part of this rank, from the states of the parts before: (1, T / s, H, D)."""
    assert scan.from_states is not None and scan.transition is not None
    own, transition, like = own_documents(running), scan.transition, scan.values[0]
    dtype = torch.promote_types(like.dtype, torch.float32)
    added = like.new_zeros(1, like.shape[2], *transition.of_state, dtype=dtype)
    kept = like.new_zeros(1, like.shape[2], *transition.of_itself, dtype=dtype)
    outs: list[Tensor] = []
    if own.batches:
        outs, ends = run_batches(scan, padded_by_zeros(scan), own.batches, starts=None)
        if own.goes_on:
            added = ends[own.last].to(dtype)[None]
    elif own.goes_on:
        added = scan.from_states(scan.values, scan.keys, scan.parameters, None)[1].to(dtype)
        kept = transition.of(scan.values, scan.keys, scan.parameters).to(dtype)
    # `like` adds nothing but its gradient: each rank takes part in the exchange of the backward pass
    flat = torch.cat([added.flatten(), kept.flatten(), like.flatten()[:0].to(dtype)])
    sizes = [len(flat)] * running.degree
    got = exchange_pieces(flat.repeat(running.degree), sizes, sizes, group=group_of(running.degree))
    state = torch.zeros_like(added)
    for sent in got.split(len(flat))[: running.index]:
        of_part, through = sent.split([added.numel(), kept.numel()])
        state = of_part.view_as(added) + transition.apply(through.view_as(kept), state)
    if not own.came_in:
        nothing = got[:0].to(outs[0].dtype).view(0, *outs[0].shape[1:])
        return torch.cat([torch.cat(outs).index_select(0, own.place), nothing])[None]
    rows = [[x[:, : own.came_in] for x in tensors] for tensors in (scan.values, scan.keys)]
    first = scan.from_states(*rows, scan.parameters, state)[0]
    return first if not outs else torch.cat([first, torch.cat(outs).index_select(0, own.place)[None]], dim=1)
