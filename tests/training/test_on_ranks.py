"""The table of equivalences on real ranks (gloo, CPU): every row of `ranks/table.py` under its engines ends where TRL's
unpacked training ends; the exchange and its proof, without a trainer.

Rounding is measured once for each dtype: on the rows of `ROUNDING` with a step in two micro-batches, not one.
"""

import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from packaging.version import Version
from ranks import exchange, faults
from ranks.engines import DIVIDING, ENGINES, SHARDED, ranks_of
from ranks.table import FAULTS, NUM_STEPS, PAIRS, ROWS, Row
from ranks.training import train_unpacked
from support.features import module_of_tests, needs
from support.launch import Launch
from support.rounding import RESOLUTION, loss_difference, tolerance, weight_difference
from support.versions import SHARDS_GRADIENTS_ON_CPUS, TRANSFORMERS

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo"),
    pytest.mark.processes,
]
ROUNDING = [name for name in ("full", "lora", "parts_delta", "images") if name in ROWS]
OF_HYBRIDS = module_of_tests("hybrids", "on_ranks")
EXACT = ("num_tokens", "trained_tokens", "documents_per_step", "mean_token_accuracy")
LOGGED = ("loss", "entropy", "aux_loss", *EXACT)


@pytest.fixture(scope="module")
def launch(tmp_path_factory) -> Launch:
    folder = tmp_path_factory.mktemp("equivalence")
    return Launch(folder, "log", [sys.executable, "-m", "ranks", str(folder), "equivalence"])


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> Launch:
    folder = tmp_path_factory.mktemp("faults")
    return Launch(folder, "log", [sys.executable, "-m", "ranks", str(folder), "planted"])


def runs_here(engine: str) -> None:
    if engine in ("zero1", "zero2") and not SHARDS_GRADIENTS_ON_CPUS:
        pytest.skip("DeepSpeed below 0.19 does not run ZeRO-1 and ZeRO-2 on CPUs with torch 2.13")
    if engine in SHARDED and not importlib.util.find_spec("deepspeed"):
        pytest.skip("deepspeed is not installed (pip install trl_packfix[deepspeed])")
    if engine in DIVIDING and Version("5.23") > TRANSFORMERS:
        pytest.skip("this transformers divides models in another way")


def key(row: Row) -> tuple:
    return row.model, row.adapter, row.data, row.num, str(row.given), row.dtype, row.code


@cache
def folder() -> Path:
    return Path(mkdtemp())


@cache
def unpacked(key_of_row: tuple, halves: bool = False) -> dict:
    alike = [row for row in ROWS.values() if key(row) == key_of_row]
    return train_unpacked(folder(), max(alike, key=lambda row: row.evaluates and not halves), halves)


def reference(name: str) -> dict:
    return unpacked(key(ROWS[name]))


@cache
def rounding() -> tuple[float, float]:
    """Return the rounding of weights and of logged values, where a step is two micro-batches."""
    pairs = [(unpacked(key(ROWS[name]), halves=True), reference(name)) for name in ROUNDING]
    of_logs = [loss_difference(logged(again, "loss"), logged(expected, "loss")) for again, expected in pairs]
    return max(difference(*pair) for pair in pairs), max(of_logs)


def difference(result: dict, expected: dict) -> float:
    return weight_difference(result["end"], expected["end"], expected["start"], least_change=0.1)


def logged(result: dict, name: str) -> list:
    return [entry.get(name) for entry in result["logged"]]


def check_logs(row: Row, result: dict, expected: dict) -> None:
    names = {name for entry in expected["logged"] for name in entry if name in LOGGED or "/" in name}
    assert {"loss", "entropy", "num_tokens"} <= names
    assert ("aux_loss" in names) is bool(row.given.get("router_aux_loss_coef"))
    assert ("loss/a" in names) is ("source_column" in row.given)
    for name in names:
        ours = logged(result, name)
        theirs = logged(expected, name)
        if name.split("/")[0] in EXACT:
            assert ours == pytest.approx(theirs, rel=1e-6), name  # floats of TRL's that are gathered
        else:
            assert ours == pytest.approx(theirs, rel=max(tolerance(rounding()[1]), 2e-6)), name
    if row.evaluates:
        losses = {name: value for name, value in expected["eval"].items() if "loss" in name}
        assert losses
        assert {name: result["eval"][name] for name in losses} == pytest.approx(losses, rel=2e-6)


