"""What goes with what: every pair of choices is refused with its own message, or accepted; and the page says so."""

import os
import re
import runpy
from dataclasses import fields
from types import SimpleNamespace

import pytest
from accelerate.utils import DistributedType
from datasets import Dataset
from packaging.version import Version
from peft import LoraConfig, PromptTuningConfig
from support.features import PRESENT, features_in
from support.models import build_tiny_model, build_tokenizer
from support.paths import ROOT
from support.runs import ANSWER, PROMPT, config
from support.versions import TRANSFORMERS
from torch.utils.data import SequentialSampler
from transformers import BartConfig, BartForConditionalGeneration
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from trl_packfix import SFTConfig, SFTTrainer
from trl_packfix.training import choices as of
from trl_packfix.training.checks import check_before_loading, settings_of_trainer
from trl_packfix.training.choices import Condition, RunSettings
from trl_packfix.training.conflicts import CONFLICTS, experimental_choices, refuse_conflicts

CHATS = Dataset.from_dict({"messages": [PROMPT + ANSWER] * 4})


def with_column(name):
    return CHATS.add_column(name, [[b"x"]] * len(CHATS))


class TwoRanks(SFTConfig):
    """Say that the run has two processes."""

    world_size = 2


class Chunked(SFTConfig):
    """Choose the loss that is the default of TRL below 1.15; later versions replace it."""

    def __post_init__(self):
        super().__post_init__()
        self.loss_type = "chunked_nll"


class Sampled(SFTTrainer):
    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)


def engine(**parts):
    """Return what the rules look at; engines of many ranks, as they are, are in `test_distributed.py`."""
    sizes = SimpleNamespace(tp_size=1, cp_size=1, sp_size=1)
    return SimpleNamespace(**{"distributed_type": DistributedType.NO, "parallelism_config": sizes} | parts)


def divided(**sizes):
    """Return a model as transformers loads it on several ranks; on real ranks it is in `test_model_parallelism.py`."""
    model = build_tiny_model("llama")
    model.config.distributed_config = SimpleNamespace(**{"tp_size": 1, "dp_size": 1, "pp_size": 1} | sizes)
    model._is_distributed_loading_by_transformers = True
    model._tp_size = model.config.distributed_config.tp_size
    return model


def on_devices(*devices):
    model = build_tiny_model("llama")
    model.hf_device_map = dict(zip(("model", "lm_head"), devices, strict=True))
    return model


