"""Packed attention on the CPU: ours against transformers' sdpa path with its (T, T) mask, forward and backward.

    python benchmarks/attention_cpu.py                      # about 5 minutes
    python benchmarks/attention_cpu.py --data DIR --csv attention_cpu.csv

Seconds are CPU seconds of one attention layer, forward and backward, median of --repeats, on one thread. (On a busy
machine, several threads spend CPU seconds on waiting for each other.) transformers' own code builds the mask from
position_ids, once per forward for all layers. Its time is listed separately, and the last ratio adds it to a single
layer. `of matmul` is the share of the machine's measured matrix product rate, if only the causal pairs within documents
count as work.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from common import Row, cpu_seconds, describe, json_rows, make_parser, write_csv
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoTokenizer, LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask

from trl_packfix.attention.varlen import varlen_attention
from trl_packfix.data import boundaries

# forward: logits and values, 2 products of 2 flops; backward: 5 products
FLOPS_PER_PAIR = 2 * 2 + 5 * 2


def warm_seconds(function: Callable[[], object], repeats: int) -> float:
    function()
    return cpu_seconds(function, repeats)[0]


def lognormal_lengths(mean: float = 400, sigma: float = 1.0, count: int = 10_000) -> np.ndarray:
    lengths = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.maximum(lengths, 1).astype(int)


def data_lengths(folder: Path, rows: int = 2_000) -> np.ndarray:
    """Tokens of the first rows of every JSONL file in the folder, over all strings of a row, by its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(next(folder.glob("*tokenizer*")))

    def strings(value):
        if isinstance(value, str):
            return value
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        return "\n".join(strings(child) for child in children)

    texts = []
    for path in sorted(folder.glob("*.jsonl")):
        texts += map(strings, json_rows(path, rows))
    return np.random.default_rng(0).permutation([max(1, len(ids)) for ids in tokenizer(texts)["input_ids"]])


def fill(lengths: np.ndarray, num_tokens: int) -> list[int]:
    """The first documents with num_tokens in total. The last one is cut to fit."""
    ends = np.minimum(lengths.cumsum(), num_tokens)
    documents = np.diff(ends, prepend=0)
    return documents[documents > 0].tolist()


class Layer(nn.Module):
    """The attributes that transformers' attention functions read from their module."""

    is_causal, num_key_value_groups = True, 1


class Bench:
    def __init__(self, heads: int, kv_heads: int, head_dim: int, repeats: int, dtype: torch.dtype):
        self.heads, self.kv_heads, self.head_dim, self.repeats, self.dtype = heads, kv_heads, head_dim, repeats, dtype
        self.layer = Layer()
        self.layer.num_key_value_groups = heads // kv_heads

    def inputs(self, num_tokens: int) -> list[torch.Tensor]:
        shapes = [(1, num_tokens, h, self.head_dim) for h in (self.heads, self.kv_heads, self.kv_heads)]
        torch.manual_seed(0)
        # token-major, as projections return them
        return [torch.randn(shape, dtype=self.dtype).transpose(1, 2).requires_grad_() for shape in shapes]

    def time(self, attend: Callable[..., torch.Tensor], num_tokens: int, repeats: int | None = None) -> float:
        inputs = self.inputs(num_tokens)
        # dense, as from the output projection: the gradient of a sum has stride 0, which slows the kernels down
        grad = torch.randn(1, num_tokens, self.heads, self.head_dim, dtype=self.dtype)
        return warm_seconds(lambda: torch.autograd.grad(attend(*inputs), inputs, grad), repeats or self.repeats)

    def ours(self, lengths: list[int], **options) -> float:
        bounds = torch.from_numpy(boundaries.cu_seq_lens(lengths))
        kwargs = {"cu_seq_lens_q": bounds, **options}
        return self.time(lambda q, k, v: varlen_attention(self.layer, q, k, v, None, **kwargs)[0], sum(lengths))

    def sdpa(self, lengths: list[int]) -> tuple[float, float]:
        """(seconds to build the mask, seconds of the layer)."""
        T = sum(lengths)
        config = LlamaConfig(attn_implementation="sdpa")
        position_ids = torch.from_numpy(boundaries.position_ids(lengths))[None]
        repeats = self.repeats if T <= 8192 else 1

        def build() -> torch.Tensor:
            return create_causal_mask(config, torch.empty(1, T, 1, dtype=self.dtype), None, None, position_ids)

        build_seconds, mask = warm_seconds(build, repeats), build()
        assert mask.shape == (1, 1, T, T)
        seconds = self.time(lambda q, k, v: sdpa_attention_forward(self.layer, q, k, v, mask)[0], T, repeats)
        return build_seconds, seconds

    def plain(self, num_tokens: int) -> float:
        gqa = self.kv_heads != self.heads

        def attend(q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa).transpose(1, 2).contiguous()

        return self.time(attend, num_tokens)

    def matmul_rate(self) -> float:
        """Flops per CPU second of a 2048^3 matrix product."""
        a, b = torch.randn(2, 2048, 2048, dtype=self.dtype)
        return 2 * 2048**3 / warm_seconds(lambda: a @ b, 5)

    def pairs_flops(self, lengths: list[int]) -> float:
        return FLOPS_PER_PAIR * self.head_dim * self.heads * sum(n * (n + 1) / 2 for n in lengths)


