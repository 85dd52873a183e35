"""Compute padded batches as packs: the rows of a batch run as the documents of one pack, below the head of a model.

`pack_forward` (`trainers.py`) uses this for trainers that do not pack, such as TRL's GRPO and DPO. Hooks on the
backbone of the model get a padded batch and run the backbone on a pack: its rows, without padding, one after the other.
Then they lay the states out as the padded batch again, with zeros at padding, for the head, the loss and the caller.
A beginning that several rows share is computed once:

    input_ids   A B C D .     attention_mask 1 1 1 1 0     cells 0 1 2 3
                A B C E F                    1 1 1 1 1           5 6 7 8 9

    pack        A B C D | C E F     places 0 1 2 3, 0 1 4 5 6

The last common token, C, has a place in each row, because its output has to predict another token in each.

A *row* is always a row of the padded batch. A *cell* is the index of a token in the flattened batch, a *place* its
index in the pack. The batch has B rows of S tokens, padding included, and N tokens without padding; the pack has T
tokens.

Before the first batch runs as a pack, `PackedModel` tests on the model that documents do not change each other. In
addition, the first batch of each kind is computed in both ways and compared.

The model has its own attention outside of packs. The attention of packs is set while a pack runs forward, and again in
its backward, because a checkpointed layer looks its attention up again when it is recomputed.
"""

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.autograd import Variable
from transformers import PreTrainedModel

from ...attention.choice import own_attention, set_attention
from ...attention.kernel_errors import KernelError
from ...attention.models import base_model, below_head, text_config
from ...attention.packed_forward import CACHE_NAMES
from ...data.collator import PackedDataCollator
from ...feature import PLAIN, find_folder
from ...isolation.arguments import named_arguments
from ...isolation.isolation_report import PackingLeakError
from ...isolation.packed_model import OnLeak, PackedModel
from ...isolation.probe import SMALLEST_ROUNDING, Probe
from ...isolation.probed_model import CannotRun, gradient_of, largest_distance, model_errors_converted, to_exact
from ...isolation.repair import AroundCall, AroundCalls, is_sharded
from ...isolation.thresholds import thresholds
from ...isolation.unpacking import join_outputs

POOLED_OUTPUT = "pooler_output"  # output of a backbone with one value per row, which a pack does not have
STATE_OUTPUTS = ("output_hidden_states", "output_attentions")  # arguments that request outputs of all layers
ROW_INPUTS = ("input_ids", "attention_mask", "use_cache", *CACHE_NAMES)  # inputs that the pack replaces


class RowsOfBatch(NamedTuple):
    """A pack of the rows of a padded batch, and where its tokens are in the pack and in the batch."""

    pack: dict[str, Any]  # inputs of the model, without labels
    places: Tensor  # for each token of the batch its index in the pack, int64, (N,); tokens may share a place
    cells: Tensor  # for each token its index in the flattened batch, in rising order, int64, (N,)
    shape: tuple[int, int]  # B and S
    longest: int  # tokens of the longest row, without padding
    is_left_padded: bool  # whether a row begins with padding

    @property
    def num_computed(self) -> int:
        """T, the number of tokens of the pack, which are computed."""
        return self.pack["input_ids"].shape[1]

    def to(self, device: torch.device) -> "RowsOfBatch":
        """Return a copy on another device.

        The host waits until all tensors are copied. This takes little time, because the device has nothing to finish
        first: `pack_rows` has already waited for it to read the tokens.
        """
        pack, places, cells = send_to_device((self.pack, self.places, self.cells), device)
        # By this identity attention sees, without reading them, that queries and keys have equal boundaries
        if self.pack["cu_seq_lens_k"] is self.pack["cu_seq_lens_q"]:
            pack["cu_seq_lens_k"] = pack["cu_seq_lens_q"]
        return self._replace(pack=pack, places=places, cells=cells)


