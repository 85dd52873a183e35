"""What became of the data of a run: is everything that its rows give in the tokens, once."""

import itertools
import sys
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from datasets import Features
from transformers import AutoProcessor

from ..data.reader import RowReader, TokenReader
from ..reporting.packs import ShownDocument, ShownPack
from ..samples.conversation import plain_tokenizer
from ..samples.data_report import DataReport
from ..samples.marks import find_omissions
from ..samples.rendering import Rendering
from ..training.preparation import check_data, rendering_of
from .configs import RunConfigs
from .flags import setting_named
from .tokens import TOKENIZER, load_part


def check_parts(run: RunConfigs, model: str) -> Iterator[DataReport]:
    """Yield a report of each dataset of a run that is not tokenised, with the tokenizer or processor of a model."""
    processor = _load_processor(run, model)
    for name in run.parts:
        print(f"Reading {name}", file=sys.stderr)
        rows = load_part(run, name)
        if "input_ids" not in rows.column_names:
            yield check_data(rows, processor, run.training, name=name)


def with_omissions(packs: list[ShownPack], run: RunConfigs, *, model: str | None, reader: RowReader) -> list[ShownPack]:
    """Return packs whose documents have the texts of their rows that are not in the tokens, with their places.

    Args:
        packs: packs of the run.
        run: the run that trains them.
        model: name or folder of the tokenizer; None if it is not known.
        reader: the documents of the run. The packs are returned as they are if it does not read tokens, or if it has
            another number of rows than the datasets, as with `per_turn`: a row of tokens does not tell its row in the
            dataset then.
    """
    if model is None or not isinstance(reader, TokenReader):
        return packs
    parts = [load_part(run, name) for name in run.parts]
    if sum(map(len, parts)) != len(reader) or any("input_ids" in rows.column_names for rows in parts):
        return packs
    rendering = rendering_of(_load_processor(run, model), run.training)
    stops = list(itertools.accumulate(map(len, parts)))

    def mark(document: ShownDocument) -> ShownDocument:
        number = next(i for i, stop in enumerate(stops) if document.row < stop)
        rows = parts[number]
        row_index = document.row - stops[number] + len(rows)
        left_out = _omissions_of(document, rows[row_index], features=rows.features, rendering=rendering)
        return replace(document, left_out=left_out)

    return [replace(pack, documents=[mark(document) for document in pack.documents]) for pack in packs]


def _omissions_of(
    document: ShownDocument, row: dict[str, Any], *, features: Features, rendering: Rendering
) -> tuple[tuple[int, str], ...]:
    """Return the texts of a row that its document does not have, each with the number of tokens before its place.

    There are none if the row cannot be rendered, or if the tokens are not those of the rendered row.
    """
    try:
        text, omissions = find_omissions(row, rendering, features)
        encoding = plain_tokenizer(rendering.tokenizer)(text, add_special_tokens=False, return_offsets_mapping=True)
    except Exception:  # rows without a chat template, and tokenizers without offsets
        return ()
    ids = encoding["input_ids"][document.start : document.stop]
    if document.tokens is None or ids != document.tokens.tolist():
        return ()
    token_starts = [start for start, _ in encoding["offset_mapping"]][document.start : document.stop]
    return tuple((bisect_left(token_starts, position), description) for position, description in omissions)


def _load_processor(run: RunConfigs, model: str) -> Any:
    """Return the processor of a model, or its tokenizer if it has none."""
    with setting_named(model, TOKENIZER):
        return AutoProcessor.from_pretrained(model, trust_remote_code=run.training.trust_remote_code)
