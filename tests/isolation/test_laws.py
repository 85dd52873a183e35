"""`check_step` runs every arrangement that a law needs, and judges gradients that are set by hand."""

from math import inf

import pytest
import torch

from trl_packfix.isolation import check_step as module
from trl_packfix.isolation.check_step import (
    LAWS,
    Law,
    _check_documents,
    _is_active_dropout,
    _misleading_packs,
    _rounding_noise,
    _StepProbe,
    check_step,
    count_trained,
    mask_labels,
)
from trl_packfix.isolation.gradients import NUM_VECTORS


def make_document(first, length):
    """Return a document of consecutive tokens, each but the first of them trained."""
    tokens = [*range(first, first + length)]
    return {"input_ids": tokens, "labels": [-100, *tokens[1:]]}


DOCUMENTS = [make_document(100 * i + 100, length) for i, length in enumerate((3, 8, 5, 4, 6))]
UNIT = torch.eye(NUM_VECTORS, dtype=torch.float64)[:1]  # products of a gradient of size 1, of one parameter


def vector_of(document):
    """Return products that depend on what a right step sees: the inputs but the last, and the labels but the first."""
    seed = hash((*document["input_ids"][:-1], 0, *document["labels"][1:])) % 2**31
    vector = torch.randn(1, NUM_VECTORS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return vector * (count_trained(document) > 0)


def right(groups):
    return sum((vector_of(document) for group in groups for document in group), torch.zeros(1, NUM_VECTORS))


class ScriptedStep(_StepProbe):
    """A step whose summed gradient is what a function returns for the groups of documents."""

    def __init__(self, gradient_of=right, documents=DOCUMENTS, reference=None):
        self.gradient_of = gradient_of
        self.model = torch.nn.Linear(1, 1, bias=False)
        super().__init__(lambda groups: None, list, self.model, reference, documents)

    def summed_gradient(self, groups):
        return self.gradient_of(groups)


def find_laws(gradient_of, **settings):
    return {law.name: law.error for law in ScriptedStep(gradient_of, **settings).test_laws()}


def test_a_right_step_is_right():
    laws = find_laws(right)
    assert [*laws] == [name for name in LAWS if name != "scale"]  # there is no reference
    assert max(laws.values()) < 1e-12


def indices_of(groups):
    """Return the index of each document by its tokens; -1 for other documents."""
    tokens = [document["input_ids"] for document in DOCUMENTS]
    return [[tokens.index(d["input_ids"]) if d["input_ids"] in tokens else -1 for d in group] for group in groups]


ARRANGEMENTS = {
    "order": [[[4, 3, 2, 1, 0]], [[1, 2, 3, 4, 0]], [[0, 2, 4, 1, 3]]],
    "grouping": [[[0], [1, 2, 3, 4]], [[0, 1], [2, 3, 4]], [[0, 1, 2, 3], [4]], [[0], [1], [2], [3], [4]]],
    "masked": [[[0, 1, 2, 3, 4], [1]], [[1], [0, 1, 2, 3, 4]]],
}


@pytest.mark.parametrize("law, arrangement", [(law, groups) for law in ARRANGEMENTS for groups in ARRANGEMENTS[law]])
def test_an_error_in_one_arrangement_breaks_its_law(law, arrangement):
    laws = find_laws(lambda groups: right(groups) * (1.5 if indices_of(groups) == arrangement else 1))
    assert laws.pop(law) == pytest.approx(0.5)
    assert max(laws.values()) < 1e-12


@pytest.mark.parametrize("first_label", [-100, 100])
def test_an_error_with_and_without_the_first_label_breaks_the_law_of_labels(first_label):
    def wrong(groups):
        is_whole = indices_of(groups) == [[0, 1, 2, 3, 4]] and all_trained(groups)
        return right(groups) * (1.5 if is_whole and groups[0][0]["labels"][0] == first_label else 1)

    assert find_laws(wrong)["labels"] == pytest.approx(0.5)


def all_trained(groups):
    return all(count_trained(document) for group in groups for document in group)


@pytest.mark.parametrize("place", range(5))
def test_each_document_is_tested_among_masked_neighbours(place):
    def wrong(groups):
        trained = [count_trained(document) > 0 for document in groups[0]]
        moves = indices_of(groups) == [[0, 1, 2, 3, 4]] and trained == [i == place for i in range(5)]
        return right(groups) + moves * vector_of(DOCUMENTS[(place + 1) % 5])

    laws = find_laws(wrong)
    assert laws.pop("isolation") > 0.1
    assert max(laws.values()) < 1e-12


@pytest.mark.parametrize("factor, gap", [(2, 0), (1e-3, 0), (0, inf), (-1, inf)])
def test_a_factor_is_no_leak_unless_it_removes_or_turns_the_gradient(factor, gap):
    laws = find_laws(lambda groups: right(groups) * (factor if len(groups[0]) == 5 and not all_trained(groups) else 1))
    assert laws["isolation"] == pytest.approx(gap, abs=1e-12)


@pytest.mark.parametrize("kind", _misleading_packs(DOCUMENTS))
@pytest.mark.parametrize("place", [0, 2])
def test_each_misleading_pack_is_tested_at_both_ends(kind, place):
    """Test the documents at both ends: the document in the middle has the neighbours of both."""
    misleading = [document["input_ids"] for document in _misleading_packs(DOCUMENTS)[kind]]

    def wrong(groups):
        is_pack = len(groups) == 1 and [document["input_ids"] for document in groups[0]] == misleading
        moves = is_pack and count_trained(groups[0][place]) > 0
        return right(groups) + moves * 0.5 * vector_of(DOCUMENTS[0])

    probe = ScriptedStep(wrong)
    law = next(law for law in probe.test_laws() if law.name == "content")
    assert law.error > 0.1
    assert law.sentence == f"nor where documents {kind}"


def test_misleading_packs_by_hand():
    documents = [make_document(first, length) for first, length in ((90, 2), (10, 5), (20, 3), (30, 4))]
    packs = _misleading_packs(documents)
    tokens = {kind: [document["input_ids"] for document in pack] for kind, pack in packs.items()}
    assert tokens == {
        "are cut in the middle": [[20, 21], [30, 31], [10, 11]],
        "lack their first token": [[21, 22], [31, 32, 33], [11, 12, 13, 14]],
        "have their first and last token inside": [[20, 21, 22] * 2, [30, 31, 32, 33] * 2, [10, 11, 12, 13, 14] * 2],
        "are equal": [[10, 11, 12, 13, 14]] * 3,
        "begin alike": [[20, 21, 22, 20, 21, 22], [20, 21, 22, 30, 31, 32, 33], [20, 21, 22, 10, 11, 12, 13, 14]],
        "have the token 0 inside": [[20, 0, 22], [30, 31, 0, 33], [10, 11, 0, 13, 14]],
    }
    labels = {kind: [document["labels"] for document in pack] for kind, pack in packs.items()}
    assert labels["begin alike"][1] == [-100, -100, -100, -100, 31, 32, 33]
    assert labels["have the token 0 inside"][0] == [-100, 0, 22]
    masked = _misleading_packs([mask_labels(document) for document in documents])
    assert masked["have the token 0 inside"][0]["labels"] == [-100] * 3
    short_documents = [make_document(first, 2) for first in (10, 20, 30)]
    short = _misleading_packs(short_documents)
    assert short["are cut in the middle"] == short["lack their first token"] == short_documents


# The law of shifts


def find_shift(nearest, label, last_input):
    """Find the law of shifts on the longest document, by the sizes of the gradients with one value changed."""
    tokens = DOCUMENTS[1]["input_ids"]
    only_last = [-100] * 7 + tokens[-1:]
    sizes = [
        (tokens, only_last, 20.0),
        ([*tokens[:-2], 100, tokens[-1]], only_last, nearest),
        (tokens, [*only_last[:-1], 100], label),
        ([*tokens[:-1], 100], only_last, last_input),
    ]

    def gradient_of(groups):
        ((document,),) = groups
        (size,) = (size for *values, size in sizes if values == [document["input_ids"], document["labels"]])
        return size * UNIT

    probe = ScriptedStep()
    probe.gradient_of = gradient_of
    finding = probe.test_shift()
    return None if finding is None else finding[0]


@pytest.mark.parametrize("moved, is_tested", [(20.0, False), (21.0, False), (21.01, True)])
def test_the_shift_is_tested_where_a_label_moves_its_gradient_by_more_than_five_percent(moved, is_tested):
    assert find_shift(nearest=25.0, label=moved, last_input=23.0) == (0.15 if is_tested else None)


@pytest.mark.parametrize("moved, counts", [(20.0, False), (21.0, False), (19.0, False), (21.01, True)])
def test_the_token_before_a_label_counts_if_it_moves_the_gradient_by_more_than_five_percent(moved, counts):
    assert find_shift(nearest=moved, label=25.0, last_input=23.0) == (0.15 if counts else inf)


def test_the_law_of_shifts_names_the_nearest_token_first():
    assert find_shift(nearest=20.0, label=20.0, last_input=23.0) == inf


@pytest.mark.parametrize("place", [-2, -1])
def test_the_law_of_shifts_changes_a_token_that_begins_the_documents(place):
    """The new token is the first token of the documents, unless the token that it replaces is equal to it."""
    longest = {name: [*values] for name, values in DOCUMENTS[1].items()}
    longest["input_ids"][place] = longest["labels"][place] = DOCUMENTS[0]["input_ids"][0]
    laws = find_laws(right, documents=[DOCUMENTS[0], longest, *DOCUMENTS[2:]])
    assert laws["shift"] < 1e-12


def test_documents_of_one_token_show_no_shift():
    def gradient_of(groups):
        ((document,),) = groups
        assert {*document["input_ids"], *document["labels"]} <= {7, -100}
        return UNIT

    documents = [{"input_ids": [7] * n, "labels": [7] * n} for n in (3, 4, 5)]
    assert ScriptedStep(gradient_of, documents).test_shift() is None


def test_the_law_of_scales_compares_each_document_with_its_reference():
    for place in range(5):
        probe = ScriptedStep(reference=lambda document: None)
        probe.reference_gradient = lambda document, place=place: (
            vector_of(document) * (0.5 if document is DOCUMENTS[place] else 1)
        )
        law = next(probe.test_laws())
        assert (law.name, law.error) == ("scale", pytest.approx(1.0))


# Ranks


@pytest.mark.parametrize(
    "rank, num_ranks, groups, expected, documents",
    [
        (0, 2, [[0, 1, 2, 3, 4]], [[0, 2, 4]], [0, 1, 2, 3, 4]),
        (1, 2, [[0, 1, 2, 3, 4]], [[1, 3]], [0, 1, 2, 3, 4]),
        (0, 2, [[0], [1, 2]], [[0], [1]], [0, 0, 1, 2]),
        (1, 2, [[0], [1, 2]], [[0], [2]], [0, 0, 1, 2]),
        (2, 3, [[0, 1], [2]], [[0], [2]], [0, 0, 1, 2, 2, 2]),
    ],
)
def test_ranks_divide_each_group(rank, num_ranks, groups, expected, documents):
    probe = ScriptedStep()
    probe.rank = rank
    probe.num_ranks = num_ranks
    micro_batches = []
    probe.step = micro_batches.extend
    num_trained = sum(len(DOCUMENTS[i]["input_ids"]) - 1 for i in documents)
    total = sum(vector_of(DOCUMENTS[i]) for i in documents)
    probe.gradient_after = lambda step: step() or 1.25 * total / num_trained
    assert probe.gap_over_ranks([[DOCUMENTS[i] for i in group] for group in groups]) == pytest.approx(0.25)
    assert indices_of(micro_batches) == expected


def test_the_law_of_groupings_divides_every_grouping_over_ranks():
    probe = ScriptedStep()
    probe.num_ranks = 2
    groupings = []
    probe.gap_over_ranks = lambda groups: groupings.append(indices_of(groups)) or 0.1 * len(groupings)
    law = next(law for law in probe.test_laws() if law.name == "grouping")
    assert law.error == pytest.approx(0.5)
    assert groupings == [[[0, 1, 2, 3, 4]], *ARRANGEMENTS["grouping"]]
    assert "micro-batches and ranks" in law.sentence


# Tolerances


@pytest.mark.parametrize(
    "repetition, rounding, tolerance",
    [(0.0, 0.0, 1e-6), (1e-8, 5e-8, 1e-6), (1e-3, 2e-3, 2e-2), (3e-3, 2e-3, 3e-2), (0.0, 1.5e-7, 1.5e-6)],
)
def test_the_tolerance_is_ten_times_the_larger_change(monkeypatch, repetition, rounding, tolerance):
    monkeypatch.setattr(module, "_StepProbe", lambda *args: ScriptedStep())
    monkeypatch.setattr(ScriptedStep, "measure_repetition", lambda probe: repetition)
    monkeypatch.setattr(ScriptedStep, "measure_rounding", lambda probe: rounding)
    report = check_step(None, None, DOCUMENTS, None)
    assert report.tolerance == pytest.approx(tolerance, rel=1e-12)
    assert report.holds


def test_one_product_of_one_document_is_a_gradient(monkeypatch):
    def gradient_of(groups):
        return right(groups) * UNIT * (groups != [[DOCUMENTS[0]]])

    monkeypatch.setattr(module, "_StepProbe", lambda *args: ScriptedStep(gradient_of))
    assert check_step(None, None, DOCUMENTS, None).broken, "the sum over documents is another one"


def test_a_gradient_is_summed_over_trained_tokens():
    probe = ScriptedStep()
    micro_batches = []
    probe.step = micro_batches.extend
    probe.gradient_after = lambda step: step() or 3 * UNIT
    gradient = _StepProbe.summed_gradient(probe, [DOCUMENTS[:2], [mask_labels(DOCUMENTS[2])]])
    assert torch.equal(gradient, 3 * (2 + 7) * UNIT)
    assert indices_of(micro_batches) == [[0, 1], [2]]


def test_rounding_is_the_largest_change_of_three_draws():
    sizes = [20.0, 21.0, 23.0, 22.0, 40.0]
    probe = ScriptedStep()
    probe.gradient_of = lambda groups: UNIT * sizes.pop(0)
    assert probe.measure_rounding() == 0.15
    assert sizes == [40.0]
    sizes = [21.0, 20.0]
    assert probe.measure_repetition() == 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_noise_is_half_a_unit_in_the_last_place(dtype):
    """Below 1, numbers are half an epsilon apart; a number of 1 is moved there by a quarter of all draws."""
    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())
    ones = torch.ones(4000, dtype=dtype)
    draws = []
    for seed in (0, 1, 1):
        with _rounding_noise(model[0], seed):
            draws.append(model[0](ones))
            assert model[0](torch.arange(3)).tolist() == [0, 1, 2]
    assert sorted({*draws[0].tolist()}) == [1 - torch.finfo(dtype).eps / 2, 1]
    assert (draws[0] < 1).double().mean() == pytest.approx(0.25, abs=0.03)
    assert not torch.equal(draws[0], draws[1])
    assert torch.equal(draws[1], draws[2])
    assert torch.equal(model[0](ones), ones), "a hook that was left behind"
    with _rounding_noise(model, 0):  # the module around the two innermost ones adds nothing
        assert 0.3 < (model(ones) < 1).double().mean() < 0.5


