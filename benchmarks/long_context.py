"""Sequence parallelism with the degree chosen per micro-step, against one degree for the whole run: modelled.

    python benchmarks/long_context.py --csv long_context.csv      # about 10 minutes
    python benchmarks/long_context.py --ranks 8 64                # without 512 ranks
    python benchmarks/long_context.py --slow-links --ranks 8 64   # 25 GB/s inside a node, 12.5 GB/s between nodes
    python benchmarks/long_context.py --lengths long.txt          # lengths for `trl-packfix plan`, 40,000 documents

For every model, number of ranks, accumulation, longest document and tokens per rank, the documents of one optimizer
step are divided into micro-steps and groups of ranks that share packs, and the time is modelled:
  smallest   one degree for the run, the smallest that holds the longest document
  best       one degree for the run, the best of all
  chosen     the degree chosen per micro-step, as in training with `tokens_per_rank`
  grouping   the best found with groups of several degrees in one micro-step, which training does not make
  bound      no division is below it: all ranks work all the time, documents longer than the tokens per rank pay the
             exchange of their smallest group, and the longest takes what it takes alone at its best degree
`smallest` and `best` are dealt to groups and micro-steps by the same code as `chosen`, so only the degrees differ.
A table row is a model, a number of ranks and an accumulation: medians, smallest and largest over longest x tokens per
rank. `share` is the share of time in the exchange.

Assumptions: forward, recomputed forward and backward (4 times the FLOPs of a forward pass) at 400 TFLOP/s with any
degree; an all-to-all in bf16 with 300 GB/s to ranks of the same node of 8, with 50 GB/s to others, 20 or 60
microseconds latency, in 3 passes, without overlap; no gathering of parameters; ranks wait for each other after every
micro-step. Lengths are `long` of benchmarks/balance.py, cut at the longest; for more than 128k its tail goes on. Every
draw has a document of at least 3/4 of the longest. A step has 95 % of the tokens that the ranks hold. At most as many
ranks in a group as the model has heads. Nothing here is measured on a GPU.
"""

import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
from balance import draw
from common import Row, cpu_seconds, describe, make_console, make_parser, write_csv
from rich.table import Table
from support.bounds import step_bound

from trl_packfix.planning.arrays import Int64Array
from trl_packfix.planning.costs import LLAMA_7B, CostModel, HeadCounts
from trl_packfix.planning.degrees import DividedStep, UndividedStep
from trl_packfix.planning.parallel import FILL, SequenceParallel, Speeds, possible_degrees, smallest_degree
from trl_packfix.planning.units import Bins, Units

K = 1024
LLAMA_70B = CostModel(  # Llama 3 70B
    per_token=2 * 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672) + 2 * 8192 * 128256,
    per_pair=4 * 80 * 8192,
    attention=(HeadCounts(layers=80, heads=64, kv_heads=8, key_dim=128, value_dim=128),),
)
MODELS = {"7B": LLAMA_7B, "70B": LLAMA_70B}
DRAWS = {8: 6, 64: 3, 512: 1}
LONGEST = (32 * K, 64 * K, 128 * K, 256 * K)
TOKENS_PER_RANK = (8 * K, 16 * K, 32 * K)
SLOW = Speeds(within=25e9, between=12.5e9)
LIMITS = (1.0, 1.1, 1.25, 1.5, 2.0, np.inf)  # times the mean, for `grouping`


def step_lengths(longest: int, tokens: int, seed: int) -> Int64Array:
    """Lengths of the documents of one step, with one of at least 3/4 of the longest, `tokens` in all."""
    num = int(tokens / 700) + 1000
    lengths = draw("long", num, {}, seed)
    rng = np.random.default_rng([seed, longest])
    if longest > 128 * K:
        lengths = np.where(rng.random(num) < 0.0003, 2 ** rng.uniform(17, 18, num), lengths).astype(np.int64)
    lengths = np.minimum(lengths, longest)
    lengths[0] = int(longest * rng.uniform(0.75, 1))
    lengths = lengths[: np.searchsorted(np.cumsum(lengths), tokens)]
    return lengths if len(lengths) else np.array([longest])


