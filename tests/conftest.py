"""What every test may use: the `--data` folder, a tiny tokenizer and tiny random models."""

import support  # noqa: F401 # isort: skip - sets the environment before torch is imported
import gc
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from hypothesis import settings
from packaging.version import Version
from support.models import build_tiny_model, build_tokenizer
from support.versions import TRANSFORMERS
from transformers import PreTrainedTokenizerFast

from trl_packfix.cli import main

# A loaded machine takes longer than hypothesis allows by default
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--data", metavar="DIR", help="folder of real JSONL datasets; tests that need it skip without")


def pytest_configure(config: pytest.Config) -> None:
    """Set one folder for what DeepSpeed compiles, a minute of CPU time, in all tests of this run.

    It is not the common one of the user: after a build that was killed its lock is left, and DeepSpeed waits for ever.
    """
    if not hasattr(config, "workerinput"):  # workers inherit it
        folder = tempfile.TemporaryDirectory(prefix="extensions")
        os.environ["TORCH_EXTENSIONS_DIR"] = folder.name
        config.add_cleanup(folder.cleanup)


# The files that take longest begin, so that no worker waits for one at the end
LONGEST = """test_on_ranks test_distributed test_equivalence test_launch test_examples test_configs test_types
    test_mixers test_pack_forward test_gpu_tools test_restart test_objective test_streaming test_plan
    test_check""".split()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip tests of image processors that need torchvision: those of idefics and smolvlm below transformers 5.20.

    In later versions they need PIL alone, and a missing package is an error here.
    """
    try:
        return (yield)
    except ImportError as error:
        if Version("5.20") > TRANSFORMERS and "requires the Torchvision library" in str(error):
            pytest.skip("this image processor needs torchvision in transformers below 5.20")
        raise


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda test: LONGEST.index(test.path.stem) if test.path.stem in LONGEST else len(LONGEST))
    if torch.cuda.is_available() or os.environ.get("GPU_TESTS_ON_CPU"):  # the latter tests the tests only
        return
    for test in items:
        if test.get_closest_marker("gpu"):
            test.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))


def forget_precision() -> None:
    """accelerate remembers the precision of the first trainer of a process, in its state and in the environment.

    And a training that fails in its forward may leave autocast on (Llama 4 in stock TRL does).
    """
    AcceleratorState._reset_state()
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    torch.set_autocast_enabled("cpu", False)


@pytest.fixture(scope="module", autouse=True)
def start_of_a_file() -> None:
    """Freeze what was imported: each training calls the garbage collector, which takes 0.3 seconds for it."""
    forget_precision()
    gc.collect()
    gc.freeze()


@pytest.fixture
def precision_of_its_own() -> Iterator[None]:
    """Allow the trainers of a test another precision than those of its file."""
    forget_precision()
    yield
    forget_precision()


@pytest.fixture(scope="session")
def data_dir(request: pytest.FixtureRequest) -> Path:
    """Return the folder that is given with `--data`."""
    folder = request.config.getoption("--data")
    if folder is None:
        pytest.skip("needs real datasets: run pytest with --data DIR")
    if not Path(folder).is_dir():
        pytest.fail(f"--data {folder}: no such folder")
    return Path(folder)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a shared tokenizer of one token per byte, with ChatML and generation markers.

    Do not change it; `build_tokenizer` makes another.
    """
    return build_tokenizer()


@pytest.fixture(scope="session")
def tiny_model():
    """Return the factory `build_tiny_model(model_type="llama", seed=0, dtype=torch.float32, **config)`."""
    return build_tiny_model


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the hub's names of README and examples are a tiny model and 40 conversations."""
    folder = tmp_path_factory.mktemp("workplace")
    for saved_object in (build_tiny_model("qwen3"), build_tokenizer()):
        saved_object.save_pretrained(folder / "Qwen" / "Qwen3-0.6B")
    (folder / "trl-lib" / "Capybara").mkdir(parents=True)
    turns = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "yes "}]
    rows = [{"messages": [*turns[:1], turns[1] | {"content": "yes " * (1 + i % 5)}]} for i in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rows = [{"messages": turns * (1 + i % 2), "source": "ab"[i % 2]} for i in range(40)]
    (folder / "trl-lib" / "Capybara" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture
def run_command(capsys):
    """Return a function that runs a command of the package, checks its exit code and returns (stdout, stderr)."""

    def run(*words, code=0):
        capsys.readouterr()
        assert main([*map(str, words)]) == code
        return capsys.readouterr()

    return run


@pytest.fixture
def output_of(run_command):
    """Return a function that runs a command as `run_command` does, and returns all that it writes."""
    return lambda *words, code=0: "".join(run_command(*words, code=code))


@pytest.fixture
def printed(run_command):
    """Return a function that runs a command as `run_command` does, and returns the JSON it prints."""
    return lambda *words, code=0: json.loads(run_command(*words, "--json", code=code).out)
