"""The probe judges numbers at, below and above its limits as it says. The numbers are set by hand, so no model runs."""

from math import inf, nan
from types import SimpleNamespace

import pytest
import torch
from support.scripted import ROUNDING, ScriptedProbe

from trl_packfix.feature import PLAIN
from trl_packfix.isolation import check_isolation as isolation
from trl_packfix.isolation.check_isolation import Gap, ProbeMeasurement, check_packs, judge_probe, report_refusal
from trl_packfix.isolation.isolation_report import IsolationReport
from trl_packfix.isolation.probe import Probe, RunPair
from trl_packfix.isolation.probed_model import MAX_NOISE, CannotRun
from trl_packfix.isolation.tracing import Leak

HALF = 2.0**-6  # as large as in half precision
ABOVE = 1 + 2.0**-10  # times a limit is just above it
LEAK = Leak("layer", "Layer", 0.1)


@pytest.fixture(autouse=True)
def no_thresholds(monkeypatch):
    monkeypatch.setattr(isolation, "thresholds", lambda *args: ({}, {}))


@pytest.fixture
def traced(monkeypatch):
    """Return the calls of the functions that look for modules, by name. Each of them returns no leak."""
    calls = []

    def record(name):
        def find(probe, *args, **more):
            calls.append((name, *args, *more.items()))
            return []

        monkeypatch.setattr(isolation, name, find)

    for name in ("find_leaks", "find_origins", "find_wrong_parts"):
        record(name)
    return calls


def measure(probe, lengths=(13, 1, 11, 22)):
    return ProbeMeasurement(probe, [probe.tokens(length) for length in lengths])


def change_variants(gap):
    """Return a probe with states that are moved by `gap` in variants of the first pack, but not in longer packs."""
    probe = ScriptedProbe(lambda pack, i: gap * (len(pack[0]) == 13 and pack is not probe.first_pack))
    return probe


# Measurements


def test_gaps_are_relative_to_the_largest_state_of_any_document():
    probe = ScriptedProbe(lambda pack, i: (0.5, -4.0, 2.0, 0.0)[i])
    measurement = measure(probe)
    assert measurement.scale == 4
    documents = measurement.documents
    assert probe.longest_alone == [22]
    alone = [measurement.measure_gap(RunPair(documents, [document], is_alone=True))[0] for document in documents]
    assert alone == [0.125, 1, 0.5, 0]


def test_states_that_are_known_are_not_computed_again():
    probe = ScriptedProbe()
    measurement = measure(probe)
    documents = measurement.documents
    variant = [*documents[:3], probe.tokens(5)]
    measurement.measure_gap(RunPair(documents, variant))
    measurement.measure_gap(RunPair(documents, variant))
    assert probe.packs == [[13, 1, 11, 22], [13, 1, 11, 5], [13, 1, 11, 5]]
    measurement.measure_gap(RunPair(variant, documents))
    measurement.measure_gap(RunPair(variant, documents))
    assert probe.packs[3:] == [[13, 1, 11, 5], [13, 1, 11, 22], [13, 1, 11, 22]]
    probe.alone = lambda document: 1.0  # states of documents alone were computed before
    assert measurement.measure_gap(RunPair(variant, documents[:1], is_alone=True))[0] == 0
    assert measurement.measure_gap(RunPair(variant, variant[3:], is_alone=True))[0] == 1


def test_a_gap_is_a_defect_just_above_the_rounding():
    measurement = measure(ScriptedProbe())
    assert measurement.explains(ROUNDING)
    assert len(measurement.probe.packs) == 1, "a repeated run that was not needed"
    assert not measurement.explains(ROUNDING * ABOVE)
    assert not measurement.explains(nan)
    assert measurement.tolerance == ROUNDING