def divided(units: Units, bins: Bins, parallel: SequenceParallel) -> DividedStep | None:
    step = UndividedStep(np.arange(len(units)), units, bins, parallel=parallel)
    return step.divide(step.members, bins.accumulation)


def exchange_seconds(found: DividedStep, step: UndividedStep) -> float:
    """Seconds in the exchange, the mean over ranks."""
    world_size = step.bins.world_size
    total = 0.0
    packs = iter(found.packs)
    for degree in found.degrees:
        tokens = np.array([step.units.rows[next(packs)].sum() for _ in range(world_size // degree)])
        total += float(step.times.seconds(np.zeros(len(tokens)), tokens, degree).mean())
    return total


def case(
    model: str, world_size: int, accumulation: int, longest: int, tokens_per_rank: int, seed: int, speeds: Speeds
) -> Row | None:
    """Modelled times of one step; None if no group of ranks holds the longest document."""
    cost_model = MODELS[model]
    try:
        degrees = possible_degrees(longest, tokens_per_rank, world_size, num_heads=cost_model.heads)
    except ValueError:
        return None
    lengths = step_lengths(longest, int(FILL * accumulation * world_size * tokens_per_rank), seed)
    needed = smallest_degree(int(lengths.max()), tokens_per_rank)
    units = Units(lengths, cost_model)
    bins = Bins(capacity=needed * tokens_per_rank, accumulation=accumulation, world_size=world_size)
    parallel = SequenceParallel(tokens_per_rank=tokens_per_rank, smallest=needed, degrees=degrees, speeds=speeds)
    step = UndividedStep(np.arange(len(lengths)), units, bins, parallel=parallel)
    seconds, chosen = cpu_seconds(lambda: divided(units, bins, parallel))
    one = {
        degree: found
        for degree in degrees
        if degree >= needed and (found := divided(units, bins, replace(parallel, degrees=(degree,)))) is not None
    }
    assert chosen is not None
    assert one
    smallest = one[min(one)]
    best = min(one.values(), key=lambda found: found.seconds)
    assert chosen.seconds <= best.seconds * (1 + 1e-12)
    grouping = min(chosen.seconds, *(several_degrees(step, found) for found in (chosen, best, smallest)))
    bound = step_bound(step)
    row: Row = {
        "model": model,
        "ranks": world_size,
        "accumulation": accumulation,
        "longest": longest,
        "tokens_per_rank": tokens_per_rank,
        "seed": seed,
        "documents": len(lengths),
        "degree_smallest": min(one),
        "degree_best": best.degrees[0],
        "degrees_chosen": " ".join(map(str, chosen.degrees)),
    }
    for name, found in (("smallest", smallest), ("best", best), ("chosen", chosen)):
        row[f"{name}_s"] = found.seconds
        row[f"{name}_share"] = exchange_seconds(found, step) / found.seconds
    row |= {"grouping_s": grouping, "bound_s": bound, "us_per_document": seconds / len(lengths) * 1e6}
    row["smallest/chosen"] = smallest.seconds / chosen.seconds
    row["best/chosen"] = best.seconds / chosen.seconds
    row["chosen/grouping"] = chosen.seconds / grouping
    row["chosen/bound"] = chosen.seconds / bound
    return row


def several_degrees(step: UndividedStep, found: DividedStep) -> float:
    """Seconds of the same micro-steps, each with the best groups of several degrees that a search finds."""
    total = 0.0
    packs = iter(found.packs)
    for degree in found.degrees:
        own = [next(packs) for _ in range(step.bins.world_size // degree)]
        documents = np.concatenate(own)
        documents = documents[np.argsort(-step.units.rows[documents], kind="stable")]
        tries = [_with_giants(step, documents, limit, base) for limit in LIMITS for base in (1, 2, 4, 8)]
        total += min([step.make_division(own, degree).seconds, *(seconds for seconds in tries if seconds is not None)])
    return total


def _with_giants(step: UndividedStep, documents: Int64Array, limit: float, base: int) -> float | None:
    """Groups of `base` ranks, and for each document that would outlast `limit` x the mean there the smallest that does
    not; every document to the group that ends first."""
    world_size = step.bins.world_size
    tokens_per_rank = step.parallel.tokens_per_rank
    times = step.times
    if world_size % base:
        return None
    lengths = step.units.rows[documents]
    alone = {  # seconds of each document in a group of this degree, without latency
        degree: times.seconds(step.units.costs(degree)[documents], lengths, degree) - times.exchange_seconds(degree)[1]
        for degree in step.parallel.degrees
        if degree >= base
    }
    most = limit * float(alone[base].sum()) * base / world_size
    groups: list[int] = []
    for i, length in enumerate(lengths.tolist()):
        if length <= base * tokens_per_rank and alone[base][i] <= most:
            break  # the others are shorter
        fits = [degree for degree in alone if length <= degree * tokens_per_rank]
        groups.append(next((degree for degree in fits if alone[degree][i] <= most), fits[-1]))
    groups += [base] * ((world_size - sum(groups)) // base)
    if sum(groups) > world_size:
        return None
    degrees = np.array(groups)
    room = degrees * tokens_per_rank
    load = np.array([times.exchange_seconds(degree)[1] for degree in groups])
    by_degree = {degree: np.flatnonzero(degrees == degree) for degree in set(groups)}
    for i, length in enumerate(lengths.tolist()):
        options = []
        for degree, members in by_degree.items():
            fits = members[room[members] >= length]
            if len(fits):
                group = int(fits[load[fits].argmin()])
                options.append((load[group] + alone[degree][i], group))
        if not options:
            return None
        ends, group = min(options)
        load[group] = ends
        room[group] -= length
    return float(load.max())


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.2f}-{max(values):.2f})"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", nargs="+", type=int, choices=DRAWS, default=list(DRAWS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--slow-links", action="store_true", help="25 GB/s inside a node, 12.5 GB/s between nodes")
    parser.add_argument("--lengths", type=Path, metavar="FILE", help="write lengths of 40,000 documents there")
    args = parser.parse_args()
    if args.lengths:
        np.savetxt(args.lengths, draw("long", 40_000, {}), fmt="%d")
        return
    console = make_console(160)
    console.print(describe())
    ratios = ["smallest/chosen", "best/chosen", "chosen/grouping", "chosen/bound"]
    shares = ["smallest_share", "best_share", "chosen_share"]
    table = Table("model", "ranks", "accum.", "cases", *ratios, "shares: smallest, best, chosen")
    rows = []
    for model in args.models:
        for world_size in args.ranks:
            for accumulation in (1, 4):
                some = [
                    row
                    for longest in LONGEST
                    for tokens in TOKENS_PER_RANK
                    for seed in range(DRAWS[world_size])
                    if (
                        row := case(
                            model,
                            world_size,
                            accumulation,
                            longest,
                            tokens,
                            seed,
                            SLOW if args.slow_links else Speeds(),
                        )
                    )
                ]
                rows += some
                cells = [spread([row[name] for row in some]) for name in ratios]
                share = " ".join(f"{statistics.median(row[name] for row in some):.3f}" for name in shares)
                table.add_row(model, str(world_size), str(accumulation), str(len(some)), *cells, share)
                console.print(model, world_size, accumulation, *cells, style="dim")
    console.print(table)
    above = sorted((row["chosen/grouping"] for row in rows), reverse=True)
    cost = [row["us_per_document"] for row in rows]
    console.print(
        f"{len(rows)} cases; above 1.03 of the best grouping: {sum(x > 1.03 for x in above)}, the largest "
        f"{above[0]:.3f}; to divide a step: {statistics.median(cost):.0f} microseconds per document (largest "
        f"{max(cost):.0f})"
    )
    write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
