"""Evaluation: exact numbers whatever the batches, one result per row, and the decisions that stand on them."""

import time

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset, Value
from support.by_hand import token_scores
from support.models import build_tiny_model
from support.runs import build_trainer, run_training, stock, texts
from support.versions import evaluates_own_losses, trl_trains
from torch.nn import functional as F
from torch.utils.data import get_worker_info
from transformers import EarlyStoppingCallback
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from trl_packfix import SFTTrainer
from trl_packfix.planning.strategies import STRATEGIES

pytestmark = pytest.mark.slow


def partly_trained(num=23):
    """Return documents of 3 to 60 tokens; every fifth has no trained token."""
    rng = np.random.default_rng(1)
    rows = []
    for row, length in enumerate(rng.integers(3, 61, num)):
        tokens = rng.integers(4, 260, length).repeat(2)[:length].tolist()  # pairs: tied embeddings predict half
        first = length if row % 5 == 0 else rng.integers(0, length)
        rows.append({"input_ids": tokens, "labels": [-100] * first + tokens[first:]})
    return Dataset.from_list(rows)


def by_hand(model, data):
    """Return loss, entropy and accuracy over all trained tokens, each document alone."""
    scores = []
    for row in data:
        labels = torch.tensor([row["labels"]])
        with torch.no_grad():
            logits = model(torch.tensor([row["input_ids"]])).logits.double()
        scores.append(torch.stack(token_scores(logits, labels))[:, labels[:, 1:] != -100])
    log_prob, entropy, accuracy = torch.cat(scores, dim=1).mean(dim=1).tolist()
    return {"loss": -log_prob, "entropy": entropy, "mean_token_accuracy": accuracy}


@pytest.mark.parametrize("packing, eval_packing", [(True, None), (True, False), (False, True), (False, None)])
@pytest.mark.parametrize("batch_size", [1, 7])
def test_loss_entropy_and_accuracy_are_ratios_of_totals(packing, eval_packing, batch_size, tmp_path):
    data = partly_trained()
    model = build_tiny_model(tie_word_embeddings=True)
    settings = {"packing": packing, "eval_packing": eval_packing, "per_device_eval_batch_size": batch_size}
    settings["loss_type"] = "dft"  # of training: evaluation is the negative log-likelihood
    trainer = build_trainer(tmp_path, texts(), model, eval_dataset=data, **settings)
    metrics = trainer.evaluate()
    logged = trainer.state.log_history[-1]
    expected = by_hand(build_tiny_model(tie_word_embeddings=True), data)
    for name, value in expected.items():
        assert logged[f"eval_{name}"] == pytest.approx(value, rel=1e-6), name
    assert metrics["eval_loss"] == logged["eval_loss"]
    assert expected["mean_token_accuracy"] > 0
    # an evaluation set may be called "train"; rows without a trained token are rows
    assert trainer.evaluate({"train": data})["eval_train_loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert len(trainer._prepare_dataset(data, None, trainer.args, packing, None, "train")) == 23
    assert metrics["eval_samples_per_second"] == pytest.approx(23 / metrics["eval_runtime"], rel=0.02)


class Masking(DataCollatorForLanguageModeling):
    """A collator of the user's, which reads a column of its own: how many first labels are not trained."""

    def torch_call(self, examples):
        batch = super().torch_call(examples)
        for labels, example in zip(batch["labels"], examples, strict=True):
            labels[: example["untrained"]] = -100
        return batch


@pytest.mark.parametrize("eval_packing", [None, True])
def test_a_collator_that_extends_that_of_trl_makes_the_batches_of_evaluation(eval_packing, tmp_path):
    data = partly_trained(8).add_column("untrained", [5] * 8)
    settings = {"eval_dataset": data, "per_device_eval_batch_size": 8}
    settings |= {"data_collator": Masking(pad_token_id=0), "remove_unused_columns": False}
    expected = stock(tmp_path, data, **settings).evaluate()["eval_loss"]
    trainer = build_trainer(tmp_path, data, packing=False, eval_packing=eval_packing, **settings)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_packs_of_an_evaluation_have_the_size_of_its_own_batches(tmp_path):
    """8 documents of 16 tokens: with a batch size of 4, as for padded batches, two packs of 64."""
    data = Dataset.from_dict({"input_ids": [[9] * 16] * 8})
    sizes = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 4, "max_length": 16}
    for packing in (True, False):
        trainer = build_trainer(tmp_path, data, eval_dataset=data, packing=packing, **sizes)
        shapes = [batch["input_ids"].shape for batch in trainer.get_eval_dataloader()]
        assert shapes == ([(1, 64)] if packing else [(4, 16)]) * 2


