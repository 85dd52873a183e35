"""Set a model up for packs: choose its attention, test isolation, and repair or unpack a model that leaks."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..attention.choice import AttentionChoice, choose_attention, dropped_weights, own_attention, set_attention
from ..attention.forwards import ModelHooks, PackedForwardGuard
from ..attention.kernel_errors import KernelError, OwnAttentionError
from ..attention.masked import own_in_packs
from ..attention.models import base_model, has_attention, text_config
from ..attention.tower_attention import (
    REPLACED_ATTENTION,
    TOWER_ATTENTION,
    TowerAttentionError,
    has_tower_attention,
    note_on_towers,
    set_tower_attention,
)
from ..attention.varlen import ATTENTION_NAME
from ..compat import gather_lm_head_with_model, run_hooks_inside_adapters, unshard_lm_head
from .check_isolation import check_packs
from .image_probe import ImageExamples
from .isolation_report import IsolationReport, PackingLeakError
from .prefix_probe import make_probe
from .repair import Repair
from .search import RepairSearch, agree_on_ranks
from .unpacking import UnpackedForward, UnpackedImages

OnLeak = Literal["repair", "raise", "unpack"]
# What other implementations of attention do not do
EXCHANGES = "does not exchange tokens between the ranks that share a pack"
LOOKS_UP = "does not look up the keys that documents share"


class PackedModel:
    """A model with the attention, hooks and repairs that packed batches need.

    `attach_packed_attention` sets the chosen attention and installs all hooks; `restore_own_attention` undoes both. So
    outside of packs the model is unchanged, and other trainers can use it before, between and after runs.

    Args:
        dtype: the dtype that reaches the attention kernel: that of autocast or of the engine, else of the weights.
        device_type: "cpu", "cuda", "mps", ...: where the model will train. It may not be there yet.
        max_length: longest document of the run, in tokens; None tests every threshold of the model.
        own_hooks: more hooks to install while the model takes packs, such as the noise of NEFTune.
        shares_packs: whether ranks share packs (sequence parallelism).
        images: makes documents with images for the probe, if packs have any.

    Attributes:
        isolation: the result of the last probe; None before the first.
        recall: gives the report of an earlier start, if one is remembered (`training/remembered.py`); None without.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        device_type: str,
        max_length: int | None,
        *,
        on_leak: OnLeak = "repair",
        enforce_flash_attention: bool = True,
        own_hooks: Sequence[ModelHooks] = (),
        shares_packs: bool = False,
        shares_prefixes: bool = False,
        images: ImageExamples | None = None,
    ):
        self.model = model
        self.dtype = dtype
        self.device_type = device_type
        self.max_length = max_length
        self.on_leak = on_leak
        self.enforce_flash_attention = enforce_flash_attention
        self.own_hooks = own_hooks
        self._needs_varlen = EXCHANGES if shares_packs else LOOKS_UP if shares_prefixes else None
        self.images = images
        self.recall: Callable[..., IsolationReport] | None = None
        self.has_packed_attention = False
        run_hooks_inside_adapters(model)
        self._head: RemovableHandle | None = None
        self._refusals: dict[str, str | None] = {}  # attention that cannot compute this model, and why; None if it can
        self._forget_proofs()
        self._choose_attention()

    def _choose_attention(self) -> None:
        refusals = {name: why for name, why in self._refusals.items() if why and name != TOWER_ATTENTION}
        settings = self.enforce_flash_attention, self.dtype
        choice = partial(choose_attention, self.model, *settings, device_type=self.device_type, refusals=refusals)
        needs_varlen = self._needs_varlen
        if needs_varlen == LOOKS_UP:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if choice().is_flash and not choice(needs_varlen=needs_varlen).is_flash:
                    needs_varlen = None  # flash attention gains more than shared prefixes
        self.attention = choice(needs_varlen=needs_varlen)
        if self.images is not None:
            why = "it is the user's choice" if self.enforce_flash_attention else "enforce_flash_attention=False"
            why = self._refusals.get(TOWER_ATTENTION) or why
            note = note_on_towers(base_model(self.model), self._takes_towers, why)
            self.attention = replace(self.attention, reason=self.attention.reason + note)
        self.isolation: IsolationReport | None = None
        fed = [module for hooks in self.own_hooks for module in hooks.fed]
        self._guard = PackedForwardGuard(base_model(self.model), fed)
        self._search: RepairSearch | None = None
        self._unpacked: UnpackedForward | UnpackedImages | None = None

    def _forget_proofs(self) -> None:
        """Forget the proofs of what documents and ranks share: they are of other attention."""
        self.prefixes_are_proved = False
        self._proved_degrees: dict[int, IsolationReport] = {}

    @property
    def _takes_towers(self) -> bool:
        """Whether vision towers that hand over the boundaries of their images run on our attention."""
        return self.images is not None and self.enforce_flash_attention and not self._refusals.get(TOWER_ATTENTION)

    @property
    def is_proved(self) -> bool:
        """Whether the last probe found documents isolated and equal to themselves alone."""
        return self.isolation is not None and self.isolation.passed

    @property
    def is_unpacked(self) -> bool:
        """Whether the backbone gets documents as rows of padded batches."""
        return self._unpacked is not None

    @property
    def repaired(self) -> list[Repair]:
        """The repairs; empty if none were needed."""
        return [] if self._search is None else self._search.repairs

    def prove(self, wrapped: nn.Module) -> IsolationReport:
        """Attend and probe the model as it is `wrapped`. On a leak apply `on_leak` and probe again.

        Raises KernelError if no attention kernel computes this model.
        """
        self.attach_packed_attention()
        gather_lm_head_with_model(base_model(self.model))
        if self._head is None:  # the engine may have sharded the model since `attach_packed_attention`
            self._head = unshard_lm_head(base_model(self.model))
        before = self.attention
        self.isolation = report = self._judge_packs(wrapped)
        if self.attention is not before:
            self._forget_proofs()
        if report.passed or self.is_unpacked or not report.runs_unpacked:
            return report
        if self.on_leak == "repair" and self._search is None:
            self._repair_leaks(wrapped)
        if self.on_leak != "raise" and not self.is_proved:
            return self.unpack(wrapped, why=report.summary())
        return self.isolation

    def prove_changed(self, wrapped: nn.Module) -> IsolationReport:
        """Choose attention and prove again, for a model whose modules have changed since the last proof."""
        self.restore_own_attention()
        self._forget_proofs()
        self._choose_attention()
        return self.prove(wrapped)

    def unpack(self, wrapped: nn.Module, why: str) -> IsolationReport:
        """Run documents as rows of padded batches from now on, and probe the model so."""
        for hooks in self._hooks:
            hooks.remove()
        self._search = None
        set_attention(self.model, self.attention.previous)
        self._unpacked = UnpackedForward(self.model) if self.images is None else UnpackedImages(self.model)
        for hooks in self._hooks:
            hooks.install()
        self.isolation = self._report_probe(wrapped)
        reason = f"UNPACKED, documents as rows of padded batches, because {why}"
        self.attention = replace(self.attention, name=self.attention.previous, is_flash=False, reason=reason)
        return self.isolation

    def _judge_packs(self, wrapped: nn.Module) -> IsolationReport:
        """Probe packs. Where a kernel refuses the model or computes it wrongly, do without that kernel."""
        report = self._on_kernels(wrapped)
        name = self.attention.name
        flash_attn = [name] if "flash" in name and name != self.attention.previous else []
        towers = [TOWER_ATTENTION] if has_tower_attention(base_model(self.model)) else []
        for kernel in [*flash_attn, *towers]:
            if report.passed:
                break
            self._use_kernel(kernel, refusal=report.summary())
            without = self._on_kernels(wrapped)
            if without.passed:
                return without
            self._use_kernel(kernel)  # the defect is elsewhere
        return report

    def _on_kernels(self, wrapped: nn.Module) -> IsolationReport:
        while True:
            try:
                return self._report_probe(wrapped)
            except TowerAttentionError as error:
                self._use_kernel(TOWER_ATTENTION, refusal=" ".join(str(error).split()))
            except KernelError as error:  # the same on all ranks: it depends on the model, the dtype and the device
                self._choose_another(error)

    def _use_kernel(self, kernel: str, refusal: str | None = None) -> None:
        """Use an attention or, with `refusal`, why, do without it."""
        self.restore_own_attention()
        self._refusals[kernel] = refusal
        self._choose_attention()
        self.attach_packed_attention()

    def _choose_another(self, error: KernelError) -> None:
        """Switch to another attention after a kernel raised `error`. Raises `error` if no other can be used."""
        name = self.attention.name
        reason = " ".join(str(error).split())
        cause = error.cause if isinstance(error, OwnAttentionError) else None  # then the model keeps its own
        if not self.enforce_flash_attention or (name == ATTENTION_NAME and cause is None):
            raise error
        self._use_kernel(name, refusal=cause or reason)
        if self.attention.name == name:
            self.restore_own_attention()
            raise error
        text = (
            f"attention {name!r} cannot compute this model: {reason} {self.attention.name!r} is used for packed "
            "batches instead. Set attn_implementation to another kernel if you have one that can."
        )
        if cause is not None:
            text = (
                f"packs keep the model's own attention, {self.attention.name!r}, with a mask of T x T entries for a "
                f"pack of T tokens: {cause}. Set a smaller max_length if memory is short."
            )
        warnings.warn(text, stacklevel=2)

    def prove_degree(self, wrapped: nn.Module, degree: int) -> IsolationReport:
        """Probe the model with `degree` ranks that share each pack, once. `prove` must have passed.

        If documents share prefixes (`prove_prefixes` has passed), such packs are probed, too. Nothing is repaired: what
        fails raises `PackingLeakError`. All ranks must call it.
        """
        if degree in self._proved_degrees:
            return self._proved_degrees[degree]
        reason = self._cannot_share()
        if reason is not None:
            raise PackingLeakError(
                f"A pack was to be shared by {degree} ranks, and {reason}. Only attention and mixers exchange tokens "
                "between ranks, and everything else sees a part of the pack. Set `tokens_per_rank=None` (documents are "
                "then at most as long as one rank can train)."
            )
        report = self._report_probe(wrapped, degree)
        report.raise_if_leaking(self.on_leak)
        if self.prefixes_are_proved:
            shared = self._report_probe(wrapped, degree, with_prefixes=True)
            if not shared.passed:
                raise PackingLeakError(
                    f"Documents that share prefixes were packed, {degree} ranks shared the pack, and "
                    f'{shared.summary()}. Each of the two alone has passed. Set `share_prefixes="off"` or '
                    "`tokens_per_rank=None`."
                )
        self._proved_degrees[degree] = report
        return report

    def prove_prefixes(self, wrapped: nn.Module) -> str | None:
        """Probe packs whose documents share prefixes; `prove` must have passed. All ranks must call it.

        Returns why documents must be packed whole, or None if they may share.
        """
        reason = self._cannot_share()
        rates = dropped_weights(text_config(base_model(self.model)))  # the probe runs without dropout
        if reason is None and rates:
            reason = "attention drops weights: " + ", ".join(f"`{name}={rate}`" for name, rate in rates.items())
        if reason is None:
            try:
                report = self._report_probe(wrapped, with_prefixes=True)
                reason = None if report.passed else f"where documents share prefixes, {report.summary()}"
            except KernelError as error:
                reason = f"where documents share prefixes, {' '.join(str(error).split())}"
        self.prefixes_are_proved = reason is None
        return reason

    def _cannot_share(self) -> str | None:
        """Why neither ranks nor documents can share with this model as it was proved; None if they may."""
        if self.is_unpacked:
            return f"the model is unpacked: {self.attention.reason}"
        if self.repaired:
            return "these modules are repaired: " + "; ".join(str(repair) for repair in self.repaired)
        if self.attention.name != ATTENTION_NAME and has_attention(base_model(self.model)):
            return f"the attention of the model is {self.attention.name!r}: {self.attention.reason}"
        return None

    def _report_probe(self, wrapped: nn.Module, degree: int = 1, *, with_prefixes: bool = False) -> IsolationReport:
        name = self.attention.name
        previous = self.attention.previous
        images = self.images
        settings: dict[str, Any] = {"images": images, "user_attention": previous, "shares": with_prefixes}
        prove = self._as_test(partial(check_packs, wrapped, self.max_length, degree, **settings))
        if self.recall is None or images is not None or self.repaired or self.is_unpacked:
            report = prove()
        else:
            hooks = [type(each).__name__ for each in self.own_hooks]
            case = (with_prefixes, self.max_length, degree, name, previous, str(self.dtype), hooks)
            report = self.recall(wrapped, prove, model=base_model(self.model), case=case)
        agree_on_ranks((report.isolated, report.equal))
        return replace(report, repaired=self.repaired)

    def _repair_leaks(self, wrapped: nn.Module) -> None:
        """Repair with the chosen attention, else with the model's own, whose masks may hold more than boundaries."""
        own = own_in_packs(base_model(self.model), self.attention.previous)
        for name in dict.fromkeys((self.attention.name, own)):
            if name != self.attention.name:
                set_attention(self.model, name)
            probe = make_probe(wrapped, self.images, user_attention=self.attention.previous)
            self._search = search = RepairSearch(probe, self._guard, self.max_length)
            try:
                with probe.undisturbed():
                    report = self._as_test(search.search_repairs)()
            except OwnAttentionError:
                search.give_up()
                continue
            if self.images is not None and report.passed:
                report = self._report_probe(wrapped)  # the search repairs and tests documents of text
            if report.passed:
                self.isolation = replace(report, repaired=search.repairs)
                if name != self.attention.name:
                    reason = f"the model's own, because {self.attention.name} does not support its masks"
                    self.attention = replace(self.attention, name=name, is_flash="flash" in name, reason=reason)
                    if self.enforce_flash_attention and self.device_type == "cuda":
                        warnings.warn(
                            f"attention {name!r} on packed batches is not flash attention: {reason}", stacklevel=2
                        )
                return
            search.give_up()
        self._search = None

    @property
    def _hooks(self) -> list[ModelHooks]:
        if self._unpacked is not None:
            return [*self.own_hooks, self._unpacked]
        return [*self.own_hooks, self._guard, *([] if self._search is None else self._search.hooks)]

    def _as_test(self, test: Callable[[], IsolationReport]) -> Callable[[], IsolationReport]:
        """Make a test, which may set other attention, that is not disturbed by `_restore_attention`."""

        def run() -> IsolationReport:
            self._guard.before_pack = None
            try:
                return test()
            finally:
                self._guard.before_pack = self._restore_attention

        return run

    def _restore_attention(self) -> None:
        """Set the tested attention again, with a warning, if another was set since `attach_packed_attention`."""
        current = own_attention(self.model)
        tested = self.attention.name
        if current == tested:
            return
        set_attention(self.model, tested)
        if self._takes_towers:
            set_tower_attention(base_model(self.model), TOWER_ATTENTION)
        warnings.warn(
            f"attn_implementation={current!r} was set on the model during training, and packs were tested with "
            f"{tested!r}: other attention may ignore the boundaries of documents. {tested!r} is set again. To read "
            "attention maps, set yours around the forward of a padded batch only.",
            stacklevel=2,
        )

    def attach_packed_attention(self) -> None:
        """Set the model up for packs; without effect if it is."""
        if self.has_packed_attention:
            return
        if own_attention(self.model) != self.attention.previous:  # changed after the choice, which depends on it
            self._forget_proofs()
            self._choose_attention()
        self.has_packed_attention = True
        if self.attention.name != self.attention.previous:
            set_attention(self.model, self.attention.name)
        if self._takes_towers:
            set_tower_attention(base_model(self.model), TOWER_ATTENTION)
        for hooks in self._hooks:
            hooks.install()
        self._head = unshard_lm_head(base_model(self.model))

    def restore_own_attention(self) -> None:
        """Restore the model as it was before `attach_packed_attention`; without effect if it is not attending."""
        if not self.has_packed_attention:
            return
        self.has_packed_attention = False
        set_tower_attention(base_model(self.model), REPLACED_ATTENTION)
        for hooks in self._hooks:
            hooks.remove()
        if self._head is not None:
            self._head.remove()
            self._head = None
        if self.attention.name != self.attention.previous:
            set_attention(self.model, self.attention.previous)

    def check_packed_attention(self, batch: dict[str, Any]) -> None:
        """Raise ValueError for a pack while the model rests: its own attention may not read boundaries."""
        if self.has_packed_attention or "cu_seq_lens_q" not in batch:
            return
        num = batch["cu_seq_lens_q"].numel() - 1
        raise ValueError(
            f"A pack of {num} document{'s' if num > 1 else ''} came to {type(base_model(self.model)).__name__} "
            f"outside of training and evaluation: there it has its own attention ({self.attention.previous}), which "
            "may ignore document boundaries. Use `trainer.evaluate()`, or `with trainer.packed_model.attending():`."
        )

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Within this context the model attends; on exit it rests, if it did before."""
        attended = self.has_packed_attention
        self.attach_packed_attention()
        try:
            yield
        finally:
            if not attended:
                self.restore_own_attention()


def prepare_for_packing(
    model: nn.Module,
    enforce_flash_attention: bool = True,
    dtype: torch.dtype | None = None,
    *,
    max_length: int | None = None,
    on_leak: OnLeak = "repair",
) -> AttentionChoice:
    """Prepare a model for packed batches in a custom training loop. Call it once, before the first batch.

    It does what the trainer does before its first step. It chooses attention that reads document boundaries, and tests
    on the model that no document changes another and that each equals itself alone. If this fails, the modules where
    information crosses run on each document separately, or the model runs on documents as rows of padded batches.
    No (T, T) mask is built for packs. The test costs as much as `check_isolation`; a repair needs some tens of forwards
    of short documents. With several processes all ranks must call it.

    Args:
        model: a transformers causal LM, with or without PEFT, on the device on which it will train; not wrapped yet.
        enforce_flash_attention: as in `SFTConfig`; False keeps the model's attention, with a warning.
        dtype: the dtype of autocast, if the loop uses it and it differs from that of the weights.
        max_length: the longest document of the run, in tokens; None tests the model up to its number of positions.
        on_leak: as in `SFTConfig`: "repair", "raise" or "unpack".

    Returns:
        The choice, with `.name`, `.is_flash` and `.reason`, which also says what was repaired.

    Raises:
        ValueError: no attention kernel fits the model, its dtype and the device. The message says what to change.
        PackingLeakError: documents influence each other, or are not what they are alone, also after `on_leak` was
            applied. The model is then as it was before.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> tiny = LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
    >>> prepare_for_packing(LlamaForCausalLM(tiny)).name
    'packfix_varlen'
    """
    inner = base_model(model)
    packed = PackedModel(
        model,
        dtype or inner.dtype,
        inner.device.type,
        max_length,
        on_leak=on_leak,
        enforce_flash_attention=enforce_flash_attention,
    )
    autocast = nullcontext() if dtype in (None, inner.dtype) else torch.autocast(inner.device.type, dtype)
    try:
        with autocast:
            packed.prove(model).raise_if_leaking(on_leak)
    except Exception:
        packed.restore_own_attention()
        raise
    repairs = "; repaired: " + "; ".join(map(str, packed.repaired)) if packed.repaired else ""
    return replace(packed.attention, reason=packed.attention.reason + repairs)
