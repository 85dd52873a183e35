"""Bad input is refused before work starts, in three parts: what was given, why it cannot work, what to set."""

import re
import warnings

import pytest
import trl
from datasets import Dataset, IterableDataset
from peft import PromptTuningConfig, get_peft_model
from support.models import build_tiny_model, build_tokenizer
from support.runs import ANSWER, PROMPT, build_trainer, config, run_training, texts
from support.versions import scores_tokens

from trl_packfix import SFTConfig, SFTTrainer, compat

TEXTS = texts(8)


def tokenised(**columns):
    return Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9, 10]]} | columns)


SHARED = {"tokens_per_rank": 16, "per_device_train_batch_size": 1}

# What is given, and the three parts of the message
ARGUMENTS = [
    (
        {"max_length": None},
        r"`max_length=None` was given with packing.*capacity of a pack is .*\(2\) times.*Set `max_length`",
    ),
    ({"max_length": 1}, r"`max_length=1` was given.*needs two tokens.*Set `max_length` to 2"),
    ({"max_length": 64.5}, r"`max_length=64\.5` was given.*counts tokens, so it is a whole number.*Set `max_length`"),
    ({"gradient_accumulation_steps": 0}, r"`gradient_accumulation_steps=0` was given.*fewer than one.*1 or more"),
    ({"per_device_train_batch_size": 0}, r"`per_device_train_batch_size=0` was given"),
    ({"pad_to_multiple_of": -8}, r"`pad_to_multiple_of=-8` was given"),
    ({"peak_tflops": -1.0}, r"`peak_tflops=-1.0` was given.*divisor of `mfu`.*Set it to the dense TFLOP/s"),
    ({"pad_documents_to_multiple_of": 0}, r"`pad_documents_to_multiple_of=0` was given"),
    (
        {"pad_documents_to_multiple_of": 2.5},
        r"`pad_documents_to_multiple_of=2\.5` was given\. It is a count.*a whole number.*Set `pad_documents",
    ),
    ({"peak_tflops": float("nan")}, r"`peak_tflops=nan` was given.*divisor of `mfu`"),
    ({"tokens_per_rank": 0}, "It is a count"),
    ({"tokens_per_rank": 1.5}, "It is a number of tokens"),
    (SHARED | {"exchange_speeds": {"within": 0}}, r"each a number above 0, and 'within' is not"),
    (SHARED | {"exchange_speeds": {"bandwidth": 1}}, r"by flops, within.*'bandwidth' is not one"),
    (SHARED | {"exchange_speeds": "fast"}, "'fast' is not one of them"),
    ({"max_length": "512"}, r"`max_length='512'` was given\. It is a text.* Set `max_length` to 512, without quotes"),
    ({"learning_rate": "1e-5"}, r"`learning_rate='1e-5'` was given.* Set `learning_rate` to 1e-05, without quotes"),
    ({"bf16": "auto"}, r"`bf16='auto'` was given\. Any text counts as true.* Set `bf16` to True or False, or leave it"),
    ({"packing_strategy": "best"}, r"`packing_strategy='best'` was given.*no such choice.*'stream', 'bfd'"),
    (
        {"truncation_mode": "keep_last"},
        r"`truncation_mode='keep_last'` was given.*no such choice.*'keep_start', 'keep_end'",
    ),
    ({"overlong": "cut"}, r"`overlong='cut'` was given.*no such choice.*'truncate', 'split', 'drop', 'raise'"),
    ({"document_weighting": "sequence"}, r"`document_weighting='sequence'` was given.*no such choice"),
    ({"balance": "all"}, r"`balance='all'` was given.*no such choice.*'step', 'none'"),
    (
        {"packing_strategy": "bfd_split", "overlong": "truncate"},
        r"'bfd_split'.* with `overlong='truncate'`.*splits long documents.*Set `packing_strategy=\"stream\"`",
    ),
    ({"packing_strategy": "wrapped", "overlong": "raise"}, r"'wrapped'.* with `overlong='raise'`"),
    (
        {"packing": "bfd"},
        r"`packing='bfd'` was given. TRL takes any text for `True`.*is 'stream'. Set `packing=True`, and",
    ),
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("settings, message", ARGUMENTS, ids=[str(settings) for settings, _ in ARGUMENTS])
def test_settings_are_refused_when_the_config_is_made(settings, message, tmp_path):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        config(tmp_path, **settings)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"max_length": None}, "`max_length=None` was given with packing"),
        ({"max_length": "512"}, r"`max_length='512'` was given\. It is a text"),
        ({"assistant_only_loss": "False"}, r"`assistant_only_loss='False'` was given\. Any text counts as true"),
    ],
    ids=str,
)
def test_configs_of_trl_are_checked_too(settings, message, tmp_path):
    args = trl.SFTConfig(str(tmp_path), packing=True, use_cpu=True, bf16=False, **settings)
    with pytest.raises(ValueError, match=message):
        SFTTrainer(build_tiny_model(), args, train_dataset=TEXTS, processing_class=build_tokenizer())


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("document_weighting", "sequence", r"`document_weighting='sequence'` was given.*no such choice"),
        ("on_leak", "stop", r"`on_leak='stop'` was given.*no such choice"),
        ("packing_strategy", "best", r"`packing_strategy='best'` was given.*no such choice"),
        ("max_length", -3, r"`max_length=-3` was given.*needs two tokens"),
        ("max_length", None, r"`max_length=None` was given with packing"),
        ("eval_packing", "no", r"`eval_packing='no'` was given\. Any text counts as true"),
    ],
)
def test_values_that_are_set_after_the_config_was_made_are_checked_too(name, value, message, tmp_path):
    args = config(tmp_path, packing=True, max_length=64)
    setattr(args, name, value)
    with pytest.raises(ValueError, match=message):
        SFTTrainer(build_tiny_model(), args, train_dataset=TEXTS, processing_class=build_tokenizer())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_config_of_a_padding_free_trainer_makes_another_trainer(tmp_path):
    """The trainer has set `packing` in its config, whose `max_length` may be None."""
    args = config(tmp_path, packing=False, padding_free=True, max_length=None)
    trainer = SFTTrainer(build_tiny_model(), args, train_dataset=TEXTS, processing_class=build_tokenizer())
    assert trainer.args.packing
    other = SFTTrainer(build_tiny_model(), trainer.args, train_dataset=TEXTS, processing_class=build_tokenizer())
    assert other.args.packing_strategy == "minibatch"


