"""Put marks into the texts of a row, and find the texts whose marks are missing from the rendered row.

`data_proof.py` counts which marks, and so which texts, a dataset loses. `trl-packfix show` prints a lost text at the
place in the row that its mark would have. A mark is a short word that no text has, inserted into a text, or a rare
number in place of a number. A `Leaf` (`text_kinds.py`) is one text or number of a row, with the list or dictionary that
holds it, and its kind: its path and the role of its message.
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

MARK = re.compile(r"zq\d+x|97000\d{6}(?:\.5)?", re.IGNORECASE)
# A letter before which a mark may be put: the first of a word, and not of a tag or an escape
FIRST_LETTER = re.compile(r"(?<![<|/\\\w])[^\W\d_]")
Marks: TypeAlias = dict[str, tuple[Leaf, object]]  # for each mark its leaf, and the text or number before it was marked


def with_marks(conversation: Conversation, only: int | None = None) -> tuple[Conversation, Marks]:
    """Return a copy of a conversation with marks in its texts, and the marks.

    Args:
        conversation: The conversation, which is not changed.
        only: Index of the one text to mark, among the texts of the conversation in order; None marks all. Those that
            cannot be marked, such as booleans, count, too: for their index no mark is made.
    """
    marked = copy_texts(conversation)
    marks: Marks = {}
    texts = [leaf for leaf in leaves(marked.messages, marked.arguments) if leaf.kind.is_text]
    for i, leaf in enumerate(texts):
        value = leaf.holder[leaf.key]
        # Booleans and nulls (`CONSTANT`) cannot be marked. A content with a thought before `</think>` has two leaves
        # with the same text. The one whose path ends in "</think>" is omitted, because the other is divided at the tags
        # below, and each part gets a mark
        if leaf.kind.path.endswith(("</think>", CONSTANT)) or only not in (None, i):
            continue
        if isinstance(value, int | float):  # and no boolean, see above
            mark = str(97_000_000_000 + len(marks)) + (".5" if isinstance(value, float) else "")
            leaf.holder[leaf.key] = type(value)(mark)
            marks[mark] = leaf, value
            continue
        pieces = THOUGHT.split(value)  # texts at even indices, `<think>` and `</think>` at odd ones
        for k in range(0, len(pieces), 2):
            if not pieces[k].strip():
                continue
            ends_in_tag = k + 1 < len(pieces) and pieces[k + 1] == "</think>"
            kind = leaf.kind
            if ends_in_tag and kind.path.startswith("content"):
                kind = kind._replace(path=f"{kind.path} before </think>")
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
    letter = FIRST_LETTER.search(text)
    position = letter.start() if letter else len(text.rstrip())
    return text[:position] + mark + text[position:]


def without_marks(text: str, marks: Marks) -> str:
    """Remove the marks from a rendered text, and put back the numbers that marks replaced."""

    def original(match: re.Match[str]) -> str:
        mark = match[0]
        if not mark[0].isdigit():
            return ""
        return str(marks[mark][1]) if mark in marks else mark  # a number that is no mark is one of the row itself

    return MARK.sub(original, text)


def find_omissions(
    row: dict[str, Any], rendering: Rendering, features: Features | None
) -> tuple[str, list[tuple[int, str]]]:
    """Find the texts of one row that its rendered text does not have, and the places where they would be.

    Args:
        row: The columns of the row by name.
        rendering: How the row becomes text.
        features: Features of the row's dataset, by which nulls that Arrow added are found; None if they are not known.

    Returns:
        The rendered text, and for each missing text a position in the rendered text, in characters, with a description.
        If the marked row is rendered differently beyond its marks, nothing is known of them, and the list is empty.

    Raises:
        Exception: If the row cannot be rendered.
    """
    conversation = rendering.conversation(without_nulls(row, struct_columns(features)))
    text = rendering.text(conversation)
    marked, marks = with_marks(conversation)
    rendered = rendering.text_or_none(marked)
    if rendered is None or without_marks(rendered, marks) != text:
        return text, []
    # In small letters, as marks are written: a template may change texts to capital letters
    positions = {
        match[0].lower(): len(without_marks(rendered[: match.start()], marks)) for match in MARK.finditer(rendered)
    }
    return text, list(_omissions(marks, positions, text))


def _omissions(marks: Marks, positions: dict[str, int], text: str) -> Iterator[tuple[int, str]]:
    """Yield a position in `text`, and a description, of each text whose mark has no position.

    The position is that of the first mark of the same message. If no text of the message is rendered, it is the end of
    the last rendered text before it, or 0.

    Args:
        marks: The marks of all texts, in the order of the conversation.
        positions: By mark, where it is in `text`; marks of missing texts have no entry.
        text: The rendered row without marks.
    """
    texts_found = {(leaf.message, value) for mark, (leaf, value) in marks.items() if mark in positions}
    first_in_message: dict[int, int] = {}
    for mark in reversed(marks):  # so that the first text of a message replaces the later ones
        if mark in positions:
            first_in_message[marks[mark][0].message] = positions[mark]
    end = 0  # where the last rendered text so far ends
    for mark, (leaf, value) in marks.items():
        if mark in positions:
            stripped = str(value).strip()
            # The mark is inside its text, so the text begins before it
            start = text.find(stripped, max(0, positions[mark] - len(str(value))))
            end = positions[mark] if start < 0 else start + len(stripped)
        elif (leaf.message, value) not in texts_found:  # a thought may be there twice, e.g. as `reasoning` too
            role = f" of {leaf.kind.role}" if leaf.kind.role else ""
            example = shorten(str(value), NUM_SHOWN, placeholder=" ...")
            yield first_in_message.get(leaf.message, end), f"`{leaf.kind.path}`{role}: {example}"
