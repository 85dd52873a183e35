"""Hooks on a model that check the batch of a packed forward, and make its document boundaries known inside the model.

A packed batch is one row of several documents with their boundaries (`cu_seq_lens_q` and so on), made by a collator of
`data/`. Its forward runs like this:

    1. A pre-hook of `PackedForwardGuard` on the model checks the batch and enters a `PackedForward`.
    2. Attention and mixers inside the model read the boundaries from it (`packed_forward.py`). A layer under gradient
       checkpointing enters it again when it is recomputed in backward (`CarryingCheckpoint`).
    3. Towers, parts of the model that read something else than text, have hooks of their own (`tower_support.py`).
    4. A hook behind the model leaves the `PackedForward`.

Several guards may be on one model. The first that runs checks a batch, and the others enter its `PackedForward` again.

A *mixer* is a layer that mixes tokens without attention, such as Mamba's. A *repaired module* is a module that mixes
tokens of different documents, as a test of the model has found, and so runs on rows of one document each.
"""

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..compat import WRAPPER_CHECKPOINT, change_checkpoint_functions, run_hooks_inside_adapters
from ..layout import LAYOUT_KEY, Layout, layout_of
from .mixer_support import mixer_support
from .models import base_model, has_attention, text_config
from .packed_forward import (
    ATTENTION_NAME,
    BOUNDARIES,
    CACHE_NAMES,
    CU_SEQ_LENS,
    PACK_REMEDY,
    PackedForward,
    enter_packed_forward,
    leave_packed_forward,
    packed_forward_entered,
    running_forward,
    this_thread,
)
from .tower_support import tower_support

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of a module, by position and by name
MODULE_CALL = nn.Module.__call__.__code__  # the code that runs in each call of a module


