"""List the tests nearest to a module: `python tools/tests_of.py trl_packfix/planning/schedule.py [more files]`.

The map is computed from the sources, so nothing has to be kept up to date. A test file tests the modules that it
imports, those that a helper of tests imports for it, those of the public names that it uses, and the module that it is
named after. A module that no test reaches so is tested through the modules that import it, and one that is imported by
name only, as the commands of `cli/` are, by the tests of its wing.
"""

import ast
import re
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "trl_packfix"
TESTS = ROOT / "tests"


@cache
def imported_files(file: Path) -> frozenset[Path]:
    """Return the files of the package, `tests/` and `tools/` that a file imports anywhere, public names resolved."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {_file_of(alias.name.split("."), []) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = list(file.relative_to(ROOT).parts[: -node.level]) if node.level else []
            base = [*above, *(node.module.split(".") if node.module else [])]
            found |= {_file_of(base, [alias.name]) for alias in node.names}
    return frozenset(found - {file, None})


def _file_of(base: list[str], name: list[str]) -> Path | None:
    if base == ["trl_packfix"] and name and name[0] in _public_names():
        base = ["trl_packfix", *_public_names()[name[0]].split(".")]
    for folder in (ROOT, TESTS, ROOT / "tools"):
        for parts in ([*base, *name], base):
            file = folder.joinpath(*parts)
            for path in (file.with_suffix(".py"), file / "__init__.py"):
                if path.is_file():
                    return path
    return None


@cache
def _public_names() -> dict[str, str]:
    """Return the module of each public name, from the dictionary `_MODULE_OF` of the package."""
    for node in ast.parse((PACKAGE / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "_MODULE_OF":
            return ast.literal_eval(node.value)
    raise AssertionError("trl_packfix/__init__.py has no `_MODULE_OF`")


@cache
def _entries(test: Path) -> frozenset[Path]:
    """Return the modules that a test file imports, itself or through a helper of tests."""
    direct = imported_files(test)
    helpers = {file for file in direct if PACKAGE not in file.parents}
    through = {file for helper in helpers for file in imported_files(helper)}
    return frozenset(file for file in direct | through if PACKAGE in file.parents)


def _is_named_after(test: Path, module: Path) -> bool:
    """Whether a test file has the name of a module, in the folder of its wing: `test_schedule` or `test_scheduling`."""
    stem = test.stem.removeprefix("test_")
    beginning = re.sub(r"(s|e|ing|uling)$", "", stem)
    return test.parent.name == module.parent.name and (stem == module.stem or module.stem.startswith(beginning))


@cache
def _importers() -> dict[Path, set[Path]]:
    """Return the modules that import each module."""
    importers = defaultdict(set)
    for file in PACKAGE.rglob("*.py"):
        for target in imported_files(file):
            importers[target].add(file)
    return importers


def distances(module: Path) -> dict[Path, int]:
    """Return each test file that reaches the module, and the number of imports between the two (0: its own test)."""
    importers = _importers()
    levels = [{module}]
    reached = {module}
    while levels[-1]:
        levels.append({above for file in levels[-1] for above in importers[file]} - reached)
        reached |= levels[-1]
    found: dict[Path, int] = {}
    for test in sorted(TESTS.rglob("test_*.py")):
        if _is_named_after(test, module):
            found[test] = 0
            continue
        entries = _entries(test)
        steps = next((step for step, files in enumerate(levels) if files & entries), None)
        if steps is not None:
            found[test] = steps + (module not in imported_files(test))
    return found


def nearest_tests(module: Path) -> list[Path]:
    """Return the test files of the smallest two distances, nearest first, those of the module's wing before others."""
    found = distances(module)
    found = found or dict.fromkeys((TESTS / module.parent.relative_to(PACKAGE)).glob("test_*.py"), 0)
    limit = min(found.values(), default=0) + 1
    near = [test for test, distance in found.items() if distance <= limit]
    return sorted(near, key=lambda test: (found[test], test.parent.name != module.parent.name, test))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        for path in nearest_tests(Path(argument).resolve()):
            print(path.relative_to(ROOT))
