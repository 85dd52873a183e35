"""Streams: every document once per pass on all ranks, in arrival order, cut by the one rule, restarted exactly."""

import gc
import json
import multiprocessing
import re
import time
import tracemalloc
from collections import Counter
from itertools import chain, count, islice

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset, concatenate_datasets, interleave_datasets
from datasets.distributed import split_dataset_by_node
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import build_tiny_model
from support.planners import assert_restarts_go_on, make_stream, one_pass, saved_and_loaded
from support.runs import all_documents, build_trainer, documents_of, run_training, texts
from support.versions import continues_streams
from transformers import TrainerCallback

from trl_packfix.data.dataset_checks import check_boundaries
from trl_packfix.data.documents import make_documents
from trl_packfix.data.reader import TokenReader
from trl_packfix.data.stream_reader import CHUNK, StreamRows, read_whole
from trl_packfix.planning.exact_fill import StreamPacker
from trl_packfix.planning.packing import CONFIG_NAMES
from trl_packfix.planning.packs import plan_stream
from trl_packfix.training.stream_source import resume_stream_at, stream_file

pytestmark = pytest.mark.slow

FIRST_ID = 10  # a document is its number + FIRST_ID, repeated


def numbered(lengths) -> Dataset:
    return Dataset.from_dict({"input_ids": [[i + FIRST_ID] * int(n) for i, n in enumerate(lengths)]})


def drawn(num: int, longest: int = 40, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, longest + 1, num)


def numbers(micro_batch) -> list[int]:
    """Return the numbers of the documents of a micro-batch; the dummy of an empty one has none."""
    return [int(d["input_ids"][0]) - FIRST_ID for d in micro_batch if d["input_ids"][0] >= FIRST_ID]


@pytest.mark.parametrize(
    "num_shards, tokens_per_rank, degrees", [(1, 32, (1, 2, 4)), (2, 32, (2,)), (4, 64, (1,)), (4, 16, (1, 2, 4))]
)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_ranks_of_a_group_read_the_same_packs_of_all_degrees(num_shards, tokens_per_rank, degrees, accumulation):
    """Documents are counted in `test_every_document_once_per_pass_over_any_sequence_of_launches`."""
    lengths = np.concatenate([drawn(150, 12), drawn(50, 64)])[np.random.default_rng(1).permutation(200)]
    dataset = numbered(lengths).to_iterable_dataset(num_shards)
    degrees_seen = set()
    size = {"batch_size": 1, "max_length": 64, "buffer_size": 30, "accumulation": accumulation, "world_size": 4}
    streams = [make_stream(dataset, rank=rank, tokens_per_rank=tokens_per_rank, **size) for rank in range(4)]
    passes = [list(one_pass(stream)) for stream in streams]
    for rank, (stream, packs) in enumerate(zip(streams, passes, strict=True)):
        assert stream.packing.degrees == degrees
        for number, pack in enumerate(packs):
            assert pack.group.rank == rank % pack.group.size
            degrees_seen.add(pack.group.size)
            assert numbers(pack) == numbers(passes[rank - pack.group.rank][number])
        assert sum(stream.state_after(stream.num_steps - 1)["micro_steps"].values()) == len(packs)
    assert degrees_seen == set(degrees)
    fewest = lengths.sum() / (4 * tokens_per_rank)
    assert min(map(len, passes)) <= 1.4 * fewest + accumulation, "packs are not full"


@pytest.mark.parametrize("buffer_size", [1, 20, 1000])
def test_the_packs_are_those_of_the_plan_in_arrival_order(buffer_size):
    lengths = drawn(700)
    stream = make_stream(numbered(lengths).to_iterable_dataset(), batch_size=5, max_length=40, buffer_size=buffer_size)
    plan = plan_stream(lengths, 200, order=np.arange(700), buffer_size=buffer_size)
    packs = [plan.order[a:b].tolist() for a, b in zip(plan.offsets[:-1], plan.offsets[1:], strict=True)]
    assert [*map(numbers, one_pass(stream))] == packs


