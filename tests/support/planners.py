"""The planner of the epochs of a run, and a stream of packs, from the settings that a test changes."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
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


def rewrite(file: Path, arrays: Arrays) -> None:
    """Replace a cache file by one with these arrays and their seal; who has mapped the old file keeps it."""
    file.unlink()
    write_arrays(file, arrays)
    assert file.is_file()
