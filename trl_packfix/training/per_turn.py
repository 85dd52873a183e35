"""Split the conversations of a dataset into one sample per assistant turn, and count them (`per_turn=True`)."""

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import Dataset, Features, IterableDataset, Value
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from trl.data_utils import get_dataset_column_names

from ..compat import main_process_first
from ..data.cache_files import Cached
from ..data.dataset_checks import check_rows
from ..data.image_rows import CONVERSATION, GROWS, LEFT_OUT, TURN, ImageRows, RowProcessor, has_images, measure
from ..data.masks import TurnRule
from ..data.reader import BAD_ROW, TokenReader, bad_rows
from ..data.turns import COLUMNS, Conversation, TurnCounts, check_conversations
from .bad_rows import NUM_SHOWN, TOKENS, reason, refuse, refuse_row_of_stream, without_bad_rows
from .config import SFTConfig
from .messages import NUM_OF_STREAM, say_if_turns_do_not_end

logger = logging.getLogger(__name__)

NUMBERS = CONVERSATION, TURN, LEFT_OUT
NUM_AT_ONCE = 16  # conversations in memory: their samples have many times their tokens
NUM_COMPARED = 100  # conversations in which neighbouring turns are compared


def check_per_turn(args: SFTConfig, train_dataset: Any, eval_dataset: Any) -> None:
    """Refuse datasets without conversations, before the model is loaded. Does nothing without `per_turn`.

    Raises:
        ValueError: a dataset without rows, or what `check_conversations` refuses.
    """
    if not args.per_turn:
        return
    eval_sets = eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}
    for name, dataset in [("train", train_dataset), *eval_sets.items()]:
        if dataset is not None:
            check_rows(dataset, name)
            check_conversations(dataset, name)


def split_turns(
    dataset: Dataset | IterableDataset,
    name: str,
    args: SFTConfig,
    *,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin,
    marks: bool,
    is_training_set: bool,
) -> tuple[Dataset | IterableDataset, TurnCounts | None]:
    """One tokenised row per assistant turn, with the other columns of its conversation; and the counts of a table.

    Args:
        name: of the dataset, for messages.
        marks: with `bad_rows="drop"`, keep turns that cannot be rendered as rows without tokens, with the reason in the
            column `BAD_ROW`, so that they are counted.
        is_training_set: whether to say that turns do not end, or that the template strips nothing.

    Raises:
        ValueError: rows are no conversations, or have images; turns cannot be rendered (`bad_rows="raise"`), or no
            turn can; no conversation has a turn.
    """
    check_conversations(dataset, name)  # that of `evaluate` was not given before
    columns = get_dataset_column_names(dataset)
    if has_images(dataset):
        raise ValueError(
            f"`per_turn=True` was given, and the {name} dataset has the columns {columns}, with images, and the "
            "training set has none. Its turns would become tokens without their images. Give the training set an empty "
            "column `images`, or remove the column here."
        )
    others = [column for column in columns if column not in COLUMNS]
    kwargs: dict[str, Any] = {"tokenizer": processing_class, "others": others, "rule": TurnRule.of(args)}
    drops = args.bad_rows == "drop"
    if isinstance(dataset, IterableDataset):
        kwargs |= {"name": name, "drops": drops}
        dataset = dataset.map(
            _rows_of_stream, with_indices=True, batched=True, batch_size=1, fn_kwargs=kwargs, remove_columns=columns
        )
        if is_training_set:
            say_if_turns_do_not_end(dataset.take(NUM_OF_STREAM), name, processing_class, setting="per_turn")
        return (without_bad_rows(dataset) if drops and not marks else dataset), None
    if dataset.format["type"] == "custom":
        return dataset, None  # TRL refuses a transform
    numbers = dict.fromkeys(NUMBERS, Value("int64"))
    with main_process_first():
        samples = dataset.map(
            Cached(_rows),
            with_indices=True,
            batched=True,
            batch_size=NUM_AT_ONCE,
            fn_kwargs=kwargs,
            remove_columns=columns,
            features=Features({column: dataset.features[column] for column in others} | TOKENS | numbers),
            num_proc=args.dataset_num_proc,
            desc=f"Tokenizing each assistant turn of {name} dataset",
        )
    counts = _counted(dataset, samples, name, args=args, drops=drops)
    if is_training_set:
        say_if_turns_do_not_end(samples, name, processing_class, setting="per_turn")
        reader = TokenReader(samples.select(_first_conversations(samples)))
        _say_if_nothing_is_stripped(samples, name, reader.lengths, begins=lambda i: _begins(reader, i))
    samples = samples.remove_columns(list(numbers))
    return (samples if marks and drops else without_bad_rows(samples)), counts


