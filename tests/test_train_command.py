"""`trl-packfix train`: TRL's flags and files, mixtures by exact counts, several files, restarts."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import yaml
from datasets import Dataset, load_from_disk
from support.models import build_tiny_model, build_tokenizer
from trl.scripts import sft

from trl_packfix.cli import main, training
from trl_packfix.cli.mixture import MixtureConfig, load_mixture, repeated

ROOT = Path(__file__).parent.parent
QUICK = "--max_length 64 --report_to none --use_cpu --bf16 false --disable_tqdm true --save_strategy no".split()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A tiny model, and files `one` (8 rows), `two` (20) and `three` (a folder of 6 rows of tokens)."""
    folder = tmp_path_factory.mktemp("train_command")
    build_tiny_model().save_pretrained(folder / "model")
    build_tokenizer().save_pretrained(folder / "model")
    for name, num in (("one", 8), ("two", 20)):
        rows = [{"text": f"{name} {i} " + "x" * (i % 7 * 3)} for i in range(num)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rows = [{"text": f"three {i}"} for i in range(6)]
    Dataset.from_list(rows).save_to_disk(folder / "three")
    return folder


def train(workplace: Path, monkeypatch, *flags: str, **settings) -> None:
    """A run in `workplace`; `settings` are its YAML file."""
    monkeypatch.chdir(workplace)
    (workplace / "run.yaml").write_text(yaml.safe_dump({"model_name_or_path": "model"} | settings))
    words = [] if "--output_dir" in flags else ["--output_dir", "output"]
    assert main(["train", "--config", "run.yaml", *QUICK, *words, *flags]) == 0
    output = Path(flags[flags.index("--output_dir") + 1] if "--output_dir" in flags else "output")
    assert (output / "model.safetensors").is_file()


# Flags and files


SFT_FILE = {
    "model_name_or_path": "model",
    "dataset_name": "one.jsonl",
    "learning_rate": 1e-3,
    "packing": True,
    "max_length": 64,
    "use_peft": True,
    "lora_r": 4,
    "lora_target_modules": ["q_proj", "v_proj"],
    "eval_strategy": "no",
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "dtype": "float32",
    "env": {"PACKFIX_TEST_VARIABLE": "1"},
    "use_cpu": True,
    "bf16": False,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_file_of_trl_sft_means_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("PACKFIX_TEST_VARIABLE", "0")
    file = tmp_path / "sft.yaml"
    file.write_text(yaml.safe_dump(SFT_FILE | {"output_dir": str(tmp_path / "output")}))
    ours = training.parse(["--config", str(file)])
    theirs = sft.make_parser().parse_args_and_config(["--config", str(file)])
    compared = 0
    for mine, stock in zip(ours, theirs, strict=True):
        for name in (each.name for each in fields(type(stock))):
            expected, found = getattr(stock, name), getattr(mine, name)
            expected = [expected] if name == "dataset_name" else expected
            if name not in ("packing_strategy", "logging_dir"):  # ours is "stream"; the other holds the time
                assert str(found) == str(expected), name
                compared += 1
    assert compared > 140 and ours[1].packing_strategy == "stream" and ours[2].lora_r == 4


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_keys_of_the_launcher_are_named_and_unknown_ones_refused(tmp_path, capsys):
    file = tmp_path / "sft.yaml"
    common = SFT_FILE | {"output_dir": str(tmp_path)}
    file.write_text(yaml.safe_dump(common | {"num_processes": 4, "accelerate_config": "zero3"}))
    training.parse(["--config", str(file)])
    assert "Not used: accelerate_config, num_processes" in capsys.readouterr().out
    file.write_text(yaml.safe_dump(common | {"learning_rat": 1.0, "num_processes": 4}))
    with pytest.raises(ValueError, match=r"^`learning_rat` was given, as a flag or in the config file.*ignored"):
        training.parse(["--config", str(file)])
    with pytest.raises(ValueError, match="`packing_strategi` was given"):
        training.parse(["--packing_strategi", "bfd", "--output_dir", str(tmp_path)])


def test_without_a_model_or_data_it_says_so(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    with pytest.raises(ValueError, match="`model_name_or_path` was not given"):
        main(["train", *QUICK, "--output_dir", "output", "--dataset_name", "one.jsonl"])
    with pytest.raises(ValueError, match="Neither `dataset_name` nor `datasets` was given"):
        main(["train", *QUICK, "--output_dir", "output", "--model_name_or_path", "model"])


def test_a_file_that_does_not_exist_is_not_looked_for_on_the_hub():
    with pytest.raises(ValueError, match="`nothing.jsonl` was given as a dataset. There is no such file here"):
        training.load_documents(training.TrainArguments(dataset_name=["nothing.jsonl"]))


def test_other_commands_refuse_flags_that_they_do_not_know(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "lengths.txt", "--learning_rate", "1"])
    assert "unrecognized arguments: --learning_rate 1" in capsys.readouterr().err


@pytest.mark.processes
def test_other_commands_do_not_import_the_trainer():
    code = "import sys; from trl_packfix.cli import main\ntry: main(['plan', '--help'])\nexcept SystemExit: pass\n"
    code += "print([name for name in ('torch', 'trl', 'datasets', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# Data


def test_several_files_are_joined_and_a_run_continues_from_the_newest_checkpoint(workplace, monkeypatch, capsys):
    data = ["--dataset_name", "one.jsonl", "two.jsonl", "three"]
    flags = [*data, "--packing", "--resume_from_checkpoint", "newest", "--output_dir", "joined"]
    flags += [
        "--save_strategy",
        "steps",
        "--save_steps",
        "1",
        "--logging_steps",
        "1",
        "--per_device_train_batch_size",
        "2",
    ]
    train(workplace, monkeypatch, *flags, "--max_steps", "2")
    report = json.loads((workplace / "joined" / "packing_report.json").read_text())
    assert report["num_rows"] == 8 + 20 + 6
    train(workplace, monkeypatch, *flags, "--max_steps", "3")
    assert {path.name for path in (workplace / "joined").glob("checkpoint-*")} == {f"checkpoint-{i}" for i in (1, 2, 3)}
    history = json.loads((workplace / "joined" / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    tokens = [entry["num_tokens"] for entry in history if "loss" in entry]
    assert (
        len(tokens) == 3
        and tokens == sorted(tokens)
        and "Dataset: one.jsonl, two.jsonl, three" in capsys.readouterr().out
    )


@pytest.mark.parametrize("strategy", ["stream", "bfd", "minibatch"])
def test_a_source_is_seen_as_often_as_it_says(strategy, workplace, monkeypatch):
    """Counted in trained tokens of two epochs, over packs: the ratio is exact in each epoch."""
    mixture = [{"path": "one.jsonl", "repeat": 2.5}, {"path": "two.jsonl"}, {"path": "three", "repeat": 0.5}]
    monkeypatch.chdir(workplace)
    table = load_mixture(MixtureConfig(mixture), seed=42, source_column="from")["train"]
    length = {name: 0 for name in ("one", "two", "three")}
    for row in table:
        length[row["from"]] += len(build_tokenizer()(row["text"])["input_ids"])  # and EOS, less the first token
    flags = ["--packing", "--packing_strategy", strategy, "--num_train_epochs", "2", "--logging_strategy", "epoch"]
    flags += ["--source_column", "from", "--output_dir", strategy, "--per_device_train_batch_size", "2"]
    flags += ["--save_strategy", "epoch"]
    train(workplace, monkeypatch, *flags, datasets=mixture)
    newest = max((workplace / strategy).glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    epochs = [{name: entry[f"trained_tokens/{name}"] for name in length} for entry in history if "loss" in entry]
    assert epochs == [length, length]


def test_rows_are_repeated_by_count(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    for num, repeat in ((8, 2.5), (7, 2.5), (20, 0.3), (3, 1.0), (5, 3.0)):
        counts = np.bincount(repeated(num, repeat, np.random.default_rng(0)), minlength=num)
        whole = int(repeat)
        assert set(counts) <= {whole, whole + 1} and counts.sum() == whole * num + round((repeat - whole) * num)
    mixture = MixtureConfig([{"path": "one.jsonl", "repeat": 2.5}, {"path": "two.jsonl", "repeat": 1}])
    tables = [load_mixture(mixture, seed)["train"]["text"] for seed in (0, 0, 1)]
    assert tables[0] == tables[1] != tables[2] and [len(table) for table in tables] == [40] * 3


def test_no_test_row_is_trained_and_fractions_are_those_of_trl(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    entries = [{"path": "one.jsonl", "repeat": 3}, {"path": "two.jsonl"}]
    splits = load_mixture(MixtureConfig(entries, test_split_size=0.25), seed=0)
    train, test = set(splits["train"]["text"]), set(splits["test"]["text"])
    assert len(test) == len(splits["test"]) == 7 and not train & test and len(train | test) == 28
    again = load_mixture(MixtureConfig(entries, test_split_size=0.25), seed=0)
    assert again["test"]["text"] == splits["test"]["text"]
    from trl import DatasetMixtureConfig, get_dataset

    given = [
        {"path": "json", "data_files": f"{name}.jsonl", "fraction": share} for name, share in (("one", 3), ("two", 1))
    ]
    ours = load_mixture(MixtureConfig([dict(each) for each in given]), seed=0)
    assert ours["train"]["text"] == get_dataset(DatasetMixtureConfig([*given]))["train"]["text"]
    plain = [{name: each[name] for name in ("path", "data_files")} for each in given]
    ours = load_mixture(MixtureConfig([dict(each) for each in plain]), seed=0)
    assert ours["train"]["text"] == get_dataset(DatasetMixtureConfig([*plain]))["train"]["text"]
    assert load_from_disk("three").column_names == ["text"]


def test_different_datasets_are_different_sources(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [
        "math/train.jsonl",
        "code/train.jsonl",
        "code/train.csv",
        "other.jsonl",
        "./other.jsonl",
        "a/b/train.jsonl",
    ]
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


def test_a_source_of_less_than_half_a_row_is_refused(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    for repeat, num_rows in ((0.07, 1), (0.13, 3)):
        assert len(load_mixture(MixtureConfig([{"path": "two.jsonl", "repeat": repeat}]), 0)["train"]) == num_rows
    entries = [{"path": "one.jsonl"}, {"path": "two.jsonl", "repeat": 0.02}]
    with pytest.raises(ValueError, match=r"`repeat: 0.02` was given for .*`two.jsonl` of 20 rows.*Set it to 0.05 or"):
        load_mixture(MixtureConfig(entries), 0)


@pytest.mark.parametrize(
    "entries, settings, message",
    [
        (
            [{"path": "one.jsonl"}, {"path": "./one.jsonl"}],
            {"test_split_size": 0.25},
            r"`one.jsonl` is listed 2 times.*would be trained.*with `repeat: 2`",
        ),
        ([{"path": "one.jsonl", "repeat": 0}], {}, r"`repeat: 0` was given for the dataset `one.jsonl`.*above 0"),
        ([{"path": "one.jsonl", "repeat": float("nan")}], {}, "`repeat: nan` was given"),
        ([{"path": "one.jsonl", "repeat": 2}], {"streaming": True}, r"`repeat: 2` .* with `streaming: true`"),
        ([{"path": "one.jsonl", "repeat": 2, "fraction": 1}], {}, r"with `fraction: 1`.*Remove one"),
        ([{"path": "one.jsonl", "fraction": 1}, {"path": "two.jsonl"}], {}, "`fraction` was given for 1 of 2 datasets"),
    ],
)
def test_a_mixture_that_cannot_be_made_is_refused(entries, settings, message, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        load_mixture(MixtureConfig(entries, **settings), seed=0)


def test_the_default_of_deepspeed_is_the_config_of_the_repository():
    assert json.loads(training.ZERO3.read_text()) == json.loads((ROOT / "deepspeed_configs" / "zero3.json").read_text())


@pytest.mark.parametrize("launcher", [{}, {"CROSS_SIZE": "1"}])
def test_on_a_gpu_no_filter_waits_after_every_micro_batch(launcher, monkeypatch):
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_DEEPSPEED_CONFIG_FILE", "CROSS_SIZE"):
        monkeypatch.setenv(name, "unset")  # so that monkeypatch puts the environment back
        monkeypatch.delenv(name)
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(training.torch.cuda, "is_available", lambda: True)
    assert training.machine_settings() == {"logging_nan_inf_filter": False}
