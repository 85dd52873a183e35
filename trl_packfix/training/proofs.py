"""Proofs on the wrapped model, before training: the feature of packs, and packs that several ranks share.

`BeforeFirstStep` (`callbacks.py`) calls both proofs after the engine has wrapped the model. A *feature* (`feature.py`)
is an option of packs, such as `share_prefixes`, with which documents may share *token rows*: the tokens of a common
beginning are in the pack once, and the model computes them once. `prove_feature` tests that packs with the feature of
the run give each document the outputs that it has by itself. `prove_degrees` tests that documents in a pack do not
influence each other if several ranks share the pack. The number of these ranks is the *degree*, and each degree is
tested.
"""

from collections.abc import Iterable

from torch import nn

from ..group import make_groups
from .loading import TrainingData
from .trainer_view import TrainerView


def prove_feature(trainer: TrainerView, data: TrainingData, wrapped: nn.Module) -> str | None:
    """Prove packs with the feature of the run. If the proof fails, pack documents without it.

    All ranks must call it.

    Returns:
        Why packs are made without the feature; None if they have it, or if there is nothing to prove.

    Raises:
        PackingLeakError: the proof fails, and the plan needs the feature, or `on_leak="raise"` is set.
    """
    # There is nothing to prove if documents share no token rows. The proof compares with plain packs, so it needs
    # `is_proved`: in plain packs, documents do not influence each other
    if not (data.shares_rows and trainer.packed_model.is_proved):
        return None
    # In the context `attending` the model has the attention that keeps documents of a pack apart
    with trainer.packed_model.attending(), trainer.compute_loss_context_manager():
        reason = trainer.packed_model.prove_feature(wrapped)
    if reason is None:
        return None
    trainer.packed_model.feature.refuse_model(reason, trainer.args.on_leak)  # raises, or warns
    data.shares_rows = False  # packs are collated without the feature from now on
    return reason


def prove_degrees(trainer: TrainerView, degrees: Iterable[int]) -> None:
    """Make the process groups of all degrees, and prove at each degree that documents do not influence each other.

    All ranks must call it. A degree of 1, a pack on one rank, needs no process group and no second proof.

    Raises:
        PackingLeakError: documents influence each other at a degree.
    """
    shared_degrees = [degree for degree in degrees if degree > 1]
    make_groups(shared_degrees, trainer.args.ddp_timeout_delta)
    with trainer.packed_model.attending(), trainer.compute_loss_context_manager():
        for degree in shared_degrees:
            trainer.packed_model.prove_degree(trainer.model_wrapped, degree)
