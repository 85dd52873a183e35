"""Training on packs with images: against unpacked TRL, on one rank and two, with adapters, checkpointing, restarts."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import trl
from accelerate.utils import DistributedType
from features.images.processed import documents_of
from support.paths import ROOT
from support.rounding import LIMIT, weight_difference
from support.runs import config, gradient_of, weights
from support.vision import ROWS, SGD, build_model, make, message, rows
from torch.nn.utils import parameters_to_vector

from trl_packfix import SFTTrainer
from trl_packfix.data.rank_share import RankShare
from trl_packfix.group import Group
from trl_packfix.layout import layout_of

pytestmark = pytest.mark.slow

UNPACKED = {"packing": False, "max_length": None, "config_class": trl.SFTConfig}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
def test_fragments_train_as_documents_of_their_own(family, tmp_path):
    """Fragments train in packs to the gradient that they give alone, in batches of one."""
    settings = {"packing_strategy": "bfd_split", "max_length": 56, "per_device_train_batch_size": 6, "max_steps": 1}
    trainer = make(tmp_path, family, **settings)
    assert trainer.data.source.documents.ledger.split.documents > 2
    loader = trainer.get_train_dataloader()
    spans = trainer.data.source.documents
    packs = zip(loader, trainer.data.source.planner.schedule(0).micro_batches(0), strict=True)
    # The first pack with a later fragment that has an image
    batch, documents = next(
        (batch, pack.tolist())
        for batch, pack in packs
        if ((spans.start[pack] > 0) & (spans.image_count[pack] > 0)).any()
    )
    assert len(documents) == layout_of(batch).document_count
    trainer.model.train()
    with trainer.packed_model.attending():
        trainer.compute_loss(
            trainer.model, trainer._prepare_inputs(dict(batch)), num_items_in_batch=torch.tensor(1)
        ).backward()
    unpacked = build_model(family).train()
    for i in documents:
        document = trainer.data.source.reader.read(spans.row[i], spans.start[i], spans.stop[i])
        logits = unpacked(**trainer.data.reading.examples.unpacked_batch(document)).logits[0, :-1]
        labels = torch.as_tensor(document["labels"])[1:]
        torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100).backward()
    packed, expected = map(gradient_of, (trainer.model, unpacked))
    assert (packed - expected).norm() / expected.norm() < 1e-5


def test_a_pack_that_ranks_share_counts_once(tmp_path):
    """Count the FLOPs of the pack in the tower once, too: each rank of a group gets all its images."""
    trainer = make(tmp_path)
    documents = documents_of(trainer.data.source.reader)[:4]

    def counted(*packs):
        for pack in packs:
            batch = trainer.data_collator(pack)
            layout = layout_of(batch)
            trainer.training_objective.count_batch(
                batch, layout, layout.targets(batch["labels"][:, 1:] != -100).trained
            )
        sums = trainer.training_objective.totals.gather(trainer.accelerator)
        return [sums[name] for name in ("flops", "tokens", "trained_tokens", "documents")]

    text = [{name: document[name] for name in ("input_ids", "labels")} for document in documents]
    expected = counted(documents)
    assert expected[0] > 1.01 * counted(text)[0], "no FLOPs in the tower"
    assert counted(*(RankShare(documents, Group(2, index)) for index in range(2))) == pytest.approx(expected, rel=1e-12)


# Evaluation


def test_evaluation_is_the_same_for_every_batch(tmp_path):
    held_out = rows(11, seed=5)
    model = build_model("qwen2_5_vl")
    losses = []
    for settings in ({}, {"per_device_eval_batch_size": 2}, {"eval_packing": False}):
        trainer = make(tmp_path, model=model, eval_dataset=held_out, **settings)
        losses.append(trainer.evaluate()["eval_loss"])
    # by TRL, one row at a time, weighted by its trained tokens
    trainer = make(tmp_path, model=model, trainer_class=trl.SFTTrainer, **UNPACKED)
    total = count = 0.0
    model.eval()
    for row in held_out:
        batch = trainer.data_collator([dict(row)])
        trained = (batch["labels"][:, 1:] != -100).sum().item()
        with torch.no_grad():
            total += model(**batch).loss.item() * trained
        count += trained
    assert losses == pytest.approx([total / count] * 3, rel=2e-6)


def test_predictions_have_a_row_for_every_row(tmp_path):
    held_out = rows(5, seed=5)
    trainer = make(tmp_path)
    predicted = trainer.predict(held_out)
    lengths = trainer.data.reading.make_reader(held_out, "x").lengths
    assert len(predicted.predictions) == 5
    assert (predicted.label_ids != -100).sum(1).tolist() == lengths.tolist()


def test_an_evaluation_set_of_text_is_evaluated(tmp_path):
    plain = [message("user", "a"), message("assistant", "bc")]
    text = rows(6, seed=5).remove_columns("images").map(lambda row: {"messages": plain})
    trainer = make(tmp_path, eval_dataset=text)
    assert trainer.evaluate()["eval_loss"] > 0


def test_padded_evaluation_that_would_make_ranks_wait_is_refused(tmp_path):
    trainer = make(tmp_path)
    plugin = SimpleNamespace(zero_stage=3)
    sharded = SimpleNamespace(distributed_type=DistributedType.DEEPSPEED, deepspeed_plugin=plugin, num_processes=2)

    def check_padded(accelerator):
        trainer.data.reading._trainer = SimpleNamespace(accelerator=accelerator)
        trainer.data.reading.check_padded(trainer.data.source.reader)

    with pytest.raises(ValueError, match=r"(?s)of 40 rows of an evaluation set have no image.*2 ranks.*would wait"):
        check_padded(sharded)
    check_padded(trainer.accelerator)
    plugin.zero_stage = 2
    check_padded(sharded)


# Restart (that one is exact: `test_distributed.py`)


def test_the_best_model_is_loaded_where_weights_are_saved_under_other_names(tmp_path, caplog):
    """transformers would warn of missing keys, and keep the last weights."""
    settings = SGD | {"max_steps": 2, "load_best_model_at_end": True, "greater_is_better": True}
    settings |= dict.fromkeys(("eval_strategy", "save_strategy"), "steps") | {"eval_steps": 1, "save_steps": 1}
    trainer = make(tmp_path, "qwen2_5_vl", **settings, eval_dataset=rows(4))
    trainer.train()
    best, last = (
        type(trainer.model).from_pretrained(tmp_path / f"checkpoint-{step}", dtype=torch.float32) for step in (1, 2)
    )
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    assert "missing keys" not in caplog.text
    loaded, best, last = (parameters_to_vector(model.parameters()) for model in (trainer.model, best, last))
    assert torch.equal(loaded, best)
    assert not torch.equal(best, last)


def test_other_text_beside_the_same_images_is_another_dataset(tmp_path):
    few = ROWS.select(range(16))
    chat = [message("user", "other", len(few[0]["images"])), message("assistant", "c")]
    changed = few.map(lambda row, i: row | ({"messages": chat} if i == 0 else {}), True, features=ROWS.features)
    fingerprints = [make(tmp_path, dataset=data).data.source.documents.fingerprint for data in (few, few, changed)]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


# The example


def test_the_example_trains_on_the_digits_that_it_draws(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import train_vision

    dataset = train_vision.digits(12, seed=0)
    counts = {len(images) for images in dataset["images"]}
    assert counts >= {0, 1, 2}
    assert train_vision.draw(3, np.random.default_rng(0)).size == (24, 24)
    model, processor = train_vision.small_llava()
    args = config(tmp_path, max_length=128, max_steps=1, per_device_train_batch_size=4)
    trainer = SFTTrainer(model, args, train_dataset=dataset, processing_class=processor)
    trainer.train()
    documents = trainer.data.source.documents
    answers = sum(max(len(images), 1) for images in dataset["images"])
    assert documents.ledger.kept.trained_tokens == answers + len(dataset), "each answer and its end are trained"
    assert 0 <= train_vision.accuracy(model, processor, dataset.select(range(3))) <= 1


# Weights and sources of rows


def test_rows_with_images_have_their_weights_and_sources(tmp_path):
    """Rows of weight 0 train nothing, so the others train alone; and each source has the loss of its rows."""
    few = ROWS.select(range(12))
    share = [0.0 if i % 3 == 1 else 1.0 for i in range(12)]
    source = ["images" if images else "text" for images in few["images"]]
    weighted = few.add_column("share", share).add_column("source", source)
    settings = SGD | {"packing_strategy": "minibatch", "per_device_train_batch_size": 12, "max_steps": 1}
    columns = {"weight_column": "share", "source_column": "source", "eval_dataset": weighted}
    trainer = make(tmp_path, dataset=weighted, **columns, **settings)
    # before training: the loss of each source is that of its rows alone, without weights
    metrics = trainer.evaluate()
    start_weights = weights(trainer)
    for name in ("text", "images"):
        rows_of = weighted.select([i for i in range(12) if source[i] == name])
        assert metrics[f"eval_loss/{name}"] == pytest.approx(trainer.evaluate(rows_of)["eval_loss"], rel=1e-5)
    trainer.train()
    without_zeros = make(tmp_path, dataset=few.select([i for i in range(12) if share[i]]), **settings)
    without_zeros.train()
    assert weight_difference(weights(trainer), weights(without_zeros), start_weights) <= LIMIT
