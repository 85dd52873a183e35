"""What enters the decoder of an image-text model, cut to the part of a rank."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.vision import build_model, examples_of

from trl_packfix import PackingLeakError
from trl_packfix.attention.decoder_inputs import cut_to_part
from trl_packfix.isolation.packed_model import PackedModel


def inputs_of(is_image: list[bool], size: int = 3) -> dict:
    """Inputs of a decoder whose values are their places in the pack: in each row, and in each token of an image."""
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
    """Also where the number of rows is that of another axis, and where a part has no image."""
    whole = inputs_of(pattern * 4)
    size = len(pattern) * 4 // degree
    parts = [cut_to_part(whole, size, index) for index in range(degree)]
    for index, part in enumerate(parts):
        rows = torch.arange(index * size, (index + 1) * size)
        assert torch.equal(part["inputs_embeds"][0, :, 0], rows.float())
        assert torch.equal(part["position_ids"], rows.expand(4, 1, -1))
        assert torch.equal(part["per_layer_inputs"][0, :, 0, 0], rows)
        of_images = rows[part["visual_pos_masks"][0]].float()
        assert [each[:, 0].tolist() for each in part["deepstack_visual_embeds"]] == [
            of_images.tolist(),
            (of_images + 0.5).tolist(),
        ]
        assert part["attention_mask"] is None and part["use_cache"] is False
    assert sum(len(part["deepstack_visual_embeds"][0]) for part in parts) == 4 * sum(pattern)


def test_what_was_cut_before_stays():
    """Packs of text are cut when they are collated."""
    part = {"inputs_embeds": torch.zeros(1, 4, 3), "other": torch.zeros(7, 2)}
    assert cut_to_part(part, 4, 1) is part
    tokens = {"input_ids": torch.zeros(1, 4)}
    assert cut_to_part(tokens, 4, 1) is tokens


@pytest.mark.parametrize("value", [torch.zeros(5, 3), {3: torch.zeros(5, 3)}, (None, [torch.zeros(5, 3)])])
def test_what_cannot_be_cut_is_refused(value):
    whole = inputs_of([True, False, True, False]) | {"deepstack_features": value, "scale": torch.tensor(2.0)}
    with pytest.raises(
        ValueError,
        match=r"`deepstack_features` of shape \(5, 3\) enters.*4 tokens.*holds 2.*Set `tokens_per_rank=None`",
    ):
        cut_to_part(whole, 2, 0)


def test_ranks_do_not_share_packs_of_a_model_that_runs_on_rows():
    """Models that see images in both directions: no part has all tokens of an image."""
    model = build_model("paligemma")
    packed = PackedModel(
        model, torch.float32, "cpu", 512, on_leak="unpack", shares_packs=True, images=examples_of("paligemma")
    )
    packed.prove(model)
    with pytest.raises(PackingLeakError, match=r"shared by 2 ranks, and the model is unpacked.*`tokens_per_rank=None`"):
        packed.prove_degree(model, 2)
