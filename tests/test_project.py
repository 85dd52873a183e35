"""The versions that are supported are those that are tested."""

import re
import tomllib
from pathlib import Path

import yaml

from trl_packfix.version import TESTED_VERSIONS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_workflows_test_the_python_versions_that_are_supported():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    classified = [name.rsplit(" ", 1)[1] for name in PROJECT["classifiers"] if "Python :: 3." in name]
    assert jobs["quick"]["strategy"]["matrix"]["python"] == classified


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
        parts = floor.split(".")
        assert pinned[name].split(".")[: len(parts)] == parts, name