@pytest.mark.processes
def test_workers_share_the_shards_and_duplicate_nothing():
    for num_shards, num_workers in ((1, 1), (3, 2)):
        dataset = numbered(drawn(600)).to_iterable_dataset(num_shards)
        stream = make_stream(dataset, batch_size=2, max_length=40, num_workers=2)
        assert stream.num_workers == num_workers
        assert sorted(chain.from_iterable(map(numbers, one_pass(stream)))) == list(range(600))


def wait_for_row(row, slow_row):
    """Take a second for one row, as a function for `map`."""
    if row["input_ids"] == slow_row:
        time.sleep(1)
    return row


def test_ranks_that_share_a_stream_read_it_in_one_order_whichever_worker_is_first():
    """A slow worker is another one on each of two ranks."""
    packs = []
    for rank in range(2):
        dataset = Dataset.from_dict({"input_ids": [[10 + i] * 2 for i in range(9)]}).to_iterable_dataset(3)
        slow_row = [[10] * 2, [13] * 2][rank]  # the first row of the shards of one worker
        dataset = dataset.map(wait_for_row, fn_kwargs={"slow_row": slow_row})
        options = {"num_workers": 2, "worker_kwargs": {"in_order": False}, "rank": rank, "world_size": 2}
        stream = make_stream(dataset, batch_size=1, max_length=2, buffer_size=2, **options)
        assert stream.ranks_per_share == 2
        packs.append([numbers(pack) for pack in one_pass(stream)])
    assert sorted(chain(*chain(*packs))) == list(range(9))


def test_what_would_lose_documents_is_refused(caplog):
    dataset = numbered(drawn(50)).to_iterable_dataset()
    with pytest.raises(ValueError, match=r"(?s)split by node already.*2 nodes.*be lost.*whole dataset"):
        make_stream(split_dataset_by_node(dataset, 0, 2), batch_size=2, max_length=40, rank=0, world_size=2)
    assert not caplog.records
    make_stream(dataset, batch_size=2, max_length=40, rank=0, world_size=9)
    assert "1 shards, which 9 ranks cannot share evenly" in caplog.text


def test_nothing_is_remembered_of_documents_that_are_gone(monkeypatch):
    remembered = 4096
    num = 20 * 4096
    buffer_size = 50
    monkeypatch.setattr("trl_packfix.planning.exact_fill.MAX_REMEMBERED", remembered)
    lengths = drawn(num, 100).tolist()
    counted = np.zeros(num, dtype=np.int64)
    tracemalloc.start()
    for pack in StreamPacker(iter(lengths), 200, buffer_size, longest=100):
        counted[pack] += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (counted == 1).all()
    assert peak < 4 * num, "a list of all lengths would take 8 bytes for each"


def test_no_more_than_the_buffer_and_a_chunk_waits():
    stream = make_stream(numbered(drawn(1500)).to_iterable_dataset(), batch_size=2, max_length=40, buffer_size=100)
    for _ in islice(stream, 100):
        state = stream.state_dict(stream.num_steps)
        assert 100 <= len(state["documents"]["lengths"]) <= 100 + CHUNK
    assert stream.num_steps == 100


@pytest.mark.parametrize("overlong", ["truncate", "split", "drop"])
@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_documents_are_cut_as_those_of_a_table(overlong, mode):
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 99, n).tolist() for n in rng.integers(0, 60, 400)]
    labels = [[t if rng.random() < 0.1 else -100 for t in row] for row in tokens]
    table = Dataset.from_dict({"input_ids": tokens, "labels": labels})
    reader = TokenReader(table)
    spans = make_documents(reader, 25, overlong, truncation_mode=mode)
    expected = [reader.read(*span) for span in zip(spans.row, spans.start, spans.stop, strict=True)]
    dataset = table.to_iterable_dataset(2)
    stream = make_stream(dataset, batch_size=1, max_length=25, overlong=overlong, truncation_mode=mode, buffer_size=10)
    documents = []
    for batch in one_pass(stream):
        documents += batch
        ledger = stream.state_after(stream.num_steps)["counts"].ledger

    def in_order(documents):
        return sorted((document["input_ids"].tolist(), document["labels"].tolist()) for document in documents)

    assert in_order(documents) == in_order(expected)
    assert ledger.to_dict() == spans.ledger.to_dict()
    assert ledger.dropped["untrained"].documents, "nothing was dropped"


