"""Let each rank of a launcher that has this folder on its path run DeepSpeed on a CPU.

Its shared-memory all-reduce would be compiled for minutes; gloo has one, too. And DeepSpeed's launcher shows its ranks
the GPUs that the test has hidden.
"""

import os

if "LOCAL_RANK" in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
