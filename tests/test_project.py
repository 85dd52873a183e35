"""What surrounds the package is true: one version, and workflows that call make."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

import trl_packfix

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def released() -> tuple[str, str, str]:
    """What the changelog has under "Unreleased", and the newest version with its date."""
    text = (ROOT / "CHANGELOG.md").read_text()
    return re.search(r"^## \[Unreleased\]\n(.*?)^## \[(\d[^]]*)\] - (\S+)$", text, re.MULTILINE | re.DOTALL).groups()


def test_what_is_released_is_one_version():
    """The citation and the changelog name the newest release. The package is that, or a `.dev0` after it: then, and
    only then, changes are waiting."""
    changes, version, date = released()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], str(citation["date-released"])) == (version, date)
    package = Version(trl_packfix.__version__)
    assert package == Version(version) or (package.is_devrelease and package > Version(version))
    assert package.is_devrelease == bool(changes.strip())


@pytest.mark.parametrize("file", sorted((GITHUB / "workflows").glob("*.yml")), ids=lambda file: file.stem)
def test_workflows_run_targets_and_tools_that_exist(file):
    jobs = yaml.safe_load(file.read_text())["jobs"]
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    for program, *words in map(str.split, runs):
        assert words[0] in TARGETS if program == "make" else (ROOT / program).stat().st_mode & 0o111, program
    assert runs


def test_workflows_test_the_python_versions_that_are_supported():
    matrix = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())["jobs"]["quick"]["strategy"]["matrix"]
    classified = [name.rsplit(" ", 1)[1] for name in PROJECT["classifiers"] if "Python :: 3." in name]
    assert matrix["python"] == classified


def test_the_oldest_versions_are_the_floors_of_the_project():
    extras = [name for group in PROJECT["optional-dependencies"].values() for name in group]
    floors = dict(re.match(r"([\w-]+)>=([\d.]+)", name).groups() for name in PROJECT["dependencies"])
    floors |= {name: floor for name, floor in re.findall(r"^(deepspeed)>=([\d.]+)$", "\n".join(extras), re.MULTILINE)}
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "constraints-oldest.txt").read_text(), re.MULTILINE))
    assert pinned.keys() == floors.keys()
    for name, floor in floors.items():
        parts = floor.split(".")
        assert pinned[name].split(".")[: len(parts)] == parts, name


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md", "tools/README.md"])
def test_contributors_are_sent_to_places_that_exist(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)\s#]+)\)", text):
        assert (ROOT / target).exists(), target
    for path in re.findall(r"`((?:trl_packfix|tests|docs|dev|tools|benchmarks|examples)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`((?:data|training|planning|attention|isolation)/\w+\.py)`", text):
        assert (ROOT / "trl_packfix" / path).exists(), path
    for target in re.findall(r"`make (\w+)", text):
        assert target in TARGETS
