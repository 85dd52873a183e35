"""Images in packs: the verdict on each family, stock and ours.

    python benchmarks/vision.py --csv vision.csv    # about two minutes

Tiny random models of each family with the real processor, two packs of documents of unequal layout, against each
document alone on an unchanged copy of the model, in float32: the judge of `trl-packfix check`. `stock` is the unchanged
model on the same packs (positions of each document, boundaries, no mask, no cache), which is what concatenating
documents gives. `ours` is the model after the probe and its repair. The number is the largest relative difference of
logits and of any gradient.
"""

import warnings

import torch
from common import describe, make_parser, write_csv
from sweep.image_families import (
    FAMILIES,
    FIRST_WORD,
    LAST_WORD,
    build_model,
    make_examples,
)
from sweep.judge import ImageJudge

from trl_packfix.isolation.packed_model import PackedModel


def judge(family: str) -> tuple[str, str, str]:
    pristine, model = (build_model(family) for _ in range(2))
    try:
        examples = make_examples(family, model)
    except ValueError as error:  # the outputs of its processor cannot be joined
        return "not joined", "refused", str(error)
    truth = ImageJudge(pristine, examples, FIRST_WORD, LAST_WORD)
    stock = truth.judge(build_model(family))
    packed = PackedModel(model, torch.float32, "cpu", 512, feature=examples)
    report = packed.prove(model)
    found = f"raises ({stock.refusal})" if stock.refusal else f"{stock.error:.1e}"
    if not packed.is_proved:
        return found, "refused", report.summary()
    how = "rows of a padded batch" if packed.is_unpacked else ", ".join(map(str, packed.repaired)) or "native"
    return found, f"{truth.judge(model).error:.1e}", how


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print(describe())
    print("| family | stock | ours | how |\n|---|---|---|---|")
    table = []
    for family in args.families:
        stock, ours, how = judge(family)
        print(f"| {family} | {stock} | {ours} | {how} |", flush=True)
        table.append({"family": family, "stock": stock, "ours": ours, "how": how})
    write_csv(args.csv, table)


if __name__ == "__main__":
    main()
