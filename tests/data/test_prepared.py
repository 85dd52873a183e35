"""A second start: nothing is tokenised, cut or looked through again, and what was kept is what would be made."""

import os
from dataclasses import replace

import datasets
import numpy as np
import pytest
from datasets import Dataset, concatenate_datasets, load_from_disk
from support.planners import rewrite
from support.runs import build_trainer, documents_of, texts

from trl_packfix.data import cache
from trl_packfix.data.cache import cached_documents, cached_token_range, read_arrays
from trl_packfix.data.documents import make_documents
from trl_packfix.data.reader import TokenReader


def saved(folder, num=40):
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, 200, n) for n in rng.integers(2, 60, num)]
    table = Dataset.from_dict({"input_ids": rows, "labels": [np.where(row < 100, row, -100) for row in rows]})
    table.save_to_disk(folder)
    return load_from_disk(folder)


def reader_of(folder):
    return TokenReader(load_from_disk(folder))


def files(folder, pattern="*"):
    return {file: file.stat().st_mtime_ns for file in folder.glob(pattern) if file.name != "state.json"}


SETTINGS = [
    {"max_length": 30},
    {"max_length": 31},
    {"max_length": None},
    {"max_length": 30, "overlong": "split"},
    {"max_length": 30, "overlong": "drop"},
    {"max_length": 30, "truncation_mode": "keep_end"},
    {"max_length": 30, "cuts_blocks": True},
    {"max_length": 30, "keep_untrained": True},
]


def test_documents_of_the_cache_are_those_that_would_be_made(tmp_path):
    data = saved(tmp_path)
    fingerprints = set()
    for number, settings in enumerate(SETTINGS, 1):
        for is_cached in (False, True):
            reader = reader_of(tmp_path)
            documents = cached_documents(reader, **settings)
            expected = make_documents(reader, **settings)
            assert documents.ledger == expected.ledger
            for name in ("row", "start", "stop", "trained", "block"):
                assert np.array_equal(getattr(documents, name), getattr(expected, name)), (settings, name, is_cached)
            assert len(files(tmp_path, "cache-packfix-spans-*")) == number
            fingerprints.add(documents.fingerprint)
        assert len(fingerprints) <= number, "the fingerprint of the cache is another one"
    assert len(fingerprints) >= len(SETTINGS) - 2, "settings that give other documents give another fingerprint"
    for change in (data.shuffle(seed=1), data.select(range(7)), data.remove_columns("labels")):
        reader = TokenReader(change)
        assert np.array_equal(cached_documents(reader, 30).trained, make_documents(reader, 30).trained)
    assert cached_token_range(TokenReader(data)) == TokenReader(data).token_range()


def test_nothing_is_made_twice(tmp_path):
    """Change the spans in the cache: if they come back, the file was read, and nothing was cut."""
    saved(tmp_path)
    cached_documents(reader_of(tmp_path), 30)
    (path,) = files(tmp_path, "cache-packfix-spans-*")
    arrays = read_arrays(path)
    rewrite(path, arrays | {"stop": arrays["stop"] - 1})
    cached = cached_documents(reader_of(tmp_path), 30)
    assert np.array_equal(cached.stop, arrays["stop"] - 1)


def test_a_length_of_numpy_finds_the_documents_of_the_same_length(tmp_path):
    saved(tmp_path)
    for max_length in (30, np.int64(30)):
        documents = cached_documents(reader_of(tmp_path), max_length)
        assert documents.lengths.max() == 30
        assert len(files(tmp_path, "cache-packfix-spans-*")) == 1


def test_the_documents_of_another_file_are_cut_anew(tmp_path):
    """After a copy by hand, a file may have the fingerprint, the size and the time of the one before."""
    for name, tokens in (("one", [[5, 6, 7], [8, 9]]), ("other", [[5, 6], [7, 8, 9]])):
        table = Dataset.from_dict({"input_ids": tokens})
        table._fingerprint = "0" * 16
        table.save_to_disk(tmp_path / name)
    assert cached_documents(reader_of(tmp_path / "one"), 30).lengths.tolist() == [3, 2]
    file, other = (tmp_path / name / "data-00000-of-00001.arrow" for name in ("one", "other"))
    before = file.stat()
    assert other.stat().st_size == before.st_size
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(file)
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    assert cached_documents(reader_of(tmp_path / "one"), 30).lengths.tolist() == [2, 3]


