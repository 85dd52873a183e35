"""Plans of many documents on the processes of one node: seconds, CPU seconds and memory of all of them together.

    python benchmarks/plan_once.py                                             # 10 million documents, 1 and 4 processes
    python benchmarks/plan_once.py --num 1000000 --processes 8 --csv plan_once.csv

Every process reads the spans of the documents from their cache file and makes the planner and the schedule of the first
epoch, as ranks of one node do at the start of training (4 accumulation steps, capacity 8,192, 8 ranks for
each process). Then it waits until all have, as before the first step. `wall s` is until the last one has its schedule,
without imports. `PSS MiB` is the largest sum of proportional set sizes, in which a page that processes share counts
once; sampled every 50 ms, less that of the processes after their imports. Documents are of the lognormal lengths of
`startup.py`.
"""

import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import Row, make_parser, tell, write_csv
from support.planners import make_epochs

from trl_packfix.data.cache_files import read_arrays, write_arrays
from trl_packfix.data.documents import Count, Documents, Ledger

MAX_LENGTH = 2048
LENGTHS = (4.6, 0.9)  # lognormal: median 100, mean 150 tokens


def plan(file: Path, strategy: str, world_size: int, ready: Any, done: Any, seconds: Any) -> None:
    ready.wait()
    ready.wait()  # the parent has read the memory of all
    start = time.process_time()
    documents = Documents.from_arrays(read_arrays(file), file)
    planner = make_epochs(documents, strategy, 4, MAX_LENGTH, 4, world_size)
    schedule = planner.schedule(0)
    assert schedule.num_steps == planner.num_steps and len(schedule.order) == len(documents)
    seconds.put(time.process_time() - start)
    done.wait()
    done.wait()


def pss_mib(pids: list[int]) -> float:
    """Proportional set sizes of the processes together."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 2**10


def measure(num: int, num_processes: int, strategy: str) -> Row:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "spans.arrays"
        lengths = np.clip(np.random.default_rng(0).lognormal(*LENGTHS, num), 1, MAX_LENGTH).astype(np.int64)
        zeros = np.zeros(num, np.int64)
        ledger = Ledger(kept=Count(num, int(lengths.sum()), int(lengths.sum())))
        write_arrays(file, Documents(np.arange(num), zeros, lengths, lengths, ledger).to_arrays())
        del lengths, zeros
        ready, done = context.Barrier(num_processes + 1), context.Barrier(num_processes + 1)
        seconds = context.Queue()
        arguments = (file, strategy, 8 * num_processes, ready, done, seconds)
        processes = [context.Process(target=plan, args=arguments) for _ in range(num_processes)]
        for process in processes:
            process.start()
        pids = [process.pid for process in processes if process.pid is not None]
        ready.wait()
        before, peak = pss_mib(pids), 0.0
        start = time.perf_counter()
        ready.wait()
        while done.n_waiting < num_processes:
            peak = max(peak, pss_mib(pids))
            time.sleep(0.05)
            if any(process.exitcode for process in processes):
                raise SystemExit("a process failed")
        wall = time.perf_counter() - start
        after = pss_mib(pids)
        done.wait()
        done.wait()
        cpu = sum(seconds.get() for _ in processes)
        for process in processes:
            process.join()
    return {
        "strategy": strategy,
        "documents": num,
        "processes": num_processes,
        "wall s": round(wall, 1),
        "CPU s": round(cpu, 1),
        "peak PSS MiB": round(peak - before),
        "PSS MiB after": round(after - before),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--num", type=int, default=10_000_000, help="documents")
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--strategy", default="stream", choices=("stream", "bfd", "minibatch"))
    args = parser.parse_args()
    rows = []
    for num_processes in args.processes:
        rows.append(measure(args.num, num_processes, args.strategy))
        tell(rows[-1])
    write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
