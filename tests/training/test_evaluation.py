"""Evaluation: exact numbers whatever the batches, one result per row, and the decisions that stand on them."""

import logging

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset, Value
from support.models import build_tiny_model, build_tokenizer
from support.runs import build_trainer, config, texts
from support.versions import evaluates_own_losses, trl_trains
from torch.nn import functional as F
from transformers import EarlyStoppingCallback

from trl_packfix import SFTTrainer

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
    sums = torch.zeros(4, dtype=torch.float64)
    for row in data:
        with torch.no_grad():
            log_probs = model(torch.tensor([row["input_ids"]])).logits[0, :-1].double().log_softmax(-1)
        labels = torch.tensor(row["labels"][1:])
        log_probs = log_probs[labels != -100]
        labels = labels[labels != -100]
        nll = -log_probs.gather(1, labels[:, None]).sum()
        entropy = -(log_probs.exp() * log_probs).sum()
        sums += torch.stack([nll, entropy, (log_probs.argmax(1) == labels).sum(), torch.tensor(len(labels))])
    return dict(zip(("loss", "entropy", "mean_token_accuracy"), (sums[:3] / sums[3]).tolist(), strict=True))


@pytest.mark.parametrize("packing, eval_packing", [(True, None), (True, False), (False, True), (False, None)])
@pytest.mark.parametrize("batch_size", [1, 7])
def test_loss_entropy_and_accuracy_are_ratios_of_totals(packing, eval_packing, batch_size, tmp_path):
    data = partly_trained()
    model = build_tiny_model(tie_word_embeddings=True)
    settings = {"packing": packing, "eval_packing": eval_packing, "per_device_eval_batch_size": batch_size}
    settings["loss_type"] = "dft"  # of training: evaluation is the negative log-likelihood
    trainer = build_trainer(tmp_path, texts(), model, {"eval_dataset": data}, **settings)
    metrics = trainer.evaluate()
    logged = trainer.state.log_history[-1]
    expected = by_hand(build_tiny_model(tie_word_embeddings=True), data)
    for name, value in expected.items():
        assert logged[f"eval_{name}"] == pytest.approx(value, rel=1e-6), name
    assert metrics["eval_loss"] == logged["eval_loss"]
    assert expected["mean_token_accuracy"] > 0
    # an evaluation set may be called "train"; rows without a trained token are rows
    assert trainer.evaluate({"train": data})["eval_train_loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert [
        len(trainer._prepare_dataset(data, None, trainer.args, packing, None, name)) for name in ("train", "b")
    ] == [23, 23]
    assert metrics["eval_samples_per_second"] == pytest.approx(23 / metrics["eval_runtime"], rel=0.02)


def test_packs_of_an_evaluation_have_the_size_of_its_own_batches(tmp_path):
    """8 documents of 16 tokens: with a batch size of 4, as for padded batches, two packs of 64."""
    data = Dataset.from_dict({"input_ids": [[9] * 16] * 8})
    sizes = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 4, "max_length": 16}
    for packing in (True, False):
        trainer = build_trainer(tmp_path, data, trainer_kwargs={"eval_dataset": data}, packing=packing, **sizes)
        shapes = [batch["input_ids"].shape for batch in trainer.get_eval_dataloader()]
        assert shapes == ([(1, 64)] if packing else [(4, 16)]) * 2


def test_an_evaluation_set_is_truncated_whatever_training_does(tmp_path):
    settings = {"trainer_kwargs": {"eval_dataset": texts(20, seed=1)}, "max_length": 16}
    trainers = [
        build_trainer(tmp_path, texts(), overlong=overlong, **settings) for overlong in ("truncate", "split", "drop")
    ]
    assert len({trainer.evaluate()["eval_loss"] for trainer in trainers}) == 1


def test_metrics_receive_documents_and_prediction_one_result_per_row(tmp_path):
    data = partly_trained()
    shapes = {"logits": []}

    def preprocess(logits, labels):
        shapes["logits"].append((logits.shape[:2], labels.shape))
        return logits.argmax(-1)

    def metric(prediction):
        shapes["prediction"] = prediction
        return {"rows": len(prediction.label_ids)}

    options = {"eval_dataset": data, "compute_metrics": metric, "preprocess_logits_for_metrics": preprocess}
    trainer = build_trainer(tmp_path, texts(), trainer_kwargs=options, per_device_eval_batch_size=4)
    assert trainer.evaluate()["eval_rows"] == 23
    assert all(logits == labels and logits[0] == 4 for logits, labels in shapes["logits"])
    labels = shapes["prediction"].label_ids
    tops = shapes["prediction"].predictions
    model = build_tiny_model()
    for row, document in enumerate(data):
        length = len(document["input_ids"])
        assert labels[row, :length].tolist() == document["labels"]
        assert (labels[row, length:] == -100).all()
        with torch.no_grad():
            top = model(torch.tensor([document["input_ids"]])).logits[0].argmax(-1)
        assert tops[row, :length].tolist() == top.tolist()
    predicted = trainer.predict(data)
    assert predicted.predictions.shape[0] == 23
    assert predicted.metrics["test_rows"] == 23
    assert predicted.metrics["test_loss"] == pytest.approx(by_hand(model, data)["loss"], rel=1e-6)


