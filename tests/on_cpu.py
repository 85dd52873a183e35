"""Runs a script under DeepSpeed on a CPU without compiling DeepSpeed's shared-memory all-reduce: gloo has one, too.

deepspeed --num_gpus 2 tests/on_cpu.py examples/train.py --max_steps 2
"""

import os
import runpy
import sys
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # DeepSpeed's launcher shows its ranks the GPUs that the test has hidden

from support.versions import run_deepspeed_on_cpus

if __name__ == "__main__":
    run_deepspeed_on_cpus()
    # The launcher puts `--local_rank` in front; the script gets it as its launcher would have given it.
    script = next(argument for argument in sys.argv[1:] if argument.endswith(".py"))
    sys.argv.remove(script)
    sys.argv[0] = script
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")
