"""The reference of every proof is the model as the user gave it: its own attention, in unpacked TRL's padded batch."""

from contextlib import nullcontext

import pytest
import torch
from support.models import build_tiny_model
from support.runs import packed_model, proved
from support.versions import current_models
from sweep import zoo
from sweep.judge import Judge, packed, padded_by_trl
from transformers import AttentionInterface, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from trl_packfix import PackingLeakError, check_isolation
from trl_packfix.attention import choice, varlen
from trl_packfix.attention.choice import own_attention, set_attention
from trl_packfix.attention.kernel_errors import OwnAttentionError
from trl_packfix.attention.masked import MASKED_NAME
from trl_packfix.attention.varlen import ATTENTION_NAME, varlen_attention
from trl_packfix.isolation.probe import NUM_PADDING_TOKENS, Probe
from trl_packfix.isolation.probed_model import CannotRun
from trl_packfix.isolation.thresholds import thresholds

MINIMAX = "minimax_m3_vl_text"


def states():
    return [torch.randn(1, 2, 5, 4) for _ in range(3)]


# Arguments that change scores


@pytest.mark.parametrize("name", ["block_indices", "indices", "sinks", "something_new"])
@pytest.mark.parametrize("is_training", [False, True])
def test_our_attention_refuses_an_argument_that_it_does_not_know(name, is_training):
    module = torch.nn.Module().train(is_training)
    kwargs = {"cu_seq_lens_q": torch.tensor([0, 3, 5])} if is_training else {}
    with pytest.raises(OwnAttentionError, match=rf"Module gives {name} to its attention.*Set enforce_flash"):
        varlen_attention(module, *states(), None, **{name: torch.zeros(1)}, **kwargs)
    varlen_attention(module, *states(), None, **{name: None}, **kwargs)  # not given


def test_arguments_of_transformers_are_known():
    """Known must be what a user or TRL gives to the forward, and what models pass on to attention."""
    from transformers.utils.generic import TransformersKwargs

    assert set(TransformersKwargs.__annotations__) <= varlen.KNOWN_ARGUMENTS


# The proof compares with the model as it was given


def test_an_error_of_our_attention_is_seen():
    """Made in packs and alone alike, it would cancel out against our attention on the document alone."""

    def wrong(module, *args, **kwargs):
        out, weights = varlen_attention(module, *args, **kwargs)
        return 1.01 * out, weights

    assert proved(build_tiny_model(), on_leak="raise")[1].equal
    AttentionInterface.register(ATTENTION_NAME, wrong)
    try:
        assert not proved(build_tiny_model(), on_leak="raise")[1].equal
    finally:
        AttentionInterface.register(ATTENTION_NAME, varlen_attention)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_documents_alone_run_on_the_given_attention_and_the_model_gets_ours_back(attention):
    model = build_tiny_model(attn_implementation=attention)
    forwards = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: forwards.append((own_attention(module), "cu_seq_lens_q" in kwargs)),
        with_kwargs=True,
    )
    packed, _ = proved(model)
    handle.remove()
    assert {name for name, is_packed in forwards if is_packed} == {ATTENTION_NAME}
    assert {name for name, is_packed in forwards if not is_packed} == {attention}
    assert own_attention(model) == ATTENTION_NAME
    packed.restore_own_attention()
    assert own_attention(model) == attention


def test_a_model_with_our_attention_is_compared_with_that_of_transformers():
    model = build_tiny_model()
    set_attention(model, ATTENTION_NAME)
    assert Probe(model).user_attention == "sdpa"
    assert check_isolation(model, max_length=64).equal


def test_a_long_document_does_not_run_on_eager(monkeypatch):
    probe = Probe(build_tiny_model(attn_implementation="eager"))
    names = []
    for limit in (2**30, 2**8):
        monkeypatch.setattr("trl_packfix.isolation.probed_model.LARGEST_SCORES", limit)
        with probe.as_given(100):
            names.append(own_attention(probe.inner))
    assert names == ["eager", "sdpa"]


@pytest.mark.parametrize("is_recalled", [False, True])
def test_attention_that_is_set_after_a_proof_is_set_back_in_packs(is_recalled):
    """This holds after a proof of this start, and after a proof that was remembered from an earlier start."""
    model = build_tiny_model("llama")
    first, report = proved(model)
    if is_recalled:
        first.restore_own_attention()
        recalled = packed_model(model)
        recalled.recall = lambda wrapped, prove, **what: report
        recalled.prove(model)
    model.set_attn_implementation("sdpa")
    with pytest.warns(UserWarning, match="'packfix_varlen' is set again"):
        model(**packed([torch.arange(20, 29), torch.arange(30, 35)]))


# Types that trained as another model


