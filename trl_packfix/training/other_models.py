"""Refuse other models that the user's code calls on packs, such as a teacher or a reference, if they are not prepared.

A pack is a row of several documents. Only a model that was prepared for packs keeps the documents of a pack apart; any
other model computes the row as one sequence, without an error. So while the user's code runs on a pack
(`user_code.py`), a hook looks at the inputs of every module that is called, and raises if a model that is not prepared
gets the tokens of the pack.

The hook is a global one of torch, because the user's models are not known. It costs about 1 microsecond for each call
of a module, and only in steps that the user's code computes.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PreTrainedModel

from ..attention.packed_forward import running_forward
from ..layout import layout_of


class _UnpreparedModels:
    """A hook that torch calls before the forward of each module. It raises if an unprepared model gets a pack.

    It also refuses a deep copy that would compute with the weights of the original (`_check_own_weights`).

    Args:
        tokens: the tokens of the pack, (1, T).
        num_documents: the number of documents of the pack.
        longest: the number of tokens of its longest document.
    """

    def __init__(self, tokens: Tensor, num_documents: int, longest: int):
        self._tokens = tokens
        self._num_documents = num_documents
        self._longest = longest
        # The model whose forward began last outside of packed forwards. A model inside it, such as its backbone, does
        # not replace it. It may also be a prepared model, whose own hook enters the packed forward after this hook. Its
        # modules then run inside the packed forward, where nothing is checked
        self._outermost: PreTrainedModel | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Look at the positional arguments of a module before its forward."""
        if running_forward() is not None:  # a prepared model is computing a pack
            return
        if isinstance(module, PreTrainedModel):
            if self._outermost is None or not _is_inside(module, self._outermost):
                self._outermost = module
                _check_own_weights(module)
            return
        # A module inside an unprepared model, such as its embedding, gets the tokens as its first argument. The model
        # itself mostly gets them by a keyword, which this hook does not see
        model = self._outermost
        if model is not None and args and self._joins_documents(args[0]) and _is_inside(module, model):
            raise ValueError(
                f"{type(model).__name__} was called in a training step with the tokens of a pack of "
                f"{self._num_documents} documents, without their boundaries or without being prepared to read them. "
                "The documents would see each other. Give it the whole batch, `model(**inputs)`, and if it is another "
                "model than the trained one, call `trl_packfix.prepare_for_packing(model)` once before training."
            )

    def _joins_documents(self, value: object) -> bool:
        """Return whether a value, (1, n), is the first n tokens of the pack, and these are of several documents."""
        if not isinstance(value, Tensor) or value.is_floating_point() or value.ndim != 2 or value.shape[0] != 1:
            return False
        num_tokens = value.shape[1]
        has_several_documents = num_tokens > self._longest  # no single document of the pack has so many tokens
        if not has_several_documents or num_tokens > self._tokens.shape[1]:
            return False
        return torch.equal(value.to(self._tokens.device), self._tokens[:, :num_tokens].to(value.dtype))


def _is_inside(module: nn.Module, model: nn.Module) -> bool:
    """Return whether a module is the model or one of its modules."""
    return any(candidate is module for candidate in model.modules())


def _check_own_weights(model: PreTrainedModel) -> None:
    """Refuse a deep copy of a model whose `forward` TRL has replaced: it would compute with the original's weights.

    The function in place of `forward` holds the original model in its closure, which a deep copy does not copy.
    """
    function = vars(model).get("forward")
    while function is not None:  # look into the functions that this function wraps, too
        function = getattr(function, "__func__", function)
        # The objects whose bound methods are in the closure
        owners = [getattr(value, "__self__", None) for value in _closure_values(function)]
        if any(isinstance(owner, PreTrainedModel) and owner is not model for owner in owners):
            raise ValueError(
                f"A deep copy of a {type(model).__name__} was called in a training step. TRL had replaced the "
                "`forward` of the original, and the copy still calls that one, so it would compute with the weights of "
                "the original. Copy the model before the trainer is made, or `del copy.forward`, and call "
                "`trl_packfix.prepare_for_packing(copy)`."
            )
        function = getattr(function, "__wrapped__", None)


def _closure_values(function: Any) -> Iterator[object]:
    """Yield the values in the closure of a function; none for a callable object, as accelerate's with `bf16`."""
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # the cell is empty: its variable is not set yet
            yield cell.cell_contents


@contextmanager
def refused_if_unprepared(inputs: dict[str, Any]) -> Iterator[None]:
    """Raise ValueError in this context if a model that is not prepared for packs gets the tokens of `inputs`.

    Nothing is checked for a batch without boundaries of documents, which is not a pack.
    """
    layout = layout_of(inputs)
    if not layout.is_packed:
        yield
        return
    hook = _UnpreparedModels(inputs["input_ids"], layout.document_count, int(inputs["max_length_q"]))
    handle = register_module_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()
