"""The real Triton kernels of hybrid models on packs, by Triton's interpreter on the CPU: packs equal documents alone.

    tools/kernels.sh                         # 3 CPU minutes, in an environment of its own
    tools/kernels.sh --cases kimi_linear --csv kernels.csv
    python tests/features/hybrids/on_triton.py --stand-ins    # 7 CPU seconds, without the packages

Tiny models that call flash-linear-attention's gated delta rule and KDA and mamba_ssm's scan of Mamba-2 as training
does, forward and backward in fp32, on packs and where documents share prefixes. causal_conv1d has no Triton code, so
its stand-in runs. `error` is the judge's: the largest difference of logits and gradients to each document alone on the
same kernel. The exit code is 1 if a case is not right. With `--leak` each case also runs with a leak, and must not be.
"""

import sys
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS), str(TESTS.parent / "benchmarks")]

from common import columns_of, describe, make_console, make_parser, table_of, tell, write_csv

SITE = TESTS / "support" / "kernel_site"
IS_REAL = "--stand-ins" not in sys.argv
if IS_REAL:
    from support.interpreter import interpret

    interpret()
    sys.path.append(str(SITE))  # causal_conv1d only: the other packages are installed
else:
    sys.path.insert(0, str(SITE))

import strict
import support  # noqa: F401  no network, one thread
import torch
from features.hybrids.faults import BEHIND_PROOF, ONE
from support.features import sharing
from sweep import zoo
from sweep.judge import TOLERANCE, OnePack, PrefixJudge

from trl_packfix.isolation.packed_model import PackedModel

LENGTHS = (19, 5, 1, 30)
PACKAGES = ("triton", "flash-linear-attention", "mamba_ssm")


def compare(model_type: str, shares_prefixes: bool, leaks: bool) -> float:
    """Where documents share prefixes scans begin with the states of others, and with a leak anew."""
    pristine = tiny(model_type)
    model = tiny(model_type)
    if shares_prefixes:
        judge = PrefixJudge(pristine)
    else:  # one pack only, because the interpreter is slow
        judge = OnePack(pristine, [torch.randint(zoo.FIRST_WORD, zoo.VOCABULARY, (n,)) for n in LENGTHS])
    with ExitStack() as stack:
        if leaks:
            fault = ONE["states_forgotten"] if shares_prefixes else BEHIND_PROOF["boundary_of_mixers"]
            stack.enter_context(fault())
        stack.enter_context(
            PackedModel(
                model, torch.float32, "cpu", 64, feature=sharing("pack" if shares_prefixes else "off")
            ).attending()
        )
        return judge.compare(model, torch.float32).decisive


def tiny(model_type: str) -> torch.nn.Module:
    model = zoo.build_model(model_type, **SIZES[model_type]).train()
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data -= 4  # the gradients of a state that is forgotten at once are rounding
    return model


# Triton's products want 16 rows and columns
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "kimi_linear": {},
    "bamba": {"mamba_d_state": 16, "mamba_d_head": 16, "mamba_chunk_size": 16},
}
CASES = {kind: (kind, False) for kind in SIZES}
CASES |= {f"{kind} prefixes": (kind, True) for kind in ("qwen3_5_text", "bamba")}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--stand-ins", action="store_true", help="of all kernels, which need no package")
    parser.add_argument("--leak", action="store_true", help="run each case with a leak, too, which must fail")
    options = parser.parse_args()
    torch.set_num_threads(1)
    strict.options["aligned"] = False
    strict.dtypes.add(torch.float64)
    versions = {name: version(name) if IS_REAL else "stand-in" for name in PACKAGES}
    print(describe(), versions)
    rows = []
    for name in options.cases:
        for leaks in (False, True) if options.leak else (False,):
            torch.manual_seed(0)
            start = time.process_time()
            error = compare(*CASES[name], leaks)
            row = {"case": name, "leaks": "by design" if leaks else "", "right": "yes" if error <= TOLERANCE else "NO"}
            rows.append(row | {"error": error, "seconds": round(time.process_time() - start)})
            tell(rows[-1], ".1e")
    columns = columns_of(rows)
    text = lambda value: f"{value:.1e}" if isinstance(value, float) else str(value)  # noqa: E731
    make_console(120).print("Packs on the kernels, relative differences", table_of(rows, columns, text))
    write_csv(options.csv, [row | versions for row in rows])
    return int(any(row["right"] == "NO" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
