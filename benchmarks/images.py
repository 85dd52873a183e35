"""Documents with images before training: the time to measure their lengths, and the balance of ranks.

    python benchmarks/images.py --csv images.csv # about five minutes
    python benchmarks/images.py --num 100 --families llava

Lengths: JPEGs of 0.2 to 0.4 megapixels, one per row; half have one of four common sizes, the others a height of their
own. `every image` runs the processor on every row. `by sizes` is what training, `plan` and `prepare` do: images of a
size that was seen are not processed, except in every 16th row. `decoding` is a part of both. CPU seconds of one core,
with processors of the usual settings of the family. All lengths are compared.

Balance: Qwen2.5-VL with a language model of 3B and of 7B, documents of text and of 0 to 4 images, packs of 8,192
tokens. Modelled imbalance of packs as they come, balanced by tokens alone, and balanced by text and images; the
lower bound; and the imbalance of both parts under the last.
"""

import io
import warnings
from dataclasses import replace

import datasets
import numpy as np
from common import Row, cpu_seconds, describe, make_parser, write_csv
from datasets import Dataset, Features, Image, List
from PIL import Image as Picture
from support.planners import make_epochs
from support.vision import MESSAGES, build_processor, message
from transformers import Qwen2_5_VLConfig
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from trl_packfix.data import image_rows
from trl_packfix.data.documents import Documents, Ledger
from trl_packfix.data.epochs import EpochPlanner
from trl_packfix.data.model_costs import make_cost_model, with_tower
from trl_packfix.planning.costs import CostModel
from trl_packfix.planning.imbalance import imbalance, imbalance_bound

COMMON = [(640, 480), (480, 640), (640, 427), (427, 640)]
FAMILIES = ("qwen2_5_vl", "llava", "idefics3")
MODELS = {
    "3B": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
}
MIXES = {"every second with an image": [0, 1], "0 to 4 images": [0, 0, 0, 1, 1, 2, 4], "one image each": [1]}


def photos(num: int) -> Dataset:
    rng = np.random.default_rng(0)
    table = []
    for i in range(num):
        size = COMMON[i // 2 % 4] if i % 2 else (640, int(rng.integers(320, 640)))
        blurred = Picture.fromarray(rng.integers(0, 256, (size[1] // 8, size[0] // 8, 3), dtype=np.uint8)).resize(size)
        buffer = io.BytesIO()
        blurred.save(buffer, "JPEG", quality=90)
        chat = [message("user", "what does it show? ", 1), message("assistant", "a thing " * int(rng.integers(1, 30)))]
        table.append({"images": [{"bytes": buffer.getvalue(), "path": None}], "messages": chat})
    return Dataset.from_list(table, features=Features({"images": List(Image()), "messages": MESSAGES}))


def processor(family: str) -> image_rows.RowProcessor:
    """Of the tests, with the sizes of published checkpoints."""
    found = build_processor(family)
    settings = found.image_processor
    if family == "qwen2_5_vl":
        settings.patch_size, settings.size = 14, {"shortest_edge": 3136, "longest_edge": 12845056}
    elif family == "llava":
        found.patch_size, settings.size = 14, {"shortest_edge": 336}
        settings.crop_size = {"height": 336, "width": 336}
    else:
        found.image_seq_len, settings.size = 169, {"longest_edge": 1456}
        settings.max_image_size = {"longest_edge": 364}
    return image_rows.RowProcessor(DataCollatorForVisionLanguageModeling(found))


def lengths(family: str, dataset: Dataset) -> Row:
    process = processor(family)
    process(dataset[0])  # imports and the first call are not measured
    decoding, _ = cpu_seconds(lambda: [len(row["images"]) for row in dataset])
    by_size, found = cpu_seconds(lambda: image_rows.measure(dataset, process, "benchmark", num_proc=None, drops=False))
    trusts, image_rows.depends_on_sizes = image_rows.depends_on_sizes, lambda processor: False
    every, wanted = cpu_seconds(lambda: image_rows.measure(dataset, process, "benchmark", num_proc=None, drops=False))
    image_rows.depends_on_sizes = trusts
    same = sum(one == other for one, other in zip(found["length"], wanted["length"], strict=True))
    mean = np.mean(wanted["length"])
    row = (family, f"{mean:,.0f}", f"{every:.1f}", f"{by_size:.1f}", f"{every / by_size:.1f}", f"{decoding:.1f}")
    print("|", " | ".join(row), f"| {same:,} of {len(found):,} |", flush=True)
    times = {"every_image_s": every, "by_sizes_s": by_size, "decoding_s": decoding}
    return {"family": family, "rows": len(found), "mean_tokens": mean, **times, "same_length": same}


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
    total, values, squares = total[fits], values[fits], squares[fits]
    images = {"image_values": values, "image_squares": squares}
    return Documents(np.arange(len(total)), 0 * total, total, total, Ledger(), **images)


def balance(size: str, mix: str, ranks: int) -> Row:
    costs, given = cost_model(size), documents(MIXES[mix])

    def plan(documents: Documents, balance: str = "step") -> EpochPlanner:
        return make_epochs(documents, "stream", 1, 8192, 2, ranks, cost_model=costs, balance=balance)

    ours, text = plan(given), replace(given, image_values=None, image_squares=None)
    image_costs, lengths_of = ours.image_costs, given.lengths

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
    parser = make_parser(__doc__)
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--num", type=int, default=1000, help="rows to measure (default: 1000)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    datasets.disable_progress_bars()
    print(describe())
    print(f"| {args.num:,} rows | tokens, mean | every image | by sizes | ratio | decoding | same length |")
    print("|---|---|---|---|---|---|---|")
    dataset = photos(args.num)
    table = [lengths(family, dataset) for family in args.families]
    print("\n| documents | ranks | tower | as they come | by tokens | by both | bound | language | images |")
    print("|---|---|---|---|---|---|---|---|---|")
    table += [balance(size, mix, ranks) for size in MODELS for mix in MIXES for ranks in (8, 64)]
    write_csv(args.csv, table)


if __name__ == "__main__":
    main()
