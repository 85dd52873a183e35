"""Run the rows of padded batches as documents of one pack, below the head of a model, in forwards on padded rows.

The reverse of `unpacking.py`. What the head, the loss and the caller see is the padded batch: each state is where it
was, and zero at padding. A beginning that rows share is computed once.

    input_ids   A B C D .     attention_mask 1 1 1 1 0     cells 0 1 2 3
                A B C E F                    1 1 1 1 1           5 6 7 8 9

    the pack    A B C D | C E F     rows 0 1 2 3, 0 1 4 5 6: the row of the pack that holds each of these tokens

B rows of S tokens, padding included; N tokens without it; T rows of the pack.

The model keeps its own attention. That of packs is set while such a pack runs, forward and backward, because a
checkpointed layer looks its attention up again when it is recomputed.
"""

import inspect
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Variable
from transformers import PreTrainedModel

from ..attention.choice import own_attention, set_attention
from ..attention.kernel_errors import KernelError
from ..attention.models import base_model, below_head, text_config
from ..attention.packed_forward import CACHE_NAMES
from ..data.prefix_collator import PrefixCollator
from ..layout import Layout
from .isolation_report import PackingLeakError
from .packed_model import OnLeak, PackedModel
from .probe import SMALLEST_ROUNDING, Probe
from .probed_model import CannotRun, gradient_of, largest_distance, model_errors_converted, to_exact
from .repair import AroundCall, AroundCalls, is_sharded
from .thresholds import thresholds
from .unpacking import join_outputs

POOLED_OUTPUT = "pooler_output"  # of a backbone: one value per row, which a pack does not have
STATE_OUTPUTS = ("output_hidden_states", "output_attentions")
ROW_INPUTS = ("input_ids", "attention_mask", "use_cache", *CACHE_NAMES)  # inputs in whose place a pack comes


class RowsOfBatch(NamedTuple):
    pack: dict[str, Any]  # without labels
    rows: Tensor  # of the pack that hold each token, int64, (N,)
    cells: Tensor  # the place of each token in the padded batch, row after row, int64, (N,)
    shape: tuple[int, int]  # B and S
    longest: int  # tokens of the longest row, without padding
    is_left_padded: bool  # whether a row begins with padding

    @property
    def num_computed(self) -> int:
        return self.pack["input_ids"].shape[1]

    def to(self, device: torch.device) -> "RowsOfBatch":
        """The same on another device. On CUDA through pinned memory, so that the host does not wait."""

        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor | Layout) or device.type == "cpu":
                return value
            value = value.pin_memory() if device.type == "cuda" else value
            return value.to(device, non_blocking=True)

        pack = {name: moved(value) for name, value in self.pack.items()}
        if self.pack["cu_seq_lens_k"] is self.pack["cu_seq_lens_q"]:  # one tensor: attention compares their identity
            pack["cu_seq_lens_k"] = pack["cu_seq_lens_q"]
        return self._replace(pack=pack, rows=moved(self.rows), cells=moved(self.cells))


def pack_rows(input_ids: Tensor, attention_mask: Tensor, collate: PrefixCollator) -> RowsOfBatch | None:
    """The rows of a padded batch as the documents of one pack, on the device of the batch.

    Rows may be padded on either side; a row without tokens is no document. None if no row has a token, or if one has
    padding between tokens: its positions are not those of a document. The host waits for the device once.

    >>> ids = torch.tensor([[5, 6, 7, 8, 0], [5, 6, 7, 9, 4]])
    >>> mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    >>> batch = pack_rows(ids, mask, PrefixCollator(min_shared=1, keeps_last_rows=True))
    >>> batch.pack["input_ids"].tolist(), batch.rows.tolist()
    ([[5, 6, 7, 8, 7, 9, 4]], [0, 1, 2, 3, 0, 1, 4, 5, 6])
    """
    assert collate.keeps_last_rows
    tokens, mask = torch.stack([input_ids, attention_mask.to(input_ids.dtype)]).cpu().numpy()
    is_token = mask != 0
    starts = np.diff(is_token, axis=1, prepend=False) & is_token
    if not is_token.any() or (starts.sum(1) > 1).any():
        return None
    documents = [ids[own] for ids, own in zip(tokens, is_token, strict=True) if own.any()]
    pack, _, rows = collate.collate_with_rows([{"input_ids": ids} for ids in documents])
    del pack["labels"]
    batch = RowsOfBatch(
        pack,
        torch.from_numpy(np.concatenate(rows)),
        torch.from_numpy(np.flatnonzero(is_token)),
        (is_token.shape[0], is_token.shape[1]),
        int(is_token.sum(1).max()),
        bool(starts[:, 1:].any()),
    )
    return batch.to(input_ids.device)


