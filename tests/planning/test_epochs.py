"""Plans of many documents: kept beside them, and the same either way."""

import errno
import importlib.util
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, load_from_disk
from datasets.fingerprint import Hasher
from support.features import PRESENT, features_in
from support.packing_settings import CHANGES, START
from support.planners import make_epochs, rewrite
from support.runs import build_trainer

import trl_packfix
from trl_packfix.data import cache, epochs
from trl_packfix.data.cache import SUFFIX, cached_documents, cached_token_range, read_arrays, read_or_make, write_arrays
from trl_packfix.data.documents import DOCUMENT_ARRAYS, DocumentCounts, Documents, Ledger
from trl_packfix.data.reader import TokenReader
from trl_packfix.planning.token_order import TokenOrder
from trl_packfix.samples import row
from trl_packfix.samples.row import PREPARATION_SOURCE_HASH, HashedMapFunction, hash_sources

STRATEGIES = ["stream", "bfd", "bfd_split", "wrapped", "minibatch"]
PACKS = "cache-packfix-packs-*"


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch):
    monkeypatch.setattr(epochs, "MIN_CACHED_DOCUMENTS", 2000)


def saved_documents(folder, num=2000, longest=40, wrapped=False):
    """Return documents of 1 to `longest` tokens as a start leaves them: in a file."""
    lengths = np.random.default_rng(0).integers(1, longest + 1, num)
    zero = np.zeros(num, np.int64)
    block = (np.cumsum(lengths) - lengths) // longest
    ledger = Ledger(kept=DocumentCounts(num, int(lengths.sum()), int(lengths.sum())))
    documents = Documents(np.arange(num), zero, lengths, lengths, ledger, block if wrapped else None)
    write_arrays(folder / "spans.arrays", documents.to_arrays())
    return replace(documents, file=folder / "spans.arrays")


def planner(documents, strategy="stream", world_size=2, **settings):
    return make_epochs(documents, strategy, 4, 512, accumulation=2, world_size=world_size, **settings)


def same(one, another):
    return np.array_equal(one.order, another.order) and np.array_equal(one.offsets, another.offsets)


def is_mapped(values):
    """Whether they lie in a file that is mapped."""
    place = values.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, stop = (int(end, 16) for end in line.split()[0].split("-"))
        if begin <= place < stop:
            return line.endswith(SUFFIX)
    raise AssertionError("no such memory")


def tampered(file):
    """Exchange the last two documents of a file, so that one knows it again."""
    arrays = read_arrays(file)
    rewrite(file, arrays | {"order": np.concatenate([arrays["order"][:-2], arrays["order"][-2:][::-1]])})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_kept_is_what_would_be_planned(strategy, tmp_path):
    documents = saved_documents(tmp_path, wrapped=strategy == "wrapped")
    planner_alone = planner(replace(documents, file=None), strategy, drop_last=True)
    first, second = (planner(documents, strategy, drop_last=True) for _ in range(2))
    for epoch in (0, 1):
        expected = planner_alone.schedule(epoch)
        for planner_of_two in (first, second):
            got = planner_of_two.schedule(epoch)
            assert same(got, expected), epoch
            assert is_mapped(got.order), epoch
    assert first.num_steps == second.num_steps == planner_alone.num_steps
    if strategy != "minibatch":
        again = planner(documents, strategy).first_plan
        assert is_mapped(again.order)
        assert again.lower_bound == planner_alone.first_plan.lower_bound
    assert not list(tmp_path.glob("*.tmp*"))


def test_a_second_start_plans_nothing(tmp_path):
    """Kept files with other packs come back as they are: so nothing was planned."""
    documents = saved_documents(tmp_path)
    first = planner(documents)
    for kind in ("plan", "schedule"):
        first.schedule(0)
        tampered(first.cache_file(kind, 0))
    second = planner(documents)
    planner_alone = planner(replace(documents, file=None))
    assert second.first_plan.order[-2:].tolist() == planner_alone.first_plan.order[-2:][::-1].tolist()
    assert second.schedule(0).order[-2:].tolist() == planner_alone.schedule(0).order[-2:][::-1].tolist()


