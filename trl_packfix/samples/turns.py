"""Which tokens of a conversation are trained: those of its assistant turns, found in the text that the template makes.

With `{% generation %}` markers a turn is what its markers enclose, as in TRL. Without them a turn is what the template
adds to the prompt that generation sees when the message is appended:

    prompt      template(messages before the turn, add_generation_prompt=True)
    turn        what template(messages up to the turn) has after the prompt

Both must be the beginning of the whole conversation as it is rendered. A template that renders a turn in another way
once other messages follow, for example without its thinking, is refused with the row.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from transformers import ProcessorMixin
from transformers.utils.chat_template_utils import render_jinja_template
from trl.data_utils import prepare_multimodal_messages

from ..layout import IGNORE_INDEX
from .conversation import NUM_SHOWN, Conversation, Message, Tokenizer, num_same, plain_tokenizer
from .row import AssistantTurnCounts, UnknownTurnError

AssistantTurns = Literal["all", "last"]
Span: TypeAlias = tuple[int, int]  # of characters

MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
EMPTY_THINKING = re.compile(r"\s*(<think>\s*)?</think>\s*")  # the prompt may end with its first tag
# Renders a text that is already made, with markers where it is trained
PART_MARKERS = (
    "{%- for part in messages[0].parts %}{% if part.trained %}{% generation %}{{ part.text }}{% endgeneration %}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}"
)


class TurnSettings(Protocol):
    """The fields of `SFTConfig` by which rows become samples."""

    assistant_only_loss: bool
    assistant_turns: AssistantTurns
    bad_rows: Literal["raise", "drop"]
    completion_only_loss: bool | None
    dataset_num_proc: int | None
    dataset_text_field: str
    disable_tqdm: bool | None
    message_train_key: str | None
    per_turn: bool
    train_empty_thinking: bool

    @property
    def process_index(self) -> int: ...


class TurnSelection(NamedTuple):
    """A conversation without the key that chooses, the messages of it that are trained, and the counts."""

    conversation: Conversation
    trained: list[int]
    counts: AssistantTurnCounts


@dataclass(frozen=True)
class TurnRule:
    """Which assistant turns are trained: fields of `SFTConfig`."""

    message_train_key: str | None = "weight"
    assistant_turns: AssistantTurns = "all"
    train_empty_thinking: bool = True

    @classmethod
    def of(cls, args: TurnSettings) -> "TurnRule":
        return cls(args.message_train_key, args.assistant_turns, args.train_empty_thinking)

    def select_turn(self, conversation: Conversation) -> TurnSelection:
        key = self.message_train_key
        messages = conversation.messages
        turns = conversation.turns
        context = set()
        for turn in turns:
            weight = None if key is None else messages[turn].get(key)
            if weight is not None and (not isinstance(weight, int | float) or weight not in (0, 1)):
                raise UnknownTurnError(f"`messages[{turn}]` has `{key}: {weight!r}`, which is neither 0 nor 1")
            if weight == 0:
                context.add(turn)
        earlier = set(turns[:-1]) - context if self.assistant_turns == "last" else set()
        messages = [{name: value for name, value in message.items() if name != key} for message in messages]
        counts = AssistantTurnCounts(len(turns), len(context), len(earlier))
        trained = [turn for turn in turns if turn not in context | earlier]
        return TurnSelection(replace(conversation, messages=messages), trained, counts)

    def masked(self, chosen: TurnSelection, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
        """Tokens of a conversation, and 1 for each that is trained."""
        conversation = chosen.conversation
        every = len(chosen.trained) == chosen.counts.turns
        if every and self.train_empty_thinking and has_markers(template_of(tokenizer, conversation.arguments)):
            return conversation.masked(tokenizer)
        text, spans = self.spans(chosen, tokenizer)
        if isinstance(tokenizer, ProcessorMixin):
            message = {"role": "user", "content": [], "parts": text_parts(text, spans)}
            return Conversation([message], 0, {"chat_template": PART_MARKERS}).masked(tokenizer)
        outputs = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        begins, ends = np.array(outputs["offset_mapping"], np.int64).reshape(-1, 2).T
        mask = np.zeros(len(begins), np.int64)
        for start, stop in spans:
            mask[(begins < stop) & (ends > start)] = 1
        return list(outputs["input_ids"]), mask.tolist()

    def spans(self, chosen: TurnSelection, tokenizer: Tokenizer) -> tuple[str, list[Span]]:
        """The rendered conversation, and the spans of it that are trained, in its order."""
        template = template_of(tokenizer, chosen.conversation.arguments)
        if has_markers(template):
            text, spans = _in_markers(chosen, tokenizer, template)
        else:
            text, spans = _turn_by_turn(chosen, tokenizer)
        for i, (turn, span) in enumerate(spans):
            if not i or spans[i - 1][0] != turn:
                spans[i] = turn, self.without_thinking(text, span, chosen.conversation.messages[turn])
        return text, [span for _, span in spans]

    def without_thinking(self, text: str, span: Span, message: Message) -> Span:
        """The span of a turn behind an empty thinking block that only the template has written."""
        content = message.get("content")
        if isinstance(content, list):
            content = next((part.get("text") for part in content if part.get("text")), None)
        content = content or ""
        block = EMPTY_THINKING.match(text, *span)
        if self.train_empty_thinking or block is None or EMPTY_THINKING.match(content):
            return span
        first = text.find(content, *span) if content.strip() else -1
        return (min(block.end(), first) if first >= 0 else block.end(), span[1])

    def row_of_turn(self, conversation: Conversation, turn: int, processor: ProcessorMixin) -> dict[str, Any]:
        """The row with images of a turn (`Conversation.row_of_turn`), such a block at the end of its prompt."""
        row = conversation.row_of_turn(turn, processor)
        prompt = row["prompt"]
        answer = row["completion"]
        start, _ = self.without_thinking(answer, (0, len(answer)), conversation.messages[turn])
        return row | {"prompt": prompt + answer[:start], "completion": answer[start:]}

    def mask_thinking(self, labels: list[int], message: Message, tokenizer: Tokenizer) -> None:
        """Set the labels of such a block at the beginning of a sample's turn to -100."""
        plain: Any = plain_tokenizer(tokenizer)
        first = next((i for i, label in enumerate(labels) if label != IGNORE_INDEX), len(labels))
        text = "" if self.train_empty_thinking else plain.decode(labels[first:])
        start, _ = self.without_thinking(text, (0, len(text)), message)
        stop = first
        while start and stop < len(labels) and len(plain.decode(labels[first : stop + 1])) <= start:
            stop += 1
        labels[first:stop] = [IGNORE_INDEX] * (stop - first)


