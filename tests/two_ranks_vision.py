"""Packs with images on any number of ranks; `test_vision.py` launches it on two.

    python tests/two_ranks_vision.py FOLDER

A pair of forks runs all scenarios of an engine ("ddp", "zero3" or "fsdp2"), and the main process saves them as
FOLDER/ENGINE/NAME.pt. A test calls `five` in its own process for the numbers of one rank.
"""

import os
import sys
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from accelerate.utils import gather_object
from peft import LoraConfig
from support.launch import fork_ranks
from support.versions import run_deepspeed_on_cpus
from support.vision import LANGUAGE, QUESTIONS, SGD, build_model, make, rows
from torch.distributed.tensor import DTensor
from two_ranks import engine_of, engine_settings

ZERO3 = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "zero_allow_untested_optimizer": True,
}
KINDS = {
    "ddp": ("full", "shared"),
    "zero3": ("full", "lora"),
    "fsdp2": ("frozen", "shared"),
}


def whole(run) -> dict[str, torch.Tensor]:
    """The trained weights by name, gathered from all ranks."""
    found = {}
    for name, parameter in run.model.named_parameters():
        if not parameter.requires_grad:
            continue
        if hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters(parameter):
                value = parameter.detach().clone()
        else:
            value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        found[name] = value.detach().double().cpu()
    return found


def five(folder: Path, kind: str, size: int = 4, model=None, **settings) -> dict:
    """Five steps of four documents: all weights, all but those of the tower, or adapters of the language part.

    "shared" has several questions about each image.
    """
    kwargs = {}
    if kind == "shared":
        settings["dataset"] = QUESTIONS
    model = build_model("qwen2_5_vl") if model is None else model
    if kind == "frozen":
        model.model.visual.requires_grad_(False)
    if kind == "lora":
        torch.manual_seed(0)
        kwargs["peft_config"] = LoraConfig(r=4, target_modules=LANGUAGE, init_lora_weights="gaussian")
    settings = SGD | settings | {"per_device_train_batch_size": size}
    run = make(folder / kind, model=model, trainer_kwargs=kwargs, packing_strategy="minibatch", **settings)
    start = whole(run)
    run.train()
    report = run.packing_report.isolation
    return {
        "losses": [entry["loss"] for entry in run.state.log_history if "loss" in entry],
        "start": start,
        "weights": whole(run),
        "proved": report.isolated and report.equal,
        "engine": engine_of(run.model_wrapped),
        "computed": [entry["computed_share"] for entry in run.state.log_history if "computed_share" in entry],
    }


def uneven(folder: Path, model, **settings) -> dict:
    """One document per micro-batch: of the first four, three have an image on one rank only."""
    seen: list[bool] = []
    run = make(
        folder / "uneven",
        model=model,
        dataset=rows(24, seed=10),
        packing_strategy="minibatch",
        per_device_train_batch_size=1,
        max_steps=4,
        **settings,
    )
    collate = run.data_collator

    class Noting(type(collate)):
        def __call__(self, documents):
            seen.append(any("pixel_values" in each for each in documents))
            return super().__call__(documents)

    run.data_collator = Noting(**{name: getattr(collate, name) for name in collate.__dataclass_fields__})
    run.train()
    return {"has_images": gather_object([seen]), "steps": run.state.global_step}


def restart(folder: Path, **settings) -> dict:
    """Two epochs whole, then again from a checkpoint in the middle of the second."""
    settings |= {"dataset": rows(24, seed=3), "num_train_epochs": 2, "per_device_train_batch_size": 1}
    settings |= {"learning_rate": 1e-2, "save_strategy": "steps"}
    first = make(folder / "restart", save_steps=1, **settings)
    first.train()
    stop = first.state.max_steps * 3 // 4
    again = make(folder / "restart", save_steps=1000, **settings)
    again.train(resume_from_checkpoint=str(folder / "restart" / f"checkpoint-{stop}"))
    return {"whole": whole(first), "resumed": whole(again), "steps": first.state.max_steps, "stop": stop}


STREAMS = {  # settings of a stream on two ranks, and of the process that trains on the same packs
    "stream": ({}, {"gradient_accumulation_steps": 2}),
    "parts": ({"tokens_per_rank": 100, "share_prefixes": "pack"}, {}),
}


def streamed(folder: Path, kind: str, **settings) -> dict:
    """Five steps on a stream that all ranks read, and again from the third."""
    data = rows(40, seed=5) if kind == "stream" else QUESTIONS
    settings = SGD | {"dataset": data.to_iterable_dataset(), "per_device_train_batch_size": 1} | settings
    run = make(folder / kind, "qwen2_5_vl", save_strategy="steps", save_steps=3, **settings)
    start = whole(run)
    run.train()
    again = make(folder / f"{kind}_again", "qwen2_5_vl", **settings)
    again.train(resume_from_checkpoint=str(folder / kind / "checkpoint-3"))
    report = run.packing_report
    return {
        "start": start,
        "weights": whole(run),
        "resumed": whole(again),
        "proved": report.isolation.isolated and report.isolation.equal,
        "counts": (report.num_documents, report.num_packs, report.images.num_images),
    }


def run_rank(engine: str, folder: Path) -> None:
    if engine == "zero3":
        run_deepspeed_on_cpus()
    # Before the first config: under ZeRO-3 each rank would draw its part of the weights.
    models = {kind: build_model("qwen2_5_vl") for kind in (*KINDS[engine], "uneven")}
    folder = folder / engine
    for name, model in models.items():
        settings = {"deepspeed": ZERO3} if engine == "zero3" else {}
        if engine == "fsdp2":
            settings = engine_settings(engine, folder)  # resets what the run before has set
        if name == "shared":
            settings = settings | {"share_prefixes": "pack"}
        scenario = uneven if name == "uneven" else partial(five, kind=name, size=2)
        save(scenario(folder, model=model, **settings), folder / f"{name}.pt")
    if engine == "ddp":
        save(restart(folder), folder / "restart.pt")
        for kind, (settings, _) in STREAMS.items():
            save(streamed(folder, kind, **settings), folder / f"{kind}.pt")
    torch.distributed.destroy_process_group()


def save(result: dict, file: Path) -> None:
    if os.environ["RANK"] == "0":
        torch.save(result, file)


def main(folder: Path) -> int:
    ended = []
    for engine in KINDS:
        (folder / engine).mkdir()
        ended.append(fork_ranks(2, partial(run_rank, engine, folder)))
    return int(not all(ended))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
