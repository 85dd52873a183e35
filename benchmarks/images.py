"""The balance of ranks on documents with images: modelled, in seconds.

    python benchmarks/images.py --csv images.csv

Qwen2.5-VL with a language model of 3B and of 7B, documents of text and of 0 to 4 images, packs of 8,192 tokens.
Modelled imbalance of packs as they come, balanced by tokens alone, and balanced by text and images; the lower bound;
and the imbalance of both parts under the last.
"""

from dataclasses import replace

import numpy as np
from common import Row, describe, make_parser, write_csv
from support.bounds import imbalance_bound
from support.planners import make_epochs
from transformers import Qwen2_5_VLConfig

from trl_packfix.data.documents import Documents, Ledger
from trl_packfix.data.epochs import EpochPlanner
from trl_packfix.data.model_costs import make_cost_model, with_tower
from trl_packfix.planning.costs import CostModel
from trl_packfix.planning.schedule import imbalance

MODELS = {
    "3B": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
}
MIXES = {"every second with an image": [0, 1], "0 to 4 images": [0, 0, 0, 1, 1, 2, 4], "one image each": [1]}


def cost_model(size: str) -> CostModel:
    heads = {"num_key_value_heads": 4, "vocab_size": 152064}
    tower = {"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": MODELS[size]["hidden_size"]}
    config = Qwen2_5_VLConfig(text_config=MODELS[size] | heads, vision_config=tower)
    return with_tower(make_cost_model(config), config)


def documents(counts: list[int], num: int = 20_000) -> Documents:
    """Lognormal texts, and images of 16 to 2,500 tokens, each of four patches of 1,176 numbers."""
    rng = np.random.default_rng(0)
    total = np.minimum(rng.lognormal(5.5, 1, num).astype(np.int64) + 8, 4000)
    images_of = rng.choice(counts, num)
    values, squares = np.zeros((2, num), dtype=np.int64)
    for i in range(max(counts)):
        tokens = np.minimum(rng.lognormal(6, 0.8, num).astype(np.int64) + 16, 2500) * (images_of > i)
        total += tokens
        values += 4 * 1176 * tokens
        squares += (4 * 1176 * tokens) ** 2
    fits = total <= 8192
    total = total[fits]
    values = values[fits]
    squares = squares[fits]
    images = {"image_values": values, "image_squares": squares}
    return Documents(np.arange(len(total)), 0 * total, total, total, Ledger(), **images)


def balance(size: str, mix: str, ranks: int) -> Row:
    costs = cost_model(size)
    given = documents(MIXES[mix])

    def plan(documents: Documents, balance: str = "step") -> EpochPlanner:
        return make_epochs(documents, "stream", 1, 8192, 2, ranks, cost_model=costs, balance=balance)

    ours = plan(given)
    text = replace(given, image_values=None, image_squares=None)
    image_costs = ours.image_costs
    lengths_of = given.lengths

    def of(planner: EpochPlanner) -> float:
        return imbalance(planner.schedule(0), ours.units().costs(), "micro")

    schedule = ours.schedule(0)
    share = image_costs.sum() / (image_costs.sum() + costs(lengths_of).sum())
    found = [
        of(plan(given, "none")),
        of(plan(text)),
        of(ours),
        imbalance_bound(schedule, ours.units(), 8192, synchronisation="micro"),
        imbalance(schedule, costs(lengths_of), "micro"),
        imbalance(schedule, image_costs, "micro"),
    ]
    print(f"| {size}, {mix} | {ranks} | {share:.0%} |", " | ".join(f"{each:.3f}" for each in found), "|", flush=True)
    names = ("as_they_come", "by_tokens", "by_both", "bound", "language", "images")
    return {"model": size, "documents": mix, "ranks": ranks, "tower": share} | dict(zip(names, found, strict=True))


def main() -> None:
    args = make_parser(__doc__).parse_args()
    print(describe())
    print("| documents | ranks | tower | as they come | by tokens | by both | bound | language | images |")
    print("|---|---|---|---|---|---|---|---|---|")
    write_csv(args.csv, [balance(size, mix, ranks) for size in MODELS for mix in MIXES for ranks in (8, 64)])


if __name__ == "__main__":
    main()
