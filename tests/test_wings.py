"""The package is eight wings, and arrows between them point only downwards; the built wheel has all of them."""

import ast
import tomllib
import zipfile
from graphlib import CycleError, TopologicalSorter
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.examples import leaking_example
from support.launch import run_python, run_to_end
from support.paths import ROOT

PACKAGE = ROOT / "trl_packfix"

# dev/design.md, "The house": a module may import from its own wing and from these, and always from those in ANYONE.
BELOW = {
    "planning": set(),
    "attention": set(),
    "samples": set(),
    "data": {"planning", "samples"},
    "isolation": {"attention", "data"},
    "reporting": {"planning", "samples", "data", "isolation"},
    "training": {"planning", "attention", "samples", "data", "isolation", "reporting"},
    "cli": {"planning", "attention", "samples", "data", "isolation", "reporting", "training"},
    "features": {"planning", "attention", "samples", "data", "isolation", "reporting", "training"},
}
# What of a wing may be imported, where not all of it may
NAMES = "collator rank_share".split()
ONLY = {("isolation", "data"): {f"data.{name}" for name in NAMES}}
ANYONE = {"compat", "feature", "group", "layout", "version", "wording"}

RECIPES = [f"cli/recipe_files/{file.name}" for file in (PACKAGE / "cli" / "recipe_files").glob("*.yaml")]
DATA_FILES = ("py.typed", "cli/zero3.json", "training/foreign_keys.yaml", "reporting/page.html", *RECIPES)
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imports(module: str) -> set[str]:
    """Return the modules of this package that a module imports: at the top, in functions, under TYPE_CHECKING."""
    path = MODULES[module]
    imported = set()
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    package = [] if module == "__init__" else package
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            elif (node.module or "").split(".")[0] == "trl_packfix":
                base = node.module.split(".")[1:]
            else:
                continue
            base = [name for name in base if name]
            for alias in node.names:
                target = ".".join([*base, alias.name])
                imported.add(target if target in MODULES else ".".join(base))
        elif isinstance(node, ast.Import):
            names = (alias.name.removeprefix("trl_packfix.") for alias in node.names)
            imported |= {name for name in names if name in MODULES}
    return imported - {module}


ARROWS = [(module, target) for module in MODULES for target in sorted(imports(module)) if "." in module]


def is_allowed(module: str, target: str) -> bool:
    wing = module.split(".")[0]
    other_wing = target.split(".")[0]
    if wing == other_wing or target in ANYONE:
        return True
    return other_wing in BELOW[wing] and target in ONLY.get((wing, other_wing), {target})


def test_arrows_point_downwards():
    assert len(ARROWS) > 150
    assert not is_allowed("isolation.check_isolation", "data.loaders")
    assert not is_allowed("attention.forwards", "features.hybrids.support")
    assert not [arrow for arrow in ARROWS if not is_allowed(*arrow)]


@pytest.mark.parametrize("module", sorted(ANYONE))
def test_no_module_at_the_top_imports_a_feature(module):
    assert not [target for target in imports(module) if target.startswith("features")]


def test_the_table_names_all_wings_and_is_free_of_circles():
    order = list(BELOW)
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(order)
    assert all(order.index(lower_wing) < order.index(wing) for wing, below in BELOW.items() for lower_wing in below)


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of a circle of imports, the first once more at the end; [] without one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_circle_inside_a_wing():
    """Not for types either: a file can be read after those that it imports, and before those that import it."""
    graph = {module: imports(module) for module in MODULES}
    assert circle_in(graph) == []
    assert "training.trainer" in graph["__init__"]  # which is imported there for types only
    module, target = ARROWS[0]
    assert circle_in(graph | {target: graph[target] | {module}})


def test_only_the_top_may_import_modules_at_the_top():
    top = [module for module in MODULES if "." not in module and module not in BELOW]
    assert set(top) == ANYONE | {"__init__", "__main__"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # built outside of the checkout: `build/` there may hold modules of another day
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    for path in PACKAGE.rglob("*"):
        if path.suffix == ".py" or path.relative_to(PACKAGE).as_posix() in DATA_FILES:
            target = source / "trl_packfix" / path.relative_to(PACKAGE)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    flags = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    run_python("-m", "pip", "wheel", *flags, folder, source)
    return next(folder.glob("*.whl"))


@pytest.mark.processes
def test_the_wheel_has_every_module(wheel):
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("trl_packfix/")}
    assert shipped == {path.relative_to(ROOT).as_posix() for path in MODULES.values()} | {
        f"trl_packfix/{name}" for name in DATA_FILES
    }


def link_packages(folder: Path, requirements: list[str]) -> None:
    """Link what `pip install` of these requirements installs into a folder: them and theirs, without any extra."""
    todo = [Requirement(text) for text in requirements]
    done: set[tuple[str, str]] = set()
    while todo:
        one = todo.pop()
        for extra in {"", *one.extras} - {extra for name, extra in done if name == one.name}:
            done.add((one.name, extra))
            try:
                distribution = metadata.distribution(one.name)
            except metadata.PackageNotFoundError:  # not for this machine
                continue
            required = [Requirement(text) for text in distribution.requires or []]
            todo += [one for one in required if one.marker is None or one.marker.evaluate({"extra": extra})]
            for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
                if not (folder / top).exists():
                    (folder / top).symlink_to(distribution.locate_file(top))


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """Make an environment with `pip install --no-deps trl_packfix` and nothing else."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    run_python("-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    run_python("-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel)
    return python


@pytest.mark.processes
def test_every_module_of_the_wheel_imports_where_only_its_requirements_are_installed(python, tmp_path):
    """Modules that import anything else break a fresh installation, and no test in the environment of the tests."""
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    link_packages(libraries, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    assert (libraries / "trl").exists()
    assert not (libraries / "pytest").exists()
    names = [f"trl_packfix.{name}".removesuffix(".__init__") for name in MODULES if name != "__main__"]
    code = f"import importlib, trl_packfix as p\nfor name in {names}: importlib.import_module(name)\nprint(p.__file__)"
    done = run_to_end(python, "-c", code, cwd=tmp_path, PYTHONPATH=str(libraries))
    assert str(python.parent.parent) in done.stdout.splitlines()[-1]


REPAIR = """

def test_it_can_be_repaired():
    from trl_packfix import prepare_for_packing

    model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=300))
    assert "repaired: 2 LlamaAttention" in prepare_for_packing(model, max_length=64).reason
"""


@pytest.mark.processes
def test_the_probe_runs_where_only_torch_and_transformers_are_installed(python, tmp_path):
    """Our example for other projects passes on Llama, and names the module of a type that leaks."""
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    link_packages(libraries, ["torch", "transformers", "pytest"])
    assert not [name for name in ("trl", "peft", "datasets", "accelerate", "pyarrow") if (libraries / name).exists()]
    example = (ROOT / "examples" / "test_isolation.py").read_text()
    (tmp_path / "test_llama.py").write_text(example)
    leaking = leaking_example()
    leaking_test = (example + REPAIR).replace("Llama", leaking.module.removesuffix("Attention"))
    (tmp_path / "test_leaking.py").write_text(leaking_test)
    words = ["-m", "pytest", "-q", "test_llama.py", "test_leaking.py"]
    done = run_to_end(python, *words, cwd=tmp_path, succeeds=False, PYTHONPATH=str(libraries))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed, 3 passed" in done.stdout
    assert "PackingLeakError" in done.stdout
    assert f"{leaking.first} ({leaking.module})" in done.stdout
