"""What a GPU, its kernels and its libraries may refuse, and what happens then; on a CPU, with errors played exactly."""

import pytest
import torch
import torch.distributed as dist
from support.models import with_attention
from support.runs import packed_model
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from trl_packfix import check_isolation
from trl_packfix.attention import choice as choosing
from trl_packfix.attention.forwards import _flash_attentions
from trl_packfix.attention.kernel_errors import KernelError
from trl_packfix.attention.varlen import ATTENTION_NAME
from trl_packfix.isolation import packed_model as packing
from trl_packfix.isolation import search, tracing
from trl_packfix.isolation.probe import Probe

PLAYED = "flash_played"  # the name of a flash attention, as transformers and this package see it


@pytest.fixture
def played():
    """Register a flash attention that raises its `error`, or is sdpa if that is None. `calls` holds its arguments."""

    class Played:
        def __init__(self):
            self.error = None
            self.calls = []

        def __call__(self, module, query, key, value, attention_mask, **kwargs):
            self.calls.append(kwargs)
            if self.error is not None:
                raise self.error
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    played = Played()
    AttentionInterface.register(PLAYED, played)
    AttentionMaskInterface.register(PLAYED, lambda *args, **kwargs: None)
    yield played
    del AttentionInterface._global_mapping[PLAYED], AttentionMaskInterface._global_mapping[PLAYED]


def packed_for_cuda(model, monkeypatch, **settings):
    monkeypatch.setattr(choosing, "cuda_varlen_problem", lambda: None)
    # transformers would look for the played name on the Hub
    monkeypatch.setattr(packing, "set_attention", with_attention)
    return packed_model(model, torch.bfloat16, "cuda", **settings)


REFUSALS = [
    RuntimeError("FlashAttention forward only supports head dimension at most 256"),
    RuntimeError("FlashAttention only supports Ampere GPUs or newer."),
    RuntimeError("This flash attention build does not support headdim not being a multiple of 32."),
    RuntimeError("No available kernel. Aborting execution."),
    KernelError("a kernel of this package cannot"),
]


@pytest.mark.parametrize("error", REFUSALS, ids=str)
def test_a_refusal_of_a_kernel_is_no_leak(error, played, tiny_model, monkeypatch):
    """It ends in another attention, with the reason; documents are not unpacked and nothing is repaired."""
    played.error = error
    packed = packed_for_cuda(with_attention(tiny_model("llama"), PLAYED), monkeypatch)
    assert packed.attention.name == PLAYED
    with pytest.warns(UserWarning, match=r"'flash_played' cannot compute this model: .*'packfix_varlen' is used"):
        report = packed.prove(packed.model)
    assert played.calls
    assert packed.is_proved
    assert report.error is None
    assert packed.attention.name == ATTENTION_NAME
    assert not (packed.repaired or packed.is_unpacked)
    assert f"{PLAYED} cannot be used: {error}" in packed.attention.reason
    packed.restore_own_attention()
    assert packed.model.config._attn_implementation == PLAYED  # what the user gave


def test_without_another_attention_the_refusal_ends_at_the_user(played, tiny_model, monkeypatch):
    played.error = REFUSALS[0]
    model = with_attention(tiny_model("llama"), PLAYED)
    with pytest.raises(KernelError, match="head dimension at most 256"):
        packed_for_cuda(model, monkeypatch, enforce_flash_attention=False).prove(model)
    with pytest.raises(ValueError, match="head dimension at most 256"):
        check_isolation(model)


DEVICE_ERRORS = [
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    torch.OutOfMemoryError("CUDA out of memory."),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."),
    dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp"),
    dist.DistNetworkError("The client socket has timed out"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("NCCL communicator was aborted on rank 1."),
    RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"),
]


@pytest.mark.parametrize("error", DEVICE_ERRORS, ids=lambda error: f"{type(error).__name__}: {error}"[:50])
def test_an_error_of_the_device_is_raised_and_nothing_else_runs(error, played, tiny_model, monkeypatch):
    """Search for no repair: the context may be lost, and other ranks wait."""
    played.error = error
    packed = packed_for_cuda(with_attention(tiny_model("llama"), PLAYED), monkeypatch)
    with pytest.raises(type(error)) as raised:
        packed.prove(packed.model)
    assert raised.value is error
    assert len(played.calls) == 1


def test_another_error_of_the_model_is_still_a_pack_that_it_refuses(played, tiny_model, monkeypatch):
    played.error = RuntimeError("shape '[1, 5]' is invalid for input of size 7")
    packed = packed_for_cuda(with_attention(tiny_model("llama"), PLAYED), monkeypatch, on_leak="raise")
    assert "is invalid for input" in packed.prove(packed.model).error


def test_boundaries_are_given_to_the_attention_of_the_text_only():
    """Attention of the towers of phi4_multimodal and deepseek_ocr2 says that it is causal. With the boundaries of a
    pack of text, the kernel would read beyond the patches of the image.
    """
    vision = pytest.importorskip("support.vision")  # needs Pillow
    model = vision.build_model("llava")
    for module in model.model.vision_tower.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = True
    assert _flash_attentions(model) == []
    model.config.get_text_config()._attn_implementation_internal = PLAYED
    names = {name for name, module in model.named_modules() if module in _flash_attentions(model)}
    assert names == {f"model.language_model.layers.{i}.self_attn" for i in range(2)}


# Several ranks


def test_ranks_that_differ_raise_before_another_forward(tiny_model, monkeypatch):
    """Kernels that add in another order on each run may give ranks different results: then all raise, none waits."""
    model = tiny_model("bloom")  # it leaks; the search first looks for positions that do not restart
    packed = packed_model(model)
    ran = []

    def gather(values, value):
        values[:] = value, "isolated"

    monkeypatch.setattr(search, "find_shifted", lambda *args: ran.append(args) or [])
    monkeypatch.setattr(packing, "agree_on_ranks", lambda value: value)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="on the 2 ranks"):
            packed.prove(model)
    finally:
        dist.destroy_process_group()
    assert not ran
    packed.restore_own_attention()


# The probe on a device


def test_roundings_are_drawn_on_the_device(tiny_model, monkeypatch):
    """On a device that holds no values only the place of the draw can be seen, and that is what counts."""
    model = tiny_model("llama", dtype=torch.bfloat16)
    drawn = []
    generator = torch.Generator

    def noting(device="cpu"):
        drawn.append(torch.device(device).type)
        return generator()

    with Probe(model).rounded_otherwise(0):
        monkeypatch.setattr(torch, "Generator", noting)
        layer = model.model.layers[0].mlp.down_proj
        layer.to("meta")(torch.zeros(1, 5, layer.in_features, dtype=torch.bfloat16, device="meta"))
    assert drawn == ["meta"]


def test_values_of_modules_stay_on_the_device():
    """Values of long packs, which may not fit beside the model, go to the host: from meta tensors they cannot."""
    module = nn.Linear(4, 4, device="meta")
    states = torch.zeros(1, 5, 4, device="meta")
    ((inputs, outputs),) = tracing._record_values({"": module}, 5, lambda: module(states))[""]
    assert {values.device.type for recorded in (inputs, outputs) for _, values in recorded.values()} == {"meta"}
    with pytest.raises(NotImplementedError, match="copy out"):
        tracing._record_values({"": module}, 5, lambda: module(states), on_host=True)


def test_recorded_values_are_those_before_a_change_in_place():
    module = nn.Identity()
    states = torch.ones(1, 5, 4)
    records = tracing._record_values({"": module}, 5, lambda: module(states).zero_())
    assert records[""][0][0]["input"][1].sum() == 20
