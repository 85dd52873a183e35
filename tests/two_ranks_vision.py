"""Packs with images on any number of ranks; `test_vision.py` launches it on two.

    torchrun --standalone --nproc_per_node 2 tests/two_ranks_vision.py ENGINE FOLDER

ENGINE is "ddp" or "zero3". The main process saves FOLDER/result.pt.
"""

import os
import sys
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from accelerate.utils import gather_object
from support.vision import rows
from test_vision import SGD, flat, make

ZERO3 = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "zero_allow_untested_optimizer": True,
}


def main(engine: str, folder: Path) -> None:
    if engine == "zero3":
        import deepspeed

        # Its shared-memory all-reduce would be compiled first, which takes longer than everything here; gloo's does.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    settings = {"deepspeed": ZERO3} if engine == "zero3" else {}
    run = make(folder / "five", packing_strategy="minibatch", **SGD, **settings, per_device_train_batch_size=2)
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    if engine == "zero3":
        with deepspeed.zero.GatheredParameters(list(run.model.parameters())):
            weights = flat(run.model)
    else:
        weights = flat(run.model)
    isolated = run.packing_report.isolation.isolated and run.packing_report.isolation.equal

    # One document per micro-batch: of the first four, three have an image on one rank only.
    seen: list[bool] = []
    uneven = make(
        folder / "uneven",
        dataset=rows(24, seed=10),
        packing_strategy="minibatch",
        per_device_train_batch_size=1,
        max_steps=4,
        **settings,
    )
    collate = uneven.data_collator

    class Noting(type(collate)):
        def __call__(self, documents):
            seen.append(any("pixel_values" in each for each in documents))
            return super().__call__(documents)

    noting = Noting(**{name: getattr(collate, name) for name in collate.__dataclass_fields__})
    uneven.data_collator = noting
    uneven.train()
    result = {
        "losses": losses,
        "weights": weights,
        "isolated": isolated,
        "uneven": gather_object([seen]),
        "uneven_steps": uneven.state.global_step,
    }
    if run.is_world_process_zero():
        torch.save(result, folder / "result.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
