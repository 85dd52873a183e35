"""What the comparisons on ranks must find: each fault is a context in which the package is wrong.

`make faults` plants those of the table, behind the proofs; a few are planted in every run of the tests.
"""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import torch
from support.faults import Fault, changed, together
from support.features import PRESENT, module_of_tests
from transformers import TrainerCallback
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from trl_packfix import compat
from trl_packfix.attention import exchange, varlen
from trl_packfix.attention.exchange import HeadExchange
from trl_packfix.attention.packed_forward import running_forward
from trl_packfix.data import loaders, stream
from trl_packfix.data.collator import IGNORE_INDEX
from trl_packfix.group import Group, make_groups
from trl_packfix.layout import SharedRowsLayout
from trl_packfix.training import objective, stream_source
from trl_packfix.training.first_step import FirstStep
from trl_packfix.training.objective import Objective
from trl_packfix.training.step_comparison import StepComparison
from trl_packfix.training.totals import TrainingTotals

OF_HYBRIDS = module_of_tests("hybrids", "faults")
OF_IMAGES = module_of_tests("images", "faults")


# Attention on parts of packs


def forgets_boundaries(right, bounds, num_tokens):
    running = running_forward()
    return [num_tokens] if running is not None and not running.group.is_alone else right(bounds, num_tokens)


def parts_in_wrong_order(right, self, *states):
    return tuple(torch.cat(x.chunk(self.group.size, dim=2)[::-1], dim=2) for x in right(self, *states))


def heads_in_wrong_order(right, self, out):
    heads = right(self, out)
    return torch.cat(heads.split([r.stop - r.start for r, _ in self._ranges], dim=2)[::-1], dim=2)


def without_prefixes(right, *args, running, **options):
    """Let attention on parts take the runs of a pack for whole documents."""
    if running is not None and not running.group.is_alone:
        running = replace(running, kv_index=None)
    return right(*args, running=running, **options)


def gradients_of_one_rank_lost(right, ctx, grad):
    """Lose what the second rank of a group sends back."""
    gradient, *other_gradients = right(ctx, grad)
    gradient.split(ctx.send_counts)[1].zero_()
    return gradient, *other_gradients


ATTENTION: dict[str, Fault] = {
    "leak": changed(varlen, "_lengths_between", forgets_boundaries),
    "chunks": changed(HeadExchange, "to_heads", parts_in_wrong_order),
    "heads": changed(HeadExchange, "to_tokens", heads_in_wrong_order),
}
if "prefixes" in PRESENT:
    ATTENTION["prefixes"] = changed(varlen, "_attend_documents", without_prefixes)
# It moves no state
GRADIENTS: dict[str, Fault] = {"gradients_lost": changed(exchange._AllToAll, "backward", gradients_of_one_rank_lost)}


# The loss, the counts and the documents


def late_shift(right, batch, group, **kwargs):
    """Shift labels after the cut."""
    part_of_batch = right(batch, group, **kwargs)
    if not group.is_alone:
        own_labels = part_of_batch["labels"]
        part_of_batch["shift_labels"] = torch.cat(
            [own_labels[:, 1:], torch.full_like(own_labels[:, :1], IGNORE_INDEX)], dim=1
        )
    return part_of_batch


def statistic_of_parts(right, router_logits, num_experts, num_chosen, row_counts, group):
    loss = load_balancing_loss_func(tuple(router_logits), num_experts, num_chosen, row_counts[None])
    return loss / group.size


def border_lost(right, self, rows, mask):
    """Give the targets of the last row of a part, whose labels lie in the next part, to no rank."""
    layout = right(self, rows, mask)
    stays = layout.target_rows < rows.stop - rows.start
    return replace(layout, target_rows=layout.target_rows[stays], target_documents=layout.target_documents[stays])


def shards_of_each_rank(right, dataset, rank, world_size, degree=1):
    """Let each rank read shards of its own, as without sequence parallelism, and not those of its group."""
    return right(dataset, rank, world_size)[0], degree


# One process


