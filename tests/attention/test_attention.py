"""Whole models on our attention, every document packed against alone, and what the guard on them refuses."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.models import select_attention
from support.versions import current_models, enable_checkpointing
from transformers import AutoModelForCausalLM

from trl_packfix.attention import varlen
from trl_packfix.attention.choice import set_attention
from trl_packfix.attention.forwards import mark_packed_forwards
from trl_packfix.attention.packed_forward import this_thread
from trl_packfix.attention.varlen import ATTENTION_NAME
from trl_packfix.data.collator import PackedDataCollator

LENGTHS = [1, 40, 7, 100]  # across the window and chunk of 16 tokens
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = {
    "llama": {},
    "qwen3": {},
    "gemma3": {},  # sliding window
    "gemma2": {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8},  # softcap
    "gpt_oss": {},  # sinks, sliding window
    "opt": {},  # its mask ignores position_ids
    "mixtral": {},
    "qwen3_moe": {},
    "mistral": {"sliding_window": 16},
    "stablelm": {},  # hands position_ids only to its attention
    "qwen2_moe": MOE  # its windows exist in the mask only
    | {"shared_expert_intermediate_size": 32, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "llama4_text": {  # its chunks exist in the mask only
        "head_dim": 8, "attention_chunk_size": 16, "num_local_experts": 2, "intermediate_size_mlp": 64,
        "no_rope_layers": [1, 0],
    },
    "deepseek_v3": {  # value heads smaller than query heads
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
        "num_key_value_heads": 4, "head_dim": 4,
    },
}  # fmt: skip


def make_documents(lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(3, 300, (n,), generator=generator).tolist()} for n in lengths]


def make_pack(lengths=LENGTHS, **changes):
    return {**PackedDataCollator()(make_documents(lengths)), **changes}


@pytest.fixture
def calls(monkeypatch):
    """Return a list with an entry for each packed call that reached our CPU kernels."""
    counted = []
    attend = varlen.attend_on_cpu

    def counting(*args, **kwargs):
        counted.append(args[3])
        return attend(*args, **kwargs)

    monkeypatch.setattr(varlen, "attend_on_cpu", counting)
    return counted


def largest_gradient_error(model, reference):
    """Return the largest difference of any gradient entry, relative to the largest gradient entry of the model."""
    pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters(), strict=True)]
    assert all((a is None) == (b is None) for a, b in pairs)
    pairs = [(a, b) for a, b in pairs if a is not None]
    assert pairs
    return max((a - b).abs().max().item() for a, b in pairs) / max(b.abs().max().item() for _, b in pairs)


# Whole models


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["", "checkpointing", "reentrant checkpointing"])
@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=current_models) if name == "opt" else name for name in MODELS]
)
def test_packed_equals_alone(model_type, checkpointing, tiny_model, float64_throughout, calls):
    """Logits and gradients must be those of stock eager attention on each document by itself."""
    settings = {"dtype": torch.float64, **MODELS[model_type]}
    model_alone = tiny_model(model_type, attn_implementation="eager", **settings).train()
    model = tiny_model(model_type, **settings).train()
    for m in (model_alone, model):
        m.set_experts_implementation("eager")  # the grouped matrix product has no float64
    assert select_attention(model).name == ATTENTION_NAME
    mark_packed_forwards(model)
    if checkpointing is not None:
        enable_checkpointing(model, checkpointing)
        model.enable_input_require_grads()

    expected = torch.cat(
        [model_alone(torch.tensor([d["input_ids"]]), use_cache=False).logits for d in make_documents()], 1
    )
    masks = []
    for module in model.modules():
        if type(module).__name__.endswith("Attention"):
            module.register_forward_pre_hook(
                lambda _, args, kwargs: masks.append(kwargs.get("attention_mask")), with_kwargs=True
            )
    batch = make_pack()
    batch.pop("labels")
    logits = model(**batch).logits
    num_layers = model.config.num_hidden_layers
    assert len(calls) == num_layers
    assert sum(calls[0]) == sum(LENGTHS)
    assert len(masks) == num_layers
    assert all(mask is None for mask in masks)
    assert (logits - expected).abs().max() < 1e-10

    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    assert len(calls) == num_layers * (1 if checkpointing is None else 2)
    assert largest_gradient_error(model, model_alone) < 1e-10
    assert not this_thread.packed_forwards


@pytest.mark.parametrize("model_type", ["llama", "gemma3", "gemma2", "gpt_oss", "mistral"])
def test_generate_and_padding_are_as_before(model_type, tiny_model):
    """Outside packed forwards a padded batch, with and without a cache, gives stock attention's tokens and logits."""
    settings = MODELS[model_type]
    stock = tiny_model(model_type, **settings).eval()
    model = tiny_model(model_type, **settings).eval()
    select_attention(model)
    mark_packed_forwards(model)
    input_ids = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    padding = torch.ones_like(input_ids)
    padding[0, :9] = 0
    for cache in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        ours, theirs = (m.generate(input_ids, attention_mask=padding, **options, **cache) for m in (model, stock))
        assert torch.equal(ours.sequences, theirs.sequences)
        difference = (torch.stack(ours.logits) - torch.stack(theirs.logits)).abs().max()
        assert difference < 1e-5
        assert model_type in ("gemma2", "gpt_oss") or difference == 0
    for kwargs in ({}, {"attention_mask": padding}, {"attention_mask": padding.flip(1)}):
        is_real = kwargs.get("attention_mask", torch.ones_like(input_ids)).bool()
        with torch.no_grad():
            difference = (model(input_ids, **kwargs).logits - stock(input_ids, **kwargs).logits)[is_real].abs().max()
        assert difference < 1e-5