def measure_turns(
    dataset: Dataset, process: RowProcessor, name: str, *, args: SFTConfig, drops: bool, is_training_set: bool
) -> ImageRows:
    """The documents of conversations with images, one per assistant turn.

    Args:
        drops: turns that cannot be rendered stay as documents without tokens, so that they are counted.
        is_training_set: as in `split_turns`.

    Raises:
        ValueError: as `split_turns`.
    """
    check_conversations(dataset, name)
    rule = TurnRule.of(args)
    with main_process_first():
        measures = measure(dataset, process, name, num_proc=args.dataset_num_proc, drops=True, rule=rule)
    counts = _counted(dataset, measures, name, args=args, drops=drops)
    reader = ImageRows(dataset, process, measures, turns=counts, rule=rule)
    if is_training_set:
        trained = np.flatnonzero(measures.with_format("arrow")["trained"].to_numpy())[:1].tolist()
        first = [reader.read(row, 0, int(reader.lengths[row])) for row in trained]
        say_if_turns_do_not_end(first, name, process.processor, setting="per_turn")
        grows = measures.with_format("arrow")[GROWS].to_numpy(zero_copy_only=False)
        _say_if_nothing_is_stripped(measures, name, reader.lengths, begins=lambda i: bool(grows[i + 1]))
    return reader


def _rows(
    batch: Any,
    indices: list[int],
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
    *,
    others: list[str],
    rule: TurnRule,
) -> dict[str, list[Any]]:
    """The samples of some conversations, as columns: one row per assistant turn, or one for a conversation without."""
    columns: dict[str, list[Any]] = {name: [] for name in (*others, *TOKENS, *NUMBERS)}
    for i, values in zip(indices, zip(*batch.values(), strict=True), strict=True):
        row = dict(zip(batch.keys(), values, strict=True))
        for turn, sample in _samples(row, tokenizer, rule):
            sample_row = {column: row[column] for column in others} | sample | {CONVERSATION: i, TURN: turn}
            for column, value in sample_row.items():
                columns[column].append(value)
    return columns


