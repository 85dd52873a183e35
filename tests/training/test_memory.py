"""What a run says of the memory of a GPU. The GPU's counts are stand-ins; what checkpointing saves is predicted."""

from peft import LoraConfig
from support.models import build_tiny_model
from support.runs import run_training, texts

from trl_packfix.data.model_memory import GIB, TrainingMethod, count_model, predict_peak
from trl_packfix.training import memory
from trl_packfix.training.memory import MeasuredMemory

LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


NOTHING = MeasuredMemory(0, 0, 80 * GIB)


def line_of_run(folder, monkeypatch, measured, before=NOTHING, **settings):
    """Return the line of the report of a run whose GPU has the counts `measured` after its steps, and the run."""
    counts = iter([before, measured])
    monkeypatch.setattr(memory, "read_memory", lambda device: next(counts))
    settings = {"gradient_checkpointing": True, "max_steps": 2} | settings
    trainer = run_training(folder, texts(), peft_config=LORA, **settings)
    return trainer.packing_report.memory, trainer


def test_the_first_steps_say_that_checkpointing_is_not_needed(tmp_path, monkeypatch, capsys):
    measured = MeasuredMemory(30 * GIB, 31 * GIB, 80 * GIB)
    line, _ = line_of_run(tmp_path, monkeypatch, measured, packing_report=True)
    assert line == (
        "peak of the first 2 steps 30.0 GiB in tensors, 31.0 reserved, of 80; fits without gradient checkpointing "
        "(30 of 80 GiB): about 1.4 times faster"
    )
    assert f"memory: {line}" in capsys.readouterr().out
    assert "30.0 GiB in tensors" in (tmp_path / "packing_report.json").read_text()


def test_nothing_is_said_if_it_does_not_fit(tmp_path, monkeypatch):
    """Add what checkpointing saves of a full micro-batch to what the GPU took."""
    method = TrainingMethod(lora=True, engine="DDP")
    sizes = count_model(build_tiny_model().config, method, LORA)
    peaks = [predict_peak(sizes, method, tokens=128, gpus=1, checkpointing=is_on).total for is_on in (False, True)]
    saved = peaks[0] - peaks[1]
    assert saved > 0
    measured = MeasuredMemory(int(79 * GIB - saved / 2), 79 * GIB, 80 * GIB)
    line, _ = line_of_run(tmp_path, monkeypatch, measured)
    assert line == "peak of the first 2 steps 79.0 GiB in tensors, 79.0 reserved, of 80"


def test_nothing_is_said_without_checkpointing(tmp_path, monkeypatch):
    measured = MeasuredMemory(30 * GIB, 31 * GIB, 80 * GIB)
    line, _ = line_of_run(tmp_path, monkeypatch, measured, gradient_checkpointing=False)
    assert line == "peak of the first 2 steps 30.0 GiB in tensors, 31.0 reserved, of 80"


def test_the_peak_of_an_earlier_training_is_not_that_of_these_steps(tmp_path, monkeypatch):
    """The counts of the GPU are those of the process."""
    peak = MeasuredMemory(30 * GIB, 31 * GIB, 80 * GIB)
    line, _ = line_of_run(tmp_path, monkeypatch, peak, before=peak, gradient_checkpointing=False)
    assert line == "the first 2 steps take no more than was taken before: 30.0 GiB in tensors, 31.0 reserved, of 80"


def test_a_cpu_has_no_such_line(tmp_path):
    trainer = run_training(tmp_path, texts(), max_steps=2)
    assert trainer.packing_report.memory is None
