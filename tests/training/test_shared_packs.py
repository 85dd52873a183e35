"""Sequence parallelism on four real ranks (gloo, CPU): the exchange, its proof, and training equal to one process.

`shared_packs.py` holds the scenarios, and one process forks the ranks of all launches.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import shared_packs
import torch
from support.launch import Launch
from support.models import build_tiny_model
from support.rounding import loss_difference, tolerance
from support.runs import texts, trainer
from torch import nn

from trl_packfix import IsolationReport, PackingLeakError, SFTTrainer
from trl_packfix.attention import exchange
from trl_packfix.attention.exchange import HeadExchange, group_of, head_ranges, make_groups
from trl_packfix.attention.packed_forward import PackedForward, entered
from trl_packfix.attention.varlen import _device_boundaries, varlen_attention
from trl_packfix.isolation.packed_model import PackedModel
from trl_packfix.isolation.tracing import Leak
from trl_packfix.training.evaluation import EvaluationTotals

ROOT = Path(__file__).parents[2]
BOUNDS = torch.tensor([0, 5, 8], dtype=torch.int32)
WHOLE = PackedForward(BOUNDS, BOUNDS, 5, 5)

needs_gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")


def on_ranks(test: Callable) -> Callable:
    return needs_gloo(pytest.mark.processes(test))


@pytest.fixture(scope="module")
def launch(tmp_path_factory) -> Launch:
    folder = tmp_path_factory.mktemp("shared_packs")
    return Launch(folder, "log", [sys.executable, str(ROOT / "tests" / "shared_packs.py"), str(folder)])


@pytest.fixture(scope="module")
def rounding(launch) -> tuple[float, float]:
    """Of weights and of logged values, where the gradients of a step are added in the opposite order."""
    pairs = [(launch["one", f"{kind}_reversed"], launch["one", kind]) for kind in shared_packs.ROUNDING]
    losses = [
        loss_difference(logged(again, name), logged(expected, name))
        for again, expected in pairs
        for name in ("loss", "entropy")
    ]
    return max(difference(*pair) for pair in pairs), max(losses)


# Attention


@on_ranks
def test_parts_give_the_outputs_and_gradients_of_the_whole_pack(launch):
    cases = launch["ddp", "attention"]["cases"]
    assert len(cases) == 2 * (len(shared_packs.HEADS) + 2 * (len(shared_packs.FEATURES) - 1))
    assert max(cases.values()) < 1e-13, cases


@on_ranks
@pytest.mark.parametrize("fault", shared_packs.FAULTS)
def test_faults_are_seen(launch, fault):
    assert min(launch["ddp", "attention"]["faults"][fault]) > 1


@on_ranks
def test_a_compiled_exchange_is_the_exchange(launch):
    found = launch["ddp", "attention"]
    assert found["graphs"] > 0, "nothing was compiled"
    assert found["compiled"].pop("fault") > 1 and max(found["compiled"].values()) < 1e-13, found["compiled"]


@on_ranks
def test_groups_are_aligned_neighbours(launch):
    assert launch["ddp", "attention"]["groups"] == {2: [0, 1], 4: [0, 1, 2, 3]}


@pytest.mark.parametrize("heads, kv_heads", shared_packs.HEADS)
@pytest.mark.parametrize("degree", [2, 3, 4, 5])
def test_every_head_is_computed_once_with_the_keys_that_it_reads(heads, kv_heads, degree):
    ranges = head_ranges(heads, kv_heads, degree)
    assert [head for queries, _ in ranges for head in range(queries.start, queries.stop)] == [*range(heads)]
    sizes = [queries.stop - queries.start for queries, _ in ranges]
    assert max(sizes) - min(sizes) <= 1
    for queries, keys in ranges:
        read = {head * kv_heads // heads for head in range(queries.start, queries.stop)}
        assert read == set(range(keys.start, keys.stop))


@pytest.mark.parametrize("heads, kv_heads", shared_packs.HEADS)
def test_the_exchange_gives_each_head_its_keys_and_copies_no_index_to_the_device(heads, kv_heads, monkeypatch):
    """For such a copy the host would wait for the GPU, in every layer. Four ranks are played one after the other."""
    degree, num_tokens, sent = 4, 3, {}
    monkeypatch.setattr(exchange, "group_of", lambda degree: None)
    monkeypatch.setattr(exchange.dist, "get_rank", lambda group: member)

    def exchanged(flat, send, receive, group):
        sent[member] = flat.split(send)
        # What all send is known in the second round
        return torch.cat([sent[j][member] for j in sent]) if len(sent) == degree else flat.new_empty(sum(receive))

    monkeypatch.setattr(exchange._Exchange, "apply", exchanged)
    query, key, value = (torch.randn(1, n, degree * num_tokens, 4) for n in (heads, kv_heads, kv_heads))
    found = {}
    for member in [*range(degree)] * 2:
        part = slice(member * num_tokens, (member + 1) * num_tokens)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "tensor", None)  # it would copy from the host
            found[member] = HeadExchange(heads, kv_heads, degree).to_heads(
                *(x[:, :, part] for x in (query, key, value))
            )
    assert torch.equal(torch.cat([each[0] for each in found.values()], dim=1), query)
    for i, whole in ((1, key), (2, value)):
        read = [each[i].repeat_interleave(each[0].shape[1] // each[i].shape[1], dim=1) for each in found.values()]
        assert torch.equal(torch.cat(read, dim=1), whole.repeat_interleave(heads // kv_heads, dim=1))


def test_fewer_heads_than_ranks_are_refused():
    with pytest.raises(ValueError, match=r"2 head\(s\) got a part of a pack on 4 ranks.*at least one head.*Set `tok"):
        head_ranges(2, 1, 4)


def test_groups_need_ranks():
    make_groups([1])  # nothing to make
    with pytest.raises(ValueError, match=r"Groups of 2 ranks .* 1 rank\(s\).*Every rank needs a group.*divides"):
        make_groups([2])
    with pytest.raises(RuntimeError, match=r"no process group of 2 ranks.*cannot exchange.*`SFTTrainer`"):
        group_of(2)


def attend(tokens, forward, **given):
    q = k = v = torch.randn(1, 2, tokens, 4)
    with entered(forward):
        return varlen_attention(nn.Module(), q, k, v, None, **given)[0]


def test_a_part_with_other_tokens_is_refused():
    part = replace(WHOLE, degree=2, part_tokens=4)
    with pytest.raises(ValueError, match=r"got 8 tokens.*each of the 2 ranks .* holds 4.*Set tokens_per_rank=None"):
        attend(8, part)
    with pytest.raises(ValueError, match=r"dropout=0.1 on a part of a pack.*same random numbers.*attention_dropout"):
        attend(4, part, dropout=0.1)
    with pytest.raises(ValueError, match=r"repaired module got a part of a pack that 2 ranks share.*whole documents"):
        part.documents(1.0)


def test_all_ranks_make_all_groups_where_torch_refuses_a_group_of_some(monkeypatch):
    """As torch 2.13 does with TORCH_DISTRIBUTED_USE_TORCHCOMMS=1."""
    made = []

    def new_group(ranks, timeout=None, use_local_synchronization=False):
        if use_local_synchronization:
            raise NotImplementedError("new_group cannot delegate to split_group with use_local_synchronization=True")
        made.append(ranks)
        return tuple(ranks)

    monkeypatch.setattr(exchange, "_groups", {})
    monkeypatch.setattr(exchange.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(exchange.dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(exchange.dist, "get_rank", lambda: 6)
    monkeypatch.setattr(exchange.dist, "new_group", new_group)
    make_groups([4, 2])
    assert made == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1, 2, 3], [4, 5, 6, 7]]
    assert exchange._groups[2][1] == (6, 7) and exchange._groups[4][1] == (4, 5, 6, 7)


def test_boundaries_beyond_the_pack_are_refused_from_shapes_alone():
    """On a GPU a kernel would read beyond the tensor, and comparing the values would wait for the device."""
    _device_boundaries({}, WHOLE, 8)
    for longest, num_tokens in ((5, 4), (1, 1)):
        forward = replace(WHOLE, max_length_q=longest, max_length_k=longest)
        with pytest.raises(ValueError, match=r"2 documents of up to \d tokens.*pack has \d tokens.*read beyond"):
            _device_boundaries({}, forward, num_tokens)


# Training

ENGINES = {
    "ddp": "DistributedDataParallel",
    "zero3": "DeepSpeedEngine 3",
    "zero3_offload": "DeepSpeedEngine 3 offload",
    "fsdp2": "FSDP2",
}


def difference(found: dict, expected: dict) -> float:
    """Of the weights after training, relative to the change of all of them since the start."""
    change = (expected["end"] - expected["start"]).norm()
    assert change > 0.1, "nothing was trained, so nothing is compared"
    return ((found["end"] - expected["end"]).norm() / change).item()


def logged(result: dict, name: str) -> list[float]:
    return [entry[shared_packs.LOGGED.index(name)] for entry in result["logged"]]


@on_ranks
@pytest.mark.parametrize("engine, kind", [(e, kind) for e, kinds in shared_packs.OF_ENGINES.items() for kind in kinds])
def test_four_ranks_train_what_one_process_trains(launch, rounding, engine, kind):
    found, expected = launch[engine, kind], launch["one", kind]
    assert found["engine"] == ENGINES[engine]
    degrees = {degree for degree, _ in found["seen"]}
    assert degrees <= found["micro_steps"].keys()
    if kind in shared_packs.OF_IMAGES:
        assert max(degrees) == 4
        proved = sorted(found["micro_steps"].keys() - {1})
    else:
        special = {"stream_shards": {2}, "alike_stream": {2}, "alike_family_turns": {2, 4}}
        assert degrees == special.get(kind, {1, 4} if "family" in kind else {1, 2, 4})
        proved = [2] if kind == "stream_shards" else [2, 4]
    assert found["proved"] == (proved if shared_packs.is_proved(engine, kind) else [])
    assert (found["offloaded"] > 2 * shared_packs.NUM_STEPS) is (kind == "million")
    limit = 1e-12 if kind.endswith("fp64") else tolerance(rounding[0])
    assert difference(found, expected) <= limit
    for name in shared_packs.LOGGED:
        ours, theirs = logged(found, name), logged(expected, name)
        if name in ("trained_tokens", "num_tokens", "documents_per_step", "mean_token_accuracy", "trained_tokens/a"):
            assert ours == theirs, name
        elif theirs[0] is not None:
            assert loss_difference(ours, theirs) <= tolerance(rounding[1]), name
    assert (logged(found, "aux_loss")[0] is not None) is ("experts" in kind)
    assert (logged(found, "loss/a")[0] is not None) is (kind in ("alike_family_weighted", "stream_shards"))
    if kind.startswith("alike"):
        assert sum(logged(found, "computed_share")) < 0.9 * shared_packs.NUM_STEPS, "hardly anything was shared"


@on_ranks
def test_parts_of_constant_shapes_have_one_shape_for_each_degree(launch):
    """As many tokens as a rank holds. Without the setting there are others."""
    shapes = launch["ddp", "odd_heads"]["shapes"]
    assert shapes == {(degree, 32, min(112, 32 * degree)) for degree in (1, 2, 4)}
    assert len(launch["ddp", "sinks"]["shapes"]) > 3


@pytest.mark.sweep
@on_ranks
def test_compiled_models_train_what_one_process_trains(tmp_path):
    """Two minutes of the CPU for each kind, with the process that it is compared with."""
    kinds = [f"ddp/compiled_{kind}" for kind in shared_packs.COMPILED]
    kinds += [f"one/{kind}{order}" for kind in shared_packs.COMPILED for order in ("", "_reversed")]
    script = str(ROOT / "tests" / "shared_packs.py")
    ended = Launch(tmp_path, "log", [sys.executable, script, str(tmp_path), *kinds])
    for kind in shared_packs.COMPILED:
        found, expected = ended["ddp", f"compiled_{kind}"], ended["one", kind]
        assert found["engine"] == "OptimizedModule" and max(found["proved"]) == 4
        assert difference(found, expected) <= tolerance(difference(ended["one", f"{kind}_reversed"], expected))


@on_ranks
@pytest.mark.parametrize(
    "engine, kind",
    [
        *((engine, "full") for engine in ("ddp", "fsdp2")),
        *((engine, "alike_family") for engine in ("ddp", "zero3")),
        *(("ddp", kind) for kind in ("stream", "images_llava", "alike_images_llava")),
    ],
)
def test_eval_loss_is_that_of_one_process(launch, engine, kind):
    assert launch[engine, kind]["eval_loss"] == pytest.approx(launch["one", kind]["eval_loss"], rel=1e-6)


@on_ranks
@pytest.mark.parametrize("kind", ["images_llava", "images_qwen2_5_vl"])
def test_each_image_goes_through_the_tower_once(launch, kind):
    """A rank without an image computes one more, so that all call the tower: 2 tiles of 48 measured for llava."""
    computed, expected = (launch[engine, kind]["computed_in_tower"] for engine in ("ddp", "one"))
    assert 0 < expected <= computed < 1.2 * expected


@pytest.fixture(scope="module")
def faulty(tmp_path_factory) -> Launch:
    folder = tmp_path_factory.mktemp("faults")
    names = [f"ddp/faulty_{fault}" for fault in shared_packs.PLANTED]
    names += [f"one/{kind}" for kind in {*shared_packs.PLANTED.values()}]
    return Launch(folder, "log", [sys.executable, str(ROOT / "tests" / "shared_packs.py"), str(folder), *names])


@pytest.mark.faults
@on_ranks
@pytest.mark.parametrize("fault", shared_packs.PLANTED)
def test_the_comparison_sees_faults(faulty, fault):
    found, expected = faulty["ddp", f"faulty_{fault}"], faulty["one", shared_packs.PLANTED[fault]]
    if fault == "sources_as_met":  # they are in the log only
        assert logged(found, "trained_tokens/a") != logged(expected, "trained_tokens/a")
        assert loss_difference(logged(found, "loss/a"), logged(expected, "loss/a")) > 1e-3
    else:
        assert difference(found, expected) > 1e-3


@on_ranks
@pytest.mark.parametrize("kind", ["table", "images", "stream", "stream_shards"])
def test_a_restart_within_an_epoch_is_exact(launch, kind):
    found = launch["ddp", "restart" if kind == "table" else f"restart_{kind}"]
    assert torch.equal(*found["weights"])
    whole, resumed = found["tokens"]
    assert resumed == whole and len(whole) == 6
    whole, resumed = found["seen"]
    assert resumed == whole[-2 * shared_packs.ACCUMULATION :] and len(whole) == 6 * shared_packs.ACCUMULATION
    # Compared once more: a table in two steps, a stream in all
    is_table = kind in ("table", "images")
    assert found["steps_to_compare"] == (0 if is_table else 6 - 2)
    whole, resumed = found["reports"]
    assert resumed["ledger"] == whole["ledger"] and resumed["groups"] == whole["groups"]
    assert (whole["groups"] is None) == is_table
    if not is_table:  # what a group has read is counted once
        assert whole["num_tokens"] == resumed["num_tokens"] == found["tokens"][0][-1]


@on_ranks
@pytest.mark.parametrize(
    "name, steps", [("other_packs", 0), ("own_shards", 0), ("other_images", 0), ("other_second_pass", 3)]
)
def test_another_pack_in_a_group_is_refused(launch, name, steps):
    found = launch["ddp", name]
    messages = found["messages"]
    assert found["step"] == steps
    pattern = r"Rank 0 has read a part of a pack of \d+ tokens, and rank 1 .*another pack.*Give all ranks the same"
    assert all(re.search(pattern, message) for message in messages)


@on_ranks
def test_all_ranks_find_the_same(launch):
    first, *others = launch["ddp", "proofs"]["verdicts"]
    assert all(other == first for other in others)


@on_ranks
@pytest.mark.parametrize("model", ["llama", "gpt_oss"])
def test_right_models_pass_and_faults_are_found_and_placed(launch, model):
    found = launch["ddp", "proofs"]["verdicts"][0]
    for degree in (2, 4):
        assert found[model, None, degree] == (True, True, [])
    for fault in shared_packs.PROOFS[model]:
        is_isolated, is_equal, modules = found[model, fault, 2]
        assert (is_isolated, is_equal) == (False, False)
        assert modules and all("Attention" in module for module in modules)


@on_ranks
@pytest.mark.parametrize("model", shared_packs.IMAGE_PROOFS)
def test_images_that_lie_in_two_parts_are_proved(launch, model):
    """Text alone does not show the fault."""
    first, *others = launch["ddp", "image_proofs"]["verdicts"]
    assert all(other == first for other in others)
    assert first["split", model, "images"] and first["split", model, "shared"], "no image lies in two parts"
    found = {key: verdict for key, verdict in first.items() if key[1] == model and key[0] != "split"}
    assert len(found) == 1 + len(shared_packs.IMAGE_PROOFS[model])
    for (name, _, fault, _), (is_right, size, error) in found.items():
        if fault is None:
            assert is_right and 0 < size < 1 and error is None
        else:
            assert is_right is (name == "text") and (size > 100) is not is_right, fault


@on_ranks
@pytest.mark.parametrize("model", ["llama", "gpt_oss"])
def test_shared_prefixes_are_proved_on_parts(launch, model):
    found = launch["ddp", "proofs"]["verdicts"][0]
    for degree in (1, 2, 4):
        passes, _, gap = found["shared", model, None, degree]
        assert passes and 0 < gap < 1  # it compared something
    for fault in shared_packs.PREFIX_PROOFS[model]:
        passes, _, gap = found["shared", model, fault, 2]
        assert not passes and gap > 100, fault
    # Keys forgotten on parts only: the proof of documents that share nothing does not see it
    assert found["shared", "llama", "prefixes", 2][1]


@on_ranks
def test_a_model_that_is_right_on_whole_packs_only_is_found(launch):
    found = launch["ddp", "proofs"]["verdicts"][0]
    assert found["shift", 1] == (True, True, [])
    is_isolated, is_equal, modules = found["shift", 2]
    assert not (is_isolated and is_equal) and modules == ["TokenShift"]
    assert found["bloom"] == "attention 'eager' does not exchange tokens; 'packfix_varlen' does."


@on_ranks
@pytest.mark.parametrize("model_type", shared_packs.MIXED)
def test_mixers_on_parts_give_the_logits_and_gradients_of_the_whole_pack(launch, model_type):
    cases = launch["ddp", "hybrids"]["cases"]
    assert 0 < cases[model_type] < 1e-13, cases


@on_ranks
@pytest.mark.parametrize("model_type", shared_packs.HYBRIDS.values())
def test_mixers_are_proved_on_parts_and_faults_are_found(launch, model_type):
    """A halo that sends no gradient back moves no state: only the gradient of a document shows it."""
    found = launch["ddp", "hybrids"]["verdicts"]
    assert found[model_type, None, 4] == (True, 0.0), found
    for fault in shared_packs.PLANTED_IN_MIXERS[model_type]:
        is_right, message = found[model_type, fault, 2]
        assert not is_right, fault
        assert fault != "no_gradient" or "gradients of documents are not what they are alone" in message


@on_ranks
@pytest.mark.parametrize("model_type", shared_packs.OF_PREFIXES)
def test_mixers_on_parts_of_shared_prefixes_equal_documents_alone(launch, model_type):
    """Logits and every gradient, in fp64."""
    cases = launch["ddp", "hybrids"]["shared"]
    assert 0 < cases[model_type] < 1e-13, cases


@on_ranks
@pytest.mark.parametrize("fault", shared_packs.PREFIX_FAULTS)
def test_faults_of_mixers_that_shared_prefixes_on_parts_show_are_found(launch, fault):
    is_right, largest = launch["ddp", "hybrids"]["verdicts"]["shared", fault]
    assert not is_right and largest > 1e-2


@on_ranks
@pytest.mark.parametrize("engine, kind", shared_packs.FINDING_FAULTS)
def test_faults_in_gradients_are_found_under_engines(launch, engine, kind):
    """A fault that moves no state, on the wrapped model; and the proof leaves the engine as it was."""
    found = launch[engine, kind]["verdicts"]
    assert found.pop("changed") == []
    assert found.pop(None) == (0.0, True)
    assert found.keys() == {shared_packs.FINDING_FAULTS[engine, kind]}
    assert all(gradient > 1e-4 and states_pass for gradient, states_pass in found.values()), found


@pytest.mark.parametrize(
    "model_type, settings, reason",
    [
        ("bloom", {}, r"these modules are repaired: .*BloomAttention"),
        ("bloom", {"on_leak": "unpack"}, r"the model is unpacked: UNPACKED"),
        ("gptj", {"n_embd": 32, "n_head": 4, "rotary_dim": 4}, r"the attention of the model is 'eager': GPTJ"),
    ],
)
def test_models_that_were_changed_to_be_packed_are_not_shared(model_type, settings, reason):
    on_leak = settings.get("on_leak", "repair")
    model = build_tiny_model(model_type, **{name: value for name, value in settings.items() if name != "on_leak"})
    packed_model = PackedModel(model, torch.float32, "cpu", 64, on_leak=on_leak)
    assert packed_model.prove(model).isolated
    with pytest.raises(PackingLeakError, match=rf"A pack was to be shared by 2 ranks, and {reason}.*tokens_per_rank"):
        packed_model.prove_degree(model, 2)


def test_what_the_probe_finds_on_parts_is_told_with_the_module():
    leaks = [Leak("layers.0.conv", "Conv1d", 0.3)]
    report = IsolationReport(False, True, 0.3, 0.0, None, 4e-6, "packfix_varlen", leaks=leaks, degree=4)
    message = r"A pack was shared by 4 ranks, .*by 3.0e-01.*layers.0.conv \(Conv1d\). Set `tokens_per_rank=None`"
    with pytest.raises(PackingLeakError, match=message):
        report.raise_if_leaking()
    with pytest.raises(PackingLeakError, match=r"shared by 4 ranks, and the model raised: no index.*tokens_per_rank"):
        replace(report, error="no index", leaks=[]).raise_if_leaking()


# Settings

PARTS = {"tokens_per_rank": 64, "per_device_train_batch_size": 1}
SETTINGS = [
    (
        {"trainer_kwargs": {"compute_loss_func": lambda *given, **kwargs: None}},
        r"`compute_loss_func=<lambda>` was given with `tokens_per_rank=64`.*lies on the next rank.*Leave",
    ),
    ({"model": {"attention_dropout": 0.1}}, r"`attention_dropout=0.1`.*same random numbers.*the rate 0.0"),
    ({"enforce_flash_attention": False}, r"`enforce_flash_attention=False` was.*does not exchange tokens.*=True"),
    ({"tokens_per_rank": 32}, r"`max_length=64` .*`tokens_per_rank=32` on 1 ranks.*a group of 2 ranks.*there are 1"),
]


@pytest.mark.parametrize("settings, message", SETTINGS, ids=[str(list(settings)) for settings, _ in SETTINGS])
def test_what_does_not_work_on_parts_is_refused(settings, message, tmp_path):
    model = build_tiny_model(**settings.get("model", {}))
    with pytest.raises(ValueError, match=f"(?s){message}"):
        trainer(tmp_path, texts(8), **PARTS | settings | {"model": model})


def test_a_loss_of_its_own_is_refused(tmp_path):
    class OwnLoss(SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs).loss

    run = trainer(tmp_path, texts(8), trainer_class=OwnLoss, **PARTS)
    with pytest.raises(ValueError, match=r"`OwnLoss.compute_loss`, which does not call .* with `tokens_per_rank=64`"):
        run.train()


def test_documents_longer_than_a_rank_are_refused_where_logits_are_needed(tmp_path):
    run = trainer(tmp_path, texts(8), **PARTS)
    run.args.tokens_per_rank = 32  # on one process a document of 64 tokens would be refused at the start
    with pytest.raises(ValueError, match=r"a document of \d+ tokens, `tokens_per_rank` is 32.*whole documents on one"):
        run.predict(run.train_dataset)


def test_labels_that_were_shifted_before_the_cut_are_all_scored():
    logits, labels = torch.randn(1, 6, 9), torch.tensor([[-100, 3, 4, -100, 5, 6]])
    whole, parts = EvaluationTotals(logits.device), EvaluationTotals(logits.device)
    whole.add_logits(logits, labels)
    following = torch.cat([labels[:, 1:], torch.tensor([[-100]])], 1)
    for part in (slice(0, 3), slice(3, 6)):
        parts.add_logits(logits[:, part], labels[:, part], following[:, part])
    assert torch.allclose(whole.sums, parts.sums) and parts.sums[3] == 4
