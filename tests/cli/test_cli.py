"""The command line as a whole, and `trl-packfix prepare`."""

import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, load_from_disk
from support.features import PRESENT
from support.launch import PROCESS_SECONDS, run_to_end
from support.models import build_tokenizer
from support.paths import ROOT
from support.runs import all_documents, build_trainer, stock
from transformers import AutoProcessor, AutoTokenizer

from trl_packfix import cli
from trl_packfix.cli import COMMANDS, main, tokens
from trl_packfix.cli.sources import load_rows
from trl_packfix.compat import loads_tokenizer_of_revision
from trl_packfix.data.collator import MASK_COLUMNS

PROGRAM = [sys.executable, "-m", "trl_packfix"]


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_teaches_in_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stopped:
        main(["--help"] if command is None else [command, "--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    assert max(map(len, text.splitlines())) <= 80
    if command is None:
        assert all(f"  {name} " in text for name in COMMANDS)
    else:
        assert "--json" in text or command == "train"
        assert "xit code" in text
        assert text.count(f"trl-packfix {command}") > (1 if command != "check" else 0)  # usage, and examples


@pytest.mark.processes
def test_json_is_all_that_stdout_holds(workplace):
    """Libraries that log to stdout do so when they are first imported."""
    words = "plan rows.jsonl --tokenizer model --max-length 512 --json".split()
    done = run_to_end(*PROGRAM, *words, cwd=workplace)
    assert json.loads(done.stdout)["max_length"] == 512
    assert "Tokenizing train dataset" in done.stderr  # long work shows its progress
    assert "get_accelerator" not in done.stderr, "the warning of DeepSpeed"


@pytest.fixture
def prepare_words(workplace):
    """Return the command that prepares conversations, and prompts and completions that are text."""
    pairs = workplace / "pairs.jsonl"
    Dataset.from_list([{"prompt": "p", "completion": "c" * i} for i in range(5)]).to_json(pairs)
    return ["prepare", workplace / "rows.jsonl", pairs, "--tokenizer", workplace / "model", "--output"]


@pytest.mark.processes
def test_a_terminal_without_the_characters_gets_escapes_and_a_closed_pipe_is_no_error(tmp_path):
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    Dataset.from_dict({"text": ["\u00e9\u4e2d" * 20] * 3000}).to_json(tmp_path / "rows.jsonl")
    words = "show rows.jsonl --tokenizer tokenizer --max-length 64 --packs 3000".split()
    shown = run_to_end(*PROGRAM, *words, cwd=tmp_path, LC_ALL="C", PYTHONIOENCODING="ascii").stdout
    assert "\\u4e2d" in shown or "\\x" in shown or "\\ufffd" in shown
    settings = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "text": True}
    with subprocess.Popen([*PROGRAM, *words], stdout=-1, stderr=-1, **settings) as process:
        late = threading.Timer(PROCESS_SECONDS, process.kill)
        late.start()
        process.stdout.readline()
        process.stdout.close()
        error = process.stderr.read()
        late.cancel()
    assert process.returncode == 141
    assert "Broken" not in error
    assert "Traceback" not in error


@pytest.mark.processes
def test_a_pipe_that_closes_is_no_bad_result_of_a_plan(tmp_path):
    """The table of a plan is written by rich, which ends a program with code 1 then."""
    (tmp_path / "lengths.txt").write_text("5\n" * 9)
    words = [*PROGRAM, "plan", "lengths.txt", "--max-length", "8"]
    assert run_to_end(*words, cwd=tmp_path).stdout.startswith("Recommended: max_length 8 loses no trained token")
    settings = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    with subprocess.Popen(words, stdout=-1, stderr=-1, **settings) as process:
        process.stdout.close()
        process.wait(PROCESS_SECONDS)
    assert process.returncode == 141


def test_prepare_makes_what_training_would_make(prepare_words, workplace, tmp_path, printed):
    manifest = printed(*prepare_words, tmp_path / "table")
    assert manifest == json.loads((tmp_path / "table" / "prepared.json").read_text())
    table = load_from_disk(tmp_path / "table")
    assert table.column_names == ["input_ids", "labels"]
    assert len(table) == manifest["rows"] == 55
    assert manifest["tokens"] == sum(map(len, table["input_ids"]))
    trained = sum(label != -100 for labels in table["labels"] for label in labels[1:])
    assert manifest["trained_tokens"] == trained

    trainer = build_trainer(tmp_path / "a", table, max_steps=1)
    assert trainer.train_dataset._fingerprint == table._fingerprint  # nothing is mapped, so no rank waits
    raw = build_trainer(tmp_path / "b", Dataset.from_json(str(workplace / "rows.jsonl")))
    assert raw.train_dataset["input_ids"] == table["input_ids"][:50]
    assert raw.train_dataset["labels"] == table["labels"][:50]
    trainer.train()
    assert trainer.packing_report.ledger.given.tokens == manifest["tokens"]


def test_a_full_disk_leaves_nothing_behind(tmp_path, output_of):
    """Limit the size of files, which is to a writer what a full disk is: an OSError in the middle of a file."""
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    Dataset.from_dict({"text": ["x" * 500] * 2000}).to_json(tmp_path / "rows.jsonl")
    words = ["prepare", tmp_path / "rows.jsonl", "--tokenizer", tmp_path / "tokenizer", "--output"]
    output_of(*words, tmp_path / "first")  # all caches are written
    assert max(file.stat().st_size for file in (tmp_path / "first").iterdir()) > 2**20
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for output in (tmp_path / "new", tmp_path / "empty"):
        if is_there := output.name == "empty":
            output.mkdir()
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
        try:
            text = output_of(*words, output, code=2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert f"`--output {output}` was given, and writing failed" in text
        assert output.exists() == is_there
        assert not [*output.glob("*")]
        output_of(*words, output)


REFUSED = {  # words -> the message
    "plan no/such/data": "`no/such/data` was given as a dataset. There is no such file or folder here",
    "plan rows.jsonl --tokenizer no/such/model": "`no/such/model` was given. It cannot be loaded",
    "plan rows.jsonl": "Set `--tokenizer` or `--model`",
    "plan rows.jsonl a.txt --tokenizer model": "1 file with lengths and 1 dataset were given",
    "plan a.txt --world-size 0": "`--world-size 0`",
    "plan a.txt --world-size 1000000000": "at most 1,048,576",
    "plan a.txt --tflops nan": "`--tflops nan` was given",
    "plan a.txt --model no/such/model": "`--model no/such/model` was given",
    "plan rows.jsonl --tokenizer model --num-proc 0": "`dataset_num_proc=0` was given",
    "plan a.txt --seed -1": "`seed=-1` was given",
    "plan a.txt --batch-size 0": "`per_device_train_batch_size=0`",
    "plan a.txt --max-length 8 --strategy wrapped --overlong drop": "splits long documents",
    "plan a.txt --max-length 8 --overlong raise": "refuses such documents",
    "plan a.txt --model model --max-length 9999": "has 4096 positions",
    "plan bad.txt": "as a file of lengths",
    "plan twice.csv --model model": "2 of its 3 columns have the name 'text'",
    "plan lengths.csv": "2 of its 2 columns have the name 'length'",
    "plan below": "token ids from -1 to 9. Ids are rows of the embedding",
    "plan rows.xml": "Files named .xml are not supported",
    "plan rows.jsonl --model model --split test": "`--split test` was given",
    "plan a.txt --split test": "`--split test` was given",
    "plan saved --split test": "`--split test` was given",
    "plan none --model model": "`none` was given as a dataset. It has no rows",
    "plan splits --model model --split test": "with `--split test`. It has only the splits ['train']",
    "plan saved labelled": "one with the columns ['input_ids'] and another with ['input_ids', 'labels']",
    "plan": "without DATA and without `--memory`",
    "plan --memory 80": "`--memory 80` was given without `--model`",
    "plan --memory 1 --model model": "1 GiB is set aside",
    "plan --memory nan --model model": "`--memory nan` was given",
    "plan --offload": "`--offload` was given without `--memory`",
    "plan a.txt --batchsize 4": "(did you mean `batch-size`?)",
    "check no/such/model": "`check no/such/model` was given",
    "check model --max-lenght 8": "was given, as a flag or in the config file (did you mean `max_length`?)",
    "recipes qwen3-8b-lorra": "\nqwen3-8b-lora ",
    "recipes qwen lora": "\nqwen2.5-vl-3b-lora ",
    "recipes gemma-4-26B": "\ngemma-4-e4b-lora ",
    "recipes bert": "one that `trl-packfix recipes` lists",
    "show": "`show` was given without DATA",
    "show x.jsonl --packs 0": "Set it to 1 or more",
    "prepare --output new": "`prepare` was given without DATA",
    "prepare rows.jsonl --output new": "No tokenizer was given",
    "prepare rows.jsonl --output .": "is not empty",
    "prepare saved labelled --tokenizer model --output new": "one with the columns ['input_ids'] and another with",
}
if "prefixes" in PRESENT:
    REFUSED["plan a.txt --share-prefixes pack"] = "`--share-prefixes pack` was given with the lengths of 3 documents"


@pytest.fixture(scope="module")
def refused(workplace):
    """Return the folder with data that are refused."""
    texts = {"twice.csv": "text,id,text\na,1,b\n", "lengths.csv": "length,length\n3,4\n"}
    for name, text in (texts | {"a.txt": "10 20 30", "bad.txt": "10 -20", "rows.xml": "<a/>"}).items():
        (workplace / name).write_text(text)
    tables = {"saved": {"input_ids": [[1, 2, 3]]}, "below": {"input_ids": [[5, -1, 9]]}}
    tables["labelled"] = tables["saved"] | {"labels": [[-100, 2, 3]]}
    for name, columns in tables.items():
        Dataset.from_dict(columns).save_to_disk(workplace / name)
    Dataset.from_dict({"text": ["a"]}).select([]).save_to_disk(workplace / "none")
    DatasetDict(train=Dataset.from_dict({"text": ["a"]})).save_to_disk(workplace / "splits")
    return workplace


@pytest.mark.parametrize("format_type", ["numpy", "arrow"])
@pytest.mark.parametrize("splits", [False, True])
def test_a_folder_of_any_format_is_prepared(splits, format_type, workplace, tmp_path, printed):
    rows = load_rows(str(workplace / "rows.jsonl")).select(range(4)).with_format(format_type)
    (DatasetDict(train=rows) if splits else rows).save_to_disk(tmp_path / "formatted")
    words = ["prepare", tmp_path / "formatted", "--model", workplace / "model", "--output", tmp_path / "new"]
    assert printed(*words)["rows"] == 4


@pytest.mark.parametrize("of_run, revision", [([], "v2"), (["--model-init-kwargs", '{"revision": "v3"}'], "v3")])
@pytest.mark.parametrize("command", ["plan", "show", "prepare", "check"])
def test_the_tokenizer_is_of_the_revision_that_is_trained(command, of_run, revision, workplace, tmp_path, monkeypatch):
    """Record what transformers is asked for, because no revision is in a folder."""
    revisions = {}
    for loader in (AutoTokenizer, AutoProcessor):
        load = loader.from_pretrained

        def record(name, load=load, **options):
            revisions.setdefault(str(name), set()).add(options.get("revision"))
            return load(name, **options)

        monkeypatch.setattr(loader, "from_pretrained", record)
    model, data = str(workplace / "model"), str(workplace / "rows.jsonl")
    settings = ["--model-revision", "v2", *of_run]
    words = {
        "check": ["check", model, "--dataset", data],
        "prepare": ["prepare", data, "--model", model, "--output", str(tmp_path / "new")],
    }.get(command, [command, data, "--model", model, "--max-length", "512"])
    assert main([*words, *settings]) == 0
    assert revisions == {model: {revision if loads_tokenizer_of_revision() else None}}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_done_is_exit_code_2(words, refused, monkeypatch, capsys):
    """For `check` and `plan` the exit code 1 is an answer."""
    monkeypatch.chdir(refused)
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert REFUSED[words] in error
    assert "which None" not in error
    assert not Path("new").exists()


def test_ids_of_rows_that_a_fraction_leaves_out_are_not_refused(tmp_path, monkeypatch, output_of):
    monkeypatch.chdir(tmp_path)
    Dataset.from_dict({"input_ids": [[5, 6], [7, 8], [-1, 9]]}).save_to_disk("below")
    Dataset.from_dict({"input_ids": [[5, 6], [7, 8]]}).save_to_disk("good")
    config = "datasets: [{{path: below, fraction: {}}}, {{path: good, fraction: 1}}]\nmax_length: 8\n"
    Path("half.yaml").write_text(config.format(1))
    Path("all.yaml").write_text(config.format(1.5))
    assert "4 documents" in output_of("plan", "--config", "half.yaml")
    assert "Row 2 of the dataset of 5 rows has token ids from -1 to 9" in output_of(
        "plan", "--config", "all.yaml", code=2
    )


@pytest.mark.parametrize(
    "words, message",
    [
        ("pln x", "(did you mean `plan`?)"),
        ("plan x --strategy strem", "(did you mean `stream`?)"),
        ("pl", "(did you mean `plan`?)"),
        # A command that takes no flags of a run
        ("recipes model --no-such-flag", "unrecognized arguments: --no-such-flag"),
    ],
)
def test_an_unknown_command_choice_or_flag_is_named(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_an_interrupt_is_one_line_and_the_signal(monkeypatch, capsys):
    killed = []
    monkeypatch.setattr(cli, "main", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    monkeypatch.setattr(cli.os, "kill", lambda pid, number: killed.append(number))
    monkeypatch.setattr(cli.signal, "signal", lambda *args: None)
    cli.run_program()
    assert killed == [signal.SIGINT]
    assert capsys.readouterr().err == "trl-packfix: interrupted\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt, None])
@pytest.mark.parametrize("is_link", [False, True])
def test_what_others_wrote_meanwhile_stays(is_link, error, prepare_words, tmp_path, monkeypatch, output_of):
    """Keep the files that another run finished in the folder meanwhile, or that the user put there."""
    right = tokens.save_tokens
    output = tmp_path / "table"
    if is_link:
        (tmp_path / "elsewhere").mkdir()
        output.symlink_to("elsewhere")

    def interrupted(*args, **kwargs):
        output.mkdir(exist_ok=True)
        (output / "precious").write_text("of another run")
        if error is not None:
            raise error
        return right(*args, **kwargs)

    monkeypatch.setattr(tokens, "save_tokens", interrupted)
    with pytest.raises(error) if error is not None else nullcontext():
        output_of(*prepare_words, output, code=2)
    assert [file.name for file in output.iterdir()] == ["precious"]
    assert output.is_symlink() == is_link
    assert not [*tmp_path.glob(".*")], "something was left behind"


@pytest.fixture
def own_model(tmp_path):
    """Return a folder whose config and tokenizer are classes of its own."""
    folder = tmp_path / "own_model"
    build_tokenizer().save_pretrained(folder)
    (folder / "tokenization_own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\nclass OwnTokenizer(PreTrainedTokenizerFast): ..."
    )
    (folder / "configuration_own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    classes = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "configuration_own.OwnModel"}
    config = {"model_type": "own", "auto_map": classes, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"tokenizer_class": "OwnTokenizer"}
    settings["auto_map"] = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("command", ["plan", "show", "prepare", "check"])
def test_code_of_a_model_runs_with_the_flag_and_nobody_is_asked(command, own_model, tmp_path, monkeypatch, output_of):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question on standard input"))
    (tmp_path / "rows.jsonl").write_text('{"text": "some text"}\n' * 5)
    words = [command, tmp_path / "rows.jsonl", "--model", own_model]
    words = ["check", own_model, "--config-only"] if command == "check" else words
    for number, flags in enumerate(([], ["--trust-remote-code"], ["--trust_remote_code"])):
        new = tmp_path / f"new{number}"
        more = ["--output", new] if command == "prepare" else ["--max-length", 64]
        text = output_of(*words, *more, *flags, code=0 if flags else 2)
        word = "isolated" if command == "check" else "trained"
        assert word in text if flags else "trust_remote_code" in text and not new.exists()


def test_masks_of_tokenised_rows_decide_what_is_trained(workplace, tmp_path, printed):
    """In packs, `prepare`, `plan` and `show`, with a tokenizer and without: the tokens that TRL trains unpacked."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(4, 260, n).tolist() for n in rng.integers(4, 30, 20)]
    masks = {name: [rng.integers(0, 2, len(row)).tolist() for row in rows] for name in MASK_COLUMNS}
    tokenizer = ["--tokenizer", workplace / "model"]
    counts = set()

    # TRL reads `completion_mask` only with `completion_only_loss`
    cases = [
        (MASK_COLUMNS[1:], None),
        (MASK_COLUMNS[:1], True),
        (MASK_COLUMNS[:1], None),
        (MASK_COLUMNS, True),
        (MASK_COLUMNS, False),
        ([], None),
    ]
    for number, (names, flag) in enumerate(cases):
        data = Dataset.from_dict({"input_ids": rows} | {name: masks[name] for name in names})
        file = tmp_path / f"{number}.jsonl"
        folder = tmp_path / f"table{number}"
        data.to_json(file)
        words = [] if flag is None else ["--completion-only-loss", str(flag).lower()]
        labels = stock(tmp_path, data, max_length=None, completion_only_loss=flag).train_dataset["labels"]
        trained = sum(label != -100 for row in labels for label in row[1:])
        packed = build_trainer(tmp_path, data, completion_only_loss=flag)
        assert ("labels" in packed.train_dataset.column_names) == (len(names) == 2 and flag)  # else made when read
        documents = [(row, [-100, *row_labels[1:]]) for row, row_labels in zip(rows, labels, strict=True)]
        assert all_documents(packed) == sorted(document for document in documents if set(document[1]) != {-100})
        assert printed("prepare", file, *tokenizer, "--output", folder, *words)["trained_tokens"] == trained
        table = load_from_disk(folder)
        assert "labels" not in table.column_names or table["labels"] == labels
        for source, flags in itertools.product((file, folder), ([], tokenizer)):
            words_of_packs = [source, *flags, "--max-length", "64", *words]
            plan = printed("plan", *words_of_packs)["plans"][0]
            assert plan["ledger"]["given"]["trained_tokens"] == trained
            packs = printed("show", *words_of_packs, "--packs", "99")
            assert sum(document["trained_tokens"] for pack in packs for document in pack["documents"]) == trained
        counts.add(trained)
    assert len(counts) == 4, "the masks change what is trained"