MODEL = build_tiny_model("llama")
BART = BartConfig(vocab_size=300, d_model=16, encoder_layers=1, decoder_layers=1)
AUTO_TP = SimpleNamespace(deepspeed_config={"tensor_parallel": {"autotp_size": 2}})
BASE = {"packing": True, "max_length": 64, "max_steps": 2, "per_device_train_batch_size": 1, "dataset": CHATS}
BASE |= {"loss_type": "nll"}  # TRL below 1.15 has another default
ARGUMENTS = ("dataset", "stream", "model", "trainer_class", "config_class", "data_collator", "compute_loss_func")
ARGUMENTS += ("processing_class", "formatting_func", "peft_config", "accelerator", "user_loss", "user_loader")
MADE = {  # how each choice is made: fields of the config, and ARGUMENTS
    of.PACKING: {"packing": True},
    of.NO_PACKING: {"packing": False},
    of.PACKED_EVALUATION: {"eval_packing": True},
    of.TOKENS_PER_RANK: {"tokens_per_rank": 64},
    of.SHARED_IN_PACKS: {"share_prefixes": "pack"},
    of.SHARED_IN_FAMILIES: {"share_prefixes": "family"},
    of.PER_TURN: {"per_turn": True},
    of.SMOOTHING: {"label_smoothing_factor": 0.1},
    of.NOISE: {"neftune_noise_alpha": 5.0},
    of.CONSTANT_SHAPES: {"pad_documents_to_multiple_of": 8},
    of.DOCUMENT_WEIGHTING: {"document_weighting": "document"},
    of.WEIGHT_COLUMN: {"weight_column": "weight"},
    of.SOURCE_COLUMN: {"source_column": "source"},
    of.OVERLONG: {"overlong": "drop"},
    of.KEEP_END: {"truncation_mode": "keep_end"},
    of.NO_TRUNCATION: {"overlong": "drop"},
    of.EXCHANGE_SPEEDS: {"exchange_speeds": {"within": 1e9}, "tokens_per_rank": 64},
    of.NO_TOKENS_PER_RANK: {"tokens_per_rank": None},
    of.OFFLOADING_ON_CPU: {"activation_offloading": True},
    of.NO_PROCESSOR: {"processing_class": build_tokenizer()},
    of.SEVERAL_DEVICES: {"model": on_devices("cpu:0", "cpu:1")},
    of.ATTENTION_OF_MODEL: {"enforce_flash_attention": False},
    of.BATCH_SIZE: {"per_device_train_batch_size": 2},
    of.SAMPLING: {"train_sampling_strategy": "group_by_length"},
    of.NOT_OF_STREAMS: {"packing_strategy": "bfd"},
    of.CUT_BLOCKS: {"packing_strategy": "wrapped"},
    of.NOT_PLANNED_BY_TOKENS: {"packing_strategy": "minibatch"},
    of.DROP_LAST: {"dataloader_drop_last": True},
    of.ASSISTANT_ONLY: {"assistant_only_loss": True},
    of.EVERY_TURN: {"assistant_only_loss": False},
    of.LAST_TURN: {"assistant_turns": "last", "assistant_only_loss": True},
    of.NO_EMPTY_THINKING: {"train_empty_thinking": False, "assistant_only_loss": True},
    of.HISTORY_TRAINED: {"completion_only_loss": False},
    of.CHUNKED: {"config_class": Chunked},
    of.LIGER: {"use_liger_kernel": True},
    of.LIGER_LOSS: {"liger_kernel_config": {"cross_entropy": True}},
    of.NO_MAX_STEPS: {"max_steps": -1},
    of.UNPREPARED: {"dataset_kwargs": {"skip_prepare_dataset": True}},
    of.DIVIDED_BATCHES: {"accelerator_config": {"split_batches": True}},
    of.MEAN_PER_RANK: {"average_tokens_across_devices": False, "config_class": TwoRanks},
    of.STREAM: {"packing": True, "stream": True},
    of.PACKED_IMAGES: {"packing": True, "dataset": with_column("images")},
    of.UNPACKED_IMAGES: {"packing": False, "dataset": with_column("images")},
    of.VIDEO_OR_SOUND: {"dataset": with_column("video")},
    of.COLLATOR: {"data_collator": DataCollatorForLanguageModeling(pad_token_id=0)},
    of.FORMATTING: {"formatting_func": str},
    of.LOSS_FUNCTION: {"compute_loss_func": print},
    of.USER_LOSS: {"user_loss": "OwnLoss.compute_loss"},
    of.USER_LOADER: {"user_loader": "OwnLoader.get_train_dataloader"},
    of.USER_SAMPLER: {"trainer_class": Sampled},
    of.ENCODER_DECODER: {"model": BartForConditionalGeneration(BART)},
    of.VIRTUAL_TOKENS: {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)},
    of.TOKENS_PER_RANK_OF_HYBRIDS: {"model": build_tiny_model("lfm2"), "tokens_per_rank": 64},
    of.DROPPED_WEIGHTS: {"model": build_tiny_model("llama", attention_dropout=0.1)},
    of.CONTEXT_PARALLELISM: {"accelerator": engine(parallelism_config=SimpleNamespace(cp_size=2, sp_size=1))},
    of.DEEPSPEED_TENSORS: {"accelerator": engine(distributed_type=DistributedType.DEEPSPEED, deepspeed_plugin=AUTO_TP)},
    of.TENSOR_PARALLELISM: {"model": divided(tp_size=2)},
    of.TENSORS_AND_SHARDS: {"model": divided(tp_size=2, dp_size=2)},
    of.ADAPTERS: {"peft_config": LoraConfig(target_modules=["q_proj"])},
    of.PIPELINE: {"model": divided(pp_size=2)},
    of.UNPACKED_SEQUENCES: {
        "packing": False,
        "accelerator": engine(parallelism_config=SimpleNamespace(tp_size=1, cp_size=1, sp_size=2)),
    },
    of.MEGATRON: {"accelerator": engine(distributed_type=DistributedType.MEGATRON_LM)},
}
# What a choice is besides, as it is made above
ALSO = {
    of.CUT_BLOCKS: (of.NOT_OF_STREAMS, of.NOT_PLANNED_BY_TOKENS, of.NO_TRUNCATION),
    of.OVERLONG: (of.NO_TRUNCATION,),
    of.NO_TRUNCATION: (of.OVERLONG,),
    of.EXCHANGE_SPEEDS: (of.TOKENS_PER_RANK,),
    of.TOKENS_PER_RANK_OF_HYBRIDS: (of.TOKENS_PER_RANK,),
    of.NOT_PLANNED_BY_TOKENS: (of.NOT_OF_STREAMS,),
    of.LAST_TURN: (of.ASSISTANT_ONLY,),
    of.TENSORS_AND_SHARDS: (of.TENSOR_PARALLELISM,),
    of.VIRTUAL_TOKENS: (of.ADAPTERS,),
    of.NO_EMPTY_THINKING: (of.ASSISTANT_ONLY,),
}
# What older versions of transformers do not have, and what needs the folder of a feature
ABSENT = {of.PIPELINE, of.TENSORS_AND_SHARDS} if Version("5.20") > TRANSFORMERS else set[Condition]()
ABSENT |= {choice for choice, how in MADE.items() if not features_in(how) <= PRESENT}
if "hybrids" not in PRESENT:
    ABSENT |= {of.TOKENS_PER_RANK_OF_HYBRIDS}
