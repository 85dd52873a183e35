"""Trainings on real CPU ranks (gloo): exactness under every engine, and which types can share packs.

    python benchmarks/sequence_parallel.py                       # the table of equivalences, under all engines
    python benchmarks/sequence_parallel.py --engines ddp4 zero3  # under some
    python benchmarks/sequence_parallel.py --types               # which model types two ranks can share
    python benchmarks/sequence_parallel.py --csv FILE

Exactness: three optimizer steps of SGD of each row of `tests/ranks/table.py`, on documents of 3 to 90 tokens, of which
ranks share packs. The figure is the norm of the difference of the weights from TRL's unpacked training, over the norm
of their change; `rounding` is the same for that training with each step in two micro-batches. A name after a dash is a
planted fault, to see that the figure finds it.

Types: each causal model type of transformers, tiny and random. `proved` says whether isolation is proved on one rank
without a repair, and `shared` whether it is proved on two ranks that share each pack, which training needs.
`difference` is that of the logits on parts from those of the whole pack, relative to the largest.
"""

import os
import tempfile
import warnings
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
from ranks import training
from ranks.__main__ import equivalence, planted
from ranks.engines import LAUNCHES, run_all
from ranks.table import ROWS
from rich.console import Console
from sweep import page, zoo

from trl_packfix import PackedDataCollator
from trl_packfix.data.rank_share import cut_part
from trl_packfix.group import Group, make_groups
from trl_packfix.isolation.packed_model import PackedModel


def exactness(folder: Path, engines: list[str]) -> list[Row]:
    """One row per row of the table: the difference under each engine, and that of rounding alone; then the faults."""
    scenarios = {name: each for name, each in equivalence().items() if name.split("/")[1] in ROWS}
    scenarios |= {name: each for name, each in planted().items() if "-" in name}
    for row in ROWS.values():
        training.save_model(folder, row.model)
    run_all(folder, {name: each for name, each in scenarios.items() if name.split("/")[0] in engines})
    found: dict[str, Row] = {}
    for name in scenarios:
        engine, name = name.split("/")
        file = folder / engine / f"{name}.pt"
        row = ROWS[name.split("-")[0]]
        if not file.is_file():
            continue
        expected = training.train_unpacked(folder, row)
        change = (expected["end"] - expected["start"]).norm()
        if name not in found:
            again = training.train_unpacked(folder, row, halves=True)
            found[name] = {"training": name, "rounding": ((again["end"] - expected["end"]).norm() / change).item()}
        found[name][engine] = ((torch.load(file)["end"] - expected["end"]).norm() / change).item()
    return list(found.values())


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
    part = cut_part(whole, Group(2, dist.get_rank()))
    problem = torch.zeros(())
    with torch.no_grad():
        expected = model(**{key: value for key, value in whole.items() if key != "labels"}).logits
        try:
            found = model(**{k: value for k, value in part.items() if k not in ("labels", "shift_labels")}).logits
            index = dist.get_rank()
            length = found.shape[1]
            gap = (found - expected[:, index * length : (index + 1) * length]).abs().max() / expected.abs().max()
        except Exception:
            problem = torch.ones(())
            gap = torch.zeros(())
    both = torch.stack([gap, problem])
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return None if both[1] else both[0].item()


def one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def types_on_ranks(folder: Path) -> list[Row]:
    run_all(folder, {"ddp/types": types})
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
    engines = [engine for _, of_launch in LAUNCHES.values() for engine in of_launch]
    parser.add_argument("--engines", nargs="*", default=engines, choices=engines)
    parser.add_argument("--types", action="store_true", help="which model types two ranks can share")
    parser.add_argument("--page", type=Path, help="with --types: the folder of compatibility.md, whose column to fill")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = types_on_ranks(folder) if given.types else exactness(folder, given.engines)
    print(describe())
    Console(width=140).print(table_of(rows, text=text))
    write_csv(given.csv, rows)
    if given.types and given.page:
        fill_column(given.page, rows)
