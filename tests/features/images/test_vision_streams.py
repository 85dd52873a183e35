"""Packs of a stream with images: trained as unpacked, read as a table, bounded in memory, and restarted exactly."""

import json
from collections import Counter
from itertools import chain, islice
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset, Features, Image, IterableDataset, List, Value
from features.images.processed import documents_of, processor_of
from support.planners import assert_restarts_go_on, make_stream, one_pass, saved, saved_and_loaded
from support.vision import FEATURES, PICTURES, SGD, conversations, make, rows

from trl_packfix.data.stream import FinishedPacks, PackedStream
from trl_packfix.features.images.measures import measure
from trl_packfix.features.images.rows import ImageRows
from trl_packfix.features.images.stream import ENCODED, StreamImages
from trl_packfix.samples.conversation import COLUMNS
from trl_packfix.samples.texts import struct_columns, without_nulls
from trl_packfix.training.trainer_view import DataRanks

pytestmark = pytest.mark.slow

TABLE = rows(60, seed=4)
ROOM = 15_000  # bytes: about 8 documents of 1 to 2 images
PROCESS = processor_of("llava")


@pytest.fixture
def small_room(monkeypatch):
    """Give so little room that documents wait for others to come, as in a stream that does not fit into the buffer."""
    monkeypatch.setitem(PackedStream.__init__.__kwdefaults__, "most_bytes", ROOM)


def key(row) -> str:
    """Return the text of a row without the keys that Arrow added, by which it is told from the others."""
    return json.dumps(without_nulls({name: row[name] for name in row if name in COLUMNS}, struct_columns(FEATURES)))


# Training


def test_the_report_counts_the_images_of_the_packs_that_were_trained(small_room, tmp_path):
    settings = SGD | {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1, "packing_report": True}
    trainer = make(tmp_path, "qwen2_5_vl", TABLE.to_iterable_dataset(), **settings)
    trainer.train()
    report = trainer.packing_report
    trainer.get_train_dataloader()  # a stream from its beginning
    packs = list(islice(trainer.data.source.stream, SGD["max_steps"] * 2))
    number = {key(row): i for i, row in enumerate(TABLE.select_columns(["messages"]))}
    assert len(number) == len(TABLE)
    documents = [[number[document[ENCODED].text] for document in pack if ENCODED in document] for pack in packs]
    assert report.isolation.passed
    assert report.num_documents == sum(map(len, documents))
    images = [sum(len(TABLE[i]["images"]) for i in pack) for pack in documents]
    counted = report.images
    assert (counted.num_images, counted.most, counted.per_pack) == (sum(images), max(images), np.mean(images))
    assert sum(images) >= 20
    assert 0 < counted.tower_share < 1
    assert f"or {ROOM / 2**20:,.0f} MiB of encoded images, wait on a rank" in dict(report.lines())["images"]


# Documents


def streams_of(source: str, num_shards: int = 2) -> IterableDataset:
    if source == "decoded":  # a generator without features, whose rows have images of Pillow

        def generate(shards):
            for shard in shards:
                yield from ({"images": row["images"], "messages": row["messages"]} for row in TABLE.shard(2, shard))

        return IterableDataset.from_generator(generate, gen_kwargs={"shards": [0, 1]})
    # Images of one size: those of another document would have the right shapes
    dataset = (conversations(40) if source == "one size" else TABLE).to_iterable_dataset(num_shards)
    return dataset.shuffle(seed=1, buffer_size=10) if source == "shuffled" else dataset


def stream(dataset, process=PROCESS, most_bytes=ROOM, **settings) -> PackedStream:
    settings = {"batch_size": 1, "max_length": 200, "rows": StreamImages(process)} | settings
    return make_stream(dataset, most_bytes=most_bytes, **settings)


def content(document) -> tuple:
    """Return all that the model reads of a document."""
    return tuple((name, np.asarray(document[name]).tobytes()) for name in sorted(document))


def processed(packs, process=PROCESS):
    """Return [micro-batch][document], as the model reads them."""
    finished = FinishedPacks(StreamImages(process))
    return [[content(document) for document in finished.__getitems__(pack)] for pack in packs]