ROWS = [
    (feature, other) for feature in CONFLICTS for other in feature.conflicts if not {feature.choice, other} & ABSENT
]

REFUSED_IN_PACKS = next(feature.conflicts for feature in CONFLICTS if feature.choice == of.PACKING)


def can_be_made(one: Condition, other: Condition) -> bool:
    """Return False for two values of one setting, and for what would need two datasets, models or engines."""
    if {one, other} & ABSENT or {one, other} in ({of.OVERLONG, of.CUT_BLOCKS}, {of.NO_TRUNCATION, of.CUT_BLOCKS}):
        return False  # refused with the value, in `data/dataset_checks.py`
    return one != other and all(MADE[other].get(key, value) == value for key, value in MADE[one].items())


def message_of(folder, *choices: Condition, constructs: bool = False, **settings) -> str:
    """Return what is said to a run with these choices; empty if nothing. The trainer asks in this order."""
    settings_made = BASE | settings | {key: value for choice in choices for key, value in MADE[choice].items()}
    arguments = {key: settings_made.pop(key) for key in ARGUMENTS if key in settings_made}
    dataset = arguments.pop("dataset")
    if arguments.pop("stream", False):
        dataset = dataset.to_iterable_dataset()
    engine = arguments.pop("accelerator", None)
    user_methods = {name: arguments.pop(name, None) for name in ("user_loss", "user_loader")}
    model = arguments.pop("model", MODEL)
    kind = arguments.pop("trainer_class", SFTTrainer)
    environment = dict(os.environ)  # settings may set variables
    try:
        args = config(folder, arguments.pop("config_class", SFTConfig), packing_report=False, **settings_made)
        if constructs:
            kind(model, args, train_dataset=dataset, **{"processing_class": build_tokenizer()} | arguments)
        check_before_loading(
            settings_of_trainer(kind, arguments | {"args": args, "model": model, "train_dataset": dataset})
        )
        refuse_conflicts(RunSettings(args=args, accelerator=engine))
        refuse_conflicts(RunSettings(args=args, **user_methods))
    except ValueError as error:
        return str(error)
    finally:
        os.environ.clear()
        os.environ.update(environment)
    return ""


