"""A model and its packs: attention is chosen, isolation is proved, and what leaks is unpacked."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .attention import choose_attention, own_attention, set_attention
from .compat import gather_lm_head_with_model
from .config import SFTConfig
from .forwards import ModelHooks, PackedForwardGuard, base_model
from .isolation import check_isolation
from .probe import Probe
from .publishing import metrics
from .repair import Repair
from .search import RepairSearch, agreed
from .unpacking import UnpackedForward
from .verdict import IsolationReport


class DocumentNoise(ModelHooks):
    """NEFTune (arXiv 2310.05914): uniform noise of amplitude alpha / sqrt(L d), L the length of the document.

    In packed forwards in train mode, whoever calls the model. Probe, evaluation and generation have no noise.
    """

    def __init__(self, model: PreTrainedModel, alpha: float):
        super().__init__()
        self.model, self.alpha = model, alpha
        # Lengths and documents of the tokens, of each forward of the whole model that is running; None: not packed
        self._running: list[tuple[Tensor, Tensor] | None] = []
        self._num_rows = 0  # that the last of them has embedded

    def _register(self) -> list[RemovableHandle]:
        return [
            self.model.register_forward_pre_hook(self._enter, with_kwargs=True),
            # always_call: a forward that raises must not leave its documents to the next one
            self.model.register_forward_hook(self._leave, always_call=True),
            self.model.get_input_embeddings().register_forward_hook(self._add_noise),
        ]

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        bounds = kwargs.get("cu_seq_lens_q")
        self._running.append(None if bounds is None else (bounds.diff(), kwargs["seq_idx"]))
        self._num_rows = 0

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self._running:
            self._running.pop()

    def _add_noise(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        running = self._running[-1] if self._running else None
        if running is None or not module.training:
            return output
        lengths, index = running
        if output.shape[:2] == index.shape:
            length = lengths[index]
        else:  # where documents are unpacked they come as rows, longest first
            rows, first = lengths.sort(descending=True).values, self._num_rows % len(lengths)
            self._num_rows += len(output)
            length = rows[first : first + len(output), None]
        amplitude = self.alpha / (length * output.shape[-1]).sqrt()
        return output + torch.empty_like(output).uniform_(-1, 1) * amplitude.to(output.dtype).unsqueeze(-1)


class PackedModel:
    """What packed batches of `model` run on.

    Outside of packs the model is as its user gave it: `attend` sets the attention chosen and installs all hooks,
    `rest` undoes both. So the model is free for other trainers, ours or not, before, between and after runs.

    Attributes:
        attention: the implementation chosen, and why.
        attends: whether the model takes packs now.
        isolation: the verdict of the last probe; None before the first.
    """

    def __init__(self, model: nn.Module, args: SFTConfig, dtype: torch.dtype):
        self.model, self.args, self.dtype = model, args, dtype
        self.attends = False
        self._choose()

    def _choose(self) -> None:
        self.attention = choose_attention(
            self.model,
            self.args.enforce_flash_attention,
            self.dtype,
            device_type=self.args.device.type,  # the model may not be there yet
        )
        self.isolation: IsolationReport | None = None
        self._guard = PackedForwardGuard(base_model(self.model))
        self._search: RepairSearch | None = None
        self._unpacked: UnpackedForward | None = None
        alpha = self.args.neftune_noise_alpha
        self._noise = None if alpha is None else DocumentNoise(base_model(self.model), alpha)

    @property
    def is_proved(self) -> bool:
        """Whether the last probe found documents isolated and equal to themselves alone."""
        return self.isolation is not None and self.isolation.isolated and self.isolation.equal

    @property
    def is_unpacked(self) -> bool:
        """Whether the backbone sees documents as rows of padded batches."""
        return self._unpacked is not None

    @property
    def repaired(self) -> list[Repair]:
        """What was repaired, and how; empty where nothing had to be."""
        return [] if self._search is None else self._search.repairs

    def prove(self, wrapped: nn.Module) -> IsolationReport:
        """Attend, probe the model as it is `wrapped`; on a leak do what `on_leak` says, and probe again."""
        self.attend()
        gather_lm_head_with_model(base_model(self.model))
        self.isolation = found = self._check(wrapped)
        if not self.is_proved and self.args.on_leak == "repair" and self._search is None and self._unpacked is None:
            self._repair(wrapped)
        if not self.is_proved and self.args.on_leak != "raise" and self._unpacked is None:
            self._unpack()
            self.isolation = self._check(wrapped)
            reason = f"UNPACKED, documents as rows of padded batches, because {found.summary()}"
            self.attention = replace(self.attention, name=self.attention.previous, is_flash=False, reason=reason)
        return self.isolation

    def _check(self, wrapped: nn.Module) -> IsolationReport:
        found = check_isolation(wrapped, self.args.max_length)
        agreed((found.isolated, found.equal))
        return replace(found, repaired=self.repaired)

    def _repair(self, wrapped: nn.Module) -> None:
        """Repair on the attention chosen, else on the model's own, whose masks may say more than boundaries."""
        for name in dict.fromkeys((self.attention.name, self.attention.previous)):
            if name != self.attention.name:
                set_attention(self.model, name)
            probe = Probe(wrapped)
            self._search = search = RepairSearch(probe, self._guard, self.args.max_length)
            with probe.undisturbed():
                found = search.run()
            if found.isolated and found.equal:
                self.isolation = replace(found, repaired=search.repairs)
                if name != self.attention.name:
                    reason = f"the model's own, for {self.attention.name} cannot say what its masks say"
                    self.attention = replace(self.attention, name=name, is_flash="flash" in name, reason=reason)
                    if self.args.enforce_flash_attention and self.args.device.type == "cuda":
                        warnings.warn(
                            f"attention {name!r} on packed batches is not flash attention: {reason}", stacklevel=2
                        )
                return
            search.give_up()
        self._search = None

    def _unpack(self) -> None:
        for hooks in self._hooks:
            hooks.remove()
        self._search = None
        set_attention(self.model, self.attention.previous)
        self._unpacked = UnpackedForward(self.model)
        for hooks in self._hooks:
            hooks.install()

    @property
    def _hooks(self) -> list[ModelHooks]:
        hooks: list[ModelHooks] = [] if self._noise is None else [self._noise]
        if self._unpacked is not None:
            return [*hooks, self._unpacked]
        return [*hooks, self._guard, *([] if self._search is None else self._search.hooks)]

    def attend(self) -> None:
        """Make the model take packs; without effect where it does."""
        if self.attends:
            return
        if own_attention(self.model) != self.attention.previous:  # set since the choice was made, which stood on it
            self._choose()
        self.attends = True
        if self.attention.name != self.attention.previous:
            set_attention(self.model, self.attention.name)
        for hooks in self._hooks:
            hooks.install()

    def rest(self) -> None:
        """Give the model back as it was; without effect where it is."""
        if not self.attends:
            return
        self.attends = False
        for hooks in self._hooks:
            hooks.remove()
        if self.attention.name != self.attention.previous:
            set_attention(self.model, self.attention.previous)

    def check_attends(self, batch: dict[str, Any]) -> None:
        """Refuse a pack while the model rests: its own attention may not read the boundaries, nor is it repaired."""
        if self.attends or "cu_seq_lens_q" not in batch:
            return
        raise ValueError(
            f"A pack of {batch['cu_seq_lens_q'].numel() - 1} documents came to {type(base_model(self.model)).__name__} "
            f"while no packs run: outside of training and evaluation it has its own attention "
            f"({self.attention.previous}), which may not read the boundaries. Call `trainer.packed_model.attend()` "
            "first and `rest()` after, or use `trainer.evaluate()`."
        )

    @contextmanager
    def attending(self) -> Iterator[None]:
        """While it runs the model attends; then it rests again, if it did."""
        attended = self.attends
        self.attend()
        try:
            yield
        finally:
            if not attended:
                self.rest()


