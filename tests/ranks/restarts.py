"""Runs that end and continue from a checkpoint, on as many ranks or on others; and one whose rank dies."""

import os
import signal
import time
from pathlib import Path

from transformers import TrainerCallback

from .engines import weights_of
from .scenarios import make, outcome
from .table import Row
from .training import make_trainer

THREE_EPOCHS = {"max_steps": -1, "num_train_epochs": 3, "optim": "adamw_torch", "learning_rate": 1e-2}


def restart(folder: Path, engine: str, output: str, **settings) -> dict:
    """Train three epochs whole, then again from a checkpoint in the middle of the second."""
    settings = THREE_EPOCHS | {"num": 60} | settings
    unbroken = make(folder, engine, output_dir=f"{output}/whole", **settings | {"save_strategy": "steps"})
    per_epoch = len(unbroken.get_train_dataloader()) // unbroken.args.gradient_accumulation_steps
    stop = per_epoch + per_epoch // 2
    unbroken.state.save_steps = unbroken.args.save_steps = stop
    unbroken.train()
    resumed = make(folder, engine, output_dir=f"{output}/resumed", **settings)
    checkpoint = folder / output / "whole" / f"checkpoint-{stop}"
    resumed.train(resume_from_checkpoint=str(checkpoint))
    resumed.save_model()
    return outcome(
        resumed,
        saved=resumed.args.output_dir,
        whole=outcome(unbroken),
        per_epoch=per_epoch,
        stop=stop,
        checkpoint=str(checkpoint),
    )


def restart_steps(folder: Path, engine: str, output: str, row: Row, **settings) -> dict:
    """Train six steps of a row whole, then again from the fourth."""
    settings |= {"max_steps": 6, "optim": "adamw_torch", "learning_rate": 1e-2, "gradient_accumulation_steps": 3}
    unbroken = make_trainer(
        folder, row, engine, output_dir=f"{output}/whole", save_strategy="steps", save_steps=4, **settings
    )
    unbroken.train()
    resumed = make_trainer(folder, row, engine, output_dir=f"{output}/resumed", **settings)
    resumed.train(resume_from_checkpoint=str(folder / output / "whole" / "checkpoint-4"))
    tokens = [
        [entry["num_tokens"] for entry in trainer.state.log_history if "loss" in entry]
        for trainer in (unbroken, resumed)
    ]
    return {
        "engine": unbroken.engine,
        "weights": [weights_of(unbroken), weights_of(resumed)],
        "tokens": tokens,
        "seen": [unbroken.seen, resumed.seen],
        "steps_to_compare": resumed.training_objective.num_steps_to_compare if row.shares else None,
        "reports": [trainer.packing_report.to_dict() for trainer in (unbroken, resumed)],
    }


class Dies(TrainerCallback):
    """Rank 1 gets SIGKILL in the middle of an optimizer step; `folder / "killed"` says when."""

    STEP = 7

    def __init__(self, folder: Path):
        self.folder = folder

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == self.STEP and args.process_index == 1:
            (self.folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)


def die(folder: Path, engine: str) -> None:
    """Train with a checkpoint every second step, until rank 1 dies."""
    saves = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, "output_dir": "run"}
    make(folder, engine, num=60, callbacks=[Dies(folder)], **THREE_EPOCHS | saves).train()
