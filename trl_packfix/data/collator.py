"""Collate the documents of a pack to one batch for the model.

A pack is one sequence of T tokens that holds N documents one after the other. `DocumentDataset` (`loaders.py`), or the
user's own data loader, gives the documents: `input_ids` and `labels` for each. `PackedDataCollator` joins them and adds
the boundaries of the documents, which attention and recurrent layers read. Models, the loss and reports use the
boundaries through `layout.py`.

Every encoding of the boundaries is computed here from the lengths of the documents, so all encodings agree:

    lengths       [3, 2]             number of tokens of each document       (N,)
    position_ids  [0, 1, 2, 0, 1]    position of a token in its document     (T,)
    cu_seq_lens   [0, 3, 5]          first token of each document, then T    (N + 1,)
    seq_idx       [0, 0, 0, 1, 1]    which document a token belongs to       (T,)

The first label of each document becomes -100 here, and in no other module: the token before it belongs to another
document and must not be trained to predict it.

Each of the T places of a pack is a *row*. With shared prefixes (`features/prefixes`) documents with a common beginning
share its rows. `PrefixCollator` there is a subclass of `PackedDataCollator`; here each document has rows of its own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..planning.arrays import IGNORE_INDEX as IGNORE_INDEX  # other modules import it from here
from ..planning.arrays import MASK_COLUMNS, index_in_group, restarts
from ..planning.arrays import TEXT_KEYS as TEXT_KEYS


def cu_seq_lens(lengths: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return the first token of each document, followed by T, shape (N + 1,): int32, as varlen kernels need it."""
    return np.cumsum([0, *lengths], dtype=np.int32)


def seq_idx(lengths: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return the index of each token's document, shape (T,): int32, as linear attention kernels need it."""
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)


class DocumentRun(NamedTuple):
    """A sequence of rows of a pack: the tokens of a document from the token `first` to its end.

    If documents share rows, the rows of the tokens before `first` belong to documents before this one in the pack.
    Otherwise `first` is 0.
    """

    document: int  # index of the document in the batch
    first: int = 0
    # The images that begin in this run have the indices from `images_before` to `num_images` - 1. They are counted only
    # if documents share rows. Otherwise a run has all images of its document, and both numbers are 0
    images_before: int = 0  # number of images of the document that begin before the token `first`
    num_images: int = 0  # number of all images of the document


