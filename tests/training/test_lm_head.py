"""Log-probability, entropy and rank of labels in chunks, against plain logits."""

from types import MethodType

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from support.by_hand import token_scores
from support.models import build_tiny_model
from support.runs import gradient_of, log_of_steps, run_training, texts
from sweep import zoo
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from trl_packfix import compat
from trl_packfix.training import lm_head
from trl_packfix.training.lm_head import TokenScores, add_token_scores

SCALED = {
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0},
    "gemma2": {"final_logit_softcapping": 5.0},
}


def labels_of(model, rows=2, length=23):
    torch.manual_seed(0)
    ids = torch.randint(4, 99, (rows, length))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.4, -100)
    return ids, labels


def model_of(model_type, **settings):
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1}
    config = AutoConfig.for_model(model_type, **sizes, **{"eos_token_id": 2}, **SCALED.get(model_type, {}), **settings)
    return AutoModelForCausalLM.from_config(config).train()


@pytest.mark.parametrize("model_type", ["llama", "phi", *SCALED])  # phi's LM head has a bias
@pytest.mark.parametrize("chunk", [1024, 7], ids=["one chunk", "many chunks"])
def test_scores_and_gradients_are_those_of_full_logits(model_type, chunk, monkeypatch):
    monkeypatch.setattr(lm_head, "CHUNK_SIZE", chunk)
    model = model_of(model_type)
    ids, labels = labels_of(model)
    log_probs, entropy, is_top1 = token_scores(model(ids, use_cache=False).logits, labels)
    log_probs.sum().backward()
    gradient = gradient_of(model)
    model.zero_grad()
    add_token_scores(model)
    scores = model(ids, labels=labels, fused_lm_head=True)
    assert isinstance(scores, TokenScores)
    assert not hasattr(scores, "logits")
    torch.testing.assert_close(scores.log_probs, log_probs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores.entropy, entropy, atol=1e-5, rtol=1e-5)
    assert torch.equal(scores.is_top1, is_top1)
    assert torch.equal(scores.label_mask, labels[:, 1:] != -100)
    scores.log_probs.sum().backward()
    torch.testing.assert_close(gradient_of(model), gradient, atol=1e-5, rtol=1e-4)
    assert gradient.abs().max() > 0.1


def test_a_bias_that_masks_a_token_leaves_the_entropy_a_number():
    draws = torch.Generator().manual_seed(0)
    states = torch.randn(1, 3, 4, generator=draws)
    head = torch.nn.Linear(4, 6)
    labels = torch.tensor([[1, 2, -100]])
    smaller = torch.nn.Linear(4, 5)
    with torch.no_grad():
        head.bias[5] = -float("inf")
        smaller.weight.copy_(head.weight[:5])
        smaller.bias.copy_(head.bias[:5])
    entropy, expected = (lm_head._compute_scores(layer, states, labels, 1.0, None).entropy for layer in (head, smaller))
    assert torch.allclose(entropy, expected)
    assert expected[0, :2].min() > 0


def test_other_calls_are_as_before():
    model = model_of("llama")
    ids, labels = labels_of(model)
    before = model(ids, labels=labels, use_cache=False)
    add_token_scores(model)
    after = model(ids, labels=labels, use_cache=False)
    assert torch.equal(before.loss, after.loss)
    assert torch.equal(before.logits, after.logits)
    assert model.generate(ids[:1, :4], max_new_tokens=3, do_sample=False).shape == (1, 7)


def test_labels_that_are_shifted_already_are_not_shifted_again():
    model = model_of("llama")
    add_token_scores(model)
    ids, labels = labels_of(model)
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    scores_of_all, scores_of_rows = (
        model(ids, fused_lm_head=True, **{name: x}) for name, x in (("labels", labels), ("shift_labels", shifted))
    )
    assert torch.equal(scores_of_all.log_probs, scores_of_rows.log_probs[:, :-1])
    assert not scores_of_rows.log_probs[:, -1].any()