def test_the_fingerprint_has_each_column_of_all_documents(monkeypatch):
    monkeypatch.setattr(cache, "NUM_SAMPLED", 1)  # of the first document
    reader = TokenReader(Dataset.from_dict({"input_ids": [[9] * 5] * 4}))
    documents = make_documents(reader, 4)
    columns = {"row": [0, 2, 2, 3], "start": [0, 1, 0, 0], "stop": [4, 3, 4, 4], "trained": [3, 2, 3, 3]}
    changed = [documents, *(replace(documents, **{name: np.array(values)}) for name, values in columns.items())]
    assert len({cache._hash_documents(reader, each).partition("-")[0] for each in changed}) == 5


def test_the_fingerprint_has_the_labels_of_each_document():
    prints = set()
    for untrained in range(-1, 3):
        labels = [[9, -100, 9] if row == untrained else [9, 9, -100] for row in range(3)]
        reader = TokenReader(Dataset.from_dict({"input_ids": [[9] * 3] * 3, "labels": labels}))
        documents = make_documents(reader, 4)
        assert documents.trained.tolist() == [1, 1, 1]
        prints.add(cache._hash_documents(reader, documents))
    assert len(prints) == 4


def test_the_fingerprint_of_few_documents_has_all_their_tokens():
    prints = set()
    for place in range(40):
        tokens = [[9] * 40, [9] * 40]
        labels = [[9] * 40] * 2
        tokens[1][place] = 8
        reader = TokenReader(Dataset.from_dict({"input_ids": tokens, "labels": labels}))
        prints.add(cache._hash_documents(reader, make_documents(reader, 40)))
    assert len(prints) == 40


def test_the_fingerprint_has_tokens_of_every_document_and_not_how_they_are_stored():
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, 200, n) for n in rng.integers(2, 60, 3000)]
    table = Dataset.from_dict({"input_ids": rows})
    halves = [Dataset.from_dict({"input_ids": part}) for part in (rows[:1200], rows[1200:])]
    order = rng.permutation(3000)
    sorted_again = table.select(order).flatten_indices().select(np.argsort(order))
    prints = [cached_documents(TokenReader(rows_of_table), 40).fingerprint for rows_of_table in (table, sorted_again)]
    prints += [cached_documents(TokenReader(concatenate_datasets(halves)), 40).fingerprint]
    assert prints == prints[:1] * 3
    changed = rng.permutation(3000)[:10]
    for i in changed:
        for place in (0, min(len(rows[i]), 40) - 1):  # behind 40 tokens it is cut
            other = [row.copy() for row in rows[: i + 1]]
            other[i][place] += 1
            table = Dataset.from_dict({"input_ids": [*other, *rows[i + 1 :]]})
            assert cached_documents(TokenReader(table), 40).fingerprint != prints[0]


def test_tables_in_memory_and_disabled_caching_leave_nothing(tmp_path):
    data = saved(tmp_path)
    before = files(tmp_path)
    datasets.disable_caching()
    try:
        cached_documents(TokenReader(data), 30)
    finally:
        datasets.enable_caching()
    in_memory = Dataset.from_dict({"input_ids": [[5, 6, 7]]})
    cached_documents(TokenReader(in_memory), 30)
    assert files(tmp_path) == before
    assert TokenReader(in_memory).files == []


@pytest.mark.parametrize("form", ["text", "tokenised"])
def test_a_second_start_writes_nothing_and_trains_on_the_same(tmp_path, form):
    data = texts() if form == "text" else Dataset.from_dict({"input_ids": [[9, 8, 7], [6, 5, 4, 3, 2]] * 4})
    data.save_to_disk(tmp_path / "data")
    seen = []
    left = []
    for _ in range(2):
        trainer = build_trainer(tmp_path / "out", load_from_disk(tmp_path / "data"), max_length=20)
        seen.append([documents_of(batch) for batch in trainer.get_train_dataloader()])
        left.append(files(tmp_path / "data"))
    assert seen[0] == seen[1]
    assert left[0] == left[1]
    assert len(list((tmp_path / "data").glob("cache-packfix-spans-*"))) == 1
    # documents that are tokenised already are not written once more
    assert any((tmp_path / "data").glob("cache-*.arrow")) is (form == "text")
