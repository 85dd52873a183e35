"""`trl-packfix plan`: its figures are those of a training run, and the length it recommends is the one to choose."""

import csv
import json
import re
from pathlib import Path
from shutil import copy
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset
from support.models import build_tiny_model
from support.runs import build_trainer
from transformers import AutoConfig, AutoTokenizer

from trl_packfix.cli import main, tokens
from trl_packfix.cli.forecast import candidate_lengths
from trl_packfix.cli.lengths import read_lengths
from trl_packfix.cli.sources import load_rows

pytestmark = pytest.mark.slow

# What only a model can say, and what only `plan` estimates
NOT_PLANNED = ("model", "attention", "isolation", "first_step", "prefixes", "trained", "data", "max_steps")


@pytest.mark.parametrize("strategy", ["stream", "bfd", "bfd_split", "wrapped", "minibatch"])
def test_figures_are_those_of_the_training_run(strategy, workplace, tmp_path, printed):
    settings = {"max_length": 96, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "seed": 5}
    words = [f"--{name}={value}" for name, value in (settings | {"packing_strategy": strategy}).items()]
    words = [workplace / "rows.jsonl", "--model", workplace / "model", *words]
    (plan,) = printed("plan", *words, code=int(strategy != "wrapped"))["plans"]
    rows = Dataset.from_json(str(workplace / "rows.jsonl"))
    settings |= {"packing_strategy": strategy, "max_steps": 1, "packing_report": True}
    trainer = build_trainer(tmp_path, rows, "qwen3", **settings)
    trainer.train()
    trained = json.loads((tmp_path / "packing_report.json").read_text())
    drawn = {name: trained.pop(name) for name in ("lines", "costs", "fills")}
    assert drawn["lines"] == [list(line) for line in trainer.packing_report.lines()]
    assert trained == json.loads(json.dumps(trainer.packing_report.to_dict()))
    assert plan["prefixes"]["in_packs"] < 1
    assert trained["prefixes"] is None
    planned = {name: plan[name] for name in trained if name not in NOT_PLANNED}
    assert planned == {name: value for name, value in trained.items() if name not in NOT_PLANNED}
    assert planned["num_packs" if strategy != "minibatch" else "num_steps"] > 3
    assert planned["ledger"]["lost_trained_tokens"] > 0  # something is cut, so that the ledger can be wrong


CHATS = [
    {
        "messages": [
            {"role": "system", "content": "be brief" * 4},
            *({"role": role, "content": f"{i} {role}"} for role in ("user", "assistant") * (1 + i % 3)),
        ]
    }
    for i in range(24)
]
OTHER_RUNS = {
    "text": ([{"text": "x" * (5 + 7 * i % 120)} for i in range(40)], {}),
    "assistant": (CHATS, {"assistant_only_loss": True}),
    "per turn": (CHATS, {"per_turn": True}),
    "families": (CHATS, {"share_prefixes": "family"}),
    "groups": (CHATS, {"tokens_per_rank": 96, "per_device_train_batch_size": 1}),
}


@pytest.mark.parametrize("name", OTHER_RUNS)
def test_figures_and_tokens_of_other_runs(name, workplace, tmp_path, printed):
    """Training finds the tokens that `plan` has made, and does not tokenise again."""
    rows, settings = OTHER_RUNS[name]
    file = tmp_path / "rows.jsonl"
    Dataset.from_list(rows).to_json(file)
    settings = {"max_length": 96, "per_device_train_batch_size": 2} | settings
    words = [f"--{name}={value}" for name, value in settings.items()]
    (planned,) = printed("plan", file, "--model", workplace / "model", *words, code=1)["plans"]
    data = load_rows(str(file))
    cache = Path(data.cache_files[0]["filename"]).parent
    tables = {*cache.glob("cache-*.arrow")}
    assert tables, "`plan` has cached its tokens"
    trainer = build_trainer(
        tmp_path, data, "qwen3", processing_class=AutoTokenizer.from_pretrained(workplace / "model"), **settings
    )
    assert {*cache.glob("cache-*.arrow")} == tables
    trainer.get_train_dataloader()
    trained = json.loads(json.dumps(trainer.packing_report.to_dict()))
    planned_names = trained.keys() - {*NOT_PLANNED} | ({"prefixes"} if name == "families" else set())
    assert {key: planned[key] for key in planned_names} == {key: trained[key] for key in planned_names}
    # Guards: each run has the part of the report that it is here for
    assert (trained["turns"] is not None) == (name == "per turn")
    assert (trained["prefixes"] is not None) == (name == "families")
    assert (trained["shared"] is not None) == (name == "groups")


