"""What the leak probe says: its report and its error."""

from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from .repair import Repair
from .tracing import Leak

NUM_SHOWN = 5  # modules that a message names


class PackingLeakError(ValueError):
    """Documents of a pack influence each other on this model.

    >>> try:
    ...     IsolationReport(False, True, 0.3, 0.0, None, 4e-6, "eager").raise_if_leaking()
    ... except PackingLeakError as error:
    ...     print(str(error).split(".")[0])
    Documents in a pack moved others by 3
    """


@dataclass(frozen=True)
class IsolationReport:
    """What the probe saw.

    Attributes:
        isolated: no document moved another.
        equal: and each document was what it is alone (a model can be isolated and still wrong, e.g. by positions that
            do not restart).
        max_change: largest change of a document when another changed, relative to the largest hidden state.
        max_difference: largest difference of a document in the pack from itself alone, relative likewise.
        max_gradient: largest gradient of one document's outputs by another's embeddings; None where not tested.
        tolerance: what rounding explains, relative likewise; from the dtype and from a repeated run.
        leaks: the smallest modules where information crosses.
        unreachable: thresholds of the model that lie above `max_length`, not tested.
        attention: the implementation that was tested.
        error: what the model raised on a pack; it cannot be packed then.
        repaired: what was repaired before this verdict, and how.

    >>> print(IsolationReport(False, True, 0.3, 0.0, None, 4e-6, "eager").summary())
    documents move each other by 3.0e-01; rounding explains 4.0e-06
    """

    isolated: bool
    equal: bool
    max_change: float
    max_difference: float
    max_gradient: float | None
    tolerance: float
    attention: str
    leaks: list[Leak] = field(default_factory=list)
    unreachable: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    repaired: list[Repair] = field(default_factory=list)

    def summary(self) -> str:
        """What was found, in one line."""
        if self.error is not None:
            return f"the model refuses a pack: {self.error}"
        if not self.isolated:
            where = f" in {self.leaks[0].name} ({self.leaks[0].module})" if self.leaks else ""
            return f"documents move each other by {self.max_change:.1e}{where}; rounding explains {self.tolerance:.1e}"
        if not self.equal:
            return f"documents are not what they are alone, by {self.max_difference:.1e}"
        return f"documents move each other by {self.max_change:.1e} and are equal to themselves alone"

    def raise_if_leaking(self, on_leak: str = "raise") -> None:
        """Raise `PackingLeakError` unless documents are isolated and equal to themselves alone.

        `on_leak` is what has been tried, as in `SFTConfig`: the message names what is left.
        """
        if self.isolated and self.equal:
            return
        remedy = "Set `packing=False` and `padding_free=False`."
        if on_leak == "raise":
            remedy = (
                'Set `on_leak="repair"` (the modules where information crosses see each document by itself), or '
                "`packing=False` and `padding_free=False`."
            )
        if self.error is not None:
            raise PackingLeakError(
                f"A pack of documents was given to this model with attention {self.attention!r}, and it raised: "
                f"{self.error} So it cannot be trained on packs. {remedy}"
            )
        where = ", ".join(f"{leak.name} ({leak.module})" for leak in self.leaks[:NUM_SHOWN])
        if not self.isolated:
            gradient = "" if not self.max_gradient else f", a gradient of {self.max_gradient:.1e} crosses"
            given = f"moved others by {self.max_change:.1e} (rounding: {self.tolerance:.1e}{gradient})"
            why = f"Information crosses in {where}." if where else "Packed training would mix documents."
        else:
            given = f"differ from themselves alone by {self.max_difference:.1e} (rounding: {self.tolerance:.1e})"
            why = "No document moves another, but the model computes something else in a pack, e.g. other positions."
        raise PackingLeakError(
            f"Documents in a pack {given} on this model with attention {self.attention!r}. {why} {remedy}"
        )


def finite(value: Any) -> Any:
    """`value` for JSON, which has no infinity and no NaN: each becomes None, also inside dictionaries and lists.

    >>> finite({"max_change": float("inf"), "leaks": [0.5]})
    {'max_change': None, 'leaks': [0.5]}
    """
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value
