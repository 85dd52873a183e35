"""Apply a recipe to the rows of a table or a stream; refuse, or drop and count, rows of which it makes no sample."""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
from datasets import Dataset, Features, IterableDataset, Value
from trl.data_utils import get_dataset_column_names

from ..compat import main_process_first
from .checks import NUM_OF_STREAM, check_raw_dataset
from .conversation import Conversation
from .reasons import reason, refuse, refuse_row_of_stream
from .recipes import Recipe, Tokenizer, recipe_of
from .row import BAD_ROW, NUM_SHOWN, Bad, Cached, MaskCounts, TurnCounts, bad_rows
from .said import (
    Repeats,
    say_if_nothing_is_stripped,
    say_if_turns_do_not_end,
    say_what_is_left_out,
    say_what_is_renamed,
)

logger = logging.getLogger(__name__)

TOKENS = {"input_ids": [Value("int32")], "labels": [Value("int64")], BAD_ROW: Value("string")}
# Columns while turns are counted: the attributes of `Sample` and `MaskCounts`, and the number of the row
NUMBERS = ROW, TURN, GROWS, TURNS, CONTEXT, EARLIER = tuple(
    f"packfix_{name}" for name in ("row", "turn", "grows", "turns", "context", "earlier")
)
ROWS_AT_ONCE, CONVERSATIONS_AT_ONCE = 1000, 16  # in memory: samples of turns have many times the tokens of their row


@dataclass(frozen=True)
class Made:
    """The samples of a dataset: tokenised rows with the other columns of theirs.

    Attributes:
        masked, turns: the assistant turns of a table, with `assistant_only_loss` and with `per_turn`.
    """

    rows: Dataset | IterableDataset
    recipe: Recipe
    masked: MaskCounts | None = None
    turns: TurnCounts | None = None


def make_samples(
    dataset: Dataset | IterableDataset,
    name: str,
    args: Any,
    *,
    tokenizer: Tokenizer,
    completion_only_loss: bool,
    marks: bool,
    formatting_func: Callable[[dict[str, Any]], str] | None = None,
    is_training_set: bool = True,
) -> Made:
    """Tokens and labels of all rows of a dataset that is not tokenised.

    Args:
        name: of the dataset, for messages.
        args: an `SFTConfig`.
        marks: with `bad_rows="drop"`, keep rows or turns of which no sample can be made as rows without tokens, with
            the reason in the column `BAD_ROW`, so that they are counted.
        is_training_set: whether to say what the chat template does to it.

    Raises:
        ValueError: with `bad_rows="raise"`, rows cannot be tokenised; with "drop", no row can; `per_turn` and rows
            without conversations, or without a turn to train.
    """
    if isinstance(dataset, Dataset):
        plain = getattr(tokenizer, "tokenizer", tokenizer)
        check_raw_dataset(dataset, name, plain, args=args, is_formatted=formatting_func is not None)
    with Repeats() as repeats:
        recipe = recipe_of(
            dataset,
            name,
            args,
            tokenizer=tokenizer,
            completion_only_loss=completion_only_loss,
            formatting_func=formatting_func,
        )
        if formatting_func is None:
            say_what_is_renamed(dataset, name)
            if is_training_set and args.process_index == 0:
                seen: dict[str, Any] = {"chat_template": recipe.chat_template, "per_turn": recipe.splits}
                say_what_is_left_out(dataset, name, tokenizer, **seen)
        make = _of_stream if isinstance(dataset, IterableDataset) else _of_table
        made = make(dataset, name, recipe, args=args, is_training_set=is_training_set)
    repeats.say(name)
    drops = args.bad_rows == "drop"
    if (marks and drops) or (isinstance(dataset, IterableDataset) and not drops):
        return made
    return replace(made, rows=without_bad_rows(made.rows))


def _map_settings(dataset: Any, recipe: Recipe) -> dict[str, Any]:
    columns = get_dataset_column_names(dataset)
    consumed = [column for column in columns if column in recipe.consumes]
    others = [column for column in columns if column not in consumed]
    return {
        "with_indices": True,
        "batched": True,
        "fn_kwargs": {"recipe": recipe, "repeated": others if recipe.splits else []},
        "remove_columns": columns if recipe.splits else consumed,
    }


