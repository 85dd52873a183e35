"""Sequence parallelism on four real CPU ranks (gloo): exactness under every engine, memory, and the cost of the start.

    python benchmarks/sequence_parallel.py                       # all kinds of training under all engines
    python benchmarks/sequence_parallel.py --engines ddp zero3   # under some
    python benchmarks/sequence_parallel.py --ranks 2             # on two ranks instead of four
    python benchmarks/sequence_parallel.py --memory              # memory of a rank as documents grow
    python benchmarks/sequence_parallel.py --start               # seconds for process groups and proofs
    python benchmarks/sequence_parallel.py --types               # which model types two ranks can share
    python benchmarks/sequence_parallel.py --csv FILE

Exactness: three optimizer steps of SGD in three micro-steps each, on documents of 3 to 110 tokens with 32 tokens per
rank, so that packs are shared by 1, 2 and 4 ranks (`tests/shared_packs.py`); with `--ranks 2` 64 tokens per rank. The
figure is the norm of the difference of the weights from one process that trains on the same packs, over the norm of
their change; `rounding` is the same for that process with its micro-batches in the opposite order. `faults` are planted
in DDP, to see that the figure finds them.

Memory: forward and backward of one document of T tokens by a Llama of 4 layers of 256, with the same number of tokens
on each rank, against the same document on one rank. The figure is how much the resident memory of a rank grows at its
peak.

Types: each causal model type of transformers, tiny and random. `proved` says whether isolation is proved on one rank
without a repair, and `shared` whether it is proved on two ranks that share each pack, which training needs.
`difference` is that of the logits on parts from those of the whole pack, relative to the largest.
"""

import os
import sys
import tempfile
import time
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
from common import MIB, Row, describe, make_parser, peak_growth, table_of, write_csv
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import shared_packs
from support import zoo
from support.models import build_tiny_model
from sweep import page

from trl_packfix import PackedDataCollator, check_isolation
from trl_packfix.attention.choice import select_attention
from trl_packfix.attention.exchange import make_groups
from trl_packfix.attention.forwards import mark_packed_forwards
from trl_packfix.data.parts import cut_part
from trl_packfix.isolation.packed_model import PackedModel

TOKENS_PER_RANK = 2048


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


def memory_of(degree: int, num_tokens: int) -> Row:
    """The growth on this rank for one document of `num_tokens` that `degree` ranks share."""
    config = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    model = build_tiny_model("llama", **config, num_key_value_heads=4, max_position_embeddings=65536)
    select_attention(model)
    mark_packed_forwards(model)
    document = torch.randint(4, 260, (num_tokens,), generator=torch.Generator().manual_seed(0))
    batch = PackedDataCollator()([{"input_ids": document}])
    if degree > 1:
        batch = cut_part(batch, degree, dist.get_rank() % degree)
    targets = {name: batch.pop(name, None) for name in ("labels", "shift_labels")}

    def step() -> None:
        model.loss_function(model(**batch).logits, **targets, vocab_size=model.config.vocab_size).backward()

    return {"mib": peak_growth(step)[0] / MIB}


def memory(folder: Path, factor: int, shared: bool) -> Row:
    """The growth for a document of `factor` times the tokens of a rank, on as many ranks or on the first alone."""
    shared_packs.start_gloo()
    make_groups((2, 4))
    found = memory_of(factor if shared else 1, factor * TOKENS_PER_RANK) if shared or dist.get_rank() == 0 else {}
    dist.barrier()
    return found


def start(folder: Path) -> Row:
    """Seconds for the groups of both degrees, and for the proofs of a tiny Llama."""
    shared_packs.start_gloo()
    dist.barrier()
    started = time.perf_counter()
    make_groups((2, 4))
    found = {"groups of 2 and of 4": time.perf_counter() - started}
    model = build_tiny_model("llama")
    select_attention(model)
    for degree in (1, 2, 4):
        started = time.perf_counter()
        assert check_isolation(model, degree=degree).equal
        found[f"proof, degree {degree}"] = time.perf_counter() - started
    return found


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


def on_ranks(folder: Path, name: str, scenario: Any) -> Row:
    """What rank 0 returns of a scenario on four ranks."""
    shared_packs.scenarios = lambda launch: {f"ddp/{name}": partial(scenario)} if launch == "ddp" else {}
    shared_packs.main(folder, [f"ddp/{name}"])
    return torch.load(folder / "ddp" / f"{name}.pt")


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
    parser.add_argument("--memory", action="store_true", help="memory of a rank as documents grow")
    parser.add_argument("--start", action="store_true", help="seconds for process groups and proofs")
    parser.add_argument("--types", action="store_true", help="which model types two ranks can share")
    parser.add_argument("--page", type=Path, help="with --types: the folder of compatibility.md, whose column to fill")
    given = parser.parse_args()
    if given.ranks == 2:
        shared_packs.NUM_RANKS, shared_packs.TOKENS_PER_RANK = 2, 64
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.memory:
            rows = []
            for factor in (1, 2, 4):  # each in processes of its own: freed memory may stay resident
                row = {"tokens": factor * TOKENS_PER_RANK, "ranks": factor, "tokens per rank": TOKENS_PER_RANK}
                for column, shared in (("MiB per rank", True), ("MiB on one rank", False)):
                    found = on_ranks(folder, f"memory_{factor}", partial(memory, factor=factor, shared=shared))
                    row[column] = round(found["mib"])
                rows.append(row)
        elif given.types:
            shared_packs.NUM_RANKS = 2
            rows = on_ranks(folder, "types", types)
        elif given.start:
            rows = [{"what": what, "seconds": seconds} for what, seconds in on_ranks(folder, "start", start).items()]
        else:
            rows = exactness(folder, given.engines)
    print(describe())
    Console(width=140).print(table_of(rows, text=text))
    write_csv(given.csv, rows)
    if given.types and given.page:
        fill_column(given.page, rows)
