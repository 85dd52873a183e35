"""Recurrent mixers in packs: which functions are replaced and when, and that documents start anew in them."""

import re
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from support.attention import pack_alone
from support.models import attend_packs, build_tiny_model
from support.runs import build_trainer, packed_model, texts, weights
from support.shared_rows import pack_of
from support.versions import enable_checkpointing
from sweep import zoo
from sweep.double import in_double
from torch._subclasses.fake_tensor import FakeTensorMode

from trl_packfix import PackingLeakError
from trl_packfix.attention import mixer_support
from trl_packfix.attention.mixer_support import MIXER_FUNCTIONS, mixer_function_places
from trl_packfix.attention.packed_forward import this_thread
from trl_packfix.data.collator import PackedDataCollator
from trl_packfix.features.hybrids import mixers, prefixes
from trl_packfix.features.hybrids.support import MIXER_REPLACEMENTS, MIXERS
from trl_packfix.features.prefixes.collator import PrefixCollator
from trl_packfix.features.prefixes.probe import PrefixProbe
from trl_packfix.features.prefixes.sharing import PrefixSharing
from trl_packfix.group import Group
from trl_packfix.layout import layout_of

# Functions of the same packages that only generation calls
GENERATION = set(
    "causal_conv1d_update fused_recurrent_gated_delta_rule fused_recurrent_kda selective_state_update".split()
)


def functions(model):
    """Return what is now at the places of the functions that are replaced, by module and name."""
    return {(names["__name__"], name): names[name] for names, name in mixer_function_places(model)}


def pack(*lengths):
    batch = PackedDataCollator()([{"input_ids": torch.randint(16, 128, (n,))} for n in lengths])
    del batch["labels"]
    return batch


def packing_model(seed=0):
    """Return a model that takes packs, in training mode."""
    model = zoo.build_model("qwen3_next", seed=seed).train()
    attend_packs(model)
    return model


PACKAGES = {
    "qwen3_next": ["causal-conv1d", "flash-linear-attention"],
    "lfm2": ["causal-conv1d"],
    "bamba": ["causal-conv1d", "mamba-ssm"],
    "llama": None,
}


@pytest.mark.parametrize("model_type, packages", PACKAGES.items())
def test_packages_with_kernels_are_named(model_type, packages):
    """Packages that transformers looks for have the name that pip has for them."""
    assert MIXERS.missing_packages(zoo.build_model(model_type)) == packages


def test_transformers_has_no_other_function_with_a_kernel():
    """Fail on a release with a new kind of mixer, whose functions then get an entry in `MIXER_REPLACEMENTS`."""
    pattern = re.compile(r'^@use_kernel_func_from_hub_with_fallback\("(\w+)".*\)\n(?:@.*\n)*def (\w+)', re.MULTILINE)
    folder = Path(transformers.__file__).parent / "models"
    functions_of_kernels = {
        pair for path in folder.glob("*/modeling_*.py") for pair in pattern.findall(path.read_text())
    }
    functions_that_train = {(kernel, function) for kernel, function in functions_of_kernels if kernel not in GENERATION}
    assert len(functions_that_train) >= 6, functions_that_train
    assert {function for _, function in functions_that_train} <= set(MIXER_REPLACEMENTS), functions_that_train
    assert set(MIXER_REPLACEMENTS) == set(MIXER_FUNCTIONS)


def test_names_are_replaced_while_a_pack_runs_only():
    model = zoo.build_model("qwen3_next")
    before = functions(model)
    guard = attend_packs(model)
    during = []
    layers = model.model.layers
    layers[0].linear_attn.register_forward_hook(lambda *args: during.append(functions(model)))
    model.eval()(input_ids=torch.arange(20, 29)[None], use_cache=False)
    model.train()(**pack(5, 4))
    assert functions(model) == before
    assert during[0] == before
    assert all(during[1][place] is not function for place, function in before.items())
    assert len(before) == 2
    broken = layers[1].register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**pack(5, 4))
    assert functions(model) == before
    assert not this_thread.packed_forwards
    broken.remove()
    other_model = packing_model(seed=1)  # two models of a type, one within the other
    layers[0].register_forward_hook(lambda *args: other_model(**pack(3, 3)) and None)
    model(**pack(5, 4))
    assert functions(model) == functions(other_model) == before
    guard.remove()


