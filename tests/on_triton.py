"""The real Triton kernels of hybrid models on packs, by Triton's interpreter on the CPU: packs equal documents alone.

    tools/kernels.sh                         # 3 CPU minutes, in an environment of its own
    tools/kernels.sh --cases kda --csv kernels.csv
    python tests/on_triton.py --stand-ins    # 7 CPU seconds, without the packages

flash-linear-attention's gated delta rule and KDA and mamba_ssm's scans of Mamba-2, forward and backward in fp32; then
whole tiny models that call them as training does, on packs and where documents share prefixes. causal_conv1d has no
Triton code, so its stand-in runs. The exit code is 1 if a document reaches another, or is not what it is alone. With
`--leak` each case also runs with a leak, and must find it. Differences are relative to the largest value:

output, gradient   of a pack, to each document alone on the same kernel; the worst of all tensors
fp64               of a pack on the kernel, to each document alone token by token in fp64; output and gradients
others             how far another document's output moves when the tokens of one document change
bound              what rounding may be in these columns; 0: chunks follow documents, and only `fp64` may round
"""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple
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
TO_TORCH = 2e-6
MAMBA2 = 1e-5  # its chunks cross documents, so decays of others cancel up to rounding
MODEL = 5e-6  # products of matrices round with the number of rows
PREFIXES = 2e-5  # so do chunks, which begin where documents part
PACKAGES = ("triton", "flash-linear-attention", "mamba_ssm")
Result = dict[str, Tensor]  # the output, (T, ...), and the gradient of each input


class Kernel(NamedTuple):
    """A kernel, its inputs, and the same in torch.

    Attributes:
        tokens: inputs of each token, (1, T, ...).
        parameters: inputs of all documents.
        call: (tokens, parameters, **boundaries) -> output, (1, T, ...).
        exact: the same without boundaries, in any dtype.
        boundaries: the name of the argument of boundaries.
        bound: largest difference between a pack and a document alone.
    """

    tokens: dict[str, Tensor]
    parameters: dict[str, Tensor]
    call: Callable[..., Tensor]
    exact: Callable[..., Tensor]
    boundaries: str
    bound: float = 0.0


def delta_rule(kind: str) -> Kernel:
    """The gated delta rule, where two heads of values read one of keys, or KDA, whose decay is one per row of a key."""
    if kind == "gated delta":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as kernel
    else:
        from fla.ops.kda import chunk_kda as kernel
    num_tokens, size, heads = sum(LENGTHS), 16, 2 if kind == "gated delta" else 1
    shape = (1, num_tokens, 1, size)
    decays = (1, num_tokens, heads) if kind == "gated delta" else shape
    tokens = {"q": torch.randn(shape), "k": torch.randn(shape), "v": torch.randn(1, num_tokens, heads, size)}
    tokens |= {"g": -torch.rand(decays), "beta": torch.rand(1, num_tokens, heads)}

    def call(tokens: dict[str, Tensor], parameters: dict[str, Tensor], **boundaries: Tensor) -> Tensor:
        return kernel(**tokens, use_qk_l2norm_in_kernel=True, **boundaries)[0]

    def exact(tokens: dict[str, Tensor], parameters: dict[str, Tensor]) -> Tensor:
        return strict.delta_rule(*tokens.values(), size**-0.5, None, None, True)[0]

    return Kernel(tokens, {}, call, exact, "cu_seqlens")


def mamba2(is_fused: bool) -> Kernel:
    """The scan of Mamba-2 in chunks of 16 tokens, alone or fused with convolution, norm and output projection."""
    from mamba_ssm.ops.triton import ssd_combined as kernels

    num_tokens, heads, size, groups, depth = sum(LENGTHS), 2, 16, 1, 16
    width = heads * size
    parameters = {"dt_bias": torch.rand(heads), "A": -torch.rand(heads) - 0.5, "D": torch.randn(heads)}
    settings: dict[str, Any] = {"chunk_size": 16}
    if is_fused:
        name = "mamba_split_conv1d_scan_combined"
        channels = width + 2 * groups * depth
        tokens = {"zxbcdt": torch.randn(1, num_tokens, width + channels + heads)}
        parameters |= {"conv1d_weight": torch.randn(channels, 4) / 2, "conv1d_bias": torch.randn(channels)}
        parameters |= {"rmsnorm_weight": torch.rand(width) + 0.5, "outproj_weight": torch.randn(32, width) / 6}
        settings |= {"headdim": size, "ngroups": groups, "norm_before_gate": False}
    else:
        name = "mamba_chunk_scan_combined"
        tokens = {"x": torch.randn(1, num_tokens, heads, size), "dt": torch.randn(1, num_tokens, heads)}
        tokens |= {each: torch.randn(1, num_tokens, groups, depth) for each in "BC"}
        settings |= {"dt_softplus": True}

    def call(function: Callable, tokens: dict[str, Tensor], parameters: dict[str, Tensor], **more: Tensor) -> Tensor:
        return function(**tokens, **parameters, **settings, **more)

    of_kernel, of_torch = getattr(kernels, name), getattr(stand_in("mamba_ssm/ops/triton/ssd_combined.py"), name)
    return Kernel(tokens, parameters, partial(call, of_kernel), partial(call, of_torch), "seq_idx", MAMBA2)


