"""Log-probability, entropy and rank of each label without the (T, V) logits: TRL's fused LM head, or ours.

From 1.16 on TRL has one (`compat.scores_tokens`); below that, and where it cannot read the head, ours gives the same
numbers. Both compute what the model's own forward does behind its head (scale, cap, bias) from the names of config
fields, so their numbers are compared with the model's own logits before training. T tokens, H hidden size, V
vocabulary.
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

CHUNK = 1024  # labels whose logits are in memory together
NUM_TOKENS = 9  # of a row in which heads are compared
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # TRL 1.16 reads the first only
LARGEST_LOGIT = 200.0  # up to which heads are compared: a cap does not change the small ones of an untrained model
MASKED = 6e4  # a larger logit is that of a token that the model never predicts (chameleon: images)


@dataclass
class TokenScores(ModelOutput):
    """What a model returns when it is called with `fused_lm_head=True`, as in TRL 1.16."""

    loss: Tensor | None = None
    log_probs: Tensor | None = None  # of each label, zero where nothing is trained, (B, T - 1); (B, T) `shift_labels`
    entropy: Tensor | None = None  # of the distribution over the next token, without gradient, zero as above
    is_top1: Tensor | None = None  # whether the label is the most likely token
    label_mask: Tensor | None = None  # whether the label is trained
    aux_loss: Tensor | None = None  # the load-balancing statistic of a mixture of experts


def score_tokens(model: PreTrainedModel) -> None:
    """Let the model score labels by TRL's fused LM head, or by ours where TRL has none that reads this head.

    TRL's reads `bias`, which a head in which peft trains some tokens (`trainable_token_indices` with tied embeddings)
    does not have.
    """
    if scores_tokens() and not isinstance(model.get_output_embeddings(), TrainableTokensWrapper):
        cap_fused_head(model)
    else:
        add_token_scores(model)


def add_token_scores(model: PreTrainedModel) -> None:
    """Let `model(..., labels=labels, fused_lm_head=True)` return [`TokenScores`]; other calls are as before.

    TRL replaces `forward` of the model in the same way, so that engines wrap what computes the loss. A trainer of TRL
    that is built later replaces ours with one that ignores `fused_lm_head`, so this is called again before training. It
    does nothing where ours is the outermost.
    """
    if _is_ours(model.forward, "scores_tokens"):
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
            given = {"labels": labels, "shift_labels": shift_labels}
            return forward(*args, **kwargs, **{name: value for name, value in given.items() if value is not None})
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
        scores = _scores(self.get_output_embeddings(), states, shift_labels, *_transforms(text))
        count = scores.label_mask.sum().clamp(min=1) if num_items is None else num_items
        scores.loss = -scores.log_probs.sum() / count
        if kwargs.get("output_router_logits"):
            num_experts = text.num_experts
            top_k = text.num_experts_per_tok
            statistic: Any = load_balancing_loss_func
            scores.aux_loss = statistic(outputs.router_logits, num_experts, top_k, kwargs.get("attention_mask"))
            scores.loss = scores.loss + getattr(text, "router_aux_loss_coef", 0.0) * scores.aux_loss
        return scores

    # `generate` checks its arguments against the signature of the model's forward
    forward_with_scores.__wrapped__ = type(model).forward  # type: ignore[attr-defined]
    forward_with_scores.scores_tokens = True  # type: ignore[attr-defined]
    replace_forward(model, forward_with_scores)


def _is_ours(forward: Any, mark: str) -> bool:
    """Whether this is our forward, or accelerate's wrapper around it under autocast."""
    return hasattr(inspect.unwrap(forward, stop=lambda each: hasattr(each, mark)), mark)


