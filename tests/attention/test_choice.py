"""Which attention is chosen for packs: the user's, a flash kernel, or document by document, with the reason."""

import re
from unittest import mock

import pytest
import torch
from support.attention import MODELS
from support.models import select_attention, with_attention
from torch import nn
from transformers import AutoConfig

from trl_packfix.attention import choice as choosing
from trl_packfix.attention import flash
from trl_packfix.attention.choice import AttentionChoice, choose_attention, head_dim, set_attention
from trl_packfix.attention.varlen import ATTENTION_NAME

BF16 = {"dtype": torch.bfloat16, "device_type": "cuda"}


@pytest.fixture
def machine(monkeypatch):
    """Return a function that describes a CUDA machine to the choice, where setting a name asks for no GPU."""

    def describe(flash_attn=False, problem=None, capability=None, ffpa_attn=False):
        monkeypatch.setattr(choosing, "wide_kernel", lambda: ffpa_attn or None)
        monkeypatch.setattr(choosing, "is_flash_attn_2_available", lambda: flash_attn)
        monkeypatch.setattr(choosing, "cuda_varlen_problem", lambda: problem or capability)
        monkeypatch.setattr(choosing, "capability_problem", lambda: capability)
        monkeypatch.setattr(choosing, "set_attention", with_attention)

    return describe


@pytest.mark.parametrize(
    "device_type, reason", [("cpu", "on the CPU, without a mask"), ("mps", "no flash kernel on 'mps': not flash")]
)
def test_other_devices_run_document_by_document(device_type, reason, tiny_model, recwarn):
    model = tiny_model("llama")
    choice = select_attention(model, device_type=device_type)
    assert (choice.name, choice.is_flash, choice.previous) == (ATTENTION_NAME, False, "sdpa")
    assert reason in choice.reason
    assert select_attention(model, device_type=device_type).previous == ATTENTION_NAME  # twice is once
    assert not [warning for warning in recwarn if "enforce" in str(warning.message)]


@pytest.mark.parametrize("device_type", ["cpu", "mps", "cuda"])
@pytest.mark.parametrize("name", ["sdpa", "eager", "flex_attention"])
def test_the_users_attention_that_is_replaced_is_named(device_type, name, tiny_model):
    model = with_attention(tiny_model("llama"), name)
    choice = choose_attention(model, dtype=torch.bfloat16, device_type=device_type)
    assert choice.name == ATTENTION_NAME
    reason_end = "" if name == "flex_attention" else " and its T x T masks"
    assert choice.reason.endswith(
        f"; in place of the model's {name}{reason_end} (enforce_flash_attention=False keeps it)"
    )


@pytest.mark.parametrize("name", ["sdpa", "eager", "flex_attention"])
def test_enforce_false_keeps_the_users_and_names_the_price(name, tiny_model, recwarn):
    model = with_attention(tiny_model("llama"), name)
    choice = select_attention(model, False, device_type="cuda")
    assert choice == AttentionChoice(name, False, name, choice.reason)
    assert model.config._attn_implementation == name
    warnings_text = "".join(str(w.message) for w in recwarn)
    message = rf"keeps attn_implementation='{name}'.*T x T.*5\.9 times slower.*Set enforce"
    assert bool(re.search(message, warnings_text)) is (name != "flex_attention")  # its block mask is not a T x T tensor


@pytest.mark.parametrize("users", ["sdpa", "flash_attention_2", "kernels-community/flash-attn2"])
def test_ranks_that_share_packs_get_the_attention_that_exchanges_tokens(users, machine, tiny_model):
    """Ranks that share packs must attend by document where no kernel serves."""
    settings_of_ranks = BF16 | {"needs_varlen": "does not exchange tokens between the ranks that share a pack"}
    machine(flash_attn=True)
    choice = choose_attention(with_attention(tiny_model("llama"), users), **settings_of_ranks)
    assert choice.name == ATTENTION_NAME
    assert choice.is_flash
    assert (f"{users} does not exchange tokens" in choice.reason) is ("flash" in users)
    with pytest.warns(UserWarning, match="softcapping=50.0"):
        choice = choose_attention(with_attention(tiny_model("gemma2"), users), **settings_of_ranks)
    assert choice.name == ATTENTION_NAME
    assert not choice.is_flash


