"""Plant one-line faults in modules and list those that no nearby test finds.

    python tools/mutants.py trl_packfix/planning/schedule.py trl_packfix/data/cache.py --survivors survivors.txt

A mutant is a module with one number, comparison, operator, minimum or element of a key changed. cosmic-ray makes most
of them. The tests are those of `tools/tests_of.py` that start no process; of these, the ones that run the changed line.
`trl_packfix/planning/packs.py:35-60,80` in place of a file changes these lines only. Where the nearest tests are slow,
`--tests` and `-k` choose others.
The package is in `.venv` after `make`, with cosmic-ray of the group `dev`.

Importing torch, transformers and TRL costs ten times the CPU time of most tests. So they are imported once, and a fork
runs each mutant:

1. This process imports the libraries, but nothing of the package.
2. A fork per module collects its tests. Its own first fork runs them all under a trace, which finds the lines that each
   test runs, its CPU seconds, and whether it passes without a mutant.
3. A fork of the process of step 2 per mutant in the body of a function replaces the code of that function, and runs the
   tests of its line until one fails.
4. A mutant of what runs at import (a constant, a default, a field) needs new imports: a fork of the process of step 1
   imports the module from the changed source.

Files on disk stay as they are. Tests that start processes do not see a mutant, so they are left out.
"""

import argparse
import ast
import gc
import os
import pickle
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import abc, machinery, util
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import support  # noqa: F401 # sets the environment before torch is imported

for name in [name for name in sys.modules if name.partition(".")[0] in ("trl_packfix", "support")]:
    del sys.modules[name]  # each fork imports its own

import hypothesis
import parso
import peft  # noqa: F401
import pytest
import trl.trainer.sft_trainer  # noqa: F401 # with torch, transformers, datasets and accelerate
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators import (
    binary_operator_replacement,
    boolean_replacer,
    comparison_operator_replacement,
    number_replacer,
)
from cosmic_ray.operators.operator import Operator
from tests_of import nearest_tests

LIMIT = 10  # times the CPU seconds of the tests without a mutant, after which a mutant counts as found
MARKERS = "not processes and not gpu and not faults and not sweep"
ARGUMENTS = ["-q", "-s", "-p", "no:xdist", "-p", "no:cacheprovider", "-p", "no:logging", "--tb=no", "-m", MARKERS]


PAIRS = (("min", "max"), ("minimum", "maximum"), ("any", "all"), ("floor", "ceil"))
OTHER = dict([*PAIRS, *((second, first) for first, second in PAIRS)])