def _transforms(text: PretrainedConfig) -> tuple[float, float | None]:
    """(factor of the logits, soft cap of the scaled logits), from the names that configs use for them."""
    scaling = getattr(text, "logits_scaling", None)  # Granite and MiniCPM3 divide by it, HyperCLOVA X multiplies
    if scaling is not None and text.model_type != "hyperclovax":
        scaling = 1 / scaling
    factors = [getattr(text, name, None) for name in ("logit_scale", "output_multiplier", "lm_head_multiplier")]
    scale = next((factor for factor in [*factors, scaling] if factor is not None), 1.0)
    return scale, next((cap for name in CAPS if (cap := getattr(text, name, None)) is not None), None)


def cap_fused_head(model: PreTrainedModel) -> None:
    """Let TRL's fused LM head of a model that caps its logits under another name cap them, too."""
    text: Any = model.config.get_text_config()
    cap = _transforms(text)[1]
    if getattr(text, CAPS[0], None) is not None or cap is None or _is_ours(model.forward, "is_capped"):
        return
    add_capped_head(model, CAPS[0], cap, mark="is_capped")


def check_fused_head(wrapped: nn.Module, model: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Whether the log-probabilities of the fused LM head are those of the model's own logits, on `NUM_TOKENS`.

    All ranks must call it with the model as it is `wrapped`, and the `dtype` in which it computes. It warns if they
    differ by more than rounding: TRL trains such a model, but not with the logits that it generates from. Under ZeRO-3
    nothing is compared: DeepSpeed would keep the head gathered from a fused forward without gradients on.
    """
    if is_deepspeed_zero3_enabled():
        return True
    probe = Probe(wrapped)
    calls = list[nn.Module]()
    factors = torch.logspace(0, 5, 6, base=4, device=probe.device)  # of the states of a row, so logits get large
    ids = probe.tokens(NUM_TOKENS).to(probe.device).expand(len(factors), -1)

    def scale(module: nn.Module, args: object, output: Any) -> Any:
        calls.append(module)
        if isinstance(output, tuple):
            return (output[0] * factors[:, None, None].to(output[0].dtype), *output[1:])
        if (states := output.get("last_hidden_state")) is not None:
            output["last_hidden_state"] = states * factors[:, None, None].to(states.dtype)
        return output

    handle = backbone(model).register_forward_hook(scale)  # both ways to the head pass it
    try:
        with probe.evaluating(), torch.no_grad(), model_errors_converted():
            # Prompt tuning puts virtual tokens before each row, which have logits, too
            logits = wrapped(input_ids=ids, use_cache=False).logits[:, -NUM_TOKENS:-1].float()
            found = wrapped(input_ids=ids, labels=ids, fused_lm_head=True).log_probs[:, 1 - NUM_TOKENS :].float()
    except (CannotRun, KernelError):  # it takes no row without padding; the first step raises what else is wrong
        return True
    finally:
        handle.remove()
    is_masked = logits.abs() >= MASKED
    sizes = logits.abs().masked_fill(is_masked, 0).amax((1, 2))
    gaps = (logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0] - found).abs().amax(1)
    differs = ~(gaps <= 1e-5 + 2 * sizes * max(1e-4, 8 * torch.finfo(dtype).eps))  # rounding of such numbers
    differs[1:] &= sizes[1:] <= LARGEST_LOGIT
    differs[0] |= is_masked[0].any() & (gaps[0] > 1e-5)  # a masked token has a small share in an untrained model
    # A forward that passes the backbone by is that of another model, which the probe refuses
    if not differs.any() or not calls:
        return True
    gap = gaps[differs][0].item()
    size = sizes[differs][0].item()
    warnings.warn(
        f"The loss of {type(model).__name__} reads TRL's fused LM head. Its log-probabilities differ from those of "
        f"the model's own logits by {gap:.2g} at logits of {size:.2g}. For example, one of them has a scale, a cap, a "
        "bias or a mask that the other leaves out. Pass `compute_loss_func`, which gets the model's own logits, to "
        "train with these.",
        stacklevel=2,
    )
    return False


def _scores(head: Any, states: Tensor, labels: Tensor, scale: float, softcap: float | None) -> Any:
    # `weight` of a head in which peft trains some tokens has them in their places
    weight = head.weight
    bias = head.original_module.bias if isinstance(head, TrainableTokensWrapper) else head.bias
    if isinstance(weight, DTensor):  # FSDP2; gathered once, not once per chunk
        weight = weight.full_tensor()
        bias = None if bias is None else bias.full_tensor()
    labels = labels.to(weight.device)
    mask = labels != IGNORE_INDEX
    # All positions, not only the trained ones: choosing these would make the host wait for the device. Where no
    # position of a chunk is trained, its numbers are masked.
    flat = states.to(weight.device).flatten(0, 1), labels.clamp(min=0).flatten()
    with maybe_gather_lm_head_ctx(weight, bias):
        log_probs, entropy, is_top1 = _ScoredLabels.apply(*flat[:1], weight, bias, flat[1], scale, softcap)
    log_probs, entropy, is_top1 = (x.view(mask.shape).masked_fill(~mask, 0) for x in (log_probs, entropy, is_top1))
    return TokenScores(log_probs=log_probs, entropy=entropy, is_top1=is_top1, label_mask=mask)


class _ScoredLabels(torch.autograd.Function):
    """(T, H) states -> log-probability, entropy, is_top1 of labels (T,); logits are made again in backward."""

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
        scores = []
        for rows, logits in _chunks(ctx, states, weight, bias=bias):
            target = labels[rows, None]
            log_probs = logits.log_softmax(-1)
            entropy = -(log_probs.exp() * log_probs).sum(-1)
            scores.append((log_probs.gather(1, target)[:, 0], entropy, logits.argmax(-1) == target[:, 0]))
        log_probs, entropy, is_top1 = (torch.cat(parts) for parts in zip(*scores, strict=True))
        ctx.mark_non_differentiable(entropy, is_top1)
        return log_probs, entropy, is_top1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, bias, labels = ctx.saved_tensors
        wants_states, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        with maybe_gather_lm_head_ctx(weight, bias):
            of_states = torch.empty_like(states) if wants_states else None
            exact = torch.promote_types(weight.dtype, torch.float32)
            of_weight = torch.zeros_like(weight, dtype=exact) if wants_weight else None
            of_bias = torch.zeros_like(bias, dtype=exact) if wants_bias else None
            cast = weight.to(ctx.dtype)
            for rows, logits in _chunks(ctx, states, weight, bias=bias):
                gradient = -logits.softmax(-1)
                gradient[torch.arange(len(logits), device=logits.device), labels[rows]] += 1
                gradient *= gradients[0][rows, None] * ctx.scale
                if ctx.softcap is not None:
                    gradient *= 1 - (logits / ctx.softcap) ** 2
                cast_gradient = gradient.to(ctx.dtype)
                if of_states is not None:
                    of_states[rows] = (cast_gradient @ cast).to(states.dtype)
                if of_weight is not None:
                    of_weight += cast_gradient.t() @ states[rows].to(ctx.dtype)
                if of_bias is not None:
                    of_bias += gradient.sum(0)
        of_weight = None if of_weight is None else of_weight.to(weight.dtype)
        return of_states, of_weight, None if of_bias is None else of_bias.to(bias.dtype), None, None, None


def _chunks(ctx: Any, states: Tensor, weight: Tensor, *, bias: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Logits (CHUNK, V) of successive rows, in fp32 at least."""
    cast = weight.to(ctx.dtype)
    for start in range(0, len(states), CHUNK):
        rows = slice(start, start + CHUNK)
        logits = F.linear(states[rows].to(ctx.dtype), cast, None if bias is None else bias.to(ctx.dtype))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * ctx.scale
        yield rows, logits if ctx.softcap is None else ctx.softcap * torch.tanh(logits / ctx.softcap)
