"""The images of a pack divided among the ranks that share it. Ranks are played one after the other."""

import pytest
import torch
from support.vision import build_model, examples_of
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import ModelOutput

from trl_packfix.attention import tower_division
from trl_packfix.attention.forwards import _take_boundaries
from trl_packfix.attention.models import towers
from trl_packfix.attention.tower_attention import TOWER_ATTENTION
from trl_packfix.attention.tower_division import TowerDivision, divide, outermost
from trl_packfix.isolation.image_probe import HIGH, SQUARE, WIDE

DIVIDED = (
    "llava",
    "llava_next",
    "llava_onevision",
    "idefics2",
    "idefics3",
    "internvl",
    "qwen2_5_vl",
    "qwen3_vl",
    "glm4v",
)


def call_of_tower(family: str):
    """The tower of a family, and the arguments that it gets for a pack with three images."""
    model, examples = build_model(family).eval(), examples_of(family)
    (tower,) = [each for each in outermost(towers(model)) if "vision" in type(each).__name__.lower()]
    calls = []
    handle = tower.register_forward_pre_hook(lambda module, *given: calls.append(given), with_kwargs=True)
    text = torch.tensor([7, 8, 9])
    documents = [examples.joined([text, examples.image(*size), text]) for size in (SQUARE, WIDE, HIGH)]
    with torch.no_grad():
        model(**examples.packed(documents))
    handle.remove()
    return tower, _take_boundaries(tower, *calls[0])


def leaves(value) -> list[torch.Tensor]:
    if isinstance(value, ModelOutput):
        return leaves([*value.values()])
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in leaves(each)]
    return [value] if isinstance(value, torch.Tensor) else []


@pytest.mark.parametrize("degree", [2, 8])
@pytest.mark.parametrize("family", [*DIVIDED, "qwen2_5_vl on our attention", "qwen3_vl on our attention"])
def test_each_image_is_computed_once_and_all_ranks_get_it(family, degree, monkeypatch):
    name, *ours = family.split(" on ")
    tower, (args, kwargs) = call_of_tower(name)
    if ours:
        tower.config._attn_implementation = TOWER_ATTENTION
    sent, computed = {}, []

    def exchanged(flat, send, receive, group):
        sent[index] = flat.split(send)
        # What all send is known in the second round
        return torch.cat([sent[j][index] for j in sent]) if len(sent) == degree else flat.new_zeros(sum(receive))

    monkeypatch.setattr(tower_division, "exchange_pieces", exchanged)
    with torch.no_grad():
        whole = tower(*args, **kwargs)
        for index in [*range(degree)] * 2:
            own_args, own_kwargs, division = divide(args, kwargs, degree, index=index)
            found = division.exchanged(tower(*own_args, **own_kwargs), None)
            computed.append(division.rows[index])
    total = len(next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)))
    assert sum(computed[:degree]) == total and max(computed) < total
    assert 0 in computed or degree == 2 or total >= degree, "every rank has an image"
    assert type(found) is type(whole) and len(leaves(found)) == len(leaves(whole)) > 0
    for ours, theirs in zip(leaves(found), leaves(whole), strict=True):
        assert ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=1e-5)


def test_a_tower_that_joins_its_images_computes_them_on_every_rank():
    """Pixtral's patches of all images are one row."""
    _, (args, kwargs) = call_of_tower("mistral3")
    assert divide(args, kwargs, 2, index=1) == (args, kwargs, None)


def test_an_output_that_cannot_be_joined_is_refused():
    division = TowerDivision(rows=[2, 3], index=1, computed=3)
    with pytest.raises(
        ValueError, match=r"returned a tensor of shape \(1, 4\) for 3 of 5 .* 2 ranks.*Set `tokens_per_rank=None`"
    ):
        division.exchanged(BaseModelOutputWithPooling(torch.zeros(3, 4), torch.zeros(1, 4)), None)
