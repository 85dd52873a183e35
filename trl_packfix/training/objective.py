"""Compute the training loss of a micro-batch, and count what was trained for the log.

The trainer (`trainer.py`) constructs one `Objective` and calls it at five places of an optimizer step:

    1. `count_step` counts the trained tokens of all micro-batches of the step. The loss is divided by this number.
    2. `compare_packs` checks that ranks that must read the same packs have done so (`groups.py`).
    3. `pop_row_values` takes the weights and sources of documents out of a micro-batch before the model gets it.
    4. `compute_loss` runs the model on a micro-batch, and returns its share of the loss of the step.
    5. `add_metrics` adds what was counted since the last log to the log (`totals.py`).

The loss is a mean over an optimizer step. With `document_weighting="token"` loss and gradients are TRL's, to the bit.
With "document" every document counts the same, whatever its length (LongAlign, arXiv 2401.18058). With `weight_column`
the weight w_d of a row counts in both sums of the mean, here for a token t of the document d, or for the mean of d:

    "token":     sum(w_d * loss_t) / sum(w_d) over the trained tokens t of the whole optimizer step
    "document":  sum(w_d * mean_d) / sum(w_d) over the documents d of the whole optimizer step

So loss and gradient depend only on ratios of weights, and not on packing, accumulation or ranks.

Words: a *document* is one training example, and a *pack* is one sequence of several documents. A *trained token* is one
whose label is not -100. A *source* is the data set from which a document comes (`source_column`). A *dummy* is a batch
without a trained token, for a rank that has no document in a micro-batch.

All sums are over *targets*: pairs of a document and a trained token (`layout.py`). A pack has fewer tokens than targets
if documents share the tokens of a common prefix. With sequence parallelism the ranks of a *group* share a pack, and
each rank holds a *part* of the pack and adds the terms of the targets in its part. Documents, tokens and micro-batches
are counted by the first rank of a group only. Training drops documents without a trained token. So if a document in a
batch has none, it is padding or belongs to a dummy.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..compat import parameters_summed_by_ranks, router_loss_coefficient
from ..data.collator import IGNORE_INDEX
from ..data.row_values import SOURCES, WEIGHTS
from ..feature import features_of
from ..layout import Layout, Sizes, Targets, layout_of
from ..planning.costs import LLAMA_7B
from .flops import own_peak_tflops, trained_share, training_flops
from .groups import check_same_packs
from .lm_head import score_tokens
from .loading import TrainingData
from .routers import check_router_loss, load_balancing
from .totals import TrainingTotals, sum_dtype
from .trainer_view import TrainerPart, TrainerView
from .user_code import has_trained_tokens

NUM_DUMMY_TOKENS = 2  # length of a dummy


class Objective(TrainerPart):
    """The training loss of a trainer, and the metrics in its log.

    Args:
        trainer: the trainer.
        data: the training data.
        compute_loss_func: the loss function that the user gave, or None.

    Attributes:
        totals: sums for the log. Tokens are counted without padding and dummies. The counts of all ranks are added at
            each log and checkpoint.
        summed_by_ranks: parameters whose gradients transformers sums over ranks after each backward (tensor
            parallelism).
        row_values: weights and sources of the documents of the current micro-batch, each of shape (N,), by key.
        fused_head_is_exact: whether the fused LM head, from which the loss is computed, gives the log-probabilities of
            the model's own logits. The callback `BeforeTraining` sets it, and `first_step.py` reads it.
        num_steps_to_compare: number of optimizer steps left in which ranks that must read the same packs compare them.
    """

    totals: TrainingTotals
    # Divisors of the loss in the running optimizer step, over all ranks. `count_step` sets those that the loss needs
    _num_filled: Tensor  # of the router loss: the number of micro-batches with documents on a rank, mean over ranks
    _num_documents: Any
    _weight_of_step: Tensor

    def __init__(self, trainer: TrainerView, data: TrainingData, compute_loss_func: Callable[..., Any] | None):
        super().__init__(trainer)
        self._data = data
        self._user_loss = compute_loss_func
        self.summed_by_ranks: list[nn.Parameter] = []
        self.row_values: dict[str, Tensor] = {}
        self.fused_head_is_exact = True
        self.num_steps_to_compare = 0

    def prepare_model(self) -> None:
        """Prepare the loaded model for this loss, and create the totals. Called once, at the end of the constructor."""
        trainer = self._trainer
        args = self.args
        trainer.compute_loss_func = self._user_loss  # TRL below 1.15 replaces it for `loss_type="dft"`
        score_tokens(self.base_model)  # adds the fused LM head
        trainer.router_aux_loss_coef = router_loss_coefficient(trainer, args) or 0.0
        check_router_loss(trainer)
        shares_prefixes = features_of(args).is_on
        source_names = self._data.source.row_values.names
        self.totals = TrainingTotals(trainer.accelerator.device, source_names, shares_rows=shares_prefixes)
        if args.packing:
            # The noise of NEFTune depends on the length of a document. transformers would take the length of the pack
            trainer.neftune_noise_alpha = None
        if args.packing or args.document_weighting == "document" or args.weight_column is not None:
            # The mean is over the whole optimizer step, also for models to which transformers passes no token count
            trainer.model_accepts_loss_kwargs = True

    @property
    def replaces_trl_loss(self) -> bool:
        """Whether this loss replaces TRL's loss.

        It does not where TRL makes the batches, nor under TRL's own sequence parallelism.
        """
        return not self._data.leaves_batches_to_trl and self._trainer.get_sp_size() == 1

    @property
    def smoothing(self) -> float:
        """The share of the loss that label smoothing gives to all tokens of the vocabulary; 0 without smoothing."""
        smoother = self._trainer.label_smoother
        return 0.0 if smoother is None or self.args.loss_type == "dft" else smoother.epsilon

    # The loss

    def start_training(self) -> None:
        """Prepare the model and the totals again, because both may have changed since the trainer was constructed."""
        # Add the fused LM head again. A trainer of TRL may have replaced it, if the user gave it the same model
        score_tokens(self.base_model)
        training_set = self._data.source
        # The names of data sources: of a table all are known now, and a stream numbers them as they are read
        self.totals.set_sources(training_set.row_values.names, training_set.numbered_sources)
        self.num_steps_to_compare = training_set.num_compared_steps if self._data.ranks.may_share_packs else 0
        self.summed_by_ranks = parameters_summed_by_ranks(self.base_model)
        vars(self).pop("trained_share", None)  # other weights may be trained than in the training before

    def pop_row_values(self, inputs: dict[str, Any]) -> None:
        """Move the weights and sources of documents from a batch to `row_values`.

        No model accepts them, and DeepSpeed would round them to half precision.
        """
        self.row_values = {name: inputs.pop(name) for name in (WEIGHTS, SOURCES) if name in inputs}
        # The batches of a stream have names of sources, and this rank numbers the names
        names = self.row_values.get(SOURCES)
        numbered_sources = self._data.source.numbered_sources
        if isinstance(names, list) and numbered_sources is not None:
            self.row_values[SOURCES] = numbered_sources.number_sources(names)

    def sources_of(self, targets: Targets) -> Tensor | None:
        """Return the number of the source of each target, (M,); None if the batch has no sources."""
        if SOURCES not in self.row_values:
            return None
        # Those of a stream are on the host. If the copy had to be complete, the host would wait for the forward
        sources = self.row_values[SOURCES].to(targets.documents.device, non_blocking=True)
        return sources[targets.documents]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool,
        num_items_in_batch: Tensor | int | None,
    ) -> Tensor | tuple[Tensor, Any]:
        """Return the share of a micro-batch in the loss of its optimizer step, and count it for the log.

        Args:
            model: the model as the engine has wrapped it.
            inputs: the micro-batch, on the device.
            return_outputs: whether to return the model's outputs with logits, too. As in TRL, a second forward computes
                them, because the fused LM head makes no logits.
            num_items_in_batch: the number of trained tokens of the optimizer step over all ranks; None takes the mean
                over this micro-batch.
        """
        if self.args.packing:
            # Refuse a pack while the model has its own attention, which may ignore the boundaries of documents
            self._trainer.packed_model.check_packed_attention(inputs)
        inputs["use_cache"] = False
        layout = layout_of(inputs)  # which document each token belongs to
        if self._trainer.aux_loss_enabled:
            inputs["output_router_logits"] = True
        with self.router_logits(inputs, layout) as router_logits:
            loss, outputs = self._loss(model, inputs, layout, num_items=num_items_in_batch)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            # The loss is divided by the tokens of all ranks, so gradients should be summed over ranks. DDP averages
            # them, which divides by the number of ranks once more
            loss = loss * self._data.ranks.count
        targets = layout.targets(outputs.label_mask)  # which outputs predict a trained token, and of which document
        aux_loss = None
        if self._trainer.aux_loss_enabled:
            aux_loss = self.aux_loss(outputs, layout, targets.trained, router_logits=router_logits)
            if self._trainer.compute_loss_func is None:  # as in TRL, a loss of the user stays as it is
                # The router loss is a mean over the micro-batches with documents, which `count_step` has counted
                num_filled = 1 if num_items_in_batch is None else self._num_filled
                loss = loss + self._trainer.router_aux_loss_coef * aux_loss / num_filled

        # What the log needs of this micro-batch
        self.totals.add_outputs(outputs, targets, aux_loss)
        sources = self.sources_of(targets)
        if sources is not None:
            losses = targets.select(-outputs.log_probs)
            is_trained = targets.select(outputs.label_mask)
            self.totals.add_sources(losses, is_trained, sources)
        if return_outputs:
            with torch.no_grad():
                return loss, model(**{key: value for key, value in inputs.items() if key != "labels"})
        return loss

    def dummy_loss(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: object = None) -> Tensor:
        """Return 0, the loss of a micro-batch without a trained token, with gradients of 0 for all parameters.

        The forward runs because other ranks wait for its collective calls. Nothing is added to the log. `log_probs` is
        0 where no label is trained.
        """
        self._trainer.packed_model.check_packed_attention(inputs)
        inputs["use_cache"] = False
        return -model(**inputs, fused_lm_head=True).log_probs.sum()

    def _loss(
        self, model: nn.Module, inputs: dict[str, Any], layout: Layout, *, num_items: Tensor | int | None
    ) -> tuple[Tensor, Any]:
        """Return the share of a micro-batch in the loss of its step, without router loss, and the `TokenScores`."""
        user_loss = self._trainer.compute_loss_func
        # First case: the loss of the fused LM head
        if user_loss is None and not self.smoothing:
            outputs = model(**inputs, fused_lm_head=True)
            targets = layout.targets(outputs.label_mask)
            per_token_loss = -outputs.log_probs  # (B, T - 1), zero where nothing is trained
            if self.args.loss_type == "dft":
                per_token_loss = per_token_loss * outputs.log_probs.exp().detach()
            return self._mean(per_token_loss, targets, outputs.label_mask, num_items=num_items), outputs
        # A loss of the user and label smoothing need all logits. As in TRL, a second forward computes the metrics.
        inputs_without_labels = {key: value for key, value in inputs.items() if key not in ("labels", "shift_labels")}
        outputs_with_logits = model(**inputs_without_labels)
        logits = outputs_with_logits.logits
        with torch.no_grad():
            outputs = model(**inputs, fused_lm_head=True)
        # Second case: the loss of the user, on a dummy and on documents
        if user_loss is not None and self.args.packing and not has_trained_tokens(inputs):
            # The user's mean over a dummy would be 0 / 0. This sum is 0, because all logits are masked, also infinite
            # ones. It depends on the logits, so that the backward runs, for which other ranks wait
            is_masked = outputs.label_mask.new_ones(()).bool()
            return logits.masked_fill(is_masked, 0).sum(), outputs
        if user_loss is not None:
            # A user's loss may call another model, such as a teacher. Refuse one whose attention would ignore packs
            with self._trainer.user_code.other_models_checked(inputs):
                return user_loss(outputs_with_logits, inputs.get("labels"), num_items_in_batch=num_items), outputs
        # Third case: label smoothing. TRL does not train the router loss here; this loss does. It takes the statistic
        # of the forward with gradients
        if self._trainer.aux_loss_enabled:
            outputs.aux_loss = outputs_with_logits.aux_loss
        targets = layout.targets(outputs.label_mask)
        label_losses, summed_losses = _smoothing_terms(logits, inputs)
        share = self.smoothing
        label_mean = self._mean(label_losses, targets, outputs.label_mask, num_items=num_items)
        vocabulary_mean = self._mean(
            summed_losses, targets, outputs.label_mask, num_items=num_items, num_classes=logits.shape[-1]
        )
        return (1 - share) * label_mean + share * vocabulary_mean, outputs

    def _mean(
        self, values: Tensor, targets: Targets, mask: Tensor, *, num_items: Tensor | int | None, num_classes: int = 1
    ) -> Tensor:
        """Return the share of this batch in the mean of an optimizer step over its weighted targets.

        Args:
            values: the loss at each position, 0 where nothing is trained, (B, T - 1); (1, T / s) in a part of a pack
                that s ranks share.
            targets: the targets of this rank.
            mask: True at positions behind which the token is trained, of the same shape as `values`.
            num_items: number of trained tokens of the step over all ranks. None takes the mean over this batch.
            num_classes: number of terms that are summed in each of the values; the mean is divided by it, too.
        """
        # `count` is the divisor in this batch, and `num_items` the divisor in the step. There are three cases: the
        # number of trained tokens, with "document" weighting the number of documents, and with weights the sum of
        # weights. `targets.documents` has the document of each selected value, and `targets.trained` the number of
        # trained tokens of each document
        values = targets.select(values)
        count = targets.select(mask).sum()
        if self.args.document_weighting == "document":
            values = values / targets.trained.clamp(min=1)[targets.documents]
            count = (targets.trained > 0).sum()
            num_items = None if num_items is None else self._num_documents
        weights = self.row_values.get(WEIGHTS)
        if weights is not None:
            values = values * weights.to(targets.documents.device)[targets.documents]
            count = self._total_weight(weights, targets.trained)
            num_items = None if num_items is None else self._weight_of_step
        count = torch.as_tensor(count if num_items is None else num_items)
        # If the count is 0, all terms of the sum are 0. It is not clamped to 1, because a sum of weights may be less.
        return values.sum() / (count.masked_fill(count == 0, 1) * num_classes)

    def _total_weight(self, weights: Tensor, trained: Tensor) -> Tensor:
        """Sum the weights of a batch over its trained tokens or, with "document" weighting, over its documents."""
        counts = trained > 0 if self.args.document_weighting == "document" else trained
        return (weights.to(trained.device) * counts).sum()

    def count_step(
        self, batch_samples: list[dict[str, Any]], device: torch.device, count: Callable[[list[Any]], Any]
    ) -> Any:
        """Return the number of trained tokens of an optimizer step over all ranks.

        The other divisors of the loss are stored: the number of documents, the sum of their weights, and the number of
        micro-batches that have documents.

        Args:
            batch_samples: the micro-batches of this rank.
            device: the device on which ranks exchange numbers.
            count: counts the labels of batches over all ranks; a method of transformers.
        """
        self.totals.start_step()
        batches = [batch for batch in batch_samples if "labels" in batch] if self.replaces_trl_loss else []
        if not batches:  # the loss is TRL's, or the user's batches have no labels
            return count(batch_samples)
        # For each batch the number of trained tokens of each document, (N,). If ranks share a pack, `count_once`
        # returns this number on the first of them, and 0 on the others
        counts_of_batches: list[Tensor] = []
        for batch in batches:
            layout = layout_of(batch)
            trained = layout.targets(batch["labels"][:, 1:] != IGNORE_INDEX).trained
            self.count_batch(batch, layout, trained)
            counts_of_batches.append(layout.group.count_once(trained))
        accelerator = self._trainer.accelerator
        if self._trainer.aux_loss_enabled:
            # The router loss is a mean over the micro-batches with documents. The divisor is their number on a rank,
            # averaged over ranks, because DDP averages gradients over ranks. If no micro-batch is empty, TRL divides by
            # the same number
            num_filled = torch.stack([counts.any() for counts in counts_of_batches]).float().sum().to(device)
            self._num_filled = accelerator.reduce(num_filled, reduction="mean")
        if self.args.document_weighting == "document":
            # `count` counts labels. It gets batches with one label for each document, so it counts documents
            label_batches = [torch.where(counts > 0, 0, IGNORE_INDEX) for counts in counts_of_batches]
            self._num_documents = count([{"labels": labels, "shift_labels": labels} for labels in label_batches])
        if self.args.weight_column is not None:
            pairs = zip(batches, counts_of_batches, strict=True)
            weights_of_batches = [self._total_weight(batch[WEIGHTS], counts) for batch, counts in pairs]
            weight = torch.stack(weights_of_batches).sum()
            # With tensor parallelism `copies` ranks read the same documents, so the sum counts each document as often.
            # `count`, of transformers, corrects this itself
            self._weight_of_step = accelerator.reduce(weight.to(device), reduction="sum") / self._data.ranks.copies
        # `batch_to_count` returns labels to count: one for each target, also if documents share the token
        return count([layout_of(batch).batch_to_count(batch) for batch in batch_samples])

    def compare_packs(self, batches: list[dict[str, Any]]) -> None:
        """Raise ValueError if ranks that must read the same packs have different micro-batches in an optimizer step."""
        if self.num_steps_to_compare and batches:
            self.num_steps_to_compare -= 1
            check_same_packs(batches, self._data.ranks.copies)

    # Auxiliary terms

    @contextmanager
    def router_logits(self, inputs: dict[str, Any], layout: Layout) -> Iterator[list[Tensor]]:
        """Collect the router logits of the forward in this context, if the model's own statistic would be wrong.

        The statistic of the model counts each token of a pack once. This is wrong for padding, for dummies, for tokens
        that documents share, and for a part of a pack.

        Yields:
            A list, to which the forward adds a tensor (T, experts) for each layer. It stays empty if the statistic of
            the model is right, or if there is no router loss.
        """
        collected: list[Tensor] = []
        pads = self.args.pad_to_multiple_of is not None or self.args.pad_documents_to_multiple_of is not None
        may_be_dummy = inputs["labels"].shape[1] == NUM_DUMMY_TOKENS
        # In runs with images, a pack without images gets a document that has one and trains nothing, so that every rank
        # calls the vision tower
        may_have_placeholder = not self._data.reading.is_text_only
        # `weighs_rows`: documents share tokens, or the batch is a part of a pack
        statistic_may_be_wrong = pads or may_be_dummy or may_have_placeholder or layout.weighs_rows
        if not (self._trainer.aux_loss_enabled and layout.is_packed and statistic_may_be_wrong):
            yield collected
            return

        def collect(module: nn.Module, args: tuple[object, ...], output: Any) -> None:
            # Keep the first forward, with gradients. With label smoothing a second one computes the metrics
            if not collected:
                collected[:] = output.router_logits

        # The second `base_model` is an attribute of transformers: the model without its LM head
        handle = self.base_model.base_model.register_forward_hook(collect)
        try:
            yield collected
        finally:
            handle.remove()

    def aux_loss(self, outputs: Any, layout: Layout, trained: Tensor, *, router_logits: list[Tensor]) -> Tensor:
        """Return TRL's load-balancing statistic of the documents of a micro-batch, (); 0 if it has no documents.

        If ranks share a pack, the first of them returns the statistic of the whole pack and the others return 0. The
        gradient is the gradient of this rank's part.

        Args:
            outputs: the outputs of the model, with its own statistic.
            layout: the layout of the micro-batch.
            trained: the number of trained tokens of each document, (N,).
            router_logits: what `router_logits` has collected. If it is empty, the model's own statistic is right.
        """
        if not router_logits:
            return outputs.aux_loss
        config = self.base_model.config.get_text_config()
        value = load_balancing(
            router_logits,
            config.num_experts,
            config.num_experts_per_tok,
            row_counts=layout.row_counts(trained).flatten(),  # how many documents each token of this rank belongs to
            group=layout.group,
        )
        # The first rank counts the value. On the other ranks it is 0, with the gradient of `value`
        return value if layout.group.is_leader else value - value.detach()

    # Numbers for the log

    def count_batch(self, inputs: dict[str, Any], layout: Layout, trained: Tensor) -> None:
        """Add the documents, tokens and FLOPs of a batch to the totals.

        Args:
            inputs: the batch.
            layout: its layout.
            trained: the number of trained tokens of each document, (N,).
        """
        sizes = layout.sizes(trained)
        flops = self.flops(inputs, sizes)
        num_row_tokens = inputs["labels"].numel()
        self.totals.add_batch(sizes, trained, num_row_tokens=num_row_tokens, flops=flops, group=layout.group)

    def flops(self, inputs: dict[str, Any], sizes: Sizes) -> Tensor:
        """Return the FLOPs of forward and backward of a batch; 0 if the model's cost is not known."""
        costs = self._data.cost_model
        dtype = sum_dtype(sizes.lengths.device)
        if costs is LLAMA_7B:  # the stand-in for a model whose costs are not known
            return sizes.lengths.new_zeros(())
        # Attention costs more than linearly. So for each document the FLOPs of all its tokens are counted, and those of
        # the beginning that another document computes are subtracted: `shared_tokens` are always first in a document
        document_flops, shared_flops = (
            training_flops(costs, tokens.to(dtype), self.trained_share).sum()
            for tokens in (sizes.lengths, sizes.shared_tokens)
        )
        tower_flops = 3 * self._data.reading.tower_flops(inputs, costs, dtype)  # a backward costs two forwards
        return document_flops - shared_flops + tower_flops

    @cached_property
    def trained_share(self) -> float:
        """The share of the model's weights, without those of the vision tower, that are trained."""
        return trained_share(self._trainer.model, without=self._data.reading.tower)

    def gather_totals(self) -> None:
        """Gather the sums of all ranks, and add the tokens to the counts of the trainer. All ranks must call it."""
        gathered = self.totals.gather(self._trainer.accelerator, self._data.ranks.copies)
        self._trainer._total_train_tokens += round(gathered["tokens"])
        input_tokens = {"no": 0.0, "non_padding": gathered["tokens"], "all": gathered["row_tokens"]}
        self._trainer.state.num_input_tokens_seen += round(input_tokens[str(self.args.include_num_input_tokens_seen)])

    def add_metrics(self, logs: dict[str, float], start_time: float | None) -> None:
        """Add to `logs` what was trained since the last log; in the last log, in the whole training.

        All ranks must call it.
        """
        is_end = "train_runtime" in logs
        is_training_log = is_end or ("loss" in logs and start_time is not None)  # the others are of evaluations
        if not self.replaces_trl_loss or not is_training_log:
            return
        self.gather_totals()
        window = self.totals.end_window()
        span = self.totals.training if is_end else window
        if span.num_steps:
            packing = self._data.source.packing
            # `efficiency` in the log is tokens over the capacity of packs. Packs of the strategy "minibatch" have no
            # capacity: a step has the documents of an unpacked step, however many tokens these have
            capacity = None
            if packing is not None and not packing.traits.keeps_unpacked_steps:
                capacity = packing.parallel.tokens_per_rank
            device = self._trainer.accelerator.device
            peak = self.args.peak_tflops or own_peak_tflops(device, self._data.attention_dtype)
            logs |= self.totals.metrics(span, capacity=capacity, num_ranks=self.args.world_size, peak_tflops=peak)
            if not self._trainer.aux_loss_enabled:
                logs.pop("aux_loss", None)
            logs["num_tokens"] = self._trainer._total_train_tokens
        if is_end and logs["train_runtime"]:
            logs["train_samples_per_second"] = round(span.sums["documents"] / logs["train_runtime"], 3)


