"""An own training loop on packs, without a trainer: torch, transformers and the public functions of trl_packfix.

    python examples/own_loop.py                                      # SmolLM2-135M-Instruct, 40 conversations
    python examples/own_loop.py --tiny                               # a tiny random model, in seconds
    torchrun --nproc_per_node 2 examples/own_loop.py --tiny          # the same on two ranks
    python examples/own_loop.py --resume own_loop_output/checkpoint-5.pt

`packed_dataloader` gives each rank its packs, with their boundaries; `prepare_for_packing` sets attention that reads
them, and proves on this model that documents do not reach each other; `plan_packs` says how few packs are possible.
The loss is yours: the sum over the trained tokens of an optimizer step, of all micro-batches on all ranks, divided by
their number. A mean per micro-batch would weigh a token by the documents beside it.
"""

import argparse
import atexit
import os
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset
from demo import random_miniature
from offline import orders, smollm2
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from trl_packfix import packed_dataloader, plan_packs, prepare_for_packing

RANK = int(os.environ.get("RANK", 0))  # set by torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
IGNORED = -100  # the label of a token that is not trained


def say(text: str) -> None:
    print(text, flush=True) if RANK == 0 else None


def tokenise(rows: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """`input_ids` and `labels`: the completion is trained, the prompt is not."""

    def one(row: dict[str, Any]) -> dict[str, list[int]]:
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
        whole = tokenizer.apply_chat_template(row["prompt"] + row["completion"], return_dict=True)["input_ids"]
        assert whole[: len(prompt)] == prompt, "the template renders the prompt differently without its answer"
        return {"input_ids": whole, "labels": [IGNORED] * len(prompt) + whole[len(prompt) :]}

    return rows.map(one, remove_columns=rows.column_names)


def losses(model: nn.Module, batch: dict[str, Any], args: argparse.Namespace) -> torch.Tensor:
    """The loss of a pack, summed over its trained tokens."""
    batch = {k: v.to(args.device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    labels = batch.pop("labels")
    with torch.autocast(args.device.type, args.precision, enabled=args.precision is not None):
        logits = model(**batch).logits[0, :-1]
    # the first label of each document is -100 already, so no document predicts the next one
    return cross_entropy(logits.float(), labels[0, 1:], reduction="sum")


def over_ranks(*numbers: float | torch.Tensor) -> list[float]:
    summed = torch.tensor([float(number) for number in numbers], dtype=torch.float64)
    if WORLD_SIZE > 1:
        dist.all_reduce(summed)
    return summed.tolist()


@torch.no_grad()
def evaluate(model: nn.Module, loader: Any, args: argparse.Namespace) -> float:
    """The mean over the trained tokens of all documents, so it depends neither on the packs nor on the ranks."""
    sums = [(losses(model, batch, args).item(), (batch["labels"] != IGNORED).sum().item()) for batch in loader]
    loss, count = over_ranks(*np.sum(sums, axis=0))
    return loss / count


def train(model: PreTrainedModel, table: Dataset, held_out: Dataset, args: argparse.Namespace) -> PreTrainedModel:
    model = model.to(args.device).train()
    choice = prepare_for_packing(model, dtype=args.precision, max_length=args.max_length)  # raises if documents leak
    say(f"proved on this model: documents of a pack do not reach each other ({choice.name}: {choice.reason})")
    of_ranks = {"rank": RANK, "world_size": WORLD_SIZE, "synchronisation": "step", "cost_model": model.config}
    shape = (args.max_length, args.batch_size)
    accumulation = args.accumulation
    loader = packed_dataloader(table, *shape, gradient_accumulation_steps=accumulation, seed=args.seed, **of_ranks)
    evaluated = packed_dataloader(held_out, *shape, strategy="bfd", shuffle=False, **of_ranks)
    lengths = np.minimum(list(map(len, table["input_ids"])), args.max_length)
    fewest = plan_packs(lengths, args.batch_size * args.max_length).lower_bound
    say(f"{len(table)} documents in {len(loader) * WORLD_SIZE} micro-batches; no plan needs fewer than {fewest}")
    wrapped = DistributedDataParallel(model) if WORLD_SIZE > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    per_epoch = len(loader) // accumulation
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (args.epochs * per_epoch))
    parts = (model, optimizer, schedule)
    done, states = torch.load(args.resume, map_location=args.device) if args.resume else (0, [])
    for part, state in zip(parts, states, strict=False):
        part.load_state_dict(state)
    for epoch in range(done // per_epoch, args.epochs):
        loader.set_epoch(epoch)  # each epoch has a plan of its own, and a restart the same
        first = max(done, epoch * per_epoch)
        batches = islice(loader, accumulation * (first - epoch * per_epoch), None)
        for step in range(first + 1, (epoch + 1) * per_epoch + 1):
            micro_batches = list(islice(batches, accumulation))
            (count,) = over_ranks(sum((batch["labels"] != IGNORED).sum() for batch in micro_batches))
            loss_of_step = 0.0
            for i, batch in enumerate(micro_batches, start=1):
                with nullcontext() if i == accumulation or WORLD_SIZE == 1 else wrapped.no_sync():
                    loss = losses(wrapped, batch, args) / count
                    (loss * WORLD_SIZE).backward()  # DDP averages gradients over ranks, and a sum is wanted
                loss_of_step += loss.item()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            (loss_of_step,) = over_ranks(loss_of_step)
            say(f"step {step}: {count:.0f} tokens, loss {loss_of_step:.4f}, gradient {norm:.4f}")
            if RANK == 0 and (step % args.save_steps == 0 or step == args.epochs * per_epoch):
                torch.save((step, [part.state_dict() for part in parts]), f"{args.output_dir}/checkpoint-{step}.pt")
        model.eval()
        say(f"epoch {epoch}: held-out loss {evaluate(model, evaluated, args):.4f}")
        model.train()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny random model and 24 conversations")
    parser.add_argument("--resume", help="a checkpoint of a run with the same settings")
    defaults = {"output_dir": "own_loop_output", "max_length": 256, "batch_size": 2, "accumulation": 2, "epochs": 2}
    for name, default in (defaults | {"seed": 42, "learning_rate": 1e-4, "save_steps": 5}).items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    args = parser.parse_args()
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    on_gpu = torch.cuda.is_available()
    args.device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if on_gpu else "cpu")
    args.precision = torch.bfloat16 if on_gpu else None  # of autocast; flash attention needs it
    name = random_miniature(f"{args.output_dir}/miniature-{RANK}") if args.tiny else smollm2()
    if WORLD_SIZE > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
        atexit.register(dist.destroy_process_group)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(name)
    rows = tokenise(orders(30 if args.tiny else 44), tokenizer).train_test_split(1 / 11, seed=0)
    model = train(model, rows["train"], rows["test"], args)
    model.save_pretrained(args.output_dir, is_main_process=RANK == 0)


if __name__ == "__main__":
    main()
