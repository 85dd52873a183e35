"""Sequence parallelism on four real CPU ranks (gloo): exactness under every engine, and which types.

    python benchmarks/sequence_parallel.py                       # all kinds of training under all engines
    python benchmarks/sequence_parallel.py --engines ddp zero3   # under some
    python benchmarks/sequence_parallel.py --ranks 2             # on two ranks instead of four
    python benchmarks/sequence_parallel.py --types               # which model types two ranks can share
    python benchmarks/sequence_parallel.py --csv FILE

Exactness: three optimizer steps of SGD in three micro-steps each, on documents of 3 to 110 tokens with 32 tokens per
rank, so that packs are shared by 1, 2 and 4 ranks (`tests/shared_packs.py`); with `--ranks 2` 64 tokens per rank. The
figure is the norm of the difference of the weights from one process that trains on the same packs, over the norm of
their change; `rounding` is the same for that process with its micro-batches in the opposite order. `faults` are planted
in DDP, to see that the figure finds them.

Types: each causal model type of transformers, tiny and random. `proved` says whether isolation is proved on one rank
without a repair, and `shared` whether it is proved on two ranks that share each pack, which training needs.
`difference` is that of the logits on parts from those of the whole pack, relative to the largest.
"""

import os
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
import transformers
from accelerate import PartialState
from common import Row, describe, make_parser, table_of, write_csv
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import shared_packs
from support import zoo
from sweep import page

from trl_packfix import PackedDataCollator
from trl_packfix.attention.exchange import make_groups
from trl_packfix.data.parts import cut_part
from trl_packfix.isolation.packed_model import PackedModel


def difference(found: Row, expected: Row) -> float:
    return ((found["end"] - expected["end"]).norm() / (expected["end"] - expected["start"]).norm()).item()


def exactness(folder: Path, engines: list[str]) -> list[Row]:
    """One row per kind of training: the difference under each engine, and that of rounding alone."""
    kinds = list(shared_packs.KINDS)
    shared_packs.OF_ENGINES = {engine: kinds * (engine in engines) for engine in shared_packs.OF_ENGINES}
    shared_packs.ROUNDING = kinds
    shared_packs.PLANTED = dict.fromkeys(shared_packs.FAULTS, "full") | shared_packs.PLANTED
    faults = [f"ddp/faulty_{fault}" for fault in shared_packs.PLANTED] if "ddp" in engines else []
    only = [f"{engine}/{kind}" for kind in shared_packs.KINDS for engine in ("one", *engines)]
    shared_packs.main(folder, only + [f"one/{kind}_reversed" for kind in shared_packs.KINDS] + faults)

    def load(name: str) -> Row | None:
        file = folder / f"{name}.pt"
        return torch.load(file) if file.is_file() else None

    rows = []
    for kind in shared_packs.KINDS:
        expected, again = load(f"one/{kind}"), load(f"one/{kind}_reversed")
        if expected is None or again is None:
            continue
        row: Row = {"training": kind, "rounding": difference(again, expected)}
        for engine in engines:
            found = load(f"{engine}/{kind}")
            row[engine] = None if found is None else difference(found, expected)
        rows.append(row)
    for fault, kind in shared_packs.PLANTED.items() if faults else ():
        found, expected = load(f"ddp/faulty_{fault}"), load(f"one/{kind}")
        if found is not None and expected is not None:
            rows.append({"training": f"{kind}, fault: {fault}", "ddp": difference(found, expected)})
    return rows


def types(folder: Path) -> list[Row]:
    """A row for every causal model type."""
    PartialState(cpu=True, backend="gloo")
    make_groups((2,))
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    rows = []
    for name in zoo.causal_types():
        row = type_row(name)
        rows.append(row)
        if dist.get_rank() == 0:
            print(row, flush=True)
    return rows


def type_row(model_type: str) -> Row:
    row: Row = {"model_type": model_type, "proved": "no", "shared": "no"}
    try:
        model = zoo.build_model(model_type)
    except Exception as error:  # any error of the model's code is the reason
        return row | {"proved": "not buildable", "reason": one_line(error)}
    try:
        packed_model = PackedModel(model, torch.float32, "cpu", 64, on_leak="raise")
        report = packed_model.prove(model)
        if not packed_model.is_proved:
            return row | {"reason": report.summary()}
        row["proved"] = "yes"
        row["difference"] = logits_difference(model)
        packed_model.prove_degree(model, 2)
        row["shared"] = "yes"
    except Exception as error:
        row["reason"] = one_line(error)
    return row


def logits_difference(model: torch.nn.Module) -> float | None:
    """None if the model raises on a part."""
    generator = torch.Generator().manual_seed(0)
    lengths = (20, 3, 37, 11, 1, 24)
    pack = [{"input_ids": torch.randint(zoo.FIRST_WORD, zoo.VOCABULARY, (n,), generator=generator)} for n in lengths]
    whole = PackedDataCollator()(pack)
    part = cut_part(whole, 2, dist.get_rank())
    problem = torch.zeros(())
    with torch.no_grad():
        expected = model(**{key: value for key, value in whole.items() if key != "labels"}).logits
        try:
            found = model(**{k: value for k, value in part.items() if k not in ("labels", "shift_labels")}).logits
            index, length = dist.get_rank(), found.shape[1]
            gap = (found - expected[:, index * length : (index + 1) * length]).abs().max() / expected.abs().max()
        except Exception:
            problem, gap = torch.ones(()), torch.zeros(())
    both = torch.stack([gap, problem])
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return None if both[1] else both[0].item()


def one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def types_on_ranks(folder: Path) -> list[Row]:
    shared_packs.scenarios = lambda launch: {"ddp/types": partial(types)} if launch == "ddp" else {}
    shared_packs.main(folder, ["ddp/types"])
    return torch.load(folder / "ddp" / "types.pt")


def text(x: Any) -> str:
    if not isinstance(x, float):
        return str(x)
    return f"{x:.1e}" if x < 0.01 else f"{x:.4g}"


def fill_column(folder: Path, rows: list[Row]) -> None:
    """Write which types two ranks can share into the page and the table in `folder`."""
    shared = {row["model_type"]: row["shared"] for row in rows if row["proved"] != "not buildable"}
    page.write(page.filled(page.read(folder), "shared", shared), folder)


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--engines", nargs="*", default=list(shared_packs.OF_ENGINES), choices=shared_packs.OF_ENGINES)
    parser.add_argument("--ranks", type=int, default=4, choices=(2, 4))
    parser.add_argument("--types", action="store_true", help="which model types two ranks can share")
    parser.add_argument("--page", type=Path, help="with --types: the folder of compatibility.md, whose column to fill")
    given = parser.parse_args()
    if given.ranks == 2:
        shared_packs.NUM_RANKS, shared_packs.TOKENS_PER_RANK = 2, 64
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.types:
            shared_packs.NUM_RANKS = 2
            rows = types_on_ranks(folder)
        else:
            rows = exactness(folder, given.engines)
    print(describe())
    Console(width=140).print(table_of(rows, text=text))
    write_csv(given.csv, rows)
    if given.types and given.page:
        fill_column(given.page, rows)
