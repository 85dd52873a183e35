"""Recipes, which turn one row of the user's dataset into samples: token ids and labels.

`recipe_of` chooses the recipe of a dataset by the config, and `make_samples.py` applies it to each row of a table or a
stream:

    WholeRows    makes one sample of a row, with TRL's own functions
    MaskedTurns  makes one sample of a conversation, and trains its assistant turns only (`assistant_only_loss`)
    EachTurn     makes one sample per assistant turn, rendered as if this turn were the last (`per_turn`)

A sample becomes one document of a pack. A token is trained if its label is not -100. A row may have texts in several
columns; `texts.py` decides which of them are tokenised. A row is bad if no sample can be made of it. Recipes raise an
error for a bad row. If only one turn of a row is bad, its sample has a `reason` in place of tokens.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, TypeAlias

import numpy as np
import trl
from datasets import Dataset, IterableDataset
from trl.chat_template_utils import get_training_chat_template

from ..layout import IGNORE_INDEX
from .checks import check_conversations, columns_of, has_conversations, has_images
from .conversation import COLUMNS, Conversation, Tokenizer, num_same, plain_tokenizer, with_chat_roles
from .row import MAX_ROWS_NAMED, AssistantTurnCounts, Sample, UnknownTurnError, explain_bad_row, raise_bad_rows
from .texts import struct_columns, text_columns, with_one_text, without_nulls
from .turns import TurnRule, TurnSelection, TurnSettings, has_markers

NUM_TRIED = 1000  # a stream is refused if this many rows at its beginning are all bad
# Looked up once, at import: a script may later set `trl.SFTTrainer` to our trainer, whose method calls this module
prepare_by_trl: Callable[..., Any] = trl.SFTTrainer._prepare_dataset
Row: TypeAlias = Mapping[str, Any]


class Recipe:
    """Base class of the recipes: how one row becomes samples."""

    tokenizer: Tokenizer
    chat_template: str | None = None  # replaces the tokenizer's own template
    consumes: Collection[str] = COLUMNS  # columns of the row that are not copied to its samples
    text_field: str = ""  # name of the column of plain text; empty if the recipe reads no plain text
    # What a bad row has in place of tokens and labels
    bad: ClassVar[Mapping[str, object]] = {"input_ids": np.zeros(0, np.int32), "labels": np.zeros(0, np.int64)}
    setting: ClassVar[str] = ""  # config field that trains assistant turns only; if it is set, turns are counted
    splits: ClassVar[bool] = False  # whether one row may become several samples

    def samples(self, row: Row, row_index: int) -> list[Sample]:
        """Make the samples of a row.

        Args:
            row: The columns of the row by name.
            row_index: Index of the row in its dataset.

        Raises:
            Exception: If the row is bad. Any error counts, and becomes the reason that the user reads.
        """
        raise NotImplementedError


Step: TypeAlias = tuple[Callable[[dict[str, Any]], dict[str, Any]], tuple[str, ...]]
"""One `map` call of TRL's preparation: a function that returns new columns of a row, and the columns to remove."""


@dataclass(frozen=True)
class RecordedMaps:
    """A stand-in for a dataset of one row, from which TRL's preparation is recorded.

    TRL reads the first row to choose its `map` calls. `map` records the call as a step, and iterating applies all
    recorded steps to the row.
    """

    row: Row
    steps: tuple[Step, ...] = ()
    column_names: ClassVar[None] = None  # TRL reads the first row to know the columns, as for a stream

    def map(
        self,
        function: Callable[..., dict[str, Any]],
        fn_kwargs: Mapping[str, Any] | None = None,
        remove_columns: str | list[str] | None = None,
        batched: bool = False,
    ) -> "RecordedMaps":
        """Return a copy with one more step. The arguments are those of `datasets.Dataset.map`."""
        assert not batched, "TRL maps rows one by one"
        removed = (remove_columns,) if isinstance(remove_columns, str) else tuple(remove_columns or ())
        return replace(self, steps=(*self.steps, (partial(function, **fn_kwargs or {}), removed)))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield _apply_steps(self.steps, self.row)


def _apply_steps(steps: tuple[Step, ...], row: Row) -> dict[str, Any]:
    """Return the row after all steps, as `Dataset.map` would: first columns are removed, then new ones are added."""
    row = dict(row)
    for function, removed in steps:
        row = {name: value for name, value in row.items() if name not in removed} | function(dict(row))
    return row


