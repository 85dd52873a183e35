"""Run scenarios on forked ranks: `python -m ranks FOLDER PART [ENGINE/NAME ...]`, PART is a key of `PARTS`.

With names only these run. A launcher of two processes runs `python -m ranks FOLDER die ENGINE`.
"""

import os
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # DeepSpeed's launcher shows its ranks the GPUs that the test has hidden

import torch._inductor.compile_fx  # noqa: F401 # DeepSpeed and torch.compile would import it in each rank
from support.features import module_of_tests
from support.versions import run_deepspeed_on_cpus

from . import exchange, faults, restarts, scenarios, training
from .engines import SHARDED, Scenarios, run_all
from .scenarios import reversed_on_odd_ranks
from .table import FAULTS, ONE, PAIRS, ROWS, Row

OF_HYBRIDS = module_of_tests("hybrids", "on_ranks")
WHOLE = ("ddp", "zero3", "fsdp2")  # engines that run most scenarios
RESTARTS = {
    "parts_prefixes": "ddp",
    "parts_stream_shards": "ddp4",
    "parts_llava": "ddp",
    "images": "ddp",
    "images_stream": "ddp",
}
RESTARTS = {name: engine for name, engine in RESTARTS.items() if name in ROWS}


def equivalence() -> Scenarios:
    """Return the rows of the table, and what is compared without a trainer."""
    rows = {f"{engine}/{name}": partial(training.train, row=ROWS[name], engine=engine) for engine, name in PAIRS}
    rows |= {f"ddp4/{scenario.__name__}": scenario for scenario in (exchange.attention, exchange.proofs)}
    return rows | ({"ddp4/mixers": OF_HYBRIDS.mixers} if OF_HYBRIDS is not None else {})


def planted() -> Scenarios:
    """Return the rows of the table with their faults, behind the proofs, and the faults that the proofs must find."""
    scenarios: Scenarios = {"ddp/faults_of_proofs": exchange.faults_of_proofs}
    if OF_HYBRIDS is not None:
        scenarios["ddp/faults_of_mixers"] = OF_HYBRIDS.faults_of_mixers
    for engine, name, fault in FAULTS:
        scenarios[f"{engine}/{name}-{fault}"] = partial(train_wrong, engine=engine, name=name, fault=fault)
    return scenarios


def train_wrong(folder: Path, engine: str, name: str, fault: str) -> dict:
    row = replace(ROWS[name], evaluates=False, finds="")
    data = None
    if fault == "other_texts":
        data = reversed_on_odd_ranks(row.documents())
    with faults.ALL[fault](), faults.behind_proofs():
        return training.train(folder, row, engine, data=data)


def whole_engines() -> Scenarios:
    """Return the scenarios for what a comparison of weights does not show."""
    s = scenarios
    scenarios_found = {}

    def add(engine: str, scenario, name: str | None = None, **settings) -> None:
        scenarios_found[f"{engine}/{name or scenario.__name__}"] = partial(scenario, engine=engine, **settings)

    for engine in WHOLE:
        add(engine, s.probed)
        add(engine, restarts.restart, f"restart_{engine}", output=f"restart_{engine}")
        if engine != "fsdp2":  # accelerate 1.15 does not prepare a model for FSDP2 without an optimizer
            add(engine, s.evaluation, "evaluate_first", trains=False)
    # DeepSpeed asks for a GPU before it allows bf16
    add("fsdp2", s.rounded)
    add("fsdp2", s.repaired_in_bf16)
    ddp = partial(add, "ddp")
    ddp(s.drop_last)
    ddp(restarts.restart, "restart_workers", output="restart_workers", dataloader_num_workers=2)
    ddp(restarts.restart, "restart_minibatch", output="restart_minibatch", packing_strategy="minibatch")
    for name, packing in (("packed", {}), ("padded", {"packing": False})):
        for first in (False, True):
            ddp(s.evaluation, f"{name}_{'evaluated' if first else 'trained'}", first=first, **packing)
    for name, engine in RESTARTS.items():
        add(engine, restarts.restart_steps, f"restart_{name}", output=f"restart_{name}", row=ROWS[name])
    ddp(s.evaluation, "minibatch_trained", packing_strategy="minibatch")
    row_of_parts = ROWS["parts"]
    ddp(s.refused, "other_packs", row=row_of_parts, data=lambda: reversed_on_odd_ranks(row_of_parts.documents()))
    ddp(s.refused, "other_second_pass", row=row_of_parts, data=s.other_second_pass, max_steps=6)
    if "parts_prefixes_llava" in ROWS:
        ddp(s.refused, "other_images", row=ROWS["parts_prefixes_llava"], fault="other_images")
    ddp(s.refused, "other_rows", row=Row(), data=s.rows_of_each_rank)
    later = {"packing_strategy": "stream", "logging_steps": 2, "max_steps": 4}
    ddp(s.refused, "later_rows", row=Row(), data=s.later_rows_of_each_rank, **later)
    ddp(s.refused, "other_stream", row=Row(), data=s.stream_of_each_rank, packing_strategy="stream")
    add("ddp4", s.refused, "own_shards", row=ROWS["parts_stream_shards"], fault="own_shards")
    of_row = partial(add, "tp", s.refused)
    of_row("other_packs", row=ROWS["dividing"], data=lambda: reversed_on_odd_ranks(ROWS["dividing"].documents()))
    of_row("odd", row=ROWS["dividing"], per_device_eval_batch_size=3)
    of_row("inputs", row=ROWS["dividing"], include_for_metrics=["inputs"])
    of_row("restart", row=ROWS["dividing"], save_strategy="steps")
    for engine in ("tp", "tp_fsdp"):
        add(engine, s.predicted)
    return scenarios_found


def pairs() -> Scenarios:
    """Return trainings by trainers of other kinds on padded rows."""
    preferences = module_of_tests("pack_forward", "on_ranks")
    assert preferences is not None, "the folder of `pack_forward` is missing"
    engine_names = [(engine, name) for engine, names in preferences.RUNS.items() for name in names]
    return {f"{engine}/{name}": partial(preferences.train, engine=engine, name=name) for engine, name in engine_names}


PARTS = {"equivalence": equivalence, "planted": planted, "whole": whole_engines, "pairs": pairs}


def main(folder: str, part_name: str, *only: str) -> int:
    warnings.simplefilter("ignore")
    if part_name == "die":
        if only[0] in SHARDED:
            run_deepspeed_on_cpus()
        restarts.die(Path(folder), only[0])
        return 0
    on_ranks = {row.model for row in ROWS.values() if row.engines != ONE}
    for model in on_ranks if part_name in ("equivalence", "planted", "whole") else ["llama"]:
        training.save_model(Path(folder), model)
    scenarios = PARTS[part_name]()
    return int(
        not run_all(Path(folder), {name: scenario for name, scenario in scenarios.items() if not only or name in only})
    )


if __name__ == "__main__":
    sys.exit(main(*(word for word in sys.argv[1:] if not word.startswith("--local_rank"))))  # DeepSpeed's launcher
