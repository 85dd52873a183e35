"""The parts of `evidence.py` that call attention alone."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

from common import Row
from throughput_gpu import Machine

# isort: split
import torch
from support.strict_varlen import StrictVarlen
from torch import Tensor

from trl_packfix.attention import runs
from trl_packfix.attention.dense import attend_dense
from trl_packfix.attention.kernels import (
    KernelLaunch,
    attend_by_document,
    attend_on_cpu,
    attend_on_cuda,
    attend_wide,
    wide_kernel,
)
from trl_packfix.attention.packed_forward import PackedForward
from trl_packfix.attention.runs import attend_pack_on_cuda
from trl_packfix.data import by_length
from trl_packfix.data.model_memory import GIB
from trl_packfix.features.prefixes.collator import PrefixCollator
from trl_packfix.group import ALONE
from trl_packfix.layout import LAYOUT_KEY

HEADS = 32, 8, 128  # query heads, key heads, dimensions of Llama 3 8B
SMALL_HEADS = 4, 2, 8
Rows = Iterator[Row]
Attend = Callable[..., Tensor]


def device_of_kernels(machine: Machine) -> AbstractContextManager[Any]:
    """On a CPU a stand-in that is as strict as the kernels takes their place, so that their callers run."""
    return nullcontext() if machine.device == "cuda" else StrictVarlen()


def random_tensors(
    machine: Machine, tokens: int, heads: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """Queries, keys and values, (1, H, T, D)."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, number, tokens, heads[2]) for number in (heads[0], heads[1], heads[1])]
    return [torch.randn(*shape, generator=generator).to(machine.device, dtype) for shape in shapes]


