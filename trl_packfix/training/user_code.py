"""The user's own code in a training step of packs: which batches it gets, and what a warning says of its losses.

A user may replace `compute_loss` or `training_step` in a subclass of the trainer, or give a `compute_loss_func`. Code
of this kind is written for padded batches, and a step of packs differs from a step of padded batches in two ways:

- A rank that has no document in a micro-batch runs a *dummy*, a batch without a trained token, so that all ranks make
  the same collective calls. A mean over the trained tokens of a dummy would be 0 / 0, and a penalty in the user's loss
  would be added for a batch that trains nothing. So dummies never reach the user's code: this package computes their
  loss, which is 0, with one forward. Other ranks may run the user's code at the same time. Where a forward waits for
  all ranks, the user's code must run exactly one forward, too.
- The packs of a step may hold different numbers of trained tokens. In a mean over each micro-batch, a token of a pack
  with few trained tokens counts more than others. So planning makes these numbers similar, and
  `describe_uneven_micro_batches` says by how much they still differ.

The trainer calls `count_batches_for_user_code` when it fetches the micro-batches of an optimizer step. In the context
`without_dummies`, transformers calls `_training_step` in place of the user's `training_step`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.collator import IGNORE_INDEX
from ..planning.schedule import Schedule
from .other_models import refused_if_unprepared
from .trainer_view import TrainerPart, TrainerView, attributes_set

STEP_METHODS = ("training_step", "compute_loss")  # methods of a trainer that compute a micro-batch


def has_trained_tokens(inputs: dict[str, Any]) -> bool:
    """Return whether a micro-batch has a trained token. On CUDA the host waits for the device."""
    return bool((inputs["labels"][:, 1:] != IGNORE_INDEX).any())


class UserCode(TrainerPart):
    """The user's own code in the steps of a trainer.

    Args:
        trainer: the trainer.
        package_class: this package's `SFTTrainer`. A method that the trainer does not have from it is the user's.
        dummy_loss: computes the loss of a dummy, with the arguments of `compute_loss`.

    Attributes:
        has_batches: whether this rank has a micro-batch of the current step that is no dummy. It stays True without
            methods of the user's, because then dummies get the loss of all micro-batches.
    """

    has_batches = True

    def __init__(self, trainer: TrainerView, package_class: type, dummy_loss: Callable[..., Tensor]):
        super().__init__(trainer)
        self._package_class = package_class
        self._dummy_loss = dummy_loss
        # Number of micro-batches of the current step with a trained token, on a rank in the mean
        self._num_filled = 0.0
        # Within `without_dummies`, the value that `methods` had before this context. The context replaces
        # `training_step`, which would then count as the user's. None outside of the context
        self._methods_in_training: list[str] | None = None

    @property
    def methods(self) -> list[str]:
        """Names of the methods in `STEP_METHODS` that the user has replaced, with the name of the trainer's class."""
        if self._methods_in_training is not None:
            return self._methods_in_training
        return self.replaced_methods(*STEP_METHODS)

    def replaced_methods(self, *names: str) -> list[str]:
        """Return the methods in `names` that the user has replaced, in a subclass or by an assignment to the trainer.

        Each has the name of the trainer's class in front, such as "MyTrainer.compute_loss".
        """
        replaced = []
        for name in names:
            method = getattr(self._trainer, name)
            # `__func__` is the function of a method. A function that was assigned to the trainer has none
            if getattr(method, "__func__", method) is not getattr(self._package_class, name):
                replaced.append(f"{type(self._trainer).__name__}.{name}")
        return replaced

    @property
    def loss_code_names(self) -> list[str]:
        """Names of the user's methods and functions that compute a loss or a step."""
        functions = [] if self._trainer.compute_loss_func is None else ["compute_loss_func"]
        return self.methods + functions

    @contextmanager
    def without_dummies(self) -> Iterator[None]:
        """Give the user's `training_step` and `compute_loss`, in this context, only micro-batches with a trained token.

        Without packing there are no dummies, and nothing is replaced.
        """
        if not (self.args.packing and self.methods):
            yield
            return
        self._methods_in_training = self.methods
        self._users_step = self._trainer.training_step
        try:
            with attributes_set(self._trainer, training_step=self._training_step):
                yield
        finally:
            self._methods_in_training = None

    def other_models_checked(self, inputs: dict[str, Any]) -> AbstractContextManager[None]:
        """Return a context that refuses a model, such as a teacher, that gets a pack and is not prepared for packs.

        `inputs` is the pack. With `torch_compile` nothing is refused, because the hook of the check would make layers
        compile again.
        """
        return nullcontext() if self.args.torch_compile else refused_if_unprepared(inputs)

    def count_batches_for_user_code(self, batches: list[dict[str, Any]]) -> None:
        """Count the micro-batches of an optimizer step on which the user's code will run. All ranks must call it.

        Ranks may have different numbers of dummies. DDP averages gradients over ranks, so if each loss is divided by
        the mean of the counts, every micro-batch of the step counts the same.
        """
        if self.args.packing and self.methods:
            accelerator = self._trainer.accelerator
            num_filled = sum(map(has_trained_tokens, batches))
            self.has_batches = num_filled > 0
            num_filled_of_rank = torch.tensor(float(num_filled), device=accelerator.device)
            self._num_filled = float(accelerator.reduce(num_filled_of_rank, reduction="mean"))

    def _training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any) -> Tensor:
        """Run the user's step, or this package's step if the micro-batch is a dummy, and return its loss."""
        trainer = self._trainer
        # First case: a micro-batch with documents
        if has_trained_tokens(inputs):
            # transformers divides a loss by this number if it is a mean over a micro-batch. Dummies must not count.
            # The number may be a fraction, because it is a mean over ranks
            trainer.current_gradient_accumulation_steps = self._num_filled
            # The user may call other prepared models with these inputs, and they refuse a pack with a cache
            inputs["use_cache"] = False
            with self.other_models_checked(inputs):
                return self._users_step(model, inputs, num_items_in_batch)
        # Second case: a dummy, which runs the step of this package. The step calls `trainer.compute_loss`, which
        # returns 0 in this context
        with attributes_set(trainer, compute_loss=self._dummy_loss):
            package_class: Any = self._package_class
            return package_class.training_step(trainer, model, inputs, num_items_in_batch)

    def describe_uneven_micro_batches(self, schedule: Schedule | None, trained: np.ndarray | None) -> str | None:
        """Return a message that says how unevenly a mean over each micro-batch would count tokens.

        Args:
            schedule: the schedule of the first epoch; None for a stream.
            trained: the number of trained tokens of each document, shape (N,); None for a stream.

        Returns:
            The message; None if no code of the user's computes a loss, or an optimizer step is one micro-batch.
        """
        names = self.loss_code_names
        args = self.args
        if not names or args.gradient_accumulation_steps * args.world_size == 1:
            return None
        code = " and ".join(f"`{name}`" for name in names)
        computes = "compute" if len(names) > 1 else "computes"
        remedy = (
            "Divide a sum over trained tokens by `num_items_in_batch`, which counts those of the whole step. A loss "
            "that does so needs no change."
        )
        if schedule is None or trained is None:
            return (
                f"{code} {computes} the loss of packs, and packs of a stream may hold different numbers of trained "
                "tokens. In a mean over each micro-batch, the tokens of a pack with few of them count more than in the "
                f"mean over the optimizer step. {remedy}"
            )
        most_tokens, fewest_tokens, largest_gap = uneven_weights(schedule, trained)
        return (
            f"{code} {computes} the loss of packs. In the first epoch they hold {fewest_tokens:,} to {most_tokens:,} "
            f"trained tokens, so in a mean over each micro-batch a token counts up to {largest_gap:.0%} more or less "
            f"than in the mean over its optimizer step. {remedy}"
        )


