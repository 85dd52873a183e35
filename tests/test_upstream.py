"""Each defect in dev/upstream.md is there on the tested versions, and has a program.

`python dev/upstream/verify.py` also runs the programs of several processes, and each with its patch.
"""

import importlib.util
import re
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
from support.launch import run_to_end
from support.paths import ROOT

PROGRAMS = sorted(file for file in (ROOT / "dev/upstream").glob("*.py") if file.name != "verify.py")
PINNED = dict(re.findall(r"^(\w+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
# Defects are those of the tested versions
pytestmark = pytest.mark.skipif(
    any(version(name) != PINNED[name] for name in ("trl", "transformers", "accelerate", "peft")),
    reason="dev/upstream.md is about the versions in constraints.txt",
)


@pytest.mark.skipif(not shutil.which("patch"), reason="needs the program `patch`")
@pytest.mark.parametrize("patch", sorted(ROOT.glob("dev/upstream/*.patch")), ids=lambda file: file.stem)
def test_a_patch_fits_the_tested_versions(patch, tmp_path):
    """Whether it mends the defect is what `python dev/upstream/verify.py` says."""
    names = re.findall(r"^--- a/(\S+)", patch.read_text(), re.MULTILINE)
    assert names
    for name in names:
        spec = importlib.util.find_spec(name.partition("/")[0])
        if spec is None:
            pytest.skip(f"{name} is not installed")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(spec.origin).parent.parent / name, tmp_path / name)
    run_to_end("patch", "-p1", "--fuzz=0", "-i", patch, cwd=tmp_path)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda file: file.stem)
def test_a_defect_is_still_there(program, capsys):
    code = program.read_text()
    if "torchrun" in code:
        pytest.skip("takes two ranks: `python dev/upstream/verify.py`")
    if "import bitsandbytes" in code or "from bitsandbytes" in code:
        pytest.importorskip("bitsandbytes")
    exec(compile(code, str(program), "exec"), {})
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("still there: True"), (
        f"{last!r}: the library has mended it. Remove the program, its patch and its section in dev/upstream.md, and "
        "what trl_packfix does about it where no supported version needs it."
    )
