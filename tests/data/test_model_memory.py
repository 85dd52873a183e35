"""The predicted peak of a training step against the storages that torch counts, for models of three families."""

import pytest
import torch
from peft import LoraConfig
from support.memory import fused_peaks, packed_peaks
from transformers import AutoConfig, PreTrainedConfig

from trl_packfix.compat import scores_tokens
from trl_packfix.data.model_costs import build_on_meta, model_class_of
from trl_packfix.data.model_memory import LORA, TrainingMethod, count_model, group_experts, largest_tokens, predict_peak

T = 8192
COMMON = {"num_hidden_layers": 3, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 64_000}
MODELS = {
    "llama": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32},
    "gemma3_text": {"hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 16},
    "qwen3_moe": {"hidden_size": 1024, "moe_intermediate_size": 512, "num_attention_heads": 16}
    | {"num_experts": 16, "num_experts_per_tok": 4},
}

DROPPED = LoraConfig(r=8, lora_dropout=0.05, target_modules=["q_proj", "v_proj", "down_proj"])


def make_config(name):
    return AutoConfig.for_model(name, **COMMON, **MODELS[name])


@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointing", "saved"])
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_a_packed_step_on_the_kernels_of_cuda(name, checkpointing):
    expected, counted = packed_peaks(make_config(name), checkpointing, T)
    assert expected == pytest.approx(counted, rel=0.15)


@pytest.mark.skipif(not scores_tokens(), reason="TRL before 1.16 has no fused LM head on a CPU")
@pytest.mark.parametrize(
    ("name", "lora", "checkpointing"),
    [
        ("llama", None, False),
        ("gemma3_text", None, True),
        ("llama", LORA, True),
        ("llama", DROPPED, False),
        ("qwen3_moe", LORA, False),
    ],
)
def test_the_peak_with_the_fused_loss(name, lora, checkpointing):
    expected, counted = fused_peaks(make_config(name), lora, checkpointing, T)
    assert expected == pytest.approx(counted, rel=0.15)


def test_what_engines_divide():
    """Adam and fp32 weights take 12 bytes of a parameter, sums of gradients 4; ZeRO-3 divides the weights, too."""
    config = make_config("llama")
    sizes = count_model(config, TrainingMethod(False, "ZeRO-3"))
    every = sizes.parameters
    assert every == sizes.trained == sum(p.numel() for p in build_on_meta(*model_class_of(config)).parameters())
    peaks = {
        engine: predict_peak(sizes, TrainingMethod(False, engine), tokens=T, gpus=8, checkpointing=True)
        for engine in ("DDP", "ZeRO-2", "ZeRO-3")
    }
    assert [peak.weights for peak in peaks.values()] == [4 * every, 2 * every, every / 4]
    assert [peak.optimizer for peak in peaks.values()] == [8 * every, 1.5 * every, 1.5 * every]
    buckets = 4 * every, 4 * sizes.hidden**2, 4 * sizes.hidden**2
    assert [peak.gradients for peak in peaks.values()] == [
        n * every + bucket for n, bucket in zip((4, 0.5, 0.5), buckets, strict=True)
    ]
    assert peaks["ZeRO-3"].gathered > 2 * sizes.hidden * sizes.vocab == 2 * 2048 * 64_000
    assert len({peak.activations for peak in peaks.values()}) == 1


def test_dropout_of_adapters_saves_a_mask_and_a_copy():
    """Dropout saves a byte for each input of a layer; q, k, v, gate and up, which share inputs, keep a copy each."""
    config = make_config("llama")
    plain, dropped = (
        count_model(
            config, TrainingMethod(True, "DDP"), LoraConfig(r=8, lora_dropout=rate, target_modules="all-linear")
        )
        for rate in (0.0, 0.05)
    )
    masks = 6 * config.hidden_size + config.intermediate_size
    copies = 3 * config.hidden_size
    for before, after in zip(plain.saved.layers, dropped.saved.layers, strict=True):
        assert after - before == masks + 2 * copies
    assert plain.trained == dropped.trained


def test_the_largest_length_fits_and_one_more_does_not():
    method = TrainingMethod(True, "DDP")
    sizes = count_model(make_config("llama"), method)

    def peak(tokens):
        return predict_peak(sizes, method, tokens=tokens, gpus=1, checkpointing=True)

    most = largest_tokens(peak, 8 * 2**30, 10**6)
    assert 1000 < most < 10**6
    assert peak(most).total <= 8 * 2**30 < peak(most + 1).total
    assert largest_tokens(peak, 2**20, 10**6) == 0
    assert largest_tokens(peak, 2**50, 10**6) == 10**6


def test_a_model_that_cannot_be_counted_is_refused():
    """Refuse a config that transformers has no model for, and a model that reads more than tokens."""
    with pytest.raises(ValueError, match="The memory of a PreTrainedConfig was asked for"):
        count_model(PreTrainedConfig(), TrainingMethod(False, "DDP"))
    with pytest.raises(ValueError, match=r"memory of T5Model was asked for. Its forward cannot run on fake tensors"):
        count_model(AutoConfig.for_model("t5"), TrainingMethod(False, "DDP"))


def test_experts_that_loop_are_counted_as_a_grouped_product():
    """Step-3.7 loops over the experts that were hit, whose number fake tensors do not know."""
    step = pytest.importorskip("transformers.models.step3p7.modeling_step3p7", reason="a later type of model")
    config = step.Step3p7TextConfig(num_local_experts=4, moe_intermediate_size=16, hidden_size=32)
    torch.manual_seed(0)
    experts = step.Step3p7Experts(config)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    states = torch.randn(9, 32)
    chosen = torch.randint(4, (9, 2))
    weights = torch.rand(9, 2)
    looped = experts(states, chosen, weights)
    group_experts(experts)
    assert "forward" in vars(experts)
    torch.testing.assert_close(experts(states, chosen, weights), looped)


def test_the_head_outside_of_a_text_part_is_counted():
    """transformers has no causal model for the text part of Mistral Small 4: the image model has the head."""
    config = AutoConfig.for_model("mistral4", num_hidden_layers=1, vocab_size=8192, hidden_size=256)
    model_class, part = model_class_of(config)
    without = sum(p.numel() for p in build_on_meta(model_class, part).parameters())
    assert build_on_meta(model_class, part).get_output_embeddings() is None
    assert count_model(config, TrainingMethod(False, "ZeRO-3")).trained == without + 256 * 8192
