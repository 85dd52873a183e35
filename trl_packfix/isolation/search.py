"""Search for repairs of a model that leaks: find the modules that must run on each document separately, and how.

`packed_model.py` starts the search, after the leak probe (`check_isolation.py`) has failed. In each round the probe
returns two runs that should agree. The smallest module where they differ (`tracing.py`) is repaired, together with all
modules of its class, and the probe runs again. If modules get positions that do not begin anew in each document, such
positions are restarted first. If no mode of running a module helps, its parent is repaired instead, up to the backbone.
The search uses no knowledge of model types.

Words: a module is *repaired* by hooks that run it on each document of a pack, instead of on the pack (`repair.py`). A
`RepairMode` is one of the ways to do that. All modules of one class are repaired in the same mode (`_RepairedClass`).
The *guard* is the hooks that make the boundaries of packs known inside the model (`attention/forwards.py`). If its
`ignores_masks` is set, attention reads the boundaries only, and no mask that the model makes itself.
"""

from collections.abc import Iterator
from contextlib import suppress
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

MAX_ROUNDS = 40  # far more than any model needed; each round costs a probe


@dataclass
class _RepairedClass:
    """All modules of one class, which are repaired in the same mode."""

    names: list[str]  # paths of the modules in the model
    modes: Iterator[RepairMode]  # the modes that have not been tried
    mode: RepairMode | None = None  # the current mode
    hooks: list[RepairedModule] = field(default_factory=list)  # the hooks of the current mode

    def remove(self) -> None:
        """Remove the repairs from the modules."""
        for module_hooks in self.hooks:
            module_hooks.remove()
        self.hooks = []


