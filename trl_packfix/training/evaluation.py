"""Evaluate a model so that the loss does not depend on packing: total loss over total trained tokens of the whole set.

A mean of batch means, as TRL logs it, changes with the batch size, with packing and with the number of ranks. The
trainer (`trainer.py`) calls three methods of `Evaluation`: `make_loader` for the loader of an evaluation set,
`evaluate_set` to run TRL's loop over the batches, and `evaluate_batch` for each batch. `EvaluationTotals` (`totals.py`)
adds up the batches.

The loss is the negative log-likelihood, whatever the training loss is. If the user defines the loss, with
`compute_loss_func` or with a subclass that has its own `compute_loss` or `prediction_step`, evaluation is TRL's, and a
warning says so.

Words: A *trained token* is a token with a label. A *document* is one example of the set as the model reads it. A *pack*
is one sequence of several documents; *padded* batches have one document per row. The model must be *proved* before it
evaluates packs: a test shows that documents in a pack do not influence each other. A *feature* (`feature.py`) is an
option of packs, such as `share_prefixes`. *Copies* are ranks that evaluate the same documents, because they divide one
model between them (tensor parallelism).
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput

from ..data.cache import cached_documents
from ..data.dataset_checks import check_tokenised
from ..data.documents import Documents
from ..data.loaders import DocumentDataset, PackedBatchSampler, PaddedBatchSampler
from ..data.row_values import SOURCES, RowValuesCollator, read_row_values
from ..feature import Feature, features_of
from ..layout import layout_of
from ..planning.packing import Overlong
from .checks import check_prepared
from .loading import TrainingData
from .objective import Objective
from .planner import make_planner
from .proofs import prove_degrees, prove_feature
from .same_data import check_same_documents
from .totals import EvaluationTotals, scores_of
from .trainer_view import TrainerPart, TrainerView
from .user_code import UserCode, has_trained_tokens

logger = logging.getLogger(__name__)

# The keys of the log, with their unit and description. `tools/logged.py` makes docs/logging.md from them
LOGGED = {
    "eval_loss": ("nats per token", "total loss over trained tokens of the whole set"),
    "eval_entropy": ("nats", "of the predictions at trained tokens, mean"),
    "eval_mean_token_accuracy": ("share", "trained tokens that the model ranks first"),
    "eval_aux_loss": ("nats", "router loss, mean over batches"),
    "eval_num_tokens": ("tokens", "of the training set, forwarded so far"),
    "eval_loss/NAME": ("nats per token", "of a source"),
    "eval_trained_tokens/NAME": ("tokens", "of a source"),
}


class Evaluation(TrainerPart):
    """The evaluation and prediction of a trainer. Every document counts once, and metrics are made from totals.

    Args:
        trainer: the trainer.
        data: the training data, which has the readers and collators for evaluation sets, too.
        objective: the training loss of the trainer.
    """

    _totals: EvaluationTotals  # sums of the running evaluation
    _has_warned_of_user_loss = False
    # Whether the running evaluation reads padded batches of this package, which are equal on all copies
    _has_equal_batches = False
    # In an evaluation on packs with a loss of the user's: the sum of its losses of packs with a trained token, and the
    # number of these packs on this rank, (2,)
    _user_losses: torch.Tensor | None = None

    def __init__(self, trainer: TrainerView, data: TrainingData, objective: Objective):
        super().__init__(trainer)
        self._data = data
        self._objective = objective

    def make_loader(self, dataset: object, needs_logits: bool, must_be_prepared: bool) -> DataLoader[Any] | None:
        """Return the loader of a set, or None if TRL's loader must be used.

        Args:
            dataset: the evaluation set.
            needs_logits: whether predictions are needed, and not only the loss.
            must_be_prepared: whether TRL should have tokenized the set. If TRL has not, the set is refused.

        Raises:
            ValueError: the set cannot be evaluated.
        """
        if not self._reads_rows:
            return None
        if isinstance(dataset, IterableDataset):
            # Read the stream into a table in memory, because each evaluation needs all of it
            dataset = self._data.reading.read_whole_stream(dataset)
        if self._evaluates_documents(dataset):
            return self._evaluation_loader(dataset, needs_logits)
        if must_be_prepared and isinstance(dataset, Dataset):
            check_prepared(dataset, "eval")
        return None

    @property
    def _reads_rows(self) -> bool:
        """Whether this package knows how to collate rows: the user has set no collator of their own."""
        return self._data.reading.can_replace(self._data.padded_collator)

    def _evaluates_documents(self, dataset: object) -> TypeGuard[Dataset]:
        """Return whether this package makes the loader of a set."""
        return isinstance(dataset, Dataset) and self._reads_rows and self._data.reading.can_read(dataset)

    def _packs_evaluation(self, needs_logits: bool) -> bool:
        """Return whether an evaluation runs on packs; otherwise it runs on padded batches. There are three cases:

        - Settings ask for padded batches, or logits are needed: the evaluation runs on padded batches.
        - Training is not packed: the evaluation runs on packs, and `_packs_accepted` proves the model before it does.
        - Training is packed: the evaluation runs on packs if the model is proved. A model that was not tested yet is
          proved here.
        """
        returns_logits = needs_logits and not self.args.prediction_loss_only
        if not self.args.packs_evaluation or returns_logits:
            return False
        if not self.args.packing:
            return True  # `_packs_accepted` lets the model accept packs during the evaluation only
        packed_model = self._trainer.packed_model
        # Before training, the engine (DeepSpeed, FSDP) does not exist yet, so the model cannot be proved under it.
        # Then padded batches are evaluated, which give the same metrics.
        if not (self._trainer.is_deepspeed_enabled or self._trainer.is_fsdp_enabled):
            # `attending`: the model has the attention that reads the boundaries of documents
            with packed_model.attending(), self._trainer.compute_loss_context_manager():
                if packed_model.isolation is None:  # the model was not tested yet
                    packed_model.prove(self._trainer.model)
            # `prove_feature` does nothing without a feature, or if the proof of the model or of the feature has failed
            if not packed_model.feature_is_proved:
                prove_feature(self._trainer, self._data, self._trainer.model)
        return packed_model.is_proved

    @property
    def _packing_feature(self) -> Feature:
        """The feature that packs of an evaluation have. If it shares prefixes, it may share fewer than in training."""
        # A loss of the user reads one label at each position of a pack. The last token of a shared prefix has another
        # next token in each document, and so several labels. So with such a loss documents share no prefix
        shares = self._data.shares_rows and self.replaces_trl_metrics
        # All documents that begin alike are found by sorting documents by their stored tokens. In a run with images
        # documents are not sorted, and share a prefix only if they happen to be in one pack
        can_sort = self._data.reading.is_text_only
        return features_of(self.args).in_evaluation(can_sort=can_sort, shares=shares)

    def _read_documents(self, dataset: Dataset) -> DocumentDataset:
        """Return the documents of a set, with their sources if the set has the column. Refuse bad sources."""
        args = self.args
        source_column = args.source_column if args.source_column in dataset.column_names else None
        values = read_row_values(dataset, weight_column=None, source_column=source_column, name="evaluation")
        reader = self._data.reading.make_reader(dataset, "evaluation")
        # Evaluation has one document per row. So long documents are truncated even if training splits or drops them.
        overlong: Overlong = "raise" if args.overlong == "raise" else "truncate"
        documents = cached_documents(
            reader,
            args.max_length,
            overlong,
            truncation_mode=args.truncation_mode,
            keep_untrained=True,  # documents without a trained token, too: predictions are made for every row
            feature=self._packing_feature,
        )
        check_same_documents(documents, "The evaluation set", args.world_size)
        pad_token_id = self._trainer._tokenizer.pad_token_id
        # `values` has a source for each row of the set. If a row is a conversation whose turns are documents,
        # `reader.conversations` has the row of each turn; otherwise it is None, and `select` keeps all values
        return DocumentDataset(reader, documents, pad_token_id, values=values.select(reader.conversations))

    def check_evaluation_sets(self) -> None:
        """Refuse evaluation sets without a trained token, if training would evaluate a loss on them."""
        user_code: UserCode = self._trainer.user_code
        if user_code.replaced_methods("evaluate", "get_eval_dataloader", "evaluation_loop", "prediction_step"):
            return  # what the user evaluates is not known
        if self._trainer.compute_metrics is not None and not self.args.prediction_loss_only:
            return  # metrics of predictions do not need a trained token
        eval_dataset = self._trainer.eval_dataset
        datasets = eval_dataset if isinstance(eval_dataset, dict) else {None: eval_dataset}  # one set has no name
        for name, dataset in datasets.items():
            if self._evaluates_documents(dataset):
                documents = self._read_documents(dataset).documents
                self._check_trained(documents, "eval" if name is None else f"eval_{name}")

    def _check_trained(self, documents: Documents, prefix: str) -> None:
        """Refuse a set without a trained token, which has no loss. `prefix` is the prefix of its metrics."""
        counts = documents.ledger.given  # all documents, before they are truncated
        if not documents.ledger.kept.trained_tokens:  # after they are truncated
            raise ValueError(
                f"Cannot compute `{prefix}_loss`: of {counts.tokens} tokens in {counts.documents} documents, "
                f"{counts.trained_tokens} have a label that is not -100, and 0 after truncation to "
                f"`max_length={self.args.max_length}`. The loss is a mean over these tokens, and reporting 0.0 would "
                "make this the best checkpoint. Raise `max_length` or change `truncation_mode` if prompts fill it; "
                "otherwise check the labels, or evaluate another set."
            )

    def _check_padded(self, documents: Documents, needs_logits: bool) -> None:
        """Refuse a set that cannot be evaluated in padded batches.

        Raises:
            ValueError: a document does not fit on one rank, or copies cannot divide predictions or inputs between them.
        """
        args = self.args
        copies = self._data.ranks.copies
        tokens_per_rank = args.tokens_per_rank
        longest = int(documents.lengths.max(initial=0))
        if tokens_per_rank is not None and longest > tokens_per_rank:
            raise ValueError(
                f"The evaluation set has a document of {longest} tokens, `tokens_per_rank` is {tokens_per_rank}, and "
                "this evaluation runs whole documents on one rank: logits are needed (`predict`, `compute_metrics`), "
                "`eval_packing` is False, or DeepSpeed or FSDP has not trained yet. Set `prediction_loss_only=True` "
                "and evaluate packs during or after training, or give a set of shorter documents."
            )
        # transformers gathers predictions from all ranks. Copies have equal predictions, so each copy returns its share
        # of the rows
        if copies == 1 or not needs_logits or args.prediction_loss_only:
            return
        if args.eval_batch_size % copies:
            raise ValueError(
                f"`per_device_eval_batch_size={args.eval_batch_size}` was given with tensor parallelism over {copies} "
                f"ranks, and predictions are needed. transformers gathers the rows of all ranks, so each of "
                f"the {copies} returns its share of the batch that they run together. Set "
                f"`per_device_eval_batch_size` to a multiple of {copies}."
            )
        if "inputs" in args.include_for_metrics:
            raise ValueError(
                f"`include_for_metrics={args.include_for_metrics}` was given with tensor parallelism over {copies} "
                f"ranks. transformers gathers the inputs of all ranks, and these have the same ones, so "
                f"`compute_metrics` would get each input {copies} times. Leave `include_for_metrics` unset."
            )

    def _evaluation_loader(self, dataset: Dataset, needs_logits: bool) -> DataLoader[Any]:
        """Return the loader of packs or of padded batches of a set, with sources if the set has them."""
        args = self.args
        ranks = self._data.ranks
        if "input_ids" in dataset.column_names:
            # Sets for `predict`, or with `skip_prepare_dataset`, were not checked before.
            check_tokenised(dataset, "evaluation", self._data.vocab_size, packing=args.packs_evaluation)
        document_dataset = self._read_documents(dataset)
        documents = document_dataset.documents
        sampler: PackedBatchSampler | PaddedBatchSampler
        collate: Callable[..., Any]
        if self._packs_evaluation(needs_logits):
            planner = make_planner(
                args,
                documents,
                self._data.cost_model,
                world_size=ranks.count,
                strategy="bfd",
                batch_size=args.eval_batch_size,
                accumulation=1,  # a step of the plan is one micro-batch of each rank
                balance="step",
                drop_last=False,
                shuffle=False,
                degrees=self._data.source.degrees,  # the numbers of ranks per pack with which the model is proved
                **self._packing_feature.settings,
            )
            sampler = PackedBatchSampler(planner, ranks.rank)
            collate = self._data.packed_collator(args.eval_batch_size, self._packing_feature)
        else:
            self._check_padded(documents, needs_logits)
            sampler = PaddedBatchSampler(len(documents), args.eval_batch_size, ranks.rank, ranks.count)
            self._data.reading.check_padded(document_dataset.reader)  # refuses images under ZeRO-3 and FSDP
            collate = self._data.reading.padded_collator(self._data.padded_collator)
        if document_dataset.values.sources is not None:
            # `keys`: an entry of the batch, and the key of documents from which it is made
            collate = RowValuesCollator(collate, keys={SOURCES: SOURCES})
        return self._data.make_loader(document_dataset, sampler, collate)

    def evaluate_set(
        self, run_loop: Callable[[], EvalLoopOutput], dataloader: DataLoader[Any], loss_only: bool, prefix: str
    ) -> EvalLoopOutput:
        """Run TRL's evaluation loop, and replace its loss and metrics by the loss and metrics of the whole set.

        Args:
            run_loop: runs TRL's loop over `dataloader`, which calls `evaluate_batch` for each batch.
            dataloader: the loader, from this package or from TRL.
            loss_only: whether only the loss is needed, and no predictions.
            prefix: the prefix of the metrics, such as "eval".

        Returns:
            The output of the loop, with replaced metrics.
        """
        # First, set up the totals. A loss needs a trained token; predictions, and a `prediction_step` of the user, do
        # not need one
        dataset = dataloader.dataset
        source_names: tuple[str, ...] = ()
        if isinstance(dataset, DocumentDataset):  # the loader is of this package
            source_names = dataset.values.names
            if loss_only and not self._trainer.user_code.replaced_methods("prediction_step"):
                self._check_trained(dataset.documents, prefix)
        self.forget_unlogged()
        self._objective.gather_totals()  # `num_tokens` of the training set is logged with the metrics
        self._totals = EvaluationTotals(self._trainer.accelerator.device, source_names)
        if self._loss_of_user is not None and not self._has_warned_of_user_loss:
            self._has_warned_of_user_loss = True
            logger.warning(
                "`eval_loss` is the mean over batches of %s, as in TRL. It changes with the batch size, with packing "
                "(`eval_packing=False` evaluates padded batches) and with the number of ranks.",
                self._loss_of_user,
            )
        sampler = getattr(dataloader, "batch_sampler", None)
        self._has_equal_batches = isinstance(sampler, PaddedBatchSampler)
        self._user_losses = None
        # What a `prediction_step` of the user's returns is not changed
        has_own_step = bool(self._trainer.user_code.replaced_methods("prediction_step"))
        if self._loss_of_user is not None and not has_own_step and isinstance(sampler, PackedBatchSampler):
            self._user_losses = torch.zeros(2, device=self._trainer.accelerator.device)

        # Second, run the loop
        with self._packs_accepted(sampler):
            output = run_loop()

        # Third, replace the metrics of the loop
        metrics = self._totals.metrics(self._trainer.accelerator, self._data.ranks.copies)
        assert output.metrics is not None
        if metrics:
            # TRL's `log` averages these lists, and adds the means to the metrics of the loop
            logged = self._trainer._metrics["eval"]
            for name, value in metrics.items():
                if name == "loss" or "/" in name:  # the loss of the whole set, or a number of one source
                    output.metrics[f"{prefix}_{name}"] = value
                else:
                    logged[name] = [value]
            logged["num_tokens"] = [self._trainer._total_train_tokens]
        elif self.replaces_trl_metrics:
            output.metrics.pop(f"{prefix}_loss", None)  # without a trained token there is no loss; the loop reports 0.0
        if self._user_losses is not None:
            loss, num_packs = self._trainer.accelerator.reduce(self._user_losses, reduction="sum").tolist()
            if num_packs:
                output.metrics[f"{prefix}_loss"] = loss / num_packs
        return output

    def count_user_loss(self, loss: torch.Tensor | None, inputs: dict[str, Any]) -> torch.Tensor | None:
        """Add a loss that the user's code has computed to the mean over packs, and return it.

        The loss of a pack without a trained token, such as a dummy, does not count, and 0 is returned. It may be NaN: a
        mean over no tokens. Dummies run the user's code, because other ranks may wait for its forwards.
        """
        if self._user_losses is None or loss is None:
            return loss
        is_counted = has_trained_tokens(inputs)
        loss = loss.detach().mean()
        if not is_counted:
            loss = torch.zeros_like(loss)
        self._user_losses += torch.stack([loss, torch.full_like(loss, is_counted)]).to(self._user_losses)
        return loss

    def forget_unlogged(self) -> None:
        """Forget metrics that were not logged: of `predict`, and of an evaluation that was interrupted.

        TRL's `log` would add them to the next log.
        """
        for name in ("aux_loss", "entropy", "mean_token_accuracy", "num_tokens"):
            self._trainer._metrics["eval"].pop(name, None)

    @contextmanager
    def _packs_accepted(self, sampler: object) -> Iterator[None]:
        """Let the model accept packs in this context, if `sampler` yields packs. First prove what is not proved yet.

        If training is packed, the model is proved, and packs that several ranks share are proved here. Otherwise the
        model is proved here, and no ranks share a pack.
        """
        if not isinstance(sampler, PackedBatchSampler):
            yield
            return
        packed_model = self._trainer.packed_model if self.args.packing else self._data.make_packed_model()
        with packed_model.attending():
            if self.args.packing:
                prove_degrees(self._trainer, sampler.planner.packing.degrees)
            else:
                with self._trainer.compute_loss_context_manager():
                    packed_model.prove(self._trainer.model).raise_if_leaking()
            yield

    @property
    def replaces_trl_metrics(self) -> bool:
        """Whether loss and metrics are computed from totals over the set; otherwise TRL computes them.

        TRL computes them if the user defines the loss, and in unpacked runs on rows with images.
        """
        return self._loss_of_user is None and not self._data.leaves_batches_to_trl

    @property
    def _loss_of_user(self) -> str | None:
        """The function or method with which the user has defined the loss, for a message; None if there is none."""
        if self._trainer.compute_loss_func is not None:
            return "`compute_loss_func`"
        methods = self._trainer.user_code.replaced_methods("compute_loss", "prediction_step")
        return f"`{methods[0]}`" if methods else None

    def evaluate_batch(
        self, model: torch.nn.Module, inputs: dict[str, Any], loss_only: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Compute a batch, and add it to the totals.

        Args:
            model: the model in its wrappers.
            inputs: the batch.
            loss_only: whether only the loss is needed. Then the fused LM head computes it, without logits in memory.

        Returns:
            The mean loss of the batch, the logits and the labels. The loss is None without labels; logits and labels
            are None with `loss_only`.
        """
        inputs = self._trainer._prepare_inputs(inputs)
        objective = self._objective
        if self.args.packing:
            # Refuse a pack while the model has its own attention, which may ignore the boundaries of documents
            self._trainer.packed_model.check_packed_attention(inputs)
        inputs["use_cache"] = False
        layout = layout_of(inputs)  # tells which token belongs to which document, in packs and in padded batches
        with torch.no_grad(), self._trainer.compute_loss_context_manager():
            # First case: only the loss, of packs or of padded batches
            if loss_only:
                if self._trainer.aux_loss_enabled:
                    inputs["output_router_logits"] = True
                # `router_logits` is a list. The forward fills it where the model's own router loss would be wrong
                with objective.router_logits(inputs, layout) as router_logits:
                    outputs = model(**inputs, fused_lm_head=True)  # `TokenScores` of `lm_head.py`
                # `targets`: which outputs predict a trained token, and of which document. `targets.trained`: the number
                # of trained tokens of each document
                targets = layout.targets(outputs.label_mask)
                if self._trainer.aux_loss_enabled:
                    aux_loss = objective.aux_loss(outputs, layout, targets.trained, router_logits=router_logits)
                    # Of ranks that share a pack, the first has its value. A dummy, the batch of a rank without
                    # documents, has none. An empty list would have no mean
                    counts = layout.group.count_once(targets.trained.any()).to(aux_loss)
                    pairs = self._trainer.accelerator.gather(torch.stack([aux_loss, counts])).view(-1, 2).tolist()
                    if values := [value for value, is_counted in pairs if is_counted]:
                        self._trainer._metrics["eval"]["aux_loss"] += values
                # `add` adds the batch to the totals, and returns its mean loss
                mean_loss = self._totals.add(outputs, targets, objective.sources_of(targets))
                return mean_loss.float(), None, None

            # Second case: the logits of padded batches, too
            labels = inputs.pop("labels", None)
            shift_labels = inputs.pop("shift_labels", None)
            logits = model(**inputs).logits
            loss = None
            if labels is not None:
                scores: Any = scores_of(logits, labels, shift_labels)
                targets = layout.targets(scores.label_mask)
                loss = self._totals.add(scores, targets, objective.sources_of(targets)).float()
        if self._has_equal_batches:
            copies = self._data.ranks.copies
            index = self._data.ranks.copy_index
            # Copies have computed the same rows, and transformers gathers the rows of all ranks. So each copy returns
            # its share
            logits = logits.chunk(copies)[index]
            labels = None if labels is None else labels.chunk(copies)[index]
        return loss, logits, labels
