"""`trl-packfix check`, the tiny models, the judge and the sweep: each verdict is true, and each alarm can ring."""

import csv
import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch
from support import zoo
from support.models import build_tiny_model
from support.versions import current_models
from sweep import image_families
from sweep import model_types as sweeping
from sweep import page as compatibility
from sweep.judge import Judge, packed_by_trl
from sweep.model_types import NOT_TESTED, VERDICTS, Row, sweep_type
from torch import nn
from transformers import LlamaConfig

from trl_packfix.cli import main
from trl_packfix.cli.check_model import tiny_model
from trl_packfix.isolation.packed_model import PackedModel

DOCS = Path(__file__).parents[2] / "docs"
ROWS = compatibility.read(DOCS)


def judged(model_type, change=lambda model: None):
    """What a judge finds in stock TRL's packs on a model with the weights of the judge's."""
    judge, model = (zoo.build_model(model_type) for _ in range(2))
    change(model)
    return Judge(judge, zoo.WIDTH, zoo.FIRST_WORD, zoo.VOCABULARY).judge(model, packed_by_trl)


# The judge


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type, is_right", [("llama", True), ("qwen3_moe", True), ("falcon", False), ("gpt_oss", False)]
)
def test_the_judge_knows_what_stock_trl_does(model_type, is_right):
    judgement = judged(model_type)
    assert judgement.right == is_right and judgement.refusal is None
    assert 0 < judgement.error < 1e-5 if is_right else judgement.error > 0.1


@current_models
def test_the_judge_hears_a_refusal():
    assert "causal_conv1d" in judged("qwen3_next").refusal


@pytest.mark.slow
@pytest.mark.parametrize("backwards_only", [False, True])
def test_the_judge_sees_what_is_wrong_in_one_case_only(backwards_only):
    def see_the_token_before(module, args, states):
        if states.shape[1] != zoo.WIDTH:
            return states
        before = 1e-2 * nn.functional.pad(states, (0, 0, 1, 0))[:, :-1]
        return states + (before - before.detach() if backwards_only else before)

    judgement = judged("llama", lambda model: model.model.layers[1].mlp.register_forward_hook(see_the_token_before))
    assert not judgement.right and judgement.where.startswith("T = hidden size")


# The tiny models


@pytest.mark.parametrize(
    "model_type, kinds",
    [
        ("qwen3_next", {"linear_attention", "full_attention"}),
        ("gemma3_text", {"sliding_attention", "full_attention"}),
        pytest.param("bailing_hybrid", {"linear_attention", "full_attention"}, marks=current_models),
        ("deepseek_v4", {"sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"}),
        pytest.param("minimax_m3_vl_text", {"minimax_m3_sparse", "full_attention"}, marks=current_models),
        ("qwen2_moe", {"sliding_attention", "full_attention"}),
        ("lfm2", {"conv", "full_attention"}),
    ],
)
def test_of_each_kind_a_layer_is_kept(model_type, kinds):
    config = zoo.build_model(model_type).config
    assert set(config.layer_types) == kinds and config.num_hidden_layers <= 4


# The sweep


def test_the_table_keeps_the_promise():
    """docs/compatibility.csv covers every type of the transformers that made it, and holds no silent leak."""
    causal = [row for row in ROWS if row.kind == "causal"]
    assert len(causal) >= 189 and len({row.model_type for row in causal}) == len(causal)
    assert sum(row.false_negatives for row in ROWS) == 0
    assert sum(row.is_right for row in causal) >= 181
    assert all(row.reason for row in ROWS if row.verdict in ("refused", "no text", "unpack only"))
    assert {row.verdict for row in ROWS} <= set(VERDICTS)
    shared = {row.model_type: row.shared for row in causal if row.verdict != "no text"}
    assert set(shared.values()) == {"yes", "no"} and list(shared.values()).count("yes") >= 106
    with_kernels = Counter(row.with_kernels for row in causal if row.with_kernels)
    assert set(with_kernels) == {"native", "repaired"} and with_kernels.total() >= 24 and with_kernels["native"] >= 20
    own_attention = ("codegen", "git", "got_ocr2", "gpt_neo", "gpt_neox_japanese", "gptj")  # right on whole packs only
    assert all(shared[name] == "no" for name in own_attention)


def test_the_table_keeps_the_promise_with_images():
    pictured = {row.model_type: row for row in ROWS if row.kind == "image-text"}
    assert len(pictured) >= 97 and all(row.images for row in pictured.values())
    tested = {name: row for name, row in pictured.items() if row.images != NOT_TESTED}
    assert tested.keys() >= image_families.FAMILIES.keys() & pictured.keys() and "mllama" in tested
    assert all(row.is_right_with_images for name, row in tested.items() if name != "mllama") and len(tested) >= 22
    assert all(row.images_reason for row in pictured.values() if row.images not in ("native", "varlen"))
    leaking = {name for name, row in tested.items() if row.images_stock == "leaks"}
    assert leaking >= {"gemma3", "gemma4", "paligemma"}, "stock packs were right, so nothing was shown"
    assert "cross_attention_mask" in tested["mllama"].images_reason