@pytest.mark.parametrize("engine, name", PAIRS)
def test_ranks_train_what_trl_trains_unpacked(launch, engine, name):
    runs_here(engine)
    row = ROWS[name]
    result = launch[engine, name]
    expected = reference(name)
    limit = tolerance(rounding()[0]) if row.dtype is torch.float32 else 1e-12
    assert difference(result, expected) <= limit
    check_logs(row, result, expected)


@pytest.mark.parametrize("engine, name", PAIRS)
def test_ranks_train_as_the_row_says(launch, engine, name):
    """Check the engine, the proof on the model as it wraps it, and that packs were shared, repaired or recomputed."""
    runs_here(engine)
    row = ROWS[name]
    result = launch[engine, name]
    if row.code:
        assert result["report"]["first_step"].startswith("not compared with unpacked training: `compute_loss_func`")
    elif result["report"]:  # packed
        compares = engine in ("ddp", "ddp4", "fsdp2", "ep_fsdp")
        gradients = r"\de-\d\d \([a-z ]+ \de-\d\d\) over \d+" if compares else "are held by the engine"
        assert re.match(r"loss .*; gradients " + gradients, result["report"]["first_step"])
    if engine in DIVIDING:
        assert result["divided"] > 0
    else:
        assert result["engine"] == ENGINES[engine]
    degrees = {degree for degree, *_ in result["seen"]}
    assert len(result["seen"]) == NUM_STEPS * row.micro_batches
    if row.shares:
        assert max(degrees) == (2 if name == "parts_stream_shards" else ranks_of(engine))
        assert max(result["proved"], default=0) == (max(degrees) if row.proves else 0)
    else:
        assert degrees == {1}
    isolated, equal, attention = result["proof"] or (True, True, None)
    assert isolated
    assert equal
    assert (result["proof"] is None) is (row.ours.get("packing") is False)
    assert attention in (None, "packfix_varlen") or row.model in ("leaking", "mamba")
    assert (result["offloaded"] > 2 * NUM_STEPS) is (row.model == "yarn")
    if "share_prefixes" in row.ours:
        assert sum(logged(result, "computed_share")) < 0.9 * NUM_STEPS, "hardly anything was shared"
    if "pad_documents_to_multiple_of" in row.ours:
        assert len(result["shapes"]) == len(degrees), "parts of constant shapes have one shape for each degree"
    if name == "images":
        assert any(len(set(has)) == 2 for has in zip(*result["with_images"], strict=True)) or engine != "ddp"
    if name == "parts_llava":  # each image once; a rank without one computes one more, so that all call the tower
        images = NUM_STEPS * sum(map(len, row.documents()["images"]))
        assert images <= result["tiles"] < 1.5 * images


@needs("prefixes")
def test_the_table_mixes_degrees_and_leaves_ranks_without_documents(launch):
    assert {degree for degree, *_ in launch["ddp4", "parts_family"]["seen"]} == {1, 2, 4}
    report = launch["ddp4", "parts_family"]["report"]
    assert report["world_size"] == 4
    assert len(launch["ddp", "parts_sinks"]["shapes"]) > 3
    assert launch["tp_fsdp", "dividing_stream"]["report"]["world_size"] == 2


@pytest.mark.parametrize("engine, name", [(engine, name) for engine, name in PAIRS if ROWS[name].finds])
def test_faults_in_gradients_are_found_under_engines(launch, engine, name):
    """The proof on the wrapped model must find a fault that moves no state, and must leave the engine as it was."""
    runs_here(engine)
    verdicts = launch[engine, name]["verdicts"]
    assert verdicts.pop("changed") == []
    assert verdicts.pop(None) == (0.0, True)
    ((gradient, states_pass),) = verdicts.values()
    assert gradient > 1e-4
    assert states_pass