def test_an_evaluation_set_is_truncated_whatever_training_does(tmp_path):
    settings = {"eval_dataset": texts(20, seed=1), "max_length": 16}
    choices = ("truncate", "split", "drop")
    trainers = [build_trainer(tmp_path, texts(), overlong=overlong, **settings) for overlong in choices]
    assert len({trainer.evaluate()["eval_loss"] for trainer in trainers}) == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_packs_of_evaluation_each_document_is_a_row_with_every_strategy(tmp_path, strategy):
    """With "bfd" and "bfd_split" TRL's own collator makes one row of all of a batch."""
    data = Dataset.from_dict({"input_ids": [[9] * 16] * 4})
    settings = {"packing_strategy": strategy, "eval_packing": False, "per_device_eval_batch_size": 4}
    trainer = build_trainer(tmp_path, data, eval_dataset=data, **settings)
    assert [batch["input_ids"].shape for batch in trainer.get_eval_dataloader()] == [(4, 16)]
    assert trainer.predict(data).predictions.shape[:2] == (4, 16)


def count_rows(prediction):
    return {"rows": len(prediction.label_ids)}


def test_metrics_receive_documents_and_prediction_one_result_per_row(tmp_path):
    data = partly_trained()
    shapes = []

    def preprocess(logits, labels):
        shapes.append((logits.shape[:2], labels.shape))
        return logits.argmax(-1)

    options = {"compute_metrics": count_rows, "preprocess_logits_for_metrics": preprocess}
    trainer = build_trainer(tmp_path, texts(), eval_dataset=data, per_device_eval_batch_size=4, **options)
    assert trainer.evaluate()["eval_rows"] == 23
    assert all(logits == labels and logits[0] == 4 for logits, labels in shapes)
    predicted = trainer.predict(data)
    model = build_tiny_model()
    for labels, tokens, document in zip(predicted.label_ids, predicted.predictions, data, strict=True):
        length = len(document["input_ids"])
        assert labels[:length].tolist() == document["labels"]
        assert (labels[length:] == -100).all()
        with torch.no_grad():
            likeliest = model(torch.tensor([document["input_ids"]])).logits[0].argmax(-1)
        assert tokens[:length].tolist() == likeliest.tolist()
    assert predicted.metrics["test_rows"] == 23
    assert predicted.metrics["test_loss"] == pytest.approx(by_hand(model, data)["loss"], rel=1e-6)


@evaluates_own_losses
@trl_trains
def test_a_loss_function_of_the_user_is_evaluated_as_in_trl_and_said_so(tmp_path, caplog):
    def loss(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) * 0 + 7

    with pytest.warns(FutureWarning, match="compute_loss_func"):
        trainer = build_trainer(tmp_path, texts(), eval_dataset=texts(), compute_loss_func=loss)
    assert trainer.evaluate()["eval_loss"] == 7
    assert "`eval_loss` is the mean over batches of `compute_loss_func`" in caplog.text


def doubling(base, method):
    """Return a subclass of `base` with a loss of the user's, twice the usual one, by overriding `method`."""

    class Doubling(base):
        batches: list = []

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            if not self.model.training:
                self.batches.append(inputs)
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            return (2 * loss[0], loss[1]) if return_outputs else 2 * loss

        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            self.batches.append(inputs)
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            return 2 * loss, logits, labels

    delattr(Doubling, ({"compute_loss", "prediction_step"} - {method}).pop())
    return Doubling


@trl_trains
@pytest.mark.filterwarnings("ignore:`return_outputs=True`:FutureWarning")
@pytest.mark.parametrize("method", ["compute_loss", "prediction_step"])
def test_a_loss_of_a_subclass_is_evaluated_as_in_trl_and_said_so_once(method, tmp_path, caplog):
    def built(base=SFTTrainer, packing=False, **settings):
        settings |= {"packing": packing, "eval_dataset": texts(20), "per_device_eval_batch_size": 7}
        return build_trainer(tmp_path, texts(20), trainer_class=doubling(base, method), **settings)

    ours = built()
    expected = built(trl.SFTTrainer).evaluate()["eval_loss"]
    losses = [ours.evaluate()["eval_loss"] for _ in range(2)]
    assert losses == [pytest.approx(expected, rel=1e-6)] * 2
    assert caplog.text.count(f"`eval_loss` is the mean over batches of `Doubling.{method}`, as in TRL") == 1
    logged = ours.state.log_history[-1]
    assert 0 < logged["eval_entropy"] < expected  # TRL's names are all there
    # also with logits, and packed: then their loss gets packs, as in training
    assert built(compute_metrics=lambda _: {}).evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    packed = built(packing=True)
    assert packed.evaluate()["eval_loss"] == pytest.approx(expected, rel=0.01)
    assert {"cu_seq_lens_q" in batch for batch in packed.batches} == {True}


