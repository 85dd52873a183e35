"""Documents as rows and back: whatever the axes, nothing is lost, moved, or taken from another document."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_packfix.attention.rows import DocumentRows, TensorAxes, group_by_length

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=8)
BUDGETS = st.sampled_from([0, 5, 30, math.inf])
# Shapes of one row: N stands for the tokens, 6 for batch x heads (as alibi has it)
LAYOUTS = [
    (TensorAxes((1,), 0), (1, "N", 3)),
    (TensorAxes((2,), 0), (1, 3, "N")),
    (TensorAxes((2,), 0), (1, 2, "N", 3)),
    (TensorAxes((0,), 1), ("N", 1, 3)),
    (TensorAxes((2,), 1), (3, 1, "N")),
    (TensorAxes((2,), 0), (6, 1, "N")),
    (TensorAxes((0,), 0), ("N", 3)),
]


def tensor(layout, num_tokens):
    shape = [num_tokens if size == "N" else size for size in layout]
    return torch.arange(math.prod(shape)).reshape(shape)


@given(LENGTHS, BUDGETS, st.sampled_from(LAYOUTS))
def test_a_row_holds_its_document_and_nothing_of_another_and_rows_are_joined_again(lengths, budget, layout):
    axes, shape = layout
    packed = tensor(shape, sum(lengths))
    (axis,) = axes.tokens
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    owners = owner.view([-1 if i == axis else 1 for i in range(packed.dim())]).expand_as(packed)
    rows = DocumentRows(lengths, CPU, budget)
    batches = []
    for group in rows.padded_batches:
        values = group.split(packed, axes)
        whose = group.split(owners.contiguous(), axes)
        batches.append(values)
        size = values.shape[axes.batch] // group.num_rows
        for row, length in enumerate(group.lengths):
            here = [x.narrow(axes.batch, row * size, size) for x in (values, whose)]
            assert len(here[1].unique()) == 1, "a row holds one document, padding included"
            if axis != axes.batch:
                start = group.starts[row]
                assert torch.equal(here[0].narrow(axis, 0, length), packed.narrow(axis, start, length))
    assert torch.equal(rows.join(batches, axes), packed)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 500))
def test_groups_hold_every_document_once_and_padding_stays_in_the_budget(lengths, budget):
    groups = group_by_length(lengths, budget)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(lengths[i] for i in group) <= budget
    assert len(group_by_length(lengths, 0)) == len(lengths)
    assert len(group_by_length(lengths, math.inf)) == 1


@pytest.mark.parametrize("axes", [TensorAxes((2, 3), 0), TensorAxes((2, 3), None)])
def test_a_mask_is_divided_into_blocks_and_padding_is_masked(axes):
    lengths = [3, 5, 1]
    num_tokens = sum(lengths)
    causal = torch.ones(num_tokens, num_tokens).tril().bool()[None, None]  # knows of no boundaries
    (group,) = DocumentRows(lengths, CPU, math.inf).padded_batches
    rows = group.split(causal, axes)
    expected = torch.ones(5, 5).tril().bool()
    assert all(torch.equal(row[0], expected) for row in rows)
    assert len(rows) == (3 if axes.batch == 0 else 1)


def test_what_all_rows_share_is_what_the_longest_document_sees():
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 0])[None]  # the same for every row: (1, T)
    rows = DocumentRows([3, 5, 1], CPU, math.inf)
    shared = rows.padded_batches[0].split(positions, TensorAxes((1,), None))
    assert shared.tolist() == [[0, 1, 2, 3, 4]]
    assert torch.equal(rows.join([shared], TensorAxes((1,), None)), positions)
