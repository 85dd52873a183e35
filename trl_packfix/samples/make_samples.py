"""Make the samples of a whole dataset: apply a recipe to the rows of a table or a stream.

The trainer's preparation calls `make_samples` with a dataset of texts or conversations. Out come samples, rows with
tokens and labels, which the trainer packs later. A recipe of `recipes.py` makes one or several samples of a row. A row
is bad if the recipe can make no sample of it. With `bad_rows="raise"` bad rows are refused, and with "drop" they are
counted and dropped. A table is a `datasets.Dataset`, a stream an `IterableDataset`.
"""

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
from .checks import NUM_CHECKED_OF_STREAM, check_chat_template, check_raw_dataset, columns_of
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
    raise_bad_rows,
    read_integer_column,
    sum_turn_counts,
)
from .texts import given_value, struct_columns
from .turns import TurnSettings

logger = logging.getLogger(__name__)

TOKEN_FEATURES = {"input_ids": [Value("int32")], "labels": [Value("int64")], BAD_ROW_COLUMN: Value("string")}
ROWS_AT_ONCE = 1000  # rows of a batch in memory
CONVERSATIONS_AT_ONCE = 16  # rows of a batch if each turn is a sample, which takes many times the memory


@dataclass(frozen=True)
class PreparedDataset:
    """The samples of a dataset, and what was counted while they were made."""

    rows: Dataset | IterableDataset  # tokens and labels, and the columns of the dataset that were not tokenised
    recipe: Recipe
    assistant_turns: AssistantTurnCounts | None = None  # assistant turns of a table, if `assistant_only_loss` is set
    turns: PerTurnCounts | None = None  # conversations and turns of a table, if `per_turn` is set
    data: DataReport | None = None  # whether all texts are in the tokens


def make_samples(
    dataset: Dataset | IterableDataset,
    name: str,
    args: TurnSettings,
    *,
    tokenizer: Tokenizer,
    completion_only_loss: bool,
    keeps_bad_rows: bool,
    formatting_func: Callable[[dict[str, Any]], str] | None = None,
    is_training_set: bool = True,
) -> PreparedDataset:
    """Make tokens and labels of all rows of a dataset that is not tokenised.

    Args:
        dataset: A table or a stream.
        name: The dataset's name in messages.
        args: The config of the trainer.
        tokenizer: The tokenizer, or the processor of a model with images.
        completion_only_loss: Whether prompts are not trained, in rows with a prompt and a completion.
        keeps_bad_rows: Whether, with `bad_rows="drop"`, bad rows and turns remain in the result without tokens and with
            their reason in the column `BAD_ROW_COLUMN`, so that the caller can count them.
        formatting_func: The user's function that returns the text of a row, as in TRL.
        is_training_set: Whether to warn if trained turns have no end-of-turn token, or if `per_turn` only makes the
            data longer, because the chat template strips nothing from earlier turns.

    Raises:
        ValueError: If the dataset cannot be tokenised, or if it has bad rows that are not dropped. The rows of a stream
            are refused when they are read.
    """
    if isinstance(dataset, Dataset):
        plain = plain_tokenizer(tokenizer)
        check_raw_dataset(dataset, name, plain, args=args, is_formatted=formatting_func is not None)
    if formatting_func is None:
        check_chat_template(dataset, name, tokenizer)
    with dataset_warnings.RepeatedMessages() as repeats:  # shows only the first of TRL's warnings that begin alike
        recipe = recipe_of(dataset, name, args, tokenizer, completion_only_loss, formatting_func)
        # Refuse the dataset if texts of its rows would be missing from the tokens
        data = prove_or_refuse(dataset, name, args=args, tokenizer=tokenizer, formatting_func=formatting_func)
        users_code = hash_modules_of(formatting_func, tokenizer)
        prepared = _apply_recipe(
            recipe,
            dataset,
            name,
            args=args,
            keeps_bad_rows=keeps_bad_rows,
            is_training_set=is_training_set,
            users_code=users_code,
        )
    repeats.say(name)
    return replace(prepared, data=data)


