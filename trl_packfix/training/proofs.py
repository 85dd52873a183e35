"""Proofs on the wrapped model, before training: shared prefixes, and packs that several ranks share.

The callbacks call both proofs after the engine has wrapped the model. `prove_prefixes` tests that tokens that several
documents share (`share_prefixes`) give each document the outputs that it has by itself. `prove_degrees` tests, for each
*degree*, which is the number of ranks that share a pack, that documents in a pack do not influence each other.
"""

from collections.abc import Iterable

from torch import nn
from transformers.utils import logging

from ..group import make_groups
from ..isolation.isolation_report import IsolationReport, PackingLeakError
from .loading import TrainingData
from .trainer_view import TrainerView

logger = logging.get_logger(__name__)


def prove_prefixes(trainer: TrainerView, data: TrainingData, wrapped: nn.Module) -> str | None:
    """Prove that documents may share their beginnings. If the proof fails, pack documents without sharing.

    All ranks must call it.

    Returns:
        Why documents do not share their beginnings; None if they do, or if there is nothing to prove.

    Raises:
        PackingLeakError: the proof fails, and `share_prefixes="family"` or `on_leak="raise"` is set. Packs of families
            are planned with shared tokens and do not fit without sharing.
    """
    if not (data.shares_prefixes and trainer.packed_model.is_proved):
        return None
    with trainer.packed_model.attending(), trainer.compute_loss_context_manager():
        reason = trainer.packed_model.prove_prefixes(wrapped)
    if reason is None:
        return None
    args = trainer.args
    consequence = "" if args.on_leak == "raise" else ", and without sharing the planned packs do not fit"
    if args.share_prefixes == "family" or args.on_leak == "raise":
        raise PackingLeakError(
            f"`share_prefixes={args.share_prefixes!r}` was given, and on this model {reason}. So a beginning that "
            f'documents share cannot be computed once{consequence}. Set `share_prefixes="off"`.'
        )
    data.shares_prefixes = False
    logger.warning('Documents are packed whole: `share_prefixes="pack"` was given, and on this model %s.', reason)
    return reason


def prove_degrees(trainer: TrainerView, degrees: Iterable[int]) -> list[IsolationReport]:
    """Make the process groups of all degrees, and prove at each that documents do not influence each other.

    All ranks must call it. A degree of 1 needs neither.
    """
    shared_degrees = [degree for degree in degrees if degree > 1]
    make_groups(shared_degrees, trainer.args.ddp_timeout_delta)
    with trainer.packed_model.attending(), trainer.compute_loss_context_manager():
        return [trainer.packed_model.prove_degree(trainer.model_wrapped, degree) for degree in shared_degrees]
