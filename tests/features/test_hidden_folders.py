"""The core works without the folder of a feature: it imports, trains, and refuses what needs the folder."""

import json
import subprocess
import sys

import pytest
from support.launch import PROCESS_SECONDS, ROOT, environment

FEATURES = ("hybrids", "pack_forward", "prefixes")
REFUSALS = {
    "hybrids": "Lfm2ForCausalLM has layers that mix tokens by 1 function(s) beside attention (causal_conv1d_fn), and "
    "this installation of trl_packfix is without its folder `features/hybrids`",
    "pack_forward": "`pack_forward` was imported, and this installation of trl_packfix is without its folder "
    "`features/pack_forward`",
    "prefixes": "`share_prefixes='pack'` was given, and this installation of trl_packfix is without its folder "
    "`features/prefixes`, which does it. Set `share_prefixes='off'`, or",
}
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return what the core does without each feature. One process runs all, because it imports for seconds."""
    folder = tmp_path_factory.mktemp("hidden")
    command = [sys.executable, str(ROOT / "tests" / "features" / "hidden_folders.py"), str(folder), *FEATURES]
    done = subprocess.run(
        command, env=environment(folder), capture_output=True, text=True, timeout=PROCESS_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"feature"')]
    return {row["feature"]: row for row in rows}


@pytest.mark.parametrize("feature", FEATURES)
def test_the_core_imports_without_the_folder(feature, found):
    assert found[feature]["num_modules"] > 130
    assert found[feature]["hidden_modules"] == []


@pytest.mark.parametrize("feature", FEATURES)
def test_a_plain_model_is_proved_and_trains_without_the_folder(feature, found):
    assert found[feature]["plain"] == [2, True]


@pytest.mark.parametrize("feature", FEATURES)
def test_what_needs_the_folder_is_refused(feature, found):
    message = found[feature]["refusal"] or "nothing was refused"
    assert message.startswith(REFUSALS[feature])
    assert "nstall trl_packfix anew" in message


def test_hybrid_models_train_unpacked_without_the_folder(found):
    assert found["hybrids"]["unpacked_steps"] == 2


def test_planning_of_families_is_refused_without_the_folder(found):
    assert found["prefixes"]["refusal_of_families"].startswith("`share_prefixes='family'` was given")
