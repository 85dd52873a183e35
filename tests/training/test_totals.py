"""What is logged is counted: sums of batches, over windows and ranks, and the metrics that are made of them."""

import time
from types import SimpleNamespace

import pytest
import torch
from support.by_hand import token_scores
from torch.nn import functional as F

from trl_packfix.data.row_values import StreamSources
from trl_packfix.group import ALONE, Group
from trl_packfix.layout import Sizes, Targets
from trl_packfix.training.lm_head import TokenScores
from trl_packfix.training.totals import (
    OF_BATCHES,
    OF_OUTPUTS,
    EvaluationTotals,
    StepSpan,
    TrainingTotals,
    scores_of,
    source_metrics,
    sums_by_source,
)

CPU = torch.device("cpu")
SUMS = {"trained_tokens": 100, "tokens": 300, "computed": 240, "row_tokens": 320, "documents": 9, "micro_batches": 4}
SUMS |= {"rows": 8, "flops": 6e12, "entropy": 160, "correct": 20, "scored": 80, "aux_loss": 12}


def ranks_that_count_the_same(num):
    """Return the part of an accelerator that sums over ranks."""
    return SimpleNamespace(device=CPU, reduce=lambda sums, reduction: num * sums)


@pytest.fixture
def clock(monkeypatch):
    """Return a clock with seconds that the test sets."""
    now = SimpleNamespace(seconds=50.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now.seconds)
    return now


def test_the_metrics_of_a_span_are_its_sums_over_what_each_is_a_share_of():
    totals = TrainingTotals(CPU, sources=("a", "b", "c"), shares_rows=True)
    of_sources = {"loss/a": 30, "trained_tokens/a": 60, "loss/b": 80, "trained_tokens/b": 40}
    span = StepSpan({**SUMS, **of_sources, "loss/c": 0, "trained_tokens/c": 0}, num_steps=2, seconds=4.0, waited=1.0)
    assert totals.metrics(span, capacity=100, num_ranks=2, peak_tflops=3.0) == {
        "entropy": 160 / 80,
        "mean_token_accuracy": 20 / 80,
        "aux_loss": 12 / 4,
        "trained_tokens": 100,
        "documents_per_step": 9 / 2,
        "efficiency": 240 / (8 * 100),
        "tokens_per_second": 300 / 4,
        "data_wait": 1 / 4,
        "computed_share": 240 / 300,
        "tflops_per_second_per_rank": 6 / 4 / 2,
        "mfu": 6 / 4 / 2 / 3,
        "loss/a": 30 / 60,
        "loss/b": 80 / 40,
        "trained_tokens/a": 60,
        "trained_tokens/b": 40,
    }
    assert totals.metrics(span, capacity=None)["efficiency"] == 240 / 320
    assert totals.metrics(span, capacity=None)["tflops_per_second_per_rank"] == 6 / 4


def test_metrics_are_rounded_to_digits_that_a_reader_needs():
    sums = {**SUMS, "tokens": 302, "documents": 10, "computed": 239, "flops": 1.23456e9}
    span = StepSpan(sums, num_steps=3, seconds=7.0, waited=1.0)
    metrics = TrainingTotals(CPU, shares_rows=True).metrics(span, capacity=100)
    assert metrics["documents_per_step"] == 3.33
    assert metrics["efficiency"] == 0.2988
    assert metrics["tokens_per_second"] == 43.1
    assert metrics["data_wait"] == 0.1429
    assert metrics["computed_share"] == 0.7914
    assert metrics["tflops_per_second_per_rank"] == 0.0001764


def test_the_metrics_of_one_of_everything_are_one():
    totals = TrainingTotals(CPU, shares_rows=True)
    span = StepSpan(dict.fromkeys(SUMS, 1.0) | {"flops": 1e12}, num_steps=1, seconds=1.0, waited=1.0)
    assert set(totals.metrics(span, capacity=1, peak_tflops=1.0).values()) == {1}


def test_only_what_is_known_is_logged():
    span = StepSpan(dict.fromkeys(SUMS, 0.0), num_steps=1, seconds=1.0)
    metrics = TrainingTotals(CPU).metrics(span, capacity=1, peak_tflops=1.0)
    assert metrics.keys() == {"trained_tokens", "documents_per_step", "efficiency", "tokens_per_second", "data_wait"}


