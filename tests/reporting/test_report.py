"""What the report says about losses and about the optimisation, and where it is kept."""

import copy
import importlib.metadata
import json
from collections import Counter
from dataclasses import replace
from itertools import islice, pairwise, permutations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from packaging.version import Version
from support.models import build_tiny_model
from support.planners import make_epochs, make_stream, of_units
from support.runs import build_trainer, stock, texts, tokenised, weights, weights_of

from trl_packfix import version
from trl_packfix.attention.choice import AttentionChoice
from trl_packfix.attention.packed_forward import ATTENTION_NAME
from trl_packfix.cli.forecast import Forecast
from trl_packfix.data.documents import make_documents
from trl_packfix.data.reader import TokenReader
from trl_packfix.planning.degrees import modelled_time
from trl_packfix.reporting.build import make_report, make_stream_report
from trl_packfix.reporting.packs import ShownDocument, ShownPack, first_packs
from trl_packfix.reporting.report import metrics
from trl_packfix.training.callbacks import BeforeFirstStep, backward_note


def table(lengths):
    return Dataset.from_dict({"input_ids": [[9] * length for length in lengths]})


def counted(lengths, prompts=2, **settings):
    """Return a planner of documents of one row each, its report, and the documents of each slot of its first epoch."""
    rows = {
        "input_ids": [[9] * n for n in lengths],
        "labels": [[-100] * prompts + [9] * (n - prompts) for n in lengths],
    }
    reader = TokenReader(Dataset.from_dict(rows))
    planner = make_epochs(make_documents(reader, settings["max_length"]), "stream", **settings)
    schedule = planner.schedule(0)
    slots = [schedule.order[a:b].tolist() for a, b in pairwise(schedule.offsets.tolist())]
    return planner, make_report(planner, reader), slots


def report(tmp_path, data, **settings):
    trainer = build_trainer(tmp_path, data, **settings)
    trainer.get_train_dataloader()
    return trainer.packing_report