def test_a_repeated_run_raises_the_tolerance_by_eight_times_its_change_once():
    probe = ScriptedProbe(lambda pack, i: ROUNDING * (len(probe.packs) - 1))
    probe.size = 2.0
    measurement = measure(probe)
    expected = ROUNDING + 8 * ROUNDING / 2
    assert measurement.explains(expected)
    assert measurement.tolerance == measurement.rounding == expected
    assert not measurement.explains(expected * ABOVE)
    assert len(probe.packs) == 2
    assert probe.draws == []


@pytest.mark.parametrize("rounding, draws", [(1e-4, []), (1.01e-4, [1, 2, 3, 4, 5, 6]), (HALF, [1, 2, 3, 4, 5, 6])])
def test_roundings_are_drawn_in_half_precision_only_and_each_once(rounding, draws):
    probe = ScriptedProbe(rounding=rounding)
    measurement = measure(probe)
    assert not measurement.explains(0.9)
    assert not measurement.explains(0.9)
    assert probe.draws == draws
    assert len(probe.packs) == 2 + len(draws)


def test_draws_end_when_one_of_them_explains_the_gap():
    probe = ScriptedProbe(lambda pack, i: 0.01 * (probe.draw or 0), rounding=HALF)
    measurement = measure(probe)
    assert measurement.explains(0.05)  # the second draw explains three times its change of 0.02
    assert probe.draws == [1, 2]
    assert measurement.tolerance == pytest.approx(0.06)
    assert not measurement.explains(0.51)
    assert measurement.tolerance == pytest.approx(0.18)
    assert probe.draws == [1, 2, 3, 4, 5, 6]


def test_the_tolerance_has_a_cap():
    probe = ScriptedProbe(lambda pack, i: 0.4 * (len(probe.packs) - 1))
    measurement = measure(probe)
    assert not measurement.explains(0.7)
    assert measurement.tolerance == MAX_NOISE


# The verdict


def test_a_model_whose_documents_do_not_move_passes():
    report, pair = judge_probe(ScriptedProbe(reads_ahead=True), None)
    assert pair is None
    assert report == IsolationReport(
        isolated=True,
        equal=True,
        max_change=0,
        max_difference=0,
        max_gradient=0,
        tolerance=ROUNDING,
        attention="sdpa",
        reads_ahead=True,
        reach=300,
    )


@pytest.mark.parametrize("gap, passes", [(ROUNDING, True), (ROUNDING * ABOVE, False)])
def test_a_change_is_a_leak_just_above_the_tolerance(traced, gap, passes):
    report, pair = judge_probe(change_variants(gap), None)
    assert (report.isolated, report.equal) == (passes, True)
    assert (report.max_change, report.max_difference) == (gap, 0)
    assert report.reach == 300 * passes
    assert len(traced) == (not passes)
    if not passes:
        assert traced == [("find_leaks", pair, ROUNDING)]
        assert pair.has_equal_lengths, "the variant with a longer document does not show the place so clearly"


@pytest.mark.parametrize("value", [inf, nan])
@pytest.mark.parametrize("length", [13, 1, 11, 22])
def test_a_document_whose_states_are_not_finite_in_packs_hides_no_change_of_others(traced, value, length):
    def state(document):
        return value if len(document) == length else 0.0

    probe = ScriptedProbe(lambda pack, i: state(pack[i]) + 0.5 * (pack is not probe.first_pack))
    report, _ = judge_probe(probe, None)
    assert not report.isolated
    assert report.max_change == inf


@pytest.mark.parametrize("gap, passes", [(ROUNDING, True), (ROUNDING * ABOVE, False)])
@pytest.mark.parametrize("place", range(4))
def test_a_document_that_is_not_what_it_is_alone_is_unequal_just_above_the_tolerance(traced, gap, passes, place):
    probe = ScriptedProbe(lambda pack, i: gap * (len(pack[0]) == 13 and i == place))
    report, pair = judge_probe(probe, None)
    assert (report.isolated, report.equal) == (True, passes)
    assert (report.max_change, report.max_difference) == (0, gap)
    assert report.reach == 300 * passes
    assert traced == []
    if not passes:
        assert pair.second_documents == [probe.first_pack[place]]
        assert pair.is_alone


