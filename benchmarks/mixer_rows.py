"""Rows and calls of mixers in packs: modules repaired on padded documents, beside what runs now.

    python benchmarks/mixer_rows.py --csv mixer_rows.csv    # 2 minutes
    PYTHONPATH=tests/support/kernel_site python benchmarks/mixer_rows.py --models qwen3_5_text kimi_linear lfm2
    python benchmarks/mixer_rows.py --seconds               # CPU seconds of a step of Qwen3.5, half a minute

Packs of 8,192 tokens with documents of lognormal lengths, on tiny random models, forward only. Per layer with a mixer:

projected  rows that go through its linear projections, of real tokens; `sharded` the same under ZeRO-3 and FSDP, where
           all documents of a repaired module are one batch
scanned    rows that go through its scan, or through the convolution of a model without a scan
calls      of the convolution and the scan
operators  of torch in the mixer, without those inside of its convolution and its scan

The third command times forward and backward of a tiny Qwen3.5 of four layers on one pack of 4,096 tokens, in torch.
The second one uses the strict stand-ins of the tests for flash-linear-attention, mamba_ssm and causal_conv1d. They
compute in torch, and count as one call.
"""

import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import wraps
from math import inf
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from common import cpu_seconds, describe, make_console, make_parser, table_of, write_csv
from support import zoo
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trl_packfix.attention import mixers
from trl_packfix.attention.rows import DocumentRows
from trl_packfix.data.collator import PackedDataCollator
from trl_packfix.isolation.packed_model import PackedModel

TOKENS = 8192
# Documents of a pack, and the sigma of the logarithm of their lengths
MIXES = ((58, 0.5), (46, 0.8), (33, 1.0), (30, 0.3))
# The class of the mixers, and changes of the config so that a model has two of them
MIXERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5_text": (
        "Qwen3_5GatedDeltaNet",
        {"num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", "full_attention"]},
    ),
    "kimi_linear": ("KimiLinearDeltaAttention", {}),
    "bamba": ("BambaMixer", {"num_hidden_layers": 3, "attn_layer_indices": [2]}),
    "lfm2": ("Lfm2ShortConv", {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]}),
}


def lengths_of(num_documents: int, sigma: float, num_tokens: int = TOKENS) -> list[int]:
    """Lognormal lengths in tokens that fill a pack."""
    weights = np.random.default_rng(0).lognormal(0, sigma, num_documents)
    lengths = np.maximum((weights / weights.sum() * num_tokens).astype(int), 2)
    lengths[-1] += num_tokens - lengths.sum()
    return lengths.tolist()


class Operators(TorchDispatchMode):
    """Counts the operators of a mixer, of which each kernel is one."""

    def __init__(self) -> None:
        super().__init__()
        self.num, self.is_inside, self.is_kernel = 0, False, False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += self.is_inside and not self.is_kernel
        return function(*args, **(kwargs or {}))


