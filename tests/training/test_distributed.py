"""What a comparison of weights does not show, on real ranks: which rank trains what, restarts, evaluation, the probe.

`ranks/scenarios.py` and `ranks/restarts.py` hold the scenarios; `test_on_ranks.py` compares the weights.
"""

import importlib.util
import re
import shutil
import sys
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
import torch
from ranks import restarts, scenarios
from ranks.__main__ import RESTARTS, WHOLE
from ranks.engines import ENGINES, SHARDED
from ranks.scenarios import NUM_DOCUMENTS, NUM_EVALUATED
from ranks.table import ROWS
from ranks.training import make_trainer, save_model
from support.features import PRESENT
from support.launch import Launch
from support.rounding import tolerance, weight_difference
from transformers import AutoModelForCausalLM

from trl_packfix.training.checkpoints import STATE_FILE, find_damage

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo"),
    pytest.mark.processes,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    save_model(folder, "llama")
    return folder


@pytest.fixture(scope="module")
def launch(folder) -> Launch:
    return Launch(folder, "log", [sys.executable, "-m", "ranks", str(folder), "whole"])


@pytest.fixture
def result(engine, launch):
    """`result(scenario)` is what the engine of this test found."""
    if engine in SHARDED and not importlib.util.find_spec("deepspeed"):
        pytest.skip("deepspeed is not installed (pip install trl_packfix[deepspeed])")

    def result_of(scenario: str) -> dict:
        result_of_engine = launch[engine, scenario]
        assert result_of_engine["engine"] == ENGINES[engine]
        return result_of_engine

    return result_of


on_whole_engines = pytest.mark.parametrize("engine", WHOLE)
on_ddp = pytest.mark.parametrize("engine", ["ddp"])


def count(batches: list[list[list[int]]]) -> Counter[int]:
    """Count how often each document was trained, over all ranks and micro-batches."""
    return Counter(chain.from_iterable(chain.from_iterable(batches)))


def step_documents(result: dict, accumulation: int = 2) -> list[list[int]]:
    """Return the documents of every optimizer step, over all ranks."""
    steps = range(0, len(result["seen"][0]), accumulation)
    return [sorted(chain.from_iterable(chain(*(rank[i : i + accumulation] for rank in result["seen"])))) for i in steps]


# Which rank trains what


@pytest.mark.parametrize("strategy, num_ranks", [("stream", 1), ("minibatch", 1), ("bfd", 1), ("stream", 2)])
def test_drop_last_leaves_out_the_incomplete_step_and_counts_it(strategy, num_ranks, request, folder):
    if num_ranks == 1:
        result_of_engine = scenarios.drop_last(folder, packing_strategy=strategy, gradient_accumulation_steps=4)
    else:
        result_of_engine = request.getfixturevalue("launch")["ddp", "drop_last"]
    unbroken = result_of_engine["whole"]
    report = result_of_engine["report"]
    assert result_of_engine["world_size"] == num_ranks
    assert result_of_engine["num_steps"] == report["num_steps"] == unbroken["num_steps"] - 1
    accumulation = 4 // num_ranks
    *expected, last = step_documents(unbroken, accumulation)
    steps = step_documents(result_of_engine, accumulation)
    assert steps == expected
    assert len(result_of_engine["seen"][0]) == accumulation * len(steps)
    assert unbroken["report"]["documents_not_reached"] == 0 < len(last) < len(steps[0])
    if strategy == "minibatch":
        assert {len(step) for step in steps} == {8}
    # What is counted: tokens are the letters of a document and one more, of which the first is no target
    documents = list(chain(*steps))
    assert sorted(documents + last) == list(range(NUM_DOCUMENTS))
    tokens = [len(text) + 1 for text in scenarios.documents(NUM_DOCUMENTS)["text"]]
    assert result_of_engine["num_tokens"][-1] == sum(tokens[i] for i in documents)
    assert report["documents_not_reached"] == len(last)
    assert report["tokens_not_reached"] == sum(tokens[i] for i in last)
    assert report["trained_tokens_not_reached"] == sum(tokens[i] - 1 for i in last)


