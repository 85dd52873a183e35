"""Trainers of TRL on padded rows that are computed as packs: the weights of the stock trainer, to the last digits."""

import re
import sys
import warnings

import numpy as np
import pytest
import torch
import trl
from features.pack_forward import on_ranks
from features.pack_forward.rows import build_model, build_trainer, train
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from ranks.engines import ENGINES
from support.launch import Launch
from support.models import build_tiny_model, build_tokenizer, longrope
from support.rounding import tolerance
from support.runs import checkpointing, interrupt_forward, logged, start_weights
from support.vision import make
from sweep.double import in_double
from transformers import BertConfig, BertForSequenceClassification, DynamicCache, Trainer, TrainerCallback

from trl_packfix import PackingLeakError, pack_forward
from trl_packfix.attention.packed_forward import this_thread
from trl_packfix.data.collator import PackedDataCollator
from trl_packfix.features.pack_forward import packed_rows
from trl_packfix.features.pack_forward.packed_rows import pack_rows
from trl_packfix.features.pack_forward.trainers import RowPacking
from trl_packfix.features.prefixes.collator import PrefixCollator
from trl_packfix.layout import LAYOUT_KEY

pytestmark = pytest.mark.slow

LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
MOVED = 1e-3  # the largest change of a weight, at least
EQUAL = 1e-12


def compare(kind, model_type="llama", **options):
    """Train with and without `pack_forward`. Returns both trainers and the record of the packed run."""
    stock, plain, _ = train(kind, model_type, packed=False, **options)
    packed, trainer, record = train(kind, model_type, packed=True, **options)
    assert stock.abs().max() > MOVED, "nothing was trained, so nothing is compared"
    gap = (stock - packed).abs().max() / stock.abs().max()
    print(f"{kind} {model_type}: weights moved by {stock.abs().max():.1e} and differ by {gap:.1e} of it")
    print(record.summary())
    assert gap < EQUAL
    tokens = record.tokens
    assert 0 < tokens.computed <= tokens.real <= tokens.padded
    assert tokens.computed < tokens.padded
    return plain, trainer, record


CASES = [
    ("dpo", "llama", checkpointing(False)),
    ("dpo", "llama", {"peft_config": LORA, **checkpointing(True)}),
    ("dpo", "qwen3", {"packing": {"share_prefixes": False}}),
    ("dpo", "gemma3", {}),
    ("dpo", "gpt_oss", checkpointing(True)),
    ("dpo", "opt", {}),
    ("dpo", "bloom", {}),
    ("reward", "llama", {}),
    ("reward", "gpt_oss", {}),
    ("kto", "llama", {}),
    ("grpo", "llama", {}),
    ("grpo", "qwen3", {"num_iterations": 2, "loss_type": "dapo", "gradient_checkpointing": True}),
    ("rloo", "llama", {"beta": 0.0}),
    ("sft", "llama", {}),
    ("trainer", "llama", {}),
    ("trainer", "minimax", {}),  # repaired; the trainer gives it `num_items_in_batch`
    # Losses of log-probabilities of rows
    ("dpo", "llama", {"loss_type": "ipo", "max_steps": 2, "learning_rate": 0.01}),
    ("dpo", "llama", {"loss_type": "aot", "max_steps": 2}),
    ("dpo", "llama", {"loss_type": "sigmoid_norm", "max_steps": 2, "ld_alpha": 0.5}),
    *(("dpo", model_type, {}) for model_type in ("mamba", "falcon_h1", "qwen3_moe")),
]


@pytest.mark.parametrize("kind, model_type, options", CASES, ids=str)
def test_weights_are_those_of_the_stock_trainer(kind, model_type, options):
    compare(kind, model_type, **options)


def test_rows_count_in_the_router_loss_as_often_as_documents_have_them():
    options = {"config": {"router_aux_loss_coef": 0.5, "output_router_logits": True}}
    plain, trainer, _ = compare("dpo", "mixtral", **options)
    losses = logged(trainer, "aux_loss")
    assert len(losses) == 5
    assert losses == pytest.approx(logged(plain, "aux_loss"), rel=1e-6)


