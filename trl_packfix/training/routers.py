"""Whether a model has a router: some configs have the fields of a mixture of experts although no layer has experts."""

from typing import Any

from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder


def gives_router_logits(model: PreTrainedModel) -> bool:
    """Whether a layer has a router. True also for a model that does not declare the classes of its routers."""
    classes: list[Any] = []
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            given = (part._can_record_outputs or {}).get("router_logits", [])
            given = given if isinstance(given, list) else [given]
            classes += [each.target_class if isinstance(each, OutputRecorder) else each for each in given]
    return not classes or any(isinstance(module, tuple(set(classes))) for module in model.modules())