def test_a_saved_checkpoint_reloads_without_us(tiny_model, tmp_path):
    model = tiny_model("llama")
    assert select_attention(model).name == model.config._attn_implementation == ATTENTION_NAME
    model.save_pretrained(tmp_path)
    assert ATTENTION_NAME not in (tmp_path / "config.json").read_text()
    assert "attn_implementation" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


# The guard


def test_guard_is_removable_and_survives_errors(tiny_model):
    model = tiny_model("llama").train()
    select_attention(model)
    guard = mark_packed_forwards(model)
    batch = make_pack()
    masks = []
    handle = model.model.layers[0].register_forward_pre_hook(lambda *_: masks.append(len(this_thread.packed_forwards)))
    model(**batch)
    assert masks == [1]
    assert not this_thread.packed_forwards
    broken = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**batch)
    assert not this_thread.packed_forwards
    broken.remove()
    with pytest.raises(ValueError):
        model(**{**batch, "use_cache": True})
    assert not this_thread.packed_forwards
    model(**batch)
    assert not this_thread.packed_forwards
    guard.remove()
    with pytest.raises(ValueError, match="prepare_for_packing"):  # now transformers builds a mask, which is noticed
        model(**batch)
    handle.remove()


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"attention_mask": torch.ones(1, 148)}, r"4 documents came with attention_mask of shape \(1, 148\).*Feed one"),
        ({"past_key_values": ()}, r"4 documents came with past_key_values.*documents would see each other.*Feed one"),
        ({"cache": ()}, r"4 documents came with cache: .*documents would see each other.*Feed one"),
        ({"use_cache": True}, r"came with use_cache=True.*ignores boundaries.*Set use_cache=False"),
        ({"use_cache": None}, r"came with the config's use_cache=True.*Set use_cache=False"),
        ({"input_ids": torch.ones(2, 148, dtype=torch.long)}, r"came with 2 rows.*which one is unknown.*Feed one"),
        ({"max_length_k": None}, r"without max_length_k.*need all four.*PackedDataCollator"),
        ({"cu_seq_lens_k": torch.tensor([0, 148])}, r"\[0, 1, 41, 48, 148\] and cu_seq_lens_k \[0, 148\].*same tensor"),
    ],
)
@pytest.mark.parametrize("name", [ATTENTION_NAME, "sdpa"])
def test_guard_refuses(name, changes, message, tiny_model):
    model = tiny_model("llama")
    set_attention(model, name)
    mark_packed_forwards(model)
    with pytest.raises(ValueError, match=message):
        model(**make_pack(**changes))