@dataclass
class PackedDataCollator:
    """
    Data collator that flattens documents to one sequence of T tokens, with the boundaries of the documents and without
    an attention mask.

    The collator takes a list of N documents. Each document is a dictionary with the key `"input_ids"` and, optionally,
    the key `"labels"`: two lists, arrays or tensors of equal length. If the labels are missing, every token is its own
    label. The collator returns a dictionary with the following keys:

    - `"input_ids"`: int64 tensor of shape (1, T), the tokens of all documents.
    - `"labels"`: int64 tensor of shape (1, T). The first label of each document is -100, because the token before it
      belongs to another document.
    - `"position_ids"`: int64 tensor of shape (1, T). Positions restart at 0 in each document.
    - `"cu_seq_lens_q"` and `"cu_seq_lens_k"`: int32 tensors of shape (N + 1,), the first token of each document
      followed by T.
    - `"max_length_q"` and `"max_length_k"`: the number of tokens of the longest document.
    - `"seq_idx"`: int32 tensor of shape (1, T), the index of each token's document.
    - `"use_cache"`: `False`, because transformers ignores the boundaries if the model has a cache.

    Args:
        pad_to_multiple_of (`int`, *optional*):
            If set, T is padded to a multiple of this number of tokens. The padding is one further document without
            trained tokens.
        pad_token_id (`int`, *optional*, defaults to `0`):
            Token ID of the padding.
        pad_documents_to_multiple_of (`int`, *optional*):
            If set, N is padded to a multiple of this number of documents. The padding is documents without tokens at
            the end, so the last entries of `cu_seq_lens_q` and `cu_seq_lens_k` are all T.
        max_length (`int`, *optional*):
            If set, `max_length_q` and `max_length_k` are at least this number of tokens, or T if T is smaller. Padding
            is divided into documents that are at most as long as this number, or as the longest document. Together with
            `pad_to_multiple_of` and `pad_documents_to_multiple_of`, packs of different documents have the same shapes.

    Raises:
        ValueError: If a document is empty or its labels are not as long as its tokens, if documents have
            `"seq_lengths"` or padding under an `"attention_mask"`, or if they have a mask of trained tokens but no
            labels.

    Examples:
    ```python
    >>> from trl_packfix import PackedDataCollator

    >>> collator = PackedDataCollator()
    >>> batch = collator([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    >>> batch["input_ids"]
    tensor([[5, 6, 7, 8, 9]])
    >>> batch["labels"]
    tensor([[-100,    6,    7, -100,    9]])
    >>> batch["position_ids"]
    tensor([[0, 1, 2, 0, 1]])
    >>> batch["cu_seq_lens_q"]
    tensor([0, 3, 5], dtype=torch.int32)

    ```
    """

    pad_to_multiple_of: int | None = None
    pad_token_id: int = 0
    pad_documents_to_multiple_of: int | None = None
    max_length: int | None = None
    shares = False  # whether documents share rows, which only a `PrefixCollator` can do

    def __call__(self, documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
        batch, _ = self.collate(documents)
        return batch

    def collate(self, documents: Sequence[dict[str, Any]], degree: int = 1) -> tuple[dict[str, Any], list[DocumentRun]]:
        """Make the batch of a pack for the ranks that share it.

        Args:
            documents: the N documents of the pack.
            degree: number of ranks that share the pack. T is padded to a multiple of it.

        Returns:
            The batch, and a run for each document. Here it has the rows of all its tokens.
        """
        import torch  # here, because `trl-packfix show` needs only `arrays`, and torch takes seconds

        arrays = self.arrays(documents, degree)
        max_length = arrays.pop("max_length")
        batch: dict[str, Any] = {name: torch.from_numpy(array)[None] for name, array in arrays.items()}
        boundaries = batch.pop("cu_seq_lens")[0]
        sizes = {"max_length_q": max_length, "max_length_k": max_length, "use_cache": False}
        batch |= {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries} | sizes
        return batch, [DocumentRun(i) for i in range(len(documents))]

    def arrays(self, documents: Sequence[dict[str, Any]], degree: int = 1) -> dict[str, Any]:
        """Compute the batch without torch, as arrays of the shape (T,).

        The boundaries `cu_seq_lens` have the shape (N + 1,), and `max_length` is a number.
        """
        tokens, labels = self._read(documents)
        lengths = [len(ids) for ids in tokens]
        num_tokens = sum(lengths)
        padding = self._num_padding(num_tokens, degree)
        longest = max(lengths)
        if padding:
            # Padding is one more document, or several documents that are at most as long as a document may be
            longest_padding = padding if self.max_length is None else max(longest, self.max_length)
            lengths += [min(longest_padding, padding - first) for first in range(0, padding, longest_padding)]
            longest = max(lengths)

        input_ids = np.full(num_tokens + padding, self.pad_token_id, dtype=np.int64)
        packed_labels = np.full(num_tokens + padding, IGNORE_INDEX, dtype=np.int64)
        np.concatenate(tokens, out=input_ids[:num_tokens], casting="same_kind")
        if all(map(is_, labels, tokens)):
            # Every token is its own label, and the converted tokens are copied faster
            packed_labels[:num_tokens] = input_ids[:num_tokens]
        else:
            np.concatenate(labels, out=packed_labels[:num_tokens], casting="same_kind")
        bounds = cu_seq_lens(lengths)
        packed_labels[bounds[:-1]] = IGNORE_INDEX
        if self.pad_documents_to_multiple_of:
            bounds = np.pad(bounds, (0, -len(lengths) % self.pad_documents_to_multiple_of), mode="edge")

        return {
            "input_ids": input_ids,
            "labels": packed_labels,
            "position_ids": index_in_group(np.array(lengths)),
            "cu_seq_lens": bounds,
            # At least `self.max_length`, but no more than the pack has tokens
            "max_length": max(longest, min(self.max_length or 0, num_tokens + padding)),
            "seq_idx": seq_idx(lengths),
        }

    def collate_with_rows(
        self, documents: Sequence[dict[str, Any]], degree: int = 1
    ) -> tuple[dict[str, Any], list[DocumentRun], list[npt.NDArray[Any]]]:
        """Make the batch of a pack, as `collate` does, and also return the rows of each document.

        Returns:
            The batch; the runs; and for each document the rows of all its n tokens, shape (n,). If documents share
            rows, its run has only the rows behind the shared ones.
        """
        # Not `self.collate`, because `PrefixCollator.collate` calls this method
        batch, runs = PackedDataCollator.collate(self, documents, degree)
        bounds = np.cumsum([0, *(len(document["input_ids"]) for document in documents)])
        return batch, runs, [np.arange(first, stop) for first, stop in pairwise(bounds)]

    def _num_padding(self, num_tokens: int, degree: int) -> int:
        """Return the number of padding tokens of a pack that `degree` ranks share."""
        multiple = self.pad_to_multiple_of or 1
        # With `max_length` packs must have equal shapes, so each rank's part is a multiple of `pad_to_multiple_of`, too
        multiple_of_pack = math.lcm(multiple, degree) if self.max_length is None else multiple * degree
        return -num_tokens % multiple_of_pack

    @staticmethod
    def _read(documents: Sequence[dict[str, Any]]) -> tuple[list[npt.NDArray[Any]], list[npt.NDArray[Any]]]:
        """Return the tokens and the labels of each document as arrays.

        If a document has no labels, its labels are the array of its tokens.

        Raises:
            ValueError: a document cannot be packed, see `PackedDataCollator`.
        """
        # This runs in every batch, so only the keys of the first document are looked at. If it has only `TEXT_KEYS`,
        # "input_ids" and "labels", there is nothing to refuse
        if not documents[0].keys() <= TEXT_KEYS:
            _check_columns(documents)
        tokens = [np.asarray(document["input_ids"]) for document in documents]
        labels = [
            np.asarray(document["labels"]) if "labels" in document else ids
            for document, ids in zip(documents, tokens, strict=True)
        ]
        for index, (ids, document_labels) in enumerate(zip(tokens, labels, strict=True)):
            if len(ids) == 0 or len(document_labels) != len(ids):
                raise ValueError(
                    f"Document {index} of the batch has {len(ids)} tokens and {len(document_labels)} labels. A packed "
                    "document needs at least one token and exactly one label per token. Remove empty documents and "
                    "give `labels` the length of `input_ids`."
                )
        return tokens, labels


def _check_columns(documents: Sequence[dict[str, Any]]) -> None:
    """Refuse documents with columns that the collator would ignore although they change what is trained.

    Raises:
        ValueError: documents have a mask of trained tokens but no labels, are packs already, or are padded.
    """
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
        if restarts(document.get("position_ids", ())):
            raise ValueError(
                f"Document {index} of the batch has `position_ids` that begin again with 0, so it holds several "
                "documents. The collator treats it as one, so they would see each other. Give it the documents one by "
                "one, or read a dataset with `seq_lengths` by `packed_dataloader`."
            )
        if not np.asarray(document.get("attention_mask", True)).all():
            raise ValueError(
                f"Document {index} of the batch is padded: its `attention_mask` has zeros among "
                f"{len(document['input_ids'])} entries. Padding inside a document would be trained and attended to. "
                "Tokenise with `padding=False`, or cut the padding off."
            )
