"""Model types, each built once: the proof, what is repaired, and logits and gradients by a judge without the probe."""

from functools import partial
from typing import NamedTuple

import pytest
import torch
from support.features import PRESENT, needs, sharing
from support.runs import proved
from support.versions import IS_5_24, current_models
from sweep import zoo
from sweep.judge import Judge, PrefixJudge, packed

from trl_packfix import check_isolation
from trl_packfix.attention.mixer_support import mixer_function_places
from trl_packfix.attention.packed_forward import this_thread
from trl_packfix.data.collator import PackedDataCollator

pytestmark = pytest.mark.slow

static = partial(packed, collate=PackedDataCollator(512, pad_documents_to_multiple_of=72, max_length=64))
ROWS = "as rows of a padded batch"
CONVOLUTION = "causal_conv1d_fn"
DELTA = {CONVOLUTION, "torch_chunk_gated_delta_rule"}
KIMI = {CONVOLUTION, "chunk_kimi_delta_attention"}
MAMBA2 = {CONVOLUTION, "mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined"}
MAMBA1 = {CONVOLUTION, "mamba_selective_scan", "mamba_inner_fn"}


class Wanted(NamedTuple):
    """What is known of a type.

    Attributes:
        repaired: classes of modules -> how they run.
        mixers: functions that are replaced. A release that renames one of them makes the type leak.
        shares: whether documents may share prefixes; None where that is not tested.
        static: whether packs of one shape are judged.
    """

    repaired: dict[str, str] = {}
    mixers: set[str] = set()
    shares: bool | None = None
    static: bool = False


TYPES = {
    **dict.fromkeys("afmoe gpt2 stablelm".split(), Wanted()),
    **dict.fromkeys("deepseek_v3 qwen3_moe".split(), Wanted(shares=True)),
    **dict.fromkeys("gemma3_text gpt_oss".split(), Wanted(shares=True, static=True)),
    "llama4_text": Wanted(static=True),
    # Repaired
    "falcon": Wanted({} if IS_5_24 else {"FalconAttention": ROWS}),
    "bloom": Wanted({"BloomAttention": ROWS}, shares=False),
    "mpt": Wanted({"MptAttention": ROWS}),
    "minimax": Wanted({"MiniMaxLightningAttention": ROWS}, shares=False),
    "recurrent_gemma": Wanted({"RecurrentGemmaRecurrentBlock": ROWS}),
    "bart": Wanted({"BartLearnedPositionalEmbedding": "with positions from 0 in each document"}),
    "roberta": Wanted({"Embedding": "with positions from 2 in each document"}),
    "rwkv": Wanted({"RwkvSelfAttention": ROWS, "RwkvFeedForward": ROWS}),
    # With mixers, in torch
    **dict.fromkeys("qwen3_5_text olmo_hybrid".split(), Wanted(mixers=DELTA, shares=True)),
    **dict.fromkeys("qwen3_5_moe_text".split(), Wanted(mixers=DELTA)),
    "qwen3_next": Wanted(mixers=DELTA, static=True),
    "lfm2": Wanted(mixers={CONVOLUTION}, shares=True),
    "lfm2_moe": Wanted(mixers={CONVOLUTION}),
    **dict.fromkeys("bamba falcon_h1 mamba2".split(), Wanted(mixers=MAMBA2, shares=True)),
    **dict.fromkeys("granitemoehybrid nemotron_h zamba2".split(), Wanted(mixers=MAMBA2)),
    **dict.fromkeys("falcon_mamba jamba".split(), Wanted(mixers=MAMBA1)),
    "mamba": Wanted(mixers=MAMBA1, shares=False, static=True),
    "zamba": Wanted(mixers=MAMBA1 - {"mamba_inner_fn"}),
}
INKLING2 = {
    "Inkling2DynamicShortConvolution": ROWS,
    "Inkling2RelativeLogits": "with positions from 0 in each document",
}
NEW = {
    # Layers that read the mask or have a mask of their own
    **dict.fromkeys("glm_moe_dsa deepseek_v32 axk2 dots3_note hy_v4 biogpt".split(), Wanted()),
    "bailing_hybrid": Wanted(mixers=KIMI),
    "kimi_linear": Wanted(mixers=KIMI, shares=True),
    **dict.fromkeys("inkling_text lfm3".split(), Wanted(mixers={CONVOLUTION})),
    "inkling2_text": Wanted({} if IS_5_24 else INKLING2, {CONVOLUTION}),
    "qwen4_exp_text": Wanted({"Qwen4ExpTextPLELayer": ROWS}, DELTA),
}


