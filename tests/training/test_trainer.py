"""The drop-in: TRL's arguments, TRL's parameters without packing, every dataset form with it."""

import inspect
import pickle
import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
import trl
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from datasets import Dataset
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from support.models import build_tiny_model, build_tokenizer
from support.rounding import weight_difference
from support.runs import (
    ANSWER,
    PROMPT,
    all_documents,
    build_trainer,
    documents_of_rows,
    log_of_steps,
    run_training,
    start_weights,
    stock,
    texts,
    weights,
)
from support.versions import TRL, trl_trains
from sweep import zoo
from transformers.integrations import integration_utils

import trl_packfix
from trl_packfix import SFTConfig, SFTTrainer, compat

# The drop-in

ATTRIBUTES = ("data", "training_objective", "user_code", "evaluation", "restart")


def test_the_trainer_holds_its_parts():
    """The trainer must be one class of ours, and the names of its parts must mean nothing to TRL or transformers."""
    assert SFTTrainer.__bases__ == (trl.SFTTrainer,)
    attributes = set(SFTTrainer.__annotations__) - {"args", "model"}
    assert attributes == {*ATTRIBUTES, "packing_report", "packed_model"}
    sources = [inspect.getsource(inspect.getmodule(cls)) for cls in trl.SFTTrainer.__mro__[:-1]]
    sources += [inspect.getsource(integration_utils)]
    known = set(re.findall(r"\b(?:self|trainer)\.([a-z_]+)", "".join(sources)))
    assert {"args", "model", "objective", "state"} <= known
    assert not attributes & known


def test_arguments_are_those_of_trl():
    ours, theirs = (inspect.signature(cls.__init__).parameters for cls in (SFTTrainer, trl.SFTTrainer))
    assert list(ours) == list(theirs)
    assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]
    assert {f.name for f in SFTConfig.__dataclass_fields__.values()} > set(trl.SFTConfig.__dataclass_fields__)
    assert SFTConfig.__dataclass_fields__["packing"].default is trl.SFTConfig.__dataclass_fields__["packing"].default


@pytest.mark.parametrize(
    "kind, name, hint",
    [
        (
            SFTConfig,
            "max_seq_length",
            "`SFTConfig`, which has no such argument. `max_seq_length` is `max_length` here.",
        ),
        (SFTConfig, "overwrite_output_dir", "`overwrite_output_dir` can be removed: "),
        (SFTTrainer, "tokenizer", "`tokenizer` is `processing_class` here."),
        (SFTTrainer, "packing", "Set it in the config: `args=SFTConfig(packing=...)`."),
        (SFTTrainer, "max_seq_length", "Set it in the config: `args=SFTConfig(max_length=...)`."),
        (SFTTrainer, "lora_rank", r"got an unexpected keyword argument 'lora_rank'"),  # a flag, and no field
    ],
)
def test_an_argument_of_earlier_trl_is_refused_with_its_name_here(kind, name, hint):
    with pytest.raises(TypeError, match=f"{re.escape(hint)}"):
        kind(**{name: 512})


