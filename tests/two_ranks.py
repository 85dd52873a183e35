"""Scenarios of the trainer that run on any number of ranks; `test_distributed.py` launches them on two.

    torchrun --standalone --nproc_per_node 2 tests/two_ranks.py ddp FOLDER
    deepspeed --num_gpus 2 tests/two_ranks.py zero3 FOLDER

FOLDER holds `model` and `tied`, tiny Llamas, the second with one matrix for embeddings and LM head. One process pair
runs all scenarios of an engine, because starting one takes longer than the scenarios. Each returns a dictionary that
the main process saves as FOLDER/ENGINE/NAME.pt; the first that raises ends the launch. A test calls the same functions
in its own process for the numbers of one rank.
"""

import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # DeepSpeed's launcher shows its ranks the GPUs that the test has hidden

import numpy as np
import torch
import trl
from accelerate.utils import gather_object
from conftest import build_tokenizer
from datasets import Dataset
from peft import LoraConfig
from transformers import EvalPrediction

import trl_packfix
from trl_packfix.parallelism import synchronisation

TOKENIZER = build_tokenizer()
NUM_EVALUATED = 23
DIGITS = 3

# 37 documents, 8 in a step: the last step has 5, which 2 ranks x 2 micro-batches x 2 cannot share evenly.
FIVE_STEPS = {
    "num_documents": 37,
    "max_steps": 5,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "packing_strategy": "minibatch",
}


def documents(num: int, seed: int = 0) -> Dataset:
    """Texts of 3 to 60 letters, so many tokens plus one; each begins with its own number."""
    rng = np.random.default_rng(seed)
    letters = ("".join(rng.choice(list("abcdef "), n)) for n in rng.integers(0, 58, num))
    return Dataset.from_dict({"text": [f"{i:0{DIGITS}d}{text}" for i, text in enumerate(letters)]})


def document_ids(batch: dict) -> list[int]:
    """The numbers of the documents of a batch, packed or padded; dummies, which begin with padding, have none."""
    rows = batch["input_ids"]
    if "cu_seq_lens_q" in batch:
        rows = rows[0].split(batch["cu_seq_lens_q"].diff().tolist())
    starts = (TOKENIZER.decode(row[:DIGITS]) for row in rows)
    return [int(start) for start in starts if start.isdigit()]


class Recorded:
    """Notes the engine that trains and the documents of every micro-batch that reaches it."""

    engine = None

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.engine = type(model).__name__
        self.seen.append(document_ids(inputs))
        return super().training_step(model, inputs, num_items_in_batch)


class Packed(Recorded, trl_packfix.SFTTrainer):
    pass


class Stock(Recorded, trl.SFTTrainer):
    pass


def make_trainer(
    folder: Path, name: str, cls: type = Packed, model: str = "model", num_documents: int = 97, lora=False, **settings
) -> Packed | Stock:
    """A trainer on `folder / model` that writes to `folder / name`."""
    config = trl.SFTConfig
    if cls is Packed:
        config = trl_packfix.SFTConfig
        settings = {"packing": True, "packing_report": False} | settings
    # Under DeepSpeed `use_cpu` would hide the ranks; its launcher needs the backend named where there is no GPU.
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    defaults = {
        "max_length": 64,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 2.0 if lora else 0.5,
        "gradient_checkpointing": deepspeed,  # TRL's default, and with LoRA under ZeRO-3 the reentrant kind
        "bf16": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "ddp_timeout": 60,  # turns a hang into an error
        **({"ddp_backend": "gloo"} if deepspeed else {"use_cpu": True}),
    }
    args = config(str(folder / name), **(defaults | settings))
    torch.manual_seed(0)  # for the adapters, which TRL makes before it sets the seed
    trainer = cls(
        str(folder / model),
        args,
        train_dataset=documents(num_documents),
        eval_dataset=documents(NUM_EVALUATED, seed=1),
        processing_class=TOKENIZER,
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None,
    )
    trainer.seen = []
    return trainer


def outcome(trainer: Packed | Stock, **further) -> dict:
    """What every scenario tells; `seen` is [rank][micro-batch][document], `isolation` the verdict of the leak probe."""
    report = getattr(trainer, "packing_report", None)  # made when training starts; stock TRL has none
    isolation = report.isolation if report else None
    return {
        "world_size": trainer.args.world_size,
        "process_group": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
        "engine": trainer.engine,
        "synchronisation": synchronisation(trainer.accelerator, gathers_each_micro_batch=False),
        "seen": gather_object([trainer.seen]),
        "num_steps": trainer.state.global_step,
        "isolation": isolation and (isolation.isolated, isolation.equal, isolation.attention),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "num_tokens": [entry["num_tokens"] for entry in trainer.state.log_history if "loss" in entry],
        "logged": [
            [entry.get(name) for name in ("entropy", "mean_token_accuracy", "trained_tokens", "documents_per_step")]
            for entry in trainer.state.log_history
            if "loss" in entry
        ],
    } | further


