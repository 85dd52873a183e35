"""Do hybrid models train in packs as without? Weights after five steps, beside those of TRL's unpacked trainer.

    python benchmarks/hybrid_training.py --csv hybrid_training.csv    # 4 CPU minutes

Each model is tiny and random, trained whole and with LoRA (`target_modules="all-linear"`), with SGD, on the same eight
documents in every step, in micro-batches of two. The reference is TRL's SFTTrainer without packing, in the same
environment. Each difference is relative to the distance that its weights moved:

rounding   TRL once more, with the rows of each micro-batch in reverse: what the order of sums alone changes
packed     this package in one process, with `packing_strategy="minibatch"`
two ranks  this package, and two ranks share the pack of all documents (`tokens_per_rank`)
fault      packed, and in each pack the mixers do not see one boundary: such an error must be far above rounding

`kernels` is "torch", or "stand-ins": the strict stand-ins of the tests for flash-linear-attention, mamba_ssm and
causal_conv1d, through which transformers runs its path with kernels, also in TRL. `untrained` counts the weights that
TRL trains in torch and not on kernels: adapters that a fused kernel does not read. There the reference is TRL in torch.
"""

import os
import subprocess
import sys
import tempfile
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch
from common import Row, describe, hide_progress, make_console, make_parser, scientific, table_of, write_csv
from equivalence import HYBRIDS, Case, train
from support.launch import fork_ranks

SITE = Path(__file__).resolve().parents[1] / "tests" / "support" / "kernel_site"
ADAPTERS = ("full", "lora")
TRAINERS = {"reversed": "rounding", "packed": "packed", "leaking": "fault"}
# A worker does all trainings of one kind: transformers looks for kernels when it is imported
WORKERS = [("torch", 1), ("torch", 2), ("stand-ins", 1), ("stand-ins", 2)]


def save_runs(folder: Path, models: list[str], trainers: list[str]) -> None:
    """Train each model with each trainer, and save the change of its weights."""
    if find_spec("strict") is not None:  # the stand-ins; tiny models break the alignment of the convolution's kernel
        import_module("strict").options["aligned"] = False
    for model in models:
        for adapter in ADAPTERS:
            for trainer in trainers:
                _, change, runner = train(Case(model, adapter, accumulation=4, num_documents=8), trainer)
                trained = {name: p.numel() for name, p in runner.model.named_parameters() if p.requires_grad}
                moves = zip(trained, change.split([*trained.values()]), strict=True)
                found: Row = {"change": change, "still": [name for name, move in moves if not move.any()]}
                is_stock = trainer in ("unpacked", "reversed")
                found["repaired"] = [] if is_stock else list(map(str, runner.packed_model.repaired))
                if trainer == "shared":
                    degrees = runner.data.source.planner.schedule(0).degrees
                    assert set(degrees.tolist()) == {2}, f"two ranks were to share each pack, and {degrees} did"
                if runner.args.process_index == 0:
                    torch.save(found, folder / f"{model} {adapter} {trainer}.pt")


def work(folder: Path, models: list[str], num_ranks: int) -> None:
    torch.set_num_threads(1)
    hide_progress()
    run = partial(save_runs, folder, models, ["shared"] if num_ranks > 1 else ["unpacked", *TRAINERS])
    if not fork_ranks(num_ranks, run):
        sys.exit(1)


def rows_of(folder: Path, models: list[str]) -> list[Row]:
    rows = []

    def load(kernels: str, model: str, adapter: str, trainer: str) -> Row:
        found: Row = torch.load(folder / kernels / f"{model} {adapter} {trainer}.pt", weights_only=False)
        return found

    for model in models:
        for adapter in ADAPTERS:
            for kernels in ("torch", "stand-ins"):
                stock, in_torch = (load(each, model, adapter, "unpacked") for each in (kernels, "torch"))
                untrained = len(set(stock["still"]) - set(in_torch["still"]))
                reference = (in_torch if untrained else stock)["change"]
                row: Row = {"type": model, "weights": adapter, "kernels": kernels, "moved": reference.norm().item()}
                for trainer, name in (TRAINERS | {"shared": "two ranks"}).items():
                    found = load(kernels, model, adapter, trainer)
                    beside = stock["change"] if name == "rounding" else reference
                    row[name] = ((found["change"] - beside).norm() / beside.norm()).item()
                    row["repaired"] = len(found["repaired"]) + row.get("repaired", 0)
                row["untrained"] = untrained
                rows.append(row)
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="*", default=list(HYBRIDS), choices=HYBRIDS)
    parser.add_argument("--worker", nargs=2, metavar=("FOLDER", "RANKS"), help="only this command itself sets it")
    args = parser.parse_args()
    if args.worker is not None:
        return work(Path(args.worker[0]), args.models, int(args.worker[1]))

    print(describe())
    with tempfile.TemporaryDirectory() as name:
        for kernels, num_ranks in WORKERS:
            paths = [str(SITE)] * (kernels == "stand-ins") + [os.environ.get("PYTHONPATH", "")]
            folder = Path(name) / kernels
            folder.mkdir(exist_ok=True)
            command = [sys.executable, __file__, "--models", *args.models, "--worker", str(folder), str(num_ranks)]
            subprocess.run(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, check=True)
        rows = rows_of(Path(name), args.models)
    make_console(120).print(table_of(rows, text=scientific))
    write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