def stand_in(path: str) -> Any:
    """A module of `kernel_site`, also where the package itself is installed."""
    spec = spec_from_file_location("stand_in", SITE / path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bounds_of(kind: str, leaks: bool) -> Tensor:
    """Boundaries of the documents, with two empty ones behind them; or, if they leak, of one document."""
    ends = [0, sum(LENGTHS)] if leaks else [0, *torch.tensor(LENGTHS).cumsum(0).tolist(), *2 * [sum(LENGTHS)]]
    if kind == "cu_seqlens":
        return torch.tensor(ends, dtype=torch.int32)
    return torch.repeat_interleave(torch.arange(len(ends) - 1), torch.tensor(ends).diff()).int()[None]


def own_tokens(values: Any) -> list[Any]:
    """The part of each document, of tensors with tokens in axis 1."""
    return list(values.split(LENGTHS, dim=1))


def derived(call: Callable[..., Tensor], tokens: Result, parameters: Result, weights: Tensor) -> Result:
    """The output and every gradient of the sum of the weighted output."""
    tokens, parameters = (
        {name: x.detach().requires_grad_() for name, x in each.items()} for each in (tokens, parameters)
    )
    out = call(tokens, parameters)
    (out * weights.to(out.dtype)).sum().backward()
    return {"output": out.detach()} | {name: x.grad for name, x in (tokens | parameters).items()}


def each_alone(call: Callable[..., Tensor], tokens: Result, parameters: Result, weights: Tensor) -> Result:
    """The same of each document alone: joined for tokens, summed for parameters."""
    parts = zip(*(own_tokens(x) for x in (*tokens.values(), weights)), strict=True)
    found = [derived(call, dict(zip(tokens, part, strict=False)), parameters, part[-1]) for part in parts]
    return {
        name: sum(each[name] for each in found) if name in parameters else torch.cat([each[name] for each in found], 1)
        for name in found[0]
    }


def compare_kernel(kernel: Kernel, leaks: bool) -> dict[str, float]:
    """The columns of the table for a kernel."""
    bounds = {kernel.boundaries: bounds_of(kernel.boundaries, leaks)}
    packed_call = partial(kernel.call, **bounds)
    given = (kernel.tokens, kernel.parameters)
    with torch.no_grad():
        weights = torch.randn_like(kernel.exact(*given))
    packed = derived(packed_call, *given, weights)
    alone = each_alone(kernel.call, *given, weights)
    double = ({name: x.double() for name, x in each.items()} for each in given)
    exact = each_alone(kernel.exact, *double, weights)
    other = {name: x.clone() for name, x in kernel.tokens.items()}
    for name in set(other) - {"g", "beta", "dt"}:  # decays and steps have limits
        own_tokens(other[name])[1].add_(1)
    with torch.no_grad():
        changed = packed_call(other, kernel.parameters)
    return {
        "output": difference(packed["output"], alone["output"], exact["output"]),
        "gradient": max(difference(packed[name], alone[name], exact[name]) for name in exact if name != "output"),
        "fp64": max(difference(packed[name], exact[name], exact[name]) for name in exact),
        "others": others_moved(changed, packed["output"]),
        "bound": kernel.bound,
    }


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
            whole = lambda running, name, like: bounds_of(name, leaks=True)  # noqa: E731
            stack.enter_context(mock.patch.object(mixers, "_boundaries", whole))
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
                mock.patch.object(mixer_prefixes, "levels_of", lambda pack: without_states(levels(pack)))
            )
        stack.enter_context(PackedModel(model, torch.float32, "cpu", 64, shares_prefixes=True).attending())
        found = judge.compare(model, torch.float32)
    return {"gradient": found.error, "bound": PREFIXES}


def without_states(found: mixer_prefixes.Levels) -> mixer_prefixes.Levels:
    return replace(found, levels=[replace(level, parents=None) for level in found.levels])


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
    "gated delta": lambda leaks: compare_kernel(delta_rule("gated delta"), leaks),
    "kda": lambda leaks: compare_kernel(delta_rule("kda"), leaks),
    "mamba2": lambda leaks: compare_kernel(mamba2(is_fused=False), leaks),
    "mamba2 fused": lambda leaks: compare_kernel(mamba2(is_fused=True), leaks),
    **{kind: partial(compare_model, kind) for kind in SIZES},
    **{f"{kind} prefixes": partial(compare_prefixes, kind) for kind in ("qwen3_5_text", "bamba")},
}


def run_case(name: str, leaks: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    start = time.process_time()
    found = CASES[name](leaks)
    errors = [found[name] for name in ("output", "gradient", "others") if name in found]
    right = max(errors) <= found["bound"] and found.get("fp64", 0.0) <= max(found["bound"], TO_TORCH)
    row = {"case": name, "leaks": "by design" if leaks else "", "right": "yes" if right else "NO"}
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
