"""The planner of the epochs of a run, and a stream of packs, from the settings that a test changes."""

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import IterableDataset

from trl_packfix.data.cache import Arrays, write_arrays
from trl_packfix.data.documents import Documents, Ledger
from trl_packfix.data.epochs import EpochPlanner
from trl_packfix.data.stream import PackedStream
from trl_packfix.planning.packing import Packing
from trl_packfix.planning.schedule import Schedule
from trl_packfix.planning.units import Units


def documents_of_lengths(lengths: Sequence[int] | np.ndarray, **arrays: Any) -> Documents:
    """Return a document of each length, in a row of its own, of which all tokens but the first are trained."""
    lengths = np.array(lengths, dtype=np.int64)
    return Documents(np.arange(len(lengths)), np.zeros_like(lengths), lengths, lengths - 1, Ledger(), **arrays)


def make_epochs(
    documents: Documents,
    strategy: str,
    batch_size: int = 1,
    max_length: int = 256,
    accumulation: int = 1,
    world_size: int = 1,
    **settings: Any,
) -> EpochPlanner:
    """Return a planner of documents. `settings`: other fields of `Packing`."""
    sizes = {"batch_size": batch_size, "accumulation": accumulation, "world_size": world_size}
    return EpochPlanner(documents, Packing(strategy=strategy, max_length=max_length, **sizes, **settings))


def of_units(plan: EpochPlanner, epoch: int = 0) -> tuple[Schedule, Units]:
    """Return what is balanced: the schedule of the units of an epoch, and the units."""
    schedule = plan.schedule(epoch)
    units = plan.units(epoch)
    order, offsets = units.from_documents(schedule.order, schedule.offsets)
    return replace(schedule, order=order, offsets=offsets), units


def make_stream(dataset: IterableDataset, **settings: Any) -> PackedStream:
    """Make a stream of packs from the fields of `Packing` and the arguments of `PackedStream`."""
    names = {setting.name for setting in fields(Packing)} & settings.keys()
    packing = Packing(**{name: settings.pop(name) for name in names})
    return PackedStream(dataset, packing, **settings)


def one_pass(stream: PackedStream) -> Iterator:
    """Yield the micro-batches of the first pass of a stream."""
    for micro_batch in stream:
        if stream.num_passes:
            return
        yield micro_batch


def saved(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def saved_and_loaded(state: Any) -> Any:
    return torch.load(io.BytesIO(saved(state)), weights_only=True)


def assert_restarts_go_on(
    new_stream: Callable[[], PackedStream], read: Callable[[Iterator], list], num_points: int
) -> None:
    """Assert that a stream restarted within its first two passes gives the batches of one that is read through.

    It is restarted where the first pass ends, and at random points; states go through `torch.save`.

    Args:
        new_stream: makes the stream from its beginning, with two micro-batches in a step.
        read: reads micro-batches, and returns what is compared of them.
        num_points: number of random points, in steps.
    """
    unbroken = new_stream()
    batches = iter(unbroken)
    steps: list[list] = []
    states = {}
    end_of_pass = 0
    while unbroken.num_passes < 2:
        steps.append(read(islice(batches, 2)))
        states[len(steps)] = saved_and_loaded(unbroken.state_dict(len(steps)))
        if unbroken.num_passes and not end_of_pass:
            end_of_pass = len(steps) - 1
            states[end_of_pass] = saved_and_loaded(unbroken.state_dict(end_of_pass))  # of a step before the last
    points = np.random.default_rng(0).choice(np.arange(1, len(steps)), num_points, replace=False)
    for point in {end_of_pass, *points.tolist()}:
        resumed = new_stream()
        resumed.load_state_dict(states[point], num_skipped=2 * point)
        batches = iter(resumed)
        assert list(islice(batches, 2 * point)) == [[]] * (2 * point)
        for expected in steps[point : point + 30]:
            assert read(islice(batches, 2)) == expected, point


def rewrite(file: Path, arrays: Arrays) -> None:
    """Replace a cache file by one with these arrays and their seal; who has mapped the old file keeps it."""
    file.unlink()
    write_arrays(file, arrays)
    assert file.is_file()
