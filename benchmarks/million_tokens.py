"""The recipe of a million tokens: memory and time of a step, predicted, packed and with one document per step.

    python benchmarks/million_tokens.py --csv million_tokens.csv    # 1 CPU minute

Qwen3-8B at 1,048,576 tokens on 8 GPUs with ZeRO-3, as `trl-packfix recipes qwen3-8b-1m`. TRL's example trains one
 per step with context parallelism over all GPUs and FSDP2, without packing: 380 s and 56.2 GB, measured on 8
H100 (https://github.com/huggingface/trl/pull/6846). The times here are modelled as those by which degrees are chosen
(`Speeds`), with one thing more: a micro-step takes no less than to gather the weights twice and reduce the gradients.

    one      every document is a step of its own, divided among all 8 ranks
    packed   `tokens_per_rank=131072`: documents fill packs, with a degree for each micro-step
    share    of the tokens that is in documents of 131,072 to 1,048,576 tokens; the others have a median of 600

An epoch has the same tokens in both. The number of optimizer steps differs, as between any two batch sizes.
"""

import numpy as np
from common import Row, describe, make_console, make_parser, write_csv
from rich.table import Table
from support.planners import make_epochs
from transformers import Qwen3Config

from trl_packfix.data.documents import Documents, Ledger
from trl_packfix.data.model_costs import make_cost_model
from trl_packfix.data.model_memory import GIB, Method, count_model, predict_peak
from trl_packfix.planning.arrays import Int64Array
from trl_packfix.planning.degrees import GroupTimes, Speeds, modelled_time

LONGEST, RANKS = 1_048_576, 8
TOKENS_PER_RANK = LONGEST // RANKS
CONFIG = Qwen3Config(
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=LONGEST,
    tie_word_embeddings=False,
)
NUM_STEPS = 16  # of a million tokens each


def draw(share: float, seed: int = 0) -> Int64Array:
    """Lengths of documents: `share` of their tokens in long ones, which are spread evenly by order of magnitude."""
    rng = np.random.default_rng(seed)
    long = (2 ** rng.uniform(17, 20, 1000)).astype(np.int64)
    short = np.maximum(rng.lognormal(np.log(600), 1.0, 200_000), 10).astype(np.int64).clip(max=TOKENS_PER_RANK)
    tokens = NUM_STEPS * LONGEST
    parts = [
        lengths[: np.searchsorted(np.cumsum(lengths), of_tokens)]
        for lengths, of_tokens in ((long, share * tokens), (short, (1 - share) * tokens))
    ]
    return rng.permutation(np.concatenate(parts))


def main() -> None:
    args = make_parser(__doc__).parse_args()
    console = make_console(150)
    console.print(describe())
    method = Method(False, "ZeRO-3")
    sizes = count_model(CONFIG, method)
    table = Table("tokens on a GPU", "offload", "activations", "layer", "peak, GiB", "of the host, GiB")
    rows: list[Row] = []
    for tokens in (TOKENS_PER_RANK // 2, TOKENS_PER_RANK):
        for offload in (False, True):
            peak = predict_peak(sizes, method, tokens=tokens, gpus=RANKS, checkpointing=True, offload=offload)
            host = sum(sizes.saved.inputs) * tokens if offload else 0.0
            cells = [size / GIB for size in (peak.activations, peak.layer, peak.total, host)]
            table.add_row(f"{tokens:,}", str(offload), *(f"{cell:.1f}" for cell in cells))
            rows.append({"tokens": tokens, "offload": offload, "peak_gib": cells[2], "host_gib": cells[3]})
    console.print(table)

    costs, speeds = make_cost_model(CONFIG), Speeds()
    times = GroupTimes(costs, speeds)
    # A rank receives 7/8 of the bf16 weights in forward and in backward, and sends as many gradients
    gather = 3 * 2 * sizes.parameters * (RANKS - 1) / RANKS / speeds.within
    table = Table(
        "share", "documents", "one, steps", "one, s", "packed, steps", "packed, s", "one / packed", "over bound"
    )
    for share in (1.0, 0.9, 0.5, 0.1):
        lengths = draw(share)
        num = len(lengths)
        one = np.maximum(times.seconds(costs(lengths), lengths, RANKS), gather)
        documents = Documents(np.arange(num), np.zeros(num, np.int64), lengths, lengths, Ledger())
        planner = make_epochs(
            documents, "stream", 1, LONGEST, world_size=RANKS, tokens_per_rank=TOKENS_PER_RANK, cost_model=costs
        )
        schedule = planner.schedule(0)
        modelled = modelled_time(schedule, planner.units(), planner.bins, parallel=planner.parallel)
        packed = np.maximum(modelled.seconds, gather)
        row: Row = {"share": share, "documents": num, "one_s": one.sum(), "packed_steps": schedule.num_steps}
        row |= {"packed_s": packed.sum(), "ratio": one.sum() / packed.sum(), "bound": packed.sum() / modelled.bound}
        rows.append(row)
        table.add_row(
            f"{share:.0%}",
            f"{num:,}",
            f"{num:,}",
            f"{one.sum():,.0f}",
            f"{schedule.num_steps:,}",
            f"{packed.sum():,.0f}",
            f"{row['ratio']:.2f}",
            f"{row['bound']:.3f}",
        )
    console.print(table)
    whole = float(times.seconds(costs(np.array([LONGEST])), np.array([LONGEST]), RANKS)[0])
    console.print(f"one document of {LONGEST:,} tokens: {whole:.0f} s; a gathering of the weights: {gather:.3f} s")
    write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