SKIP = {"dataset_kwargs": {"skip_prepare_dataset": True}}
INPUT = {
    "positions": (
        {"dataset": TEXTS, "max_length": 5000},
        r"`max_length=5000` was given and the model has 4096 positions.*never learned.*4096 or less",
    ),
    "negative id": (
        {"dataset": Dataset.from_dict({"input_ids": [[-1, 6], [7, 30]]})},
        r"Row 0 of the train dataset has token ids from -1 to 6, and the model has 300",  # of row 0, not of row 1
    ),
    "missing mask": (
        {"dataset": tokenised(attention_mask=[[1, 1, 1], None])},
        r"Column `attention_mask` holds 1 missing rows and 0 missing values in 2 rows.*without gaps.*Remove",
    ),
    "strings for ids": (
        {"dataset": Dataset.from_dict({"input_ids": [["a", "b"]]})},
        r"Column `input_ids` has type list<item: string>.*list of them.*as lists of token ids",
    ),
    "no rows": (
        {"dataset": Dataset.from_dict({"text": []})},
        r"The train dataset has 0 rows and the columns \['text'\].*nothing to train.*Check the file",
    ),
    "messages that are none": (
        {"dataset": Dataset.from_dict({"messages": ["a", "b"]})},
        r"2 rows has the columns `messages` \(string\)\. TRL tokenises .*Rename or reshape.*`dataset_text_field`",
    ),
    "missing answer": (
        {"dataset": Dataset.from_dict({"prompt": ["a", "b", "c"], "completion": ["d", None, "e"]}).select([2, 1])},
        r"1 of 2 rows of the train dataset hold None in `completion`; the first are \[1\].*Remove these rows",
    ),
    "transform": (
        {"dataset": TEXTS.with_transform(lambda rows: rows), "dataset_kwargs": {"skip_prepare_dataset": True}},
        r"8 rows has a transform.*length of every document.*`Dataset.map`",
    ),
    "untokenised with skip_prepare_dataset": (
        {"dataset": TEXTS, "dataset_kwargs": {"skip_prepare_dataset": True}},
        r"columns \['text'\] and no `input_ids`.*tokenised rows.*skip_prepare_dataset",
    ),
    **{
        name: (
            {"dataset": Dataset.from_dict({"messages": [PROMPT + ANSWER], name: [["x"]]})},
            f"The column `{name}` was given with packing.*Remove the column",
        )
        for name in ("video", "videos", "audio", "audios")
    },
}