DROPOUT = {"gpt2": "attn_pdrop", "llama": "attention_dropout", "bert": "attention_probs_dropout_prob"}


@pytest.mark.parametrize(
    "model_type, settings, users, flash_attn, expected",
    [
        ("llama", {}, "flash_attention_2", True, "flash_attention_2"),
        ("llama", {}, "flash_attention_3", True, "flash_attention_3"),
        ("llama", {}, "flash_attention_4", False, "flash_attention_4"),
        ("llama", {}, "kernels-community/flash-attn2", False, "kernels-community/flash-attn2"),
        ("llama", {}, "sdpa", True, "flash_attention_2"),
        ("llama", {}, "eager", True, "flash_attention_2"),
        ("llama", {}, "sdpa", False, ATTENTION_NAME),
        ("llama", {}, "flex_attention", False, ATTENTION_NAME),
        ("llama", {"attention_dropout": 0.1}, "sdpa", True, "flash_attention_2"),
        ("gpt2", {"attn_pdrop": 0.0, "resid_pdrop": 0.1, "embd_pdrop": 0.1}, "sdpa", False, ATTENTION_NAME),
        ("gemma2", MODELS["gemma2"], "eager", True, "flash_attention_2"),  # which has its softcap
        ("gpt_oss", {}, "eager", True, ATTENTION_NAME),  # flash_attention_2 would drop its sinks
        ("gpt_oss", {}, "kernels-community/vllm-flash-attn3", True, "kernels-community/vllm-flash-attn3"),
    ],
)
def test_on_cuda_the_first_kernel_that_serves_is_chosen(
    model_type, settings, users, flash_attn, expected, tiny_model, machine
):
    machine(flash_attn)
    model = with_attention(tiny_model(model_type, **settings), users)
    # transformers' own list guards gpt_oss, but not every model with sinks
    model._compatible_flash_implementations = None
    choice = select_attention(model, **BF16)
    assert choice == AttentionChoice(expected, True, users, choice.reason)


DROPS = r"no dropout \({}=0.1\).*load the model with {}=0.0, or install flash-attn"
OLD = {"flash_attn": True, "capability": "compute capability 7.5 is below 8.0"}  # flash-attn needs the same


@pytest.mark.parametrize(
    "model_type, settings, problems, message",
    [
        ("llama", {"head_dim": 512}, {}, "heads have up to 512 dimensions and the kernels take 256.*install ffpa-attn"),
        ("llama", {"head_dim": 512}, {"flash_attn": True}, "heads .* 512 dimensions.*install"),  # it would refuse them
        # ffpa-attn would drop the sinks
        ("gpt_oss", {"head_dim": 512}, {"ffpa_attn": True}, "heads have up to 512 dimensions"),
        ("llama", {}, {"problem": "torch is built for ROCm"}, "torch is built for ROCm"),
        ("llama", {}, OLD, "compute capability 7.5"),
        ("gemma2", {}, OLD, "compute capability 7.5"),  # on newer GPUs flash-attn has what its softcap needs
        ("gemma2", {}, {}, r"no softcap \(attn_logit_softcapping=50.0\).*For flash attention install flash-attn \("),
        *((kind, {name: 0.1}, {}, DROPS.format(name, name)) for kind, name in DROPOUT.items()),
    ],
)
def test_what_no_flash_kernel_computes_runs_document_by_document(
    model_type, settings, problems, message, tiny_model, machine
):
    """There is no T x T mask, and the warning and the report say why."""
    machine(**problems)
    message = f"trains packs without flash attention: .*{message}"
    with pytest.warns(UserWarning, match=message) as raised:
        choice = choose_attention(tiny_model(model_type, **settings), **BF16)
    assert (choice.name, choice.is_flash) == (ATTENTION_NAME, False)
    assert "not flash" in choice.reason
    assert ("pip install" in str(raised[0].message)) is ("install" in message)  # only where it helps


@pytest.mark.parametrize("kernel", ["flash_attention_2", *(
    f"kernels-community/flash-attn2{more}" for more in ("", "@v2", ":flash_attn_varlen_func", "@v2:flash_attn_func")
)])  # fmt: skip
def test_flash_attention_2_on_sinks_is_replaced_with_a_warning(kernel, tiny_model, machine):
    machine(flash_attn=True)
    model = with_attention(tiny_model("gpt_oss"), kernel)
    with pytest.warns(UserWarning, match=rf"'{kernel}' on GptOssForCausalLM.*ignores them.*flash_attention_4"):
        assert choose_attention(model, **BF16).name == ATTENTION_NAME


