"""A run that resumes with other ranks: every document of every epoch still once, over any sequence of restarts."""

from dataclasses import replace

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from support.features import PRESENT, sharing
from support.planners import make_epochs
from support.prefixes import forest

from trl_packfix.data.cache import cached_documents
from trl_packfix.data.documents import Documents, Ledger, make_documents
from trl_packfix.data.reader import TokenReader
from trl_packfix.planning.schedule import NO_DOCUMENTS
from trl_packfix.planning.strategies import STRATEGIES
from trl_packfix.training.checkpoints import read_trained, save_trained
from trl_packfix.training.table_source import continue_planner, epoch_progress

LENGTHS = np.random.default_rng(0).integers(2, 40, 150).tolist()
EPOCHS = 3


def documents_for(strategy, max_length=16):
    traits = STRATEGIES[strategy]
    data = Dataset.from_dict({"input_ids": [list(range(n)) for n in LENGTHS]})
    return make_documents(TokenReader(data), max_length, traits.overlong, cuts_blocks=traits.cuts_blocks)


DOCUMENTS = {strategy: documents_for(strategy) for strategy in STRATEGIES}
FOREST = cached_documents(TokenReader(forest(60)), 96, feature=sharing("family" if "prefixes" in PRESENT else "off"))

# What is planned, by the name of a feature
PLANS = {strategy: (DOCUMENTS[strategy], {"strategy": strategy, "max_length": 16}) for strategy in STRATEGIES} | {
    "tokens_per_rank": (DOCUMENTS["stream"], {"strategy": "stream", "max_length": 16, "tokens_per_rank": 8}),
}
if "prefixes" in PRESENT:
    families = {"max_length": 96, "share_prefixes": "family"}
    PLANS["family"] = FOREST, {"strategy": "stream"} | families
    PLANS["minibatch family"] = FOREST, {"strategy": "minibatch"} | families


class Saved:
    """What a checkpoint after `step` holds, written and read as the trainer does."""

    def __init__(self, planner, launch, step, folder):
        epoch, trained = epoch_progress(planner, step)
        save_trained(folder, *trained)
        read = read_trained(folder, len(planner.documents))
        for planned_again, read_back in zip(trained, read, strict=True):
            assert np.array_equal(planned_again, read_back)
        self.step = step
        self.launch = launch
        self.state = epoch | {
            "settings": planner.packing.settings("table"),
            "engine": "none",
            "global_step": step,
            "trained": read,
        }


def resumed(plan, launch, saved):
    documents, how = PLANS[plan]
    planner = make_epochs(documents, **how, **launch)
    if saved is not None:
        continue_planner("there", saved.state, planner.packing.settings("table"), planner=planner)
    return planner


def documents_of(planner, step):
    """Return the epoch and the documents of an optimizer step of the run, from the micro-batches of all ranks."""
    epoch, inside = planner.position(step)
    schedule = planner.schedule(epoch)
    rows = []
    first = inside * planner.packing.accumulation
    degrees = schedule.degrees[first : first + planner.packing.accumulation]
    for rank in range(planner.packing.world_size):
        batches = list(schedule.micro_batches(rank))[first : first + planner.packing.accumulation]
        for batch, degree in zip(batches, degrees, strict=True):
            rows += [i for i in batch.tolist() if i != NO_DOCUMENTS and rank % degree == 0]
    return epoch, rows


launches = st.fixed_dictionaries(
    {"batch_size": st.integers(1, 3), "accumulation": st.integers(1, 4), "world_size": st.integers(1, 5)}
)


@settings(max_examples=80, deadline=None)
@given(
    plan=st.sampled_from([*PLANS]),
    attempts=st.lists(st.tuples(launches, st.floats(0, 0.9)), min_size=2, max_size=4),
    shuffle=st.booleans(),
)
def test_every_document_once_per_epoch_over_any_sequence_of_launches(plan, attempts, shuffle, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    trained = [[] for _ in range(EPOCHS)]
    saved = None
    step = 0
    for number, (launch, share) in enumerate(attempts):
        launch = launch | {"shuffle": shuffle}
        if plan == "tokens_per_rank":  # one pack holds one longest document, on an even number of ranks
            launch |= {"batch_size": 1, "world_size": 2 * launch["world_size"]}
        planner = resumed(plan, launch, saved)
        assert planner.position(step)[0] <= EPOCHS
        total = planner.total_steps(EPOCHS)
        assert total == step if step and planner.position(step)[0] == EPOCHS else total > step
        is_last = number == len(attempts) - 1
        stop = total if is_last else min(step + 1 + int(share * (total - step)), total)
        for now in range(step, stop):
            epoch, documents = documents_of(planner, now)
            assert documents, "a step without a document"
            trained[epoch] += documents
        if stop > step:
            saved = Saved(planner, launch, stop, folder)
        step = stop
    expected = list(range(len(PLANS[plan][0])))
    assert [sorted(epoch) for epoch in trained] == [expected] * EPOCHS


@pytest.mark.parametrize("plan", PLANS)
def test_a_restart_with_the_same_ranks_has_the_same_steps_after_others(plan, tmp_path):
    """This must hold also from a checkpoint within an epoch of which a part was planned for other ranks."""
    first, second = ({"accumulation": a, "world_size": 2, "batch_size": 1} for a in (1, 2))
    saved = Saved(resumed(plan, first, None), first, 3, tmp_path)
    planner = resumed(plan, second, saved)
    assert not planner.has_equal_epochs
    assert planner.position(3) == (0, 3)
    assert planner.steps_of(0) > 5, "the epoch ends before the second checkpoint"
    for step, position in ((5, (0, 5)), (planner.first_step(1) + 1, (1, 1))):
        again = resumed(plan, second, Saved(planner, second, step, tmp_path))
        assert again.position(step) == position
        assert not again.has_equal_epochs
        assert again.total_steps(EPOCHS) == planner.total_steps(EPOCHS)
        for later in range(step, planner.total_steps(EPOCHS)):
            assert documents_of(again, later) == documents_of(planner, later)


def test_an_epoch_that_drops_its_last_step_ends_there(tmp_path):
    """Documents that no step reached are not trained in the next run, if the epoch was complete."""
    launch = {"accumulation": 3, "world_size": 2, "batch_size": 1, "drop_last": True}
    planner = resumed("stream", launch, None)
    assert len(planner.schedule(0).order) < len(planner.documents), "nothing is dropped"
    fewer = launch | {"world_size": 1, "accumulation": 1}
    again = resumed("stream", fewer, Saved(planner, launch, planner.num_steps, tmp_path))
    assert again.position(planner.num_steps) == (1, 0)
    assert again.steps_of(1) == again.num_steps


def test_documents_that_are_taken_keep_what_belongs_to_them():
    """Images, trained tokens and blocks; the cache of their plans has a name of its own."""
    num = len(FOREST)
    is_chosen = np.random.default_rng(1).random(num) < 0.5
    documents = replace(FOREST, block=np.arange(num), image_values=np.arange(num) * 2, image_squares=np.arange(num) * 3)
    subset = documents.select(is_chosen)
    numbers = np.flatnonzero(is_chosen)
    for name in ("row", "start", "stop", "trained", "block", "image_values", "image_squares"):
        assert np.array_equal(getattr(subset, name), getattr(documents, name)[numbers])
    assert Documents(*[np.zeros(2, np.int64)] * 4, Ledger()).select(np.array([True, False])).file is None
