"""`trl-packfix check`, and the table of all model types: each verdict is true."""

import csv
import json
import re
import shutil
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from support.features import PRESENT, needs
from support.launch import run_to_end
from support.models import build_tiny_model
from support.paths import DOCS
from support.versions import gemma3_leaks
from sweep import image_families
from sweep import model_types as sweeping
from sweep import page as compatibility
from sweep.model_types import NOT_TESTED, VERDICTS, sweep_type

from trl_packfix.cli import check_model
from trl_packfix.feature import PLAIN
from trl_packfix.isolation.packed_model import PackedModel

ROWS = compatibility.read(DOCS)


# The sweep


def test_the_table_keeps_the_promise():
    """docs/compatibility.csv covers every type of the transformers that made it, and holds no silent leak."""
    causal, pictured = ({row.model_type: row for row in ROWS if row.kind == kind} for kind in ("causal", "image-text"))
    assert len(causal) >= 196
    assert len(pictured) >= 100
    assert len(causal) + len(pictured) == len(ROWS)
    assert not any(row.false_negatives for row in ROWS)
    assert {row.verdict for row in ROWS} <= {*VERDICTS}
    assert sum(row.is_right for row in causal.values()) >= 189
    assert all(row.reason for row in ROWS if row.verdict in ("refused", "no text", "unpack only"))
    shared = {name: row.shared for name, row in causal.items() if row.verdict != "no text"}
    assert {*shared.values()} == {"yes", "no"}
    assert [*shared.values()].count("yes") >= 106
    isolated = {name: row for name, row in causal.items() if (row.verdict, row.stock_trl) == ("native", "isolated")}
    own_attention = [name for name, row in isolated.items() if row.attention != "packfix_varlen"]
    assert len(own_attention) >= 4
    assert {shared[name] for name in own_attention} == {"no"}  # they are right on whole packs only
    with_kernels = Counter(row.with_kernels for row in causal.values() if row.with_kernels)
    assert {*with_kernels} == {"native", "repaired"}
    assert with_kernels.total() >= 24
    assert with_kernels["native"] >= 20
    tested = {name: row for name, row in pictured.items() if row.images != NOT_TESTED}
    assert tested.keys() >= image_families.FAMILIES.keys() & pictured.keys()
    assert len(tested) >= 22
    assert [name for name, row in tested.items() if not row.is_right_with_images] == ["mllama"]
    assert all(row.images_reason for row in pictured.values() if row.images not in ("native", "varlen"))


@needs("images")
@gemma3_leaks
@needs("prefixes")
def test_a_silent_leak_is_counted(monkeypatch):
    """Plant a probe that sees no image, and attention that does not raise on the masks of images."""

    def blind(*args, feature=PLAIN, **kwargs):
        text_feature = PLAIN if feature.has_towers else feature
        return PackedModel(*args, feature=text_feature, **kwargs | {"enforce_flash_attention": False})

    monkeypatch.setattr(sweeping, "PackedModel", blind)
    row = sweep_type("gemma3", "image-text")
    assert row.images == "varlen"
    assert row.false_negatives == 1
    assert not row.is_right_with_images


def test_the_page_is_made_of_the_table(tmp_path):
    compatibility.write(ROWS, tmp_path)
    assert compatibility.read(tmp_path) == ROWS
    page, page_made = ((folder / "compatibility.md").read_text().splitlines() for folder in (DOCS, tmp_path))
    tables = [[line for line in lines if line.startswith(("|", "-", "#"))] for lines in (page, page_made)]
    assert tables[0] == tables[1]


