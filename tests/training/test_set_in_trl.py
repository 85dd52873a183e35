"""Scripts and frameworks take the class of the trainer from `trl`, where it may be set to ours or to a subclass."""

import importlib

import pytest
import torch
import trl
from support.models import build_tiny_model, build_tokenizer
from support.runs import build_trainer, config, run_training, texts, weights

import trl_packfix

ConfigOfTrl = trl.SFTConfig
MODULES = ("trl", "trl.trainer", "trl.trainer.sft_trainer")


class OwnSampler(trl_packfix.SFTTrainer):
    def _get_train_sampler(self, dataset=None):
        return torch.utils.data.SequentialSampler(dataset or self.train_dataset)


def set_in_trl(monkeypatch, trainer_class=trl_packfix.SFTTrainer):
    for name in MODULES:
        monkeypatch.setattr(importlib.import_module(name), "SFTTrainer", trainer_class)
        monkeypatch.setattr(importlib.import_module(name), "SFTConfig", trl_packfix.SFTConfig, raising=False)


@pytest.mark.parametrize("packing", [True, False])
def test_the_class_that_is_set_in_trl_trains_as_ours(packing, tmp_path, monkeypatch):
    settings = {"packing": packing, "max_steps": 2, "learning_rate": 1e-2}
    ours = build_trainer(tmp_path / "ours", texts(8), **settings)
    start_values = weights(ours)
    ours.train()
    set_in_trl(monkeypatch)
    from trl import SFTConfig, SFTTrainer

    trainer = run_training(tmp_path / "set", texts(8), trainer_class=SFTTrainer, config_class=SFTConfig, **settings)
    assert SFTTrainer is trl_packfix.SFTTrainer
    assert torch.equal(weights(trainer), weights(ours))
    assert not torch.equal(weights(trainer), start_values)


def test_a_config_of_trl_that_was_made_before_keeps_its_strategy(tmp_path, monkeypatch):
    args = config(tmp_path, ConfigOfTrl, max_steps=1)
    set_in_trl(monkeypatch)
    trainer = trl.SFTTrainer(build_tiny_model(), args, train_dataset=texts(8), processing_class=build_tokenizer())
    assert trainer.args.packing_strategy == "bfd"
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_sampler_of_a_class_that_is_set_in_trl_is_refused(tmp_path, monkeypatch):
    set_in_trl(monkeypatch, OwnSampler)
    with pytest.raises(ValueError, match=r"`OwnSampler\._get_train_sampler`"):
        build_trainer(tmp_path, texts(8), trainer_class=trl.SFTTrainer)