# bf16


@pytest.mark.parametrize("engine", ["fsdp2"])
def test_in_bf16_two_ranks_find_the_same_leak(result, engine):
    """It is below the rounding of the whole model, and each rank looks for it module by module."""
    outcome = result("repaired_in_bf16")
    assert outcome["proof"] == (True, True)
    assert outcome["repaired"] == ["BloomAttention"]


@pytest.mark.parametrize("engine", ["fsdp2"])
def test_ranks_that_round_otherwise_run_the_same_forwards(result, engine):
    """Under FSDP a forward that another rank does not run waits for it for ever."""
    first, second = result("rounded")["verdicts"]
    assert first[1] > 0 == second[1]
    assert first[0] is second[0] is False
    assert first[2] == second[2] == ["BloomAttention"]


# The probe


@on_whole_engines
def test_the_probe_leaves_the_engine_as_it_was(result, engine):
    outcome = result("probed")
    changed = outcome["changed"]
    counts = outcome["counts"]
    assert changed["first probe"] == changed["second probe"] == changed["probe after the step"] == [[], []]
    # What shows that the state is looked at: an optimizer step changes it
    touched = {"parameters", "optimizer"} | ({"counters"} if engine == "zero3" else set())
    assert all(touched <= set(rank) for rank in changed["step"])
    assert all(counts[name] > 20 for name in ("parameters", "placement", "modes", "hooks"))
    assert counts["shards"] >= counts["parameters"] if engine == "fsdp2" else not counts["shards"]


# Evaluation


@pytest.mark.parametrize(
    "engine, scenario", [("ddp", "minibatch_trained"), ("ddp", "evaluate_first"), ("zero3", "evaluate_first")]
)
def test_evaluation_on_two_ranks_equals_one(launch, engine, scenario, folder):
    if engine == "zero3":
        pytest.importorskip("deepspeed")
    # the same documents per step on any number of ranks
    settings = {"packing_strategy": "minibatch", "gradient_accumulation_steps": 4}
    one = scenarios.evaluation(folder, None, trains=scenario == "minibatch_trained", **settings)
    results = launch[engine, scenario]["evaluation"]
    expected = one["evaluation"]["packed"]
    for kind in ("packed", "padded", "metric"):
        assert results[kind] == pytest.approx(expected, rel=1e-5), kind
    assert results["rows"] == results["predicted"] == list(range(NUM_EVALUATED))


@on_ddp
@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_training_after_an_evaluation_is_training(result, kind):
    """accelerate does not wrap a model that it has prepared for evaluation, and its ranks would train apart."""
    outcome = result(f"{kind}_evaluated")
    expected = result(f"{kind}_trained")
    first, second = outcome["norms"]
    assert first == second
    assert len(first) > 10
    assert outcome["losses"] == expected["losses"]
    assert len(outcome["losses"]) == 2
    assert torch.equal(outcome["weights"], expected["weights"])


@pytest.mark.parametrize("engine", ["tp", "tp_fsdp"])
def test_each_row_is_predicted_once(launch, engine, folder):
    """Ranks that divide a model must predict each row once."""
    predictions = launch[engine, "predicted"]["predicted"]
    expected = scenarios.predicted(folder, None)["predicted"]
    assert len(expected) == 19
    assert predictions.shape == expected.shape
    real = expected != -100
    assert (predictions - expected)[real].abs().max() < 1e-4 * expected[real].abs().max()


# What is refused

