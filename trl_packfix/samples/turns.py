"""Which tokens of a conversation are trained: those of its assistant turns, found in the text that the template makes.

With `{% generation %}` markers a turn is what its markers enclose, as in TRL. Without them a turn is what the template
adds to the prompt that generation sees when the message is appended:

    prompt      template(messages before the turn, add_generation_prompt=True)
    turn        what template(messages up to the turn) has after the prompt

Both must be the beginning of the whole conversation as it is rendered. A template that renders a turn in another way
once other messages follow, for example without its thinking, is refused with the row.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from transformers import ProcessorMixin
from transformers.utils.chat_template_utils import render_jinja_template
from trl.data_utils import prepare_multimodal_messages

from ..layout import IGNORE_INDEX
from .conversation import NUM_SHOWN, Conversation, num_same
from .row import MaskCounts, UnknownTurnError

AssistantTurns = Literal["all", "last"]
Span = tuple[int, int]

MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
EMPTY_THINKING = re.compile(r"\s*(<think>\s*)?</think>\s*")  # the prompt may end with its first tag
# Renders a text that is already made, with markers where it is trained
PARTS = (
    "{%- for part in messages[0].parts %}{% if part.trained %}{% generation %}{{ part.text }}{% endgeneration %}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}"
)


class Chosen(NamedTuple):
    """A conversation without the key that chooses, the messages of it that are trained, and the counts."""

    conversation: Conversation
    trained: list[int]
    counts: MaskCounts

    @property
    def is_every_turn(self) -> bool:
        return len(self.trained) == self.counts.turns


@dataclass(frozen=True)
class TurnRule:
    """Which assistant turns are trained: fields of `SFTConfig`."""

    message_train_key: str | None = "weight"
    assistant_turns: AssistantTurns = "all"
    train_empty_thinking: bool = True

    @classmethod
    def of(cls, args: Any) -> "TurnRule":
        return cls(args.message_train_key, args.assistant_turns, args.train_empty_thinking)

    def choose(self, conversation: Conversation) -> Chosen:
        """The turns of a conversation that are trained.

        Raises:
            UnknownTurnError: an assistant message has another weight than 0 or 1.
        """
        turns = conversation.turns
        context = {turn for turn in turns if not self._is_trained(turn, conversation.messages[turn])}
        earlier = set(turns[:-1]) - context if self.assistant_turns == "last" else set()
        trained = [turn for turn in turns if turn not in context | earlier]
        key = self.message_train_key
        messages = [
            {name: value for name, value in message.items() if name != key} for message in conversation.messages
        ]
        counts = MaskCounts(len(turns), len(context), len(earlier))
        return Chosen(replace(conversation, messages=messages), trained, counts)

    def _is_trained(self, i: int, message: dict[str, Any]) -> bool:
        weight = None if self.message_train_key is None else message.get(self.message_train_key)
        if weight is None:
            return True
        if not isinstance(weight, int | float) or weight not in (0, 1):
            raise UnknownTurnError(
                f"`messages[{i}]` has `{self.message_train_key}: {weight!r}`, which is neither 0 nor 1"
            )
        return bool(weight)

    def without_thinking(self, text: str, span: Span, message: dict[str, Any]) -> Span:
        """The span of a turn behind an empty thinking block that only the template has written."""
        content = _text_of(message)
        block = EMPTY_THINKING.match(text, *span)
        if self.train_empty_thinking or block is None or EMPTY_THINKING.match(content):
            return span
        first = text.find(content, *span) if content.strip() else -1
        return (min(block.end(), first) if first >= 0 else block.end(), span[1])

    def spans(self, chosen: Chosen, tokenizer: Any, template: Any) -> tuple[str, list[Span]]:
        """The rendered conversation, and the spans of it that are trained, in its order."""
        conversation = chosen.conversation
        if has_markers(template):
            text, spans = _marked(chosen, tokenizer, template)
        else:
            text, spans = _turn_by_turn(conversation, chosen.trained, tokenizer)
        messages = [conversation.messages[turn] for turn, _ in spans]
        kept, seen = [], set()
        for (turn, span), message in zip(spans, messages, strict=True):
            kept.append(span if turn in seen else self.without_thinking(text, span, message))
            seen.add(turn)
        return text, kept

    def row_of_turn(self, conversation: Conversation, turn: int, processor: ProcessorMixin) -> dict[str, Any]:
        """The row with images of a turn (`Conversation.row_of_turn`), such a block at the end of its prompt."""
        row = conversation.row_of_turn(turn, processor)
        prompt, answer = row["prompt"], row["completion"]
        start, _ = self.without_thinking(answer, (0, len(answer)), conversation.messages[turn])
        return row | {"prompt": prompt + answer[:start], "completion": answer[start:]}

    def mask_thinking(self, labels: list[int], message: dict[str, Any], tokenizer: Any) -> None:
        """Set the labels of such a block at the beginning of a sample's turn to -100."""
        first = next((i for i, label in enumerate(labels) if label != IGNORE_INDEX), len(labels))
        text = "" if self.train_empty_thinking else tokenizer.decode(labels[first:])
        start, _ = self.without_thinking(text, (0, len(text)), message)
        stop = first
        while start and stop < len(labels) and len(tokenizer.decode(labels[first : stop + 1])) <= start:
            stop += 1
        labels[first:stop] = [IGNORE_INDEX] * (stop - first)


def _text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = next((part.get("text") for part in content if part.get("text")), None)
    return content or ""


def has_markers(chat_template: Any) -> bool:
    """Whether a chat template marks what the assistant writes."""
    return isinstance(chat_template, str) and MARKERS.search(chat_template) is not None


