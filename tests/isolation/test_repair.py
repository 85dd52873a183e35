"""Modules that leak are found and repaired, and nothing else is."""

import copy
import json
import math
from contextlib import nullcontext
from functools import partial
from math import inf

import pytest
import torch
from support.examples import leaking_example
from support.models import DYNAMIC, build_tiny_model, longrope
from support.runs import build_trainer, gradient_of, packed_model, texts
from support.versions import enable_checkpointing, newest_models
from sweep import zoo
from sweep.judge import packed
from torch.utils.checkpoint import checkpoint

from trl_packfix import check_isolation
from trl_packfix.attention.packed_forward import PackedForward, this_thread
from trl_packfix.attention.rows import DocumentRows
from trl_packfix.isolation.axes import ModuleAxes, learn_axes
from trl_packfix.isolation.probe import Probe
from trl_packfix.isolation.repair import REPAIR_MODES, RepairedModule, RepairMode, ValueOfBatches


def pack(lengths, low=16, high=128):
    return packed([torch.randint(low, high, (n,)) for n in lengths])


def test_restarted_positions_need_no_groups_of_documents(monkeypatch):
    """Groups of documents upload indices, and the host waits for every group."""
    model = zoo.build_model("bart")
    packed_model(model).prove(model)
    monkeypatch.setattr(PackedForward, "repaired_batches", None)
    assert model(**pack([5, 1, 9])).logits.shape[1] == 15


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rope", [longrope(), DYNAMIC], ids=["longrope", "dynamic"])
def test_rope_that_depends_on_length_is_computed_for_each_document(rope, dtype):
    model = build_tiny_model(dtype=dtype, **rope)
    report = packed_model(model).prove(model)
    assert report.passed
    assert [(x.module, x.way) for x in report.repaired] == [("LlamaRotaryEmbedding", "one after the other")]


@pytest.mark.slow
@pytest.mark.parametrize("is_seen", [True, False])
def test_a_document_far_into_a_pack_is_what_it_is_alone(is_seen, monkeypatch):
    """Falcon computes ALiBi of a row in bfloat16, which counts to 256: in a longer row attention is wrong."""
    if not is_seen:
        monkeypatch.setattr("trl_packfix.isolation.check_isolation.FAR_TOKENS", 0)
    torch.manual_seed(0)
    model = build_tiny_model("falcon", alibi=True)
    batch = pack([600, 40])
    with torch.no_grad():
        logits_alone = model.eval()(batch["input_ids"][:, -40:]).logits
    report = packed_model(model).prove(model)
    assert report.passed
    with torch.no_grad():
        difference = model.eval()(**batch).logits[:, -40:] - logits_alone
    error = difference.abs().max() / logits_alone.abs().max()
    assert ([repair.module for repair in report.repaired] == ["FalconModel"]) == is_seen
    assert (error < 1e-5) == is_seen


def test_a_repair_around_the_decoder_is_seen_in_long_packs():
    """If a base model runs one document after the other, the decoder inside runs once for each."""
    model = zoo.build_model("paligemma", kind="image-text")
    packed = packed_model(model)
    packed.prove(model)
    probe = Probe(model, user_attention="sdpa")
    with probe.undisturbed():
        axes = learn_axes(probe, ["model"])["model"]
        documents = [probe.tokens(n) for n in (7, 20, 9)]
        before = probe.forward_packed(documents)
        RepairedModule(model.model, axes, RepairMode(as_rows=False, gets_positions=True)).install()
        after = probe.forward_packed(documents)
    assert [len(states) for states in after] == [7, 20, 9]
    assert before[1].shape == after[1].shape


LEAK_IN_HALF = "bloom openai-gpt blenderbot-small phimoe gpt_oss".split()
SWEPT = [pytest.param(name, marks=pytest.mark.sweep) for name in "deepseek_v4 mixtral mvp recurrent_gemma".split()]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*LEAK_IN_HALF, *SWEPT])
def test_what_leaks_in_half_precision_is_repaired_under_an_engine_too(model_type, monkeypatch):
    """Under an engine there is no gradient, and rounding hides what moves at the end of the model; fp32 tells after."""
    model = zoo.build_model(model_type).to(torch.bfloat16)
    with monkeypatch.context() as engine:
        engine.setattr("trl_packfix.isolation.probe.Probe.gradient", lambda *_: None)
        packed = packed_model(model)
        assert packed.prove(model).isolated
        assert not packed.is_unpacked
    assert bool(packed.repaired) == (model_type not in ("phimoe", "mixtral", "gpt_oss"))
    again = check_isolation(model.float(), max_length=64)
    assert again.passed
    assert again.tolerance < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["afmoe", "deepseek_v32", "phimoe"])
