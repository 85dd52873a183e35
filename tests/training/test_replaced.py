"""What a user changes after the trainer is constructed is honoured, as in TRL, or refused."""

import pytest
import torch
from datasets import Dataset
from support.features import needs
from support.models import build_tiny_model
from support.runs import build_trainer, documents_of, log_of_steps, record_steps, texts, weights

pytestmark = pytest.mark.slow

ROWS = texts(40)


def trained_tokens(steps):
    """Return the tokens of every document of these steps, sorted."""
    return sorted(tokens for step in steps for batch in step for tokens, _ in documents_of(batch))


@pytest.mark.parametrize(
    "settings",
    [{}, pytest.param({"share_prefixes": "family"}, marks=needs("prefixes")), {"packing_strategy": "minibatch"}],
)
def test_a_training_set_that_is_set_before_training_is_trained(settings, tmp_path):
    settings = {"learning_rate": 1e-2, "num_train_epochs": 2} | settings
    trainer = build_trainer(tmp_path, ROWS, **settings)
    trainer.train_dataset = trainer.train_dataset.select(range(15, 40))
    fresh = build_trainer(tmp_path, ROWS.select(range(15, 40)), **settings)
    for any_trainer in (trainer, fresh):
        any_trainer.train()
    assert torch.equal(weights(trainer), weights(fresh))  # and so the rates of learning were
    assert trainer.packing_report.num_rows == trainer.packing_report.num_documents == 25
    assert trainer.state.max_steps > 4


@pytest.mark.parametrize("packing", [True, False])
def test_each_stage_trains_its_own_rows_and_steps(packing, tmp_path):
    trainer = build_trainer(tmp_path, ROWS, packing=packing, num_train_epochs=1)
    steps = record_steps(trainer)
    prepared = trainer.train_dataset
    tokens = [[7, 8, 9, 10 + i] for i in range(30)]
    tokenised = Dataset.from_dict({"input_ids": tokens} | ({} if packing else {"labels": tokens}))
    num_steps = []
    for stage in (prepared, prepared.select(range(10)), tokenised):
        steps.clear()
        trainer.train_dataset = stage
        trainer.train()
        assert trained_tokens(steps) == sorted(stage["input_ids"])
        num_steps.append(trainer.state.max_steps)
        assert trainer.state.global_step == trainer.state.max_steps
    assert num_steps[0] > 3 * num_steps[1]
    assert len(set(num_steps)) == 3


@pytest.mark.parametrize("packing", [True, False])
def test_weights_and_sources_are_those_of_the_new_rows(packing, tmp_path):
    def rows(source, weight):
        return texts(12).add_column("source", [source] * 12).add_column("weight", [weight] * 12)

    settings = {"weight_column": "weight", "source_column": "source", "packing": packing, "learning_rate": 1e-2}
    trainer = build_trainer(tmp_path, rows("first", 1.0), **settings)
    second = build_trainer(tmp_path, rows("second", 0.0), **settings | {"weight_column": None})
    trainer.train_dataset = second.train_dataset.map(lambda row, i: {"weight": float(i == 3)}, with_indices=True)
    before = weights(trainer).clone()
    trainer.train()
    entries = log_of_steps(trainer)
    assert {key for entry in entries for key in entry if key.startswith("loss/")} == {"loss/second"}
    # A step without the row of weight 1 has the loss 0
    assert sum(entry["loss"] > 0 for entry in entries) == 3 < len(entries)  # once per epoch
    assert not torch.equal(weights(trainer), before)
    trainer.train_dataset = second.train_dataset  # all weights are 0
    with pytest.raises(ValueError, match="all 12 rows of the train dataset have weight 0"):
        trainer.train()


def test_an_ignored_mask_of_new_rows_is_ignored(tmp_path):
    masked = Dataset.from_dict({"input_ids": [[5, 6, 7, 8]] * 6, "completion_mask": [[0, 0, 0, 1]] * 6})
    trainer, fresh = (build_trainer(tmp_path, dataset) for dataset in (ROWS, masked))
    trainer.train_dataset = masked
    for any_trainer in (trainer, fresh):
        any_trainer.get_train_dataloader()
    assert trainer.packing_report.num_trained_tokens == fresh.packing_report.num_trained_tokens == 18


