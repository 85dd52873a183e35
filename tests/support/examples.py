"""Examples of model types, chosen by what they do on the installed transformers and not by name.

A release of transformers may change any type: Falcon leaks up to 5.23 and is isolated from 5.24 on. So a test that
needs some type that leaks, or that keeps its own attention, takes an example from here. docs/compatibility.csv says
which types may be taken, and a forward decides.
"""

import re
from functools import cache
from typing import NamedTuple

import torch
from sweep import zoo
from sweep.judge import drawn, packed_by_trl
from sweep.page import read
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .models import build_tiny_model
from .paths import DOCS
from .runs import proved

# The attention of both layers, as it is written in the column `repairs`
ATTENTION = re.compile(r"2 (?P<module>\w+Attention) \((?P<first>\S+\.0\.\S+)\) as rows of a padded batch")
ROUNDING = 1e-4  # relative, of logits in fp32


class LeakingExample(NamedTuple):
    """A causal type with attention of its own, which ignores boundaries and is repaired.

    Attributes:
        model_type: for `build_tiny_model`, which makes two layers.
        module: the class of the attention, e.g. "BloomAttention".
        first: the name of the attention of the first layer, e.g. "transformer.h.0.self_attention".
    """

    model_type: str
    module: str
    first: str

    def attention_of(self, model: PreTrainedModel) -> torch.nn.Module:
        """Return the attention of the first layer of `model`."""
        return model.get_submodule(self.first)

    def layer_of(self, model: PreTrainedModel) -> torch.nn.Module:
        """Return the first layer of `model`."""
        return model.get_submodule(self.first.rpartition(".")[0])


@cache
def leaking_example() -> LeakingExample:
    """Return the first type of docs/compatibility.csv, by name, that leaks on the installed transformers."""
    candidates = [row for row in read(DOCS) if row.kind == "causal" and row.stock_trl == "leaks"]
    for row in candidates:
        repair = ATTENTION.fullmatch(row.repairs)
        if repair is None or row.model_type not in CONFIG_MAPPING:
            continue
        model = build_tiny_model(row.model_type).eval()
        if model.supports_gradient_checkpointing and not reads_ahead(model) and leaks_in_stock_packs(model):
            return LeakingExample(row.model_type, **repair.groupdict())
    raise AssertionError(
        f"none of the {len(candidates)} types that leak by docs/compatibility.csv leaks in packs on the installed "
        "transformers, with attention that can be repaired. Run `make sweep`."
    )


@cache
def type_with_own_attention() -> str:
    """Return the first type of docs/compatibility.csv, by name, that is isolated, but not with `packfix_varlen`.

    `zoo.build_model` makes it.
    """
    rows = [row for row in read(DOCS) if (row.kind, row.verdict, row.attention) == ("causal", "native", "eager")]
    # Others of them leak in stock packs, and here functions of their mixers are replaced
    isolated = [row.model_type for row in rows if row.stock_trl == "isolated"]
    candidates = [name for name in isolated if name in CONFIG_MAPPING]
    for model_type in candidates:
        model = zoo.build_model(model_type)
        packed, report = proved(model, on_leak="raise")
        packed.restore_own_attention()
        if report.passed and report.attention == "eager":
            return model_type
    raise AssertionError(f"none of {candidates} is isolated with its own attention. Run `make sweep`.")


def leaks_in_stock_packs(model: PreTrainedModel) -> bool:
    """Return whether a document of a pack of TRL's own collator has other logits if the one before is another."""
    generator = torch.Generator().manual_seed(0)
    document, *other_documents = (drawn(generator)[:n] for n in (9, 12, 12))
    with torch.no_grad():
        one, two = (
            model(**packed_by_trl([first_document, document])).logits[0, 12:] for first_document in other_documents
        )
    return relative_change(one, two) > ROUNDING


def reads_ahead(model: PreTrainedModel) -> bool:
    """Return whether the first half of a document has other logits if the second is another, as in an encoder."""
    generator = torch.Generator().manual_seed(0)
    first, *ends = (drawn(generator)[:n] for n in (6, 6, 6))
    with torch.no_grad():
        one, two = (model(input_ids=torch.cat([first, end])[None], use_cache=False).logits[0, :6] for end in ends)
    return relative_change(one, two) > ROUNDING


def relative_change(one: torch.Tensor, two: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest value of `one`."""
    return ((one - two).abs().max() / one.abs().max()).item()
