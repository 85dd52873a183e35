"""Hold the result of the leak probe: `IsolationReport`, and `PackingLeakError` for a model that fails.

`check_isolation.py` makes the report, `packed_model.py` and the trainer decide by it, and the reporting modules print
its `summary`. This module also words the error: what was found, where, and what to change.
"""

from dataclasses import dataclass, field

from .probed_model import MAX_NOISE
from .repair import Repair
from .tracing import Leak

HALF_PRECISION_DTYPES = ("bf16", "fp16")
NUM_SHOWN = 5  # modules that a message names


class PackingLeakError(ValueError):
    """Error raised if documents of a pack change each other on a model, or are not what they are alone.

    Example:

    >>> try:
    ...     IsolationReport(False, True, 0.3, 0.0, None, 4e-6, "eager").raise_if_leaking()
    ... except PackingLeakError as error:
    ...     print(str(error).partition(" (")[0])
    Documents in a pack changed others by 3.0e-01
    """


@dataclass(frozen=True)
class IsolationReport:
    """The result of [`check_isolation`] on one model. Packs are right if it has `passed`.

    Changes and differences of hidden states are relative to the largest hidden state.

    Attributes:
        isolated (`bool`):
            Whether no document changed when the test changed another document of its pack. Also `False` if
            `max_gradient` is above 0, or if there are `leaks` in packs of one rank.
        equal (`bool`):
            Whether each document in a pack has the hidden states that it has alone. A model can be isolated and still
            wrong, for example if positions do not restart in each document.
        max_change (`float`):
            Largest change of a document when another document changed.
        max_difference (`float`):
            Largest difference between a document in a pack and the same document alone.
        max_gradient (`float` or `None`):
            Largest gradient of one document's outputs with respect to another document's embeddings; `None` if it was
            not tested. If ranks share packs, or documents share prefixes, the gradients of a document in a pack and
            alone are compared as well. If they differ beyond rounding, this is the larger of the gradient and of their
            relative difference.
        tolerance (`float`):
            Largest change that rounding explains, from the dtype and from repeated runs, at most `MAX_NOISE`.
        attention (`str`):
            The attention implementation that was tested.
        leaks (`list[Leak]`):
            The smallest modules in which information crosses, each with its `name`, class and change.
        unreachable (`dict[str, int]`):
            Thresholds of the model, in tokens, that were not tested because they are above `max_length`.
        error (`str` or `None`):
            The error that the model raised on a pack. Such a model cannot be packed.
        repaired (`list[Repair]`):
            The repairs that were in place during the test. A repair says which modules run on each document separately,
            and how.
        degree (`int`):
            Number of ranks that shared each pack.
        reads_ahead (`bool`):
            Whether a token changes earlier states of its own document when this document runs alone. The model then
            sees what it should predict.
        dtype (`str`):
            The coarsest dtype among the outputs of modules: `"fp32"`, `"bf16"`, ... In half precision the tolerance is
            large, so for changes below it the inputs and outputs of each module are compared, too.
        runs_unpacked (`bool`):
            `False` if the model also fails on a single document without packing: it raises, or its states are NaN or
            infinite. `error` then says what.
        proved_on (`str` or `None`):
            The day on which an earlier start proved the same model; `None` if this start did.
        reach (`int`):
            How far from the beginning of a pack a document was still equal to itself alone: the largest number of
            tokens before it with which this was tested and held; 0 if there is none.

    Example:

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
    degree: int = 1
    reads_ahead: bool = False
    dtype: str = "fp32"
    runs_unpacked: bool = True
    proved_on: str | None = None
    reach: int = 0

    @property
    def passed(self) -> bool:
        """Whether packs train the model right: documents are isolated, and equal to themselves alone."""
        return self.isolated and self.equal

    def summary(self) -> str:
        """Return the result in one line."""
        if self.error is not None:
            problem = "refuses a pack" if self.runs_unpacked else "fails without packing, too"
            return f"the model {problem}: {self.error}"
        # Only the gradients have shown the defect: no document changed beyond rounding, and no module was found.
        if not self.isolated and self.max_gradient and self.max_change <= self.tolerance and not self.leaks:
            return f"gradients of documents are not what they are alone, by {self.max_gradient:.1e}"
        if not self.isolated:
            where = f" in {self.leaks[0].name} ({self.leaks[0].module})" if self.leaks else ""
            return f"documents move each other by {self.max_change:.1e}{where}; rounding explains {self.rounding}"
        if not self.equal:
            return f"documents are not what they are alone, by {self.max_difference:.1e}{self._note_on_causality}"
        # The text is "changing one document changed no other (`change`) and ...; each equals itself alone to
        # `difference`".
        if self.dtype in HALF_PRECISION_DTYPES:  # the tolerance at the end of a deep model says little
            change = f"by rounding, {100 * self.max_change:.2g} %; modules compared one by one"
            is_capped = self.tolerance == MAX_NOISE
            bound = self.rounding if is_capped else f"{100 * self.tolerance:.2g} %"
            difference = f"{100 * self.max_difference:.2g} % (rounding in {self.dtype} explains {bound})"
        else:
            change = f"{self.max_change:.1e}"
            difference = f"{self.max_difference:.1e} (rounding explains {self.rounding})"
        gradient = ", gradients not compared" if self.max_gradient is None else " and no gradient crosses"
        text = (
            f"changing one document changed no other ({change if self.max_change else '0.0'}){gradient}; each equals "
            f"itself alone to {difference}"
        )
        if self.reach:
            text += f"; documents up to {self.reach:,} tokens apart"
        text += self._note_on_causality
        if self.proved_on is not None:
            text += f"; proved on {self.proved_on}, same model and versions"
        return text

    @property
    def rounding(self) -> str:
        """The tolerance in words. `MAX_NOISE`, its largest value, stands for all larger measured values."""
        return f"more than the cap of {MAX_NOISE}" if self.tolerance == MAX_NOISE else f"{self.tolerance:.1e}"

    @property
    def _note_on_causality(self) -> str:
        """A remark on a model that is not causal; empty for all others."""
        return "; the model is not causal: a token changes earlier states of its document" if self.reads_ahead else ""

    def raise_if_leaking(self, on_leak: str = "raise") -> None:
        """Raise [`PackingLeakError`] unless documents are isolated and equal to themselves alone.

        Args:
            on_leak (`str`, *optional*, defaults to `"raise"`):
                The setting of [`SFTConfig`]: `"repair"`, `"unpack"` or `"raise"`. It says what has been tried, and the
                message names the remaining options.
        """
        if self.passed:
            return
        where = ", ".join(f"{leak.name} ({leak.module})" for leak in self.leaks[:NUM_SHOWN])
        if self.degree > 1:  # packs that ranks share are tested after packs on one rank have passed
            finding = f"the model raised: {self.error}"
            if self.error is None:
                gap = max(self.max_change, self.max_difference)
                finding = f"documents differ from themselves alone by {gap:.1e} (rounding: {self.rounding})"
                if gap <= self.tolerance and self.max_gradient:
                    finding = f"gradients of documents are not what they are alone, by {self.max_gradient:.1e}"
            raise PackingLeakError(
                f"A pack was shared by {self.degree} ranks, and {finding}. It worked on one rank, so a module other "
                f"than attention needs tokens that other ranks hold{': ' + where if where else ''}. Set "
                "`tokens_per_rank=None` (documents are then at most as long as one rank can train)."
            )
        remedy = "Set `packing=False` and `padding_free=False`."
        if on_leak == "raise":
            remedy = (
                'Set `on_leak="repair"` (the modules where information crosses then run on each document separately), '
                "or `packing=False` and `padding_free=False`."
            )
        if self.error is not None and not self.runs_unpacked:
            raise PackingLeakError(
                "A row of one document was given to this model in training mode, without packing, and it failed: "
                f"{self.error.rstrip('.')}. So packs are not the cause, and none can be tested. Change what this error "
                "names; `packing=False` only leaves out the test."
            )
        if self.error is not None:
            raise PackingLeakError(
                f"A pack of documents was given to this model with attention {self.attention!r}, and it raised: "
                f"{self.error} It cannot be trained on packs. {remedy}"
            )
        if not self.isolated:
            gradient = "" if not self.max_gradient else f", a gradient of {self.max_gradient:.1e} crosses"
            finding = f"changed others by {self.max_change:.1e} (rounding: {self.rounding}{gradient})"
            cause = f"Information crosses in {where}." if where else "Documents would be mixed in packed training."
        else:
            finding = f"differ from themselves alone by {self.max_difference:.1e} (rounding: {self.rounding})"
            cause = (
                "The model computes a document in a pack differently, for example with other positions, or with tokens "
                "of a document that the test did not change."
            )
            if self.reads_ahead:
                cause = (
                    "The model is not causal: a token changes earlier states of its document, so its states depend on "
                    "the padding behind it, and a pack has none."
                )
        raise PackingLeakError(
            f"Documents in a pack {finding} on this model with attention {self.attention!r}. {cause} {remedy}"
        )
