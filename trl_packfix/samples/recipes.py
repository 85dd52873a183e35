"""Recipes: from a row to its samples.

    WholeRows   one sample of the row, made by TRL's own functions
    MaskedTurns one sample of the conversation, in which assistant turns are trained (`assistant_only_loss`)
    EachTurn    one sample per assistant turn, as the chat template renders it at this turn (`per_turn`)

Where no sample can be made, a recipe raises an error, or returns the reason for a turn. `make_samples.py` applies
recipes to tables and streams.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
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

NUM_TRIED = 1000  # rows of a stream to try before it is refused for having no good row
# Bound here: a script may set `trl.SFTTrainer` to a class of ours, whose method calls this module
prepare_by_trl: Callable[..., Any] = trl.SFTTrainer._prepare_dataset
Row: TypeAlias = Mapping[str, Any]


class Recipe:
    tokenizer: Tokenizer
    chat_template: str | None = None  # in place of the tokenizer's own
    consumes: Collection[str] = COLUMNS  # the columns that a sample does not have beside what is made
    text_field: str = ""  # the column of plain text, if it is read
    # The columns of a row of which no sample is made
    bad: ClassVar[Mapping[str, object]] = {"input_ids": np.zeros(0, np.int32), "labels": np.zeros(0, np.int64)}
    setting: ClassVar[str] = ""  # by which assistant turns are trained, which are then counted
    splits: ClassVar[bool] = False  # whether a row may have several samples

    def samples(self, row: Row, number: int) -> list[Sample]:
        """The samples of a row, which has this number in its dataset. If it raises an error, the row is bad."""
        raise NotImplementedError


Step: TypeAlias = tuple[Callable[[dict[str, Any]], dict[str, Any]], tuple[str, ...]]
"""A `map` of TRL's preparation: a function of one row, and the columns that it removes."""


@dataclass(frozen=True)
class RecordedMaps:
    """Replaces a dataset of one row while TRL prepares it: `map` records a step, and iterating applies all to the row.

    TRL reads the row to choose its steps.
    """

    row: Row
    steps: tuple[Step, ...] = ()
    column_names = None  # unknown before the row is read, as for a stream

    def map(
        self,
        function: Callable[..., dict[str, Any]],
        fn_kwargs: Mapping[str, Any] | None = None,
        remove_columns: str | list[str] | None = None,
        batched: bool = False,
    ) -> "RecordedMaps":
        assert not batched, "TRL maps rows one by one"
        removed = (remove_columns,) if isinstance(remove_columns, str) else tuple(remove_columns or ())
        return replace(self, steps=(*self.steps, (partial(function, **fn_kwargs or {}), removed)))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield _apply_steps(self.steps, self.row)


def _apply_steps(steps: tuple[Step, ...], row: Row) -> dict[str, Any]:
    row = dict(row)
    for function, removed in steps:
        row = {name: value for name, value in row.items() if name not in removed} | function(dict(row))
    return row


@dataclass(frozen=True)
class WholeRows(Recipe):
    """One sample of a row, by the functions that TRL's `_prepare_dataset` would map over a dataset of such rows.

    TRL chooses them by the first row. Here they are chosen by the first good row of each form: text, messages, or
    either as prompt and completion.
    """

    tokenizer: Tokenizer
    completion_only: bool
    text_field: str
    formatting_func: Callable[[dict[str, Any]], str] | None = None
    consumes: Collection[str] = ("conversations",)  # as in TRL, which makes `messages` of them
    trl_version: str = trl.__version__  # `datasets` finds samples again only with the same functions of TRL
    _steps: dict[object, tuple[Step, ...]] = field(default_factory=dict, compare=False)

    def __reduce__(self) -> tuple[object, ...]:
        # Without the steps known so far: `datasets` hashes it to find its cache
        return WholeRows, tuple(getattr(self, each.name) for each in fields(self) if each.name != "_steps")

    def samples(self, row: Row, number: int) -> list[Sample]:
        columns = text_columns(row, self.text_field)
        row = with_one_text(row, self.text_field) if self.formatting_func is None else dict(row)
        form = columns, bool(columns) and isinstance(row[columns[-1]], list)
        if form not in self._steps:
            self._steps[form] = self._steps_of(copy.deepcopy(row))  # TRL renames keys in place
        sample = _apply_steps(self._steps[form], row)
        return [Sample.of(sample["input_ids"], sample["labels"])]

    def _steps_of(self, row: Row) -> tuple[Step, ...]:
        recorded = RecordedMaps(row)
        if self.formatting_func is None:
            recorded = recorded.map(with_chat_roles)
        trainer = SimpleNamespace(  # what TRL's method reads of its trainer
            _tokenizer=plain_tokenizer(self.tokenizer), chat_template=None, completion_only_loss=self.completion_only
        )
        settings = SimpleNamespace(  # and of its config
            dataset_text_field=self.text_field,
            assistant_only_loss=False,
            max_length=None,
            shuffle_dataset=False,
            dataset_num_proc=None,
            use_liger_kernel=False,  # TRL below 1.15 would select columns of the dataset for it
        )
        recorded = prepare_by_trl(trainer, recorded, self.tokenizer, settings, False, self.formatting_func, "")
        next(iter(recorded))  # if the row is bad, other steps may be those of its form
        return recorded.steps


