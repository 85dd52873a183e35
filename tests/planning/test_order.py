"""Packs of a table are trained in random order: the lengths of a step say nothing about its place in the epoch."""

import numpy as np
import pytest
from support.features import PRESENT
from support.planners import documents_of_lengths, make_epochs

from trl_packfix.data.documents import Documents
from trl_packfix.data.epochs import ResumePoint
from trl_packfix.planning.packs import PackPlan, plan_stream
from trl_packfix.planning.strategies import STRATEGIES, plan_packs
from trl_packfix.planning.token_order import TokenOrder

LONGEST = 512
AT_MAXIMUM = np.linspace(0.3, 0.85, 20)  # shares of the documents that are cut there, one for each seed
FAR = 4.0  # standard deviations of a random order


def lengths_of(num: int, seed: int) -> np.ndarray:
    """Return tokens of documents of which a share, another one for each seed, is cut at the longest."""
    rng = np.random.default_rng(seed)
    drawn = np.clip(rng.lognormal(np.log(LONGEST / 3), 0.6, num), 2, LONGEST - 1).astype(np.int64)
    return np.where(rng.random(num) < AT_MAXIMUM[seed % len(AT_MAXIMUM)], LONGEST, drawn)


class Trend:
    """How far the mean lengths of steps are from a random order of the same steps, over several epochs.

    In a random order of S values the correlation of place and value has mean 0 and variance 1 / (S - 1), and the sum of
    squares between eighths of the epoch is 7 / (S - 1) of the whole sum.
    """

    def __init__(self) -> None:
        self.correlations: list[float] = []  # in standard deviations
        self.eighths: list[float] = []  # squares between eighths over those that a random order has

    def add(self, means: np.ndarray) -> None:
        assert len(means) >= 24, "too few steps to see an order"
        assert means.std() > 0.01 * LONGEST, "all steps have the same mean length"
        num = len(means)
        centred = means - means.mean()
        self.correlations.append(np.corrcoef(np.arange(num), means)[0, 1] * np.sqrt(num - 1))
        between = sum(len(eighth) * eighth.mean() ** 2 for eighth in np.array_split(centred, 8))
        self.eighths.append(between / (centred @ centred * 7 / (num - 1)))

    @property
    def problems(self) -> set[str]:
        num = len(self.correlations)
        trends = set()
        assert num >= 5, "too few epochs to tell an order from chance"
        squares = np.square(self.correlations)
        if abs(np.sum(self.correlations)) > FAR * np.sqrt(num):
            trends.add("steps of long documents come early or late")
        if squares.mean() > 1 + FAR * np.sqrt(2 / num):
            trends.add("lengths drift in single epochs")
        if np.mean(self.eighths) > 1 + FAR * np.sqrt(2 / 7 / num):
            trends.add("eighths of an epoch differ")
        return trends


def means_of_packs(plan: PackPlan) -> np.ndarray:
    return np.add.reduceat(plan.lengths[plan.order], plan.offsets[:-1]) / np.diff(plan.offsets)


def means_of_steps(plan, epoch: int, first: int = 0) -> np.ndarray:
    """Return the mean length of the documents of each step of an epoch, from step `first` on."""
    schedule = plan.schedule(epoch)
    lengths = plan.documents.lengths
    return np.array([lengths[schedule.step_documents(step)].mean() for step in range(first, schedule.num_steps)])


def documents_of(lengths: np.ndarray, strategy: str = "stream", shares: bool = False) -> Documents:
    """Return documents of a table; with `shares`, neighbours in it of about the same length begin alike."""
    num = len(lengths)
    block = (np.cumsum(lengths) - 1) // LONGEST if STRATEGIES[strategy].cuts_blocks else None
    tokens = None
    if shares:
        common = np.where(np.arange(num) % 3, np.minimum(lengths, np.roll(lengths, 1)) - 1, 0)
        tokens = TokenOrder(np.arange(num), common)
    return documents_of_lengths(lengths, block=block, token_order=tokens)


