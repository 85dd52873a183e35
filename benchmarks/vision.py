"""Images in packs: the verdict on each family, stock and ours, and what packing saves on mixed sizes.

    python benchmarks/vision.py                  # about four minutes
    python benchmarks/vision.py --families llava qwen2_5_vl --no-speed

Verdicts: tiny random models of each family with the real processor, one pack of eight documents of unequal layout,
against each document alone on an unchanged copy of the model, in float32. `stock` is the unchanged model on the same
pack (positions of each document, boundaries, no mask, no cache), which is what concatenating documents gives. `ours` is
the model after the probe and its repair. The number is the largest relative difference of logits and of any gradient.

Speed: five steps on the CPU with the same documents in every step, padded by TRL and packed by `minibatch`; CPU seconds
of the process, without the measuring of lengths, and tokens that the language part reads.
"""

import argparse
import tempfile
import time
import warnings

import torch
import trl
from about import describe
from support.runs import config
from support.vision import FAMILIES, MORE, build_model, build_processor, rows
from transformers import TrainerCallback
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from trl_packfix import SFTConfig, SFTTrainer
from trl_packfix.data.image_collator import ImageExamples, RopeIndex
from trl_packfix.data.images import RowProcessor
from trl_packfix.isolation.packed_model import PackedModel


def trained(model, batch, tokens):
    """Logits of a batch of one row, and the gradients of its summed loss are added."""
    logits = model(**batch).logits[0]
    torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], ignore_index=-100, reduction="sum").backward()
    return logits.detach()


def difference(model, pristine, examples, documents) -> float:
    pristine.zero_grad()
    model.zero_grad()
    alone = [trained(pristine, examples.alone(each), torch.as_tensor(each["input_ids"]).long()) for each in documents]
    batch = examples.packed(documents)
    labels = batch["input_ids"][0].clone()
    labels[batch["cu_seq_lens_q"][:-1].long()] = -100
    logits = trained(model, batch, labels)
    gaps = [((logits - torch.cat(alone)).abs().max() / torch.cat(alone).abs().max()).item()]
    wanted = {name: p.grad for name, p in pristine.named_parameters() if p.grad is not None}
    floor = 1e-3 * max(value.abs().max() for value in wanted.values())
    for name, p in model.named_parameters():
        if name in wanted:
            gaps.append(((p.grad - wanted[name]).abs().max() / wanted[name].abs().max().clamp(min=floor)).item())
    return max(gaps)


def judge(family: str) -> tuple[str, str, str]:
    process = RowProcessor(DataCollatorForVisionLanguageModeling(build_processor(family)))
    pristine, stock, model = (build_model(family).train() for _ in range(3))
    kind = type(model.base_model)
    rope_index = RopeIndex(kind, model.config) if hasattr(kind, "get_rope_index") else None
    examples = ImageExamples(process, rope_index=rope_index)
    documents = [process(row) for row in rows(8, seed=1)]
    try:
        found = f"{difference(stock, pristine, examples, documents):.1e}"
    except Exception as error:  # any error of the model
        found = f"raises ({type(error).__name__})"
    packed = PackedModel(model, torch.float32, "cpu", 512, images=examples)
    report = packed.prove(model)
    if not (report.isolated and report.equal):
        return found, "refused", report.summary()
    how = "unpacked" if packed.is_unpacked else ", ".join(map(str, packed.repaired)) or "native"
    return found, f"{difference(model, pristine, examples, documents):.1e}", how


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=FAMILIES + MORE, choices=FAMILIES + MORE)
    parser.add_argument("--no-speed", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print(describe())
    print("| family | stock | ours | how |\n|---|---|---|---|")
    for family in args.families:
        print("| {} | {} | {} | {} |".format(family, *judge(family)), flush=True)
    if args.no_speed:
        return
    print("| family | padded s | packed s | ratio | padded tokens | packed tokens |\n|---|---|---|---|---|---|")
    for family in args.families:
        runs = [(speed(family, packed=False), speed(family, packed=True)) for _ in range(3)]
        padded, packed = (sorted(run[i][0] for run in runs)[1] for i in (0, 1))
        tokens = [runs[0][i][1] for i in (0, 1)]
        print(
            f"| {family} | {padded:.2f} | {packed:.2f} | {padded / packed:.2f} | {tokens[0]} | {tokens[1]} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
