"""Apply a recipe to the rows of a table or a stream; refuse, or drop and count, rows of which it makes no sample."""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from operator import not_
from types import MappingProxyType
from typing import Any

import numpy as np
from datasets import Dataset, Features, IterableDataset, Value

from ..compat import main_process_first
from . import dataset_warnings
from .checks import NUM_OF_STREAM, check_chat_template, check_raw_dataset, columns_of
from .conversation import Conversation, Tokenizer, plain_tokenizer
from .data_proof import prove_or_refuse
from .data_report import DataReport
from .recipes import Recipe, recipe_of
from .row import (
    BAD_ROW_COLUMN,
    BOOKKEEPING_COLUMNS,
    MAX_ROWS_NAMED,
    ROW_COLUMN,
    TURN_COLUMN,
    AssistantTurnCounts,
    HashedMapFunction,
    PerTurnCounts,
    Sample,
    bad_row_mask,
    explain_bad_row,
    hash_modules_of,
    mask_counts,
    raise_bad_rows,
    read_integer_column,
)
from .texts import given_value, struct_columns
from .turns import TurnSettings

logger = logging.getLogger(__name__)

TOKEN_FEATURES = {"input_ids": [Value("int32")], "labels": [Value("int64")], BAD_ROW_COLUMN: Value("string")}
ROWS_AT_ONCE = 1000  # in memory: samples of turns have many times the tokens of their row
CONVERSATIONS_AT_ONCE = 16


@dataclass(frozen=True)
class PreparedDataset:
    """The samples of a dataset: tokenised rows with the other columns of theirs."""

    rows: Dataset | IterableDataset
    recipe: Recipe
    masked: AssistantTurnCounts | None = None  # the assistant turns of a table, with `assistant_only_loss`
    turns: PerTurnCounts | None = None  # the same with `per_turn`
    data: DataReport | None = None  # whether everything given is in the tokens; None with a formatting function


def make_samples(
    dataset: Dataset | IterableDataset,
    name: str,
    args: TurnSettings,
    *,
    tokenizer: Tokenizer,
    completion_only_loss: bool,
    marks: bool,
    formatting_func: Callable[[dict[str, Any]], str] | None = None,
    is_training_set: bool = True,
) -> PreparedDataset:
    """Tokens and labels of all rows of a dataset that is not tokenised.

    With `marks` and `bad_rows="drop"`, rows or turns of which no sample can be made are kept without tokens, with the
    reason in the column `BAD_ROW_COLUMN`, so that they are counted.
    """
    data = None
    if isinstance(dataset, Dataset):
        plain = plain_tokenizer(tokenizer)
        check_raw_dataset(dataset, name, plain, args=args, is_formatted=formatting_func is not None)
    if formatting_func is None:
        check_chat_template(dataset, name, tokenizer)
    with dataset_warnings.RepeatedMessages() as repeats:
        recipe = recipe_of(dataset, name, args, tokenizer, completion_only_loss, formatting_func)
        if formatting_func is None:
            data = prove_or_refuse(dataset, name, args=args, tokenizer=tokenizer)
        users_code = hash_modules_of(formatting_func, tokenizer)
        settings: dict[str, Any] = {"marks": marks, "is_training_set": is_training_set, "users_code": users_code}
        made = _applied(recipe, dataset, name, args=args, **settings)
    repeats.say(name)
    return replace(made, data=data)


