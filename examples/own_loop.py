"""An own training loop on packs, without a trainer: torch, transformers and the public functions of trl_packfix.

    python examples/own_loop.py                                      # SmolLM2-135M-Instruct, 120 conversations
    python examples/own_loop.py --tiny                               # a tiny random model, in seconds
    torchrun --nproc_per_node 2 examples/own_loop.py --tiny          # the same on two ranks

A loop needs three things of this package: `packed_dataloader` gives each rank its packs, with their boundaries;
`prepare_for_packing` sets attention that reads them, and proves on this model that documents do not reach each other;
`plan_packs` says how full packs can be. The loss is yours: the sum over the trained tokens of an optimizer step, of all
micro-batches on all ranks, divided by their number. A mean per micro-batch would weigh tokens by their company.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset
from demo import random_miniature
from offline import orders, smollm2
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from trl_packfix import packed_dataloader, plan_packs, prepare_for_packing

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
IGNORED = -100  # the label of a token that is not trained


def say(text: str) -> None:
    if RANK == 0:
        print(text, flush=True)


def tokenise(rows: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """`input_ids` and `labels`: the completion is trained, the prompt is not."""

    def one(row: dict[str, Any]) -> dict[str, list[int]]:
        chat = {"conversation": row["prompt"], "add_generation_prompt": True}
        prompt = tokenizer.apply_chat_template(**chat, return_dict=True)["input_ids"]
        whole = tokenizer.apply_chat_template(row["prompt"] + row["completion"], return_dict=True)["input_ids"]
        assert whole[: len(prompt)] == prompt, "the template renders the prompt differently without its answer"
        return {"input_ids": whole, "labels": [IGNORED] * len(prompt) + whole[len(prompt) :]}

    return rows.map(one, remove_columns=rows.column_names)


def report(table: Dataset, args: argparse.Namespace, num_batches: int) -> None:
    lengths = np.array([len(ids) for ids in table["input_ids"]])
    kept, capacity = np.minimum(lengths, args.max_length), args.batch_size * args.max_length
    packs = num_batches * WORLD_SIZE
    trained = sum(label != IGNORED for labels in table["labels"] for label in labels[1 : args.max_length])
    say(
        f"{len(table):,} documents -> {packs:,} micro-batches of {capacity:,} tokens; no plan needs fewer than "
        f"{plan_packs(kept, capacity).lower_bound:,}\n"
        f"{kept.sum():,} tokens, {trained:,} of them trained; {(lengths > args.max_length).sum():,} documents are cut\n"
        f"{kept.sum() / (packs * capacity):.1%} of their places are filled"
    )


def steps(loader: Any, accumulation: int) -> Iterator[list[dict[str, Any]]]:
    """The micro-batches of each optimizer step; the loader has a multiple of them."""
    batches = iter(loader)
    while micro_batches := list(islice(batches, accumulation)):
        yield micro_batches


def train(model: PreTrainedModel, table: Dataset, args: argparse.Namespace) -> PreTrainedModel:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) if WORLD_SIZE > 1 else 0) if args.cuda else model.device
    model = model.to(device).train()
    precision = torch.bfloat16 if args.cuda else None  # of autocast; flash attention needs it
    choice = prepare_for_packing(model, dtype=precision, max_length=args.max_length)  # raises if documents leak
    say(f"proved on this model: documents of a pack do not reach each other ({choice.name}: {choice.reason})")
    loader = packed_dataloader(
        table,
        args.max_length,
        args.batch_size,
        gradient_accumulation_steps=args.accumulation,
        rank=RANK,
        world_size=WORLD_SIZE,
        seed=args.seed,
        synchronisation="step",  # DDP: ranks wait for each other at the end of a step
        cost_model=model.config,
    )
    report(table, args, len(loader))
    wrapped = DistributedDataParallel(model) if WORLD_SIZE > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    num_steps = args.epochs * len(loader) // args.accumulation
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / num_steps)

    for epoch in range(args.epochs):
        loader.set_epoch(epoch)  # each epoch has a plan of its own
        for step, micro_batches in enumerate(steps(loader, args.accumulation), start=1):
            num_trained = sum((batch["labels"][:, 1:] != IGNORED).sum() for batch in micro_batches).to(device)
            loss_of_step = torch.zeros((), device=device)
            if WORLD_SIZE > 1:
                dist.all_reduce(num_trained)
            for i, batch in enumerate(micro_batches, start=1):
                batch = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
                labels = batch.pop("labels")
                with nullcontext() if i == len(micro_batches) or WORLD_SIZE == 1 else wrapped.no_sync():
                    with torch.autocast(device.type, precision, enabled=args.cuda):
                        logits = wrapped(**batch).logits[0, :-1]
                    # the first label of each document is -100 already, so no document predicts the next one
                    loss = cross_entropy(logits.float(), labels[0, 1:], reduction="sum") / num_trained
                    (loss * WORLD_SIZE).backward()  # DDP averages gradients over ranks, and a sum is wanted
                loss_of_step += loss.detach()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if WORLD_SIZE > 1:
                dist.all_reduce(loss_of_step)
            say(f"epoch {epoch}, step {step}: {num_trained:,} tokens, loss {loss_of_step:.4f}, gradient {norm:.4f}")
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny random model and 24 conversations")
    parser.add_argument("--output_dir", default="own_loop_output", help="where the model is saved")
    for name, default in {"max_length": 256, "batch_size": 2, "accumulation": 2, "epochs": 2, "seed": 42}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--learning_rate", type=float, default=1e-4, help="default: 1e-4")
    args = parser.parse_args(namespace=argparse.Namespace(cuda=torch.cuda.is_available()))
    if WORLD_SIZE > 1:
        dist.init_process_group("nccl" if args.cuda else "gloo")
    if RANK > 0:
        dist.barrier()  # rank 0 makes the files of the model first
    name = random_miniature(f"{args.output_dir}/miniature") if args.tiny else smollm2()
    if RANK == 0 and WORLD_SIZE > 1:
        dist.barrier()
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    model = train(model, tokenise(orders(24 if args.tiny else 120), tokenizer), args)
    if RANK == 0:
        model.save_pretrained(args.output_dir)
        tokenizer.save_pretrained(args.output_dir)
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
