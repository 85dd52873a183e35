"""Documents -> one packed batch. Only here the first label of a document becomes -100.

A pack is one row of T tokens that holds N documents one after the other. Only this module computes encodings of their
boundaries, from the lengths of the documents, so all encodings agree.

    lengths       [3, 2]             one entry per document                  (N,)
    position_ids  [0, 1, 2, 0, 1]    restart at each document                (T,)
    cu_seq_lens   [0, 3, 5]          where each document starts, and the end (N + 1,)
    seq_idx       [0, 0, 0, 1, 1]    which document a token belongs to       (T,)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..layout import IGNORE_INDEX as IGNORE_INDEX
from ..layout import TEXT_KEYS as TEXT_KEYS

MASK_COLUMNS = ("completion_mask", "assistant_masks")  # 1 marks a trained token; used if there are no labels


def cu_seq_lens(lengths: Sequence[int]) -> npt.NDArray[np.int32]:
    """int32, as varlen kernels need it."""
    return np.cumsum([0, *lengths], dtype=np.int32)


def position_ids(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    bounds = cu_seq_lens(lengths).astype(np.int64)
    # [0, 1, 2, 3, 4] minus the start of each token's document, [0, 0, 0, 3, 3]
    return np.arange(bounds[-1]) - np.repeat(bounds[:-1], np.diff(bounds))


def seq_idx(lengths: Sequence[int]) -> npt.NDArray[np.int32]:
    """int32, as linear attention kernels need it."""
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)


class DocumentRun(NamedTuple):
    """Rows of a pack: the tokens of `document` from the token `first` on."""

    document: int
    first: int = 0
    images_before: int = 0  # of the document's `num_images`; both are 0 in a run of a whole document
    num_images: int = 0


@dataclass
class PackedDataCollator:
    """Flatten documents to one row of T tokens with document boundaries and without an attention mask.

    A call takes N documents. Each is a dictionary with `input_ids` and, optionally, `labels`: lists, arrays or tensors
    of one length. Missing labels are the tokens themselves. The call returns

    - `input_ids`, `labels`, `position_ids`: int64, shape (1, T). The first label of every document is -100: the token
      before it belongs to another document.
    - `cu_seq_lens_q`, `cu_seq_lens_k`: int32, shape (N + 1,); `max_length_q`, `max_length_k`: int, tokens.
    - `seq_idx`: int32, shape (1, T).
    - `use_cache=False`: with a cache object transformers ignores the boundaries.

    Args:
        pad_to_multiple_of (`int`, *optional*):
            Pad T to a multiple of this number of tokens. The padding is *one* further document without trained tokens,
            never many of length 1.
        pad_token_id (`int`, defaults to 0): Token that fills the padding.
        pad_documents_to_multiple_of (`int`, *optional*):
            Pad N to a multiple of this number of documents. The padding is documents without tokens at the end: the
            last entries of `cu_seq_lens` are T.
        max_length (`int`, *optional*):
            With this, `max_length_q` and `max_length_k` are at least this number of tokens in every pack, and padding
            is divided into documents of at most so many. With all three, packs of other documents have the same shapes.

    Raises:
        ValueError: a document is empty, or its labels are not as long as its tokens; the documents have `seq_lengths`,
            padding under an `attention_mask`, or a mask of trained tokens in place of labels.

    >>> batch = PackedDataCollator()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    >>> batch["labels"].tolist(), batch["position_ids"].tolist(), batch["cu_seq_lens_q"].tolist()
    ([[-100, 6, 7, -100, 9]], [[0, 1, 2, 0, 1]], [0, 3, 5])
    """

    pad_to_multiple_of: int | None = None
    pad_token_id: int = 0
    pad_documents_to_multiple_of: int | None = None
    max_length: int | None = None
    shares = False  # beginnings that documents have in common, see `PrefixCollator`

    def __call__(self, documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return self.collate(documents)[0]

    def collate(self, documents: Sequence[dict[str, Any]], degree: int = 1) -> tuple[dict[str, Any], list[DocumentRun]]:
        """The batch, and its runs: here the documents. T is a multiple of `degree`, too.

        With `max_length` each of `degree` parts has a multiple of `pad_to_multiple_of` tokens.
        """
        tokens, labels = self._read(documents)
        lengths = [len(ids) for ids in tokens]
        num_tokens = sum(lengths)
        padding = self._padding(num_tokens, degree)
        longest = max(lengths)
        if padding:
            longest_padding = padding if self.max_length is None else max(longest, self.max_length)
            whole, rest = divmod(padding, longest_padding)
            lengths += [longest_padding] * whole + [rest] * (rest > 0)
            longest = max(lengths)

        input_ids = np.full(num_tokens + padding, self.pad_token_id, dtype=np.int64)
        targets = np.full(num_tokens + padding, IGNORE_INDEX, dtype=np.int64)
        np.concatenate(tokens, out=input_ids[:num_tokens], casting="same_kind")
        if all(map(is_, labels, tokens)):  # the reader returns the tokens as labels if every token is trained
            targets[:num_tokens] = input_ids[:num_tokens]
        else:
            np.concatenate(labels, out=targets[:num_tokens], casting="same_kind")
        bounds = cu_seq_lens(lengths)
        targets[bounds[:-1]] = IGNORE_INDEX
        if self.pad_documents_to_multiple_of:
            bounds = np.pad(bounds, (0, -len(lengths) % self.pad_documents_to_multiple_of), mode="edge")

        boundaries = torch.from_numpy(bounds)
        max_length = max(longest, min(self.max_length or 0, num_tokens + padding))
        batch = {
            "input_ids": torch.from_numpy(input_ids)[None],
            "labels": torch.from_numpy(targets)[None],
            "position_ids": torch.from_numpy(position_ids(lengths))[None],
            "cu_seq_lens_q": boundaries,
            "cu_seq_lens_k": boundaries,
            "max_length_q": max_length,
            "max_length_k": max_length,
            "seq_idx": torch.from_numpy(seq_idx(lengths))[None],
            "use_cache": False,
        }
        return batch, [DocumentRun(i) for i in range(len(documents))]

    def _padding(self, num_tokens: int, degree: int) -> int:
        multiple = self.pad_to_multiple_of or 1
        return -num_tokens % (math.lcm(multiple, degree) if self.max_length is None else multiple * degree)

    @staticmethod
    def _read(documents: Sequence[dict[str, Any]]) -> tuple[list[npt.NDArray[Any]], list[npt.NDArray[Any]]]:
        """Tokens and labels of each document; the same array twice if every token is its own label."""
        if not documents[0].keys() <= TEXT_KEYS:  # only the first is checked: this runs in every batch
            _check_columns(documents)
        tokens = [np.asarray(document["input_ids"]) for document in documents]
        labels = [
            np.asarray(document["labels"]) if "labels" in document else ids
            for document, ids in zip(documents, tokens, strict=True)
        ]
        for index, (ids, target) in enumerate(zip(tokens, labels, strict=True)):
            if len(ids) == 0 or len(target) != len(ids):
                raise ValueError(
                    f"Document {index} of the batch has {len(ids)} tokens and {len(target)} labels. A packed document "
                    "needs at least one token and exactly one label per token. Remove empty documents and give "
                    "`labels` the length of `input_ids`."
                )
        return tokens, labels


def _check_columns(documents: Sequence[dict[str, Any]]) -> None:
    columns = documents[0].keys()
    ignored = [name for name in MASK_COLUMNS if name in columns and "labels" not in columns]
    if ignored:
        raise ValueError(
            f"Documents of the batch have `{ignored[0]}` and no `labels`. The collator reads no mask, so all "
            f"{len(documents[0]['input_ids'])} tokens of the first would be trained. Give `labels` with -100 where a "
            "token is not trained, or read the dataset with `packed_dataloader`, which computes labels from the mask."
        )
    if "seq_lengths" in columns:
        raise ValueError(
            f"Documents of the batch have `seq_lengths` ({list(documents[0]['seq_lengths'])[:5]} in the first), so "
            "they are packs already. The collator treats each as one document, so the documents inside would see each "
            "other. Give it the documents one by one, or read the dataset with `packed_dataloader`, which keeps the "
            "boundaries."
        )
    for index, document in enumerate(documents):
        if not np.asarray(document.get("attention_mask", True)).all():
            raise ValueError(
                f"Document {index} of the batch is padded: its `attention_mask` has zeros among "
                f"{len(document['input_ids'])} entries. Padding inside a document would be trained and attended to. "
                "Tokenise with `padding=False`, or cut the padding off."
            )
