"""What became of the data of a run: is everything that its rows give in the tokens, once."""

import sys
from collections.abc import Iterator

from transformers import AutoProcessor

from ..samples.data_report import DataReport
from ..training.preparation import check_data
from .configs import RunConfigs
from .flags import setting_named
from .tokens import TOKENIZER, load_part


def check_parts(run: RunConfigs, model: str) -> Iterator[DataReport]:
    """Yield a report of each dataset of a run that is not tokenised, with the tokenizer or processor of a model."""
    with setting_named(model, TOKENIZER):
        processor = AutoProcessor.from_pretrained(model, trust_remote_code=run.training.trust_remote_code)
    for name in run.parts:
        print(f"Reading {name}", file=sys.stderr)
        rows = load_part(run, name)
        if "input_ids" not in rows.column_names:
            yield check_data(rows, processor, run.training, name=name)