@current_models
def test_minimax_m3_keeps_its_own_attention_and_selects_blocks():
    model = zoo.build_model(MINIMAX)
    packed, report = proved(model)
    assert report.passed
    assert packed.attention.name == "sdpa"
    assert "block_indices" in packed.attention.reason
    assert [(repair.module, repair.way) for repair in packed.repaired] == [
        ("MiniMaxM3VLAttention", "as rows of a padded batch")
    ]
    judgement = Judge(zoo.build_model(MINIMAX)).judge(model)
    assert judgement.right
    assert 0 < judgement.given < 1e-5


def paligemma():
    return zoo.build_model("paligemma", "image-text")


def test_text_of_paligemma_is_causal_as_in_padded_batches():
    model = paligemma()
    ids = torch.arange(20, 40)
    with torch.no_grad():
        logits_alone, padded = (
            paligemma().eval()(**batch).logits[0, :20] for batch in ({"input_ids": ids[None]}, padded_by_trl([ids]))
        )
    assert (logits_alone - padded).abs().max() > 1e-2, (
        "transformers reads padding no longer: the reference may be simpler"
    )
    packed, report = proved(model)
    assert report.passed
    assert not packed.repaired
    assert not packed.is_unpacked
    judgement = Judge(paligemma()).judge(model)
    assert judgement.right
    assert judgement.given < 1e-5
    assert judgement.error > 0.1


def difference_alone(packed, model, lengths):
    """Return the difference of the last hidden states of documents in one pack from those of each document alone.

    Alone they run as the model was given.
    """
    packed.attach_packed_attention()
    probe = Probe(model, user_attention=packed.attention.previous)
    with probe.undisturbed():
        documents = [probe.tokens(n) for n in lengths]
        pairs = zip(probe.forward_packed(documents), map(probe.forward_alone, documents), strict=True)
        return max((in_pack - alone).abs().max().item() for in_pack, alone in pairs)


@pytest.mark.parametrize("on_leak", ["repair", "unpack"])
@pytest.mark.parametrize("lengths", [[20], [9, 9], [9, 4]], ids=str)
def test_documents_that_need_no_padding_are_those_of_padded_batches(lengths, on_leak, monkeypatch):
    """transformers drops a mask that hides nothing: in a pack of one document, and in rows of one length."""
    model = paligemma()
    if on_leak == "unpack":
        monkeypatch.setattr(Probe, "examples", raising)
    packed, report = proved(model, on_leak=on_leak)
    monkeypatch.undo()
    assert packed.is_unpacked if on_leak == "unpack" else report.equal and packed.attention.name == MASKED_NAME
    assert difference_alone(packed, model, lengths) < 1e-5


def raising(self, max_length):
    raise CannotRun("as planted")


def test_the_proof_has_a_pack_of_one_document(monkeypatch):
    """Without the masks the model is right on packs of several documents, and wrong on these."""
    monkeypatch.setattr(choice, "own_in_packs", lambda model, name: name)
    model = paligemma()
    packed, report = proved(model, on_leak="raise")
    assert packed.attention.name == "sdpa"
    assert report.isolated
    assert not report.equal
    assert difference_alone(packed, model, [20, 9]) < 1e-5 < 1e-2 < difference_alone(packed, model, [20])


def test_only_models_that_read_ahead_get_padding():
    ids = torch.arange(20, 31)
    for model, padding in (
        (paligemma(), NUM_PADDING_TOKENS),
        (build_tiny_model(), 0),
        (build_tiny_model("gpt_oss"), 0),
    ):
        probe = Probe(model)
        with probe.undisturbed():
            row = probe.make_unpacked_batch(ids)
            assert row["input_ids"].shape == (1, len(ids) + padding)
            assert ("attention_mask" in row) == bool(padding)
            assert probe.forward_alone(ids).shape[0] == len(ids)


# Thresholds in tokens


def tested_with(model_type="llama", **fields):
    """Return the thresholds that are tested of a config with these fields."""
    config = CONFIG_MAPPING[model_type]()
    for name, value in fields.items():
        setattr(config, name, value)
    return thresholds(config, 8192, 1)[0]


