"""What the leak probe costs, and what a repaired model costs, in CPU seconds of one run.

    python benchmarks/repair.py --csv benchmarks/results/repair.csv    # about 4 minutes

Random models of two layers, hidden size 256, in training mode, forward and backward, on one thread. Every round runs
all contenders in turn on the same pack. Times are medians over the rounds, costs are ratios to `alone`:

alone      each document in a separate forward and backward: the correct result without this package
leaking    the packed row as transformers runs it: documents influence each other
repaired   the packed row after the repair
unpacked   the same documents as rows of padded batches below the LM head (`on_leak="unpack"`)
probe      `check_isolation` on the repaired model, in units of one repaired forward and backward
"""

import copy
import os
import statistics
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from common import cpu_seconds, describe, make_parser, table_of, write_csv
from rich.console import Console
from support import zoo

from trl_packfix import check_isolation
from trl_packfix.data.collator import PackedDataCollator
from trl_packfix.isolation.packed_model import PackedModel

PACKS = {
    "mixed": [400, 31, 120, 9, 260, 75, 18, 111],
    "64 short": [16] * 64,
    "one long": [1024],
}
SIZES = {"hidden_size": 256, "vocab_size": 1024, "num_attention_heads": 8, "num_hidden_layers": 2}
MODELS = {
    "mamba": {"intermediate_size": 512},
    "mamba2": {"num_heads": 64},
    "falcon": {"ffn_hidden_size": 512},
    "bloom": {"n_head": 8},
    "llama": {"intermediate_size": 512, "num_key_value_heads": 8, "head_dim": 32},
}


def seconds(model: torch.nn.Module, batches: list[dict]) -> float:
    return cpu_seconds(lambda: [model(**batch).loss.backward() for batch in batches])[0]


def measure(name: str, rounds: int) -> list[dict]:
    plain = zoo.build_model(name, **SIZES | MODELS[name]).train()
    models = {}
    for way in ("repair", "unpack"):
        model = copy.deepcopy(plain)
        packed = PackedModel(model, torch.float32, "cpu", max_length=2048, on_leak=way)
        packed.prove(model).raise_if_leaking()
        models[way] = model.train()
        if way == "repair":
            done = "; ".join(map(str, packed.repaired)) or "nothing"
    rows = []
    for pack, lengths in PACKS.items():
        documents = [torch.randint(16, 1024, (n,)) for n in lengths]
        batch = PackedDataCollator()([{"input_ids": ids} for ids in documents])
        alone = [{"input_ids": ids[None], "labels": ids[None], "use_cache": False} for ids in documents]
        contenders = {
            "alone": lambda alone=alone: seconds(plain, alone),
            "leaking": lambda batch=batch: seconds(plain, [batch]),
            "repaired": lambda batch=batch: seconds(models["repair"], [batch]),
            "unpacked": lambda batch=batch: seconds(models["unpack"], [batch]),
        }
        times: dict[str, list[float]] = {each: [] for each in contenders}
        for _ in range(rounds + 1):
            for each, run in contenders.items():
                times[each].append(run())
        median = {each: statistics.median(values[1:]) for each, values in times.items()}
        probe, _ = cpu_seconds(lambda: check_isolation(models["repair"], max_length=2048))
        ratios = {each: round(median[each] / median["alone"], 2) for each in contenders}
        row = {"model": name, "pack": pack, "tokens": sum(lengths), "documents": len(lengths), "repair": done}
        row |= {"alone_seconds": round(median["alone"], 3)} | ratios
        rows.append(row | {"probe": round(probe / median["repaired"], 2)})
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    print(describe())
    rows = [row for name in options.models for row in measure(name, options.rounds)]
    columns = ("model", "pack", "tokens", "documents", "alone_seconds", "leaking", "repaired", "unpacked", "probe")
    title = "CPU seconds, as ratios to each document alone; probe: to a repaired step"
    Console().print(table_of(rows, columns, title=title))
    write_csv(options.csv, rows)


if __name__ == "__main__":
    main()
