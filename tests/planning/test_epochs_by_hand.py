"""Steps, epochs and restarts are counted as by hand, on a few documents."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.planners import documents_of_lengths, make_epochs

from trl_packfix.data import epochs
from trl_packfix.data.epochs import EpochPlanner, ResumePoint
from trl_packfix.planning.costs import CostModel, TowerCosts
from trl_packfix.planning.packing import Packing
from trl_packfix.planning.packs import PackPlan, shuffle_packs


def plan_ten(**settings):
    """Return a planner of ten documents in steps of four, unless the settings say otherwise."""
    return make_epochs(documents_of_lengths([10] * 10), "minibatch", batch_size=2, accumulation=2, **settings)


def steps_of(planner, epoch):
    """Return the documents of each step, in the order of the table."""
    schedule = planner.schedule(epoch)
    return [sorted(schedule.step_documents(step).tolist()) for step in range(schedule.num_steps)]


def mask_of(indices):
    return np.isin(np.arange(10), indices)


# Numbers of steps


@pytest.mark.parametrize(
    "strategy, num_steps, settings",
    [
        ("minibatch", 3, {"batch_size": 2, "accumulation": 2}),
        ("minibatch", 2, {"batch_size": 2, "accumulation": 2, "drop_last": True}),
        ("minibatch", 1, {"batch_size": 2, "accumulation": 5}),
        ("stream", 3, {"max_length": 16, "accumulation": 2}),
        ("stream", 2, {"max_length": 16, "accumulation": 2, "drop_last": True}),
    ],
)
def test_an_epoch_has_as_many_steps_as_the_unpacked_run(strategy, num_steps, settings):
    assert make_epochs(documents_of_lengths([8] * 10), strategy, **settings).num_steps == num_steps


@pytest.mark.parametrize("strategy, counted", [("minibatch", "3 documents"), ("stream", "2 packs")])
def test_an_epoch_of_no_step_is_refused_unless_it_may_be_empty(strategy, counted):
    documents = documents_of_lengths([8] * 3)
    sizes = {"max_length": 16, "accumulation": 4, "drop_last": True}
    message = (
        f"The epoch has {counted}, and .* needs more of them .4 accumulation steps x 1.*dataloader_drop_last=False"
    )
    with pytest.raises(ValueError, match=message):
        make_epochs(documents, strategy, **sizes)
    assert EpochPlanner(documents, Packing(strategy=strategy, **sizes), may_be_empty=True).num_steps == 0


@pytest.mark.parametrize(
    "num_epochs, total", [(0.0, 1), (0.01, 1), (1 / 3, 1), (0.34, 2), (0.5, 2), (1.0, 3), (1.5, 5), (2, 6), (2.99, 9)]
)
def test_a_part_of_an_epoch_has_its_steps_rounded_up(num_epochs, total):
    assert plan_ten().total_steps(num_epochs) == total


def test_steps_after_a_restart_are_counted_from_its_epoch():
    planner = plan_ten()
    planner.resume_at(ResumePoint(2, 10))
    assert [planner.first_step(epoch) for epoch in (2, 3, 4)] == [10, 13, 16]
    assert [planner.position(step) for step in (10, 12, 13, 16)] == [(2, 0), (2, 2), (3, 0), (4, 0)]
    assert [planner.total_steps(num) for num in (1.0, 2.0, 2.5, 3.0, 3.1)] == [10, 10, 12, 13, 14]
    assert [plan_ten().position(step) for step in (0, 2, 3, 7)] == [(0, 0), (0, 2), (1, 0), (2, 1)]


def test_an_epoch_that_begins_anew_adds_no_steps_to_the_run():
    planner = plan_ten()
    planner.resume_at(ResumePoint(1, 5, num_repeated=2))
    assert [planner.position(step) for step in (5, 7, 8)] == [(1, 0), (1, 2), (2, 0)]
    assert [planner.total_steps(num) for num in (2.0, 2.5, 3.0)] == [6, 8, 9]
    assert [plan_ten().total_steps(num) for num in (2.0, 2.5, 3.0)] == [6, 8, 9]


@pytest.mark.parametrize(
    "point, has_equal_epochs",
    [(ResumePoint(), True), (ResumePoint(2, 6), True), (ResumePoint(2, 7), False), (ResumePoint(2, 6, 1), False)],
)
def test_epochs_are_even_if_each_has_the_planned_steps(point, has_equal_epochs):
    planner = plan_ten()
    planner.resume_point = point
    assert planner.has_equal_epochs is has_equal_epochs


@pytest.mark.parametrize("strategy", ["stream", "bfd", "minibatch"])
def test_a_seed_may_be_negative_as_in_torch(strategy):
    orders = [
        make_epochs(documents_of_lengths([10] * 40), strategy, batch_size=2, seed=seed).schedule(epoch).order.tolist()
        for seed, epoch in ((-1, 0), (-1, 1), (-2, 0), (1, 0))
    ]
    assert all(sorted(order) == list(range(40)) for order in orders)
    assert orders[0] not in (orders[2], orders[3])
    assert orders[0] != orders[1]


# Restarts


def test_the_rest_of_an_epoch_is_planned_as_a_table_of_its_own():
    planner = plan_ten(seed=5)
    trained = mask_of([0, 3, 7, 9])
    planner.resume_at(ResumePoint(1, 3, 2, trained))
    assert [planner.steps_of(epoch) for epoch in (0, 1, 2)] == [3, 4, 3]
    assert planner.first_step(2) == 7
    assert [planner.total_steps(num) for num in (1.0, 1.5, 2.0, 3.0)] == [3, 5, 7, 10]
    schedule = planner.schedule(1)
    assert [len(schedule.step_documents(step)) for step in range(4)] == [0, 0, 4, 2]
    assert schedule.degrees.tolist() == [1] * 8
    untrained = planner.documents.select(~trained)
    orders = [
        make_epochs(untrained, "minibatch", batch_size=2, accumulation=2, seed=seed).schedule(0).order.tolist()
        for seed in (6, 4)
    ]
    assert schedule.order.tolist() == np.flatnonzero(~trained)[orders[0]].tolist()
    assert orders[0] != orders[1], "the seed decides nothing"
    assert planner.trained_documents(1, 2).tolist() == trained.tolist()
    assert planner.trained_documents(1, 3).sum() == 8
    assert planner.trained_documents(1, 4).all()
    assert planner.resume_point.trained is trained
    assert trained.sum() == 4, "a mask that was changed in place"
    # Another epoch has its own documents
    assert planner.trained_documents(2, 0).sum() == 0
    planner.resume_at(ResumePoint(1, 3))
    assert planner.steps_of(1) == 3


def test_the_rest_of_an_epoch_on_several_ranks_has_an_empty_slot_for_each():
    documents = documents_of_lengths([10] * 10)
    planner = make_epochs(documents, "minibatch", accumulation=2, world_size=2)
    planner.resume_at(ResumePoint(0, 0, 1, mask_of(range(4))))
    assert [len(step) for step in steps_of(planner, 0)] == [0, 4, 2]
    assert planner.schedule(0).degrees.tolist() == [1] * 6


def test_the_first_epoch_is_scheduled_with_the_settings_before_it():
    planner = plan_ten()
    planner.packing = replace(planner.packing, drop_last=True)
    assert [len(step) for step in steps_of(planner, 1)] == [4, 4]
    assert [len(step) for step in steps_of(planner, 0)] == [4, 4, 2]


def test_a_rest_of_fewer_documents_than_a_step_is_left_out():
    planner = plan_ten(drop_last=True)
    planner.resume_at(ResumePoint(1, 3, 5, mask_of(range(7))))
    assert (planner.resume_point.epoch, planner.resume_point.first_step, planner.resume_point.num_steps) == (2, 8, 0)
    planner.resume_at(ResumePoint(1, 5, 5, mask_of(range(7)), num_repeated=2))
    assert vars(planner.resume_point) == vars(ResumePoint(2, 10, num_repeated=2))
    planner.resume_at(ResumePoint(1, 3, 5, mask_of(range(6))))
    assert planner.resume_point.epoch == 1
    assert planner.steps_of(1) == 6


# Schedules


def test_an_epoch_is_scheduled_once_until_another_one_is_wanted():
    planner = plan_ten()
    assert planner.schedule(0) is planner.schedule(0)
    unshuffled = plan_ten(shuffle=False)
    assert unshuffled.schedule(3) is unshuffled.schedule(0)
    assert steps_of(unshuffled, 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("num_packs, drop_last, is_first", [(2, False, False), (3, False, True), (3, True, False)])
def test_a_plan_of_too_many_packs_is_replaced_by_the_first_in_another_order(
    monkeypatch, num_packs, drop_last, is_first
):
    """Plan two packs first, which are two steps. A later plan has as many packs as the test says."""

    def plan(packing, units, epoch, block=None):
        offsets = [0, 4, 8] if epoch == 0 else np.linspace(0, 8, num_packs + 1).astype(int)
        order = np.arange(8) if epoch == 0 else np.arange(8)[::-1].copy()
        return PackPlan(order, np.array(offsets), units.rows, packing.capacity)

    monkeypatch.setattr(Packing, "plan", plan)
    planner = make_epochs(documents_of_lengths([4] * 8), "stream", max_length=16, seed=7, drop_last=drop_last)
    assert planner.num_steps == 2
    for epoch in (1, 2, 3):
        steps = steps_of(planner, epoch)
        if is_first:
            expected = shuffle_packs(planner.first_plan, np.random.default_rng((7, epoch)))
            assert steps == [sorted(expected.order[:4].tolist()), sorted(expected.order[4:].tolist())]
        else:
            assert 7 in steps[0], "not the plan of this epoch"
            assert len(steps) == 2


def test_only_the_degrees_of_the_first_epoch_stay(monkeypatch):
    used = {0: [4, 2, 4], 1: [8]}
    monkeypatch.setattr(EpochPlanner, "schedule", lambda planner, epoch: SimpleNamespace(degrees=np.array(used[epoch])))
    sizes = {"max_length": 8, "tokens_per_rank": 8, "world_size": 8}
    assert make_epochs(documents_of_lengths([8] * 9), "stream", **sizes).packing.degrees == (1, 2, 4)
    used[0] = [1, 1]
    assert make_epochs(documents_of_lengths([8] * 9), "stream", **sizes, degrees=(1, 2)).packing.degrees == (1,)


# Caches


def test_plans_are_cached_for_many_documents_in_a_file(monkeypatch):
    monkeypatch.setattr(epochs, "MIN_CACHED_DOCUMENTS", 10)
    planner = plan_ten()
    assert planner.cache_file("schedule", 0) is None
    planner.documents = replace(planner.documents, file=Path("folder/documents.x"))
    first, second = (planner.cache_file("schedule", epoch) for epoch in (0, 1))
    assert first.parent == Path("folder")
    assert first != second
    assert planner.cache_file("plan", 0) not in (first, second)
    # Later epochs may have other degrees, which are not known when the first one is planned
    planner.packing = replace(planner.packing, accumulation=4)
    assert planner.cache_file("schedule", 0) == first
    assert planner.cache_file("schedule", 1) != second
    planner.documents = documents_of_lengths([10] * 9, file=Path("folder/documents.x"))
    assert planner.cache_file("schedule", 0) is None


# Images


def test_images_cost_what_the_tower_computes():
    model = CostModel(1.0, 0.0, tower=TowerCosts(2.0, 3.0))
    arrays = {"image_values": np.array([1, 2, 0]), "image_squares": np.array([4, 5, 0])}
    places = {"image_start": np.array([2, 0, 0]), "image_stop": np.array([6, 1, 0])}
    planner = make_epochs(documents_of_lengths([8] * 3, **arrays, **places), "stream", cost_model=model)
    assert planner.image_costs.tolist() == [14, 19, 0]
    indices = np.array([0, 0, 0, 0, 0, 1, 1, 2, 2])
    shared = np.array([0, 2, 3, 5, 8, 0, 1, 0, 5])
    assert planner.image_costs_behind(indices, shared).tolist() == [14, 14, 10.5, 3.5, 0, 19, 0, 0, 0]
    assert planner.units().costs(1).tolist() == [22, 27, 8]


@pytest.mark.parametrize("missing", ["image_values", "image_squares", "image_start", "image_stop"])
def test_images_that_cannot_be_counted_cost_nothing(missing):
    names = {"image_values", "image_squares", "image_start", "image_stop"} - {missing}
    documents = documents_of_lengths([8] * 3, **{name: np.array([1, 2, 3]) for name in names})
    planner = make_epochs(documents, "stream", cost_model=CostModel(1.0, 0.0, tower=TowerCosts(2.0, 3.0)))
    if missing in ("image_values", "image_squares"):
        assert planner.image_costs.tolist() == [0, 0, 0]
    else:
        assert planner.image_costs_behind(np.array([1]), np.array([0])).tolist() == [0]
