"""Streams on ranks, which `test_streaming.py` looks at and continues on one."""

from pathlib import Path

import torch.distributed as dist
from accelerate.utils import gather_object
from datasets import IterableDataset

from .engines import weights_of
from .scenarios import NUM_DOCUMENTS, Numbered, documents, make

MAX_STEPS = 18
SAVED = 13  # in the second pass
KINDS = {"shared": (1, 0), "sharded": (4, 2)}  # shards and workers


def train(
    folder: Path,
    engine: str | None,
    name: str,
    stream: int | IterableDataset,
    checkpoint: Path | None = None,
    cls: type[Numbered] = Numbered,
    **settings,
) -> Numbered:
    """A trainer that has trained on a stream, or on one of so many shards."""
    if isinstance(stream, int):
        stream = documents(NUM_DOCUMENTS).to_iterable_dataset(stream)
    settings = {"max_steps": MAX_STEPS, "gradient_accumulation_steps": 1, "balance": "none"} | settings
    trainer = make(folder, engine, cls, data=stream, output_dir=name, **settings)
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    return trainer


def outcome(trainer: Numbered) -> dict:
    return {
        "seen": gather_object([trainer.seen]),
        "weights": weights_of(trainer),
        "num_documents": trainer.packing_report.num_documents,
        "num_tokens": [entry["num_tokens"] for entry in trainer.state.log_history if "loss" in entry],
        "ledger": trainer.packing_report.ledger.to_dict(),
    }


def restarted(folder: Path, engine: str, name: str) -> dict:
    shards, workers = KINDS[name]
    settings = {"dataloader_num_workers": workers}
    whole = train(folder, engine, name, shards, save_strategy="steps", save_steps=SAVED, **settings)
    resumed = train(folder, engine, f"{name}_resumed", shards, folder / name / f"checkpoint-{SAVED}", **settings)
    return {"whole": outcome(whole), "resumed": outcome(resumed)}


def different(folder: Path, engine: str) -> list[str]:
    stream, error = documents(NUM_DOCUMENTS).to_iterable_dataset().shuffle(seed=dist.get_rank(), buffer_size=50), ""
    try:
        train(folder, engine, "different", stream)
    except ValueError as raised:
        error = str(raised)
    return gather_object([error])
