"""Fused LM heads: log-probability and entropy of each label, without the (T, V) logits of all tokens in memory.

A fused LM head computes the logits of a chunk of labels, takes log-probability and entropy of each label from them
(`TokenScores`), and frees the logits. From version 1.16 on TRL has a fused head (`compat.scores_tokens`). This module
has a fused head that returns the same scores, for earlier versions, and for models whose head TRL's cannot read.
`objective.py` adds one of the two to the model with `score_tokens`, and computes the loss from the scores.

A model may scale, cap or shift its logits after the head. Both fused heads know this only from the names of config
fields. So `check_fused_head` compares their scores with the model's own logits before training.

Shapes: T tokens, H hidden size, V vocabulary, B rows of a batch.
"""

import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.utils import ModelOutput
from trl.trainer.utils import maybe_gather_lm_head_ctx

from ..attention.kernel_errors import KernelError
from ..attention.models import backbone
from ..compat import add_capped_head, replace_forward, scores_tokens
from ..data.collator import IGNORE_INDEX
from ..isolation.probe import Probe
from ..isolation.probed_model import CannotRun, model_errors_converted

CHUNK_SIZE = 1024  # labels whose logits are in memory together
NUM_PROBE_TOKENS = 9  # length of the row on which the fused head and the model's own head are compared
# Config fields with a soft cap of the logits. TRL 1.16 reads only the first.
CAP_FIELDS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
# The two heads are compared on logits up to this size. The logits of an untrained model are small, so they are scaled
# up, because a cap changes only large logits.
LARGEST_LOGIT = 200.0
MASKED_LOGIT = 6e4  # a larger logit belongs to a token that the model never predicts (chameleon: images)


@dataclass
class TokenScores(ModelOutput):
    """The output of a model that is called with `fused_lm_head=True`, as in TRL 1.16.

    The scores of labels have the shape (B, T - 1); if the model gets `shift_labels`, (B, T).

    Attributes:
        loss: the negative log-probability of the trained labels, as a mean or divided by `num_items_in_batch`.
        log_probs: the log-probability of each label; 0 where the label is not trained.
        entropy: the entropy of the distribution over the next token, without gradient; 0 where nothing is trained.
        is_top1: whether the label is the most likely token.
        label_mask: whether the label is trained.
        aux_loss: the load-balancing statistic of a mixture of experts.
    """

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None


def score_tokens(model: PreTrainedModel) -> None:
    """Make the model score labels with TRL's fused LM head, or with this module's if TRL has none for the model.

    TRL's fused head reads `bias` of the head. A head in which peft trains some tokens (`trainable_token_indices` with
    tied embeddings) has no `bias`.
    """
    # `scores_tokens`: TRL's fused head returns a log-probability for each token, on every device
    if scores_tokens() and not isinstance(model.get_output_embeddings(), TrainableTokensWrapper):
        cap_fused_head(model)  # TRL's trainer has added the head already; only a cap may be missing
    else:
        add_token_scores(model)