@pytest.mark.parametrize(
    "columns, settings, message",
    [
        (
            {"input_ids": [[5] * 9, [6] * 30]},
            {"overlong": "raise"},
            r"rows 1 \(30 tokens\).*A stream: rows are counted",
        ),
        ({"input_ids": [[5, 6], [7, 300]]}, {"rows": StreamRows(300)}, r"Row 1 .* ids from 7 to 300"),
        ({"input_ids": [[5, 6]], "attention_mask": [[1, 0]]}, {"rows": StreamRows(300)}, "is padded"),
        ({"input_ids": [[5, 6]], "position_ids": [[0, 0]]}, {"rows": StreamRows(300)}, "`position_ids` that begin"),
        ({"input_ids": [[5, 6]], "labels": [[5, 300]]}, {"rows": StreamRows(300)}, "Row 0 .* labels from 5 to 300"),
        ({"input_ids": [[5], [6]]}, {}, r"Rank 0 read the stream to its end and 2 documents.*2 untrained"),
        ({"text": ["a"]}, {}, "no `input_ids`"),
    ],
)
def test_bad_documents_are_refused_when_they_come(columns, settings, message):
    dataset = Dataset.from_dict(columns).to_iterable_dataset()
    with pytest.raises(ValueError, match=f"(?s){message}"):
        list(islice(make_stream(dataset, batch_size=1, max_length=20, **settings), 3))


TABLE = numbered(drawn(700))
SIZE = {"batch_size": 2, "max_length": 64, "buffer_size": 60}


def generate(starts, stops):
    for start, stop in zip(starts, stops, strict=True):
        yield from ({"input_ids": row} for row in TABLE["input_ids"][start:stop])


SHARDS = {"starts": [0, 200, 500, 503], "stops": [200, 500, 503, 700]}
SOURCES = {
    "table": lambda: TABLE.to_iterable_dataset(3),
    "generator": lambda: IterableDataset.from_generator(generate, gen_kwargs=SHARDS),
    "mapped in batches": lambda: (
        TABLE.to_iterable_dataset(3)
        .map(lambda rows: {"labels": rows["input_ids"]}, batched=True, batch_size=50)
        .filter(lambda row: row["input_ids"][0] % 5)
    ),
    "shuffled": lambda: TABLE.to_iterable_dataset(3).shuffle(seed=1, buffer_size=100),
    "shuffled, then mapped": lambda: (
        TABLE.to_iterable_dataset(3).shuffle(seed=1, buffer_size=100).map(lambda row: {"labels": row["input_ids"]})
    ),
    "concatenated": lambda: concatenate_datasets([TABLE.to_iterable_dataset(2), TABLE.to_iterable_dataset(2)]),
    "interleaved": lambda: interleave_datasets([TABLE.to_iterable_dataset(2)] * 2, probabilities=[0.7, 0.3], seed=0),
    "torch tensors": lambda: TABLE.to_iterable_dataset(3).with_format("torch"),
    "arrow": lambda: TABLE.to_iterable_dataset(3).with_format("arrow").map(lambda t: t, batched=True).with_format(None),
}


RESTARTED = [("table", 0, 8), ("shuffled", 0, 8), ("table", 2, 3), ("shuffled", 2, 3), ("concatenated", 2, 3)]
RESTARTED += [(name, 0, 3) for name in SOURCES if name not in ("table", "shuffled")]
RESTARTED += [("table shared by ranks", 0, 8), ("generator shared by ranks", 2, 3)]


