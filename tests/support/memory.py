"""The memory of a training step as torch's storages have it, on tensors that have shapes and no memory."""

import weakref
from dataclasses import replace
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trl.trainer import utils

from trl_packfix.attention import varlen
from trl_packfix.data.collator import PackedDataCollator
from trl_packfix.data.model_costs import build_on_meta, model_class_of
from trl_packfix.data.model_memory import (
    LORA,
    SAVED_ATTENTION,
    TrainingMethod,
    add_adapters,
    count_model,
    make_fake,
    predict_peak,
    save_dropout_masks,
)

from .models import attend_packs
from .versions import enable_checkpointing


class Storages(TorchDispatchMode):
    """Count the bytes of all storages that live at once, at most."""

    def __init__(self, model):
        super().__init__()
        self.live = self.peak = 0
        self.known = set()
        for weight in model.parameters():
            self.add(weight)
            if weight.grad is not None:
                self.add(weight.grad)

    def add(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.drop, storage._cdata, storage.nbytes())

    def drop(self, place, size):
        self.known.discard(place)
        self.live -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor)
        return out


class NothingToRead(TorchDispatchMode):
    """Meta tensors have no values. transformers reads one per mask: whether positions begin again."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            return False
        return func(*args, **(kwargs or {}))


def make_model(config, method, checkpointing, lora=LORA):
    """Make the model on the meta device, with the dtypes that the method has."""
    autocast = method.engine == "DDP"
    model = build_on_meta(*model_class_of(config)).to(torch.float32 if autocast and not method.lora else torch.bfloat16)
    if method.lora:
        add_adapters(model, lora, autocast=autocast)
        save_dropout_masks(model)
    if checkpointing:
        enable_checkpointing(model, reentrant=False)
    return model.train()


def counted(model, batch, autocast=False, fused=False):
    """Return the bytes of weights, gradients and all else at the peak of forward and backward, by torch."""
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    with Storages(model) as storages, NothingToRead():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**batch, **({"fused_lm_head": True} if fused else {})).loss
        loss.backward()
    return storages.peak


def predicted(config, method, checkpointing, fused, tokens, lora=LORA):
    """Return the predicted bytes without what `counted` cannot see: optimizer states, and work space of kernels."""
    sizes = count_model(config, method, lora)
    peak = predict_peak(sizes, method, tokens=tokens, gpus=1, checkpointing=checkpointing, fused_loss=fused)
    return replace(peak, optimizer=0, step=0, attention=0).total


def packed_peaks(config, checkpointing, tokens):
    """Return the bytes predicted and counted in full training in bfloat16, with plain logits and one pack.

    The pack has 16 documents. Meta tensors take the path of CUDA: our attention with its kernel.
    """
    method = TrainingMethod(lora=False, engine="ZeRO-2")
    model = make_model(config, method, checkpointing)
    attend_packs(model, device_type="cpu")
    batch = PackedDataCollator()([{"input_ids": [5] * (tokens // 16)}] * 16)
    batch = {key: x.to("meta") if isinstance(x, torch.Tensor) else x for key, x in batch.items()}
    expected = predicted(config, method, checkpointing, False, tokens)
    knows_meta = patch.object(torch, "is_autocast_enabled", lambda *device_type: False)  # torch's does not
    with patch.object(varlen, "FLASH_DEVICES", {"cuda", "meta"}), knows_meta:
        return expected, counted(model, batch)


def fused_peaks(config, lora, checkpointing, tokens):  # lora: settings of adapters, or None
    """Return the bytes predicted and counted with TRL's fused loss under autocast.

    The tiles of the loss are folded in place, as its kernels of Triton do it.
    """
    from trl.kernels import chunked_logprob

    has_experts = hasattr(config, "num_experts")  # they run on fake tensors in bfloat16 only
    method = TrainingMethod(lora is not None, "DDP")
    expected = predicted(config, method, checkpointing, True, tokens, lora)  # and registers the attention
    model = make_model(config, replace(method, engine="ZeRO-2") if has_experts else method, checkpointing, lora)
    model.set_attn_implementation(SAVED_ATTENTION)
    tiles = ("_forward_tile", "_backward_tile", "_addmm_fp32")
    with FakeTensorMode(), patch.multiple(chunked_logprob, **dict.fromkeys(tiles, lambda *args, **kwargs: None)):
        make_fake(model)
        utils.add_fused_lm_head(model)
        ids = torch.zeros(1, tokens, dtype=torch.long)
        batch = {"input_ids": ids, "labels": ids, "use_cache": False}
        return expected, counted(model, batch, not has_experts, fused=True)
