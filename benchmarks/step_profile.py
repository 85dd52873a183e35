"""Where the time of a training step on the CPU goes, by torch.profiler.

    python benchmarks/step_profile.py --csv step_profile.csv    # about 1 minute

One pack of 8192 tokens (lognormal lengths with the median and mean of t0_p3_sample) in one step of our `stream`,
loader and SGD included, and the same documents, eight at a time, in the steps of unpacked TRL; `contenders.py`, Llama
512 x 2 layers, one thread. Shares are of the time of the whole epoch, each operation with its own time. `outside` is
the rest: Python, the collator, the autograd engine and the profiler's own cost, so it is an upper bound.
"""

import time

import torch
from common import Row, describe, hide_progress, make_console, make_parser, write_csv
from contenders import Contender, Size, document_lengths, fill, make_documents
from rich.table import Table

NUM_TOKENS = 8192
# first match decides
KINDS = {
    "attention": ("scaled_dot_product", "flash_attention"),
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::matmul", "aten::linear", "mkldnn"),
    "copies": ("aten::copy_", "aten::cat", "aten::clone", "aten::fill_", "aten::zero_", "aten::slice_backward"),
    "other operations": ("",),
}


def kind_of(operation: str) -> str:
    return next(kind for kind, names in KINDS.items() if any(name in operation for name in names))


def profiled(name: str, batch_size: int, max_length: int) -> tuple[Row, list[tuple[str, float]]]:
    """Shares of the epoch's wall time by kind, and the ten costliest operations."""
    lengths = fill(document_lengths("t0_p3_sample", None), NUM_TOKENS)
    contender = Contender(name, Size(512, 2), make_documents(lengths), batch_size, max_length)
    contender.epoch()  # warms up
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        start = time.perf_counter()
        steps = contender.epoch()["steps"]
        total = time.perf_counter() - start
    seconds = {event.key: event.self_cpu_time_total / 1e6 for event in profile.key_averages()}
    shares = dict.fromkeys(KINDS, 0.0)
    # entries of the autograd engine and of the optimizer are frames around operations
    for key, value in seconds.items():
        if "::" in key and not key.startswith(("autograd::", "torch::")):
            shares[kind_of(key)] += value / total
    row: Row = {"method": name, "steps": steps, "seconds": total, **shares, "outside": 1 - sum(shares.values())}
    return row, sorted(((key, value / total) for key, value in seconds.items()), key=lambda x: -x[1])[:10]


def main() -> None:
    parser = make_parser(__doc__)
    args = parser.parse_args()
    torch.set_num_threads(1)
    hide_progress()
    console = make_console(140)
    console.print(describe())

    rows, table = [], Table("method", "steps", "seconds", *KINDS, "outside")
    for name, batch_size, max_length in (("ours stream", 1, NUM_TOKENS), ("TRL unpacked", 8, NUM_TOKENS)):
        row, costliest = profiled(name, batch_size, max_length)
        rows.append(row)
        shares = [f"{row[kind]:.1%}" for kind in (*KINDS, "outside")]
        table.add_row(name, str(row["steps"]), f"{row['seconds']:.2f}", *shares)
        console.print(name, ", ".join(f"{key} {share:.1%}" for key, share in costliest), style="dim")
    console.print(f"[bold]Where a step's time goes[/], {NUM_TOKENS} tokens, {Size(512, 2)}", table)
    write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