def test_several_lengths_strategies_and_world_sizes(workplace, printed):
    words = ["--max-length", 64, 256, "--strategy", "stream", "wrapped", "--world-size", 1, 3, 512, "--tflops", 100]
    output = printed("plan", workplace / "rows.parquet", "--tokenizer", workplace / "model", "--batch-size", 1, *words)
    keys = [(plan["max_length"], plan["strategy"], plan["world_size"]) for plan in output["plans"]]
    assert keys == [(n, s, w) for n in (64, 256) for s in ("stream", "wrapped") for w in (1, 3, 512)]
    assert output["max_length"] == 256
    for one, three, many in zip(*(output["plans"][i::3] for i in range(3)), strict=True):
        assert one["imbalance"] == 1 <= three["imbalance"]
        assert many["num_steps"] == 1
        assert three["num_steps"] == -(-one["num_packs"] // 3)
        # 3 ranks do the same work in a third of the time, but for the waiting
        assert three["tokens_per_second"] == pytest.approx(3 * one["tokens_per_second"] / three["imbalance"])
        assert one["tokens_per_second"] == pytest.approx(one["num_tokens"] * 100e12 / one["flops"])


def test_the_length_recommended_is_the_smallest_that_loses_one_percent(lengths_file, printed):
    lengths = [100] * 990 + [3000] * 10  # 10 of 1000 documents, 23 % of the tokens
    file = lengths_file(lengths)
    output = printed("plan", file, "--strategy", "stream")
    assert [plan["max_length"] for plan in output["plans"]] == [1024, 2048, 4096] == candidate_lengths(3000)
    lost = [plan["lost_trained_share"] for plan in output["plans"]]
    trained = sum(lengths) - len(lengths)
    assert lost == pytest.approx([10 * (3000 - 1024) / trained, 10 * (3000 - 2048) / trained, 0])
    assert output["max_length"] == 4096
    assert "no trained token" in output["reasons"][0]
    assert "The next shorter, 2,048, loses" in str(output["reasons"])
    assert "The next longer" not in str(output["reasons"])
    # a length given that is too short: the best of them, and exit code 1
    output = printed("plan", file, "--max-length", 1024, 2048, code=1)
    assert output["max_length"] == 2048
    assert "try a longer one" in output["reasons"][0]


def test_a_model_that_reads_no_more_tokens_is_said(workplace, lengths_file, printed):
    words = [lengths_file([100] * 20 + [9000] * 5), "--model", workplace / "model"]
    output = printed("plan", *words, code=1)
    assert [plan["max_length"] for plan in output["plans"]] == [1024, 2048, 4096] == candidate_lengths(9000, 4096)
    assert "the model has no more than 4,096 positions" in output["reasons"][0]
    assert "try a longer one" in printed("plan", *words, "--max-length", 2048, code=1)["reasons"][0]
    assert candidate_lengths(9000, 5000) == [1024, 2048, 4096, 5000]


def test_positions_are_those_that_model_init_kwargs_give(workplace, lengths_file, tmp_path, printed):
    positions = AutoConfig.from_pretrained(workplace / "model").max_position_embeddings
    settings = {"model_name_or_path": str(workplace / "model"), "dataset_name": str(lengths_file([9000, 50]))}
    settings |= {"max_length": 2 * positions, "model_init_kwargs": {"max_position_embeddings": 2 * positions}}
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(settings))
    (plan,) = printed("plan", "--config", file, code=1)["plans"]
    assert plan["max_length"] == 2 * positions