PACKING = {"packing": True}
# The parameters of what is overridden, where a change in TRL or transformers must be looked at, not inherited
OVERRIDDEN = {
    "_prepare_dataset": "self dataset processing_class args packing formatting_func dataset_name",
    "get_train_dataloader": "self",
    # the one place that has the loader and the checkpoint that a stream goes on from
    "_prepare_for_training": "self max_steps train_dataloader resume_from_checkpoint",
    "get_eval_dataloader": "self eval_dataset",
    "get_test_dataloader": "self test_dataset",
    "prediction_step": "self model inputs prediction_loss_only ignore_keys",
    "evaluation_loop": "self dataloader description prediction_loss_only ignore_keys metric_key_prefix",
    # weights of documents, and one meeting of the ranks per log instead of several per micro-batch
    "compute_loss": "self model inputs return_outputs num_items_in_batch",
    # gradients that ranks sum after each backward; not all versions of transformers have the second
    "training_step": "self args kwargs",
    "_defer_fsdp_gradient_reduction": None,
    "floating_point_ops": "self inputs",  # the parameters are counted once per run
    "get_batch_samples": "self epoch_iterator num_batches device",  # how long a step waits for its data
    "_get_num_items_in_batch": "self batch_samples device",
    "_track_num_input_tokens": "self inputs",
    "_prepare_inputs": "self inputs",  # weights and sources are removed before a loss, which may be the user's
    "_set_signature_columns_if_needed": "self",  # keeps the columns of both without packing
    "log": "self logs start_time",
    # restart.py: it looks at checkpoints before `train` reads them, and writes its file when those of all ranks are
    # there and older checkpoints still are; no callback runs at that moment
    "train": "self resume_from_checkpoint trial ignore_keys_for_eval",
    "_save_checkpoint": "self model trial",
    "_save_rng_state": "self output_dir",
    "save_model": "self output_dir _internal_call",  # whole, where checkpoints of FSDP are sharded
    # after a restart on other ranks an epoch has other steps than the next
    "set_initial_training_values": None,
    "_init_training_state": None,
    "_run_epoch": None,
    "_load_from_checkpoint": None,  # weights that are saved under other names (dev/upstream.md)
    "_load_best_model": None,
    "_issue_warnings_after_load": None,  # which transformers would call missing and unexpected
    "create_model_card": "self model_name dataset_name tags",  # says that the model was trained on packs
}


def test_what_is_overridden_has_not_changed_in_trl_and_nothing_else_is():
    inherited = {name for cls in trl.SFTTrainer.__mro__ for name in vars(cls)}
    overridden = {name for name in vars(SFTTrainer) if name in inherited and not name.startswith("__")}
    assert overridden == OVERRIDDEN.keys() & inherited >= OVERRIDDEN.keys() - {"_defer_fsdp_gradient_reduction"}
    for name, parameters in OVERRIDDEN.items():
        method = getattr(trl.SFTTrainer, name, None)
        assert parameters is None or " ".join(inspect.signature(method).parameters) == parameters, name


@pytest.mark.parametrize(
    "config_class, packing, strategy",
    [(transformers.TrainingArguments, {}, "stream"), (trl.SFTConfig, PACKING, "bfd"), (SFTConfig, PACKING, "stream")],
)
def test_args_may_be_anything_that_trl_takes(config_class, packing, strategy, tmp_path):
    args = config_class(str(tmp_path), seed=5, use_cpu=True, bf16=False, report_to=[], **packing)
    before = dict(vars(args))
    with warnings.catch_warnings(record=True) as warnings_seen:
        warnings.simplefilter("always")
        trainer = SFTTrainer(build_tiny_model(), args, train_dataset=texts(), processing_class=build_tokenizer())
    messages = " ".join(str(warning.message) for warning in warnings_seen)
    assert ("a `TrainingArguments`, which has no `packing`" in messages) is not bool(packing)
    assert isinstance(trainer.args, SFTConfig)
    assert (trainer.args.seed, trainer.args.packing, trainer.args.packing_strategy) == (5, bool(packing), strategy)
    assert vars(args) == before, "the caller's config was changed"


@pytest.mark.skipif(torch.cuda.is_available(), reason="TRL's default config runs where there is a GPU")
def test_no_args_means_the_default_config_of_trl(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for cls in (trl.SFTTrainer, SFTTrainer):  # bf16 is TRL's default, and transformers refuses it without a GPU
        with pytest.raises(ValueError, match="use_cpu"):
            cls(build_tiny_model(), train_dataset=texts(), processing_class=build_tokenizer())


@trl_trains
@pytest.mark.slow
@pytest.mark.parametrize("truncated", [False, True])
def test_unpacked_training_ends_with_the_parameters_of_trl(tmp_path, truncated):
    settings = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "num_train_epochs": 2}
    settings |= {"max_length": 24 if truncated else 128, "learning_rate": 1e-2, "packing": False}
    expected = run_training(tmp_path, texts(), trainer_class=trl.SFTTrainer, config_class=trl.SFTConfig, **settings)
    trainer = run_training(tmp_path, texts(), **settings)
    if Version("1.16") <= TRL:
        assert torch.equal(weights(trainer), weights(expected))
    else:  # the loss is summed in another order
        assert weight_difference(weights(trainer), weights(expected), start_weights()) < 1e-5
    assert not torch.equal(weights(expected), start_weights())


