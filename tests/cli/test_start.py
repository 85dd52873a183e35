"""The command line starts fast: a command imports only what it needs, and what it answers does not depend on that."""

import json
from argparse import Namespace
from dataclasses import fields

import numpy as np
import pytest
import torch
from datasets import Dataset
from support.launch import run_python
from support.runs import config

import trl_packfix
from trl_packfix.cli import dry_run, env, forecast, main
from trl_packfix.planning.packing import CONFIG_NAMES, DEFAULT_SETTINGS
from trl_packfix.training.config import SFTConfig
from trl_packfix.training.planning_settings import PlanningSettings

READ = dry_run.read_run_without_model
LIBRARIES = ("torch", "transformers", "trl", "accelerate", "peft", "matplotlib", "datasets")

# Runs commands in one process, and prints after each its exit code and the libraries that are there
PROGRAM = """
import sys, io, contextlib
from trl_packfix.cli import main
for words in {commands}:
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(words.split())
        except SystemExit as ended:
            code = ended.code
    print(words, code, *(name for name in {libraries} if name in sys.modules), sep=", ")
"""
COMMANDS_OF_ONE_PROCESS = {  # in this order: the exit code, and the libraries
    "plan --help": (0, []),
    "recipes": (0, []),
    "plan nowhere.jsonl --seed 1": (2, ["datasets"]),
    "plan lengths.txt --max-length 512": (0, ["datasets"]),
    "show lengths.txt --max-length 512": (0, ["datasets"]),
    "plan table --max-length 512": (0, ["datasets"]),
    "show table --max-length 512": (0, ["datasets"]),
}


@pytest.fixture
def lengths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    numbers = rng.integers(5, 300, 200)
    np.savetxt("lengths.txt", numbers, fmt="%d")
    rows = [rng.integers(0, 99, number).tolist() for number in numbers[:50]]
    labels = [[-100] * 3 + row[3:] for row in rows]
    Dataset.from_dict({"input_ids": rows, "labels": labels}).save_to_disk("table")


@pytest.mark.processes
def test_a_command_imports_what_it_needs(lengths):
    program = PROGRAM.format(commands=[*COMMANDS_OF_ONE_PROCESS], libraries=LIBRARIES)
    outcomes = dict(line.split(", ", 1) for line in run_python("-c", program).stdout.splitlines())
    assert outcomes == {
        words: ", ".join([str(code), *names]) for words, (code, names) in COMMANDS_OF_ONE_PROCESS.items()
    }


def test_planning_settings_are_those_of_the_config(tmp_path):
    defaults = {setting.name: setting.default for setting in fields(SFTConfig)}
    assert {setting.name: setting.default for setting in fields(PlanningSettings)}.items() <= defaults.items()
    read_by_planning = {*CONFIG_NAMES.values()} & defaults.keys()
    assert len(read_by_planning) > 8
    # Planning has the default of the config for what a run without a model does not have
    for name in read_by_planning - {setting.name for setting in fields(PlanningSettings)}:
        assert DEFAULT_SETTINGS[name] == defaults[name], name
    assert config(tmp_path).effective_overlong == PlanningSettings().effective_overlong


PLANNED = [
    "plan --max-length 64 128 --strategy stream bfd wrapped --world-size 1 3",
    "plan --batch-size 2 --accumulation 3 --seed 7 --overlong drop --balance none --world-size 2",
    "plan --packing_strategy minibatch --gradient-accumulation-steps 2 --tflops 100",
    "show --max_length 100 --strategy bfd_split --per-device-train-batch-size 3 --packs 4 --world-size 2",
    "show --seed 3 --overlong split --max-length=64",
]


@pytest.mark.parametrize("data", ["lengths.txt", "table"])
@pytest.mark.parametrize("words", PLANNED)
def test_a_run_without_a_model_is_planned_as_with_the_config_of_training(words, data, lengths, monkeypatch, capsys):
    read = []

    def planned(read_run):
        for module in (dry_run, forecast):
            monkeypatch.setattr(module, "read_run_without_model", read_run)
        command, *flags = words.split()
        code = main([command, data, *flags, "--json"])
        return code, json.loads(capsys.readouterr().out)

    def read_without_model(*args):
        read.append(READ(*args))
        return read[-1]

    by_planning_settings = planned(read_without_model)
    assert None not in read, "this run needs the config"
    assert len(read) == 1
    assert planned(lambda *args: None) == by_planning_settings


WITH_CONFIG = [
    "--seed -1",
    "--balance even",
    "--batch-size 0",
    "--max_length 1",
    "--learning-rate 1",
    "--model x",
    "a.jsonl",
    "table",
]


@pytest.mark.parametrize("words", WITH_CONFIG)
def test_other_runs_are_read_with_the_config_of_training(words, lengths):
    """It has the messages for values that cannot be used, and knows all flags and data."""
    arguments = {"config": [], "tokenizer": None}
    assert READ(Namespace(unparsed_words=["lengths.txt", "--seed", "1"], **arguments)) is not None
    assert READ(Namespace(unparsed_words=["lengths.txt", *words.split()], **arguments)) is None
    assert READ(Namespace(unparsed_words=["lengths.txt"], **arguments | {"config": ["run.yaml"]})) is None


def test_the_environment_of_a_bug_report_has_no_secret_and_no_path(monkeypatch, output_of, printed):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("TORCH_API_KEY", "secret_too")
    monkeypatch.setenv("HF_DATASETS_CACHE", "/home/secret_name/cache")
    monkeypatch.setenv("TORCH_HOME", r"C:\Users\secret_name")
    block = output_of("env")
    lines = block.splitlines()
    assert lines[0] == lines[-1] == "```"
    assert "secret" not in block
    assert "ACCELERATE_MIXED_PRECISION=bf16" in block
    assert "TOKENIZERS_PARALLELISM=false" in block
    assert "HF_DATASETS_CACHE=(a path)" in block
    assert "TORCH_HOME=(a path)" in block
    values = printed("env")
    assert values["trl_packfix"] == trl_packfix.__version__
    assert values["torch"].startswith(torch.__version__.partition("+")[0])
    assert {"python", "transformers", "trl", "kernels", "CPU", "settings"} <= values.keys()
    assert any(name.startswith("GPU") for name in values)
    for label, text in values.items():
        assert f"\n{label} " in block
        assert text in block


def test_a_library_that_is_newer_than_tested_is_said(monkeypatch, printed):
    monkeypatch.setitem(env.TESTED_VERSIONS, "transformers", "5.1.0")
    monkeypatch.setitem(env.TESTED_VERSIONS, "deepspeed", "99.0")
    monkeypatch.setattr(env, "installed_version", lambda name: {"transformers": "5.2.0", "trl": "1.16.0"}.get(name, ""))
    values = printed("env")
    assert values["transformers"] == "5.2.0 (tested: 5.1.0)"
    assert values["deepspeed"] == "not installed (tested: 99.0)"
    assert "tokenizers" not in values