# One document in a pack, so that it does not matter which pack is dropped
DROPS = {"dataloader_drop_last": True, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
RAISE = "raise max_length (8)"
SPLIT = ' or set overlong="split"'
KEEP = "set dataloader_drop_last=False"


@pytest.mark.parametrize(
    "lengths, settings, lost, remedy",
    [
        ([8, 12], {}, 4 / 18, RAISE + SPLIT),
        ([8, 12], {"overlong": "drop"}, 11 / 18, RAISE + SPLIT),
        ([8, 12], {"packing_strategy": "bfd_split"}, 1 / 18, RAISE),
        ([8] * 5, DROPS, 1 / 5, KEEP),
        ([8] * 4 + [9], DROPS, 8 / 36, f"{RAISE}{SPLIT}, and {KEEP}"),
        ([8] * 300 + [9], {}, 1 / 2108, None),
    ],
)
def test_losses_above_one_percent_are_a_warning_that_names_the_remedy(lengths, settings, lost, remedy, tmp_path):
    packing_report = report(tmp_path, table(lengths), max_length=8, **settings)
    expected = None if remedy is None else f"{lost:.1%} of the trained tokens are lost: {remedy}"
    assert dict(packing_report.lines()).get("warning") == expected
    assert metrics(packing_report)["packing/lost_trained_share"] == lost == Forecast(packing_report, 0).lost
    assert packing_report.ledger.given.trained_tokens == sum(lengths) - len(lengths)
    assert packing_report.trained_tokens_not_reached == (7 if "dataloader_drop_last" in settings else 0)


def test_memory_for_many_short_documents_is_told(tmp_path, tiny_model):
    """FlashAttention-2 adds 128 fp32 rows per document in backward: for 1,024 documents of 8 tokens 2 GiB a layer."""
    packing_report = report(tmp_path, table([2, 2, 3, 8, 8]), max_length=8, packing_strategy="bfd")
    assert packing_report.most_documents == 3
    assert packing_report.to_dict()["most_documents"] == 3
    told = dict(replace(packing_report, experimental=("tokens_per_rank",)).lines())
    assert told["experimental"] == "tokens_per_rank: several GPUs have not run this yet"
    model = tiny_model("llama", hidden_size=4096, num_attention_heads=32, intermediate_size=8, num_hidden_layers=0)
    assert "needs 2.0 GiB more for the 1,024 documents of the fullest micro-batch" in backward_note(model, 1024)
    assert backward_note(model, 100) == backward_note(model, None) == ""


@pytest.mark.parametrize(
    "compiles, is_deterministic, max_length, tells",
    [
        (False, False, 32_768, True),
        (False, False, 32_767, False),
        (True, False, 32_768, False),
        (False, True, 32_768, False),
    ],
)
def test_cudnn_is_told_where_it_may_run(compiles, is_deterministic, max_length, tells, tiny_model, monkeypatch):
    """`attention/dense.py` never uses it in compiled code and with deterministic algorithms."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: is_deterministic)
    callback = object.__new__(BeforeFirstStep)
    callback._data = SimpleNamespace(shares_rows=False)
    callback._trainer = SimpleNamespace(
        args=SimpleNamespace(device=torch.device("cuda"), torch_compile=compiles),
        model=tiny_model(),
        packing_report=SimpleNamespace(most_documents=1, max_length=max_length),
        packed_model=SimpleNamespace(attention=AttentionChoice(ATTENTION_NAME, True, "sdpa", "the kernels of torch")),
    )
    text = callback._describe_attention()
    assert text.startswith("packfix_varlen: the kernels of torch")
    assert ("on cuDNN, where it is faster" in text) == tells


def test_libraries_newer_than_the_tested_ones_are_told_in_one_line(tmp_path, monkeypatch):
    installed = {name: Version(importlib.metadata.version(name)).public for name in ("torch", "transformers")}
    monkeypatch.setattr(version, "TESTED_VERSIONS", {**installed, "a library that is not installed": "1.0"})
    assert "not tested with" not in dict(report(tmp_path, table([2, 2])).lines())
    monkeypatch.setattr(version, "TESTED_VERSIONS", {"torch": "99.0", "transformers": "5.1.0", "trl": "1.0.9"})
    packing_report = report(tmp_path, table([2, 2]))
    transformers, trl = (importlib.metadata.version(name) for name in ("transformers", "trl"))
    told = (
        f"transformers {transformers} is newer than the newest tested 5.1.0, trl {trl} is newer than the newest "
        "tested 1.0.9: the probe runs, the sweep has not"
    )
    assert dict(packing_report.lines())["not tested with"] == told
    stream = table([2, 2] * 8).to_iterable_dataset()
    assert dict(report(tmp_path, stream, max_steps=1).lines())["not tested with"] == told


def test_what_packing_changes_is_one_sentence(tmp_path):
    packing_report = report(tmp_path, table([8] * 64), max_length=32, per_device_train_batch_size=4)
    lines = dict(packing_report.lines())
    assert lines["steps"] == "4 of about 16.0 documents (accumulation 1, ranks 1); unpacked: 16 of 4"
    assert lines["against unpacked"] == 'learning_rate x 2.0, settings in steps / 4.0; or packing_strategy="minibatch"'
    same = report(tmp_path, table([8] * 64), max_length=32, packing_strategy="minibatch", gradient_accumulation_steps=3)
    assert dict(same.lines())["against unpacked"] == "the same steps: no setting has to change"
    full = report(tmp_path, table([32] * 64), max_length=32)
    assert dict(full.lines())["against unpacked"] == "about 2 documents per step, too: no setting has to change"


@pytest.mark.parametrize("num, steps_of_trl", [(64, 11), (66, 11), (60, 10), (61, 10)])
def test_the_last_step_that_trl_trains_is_an_exception_of_the_same_steps(num, steps_of_trl, tmp_path):
    """With `dataloader_drop_last` TRL leaves out the rows of an incomplete micro-batch, here the incomplete step."""
    settings = {"gradient_accumulation_steps": 3, "dataloader_drop_last": True, "num_train_epochs": 1}
    unpacked = stock(tmp_path, table([8] * num), **settings)
    unpacked.train()
    assert unpacked.state.global_step == steps_of_trl
    packing_report = report(tmp_path, table([8] * num), packing_strategy="minibatch", **settings)
    told = dict(packing_report.lines())["against unpacked"]
    exception = " but for the incomplete last one of an epoch, of which TRL trains whole micro-batches"
    assert told == f"the same steps{exception * (packing_report.num_steps < steps_of_trl)}: no setting has to change"


@pytest.mark.parametrize("labels", ["all", "answers", "some answers"])
def test_what_unpacked_training_divides_by_is_measured_on_the_data(labels, tmp_path):
    """TRL counts first labels of GPT-2, too, which are no targets; packed training divides by targets."""
    rng = np.random.default_rng(0)
    prompts = {"all": (0, 0), "answers": (2, 2), "some answers": (0, 3)}[labels]
    data = tokenised(rng, rng.integers(4, 12, 16), lambda i, length: prompts[i % 2])
    ends = {}
    settings = {"packing_strategy": "minibatch", "max_steps": 1, "gradient_accumulation_steps": 8, "max_grad_norm": 0}
    settings |= {"optim": "sgd", "learning_rate": 0.1}
    for model in ("gpt2", "llama"):
        model = build_tiny_model(model, n_embd=32, n_head=4, n_layer=2, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0)
        start_weights = weights_of(model)
        for packing in (False, True):
            trainer = build_trainer(tmp_path, data, copy.deepcopy(model), packing=packing, **settings)
            trainer.train()
            ends[packing] = trainer.state.log_history[-2]["loss"], (weights(trainer) - start_weights).norm().item()
        share = trainer.packing_report.unpacked_loss
        rows_shown = dict(trainer.packing_report.lines())
        for unpacked, packed in zip(ends[False], ends[True], strict=True):
            assert unpacked / packed == pytest.approx(share, rel=1e-5)
        if model.config.model_type == "llama" or labels == "answers":
            assert share == 1
            assert "unpacked loss" not in rows_shown
            assert rows_shown["against unpacked"] == "the same steps: no setting has to change"
        else:
            assert 0.75 < share < 0.95
            assert rows_shown["unpacked loss"].startswith(f"{share:.3f} of the packed one")
            assert rows_shown["against unpacked"].startswith("the same steps but for the loss")


def test_the_ledger_lies_beside_every_checkpoint(tmp_path):
    settings = {"packing_report": True, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    build_trainer(tmp_path, texts(), max_length=20, **settings).train()
    reports = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("**/packing_report.json")}
    assert reports.keys() == {tmp_path.name, "checkpoint-2", "checkpoint-4"}
    assert reports["checkpoint-2"] == reports["checkpoint-4"] == reports[tmp_path.name]
    cut = np.array([len(text) + 1 for text in texts()["text"]])
    assert reports["checkpoint-4"]["ledger"]["truncated"]["tokens"] == (cut - 20).clip(0).sum() > 0
    assert reports["checkpoint-4"]["isolation"]["isolated"]


def test_the_report_of_shared_packs_says_degrees_and_time():
    lengths = [*np.random.default_rng(0).integers(5, 30, 200).tolist(), 100, 127]
    planner, report_made, slots = counted(lengths, max_length=128, accumulation=2, world_size=4, tokens_per_rank=32)
    shared = report_made.shared
    degrees = planner.schedule(0).degrees
    assert shared.micro_steps == Counter(degrees.tolist())
    assert len(degrees) == planner.num_steps * 2
    assert shared.smallest_degree == 4
    tokens = np.array([sum(lengths[i] for i in slot) for slot in slots])
    assert shared.largest_part == np.ceil(tokens / np.repeat(degrees, 4)).max() <= 32
    seconds, exchange = modelled_time(*of_units(planner), planner.packing.parallel)
    assert shared.exchange_share == pytest.approx(exchange.sum() / seconds.sum())
    assert 0 < shared.exchange_share < 1
    lines = dict(report_made.lines())
    assert "32 tokens at most on each rank (tokens_per_rank)" in lines["micro-batch"]
    assert f"micro-steps by degree (ranks that share a pack): {shared.histogram}" in lines["sequence parallelism"]
    assert f"{shared.exchange_share:.1%} of it in the exchange" in lines["modelled time"]
    assert "imbalance" not in lines
    assert "minibatch" not in lines["against unpacked"]
    assert metrics(report_made)["packing/exchange_share"] == shared.exchange_share
    unset = counted(lengths, max_length=128, accumulation=2, world_size=4)[1]
    assert unset.shared is None
    assert "packing/exchange_share" not in metrics(unset)
    assert "minibatch" in str(unset.lines())


def test_the_report_of_a_stream_in_shared_packs_counts_degrees_so_far():
    rows = Dataset.from_dict({"input_ids": [[1] * 60, [2] * 10, [3] * 20] * 20}).to_iterable_dataset()
    stream = make_stream(rows, batch_size=1, max_length=64, accumulation=2, world_size=4, tokens_per_rank=32)
    report_made = make_stream_report(stream, 9)
    lines = dict(report_made.lines())
    numbers = metrics(report_made)
    size = "32 tokens at most on each rank (tokens_per_rank); a document of max_length 64 needs 2"
    assert size in lines["micro-batch"]
    assert "packs in each: 4 (accumulation 2, ranks 4)" in lines["steps"]
    assert "sequence parallelism" not in lines
    assert numbers["packing/smallest_degree"] == 2
    assert not {"packing/documents", "packing/packs", "packing/lost_trained_share"} & numbers.keys()  # not read yet
    list(islice(stream, 2 * 3))
    counted = stream.state_after(3)["micro_steps"]
    assert sum(counted.values()) == 2 * 3
    report_made = make_stream_report(stream, 9, stream.state_after(3)["counts"], micro_steps=counted)
    assert f"micro-steps by degree (ranks that share a pack): {report_made.shared.histogram}" in str(
        report_made.lines()
    )
    assert report_made.shared.micro_steps == counted


@pytest.mark.parametrize("order", ["sorted", "alternating"])
def test_padding_is_that_of_batches_in_random_order(order):
    """Half the documents have 10 tokens and half 30: of pairs three quarters have a long one, which is 20 / 25."""
    lengths = [10, 30] * 500 if order == "alternating" else [10] * 500 + [30] * 500
    report_made = counted(lengths, batch_size=2, max_length=32)[1]
    assert report_made.padding_efficiency == pytest.approx(20 / 25, rel=0.05)


def test_what_replaces_a_setting_of_the_user_is_said(tmp_path):
    model = build_tiny_model("llama", attn_implementation="eager")
    trainer = build_trainer(tmp_path, texts(), model=model, max_steps=2)
    trainer.train()
    lines = dict(trainer.packing_report.lines())
    num_steps = trainer.packing_report.num_steps
    assert num_steps > 2
    assert lines["steps"].startswith(f"2 (max_steps; an epoch has {num_steps}) of about ")
    assert "in place of the model's eager and its T x T masks" in lines["attention"]
    assert trainer.model.config._attn_implementation == "eager", "after training the model has its own again"


@pytest.mark.parametrize("synchronisation", ["micro", "step"])
def test_the_numbers_of_a_report_are_counted_from_its_slots(synchronisation):
    lengths = np.random.default_rng(0).integers(3, 17, 75).tolist()
    settings = {"batch_size": 2, "max_length": 16, "accumulation": 2, "world_size": 2, "drop_last": True}
    planner, report_made, slots = counted(lengths, synchronisation=synchronisation, **settings)
    reached = [document for slot in slots for document in slot]
    skipped = sorted(set(range(75)) - set(reached))
    assert len(skipped) > 1, "nothing is left out"
    expected = {
        "num_steps": len(slots) / 4,
        "documents_per_step": len(reached) / (len(slots) / 4),
        "documents_not_reached": len(skipped),
        "tokens_not_reached": sum(lengths[i] for i in skipped),
        "trained_tokens_not_reached": sum(lengths[i] - 2 for i in skipped),
        "num_trained_tokens": sum(lengths) - 2 * 75,
        "unpacked_loss": 1,
        "most_documents": max(map(len, slots)),
    }
    assert {name: getattr(report_made, name) for name in expected} == expected
    assert len(set(map(len, slots))) > 1, "all slots have as many documents"
    cost = planner.packing.cost_model
    by_rank = np.array([sum(cost(np.array(lengths[i])) for i in slot) for slot in slots]).reshape(-1, 2, 2)
    of_groups = by_rank.sum(1) if synchronisation == "step" else by_rank.reshape(-1, 2)
    assert report_made.imbalance == pytest.approx(of_groups.max(1).sum() / of_groups.mean(1).sum())
    assert report_made.imbalance > 1
    assert dict(report_made.lines())["imbalance"].startswith(f"{report_made.imbalance:.3f} modelled")
    assert np.array(report_made.sample.costs) == pytest.approx(by_rank.reshape(-1, 2)[: len(report_made.sample.costs)])
    assert metrics(report_made)["packing/steps_per_epoch"] == report_made.num_steps
    fills = [sum(lengths[i] for i in slot) / 32 for slot in slots]
    of_twentieths = [sum(place <= 20 * fill < place + 1 for fill in fills) for place in range(19)]
    assert report_made.sample.fills == [*of_twentieths, len(fills) - sum(of_twentieths)]


@pytest.mark.parametrize("first", range(4))
def test_the_last_batch_without_packing_is_padded_to_its_own_longest_document(first):
    """Any of four documents in batches of three may be the last, which has no padding."""
    lengths = [3, 4, 6, 9]
    report_made = counted([*lengths[first:], *lengths[:first]], batch_size=3, max_length=9)[1]
    padded = {3 * max(order[:3]) + order[3] for order in permutations(lengths)}
    assert report_made.padding_efficiency in {sum(lengths) / tokens for tokens in padded}
    assert "imbalance" not in dict(report_made.lines()), "one rank waits for no other"


def test_the_lengths_of_a_report_are_those_of_documents_that_share_a_row():
    rows = {"input_ids": [[9] * 8, [9] * 4], "seq_lengths": [[3, 5], [4]]}
    reader = TokenReader(Dataset.from_dict(rows))
    report_made = make_report(make_epochs(make_documents(reader, 8), "stream", max_length=8), reader)
    assert (report_made.lengths.shortest, report_made.lengths.median, report_made.lengths.longest) == (3, 4, 5)
    assert sum(report_made.lengths.counts) == 3


def test_the_efficiency_of_a_stream_is_that_of_its_packs_so_far():
    rows = Dataset.from_dict({"input_ids": [[1] * 60, [2] * 10, [3] * 20] * 20}).to_iterable_dataset()
    stream = make_stream(rows, batch_size=1, max_length=64)
    packs = list(islice(stream, 5))
    tokens = sum(len(document["input_ids"]) for pack in packs for document in pack)
    report_made = make_stream_report(stream, 9, stream.state_after(5)["counts"])
    assert report_made.num_packs == 5
    assert report_made.num_tokens == tokens
    assert report_made.efficiency == tokens / (5 * 64)


# The packs that are shown


SPLIT_AT_10 = ShownDocument(3, start=10, stop=18, positions=(0, 7), spans=[(False, 0, 3), (True, 3, 8)], tokens=None)


@pytest.mark.parametrize(
    "shared, num_rows, own_spans",
    [
        (0, 8, [(False, 0, 3), (True, 3, 8)]),
        (2, 6, [(False, 0, 1), (True, 1, 6)]),
        (3, 5, [(True, 0, 5)]),
        (6, 2, [(True, 0, 2)]),
        (7, 0, [(True, 0, 1)]),  # a last row that predicts nothing is not computed
    ],
)
def test_a_shown_document_counts_what_is_its_own(shared, num_rows, own_spans):
    document = replace(SPLIT_AT_10, shared=shared)
    assert document.num_tokens == 8
    assert document.num_trained == 5
    assert document.num_rows == num_rows
    assert document.own_spans == own_spans
    assert replace(SPLIT_AT_10, stop=11).num_rows == 1, "a document of one token that shares nothing"


def test_a_document_that_ends_with_the_part_of_a_rank_is_not_in_the_next_part():
    documents = [replace(SPLIT_AT_10, start=0, stop=4), replace(SPLIT_AT_10, start=0, stop=5)]
    pack = ShownPack("step 0", 10, [0, 4, 9], documents, rank=2, degree=2, cu_seq_lens_k=[])
    assert [(rank["rank"], rank["tokens"], rank["documents"]) for rank in pack.ranks()] == [
        (2, [0, 5], [0, 1]),
        (3, [5, 9], [1]),
    ]
    assert replace(pack, degree=1).ranks() == []
    even = replace(pack, cu_seq_lens=[0, 4, 8])
    assert [(rank["tokens"], rank["documents"]) for rank in even.ranks()] == [([0, 4], [0]), ([4, 8], [1])]


def test_the_packs_that_are_shown_are_spread_over_the_first_step():
    planner, report_made, slots = counted([8] * 40, max_length=8, accumulation=4, world_size=4)
    reader = TokenReader(table([8] * 40))
    places = [pack.place for pack in first_packs(planner, reader, 4)]
    assert places == [f"step 0.{micro}, rank 0" for micro in range(4)]
    everything = first_packs(planner, reader, 99)
    assert len(everything) == report_made.num_packs == sum(map(bool, slots))
    assert everything[5].place == "step 0.1, rank 1"
    assert everything[-1].place.startswith("step 2.")
    assert {document.positions for pack in everything for document in pack.documents} == {(0, 7)}
    assert {pack.capacity for pack in everything} == {8}


@pytest.mark.parametrize(
    "accumulation, world_size, place",
    [(1, 1, "step 0"), (2, 1, "step 0.0"), (1, 2, "step 0, rank 0"), (2, 2, "step 0.0, rank 0")],
)
def test_a_shown_pack_says_where_it_is_trained_and_what_of_it(accumulation, world_size, place):
    rows = {"input_ids": [[9] * 8] * 8, "labels": [[-100, -100, 9, 9, 9, -100, 9, 9]] * 8}
    reader = TokenReader(Dataset.from_dict(rows))
    sizes = {"max_length": 8, "accumulation": accumulation, "world_size": world_size}
    pack = first_packs(make_epochs(make_documents(reader, 8), "stream", **sizes), reader, 1)[0]
    assert pack.place == place
    assert pack.documents[0].spans == [(False, 0, 2), (True, 2, 5), (False, 5, 6), (True, 6, 8)]
