"""Planning packs: CPU seconds, memory, and packs compared with the lower bound, for ours, TRL's and axolotl's.

    python benchmarks/planning.py                                       # synthetic lengths, about 15 minutes
    python benchmarks/planning.py --data DIR --csv planning.csv         # and the JSONL files of a folder
    python benchmarks/planning.py --num 1000000 --repeats 5

Compared on the same lengths in the same process:
  stream       `plan_packs(..., "stream")`: validation, random order of the documents, buffer of 1000, packs shuffled
  bfd          `plan_packs(..., "bfd")`: validation, random exchange of equal lengths, sort, plan, documents to packs
  bfd loop     of that, only best-fit decreasing on the histogram (counting the lengths included)
  trl map      TRL's `pack_dataset(strategy="bfd")` as its trainer runs it, in `map` batches of 1000 documents
  trl all      TRL's `_pack_bfd` on one table with every document; the tokens are one-byte zeros, so little is copied
  trl loop     of that, only the best-fit loop: timed from the creation of its segment tree to its first call of `take`
  axolotl      axolotl's `pack_parallel` with its trainer's defaults (100,000 documents a group, at most 200 in a pack),
               in one process and after its compilation; only if axolotl can be imported
  first fit    if it cannot: first-fit decreasing with the same two limits, in numpy. Only its packs are comparable;
               its seconds are not those of axolotl

`bound/packs` is the Martello-Toth lower bound over the packs needed: 1.0 is proved optimal, and a lower value may be
optimal, too. `p99 moved` is the 99th percentile of |place in packs as they are closed - place in the visiting order|,
in documents. CPU seconds are `time.process_time`, median of --repeats. `peak MiB` is what tracemalloc counts in
addition to the lengths, in a separate run. Files are cut at the capacity, as truncation does. Synthetic lengths are
lognormal, clipped to [1, capacity].
"""

import argparse
import importlib.metadata
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import datasets
import numpy as np
import pyarrow as pa
import trl.data_utils
from common import REAL_DATA, Row, cpu_seconds, describe, file_lengths, make_console, make_parser, peak_mib, write_csv
from rich.console import Console
from rich.table import Table

from trl_packfix.planning.best_fit import best_fit_of_histogram
from trl_packfix.planning.packs import PackPlan, plan_stream
from trl_packfix.planning.strategies import plan_packs

CAPACITIES = (2048, 8192, 32768)
SHAPES = ((1 / 40, 1.0), (1 / 10, 1.0), (1 / 3, 0.8), (1 / 2, 0.6))  # median / capacity, sigma
MOST_FOR_STREAM = 1_000_000  # documents; above, a row takes minutes without new information
MOST_FOR_AXOLOTL = 100_000  # documents; first fit is quadratic
MOST_FOR_FIRST_FIT = 20_000  # documents; the same without compilation
MOST_FOR_TRL = 1_000_000  # documents; its loop takes each by itself
MOST_TOKENS_FOR_TRL = 1_000_000_000  # its table holds the tokens


def ours(lengths: np.ndarray, capacity: int, repeats: int) -> Iterator[Row]:
    order = np.random.default_rng(0).permutation(len(lengths))
    methods: dict[str, Callable[[], PackPlan]] = {"bfd": lambda: plan_packs(lengths, capacity, "bfd")}
    if len(lengths) <= MOST_FOR_STREAM:
        methods["stream"] = lambda: plan_packs(lengths, capacity)
    for method, plan_once in methods.items():
        seconds, plan = cpu_seconds(plan_once, repeats)
        row = {"method": method, "packs": plan.num_packs, "cpu_s": seconds, "peak_mib": peak_mib(plan_once)}
        if method == "stream":
            place = np.empty(len(order), dtype=np.int64)
            place[order] = np.arange(len(order))
            closed = plan_stream(lengths, capacity, order=order).order
            row["moved_p99"] = float(np.percentile(np.abs(place[closed] - np.arange(len(order))), 99))
        else:
            row["loop_s"] = cpu_seconds(lambda: best_fit_of_histogram(np.bincount(lengths), capacity), repeats)[0]
        yield row


def one_byte_tokens(lengths: np.ndarray) -> pa.Table:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = pa.ListArray.from_arrays(offsets, pa.array(np.zeros(offsets[-1], dtype=np.int8)))
    return pa.table({"input_ids": tokens})


@contextmanager
def clock_of_trl_loop(seconds: list[float]) -> Iterator[None]:
    """Append the CPU seconds of the best-fit loop of every `_pack_bfd` call inside, without changing the loop."""
    started = 0.0
    arrow = trl.data_utils.pc

    class Tree(trl.data_utils._SegmentTree):
        def __init__(self, longest: int):
            nonlocal started
            started = time.process_time()
            super().__init__(longest)

    class Compute:
        def __getattr__(self, name: str) -> Any:
            if name == "take":
                seconds.append(time.process_time() - started)
            return getattr(arrow, name)

    with mock.patch.object(trl.data_utils, "_SegmentTree", Tree), mock.patch.object(trl.data_utils, "pc", Compute()):
        yield