def test_a_resumed_stage_has_the_rows_of_its_checkpoint(tmp_path):
    settings = {"save_steps": 2, "learning_rate": 1e-2, "num_train_epochs": 2}
    partly_trained = build_trainer(tmp_path, ROWS, **settings)
    partly_trained.train_dataset = partly_trained.train_dataset.select(range(20))
    partly_trained.train()
    again = build_trainer(tmp_path, ROWS, **settings)
    with pytest.raises(ValueError, match="`rows of the dataset` was 20 and is 40"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    again.train_dataset = again.train_dataset.select(range(20))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert partly_trained.state.max_steps > 2
    assert torch.equal(weights(again), weights(partly_trained))


def test_streams_follow_each_other(tmp_path):
    settings = {"max_steps": 3}
    trainer = build_trainer(tmp_path, ROWS.to_iterable_dataset(), **settings)
    steps = record_steps(trainer)
    other_ids = [[7, 8, 9, 10 + i] for i in range(200)]
    trainer.train_dataset = Dataset.from_dict({"input_ids": other_ids}).to_iterable_dataset()
    trainer.train()
    assert steps
    assert all(tokens in other_ids for tokens in trained_tokens(steps))
    trainer.train_dataset = ROWS.to_iterable_dataset()
    with pytest.raises(ValueError, match=r"`trainer.train_dataset` was set to rows with the columns \['text'\]"):
        trainer.train()


REFUSED = {
    "raw": (
        lambda trainer: ROWS,
        r"was set to rows with the columns \['text'\], without `input_ids`.*not again.*select",
    ),
    "stream": (
        lambda trainer: trainer.train_dataset.to_iterable_dataset(),
        "set to an `IterableDataset`.* with a `Dataset`",
    ),
    "none": (lambda trainer: None, "set to NoneType, and the trainer was constructed with a `Dataset`.*Construct"),
    "empty": (lambda trainer: trainer.train_dataset.select([]), "The train dataset has 0 rows"),
    "untrained": (
        lambda trainer: Dataset.from_dict({"input_ids": [[5, 6]] * 3, "labels": [[-100, -100]] * 3}),
        "no document remains to train on",
    ),
    "ids": (lambda trainer: Dataset.from_dict({"input_ids": [[5, 10**6]]}), "has token ids from 5 to 1000000"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_cannot_be_trained_are_refused(case, tmp_path):
    trainer = build_trainer(tmp_path, ROWS)
    other_rows, message = REFUSED[case]
    trainer.train_dataset = other_rows(trainer)
    for _ in range(2):  # each time
        with pytest.raises(ValueError, match=message):
            trainer.train()


@pytest.mark.parametrize("packing", [True, False])
def test_an_evaluation_set_that_is_set_later_is_evaluated(packing, tmp_path):
    trainer = build_trainer(tmp_path, ROWS, eval_dataset=texts(20, seed=1), packing=packing)
    few = texts(20, seed=1).select(range(4))
    fresh = build_trainer(tmp_path, ROWS, eval_dataset=few, packing=packing)
    before = trainer.evaluate()["eval_loss"]
    trainer.eval_dataset = trainer.eval_dataset.select(range(4))
    assert trainer.evaluate()["eval_loss"] == fresh.evaluate()["eval_loss"] != before
    assert trainer.evaluate(few)["eval_loss"] == fresh.evaluate()["eval_loss"]  # prepared by TRL
    trainer.eval_dataset = few
    with pytest.raises(ValueError, match=r"`trainer.eval_dataset` was set to rows with the columns \['text'\]"):
        trainer.evaluate()


CHANGES = {"share_prefixes": "family", "packing_strategy": "wrapped", "max_length": 32, "packing": False}
CHANGES |= {"label_smoothing_factor": 0.3, "message_train_key": "train"}


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_of_packing_that_is_changed_later_is_refused(name, tmp_path):
    trainer = build_trainer(tmp_path, ROWS, eval_dataset=texts(4))
    before = getattr(trainer.args, name)
    setattr(trainer.args, name, CHANGES[name])
    message = rf"`trainer.args` was changed.*`{name}` was {before!r} and is {CHANGES[name]!r}.*not be honoured.*Con"
    with pytest.raises(ValueError, match=message):
        trainer.train()
    if name == "packing":
        with pytest.raises(ValueError, match=message):
            trainer.evaluate()
    else:
        assert trainer.evaluate()["eval_loss"] > 0
    setattr(trainer.args, name, before)
    trainer.args.max_steps = 1  # what the Trainer reads when training starts
    assert trainer.train().global_step == 1


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("wraps_too", [True, False])
def test_another_model_is_refused(packing, wraps_too, tmp_path):
    trainer = build_trainer(tmp_path, ROWS, eval_dataset=texts(4), packing=packing, max_steps=1)
    own_model = trainer.model
    trainer.model = build_tiny_model("llama")
    if wraps_too:
        trainer.model_wrapped = trainer.model
    for call in (trainer.train, trainer.evaluate):
        with pytest.raises(ValueError, match="`trainer.model` was set to another LlamaForCausalLM.*Construct a"):
            call()
    trainer.model = trainer.model_wrapped = own_model
    assert trainer.train().global_step == 1