class BeforeFirstStep(TrainerCallback):
    """Proves isolation on the model as it will train, on all ranks together; shows the report and saves it."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        with trainer.compute_loss_context_manager():
            isolation = trainer.packed_model.prove(trainer.model_wrapped)
        attention = trainer.packed_model.attention
        trainer.packing_report = replace(
            trainer.packing_report, isolation=isolation, attention=f"{attention.name}: {attention.reason}"
        )
        if args.packing_report and trainer.is_world_process_zero():
            trainer.packing_report.show()
            trainer.packing_report.save(args.output_dir)
        isolation.raise_if_leaking(args.on_leak)
        # into the loggers, and with the log history into trainer_state.json
        trainer.log(
            {
                "isolation/max_change": isolation.max_change,
                "isolation/max_difference": isolation.max_difference,
                "isolation/tolerance": isolation.tolerance,
                "isolation/repaired_modules": sum(repair.count for repair in isolation.repaired),
                "isolation/unpacked": int(trainer.packed_model.is_unpacked),
                **metrics(trainer.packing_report),
            }
        )

    def end(self) -> None:
        """Training is over, or has failed: the model is free for other uses."""
        self.trainer.packed_model.rest()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What was cut, split and dropped stays with the weights that were trained without it."""
        if args.packing_report and self.trainer.is_world_process_zero():
            folder = self.trainer._get_output_dir(getattr(self.trainer, "_trial", None))
            self.trainer.packing_report.save(f"{folder}/{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