def pack_rows(input_ids: Tensor, attention_mask: Tensor, collate: PackedDataCollator) -> RowsOfBatch | None:
    """Return a pack whose documents are the rows of a padded batch, on the device of the batch.

    Rows may be padded on either side, and a row without tokens is skipped. The host waits for the device once.

    Args:
        input_ids: tokens, (B, S).
        attention_mask: 0 at padding, (B, S).
        collate: makes the pack, and returns for each document the places of its tokens. Every token must have a place,
            so a collator that shares prefixes needs the option `keeps_last_rows`. Without it the pack lacks the last
            token of a document if all tokens before are shared, because no loss reads the output of a last token.

    Returns:
        The pack, or None if no row has a token, or if a row has padding between tokens: the model gives its tokens
        other positions than the tokens of a document.

    >>> ids = torch.tensor([[5, 6, 7, 8, 0], [5, 6, 7, 9, 4]])
    >>> mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    >>> batch = pack_rows(ids, mask, PackedDataCollator())
    >>> batch.pack["input_ids"].tolist(), batch.places.tolist()
    ([[5, 6, 7, 8, 5, 6, 7, 9, 4]], [0, 1, 2, 3, 4, 5, 6, 7, 8])
    """
    # Both in one transfer from the device
    tokens, mask = torch.stack([input_ids, attention_mask.to(input_ids.dtype)]).cpu().numpy()
    is_token = mask != 0
    # A token behind padding, or the first of its row; `np.diff` of booleans says where neighbours differ
    is_start = np.diff(is_token, axis=1, prepend=False) & is_token
    if not is_token.any() or (is_start.sum(1) > 1).any():
        return None
    documents = [ids[in_row] for ids, in_row in zip(tokens, is_token, strict=True) if in_row.any()]
    # `places` has an array for each document. The second result, the tokens that documents do not share, is not needed
    pack, _, places = collate.collate_with_rows([{"input_ids": ids} for ids in documents])
    del pack["labels"]  # the caller computes the loss of the padded batch
    places_of_tokens = np.concatenate(places)
    assert len(places_of_tokens) == is_token.sum()
    batch = RowsOfBatch(
        pack,
        torch.from_numpy(places_of_tokens),
        torch.from_numpy(np.flatnonzero(is_token)),
        (is_token.shape[0], is_token.shape[1]),
        longest=int(is_token.sum(1).max()),
        is_left_padded=bool(is_start[:, 1:].any()),
    )
    return batch.to(input_ids.device)


@dataclass
class PackedTokenCounts:
    """Tokens of the forwards that ran as packs, on this rank."""

    padded: int = 0  # tokens of the padded batches, which would be computed without packs
    real: int = 0  # tokens of the batches without padding
    computed: int = 0  # tokens of the packs, which were computed


