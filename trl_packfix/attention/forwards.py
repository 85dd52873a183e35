"""The packed forward that is running: its document boundaries, and the hooks that record and check them.

Many models do not pass boundaries on to the modules that need them. So a guard on the model records them while the
forward runs. Checkpointed layers get them again when they are recomputed in backward.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..compat import run_hooks_inside_adapters
from ..layout import LAYOUT, Layout, layout_of
from .decoder_inputs import cut_to_part
from .exchange import group_of
from .mixer_states import SendsStates
from .mixers import MixerNames
from .models import backbone, base_model, has_attention, text_config, towers
from .rows import DocumentRows, Group
from .runs import SharedRuns
from .tower_division import TowerDivision, divide, outermost

# The attention implementation that reads boundaries (`varlen.py`). The name must not contain "flash", "sdpa" or
# "flex_attention": transformers runs other code for such names.
ATTENTION_NAME = "packfix_varlen"
# The entries of a packed batch that hold boundaries, except position_ids
CU_SEQ_LENS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
BOUNDARIES = (*CU_SEQ_LENS, "seq_idx")
OF_WRAPPER = "checkpoint_fn"  # of torch's `CheckpointWrapper`, which FSDP puts around modules

FEED_A_PACK = (
    "Feed one packed row (1, T) with cu_seq_lens_q/k, max_length_q/k, use_cache=False and no attention_mask; for "
    "anything else call model.eval(), or set model.set_attn_implementation('sdpa')."
)


def bounds_on_host(cu_seq_lens: Tensor) -> list[int]:
    """Boundaries as a list, without the empty documents at the end, which only pad them to a constant number."""
    bounds = cu_seq_lens.tolist()
    while len(bounds) > 2 and bounds[-2] == bounds[-1]:
        bounds.pop()
    return bounds


@dataclass(frozen=True)
class PackedForward:
    """Boundaries of a packed forward that is running.

    Attributes:
        rows: inside a repaired module the number of rows of a batch, one document each, right-padded to
            `max_length_q`. `cu_seq_lens_q` then holds the boundaries of these rows laid end to end. Else None.
        ignores_masks: whether masks that the model makes itself are ignored, because they contain nothing but the
            boundaries. The leak probe confirms this.
        degree: s, how many ranks share the pack. With s > 1 the boundaries are those of the whole pack, and this rank
            holds a part of its tokens.
        index: which of these ranks this one is, 0 to s - 1.
        part_tokens: tokens of each part; None with degree 1.
        kv_index: if documents share prefixes, the rows that are the keys of each run (`data/prefix_collator.py`),
            int64, shape (cu_seq_lens_k[-1],). `cu_seq_lens_q` then holds the boundaries of runs. Else None.
        run_lengths: rows and keys of each run on the host, (runs, 2), or None.
        launches: what one launch of a flash kernel computes, as (first document, last + 1, first token, last + 1,
            longest), on the host; () for one launch of all documents.
        mixers: the functions of mixers that are replaced during this forward, or None.
        sends_states: see `PackedForwardGuard`.
        derived: what modules derive from the boundaries once per pack.
    """

    cu_seq_lens_q: Tensor
    cu_seq_lens_k: Tensor
    max_length_q: int
    max_length_k: int
    rows: int | None = None
    ignores_masks: bool = False
    degree: int = 1
    index: int = 0
    part_tokens: int | None = None
    kv_index: Tensor | None = None
    run_lengths: Tensor | None = None
    launches: tuple[tuple[int, int, int, int, int], ...] = ()
    mixers: MixerNames | None = field(default=None, repr=False, compare=False)
    sends_states: SendsStates | None = field(default=None, repr=False, compare=False)
    derived: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    _batches: dict[float, "DocumentBatches"] = field(default_factory=dict, repr=False, compare=False)

    @property
    def shared(self) -> SharedRuns | None:
        """The runs of documents that share prefixes; None if none do."""
        if self.kv_index is None:
            return None
        bounds, longest = (self.cu_seq_lens_q, self.cu_seq_lens_k), (self.max_length_q, self.max_length_k)
        return SharedRuns(bounds, longest, self.kv_index, self.run_lengths, self.derived)

    @property
    def slices(self) -> list[tuple[slice, Tensor, int]]:
        """Tokens, boundaries and longest document of each launch, derived once per pack without a read on the host."""
        if "slices" not in self.derived:
            self.derived["slices"] = [
                (slice(start, stop), self.cu_seq_lens_q[first : last + 1] - start, longest)
                for first, last, start, stop, longest in self.launches
            ]
        return self.derived["slices"]

    @cached_property
    def bounds(self) -> list[int]:
        """`cu_seq_lens_q` on the host, see `bounds_on_host`. The first use waits for the device."""
        return bounds_on_host(self.cu_seq_lens_q)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document, on the host, without the empty ones that pad."""
        return [stop - start for start, stop in pairwise(self.bounds)]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def document_rows(self, budget: float) -> DocumentRows:
        """The rows of documents in batches of at most `budget` padded tokens, cached per pack."""
        name = ("rows", undivided(budget))
        if name not in self.derived:
            self.derived[name] = DocumentRows(self.lengths, self.cu_seq_lens_q.device, name[1])
        return self.derived[name]

    def documents(self, budget: float) -> "DocumentBatches":
        """The documents in batches of at most `budget` padded tokens (see `rows.DocumentRows`), cached per pack.

        Raises ValueError if this rank holds only a part of the pack, or if documents share prefixes.
        """
        if self.kv_index is not None:
            raise ValueError(
                f"a repaired module got a pack of {len(self.lengths)} runs whose documents share prefixes: it runs on "
                'whole documents, and a run is the end of one. Set share_prefixes="off".'
            )
        if self.degree > 1:
            raise ValueError(
                f"a repaired module got a part of a pack that {self.degree} ranks share: it runs on whole documents, "
                "and some of their tokens are on other ranks. Set tokens_per_rank=None."
            )
        budget = undivided(budget)
        if budget not in self._batches:
            device = self.cu_seq_lens_q.device
            rows = self.document_rows(budget)
            batches = []
            for group in rows.groups:
                bounds = torch.arange(group.num_rows + 1, dtype=torch.int32, device=device) * group.longest
                running = PackedForward(bounds, bounds, group.longest, group.longest, rows=group.num_rows)
                batches.append(DocumentBatch(group, running))
            self._batches[budget] = DocumentBatches(rows, batches)
        return self._batches[budget]