# The rows of a batch as documents


@st.composite
def padded_batches(draw):
    """Draw rows with common beginnings, duplicates, no tokens or one, padded on both sides."""
    trunk = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        begin = trunk[: draw(st.integers(0, len(trunk)))]
        rows.append((draw(st.integers(0, 3)), begin + draw(st.lists(st.integers(1, 9), max_size=4))))
    if draw(st.booleans()):
        rows.append(rows[0])
    width = max(padding + len(tokens) for padding, tokens in rows) + draw(st.integers(0, 2))
    ids, mask = (np.zeros((len(rows), max(width, 1)), dtype=np.int64) for _ in range(2))
    for i, (num_padding, tokens) in enumerate(rows):
        ids[i, num_padding : num_padding + len(tokens)] = tokens
        mask[i, num_padding : num_padding + len(tokens)] = 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


@settings(max_examples=200)
@given(padded_batches(), st.booleans())
def test_each_token_has_a_place_with_its_own_past(padded, shares):
    ids, mask = padded
    collate = PrefixCollator(min_shared=1, keeps_last_rows=True) if shares else PackedDataCollator()
    batch = pack_rows(ids, mask, collate)
    if not mask.any():
        assert batch is None
        return
    pack = batch.pack
    lengths = [n for n in mask.sum(1).tolist() if n]
    assert torch.equal(pack["input_ids"][0, batch.places], ids[mask.bool()])
    assert torch.equal(batch.cells, mask.flatten().nonzero()[:, 0])
    assert torch.equal(pack["position_ids"][0, batch.places], torch.cat([torch.arange(n) for n in lengths]))
    assert not pack.keys() & {"labels", "attention_mask"}
    assert batch.places.unique().tolist() == list(range(batch.num_computed)), "a place is computed that no token needs"
    # The keys of the run of each place, up to itself, are the tokens before it in each document that has it
    bounds_q = pack["cu_seq_lens_q"].tolist()
    bounds_k = pack["cu_seq_lens_k"].tolist()
    keys = pack[LAYOUT_KEY].kv_index if LAYOUT_KEY in pack else torch.arange(batch.num_computed)
    for places in batch.places.split(lengths):
        for position, place in enumerate(places.tolist()):
            own_run = int(np.searchsorted(bounds_q, place, side="right")) - 1
            own_keys = keys[bounds_k[own_run] : bounds_k[own_run + 1]].tolist()
            assert own_keys[: own_keys.index(place) + 1] == places[: position + 1].tolist()


def test_padding_between_tokens_is_no_document():
    ids = torch.tensor([[5, 6, 0, 7], [5, 6, 7, 8]])
    assert pack_rows(ids, ids.sign(), PackedDataCollator()) is None
    assert pack_rows(ids[1:], ids[1:].sign(), PackedDataCollator()) is not None


# A model in a loop of one's own


