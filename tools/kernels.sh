#!/usr/bin/env bash
# The real Triton kernels of hybrid models and of Liger on packs, by Triton's interpreter (6 CPU minutes).
# transformers uses these kernels wherever they are installed, so they have an environment of their own, which sees the
# packages of the tested one. mamba_ssm comes without its CUDA extension: only its Triton code runs here.
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
make .venv/.installed
kernels=.venv-kernels
if [ ! -e $kernels/.installed ] || [ constraints-kernels.txt -nt $kernels/.installed ]; then
    packages='import sysconfig; print(sysconfig.get_path("purelib"))'
    .venv/bin/python -m venv $kernels
    echo "import site; site.addsitedir('$(.venv/bin/python -c "$packages")')" > "$($kernels/bin/python -c "$packages")/tested.pth"
    MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE $kernels/bin/python -m pip install --quiet --no-deps \
        --no-build-isolation --no-binary mamba_ssm --requirement constraints-kernels.txt
    touch $kernels/.installed
fi
$kernels/bin/python tests/features/hybrids/on_triton.py "$@"
$kernels/bin/python -m pytest -q tests/training/test_liger.py -k triton
