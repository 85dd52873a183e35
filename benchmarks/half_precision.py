"""What half precision hides from the leak probe: its result in bf16 compared with fp32 on the same weights.

    python benchmarks/half_precision.py --csv half_precision.csv    # about 7 minutes

Every model type that trains packed (docs/compatibility.csv), as a tiny random model inside DistributedDataParallel (one
rank, gloo). Under such an engine the probe cannot compute gradients and compares forwards only. The model is proved
and, if it leaks, repaired in bf16: once with weights in bf16 and once with weights in fp32 under autocast. The repaired
model is then probed in fp32. Leaks of 1e-4 and more count as overlooked.
"""

import os
import tempfile
import warnings
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from common import describe, make_parser, write_csv
from rich.console import Console
from rich.progress import track
from rich.table import Table
from support import zoo
from sweep import page as compatibility
from torch.nn.parallel import DistributedDataParallel

from trl_packfix import check_isolation
from trl_packfix.isolation.packed_model import PackedModel

DOCS = Path(__file__).resolve().parents[1] / "docs"
LEAST = 1e-4  # relative: the threshold of the judge of docs/compatibility.md
VERDICTS = {
    "right": "isolated and equal in bf16, and so it is in fp32",
    "overlooked leak": "called isolated, and documents move each other",
    "overlooked difference": "called equal, and a document is not what it is alone",
    "refused": "leaks in bf16 after all repairs, so that training stops",
    "raises": "the model itself does not run so",
}


def judge(row: compatibility.Row, autocast: bool) -> dict:
    model = zoo.build_model(row.model_type, row.kind)
    packed = PackedModel(model if autocast else model.to(torch.bfloat16), torch.bfloat16, "cpu", max_length=64)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        half = packed.prove(DistributedDataParallel(model, find_unused_parameters=True))
    full = check_isolation(model.float(), max_length=64)
    verdict = "right"
    if half.error:
        verdict = "raises"
    elif not (half.isolated and half.equal):
        verdict = "refused"
    elif full.max_change > LEAST or (full.max_gradient or 0.0) > LEAST:
        verdict = "overlooked leak"
    elif full.max_difference > LEAST:
        verdict = "overlooked difference"
    return {
        "model_type": row.model_type,
        "kind": row.kind,
        "dtype": "bf16 autocast" if autocast else "bf16 weights",
        "verdict": verdict,
        "needless repair": row.verdict != "repaired" and bool(packed.repaired),
        "tolerance": f"{half.tolerance:.3g}",
        "fp32 change": f"{full.max_change:.3g}",
        "fp32 difference": f"{full.max_difference:.3g}",
        "repairs": "; ".join(map(str, packed.repaired)),
        "error": half.error or "",
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="these model types only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(describe())
    types = [row for row in compatibility.read(DOCS) if row.verdict in ("native", "varlen", "repaired")]
    types = [row for row in types if not options.only or row.model_type in options.only]
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
        cases = [(row, autocast) for autocast in (False, True) for row in types]
        rows = [judge(*case) for case in track(cases, "Proving")]
        dist.destroy_process_group()
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        found = [row for row in rows if row["dtype"] == dtype]
        counts = Counter(row["verdict"] for row in found)
        title = f"{dtype}: {len(found)} types, {sum(row['needless repair'] for row in found)} repaired for nothing"
        table = Table("verdict", "types", "which", "means", title=title)
        for verdict, meaning in VERDICTS.items():
            which = [row["model_type"] for row in found if row["verdict"] == verdict]
            table.add_row(verdict, str(counts[verdict]), "" if verdict == "right" else ", ".join(which), meaning)
        Console().print(table)
    write_csv(options.csv, rows)


if __name__ == "__main__":
    main()
