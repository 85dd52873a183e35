"""The leak probe and the repair on CUDA, in bf16: proved or repaired, and each document what it is alone.

Rounding that grows over many layers is no leak.
"""

import copy

import pytest
import torch
from support.runs import packed_model, proved
from sweep import zoo
from transformers import AutoConfig, AutoModelForCausalLM

from trl_packfix import check_isolation
from trl_packfix.data.collator import PackedDataCollator

pytestmark = pytest.mark.gpu

LENGTHS = [37, 5, 64, 1, 20]


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "falcon", "bloom", "mamba", "mamba2", "qwen3_next", "bart"])
def test_documents_are_what_they_are_alone(model_type):
    device = "cuda" if torch.cuda.is_available() else "cpu"  # the latter with GPU_TESTS_ON_CPU=1
    model = zoo.build_model(model_type).to(device, torch.bfloat16)
    model_alone = copy.deepcopy(model).float()
    report = proved(model, dtype=torch.bfloat16, device=device)[1]
    assert report.passed, report.summary()
    documents = [torch.randint(16, 128, (n,)) for n in LENGTHS]
    batch = PackedDataCollator()([{"input_ids": ids} for ids in documents])
    del batch["labels"]
    batch = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    model_alone.eval()
    with torch.no_grad():
        together = model(**batch).logits[0].float()
        exact = torch.cat([model_alone(ids[None].to(device), use_cache=False).logits[0] for ids in documents])
        rounded = copy.deepcopy(model_alone).to(torch.bfloat16)
        own_logits = torch.cat([rounded(ids[None].to(device), use_cache=False).logits[0].float() for ids in documents])
    # the pack is no further from fp32 than a few times what bf16 is for the documents alone
    assert (together - exact).abs().max() <= 4 * (own_logits - exact).abs().max()


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
    packed = packed_model(model, torch.bfloat16, device)
    packed.attach_packed_attention()
    for report in (check_isolation(model, max_length=64), packed.prove(model)):
        assert report.passed, report.summary()
    assert not packed.repaired
    assert not packed.is_unpacked