def test_keys_that_arrow_added_are_not_rendered():
    """Arrow gives all parts of messages the keys of one part, with the value None."""
    process = processor_of("llava")
    template = process.processor.chat_template
    assert "{{ part['text'] }}" in template
    process.processor.chat_template = template.replace("{{ part['text'] }}", "{{ part | tojson }}")
    answer = {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}
    table = []
    for part in ({"type": "text", "text": "what?"}, {"type": "text", "text": "who?", "note": "short"}):
        question = {"role": "user", "content": [{"type": "image"}, part]}
        table.append({"images": PICTURES[:1], "messages": [question, answer]})
    features_of_part = {name: Value("string") for name in ("type", "text", "note")}
    messages = List({"role": Value("string"), "content": List(features_of_part)})
    dataset = Dataset.from_list(table, features=Features({"images": List(Image()), "messages": messages}))
    assert dataset[0]["messages"][0]["content"][1] == {"type": "text", "text": "what?", "note": None}

    expected = [process(row)["input_ids"].tolist() for row in table]
    reader = ImageRows(dataset, process, measure(dataset, process, "train", num_proc=None, drops=False))
    assert [document["input_ids"].tolist() for document in documents_of(reader)] == expected
    packs = one_pass(stream(dataset.to_iterable_dataset(), process))
    finished = chain(*map(FinishedPacks(StreamImages(process)).__getitems__, packs))
    assert sorted(document["input_ids"].tolist() for document in finished) == sorted(expected)


@pytest.mark.parametrize(
    "source, settings",
    [
        ("decoded", {}),
        ("table", {"per_turn": True}),
        *(("table", {"max_length": 45, "overlong": overlong}) for overlong in ("truncate", "split", "drop")),
    ],
    ids=str,
)
def test_documents_are_those_of_the_table(source, settings, tmp_path):
    table = conversations() if "per_turn" in settings else TABLE
    trainer = make(tmp_path, "llava", table, **settings)
    spans = trainer.data.source.documents
    process = trainer.data.reading.process
    expected = [trainer.data.source.reader.read(*span) for span in zip(spans.row, spans.start, spans.stop, strict=True)]
    cuts = {name: value for name, value in settings.items() if name != "per_turn"}
    dataset = streams_of(source) if table is TABLE else table.to_iterable_dataset(2)
    packed = stream(dataset, process, rows=trainer.data.reading.stream_rows(), **cuts)
    streamed = Counter(chain(*processed(one_pass(packed), process)))
    assert streamed == Counter(map(content, expected))
    assert "per_turn" not in settings or streamed.total() == 18
    assert {name for document in streamed for name, _ in document} == {"input_ids", "labels", "pixel_values"}
    ledger = packed.state_after(packed.num_steps - 1)["counts"].ledger  # the last step of the pass
    assert ledger.to_dict() == spans.ledger.to_dict()
    assert bool(cuts) <= bool(ledger.dropped or ledger.split)


# Memory


def test_waiting_documents_are_bounded_by_the_bytes_of_their_images():
    """Read a chunk more at a time. The bound makes more packs only where nothing fits."""
    packed = stream(streams_of("table", 1), batch_size=2)
    waiting = []
    for _ in islice(packed, 20):
        rows_waiting = [document[ENCODED] for document in packed._waiting.values()]
        waiting.append(sum(row.num_bytes for row in rows_waiting))
        assert all(isinstance(image.data, bytes) for row in rows_waiting for image in row.images)
    largest_chunk = max(
        sum(len(image["bytes"]) for row in chunk["images"] for image in row) + 16 * 300
        for chunk in TABLE.cast_column("images", List(Image(decode=False))).iter(batch_size=16)
    )
    assert ROOM / 2 < max(waiting) < ROOM + largest_chunk
    unbounded = stream(streams_of("table", 1), batch_size=2, most_bytes=2**28)
    next(iter(unbounded))
    num_waiting = [len(unbounded.state_dict(step)["documents"]["lengths"]) for step in (0, 1)]
    assert num_waiting[0] == 0
    assert num_waiting[1] > 50, "there is no room"
    bounded, unbounded = (stream(streams_of("table", 1), batch_size=2, most_bytes=size) for size in (ROOM, 2**28))
    assert len([*one_pass(bounded)]) <= len([*one_pass(unbounded)]) + 1


def test_a_checkpoint_holds_encoded_images_once(tmp_path):
    """Three turns have the first image of their conversation, two the second; pixels are 3 and 12 times as large."""
    trainer = make(tmp_path, "llava", conversations(20).to_iterable_dataset(), per_turn=True, max_steps=1)
    packed = stream(trainer.train_dataset, rows=trainer.data.reading.stream_rows(), most_bytes=2**28)
    next(iter(packed))
    state = packed.state_dict(1)
    waiting = state["documents"]["lengths"]
    images = state["documents"]["images"]
    assert len(waiting) > 55
    assert sum(map(len, images["numbers"])) > 1.8 * len(images["paths"])
    encoded = sum(images["sizes"])
    pixels = sum(PROCESS(dict(row))["pixel_values"].nbytes for row in conversations(20))
    assert encoded < len(saved(state)) < encoded + 2000 * len(waiting) < pixels


# Restarts


@pytest.mark.processes
@pytest.mark.parametrize("source, workers", [("one size", 0), ("shuffled", 0), ("decoded", 0), ("table", 2)])
def test_a_restart_goes_on_with_the_same_batches(source, workers):
    """To the bit, images too."""

    def new_stream():
        return stream(streams_of(source), accumulation=2, num_workers=workers)

    assert_restarts_go_on(new_stream, processed, num_points=3)