@dataclass(frozen=True)
class WholeRows(Recipe):
    """The recipe that makes one sample of a row, with the functions that TRL's `_prepare_dataset` maps over a dataset.

    TRL chooses its functions by the first row of the dataset. This recipe chooses them by the first good row of each
    form, so forms may be mixed. The forms are plain text, messages, and a prompt with a completion of text or messages.
    """

    tokenizer: Tokenizer
    completion_only: bool
    text_field: str
    formatting_func: Callable[[dict[str, Any]], str] | None = None
    consumes: Collection[str] = ("conversations",)  # TRL replaces this column by `messages`
    trl_version: str = trl.__version__  # part of the hash: another version of TRL may make other samples
    _steps: dict[object, tuple[Step, ...]] = field(default_factory=dict, compare=False)

    def __getstate__(self) -> dict[str, object]:
        # `datasets` hashes the pickled recipe to find its cache. The steps that are recorded so far must not change it.
        return vars(self) | {"_steps": {}}

    def samples(self, row: Row, row_index: int) -> list[Sample]:
        columns = text_columns(row, self.text_field)  # names of the columns that are tokenised
        # A `formatting_func` gets the whole row, because it may read all columns. Otherwise `with_one_text` removes the
        # texts that are not tokenised, because TRL would prefer some of them
        row = with_one_text(row, self.text_field) if self.formatting_func is None else dict(row)
        # Of a prompt and a completion, the completion decides
        has_messages = bool(columns) and isinstance(row[columns[-1]], list)
        form = (columns, has_messages)
        if form not in self._steps:
            self._steps[form] = self._steps_of(copy.deepcopy(row))  # a copy, because TRL renames keys in place
        sample = _apply_steps(self._steps[form], row)
        return [Sample.from_tokens(sample["input_ids"], sample["labels"])]

    def _steps_of(self, row: Row) -> tuple[Step, ...]:
        """Record the steps that TRL chooses for a row, and raise an error if they fail on this row."""
        recorded = RecordedMaps(row)
        if self.formatting_func is None:
            recorded = recorded.map(with_chat_roles)  # renames the roles `human` and `gpt` of `conversations`
        trainer = SimpleNamespace(  # the attributes that TRL's method reads from its trainer
            _tokenizer=plain_tokenizer(self.tokenizer), chat_template=None, completion_only_loss=self.completion_only
        )
        settings = SimpleNamespace(  # the fields that TRL's method reads from its config
            dataset_text_field=self.text_field,
            assistant_only_loss=False,
            max_length=None,
            shuffle_dataset=False,
            dataset_num_proc=None,
            use_liger_kernel=False,  # if it is True, TRL below 1.15 selects columns of the dataset
        )
        recorded = prepare_by_trl(
            trainer,
            recorded,
            self.tokenizer,
            settings,
            packing=False,
            formatting_func=self.formatting_func,
            dataset_name="",
        )
        # Try the steps now: for a bad row TRL may choose wrong steps, which must not be used for other rows of its form
        next(iter(recorded))
        return recorded.steps


@dataclass(frozen=True)
class MaskedTurns(Recipe):
    """The recipe that makes one sample of a conversation and trains its assistant turns only."""

    rule: TurnRule
    tokenizer: Tokenizer
    chat_template: str | None = None  # TRL's template for training, which replaces the tokenizer's
    completion_only: bool = True  # in rows with a prompt and a completion, turns of the prompt are not trained
    setting: ClassVar[str] = "assistant_only_loss"

    def samples(self, row: Row, row_index: int) -> list[Sample]:
        conversation = Conversation.from_row(row)
        conversation.arguments.setdefault("chat_template", self.chat_template)
        num_prompt = conversation.num_prompt if self.completion_only else 0
        selection = self.rule.select_turns(replace(conversation, num_prompt=num_prompt))
        tokens, mask = self.rule.tokens_and_mask(selection, self.tokenizer)
        # Without a trained token the row is bad, unless it has turns, and the rule excludes all of them
        if 1 not in mask and (selection.trained or not selection.counts.turns):
            raise UnknownTurnError(
                "no assistant tokens under the chat template (see its `{% generation %}` markers, "
                "`assistant_only_loss`)"
            )
        if num_prompt:
            messages = selection.conversation.messages[:num_prompt]
            prompt = selection.conversation.tokens(messages, self.tokenizer, add_generation_prompt=True)
            prompt_length = num_same(prompt, tokens)  # TRL ends the prompt at the first token that differs
            mask[:prompt_length] = [0] * prompt_length
        labels = [token if trained else IGNORE_INDEX for token, trained in zip(tokens, mask, strict=True)]
        return [Sample.from_tokens(tokens, labels, selection.counts)]


