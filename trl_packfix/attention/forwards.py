"""Hooks on a model that record and check the document boundaries of its packed forwards, for the modules inside.

Checkpointed layers get the boundaries again when they are recomputed in backward.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..compat import WRAPPER_CHECKPOINT, change_checkpoint_functions, run_hooks_inside_adapters
from ..layout import LAYOUT_KEY, Layout, layout_of
from .exchange import group_of
from .image_parts import TowerDivision, cut_to_part, divide_tower_inputs, outermost_towers
from .mixers import mixer_functions
from .models import backbone, base_model, has_attention, text_config, towers
from .packed_forward import (
    ATTENTION_NAME,
    BOUNDARIES,
    CACHE_NAMES,
    CU_SEQ_LENS,
    FEED_A_PACK,
    PackedForward,
    enter_packed_forward,
    leave_packed_forward,
    packed_forward_entered,
    running_forward,
)

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of a module, by position and by name


def carry_boundaries(layers: list[nn.Module], carry: bool = True) -> None:
    """Make checkpointed layers recompute with the boundaries of their first run; `carry=False` undoes it.

    transformers sets the checkpoint function of each layer when gradient checkpointing is enabled, and torch that of
    the module around a layer. That may happen at any time, so a guard calls this in every packed forward.
    """

    def change(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(checkpoint, CarryingCheckpoint):
            return checkpoint if carry else checkpoint.checkpoint
        return CarryingCheckpoint(checkpoint) if carry else checkpoint

    change_checkpoint_functions(layers, change)


@dataclass(frozen=True)
class CarryingCheckpoint:
    """A checkpoint function whose recomputation runs in the packed forward of the first run."""

    checkpoint: Callable[..., Any]

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        running = running_forward()
        return self.checkpoint(
            function if running is None else partial(_in_forward, running, function), *args, **kwargs
        )


def _in_forward(running: PackedForward, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with packed_forward_entered(running):
        return function(*args, **kwargs)


class ModelHooks(ABC):
    """Base of classes that add hooks to a model: `install()` adds them, `remove()` removes them, in turns."""

    fed: Sequence[nn.Module] = ()  # to which the hooks give packs in forwards of the model that are not packed

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    @abstractmethod
    def _register(self) -> list[RemovableHandle]: ...

    def install(self) -> None:
        assert not self._handles
        self._handles = self._register()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def mark_packed_forwards(model: nn.Module) -> "PackedForwardGuard":
    """Mark forwards of the model that get `cu_seq_lens_q` as packed: no (T, T) mask is built in them.

    A packed forward raises ValueError if it also gets a mask, a cache, several rows or contradicting boundaries. Call
    `remove()` on the result to end it.
    """
    run_hooks_inside_adapters(model)
    guard = PackedForwardGuard(base_model(model))
    guard.install()
    return guard


class PackedForwardGuard(ModelHooks):
    """The hooks behind `mark_packed_forwards`."""

    def __init__(self, model: PreTrainedModel, fed: Sequence[nn.Module] = ()):
        super().__init__()
        self.model = model
        self.fed = fed
        self.ignores_masks = False
        self.before_pack: Callable[[], None] | None = None  # called at the beginning of each packed forward
        self._entered: list[bool] = []  # per running forward of this model: whether it was packed
        self._layers: list[nn.Module] = []
        self.mixers = mixer_functions(model)
        self._recorded: PackedForward | None = None  # the running forward, if no other guard recorded it
        self._divisions: list[TowerDivision | None] = []  # per running call of a tower

    def _register(self) -> list[RemovableHandle]:
        # Only layers that transformers can checkpoint: each forward loops over them, and adapters have 1000s of modules
        self._layers = [module for module in self.model.modules() if hasattr(module, "gradient_checkpointing")]
        self._has_wrappers = False
        names = {module: name for name, module in self.model.named_modules()}
        self._first = next((names[each] for each in self._layers if not isinstance(each, PreTrainedModel)), "")
        takers = [self.model, *self.fed]
        reads_images = towers(self.model)
        before: list[tuple[list[nn.Module], Any]] = [
            (takers, self._enter_forward),
            (_flash_attentions(self.model), _give_boundaries),
            (reads_images, _take_boundaries),
            (outermost_towers(reads_images), self._divide_tower_inputs),
            ([backbone(self.model)] if reads_images else [], _take_part),
        ]
        after: list[tuple[list[nn.Module], Any]] = [
            (takers, self._leave_forward),
            (outermost_towers(reads_images), self._join_tower_outputs),
        ]
        return [
            *(each.register_forward_pre_hook(hook, with_kwargs=True) for modules, hook in before for each in modules),
            # always_call: after a forward that raises, the next one must not be marked as packed
            *(each.register_forward_hook(hook, always_call=True) for modules, hook in after for each in modules),
        ]

    def remove(self) -> None:
        super().remove()
        carry_boundaries(self._layers, False)

    def _enter_forward(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        layout = layout_of(kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name != LAYOUT_KEY}
        if layout.is_packed:
            self._find_wrappers()
            carry_boundaries(self._layers)
            running = running_forward()
            if running is None or running.cu_seq_lens_q is not kwargs.get("cu_seq_lens_q"):
                # no other guard recorded it
                if self.before_pack is not None:
                    self.before_pack()
                running = _check_packed_batch(model, args, kwargs, layout=layout)
                running = replace(running, ignores_masks=self.ignores_masks, mixers=self.mixers)
                self._recorded = running
            enter_packed_forward(running)
            if running.kv_index is not None:
                # A module would take the boundaries of runs for those of documents; our attention reads `running`
                kwargs = {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
        self._entered.append(layout.is_packed)
        return args, kwargs

    def _find_wrappers(self) -> None:
        """Add modules that FSDP has put around layers. It does so after the guard is installed: the first shows it."""
        if self._has_wrappers:
            return
        if any(WRAPPER_CHECKPOINT in vars(module) for module in self.model.get_submodule(self._first).modules()):
            self._layers += [module for module in self.model.modules() if WRAPPER_CHECKPOINT in vars(module)]
            self._has_wrappers = True

    def _divide_tower_inputs(self, tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        """Leave a tower the share of this rank, if ranks share the pack."""
        running = running_forward()
        division = None
        # Another guard on this model has the same hooks
        if running is not None and running is self._recorded and running.degree > 1:
            args, kwargs, division = divide_tower_inputs(args, kwargs, running.degree, index=running.index)
        self._divisions.append(division)
        return args, kwargs

    def _join_tower_outputs(self, tower: nn.Module, args: tuple[Any, ...], output: object) -> object:
        division = self._divisions.pop() if self._divisions else None
        if division is None or output is None:  # None after a forward that raised
            return output
        return division.exchanged(output, group_of(len(division.rows)))

    def _leave_forward(self, model: PreTrainedModel, args: tuple[Any, ...], output: object) -> None:
        # empty if the pre-hook raised: torch calls this hook even then
        if self._entered and self._entered.pop():
            leave_packed_forward()
            self._recorded = None


def _flash_attentions(model: PreTrainedModel) -> list[nn.Module]:
    """Causal attention modules on transformers' flash attention that pass on the arguments that they do not know."""
    text = text_config(model)
    if "flash" not in (text._attn_implementation or ""):
        return []
    return [
        module
        for module in model.modules()
        if getattr(module, "is_causal", False)
        and getattr(module, "config", text) is text  # some vision towers say that they are causal
        and inspect.getfullargspec(module.forward).varkw is not None
    ]