def test_experts_choices_and_lots_are_no_leak_under_autocast(model_type, monkeypatch):
    """Sums of experts are fp32, indices count tokens of the pack, and a router of phimoe draws lots."""
    monkeypatch.setattr("trl_packfix.isolation.probe.Probe.gradient", lambda *_: None)
    packed = packed_model(zoo.build_model(model_type))
    with torch.autocast("cpu", torch.bfloat16):
        assert packed.prove(packed.model).isolated
    assert not packed.repaired
    assert not packed.is_unpacked


def gradients(model, batches):
    """Return the gradients of the summed losses, with one backward behind all forwards."""
    model.zero_grad()
    sum(model(**batch, labels=batch["input_ids"]).loss for batch in batches).backward()
    return gradient_of(model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_is_recomputed_with_the_documents_of_its_own_forward(reentrant):
    """Two packs pass forward before either goes back: the last boundaries are not those of the first."""
    model = build_tiny_model(leaking_example().model_type)
    packed = packed_model(model)
    packed.prove(model)
    torch.manual_seed(0)
    batches = [pack([9, 4, 7]), pack([3, 12, 5])]
    expected = sum(gradients(model, [batch]) for batch in batches)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    torch.testing.assert_close(gradients(model, batches), expected, rtol=1e-4, atol=1e-6)


def test_recomputation_without_its_boundaries_raises():
    example = leaking_example()
    model = build_tiny_model(example.model_type)
    packed_model(model).prove(model)
    model.train()
    layer = example.layer_of(model)
    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)  # of the user's own code
    batch = pack([9, 4, 7])
    loss = model(**batch, labels=batch["input_ids"]).loss
    with pytest.raises(ValueError, match="recomputed in backward.*not transformers' own.*gradient_checkpointing"):
        loss.backward()


def test_forwards_that_are_no_packs_are_left_alone():
    model, pristine = (build_tiny_model(leaking_example().model_type).eval() for _ in range(2))
    assert packed_model(model).prove(model).repaired
    model.eval()
    ids = torch.randint(16, 128, (2, 11))
    mask = torch.tensor([[1] * 11, [1] * 7 + [0] * 4])
    rows = {"input_ids": ids, "attention_mask": mask}
    assert torch.equal(model(**rows).logits, pristine(**rows).logits)
    generated = [m.generate(ids[:1], max_new_tokens=5, do_sample=False, pad_token_id=0) for m in (model, pristine)]
    assert torch.equal(*generated)


def test_an_interrupted_forward_ends_when_the_repairs_are_removed():
    """After Ctrl-C, often in a notebook, torch calls no hook behind the modules that were running."""
    example = leaking_example()
    model = build_tiny_model(example.model_type)
    packed = packed_model(model)
    packed.prove(model)
    depths = []

    def interrupt(*call):
        depths.append(len(this_thread.packed_forwards))
        raise KeyboardInterrupt

    handle = next(example.attention_of(model).children()).register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**pack([9, 4, 7]))
    handle.remove()
    assert depths == [2], "the forwards of the model and of the repaired module"
    packed.restore_own_attention()
    assert not this_thread.packed_forwards
    copy.deepcopy(model)  # a call that has not ended cannot be copied


def test_a_repaired_model_can_be_copied_and_saved(tmp_path):
    example = leaking_example()
    model = build_tiny_model(example.model_type)
    packed_model(model).prove(model)
    assert check_isolation(copy.deepcopy(model), max_length=64).error is None
    model.save_pretrained(tmp_path / "saved")
    plain = type(model).from_pretrained(tmp_path / "saved")
    assert example.attention_of(model)._forward_hooks
    assert not example.attention_of(plain)._forward_hooks


