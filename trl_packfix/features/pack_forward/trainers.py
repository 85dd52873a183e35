"""Define `pack_forward`: any trainer of TRL computes its padded batches without padding, by hooks on its models.

A hook on the backbone of the model (all of it but the LM head) takes the padded rows of a batch, makes one *pack* of
them (a sequence without padding, in which each row is one document), runs the backbone on it, and puts the states back
to the places of the padded rows. The hooks are in `packed_rows.py`, one `PackedRows` for each model. This module finds
the models of a trainer, refuses settings with which packs would differ from padded rows, lets each model prove that
documents have equal results in packs, and logs how many tokens were computed.
"""

import warnings
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ...attention.models import base_model
from ...compat import call_first
from ...isolation.packed_model import OnLeak
from ...training import checks
from ...training.choices import (
    CONTEXT_PARALLELISM,
    DEEPSPEED_TENSORS,
    MEGATRON,
    NOISE,
    PACKING,
    PIPELINE,
    SEVERAL_DEVICES,
    Condition,
    RunSettings,
)
from ...training.conflicts import ON_SEVERAL_DEVICES, ChoiceConflicts
from ...training.progress import proof_status
from .packed_rows import PackedRows, PackedTokenCounts, computing_dtype

# For each key of the log, in the order of the fields of `PackedTokenCounts`: the unit, and what is counted.
# docs/logging.md is written from these texts.
LOGGED = {
    "packing/rows": ("tokens", "of the padded rows, which would be computed without packs"),
    "packing/tokens": ("tokens", "of these rows, without padding"),
    "packing/computed": ("tokens", "that were computed"),
}
# A run meets a `Condition` if `describe` returns a text, which names the user's choice in messages. `undo` says how the
# user takes the choice back
DATA_PARALLEL = Condition(
    "`DataParallel`",
    describe=lambda settings: (
        f"`DataParallel` on {settings.args.n_gpu} GPUs in one process" if settings.args.n_gpu > 1 else None
    ),
    undo=SEVERAL_DEVICES.undo,
)
# Settings that conflict with `pack_forward`, each with the reason as a sentence without its full stop
PACKED_ROWS = ChoiceConflicts(
    choice=Condition("`pack_forward`", lambda settings: "`pack_forward`", "remove `pack_forward`"),
    conflicts={
        CONTEXT_PARALLELISM: "It replaces attention by its own, which divides a row between ranks as if it were one "
        "document, so rows of a pack would attend to each other",
        DEEPSPEED_TENSORS: "Its engine divides the layers only when training starts, after the test of the model",
        PIPELINE: "A rank then has some of the layers only, and rows are packed before the first and unpacked after "
        "the last one",
        MEGATRON: "It splits a document over ranks and reads data with its own loader",
        PACKING: "The batches are packs already, without padding",
        # A run meets `NOISE` if `neftune_noise_alpha` is set
        NOISE: "The noise depends on the length of a row, which is that of the pack here",
        SEVERAL_DEVICES: ON_SEVERAL_DEVICES,
        DATA_PARALLEL: "It runs copies of the model, which hooks do not reach",
    },
    remedies={PACKING: "Set `packing=False` and `padding_free=False`, or remove `pack_forward`"},
)


class RowPacking:
    """The packing that `pack_forward` has set up. `summary()` describes it, and `remove()` undoes it.

    Attributes:
        rows: the hooks of each model, by the attribute of the trainer that holds the model.
    """

    def __init__(self, rows: dict[str, PackedRows], trainer_or_model: Trainer | nn.Module):
        self.rows = rows
        self._trainer_or_model = trainer_or_model
        self._callback: TrainerCallback | None = None
        if isinstance(trainer_or_model, Trainer):
            self._callback = _LogAndProve(trainer_or_model, self)
            # First, because it adds numbers to the log that the callback of a tracker reads
            call_first(trainer_or_model.callback_handler, self._callback)

    @property
    def tokens(self) -> PackedTokenCounts:
        """Tokens of all forwards that ran as packs on this rank."""
        counts = [astuple(rows.tokens) for rows in self.rows.values()]  # empty if every model computes padded rows
        return PackedTokenCounts(*map(sum, zip(*counts, strict=True)))

    def summary(self) -> str:
        """Return what was computed: a line with the numbers of tokens, and a line for each model."""
        tokens = self.tokens
        numbers = "no tokens yet"
        if tokens.padded:
            numbers = (
                f"padded {tokens.padded:,}, real {tokens.real:,}, computed {tokens.computed:,} "
                f"({tokens.computed / tokens.padded:.0%} of padded)"
            )
        lines = [f"Forwards on packed rows: {numbers}"]
        lines += [f"{name}: {_describe_state(rows)}" for name, rows in self.rows.items()]
        return "\n".join(lines)

    def prove(self) -> None:
        """Prove, for each model that is not proved yet, that documents have the same results in packs as alone.

        All ranks must call it. A model that fails computes its rows with padding, see `PackedRows.prove`.
        """
        if not isinstance(self._trainer_or_model, Trainer):
            self.rows["model"].prove(self._trainer_or_model)
            return
        trainer = self._trainer_or_model
        # The models as they are called in training: `model` is the trained model without its wrapper, such as DDP
        wrapped: dict[str, Any] = _models_of(trainer) | {"model": getattr(trainer, "model_wrapped", trainer.model)}
        for name, rows in self.rows.items():
            if not rows.is_proved:
                # `proof_status` shows on stderr how many forwards the proof has run
                with trainer.compute_loss_context_manager(), proof_status(trainer.args, rows.packed_model):
                    rows.prove(wrapped[name])

    def remove(self) -> None:
        """Remove the hooks from the models, and the callback from the trainer."""
        for rows in self.rows.values():
            rows.remove_hooks()
        if isinstance(self._trainer_or_model, Trainer) and self._callback is not None:
            self._trainer_or_model.remove_callback(self._callback)
            self._callback = None