def test_names_are_put_back_after_a_training_that_was_interrupted(tmp_path):
    """After Ctrl-C, often in a notebook, torch calls no hook behind the modules that were running."""
    model = build_tiny_model("qwen3_next")
    before = functions(model)
    trainer = build_trainer(tmp_path, texts(), model=model, max_steps=2)
    during = []

    def interrupt(*call):
        if trainer.state.global_step == 1:
            during.append(functions(model))
            raise KeyboardInterrupt

    model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert during[0] != before, "no pack was interrupted"
    assert functions(model) == before


def test_two_threads_run_packs_at_once():
    """After the first pack has put its functions back, the second pack still separates its documents."""
    first = packing_model()
    second = packing_model(seed=1)
    before = functions(first)
    packs = [pack(5, 4), pack(3, 7)]
    logits_alone = [model(**batch).logits for model, batch in zip((first, second), packs, strict=True)]
    first_begun = threading.Event()
    second_begun = threading.Event()
    logits = []
    thread = threading.Thread(target=lambda: logits.append(first(**packs[0]).logits))

    def wait_for_second(*args):
        first_begun.set()
        assert second_begun.wait(60)

    def wait_for_the_end_of_first(*args):
        second_begun.set()
        thread.join()

    first.model.layers[0].register_forward_pre_hook(wait_for_second)
    second.model.layers[0].register_forward_pre_hook(wait_for_the_end_of_first)
    thread.start()
    assert first_begun.wait(60)
    logits.append(second(**packs[1]).logits)
    assert functions(first) == before
    assert all(map(torch.equal, logits, logits_alone))
    assert len(logits) == 2


def test_a_row_without_packing_in_another_thread_is_no_part_of_a_pack():
    """Evaluate a model in one thread while another thread trains a model of its type on a pack."""
    trained = packing_model()
    evaluated = zoo.build_model("qwen3_next", seed=1)
    row = {"input_ids": torch.arange(20, 29)[None], "use_cache": False}
    logits_alone = evaluated.eval()(**row).logits
    results = []
    thread = threading.Thread(target=lambda: results.append(evaluated(**row).logits))

    def in_the_middle(*args):
        thread.start()
        thread.join()

    trained.model.layers[0].register_forward_pre_hook(in_the_middle)
    trained(**pack(5, 4))
    assert torch.equal(results[0], logits_alone)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_backward_in_another_thread_recomputes_the_pack(reentrant):
    """On a GPU torch runs the backward in a thread of its own."""
    model = packing_model()
    enable_checkpointing(model, reentrant=reentrant)
    model.enable_input_require_grads()
    batch = pack(5, 4)
    gradients = []
    for in_thread in (False, True):
        loss = model(**batch).logits.square().mean()
        if in_thread:
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        else:
            loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
        model.zero_grad(set_to_none=True)
    assert len(gradients[1]) == len(gradients[0]) > 10
    assert all(map(torch.equal, *gradients))


@pytest.mark.slow
def test_what_is_not_found_is_repaired(monkeypatch):
    """Functions that transformers has renamed are not found, so their module is repaired."""
    names = [name for name in MIXER_FUNCTIONS if name != "mamba2_chunk_scan"]
    monkeypatch.setattr(mixer_support, "MIXER_FUNCTIONS", names)
    model = zoo.build_model("bamba")
    packed = packed_model(model)
    assert packed.prove(model).isolated
    assert [repair.module for repair in packed.repaired] == ["BambaMixer"]


@pytest.mark.sweep
def test_compiled_mixers_start_anew_in_each_document(tmp_path):
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    trainers = [
        build_trainer(tmp_path, texts(), "lfm2", max_steps=2, learning_rate=1e-2, **more) for more in ({}, compiled)
    ]
    for trainer in trainers:
        torch.compiler.reset()
        trainer.train()
        assert trainer.packed_model.is_proved
        assert not trainer.packed_model.repaired
    assert torch.equal(*map(weights, trainers))


