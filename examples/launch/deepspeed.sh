#!/usr/bin/env bash
# ZeRO-3 on the nodes of a hostfile, started once, from any of them (password-less ssh and pdsh are needed):
#   examples/launch/deepspeed.sh --config trl_packfix/cli/recipe_files/qwen3-8b.yaml
#
# HOSTFILE  one line per node, `NAME slots=GPUS` (default: examples/launch/hostfile)
# HEAD      a name of the first node that all others reach (default: the first of the hostfile)
# PORT      a free port of the head node (default 29500)
# TRAIN     the script to run (default examples/train.py)
#
# Every node needs this folder, the environment and the dataset under the same path. Variables for all ranks (NCCL_...,
# HF_...) go into a file `.deepspeed_env` in the home folder, one NAME=VALUE per line: ssh does not pass them on.
set -euo pipefail

hostfile=${HOSTFILE:-examples/launch/hostfile}
head=${HEAD:-$(awk '!/^#/ && NF {print $1; exit}' "$hostfile")}

exec deepspeed --hostfile "$hostfile" --master_addr "$head" --master_port "${PORT:-29500}" \
    "${TRAIN:-examples/train.py}" "$@"
