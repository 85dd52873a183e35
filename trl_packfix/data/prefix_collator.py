"""Collate documents so that a beginning that several of them have is one stretch of rows: common prefixes.

A document is its *run*, the rows at its end that no document before it has, behind rows of documents before it. Each
run is one sequence for a varlen kernel: its queries are the rows of the run, its keys are all rows of the document.

    documents      A B C D, A B C E F
    input_ids      A B C D | C E F
    position_ids   0 1 2 3 | 2 3 4
    cu_seq_lens_q  0 4 7                     rows of each run
    cu_seq_lens_k  0 4 9                     tokens of each document
    kv_index       0 1 2 3 | 0 1 4 5 6       rows that are the keys of each run
    labels         . B C D | . E F
    num_documents  2 2 1 1 | 1 1 1           of each row, those with a trained token
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..layout import LAYOUT_KEY, ComparedContent, SharedRowsLayout
from ..planning.families import MIN_SHARED, share_order
from .collator import IGNORE_INDEX, DocumentRun, PackedDataCollator, cu_seq_lens, position_ids, seq_idx

Compare = Callable[[Sequence[dict[str, Any]]], list[ComparedContent]]


@dataclass
class PrefixCollator(PackedDataCollator):
    """Flatten documents as `PackedDataCollator`, with each common beginning as one stretch of rows.

    If no two documents share `min_shared` rows, the batch is that of `PackedDataCollator`. Otherwise documents are
    sorted by their tokens, T is the number of rows, and

    - `cu_seq_lens_q`, `max_length_q` and `seq_idx` are those of runs, `cu_seq_lens_k` and `max_length_k` those of the
      documents to which the runs belong, both without documents that have no row of their own.
    - "layout" holds the rest, `Runs`.

    A document with labels that are neither its tokens nor -100 shares nothing: a shared row has one next token.

    >>> batch = PrefixCollator(min_shared=1)([{"input_ids": [5, 6, 7, 8]}, {"input_ids": [5, 6, 7, 4, 3]}])
    >>> batch["input_ids"].tolist(), batch["position_ids"].tolist()
    ([[5, 6, 7, 4, 3, 7, 8]], [[0, 1, 2, 3, 4, 2, 3]])
    >>> batch["layout"].kv_index.tolist()
    [0, 1, 2, 3, 4, 0, 1, 5, 6]
    """

    min_shared: int = MIN_SHARED  # rows that two documents must share at least
    # Keep the row of a document of which only the last token is left. No document is trained on its output, but a
    # router sees its token
    keeps_last_rows: bool = False
    shares: bool = True  # False collates every document whole
    compare: Compare | None = None  # what is compared of documents with images, whose placeholders are all the same

    def collate(self, documents: Sequence[dict[str, Any]], degree: int = 1) -> tuple[dict[str, Any], list[DocumentRun]]:
        return self.collate_with_rows(documents, degree)[:2]

    def order_documents(
        self, documents: Sequence[dict[str, Any]]
    ) -> tuple[list[int], list[int], list[ComparedContent]]:
        """As `share_order`, with the documents that share nothing because of their labels at the end; what is compared.

        A document that would begin to differ in an image shares what is before it.
        """
        tokens, labels = self._read(documents)
        compared = [ComparedContent(ids) for ids in tokens] if self.compare is None else self.compare(documents)
        may_share = [
            i
            for i, (ids, own) in enumerate(zip(tokens, labels, strict=True))
            if own is ids or bool(((own == IGNORE_INDEX) | (own == ids)).all())
        ]
        places, shared = share_order([compared[i].tokens for i in may_share], self.min_shared)
        order = [may_share[place] for place in places]
        for place, i in enumerate(order):
            inside = [first for first, stop in compared[i].images if first < shared[place] < stop]
            if inside:
                shared[place] = inside[0] if inside[0] >= self.min_shared else 0
        rest = sorted(set(range(len(tokens))) - set(may_share))
        return order + rest, shared[: len(places)] + [0] * len(rest), compared

    def collate_with_rows(
        self, documents: Sequence[dict[str, Any]], degree: int = 1
    ) -> tuple[dict[str, Any], list[DocumentRun], list[npt.NDArray[Any]]]:
        """Also the rows of each document's tokens, (n,); each token has one with `keeps_last_rows` only."""
        tokens, labels = self._read(documents)
        order, shared, compared = self.order_documents(documents) if self.shares else ([], [], [])
        if not any(shared):
            batch, runs = super().collate(documents, degree)
            bounds = np.cumsum([0, *map(len, tokens)])
            return batch, runs, [np.arange(start, stop) for start, stop in pairwise(bounds)]
        runs = []
        rows = np.zeros(0, dtype=np.int64)  # of the document before
        rows_of = [rows] * len(order)
        num_rows = 0
        for i, num_shared in zip(order, shared, strict=True):
            first = min(num_shared, len(rows))
            num_own = len(tokens[i]) - first
            if num_own == 1 and first and not self.keeps_last_rows:
                num_own = 0
            rows = rows_of[i] = np.concatenate([rows[:first], np.arange(num_rows, num_rows + num_own)])
            num_rows += num_own
            if num_own:
                images = compared[i].images
                runs.append(DocumentRun(i, first, sum(start < first for start, _ in images), len(images)))
        return self._make_batch(tokens, labels, order, runs=runs, rows_of=rows_of, degree=degree), runs, rows_of

    def _make_batch(
        self,
        tokens: list[npt.NDArray[Any]],
        labels: list[npt.NDArray[Any]],
        order: list[int],
        *,
        runs: list[DocumentRun],
        rows_of: list[npt.NDArray[Any]],
        degree: int,
    ) -> dict[str, Any]:
        stretches = [tokens[run.document][run.first :] for run in runs]
        firsts = [run.first for run in runs]
        keys = [rows_of[run.document] for run in runs]
        num_rows = sum(map(len, stretches))
        if padding := self._padding(num_rows, degree):
            stretches.append(np.full(padding, self.pad_token_id, dtype=np.int64))
            firsts.append(0)
            keys.append(np.arange(num_rows, num_rows + padding))
        q_lengths = list(map(len, stretches))
        k_lengths = list(map(len, keys))

        targets = np.full(num_rows + padding, IGNORE_INDEX, dtype=np.int64)
        num_documents = np.zeros(num_rows + padding, dtype=np.int64)
        target_rows: list[npt.NDArray[Any]] = []
        for i in order:
            trained = labels[i][1:] != IGNORE_INDEX
            num_documents[rows_of[i]] += trained.any()
            target_rows.append(rows_of[i][: len(trained)][trained] + 1)
            targets[target_rows[-1]] = labels[i][1:][trained]
        documents = np.repeat(order, list(map(len, target_rows)))
        lengths = np.array(list(map(len, tokens)))
        own = np.zeros(len(tokens), dtype=np.int64)
        own[[run.document for run in runs]] = q_lengths[: len(runs)]

        def row(values: npt.NDArray[Any]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))[None]

        return {
            "input_ids": row(np.concatenate(stretches)),
            "labels": row(targets),
            "position_ids": row(position_ids(q_lengths) + np.repeat(firsts, q_lengths)),
            "cu_seq_lens_q": torch.from_numpy(cu_seq_lens(q_lengths)),
            "cu_seq_lens_k": torch.from_numpy(cu_seq_lens(k_lengths)),
            "max_length_q": max(q_lengths),
            "max_length_k": max(k_lengths),
            "seq_idx": torch.from_numpy(seq_idx(q_lengths))[None],
            "use_cache": False,
            LAYOUT_KEY: SharedRowsLayout(
                kv_index=torch.from_numpy(np.concatenate(keys)),
                target_rows=torch.from_numpy(np.concatenate(target_rows)),
                target_documents=torch.from_numpy(documents.astype(np.int64)),
                num_documents=torch.from_numpy(num_documents),
                lengths=torch.from_numpy(lengths),
                shared=torch.from_numpy(lengths - own),
                trained=torch.from_numpy(np.bincount(documents, minlength=len(tokens))),
                run_lengths=torch.tensor(list(zip(q_lengths, k_lengths, strict=True))),
            ),
        }