def _smoothing_terms(logits: Tensor, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return two losses at each position, (B, T - 1), for label smoothing; 0 where no token is trained.

    The first is the loss of the label, and the second the sum of the losses of all tokens of the vocabulary. The
    operations have the same order as in transformers' `LabelSmoother`, so that losses are equal to the bit.
    """
    labels = inputs.get("shift_labels")
    if labels is None:
        logits = logits[:, :-1]
        labels = inputs["labels"][:, 1:]
    token_losses = -torch.nn.functional.log_softmax(logits, dim=-1)
    is_untrained = labels == IGNORE_INDEX
    label_losses = token_losses.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    summed_losses = token_losses.sum(-1, dtype=torch.float32)
    return label_losses.masked_fill(is_untrained, 0), summed_losses.masked_fill(is_untrained, 0)


def refuse_shared_prefixes(inputs: dict[str, Any]) -> None:
    """Raise ValueError for a pack with shared prefixes, whose loss TRL would compute wrongly in evaluation mode."""
    layout = layout_of(inputs)
    if not layout.shares_rows:
        return
    raise ValueError(
        f"A pack with shared prefixes, {layout.document_count} documents in {inputs['input_ids'].numel()} rows, came "
        "to `compute_loss` of a model in evaluation mode. There the loss is TRL's, which counts a shared token once. "
        "Use `trainer.evaluate()`, call `model.train()` first, or collate with `PackedDataCollator`."
    )
