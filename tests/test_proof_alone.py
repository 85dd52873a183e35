"""The proof is a library of its own: layouts, attention and isolation need torch, transformers and numpy only.

`test_wings.py` runs `check_isolation` where nothing else is installed. Here the other packages are hidden in a process,
and everything that the example uses runs.
"""

import json

import pytest
from support.launch import run_python
from support.paths import ROOT

HIDDEN = ("trl", "accelerate", "datasets", "peft", "deepspeed", "pyarrow", "rich", "matplotlib")
pytestmark = pytest.mark.processes

# Runs in the other process. A finder that finds nothing is what an environment without the package has; one that
# raises an error would stop transformers, which looks for optional packages.
PROGRAM = """
import json, runpy, sys

HIDDEN, EXAMPLE = json.loads(sys.argv[1])

class FinderWithoutHidden:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [FinderWithoutHidden(finder) for finder in sys.meta_path]
example = runpy.run_path(EXAMPLE)
facts = {
    "hidden_modules": [name for name in sys.modules if name.split(".")[0] in HIDDEN],
    "imports_trainer": "transformers.trainer" in sys.modules,
    "isolated": example["report"].isolated,
    "equal": example["report"].equal,
    "attention": example["choice"].name,
    "num_packs": example["plan"].num_packs,
    "num_steps": len(example["losses"]),
    "broken_laws": example["laws"].broken,
    "missing_package": None,
}
try:
    import trl_packfix.training.trainer
except ImportError as error:
    facts["missing_package"] = error.name
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts():
    """Return what the example found in a process where the other packages are hidden."""
    arguments = json.dumps([HIDDEN, str(ROOT / "examples" / "proof_alone.py")])
    return json.loads(run_python("-c", PROGRAM, arguments).stdout.splitlines()[-1])


def test_no_other_package_is_imported(facts):
    assert facts["hidden_modules"] == []


def test_the_packages_were_hidden(facts):
    """Importing the trainer, which needs the packages, fails there."""
    assert facts["missing_package"] in HIDDEN


def test_the_trainer_of_transformers_is_not_imported(facts):
    """It imports accelerate, peft and datasets where they are installed."""
    assert not facts["imports_trainer"]


def test_a_model_is_proved_and_prepared(facts):
    assert facts["isolated"]
    assert facts["equal"]
    assert facts["attention"] == "packfix_varlen"


def test_packs_are_planned_and_trained(facts):
    assert facts["num_packs"] == 4
    assert facts["num_steps"] == 2


def test_the_step_is_checked(facts):
    assert facts["broken_laws"] == []
