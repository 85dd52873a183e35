"""Compare the first step with unpacked training: the trainer's own loop on packs, the model alone on rows.

The proof of isolation looks at the model. Wrong labels, divisors and weights lie behind it, in the collator, the loss,
and the sums over micro-batches and ranks. So before the first optimizer step a few documents of the run are trained in
two micro-batches on each rank, one of them with a single document, by the methods that every step calls. The reference
has none of this code: each document is a row, on the model with the attention that it was given with and its own LM
head, and its loss is the sum over its tokens, divided by counts made of the documents. Gradients are compared by
products (`isolation/gradients.py`), so none is copied.

Documents are shortened, so that the comparison costs less than a forward and backward of 1,024 tokens. Later, when a
step first holds a document twice as long as any compared before, it is compared again, by a forward: some models
compute long documents in another way.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from math import inf
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

from ..attention.models import base_model
from ..data.rank_share import RankShare
from ..data.row_values import WEIGHTS
from ..isolation.gradients import SMALL_SHARE, gradient_products, largest_gap, relative_gaps
from ..isolation.image_probe import ImageDocument
from ..isolation.isolation_report import PackingLeakError
from ..isolation.prefix_probe import make_probe
from ..isolation.probed_model import ROUNDING_FACTOR
from ..isolation.ties import FirstOfTies
from ..layout import IGNORE_INDEX
from .groups import check_same_packs
from .loading import TrainingData
from .noise import DocumentNoise
from .objective import Objective
from .step_comparison import (
    Document,
    StepComparison,
    choose_documents,
    document_length,
    first_documents,
    is_plain,
    is_text,
    longest_of,
    mask_document,
    num_trained,
    relative_distance,
    to_int64,
)
from .totals import TrainingTotals
from .trainer_view import TrainerView

NUM_BEFORE = 8  # tokens of the document before a long one
FINE_LOSS_GAP = 1e-4  # relative; a larger difference is judged by what rounding does
FINE_GRADIENT_GAP = 1e-3  # TRL's fused head alone makes 1.5e-4 to 2.4e-4 of SmolLM2-135M in fp32, which no draw shows
SET_ATTRIBUTES = ("current_gradient_accumulation_steps", "aux_loss_enabled")  # of the trainer, during the comparison
SMALL_IN_HALF = 3e-2  # as SMALL: a small gradient, such as that of a bias in front of attention, is a sum of roundings

logger = logging.get_logger(__name__)


class _StepGradients(NamedTuple):
    """Loss and products of the gradients of a step over all ranks; None where gradients are not compared."""

    loss: float
    products: Tensor | None


class FirstStep:
    """The comparison of a training. The packed model must be proved; all ranks must call `compare`.

    Args:
        training_step: of the trainer, without what a subclass adds to it, such as counters.
    """

    def __init__(
        self, trainer: TrainerView, data: TrainingData, objective: Objective, *, training_step: Callable[..., Tensor]
    ) -> None:
        self._trainer = trainer
        self._data = data
        self._objective = objective
        self._training_step = training_step
        self.longest_compared: float = inf  # tokens; longer documents are compared later

    def _probe_of(self, model: nn.Module) -> Any:
        return make_probe(
            model, self._data.images.examples, user_attention=self._trainer.packed_model.attention.previous
        )

    # What is compared

    def compare(self) -> StepComparison:
        """Train a few documents packed and unpacked, without an optimizer step."""
        self._probe = self._probe_of(self._trainer.model_wrapped)
        model = self._probe.model
        self._alone: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        below = self._probe if self._alone is model else self._probe_of(self._alone)
        # Whether a forward waits for other ranks
        self._has_collectives = self._trainer.accelerator.num_processes > 1 and below.has_engine
        named = {name: each for name, each in base_model(self._trainer.model).named_parameters() if each.requires_grad}
        self._names, self._parameters = [*named], [*named.values()]
        if (why := self._why_not()) is not None:
            return StepComparison(f"not compared with unpacked training: {why}")
        packs = self._packs()
        if not self._summed(sum(map(num_trained, packs[0]))):
            return StepComparison("not compared with unpacked training: no trained token in the first documents")
        with self._undisturbed():
            packed = self._probe.silenced(lambda: self._packed(packs))
            unpacked = self._unpacked(packs)
            gap = self._gaps(packed, unpacked)
            dtype = self._data.attention_dtype
            # Under FSDP2 in half precision the model's own logits are rounded, those of the loss are not
            fine = torch.finfo(dtype).eps if self._trainer.is_fsdp_enabled and dtype.itemsize < 4 else FINE_LOSS_GAP
            fine_gradients = max(FINE_GRADIENT_GAP, self._probe.rounding)
            limit = self._probe.limits_of_rounding(
                gap,
                [fine, fine_gradients],
                lambda: self._gaps(self._packed(packs), packed),
                by_channel=True,
            )
            problem = None
            if self._probe.is_beyond(gap, limit):
                with FirstOfTies():
                    packed = self._packed(packs)
                    unpacked = self._unpacked(packs)
                    gap = self._gaps(packed, unpacked)
                    if self._probe.is_beyond(gap, limit):
                        problem = self._what_differs(packs, packed, unpacked, limit=limit)
        self._trainer.model.zero_grad(set_to_none=True)
        self.longest_compared = self._most(max(document_length(each) for pack in packs for each in pack))
        if not self._has_collectives:  # each rank compares them when it meets them
            below.silent = self._probe.silent
            self._probe = below
        text = f"loss {packed.loss:.4f} packed, {unpacked.loss:.4f} unpacked ({gap[0]:.0e})"
        if (method := f"{type(self._trainer).__name__}.training_step") in self._trainer.user_code.methods:
            text += f", without {method}, which is not tested"
        if packed.products is None:
            return StepComparison(f"{text}; gradients are held by the engine, not compared", gap[0], problem=problem)
        text += f"; gradients {gap[1]:.0e} over {len(self._names)} parameters"
        if self._trainer.aux_loss_enabled and self._data.packs_images:
            text += "; the router loss is not compared with images"
        if limit[0] > FINE_LOSS_GAP or limit[1] > fine_gradients:
            text += f" (rounding alone makes {limit[0] / ROUNDING_FACTOR:.0e} and {limit[1] / ROUNDING_FACTOR:.0e})"
        return StepComparison(text, *gap, problem=problem)

    def _why_not(self) -> str | None:
        trainer = self._trainer
        if trainer.compute_loss_func is not None:
            return "`compute_loss_func` gets a whole batch, so its loss need not be a sum over documents"
        if (method := f"{type(trainer).__name__}.compute_loss") in trainer.user_code.methods:
            return f"the loss is that of {method}"
        return None if self._objective.replaces_trl_loss else "the loss is TRL's"

    @cached_property
    def _has_gradients(self) -> bool:
        """Whether gradients can be read between two backward passes: not where an engine holds or divides them."""
        trainer = self._trainer
        if trainer.accelerator.distributed_type == DistributedType.DEEPSPEED or self._objective.summed_by_ranks:
            return False
        if trainer.args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO):  # their backward is the optimizer step
            return False
        is_sharded = any(isinstance(module, FSDPModule) for module in self._alone.modules())
        return trainer.get_tp_size() == 1 and (not trainer.is_fsdp_enabled or is_sharded)

    @property
    def _small(self) -> float:
        return SMALL_IN_HALF if self._data.attention_dtype.itemsize < 4 else SMALL_SHARE

    def _gaps(self, one: _StepGradients, other: _StepGradients) -> tuple[float, float]:
        """Return the relative gap of the losses, and the largest gap of the gradients of a parameter."""
        loss = abs(one.loss - other.loss) / max(abs(other.loss), torch.finfo(torch.float64).tiny)
        if one.products is None or other.products is None:
            return loss, 0.0
        return loss, largest_gap(one.products, other.products, small=self._small)

    # Documents

    def _packs(self) -> list[RankShare]:
        """Choose two packs for this rank, with unequal numbers of tokens; without groups one has a single document."""
        found, degree, index = first_documents(self._data, self._trainer.train_dataset)
        found = [each for each in found if num_trained(each) and each.get(WEIGHTS, 1) > 0]  # that change the model
        examples = self._data.images.examples
        if examples is not None and self._has_collectives:  # a row without images calls no tower, which others gather
            has_images = [examples.images.has_images(each) for each in found]
            kind = self._summed(any(has_images)) == self._trainer.accelerator.num_processes
            found = [each for each, has in zip(found, has_images, strict=True) if has is kind]
        documents = choose_documents(found)
        others = (
            documents[1:] if degree > 1 else [max(documents, key=document_length)]
        )  # one has too few tokens for parts
        return [RankShare(pack, degree, index) for pack in (documents, others)]

    # Packed

    def _packed(self, packs: list[RankShare]) -> _StepGradients:
        trainer = self._trainer
        model = self._probe.model
        keys = [WEIGHTS] if self._trainer.args.weight_column else []
        batches = [self._probe.move_batch(self._data.training_collator(keys)(pack)) for pack in packs]
        if self._data.ranks.may_share:
            check_same_packs(batches, self._data.ranks.copies)
        num_items = trainer._get_num_items_in_batch(batches, trainer.accelerator.device)
        trainer.current_gradient_accumulation_steps = len(batches)
        trainer.model.zero_grad(set_to_none=True)
        losses = []
        for i, batch in enumerate(batches):
            is_last = i == len(batches) - 1
            if not self._has_gradients:
                with torch.no_grad(), trainer.compute_loss_context_manager():
                    batch = trainer._prepare_inputs(batch)
                    losses.append(trainer.compute_loss(model, batch, num_items_in_batch=num_items))
                continue
            with nullcontext() if is_last or self._alone is model else trainer.accelerator.no_sync(model):
                losses.append(self._training_step(model, batch, num_items))
        loss = trainer.accelerator.reduce(torch.stack(losses).sum().float(), reduction="mean")
        return _StepGradients(float(loss), self._products(is_summed=True))

    # Unpacked

    def _unpacked(self, packs: list[RankShare]) -> _StepGradients:
        """Compute the step from rows, without the trainer's collator, packed attention, fused LM head and loss."""
        trainer = self._trainer
        args = self._trainer.args
        owns = packs[0].member == 0  # of ranks that share a pack, the first
        documents = packs[0]  # which has those of the others, too
        factors = [0.0] * len(documents)
        parts = 0.0
        for document in (document for pack in packs for document in pack):
            weight = owns * float(document.get(WEIGHTS, 1.0))
            by_document = args.document_weighting == "document"
            i = next(i for i, each in enumerate(documents) if each is document)
            factors[i] += weight / (max(num_trained(document), 1) if by_document else 1)
            parts += weight * (num_trained(document) > 0 if by_document else num_trained(document))
        copies = self._data.ranks.copies
        divisor = self._summed(parts) / copies
        together: dict[int, list[int]] = {}  # rows of equal length, but where each forward waits for other ranks
        for i, document in enumerate(documents):
            is_alone = self._has_collectives or self._data.packs_images
            together.setdefault(-i if is_alone else document_length(document), []).append(i)
        trainer.model.zero_grad(set_to_none=True)
        total = 0.0
        with self._probe.unpacked(max(map(document_length, documents))):  # layers may be computed again in the backward
            for places in together.values():
                losses = self._row_losses([documents[i] for i in places])
                total += self._backward((losses * losses.new_tensor([factors[i] for i in places])).sum() / divisor)
            if trainer.aux_loss_enabled:
                num_packs = self._summed(owns * len(packs)) / copies
                for pack in packs:
                    total += self._backward(self._aux_loss(pack) * owns * trainer.router_aux_loss_coef / num_packs)
        return _StepGradients(self._summed(total) / copies, self._products(is_summed=False))

    def _row_losses(self, documents: list[Document]) -> Tensor:
        """The sum of the loss over the trained tokens of each document, (B,), by the model's own logits.

        Documents of equal length are rows of one batch; one with images is alone.
        """
        trainer = self._trainer
        args = self._trainer.args
        labels = torch.stack([to_int64(document["labels"])[1:] for document in documents]).to(self._probe.device)
        if is_text(documents[0]):
            tokens = [to_int64(document["input_ids"]) for document in documents]
            row = self._probe.make_row(torch.stack(tokens) if len(tokens) > 1 else tokens[0])
        else:
            without_weight = {name: value for name, value in documents[0].items() if name != WEIGHTS}
            row = self._probe.make_row(ImageDocument(without_weight))
        with trainer.compute_loss_context_manager():
            if not self._objective.has_own_logits:  # of which the user was told
                padded = F.pad(labels, (1, row["input_ids"].shape[1] - labels.shape[1] - 1), value=IGNORE_INDEX)
                return -self._alone(**row, labels=padded, fused_lm_head=True).log_probs.float().sum(-1)
            logits = self._alone(**row).logits[:, : labels.shape[1]]
        log_probs = F.log_softmax(logits.float(), dim=-1)
        of_labels = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        if args.loss_type == "dft":
            losses = of_labels * of_labels.exp().detach()
        else:
            share = 0.0 if trainer.label_smoother is None else trainer.label_smoother.epsilon
            losses = (1 - share) * of_labels + share * log_probs.mean(-1)
        return -losses.where(labels != IGNORE_INDEX, 0).sum(-1)

    def _aux_loss(self, documents: list[Document]) -> Tensor:
        """Return the router loss that unpacked training has for these documents, as padded rows."""
        tokens = [to_int64(document["input_ids"]) for document in documents]
        ids, mask = (pad_sequence(rows, batch_first=True) for rows in (tokens, [*map(torch.ones_like, tokens)]))
        rows = {"input_ids": ids, "attention_mask": mask, "output_router_logits": True, "use_cache": False}
        with self._trainer.compute_loss_context_manager():
            return self._alone(**self._probe.move_batch(rows)).aux_loss

    # Longer documents

    def compare_longer(self, batches: list[dict[str, Any]]) -> None:
        """Compare the states of the longest document of a step, alone and packed, if it is twice as long as any before.

        Documents are read from packs of one rank; of those with images, shared prefixes or parts no length is compared.
        Where an engine divides the model, all ranks take part. A document that does not fit alone ends the search.
        Raises `PackingLeakError` if its states are others in a pack.
        """
        if self.longest_compared == inf or 2 * self.longest_compared > (self._trainer.args.max_length or inf):
            return
        plain = [batch for batch in batches if is_plain(batch)]
        most = self._most if self._has_collectives else int
        if most(max((int(batch["max_length_q"]) for batch in plain), default=0)) < 2 * self.longest_compared:
            return
        document = max((longest_of(batch) for batch in plain), key=len, default=self._probe.tokens(2))
        longest = most(len(document))
        if longest < 2 * self.longest_compared:  # constant shapes name `max_length` as the longest
            return
        try:
            with self._undisturbed(), self._trainer.compute_loss_context_manager(), torch.no_grad():
                pack = [self._probe.tokens(NUM_BEFORE), document]

                def in_pack() -> Tensor:
                    return self._probe.forward_packed(pack)[1]

                alone = self._probe.forward_alone(document)
                packed = in_pack()
                gap = relative_distance(packed, alone)
                (limit,) = self._probe.limits_of_rounding(
                    [gap], [FINE_LOSS_GAP], lambda: [relative_distance(in_pack(), packed)]
                )
                if is_beyond := self._probe.is_beyond([gap], [limit]):
                    with FirstOfTies():
                        gap = relative_distance(in_pack(), self._probe.forward_alone(document))
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

    def _backward(self, loss: Tensor) -> float:
        if self._has_gradients:
            (loss * self._scale).backward()
        return float(loss.detach())

    @property
    def _scale(self) -> float:
        scaler = self._trainer.accelerator.scaler  # of fp16
        return 1.0 if scaler is None else scaler.get_scale()

    def _products(self, *, is_summed: bool) -> Tensor | None:
        """Of the gradients of the step; `is_summed` if they are the mean over ranks already."""
        if not self._has_gradients:
            return None
        found = gradient_products(self._parameters) / self._scale
        accelerator = self._trainer.accelerator
        if is_summed or accelerator.num_processes == 1:
            return found
        if self._trainer.is_fsdp_enabled:  # the engine has made the mean
            summed = found * accelerator.num_processes
        else:
            summed = accelerator.reduce(found.to(self._probe.device), reduction="sum").cpu()
        return summed / self._data.ranks.copies

    def _summed(self, value: float) -> float:
        number = torch.tensor(float(value), device=self._probe.device)
        return float(self._trainer.accelerator.reduce(number, reduction="sum"))

    def _most(self, value: int) -> int:
        return int(self._trainer.accelerator.gather(torch.tensor([value], device=self._probe.device)).max())

    # What differs

    def _what_differs(
        self, packs: list[RankShare], packed: _StepGradients, unpacked: _StepGradients, *, limit: list[float]
    ) -> str:
        found = []
        if self._probe.is_beyond(self._gaps(packed, unpacked)[:1], limit[:1]):
            found.append(f"the loss is {packed.loss:.5g} packed and {unpacked.loss:.5g} unpacked")
        if packed.products is not None and unpacked.products is not None:
            by_name = relative_gaps(packed.products, unpacked.products, small=self._small)
            worst = int(by_name.argmax())
            count = int((by_name > limit[1]).sum())
            if count:
                found.append(
                    f"gradients of {count} parameters differ, of `{self._names[worst]}` by {by_name[worst]:.1e}"
                )
        for i, document in enumerate(packs[0]):  # alone trained, among others that are not
            pack = [each if j == i else mask_document(each) for j, each in enumerate(packs[0])]
            ours = self._packed([RankShare.like(packs[0], pack)])
            theirs = self._unpacked([RankShare.like(packs[0], [document])])
            gap = self._gaps(ours, theirs)
            if self._probe.is_beyond(gap, limit):
                found.append(
                    f"document {i} of {len(pack)} ({num_trained(document)} trained tokens) has the loss "
                    f"{ours.loss:.5g} in the pack, {theirs.loss:.5g} alone, and gradients that differ by {gap[1]:.1e}"
                )
        return "; ".join(found)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """No dropout and no noise; counts of the log, random state, modes and buffers are restored."""
        trainer = self._trainer
        objective = self._objective
        probe = self._probe
        totals = objective.totals
        before = {name: getattr(trainer, name, None) for name in SET_ATTRIBUTES}
        noise = {each: each.alpha for each in trainer.packed_model.own_hooks if isinstance(each, DocumentNoise)}
        objective.totals = TrainingTotals(totals.sources, totals.shares_prefixes)
        try:
            with trainer.packed_model.attending(), probe.undisturbed():
                for hooks in noise:
                    hooks.alpha = 0.0
                trainer.aux_loss_enabled &= not self._data.packs_images
                # The trainer sets all modules to train mode, also those that draw
                with probe.inner.register_forward_pre_hook(probe.silence):
                    yield
        finally:
            objective.totals = totals
            for hooks, alpha in noise.items():
                hooks.alpha = alpha
            for name, value in before.items():
                setattr(trainer, name, value)
