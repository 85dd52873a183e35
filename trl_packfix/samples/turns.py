"""Find the tokens of a conversation that are trained: the tokens of its assistant turns.

A `Conversation` comes in from `conversation.py`. `TurnRule` selects its trained turns by the config, and finds their
tokens in the rendered conversation for the recipes (`recipes.py`, and `features/images/measures.py`). In a template
with `{% generation %}` markers, a turn is the text between its markers, as in TRL. In a template without markers, a
turn is the text that the template adds to the prompt of the turn when the message is appended:

    prompt      template(messages before the turn, add_generation_prompt=True)
    turn        template(messages up to the turn), without the prompt

Prompt and turn together must be the beginning of the whole rendered conversation. A row is refused if its template
renders a turn differently once messages follow, for example without its thinking.
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
Span: TypeAlias = tuple[int, int]  # index of the first character, and of the character after the last

MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
EMPTY_THINKING = re.compile(r"\s*(<think>\s*)?</think>\s*")  # the opening tag may belong to the prompt
# A template that joins the parts of a rendered text and puts markers around the trained parts
PART_MARKERS = (
    "{%- for part in messages[0].parts %}{% if part.trained %}{% generation %}{{ part.text }}{% endgeneration %}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}"
)


class TurnSettings(Protocol):
    """The fields of `SFTConfig` that this folder reads: which samples are made of a row, and how tables are mapped."""

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


def trains_only_completions(args: TurnSettings) -> bool:
    """Return whether only the completion is trained in rows of a training set that have a prompt and a completion.

    This is the default: None counts as True. The columns of each row decide whether it has them. TRL would decide for
    all rows by the first row.
    """
    return args.completion_only_loss is not False


class TurnSelection(NamedTuple):
    """A conversation and its trained turns."""

    conversation: Conversation  # its messages do not have the key `message_train_key`
    trained: list[int]  # indices of the messages that are trained
    counts: AssistantTurnCounts


@dataclass(frozen=True)
class TurnRule:
    """The rule that decides which assistant turns are trained, read from fields of `SFTConfig`."""

    message_train_key: str | None = "weight"
    assistant_turns: AssistantTurns = "all"
    train_empty_thinking: bool = True

    @classmethod
    def from_args(cls, args: TurnSettings) -> "TurnRule":
        """Read the rule from the config of the trainer."""
        return cls(
            message_train_key=args.message_train_key,
            assistant_turns=args.assistant_turns,
            train_empty_thinking=args.train_empty_thinking,
        )

    def select_turns(self, conversation: Conversation) -> TurnSelection:
        """Select the assistant turns of a conversation that are trained.

        A turn is not trained if its weight (the value of its key `message_train_key`) is 0 or, with
        `assistant_turns="last"`, if another turn follows.

        Raises:
            UnknownTurnError: If a weight is neither 0 nor 1.
        """
        key = self.message_train_key
        messages = conversation.messages
        turns = conversation.turns  # indices of the assistant's messages behind the prompt
        context = set()  # turns with the weight 0: they are only context of other turns
        for turn in turns:
            weight = None if key is None else messages[turn].get(key)
            if weight is not None and (not isinstance(weight, int | float) or weight not in (0, 1)):
                raise UnknownTurnError(
                    f"`messages[{turn}]` has `{key}: {weight!r}`, which is neither 0 nor 1; a message is trained or it "
                    "is not. Set it to 0 or 1, give whole rows a weight (`weight_column`), or set "
                    "`message_train_key=None`"
                )
            if weight == 0:
                context.add(turn)
        earlier = set(turns[:-1]) - context if self.assistant_turns == "last" else set()
        messages = [{name: value for name, value in message.items() if name != key} for message in messages]
        counts = AssistantTurnCounts(turns=len(turns), context=len(context), earlier=len(earlier))
        trained = [turn for turn in turns if turn not in context | earlier]
        return TurnSelection(replace(conversation, messages=messages), trained, counts)

    def tokens_and_mask(self, selection: TurnSelection, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
        """Return the T token ids of a conversation, and T ones and zeros, with a 1 for each trained token."""
        conversation = selection.conversation
        # 1. The template marks what the assistant says, and all of it is trained
        every_turn_is_trained = len(selection.trained) == selection.counts.turns
        if (
            every_turn_is_trained
            and self.train_empty_thinking
            and has_markers(template_of(tokenizer, conversation.arguments))
        ):
            return conversation.tokens_and_mask(tokenizer)
        text, spans = self.spans(selection, tokenizer)
        # 2. A processor finds the tokens of its text
        if isinstance(tokenizer, ProcessorMixin):
            # The processor replaces placeholders of images, so characters of its text are not those of `spans`. Let it
            # find the tokens itself: the template `PART_MARKERS` writes the parts of this message, and markers around
            # the trained ones
            message = {"role": "user", "content": [], "parts": text_parts(text, spans)}
            marked = Conversation([message], num_prompt=0, arguments={"chat_template": PART_MARKERS})
            return marked.tokens_and_mask(tokenizer)
        # 3. A tokenizer tells the characters of each token
        outputs = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        token_starts, token_stops = np.array(outputs["offset_mapping"], np.int64).reshape(-1, 2).T
        mask = np.zeros(len(token_starts), np.int64)
        for start, stop in spans:
            overlaps_span = (token_starts < stop) & (token_stops > start)
            mask[overlaps_span] = 1
        return list(outputs["input_ids"]), mask.tolist()

    def spans(self, selection: TurnSelection, tokenizer: Tokenizer) -> tuple[str, list[Span]]:
        """Return the text of a rendered conversation, and the spans of the text that are trained, in order."""
        template = template_of(tokenizer, selection.conversation.arguments)
        if has_markers(template):
            text, spans = _in_markers(selection, tokenizer, template)
        else:
            text, spans = _turn_by_turn(selection, tokenizer)
        trained_spans = []
        previous_turn = None
        for turn, span in spans:
            # Markers may divide a turn into several spans; thinking is at the beginning of its first span
            if turn != previous_turn:
                span = self.without_thinking(text, span, selection.conversation.messages[turn])
            trained_spans.append(span)
            previous_turn = turn
        return text, trained_spans

    def without_thinking(self, text: str, span: Span, message: Message) -> Span:
        """Return the span of a turn without an empty thinking block at its beginning.

        The block remains in the span if `train_empty_thinking` is set, or if the message itself has it, which means
        that the template did not add it.

        Args:
            text: The rendered text.
            span: The characters of the turn in the text.
            message: The message of the turn.
        """
        content = message.get("content")
        if isinstance(content, list):
            content = next((part.get("text") for part in content if part.get("text")), None)
        content = content or ""
        block = EMPTY_THINKING.match(text, *span)
        if self.train_empty_thinking or block is None or EMPTY_THINKING.match(content):
            return span
        # The match ends with white space behind the block. If the content begins with white space, the turn begins
        # there. The content is looked for behind the last tag, because a content such as "think" is in the tags, too
        tags_end = block.start() + len(block[0].rstrip())
        content_start = text.find(content, tags_end, span[1]) if content.strip() else -1
        turn_start = min(block.end(), content_start) if content_start >= 0 else block.end()
        return (turn_start, span[1])

    def row_of_turn(self, conversation: Conversation, turn: int, processor: ProcessorMixin) -> dict[str, Any]:
        """Return the `prompt`, the `completion` and the `images` of a turn, as `Conversation.row_of_turn` does.

        An empty thinking block that is not trained is moved to the prompt.
        """
        row = conversation.row_of_turn(turn, processor)
        prompt = row["prompt"]
        answer = row["completion"]
        start, _ = self.without_thinking(answer, (0, len(answer)), conversation.messages[turn])
        return row | {"prompt": prompt + answer[:start], "completion": answer[start:]}

    def mask_thinking(self, labels: list[int], message: Message, tokenizer: Tokenizer) -> None:
        """Set the labels of an empty thinking block that is not trained to -100, in place.

        Args:
            labels: The labels of a sample of one turn, -100 before the turn.
            message: The message of the turn.
            tokenizer: The tokenizer, or the processor of a model with images.
        """
        plain: Any = plain_tokenizer(tokenizer)
        first_label = next((i for i, label in enumerate(labels) if label != IGNORE_INDEX), len(labels))
        # An empty text has no thinking block
        text = "" if self.train_empty_thinking else plain.decode(labels[first_label:])
        block_end, _ = self.without_thinking(text, (0, len(text)), message)  # characters of the block; 0 without one
        stop = first_label
        # Tokens belong to the block as long as their text is not longer than the block
        while block_end and stop < len(labels):
            if len(plain.decode(labels[first_label : stop + 1])) > block_end:
                break
            stop += 1
        labels[first_label:stop] = [IGNORE_INDEX] * (stop - first_label)


def has_markers(chat_template: object) -> bool:
    """Return whether a chat template has `{% generation %}` markers."""
    return isinstance(chat_template, str) and MARKERS.search(chat_template) is not None


def template_of(tokenizer: Tokenizer, arguments: Mapping[str, Any]) -> Any:
    """Return the text of the chat template that a conversation is rendered with.

    Args:
        tokenizer: The tokenizer, or the processor of a model with images.
        arguments: The arguments of the conversation. Their `chat_template` is used if they have one, else the
            tokenizer's own.
    """
    template = arguments.get("chat_template")
    if isinstance(tokenizer, ProcessorMixin):
        template = template or tokenizer.chat_template
        return template["default"] if isinstance(template, dict) else template
    return tokenizer.get_chat_template(template, arguments.get("tools"))


def text_parts(text: str, spans: list[Span]) -> list[dict[str, object]]:
    """Divide a text at the edges of its trained spans, into parts for the template `PART_MARKERS`."""
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    numbered_parts = enumerate(pairwise(edges))  # parts with an odd number are the spans
    return [
        {"text": text[start:stop], "trained": i % 2 == 1} for i, (start, stop) in numbered_parts if text[start:stop]
    ]


def _in_markers(selection: TurnSelection, tokenizer: Tokenizer, template: str) -> tuple[str, list[tuple[int, Span]]]:
    """Find the trained turns of a conversation by the markers of its template.

    The markers enclose blocks of text, which the template does not assign to messages. So the history before each turn
    is rendered too: the blocks of a turn come after as many blocks as its history has.

    Returns:
        The text of the conversation, and a pair of turn and span for each block of a trained turn.

    Raises:
        UnknownTurnError: If the blocks of a history have other text in the whole conversation.
    """
    conversation = selection.conversation
    arguments = conversation.arguments | {"chat_template": template}
    render: Any = render_jinja_template

    def render_with_blocks(num_messages: int) -> tuple[str, list[Span]]:
        """Return the text of the first messages, and the blocks in it that the markers enclose."""
        # `apply_chat_template` omits keys whose value is None, and `render_jinja_template` does not
        messages = [{k: v for k, v in m.items() if v is not None} for m in conversation.messages[:num_messages]]
        if isinstance(tokenizer, ProcessorMixin):
            messages = prepare_multimodal_messages(messages)
        variables: dict[str, Any] = plain_tokenizer(tokenizer).special_tokens_map | arguments
        texts, blocks = render([messages], return_assistant_tokens_mask=True, **variables)
        return texts[0], [(start, stop) for start, stop in blocks[0]]

    text, all_blocks = render_with_blocks(len(conversation.messages))
    # All messages of the assistant. `conversation.turns` lacks the messages of the prompt, which have blocks, too
    turns = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    first_blocks = []  # for each turn the index of its first block
    for turn in turns:
        history, blocks = render_with_blocks(turn) if turn else ("", [])
        history_texts = [history[start:stop] for start, stop in blocks]
        if history_texts != [text[start:stop] for start, stop in all_blocks[: len(blocks)]]:
            raise UnknownTurnError(
                f"the template marks other text in `messages[:{turn}]` alone than in the whole conversation, so which "
                f"of its {len(all_blocks)} `{{% generation %}}` blocks are `messages[{turn}]` is not known"
            )
        first_blocks.append(len(blocks))
    spans: list[tuple[int, Span]] = []
    for turn, (first, stop) in zip(turns, pairwise([*first_blocks, len(all_blocks)]), strict=True):
        if turn in selection.trained:
            spans += [(turn, span) for span in all_blocks[first:stop]]
    return text, spans


def _turn_by_turn(selection: TurnSelection, tokenizer: Tokenizer) -> tuple[str, list[tuple[int, Span]]]:
    """Find the trained turns of a conversation by rendering it up to each turn, for a template without markers.

    Returns:
        The text of the conversation, and a pair of turn and span for each trained turn.

    Raises:
        UnknownTurnError: If a turn does not begin where its prompt ends, or is rendered differently once messages
            follow.
    """

    def show_difference(text: str, compared: str) -> str:
        """Return the characters of a text from where it differs from another text."""
        return text[num_same(text, compared) :][:NUM_SHOWN]

    conversation = selection.conversation
    messages = conversation.messages
    full_text = conversation.text(messages, tokenizer)
    spans = []
    for turn in selection.trained:
        prompt = conversation.text(messages[:turn], tokenizer, add_generation_prompt=True)
        text_up_to_turn = conversation.text(messages[: turn + 1], tokenizer)
        if not text_up_to_turn.startswith(prompt):
            raise UnknownTurnError(
                f"the template ends the prompt of `messages[{turn}]` with "
                f"{show_difference(prompt, text_up_to_turn)!r}, and with this turn it continues with "
                f"{show_difference(text_up_to_turn, prompt)!r} there"
            )
        if not full_text.startswith(text_up_to_turn):  # some templates end a conversation with the EOS token
            text_up_to_turn = text_up_to_turn.removesuffix(str(plain_tokenizer(tokenizer).eos_token or ""))
        if not full_text.startswith(text_up_to_turn) or len(text_up_to_turn) < len(prompt):
            raise UnknownTurnError(
                f"the template renders `messages[:{turn + 1}]` in another way once `messages[{turn + 1}]` follows: "
                f"{show_difference(text_up_to_turn, full_text)!r} becomes "
                f"{show_difference(full_text, text_up_to_turn)!r}, so this turn is not in the conversation as it was "
                "written; `per_turn=True` trains each turn as it is rendered when it is the last"
            )
        spans.append((turn, (len(prompt), len(text_up_to_turn))))
    return full_text, spans