def rows_that_share(num_shared=20):
    """Return four rows padded on both sides, (4, 32).

    The first two begin alike, the third has one token, the last none.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 260, (4, 32), generator=generator)
    ids[1, 2 : 2 + num_shared] = ids[0, 1 : 1 + num_shared]
    mask = torch.zeros_like(ids)
    mask[0, 1:30] = 1
    mask[1, 2:26] = 1
    mask[2, 5] = 1
    return {"input_ids": ids, "attention_mask": mask}


def num_hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_states_come_back_to_their_places():
    with in_double():
        model = build_tiny_model("llama", dtype=torch.float64)
        batch = rows_that_share()
        hooks = num_hooks(model)
        mask = batch["attention_mask"].bool()
        wanted = model(**batch, use_cache=False).logits
        record = pack_forward(model)
        outputs = model(**batch, use_cache=False)
        states = model.model(**batch, use_cache=False).last_hidden_state
    assert torch.allclose(outputs.logits[mask], wanted[mask], rtol=0, atol=1e-13)
    assert (states[~mask] == 0).all()
    assert not (states[mask] == 0).all(-1).any()
    assert (record.tokens.padded, record.tokens.real, record.tokens.computed) == (256, 108, 2 * (54 - 19))
    assert "padded 256, real 108, computed 70 (27% of padded)" in record.summary()
    assert model.config._attn_implementation == "sdpa"
    assert not this_thread.packed_forwards
    record.remove()
    assert num_hooks(model) == hooks
    with in_double():
        again = model(**batch, use_cache=False).logits
    assert torch.equal(again, wanted)
    assert record.tokens.padded == 256


def test_padding_gets_no_gradient():
    model = build_tiny_model("llama")
    pack_forward(model)
    batch = rows_that_share()
    batch["input_ids"][3, 7] = 3  # a token of padding only
    batch["input_ids"][:3] = batch["input_ids"][:3].clamp(min=4)
    model(**batch, use_cache=False).logits.square().sum().backward()
    gradient = model.get_input_embeddings().weight.grad
    assert not gradient[3].any()
    assert gradient[batch["input_ids"][0, 1]].any()


def calls():
    batch = rows_that_share()
    ids = batch["input_ids"]
    mask = batch["attention_mask"]
    return {
        "with a cache": {**batch, "use_cache": True},
        "with an empty cache": {**batch, "use_cache": False, "past_key_values": DynamicCache()},
        "in the default of evaluation": dict(batch),
        "without a mask": {"input_ids": ids, "use_cache": False},
        "with a mask of pairs": {"input_ids": ids, "attention_mask": mask[:, None, None].expand(4, 1, 32, 32).bool()},
        "with hidden states": {**batch, "use_cache": False, "output_hidden_states": True},
        "with positions": {**batch, "use_cache": False, "position_ids": torch.arange(32)[None].expand(4, -1)},
    }


@pytest.mark.filterwarnings("ignore:.*computes these rows with padding")
@pytest.mark.parametrize("name", calls())
def test_other_calls_are_unchanged(name):
    model = build_tiny_model("llama").eval()
    wanted = model(**calls()[name])
    record = pack_forward(model)
    outputs = model(**calls()[name])
    assert torch.equal(outputs.logits, wanted.logits)
    assert record.tokens.padded == 0
    if name == "with hidden states":
        assert len(outputs.hidden_states) == len(wanted.hidden_states)


@pytest.mark.parametrize("asks", [True, False])
def test_a_config_that_asks_for_hidden_states_gets_them_of_the_padded_rows(asks):
    model = build_tiny_model("llama").eval()
    record = pack_forward(model)
    model.config.output_hidden_states = asks
    outputs = model(**rows_that_share(), use_cache=False)
    assert [states.shape[:2] for states in outputs.hidden_states or ()] == [(4, 32)] * (3 if asks else 0)
    assert (record.tokens.padded == 0) == asks


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss"])
def test_generation_is_unchanged(model_type):
    model = build_tiny_model(model_type)  # in training mode, as trainers generate
    batch = {name: values[:2] for name, values in rows_that_share().items()}
    wanted = model.generate(**batch, max_new_tokens=6, do_sample=False)
    record = pack_forward(model)
    model(**batch, use_cache=False).logits.sum().backward()
    assert record.tokens.padded > 0
    padded = record.tokens.padded
    assert torch.equal(model.generate(**batch, max_new_tokens=6, do_sample=False), wanted)
    assert record.tokens.padded == padded


def test_rows_are_packed_after_a_forward_that_was_interrupted():
    """After Ctrl-C, often in a notebook, torch calls no hook behind the modules that were running."""
    model = build_tiny_model("llama")
    record = pack_forward(model)
    batch = rows_that_share()
    wanted = model(**batch, use_cache=False).logits
    padded = record.tokens.padded

    interrupt_forward(model.model.layers[1])
    with pytest.raises(KeyboardInterrupt):
        model(**batch, use_cache=False)
    assert this_thread.packed_forwards, "no forward was interrupted"
    assert torch.equal(model(**batch, use_cache=False).logits, wanted)
    assert record.tokens.padded == 3 * padded
    assert not this_thread.packed_forwards


def test_what_a_pack_would_need_in_its_own_order_is_named():
    model = build_tiny_model("llama")
    pack_forward(model)
    batch = rows_that_share()
    with pytest.warns(UserWarning, match="LlamaModel|LlamaForCausalLM got position_ids, one value per token"):
        model(**batch, position_ids=torch.arange(32)[None].expand(4, -1))
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        model(**batch, position_ids=torch.arange(32)[None].expand(4, -1))


def test_rows_with_images_keep_their_padding_and_rows_of_text_do_not(tmp_path):
    settings = {"packing": False, "max_length": None, "config_class": trl.SFTConfig}
    trainer = make(tmp_path, "llava", trainer_class=trl.SFTTrainer, **settings)
    model = trainer.model
    images = next(iter(trainer.get_train_dataloader()))
    assert images["pixel_values"].ndim > 2
    assert not images["attention_mask"].all()
    images = {name: images[name] for name in ("input_ids", "attention_mask", "pixel_values")}
    text = {name: values[:2] for name, values in rows_that_share().items()}
    text["input_ids"] = text["input_ids"] % 60 + 10
    batches = [batch | {"use_cache": False} for batch in (images, text)]
    wanted = [model(**batch).logits for batch in batches]
    record = pack_forward(trainer)
    with pytest.warns(UserWarning, match="got pixel_values, one value per token or image.*with padding"):
        assert torch.equal(model(**batches[0]).logits, wanted[0])
    assert record.tokens.padded == 0
    mask = text["attention_mask"].bool()
    assert torch.allclose(model(**batches[1]).logits[mask], wanted[1][mask], atol=1e-5)
    assert record.tokens.padded == 64


# The proof on the first batch. Each fault is planted where packs are made.


def swapped(batch):
    places = batch.places.clone()
    places[[3, 4]] = places[[4, 3]]
    return batch._replace(places=places)


def restarting(batch):
    bounds = batch.pack["cu_seq_lens_q"].diff()
    return batch._replace(pack=batch.pack | {"position_ids": torch.cat([torch.arange(n) for n in bounds])[None]})


def with_a_key_of_a_sibling(batch):
    layout = batch.pack[LAYOUT_KEY]
    keys = layout.kv_index.clone()
    keys[int(batch.pack["cu_seq_lens_k"][1]) + 5] = int(batch.pack["cu_seq_lens_q"][1]) - 1
    return batch._replace(pack=batch.pack | {LAYOUT_KEY: type(layout)(**(vars(layout) | {"kv_index": keys}))})


def shifted(batch):
    return batch._replace(cells=batch.cells.roll(1))


@pytest.mark.parametrize("fault", [swapped, restarting, with_a_key_of_a_sibling, shifted])
@pytest.mark.parametrize("in_training", [False, True])
def test_a_wrong_pack_is_not_used(fault, in_training, monkeypatch):
    batch = rows_that_share()
    model = build_tiny_model("llama")
    with torch.set_grad_enabled(in_training):
        wanted = model(**batch, use_cache=False).logits
        pack = packed_rows.pack_rows

        def faulty(*args):
            batch = pack(*args)
            return fault(batch) if isinstance(args[2], PrefixCollator) else batch

        monkeypatch.setattr(packed_rows, "pack_rows", faulty)
        record = pack_forward(model)
        with pytest.warns(
            UserWarning, match="(?s)computes a beginning that rows share once per row: on its first batch"
        ):
            logits = model(**batch, use_cache=False).logits
        mask = batch["attention_mask"].bool()
        assert torch.allclose(logits[mask], wanted[mask], atol=1e-5)
        assert record.tokens.computed == record.tokens.real == 54, "documents are packed whole"

        monkeypatch.setattr(packed_rows, "pack_rows", lambda *args: swapped(pack(*args)))
        record.remove()
        record = pack_forward(model)
        with pytest.warns(UserWarning, match="computes its rows with padding"):
            logits = model(**batch, use_cache=False).logits
        assert torch.equal(logits, wanted)
        assert record.tokens.padded == 0
        assert "model: padded, because on its first batch, states of the pack differ" in record.summary()

        record.remove()
        record = pack_forward(model, on_leak="raise")
        with pytest.warns(UserWarning), pytest.raises(PackingLeakError, match=r"(?s)on_leak=.raise.* So padded rows"):
            model(**batch, use_cache=False)


MASKS = {
    "left": ([[1] * 24, [1] * 24], [[1] * 24, [0] * 6 + [1] * 18]),
    "right": ([[1] * 24, [1] * 24], [[1] * 24, [1] * 18 + [0] * 6]),
    "long": ([[1] * 40, [1] * 30 + [0] * 10], [[1] * 70, [1] * 30 + [0] * 40]),
}


def padded_batch(mask):
    """Return random tokens where the mask is 1, as arguments of a model."""
    mask = torch.tensor(mask)
    ids = torch.randint(4, 250, mask.shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids * mask, "attention_mask": mask, "use_cache": False}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind, model_type, reason",
    [
        ("left", "gpt2", r"on the first batch with left padding and rows of up to 24 tokens, states .* differ"),
        ("left", "llama", None),
        ("right", "gpt2", None),
        ("long", "phi3", r"on the first batch with rows of up to 70 tokens, states .* differ"),
        ("long", "llama", None),
    ],
)
def test_the_first_batch_of_each_kind_is_compared(kind, model_type, reason):
    """Positions that count padding; RoPE that depends on the longest row of the batch (longrope, from 64 tokens)."""
    sizes = longrope(length=64) | {"original_max_position_embeddings": 64} if model_type == "phi3" else {}
    plain, model = (build_tiny_model(model_type, **sizes).eval() for _ in range(2))
    rows = pack_forward(model).rows["model"]
    for mask in MASKS[kind]:
        batch = padded_batch(mask)
        is_real = batch["attention_mask"].bool()
        expected, logits = (any_model(**batch).logits[is_real] for any_model in (plain, model))
        assert (expected - logits).abs().max() < 1e-5 * expected.abs().max()
    assert (rows.refusal is None) is (reason is None)
    assert reason is None or re.search(reason, rows.refusal)
    assert rows.tokens.computed > 0, "nothing was packed"


def test_eval_mode_is_compared_by_itself():
    plain, model = (build_tiny_model("llama") for _ in range(2))
    for any_model in (plain, model):
        any_model.model.norm.register_forward_hook(
            lambda norm, args, states: states if norm.training or states.shape[1] <= 24 else states + states.roll(1, 1)
        )  # longer than any row: the proof of the model runs documents alone in eval mode, and packs in train mode
    batch = padded_batch(MASKS["right"][0])
    rows = pack_forward(model).rows["model"]
    model.train()(**batch)
    assert rows.refusal is None
    assert rows.tokens.computed > 0
    with pytest.warns(UserWarning, match="on the first batch in eval mode with rows of up to"):
        logits = model.eval()(**batch).logits
    assert torch.equal(logits, plain.eval()(**batch).logits)


@pytest.mark.filterwarnings("ignore")
def test_outputs_of_rows_are_refused():
    """Classifiers of BERT's kind read the state of each row's first token, pooled below their head."""
    config = BertConfig(**{"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4})
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    model = BertForSequenceClassification(config).train()
    batch = padded_batch([[1] * 12, [1] * 8 + [0] * 4])
    del batch["use_cache"]
    expected = model(**batch).logits
    record = pack_forward(model)
    assert torch.equal(model(**batch).logits, expected)
    assert record.rows["model"].refusal is not None


def test_models_that_give_rewards_are_packed():
    """`Trainer` holds them in a list, with its own models in other attributes under other names."""

    def train_rows(packed):
        reward = build_model("reward", "llama")
        settings = {"reward_funcs": [reward], "reward_processing_classes": [build_tokenizer()], "max_steps": 2}
        return train("grpo", packed=packed, **settings)

    expected, _, _ = train_rows(False)
    change, _, record = train_rows(True)
    assert (expected - change).abs().max() < EQUAL * expected.abs().max() != 0
    rows = record.rows
    assert rows.keys() == {"model", "reward_funcs[0]"}
    assert rows["reward_funcs[0]"].refusal is None
    assert rows["reward_funcs[0]"].tokens.computed > 0


def test_the_gradient_is_compared(monkeypatch):
    """Find a fault that only the backward has."""

    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return values.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient / 2

    model = build_tiny_model("llama")
    batch = rows_that_share()
    pack_forward(model)
    layer = model.model.layers[0].self_attn

    def halve(module, args, output):
        return (Halved.apply(output[0]), *output[1:]) if this_thread.packed_forwards else output

    layer.register_forward_hook(halve)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**batch, use_cache=False)
    with pytest.warns(UserWarning, match="gradients of the pack differ"):
        model(**batch, use_cache=False)


def test_the_proof_changes_nothing_else():
    """Random state, modes, buffers and gradients after the first packed forward are those of a stock forward."""
    results = []
    for packed in (False, True):
        model = build_tiny_model("llama", attention_dropout=0.0).train()
        if packed:
            pack_forward(model)
        torch.manual_seed(5)
        model(**rows_that_share(), use_cache=False)
        modes = [module.training for module in model.modules()]
        results.append((torch.rand(3).tolist(), modes, [parameter.grad for parameter in model.parameters()]))
    assert results[0] == results[1]


# Trainers


def test_a_model_that_leaks_is_refused_with_raise():
    trainer = build_trainer("dpo", "bloom")
    hooks = num_hooks(trainer.model)
    with pytest.raises(PackingLeakError, match=r"on_leak=.raise.* was given, and on BloomForCausalLM documents"):
        pack_forward(trainer, on_leak="raise")
    assert num_hooks(trainer.model) == hooks
    with pytest.warns(UserWarning, match="BloomForCausalLM computes its rows with padding"):
        record = pack_forward(trainer, on_leak="unpack")
    assert record.summary().count("padded, because") == 2


PACKS = "Packing was given with `pack_forward`.*packs already.*Set"
NOISE = "`neftune_noise_alpha=5.0` was given with .*length of a row"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind, options, message",
    [
        ("sft", {"packing": True, "max_length": 64}, PACKS),
        ("sft", {"padding_free": True, "max_length": None}, PACKS),
        ("dpo", {"neftune_noise_alpha": 5.0}, NOISE),
    ],
)
def test_settings_that_a_pack_does_not_keep_are_refused(kind, options, message):
    trainer = build_trainer(kind, **options)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        pack_forward(trainer)


def test_a_trainer_without_a_transformers_model_is_refused():
    trainer = build_trainer("trainer")
    trainer.model = torch.nn.Sequential(torch.nn.Embedding(300, 8), torch.nn.Linear(8, 300))
    trainer.model_wrapped = trainer.model
    with pytest.raises(ValueError, match="(?s)given a Trainer whose model is a Sequential.*Give it a PreTrainedModel"):
        pack_forward(trainer)


def test_a_training_that_makes_another_model_is_refused():
    stock = build_trainer("trainer", max_steps=1)
    trainer = Trainer(
        model_init=lambda: build_tiny_model("llama"),
        args=stock.args,
        train_dataset=stock.train_dataset,
        data_collator=stock.data_collator,
    )
    record = pack_forward(trainer)
    with pytest.raises(ValueError, match="(?s)LlamaForCausalLM that the Trainer had.*Give the trainer a `model` in"):
        trainer.train()
    record.remove()
    assert trainer.train().global_step == 1


def test_models_that_all_stay_padded_have_computed_no_tokens():
    assert RowPacking({}, build_tiny_model("llama")).tokens == packed_rows.PackedTokenCounts()


def test_a_model_that_cannot_share_is_advised_in_arguments_of_pack_forward():
    with pytest.warns(UserWarning, match="must be whole. Set `share_prefixes=False` to omit this test") as caught:
        record = pack_forward(build_tiny_model("mamba"))
    assert not [warning for warning in caught if "off" in str(warning.message)]
    assert record.summary().endswith("Its documents must be whole")


@pytest.mark.parametrize(
    "argument, message",
    [
        ({"on_leak": "error"}, "`on_leak='error'`.*no such choice.*'raise'"),
        ({"share_prefixes": "off"}, "`share_prefixes='off'`.*shares prefixes or not.*Set True or False"),
    ],
    ids=["on_leak", "share_prefixes"],
)
def test_arguments_with_other_values_are_refused(argument, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        pack_forward(build_tiny_model("llama"), **argument)


def test_a_model_is_packed_once():
    model = build_tiny_model("llama")
    record = pack_forward(model)
    with pytest.raises(ValueError, match="(?s)a second time for the same LlamaForCausalLM.*Call `remove"):
        pack_forward(build_trainer("sft", model))
    record.remove()
    record = pack_forward(build_trainer("sft", model))
    assert "packed with" in record.summary()


def test_a_proof_that_was_interrupted_leaves_nothing():
    trainer = build_trainer("sft", build_tiny_model("llama"))
    own = trainer.model.config._attn_implementation
    callbacks = [*trainer.callback_handler.callbacks]
    interrupt_forward(trainer.model, number=4)
    with pytest.raises(KeyboardInterrupt):
        pack_forward(trainer)
    assert trainer.model.config._attn_implementation == own
    assert trainer.callback_handler.callbacks == callbacks
    assert "packed with" in pack_forward(trainer).summary()  # in the same notebook, once more


def test_what_was_removed_is_described_so():
    record = pack_forward(build_tiny_model("llama"))
    record.remove()
    assert "model: as without `pack_forward`, which was removed" in record.summary()


def test_attention_that_the_user_has_set_comes_back():
    model = build_tiny_model("llama")
    record = pack_forward(model)
    model.set_attn_implementation("eager")
    model(**rows_that_share(), use_cache=False).logits.sum().backward()
    assert record.tokens.padded > 0
    assert model.config._attn_implementation == "eager"
    record.remove()
    assert model.config._attn_implementation == "eager"


def test_half_precision_is_packed(precision_of_its_own):
    """Under autocast the proof measures the rounding; losses are those of the stock trainer up to it."""
    losses = []
    for packed in (False, True):
        options = {"bf16": True, "max_steps": 3}
        _, trainer, record = train("dpo", packed=packed, dtype=torch.float32, **options)
        losses.append(logged(trainer, "loss"))
    assert "padded, because" not in record.summary()
    assert "each row whole" not in record.summary()
    assert losses[0] == pytest.approx(losses[1], abs=0.01)
    assert abs(losses[0][2] - losses[0][0]) > 0.02
    assert not torch.is_autocast_enabled("cpu"), "the comparison of the first batch has left autocast on"


def test_reference_log_probabilities_are_precomputed_on_packs():
    """`pack_forward` gets the model, because the constructor of the trainer computes these log probabilities."""
    model = build_tiny_model("llama")
    record = pack_forward(model)
    trainer = build_trainer("dpo", model, precompute_ref_log_probs=True)
    assert 0 < record.tokens.computed < record.tokens.real < record.tokens.padded
    record.remove()
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    wanted, _ = trainer.compute_ref_log_probs(trainer.model, batch)
    assert trainer.train_dataset["ref_chosen_logps"][:4] == pytest.approx(wanted.tolist(), rel=1e-5)


@pytest.mark.sweep
def test_compiled_training_is_training():
    options = {"max_steps": 2, "dtype": torch.float32}
    stock, _, _ = train("dpo", packed=False, **options)
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    torch.compiler.reset()  # else dynamo may run graphs of a model without hooks
    packed, trainer, record = train("dpo", packed=True, **options, **compiled)
    assert type(trainer.model_wrapped).__name__ == "OptimizedModule"
    assert stock.abs().max() > MOVED
    assert (stock - packed).abs().max() < 1e-5 * stock.abs().max()
    assert record.tokens.computed < record.tokens.real


def test_it_is_said_if_no_row_is_packed():
    trainer = build_trainer("trainer", max_steps=2)
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: {k: v for k, v in collate(rows).items() if k != "attention_mask"}
    pack_forward(trainer)
    with pytest.warns(UserWarning, match="packed no rows in the first 1 steps of Trainer") as warnings_caught:
        trainer.train()
    assert sum("packed no rows" in str(warning.message) for warning in warnings_caught) == 1


def test_rows_with_positions_are_not_said_to_lack_a_mask():
    trainer = build_trainer("trainer", max_steps=2)
    collate = trainer.data_collator

    def with_positions(rows):
        batch = collate(rows)
        return batch | {"position_ids": torch.arange(batch["input_ids"].shape[1])[None]}

    trainer.data_collator = with_positions
    pack_forward(trainer)
    with warnings.catch_warnings(record=True) as warnings_caught:
        warnings.simplefilter("always")
        trainer.train()
    texts = [str(warning.message) for warning in warnings_caught]
    assert sum("got position_ids, one value per token" in text for text in texts) == 1
    assert not [text for text in texts if "packed no rows" in text]


def test_the_log_counts_tokens_and_trackers_get_it():
    class Tracker(TrainerCallback):
        logs: list = []

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.logs.append(dict(logs))

    trainer = build_trainer("dpo", max_steps=2)
    trainer.add_callback(Tracker)
    record = pack_forward(trainer)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.train()
    names = ("packing/rows", "packing/tokens", "packing/computed")
    of_steps, tracked = (
        [[entry[name] for name in names] for entry in logs if names[0] in entry]
        for logs in (trainer.state.log_history, Tracker.logs)
    )
    assert len(of_steps) == 2
    assert of_steps == tracked
    totals = record.tokens
    assert np.sum(of_steps, axis=0).tolist() == [totals.padded, totals.real, totals.computed]
    for rows, tokens, computed in of_steps:  # twice: policy and reference
        assert rows % (2 * len(batch["input_ids"])) == 0
        assert computed < tokens < rows
    record.remove()
    assert not any(type(callback).__name__ == "_LogAndProve" for callback in trainer.callback_handler.callbacks)
    trainer.train()
    assert record.tokens == totals


def test_evaluation_is_packed():
    results = []
    for packed in (False, True):
        trainer = build_trainer("dpo", build_tiny_model("llama"), build_tiny_model("llama", seed=1))
        record = pack_forward(trainer) if packed else None
        results.append(trainer.evaluate(trainer.train_dataset))
    assert record.tokens.computed < record.tokens.padded
    assert results[0]["eval_loss"] == pytest.approx(results[1]["eval_loss"], rel=1e-5)
    assert abs(results[0]["eval_loss"] - np.log(2)) > 1e-4


# Two ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return Launch(folder, "log", [sys.executable, "-m", "ranks", str(folder), "pairs"])


@pytest.mark.processes
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.parametrize("engine", on_ranks.RUNS)
def test_two_ranks_reach_the_weights_of_the_stock_trainer(engine, ranks):
    """Under each engine training reaches the weights of the stock trainer under DDP."""
    if engine.startswith("zero"):
        pytest.importorskip("deepspeed")
    references = {name: ranks["ddp", name]["weights"] for name in on_ranks.REFERENCES}
    scale = references["stock"].abs().max()
    rounding = tolerance(float((references["regrouped"] - references["stock"]).abs().max() / scale))
    for name in on_ranks.RUNS[engine]:
        result = ranks[engine, name]
        assert result["engine"] == ENGINES[engine]
        if name in references:
            continue
        gap = float((result["weights"] - references[name.replace("packed", "stock")]).abs().max() / scale)
        print(f"{engine} {name}: weights differ by {gap:.1e}; rounding {rounding:.1e}")
        assert gap <= rounding
        assert "padded, because" not in result["summary"]
        assert "each row whole" not in result["summary"]
        assert len(result["tokens"]) == 2
        assert all(computed < real < padded for padded, real, computed in result["tokens"])
        assert sum(result["logged"]) == result["tokens"][0][2]
    change = (references["stock"] - start_weights()).abs().max()
    assert change > 1e-2, "nothing was trained, so nothing is compared"


def test_without_the_folder_of_prefixes_rows_are_packed_and_share_nothing(monkeypatch):
    monkeypatch.setattr(packed_rows, "find_folder", lambda name: None)
    model = build_tiny_model("llama")
    rows = packed_rows.PackedRows(model, torch.float32, "cpu", 64)
    rows.prove(model)
    assert rows.is_active
    assert not rows.collate.shares
    rows.remove_hooks()