@pytest.mark.skipif(shutil.which("node") is None, reason="the table of the page is made by JavaScript: needs node")
def test_the_table_of_the_page_reads_and_filters_the_csv():
    script = """
        const { parseCsv, filterRows } = require(process.argv[1]);
        const [header, ...rows] = parseCsv(require("fs").readFileSync(process.argv[2], "utf8"));
        const verdict = { [header.indexOf("verdict")]: "repaired" };
        console.log(JSON.stringify([header, rows, filterRows(rows, ["gpt", "causal"], verdict)]));
    """
    done = run_to_end("node", "-e", script, DOCS / "javascripts" / "table.js", DOCS / "compatibility.csv")
    header, rows, verdicts = json.loads(done.stdout)
    with (DOCS / "compatibility.csv").open(newline="") as file:
        assert [header, *rows] == list(csv.reader(file))
    assert {*compatibility.SHOWN, *compatibility.CHOICES} <= set(header)
    expected = [row for row in ROWS if row.verdict == "repaired" and row.kind == "causal" and "gpt" in row.model_type]
    assert {row[0] for row in verdicts} >= {row.model_type for row in expected} != set()
    assert {row[header.index("verdict")] for row in verdicts} == {"repaired"}


SAMPLE = compatibility.sample(ROWS, 16)


def marks_of(row, place):
    marks = [pytest.mark.sweep] if place % 4 else []
    # Types with kernels of their own mix tokens by more than attention
    return [*marks, needs("hybrids")] if row.with_kernels else marks


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=marks_of(row, i)) for i, row in enumerate(SAMPLE)],
    ids=lambda row: f"{row.model_type} {row.kind}",
)
def test_a_sample_of_the_sweep_comes_out_as_in_the_table(row):
    result = sweep_type(row.model_type, row.kind)
    assert result.verdict == row.verdict, result.reason
    assert (result.stock_trl, result.images, result.images_stock) == (row.stock_trl, row.images, row.images_stock)
    assert (result.false_negatives, result.false_positives) == (row.false_negatives, row.false_positives)


# The command line


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in ("llama", "bloom", *["lfm2"] * ("hybrids" in PRESENT)):
        build_tiny_model(name).save_pretrained(folder / name)
    return folder


def test_check_a_model(saved, output_of):
    out = output_of("check", saved / "llama")
    assert out.startswith("Isolation check\n")
    assert "verdict" in out
    assert re.search(r"\n *verdict +isolated: ", out)
    assert "packfix_varlen" in out
    assert "flash_attention_2: flash-attn 2 is not installed" in out or torch.cuda.is_available()


@pytest.mark.filterwarnings("ignore:enforce_flash_attention=False")
@pytest.mark.parametrize("flag", ["--no-enforce-flash-attention", "--enforce_flash_attention=false"])
def test_the_attention_of_the_model_is_kept_by_both_forms_of_the_flag(flag, saved, printed):
    assert printed("check", saved / "llama", flag)["attention"] == "sdpa"


@pytest.mark.parametrize("words", [[], ["--config-only"]])
def test_the_model_of_the_revision_is_tested(words, saved, monkeypatch, output_of):
    """Record what transformers is asked for, because no revision is in a folder."""
    revisions = []

    def recorded(load):
        def record(name, **options):
            revisions.append(options.get("revision"))
            return load(name, **options)

        return record

    read_config = SimpleNamespace(from_pretrained=recorded(check_model.AutoConfig.from_pretrained))
    monkeypatch.setattr(check_model, "AutoConfig", read_config)
    monkeypatch.setattr(check_model, "create_model_from_path", recorded(check_model.create_model_from_path))
    output_of("check", saved / "llama", "--model-revision", "v2", *words)
    assert revisions == ["v2"] * (1 if words else 2)
    of_run = ["--model-init-kwargs", '{"revision": "v3"}']
    output_of("check", saved / "llama", "--model-revision", "v2", *of_run, *words)
    assert revisions[-1] == "v3"


@pytest.mark.parametrize("words", [[], ["--config-only"]])
@pytest.mark.parametrize("name, value", [("attention", "eager"), ("dtype", "bfloat16")])
def test_model_init_kwargs_of_a_run_are_tested(name, value, words, saved, tmp_path, printed):
    settings = {"model_init_kwargs": {"attn_implementation" if name == "attention" else name: value}}
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    assert printed("check", saved / "llama", "--config", tmp_path / "run.yaml", *words)[name] == value