@pytest.mark.faults
@pytest.mark.parametrize("engine, name, fault", FAULTS)
def test_the_table_sees_faults(planted, engine, name, fault):
    result = planted[engine, f"{name}-{fault}"]
    expected = reference(name)
    if fault in ("counted_twice", "totals_of_one_rank"):
        assert logged(result, "num_tokens") != pytest.approx(logged(expected, "num_tokens"), rel=0.1)
    elif fault == "sources_as_met":  # they are in the log only
        assert logged(result, "trained_tokens/a") != logged(expected, "trained_tokens/a")
    else:
        assert difference(result, expected) > 1e-4 > tolerance(1.0)


def test_an_error_of_one_in_ten_thousand_is_seen():
    assert rounding()[0] > RESOLUTION
    assert tolerance(rounding()[0]) < 1e-4


# Attention, mixers and proofs on parts of packs


def test_parts_give_the_outputs_and_gradients_of_the_whole_pack(launch):
    cases = launch["ddp4", "attention"]["cases"]
    assert len(cases) == 2 * (len(exchange.HEADS) + 2 * len(exchange.FEATURES))
    assert max(cases.values()) < 1e-13, cases


@pytest.mark.parametrize("fault", [*faults.ATTENTION, "compiled"])
def test_faults_of_the_exchange_are_seen(launch, fault):
    assert min(launch["ddp4", "attention"]["faults"][fault]) > 1


def test_a_compiled_exchange_is_the_exchange(launch):
    result = launch["ddp4", "attention"]
    assert result["graphs"] > 0, "nothing was compiled"
    assert max(result["compiled"].values()) < 1e-13, result["compiled"]


def test_groups_are_aligned_neighbours(launch):
    assert launch["ddp4", "attention"]["groups"] == {2: [0, 1], 4: [0, 1, 2, 3]}


@needs("hybrids")
def test_mixers_on_parts_give_the_logits_and_gradients_of_the_whole_pack(launch):
    """The logits and gradients must be the same in fp64."""
    cases = launch["ddp4", "mixers"]
    assert cases.keys() == {*OF_HYBRIDS.MIXED}
    assert all(0 < gap < 1e-13 for gap in cases.values()), cases


@needs("prefixes")
def test_right_models_pass_on_parts_of_packs(launch):
    first, *other_ranks = launch["ddp4", "proofs"]
    assert all(ranks_report == first for ranks_report in other_ranks), "all ranks find the same"
    for key in (*(("whole", n) for n in (2, 4)), *(("shared", n) for n in (2, 4))):
        passes, size, modules = first[key]
        assert passes
        assert size < 1
        assert not modules
    for name in ("images", "shared"):
        for family in exchange.IMAGE_PROOFS:
            assert first["split", name, family], "no image lies in two parts"
            assert first[name, family][0]
            assert 0 < first[name, family][1] < 1


def test_a_model_that_is_right_on_whole_packs_only_is_found(launch):
    result = launch["ddp4", "proofs"][0]
    assert result["shift", 1][0]
    assert result["shift", 2][::2] == (False, ["TokenShift"])
    assert result["bloom"] == "attention 'eager' does not exchange tokens; 'packfix_varlen' does."


@pytest.mark.faults
@needs("prefixes")
@needs("images")
def test_the_proof_on_parts_finds_faults_and_places_them(planted):
    first, *other_ranks = planted["ddp", "faults_of_proofs"]
    assert all(ranks_report == first for ranks_report in other_ranks)
    assert len(first) == 12
    for (content, fault), (passes, size, modules) in first.items():
        # text alone does not show faults of images, nor documents that share nothing one of prefixes
        assert passes is (content in ("text", "unseen")), (content, fault)
        assert (size > 100) is not passes, (content, fault)
        if content == "whole":
            assert modules
            assert all("Attention" in module for module in modules)


@pytest.mark.faults
@needs("hybrids")
def test_the_proof_on_parts_finds_faults_of_mixers(planted):
    """Halos that send no gradient back move no state: only the gradient of a document shows the fault."""
    verdicts = planted["ddp", "faults_of_mixers"]
    assert len(verdicts) == sum(map(len, OF_HYBRIDS.PLANTED_IN_MIXERS.values()))
    for (kind, fault), (is_right, message) in verdicts.items():
        assert not is_right, (kind, fault)
        assert fault != "no_gradient" or "gradients of documents are not what they are alone" in message
