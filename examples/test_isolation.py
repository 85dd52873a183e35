"""For the CI of a project with models of its own: documents in a pack must not change each other.

pip install torch transformers pytest
pip install --no-deps trl_packfix    # the test needs neither TRL nor peft, datasets or accelerate
pytest test_isolation.py             # exit code 1 if documents leak; the message names the module
"""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from trl_packfix import check_isolation

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_documents_in_a_pack_are_isolated(attention):
    model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=300))  # yours, in any size
    model.set_attn_implementation(attention)
    check_isolation(model, max_length=64).raise_if_leaking()