def evaluation(trainer: Packed) -> dict:
    """Numbers of an evaluation packed, padded, and padded for a metric; documents that the metric and `predict` got."""
    rows = []

    def count_rows(prediction: EvalPrediction) -> dict:
        rows.append(document_ids({"input_ids": torch.from_numpy(prediction.label_ids)}))
        return {"rows": len(prediction.predictions)}

    results = {}
    for name, packing, metric in (("packed", True, None), ("padded", False, None), ("metric", True, count_rows)):
        trainer.args.eval_packing, trainer.compute_metrics = packing, metric
        trainer.evaluate()
        logged = trainer.state.log_history[-1]
        results[name] = {key: logged[f"eval_{key}"] for key in ("loss", "mean_token_accuracy", "entropy")}
    results["rows"] = rows[0]
    predicted = trainer.predict(trainer.eval_dataset)
    results["predicted"] = document_ids({"input_ids": torch.from_numpy(predicted.label_ids)})
    return results


# The scenarios


def epochs(folder: Path, cls: type = Packed, **settings) -> dict:
    """Two epochs."""
    trainer = make_trainer(folder, "epochs", cls, num_train_epochs=2, learning_rate=1e-2, **settings)
    trainer.train()
    return outcome(trainer)


def five_steps(folder: Path, name: str, **settings) -> dict:
    """Five optimizer steps of SGD; the model is saved as `folder / name` and evaluated."""
    trainer = make_trainer(folder, name, **FIVE_STEPS | settings)
    trainer.train()
    trainer.save_model()
    return outcome(trainer, evaluation=evaluation(trainer))


def five_steps_unpacked(folder: Path, name: str, **settings) -> dict:
    """The same in TRL, padded; the model is saved before, too, as `folder / name / "start"`."""
    settings = {key: value for key, value in (FIVE_STEPS | settings).items() if key != "packing_strategy"}
    trainer = make_trainer(folder, name, Stock, **settings)
    trainer.save_model(str(folder / name / "start"))
    trainer.train()
    trainer.save_model()
    return outcome(trainer)


def evaluate_first(folder: Path) -> dict:
    """Evaluation of a model that no engine has trained."""
    trainer = make_trainer(folder, "evaluate")
    return outcome(trainer, evaluation=evaluation(trainer))


def restart(folder: Path, name: str, **settings) -> dict:
    """Three epochs whole, then again from a checkpoint in the middle of the second; both models are saved."""
    settings = {"num_train_epochs": 3, "num_documents": 60, "learning_rate": 1e-2, "save_strategy": "steps"} | settings
    whole = make_trainer(folder, f"{name}/whole", **settings)
    per_epoch = len(whole.get_train_dataloader()) // whole.args.gradient_accumulation_steps
    stop = per_epoch + per_epoch // 2
    whole.state.save_steps = whole.args.save_steps = stop
    whole.train()
    whole.save_model()
    resumed = make_trainer(folder, f"{name}/resumed", **settings | {"save_strategy": "no"})
    resumed.train(resume_from_checkpoint=str(folder / name / "whole" / f"checkpoint-{stop}"))
    resumed.save_model()
    return outcome(resumed, whole=outcome(whole), per_epoch=per_epoch, stop=stop)


STRATEGIES = ("stream", "minibatch")
KINDS = {"full": {}, "lora": {"lora": True}, "tied": {"model": "tied"}}
BY_DOCUMENT = {"document_weighting": "document"}
EPOCHS = {f"epochs_{strategy}": partial(epochs, packing_strategy=strategy) for strategy in STRATEGIES}
FEW = {
    f"few_{strategy}": partial(epochs, packing_strategy=strategy, num_documents=3, gradient_accumulation_steps=4)
    for strategy in STRATEGIES
}


def scenarios(engine: str) -> dict[str, Callable[[Path], dict]]:
    """By name, in the order in which they run."""
    five = {
        f"five_{kind}": partial(five_steps, name=f"{engine}/five_{kind}", **settings)
        for kind, settings in KINDS.items()
    }
    restarts = {
        f"restart_{strategy}_{workers}": partial(
            restart,
            name=f"{engine}/restart_{strategy}_{workers}",
            packing_strategy=strategy,
            dataloader_num_workers=workers,
        )
        for strategy in STRATEGIES
        for workers in (0, 2)
    }
    five["five_document"] = partial(five_steps, name=f"{engine}/five_document", **BY_DOCUMENT)
    first = {"evaluate_first": evaluate_first}
    if engine == "zero3":
        return EPOCHS | FEW | five | {"restart_stream_2": restarts["restart_stream_2"]} | first
    return EPOCHS | {"epochs_stock": partial(epochs, cls=Stock)} | FEW | five | restarts | first


def main(engine: str, folder: Path) -> None:
    warnings.simplefilter("ignore")
    if engine == "zero3":
        import deepspeed

        # Its shared-memory all-reduce would be compiled first, which takes longer than everything here; gloo's does.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for name, scenario in scenarios(engine).items():
        print("scenario", name, flush=True)
        result = scenario(folder)
        if os.environ["RANK"] == "0":
            torch.save(result, folder / engine / f"{name}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[-2], Path(sys.argv[-1]))
