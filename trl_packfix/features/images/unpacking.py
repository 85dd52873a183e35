"""Train models with images that cannot be packed: the documents of a pack run as rows of a right-padded batch.

`isolation/unpacking.py` does the same for text, inside the decoder.
"""

from typing import Any

import torch
from torch import nn

from ...attention.models import base_model
from ...attention.packed_forward import BOUNDARIES
from ...isolation.arguments import named_arguments
from ...isolation.repair import AroundCall, AroundCalls
from ...isolation.unpacking import NUM_PADDING_TOKENS, join_outputs
from ...layout import LAYOUT_KEY


class UnpackedImages(AroundCalls):
    """Runs the whole base model of an image-text model on documents as rows, while it is installed.

    `UnpackedForward`, which does this for text, changes the inputs of the decoder. That is too late for models that
    build masks or positions from images before the decoder (gemma3 lets the tokens of an image attend to each other).
    All documents of a pack share one call. So every rank calls the model equally often, as sharded parameters (ZeRO-3,
    FSDP) need it, and images are in the order of their documents. Rows are padded with token 0. If token 0 stands for
    an image in a model, the test of the model, which runs such rows, fails, and the model is refused.
    """

    def __init__(self, model: nn.Module):
        super().__init__(base_model(model).base_model)  # `base_model` takes adapters off, the attribute the head

    def _around(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AroundCall:
        """Yield the arguments for the rows, get the output for them, and yield the output for the pack.

        A call without boundaries is no pack: nothing is yielded, and it runs unchanged. Shapes: B documents, and L
        tokens in a row.
        """
        boundaries = kwargs.get("cu_seq_lens_q")
        if boundaries is None:
            return
        # Some models pass the tokens by position
        kwargs = named_arguments(module, args, kwargs)
        # Padding behind the longest row, too, because transformers drops a mask that hides nothing
        row_length = int(kwargs["max_length_q"]) + NUM_PADDING_TOKENS
        # Which tokens of the rows are real, (B, L)
        mask = torch.arange(row_length, device=boundaries.device) < boundaries.diff()[:, None]
        # Without positions the model counts them anew in each row. No model takes the layout that batches have on CUDA
        names_of_pack = (*BOUNDARIES, LAYOUT_KEY, "position_ids")
        row_arguments = {name: value for name, value in kwargs.items() if name not in names_of_pack}
        for name in ("input_ids", "token_type_ids", "mm_token_type_ids"):  # (1, T)
            tokens = row_arguments.get(name)
            if tokens is not None:
                row_arguments[name] = tokens.new_zeros(mask.shape).masked_scatter(mask, tokens)
        output = yield (), row_arguments | {"attention_mask": mask.long()}
        # Select the real tokens from the states, (B, L, hidden), and from the router logits of each layer, (B * L,
        # experts). `join_outputs` passes a list with a tensor for each batch, and there is one batch
        yield join_outputs(
            [output], lambda states: states[0][mask][None], lambda router_logits: router_logits[0][mask.flatten()]
        )
