"""Packed training is unpacked training: the same losses and the same weights, for every kind of model and adapter.

How far rounding alone moves them is measured beside each comparison (`rounding.py`).
"""

import pytest
import torch
from support.equivalence import MODELS, Case, assert_packed_equals_unpacked, errors, train
from support.rounding import LIMIT, tolerance
from support.versions import divides_router_loss

from trl_packfix.training.objective import Objective

pytestmark = pytest.mark.slow

CASES = [
    *[Case(model) for model in MODELS],
    Case("llama", accumulation=4),
    pytest.param(Case("gpt_oss", accumulation=4), marks=divides_router_loss),
    *[Case(model, checkpointing=True) for model in ("llama", "gpt_oss")],
    Case("llama", "lora", 4, True),
    Case("gpt_oss", "dora"),
    *[Case(model, dtype=torch.float64) for model in ("llama", "gemma3")],
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_training_equals_unpacked_training(case):
    assert_packed_equals_unpacked(case, least_change=0.1)


# `benchmarks/hybrid_training.py` has both of each type, two ranks, and kernels; `test_kernels.py` trains kimi_linear
HYBRID_CASES = [
    *[("qwen3_5_text", "full"), ("lfm2", "full"), ("falcon_h1", "full"), ("nemotron_h", "lora")],
    *[("granitemoehybrid", "full"), ("granitemoehybrid", "lora")],
]


@pytest.mark.parametrize(("model", "adapter"), HYBRID_CASES)
def test_packed_training_of_hybrid_models_equals_unpacked_training(model, adapter):
    assert_packed_equals_unpacked(Case(model, adapter, accumulation=4, num_documents=8), least_change=0.1)


@pytest.mark.parametrize("model", ["granitemoehybrid", "lfm2"])
def test_the_comparison_sees_a_boundary_that_mixers_lose(model):
    """Also in LFM2, whose mixers carry no more than two tokens over it."""
    case = Case(model, accumulation=4, num_documents=8)
    reference = train(case, "unpacked")
    rounding, found = (errors(case, trainer, reference)[1] for trainer in ("reversed", "leaking"))
    assert found > 5 * tolerance(rounding), (found, rounding)


@pytest.mark.parametrize("model", ["gpt_oss", "opt"])
def test_the_comparison_sees_a_leak(model):
    """Stock TRL lets documents see each other on these models. If it no longer does, this test has lost its witness."""
    reference = train(Case(model), "unpacked")
    _, weight_error = errors(Case(model), "padding_free", reference)
    assert weight_error > 1e-2


def test_an_error_of_one_in_ten_thousand_fails(monkeypatch):
    """However large rounding is where the suite runs: the tolerance has a limit."""
    right = Objective._loss

    def wrong(*given):
        loss, outputs = right(*given)
        return 1.0001 * loss, outputs

    monkeypatch.setattr(Objective, "_loss", wrong)
    with pytest.raises(AssertionError, match="losses|weights"):
        assert_packed_equals_unpacked(Case("llama"))
    assert LIMIT < 1e-4 and tolerance(1.0) == LIMIT and tolerance(0.0) < 2e-6


def test_packed_run_really_packs():
    _, _, trainer = train(Case("llama", accumulation=4), "packed")
    batches = list(trainer.get_train_dataloader())
    # the unpacked run has as many documents per micro-batch as its batch size
    batch_size = trainer.args.per_device_train_batch_size
    assert max(len(batch["cu_seq_lens_q"]) - 1 for batch in batches) > batch_size
    assert all(batch["input_ids"].shape[0] == 1 for batch in batches)
    assert trainer.packed_model.attention.name == "packfix_varlen"
