"""Compare one training step on packs with the same step on unpacked documents, before the first optimizer step.

The proof of isolation (`isolation/`) tests the model alone. Wrong labels, divisors and weights come after the model: in
the collator, in the loss, and in the sums over micro-batches and ranks. `FirstStep.compare` tests these too. The
callback `BeforeFirstStep` calls it, and reports the `StepComparison` that it returns (`step_comparison.py`).

A few short documents of the run are trained twice:

- *packed*: in two micro-batches on each rank, by the methods of the trainer that every training step calls.
- *unpacked*, as the reference: each document is a row of its own. The model has the attention with which the user gave
  it, and its own LM head. The loss of a document is the sum over its trained tokens, divided by a count that is made
  from the documents here. The reference uses no collator, packed attention, fused LM head or loss of this package.

The losses and gradients of the two runs must be equal up to rounding. Gradients are compared by products with random
vectors (`isolation/gradients.py`), so no gradient is copied. The whole comparison costs less than a forward and
backward pass of 1,024 tokens, because documents are shortened.

Some models compute long documents differently. So `FirstStep.compare_longer` compares again when a training step holds
a document at least twice as long as every document compared before. It compares only the last hidden states.

Words: A *trained token* is a token with a label. A *pack* is a row of several documents; here it is a `RankShare`, the
list of its documents with the `group` of ranks that share it. A *probe* runs a model for tests. With sequence
parallelism, `degree` neighbouring ranks share a pack, and each of them holds a *part* of it. An *engine* (DDP,
DeepSpeed, FSDP) wraps the model and exchanges its gradients or parameters between ranks. *Copies* are ranks that count
the same documents, because they divide one model between them (tensor parallelism).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from math import inf, isfinite
from typing import Any, NamedTuple

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from transformers.training_args import OptimizerNames
from transformers.utils import logging

from ..data.rank_share import RankShare
from ..data.row_values import WEIGHTS
from ..isolation.check_step import count_trained, document_length, mask_labels
from ..isolation.gradients import SMALL_SHARE, gradient_products, largest_gap, relative_gaps
from ..isolation.isolation_report import PackingLeakError
from ..isolation.probe import Probe
from ..isolation.ties import FirstOfTies
from ..layout import IGNORE_INDEX
from .compiled_layers import layers_uncompiled
from .groups import check_same_packs
from .loading import TrainingData
from .noise import DocumentNoise
from .objective import Objective
from .routers import router_loss_trains
from .step_comparison import (
    NUM_CANDIDATES,
    Document,
    StepComparison,
    choose_documents,
    is_plain,
    is_text,
    longest_of,
    relative_distance,
    to_int64,
)
from .totals import TrainingTotals
from .trainer_view import TrainerPart, TrainerView, attributes_set

NUM_TOKENS_BEFORE = 8  # length of the document that is packed before the long document in `compare_longer`
FINE_LOSS_GAP = 1e-4  # a relative gap of losses below this limit is accepted without a measurement of rounding
# As `FINE_LOSS_GAP`, for gradients. It is larger, because TRL's fused LM head alone changes gradients of SmolLM2-135M
# in fp32 by 1.5e-4 to 2.4e-4, and the measurement of rounding does not show this change.
FINE_GRADIENT_GAP = 1e-3
# The gap of a parameter's gradient is |difference| / max(|its gradient|, share * |whole gradient|). In fp32 the share
# is `SMALL_SHARE`. In half precision it is larger, because a small gradient, such as the gradient of a bias in front of
# attention, is mostly a sum of rounding errors
SMALL_IN_HALF = 3e-2

logger = logging.get_logger(__name__)


def _gap_text(gap: float, limit: float, accepted: float) -> str:
    """Return a relative gap with its limit, as a text for the report.

    Args:
        gap: the measured gap.
        limit: the limit of the gap.
        accepted: the limit that is always accepted. `limit` is larger if rounding explains larger gaps.

    >>> _gap_text(1e-6, 1e-4, 1e-4)
    '1e-06 (accepted 1e-04)'
    >>> _gap_text(2e-2, 3e-2, 1e-3)
    '2e-02 (rounding explains 3e-02)'
    """
    reason = "rounding explains" if limit > accepted else "accepted"
    return f"{gap:.0e} ({reason} {limit:.0e})"


class _StepGradients(NamedTuple):
    """What is compared of a training step, summed over all ranks."""

    loss: float
    # Products of the gradient of each parameter with random vectors, (parameters, NUM_VECTORS); None if gradients are
    # not compared
    products: Tensor | None


class FirstStep(TrainerPart):
    """The comparison of packed and unpacked training for one trainer. All ranks must call its methods together.

    Args:
        trainer: the trainer, whose packed model has passed the proof of isolation.
        data: the training data, from which the compared documents are read.
        objective: the training loss of the trainer.
        training_step: the method `training_step` of the trainer, without what a subclass adds to it, such as counters.

    Attributes:
        longest_compared: length in tokens of the longest compared document. It is infinity before `compare` has run
            and after a document did not fit into memory, and then `compare_longer` does nothing.
    """

    def __init__(
        self, trainer: TrainerView, data: TrainingData, objective: Objective, *, training_step: Callable[..., Tensor]
    ) -> None:
        super().__init__(trainer)
        self._data = data
        self._objective = objective
        self._training_step = training_step
        self.longest_compared: float = inf

    def _make_probe(self, model: nn.Module) -> Any:
        """Return a probe, which runs `model` for tests; on unpacked documents with the attention that the user set."""
        # The probe of text, or its subclass for documents with images
        probe_class = self._data.reading.feature.make_probe_class(Probe)
        own_attention = self._trainer.packed_model.attention.previous  # before packed attention was set
        return probe_class(model, user_attention=own_attention)

    # The comparison

    def compare(self) -> StepComparison:
        """Train a few documents packed and unpacked, without an optimizer step, and return the difference.

        Raises:
            ValueError: the unpacked loss is NaN or infinite, so there is nothing to compare with.
        """
        # First, set up probes and parameters
        self._probe = self._make_probe(self._trainer.model_wrapped)
        model = self._probe.model
        self._unwrapped_model: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        unwrapped_probe = self._probe if self._unwrapped_model is model else self._make_probe(self._unwrapped_model)
        # Whether a forward pass of the unwrapped model waits for other ranks. DDP is a wrapper, which is removed here.
        # FSDP2 and tensor parallelism divide the parameters of the model itself; then `has_engine` stays True
        self._has_collectives = self._trainer.accelerator.num_processes > 1 and unwrapped_probe.has_engine
        named_parameters = self.base_model.named_parameters()
        trained_parameters = {name: parameter for name, parameter in named_parameters if parameter.requires_grad}
        self._parameter_names = [*trained_parameters]
        self._parameters = [*trained_parameters.values()]

        # Second, choose the documents, if this training can be compared
        reason = self._reason_not_to_compare()
        if reason is not None:
            return StepComparison(f"not compared with unpacked training: {reason}")
        packs = self._choose_packs()
        if not self._sum_over_ranks(sum(map(count_trained, packs[0]))):
            return StepComparison("not compared with unpacked training: no trained token in the first documents")

        # Third, train them packed and unpacked, and measure the gaps. `run_without_draws` finds the modules that draw
        # random numbers, such as routers with jitter, and the packed step is run without draws. The hook of
        # `_undisturbed` keeps these modules from drawing in all later forwards, too
        with self._undisturbed():
            packed = self._probe.run_without_draws(lambda: self._train_packed(packs))
            unpacked = self._train_unpacked(packs)
            if not isfinite(unpacked.loss):
                raise ValueError(
                    "A few documents of the run were trained before the first step without packing, and their loss is "
                    f"{unpacked.loss}. So packs are not the cause. Check that all weights of the model are finite, "
                    "that weights of rows (`weight_column`) are far below 1e38, and set `bf16=True` in place of "
                    "`fp16=True`."
                )
            gaps = self._measure_gaps(packed, unpacked)
            dtype = self._data.attention_dtype
            # Under FSDP in half precision the logits of the model's own LM head are rounded to half precision, and the
            # logits in the packed loss are not. Then losses may differ by the rounding of one number, `eps`
            rounds_unpacked_logits = self._trainer.is_fsdp_enabled and dtype.itemsize < 4
            fine_loss = torch.finfo(dtype).eps if rounds_unpacked_logits else FINE_LOSS_GAP
            # `rounding` is the relative change that another order of the same sums may cause, in the model's precision
            fine_gradients = max(FINE_GRADIENT_GAP, self._probe.rounding)
            # The limits are the fine gaps, unless a gap is above them. Then `limits_of_rounding` calls the function
            # that it gets, which repeats the packed step and returns its gaps from the first packed step. Meanwhile
            # every number in the output of a module is moved by half a unit of its last digit, up or down at random.
            # If a multiple of these gaps is above the limits, they are raised to it. `by_channel`: all tokens move
            # alike in a channel (a column of the output), because similar tokens are rounded alike, which adds up in
            # the gradient of a bias
            limits = self._probe.limits_of_rounding(
                gaps,
                [fine_loss, fine_gradients],
                lambda: self._measure_gaps(self._train_packed(packs), packed),
                by_channel=True,
            )
            # A router may choose another expert because rounding changes the order of equal values. So a gap above its
            # limit counts only if it is found again when `topk` chooses among equal values in a fixed order
            problem = None
            if self._probe.is_beyond(gaps, limits):
                with FirstOfTies():
                    packed = self._train_packed(packs)
                    unpacked = self._train_unpacked(packs)
                    gaps = self._measure_gaps(packed, unpacked)
                    if self._probe.is_beyond(gaps, limits):
                        difference = self._describe_difference(packs, packed, unpacked, limits=limits)
                        problem = difference or "another rank has found a difference, and this rank has not"
        self._trainer.model.zero_grad(set_to_none=True)

        # Fourth, prepare `compare_longer`. If forward passes of the unwrapped model do not wait for other ranks, each
        # rank compares its own long documents on this model. The new probe must silence the same modules: those that
        # the first probe has seen to draw random numbers
        longest_on_rank = max(document_length(document) for pack in packs for document in pack)
        self.longest_compared = self._max_over_ranks(longest_on_rank)
        if not self._has_collectives:
            unwrapped_probe.drawing_modules = self._probe.drawing_modules
            self._probe = unwrapped_probe

        # Last, describe the gaps in a line of the report
        loss_gap, gradient_gap = gaps
        loss_limit, gradient_limit = limits
        text = f"loss {packed.loss:.4f} packed, {unpacked.loss:.4f} unpacked, "
        text += f"apart by {_gap_text(loss_gap, loss_limit, FINE_LOSS_GAP)}"
        # A `training_step` of the user's did not run: `self._training_step` is the method of this package
        method = f"{type(self._trainer).__name__}.training_step"
        if method in self._trainer.user_code.methods:
            text += f", without {method}, which is not tested"
        if packed.products is None:
            return StepComparison(f"{text}; gradients are held by the engine, not compared", loss_gap, problem=problem)
        text += f"; gradients {_gap_text(gradient_gap, gradient_limit, FINE_GRADIENT_GAP)} over "
        text += f"{len(self._parameter_names)} parameters"
        if self._trainer.aux_loss_enabled and not self._compares_router_loss:
            where = "under reentrant checkpointing" if self._data.reading.is_text_only else "with images"
            text += f"; the router loss is not compared {where}"
        return StepComparison(text, loss_gap, gradient_gap, problem=problem)

    def _reason_not_to_compare(self) -> str | None:
        """Return why unpacked documents cannot have the loss of this trainer, for the report; None if they can."""
        trainer = self._trainer
        if trainer.compute_loss_func is not None:
            return "`compute_loss_func` gets a whole batch, so its loss need not be a sum over documents"
        method = f"{type(trainer).__name__}.compute_loss"
        if method in trainer.user_code.methods:
            return f"the loss is that of {method}"
        return None if self._objective.replaces_trl_loss else "the loss is TRL's"

    @property
    def _compares_router_loss(self) -> bool:
        """Whether the compared steps have the router loss.

        They have none with images, because the batch of `_router_loss` has only tokens. They have none under reentrant
        checkpointing either, with which the router loss has no gradient in training. The reference runs in eval mode,
        in which transformers checkpoints no layer, so there it would have one.
        """
        is_comparable = self._data.reading.is_text_only and router_loss_trains(self._trainer.args)
        return self._trainer.aux_loss_enabled and is_comparable

    @cached_property
    def _compares_gradients(self) -> bool:
        """Whether gradients can be read after each backward pass, before an engine or an optimizer changes them."""
        trainer = self._trainer
        if trainer.accelerator.distributed_type == DistributedType.DEEPSPEED:
            return False
        if self._objective.summed_by_ranks:  # parameters whose gradients tensor parallelism sums after each backward
            return False
        if trainer.args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO):  # their backward is the optimizer step
            return False
        is_fsdp2 = any(isinstance(module, FSDPModule) for module in self._unwrapped_model.modules())
        is_fsdp1 = trainer.is_fsdp_enabled and not is_fsdp2  # FSDP1 joins parameters, and their gradients
        return trainer.get_tp_size() == 1 and not is_fsdp1

    @property
    def _small_share(self) -> float:
        """The share of the whole gradient below which the gradient of a parameter counts as small."""
        return SMALL_IN_HALF if self._data.attention_dtype.itemsize < 4 else SMALL_SHARE

    def _measure_gaps(self, actual: _StepGradients, expected: _StepGradients) -> tuple[float, float]:
        """Return the relative gap of the losses, and the largest relative gap of the gradients of a parameter."""
        loss_gap = abs(actual.loss - expected.loss) / max(abs(expected.loss), torch.finfo(torch.float64).tiny)
        if actual.products is None or expected.products is None:
            return loss_gap, 0.0
        return loss_gap, largest_gap(actual.products, expected.products, small=self._small_share)

    # Documents

    def _choose_packs(self) -> list[RankShare]:
        """Choose the two packs of this rank, one for each micro-batch, with unequal numbers of tokens.

        The first pack has all chosen documents. The second pack has only the longest of them, or with sequence
        parallelism all but the first, because one document may have too few tokens for all ranks of a group.
        """
        documents, group = self._data.source.first_documents(NUM_CANDIDATES)
        # Only documents with a trained token and a weight change the model
        documents = [document for document in documents if count_trained(document) and document.get(WEIGHTS, 1) > 0]
        if self._has_collectives:
            # All ranks must run the same parts of the model, such as a vision tower. So they keep only documents with
            # images if every rank has one, and else only documents without. The sum counts the ranks that have one
            documents = self._data.reading.select_alike_on_ranks(documents, self._sum_over_ranks)
        first_pack = choose_documents(documents)
        second_pack = [max(first_pack, key=document_length)] if group.is_alone else first_pack[1:]
        return [RankShare(pack, group) for pack in (first_pack, second_pack)]

    # The packed step

    def _train_packed(self, packs: list[RankShare]) -> _StepGradients:
        """Run the packs as the micro-batches of one step, by the trainer's methods; return loss and gradients."""
        trainer = self._trainer
        model = self._probe.model
        value_keys = [WEIGHTS] if self.args.weight_column else []
        collate = self._data.training_collator(value_keys)
        batches = [self._probe.move_batch(collate(pack)) for pack in packs]
        if self._data.ranks.may_share_packs:  # sequence or tensor parallelism: several ranks have one pack
            # Raise if ranks that must have the same pack have different packs
            check_same_packs(batches, self._data.ranks.copies)
        num_items = trainer._get_num_items_in_batch(batches, trainer.accelerator.device)
        trainer.model.zero_grad(set_to_none=True)
        losses = []
        with attributes_set(trainer, current_gradient_accumulation_steps=len(batches)):
            for i, batch in enumerate(batches):
                if not self._compares_gradients:
                    with torch.no_grad(), trainer.compute_loss_context_manager():
                        batch = trainer._prepare_inputs(batch)
                        losses.append(trainer.compute_loss(model, batch, num_items_in_batch=num_items))
                    continue
                # As in training, DDP reduces gradients after the last micro-batch only
                is_last = i == len(batches) - 1
                is_under_ddp = self._unwrapped_model is not model
                with trainer.accelerator.no_sync(model) if is_under_ddp and not is_last else nullcontext():
                    losses.append(self._training_step(model, batch, num_items))
        # The loss of a rank is multiplied by the number of ranks, because DDP averages gradients. So the mean over
        # ranks is the loss of the whole step
        loss = trainer.accelerator.reduce(torch.stack(losses).sum().float(), reduction="mean")
        return _StepGradients(float(loss), self._gradient_products(is_reduced=True))

    # The unpacked step

    def _train_unpacked(self, packs: list[RankShare]) -> _StepGradients:
        """Run each document of the packs as a row; return the loss and the gradients that the packs must have.

        The loss is the sum over documents of factor x (sum of the document's token losses) / divisor. A document that
        is in both packs runs once, and its factor counts both.
        """
        trainer = self._trainer
        args = self.args
        documents = packs[0]  # these include the documents of the second pack
        copies = self._data.ranks.copies

        # First, the factors and the divisor. Ranks that share a pack have equal documents, so only the first of these
        # ranks counts them; the documents of the other ranks have the factor 0
        group = packs[0].group
        weighs_documents = args.document_weighting == "document"
        factors = [0.0] * len(documents)
        rank_divisor = 0.0
        for document in (document for pack in packs for document in pack):
            weight = group.count_once(float(document.get(WEIGHTS, 1.0)))
            num_tokens = count_trained(document)
            # The index of this object; an equal document may be there twice
            i = next(i for i, candidate in enumerate(documents) if candidate is document)
            factors[i] += weight / (max(num_tokens, 1) if weighs_documents else 1)
            rank_divisor += weight * (num_tokens > 0 if weighs_documents else num_tokens)
        divisor = self._sum_over_ranks(rank_divisor) / copies

        # Second, batches of documents of equal length. A document has a batch of its own if it is not stacked, or if
        # forward passes wait for other ranks, because all ranks must then have equally many batches
        is_single = self._has_collectives or not self._data.reading.is_text_only
        batches: dict[int, list[int]] = {}  # indices of documents, by their length or by a key of their own
        for i, document in enumerate(documents):
            batch_key = -i if is_single else document_length(document)  # lengths are above 0
            batches.setdefault(batch_key, []).append(i)

        # Third, forward and backward passes. The backward passes are in the context, too: where FSDP has wrapped layers
        # for activation checkpointing, they are computed again in the backward, also in eval mode
        trainer.model.zero_grad(set_to_none=True)
        loss = 0.0
        longest = max(map(document_length, documents))
        with self._probe.unpacked(longest):  # sets the user's attention, for rows of up to `longest` tokens
            for indices in batches.values():
                row_losses = self._row_losses([documents[i] for i in indices])
                row_factors = row_losses.new_tensor([factors[i] for i in indices])
                loss += self._run_backward((row_losses * row_factors).sum() / divisor)
            if trainer.aux_loss_enabled:
                num_packs = self._sum_over_ranks(group.count_once(float(len(packs)))) / copies
                for pack in packs:
                    router_loss = group.count_once(self._router_loss(pack))
                    loss += self._run_backward(router_loss * trainer.router_aux_loss_coef / num_packs)
        # Here no loss is multiplied, so ranks are summed. Copies have counted the same documents
        return _StepGradients(self._sum_over_ranks(loss) / copies, self._gradient_products(is_reduced=False))

    def _row_losses(self, documents: list[Document]) -> Tensor:
        """Return the sum of the loss over the trained tokens of each document, (B,), by the model's own logits.

        Args:
            documents: B documents of equal length, which are the rows of one batch; or one document.
        """
        trainer = self._trainer
        args = self.args
        labels = torch.stack([to_int64(document["labels"])[1:] for document in documents]).to(self._probe.device)
        if is_text(documents[0]):
            tokens = [to_int64(document["input_ids"]) for document in documents]
            # The unpacked batch of the documents, on the device, padded if the model needs padding
            row = self._probe.make_unpacked_batch(torch.stack(tokens) if len(tokens) > 1 else tokens[0])
        else:
            without_weight = {name: value for name, value in documents[0].items() if name != WEIGHTS}
            row = self._probe.make_unpacked_batch(without_weight)
        # If the fused LM head differs from the model's own LM head, `check_fused_head` has warned of it, and it shall
        # not be found here a second time. So the reference is computed by the fused LM head, too, as the packed loss
        # is, unless labels are smoothed. "dft" does not smooth labels
        smoother = trainer.label_smoother
        smoothing = 0.0 if smoother is None or args.loss_type == "dft" else smoother.epsilon
        uses_fused_head = not self._objective.fused_head_is_exact and not smoothing
        with trainer.compute_loss_context_manager():
            if uses_fused_head:
                # The fused head drops the first label of a row, so a label that is ignored is put in front. Ignored
                # labels behind the others give the row the length of its tokens
                padded = F.pad(labels, (1, row["input_ids"].shape[1] - labels.shape[1] - 1), value=IGNORE_INDEX)
                scores = self._unwrapped_model(**row, labels=padded, fused_lm_head=True)
            else:
                logits = self._unwrapped_model(**row).logits[:, : labels.shape[1]]
        if uses_fused_head:
            label_log_probs = scores.log_probs[:, : labels.shape[1]].float()
        else:
            log_probs = F.log_softmax(logits.float(), dim=-1)
            label_log_probs = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        token_values = label_log_probs
        if args.loss_type == "dft":
            token_values = label_log_probs * label_log_probs.exp().detach()
        elif smoothing:
            token_values = (1 - smoothing) * label_log_probs + smoothing * log_probs.mean(-1)
        return -token_values.where(labels != IGNORE_INDEX, 0).sum(-1)

    def _router_loss(self, documents: list[Document]) -> Tensor:
        """Return the router loss that unpacked training has for these documents, as the padded rows of one batch."""
        tokens = [to_int64(document["input_ids"]) for document in documents]
        masks = [torch.ones_like(row) for row in tokens]
        batch = {
            "input_ids": pad_sequence(tokens, batch_first=True),
            "attention_mask": pad_sequence(masks, batch_first=True),
            "output_router_logits": True,
            "use_cache": False,
        }
        with self._trainer.compute_loss_context_manager():
            return self._unwrapped_model(**self._probe.move_batch(batch)).aux_loss

    # Longer documents

    def compare_longer(self, batches: list[dict[str, Any]]) -> None:
        """Compare the longest document of a training step, packed and unpacked, if it is much longer than any before.

        Much longer means at least twice `longest_compared`. The last hidden states of the document are compared.
        Documents with images, with shared prefixes or in packs of several ranks are not compared. If an engine
        divides the model, all ranks run their longest document. If a document does not fit unpacked into memory,
        comparisons end.

        Args:
            batches: the micro-batches of the step on this rank.

        Raises:
            PackingLeakError: the states differ by more than rounding.
        """
        # First, find the document. `max_length_q`, an upper bound, needs no search in the batch
        longest_possible = min(self.args.max_length or inf, self._data.source.longest_document)
        if self.longest_compared == inf or longest_possible < 2 * self.longest_compared:
            return
        plain_batches = [batch for batch in batches if is_plain(batch)]
        # All ranks must decide alike if they wait for each other in forward passes. Else each decides by its own
        # number, which `int` returns as it is
        largest_of_ranks = self._max_over_ranks if self._has_collectives else int
        upper_bound = max((int(batch["max_length_q"]) for batch in plain_batches), default=0)
        if largest_of_ranks(upper_bound) < 2 * self.longest_compared:
            return
        candidates = (longest_of(batch) for batch in plain_batches)
        # A rank without a document must run forward passes, too, so it takes a random document of two tokens
        document = max(candidates, key=len, default=self._probe.tokens(2))
        longest = largest_of_ranks(len(document))
        if longest < 2 * self.longest_compared:  # with constant shapes `max_length_q` is `max_length` in every batch
            return

        # Second, compare its states behind a short document of random tokens with its states alone
        try:
            uncompiled = layers_uncompiled(self.args)  # `torch_compile` would compile new shapes for one forward
            with self._undisturbed(), self._trainer.compute_loss_context_manager(), torch.no_grad(), uncompiled:
                pack = [self._probe.tokens(NUM_TOKENS_BEFORE), document]

                def packed_states() -> Tensor:
                    return self._probe.forward_packed(pack)[1]  # the last hidden states of `document`

                unpacked = self._probe.forward_alone(document)
                if self._probe.on_any_rank(not unpacked.isfinite().all()):
                    return  # the run has diverged, which its loss says
                packed = packed_states()
                gap = relative_distance(packed, unpacked)
                (limit,) = self._probe.limits_of_rounding(
                    [gap], [FINE_LOSS_GAP], lambda: [relative_distance(packed_states(), packed)]
                )
                is_beyond = self._probe.is_beyond([gap], [limit])
                if is_beyond:
                    with FirstOfTies():
                        gap = relative_distance(packed_states(), self._probe.forward_alone(document))
                        is_beyond = self._probe.is_beyond([gap], [limit])
        except torch.OutOfMemoryError:
            logger.warning(
                f"A document of {len(document):,} tokens does not fit unpacked, so it is not compared with unpacked "
                f"training. Documents of up to {self.longest_compared:,} tokens were."
            )
            self.longest_compared = inf
            return
        if is_beyond:
            raise PackingLeakError(
                f"A document of {len(document):,} tokens was computed packed and alone, and its last hidden states "
                f"differ by {gap:.1e} (rounding explains {limit:.1e}); of up to {self.longest_compared:,} tokens "
                f"they did not. So above some length this model computes packs as another one. Set `max_length` to "
                f"{self.longest_compared}, or `packing=False`, and please report it with this message."
            )
        self.longest_compared = longest

    # Gradients and ranks

    def _run_backward(self, loss: Tensor) -> float:
        """Run the backward pass of a loss, if gradients are compared, and return the loss as a number."""
        if self._compares_gradients:
            (loss * self._loss_scale).backward()
        return float(loss.detach())

    @property
    def _loss_scale(self) -> float:
        """The factor by which fp16 training multiplies a loss before the backward pass; 1 in other precisions."""
        scaler = self._trainer.accelerator.scaler
        return 1.0 if scaler is None else scaler.get_scale()

    def _gradient_products(self, *, is_reduced: bool) -> Tensor | None:
        """Return the products of the gradients of a step, as `_StepGradients` holds them.

        Args:
            is_reduced: whether the gradients are reduced over ranks already, as after the trainer's methods. If not,
                the gradients of the ranks are added here.
        """
        if not self._compares_gradients:
            return None
        products = gradient_products(self._parameters) / self._loss_scale
        accelerator = self._trainer.accelerator
        if is_reduced or accelerator.num_processes == 1:
            return products
        if self._trainer.is_fsdp_enabled:  # FSDP2 has averaged the gradients over ranks, and their sum is needed
            total = products * accelerator.num_processes
        else:
            total = accelerator.reduce(products.to(self._probe.device), reduction="sum").cpu()
        return total / self._data.ranks.copies

    def _sum_over_ranks(self, value: float) -> float:
        """Return the sum of a number over all ranks."""
        number = torch.tensor(float(value), device=self._probe.device)
        return float(self._trainer.accelerator.reduce(number, reduction="sum"))

    def _max_over_ranks(self, value: int) -> int:
        """Return the largest value of a number on any rank."""
        return int(self._trainer.accelerator.gather(torch.tensor([value], device=self._probe.device)).max())

    # What differs

    def _describe_difference(
        self, packs: list[RankShare], packed: _StepGradients, unpacked: _StepGradients, *, limits: list[float]
    ) -> str:
        """Return in words what differs by more than `limits`: the loss, gradients, and single documents of a pack.

        Args:
            packs: the compared packs of this rank.
            packed: the result of the packed step.
            unpacked: the result of the unpacked step.
            limits: the limits of the gaps of the loss and of gradients.
        """
        differences = []
        if self._probe.is_beyond(self._measure_gaps(packed, unpacked)[:1], limits[:1]):
            differences.append(f"the loss is {packed.loss:.5g} packed and {unpacked.loss:.5g} unpacked")
        if packed.products is not None and unpacked.products is not None:
            gaps = relative_gaps(packed.products, unpacked.products, small=self._small_share)
            worst = int(gaps.argmax())
            count = int((gaps > limits[1]).sum())
            if count:
                name = self._parameter_names[worst]
                differences.append(f"gradients of {count} parameters differ, of `{name}` by {gaps[worst]:.1e}")
        # Then train each document separately: in the pack only its labels remain, and unpacked it is the only document
        for i, document in enumerate(packs[0]):
            pack = [candidate if j == i else mask_labels(candidate) for j, candidate in enumerate(packs[0])]
            packed_step = self._train_packed([RankShare.like(packs[0], pack)])
            unpacked_step = self._train_unpacked([RankShare.like(packs[0], [document])])
            loss_gap, gradient_gap = self._measure_gaps(packed_step, unpacked_step)
            if self._probe.is_beyond([loss_gap, gradient_gap], limits):
                differences.append(
                    f"document {i} of {len(pack)} ({count_trained(document)} trained tokens) has the loss "
                    f"{packed_step.loss:.5g} in the pack, {unpacked_step.loss:.5g} alone, and gradients that differ by "
                    f"{gradient_gap:.1e}"
                )
        return "; ".join(differences)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Within this context, training steps have no dropout and no noise, and do not count in the log.

        On exit the totals of the log, attributes of the trainer, random state, modes and buffers are restored.
        """
        trainer = self._trainer
        probe = self._probe
        totals = self._objective.totals
        uncounted = TrainingTotals(totals.device, totals.sources, totals.shares_rows)
        with (
            attributes_set(self._objective, totals=uncounted),
            attributes_set(trainer, aux_loss_enabled=self._compares_router_loss),
            ExitStack() as without_noise,
            # The model has packed attention and, by the context of the probe, train mode with dropout rate 0
            trainer.packed_model.attending(),
            probe.undisturbed(),
            # `training_step` sets all modules to train mode. Before each forward, this hook sets the modules that draw
            # random numbers to eval mode again. `inner` is the base model below all wrappers
            probe.inner.register_forward_pre_hook(probe.silence),
        ):
            for hooks in trainer.packed_model.own_hooks:
                if isinstance(hooks, DocumentNoise):
                    without_noise.enter_context(attributes_set(hooks, alpha=0.0))
            yield
