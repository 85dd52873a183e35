"""Train models that cannot be packed: hooks on the backbone run the documents of a pack as right-padded batches.

The *backbone* is the model without its LM head. The hooks get a pack, and return states in the form of the pack to the
head and the loss. So everything else is as in packed training. In a causal model padding at the end cannot change
earlier tokens, so each document is computed as it is alone. The cost is the padding. `packed_model.py` installs these
hooks on a model that *leaks*, in which documents of a pack change each other, if `on_leak` allows it.
`features/pack_forward/` does the reverse: it gives packs to the backbone of a model that gets padded batches.

*Boundaries* (`cu_seq_lens_q`) say where the documents of a pack begin. `DocumentRows` (`attention/rows.py`) has the
documents as rows of `padded_batches`, and joins tensors of the batches to a tensor of the pack.
"""

from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.utils import ModelOutput

from ..attention.forwards import CallArguments
from ..attention.models import backbone, base_model
from ..attention.packed_forward import BOUNDARIES, undivided_budget
from ..attention.rows import DocumentRows, PaddedBatch, TensorAxes
from ..layout import LAYOUT_KEY
from .repair import LOGIT_AXES, AroundCall, AroundCalls, is_sharded

# Arguments of the backbone for a pack that it does not get for rows, or gets in another form
PACK_ARGUMENTS = (*BOUNDARIES, "position_ids", "input_ids", "inputs_embeds", "attention_mask")
TOKEN_AXES = TensorAxes(tokens=(1,), batch=0)  # axes of a tensor (rows, tokens, ...)
BackboneOutput = tuple[Any, ...] | ModelOutput
# Padded tokens behind the longest row: transformers drops a mask that hides nothing, and some models need the mask
NUM_PADDING_TOKENS = 1


class UnpackedForward(AroundCalls):
    """Runs the backbone of `model` with each document of a pack as a separate row, while it is installed.

    A forward without boundaries is unchanged. Documents of similar length share a call, as the rows of a batch. A batch
    is padded to its longest document, and then has at most as many tokens as the pack. (After that, each row gets
    `NUM_PADDING_TOKENS` more.) If parameters are sharded (ZeRO-3, FSDP), all documents share one call, so that all
    ranks gather the same parameters in the same order.
    """

    def __init__(self, model: nn.Module):
        self.model = base_model(model)
        super().__init__(backbone(self.model))
        self._boundaries: list[Tensor | None] = []  # of each forward of the whole model that is running

    def _register(self) -> list[RemovableHandle]:
        # Many models do not pass boundaries on to their backbone, so a hook on the whole model notes them. It also
        # removes the layout, which batches have on CUDA (`data/by_length.py`) and no model takes.
        def note_boundaries(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
            self._boundaries.append(kwargs.get("cu_seq_lens_q"))
            return args, {name: value for name, value in kwargs.items() if name != LAYOUT_KEY}

        def forget_boundaries(*call: object) -> None:
            if self._boundaries:  # empty if another hook has raised before `note_boundaries` ran
                self._boundaries.pop()

        return [
            self.model.register_forward_pre_hook(note_boundaries, with_kwargs=True),
            self.model.register_forward_hook(forget_boundaries, always_call=True),
            *super()._register(),
        ]

    def remove(self) -> None:
        super().remove()
        self._boundaries.clear()  # of forwards that were interrupted

    def _around(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AroundCall:
        """Yield the arguments for the first batch of documents, get its output, and yield the output for the pack.

        A call without boundaries is no pack: nothing is yielded, and it runs unchanged.
        """
        boundaries = kwargs.get("cu_seq_lens_q")
        if boundaries is None and self._boundaries:
            boundaries = self._boundaries[-1]
        if boundaries is None:
            return
        # 1. Find the tokens, or the embeddings. Image-text models compute embeddings before the backbone. The only
        #    positional argument of a backbone is `input_ids`.
        name = "input_ids" if args or kwargs.get("input_ids") is not None else "inputs_embeds"
        tokens = args[0] if args else kwargs[name]
        row_arguments = {key: value for key, value in kwargs.items() if key not in PACK_ARGUMENTS}
        # 2. Divide the documents into batches. While the leak probe tests the model, `undivided_budget` makes one batch
        #    of all documents, so that documents of any two lengths are tested in one batch.
        budget = inf if is_sharded(module) else tokens.shape[1]  # most tokens of a batch, without `NUM_PADDING_TOKENS`
        # Collators may add empty documents, so that all packs have the same number of boundaries.
        lengths = [length for length in boundaries.diff().tolist() if length]
        documents = DocumentRows(lengths, tokens.device, undivided_budget(budget), padding=NUM_PADDING_TOKENS)

        def inputs_of(batch: PaddedBatch) -> dict[str, Any]:
            sizes = torch.tensor(batch.lengths, device=tokens.device)
            # `longest` includes the tokens of padding, so the mask hides at least one token of each row
            mask = torch.arange(batch.longest, device=tokens.device) < sizes[:, None]
            return {**row_arguments, name: batch.split(tokens, TOKEN_AXES), "attention_mask": mask.long()}

        # 3. Run the first batch as the call that is under way: this generator yields its arguments (positional, by
        #    name) and gets its output (`AroundCalls`). Run all others by `forward`, so that no hook runs a second time.
        first_output = yield (), inputs_of(documents.padded_batches[0])
        outputs = [first_output]
        outputs += [module.forward(**inputs_of(batch)) for batch in documents.padded_batches[1:]]
        # 4. Join the outputs.
        yield join_outputs(
            outputs,
            join_states=lambda values: documents.join(values, TOKEN_AXES),
            join_router_logits=lambda values: documents.join(values, LOGIT_AXES),
        )


def join_outputs(
    outputs: list[Any],
    join_states: Callable[[list[Tensor]], Tensor],
    join_router_logits: Callable[[list[Tensor]], Tensor],
) -> BackboneOutput:
    """Join the outputs of a backbone for batches of documents to its output for the pack.

    It is the first output, with the joined states of all outputs and the joined router logits of each layer. Other
    values in it stay those of the first batch; the head and the loss do not read them.

    Args:
        join_states: joins last hidden states, (rows, tokens, hidden) of each batch.
        join_router_logits: joins the logits of one layer's router, of all batches.
    """
    output = outputs[0]
    if isinstance(output, tuple):
        return (join_states([batch_output[0] for batch_output in outputs]), *output[1:])
    output["last_hidden_state"] = join_states([batch_output["last_hidden_state"] for batch_output in outputs])
    if output.get("router_logits") is not None:
        layers = zip(*(batch_output["router_logits"] for batch_output in outputs), strict=True)
        output["router_logits"] = tuple(join_router_logits([*layer]) for layer in layers)
    return output