def has_markers(chat_template: object) -> bool:
    return isinstance(chat_template, str) and MARKERS.search(chat_template) is not None


def template_of(tokenizer: Tokenizer, arguments: Mapping[str, Any]) -> Any:
    """The text of the template that is used: the row's, that of training, or the tokenizer's own."""
    template = arguments.get("chat_template")
    if isinstance(tokenizer, ProcessorMixin):
        template = template or tokenizer.chat_template
        return template["default"] if isinstance(template, dict) else template
    return tokenizer.get_chat_template(template, arguments.get("tools"))


def text_parts(text: str, spans: list[Span]) -> list[dict[str, object]]:
    """A text in parts that are trained or not, for the template `PART_MARKERS`."""
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    stretches = enumerate(pairwise(edges))
    return [{"text": text[a:b], "trained": i % 2 == 1} for i, (a, b) in stretches if text[a:b]]


def _in_markers(chosen: TurnSelection, tokenizer: Tokenizer, template: str) -> tuple[str, list[tuple[int, Span]]]:
    """The text of a template with markers, and the trained turns with what their markers enclose.

    Which markers are those of a message is known from their number before it, if the history alone has the same.
    """
    conversation = chosen.conversation
    arguments = conversation.arguments | {"chat_template": template}
    render: Any = render_jinja_template

    def marked(stop: int) -> tuple[str, list[Span]]:
        messages = [{k: v for k, v in m.items() if v is not None} for m in conversation.messages[:stop]]
        if isinstance(tokenizer, ProcessorMixin):
            messages = prepare_multimodal_messages(messages)
        given: dict[str, Any] = plain_tokenizer(tokenizer).special_tokens_map | arguments
        texts, blocks = render([messages], return_assistant_tokens_mask=True, **given)
        return texts[0], [(start, stop) for start, stop in blocks[0]]

    text, whole = marked(len(conversation.messages))
    turns = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    firsts = []
    for turn in turns:
        before, blocks = marked(turn) if turn else ("", [])
        if [before[a:b] for a, b in blocks] != [text[a:b] for a, b in whole[: len(blocks)]]:
            raise UnknownTurnError(
                f"the template marks other text in `messages[:{turn}]` alone than in the whole conversation, so which "
                f"of its {len(whole)} `{{% generation %}}` blocks are `messages[{turn}]` is not known"
            )
        firsts.append(len(blocks))
    of_turns = zip(turns, pairwise([*firsts, len(whole)]), strict=True)
    return text, [(turn, span) for turn, (a, b) in of_turns if turn in chosen.trained for span in whole[a:b]]


def _turn_by_turn(chosen: TurnSelection, tokenizer: Tokenizer) -> tuple[str, list[tuple[int, Span]]]:
    """The text of a template without markers, and the trained turns with their spans."""

    def rest(text: str, other: str) -> str:
        return text[num_same(text, other) :][:NUM_SHOWN]

    conversation, messages = chosen.conversation, chosen.conversation.messages
    whole = conversation.text(messages, tokenizer)
    spans = []
    for turn in chosen.trained:
        prompt = conversation.text(messages[:turn], tokenizer, add_generation_prompt=True)
        until = conversation.text(messages[: turn + 1], tokenizer)
        if not until.startswith(prompt):
            raise UnknownTurnError(
                f"the template ends the prompt of `messages[{turn}]` with {rest(prompt, until)!r}, and with this turn "
                f"it continues with {rest(until, prompt)!r} there"
            )
        if not whole.startswith(until):  # some templates end a conversation with the EOS token
            until = until.removesuffix(str(plain_tokenizer(tokenizer).eos_token or ""))
        if not whole.startswith(until) or len(until) < len(prompt):
            raise UnknownTurnError(
                f"the template renders `messages[:{turn + 1}]` in another way once `messages[{turn + 1}]` follows: "
                f"{rest(until, whole)!r} becomes {rest(whole, until)!r}, so this turn is not in the conversation as "
                "it was written; `per_turn=True` trains each turn as it is rendered when it is the last"
            )
        spans.append((turn, (len(prompt), len(until))))
    return whole, spans
