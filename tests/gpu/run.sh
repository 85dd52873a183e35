#!/usr/bin/env bash
# The first minutes on a GPU, in one command: nine steps, of which the first three take at most 7 minutes and end with
# figures. It stops at the first failure, and ends within 10 minutes (--quick: 3). Into the folder go steps.csv with a
# row per step, evidence.tar.gz and logs.tar.gz; models and checkpoints go to a temporary folder.
#
#   tests/gpu/run.sh [--quick] [--out DIR] [--steps "0 1 2"] [--limit SECONDS]
#   tests/gpu/run.sh --evidence [--out DIR] [--limit SECONDS] [--data DIR] [--parts "machine 7b-flan"]
#
# With --evidence none of the steps runs. The parts of benchmarks/evidence.py do, which go on after a failure and give
# as many figures as 540 seconds allow, in one archive, evidence.tar.gz, with a table at its top. A machine without a
# package index needs tests/gpu/wheels.sh first.
#
#   0 environment   versions, the card, and why torch's FlashAttention-2 kernels cannot run, if they cannot; the model of 3, 4,
#                   6 and 8
#   1 kernels       some cases of tests/gpu/test_varlen_gpu.py: head sizes, windows, no wait of the host, whole models
#   2 throughput    parts of benchmarks/evidence.py, in half of the time: 7b-flan (--quick: attention alone)
#   3 training      tests/gpu/test_training_gpu.py, and examples/train.py, full and LoRA
#   4 zero3         examples/train.py under DeepSpeed ZeRO-3 on one GPU, full and LoRA
#   5 probe         tests/gpu/test_repair_gpu.py
#   6 compile       examples/train.py with --torch_compile
#   7 shapes        1 and 2,048 documents, documents of one token; then all of tests/gpu/test_varlen_gpu.py
#   8 flash-attn    1 and 3 again on the name flash_attention_2, where flash-attn is installed
#
# A step that cannot run here (no DeepSpeed, no C compiler, no flash-attn) is "skipped", with the reason. When the limit
# is reached, the last line is the command for the steps that remain. Of several GPUs the first that
# CUDA_VISIBLE_DEVICES names is used. Without a GPU the sizes are tiny and the tests of CUDA are skipped: that tests this
# script, and nothing else. No network is needed. PYTHON names the interpreter. Exit status: 0, or 1 after a failure or
# at the limit ("no time").
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
out="$PWD/gpu_results"
quick=0 evidence=0 limit="" data=() parts=() steps="0 1 2 3 4 5 6 7 8"
while [ $# -gt 0 ]; do
    case "$1" in
    --quick) quick=1 ;;
    --evidence) evidence=1 ;;
    --out) out=$2 && shift ;;
    --steps) steps=$2 && shift ;;
    --limit) limit=$2 && shift ;;
    --parts) read -ra parts <<<"--parts $2" && shift ;;
    --data) data=(--data "$(cd "$2" && pwd)") && shift ;;
    *) sed -n '6,7p' "${BASH_SOURCE[0]}" >&2 && exit 2 ;;
    esac
    shift
done
[ -n "$limit" ] || limit=$((quick ? 170 : evidence ? 540 : 570))
python=${PYTHON:-python3}
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
mkdir "$work/logs"
# Also when the script is ended from outside: few files, because a remote machine may give back only some.
trap 'tar -czf "$out/logs.tar.gz" -C "$work" logs; rm -rf "$work"' EXIT
trap 'exit 1' INT TERM
cd "$root" || exit 1
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false WANDB_MODE=disabled
export TORCH_EXTENSIONS_DIR="$work/extensions" PYTHONUNBUFFERED=1
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF-expandable_segments:True}"
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    gpu=1
    # One process trains on one GPU: with several, the Trainer would wrap the model in DataParallel, which TRL refuses.
    CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
    export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES%%,*}
    cores=$(nproc 2>/dev/null || echo 1) # the references of the kernels are computed on the CPU
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores < 8 ? cores : 8))}"
else
    gpu=0
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    echo "NO GPU: tiny sizes on a CPU. This tests the script itself and shows nothing about CUDA."
fi