@current_models
@pytest.mark.parametrize(
    "model_type, fields, expected",
    [
        ("minimax_m3_vl_text", {}, {"index_block_size * index_topk_blocks": 16 * 128 + 128, "index_block_size": 128}),
        ("glm_moe_dsa", {"index_topk_freq": 4}, {"index_topk": 2048}),
        ("glm5_next", {"index_topk": 2048, "index_kpool": 4}, {"index_topk": 2052}),
        ("llama", {"a_new_name": 700, "hidden_size": 512}, {"a_new_name": 700}),
        ("deepseek_v4", {}, {"index_topk": 512 * 4, "compress_rates.heavily_compressed_attention": 128}),
        ("modernbert-decoder", {}, {"local_attention": 128}),
        # Chosen positions may be all until one more of the largest blocks is full
        ("llama", {"index_topk": 2048}, {"index_topk": 2048}),
        ("llama", {"index_topk": 2048, "index_kpool": 4, "other_block_size": 64}, {"index_topk": 2048 + 64}),
        # Those of layers that compress nothing are tokens
        ("deepseek_v4", {"compress_rates": {"heavily_compressed_attention": 128}}, {"index_topk": 512}),
        # The smallest threshold has two tokens
        ("llama", {"a_window": 2, "another_window": 1}, {"a_window": 2, "another_window": None}),
    ],
)
def test_thresholds_are_in_tokens(model_type, fields, expected):
    reach = tested_with(model_type, **fields)
    assert {name: reach.get(name) for name in expected} == expected
    assert not any(name.endswith(("_freq", "_heads", "_dim")) and "conv" not in name for name in reach)


def test_only_numbers_of_chosen_positions_and_sizes_of_one_family_are_multiplied():
    fields = {"index_topk": 8, "index_window": 32, "other_blocks": 16, "plain_window": 20, "plain_reach": 24}
    products = {name: value for name, value in tested_with(**fields).items() if "*" in name}
    assert products == {"index_topk * index_window": 8 * 32}


# Models that are not causal


@current_models
def test_a_model_that_reads_ahead_is_said_to():
    model = zoo.build_model("xlnet")
    report = proved(model)[1]
    assert report.passed
    assert report.reads_ahead
    assert report.summary().endswith("the model is not causal: a token changes earlier states of its document")
    assert not proved(build_tiny_model())[1].reads_ahead


@current_models
def test_a_model_whose_values_depend_on_padding_is_refused():
    """CPM-Ant counts tokens that are not 0 and is not causal: padding moves every state."""
    model = zoo.build_model("cpmant")
    report = proved(model)[1]
    assert not report.equal
    assert report.reads_ahead
    with pytest.raises(PackingLeakError, match=r"differ from themselves alone by .*The model is not causal: "):
        report.raise_if_leaking("repair")


# Ties


def tied(seed):
    """Return a model with four index heads: many keys have a score of exactly 0."""
    return zoo.build_model("glm_moe_dsa", seed=seed, index_n_heads=4, index_topk=8)


@current_models
@pytest.mark.parametrize("seed", [0, 3])
def test_ties_of_an_indexer_are_no_leak(seed, monkeypatch):
    report = check_isolation(tied(seed), max_length=64)
    assert report.passed
    monkeypatch.setattr("trl_packfix.isolation.check_isolation.FirstOfTies", nullcontext)
    report = check_isolation(tied(seed), max_length=64)
    assert not report.passed, "this seed has no ties, so it tests nothing"


@current_models
def test_an_indexer_that_reads_other_documents_is_a_leak_with_ties_too():
    model = tied(3)

    def without_boundaries(module, args, kwargs):
        hidden, residual, positions, mask, *others = args
        return (hidden, residual, positions, torch.ones_like(mask).tril(), *others), kwargs

    indexers = [module for module in model.modules() if type(module).__name__.endswith("Indexer")]
    for indexer in indexers:
        indexer.register_forward_pre_hook(without_boundaries, with_kwargs=True)
    report = check_isolation(model, max_length=64)
    assert indexers
    assert not report.passed
    assert max(report.max_change, report.max_difference) > 0.1


# Lengths above which a model is another one


@current_models
@pytest.mark.slow
def test_a_model_that_chooses_blocks_is_proved_beyond_what_it_chooses():
    """Blocks of 4 let all positions be chosen until one more block is full, at 35 tokens."""
    config = CONFIG_MAPPING["glm5_next"](**zoo.shrink(CONFIG_MAPPING["glm5_next"]()))
    config.text_config.index_topk = 32
    config.text_config.index_kpool = 4
    model = zoo.random_model(lambda: AutoModelForImageTextToText.from_config(config))
    packed, report = proved(model)
    assert report.equal
    assert any("Attention" in str(repair) for repair in packed.repaired)
    assert difference_alone(packed, model, [60, 20]) < 1e-5
    packed.restore_own_attention()
    plain, report = proved(model, max_length=35)
    assert report.equal
    assert difference_alone(plain, model, [60, 20]) > 1e-3, "nothing was chosen"


@current_models
def test_layers_that_share_keys_are_proved():
    """Given a number of logits to keep, transformers computes such layers on these tokens only."""
    layers = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    report = check_isolation(zoo.build_model("gemma4_text", num_kv_shared_layers=2, **layers), 64)
    assert report.passed
    assert report.error is None
