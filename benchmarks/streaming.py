"""Packing a stream: packs compared with the lower bound, order, restarts, and memory over a million documents.

    python benchmarks/streaming.py --data DIR                 # t0_p3_sample of a folder of JSONL files, and memory
    python benchmarks/streaming.py --num 100000               # memory only, over fewer documents

Documents have the lengths of the file in tokens of `DIR/smollm2_tokenizer`, cut at `max_length`. All tokens of a
document are its number. They go through `PackedStream`, one pass, once for each of --seeds shuffled orders:
  bound/packs   Martello-Toth lower bound over packs: 1.0 is proved optimal
  moved p99     99th percentile of |place in training - place in the stream|, documents
  trend         mean document length in each quarter of training / that in the same quarter of the stream - 1,
                mean of all orders; `worst` is the largest single quarter
  restarts      points at which the state was saved and loaded, and how many continued with other batches
`rss_mib` is the resident memory of the process after every tenth of --num synthetic documents (lognormal, mean 255
tokens) read from a generator.
"""

import io
import time
from collections.abc import Iterator
from itertools import islice

import datasets
import numpy as np
import torch
from common import REAL_DATA, Row, cpu_seconds, describe, file_lengths, make_parser, resident_mib, tell, write_csv
from datasets import Dataset, IterableDataset

from trl_packfix.data.stream import PackedStream
from trl_packfix.planning.packing import Packing
from trl_packfix.planning.strategies import plan_packs

CAPACITIES = (2048, 8192)
NUM_RESTARTS = 20
FILE = "t0_p3_sample"


def one_pass(stream: PackedStream) -> Iterator[np.ndarray]:
    """Numbers of the documents of each pack."""
    for pack in stream:
        if stream.num_passes:
            return
        yield np.array([document["input_ids"][0] for document in pack])


def restarts(dataset: IterableDataset, capacity: int, packs: list[np.ndarray]) -> int:
    """Number of random points at which a restart continued with packs that differ from these."""
    points = set(np.random.default_rng(0).choice(np.arange(1, len(packs) - 1), NUM_RESTARTS, replace=False).tolist())
    stream = PackedStream(dataset, Packing(max_length=capacity))
    different = 0
    for step, _ in enumerate(islice(stream, len(packs) - 1), start=1):
        if step in points:
            file = io.BytesIO()
            torch.save(stream.state_dict(step), file)
            file.seek(0)
            # Two readings at the same time need two objects: a dataset has the state of one reading only.
            resumed = PackedStream(dataset.shard(1, 0), Packing(max_length=capacity))
            resumed.load_state_dict(torch.load(file, weights_only=True))
            rest = packs[step:]
            got = list(islice(one_pass(resumed), len(rest)))
            different += len(got) != len(rest) or not all(map(np.array_equal, got, rest))
    return different


def measure(lengths: np.ndarray, capacity: int, seeds: int) -> Row:
    lengths = np.minimum(lengths, capacity)
    bound = plan_packs(lengths, capacity, "bfd").lower_bound
    most = 0
    moved = []
    trends = []
    seconds = []
    for seed in range(seeds):
        order = np.random.default_rng(seed).permutation(len(lengths))
        arriving = lengths[order]
        rows = {"input_ids": [np.full(length, number, np.int32) for number, length in enumerate(arriving)]}
        dataset = Dataset.from_dict(rows).to_iterable_dataset()
        stream = PackedStream(dataset, Packing(max_length=capacity))
        cpu_s, packs = cpu_seconds(lambda stream=stream: list(one_pass(stream)))
        seconds.append(cpu_s)
        trained = np.concatenate(packs)
        assert np.array_equal(np.sort(trained), np.arange(len(lengths))), "not every document once"
        most = max(most, len(packs))
        moved.append(np.percentile(np.abs(trained - np.arange(len(trained))), 99))
        quarters = zip(np.array_split(arriving[trained], 4), np.array_split(arriving, 4), strict=True)
        trends.append([got.mean() / given.mean() - 1 for got, given in quarters])
        if seed == 0:
            different = restarts(dataset, capacity, packs)
    return {
        "capacity": capacity,
        "documents": len(lengths),
        "orders": seeds,
        "packs": most,
        "lower_bound": bound,
        "bound_over_packs": bound / most,
        "efficiency": int(lengths.sum()) / (most * capacity),
        "moved_p99": max(moved),
        "trend": " ".join(f"{value:+.4f}" for value in np.mean(trends, axis=0)),
        "trend_worst": float(np.abs(trends).max()),
        "restarts": NUM_RESTARTS,
        "restarts_different": different,
        "cpu_s": float(np.median(seconds)),
    }


def memory(num: int, capacity: int = 8192) -> Iterator[Row]:
    def generate() -> Iterator[dict[str, np.ndarray]]:
        rng = np.random.default_rng(0)
        tokens = np.full(capacity, 7, np.int32)
        for _ in range(num):
            yield {"input_ids": tokens[: min(int(rng.lognormal(5.04, 1.0)) + 2, capacity)]}

    stream = PackedStream(IterableDataset.from_generator(generate), Packing(max_length=capacity))
    seen = 0
    shown = 0
    start = time.process_time()
    for pack in stream:
        if stream.num_passes:
            break
        seen += len(pack)
        if seen * 10 // num > shown:
            shown = seen * 10 // num
            rss = resident_mib()
            seconds = time.process_time() - start
            yield {"capacity": capacity, "documents": seen, "rss_mib": round(rss, 1), "cpu_s": round(seconds, 1)}
    assert seen == num, "not every document"


def main() -> None:
    parser = make_parser(__doc__, REAL_DATA)
    parser.add_argument("--num", type=int, default=1_000_000, help="synthetic documents of the memory part; 0: none")
    parser.add_argument("--seeds", type=int, default=10, help="shuffled orders of the file")
    args = parser.parse_args()

    datasets.disable_progress_bars()
    datasets.disable_caching()
    print(describe())
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append(row)
        tell(row)

    if args.data is None or not args.data.is_dir():
        print(f"The file is skipped: {'no --data DIR given' if args.data is None else f'{args.data} is not a folder'}.")
    else:
        ((name, lengths),) = file_lengths(args.data, f"{FILE}.jsonl")
        for capacity in CAPACITIES:
            keep({"part": name} | measure(lengths, capacity, args.seeds))
    if args.num:
        for row in memory(args.num):
            keep({"part": "memory"} | row)
    write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
