"""Streams on two ranks; `test_streaming.py` launches this and reads FOLDER/result.pt. FOLDER holds `model`.

python tests/two_ranks_stream.py FOLDER
"""

import sys
import warnings
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import gather_object
from datasets import IterableDataset
from ranks.scenarios import TOKENIZER, Numbered, documents
from support.launch import fork_ranks

from trl_packfix import SFTConfig

NUM_DOCUMENTS = 97
MAX_STEPS = 18
SAVED = 13  # in the second pass


def run(
    folder: Path,
    name: str,
    stream: int | IterableDataset,
    checkpoint: Path | None = None,
    cls: type[Numbered] = Numbered,
    **settings,
) -> Numbered:
    """A trainer that has trained on a stream, or on one of so many shards; `seen` is [micro-batch][document]."""
    if isinstance(stream, int):
        stream = documents(NUM_DOCUMENTS).to_iterable_dataset(stream)
    defaults = {
        "max_steps": MAX_STEPS,
        "max_length": 64,
        "packing": True,
        "packing_report": False,
        "balance": "none",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-2,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "ddp_timeout": 60,
    }
    args = SFTConfig(str(folder / name), **defaults | settings)
    trainer = cls(str(folder / "model"), args, train_dataset=stream, processing_class=TOKENIZER)
    trainer.seen = []
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    return trainer


def outcome(trainer: Numbered) -> dict:
    return {
        "seen": gather_object([trainer.seen]),
        "weights": torch.cat([p.detach().flatten() for p in trainer.model.parameters()]),
        "num_documents": trainer.packing_report.num_documents,
        "num_tokens": [entry["num_tokens"] for entry in trainer.state.log_history if "loss" in entry],
        "ledger": trainer.packing_report.ledger.to_dict(),
    }


def run_rank(folder: Path) -> None:
    warnings.simplefilter("ignore")
    result = {}
    for name, num_shards, workers in (("shared", 1, 0), ("sharded", 4, 2)):
        settings = {"dataloader_num_workers": workers}
        whole = run(folder, name, num_shards, save_strategy="steps", save_steps=SAVED, **settings)
        resumed = run(folder, f"{name}_resumed", num_shards, folder / name / f"checkpoint-{SAVED}", **settings)
        result[name] = {"whole": outcome(whole), "resumed": outcome(resumed)}
    rank = torch.distributed.get_rank()
    error = ""
    try:
        run(folder, "different", documents(NUM_DOCUMENTS).to_iterable_dataset().shuffle(seed=rank, buffer_size=50))
    except ValueError as raised:
        error = str(raised)
    result["different"] = gather_object([error])
    if rank == 0:
        torch.save(result, folder / "result.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(not fork_ranks(2, partial(run_rank, Path(sys.argv[1]))))
