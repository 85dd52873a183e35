"""Models that several ranks divide, on 2 and 4 real ranks (gloo, CPU): what they train is what one process trains.

`model_parallel.py` holds the scenarios, and one process forks the ranks of all launches.
"""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import model_parallel
import pytest
import torch
import transformers
from packaging.version import Version
from support.launch import Launch
from support.rounding import loss_difference, tolerance

from trl_packfix.training.data_ranks import DataRanks

ROOT = Path(__file__).parents[2]

on_ranks = pytest.mark.processes
pytestmark = pytest.mark.skipif(
    not torch.distributed.is_gloo_available() or Version(transformers.__version__) < Version("5.23"),
    reason="this torch has no gloo, or this transformers divides models in another way",
)


@pytest.fixture(scope="module")
def launch(tmp_path_factory) -> Launch:
    folder = tmp_path_factory.mktemp("model_parallel")
    return Launch(folder, "log", [sys.executable, str(ROOT / "tests" / "model_parallel.py"), str(folder)])


def difference(found: dict, expected: dict) -> float:
    """Of the weights after training, relative to their change since the start."""
    assert torch.equal(found["start"], expected["start"])
    change = (expected["end"] - expected["start"]).norm()
    assert change > 0.05, "nothing was trained, so nothing is compared"
    return ((found["end"] - expected["end"]).norm() / change).item()


def logged(result: dict, name: str) -> list[float]:
    return [entry[name] for entry in result["logged"]]


@on_ranks
@pytest.mark.parametrize(
    "engine, kind",
    [
        (engine, kind)
        for engine, kinds in model_parallel.OF_ENGINES.items()
        for kind in kinds
        if (engine, kind) != ("tp_fsdp", "stream")  # the two data ranks read shards of their own
    ],
)
def test_ranks_that_divide_a_model_train_what_one_process_trains(launch, engine, kind):
    found, expected, again = launch[engine, kind], launch["one", kind], launch["one", f"{kind}_reversed"]
    assert found["divided"] > 0 and found["tp_size"] == model_parallel.ENGINES[engine].get("tp_size", 1)
    assert difference(found, expected) <= tolerance(difference(again, expected))
    for name in model_parallel.LOGGED:
        ours, theirs, reversed_ = (
            [value or 1.0 for value in logged(result, name)] for result in (found, expected, again)
        )
        if name in ("num_tokens", "trained_tokens", "documents_per_step"):
            assert ours == theirs, name
        else:
            assert loss_difference(ours, theirs) <= tolerance(loss_difference(reversed_, theirs)), name
    assert (logged(found, "loss/a")[0] is not None) is (kind == "weighted")
    assert bool(logged(found, "aux_loss")[0]) is (kind == "routed")
    assert found["eval"]["eval_loss"] == pytest.approx(expected["eval"]["eval_loss"], rel=1e-5)
    if kind != "unpacked":
        assert found["proof"] == expected["proof"] and found["proof"][:2] == (True, True)


@on_ranks
def test_what_is_reported_is_counted_once(launch):
    for kind in ("full", "stream"):
        found, expected = launch["tp", kind]["report"], launch["one", kind]["report"]
        for name in ("ledger", "num_tokens", "num_packs", "efficiency", "world_size"):
            assert name not in expected or found[name] == expected[name], (kind, name)
    found, expected = launch["tp", "weighted"]["eval"], launch["one", "weighted"]["eval"]
    names = [name for name in expected if "trained_tokens/" in name]
    assert len(names) == 2 and all(found[name] == expected[name] for name in names)
    assert launch["tp_fsdp", "full"]["report"]["world_size"] == 2
    found = launch["tp_fsdp", "stream"]
    assert found["report"]["num_tokens"] == logged(found, "num_tokens")[-1] > 0


@on_ranks
@pytest.mark.parametrize("engine", ["tp", "tp_fsdp"])
def test_each_row_is_predicted_once(launch, engine):
    found, expected = launch[engine, "full"]["predicted"], launch["one", "full"]["predicted"]
    assert len(expected) == model_parallel.NUM_EVALUATED and found.shape == expected.shape
    real = expected != -100
    assert (found - expected)[real].abs().max() < 1e-4 * expected[real].abs().max()


@on_ranks
@pytest.mark.parametrize("fault", model_parallel.FAULTS)
def test_the_comparison_sees_faults(launch, fault):
    found, expected = launch["tp", fault], launch["one", model_parallel.PLANTED_IN[fault]]
    if fault == "counted_twice":
        assert logged(found, "num_tokens") == [2 * count for count in logged(expected, "num_tokens")]
    else:
        assert difference(found, expected) > 1e-3


@on_ranks
def test_another_pack_on_a_rank_of_the_group_is_refused(launch):
    found = launch["tp", "other_packs"]
    pattern = r"Rank 0 has read a pack of \d+ tokens, and rank 1 another pack.*2 ranks that divide.*Give all ranks the"
    assert found["step"] == 0 and all(re.search(pattern, message) for message in found["messages"])


@on_ranks
def test_what_cannot_work_is_refused(launch):
    found = launch["tp", "refusals"]
    assert re.search(
        r"`DistributedConfig\(tp_size=2\)` was given with `tokens_per_rank=32`.*must hold the same tokens.*Load",
        found["tokens_per_rank"],
    )
    assert re.search(r"`per_device_eval_batch_size=3` was given.*over 2 ranks.*multiple of 2", found["odd"])
    assert re.search(r"`include_for_metrics=\['inputs'\]` was given.*2 times\. Leave", found["inputs"])
    assert "Resuming is not supported for models sharded at load time" in found["restart"]  # by transformers


@pytest.mark.parametrize("rank, expected", [(0, (0, 2, 2, 0)), (1, (0, 2, 2, 1)), (2, (1, 2, 2, 0)), (3, (1, 2, 2, 1))])
def test_neighbours_are_one_data_rank(rank, expected):
    args = SimpleNamespace(process_index=rank, world_size=4)
    assert DataRanks.of(SimpleNamespace(args=args, get_tp_size=lambda: 2)) == DataRanks(*expected)