def test_the_dtype_that_reaches_the_kernel_decides(tiny_model, machine):
    machine()
    with pytest.raises(ValueError, match=r"torch.float32 on CUDA.*supports bfloat16.*Set bf16=True"):
        choose_attention(tiny_model("llama"), device_type="cuda")
    with pytest.raises(ValueError, match=r"torch.float64 on CUDA"):
        choose_attention(tiny_model("llama"), dtype=torch.float64, device_type="cuda")
    # the weights' dtype does not matter where autocast's reaches the kernel, and the other way round
    assert choose_attention(tiny_model("llama"), dtype=torch.float16, device_type="cuda").is_flash
    assert choose_attention(tiny_model("llama", dtype=torch.bfloat16), device_type="cuda").is_flash
    machine(**OLD)  # no flash kernel takes fp32, and none is there
    with pytest.warns(UserWarning, match="compute capability 7.5"):
        assert not choose_attention(tiny_model("llama"), device_type="cuda").is_flash
    with pytest.raises(ValueError, match=r"packing got a Linear.*Pass a PreTrainedModel"):
        choose_attention(nn.Linear(2, 2))


@pytest.mark.parametrize(
    "built, capability, hip, problem",
    [
        (True, (9, 0), None, None),
        (True, (7, 5), None, "compute capability 7.5 is below 8.0"),
        (True, (9, 0), "6.4.0", "is built for ROCm"),
        (False, (9, 0), None, "built without flash attention"),
    ],
)
def test_what_a_cuda_machine_lacks_for_the_kernels_is_named(built, capability, hip, problem, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    problem_found = flash._find_varlen_problem.__wrapped__()
    assert problem_found is None if problem is None else problem in problem_found


@pytest.mark.parametrize("model_type", ["mamba", "bloom", "mpt"])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_attention_code_of_its_own_is_left_alone(model_type, device_type, tiny_model):
    model = tiny_model(model_type)
    before = model.config._attn_implementation
    choice = select_attention(model, device_type=device_type)
    assert choice == AttentionChoice(before, False, before, choice.reason)
    assert "its own attention code" in choice.reason
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    "model_type,fields,widest",
    [
        ("llama", {"hidden_size": 512, "num_attention_heads": 4}, 128),
        ("gpt2", {"n_embd": 64, "n_head": 4}, 16),
        ("gemma3_text", {"head_dim": 256}, 256),
        ("gemma4_text", {}, 512),  # the full layers, by overrides of single layers
        ("deepseek_v3", {"qk_nope_head_dim": 192, "qk_rope_head_dim": 96, "v_head_dim": 128}, 288),
        ("qwen3_next", {"head_dim": 64, "linear_key_head_dim": 512}, 64),  # linear attention has kernels of its own
        ("mamba", {}, 0),
    ],
)
def test_head_dimensions_are_those_of_the_widest_layer(model_type, fields, widest):
    assert head_dim(AutoConfig.for_model(model_type, **fields)) == widest


def test_a_flash_attn_that_does_not_import_leaves_the_kernels_in_torch(tiny_model, machine, monkeypatch):
    machine(flash_attn=True)
    broken = mock.Mock(side_effect=ImportError("/flash_attn_2_cuda.so: undefined symbol: _ZN3c10"))
    monkeypatch.setattr(choosing, "set_attention", broken)
    choice = choose_attention(tiny_model("llama"), **BF16)
    assert (choice.name, choice.is_flash) == (ATTENTION_NAME, True)
    assert (
        "built into torch; flash_attention_2 cannot be used: /flash_attn_2_cuda.so: undefined symbol" in choice.reason
    )


def test_a_model_that_refuses_flash_attention_2_runs_on_the_kernels_in_torch(tiny_model, machine, monkeypatch):
    """hrm_text says that it supports flash attention, and its config refuses it: transformers' own error."""
    machine(flash_attn=True)
    monkeypatch.setattr(choosing, "set_attention", set_attention)
    choice = choose_attention(tiny_model("hrm_text", head_dim=8), **BF16)
    assert choice.name == ATTENTION_NAME
    assert "FlashAttention cannot represent the PrefixLM" in choice.reason