def test_a_pack_of_one_document_is_tested():
    report, pair = judge_probe(ScriptedProbe(lambda pack, i: 0.25 * (len(pack) == 1)), None)
    assert not report.equal
    assert report.max_difference == 0.25
    assert len(pair.first_documents) == 1


def test_of_documents_that_differ_as_much_the_last_one_is_shown():
    probe = ScriptedProbe(alone=lambda document: 0.5)
    pair = judge_probe(probe, None)[1]
    assert pair.first_documents is probe.first_pack
    assert pair.second_documents == [probe.first_pack[3]]


@pytest.mark.parametrize("gradient, isolated, reach", [(0.0, True, 300), (None, True, 300), (1e-9, False, 0)])
def test_any_gradient_that_crosses_is_a_leak(traced, gradient, isolated, reach):
    report, pair = judge_probe(ScriptedProbe(gradient=lambda documents: gradient), None)
    assert report.isolated is isolated
    assert report.max_gradient == gradient
    assert report.reach == reach
    assert (pair is None) is isolated


def test_without_gradients_none_is_computed():
    probe = ScriptedProbe(takes_gradient=False, gradient=None)
    assert judge_probe(probe, None)[0].max_gradient is None


def test_a_module_that_leaks_is_a_leak_although_rounding_hides_it_at_the_end(monkeypatch):
    probe = change_variants(HALF / 2)
    probe.rounding = HALF
    monkeypatch.setattr(isolation, "find_origins", lambda probe, pair, tolerance: [LEAK])
    report, pair = judge_probe(probe, None)
    assert report.leaks == [LEAK]
    assert not report.isolated
    assert pair.has_equal_lengths


