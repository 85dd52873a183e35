"""The report in the terminal, in loggers, in a file and in the model card: the same numbers everywhere."""

import io
import json
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from rich.console import Console
from support.models import build_tiny_model, build_tokenizer
from support.runs import config, trainer

from trl_packfix import SFTTrainer
from trl_packfix.reporting.report import metrics, show_lines
from trl_packfix.reporting.sections import LengthHistogram
from trl_packfix.training.totals import StepSpan, TrainingTotals

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    rng = np.random.default_rng(0)
    texts = ["x" * int(n) for n in np.clip(rng.lognormal(3.5, 0.6, 200), 2, 200)]
    rows = Dataset.from_dict({"text": texts, "source": ["a", "b"] * 100})
    settings = {"max_length": 64, "per_device_train_batch_size": 4, "packing_report": True, "source_column": "source"}
    run = trainer(tmp_path_factory.mktemp("run"), rows, max_steps=2, **settings)
    run.train()
    return run


def test_the_report_is_fifteen_lines_of_at_most_100_columns(run, capsys):
    report = run.packing_report
    report.show()
    plain = capsys.readouterr().out
    assert max(map(len, plain.splitlines())) <= 100
    assert plain.isascii()
    assert len(plain.splitlines()) == 18, "fifteen where nothing is cut: three say that and warn"
    told = ["passed: changing one document", "lost", "truncated", report.lengths.line()]
    assert all(text in plain for text in (f"{report.num_packs:,} packs", f"{report.efficiency:.2%}", *told))


@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_report_on_a_terminal_is_whole(width):
    lines = [
        ("model", "/a/folder/of/" + "many/parts/" * 20 + "model (LlamaForCausalLM)"),
        ("lengths", "1 [@   # +] 4; half have at most 2"),  # no markup of rich
        ("sequence parallelism", "micro-steps by degree (ranks that share a pack): 1: 30, 2: 20"),
    ]
    console = Console(force_terminal=True, width=width, file=io.StringIO(), color_system=None)
    show_lines("Packing report", lines, console)
    shown = console.file.getvalue().splitlines()
    cells = [line.split("\u2502")[1:3] for line in shown if "\u2502" in line]
    assert max(map(len, shown)) <= width
    assert shown[0].startswith("Packing report")
    for shown_column, column in zip(zip(*cells, strict=True), zip(*lines, strict=True), strict=True):
        assert "".join("".join(shown_column).split()) == "".join("".join(column).split())


def test_loggers_get_the_numbers_of_the_report(run):
    (entry,) = [each for each in run.state.log_history if "packing/efficiency" in each]
    saved = json.loads(Path(run.args.output_dir, "packing_report.json").read_text())
    assert {name: value for name, value in entry.items() if name.startswith("packing/")} == metrics(run.packing_report)
    for name in ("efficiency", "padding_efficiency", "documents_per_step", "imbalance", "lower_bound"):
        assert entry[f"packing/{name}"] == saved[name]
    lost = saved["ledger"]["lost_trained_tokens"] / saved["ledger"]["given"]["trained_tokens"]
    assert entry["packing/lost_trained_share"] == lost > 0


TRAINERS = {  # keys of transformers and TRL
    *"loss grad_norm learning_rate epoch step total_flos train_loss train_runtime train_steps_per_second".split(),
    *"eval_runtime eval_samples_per_second eval_steps_per_second".split(),
}


def test_every_key_of_the_log_is_on_the_page_and_no_other(run):
    made = runpy.run_path(str(ROOT / "tools" / "logged.py"))
    assert (ROOT / "docs" / "logging.md").read_text() == made["page"](), "run `python tools/logged.py`"
    listed = {key for keys in made["PARTS"].values() for key in keys}
    run.evaluate(run.train_dataset)
    logged = {re.sub("/[ab]$", "/NAME", key) for entry in run.state.log_history for key in entry} - TRAINERS
    assert logged <= listed, "a key without a row: add it to LOGGED, beside the code that logs it"
    # The run has no images, shared packs or prefixes, and its device has no peak
    assert {"loss/NAME", "trained_tokens/NAME", "eval_loss/NAME", "packing/efficiency", "isolation/tolerance"} <= logged
    assert len(logged) > 30
    totals = TrainingTotals(sources=("NAME",), shares_prefixes=True)
    span = StepSpan(dict.fromkeys(totals.window.sums, 1.0), seconds=1.0)
    by_totals = set(totals.metrics(span, capacity=8, peak_tflops=1.0)) | {"num_tokens", "train_samples_per_second"}
    assert by_totals == set(made["PARTS"]["In each log of a training"])
    assert all(unit and meaning for keys in made["PARTS"].values() for unit, meaning in keys.values())


def test_the_model_card_says_packed_how_and_proved(run):
    run.create_model_card(model_name="x")
    run.create_model_card(model_name="x")  # written anew, not twice
    card = Path(run.args.output_dir, "README.md").read_text()
    assert card.count("## Packing") == 1
    assert card.index("## Packing") < card.index("### Framework versions")
    for label, text in run.packing_report.lines():
        assert f"| {label} | {text.replace('|', '/')} |" in card
    assert "(stream)" in card
    assert "passed: changing one document" in card
    assert "Cite TRL as" in card


def test_a_card_names_local_models_and_datasets_without_a_link_or_a_path(tmp_path):
    folder = tmp_path / "secret" / "my-model"
    file = tmp_path / "chats.jsonl"
    build_tiny_model().save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    file.write_text("")
    args = config(tmp_path / "output", packing=False)
    run = SFTTrainer(str(folder), args, train_dataset=Dataset.from_dict({"text": ["abc", "defg"]}))
    run.create_model_card(dataset_name=[str(file), "trl-lib/Capybara"])
    card = (tmp_path / "output" / "README.md").read_text()
    assert "# Model Card for output" in card
    assert 'model="output"' in card
    assert "None" not in card
    capybara = "[trl-lib/Capybara](https://huggingface.co/datasets/trl-lib/Capybara)"
    assert f"version of `my-model` (local model) on `chats.jsonl` (local dataset), {capybara}.\n" in card
    assert "secret" not in card
    assert "## Packing" not in card
    assert "datasets:\n- trl-lib/Capybara\n" in card
    run.model.config._name_or_path = "Qwen/Qwen3-0.6B"
    run.create_model_card()
    card = (tmp_path / "output" / "README.md").read_text()
    assert "version of [Qwen/Qwen3-0.6B](https://huggingface.co/Qwen/Qwen3-0.6B).\n" in card
    assert "base_model:" in card


@pytest.mark.parametrize("lengths", [[1], [7, 7, 7], [1, 2, 3], list(range(2, 5000, 7)), [3] * 1000 + [100_000]])
def test_histogram_counts_every_document(lengths):
    lengths = np.array(lengths)
    found = LengthHistogram.from_lengths(lengths)
    assert sum(found.counts) == len(lengths)
    assert found.edges[0] == lengths.min()
    assert found.edges[-1] > lengths.max()
    (bars,) = re.findall(r"\[(.*)\]", found.line())
    assert len(bars) == len(found.counts) <= 24
    assert [bar == " " for bar in bars] == [count == 0 for count in found.counts]
    assert (lengths <= found.median).mean() >= 0.5 > (lengths < found.median).mean()
    assert (lengths <= found.p99).mean() >= 0.99 > (lengths < found.p99).mean()
