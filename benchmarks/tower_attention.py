"""Attention calls, operators and reads on the host in one forward of a vision tower: sdpa, and our attention.

    python benchmarks/tower_attention.py --csv tower_attention.csv      # a CPU minute

Towers with the layers of the released models and narrow heads, random weights, on a pack with images of the given
sizes. `attention` is the implementation of the tower: `sdpa` (transformers' default), ours on devices without flash
attention (`rows`), and ours on CUDA (`kernel`): there the operator of the kernel is replaced by one that returns an
empty tensor, so calls are counted and nothing is measured on a GPU. `reads` counts values that the host reads from
tensors, for which it would wait for a GPU: lists of lengths, grids and single numbers. `by_attention` are those of them
that attention layers read.
"""

import sys
import traceback
from collections import Counter
from typing import Any

import torch
from common import describe, make_parser, tell, write_csv
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModel

from trl_packfix.attention import varlen
from trl_packfix.attention.tower_attention import REPLACED, TOWER_ATTENTION

NARROW = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 32}
# Type -> fields of its vision config; depth and patches are those of the released models
TOWERS = {
    "qwen2_vl": {"depth": 32, "embed_dim": 32, "num_heads": 2, "hidden_size": 32, "mlp_ratio": 2},
    "qwen2_5_vl": NARROW | {"depth": 32},
    "qwen3_vl": NARROW | {"depth": 27},
    "glm4v": NARROW | {"depth": 24, "image_size": 336},
}
IMAGES = {"7 of 640 x 480": [(480, 640)] * 7, "2 of 1280 x 960": [(960, 1280)] * 2}
READERS = ("<listcomp>", "_lengths_of")  # in the attention layers of transformers, and here
FLASH = torch.ops.aten._flash_attention_forward.default


class Counted(TorchDispatchMode):
    """Operators by name, and reads on the host by the function that reads."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators[str(func)] += 1
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads[_reader()] += 1
        if func is FLASH:
            q = args[0]
            return torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32), None, None, None
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self._tolist = tolist = torch.Tensor.tolist

        def counted(tensor):
            self.reads[_reader()] += 1
            return tolist(tensor)

        torch.Tensor.tolist = counted
        return super().__enter__()

    def __exit__(self, *error):
        torch.Tensor.tolist = self._tolist
        return super().__exit__(*error)

    @property
    def attention(self) -> int:
        return sum(number for name, number in self.operators.items() if "attention" in name)


def _reader() -> str:
    frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
    return next(f.name for f in reversed(frames) if f.filename != __file__)


def build(kind: str) -> torch.nn.Module:
    """The tower alone, random weights."""
    config = AutoConfig.for_model(kind, vision_config=TOWERS[kind])
    config.vision_config._attn_implementation = REPLACED
    for named in vars(sys.modules[AutoModel._model_mapping[type(config)].__module__]).values():
        if getattr(named, "config_class", None) is type(config.vision_config):
            return named._from_config(config.vision_config).train()
    raise AssertionError(f"no tower of {kind}")


def inputs_of(config: Any, sizes: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(grids, pixels) of images with these heights and widths."""
    side = config.patch_size * 2
    grid = torch.tensor([[1, 2 * round(h / side), 2 * round(w / side)] for h, w in sizes])
    return grid, torch.randn(int(grid.prod(1).sum()), 3 * config.temporal_patch_size * config.patch_size**2)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--families", nargs="+", default=[*TOWERS], choices=TOWERS)
    args = parser.parse_args()
    print(describe())
    torch.set_num_threads(1)
    rows = []
    for kind in args.families:
        tower = build(kind).to(torch.bfloat16)
        config = tower.config
        for images, sizes in IMAGES.items():
            grid, pixels = inputs_of(config, sizes)
            for name, device in ((REPLACED, ""), (TOWER_ATTENTION, "rows"), (TOWER_ATTENTION, "kernel")):
                config._attn_implementation = name
                varlen.FLASH_DEVICES = {"cpu"} if device == "kernel" else {"cuda"}
                with Counted() as counted:
                    tower(pixels.to(torch.bfloat16), grid_thw=grid)
                row = {"tower": kind, "images": images, "patches": len(pixels), "layers": config.depth}
                row |= {"attention": device or name, "attention_calls": counted.attention}
                row |= {"operators": sum(counted.operators.values()), "reads": sum(counted.reads.values())}
                row["by_attention"] = sum(counted.reads[reader] for reader in READERS)
                row["readers"] = "; ".join(f"{reader} {number}" for reader, number in counted.reads.most_common())
                rows.append(row)
                tell(row)
    write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
