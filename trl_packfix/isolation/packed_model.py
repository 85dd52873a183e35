"""Set a model up for packs: choose its attention, test isolation, and repair or unpack a model that leaks.

The trainer makes one `PackedModel` for its model (`training/loading.py`), and `prepare_for_packing` does the same for a
custom training loop. Before the first step `PackedModel.prove` runs the leak probe (`check_isolation.py`). A model that
passes trains on packs. One that fails is repaired (`search.py`), or unpacked (`unpacking.py`), and probed again.

Words:

    proved     the probe has found documents in packs isolated, and equal to themselves alone
    repaired   some modules of the model run on each document separately
    unpacked   the backbone of the model gets the documents of a pack as rows of a padded batch
    previous   the attention that the user gave the model, and that it has outside of packs
    towers     parts of a model that read no text, but images, for example
    feature    what the packs of a run have beside whole documents of text: shared prefixes, images, or both
               (`feature.py`)
    plain      a pack without shared prefixes. Such packs are proved first. Their feature is `Feature.plain`: images, or
               none (`PLAIN`)
    degree     number of ranks that share each pack
    threshold  a length above which the model computes a document differently, such as a sliding window
    wrapped    inside of PEFT, DDP or an engine (DeepSpeed, FSDP)
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..attention.choice import AttentionChoice, choose_attention, dropped_weights, own_attention, set_attention
from ..attention.forwards import ModelHooks, PackedForwardGuard
from ..attention.kernel_errors import KernelError, OwnAttentionError
from ..attention.masked import own_in_packs
from ..attention.models import base_model, has_attention, text_config
from ..attention.tower_support import TowerSupport, tower_support
from ..attention.varlen import ATTENTION_NAME
from ..compat import gather_lm_head_with_model, run_hooks_inside_adapters, unshard_lm_head
from ..feature import PLAIN, Feature
from ..wording import count_of
from .check_isolation import check_packs
from .isolation_report import IsolationReport, PackingLeakError
from .probe import Probe
from .repair import Repair
from .search import RepairSearch, agree_on_ranks
from .unpacking import UnpackedForward

OnLeak = Literal["repair", "raise", "unpack"]
# Reasons why only `packfix_varlen` can be used: what other attention lacks, as the end of a sentence about it
EXCHANGES = "does not exchange tokens between the ranks that share a pack"
LOOKS_UP = "does not look up the keys that documents share"


class PackedModel:
    """A model with the attention, hooks and repairs that packed batches need.

    `attach_packed_attention` sets the chosen attention and installs all hooks, and `restore_own_attention` undoes both.
    So the model is unchanged outside of packs, and other trainers can use it before, between and after runs.

    Args:
        model: a transformers causal LM, with or without PEFT. It may be wrapped later.
        dtype: the dtype that reaches the attention kernel: that of autocast or of the engine, else of the weights.
        device_type: where the model will train, "cpu", "cuda", "mps", ... The model may still be elsewhere.
        max_length: longest document of the run, in tokens; None tests every threshold of the model.
        on_leak: what is done with a model that leaks: "repair", "raise" or "unpack".
        enforce_flash_attention: whether the attention of the model is replaced by one that is faster on packs.
        own_hooks: further hooks of the run to install while the model takes packs, such as the noise of NEFTune.
        shares_packs: whether ranks share packs (sequence parallelism).
        feature: the feature of the packs. `prove` proves plain packs (`Feature.plain`), and `prove_feature` packs with
            the feature.

    Attributes:
        attention: the chosen attention, with the reason.
        isolation: the result of the last probe; None before the first.
        recall: returns the remembered report of an earlier start, or else runs the probe (`training/remembered.py`);
            None if reports are not remembered.
        has_packed_attention: whether the model is set up for packs now.
        feature_is_proved: whether packs with the feature have passed the probe.
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
        feature: Feature = PLAIN,
    ):
        if on_leak not in get_args(OnLeak):
            known = ", ".join(map(repr, get_args(OnLeak)))
            raise ValueError(f"`on_leak={on_leak!r}` was given. There is no such choice. Set one of {known}.")
        self.model = model
        self.dtype = dtype
        self.device_type = device_type
        self.max_length = max_length
        self.on_leak = on_leak
        self.enforce_flash_attention = enforce_flash_attention
        self.own_hooks = own_hooks
        self._needs_varlen: str | None = None  # why only `packfix_varlen` can be used
        if shares_packs:
            self._needs_varlen = EXCHANGES
        elif feature.is_on:
            self._needs_varlen = LOOKS_UP
        self.feature = feature
        # A `TowerSupport` whose methods change nothing, if the packs of the run have no images
        self._towers = tower_support() if feature.plain.has_towers else TowerSupport()
        self.recall: Callable[..., IsolationReport] | None = None
        self.has_packed_attention = False
        run_hooks_inside_adapters(model)  # with peft 0.20 the hooks on the model would not run
        self._head_hook: RemovableHandle | None = None  # keeps the LM head of a sharded model whole
        # By name of an attention: why it is not used
        self._refusals: dict[str, str] = {}
        self._choose_attention()

    def _choose_attention(self) -> None:
        """Choose the attention of packs by the refusals so far, and forget all reports, repairs and unpacking."""
        # 1. Choose the attention of the part that reads text. `_refusals` may also have the attention of towers.
        tower_attention = self._towers.attention_name
        choose = partial(
            choose_attention,
            self.model,
            self.enforce_flash_attention,
            self.dtype,
            device_type=self.device_type,
            refusals={name: reason for name, reason in self._refusals.items() if name != tower_attention},
        )
        needs_varlen = self._needs_varlen
        # Shared prefixes need `packfix_varlen`. If it does not run on flash kernels here, but another attention does,
        # choose the other one, because flash attention saves more time than shared prefixes. `prove_feature` then finds
        # that packs cannot share prefixes. Only the final choice below may warn, and not these two trials.
        if needs_varlen == LOOKS_UP:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if choose().is_flash and not choose(needs_varlen=needs_varlen).is_flash:
                    needs_varlen = None
        self.attention = choose(needs_varlen=needs_varlen)
        # 2. Add to its reason what the report says about towers. Some may keep their own attention, for this reason:
        why_own_attention = self._refusals.get(tower_attention)
        if why_own_attention is None:
            why_own_attention = (
                "it is the user's choice" if self.enforce_flash_attention else "enforce_flash_attention=False"
            )
        note = self._towers.note(self._inner, self._takes_towers, why_own_attention)
        self.attention = replace(self.attention, reason=self.attention.reason + note)
        # 3. Begin anew, without proofs, repairs or unpacking: proofs hold for one attention only.
        self.isolation: IsolationReport | None = None
        self.feature_is_proved = False
        self._proved_degrees: dict[int, IsolationReport] = {}
        # The guard is the hooks that check each pack and make its boundaries known inside the model. Usually the model
        # itself gets the pack. With hooks such as those of `pack_forward`, the model gets padded batches, and a module
        # inside it gets packs, so the guard needs hooks on this module, too.
        modules_of_hooks = [module for hooks in self.own_hooks for module in hooks.modules_given_packs]
        self._guard = PackedForwardGuard(self._inner, modules_of_hooks, self._restore_attention)
        self._search: RepairSearch | None = None
        self._unpacked: ModelHooks | None = None

    @property
    def _inner(self) -> PreTrainedModel:
        """The transformers model inside PEFT."""
        return base_model(self.model)

    @property
    def _takes_towers(self) -> bool:
        """Whether towers get the attention of this package in packs, as far as they can run on it."""
        name = self._towers.attention_name
        return bool(name) and self.enforce_flash_attention and name not in self._refusals

    @property
    def is_proved(self) -> bool:
        """Whether the last probe found documents isolated and equal to themselves alone."""
        return self.isolation is not None and self.isolation.passed

    @property
    def is_unpacked(self) -> bool:
        """Whether the backbone gets the documents of packs as rows of padded batches."""
        return self._unpacked is not None

    @property
    def repaired(self) -> list[Repair]:
        """The repairs; empty if none were needed."""
        return [] if self._search is None else self._search.repairs

    def prove(self, wrapped: nn.Module) -> IsolationReport:
        """Set the model up for packs and probe it. If it leaks, apply `on_leak` and probe again.

        Args:
            wrapped: the model inside of its wrappers, as it will train.

        Returns:
            The report of the last probe. With `on_leak="raise"`, the caller raises the error if the report is bad.

        Raises:
            KernelError: no attention kernel computes this model.
        """
        self.attach_packed_attention()
        # TRL's fused loss reads the LM head without calling it, so a sharded head must be gathered for it: first for
        # ZeRO-3, then for FSDP2. No hook was needed if the head was whole in `attach_packed_attention`, but the engine
        # may have sharded it since.
        gather_lm_head_with_model(self._inner)
        if self._head_hook is None:
            self._head_hook = unshard_lm_head(self._inner)
        report = self._judge_packs(wrapped)
        self.isolation = report
        # If the model also fails on a single document without packing, packs are not the cause.
        if report.passed or self.is_unpacked or not report.runs_unpacked:
            return report
        if self.on_leak == "repair" and self._search is None:
            self._repair_leaks(wrapped)
        # With "unpack" no repair was tried, and with "repair" it may have failed.
        if self.on_leak != "raise" and not self.is_proved:
            return self.unpack(wrapped, reason=report.summary())
        return self.isolation

    def prove_changed(self, wrapped: nn.Module) -> IsolationReport:
        """Choose attention and prove the model again, because its modules have changed since the last proof."""
        self.restore_own_attention()
        self._choose_attention()
        return self.prove(wrapped)

    def unpack(self, wrapped: nn.Module, reason: str) -> IsolationReport:
        """Run documents as rows of padded batches from now on, and return the report of a probe of such rows.

        Args:
            reason: why, as a clause. It becomes a part of the reason of the attention.
        """
        self.restore_own_attention()
        self._search = None
        # `UnpackedForward` itself or, with images, a class that does the same for models with vision towers
        unpacked_class = self.feature.plain.make_unpacked_class(UnpackedForward)
        self._unpacked = unpacked_class(self.model)
        text = f"UNPACKED, documents as rows of padded batches, because {reason}"
        self.attention = replace(self.attention, name=self.attention.previous, is_flash=False, reason=text)
        self.attach_packed_attention()
        self.isolation = self._report_probe(wrapped)
        return self.isolation

    def _judge_packs(self, wrapped: nn.Module) -> IsolationReport:
        """Probe packs. If a kernel refuses the model or computes it wrongly, choose attention without that kernel.

        Returns:
            The report with the attention that was chosen in the end, `self.attention`.
        """
        report = self._probe_usable_kernels(wrapped)
        # If packs leak, a kernel may be at fault: a flash kernel, or the attention of towers. For each of them, probe
        # once more without it. If the model passes then, the kernel was at fault.
        suspects = []
        name = self.attention.name
        if "flash" in name and name != self.attention.previous:
            suspects.append(name)
        if self._towers.has_attention(self._inner):
            suspects.append(self._towers.attention_name)
        for kernel in suspects:
            if report.passed:
                break
            self._refuse_kernel(kernel, report.summary())
            report_without = self._probe_usable_kernels(wrapped)
            if report_without.passed:
                return report_without
            self._refuse_kernel(kernel, None)  # packs leak without it, too, so it may be used again
        return report

    def _probe_usable_kernels(self, wrapped: nn.Module) -> IsolationReport:
        """Probe packs, and again without each kernel that raises an error, until no kernel does."""
        while True:
            try:
                return self._report_probe(wrapped)
            # All ranks raise the same error, because it depends on the model, the dtype and the device.
            except KernelError as error:
                if error.kernel is None:  # the attention of the part that reads text
                    self._replace_kernel(error)
                else:  # the attention of a tower
                    self._refuse_kernel(error.kernel, " ".join(str(error).split()))

    def _refuse_kernel(self, kernel: str, reason: str | None) -> None:
        """Exclude an attention for a reason, or allow it again if `reason` is None. Then set the model up again."""
        self.restore_own_attention()
        if reason is None:
            del self._refusals[kernel]
        else:
            self._refusals[kernel] = reason
        self._choose_attention()
        self.attach_packed_attention()

    def _replace_kernel(self, error: KernelError) -> None:
        """Switch to another attention after a kernel raised `error`, with a warning.

        Raises:
            KernelError: no other attention can be used. It is `error`.
        """
        name = self.attention.name
        reason = " ".join(str(error).split())
        # With an `OwnAttentionError` the model passes more to its attention than `packfix_varlen` supports. Packs then
        # keep the model's own attention. `cause` is the message without the remedy. With other errors another kernel
        # may help, unless this was the last one.
        cause = error.cause if isinstance(error, OwnAttentionError) else None
        is_last_kernel = name == ATTENTION_NAME and cause is None
        if not self.enforce_flash_attention or is_last_kernel:
            raise error
        self._refuse_kernel(name, cause or reason)
        # The choice is the same again if nothing else can be used: the model has attention code of its own, or both
        # `packfix_varlen` and the model's own attention have failed
        if self.attention.name == name:
            self.restore_own_attention()
            raise error
        message = (
            f"attention {name!r} cannot compute this model: {reason} {self.attention.name!r} is used for packed "
            "batches instead. Set attn_implementation to another kernel if you have one that can."
        )
        if cause is not None:
            message = (
                f"packs keep the model's own attention, {self.attention.name!r}, with a mask of T x T entries for a "
                f"pack of T tokens: {cause}. Set a smaller max_length if memory is short."
            )
        warnings.warn(message, stacklevel=2)

    def prove_degree(self, wrapped: nn.Module, degree: int) -> IsolationReport:
        """Probe the model with `degree` ranks that share each pack, or return the earlier report.

        `prove` must have passed. If `prove_feature` has passed, packs with the feature are probed, too. All ranks
        must call this method.

        Raises:
            PackingLeakError: the model fails on shared packs. Nothing is repaired then.
        """
        if degree in self._proved_degrees:
            return self._proved_degrees[degree]
        reason = self.reason_against_sharing()
        if reason is not None:
            raise PackingLeakError(
                f"A pack was to be shared by {degree} ranks, and {reason}. Only attention and mixers exchange tokens "
                "between ranks, and everything else sees a part of the pack. Set `tokens_per_rank=None` (documents are "
                "then at most as long as one rank can train)."
            )
        report = self._report_probe(wrapped, degree)
        report.raise_if_leaking(self.on_leak)
        if self.feature_is_proved:
            feature = self.feature
            feature_report = self._report_probe(wrapped, degree, with_feature=True)
            if not feature_report.passed:
                raise PackingLeakError(
                    f"{feature.documents_text.capitalize()} were packed, {degree} ranks shared the pack, and "
                    f"{feature_report.summary()}. Each of the two alone has passed. Set {feature.off_text} or "
                    "`tokens_per_rank=None`."
                )
        self._proved_degrees[degree] = report
        return report

    def prove_feature(self, wrapped: nn.Module) -> str | None:
        """Probe packs with the feature. `prove` must have passed, and all ranks must call this method.

        Returns:
            Why packs cannot have the feature, or None if they can.
        """
        assert self.feature.is_on, "packs have no feature, so a proof would say nothing of one"
        reason = self.reason_against_sharing()
        # Attention that looks up shared keys cannot drop weights. The probe, which runs without dropout, would not
        # fail.
        rates = dropped_weights(text_config(self._inner))
        if reason is None and rates:
            reason = "attention drops weights: " + ", ".join(f"`{name}={rate}`" for name, rate in rates.items())
        if reason is None:
            try:
                report = self._report_probe(wrapped, with_feature=True)
                reason = None if report.passed else f"where {self.feature.packs_text}, {report.summary()}"
            except KernelError as error:
                reason = f"where {self.feature.packs_text}, {' '.join(str(error).split())}"
        self.feature_is_proved = reason is None
        # An error that the model raises may end with a remedy. Whoever gets the reason adds a remedy of its own
        return reason and reason.removesuffix(f" Set {self.feature.off_text}.").removesuffix(".")

    def reason_against_sharing(self) -> str | None:
        """Return why this model takes neither packs on several ranks nor shared prefixes; None if it may take both."""
        if self.is_unpacked:
            return f"the model is unpacked: {self.attention.reason}"
        if self.repaired:
            return "these modules are repaired: " + "; ".join(str(repair) for repair in self.repaired)
        if self.attention.name != ATTENTION_NAME and has_attention(self._inner):
            return f"the attention of the model is {self.attention.name!r}: {self.attention.reason}"
        return None

    def _report_probe(self, wrapped: nn.Module, degree: int = 1, *, with_feature: bool = False) -> IsolationReport:
        """Run the leak probe, or recall the report of an equal probe of an earlier start.

        Args:
            with_feature: whether packs have the feature; False: plain packs.

        Raises:
            RuntimeError: ranks have different results.
        """
        attention = self.attention
        run_probe = partial(
            check_packs,
            wrapped,
            self.max_length,
            degree,
            user_attention=attention.previous,
            feature=self.feature if with_feature else self.feature.plain,
        )
        if self.recall is None or self.repaired or self.is_unpacked:
            report = run_probe()
        else:
            hook_names = [type(hooks).__name__ for hooks in self.own_hooks]
            # What a report depends on, beside the model
            case = (
                with_feature,
                self.max_length,
                degree,
                attention.name,
                attention.previous,
                str(self.dtype),
                hook_names,
            )
            report = self.recall(wrapped, run_probe, model=self._inner, case=case)
        agree_on_ranks((report.isolated, report.equal))  # raises if they differ
        return replace(report, repaired=self.repaired)

    def _repair_leaks(self, wrapped: nn.Module) -> None:
        """Search repairs with the chosen attention, then with the model's own, and keep the first that pass the probe.

        A model may need its own attention, because the masks that it makes may hold more than boundaries.
        """
        # The name under which the model's own attention runs on packs
        own_name = own_in_packs(self._inner, self.attention.previous)
        chosen = self.attention
        for name in dict.fromkeys((chosen.name, own_name)):
            if name != chosen.name:
                set_attention(self.model, name)
                reason = f"the model's own, because {chosen.name} does not support its masks"
                self.attention = replace(chosen, name=name, is_flash="flash" in name, reason=reason)
            probe_class = self.feature.plain.make_probe_class(Probe)
            probe = probe_class(wrapped, user_attention=self.attention.previous)
            search = RepairSearch(probe, self._guard, self.max_length)
            self._search = search
            try:
                # `undisturbed`: without dropout and the user's hooks; restores buffers and random state
                with probe.undisturbed():
                    report = search.search_repairs()
            except OwnAttentionError:  # the model does not run on `packfix_varlen`; try its own attention
                search.give_up()
                continue
            # The search has tested documents of text only. If the probe has examples of other kinds, test them now.
            if probe.has_further_examples and report.passed:
                report = self._report_probe(wrapped)
            if report.passed:
                self.isolation = replace(report, repaired=search.repairs)
                if name != chosen.name and self.enforce_flash_attention and self.device_type == "cuda":
                    warnings.warn(
                        f"attention {name!r} on packed batches is not flash attention: {self.attention.reason}",
                        stacklevel=2,
                    )
                return
            search.give_up()
        # The model is left with the attention of the last round, without repairs. `prove` reports it, or unpacks the
        # model.
        self._search = None

    @property
    def _hooks(self) -> list[ModelHooks]:
        """All hooks to install for packs, in this order."""
        if self._unpacked is not None:
            return [*self.own_hooks, self._unpacked]
        repairs = [] if self._search is None else self._search.hooks
        return [*self.own_hooks, self._guard, *repairs]

    def _restore_attention(self) -> None:
        """Set the tested attention again, with a warning, if it was replaced. The guard calls this before each pack."""
        current = own_attention(self.model)
        tested = self.attention.name
        if current == tested:
            return
        set_attention(self.model, tested)
        if self._takes_towers:
            self._towers.set_attention(self._inner, True)
        warnings.warn(
            f"attn_implementation={current!r} was set on the model during training, and packs were tested with "
            f"{tested!r}: other attention may ignore the boundaries of documents. {tested!r} is set again. To read "
            "attention maps, set yours around the forward of a padded batch only.",
            stacklevel=2,
        )

    def attach_packed_attention(self) -> None:
        """Set the chosen attention on the model and install all hooks. Without effect if this was done."""
        if self.has_packed_attention:
            return
        # The choice depends on the model's own attention, which the user may have changed since.
        if own_attention(self.model) != self.attention.previous:
            self._choose_attention()
        self.has_packed_attention = True
        if self.attention.name != self.attention.previous:
            set_attention(self.model, self.attention.name)
        if self._takes_towers:
            self._towers.set_attention(self._inner, True)
        for hooks in self._hooks:
            hooks.install()
        self._head_hook = unshard_lm_head(self._inner)

    def restore_own_attention(self) -> None:
        """Restore the model as it was before `attach_packed_attention`. Without effect if that was not called."""
        if not self.has_packed_attention:
            return
        self.has_packed_attention = False
        self._towers.set_attention(self._inner, False)
        for hooks in self._hooks:
            hooks.remove()
        if self._head_hook is not None:
            self._head_hook.remove()
            self._head_hook = None
        if self.attention.name != self.attention.previous:
            set_attention(self.model, self.attention.previous)

    def check_packed_attention(self, batch: dict[str, Any]) -> None:
        """Raise ValueError for a pack while the model has its own attention, which may not read boundaries."""
        if self.has_packed_attention or "cu_seq_lens_q" not in batch:
            return
        num_documents = batch["cu_seq_lens_q"].numel() - 1
        raise ValueError(
            f"A pack of {count_of(num_documents, 'document')} came to {type(self._inner).__name__} "
            f"outside of training and evaluation: there it has its own attention ({self.attention.previous}), which "
            "may ignore document boundaries. Use `trainer.evaluate()`, or `with trainer.packed_model.attending():`."
        )

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Within this context the model has the attention of packs; on exit it is as it was before."""
        had_packed_attention = self.has_packed_attention
        self.attach_packed_attention()
        try:
            yield
        finally:
            if not had_packed_attention:
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

    This function does what [`SFTTrainer`] does before its first step. It chooses an attention implementation that reads
    document boundaries and builds no (T, T) mask. Then it tests on the model that no document of a pack changes another
    document, and that each equals itself alone. If a model fails, the modules where information crosses run on each
    document separately or, if that does not help, the model runs on documents as rows of padded batches.

    The test costs as much as [`check_isolation`]. A repair needs some tens of forwards of short documents. In a
    distributed run all ranks must call this function.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            A causal LM on the device on which it will train, not yet wrapped by DDP or an engine. It is changed in
            place.
        enforce_flash_attention (`bool`, *optional*, defaults to `True`):
            Whether to replace the model's attention by one that is faster on packs, as in [`SFTConfig`]. If `False`,
            the model keeps its attention, with a warning.
        dtype (`torch.dtype`, *optional*):
            The dtype of autocast, if the loop uses autocast and its dtype differs from that of the weights.
        max_length (`int`, *optional*):
            The longest document of the run, in tokens. If `None`, the model is tested up to its number of positions.
        on_leak (`str`, *optional*, defaults to `"repair"`):
            What to do with a model that fails: `"repair"` modules and, if that does not help, unpack; `"raise"`; or
            `"unpack"`, as in [`SFTConfig`].

    Returns:
        `AttentionChoice`: The chosen attention, with its `name`, whether it `is_flash`, and the `reason`, which also
        says what was repaired.

    Raises:
        ValueError: If no attention kernel fits the model, its dtype and the device. The message says what to change.
        PackingLeakError: If documents change each other, or are not what they are alone, even after `on_leak` was
            applied. The model is then as it was before.

    Example:

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
    except BaseException:  # also Ctrl-C: the caller gets nothing by which the model could be restored
        packed.restore_own_attention()
        raise
    reason = packed.attention.reason
    if packed.repaired:
        reason += "; repaired: " + "; ".join(map(str, packed.repaired))
    return replace(packed.attention, reason=reason)
