"""The real Triton kernels of hybrid models on packs, by Triton's interpreter on the CPU: packs equal documents alone.

    tools/kernels.sh                         # 3 CPU minutes, in an environment of its own
    tools/kernels.sh --cases kimi_linear --csv kernels.csv
    python tests/on_triton.py --stand-ins    # 7 CPU seconds, without the packages

Tiny models that call flash-linear-attention's gated delta rule and KDA and mamba_ssm's scan of Mamba-2 as training
does, forward and backward in fp32, on packs and where documents share prefixes. causal_conv1d has no Triton code, so
its stand-in runs. The exit code is 1 if a document reaches another, or is not what it is alone. With `--leak` each case
also runs with a leak, and must find it. Differences are relative to the largest value:

output, gradient   of a pack, to each document alone on the same kernel; the worst of all tensors
others             how far another document's output moves when the tokens of one document change
bound              what rounding may be in these columns
"""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS.parent / "benchmarks"))

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
from support import zoo
from sweep.judge import PrefixJudge, alone, packed
from torch import Tensor

from trl_packfix.attention import mixer_prefixes, mixers
from trl_packfix.isolation.packed_model import PackedModel

LENGTHS = (19, 5, 1, 30)
MODEL = 5e-6  # products of matrices round with the number of rows
PREFIXES = 2e-5  # so do chunks, which begin where documents part
PACKAGES = ("triton", "flash-linear-attention", "mamba_ssm")
Result = dict[str, Tensor]  # the output, (T, ...), and the gradient of each input


def one_document(running: Any, name: str, like: Tensor) -> Tensor:
    """In place of `mixers._boundaries`: those of a pack of one document."""
    if name == "cu_seqlens":
        return torch.tensor([0, sum(LENGTHS)], dtype=torch.int32)
    return torch.zeros(1, sum(LENGTHS), dtype=torch.int32)


def own_tokens(values: Any) -> list[Any]:
    """The part of each document, of tensors with tokens in axis 1."""
    return list(values.split(LENGTHS, dim=1))


def difference(found: Tensor, wanted: Tensor, scale: Tensor) -> float:
    """nan counts as infinite."""
    gap = ((found.double() - wanted.double()).abs().max() / scale.double().abs().max()).item()
    return gap if gap == gap else float("inf")


def others_moved(changed: Tensor, packed: Tensor) -> float:
    """The largest difference in documents other than the one that was changed, (1, T, ...)."""
    pairs = zip(own_tokens(changed), own_tokens(packed), strict=True)
    return max(difference(new, old, packed) for i, (new, old) in enumerate(pairs) if i != 1)


def compare_model(model_type: str, leaks: bool) -> dict[str, float]:
    """The columns of the table for a tiny model that calls the kernels through this package."""
    model = tiny(model_type)
    documents = [torch.randint(zoo.FIRST_WORD, zoo.VOCABULARY, (n,)) for n in LENGTHS]
    # no document has the same weight everywhere, so that its gradients are none of a constant
    weights = torch.randn(1, sum(LENGTHS), zoo.VOCABULARY)

    def run(batch: dict[str, Any], weights: Tensor) -> Result:
        model.zero_grad()
        logits = model(**batch).logits
        (logits * weights).sum().backward()
        return {"output": logits.detach()} | {
            name: p.grad for name, p in model.named_parameters() if p.grad is not None
        }

    found = [run(alone([ids]), part) for ids, part in zip(documents, own_tokens(weights), strict=True)]
    truth = {name: sum(each[name] for each in found) for name in found[0] if name != "output"}
    truth["output"] = torch.cat([each["output"] for each in found], dim=1)
    with ExitStack() as stack:
        if leaks:
            stack.enter_context(mock.patch.object(mixers, "_boundaries", one_document))
        stack.enter_context(PackedModel(model, torch.float32, "cpu", 64).attending())
        together = run(packed(documents), weights)
        documents[1] = documents[1].flip(0)
        with torch.no_grad():
            changed = model(**packed(documents)).logits
    largest = max(value.abs().max() for name, value in truth.items() if name != "output")
    gaps = {name: (together[name] - truth[name]).abs().max() for name in truth if name != "output"}
    floor = 1e-3 * largest  # of a gradient that is 0 but for rounding
    return {
        "output": difference(together["output"], truth["output"], truth["output"]),
        "gradient": max((gap / truth[name].abs().max().clamp(min=floor)).item() for name, gap in gaps.items()),
        "others": others_moved(changed, together["output"]),
        "bound": MODEL,
    }


def compare_prefixes(model_type: str, leaks: bool) -> dict[str, float]:
    """The same where documents share prefixes, so that scans begin with the states of others; `gradient` has both."""
    judge = PrefixJudge(tiny(model_type), zoo.FIRST_WORD, zoo.VOCABULARY)
    model = tiny(model_type)
    with ExitStack() as stack:
        if leaks:
            levels = mixer_prefixes.levels_of
            stack.enter_context(
                mock.patch.object(mixer_prefixes, "levels_of", lambda pack: without_states(*levels(pack)))
            )
        stack.enter_context(PackedModel(model, torch.float32, "cpu", 64, shares_prefixes=True).attending())
        found = judge.compare(model, torch.float32)
    return {"gradient": found.error, "bound": PREFIXES}


def without_states(levels: list[mixer_prefixes.TreeLevel], place: torch.Tensor) -> tuple:
    return [level._replace(parents=None) for level in levels], place


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
CASES: dict[str, Callable[[bool], dict[str, float]]] = {
    **{kind: partial(compare_model, kind) for kind in SIZES},
    **{f"{kind} prefixes": partial(compare_prefixes, kind) for kind in ("qwen3_5_text", "bamba")},
}


def run_case(name: str, leaks: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    start = time.process_time()
    found = CASES[name](leaks)
    errors = [found[name] for name in ("output", "gradient", "others") if name in found]
    right = "yes" if max(errors) <= found["bound"] else "NO"
    row = {"case": name, "leaks": "by design" if leaks else "", "right": right}
    return row | found | {"seconds": round(time.process_time() - start)}


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
            rows.append(run_case(name, leaks))
            tell(rows[-1], ".1e")
    columns = columns_of(rows)
    text = lambda value: f"{value:.1e}" if isinstance(value, float) else str(value)  # noqa: E731
    make_console(120).print(table_of(rows, columns, text, "Packs on the kernels, relative differences"))
    write_csv(options.csv, [row | versions for row in rows])
    return int(any(row["right"] == "NO" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