def forward_and_backward(attend: Attend, tensors: list[Tensor]) -> list[Tensor]:
    """The output and the gradients."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    out = attend(*tensors)
    weights = torch.linspace(-1, 1, out.shape[-1], device=out.device, dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, weights.expand_as(out))]


def bounds_of(lengths: list[int], device: str) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).to(device)


def timed(machine: Machine, function: Callable[[], Any]) -> Row:
    """Median milliseconds of a call, after one that is not counted; on CUDA the memory at its peak, too."""
    function()
    machine.synchronize()
    if machine.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    rounds = [0.0] * (1 if machine.smoke else 15)
    for i in range(len(rounds)):
        start = time.perf_counter()
        function()
        machine.synchronize()
        rounds[i] = 1e3 * (time.perf_counter() - start)
    row = {"ms": statistics.median(rounds)}
    return row | ({"peak_gib": torch.cuda.max_memory_allocated() / GIB} if machine.device == "cuda" else {})


def kernels(machine: Machine) -> Rows:
    lengths = [2, 40, 3] if machine.smoke else [1, 300, 17, 129, 1024, 64, 1]
    cases = [
        (heads, window, sinks, dtype)
        for heads in ((8, 2, 64), (4, 4, 128))
        for window in (None, 16 if machine.smoke else 128)
        for sinks in (False, True)
        for dtype in (torch.bfloat16, torch.float16)
        if dtype == torch.bfloat16 or window is None
    ]
    wrong = []
    for heads, window, with_sinks, dtype in cases:
        tensors = random_tensors(machine, sum(lengths), heads, dtype)
        if with_sinks:  # fp32, as under autocast
            tensors.append(torch.linspace(-1, 1, heads[0]).to(machine.device))
        options = {"scale": heads[2] ** -0.5, "window": window}

        def on_cpu(*tensors: Tensor, options: Row = options) -> Tensor:
            return attend_on_cpu(*tensors[:3], lengths, sinks=tensors[3] if tensors[3:] else None, **options)

        def on_cuda(*tensors: Tensor, options: Row = options) -> Tensor:
            launch = one_launch(bounds_of(lengths, machine.device), max(lengths))
            return attend_on_cuda(*tensors[:3], launch, sinks=tensors[3] if tensors[3:] else None, **options)

        exact = forward_and_backward(on_cpu, [x.cpu().double() for x in tensors])
        rounded = forward_and_backward(on_cpu, [x.cpu() for x in tensors])
        with device_of_kernels(machine):
            found = forward_and_backward(on_cuda, tensors)
        errors, roundings = (
            [((x.cpu().double() - right).norm() / right.norm()).item() for x, right in zip(xs, exact, strict=True)]
            for xs in (found, rounded)
        )
        name = f"{heads[0]}:{heads[1]} x {heads[2]}, {str(dtype).removeprefix('torch.')}"
        name += f"{', window' if window else ''}{', sinks' if with_sinks else ''}"
        yield {"case": name, "error": max(errors), "rounding": max(roundings), "tokens": sum(lengths)}
        if any(not error <= 3 * rounding + 1e-3 for error, rounding in zip(errors, roundings, strict=True)):
            wrong.append(name)
    assert not wrong, f"further from fp64 than 3 times what rounding makes: {'; '.join(wrong)}"


def one_launch(bounds: Tensor, longest: int) -> list[KernelLaunch]:
    return [KernelLaunch((bounds, bounds), (longest, longest), slice(None), slice(None))]


def launches(machine: Machine) -> Rows:
    """Forward and backward of attention."""
    unit = 16 if machine.smoke else 512
    packs = {
        f"{16 * unit} and 16 x {unit} tokens": ([16 * unit, *[unit] * 16], 16 * unit),
        f"{unit} tokens, most documents empty": ([unit] * 16 + [0] * (184 if machine.smoke else 624), 16 * unit),
    }
    sizes = {"LENGTH_CLASSES": (24, 40), "TILE_QUERIES": 4} if machine.smoke else {}
    heads = SMALL_HEADS if machine.smoke else HEADS
    for name, (lengths, longest) in packs.items():
        bounds = bounds_of(lengths, machine.device)
        with mock.patch.multiple(by_length, **sizes) if sizes else nullcontext():
            divided = by_length.plan_launches(bounds.cpu().numpy(), longest)
            tile = by_length.TILE_QUERIES
        assert divided, "these lengths need one launch only"
        pack = PackedForward(bounds, bounds, longest, longest, launches=divided, group=ALONE)
        by_class = runs.launches_of(pack, sum(lengths))
        contenders = {
            name: partial(attend_on_cuda, launches=given, scale=heads[2] ** -0.5)
            for name, given in (("one launch", one_launch(bounds, longest)), ("by length", by_class))
        }
        blocks = {
            "one launch": len(lengths) * -(-longest // tile),
            "by length": sum((last - first) * -(-most // tile) for first, last, *_, most in divided),
        }
        working = sum(-(-length // tile) for length in lengths)
        tensors = random_tensors(machine, sum(lengths), heads)
        with device_of_kernels(machine):
            found = {kind: forward_and_backward(attend, tensors) for kind, attend in contenders.items()}
            for kind, attend in contenders.items():
                row = {"case": f"{name}, {kind}", "tokens": sum(lengths), "idle_blocks": blocks[kind] - working}
                pairs = zip(found[kind], found["one launch"], strict=True)
                row["difference"] = max((x - y).abs().max().item() for x, y in pairs)
                yield row | timed(machine, partial(forward_and_backward, attend, tensors))


def wide_heads(machine: Machine) -> Rows:
    """Forward and backward in a full layer of Gemma 4 E4B, on 8,192 tokens."""
    heads, unit = (SMALL_HEADS, 4) if machine.smoke else ((8, 2, 512), 64)
    for name, lengths in {"equal": [8 * unit] * 16, "uneven": [32 * unit, *[unit] * 64, *[unit // 2] * 64]}.items():
        bounds = bounds_of(lengths, machine.device)
        scale = heads[2] ** -0.5
        contenders: dict[str, Attend] = {
            "document by document": partial(attend_by_document, lengths=lengths, scale=scale)
        }
        if wide_kernel() is not None and machine.device == "cuda":
            contenders["ffpa-attn"] = partial(attend_wide, bounds=bounds, longest=max(lengths), scale=scale)
        tensors = random_tensors(machine, sum(lengths), heads)
        for kind, attend in contenders.items():
            row = {"case": f"{name}, {kind}", "tokens": sum(lengths)}
            yield row | timed(machine, partial(forward_and_backward, attend, tensors))


def prefixes(machine: Machine) -> Rows:
    """Forward and backward of attention on chats with one sample per turn."""
    unit, own, chats, heads = (8, 3, 2, SMALL_HEADS) if machine.smoke else (1024, 128, 2, HEADS)
    samples = [
        {"input_ids": [*range(100_000 * chat, 100_000 * chat + unit * n), *([9_000_000 + n] * own)]}
        for chat in range(chats)
        for n in range(1, 9)
    ]
    batch = PrefixCollator()(samples)
    shared = batch[LAYOUT_KEY].to(machine.device)
    bounds = tuple(batch[name].to(machine.device) for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    longest = batch["max_length_q"], batch["max_length_k"]
    documents = [len(sample["input_ids"]) for sample in samples]
    whole = bounds_of(documents, machine.device)
    num_rows = int(bounds[0][-1])
    num_keys = len(shared.kv_index)
    scale = heads[2] ** -0.5

    def on_shared(most_keys: int) -> Attend:
        def attend(*tensors: Tensor) -> Tensor:
            pack = PackedForward(*bounds, *longest, **shared.attention_fields())
            with mock.patch.object(runs, "most_copied_keys", lambda *tensors: most_keys):
                return attend_pack_on_cuda(*tensors, pack, scale=scale)

        return attend

    contenders = {
        "one launch": (on_shared(num_keys), num_rows),
        "several launches": (on_shared(num_keys // 4), num_rows),
        "whole documents": (
            partial(attend_on_cuda, launches=one_launch(whole, max(documents)), scale=scale),
            sum(documents),
        ),
    }
    found = {}
    for name, (attend, tokens) in contenders.items():
        machine.tidy()
        tensors = random_tensors(machine, tokens, heads)
        with device_of_kernels(machine):
            found[name] = forward_and_backward(attend, tensors)
            row = timed(machine, partial(forward_and_backward, attend, tensors))
        row = {"case": name, "tokens": tokens, "keys_per_row": num_keys / num_rows} | row
        if name == "several launches":
            pairs = zip(found["several launches"], found["one launch"], strict=True)
            row["difference"] = max(((x - y).float().norm() / y.float().norm()).item() for x, y in pairs)
        yield row


@contextmanager
def flash_attention_3() -> Iterator[None]:
    """Let torch's operators of FlashAttention run on FlashAttention-3."""
    torch.nn.attention.activate_flash_attention_impl("FA3")
    try:
        yield
    finally:
        torch.nn.attention.restore_flash_attention_impl()


