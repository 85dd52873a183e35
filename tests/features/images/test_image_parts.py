"""The images of a pack divided among the ranks that share it, and what enters their decoders. Ranks are played."""

import pytest
import torch
from features.images.processed import examples_of
from hypothesis import given
from hypothesis import strategies as st
from support.vision import build_model
from torch.utils._pytree import tree_leaves
from transformers.modeling_outputs import BaseModelOutputWithPooling

from trl_packfix.attention.models import find_towers
from trl_packfix.features.images import parts as image_parts
from trl_packfix.features.images.parts import TowerDivision, cut_to_part, divide_tower_inputs, outermost_towers
from trl_packfix.features.images.probe import HIGH, SQUARE, WIDE
from trl_packfix.features.images.tower_attention import TOWER_ATTENTION
from trl_packfix.features.images.tower_hooks import _drop_boundaries
from trl_packfix.group import Group

DIVIDED = "llava llava_next llava_onevision idefics2 idefics3 internvl qwen2_5_vl qwen3_vl glm4v".split()


def call_of_tower(family: str):
    """Return the tower of a family, and the arguments that it gets for a pack with three images."""
    model = build_model(family).eval()
    examples = examples_of(family)
    (tower,) = [tower for tower in outermost_towers(find_towers(model)) if "vision" in type(tower).__name__.lower()]
    calls = []
    handle = tower.register_forward_pre_hook(lambda module, *args: calls.append(args), with_kwargs=True)
    text = torch.tensor([7, 8, 9])
    documents = [examples.join_content([text, examples.image(*size), text]) for size in (SQUARE, WIDE, HIGH)]
    with torch.no_grad():
        model(**examples.packed_batch(documents))
    handle.remove()
    return tower, _drop_boundaries(tower, *calls[0])


def leaves(value) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("degree", [2, 8])
@pytest.mark.parametrize("family", [*DIVIDED, "qwen2_5_vl on our attention", "qwen3_vl on our attention"])
def test_each_image_is_computed_once_and_all_ranks_get_it(family, degree, monkeypatch):
    name, *ours = family.split(" on ")
    tower, (args, kwargs) = call_of_tower(name)
    if ours:
        tower.config._attn_implementation = TOWER_ATTENTION
    sent = [[] for _ in range(degree)]  # by rank: for each tensor of its output, the pieces for all ranks
    computed = []

    def exchanged(flat, send, receive, group):
        exchange = len(sent[index])
        sent[index].append(flat.split(send))
        if exchange < num_tensors:  # what all send is known in the second round
            return flat.new_zeros(sum(receive))
        return torch.cat([pieces[exchange % num_tensors][index] for pieces in sent])

    monkeypatch.setattr(image_parts, "exchange_pieces", exchanged)
    with torch.no_grad():
        expected = tower(*args, **kwargs)
        num_tensors = len(leaves(expected))
        for index in [*range(degree)] * 2:
            own_args, own_kwargs, division = divide_tower_inputs(args, kwargs, Group(degree, index))
            joined = division.gather_outputs(tower(*own_args, **own_kwargs))
            computed.append(division.rows_by_rank[index])
    total = len(next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)))
    assert sum(computed[:degree]) == total
    assert max(computed) < total
    assert 0 in computed or degree == 2 or total >= degree, "every rank has an image"
    assert type(joined) is type(expected)
    assert len(leaves(joined)) == len(leaves(expected)) > 0
    for ours, theirs in zip(leaves(joined), leaves(expected), strict=True):
        assert ours.shape == theirs.shape
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_tower_that_joins_its_images_computes_them_on_every_rank():
    """Pixtral's patches of all images are one row."""
    _, (args, kwargs) = call_of_tower("mistral3")
    assert divide_tower_inputs(args, kwargs, Group(2, 1)) == (args, kwargs, None)


def test_an_output_that_cannot_be_joined_is_refused():
    division = TowerDivision(rows_by_rank=[2, 3], group=Group(2, 1), num_computed=3)
    with pytest.raises(
        ValueError, match=r"returned a tensor of shape \(1, 4\) for 3 of 5 .* 2 ranks.*Set `tokens_per_rank=None`"
    ):
        division.gather_outputs(BaseModelOutputWithPooling(torch.zeros(3, 4), torch.zeros(1, 4)))


# What enters the decoder


def inputs_of(is_image: list[bool], size: int = 3) -> dict:
    """Return inputs of a decoder whose values are their places in the pack, in each row and each token of an image."""
    places = torch.arange(len(is_image))
    of_images = places[torch.tensor(is_image)][:, None].expand(-1, size).float()
    return {
        "inputs_embeds": places[None, :, None].expand(1, -1, size).float(),
        "position_ids": places.expand(4, 1, -1),
        "visual_pos_masks": torch.tensor(is_image)[None],
        "deepstack_visual_embeds": [of_images, of_images + 0.5],
        "per_layer_inputs": places[None, :, None, None].expand(1, -1, 2, size),
        "attention_mask": None,
        "use_cache": False,
    }


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.sampled_from([1, 2, 4]))
def test_every_row_has_its_inputs(pattern, degree):
    """Rows must have their inputs also where their number is that of another axis, and where a part has no image."""
    inputs = inputs_of(pattern * 4)
    size = len(pattern) * 4 // degree
    inputs_of_ranks = [cut_to_part(inputs, size, index) for index in range(degree)]
    for index, own_inputs in enumerate(inputs_of_ranks):
        rows = torch.arange(index * size, (index + 1) * size)
        assert torch.equal(own_inputs["inputs_embeds"][0, :, 0], rows.float())
        assert torch.equal(own_inputs["position_ids"], rows.expand(4, 1, -1))
        assert torch.equal(own_inputs["per_layer_inputs"][0, :, 0, 0], rows)
        of_images = rows[own_inputs["visual_pos_masks"][0]].float()
        features = [layer[:, 0].tolist() for layer in own_inputs["deepstack_visual_embeds"]]
        assert features == [of_images.tolist(), (of_images + 0.5).tolist()]
        assert (own_inputs["attention_mask"], own_inputs["use_cache"]) == (None, False)
    assert sum(len(own_inputs["deepstack_visual_embeds"][0]) for own_inputs in inputs_of_ranks) == 4 * sum(pattern)


def test_what_was_cut_before_stays():
    """Packs of text are cut when they are collated."""
    for inputs in (
        {"inputs_embeds": torch.zeros(1, 4, 3), "other": torch.zeros(7, 2)},
        {"input_ids": torch.zeros(1, 4)},
    ):
        assert cut_to_part(inputs, 4, 1) is inputs


@pytest.mark.parametrize("value", [torch.zeros(5, 3), {3: torch.zeros(5, 3)}, (None, [torch.zeros(5, 3)])])
def test_what_cannot_be_cut_is_refused(value):
    inputs = inputs_of([True, False, True, False]) | {"deepstack_features": value, "scale": torch.tensor(2.0)}
    message = r"`deepstack_features` of shape \(5, 3\) enters.*4 tokens.*holds 2.*Set `tokens_per_rank=None`"
    with pytest.raises(ValueError, match=message):
        cut_to_part(inputs, 2, 0)
