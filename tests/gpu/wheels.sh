#!/usr/bin/env bash
# Gather, as wheels for CPython 3.12 on x86-64, what a GPU machine without a package index lacks beside its own torch,
# numpy, pandas, pyarrow >= 24, accelerate and pytest. About 31 MB.
#
#   tests/gpu/wheels.sh DIR                                          # where there is an index; then, on that machine:
#   python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/site DIR/*.whl
#   PYTHONPATH=/tmp/site PYTHON=python3 tests/gpu/run.sh --evidence  # its first line has the versions, also of pyarrow
set -euo pipefail
dir=${1:?usage: wheels.sh DIR}
mkdir -p "$dir"
platforms=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
for n in 28 27 26 24 17; do platforms+=(--platform "manylinux_2_${n}_x86_64"); done
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" -d "$dir" \
    trl==1.16.0 peft==0.21.2 transformers==5.24.0 datasets==5.2.0 liger-kernel==0.8.5 dill==0.4.1 multiprocess==0.70.19 \
    fsspec==2026.9.0 hjson==3.1.0 pydantic==2.14.3 pydantic_core==2.50.4 annotated-types==0.8.0 typing-inspection==0.4.5 \
    typing-extensions huggingface_hub==2.4.0 tokenizers==0.23.3 hf-xet==1.8.0 httpx2 httpcore2 h11 truststore click rich \
    markdown-it-py mdurl
DS_BUILD_OPS=0 python3 -m pip wheel -q deepspeed==0.19.8 --no-deps --no-build-isolation -w "$dir"
du -sh "$dir"