def test_the_file_of_a_run_is_planned(workplace, tmp_path, monkeypatch, capsys, printed):
    """Data, model and settings of the file, also those that need a GPU; flags override it."""
    monkeypatch.chdir(workplace)
    data = ["--model", "model", "--completion-only-loss", "false", "--packing", "rows.jsonl"]  # DATA behind a switch
    flags = ["--max-length", 96, "--batch-size", 2, "--accumulation", 2, "--seed", 5]
    by_flags = printed("plan", *data, *flags, "--strategy", "stream", code=1)
    settings = {"model_name_or_path": "model", "dataset_name": "rows.jsonl", "completion_only_loss": False}
    settings |= {"max_length": 96, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "seed": 5}
    settings |= {"packing_strategy": "stream", "bf16": True, "tf32": True, "deepspeed": "none.json", "use_peft": True}
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(settings | {"num_processes": 8}))
    assert printed("plan", "--config", file, code=1) == by_flags
    longer = printed("plan", "--config", file, "--max-length", 96, 512, "--assistant-turns", "all")["plans"]
    assert [(plan["max_length"], plan["strategy"]) for plan in longer] == [(96, "stream"), (512, "stream")]
    assert longer[0] == by_flags["plans"][0]
    for mixture in ([{"path": "rows.jsonl"}], [{"path": "rows.jsonl"}, {"path": "rows.parquet"}]):
        file.write_text(json.dumps(settings | {"datasets": mixture}))
        (plan,) = printed("plan", "--config", file, code=1)["plans"]
        assert plan["num_rows"] == 50 * len(mixture)
    assert printed("plan", "--config", file, "rows.jsonl", code=1) == by_flags, "DATA overrides the file"
    file.write_text(json.dumps(settings | {"packing": False}))
    assert main(["plan", "--config", str(file), "--json"]) == 1
    done = capsys.readouterr()
    assert json.loads(done.out) == by_flags
    assert "`packing` is off in this run" in done.err
    file.write_text(json.dumps(settings | {"packing": False, "padding_free": True, "packing_strategy": "bfd"}))
    assert printed("plan", "--config", file, code=1)["plans"][0]["strategy"] == "minibatch"


def test_files_of_lengths(tmp_path):
    np.save(tmp_path / "x.npy", np.array([5, 7, 300], np.int32))
    for name, text in (("x.txt", "5\n7\n300"), ("x.json", "[5, 7, 300]"), ("x.csv", "5\n7\n300")):
        (tmp_path / name).write_text(text)
    assert all(read_lengths(path).tolist() == [5, 7, 300] for path in tmp_path.iterdir())