@pytest.mark.parametrize("model_type", ["llama", "opt", "stablelm", "gpt_oss"])
def test_training_without_boundaries_is_refused(model_type, tiny_model):
    """Models make up position_ids when they are given none: one document is never assumed from these."""
    model = tiny_model(model_type).train()
    select_attention(model)
    mark_packed_forwards(model)
    rows = torch.ones(2, 40, dtype=torch.long)
    with pytest.raises(ValueError, match="never assumes a single document|got an attention_mask"):
        model(rows[:1], use_cache=False)
    with pytest.raises(ValueError, match="got 2 rows|got an attention_mask"):
        model(rows, use_cache=False)
    padding = torch.ones_like(rows)
    padding[0, :9] = 0
    with pytest.raises(ValueError, match=r"got an attention_mask of shape \(2, 1, 40, 40\)"):
        model(rows, attention_mask=padding, use_cache=False)
    model.eval()(rows, attention_mask=padding)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "stablelm"])
def test_a_pack_of_one_document(model_type, checkpointing, tiny_model, calls):
    model = tiny_model(model_type).train()
    select_attention(model)
    mark_packed_forwards(model)
    if checkpointing:
        enable_checkpointing(model, reentrant=False)
    model(**make_pack([30])).loss.backward()
    assert calls == [[30]] * (4 if checkpointing else 2)


@pytest.mark.parametrize("task_type", [None, "CAUSAL_LM"])
def test_guard_on_peft_and_on_a_replaced_forward(task_type, tiny_model, calls):
    """TRL replaces `forward`; PEFT wraps the model. The hooks sit on the transformers model and run in both."""
    adapter = LoraConfig(target_modules=["q_proj"], task_type=task_type)
    model = get_peft_model(tiny_model("llama"), adapter).train()
    choice = select_attention(model)
    mark_packed_forwards(model)
    inner = model.get_base_model()
    assert choice.name == inner.config._attn_implementation == ATTENTION_NAME
    original = inner.forward
    inner.forward = lambda *args, **kwargs: original(*args, **kwargs)
    model(**make_pack()).loss.backward()
    assert len(calls) == 2
    with pytest.raises(ValueError, match="came with use_cache=True"):
        model(**make_pack(use_cache=True))


def test_multimodal_text_part_only(calls):
    vision = pytest.importorskip("support.vision")  # needs Pillow
    model = vision.build_model("gemma3")
    choice = select_attention(model)
    assert choice.previous == "sdpa"
    assert model.config.text_config._attn_implementation == ATTENTION_NAME
    assert model.config._attn_implementation == ATTENTION_NAME  # some models make the text part's masks from this one
    assert model.config.vision_config._attn_implementation == "sdpa"
    mark_packed_forwards(model)
    model.train()
    batch = make_pack()
    batch.pop("labels")
    packed = model(**batch).logits
    assert len(calls) == 2
    # the one that lets the tokens of an image see each other
    with pytest.raises(ValueError, match="a mask of its own"):
        model(**batch, token_type_ids=torch.zeros_like(batch["input_ids"]))
    set_attention(model, "sdpa")
    assert model.config._attn_implementation == model.config.text_config._attn_implementation == "sdpa"
    logits_alone = [model(torch.tensor([d["input_ids"]]), use_cache=False).logits for d in make_documents()]
    assert (packed - torch.cat(logits_alone, 1)).abs().max() < 1e-5