def marks_of(model_type: str) -> list[pytest.MarkDecorator]:
    marks = [current_models] if model_type in NEW else []
    return [*marks, needs("hybrids")] if (TYPES | NEW)[model_type].mixers else marks


@pytest.mark.parametrize("model_type", [pytest.param(kind, marks=marks_of(kind)) for kind in TYPES | NEW])
def test_documents_of_a_type_are_what_they_are_alone(model_type):
    wanted = (TYPES | NEW)[model_type]
    model = zoo.build_model(model_type)
    pristine = zoo.build_model(model_type)
    places = mixer_function_places(model)
    assert all(".modeling_" in names["__name__"] for names, _ in places)
    assert {name for _, name in places} == wanted.mixers
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    packed_model, report = proved(model)
    assert report.passed
    assert packed_model.is_proved
    assert not packed_model.is_unpacked
    assert {repair.module: repair.way for repair in packed_model.repaired} == wanted.repaired
    judge = Judge(pristine, decides_only=True)
    for feed in [None, static] if wanted.static else [None]:
        judgement = judge.judge(model, feed)
        assert judgement.right, judgement
    after = model.state_dict()
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[name], weights[name]) for name in weights)
    shares = wanted.shares if "prefixes" in PRESENT else None
    if shares is not None:
        packed_model.feature = sharing()
        reason = packed_model.prove_feature(model)
        assert (reason is None) is shares, reason
        assert wanted.repaired or shares or "a scan that cannot begin with the state of a prefix" in reason
        assert not wanted.repaired or reason.startswith("these modules are repaired")
    if shares:  # logits and every gradient, in fp64
        judgement = PrefixJudge(pristine).compare(model, torch.float64)
        limit = 1e-6 if model_type == "qwen3_moe" else 1e-13  # its router has a softmax in fp32
        assert judgement.refusal is None, judgement
        assert 0 < judgement.error < limit, judgement
    packed_model.restore_own_attention()
    assert not this_thread.packed_forwards
    assert not wanted.repaired or not check_isolation(model, max_length=64).passed, "rest restores the model"


@needs("hybrids")
@needs("prefixes")
def test_the_judge_takes_no_rounding_for_an_error(monkeypatch):
    """In every dtype, fp64 too, the gated delta rule computes in fp32 and has the rounding of fp32."""
    model, pristine = (zoo.build_model("qwen3_5_text") for _ in range(2))
    packed_model, _ = proved(model)
    packed_model.feature = sharing()
    assert packed_model.prove_feature(model) is None
    judge = PrefixJudge(pristine)
    rounded = judge.compare(model, torch.float32).error
    assert rounded > 1e-6
    monkeypatch.setattr("sweep.judge.TOLERANCE", rounded / 10)  # so that fp32 decides nothing, as for lara_mini
    judgement = judge.judge(model)
    assert judgement.dtype is torch.float64
    assert judgement.right, judgement
    assert next(model.parameters()).dtype is torch.float32

    def leak(module, args, output):  # smaller than the rounding of fp32
        return output + rounded / 10 * output.roll(1, dims=1)

    model.model.layers[0].mlp.register_forward_hook(leak)
    judgement = judge.judge(model)
    assert judgement.dtype is torch.float64
    assert not judgement.right, judgement


@pytest.mark.filterwarnings("ignore:enforce_flash_attention=False")
@pytest.mark.parametrize(
    "model_type, settings", [("llama", {"enforce_flash_attention": False}), ("bloom", {"on_leak": "unpack"})]
)
def test_packs_of_one_shape_without_our_attention(model_type, settings):
    model = zoo.build_model(model_type)
    packed_model, report = proved(model, **settings)
    assert report.passed
    assert packed_model.is_unpacked is ("on_leak" in settings)
    judgement = Judge(zoo.build_model(model_type), decides_only=True).judge(model, static)
    assert judgement.right, judgement