@pytest.mark.parametrize("num_shards, before, after", [(2, 2, 1), (1, 2, 3), (2, 1, 2)])
def test_every_document_once_per_pass_on_other_ranks(num_shards, before, after):
    dataset = streams_of("one size", num_shards)
    counts = Counter()
    ranks = [stream(dataset, rank=rank, world_size=before) for rank in range(before)]
    for rank in ranks:
        counts.update(chain(*processed(islice(rank, 3))))
    states = [saved_and_loaded(rank.state_dict(3)) for rank in ranks]
    for number in range(after):
        rank = stream(dataset, rank=number, world_size=after)
        rank.load_state_dict(rank.merge_states(states))
        counts.update(chain(*processed(one_pass(rank))))
    expected = Counter(content(PROCESS(dict(row))) for row in conversations(40))
    assert {document: counts[document] for document in expected} == expected


def test_a_restart_with_another_processor_is_refused():
    state = stream(streams_of("table")).state_dict(0)
    process = processor_of("llava")
    process.processor.image_processor.image_mean = [0.1, 0.2, 0.3]
    with pytest.raises(ValueError, match=r"(?s)other settings: `image processor` was .*Set them back"):
        stream(streams_of("table"), process).merge_states([state])


def test_packs_stay_in_order_and_are_compared_in_every_step(tmp_path, caplog):
    """Compare every step: the first row of a stream may be the same on all ranks, and a later one not."""
    settings = SGD | {"max_steps": 9, "dataloader_num_workers": 1, "dataloader_in_order": False}
    trainer = make(tmp_path, "llava", streams_of("table"), **settings)
    loader = trainer.get_train_dataloader()
    assert "dataloader_in_order=False was given; packs with images of a stream stay in order" in caplog.text
    assert loader.in_order
    trainer.data.ranks = DataRanks.from_args(
        SimpleNamespace(process_index=0, world_size=2, tokens_per_rank=64), copies=1
    )
    trainer.training_objective.start_training()
    assert trainer.training_objective.num_steps_to_compare == 9


# Weights and sources, bad rows, evaluation


@pytest.mark.processes
def test_sources_of_a_stream_are_those_of_its_documents(tmp_path):
    names = [f"from {i % 3}" for i in range(len(TABLE))]
    table = TABLE.add_column("source", names).add_column("share", [float(1 + i % 2) for i in range(len(TABLE))])
    settings = SGD | {"max_steps": 2, "source_column": "source", "weight_column": "share"}
    trainer = make(tmp_path, "llava", table.to_iterable_dataset(), dataloader_num_workers=2, **settings)
    trainer.train()
    trainer.get_train_dataloader()
    documents = list(chain(*islice(trainer.data.source.stream, 1)))
    number = {key(row): i for i, row in enumerate(table.select_columns(["messages"]))}
    trained = Counter()
    for document in documents:
        assert document["document_sources"] == names[number[document[ENCODED].text]]
        assert document["document_weights"] == 1 + number[document[ENCODED].text] % 2
        trained[document["document_sources"]] += int((document["labels"][1:] != -100).sum())
    entry = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert {name: entry[f"trained_tokens/{name}"] for name in trained} == trained


def test_rows_that_cannot_be_processed_are_refused_or_dropped(tmp_path):
    table = TABLE.select(range(12)).cast_column("images", List(Image(decode=False))).to_list()
    bad = next(i for i, row in enumerate(table) if i > 2 and row["images"])
    table[bad]["images"][0]["bytes"] = b"no image"
    data = Dataset.from_list(table, features=FEATURES)
    trainer = make(tmp_path, "llava", data.to_iterable_dataset(), max_steps=1)
    with pytest.raises(ValueError, match=rf"(?s)Row {bad} of the train stream .*identify image.*`bad_rows=\"drop\"`"):
        trainer.train()
    trainer = make(tmp_path, "llava", data.to_iterable_dataset(), bad_rows="drop", max_steps=1)
    trainer.train()
    assert trainer.packing_report.ledger.dropped["bad_row"].documents == 1


def test_a_stream_is_evaluated_as_its_table(tmp_path):
    test = rows(10, seed=9).add_column("source", ["a", "b"] * 5)
    trainer = make(tmp_path, "llava", TABLE.to_iterable_dataset(), max_steps=1, source_column="source", bad_rows="drop")
    for packing in (True, False):
        trainer.args.eval_packing = packing
        table_losses, stream_losses = (
            {name: value for name, value in trainer.evaluate(held_out).items() if name.startswith("eval_loss")}
            for held_out in (test, test.to_iterable_dataset())
        )
        assert len(table_losses) == 3
        assert stream_losses == table_losses
    with pytest.raises(ValueError, match="yielded 0 examples"):
        trainer.evaluate(test.to_iterable_dataset().filter(lambda row: False))