class PackedRows(AroundCalls):
    """The hooks that pack the rows of padded batches below the head of `model`, once `prove` has run.

    A forward with a cache, without an `attention_mask` (B, S), or with other inputs per token (images, positions,
    embeddings) is unchanged. A model that cannot be packed computes padded rows as before, or raises
    `PackingLeakError` with `on_leak="raise"`.

    Args:
        dtype, device_type, max_length, on_leak, enforce_flash_attention: see `PackedModel`.
        shares: whether a beginning that rows share is computed once.

    Attributes:
        modules_given_packs: the modules that get a pack in place of a padded batch.
        packed_model: the model with the attention that packs need, and with *repairs*: modules that ignore boundaries
            run on one document at a time.
        collate: makes the packs. It shares beginnings if that was asked for, and no test has found a difference.
        is_proved: whether `prove` has run; if it failed, there is a `refusal`.
        is_removed: whether `remove_hooks` has run, and `prove` not again.
        refusal: why rows stay padded; None if they are packed.
        sharing_refusal: why rows are packed without sharing although sharing was wanted; None if they share.
        tokens: counts of what was computed.
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
        self.modules_given_packs = below_head(self.model) or [self.model]  # a model without a head itself
        super().__init__(*self.modules_given_packs)
        hooks = self.modules_given_packs[0]._forward_pre_hooks.values()
        if any(isinstance(getattr(hook, "__self__", None), PackedRows) for hook in hooks):
            raise ValueError(
                f"`pack_forward` was called a second time for the same {type(self.model).__name__}. Its padded rows, "
                "with which packs are compared, would be packs. Call `remove()` on what the first call returned."
            )
        # The feature with which the documents of a pack compute a common beginning once; "pack" is its setting
        # `share_prefixes`. Without its folder, rows share nothing
        folder = find_folder("prefixes") if shares else None
        feature = PLAIN if folder is None else folder.FEATURE("pack")
        self.collate: PackedDataCollator = feature.make_collator(PackedDataCollator(), keeps_last_rows=True)
        self.packed_model = PackedModel(
            model,
            dtype,
            device_type,
            max_length,
            on_leak=on_leak,
            enforce_flash_attention=enforce_flash_attention,
            own_hooks=[self],  # attached and removed with the hooks of `PackedModel`
            feature=feature,
        )
        self.refusal: str | None = None
        self.sharing_refusal: str | None = None
        self.tokens = PackedTokenCounts()
        self.is_proved = False
        self.is_removed = False
        self._is_paused = False  # while a batch is compared, so that its padded rows stay padded
        self._compares = True  # whether the first batch of each kind is compared
        # Lengths above which the model computes documents differently, for rows of any length
        thresholds_to_test, _ = thresholds(text_config(self.model), max_length=None, shortest=1)
        self._thresholds = [*thresholds_to_test.values()]
        # The kinds of batches that were compared (with gradients, dtype, left padding, training mode), and their
        # longest row
        self._compared_kinds: set[tuple[bool, torch.dtype, bool, bool]] = set()
        self._longest_compared = 0
        self._warned_inputs: set[str] = set()  # names of inputs that keep rows padded, of which a warning has told

    @property
    def is_active(self) -> bool:
        """Whether rows are packed."""
        return self.is_proved and self.refusal is None and not self._is_paused

    @property
    def has_named_inputs(self) -> bool:
        """Whether a warning has named inputs that keep rows padded."""
        return bool(self._warned_inputs)

    def prove(self, wrapped: nn.Module) -> None:
        """Prove that packs, and packs that share beginnings, give the same results as documents alone.

        If packs fail, rows stay padded; if only sharing fails, rows are packed whole. A warning then says why; see
        `refusal` and `sharing_refusal`. All ranks must call it.

        Args:
            wrapped: the model inside of the wrappers of DDP, FSDP and so on, with which it is trained.

        Raises:
            PackingLeakError: packs fail, and `on_leak="raise"`.
        """
        self.is_removed = False
        packed = self.packed_model
        # A batch is compared inside of the trainer's forward, by further forwards. An engine that shards parameters
        # cannot run these. So no batch is compared, and only this proof decides
        self._compares = not is_sharded(self.model)
        try:
            report = packed.prove(wrapped)
            if packed.is_unpacked:  # `PackedModel` would compute packs as padded rows, so leave the rows as they are
                self._refuse_packs(packed.attention.reason)
            elif not packed.is_proved:  # the documents of packs are wrong, also after repairs
                self._refuse_packs(report.summary())
            elif self.collate.shares:
                reason = packed.prove_feature(wrapped)
                if reason is not None:
                    self._share_nothing(reason)
        except KernelError as error:
            self._refuse_packs(" ".join(str(error).split()))  # on one line
        finally:
            self._switch_attention(in_pack=False)
        self.is_proved = True
        if self.refusal is not None:
            packed.restore_own_attention()

    def remove_hooks(self) -> None:
        """Let `packed_model` remove its hooks, these included, and restore the attention from before `prove`."""
        self.is_proved = False
        self.is_removed = True
        self.packed_model.restore_own_attention()

    # Refusals

    def _refuse_packs(self, reason: str) -> None:
        """Leave rows padded from now on, with a warning, or raise `PackingLeakError` with `on_leak="raise"`."""
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
        """Pack each row whole from now on, with a warning."""
        self.collate = PackedDataCollator()
        self.sharing_refusal = reason
        warnings.warn(
            f"{type(self.model).__name__} computes a beginning that rows share once per row: {reason}. Set "
            "`share_prefixes=False` to omit this test.",
            stacklevel=3,
        )

    # Hooks

    def _around(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AroundCall:
        """Run a pack in place of a padded batch, around a call of a module: the hook of `AroundCalls`.

        The first yield hands over the new arguments of the call, positional and by name, and receives its output. The
        second hands over the new output.
        """
        # First, decide whether this call is packed, and make the pack. Calls within a packed call get the pack already.
        batch = None
        inputs = named_arguments(module, args, kwargs)
        # `_running` has an entry for each call under way. Its `around` is None for a call that runs with its own inputs
        is_within_packed_call = any(running.around is not None for running in self._running)
        if self.is_active and not is_within_packed_call and self._is_padded(module, inputs):
            batch = pack_rows(inputs["input_ids"], inputs["attention_mask"], self.collate)
            if batch is not None and self._compares:
                batch = self._compare_new_kind(module, inputs, batch)
        if batch is None:
            return
        # Then run it in place of the padded batch, with the attention of packs.
        self.tokens.padded += batch.shape[0] * batch.shape[1]
        self.tokens.real += len(batch.cells)
        self.tokens.computed += batch.num_computed
        self._switch_attention(in_pack=True)
        try:
            output = yield (), _inputs_beside_rows(inputs) | batch.pack
        finally:
            self._switch_attention(in_pack=False)

        # Finally, lay its states and the logits of its routers out as the padded batch.
        def lay_out_states(values: list[Tensor]) -> Tensor:
            states = _lay_out_values(values[0], batch)
            if states.requires_grad:
                states.register_hook(self._attend_in_backward)
            return states

        # `join_outputs` joins outputs of several batches. Here it is one, whose states and router logits it replaces
        yield join_outputs([output], lay_out_states, lambda router_logits: _lay_out_values(router_logits[0], batch))

    def _is_padded(self, module: nn.Module, inputs: dict[str, Any]) -> bool:
        """Return whether a call gets a padded batch, and nothing that a pack would need in its own order."""
        tokens, mask, use_cache = (inputs.get(name) for name in ("input_ids", "attention_mask", "use_cache"))
        if not isinstance(tokens, Tensor) or not isinstance(mask, Tensor) or mask.shape != tokens.shape:
            return False
        if use_cache is None:  # training does not use a cache
            use_cache = not module.training and getattr(text_config(self.model), "use_cache", False)
        has_cache = use_cache or any(inputs.get(name) is not None for name in CACHE_NAMES)
        if has_cache or self._returns_states(module, inputs):
            return False
        tensor_inputs = [
            name for name, value in _inputs_beside_rows(inputs).items() if isinstance(value, Tensor) and value.dim() > 0
        ]
        # `generate` always passes positions, so the warning is for forwards with gradients only
        if torch.is_grad_enabled() and not set(tensor_inputs) <= self._warned_inputs:
            self._warned_inputs.update(tensor_inputs)
            warnings.warn(
                f"{type(self.model).__name__} got {', '.join(tensor_inputs)}, one value per token or image, and "
                "computes these rows with padding: a pack would need these values in its own order. Leave them out if "
                "the model does not need them.",
                stacklevel=2,
            )
        return not tensor_inputs

    def _returns_states(self, module: nn.Module, inputs: dict[str, Any]) -> bool:
        """Return whether a call returns outputs of all layers: its arguments or, without them, a config ask for it."""
        configs = (getattr(module, "config", None), text_config(self.model))
        for name in STATE_OUTPUTS:
            wanted = inputs.get(name)
            if wanted or (wanted is None and any(getattr(config, name, False) for config in configs)):
                return True
        return False

    def _switch_attention(self, in_pack: bool) -> None:
        """Set the attention of packs, or the model's own attention."""
        attention = self.packed_model.attention
        current = own_attention(self.model)
        if current not in (attention.name, attention.previous):  # the user has set another one, which comes back
            attention = self.packed_model.attention = replace(attention, previous=current)
        name = attention.name if in_pack else attention.previous
        if current != name:
            set_attention(self.model, name)

    def _attend_in_backward(self, gradient: Tensor) -> None:
        """Set the attention of packs until the end of the backward.

        It is a hook on the gradient of the states of a pack. Backward computes this gradient before it recomputes the
        first layer, because the states are the output of the last layer.
        """
        self._switch_attention(in_pack=True)
        Variable._execution_engine.queue_callback(lambda: self._switch_attention(in_pack=False))

    # The comparison on the first batch of each kind

    def _compare_new_kind(self, module: nn.Module, inputs: dict[str, Any], batch: RowsOfBatch) -> RowsOfBatch | None:
        """Compare a pack with its padded rows if it is the first of its kind, and return the pack to run.

        Kinds are batches without and with gradients, in each dtype and mode, and with left padding. A batch is also
        compared if it has a row at least twice as long as any row before, or the first row beyond a threshold above
        which the model computes documents differently. If the pack differs, rows share nothing from now on, or stay
        padded. Each rank decides alone: its first batch may come later than that of another rank, and padded rows give
        the same gradients.

        Returns:
            `batch`, or a pack of the same rows that shares nothing; None if the rows stay padded.
        """
        kind = (torch.is_grad_enabled(), computing_dtype(self.model), batch.is_left_padded, module.training)
        known_kinds = self._compared_kinds
        longest = self._longest_compared
        passes_threshold = any(longest <= threshold < batch.longest for threshold in self._thresholds)
        is_longer = batch.longest >= 2 * longest or passes_threshold
        if kind in known_kinds and not is_longer:
            return batch
        where = "on its first batch"
        if known_kinds:
            padding = "left padding and " if batch.is_left_padded else ""
            known_modes = {is_training for *_, is_training in known_kinds}
            mode = f"in {'train' if module.training else 'eval'} mode " if module.training not in known_modes else ""
            where = f"on the first batch {mode}with {padding}rows of up to {batch.longest} tokens"
        wants_gradients = torch.is_grad_enabled() and kind not in known_kinds
        describe = partial(self._describe_difference, module, inputs, wants_gradients=wants_gradients)
        reason = describe(batch)
        if reason is not None and self.collate.shares:
            self._share_nothing(f"{where}, {reason}")
            unshared = pack_rows(inputs["input_ids"], inputs["attention_mask"], self.collate)
            assert unshared is not None
            batch = unshared
            reason = describe(batch)
        if reason is not None:
            self._refuse_packs(f"{where}, {reason}")
            return None
        self._compared_kinds |= {kind, (False, *kind[1:])}  # also the kind without gradients
        self._longest_compared = max(batch.longest, longest)
        return batch

    def _describe_difference(
        self, module: nn.Module, inputs: dict[str, Any], batch: RowsOfBatch, *, wants_gradients: bool
    ) -> str | None:
        """Run padded rows and their pack, and return in which values they differ beyond rounding, or why they failed.

        The result is None if they differ by rounding only.

        Args:
            wants_gradients: whether gradients with respect to embeddings are compared, too.
        """
        packed = self.packed_model
        is_training = module.training
        assert packed.isolation is not None
        probe = Probe(self.model, user_attention=packed.attention.previous)
        tolerance = max(packed.isolation.tolerance, torch.finfo(torch.float64).eps)

        def compute_values(in_pack: bool) -> list[Tensor]:
            """Return states of the tokens, (N, hidden), and the gradient of the pack's embeddings, (T, hidden)."""
            self._switch_attention(in_pack)
            # `embedded` is the list of the embeddings of this forward; None without gradients
            with probe.embeddings() if wants_gradients else torch.no_grad() as embedded:
                output = module(**(_inputs_beside_rows(inputs) | batch.pack if in_pack else inputs))
                if in_pack and isinstance(output, dict) and output.get(POOLED_OUTPUT) is not None:
                    raise CannotRun(f"it also returns {POOLED_OUTPUT}, computed of each row")
                states = output[0].flatten(0, 1)[batch.places if in_pack else batch.cells]
                gradient = None
                if embedded is not None:
                    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(0)).to(states)
                    gradient = gradient_of((states * weights).sum(), embedded[0])
            values = [to_exact(states.detach())]
            if gradient is not None:
                gradient = to_exact(gradient.flatten(0, 1))
                if not in_pack:  # as in the pack, tokens that share a place have one gradient, the sum of theirs
                    summed = gradient.new_zeros(batch.num_computed, gradient.shape[-1])
                    gradient = summed.index_add(0, batch.places, gradient[batch.cells])
                values.append(gradient)
            return values

        self._is_paused = True
        try:
            with probe.undisturbed(), nullcontext() if is_training else probe.evaluating(), model_errors_converted():
                self._switch_attention(in_pack=True)
                # Run a small pack, to find the modules that draw random numbers. The probe keeps them in eval mode from
                # then on, in which they draw none. Autocast is off for it: the wrapper by which accelerate runs a
                # forward under autocast saves the earlier state in one attribute. A forward within a forward would
                # overwrite it, and leave autocast on after both.
                with torch.autocast(self.model.device.type, enabled=False):
                    probe.run_without_draws(lambda: probe.forward_packed([probe.tokens(n) for n in (3, 5)]))
                padded_values = compute_values(in_pack=False)
                packed_values = compute_values(in_pack=True)
                gaps = _largest_gaps(padded_values, packed_values)
                # A gap beyond its limit may be rounding. So `limits_of_rounding` repeats the run of the pack with other
                # roundings, and measures its changes. Gradients round more than states: their limit is the square root
                # of the limit of states, and at least `SMALLEST_ROUNDING`, as in `PrefixProbe.gradient`.
                limits_of_states_and_gradients = [tolerance, max(SMALLEST_ROUNDING, tolerance**0.5)]
                limits = probe.limits_of_rounding(
                    gaps,
                    limits_of_states_and_gradients[: len(gaps)],
                    lambda: _largest_gaps(packed_values, compute_values(in_pack=True)),
                )
        except (CannotRun, KernelError) as error:
            return f"the model raised: {error}"
        finally:
            self._is_paused = False
            self._switch_attention(in_pack=False)
        named_gaps = zip(("states", "gradients"), gaps, limits, strict=False)
        name, gap, limit = max(named_gaps, key=lambda entry: entry[1] / entry[2])
        if gap <= limit:
            return None
        return f"{name} of the pack differ from those of the padded rows by {gap:.1e}; rounding explains {limit:.1e}"


