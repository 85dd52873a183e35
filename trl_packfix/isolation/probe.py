"""Run small packs through a model for the leak probe: collated as in training, on the model as it will train.

`check.py` decides which runs to compare, and `tracing.py` finds the modules where information crosses.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..attention.choice import default_attention, own_attention, set_attention
from ..attention.exchange import group_of
from ..attention.kernel_errors import KernelError, is_device_error, raise_refusal
from ..attention.mixers import tokens_summed_in_common
from ..attention.models import base_model, below_head, head_counts, text_config
from ..attention.packed_forward import all_in_one_batch
from ..attention.tower_attention import towers_as_given
from ..attention.varlen import ATTENTION_NAME
from ..data.collator import PackedDataCollator
from ..data.parts import cut_part
from ..layout import Layout
from .randomness import DrawWatcher, device_state, set_device_state

# Texts of errors where `autograd.grad` is not supported: reentrant checkpointing, models that recompute or detach
NO_GRADIENT = ("checkpoint", "does not require grad", "have been used")
LENGTHS = (13, 1, 11, 22)  # documents of the small pack: 47 tokens, a prime that no hidden size equals
OVER_PARTS = (13, 1, 11, 28)  # the same for more than two ranks: the last one fills a part and goes on, 53 tokens
SPARE = 3  # tokens by which a document is longer than the one in whose place it is put
PADDING = 2  # tokens behind a document in a padded row
READS_AHEAD = 1e-3  # a change of earlier states, relative to the largest, that is no rounding
# Relative difference of gradients that is never rounding in fp64, where some modules compute in fp32
FINEST = 1e-4
# As many times the rounding of states is that of gradients; above the second nothing is compared
FINER, COARSE_GRADIENT = 64, 1e-2
LARGEST_SCORES = 8 * 2**30  # bytes of the scores that `eager` may hold for a document alone
# Documents, and others to put in the place of one: (index, document). In the probe for images they are not tensors.
Examples = tuple[list[Any], Sequence[tuple[int, Any]]]


class CannotRun(Exception):
    """The model raised an error in a run of the probe; that error is the cause."""


@contextmanager
def refusals() -> Iterator[None]:
    """Within this context, `CannotRun` is raised for an error of the model, and `KernelError` for one of a kernel.

    Errors of the device and of communication stay: they say nothing about the model, and the context may be lost.
    """
    try:
        yield
    except (ValueError, RuntimeError, NotImplementedError, TypeError, IndexError, AttributeError) as error:
        if isinstance(error, KernelError) or is_device_error(error):
            raise
        raise_refusal(error)
        raise CannotRun(str(error)) from error


class Probe:
    """Runs small packs through `model`, a transformers causal LM, wrapped or not by PEFT, DDP or an engine.

    A compiled model runs uncompiled here: it would not call hooks that are added after the compilation.

    Args:
        model: as it trains, with the attention of packs.
        degree: see below.
        user_attention: the attention that the model had as the user gave it. A document alone runs on it, so that a
            mistake of the attention of packs cannot hide in both runs. None: its attention now, or transformers'
            default if that is `packfix_varlen`.

    Attributes:
        inner: the transformers model.
        user_attention: the attention of a document alone.
        reads_ahead: whether a token changes earlier states of its document, in the rows of unpacked TRL.
        has_engine: whether DDP or an engine has hooks in its backward pass. FSDP2 counts too: it shards the model in
            place, and torch 2.13 crashes in the second backward of a forward.
        takes_gradient: whether gradients are tested: without an engine, or on several ranks per pack, where each
            forward has one backward, as in training.
        degree: ranks that share each pack. With more than one all ranks run the same packs, each its part of them.
        traces_leaks: whether modules in which information crosses can be found. Their tokens must be the documents,
            one after the other.
    """

    traces_leaks = True

    def __init__(self, model: Any, degree: int = 1, user_attention: str | None = None):
        model = self.model = uncompiled(model)
        self.has_engine = _is_wrapped(model) or any(isinstance(parameter, DTensor) for parameter in model.parameters())
        is_ddp = isinstance(model, DistributedDataParallel)
        self._below_ddp = uncompiled(model.module) if is_ddp else model
        self.takes_gradient = not self.has_engine or degree > 1
        while _is_wrapped(model):
            model = uncompiled(model.module)
        self.inner = base_model(model)
        self.device = next(self.inner.parameters()).device
        self.config = text_config(self.inner)
        self.attention = self.config._attn_implementation or "its own"
        # Flash attention is a reference for itself only: some kernels leave out sinks or windows without an error
        if user_attention is None or "flash" in user_attention:
            user_attention = own_attention(self.inner)
        self.user_attention = default_attention(self.inner) if user_attention == ATTENTION_NAME else user_attention
        self._pads: bool | None = None  # see `_is_padded`
        self.reads_ahead = False
        self.degree = degree
        self._collate = PackedDataCollator(pad_to_multiple_of=degree)
        self._generator = torch.Generator().manual_seed(0)
        special = set(_special_tokens(self.inner.config)) | set(_special_tokens(self.config))
        num_tokens = self.config.vocab_size
        low = max((token for token in special if token < num_tokens // 2), default=0) + 1
        self._words = torch.tensor([token for token in range(low, num_tokens) if token not in special])

    def tokens(self, length: int) -> Tensor:
        """A random document without special tokens, (length,), on the CPU. All ranks get the same one."""
        return self._words[torch.randint(len(self._words), (length,), generator=self._generator)]

    def examples(self, max_length: int | None) -> Examples:
        """Documents of text, each of at most `max_length` tokens, and changes of them."""
        lengths = [min(n, max_length or n) for n in (LENGTHS if self.degree <= 2 else OVER_PARTS)]
        # The first document can change those behind it, the third those on both sides. The gradient tests all pairs.
        documents = [self.tokens(n) for n in lengths]
        return documents, [(i, self.tokens(lengths[i] + more)) for i in (0, 2) for more in (0, SPARE)]

    def long_examples(self, threshold: int) -> tuple[list[Tensor], Tensor]:
        """Three documents, the second at least as long as the threshold, and another to put in its place."""
        return [self.tokens(7), self.tokens(threshold), self.tokens(9)], self.tokens(8)

    def packed(self, documents: list[Tensor], large: bool = False, gradient: bool = False) -> list[Tensor]:
        """Last hidden states of each document in one pack, (length, hidden) each.

        Raises `CannotRun` if the model raises, with a degree above 1 on any rank.
        """
        with torch.set_grad_enabled(gradient):
            states = self._joined(documents, large) if self.degree > 1 else self._states(self._batch(documents), large)
        lengths = [len(ids) for ids in documents]
        if self.degree > 1:
            states = states[:, : sum(lengths)]  # without the padding
        if states.shape[1] != sum(lengths):
            raise CannotRun(f"the LM head gets {states.shape[1]} states for a pack of {sum(lengths)} tokens")
        return list(states[0].split(lengths))

    def alone(self, ids: Tensor, large: bool = False) -> Tensor:
        """Last hidden states of a document in unpacked training of the model as it was given: (n,) -> (n, hidden).

        Raises `CannotRun` if the model raises.
        """
        with self.evaluating(), self.as_given(len(ids)), torch.no_grad():
            return self._states(self.row(ids), large)[0][: len(ids)]

    def rows(self, ids: Tensor) -> None:
        """Run rows without boundaries, (B, n), with the attention of packs. Raises `CannotRun` if the model raises."""
        with self.evaluating(), torch.no_grad():
            self._states({"input_ids": ids.to(self.device), "use_cache": False})

    def error_unpacked(self) -> str | None:
        """What the model raises on a row in training mode, without packing and with its own attention; None if nothing.

        `alone` runs in eval mode without gradients, and so without checkpointing. An engine would wait for a backward.
        """
        ids = self.tokens(LENGTHS[0])
        try:
            with self.as_given(len(ids)), torch.set_grad_enabled(not self.has_engine):
                self._states(self.row(ids))
        except (CannotRun, KernelError) as error:
            return str(error)
        return None

    def row(self, ids: Tensor) -> dict[str, Any]:
        """The batch of a document alone: (1, n), or (1, n + PADDING) where the model needs padding."""
        return self._row(ids, self._is_padded())

    def row_length(self, ids: Tensor) -> int:
        """Tokens of `row(ids)`."""
        return len(ids) + PADDING * self._is_padded()

    def _row(self, ids: Tensor, padded: bool) -> dict[str, Any]:
        if not padded:
            return {"input_ids": ids[None].to(self.device), "use_cache": False}
        tokens = torch.cat([ids, ids[-1:].expand(PADDING)])[None].to(self.device)
        mask = torch.ones_like(tokens)
        mask[:, -PADDING:] = 0
        return {"input_ids": tokens, "attention_mask": mask, "use_cache": False}

    def _is_padded(self) -> bool:
        """Whether documents alone are padded: where a token changes earlier states in a row without padding.

        Unpacked TRL pads its rows. In nearly all models that changes nothing. But transformers drops a mask that hides
        nothing, and then the text part of PaliGemma is not causal.
        """
        if self._pads is None:
            ids = self.tokens(9)
            other = torch.cat([ids[:-2], self.tokens(2)])

            def moves(padded: bool) -> bool:
                first, second = (self._states(self._row(tokens, padded))[0][:7] for tokens in (ids, other))
                return self.on_any_rank(distance([first], [second], [0]) > READS_AHEAD * first.abs().max().item())

            with self.evaluating(), self.as_given(len(ids)), torch.no_grad():
                self._pads = self.reads_ahead = moves(padded=False)
                if self._pads:
                    try:
                        self.reads_ahead = moves(padded=True)
                    except CannotRun:  # TRL trains it on rows of equal length only
                        self._pads = False
        return self._pads

    @contextmanager
    def as_given(self, length: int) -> Iterator[None]:
        """Within this context the model has the attention that it was given with.

        A document so long that the scores of `eager` would not fit runs on `sdpa`, or on the attention of packs, which
        in eval mode computes rows without boundaries as `sdpa` does.
        """
        current, name = own_attention(self.inner), self.user_attention
        heads = max(head_counts(self.config), default=1)
        if name == "eager" and 4 * heads * length**2 > LARGEST_SCORES:
            name = "sdpa" if self.inner._supports_sdpa else current
        with towers_as_given(self.inner):
            if name == current:
                yield
                return
            set_attention(self.inner, name)
            try:
                yield
            finally:
                set_attention(self.inner, current)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within this context the model is in eval mode: in training `packfix_varlen` refuses a forward of a row."""
        training = [module for module in self.inner.modules() if module.training]
        self.inner.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True

    def whole(self, documents: list[Tensor]) -> None:
        """Run the pack on each rank as a whole, with the padding that a pack of this degree has."""
        with torch.no_grad():
            self._states(self._batch(documents, degree=1))

    def _joined(self, documents: list[Tensor], large: bool) -> Tensor:
        """The states of the whole pack, (1, T, hidden), from those of the parts."""
        states, problem = None, None
        try:
            states = self._states(self._batch(documents, self.degree), large)
        except CannotRun as error:
            problem = str(error)
        problems: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        problem = next((text for text in problems if text is not None), None)
        if problem is not None or states is None:
            raise CannotRun(problem)
        parts = [torch.empty_like(states) for _ in range(self.degree)]
        dist.all_gather(parts, states.contiguous(), group=group_of(self.degree))
        return torch.cat(parts, dim=1)

    def _batch(self, documents: list[Tensor], degree: int = 1) -> dict[str, Any]:
        batch = self._collate([{"input_ids": ids} for ids in documents])
        if degree > 1:
            batch = cut_part(batch, degree, dist.get_rank(group_of(degree)))
            batch.pop("shift_labels")
        batch.pop("labels")
        return self._moved(batch)

    def _moved(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {
            key: value.to(self.device) if isinstance(value, Tensor | Layout) else value for key, value in batch.items()
        }

    def _states(self, batch: dict[str, Any], large: bool = False, of_backbone: bool = False) -> Tensor:
        """The input of the LM head, (B, T, hidden), from a forward of the whole wrapped model.

        For a `large` pack the output of the backbone, with the logits of one token only: all of them would be T x V.
        `of_backbone` gives it for any pack.
        """
        caught: list[Tensor] = []
        below = below_head(self.inner)  # a repaired module may call a decoder more than once
        takes_few = "logits_to_keep" in inspect.signature(type(self.inner).forward).parameters
        head = self.inner.get_output_embeddings()
        # the head of a reward model is no LM head
        if head is None or (below and (of_backbone or (large and takes_few))):
            # An index, not a number: given a number, layers that share keys (Gemma 4) compute the last tokens only
            batch |= {"logits_to_keep": torch.zeros(1, dtype=torch.int64, device=self.device)} if takes_few else {}
            handles = [
                m.register_forward_hook(lambda module, args, out: caught.append(out[0])) for m in below or [self.inner]
            ]
        else:
            handles = [head.register_forward_pre_hook(lambda module, args: caught.append(args[0]))]
        self._draw_again()
        try:
            with refusals():
                self.model(**batch)
        finally:
            for handle in handles:
                handle.remove()
        if not caught:
            raise ValueError(
                f"The forward of this {type(self.inner).__name__} ran and did not call its LM head. The usual cause is "
                "a deep copy of a model that TRL has trained: its forward is that of the original and uses the "
                "original's weights. Run `del model.forward` on the copy (with PEFT, on the model inside) before "
                "passing it to a trainer."
            )
        states = caught[-1]  # the outermost call ends last
        return states if states.dim() == 3 else states.reshape(len(batch["input_ids"]), -1, states.shape[-1])

    def silence_draws(self) -> None:
        """Set modules that still draw random numbers to eval mode: routers with jitter or sampling, NEFTune's noise.

        They are found in a small pack, up to where the model raises, if it does. All modules of their classes are set.
        `undisturbed` restores their modes.
        """
        watcher = DrawWatcher(self.inner, self.device)
        watcher.install()
        try:
            # Parts must not be shorter than a convolution
            self.packed([self.tokens(n) for n in ((3, 5) if self.degree == 1 else (13, 11))])
        except CannotRun:
            pass  # the next run raises it again
        finally:
            watcher.remove()
        for module in self.inner.modules():
            if type(module) in watcher.kinds:
                module.training = False  # not of its children: they may not draw

    def _draw_again(self) -> None:
        """Seed the generators, so that modules that draw even in eval mode draw the same in every run.

        Only on the devices that `undisturbed` restores.
        """
        torch.default_generator.manual_seed(0)
        if device_state(self.device) is not None:
            module = torch.get_device_module(self.device)
            with module.device(self.device) if hasattr(module, "device") else nullcontext():
                module.manual_seed(0)

    def gradient(self, documents: list[Tensor]) -> float | None:
        """Largest gradient of one document's states with respect to the embeddings of the others.

        None if the model does not support it. Raises `CannotRun` if the model raises.
        """
        if self.degree > 1:
            return self._gradient_on_ranks(documents)
        lengths, largest = [len(ids) for ids in documents], 0.0
        rounding = self._shared_rounding()
        try:
            with self.embeddings() as embedded:
                states = self._states(self._batch(documents))[0].split(lengths)
                for own in range(len(documents)):
                    weights = torch.randn(states[own].shape, generator=self._generator).to(states[own])
                    (gradient,) = torch.autograd.grad((states[own] * weights).sum(), embedded[0], retain_graph=True)
                    if gradient[..., 0].numel() != sum(lengths):
                        return None  # the backbone gets documents as padded rows, not the pack
                    parts = gradient.reshape(-1, gradient.shape[-1]).split(lengths)
                    others = max(part.abs().max().item() for i, part in enumerate(parts) if i != own)
                    if others > rounding * parts[own].abs().max().item():
                        largest = max(largest, others)
        except RuntimeError as error:
            if any(words in str(error) for words in NO_GRADIENT):
                return None
            raise_refusal(error)
            raise
        except AssertionError:  # reformer: no gradients while a layer that draws is in eval mode
            return None
        except KernelError:
            raise
        except ValueError as error:  # from a repaired module that is recomputed
            raise CannotRun(str(error)) from error
        return largest

    def _shared_rounding(self) -> float:
        """Gradient between documents, relative to the largest within one, that rounding in a kernel may cause."""
        return tokens_summed_in_common(self.inner) * torch.finfo(torch.float32).eps

    def _gradient_on_ranks(self, documents: list[Tensor]) -> float | None:
        """As `gradient`; or the relative difference from the gradient of a document alone, if it is no rounding.

        A gradient that is not sent back to the rank that it belongs to moves no other document.
        """
        # In half precision a rounding may choose other experts: only gradients that are lost or others' are found
        rounding, limit = self._shared_rounding(), FINER * self.rounding(documents)
        limit = limit if limit < COARSE_GRADIENT else inf
        largest, start = 0.0, 0
        for ids in documents:
            own = torch.arange(start, start + len(ids), device=self.device)
            start += len(ids)
            gradient = self._embedding_gradient(self._batch(documents, self.degree), own, self.degree)
            with self.evaluating(), self.as_given(len(ids)):
                gradient_alone = self._embedding_gradient(self.row(ids), torch.arange(len(ids), device=self.device))
            if gradient is None or gradient_alone is None:
                return None
            largest = max(
                largest, wrong_gradient(gradient, own, gradient_alone[: len(ids)], limit=limit, rounding=rounding)
            )
        return largest

    def _embedding_gradient(self, batch: dict[str, Any], rows: Tensor, degree: int = 1) -> Tensor | None:
        """Gradient of the states in `rows`, summed with fixed random weights, with respect to all embeddings, (T, D).

        With a degree above 1 `batch` is the own part of the pack, and `rows` are those of the pack. None if the model
        does not support it.
        """
        model = self.model
        if self.has_engine and not below_head(self.inner):
            return None  # ZeRO-3 refuses a backward pass that enters a module, such as the head, at its input
        try:
            with self.embeddings() as embedded:
                self.model = self._below_ddp  # DDP would wait for the gradients of parameters
                states = self._states(dict(batch), of_backbone=self.has_engine)[0]
                drawn = torch.randn((len(rows), states.shape[1]), generator=torch.Generator().manual_seed(len(rows)))
                weights = states.new_zeros(degree * len(states), states.shape[1])
                weights[rows] = drawn.to(states)
                first = 0 if degree == 1 else dist.get_rank(group_of(degree)) * len(states)
                loss = (states * weights[first : first + len(states)]).sum()
                (gradient,) = torch.autograd.grad(loss, embedded[0])
        except RuntimeError as error:
            if any(words in str(error) for words in NO_GRADIENT):
                return None
            raise_refusal(error)
            raise
        finally:
            self.model = model
        gradient = exact(gradient.reshape(-1, gradient.shape[-1]))
        if degree == 1:
            return gradient
        if len(gradient) == degree * len(states):  # with images each rank embeds the whole pack, and cuts it after that
            dist.all_reduce(gradient, group=group_of(degree))
            return gradient
        parts = [torch.empty_like(gradient) for _ in range(degree)]
        dist.all_gather(parts, gradient.contiguous(), group=group_of(degree))
        return torch.cat(parts)

    @contextmanager
    def embeddings(self) -> Iterator[list[Tensor]]:
        """Within this context gradients are computed; the list has the embeddings of the first forward, as a leaf."""
        embedded: list[Tensor] = []

        def catch(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            if embedded:
                return output
            embedded.append(output.detach().requires_grad_())
            return embedded[0].clone()  # some models modify the output of the embedding in place

        handle = self.inner.get_input_embeddings().register_forward_hook(catch)
        try:
            with torch.enable_grad():
                yield embedded
        finally:
            handle.remove()

    def rounding(self, documents: list[Tensor]) -> float:
        """Relative change that another order of the same sums may cause: 32 roundings in fp32, 4 in half precision.

        With Mamba-2's kernel as many as a chunk has tokens: it sums over documents.

        It is computed from the coarsest dtype of any module's output. The dtype of the weights is not enough:
        accelerate runs fp32 weights under autocast inside the model's forward.
        """
        dtypes: set[torch.dtype] = set()

        def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
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
        return 4 * eps if eps > 1e-4 else max(32, tokens_summed_in_common(self.inner)) * eps

    @contextmanager
    def rounded_otherwise(self, draw: int) -> Iterator[None]:
        """Within this context, every number in a module's output is changed by half an ulp, up or down at random.

        Other kernels, or the same kernel on other shapes, round differently; this is about the most they may differ.
        """
        generators: dict[torch.device, torch.Generator] = {}  # drawn on the host, an 8B model would need 20 seconds

        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            if value.device not in generators:
                generators[value.device] = torch.Generator(value.device).manual_seed(draw)
            generator, device = generators[value.device], value.device
            signs = torch.randint(0, 2, value.shape, generator=generator, dtype=torch.int8, device=device) * 2 - 1
            wide = torch.float32 if value.element_size() < 4 or device.type == "mps" else torch.float64
            return (value.to(wide) * (1 + signs * torch.finfo(value.dtype).eps / 2)).to(value.dtype)

        def move(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            return tuple(map(moved, output)) if type(output) is tuple else moved(output)

        head = self.inner.get_output_embeddings()
        leaves = [m for m in self.inner.modules() if m is not head and next(m.children(), None) is None]
        handles = [module.register_forward_hook(move) for module in leaves]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def on_any_rank(self, condition: Any) -> bool:
        """Whether the condition holds on this rank or, with an engine or a degree above 1, on any rank.

        There all ranks must run the same forwards. Without this, kernels that sum in a different order in each
        run may give ranks different roundings, and so different forwards to run.
        """
        if not ((self.has_engine or self.degree > 1) and dist.is_initialized()):
            return bool(condition)
        on_ranks: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(on_ranks, bool(condition))
        return any(on_ranks)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Within this context, the model is in train mode with dropout rate 0, as in training without randomness.

        On exit buffers, random state and modes are restored. Under FSDP2 parameters are sharded again, which the root
        module otherwise does only after a backward pass; under ZeRO-3 those of modules into which no gradient flows.
        """
        inner = self.inner
        modes = [(module, module.training) for module in inner.modules()]
        rates = [
            (module, name, rate)
            for module in inner.modules()
            for name, rate in vars(module).items()
            if "drop" in name and isinstance(rate, float) and rate > 0
        ]
        rates += [(m, "p", m.p) for m in inner.modules() if isinstance(m, nn.Dropout) and m.p > 0]
        buffers = [(buffer, buffer.clone()) for buffer in inner.buffers()]
        state = device_state(self.device)
        with torch.random.fork_rng(devices=[]), all_in_one_batch():
            try:
                inner.train()
                for module, name, _ in rates:
                    setattr(module, name, 0.0)
                yield
            finally:
                set_device_state(self.device, state)
                for module, name, rate in rates:
                    setattr(module, name, rate)
                for module, training in modes:
                    module.training = training
                    if isinstance(module, FSDPModule):
                        module.reshard()
                engine: Any = self.model
                if self.takes_gradient and hasattr(engine, "empty_partition_cache"):
                    engine.empty_partition_cache()
                with torch.no_grad():
                    for buffer, value in buffers:
                        if buffer.shape == value.shape:
                            buffer.copy_(value)


def exact(value: Tensor) -> Tensor:
    """`value` in a dtype that represents differences of its numbers: fp64, or fp32 on MPS, which has no fp64."""
    return value.float() if value.device.type == "mps" else value.double()


def distance(first: list[Tensor], second: list[Tensor], which: Any) -> float:
    """Largest difference of these documents' states; infinity if any is nan."""
    gaps = [(exact(first[i]) - exact(second[i])).abs().max().item() for i in which]
    return max((float("inf") if gap != gap else gap for gap in gaps), default=0.0)


def wrong_gradient(
    gradient: Tensor, own: Tensor, gradient_alone: Tensor, *, limit: float, rounding: float = 0.0
) -> float:
    """What is wrong with the gradient of a document with respect to the rows of its pack, (T, D); 0 if nothing.

    It is the largest one of rows that are not its own (above `rounding` times the largest), or the difference from
    `wanted`, that of the document alone, relative to its largest and above `limit`.
    """
    is_other = torch.ones(len(gradient), dtype=torch.bool, device=gradient.device)
    is_other[own] = False
    mine, scale = gradient[own], gradient_alone.abs().max()
    others = gradient[is_other].abs().max().item() if is_other.any() else 0.0
    largest = others if others > rounding * scale.item() else 0.0
    is_lost = ((mine == 0).all(-1) & (gradient_alone != 0).any(-1)).any().item()
    gap = inf if is_lost else ((mine - gradient_alone).abs().max() / scale).item()
    return largest if gap <= limit and not is_lost else max(largest, gap)


def uncompiled(model: nn.Module) -> nn.Module:
    """The model that was passed to `torch.compile`, or `model` itself."""
    return getattr(model, "_orig_mod", model)


def _special_tokens(config: Any) -> Iterator[int]:
    """Token ids with a meaning in the config: end of text (several in some models), image, padding."""
    for name, value in vars(config).items():
        if name.endswith(("token_id", "token_ids", "token_index")):
            yield from (token for token in (value if isinstance(value, list | tuple) else [value]) if token is not None)


def _is_wrapped(model: nn.Module) -> bool:
    """Whether it is DDP, DataParallel or the DeepSpeed engine, which hold the model as `module`."""
    return isinstance(getattr(model, "module", None), nn.Module)