def _take_boundaries(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
    """Remove the boundaries of the text from the arguments of a tower, whose own have the same names."""
    return args, {name: value for name, value in kwargs.items() if name not in BOUNDARIES}


def _take_part(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments | None:
    """Leave the rows of this rank of what enters the decoder, if ranks share the pack."""
    running = running_forward()
    if running is None or running.degree == 1:
        return None
    inputs = {name: value for name, value in kwargs.items() if name not in CU_SEQ_LENS}
    return args, kwargs | cut_to_part(inputs, running.part_tokens, running.index)


def _give_boundaries(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments | None:
    """Pass the boundaries to an attention that its layer gives none (stablelm), so that the host need not wait."""
    running = running_forward()
    if running is None or running.rows is not None or kwargs.get("cu_seq_lens_q") is not None:
        return None
    return args, kwargs | {name: getattr(running, name) for name in CU_SEQ_LENS}


def _check_packed_batch(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], *, layout: Layout
) -> PackedForward:
    missing = [name for name in CU_SEQ_LENS if kwargs.get(name) is None]
    if missing:
        raise ValueError(
            f"a packed batch came with cu_seq_lens_q but without {', '.join(missing)}: flash kernels need all four, "
            "and transformers ignores incomplete boundaries. Use PackedDataCollator, which sets all of them."
        )
    running = PackedForward(*(kwargs[name] for name in CU_SEQ_LENS), **layout.attention())
    name = text_config(model)._attn_implementation
    if layout.shares_rows and name != ATTENTION_NAME and has_attention(model):
        raise ValueError(
            f"a packed batch whose {layout.count} documents share prefixes came to attn_implementation={name!r}: only "
            f"{ATTENTION_NAME} finds the keys that a document shares, and other attention would read keys of other "
            f"documents. Set attn_implementation='sdpa', which packing replaces with {ATTENTION_NAME}, or "
            "share_prefixes='off'."
        )
    for name in ("attention_mask", *CACHE_NAMES):
        if (value := kwargs.get(name)) is not None:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise ValueError(
                f"a packed batch of {len(running.cu_seq_lens_q) - 1} documents came with {name}{shape}: transformers "
                f"would use it instead of the boundaries, and documents would see each other. {FEED_A_PACK}"
            )
    use_cache = kwargs.get("use_cache")
    if getattr(text_config(model), "use_cache", False) if use_cache is None else use_cache:
        source = "the config's use_cache=True" if use_cache is None else "use_cache=True"
        raise ValueError(
            f"a packed batch of {len(running.cu_seq_lens_q) - 1} documents came with {source}: with a cache "
            "transformers ignores boundaries, and documents would see each other. Set use_cache=False in the batch."
        )
    tokens = kwargs.get("input_ids", args[0] if args else None)
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    if tokens is not None and tokens.shape[0] != 1:
        raise ValueError(
            f"a packed batch came with {tokens.shape[0]} rows: the boundaries describe one row, and which one is "
            f"unknown. {FEED_A_PACK}"
        )
    # On the CPU only: on a GPU the host would wait for the comparison.
    cu_q = running.cu_seq_lens_q
    cu_k = running.cu_seq_lens_k
    if running.kv_index is None and cu_q.device.type == "cpu" and cu_q is not cu_k and not torch.equal(cu_q, cu_k):
        raise ValueError(
            f"cu_seq_lens_q {cu_q.tolist()[:5]} and cu_seq_lens_k {cu_k.tolist()[:5]} (first five) differ: in a pack "
            "the queries and keys of a document are the same tokens. Pass the same tensor for both."
        )
    return running
