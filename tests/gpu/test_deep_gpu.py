"""The leak probe on deep models in bf16 on CUDA: rounding that grows over many layers is no leak."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trl_packfix import check_isolation
from trl_packfix.isolation.packed_model import PackedModel

pytestmark = pytest.mark.gpu

DEEP = {
    "llama": {"num_hidden_layers": 32, "hidden_size": 1024, "intermediate_size": 2816},
    "mixtral": {"num_hidden_layers": 16, "hidden_size": 512, "intermediate_size": 1024, "num_local_experts": 8},
}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("model_type", DEEP)
def test_a_deep_model_is_proved_and_not_repaired(model_type, seed, device="cuda"):
    sizes = {"vocab_size": 1000, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = AutoConfig.for_model(model_type, **(sizes | DEEP[model_type]))
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    packed = PackedModel(model, torch.bfloat16, device, max_length=64)
    packed.attend()
    for report in (check_isolation(model, max_length=64), packed.prove(model)):
        assert report.isolated and report.equal, report.summary()
    assert not packed.repaired and not packed.is_unpacked