def _applied(
    recipe: Recipe,
    dataset: Dataset | IterableDataset,
    name: str,
    *,
    args: TurnSettings,
    marks: bool,
    is_training_set: bool,
    users_code: str,
) -> PreparedDataset:
    columns = columns_of(dataset)
    drops = args.bad_rows == "drop"
    consumed = [column for column in columns if column in recipe.consumes]
    others = [column for column in columns if column not in consumed]
    kwargs: dict[str, object] = {"recipe": recipe, "structs": struct_columns(dataset.features)}
    settings = {"with_indices": True, "batched": True}
    says_end = is_training_set and recipe.setting
    if isinstance(dataset, IterableDataset):
        kwargs |= {"name": name, "drops": drops, "repeats": dataset_warnings.RepeatedMessages()}
        # Rows of a stream may have other columns than the first
        consumed = consumed if dataset.column_names is not None else [*recipe.consumes]
        stream = dataset.map(_columns_of_stream, batch_size=1, remove_columns=consumed, fn_kwargs=kwargs, **settings)
        if says_end:
            dataset_warnings.warn_if_turns_do_not_end(
                stream.take(NUM_OF_STREAM), name, recipe.tokenizer, setting=recipe.setting
            )
        return PreparedDataset(without_bad_rows(stream) if drops and not marks else stream, recipe)
    numbers = dict.fromkeys(BOOKKEEPING_COLUMNS if recipe.setting else (), Value("int64"))
    kwargs["repeated"] = others if recipe.splits else []
    with main_process_first():
        samples = dataset.map(
            HashedMapFunction(columns_of_batch, users_code=users_code),
            batch_size=CONVERSATIONS_AT_ONCE if recipe.splits else ROWS_AT_ONCE,
            features=Features({column: dataset.features[column] for column in others} | TOKEN_FEATURES | numbers),
            num_proc=args.dataset_num_proc,
            desc=f"Tokenizing {'each assistant turn of ' if recipe.splits else ''}{name} dataset",
            remove_columns=columns if recipe.splits else consumed,
            fn_kwargs=kwargs,
            **settings,
        )
    turns = count_turns(dataset, samples, name, args=args, is_split=recipe.splits, drops=drops)
    if says_end:
        dataset_warnings.warn_if_turns_do_not_end(samples, name, recipe.tokenizer, setting=recipe.setting)
    if is_training_set and recipe.splits:
        dataset_warnings.warn_if_nothing_is_stripped(samples, name)
    rows = samples.remove_columns([*numbers])
    rows = rows if drops and marks else without_bad_rows(rows)
    if recipe.splits:
        return PreparedDataset(rows, recipe, turns=turns)
    return PreparedDataset(rows, recipe, masked=mask_counts(samples) if numbers else None)


class _RowView(Mapping[str, Any]):
    """A row of a batch. Its columns are decoded when they are read, so a broken image is an error of its row."""

    def __init__(self, batch: Mapping[str, Sequence[Any]], place: int, structs: Mapping[str, Any]):
        self._batch = batch
        self._place = place
        self._structs = structs

    def __getitem__(self, name: str) -> Any:
        value = self._batch[name][self._place]
        return given_value(name, value, self._structs[name]) if name in self._structs else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch.keys())

    def __len__(self) -> int:
        return len(self._batch.keys())


def columns_of_batch(
    batch: Mapping[str, Sequence[Any]],
    indices: list[int],
    recipe: Recipe,
    *,
    repeated: Sequence[str] = (),
    structs: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, list[Any]]:
    """The samples of some rows, both as columns; `repeated` are other columns of the rows, which each sample gets.

    `structs` are the columns from which keys that Arrow added are taken (`given_value`).
    """
    numbers = BOOKKEEPING_COLUMNS if recipe.setting else ()
    columns: dict[str, list[Any]] = {name: [] for name in (*recipe.bad, BAD_ROW_COLUMN, *numbers, *repeated)}
    for place, i in enumerate(indices):
        row = _RowView(batch, place, structs)
        try:
            samples = recipe.samples(row, i)
        except Exception as error:  # of a template, a tokenizer, a processor, the image library or the file system
            samples = [Sample({}, reason=explain_bad_row(row, error, recipe.text_field))]
        for sample in samples:
            made = {BAD_ROW_COLUMN: sample.reason, **recipe.bad, **sample.columns}
            made |= zip(numbers, (i, sample.turn, *astuple(sample.counts)), strict=False)
            made |= {name: row[name] for name in repeated}
            for name, column in columns.items():
                column.append(made[name])
    return columns


