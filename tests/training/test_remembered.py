"""What was proved of a model is remembered beside the dataset, and proved again where anything has changed."""

import os
import sys
from functools import cache
from importlib import import_module
from types import ModuleType
from unittest import mock

import pytest
import torch
import transformers
from datasets import load_from_disk
from peft import LoraConfig
from ranks import faults
from support.examples import leaking_example
from support.features import PRESENT
from support.launch import fork_ranks
from support.models import build_tiny_model
from support.runs import run_training, weights
from training.test_first_step import rows

from trl_packfix import PackingLeakError, check_isolation
from trl_packfix.isolation.check_isolation import ProbeMeasurement
from trl_packfix.training import remembered


@pytest.fixture
def folder(tmp_path):
    rows().save_to_disk(tmp_path / "data")
    return tmp_path


def start_training(folder, model_type="llama", peft_config=None, **settings):
    """Start on the same table, and return the trainer and how many models it has proved."""
    model = build_tiny_model(model_type, vocab_size=64)
    settings = {"max_length": 256, "max_steps": 1, "gradient_checkpointing": True} | settings
    with mock.patch.object(
        ProbeMeasurement, "__init__", autospec=True, side_effect=ProbeMeasurement.__init__
    ) as proves:
        data = load_from_disk(folder / "data")
        trainer = run_training(folder, data, model, peft_config=peft_config, **settings)
    return trainer, proves.call_count


@pytest.fixture
def tf32():
    """Set TF32 as `tf32=True` sets it on CUDA: torch refuses to read it by its older name."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = "none"


def test_the_second_start_proves_nothing_and_trains_the_same(folder, tf32):
    settings = {"share_prefixes": "pack"} if "prefixes" in PRESENT else {}
    first, proofs = start_training(folder, **settings)
    assert proofs == 1 + len(settings)
    assert first.packing_report.isolation.proved_on is None
    second, proofs = start_training(folder, **settings)
    assert proofs == 0
    assert "same model and versions" in dict(second.packing_report.lines())["isolation"]
    assert "packed" in dict(second.packing_report.lines())["first step"]
    assert torch.equal(weights(first), weights(second))


SETTINGS = {
    "adapters": {"peft_config": LoraConfig(target_modules="all-linear", r=2)},
    "dtype": {"bf16": True},
    "length": {"max_length": 128},
    "attention": {"enforce_flash_attention": False},
    "noise": {"neftune_noise_alpha": 5.0},
}


@pytest.mark.parametrize("changed", SETTINGS.values(), ids=SETTINGS)
def test_a_run_with_other_settings_proves_again(folder, changed):
    start_training(folder)
    assert start_training(folder, **changed)[1] == 1


def test_what_is_repaired_or_damaged_is_proved_again(folder):
    repaired, _ = start_training(folder, leaking_example().model_type)
    assert repaired.packing_report.isolation.repaired
    assert not [*(folder / "data").glob("*proof*")]
    start_training(folder)
    (file,) = (folder / "data").glob("*proof*")
    right = file.read_bytes()
    for content in (b"", right[:-5], right.replace(b"1", b"0")):
        file.write_bytes(content)
        assert start_training(folder)[1] == 1
        assert file.read_bytes() == right


def test_a_leak_that_came_since_is_found_by_the_first_step(folder):
    """Boundaries are lost in a function that no hash sees."""
    start_training(folder, on_leak="raise")
    with (
        faults.BEHIND_PROOF["one_document"](),
        pytest.raises(PackingLeakError, match="were trained packed and unpacked"),
    ):
        start_training(folder, on_leak="raise")


class Wrapper(torch.nn.Module):
    """An engine around a model."""

    def __init__(self, model):
        super().__init__()
        self.module = model

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


class OtherWrapper(Wrapper):
    """Have the code of `Wrapper` under another name."""


@cache
def check_isolation_once():
    return check_isolation(build_tiny_model("llama", vocab_size=64))


def recalls(folder, change=None, *, settings="settings", case="case", wrapper=Wrapper):
    """Return whether a proof is remembered of a tiny model after a change."""
    model = build_tiny_model("llama", vocab_size=64)
    if change is not None:
        change(model)
    report = mock.Mock(side_effect=check_isolation_once)
    remembered.recall_proof(wrapper(model), report, folder=folder, settings=settings, model=model, case=case)
    return not report.called


class OtherLlama(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def set_class(kind):
    return lambda model: setattr(model, "__class__", kind)


def set_in_module(name, value):
    return lambda model: setattr(model.model.norm, name, value)


def add_buffer(dtype):
    return lambda model: model.register_buffer("counter", torch.zeros(3, dtype=dtype))


CHANGES = {
    "a bool of a module": [set_in_module("flag", flag) for flag in (False, True)],
    "an int": [set_in_module("size", size) for size in (7, 8)],
    "a float": [set_in_module("epsilon", epsilon) for epsilon in (0.5, 0.25)],
    "a text": [set_in_module("mode", mode) for mode in ("left", "right")],
    "a value that is set": [set_in_module("window", window) for window in (None, (4, 4))],
    "the forward of a module": [None, set_in_module("forward", lambda states: states)],
    "the class of the model": [None, set_class(OtherLlama)],
    "the config of the model": [None, lambda model: setattr(model.config, "sliding_window", 7)],
    "a hook before a forward": [
        lambda model: model.model.norm.register_forward_pre_hook(lambda module, args: (args[0] * 1.0,)),
        lambda model: model.model.norm.register_forward_pre_hook(lambda module, args: (args[0] * 2.0,)),
    ],
    "a hook behind a forward": [
        lambda model: model.model.norm.register_forward_hook(lambda module, args, output: output * 1.0),
        lambda model: model.model.norm.register_forward_hook(lambda module, args, output: output * 2.0),
    ],
    "parameters that are trained": [
        lambda model: model.requires_grad_(True),
        lambda model: model.lm_head.requires_grad_(False),
    ],
    "the dtype of a buffer": [add_buffer(torch.float32), add_buffer(torch.float64)],
}


@pytest.mark.parametrize("before, after", CHANGES.values(), ids=CHANGES)
def test_what_decides_a_proof_is_in_its_key(tmp_path, before, after):
    assert not recalls(tmp_path, before)
    assert recalls(tmp_path, before)
    assert not recalls(tmp_path, after)


EDITED = """
import transformers
from edited_ops import SCALE
__version__ = "1.0"
class Edited(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)
"""


def test_code_beside_that_of_a_module_is_in_the_key_of_a_proof(tmp_path, monkeypatch):
    """Code that is edited in place keeps its version."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "edited_ops.py").write_text("SCALE = 1.0\n")
    (tmp_path / "edited_model.py").write_text(EDITED)
    change = set_class(import_module("edited_model").Edited)
    assert [recalls(tmp_path, change) for _ in range(2)] == [False, True]
    (tmp_path / "edited_ops.py").write_text("SCALE = 1.5\n")
    assert not recalls(tmp_path, change)