@dataclass(frozen=True)
class DocumentBatch:
    """Documents that a repaired module computes in one call, and the packed forward that is running during it."""

    group: Group
    forward: PackedForward


@dataclass(frozen=True)
class DocumentBatches:
    """All documents of a pack, in the batches that a repaired module computes."""

    rows: DocumentRows
    batches: list[DocumentBatch]


_undivided: list[bool] = []


@contextmanager
def all_in_one_batch() -> Iterator[None]:
    """Within this context, all documents that may share a padded batch share one, whatever its size.

    The leak probe uses it: training may bring documents of any two lengths together in a batch.
    """
    _undivided.append(True)
    try:
        yield
    finally:
        _undivided.pop()


def undivided(budget: float) -> float:
    """The budget of a padded batch, unlimited within `all_in_one_batch`. 0, one document per batch, stays 0."""
    return inf if budget and _undivided else budget


# The packed forwards that are running, the innermost last.
packed_forwards: list[PackedForward] = []


def running_pack() -> PackedForward | None:
    """The packed forward whose documents a module must separate; None outside of packs and in repaired modules."""
    running = packed_forwards[-1] if packed_forwards else None
    return None if running is None or running.rows is not None else running


def enter(running: PackedForward) -> None:
    """Make `running` the packed forward from which modules read their boundaries, until `leave`."""
    packed_forwards.append(running)
    if running.mixers is not None:
        running.mixers.enter()


def leave() -> None:
    running = packed_forwards.pop()
    if running.mixers is not None:
        running.mixers.leave()


@contextmanager
def entered(running: PackedForward) -> Iterator[None]:
    """Within this context, `running` is the packed forward from which modules read their boundaries."""
    enter(running)
    try:
        yield
    finally:
        leave()


def in_backward() -> bool:
    """Whether a backward pass is running, so that a forward is a recomputation of a checkpointed layer."""
    return torch._C._current_graph_task_id() != -1