@pytest.mark.processes
@pytest.mark.parametrize("source, workers, num_points", RESTARTED)
def test_a_restart_goes_on_with_the_same_batches(source, workers, num_points):
    source, _, shared = source.partition(" shared by ")
    parallel = {"rank": 3, "world_size": 4, "batch_size": 1, "tokens_per_rank": 32} if shared else {}

    def new_stream():
        return make_stream(SOURCES[source](), **SIZE | {"accumulation": 2, "num_workers": workers} | parallel)

    assert_restarts_go_on(new_stream, lambda batches: [numbers(batch) for batch in batches], num_points)


@continues_streams
def test_a_restart_keeps_the_ledger_and_reads_nothing_twice():
    read = []

    def source():
        return TABLE.to_iterable_dataset().map(lambda row: read.append(row["input_ids"][0]) or row)

    cut = make_stream(source(), **SIZE)
    list(islice(cut, 30))
    state = cut.state_dict(30)
    assert len(read) >= 200
    read.clear()
    resumed = make_stream(source(), **SIZE)
    resumed.load_state_dict(state)
    next(iter(resumed))
    assert FIRST_ID not in read
    assert len(read) <= 2 * CHUNK
    assert resumed.state_after(31)["counts"].packs == 31
    assert resumed.state_after(30)["counts"] == cut.state_after(30)["counts"]


@pytest.mark.parametrize(
    "changed", [{"max_length": 65}, {"buffer_size": 61}, {"tokens_per_rank": 64}, {"overlong": "drop", "world_size": 2}]
)
def test_a_restart_under_other_settings_is_refused(changed):
    state = make_stream(SOURCES["table"](), **SIZE).state_dict(0)
    now = make_stream(SOURCES["table"](), **SIZE | changed)
    assert not now.can_continue(state)
    message = r"(?s)other settings: .* was .* and is .*Set them back.*`ignore_data_skip=True`"
    with pytest.raises(ValueError, match=message):
        now.merge_states([state])


def test_ranks_of_a_checkpoint_of_an_earlier_version_cannot_be_changed():
    state = make_stream(SOURCES["table"](), **SIZE).state_dict(0)
    earlier = {name: value for name, value in state.items() if name not in ("parts", "share", "rest", "count")}
    fields = {name: field for field, name in CONFIG_NAMES.items()}
    earlier["settings"] = {fields.get(name, name): value for name, value in state["settings"].items()}
    del earlier["settings"]["strategy"]
    make_stream(SOURCES["table"](), **SIZE).load_state_dict(earlier)
    with pytest.raises(ValueError, match="`world_size` was 1 and is 2"):
        make_stream(SOURCES["table"](), rank=1, world_size=2, **SIZE).merge_states([earlier])


LAUNCH = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 25))  # ranks, accumulation, steps


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 30), min_size=8, max_size=300),
    num_shards=st.integers(1, 8),
    launches=st.lists(LAUNCH, min_size=2, max_size=4),
    source=st.sampled_from(["plain", "shuffled", "filtered"]),
    tokens_per_rank=st.sampled_from([None, None, 16]),
)
def test_every_document_once_per_pass_over_any_sequence_of_launches(
    lengths, num_shards, launches, source, tokens_per_rank
):
    """Ranks come and go within a pass, and own their shards or share the stream."""
    table = numbered(lengths)
    counted = Counter()
    states = None
    step = 0
    dataset = table.to_iterable_dataset(num_shards)
    if source == "shuffled":
        dataset = dataset.shuffle(seed=1, buffer_size=20)
    elif source == "filtered":
        dataset = dataset.filter(lambda row: True)
    for number, (num_ranks, accumulation, num_steps) in enumerate(launches, 1):
        is_last = number == len(launches)
        size = {"batch_size": 2} if tokens_per_rank is None else {"batch_size": 1, "tokens_per_rank": tokens_per_rank}
        size |= {"max_length": 30, "buffer_size": 20, "accumulation": accumulation}
        world_size = num_ranks * (1 if tokens_per_rank is None else 2)
        ranks = [make_stream(dataset, rank=i, world_size=world_size, **size) for i in range(world_size)]
        if states is not None:
            for rank in ranks:
                rank.load_state_dict(rank.merge_states(states))
        last = max(rank.num_passes for rank in ranks) + 2  # the rest of the pass, and one of these ranks
        for rank in ranks:
            batches = iter(rank)
            for _ in count() if is_last else range(num_steps):
                micro_batches = list(islice(batches, accumulation))
                if is_last and rank.num_passes >= last:
                    break
                assert len(micro_batches) == accumulation
                once = [batch for batch in micro_batches if batch.group.is_leader]
                for batch in once:
                    tokens = sum(lengths[document] for document in numbers(batch))
                    assert tokens <= (60 if tokens_per_rank is None else 16 * batch.group.size)
                counted.update(chain.from_iterable(map(numbers, once)))
        step += num_steps
        if not is_last:
            states = [saved_and_loaded(rank.state_dict(step)) for rank in ranks]
    assert (ranks[0].ranks_per_share == 1) == (num_shards % world_size == 0) or tokens_per_rank is not None
    assert counted == dict.fromkeys(range(len(lengths)), last)