def test_versions_without_the_head_get_ours():
    assert not compat.scores_tokens("1.9.0")
    assert not compat.scores_tokens("1.15.0")
    assert compat.scores_tokens("1.16.0")


@pytest.mark.parametrize("is_wrapped", [False, True], ids=["", "under autocast"])
def test_the_head_is_added_again_only_if_another_covers_it(is_wrapped, precision_of_its_own):
    model = model_of("llama")
    ids, labels = labels_of(model)
    add_token_scores(model)
    if is_wrapped:
        Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
    ours = model.forward
    add_token_scores(model)
    assert model.forward == ours

    def of_trl_below_1_15(self, input_ids, labels=None, **kwargs):
        return ours(input_ids) if labels is None else "a loss"

    model.forward = MethodType(of_trl_below_1_15, model)
    assert model(ids, labels=labels, fused_lm_head=True) == "a loss"
    add_token_scores(model)
    assert model(ids, labels=labels, fused_lm_head=True).log_probs.shape == (len(ids), ids.shape[1] - 1)
    assert model(ids, labels=labels) == "a loss"


def capped(model_type):
    """Return a model with a cap under a name of its own, and logits of the size that trained models have."""
    sizes = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    of_type = {
        "recurrent_gemma": {"lru_width": 32, "intermediate_size": 96, "num_key_value_heads": 1},
        "xlstm": {"hidden_size": 64, "embedding_dim": 64, "num_heads": 4, "num_blocks": 1, "qk_dim_factor": 0.5},
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **sizes | of_type[model_type], tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        model.get_output_embeddings().weight.copy_(torch.randn_like(model.get_output_embeddings().weight) * 4)
    return model


@pytest.mark.parametrize("model_type", ["recurrent_gemma", "xlstm"])
def test_the_loss_has_the_cap_of_the_logits(model_type, tmp_path):
    """Caps have other names in these types, which TRL 1.16 does not read: 58.0 for 27.9, 92.1 for 32.5."""
    ids = torch.randint(16, 250, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        log_probs, _, _ = token_scores(capped(model_type)(input_ids=ids, use_cache=False).logits, ids)
    rows = Dataset.from_dict({"input_ids": ids.tolist()})
    trainer = run_training(tmp_path, rows, model=capped(model_type), max_steps=1, learning_rate=0.0)
    assert log_of_steps(trainer)[0]["loss"] == pytest.approx(-log_probs.mean().item(), rel=1e-4)
    assert vars(trainer.model.config).keys() == vars(capped(model_type).config).keys(), "the name of TRL stays"


@pytest.mark.parametrize("model_type", ["recurrent_gemma", "chameleon"])
def test_a_head_that_leaves_something_out_is_said(model_type, tmp_path, monkeypatch):
    """Say a cap, and a mask of the tokens of images, also at the small logits of a model without training.

    The first step, whose packs are right, must be compared with that head.
    """
    monkeypatch.setattr(lm_head, "CAP_FIELDS", ("final_logit_softcapping",))
    rows = texts(8)
    if model_type == "chameleon":
        model = zoo.build_model("chameleon", "image-text")
        rows = Dataset.from_list([{"input_ids": list(range(20, 20 + n))} for n in (9, 30, 14, 40)])
    else:
        model = capped(model_type)
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(1e-3)
    with pytest.warns(UserWarning, match=r"differ from those of the model's own logits by .*Pass `compute_loss_func`"):
        run_training(tmp_path, rows, model=model, max_steps=1)


def test_a_head_is_not_said_to_differ_from_logits_that_are_no_numbers(tmp_path, recwarn):
    model = build_tiny_model()
    model.lm_head.weight.data[5, 3] = float("nan")
    run_training(tmp_path, texts(8), model=model, max_steps=1, packing=False)
    assert not [str(warning.message) for warning in recwarn if "fused LM head" in str(warning.message)]