@pytest.mark.parametrize("lengths", [(5, 1, 2, 9), (17,), (4, 13, 0, 0), (1,) * 17], ids=str)
@pytest.mark.parametrize("width", [2, 4])
def test_the_convolution_of_a_pack_is_that_of_its_documents(width, lengths):
    """Empty documents pad the number of documents to a constant."""
    module = sys.modules[type(build_tiny_model("lfm2").model.layers[0]).__module__]
    states = torch.randn(1, 6, 17, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, width, dtype=torch.float64)
    inner = module.causal_conv1d_fn
    out = mixers.convolve_documents(inner, pack_alone(lengths), states, weight, None, "silu")
    documents = states.split([n for n in lengths if n], dim=2)
    expected = torch.cat([inner(document, weight, None, "silu") for document in documents], dim=2)
    assert torch.allclose(out, expected, atol=1e-14)
    cotangent = torch.randn_like(out)
    first, second = (torch.autograd.grad(x, states, cotangent, retain_graph=True)[0] for x in (out, expected))
    assert torch.allclose(first, second, atol=1e-14)
    assert first.any()


def test_ranks_share_no_pack_whose_documents_share_prefixes():
    """Refuse it here for types that the trainer does not know; it refuses the others earlier."""
    module = sys.modules[type(build_tiny_model("lfm2").model.layers[0]).__module__]
    pack = pack_alone([17], group=Group(2), part_tokens=9, kv_index=torch.arange(17))
    with pytest.raises(ValueError, match="part of a pack on 2 ranks whose documents share prefixes .*tokens_per_rank"):
        mixers.convolve_documents(module.causal_conv1d_fn, pack, torch.zeros(1, 6, 9), torch.zeros(6, 3), None, "silu")


def test_boundaries_of_kernels_need_no_host():
    """Use fake tensors, which raise where the host would read them."""
    with FakeTensorMode():
        pack = pack_alone([5, 1, 2, 9])
        assert mixers._boundary_tensor(pack, "seq_idx", 17).shape == (1, 17)
        assert mixers._boundary_tensor(pack, "cu_seqlens", 17) is pack.cu_seq_lens_q
        source, own_rows = mixers._rows_with_context(pack, 4, 17)
        assert own_rows.shape == (17,)
        assert source.shape == (17 + 4 * 3,)


@pytest.mark.parametrize("fault", ["parents", "states", "halo"])
def test_the_proof_finds_a_wrong_state(fault, monkeypatch):
    """If there is only one common beginning, every piece has it as its parent."""
    right = prefixes.levels_of
    right_stretches = mixers._rows_with_context

    def wrong(running):
        levels, place = right(running)
        first = levels[1]  # all its pieces get the state that most of them need, or none
        most_common = first.parents.mode().values.expand_as(first.parents)
        return [levels[0], first._replace(parents=most_common if fault == "parents" else None), *levels[2:]], place

    def without_prefix(running, *args):
        pack_alone = replace(running, kv_index=None, cu_seq_lens_k=running.cu_seq_lens_q, derived={})
        return right_stretches(pack_alone, *args)

    model = zoo.build_model("qwen3_5_text")
    packed = packed_model(model)
    packed.prove(model)
    if fault == "halo":
        monkeypatch.setattr(mixers, "_rows_with_context", without_prefix)
    else:
        monkeypatch.setattr(prefixes, "levels_of", wrong)
    packed.feature = PrefixSharing("pack")
    assert packed.prove_feature(model) is not None
    if fault == "parents":
        examples = PrefixProbe.examples

        def one_tree(self, longest):
            documents, variants = examples(self, longest)
            return documents[:-2], [variant[:-2] for variant in variants]

        monkeypatch.setattr(PrefixProbe, "examples", one_tree)
        packed.feature = PrefixSharing("pack")
        assert packed.prove_feature(model) is None


def test_a_scan_without_states_is_refused_with_one_remedy():
    model = build_tiny_model("mamba")
    packed = packed_model(model, feature=PrefixSharing("family"))
    packed.prove(model)
    reason = packed.prove_feature(model)
    assert reason.endswith("Its documents must be whole")
    with pytest.raises(PackingLeakError) as refused:
        packed.feature.refuse_model(reason, "repair")
    assert str(refused.value).count("Set `share_prefixes") == 1


