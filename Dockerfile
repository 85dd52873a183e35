# trl-packfix on machines with NVIDIA GPUs. Not built yet: it was written where there is no Docker and no GPU.
#   docker build --tag trl-packfix .
#   docker run --gpus all --ipc host --volume $PWD:/work --volume ~/.cache/huggingface:/models --env HF_HOME=/models \
#     trl-packfix train --config my.yaml
# On 8 GPUs: docker run ... --entrypoint deepspeed trl-packfix --num_gpus=8 --module trl_packfix train --config my.yaml
FROM python:3.11-slim
# Triton and DeepSpeed compile at the first use. The wheel of torch comes with the libraries of CUDA.
RUN apt-get update && apt-get install --yes --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY constraints.txt pyproject.toml README.md LICENSE ./
RUN pip install --no-cache-dir --constraint constraints.txt torch setuptools wheel
COPY trl_packfix trl_packfix
# DeepSpeed is built from source and imports torch.
RUN pip install --no-cache-dir --constraint constraints.txt --no-build-isolation ".[deepspeed]"
WORKDIR /work
ENTRYPOINT ["trl-packfix"]
