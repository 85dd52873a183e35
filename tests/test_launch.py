"""Real launchers on two ranks of a CPU: what they do when a rank dies, train.py under each, and the recipes."""

import ctypes
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ranks.engines import deepspeed_config
from support.launch import PROCESS_SECONDS, TORCHRUN, fork_ranks, free_port, run_logged, small
from support.paths import ROOT
from support.versions import gathers_on_cpus

from trl_packfix.training.checkpoints import newest_whole

pytestmark = pytest.mark.processes

LAUNCH = ROOT / "examples" / "launch"
SCRIPTS = [*sorted(LAUNCH.glob("*.sh")), LAUNCH / "slurm.sbatch"]
BIN = Path(sys.executable).parent
ON_CPU = f"{ROOT / 'tests' / 'support' / 'cpu_site'}:{ROOT}"
TRAIN = str(ROOT / "examples" / "train.py")

needs_gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
needs_deepspeed = pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="deepspeed is not installed")


def launch(command: list[str], folder: Path, **env: str) -> tuple[int, str]:
    """Return exit code and output of a command, within four minutes."""
    log = folder / "launch.log"
    return run_logged(command, log, 240, **env), log.read_text()


def saved_json(checkpoint: Path, name: str = "packing_state") -> dict:
    return json.loads((checkpoint / f"{name}.json").read_text())


# A rank hangs or dies


def test_ranks_of_a_test_that_hang_end_and_show_their_stacks(capfd):
    """They must end while a rank keeps the interpreter's lock, as freeing an object may while it waits for a thread."""

    def hang():
        ctypes.PyDLL(None).sleep(60)  # which does not release the lock

    begin = time.monotonic()
    assert not fork_ranks(2, hang, seconds=1)
    assert time.monotonic() - begin < 30
    assert "in hang" in capfd.readouterr().err


@needs_gloo
@pytest.mark.parametrize("engine", ["ddp", pytest.param("zero3", marks=(needs_deepspeed, pytest.mark.sweep))])
def test_a_killed_rank_ends_the_job_with_the_reason_and_a_whole_checkpoint(engine, workplace, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "llama").symlink_to(workplace / "Qwen" / "Qwen3-0.6B")
    (tmp_path / "zero3.json").write_text(json.dumps(deepspeed_config("zero3")))
    launcher = [*TORCHRUN, "-m"]
    env = {}
    reason = "Signal 9 (SIGKILL)"
    if engine == "zero3":
        launcher = ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", free_port(), "--module"]
        env = {"ACCELERATE_USE_DEEPSPEED": "true"}
        reason = "exits with return code = -9"
    code, log = launch([sys.executable, *launcher, "ranks", str(tmp_path), "die", engine], tmp_path, **env)
    seconds = time.time() - float((tmp_path / "killed").read_text())
    assert code != 0, log[-3000:]
    assert seconds < 60, log[-3000:]
    assert reason in log, log[-3000:]
    checkpoint, passed_over = newest_whole(tmp_path / "run")
    assert checkpoint.name == "checkpoint-6"
    assert not passed_over
    assert saved_json(checkpoint)["settings"]["world_size"] == 2


# train.py


def check_trained(folder: Path, output: str, engine_file: str | None) -> None:
    """Check that the run had two ranks, and the engine whose file lies in its checkpoint.

    None is DDP, with one file for all ranks.
    """
    state = saved_json(folder / output / "checkpoint-2")
    assert state["global_step"] == 2
    assert state["settings"]["world_size"] == 2
    assert state["engine"] == ("none" if engine_file is None else "deepspeed")
    assert {"rng_state_0.pth", "rng_state_1.pth"} < {Path(name).name for name in state["files"]}
    assert any(Path(name).name == (engine_file or "optimizer.pt") for name in state["files"])
    assert (folder / output / "model.safetensors").is_file()


ZERO3_FILE = "zero_pp_rank_1_mp_rank_00_model_states.pt"


# Of two sources, one is seen twice per epoch
MIXTURE = """\
packing: true
max_length: 128
max_steps: 2
report_to: none
source_column: source
datasets:
  - {path: rows.jsonl}
  - {path: rows.jsonl}
  - {path: others.jsonl}
"""
COMMANDS = {
    "accelerate": "accelerate.commands.launch --use_deepspeed --deepspeed_config_file zero3.json --num_processes 2 "
    "--num_machines 1 --mixed_precision no --dynamo_backend no --main_process_port PORT -m",
    "torchrun": "torch.distributed.run --standalone --nproc_per_node 2 -m",
    "deepspeed": "deepspeed.launcher.runner --num_gpus 2 --master_port PORT --module",
}
# Two also start recipes below
LAUNCHERS = [pytest.param("torchrun", marks=pytest.mark.sweep), pytest.param("accelerate", marks=gathers_on_cpus)]
LAUNCHERS += [pytest.param("deepspeed", marks=(gathers_on_cpus, pytest.mark.sweep))]


