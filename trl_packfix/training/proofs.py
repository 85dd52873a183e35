"""Proofs on the wrapped model: shared prefixes, and parts of packs at each degree; and what follows where one fails."""

from collections.abc import Iterable

from torch import nn
from transformers.utils import logging

from ..attention.exchange import make_groups
from ..isolation.isolation_report import IsolationReport, PackingLeakError
from .loading import TrainingData
from .trainer_view import TrainerView

logger = logging.get_logger(__name__)


def prove_prefixes(trainer: TrainerView, data: TrainingData, wrapped: nn.Module) -> str | None:
    """Prove that documents that begin alike are what they are alone; where they are not, pack documents whole.

    All ranks must call it. Returns why documents are packed whole; None if they share, or if nothing is to be proved.
    """
    if not (data.shares_prefixes and trainer.packed_model.is_proved):
        return None
    with trainer.packed_model.attending(), trainer.compute_loss_context_manager():
        reason = trainer.packed_model.prove_prefixes(wrapped)
    if reason is None:
        return None
    args = trainer.args
    if args.share_prefixes == "family" or args.on_leak == "raise":
        raise PackingLeakError(
            f"`share_prefixes={args.share_prefixes!r}` was given, and on this model {reason}. So a beginning that "
            "documents share cannot be computed once"
            + ("" if args.on_leak == "raise" else ", and without sharing the planned packs do not fit")
            + '. Set `share_prefixes="off"`.'
        )
    data.shares_prefixes = False
    logger.warning('Documents are packed whole: `share_prefixes="pack"` was given, and on this model %s.', reason)
    return reason


def prove_degrees(trainer: TrainerView, degrees: Iterable[int]) -> list[IsolationReport]:
    """Make the process groups of all degrees, and prove isolation at each, once. All ranks must call it."""
    degrees = [degree for degree in degrees if degree > 1]
    make_groups(degrees, trainer.args.ddp_timeout_delta)
    with trainer.packed_model.attending(), trainer.compute_loss_context_manager():
        return [trainer.packed_model.prove_degree(trainer.model_wrapped, degree) for degree in degrees]