@pytest.mark.parametrize("num", [300, 1000, 4000, 40_000])
def test_packs_of_a_table_of_any_size_are_in_random_order(num):
    planned = Trend()
    closed = Trend()
    for seed in range(0, 20, 4 if num > 10_000 else 1):
        lengths = lengths_of(num, seed)
        capacity = (1 + seed % 4) * LONGEST
        planned.add(means_of_packs(plan_packs(lengths, capacity, seed=seed)))
        closed.add(means_of_packs(plan_stream(lengths, capacity, order=np.random.default_rng(seed).permutation(num))))
    assert planned.problems == set()
    assert closed.problems, "packs are closed in random order, so this test would not see an order of lengths"


SETTINGS_OF_RUNS = {strategy: {"strategy": strategy} for strategy in STRATEGIES} | {
    "several ranks": {"strategy": "stream", "world_size": 2, "accumulation": 2},
    "as they come": {"strategy": "stream", "world_size": 2, "balance": "none"},
    "the last step dropped": {"strategy": "stream", "accumulation": 3, "drop_last": True},
    "groups of ranks": {"strategy": "stream", "batch_size": 1, "world_size": 2, "tokens_per_rank": LONGEST // 2},
}
if "prefixes" in PRESENT:
    SETTINGS_OF_RUNS["families"] = {"strategy": "stream", "share_prefixes": "family"}


def epochs_of(kind: str, seed: int, num: int = 400, **changed):
    how = {"batch_size": 2, "max_length": LONGEST, "seed": seed} | SETTINGS_OF_RUNS[kind] | changed
    shares = how.get("share_prefixes") == "family"
    return make_epochs(documents_of(lengths_of(num, seed), how["strategy"], shares), **how)


@pytest.mark.parametrize("kind", SETTINGS_OF_RUNS)
def test_steps_of_every_run_are_in_random_order(kind):
    trend = Trend()
    for seed in range(20):
        plan = epochs_of(kind, seed)
        if plan.packing.feature.regroups:
            assert len(plan.units()) < 0.9 * len(plan.documents), "hardly any families"
        trend.add(means_of_steps(plan, epoch=seed % 3))
    assert trend.problems == set()


@pytest.mark.parametrize("kind", SETTINGS_OF_RUNS)
def test_the_rest_of_an_epoch_on_other_ranks_is_in_random_order(kind):
    trend = Trend()
    for seed in range(20):
        before = epochs_of(kind, seed, num=600)
        epoch = seed % 2
        step = before.num_steps // 4
        first_step = epoch * before.num_steps
        now = epochs_of(kind, seed, num=600, batch_size=1)
        now.resume_at(ResumePoint(epoch, first_step, step, before.trained_documents(epoch, step)))
        trend.add(means_of_steps(now, epoch, first=step))
    assert trend.problems == set()


def test_packs_that_are_halved_keep_their_places():
    """Epochs of fewer packs than steps halve some packs. A pack of one long document is never halved."""
    trend = Trend()
    for seed in range(20):
        documents = documents_of(lengths_of(400, seed % 8))
        plan = make_epochs(documents, "stream", max_length=LONGEST, seed=seed)
        num_packs = plan.packing.plan(plan.units(), 1).num_packs
        plan.num_steps = num_packs + num_packs // 8
        means = means_of_steps(plan, 1)
        assert len(means) > num_packs, "no pack is halved"
        trend.add(means)
    assert trend.problems == set()


@pytest.mark.parametrize("strategy", [name for name, traits in STRATEGIES.items() if traits.plan is not None])
def test_without_shuffling_packs_are_in_the_order_of_the_table(strategy):
    plan = epochs_of("stream", 0, strategy=strategy, shuffle=False)
    schedule = plan.schedule(1)
    oldest = [int(schedule.step_documents(step).min()) for step in range(schedule.num_steps)]
    assert oldest[: len(oldest) // 2] == sorted(oldest)[: len(oldest) // 2]
    assert np.array_equal(schedule.order, plan.schedule(0).order)
