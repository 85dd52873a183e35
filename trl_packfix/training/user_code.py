"""The user's own code in a training step of packs: what it gets, and what the user is told.

A subclass may replace `compute_loss` or `training_step`, and `compute_loss_func` may be given. Such code was written
for padded batches. A packed step differs from these in two ways:

- A rank that has no document in a micro-batch runs a dummy, so that all ranks make the same collective calls. A dummy
  has no trained token: a mean over its tokens is 0 / 0, and a penalty would count once more. So dummies never reach the
  user's code. Their loss is that of this package, which is 0, of one forward. In the last micro-batches of an epoch
  other ranks may run the user's code meanwhile: where a forward waits for all ranks, it must be one forward, too.
- Packs of a step may hold different numbers of trained tokens. In a mean over each micro-batch, a token of a pack with
  few of them counts more. So planning evens these numbers out, and `describe_uneven_micro_batches` says what remains.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
from torch import Tensor, nn

from ..data.collator import IGNORE_INDEX
from ..planning.schedule import Schedule
from .other_models import refused_if_unprepared
from .trainer_view import TrainerPart, TrainerView

OWN_METHODS = ("training_step", "compute_loss")  # of a trainer, by which a step is computed


def has_trained_tokens(inputs: dict[str, Any]) -> bool:
    """Return whether a micro-batch has a trained token. On CUDA this waits for the device."""
    return bool((inputs["labels"][:, 1:] != IGNORE_INDEX).any())


class UserCode(TrainerPart):
    """The user's own code in the steps of a trainer.

    Args:
        run: the trainer.
        own: the class whose methods are not the user's: this package's `SFTTrainer`.
        dummy_loss: computes the loss of a dummy, with the arguments of `compute_loss`.
    """

    def __init__(self, trainer: TrainerView, own: type, dummy_loss: Callable[..., Tensor]):
        super().__init__(trainer)
        self._own = own
        self._dummy_loss = dummy_loss
        self._num_filled = 0  # micro-batches of the current step with a trained token
        self._users_step: Callable[..., Tensor] = trainer.training_step
        # Names of the user's methods, while this class stands before them
        self._methods_in_training: list[str] | None = None

    @property
    def methods(self) -> list[str]:
        """Names of the methods of the trainer that replace those of this package, as a message names them."""
        if self._methods_in_training is not None:
            return self._methods_in_training
        names = [name for name in OWN_METHODS if not self._is_own(getattr(self._trainer, name), name)]
        return [f"{type(self._trainer).__name__}.{name}" for name in names]

    def _is_own(self, method: Any, name: str) -> bool:
        return getattr(method, "__func__", method) is getattr(self._own, name)

    @property
    def names(self) -> list[str]:
        """Names of everything of the user's that computes a loss or a step."""
        return [*self.methods, *(["compute_loss_func"] if self._trainer.compute_loss_func is not None else [])]

    @contextmanager
    def without_dummies(self) -> Iterator[None]:
        """Give the user's `training_step` and `compute_loss` only micro-batches with a trained token."""
        if not (self.args.packing and self.methods):
            yield
            return
        self._methods_in_training = self.methods
        self._users_step = self._trainer.training_step
        try:
            with _attribute(self._trainer, "training_step", self._training_step):
                yield
        finally:
            self._methods_in_training = None

    def other_models_checked(self, inputs: dict[str, Any]) -> AbstractContextManager[None]:
        """Refuse models that are not prepared for packs, if the user's code calls them with the tokens of `inputs`.

        Compiled layers would be compiled again with the hook, so runs with `torch_compile` are not checked.
        """
        return nullcontext() if self.args.torch_compile else refused_if_unprepared(inputs)

    def begin_step(self, batches: list[dict[str, Any]]) -> None:
        """Count the micro-batches of an optimizer step on which the user's code will run."""
        if self.args.packing and self.methods:
            self._num_filled = sum(map(has_trained_tokens, batches))

    def _training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any) -> Tensor:
        """Run the user's step, or on a dummy this package's, and return its loss."""
        trainer = self._trainer
        if has_trained_tokens(inputs):
            # transformers divides losses that are means by it, and an unpacked step has no dummies
            trainer.current_gradient_accumulation_steps = self._num_filled
            inputs["use_cache"] = False  # other models get these inputs, too
            with self.other_models_checked(inputs):
                return self._users_step(model, inputs, num_items_in_batch)
        with _attribute(trainer, "compute_loss", self._dummy_loss):
            return self._own.training_step(trainer, model, inputs, num_items_in_batch)  # type: ignore[attr-defined]

    def describe_uneven_micro_batches(self, schedule: Schedule | None, trained: np.ndarray | None) -> str | None:
        """Say how unevenly a mean over each micro-batch would count tokens; None if there is nothing to say.

        Args:
            schedule: that of the first epoch; None of a stream.
            trained: trained tokens of each document, shape (N,); None of a stream.
        """
        names = self.names
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
        most, fewest, gap = uneven_weights(schedule, trained)
        return (
            f"{code} {computes} the loss of packs. In the first epoch they hold {fewest:,} to {most:,} trained tokens, "
            f"so in a mean over each micro-batch a token counts up to {gap:.0%} more or less than in the mean over its "
            f"optimizer step. {remedy}"
        )


@contextmanager
def _attribute(trainer: TrainerView, name: str, value: object) -> Iterator[None]:
    """Set an attribute of the trainer itself, which goes before the methods of its class."""
    attributes = vars(trainer)
    before = attributes.get(name)
    attributes[name] = value
    try:
        yield
    finally:
        if before is None:
            del attributes[name]
        else:
            attributes[name] = before


def uneven_weights(schedule: Schedule, trained: np.ndarray) -> tuple[int, int, float]:
    """Compare a mean of the means over micro-batches with the mean over the step.

    Args:
        schedule: the micro-batches of an epoch.
        trained: trained tokens of each document, shape (N,).

    Returns:
        The most and the fewest trained tokens of a micro-batch, dummies aside; and by how much the weight of a token
        differs at most between the two means, relative to that in the mean over the step.
    """
    slots = schedule.slot_sums(trained).reshape(schedule.num_steps, -1)  # (S, G * W)
    is_filled = slots > 0
    mean = slots.sum(axis=1, keepdims=True) / np.maximum(is_filled.sum(axis=1, keepdims=True), 1)
    filled = slots[is_filled]
    ratio = (mean / np.maximum(slots, 1))[is_filled]
    return int(filled.max()), int(filled.min()), float(np.abs(ratio - 1).max())
