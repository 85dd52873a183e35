"""FLOPs of training, and the peak of a card."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.models import build_tiny_model
from support.runs import build_trainer, texts
from torch.utils.flop_counter import FlopCounterMode

from trl_packfix.data.model_costs import make_cost_model
from trl_packfix.planning.costs import CostModel
from trl_packfix.training.flops import own_peak_tflops, peak_tflops, trained_share, training_flops


def counted(model, num_tokens):
    ids = torch.randint(3, 90, (1, num_tokens))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_backward_costs_what_torch_counts(lora):
    """Two lengths tell the matrices from the pairs of attention, of which eager computes the hidden ones, too."""
    model = build_tiny_model(
        hidden_size=128, intermediate_size=512, num_hidden_layers=4, vocab_size=100, attn_implementation="eager"
    ).train()
    costs = make_cost_model(model.config)
    if lora:
        model = get_peft_model(model, LoraConfig(r=1, target_modules=["v_proj"]))
    one = counted(model, 32)
    two = counted(model, 64)
    pairs = (two - 2 * one) / (64**2 - 2 * 32**2)
    per_token = (one - pairs * 32**2) / 32
    linear = CostModel(costs.per_token, 0.0)
    expected = training_flops(linear, np.float64(1), trained_share(model))
    # the first layer's input needs no gradient, and with LoRA neither does what lies below its first adapter
    assert 0.93 * expected <= per_token <= 1.02 * expected
    assert bool(expected < 2.02 * costs.per_token) is lora
    # with LoRA on values only, queries and keys of the first layer need no gradient either
    assert pairs == pytest.approx(3 * costs.per_pair, rel=0.15 if lora else 1e-9)


def test_the_next_training_counts_the_weights_that_it_trains(tmp_path):
    trainer = build_trainer(tmp_path, texts(), max_steps=1)
    trainer.train()
    assert trainer.training_objective.trained_share == 1
    for parameter in trainer.model.model.layers.parameters():
        parameter.requires_grad = False
    trainer.optimizer = None  # it has all weights
    trainer.train()
    assert trainer.training_objective.trained_share == trained_share(trainer.model) < 1


def test_tensors_cost_what_arrays_do():
    costs = CostModel(10.0, 2.0, ((3, 5.0),), ((4, 7.0),))
    lengths = np.array([0, 1, 3, 4, 5, 9, 100])
    flops = costs(torch.tensor(lengths, dtype=torch.float64))
    assert flops.tolist() == costs(lengths).tolist()
    assert flops[0] == 0


def test_a_pack_costs_the_sum_of_its_documents_and_less_than_one_sequence():
    costs = CostModel(10.0, 2.0)
    lengths = torch.tensor([5.0, 0.0, 7.0], dtype=torch.float64)
    apart = costs(lengths).sum()
    joined = costs(lengths.sum())
    assert training_flops(costs, lengths, 1.0).sum() == 3 * apart < 3 * joined
    assert training_flops(costs, lengths, 0.0).sum() == 3 * apart - 10 * 12


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_peaks_by_name(name, peak, monkeypatch):
    assert peak_tflops(name) == peak
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    cuda = torch.device("cuda", 0)
    assert own_peak_tflops(cuda, torch.bfloat16) == peak
    assert own_peak_tflops(cuda, torch.float32) is own_peak_tflops(torch.device("cpu"), torch.bfloat16) is None