ANOTHER_PACK = r"Rank 0 has read a part of a pack of \d+ tokens, and rank 1 .*another pack.*Give all ranks the same"
OTHER_DOCUMENTS = r"The training set has \d+ documents of .* on rank 0, and \d+ documents .* on rank 1.*a seed"
LATER_ROWS = r"After 2 optimizer steps, rank 1 has read other documents of the stream than rank 0.*a seed"
REFUSED = [
    ("ddp", "other_packs", 0, OTHER_DOCUMENTS),
    ("ddp", "other_rows", 0, OTHER_DOCUMENTS),
    ("ddp", "later_rows", 2, LATER_ROWS),
    ("ddp", "other_second_pass", 1, ANOTHER_PACK),
    ("ddp4", "own_shards", 0, ANOTHER_PACK),
    ("ddp", "other_stream", 0, "with another row on 1 of 2 ranks.*`seed`"),
    ("tp", "other_packs", 0, OTHER_DOCUMENTS),
    ("tp", "odd", None, r"`per_device_eval_batch_size=3` was given.*over 2 ranks.*multiple of 2"),
    ("tp", "inputs", None, r"`include_for_metrics=\['inputs'\]` was given.*2 times\. Leave"),
    ("tp", "restart", None, "Resuming is not supported for models sharded at load time"),  # by transformers
]
REFUSED += [("ddp", "other_images", 0, ANOTHER_PACK)] if {"images", "prefixes"} <= PRESENT else []


@pytest.mark.parametrize("engine, name, step, message", REFUSED, ids=[f"{row[0]}-{row[1]}" for row in REFUSED])
def test_what_cannot_work_is_refused_on_all_ranks(launch, engine, name, step, message):
    outcome = launch[engine, name]
    assert step is None or outcome["step"] == step
    assert all(re.search(message, text) for text in outcome["messages"]), outcome["messages"]


# Restart