@evaluates_own_losses
@trl_trains
def test_a_loss_function_of_the_user_is_evaluated_as_in_trl_and_said_so(tmp_path, caplog):
    def loss(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) * 0 + 7

    with pytest.warns(FutureWarning, match="compute_loss_func"):
        trainer = build_trainer(tmp_path, texts(), trainer_kwargs={"eval_dataset": texts(), "compute_loss_func": loss})
    with caplog.at_level(logging.WARNING):
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
    def built(base, packing=False, **trainer_kwargs):
        args = config(tmp_path, packing=packing, per_device_eval_batch_size=7)
        data = texts(20)
        kwargs = {"train_dataset": data, "eval_dataset": data, "processing_class": build_tokenizer()} | trainer_kwargs
        return doubling(base, method)(build_tiny_model(), args, **kwargs)

    ours = built(SFTTrainer)
    expected = built(trl.SFTTrainer).evaluate()["eval_loss"]
    with caplog.at_level(logging.WARNING):
        losses = [ours.evaluate()["eval_loss"] for _ in range(2)]
    assert losses == [pytest.approx(expected, rel=1e-6)] * 2
    assert caplog.text.count(f"`eval_loss` is the mean over batches of `Doubling.{method}`, as in TRL") == 1
    logged = ours.state.log_history[-1]
    assert 0 < logged["eval_entropy"] < expected  # TRL's names are all there
    # also with logits, and packed: then their loss gets packs, as in training
    assert built(SFTTrainer, compute_metrics=lambda _: {}).evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    packed = built(SFTTrainer, packing=True)
    assert packed.evaluate()["eval_loss"] == pytest.approx(expected, rel=0.01)
    assert all("cu_seq_lens_q" in batch for batch in packed.batches)
    assert packed.batches


# Sets without a trained token: 0.0 would be the best loss of all

ANSWERS = Dataset.from_dict({"prompt": ["some words"] * 6, "completion": ["yes", "no"] * 3})
BEYOND = Dataset.from_dict({"prompt": ["word " * 30] * 3, "completion": ["yes"] * 3})  # 64 tokens do not reach it
REFUSED = r"Cannot compute `eval{}_loss`: of 462 tokens in 3 documents, 12 have a label.*0 after truncation to "
REFUSED += r"`max_length=64`.*0.0 would make this the best checkpoint.*Raise `max_length`"
EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 1}


@pytest.mark.parametrize("packing", [True, False])
def test_a_loss_of_no_token_is_refused_before_the_first_step(packing, tmp_path):
    for sets, name in ((BEYOND, ""), ({"good": ANSWERS, "bad": BEYOND}, "_bad")):
        trainer = build_trainer(tmp_path, ANSWERS, trainer_kwargs={"eval_dataset": sets}, packing=packing, **EVERY_STEP)
        with pytest.raises(ValueError, match=REFUSED.format(name)):
            trainer.train()
        assert trainer.state.global_step == 0
        assert not trainer.state.log_history
        with pytest.raises(ValueError, match=REFUSED.format(name)):
            trainer.evaluate()
    with pytest.raises(ValueError, match=REFUSED.format("_later")):
        trainer.evaluate({"later": BEYOND})
    stream = trainer.eval_dataset["bad"].to_iterable_dataset()
    with pytest.raises(ValueError, match=REFUSED.format("")):
        trainer.evaluate(stream)
    trainer.args.max_length = 256
    assert trainer.evaluate(BEYOND)["eval_loss"] > 1


@pytest.mark.parametrize("packing", [True, False])
def test_predictions_and_metrics_of_rows_without_a_trained_token_have_no_loss(packing, tmp_path):
    options = {"eval_dataset": BEYOND, "compute_metrics": lambda prediction: {"rows": len(prediction.label_ids)}}
    trainer = build_trainer(tmp_path, ANSWERS, trainer_kwargs=options, packing=packing, max_steps=1, **EVERY_STEP)
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_rows"] == 3
    assert "eval_loss" not in metrics
    predicted = trainer.predict(trainer.eval_dataset)
    assert predicted.predictions.shape[0] == 3
    assert "test_loss" not in predicted.metrics


# Decisions that stand on evaluation


@pytest.mark.parametrize("eval_packing", [True, False])
def test_the_best_model_and_early_stopping_stand_on_exact_numbers(eval_packing, tmp_path):
    data = texts(6)
    held_out = texts(23, seed=1)
    settings = {"max_steps": 60, "learning_rate": 3e-2, "eval_packing": eval_packing, "per_device_eval_batch_size": 5}
    settings |= {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_total_limit": 2}
    options = {"eval_dataset": held_out, "callbacks": [EarlyStoppingCallback(2)]}
    trainer = build_trainer(tmp_path, data, trainer_kwargs=options, **settings)
    trainer.train()
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
    results = []
    for kind in (SFTTrainer, trl.SFTTrainer):
        inputs = {}

        def metric(prediction, inputs=inputs):
            inputs["labels"] = prediction.label_ids
            return {"right": float((prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]).sum())}

        def loss(outputs, labels, num_items_in_batch=None):
            return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

        options = {"train_dataset": data, "eval_dataset": data, "processing_class": build_tokenizer()}
        args = config(tmp_path, packing=packing and kind is SFTTrainer, per_device_eval_batch_size=3)
        trainer = kind(build_tiny_model(), args, **options, compute_metrics=metric)
        evaluated = trainer.evaluate()
        predicted = trainer.predict(data)
        own_metrics = kind(
            build_tiny_model(), args, **options, compute_metrics=metric, compute_loss_func=loss
        ).evaluate()
        results.append((evaluated["eval_right"], own_metrics["eval_loss"], inputs["labels"], predicted.label_ids))
        assert np.isfinite(evaluated["eval_loss"])
        assert len(predicted.predictions) == 7
    for ours, stock in zip(*results, strict=True):
        assert np.asarray(ours).dtype == np.asarray(stock).dtype
        np.testing.assert_allclose(ours, stock, rtol=1e-5)