def pack_forward(
    trainer_or_model: Trainer | nn.Module,
    share_prefixes: bool = True,
    *,
    on_leak: OnLeak = "repair",
    enforce_flash_attention: bool = True,
    max_length: int | None = None,
) -> RowPacking:
    """Compute padded batches without padding, and a beginning that several rows share only once.

    Call it before training, for a trainer that gives its models padded rows: TRL's `DPOTrainer`, `RewardTrainer`,
    `KTOTrainer`, `GRPOTrainer`, `RLOOTrainer` and `SFTTrainer` without packing, transformers' `Trainer`, or a model in
    a loop of your own. The rows of a batch become documents of one pack below the head, and each state returns to its
    place in the padded batch, so losses, metrics and samplers of the trainer do not change. Generation, and calls with
    a cache or without a mask, do not change either.

    Packs are tested twice. The first test runs in this call, or when training begins if DeepSpeed or FSDP wraps the
    model: documents must have the same results in packs as alone, as is tested for `SFTTrainer`. The second test runs
    on the first batch of each kind, such as the first with gradients: states and gradients of its padded rows and of
    its pack must be equal up to rounding. It is omitted if the parameters of the model are sharded. If a test fails,
    rows run with padding. If packs fail only where rows share beginnings, rows are packed without sharing. A warning
    says why.

    Args:
        trainer_or_model: the trainer, or a transformers model (with or without PEFT) on its device, not wrapped yet.
        share_prefixes: whether a beginning of 16 tokens or more that rows share, such as a prompt, is computed once.
        on_leak: as in `SFTConfig`; "raise" also raises where rows would run with padding.
        enforce_flash_attention: as in `SFTConfig`.
        max_length: the longest row, in tokens; None takes it from the trainer, or tests the model up to its number of
            positions.

    Returns:
        A record with `summary()` and `remove()`.

    Raises:
        ValueError: the trainer or the model packs already, or a setting would change the results of packs.
        PackingLeakError: with `on_leak="raise"`, packs differ from padded rows.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> tiny = LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
    >>> model = LlamaForCausalLM(tiny)
    >>> packing = pack_forward(model)
    >>> ids = torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]])
    >>> states = model.model(ids, attention_mask=(ids > 0).long(), use_cache=False).last_hidden_state
    >>> states[1, 2:].any().item()
    False
    >>> print(packing.summary())
    Forwards on packed rows: padded 8, real 6, computed 6 (75% of padded)
    model: packed with packfix_varlen, common beginnings once
    """
    if not isinstance(share_prefixes, bool | np.bool_):
        raise ValueError(
            f"`share_prefixes={share_prefixes!r}` was given to `pack_forward`, which shares prefixes or not, as "
            "they are in a batch. The choices of `SFTConfig` are for planned packs. Set True or False."
        )
    add_hooks = partial(
        PackedRows, on_leak=on_leak, shares=share_prefixes, enforce_flash_attention=enforce_flash_attention
    )
    is_sharded = False
    if isinstance(trainer_or_model, Trainer):
        rows = _add_hooks_to_models(trainer_or_model, max_length, add_hooks)
        is_sharded = trainer_or_model.is_deepspeed_enabled or trainer_or_model.is_fsdp_enabled
    else:
        model = base_model(trainer_or_model)
        rows = {"model": add_hooks(trainer_or_model, computing_dtype(model), model.device.type, max_length)}
    packing = RowPacking(rows, trainer_or_model)
    if not is_sharded:  # an engine that shards the model has not wrapped it yet, so the callback proves it later
        try:
            packing.prove()
        except BaseException:  # also Ctrl-C: the caller gets no record whose `remove()` it could call
            packing.remove()
            raise
    return packing


