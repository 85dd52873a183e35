"""The report in the terminal, in loggers, in a file and in the model card: the same numbers everywhere."""

import base64
import io
import json
import re
import runpy
import shutil
from collections import defaultdict
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from matplotlib.image import imread
from rich.console import Console
from support.features import needs
from support.launch import run_to_end
from support.models import build_tiny_model, build_tokenizer
from support.paths import ROOT
from support.runs import build_trainer, config

from trl_packfix import SFTTrainer
from trl_packfix.cli import main
from trl_packfix.reporting import page
from trl_packfix.reporting.page import make_page, read_run, summarise
from trl_packfix.reporting.report import metrics, show_lines
from trl_packfix.reporting.sections import LengthHistogram
from trl_packfix.training.totals import StepSpan, TrainingTotals


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    rng = np.random.default_rng(0)
    texts = ["x" * int(n) for n in np.clip(rng.lognormal(3.5, 0.6, 200), 2, 200)]
    rows = Dataset.from_dict({"text": texts, "source": ["a", "b"] * 100})
    settings = {"max_length": 64, "per_device_train_batch_size": 4, "packing_report": True, "source_column": "source"}
    trainer = build_trainer(tmp_path_factory.mktemp("run"), rows, max_steps=2, **settings)
    trainer.train()
    return trainer


def test_the_report_is_sixteen_lines_of_at_most_100_columns(trainer, capsys):
    report = trainer.packing_report
    report.show()
    plain = capsys.readouterr().out
    assert max(map(len, plain.splitlines())) <= 100
    assert plain.isascii()
    assert len(plain.splitlines()) == 19, "sixteen where nothing is cut: three say that and warn"
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


def test_loggers_get_the_numbers_of_the_report(trainer):
    (entry,) = [entry for entry in trainer.state.log_history if "packing/efficiency" in entry]
    saved = json.loads(Path(trainer.args.output_dir, "packing_report.json").read_text())
    assert {name: value for name, value in entry.items() if name.startswith("packing/")} == metrics(
        trainer.packing_report
    )
    for name in ("efficiency", "padding_efficiency", "documents_per_step", "imbalance", "lower_bound"):
        assert entry[f"packing/{name}"] == saved[name]
    lost = saved["ledger"]["lost_trained_tokens"] / saved["ledger"]["given"]["trained_tokens"]
    assert entry["packing/lost_trained_share"] == lost > 0


TRAINERS = {  # keys of transformers and TRL
    *"loss grad_norm learning_rate epoch step total_flos train_loss train_runtime train_steps_per_second".split(),
    *"eval_runtime eval_samples_per_second eval_steps_per_second".split(),
}


@needs("pack_forward")
def test_every_key_of_the_log_is_on_the_page_and_no_other(trainer):
    tool = runpy.run_path(str(ROOT / "tools" / "logged.py"))
    assert (ROOT / "docs" / "logging.md").read_text() == tool["page"](), "run `python tools/logged.py`"
    listed = {key for keys in tool["PARTS"].values() for key in keys}
    trainer.evaluate(trainer.train_dataset)
    logged = {re.sub("/[ab]$", "/NAME", key) for entry in trainer.state.log_history for key in entry} - TRAINERS
    assert logged <= listed, "a key without a row: add it to LOGGED, beside the code that logs it"
    # The run has no images, shared packs or prefixes, and its device has no peak
    assert {"loss/NAME", "trained_tokens/NAME", "eval_loss/NAME", "packing/efficiency", "isolation/tolerance"} <= logged
    assert len(logged) > 30
    totals = TrainingTotals(torch.device("cpu"), sources=("NAME",), shares_rows=True)
    span = StepSpan(defaultdict(lambda: 1.0), seconds=1.0)
    by_totals = set(totals.metrics(span, capacity=8, peak_tflops=1.0)) | {"num_tokens", "train_samples_per_second"}
    assert by_totals == set(tool["PARTS"]["In each log of a training"])
    assert all(unit and meaning for keys in tool["PARTS"].values() for unit, meaning in keys.values())


