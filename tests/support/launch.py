"""How processes are launched from tests: environment, ports, flags."""

import os
import socket
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCH_SECONDS = 1200  # a pair takes 40 to 130 alone on 2 cores, several times that beside another test worker
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def environment(folder: Path, **env: str) -> dict[str, str]:
    # One thread each: two ranks that take every core wait for each other. No GPU: gloo and the CPU are meant.
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    settings |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "DS_ACCELERATOR": "cpu"}
    # Private: a stale lock in the common folder makes DeepSpeed wait for ever.
    settings |= {"TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
    return os.environ | settings | env


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def small(folder: Path, output: str) -> list[str]:
    """Flags that make train.py fast: two steps of the tiny model on the file of conversations."""
    flags = f"--dataset_name rows.jsonl --output_dir {output} --max_steps 2 --max_length 128 --report_to none"
    return ["--model_name_or_path", str(folder / "Qwen" / "Qwen3-0.6B"), *flags.split()]
