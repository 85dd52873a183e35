"""What the host does in every micro-batch: it launches no more than stock TRL, and leaves out what is done once."""

import trl
from support.host_profile import profile_layer
from support.runs import run_training, texts
from support.versions import current_models, trl_trains
from torch import nn
from transformers import PreTrainedModel, TrainerCallback

import trl_packfix


class Counted(TrainerCallback):
    """Calls of `train` and `num_parameters` of the model, up to the end of each step."""

    def __init__(self, monkeypatch):
        self.calls = {"train": 0, "num_parameters": 0}
        self.of_steps = []
        for cls, name in ((nn.Module, "train"), (PreTrainedModel, "num_parameters")):
            monkeypatch.setattr(cls, name, self._counted(getattr(cls, name), name))

    def _counted(self, method, name):
        def counted(module, *args, **kwargs):
            self.calls[name] += isinstance(module, PreTrainedModel)
            return method(module, *args, **kwargs)

        return counted

    def on_step_end(self, *args, **kwargs):
        self.of_steps.append(dict(self.calls))


def test_no_micro_batch_walks_the_modules(tmp_path, monkeypatch):
    counted = Counted(monkeypatch)
    settings = {"max_steps": 3, "gradient_accumulation_steps": 2, "report_to": []}
    trainer = run_training(tmp_path, texts(), callbacks=[counted], **settings)
    first, *later = counted.of_steps
    assert first["num_parameters"] == 1
    assert later == [first, first]
    # And the number of FLOPs is that of transformers
    for batch in trainer.get_train_dataloader():
        assert trainer.floating_point_ops(batch) == trl.SFTTrainer.floating_point_ops(trainer, batch) > 0


class Switch(TrainerCallback):
    """Sets a module to evaluation mode between steps, and notes the modes behind each forward."""

    def __init__(self):
        self.modes = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        model.model.layers[1].mlp.eval()

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.modes.append({module.training for module in model.modules()})


def test_a_module_in_evaluation_mode_is_set_to_training_again(tmp_path):
    switch = Switch()
    trainer = run_training(tmp_path, texts(), callbacks=[switch], max_steps=3)
    assert switch.modes == [{True}, {True}, {True}]
    assert "train" not in vars(trainer.model)


@trl_trains
@current_models
def test_a_layer_launches_no_more_than_in_stock_trl():
    """On the path of CUDA, beside TRL's packing on the path of flash-attn in transformers."""
    ours, stock = (profile_layer(package, lora=False, checkpoints=False) for package in (trl_packfix, trl))
    assert stock["launches_per_layer"] > 100
    assert ours["launches_per_layer"] <= stock["launches_per_layer"]
    # Once per micro-batch documents are counted for the log, in a few operators
    assert ours["other_launches"] <= stock["other_launches"] + 10