@pytest.mark.processes
def test_workers_read_the_rest_of_a_pass_and_a_restart_within_it_is_exact():
    dataset = TABLE.to_iterable_dataset(4)
    ranks = [make_stream(dataset, rank=rank, world_size=2, num_workers=2, **SIZE) for rank in range(2)]
    counted = Counter(chain.from_iterable(numbers(batch) for rank in ranks for batch in islice(rank, 5)))
    states = [saved_and_loaded(rank.state_dict(5)) for rank in ranks]
    unbroken = make_stream(dataset, num_workers=2, **SIZE)
    unbroken.load_state_dict(unbroken.merge_states(states))
    expected = []
    for batch in one_pass(unbroken):
        expected.append(numbers(batch))
        if unbroken.num_steps == 9:
            state = saved_and_loaded(unbroken.state_dict(9))
    assert len(state["parts"]) == 4
    assert len(expected) > 10
    counted.update(chain.from_iterable(expected))
    assert counted == dict.fromkeys(range(len(TABLE)), 1)
    again = make_stream(dataset, num_workers=2, **SIZE)
    assert again.can_continue(state)
    again.load_state_dict(state)
    assert [numbers(batch) for batch in islice(again, len(expected) - 4)] == expected[4:]


@pytest.mark.processes
def test_the_processes_of_a_stream_end_when_it_is_closed():
    """Without the garbage collector, which ends a loader's processes in any order, after seconds for each."""
    before = set(multiprocessing.active_children())
    batches = iter(make_stream(TABLE.to_iterable_dataset(4), num_workers=2, **SIZE))
    gc.disable()
    try:
        next(batches)
        assert len(set(multiprocessing.active_children()) - before) == 2
        batches.close()
        assert set(multiprocessing.active_children()) == before
    finally:
        gc.enable()


def test_documents_keep_their_sources_and_weights_on_other_ranks():
    values = {"source": [f"from {i % 3}" for i in range(len(TABLE))], "share": [float(i) for i in range(len(TABLE))]}
    table = Dataset.from_dict({"input_ids": TABLE["input_ids"]} | values)
    size = SIZE | {"source_column": "source", "weight_column": "share"}
    dataset = table.to_iterable_dataset(2)
    ranks = [make_stream(dataset, rank=rank, world_size=2, **size) for rank in range(2)]
    for rank in ranks:
        list(islice(rank, 3))
    one = make_stream(dataset, **size)
    one.load_state_dict(one.merge_states([saved_and_loaded(rank.state_dict(3)) for rank in ranks]))
    documents = list(chain.from_iterable(islice(one, 20)))
    assert len(documents) > 60
    for document in documents:
        (number,) = numbers([document])
        assert document["document_sources"] == f"from {number % 3}"
        assert document["document_weights"] == number


