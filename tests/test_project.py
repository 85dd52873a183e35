"""The versions that are supported are those that are tested."""

import re
import runpy
import shutil
import tomllib

import pytest
import yaml
from packaging.version import Version
from support.launch import FORK_SECONDS, LAUNCH_SECONDS, PROCESS_SECONDS, run_to_end
from support.paths import ROOT

from trl_packfix.version import TESTED_VERSIONS, __version__

PACKAGE = ROOT / "trl_packfix"
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]


def test_workflows_test_the_python_versions_that_are_supported():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    classified = [name.rsplit(" ", 1)[1] for name in PROJECT["classifiers"] if "Python :: 3." in name]
    assert jobs["quick"]["strategy"]["matrix"]["python"] == classified


def test_one_version_is_released_and_cited():
    """Changelog and citation name the newest release: this version, or the one before a development version."""
    released = re.search(r"^## \[(\d+\.\d+\.\d+)\] - ([\d-]+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["version"], cited["date-released"]) == released.groups()
    assert __version__ == released[1] or Version(__version__) > Version(released[1])
    assert Version(__version__).is_devrelease == (__version__ != released[1])
    assert SETTINGS["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "trl_packfix.version.__version__"}


def test_the_changelog_is_short():
    assert len((ROOT / "CHANGELOG.md").read_text().split()) <= 900


def test_the_site_has_version_and_licence_of_the_project():
    hook = runpy.run_path(str(ROOT / "tools" / "site.py"))["on_config"]
    site = hook({})
    assert site["copyright"] == f"trl_packfix {__version__}, licence: {PROJECT['license']}"
    assert site["repo_url"] == PROJECT["urls"].get("Repository")
    assert "tools/site.py" in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["hooks"]


def test_the_tested_versions_are_those_of_the_constraints():
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert TESTED_VERSIONS.keys() >= {"torch", "transformers", "trl", "peft", "accelerate", "datasets"}
    assert {name: pinned[name] for name in TESTED_VERSIONS} == TESTED_VERSIONS


def test_the_oldest_versions_are_the_floors_of_the_project():
    extras = [name for group in PROJECT["optional-dependencies"].values() for name in group]
    floors = dict(re.match(r"([\w-]+)>=([\d.]+)", name).groups() for name in PROJECT["dependencies"])
    floors |= {name: floor for name, floor in re.findall(r"^(deepspeed)>=([\d.]+)$", "\n".join(extras), re.MULTILINE)}
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "constraints-oldest.txt").read_text(), re.MULTILINE))
    assert pinned.keys() == floors.keys()
    for name, floor in floors.items():
        numbers = floor.split(".")
        assert pinned[name].split(".")[: len(numbers)] == numbers, name


def test_each_module_has_tests_near_it():
    """`tools/tests_of.py` finds them, and those of a few modules are the ones that a reader would name."""
    nearest_tests = runpy.run_path(str(ROOT / "tools" / "tests_of.py"))["nearest_tests"]
    modules = [file for file in PACKAGE.rglob("*.py") if not file.name.startswith("__")]
    assert len(modules) > 100
    assert [file for file in modules if not nearest_tests(file)] == []
    for module, test in {
        "planning/schedule.py": "planning/test_scheduling.py",
        "data/cache.py": "data/test_prepared.py",
        "data/loaders.py": "data/test_loading.py",  # through a public name
        "training/evaluation.py": "training/test_evaluation.py",  # by its name
        "reporting/build.py": "reporting/test_report.py",
        "features/hybrids/mixers.py": "features/hybrids/test_mixers.py",
    }.items():
        if (PACKAGE / module).exists():  # the folder of a feature may be missing
            assert ROOT / "tests" / test in nearest_tests(PACKAGE / module)[:8]


@pytest.fixture
def run_make_in_folder(tmp_path, monkeypatch):
    """Return a function that runs `make` in a folder with what its rules read, and nothing installed.

    It returns what `make` prints.
    """
    for path in (ROOT / "Makefile", ROOT / "pyproject.toml", *ROOT.glob("constraints*.txt")):
        shutil.copy2(path, tmp_path)

    def run_make(*arguments, **kwargs):
        return run_to_end("make", "--no-print-directory", *arguments, cwd=tmp_path, **kwargs).stdout

    for name in ("MAKEFLAGS", "OMP_WAIT_POLICY", "VERSIONS"):
        monkeypatch.delenv(name, raising=False)
    return run_make


def test_the_demo_installs_no_more_than_it_needs(run_make_in_folder):
    commands = run_make_in_folder("--dry-run", "demo")
    assert '--editable ".[demo]"' in commands
    assert not re.findall("deepspeed|plot|--group", commands)


def test_the_tests_install_the_rest(run_make_in_folder, tmp_path):
    everything = run_make_in_folder("--dry-run", "test")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed-demo").touch()
    commands_of_tests = run_make_in_folder("--dry-run", "test")
    assert everything.endswith(commands_of_tests)
    assert "torch==" not in commands_of_tests
    assert re.findall(r"deepspeed|--group dev", commands_of_tests) == ["deepspeed", "--group dev"]
    assert "pip" not in run_make_in_folder("--dry-run", "demo")


@pytest.mark.parametrize("setting, printed", [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_of_commands_sleep_while_they_wait(setting, printed, run_make_in_folder):
    assert run_make_in_folder("--eval", "show: ; @echo $$OMP_WAIT_POLICY", "show", **setting) == f"{printed}\n"


@pytest.mark.parametrize("seconds", [FORK_SECONDS, LAUNCH_SECONDS, PROCESS_SECONDS])
def test_processes_of_a_test_end_before_the_test_is_ended(seconds):
    """Forks that outlive a worker of pytest hold its pipe, and pytest would wait for them."""
    options = SETTINGS["tool"]["pytest"]["ini_options"]
    assert options["faulthandler_exit_on_timeout"] is True
    assert options["faulthandler_timeout"] > seconds + 50