def theirs(lengths: np.ndarray, capacity: int, repeats: int) -> Iterator[Row]:
    order = np.random.default_rng(0).permutation(len(lengths))
    if len(lengths) <= MOST_FOR_TRL and lengths.sum() <= MOST_TOKENS_FOR_TRL:
        table = one_byte_tokens(lengths[order])
        loops: list[float] = []
        with clock_of_trl_loop(loops):
            seconds, packed = cpu_seconds(lambda: trl.data_utils._pack_bfd(table, capacity), repeats)
        loop = statistics.median(loops)
        yield {"method": "trl all", "packs": len(packed), "cpu_s": seconds, "loop_s": loop}
        dataset = datasets.Dataset(table)
        seconds, packed = cpu_seconds(lambda: trl.data_utils.pack_dataset(dataset, capacity, "bfd"))
        yield {"method": "trl map", "packs": len(packed), "cpu_s": seconds}
    if not importlib.util.find_spec("axolotl"):
        if len(lengths) <= MOST_FOR_FIRST_FIT:
            seconds, packs = cpu_seconds(lambda: first_fit_decreasing(lengths, capacity))
            yield {"method": "first fit", "packs": packs, "cpu_s": seconds}
    elif len(lengths) <= MOST_FOR_AXOLOTL:
        from axolotl.utils.samplers.multipack import pack_parallel

        settings = {"group_size": 100_000, "bin_size": 200, "num_processes": 1}
        pack_parallel(lengths[:10], capacity, **settings)  # compiles
        seconds, packs = cpu_seconds(lambda: pack_parallel(lengths[order], capacity, **settings))
        yield {"method": "axolotl", "packs": len(packs), "cpu_s": seconds}


def first_fit_decreasing(lengths: np.ndarray, capacity: int, most: int = 200) -> int:
    """Packs needed if each document, longest first, goes to the first pack with space and below `most` documents."""
    room = np.full(len(lengths), capacity)
    left = np.full(len(lengths), most)
    num_packs = 0
    for length in np.sort(lengths)[::-1]:
        # the pack after the last one is empty, so one always fits
        first = int(np.argmax((room[: num_packs + 1] >= length) & (left[: num_packs + 1] > 0)))
        room[first] -= length
        left[first] -= 1
        num_packs = max(num_packs, first + 1)
    return num_packs


def cases(args: argparse.Namespace, console: Console) -> Iterator[tuple[str, int, np.ndarray]]:
    if args.data is None or not args.data.is_dir():
        console.print(
            f"Files skipped: {'no --data DIR given' if args.data is None else f'{args.data} is not a folder'}."
        )
    else:
        for name, lengths in file_lengths(args.data):
            for capacity in CAPACITIES:
                yield name, capacity, np.minimum(lengths, capacity)
    for num in args.num:
        for capacity in CAPACITIES:
            for share, sigma in SHAPES:
                drawn = np.random.default_rng(0).lognormal(np.log(share * capacity), sigma, num)
                lengths = np.clip(drawn, 1, capacity).astype(np.int64)
                yield f"lognormal({share * capacity:.0f}, {sigma})", capacity, lengths


def main() -> None:
    parser = make_parser(__doc__, REAL_DATA)
    parser.add_argument(
        "--num", type=int, nargs="*", default=[100_000, 1_000_000, 10_000_000], help="documents of synthetic lengths"
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs of which the median is taken")
    args = parser.parse_args()
    if args.repeats < 1 or any(num < 1 for num in args.num):
        parser.error("--repeats and --num must be 1 or more: a median of nothing, or of no documents, does not exist")

    datasets.disable_progress_bars()
    datasets.disable_caching()
    console = make_console(160)
    if not importlib.util.find_spec("axolotl"):
        console.print("axolotl skipped: the package cannot be imported here.")
    versions = {
        name: importlib.metadata.version(name) for name in ("numpy", "axolotl") if importlib.util.find_spec(name)
    }
    console.print(describe(), ", ".join(f"{name} {version}" for name, version in versions.items()), sep=", ")
    columns = ["packs", "bound/packs", "efficiency", "CPU s", "loop s", "peak MiB", "p99 moved"]
    table = Table("lengths", "capacity", "documents", "docs/pack", "bound", "method", *columns)
    rows: list[Row] = []
    for name, capacity, lengths in cases(args, console):
        console.print(f"{name}: {len(lengths):,} documents, capacity {capacity}")
        bound = plan_packs(lengths, capacity, "bfd").lower_bound
        for measure in (ours, theirs):
            for row in measure(lengths, capacity, args.repeats):
                packs = row["packs"]
                row |= {"lengths": name, "capacity": capacity, "documents": len(lengths), "lower_bound": bound}
                row |= {"docs_per_pack": len(lengths) / packs, "bound_over_packs": bound / packs}
                row |= {"efficiency": int(lengths.sum()) / (packs * capacity)} | versions
                rows.append(row)
                table.add_row(*cells(row))
        table.add_section()
    console.print(table)
    write_csv(args.csv, rows)


def cells(row: Row) -> list[str]:
    def optional(name: str, form: str) -> str:
        return format(row[name], form) if name in row else ""

    return [
        row["lengths"],
        str(row["capacity"]),
        f"{row['documents']:,}",
        f"{row['docs_per_pack']:.2f}",
        f"{row['lower_bound']:,}",
        row["method"],
        f"{row['packs']:,}",
        f"{row['bound_over_packs']:.5f}",
        f"{row['efficiency']:.5f}",
        f"{row['cpu_s']:.3f}",
        optional("loop_s", ".4f"),
        optional("peak_mib", ".1f"),
        optional("moved_p99", ".0f"),
    ]


if __name__ == "__main__":
    main()