@dataclass(frozen=True)
class EachTurn(Recipe):
    """The recipe that makes one sample per trained assistant turn of a conversation.

    A conversation without a trained turn becomes one sample, in which no token is trained.
    """

    rule: TurnRule
    tokenizer: Tokenizer
    setting: ClassVar[str] = "per_turn"
    splits: ClassVar[bool] = True

    def samples(self, row: Row, row_index: int) -> list[Sample]:
        def make_turn_sample(conversation: Conversation, turn: int) -> Sample:
            tokens, labels = conversation.tokenize_turn(turn, self.tokenizer)
            if turn >= 0:  # -1 stands for the whole conversation, in which nothing is trained
                self.rule.mask_thinking(labels, conversation.messages[turn], self.tokenizer)
            return Sample.from_tokens(tokens, labels)

        selection = self.rule.select_turns(Conversation.from_row(row))
        return samples_of_turns(selection, make_turn_sample, row)


def samples_of_turns(selection: TurnSelection, make: Callable[[Conversation, int], Sample], row: Row) -> list[Sample]:
    """Make one sample per trained turn of a conversation.

    Args:
        selection: The conversation and its trained turns. Without a trained turn, one sample is made for turn -1, which
            stands for the whole conversation.
        make: Makes the sample of a turn. If it raises an error, the sample of this turn has the reason and no tokens.
        row: The row of the conversation, in which the reason of an error is looked for.
    """
    samples: list[Sample] = []
    for turn in selection.trained or [-1]:
        try:
            sample = make(selection.conversation, turn)
        except Exception as error:
            sample = Sample({}, reason=explain_bad_row(row, error))
        # The turns of a row are counted once, in the first of its samples
        counts = AssistantTurnCounts() if samples else selection.counts
        samples.append(replace(sample, turn=turn, counts=counts))
    return samples


def recipe_of(
    dataset: Dataset | IterableDataset,
    name: str,
    args: TurnSettings,
    tokenizer: Tokenizer,
    completion_only_loss: bool,
    formatting_func: Callable[[dict[str, Any]], str] | None,
) -> Recipe:
    """Choose the recipe of a dataset.

    Args:
        dataset: A table or a stream.
        name: The dataset's name in messages to the user, for example "training".
        args: The config of the trainer.
        tokenizer: The tokenizer, or the processor of a model with images.
        completion_only_loss: Whether prompts are not trained, in rows with a prompt and a completion.
        formatting_func: The user's function that returns the text of a row, as in TRL.

    Raises:
        ValueError: If every row is bad (the first `NUM_TRIED` rows of a stream), or if `per_turn` is set and the
            dataset has images or no conversations.
    """
    if formatting_func is None and args.assistant_only_loss and has_conversations(dataset):
        return MaskedTurns(TurnRule.from_args(args), tokenizer, training_template(tokenizer), completion_only_loss)
    if formatting_func is None and args.per_turn:
        # The trainer has checked the datasets that it was made with, but not one that is passed to `evaluate`
        check_conversations(dataset, name)
        if has_images(dataset):
            raise ValueError(
                f"`per_turn=True` was given, and the {name} dataset has the columns {columns_of(dataset)}, with "
                "images, and the training set has none. Its turns would become tokens without their images. Give the "
                "training set an empty column `images`, or remove the column here."
            )
        return EachTurn(TurnRule.from_args(args), tokenizer)
    recipe = WholeRows(tokenizer, completion_only_loss, args.dataset_text_field, formatting_func)
    problems: list[tuple[int, str]] = []
    structs = struct_columns(dataset.features)
    # One good row is enough to accept the dataset: further bad rows are handled when samples are made
    rows = dataset if isinstance(dataset, Dataset) else dataset.take(NUM_TRIED)
    for row_index, row in enumerate(rows):
        try:
            recipe.samples(without_nulls(row, structs), row_index)
        except Exception as error:
            problems.append((row_index, explain_bad_row(row, error, recipe.text_field)))
        else:
            return recipe
    raise_bad_rows(name, problems[:MAX_ROWS_NAMED], len(problems), total=len(problems))  # raises a ValueError


def training_template(processing_class: Tokenizer) -> str | None:
    """Return TRL's chat template with `{% generation %}` markers for this tokenizer.

    None is returned if the tokenizer's own template has markers, or if TRL knows no template with markers for it.
    """
    if has_markers(processing_class.chat_template):
        return None
    try:
        template: str | None = get_training_chat_template(processing_class)
        return template
    except ValueError:  # TRL has none: turns are then found by rendering the conversation turn by turn
        return None