def test_a_span_that_lacks_a_source_adds_nothing_to_it():
    span = StepSpan({"loss/a": 2.0, "loss/b": 3.0})
    span.add(StepSpan({"loss/b": 4.0}))
    assert span.sums == {"loss/a": 2, "loss/b": 7}


def test_the_metrics_of_nothing_are_zero():
    totals = TrainingTotals(CPU, shares_rows=True)
    assert totals.metrics(totals.window, capacity=100, peak_tflops=1.0) == {
        "trained_tokens": 0,
        "documents_per_step": 0,
        "efficiency": 0,
        "tokens_per_second": 0,
        "data_wait": 0,
        "computed_share": 0,
    }


def test_a_window_has_its_steps_and_times_and_is_part_of_the_training(clock):
    totals = TrainingTotals(CPU)
    clock.seconds += 5  # of an evaluation, say
    for fetching, computing in ((2, 10), (3, 20)):
        totals.start_fetch_timer()
        clock.seconds += fetching
        totals.start_step()
        clock.seconds += computing
    window = totals.end_window()
    assert (window.num_steps, window.waited, window.seconds) == (2, 5, 35)
    clock.seconds += 100  # of a checkpoint
    totals.start_fetch_timer()
    clock.seconds += 1
    totals.start_step()
    window = totals.end_window()
    assert (window.num_steps, window.waited, window.seconds) == (1, 1, 1)
    assert (totals.training.num_steps, totals.training.waited, totals.training.seconds) == (3, 6, 36)
    assert totals.end_window().seconds == 0


def test_sums_are_gathered_over_ranks_once():
    totals = TrainingTotals(CPU, sources=("a", "b"))
    for factor in (1, 2):
        totals._add(**{name: torch.tensor(factor * value) for value, name in enumerate(OF_BATCHES, 1)})
        totals._add(**dict.fromkeys(OF_OUTPUTS, torch.tensor(0.5 * factor)))
    loss = torch.tensor([[1.0, 2.0, 4.0, 8.0]])
    mask = torch.tensor([[True, True, True, False]])
    totals.add_sources(loss, mask, torch.tensor([[0, 1, 1, 1]]))
    expected = {name: 3 * value * 4 / 2 for value, name in enumerate(OF_BATCHES, 1)}
    expected |= dict.fromkeys(OF_OUTPUTS, 1.5 * 4 / 2)
    expected |= {"loss/a": 2, "loss/b": 12, "trained_tokens/a": 2, "trained_tokens/b": 4}
    assert totals.gather(ranks_that_count_the_same(4), copies=2) == expected
    assert totals.window.sums == expected
    assert set(totals.gather(ranks_that_count_the_same(4)).values()) == {0}
    totals.end_window()
    assert totals.training.sums == expected


def counts_of_three(group):
    """Return the counts of documents with 5, 0 and 2 trained tokens, in 30 rows, of which 20 are computed."""
    sizes = Sizes(torch.tensor(25), torch.tensor(20), torch.tensor([15, 0, 10]), torch.tensor([0, 0, 5]))
    totals = TrainingTotals(CPU)
    totals.add_batch(sizes, torch.tensor([5, 0, 2]), num_row_tokens=30, flops=torch.tensor(7e9), group=group)
    counts = totals.gather(ranks_that_count_the_same(1))
    return {name: counts[name] for name in OF_BATCHES}


def test_the_first_rank_of_a_group_counts_what_all_know():
    of_pack = {"trained_tokens": 7, "tokens": 25, "documents": 2, "micro_batches": 1, "flops": 7e9}
    of_part = {"computed": 20, "row_tokens": 30, "rows": 1}
    for first in (ALONE, Group(2, 0)):
        assert counts_of_three(first) == of_pack | of_part
    assert counts_of_three(Group(2, 1)) == dict.fromkeys(of_pack, 0) | of_part


