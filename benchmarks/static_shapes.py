"""The price of packs of one shape, and what it buys: compiled graphs over 50 packs, on meta tensors, in a minute.

    python benchmarks/static_shapes.py --csv static_shapes.csv

Simulated lengths of documents (lognormal; median, sigma and max_length as in throughput_gpu.py), batch size 8, 6,000
documents. Columns:
  documents       most documents of a pack
  static          `pad_documents_to_multiple_of`; empty: off
  tokens          computed tokens / real tokens
  cost            the same in FLOPs of a Llama 2 7B: padding also attends to itself, in documents of `max_length`
  backward_rows   rows that FlashAttention-2 allocates for the gradient of the queries, T + 128 N, over T
  graphs          compiled over the first 50 packs, by a Llama on the CUDA branch of our attention
The graphs are counted without a GPU and say nothing about their speed.
"""

import numpy as np
import torch
from common import describe, make_parser, tell, write_csv
from support.models import build_tiny_model
from torch._dynamo.testing import CompileCounter

from trl_packfix import PackedDataCollator, plan_packs
from trl_packfix.attention import choice, varlen
from trl_packfix.attention.forwards import mark_packed_forwards
from trl_packfix.planning.costs import LLAMA_7B

LENGTHS = {"FLAN-like": (114, 1.27, 2048), "OrcaMath-like": (165, 0.38, 1024)}
BATCH_SIZE, NUM_GRAPHED = 8, 50


def pretend_that_meta_is_cuda() -> None:
    varlen.FLASH_DEVICES = {"cuda", "meta"}
    choice.cuda_varlen_problem = lambda: None
    torch.is_autocast_enabled = lambda *device_type: False  # it does not know "meta"


def count_graphs(packs: list[np.ndarray], collate: PackedDataCollator) -> int:
    torch._dynamo.reset()
    model, counter = build_tiny_model("llama", dtype=torch.bfloat16).to("meta").train(), CompileCounter()
    choice.select_attention(model, device_type="cuda")
    mark_packed_forwards(model)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for lengths in packs[:NUM_GRAPHED]:
        batch = collate([{"input_ids": np.full(n, 5)} for n in lengths])
        del batch["labels"]
        compiled(**{key: x.to("meta") if isinstance(x, torch.Tensor) else x for key, x in batch.items()})
    return counter.frame_count


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--num", type=int, default=6000, help="documents")
    args = parser.parse_args()
    print(describe())
    pretend_that_meta_is_cuda()
    rows = []
    for name, (median, sigma, max_length) in LENGTHS.items():
        rng = np.random.default_rng(0)
        lengths = np.clip(rng.lognormal(np.log(median), sigma, args.num), 2, max_length).astype(int)
        capacity = BATCH_SIZE * max_length
        for strategy in ("stream", "bfd"):
            plan = plan_packs(lengths, capacity, strategy)
            packs = [lengths[documents] for documents in np.split(plan.order, plan.offsets[1:-1])]
            most = max(map(len, packs))
            for static in (None, -(-(most + BATCH_SIZE) // 64) * 64):
                plain = static is None
                collate = PackedDataCollator() if plain else PackedDataCollator(capacity, 0, static, max_length)
                bounds = [collate([{"input_ids": np.full(n, 5)} for n in pack])["cu_seq_lens_q"] for pack in packs]
                computed = [x.diff().numpy() for x in bounds]
                T = sum(int(x.sum()) for x in computed)
                row = {"lengths": name, "strategy": strategy, "capacity": capacity, "packs": len(packs)}
                row |= {"documents": most, "static": "" if plain else static, "tokens": T / lengths.sum()}
                row["cost"] = sum(LLAMA_7B(x).sum() for x in computed) / LLAMA_7B(lengths).sum()
                row["backward_rows"] = 1 + 128 * sum(map(len, computed)) / T
                row |= {"graphed": min(NUM_GRAPHED, len(packs)), "graphs": count_graphs(packs, collate)}
                rows.append(row)
                tell(row, ".3f")
    write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