@pytest.mark.parametrize(
    "engine, name", [*((e, f"restart_{e}") for e in WHOLE), ("ddp", "restart_workers"), ("ddp", "restart_minibatch")]
)
def test_every_document_once_per_epoch_and_a_restart_in_the_second_is_exact(result, engine, name):
    outcome = result(name)
    unbroken = outcome["whole"]
    stop = outcome["stop"]
    per_epoch = outcome["per_epoch"]
    assert outcome["engine"] == unbroken["engine"]
    assert per_epoch < stop < 2 * per_epoch
    assert outcome["synchronisation"] == ("step" if engine == "ddp" else "micro")
    epochs = [[rank[i * 2 * per_epoch :][: 2 * per_epoch] for rank in unbroken["seen"]] for i in range(3)]
    assert all(count(epoch) == dict.fromkeys(range(60), 1) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert max(map(len, chain(*epochs[0]))) > 2, "nothing was packed"
    assert unbroken["num_steps"] == outcome["num_steps"] == 3 * per_epoch
    assert outcome["seen"] == [micro_batches[stop * 2 :] for micro_batches in unbroken["seen"]]
    assert outcome["losses"] == unbroken["losses"]
    assert outcome["num_tokens"] == unbroken["num_tokens"]
    gap = (outcome["weights"] - unbroken["weights"]).norm() / outcome["weights"].norm()
    assert gap == 0 if engine == "ddp" else gap < 1e-6
    saved = AutoModelForCausalLM.from_pretrained(outcome["saved"])
    assert torch.equal(torch.cat([p.detach().double().flatten() for p in saved.parameters()]), outcome["weights"])


@pytest.mark.parametrize("name, engine", RESTARTS.items())
def test_a_restart_of_a_row_of_the_table_is_exact(launch, engine, name):
    """Rows with parts of packs, streams and images must continue exactly."""
    outcome = launch[engine, f"restart_{name}"]
    assert torch.equal(*outcome["weights"])
    unbroken, resumed = outcome["tokens"]
    assert resumed == unbroken
    assert len(unbroken) == 6
    unbroken, resumed = outcome["seen"]
    assert resumed == unbroken[-len(resumed) :]
    assert len(unbroken) == 3 * len(resumed)
    unbroken, resumed = outcome["reports"]
    assert resumed["ledger"] == unbroken["ledger"]
    assert resumed["shared"] == unbroken["shared"]
    if name.startswith("parts"):  # compared once more: a table in two steps, a stream in all
        is_stream = "stream" in name
        assert outcome["steps_to_compare"] == (6 - 2 if is_stream else 0)  # it has trained two
        if is_stream:  # what a group has read is counted once
            assert unbroken["num_tokens"] == resumed["num_tokens"] == outcome["tokens"][0][-1]


@on_ddp
@pytest.mark.parametrize("strategy", ["minibatch", "stream"])
def test_a_run_of_two_ranks_continues_on_one(result, folder, strategy):
    outcome = result("restart_minibatch" if strategy == "minibatch" else "restart_ddp")
    settings = {"num": 60, "gradient_accumulation_steps": 4, "packing_strategy": strategy}
    ends = []
    for cls in (scenarios.Numbered, scenarios.Reversed):
        one = scenarios.make(folder, None, cls, **restarts.THREE_EPOCHS | settings)
        one.train(outcome["checkpoint"])
        assert (
            step_documents({"seen": [one.seen]}, accumulation=4) == step_documents(outcome["whole"])[outcome["stop"] :]
        )
        ends.append(scenarios.weights_of(one))
    start_weights = torch.zeros_like(ends[0])
    rounding = weight_difference(ends[1], ends[0], start_weights)
    assert weight_difference(ends[0], outcome["whole"]["weights"], start_weights) <= tolerance(rounding)
    # in other steps every document is trained once in each epoch, too
    one = scenarios.make(folder, **restarts.THREE_EPOCHS | settings | {"gradient_accumulation_steps": 3})
    one.train(outcome["checkpoint"])
    before = step_documents(outcome["whole"])[: outcome["stop"]]
    assert len(one.seen) % 3 == 0
    assert count([before, one.seen]) == dict.fromkeys(range(60), 3)


def test_a_stream_of_two_ranks_continues_on_one(launch, folder, caplog):
    """Steps of this stream each have 12 documents."""
    assert launch["ddp", "restart_images_stream"]
    settings = {"max_steps": 6, "optim": "adamw_torch"}
    one = make_trainer(folder, ROWS["images_stream"], **settings)
    one.train(str(folder / "restart_images_stream" / "whole" / "checkpoint-4"))
    assert "Resuming a stream of 2 ranks on 1" in caplog.text
    assert one.state.global_step == 6
    assert one.packing_report.num_documents == 6 * 12


@pytest.mark.parametrize("engine", ["zero3"])
def test_the_checkpoint_of_another_engine_is_refused(result, folder):
    """Refuse it, because the Trainer would not find the optimizer state, and would not say so."""
    outcome = result("restart_zero3")
    one = scenarios.make(folder, num=60, gradient_accumulation_steps=4, **restarts.THREE_EPOCHS)
    with pytest.raises(ValueError, match="`engine` was 'deepspeed' and is 'none'"):
        one.train(outcome["checkpoint"])


@on_whole_engines
def test_every_file_of_every_rank_is_vouched_for(result, engine, tmp_path):
    """A shard that is missing or cut is reported and not loaded, whichever rank wrote it."""
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(result(f"restart_{engine}")["checkpoint"], checkpoint)
    assert find_damage(checkpoint) is None
    files = [file for file in checkpoint.rglob("*") if file.is_file() and file.name != STATE_FILE]
    names = {str(file.relative_to(checkpoint)) for file in files}
    assert {"rng_state_0.pth", "rng_state_1.pth", "scheduler.pt", "trainer_state.json"} <= names
    shards = [name for name in names if "rank_" in name or name.endswith(".distcp")]
    assert len(shards) == (0 if engine == "ddp" else 4)  # of weights and optimizer, by each rank
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
        assert file.name in find_damage(checkpoint)
        file.unlink()
        assert file.name in find_damage(checkpoint)
        file.write_bytes(content)
    assert find_damage(checkpoint) is None