# Dataset forms: the packed documents are the rows of the unpacked run. Those of other forms: `samples/test_texts.py`

PAIRS = {"prompt": ["ab c", "d"], "completion": [" ef", " g h"]}
LABELLED = Dataset.from_dict({"input_ids": [[9, 8, 7], [6, 5]] * 4, "labels": [[-100, 8, 7], [-100, 5]] * 4})
FORMS = {
    "text": (texts(), {}),
    "completion_and_prompt_trained": (Dataset.from_dict(PAIRS), {"completion_only_loss": False}),
    "conversational_prompt": (Dataset.from_list([{"prompt": PROMPT, "completion": ANSWER}] * 5), {}),
    "tokenised": (Dataset.from_dict({"input_ids": [[9, 8, 7], [6, 5, 4, 3, 2]] * 4}), {}),
    "labels": (LABELLED, {}),
    "skip_prepare": (LABELLED, {"dataset_kwargs": {"skip_prepare_dataset": True}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("form, strategy", [*((form, "stream") for form in FORMS), ("text", "bfd")])
def test_packed_documents_are_the_rows_of_the_unpacked_run(form, strategy, tmp_path):
    data, settings = FORMS[form]
    packed = build_trainer(tmp_path, data, packing_strategy=strategy, **settings)
    assert all_documents(packed) == documents_of_rows(stock(tmp_path, data, **settings).train_dataset)


def test_formatting_func(tmp_path):
    data = Dataset.from_dict({"a": ["x", "yy"], "b": ["zzz", "w"]})
    trainer = build_trainer(tmp_path, data, formatting_func=lambda row: row["a"] + "-" + row["b"])
    texts_of_pack = [trainer.processing_class.decode(tokens) for tokens, _ in all_documents(trainer)]
    assert texts_of_pack == ["x-zzz<|im_end|>", "yy-w<|im_end|>"]


def test_rows_that_are_packs_keep_their_documents(tmp_path):
    data = Dataset.from_dict({"input_ids": [[9, 8, 7, 6, 5], [4, 3]], "seq_lengths": [[2, 3], [2]]})
    trainer = build_trainer(tmp_path, data)
    assert [tokens for tokens, _ in all_documents(trainer)] == [[4, 3], [7, 6, 5], [9, 8]]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["stream", "bfd", "bfd_split", "wrapped", "minibatch"])
def test_every_strategy_trains_for_the_steps_announced(strategy, tmp_path):
    trainer = build_trainer(
        tmp_path, texts(48), packing_strategy=strategy, num_train_epochs=3, max_length=40, learning_rate=1e-2
    )
    steps = len(trainer.get_train_dataloader())
    trainer.train()
    assert trainer.state.global_step == 3 * steps == trainer.state.max_steps
    losses = [entry["loss"] for entry in log_of_steps(trainer)]
    assert np.mean(losses[-3:]) < np.mean(losses[:3]), "nothing was learned"


@pytest.mark.parametrize("max_length", [64, None])
def test_padding_free_without_packing_means_minibatch(max_length, tmp_path):
    """TRL asks for `max_length=None` here; then the longest document is the limit."""
    trainer = run_training(tmp_path, texts(), packing=False, padding_free=True, max_length=max_length, max_steps=1)
    assert (trainer.args.packing, trainer.args.packing_strategy) == (True, "minibatch")
    source = trainer.data.source
    assert source.make_planner().packing.max_length == (max_length or source.documents.lengths.max())


# What works in TRL works here


# What the table of equivalences and `test_settings.py` do not train with
OTHER_ORDER = {"shuffle_dataset": True, "train_sampling_strategy": "sequential", "overlong": "drop", "max_length": 40}
FILLED = {"dataloader_drop_last": True, "pad_to_multiple_of": 32, "dataloader_num_workers": 1}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [OTHER_ORDER, FILLED | {"pad_documents_to_multiple_of": 16}], ids=str)
def test_settings_of_trl_work_packed(settings, tmp_path):
    trainer = run_training(tmp_path, texts(), max_steps=2, **settings)
    assert trainer.state.global_step == 2
    assert np.isfinite(trainer.state.log_history[-1]["train_loss"])


@pytest.mark.parametrize("eval_packing", [True, False])
def test_what_workers_get_can_be_sent_to_a_process_that_is_not_forked(eval_packing, tmp_path):
    """`dataloader_multiprocessing_context="forkserver"`, where forking is not safe; starting one would take seconds."""
    trainer = build_trainer(tmp_path, texts(), eval_packing=eval_packing, eval_dataset=texts(9))
    for loader in (trainer.get_train_dataloader(), trainer.get_eval_dataloader()):
        dataset, collate = pickle.loads(pickle.dumps((loader.dataset, loader.collate_fn)))
        indices = next(iter(loader.batch_sampler))
        expected = next(iter(loader))
        batch = collate(dataset.__getitems__(indices))
        assert batch.keys() == expected.keys()
        assert torch.equal(batch["input_ids"], expected["input_ids"])


def test_lazy_names():
    assert set(trl_packfix.__all__) <= set(dir(trl_packfix))
    with pytest.raises(AttributeError):
        trl_packfix.nothing  # noqa: B018


# After training


@pytest.mark.slow
def test_after_training_the_model_is_free_for_other_uses_and_packs_are_refused(tmp_path):
    ours = build_trainer(tmp_path, texts(12), max_steps=2, eval_dataset=texts(5))
    own_attention = ours.packed_model.attention.previous
    ours.train()
    model = ours.model.train()
    assert model.config._attn_implementation == own_attention != ours.packed_model.attention.name
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 0]])
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids}
    in_training = model(**batch).loss
    assert torch.equal(in_training, model.eval()(**batch).loss)
    model.train().generate(ids[:1], max_new_tokens=2)
    message = r"A pack of \d+ documents came to LlamaForCausalLM outside of training and evaluation.*attending"
    with pytest.raises(ValueError, match=message):
        ours.compute_loss(model, next(iter(ours.get_train_dataloader())))

    loss = ours.evaluate()["eval_loss"]
    assert model.config._attn_implementation == own_attention
    again = build_trainer(tmp_path, texts(12), packing=False, model=model)
    assert again.evaluate(texts(5))["eval_loss"] == pytest.approx(loss, rel=1e-5)
    ours.train()  # packs run again
    assert ours.state.global_step == 2


@pytest.mark.parametrize("has_adapters", [False, True])
def test_fsdp_wraps_the_layers_that_a_model_has(has_adapters):
    """Text models of Qwen3.5 list the blocks of a vision tower, and accelerate raises for them."""
    model = zoo.build_model("qwen3_5_text")
    layers = [name for name, module in model.named_modules() if type(module).__name__ == "Qwen3_5DecoderLayer"]
    if has_adapters:
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
        layers = [f"base_model.model.{name}" for name in layers]
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    with pytest.raises(ValueError, match="Could not find the transformer layer class Qwen3_5VisionBlock"):
        fsdp2_prepare_auto_wrap_policy(plugin, model)
    compat.name_wrapped_layers(plugin, model)
    wraps = fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert layers
    assert [name for name, module in model.named_modules() if wraps(module)] == layers


@pytest.mark.parametrize("listed, model", [(["Mine"], "qwen3_5_text"), (None, "llama")])  # llama has all that it lists
def test_other_lists_of_layers_to_wrap_stay(listed, model):
    plugin = SimpleNamespace(transformer_cls_names_to_wrap=listed)
    compat.name_wrapped_layers(plugin, zoo.build_model(model))
    assert plugin.transformer_cls_names_to_wrap == listed
