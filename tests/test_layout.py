"""The layout of a batch: what it answers, of whole packs and of their parts, and what it survives on its way."""

import pickle
import re
from dataclasses import fields

import pytest
import torch
from accelerate.utils import find_batch_size, send_to_device
from hypothesis import given
from hypothesis import strategies as st
from support.features import PRESENT, sharing_collator
from test_wings import MODULES
from torch import Tensor
from torch.distributed.utils import _apply_to_tensors
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from trl_packfix import PackedDataCollator
from trl_packfix.data.collator import IGNORE_INDEX
from trl_packfix.data.rank_share import cut_part
from trl_packfix.group import Group
from trl_packfix.layout import LAYOUT_KEY, Layout, PackedLayout, UnpackedLayout, layout_of


def turns(lengths: list[int], prompt: int = 2) -> list[dict[str, list[int]]]:
    """Return documents that begin alike.

    Document i has `lengths[i]` tokens in common with the longest, and two of its own.
    """
    rows = [[*range(10, 10 + length), 200 + i, 220 + i] for i, length in enumerate(lengths)]
    return [{"input_ids": tokens, "labels": [IGNORE_INDEX] * prompt + tokens[prompt:]} for tokens in rows]


COLLATORS = {"whole": PackedDataCollator} | ({"runs": sharing_collator} if "prefixes" in PRESENT else {})


def parts_of(documents, kind, degree):
    batch = COLLATORS[kind](pad_to_multiple_of=degree)(documents)
    return batch, [cut_part(batch, Group(degree, index)) for index in range(degree)]


# What it answers


def test_a_batch_without_an_entry_has_a_view_of_its_boundaries():
    batch = PackedDataCollator()(turns([3, 4]))
    assert LAYOUT_KEY not in batch
    assert type(layout_of(batch)) is PackedLayout
    rows = {"input_ids": torch.ones(2, 5, dtype=torch.long), "attention_mask": torch.ones(2, 5)}
    assert type(layout_of(rows)) is UnpackedLayout
    assert layout_of(rows).document_count == 2
    assert not layout_of(rows).is_packed
    assert layout_of(batch).is_packed


def test_a_row_is_a_document():
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
    layout = layout_of({"labels": torch.zeros(3, 4, dtype=torch.long), "attention_mask": mask})
    targets = layout.targets(torch.tensor([[True, True, True], [False, False, False], [False, True, False]]))
    assert targets.trained.tolist() == [3, 0, 1]
    sizes = layout.sizes(targets.trained)
    assert (sizes.tokens, sizes.computed_rows) == (9, 9)
    assert (sizes.lengths.tolist(), sizes.shared_tokens.tolist()) == ([4, 0, 3], [0, 0, 0])
    assert layout.row_counts(targets.trained).tolist() == [[True] * 4, [False] * 4, [True] * 4]


@given(st.lists(st.integers(1, 12), min_size=2, max_size=6), st.sampled_from([*COLLATORS]), st.integers(0, 3))
def test_targets_are_the_trained_tokens_of_each_document(lengths, kind, prompt):
    """Labels are the document's, and each is predicted in the row that has the token before it."""
    documents = turns(lengths, prompt)
    documents[0]["labels"] = documents[0]["input_ids"]  # masks of shared rows disagree
    batch = COLLATORS[kind]()(documents)
    layout = layout_of(batch)
    mask = batch["labels"][:, 1:] != IGNORE_INDEX
    targets = layout.targets(mask)
    predictions = [[] for _ in documents]
    selected = map(targets.select, (batch["labels"][:, 1:], batch["input_ids"][:, :-1], mask))
    values = torch.stack([targets.documents, *selected]).flatten(1).T.tolist()
    for document, label, before, is_trained in values:
        if is_trained:
            predictions[document].append((before, label))
    for document, pairs in zip(documents, predictions, strict=True):
        tokens = document["input_ids"]
        labels = document["labels"]
        assert pairs == [(tokens[i - 1], labels[i]) for i in range(1, len(tokens)) if labels[i] != IGNORE_INDEX]
    assert targets.trained.tolist() == [len(pairs) for pairs in predictions]
    assert layout.document_count == len(documents)
    labels = layout.batch_to_count(batch)
    counted = labels["shift_labels"] if "shift_labels" in labels else labels["labels"][:, 1:]
    assert (counted != IGNORE_INDEX).sum() == sum(map(len, predictions))


@pytest.mark.parametrize("kind", COLLATORS)
def test_rows_that_predict_a_document_hold_its_tokens(kind):
    documents = turns([8, 3, 8, 5], prompt=0)
    batch = COLLATORS[kind]()(documents)
    for i, document in enumerate(documents):
        rows = layout_of(batch).predicting_rows(i)
        assert batch["input_ids"][0][rows].tolist() == document["input_ids"][:-1]


def test_only_packs_are_cut():
    with pytest.raises(TypeError, match="UnpackedLayout is not the layout of a pack"):
        layout_of({"labels": torch.zeros(2, 3)}).cut_to_part(slice(0, 2), torch.ones(1, 4))


# Parts are the whole


