"""Prints the environment, and writes a small model and conversations for examples/train.py into a folder.

python tests/gpu/workplace.py DIR
"""

import importlib.metadata
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from support.models import build_tiny_model, build_tokenizer

from trl_packfix.attention.choice import cuda_varlen_problem

PACKAGES = "torch transformers trl peft accelerate datasets pyarrow deepspeed triton flash-attn pytest".split()


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def main() -> None:
    folder = Path(sys.argv[1])
    for name in PACKAGES:
        print(f"{name} {version(name)}")
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), f"CUDA {torch.version.cuda}")
        if (problem := cuda_varlen_problem()) is not None:
            print(f"The FlashAttention-2 kernels in torch cannot run: {problem}")
    else:
        print("no GPU")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    build_tiny_model(**(sizes if torch.cuda.is_available() else {})).save_pretrained(folder / "model")
    build_tokenizer().save_pretrained(folder / "model")
    rows = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes " * (1 + i % 25)}]}
        for i in range(400)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


if __name__ == "__main__":
    main()
