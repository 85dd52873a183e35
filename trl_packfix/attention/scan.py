"""A scan of a recurrent mixer, as a value: its inputs, and how to call its kernel."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor


class Scan(NamedTuple):
    """One call of a scan on T tokens of one row; all tensors have tokens in axis 1 and heads in axis 2.

    Attributes:
        values: tensors of H heads, (1, T, H) or (1, T, H, D).
        keys: tensors of G heads, each read by H / G neighbouring heads of values.
        parameters: one entry per head of values, or None.
        call: (values, keys, parameters, **boundaries) -> (rows, T, H, D).
        boundaries: name of the argument of boundaries, if the kernel takes one.
        from_states: (values, keys, parameters, states) -> (rows, T, H, D) and the states after it, for rows that begin
            with these states (None: zeros). Zeros in all tensors leave a state as it is. None if it cannot.
    """

    values: Sequence[Tensor]
    keys: Sequence[Tensor]
    parameters: Sequence[Tensor | None]
    call: Callable[..., Tensor]
    boundaries: str | None
    from_states: Callable[..., tuple[Tensor, Tensor]] | None = None