# What is not seen


def explain(probe, tolerance=1e-6, repetition=0.0, laws=("shift",)):
    return [*probe.explain_unseen([Law(name, 0.0, "") for name in laws], tolerance, repetition)]


def test_what_is_unseen_is_said_above_a_tolerance_of_five_percent():
    probe = ScriptedStep(reference=lambda document: None)
    assert explain(probe, 0.05, 0.005) == []
    (text,) = explain(probe, 0.0501, 0.005)
    assert text == "errors below 5%, because rounding explains them. Run it in fp32"
    (text,) = explain(probe, 0.06, 0.0051)
    assert text.startswith(
        "errors below 6%, because two equal steps differ by 0.5%: the step draws random numbers (for"
    )
    assert explain(probe, inf, 0.1) == ["any error, because gradients are not finite"]
    assert explain(ScriptedStep()) == ["a factor or a term that every document has. Give `reference`"]
    assert len(explain(probe, laws=("order",))) == 1


@pytest.mark.parametrize("missed, end", [(1, "(`0.weight`)"), (5, ", `4.weight`)"), (6, ", `4.weight`, ...)")])
def test_five_parameters_without_a_gradient_are_named(missed, end):
    probe = ScriptedStep(reference=lambda document: None)
    probe.model = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(8)))
    probe.model[7].weight.requires_grad = False
    gradient = torch.zeros(7, NUM_VECTORS)
    gradient[missed:, 3] = 1  # one product of each of the others
    probe.gradients_alone = [torch.zeros(7, NUM_VECTORS), gradient]
    (text,) = explain(probe)
    assert f"{missed} of 7 parameters" in text
    assert end in text


