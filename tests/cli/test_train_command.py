"""`trl-packfix train`: TRL's flags and files, mixtures by exact counts, several files, restarts."""

import importlib.util
import json
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from datasets import Dataset, DatasetDict, IterableDataset, load_from_disk
from support.models import build_tiny_model, build_tokenizer
from support.paths import ROOT
from trl import DatasetMixtureConfig, ModelConfig, get_dataset
from trl.scripts import sft

from trl_packfix import SFTConfig
from trl_packfix.cli import configs as reading
from trl_packfix.cli import main, training
from trl_packfix.cli.configs import ZERO3, TrainArguments, parse_configs
from trl_packfix.cli.mixture import MixtureConfig, load_mixture
from trl_packfix.cli.sources import load_rows
from trl_packfix.cli.training import load_documents
from trl_packfix.training.foreign_keys import EXPLAINED, NOT_NEEDED, RENAMED, TABLES, other_defaults

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
QUICK = "--max_length 64 --report_to none --use_cpu --bf16 false --disable_tqdm true --save_strategy no".split()


@pytest.fixture(scope="module")
def workplace(workplace) -> Path:
    """Add files `one` (8 rows) and `two` (20), and the folder `three` (6)."""
    for name, num in (("one", 8), ("two", 20)):
        rows = [{"text": f"{name} {i} " + "x" * (i % 7 * 3)} for i in range(num)]
        (workplace / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Dataset.from_list([{"text": f"three {i}"} for i in range(6)]).save_to_disk(workplace / "three")
    return workplace


def train(workplace: Path, monkeypatch, *flags: str, **settings) -> None:
    """Train in `workplace`; `settings` are its YAML file."""
    monkeypatch.chdir(workplace)
    (workplace / "run.yaml").write_text(yaml.safe_dump({"model_name_or_path": "model"} | settings))
    words = [] if "--output_dir" in flags else ["--output_dir", "output"]
    assert main(["train", "--config", "run.yaml", *QUICK, *words, *flags]) == 0
    output = Path(flags[flags.index("--output_dir") + 1] if "--output_dir" in flags else "output")
    assert (output / "model.safetensors").is_file()


# Flags and files


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 128}


def test_positions_are_those_that_model_init_kwargs_give(workplace, monkeypatch, capsys):
    build_tiny_model(max_position_embeddings=128).save_pretrained(workplace / "short")
    build_tokenizer().save_pretrained(workplace / "short")
    settings = {"model_name_or_path": "short", "dataset_name": "one.jsonl", "packing": True, "max_steps": 1}
    words = ("--max_length", "256", "--per_device_train_batch_size", "1")
    with pytest.raises(AssertionError):
        train(workplace, monkeypatch, *words, **settings)
    assert "`max_length=256` was given and the model has 128 positions" in capsys.readouterr().err
    longer = {"max_position_embeddings": 256, "rope_parameters": YARN}
    train(workplace, monkeypatch, *words, "--output_dir", "longer", **settings, model_init_kwargs=longer)
    saved = json.loads((workplace / "longer" / "config.json").read_text())
    assert saved["max_position_embeddings"] == 256
    assert saved["rope_parameters"]["rope_type"] == "yarn"


SFT_FILE = yaml.safe_load("""
{model_name_or_path: model, dataset_name: one.jsonl, learning_rate: 1.0e-3, packing: true, max_length: 64,
 use_peft: true, lora_r: 4, lora_target_modules: [q_proj, v_proj], eval_strategy: "no",
 gradient_checkpointing_kwargs: {use_reentrant: false}, dtype: float32, env: {PACKFIX_TEST_VARIABLE: "1"},
 use_cpu: true, bf16: false}
""")


def test_a_file_of_trl_sft_means_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("PACKFIX_TEST_VARIABLE", "0")
    file = tmp_path / "sft.yaml"
    file.write_text(yaml.safe_dump(SFT_FILE | {"output_dir": str(tmp_path / "output")}))
    ours = parse_configs(["--config", str(file)])
    theirs = sft.make_parser().parse_args_and_config(["--config", str(file)])
    compared = 0
    for mine, stock in zip(ours[:4], theirs, strict=True):
        for name in (field.name for field in fields(type(stock))):
            expected = getattr(stock, name)
            value = getattr(mine, name)
            expected = [expected] if name == "dataset_name" else expected
            # ours is "stream", ours waits for no GPU, and one holds the time
            if name not in ("packing_strategy", "logging_nan_inf_filter", "logging_dir"):
                assert str(value) == str(expected), name
                compared += 1
    assert compared > 140
    assert ours[1].packing_strategy == "stream"
    assert ours[2].lora_r == 4