if [ $evidence = 1 ]; then
    rm -rf "$work"
    size=()
    [ $gpu = 1 ] || size=(--smoke)
    exec "$python" benchmarks/evidence.py --out "$out" --limit "$limit" "${size[@]}" "${data[@]}" "${parts[@]}"
fi

csv="$out/steps.csv"
echo "step,name,state,seconds,device,reason" >"$csv"
began=$SECONDS
device=$([ $gpu = 1 ] && echo cuda || echo "CPU (proves nothing about CUDA)")

remaining() { echo $((limit - (SECONDS - began))); }

note() { # step name state seconds reason
    echo "$1,$2,$3,$4,$device,$5" >>"$csv"
    printf '%-2s %-12s %-8s %4ss  %s\n' "$1" "$2" "$3" "$4" "$5"
}

wanted() { [[ " $steps " == *" $1 "* ]]; }

skip() { note "$1" "$2" skipped 0 "$3"; }

out_of_time() { # step name seconds
    local number rest=""
    for number in $steps; do [ "$number" -lt "$1" ] || rest+=" $number"; done
    note "$1" "$2" "no time" "$3" "the limit of $limit s is reached"
    echo "The steps that remain: tests/gpu/run.sh --steps \"0${rest/# 0/}\""
    exit 1
}

# The parts of a step, one command each, joined by "--". The time left bounds every part.
step() { # number name command... [-- command...]
    local number=$1 name=$2 started=$SECONDS log="$work/logs/$1_$2.log" part=() word code=0
    shift 2
    : >"$log"
    for word in "$@" --; do
        if [ "$word" != -- ]; then
            part+=("$word")
            continue
        fi
        local left
        left=$(remaining)
        if [ "$left" -lt 5 ]; then
            out_of_time "$number" "$name" $((SECONDS - started))
        fi
        echo "+ ${part[*]}" >>"$log"
        timeout --kill-after=10 "$left" "${part[@]}" >>"$log" 2>&1 || code=$?
        part=()
        [ $code = 0 ] || break
    done
    if [ $code != 0 ] && [ "$(remaining)" -lt 2 ]; then # ended by `timeout`: what ran may be right and slow
        out_of_time "$number" "$name" $((SECONDS - started))
    elif [ $code != 0 ]; then
        note "$number" "$name" FAILED $((SECONDS - started)) "exit status $code; see ${log##*/}"
        tail -n 25 "$log"
        exit 1
    fi
    local summary state=passed
    summary=$(grep -E '[0-9]+ (passed|skipped).* in |^[0-9]+ parts in ' "$log" | tail -n 1 | tr -d '=,' | xargs)
    # tests that were all skipped show nothing: their reasons are in the log
    [[ $summary != *skipped* || $summary == *passed* ]] || state=skipped
    note "$number" "$name" $state $((SECONDS - started)) "$summary"
}

# As Triton looks for it
has_compiler() { [ -n "${CC:-}" ] || command -v gcc >/dev/null || command -v clang >/dev/null; }

