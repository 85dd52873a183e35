"""Compute states and gradients of a model while it is probed, as it trains or as it was given, without randomness.

`ProbedModel` wraps the model of a trainer for the tests in this folder and for the comparison before the first step
(`training/first_step.py`). A batch comes in, and last hidden states or gradients come out. Contexts switch off what
would disturb a test, or set the model up as the user gave it. `Probe` (`probe.py`) adds the packs that are tested.

Words: a document runs *unpacked* if it runs as in training by TRL without packing. The *degree* is the number of ranks
that share each pack (sequence parallelism). These ranks are a *group*, and the tokens of the pack that one of them
holds are its *part*. A *row* is the place of one token in hidden states or gradients of a pack, (T, hidden). An
*engine* is DDP, DeepSpeed or FSDP. *Rounding* is measured by running the same batch again with noise of half an ulp.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from math import inf, isnan
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..attention.choice import default_attention, own_attention, set_attention
from ..attention.kernel_errors import KernelError, is_device_error, raise_refusal
from ..attention.models import base_model, below_head, head_counts, text_config
from ..attention.packed_forward import all_in_one_batch
from ..attention.tower_support import tower_support
from ..attention.varlen import ATTENTION_NAME
from ..group import ALONE, Group, make_groups
from ..layout import Layout
from .randomness import device_state, set_device_state
from .user_hooks import gradient_hooks_aside

T = TypeVar("T")
# Texts of errors where `autograd.grad` is not supported: with reentrant checkpointing, for a model that detaches its
# states, and for a model that recomputes layers by itself ("One of the differentiated Tensors appears to not have been
# used in the graph")
NO_GRADIENT = ("checkpoint", "does not require grad", "have been used")
LARGEST_SCORES = 8 * 2**30  # bytes of the attention scores, in fp32, that `eager` may hold for a document alone
NUM_DRAWS = 6  # random roundings to try: with a router the largest change is rare
ROUNDING_FACTOR = 3  # tolerance in multiples of the largest measured change, because the draws are few
MAX_NOISE = 0.5  # largest tolerance, relative to the largest state: a full leak of attention changes states by about 1
# Why a model cannot be tested whose states are no numbers also without packing. Every gap would be infinite
NOT_FINITE = "its hidden states are NaN or infinite, so one of its weights is, or numbers overflow in half precision"


class CannotRun(Exception):
    """Error raised if the model raises an error in a run of the probe, which is its cause, or returns no numbers."""


@contextmanager
def model_errors_converted() -> Iterator[None]:
    """Within this context, errors of the model become `CannotRun`, and errors of a kernel become `KernelError`.

    Errors of the device and of communication are not converted: they say nothing about the model, and the CUDA context
    may be lost.
    """
    try:
        yield
    except (ValueError, RuntimeError, NotImplementedError, TypeError, IndexError, AttributeError) as error:
        if isinstance(error, KernelError) or is_device_error(error):
            raise
        raise_refusal(error)  # raises `KernelError` if a kernel has refused the input, and else returns
        raise CannotRun(str(error)) from error


class ProbedModel:
    """A transformers causal LM, bare or wrapped by PEFT, DDP or an engine, as tests run it.

    A compiled model runs uncompiled here: it would not call hooks that are added after the compilation.

    Args:
        degree: number of ranks that share each pack. Above 1 all ranks run the same packs, each rank its part of them.
        user_attention: name of the attention with which the user gave the model. A document alone runs on it, so that
            a mistake in the attention of packs cannot hide in both runs. None means the model's current attention, or
            transformers' default if the current one is `packfix_varlen`.

    Attributes:
        inner: the transformers model inside all wrappers.
        group: the ranks that share each pack.
        has_engine: whether DDP or an engine has hooks in its backward pass. FSDP2 counts too: it shards the model in
            place, and torch 2.13 crashes in the second backward of a forward.
        takes_gradient: whether gradients are tested. With an engine they are not, unless several ranks share a pack:
            then each forward has one backward, as in training.
    """

    def __init__(self, model: nn.Module, degree: int = 1, user_attention: str | None = None):
        model = without_compile(model)
        self.model = model
        wrappers = [model]  # the outermost first. DDP, DataParallel and the DeepSpeed engine hold the model as `module`
        while isinstance(module := getattr(wrappers[-1], "module", None), nn.Module):
            wrappers.append(without_compile(module))
        self.has_engine = len(wrappers) > 1 or any(isinstance(parameter, DTensor) for parameter in model.parameters())
        self._below_ddp = wrappers[1] if isinstance(model, DistributedDataParallel) else model
        make_groups((degree,))
        self.group = ALONE if degree == 1 else Group(degree, dist.get_rank() % degree)
        self.takes_gradient = not (self.has_engine and self.group.is_alone)
        self.inner = base_model(wrappers[-1])
        self.device = next(self.inner.parameters()).device
        self.config = text_config(self.inner)
        self.attention = self.config._attn_implementation or "its own"  # "its own" is for messages
        # Documents alone are the reference. They do not run on flash attention if packs run on another one, because
        # some flash kernels ignore sinks or windows without an error. So the attention that the model has now
        # (`own_attention`) replaces the user's flash attention, and transformers' default replaces that of packs.
        if user_attention is None or "flash" in user_attention:
            user_attention = own_attention(self.inner)
        self.user_attention = default_attention(self.inner) if user_attention == ATTENTION_NAME else user_attention
        self._is_unpacked = False
        self.degree = degree

    def states(self, batch: dict[str, Any], *, from_backbone: bool = False, model: Any = None) -> Tensor:
        """Return the last hidden states of a batch, (B, T, hidden).

        They are the input of the LM head. All logits, T x V numbers, would need much memory. So a model that has an
        argument for it computes the logits of one token only, and the states are the output of the backbone.

        Args:
            from_backbone: take the states from the backbone also if the model computes all logits.
            model: the wrapper whose forward runs; None runs the whole wrapped model.
        """
        # 1. Hook the module that has the states as its output, or as its input.
        caught: list[Tensor] = []
        backbones = below_head(self.inner)  # a decoder, the model around it, or both: which one runs is unknown
        selects_logits = "logits_to_keep" in inspect.signature(type(self.inner).forward).parameters
        head = self.inner.get_output_embeddings()
        hooks = ExitStack()
        # The head of a reward model is not an output embedding, so `head` is None there.
        if head is None or (backbones and (from_backbone or selects_logits)):
            if selects_logits:
                # The index of one token. A number of tokens would make layers that share keys (Gemma 4) compute the
                # states of the last tokens only.
                batch = batch | {"logits_to_keep": torch.zeros(1, dtype=torch.int64, device=self.device)}
            for backbone in backbones or [self.inner]:
                hooks.enter_context(backbone.register_forward_hook(lambda module, args, out: caught.append(out[0])))
        else:
            hooks.enter_context(head.register_forward_pre_hook(lambda module, args: caught.append(args[0])))
        # 2. With fixed seeds, modules that draw random numbers even in eval mode draw the same in every run. Seeds are
        # set only on devices whose generator `undisturbed` restores.
        torch.default_generator.manual_seed(0)
        if device_state(self.device) is not None:
            module = torch.get_device_module(self.device)
            with module.device(self.device) if hasattr(module, "device") else nullcontext():
                module.manual_seed(0)
        # 3. Run the model.
        with hooks, model_errors_converted():
            (model or self.model)(**batch)
        if not caught:
            raise ValueError(
                f"The forward of this {type(self.inner).__name__} ran and did not call its LM head. The usual cause is "
                "a deep copy of a model that TRL has trained: its forward is that of the original and uses the "
                "original's weights. Run `del model.forward` on the copy (with PEFT, on the model inside) before "
                "passing it to a trainer."
            )
        # A decoder may have been called several times: for each batch of documents, if it is repaired (`repair.py`).
        # The call that returns the states of the pack ends last.
        states = caught[-1]
        return states if states.dim() == 3 else states.reshape(len(batch["input_ids"]), -1, states.shape[-1])

    def move_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with its tensors and its layout on the device of the model."""
        return {
            key: value.to(self.device) if isinstance(value, Tensor | Layout) else value for key, value in batch.items()
        }

    @contextmanager
    def as_given(self, length: int) -> Iterator[None]:
        """Within this context the model has the attention with which the user gave it.

        If the scores of `eager` would not fit for rows of `length` tokens, it has `sdpa`. If the model does not support
        `sdpa`, it keeps the attention of packs, which in eval mode computes rows without boundaries as `sdpa` does.
        """
        current = own_attention(self.inner)  # the attention that the model has now
        name = self.user_attention
        num_heads = max(head_counts(self.config), default=1)
        num_bytes = 4 * num_heads * length**2
        if name == "eager" and num_bytes > LARGEST_SCORES:
            name = "sdpa" if self.inner._supports_sdpa else current
        with tower_support().own_attention_restored(self.inner):  # the same for vision towers
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
        """Within this context the model is in eval mode, because `packfix_varlen` refuses plain rows in training."""
        trained_modules = [module for module in self.inner.modules() if module.training]
        for module in trained_modules:
            module.training = False
        try:
            yield
        finally:
            for module in trained_modules:
                module.training = True

    @contextmanager
    def unpacked(self, length: int) -> Iterator[None]:
        """Within this context rows of up to `length` tokens run as in unpacked training. Nested, it has no effect."""
        if self._is_unpacked:
            yield
            return
        self._is_unpacked = True
        try:
            with self.evaluating(), self.as_given(length):
                yield
        finally:
            self._is_unpacked = False

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Within this context, the model is in train mode with dropout rate 0, as in training without randomness.

        The user's hooks on gradients do not run. Repaired modules run all documents in one padded batch, because in
        training any two of them may share one (`all_in_one_batch`). On exit buffers, random state and modes are
        restored. Under FSDP2 all parameters are sharded again, which the root module otherwise does only after a
        backward pass. Under ZeRO-3 the parameters of modules into which no gradient flows are partitioned again.
        """
        inner = self.inner
        modes = [(module, module.training) for module in inner.modules()]
        rates = [
            (module, name, rate)
            for module in inner.modules()
            for name, rate in vars(module).items()
            if isinstance(rate, float) and ("drop" in name or (name == "p" and isinstance(module, nn.Dropout)))
        ]
        buffers = [(buffer, buffer.clone()) for buffer in inner.buffers()]
        state = device_state(self.device)
        with torch.random.fork_rng(devices=[]), all_in_one_batch(), gradient_hooks_aside(inner):
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
                # DeepSpeed's engine has this method, which is needed after a backward.
                empty_cache = getattr(self.model, "empty_partition_cache", None)
                if self.takes_gradient and empty_cache is not None:
                    empty_cache()
                with torch.no_grad():
                    for buffer, value in buffers:
                        if buffer.shape == value.shape:
                            buffer.copy_(value)

    def on_any_rank(self, condition: object) -> bool:
        """Return whether the condition holds on this rank or, with an engine or a degree above 1, on any rank.

        With an engine or a higher degree, all ranks must run the same forwards. Kernels that sum in a different order
        in each run give ranks different roundings, so ranks might decide differently if each decided alone.
        """
        return any(self.values_of_ranks(condition))

    def values_of_ranks(self, value: T) -> list[T]:
        """Return the value of this rank or, with an engine or a degree above 1, the values of all ranks."""
        runs_together = self.has_engine or not self.group.is_alone
        return gather_values(value) if runs_together else [value]

    @contextmanager
    def embeddings(self) -> Iterator[list[Tensor]]:
        """Within this context gradients are enabled, and the embeddings of the first forward are put into the list.

        They are a leaf tensor, with respect to which a caller differentiates.
        """
        embedded: list[Tensor] = []

        def catch(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            if embedded:
                return output
            embedded.append(output.detach().requires_grad_())
            return embedded[0].clone()  # some models modify the output of the embedding in place

        with self.inner.get_input_embeddings().register_forward_hook(catch), torch.enable_grad():
            yield embedded

    def embedding_gradients(
        self, batch: dict[str, Any], row_sets: Sequence[Tensor], group: Group = ALONE
    ) -> list[Tensor] | None:
        """Return the gradients of some states with respect to all embeddings of a pack, (T, D) for each set of rows.

        The states of a set are summed with fixed random weights, and the sum is differentiated.

        Args:
            batch: the part of the pack that this rank of the group has.
            row_sets: sets of row indices in the whole pack.
            group: the ranks that share the pack: `self.group` for a pack, and by default this rank by itself, for a
                document alone.

        Returns:
            One gradient per set, or None if the model does not support such gradients.
        """
        if self.has_engine and not below_head(self.inner):
            return None  # ZeRO-3 refuses a backward pass that enters a module, such as the head, at its input
        gradients = []
        # Each set gets a backward. If ranks share packs, each forward has only one backward, as in training.
        for sets_of_forward in [row_sets] if group.is_alone else [[rows] for rows in row_sets]:
            with self.embeddings() as embedded:
                # The model inside DDP runs, because DDP would wait for the gradients of parameters.
                states = self.states(batch, from_backbone=self.has_engine, model=self._below_ddp)[0]
                for rows in sets_of_forward:
                    # A document has the same weights in a pack and alone: they depend on its length only.
                    generator = torch.Generator().manual_seed(len(rows))
                    row_weights = torch.randn((len(rows), states.shape[1]), generator=generator)
                    # The weights of all states of the pack, (ranks, tokens of a part, hidden); 0 outside of `rows`
                    weights_by_rank = states.new_zeros(group.size, *states.shape)
                    weights_by_rank.flatten(0, 1)[rows] = row_weights.to(states)
                    loss = (states * weights_by_rank[group.rank]).sum()
                    gradient = gradient_of(loss, embedded[0], retain_graph=rows is not sets_of_forward[-1])
                    if gradient is None:
                        return None
                    gradient = to_exact(gradient.reshape(-1, gradient.shape[-1]))
                    # A rank embeds its part of the pack, and the gradients of the parts are joined. With images each
                    # rank embeds the whole pack and cuts its part after that, so gradients are added. A rank by itself
                    # also embeds the whole pack, and `sum` returns its gradient.
                    embeds_whole_pack = len(gradient) == group.size * len(states)
                    gradients.append(group.sum(gradient) if embeds_whole_pack else group.gather(gradient, dim=0))
        return gradients

    @contextmanager
    def rounded_otherwise(self, draw: int, *, by_channel: bool = False) -> Iterator[None]:
        """Within this context, every number in a module's output is changed by half an ulp, up or down at random.

        Other kernels, or the same kernel on other shapes, round differently; half an ulp is about the most that they
        may differ.

        Args:
            draw: number of the random rounding; the same number gives the same noise.
            by_channel: change all numbers of one channel alike, in the output and in its gradient. Real roundings are
                alike for tokens that are nearly equal. They then add up in the gradient of a bias, a sum over tokens,
                and noise that is drawn for each token would cancel there.
        """
        # One generator per device: with numbers that are drawn on the host an 8B model would need 20 seconds.
        generators: dict[torch.device, torch.Generator] = {}

        def add_noise(value: object, seed: int | None = None) -> object:
            """Return a tensor with noise, and other values as they are. Without a seed, the generator goes on."""
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            device = value.device
            generator = generators.setdefault(device, torch.Generator(device))
            if seed is not None:
                generator.manual_seed(seed)
            shape = value.shape[-1:] if by_channel else value.shape
            signs = torch.randint(0, 2, shape, generator=generator, dtype=torch.int8, device=device) * 2 - 1
            wide = torch.float32 if value.element_size() < 4 or device.type == "mps" else torch.float64
            noisy = (value.to(wide) * (1 + signs * torch.finfo(value.dtype).eps / 2)).to(value.dtype)
            if by_channel and noisy.requires_grad:
                noisy.register_hook(add_noise)
            return noisy

        def add_noise_to_output(seed: int, module: nn.Module, *args_and_output: Any) -> object:
            output = args_and_output[-1]
            if type(output) is tuple:
                return tuple(add_noise(value, seed) for value in output)
            return add_noise(output, seed)

        head = self.inner.get_output_embeddings()
        innermost = [m for m in self.inner.modules() if m is not head and next(m.children(), None) is None]
        with ExitStack() as hooks:
            # Each module has a seed of its own, so that checkpointing recomputes a layer with the same noise.
            for i, module in enumerate(innermost):
                seed = draw * len(innermost) + i
                hooks.enter_context(module.register_forward_hook(partial(add_noise_to_output, seed)))
            yield

    def limits_of_rounding(
        self,
        gaps: Sequence[float],
        limits: Sequence[float],
        measure_changes: Callable[[], Sequence[float]],
        *,
        draws: Iterable[int] = range(NUM_DRAWS),
        by_channel: bool = False,
    ) -> list[float]:
        """Return the limits of some gaps, raised by the changes that other roundings make.

        Roundings are drawn until all gaps are within their limits, or all draws are used.

        Args:
            gaps: relative differences that rounding may explain, one per compared quantity.
            limits: the limits to begin with.
            measure_changes: repeats a run, here under another rounding, and returns the relative change of each
                compared quantity.
            draws, by_channel: the roundings to try, see `rounded_otherwise`.
        """
        draws = iter(draws)
        raised = [*limits]
        while self.is_beyond(gaps, raised) and (draw := next(draws, None)) is not None:
            with self.rounded_otherwise(draw, by_channel=by_channel):
                changes = measure_changes()
            raised = [
                max(limit, min(ROUNDING_FACTOR * change, MAX_NOISE))
                for limit, change in zip(raised, changes, strict=True)
            ]
        return raised

    def is_beyond(self, gaps: Sequence[float], limits: Sequence[float]) -> bool:
        """Return whether a gap is above its limit, or NaN, on any rank (see `on_any_rank`)."""
        return self.on_any_rank(not all(gap <= limit for gap, limit in zip(gaps, limits, strict=True)))


def gradient_of(loss: Tensor, leaf: Tensor, *, retain_graph: bool = False) -> Tensor | None:
    """Return the gradient of a loss with respect to the tensor `leaf`, or None if the model does not support it.

    An error of a kernel is raised as `KernelError`.
    """
    try:
        return torch.autograd.grad(loss, leaf, retain_graph=retain_graph)[0]
    except RuntimeError as error:
        if any(words in str(error) for words in NO_GRADIENT):
            return None
        raise_refusal(error)
        raise
    except AssertionError:  # reformer asserts in backward that its layers, which draw random numbers, are in train mode
        return None


def to_exact(value: Tensor) -> Tensor:
    """Return `value` in a dtype that represents differences of its numbers: fp64, or fp32 on MPS without fp64."""
    return value.float() if value.device.type == "mps" else value.double()


def largest_distance(first: list[Tensor], second: list[Tensor]) -> float:
    """Return the largest difference between the states of documents in two runs; infinity if a difference is NaN."""
    gaps = [(to_exact(a) - to_exact(b)).abs().max().item() for a, b in zip(first, second, strict=True)]
    return max((inf if isnan(gap) else gap for gap in gaps), default=0.0)


def gather_values(value: T) -> list[T]:
    """Return the values of all ranks, in the order of ranks; only this rank's value if the run has one process."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def without_compile(model: nn.Module) -> nn.Module:
    """Return the model that was passed to `torch.compile`, or `model` itself if it is not compiled."""
    return getattr(model, "_orig_mod", model)