@pytest.mark.parametrize("packing", [True, False])
def test_predictions_are_in_the_order_of_the_rows_whichever_worker_is_first(packing, tmp_path, caplog):
    data = partly_trained(7)
    settings = {"packing": packing, "eval_packing": False, "per_device_eval_batch_size": 2}
    expected = build_trainer(tmp_path, texts(), **settings).predict(data)
    workers = {"dataloader_num_workers": 2, "dataloader_in_order": False}
    trainer = build_trainer(tmp_path, texts(), **settings, **workers)
    make_collator = trainer.data.reading.padded_collator

    def slow_in_first_worker(collate):
        collate = make_collator(collate)

        def collate_late(documents):
            time.sleep(0.3 * (get_worker_info().id == 0))
            return collate(documents)

        return collate_late

    trainer.data.reading.padded_collator = slow_in_first_worker
    for _ in range(2):
        assert np.array_equal(trainer.predict(data).label_ids, expected.label_ids)
    assert caplog.text.count("dataloader_in_order=False was given; batches of a table stay in order") == 1


# Sets without a trained token: 0.0 would be the best loss of all

ANSWERS = Dataset.from_dict({"prompt": ["some words"] * 6, "completion": ["yes", "no"] * 3})
BEYOND = Dataset.from_dict({"prompt": ["word " * 30] * 3, "completion": ["yes"] * 3})  # 64 tokens do not reach it
REFUSED = r"Cannot compute `eval{}_loss`: of 462 tokens in 3 documents, 12 have a label.*0 after truncation to "
REFUSED += r"`max_length=64`.*0.0 would make this the best checkpoint.*Raise `max_length`"


@pytest.mark.parametrize("packing", [True, False])
def test_a_loss_of_no_token_is_refused_before_the_first_step(packing, tmp_path):
    for sets, name in ((BEYOND, ""), ({"good": ANSWERS, "bad": BEYOND}, "_bad")):
        trainer = build_trainer(tmp_path, ANSWERS, eval_dataset=sets, packing=packing, eval_steps=1)
        with pytest.raises(ValueError, match=REFUSED.format(name)):
            trainer.train()
        assert trainer.state.global_step == 0
        assert not trainer.state.log_history
        with pytest.raises(ValueError, match=REFUSED.format(name)):
            trainer.evaluate()
    with pytest.raises(ValueError, match=REFUSED.format("_later")):
        trainer.evaluate({"later": BEYOND})
    with pytest.raises(ValueError, match=REFUSED.format("")):
        trainer.evaluate(trainer.eval_dataset["bad"].to_iterable_dataset())
    trainer.args.max_length = 256
    assert trainer.evaluate(BEYOND)["eval_loss"] > 1


@pytest.mark.parametrize("packing", [True, False])
def test_predictions_and_metrics_of_rows_without_a_trained_token_have_no_loss(packing, tmp_path):
    options = {"packing": packing, "max_steps": 1, "eval_steps": 1, "compute_metrics": count_rows}
    trainer = run_training(tmp_path, ANSWERS, eval_dataset=BEYOND, **options)
    metrics = trainer.evaluate()
    assert metrics["eval_rows"] == 3
    assert "eval_loss" not in metrics
    predicted = trainer.predict(trainer.eval_dataset)
    assert predicted.predictions.shape[0] == 3
    assert "test_loss" not in predicted.metrics