def each_row_once(right, layout, mask):
    """Let only the first of the documents that train a row train it, and none of the others."""
    first = np.unique(layout.target_rows.numpy(), return_index=True)[1]
    rows = layout.target_rows[first]
    documents = layout.target_documents[first]
    trained = torch.bincount(documents, minlength=layout.document_count)
    return right(replace(layout, target_rows=rows, target_documents=documents, trained=trained), mask)


class Begins(TrainerCallback):
    """A fault from the first step on, behind the proof of the model."""

    def __init__(self, fault: Fault, stack: ExitStack) -> None:
        self.fault = fault
        self.stack = stack

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self.stack.enter_context(self.fault())


# Leaks, which the proof of the model would refuse: they begin behind it
BEHIND_PROOF: dict[str, Fault] = {
    "one_document": changed(varlen, "_lengths_between", lambda right, bounds, num_tokens: [num_tokens]),
}
ONE: dict[str, Fault] = {
    "each_row_once": changed(SharedRowsLayout, "targets", each_row_once),
}

unseen = changed(Objective, "compare_packs", lambda right, self, batches: None)


TRAINING: dict[str, Fault] = {
    "averaged_by_ranks": changed(
        Objective,
        "_loss",
        lambda right, *args, **more: (lambda loss, outputs: (loss / 2, outputs))(*right(*args, **more)),
    ),
    "totals_of_one_rank": lambda: mock.patch("accelerate.Accelerator.reduce", lambda self, sums, reduction: sums),
    "late_shift": changed(loaders, "cut_part", late_shift),
    # Every member of a group counts documents and statistics
    "counted_by_all": lambda: mock.patch.object(Group, "is_leader", True),
    "statistic_of_parts": changed(objective, "load_balancing", statistic_of_parts),
    # A row of which several documents train the next token counts as one trained token
    "one_label_per_row": changed(SharedRowsLayout, "batch_to_count", lambda right, self, batch: batch),
    "border_lost": changed(SharedRowsLayout, "cut_to_part", border_lost),
    # The router statistic counts a row once, and not once for each of its documents
    "rows_once": changed(
        SharedRowsLayout, "row_counts", lambda right, self, trained: right(self, trained).clamp(max=1)
    ),
    "own_shards": changed(stream, "share_of_rank", shards_of_each_rank),
    # Ranks add the sums of sources as each has numbered them, and not by their names
    "sources_as_met": changed(TrainingTotals, "_agree_on_sources", lambda right, self, own: right(self, sorted(own))),
    # Models that ranks divide
    "counted_twice": changed(
        TrainingTotals, "gather", lambda right, self, accelerator, copies: right(self, accelerator)
    ),
    "summed_twice": lambda: mock.patch.object(compat, "SUMMED_BY_RANKS", "no style"),
}
IMAGES: dict[str, Fault] = {}
if OF_IMAGES is not None:
    IMAGES |= OF_IMAGES.ON_PARTS
    ONE |= OF_IMAGES.ONE
    TRAINING |= OF_IMAGES.TRAINING
ALL = ATTENTION | GRADIENTS | IMAGES | TRAINING | ONE
if OF_HYBRIDS is not None:
    ALL |= OF_HYBRIDS.ON_PARTS | OF_HYBRIDS.ONE
    BEHIND_PROOF |= OF_HYBRIDS.BEHIND_PROOF
stream_unseen = changed(stream_source, "check_same_stream", lambda right, *args: None)
ALL["own_shards_unseen"] = together(ALL["own_shards"], unseen, stream_unseen)
if OF_IMAGES is not None:
    ALL["other_images_unseen"] = together(ALL["other_images"], unseen)
ALL["other_texts"] = unseen  # with other texts on a rank: `training.other_texts`


# In place of the comparison of the first step, which sees most of these faults (tests/training/test_first_step.py)
uncompared = mock.patch.object(FirstStep, "compare", lambda self: StepComparison("not compared"))


@contextmanager
def behind_proofs():
    """Make only the groups in place of the proof on parts of packs."""
    only_groups = mock.patch(
        "trl_packfix.training.callbacks.prove_degrees", lambda trainer, degrees: make_groups(degrees)
    )
    same_documents = mock.patch("trl_packfix.training.table_source.check_same_documents", lambda *args: None)
    with only_groups, uncompared, same_documents:
        yield