def test_the_sources_of_a_stream_are_named_when_they_are_gathered():
    totals = TrainingTotals(CPU)
    sources = StreamSources()
    totals.set_sources((), sources)
    mask = torch.ones(1, 2, dtype=torch.bool)
    for names, loss in ((("late", "early"), [[1.0, 2.0]]), (("early", "other"), [[4.0, 8.0]])):
        totals.add_sources(torch.tensor(loss), mask, torch.tensor([[sources[name] for name in names]]))
    metrics = totals.gather(ranks_that_count_the_same(1))
    assert [*totals.sources] == ["early", "late", "other"]
    assert (metrics["loss/early"], metrics["loss/late"], metrics["loss/other"]) == (6, 1, 8)
    assert (metrics["trained_tokens/early"], metrics["trained_tokens/late"]) == (2, 1)
    assert totals.window.sums == metrics


def test_losses_by_source_are_those_of_trained_tokens():
    loss = torch.tensor([1.0, 2.0, 4.0, 8.0])
    mask = torch.tensor([True, False, True, True])
    sums = sums_by_source(loss, mask, torch.tensor([0, 0, 2, 2]), num_sources=4)
    assert sums.tolist() == [[1, 0, 12, 0], [1, 0, 2, 0]]
    metrics = source_metrics("abcd", sums.flatten().tolist())
    assert metrics == {"loss/a": 1, "loss/c": 6, "trained_tokens/a": 1, "trained_tokens/c": 2}


def test_an_evaluation_is_the_mean_over_all_of_its_trained_tokens():
    totals = EvaluationTotals(CPU, names=("a", "b"))
    assert totals.metrics(ranks_that_count_the_same(1)) == {}
    assert totals.sums.dtype == torch.float64
    for losses, is_trained, sources in (([1.0, 3.0, 0.0], [1, 1, 0], [0, 1, 1]), ([8.0], [1], [1]), ([0.0], [0], [1])):
        mask = torch.tensor([is_trained]).bool()
        scores = TokenScores(
            log_probs=-torch.tensor([losses]),
            entropy=mask * 0.5,
            is_top1=mask & (torch.arange(len(losses)) == 0),
            label_mask=mask,
        )
        targets = Targets(documents=torch.zeros(1), trained=torch.tensor([sum(is_trained)]))
        assert totals.add(scores, targets, torch.tensor([sources])) == sum(losses) / max(sum(is_trained), 1)
    assert totals.metrics(ranks_that_count_the_same(1))["trained_tokens/b"] == 2
    assert totals.metrics(ranks_that_count_the_same(4), copies=2) == {
        "loss": 12 / 3,
        "entropy": 0.5,
        "mean_token_accuracy": 2 / 3,
        "loss/a": 1,
        "loss/b": 11 / 2,
        "trained_tokens/a": 1 * 4 / 2,
        "trained_tokens/b": 2 * 4 / 2,
    }


@pytest.mark.parametrize("num_virtual", [0, 3])
def test_scores_are_those_of_each_next_token(num_virtual):
    """Rows of prompt tuning begin with tokens that have no label."""
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(1, num_virtual + 5, 7, generator=draws)
    labels = torch.tensor([[2, -100, 3, 1, 6]])
    scores = scores_of(logits, labels)
    labels_of_row = F.pad(labels, (num_virtual, 0), value=-100)
    log_probs, entropy, is_top1 = token_scores(logits, labels_of_row)
    assert torch.allclose(scores.log_probs, log_probs)
    assert torch.allclose(scores.entropy, entropy)
    assert torch.equal(scores.is_top1, is_top1)
    assert torch.equal(scores.label_mask, labels_of_row[:, 1:] != -100)


def test_a_token_that_the_model_masks_adds_nothing_to_the_entropy():
    """A mask of the vocabulary sets the logits of some tokens to -inf, and 0 * -inf is not a number."""
    logits = torch.randn(1, 4, 7, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[0, 1, 2, 3]])
    expected = scores_of(logits[..., :4], labels)
    logits[..., 4:] = -float("inf")
    scores = scores_of(logits, labels)
    assert torch.allclose(scores.entropy, expected.entropy)
    assert torch.allclose(scores.log_probs, expected.log_probs)
    assert expected.entropy.min() > 0