def add_token_scores(model: PreTrainedModel) -> None:
    """Make `model(..., labels=labels, fused_lm_head=True)` return [`TokenScores`]. Other calls stay as they are.

    The `forward` of the model is replaced, as TRL does it, so that an engine (DDP, FSDP) wraps the computation of the
    loss, too. `add_token_scores` does nothing if its `forward` is on the model already. It is called again before
    training, because a TRL trainer that was constructed in between has replaced `forward` once more.
    """
    if _has_mark(model.forward, "has_token_scores"):
        return
    forward = model.forward
    text = model.config.get_text_config()

    def forward_with_scores(
        self: PreTrainedModel,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if not fused_lm_head:
            label_kwargs = {"labels": labels, "shift_labels": shift_labels}
            kwargs |= {name: value for name, value in label_kwargs.items() if value is not None}
            return forward(*args, **kwargs)
        num_items = kwargs.pop("num_items_in_batch", None)
        kwargs["use_cache"] = False
        if getattr(text, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        outputs = self.base_model(*args, **kwargs)
        states = outputs.last_hidden_state
        if shift_labels is None:
            assert labels is not None
            states = states[:, :-1]
            shift_labels = labels[:, 1:]
        scale, softcap = _logit_transforms(text)
        scores = _compute_scores(self.get_output_embeddings(), states, shift_labels, scale, softcap)
        count = scores.label_mask.sum().clamp(min=1) if num_items is None else num_items
        scores.loss = -scores.log_probs.sum() / count
        if kwargs.get("output_router_logits"):
            num_experts = text.num_experts
            top_k = text.num_experts_per_tok
            statistic: Any = load_balancing_loss_func  # its annotation says that it may return an integer
            scores.aux_loss = statistic(outputs.router_logits, num_experts, top_k, kwargs.get("attention_mask"))
            scores.loss = scores.loss + getattr(text, "router_aux_loss_coef", 0.0) * scores.aux_loss
        return scores

    # `generate` checks its arguments against the signature of the model's forward
    forward_with_scores.__wrapped__ = type(model).forward  # type: ignore[attr-defined]
    forward_with_scores.has_token_scores = True  # type: ignore[attr-defined]
    replace_forward(model, forward_with_scores)


def _has_mark(forward: Any, mark: str) -> bool:
    """Return whether a forward, or one that it wraps (accelerate's does under autocast), has the attribute `mark`."""
    return hasattr(inspect.unwrap(forward, stop=lambda function: hasattr(function, mark)), mark)


def _logit_transforms(text: PretrainedConfig) -> tuple[float, float | None]:
    """Read from a config how the model changes its logits.

    Returns:
        The factor of the logits, and the soft cap of the scaled logits or None.
    """
    scaling = getattr(text, "logits_scaling", None)  # Granite and MiniCPM3 divide by it, HyperCLOVA X multiplies
    if scaling is not None and text.model_type != "hyperclovax":
        scaling = 1 / scaling
    factors = [getattr(text, name, None) for name in ("logit_scale", "output_multiplier", "lm_head_multiplier")]
    scale = next((factor for factor in [*factors, scaling] if factor is not None), 1.0)
    caps = [getattr(text, name, None) for name in CAP_FIELDS]
    return scale, next((cap for cap in caps if cap is not None), None)


def cap_fused_head(model: PreTrainedModel) -> None:
    """Make TRL's fused LM head cap the logits of a model whose config names the cap by a field that TRL ignores."""
    text: Any = model.config.get_text_config()
    cap = _logit_transforms(text)[1]
    field_of_trl = CAP_FIELDS[0]
    is_read_by_trl = getattr(text, field_of_trl, None) is not None
    if cap is None or is_read_by_trl or _has_mark(model.forward, "is_capped"):
        return
    # Add TRL's head again, with the cap, and mark the forward as capped
    add_capped_head(model, field_of_trl, cap, mark="is_capped")


def check_fused_head(wrapped: nn.Module, model: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Return whether the fused LM head and the model's own logits give equal log-probabilities; warn if they do not.

    The two are compared on a batch of six equal short rows. The states that enter the head are multiplied by a factor,
    from 1 in the first row to 1024 in the last, so that logits get large. All ranks must call this function. A
    difference means that the model trains with other logits than it generates from. Nothing is compared under ZeRO-3,
    where DeepSpeed would not release the gathered head after a fused forward without gradients.

    Args:
        wrapped: the model as the engine has wrapped it.
        model: the model without a wrapper.
        dtype: the dtype in which the model computes, which sets the size of rounding.
    """
    if is_deepspeed_zero3_enabled():
        return True
    probe = Probe(wrapped)  # draws tokens, and sets the model to eval mode
    scaled_modules = list[nn.Module]()
    factors = torch.logspace(0, 5, 6, base=4, device=probe.device)  # one for each row of the batch
    ids = probe.tokens(NUM_PROBE_TOKENS).to(probe.device).expand(len(factors), -1)

    def scale_states(module: nn.Module, args: object, output: Any) -> Any:
        scaled_modules.append(module)
        if isinstance(output, tuple):
            return (output[0] * factors[:, None, None].to(output[0].dtype), *output[1:])
        states = output.get("last_hidden_state")
        if states is not None:
            output["last_hidden_state"] = states * factors[:, None, None].to(states.dtype)
        return output

    handle = backbone(model).register_forward_hook(scale_states)  # the states of both heads come from the backbone
    try:
        # Errors of the model become `CannotRun`, and errors of a kernel `KernelError`
        with probe.evaluating(), torch.no_grad(), model_errors_converted():
            # Only the last positions are read: prompt tuning puts virtual tokens before each row
            logits = wrapped(input_ids=ids, use_cache=False).logits[:, -NUM_PROBE_TOKENS:-1].float()
            scores = wrapped(input_ids=ids, labels=ids, fused_lm_head=True)
            fused_log_probs = scores.log_probs[:, 1 - NUM_PROBE_TOKENS :].float()
    except (CannotRun, KernelError):
        # The model cannot run these rows. If it cannot run packs either, training raises the error
        return True
    finally:
        handle.remove()
    # For each row, the largest logit and the largest difference of a log-probability, (6,)
    is_masked = logits.abs() >= MASKED_LOGIT
    sizes = logits.abs().masked_fill(is_masked, 0).amax((1, 2))
    own_log_probs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    gaps = (own_log_probs - fused_log_probs).abs().amax(1)
    rounding = 2 * sizes * max(1e-4, 8 * torch.finfo(dtype).eps)
    differs = ~(gaps <= 1e-5 + rounding)  # True also for a gap that is not a number
    differs &= own_log_probs.isfinite().all(1)  # a model whose own logits are no numbers has none to compare with
    # The rows with scaled states count only up to logits of this size
    differs[1:] &= sizes[1:] <= LARGEST_LOGIT
    # A mask that only one of the two applies may not reach the limit of rounding: an untrained model finds no token
    # likely, so leaving some tokens out of the softmax changes log-probabilities only a little. So with a mask the
    # first row, whose states are not scaled, has a limit without rounding
    differs[0] |= is_masked[0].any() & (gaps[0] > 1e-5)
    # If the hook scaled nothing, the forward did not run the backbone, and no warning is given here: the proof of
    # isolation refuses such a model.
    if not differs.any() or not scaled_modules:
        return True
    gap = gaps[differs][0].item()
    size = sizes[differs][0].item()
    warnings.warn(
        f"The loss of {type(model).__name__} reads a fused LM head, whose log-probabilities differ from those of "
        f"the model's own logits by {gap:.2g} at logits of {size:.2g}. For example, one of them has a scale, a cap, a "
        "bias or a mask that the other leaves out. Pass `compute_loss_func`, which gets the model's own logits, to "
        "train with these.",
        stacklevel=2,
    )
    return False


def _compute_scores(head: Any, states: Tensor, labels: Tensor, scale: float, softcap: float | None) -> Any:
    """Return [`TokenScores`] without a loss.

    Args:
        head: the module that computes logits from states.
        states: the states that enter the head, (B, T, H).
        labels: the label of each state, (B, T); `IGNORE_INDEX` where nothing is trained.
        scale: the factor of the logits.
        softcap: the soft cap of the scaled logits, or None.
    """
    # In a head in which peft trains some tokens, `weight` has the trained rows in their places
    weight = head.weight
    bias = head.original_module.bias if isinstance(head, TrainableTokensWrapper) else head.bias
    if isinstance(weight, DTensor):  # FSDP2 shards the head. It is gathered once here, not once for each chunk.
        weight = weight.full_tensor()
        bias = None if bias is None else bias.full_tensor()
    labels = labels.to(weight.device)
    mask = labels != IGNORE_INDEX
    # All positions are computed, and the scores of untrained positions are masked. To select the trained positions, the
    # host would have to wait for the device.
    flat_states = states.to(weight.device).flatten(0, 1)
    flat_labels = labels.clamp(min=0).flatten()
    with maybe_gather_lm_head_ctx(weight, bias):  # under ZeRO-3 the weight is gathered in this context
        flat_scores = _ScoredLabels.apply(flat_states, weight, bias, flat_labels, scale, softcap)
    log_probs, entropy, is_top1 = (scores.view(mask.shape).masked_fill(~mask, 0) for scores in flat_scores)
    return TokenScores(log_probs=log_probs, entropy=entropy, is_top1=is_top1, label_mask=mask)


def entropies(log_probs: Tensor) -> Tensor:
    """Return the entropies of distributions, (...), from log-probabilities (..., V), which it changes in place.

    A token that a mask excludes has the log-probability -inf. It adds nothing, and 0 * -inf would not be a number.
    """
    probabilities = log_probs.exp()
    return -(probabilities * log_probs.clamp_(min=torch.finfo(log_probs.dtype).min)).sum(-1)


class _ScoredLabels(torch.autograd.Function):
    """An autograd function from states (T, H) to the log-probability, the entropy and is_top1 of labels (T,).

    It saves no logits: the backward computes them again, chunk by chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        device = states.device.type
        ctx.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
        ctx.scale = scale
        ctx.softcap = softcap
        ctx.save_for_backward(states, weight, bias, labels)
        chunk_scores = []
        for rows, logits in _logit_chunks(ctx, states, weight.to(ctx.dtype), bias=bias):
            target = labels[rows, None]
            log_probs = logits.log_softmax(-1)
            label_log_probs = log_probs.gather(1, target)[:, 0]
            chunk_scores.append((label_log_probs, entropies(log_probs), logits.argmax(-1) == target[:, 0]))
        log_probs, entropy, is_top1 = (torch.cat(chunks) for chunks in zip(*chunk_scores, strict=True))
        ctx.mark_non_differentiable(entropy, is_top1)
        return log_probs, entropy, is_top1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, bias, labels = ctx.saved_tensors
        wants_states, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        with maybe_gather_lm_head_ctx(weight, bias):
            states_grad = torch.empty_like(states) if wants_states else None
            # Gradients of the head are sums over chunks, in fp32 at least
            sum_dtype = torch.promote_types(weight.dtype, torch.float32)
            weight_grad = torch.zeros_like(weight, dtype=sum_dtype) if wants_weight else None
            bias_grad = torch.zeros_like(bias, dtype=sum_dtype) if wants_bias else None
            cast_weight = weight.to(ctx.dtype)
            for rows, logits in _logit_chunks(ctx, states, cast_weight, bias=bias):
                # The derivative of the log-probability by each logit: 1 for the label, minus the probability
                logits_grad = -logits.softmax(-1)
                logits_grad[torch.arange(len(logits), device=logits.device), labels[rows]] += 1
                logits_grad *= gradients[0][rows, None] * ctx.scale
                if ctx.softcap is not None:
                    logits_grad *= 1 - (logits / ctx.softcap) ** 2
                cast_grad = logits_grad.to(ctx.dtype)
                if states_grad is not None:
                    states_grad[rows] = (cast_grad @ cast_weight).to(states.dtype)
                if weight_grad is not None:
                    weight_grad += cast_grad.t() @ states[rows].to(ctx.dtype)
                if bias_grad is not None:
                    bias_grad += logits_grad.sum(0)
        weight_grad = None if weight_grad is None else weight_grad.to(weight.dtype)
        bias_grad = None if bias_grad is None else bias_grad.to(bias.dtype)
        return states_grad, weight_grad, bias_grad, None, None, None


def _logit_chunks(
    ctx: Any, states: Tensor, cast_weight: Tensor, *, bias: Tensor | None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of the states and the logits of each, (CHUNK_SIZE, V), in fp32 at least.

    `cast_weight` is the weight of the head in the dtype of the computation, `ctx.dtype`.
    """
    for first_row in range(0, len(states), CHUNK_SIZE):
        rows = slice(first_row, first_row + CHUNK_SIZE)
        logits = F.linear(states[rows].to(ctx.dtype), cast_weight, None if bias is None else bias.to(ctx.dtype))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * ctx.scale
        yield rows, logits if ctx.softcap is None else ctx.softcap * torch.tanh(logits / ctx.softcap)
