"""Whole models on our attention, every document packed against alone, and what the guard on them refuses."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.attention import MODELS
from support.models import attend_packs, select_attention
from support.versions import current_models, enable_checkpointing
from sweep.judge import OnePack
from transformers import AutoModelForCausalLM

from trl_packfix.attention import varlen
from trl_packfix.attention.choice import set_attention
from trl_packfix.attention.forwards import PackedForwardGuard, mark_packed_forwards
from trl_packfix.attention.packed_forward import this_thread
from trl_packfix.attention.varlen import ATTENTION_NAME
from trl_packfix.data.collator import PackedDataCollator

LENGTHS = [1, 40, 7, 100]  # across the window and chunk of 16 tokens


def make_documents(lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(3, 300, (n,), generator=generator).tolist()} for n in lengths]


def make_pack(lengths=LENGTHS, **changes):
    return {**PackedDataCollator()(make_documents(lengths)), **changes}


def interrupt(*call):
    raise KeyboardInterrupt


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


# Whole models


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["", "checkpointing", "reentrant checkpointing"])
@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=current_models) if name == "opt" else name for name in MODELS]
)
def test_a_packed_document_equals_itself_alone(model_type, checkpointing, tiny_model, calls):
    """Logits and gradients must be those of stock eager attention on each document by itself."""
    documents = [torch.tensor(document["input_ids"]) for document in make_documents()]
    judge = OnePack(tiny_model(model_type, attn_implementation="eager", **MODELS[model_type]), documents)
    model = tiny_model(model_type, **MODELS[model_type])
    attend_packs(model)
    if checkpointing is not None:
        enable_checkpointing(model, checkpointing)
        model.enable_input_require_grads()

    masks = []
    for module in model.modules():
        if type(module).__name__.endswith("Attention"):
            module.register_forward_pre_hook(
                lambda _, args, kwargs: masks.append(kwargs.get("attention_mask")), with_kwargs=True
            )
    judgement = judge.compare(model, torch.float64)
    assert 0 < judgement.error < 1e-10, judgement
    num_calls = model.config.num_hidden_layers * (1 if checkpointing is None else 2)
    assert [sum(lengths) for lengths in calls] == [sum(LENGTHS)] * num_calls
    assert masks == [None] * num_calls
    assert not this_thread.packed_forwards


@pytest.mark.parametrize("model_type", ["llama", "gemma3", "gemma2", "gpt_oss", "mistral"])
def test_generate_and_padding_are_as_before(model_type, tiny_model):
    """Outside packed forwards a padded batch, with and without a cache, gives stock attention's tokens and logits."""
    settings = MODELS[model_type]
    stock = tiny_model(model_type, **settings).eval()
    model = tiny_model(model_type, **settings).eval()
    attend_packs(model)
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
    config = (tmp_path / "config.json").read_text()
    assert ATTENTION_NAME not in config
    assert "attn_implementation" not in config
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


# The guard


def test_the_guard_is_removable_and_survives_errors(tiny_model):
    model = tiny_model("llama").train()
    guard = attend_packs(model)
    batch = make_pack()
    depths = []
    layers = model.model.layers
    layers[0].register_forward_pre_hook(lambda *_: depths.append(len(this_thread.packed_forwards)))
    broken = layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**batch)
    broken.remove()
    with pytest.raises(ValueError):
        model(**batch | {"use_cache": True})
    model(**batch)
    assert depths == [1, 1], "a forward that failed is still running"
    assert not this_thread.packed_forwards
    guard.remove()
    with pytest.raises(ValueError, match="prepare_for_packing"):  # now transformers builds a mask, which is noticed
        model(**batch)


@pytest.mark.parametrize("ends_with", ["the next forward", "its removal"])
def test_an_interrupted_forward_ends_with_the_next_one_or_with_the_guard(ends_with, tiny_model):
    """After Ctrl-C, often in a notebook, torch calls no hook behind the modules that were running."""
    model = tiny_model("llama").train()
    guard = attend_packs(model)
    broken = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**make_pack())
    broken.remove()
    assert len(this_thread.packed_forwards) == 1, "no forward was interrupted"
    if ends_with == "its removal":
        guard.remove()
    else:
        ids = torch.arange(3, 10)[None]
        generated = (m.eval().generate(ids, max_new_tokens=3, do_sample=False) for m in (model, tiny_model("llama")))
        assert torch.equal(*generated)
    assert not this_thread.packed_forwards


def test_a_forward_of_the_model_inside_itself_leaves_the_outer_one_running(tiny_model):
    model = tiny_model("llama").train()
    attend_packs(model)
    depths = []

    def call_again(*call):
        handle.remove()
        model(**make_pack([3, 5]))
        depths.append(len(this_thread.packed_forwards))

    handle = model.model.layers[0].register_forward_pre_hook(call_again)
    model(**make_pack())
    assert depths == [1]
    assert not this_thread.packed_forwards


def test_a_nested_forward_that_is_refused_leaves_the_outer_one_running(tiny_model):
    model = tiny_model("llama").train()
    attend_packs(model)
    other = tiny_model("llama").train()
    guard = PackedForwardGuard(model, [other])
    guard.install()
    depths = []

    def call_other(*call):
        with pytest.raises(ValueError, match="use_cache=True"):
            other(**make_pack(use_cache=True))
        depths.append(len(this_thread.packed_forwards))

    model.model.layers[0].register_forward_pre_hook(call_other)
    model(**make_pack())
    assert depths == [2], "the forwards that both guards have entered"
    assert not this_thread.packed_forwards


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
def test_the_guard_refuses_what_is_no_pack(name, changes, message, tiny_model):
    model = tiny_model("llama")
    set_attention(model, name)
    mark_packed_forwards(model)
    with pytest.raises(ValueError, match=message):
        model(**make_pack(**changes))


@pytest.mark.parametrize("model_type", ["llama", "opt", "stablelm", "gpt_oss"])
def test_training_without_boundaries_is_refused(model_type, tiny_model):
    """Models make up position_ids when they are given none: one document is never assumed from these."""
    model = tiny_model(model_type).train()
    attend_packs(model)
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
def test_a_pack_of_one_document_reaches_the_kernel(model_type, checkpointing, tiny_model, calls):
    model = tiny_model(model_type).train()
    attend_packs(model)
    if checkpointing:
        enable_checkpointing(model, reentrant=False)
    model(**make_pack([30])).loss.backward()
    assert calls == [[30]] * (4 if checkpointing else 2)


@pytest.mark.parametrize("task_type", [None, "CAUSAL_LM"])
def test_the_guard_works_on_peft_and_on_a_replaced_forward(task_type, tiny_model, calls):
    """TRL replaces `forward`; PEFT wraps the model. The hooks sit on the transformers model and run in both."""
    adapter = LoraConfig(target_modules=["q_proj"], task_type=task_type)
    model = get_peft_model(tiny_model("llama"), adapter).train()
    attend_packs(model)
    inner = model.get_base_model()
    assert inner.config._attn_implementation == ATTENTION_NAME
    original = inner.forward
    inner.forward = lambda *args, **kwargs: original(*args, **kwargs)
    model(**make_pack()).loss.backward()
    assert len(calls) == 2
    with pytest.raises(ValueError, match="came with use_cache=True"):
        model(**make_pack(use_cache=True))


def test_only_the_text_part_of_a_multimodal_model_gets_our_attention(calls):
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
    documents = [torch.tensor([document["input_ids"]]) for document in make_documents()]
    logits_alone = torch.cat([model(ids, use_cache=False).logits for ids in documents], 1)
    assert (packed - logits_alone).abs().max() < 1e-5
