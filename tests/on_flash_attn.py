"""Runs packed models through transformers' flash path on the CPU, with a strict stand-in for flash-attn.

    python tests/on_flash_attn.py judge llama qwen3   # a JSON line per model type: probe, judge, what was recorded
    python tests/on_flash_attn.py judge --all         # every causal-LM type, some minutes
    python tests/on_flash_attn.py images qwen2_5_vl   # the probe with images, vision tower and text on flash attention
    python tests/on_flash_attn.py train FOLDER        # a JSON line per training

A process of its own: transformers must believe that flash-attn is installed and that the CPU is a device for it. What
the stand-in (`support/flash_attn_site`) can and cannot show is said in its `strict.py`. Beyond its limits, nothing is
replaced here but this belief: the path is transformers' own, from `set_attn_implementation` to the call of the kernel.
"""

import sys
from functools import partial
from pathlib import Path

import support  # isort: skip - sets the environment before torch is imported

sys.path.insert(0, str(Path(support.__file__).parent / "flash_attn_site"))

import time

import torch
import transformers
from flash_attn import strict
from support.launch import print_rows, seen_by
from support.models import build_tiny_model
from support.runs import build_trainer, checkpointing, plain_sgd, proved, random_lora, texts, weights
from sweep import zoo
from sweep.judge import Judge
from sweep.model_types import MAX_LENGTH
from transformers import modeling_flash_attention_utils
from transformers.utils import import_utils

from trl_packfix.attention import choice
from trl_packfix.isolation import packed_model

recorded = partial(seen_by, strict)  # since the last call


def believe_in_flash_attn() -> None:
    """transformers asks once whether there is CUDA, and caches the answer with that for flash-attn."""
    answers = (import_utils.is_torch_cuda_available, import_utils.is_flash_attn_2_available)
    for answer in answers:
        answer.cache_clear()
    asked = torch.cuda.is_available
    torch.cuda.is_available = lambda: True
    assert import_utils.is_flash_attn_2_available()
    torch.cuda.is_available = asked
    import_utils.is_torch_cuda_available.cache_clear()
    modeling_flash_attention_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]["supported_devices"] = (
        (lambda: True, "cpu"),
    )
    choice.cuda_varlen_problem = lambda: None  # torch for the CPU is built without its flash kernels


def judge(model_type: str) -> dict:
    """Return the results of probe and judge for a tiny model, in fp32, on the attention that CUDA would get."""
    started = time.process_time()
    try:
        pristine = zoo.build_model(model_type)
        truth = Judge(pristine)
    except Exception as error:
        return {"type": model_type, "attention": "", "no_text": str(error)}
    recorded()
    model = zoo.build_model(model_type)
    try:
        packed, report = proved(model, dtype=torch.bfloat16, device="cuda", max_length=MAX_LENGTH)
    except Exception as error:
        return {"type": model_type, "attention": "", "refused": f"{type(error).__name__}: {error}"} | recorded()
    judgement = truth.judge(model)
    row = {"type": model_type, "attention": packed.attention.name, "unpacked": packed.is_unpacked}
    row |= {"proved": report.isolated and report.equal, "right": judgement.right, "error": judgement.error}
    row |= {"refusal": judgement.refusal, "repairs": "; ".join(map(str, packed.repaired))}
    return row | recorded() | {"seconds": round(time.process_time() - started, 1)}


def judge_images(family: str) -> dict:
    """Return what the probe finds on packs with images where the whole model has `flash_attention_2`."""
    from sweep.image_families import build_model, make_examples

    # As in transformers 5.16, which passes the boundaries of the text on to the tower
    transformers.utils.generic._FLASH_VARLEN_KWARGS = frozenset()
    model = build_model(family)
    model.set_attn_implementation("flash_attention_2")
    recorded()
    packed, report = proved(model, dtype=torch.bfloat16, device="cuda", feature=make_examples(family, model))
    row = {"type": family, "attention": packed.attention.name, "unpacked": packed.is_unpacked}
    row |= {"tower": model.config.vision_config._attn_implementation, "repairs": list(map(str, packed.repaired))}
    return row | {"proved": report.isolated and report.equal, "reason": packed.attention.reason} | recorded()


def train(folder: Path, model_type: str, lora: bool, reentrant: bool | None) -> dict:
    """Train two optimizer steps of `SFTTrainer`; the change of the weights comes back as a tensor."""
    packed_model.choose_attention = choose_for_cuda  # the model itself stays on the CPU
    settings = plain_sgd(1.0, bf16=True, max_steps=2, seed=3) | checkpointing(reentrant)
    torch.manual_seed(0)
    model = build_tiny_model(model_type)
    trainer = build_trainer(folder, texts(), model, peft_config=random_lora() if lora else None, **settings)
    start_weights = weights(trainer)
    recorded()
    trainer.train()
    row = {"type": model_type, "lora": lora, "reentrant": reentrant}
    row |= {"trained_with": trainer.packed_model.attention.name, "change": weights(trainer) - start_weights}
    row |= {"repaired": len(trainer.packed_model.repaired), "first_step": trainer.packing_report.first_step}
    return row | recorded()


def choose_for_cuda(model, enforce_flash_attention, dtype, device_type, **options):
    return choice.choose_attention(model, enforce_flash_attention, dtype, device_type="cuda", **options)


def trainings(folder: Path):
    """Yield a row for each training on flash attention; the trainer compares its first step with unpacked training."""
    for model_type in ("llama", "gemma3"):
        for lora in (False, True):
            first = None
            for reentrant in (None, True, False):
                row = train(folder, model_type, lora, reentrant)
                change = row.pop("change")
                first = change if first is None else first
                row["as_without_checkpointing"] = torch.equal(change, first)
                yield row


if __name__ == "__main__":
    believe_in_flash_attn()
    if sys.argv[1] != "train":
        strict.dtypes |= {torch.float32, torch.float64}
    print_rows(
        judge=lambda *types: map(judge, zoo.causal_types() if types == ("--all",) else types),
        images=lambda *families: map(judge_images, families),
        train=lambda folder: trainings(Path(folder)),
    )