class SwapNames(Operator):
    """Operator of cosmic-ray: the other one of two functions."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        if node.type == "name" and node.value in OTHER and node.get_next_leaf() == "(":
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        return parso.python.tree.Name(OTHER[node.value], node.start_pos, node.prefix)

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


class DropElement(Operator):
    """Operator of cosmic-ray: one element fewer in a tuple, list or dictionary, which may be a key of a cache."""

    def mutation_positions(self, node: Any) -> list[Any]:
        children = node.children if self._elements(node) else []
        return [(children[first].start_pos, children[stop - 1].end_pos) for first, stop in self._elements(node)]

    def mutate(self, node: Any, index: int) -> Any:
        first, stop = self._elements(node)[index]
        del node.children[first:stop]
        return node

    @staticmethod
    def _elements(node: Any) -> list[tuple[int, int]]:
        """Return the first child of each element and the one behind its comma. The last one has the comma before it."""
        if node.type not in ("testlist_comp", "dictorsetmaker") or getattr(node.parent, "type", "") != "atom":
            return []
        commas = [i for i, child in enumerate(node.children) if child == ","]
        if not commas:
            return []
        starts = [0, *(comma + 1 for comma in commas)]
        elements = [(start, comma + 1) for start, comma in zip(starts, commas, strict=False)]
        return elements if starts[-1] == len(node.children) else [*elements, (commas[-1], len(node.children))]

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


def _operators() -> Iterator[Operator]:
    comparisons = "Lt_LtE LtE_Lt Gt_GtE GtE_Gt Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is".split()
    binary = "Add_Sub Sub_Add Mul_FloorDiv FloorDiv_Mul Div_Mul Mod_FloorDiv Pow_Mul".split()
    for pair in comparisons:
        yield getattr(comparison_operator_replacement, f"ReplaceComparisonOperator_{pair}")()
    for pair in binary:
        yield getattr(binary_operator_replacement, f"ReplaceBinaryOperator_{pair}")()
    for name in ("ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"):
        yield getattr(boolean_replacer, name)()
    yield from (number_replacer.NumberReplacer(), SwapNames(), DropElement())


@dataclass
class Mutant:
    """One changed line of a module.

    Attributes:
        line: its number, from 1.
        change: the line before and after.
        result: "found", "survived", "not run" (no nearby test runs its line) or "no time".
    """

    line: int
    change: str
    source: str = field(repr=False)
    result: str = ""


def make_mutants(source: str) -> list[Mutant]:
    """Return all mutants of a module that differ from it and compile, in the order of its lines."""
    found = {}
    lines = source.splitlines()
    original = ast.dump(ast.parse(source))
    for operator in _operators():
        number = 0
        while (mutated := mutate_code(source, operator, number)) is not None:
            number += 1
            try:
                if ast.dump(ast.parse(mutated)) == original:
                    continue
            except SyntaxError:
                continue
            changed = mutated.splitlines()
            if len(changed) != len(lines):
                continue
            line = next(i for i, (old, new) in enumerate(zip(lines, changed, strict=True)) if old != new)
            change = f"{lines[line].strip()}  ->  {changed[line].strip()}"
            found[mutated] = Mutant(line + 1, change, mutated)
    return sorted(found.values(), key=lambda mutant: mutant.line)


# ---- Which tests run which line


@dataclass
class TestRun:
    """What a test did without a mutant."""

    __test__ = False
    seconds: float = 0.0  # of CPU
    passed: bool = True
    lines: set[int] = field(default_factory=set)


class Tracer:
    """Plugin of pytest: for each test the lines of a file that it runs, its CPU seconds and whether it passes.

    What a test runs in its setup may be a fixture that other tests of its file use, so it counts for all of them.
    """

    def __init__(self, file: Path):
        self.file, self.lines, self.runs = str(file), set(), defaultdict(TestRun)
        self.start = 0.0

    def trace(self, frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != self.file:
            return None
        self.lines.add(frame.f_lineno)
        return self.trace

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.start = time.process_time()
        sys.settrace(self.trace)
        threading.settrace(self.trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        run = self.runs[report.nodeid]
        run.passed &= report.passed
        run.seconds = time.process_time() - self.start
        run.lines |= self.lines
        if report.when == "setup":
            file = report.nodeid.partition("::")[0]
            self.runs[file].lines |= self.lines
        self.lines = set()

    def result(self) -> dict[str, TestRun]:
        """Return the run of each test by its node id."""
        tests = {name: run for name, run in self.runs.items() if "::" in name}
        for name, run in tests.items():
            run.lines |= self.runs[name.partition("::")[0]].lines
        return tests


def choose_tests(runs: dict[str, TestRun], lines: set[int], seconds: float) -> list[str]:
    """Return the tests that run one of the lines, cheapest files and tests first, of at most so many CPU seconds."""
    chosen = {name: run.seconds for name, run in runs.items() if run.passed and run.lines & lines}
    file_of = {name: name.partition("::")[0] for name in chosen}
    files: dict[str, float] = defaultdict(float)
    for name, cost in chosen.items():
        files[file_of[name]] += cost
    found = []
    total = 0.0
    for name in sorted(chosen, key=lambda name: (files[file_of[name]], file_of[name], chosen[name])):
        total += chosen[name]
        if found and total > seconds:
            break
        found.append(name)
    return found


# ---- Where a mutant takes effect


class Places:
    """The parts of a module: bodies of functions, and what runs when it is imported."""

    def __init__(self, source: str):
        tree = ast.parse(source)
        self.bodies: list[tuple[int, int]] = []  # first and last line of the bodies of outermost functions
        self.uses: dict[str, set[int]] = defaultdict(set)  # the lines where a name is read
        self.statements: list[tuple[int, int, set[str]]] = []  # of the module, with the names that they set
        self.num_lines = len(source.splitlines())
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self.uses[node.id].add(node.lineno)
        self._add_bodies(tree)
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = {name.id for target in targets if target for name in ast.walk(target) if isinstance(name, ast.Name)}
            self.statements.append((node.lineno, node.end_lineno or node.lineno, names))

    def _add_bodies(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                self.bodies.append((child.body[0].lineno, child.end_lineno or child.lineno))
            else:
                self._add_bodies(child)

    def is_in_body(self, line: int) -> bool:
        return any(first <= line <= last for first, last in self.bodies)

    def lines_of(self, line: int) -> set[int]:
        """Return the lines that show a mutant of this line: itself in a body, else where its names are read, or all."""
        if self.is_in_body(line):
            return {line}
        names = next((names for first, last, names in self.statements if first <= line <= last), set())
        used = {use for each in names for use in self.uses[each] if self.is_in_body(use)}
        return used or {each for first, last in self.bodies for each in range(first, last + 1)}


def functions_of(file: Path) -> dict[tuple[str, int], list[FunctionType]]:
    """Return the functions of an imported file by name and line, wherever they are bound."""
    gc.unfreeze()  # tests/conftest.py freezes what was imported, and frozen objects are not listed
    found = defaultdict(list)
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename == str(file):
            found[each.__code__.co_qualname, each.__code__.co_firstlineno].append(each)
    return found


def changed_code(file: Path, source: str, mutated: str) -> tuple[tuple[str, int], CodeType]:
    """Return name, line and code of the function that is not the same in a mutant."""
    before, after = (dict(_outer_codes(compile(text, str(file), "exec"))) for text in (source, mutated))
    (place,) = [place for place in after if after[place] != before[place]]
    return place, after[place]


def _outer_codes(code: CodeType) -> Iterator[tuple[tuple[str, int], CodeType]]:
    """Yield the code of each function that is not inside another one, with its name and line."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            if each.co_flags & 0x2:  # CO_NEWLOCALS is not set for classes; functions are optimized
                yield (each.co_qualname, each.co_firstlineno), each
            else:
                yield from _outer_codes(each)


