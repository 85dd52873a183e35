"""Run each reproduction on the installed libraries and with its patch, applied to a copy of the library.

python dev/upstream/verify.py                     # all, about 4 CPU minutes
python dev/upstream/verify.py deep_copy eval_loss

Exit code 0 if each defect is there and its patch mends it; 1 if not.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = re.compile(r"^--- a/(\w+)/", re.MULTILINE)


def patched(patch: Path, folder: Path) -> bool:
    """Copy the library that a patch is for into `folder` and apply the patch; False if it is not installed."""
    library = LIBRARY.search(patch.read_text())[1]
    found = importlib.util.find_spec(library)
    if found is None:
        return False
    shutil.copytree(Path(found.origin).parent, folder / library, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["patch", "-p1", "--quiet", "--fuzz=0", "-i", patch.resolve()], cwd=folder, check=True)
    return True


def outcome(program: Path, folder: Path) -> str:
    """The last line that a program prints, with the libraries in `folder` before the installed ones."""
    ranks = re.search(r"^torchrun --nproc_per_node (\d)", program.read_text(), re.MULTILINE)
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", ranks[1]] if ranks else []
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    settings = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *launcher, program], env=settings, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if "still there:" in line]
    return lines[-1] if lines else f"{done.stdout[-500:]}{done.stderr[-1500:]}"


def main(names: list[str]) -> int:
    programs = [file for file in sorted(HERE.glob("*.py")) if file.with_suffix(".patch").exists()]
    bad = 0
    for program in [file for file in programs if not names or file.stem in names]:
        with tempfile.TemporaryDirectory() as folder:
            stock = outcome(program, Path(folder))
            if not patched(program.with_suffix(".patch"), Path(folder)):
                print(f"{program.stem}: its library is not installed", flush=True)
                continue
            mended = outcome(program, Path(folder))
        print(f"{program.stem}: {stock}\n{' ' * len(program.stem)}  with the patch: {mended}", flush=True)
        bad += not (stock.endswith("True") and mended.endswith("False"))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
