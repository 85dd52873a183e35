"""`trl-packfix env`: versions, kernels, GPUs and settings in one block, to attach to a bug report."""

import argparse
import json
import os
import platform
from collections.abc import Iterator
from importlib.util import find_spec

from ..version import TESTED_VERSIONS, __version__, installed_version
from .flags import HelpFormatter, Subparsers
from .torch_environment import cpu_computes_bf16

# Libraries that decide how a run packs and trains; the versions of those in `TESTED_VERSIONS` are compared with it
LIBRARIES = (*TESTED_VERSIONS, "tokenizers", "numpy", "pyarrow", "bitsandbytes", "unsloth", "axolotl")
# Packages with kernels: the name of the distribution, and of the module
KERNELS = {
    "flash-attn": "flash_attn",
    "flash-attn-3": "flash_attn_interface",
    "kernels": "kernels",
    "liger-kernel": "liger_kernel",
    "flash-linear-attention": "fla",
    "causal-conv1d": "causal_conv1d",
    "mamba-ssm": "mamba_ssm",
    "triton": "triton",
    "xformers": "xformers",
}
# Beginnings of names of variables that change how a run works
VARIABLES = tuple(
    "ACCELERATE_ CUDA_ DS_ FSDP_ HF_DATASETS_ HF_HUB_OFFLINE NCCL_ OMP_ PYTORCH_ TOKENIZERS_ TORCH_ TRANSFORMERS_ "
    "LOCAL_RANK RANK WORLD_SIZE LOCAL_WORLD_SIZE".split()
)
# A variable whose name has such a word is not printed: the user's own variable may begin in the same way
SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of `env` and its flags."""
    parser = subparsers.add_parser(
        "env",
        help="versions, kernels, GPUs and settings in one block, for a bug report",
        description="Print the versions of libraries, the kernels that are installed, the GPUs, and the variables of "
        "the environment that matter. It has no name, path or token of yours, but look at it before you publish it.",
        epilog="  trl-packfix env\n\nExit code 0.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print the block as JSON")
    parser.set_defaults(run_command=run_env)


def run_env(args: argparse.Namespace) -> int:
    """Print the block. Return 0."""
    lines = dict(describe_environment())
    if args.json:
        print(json.dumps(lines, indent=2))
        return 0
    width = max(map(len, lines))
    print("```", *(f"{label:<{width}}  {text}" for label, text in lines.items()), "```", sep="\n")
    return 0


def describe_environment() -> Iterator[tuple[str, str]]:
    """Yield (label, text) of each line."""
    yield "trl_packfix", __version__
    yield "python", f"{platform.python_version()}, {platform.platform()}"
    for name in LIBRARIES:
        version = installed_version(name)
        tested = TESTED_VERSIONS.get(name)
        note = f" (tested: {tested})" if tested and version.partition("+")[0] != tested else ""
        if version or tested:
            yield name, (version or "not installed") + note
    installed = {name: installed_version(name) for name, module in KERNELS.items() if find_spec(module) is not None}
    texts = [f"{name} {version or '(version not known)'}" for name, version in installed.items()]
    yield "kernels", ", ".join(texts) or "none installed"
    yield from _describe_devices()
    # A path may have the name of a user or a project. On Windows it may be written with either separator
    shown = {name: value for name, value in os.environ.items() if _is_shown(name)}
    shown |= {name: "(a path)" for name, value in shown.items() if "/" in value or "\\" in value}
    settings = [f"{name}={value}" for name, value in sorted(shown.items())]
    yield "settings", ", ".join(settings) or "no variable of torch, accelerate, DeepSpeed or NCCL is set"


def _is_shown(name: str) -> bool:
    # The settings of tokenizers are no secret, although their names have the word TOKEN
    name_without_library = name.removeprefix("TOKENIZERS_")
    return name.startswith(VARIABLES) and not any(word in name_without_library for word in SECRET_WORDS)


def _describe_devices() -> Iterator[tuple[str, str]]:
    """Yield the lines on GPUs and the CPU, by torch. If torch cannot be imported, yield one line that says so."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library of CUDA is missing
        yield "GPU", f"not known: torch cannot be imported: {error}"
        return
    yield "CUDA", f"torch built for {torch.version.cuda or torch.version.hip or 'CPUs'}"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory = f"{properties.total_memory / 2**30:.0f} GiB"
            capability = f"compute capability {properties.major}.{properties.minor}"
            yield f"GPU {index}", f"{properties.name}, {memory}, {capability}"
    else:
        yield "GPU", "none that torch can use"
    bf16 = {True: "yes", False: "emulated", None: "not known"}[cpu_computes_bf16()]
    yield "CPU", f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()}, bf16: {bf16}"
