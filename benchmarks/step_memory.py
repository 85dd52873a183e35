"""How the memory of a training step on the CPU grows with T, the tokens of its batch.

    python benchmarks/step_memory.py --csv step_memory.csv    # about 2 minutes

One pack of T tokens in one step (`contenders.py`; Llama 256 x 1 layer; lognormal lengths with the median and mean of
t0_p3_sample), T doubling, for our `stream` and TRL's packing (`bfd`, sdpa), and the same documents as one padded batch
for unpacked TRL. Each method runs in a separate process. Linux only: the kernel's high-water mark of the process is
reset before a step (`clear_refs`), and its rise during the step is counted. So every byte counts, also scratch memory.
MALLOC_ variables make the allocator return buffers at once, so that no step reuses memory of an earlier one.

The fit is bytes = a + b T + c T^2, least squares of the relative error, and never negative; `slope` is the exponent
between the two largest T. A mask over all pairs of tokens shows in c: one byte per pair as bool, four more as the fp32
bias that sdpa makes of it. Linear memory has c = 0 and a slope of at most 1.
"""

import argparse
import gc
import json

import numpy as np
from common import describe, hide_progress, make_console, make_parser, peak_growth, run_again, write_csv
from rich.table import Table

# method -> the largest T; TRL's mask of 32,768 tokens by 32,768 takes more than 5 GB
LARGEST = {"ours stream": 32_768, "TRL packing bfd": 16_384, "TRL unpacked": 16_384}
SMALLEST, WARM_UP = 1024, 128


def peaks(method: str, largest: int) -> list[dict[str, int]]:
    """T, tokens with padding, and bytes of the high-water mark for T = 1024, 2048, ..., largest, in this process."""
    import torch
    from contenders import Contender, Size, document_lengths, fill, make_documents

    torch.set_num_threads(1)
    hide_progress()
    lengths, size = document_lengths("t0_p3_sample", None), Size(256, 1)

    def step(num_tokens: int) -> dict[str, int]:
        chosen = fill(lengths, num_tokens)
        # unpacked, the documents are the rows of one batch; packed, they are one row
        batch_size, max_length = (len(chosen), num_tokens) if method == "TRL unpacked" else (1, num_tokens)
        contender = Contender(method, size, make_documents(chosen), batch_size, max_length)
        gc.collect()
        growth, row = peak_growth(contender.epoch)
        assert row["steps"] == 1, f"{method}: {row['steps']} steps"
        return {"T": num_tokens, "padded_tokens": row["padded_tokens"], "bytes": growth}

    step(WARM_UP)
    found, num_tokens = [], SMALLEST
    while num_tokens <= largest:
        found.append(step(num_tokens))
        num_tokens *= 2
    return found


def fitted(tokens: np.ndarray, peak: np.ndarray) -> dict[str, float]:
    """a, b, c of a + b T + c T^2 with the smallest relative error, none of them negative; exponent at the end."""
    columns = np.stack([np.ones(len(tokens)), tokens, tokens**2], axis=1) / peak[:, None]
    best, least = np.zeros(3), np.inf
    for used in ([0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
        found = np.zeros(3)
        found[used] = np.linalg.lstsq(columns[:, used], np.ones(len(tokens)))[0]
        rest = np.square(columns @ found - 1).sum()
        if found.min() >= 0 and rest < least:
            best, least = found, rest
    a, b, c = best
    slope = np.log(peak[-1] / peak[-2]) / np.log(tokens[-1] / tokens[-2])
    error = np.abs(columns @ best - 1).max()
    return {"constant": a, "bytes_per_token": b, "bytes_per_pair": c, "fit_error": error, "slope": slope}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--largest", type=int, metavar="T", help="no T above this")
    parser.add_argument("--method", choices=LARGEST, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.method:
        print(json.dumps(peaks(args.method, min(LARGEST[args.method], args.largest or 2**30))))
        return

    console = make_console(140)
    console.print(describe())
    table, rows = Table("method", "T", "padded tokens", "MB", "bytes per token", "bytes per pair", "slope"), []
    for method in LARGEST:
        found = run_again("--method", method, MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536")
        tokens = np.array([row["padded_tokens" if method == "TRL unpacked" else "T"] for row in found], dtype=float)
        fit = fitted(tokens, np.array([row["bytes"] for row in found], dtype=float))
        for row in found:
            rows.append({"method": method, **row, **fit})
            last = row is found[-1]
            figures = [f"{fit['bytes_per_token']:.0f}", f"{fit['bytes_per_pair']:.2f}", f"{fit['slope']:.2f}"]
            table.add_row(
                method, str(row["T"]), str(row["padded_tokens"]), f"{row['bytes'] / 1e6:.0f}", *figures * last
            )
        table.add_section()
    console.print(table)
    write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
