"""Define what all other modules know of `features/hybrids`: the support for mixers of hybrid models.

A *mixer* is a layer that mixes the tokens of a row without attention: a convolution or a recurrence, as in Mamba or in
gated delta nets. A pack is one row with several documents. Attention reads their boundaries from an object that holds
them while a forward runs (`PackedForward`). A mixer reads no boundaries: it calls functions of its modeling module in
transformers, by the names in `MIXER_FUNCTIONS`, and there the tokens of one document would change the results of the
next document.

`features/hybrids` makes these functions start anew in each document. Other modules only call a `MixerSupport`:

    forwards.py              replaces functions of the model while a packed forward runs
    isolation/probe.py       allows for the rounding of a kernel that sums over several documents
    training/choices.py      recognises a hybrid model by its config
    cli/check_model.py       names the packages whose kernels are missing

Without the folder of the feature, `MixerSupport` itself refuses models with these functions. A mixer that calls
functions of other names is not known here. Then documents change each other. A test of the model before training, the
leak probe, finds and repairs it.
"""

import sys
from functools import cache
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from ..compat import NOTHING_REPLACED, ReplacedValues
from ..feature import find_folder
from ..wording import count_of

# Names of functions in modeling modules of transformers, by which mixers mix tokens
MIXER_FUNCTIONS = (
    "causal_conv1d_fn",
    "torch_chunk_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "mamba2_chunk_scan",
    "mamba2_split_conv1d_scan_combined",
    "mamba_selective_scan",
    "mamba_inner_fn",
)


class MixerSupport:
    """Support for the mixers of models. This class supports none; `features/hybrids` has a subclass."""

    def replaced_functions(self, model: nn.Module) -> ReplacedValues:
        """Return the functions of a model's mixers that are replaced while a packed forward runs.

        Raises:
            ValueError: the model has such functions, and they cannot be replaced.
        """
        names = sorted({name for _, name in mixer_function_places(model)})
        if names:
            raise ValueError(
                f"{type(model).__name__} has layers that mix tokens by {count_of(len(names), 'function')} beside "
                f"attention ({', '.join(names)}), and this installation of trl_packfix is without its folder "
                "`features/hybrids`, which makes these functions start anew in each document. Documents of a pack "
                "would change each other. Install trl_packfix anew, or set `packing=False`."
            )
        return NOTHING_REPLACED

    def config_has_mixers(self, config: PreTrainedConfig) -> bool:
        """Return whether transformers' model of a text config has mixers that this object supports."""
        return False

    def tokens_summed_in_common(self, model: nn.Module) -> int:
        """Return over how many tokens a kernel of the model sums, across documents; 0 if no kernel does so.

        Such a kernel subtracts the sums of other documents again, so that only their rounding remains in a document.
        The leak probe then allows for this rounding.
        """
        return 0

    def missing_packages(self, model: nn.Module) -> list[str] | None:
        """Return the names for pip of the packages whose kernels the mixers of a model lack.

        Returns:
            The sorted names; [] if no kernel is missing, and None if the model uses no known kernel.
        """
        return None


def mixer_function_places(model: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Return where the mixers of a model find their functions, as (namespace of a modeling module, name) pairs."""
    types = {type(module) for module in model.modules()}
    classes = {base for module_type in types for base in module_type.__mro__}
    module_names = sorted({cls.__module__ for cls in classes if issubclass(cls, nn.Module)})
    namespaces = [vars(sys.modules[module_name]) for module_name in module_names]
    return [(namespace, name) for namespace in namespaces for name in MIXER_FUNCTIONS if name in namespace]


@cache
def mixer_support() -> MixerSupport:
    """Return the support of `features/hybrids`; without its folder the one that refuses models with mixers."""
    module = find_folder("hybrids.support")
    support: MixerSupport = MixerSupport() if module is None else module.MIXERS
    return support
