"""What the comparisons of hybrid models must find; `ranks/faults.py` has the faults of the core."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from support.faults import Fault, changed

from trl_packfix.attention.packed_forward import PackedForward
from trl_packfix.features.hybrids import mixers, prefixes
from trl_packfix.group import ALONE


def own_states_only(right, scan, running):
    """Begin a scan anew in each part, on all its heads."""
    if not running.group.is_alone:
        bounds = torch.tensor([0, running.part_tokens], dtype=torch.int32)
        running = PackedForward(bounds, bounds, running.part_tokens, running.part_tokens, group=ALONE)
    return right(scan, running)


@contextmanager
def boundary_of_mixers():
    """Begin the last document of each pack with the state, and with the last tokens, of the one before it."""

    def wrong(running):
        bounds = running.cu_seq_lens_q
        fewer = torch.cat([bounds[:-2], bounds[-1:]]) if len(bounds) > 2 else bounds
        return replace(running, cu_seq_lens_q=fewer, cu_seq_lens_k=fewer, derived={})

    with ExitStack() as patches:
        for name, place in {"run_scan": 1, "_boundary_tensor": 0, "_rows_with_context": 0}.items():

            def on_fewer(right, *args, place=place, **more):
                return right(*args[:place], wrong(args[place]), *args[place + 1 :], **more)

            patches.enter_context(changed(mixers, name, on_fewer)())
        yield


def without_parents(right, pack):
    """Begin the recurrent layers of a hybrid anew behind a shared image."""
    levels, place = right(pack)
    return [level._replace(parents=None) for level in levels], place


ON_PARTS: dict[str, Fault] = {
    "no_halo": changed(mixers, "exchange_halo", lambda right, rows, width, group: torch.zeros_like(rows[:, :width])),
    "no_states": changed(mixers, "run_scan", own_states_only),
    # This one moves no state
    "no_gradient": changed(mixers, "exchange_halo", lambda right, *args: right(*args).detach()),
}
"""Faults on parts of packs."""
BEHIND_PROOF: dict[str, Fault] = {"boundary_of_mixers": boundary_of_mixers}
ONE: dict[str, Fault] = {"states_forgotten": changed(prefixes, "levels_of", without_parents)}
"""Faults in one process, the first of them behind the proof of the model, which would refuse it."""
