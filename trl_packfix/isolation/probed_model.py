"""A model while it is probed: its states and gradients, as it trains and as it was given, without randomness."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from math import inf
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..attention.choice import default_attention, own_attention, set_attention
from ..attention.exchange import group_of, make_groups
from ..attention.kernel_errors import KernelError, is_device_error, raise_refusal
from ..attention.models import base_model, below_head, head_counts, text_config
from ..attention.packed_forward import all_in_one_batch
from ..attention.tower_attention import towers_as_given
from ..attention.varlen import ATTENTION_NAME
from ..layout import Layout
from .randomness import device_state, set_device_state
from .user_hooks import gradient_hooks_aside

T = TypeVar("T")
# Texts of errors where `autograd.grad` is not supported: reentrant checkpointing, models that recompute or detach
NO_GRADIENT = ("checkpoint", "does not require grad", "have been used")
LARGEST_SCORES = 8 * 2**30  # bytes of the scores that `eager` may hold for a document alone
NUM_DRAWS = 6  # random roundings to try: with a router the largest change is rare
# As many times the rounding of states is that of gradients; above the second nothing is compared
FINER = 64
COARSE_GRADIENT = 1e-2
ROUNDING_FACTOR = 3  # times the largest change of so few draws
MAX_NOISE = 0.5  # largest tolerance, relative to the largest state: a full leak of attention changes states by about 1


class CannotRun(Exception):
    """The model raised an error in a run of the probe; that error is the cause."""


@contextmanager
def model_errors_converted() -> Iterator[None]:
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


class LocalRank:
    """This rank, which holds whole packs."""

    degree = 1
    index = 0

    def states(self, forward: Callable[[], Tensor]) -> Tensor:
        """The states of all rows of a pack, (1, T, hidden), from a forward of the rows of each rank."""
        return forward()

    def gradient(self, gradient: Tensor, num_rows: int) -> Tensor:
        """The gradient with respect to all `num_rows` rows of a pack, from what each rank has."""
        return gradient

    def forwards(self, places: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """These places, as many together as one forward has backwards for."""
        return [places]

    def gradient_limit(self, rounding: float) -> float | None:
        """How far the gradient of a document may be from that alone; None if they are not compared."""
        return None


LOCAL_RANK = LocalRank()


class SequenceGroup(LocalRank):
    """The ranks that share each pack, each its part of it. All must call a method."""

    def __init__(self, degree: int):
        make_groups((degree,))
        self.degree, self._group = degree, group_of(degree)
        self.index = dist.get_rank(self._group)

    def states(self, forward: Callable[[], Tensor]) -> Tensor:
        """As of one rank; it raises `CannotRun` if the model raises on any."""
        states: Any = None
        problem = ""
        try:
            states = forward()
        except CannotRun as error:
            problem = str(error)
        if any(problems := gather_values(problem)):
            raise CannotRun(next(filter(None, problems)))
        return self._join_parts(states, dim=1)

    def gradient(self, gradient: Tensor, num_rows: int) -> Tensor:
        if len(gradient) != num_rows:
            return self._join_parts(gradient, dim=0)
        dist.all_reduce(gradient, group=self._group)  # with images each embeds the whole pack, and cuts it after that
        return gradient

    def forwards(self, places: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        return [[rows] for rows in places]  # each has one backward, as in training

    def gradient_limit(self, rounding: float) -> float | None:
        # in half precision a rounding may choose other experts, so only what is lost is found
        return FINER * rounding if FINER * rounding < COARSE_GRADIENT else inf

    def _join_parts(self, part: Tensor, dim: int) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(self.degree)]
        dist.all_gather(parts, part.contiguous(), group=self._group)
        return torch.cat(parts, dim=dim)


class ProbedModel:
    """A transformers causal LM, wrapped or not by PEFT, DDP or an engine.

    A compiled model runs uncompiled here: it would not call hooks that are added after the compilation.

    Args:
        degree: ranks that share each pack. With more than one all ranks run the same packs, each its part of them.
        user_attention: the attention that the model was given with. A document alone runs on it, so that a mistake of
            the attention of packs cannot hide in both runs. None: its attention now, or transformers' default if that
            is `packfix_varlen`.

    Attributes:
        ranks: those that share each pack.
        has_engine: whether DDP or an engine has hooks in its backward pass. FSDP2 counts too: it shards the model in
            place, and torch 2.13 crashes in the second backward of a forward.
        takes_gradient: whether gradients are tested: without an engine, or on several ranks per pack, where each
            forward has one backward, as in training.
    """

    def __init__(self, model: nn.Module, degree: int = 1, user_attention: str | None = None):
        model = self.model = without_compile(model)
        wrapped = [model]  # DDP, DataParallel and the DeepSpeed engine hold the model as `module`
        while isinstance(module := getattr(wrapped[-1], "module", None), nn.Module):
            wrapped.append(without_compile(module))
        self.has_engine = len(wrapped) > 1 or any(isinstance(parameter, DTensor) for parameter in model.parameters())
        self._below_ddp = wrapped[1] if isinstance(model, DistributedDataParallel) else model
        self.takes_gradient = not self.has_engine or degree > 1
        self.inner = base_model(wrapped[-1])
        self.device = next(self.inner.parameters()).device
        self.config = text_config(self.inner)
        self.attention = self.config._attn_implementation or "its own"
        # Flash attention is a reference for itself only: some kernels leave out sinks or windows without an error
        if user_attention is None or "flash" in user_attention:
            user_attention = own_attention(self.inner)
        self.user_attention = default_attention(self.inner) if user_attention == ATTENTION_NAME else user_attention
        self._is_unpacked = False
        self.degree = degree
        self.ranks = SequenceGroup(degree) if degree > 1 else LOCAL_RANK

    def states(self, batch: dict[str, Any], *, from_backbone: bool = False, model: Any = None) -> Tensor:
        """The last hidden states, (B, T, hidden), from a forward of the whole wrapped model, or of `model`.

        They are the output of the backbone, with the logits of one token only: all of them would be T x V. Of a model
        that computes all logits they are the input of the LM head, unless `from_backbone`.
        """
        caught: list[Tensor] = []
        below = below_head(self.inner)  # a repaired module may call a decoder more than once
        takes_few = "logits_to_keep" in inspect.signature(type(self.inner).forward).parameters
        head = self.inner.get_output_embeddings()
        hooks = ExitStack()
        # the head of a reward model is no LM head
        if head is None or (below and (from_backbone or takes_few)):
            # An index, not a number: given a number, layers that share keys (Gemma 4) compute the last tokens only
            batch |= {"logits_to_keep": torch.zeros(1, dtype=torch.int64, device=self.device)} if takes_few else {}
            for backbone in below or [self.inner]:
                hooks.enter_context(backbone.register_forward_hook(lambda module, args, out: caught.append(out[0])))
        else:
            hooks.enter_context(head.register_forward_pre_hook(lambda module, args: caught.append(args[0])))
        # Modules that draw even in eval mode draw the same in every run. Only on devices that `undisturbed` restores.
        torch.default_generator.manual_seed(0)
        if device_state(self.device) is not None:
            module = torch.get_device_module(self.device)
            with module.device(self.device) if hasattr(module, "device") else nullcontext():
                module.manual_seed(0)
        with hooks, model_errors_converted():
            (model or self.model)(**batch)
        if not caught:
            raise ValueError(
                f"The forward of this {type(self.inner).__name__} ran and did not call its LM head. The usual cause is "
                "a deep copy of a model that TRL has trained: its forward is that of the original and uses the "
                "original's weights. Run `del model.forward` on the copy (with PEFT, on the model inside) before "
                "passing it to a trainer."
            )
        states = caught[-1]  # the outermost call ends last
        return states if states.dim() == 3 else states.reshape(len(batch["input_ids"]), -1, states.shape[-1])

    def move_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {
            key: value.to(self.device) if isinstance(value, Tensor | Layout) else value for key, value in batch.items()
        }

    @contextmanager
    def as_given(self, length: int) -> Iterator[None]:
        """Within this context the model has the attention that it was given with.

        A document so long that the scores of `eager` would not fit runs on `sdpa`, or on the attention of packs, which
        in eval mode computes rows without boundaries as `sdpa` does.
        """
        current = own_attention(self.inner)
        name = self.user_attention
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

    @property
    def evaluated(self) -> nn.Module:
        """What has attention."""
        return self.inner

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within this context `evaluated` is in eval mode: in training `packfix_varlen` refuses a forward of a row."""
        training = [module for module in self.evaluated.modules() if module.training]
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True

    @contextmanager
    def unpacked(self, length: int) -> Iterator[None]:
        """Within this context rows of up to `length` tokens run as in unpacked training. Inside another, no effect."""
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

        The user's hooks on gradients are left out. On exit buffers, random state and modes are restored. Under FSDP2
        parameters are sharded again, which the root module otherwise does only after a backward pass; under ZeRO-3
        those of modules into which no gradient flows.
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
                empty_cache = getattr(self.model, "empty_partition_cache", None)
                if self.takes_gradient and empty_cache is not None:
                    empty_cache()
                with torch.no_grad():
                    for buffer, value in buffers:
                        if buffer.shape == value.shape:
                            buffer.copy_(value)

    def on_any_rank(self, condition: object) -> bool:
        """Whether the condition holds on this rank or, with an engine or a degree above 1, on any rank.

        There all ranks must run the same forwards. Without this, kernels that sum in a different order in each
        run may give ranks different roundings, and so different forwards to run.
        """
        return any(gather_values(condition)) if self.has_engine or self.degree > 1 else bool(condition)

    @contextmanager
    def embeddings(self) -> Iterator[list[Tensor]]:
        """Within this context gradients are computed; the list has the embeddings of the first forward, as a leaf."""
        embedded: list[Tensor] = []

        def catch(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            if embedded:
                return output
            embedded.append(output.detach().requires_grad_())
            return embedded[0].clone()  # some models modify the output of the embedding in place

        with self.inner.get_input_embeddings().register_forward_hook(catch), torch.enable_grad():
            yield embedded

    def embedding_gradients(
        self, batch: dict[str, Any], places: Sequence[Tensor], ranks: LocalRank = LOCAL_RANK
    ) -> list[Tensor] | None:
        """For each of `places`, rows of the pack, the gradient of their states with respect to all embeddings, (T, D).

        The states are summed with fixed random weights. `batch` is what this of the `ranks` has of the pack. None if
        the model does not support it.
        """
        if self.has_engine and not below_head(self.inner):
            return None  # ZeRO-3 refuses a backward pass that enters a module, such as the head, at its input
        found = []
        for together in ranks.forwards(places):
            with self.embeddings() as embedded:
                # DDP would wait for the gradients of parameters
                states = self.states(dict(batch), from_backbone=self.has_engine, model=self._below_ddp)[0]
                for rows in together:
                    generator = torch.Generator().manual_seed(len(rows))
                    drawn = torch.randn((len(rows), states.shape[1]), generator=generator)
                    weights = states.new_zeros(ranks.degree, *states.shape)
                    weights.flatten(0, 1)[rows] = drawn.to(states)
                    loss = (states * weights[ranks.index]).sum()
                    gradient = gradient_of(loss, embedded[0], retain_graph=rows is not together[-1])
                    if gradient is None:
                        return None
                    gradient = to_exact(gradient.reshape(-1, gradient.shape[-1]))
                    found.append(ranks.gradient(gradient, ranks.degree * len(states)))
        return found

    @contextmanager
    def rounded_otherwise(self, draw: int, *, by_channel: bool = False) -> Iterator[None]:
        """Within this context, every number in a module's output is changed by half an ulp, up or down at random.

        Other kernels, or the same kernel on other shapes, round differently; this is about the most they may differ.
        With `by_channel` numbers of one channel move alike, and so do those of the gradient of the output: tokens that
        are nearly equal round alike, so the gradient of a bias, their sum, moves by more than by chance.
        """
        generators: dict[torch.device, torch.Generator] = {}  # drawn on the host, an 8B model would need 20 seconds

        def moved(value: object, seed: int | None = None) -> object:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            device = value.device
            generator = generators.setdefault(device, torch.Generator(device))
            if seed is not None:
                generator.manual_seed(seed)
            shape = value.shape[-1:] if by_channel else value.shape
            signs = torch.randint(0, 2, shape, generator=generator, dtype=torch.int8, device=device) * 2 - 1
            wide = torch.float32 if value.element_size() < 4 or device.type == "mps" else torch.float64
            found = (value.to(wide) * (1 + signs * torch.finfo(value.dtype).eps / 2)).to(value.dtype)
            if by_channel and found.requires_grad:
                found.register_hook(moved)
            return found

        def move(seed: int, module: nn.Module, *call: Any) -> object:
            output = call[-1]
            return tuple(moved(each, seed) for each in output) if type(output) is tuple else moved(output, seed)

        head = self.inner.get_output_embeddings()
        leaves = [m for m in self.inner.modules() if m is not head and next(m.children(), None) is None]
        with ExitStack() as hooks:
            for i, module in enumerate(leaves):  # with a seed each: checkpointing computes a layer again, as it was
                hooks.enter_context(module.register_forward_hook(partial(move, draw * len(leaves) + i)))
            yield

    def limits_of_rounding(
        self,
        gaps: Sequence[float],
        limits: Sequence[float],
        moved: Callable[[], Sequence[float]],
        *,
        draws: Iterable[int] = range(NUM_DRAWS),
        by_channel: bool = False,
    ) -> list[float]:
        """The limits of these gaps, raised by what other roundings move, until they explain all or no draw is left.

        `move_batch` runs the same again, under another rounding, and returns how far each is from where it was.
        """
        draws = iter(draws)
        found = [*limits]
        while self.is_beyond(gaps, found) and (draw := next(draws, None)) is not None:
            with self.rounded_otherwise(draw, by_channel=by_channel):
                found = [
                    max(old, min(ROUNDING_FACTOR * new, MAX_NOISE)) for old, new in zip(found, moved(), strict=True)
                ]
        return found

    def is_beyond(self, gaps: Sequence[float], limits: Sequence[float]) -> bool:
        """Whether a gap is above its limit, or nan, on any rank (`on_any_rank`)."""
        return self.on_any_rank(not all(gap <= limit for gap, limit in zip(gaps, limits, strict=True)))


def gradient_of(loss: Tensor, leaf: Tensor, *, retain_graph: bool = False) -> Tensor | None:
    """The gradient of a loss; None if the model does not support it."""
    try:
        return torch.autograd.grad(loss, leaf, retain_graph=retain_graph)[0]
    except RuntimeError as error:
        if any(words in str(error) for words in NO_GRADIENT):
            return None
        raise_refusal(error)
        raise
    except AssertionError:  # reformer: no gradients while a layer that draws is in eval mode
        return None


def to_exact(value: Tensor) -> Tensor:
    """`value` in a dtype that represents differences of its numbers: fp64, or fp32 on MPS, which has no fp64."""
    return value.float() if value.device.type == "mps" else value.double()


def largest_distance(first: list[Tensor], second: list[Tensor]) -> float:
    """Largest difference of the documents' states; infinity if any is nan."""
    gaps = [(to_exact(one) - to_exact(other)).abs().max().item() for one, other in zip(first, second, strict=True)]
    return max((inf if gap != gap else gap for gap in gaps), default=0.0)


def gather_values(value: T) -> list[T]:
    """The values of all ranks; of this one alone without others."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def without_compile(model: nn.Module) -> nn.Module:
    """The model that was passed to `torch.compile`, or `model` itself."""
    return getattr(model, "_orig_mod", model)