def _columns_of_stream(
    batch: Mapping[str, Sequence[Any]],
    indices: list[int],
    name: str,
    *,
    recipe: Recipe,
    drops: bool,
    repeats: dataset_warnings.RepeatedMessages,
    structs: Mapping[str, Any],
) -> dict[str, list[Any]]:
    repeated = [column for column in batch if column not in recipe.consumes] if recipe.splits else []
    with repeats:
        columns = columns_of_batch(batch, indices, recipe, repeated=repeated, structs=structs)
    for why in columns[BAD_ROW_COLUMN] if not drops else ():
        if why:
            raise ValueError(
                f"Row {indices[0]} of the {name} stream cannot be tokenised: {why}. Every row must go through the chat "
                "template and the tokenizer. Filter such rows out, set `chat_template_path` to a template that takes "
                'them, or set `bad_rows="drop"`.'
            )
    for column in ("input_ids", "labels"):
        columns[column] = [values.tolist() for values in columns[column]]
    left_out = BOOKKEEPING_COLUMNS if drops else (*BOOKKEEPING_COLUMNS, BAD_ROW_COLUMN)
    return {column: values for column, values in columns.items() if column not in left_out}


def count_turns(
    dataset: Dataset, samples: Dataset, name: str, *, args: TurnSettings, is_split: bool, drops: bool
) -> PerTurnCounts:
    """Count the samples of the rows of a dataset, and refuse or name the rows of which none can be made.

    A sample is a row or, if it is split, a turn, and the columns say of which row.
    """
    bad = bad_row_mask(samples)
    row_of = read_integer_column(samples, ROW_COLUMN) if is_split else np.arange(len(samples))
    trains = read_integer_column(samples, TURN_COLUMN) >= 0 if is_split else ~bad
    left = mask_counts(samples) if is_split else AssistantTurnCounts()
    counts = PerTurnCounts(
        conversations=len(dataset),
        samples=int((~bad & trains).sum()),
        without_turn=int((~bad & ~trains).sum()),
        bad=int(bad.sum()),
        left_out=left.context + left.earlier,
    )
    if counts.bad:
        rows, where = np.unique(row_of[bad], return_index=True)
        first = np.flatnonzero(bad)[where][:MAX_ROWS_NAMED]
        reasons = list(
            zip(rows[:MAX_ROWS_NAMED].tolist(), samples.select(first).with_format(None)[BAD_ROW_COLUMN], strict=True)
        )
        if not drops or not counts.samples:
            raise_bad_rows(name, reasons, len(rows), total=len(dataset))
        what = f"{len(rows)} of {len(dataset)} rows"
        be = "tokenised"
        where_are = ""
        if is_split:
            what = f"{counts.bad} turns in {len(rows)} of {len(dataset)} conversations"
            be = "rendered"
            where_are = "in rows "
        logger.warning(
            "%s of the %s dataset cannot be %s and are dropped; the first are %s%s. Row %d: %s.",
            *(what, name, be, where_are, [row for row, _ in reasons], *reasons[0]),
        )
    if is_split and not counts.samples and not counts.left_out:
        roles = sorted({message["role"] for message in Conversation.from_row(dataset[0]).messages})
        raise ValueError(
            f"`per_turn=True` was given, and none of the {len(dataset)} conversations of the {name} dataset has a "
            f"message of the role `assistant` to train (roles of row 0: {', '.join(roles)}). Each assistant turn makes "
            "one sample, so there would be none. Rename the role, or set `per_turn=False`."
        )
    if is_split and args.process_index == 0 and not args.disable_tqdm:
        print(f"Conversations of the {name} dataset: {counts.line()}", file=sys.stderr)
    return counts


def without_bad_rows(dataset: Any) -> Any:
    """The rows that have tokens, of a table or a stream, without the column `BAD_ROW_COLUMN`."""
    if isinstance(dataset, IterableDataset):
        return dataset.filter(not_, input_columns=BAD_ROW_COLUMN).remove_columns(BAD_ROW_COLUMN)
    if (bad := bad_row_mask(dataset)).any():
        dataset = dataset.select(np.flatnonzero(~bad))
    return dataset.remove_columns(BAD_ROW_COLUMN) if BAD_ROW_COLUMN in dataset.column_names else dataset