UNREADABLE = {
    "empty.npy": b"",
    "cut.npy": b"\x93NUMPY\x01\x00",
    "short.csv": b"id,length\na,5\nb\n",
    "above.txt": b"5\n99999999999999999999\n",
    "above.json": b"[5, 99999999999999999999]",
    "long.txt": b"5\n40000000000\n",
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_files_that_hold_no_lengths_are_refused_at_once(name, tmp_path, output_of):
    (tmp_path / name).write_bytes(UNREADABLE[name])
    error = output_of("plan", tmp_path / name, "--overlong", "split", "--max-length", "2048", code=2)
    assert name in error
    assert "2,147,483,647" in error
    assert ("40,000,000,000" in error) == (name == "long.txt")


def test_columns_of_texts_beside_lengths_are_said_and_not_read(tmp_path, caplog):
    """Cut at every comma, the first row would have the length 12, and nobody would know."""
    rows = [["Once, 12, twice", 5], ['the "end"\n7,8', 300], ["a" * 200_000, 7]]
    with (tmp_path / "x.csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([["text", "length"], *rows])
    assert read_lengths(tmp_path / "x.csv").tolist() == [5, 300, 7]
    assert "column 'length'; the other columns (text) are not read" in caplog.text
    for name, text in (("x.json", '[{"text": "a"}]'), ("texts.csv", "text\na")):
        (tmp_path / name).write_text(text)
        assert read_lengths(tmp_path / name) is None, "rows, and no lengths"


def make_terminal(monkeypatch, width):
    """Make rich take stdout for a terminal: through a pipe it would not see the width."""
    for name, value in (("FORCE_COLOR", "1"), ("COLUMNS", str(width)), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)


def without_colours(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("several", [False, True])
def test_the_table_fits_the_terminal(width, several, lengths_file, monkeypatch, capsys):
    make_terminal(monkeypatch, width)
    file = lengths_file([*range(100, 9000, 7)] * 2)
    words = "--strategy bfd_split minibatch"
    if several:
        words = "--strategy stream bfd --tokens-per-rank 16384 --world-size 8 64 --tflops 100"
    assert main(["plan", str(file), "--max-length", "1024", "131072", *words.split()]) == 0
    lines = without_colours(capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    shown = " ".join(" ".join(lines).split())
    assert "Recommended: max_length 131,072" in shown
    assert ("on 64 ranks waiting for each other adds" in shown) == several
    assert f"micro-batches of {'16,384 tokens per rank' if several else '8 x max_length tokens'}" in shown
    tables = [line.split() for line in lines if line.split()[:1] == ["max_length"]]
    wanted = "packs filled padded steps docs/step imbalance cut lost".split()
    wanted += "exchange part micro-steps by degree PFLOP tokens/s time".split() if several else ["PFLOP"]
    assert [table[:3] for table in tables] == [["max_length", "strategy", "ranks"]] * len(tables)
    assert [name for table in tables for name in table[3:]] == wanted  # each column once, in this order
    assert (len(tables) == 1) == (width == 160 and not several)
    assert sum(line.split()[:1] in (["1,024"], ["131,072"]) for line in lines) == (8 if several else 4) * len(tables)


BAD_DATA = {  # name of a file, and its text -> the message
    ("broken.jsonl", '{"text": "a"}\n{"text": '): "dataset of 23 bytes. It cannot be read: ",
    ("broken.json", '[{"text": "a"'): "It cannot be read",
    ("empty.jsonl", ""): "dataset of 0 bytes. It cannot be read: it holds no rows. Correct it",
    ("empty.csv", ""): "It cannot be read: No columns",
    ("empty.parquet", ""): "It cannot be read: Parquet file size is 0 bytes",
    ("columns.jsonl", '{"a": 1}\n{"a": 2}'): "has the columns `a` (int64). TRL tokenises `messages`",
    ("null.jsonl", '{"text": "a"}\n{"text": null}'): "1 of 2 rows of the train dataset hold None in `text`; the first",
    ("strings.jsonl", '{"messages": "a"}'): "has the columns `messages` (string). TRL tokenises",
    ("keys.jsonl", '{"messages": [{"from": "user"}]}'): "has the columns `messages` (list<item: struct<from: string",
    ("latin.jsonl", '{"text": "caf\xe9"}'): "latin.jsonl` was given. It has bytes that are no text in utf-8",
    ("latin.json", '[{"text": "\xe9"}]'): "latin.json` was given",
    ("lengths.csv", "length\n5\xe9"): "lengths.csv` was given",
    ("half.jsonl", '{"prompt": "a", "text": "b"}'): "`prompt` with `completion`",
}


@pytest.mark.parametrize(
    "command, file",
    [*(("plan", file) for file in BAD_DATA), ("prepare --output new", next(iter(BAD_DATA)))],
    ids=lambda words: words if isinstance(words, str) else words[0],
)
def test_data_that_cannot_be_read_is_one_line_and_exit_code_2(command, file, workplace, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path(file[0]).write_text(file[1], encoding="latin-1")
    assert main([*command.split(), file[0], "--tokenizer", str(workplace / "model")]) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("trl-packfix"))
    assert BAD_DATA[file] in line
    assert line.endswith(".")
    assert ("utf-8" in line.lower()) == ("\xe9" in file[1])


def test_plan_with_sequence_parallelism(lengths_file, output_of, printed):
    lengths = [*np.random.default_rng(0).integers(5, 300, 400).tolist(), 900, 1500, 2048]
    words = [lengths_file(lengths), *"--strategy stream --accumulation 2 --world-size 8 12".split()]
    words += ["--tokens-per-rank", 512, "--tflops", 100]
    eight, twelve = printed("plan", *words, "--max-length", 2048)["plans"]
    for plan_of_ranks in (eight, twelve):
        shared = plan_of_ranks["shared"]
        assert sum(shared["micro_steps"].values()) == plan_of_ranks["num_steps"] * 2
        assert set(shared["micro_steps"]) <= {"1", "2", "4", "8"}
        assert len(shared["micro_steps"]) > 1
        assert plan_of_ranks["batch_size"] == 1
        assert shared["smallest_degree"] == 4
        assert 0 < shared["exchange_share"] < 0.5
        assert 450 < shared["largest_part"] <= 512
    assert "8" not in twelve["shared"]["micro_steps"], "8 does not divide 12"
    # without lengths, only those that the ranks can hold
    assert [plan["max_length"] for plan in printed("plan", *words)["plans"][::2]] == [1024, 2048]
    shown = output_of("plan", *words)
    assert all(text in shown for text in ("512 tokens per rank", "micro-steps by degree", "of it is the exchange"))
    refusal = output_of("plan", *words, "--max-length", 8192, code=2)
    assert "`max_length=8192` was given with `tokens_per_rank=512` on 8 ranks" in refusal


def memory_of(printed, *words):
    """Return the rows of `--memory` by GPUs, method and checkpointing."""
    rows = printed("plan", *words)["memory"]
    rows_of_table = {(row["gpus"], row["method"], row["checkpointing"]): row for row in rows}
    assert len(rows_of_table) == len(rows)
    return rows_of_table


def test_memory_without_data(workplace, monkeypatch, output_of, printed):
    """In 80 columns the rows, what is modelled, and what fits."""
    words = ["--model", workplace / "model", *"--gpus 1 8 --batch-size 1 --max-length 64 --memory 1.1".split()]
    rows = memory_of(printed, *words)
    assert len(rows) == 2 * 6 * 2
    assert {gpus for gpus, *_ in rows} == {1, 8}
    assert 1 < rows[1, "full, DDP", False]["largest"] < rows[1, "full, DDP", True]["largest"] <= 4096
    assert "fits without" not in output_of("plan", *words, "--gradient_checkpointing", "false")
    lora_flags = "--use_peft --lora_r 2 --lora_dropout 0.1 --lora_target_modules q_proj v_proj".split()
    of_run = memory_of(printed, *words, *lora_flags)
    assert of_run[1, "LoRA, DDP", True]["lora"] == "rank 2, dropout 0.1, target_modules q_proj, v_proj"
    assert of_run[1, "LoRA, DDP", False]["activations"] < rows[1, "LoRA, DDP", False]["activations"]
    make_terminal(monkeypatch, 80)
    shown = without_colours(output_of("plan", *words))
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    shown = " ".join(shown.split())
    assert "fits with 64 tokens in a micro-batch: LoRA on 1 GPU without checkpointing; full on 1 GPU without" in shown
    assert "peak with 64 tokens in a micro-batch, on 8 GPUs" in shown
    assert shown.count("fits without gradient checkpointing (0 of 1 GiB): about 1.4 times faster") == 4
    assert "LoRA, DDP on 1 GPU fits without" in shown
    assert shown.count("LoRA, ZeRO-2") == 8
    assert "Modelled: gathered" in shown
    assert "on an H200 and an H100" in shown


def test_memory_of_several_lengths_is_one_answer(workplace, printed):
    words = ["--model", workplace / "model", *"--batch-size 1 --max-length 32 64 --memory 1.1".split()]
    assert [row["tokens"] for row in printed("plan", *words)["memory"]] == [32] * 12 + [64] * 12


def test_offloaded_activations_lie_on_the_host(workplace, output_of, printed):
    """Inputs of all layers but one must leave the GPU, as transformers documents it.

    They are layers x tokens x hidden values of 2 bytes.
    """
    words = ["--model", workplace / "model", *"--gpus 8 --batch-size 1 --max-length 64 --memory 1.1".split()]
    rows_kept = memory_of(printed, *words)
    freed = memory_of(printed, *words, "--offload")
    sizes = build_tiny_model().config
    layers = sizes.num_hidden_layers
    size = 64 * sizes.hidden_size * 2 / 2**30
    kept_row, freed_row = (rows[8, "full, ZeRO-3", True] for rows in (rows_kept, freed))
    assert layers > 1
    assert kept_row["activations"] - freed_row["activations"] == pytest.approx((layers - 1) * size)
    assert (kept_row["host"], freed_row["host"]) == (0, pytest.approx(layers * size))
    assert freed_row["largest"] > kept_row["largest"]
    assert rows_kept[8, "full, ZeRO-3", False] == freed[8, "full, ZeRO-3", False]
    assert "activations lie on the host" in output_of("plan", *words, "--offload")


def test_memory_says_what_the_model_itself_cannot_run(data_dir, tmp_path, output_of):
    """xLSTM multiplies bfloat16 with fp32 unless under autocast. Step-3.5 loops over experts, which is counted."""

    def memory_table(name):
        copy(data_dir / "defect_configs" / "tiny" / f"{name}.json", tmp_path / "config.json")
        return output_of("plan", "--model", tmp_path, "--memory", 80)

    step = memory_table("step-3.5-flash")
    assert "ZeRO-2" in step
    assert "left out" not in step
    xlstm = memory_table("xlstm-7b")
    assert "DDP" in xlstm
    assert "ZeRO" not in xlstm
    assert "left out: full training without autocast, in which the model raises" in xlstm


def test_memory_with_data_is_that_of_the_recommended_length(workplace, printed):
    words = [workplace / "rows.jsonl", "--model", workplace / "model", "--strategy", "stream", "--memory", 2]
    output = printed("plan", *words)
    assert {row["tokens"] for row in output["memory"]} == {8 * output["max_length"]}


def test_the_config_of_a_model_is_that_of_its_revision(monkeypatch):
    """Record what transformers is asked for, because no revision is in a folder."""
    monkeypatch.setattr(tokens.AutoConfig, "from_pretrained", lambda name, **options: (name, options["revision"]))
    model = SimpleNamespace(model_name_or_path="org/model", model_revision="v2")
    configs = SimpleNamespace(model=model, training=SimpleNamespace(trust_remote_code=False, model_init_kwargs=None))
    assert tokens.load_model_config(configs) == ("org/model", "v2")
