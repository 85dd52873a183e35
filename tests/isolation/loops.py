"""Small training loops, right and wrong: those of other projects by their threads, and ways of our own.

Each fault is a name; `make(fault)` returns model, step, collate and reference. Written from descriptions.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

IGNORE = -100
BOS = 1
EOS = 2


class Model(nn.Module):
    """Two layers of attention over a flat pack; `owner` (T,) says whose a token is, None: causal only."""

    def __init__(self, vocabulary: int = 64, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(512, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor, position: Tensor, owner: Any = None, causal: bool = True, **ignored: Any) -> Tensor:
        x = self.embed(ids) + self.position(position)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            mask = torch.ones(len(ids), len(ids), dtype=torch.bool)
            mask = torch.tril(mask) if causal else mask
            if owner is not None:
                mask = mask & (owner[:, None] == owner[None])
            q, k, v = qkv(x).chunk(3, -1)
            x = x + out(functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0])
        return self.head(x)


def documents() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    made_documents = []
    for length, prompt in ((19, 6), (7, 1), (30, 11), (12, 3), (5, 1)):
        ids = [BOS, *torch.randint(3, 64, (length - 2,), generator=generator).tolist(), EOS]
        made_documents.append({"input_ids": ids, "labels": [IGNORE] * prompt + ids[prompt:]})
    return made_documents


THREADS = {
    "verl#5797": "labels",  # the loss mask is rolled over the ends of documents
    "Megatron-LM#5682": "labels",  # the last token of a document predicts the first of the next
    "prime-rl#1957": "grouping",  # the mean over micro-batches of their means
    "NeMo-RL#3380": "scale",  # times the number of ranks
    "unsloth-zoo#1023": "grouping",  # divided by the accumulation once more
    "torchtitan#3130": "content",  # boundaries behind end tokens, as open-instruct#1855 with rows that were truncated
    "nanochat#400": "grouping",  # each micro-batch divided by its own tokens
    "maxtext#5198": "isolation",  # a keyword of another name, which the model ignores
    "AReno#75": "scale",  # the mean over all tokens, not over the trained ones
}
OURS = {
    "positions go on": "isolation",
    "one document without a mask": "scale",
    "mask over all documents if one is masked": "isolation",
    "boundaries before first tokens": "content",
    "equal documents once": "content",
    "mean of documents": "labels",
    "nan without a target": "masked",
    "no shift": "scale",
    "shifted twice": "scale",
}
# Found without a reference, too
WITHOUT_SHIFT = ("one document without a mask", "no shift", "shifted twice")


def collate(pack: list[dict[str, list[int]]], fault: str = "") -> dict[str, Tensor]:
    if fault == "equal documents once":
        pack = list({tuple(document["input_ids"]): document for document in pack}.values())
    ids = [torch.tensor(document["input_ids"]) for document in pack]
    lengths = torch.tensor(list(map(len, ids)))
    position = torch.cat([torch.arange(n) for n in lengths])
    return {
        "ids": torch.cat(ids),
        "labels": torch.cat([torch.tensor(document["labels"]) for document in pack]),
        "owner": torch.repeat_interleave(torch.arange(len(pack)), lengths),
        "position": torch.arange(len(position)) if fault == "positions go on" else position,
    }


def owners_of(batch: dict[str, Tensor], fault: str) -> Tensor:
    """Return whose each token is, as the loop believes."""
    owner = batch["owner"]
    ids = batch["ids"]
    if fault == "torchtitan#3130":
        return torch.cat([owner[:1] * 0, (ids[:-1] == EOS).long().cumsum(0)])
    if fault == "boundaries before first tokens":
        return (ids == BOS).long().cumsum(0)
    if fault == "mask over all documents if one is masked":
        is_trained = torch.zeros(int(owner.max()) + 1).index_add(0, owner, (batch["labels"] != IGNORE).float())
        return owner * 0 if (is_trained == 0).any() else owner
    return owner


def losses(model: Model, batch: dict[str, Tensor], fault: str) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, and which tokens are trained."""
    ids = batch["ids"]
    labels = batch["labels"]
    owner = batch["owner"]
    owners = owners_of(batch, fault)
    if fault == "maxtext#5198":
        logits = model(ids, batch["position"], segments=owners)
    elif fault == "one document without a mask" and int(owner.max()) == 0:
        logits = model(ids, batch["position"], causal=False)
    else:
        logits = model(ids, batch["position"], owners)
    ends = owner != torch.cat([owner[1:], torch.tensor([-1])])
    targets = torch.cat([labels[1:], torch.tensor([IGNORE])])
    if fault == "verl#5797":
        mask = torch.roll(labels != IGNORE, -1)
        mask[-1] = False
        targets = torch.roll(ids, -1).masked_fill(~mask, IGNORE)
    elif fault == "no shift":
        targets = labels
    elif fault == "shifted twice":
        targets = torch.cat([labels[2:], torch.tensor([IGNORE] * 2)])
        targets = targets.masked_fill(ends | torch.cat([ends[1:], torch.tensor([True])]), IGNORE)
    elif fault != "Megatron-LM#5682":
        targets = targets.masked_fill(ends, IGNORE)
    if fault == "targets of the inputs":
        targets = torch.roll(ids, -1).masked_fill(targets == IGNORE, IGNORE)
    loss = functional.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORE)
    if fault == "nan without a target":
        loss = -logits.log_softmax(-1).gather(1, targets.clamp(min=0)[:, None])[:, 0] * (targets != IGNORE)
    return loss, targets != IGNORE


def num_targets(batch: dict[str, Tensor]) -> Tensor:
    return ((batch["labels"][1:] != IGNORE) & (batch["owner"][1:] == batch["owner"][:-1])).sum()


def weights_of(fault: str, micro_batches: list[tuple[Tensor, Tensor]], i: int, owner: Tensor) -> Any:
    """Return the weight of each token of micro-batch `i` of a step, or one weight for all of them."""
    _, mask = micro_batches[i]
    num_batches = len(micro_batches)
    count = sum(each_mask.sum() for _, each_mask in micro_batches).clamp(min=1)
    if fault in ("prime-rl#1957", "nanochat#400"):
        return count / mask.sum().clamp(min=1) / num_batches
    if fault == "AReno#75":
        return count / sum(len(each_loss) for each_loss, _ in micro_batches)
    if fault == "mean of documents":
        per_document = torch.zeros(int(owner.max()) + 1).index_add(0, owner, mask.float()).clamp(min=1)
        return count / per_document[owner]
    factors: dict[str, Any] = {
        "unsloth-zoo#1023": 1 / num_batches,
        "NeMo-RL#3380": 2,
        "nan without a target": mask.sum() / mask.sum(),  # where the loss is computed by hand
    }
    return factors.get(fault, 1)


def make(fault: str = "") -> tuple[Model, Callable, Callable, Callable]:
    model = Model()

    def step(micro_batches: list[dict[str, Tensor]]) -> None:
        computed = [losses(model, batch, fault) for batch in micro_batches]
        count = sum(mask.sum() for _, mask in computed).clamp(min=1)
        for i, batch in enumerate(micro_batches):
            (computed[i][0] * weights_of(fault, computed, i, batch["owner"]) / count).sum().backward()

    def reference(document: dict[str, list[int]]) -> Tensor:
        ids = torch.tensor(document["input_ids"])
        labels = torch.tensor(document["labels"][1:])
        logits = model(ids, torch.arange(len(ids)))[:-1]
        return functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")

    return model, step, lambda pack: collate(pack, fault), reference