def test_documents_one_after_the_other_are_refused_where_parameters_are_sharded():
    module = torch.nn.Linear(2, 2)
    axes = ModuleAxes({}, {})
    for mode in REPAIR_MODES:
        RepairedModule(module, axes, mode)
    module.weight.ds_id = 0  # as DeepSpeed marks what it has sharded
    for mode in REPAIR_MODES:
        refused = pytest.raises(ValueError, match='sharded.*on_leak="unpack"')
        with nullcontext() if mode.as_rows else refused:
            RepairedModule(module, axes, mode)


def test_arguments_that_the_probe_has_not_seen_are_refused():
    example = leaking_example()
    model = build_tiny_model(example.model_type)
    packed_model(model).prove(model)
    attention = example.attention_of(model)
    attention.register_forward_pre_hook(
        lambda m, args, kwargs: (args, kwargs | {"head_mask": torch.ones(1)}), with_kwargs=True, prepend=True
    )
    with pytest.raises(ValueError, match="repaired module got a tensor of shape \\(1,\\).*the leak probe saw none"):
        model(**pack([9, 4, 7]))


def test_the_report_says_what_was_repaired_and_the_state_keeps_it(tmp_path, capsys):
    example = leaking_example()
    trainer = build_trainer(tmp_path, texts(), model=example.model_type, max_steps=1, packing_report=True)
    trainer.train()
    shown = capsys.readouterr().out
    assert f"2 {example.module} ({example.first}) as rows of a padded batch" in shown
    assert "passed: " in shown
    assert "UNPACKED" not in shown
    assert "isolation/max_change" not in shown, "the report shows these numbers"
    assert "train_loss" in shown, "the report shows these numbers"
    trainer.save_state()
    (entry,) = [log for log in trainer.state.log_history if "isolation/max_change" in log]
    assert entry["isolation/repaired_modules"] == 2
    assert entry["isolation/unpacked"] == 0
    assert 0 <= entry["isolation/max_change"] <= entry["isolation/tolerance"] < 1e-5
    assert entry in json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]


def test_padding_stays_bounded_in_a_repaired_module():
    example = leaking_example()
    model = build_tiny_model(example.model_type)
    packed_model(model).prove(model)
    num_rows = []
    linear = next(module for module in example.attention_of(model).modules() if isinstance(module, torch.nn.Linear))
    linear.register_forward_hook(lambda m, args, out: num_rows.append(math.prod(out.shape[:-1])))
    model(**pack([200] + [5] * 60))
    assert len(num_rows) == 2  # as rows of one batch: 61 x 200
    assert max(num_rows) <= 500


def test_router_logits_of_repaired_layers_are_those_of_the_tokens():
    """In two padded batches, with whose padding a router loss would count 30 tokens of 27."""
    model = zoo.build_model("deepseek_v4")
    batch = pack([12, 3, 1, 11])
    rows = batch["input_ids"].split([12, 3, 1, 11], dim=1)
    logits_alone = [model(ids, output_router_logits=True, use_cache=False).router_logits for ids in rows]
    assert packed_model(model).prove(model).repaired[0].module == "DeepseekV4DecoderLayer"
    router_logits = model(**batch, output_router_logits=True).router_logits
    for logits, of_documents in zip(router_logits, zip(*logits_alone, strict=True), strict=True):
        torch.testing.assert_close(logits, torch.cat(of_documents), rtol=1e-4, atol=1e-5)


