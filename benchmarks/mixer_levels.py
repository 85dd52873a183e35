"""Scans where documents share prefixes: CPU seconds by the most levels that a pack may have, beside packing whole.

    python benchmarks/mixer_levels.py --csv benchmarks/results/mixer_levels.csv    # 3 minutes

One sample per turn of a conversation: the history of each turn ends with another answer, so the branches are as deep as
the conversation is long. The gated delta rule of transformers in torch, forward and backward, on one thread; Mamba-2's
likewise. `calls` of the scan in a layer, `scanned` rows of these calls, with padding; packing whole is `levels` 0.
"""

import os
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from common import cpu_seconds, describe, make_parser, table_of, write_csv
from rich.console import Console
from transformers.models.bamba import modeling_bamba
from transformers.models.qwen3_5 import modeling_qwen3_5

from trl_packfix.attention import mixer_prefixes, mixers
from trl_packfix.attention.packed_forward import PackedForward
from trl_packfix.data.collator import PackedDataCollator
from trl_packfix.data.prefix_collator import PrefixCollator
from trl_packfix.layout import layout_of

HISTORY, ANSWER = 40, 60  # tokens that a turn adds to the history, and of a sample's own
HEADS, SIZE = 4, 32
NAMES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def samples(num_turns: int) -> list[dict]:
    history = torch.randint(1000, (num_turns * HISTORY,))
    return [
        {"input_ids": torch.cat([history[: (i + 1) * HISTORY], torch.randint(1000, 2000, (ANSWER,))])}
        for i in range(num_turns)
    ]


def run_delta(pack: PackedForward, num_rows: int) -> int:
    query, key, value = (torch.randn(1, num_rows, HEADS, SIZE, requires_grad=True) for _ in range(3))
    decay, beta = -torch.rand(1, num_rows, HEADS) / 8, torch.rand(1, num_rows, HEADS)
    counting = mock.Mock(wraps=modeling_qwen3_5.torch_chunk_gated_delta_rule)
    mixers.scan_delta(counting, pack, query, key, value, decay, beta, use_qk_l2norm_in_kernel=True)[0].sum().backward()
    return counting.call_count


def run_chunks(pack: PackedForward, num_rows: int) -> int:
    states = torch.randn(1, num_rows, HEADS, SIZE, requires_grad=True)
    steps, decay = torch.rand(1, num_rows, HEADS) / 8, -torch.rand(HEADS)
    keys = [torch.randn(1, num_rows, 1, SIZE, requires_grad=True) for _ in range(2)]
    counting = mock.Mock(wraps=modeling_bamba.mamba2_chunk_scan)
    mixers.scan_chunks(counting, pack, states, steps, decay, *keys, chunk_size=256, dt_bias=None).sum().backward()
    return counting.call_count


SCANS = {"gated delta": run_delta, "mamba2": run_chunks}


def measure(name: str, num_turns: int, levels: int, rounds: int) -> dict:
    documents = samples(num_turns)
    if levels == 0:
        batch = PackedDataCollator()(documents)
        pack = PackedForward(*(batch[each] for each in NAMES))
        rows = pack.document_rows(pack.num_tokens)
        scanned = rows.num_padded
    else:
        batch = PrefixCollator()(documents)
        with mock.patch.object(mixer_prefixes, "MAX_LEVELS", levels):
            pack = PackedForward(*(batch[each] for each in NAMES), **layout_of(batch).attention())
            scanned = sum(
                one.source.numel() for level in mixer_prefixes.levels_of(pack).levels for one in level.batches
            )
    num_rows = batch["input_ids"].shape[1]
    calls = SCANS[name](pack, num_rows)
    seconds, _ = cpu_seconds(lambda: SCANS[name](pack, num_rows), rounds)
    row = {"scan": name, "turns": num_turns, "levels": levels, "rows": num_rows, "calls": calls}
    return row | {"scanned": scanned, "seconds": round(seconds, 3)}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--turns", type=int, nargs="+", default=[16, 64])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(describe())
    rows = []
    for name in SCANS:
        for num_turns in options.turns:
            choices = [levels for levels in (1, 4, 8, 16, 64) if levels <= num_turns]
            rows += [measure(name, num_turns, levels, options.rounds) for levels in (0, *choices)]
    Console().print(table_of(rows, title="CPU seconds of a scan, forward and backward"))
    write_csv(options.csv, rows)


if __name__ == "__main__":
    main()