def _apply_recipe(
    recipe: Recipe,
    dataset: Dataset | IterableDataset,
    name: str,
    *,
    args: TurnSettings,
    keeps_bad_rows: bool,
    is_training_set: bool,
    users_code: str,
) -> PreparedDataset:
    """Apply a recipe to all rows of a table now, or to the rows of a stream when they are read.

    Args:
        users_code: Hash of the user's code that the recipe calls, so that `datasets` reuses no samples of other code.
    """
    columns = columns_of(dataset)
    drops = args.bad_rows == "drop"
    consumed = [column for column in columns if column in recipe.consumes]
    copied = [column for column in columns if column not in consumed]
    # `structs`: features of the columns whose dictionaries have keys that Arrow added
    kwargs: dict[str, object] = {"recipe": recipe, "structs": struct_columns(dataset.features)}
    settings = {"with_indices": True, "batched": True}
    # `setting`: the config field by which a recipe trains assistant turns only, and then counts them; "" for others
    counts_assistant_turns = bool(recipe.setting)
    checks_turn_ends = is_training_set and counts_assistant_turns
    if isinstance(dataset, IterableDataset):
        kwargs |= {"name": name, "drops": drops, "repeats": dataset_warnings.RepeatedMessages()}
        # If a stream does not know its columns, its first row may lack columns of later rows. So all columns that the
        # recipe may consume are removed
        consumed = consumed if dataset.column_names is not None else [*recipe.consumes]
        stream = dataset.map(_columns_of_stream, batch_size=1, remove_columns=consumed, fn_kwargs=kwargs, **settings)
        if checks_turn_ends:
            dataset_warnings.warn_if_turns_do_not_end(
                stream.take(NUM_CHECKED_OF_STREAM), name, recipe.tokenizer, setting=recipe.setting
            )
        return PreparedDataset(without_bad_rows(stream) if drops and not keeps_bad_rows else stream, recipe)
    # These columns are removed again below, when the turns are counted
    bookkeeping = dict.fromkeys(BOOKKEEPING_COLUMNS if counts_assistant_turns else (), Value("int64"))
    with main_process_first():
        samples = dataset.map(
            # `datasets` reuses cached samples only while the hashes of the code are the same
            HashedMapFunction(columns_of_batch, users_code=users_code),
            batch_size=CONVERSATIONS_AT_ONCE if recipe.splits else ROWS_AT_ONCE,
            features=Features({column: dataset.features[column] for column in copied} | TOKEN_FEATURES | bookkeeping),
            num_proc=args.dataset_num_proc,
            desc=f"Tokenizing {'each assistant turn of ' if recipe.splits else ''}{name} dataset",
            remove_columns=columns if recipe.splits else consumed,
            fn_kwargs=kwargs,
            **settings,
        )
    turns = count_turns(dataset, samples, name, args=args, is_split=recipe.splits, drops=drops)
    if checks_turn_ends:
        dataset_warnings.warn_if_turns_do_not_end(samples, name, recipe.tokenizer, setting=recipe.setting)
    if is_training_set and recipe.splits:
        dataset_warnings.warn_if_nothing_is_stripped(samples, name)
    rows = samples.remove_columns([*bookkeeping])
    rows = rows if drops and keeps_bad_rows else without_bad_rows(rows)
    if recipe.splits:
        return PreparedDataset(rows, recipe, turns=turns)
    assistant_turns = sum_turn_counts(samples) if counts_assistant_turns else None
    return PreparedDataset(rows, recipe, assistant_turns=assistant_turns)


class _RowView(Mapping[str, Any]):
    """One row of a batch of `Dataset.map`.

    Its columns are decoded when they are read, so a broken image raises an error in its own row and not in the batch.
    """

    def __init__(self, batch: Mapping[str, Sequence[Any]], index: int, structs: Mapping[str, Any]):
        self._batch = batch
        self._index = index
        self._structs = structs

    def __getitem__(self, name: str) -> Any:
        value = self._batch[name][self._index]
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
    structs: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, list[Any]]:
    """Make the samples of a batch of rows. This is a function for `Dataset.map`.

    Args:
        batch: The columns of the rows by name.
        indices: Indices of the rows in their dataset.
        recipe: Makes the samples of a row.
        structs: Features of the columns whose dictionaries have keys that Arrow added, which are removed
            (`given_value`).

    Returns:
        The columns of the samples by name. A bad row has one sample, with a reason in `BAD_ROW_COLUMN`.
    """
    bookkeeping = BOOKKEEPING_COLUMNS if recipe.setting else ()  # empty if turns are not counted
    # Columns whose values are copied to each sample of a row. If each row becomes one sample, `map` keeps them itself
    repeated = [column for column in batch if column not in recipe.consumes] if recipe.splits else []
    columns: dict[str, list[Any]] = {name: [] for name in (*recipe.bad, BAD_ROW_COLUMN, *bookkeeping, *repeated)}
    for i, row_index in enumerate(indices):
        row = _RowView(batch, i, structs)
        try:
            samples = recipe.samples(row, row_index)
        # Templates, tokenizers, processors, the image library and the file system raise errors of any type
        except Exception as error:
            samples = [Sample({}, reason=explain_bad_row(row, error, recipe.text_field))]
        for sample in samples:
            # A bad sample has no columns, and gets the empty ones of a bad row
            sample_columns = {BAD_ROW_COLUMN: sample.reason, **recipe.bad, **sample.columns}
            if bookkeeping:
                sample_columns |= zip(bookkeeping, (row_index, sample.turn, *astuple(sample.counts)), strict=True)
            sample_columns |= {name: row[name] for name in repeated}
            for name, column in columns.items():
                column.append(sample_columns[name])
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
    """Make the samples of one row of a stream, and raise a ValueError if it is bad and bad rows are not dropped."""
    with repeats:
        columns = columns_of_batch(batch, indices, recipe, structs=structs)
    for reason in columns[BAD_ROW_COLUMN]:
        if reason and not drops:
            raise ValueError(
                f"Row {indices[0]} of the {name} stream cannot be tokenised: {reason}. Every row must go through the "
                "chat template and the tokenizer. Filter such rows out, set `chat_template_path` to a template that "
                'takes them, or set `bad_rows="drop"`.'
            )
    # `map` stores arrays of a table in Arrow, which returns lists. A stream yields what this function returns
    for column in ("input_ids", "labels"):
        columns[column] = [values.tolist() for values in columns[column]]
    removed = BOOKKEEPING_COLUMNS if drops else (*BOOKKEEPING_COLUMNS, BAD_ROW_COLUMN)
    return {column: values for column, values in columns.items() if column not in removed}