@newest_models
@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "recomputed", "reentrant"])
@pytest.mark.parametrize("index_topk", [6, 4096])
def test_indices_as_wide_as_a_document_stay_with_the_documents_of_a_repaired_module(index_topk, reentrant):
    """Layers of hy_v4_vl pass on indices (B, L, min(k, L)) of rows of L tokens, which are no rows of the pack."""
    model, pristine = (zoo.build_model("hy_v4_vl", "image-text") for _ in range(2))
    for built_model in (model, pristine):
        built_model.config.get_text_config().index_topk = index_topk
        for module in built_model.modules():
            if hasattr(module, "index_topk"):
                module.index_topk = index_topk
    repaired = packed_model(model).prove(model).repaired
    assert [repair.module for repair in repaired] == ["HYV4VLAttention"]
    model.train()
    if reentrant is not None:
        enable_checkpointing(model, reentrant)
        model.enable_input_require_grads()
    for lengths in ([9, 6], [7, 12, 5], [2, 3, 4]):
        batch = pack(lengths)
        model.zero_grad()
        pristine.zero_grad()
        in_pack = model(**batch).logits
        rows = batch["input_ids"].split(lengths, dim=1)
        alone = torch.cat([pristine(input_ids=ids, use_cache=False).logits for ids in rows], dim=1)
        weights = torch.randn(alone.shape, generator=torch.Generator().manual_seed(0))
        for logits in (in_pack, alone):
            (logits * weights).sum().backward()
        torch.testing.assert_close(in_pack, alone, rtol=1e-4, atol=1e-5)
        for (name, parameter), expected in zip(model.named_parameters(), pristine.parameters(), strict=True):
            if parameter.grad is not None:
                scale = max(expected.grad.abs().max().item(), 1e-3)
                assert (parameter.grad - expected.grad).abs().max() <= 1e-4 * scale, name


class LeakyAttention(torch.nn.Module):
    """Adds the output at the token before, and returns a second value for rows of several tokens only."""

    def __init__(self, inner, make_value):
        super().__init__()
        self.inner = inner
        self.make_value = make_value

    def forward(self, hidden_states, **kwargs):
        output, _ = self.inner(hidden_states, **kwargs)
        output = output + 0.3 * torch.nn.functional.pad(output, (0, 0, 1, 0))[:, :-1]
        return output, self.make_value(output) if output.shape[1] > 1 else None


def leaky_model(make_value):
    """Return a model whose attention is `LeakyAttention`, repaired, and the list of what its second layer returns."""
    model = build_tiny_model()
    for layer in model.model.layers:
        layer.self_attn = LeakyAttention(layer.self_attn, make_value)
    assert packed_model(model).prove(model).repaired[0].module == "LeakyAttention"
    values = []
    model.model.layers[1].self_attn.register_forward_hook(lambda module, args, output: values.append(output[1]))
    return model, values


def test_a_value_that_some_rows_lack_is_refused_where_it_would_be_joined():
    model, values = leaky_model(lambda output: output.mean(-1))
    model(**pack([9, 4, 7]))
    assert values[0].shape == (1, 20), "the value was not joined"
    with pytest.raises(ValueError, match=r"LeakyAttention.* tensor at \[1\] for 1 of 2 .*None.*Set on_leak=\"unpack\""):
        model(**pack([9, 1]))


def test_a_value_that_some_rows_lack_stays_with_its_rows_where_it_cannot_be_joined():
    model, values = leaky_model(lambda output: torch.ones(1, *output.shape[1:2] * 2, dtype=torch.bool).tril())
    model(**pack([1, 9]))
    longest, shortest = (values[0].select(values[0].batches, i) for i in range(2))
    assert longest.shape == (1, 9, 9)
    assert shortest is None


def test_a_value_of_other_batches_is_refused():
    undivided, divided = (DocumentRows([5, 2], torch.device("cpu"), budget) for budget in (inf, 0))
    value = ValueOfBatches(divided, [torch.zeros(1, 5, 5), torch.ones(1, 2, 2)])
    assert value.select(divided, 1).sum() == 4
    with pytest.raises(ValueError, match=r"shape \(1, 5, 5\).*computed in 2 batches.*it computes 1.*on_leak"):
        value.select(undivided, 0)


def test_a_checkpoint_recomputes_a_repaired_module_without_its_router_logits():
    """transformers records them in forward only, and what they save must not be missed in the recomputation."""
    model = build_tiny_model("qwen3_moe")
    batch = pack([12, 3, 1, 11])
    for layer in model.model.layers:
        layer.mlp.forward = lambda states, forward=layer.mlp.forward: forward(states).cumsum(dim=1)
    assert packed_model(model).prove(model).repaired[0].module == "Qwen3MoeSparseMoeBlock"

    def gradients():
        model.zero_grad()
        out = model.train()(**batch, output_router_logits=True)
        sum(x.square().mean() for x in (out.logits, *out.router_logits)).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    expected = gradients()
    enable_checkpointing(model, False)
    torch.testing.assert_close(gradients(), expected, rtol=1e-4, atol=1e-6)
