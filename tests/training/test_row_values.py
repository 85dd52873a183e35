"""Weights per row and losses per source: equal to a loop written by hand, for every way of training, or refused."""

from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, concatenate_datasets, load_from_disk
from support.chats import answer, user
from support.models import build_tiny_model, build_tokenizer
from support.rounding import loss_difference, weight_difference
from support.runs import (
    build_trainer,
    config,
    gradient_of,
    log_of_steps,
    plain_sgd,
    record_steps,
    run_training,
    start_weights,
    texts,
    tokenised,
    weights,
    weights_of,
)
from support.runs import documents_of as tokens_and_labels_of
from test_objective import first_step, gradients

from trl_packfix.cli import main
from trl_packfix.data import row_values
from trl_packfix.data.row_values import MAX_SOURCES
from trl_packfix.training.objective import Objective

pytestmark = pytest.mark.slow

SOURCES = ("code", "chat", "math")
WEIGHTS = (0.0, 0.3, 1.0, 2.5, 7.0)


@dataclass(frozen=True)
class Document:
    tokens: list[int]
    labels: list[int]
    weight: float
    source: str


def weighted_rows(num: int = 24, seed: int = 0) -> Dataset:
    """Return rows of 4 to 60 tokens, of which one to all are trained; sources come in runs, unevenly."""
    rng = np.random.default_rng(seed)
    return tokenised(
        rng,
        rng.integers(4, 61, num),
        lambda i, length: rng.integers(1, length),
        share=lambda i: WEIGHTS[(3 * i + i // 5) % len(WEIGHTS)],
        source=lambda i: SOURCES[min(i % 7 // 2, 2)],
    )


def documents_of(batch: dict, rows: list[dict]) -> list[Document]:
    """Return the trained documents of a batch, packed or padded, without padding.

    Each document has the weight and the source of its row.
    """
    documents = []
    for tokens, labels in tokens_and_labels_of(batch):
        if set(labels[1:]) - {-100}:
            (row,) = [row for row in rows if str(tokens)[1:-1] in str(row["input_ids"])]
            documents.append(Document(tokens, labels, row["share"], row["source"]))
    return documents


def loss_by_hand(model, documents, weighting, uses_weights=True, **loss):
    """Return sum(w_d * loss_t) / sum(w_d) over trained tokens, or sum(w_d * mean_d) / sum(w_d) over documents."""
    above = torch.zeros((), dtype=torch.float64)
    below = 0.0
    for document in documents:
        weight = document.weight if uses_weights else 1.0
        losses = token_losses(model, document, **loss)
        if weighting == "document":
            above = above + weight * losses.mean()
            below = below + weight
        else:
            above = above + weight * losses.sum()
            below = below + weight * len(losses)
    return above / (below or 1.0)


def token_losses(model, document, loss_type="nll", label_smoothing_factor=0.0):
    """Return the losses of the trained tokens of one document alone, in fp64."""
    log_probs = model(torch.tensor([document.tokens])).logits[0, :-1].double().log_softmax(-1)
    targets = torch.tensor(document.labels[1:])
    log_prob = log_probs[torch.arange(len(targets)), targets.clamp(min=0)][targets != -100]
    log_prob = (1 - label_smoothing_factor) * log_prob + label_smoothing_factor * log_probs.mean(-1)[targets != -100]
    return -log_prob * (log_prob.exp().detach() if loss_type == "dft" else 1)


def train_by_hand(model, steps, learning_rate, weighting, uses_weights=True):
    """Train by SGD; return the loss of each step, and the mean loss of each step's trained tokens by source."""
    losses = []
    by_source = []
    for documents in steps:
        model.zero_grad()
        loss = loss_by_hand(model, documents, weighting, uses_weights)
        loss.backward()
        with torch.no_grad():
            losses_of_source = defaultdict(list)
            for document in documents:
                losses_of_source[document.source] += token_losses(model, document).tolist()
            for parameter in model.parameters():
                parameter -= learning_rate * parameter.grad
        losses.append(loss.item())
        by_source.append({source: float(np.mean(values)) for source, values in losses_of_source.items()})
    return losses, by_source


ROWS = weighted_rows()
LIST = ROWS.to_list()
COLUMNS = {"weight_column": "share", "source_column": "source"}
SGD = plain_sgd(0.5)


# One step, in fp64


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("weighting", ["token", "document"])
@pytest.mark.parametrize(
    "settings",
    [
        {"packing_strategy": "stream"},
        {"packing_strategy": "minibatch"},
        {"packing_strategy": "minibatch", "loss_type": "dft"},
        {"packing_strategy": "minibatch", "label_smoothing_factor": 0.3},
        {"max_steps": 1, "label_smoothing_factor": 0.3, "source_column": None},  # a stream
        {"packing_strategy": "stream", "pad_to_multiple_of": 32},
        {"packing_strategy": "stream", "pad_documents_to_multiple_of": 16},
        {"packing_strategy": "bfd_split", "max_length": 24},
        {"packing": False},
        {"packing_strategy": "stream", "weight_column": None},
        {"packing": False, "weight_column": None},
    ],
    ids=str,
)
def test_weights_are_the_definition_by_hand(settings, weighting, tmp_path):
    model, reference = (build_tiny_model(dtype=torch.float64) for _ in range(2))
    sizes = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 3}
    data = ROWS.to_iterable_dataset() if "max_steps" in settings else ROWS
    trainer = build_trainer(tmp_path, data, model=model, document_weighting=weighting, **sizes | COLUMNS | settings)
    batches, num_items = first_step(trainer)
    documents = [document for batch in batches for document in documents_of(batch, LIST)]
    assert len(documents) > 8
    assert len({document.weight for document in documents}) == 5
    losses, gradient = gradients(trainer, batches, num_items)
    of_loss = {name: settings[name] for name in ("loss_type", "label_smoothing_factor") if name in settings}

    def errors(weighting, is_weighted):
        reference.zero_grad()
        loss = loss_by_hand(reference, documents, weighting, is_weighted, **of_loss)
        loss.backward()
        expected = gradient_of(reference)
        return float((gradient - expected).norm() / expected.norm()), abs(losses.sum().item() - loss.item())

    is_weighted = "weight_column" not in settings
    other_weighting = {"token": "document", "document": "token"}[weighting]
    assert max(errors(weighting, is_weighted)) < 1e-6  # TRL takes logarithms in fp32
    assert min(errors(weighting, not is_weighted)[0], errors(other_weighting, is_weighted)[0]) > 0.05, (
        "the weights change nothing here"
    )


# Whole runs


def trained(folder, dataset, **settings):
    return run_training(folder, dataset, max_steps=2, gradient_accumulation_steps=2, **SGD | settings)


@pytest.mark.parametrize("packing", [True, False])
def test_unset_nothing_changes_to_the_bit(packing, tmp_path):
    """A column named `weight` that is there for another reason is not read, and sources change nothing."""
    plain = trained(tmp_path, ROWS.remove_columns(["share", "source"]), packing=packing)
    named = ROWS.rename_column("share", "weight")
    for dataset, settings in ((named, {}), (ROWS, {"source_column": "source"})):
        assert torch.equal(weights(plain), weights(trained(tmp_path, dataset, packing=packing, **settings)))
    assert not torch.equal(weights(plain), weights(trained(tmp_path, ROWS, packing=packing, **COLUMNS)))


def test_a_step_of_weight_0_trains_nothing(tmp_path):
    dataset, _ = column("weight_column", [0.0] * (NUM - 1) + [1.0])
    trainer = run_training(tmp_path, dataset, packing_strategy="minibatch", max_steps=1, data_seed=1, **SGD | COLUMNS)
    assert trainer.state.log_history[1]["loss"] == 0.0
    assert torch.equal(weights(trainer), start_weights())


# Sources in evaluation


@pytest.mark.parametrize("packing", [True, False])
def test_evaluation_has_a_loss_per_source(packing, tmp_path):
    test = weighted_rows(20, seed=1)
    datasets = {"one": test, "plain": test.remove_columns("source")}
    _, ((expected),) = train_by_hand(build_tiny_model(), [all_documents(test)], 0.0, "token")
    for eval_packing in (True, False):
        settings = {"packing": packing, "eval_packing": eval_packing, "eval_dataset": datasets} | COLUMNS
        trainer = build_trainer(tmp_path, ROWS, compute_metrics=lambda _: {}, **settings)
        for compute_metrics in (trainer.compute_metrics, None):  # with a metric, full logits are computed
            trainer.compute_metrics = compute_metrics
            metrics = trainer.evaluate()
            losses = {name: metrics.get(f"eval_one_loss/{name}") for name in SOURCES}
            assert losses == pytest.approx(expected, rel=1e-5)
            tokens = {name: metrics[f"eval_one_trained_tokens/{name}"] for name in SOURCES}
            total = sum(losses[name] * tokens[name] for name in SOURCES) / sum(tokens.values())
            assert total == pytest.approx(metrics["eval_one_loss"], rel=1e-6)
            assert metrics["eval_plain_loss"] == pytest.approx(metrics["eval_one_loss"], rel=1e-6)
            assert not [key for key in metrics if key.startswith("eval_plain") and "/" in key]
        assert any("eval_one_loss/code" in entry for entry in trainer.state.log_history)


def all_documents(rows):
    documents = [Document(row["input_ids"], row["labels"], row["share"], row["source"]) for row in rows]
    return [document for document in documents if set(document.labels[1:]) - {-100}]


def test_sources_may_be_classes_or_numbers(tmp_path):
    classes = ROWS.cast_column("source", ClassLabel(names=["chat", "code", "math", "unused"]))
    numbers = ROWS.remove_columns("source").add_column("source", [SOURCES.index(name) for name in ROWS["source"]])
    for dataset, names in ((classes, set(SOURCES)), (numbers, {"0", "1", "2"})):
        for packing in (True, False):
            trainer = trained(tmp_path, dataset.shuffle(seed=0), packing=packing, source_column="source")
            logged = {key for entry in log_of_steps(trainer) for key in entry}
            assert {key.removeprefix("loss/") for key in logged if key.startswith("loss/")} == names


# Streams and prepared tables


@pytest.mark.parametrize("is_stream, weighting", [(True, "token"), (False, "token"), (False, "document")])
@pytest.mark.parametrize("packing", [True, False])
def test_a_run_and_its_restart_are_the_loop_by_hand(packing, is_stream, weighting, tmp_path):
    common = {"max_steps": 6, "packing": packing, "document_weighting": weighting, "gradient_accumulation_steps": 2}
    common |= COLUMNS | SGD
    data = ROWS.to_iterable_dataset(2) if is_stream else ROWS
    unbroken = build_trainer(tmp_path, data, save_steps=3, **common)
    batches_of_steps = record_steps(unbroken)
    unbroken.train()
    model = build_tiny_model()
    steps = [[document for batch in step for document in documents_of(batch, LIST)] for step in batches_of_steps]
    assert {document.weight for step in steps for document in step} > {0.0, 7.0}
    losses, by_source = train_by_hand(model, steps, 0.5, weighting)
    assert weight_difference(weights(unbroken), weights_of(model), start_weights()) < 5e-5
    entries = log_of_steps(unbroken)
    assert len(entries) == 6
    assert loss_difference([entry["loss"] for entry in entries], losses) < 1e-5
    assert min(map(len, by_source)) < len(SOURCES) or not is_stream, "no step lacks a source"
    for entry, expected in zip(entries, by_source, strict=True):
        assert {name: entry.get(f"loss/{name}") for name in expected} == pytest.approx(expected, rel=1e-5)
        tokens = [value for key, value in entry.items() if key.startswith("trained_tokens/")]
        assert len(tokens) == len(expected)
        assert sum(tokens) == entry["trained_tokens"]
    resumed = run_training(tmp_path / "resumed", data, **common, checkpoint=tmp_path / "checkpoint-3")
    assert torch.equal(weights(unbroken), weights(resumed))

    def counted(entries):
        return [{name: entry[name] for name in entry if name.startswith(("loss", "trained_"))} for entry in entries]

    assert counted(log_of_steps(resumed)[-3:]) == counted(entries[-3:])


@pytest.mark.processes
def test_sources_of_an_unpacked_stream_are_those_of_the_table(tmp_path):
    """Workers each read a shard, and meet the sources in another order than the trainer does."""
    shards = [ROWS.shard(2, i, contiguous=True) for i in range(2)]
    batches = [shard.select(range(2 * i, 2 * i + 2)) for i in range(len(shards[0]) // 2) for shard in shards]
    table = concatenate_datasets(batches)
    stream = concatenate_datasets(shards).to_iterable_dataset(2)
    common = {"max_steps": 5, "packing": False, "per_device_train_batch_size": 2, "dataloader_num_workers": 2}
    common |= {"gradient_accumulation_steps": 2, "train_sampling_strategy": "sequential"} | SGD | COLUMNS
    of_table, of_stream = (run_training(tmp_path, rows, **common) for rows in (table, stream))
    entries, entries_of_stream = (
        [{name: value for name, value in entry.items() if "/" in name} for entry in log_of_steps(trainer)]
        for trainer in (of_table, of_stream)
    )
    assert entries == entries_of_stream
    assert {name for entry in entries for name in entry} >= {f"loss/{name}" for name in SOURCES}
    assert torch.equal(weights(of_table), weights(of_stream))


def test_sources_of_a_stream_are_copied_to_the_device_without_a_wait(monkeypatch):
    """The host has them in each micro-batch, when the forward is still running on a GPU."""
    objective = object.__new__(Objective)
    objective.row_values = {row_values.SOURCES: torch.tensor([7, 9])}
    copies = []
    copy = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda *args, **options: copies.append(options) or copy(*args, **options))
    assert objective.sources_of(SimpleNamespace(documents=torch.tensor([1, 0, 1]))).tolist() == [9, 7, 9]
    assert copies == [{"non_blocking": True}]


def column(name, values, **settings):
    return ROWS.remove_columns("share").add_column("share", values), {name: "share"} | settings


NUM = len(ROWS)
MANY = Dataset.from_dict({"input_ids": [[5, 6, 7]] * 300, "id": [f"row {i // 2}" for i in range(300)]})
BAD = [1.0] * 5 + [-2.0] * (NUM - 5)
BAD_WHERE_READ = {
    "no source": (
        *column("source_column", ["a", "b", *[None] * 22], packing=False),
        r"row 2 of .* holds None. .* that many rows",
    ),
    "floats": (*column("source_column", [0.5] * NUM, packing=False), r"row 0 of .* holds 0.5. .* that many rows"),
    "many": (MANY, {"source_column": "id"}, rf"more than {MAX_SOURCES} different values \(row \d+, "),
    "weight": (*column("weight_column", BAD), r"first are \[5, 6.*row 5 holds -2.0.*rows are counted from number 0"),
    "unpacked": (*column("weight_column", BAD, packing=False), r"row 5 of the train stream holds -2.0.*of 0 or more"),
    "booleans": (
        *column("weight_column", [True] * NUM, packing=False),
        r"row 0 of the train stream holds True.*number",
    ),
    "infinite in a batch": (*column("weight_column", [1e39] * NUM, packing=False), r"row 0 of .* holds 1e\+39"),
    "packed booleans": (*column("weight_column", [True] * NUM), r"has type bool \(row 0 holds 'True'\).*is a number"),
}


@pytest.mark.parametrize("name", BAD_WHERE_READ)
def test_a_stream_refuses_bad_values_where_it_reads_them(name, tmp_path):
    dataset, settings, message = BAD_WHERE_READ[name]
    settings = {"max_steps": 4, "per_device_train_batch_size": 8} | settings
    trainer = build_trainer(tmp_path, dataset.to_iterable_dataset(), **settings)
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_a_prepared_table_keeps_the_columns(tmp_path):
    tokenizer = tmp_path / "tokenizer"
    build_tokenizer().save_pretrained(tokenizer)
    raw = texts(24).add_column("share", ROWS["share"]).add_column("source", ROWS["source"])
    raw.to_parquet(tmp_path / "rows.parquet")
    words = ["prepare", str(tmp_path / "rows.parquet"), "--tokenizer", str(tokenizer), "--output"]
    assert main([*words, str(tmp_path / "table"), "--weight-column", "share", "--source_column", "source"]) == 0
    table = load_from_disk(tmp_path / "table")
    assert set(table.column_names) == {"input_ids", "labels", "share", "source"}
    assert table["share"] == raw["share"]


def test_dropped_rows_take_their_weights_with_them(tmp_path):
    """Rows that cannot be tokenised, or have nothing to train, do not shift the weights of others."""
    rows = [{"messages": [user("why")], "share": 9.0, "source": "x"}] * 3
    because = answer("because")
    rows += [{"messages": [user("a" * i), because], "share": 1.0, "source": "y"} for i in range(9)]
    rows.insert(5, {"messages": [user(None), because], "share": 9.0, "source": "z"})
    for packing in (True, False):
        settings = {"bad_rows": "drop", "assistant_only_loss": True, "packing": packing, "shuffle_dataset": True}
        trainer = build_trainer(tmp_path, Dataset.from_list(rows), per_device_train_batch_size=9, **COLUMNS | settings)
        batches, _ = first_step(trainer)
        for batch in batches:
            assert (batch["labels"][:, 1:] != -100).any()
            assert set(batch["document_weights"].tolist()) == {1.0}


# Refusals

REFUSED = {
    "no column": (ROWS, {"weight_column": "weight"}, r"`weight_column='weight'` was given, and the train dataset has"),
    "no source": (ROWS, {"source_column": "from"}, r"`source_column='from'` was given.*has the columns \['input_ids'"),
    "negative": (*column("weight_column", [1.0, 1.0, -0.5] * 8), r"8 of 24 rows .* first are \[2, 5, .*row 2 holds -0"),
    "nan": (*column("weight_column", [1.0] * 23 + [float("nan")]), r"1 of 24 rows .* \[23\], and row 23 holds nan"),
    "infinite": (*column("weight_column", [float("inf")] + [1.0] * 23), r"\[0\], and row 0 holds inf"),
    "missing": (*column("weight_column", [1.0, None] * 12), r"12 of 24 rows .*row 1 holds None"),
    "a string": (*column("weight_column", ["0.5"] * NUM), r"this column has type string \(row 0 holds '0.5'\).*number"),
    "booleans": (*column("weight_column", [True] * NUM), r"this column has type bool \(row 0 holds 'True'\).*number"),
    "all 0": (*column("weight_column", [0.0] * NUM), r"all 24 rows of the train dataset have weight 0"),
    "floats": (*column("source_column", [0.5] * NUM), r"`source_column='share'` was given.*has type double"),
    "a list": (ROWS, {"source_column": "labels"}, r"has type list<.*names? that many rows share|type list"),
    "no name": (*column("source_column", ["a", None] * 12), r"12 of 24 rows .* hold None there; the first are \[1, 3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused(name, tmp_path):
    dataset, settings, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        build_trainer(tmp_path, dataset, **settings)


def test_too_many_sources_are_refused(tmp_path):
    num = MAX_SOURCES + 1
    data = Dataset.from_dict({"input_ids": [[5, 6, 7]] * num, "id": [f"row {i}" for i in range(num)]})
    message = rf"it has {num} different values \(row 0, .*at most {MAX_SOURCES}"
    with pytest.raises(ValueError, match=message):
        build_trainer(tmp_path, data, source_column="id")
    assert build_trainer(tmp_path, data.select(range(MAX_SOURCES)), source_column="id")


def test_an_evaluation_set_with_a_bad_source_is_refused_before_training(tmp_path):
    test = ROWS.remove_columns("source").add_column("source", np.linspace(0, 1, NUM).astype(np.float32))
    trainer = build_trainer(tmp_path, ROWS, eval_strategy="epoch", eval_dataset=test, source_column="source")
    with pytest.raises(ValueError, match="in the evaluation dataset this column has type float"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert config(tmp_path).source_column is None