def million_tokens(machine: Machine) -> Rows:
    """Attention in one layer of Qwen3-8B on a rank of 8, which has 4 of 32 heads, on one document. TRL's step takes 373
    to 380 s on 8 H100s: 36 of these layers, in which the forward runs twice, and everything else."""
    tokens = 1024 if machine.smoke else 2**20
    tensors = [torch.randn(1, heads, tokens, 128, device=machine.device).bfloat16() for heads in (4, 1, 1)]

    def on_flash(*states: Tensor) -> Tensor:
        length = states[0].shape[2]
        return attend_on_cuda(*states, one_launch(bounds_of([length], machine.device), length), scale=128**-0.5)

    on_dense = partial(attend_dense, scale=128**-0.5)
    contenders: dict[str, tuple[Attend, Callable[[], AbstractContextManager[Any]]]] = {
        "FlashAttention-2": (on_flash, partial(device_of_kernels, machine)),
        "cuDNN": (on_dense, nullcontext),
        "FlashAttention-3": (on_flash, flash_attention_3),
    }
    outputs = {}
    for name, (attend, kernels_of) in contenders.items():
        row: Row = {"case": f"{tokens:,} tokens, {name}", "optional": name != "FlashAttention-2"}
        if name == "FlashAttention-3" and find_spec("flash_attn_interface") is None:
            yield row | {"reason": "flash_attn_interface is not installed"}
            continue
        seconds = []
        try:
            with kernels_of():
                for length in (512, tokens):  # the first is not counted
                    parts = [x[:, :, :length] for x in tensors]
                    for run in (partial(attend, *parts), partial(forward_and_backward, attend, parts)):
                        start = time.perf_counter()
                        outputs[name] = run()
                        machine.synchronize()
                        seconds.append(time.perf_counter() - start)
        except RuntimeError as error:
            yield row | {"reason": str(error).splitlines()[0][:200]}
            continue
        row |= {"forward_ms": 1e3 * seconds[2], "ms": 1e3 * seconds[3], "published_s": 373}
        pairs = zip(outputs[name], outputs["FlashAttention-2"], strict=True)
        row["difference"] = max(((x - y).float().norm() / y.float().norm()).item() for x, y in pairs)
        yield row | {"seconds_of_36_layers": 36 * sum(seconds[2:])}
