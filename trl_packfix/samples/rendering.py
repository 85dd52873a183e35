"""Render rows as text exactly as training does, to prove that all texts of a dataset are trained (`data_proof.py`).

A `Rendering` has the settings of a trainer that decide how a row becomes text: the chat template, or the user's
`formatting_func`. It reads a row as a `Conversation`, and renders the conversation. `marks.py` puts a mark, an unusual
string, into each text of a conversation. The proof then looks for the marks in the rendered text.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from .conversation import Conversation, Message, Tokenizer, images_of
from .recipes import training_template
from .text_kinds import messages_of_columns
from .turns import TurnSettings

MOST_TURNS = 50  # turns of a row that are rendered one by one
FormattingFunction: TypeAlias = Callable[[dict[str, Any]], str]


@dataclass(frozen=True)
class FormattedRow(Conversation):
    """A row whose text is made by a function of the user.

    All its columns are held as messages, so that `marks.py` can mark them. The messages of the row follow a first
    message, which has all other columns of the row (`messages_of_columns`):

        row        {"id": 7, "messages": [first, second]}
        messages   [{"id": 7}, first, second]
    """

    messages_column: str  # name of the column of messages; empty if the row has none
    formatting_func: FormattingFunction

    def text(self, messages: list[Message], tokenizer: Tokenizer, add_generation_prompt: bool = False) -> str:
        row, *messages = copied(messages)  # a copy, because the function may change its argument
        if self.messages_column:
            row = row | {self.messages_column: messages}
        return str(self.formatting_func(row))


@dataclass(frozen=True)
class Rendering:
    """The settings that decide how rows become text, and which of their messages are trained."""

    tokenizer: Tokenizer
    chat_template: str | None = None  # replaces the tokenizer's own template
    text_field: str = "text"  # name of the column of plain text
    train_key: str | None = "weight"  # key of messages whose value 0 excludes a message from training
    trains_assistant: bool = False  # whether only messages of the assistant are trained
    per_turn: bool = False  # whether each turn of the assistant is a sample
    needs_assistant: bool = False  # whether a row without a message of the assistant is refused
    formatting_func: FormattingFunction | None = None  # the user's function that makes the text of a row

    @classmethod
    def from_args(
        cls, args: TurnSettings, tokenizer: Tokenizer, formatting_func: FormattingFunction | None = None
    ) -> "Rendering":
        """Read the settings from the config of the trainer."""
        return cls(
            tokenizer,
            # TRL's template with markers, with which the assistant's turns are found
            training_template(tokenizer) if args.assistant_only_loss and formatting_func is None else None,
            args.dataset_text_field,
            args.message_train_key,
            trains_assistant=args.assistant_only_loss or args.per_turn,
            per_turn=args.per_turn,
            needs_assistant=args.assistant_only_loss and args.bad_rows == "raise",
            formatting_func=formatting_func,
        )

    @property
    def name(self) -> str:
        """What makes the text of a row, for messages to the user."""
        return "the chat template" if self.formatting_func is None else "`formatting_func`"

    def conversation(self, row: dict[str, Any]) -> Conversation:
        """Return the messages of a row with the arguments with which training renders them.

        With `per_turn`, messages behind the last turn are omitted, because they are in no sample, and so are messages
        behind turn number `MOST_TURNS`.
        """
        if self.formatting_func is not None:
            messages, messages_column = messages_of_columns(row)
            return FormattedRow(
                messages,
                num_prompt=0,  # no message is a prompt
                arguments={},
                messages_column=messages_column,
                formatting_func=self.formatting_func,
            )
        conversation = Conversation.from_row(row, images_of(row))
        conversation.arguments.pop("sanitize_control_tokens", None)  # it changes tokens, not the text
        if self.chat_template is not None:
            conversation.arguments.setdefault("chat_template", self.chat_template)
        # `turns` are the indices of the messages that are assistant turns
        if self.per_turn and conversation.turns:
            last_turn = conversation.turns[:MOST_TURNS][-1]
            conversation = replace(conversation, messages=conversation.messages[: last_turn + 1])
        return conversation

    def text(self, conversation: Conversation) -> str:
        """Return the text that is tokenised: the samples of the conversation, one after the other.

        With `per_turn`, the sample of a turn is the conversation up to this turn, rendered as if nothing followed.
        """
        messages = conversation.messages
        turns = conversation.turns if self.per_turn else []
        # Without turns there is one sample, the whole conversation
        stops = [turn + 1 for turn in turns] or [len(messages)]
        return "\n".join(conversation.text(messages[:stop], self.tokenizer) for stop in stops)

    def text_or_none(self, conversation: Conversation) -> str | None:
        """Return the text that is tokenised; None if it cannot be rendered."""
        try:
            return self.text(conversation)
        except Exception:  # templates and functions of the user raise errors of any type
            return None


def copied(value: Any) -> Any:
    """Copy nested lists and dictionaries. Images and other values in them are not copied."""
    if isinstance(value, dict):
        return {key: copied(element) for key, element in value.items()}
    return [copied(element) for element in value] if isinstance(value, list) else value