def test_keys_of_the_launcher_are_named(tmp_path, capsys):
    file = tmp_path / "sft.yaml"
    changes = {"output_dir": str(tmp_path), "num_processes": 4, "accelerate_config": "zero3"}
    file.write_text(yaml.safe_dump(SFT_FILE | changes))
    parse_configs(["--config", str(file)])
    assert "Not used: accelerate_config, num_processes" in capsys.readouterr().out


# A file of another trainer, and ours that trains the same: that of axolotl is on the page
FOREIGN = {"axolotl": re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "migrating.md").read_text(), re.DOTALL)}
FOREIGN["LLaMA-Factory"] = [
    """
model_name_or_path: meta-llama/Llama-3.1-8B-Instruct
stage: sft
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: chats
template: llama3
cutoff_len: 2048
packing: true
neat_packing: true
mask_history: true
preprocessing_num_workers: 16
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
flash_attn: fa2
output_dir: output
""",
    """
model_name_or_path: meta-llama/Llama-3.1-8B-Instruct
use_peft: true
lora_r: 8
lora_alpha: 16
lora_dropout: 0.0
lora_target_modules: all-linear
dtype: bfloat16
dataset_name: chats.jsonl
max_length: 2048
packing: true
assistant_only_loss: true
assistant_turns: last
dataset_num_proc: 16
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_steps: 0.1
bf16: true
output_dir: output
""",
]


def value_of(configs, name: str):
    value = next(getattr(config, name) for config in configs[:4] if hasattr(config, name))
    return getattr(value, "value", value)


@pytest.mark.parametrize("trainer", FOREIGN)
def test_a_file_of_another_trainer_is_refused_with_the_names_of_ours(trainer, tmp_path, monkeypatch):
    """Unknown keys are named as they are called here. The file beside it has these, and trains what the foreign file
    sets, and what its trainer does where it sets nothing.
    """
    monkeypatch.chdir(tmp_path)
    foreign, ours = FOREIGN[trainer]
    Path("foreign.yaml").write_text(foreign)
    with pytest.raises(ValueError, match="settings were given, as flags or in the config file") as raised:
        parse_configs(["--config", "foreign.yaml"])
    message = str(raised.value)
    keys = yaml.safe_load(foreign)
    Path("ours.yaml").write_text(re.sub("bf16: true|$", "", ours) + "use_cpu: true\nbf16: false\n")
    configs = parse_configs(["--config", "ours.yaml"])
    known = {field.name for config in configs[:4] for field in fields(config)}
    refused = [key for key in keys if key not in known]
    assert len(refused) > 8
    assert "did you mean" not in message
    for key in refused:
        (line,) = (line for line in message.splitlines() if line.startswith(f"  `{key}` "))
        assert re.match(f"  `{key}` (is `|can be removed: )", line)
    named = {RENAMED[key].split(":")[0] for key in refused if key in RENAMED}
    assert named - {"attn_implementation", "chat_template_path"} <= yaml.safe_load(ours).keys()
    expected = {}
    for key, value in keys.items():
        field, _, fixed = RENAMED.get(key, key).partition(": ")
        expected[field] = yaml.safe_load(fixed) if fixed else {"all": "all-linear"}.get(str(value), value)
    twice = str(2 * expected.get("lora_r", 0))
    for name, value in TABLES["trainers"][trainer]["defaults"].items():
        expected.setdefault(name, str(value).replace("twice lora_r", twice).removesuffix(" (with LoRA)"))
    elsewhere = {"datasets", "dataset_name", "attn_implementation", "chat_template_path", "bf16", *NOT_NEEDED}
    for name in expected.keys() - elsewhere:
        value_here = value_of(configs, name)
        assert str(value_here) == str(float(expected[name]) if isinstance(value_here, float) else expected[name]), name
    assert value_of(configs, "attn_implementation") is None  # flash-attn may not be installed
    assert "chats.jsonl" in str(configs[0].dataset_name) + str(configs[3].datasets)


def test_other_defaults_are_fields_and_differ_from_ours(tmp_path):
    configs = parse_configs(["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false", "--packing", "true"])
    for trainer, table in TABLES["trainers"].items():
        for name, value in table["defaults"].items():
            assert str(value_of(configs, name)) != str(value), (trainer, name)
        message = other_defaults({*table["known_by"][:2], "learning_rate"})
        assert message.startswith(f"{trainer} has other defaults.")
        assert "learning_rate" not in message
        assert other_defaults({table["known_by"][0], "learning_rate"}) == ""