def test_every_choice_is_made_and_nothing_else_is_chosen():
    """Make every choice somewhere: rows whose choice is never made, or always, would pass below."""
    every = {choice for choice in vars(of).values() if isinstance(choice, Condition)}
    named = {choice for feature in CONFLICTS for choice in (feature.choice, *feature.conflicts)}
    assert every == named == set(MADE)
    assert len(ROWS) > 50


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("feature, other", ROWS, ids=lambda row: getattr(row, "choice", row).name)
def test_a_row_is_refused_in_three_parts(feature, other, tmp_path):
    """Refuse a row in the constructor of the trainer, where it is not the engine or the first step that says it."""
    constructs = not {"accelerator", "user_loss", "user_loader"} & {*MADE[feature.choice], *MADE[other]}
    unpacked = {} if feature.choice == of.PACKING or other not in REFUSED_IN_PACKS else {"packing": False}
    text = message_of(tmp_path, feature.choice, other, constructs=constructs, **unpacked)
    first_sentence, *_ = text.partition(". ")
    assert re.fullmatch(r"[^.]*(\.[^. ][^.]*)* was given with .*", first_sentence), text
    assert text.endswith(f". {feature.conflicts[other]}. {feature.remedy(other)}.")
    assert feature.remedy(other)[0].isupper()
    assert feature.conflicts[other][0].isupper()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("one", MADE, ids=lambda choice: choice.name)
def test_every_pair_is_refused_or_accepted_as_the_records_say(one, tmp_path):
    num_accepted = 0
    for other in (choice for choice in MADE if can_be_made(one, choice)):
        choices = {one, other, *ALSO.get(one, ()), *ALSO.get(other, ())}
        choices.add(of.PACKING if (MADE[one] | MADE[other]).get("packing", True) else of.NO_PACKING)
        causes = [feature.conflicts[with_it] for feature, with_it in ROWS if {feature.choice, with_it} <= choices]
        text = message_of(tmp_path, one, other)
        assert bool(text) == bool(causes), (other.name, text)
        assert not text or any(cause in text for cause in causes)
        num_accepted += not text
    assert num_accepted or one in (*REFUSED_IN_PACKS, *ABSENT)


@pytest.mark.skipif(of.TENSORS_AND_SHARDS in ABSENT, reason="this version of transformers has no such sizes")
@pytest.mark.parametrize(
    "sizes, name",
    [
        ({"dp_replicate_size": 2, "fsdp_size": 1}, "dp_replicate_size"),
        ({"dp_replicate_size": 1, "fsdp_size": 2}, "fsdp_size"),
        ({"dp_replicate_size": 2, "fsdp_size": 2}, "fsdp_size"),
    ],
)
def test_the_size_beside_tensor_parallelism_is_the_one_that_was_given(sizes, name, tmp_path):
    """FSDP wraps the layers also if it only replicates them."""
    model = divided(tp_size=2, dp_size=sizes["dp_replicate_size"] * sizes["fsdp_size"], **sizes)
    settings = RunSettings(args=config(tmp_path), model=model)
    assert of.TENSORS_AND_SHARDS.describe(settings) == f"`tp_size` with `{name}` in `DistributedConfig`"


def test_what_several_gpus_have_not_run_is_called_experimental(tmp_path):
    """It must be called so in the help of its field, and in the report of a run with it (`test_report.py`)."""
    labelled = {field.name for field in fields(SFTConfig) if "Experimental" in str(field.metadata.get("help"))}
    assert labelled == {"tokens_per_rank"}
    args = config(tmp_path, packing=True)
    assert experimental_choices(RunSettings(args=args)) == ()
    (divided,) = experimental_choices(RunSettings(args=args, model=SimpleNamespace(_tp_size=2)))
    assert divided.startswith("tensor or expert parallelism")


def test_the_page_is_made_of_the_records():
    page = runpy.run_path(str(ROOT / "tools" / "combinations.py"))["page"]()
    assert (ROOT / "docs" / "combinations.md").read_text() == page, "run `python tools/combinations.py`"