@dataclass
class PackedTokenCounts:
    """Tokens of the forwards that ran as packs, on this rank."""

    padded: int = 0  # of the padded batches, which would be computed without packs
    real: int = 0  # of them without padding
    computed: int = 0  # rows of the packs


class PackedRows(AroundCalls):
    """Packs the rows of padded batches below the head of `model`, once `prove` has passed.

    A forward with a cache, without an `attention_mask` (B, S), or with other inputs per token (images, positions,
    embeddings) is unchanged. A model that cannot be packed keeps its padded rows, or with `on_leak="raise"` is refused.

    Args:
        shares: whether a common beginning of rows is computed once.

    Attributes:
        is_proved: whether `prove` has run.
        refusal: why rows stay padded; None if they are packed.
        whole: why rows are packed without sharing although sharing was wanted; None if they share.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        device_type: str,
        max_length: int | None,
        *,
        on_leak: OnLeak = "repair",
        shares: bool = True,
        enforce_flash_attention: bool = True,
    ):
        self.model = base_model(model)
        self.fed = below_head(self.model) or [self.model]
        super().__init__(*self.fed)
        hooks = self.fed[0]._forward_pre_hooks.values()
        if any(isinstance(getattr(hook, "__self__", None), PackedRows) for hook in hooks):
            raise ValueError(
                f"`pack_forward` was called a second time for the same {type(self.model).__name__}. Its padded rows, "
                "with which packs are compared, would be packs. Call `remove()` on what the first call returned."
            )
        self.collate = PrefixCollator(keeps_last_rows=True, shares=shares)
        self.packed_model = PackedModel(
            model,
            dtype,
            device_type,
            max_length,
            on_leak=on_leak,
            enforce_flash_attention=enforce_flash_attention,
            own_hooks=[self],
            shares_prefixes=shares,
        )
        self.refusal: str | None = None
        self.whole: str | None = None
        self.tokens = PackedTokenCounts()
        self.is_proved = self._is_paused = False
        self._compares = True
        self._thresholds = [*thresholds(text_config(self.model), None, 1)[0].values()]
        # What batches were compared: gradients, dtype, left padding, mode; and the longest row of them
        self._compared: set[tuple[bool, torch.dtype, bool, bool]] = set()
        self._longest_compared = 0
        self._ignored: set[str] = set()

    @property
    def is_active(self) -> bool:
        """Whether rows are packed."""
        return self.is_proved and self.refusal is None and not self._is_paused

    def prove(self, wrapped: nn.Module) -> None:
        """Prove packs, and packs that share beginnings, on the model as it is `wrapped`. All ranks must call it."""
        packed = self.packed_model
        # Such an engine runs one forward at a time, so nothing is compared within it; this proof decides alone
        self._compares = not is_sharded(self.model)
        try:
            report = packed.prove(wrapped)
            if packed.is_unpacked:
                self._refuse_packs(packed.attention.reason)
            elif not packed.is_proved:
                self._refuse_packs(report.summary())
            elif self.collate.shares and (reason := packed.prove_prefixes(wrapped)) is not None:
                self._share_nothing(reason)
        except KernelError as error:
            self._refuse_packs(" ".join(str(error).split()))
        finally:
            self._switch_attention(False)
        self.is_proved = True
        if self.refusal is not None:
            packed.restore_own_attention()

    def remove_hooks(self) -> None:
        """Leave the model as it was."""
        self.is_proved = False
        self.packed_model.restore_own_attention()

    # What cannot be done

    def _refuse_packs(self, reason: str) -> None:
        name = type(self.model).__name__
        if self.packed_model.on_leak == "raise":
            raise PackingLeakError(
                f'`on_leak="raise"` was given, and on {name} {reason}. So padded rows cannot be computed as packs. Set '
                '`on_leak="repair"`, which computes rows with padding where packs fail, or remove `pack_forward`.'
            )
        self.refusal = reason
        warnings.warn(
            f"{name} computes its rows with padding, as without `pack_forward`: {reason}. Remove `pack_forward`, or "
            'set `on_leak="raise"` if padding is not acceptable.',
            stacklevel=3,
        )

    def _share_nothing(self, reason: str) -> None:
        self.collate.shares = False
        self.whole = reason
        warnings.warn(
            f"{type(self.model).__name__} computes a beginning that rows share once per row: {reason}. Set "
            "`share_prefixes=False` to omit this test.",
            stacklevel=3,
        )

    # Hooks

    def _around(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AroundCall:
        batch = None
        inputs = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
        if self.is_active and not any(self._running) and self._is_padded(module, inputs):
            batch = pack_rows(inputs["input_ids"], inputs["attention_mask"], self.collate)
            if batch is not None and self._compares:
                batch = self._proved_on(module, inputs, batch)
        if batch is None:
            return
        self.tokens.padded += batch.shape[0] * batch.shape[1]
        self.tokens.real += len(batch.cells)
        self.tokens.computed += batch.num_computed
        self._switch_attention(True)
        try:
            output = yield (), _pack_inputs(inputs) | batch.pack
        finally:
            self._switch_attention(False)

        def states(values: list[Tensor]) -> Tensor:
            found = _lay_out_rows(values[0], batch)
            if found.requires_grad:
                found.register_hook(self._attend_in_backward)
            return found

        yield join_outputs([output], states, routers=lambda values: _lay_out_rows(values[0], batch))

    def _is_padded(self, module: nn.Module, inputs: dict[str, Any]) -> bool:
        tokens, mask, use_cache = (inputs.get(name) for name in ("input_ids", "attention_mask", "use_cache"))
        if not isinstance(tokens, Tensor) or not isinstance(mask, Tensor) or mask.shape != tokens.shape:
            return False
        if use_cache is None:  # training does not use a cache
            use_cache = not module.training and getattr(text_config(self.model), "use_cache", False)
        has_cache = use_cache or any(inputs.get(name) is not None for name in CACHE_NAMES)
        if has_cache or any(inputs.get(name) for name in STATE_OUTPUTS):
            return False
        rest = _pack_inputs(inputs)
        others = [name for name, value in rest.items() if isinstance(value, Tensor) and value.dim() > 0]
        if torch.is_grad_enabled() and not set(others) <= self._ignored:  # `generate` gives positions
            self._ignored.update(others)
            warnings.warn(
                f"{type(self.model).__name__} got {', '.join(others)}, one value per token or image, and computes "
                "these rows with padding: a pack would need these values in its own order. Leave them out if the model "
                "does not need them.",
                stacklevel=2,
            )
        return not others

    def _switch_attention(self, on: bool) -> None:
        """Set the attention of packs, or the model's own."""
        attention = self.packed_model.attention
        name = attention.name if on else attention.previous
        if own_attention(self.model) != name:
            set_attention(self.model, name)

    def _attend_in_backward(self, gradient: Tensor) -> None:
        """Before any layer is recomputed: its states get their gradient first."""
        self._switch_attention(True)
        Variable._execution_engine.queue_callback(lambda: self._switch_attention(False))

    # The proof on the first batch of each kind

    def _proved_on(self, module: nn.Module, inputs: dict[str, Any], batch: RowsOfBatch) -> RowsOfBatch | None:
        """The pack of these rows if it gives the states and gradients of the padded rows; None if they stay padded.

        Compared is the first batch of each kind: without and with gradients, in each dtype and mode, with left padding,
        with rows that are twice as long as any before or cross a length above which the model is another one. Where one
        differs, nothing is shared, or rows stay padded from now on. Each rank decides alone: its first batch may come
        later than that of another, and padded rows give the same gradients.
        """
        kind = (torch.is_grad_enabled(), computing_dtype(self.model), batch.is_left_padded, module.training)
        known = self._compared
        longest = self._longest_compared
        is_longer = batch.longest >= 2 * longest or any(longest <= n < batch.longest for n in self._thresholds)
        if kind in known and not is_longer:
            return batch
        where = "on its first batch"
        if known:
            left = "left padding and " if batch.is_left_padded else ""
            is_new = all(each[3] is not module.training for each in known)
            mode = f"in {'train' if module.training else 'eval'} mode " if is_new else ""
            where = f"on the first batch {mode}with {left}rows of up to {batch.longest} tokens"
        difference = partial(self._difference, module, inputs, wants_gradients=kind[0] and kind not in known)
        reason = difference(batch)
        if reason is not None and self.collate.shares:
            self._share_nothing(f"{where}, {reason}")
            whole = pack_rows(inputs["input_ids"], inputs["attention_mask"], self.collate)
            assert whole is not None
            batch = whole
            reason = difference(whole)
        if reason is not None:
            self._refuse_packs(f"{where}, {reason}")
            return None
        self._compared |= {kind, (False, *kind[1:])}
        self._longest_compared = max(batch.longest, longest)
        return batch

    def _difference(
        self, module: nn.Module, inputs: dict[str, Any], batch: RowsOfBatch, *, wants_gradients: bool
    ) -> str | None:
        """What differs between the padded rows and their pack beyond rounding; None if nothing."""
        packed = self.packed_model
        is_training = module.training
        assert packed.isolation is not None
        probe = Probe(self.model, user_attention=packed.attention.previous)
        tolerance = max(packed.isolation.tolerance, torch.finfo(torch.float64).eps)

        def run(in_pack: bool) -> list[Tensor]:
            """States of the tokens, (N, hidden), and the gradient of the embeddings of the pack, (T, hidden)."""
            self._switch_attention(in_pack)
            with probe.embeddings() if wants_gradients else torch.no_grad() as embedded:
                output = module(**(_pack_inputs(inputs) | batch.pack if in_pack else inputs))
                if in_pack and isinstance(output, dict) and output.get(POOLED_OUTPUT) is not None:
                    raise CannotRun(f"it also returns {POOLED_OUTPUT}, computed of each row")
                states = output[0].flatten(0, 1)[batch.rows if in_pack else batch.cells]
                if embedded is None:
                    return [to_exact(states)]
                weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(0)).to(states)
                gradient = gradient_of((states * weights).sum(), embedded[0])
            if gradient is None:
                return [to_exact(states.detach())]
            gradient = to_exact(gradient.flatten(0, 1))
            if not in_pack:  # tokens that share a row of the pack give it the sum of their gradients
                summed = gradient.new_zeros(batch.num_computed, gradient.shape[-1])
                gradient = summed.index_add(0, batch.rows, gradient[batch.cells])
            return [to_exact(states.detach()), gradient]

        self._is_paused = True
        try:
            with probe.undisturbed(), nullcontext() if is_training else probe.evaluating(), model_errors_converted():
                self._switch_attention(True)
                # The wrapper by which accelerate runs a forward under autocast remembers in one place what was on
                # before: a forward within a forward would leave autocast on after both.
                with torch.autocast(self.model.device.type, enabled=False):
                    probe.silenced(lambda: probe.forward_packed([probe.tokens(n) for n in (3, 5)]))
                padded = run(in_pack=False)
                first = run(in_pack=True)
                gaps = _largest_gaps(padded, first)
                limits = probe.limits_of_rounding(
                    gaps,
                    [tolerance, max(SMALLEST_ROUNDING, tolerance**0.5)][: len(gaps)],
                    lambda: _largest_gaps(first, run(in_pack=True)),
                )
        except (CannotRun, KernelError) as error:
            return f"the model raised: {error}"
        finally:
            self._is_paused = False
            self._switch_attention(False)
        each = zip(("states", "gradients"), gaps, limits, strict=False)
        what, gap, limit = max(each, key=lambda one: one[1] / one[2])
        if gap <= limit:
            return None
        return f"{what} of the pack differ from those of the padded rows by {gap:.1e}; rounding explains {limit:.1e}"


def computing_dtype(model: PreTrainedModel) -> torch.dtype:
    """That of autocast, where it is on."""
    device = model.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype


def _largest_gaps(one: list[Tensor], two: list[Tensor]) -> list[float]:
    """The largest difference of states and of gradients, if both have these, relative to the largest."""
    return [
        largest_distance([first], [second]) / max(first.abs().max().item(), 1e-30)
        for first, second in zip(one, two, strict=False)
    ]


def _pack_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs that a pack keeps."""
    return {name: value for name, value in inputs.items() if name not in ROW_INPUTS}


def _lay_out_rows(values: Tensor, batch: RowsOfBatch) -> Tensor:
    """Values of the rows of a pack at the tokens of the padded batch, and 0 at its padding.

    (1, T, ...) -> (B, S, ...), and (T, ...) -> (B * S, ...).
    """
    has_batch = values.shape[0] == 1 and values.dim() > 2
    flat = values.flatten(0, 1) if has_batch else values
    grid = flat.new_zeros(batch.shape[0] * batch.shape[1], *flat.shape[1:])
    grid = grid.index_copy(0, batch.cells, flat.index_select(0, batch.rows))
    return grid.unflatten(0, batch.shape) if has_batch else grid