def uneven_weights(schedule: Schedule, trained: np.ndarray) -> tuple[int, int, float]:
    """Compare how a token counts in a mean of the means over micro-batches, and in the mean over the step.

    Args:
        schedule: the micro-batches of an epoch.
        trained: the number of trained tokens of each document, shape (N,).

    Returns:
        The most and the fewest trained tokens of a micro-batch that is not a dummy; and the largest difference of the
        weight of a token between the two means, relative to its weight in the mean over the step.
    """
    # The trained tokens of each slot, a micro-batch of one rank: a row for each optimizer step, with all its slots
    slot_tokens = schedule.slot_sums(trained).reshape(schedule.num_steps, -1)
    is_filled = slot_tokens > 0
    num_filled = np.maximum(is_filled.sum(axis=1, keepdims=True), 1)
    mean_tokens = slot_tokens.sum(axis=1, keepdims=True) / num_filled
    filled_tokens = slot_tokens[is_filled]
    # In the mean over the step each token counts 1 / (all tokens). In the mean of means it counts 1 / (tokens of its
    # micro-batch) / (number of micro-batches that are no dummies). The ratio of the second to the first:
    weight_ratio = (mean_tokens / np.maximum(slot_tokens, 1))[is_filled]
    return int(filled_tokens.max()), int(filled_tokens.min()), float(np.abs(weight_ratio - 1).max())