def _samples(
    row: dict[str, Any], tokenizer: PreTrainedTokenizerBase | ProcessorMixin, rule: TurnRule
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Turn and sample, -1 for a whole conversation; a bad one has no tokens, and the reason in the column `BAD_ROW`."""
    try:
        conversation, turns, counts = rule.choose(Conversation.from_row(row))
        turns = turns or [-1]
    except Exception as error:
        yield -1, _columns([], [], reason(row, error, text_field="")) | {LEFT_OUT: 0}
        return
    for turn in turns:
        left_out = {LEFT_OUT: counts.context + counts.earlier if turn == turns[0] else 0}
        try:
            sample = conversation.untrained(tokenizer) if turn < 0 else conversation.sample(turn, tokenizer)
            if turn >= 0:
                rule.mask_thinking(sample["labels"], conversation.messages[turn], tokenizer)
        except Exception as error:
            yield turn, _columns([], [], reason(row, error, text_field="")) | left_out
        else:
            yield turn, _columns(sample["input_ids"], sample["labels"]) | left_out


def _columns(tokens: list[int], labels: list[int], why: str = "") -> dict[str, Any]:
    # Arrays, because lists of Python's integers would need many times the memory
    return {"input_ids": np.array(tokens, np.int32), "labels": np.array(labels, np.int64), BAD_ROW: why}


def _rows_of_stream(batch: Any, indices: list[int], name: str, *, drops: bool, **kwargs: Any) -> dict[str, list[Any]]:
    columns = _rows(batch, indices, **kwargs)
    for column in NUMBERS:
        del columns[column]
    for column in ("input_ids", "labels"):
        columns[column] = [values.tolist() for values in columns[column]]
    if drops:
        return columns
    for why in columns.pop(BAD_ROW):
        if why:
            refuse_row_of_stream(name, indices[0], why)
    return columns


def _counted(dataset: Dataset, samples: Dataset, name: str, *, args: SFTConfig, drops: bool) -> TurnCounts:
    """Count the samples and say how many there are, and refuse or name the turns that cannot be rendered."""
    bad = bad_rows(samples)
    assert bad is not None  # `_rows` makes the column
    conversations, turns = (_numbers(samples, column) for column in (CONVERSATION, TURN))
    counts = TurnCounts(
        conversations=len(dataset),
        samples=int((~bad & (turns >= 0)).sum()),
        without_turn=int((~bad & (turns < 0)).sum()),
        bad=int(bad.sum()),
        left_out=int(_numbers(samples, LEFT_OUT).sum()),
    )
    if counts.bad:
        rows, where = np.unique(conversations[bad], return_index=True)
        first = np.flatnonzero(bad)[where][:NUM_SHOWN]
        reasons = list(zip(rows[:NUM_SHOWN].tolist(), samples.select(first).with_format(None)[BAD_ROW], strict=True))
        if not drops or not counts.samples:
            refuse(name, reasons, len(rows), total=len(dataset))
        logger.warning(
            "%d turns in %d of %d conversations of the %s dataset cannot be rendered and are dropped; the first are in "
            "rows %s. Row %d: %s.",
            *(counts.bad, len(rows), len(dataset), name, [row for row, _ in reasons], *reasons[0]),
        )
    if not counts.samples and not counts.left_out:
        roles = sorted({message["role"] for message in Conversation.from_row(dataset[0]).messages})
        raise ValueError(
            f"`per_turn=True` was given, and none of the {len(dataset)} conversations of the {name} dataset has a "
            f"message of the role `assistant` to train (roles of row 0: {', '.join(roles)}). Each assistant turn makes "
            "one sample, so there would be none. Rename the role, or set `per_turn=False`."
        )
    if args.process_index == 0 and not args.disable_tqdm:
        print(f"Conversations of the {name} dataset: {counts.line()}", file=sys.stderr)
    return counts


def _numbers(samples: Dataset, column: str) -> np.ndarray:
    return samples.select_columns(column).with_format("arrow")[:][column].to_numpy()


def _first_conversations(samples: Dataset) -> range:
    """The rows of those in which neighbouring turns are compared."""
    return range(int(np.searchsorted(_numbers(samples, CONVERSATION), NUM_COMPARED)))


def _begins(reader: TokenReader, i: int) -> bool:
    """Whether row i is the beginning of row i + 1."""
    length = int(reader.lengths[i])
    one, other = (reader.read(row, 0, min(length, int(reader.lengths[row])))["input_ids"] for row in (i, i + 1))
    return np.array_equal(one, other)


def _say_if_nothing_is_stripped(
    samples: Dataset, name: str, lengths: npt.NDArray[np.int64], *, begins: Callable[[int], bool]
) -> None:
    """Warn if, in the first conversations, every sample is the beginning of the next: then `per_turn` gives nothing.

    Args:
        begins: whether sample i is the beginning of sample i + 1.
    """
    rows = _first_conversations(samples)
    conversations, lengths = _numbers(samples, CONVERSATION)[rows], lengths[rows]
    same = (conversations[1:] == conversations[:-1]) & (lengths[1:] > 0) & (lengths[:-1] > 0)
    pairs = np.flatnonzero(same).tolist()
    if pairs and all(begins(i) for i in pairs):
        last = np.append(conversations[1:] != conversations[:-1], True)
        logger.warning(
            "`per_turn=True` was given, and the chat template renders each turn as the beginning of the next in all of "
            "the first %d conversations of the %s dataset. Their samples have %.1f times the tokens of the "
            "conversations and train the same answers. Set `per_turn=False` and `assistant_only_loss=True`, if all "
            "conversations are like this.",
            *(len(np.unique(conversations)), name, lengths.sum() / lengths[last].sum()),
        )
