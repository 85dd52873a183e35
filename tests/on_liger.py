"""Liger's Triton kernels on packs, by Triton's interpreter on the CPU: trained as unpacked TRL without them.

    python tests/on_liger.py llama qwen3       # a JSON line per model type; half a CPU minute each

A process of its own, because Liger changes the classes of transformers. `error` is the difference of the weights after
two steps to those of unpacked TRL without Liger, over their change.
"""

import json
import sys
import tempfile
import time
import warnings
from unittest import mock

import trl
from support.interpreter import interpret
from support.models import build_tiny_model
from support.runs import build_trainer, texts, weights

SETTINGS = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0}


def trained(model_type, **settings):
    """Return (the trainer after its steps, its weights before)."""
    trainer = build_trainer(tempfile.mkdtemp(), texts(6), build_tiny_model(model_type), **SETTINGS, **settings)
    start_weights = weights(trainer)
    trainer.train()
    return trainer, start_weights


def judge(model_type):
    from liger_kernel.transformers import monkey_patch  # after `interpret`

    started = time.process_time()
    stock, start_weights = trained(model_type, trainer_class=trl.SFTTrainer, config_class=trl.SFTConfig, packing=False)
    patches = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    apply = patches[model_type]
    with mock.patch.dict(patches, {model_type: mock.create_autospec(apply, side_effect=apply)}):
        trainer, _ = trained(model_type, packing_strategy="minibatch", use_liger_kernel=True)
        kernels = {name: value for name, value in patches[model_type].call_args.kwargs.items() if name != "model"}
    change = weights(stock) - start_weights
    report = trainer.packed_model.isolation
    row = {"type": model_type, "isolated": report.isolated, "equal": report.equal}
    row |= {
        "repaired": list(map(str, trainer.packed_model.repaired)),
        "change": change.norm().item(),
        "kernels": kernels,
    }
    row["error"] = ((weights(trainer) - weights(stock)).norm() / change.norm()).item()
    return row | {"max_difference": report.max_difference, "seconds": round(time.process_time() - started, 1)}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    interpret()
    for name in sys.argv[1:]:
        print(json.dumps(judge(name)), flush=True)