class MutatedImport(abc.MetaPathFinder, abc.Loader):
    """Import a module from its mutant."""

    def __init__(self, module: str, file: Path, mutated: str):
        self.module = module
        self.file = file
        self.mutated = mutated

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> machinery.ModuleSpec | None:
        if name != self.module:
            return None
        return util.spec_from_file_location(name, self.file, loader=self)

    def create_module(self, spec: machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        exec(compile(self.mutated, str(self.file), "exec"), module.__dict__)


# ---- Forks


DIED = "died"


def in_fork(run: Callable[[], Any], seconds: float | None = None) -> Any:
    """Run a function in a fork with a temporary folder of its own, and return its result, or DIED.

    The fork ends after so many CPU seconds, or after a minute and 20 times as many seconds on the clock.
    """
    folder = tempfile.mkdtemp(prefix="mutant")
    pid = os.fork()
    if not pid:
        try:
            output = os.open(os.environ.get("MUTANTS_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ["TMPDIR"] = os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.tempdir = folder
            if seconds is not None:
                resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
            result = run()
            Path(folder, "result").write_bytes(pickle.dumps(result))
        finally:
            os._exit(0)
    begin = time.monotonic()
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if seconds is not None and time.monotonic() - begin > 60 + 20 * seconds:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    try:
        return pickle.loads(Path(folder, "result").read_bytes())
    except (OSError, EOFError, pickle.UnpicklingError):
        return DIED
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class WithoutShrinking:
    """Plugin of pytest: hypothesis draws the same examples in each fork, and does not search for smaller ones."""

    def pytest_collection(self) -> None:
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile("mutants", deadline=None, derandomize=True, database=None, phases=phases)
        hypothesis.settings.load_profile("mutants")


class RunMutants(WithoutShrinking):
    """Plugin of pytest: run the tests in forks, without a mutant, then with each mutant in the body of a function.

    The other mutants have no result afterwards.
    """

    def __init__(self, options: argparse.Namespace, file: Path, *, tests: list[str], mutants: list[Mutant]):
        self.options = options
        self.file = file
        self.tests = tests
        self.mutants = mutants
        self.source = file.read_text()
        self.places = Places(self.source)
        self.runs: dict[str, TestRun] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        tracer = Tracer(self.file)

        def trace() -> dict[str, TestRun]:
            session.config.pluginmanager.register(tracer)
            nearest = sorted(session.items, key=self.rank_of)
            run_items(session, nearest, until=self.options.traced)
            return tracer.result()

        runs = in_fork(trace)
        assert runs != DIED, f"the tests of {self.file} end the process without a mutant"
        self.runs = runs
        seconds = sum(run.seconds for run in runs.values())
        functions = functions_of(self.file)
        finds = Counter[str]()
        print(f"{self.file.name}: {len(runs)} tests, {seconds:.0f} CPU s", flush=True)
        for mutant in self.mutants:
            tests = choose_tests(self.runs, self.places.lines_of(mutant.line), self.options.seconds)
            if not tests:
                mutant.result = "not run"
            elif time.monotonic() > self.options.end:
                mutant.result = "no time"
            elif self.places.is_in_body(mutant.line):
                place, code = changed_code(self.file, self.source, mutant.source)
                assert functions[place], f"no function {place}"
                # A test that found other mutants is likely to find this one
                chosen = [items[name] for name in sorted(tests, key=lambda name: -finds[name])]

                def test(
                    found: list[FunctionType] = functions[place],
                    code: CodeType = code,
                    chosen: list[pytest.Item] = chosen,
                ) -> str:
                    for function in found:
                        function.__code__ = code
                    return run_items(session, chosen)

                failed = in_fork(test, self.limit(tests))
                finds[failed] += 1
                mutant.result = "found" if failed else "survived"
                print(f"{mutant.line}: {mutant.result}: {mutant.change} ({len(tests)} tests, {failed})", flush=True)
        return True

    def rank_of(self, item: pytest.Item) -> tuple[bool, int]:
        """Return the place of a test in the order without a mutant: slow ones last, near ones first."""
        file = str(item.path)
        return item.get_closest_marker("slow") is not None, self.tests.index(file) if file in self.tests else -1

    def limit(self, tests: list[str]) -> float:
        """Return the CPU seconds after which a mutant counts as found."""
        return 5 + LIMIT * sum(self.runs[name].seconds for name in tests)


def run_items(session: pytest.Session, items: list[pytest.Item], until: float | None = None) -> str:
    """Run tests until one fails, or for so many CPU seconds if `until` is given. Return the name of the failed test."""
    session.testsfailed = 0
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if until is None and session.testsfailed:
            return item.nodeid
        if until is not None and time.process_time() > until:
            break
    return ""


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


def test_mutants(file: Path, options: argparse.Namespace, lines: set[int] | None = None) -> list[Mutant]:
    """Return all mutants of a module, or of some of its lines, with their results."""
    mutants = [each for each in make_mutants(file.read_text()) if lines is None or each.line in lines]
    tests = options.tests or [str(test) for test in nearest_tests(file)[: options.files]]
    if not options.tests and ">>> " in file.read_text():
        tests.append(f"tests/test_docs.py::test_docstring_examples[{file.parent.name}.{file.stem}]")
    plugin = RunMutants(options, file, tests=tests, mutants=mutants)

    def collect() -> tuple[list[str], dict[str, TestRun]]:
        chosen = [*tests, "-k", options.k] if options.k else tests
        pytest.main([*ARGUMENTS, "--continue-on-collection-errors", *chosen], plugins=[plugin])
        return [mutant.result for mutant in mutants], plugin.runs

    outcome = in_fork(collect)
    assert outcome != DIED, f"{file}: see the file that MUTANTS_LOG names"
    results, plugin.runs = outcome
    for mutant, result in zip(mutants, results, strict=True):
        mutant.result = result
        if not result and time.monotonic() > options.end:
            mutant.result = "no time"
        elif not result:
            chosen = choose_tests(plugin.runs, plugin.places.lines_of(mutant.line), options.seconds)

            def test(mutant: Mutant = mutant, chosen: list[str] = chosen) -> int:
                sys.meta_path.insert(0, MutatedImport(module_name(file), file, mutant.source))
                return int(pytest.main([*ARGUMENTS, "-x", *chosen], plugins=[WithoutShrinking()]))

            code = in_fork(test, 30 + plugin.limit(chosen))
            mutant.result = "survived" if code == 0 else "found"
    return mutants


def parse_target(text: str) -> tuple[Path, set[int] | None]:
    """Return the file and the lines of `FILE:FIRST-LAST,LINE`; None for all lines."""
    file, _, ranges = text.partition(":")
    if not ranges:
        return Path(file), None
    bounds = [each.split("-") for each in ranges.split(",")]
    return Path(file), {line for each in bounds for line in range(int(each[0]), int(each[-1]) + 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="+", help="files of the package, each with lines or whole")
    parser.add_argument("--survivors", type=Path, help="file for the lines that no test finds; new ones are added")
    parser.add_argument("--seconds", type=float, default=10, help="most CPU seconds of tests for a mutant")
    parser.add_argument("--tests", nargs="+", help="test files or tests to run in place of the nearest ones")
    parser.add_argument("-k", help="expression of pytest that chooses among these tests by name")
    parser.add_argument("--files", type=int, default=6, help="most test files of a module, nearest first")
    parser.add_argument("--traced", type=float, default=30, help="CPU seconds of tests without a mutant, nearest first")
    parser.add_argument("--minutes", type=float, default=60, help="begin no mutant of a module after so long")
    options = parser.parse_args()
    os.chdir(ROOT)
    print("| module | mutants | found | survived | not run | no time | CPU s |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for module, lines in map(parse_target, options.modules):
        options.end = time.monotonic() + 60 * options.minutes
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        mutants = test_mutants(module.resolve(), options, lines)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        counts = Counter(mutant.result for mutant in mutants)
        numbers = [len(mutants), *(counts[result] for result in ("found", "survived", "not run", "no time"))]
        print(f"| {module} | {' | '.join(map(str, numbers))} | {seconds:.0f} |", flush=True)
        if options.survivors is not None:
            with options.survivors.open("a") as file:
                for mutant in mutants:
                    if mutant.result in ("survived", "not run"):
                        file.write(f"{module}:{mutant.line}: {mutant.result}: {mutant.change}\n")


if __name__ == "__main__":
    main()