@given(
    st.lists(st.integers(1, 12), min_size=2, max_size=6),
    st.sampled_from([*COLLATORS]),
    st.sampled_from([2, 3, 4]),
    st.integers(0, 3),
)
def test_parts_have_the_targets_and_the_rows_of_the_whole_pack(lengths, kind, degree, prompt):
    batch, rank_batches = parts_of(turns(lengths, prompt), kind, degree)
    whole_layout = layout_of(batch)
    expected = whole_layout.targets(batch["labels"][:, 1:] != IGNORE_INDEX)
    pairs = []
    for rank_batch in rank_batches:
        layout = rank_batch[LAYOUT_KEY]
        targets = layout.targets(rank_batch["labels"][:, 1:] != IGNORE_INDEX)
        assert torch.equal(targets.trained, expected.trained)  # of the whole pack
        rank_pairs = pairs_of(targets, rank_batch["shift_labels"])
        pairs += rank_pairs
        assert (layout.batch_to_count(rank_batch)["shift_labels"] != IGNORE_INDEX).sum() == len(rank_pairs)
    assert sorted(pairs) == sorted(pairs_of(expected, batch["labels"][:, 1:]))
    layouts = [rank_batch[LAYOUT_KEY] for rank_batch in rank_batches]
    counts = torch.cat([layout.row_counts(expected.trained) for layout in layouts], dim=1)
    assert torch.equal(counts, whole_layout.row_counts(expected.trained))
    whole_sizes, *part_sizes = (layout.sizes(expected.trained) for layout in (whole_layout, *layouts))
    assert sum(sizes.computed_rows for sizes in part_sizes) == whole_sizes.computed_rows
    assert [int(sizes.tokens) for sizes in part_sizes] == [int(whole_sizes.tokens)] * degree
    assert all(torch.equal(sizes.lengths, whole_sizes.lengths) for sizes in part_sizes)
    assert [layout.group.is_leader for layout in layouts] == [True] + [False] * (degree - 1)
    assert {layout.shares_rows for layout in layouts} == {whole_layout.shares_rows}
    assert len({layout.checksum for layout in layouts}) == 1


def pairs_of(targets, labels: Tensor) -> list[tuple[int, int]]:
    """Return (document, label) of each target."""
    values = targets.select(labels).flatten()
    pairs = torch.stack([targets.documents.flatten(), values], dim=1)
    return [(document, label) for document, label in pairs[values != IGNORE_INDEX].tolist()]


# What it survives


def entries() -> dict[str, dict]:
    documents = turns([6, 6, 3])
    layouts = {kind: make(pad_to_multiple_of=2)(documents) for kind, make in COLLATORS.items() if kind != "whole"}
    return layouts | {f"part of {kind}": parts_of(documents, kind, 2)[1][1] for kind in COLLATORS}


ENTRIES = pytest.mark.parametrize("batch", entries().values(), ids=entries())


def values_of(layout: Layout) -> dict:
    return {field.name: getattr(layout, field.name) for field in fields(layout)}


def is_same(one: Layout, another: Layout) -> bool:
    pairs = zip(values_of(one).values(), values_of(another).values(), strict=True)
    return type(one) is type(another) and all(
        torch.equal(*pair) if isinstance(pair[0], Tensor) else pair[0] == pair[1] for pair in pairs
    )


@ENTRIES
def test_a_loader_of_accelerate_moves_it(batch):
    values = values_of(send_to_device(batch, "meta")[LAYOUT_KEY])
    moved = {name: value.device.type for name, value in values.items() if isinstance(value, Tensor)}
    assert moved.pop("run_lengths", "cpu") == "cpu"
    assert set(moved.values()) == {"meta"}
    assert len(moved) >= 4
    assert find_batch_size(batch) == 1


@ENTRIES
def test_it_goes_through_processes_and_wrappers(batch):
    layout = batch[LAYOUT_KEY]
    assert is_same(pickle.loads(pickle.dumps(layout)), layout)
    (loaded,) = DataLoader([batch], batch_size=None, num_workers=1)
    assert is_same(loaded[LAYOUT_KEY], layout)

    def halved(value: Tensor) -> Tensor:  # as FSDP1 casts its inputs
        return value.bfloat16() if value.is_floating_point() else value

    assert is_same(_apply_to_tensors(halved, batch)[LAYOUT_KEY], layout)
    assert tree_map(lambda value: value, batch)[LAYOUT_KEY] is layout  # FSDP2


@ENTRIES
def test_questions_compile_to_one_graph(batch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def ask(values, layout):
        targets = layout.targets(values > 0)
        total = targets.select(values).sum() + layout.row_counts(targets.trained).sum()
        return total + sum(value.sum() for value in layout.attention_fields().values() if isinstance(value, Tensor))

    torch._dynamo.reset()
    values = torch.rand(batch["input_ids"].shape)
    compiled = torch.compile(ask, backend=backend, fullgraph=True)
    for _ in range(2):
        assert torch.allclose(compiled(values, batch[LAYOUT_KEY]), ask(values, batch[LAYOUT_KEY]))
    assert len(graphs) == 1


# Who knows what


def test_only_those_who_make_a_layout_know_its_class():
    """Everybody else asks `layout_of`, and so works with a new layout, too."""
    imports = re.compile(r"^ *from \.+layout import .*\b(SharedRowsLayout|PackedLayout|UnpackedLayout)\b", re.MULTILINE)
    modules = {name for name, path in MODULES.items() if imports.search(path.read_text())}
    assert not {name for name in modules if not name.startswith("features.")}
