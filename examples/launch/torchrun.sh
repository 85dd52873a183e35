#!/usr/bin/env bash
# DDP on several nodes, or ZeRO and FSDP2 with the flags below, started on each node:
#   NNODES=2 HEAD=node-1 examples/launch/torchrun.sh
#   NNODES=2 HEAD=node-1 examples/launch/torchrun.sh --deepspeed deepspeed_configs/zero3.json
#   NNODES=2 HEAD=node-1 examples/launch/torchrun.sh --fsdp
#
# NNODES    number of nodes (default 1)
# HEAD      name of the first node; it must be reachable from all others (default localhost)
# PORT      a free port of the head node (default 29500)
# GPUS      processes on each node (default 8)
# TRAIN     the script to run (default examples/train.py)
set -euo pipefail

exec torchrun \
    --nnodes "${NNODES:-1}" \
    --nproc_per_node "${GPUS:-8}" \
    --rdzv_id "${RUN_ID:-trl_packfix}" \
    --rdzv_backend c10d \
    --rdzv_endpoint "${HEAD:-localhost}:${PORT:-29500}" \
    "${TRAIN:-examples/train.py}" "$@"