FORMS = {
    "text": lambda: texts(),
    "packs": lambda: Dataset.from_dict({"input_ids": [[9, 8, 7, 6, 5], [4, 3]], "seq_lengths": [[2, 3], [2]]}),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_stream_trains_on_the_documents_of_the_table(form, tmp_path):
    table = build_trainer(tmp_path, FORMS[form]())
    expected = all_documents(table)
    trainer = build_trainer(tmp_path, FORMS[form]().to_iterable_dataset(), max_steps=2)
    documents = []
    for batch in trainer.get_train_dataloader():
        documents += documents_of(batch)
        if len(documents) >= len(expected):
            break
    assert sorted(documents) == expected
    trainer.train()
    assert trainer.state.global_step == 2
    assert np.isfinite(trainer.state.log_history[-1]["train_loss"])


def test_the_report_counts_the_tokens_that_were_trained_not_those_that_were_read(tmp_path):
    rng = np.random.default_rng(0)
    rows = [rng.integers(4, 260, n) for n in rng.integers(2, 40, 300)]
    labels = [np.where(rng.random(len(row)) < 0.6, row, -100) for row in rows]
    stream = Dataset.from_dict({"input_ids": rows, "labels": labels}).to_iterable_dataset()
    unbroken = build_trainer(tmp_path, stream, max_steps=5, save_steps=2)
    trained = []

    def counted(batch, collate=unbroken.data_collator):
        batch = collate(batch)
        trained.append(int((batch["labels"] != -100).sum()))
        return batch

    unbroken.data_collator = counted
    unbroken.train()
    report = unbroken.packing_report
    assert report.num_trained_tokens == sum(trained[2:7])  # behind two packs of the first step; the loader looks ahead
    assert 0 < report.num_trained_tokens < report.ledger.kept.trained_tokens / 4, "most of what was read waits"
    assert f"({report.num_trained_tokens:,} trained) in 5 packs" in dict(report.lines())["trained"]
    saved = torch.load(stream_file(tmp_path / "checkpoint-2", 0), weights_only=True)
    assert saved["counts"]["trained_tokens"] == sum(trained[2:4])
    resumed = run_training(tmp_path / "resumed", stream, max_steps=5, checkpoint=tmp_path / "checkpoint-2")
    assert resumed.packing_report.num_trained_tokens == report.num_trained_tokens
    assert resumed.packing_report.ledger == report.ledger
    assert resumed.state.epoch == unbroken.state.epoch


def test_a_checkpoint_without_a_position_of_the_stream_is_refused(tmp_path):
    saved = run_training(tmp_path, texts().to_iterable_dataset(), max_steps=1, save_steps=1)
    stream = make_stream(texts().to_iterable_dataset(), batch_size=2, max_length=64, rank=1, world_size=2)
    stream_file(tmp_path / "checkpoint-1", 0).unlink()
    with pytest.raises(ValueError, match=r"on 2 ranks and has no `packed_stream_0.pt`.* of rank 0\. .*Copy all of it"):
        resume_stream_at(stream, str(tmp_path / "checkpoint-1"), 1, num_skipped=1, ignore_data_skip=False)
    with pytest.raises(ValueError, match=r"its file `packed_stream_0.pt` is missing.*part of its state"):
        saved.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_ignore_data_skip_begins_the_stream_anew_and_can_be_saved_again(tmp_path):
    common = {"max_steps": 6, "save_steps": 2}
    run_training(tmp_path, texts(60).to_iterable_dataset(), **common)
    run_training(
        tmp_path / "anew",
        texts(60).to_iterable_dataset(),
        ignore_data_skip=True,
        **common,
        checkpoint=tmp_path / "checkpoint-2",
    )
    folders = tmp_path / "checkpoint-2", tmp_path / "anew/checkpoint-4"
    before, after = (torch.load(stream_file(folder, 0), weights_only=True) for folder in folders)
    assert before["counts"] == after["counts"]
    assert before["num_steps"] + 2 == after["num_steps"]


def test_the_report_says_what_is_known(tmp_path, capsys):
    long = texts(300).map(lambda row: {"text": row["text"] * 2})
    running = []

    class Running(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            file = tmp_path / "packing_report.json"
            running.append(json.loads(file.read_text())["num_packs"])

    settings = {"max_steps": 3, "packing_report": True, "save_steps": 1}
    run_training(tmp_path, long.to_iterable_dataset(), callbacks=[Running()], **settings)
    assert running == [0, 1, 2]
    before, after = capsys.readouterr().out.split("Packing report\n")[1:]
    for text in (before, after):
        assert "a stream of unknown length" in text
        assert "3 (max_steps)" in text
    for words in (r"read +300 documents", r"trained .* in 3 packs", "  efficiency ", "trained tokens are lost: raise"):
        assert re.search(words, after), words
        assert not re.search(words, before), words


@pytest.mark.parametrize("packing", [True, False])
def test_a_stream_is_evaluated_as_its_table(packing, tmp_path):
    data = texts(50, seed=1)
    model = build_tiny_model()

    def make(eval_dataset, **settings):
        settings |= {"packing": packing, "max_length": 32, "eval_dataset": eval_dataset}
        return build_trainer(tmp_path, texts(), model, **settings)

    def metric(prediction):
        return {"rows": len(prediction.predictions)}

    table = make(data).evaluate()
    trainer = make(data.to_iterable_dataset(3))
    stream = trainer.evaluate()
    for name in ("loss", "entropy", "mean_token_accuracy"):
        assert stream[f"eval_{name}"] == pytest.approx(table[f"eval_{name}"], rel=1e-6)
    assert trainer.evaluate()["eval_loss"] == stream["eval_loss"], "a stream can be evaluated again"
    named = trainer.evaluate({"a": data.to_iterable_dataset()})
    assert named["eval_a_loss"] == pytest.approx(table["eval_loss"], rel=1e-6)
    assert make(data.to_iterable_dataset(), compute_metrics=metric).evaluate()["eval_rows"] == 50
    assert trainer.predict(trainer.eval_dataset).predictions.shape[0] == 50


def test_a_chunk_of_an_evaluation_stream_may_have_values_of_another_type():
    weights = [1] * CHUNK + [0.5]
    rows = [{"input_ids": [5, 6], "weight": weight} for weight in weights]
    table = read_whole(IterableDataset.from_generator(lambda: iter(rows)), "weight", None)
    assert table["weight"][:] == weights
    assert table["input_ids"][:] == [[5, 6]] * (CHUNK + 1)


def test_an_evaluation_stream_that_was_packed_elsewhere_is_refused(tmp_path):
    rows = {"input_ids": [[5, 6, 7], [8, 9, 5]], "position_ids": [[0, 1, 2], [0, 0, 1]]}
    stream = Dataset.from_dict(rows).to_iterable_dataset()
    trainer = build_trainer(tmp_path, texts(), eval_dataset=stream, eval_packing=True)
    with pytest.raises(ValueError, match="Row 1 of the evaluation dataset has `position_ids` that begin again"):
        trainer.evaluate()


@pytest.mark.parametrize("positions", [[[0, 1], None], [[[0, 0], [0, 0]], [[0, 0], [0, 0]]], [None, None]])
def test_other_positions_of_an_evaluation_stream_are_read_or_left(positions):
    rows = [{"input_ids": [5, 6], "position_ids": row} for row in positions]
    table = read_whole(IterableDataset.from_generator(lambda: iter(rows)))
    check_boundaries(table, "evaluation")
    assert table["input_ids"][:] == [[5, 6]] * 2


def test_an_empty_evaluation_stream_is_refused(tmp_path):
    trainer = build_trainer(tmp_path, texts(), eval_dataset=texts(4).to_iterable_dataset())
    empty = trainer.eval_dataset.filter(lambda row: False)
    with pytest.raises(ValueError, match=r"yielded 0 examples.*Check that"):
        trainer.get_eval_dataloader(empty)
