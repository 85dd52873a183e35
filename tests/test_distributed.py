"""The trainer on two real ranks (gloo, CPU), under DDP and DeepSpeed ZeRO-3: whole, equal to one process, restartable.

`two_ranks.py` holds the scenarios. Each engine is launched once, for all of them.
"""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
import torch
import two_ranks
from conftest import build_tiny_model
from peft import PeftModel
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parent.parent
LAUNCH_SECONDS = 300  # an engine's scenarios take 30 to 90; a hang inside one is an error after `ddp_timeout`
ENGINES = {"ddp": "DistributedDataParallel", "zero3": "DeepSpeedEngine"}
NUM_DOCUMENTS = 97

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")


class Launch:
    """The results of one process pair, by scenario."""

    def __init__(self, engine: str, folder: Path, command: list[str], **env: str):
        self.engine = engine
        self.folder = folder
        (folder / engine).mkdir()
        # One thread each: two ranks that take every core wait for each other. No GPU: gloo and the CPU are meant.
        settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        settings |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        self.log = folder / f"{engine}.log"
        command = [sys.executable, *command, str(ROOT / "tests" / "two_ranks.py"), engine, str(folder)]
        with self.log.open("w") as log:
            process = subprocess.Popen(
                command, cwd=folder, env=os.environ | settings | env, stdout=log, stderr=log, start_new_session=True
            )
            try:
                process.wait(LAUNCH_SECONDS)
            except subprocess.TimeoutExpired:
                log.write(f"\nkilled after {LAUNCH_SECONDS} s\n")
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # the launcher and its ranks
                    process.wait()

    def __getitem__(self, name: str) -> dict:
        file = self.folder / self.engine / f"{name}.pt"
        if not file.is_file():
            pytest.fail(f"{self.engine}: {name} did not end. The log ends with:\n{self.log.read_text()[-6000:]}")
        result = torch.load(file)
        assert (result["world_size"], result["process_group"]) == (2, 2)
        assert len(result["seen"]) == 2
        return result


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two_ranks")
    build_tiny_model().save_pretrained(folder / "model")
    build_tiny_model(tie_word_embeddings=True).save_pretrained(folder / "tied")
    return folder


@pytest.fixture(scope="module")
def ddp(folder) -> Launch:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    return Launch("ddp", folder, torchrun)


@pytest.fixture(scope="module")
def zero3(folder) -> Launch:
    if not importlib.util.find_spec("deepspeed"):
        pytest.skip("deepspeed is not installed (pip install trl_packfix[deepspeed])")
    config = json.loads((ROOT / "deepspeed_configs" / "zero3.json").read_text())
    config["zero_optimization"]["overlap_comm"] = False  # wants streams, which a CPU has not
    (folder / "zero3.json").write_text(json.dumps(config))
    # `--deepspeed zero3.json` makes accelerate count one process where there is no GPU; the environment does not.
    return Launch(
        "zero3",
        folder,
        ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", free_port()],
        ACCELERATE_USE_DEEPSPEED="true",
        ACCELERATE_DEEPSPEED_CONFIG_FILE=str(folder / "zero3.json"),
        DS_ACCELERATOR="cpu",
        TORCH_EXTENSIONS_DIR=str(folder / "extensions"),
    )


@pytest.fixture(params=["ddp", "zero3"])
def launch(request) -> Launch:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def one_process(folder) -> dict[str, dict]:
    """The five steps on one rank: the same 8 documents in each, as 4 x 2 and not as 2 x 2 on 2 ranks."""
    results = {"evaluate_first": two_ranks.evaluate_first(folder)}
    by_document = {"per_device_train_batch_size": 4} | two_ranks.BY_DOCUMENT
    results["packed_document"] = two_ranks.five_steps(folder, "one/packed_document", **by_document)
    for kind, settings in two_ranks.KINDS.items():
        settings = {"per_device_train_batch_size": 4} | settings
        results[f"unpacked_{kind}"] = two_ranks.five_steps_unpacked(folder, f"one/unpacked_{kind}", **settings)
        results[f"packed_{kind}"] = two_ranks.five_steps(folder, f"one/packed_{kind}", **settings)
    assert all(result["world_size"] == 1 for result in results.values())
    return results


