"""Images in shared prefixes: compared by content, through the tower once, proved, and trained as unpacked TRL does."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from features.images.processed import examples_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ranks import faults
from support.runs import logged, proved
from support.shared_rows import detach_keys
from support.vision import PICTURES, QUESTIONS, SGD, build_model, make

from trl_packfix.data.loaders import PackCollator
from trl_packfix.features.images.examples import ImageExamples
from trl_packfix.features.prefixes.collator import PrefixCollator
from trl_packfix.features.prefixes.savings import estimated_savings
from trl_packfix.features.prefixes.sharing import PrefixSharing
from trl_packfix.features.prefixes.tokens import token_order
from trl_packfix.isolation.check_isolation import check_packs
from trl_packfix.layout import LAYOUT_KEY, layout_of
from trl_packfix.reporting.packs import first_packs

pytestmark = pytest.mark.slow

FAMILIES = ("llava", "qwen2_5_vl", "idefics3")


@cache
def sharing(examples: ImageExamples, **more) -> PackCollator:
    return PackCollator(PrefixCollator(min_shared=1, compare=examples.process.compare, **more), examples.images)


# Collating

TEXT = st.lists(st.sampled_from([7, 8]), min_size=1, max_size=4).map(torch.tensor)
DOCUMENT = st.lists(st.one_of(TEXT, st.sampled_from(PICTURES)), min_size=1, max_size=4)


def images_of_rows(examples: ImageExamples, ids: torch.Tensor, pixels: torch.Tensor | None) -> list[int | None]:
    """Return the hash of the image whose placeholder is in each row, if images fill placeholders in their order."""
    is_image = ids == examples.processor.image_token_id
    hashes = [] if pixels is None else [hash(image.numpy().tobytes()) for image in pixels]
    assert is_image.sum() == 16 * len(hashes)
    places = is_image.cumsum(0) - 1
    return [hashes[place // 16] if here else None for place, here in zip(places.tolist(), is_image, strict=True)]


A, B = PICTURES[:2]
SEVEN = torch.tensor([7])
EIGHT = torch.tensor([8])


@settings(max_examples=60)
@example([[A, SEVEN], [A, EIGHT]], None)  # they differ right behind the image
@example([[SEVEN, A, SEVEN, B], [SEVEN, A, EIGHT, B]], None)  # and between two images
@example([[A, SEVEN, B], [A, SEVEN, A, EIGHT], [A, SEVEN, B, SEVEN, A]], None)  # images of one document are split
@example([[A, B], [A, A], [B, A]], 8)
@given(st.lists(DOCUMENT, min_size=2, max_size=6), st.sampled_from([None, 8]))
def test_every_document_has_its_own_images(contents, multiple):
    """Rows of a document have its tokens and its images, wherever these were computed.

    No run may begin inside an image.
    """
    examples = examples_of("llava")
    documents = [examples.join_content(content) for content in contents]
    collate = sharing(examples, pad_to_multiple_of=multiple)
    batch = collate(documents)
    layout = layout_of(collate(documents))
    shown = images_of_rows(examples, batch["input_ids"][0], batch.get("pixel_values"))
    for i, document in enumerate(documents):
        ids = torch.as_tensor(document["input_ids"])
        rows = layout.predicting_rows(i)
        assert torch.equal(batch["input_ids"][0, rows], ids[:-1])
        assert [shown[row] for row in rows] == images_of_rows(examples, ids, document.get("pixel_values"))[:-1]
    for i, first, before, num in collate.text_collator.collate(documents)[1]:
        is_image = torch.as_tensor(documents[i]["input_ids"]) == examples.processor.image_token_id
        assert not is_image[first] or is_image[:first].sum() % 16 == 0
        assert before <= num <= is_image.sum() // 16
        assert num == 0 or before in (0, num) or num > 1


@pytest.mark.parametrize("family", [*FAMILIES, "internvl", "llava_next"])
def test_images_of_one_document_are_shared_one_by_one(family):
    """Three documents of a conversation that grows by a screenshot per turn must need three images, not six."""
    examples = examples_of(family)
    head = torch.arange(20, 40)
    between = torch.arange(40, 45)
    screens = [examples.image(48, 48) for _ in range(3)]
    turns = [head, screens[0], between, screens[1], between, screens[2]]
    documents = [examples.join_content([*turns[:stop], between[:2], torch.tensor([4, 3])]) for stop in (2, 4, 6)]
    collate = sharing(examples)
    batch = collate(documents)
    longest = documents[2]
    assert batch["pixel_values"].shape == longest["pixel_values"].shape
    assert batch["input_ids"].shape[1] <= len(longest["input_ids"]) + 8
    _, document_runs = collate.text_collator.collate(documents)
    assert any(0 < each_run.images_before < each_run.num_images for each_run in document_runs), "no image is split off"


def test_an_image_for_the_tower_alone_counts_nothing():
    """Guard the counts in the log: with a document that stands in for images they are those of the others."""
    examples = examples_of("llava")
    texts = [examples.join_content([torch.arange(20, 40), torch.tensor(end)]) for end in ([3, 4], [5, 6, 7], [8, 9])]
    collate = sharing(examples)
    content = replace(examples.images, placeholder=examples.placeholder())
    added = replace(collate, content=content)(texts)
    assert len(added["pixel_values"]) == 1
    with_image, stock = (
        layout_of(batch).sizes(layout_of(batch).targets(batch["labels"][:, 1:] != -100).trained)
        for batch in (added, collate(texts))
    )
    assert with_image.tokens == stock.tokens == 67
    assert with_image.computed_rows == stock.computed_rows < 67
    assert with_image.shared_tokens.sum() == stock.shared_tokens.sum() > 0


# The proof


def proved_llava():
    """Return a model that is proved for documents packed whole, bare and as it is set up for packs."""
    model = build_model("llava")
    return model, proved(model, max_length=512, feature=PrefixSharing("pack", examples_of("llava")))[0]


IN_IMAGES = ("compared_by_placeholder", "images_of_other_rows", "first_images_again")


@pytest.mark.parametrize("fault", IN_IMAGES)
def test_the_probe_sees_images_of_others(fault):
    with faults.ONE[fault]():
        model, packed = proved_llava()
        assert packed.is_proved, "documents packed whole are right"
        with_images, text = (
            check_packs(model, 512, user_attention=packed.attention.previous, feature=feature)
            for feature in (packed.feature, PrefixSharing("pack"))
        )
        assert not with_images.passed
        assert with_images.error is None
        assert max(with_images.max_change, with_images.max_difference) > 100 * with_images.tolerance
        assert packed.prove_feature(model).startswith("where documents share prefixes, ")
        assert text.passed, "text alone shows nothing"


def test_the_probe_sees_images_without_a_gradient():
    """States are right, but in packs that share rows no gradient reaches the images."""
    model, packed = proved_llava()
    placeholder = packed.feature.plain.processor.image_token_id
    is_image = []

    def note(module, args, kwargs):
        is_image[:] = [kwargs["input_ids"][0] == placeholder]

    model.register_forward_pre_hook(note, with_kwargs=True)
    detach_keys(model.base_model.language_model.layers, lambda pack: is_image[0])
    report = check_packs(model, 512, user_attention=packed.attention.previous, feature=packed.feature)
    assert (report.equal, report.isolated) == (True, False)
    assert report.max_gradient > 1e-2


# Training

SHARED = {"packing_strategy": "minibatch", "share_prefixes": "pack", "per_device_train_batch_size": 8, "max_steps": 4}


def computed_rows(trainer) -> list[tuple[int, int, int]]:
    """Return of each pack of the first epoch its rows, the rows of its units as planned, and its number of units."""
    source = trainer.data.source
    schedule = source.planner.schedule(0)
    units = source.planner.units()
    documents = source.documents
    unit_of_document = np.empty(len(documents), dtype=np.int64)
    unit_of_document[units.order] = units._piece_numbers
    collate = trainer.data.packed_collator(1, PrefixSharing("pack"))
    rows = []
    for pack in filter(len, np.split(schedule.order, schedule.offsets[1:-1])):
        batch = collate([source.reader.read(documents.row[i], documents.start[i], documents.stop[i]) for i in pack])
        units_of_pack = np.unique(unit_of_document[pack])
        rows.append((batch["input_ids"].shape[1], int(units.rows[units_of_pack].sum()), len(units_of_pack)))
    return rows


def test_a_family_is_planned_with_the_rows_that_it_has(tmp_path):
    """Documents that share an image are one unit."""
    trainer = make(tmp_path, "llava", QUESTIONS, packing_strategy="bfd", share_prefixes="family", max_length=128)
    trainer.get_train_dataloader()
    rows = computed_rows(trainer)
    planner = trainer.data.source.planner
    assert all(computed <= planned <= planner.packing.capacity for computed, planned, _ in rows)
    # the last token of a document that another begins with has no row
    assert all(planned - computed <= 2 for computed, planned, num in rows if num == 1)
    units = planner.units()
    assert len(units) < 12
    assert units.rows.sum() < 0.6 * trainer.data.source.documents.lengths.sum()
    costs = planner.image_costs
    assert units.image_costs.sum() == pytest.approx(len(units) / len(costs) * costs.sum(), rel=0.2)
    text = dict(trainer.packing_report.lines())["common prefixes"]
    assert f"24 documents in {units.num_families} families" in text


def without_now(row):
    """Return the row with the question right behind the image."""
    user, answer = row["messages"]
    content = [entry | {"text": entry["text"] and entry["text"].removeprefix(" now ")} for entry in user["content"]]
    return {"messages": [user | {"content": content}, answer]}


def test_a_family_that_parts_behind_an_image_computes_the_image_again(tmp_path):
    """Because a shared token has one next token, the last token of the image is not shared; no run begins inside it."""
    data = QUESTIONS.map(without_now, features=QUESTIONS.features)
    trainer = make(tmp_path, "llava", data, packing_strategy="bfd", share_prefixes="family", max_length=128)
    trainer.get_train_dataloader()
    rows = computed_rows(trainer)
    assert all(computed <= planned for computed, planned, _ in rows)
    trainer.data.source.reader.shorten_common_beginnings = lambda rows, start, common: common
    documents = trainer.data.source.documents
    tokens = token_order(trainer.data.source.reader, documents)
    assert (tokens.common > documents.token_order.common).sum() > 3, "no two documents part behind an image"


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_training_computes_what_plan_estimates(family, tmp_path):
    trainer = make(tmp_path, family, QUESTIONS, **(SGD | SHARED))
    num_images = []
    fetch = trainer.get_batch_samples

    def counted(*args):
        batches, num_items = fetch(*args)
        num_images.extend(len(batch["pixel_values" if family == "llava" else "image_grid_thw"]) for batch in batches)
        return batches, num_items

    trainer.get_batch_samples = counted
    trainer.train()
    shares = logged(trainer, "computed_share")
    assert trainer.data.shares_rows
    assert max(num_images) <= 3
    assert max(shares) < 0.7
    # of the three steps of an epoch; the fourth begins another
    report = estimated_savings(trainer.data.source.planner, trainer.data.source.reader)
    assert report.num_packs is None
    assert report.images == sum(num_images[:3]) / 24
    tokens = np.diff([0, *logged(trainer, "num_tokens")])[:3]
    assert report.rows == pytest.approx(np.average(shares[:3], weights=tokens), abs=1e-4)
    assert report.flops < 0.6
    assert report.num_families == 3, "one for each picture"
    assert report.in_families < report.rows
    text = dict(replace(trainer.packing_report, prefixes=report).lines())["common prefixes"]
    assert text.endswith(" of the images are computed")


def test_show_draws_the_runs_that_are_trained(tmp_path):
    trainer = make(tmp_path, "llava", QUESTIONS, **SHARED)
    loader = trainer.get_train_dataloader()
    (pack,) = first_packs(trainer.data.source.planner, trainer.data.source.reader, num_packs=1)
    batch = next(iter(loader))
    assert pack.cu_seq_lens == batch["cu_seq_lens_q"].tolist()
    assert pack.cu_seq_lens_k == batch["cu_seq_lens_k"].tolist()
    assert [document.num_images for document in pack.documents] == [1] * 8
    assert sorted(document.shared for document in pack.documents) == sorted(batch[LAYOUT_KEY].shared.tolist())
