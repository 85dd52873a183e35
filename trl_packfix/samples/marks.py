"""Put marks into the texts of a row, and find out what a rendered row has of them.

`data_proof.py` counts by marks which texts a dataset loses, and `trl-packfix show` shows by them where a row would have
a lost text. A mark is a short word that no text has, inserted into a text, or a rare number in place of a number.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from textwrap import shorten
from typing import Any, TypeAlias

from datasets import Features

from .conversation import NUM_SHOWN, Conversation
from .rendering import Rendering, copied
from .text_kinds import CONSTANT, THOUGHT, Leaf, leaves
from .texts import struct_columns, without_nulls

MARK = re.compile(r"zq\d+x", re.IGNORECASE)
NUMBER = re.compile(r"97000\d{6}(?:\.5)?")
BEFORE_A_LETTER = re.compile(r"(?<![<|/\\\w])[^\W\d_]")  # not inside a tag, a word or an escape
Marks: TypeAlias = dict[str, tuple[Leaf, object]]  # for each mark its leaf, and the text or number before it was marked


def with_marks(conversation: Conversation, only: int | None = None) -> tuple[Conversation, Marks]:
    """Return a copy of a conversation in which all texts are marked, or only text number `only`, and the marks."""
    marked = copy_texts(conversation)
    marks: Marks = {}
    texts = [leaf for leaf in leaves(marked.messages, marked.arguments) if leaf.kind.is_text]
    for i, leaf in enumerate(texts):
        value = leaf.holder[leaf.key]
        if leaf.kind.path.endswith(("</think>", CONSTANT)) or only not in (None, i):
            continue  # a thought inside a content is marked with it
        if isinstance(value, int | float):
            mark = str(97_000_000_000 + len(marks)) + (".5" if isinstance(value, float) else "")
            leaf.holder[leaf.key] = type(value)(mark)
            marks[mark] = leaf, value
            continue
        pieces = THOUGHT.split(value)
        for k in range(0, len(pieces), 2):
            if pieces[k].strip():
                is_thought = pieces[k + 1 : k + 2] == ["</think>"] and leaf.kind.path.startswith("content")
                kind = leaf.kind._replace(path=f"{leaf.kind.path} before </think>") if is_thought else leaf.kind
                mark = f"zq{len(marks)}x"
                marks[mark] = leaf._replace(kind=kind), value if len(pieces) == 1 else pieces[k]
                pieces[k] = _insert(mark, pieces[k])
        leaf.holder[leaf.key] = "".join(pieces)
    return marked, marks


def copy_texts(conversation: Conversation) -> Conversation:
    """Return a copy of a conversation whose texts can be replaced."""
    return replace(conversation, messages=copied(conversation.messages), arguments=copied(conversation.arguments))


def _insert(mark: str, text: str) -> str:
    """Put a mark before the first letter that is not in a tag, so that JSON stays JSON and tags stay tags.

    >>> _insert("zq0x", '{"city": "Rome"}')
    '{"zq0xcity": "Rome"}'
    """
    letter = BEFORE_A_LETTER.search(text)
    position = letter.start() if letter else len(text.rstrip())
    return text[:position] + mark + text[position:]


def without_marks(text: str, marks: Marks) -> str:
    """Remove the marks from a rendered text, and put back the numbers that marks replaced."""

    def original_number(match: re.Match[str]) -> str:
        return str(marks[match[0]][1]) if match[0] in marks else match[0]

    return NUMBER.sub(original_number, MARK.sub("", text))


def find_omissions(
    row: dict[str, Any], rendering: Rendering, features: Features | None
) -> tuple[str, list[tuple[int, str]]]:
    """Find the texts of one row that its rendered text does not have, and the places where they would be.

    Args:
        row: The columns of the row by name.
        rendering: How the row becomes text.
        features: Features of the row's dataset; None if they are not known.

    Returns:
        The rendered text, and for each missing text a position in the rendered text, in characters, with a description.
        There are none if the marks change more of the rendered text than themselves.

    Raises:
        Exception: If the row cannot be rendered.
    """
    conversation = rendering.conversation(without_nulls(row, struct_columns(features)))
    text = rendering.text(conversation)
    marked, marks = with_marks(conversation)
    rendered = rendering.text_or_none(marked)
    if rendered is None or without_marks(rendered, marks) != text:
        return text, []
    matches = [*MARK.finditer(rendered), *NUMBER.finditer(rendered)]
    positions = {match[0].lower(): len(without_marks(rendered[: match.start()], marks)) for match in matches}
    return text, list(_omissions(marks, positions, text))


def _omissions(marks: Marks, positions: dict[str, int], text: str) -> Iterator[tuple[int, str]]:
    """Yield a place and a description of each text whose mark has no position.

    The place is before the next text of the same message that is rendered. If there is none, it is behind the text that
    is rendered before; 0 if no text is.
    """
    texts_found = {(leaf.message, value) for mark, (leaf, value) in marks.items() if mark in positions}
    next_in_message = {leaf.message: positions[mark] for mark, (leaf, _) in marks.items() if mark in positions}
    for mark in reversed(marks):  # in the end the first rendered text of each message
        if mark in positions:
            next_in_message[marks[mark][0].message] = positions[mark]
    end = 0
    for mark, (leaf, value) in marks.items():
        if mark in positions:
            start = text.find(str(value).strip(), max(0, positions[mark] - len(str(value))))
            end = positions[mark] if start < 0 else start + len(str(value).strip())
        elif (leaf.message, value) not in texts_found:  # a thought may have several names
            role = f" of {leaf.kind.role}" if leaf.kind.role else ""
            example = shorten(str(value), NUM_SHOWN, placeholder=" ...")
            yield next_in_message.get(leaf.message, end), f"`{leaf.kind.path}`{role}: {example}"