def test_the_model_card_says_packed_how_and_proved(trainer):
    trainer.create_model_card(model_name="x")
    trainer.create_model_card(model_name="x")  # written anew, not twice
    card = Path(trainer.args.output_dir, "README.md").read_text()
    assert card.count("## Packing") == 1
    assert card.index("## Packing") < card.index("### Framework versions")
    report = trainer.packing_report
    summary = dict(summarise(report, report.lines(), trainer.state.log_history))
    assert summary.keys() == {"model", "data", "trained", "lost", "isolation", "first step", "speed"}
    del summary["model"]  # TRL's first sentence names it, with a link
    for label, text in summary.items():
        assert f"| {label} | {text.replace('|', '/')} |" in card
    assert "2 optimizer steps" in summary["trained"]
    assert "passed: changing one document" in card
    assert "Cite TRL as" in card


def tables_of(page):
    """Return (label, text) of each row of each table, by the id of the table."""
    cells = r"<tr><th[^>]*>(.*?)</th><td>(.*?)</td></tr>"
    return {
        name: [(unescape(label), unescape(text)) for label, text in re.findall(cells, table, re.DOTALL)]
        for name, table in re.findall(r'<table id="(\w+)">(.*?)</table>', page, re.DOTALL)
    }


def pictures_of(page):
    return dict(re.findall(r'<figure id="(\w+)">\s*<img src="([^"]*)"', page))


@pytest.fixture(scope="module")
def output(trainer, tmp_path_factory):
    """Return the folder of the run with its page, which was made by the command."""
    folder = Path(trainer.args.output_dir)
    assert main(["report", str(folder)]) == 0
    return folder