def array_in(file, make):
    return read_or_make(file, lambda: {"x": make()})["x"]


@pytest.mark.parametrize("is_read_only", [False, True])
def test_one_process_plans_and_the_others_wait_for_its_file(tmp_path, monkeypatch, is_read_only):
    """Locks are of open files, so threads wait as processes do.

    On a disk that cannot be written, which refuses to remove even what is not there, the others plan at the same time.
    """
    spans = []

    def make():
        begin = time.monotonic()
        time.sleep(0.3)  # so that the others come in the meantime
        spans.append((begin, time.monotonic()))
        return np.arange(5)

    def refuse(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    if is_read_only:
        monkeypatch.setattr(os, "link", refuse)
        monkeypatch.setattr(Path, "replace", refuse)
        monkeypatch.setattr(os, "unlink", refuse)
    with ThreadPoolExecutor(4) as pool:
        arrays_found = list(pool.map(lambda _: array_in(tmp_path / f"x{SUFFIX}", make), range(4)))
    assert all(is_mapped(values) != is_read_only and values.tolist() == [0, 1, 2, 3, 4] for values in arrays_found)
    assert len(spans) == (4 if is_read_only else 1)
    first, *later_spans = sorted(spans)
    assert all(first[1] <= begin for begin, _ in later_spans)
    assert not later_spans or max(begin for begin, _ in later_spans) < min(stop for _, stop in later_spans)


def test_a_folder_that_cannot_be_written_makes_no_process_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda folder, mode: (folder, mode) != (tmp_path, os.W_OK))
    monkeypatch.setattr(cache, "one_process_first", None)
    assert array_in(tmp_path / "x", lambda: np.arange(5)).tolist() == [0, 1, 2, 3, 4]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_process_that_ends_or_stops_while_it_plans_makes_no_other_wait(tmp_path, monkeypatch, caplog, is_killed):
    monkeypatch.setattr(cache, "LONGEST_WAIT", 1)
    file = tmp_path / f"x{SUFFIX}"
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with cache.one_process_first(file):
            os.write(writer, b"x")
            os.kill(os.getpid(), signal.SIGKILL if is_killed else signal.SIGSTOP)
    os.close(writer)  # so that a child that fails ends the wait
    os.read(reader, 1)
    try:
        assert is_mapped(array_in(file, lambda: np.arange(5)))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert is_killed or ("Waiting for another process" in caplog.text and "It is made here." in caplog.text)