def test_a_type_is_swept_with_images():
    right, leaks, untested = (sweep_type(name, "image-text") for name in ("llava", "gemma3", "kosmos-2"))
    assert (right.images, right.images_stock) == ("native", "isolated") and 0 < right.images_error < 1e-5
    assert (leaks.images, leaks.images_stock) == ("unpack only", "leaks") and leaks.images_stock_error > 0.1
    assert leaks.is_right_with_images and "leaks" not in leaks.images
    assert untested.images == NOT_TESTED and "names no processor" in untested.images_reason


def test_a_silent_leak_with_images_is_counted(monkeypatch):
    """Planted: a probe that sees no image, and attention that does not raise on the masks of images."""

    def blind(*args, images=None, **kwargs):
        return PackedModel(*args, **kwargs | {"enforce_flash_attention": False})

    monkeypatch.setattr(sweeping, "PackedModel", blind)
    row = sweep_type("gemma3", "image-text")
    assert row.images == "varlen" and row.false_negatives == 1 and not row.is_right_with_images


def test_the_page_is_made_of_the_table(tmp_path):
    compatibility.write(ROWS, tmp_path)
    assert compatibility.read(tmp_path) == ROWS
    page, made = ((folder / "compatibility.md").read_text().splitlines() for folder in (DOCS, tmp_path))
    tables = [[line for line in lines if line.startswith(("|", "-", "#"))] for lines in (page, made)]
    assert tables[0] == tables[1]


@pytest.mark.skipif(shutil.which("node") is None, reason="the table of the page is made by JavaScript: needs node")
def test_the_table_of_the_page_reads_and_filters_the_csv():
    script = """
        const { parseCsv, filterRows } = require(process.argv[1]);
        const [header, ...rows] = parseCsv(require("fs").readFileSync(process.argv[2], "utf8"));
        const verdict = { [header.indexOf("verdict")]: "repaired" };
        console.log(JSON.stringify([header, rows, filterRows(rows, ["gpt", "causal"], verdict)]));
    """
    command = ["node", "-e", script, str(DOCS / "javascripts" / "table.js"), str(DOCS / "compatibility.csv")]
    header, rows, found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    with (DOCS / "compatibility.csv").open(newline="") as file:
        assert [header, *rows] == list(csv.reader(file))
    assert {*compatibility.SHOWN, *compatibility.CHOICES} <= set(header)
    expected = [row for row in ROWS if row.verdict == "repaired" and row.kind == "causal" and "gpt" in row.model_type]
    assert {row[0] for row in found} >= {row.model_type for row in expected} != set()
    assert {row[header.index("verdict")] for row in found} == {"repaired"}


SAMPLE = compatibility.sample(ROWS, 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[pytest.mark.sweep] * (i % 3 > 0)) for i, row in enumerate(SAMPLE)],
    ids=lambda row: f"{row.model_type} {row.kind}",
)
def test_a_sample_of_the_sweep_comes_out_as_in_the_table(row):
    found = sweep_type(row.model_type, row.kind)
    assert found.verdict == row.verdict, found.reason
    assert (found.stock_trl, found.images, found.images_stock) == (row.stock_trl, row.images, row.images_stock)
    assert (found.false_negatives, found.false_positives) == (row.false_negatives, row.false_positives)


@current_models
def test_types_that_cannot_be_fed_with_text_are_named():
    row = sweep_type("musicgen")
    assert row.verdict == "no text" and "MusicgenConfig" in row.reason


def test_a_silent_leak_is_shouted():
    row = Row("x", "causal", "native", false_negatives=1)
    assert "SILENT LEAK" in compatibility.line(row) and not row.is_right
    assert "1 causal-LM types: 0 train packed" in compatibility.summary([row])


# The command line


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in ("llama", "bloom", "lfm2"):
        build_tiny_model(name).save_pretrained(folder / name)
    return folder


def test_check_a_model(saved, capsys):
    assert main(["check", str(saved / "llama")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Isolation check\n") and "verdict" in out and "PACKED" in out and "packfix_varlen" in out
    assert "flash_attention_2: flash-attn 2 is not installed" in out or torch.cuda.is_available()
    assert main(["check", str(saved / "lfm2")]) == 0
    assert re.search(r"\n *kernels +mixers run in torch.* `pip install causal-conv1d`", capsys.readouterr().out)


def test_a_leak_that_is_not_repaired_is_exit_code_1(saved, capsys):
    assert main(["check", str(saved / "bloom"), "--on-leak", "raise", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "LEAK" and not found["right"]
    assert "self_attention" in found["as_it_is"]["leaks"][0]["name"] and found["as_it_is"]["max_change"] > 1e-3


def test_a_leak_that_is_repaired_is_exit_code_0_and_needs_no_weights(saved, tmp_path, capsys):
    (tmp_path / "config.json").write_text((saved / "bloom" / "config.json").read_text())
    assert main(["check", str(tmp_path), "--config-only", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "REPAIRED" and "BloomAttention" in found["repaired"][0] and found["in_training"]["equal"]


@pytest.mark.parametrize("more", [{}, {"layer_pattern": "MEM*"}])
def test_a_text_is_not_cut_to_the_number_of_layers(more):
    """ "silu" in four layers is no list of layers; a pattern with a character for each is one."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 256}
    tiny = tiny_model(LlamaConfig(num_hidden_layers=4, **sizes, **more)).config
    assert tiny.num_hidden_layers == 2 and tiny.hidden_act == "silu" and getattr(tiny, "layer_pattern", "ME") == "ME"