def main() -> None:
    parser = make_parser(__doc__, "folder of JSONL files and a tokenizer, instead of lognormal lengths")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 16384], help="tokens per pack")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    bench = Bench(args.heads, args.kv_heads, args.head_dim, args.repeats, getattr(torch, args.dtype))
    lengths = lognormal_lengths() if args.data is None else data_lengths(args.data)
    rate = bench.matmul_rate()
    rows: list[Row] = [{"case": "matmul", "gflops_per_cpu_second": rate / 1e9}]
    console = Console()
    console.print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.dtype}, {args.heads} heads "
        f"({args.kv_heads} for keys) of {args.head_dim}; matrix product {rate / 1e9:.1f} GFLOP per CPU second"
    )

    table = Table("T", "documents", "ours s", "of matmul", "sdpa s", "mask s", "sdpa / ours", "with mask")
    for T in args.tokens:
        documents = fill(lengths, T)
        ours = bench.ours(documents)
        mask, sdpa = bench.sdpa(documents)
        share = bench.pairs_flops(documents) / ours / rate
        figures = [f"{x:.3f}" for x in (ours, share, sdpa, mask)] + [
            f"{x:.1f}" for x in (sdpa / ours, (sdpa + mask) / ours)
        ]
        table.add_row(str(T), str(len(documents)), *figures)
        rows.append(
            {"case": "packed", "T": T, "documents": len(documents), "ours": ours, "sdpa": sdpa, "mask": mask,
             "of_matmul": share, "ratio": sdpa / ours, "ratio_with_mask": (sdpa + mask) / ours}
        )  # fmt: skip
    console.print("[bold]Packs[/], forward and backward, CPU seconds", table)

    table = Table("T", "ours s", "plain causal sdpa s", "ours / plain")
    for T in args.tokens:
        ours, plain = bench.ours([T]), bench.plain(T)
        table.add_row(str(T), f"{ours:.3f}", f"{plain:.3f}", f"{ours / plain:.2f}")
        rows.append({"case": "one document", "T": T, "ours": ours, "sdpa": plain, "ratio": plain / ours})
    console.print("[bold]One document[/]: what the packing machinery costs", table)

    tokens = [T for T in args.tokens if T <= 8192] or [min(args.tokens)]  # plain torch (softcap) takes minutes beyond
    T = max(tokens)
    sinks = torch.zeros(args.heads)
    table = Table("feature", *(f"T = {n} s" for n in tokens), f"pairs in the window, T = {T}")
    features = {"full causal": {}, "sinks": {"s_aux": sinks}, "softcap 50": {"softcap": 50.0}}
    features |= {f"window {w}": {"sliding_window": w} for w in (128, 512, 2048)}
    features["window 128, sinks"] = {"sliding_window": 128, "s_aux": sinks}
    for name, options in features.items():
        seconds = [bench.ours([n], **options) for n in tokens]
        share = min(1.0, 2 * options.get("sliding_window", T) / T)
        table.add_row(name, *(f"{s:.3f}" for s in seconds), f"{share:.1%}")
        rows += [{"case": name, "T": n, "ours": s} for n, s in zip(tokens, seconds, strict=True)]
    console.print("[bold]Features[/] on one document of T tokens", table)

    console.print(describe())
    write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