@pytest.mark.parametrize("arguments, message", INPUT.values(), ids=INPUT)
def test_input_is_refused(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        build_trainer(tmp_path, **arguments)


PREPARED = {
    "vocabulary": (
        Dataset.from_dict({"input_ids": [[5, 6], [7, 300]]}),
        {},
        "Row 1 of the {} dataset has token ids from 7 to 300, and the model has 300 embeddings.*resize",
    ),
    "labels above": (
        tokenised(labels=[[5, 6, 7], [5, -100, 300]]),
        {},
        "Row 1 of the {} dataset has labels from 5 to 300, and the model has 300 embeddings.*as another token.*-100",
    ),
    "labels below": (
        tokenised(labels=[[5, 6, 7], [-100, -1, 7]]),
        {},
        "Row 1 of the {} dataset has labels from -1 to 7, and the model has 300 embeddings",
    ),
    "positions": (
        tokenised(position_ids=[[0, 1, 2], [0, 0, 1]]),
        {},
        "Row 1 of the {} dataset has `position_ids` that begin again.*see each other.*`seq_lengths`",
    ),
    "padding": (
        tokenised(attention_mask=[[1] * 3, [1, 1, 0]]),
        {},
        "Row 1 of the {} dataset is padded.*zeros.*trained and attended to.*`padding=False`",
    ),
    "packs": (
        tokenised(labels=[[5, 6, 7]] * 2, seq_lengths=[[3], [1, 2]]),
        {"packing": False},
        "The {} dataset of 2 rows has `seq_lengths`.*packing is off.*would see each other.*Set `packing=True`",
    ),
    "no rows": (Dataset.from_dict({"input_ids": []}), {}, "The {} dataset has 0 rows"),
}


@pytest.mark.parametrize("data, settings, message", PREPARED.values(), ids=PREPARED)
def test_rows_that_trl_does_not_prepare_are_checked_too(data, settings, message, tmp_path):
    settings = SKIP | settings
    good = tokenised(labels=[[5, 6, 7]] * 2)
    with pytest.raises(ValueError, match=message.format("train")):
        build_trainer(tmp_path, data, **settings)
    for sets, name in ((data, "eval"), ({"a": good, "b": data}, "b")):
        with pytest.raises(ValueError, match=message.format(name)):
            build_trainer(tmp_path, good, eval_dataset=sets, **settings)
    if len(data):  # `predict` prepares nothing
        trainer = build_trainer(tmp_path, good, **settings)
        for evaluate in (trainer.predict, trainer.evaluate):
            with pytest.raises(ValueError, match=message.format("evaluation")):
                evaluate(data)


def no_rows():
    yield from ()


@pytest.mark.parametrize("settings", [{}, {"packing": False}, SKIP], ids=str)
def test_a_stream_without_rows_is_refused(settings, tmp_path):
    empty = IterableDataset.from_generator(no_rows)
    with pytest.raises(ValueError, match="The train dataset is an `IterableDataset` of 0 rows.*Check the files"):
        build_trainer(tmp_path, empty, max_steps=1, **settings)
    data = Dataset.from_dict({"input_ids": [[5, 6, 7]]})
    with pytest.raises(ValueError, match="The eval dataset is an `IterableDataset` of 0 rows"):
        build_trainer(tmp_path, data, eval_dataset=empty, **settings)


def test_prompt_learning_is_refused_in_a_model_too(tmp_path):
    model = get_peft_model(build_tiny_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match="with 3 virtual tokens was given with packing.*share them.*Use LoRA"):
        build_trainer(tmp_path, TEXTS, model=model)


def test_tokenizer_without_eos_is_refused_for_plain_text_only(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    kwargs = {"processing_class": tokenizer}
    with pytest.raises(ValueError, match="no EOS token, and 8 of 8 rows of the train dataset are plain text.*Set"):
        SFTTrainer(build_tiny_model(), config(tmp_path), train_dataset=TEXTS, **kwargs)
    chat = Dataset.from_list([{"messages": PROMPT + ANSWER}] * 2)
    SFTTrainer(build_tiny_model(), config(tmp_path), train_dataset=chat, **kwargs)


@pytest.mark.parametrize("rows", [range(5), range(1, 5), [3, 2, 1]], ids=str)
def test_rows_are_named_before_tokenisation_as_the_selected_dataset_counts_them(rows, tmp_path, monkeypatch):
    monkeypatch.setattr("trl.SFTTrainer._prepare_dataset", lambda *a, **k: pytest.fail("tokenisation has started"))
    data = Dataset.from_list([{"messages": PROMPT + ANSWER * (row % 2 == 0)} for row in range(5)]).select(rows)
    silent = [index for index, row in enumerate(rows) if row % 2]
    message = rf"{len(silent)} of {len(data)} rows .* have no assistant message.*{re.escape(str(silent))}.*Remove"
    with pytest.raises(ValueError, match=message):
        build_trainer(tmp_path, data, assistant_only_loss=True)


def test_rows_that_the_template_leaves_without_assistant_tokens_are_named(tmp_path):
    rows = Dataset.from_list(
        [{"prompt": PROMPT, "completion": ANSWER}, {"prompt": PROMPT, "completion": [{"role": "user", "content": "x"}]}]
    )
    with pytest.raises(ValueError, match=r"1 of 2 rows of the train dataset .*\[1\]\. Row 1: no assistant tokens"):
        build_trainer(tmp_path, rows, assistant_only_loss=True)


def test_trl_below_the_floor_is_refused():
    with pytest.raises(ImportError, match=r"trl 1\.8\.0 is installed.*pip install 'trl>=1\.9\.0'"):
        compat.require_trl("1.8.0")
    compat.require_trl()


def test_messages_name_the_number_of_tokens_of_a_micro_batch(tmp_path, capsys):
    run_training(tmp_path, TEXTS, max_steps=1, packing_report=True, per_device_train_batch_size=8, max_length=4096)
    assert "32,768 tokens (batch size 8 x max_length 4,096)" in capsys.readouterr().out
    assert (tmp_path / "packing_report.json").exists()


@scores_tokens
@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "chunked_nll"},
        {"pad_token": "<|pad|>"},
        {"truncation_mode": "keep_end"},
        {"packing_strategy": "bfd-requeue"},
        {},
    ],
    ids=str,
)
def test_deprecations_of_trl_are_passed_through(settings, tmp_path):
    warned = []
    for kind in (trl.SFTConfig, SFTConfig):
        with warnings.catch_warnings(record=True) as warnings_found:
            warnings.simplefilter("always")
            args = config(tmp_path, kind, **{"packing_strategy": "bfd"} | settings)
        warned.append(
            {str(warning.message) for warning in warnings_found if issubclass(warning.category, FutureWarning)}
        )
    # a name that transformers below 5.20 need
    assert warned[1] == {text for text in warned[0] if not text.startswith("`gradient_checkpointing` is deprecated")}
    assert bool(warned[1]) is bool(settings)
    assert args.packing_strategy in ("bfd", "bfd_split")
    assert args.loss_type == "nll"