class MeanLoss(SFTTrainer):
    """Takes the mean over the trained tokens of a batch, which is 0 / 0 without any."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def test_packs_without_a_trained_token_do_not_count_in_the_users_mean(tmp_path):
    """A rank that has no documents left evaluates such a pack, too."""
    rng = np.random.default_rng(0)
    rows = [{"input_ids": (tokens := rng.integers(4, 260, 60).tolist()), "labels": tokens} for _ in range(3)]
    untrained = {"input_ids": rows[0]["input_ids"], "labels": [-100] * 60}
    trainer = build_trainer(tmp_path, texts(), trainer_class=MeanLoss, per_device_eval_batch_size=1)
    expected = trainer.evaluate(Dataset.from_list(rows))["eval_loss"]
    loss = trainer.evaluate(Dataset.from_list([*rows, untrained]))["eval_loss"]
    assert loss == pytest.approx(expected, rel=1e-6)


def test_what_a_prediction_step_of_the_users_returns_is_the_loss_on_packs(tmp_path):
    class OneMore(MeanLoss):
        def prediction_step(self, *args, **kwargs):
            loss, *predictions = super().prediction_step(*args, **kwargs)
            return loss + 1, *predictions

    losses = [
        build_trainer(tmp_path, texts(), trainer_class=trainer_class).evaluate(texts(5))["eval_loss"]
        for trainer_class in (MeanLoss, OneMore)
    ]
    assert losses[1] == pytest.approx(losses[0] + 1, rel=1e-6)


# `predict` logs nothing, so what it has computed must not be in the next log


def test_a_prediction_adds_nothing_to_the_router_loss_of_the_next_evaluation(tmp_path):
    settings = {"router_aux_loss_coef": 0.1, "prediction_loss_only": True, "eval_dataset": partly_trained(3)}
    trainer = build_trainer(tmp_path, texts(), "mixtral", **settings)
    expected = trainer.evaluate()["eval_aux_loss"]
    trainer.predict(partly_trained())
    assert trainer.evaluate()["eval_aux_loss"] == pytest.approx(expected, rel=1e-9)


def test_a_prediction_is_not_in_the_first_log_of_a_training(tmp_path):
    trainer = build_trainer(tmp_path, texts(), max_steps=1)
    trainer.predict(partly_trained())
    trainer.train()
    first = trainer.state.log_history[0]
    assert "isolation/max_change" in first
    assert not [name for name in first if name.startswith("eval")]


# Decisions that stand on evaluation


@pytest.mark.parametrize("eval_packing", [True, False])
def test_the_best_model_and_early_stopping_stand_on_exact_numbers(eval_packing, tmp_path):
    settings = {"max_steps": 60, "learning_rate": 3e-2, "eval_packing": eval_packing, "per_device_eval_batch_size": 5}
    settings |= {"eval_steps": 4, "save_steps": 4, "eval_dataset": texts(23, seed=1)}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_total_limit": 2}
    trainer = run_training(tmp_path, texts(6), callbacks=[EarlyStoppingCallback(2)], **settings)
    losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    best = min(losses, key=losses.get)
    assert trainer.state.global_step == best + 8 < 60, "stopped two evaluations after the best"
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (losses[best], best)
    trainer.args.per_device_eval_batch_size = 1
    trainer.args.eval_packing = not eval_packing
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[best], rel=1e-6), "the best model was loaded"


@trl_trains
@evaluates_own_losses
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("labels", [None, "int32"])
def test_labels_of_any_integer_type_are_predicted_on_as_in_trl(labels, packing, tmp_path):
    """`datasets` stores tokens as int32, and without `labels` the tokens are the labels."""
    rng = np.random.default_rng(0)
    data = Dataset.from_dict({"input_ids": [rng.integers(4, 260, n).tolist() for n in rng.integers(3, 30, 7)]})
    if labels is not None:
        data = data.add_column("labels", data["input_ids"]).cast_column("labels", [Value("int32")])
    assert all(feature.feature.dtype == "int32" for feature in data.features.values())

    def metric(prediction):
        return {"right": float((prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]).sum())}

    def loss(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    results = []
    for make, settings in ((build_trainer, {"packing": packing}), (stock, {})):
        settings |= {"eval_dataset": data, "compute_metrics": metric, "per_device_eval_batch_size": 3}
        trainer = make(tmp_path, data, **settings)
        evaluated = trainer.evaluate()
        predicted = trainer.predict(data)
        loss_of_user = make(tmp_path, data, compute_loss_func=loss, **settings).evaluate()["eval_loss"]
        results.append((evaluated["eval_right"], loss_of_user, predicted.label_ids))
        assert np.isfinite(evaluated["eval_loss"])
        assert len(predicted.predictions) == 7
    for ours, theirs in zip(*results, strict=True):
        assert np.asarray(ours).dtype == np.asarray(theirs).dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