def _of_stream(dataset: IterableDataset, name: str, recipe: Recipe, *, args: Any, is_training_set: bool) -> Made:
    settings = _map_settings(dataset, recipe)
    settings["fn_kwargs"] |= {"name": name, "drops": args.bad_rows == "drop", "repeats": Repeats()}
    rows = dataset.map(_columns_of_stream, batch_size=1, **settings)
    if is_training_set and recipe.setting:
        say_if_turns_do_not_end(rows.take(NUM_OF_STREAM), name, recipe.tokenizer, setting=recipe.setting)
    return Made(rows, recipe)


def _of_table(dataset: Dataset, name: str, recipe: Recipe, *, args: Any, is_training_set: bool) -> Made:
    settings = _map_settings(dataset, recipe)
    others = {column: kind for column, kind in dataset.features.items() if column not in recipe.consumes}
    numbers = dict.fromkeys(NUMBERS if recipe.setting else (), Value("int64"))
    with main_process_first():
        samples = dataset.map(
            Cached(columns_of_batch),
            batch_size=CONVERSATIONS_AT_ONCE if recipe.splits else ROWS_AT_ONCE,
            features=Features(others | TOKENS | numbers),
            num_proc=args.dataset_num_proc,
            desc=f"Tokenizing {'each assistant turn of ' if recipe.splits else ''}{name} dataset",
            **settings,
        )
    turns = count_turns(dataset, samples, name, is_split=recipe.splits, drops=args.bad_rows == "drop")
    if recipe.splits:
        say_counts(turns, name, args)
    if is_training_set and recipe.setting:
        say_if_turns_do_not_end(samples, name, recipe.tokenizer, setting=recipe.setting)
    if is_training_set and recipe.splits:
        lengths = pc.list_value_length(samples.with_format("arrow")[:]["input_ids"]).to_numpy()
        say_if_nothing_is_stripped(name, column_of(samples, ROW), lengths, grows=column_of(samples, GROWS))
    if recipe.splits:
        return Made(samples.remove_columns([*numbers]), recipe, turns=turns)
    masked = [int(column_of(samples, column).sum()) for column in (TURNS, CONTEXT, EARLIER) if numbers]
    return Made(samples.remove_columns([*numbers]), recipe, MaskCounts(*masked) if numbers else None)


class _Row(Mapping[str, Any]):
    """A row of a batch. Its columns are decoded when they are read, so a broken image is an error of its row."""

    def __init__(self, batch: Mapping[str, Any], place: int):
        self._batch, self._place = batch, place

    def __getitem__(self, name: str) -> Any:
        return self._batch[name][self._place]

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch.keys())

    def __len__(self) -> int:
        return len(self._batch.keys())


def columns_of_batch(
    batch: Any, indices: list[int], recipe: Recipe, *, repeated: Sequence[str] = ()
) -> dict[str, list[Any]]:
    """The samples of some rows, given as columns, as columns.

    Args:
        repeated: other columns of the rows, which each sample gets.
    """
    numbers = NUMBERS if recipe.setting else ()
    columns: dict[str, list[Any]] = {name: [] for name in (*recipe.bad, BAD_ROW, *numbers, *repeated)}
    for place, i in enumerate(indices):
        row = _Row(batch, place)
        try:
            samples = recipe.samples(row, i)
        except Exception as error:  # of a template, a tokenizer, a processor, the image library or the file system
            samples = [Bad(reason(row, error, recipe.text_field))]
        for sample in samples:
            values = zip(numbers, (i, sample.turn, int(sample.grows), *astuple(sample.counts)), strict=False)
            made = (
                {BAD_ROW: sample.reason, **recipe.bad} if isinstance(sample, Bad) else {BAD_ROW: "", **sample.columns}
            )
            made |= dict(values) | {name: row[name] for name in repeated}
            for name, column in columns.items():
                column.append(made[name])
    return columns


