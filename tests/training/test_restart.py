"""Restarts on one process: exact or refused, from whole checkpoints only. Those on two ranks: test_distributed.py."""

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.runs import build_trainer, texts, weights

from trl_packfix.training import checkpoints, restart
from trl_packfix.training.checkpoints import STATE_FILE, TRAINED_FILE, choose_checkpoint, find_damage, note_times
from trl_packfix.training.table_source import SAMPLE_LABEL, continue_planner

pytestmark = pytest.mark.slow

SOURCES = texts(60).add_column("source", ["a", "b"] * 30)
STEPS = {"num_train_epochs": 3, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}


def saved(folder, dataset=None, save_steps=5, **settings):
    """Return a run of three epochs with checkpoints, of which the second is in the middle of epoch two."""
    settings = STEPS | {"save_strategy": "steps", "save_steps": save_steps} | settings
    trainer = build_trainer(folder, dataset or texts(60), **settings)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    trained = saved(tmp_path_factory.mktemp("restart"), include_num_input_tokens_seen="all")
    per_epoch = trained.state.max_steps // 3
    assert per_epoch < 10 < 2 * per_epoch, "checkpoint-10 is not in the middle of epoch two"
    return trained


@pytest.fixture
def folder(trainer, tmp_path) -> Path:
    """Return a copy of the run's folder, with the checkpoints 5, 10 and 15, that a test may damage."""
    shutil.copytree(trainer.args.output_dir, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint-2*"))
    return tmp_path / "run"


def resume(folder, checkpoint, dataset=None, trainer_kwargs=None, **settings):
    again = build_trainer(folder, dataset or texts(60), trainer_kwargs=trainer_kwargs, **STEPS | settings)
    again.train(resume_from_checkpoint=checkpoint if checkpoint is True else str(folder / checkpoint))
    return again


# What continues


def logged(trainer, name):
    return {entry["step"]: entry[name] for entry in trainer.state.log_history if name in entry}


def test_token_counts_continue(trainer, folder):
    again = resume(folder, "checkpoint-10", include_num_input_tokens_seen="all")
    assert torch.equal(weights(again), weights(trainer))
    for name in ("num_tokens", "num_input_tokens_seen"):
        unbroken = logged(trainer, name)
        resumed = logged(again, name)
        assert resumed == unbroken
        assert unbroken[11] > unbroken[10] > 0
    state = json.loads((folder / "checkpoint-10" / STATE_FILE).read_text())
    assert state["num_tokens"] == logged(trainer, "num_tokens")[10]


def test_more_epochs_may_be_trained(trainer, folder):
    again = resume(folder, "checkpoint-10", num_train_epochs=4)
    assert again.state.global_step == again.state.max_steps == trainer.state.max_steps // 3 * 4


def test_true_means_the_newest_whole_checkpoint(trainer, folder, caplog):
    (folder / "checkpoint-15" / "model.safetensors").write_bytes(b"half")
    again = resume(folder, True)
    assert again.restart.resumed[0] == str(folder / "checkpoint-10")
    assert torch.equal(weights(again), weights(trainer))
    assert "checkpoint-15 is skipped, because its file `model.safetensors` has 4 bytes of" in caplog.text


def test_newest_begins_where_there_is_no_whole_checkpoint(tmp_path, caplog):
    """For job scripts: the same command starts a run and continues it."""
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    first = build_trainer(tmp_path, texts(40), **settings)
    first.train(resume_from_checkpoint="newest")
    assert first.restart.resumed is None
    assert first.state.global_step == 4
    again = build_trainer(tmp_path, texts(40), **settings | {"max_steps": 6})
    again.train(resume_from_checkpoint="newest")
    assert again.restart.resumed[0].endswith("checkpoint-4")
    assert again.state.global_step == 6
    for name in ("checkpoint-2", "checkpoint-4", "checkpoint-6"):
        (tmp_path / name / "trainer_state.json").unlink()
    anew = build_trainer(tmp_path, texts(40), **settings)
    anew.train(resume_from_checkpoint="newest")
    assert anew.restart.resumed is None
    assert "Starting anew: checkpoint-6 is skipped" in caplog.text


def test_the_rest_of_an_epoch_is_planned_anew_for_other_settings(trainer, folder, caplog):
    again = resume(folder, "checkpoint-10", gradient_accumulation_steps=1, include_num_input_tokens_seen="all")
    planner = again.data.source.planner
    total = again.state.max_steps
    before = trainer.state.max_steps // 3
    epochs, rates, tokens = (logged(again, name) for name in ("epoch", "learning_rate", "num_tokens"))
    assert planner.num_steps > before
    assert planner.steps_of(1) > before
    assert again.state.global_step == total == before + planner.steps_of(1) + planner.num_steps
    later = [epochs[step] for step in range(11, total + 1)]
    assert later == sorted(later)
    assert epochs[before + planner.steps_of(1)] == 2
    assert epochs[total] == 3
    assert rates[total] == pytest.approx(1e-2 / total)
    assert rates[12] == pytest.approx(1e-2 * (1 - 11 / total))
    assert tokens[total] == logged(trainer, "num_tokens")[3 * before]  # of three epochs
    message = (
        f"`gradient_accumulation_steps` was 2 and is 1.*{total - 10} of {total} steps remain.*with {3 * before}\\)"
    )
    assert re.search(message, caplog.text)


# What is refused

REVERSED = texts(60).map(lambda row: {"text": row["text"][::-1]})  # of the same lengths
CHANGES = {
    "tokens": ({"dataset": REVERSED}, "`fingerprint of the documents` was"),
    "one row less": ({"dataset": texts(60).select(range(59))}, "`rows of the dataset` was 60 and is 59"),
    "max_length": ({"max_length": 32}, "`max_length` was 64 and is 32"),
    "strategy": ({"packing_strategy": "bfd"}, "`packing_strategy` was 'stream' and is 'bfd'"),
    "overlong": ({"overlong": "drop"}, "`overlong` was 'truncate' and is 'drop'"),
    "seed": ({"seed": 7}, "`seed` was 42 and is 7"),
    "order kept": ({"train_sampling_strategy": "sequential"}, "`shuffle` was True and is False"),
    "drop_last": ({"dataloader_drop_last": True}, "`dataloader_drop_last` was False and is True"),
    "batch size, too": (
        {"per_device_train_batch_size": 4, "seed": 7},
        "`seed` was 42 and is 7, `per_device_train_batch_size` was 2 and is 4",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_documents_or_batches_are_refused(change, folder):
    settings, named = CHANGES[change]
    with pytest.raises(ValueError, match=f"{named}.*left out. Set them back, or set `ignore_data_skip=True`"):
        resume(folder, "checkpoint-10", **settings)
    if change == "seed":
        again = resume(folder, "checkpoint-10", **settings, ignore_data_skip=True)
        assert again.state.global_step == again.state.max_steps


def test_tokens_of_every_document_are_compared_where_the_checkpoint_has_them(trainer, folder):
    file = folder / "checkpoint-10" / STATE_FILE
    state = json.loads(file.read_text())
    del state["hash"]
    sample = state["settings"][SAMPLE_LABEL]
    assert len(sample) == 64
    state["settings"][SAMPLE_LABEL] = sample[::-1]
    file.write_text(json.dumps(state))
    with pytest.raises(ValueError, match=f"`sample of every document` was {sample[:-9:-1]}"):
        resume(folder, "checkpoint-10")
    del state["settings"][SAMPLE_LABEL]
    file.write_text(json.dumps(state))
    assert torch.equal(weights(resume(folder, "checkpoint-10")), weights(trainer))


def test_a_checkpoint_of_an_earlier_version_does_not_say_what_was_trained(folder):
    file = folder / "checkpoint-10" / STATE_FILE
    state = json.loads(file.read_text())
    del state["hash"], state["files"][TRAINED_FILE], state["first_step"], state["planned_at"], state["steps_left"]
    file.write_text(json.dumps(state))
    (folder / "checkpoint-10" / TRAINED_FILE).unlink()
    message = "`gradient_accumulation_steps` was 2 and is 1.*has no `trained_documents.npy`.*number of ranks is 2 again"
    with pytest.raises(ValueError, match=message):
        resume(folder, "checkpoint-10", gradient_accumulation_steps=1)
    assert resume(folder, "checkpoint-10", max_steps=11).state.global_step == 11


def test_a_checkpoint_planned_by_another_version_is_refused(folder):
    file = folder / "checkpoint-10" / STATE_FILE
    state = json.loads(file.read_text())
    del state["hash"]
    file.write_text(json.dumps(state | {"step_hash": "", "trl_packfix": "0.0.1"}))
    with pytest.raises(ValueError, match="`trl_packfix` was '0.0.1'.*Install the version"):
        resume(folder, "checkpoint-10")
    file.write_text(json.dumps(state | {"version": 99}))
    with pytest.raises(ValueError, match="has version 99"):
        resume(folder, "checkpoint-10")


def test_deepspeed_reads_other_ranks_from_a_universal_checkpoint_only(trainer, tmp_path):
    state = json.loads((Path(trainer.args.output_dir) / "checkpoint-10" / STATE_FILE).read_text())
    state["settings"] |= {"gradient_accumulation_steps": 1, "world_size": 2}  # the same documents in every step
    assert (
        continue_planner("checkpoint-10", state, trainer.data.source.settings, planner=trainer.data.source.planner)
        == {}
    )
    config = {}
    plugin = SimpleNamespace(deepspeed_config=config)
    accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    restarted = restart.Restart(
        SimpleNamespace(args=SimpleNamespace(world_size=1), accelerator=accelerator), trainer.data
    )
    state |= {"engine": "deepspeed", "world_size": 2}
    with pytest.raises(ValueError, match="on 1 ranks, and `world_size` was 2.*ds_to_universal --input.*or launch 2"):
        restarted._check_shards(str(tmp_path), state)
    (tmp_path / "latest_universal").write_text("global_step10_universal")
    with pytest.raises(ValueError, match='only a universal checkpoint. Set `"checkpoint": {"load_universal": true}`'):
        restarted._check_shards(str(tmp_path), state)
    config["checkpoint"] = {"load_universal": True}
    restarted._check_shards(str(tmp_path), state)


def test_checkpoints_of_other_trainers_are_refused(folder, tmp_path):
    saved(tmp_path / "unpacked", packing=False)
    stream = texts(60).to_iterable_dataset()
    with pytest.raises(ValueError, match="given with packing a table, and it was saved without packing, by another"):
        resume(tmp_path / "unpacked", "checkpoint-10")
    with pytest.raises(ValueError, match="given with packing a stream, and it was saved without packing, by another"):
        resume(tmp_path / "unpacked", "checkpoint-10", stream, max_steps=24)
    with pytest.raises(ValueError, match="given without packing, and it was saved with packing a table"):
        resume(folder, "checkpoint-10", packing=False)
    with pytest.raises(ValueError, match="given with packing a stream, and it was saved with packing a table"):
        resume(folder, "checkpoint-10", stream, max_steps=24)
    build_trainer(tmp_path / "stream", stream, **STEPS, max_steps=2, save_strategy="steps", save_steps=2).train()
    with pytest.raises(ValueError, match="given with packing a table, and it was saved with packing a stream"):
        resume(tmp_path / "stream", "checkpoint-2")
    unpacked = resume(tmp_path / "unpacked", "checkpoint-10", packing=False)
    assert unpacked.state.global_step == unpacked.state.max_steps


# Whole checkpoints only


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def zeroed(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def flipped(file: Path, place: int | str) -> None:
    content = bytearray(file.read_bytes())
    content[place if isinstance(place, int) else content.index(place.encode()) + len(place)] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "no trainer state": (lambda c: (c / "trainer_state.json").unlink(), "it has no `trainer_state.json`"),
    "half a trainer state": (lambda c: cut(c / "trainer_state.json"), "its `trainer_state.json`.* ends too early"),
    "half a file of ours": (lambda c: cut(c / STATE_FILE), f"its `{STATE_FILE}`.* ends too early"),
    "half a model": (lambda c: cut(c / "model.safetensors"), "its file `model.safetensors` has"),
    "half an optimizer": (lambda c: cut(c / "optimizer.pt"), "its file `optimizer.pt` has"),
    "no random state": (lambda c: (c / "rng_state.pth").unlink(), "its file `rng_state.pth` is missing"),
    "no state of ours": (
        lambda c: (c / STATE_FILE).write_text("[]"),
        f"its `{STATE_FILE}` does not hold what was saved",
    ),
    "an empty state": (lambda c: (c / STATE_FILE).write_text("{}"), f"its `{STATE_FILE}` does not hold what was saved"),
    "a folder": (lambda c: [(c / STATE_FILE).unlink(), (c / STATE_FILE).mkdir()], f"its `{STATE_FILE}` cannot be read"),
    "zeros in a model": (lambda c: zeroed(c / "model.safetensors"), "its file `model.safetensors` is not as it was"),
    "zeros in all": (lambda c: [zeroed(file) for file in c.iterdir()], "its `trainer_state.json`.* ends too early"),
    "a bit of trained": (
        lambda c: flipped(c / TRAINED_FILE, -1),
        f"its file `{TRAINED_FILE}` is not as it was written",
    ),
    "a digit of ours": (
        lambda c: flipped(c / STATE_FILE, '"global_step": 1'),
        f"its `{STATE_FILE}` does not hold what was saved",
    ),
    "nothing": (shutil.rmtree, "there is no such folder here"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_reported_and_not_loaded(kind, folder):
    damage, named = DAMAGES[kind]
    damage(folder / "checkpoint-15")
    with pytest.raises(ValueError, match=f"{named}.*part of its state.*checkpoint-10"):
        choose_checkpoint(str(folder / "checkpoint-15"), str(folder))


def test_blocks_of_a_large_file_are_compared(folder, monkeypatch):
    monkeypatch.setattr(checkpoints, "HASHED_WHOLE", 64)
    monkeypatch.setattr(checkpoints, "BLOCK", 64)
    (folder / "large").mkdir()
    (folder / "large" / "trainer_state.json").write_text("{}")
    (folder / "large" / "model").write_bytes(bytes([1]) * 10_000)
    checkpoints.save_state(folder / "large", {}, {})
    assert find_damage(folder / "large") is None
    flipped(folder / "large" / "model", -1)
    assert find_damage(folder / "large") == "its file `model` is not as it was written"


def test_no_whole_checkpoint(folder):
    for checkpoint in folder.glob("checkpoint-*"):
        cut(checkpoint / "optimizer.pt")
    for choice, message in (
        (True, "no whole checkpoint.*unset to start anew"),
        (str(folder / "checkpoint-5"), "unset to start anew"),
        (str(folder / "True"), "`resume_from_checkpoint='.*True'` was given, and there is no such folder"),
    ):
        with pytest.raises(ValueError, match=message):
            choose_checkpoint(choice, str(folder))
    with pytest.raises(ValueError, match="no whole checkpoint"):
        choose_checkpoint(True, str(folder / "empty"))


class Killed(Exception):
    pass


def test_a_checkpoint_that_is_written_again_is_not_vouched_for_by_the_first(folder, monkeypatch):
    """Runs that resume further back write later checkpoints again, whose files may have equal sizes."""

    def die(self, output_dir):
        raise Killed

    monkeypatch.setattr("transformers.Trainer._save_optimizer_and_scheduler", die)
    with pytest.raises(Killed):
        resume(folder, "checkpoint-5", save_strategy="steps", save_steps=5)
    with pytest.raises(ValueError, match="it has no `trainer_state.json`.*checkpoint-15"):
        resume(folder, "checkpoint-10")


def test_a_run_that_is_killed_as_it_begins_to_write_again_is_passed_over(folder, monkeypatch):
    """At no moment is a checkpoint whole that is not."""
    unlink = Path.unlink
    removed = []

    def die(path, **kwargs):
        if removed:
            raise Killed
        removed.append(path.name)
        unlink(path, **kwargs)

    monkeypatch.setattr(Path, "unlink", die)
    with pytest.raises(Killed):
        note_times(folder / "checkpoint-15")
    monkeypatch.undo()
    assert removed
    assert find_damage(folder / "checkpoint-15") is not None
    assert choose_checkpoint(True, str(folder))[0] == str(folder / "checkpoint-10")


def test_a_checkpoint_that_is_written_again_is_whole(folder):
    """Reports and what other callbacks write replace files of the run before, after the sizes are noted."""
    for checkpoint in folder.glob("checkpoint-*"):
        (checkpoint / "packing_report.json").write_text("of another length")
    again = resume(folder, "checkpoint-5", save_strategy="steps", save_steps=5, packing_report=True)
    for checkpoint in (folder / "checkpoint-10", folder / "checkpoint-15"):
        assert find_damage(checkpoint) is None
        assert json.loads((checkpoint / "packing_report.json").read_text())["strategy"] == "stream"
        files = set(json.loads((checkpoint / STATE_FILE).read_text())["files"])
        assert {"model.safetensors", "optimizer.pt", "rng_state.pth"} < files - {"packing_report.json"} == files
    assert again.state.global_step == again.state.max_steps


def test_the_only_checkpoint_is_deleted_after_the_next_is_whole(tmp_path, monkeypatch):
    files_found = []

    def look(output_dir, **kwargs):
        newest = max(Path(output_dir).glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
        files_found.append((newest.name, {file.name for file in newest.iterdir()}))

    monkeypatch.setattr("transformers.trainer.rotate_checkpoints", look)
    saved(tmp_path, max_steps=4, save_steps=2, save_total_limit=1)
    assert [name for name, _ in files_found] == ["checkpoint-2", "checkpoint-4"]
    assert all(files >= {STATE_FILE, "trainer_state.json", "rng_state.pth", "optimizer.pt"} for _, files in files_found)


@pytest.mark.parametrize("is_stream, max_steps", [(False, 1), (True, 3)])
def test_a_run_resumed_behind_its_end_trains_nothing(max_steps, is_stream, tmp_path):
    data = texts(60).to_iterable_dataset(2) if is_stream else texts(60)
    unbroken = saved(tmp_path, data, save_steps=3, max_steps=3, lr_scheduler_type="constant")
    settings = {"max_steps": max_steps, "logging_strategy": "epoch", "save_strategy": "epoch"}
    again = resume(tmp_path, "checkpoint-3", data, **settings)
    assert again.state.global_step == 3
    assert torch.equal(weights(again), weights(unbroken))
    more = resume(tmp_path, "checkpoint-3", data, max_steps=4, lr_scheduler_type="constant")
    assert more.state.global_step == 4
    assert not torch.equal(weights(more), weights(unbroken))


def weighted(factor=1.0):
    return texts(60).add_column("weight", [factor + i % 3 for i in range(60)]).add_column("other", [1.0] * 60)


# The run, what is changed, and what the message says
LOSSES = {
    "no weights": ({"weight_column": "weight"}, {"weight_column": None}, "`weight_column` was 'weight' and is None"),
    "weights": ({}, {"weight_column": "weight"}, "`weight_column` was None and is 'weight'.*Set `weight_column=None`"),
    "column": (
        {"weight_column": "weight"},
        {"weight_column": "other"},
        "`weight_column` was 'weight' and is 'other', `weights of the rows` was .*Set `weight_column='weight'`, or",
    ),
    "values": (
        {"weight_column": "weight"},
        {"dataset": weighted(2.0)},
        r"`weights of the rows` was \w{8}... and is \w{8}....*Give the rows the weights that they had",
    ),
    "type": ({}, {"loss_type": "dft"}, "`loss_type` was 'nll' and is 'dft'.*Set `loss_type='nll'`"),
    "smoothing": (
        {"label_smoothing_factor": 0.1},
        {"label_smoothing_factor": 0.0},
        "`label_smoothing_factor` was 0.1 and is 0.0.*Set `label_smoothing_factor=0.1`",
    ),
    "router": (
        {"model": "mixtral", "router_aux_loss_coef": 0.001},
        {"router_aux_loss_coef": None},
        "`router_aux_loss_coef` was 0.001 and is 0.0.*Set `router_aux_loss_coef=0.001`",
    ),
    "weighting": (
        {"dataset": texts(60).to_iterable_dataset(2), "document_weighting": "document"},
        {"document_weighting": "token"},
        "`document_weighting` was 'document' and is 'token'.*the new loss.*Set `document_weighting='document'`",
    ),
}


@pytest.mark.parametrize("change", LOSSES)
def test_another_loss_is_refused(change, tmp_path):
    before, after, message = LOSSES[change]
    before = {"dataset": weighted(), "max_steps": 2} | before
    saved(tmp_path, save_steps=1, **before)
    for more in ({}, {"ignore_data_skip": True}):
        with pytest.raises(ValueError, match=f"saved with another loss: {message}"):
            resume(tmp_path, "checkpoint-1", **before | after | more)
    if change in ("column", "weighting"):
        assert resume(tmp_path, "checkpoint-1", **before).state.global_step == 2
    if change == "weighting":
        file = tmp_path / "checkpoint-1" / STATE_FILE  # of a version that did not write it
        state = json.loads(file.read_text())
        del state["document_weighting"], state["hash"]
        file.write_text(json.dumps(state))
        assert resume(tmp_path, "checkpoint-1", **before | after).state.global_step == 2


def test_the_same_loss_by_other_means_continues(tmp_path):
    saved(tmp_path, save_steps=1, max_steps=2, loss_type="chunked_nll", source_column="source", dataset=SOURCES)
    assert resume(tmp_path, "checkpoint-1", max_steps=2, loss_type="nll", dataset=SOURCES).state.global_step == 2


@pytest.fixture
def determinism(monkeypatch):
    """Put back what `full_determinism` sets for the whole process."""
    for name in "CUDA_LAUNCH_BLOCKING CUBLAS_WORKSPACE_CONFIG ASCEND_LAUNCH_BLOCKING HCCL_DETERMINISTIC".split():
        monkeypatch.setenv(name, "unset")
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "0")
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


def test_a_restart_under_full_determinism_is_exact(determinism, tmp_path):
    """On a GPU only then: no operation of a packed step refuses it here."""
    settings = {"full_determinism": True, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    unbroken = build_trainer(tmp_path / "whole", texts(), **settings)
    unbroken.train()
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["FLASH_ATTENTION_DETERMINISTIC"] == "1"
    resumed = build_trainer(tmp_path / "resumed", texts(), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert torch.equal(weights(unbroken), weights(resumed))