def carry_boundaries(layers: list[nn.Module], carry: bool = True) -> None:
    """Make checkpointed layers recompute with the boundaries of their first forward; `carry=False` undoes it.

    The checkpoint function of a layer is set by transformers when gradient checkpointing is enabled, or by torch on a
    wrapper around the layer. Both may happen at any time, so a guard calls this function in every packed forward.
    """

    def change(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """Return the checkpoint function that replaces `checkpoint`, or `checkpoint` itself."""
        if isinstance(checkpoint, CarryingCheckpoint):
            return checkpoint if carry else checkpoint.checkpoint
        return CarryingCheckpoint(checkpoint) if carry else checkpoint

    change_checkpoint_functions(layers, change)


@dataclass(frozen=True)
class CarryingCheckpoint:
    """A checkpoint function whose recomputation runs in the packed forward in which the layer ran first."""

    checkpoint: Callable[..., Any]  # the function of transformers or torch, which this one calls

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        running = running_forward()
        if running is not None:
            function = partial(_call_in_packed_forward, running, function)
        return self.checkpoint(function, *args, **kwargs)


def _call_in_packed_forward(running: PackedForward, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` within the packed forward `running`."""
    with packed_forward_entered(running):
        return function(*args, **kwargs)


class ModelHooks(ABC):
    """Base of classes that add hooks to a model. `install()` adds the hooks, and `remove()` removes them.

    torch calls no hook behind a module that Ctrl-C has interrupted: `always_call` holds for an `Exception`, which
    `KeyboardInterrupt` is not. A notebook goes on after that. So hooks that begin something before a call and end it
    behind the call, also end it in `remove()`.

    Attributes:
        modules_given_packs: modules inside the model whose padded rows these hooks turn into packs. The model itself
            gets padded rows. For example, `pack_forward` gives packs to the backbone. () for most hooks.
    """

    modules_given_packs: Sequence[nn.Module] = ()

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    @abstractmethod
    def _register(self) -> list[RemovableHandle]:
        """Register the hooks and return their handles."""

    def install(self) -> None:
        """Add the hooks, which must not be installed already."""
        assert not self._handles
        self._handles = self._register()

    def remove(self) -> None:
        """Remove the hooks; they can be installed again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def is_called_inside_itself(module: nn.Module) -> bool:
    """Return, in a hook of a call of a module, whether an earlier call of it is still running in this thread.

    For example, a hook of the user's on a layer calls the whole model again.
    """
    num_calls = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        num_calls += frame.f_code is MODULE_CALL and frame.f_locals["self"] is module
        frame = frame.f_back
    return num_calls > 1


def mark_packed_forwards(model: nn.Module) -> "PackedForwardGuard":
    """Mark forwards of the model that get `cu_seq_lens_q` as packed, so that no (T, T) mask is built in them.

    From then on such a forward raises ValueError if it also gets a mask, a cache, several rows or contradicting
    boundaries.

    Returns:
        The installed hooks. Call `remove()` to end the marking.
    """
    run_hooks_inside_adapters(model)  # the wrapper of peft 0.20 would run none of the hooks on the model inside it
    guard = PackedForwardGuard(base_model(model))
    guard.install()
    return guard


class PackedForwardGuard(ModelHooks):
    """The hooks that check the packed forwards of a model, and make their boundaries known inside the model.

    Args:
        modules_given_packs: modules inside the model to which other hooks on the model give packs (`ModelHooks`). The
            guard has its hooks on these modules, too, because the model itself gets padded rows.
        before_pack: called at the beginning of each packed forward.

    Attributes:
        ignores_masks: whether attention ignores the masks that the model makes itself in packed forwards. This is set
            if a test of the model has found that they only repeat the boundaries.
        mixers: replaces, in packed forwards, the functions with which the model's mixers mix tokens by functions that
            start anew in each document (`ReplacedValues`).
        entered_forward: the running packed forward, if this guard has made it; else None.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        modules_given_packs: Sequence[nn.Module] = (),
        before_pack: Callable[[], None] | None = None,
    ):
        super().__init__()
        self.model = model
        self.modules_given_packs = modules_given_packs
        self.ignores_masks = False
        self.before_pack = before_pack
        # For each forward of the model that is running, its packed forward, or None; the innermost last
        self._forwards: list[PackedForward | None] = []
        self._layers: list[nn.Module] = []  # modules that may have a checkpoint function
        self._has_wrappers = False  # whether `_layers` has the wrappers that FSDP puts around layers
        # Name of the first layer in `_layers`; "", the model, if there is none. FSDP wraps all layers or none, so the
        # first one shows whether it has wrapped them
        self._first_layer_name = ""
        self.mixers = mixer_support().replaced_functions(model)
        self.entered_forward: PackedForward | None = None
        self._tower_hooks: list[ModelHooks] = tower_support().make_hooks(self)

    def _register(self) -> list[RemovableHandle]:
        # Each forward loops over `_layers`. So it holds only the modules that transformers can checkpoint: a model with
        # adapters has thousands of modules.
        self._layers = [module for module in self.model.modules() if hasattr(module, "gradient_checkpointing")]
        self._has_wrappers = False
        names = {module: name for name, module in self.model.named_modules()}
        layer_names = (names[layer] for layer in self._layers if not isinstance(layer, PreTrainedModel))
        self._first_layer_name = next(layer_names, "")
        handles = [
            module.register_forward_pre_hook(_pass_boundaries, with_kwargs=True)
            for module in _flash_attentions(self.model)
        ]
        for module in dict.fromkeys((self.model, *self.modules_given_packs)):  # the model may be one of these modules
            handles.append(module.register_forward_pre_hook(self._enter_forward, with_kwargs=True))
            # `always_call`, because after a forward that raises the next one must not be marked as packed
            handles.append(module.register_forward_hook(self._leave_forward, always_call=True))
        for hooks in self._tower_hooks:
            hooks.install()
        return handles

    def remove(self) -> None:
        super().remove()
        self._leave_interrupted()
        for hooks in self._tower_hooks:
            hooks.remove()
        carry_boundaries(self._layers, False)

    def _enter_forward(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        """Check the batch and enter its packed forward, if it is packed; return the arguments of the model."""
        # An earlier forward that has not ended was interrupted, unless this one is called inside of it.
        if model is self.model and self._forwards and not is_called_inside_itself(model):
            self._leave_interrupted()
        self._forwards.append(None)  # before the checks: if they raise, torch calls `_leave_forward`, too
        layout = layout_of(kwargs)  # which document each token belongs to; models do not take it
        kwargs = {name: value for name, value in kwargs.items() if name != LAYOUT_KEY}
        if layout.is_packed:
            self._find_wrappers()
            carry_boundaries(self._layers)
            running = running_forward()
            # Another guard on this model may have entered the forward of this batch already. It is then the forward
            # with the very tensor of boundaries that the batch has.
            if running is None or running.cu_seq_lens_q is not kwargs.get("cu_seq_lens_q"):
                if self.before_pack is not None:
                    self.before_pack()
                running = _check_packed_batch(model, args, kwargs, layout=layout)
                # `enter_packed_forward` replaces the functions in `mixers`.
                running = replace(running, ignores_masks=self.ignores_masks, mixers=self.mixers)
                self.entered_forward = running
            enter_packed_forward(running)
            self._forwards[-1] = running
            if running.kv_index is not None:
                # Documents share prefixes, so keys have an index. For example, documents P C and P D with the prefix P
                # are P C D in the batch, with boundaries around P C and around D. A module inside the model would take
                # D alone for a document. So all boundaries (`CU_SEQ_LENS` and "seq_idx") are left out of the arguments,
                # and only attention reads them, from the running forward (`varlen.py`).
                kwargs = {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
        return args, kwargs

    def _find_wrappers(self) -> None:
        """Add the modules that FSDP has put around layers, after the guard was installed, to the layers."""
        if self._has_wrappers:
            return
        first_layer = self.model.get_submodule(self._first_layer_name)
        # The wrapper holds its checkpoint function in the attribute `WRAPPER_CHECKPOINT`.
        if any(WRAPPER_CHECKPOINT in vars(module) for module in first_layer.modules()):
            self._layers += [module for module in self.model.modules() if WRAPPER_CHECKPOINT in vars(module)]
            self._has_wrappers = True

    def _leave_forward(self, model: PreTrainedModel, args: tuple[Any, ...], output: object) -> None:
        """Leave the packed forward that `_enter_forward` entered, if any."""
        # torch calls this hook even if a hook before `_enter_forward` has raised. Then the list may be empty.
        running = self._forwards.pop() if self._forwards else None
        if running is not None:
            leave_packed_forward(running)
            self.entered_forward = None

    def _leave_interrupted(self) -> None:
        """Leave the packed forwards of this thread that were interrupted."""
        for running in self._forwards[::-1]:
            if running is not None and running in this_thread.packed_forwards:
                leave_packed_forward(running)
                self._forwards.remove(running)


def _flash_attentions(model: PreTrainedModel) -> list[nn.Module]:
    """Return the causal attention modules that pass further arguments on to a flash attention of transformers.

    The list is empty if the model has another attention implementation.
    """
    text = text_config(model)
    if "flash" not in (text._attn_implementation or ""):
        return []
    return [
        module
        for module in model.modules()
        if getattr(module, "is_causal", False)
        and getattr(module, "config", text) is text  # some vision towers have `is_causal=True`
        and inspect.getfullargspec(module.forward).varkw is not None
    ]


def _pass_boundaries(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments | None:
    """Add the boundaries to the arguments of an attention module whose layer passes none, as the layers of stablelm.

    Without them transformers would derive boundaries from `position_ids`, and the host would wait for the device.
    """
    running = running_forward()
    # In a repaired module each row is one document, so its attention needs no boundaries.
    if running is None or running.in_repaired_module or kwargs.get("cu_seq_lens_q") is not None:
        return None
    return args, kwargs | {name: getattr(running, name) for name in CU_SEQ_LENS}


def _check_packed_batch(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], *, layout: Layout
) -> PackedForward:
    """Check the arguments of the model for a packed batch, and return the `PackedForward` of the batch.

    Raises:
        ValueError: boundaries are missing or contradict each other, or there is a mask, a cache or several rows, or
            the model's attention does not support shared prefixes.
    """
    missing = [name for name in CU_SEQ_LENS if kwargs.get(name) is None]
    if missing:
        raise ValueError(
            f"a packed batch came with cu_seq_lens_q but without {', '.join(missing)}: flash kernels need all four, "
            "and transformers ignores incomplete boundaries. Use PackedDataCollator, which sets all of them."
        )
    num_documents = len(kwargs["cu_seq_lens_q"]) - 1
    # `attention_fields`: the ranks that share the pack, the planned launches of the flash kernel (`Layout.launches`),
    # and with shared prefixes the rows of the keys
    running = PackedForward(*(kwargs[name] for name in CU_SEQ_LENS), **layout.attention_fields())
    attention = text_config(model)._attn_implementation
    if layout.shares_rows and attention != ATTENTION_NAME and has_attention(model):
        raise ValueError(
            f"a packed batch whose {layout.document_count} documents share prefixes came to "
            f"attn_implementation={attention!r}: only "
            f"{ATTENTION_NAME} finds the keys that a document shares, and other attention would read keys of other "
            f"documents. Set attn_implementation='sdpa', which packing replaces with {ATTENTION_NAME}, or "
            "share_prefixes='off'."
        )
    for name in ("attention_mask", *CACHE_NAMES):
        value = kwargs.get(name)
        if value is not None:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise ValueError(
                f"a packed batch of {num_documents} documents came with {name}{shape}: transformers "
                f"would use it instead of the boundaries, and documents would see each other. {PACK_REMEDY}"
            )
    source = "use_cache=True"
    use_cache = kwargs.get("use_cache")
    if use_cache is None:
        source = "the config's use_cache=True"
        use_cache = getattr(text_config(model), "use_cache", False)
    if use_cache:
        raise ValueError(
            f"a packed batch of {num_documents} documents came with {source}: with a cache "
            "transformers ignores boundaries, and documents would see each other. Set use_cache=False in the batch."
        )
    tokens = kwargs.get("input_ids", args[0] if args else None)
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    if tokens is not None and tokens.shape[0] != 1:
        raise ValueError(
            f"a packed batch came with {tokens.shape[0]} rows: the boundaries describe one row, and which one is "
            f"unknown. {PACK_REMEDY}"
        )
    # The boundaries are compared on the CPU only. On a GPU the host would wait for the comparison. With shared prefixes
    # (`kv_index`) those of queries and keys differ.
    cu_q = running.cu_seq_lens_q
    cu_k = running.cu_seq_lens_k
    if running.kv_index is None and cu_q.device.type == "cpu" and cu_q is not cu_k and not torch.equal(cu_q, cu_k):
        raise ValueError(
            f"cu_seq_lens_q {cu_q.tolist()[:5]} and cu_seq_lens_k {cu_k.tolist()[:5]} (first five) differ: in a pack "
            "the queries and keys of a document are the same tokens. Pass the same tensor for both."
        )
    return running
