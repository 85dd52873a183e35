"""Packs and their proof as a library of its own: torch, transformers and numpy, in a loop of yours.

    pip install torch transformers numpy
    pip install --no-deps trl_packfix    # TRL, peft, datasets and accelerate need not be installed
    python examples/proof_alone.py       # a tiny random model, in seconds

`check_isolation` says whether documents in a pack change each other on a model as it is. `prepare_for_packing` makes
the model read boundaries, and proves it. `plan_packs` plans packs from lengths, `PackedDataCollator` makes the batches,
and `check_step` says which law a training step breaks.
"""

from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from trl_packfix import PackedDataCollator, check_isolation, check_step, plan_packs, prepare_for_packing

MAX_LENGTH = 64  # tokens of a pack
IGNORED = -100  # the label of a token that is not trained
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=300))
report = check_isolation(model, max_length=MAX_LENGTH)
print(f"as it was built, packs are {'right' if report.passed else 'wrong'}: {report.summary()}")
choice = prepare_for_packing(model, max_length=MAX_LENGTH)  # raises an error if documents reach each other
print(f"prepared: {choice.name}, {choice.reason}")

tokens = np.random.default_rng(0)
lengths = tokens.integers(4, 40, size=12)
documents = [{"input_ids": tokens.integers(3, 300, size=length).tolist()} for length in lengths]
for document in documents:
    document["labels"] = [IGNORED, *document["input_ids"][1:]]
plan = plan_packs(lengths, MAX_LENGTH, strategy="bfd")
print(f"{len(documents)} documents in {plan.num_packs} packs, {plan.efficiency:.0%} of them filled")

collate = PackedDataCollator()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def summed_loss(batch: dict[str, Any]) -> torch.Tensor:
    batch = dict(batch)
    labels = batch.pop("labels")
    # the first label of each document is -100, so no document predicts the next one
    return cross_entropy(model(**batch).logits[0, :-1], labels[0, 1:], reduction="sum")


def step(micro_batches: list[dict[str, Any]]) -> float:
    """Leave the gradients of one optimizer step, whose loss is a mean over its trained tokens."""
    num_trained = sum((batch["labels"][:, 1:] != IGNORED).sum() for batch in micro_batches)
    total = 0.0
    for batch in micro_batches:
        loss = summed_loss(batch) / num_trained
        loss.backward()
        total += loss.item()
    return total


model.train()
losses = []
for first in range(0, plan.num_packs - 1, 2):  # two packs in each step
    packs = [plan.order[plan.offsets[i] : plan.offsets[i + 1]] for i in (first, first + 1)]
    losses.append(step([collate([documents[i] for i in pack]) for pack in packs]))
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {len(losses)}: loss {losses[-1]:.4f}")

laws = check_step(step, collate, documents[:6], model, reference=lambda document: summed_loss(collate([document])))
print(laws)
assert laws.holds
