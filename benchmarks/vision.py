"""Images in packs: the verdict on each family, stock and ours, and what packing saves on mixed sizes.

    python benchmarks/vision.py --no-speed --csv vision.csv                      # about two minutes
    python benchmarks/vision.py --families llava qwen2_5_vl llava_next --csv vision_steps.csv

Verdicts: tiny random models of each family with the real processor, two packs of documents of unequal layout, against
each document alone on an unchanged copy of the model, in float32: the judge of `trl-packfix check`. `stock` is the
unchanged model on the same packs (positions of each document, boundaries, no mask, no cache), which is what
concatenating documents gives. `ours` is the model after the probe and its repair. The number is the largest relative
difference of logits and of any gradient.

Speed: five steps on the CPU with the same documents in every step, padded by TRL and packed by `minibatch`; CPU seconds
of the process, without the measuring of lengths, and tokens that the language part reads. Families whose processor
takes no text alone, or cannot be joined, have no speed here.
"""

import tempfile
import time
import warnings

import torch
import trl
from common import describe, make_parser, write_csv
from support.runs import config
from support.vision import rows
from sweep.image_families import (
    FAMILIES,
    FIRST_WORD,
    LAST_WORD,
    build_model,
    build_processor,
    make_examples,
)
from sweep.judge import ImageJudge
from transformers import TrainerCallback

from trl_packfix import SFTConfig, SFTTrainer
from trl_packfix.isolation.packed_model import PackedModel


def judge(family: str) -> tuple[str, str, str]:
    pristine, model = (build_model(family) for _ in range(2))
    try:
        examples = make_examples(family, model)
    except ValueError as error:  # the outputs of its processor cannot be joined
        return "not joined", "refused", str(error)
    truth = ImageJudge(pristine, examples, FIRST_WORD, LAST_WORD)
    stock = truth.judge(build_model(family))
    packed = PackedModel(model, torch.float32, "cpu", 512, images=examples)
    report = packed.prove(model)
    found = f"raises ({stock.refusal})" if stock.refusal else f"{stock.error:.1e}"
    if not packed.is_proved:
        return found, "refused", report.summary()
    how = "rows of a padded batch" if packed.is_unpacked else ", ".join(map(str, packed.repaired)) or "native"
    return found, f"{truth.judge(model).error:.1e}", how


def speed(family: str, packed: bool) -> tuple[float, int]:
    settings = {"per_device_train_batch_size": 8, "max_steps": 5, "max_length": 512}
    settings |= {"packing_strategy": "minibatch"} if packed else {"packing": False, "max_length": None}
    trainer_class, config_class = (SFTTrainer, SFTConfig) if packed else (trl.SFTTrainer, trl.SFTConfig)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(
            build_model(family),
            config(folder, config_class=config_class, **settings),
            train_dataset=rows(64, seed=2),
            processing_class=build_processor(family),
        )
        tokens = 0

        def count(module, args, kwargs) -> None:
            nonlocal tokens
            tokens += kwargs["input_ids"].numel()

        trainer.add_callback(Proved(trainer, lambda: trainer.model.register_forward_pre_hook(count, with_kwargs=True)))
        trainer.train()
        return time.process_time() - Proved.start, tokens


def saving(family: str) -> dict[str, float]:
    """Medians of three runs of each kind, which take turns."""
    runs = [(speed(family, packed=False), speed(family, packed=True)) for _ in range(3)]
    (padded_s, padded_tokens), (packed_s, packed_tokens) = (
        (sorted(run[i][0] for run in runs)[1], runs[0][i][1]) for i in (0, 1)
    )
    row = {"padded_s": padded_s, "packed_s": packed_s, "ratio": padded_s / packed_s}
    return row | {"padded_tokens": padded_tokens, "packed_tokens": packed_tokens}


class Proved(TrainerCallback):
    """Starts the clock, and counting, at the first step: after the probe."""

    start = 0.0

    def __init__(self, trainer, begin):
        self.begin, self.has_begun = begin, False

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if not self.has_begun:
            self.has_begun, Proved.start = True, time.process_time()
            self.begin()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--no-speed", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print(describe())
    print("| family | stock | ours | how |\n|---|---|---|---|")
    table = []
    for family in args.families:
        stock, ours, how = judge(family)
        print(f"| {family} | {stock} | {ours} | {how} |", flush=True)
        table.append({"family": family, "stock": stock, "ours": ours, "how": how})
    if not args.no_speed:
        print("| family | padded s | packed s | ratio | padded tokens | packed tokens |\n|---|---|---|---|---|---|")
        for family, row in zip(args.families, table, strict=True):
            row |= saving(family)
            seconds = f"{row['padded_s']:.2f} | {row['packed_s']:.2f} | {row['ratio']:.2f}"
            print(f"| {family} | {seconds} | {row['padded_tokens']} | {row['packed_tokens']} |", flush=True)
    write_csv(args.csv, table)


if __name__ == "__main__":
    main()
