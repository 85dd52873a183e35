"""Restarts on one process: exact or refused, from whole checkpoints only. Those on two ranks: test_distributed.py."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.runs import build_trainer, run_training, texts, weights

from trl_packfix.training import checkpoints, restart
from trl_packfix.training.checkpoints import STATE_FILE, TRAINED_FILE, choose_checkpoint, find_damage, note_times
from trl_packfix.training.table_source import SAMPLE_LABEL, continue_planner

pytestmark = pytest.mark.slow


STEPS = {"num_train_epochs": 3, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}


def saved(folder, dataset=None, save_steps=5, **settings):
    """Return a run of three epochs with checkpoints, of which the second is in the middle of epoch two."""
    return run_training(folder, dataset or texts(60), **STEPS | {"save_steps": save_steps} | settings)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    trainer = saved(tmp_path_factory.mktemp("restart"), include_num_input_tokens_seen="all")
    per_epoch = trainer.state.max_steps // 3
    assert per_epoch < 10 < 2 * per_epoch, "checkpoint-10 is not in the middle of epoch two"
    return trainer


@pytest.fixture
def folder(trainer, tmp_path) -> Path:
    """Return a copy of the run's folder, with the checkpoints 5, 10 and 15, that a test may damage."""
    shutil.copytree(trainer.args.output_dir, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint-2*"))
    return tmp_path / "run"


def resume(folder, checkpoint, dataset=None, **settings):
    return run_training(folder, dataset or texts(60), checkpoint=folder / checkpoint, **STEPS | settings)


def rewrite_state(checkpoint, *removed, **changed):
    """Write our file of a checkpoint as another version did: with other values, and without its hash."""
    file = checkpoint / STATE_FILE
    state = json.loads(file.read_text()) | changed
    file.write_text(json.dumps({name: value for name, value in state.items() if name not in ("hash", *removed)}))


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
    again = build_trainer(folder, texts(60), **STEPS)
    again.train(resume_from_checkpoint=True)
    assert again.restart.resumed[0] == str(folder / "checkpoint-10")
    assert torch.equal(weights(again), weights(trainer))
    assert "checkpoint-15 is skipped, because its file `model.safetensors` has 4 bytes of" in caplog.text


def test_newest_begins_where_there_is_no_whole_checkpoint(tmp_path, caplog):
    """For job scripts: the same command starts a run and continues it."""
    settings = {"save_steps": 2, "checkpoint": "newest"}
    first = run_training(tmp_path, texts(40), max_steps=4, **settings)
    assert first.restart.resumed is None
    assert first.state.global_step == 4
    again = run_training(tmp_path, texts(40), max_steps=6, **settings)
    assert again.restart.resumed[0].endswith("checkpoint-4")
    assert again.state.global_step == 6
    for name in ("checkpoint-2", "checkpoint-4", "checkpoint-6"):
        (tmp_path / name / "trainer_state.json").unlink()
    anew = run_training(tmp_path, texts(40), max_steps=4, **settings)
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


def test_the_first_step_of_a_new_plan_is_compared_on_its_documents(folder):
    again = resume(folder, "checkpoint-5", gradient_accumulation_steps=1)
    source = again.data.source
    point = source.planner.resume_point
    assert (point.epoch, point.num_steps) == (0, 5)
    documents, _ = source.first_documents(8)
    expected = source.planner.schedule(0).step_documents(5)
    tokens = again.train_dataset.select(source.documents.row[expected])["input_ids"]
    assert [document["input_ids"].tolist() for document in documents] == [ids[:64] for ids in tokens[:8]]


# What is refused

REVERSED = texts(60).map(lambda row: {"text": row["text"][::-1]})  # of the same lengths
CHANGES = {
    "tokens": ({"dataset": REVERSED}, "`fingerprint of the documents` was"),
    "one row less": ({"dataset": texts(60).select(range(59))}, "`rows of the dataset` was 60 and is 59"),
    "max_length": ({"max_length": 32}, "`max_length` was 64 and is 32"),
    "strategy": ({"packing_strategy": "bfd"}, "`packing_strategy` was 'stream' and is 'bfd'"),
    "overlong": ({"overlong": "drop"}, "`overlong` was 'truncate' and is 'drop'"),
    "order kept": ({"train_sampling_strategy": "sequential"}, "`shuffle` was True and is False"),
    "drop_last": ({"dataloader_drop_last": True}, "`dataloader_drop_last` was False and is True"),
    "seed and batch size": (
        {"per_device_train_batch_size": 4, "seed": 7},
        "`seed` was 42 and is 7, `per_device_train_batch_size` was 2 and is 4",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_documents_or_batches_are_refused(change, folder):
    settings, named = CHANGES[change]
    with pytest.raises(ValueError, match=f"{named}.*left out. Set them back, or set `ignore_data_skip=True`"):
        resume(folder, "checkpoint-10", **settings)


def test_other_batches_may_be_trained_if_the_first_of_them_need_not_be_skipped(folder):
    again = resume(folder, "checkpoint-10", seed=7, ignore_data_skip=True)
    assert again.state.global_step == again.state.max_steps


def test_a_run_that_began_an_epoch_anew_is_resumed_exactly(trainer, folder):
    anew = resume(folder, "checkpoint-10", ignore_data_skip=True, save_steps=5)
    assert not torch.equal(weights(anew), weights(trainer)), "no epoch was begun anew"
    assert anew.state.max_steps == trainer.state.max_steps
    again = resume(folder, "checkpoint-15")
    assert again.state.max_steps == trainer.state.max_steps
    assert torch.equal(weights(again), weights(anew))


def test_tokens_of_every_document_are_compared_where_the_checkpoint_has_them(trainer, folder):
    checkpoint = folder / "checkpoint-10"
    settings = json.loads((checkpoint / STATE_FILE).read_text())["settings"]
    sample = settings.pop(SAMPLE_LABEL)
    assert len(sample) == 64
    rewrite_state(checkpoint, settings=settings | {SAMPLE_LABEL: sample[::-1]})
    with pytest.raises(ValueError, match=f"`sample of every document` was {sample[:-9:-1]}"):
        resume(folder, "checkpoint-10")
    rewrite_state(checkpoint, settings=settings)
    assert torch.equal(weights(resume(folder, "checkpoint-10")), weights(trainer))


def test_a_checkpoint_of_an_earlier_version_does_not_say_what_was_trained(folder):
    checkpoint = folder / "checkpoint-10"
    files = json.loads((checkpoint / STATE_FILE).read_text())["files"]
    del files[TRAINED_FILE]
    rewrite_state(checkpoint, "first_step", "planned_at", "steps_left", files=files)
    (checkpoint / TRAINED_FILE).unlink()
    message = "`gradient_accumulation_steps` was 2 and is 1.*has no `trained_documents.npy`.*number of ranks is 2 again"
    with pytest.raises(ValueError, match=message):
        resume(folder, "checkpoint-10", gradient_accumulation_steps=1)
    assert resume(folder, "checkpoint-10", max_steps=11).state.global_step == 11


def test_a_checkpoint_planned_by_another_version_is_refused(folder):
    rewrite_state(folder / "checkpoint-10", step_hash="", trl_packfix="0.0.1")
    with pytest.raises(ValueError, match="`trl_packfix` was '0.0.1'.*Install the version"):
        resume(folder, "checkpoint-10")
    rewrite_state(folder / "checkpoint-10", version=99)
    with pytest.raises(ValueError, match="has version 99"):
        resume(folder, "checkpoint-10")


def test_deepspeed_reads_other_ranks_from_a_universal_checkpoint_only(trainer, tmp_path):
    state = json.loads((Path(trainer.args.output_dir) / "checkpoint-10" / STATE_FILE).read_text())
    state["settings"] |= {"gradient_accumulation_steps": 1, "world_size": 2}  # the same documents in every step
    source = trainer.data.source
    assert continue_planner("checkpoint-10", state, source.settings, planner=source.planner) == {}
    config = {}
    plugin = SimpleNamespace(deepspeed_config=config)
    accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    one_rank = SimpleNamespace(args=SimpleNamespace(world_size=1), accelerator=accelerator)
    restarted = restart.Restart(one_rank, trainer.data)
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
    stream = {"dataset": texts(60).to_iterable_dataset(), "max_steps": 12}
    saved(tmp_path / "stream", **stream)
    for run, settings, message in (
        (tmp_path / "unpacked", {}, "with packing a table, and it was saved without packing, by another"),
        (tmp_path / "unpacked", stream, "with packing a stream, and it was saved without packing, by another"),
        (folder, {"packing": False}, "without packing, and it was saved with packing a table"),
        (folder, stream, "with packing a stream, and it was saved with packing a table"),
        (tmp_path / "stream", {}, "with packing a table, and it was saved with packing a stream"),
    ):
        with pytest.raises(ValueError, match=f"given {message}"):
            resume(run, "checkpoint-10", **settings)
    unpacked = resume(tmp_path / "unpacked", "checkpoint-10", packing=False)
    assert unpacked.state.global_step == unpacked.state.max_steps


# Whole checkpoints only


NOT_SAVED = f"its `{STATE_FILE}` does not hold what was saved"


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def zeroed(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def flipped(file: Path, place: int | str = -1) -> None:
    content = bytearray(file.read_bytes())
    content[place if isinstance(place, int) else content.index(place.encode()) + len(place)] ^= 1
    file.write_bytes(content)


def folder_in_place_of(file: Path) -> None:
    file.unlink()
    file.mkdir()


# What is done to which file, and what is said
DAMAGES = {
    "no trainer state": (Path.unlink, "trainer_state.json", "it has no `trainer_state.json`"),
    "half a trainer state": (cut, "trainer_state.json", "its `trainer_state.json`, of .* bytes, is cut off"),
    "half a file of ours": (cut, STATE_FILE, f"its `{STATE_FILE}`, of .* bytes, is cut off"),
    "zeros in a file of ours": (zeroed, STATE_FILE, r"or damaged \(Expecting value: line 1 column 1 \(char 0\)\)"),
    "no text in a file of ours": (
        lambda file: file.write_bytes(b"\xff"),
        STATE_FILE,
        r"of 1 bytes, .*invalid start byte",
    ),
    "half a model": (cut, "model.safetensors", "its file `model.safetensors` has"),
    "no random state": (Path.unlink, "rng_state.pth", "its file `rng_state.pth` is missing"),
    "no state of ours": (lambda file: file.write_text("[]"), STATE_FILE, NOT_SAVED),
    "an empty state": (lambda file: file.write_text("{}"), STATE_FILE, NOT_SAVED),
    "a folder": (folder_in_place_of, STATE_FILE, f"its `{STATE_FILE}` cannot be read"),
    "zeros in a model": (zeroed, "model.safetensors", "its file `model.safetensors` is not as it was"),
    "a bit of trained": (flipped, TRAINED_FILE, f"its file `{TRAINED_FILE}` is not as it was written"),
    "a digit of ours": (lambda file: flipped(file, '"global_step": 1'), STATE_FILE, NOT_SAVED),
    "nothing": (shutil.rmtree, "", "there is no such folder here"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_reported_and_not_loaded(kind, folder):
    damage, file, named = DAMAGES[kind]
    damage(folder / "checkpoint-15" / file)
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
    flipped(folder / "large" / "model")
    assert find_damage(folder / "large") == "its file `model` is not as it was written"


def test_no_whole_checkpoint(folder):
    for checkpoint in folder.glob("checkpoint-*"):
        cut(checkpoint / "optimizer.pt")
    for choice, output_dir, message in (
        (True, folder, "no whole checkpoint.*unset to start anew"),
        (True, folder / "empty", "no whole checkpoint"),
        (str(folder / "checkpoint-5"), folder, "unset to start anew"),
        (str(folder / "True"), folder, "`resume_from_checkpoint='.*True'` was given, and there is no such folder"),
    ):
        with pytest.raises(ValueError, match=message):
            choose_checkpoint(choice, str(output_dir))


class Killed(Exception):
    pass


def test_a_checkpoint_that_is_written_again_is_not_vouched_for_by_the_first(folder, monkeypatch):
    """Runs that resume further back write later checkpoints again, whose files may have equal sizes."""

    def die(self, output_dir):
        raise Killed

    monkeypatch.setattr("transformers.Trainer._save_optimizer_and_scheduler", die)
    with pytest.raises(Killed):
        resume(folder, "checkpoint-5", save_steps=5)
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
    again = resume(folder, "checkpoint-5", save_steps=5, packing_report=True)
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
        rewrite_state(tmp_path / "checkpoint-1", "document_weighting")  # as a version that did not write it
        assert resume(tmp_path, "checkpoint-1", **before | after).state.global_step == 2


def test_the_same_loss_by_other_means_continues(tmp_path):
    data = texts(60).add_column("source", ["a", "b"] * 30)
    saved(tmp_path, data, save_steps=1, max_steps=2, loss_type="chunked_nll", source_column="source")
    assert resume(tmp_path, "checkpoint-1", data, max_steps=2, loss_type="nll").state.global_step == 2