def count(seen: list[list[list[int]]]) -> Counter[int]:
    """How often each document was trained, over all ranks and micro-batches."""
    return Counter(chain.from_iterable(chain.from_iterable(seen)))


def epochs_of(result: dict, num_epochs: int = 2) -> list[list[list[list[int]]]]:
    """`seen` of each epoch; all ranks and epochs have the same number of micro-batches."""
    (total,) = {len(micro_batches) for micro_batches in result["seen"]}
    length, rest = divmod(total, num_epochs)
    assert rest == 0
    return [[rank[epoch * length : (epoch + 1) * length] for rank in result["seen"]] for epoch in range(num_epochs)]


def step_documents(result: dict, accumulation: int = 2) -> list[list[int]]:
    """The documents of every optimizer step, over all ranks."""
    steps = range(0, len(result["seen"][0]), accumulation)
    return [sorted(chain.from_iterable(chain(*(rank[i : i + accumulation] for rank in result["seen"])))) for i in steps]


def saved_weights(folder: Path, name: str) -> torch.Tensor:
    """All parameters of a saved model, as plain transformers and peft load it."""
    file = folder / name
    if (file / "adapter_config.json").is_file():
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "model"), file)
    else:
        model = AutoModelForCausalLM.from_pretrained(file)
    return torch.cat([p.detach().double().flatten() for _, p in sorted(model.named_parameters())])


def relative_difference(folder: Path, name: str, reference: str, start: str) -> float:
    """Of the change of the weights, in the Euclidean norm."""
    weights, expected, before = (saved_weights(folder, n) for n in (name, reference, start))
    change = (expected - before).norm()
    assert change > 0.1, "nothing was trained, so nothing is compared"
    return ((weights - expected).norm() / change).item()


# Whole


@pytest.mark.parametrize("strategy", two_ranks.STRATEGIES)
def test_every_document_once_per_epoch(launch, strategy):
    result = launch[f"epochs_{strategy}"]
    assert result["engine"] == ENGINES[launch.engine]
    assert result["synchronisation"] == ("step" if launch.engine == "ddp" else "micro")
    first, second = epochs_of(result)
    for epoch in (first, second):
        assert count(epoch) == Counter(range(NUM_DOCUMENTS))
        assert max(map(len, chain(*epoch))) > 2, "nothing was packed"
    assert first != second
    assert result["num_steps"] * 2 == len(result["seen"][0])


def test_stock_trl_repeats_documents(ddp):
    """The witness of the test above: padded to even out its ranks, TRL trains 100 documents for 97."""
    result = ddp["epochs_stock"]
    assert result["engine"] == ENGINES["ddp"]
    for epoch in epochs_of(result):
        seen = count(epoch)
        assert set(seen) == set(range(NUM_DOCUMENTS))
        assert seen.total() == 100 and sorted(seen.values())[-4:] == [1, 2, 2, 2]


@pytest.mark.parametrize("strategy", two_ranks.STRATEGIES)
def test_fewer_documents_than_ranks_times_accumulation(launch, strategy):
    result = launch[f"few_{strategy}"]
    assert result["engine"] == ENGINES[launch.engine]
    assert result["num_steps"] == 2 and len(result["seen"][0]) == 2 * 4
    for epoch in epochs_of(result):
        assert count(epoch) == Counter(range(3))
        assert [] in chain(*epoch), "no rank was ever empty"
    assert all(0 < loss < 10 for loss in result["losses"])


# Equal to one process