class RepairSearch:
    """Repairs the model of a probe. It may also set `ignores_masks` of the guard on the model's forward.

    Its methods are called inside `probe.undisturbed()`: without dropout and hooks of the user on gradients.

    Args:
        probe: runs the model. `probe.inner` is the transformers model inside all wrappers.
        max_length: the longest document of the run, in tokens. A model may compute documents above some length in
            another way, for example with a sliding window. The probe tests the lengths (`thresholds.py`) that documents
            of the run can exceed. None is the number of positions of the model.
    """

    def __init__(self, probe: Probe, guard: PackedForwardGuard, max_length: int | None):
        self.probe = probe
        self.guard = guard
        self.max_length = max_length
        self._repaired_classes: dict[type[nn.Module], _RepairedClass] = {}
        self._restarted: list[RestartedPositions] = []
        self._modules = dict(probe.inner.named_modules())

    def search_repairs(self) -> IsolationReport:
        """Repair modules until the probe passes, or all options have been tried.

        The probe passes if documents do not change each other, and have the states in a pack that they have alone.

        Returns:
            The report of the last probe. It has not passed if no repairs have helped.
        """
        for _ in range(MAX_ROUNDS):
            # First, probe the model with its current repairs.
            pair: RunPair | None = None  # two runs that show the leak most clearly
            try:
                report, pair = judge_probe(self.probe, self.max_length)
                verdict = "isolated" if pair is None else "leaked"
            except CannotRun as error:
                report = report_refusal(self.probe, error)
                verdict = "raised"
            # Ranks agree before any other forward: with different results, they would wait for each other in it.
            agree_on_ranks(verdict)
            if verdict == "isolated":
                return report
            if verdict == "leaked" and not self._restarted:
                self._restart_positions()
                if self._restarted:
                    continue
            # Then find the module to repair.
            if pair is not None:  # "leaked"
                # The report names the modules if they were found in the probe. If not, look for modules whose states
                # differ by more than rounding. If only the gradient shows the leak, the states of the whole model
                # differ by less than rounding. Then look for modules whose states differ at all.
                states_differ = max(report.max_change, report.max_difference) > report.tolerance
                leaks = report.leaks or find_leaks(self.probe, pair, report.tolerance if states_differ else 0.0)
                name = leaks[0].name if leaks else None
            elif not self.guard.ignores_masks and self._masks_are_boundaries():
                # The probe raised because of a mask that says no more than the boundaries. Ignore such masks
                self.guard.ignores_masks = True
                continue
            else:  # "raised", for another reason
                name = find_raising(self.probe, [self.probe.tokens(n) for n in DOCUMENT_LENGTHS])
            if name is None and self._repaired_classes:
                # No forward shows which module leaks or raises. So try the next mode of the class that was repaired
                # last: `_repair_module` does so if it gets a module of a repaired class.
                name = list(self._repaired_classes.values())[-1].names[0]
            agree_on_ranks(name)
            # Finally, repair it, and probe again.
            if name is None or not self._repair_module(self._module_to_repair(name)):
                break
        return report

    def give_up(self) -> None:
        """Remove all repairs from the model."""
        for hooks in self.hooks:
            hooks.remove()
        self._repaired_classes.clear()
        self._restarted.clear()
        self.guard.ignores_masks = False

    @property
    def hooks(self) -> list[ModelHooks]:
        """The hooks of all current repairs, in the order of installation."""
        repaired_modules = [hooks for repaired in self._repaired_classes.values() for hooks in repaired.hooks]
        return [*self._restarted, *repaired_modules]

    @property
    def repairs(self) -> list[Repair]:
        """All current repairs, one for each class of modules and each way in which they run."""
        # The names of modules, by the name of their class and by how they run, in words
        restarted_names: dict[tuple[str, str], list[str]] = {}
        for restarted in self._restarted:
            key = (type(restarted.module).__name__, str(restarted))
            restarted_names.setdefault(key, []).append(restarted.shifted.name)
        repairs = [
            Repair(class_name, names[0], len(names), repair) for (class_name, repair), names in restarted_names.items()
        ]
        for module_class, repaired in self._repaired_classes.items():
            names = repaired.names
            repairs.append(Repair(module_class.__name__, names[0], len(names), str(repaired.mode)))
        return repairs

    def _masks_are_boundaries(self) -> bool:
        """Return whether the model raises on a pack because of a mask that may only hide keys, as boundaries do."""
        try:  # with gradients: a mask that needs a gradient is learned, so it does more than hide keys
            self.probe.forward_packed([self.probe.tokens(n) for n in DOCUMENT_LENGTHS], gradient=True)
        except CannotRun as error:
            # `may_only_hide`: the mask has at most two values, and needs no gradient.
            return isinstance(error.__cause__, OwnMaskError) and error.__cause__.may_only_hide
        return False

    def _restart_positions(self) -> None:
        """Restart positions in each document at modules that get shifted positions, if there are any."""
        with suppress(CannotRun):
            for positions in find_shifted(self.probe, [self.probe.tokens(n) for n in DOCUMENT_LENGTHS]):
                # `positions.name` is the path of the module that gets the positions
                restarted = RestartedPositions(self._modules[positions.name], positions)
                restarted.install()
                self._restarted.append(restarted)

    def _module_to_repair(self, name: str) -> str:
        """Return the name of the module to repair, so that module `name` leaks no more.

        If repaired modules contain module `name`, it is the outermost of them: its mode has not helped, and it needs
        another one. Otherwise it is module `name` itself, or its nearest parent whose class torch does not define.
        """
        repaired_names = [path for repaired in self._repaired_classes.values() for path in repaired.names]
        outer_names = [outer for outer in repaired_names if name == outer or name.startswith(outer + ".")]
        if outer_names:
            return min(outer_names, key=len)
        # FSDP2 replaces the class of a module by a subclass that torch defines, so all base classes count.
        while "." in name and all(
            kind.__module__.partition(".")[0] in ("torch", "builtins") for kind in type(self._modules[name]).__mro__
        ):
            name = name.rpartition(".")[0]
        return name

    def _repair_module(self, name: str) -> bool:
        """Repair a module and all of its class in the next mode or, after the last mode, its parent in the first.

        Returns:
            Whether a module was repaired; False if all modes of all parents have been tried, too.
        """
        while name:
            # 1. The class of the module, which may be repaired already
            module_class = type(self._modules[name])
            if module_class not in self._repaired_classes:
                names = [path for path, module in self._modules.items() if type(module) is module_class]
                # A module with repaired modules inside is repaired as a whole. If one module of a class is inside, all
                # modules of this class lose their repair; a later round repairs those outside again if they leak.
                for inner_class, inner in list(self._repaired_classes.items()):
                    if any(path.startswith(outer + ".") for path in inner.names for outer in names):
                        self._repaired_classes.pop(inner_class).remove()
                self._repaired_classes[module_class] = _RepairedClass(names, iter(REPAIR_MODES))
            # 2. Its next mode
            if self._install_next_mode(self._repaired_classes[module_class]):
                return True
            # 3. If it has no more modes, its parent
            self._repaired_classes.pop(module_class).remove()
            name = name.rpartition(".")[0]
            while name and isinstance(self._modules[name], nn.ModuleList | nn.ModuleDict):  # containers are not called
                name = name.rpartition(".")[0]
        return False

    def _install_next_mode(self, repaired: _RepairedClass) -> bool:
        """Install the next mode that is possible on the modules of a class, and return whether there is one."""
        repaired.remove()
        for mode in repaired.modes:
            try:
                # By name of a module: which axes of its inputs and outputs index tokens, and which axis the rows of a
                # batch. They are learned again for each mode, on other random documents.
                axes = learn_axes(self.probe, repaired.names)
                gets_positions = any("position_ids" in module_axes.inputs for module_axes in axes.values())
                # `REPAIR_MODES` has each mode with positions before the same mode without them. The two differ only
                # for a module that takes positions.
                if not mode.gets_positions and not gets_positions:
                    continue
                if not axes:
                    return False
                # If the model raises on a pack, modules behind may not be called, and no axes are learned for them.
                # They get the axes of the first module of the class.
                first_axes = next(iter(axes.values()))
                hooks = [
                    RepairedModule(self._modules[name], axes.get(name, first_axes), mode) for name in repaired.names
                ]
            except (NotLearned, ValueError):  # from `learn_axes`, or from `RepairedModule` for sharded parameters
                continue
            repaired.mode = mode
            repaired.hooks = hooks
            for module_hooks in hooks:
                module_hooks.install()
            return True
        return False


def agree_on_ranks(value: T) -> T:
    """Return `value` if it is the same on all ranks, so that all ranks go on in the same way.

    Raises:
        RuntimeError: a rank has another value.
    """
    values = gather_values(value)
    if any(rank_value != value for rank_value in values):
        raise RuntimeError(
            f"the leak probe found {values} on the {len(values)} ranks: with different results, ranks would run "
            "different models and wait for each other forever. Set the same model, dtype and attention on all ranks; "
            'if they are the same already, set on_leak="unpack".'
        )
    return value