def count_turns(
    dataset: Dataset, samples: Dataset, name: str, *, args: TurnSettings, is_split: bool, drops: bool
) -> PerTurnCounts:
    """Count the samples of a table, and refuse bad rows or warn that they are dropped.

    Args:
        dataset: The rows of the user.
        samples: The samples that were made of these rows, bad ones among them.
        name: The dataset's name in messages.
        args: The config of the trainer.
        is_split: Whether a sample is one turn of a row, whose index is in the column `ROW_COLUMN`. Otherwise sample i
            is row i.
        drops: Whether bad rows are dropped.

    Raises:
        ValueError: If rows are bad and not dropped, if no sample remains, or if there is no assistant turn.
    """
    bad = bad_row_mask(samples)  # for each sample, whether it has a reason in `BAD_ROW_COLUMN`
    row_of_sample = read_integer_column(samples, ROW_COLUMN) if is_split else np.arange(len(samples))
    # `TURN_COLUMN`: the index of the trained message, or -1 if the conversation has no turn to train
    trains_turn = read_integer_column(samples, TURN_COLUMN) >= 0 if is_split else ~bad
    turn_counts = sum_turn_counts(samples) if is_split else AssistantTurnCounts()
    counts = PerTurnCounts(
        conversations=len(dataset),
        samples=int((~bad & trains_turn).sum()),
        without_turn=int((~bad & ~trains_turn).sum()),
        bad=int(bad.sum()),
        left_out=turn_counts.context + turn_counts.earlier,  # turns with the weight 0, and turns before the last one
    )
    if counts.bad:
        # Several turns of a row may be bad: the reason of its first bad turn is shown
        rows, first_bad_turns = np.unique(row_of_sample[bad], return_index=True)
        first = np.flatnonzero(bad)[first_bad_turns][:MAX_ROWS_NAMED]
        reasons = list(
            zip(rows[:MAX_ROWS_NAMED].tolist(), samples.select(first).with_format(None)[BAD_ROW_COLUMN], strict=True)
        )
        if not drops or not counts.samples:
            raise_bad_rows(name, reasons, len(rows), total=len(dataset))
        bad_text = f"{len(rows)} of {len(dataset)} rows"
        verb = "tokenised"
        location = ""
        if is_split:
            bad_text = f"{counts.bad} turns in {len(rows)} of {len(dataset)} conversations"
            verb = "rendered"
            location = "in rows "
        logger.warning(
            "%s of the %s dataset cannot be %s and are dropped; the first are %s%s. Row %d: %s.",
            *(bad_text, name, verb, location, [row for row, _ in reasons], *reasons[0]),
        )
    if is_split and not counts.samples and not counts.left_out:
        roles = sorted({message["role"] for message in Conversation.from_row(dataset[0]).messages})
        raise ValueError(
            f"`per_turn=True` was given, and none of the {len(dataset)} conversations of the {name} dataset has a "
            f"message of the role `assistant` to train (roles of row 0: {', '.join(roles)}). Each assistant turn makes "
            "one sample, so there would be none. Rename the role, or set `per_turn=False`."
        )
    if is_split and args.process_index == 0 and not args.disable_tqdm:  # where progress bars are shown
        print(f"Conversations of the {name} dataset: {counts.line()}", file=sys.stderr)
    return counts


def without_bad_rows(dataset: Any) -> Any:
    """Return a table or stream of the rows that are not bad, without the column `BAD_ROW_COLUMN`."""
    if isinstance(dataset, IterableDataset):
        return dataset.filter(not_, input_columns=BAD_ROW_COLUMN).remove_columns(BAD_ROW_COLUMN)
    bad = bad_row_mask(dataset)
    if bad.any():
        dataset = dataset.select(np.flatnonzero(~bad))
    return dataset.remove_columns(BAD_ROW_COLUMN) if BAD_ROW_COLUMN in dataset.column_names else dataset
