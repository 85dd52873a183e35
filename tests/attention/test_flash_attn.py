"""transformers' flash path and `flash_attention_2` in the trainer, without a GPU: `on_flash_attn.py` in a process."""

import re
from importlib.util import find_spec

import pytest
import torch
from support.flash_attn_site.flash_attn import flash_attn_varlen_func, strict
from support.launch import rows_of

# With every feature that reaches the kernel: windows, softcap, latent attention, experts, heads that share keys, layers
# without attention, several rotary embeddings, layer norms on heads; and types that are repaired around it. All types:
# `on_flash_attn.py judge --all`.
NATIVE = "cohere2 deepseek_v3 gemma2 gemma3_text gpt_neox jamba mixtral opt phi3 qwen3".split()
REPAIRED = "bart minimax recurrent_gemma".split()
# FlashAttention-2 would drop the sinks of one, the config of another refuses it, and on the third transformers does not
# pass its window: the proof against the model as given finds that
OTHERS = {"gpt_oss": "packfix_varlen", "hrm_text": "packfix_varlen", "qwen2_moe": "packfix_varlen"}
FAMILIES = "qwen2_5_vl qwen3_vl llava idefics3".split()


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """Judge texts and, with PIL, images, by type. One process judges all, because it imports for seconds."""
    words = ["judge", *NATIVE, *REPAIRED, *OTHERS]
    if find_spec("PIL"):
        words += ["--", "images", *FAMILIES]
    return {row["type"]: row for row in rows_of("on_flash_attn.py", tmp_path_factory.mktemp("judged"), *words)}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("model_type", [*NATIVE, *REPAIRED, *OTHERS])
def test_a_pack_equals_its_documents_on_the_flash_path(model_type, judged):
    row = judged[model_type]
    expected = {"attention": OTHERS.get(model_type, "flash_attention_2"), "proved": True, "right": True}
    assert row == row | expected | {"unpacked": False}
    assert bool(row["repairs"]) == (model_type in REPAIRED)
    if model_type not in OTHERS:
        assert row["calls"]["varlen"] > 10, "five packs of the judge, two layers, and the probe"
        assert row["silent"] == []


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(not find_spec("PIL"), reason="needs PIL")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pack_with_images_is_proved_on_the_flash_path(family, judged):
    """It is chosen for the whole model, as users do: the tower runs on it, too, with boundaries of its own."""
    row = judged[family]
    assert row["attention"] == row["tower"] == "flash_attention_2"
    assert row == row | {"proved": True, "unpacked": False, "repairs": [], "silent": []}
    assert row["calls"]["varlen"] > 10


@pytest.mark.slow
@pytest.mark.processes
def test_trainings_on_the_flash_path_are_right_and_stay_on_it(tmp_path):
    """Train full and LoRA, without and with both kinds of checkpointing, fp32 weights under bf16 autocast."""
    trained = rows_of("on_flash_attn.py", tmp_path, "train", str(tmp_path / "output"))
    assert len(trained) == 12
    without = {(row["type"], row["lora"]): row for row in trained if row["reentrant"] is None}
    for row in trained:
        # a leak of the path would be found by the probe, and repaired
        assert row == row | {"trained_with": "flash_attention_2", "silent": [], "repaired": 0}
        assert re.match(r"loss .* packed, .*; gradients", row["first_step"]), row
        assert row["as_without_checkpointing"], row
        if row["reentrant"] is not None:  # it recomputed: two layers in each of two steps
            first = without[row["type"], row["lora"]]
            assert row["calls"]["varlen"] >= first["calls"]["varlen"] + 4, row


# The stand-in itself


@pytest.mark.parametrize(
    "bounds, longest, message, wrong",
    [
        ([0, 3, 4, 9], 6, "begin at 0 and end at 9 for 10 tokens", slice(9, 10)),
        ([1, 3, 4, 10], 6, "begin at 1 and end at 10 for 10 tokens", slice(0, 1)),
        ([0, 3, 4, 10], 4, "a document has 6 tokens and max_seqlen is 4", slice(8, 10)),
        ([0, 4, 3, 10], 10, "fall from 4 to 3", None),
        ([0, 3, 4, 10], torch.tensor(6), "max_seqlen is a tensor", None),
    ],
)
def test_the_stand_in_records_what_a_gpu_computes_wrongly(bounds, longest, message, wrong, monkeypatch):
    monkeypatch.setattr(strict, "silent", [])
    bounds = torch.tensor(bounds, dtype=torch.int32)
    inputs = [torch.randn(10, heads, 8).bfloat16() for heads in (4, 2, 2)]
    out = flash_attn_varlen_func(*inputs, bounds, bounds, longest, longest, causal=True)
    assert any(message in line for line in strict.silent), strict.silent
    nans = out.isnan().flatten(1).all(1)
    assert nans.tolist() == [wrong is not None and i in range(10)[wrong] for i in range(10)]
