"""The core works without the folder of a feature: it imports, trains, and refuses what needs the folder.

Its tests pass, too: they and their helpers import no feature, and cases with one are skipped (`support/features.py`).
"""

import json
import runpy
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.launch import PROCESS_SECONDS, environment
from support.paths import ROOT

FEATURES = ("hybrids", "images", "pack_forward", "prefixes")
REFUSALS = {
    "hybrids": "Lfm2ForCausalLM has layers that mix tokens by 1 function beside attention (causal_conv1d_fn), and "
    "this installation of trl_packfix is without its folder `features/hybrids`",
    "images": "A dataset with the column `images` was given, and this installation of trl_packfix is without its "
    "folder `features/images`, which packs its rows. Set `packing=False`, or",
    "pack_forward": "`pack_forward` was imported, and this installation of trl_packfix is without its folder "
    "`features/pack_forward`",
    "prefixes": "`share_prefixes='pack'` was given, and this installation of trl_packfix is without its folder "
    "`features/prefixes`, which does it. Set `share_prefixes='off'`, or",
}
FOLDERS = (ROOT / "trl_packfix" / "features", ROOT / "tests" / "features")


def in_features(files: Iterable[Path]) -> set[Path]:
    return {file for file in files if not set(FOLDERS).isdisjoint(file.parents)}


def test_no_test_of_the_core_imports_a_feature():
    """Helpers in tests and tools import none either: not at the top, not in a function, and not by a public name."""
    imported_files = runpy.run_path(str(ROOT / "tools" / "tests_of.py"))["imported_files"]
    tests = {*(ROOT / "tests").rglob("*.py")}
    of_core = tests - in_features(tests)
    importing = {file for file in tests if in_features(imported_files(file))}
    assert len(of_core) > 150
    tests_of_features = {file for file in in_features(tests) if file.parent != FOLDERS[1]}
    assert len(importing & tests_of_features) >= len(tests_of_features) / 2, "imports are not seen"
    assert importing & of_core == set()
    assert not any(in_features(imported_files(file)) for file in (ROOT / "tools" / "sweep").glob("*.py"))


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """Return what the core does without each feature. One process runs all, because it imports for seconds."""
    folder = tmp_path_factory.mktemp("hidden")
    command = [sys.executable, str(ROOT / "tests" / "features" / "hidden_folders.py"), str(folder), *FEATURES]
    done = subprocess.run(
        command, env=environment(folder), capture_output=True, text=True, timeout=PROCESS_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"feature"')]
    return {row["feature"]: row for row in rows}


@pytest.mark.processes
@pytest.mark.parametrize("feature", FEATURES)
def test_the_core_imports_and_a_plain_model_is_proved_and_trains(feature, facts):
    expected = {"hidden_modules": [], "plain": [2, True]}
    assert facts[feature] == facts[feature] | expected
    assert facts[feature]["num_modules"] > 130


@pytest.mark.processes
@pytest.mark.parametrize("feature", FEATURES)
def test_what_needs_the_folder_is_refused(feature, facts):
    message = facts[feature]["refusal"] or "nothing was refused"
    assert message.startswith(REFUSALS[feature])
    assert "nstall trl_packfix anew" in message


@pytest.mark.processes
@pytest.mark.parametrize("feature", ["hybrids", "images"])
def test_models_train_unpacked_without_the_folder(feature, facts):
    assert facts[feature]["unpacked_steps"] == 2


@pytest.mark.processes
def test_answers_behind_images_are_not_trained_alone_without_the_folder(facts):
    refusal = facts["images"]["refusal_of_turns"]
    assert refusal.startswith(
        "`assistant_only_loss=True` was given with images, and this installation of trl_packfix is"
    )


@pytest.mark.processes
def test_planning_of_families_is_refused_without_the_folder(facts):
    assert facts["prefixes"]["refusal_of_families"].startswith("`share_prefixes='family'` was given")
