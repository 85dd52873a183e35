"""The leak probe: does a document in a pack change another, on this model as it stands?

Nothing is assumed from the name of an attention implementation. Small packs are built exactly as for training; one
document is changed in its tokens and in its length, and the others must not move; every document must be what it is
alone; and the gradient of one document's outputs with respect to the embeddings of another must be exactly zero.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from .collator import PackedDataCollator
from .forwards import base_model, mark_packed_forwards, text_config
from .tracing import find_leaks
from .varlen import ATTENTION_NAME
from .verdict import IsolationReport

LENGTHS = (13, 1, 11, 22)  # documents of the small pack: 47 tokens, a prime that no hidden size equals
SPARE = 3  # tokens by which a document passes a threshold

# Lengths at which a model may begin to treat a document in another way, by the name of the config field
THRESHOLDS = (
    "sliding_window",
    "attention_chunk_size",
    "index_topk",
    "original_max_position_embeddings",
    "conv_kernel",
    "linear_conv_kernel_dim",
    "mamba_d_conv",
    "conv_L_cache",
)


def check_isolation(model: nn.Module, max_length: int | None = None) -> IsolationReport:
    """Judge the model as it stands: its attention implementation, adapters, dtype and wrapping.

    Parameters, gradients, buffers, random state and training mode are as before when it returns. Costs about ten
    forwards of 47 tokens and four backwards, and twice a pack just longer than the largest threshold below `max_length`
    where the model has one. Wrapped models (DDP, DeepSpeed, FSDP) are judged by forwards alone; all ranks must call.

    Args:
        model: a transformers causal LM, wrapped by PEFT, DDP or an engine or not.
        max_length: the longest document of the run, in tokens; None tests every threshold of the model.
    """
    inner = base_model(_unwrapped(model))
    probe = _Probe(model, inner)
    with _undisturbed(inner), _marked(inner):
        try:
            return probe.run(max_length)
        except _CannotRun as error:
            attention = probe.config._attn_implementation or "its own"
            return IsolationReport(False, False, inf, inf, None, 0.0, attention, error=str(error.__cause__))


class _CannotRun(Exception):
    """The model raised on a pack."""


class _Probe:
    def __init__(self, model: nn.Module, inner: nn.Module):
        self.model, self.inner = model, inner
        self.device = next(inner.parameters()).device
        self.config = text_config(inner)
        self.collate = PackedDataCollator()
        self.generator = torch.Generator().manual_seed(0)
        special = {self.config.pad_token_id, self.config.eos_token_id, self.config.bos_token_id}
        self.low = max([t for t in special if isinstance(t, int) and t < self.config.vocab_size // 2], default=0) + 1

    def run(self, max_length: int | None) -> IsolationReport:
        reach, unreachable = self._thresholds(max_length)
        lengths = [min(n, max_length or n) for n in LENGTHS]
        documents = [self._tokens(n) for n in lengths]
        base, repeat = self.packed(documents), self.packed(documents)
        scale = max(states.abs().max().item() for states in base)
        noise = self._distance(base, repeat, range(len(base))) / scale
        tolerance = 8 * noise + self._rounding(documents)

        change, worst = 0.0, None  # the largest, and what to look at if it is a leak
        # The first document can move those behind it, the third those on both sides; the gradient asks all pairs.
        for changed in (0, 2):
            others = [i for i in range(len(documents)) if i != changed]
            same_length = [*documents]
            same_length[changed] = self._tokens(lengths[changed])
            longer = [*documents]
            longer[changed] = self._tokens(lengths[changed] + SPARE)
            for variant in (same_length, longer):
                moved = self._distance(base, self.packed(variant), others) / scale
                if moved > change:
                    change = moved
                    worst = (changed, same_length) if moved > tolerance else None
        difference = self._distance(base, [self.alone(ids) for ids in documents], range(len(base))) / scale

        if reach:  # one long document passes every threshold at once, between two short ones
            long = [self._tokens(7), self._tokens(max(reach.values()) + SPARE), self._tokens(9)]
            together, alone = self.packed(long, large=True), [self.alone(ids, large=True) for ids in long]
            difference = max(difference, self._distance(together, alone, range(3)) / scale)
            short = self.packed([long[0], self._tokens(8), long[2]], large=True)
            change = max(change, self._distance(together, short, [0, 2]) / scale)

        gradient = None if _is_wrapped(self.model) else self._gradient(documents)
        isolated = change <= tolerance and not gradient
        return IsolationReport(
            isolated=isolated,
            equal=difference <= tolerance,
            max_change=change,
            max_difference=difference,
            max_gradient=gradient,
            tolerance=tolerance,
            attention=self.config._attn_implementation or "its own",
            leaks=[] if worst is None else find_leaks(self.inner, self.packed, documents, *worst, tolerance),
            unreachable=unreachable,
        )

    def _rounding(self, documents: list[Tensor]) -> float:
        """What another grouping of the same sums may change, relative: 32 roundings in fp32, 4 in half precision.

        The coarsest dtype that any module puts out counts. Weights do not tell: accelerate runs fp32 weights under
        autocast inside the model's own forward.
        """
        dtypes: set[torch.dtype] = set()

        def note(module: nn.Module, args: tuple, output: Any) -> None:
            for value in output if isinstance(output, tuple) else [output]:
                if isinstance(value, Tensor) and value.is_floating_point():
                    dtypes.add(value.dtype)

        handles = [module.register_forward_hook(note) for module in self.inner.modules()]
        try:
            self.packed(documents)
        finally:
            for handle in handles:
                handle.remove()
        eps = max(torch.finfo(dtype).eps for dtype in dtypes)
        return (4 if eps > 1e-4 else 32) * eps

    def _thresholds(self, max_length: int | None) -> tuple[dict[str, int], dict[str, int]]:
        found = {}
        rope = getattr(self.config, "rope_parameters", None) or {}
        for name in THRESHOLDS:
            value = getattr(self.config, name, None) or (rope.get(name) if isinstance(rope, dict) else None)
            if isinstance(value, int) and value > 0:
                found[name] = value
        if isinstance(rope, dict) and rope.get("rope_type") == "dynamic":
            found["max_position_embeddings"] = self.config.max_position_embeddings
        reach = {k: v for k, v in found.items() if max_length is None or v < max_length}
        return {k: v for k, v in reach.items() if v >= min(LENGTHS)}, {k: v for k, v in found.items() if k not in reach}

    def _tokens(self, length: int) -> Tensor:
        return torch.randint(self.low, self.config.vocab_size, (length,), generator=self.generator)

    def _batch(self, documents: list[Tensor]) -> dict[str, Any]:
        batch = self.collate([{"input_ids": ids} for ids in documents])
        batch.pop("labels")
        return {key: value.to(self.device) if isinstance(value, Tensor) else value for key, value in batch.items()}

    def packed(self, documents: list[Tensor], large: bool = False) -> list[Tensor]:
        """Last hidden states of each document in one pack, (length, hidden) each."""
        with torch.no_grad():
            try:
                states = self._states(self._batch(documents), large)
            except (ValueError, RuntimeError, NotImplementedError, TypeError) as error:
                raise _CannotRun from error
        return list(states[0].split([len(ids) for ids in documents]))

    def alone(self, ids: Tensor, large: bool = False) -> Tensor:
        """Last hidden states of a document in a forward of its own, as an unpacked model computes it: no boundaries."""
        training = [module for module in self.inner.modules() if module.training]
        self.inner.eval()  # our attention refuses a training forward without boundaries
        try:
            with torch.no_grad():
                return self._states({"input_ids": ids[None].to(self.device), "use_cache": False}, large)[0]
        finally:
            for module in training:
                module.training = True

    def _states(self, batch: dict[str, Any], large: bool = False) -> Tensor:
        """What reaches the LM head, (1, T, hidden), through the whole wrapped model.

        For a `large` pack what leaves the backbone, and the logits of one token only: all of them would be T x V.
        """
        caught: list[Tensor] = []
        large = large and "logits_to_keep" in inspect.signature(type(self.inner).forward).parameters
        if large:
            batch["logits_to_keep"] = 1
            handle = self.inner.base_model.register_forward_hook(lambda module, args, out: caught.append(out[0]))
        else:
            head = self.inner.get_output_embeddings()
            handle = head.register_forward_pre_hook(lambda module, args: caught.append(args[0]))
        try:
            self.model(**batch)
        finally:
            handle.remove()
        return caught[0] if caught[0].dim() == 3 else caught[0][None]

    @staticmethod
    def _distance(first: list[Tensor], second: list[Tensor], which: Any) -> float:
        gaps = [(first[i].double() - second[i].double()).abs().max().item() for i in which]
        return max((float("inf") if gap != gap else gap for gap in gaps), default=0.0)

    def _gradient(self, documents: list[Tensor]) -> float | None:
        """Largest gradient of one document's states by the embeddings of the others; None where it cannot be taken."""
        embedded: list[Tensor] = []

        def catch(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            if embedded:
                return output
            embedded.append(output.detach().requires_grad_())
            return embedded[0].clone()  # some models write into what the embedding returns

        handle = self.inner.get_input_embeddings().register_forward_hook(catch)
        lengths, largest = [len(ids) for ids in documents], 0.0
        try:
            with torch.enable_grad():
                states = self._states(self._batch(documents))[0].split(lengths)
                for own in range(len(documents)):
                    weights = torch.randn(states[own].shape, generator=self.generator).to(states[own])
                    (gradient,) = torch.autograd.grad((states[own] * weights).sum(), embedded[0], retain_graph=True)
                    if gradient[..., 0].numel() != sum(lengths):
                        return None  # the backbone sees documents as padded rows, not the pack
                    parts = gradient.reshape(-1, gradient.shape[-1]).split(lengths)
                    others = [part.abs().max().item() for i, part in enumerate(parts) if i != own]
                    largest = max(largest, *others)
        except RuntimeError as error:
            # Reentrant checkpointing refuses `autograd.grad`; a model that recomputes or detaches cannot be asked.
            if any(words in str(error) for words in ("checkpoint", "does not require grad", "have been used")):
                return None
            raise
        finally:
            handle.remove()
        return largest


def _unwrapped(model: nn.Module) -> nn.Module:
    while _is_wrapped(model):
        model = model.module
    return model


def _is_wrapped(model: nn.Module) -> bool:
    """DDP, DataParallel and the DeepSpeed engine hold the model as `module`."""
    return isinstance(getattr(model, "module", None), nn.Module)


@contextmanager
def _marked(inner: nn.Module) -> Iterator[None]:
    guard = mark_packed_forwards(inner) if text_config(inner)._attn_implementation == ATTENTION_NAME else None
    try:
        yield
    finally:
        if guard is not None:
            guard.remove()


@contextmanager
def _undisturbed(inner: nn.Module) -> Iterator[None]:
    """Train mode with every dropout and NEFTune's noise off; buffers, random state and modes as before afterwards."""
    modes = [(module, module.training) for module in inner.modules()]
    rates = [
        (module, name, rate)
        for module in inner.modules()
        for name, rate in vars(module).items()
        if "drop" in name and isinstance(rate, float) and rate > 0
    ]
    rates += [(m, "p", m.p) for m in inner.modules() if isinstance(m, nn.Dropout) and m.p > 0]
    buffers = [(buffer, buffer.clone()) for buffer in inner.buffers()]
    devices = [inner.device] if inner.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            inner.train()
            inner.get_input_embeddings().eval()  # NEFTune's noise, under which no document is what it was
            for module, name, _ in rates:
                setattr(module, name, 0.0)
            yield
        finally:
            for module, name, rate in rates:
                setattr(module, name, rate)
            for module, training in modes:
                module.training = training
            with torch.no_grad():
                for buffer, value in buffers:
                    if buffer.shape == value.shape:
                        buffer.copy_(value)