def template_of(tokenizer: Any, arguments: dict[str, Any]) -> Any:
    """The text of the template that is used: the row's, that of training, or the tokenizer's own."""
    template = arguments.get("chat_template")
    if isinstance(tokenizer, ProcessorMixin):
        template = template or tokenizer.chat_template
        return template["default"] if isinstance(template, dict) else template
    return tokenizer.get_chat_template(template, arguments.get("tools"))


def tokenized(messages: list[dict[str, Any]], tokenizer: Any, is_prompt: bool = False, **arguments: Any) -> Any:
    """Messages through the template, as TRL calls it: `input_ids` and, if it is no prompt, `assistant_masks`."""
    is_processor = isinstance(tokenizer, ProcessorMixin)
    kwargs = {"add_generation_prompt": True} if is_prompt else {"return_assistant_tokens_mask": True}
    tokens = tokenizer.apply_chat_template(
        prepare_multimodal_messages(messages) if is_processor else messages,
        tokenize=True,
        return_dict=True,
        **kwargs,
        **arguments,
    )
    return {name: values[0] for name, values in tokens.items()} if is_processor else tokens


def masked(text: str, spans: list[Span], tokenizer: Any) -> tuple[list[int], list[int]]:
    """Tokens of a rendered text, and 1 for each token with a character of a span."""
    if isinstance(tokenizer, ProcessorMixin):
        messages = [{"role": "user", "content": [], "parts": parts(text, spans)}]
        outputs = tokenized(messages, tokenizer, chat_template=PARTS)
        return list(outputs["input_ids"]), list(outputs["assistant_masks"])
    outputs = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    begins, ends = np.array(outputs["offset_mapping"], np.int64).reshape(-1, 2).T
    mask = np.zeros(len(begins), np.int64)
    for start, stop in spans:
        mask[(begins < stop) & (ends > start)] = 1
    return list(outputs["input_ids"]), mask.tolist()


def parts(text: str, spans: list[Span]) -> list[dict[str, Any]]:
    """A text in parts that are trained or not, for the template `PARTS`."""
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    stretches = [{"text": text[a:b], "trained": i % 2 == 1} for i, (a, b) in enumerate(pairwise(edges))]
    return [part for part in stretches if part["text"]]


def _marked(chosen: Chosen, tokenizer: Any, template: str) -> tuple[str, list[tuple[int, Span]]]:
    """The text of a template with markers, and the trained turns with the spans of their markers.

    Which markers are those of a message is known from their number before it.

    Raises:
        UnknownTurnError: the template marks a history in another way than at the beginning of the conversation.
    """
    conversation = chosen.conversation
    arguments = dict(conversation.arguments) | {"chat_template": template}
    plain = tokenizer.tokenizer if isinstance(tokenizer, ProcessorMixin) else tokenizer

    def render(stop: int) -> tuple[str, list[Span]]:
        messages = [{k: v for k, v in m.items() if v is not None} for m in conversation.messages[:stop]]
        if isinstance(tokenizer, ProcessorMixin):
            messages = prepare_multimodal_messages(messages)
        rendered: Any = render_jinja_template(
            [messages], return_assistant_tokens_mask=True, **plain.special_tokens_map, **arguments
        )
        texts, blocks = rendered
        return texts[0], [(start, stop) for start, stop in blocks[0]]

    text, whole = render(len(conversation.messages))
    turns = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    firsts = []
    for turn in turns:
        before, blocks = render(turn) if turn else ("", [])
        if [before[a:b] for a, b in blocks] != [text[a:b] for a, b in whole[: len(blocks)]]:
            raise UnknownTurnError(
                f"the template marks other text in `messages[:{turn}]` alone than in the whole conversation, so which "
                f"of its {len(whole)} `{{% generation %}}` blocks are `messages[{turn}]` is not known"
            )
        firsts.append(len(blocks))
    stops = [*firsts[1:], len(whole)]
    return text, [
        (turn, span)
        for turn, first, stop in zip(turns, firsts, stops, strict=True)
        if turn in chosen.trained
        for span in whole[first:stop]
    ]


def _turn_by_turn(conversation: Conversation, trained: list[int], tokenizer: Any) -> tuple[str, list[tuple[int, Span]]]:
    """The text of a template without markers, and the trained turns with their spans.

    Raises:
        UnknownTurnError: a turn does not begin where its prompt ends, or is rendered in another way in the whole.
    """
    messages = conversation.messages
    text: Callable[..., str] = conversation.text
    whole, spans = text(messages, tokenizer), []
    plain: Any = tokenizer.tokenizer if isinstance(tokenizer, ProcessorMixin) else tokenizer
    for turn in trained:
        prompt = text(messages[:turn], tokenizer, add_generation_prompt=True)
        until = text(messages[: turn + 1], tokenizer)
        if not until.startswith(prompt):
            raise UnknownTurnError(
                f"the template ends the prompt of `messages[{turn}]` with {_rest(prompt, until)!r}, and with this turn "
                f"it continues with {_rest(until, prompt)!r} there"
            )
        if not whole.startswith(until):
            until = until.removesuffix(plain.eos_token or "")  # some templates end a conversation with it
        if not whole.startswith(until) or len(until) < len(prompt):
            raise UnknownTurnError(
                f"the template renders `messages[:{turn + 1}]` in another way once `messages[{turn + 1}]` follows: "
                f"{_rest(until, whole)!r} becomes {_rest(whole, until)!r}, so this turn is not in the conversation as "
                "it was written; `per_turn=True` trains each turn as it is rendered when it is the last"
            )
        spans.append((turn, (len(prompt), len(until))))
    return whole, spans


def _rest(text: str, other: str) -> str:
    """What a text has from the first character on in which it differs from the other."""
    return text[num_same(text, other) :][:NUM_SHOWN]