def test_the_page_of_a_run_is_what_was_logged_and_reported(trainer, output, capsys):
    page = (output / "packing_report.html").read_text()
    log = read_run(output).log
    assert log == trainer.state.log_history[: len(log)], "another test may evaluate after the training"
    assert "train_runtime" in log[-1]
    lines = trainer.packing_report.lines()
    summary = summarise(trainer.packing_report, lines, log)
    assert tables_of(page) == {"summary": summary, "report": lines}
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert f"loss {losses[0]:.3g} to {losses[-1]:.3g}" in dict(summary)["trained"]
    assert "truncated" in dict(summary)["lost"]
    assert "tokens/s" in dict(summary)["speed"]
    assert pictures_of(page).keys() == {"loss", "lengths", "fill", "waiting"}
    for name, source in pictures_of(page).items():
        kind, _, data = source.partition(",")
        assert kind == "data:image/png;base64"
        picture = imread(io.BytesIO(base64.b64decode(data)))
        assert len(np.unique(picture[..., :3].reshape(-1, 3), axis=0)) > 5, f"nothing is drawn: {name}"
    links = re.findall(r"(?:src|href|srcset|action)=.(?!data:)|@import|url[(]", page)
    assert links == [], "the page needs a network"
    assert main(["report", str(output), "--json", "--output", str(output / "other.html")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("page") == str(output / "other.html")
    assert printed == dict(summary)


def test_numbers_that_were_saved_are_read_back(trainer, output):
    numbers = read_run(output).numbers
    report = trainer.packing_report
    for name in ("ledger", "lengths", "max_length", "strategy", "num_packs", "efficiency", "lost_trained_share"):
        assert getattr(numbers, name) == getattr(report, name), name
    assert numbers.sample.costs == report.sample.costs
    assert numbers.sample.fills == report.sample.fills


def test_the_page_of_a_run_that_has_not_ended(trainer, output, tmp_path, output_of, monkeypatch):
    """Read the log of its newest checkpoint. Texts of a run are no HTML, and without matplotlib nothing is drawn."""
    report = trainer.packing_report
    replace(report, model="<b>a model</b>").save(tmp_path)
    assert read_run(tmp_path).log == []
    text = make_page(read_run(tmp_path), "run")
    assert "There is no `trainer_state.json`" in text
    assert "<b>" not in text
    assert "&lt;b&gt;a model" in text
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(
            json.dumps({"log_history": [{"step": step}]})
        )
    assert read_run(tmp_path).log == [{"step": 10}]
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    assert "pip install matplotlib" in output_of("report", tmp_path)
    assert pictures_of((tmp_path / "packing_report.html").read_text()) == {}


@pytest.mark.parametrize(
    "saved, message",
    [
        ("{", "It is not whole"),
        ("{}", "an earlier version of trl_packfix"),
        (None, "Give the `output_dir` of a run on packs"),
    ],
)
def test_a_folder_without_a_whole_report_is_refused(saved, message, tmp_path, output_of):
    if saved is not None:
        (tmp_path / "packing_report.json").write_text(saved)
    assert message in output_of("report", tmp_path, code=2)


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.processes
@pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium")
def test_a_browser_shows_the_page_without_a_network(output, tmp_path):
    picture = tmp_path / "page.png"
    offline = ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}"]
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=800,2400", *offline]
    command = [BROWSER, *flags, f"--screenshot={picture}", (output / "packing_report.html").as_uri()]
    run_to_end(*command)
    pixels = (255 * imread(picture)[..., :3]).astype(int)
    is_blue = (np.abs(pixels - (0, 0x72, 0xB2)) < 8).all(axis=-1)  # the line of the loss and the bars of the fill
    is_sky = (np.abs(pixels - (0x56, 0xB4, 0xE9)) < 8).all(axis=-1)  # the bars of costs
    assert is_blue.sum() > 500
    assert is_sky.sum() > 500
    assert np.flatnonzero(is_blue.any(axis=1))[0] < np.flatnonzero(is_sky.any(axis=1))[0], "pictures are in their order"


def test_a_card_names_local_models_and_datasets_without_a_link_or_a_path(tmp_path):
    folder = tmp_path / "secret" / "my-model"
    file = tmp_path / "chats.jsonl"
    build_tiny_model().save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    file.write_text("")
    args = config(tmp_path / "output", packing=False)
    trainer = SFTTrainer(str(folder), args, train_dataset=Dataset.from_dict({"text": ["abc", "defg"]}))
    trainer.create_model_card(dataset_name=[str(file), "trl-lib/Capybara"])
    card = (tmp_path / "output" / "README.md").read_text()
    assert "# Model Card for output" in card
    assert 'model="output"' in card
    assert "None" not in card
    capybara = "[trl-lib/Capybara](https://huggingface.co/datasets/trl-lib/Capybara)"
    assert f"version of `my-model` (local model) on `chats.jsonl` (local dataset), {capybara}.\n" in card
    assert "secret" not in card
    assert "## Packing" not in card
    assert "datasets:\n- trl-lib/Capybara\n" in card
    trainer.model.config._name_or_path = "Qwen/Qwen3-0.6B"
    trainer.create_model_card()
    card = (tmp_path / "output" / "README.md").read_text()
    assert "version of [Qwen/Qwen3-0.6B](https://huggingface.co/Qwen/Qwen3-0.6B).\n" in card
    assert "base_model:" in card


@pytest.mark.parametrize("lengths", [[1], [7, 7, 7], [1, 2, 3], list(range(2, 5000, 7)), [3] * 1000 + [100_000]])
def test_histogram_counts_every_document(lengths):
    lengths = np.array(lengths)
    histogram = LengthHistogram.from_lengths(lengths)
    assert sum(histogram.counts) == len(lengths)
    assert histogram.edges[0] == lengths.min()
    assert histogram.edges[-1] > lengths.max()
    (bars,) = re.findall(r"\[(.*)\]", histogram.line())
    assert len(bars) == len(histogram.counts) <= 24
    assert [bar == " " for bar in bars] == [count == 0 for count in histogram.counts]
    assert (lengths <= histogram.median).mean() >= 0.5 > (lengths < histogram.median).mean()
    assert (lengths <= histogram.p99).mean() >= 0.99 > (lengths < histogram.p99).mean()
