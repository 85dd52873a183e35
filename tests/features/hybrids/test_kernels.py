"""Hybrid models on transformers' path with kernels, without a GPU: `on_kernels.py` in a process, and its stand-ins."""

import csv
import importlib
import re
import subprocess
import sys

import pytest
import torch
from support.launch import LAUNCH_SECONDS, environment, rows_of
from support.paths import ROOT
from support.versions import current_models

SITE = ROOT / "tests" / "support" / "kernel_site"
TRITON = ROOT / "tests" / "features" / "hybrids" / "on_triton.py"
CONVOLUTION = "causal_conv1d_fn(seq_idx)"
DELTA = {CONVOLUTION, "chunk_gated_delta_rule(cu_seqlens)"}
MAMBA2 = {CONVOLUTION, "mamba_split_conv1d_scan_combined(seq_idx)"}
MAMBA1 = {CONVOLUTION, "selective_scan_fn()"}
# The kernels that a pack reaches, and the boundaries that they get
CALLS = {
    "qwen3_5_text": DELTA, "olmo_hybrid": DELTA, "lfm2": {CONVOLUTION}, "bamba": MAMBA2, "falcon_h1": MAMBA2,
    "nemotron_h": MAMBA2, "jamba": MAMBA1,
    # transformers 5.24 does not pass the boundaries on to its scan
    "kimi_linear": {CONVOLUTION, "chunk_kda(cu_seqlens)"},
}  # fmt: skip


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Return the rows of each command. One process runs all, because it imports for seconds."""
    folder = tmp_path_factory.mktemp("kernels")
    words = ["rounding", "bamba"]
    if not current_models.args[0]:
        words += ["--", "judge", *CALLS, "--", "reads", "lfm2", "bamba", "jamba"]
        words += ["--", "train", str(folder / "output"), "bamba", "kimi_linear"]
    rows = rows_of("features/hybrids/on_kernels.py", folder, *words)
    return {name: [row for row in rows if row["command"] == name] for name in ("rounding", "judge", "reads", "train")}


@pytest.mark.slow
@pytest.mark.processes
@current_models
@pytest.mark.parametrize("model_type", CALLS)
def test_documents_are_what_they_are_alone_on_the_kernels(model_type, tables):
    """They must be so in fp64 to rounding: nothing is repaired, and no document reaches another.

    This must hold for documents that share prefixes, too.
    """
    (row,) = [row for row in tables["judge"] if row["type"] == model_type]
    assert row == row | {"proved": True, "right": True, "unpacked": False, "repairs": [], "silent": []}
    assert row["exact"] < 1e-13
    assert set(row["calls"]) == CALLS[model_type]
    if model_type == "jamba":
        assert "a scan that cannot begin with the state of a prefix" in row["shared_refusal"]
        return
    assert 0 < row["shared"] < 1e-13
    assert any("initial_state" in call for call in row["shared_calls"]) is (model_type != "lfm2")


@pytest.mark.slow
@pytest.mark.processes
def test_what_the_kernel_of_mamba2_rounds_is_no_leak(tables):
    """It sums decays over documents, so gradients of others cancel up to rounding only."""
    (row,) = tables["rounding"]
    assert row == row | {"isolated": True, "equal": True, "gradient": 0.0, "strictly": False}
    assert row["strict_gradient"] > 0


@pytest.mark.slow
@pytest.mark.processes
@current_models
def test_trainings_on_the_kernels_end_as_unpacked_ones(tables):
    """Train full and LoRA, without and with a kind of checkpointing each, against padded rows of unpacked training."""
    rows = tables["train"]
    assert [row["type"] for row in rows] == ["bamba"] * 4 + ["kimi_linear"] * 4
    for row in rows:
        assert row == row | {"repaired": [], "silent": [], "still": []}
        fuses = any("split" in call for call in row["calls"])
        assert fuses is (row["type"] == "bamba" and not row["lora"]), row
        if row["type"] == "bamba" and row["lora"]:  # without packing the fused kernel leaves adapters out
            assert "No adapter of `base_model.model.model.layers.*.mamba.out_proj` got a gradient" in row["refusal"]
        else:
            assert row["refusal"] is None, row
            assert row["error"] < 1e-3, row
    for full, recomputed, lora, recomputed_lora in (rows[:4], rows[4:]):
        assert full["error"] == recomputed["error"] < 1e-5
        assert lora["moved"] == recomputed_lora["moved"]


@pytest.mark.slow
@pytest.mark.processes
@current_models
def test_kernels_with_boundaries_need_no_read_of_the_host(tables):
    """Boundaries go to all kernels but the scan of Mamba-1, for which the host makes rows once per pack."""
    rows = {row["type"]: row for row in tables["reads"]}
    assert rows.keys() == {"lfm2", "bamba", "jamba"}
    for name, row in rows.items():
        ours = {place: number for place, number in row["reads"].items() if not place.startswith("transformers/")}
        assert ours == ({"attention/packed_forward.py:bounds": 1.0} if name == "jamba" else {}), row
        assert CONVOLUTION in row["calls"]
        assert row == row | {"repaired": [], "silent": []}


@pytest.mark.slow
@pytest.mark.processes
@current_models
def test_the_comparison_on_triton_kernels_finds_leaks(tmp_path):
    """Run each case of `tools/kernels.sh` on stand-ins, as it is and with a leak."""
    command = [sys.executable, str(TRITON), "--stand-ins", "--leak", "--csv", str(tmp_path / "found.csv")]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=LAUNCH_SECONDS)
    rows = list(csv.DictReader((tmp_path / "found.csv").open()))
    assert done.returncode == 1, done.stderr[-3000:]
    assert [row["triton"] for row in rows] == ["stand-in"] * 10
    for row in rows:
        assert (row["right"] == "yes") is (row["leaks"] == ""), row
        assert (float(row["error"]) > 0.05) is (row["leaks"] == "by design"), row


def test_what_the_kernels_gave_is_of_the_versions_that_it_installs():
    """Look for all cases of the script in the newest table, on the versions of the script's constraints."""
    pinned = dict(re.findall(r"^([\w-]+)==(.+)$", (ROOT / "constraints-kernels.txt").read_text(), re.MULTILINE))
    rows = list(csv.DictReader(max((ROOT / "benchmarks/results").glob("triton_kernels_*.csv")).open()))
    right = {row["case"] for row in rows if not row["leaks"] and row["right"] == "yes"}
    assert right >= {"qwen3_5_text", "kimi_linear", "bamba", "qwen3_5_text prefixes", "bamba prefixes"}
    assert all(row["right"] == "NO" for row in rows if row["leaks"])
    for name in ("triton", "flash-linear-attention", "mamba_ssm"):
        assert {row[name] for row in rows} == {pinned[name]}


# The stand-ins themselves


@pytest.fixture
def site(monkeypatch):
    monkeypatch.syspath_prepend(str(SITE))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_the_stand_in_of_a_scan_refuses_and_records(site):
    scan = site("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    in_chunks = site("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    heads = [torch.randn(2, 6, 2, 4) for _ in range(3)]
    gates = [-torch.rand(2, 6, 2), torch.rand(2, 6, 2)]
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32)
    with pytest.raises(ValueError, match="batch size is expected to be 1 rather than 2"):
        scan(*heads, *gates, cu_seqlens=bounds)
    one = [x[:1] for x in (*heads, *gates)]
    scan(*one, cu_seqlens=bounds)
    assert site("strict").silent == []
    scan(*one, cu_seqlens=bounds[:2])
    assert "do not cover 6 tokens" in site("strict").silent[0]
    states = torch.randn(1, 6, 2, 4)
    with pytest.raises(AssertionError):
        in_chunks(states, states[..., 0], torch.ones(3), states, states, chunk_size=4)