@pytest.mark.parametrize("settings", [{"dtype": "bf16"}, {"model_init_kwargs": {"dtype": "bf16"}}])
def test_an_unknown_dtype_is_exit_code_2(settings, saved, tmp_path, output_of):
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    out = output_of("check", saved / "llama", "--config", tmp_path / "run.yaml", code=2)
    assert "`dtype='bf16'` was given. torch has no type of this name" in out


@needs("hybrids")
def test_the_kernels_of_mixers_are_named(saved, output_of):
    out = output_of("check", saved / "lfm2")
    assert re.search(r"\n *kernels +mixers run in torch.* `pip install causal-conv1d`", out)


@pytest.mark.filterwarnings("ignore:enforce_flash_attention=False")
def test_the_answer_is_of_the_attention_that_is_asked_for(saved, printed, output_of):
    """It must name the attention of which it speaks, and say if training would run another."""
    eager = ("check", saved / "llama", "--attn_implementation", "eager")
    asked = printed(*eager)
    assert asked["attention"] == asked["as_it_is"]["attention"] == "eager"
    assert asked["attention_of_training"] == "packfix_varlen"
    assert re.search(r"\n *training +runs packfix_varlen in its place, unless you set", output_of(*eager))
    own_report = printed(*eager, "--enforce_flash_attention", "false")
    assert own_report["attention"] == own_report["as_it_is"]["attention"] == "eager"
    assert own_report["attention_of_training"] is None
    replaced = printed(*eager, "--enforce_flash_attention", "true")
    assert replaced["attention"] == replaced["as_it_is"]["attention"] == "packfix_varlen"
    assert "in place of the model's eager" in replaced["reason"]


def test_a_leak_that_is_not_repaired_is_exit_code_1(saved, printed):
    verdict = printed("check", saved / "bloom", "--on-leak", "raise", code=1)
    assert verdict["verdict"] == "leaks"
    assert not verdict["right"]
    assert "self_attention" in verdict["as_it_is"]["leaks"][0]["name"]
    assert verdict["as_it_is"]["max_change"] > 1e-3


def test_a_leak_that_is_repaired_is_exit_code_0_and_needs_no_weights(saved, tmp_path, printed):
    (tmp_path / "config.json").write_text((saved / "bloom" / "config.json").read_text())
    verdict = printed("check", tmp_path, "--config-only")
    assert verdict["verdict"] == "repaired"
    assert "BloomAttention" in verdict["repaired"][0]
    assert verdict["in_training"]["equal"]


@needs("prefixes")
def test_packs_with_shared_prefixes_are_tested(saved, printed):
    verdict = printed("check", saved / "llama", "--share-prefixes", "pack")
    assert verdict["verdict"] == "isolated"
    assert verdict["right"]
    assert verdict["settings"] == {"share_prefixes": "documents with a common prefix are what they are alone"}


@needs("prefixes")
@pytest.mark.parametrize(("setting", "code"), [("pack", 0), ("family", 1)])
def test_a_repaired_model_does_not_share_prefixes(saved, printed, setting, code):
    """With "pack" documents are then packed whole. Families are planned together, so training refuses them."""
    verdict = printed("check", saved / "bloom", "--share-prefixes", setting, code=code)
    assert verdict["verdict"] == "repaired"
    assert verdict["right"] == (code == 0)
    assert "these modules are repaired: 2 BloomAttention" in verdict["settings"]["share_prefixes"]
    assert verdict["refused_settings"] == ["share_prefixes"] * code


@pytest.mark.parametrize(("model", "code"), [("llama", 0), ("bloom", 1)])
def test_it_is_said_whether_ranks_can_share_packs_of_the_model(saved, printed, model, code):
    verdict = printed("check", saved / model, "--tokens-per-rank", 512, code=code)
    finding = "training refuses packs that ranks share" if code else "not tested: packs that ranks share"
    assert verdict["settings"]["tokens_per_rank"].startswith(finding)
    assert verdict["refused_settings"] == ["tokens_per_rank"] * code
