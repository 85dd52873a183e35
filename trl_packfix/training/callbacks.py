"""The callbacks that a trainer adds to itself: what it proves, reports and refuses while it trains.

`trainer.py` adds them in its constructor, and transformers calls them:

    BeforeTraining          checks the loss and the evaluation sets when training starts, and prints what is trained
    CheckAdapterGradients   refuses adapters without a gradient, in the first optimizer step
    BeforeFirstStep         proves on the wrapped model that documents in packs are isolated, compares the first step
                            with unpacked training (`first_step.py`), and shows the packing report

Other callbacks are in `stream_source.py`, `compiled_layers.py` and `memory.py`.

Words: a *pack* is one sequence of several documents. The model is *wrapped* when an engine (DDP, FSDP, DeepSpeed) has
prepared it. Documents are *isolated* if no document of a pack changes what the model computes for another document. If
they are not, single modules of the model may be *repaired*: each of them gets one document at a time. Or the model may
be *unpacked*: then it computes the documents of a pack as rows of a padded batch. A *feature* is an option of packs,
such as `share_prefixes`. Several ranks may share a pack (`tokens_per_rank`), and their number is its *degree*.
"""

import logging
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from transformers import PrinterCallback, TrainerCallback
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..attention.choice import head_dim
from ..attention.dense import LONG_DOCUMENT
from ..attention.models import base_model, head_counts, text_config
from ..attention.packed_forward import ATTENTION_NAME
from ..compat import callbacks_left_out, walk_modules
from ..data.model_memory import ROWS_PER_DOCUMENT
from ..isolation.isolation_report import IsolationReport
from ..isolation.user_hooks import describe_hooks, parameters_unchanged
from ..reporting.page import STATE_FILE
from ..reporting.report import metrics
from ..wording import count_of
from .choices import RunSettings
from .compiled_layers import describe_compilation, layers_uncompiled
from .conflicts import experimental_choices, refuse_conflicts
from .evaluation import Evaluation
from .first_step import FirstStep
from .lm_head import check_fused_head
from .loading import TrainingData
from .objective import Objective
from .progress import proof_status
from .proofs import prove_degrees, prove_feature
from .step_comparison import StepComparison
from .trainer_view import TrainerView, complete_report

logger = logging.getLogger(__name__)

MUCH_GIB = 0.5  # memory that is worth a line in the report
# The keys of the log, with their unit and description. `tools/logged.py` makes docs/logging.md from them
LOGGED = {
    "isolation/max_change": ("relative", "largest change of a document when another one changes"),
    "isolation/max_difference": ("relative", "largest difference of a document in a pack from itself alone"),
    "isolation/tolerance": ("relative", "what rounding explains"),
    "isolation/repaired_modules": ("modules", "that see each document separately"),
    "first_step/loss_gap": ("relative", "difference of the loss of the first step, packed and unpacked"),
    "first_step/gradient_gap": ("relative", "largest relative difference of any parameter's gradient"),
    "isolation/unpacked": ("0 or 1", "whether documents run as rows of padded batches"),
}


class BeforeTraining(TrainerCallback):
    """Prints what is trained. Refuses evaluation sets without a trained token, and a replaced `compute_loss`."""

    def __init__(self, trainer: TrainerView, data: TrainingData, objective: Objective, *, evaluation: Evaluation):
        self._trainer = trainer
        self._data = data
        self._objective = objective
        self._evaluation = evaluation

    def on_train_begin(self, *arguments: object, **kwargs: object) -> None:
        """Check the fused LM head and the evaluation sets, and print which tokens are trained."""
        trainer = self._trainer
        args = self._trainer.args
        self._evaluation.forget_unlogged()  # the report is logged next
        if self._objective.replaces_trl_loss and trainer.compute_loss_func is None:
            # The loss will be computed by a fused LM head, and not by a function of the user. `check_fused_head` warns
            # if its logits differ from those of the model's own LM head. If they do, `first_step.py` does not compare
            # the loss with the model's own logits.
            with trainer.compute_loss_context_manager():
                self._objective.fused_head_is_exact = check_fused_head(
                    trainer.model_wrapped, base_model(trainer.model), self._data.attention_dtype
                )
        if args.packing:
            self._warn_of_uneven_micro_batches()
        else:  # with packing, the packing report has these lines
            trainer.accelerator.print(f"Trained tokens: {self._data.trained_line()}")
            if self._data.data_report is not None:
                # The line says whether every text of the dataset is in the tokens once
                trainer.accelerator.print(f"Data: {self._data.data_report.line()}")
        if args.eval_strategy != "no" or args.eval_on_start:
            self._evaluation.check_evaluation_sets()

    def _warn_of_uneven_micro_batches(self) -> None:
        """Warn if a loss of the user's averages over micro-batches that have unequally many trained tokens."""
        # Which documents are in which step of the first epoch, and the trained tokens of each document; None for a
        # stream
        schedule, trained = self._data.source.first_schedule()
        warning = self._trainer.user_code.describe_uneven_micro_batches(schedule, trained)
        if warning is not None and self._trainer.is_world_process_zero():
            logger.warning(warning)

    def on_pre_optimizer_step(self, *arguments: object, **kwargs: object) -> None:
        """Refuse a subclass with a `compute_loss` that does not call the method of this package."""
        # `compute_loss` of this package sets `is_scored` in each step. If it did not run, a subclass has replaced it,
        # and `refuse_conflicts` raises ValueError. On a rank with dummies only the subclass did not run either
        if self._trainer.user_code.has_batches and not self._objective.totals.is_scored:
            refuse_conflicts(
                RunSettings(args=self._trainer.args, user_loss=f"{type(self._trainer).__name__}.compute_loss")
            )