def turns_of(num_turns, generator):
    """Return one sample per turn: each history goes on where the one before it ended, and has an answer of its own."""
    history = torch.randint(16, 128, (3 * num_turns,), generator=generator)
    answers = torch.randint(16, 128, (num_turns, 4), generator=generator)
    return [torch.cat([history[: 3 * (i + 1)], answer]) for i, answer in enumerate(answers)]


@pytest.mark.parametrize("num_turns", [5, prefixes.MAX_LEVELS, 3 * prefixes.MAX_LEVELS + 2])
def test_deep_branches_need_few_calls(num_turns):
    """Compare output and gradients of a scan from states, in fp64, with each document alone."""
    documents = turns_of(num_turns, torch.Generator().manual_seed(0))
    batch = PrefixCollator(min_shared=1)([{"input_ids": ids} for ids in documents])
    layout = layout_of(batch)
    own_rows = [layout.predicting_rows(i) for i in range(num_turns)]
    table = torch.randn(128, 14, dtype=torch.float64)  # by token, so that rows of shared tokens have the same values
    calls = []

    def scan(query, key, value, g, beta, **options):
        calls.append(len(query))
        return inner(query, key, value, g=g, beta=beta, **options)

    def run_mixer(running, tokens):
        q, k, v, g, beta = (x[None, :, None] for x in leaf[tokens].split([4, 4, 4, 1, 1], dim=1))
        gates = (-g[..., 0].exp(), beta[..., 0].sigmoid())
        out, _ = mixers.scan_delta(scan, running, q, k, v, *gates, use_qk_l2norm_in_kernel=True)
        return out[0]

    inner = sys.modules[type(zoo.build_model("qwen3_next").model.layers[0]).__module__].torch_chunk_gated_delta_rule
    leaf = table.clone().requires_grad_()
    weights = torch.randn(sum(map(len, own_rows)), 1, 4, dtype=torch.float64)
    with in_double():
        outputs_alone = torch.cat([run_mixer(pack_alone([len(ids)]), ids)[:-1] for ids in documents])
        expected = torch.autograd.grad((outputs_alone * weights).sum(), leaf)[0]
        calls.clear()
        pack = pack_of(batch)
        out = run_mixer(pack, batch["input_ids"][0])[torch.cat(own_rows)]
        gradient = torch.autograd.grad((out * weights).sum(), leaf)[0]
    levels = prefixes.levels_of(pack)[0]
    assert len(levels) == num_turns or num_turns > prefixes.MAX_LEVELS
    assert 1 < len(levels) <= prefixes.MAX_LEVELS
    assert len(calls) <= 2 * len(levels)
    assert (out - outputs_alone).abs().max() < 1e-13
    assert (gradient - expected).abs().max() < 1e-12 < expected.abs().max()
    scanned = sum(rows.numel() for level in levels for rows in level.batches)
    assert scanned < sum(map(len, documents)), "packed whole, the scan has more rows"


def test_a_triton_kernel_without_a_gpu_is_named():
    """flash-linear-attention ends so on a machine without a GPU, where transformers uses it nevertheless."""
    model = zoo.build_model("lfm2")

    def raise_as_triton(*args):
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    model.model.layers[0].register_forward_hook(raise_as_triton)
    with pytest.raises(ValueError, match=r"in Triton ran without a GPU \(0 active.*Uninstall `flash-linear-attention`"):
        packed_model(model).prove(model)


@pytest.mark.parametrize("is_trained, is_fused", [(True, True), (False, False), (None, False)])
def test_the_fused_kernel_runs_only_where_it_gets_all_of_a_trained_projection(is_trained, is_fused, monkeypatch):
    """Adapters freeze the weight of the projection, and the kernel would leave the adapter out."""
    monkeypatch.setattr(mixers, "takes_argument", lambda inner, name: name == "seq_idx")
    weight = None if is_trained is None else torch.zeros(4, 4, requires_grad=is_trained)
    calls = []
    out = mixers.run_fused(
        lambda *args, **options: calls.append(options) or "fused",
        pack_alone([2, 4]),
        torch.zeros(1, 6, 4),
        outproj_weight=weight,
    )
    assert (out == "fused") is is_fused
    assert [options["seq_idx"].tolist() for options in calls] == [[[0, 0, 1, 1, 1, 1]]] * is_fused
