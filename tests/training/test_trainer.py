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
from support.runs import ANSWER, PROMPT, TOOL, build_trainer, documents_of, start_weights, stock, texts, weights
from support.versions import TRL, trl_trains
from sweep import zoo
from transformers.integrations import integration_utils

import trl_packfix
from trl_packfix import SFTConfig, SFTTrainer, compat

# The drop-in

PARTS = ("data", "training_objective", "user_code", "evaluation", "restart")


def test_the_trainer_holds_its_parts():
    """The trainer must be one class of ours, and the names of its parts must mean nothing to TRL or transformers."""
    assert SFTTrainer.__bases__ == (trl.SFTTrainer,)
    attributes = set(SFTTrainer.__annotations__) - {"args", "model"}
    assert attributes == {*PARTS, "packing_report", "packed_model"}
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


@pytest.mark.parametrize("kind", ["training_arguments", "trl", "ours"])
def test_args_may_be_anything_that_trl_takes(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kwargs = {"use_cpu": True, "bf16": False, "report_to": []}
    args = {
        "training_arguments": lambda: transformers.TrainingArguments("out", seed=5, **kwargs),
        "trl": lambda: trl.SFTConfig("out", packing=True, seed=5, **kwargs),
        "ours": lambda: SFTConfig("out", packing=True, seed=5, **kwargs),
    }[kind]()
    before = dict(vars(args))
    with warnings.catch_warnings(record=True) as warnings_seen:
        warnings.simplefilter("always")
        trainer = SFTTrainer(build_tiny_model(), args, train_dataset=texts(), processing_class=build_tokenizer())
    is_warned = any(
        "a `TrainingArguments`, which has no `packing`" in str(warning.message) for warning in warnings_seen
    )
    assert isinstance(trainer.args, SFTConfig)
    assert is_warned is (kind == "training_arguments")
    assert trainer.args.seed == 5, "the caller's config was changed"
    assert vars(args) == before, "the caller's config was changed"
    assert trainer.args.packing_strategy == {"trl": "bfd"}.get(kind, "stream")
    assert trainer.args.packing is (kind in ("trl", "ours"))


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
    results = []
    for kind, config_class in ((trl.SFTTrainer, trl.SFTConfig), (SFTTrainer, SFTConfig)):
        trainer = build_trainer(tmp_path, texts(), trainer_class=kind, config_class=config_class, **settings)
        trainer.train()
        results.append(weights(trainer))
    if Version("1.16") <= TRL:
        assert torch.equal(*results)
    else:  # the loss is summed in another order
        assert weight_difference(*results, start_weights()) < 1e-5
    assert not torch.equal(results[0], start_weights())


def test_unpacked_training_drops_documents_without_a_target(tmp_path, caplog):
    data = Dataset.from_dict({"input_ids": [[5, 6, 7], [5, 6, 7], [8, 9]], "labels": [[5, 6, 7], [-100] * 3, [8, 9]]})
    trainer = build_trainer(tmp_path, data, packing=False, max_length=None)
    assert len(trainer.train_dataset) == 2
    assert "1 of 3 documents have no trained token" in caplog.text


# Dataset forms: the packed documents are the rows of the unpacked run

PAIRS = {"prompt": ["ab c", "d"], "completion": [" ef", " g h"]}
LABELLED = {"input_ids": [[9, 8, 7], [6, 5]] * 4, "labels": [[-100, 8, 7], [-100, 5]] * 4}
FORMS = {
    "text": (lambda: texts(), {}),
    "prompt_completion": (lambda: Dataset.from_dict(PAIRS), {}),
    "completion_and_prompt_trained": (lambda: Dataset.from_dict(PAIRS), {"completion_only_loss": False}),
    "messages": (lambda: Dataset.from_list([{"messages": PROMPT + ANSWER}] * 5), {}),
    "assistant_only": (lambda: Dataset.from_list([{"messages": PROMPT + ANSWER}] * 5), {"assistant_only_loss": True}),
    "conversational_prompt": (lambda: Dataset.from_list([{"prompt": PROMPT, "completion": ANSWER}] * 5), {}),
    "tools": (lambda: Dataset.from_list([{"messages": PROMPT + ANSWER, "tools": TOOL}] * 5), {}),
    "tokenised": (lambda: Dataset.from_dict({"input_ids": [[9, 8, 7], [6, 5, 4, 3, 2]] * 4}), {}),
    "labels": (lambda: Dataset.from_dict(LABELLED), {}),
    "skip_prepare": (lambda: Dataset.from_dict(LABELLED), {"dataset_kwargs": {"skip_prepare_dataset": True}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("form, strategy", [*((form, "stream") for form in FORMS), ("text", "bfd")])
def test_packed_documents_are_the_rows_of_the_unpacked_run(form, strategy, tmp_path):
    make, settings = FORMS[form]
    packed = build_trainer(tmp_path, make(), packing_strategy=strategy, **settings)
    rows = stock(tmp_path, make(), **settings).train_dataset
    expected = [(list(row["input_ids"]), [-100, *row["labels"][1:]]) for row in rows]
    got = [document for batch in packed.get_train_dataloader() for document in documents_of(batch)]
    assert sorted(got) == sorted(expected)


def test_formatting_func(tmp_path):
    data = Dataset.from_dict({"a": ["x", "yy"], "b": ["zzz", "w"]})
    trainer = build_trainer(tmp_path, data, trainer_kwargs={"formatting_func": lambda row: row["a"] + "-" + row["b"]})
    (batch,) = trainer.get_train_dataloader()
    texts_of_pack = sorted(trainer.processing_class.decode(tokens) for tokens, _ in documents_of(batch))
    assert texts_of_pack == ["x-zzz<|im_end|>", "yy-w<|im_end|>"]


def test_rows_that_are_packs_keep_their_documents(tmp_path):
    data = Dataset.from_dict({"input_ids": [[9, 8, 7, 6, 5], [4, 3]], "seq_lengths": [[2, 3], [2]]})
    trainer = build_trainer(tmp_path, data)
    (batch,) = trainer.get_train_dataloader()
    assert [tokens for tokens, _ in documents_of(batch)] == [[4, 3], [7, 6, 5], [9, 8]]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["stream", "bfd", "bfd_split", "wrapped", "minibatch"])
def test_every_strategy_trains_for_the_steps_announced(strategy, tmp_path):
    trainer = build_trainer(
        tmp_path, texts(48), packing_strategy=strategy, num_train_epochs=3, max_length=40, learning_rate=1e-2
    )
    steps = len(trainer.get_train_dataloader())
    trainer.train()
    assert trainer.state.global_step == 3 * steps == trainer.state.max_steps
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert np.mean(losses[-3:]) < np.mean(losses[:3]), "nothing was learned"


def test_padding_free_without_packing_means_minibatch(tmp_path):
    trainer = build_trainer(tmp_path, texts(), packing=False, padding_free=True)
    assert (trainer.args.packing, trainer.args.packing_strategy) == (True, "minibatch")
    # TRL asks for `max_length=None` here; then the longest document is the limit
    longest = build_trainer(tmp_path, texts(), packing=False, padding_free=True, max_length=None)
    assert longest.data.source.make_planner().packing.max_length == longest.data.source.documents.lengths.max()
    longest.train()


# What works in TRL works here


# What the table of equivalences and `test_settings.py` do not train with
OTHERS = {"shuffle_dataset": True, "train_sampling_strategy": "sequential", "overlong": "drop", "max_length": 40}
FILLED = {"dataloader_drop_last": True, "pad_to_multiple_of": 32, "dataloader_num_workers": 1}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [OTHERS, FILLED | {"pad_documents_to_multiple_of": 16}], ids=str)
def test_settings_of_trl_work_packed(settings, tmp_path):
    trainer = build_trainer(tmp_path, texts(), max_steps=2, **settings)
    trainer.train()
    assert trainer.state.global_step == 2
    assert np.isfinite(trainer.state.log_history[-1]["train_loss"])


@pytest.mark.sweep
@pytest.mark.parametrize("model", ["llama", "bloom"])  # as it is, and repaired
def test_compiled_training_is_training(model, tmp_path):
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    trainers = [
        build_trainer(tmp_path, texts(), model, max_steps=3, learning_rate=1e-2, **more) for more in ({}, compiled)
    ]
    for trainer in trainers:
        torch.compiler.reset()
        trainer.train()
    assert re.fullmatch(r"2 of 2 layers compiled, \d+ graphs", trainers[1].packing_report.compiled)
    assert trainers[1].packed_model.is_proved
    assert bool(trainers[1].packed_model.repaired) is (model == "bloom")
    assert torch.equal(*map(weights, trainers))
    assert trainers[0].evaluate(texts(9))["eval_loss"] == trainers[1].evaluate(texts(9))["eval_loss"]


@pytest.mark.parametrize("eval_packing", [True, False])
def test_what_workers_get_can_be_sent_to_a_process_that_is_not_forked(eval_packing, tmp_path):
    """`dataloader_multiprocessing_context="forkserver"`, where forking is not safe; starting one would take seconds."""
    trainer = build_trainer(tmp_path, texts(), eval_packing=eval_packing, trainer_kwargs={"eval_dataset": texts(9)})
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
    ours = build_trainer(tmp_path, texts(12), max_steps=2, trainer_kwargs={"eval_dataset": texts(5)})
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
    with pytest.raises(ValueError, match="A pack of 1 document came to"):
        ours.packed_model.check_packed_attention({"cu_seq_lens_q": torch.tensor([0, 4])})
    loss = ours.evaluate()["eval_loss"]
    assert ours.args.packing
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
