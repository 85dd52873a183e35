"""Find what of the rows of a run is not in its tokens.

`check --dataset` and `show` report it for whole datasets with `report_tables`. `show` also marks it in the documents
that it prints (`with_omissions`). An *omission* is a text of a row that the chat template leaves out. A *rendering*
(`samples/rendering.py`) makes the text of a row with the chat template. The *processor* of a model prepares text and
images; a model without images has only a tokenizer.
"""

import itertools
import sys
from bisect import bisect_left, bisect_right
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
from .tokens import TOKENIZER, load_table


def report_tables(configs: RunConfigs, model: str) -> Iterator[DataReport]:
    """Yield a report of each table of a run that is not tokenised, with the tokenizer or processor of a model."""
    processor = _load_processor(configs, model)
    for name in configs.table_names:
        print(f"Reading {name}", file=sys.stderr)
        rows = load_table(configs, name)
        if "input_ids" not in rows.column_names:
            yield check_data(rows, processor, configs.training, name=name)


def with_omissions(packs: list[ShownPack], configs: RunConfigs, *, model: str, reader: RowReader) -> list[ShownPack]:
    """Return packs whose documents also have the omissions of their rows.

    The packs are returned as they are if rows of tokens cannot be matched with rows of the datasets. Their numbers
    differ with `per_turn`, which makes a row of tokens of each assistant turn. A dataset that is tokenised already has
    no texts.

    Args:
        packs: packs of the run.
        configs: the configs of the run.
        model: name or folder of the tokenizer.
        reader: the rows of the run.
    """
    if not isinstance(reader, TokenReader):  # rows of lengths or with images have no tokens to compare
        return packs
    tables = [load_table(configs, name) for name in configs.table_names]
    if sum(map(len, tables)) != len(reader) or any("input_ids" in rows.column_names for rows in tables):
        return packs
    rendering = rendering_of(_load_processor(configs, model), configs.training)
    # The reader has the rows of all tables, one table after another. Table i ends before row `stops[i]` of the reader.
    stops = list(itertools.accumulate(map(len, tables)))

    def mark(document: ShownDocument) -> ShownDocument:
        number = bisect_right(stops, document.row)  # of the table
        rows = tables[number]
        first_row = stops[number] - len(rows)
        row_index = document.row - first_row
        left_out = _omissions_of(document, rows[row_index], features=rows.features, rendering=rendering)
        return replace(document, left_out=left_out)

    return [replace(pack, documents=[mark(document) for document in pack.documents]) for pack in packs]


def _omissions_of(
    document: ShownDocument, row: dict[str, Any], *, features: Features, rendering: Rendering
) -> tuple[tuple[int, str], ...]:
    """Return the omissions of a row: (number of tokens of its document before the place of the text, its description).

    If the document is a fragment of the row, these are the omissions in this part of the row. The result is empty if
    the row cannot be rendered, or if the document has other tokens than the rendered row.
    """
    try:
        # `text` is the rendered row. Each omission is a pair: a position in `text`, in characters, and a description
        text, omissions = find_omissions(row, rendering, features)
        # `plain_tokenizer`: the tokenizer in a processor
        encoding = plain_tokenizer(rendering.tokenizer)(text, add_special_tokens=False, return_offsets_mapping=True)
    except Exception:  # rows without a chat template, and tokenizers without offsets
        return ()
    ids = encoding["input_ids"][document.start : document.stop]
    if document.tokens is None or ids != document.tokens.tolist():
        return ()
    spans = encoding["offset_mapping"]  # of characters, one for each token of the row
    token_starts = [first_character for first_character, _ in spans]
    places = [(bisect_left(token_starts, position), description) for position, description in omissions]
    # A text behind the last token of the row belongs to the fragment that ends there
    end = document.stop + (document.stop == len(spans))
    return tuple((place - document.start, text) for place, text in places if document.start <= place < end)


def _load_processor(configs: RunConfigs, model: str) -> Any:
    """Return the processor of a model, or its tokenizer if it has none."""
    with setting_named(model, TOKENIZER):  # errors become a ValueError with this name and with the advice `TOKENIZER`
        return AutoProcessor.from_pretrained(model, **configs.tokenizer_settings(model))