has() { "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }

pytest=("$python" -m pytest -x -q -rs -p no:cacheprovider)
train=(examples/train.py --model_name_or_path "$work/model" --dataset_name "$work/rows.jsonl" --max_length 512
    --logging_steps 1 --report_to none --save_strategy no)
[ $gpu = 1 ] || train+=(--max_length 128)
lora=(--use_peft --lora_target_modules all-linear --learning_rate 2e-4)
max_steps=$([ $quick = 1 ] || [ $gpu = 0 ] && echo 2 || echo 5)

wanted 0 && step 0 environment "$python" tests/gpu/workplace.py "$work"
if [ $gpu = 1 ] && ! has_compiler; then
    echo "No C compiler: Triton needs one, and on CUDA TRL's loss runs on Triton. Install gcc or set CC; else step 3 fails."
fi

if wanted 1; then
    select=(-k "no_host_sync or packed_equals_alone or (outputs and 64-64-8-2 and 128)")
    step 1 kernels "${pytest[@]}" tests/gpu/test_varlen_gpu.py "${select[@]}"
fi

if wanted 2; then
    # Half of the time for everything: the other steps come after this.
    sizes=(--limit "$((limit / 2))" --parts machine exactness)
    [ $quick = 1 ] && sizes+=(launches) || sizes+=(7b-flan)
    [ $gpu = 1 ] || sizes+=(--smoke)
    step 2 throughput "$python" benchmarks/evidence.py --out "$out" "${sizes[@]}"
fi

if wanted 3; then
    select=(-k "not compiled")
    [ $quick = 0 ] || select=(-k "not compiled and (thousands or determinism or (llama and reentrant))")
    [ $gpu = 1 ] || select=(-k "llama and reentrant and full")
    [ $gpu = 1 ] || export GPU_TESTS_ON_CPU=1
    parts=("${pytest[@]}" -s tests/gpu/test_training_gpu.py "${select[@]}")
    parts+=(-- "$python" "${train[@]}" --output_dir "$work/full" --max_steps "$max_steps")
    [ $quick = 1 ] || parts+=(-- "$python" "${train[@]}" --output_dir "$work/lora" --max_steps "$max_steps" "${lora[@]}")
    step 3 training "${parts[@]}"
    unset GPU_TESTS_ON_CPU
fi

if wanted 4; then
    if has deepspeed; then
        # With --num_gpus the launcher ignores CUDA_VISIBLE_DEVICES, which may name another GPU than the first; without
        # it the launcher reads numbers there.
        script=()
        [ $gpu = 1 ] && [[ $CUDA_VISIBLE_DEVICES =~ ^[0-9]+$ ]] || script=(--num_gpus=1)
        [ $gpu = 1 ] || export DS_ACCELERATOR=cpu PYTHONPATH="$root/tests/support/cpu_site:$PYTHONPATH"
        zero3=("$python" -m deepspeed.launcher.runner --master_port "$((20000 + RANDOM % 20000))" "${script[@]}")
        parts=("${zero3[@]}" "${train[@]}" --output_dir "$work/zero3" --max_steps "$max_steps")
        if [ $gpu = 1 ] && [ $quick = 0 ]; then
            parts+=(-- "${zero3[@]}" "${train[@]}" --output_dir "$work/zero3_lora" --max_steps "$max_steps" "${lora[@]}")
        fi
        step 4 zero3 "${parts[@]}"
        unset DS_ACCELERATOR
    else
        skip 4 zero3 "deepspeed is not installed"
    fi
fi

if wanted 5; then
    select=()
    [ $quick = 0 ] || select=(-k "not deep")
    step 5 probe "${pytest[@]}" tests/gpu/test_repair_gpu.py "${select[@]}"
fi

if wanted 6; then
    if ! has_compiler; then
        skip 6 compile "no C compiler for inductor"
    elif [ "$(remaining)" -lt $((quick ? 45 : 90)) ]; then
        out_of_time 6 compile 0 # less than a compilation may need
    else
        backend=()
        [ $gpu = 1 ] || backend=(--torch_compile_backend eager)
        parts=("$python" "${train[@]}" --output_dir "$work/compile" --max_steps 3 --torch_compile true "${backend[@]}")
        if [ $gpu = 1 ] && [ $quick = 0 ]; then
            parts+=(-- "${pytest[@]}" -s tests/gpu/test_training_gpu.py -k "compiled")
        fi
        step 6 compile "${parts[@]}"
    fi
fi

if wanted 7; then
    parts=("${pytest[@]}" tests/gpu/test_varlen_gpu.py -k extreme)
    [ $quick = 1 ] || parts+=(-- "${pytest[@]}" tests/gpu/test_varlen_gpu.py -k "not extreme")
    step 7 shapes "${parts[@]}"
fi

if wanted 8; then
    if [ $gpu = 1 ] && has flash_attn; then
        step 8 flash-attn "${pytest[@]}" -s tests/gpu/test_training_gpu.py -k "chosen and llama" \
            -- "$python" "${train[@]}" --output_dir "$work/flash" --max_steps "$max_steps" --attn_implementation flash_attention_2
    else
        skip 8 flash-attn "$([ $gpu = 1 ] && echo "flash-attn is not installed" || echo "no GPU")"
    fi
fi

echo "Done in $((SECONDS - began)) s; results in $out"
[ $gpu = 1 ] || echo "NO GPU: nothing was shown about CUDA."
