"""Each defect in dev/upstream.md is there on the tested versions, and has a short program and a patch that applies.

`python dev/upstream/verify.py` also runs the programs of several processes, and each with its patch.
"""

import importlib.util
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAMS = sorted(file for file in (ROOT / "dev/upstream").glob("*.py") if file.name != "verify.py")
PAGE = (ROOT / "dev" / "upstream.md").read_text()
PINNED = dict(re.findall(r"^(\w+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
# Defects and patches are those of the tested versions
pytestmark = pytest.mark.skipif(
    any(version(name) != PINNED[name] for name in ("trl", "transformers", "accelerate", "peft")),
    reason="dev/upstream.md is about the versions in constraints.txt",
)


def test_the_page_and_the_programs_name_the_same_defects():
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == {file.stem for file in PROGRAMS}
    assert len(PROGRAMS) > 10


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda file: file.stem)
def test_a_program_is_short_and_its_patch_applies(program):
    text = program.read_text()
    assert "trl_packfix" not in text
    lines = text.split('"""', 2)[2].strip().splitlines()
    assert len([line for line in lines if line]) <= 30
    patch = program.with_suffix(".patch")
    library = re.search(r"^--- a/(\w+)/", patch.read_text(), re.MULTILINE)[1]
    found = importlib.util.find_spec(library)
    if found is None:
        pytest.skip(f"{library} is not installed")
    command = ["patch", "-p1", "--dry-run", "--force", "--fuzz=0", "-i", patch]
    run = subprocess.run(command, cwd=Path(found.origin).parent.parent, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


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