def test_foreign_keys_are_foreign_and_lead_to_fields():
    kinds = (SFTConfig, ModelConfig, TrainArguments, MixtureConfig)
    known = {field.name for kind in kinds for field in fields(kind)}
    assert {value.split(":")[0] for value in RENAMED.values()} <= known
    assert not known & {*RENAMED, *NOT_NEEDED}
    assert not {*RENAMED} & {*NOT_NEEDED}
    assert {*EXPLAINED} <= {*RENAMED}


MODEL = ["--model_name_or_path", "model"]
DATA = ["--dataset_name", "one.jsonl"]
FLAGS = {  # flags beside a model and data -> the message
    "--dataset_name nothing.jsonl": "There is no such file or folder here",
    "--dataset_name empty": "It is a folder here, and it cannot be read",
    "--learning_rat 1": "(did you mean `learning_rate`?)",
    "--eval_strategy epoch": "`--dataset_test_split test` was given or is the default",
    "--resume_from_checkpoint True": 'is `True` in Python and "newest" on a command line',
    "--exchange_speeds {bad": "`exchange_speeds={bad` was given. It begins like JSON",
    "--config none.yaml": "`--config none.yaml` was given. It cannot be read: No such file",
    "--config=run.yaml --config b.yaml": "`--config` was given 2 times (run.yaml, b.yaml)",
    "--num_train_epochs 0": "`num_train_epochs=0` and `max_steps=-1` were given. Nothing",
    "--max_steps 0": "`max_steps=0` were given. Nothing would be trained",
    "--learning_rate nan": "`learning_rate=nan` was given",
    "--dataloader_num_workers -1": "`dataloader_num_workers=-1` was given",
    "--use_liger_kernel": "`use_liger_kernel` needs liger-kernel",
    "--chat_template_path no.jinja": "`chat_template_path=no.jinja` was given",
    "--model_name_or_path no/model": "`--model_name_or_path no/model` was given",
    "--test_split_size 0.1": "`test_split_size: 0.1` was given without `datasets`",
    "--attn_implementation flash_attention_3": "needs a package that is not here: FlashAttention3",
    "--lora_r 8": "`lora_r` was given without `use_peft`. LoRA is off",
    "--report_to tensorbord": "`report_to: tensorbord` was given, and transformers has no such logger",
}
FILES = {  # the config file -> the message
    "a: [1, 2": 'in "run.yaml", line 1, column 4',
    "- 1": "The file holds a list, and settings need names",
    "packing: true\npacking: false": "the key `packing` stands there twice",
    "no: 1": "YAML reads the name of a setting as False, which is no text",
    "": "The file holds nothing",
    "max_length: [1]": "`max_length: [1]` was given in the config file. It has the type list",
    "bf16: auto": "`bf16: auto` was given in the config file. It has the type str, and the field holds bool",
    "max_length: 5k": "It has the type str, and the field holds int",
    "max_steps: 1.5": "It has the type float, and the field holds int",
    "{learning_rat: 1.0, num_processes: 4}": "`learning_rat` was given, as a flag or in the config file (did you",
    "dataset_name: {one.jsonl: 2}": "It is one name or path, or a list of them",
    "warmup_ratio: 0.1": "`warmup_ratio` is `warmup_steps` here (a value below 1 is the share",
    "{stage: sft, cutoff_len: 64, lora_rank: 8}": "also set\n  packing: false\n  assistant_only_loss",
    "datasets: [{path: one.jsonl, fractoin: 2}]": "keys `fractoin`: {'path': 'one.jsonl', 'fractoin': 2} (did you mean",
    "datasets: [{path: one.jsonl, repeat: 2}]": "`repeat` can be removed: a dataset that is listed twice",
    "datasets: [one.jsonl]": "Write `- path: one.jsonl`",
    "datasets: one.jsonl": "`datasets: one.jsonl` was given. A mixture is a list",
    "datasets: [{split: train}]": "An entry of `datasets` has no `path`",
    "datasets: [{path: one.jsonl, fraction: two}]": "`fraction: two` was given for the dataset",
    "datasets: [{path: one.jsonl, columns: [txt]}]": "(did you mean `text`?)",
    "datasets: [{path: one.jsonl, split: dev}]": "`split: dev` was given with `one.jsonl`",
    "datasets: [{path: one.jsonl}]\ntest_split_size: 5.5": "`test_split_size: 5.5` was given",
    "datasets: [{path: one.jsonl}, {path: ./one.jsonl}]\ntest_split_size: 0.25": "`one.jsonl` is listed 2 times in",
    "datasets: [{path: one.jsonl}]\ntest_split_size: 0.25\nstreaming: true": "`test_split_size: 0.25` was given with",
    "datasets: [{path: one.jsonl, fraction: 1}, {path: two.jsonl}]": "`fraction` was given for 1 of 2 datasets",
    "datasets: [{path: one.jsonl, fraction: 0}]": "`fraction` was given as 0 for the datasets",
    "datasets: [{path: one.jsonl, fraction: 2}, {path: two.jsonl, fraction: -1}]": "`fraction` was given as 2, -1 for",
    "datasets: [{path: one.jsonl, fraction: .nan}]": "`fraction` was given as nan for the datasets",
}
USELESS = [([*MODEL, *DATA, *words.split()], None, message) for words, message in FLAGS.items()]
USELESS += [(["--config=run.yaml"], text, message) for text, message in FILES.items()]
USELESS += [(DATA, None, "`model_name_or_path` was not given")]
USELESS += [(MODEL, None, "Neither `dataset_name` nor `datasets` was given")]


