"""Where people wait, rank 0 says what is being done; other ranks, and runs with `disable_tqdm`, say nothing."""

import json
import re
from types import SimpleNamespace

import pytest
from support.examples import leaking_example
from support.models import build_tiny_model
from support.runs import run_training, texts

from trl_packfix.cli import main
from trl_packfix.training.progress import (
    USUAL_FORWARDS,
    announce_deepspeed_communication,
    announce_deepspeed_offloading,
    status_shown,
)


def printed_text(capsys, folder, model="llama", **settings) -> str:
    run_training(folder, texts(), model=model, max_steps=1, logging_steps=5, **settings)
    return capsys.readouterr().err


def test_progress_is_shown_on_rank_0_unless_switched_off(tmp_path, capsys):
    text = printed_text(capsys, tmp_path, disable_tqdm=False)
    assert "Cutting 40 rows into documents" in text
    assert "Planned packs of 40 documents" in text
    assert "Repairing" not in text
    assert "0:00:0" in text
    forwards = re.findall(r"Proving isolation on LlamaForCausalLM: forward (\d+)( of about \d+)?", text)
    assert int(forwards[-1][0]) == pytest.approx(USUAL_FORWARDS, rel=0.5)  # "about"
    assert [bool(about) for count, about in forwards] == [int(count) <= USUAL_FORWARDS for count, _ in forwards]
    assert not [line for line in printed_text(capsys, tmp_path).splitlines() if "Prov" in line or "Plan" in line]
    for rank, disabled in ((0, False), (0, True), (1, False)):
        with status_shown(SimpleNamespace(process_index=rank, disable_tqdm=disabled), "Working"):
            pass
        assert ("Working" in capsys.readouterr().err) == ((rank, disabled) == (0, False))


def test_a_repair_names_what_is_repaired(tmp_path, capsys):
    example = leaking_example()
    text = printed_text(capsys, tmp_path, model=example.model_type, disable_tqdm=False)
    model_class = type(build_tiny_model(example.model_type)).__name__
    assert f"Repairing {example.module} on {model_class}: forward " in text


def test_an_error_ends_the_display(capsys):
    with (
        pytest.raises(ValueError),
        status_shown(SimpleNamespace(process_index=0, disable_tqdm=False), "Working") as show,
    ):
        show("Working on another part")
        raise ValueError
    assert "another part" in capsys.readouterr().err


def test_plan_says_what_it_reads(tmp_path, capsys):
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text("5\n7\n9\n")
    files = [str(tmp_path / f"{name}.txt") for name in ("one", "two")]
    main(["plan", *files, "--max-length", "16", "--json"])
    captured = capsys.readouterr()
    assert [line for line in captured.err.splitlines() if line.startswith("Reading")] == [f"Reading {f}" for f in files]
    assert json.loads(captured.out)["plans"]


@pytest.mark.parametrize("extension", ["deepspeed_shm_comm", "cpu_adam"])
def test_what_deepspeed_compiles_is_said_once_on_rank_0(extension, tmp_path, capsys, monkeypatch):
    def compile_notice(device="cpu"):
        if extension == "cpu_adam":
            config = SimpleNamespace(get_value=lambda key: device)
            plugin = SimpleNamespace(hf_ds_config=config)
            announce_deepspeed_offloading(SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin)))
        else:
            monkeypatch.setattr("torch.accelerator.is_available", lambda: device != "cpu")
            announce_deepspeed_communication(SimpleNamespace(deepspeed="zero3.json"))
        return capsys.readouterr().err

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert re.fullmatch(rf"DeepSpeed compiles `{extension}` .* minutes.\n", compile_notice())
    assert not compile_notice("cuda")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not compile_notice()
    monkeypatch.delenv("LOCAL_RANK")
    (tmp_path / "cpu" / extension).mkdir(parents=True)
    (tmp_path / "cpu" / extension / f"{extension}.so").touch()
    assert not compile_notice()