def notebook_class(scale):
    """Return a class without a file, as typed in a notebook, which calls a method of its own."""
    code = f"""
class Typed(Base):
    def forward(self, *args, **kwargs):
        return self.scaled(super().forward(*args, **kwargs))
    def scaled(self, output):
        output.logits = output.logits * {scale}
        return output
"""
    module = sys.modules["typed"] = ModuleType("typed")
    module.Base = transformers.LlamaForCausalLM
    exec(code, vars(module))
    return module.Typed


def test_a_class_without_a_file_is_known_by_all_its_methods(tmp_path):
    assert [recalls(tmp_path, set_class(notebook_class(scale))) for scale in (1.0, 1.0, -1.0)] == [False, True, False]


def test_other_code_of_this_package_proves_again(tmp_path, monkeypatch):
    """`PREPARATION_SOURCE_HASH` is a hash of every file of the package (tests/planning/test_epochs.py)."""
    assert not recalls(tmp_path)
    monkeypatch.setattr(remembered, "PREPARATION_SOURCE_HASH", "of another version")
    assert not recalls(tmp_path)


def test_a_kernel_that_is_installed_proves_again(tmp_path, monkeypatch):
    """It is not loaded before it runs, so no module has its version."""
    monkeypatch.syspath_prepend(tmp_path)
    installed = tmp_path / "causal_conv1d-1.6.0.dist-info"
    installed.mkdir()
    assert [recalls(tmp_path) for _ in range(2)] == [False, True]
    installed.rename(tmp_path / "causal_conv1d-1.6.1.dist-info")
    assert not recalls(tmp_path)


def test_the_run_is_in_the_key_of_a_proof(tmp_path):
    assert not recalls(tmp_path)
    assert recalls(tmp_path)
    assert not recalls(tmp_path, case="a degree of 2")
    assert not recalls(tmp_path, settings="other settings")
    assert not recalls(tmp_path, wrapper=OtherWrapper), "the wrapper is not in the key"


def test_a_forward_that_is_replaced_in_a_class_is_in_the_key_of_a_proof(tmp_path, monkeypatch):
    assert not recalls(tmp_path)
    monkeypatch.setattr(Wrapper, "forward", lambda self, *args, **kwargs: None)
    assert not recalls(tmp_path)


def test_the_dtype_of_autocast_is_in_the_key_of_a_proof(tmp_path):
    with torch.autocast("cpu", torch.bfloat16):
        assert not recalls(tmp_path)
        assert recalls(tmp_path)
    with torch.autocast("cpu", torch.float16):
        assert not recalls(tmp_path)


def test_which_package_has_a_version_is_in_the_key_of_a_proof(tmp_path, monkeypatch):
    def install(**versions):
        for name, version in versions.items():
            package = ModuleType(name)
            package.__version__ = version
            monkeypatch.setitem(sys.modules, name, package)

    install(first_kernel="1.0", second_kernel="2.0")
    assert not recalls(tmp_path)
    assert recalls(tmp_path)
    install(first_kernel="2.0", second_kernel="1.0")
    assert not recalls(tmp_path)


def test_a_class_of_the_main_program_needs_no_file(tmp_path, monkeypatch):
    """In a notebook `inspect` raises another error for such a class than for a module without a file."""
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    kind = type("Typed", (Wrapper,), {"__module__": "__main__"})
    assert not recalls(tmp_path, wrapper=kind)
    assert recalls(tmp_path, wrapper=kind)


@pytest.mark.processes
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_ranks_prove_unless_all_of_them_remember(tmp_path):
    """On nodes with disks of their own; else one rank would wait in a forward that the other leaves out."""

    def load_rows_on_rank():
        rank_folder = tmp_path / os.environ["RANK"]
        rows().save_to_disk(rank_folder / "data")
        proofs = [start_training(rank_folder)[1], start_training(rank_folder)[1]]
        if os.environ["RANK"] == "1":
            next((rank_folder / "data").glob("*proof*")).unlink()
        assert [*proofs, start_training(rank_folder)[1]] == [1, 0, 1]

    assert fork_ranks(2, load_rows_on_rank)