@pytest.mark.parametrize("flags, settings, message", USELESS, ids=[message[:40] for *_, message in USELESS])
def test_what_cannot_be_used_is_one_message_and_exit_code_2(flags, settings, message, workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    (workplace / "empty").mkdir(exist_ok=True)
    if settings is not None:
        (workplace / "run.yaml").write_text(settings)
        flags = [*MODEL, *flags]
    assert main(["train", *QUICK, "--output_dir", "refused", *flags]) == 2
    _, error = capsys.readouterr().err.split("trl-packfix train: ")
    is_list = "settings were given, as flags or in the config file" in error
    assert message in error
    assert is_list or error.endswith(".\n")
    assert is_list or "\n" not in error.rstrip()
    assert not (workplace / "refused").exists()


def test_a_checkpoint_that_the_main_process_refuses_is_refused_on_all(monkeypatch, tmp_path):
    """The others would wait for the main process, which has ended."""
    sent = []
    monkeypatch.setattr(training, "broadcast_object_list", lambda objects: sent.append(objects) or sent[0])
    for is_main in (True, False):
        monkeypatch.setattr(training, "PartialState", lambda is_main=is_main: SimpleNamespace(is_main_process=is_main))
        with pytest.raises(ValueError, match="there is no such folder here"):
            training._check_checkpoint(str(tmp_path / "none"), str(tmp_path))
    assert sent[1] == [None]


def test_errors_of_the_run_keep_their_traceback(workplace, monkeypatch, output_of):
    """Errors that are known before the proof have no traceback, such as an optimizer without its package."""
    monkeypatch.chdir(workplace)
    words = ["train", *QUICK, *MODEL, *DATA, "--output_dir", "output"]
    refusal = output_of(*words, "--optim", "apollo_adamw", "--optim_target_modules", "all-linear", code=2)
    assert "`--optim apollo_adamw` was given. It cannot be loaded: " in refusal
    with pytest.raises(ValueError, match="min_lr"):  # of transformers, when training begins
        main([*words, "--lr_scheduler_type", "cosine_with_min_lr"])


NOTE = "Packing is on, which is the default of this command"


@pytest.mark.parametrize(
    "flags, settings, packing, is_said",
    [
        ([], {}, True, True),
        (["--packing"], {}, True, False),
        (["--packing", "false"], {}, False, False),
        ([], {"packing": True}, True, False),
        ([], {"packing": False}, False, False),
        ([], {"padding_free": True}, False, False),  # the steps of the unpacked run
        (["--padding_free"], {}, False, False),
        ([], {"padding_free": False}, True, True),
    ],
)
def test_packing_is_the_default(flags, settings, packing, is_said, tmp_path, capsys):
    settings |= {"learning_rate": 0.5, "use_cpu": True, "bf16": False}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    args = parse_configs(["--config", str(tmp_path / "run.yaml"), "--output_dir", str(tmp_path), *flags])[1]
    assert args.packing is packing
    assert args.learning_rate == 0.5
    assert (NOTE in capsys.readouterr().out) is is_said


@pytest.mark.parametrize("word", ["packing", "lora_r", "tokens_per_rank"])
def test_the_value_of_a_flag_sets_no_field(word, capsys):
    configs = parse_configs(["--output_dir", word, "--use_cpu", "--bf16", "false"])
    assert configs.training.output_dir == word
    assert configs.training.packing
    assert NOTE in capsys.readouterr().out
    assert word not in configs.names_set
    assert configs.names_set >= {"output_dir", "use_cpu", "bf16"}


def test_a_default_that_is_refused_is_said(tmp_path, output_of):
    """Give the reason in a message about `packing`, which the user did not set."""
    words = ["--output_dir", tmp_path, "--train_sampling_strategy", "group_by_length"]
    refusal = output_of("train", *words, code=2)
    assert "was given with packing." in refusal
    assert NOTE in refusal


def test_without_a_word_about_packing_packs_are_trained_and_reported(workplace, monkeypatch, capsys):
    """On one rank with `tokens_per_rank`, so that no pack is shared."""
    flags = [*DATA, "--tokens-per-rank", "64", "--max_steps", "1", "--output_dir", "by_default"]
    train(workplace, monkeypatch, *flags)
    printed = capsys.readouterr().out
    told = (NOTE, "Packing report", "8 of 8 rows, ", "-> 2 packs (stream)")
    assert all(text in printed for text in told)
    assert json.loads((workplace / "by_default" / "packing_report.json").read_text())["shared"]["micro_steps"]


# Data


def test_one_dataset_is_the_table_that_plan_reads(workplace, monkeypatch):
    """The fingerprint is the same, so `plan` and `train` find the tokens that the other one has cached."""
    monkeypatch.chdir(workplace)
    for name in ("one.jsonl", "three"):
        (table,) = load_documents(TrainArguments(dataset_name=name)).values()
        assert table._fingerprint == load_rows(name)._fingerprint
    assert table._fingerprint == load_from_disk("three")._fingerprint, "as in a script"


@pytest.mark.parametrize("splits", [False, True])
def test_a_saved_folder_is_streamed(splits, workplace, tmp_path, monkeypatch):
    monkeypatch.chdir(workplace)
    table = load_from_disk("three")
    (DatasetDict(train=table) if splits else table).save_to_disk(tmp_path / "saved")
    names = [str(tmp_path / "saved"), "one.jsonl"]
    stream = load_documents(TrainArguments(dataset_name=names, dataset_streaming=True))["train"]
    assert isinstance(stream, IterableDataset)
    assert [row["text"] for row in stream] == [*table["text"], *load_rows("one.jsonl")["text"]]
    alone = load_documents(TrainArguments(dataset_name=names[:1], dataset_streaming=True))["train"]
    assert isinstance(alone, IterableDataset)


def test_several_files_are_joined_and_a_run_continues_from_the_newest_checkpoint(workplace, monkeypatch, capsys):
    data = ["--dataset_name", "one.jsonl", "two.jsonl", "three"]
    flags = [*data, "--packing", "--resume_from_checkpoint", "newest", "--output_dir", "joined"]
    flags += "--save_strategy steps --save_steps 1 --logging_steps 1 --per_device_train_batch_size 2".split()
    train(workplace, monkeypatch, *flags, "--max_steps", "2")
    report = json.loads((workplace / "joined" / "packing_report.json").read_text())
    assert report["num_rows"] == 8 + 20 + 6
    train(workplace, monkeypatch, *flags, "--max_steps", "3")
    assert {path.name for path in (workplace / "joined").glob("checkpoint-*")} == {f"checkpoint-{i}" for i in (1, 2, 3)}
    history = json.loads((workplace / "joined" / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    tokens = [entry["num_tokens"] for entry in history if "loss" in entry]
    assert len(tokens) == 3
    assert tokens == sorted(tokens)
    assert "Dataset: one.jsonl, two.jsonl, three" in capsys.readouterr().out


def test_a_source_is_seen_as_often_as_it_says(workplace, monkeypatch):
    """Counted in trained tokens of two epochs, over packs: the ratio is exact in each epoch."""
    mixture = [{"path": "one.jsonl"}, {"path": "two.jsonl"}, {"path": "three"}, {"path": "one.jsonl"}]
    monkeypatch.chdir(workplace)
    length = {name: 0 for name in ("one", "two", "three")}
    for row in load_mixture(MixtureConfig(mixture), seed=42, source_column="from")["train"]:
        length[row["from"]] += len(build_tokenizer()(row["text"])["input_ids"])  # and EOS, less the first token
    flags = "--packing --num_train_epochs 2 --logging_strategy epoch --save_strategy epoch --source_column from"
    train(workplace, monkeypatch, *flags.split(), "--output_dir", "mixed", datasets=mixture)
    newest = max((workplace / "mixed").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    epochs = [{name: entry[f"trained_tokens/{name}"] for name in length} for entry in history if "loss" in entry]
    assert epochs == [length, length]


def test_no_test_row_is_trained_and_fractions_are_those_of_trl(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    entries = [{"path": "one.jsonl"}, {"path": "two.jsonl"}]
    splits, again = (load_mixture(MixtureConfig([*entries], test_split_size=0.25), seed=0) for _ in range(2))
    train = set(splits["train"]["text"])
    test = set(splits["test"]["text"])
    assert len(test) == len(splits["test"]) == 7
    assert not train & test
    assert len(train | test) == 28
    assert again["test"]["text"] == splits["test"]["text"]
    for one, two in ((3, 1), (None, None)):
        mixture = [{"path": "json", "data_files": "one.jsonl", "fraction": one}]
        mixture += [{"path": "json", "data_files": "two.jsonl", "fraction": two}]
        ours = load_mixture(MixtureConfig([dict(entry) for entry in mixture]), seed=0)["train"]["text"]
        assert ours == get_dataset(DatasetMixtureConfig(mixture))["train"]["text"]


def test_a_mixture_of_files_is_streamed(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    entries = [{"path": "one.jsonl"}, {"path": "json", "data_files": "two.jsonl"}]
    table, stream = (
        load_mixture(MixtureConfig([dict(entry) for entry in entries], streaming=streaming), seed=0)["train"]
        for streaming in (False, True)
    )
    assert isinstance(stream, IterableDataset)
    assert [row["text"] for row in stream] == table["text"]
    assert len(table) == 28


def test_a_mixture_that_is_streamed_in_training_is_planned_as_a_table(workplace, monkeypatch, printed):
    monkeypatch.chdir(workplace)
    settings = {"datasets": [{"path": "one.jsonl"}], "streaming": True, "model_name_or_path": "model"}
    (workplace / "run.yaml").write_text(yaml.safe_dump(settings))
    assert printed("plan", "--config", "run.yaml", "--max-length", 64)["plans"][0]["num_documents"] == 8


def test_different_datasets_are_different_sources(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = "math/train.jsonl code/train.jsonl code/train.csv other.jsonl ./other.jsonl a/b/train.jsonl".split()
    for number, path in enumerate(paths):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"text": str(number)}))
    assert MixtureConfig([{"path": path} for path in paths]).labels() == [
        "math/train",
        "code/train.jsonl:split=train",
        "code/train.csv:split=train",
        "other",
        "other",  # the same file, so the same source
        "b/train",
    ]
    table = load_mixture(MixtureConfig([{"path": path} for path in paths[:2]]), seed=0, source_column="source")["train"]
    assert table.to_dict() == {"text": ["0", "1"], "source": ["math/train", "code/train"]}
    data_files = [{"path": "json", "data_files": path} for path in paths[:2]]
    assert MixtureConfig(data_files).labels() == [f"json:data_files={path}:split=train" for path in paths[:2]]


def test_the_default_of_deepspeed_is_the_config_of_the_repository():
    configs = {file.stem: json.loads(file.read_text()) for file in (ROOT / "deepspeed_configs").glob("*.json")}
    assert json.loads(ZERO3.read_text()) == configs["zero3"]
    assert [config["data_types"] for config in configs.values()] == [{"grad_accum_dtype": "fp32"}] * 3


# Without DeepSpeed its config fails half made, and is not forgotten while the error is kept
NEEDS_DEEPSPEED = pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="deepspeed is not installed")


@pytest.mark.parametrize("launcher", [{}, pytest.param({"CROSS_SIZE": "1"}, marks=NEEDS_DEEPSPEED)])
def test_on_a_gpu_no_filter_waits_after_every_micro_batch(launcher, monkeypatch):
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_DEEPSPEED_CONFIG_FILE", "CROSS_SIZE"):
        monkeypatch.setenv(name, "unset")  # so that monkeypatch puts the environment back
        monkeypatch.delenv(name)
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(reading.torch.cuda, "is_available", lambda: True)
    assert reading.machine_settings() == {}  # the config has it
    assert SFTConfig(use_cpu=True, report_to=[]).logging_nan_inf_filter is False