@pytest.mark.parametrize("dtype, name", [("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "fp16")])
def test_the_report_names_the_dtype(dtype, name):
    assert judge_probe(ScriptedProbe(dtype=getattr(torch, dtype)), None)[0].dtype == name


def test_a_document_exceeds_the_largest_threshold_by_three_tokens(monkeypatch, traced):
    calls = []
    tested = ({"window": 40, "chunk": 64}, {"positions": 900})
    monkeypatch.setattr(isolation, "thresholds", lambda *values: calls.append(values) or tested)
    probe = ScriptedProbe()
    report = judge_probe(probe, 200)[0]
    assert calls == [("config", 200, 1)], "all documents of the small pack are longer than a threshold below 1"
    assert [pack for pack in probe.packs if len(pack) == 3] == [[7, 67, 9], [7, 8, 9]]
    assert report.unreachable == {"positions": 900}
    # Of the long pack, changes and differences count, and its modules are not recorded
    report, pair = judge_probe(ScriptedProbe(lambda pack, i: 0.25 * ([*map(len, pack)] == [7, 8, 9])), 200)
    assert (report.isolated, report.equal) == (False, True)
    assert pair.is_large
    assert not judge_probe(ScriptedProbe(alone=lambda document: 0.25 * (len(document) == 67)), 200)[0].equal
    # Documents that are given are tested without longer ones
    probe = ScriptedProbe()
    judge_probe(probe, 200, probe.examples(200))
    assert max(map(len, probe.packs)) == 4


@pytest.mark.parametrize("place", range(3))
def test_each_document_of_the_long_pack_is_tested(monkeypatch, place):
    monkeypatch.setattr(isolation, "thresholds", lambda *values: ({"window": 64}, {}))
    probe = ScriptedProbe(lambda pack, i: 0.25 * (len(pack) == 3 and i == place))
    report, pair = judge_probe(probe, 200)
    assert (report.isolated, report.equal) == (True, False)
    assert pair.is_large
    assert len(pair.second_documents[0]) == (7, 67, 9)[place]


# Distances


@pytest.mark.parametrize(
    "max_length, farthest, packs",
    [
        (None, None, [[100] * 3]),
        (30, None, [[30] * 10]),
        (100, 300, [[100] * 3]),
        (500, 301, [[100] * 3, [100] * 4]),
        (1000, 1000, [[100] * 3, [100] * 6, [100] * 10]),
    ],
)
def test_a_document_is_tested_behind_fillers_at_distances_that_double(max_length, farthest, packs):
    probe = ScriptedProbe()
    report = judge_probe(probe, max_length, farthest=farthest)[0]
    assert [pack for pack in probe.packs if sum(pack) > 200] == [[*pack, 11] for pack in packs]
    assert report.reach == sum(packs[-1])


@pytest.mark.parametrize("gap, reach", [(ROUNDING, 600), (ROUNDING * ABOVE, 300)])
@pytest.mark.parametrize("leaks", [True, False])
def test_a_document_far_from_the_start_is_judged_like_the_others(traced, gap, reach, leaks):
    """Where documents before it move it, it is a leak; where they do not, it is another error of distance."""

    def packed(pack, i):
        if sum(map(len, pack)) != 611:
            return 0.0
        far_packs.append(pack)
        is_changed = not leaks or gap == ROUNDING or pack is far_packs[0]
        return gap if is_changed else 0.0

    far_packs = []
    report, pair = judge_probe(ScriptedProbe(packed), 600, farthest=600)
    passes = reach == 600
    assert (report.isolated, report.equal) == (passes or not leaks, passes)
    assert (report.max_difference, report.reach) == (gap, reach)
    if not passes:
        assert pair.is_large
        assert pair.is_alone is not leaks
        assert len(pair.first_documents) == 7


def with_memory_for(num_tokens, **attributes):
    """Return a probe that runs packs of at most so many tokens."""

    def packed(pack, i):
        if sum(map(len, pack)) > num_tokens:
            raise torch.OutOfMemoryError("no memory")
        return 0.0

    return ScriptedProbe(packed, **attributes)


def test_the_first_pack_without_memory_ends_the_test_of_distances():
    assert judge_probe(with_memory_for(400), 600, farthest=600)[0].reach == 300


@pytest.mark.parametrize("num_tokens, attributes", [(100, {}), (400, {"has_engine": True}), (400, {"degree": 2})])
def test_a_far_pack_without_memory_is_raised_where_it_cannot_be_left_out(num_tokens, attributes):
    with pytest.raises(torch.OutOfMemoryError):
        judge_probe(with_memory_for(num_tokens, **attributes), 600, farthest=600)


# The modules where information crosses


def find_modules(probe, gaps, tolerance=ROUNDING, *, is_changed=False, is_equal=True):
    """Return the modules and the pair for changes of some gaps, given as (gap, equal lengths, large)."""
    measurement = measure(probe)
    measurement.tolerance = tolerance
    documents = measurement.documents
    changes = [
        Gap(gap, RunPair(documents, [*documents[:3], probe.tokens(22 if equal else 5)], is_large=large))
        for gap, equal, large in gaps
    ]
    leaks, pair = isolation._find_leaking_modules(measurement, changes, is_changed=is_changed, is_equal=is_equal)
    return leaks, pair, [pair for _, pair in changes]


@pytest.mark.parametrize(
    "gaps, shown",
    [
        ([(0.1, True, False), (0.2, True, False)], 1),
        ([(0.1, True, False), (0.2, False, False)], 0),
        ([(ROUNDING, True, False), (0.2, False, False)], 1),
        ([(ROUNDING * ABOVE, True, False), (0.2, False, False)], 0),
        ([(0.0, False, False), (ROUNDING, True, False)], 1),
    ],
)
def test_a_leak_is_shown_by_packs_of_equal_lengths_that_exceed_the_tolerance(traced, gaps, shown):
    leaks, pair, pairs = find_modules(ScriptedProbe(), gaps, is_changed=True)
    assert pair is pairs[shown]
    assert leaks == []
    assert traced == [("find_leaks", pair, ROUNDING)]


@pytest.mark.parametrize("is_changed, is_equal, called", [(False, True, 0), (True, True, 1), (False, False, 1)])
def test_parts_of_ranks_are_compared_where_documents_move_or_differ(traced, is_changed, is_equal, called):
    probe = ScriptedProbe(degree=2)
    find_modules(probe, [(0.1, True, False)], is_changed=is_changed, is_equal=is_equal)
    assert traced == [("find_wrong_parts", ROUNDING)] * called


def test_documents_that_do_not_stand_one_after_the_other_are_not_traced(traced):
    assert find_modules(ScriptedProbe(traces_leaks=False), [(0.1, True, False)], is_changed=True)[0] == []
    assert traced == []


def test_a_pair_that_shows_no_change_is_not_returned_after_one_that_does(traced):
    _, pair, pairs = find_modules(ScriptedProbe(rounding=HALF), [(1e-9, True, False), (0.0, True, False)])
    assert len(traced) == 1
    assert pair is pairs[0]


@pytest.mark.parametrize("rounding, called", [(1e-4, 0), (1.01e-4, 3), (HALF, 3)])
def test_in_half_precision_modules_are_compared_one_by_one(traced, rounding, called):
    probe = ScriptedProbe(rounding=rounding)
    gaps = [(1e-9, True, False), (0.0, True, False), (1e-9, False, False), (1e-9, True, True)]
    leaks, _, pairs = find_modules(probe, gaps, tolerance=rounding)
    assert leaks == []
    expected = [
        ("find_origins", pairs[0], rounding / 2),
        ("find_origins", pairs[2], rounding),
        ("find_leaks", pairs[3], rounding, ("positions_only", True)),
    ]
    assert traced == expected[:called]
    assert len(probe.packs) == 1 + (called > 0), "rounding is that of a repeated run"


def test_the_first_pair_that_shows_a_module_is_enough(monkeypatch):
    monkeypatch.setattr(isolation, "find_origins", lambda probe, pair, tolerance: [LEAK] * (not pair.has_equal_lengths))
    gaps = [(1e-9, True, False), (1e-9, False, False), (1e-9, True, False)]
    leaks, pair, pairs = find_modules(ScriptedProbe(rounding=HALF), gaps, tolerance=HALF)
    assert leaks == [LEAK]
    assert pair is pairs[1]


# Gaps that rounding explains


def test_the_smallest_gap_under_any_two_roundings_counts_for_each_token():
    """Give each run seven roundings: its own, and six that are drawn, of other numbers than the other run's."""

    def packed(pack, i):
        if pack is documents:  # each token is right in one of the first runs
            return torch.tensor([0.5 * (probe.draw != 4), 0.5 * (probe.draw != 5)])[: len(pack[i])]
        return torch.tensor([0.0, 0.0625 * (probe.draw == 11)])[: len(pack[i])]

    probe = ScriptedProbe(packed)
    documents = [probe.tokens(2), probe.tokens(1)]
    pair = RunPair(documents, [documents[0], probe.tokens(1)])
    assert isolation._smallest_gap(probe, pair) == 0
    assert probe.draws == [*range(12)]
    assert len(probe.packs) == 14
    probe.packed = lambda pack, i: torch.tensor([0.5, 0.25])[: len(pack[i])] * (pack is documents)
    assert isolation._smallest_gap(probe, pair) == 0.5
    probe.packed = lambda pack, i: nan * (pack is documents)
    assert isolation._smallest_gap(probe, pair) == inf


def test_the_largest_gaps_are_explained_one_by_one_until_one_is_a_defect(monkeypatch):
    measurement = measure(ScriptedProbe())
    measurement.scale = 4.0
    smallest = {"a": 0.0, "b": ROUNDING * 4, "c": 1.0, "d": 0.0}
    asked = []
    monkeypatch.setattr(isolation, "_smallest_gap", lambda probe, pair: asked.append(pair) or smallest[pair])
    gaps = [Gap(0.1, "d"), Gap(0.3, "b"), Gap(0.4, "a"), Gap(0.2, "c"), Gap(0.0, "e")]
    isolation._explain_by_rounding(measurement, gaps)
    assert asked == ["a", "b", "c"]
    assert gaps == [(0.1, "d"), (ROUNDING, "b"), (0.0, "a"), (0.25, "c"), (0.0, "e")]
    gaps = [Gap(ROUNDING, "d")]
    isolation._explain_by_rounding(measurement, gaps)
    assert gaps == [(ROUNDING, "d")]


def test_whole_packs_of_one_rank_are_tested_by_default(monkeypatch):
    calls = []
    monkeypatch.setattr(isolation, "check_packs", lambda *values, **more: calls.append((values, more)))
    isolation.check_isolation("model")
    images = object()
    isolation.check_isolation("model", 64, 2, images=images, user_attention="eager")
    assert calls == [
        (("model", None, 1), {"feature": PLAIN, "user_attention": None, "farthest": None}),
        (("model", 64, 2), {"feature": images, "user_attention": "eager", "farthest": 64}),
    ]


# The reports of text and of images


def report_of(**values):
    values = {"max_change": 0.1, "max_difference": 0.1, "tolerance": 0.1} | values
    return IsolationReport(isolated=True, equal=True, max_gradient=None, attention="sdpa", **values)


@pytest.fixture
def run_packs(monkeypatch):
    """Return a function that runs `check_packs` with a scripted probe, and reports and pairs set by hand."""

    def run(probe, *judged, **settings):
        calls = []
        probes = []
        feature = SimpleNamespace(make_probe_class=lambda of: lambda *values: probes.append((of, *values)) or probe)
        monkeypatch.setattr(
            isolation, "judge_probe", lambda *values, **more: calls.append((values, more)) or judged[len(calls) - 1]
        )
        report = check_packs(None, 64, feature=feature, **settings)
        assert probes == [(Probe, None, 1, None)]
        return report, calls

    return run


def test_a_report_has_the_larger_numbers_of_text_and_images(run_packs):
    probe = ScriptedProbe(has_further_examples=True, further_examples=lambda: "images")
    text = report_of(max_change=0.1, max_difference=0.4, tolerance=0.2, unreachable={"window": 5}, reach=300)
    images = report_of(max_change=0.3, max_difference=0.2, tolerance=0.1, reach=7)
    report, calls = run_packs(probe, (text, None), (images, None), farthest=64)
    assert (report.max_change, report.max_difference, report.tolerance) == (0.3, 0.4, 0.2)
    assert report.unreachable == {"window": 5}
    assert calls == [((probe, 64), {"farthest": 64}), ((probe, 64, "images"), {})]
    report, _ = run_packs(probe, (images, None), (text, None))
    assert (report.max_change, report.max_difference, report.tolerance) == (0.3, 0.4, 0.2)


def test_images_are_not_tested_after_a_defect_of_text(run_packs):
    text = report_of()
    assert run_packs(ScriptedProbe(has_further_examples=True), (text, "pair"))[0] is text
    assert run_packs(ScriptedProbe(), (text, None))[0] is text


@pytest.mark.parametrize("degree, attends, refused", [(1, True, False), (2, True, True), (2, False, False)])
def test_attention_that_exchanges_nothing_is_refused_on_several_ranks(monkeypatch, run_packs, degree, attends, refused):
    monkeypatch.setattr(isolation, "has_attention", lambda model: attends)
    probe = ScriptedProbe(degree=degree, error_unpacked=lambda: None)
    report, _ = run_packs(probe, (report_of(), None))
    assert (report.error is not None) is refused


@pytest.mark.parametrize("unpacked", [None, "no row"])
def test_a_refusal_says_whether_the_model_runs_without_packing(unpacked):
    probe = ScriptedProbe(degree=2, error_unpacked=lambda: unpacked)
    assert report_refusal(probe, CannotRun("no pack")) == IsolationReport(
        isolated=False,
        equal=False,
        max_change=inf,
        max_difference=inf,
        max_gradient=None,
        tolerance=0.0,
        attention="sdpa",
        error=unpacked or "no pack",
        degree=2,
        runs_unpacked=unpacked is None,
    )