def carry_boundaries(layers: list[nn.Module], carry: bool = True) -> None:
    """Make checkpointed layers recompute with the boundaries of their first run; `carry=False` undoes it.

    transformers sets the checkpoint function of each layer when gradient checkpointing is enabled, and torch that of
    the module around a layer. That may happen at any time, so a guard calls this in every packed forward.
    """
    for layer in layers:
        for name in ("_gradient_checkpointing_func", OF_WRAPPER):
            checkpoint = vars(layer).get(name)
            if checkpoint is not None and isinstance(checkpoint, CarryingCheckpoint) is not carry:
                vars(layer)[name] = CarryingCheckpoint(checkpoint) if carry else checkpoint.checkpoint


class CarryingCheckpoint:
    """A checkpoint function whose recomputation runs in the packed forward of the first run."""

    def __init__(self, checkpoint: Callable[..., Any]):
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if packed_forwards:
            function = _InForward(function, packed_forwards[-1])
        return self.checkpoint(function, *args, **kwargs)


class _InForward:
    def __init__(self, function: Callable[..., Any], running: PackedForward):
        self.function, self.running = function, running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with entered(self.running):
            return self.function(*args, **kwargs)


class ModelHooks(ABC):
    """Base of classes that add hooks to a model: `install()` adds them, `remove()` removes them, in turns.

    Attributes:
        fed: modules to which the hooks give packs in forwards of the model that are not packed.
    """

    fed: Sequence[nn.Module] = ()

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

    A packed forward raises ValueError if it also gets an `attention_mask`, `past_key_values` or `use_cache=True` (the
    config's default if none is given), more than one row, or boundaries that contradict each other. This works with
    every attention implementation. Call `remove()` on the result to end it.
    """
    run_hooks_inside_adapters(model)
    guard = PackedForwardGuard(base_model(model))
    guard.install()
    return guard


class PackedForwardGuard(ModelHooks):
    """The pair of hooks behind `mark_packed_forwards`.

    Args:
        fed: more modules that get packs, see `ModelHooks`.

    Attributes:
        ignores_masks: see `PackedForward`.
        mixers: the functions of the model's mixers that are replaced while packs run.
        sends_states: where ranks share a pack, whether scans send states in place of tokens. None: never.
    """

    def __init__(self, model: PreTrainedModel, fed: Sequence[nn.Module] = ()):
        super().__init__()
        self.model, self.fed = model, fed
        self.ignores_masks = False
        self.sends_states: SendsStates | None = None
        self._entered: list[bool] = []  # per running forward of this model: whether it was packed
        self._layers: list[nn.Module] = []
        self._has_wrappers = False
        self.mixers = MixerNames(model, running_pack)
        self._recorded: PackedForward | None = None  # the running forward, if no other guard recorded it
        self._divisions: list[TowerDivision | None] = []  # per running call of a tower

    def _register(self) -> list[RemovableHandle]:
        # Only layers that transformers can checkpoint: each forward loops over them, and adapters have 1000s of modules
        self._layers = [module for module in self.model.modules() if hasattr(module, "gradient_checkpointing")]
        self._has_wrappers = False
        self._first = next(
            (
                (parent, name)
                for parent in self.model.modules()
                for name, module in parent.named_children()
                if module in self._layers and not isinstance(module, PreTrainedModel)
            ),
            None,
        )
        takers = (self.model, *self.fed)
        reads_images = towers(self.model)
        return [
            *(module.register_forward_pre_hook(self._enter, with_kwargs=True) for module in takers),
            # always_call: after a forward that raises, the next one must not be marked as packed
            *(module.register_forward_hook(self._leave, always_call=True) for module in takers),
            *(
                module.register_forward_pre_hook(_give_boundaries, with_kwargs=True)
                for module in _flash_attentions(self.model)
            ),
            *(module.register_forward_pre_hook(_take_boundaries, with_kwargs=True) for module in reads_images),
            *(
                handle
                for module in outermost(reads_images)
                for handle in (
                    module.register_forward_pre_hook(self._divide, with_kwargs=True),
                    module.register_forward_hook(self._join, always_call=True),
                )
            ),
            *([backbone(self.model).register_forward_pre_hook(_take_part, with_kwargs=True)] if reads_images else []),
        ]

    def remove(self) -> None:
        super().remove()
        carry_boundaries(self._layers, False)

    def _enter(
        self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        layout = layout_of(kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name != LAYOUT}
        if layout.is_packed:
            self._find_wrappers()
            carry_boundaries(self._layers)
            running = packed_forwards[-1] if packed_forwards else None
            if running is None or running.cu_seq_lens_q is not kwargs.get("cu_seq_lens_q"):
                # no other guard recorded it
                running = _check_packed_batch(model, args, kwargs, layout=layout)
                running = replace(
                    running, ignores_masks=self.ignores_masks, mixers=self.mixers, sends_states=self.sends_states
                )
                self._recorded = running
            enter(running)
            if running.kv_index is not None:
                # A module would take the boundaries of runs for those of documents; our attention reads `running`
                kwargs = {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
        self._entered.append(layout.is_packed)
        return args, kwargs

    def _find_wrappers(self) -> None:
        """Add modules that FSDP has put around layers. It does so after the guard is installed: the first shows it."""
        if self._has_wrappers:
            return
        place = self.model if self._first is None else self._first[0].get_submodule(self._first[1])
        if any(OF_WRAPPER in vars(module) for module in place.modules()):
            self._layers += [module for module in self.model.modules() if OF_WRAPPER in vars(module)]
            self._has_wrappers = True

    def _divide(
        self, tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Leave a tower the share of this rank, if ranks share the pack."""
        running = packed_forwards[-1] if packed_forwards else None
        division = None
        # Another guard on this model has the same hooks
        if running is not None and running is self._recorded and running.degree > 1:
            args, kwargs, division = divide(args, kwargs, running.degree, index=running.index)
        self._divisions.append(division)
        return args, kwargs

    def _join(self, tower: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        division = self._divisions.pop() if self._divisions else None
        if division is None or output is None:  # None after a forward that raised
            return output
        return division.exchanged(output, group_of(len(division.rows)))

    def _leave(self, model: PreTrainedModel, args: tuple[Any, ...], output: Any) -> None:
        # empty if the pre-hook raised: torch calls this hook even then
        if self._entered and self._entered.pop():
            leave()
            self._recorded = None


def _flash_attentions(model: PreTrainedModel) -> list[nn.Module]:
    """Causal attention modules on transformers' flash attention that pass on the arguments that they do not know.

    Only those of the text part: some vision towers say that they are causal, and the boundaries are not theirs.
    """
    text = text_config(model)
    if "flash" not in (text._attn_implementation or ""):
        return []
    return [
        module
        for module in model.modules()
        if getattr(module, "is_causal", False)
        and getattr(module, "config", text) is text
        and inspect.getfullargspec(module.forward).varkw is not None
    ]


def _take_boundaries(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Remove the boundaries of the text from the arguments of a tower, to which transformers 5.16 passes them on.

    Its flash attention has boundaries of its own under the same names.
    """
    return args, {name: value for name, value in kwargs.items() if name not in BOUNDARIES}


def _take_part(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Leave the rows of this rank of what enters the decoder, if ranks share the pack."""
    running = packed_forwards[-1] if packed_forwards else None
    if running is None or running.part_tokens is None:
        return None
    inputs = {name: value for name, value in kwargs.items() if name not in CU_SEQ_LENS}
    return args, kwargs | cut_to_part(inputs, running.part_tokens, running.index)


def _give_boundaries(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Pass the boundaries to an attention that its layer gives none (stablelm, nemotron).

    transformers would find them in the positions, and the host would wait for the device in every layer.
    """
    running = packed_forwards[-1] if packed_forwards else None
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
    for name in ("attention_mask", "past_key_values"):
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
    cu_q, cu_k = running.cu_seq_lens_q, running.cu_seq_lens_k
    if running.kv_index is None and cu_q.device.type == "cpu" and cu_q is not cu_k and not torch.equal(cu_q, cu_k):
        raise ValueError(
            f"cu_seq_lens_q {cu_q.tolist()[:5]} and cu_seq_lens_k {cu_k.tolist()[:5]} (first five) differ: in a pack "
            "the queries and keys of a document are the same tokens. Pass the same tensor for both."
        )
    return running
