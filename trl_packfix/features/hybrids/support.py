"""Say which functions of hybrid models are replaced in packs, and what else is known of their mixers.

A *mixer* is a layer that mixes the tokens of a row without attention, by a convolution or a recurrence, as in Mamba. In
a pack, several documents end to end in one row, tokens of one document would change the results of the next document.

`MIXERS` implements the interface `MixerSupport` of `attention/mixer_support.py`, through which other modules find it.
The functions that compute convolutions and recurrences of packs are in `mixers.py`.
"""

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from ...attention.mixer_support import MIXER_FUNCTIONS, MixerSupport, mixer_function_places
from ...attention.packed_forward import BOUNDARIES, running_pack
from ...compat import ReplacedValues, find_kernel_package
from .mixers import convolve_documents, run_fused, scan_channels, scan_chunks, scan_delta, takes_argument

# By the name of a function in a modeling module, the function that replaces it in packs. The names are those of
# `MIXER_FUNCTIONS`, by which `attention/mixer_support.py` finds mixers also if this folder has been deleted.
MIXER_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolve_documents,
    "torch_chunk_gated_delta_rule": scan_delta,
    "chunk_kimi_delta_attention": scan_delta,
    "mamba2_chunk_scan": scan_chunks,
    "mamba2_split_conv1d_scan_combined": run_fused,
    "mamba_selective_scan": scan_channels,
    "mamba_inner_fn": run_fused,
}

# Arguments by which a mixer may give boundaries to its functions. They are dropped, because the replacements use the
# boundaries of the running forward.
MIXER_BOUNDARIES = ("cu_seqlens", *BOUNDARIES)

# By the name with which a package of kernels is imported, its name for pip
PIP_NAMES = {"causal_conv1d": "causal-conv1d", "fla": "flash-linear-attention", "mamba_ssm": "mamba-ssm"}


class HybridMixers(MixerSupport):
    """Support for mixers of the functions in `MIXER_REPLACEMENTS`."""

    def replaced_functions(self, model: nn.Module) -> ReplacedValues:
        """Return an object whose `enter` replaces the functions of the model's mixers, until its `leave` is called."""
        # Each place is a pair: the namespace of a modeling module, and the name of a function in it
        return ReplacedValues(mixer_function_places(model), _make_replacement)

    def config_has_mixers(self, config: PreTrainedConfig) -> bool:
        """Return whether the causal language model that transformers makes of a text config has mixers.

        It has none if the config lists the types of its layers, and all of them are attention. Otherwise it has mixers
        if its modeling module has one of the functions in `MIXER_FUNCTIONS`.
        """
        layer_types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
        if layer_types and all("attention" in name and name != "linear_attention" for name in layer_types):
            return False
        model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        if model is None:
            return False
        namespace = vars(sys.modules[model.__module__])
        return any(name in namespace for name in MIXER_FUNCTIONS)

    def tokens_summed_in_common(self, model: nn.Module) -> int:
        """Return the chunk size of Mamba-2's Triton kernel, in tokens, if the model runs packs on this kernel, else 0.

        The kernel sums the decays of the tokens of a chunk, whichever documents they belong to, and takes for each
        document the difference of two sums. So the decays of other documents cancel only up to rounding, in outputs and
        in gradients.
        """

        def runs_on_kernel(module: nn.Module) -> bool:
            # A modeling module without Mamba-2 has no such function, and the fallback in plain torch has no `seq_idx`
            scan = vars(sys.modules[type(module).__module__]).get("mamba2_chunk_scan")
            return bool(scan) and takes_argument(scan, "seq_idx")

        sizes = [getattr(module, "chunk_size", 0) for module in model.modules() if runs_on_kernel(module)]
        return max(sizes, default=0)

    def missing_packages(self, model: nn.Module) -> list[str] | None:
        """Return the sorted pip names of kernel packages that are not installed; None if no known kernel is used."""
        # Of each function: the package with its kernel and whether it is installed; None for a function without kernel
        kernels = [find_kernel_package(namespace[name]) for namespace, name in mixer_function_places(model)]
        known_kernels = [kernel for kernel in kernels if kernel is not None and kernel[0] in PIP_NAMES]
        if not known_kernels:
            return None
        return sorted({PIP_NAMES[package] for package, is_installed in known_kernels if not is_installed})


MIXERS = HybridMixers()


@cache  # once per process, for all models: each new function makes torch recompile the graphs that call it
def _make_replacement(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the replacement of `function`, which has this name in `MIXER_REPLACEMENTS`.

    In a pack the replacement applies `function` to each document separately. Elsewhere it calls `function` unchanged.
    """
    within_documents = MIXER_REPLACEMENTS[name]

    # The replacement is not compiled with the model, because how it separates documents depends on the pack.
    @torch.compiler.disable
    @wraps(function)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        pack = running_pack()
        if pack is None:
            return function(*args, **kwargs)
        options = {name: value for name, value in kwargs.items() if name not in MIXER_BOUNDARIES}
        return within_documents(function, pack, *args, **options)

    return replacement