@dataclass(frozen=True)
class MaskedTurns(Recipe):
    """One sample of a conversation in which assistant turns are trained."""

    rule: TurnRule
    tokenizer: Tokenizer
    chat_template: str | None = None  # TRL's template for training, in place of the tokenizer's
    completion_only: bool = True  # turns of a prompt are not trained, in rows with a prompt and a completion
    setting: ClassVar[str] = "assistant_only_loss"

    def samples(self, row: Row, number: int) -> list[Sample]:
        conversation = Conversation.from_row(row)
        conversation.arguments.setdefault("chat_template", self.chat_template)
        num_prompt = conversation.first if self.completion_only else 0
        chosen = self.rule.select_turn(replace(conversation, first=num_prompt))
        tokens, mask = self.rule.masked(chosen, self.tokenizer)
        if 1 not in mask and (chosen.trained or not chosen.counts.turns):
            raise UnknownTurnError(
                "no assistant tokens under the chat template (see its `{% generation %}` markers, "
                "`assistant_only_loss`)"
            )
        if num_prompt:
            messages = chosen.conversation.messages[:num_prompt]
            prompt = chosen.conversation.tokens(messages, self.tokenizer, add_generation_prompt=True)
            first = num_same(prompt, tokens)  # as TRL
            mask[:first] = [0] * first
        labels = [token if bit else IGNORE_INDEX for token, bit in zip(tokens, mask, strict=True)]
        return [Sample.of(tokens, labels, chosen.counts)]


@dataclass(frozen=True)
class EachTurn(Recipe):
    """One sample per assistant turn of a conversation that is trained; without such a turn one, of which none is."""

    rule: TurnRule
    tokenizer: Tokenizer
    setting: ClassVar[str] = "per_turn"
    splits: ClassVar[bool] = True

    def samples(self, row: Row, number: int) -> list[Sample]:
        def make(conversation: Conversation, turn: int) -> Sample:
            tokens, labels = conversation.sample(turn, self.tokenizer)
            if turn >= 0:
                self.rule.mask_thinking(labels, conversation.messages[turn], self.tokenizer)
            return Sample.of(tokens, labels)

        return samples_of_turns(self.rule.select_turn(Conversation.from_row(row)), make, row)


def samples_of_turns(chosen: TurnSelection, make: Callable[[Conversation, int], Sample], row: Row) -> list[Sample]:
    """A sample for each trained turn of a conversation, or one for turn -1 without any."""
    samples: list[Sample] = []
    for turn in chosen.trained or [-1]:
        try:
            made = make(chosen.conversation, turn)
        except Exception as error:
            made = Sample({}, reason=explain_bad_row(row, error))
        samples.append(replace(made, turn=turn, counts=AssistantTurnCounts() if samples else chosen.counts))
    return samples


def recipe_of(
    dataset: Dataset | IterableDataset,
    name: str,
    args: TurnSettings,
    tokenizer: Tokenizer,
    completion_only_loss: bool,
    formatting_func: Callable[[dict[str, Any]], str] | None,
) -> Recipe:
    if formatting_func is None and args.assistant_only_loss and has_conversations(dataset):
        return MaskedTurns(TurnRule.of(args), tokenizer, training_template(tokenizer), completion_only_loss)
    if formatting_func is None and args.per_turn:
        check_conversations(dataset, name)  # that of `evaluate` was not given before
        if has_images(dataset):
            raise ValueError(
                f"`per_turn=True` was given, and the {name} dataset has the columns {columns_of(dataset)}, with "
                "images, and the training set has none. Its turns would become tokens without their images. Give the "
                "training set an empty column `images`, or remove the column here."
            )
        return EachTurn(TurnRule.of(args), tokenizer)
    recipe = WholeRows(tokenizer, completion_only_loss, args.dataset_text_field, formatting_func)
    problems: list[tuple[int, str]] = []
    structs = struct_columns(dataset.features)
    for number, row in enumerate(dataset if isinstance(dataset, Dataset) else dataset.take(NUM_TRIED)):
        try:
            recipe.samples(without_nulls(row, structs), number)
        except Exception as error:
            problems.append((number, explain_bad_row(row, error, recipe.text_field)))
        else:
            return recipe
    raise_bad_rows(name, problems[:MAX_ROWS_NAMED], len(problems), total=len(problems))


def training_template(processing_class: Tokenizer) -> str | None:
    """TRL's template with markers for this tokenizer; None if its own has markers, or if TRL has none for it."""
    if has_markers(processing_class.chat_template):
        return None
    try:
        template: str | None = get_training_chat_template(processing_class)
        return template
    except ValueError:  # TRL knows no template like this one: its turns are found one by one
        return None
