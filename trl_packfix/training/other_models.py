"""Models that the user's code calls in a step beside the trained one: a teacher, a reference, an average of weights.

Only a model that was prepared for packs keeps the documents of a pack apart. Any other computes them as one sequence,
without an error, if it gets their tokens. So while the user's code runs on a pack, a hook looks at what modules get.
A module of an unprepared model that gets the tokens of the pack ends the run with a message.

The hook is one of torch's global ones, because the other models are not known. It runs at every call of a module, but
only where user code replaces this package's: about 1 microsecond each.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PreTrainedModel

from ..attention.packed_forward import running_forward
from ..layout import layout_of


class _UnpreparedModels:
    """Raises where an unprepared model gets the tokens of a pack: torch calls it before the forward of each module.

    Args:
        tokens: those of the pack, (1, T).
        num_documents, longest: how many documents the pack has, and the tokens of the longest.
    """

    def __init__(self, tokens: Tensor, num_documents: int, longest: int):
        self._tokens = tokens
        self._num_documents = num_documents
        self._longest = longest
        self._outermost: PreTrainedModel | None = None  # the model whose forward began last, outside of packs

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if running_forward() is not None:  # a prepared model computes a pack
            return
        if isinstance(module, PreTrainedModel):
            if self._outermost is None or not _is_inside(module, self._outermost):
                self._outermost = module
                _check_own_weights(module)
        elif self._outermost is not None and args and self._is_of_pack(args[0]) and _is_inside(module, self._outermost):
            self._refuse(self._outermost)

    def _is_of_pack(self, value: object) -> bool:
        """Whether a module gets the tokens of more than one document as one row."""
        if not isinstance(value, Tensor) or value.is_floating_point() or value.ndim != 2 or value.shape[0] != 1:
            return False
        num = value.shape[1]
        return self._longest < num <= self._tokens.shape[1] and torch.equal(
            value.to(self._tokens.device), self._tokens[:, :num].to(value.dtype)
        )

    def _refuse(self, model: PreTrainedModel) -> None:
        raise ValueError(
            f"{type(model).__name__} was called in a training step with the tokens of a pack of {self._num_documents} "
            "documents, without their boundaries or without being prepared to read them. The documents would see each "
            "other. Give it the whole batch, `model(**inputs)`, and if it is another model than the trained one, call "
            "`trl_packfix.prepare_for_packing(model)` once before training."
        )


def _is_inside(module: nn.Module, model: nn.Module) -> bool:
    return any(each is module for each in model.modules())


def _check_own_weights(model: PreTrainedModel) -> None:
    """Refuse a deep copy of a model whose `forward` TRL has replaced: it would compute with the original's weights."""
    function = vars(model).get("forward")
    while function is not None:  # functions may be wrapped in others
        function = getattr(function, "__func__", function)
        owners = [getattr(cell.cell_contents, "__self__", None) for cell in function.__closure__ or ()]
        if any(isinstance(owner, PreTrainedModel) and owner is not model for owner in owners):
            raise ValueError(
                f"A deep copy of a {type(model).__name__} was called in a training step. TRL had replaced the "
                "`forward` of the original, and the copy still calls that one, so it would compute with the weights of "
                "the original. Copy the model before the trainer is made, or `del copy.forward`, and call "
                "`trl_packfix.prepare_for_packing(copy)`."
            )
        function = getattr(function, "__wrapped__", None)


@contextmanager
def refused_if_unprepared(inputs: dict[str, Any]) -> Iterator[None]:
    """Raise ValueError in this context where a model that is not prepared for packs gets the tokens of `inputs`.

    A batch without boundaries is not watched.
    """
    layout = layout_of(inputs)
    if not layout.is_packed:
        yield
        return
    watch = _UnpreparedModels(inputs["input_ids"], layout.count, int(inputs["max_length_q"]))
    handle = register_module_forward_pre_hook(watch)
    try:
        yield
    finally:
        handle.remove()