def _columns_of_stream(
    batch: Any, indices: list[int], name: str, *, drops: bool, repeats: Repeats, **kwargs: Any
) -> dict[str, list[Any]]:
    with repeats:
        columns = columns_of_batch(batch, indices, **kwargs)
    columns = {column: values for column, values in columns.items() if column not in NUMBERS}
    for column in ("input_ids", "labels"):
        columns[column] = [values.tolist() for values in columns[column]]
    if drops:
        return columns
    for why in columns.pop(BAD_ROW):
        if why:
            refuse_row_of_stream(name, indices[0], why)
    return columns


def column_of(samples: Dataset, name: str) -> npt.NDArray[np.int64]:
    """A column of numbers, shape (samples,)."""
    numbers: npt.NDArray[np.int64] = samples.select_columns(name).with_format("arrow")[:][name].to_numpy()
    return numbers


def count_turns(dataset: Dataset, samples: Dataset, name: str, *, is_split: bool, drops: bool) -> TurnCounts:
    """Count the samples of the rows of a dataset, and refuse or name the rows of which none can be made.

    Args:
        is_split: a sample is a turn, and the columns say of which row; else it is a row.
        drops: name bad rows, as long as there are others.
    """
    bad = bad_rows(samples)
    assert bad is not None  # every map that makes samples makes the column
    row_of = column_of(samples, ROW) if is_split else np.arange(len(samples))
    trains = column_of(samples, TURN) >= 0 if is_split else np.ones(len(samples), bool)
    counts = TurnCounts(
        conversations=len(dataset),
        samples=int((~bad & trains).sum()),
        without_turn=int((~bad & ~trains).sum()),
        bad=int(bad.sum()),
        left_out=int(column_of(samples, CONTEXT).sum() + column_of(samples, EARLIER).sum()) if is_split else 0,
    )
    if counts.bad:
        rows, where = np.unique(row_of[bad], return_index=True)
        first = np.flatnonzero(bad)[where][:NUM_SHOWN]
        reasons = list(zip(rows[:NUM_SHOWN].tolist(), samples.select(first).with_format(None)[BAD_ROW], strict=True))
        if not drops or not counts.samples:
            refuse(name, reasons, len(rows), total=len(dataset))
        what, be, where_are = f"{len(rows)} of {len(dataset)} rows", "tokenised", ""
        if is_split:
            what, be = f"{counts.bad} turns in {len(rows)} of {len(dataset)} conversations", "rendered"
            where_are = "in rows "
        numbers = [row for row, _ in reasons]
        logger.warning(
            "%s of the %s dataset cannot be %s and are dropped; the first are %s%s. Row %d: %s.",
            *(what, name, be, where_are, numbers, *reasons[0]),
        )
    if is_split and not counts.samples and not counts.left_out:
        roles = sorted({message["role"] for message in Conversation.from_row(dataset[0]).messages})
        raise ValueError(
            f"`per_turn=True` was given, and none of the {len(dataset)} conversations of the {name} dataset has a "
            f"message of the role `assistant` to train (roles of row 0: {', '.join(roles)}). Each assistant turn makes "
            "one sample, so there would be none. Rename the role, or set `per_turn=False`."
        )
    return counts


def say_counts(turns: TurnCounts, name: str, args: Any) -> None:
    if args.process_index == 0 and not args.disable_tqdm:
        print(f"Conversations of the {name} dataset: {turns.line()}", file=sys.stderr)


def without_bad_rows(dataset: Any) -> Any:
    """The rows that have tokens, of a table or a stream, without the column `BAD_ROW`."""
    if isinstance(dataset, IterableDataset):
        return dataset.filter(_is_good).remove_columns(BAD_ROW)
    bad = bad_rows(dataset)
    if bad is not None and bad.any():
        dataset = dataset.select(np.flatnonzero(~bad))
    return dataset if bad is None else dataset.remove_columns(BAD_ROW)


def _is_good(row: dict[str, Any]) -> bool:
    return not row[BAD_ROW]