def computing_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype in which a model computes: autocast's dtype if autocast is on, else the dtype of the weights."""
    device = model.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype


def _largest_gaps(first_values: list[Tensor], second_values: list[Tensor]) -> list[float]:
    """Return one number for the states and, if both runs have gradients, one for these: their largest difference.

    Each is divided by the largest absolute value of the first run.
    """
    return [
        largest_distance([first], [second]) / max(first.abs().max().item(), 1e-30)
        for first, second in zip(first_values, second_values, strict=False)
    ]


def _inputs_beside_rows(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of a padded batch that a pack gets unchanged."""
    return {name: value for name, value in inputs.items() if name not in ROW_INPUTS}


def _lay_out_values(values: Tensor, batch: RowsOfBatch) -> Tensor:
    """Copy the values of a pack's tokens to the tokens of the padded batch, with 0 at padding.

    (1, T, ...) -> (B, S, ...), and (T, ...) -> (B * S, ...).
    """
    has_batch = values.shape[0] == 1 and values.dim() > 2
    flat = values.flatten(0, 1) if has_batch else values
    grid = flat.new_zeros(batch.shape[0] * batch.shape[1], *flat.shape[1:])
    grid = grid.index_copy(0, batch.cells, flat.index_select(0, batch.places))
    return grid.unflatten(0, batch.shape) if has_batch else grid