class Counted:
    """Counts what one mixer of a model does in one forward."""

    def __init__(self, model: nn.Module, name: str):
        self.rows: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.operators = Operators()
        # Not the first: it also makes the indices that all layers share
        _, self.mixer = [module for module in model.modules() if type(module).__name__ == name]
        self.projection = max(
            (each for each in self.mixer.modules() if isinstance(each, nn.Linear)), key=lambda each: each.out_features
        )

    def function(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        # The package reads this variable of transformers' wrapper: it says which boundaries a kernel takes
        applicable_params = inspect.getclosurevars(function).nonlocals.get("applicable_params")

        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            is_counted = applicable_params is not None and self.operators.is_inside
            if not is_counted or self.operators.is_kernel:
                return function(*args, **kwargs)
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() > 2]
            is_convolution = "conv1d_fn" in name
            first = tensors[0]
            self.rows[name] += first.shape[0] * first.shape[2 if is_convolution else 1]
            self.calls[name] += 1
            self.operators.num += 1
            self.operators.is_kernel = True
            try:
                return function(*args, **kwargs)
            finally:
                self.operators.is_kernel = False

        return counted

    def run(self, model: nn.Module, batch: dict[str, Tensor]) -> None:
        def enter(module: nn.Module, args: Any) -> None:
            self.operators.is_inside = True

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.operators.is_inside = False

        def project(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            self.rows["projected"] += args[0].shape[:-1].numel()

        # A repaired module runs the groups of documents behind its first forward, inside of its own last hook
        first = self.mixer.register_forward_pre_hook(enter, prepend=True)
        last = self.mixer.register_forward_hook(leave)
        hooks = [first, last, self.projection.register_forward_hook(project)]
        with torch.no_grad(), self.operators:
            model(**batch)
        for hook in hooks:
            hook.remove()


def measure(model_type: str, way: str) -> list[dict[str, Any]]:
    """Rows of the table for all mixes. `before` is the package without `REPLACEMENTS`."""
    replacements = mixers.REPLACEMENTS if way == "now" else {}
    name, changes = MIXERS[model_type]
    model = zoo.build_model(model_type, **changes).eval()
    counted = Counted(model, name)
    names = vars(sys.modules[type(counted.mixer).__module__])
    functions = {name: counted.function(name, names[name]) for name in mixers.REPLACEMENTS if name in names}
    with mock.patch.dict(names, functions), mock.patch.dict(mixers.REPLACEMENTS, replacements, clear=True):
        packed = PackedModel(model, torch.float32, "cpu", max_length=TOKENS)
        packed.prove(model).raise_if_leaking()
        found = []
        for num_documents, sigma in MIXES:
            lengths = lengths_of(num_documents, sigma)
            for counter in (counted.rows, counted.calls):
                counter.clear()
            counted.operators.num = 0
            documents = [{"input_ids": torch.randint(16, zoo.VOCABULARY, (n,))} for n in lengths]
            counted.run(model, PackedDataCollator()(documents))
            one_batch = DocumentRows(lengths, torch.device("cpu"), inf).num_padded
            scans = {name: num for name, num in counted.rows.items() if name not in ("projected", "causal_conv1d_fn")}
            scanned = sum(scans.values()) or counted.rows["causal_conv1d_fn"]
            is_repaired = counted.rows["projected"] != TOKENS
            found.append(
                {
                    "model": model_type,
                    "way": way,
                    "documents": num_documents,
                    "sigma": sigma,
                    "projected": round(counted.rows["projected"] / TOKENS, 2),
                    "sharded": round(one_batch / TOKENS if is_repaired else 1, 2),
                    "scanned": round(scanned / TOKENS, 2),
                    "calls": counted.calls.total(),
                    "operators": counted.operators.num,
                }
            )
    return found


def time_steps(sigma: float) -> list[dict[str, Any]]:
    """CPU seconds of a packed step, the least of three for each way, in turns: other work on the machine only adds."""
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    steps: dict[str, Callable[[], None]] = {}
    lengths = lengths_of(25, sigma, num_tokens=4096)
    batch = PackedDataCollator()([{"input_ids": torch.randint(16, zoo.VOCABULARY, (n,))} for n in lengths])
    for way in ("before", "now"):
        model = zoo.build_model("qwen3_5_text", num_hidden_layers=4, layer_types=kinds)
        with mock.patch.dict(mixers.REPLACEMENTS, mixers.REPLACEMENTS if way == "now" else {}, clear=True):
            packed = PackedModel(model, torch.float32, "cpu", max_length=TOKENS)
            packed.prove(model).raise_if_leaking()
        assert bool(packed.repaired) is (way == "before")
        steps[way] = lambda model=model: model(**batch).loss.backward()  # type: ignore[misc]
    seconds = [{way: cpu_seconds(step)[0] for way, step in steps.items()} for _ in range(3)]
    return [{"sigma": sigma, **{way: round(min(each[way] for each in seconds), 2) for way in steps}}]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", action="store_true", help="CPU seconds of a step in place of rows and calls")
    parser.add_argument("--models", nargs="+", choices=MIXERS, default=list(MIXERS))
    options = parser.parse_args()
    torch.manual_seed(0)
    print(describe())
    if options.seconds:
        torch.set_num_threads(1)
        rows = [row for _, sigma in MIXES for row in time_steps(sigma)]
        make_console(120).print(table_of(rows, title="CPU seconds of a packed step"))
        return write_csv(options.csv, rows)
    rows = [row for name in options.models for way in ("before", "now") for row in measure(name, way)]
    make_console(120).print(table_of(rows, title="Per layer with a mixer; rows as multiples of the pack's tokens"))
    write_csv(options.csv, rows)


if __name__ == "__main__":
    main()