def backward_note(model: nn.Module, most_documents: int | None) -> str:
    """Return a note for the report on the memory of flash attention's backward; "" if it is less than `MUCH_GIB`.

    Args:
        model: the model, for the sizes of its heads.
        most_documents: the largest number of documents in a micro-batch. For each of them, flash attention adds
            `ROWS_PER_DOCUMENT` rows to the buffer in which its backward sums gradients.
    """
    config = text_config(base_model(model))
    width = -(-head_dim(config) // 32) * 32  # the kernels round the size of a head up to a multiple of 32
    rows = ROWS_PER_DOCUMENT * (most_documents or 0)
    needed = rows * max(head_counts(config), default=0) * width * torch.float32.itemsize / 2**30
    if needed < MUCH_GIB:
        return ""
    return (
        f"; its backward needs {needed:.1f} GiB more for the {most_documents:,} documents of the fullest micro-batch "
        f"({ROWS_PER_DOCUMENT} rows in fp32 for each): lower per_device_train_batch_size if memory runs out"
    )


class BeforeFirstStep(TrainerCallback):
    """Proves isolation on the wrapped model, compares the first step with unpacked training, and shows the report."""

    def __init__(self, trainer: TrainerView, data: TrainingData, first_step: FirstStep):
        self._trainer = trainer
        self._data = data
        self._first_step = first_step
        # The modules of the model when it was last proved. They are kept, because a deleted module may leave its
        # address, and with it its `id`, to the module that replaces it
        self._proved_modules: list[nn.Module] = []

    def on_step_begin(self, *arguments: object, **kwargs: object) -> None:
        """Prove isolation again if modules of the model were replaced, added or removed since the last proof."""
        trainer = self._trainer
        modules = self._modules()
        if trainer.packed_model.is_unpacked or [*map(id, modules)] == [*map(id, self._proved_modules)]:
            return  # padded batches need no proof
        self._proved_modules = modules
        with trainer.compute_loss_context_manager(), layers_uncompiled(trainer.args):
            # Chooses the attention of packs again, too
            isolation = trainer.packed_model.prove_changed(trainer.model_wrapped)
        isolation.raise_if_leaking(trainer.args.on_leak)
        prove_feature(trainer, self._data, trainer.model_wrapped)  # warns if packs are made without it from now on
        prove_degrees(trainer, self._data.source.degrees)  # raises PackingLeakError if documents leak at a degree
        logger.warning(
            f"Modules of {type(base_model(trainer.model)).__name__} were changed before optimizer step "
            f"{trainer.state.global_step + 1}, so documents in packs were tested again: {isolation.summary()}."
        )

    def _modules(self) -> list[nn.Module]:
        """Return the modules of the model."""
        return [*walk_modules(base_model(self._trainer.model))]

    def on_train_begin(self, *arguments: object, **kwargs: object) -> None:
        """Prove and compare, show and log the report, and refuse a model with which packs cannot be trained."""
        trainer = self._trainer
        args = self._trainer.args
        packed_model = self._trainer.packed_model
        # `get_train_dataloader` of this package makes the report. Without a report, a subclass has replaced this
        # method, and `refuse_conflicts` raises ValueError
        if trainer.packing_report is None:
            refuse_conflicts(RunSettings(args=args, user_loader=f"{type(trainer).__name__}.get_train_dataloader"))
        model = base_model(trainer.model)
        # Check that the proofs change no parameter. FSDP shards the whole PEFT model around the base model, so
        # `trainer.model` is checked and not `model`
        with parameters_unchanged(trainer.model):
            isolation, step_comparison = self._prove_and_compare()
        report = complete_report(
            trainer,
            isolation=isolation,
            # `describe_hooks` adds which hooks of the user's on the model ran in the tests, or ""
            first_step=step_comparison.text + describe_hooks(model),
            attention=self._describe_attention(),
            experimental=experimental_choices(RunSettings(args=args, model=model)),
            compiled=describe_compilation(model, args),
        )
        if args.packing_report and trainer.is_world_process_zero():
            report.show()
        # The report is shown also for a model that is refused here
        isolation.raise_if_leaking(args.on_leak)
        step_comparison.raise_if_different()
        self._proved_modules = self._modules()
        # Loggers get these numbers, and trainer_state.json has them. They are not printed if the report was shown.
        silent_callbacks = (PrinterCallback, ProgressCallback) if args.packing_report else ()
        with callbacks_left_out(trainer.callback_handler, silent_callbacks):
            trainer.log(
                {
                    "isolation/max_change": isolation.max_change,
                    "isolation/max_difference": isolation.max_difference,
                    "isolation/tolerance": isolation.tolerance,
                    "isolation/repaired_modules": sum(repair.count for repair in isolation.repaired),
                    "isolation/unpacked": int(packed_model.is_unpacked),
                    **step_comparison.metrics(),
                    **metrics(report),
                }
            )

    def _describe_attention(self) -> str:
        """Return the line of the report that names the attention of packs, why it was chosen, and its memory."""
        trainer = self._trainer
        report = trainer.packing_report
        assert report is not None  # made with the training loader
        attention = trainer.packed_model.attention
        text = f"{attention.name}: {attention.reason}"
        if not attention.is_flash:
            return text
        text += backward_note(trainer.model, report.most_documents)
        # On CUDA the attention of this package leaves long documents to cuDNN, except in the cases that
        # `attention/dense.py` names
        may_be_dense = trainer.args.device.type == "cuda" and not (
            trainer.args.torch_compile or torch.are_deterministic_algorithms_enabled()
        )
        if attention.name == ATTENTION_NAME and may_be_dense and report.max_length >= LONG_DOCUMENT:
            text += f"; packs of one document of {LONG_DOCUMENT:,} or more tokens on cuDNN, where it is faster"
        if self._data.shares_rows:
            # Attention copies the keys of a common beginning for each document that shares it. `copies_text` names
            # these copies, and `copied_bytes` is the most memory that they take at a time
            feature = trainer.packed_model.feature
            text += f"; {feature.copies_text} take at most {feature.copied_bytes / 2**30:g} GiB, in one layer"
        return text

    def _prove_and_compare(self) -> tuple[IsolationReport, StepComparison]:
        """Prove isolation, and compare the first step with unpacked training.

        Packs with the feature of the run and packs that ranks share are proved, too. If documents are isolated and the
        first step differs all the same, the model is unpacked and compared again. Nothing is unpacked if a setting
        forbids it.
        """
        trainer = self._trainer
        args = self._trainer.args
        packed_model = self._trainer.packed_model
        with trainer.compute_loss_context_manager(), proof_status(args, packed_model):
            isolation = packed_model.prove(trainer.model_wrapped)
        refusal = prove_feature(trainer, self._data, trainer.model_wrapped)  # why prefixes are not shared, or None
        report = trainer.packing_report
        assert report is not None  # made with the training loader
        if refusal is not None and report.prefixes is not None:
            trainer.packing_report = replace(report, prefixes=report.prefixes.refuse(refusal))
        step_comparison = StepComparison("not compared: isolation was not proved")
        if isolation.passed:
            # Raises PackingLeakError if documents leak at one of the degrees that packs of this run may have
            prove_degrees(trainer, self._data.source.degrees)
            step_comparison = self._first_step.compare()
        # Documents that share the tokens of a prefix, or packs that ranks share, cannot run as rows of a padded batch
        is_shared = self._data.shares_rows or max(self._data.source.degrees, default=1) > 1
        may_unpack = args.on_leak != "raise" and not is_shared and not packed_model.is_unpacked
        if step_comparison.problem is not None and may_unpack:
            isolation = packed_model.unpack(
                trainer.model_wrapped, reason=f"in the first step {step_comparison.problem}"
            )
            if isolation.passed:
                unpacked_step = self._first_step.compare()
                # If the unpacked model has a problem, too, the problem of the packed model is reported
                if unpacked_step.problem is None:
                    step_comparison = unpacked_step
        return isolation, step_comparison

    def on_train_end(self, *arguments: object, **kwargs: object) -> None:
        """Save the log of the run beside its report, where `trl-packfix report` reads both."""
        trainer = self._trainer
        if trainer.args.packing_report and trainer.is_world_process_zero():
            trainer.state.save_to_json(str(Path(str(trainer.args.output_dir)) / STATE_FILE))

    def on_save(self, *arguments: object, **kwargs: object) -> None:
        """Save the report in each checkpoint, too."""
        trainer = self._trainer
        report = self._trainer.packing_report
        if trainer.args.packing_report and trainer.is_world_process_zero():
            assert report is not None
            folder = trainer._get_output_dir(getattr(trainer, "_trial", None))
            report.save(f"{folder}/{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}")


class CheckAdapterGradients(TrainerCallback):
    """Refuses adapters that get no gradient in the first optimizer step, though the modules around them ran.

    For example, fused kernels of Mamba-2 do not call an adapter on the output projection. Three cases are accepted:

    - The module around the adapter did not run. The adapter may get a gradient in a later step.
    - The adapter ran and has a gradient of zero: the matrix that follows its first matrix starts at zero, or it trains
      single tokens (`trainable_token_indices`), and none of these tokens is in the step.
    - No adapter at all has a gradient, as with DeepSpeed, which holds gradients elsewhere.
    """

    def __init__(self) -> None:
        self._adapters: dict[str, BaseTunerLayer] | None = None  # by name; None before the first step, {} after it
        self._ran: set[str] = set()  # names of the adapters, and of the modules around them, that ran
        self._handles: list[RemovableHandle] = []

    def on_step_begin(self, *arguments: object, **kwargs: Any) -> None:
        """Add hooks, before the first step, that note which adapters and modules around them run."""
        if self._adapters is not None:
            return
        modules = dict(kwargs["model"].named_modules())
        self._adapters = {name: module for name, module in modules.items() if isinstance(module, BaseTunerLayer)}
        names_of_modules_around = {name.rpartition(".")[0] for name in self._adapters}
        for name in {*self._adapters, *names_of_modules_around}:
            note_run = partial(lambda name, *arguments: self._ran.add(name), name)
            self._handles.append(modules[name].register_forward_hook(note_run))

    def on_pre_optimizer_step(self, args: Any, *arguments: object, **kwargs: object) -> None:
        """Remove the hooks, and raise ValueError if adapters that should have a gradient have none."""
        self._remove_hooks()
        adapters = self._adapters or {}
        self._adapters = {}
        # First, find out for each adapter with trained parameters whether it has a gradient. A gradient of zero counts
        # only if the adapter ran
        has_gradient: dict[str, bool] = {}
        for name, module in adapters.items():
            parameters = _trained_parameters(module)
            if parameters:
                has_gradient[name] = _has_gradient(parameters, ran=name in self._ran)
        if not any(has_gradient.values()):
            return
        # Second, find the adapters to refuse: they have no gradient, and the module around them ran, whose name is
        # `name.rpartition(".")[0]`. The same adapter of all layers has one name, with `*` for the number of the layer.
        # It is refused if it has a gradient in no layer
        refused = {re.sub(r"\d+", "*", name) for name in has_gradient if name.rpartition(".")[0] in self._ran}
        refused -= {re.sub(r"\d+", "*", name) for name, is_trained in has_gradient.items() if is_trained}
        if refused:
            name = min(refused)
            named = f"`{name}`" + (f" (and of {count_of(len(refused) - 1, 'other')})" if len(refused) > 1 else "")
            alternative = "" if args.packing else ", or train with `packing=True`, where Mamba-2 calls it"
            raise ValueError(
                f"No adapter of {named} got a gradient in the first optimizer step, though the modules around "
                "them ran. So what they compute does not reach the loss, and they would stay as they are. For example, "
                "a fused kernel reads the weights under its adapters and does not call them. Remove "
                f"`{name.rpartition('.')[2]}` from `target_modules`{alternative}."
            )

    def _remove_hooks(self) -> None:
        """Remove the hooks, if they are on the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def undo(self) -> None:
        """Remove the hooks of a first step that failed; the next training checks the adapters, too.

        The trainer calls it at the end, also of a run that fails.
        """
        self._remove_hooks()
        self._adapters = None
        self._ran = set()


def _trained_parameters(adapter: BaseTunerLayer) -> list[nn.Parameter]:
    """Return the trained parameters of the adapter, without the parameters of the layer that it adapts."""
    base = {id(parameter) for parameter in adapter.get_base_layer().parameters()}
    return [p for p in adapter.parameters() if p.requires_grad and id(p) not in base]  # type: ignore[attr-defined]


def _has_gradient(parameters: list[nn.Parameter], *, ran: bool) -> bool:
    """Return whether a parameter of an adapter has a gradient.

    Args:
        parameters: the trained parameters of the adapter.
        ran: whether the adapter ran. If it did not, a gradient of zero does not count.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        # Of a sharded gradient this rank has a part, which may be zero
        if ran or isinstance(gradient, DTensor) or bool(gradient.any()):
            return True
    return False
