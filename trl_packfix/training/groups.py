"""Check that ranks have read the same packs, where they must.

Ranks read the same packs in two cases: with sequence parallelism the ranks of a *group* hold parts of one pack (the
number of ranks is the *degree*), and with tensor parallelism neighbouring ranks divide the layers of the model.
Different packs may have equal shapes, so that training would go on without an error. `objective.py` compares
micro-batches: of a table (`datasets.Dataset`) those of the first optimizer steps, and of a stream (`IterableDataset`)
those of all steps. `first_step.py` compares the packs of its own step.
"""

from typing import Any

import torch
from accelerate.utils import gather

from ..layout import layout_of

COMPARED_KEYS = ("cu_seq_lens_q", "input_ids", "labels")  # the tensors of a batch that are compared


def check_same_packs(batches: list[dict[str, Any]], copies: int) -> None:
    """Raise ValueError if ranks that must have the same pack have different packs. All ranks must call it.

    Every rank compares the packs of all ranks, because ranks that read different documents may choose different
    degrees, and so do not agree on which ranks share a pack.

    Args:
        batches: the micro-batches of this rank.
        copies: the number of neighbouring ranks that divide the layers of the model.
    """
    summaries = torch.stack([_summarize_pack(batch) for batch in batches])
    summaries_of_ranks = gather(summaries[None])  # (ranks, micro-steps, 3)
    for packs in summaries_of_ranks.transpose(0, 1).tolist():  # the summaries of one micro-step, by rank
        degree = max(pack[0] for pack in packs)  # equal for all ranks, unless they have read different packs
        # How many neighbouring ranks must have the same pack. Ranks share packs (`degree` above 1) or divide the model
        # (`copies` above 1), and never do both
        size = max(degree, copies)
        for rank, pack in enumerate(packs):
            first_rank = rank - rank % size
            if pack == packs[first_rank]:
                continue
            part_text = ""
            reason = f"The {copies} ranks that divide the model sum their outputs as those of one pack"
            if degree > 1:
                part_text = "a part of "
                reason = f"The {degree} ranks of a group hold parts of one pack, so they would train on a mixture"
            raise ValueError(
                f"Rank {first_rank} has read {part_text}a pack of {packs[first_rank][1]} tokens, and rank {rank} "
                f"{part_text}another pack, of {pack[1]} tokens. {reason}. Give all ranks the same dataset, tokenizer "
                "and settings; in a stream, whatever is drawn at random needs a seed."
            )


def _summarize_pack(batch: dict[str, Any]) -> torch.Tensor:
    """Return (degree, number of tokens, checksum of the pack) on the device, (3,). Equal packs have equal summaries."""
    layout = layout_of(batch)
    tokens = batch["input_ids"]
    if not layout.group.is_alone:  # the batch is a part of a pack, and the layout describes the whole pack
        # The collator has computed `checksum` before it cut the pack into parts
        return torch.tensor([layout.group.size, layout.num_tokens, layout.checksum], device=tokens.device)
    checksum = tokens.new_zeros((), dtype=torch.int64)
    tensors = [batch[name] for name in COMPARED_KEYS if name in batch]
    tensors += layout.checksum_tensors()  # which tokens documents share, if they share any
    for tensor in tensors:
        values = tensor.flatten().long()
        odd_numbers = 2 * torch.arange(len(values), device=values.device) + 1
        # Each place has a factor of its own, so values in another order have another sum. An odd factor loses no bit of
        # a value. An overflow wraps around, in the same way on all ranks
        checksum = 31 * checksum + (values * odd_numbers * odd_numbers).sum()
    return torch.stack([checksum.new_ones(()), checksum.new_tensor(tokens.numel()), checksum])
