"""Search for a repair: find the modules that must run on documents separately, and how, until the leak probe passes.

The search uses no knowledge of model types. The probe returns two runs that should agree. The smallest module where
they differ is repaired, together with all others of its class, and the probe runs again. If no way of running a module
helps, its parent is repaired instead, up to the backbone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from ..attention.forwards import ModelHooks, PackedForwardGuard
from ..attention.varlen import OwnMaskError
from .axes import NotLearned, learn_axes
from .check_isolation import judge_probe, report_refusal
from .isolation_report import IsolationReport
from .probe import DOCUMENT_LENGTHS, Probe, RunPair
from .probed_model import CannotRun, T, gather_values
from .repair import REPAIR_MODES, Repair, RepairedModule, RepairMode, RestartedPositions
from .tracing import find_leaks, find_raising, find_shifted

MAX_ROUNDS = 40  # far more than any model needed; each costs a probe


@dataclass
class _RepairSite:
    """Modules of one class, repaired in the same way."""

    names: list[str]
    modes: Iterator[RepairMode]
    mode: RepairMode | None = None
    repaired: list[RepairedModule] = field(default_factory=list)

    def remove(self) -> None:
        for module in self.repaired:
            module.remove()
        self.repaired = []


class RepairSearch:
    """Repairs the model of a probe, inside `probe.undisturbed()`; `ignores_masks` of its guard may be set."""

    def __init__(self, probe: Probe, guard: PackedForwardGuard, max_length: int | None):
        self.probe = probe
        self.guard = guard
        self.max_length = max_length
        self._sites: dict[type[nn.Module], _RepairSite] = {}
        self._restarted: list[RestartedPositions] = []
        self._modules = dict(probe.inner.named_modules())

    def search_repairs(self) -> IsolationReport:
        """Repair until documents are isolated and equal to themselves alone, or all options have been tried."""
        for _ in range(MAX_ROUNDS):
            case: RunPair | None = None
            try:
                report, case = judge_probe(self.probe, self.max_length)
            except CannotRun as error:
                report = report_refusal(self.probe, error)
            # Before any other forward: with different results, ranks would wait for each other in it.
            verdict = agree_on_ranks("raised" if report.error is not None else "isolated" if case is None else "leaked")
            if verdict == "isolated":
                return report
            if verdict == "leaked" and not self._restarted and self._restart_positions():
                continue
            if case is not None:
                # A leak that only the gradient shows is below the tolerance of the forwards
                is_seen = max(report.max_change, report.max_difference) > report.tolerance
                leaks = report.leaks or find_leaks(self.probe, case, report.tolerance if is_seen else 0.0)
                name = leaks[0].name if leaks else None
            elif not self.guard.ignores_masks and self._masks_are_boundaries():
                self.guard.ignores_masks = True
                continue
            else:
                name = find_raising(self.probe, [self.probe.tokens(n) for n in DOCUMENT_LENGTHS])
            if name is None and self._sites:  # e.g. if only the backward pass shows it: assume the last repair
                name = list(self._sites.values())[-1].names[0]
            if agree_on_ranks(name) is None or name is None or not self._repair_module(self._outermost_repaired(name)):
                break
        return report

    def give_up(self) -> None:
        for hooks in self.hooks:
            hooks.remove()
        self._sites.clear()
        self._restarted.clear()
        self.guard.ignores_masks = False

    @property
    def hooks(self) -> list[ModelHooks]:
        """Of all current repairs, in the order of installation."""
        return [*self._restarted, *(module for site in self._sites.values() for module in site.repaired)]

    @property
    def repairs(self) -> list[Repair]:
        restarted: dict[tuple[str, str], list[str]] = {}
        for each in self._restarted:
            restarted.setdefault((type(each.module).__name__, str(each)), []).append(each.shifted.name)
        repaired = [((kind.__name__, str(site.mode)), site.names) for kind, site in self._sites.items()]
        return [Repair(kind, names[0], len(names), way) for (kind, way), names in [*restarted.items(), *repaired]]

    def _masks_are_boundaries(self) -> bool:
        """Whether the model raises because of a mask that holds only boundaries; run with gradients to check this."""
        try:
            self.probe.forward_packed([self.probe.tokens(n) for n in DOCUMENT_LENGTHS], gradient=True)
        except CannotRun as error:
            return isinstance(error.__cause__, OwnMaskError) and error.__cause__.is_boundary
        return False

    def _restart_positions(self) -> bool:
        try:
            shifted = find_shifted(self.probe, [self.probe.tokens(n) for n in DOCUMENT_LENGTHS])
        except CannotRun:
            return False
        self._restarted += [RestartedPositions(self._modules[each.name], each) for each in shifted]
        for each in self._restarted:
            each.install()
        return bool(self._restarted)

    def _outermost_repaired(self, name: str) -> str:
        """The repaired module that contains this one, else the smallest one not defined by torch."""
        repaired = [name for site in self._sites.values() for name in site.names]
        outer = [other for other in repaired if name == other or name.startswith(other + ".")]
        if outer:
            return min(outer, key=len)
        # FSDP2 replaces the class of a module by a subclass defined in torch, so all base classes count.
        while "." in name and all(
            kind.__module__.partition(".")[0] in ("torch", "builtins") for kind in type(self._modules[name]).__mro__
        ):
            name = name.rpartition(".")[0]
        return name

    def _repair_module(self, name: str) -> bool:
        """Repair this module and all of its class in the next way to try, else its parent. False at the top."""
        while name:
            kind = type(self._modules[name])
            if kind not in self._sites:
                names = [other for other, module in self._modules.items() if type(module) is kind]
                for inside, site in list(self._sites.items()):
                    if any(inner.startswith(outer + ".") for inner in site.names for outer in names):
                        self._sites.pop(inside).remove()
                self._sites[kind] = _RepairSite(names, iter(REPAIR_MODES))
            if self._next_way(self._sites[kind]):
                return True
            self._sites.pop(kind).remove()
            name = name.rpartition(".")[0]
            while name and isinstance(self._modules[name], nn.ModuleList | nn.ModuleDict):  # which are not called
                name = name.rpartition(".")[0]
        return False

    def _next_way(self, site: _RepairSite) -> bool:
        site.remove()
        for mode in site.modes:
            try:
                axes = learn_axes(self.probe, site.names)
                if not (mode.positions or any("position_ids" in module_axes.inputs for module_axes in axes.values())):
                    continue
                if not axes:
                    return False
                # A run that raises may not reach all of them: assume the same axes for the whole class.
                known = next(iter(axes.values()))
                repaired = [RepairedModule(self._modules[name], axes.get(name, known), mode) for name in site.names]
            except (NotLearned, ValueError):
                continue
            site.mode = mode
            site.repaired = repaired
            for module in repaired:
                module.install()
            return True
        return False


def agree_on_ranks(value: T) -> T:
    """`value`, which must be the same on all ranks, so that all repair the same modules."""
    values = gather_values(value)
    if any(other != value for other in values):
        raise RuntimeError(
            f"the leak probe found {values} on the {len(values)} ranks: with different results, ranks would run "
            "different models and wait for each other forever. Set the same model, dtype and attention on all ranks; "
            'if they are the same already, set on_leak="unpack".'
        )
    return value