def _add_hooks_to_models(
    trainer: Trainer, max_length: int | None, add_hooks: Callable[..., PackedRows]
) -> dict[str, PackedRows]:
    """Add hooks to all models of a trainer, and return them by the attribute that holds the model.

    A model that cannot be packed computes its rows with padding, and a warning says why. For the trained model and its
    reference this is an error.
    """
    args: Any = trainer.args
    model: Any = trainer.model
    PACKED_ROWS.refuse_conflicts(RunSettings(args=args, model=model, accelerator=trainer.accelerator))
    models = _models_of(trainer)
    if not models:
        raise ValueError(
            f"`pack_forward` was given a {type(trainer).__name__} whose model is a {type(model).__name__}, and none of "
            "its attributes is a transformers model. Attention is set through transformers' interface, so no row would "
            "be packed. Give it a PreTrainedModel, with or without PEFT, or remove `pack_forward`."
        )
    checks.check_quantisation(model, args.device.type)
    max_length = getattr(args, "max_length", None) if max_length is None else max_length
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    rows: dict[str, PackedRows] = {}
    for name, wrapped in models.items():
        inner = trainer.accelerator.unwrap_model(wrapped, keep_torch_compile=False)
        try:
            rows[name] = add_hooks(inner, dtype or base_model(inner).dtype, args.device.type, max_length)
        except ValueError as error:
            if name in ("model", "ref_model"):
                raise
            warnings.warn(f"`{name}` computes its rows with padding, as without `pack_forward`: {error}", stacklevel=3)
    return rows


def _models_of(trainer: Trainer) -> dict[str, nn.Module]:
    """Return the transformers models of a trainer by attribute: the trained one, a reference, a teacher, reward models.

    A model that several attributes hold is returned once, under the first of them. `model` is the first of all.
    """
    attributes: dict[str, Any] = {"model": trainer.model} | vars(trainer)
    for name, value in vars(trainer).items():
        if isinstance(value, list | tuple):
            attributes |= {f"{name}[{i}]": element for i, element in enumerate(value)}
    models: dict[int, tuple[str, nn.Module]] = {}  # by the identity of the innermost model
    for name, value in attributes.items():
        if isinstance(value, nn.Module):
            inner = _unwrapped_model(trainer, value)
            if isinstance(inner, PreTrainedModel):
                models.setdefault(id(inner), (name, value))
    return dict(models.values())


def _unwrapped_model(trainer: Trainer, model: nn.Module) -> nn.Module:
    """Return the model inside of its wrappers, such as DDP, and of PEFT."""
    inner: Any = trainer.accelerator.unwrap_model(model, keep_torch_compile=False)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


class _LogAndProve(TrainerCallback):
    """A callback that proves packs at the start of training, if they are not proved yet, and logs computed tokens."""

    def __init__(self, trainer: Trainer, packing: RowPacking):
        self.trainer = trainer
        self.packing = packing
        self.logged = PackedTokenCounts()  # the tokens that earlier logs have counted
        self.warned_that_unused = False

    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        hooked = self.packing.rows.get("model")
        model = _models_of(self.trainer).get("model")
        if hooked is not None and model is not None and hooked.model is not _unwrapped_model(self.trainer, model):
            raise ValueError(
                f"`pack_forward` was called for the {type(hooked.model).__name__} that the "
                f"{type(self.trainer).__name__} had then, and the trainer now trains another model: with `model_init`, "
                "each training makes a new one. None of its rows would be packed. Give the trainer a `model` in place "
                "of `model_init`, or call `remove()` on what `pack_forward` returned."
            )
        self.packing.prove()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, Any] | None = None,
        **kwargs: object,
    ) -> None:
        tokens = self.packing.tokens
        tokens_before = self.logged
        has_active_hooks = any(rows.is_active for rows in self.packing.rows.values())
        # A warning has named inputs that keep rows padded, if there are some
        has_named_inputs = any(rows.has_named_inputs for rows in self.packing.rows.values())
        is_unused = tokens.padded == 0 and state.global_step > 0 and has_active_hooks and not has_named_inputs
        if is_unused and not self.warned_that_unused:
            self.warned_that_unused = True
            warnings.warn(
                f"`pack_forward` packed no rows in the first {state.global_step} steps of "
                f"{type(self.trainer).__name__}: its models got no padded rows with an `attention_mask`, "
                "their configs set `output_hidden_states` or `output_attentions`, or `torch.compile` had compiled a "
                "model of this class before the hooks were there. Give the mask, set both to False, or call "
                "`torch.compiler.reset()` before `pack_forward`.",
                stacklevel=2,
            )
        if tokens.padded == tokens_before.padded:
            return
        tokens_since_log = np.subtract(astuple(tokens), astuple(tokens_before)).tolist()
        numbers = dict(zip(LOGGED, tokens_since_log, strict=True))
        self.logged = tokens
        if logs is not None:
            logs |= numbers
        if state.log_history:  # its last entry is a copy of `logs`, made before the callbacks are called
            state.log_history[-1] |= numbers


def _describe_state(rows: PackedRows) -> str:
    """Return how a model computes its rows, packed or padded, and why."""
    if rows.is_removed:
        return "as without `pack_forward`, which was removed"
    if not rows.is_proved:
        return "proved when training begins"
    if rows.refusal is not None:
        return f"padded, because {rows.refusal}"
    packed_model = rows.packed_model
    repairs = "; repaired: " + "; ".join(map(str, packed_model.repaired)) if packed_model.repaired else ""
    if rows.sharing_refusal is not None:
        prefixes = f"each row whole, because {rows.sharing_refusal}"
    else:
        prefixes = "common beginnings once" if rows.collate.shares else "each row whole"
    return f"packed with {packed_model.attention.name}, {prefixes}{repairs}"