@needs_gloo
@needs_deepspeed
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_command_under_each_launcher(launcher, workplace):
    (workplace / "mixture.yaml").write_text(MIXTURE)
    (workplace / "zero3.json").write_text(json.dumps(deepspeed_config("zero3")))
    (workplace / "others.jsonl").write_text("\n".join((workplace / "rows.jsonl").read_text().splitlines()[:10]))
    words = COMMANDS[launcher].replace("PORT", free_port()).split()
    model = str(workplace / "Qwen" / "Qwen3-0.6B")
    words += ["trl_packfix", "train", "--config", "mixture.yaml", "--model_name_or_path", model]
    words += ["--output_dir", launcher, "--logging_steps", "1", "--bf16", "false"]
    if launcher == "accelerate":
        words += ["--use_cpu", "false", "--ddp_backend", "gloo"]
    code, log = launch([sys.executable, "-m", *words], workplace, PYTHONPATH=ON_CPU)
    assert code == 0, log[-4000:]
    check_trained(workplace, launcher, None if launcher == "torchrun" else ZERO3_FILE)
    log = saved_json(workplace / launcher / "checkpoint-2", "trainer_state")["log_history"]
    assert {"loss/rows", "loss/others"} <= {key for entry in log for key in entry}


# The recipes, on one node: only the names of its parts differ from several


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_recipe_is_valid_shell(script):
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=PROCESS_SECONDS)
    shellcheck = shutil.which("shellcheck", path=f"{BIN}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("bash accepts it; shellcheck is not installed")
    subprocess.run([shellcheck, "--external-sources", str(script)], check=True, cwd=ROOT, timeout=PROCESS_SECONDS)


@needs_gloo
@needs_deepspeed
@gathers_on_cpus
def test_deepspeed_recipe(workplace, tmp_path):
    """Accept `--local_rank`, which the launcher adds; train.py takes ZeRO-3 where nothing else is said."""
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("# one node\nlocalhost slots=2\n")
    (tmp_path / "ssh").write_text("#!/usr/bin/env bash\nhostname\n")  # the launcher asks whether the node answers
    (tmp_path / "ssh").chmod(0o755)
    env = {"HOSTFILE": str(hostfile), "PORT": free_port(), "TRAIN": TRAIN, "PYTHONPATH": ON_CPU}
    env["PATH"] = f"{tmp_path}:{BIN}:{os.environ['PATH']}"
    code, log = launch([str(LAUNCH / "deepspeed.sh"), *small(workplace, "deepspeed")], workplace, **env)
    assert code == 0, log[-4000:]
    assert "--local_rank=1" in log, log[-4000:]
    check_trained(workplace, "deepspeed", ZERO3_FILE)


@needs_gloo
def test_slurm_recipe_and_its_requeue(workplace, tmp_path):
    """`srun` and `scontrol` are stand-ins; what they start, torchrun.sh included, is real."""
    srun = '[ "$2" = --cpus-per-task=1 ] && shift 2 && cd "$ROOT" && exec "$@"'  # else all ranks may share one core
    for name, text in {"scontrol": "echo localhost", "srun": srun}.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"SLURM_JOB_NODELIST": "node-[1-1]", "SLURM_NNODES": "1", "GPUS": "2", "ROOT": str(ROOT)}
    env |= {"SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_ID": free_port()}
    env |= {"PATH": f"{tmp_path}:{BIN}:{os.environ['PATH']}"}
    flags = small(workplace, str(workplace / "slurm"))
    flags[flags.index("rows.jsonl")] = str(workplace / "rows.jsonl")
    command = ["bash", str(LAUNCH / "slurm.sbatch"), *flags, "--bf16", "false", "--learning_rate", "1e-3"]
    code, log = launch(command, workplace, **env)
    assert code == 0, log[-4000:]
    check_trained(workplace, "slurm", None)
    command[command.index("--max_steps") + 1] = "3"
    code, log = launch(command, workplace, **env)
    assert code == 0, log[-4000:]
    assert saved_json(workplace / "slurm" / "checkpoint-3", "trainer_state")["global_step"] == 3
    assert "'num_tokens'" in log
    assert "Packing report" in log
    before, after = (saved_json(workplace / "slurm" / f"checkpoint-{step}")["num_tokens"] for step in (2, 3))
    assert after > before, "the requeued job began anew"
