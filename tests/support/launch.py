"""How processes are launched from tests: environment, ports, flags, and ranks as forks of one process."""

import faulthandler
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from .paths import ROOT

LAUNCH_SECONDS = 900  # a pair takes 40 to 130 alone on 2 cores, up to 300 beside another test worker
PROCESS_SECONDS = 300  # a command that a test runs takes 1 to 30
FORK_SECONDS = 200  # ranks that are forked from a test take 2 to 20
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def environment(folder: Path, **env: str) -> dict[str, str]:
    # One thread each: two ranks that take every core wait for each other. No GPU: gloo and the CPU are meant.
    settings = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    settings |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "DS_ACCELERATOR": "cpu"}
    settings |= {"TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(folder / "extensions"))}
    return os.environ | settings | env


def run_to_end(
    *command: str | Path,
    cwd: Path | None = None,
    succeeds: bool = True,
    seconds: int = PROCESS_SECONDS,
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """Run a command, with this package for its Python; it must succeed unless `succeeds` is False."""
    settings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | env
    options = {"cwd": cwd, "env": settings, "timeout": seconds}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert done.returncode == 0 or not succeeds, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def run_python(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` with the options of `run_to_end`."""
    return run_to_end(sys.executable, *arguments, **options)


def run_logged(command: list[str], log: Path, seconds: int, **env: str) -> int:
    """Run a command in the folder of its log, and return its exit code.

    The command and all that it started are killed after so many seconds.
    """
    with log.open("w") as file:
        settings = environment(log.parent, **env)
        process = subprocess.Popen(
            command, cwd=log.parent, env=settings, stdout=file, stderr=file, start_new_session=True
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            file.write(f"\nkilled after {seconds} s\n")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return process.returncode


def rows_of(script: str, folder: Path, *arguments: str) -> list[dict]:
    """Return the lines of JSON that a script in `tests` prints for its commands, which "--" separates."""
    command = [sys.executable, str(ROOT / "tests" / script), *arguments]
    done = subprocess.run(command, env=environment(folder), capture_output=True, text=True, timeout=LAUNCH_SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"type"')]


def print_rows(**commands: Callable[..., Iterable[dict]]) -> None:
    """Run the commands that a script is called with, and print their rows so that `rows_of` can read them."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    words = sys.argv[1:]
    while words:
        end = words.index("--") if "--" in words else len(words)
        name, *arguments = words[:end]
        words = words[end + 1 :]
        for row in commands[name](*arguments):
            print(json.dumps(row | {"command": name}), flush=True)


def seen_by(strict: ModuleType) -> dict:
    """Return what strict stand-ins recorded since this was called last."""
    facts = {"calls": dict(strict.calls), "silent": sorted(set(strict.silent))}
    strict.calls.clear()
    strict.silent.clear()
    return facts


class Launch:
    """The results that the scenarios of a command saved in `folder`: `launch[engine, scenario]`."""

    def __init__(self, folder: Path, log: str, command: list[str], **env: str):
        self.folder = folder
        self.log = folder / log
        run_logged(command, self.log, LAUNCH_SECONDS, **env)

    def __getitem__(self, key: tuple[str, str]) -> dict:
        engine, name = key
        file = self.folder / engine / f"{name}.pt"
        if not file.is_file():
            pytest.fail(f"{engine}: {name} did not end. The log ends with:\n{self.log.read_text()[-6000:]}")
        return torch.load(file)


def fork_ranks(num_ranks: int, rank_function: Callable[[], None], seconds: int = FORK_SECONDS) -> bool:
    """Call `run` in so many forks of this process, with the environment of ranks; whether all ended well and in time.

    If one takes longer all print their stacks and end, and if one fails the others are killed. A fork ends as soon as
    `run` returns. So `run` leaves the process group as it is: if it destroyed the group while a
    `DistributedDataParallel` lives, that would be the last owner of the group, and freeing it would wait, with the
    interpreter's lock, for a thread of gloo that may wait for this lock.
    """
    gc.collect()
    gc.freeze()  # each training calls the collector, which would go through all libraries
    port = free_port()
    children = []
    for rank in range(num_ranks):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                faulthandler.enable(file=2)  # SIGABRT prints the stacks, also while a thread keeps the lock
                if num_ranks > 1:
                    ids = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
                    os.environ |= {name: str(value) for name, value in ids.items()}
                    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                rank_function()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    codes = []
    deadline = time.monotonic() + seconds
    while children:
        time.sleep(0.02)
        if time.monotonic() > deadline:
            deadline = inf
            for child in children:
                os.kill(child, signal.SIGABRT)
        for child in list(children):  # `os.wait` would take those of other tests, too
            ended, status = os.waitpid(child, os.WNOHANG)
            if not ended:
                continue
            children.remove(child)
            codes.append(status)
            if status and deadline < inf:  # the others wait for this rank
                for other_child in children:
                    os.kill(other_child, signal.SIGKILL)
    return not any(codes)


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def small(folder: Path, output: str) -> list[str]:
    """Return flags that make train.py fast: two steps of the tiny model on the file of conversations."""
    flags = f"--dataset_name rows.jsonl --output_dir {output} --max_steps 2 --max_length 128 --report_to none"
    return ["--model_name_or_path", str(folder / "Qwen" / "Qwen3-0.6B"), *flags.split()]
