"""A conversation through the chat template: as a whole, and as generation sees it at one assistant turn.

Templates that strip earlier thinking (Qwen3, GPT-OSS) render a conversation anew at every assistant turn. What the
model saw when it wrote a turn is then not the beginning of the whole conversation. The sample of a turn is:

    prompt      template(messages before the turn, add_generation_prompt=True)     not trained
    completion  what template(messages up to the turn) has after the prompt        trained

This is how TRL tokenises a row with the prompt `messages[:k]` and the completion `[messages[k]]`, if the prompt is the
beginning of both together. Some templates render the history in another way once the turn is there: GPT-OSS drops the
thought of a tool call when an answer follows. Then TRL trains after another context than generation sees. Here the
prompt stays as generation sees it, and the completion is what the rendered conversation has after the generation
prompt. A turn that does not begin where the generation prompt ends is refused.
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

COLUMNS = ("messages", "conversations", "prompt", "completion", "tools", "chat_template_kwargs")  # of a conversation
NUM_SHOWN = 60  # characters of a rendered turn that a message shows
MARK = "endofthehistory8f1c"  # plain letters, which no template changes
ROLES = {"human": "user", "gpt": "assistant"}
Message: TypeAlias = dict[str, Any]
Tokenizer: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin


@dataclass(frozen=True)
class Conversation:
    """The messages of a row, and what its chat template gets beside them."""

    messages: list[Message]  # with `role` and `content`, in the form that TRL gives to the template
    first: int  # number of messages in the prompt of the row, whose assistant turns are not trained
    arguments: dict[str, Any]  # `tools`, and the row's `chat_template_kwargs`

    @classmethod
    def from_row(cls, row: Mapping[str, Any], images: Sequence[object] = ()) -> "Conversation":
        """Read a row with `messages`, `conversations`, or `prompt` and `completion`, as TRL reads it.

        Each image is put into its message: that with its placeholder or, if messages are plain text, the user's first.
        """
        row = with_one_text({name: row[name] for name in COLUMNS if name in row})
        if not is_conversation(row):
            raise UnknownTurnError("the text of the row is no list of messages, so it has no assistant turn")
        # TRL renames keys in place, and the rows of a stream may be objects of the user
        row = maybe_convert_to_chatml(with_chat_roles(copy.deepcopy(row)))
        tools = row.get("tools")
        arguments = {"tools": json.loads(tools) if isinstance(tools, str) else tools}
        arguments.update(row.get("chat_template_kwargs") or ())
        first = len(row["prompt"]) if "prompt" in row else 0
        messages = row["prompt"] + row["completion"] if "prompt" in row else row["messages"]
        return cls(prepare_multimodal_messages(messages, list(images)) if images else messages, first, arguments)

    @property
    def turns(self) -> list[int]:
        """Indices of the messages that the assistant wrote, without those of the prompt."""
        return [i for i in range(self.first, len(self.messages)) if self.messages[i]["role"] == "assistant"]

    def text(self, messages: list[Message], tokenizer: Tokenizer, add_generation_prompt: bool = False) -> str:
        """Messages through the chat template, with the arguments of this conversation."""
        rendered = self._rendered(messages, tokenizer, tokenize=False, add_generation_prompt=add_generation_prompt)
        return str(rendered[0])

    def tokens(self, messages: list[Message], tokenizer: Tokenizer, **kwargs: bool) -> list[int]:
        """The same as tokens, shape (T,)."""
        return list(self._rendered(messages, tokenizer, tokenize=True, return_dict=True, **kwargs)["input_ids"][0])

    def masked(self, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
        """Tokens of all messages, and 1 for each that the template's `{% generation %}` markers enclose, as in TRL."""
        kwargs = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        outputs = self._rendered(self.messages, tokenizer, **kwargs)
        return list(outputs["input_ids"][0]), list(outputs["assistant_masks"][0])

    def sample(self, turn: int, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
        """Tokens of one assistant turn and its history, and labels that are -100 before the turn.

        Turn -1 is the whole conversation, and nothing to train. ValueError: the rendered turn does not begin where the
        prompt that generation sees ends.
        """
        if turn < 0:
            tokens = self.tokens(self.messages, tokenizer)
            return tokens, [IGNORE_INDEX] * len(tokens)
        prompt, tokens = self._of_turn(turn, tokenizer, as_tokens=True)
        return tokens, [IGNORE_INDEX] * len(prompt) + tokens[len(prompt) :]

    def row_of_turn(self, turn: int, processor: ProcessorMixin) -> dict[str, Any]:
        """The same with images, as a row in TRL's form: `prompt` and `completion` as text, and the `images` of both."""
        if turn < 0:
            prompt = self.text(self.messages, processor)
            return {"prompt": prompt, "completion": "", "images": _images(self.messages)}
        if _images([self.messages[turn]]):
            raise ValueError(
                f"`messages[{turn}]` is an assistant turn with an image, and a model that is trained on tokens writes "
                "none"
            )
        prompt, text = self._of_turn(turn, processor, as_tokens=False)
        if text == prompt:
            raise ValueError(f"the template renders nothing of `messages[{turn}]`")
        return {"prompt": prompt, "completion": text[len(prompt) :], "images": _images(self.messages[:turn])}

    def _rendered(self, messages: list[Message], tokenizer: Tokenizer, **kwargs: Any) -> Any:
        if isinstance(tokenizer, ProcessorMixin):
            messages = prepare_multimodal_messages(messages)
        # A batch of one: alone, an empty history is an error
        return tokenizer.apply_chat_template([messages], **kwargs, **self.arguments)

    def _of_turn(self, turn: int, tokenizer: Tokenizer, *, as_tokens: bool) -> Any:
        """The prompt that generation sees, and the same with the turn after it."""
        render: Any = self.tokens if as_tokens else self.text
        plain = plain_tokenizer(tokenizer)
        prompt = render(self.messages[:turn], tokenizer, add_generation_prompt=True)
        whole = render(self.messages[: turn + 1], tokenizer)
        if whole[: len(prompt)] != prompt:
            text = self._text_of_turn(turn, tokenizer) or ""
            changed = plain(text, add_special_tokens=False)["input_ids"] if as_tokens else text
            whole = changed if text else whole
        if whole[: len(prompt)] != prompt:
            same = num_same(prompt, whole)
            ends = [prompt[same:], whole[same:]]
            seen, continued = map(plain.decode, ends) if as_tokens else ends
            raise ValueError(
                f"the template ends the prompt of `messages[{turn}]` with {seen[:NUM_SHOWN]!r}, and with this turn it "
                f"continues with {continued[:NUM_SHOWN]!r} there"
            )
        return prompt, whole

    def _text_of_turn(self, turn: int, tokenizer: Tokenizer) -> str | None:
        """The prompt that generation sees, and the turn after it; None if the turn does not begin where it ends.

        A mark at the end of the last message before the turn says where the history ends in a rendered conversation.
        """
        history = self.messages[:turn]
        answer = self.messages[turn]
        content = history[-1].get("content") if history else None
        if isinstance(content, str):
            content = content + MARK
        elif content and content[-1]["type"] == "text":
            content = [*content[:-1], content[-1] | {"text": content[-1]["text"] + MARK}]
        else:
            return None
        marked = [*history[:-1], history[-1] | {"content": content}]
        prompt = self.text(history, tokenizer, add_generation_prompt=True)
        whole = self.text([*history, answer], tokenizer)
        end = self.text(marked, tokenizer, add_generation_prompt=True).rpartition(MARK)[2]
        rest = self.text([*marked, answer], tokenizer).rpartition(MARK)[2]
        is_same = prompt.endswith(end) and whole.endswith(rest)  # with the mark and without it
        return prompt + rest[len(end) :] if is_same and rest.startswith(end) else None


def with_chat_roles(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the roles of `conversations` with `from` and `value` renamed: `human` to `user`, `gpt` to `assistant`.

    TRL renames the keys and keeps the names of the roles. Most chat templates know `user` and `assistant`, and write
    `human` and `gpt` into the text. Messages are copied, because TRL renames keys in place, and the rows of a stream
    may be objects of the user.
    """
    messages = row.get("conversations")
    if not isinstance(messages, list):
        return row  # of another form, or a bad row, which is named later
    return row | {"conversations": [with_role(m, "from") if isinstance(m, dict) else m for m in messages]}


def with_role(message: Message, key: str) -> Message:
    """The message with its role, under this key, as chat templates name it."""
    role = message.get(key)
    return message | ({key: ROLES[role]} if isinstance(role, str) and role in ROLES else {})


def plain_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerBase:
    return tokenizer.tokenizer if isinstance(tokenizer, ProcessorMixin) else tokenizer


def _images(messages: Sequence[Message]) -> list[object]:
    """The images that were put into these messages, in order."""
    contents = [message.get("content") for message in messages]
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part["image"] for part in parts if part.get("image") is not None]


def num_same(one: Sequence[object], other: Sequence[object]) -> int:
    """How many items both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