def test_no_file_is_written_through_a_link(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    names = iter(("ab", "cd"))
    victim.write_text("precious")
    (tmp_path / "cache-packfix-ab.tmp").symlink_to(victim)
    monkeypatch.setattr(cache.secrets, "token_hex", lambda _: next(names))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert array_in(tmp_path / f"x{SUFFIX}", lambda: np.arange(5)).tolist() == [0, 1, 2, 3, 4]
    assert victim.read_text() == "precious"
    cache.lock_path(tmp_path / f"y{SUFFIX}").symlink_to(tmp_path / "new")
    assert is_mapped(array_in(tmp_path / f"y{SUFFIX}", lambda: np.arange(5)))
    assert not (tmp_path / "new").exists()


def test_a_system_without_fcntl_caches_without_a_lock(tmp_path, monkeypatch):
    """Windows has neither `fcntl` nor `os.getuid`. No process waits for another there."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.delattr(os, "getuid")
    monkeypatch.delattr(os, "O_NOFOLLOW")
    spec = importlib.util.spec_from_file_location("trl_packfix.data.cache_of_windows", cache.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    file = tmp_path / f"x{SUFFIX}"
    with module.one_process_first(file), module.one_process_first(file):
        pass
    assert is_mapped(module.read_or_make(file, lambda: {"x": np.arange(5)})["x"])


def test_all_columns_of_documents_are_mapped(tmp_path):
    documents = saved_documents(tmp_path)
    order = np.arange(2000)
    columns = {name: order * i for i, name in enumerate(DOCUMENT_ARRAYS[4:])}
    documents = replace(documents, token_order=TokenOrder(order, order + 1), fingerprint="of a test", **columns)
    rewrite(documents.file, documents.to_arrays())
    read = Documents.from_arrays(read_arrays(documents.file), documents.file)
    for one, original in [(read.token_order, documents.token_order), (read, documents)]:
        for name, values in vars(original).items():
            if isinstance(values, np.ndarray):
                assert is_mapped(getattr(one, name))
                assert np.array_equal(getattr(one, name), values)
            elif name != "token_order":
                assert getattr(one, name) == values
    assert is_mapped(read.lengths)


def test_no_damage_is_believed_or_ends_the_start(tmp_path):
    """Damage is flipped bits, cut, zeroed and exchanged blocks, and a file under another name."""
    file = tmp_path / f"x{SUFFIX}"
    expected = np.random.default_rng(0).permutation(50)
    array_in(file, lambda: expected)
    whole_content = file.read_bytes()
    draw = random.Random(0)
    for number in range(300):
        content = bytearray(whole_content)
        place = draw.randrange(len(content))
        size = draw.choice([8, 64])
        match number % 4:
            case 0:
                content[place if number % 8 else place % 64] ^= 1 << draw.randrange(8)
            case 1:
                del content[place:]
            case 2:
                content[place : place + size] = bytes(len(content[place : place + size]))
            case 3:
                content[:size], content[-size:] = content[-size:], content[:size]
        file.unlink()
        file.write_bytes(content)
        calls = []
        assert array_in(file, lambda calls=calls: calls.append(1) or expected).tolist() == expected.tolist()
        assert calls or content == whole_content
    other_file = tmp_path / f"y{SUFFIX}"
    shutil.copyfile(file, other_file)
    assert array_in(other_file, lambda: np.arange(2)).tolist() == [0, 1]


def test_every_setting_has_its_own_file(tmp_path):
    documents = saved_documents(tmp_path)
    whole_planner = planner(documents)
    files = {}
    present = {name: change for name, change in CHANGES.items() if features_in({name: change.value}) <= PRESENT}
    for name, change in present.items():
        changed = make_epochs(documents, **START | {name: change.value})
        files[name] = [changed.cache_file(kind, 0) for kind in ("plan", "schedule")]
    schedules = {schedule for _, schedule in files.values()}
    for name in [name for name, change in present.items() if change.changes == "nothing"]:
        assert files.pop(name) == [whole_planner.cache_file(kind, 0) for kind in ("plan", "schedule")], "the same plans"
    assert len(schedules | {whole_planner.cache_file("schedule", 1)}) == len(files) + 2, (
        "two settings with one schedule"
    )
    groups = (planner(documents, tokens_per_rank=512, degrees=degrees) for degrees in ((1,), (1, 2)))
    assert len({planner_of_group.cache_file("schedule", 0) for planner_of_group in groups}) == 2
    plans = {name for name, (plan, _) in files.items() if plan != whole_planner.cache_file("plan", 0)}
    assert plans == {name for name, change in CHANGES.items() if change.changes == "packs"}


def test_each_file_of_the_package_is_part_of_the_code(tmp_path):
    """Caches depend on `PREPARATION_SOURCE_HASH`.

    A plan that some ranks find and others make must be the same on all of them.
    """
    copy = tmp_path / "trl_packfix"
    shutil.copytree(Path(trl_packfix.__file__).parent, copy)
    hashes = [hash_sources(copy)]
    assert PREPARATION_SOURCE_HASH.startswith(hashes[0])
    for file in sorted(copy.rglob("*.py")):
        right = file.read_text()
        file.write_text(right + "# another way\n")
        hashes.append(hash_sources(copy))
        file.write_text(right)
    assert len(hashes) > 100
    assert len(set(hashes)) == len(hashes)
    assert hash_sources(copy) == hashes[0]
    (copy / "compat.py").rename(copy / "others.py")
    assert hash_sources(copy) not in hashes


@pytest.mark.parametrize("library", ["numpy", "torch", "transformers", "trl", "tokenizers", "jinja2"])
def test_another_version_of_a_library_is_other_code(monkeypatch, library):
    right = row._hash_versions()
    assert PREPARATION_SOURCE_HASH.endswith(right)
    installed = row.installed_version
    monkeypatch.setattr(row, "installed_version", lambda name: "9.9.9" if name == library else installed(name))
    assert row._hash_versions() != right


def test_every_cache_is_made_again_by_other_code(tmp_path, monkeypatch):
    """Spans, ranges of tokens, plans, and rows that `datasets` caches must be made again."""

    def files():
        reader = TokenReader(load_from_disk(tmp_path))
        documents = cached_documents(reader, 64)
        planner(documents)
        cached_token_range(reader)
        return {path.name for path in tmp_path.glob("cache-packfix-*")}

    Dataset.from_dict({"input_ids": [[1, 2, 3, i] for i in range(50)]}).save_to_disk(tmp_path)
    monkeypatch.setattr(epochs, "MIN_CACHED_DOCUMENTS", 1)
    before = files()
    kinds = {name.split("-")[2] for name in before}
    assert kinds == {"spans", "range", "packs"}
    assert files() == before
    for module in (cache, epochs):
        monkeypatch.setattr(module, "PREPARATION_SOURCE_HASH", "of another version")
    after = files() - before
    assert {name.split("-")[2] for name in after} == kinds
    assert len(after) == len(before)
    assert (
        Hasher.hash(HashedMapFunction(len))
        == Hasher.hash(HashedMapFunction(len))
        != Hasher.hash(HashedMapFunction(len, "of another version"))
    )
    assert Hasher.hash(HashedMapFunction(len)) != Hasher.hash(HashedMapFunction(max))


def test_few_documents_and_memory_leave_nothing_and_one_rank_keeps(tmp_path):
    documents = saved_documents(tmp_path)
    few = saved_documents(tmp_path, num=epochs.MIN_CACHED_DOCUMENTS - 1)
    for planner_of_few in (planner(few), planner(replace(documents, file=None))):
        planner_of_few.schedule(0)
    assert not list(tmp_path.glob(PACKS))
    planner(documents).schedule(0)
    assert len(list(tmp_path.glob(PACKS))) == 2
    assert is_mapped(planner(documents).schedule(0).order)


def test_plans_that_nobody_asked_for_are_removed_and_stay_with_those_who_read_them(tmp_path):
    documents = saved_documents(tmp_path)
    planner(documents).schedule(0)
    reading = planner(documents)
    expected = reading.schedule(0).order.copy()
    files = [reading.cache_file(kind, 0) for kind in ("plan", "schedule")] + [tmp_path / "cache-packfix-x.tmp"]
    files[2].touch()
    long_ago = time.time() - cache.PACKS_LIFETIME - 60
    for file in files:
        os.utime(file, (long_ago, long_ago))
    planner(documents)  # asks for the plan
    reading.schedule(1)
    assert [file.exists() for file in files] == [True, False, False]
    assert documents.file.exists()
    assert reading.cache_file("schedule", 1).exists()
    assert np.array_equal(planner(documents).schedule(0).order, expected)


def test_the_first_to_finish_is_believed_and_never_replaced(tmp_path):
    """On network storage a mapped file that is replaced is gone for those who read it."""
    file = tmp_path / "x.npy"

    def late(path):
        file.write_text("of another rank")
        path.write_text("late")

    for _ in range(2):
        cache.write_atomically(file, late)
        assert file.read_text() == "of another rank"
        assert list(tmp_path.iterdir()) == [file]

    def interrupted(path):
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.write_atomically(tmp_path / "y.npy", interrupted)
    assert list(tmp_path.iterdir()) == [file]


def test_a_run_trains_by_the_plans_that_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(epochs, "MIN_CACHED_DOCUMENTS", 10)
    Dataset.from_dict({"input_ids": [[5, 6, 7, i] for i in range(60)]}).save_to_disk(tmp_path / "data")
    settings = {"num_train_epochs": 2, "gradient_accumulation_steps": 2, "max_length": 16}
    for _ in range(2):
        trainer = build_trainer(tmp_path / "run", load_from_disk(tmp_path / "data"), **settings)
        trainer.train()
    assert all(is_mapped(trainer.data.source.planner.schedule(epoch).order) for epoch in range(2))
