"""Render a conversation with the chat template: the whole of it, or one assistant turn as generation sees it.

`Conversation.from_row` reads a row of the user's dataset. A *recipe* (`recipes.py`, and `features/images/measures.py`)
makes samples of a row. Recipes, and the rule that selects the trained turns (`turns.py`), render the conversation.

Templates that strip earlier thinking (Qwen3, GPT-OSS) render a conversation anew at every assistant turn. What the
model saw when it wrote a turn is then not the beginning of the whole conversation. The sample of a turn is:

    prompt      template(messages before the turn, add_generation_prompt=True)     not trained
    completion  template(messages up to the turn), without the prompt              trained

TRL makes the same tokens of a row with the prompt `messages[:k]` and the completion `[messages[k]]`, as long as the
text of the prompt is the beginning of the text of prompt and completion together. Some templates render the history
differently once the turn follows: GPT-OSS drops the thought of a tool call when an answer follows. TRL then trains the
turn after a context that generation never sees. Here the prompt stays as generation sees it, and the completion is the
text that the rendered conversation has after the generation prompt. A turn that does not begin where the generation
prompt ends is refused.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase, ProcessorMixin
from trl.data_utils import maybe_convert_to_chatml, prepare_multimodal_messages

from ..layout import IGNORE_INDEX
from .row import UnknownTurnError
from .texts import is_conversation, with_one_text

# The columns of a row that are read
COLUMNS = (
    "messages",
    "conversations",
    "prompt",
    "completion",
    "tools",
    "chat_template_kwargs",
)
NUM_SHOWN = 60  # an error message shows this many characters of a rendered turn
HISTORY_END = "endofthehistory8f1c"  # marks where the history ends; plain letters, which no template changes
ROLES = {"human": "user", "gpt": "assistant"}  # roles in `conversations`, and their names in chat templates
Message: TypeAlias = dict[str, Any]
Tokenizer: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin


@dataclass(frozen=True)
class Conversation:
    """The messages of a row, and the further arguments of its chat template."""

    messages: list[Message]  # with `role` and `content`, in the form that TRL gives to the template
    num_prompt: int  # number of messages in the row's prompt; assistant turns among them are not trained
    arguments: dict[str, Any]  # `tools`, and the row's `chat_template_kwargs`

    @classmethod
    def from_row(cls, row: Mapping[str, Any], images: Sequence[object] = ()) -> "Conversation":
        """Read a row with `messages`, `conversations`, or `prompt` and `completion`, as TRL reads it.

        Args:
            row: The columns of the row by name. It is not changed.
            images: The images of the row, in order. Each replaces its placeholder in the messages. If the messages are
                plain text, all images are put into the first message of the user.

        Raises:
            UnknownTurnError: If the text of the row is not a list of messages.
        """
        # A row may have texts in several columns. Keep those that TRL tokenises: prompt and completion if the row has
        # both, else `conversations`, else `messages`
        row = with_one_text({name: row[name] for name in COLUMNS if name in row})
        if not is_conversation(row):
            raise UnknownTurnError("the text of the row is no list of messages, so it has no assistant turn")
        # A copy, because TRL renames keys in place, and the rows of a stream may be objects of the user
        row = maybe_convert_to_chatml(with_chat_roles(copy.deepcopy(row)))
        tools = row.get("tools")
        arguments = {"tools": json.loads(tools) if isinstance(tools, str) else tools}
        arguments.update(row.get("chat_template_kwargs") or ())
        num_prompt = len(row["prompt"]) if "prompt" in row else 0
        messages = row["prompt"] + row["completion"] if "prompt" in row else row["messages"]
        if images:
            messages = prepare_multimodal_messages(messages, list(images))
        return cls(messages, num_prompt, arguments)

    @property
    def turns(self) -> list[int]:
        """Indices of the messages that the assistant wrote, without messages of the row's prompt."""
        return [i for i in range(self.num_prompt, len(self.messages)) if self.messages[i]["role"] == "assistant"]

    def text(self, messages: list[Message], tokenizer: Tokenizer, add_generation_prompt: bool = False) -> str:
        """Render messages as text with the chat template and the arguments of this conversation."""
        rendered = self._rendered(messages, tokenizer, tokenize=False, add_generation_prompt=add_generation_prompt)
        return str(rendered[0])

    def tokens(self, messages: list[Message], tokenizer: Tokenizer, **kwargs: bool) -> list[int]:
        """Render messages as T token ids with the chat template and the arguments of this conversation."""
        return list(self._rendered(messages, tokenizer, tokenize=True, return_dict=True, **kwargs)["input_ids"][0])

    def tokens_and_mask(self, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
        """Return the T token ids of all messages, and T ones and zeros.

        A token has a 1 if the `{% generation %}` markers of the template enclose it, as in TRL.
        """
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        outputs = self._rendered(self.messages, tokenizer, **options)
        return list(outputs["input_ids"][0]), list(outputs["assistant_masks"][0])

    def tokenize_turn(self, turn: int, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
        """Return the token ids of one assistant turn with its history, and labels that are -100 before the turn.

        Args:
            turn: Index of the message; -1 for the whole conversation with labels of -100 only.
            tokenizer: The tokenizer, or the processor of a model with images.

        Raises:
            ValueError: If the rendered turn does not begin where the prompt that generation sees ends.
        """
        if turn < 0:
            tokens = self.tokens(self.messages, tokenizer)
            return tokens, [IGNORE_INDEX] * len(tokens)
        prompt, tokens = self._render_turn(turn, tokenizer, as_tokens=True)
        return tokens, [IGNORE_INDEX] * len(prompt) + tokens[len(prompt) :]

    def row_of_turn(self, turn: int, processor: ProcessorMixin) -> dict[str, Any]:
        """Return a row in TRL's form for one assistant turn with images: `prompt` and `completion` as text, `images`.

        Args:
            turn: Index of the message; -1 for the whole conversation as prompt, with an empty completion.
            processor: The processor of the model.

        Raises:
            ValueError: If the turn has an image, is rendered as nothing, or does not begin where its prompt ends.
        """
        if turn < 0:
            prompt = self.text(self.messages, processor)
            return {"prompt": prompt, "completion": "", "images": _images_of_messages(self.messages)}
        if _images_of_messages([self.messages[turn]]):
            raise ValueError(
                f"`messages[{turn}]` is an assistant turn with an image, and a model that is trained on tokens writes "
                "none"
            )
        prompt, text = self._render_turn(turn, processor, as_tokens=False)
        if text == prompt:
            raise ValueError(f"the template renders nothing of `messages[{turn}]`")
        return {
            "prompt": prompt,
            "completion": text[len(prompt) :],
            "images": _images_of_messages(self.messages[:turn]),
        }

    def _rendered(self, messages: list[Message], tokenizer: Tokenizer, **kwargs: Any) -> Any:
        """Apply the chat template to messages, as a batch of one conversation."""
        if isinstance(tokenizer, ProcessorMixin):
            # As in TRL, texts become lists of parts for the templates of processors. Images are in the messages already
            messages = prepare_multimodal_messages(messages)
        # A batch of one conversation, because an empty list of messages is an error outside a batch
        return tokenizer.apply_chat_template([messages], **kwargs, **self.arguments)

    def _render_turn(self, turn: int, tokenizer: Tokenizer, *, as_tokens: bool) -> Any:
        """Return the prompt that generation sees, and prompt and turn together; both as token ids or both as text.

        Raises:
            ValueError: If the rendered turn does not begin where the prompt ends.
        """
        render: Any = self.tokens if as_tokens else self.text
        plain = plain_tokenizer(tokenizer)
        prompt = render(self.messages[:turn], tokenizer, add_generation_prompt=True)
        prompt_and_turn = render(self.messages[: turn + 1], tokenizer)
        if prompt_and_turn[: len(prompt)] != prompt:
            # The template renders the history differently before this turn: join the prompt and the turn as texts. The
            # tokens of the joined text may differ from those of the prompt at the seam, which is refused below
            text = self._text_of_turn(turn, tokenizer)
            if text:
                prompt_and_turn = plain(text, add_special_tokens=False)["input_ids"] if as_tokens else text
        if prompt_and_turn[: len(prompt)] != prompt:
            num_equal = num_same(prompt, prompt_and_turn)
            prompt_end = prompt[num_equal:]
            continuation = prompt_and_turn[num_equal:]
            if as_tokens:
                prompt_end = plain.decode(prompt_end)
                continuation = plain.decode(continuation)
            raise ValueError(
                f"the template ends the prompt of `messages[{turn}]` with {prompt_end[:NUM_SHOWN]!r}, and with this "
                f"turn it continues with {continuation[:NUM_SHOWN]!r} there"
            )
        return prompt, prompt_and_turn

    def _text_of_turn(self, turn: int, tokenizer: Tokenizer) -> str | None:
        """Join the text of the prompt that generation sees and the text of the turn.

        The history is rendered a second time with a mark at the end of its last message. What follows the mark, in the
        prompt and in the conversation with the turn, does not depend on how the history is rendered. For example, if
        `<bot>` follows the mark in the prompt, and `<bot>Yes<end>` in the conversation, `Yes<end>` is added to the
        prompt.

        Returns:
            The joined text; None if the turn does not begin where the prompt ends, or if the last message has no text.
        """
        history = self.messages[:turn]
        answer = self.messages[turn]
        content = history[-1].get("content") if history else None
        if isinstance(content, str):
            content = content + HISTORY_END
        elif content and content[-1]["type"] == "text":
            content = [*content[:-1], content[-1] | {"text": content[-1]["text"] + HISTORY_END}]
        else:
            return None
        marked = [*history[:-1], history[-1] | {"content": content}]
        prompt = self.text(history, tokenizer, add_generation_prompt=True)
        prompt_and_turn = self.text([*history, answer], tokenizer)
        prompt_end = self.text(marked, tokenizer, add_generation_prompt=True).rpartition(HISTORY_END)[2]
        conversation_end = self.text([*marked, answer], tokenizer).rpartition(HISTORY_END)[2]
        # A template may cut a text or write it twice. The mark must not have changed what follows it
        is_unchanged = prompt.endswith(prompt_end) and prompt_and_turn.endswith(conversation_end)
        if not is_unchanged or not conversation_end.startswith(prompt_end):
            return None
        return prompt + conversation_end[len(prompt_end) :]


def with_chat_roles(row: dict[str, Any]) -> dict[str, Any]:
    """Rename the roles in the column `conversations` of a row: `human` to `user`, `gpt` to `assistant`.

    TRL renames the keys and keeps the names of the roles. Most chat templates know `user` and `assistant`, and write
    `human` and `gpt` into the text. Messages are copied, because the row may be an object of the user.
    """
    messages = row.get("conversations")
    if not isinstance(messages, list):
        return row  # the row has another form, or it is bad and is refused later
    return row | {"conversations": [_with_chat_role(m) if isinstance(m, dict) else m for m in messages]}


def _with_chat_role(message: Message) -> Message:
    """Return a copy of a message whose role has the name that chat templates know."""
    role = message.get("from")
    return message | ({"from": ROLES[role]} if isinstance(role, str) and role in ROLES else {})


def plain_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a processor; a tokenizer is returned as it is."""
    return tokenizer.tokenizer if isinstance(tokenizer, ProcessorMixin) else tokenizer


def images_of(row: Mapping[str, Any]) -> list[Any]:
    """Return the images of a row of the dataset; [] if it has none."""
    images = [row["image"]] if "image" in row else row.get("images")
    return [image for image in images or [] if image is not None]


def _images_of_messages(messages: Sequence[Message]) -> list[object]:
    """Return the images that the messages contain, in order."""
    contents = [message.get("content") for message in messages]
    content_parts = (entry for content in contents if isinstance(content, list) for entry in content)
    return [entry["image"] for entry in content_parts if entry.get("image") is not None]


def num_same(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the common beginning of two sequences."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