@pytest.mark.parametrize(
    "rate, training, active", [(0.1, True, True), (1e-9, True, True), (0.0, True, False), (0.1, False, False)]
)
def test_a_dropout_is_active_with_a_rate_above_0_in_training(rate, training, active):
    assert _is_active_dropout(torch.nn.Dropout(rate).train(training)) is active
    assert not _is_active_dropout(torch.nn.Linear(1, 1))

    class Dropout(torch.nn.Module):
        """Has no rate."""

    assert not _is_active_dropout(Dropout())
    linear = torch.nn.Linear(1, 1)
    linear.p = 0.5
    assert not _is_active_dropout(linear)


# Documents


def test_the_first_token_is_never_trained():
    assert count_trained({"input_ids": [5, 6, 7], "labels": [5, -100, 7]}) == 1
    assert count_trained({"input_ids": [5, 6], "labels": [5, -100]}) == 0
    assert count_trained({"input_ids": [5, 6], "labels": [-100, 0]}) == 1
    assert count_trained({"input_ids": [5, 6, 7], "labels": [-101, -99, 7]}) == 2


@pytest.mark.parametrize(
    "lengths, added, message",
    [
        ((2, 3, 4, 2), [], None),
        ((2, 3, 4), [], "3 documents were given, 3 of them with a trained token, of 3 lengths"),
        ((2, 3, 3, 2), [], "4 documents were given, 4 of them with a trained token, of 2 lengths"),
        ((2, 3, 4, 5), [{"input_ids": [1], "labels": [1]}], "5 documents were given, 4 of them"),
        ((2, 3, 4, 5), [{"input_ids": [1, 2], "labels": [1, -100]}], "5 documents were given, 4 of them"),
        (
            (2, 3, 4, 5),
            [{"input_ids": [1, 2], "labels": [1]}, {"input_ids": [1], "labels": []}],
            "Document 4 was given with 2 tokens and 1 labels",
        ),
    ],
)
def test_four_documents_of_three_lengths_are_enough(lengths, added, message):
    documents = [make_document(10, length) for length in lengths] + added
    if message is None:
        return _check_documents(documents)
    with pytest.raises(ValueError, match=message):
        _check_documents(documents)
