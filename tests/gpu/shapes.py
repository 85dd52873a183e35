"""Attention of extreme packs, forward and backward: gradients, peak memory and seconds, as a CSV.

    python tests/gpu/shapes.py shapes.csv

One document, 64 and 2,048 in 16,384 tokens; heads of 256 dimensions with 8 queries per key; documents of one token. The
first and the last document are compared with themselves alone. `dq_gib` is what FlashAttention-2 allocates for the
gradient of the queries: fp32 for T + 128 N rows. On a CPU the sizes are tiny, and nothing is learned about a GPU.
"""

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from common import write_csv  # noqa: E402

from trl_packfix.attention.kernels import Launch, attend_on_cpu, attend_on_cuda  # noqa: E402

CASES = {
    "one document": ([16384], 32, 8, 128),
    "64 documents": ([256] * 64, 32, 8, 128),
    "2,048 documents": ([8] * 2048, 32, 8, 128),
    "heads of 256": ([256] * 64, 16, 2, 256),
    "one token each": ([1] * 2048, 32, 8, 128),
    "uneven": ([1, 4000, 1, 200, 12182], 32, 8, 128),
}


def run(lengths, tensors):
    """Output and gradients, T first."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    scale = tensors[0].shape[-1] ** -0.5
    if tensors[0].is_cuda:
        bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).cuda()
        out = attend_on_cuda(*tensors, [Launch((bounds, bounds), (max(lengths), max(lengths)))], scale=scale)
    else:
        out = attend_on_cpu(*tensors, lengths, scale=scale)
    weights = torch.linspace(-1, 1, out.shape[-1], device=out.device, dtype=out.dtype)
    return [x.transpose(1, 2)[0] for x in (out.detach(), *torch.autograd.grad(out, tensors, weights.expand_as(out)))]


def measure(name, lengths, heads, kv_heads, head_dim, device):
    T = sum(lengths)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    tensors = [torch.randn(1, h, T, head_dim, device=device, dtype=dtype) for h in (heads, kv_heads, kv_heads)]
    run(lengths, tensors)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    found = run(lengths, tensors)
    if device == "cuda":
        torch.cuda.synchronize()
    row = {"case": name, "tokens": T, "documents": len(lengths), "heads": f"{heads}:{kv_heads} x {head_dim}"}
    row |= {"seconds": time.perf_counter() - started, "finite": all(bool(x.isfinite().all()) for x in found)}
    row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else ""
    row["dq_gib"] = (T + 128 * len(lengths)) * heads * head_dim * 4 / 2**30
    worst = 0.0
    for start, stop in ((0, lengths[0]), (T - lengths[-1], T)):
        alone = run([stop - start], [x[:, :, start:stop] for x in tensors])
        # for a document of one token the gradients of queries and keys are 0 but for rounding
        least = 1e-2 * max(own.float().norm() for own in alone)
        for packed, own in zip(found, alone, strict=True):
            scale = own.float().norm().clamp(min=least)
            worst = max(worst, ((packed[start:stop].float() - own.float()).norm() / scale).item())
    return row | {"difference": worst, "device": torch.cuda.get_device_name() if device == "cuda" else "CPU, tiny"}


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for name, (lengths, *heads) in CASES.items():
        if device == "cpu":
            lengths, heads = [max(1, n // 64) for n in lengths[:32]], [4, 2, 8]
        rows.append(measure(name, lengths, *heads, device))
        print(
            ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()), flush=True
        )
        write_csv(Path(sys.argv[1]), rows)
    wrong = [row["case"] for row in rows if not row["finite"] or row["difference"] > 0.02]
    if wrong:
        sys.exit(f"not finite, or not what the document is alone: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
