"""Collate documents of a pack so that a beginning that several documents share is computed once.

`PrefixCollator` takes the documents of one pack from `DocumentDataset` (`data/loaders.py`), as `PackedDataCollator`
(`data/collator.py`) does, and makes the batch for the model. `attention/runs.py` computes attention on such batches.

Words:
    row     the place of one token in the pack, and the token there, which passes through the model (not a row of the
            dataset). A shared row belongs to several documents.
    run     the rows at the end of a document that no document before it in the pack has. In the attention a run is one
            sequence: its queries are the rows of the run, its keys are all rows of the document.
    target  a trained token. The row before it predicts it.

A row has one next token. The last common token has two, so it is not shared, unless the documents are equal. Here the
two documents have A B C in common, and share A B.

    documents      A B C D, A B C E F
    input_ids      A B C D | C E F           the runs, one after the other
    position_ids   0 1 2 3 | 2 3 4           positions in the document
    cu_seq_lens_q  0 4 7                     boundaries of the runs
    cu_seq_lens_k  0 4 9                     boundaries of the documents, without sharing
    kv_index       0 1 2 3 | 0 1 4 5 6       rows that are the keys of each run
    labels         . B C D | . E F           . is -100
    num_documents  2 2 1 1 | 1 1 1           number of documents that each row belongs to

Documents without a trained token are not counted in `num_documents`, by which the load-balancing loss of experts
weighs the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...data.collator import IGNORE_INDEX, DocumentRun, PackedDataCollator, cu_seq_lens, seq_idx
from ...group import ALONE
from ...layout import LAYOUT_KEY, Compare, ComparedContent, SharedRowsLayout
from ...planning.arrays import index_in_group
from .families import MIN_SHARED, share_order


@dataclass
class PrefixCollator(PackedDataCollator):
    """Data collator that makes one pack of documents, shape (1, T), in which each common beginning is there once.

    If no two documents share `min_shared` rows, the batch is equal to the batch of `PackedDataCollator`. Otherwise the
    documents are sorted by their tokens, T is the number of rows, and the batch differs in these entries:

    - `cu_seq_lens_q`, `max_length_q` and `seq_idx` describe the runs. `cu_seq_lens_k` and `max_length_k` describe the
      documents to which the runs belong. A document without a row of its own has no run, and no entry here.
    - `layout`, a `SharedRowsLayout`, says which rows and which targets each document has (`kv_index`, `num_documents`).

    A document with a label that is neither its token nor -100 shares nothing, because a shared row has one next token.

    Args, in addition to the arguments of `PackedDataCollator`:
        min_shared: smallest number of rows that two documents share.
        keeps_last_rows: give a row to a document whose only unshared token is its last token. No document is trained on
            the output of this row, but a router of experts counts its token in the load-balancing loss.
        shares: whether documents share rows. If False, the batch is equal to the batch of `PackedDataCollator`.
        compare: returns for each document its `ComparedContent`: one number for each token, and the tokens of images.
            It is needed for documents with images, because the placeholders of all images are equal tokens. None
            compares the tokens.

    >>> batch = PrefixCollator(min_shared=1)([{"input_ids": [5, 6, 7, 8]}, {"input_ids": [5, 6, 7, 4, 3]}])
    >>> batch["input_ids"].tolist(), batch["position_ids"].tolist()
    ([[5, 6, 7, 4, 3, 7, 8]], [[0, 1, 2, 3, 4, 2, 3]])
    >>> batch["layout"].kv_index.tolist()
    [0, 1, 2, 3, 4, 0, 1, 5, 6]
    """

    min_shared: int = MIN_SHARED
    keeps_last_rows: bool = False
    shares: bool = True
    compare: Compare | None = None

    def collate(self, documents: Sequence[dict[str, Any]], degree: int = 1) -> tuple[dict[str, Any], list[DocumentRun]]:
        """Make the batch of a pack, and return it with its runs; see `collate_with_rows`."""
        return self.collate_with_rows(documents, degree)[:2]

    def order_documents(
        self, documents: Sequence[dict[str, Any]]
    ) -> tuple[list[int], list[int], list[ComparedContent]]:
        """Sort the documents by their tokens, and find the number of rows that each document shares.

        Documents that share nothing because of their labels come last. If two documents begin to differ inside an
        image, they share only the rows before this image.

        Returns:
            The document indices in sorted order; the number of rows that each of them shares with the document before
            it in this order; and the compared content of each document, in the order of `documents`.
        """
        # If all tokens are trained, `labels` has the array of the tokens itself, and `may_share` need not look at it
        tokens, labels = self._read(documents)
        compared = [ComparedContent(ids) for ids in tokens] if self.compare is None else self.compare(documents)
        may_share = [
            i
            for i, (ids, targets) in enumerate(zip(tokens, labels, strict=True))
            if targets is ids or bool(((targets == IGNORE_INDEX) | (targets == ids)).all())
        ]
        places, shared = share_order([compared[i].tokens for i in may_share], self.min_shared)
        order = [may_share[place] for place in places]
        for place, i in enumerate(order):
            for first, stop in compared[i].images:  # first token of the image, and the token after its last
                if first < shared[place] < stop:  # the shared rows end inside this image, so only rows before it remain
                    shared[place] = first if first >= self.min_shared else 0
        not_sharing = sorted(set(range(len(tokens))) - set(may_share))
        return order + not_sharing, shared + [0] * len(not_sharing), compared

    def collate_with_rows(
        self, documents: Sequence[dict[str, Any]], degree: int = 1
    ) -> tuple[dict[str, Any], list[DocumentRun], list[npt.NDArray[Any]]]:
        """Make the batch of a pack, as `collate` does, and return its runs and the rows of each document.

        Args:
            documents: the N documents of the pack.
            degree: number of ranks that share the pack.

        Returns:
            The batch; the runs in the order of their rows; and for each document the rows of its tokens, shape (n,). A
            document may lack the row of its last token if `keeps_last_rows` is False.
        """
        tokens, labels = self._read(documents)
        order, shared, compared = self.order_documents(documents) if self.shares else ([], [], [])
        if not any(shared):  # the batch of `PackedDataCollator`
            return super().collate_with_rows(documents, degree)
        runs = []
        rows = np.zeros(0, dtype=np.int64)  # the rows of the document before this one
        rows_of_documents = [rows] * len(order)
        num_rows = 0  # rows of all runs so far
        for i, num_shared in zip(order, shared, strict=True):
            # The token of the document with which its run begins. A document that equals the one before it shares all n
            # tokens. If the one before it has only n - 1 rows, without its last token, only these are shared.
            first = min(num_shared, len(rows))
            run_length = len(tokens[i]) - first
            if run_length == 1 and first and not self.keeps_last_rows:
                run_length = 0
            rows = np.concatenate([rows[:first], np.arange(num_rows, num_rows + run_length)])
            rows_of_documents[i] = rows
            num_rows += run_length
            if run_length:
                images = compared[i].images
                images_before = sum(first_token < first for first_token, _ in images)
                runs.append(DocumentRun(document=i, first=first, images_before=images_before, num_images=len(images)))
        batch = self._make_batch(tokens, labels, order, runs=runs, rows_of_documents=rows_of_documents, degree=degree)
        return batch, runs, rows_of_documents

    def _make_batch(
        self,
        tokens: list[npt.NDArray[Any]],
        labels: list[npt.NDArray[Any]],
        order: list[int],
        *,
        runs: list[DocumentRun],
        rows_of_documents: list[npt.NDArray[Any]],
        degree: int,
    ) -> dict[str, Any]:
        """Make the batch of documents that share rows.

        Args:
            tokens, labels: tokens and labels of each document.
            order: the document indices in sorted order.
            runs: the runs in the order of their rows.
            rows_of_documents: the rows of each document.
            degree: number of ranks that share the pack.
        """
        # 1. The rows of the pack. Padding is one more run, of a document that has only these rows.
        run_tokens = [tokens[run.document][run.first :] for run in runs]
        first_positions = [run.first for run in runs]
        keys = [rows_of_documents[run.document] for run in runs]
        num_rows = sum(map(len, run_tokens))
        # Padding makes the number of rows a multiple of `degree` and of `pad_to_multiple_of`
        padding = self._num_padding(num_rows, degree)
        if padding:
            run_tokens.append(np.full(padding, self.pad_token_id, dtype=np.int64))
            first_positions.append(0)
            keys.append(np.arange(num_rows, num_rows + padding))
        q_lengths = list(map(len, run_tokens))
        k_lengths = list(map(len, keys))

        # 2. The targets. The label of a target is in the row after the row that predicts it. This row may belong to
        # another document: in the example above, the shared row of B predicts C for both documents, and the label C is
        # in the row of the first document's C.
        row_labels = np.full(num_rows + padding, IGNORE_INDEX, dtype=np.int64)
        num_documents = np.zeros(num_rows + padding, dtype=np.int64)
        target_rows: list[npt.NDArray[Any]] = []
        for i in order:
            rows = rows_of_documents[i]
            next_labels = labels[i][1:]
            is_trained = next_labels != IGNORE_INDEX
            num_documents[rows] += is_trained.any()  # the rows of a document are different ones
            rows_before = rows[: len(is_trained)]  # row i predicts token i + 1
            target_rows.append(rows_before[is_trained] + 1)
            row_labels[target_rows[-1]] = next_labels[is_trained]
        target_documents = np.repeat(order, list(map(len, target_rows)))

        # 3. The sizes of documents and runs
        lengths = np.array(list(map(len, tokens)))
        run_length_of_document = np.zeros(len(tokens), dtype=np.int64)
        run_length_of_document[[run.document for run in runs]] = q_lengths[: len(runs)]

        def to_row(values: npt.NDArray[Any]) -> Tensor:
            """Return values of rows as a tensor of shape (1, T)."""
            return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))[None]

        return {
            "input_ids": to_row(np.concatenate(run_tokens)),
            "labels": to_row(row_labels),
            "position_ids": to_row(index_in_group(np.array(q_lengths)) + np.repeat(first_positions, q_lengths)),
            "cu_seq_lens_q": torch.from_numpy(cu_seq_lens(q_lengths)),
            "cu_seq_lens_k": torch.from_numpy(cu_seq_lens(k_lengths)),
            "max_length_q": max(q_lengths),
            "max_length_k": max(k_lengths),
            "seq_idx": torch.from_numpy(seq_idx(q_lengths))[None],
            "use_cache": False,
            LAYOUT_KEY: SharedRowsLayout(
                kv_index=torch.from_numpy(np.concatenate(keys)),
                target_rows=torch.from_numpy(np.concatenate(target_rows)),
                target_documents=torch.from_numpy(target_documents.astype(np.int64)),
                num_documents=torch.from_numpy(num_documents),
                lengths=torch.from_numpy(lengths),
                # Per document: its tokens that are not in its run. A last token without a row counts, too
                shared=torch.from_numpy(lengths - run_length_of_document),
                trained=torch.from_numpy(np.bincount(target_documents, minlength=len(tokens))),
                # On the host, so that attention need not wait for the device to know the lengths
                run_lengths=torch.tensor(list(zip(q_lengths, k_lengths, strict=True))),
                group=ALONE,  # the batch is a whole pack, not the part of one rank
            ),
        }