def test_isolation_is_proved_on_the_model_as_the_engine_wraps_it(launch):
    """The probe calls the LM head and fused steps after it do not: ZeRO-3, which prefetches, has to know of both."""
    for name in ("epochs_stream", *(f"five_{kind}" for kind in two_ranks.KINDS)):
        assert launch[name]["isolation"] == (True, True, "packfix_varlen")


@pytest.mark.parametrize("kind", two_ranks.KINDS)
def test_packed_on_two_ranks_equals_unpacked_on_one(launch, one_process, folder, kind):
    result, expected = launch[f"five_{kind}"], one_process[f"unpacked_{kind}"]
    assert result["engine"] == ENGINES[launch.engine]
    assert step_documents(result) == step_documents(expected)
    assert [len(step) for step in step_documents(result)] == [8, 8, 8, 8, 5]
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    name, unpacked = f"{launch.engine}/five_{kind}", f"one/unpacked_{kind}"
    assert relative_difference(folder, name, unpacked, start=f"{unpacked}/start") < 1e-5


def test_document_weights_on_two_ranks_equal_one(launch, one_process, folder):
    result, expected = launch["five_document"], one_process["packed_document"]
    assert step_documents(result) == step_documents(expected)
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert relative_difference(folder, f"{launch.engine}/five_document", "one/packed_document", start="model") < 1e-5
    by_token = relative_difference(folder, f"{launch.engine}/five_document", "one/packed_full", start="model")
    assert by_token > 1e-2, "the weights make no difference here"


@pytest.mark.parametrize("kind", [*two_ranks.KINDS, "document"])
def test_what_two_ranks_log_is_what_one_logs(launch, one_process, kind):
    result, expected = launch[f"five_{kind}"], one_process[f"packed_{kind}"]
    assert result["num_tokens"] == expected["num_tokens"] and len(result["logged"]) == 5
    for ours, theirs in zip(result["logged"], expected["logged"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("kind", two_ranks.KINDS)
def test_evaluation_on_two_ranks_equals_one(launch, one_process, kind):
    results, expected = launch[f"five_{kind}"]["evaluation"], one_process[f"packed_{kind}"]["evaluation"]
    check_evaluation(results, expected["packed"])
    assert expected["packed"]["mean_token_accuracy"] > 0.1, "a model that knows nothing cannot tell"


def test_evaluation_before_training(launch, one_process):
    results, expected = launch["evaluate_first"]["evaluation"], one_process["evaluate_first"]["evaluation"]
    check_evaluation(results, expected["packed"])


def check_evaluation(results: dict, expected: dict) -> None:
    for way in ("packed", "padded", "metric"):
        assert results[way] == pytest.approx(expected, rel=1e-6), way
    assert results["rows"] == results["predicted"] == list(range(two_ranks.NUM_EVALUATED))


# Restart


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("strategy", two_ranks.STRATEGIES)
def test_restart_in_the_middle_of_epoch_two_is_exact(ddp, folder, strategy, workers):
    check_restart(ddp, f"restart_{strategy}_{workers}")
    whole, resumed = (saved_weights(folder, f"ddp/restart_{strategy}_{workers}/{run}") for run in ("whole", "resumed"))
    assert torch.equal(whole, resumed)


def test_restart_under_zero3(zero3, folder):
    check_restart(zero3, "restart_stream_2")
    run = "zero3/restart_stream_2"
    assert relative_difference(folder, f"{run}/resumed", f"{run}/whole", start="model") < 1e-6


def check_restart(launch: Launch, name: str) -> None:
    resumed = launch[name]
    whole, stop, per_epoch = resumed["whole"], resumed["stop"], resumed["per_epoch"]
    assert resumed["engine"] == whole["engine"] == ENGINES[launch.engine]
    assert per_epoch < stop < 2 * per_epoch, "not in the middle of epoch two"
    assert whole["num_steps"] == resumed["num_steps"] == 3 * per_epoch
    assert resumed["seen"] == [micro_batches[stop * 2 :] for micro_batches in whole["seen"]]
    assert resumed["losses"] == whole["losses"]
