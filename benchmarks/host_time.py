"""What the host does for a micro-batch: operators that it launches and its CPU seconds, for each layer and the rest.

    python benchmarks/host_time.py --csv host_time.csv    # three CPU minutes

Ours against TRL's packing (`bfd`) on the path of flash-attn in transformers, on tiny Llamas under bf16 autocast, with
LoRA on all linear layers and with all weights, with gradient checkpointing and without. The path is that of CUDA, on
kernels of attention that compute nothing (`tests/support/host_profile.py`), so the time is that of the host. Launches
are counted by torch's profiler, and views are free; `tests/training/test_host_time.py` bounds them. Seconds are the
fewest of six micro-batches without the profiler, on one thread. Those of a layer are the difference of 6 and 2 layers
over 4. Contenders take turns for `--repeats` rounds, and the rows have their medians.
"""

import statistics

import torch
from common import Row, hide_progress, make_parser, tell, write_csv
from support.host_profile import profile_layer

# isort: split
import trl

import trl_packfix

CONTENDERS = {"ours": trl_packfix, "TRL bfd": trl}
CASES = {
    f"{weights}, {'checkpointing' if checkpoints else 'no checkpointing'}": {"lora": lora, "checkpoints": checkpoints}
    for weights, lora in (("LoRA", True), ("all weights", False))
    for checkpoints in (True, False)
}


def measure(repeats: int) -> list[Row]:
    rows = []
    for case, settings in CASES.items():
        rounds = {name: [] for name in CONTENDERS}
        for _ in range(repeats):
            for name, package in CONTENDERS.items():
                rounds[name].append(profile_layer(package, num_timed=6, **settings))
        for name, found in rounds.items():
            row: Row = {"case": case, "contender": name, "device": "CPU"}
            row |= {key: statistics.median(each[key] for each in found) for key in found[0]}
            tell(row, ".2f")
            rows.append(row)
    return rows


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    hide_progress()
    torch.set_num_threads(1)
    write_csv(arguments.csv, measure(arguments.repeats))
