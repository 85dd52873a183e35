"""Read which kinds of texts the rows of a dataset contain, and which rows contain each kind.

A *kind* is the path of a value in a row (`tool_calls[].function.name`), the role of its message, and the place of this
message in the conversation. Facts about a row are kinds, too (`KindReader` lists them). A *shape* is the set of all
kinds of a row. Datasets have few shapes, so `data_proof.py` renders only a few rows of each to find out what happens to
all texts. `read_kinds` returns the shapes of all rows as `RowKinds`. `leaves` yields each value of one conversation
with its kind, as a `Leaf`.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from datasets import Audio, Dataset, Image, IterableDataset, LargeList, List, Value, Video

from ..compat import sanitises_control_tokens
from .checks import IMAGES, undecoded_feature, undecoded_stream
from .conversation import ROLES, Message
from .row import HashedMapFunction, read_integer_column
from .texts import MESSAGES, text_columns, without_nulls

READ_AT_ONCE = 1000  # rows of a batch in memory
TEXTS = ("string", "large_string", "string_view")  # types of columns of text
# Keys of a message whose values are no texts: a template compares them with other values, or decides by them what to
# render. `marks.py` changes texts to find them in the rendered row. A change of these values would change other texts
REFERENCES = {"role", "from", "name", "tool_call_id", "id", "type"}
# The same for keys of calls and tools
SCHEMA = {
    "type",
    "id",
    "required",
    "format",
    "strict",
    "$schema",
    "additionalProperties",
}
CONSTANT = " (true, false or null)"  # end of the path of a boolean or null in a tool or in the arguments of a call
# Paths of kinds that are facts about a row (`KindReader`)
CONTROL = "Control token"
PLACEHOLDER_FOUND = "Placeholder"
BEGINS_WITH_BOS = "BOS"
RENAMED_ROLE = "Renamed role"
# Beginnings of paths. The name of a column follows, or the key of a message
NULL_IN = "Null in "
UNREAD_COLUMN = "Column "
LABEL = "label "
MEDIA = re.compile("image|video|audio")  # keys of images, videos and sounds
THOUGHT = re.compile(r"(</?think>)")  # the tags around a thought in a text; `marks.py` marks the text between them
# Keys of a message for its thought. transformers copies the one that a message has to the other keys
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
LONGEST_LABEL = 64  # a label, such as an id or a date, has fewer characters
Location: TypeAlias = tuple[str, Any, Any]  # path of a value, the list or dictionary that holds it, and its key in it


class Kind(NamedTuple):
    """The kind of a value: its path in the row, and the role and the place of its message."""

    path: str
    role: str = ""  # role of the message; empty if the value is not in a message
    # Place of the message: "first" for the first one, "earlier" for the others before the last message of the user,
    # and "last" for this message and those behind it
    place: str = ""

    @property
    def is_text(self) -> bool:
        """Whether values of this kind are looked for in the rendered row: texts, and values of tools and calls.

        Numbers elsewhere, labels, media, settings and facts about a row are not.
        """
        # In this order: labels, numbers of a message (`weight=0`), facts about a row, and settings of the template
        is_other = re.match(r"label |\w+=|[A-Z]|chat_template_kwargs", self.path) is not None
        return bool(self.path) and not is_other and not self.is_medium

    @property
    def is_medium(self) -> bool:
        """Whether values of this kind are images, videos or sounds in a message."""
        return MEDIA.search(self.path) is not None and self.path.endswith((" in content", " in message"))


OTHER_FORM = Kind("Other form")


class Leaf(NamedTuple):
    """A value of a row, with the list or dictionary that holds it, so that it can be replaced."""

    kind: Kind
    holder: Any
    key: Any
    message: int = -1  # index of its message; -1 if it is not in a message


@dataclass(frozen=True)
class KindReader:
    """A function for `Dataset.map` that reads the kinds of the values of rows.

    Facts about a row are kinds, too. Their paths begin with a capital:

        Null in COLUMN  Arrow added keys with null to the dictionaries of the column (`without_nulls`)
        Control token   a text of a message has a match of `control`
        Placeholder     the content of a message is a text with `placeholder`
        Renamed role    a message is from `human` or `gpt`
        BOS             the row is a plain text that begins with `bos`
        Other form      the row is read from `prompt` or `conversations`
        Column NAME     the column has a value that may be text, and is not read
        No form         the row cannot be read

    A kind with an empty path says that the row has a message with this role and place.

    Args:
        text_field: Name of the column of plain text.
        structs: Features of the columns whose dictionaries have keys that Arrow added (`texts.struct_columns`).
        control: A pattern of the control tokens of the tokenizer; empty to look for none.
        bos: The BOS token, if the tokenizer adds it to a text; else empty.
        placeholder: The text that stands for an image in a content; empty if the dataset has no images.
        is_formatted: Whether a function of the user makes the text of a row. It may read any column, so the kinds are
            those of `messages_of_columns`, without facts.
    """

    text_field: str
    structs: Mapping[str, Any]
    control: str = ""
    bos: str = ""
    placeholder: str = ""
    is_formatted: bool = False

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[int]]:
        """Return a hash of the kinds of each row, shape (rows,), so that rows can be counted by them."""
        names = list(batch)
        rows = (dict(zip(names, values, strict=True)) for values in zip(*batch.values(), strict=True))
        return {"kinds": [_hash_kinds(self.kinds(row)) for row in rows]}

    def kinds(self, row: Mapping[str, Any]) -> frozenset[Kind]:
        """Return the kinds of a row; only `Kind("No form")` if it cannot be read, which is refused elsewhere."""
        try:
            return frozenset(self._kinds(row))
        except Exception:  # rows may hold anything
            return frozenset([Kind("No form")])

    def _kinds(self, raw_row: Mapping[str, Any]) -> Iterator[Kind]:
        """Yield the kinds of a row, and raise any error if it cannot be read."""
        row = without_nulls(raw_row, self.structs)
        if self.is_formatted:
            yield from (leaf.kind for leaf in leaves(messages_of_columns(row)[0], {}))
            return
        columns = text_columns(raw_row, self.text_field)
        messages = [message for column in columns if isinstance(row[column], list) for message in row[column]]
        if messages:
            num_prompt = len(row["prompt"]) if "prompt" in columns else 0
            # With this argument transformers removes control tokens from texts, if its version can
            asks_to_sanitise = (row.get("chat_template_kwargs") or {}).get("sanitize_control_tokens")
            is_sanitised = asks_to_sanitise and sanitises_control_tokens()
            yield from self._kinds_of_messages(messages, num_prompt, "" if is_sanitised else self.control)
            yield from _kinds_of_arguments(row)
            yield from (Kind(f"{NULL_IN}{name}") for name in self.structs if name in row and row[name] != raw_row[name])
        elif columns and self.bos and row[columns[0]].startswith(self.bos):
            yield Kind(BEGINS_WITH_BOS)
        if columns and columns[0] in ("prompt", "conversations"):
            yield OTHER_FORM
        for name, value in row.items():
            is_read = name in columns or (messages and name in ("tools", "chat_template_kwargs"))
            if not is_read and isinstance(value, str | list | dict) and value and not str(value).isspace():
                yield Kind(f"{UNREAD_COLUMN}{name}")

    def _kinds_of_messages(self, messages: list[Message], num_prompt: int, pattern: str) -> set[Kind]:
        """Return the kinds of messages.

        Args:
            messages: All messages of a row.
            num_prompt: How many of them are the prompt.
            pattern: The pattern of control tokens; empty to look for none.
        """
        control = re.compile(pattern) if pattern else None  # from the cache of `re`
        # The fields of kinds: a plain tuple is made faster than a `Kind`, and most messages repeat the same ones
        kinds: set[Any] = set()
        for i, (role, place, message) in enumerate(_with_role_and_place(messages)):
            kinds.add(("", role, place))  # there is such a message, even if it has no text
            for path, holder, key in _locations_in_message(message):
                value = holder[key]
                if control is not None and isinstance(value, str) and control.search(value):
                    kinds.add((CONTROL, role, ""))
                if self.placeholder:
                    is_plain_content = path.startswith("content") and holder is message and isinstance(value, str)
                    if is_plain_content and self.placeholder in value:
                        kinds.add((PLACEHOLDER_FOUND, "", ""))
                # A prompt is not trained, so numbers of its messages, such as `weight=0`, do not matter
                if i >= num_prompt or "=" not in path:
                    kinds.add((path, role, place))
            if message.get("from") in ROLES:
                kinds.add((RENAMED_ROLE, "", ""))
        return {Kind(*kind) for kind in kinds}


def messages_of_columns(row: Mapping[str, Any]) -> tuple[list[Message], str]:
    """Return all columns of a row as messages, for a row whose text is made by a function of the user.

    Returns:
        A message that has the other columns of the row and no role, and behind it the messages of its column of
        messages. The second value is the name of this column; "" if the row has none.
    """
    name = next((name for name in MESSAGES if isinstance(row.get(name), list)), "")
    columns = {key: value for key, value in row.items() if key != name}
    return [columns, *row.get(name, ())], name


def leaves(messages: list[Message], arguments: Mapping[str, Any]) -> Iterator[Leaf]:
    """Yield the values of messages, and of the further arguments of their chat template, such as `tools`."""
    for i, (role, place, message) in enumerate(_with_role_and_place(messages)):
        for path, holder, key in _locations_in_message(message):
            yield Leaf(Kind(path, role, place), holder, key, i)
    for path, holder, key in _locations_in_arguments(arguments):
        yield Leaf(Kind(path), holder, key)


def _with_role_and_place(messages: list[Message]) -> list[tuple[str, str, Message]]:
    """Return each message with its role and its place, as in `Kind`."""
    roles = [_role_of(message) for message in messages]
    last_user = max((i for i, role in enumerate(roles) if role == "user"), default=0)
    places = ["earlier" if i < last_user else "last" for i in range(len(roles))]
    places[:1] = ["first"] if roles else []
    return list(zip(roles, places, messages, strict=True))


def _role_of(message: Message) -> str:
    """Return the role of a message as chat templates name it; "" without a role."""
    sender = message.get("from", "")
    return str(message.get("role") or ROLES.get(sender, sender) or "")


def _locations_in_message(message: Message) -> list[Location]:
    """Return the locations of the values of a message."""
    locations: list[Location] = []
    for key, value in message.items():
        if value is None or value == "" or key in REFERENCES:
            continue
        if isinstance(value, str):
            _add_text(message, key, locations)
        elif isinstance(value, bool | int | float):
            if key == "content" or (key == "value" and "from" in message):
                continue  # what a tool returned is no setting of the message, as `weight=0` is
            # 0 and 1 have paths of their own: under a key such as `weight` they say whether a message is trained
            locations.append((f"{key}={int(value) if value in (0, 1) else 'number'}", message, key))
        elif MEDIA.match(key):
            locations.append((f"{key} in message", message, key))
        elif key == "content" and isinstance(value, list):
            _add_parts(value, locations)
        elif isinstance(value, list | dict):
            _add_nested(value, key, locations)
    return locations


def _locations_in_arguments(arguments: Mapping[str, Any]) -> list[Location]:
    """Return the locations of the values in the arguments of a chat template."""
    locations: list[Location] = []
    for name, value in arguments.items():
        if isinstance(value, list | dict):
            _add_nested(value, name, locations)
        elif value is not None:
            locations.append((f"chat_template_kwargs.{name}", arguments, name))
    return locations


def _add_text(message: Message, key: str, locations: list[Location]) -> None:
    """Append the locations of a text of a message to `locations`."""
    text = message[key]
    path = key
    if key == "content" or "from" in message:  # a message with `from` has its content in `value`
        path = "content beside tool_calls" if message.get("tool_calls") else "content"
        if "</think>" in text:
            locations.append((f"{path} before </think>", message, key))
    elif "role" in message and key not in THOUGHTS:
        is_short_word = len(text) < LONGEST_LABEL and len(text.split()) == 1
        if is_short_word:  # an id, a date, a language: no text to train
            path = f"{LABEL}{key}"
    if not text.isspace():
        locations.append((path, message, key))


def _add_parts(content: list[Any], locations: list[Location]) -> None:
    """Append the locations of the texts and media in a content that is a list of parts to `locations`."""
    for i, content_part in enumerate(content):
        if not isinstance(content_part, dict):
            locations.append(("content in parts", content, i))
            continue
        part_type = str(content_part.get("type"))
        media = next((key for key in content_part if MEDIA.search(key) and content_part[key] is not None), None)
        if media is not None:
            locations.append((f"{media} in content", content_part, media))
        # A part of type "image" without an image has no text: it stands for an image in a column
        elif not MEDIA.search(part_type):
            part_locations: list[Location] = []
            _add_nested(content_part, "", part_locations)
            path = "content in parts" if "text" in content_part else f"{part_type} in content"
            locations.extend((path, holder, key) for _, holder, key in part_locations)


def _add_nested(value: list[Any] | dict[str, Any], path: str, locations: list[Location]) -> None:
    """Append the locations of the texts inside lists and dictionaries to `locations`.

    In tools and in arguments of calls, numbers, booleans and nulls are appended, too. Elsewhere they are no text.

    Args:
        value: A list or dictionary.
        path: Its path in the row. In the paths of its elements, `[]` stands for the index in a list, and `*` for the
            name of an argument or parameter, because each tool has its own.
        locations: The list to append to.
    """
    is_list = isinstance(value, list)
    has_free_names = not is_list and path.endswith(("arguments", "properties"))
    for key, element in enumerate(value) if isinstance(value, list) else value.items():
        # Values of these keys are no text. A dictionary under such a key is read all the same, because it describes a
        # parameter that has the name of the key. Only under `required`, which lists parameters, nothing is read
        if key in SCHEMA and (key == "required" or not isinstance(element, dict)):
            continue
        inner_path = f"{path}[]" if is_list else f"{path}.{'*' if has_free_names else key}"
        if isinstance(element, str):
            if element and not element.isspace():
                locations.append((inner_path, value, key))
        elif isinstance(element, list | dict):
            _add_nested(element, inner_path, locations)
        elif "arguments" in path or path.startswith("tools"):
            if element is None or isinstance(element, bool):
                locations.append((inner_path + CONSTANT, value, key))
            elif isinstance(element, int | float):
                locations.append((inner_path, value, key))


def _kinds_of_arguments(row: Mapping[str, Any]) -> Iterator[Kind]:
    """Yield the kinds of the tools and the further template arguments of a row."""
    tools = row.get("tools")
    arguments = dict(row.get("chat_template_kwargs") or {})
    if isinstance(tools, str):
        yield from _kinds_of_tools(tools)
    elif tools:
        arguments["tools"] = tools
    yield from {Kind(path) for path, _, _ in _locations_in_arguments(arguments)}


@lru_cache(1024)
def _kinds_of_tools(tools: str) -> tuple[Kind, ...]:
    """Return the kinds of tools that are a text of JSON; a text that is not JSON has no kinds.

    The result is cached, because many rows have the same tools.
    """
    try:
        schemas = json.loads(tools) if tools.strip() else []
    except ValueError:
        return ()
    return tuple({Kind(path) for path, _, _ in _locations_in_arguments({"tools": schemas})})


@lru_cache(4096)
def _hash_kinds(kinds: frozenset[Kind]) -> int:
    """Hash kinds to 63 bits. The hash is equal in every process."""
    return int.from_bytes(hashlib.sha256(repr(sorted(kinds)).encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class RowKinds:
    """The kinds of all rows of a dataset."""

    rows: Any  # the table, or a list of the first rows of a stream
    shapes: list[frozenset[Kind]]  # the sets of kinds that rows have, the most frequent first
    first_rows: list[int]  # for each shape the index of the first row that has it
    shape_of: npt.NDArray[np.int64]  # for each row the index of its shape, shape (rows,)

    def __len__(self) -> int:
        return len(self.shape_of)

    @property
    def is_of_stream(self) -> bool:
        """Whether the rows are the first rows of a stream."""
        return isinstance(self.rows, list)

    def rows_with(self, kinds: Collection[Kind]) -> npt.NDArray[np.int64]:
        """Return the indices of the rows that have at least one of these kinds."""
        has = np.array([not shape.isdisjoint(kinds) for shape in self.shapes], bool)
        return np.flatnonzero(has[self.shape_of])

    @property
    def kinds(self) -> frozenset[Kind]:
        """All kinds of all rows."""
        return frozenset().union(*self.shapes)


def read_kinds(dataset: Dataset | IterableDataset, reader: KindReader, *, num: int, num_proc: int | None) -> RowKinds:
    """Read the kinds of all rows of a table, or of the first rows of a stream.

    Args:
        dataset: A table or a stream.
        reader: Returns the kinds of a row. `datasets` caches the hashes of the kinds of a table.
        num: Number of rows of a stream that are read.
        num_proc: Number of processes that read a table.
    """
    if isinstance(dataset, Dataset):
        table = dataset.with_format(None)
        columns = table.select_columns([name for name, feature in table.features.items() if _is_read(name, feature)])
        for name, feature in columns.features.items():
            encoded = undecoded_feature(feature)
            if encoded != feature:
                columns = columns.cast_column(name, encoded)
        hashes = np.zeros(len(table), np.int64)
        rows = table
        if columns.column_names and len(table):  # `map` returns no column for a table without rows
            hashed = columns.map(
                HashedMapFunction(reader),
                batched=True,
                batch_size=READ_AT_ONCE,
                remove_columns=columns.column_names,
                num_proc=num_proc if len(table) > READ_AT_ONCE * (num_proc or 1) else None,
                desc="Reading what the rows give",
            )
            hashes = read_integer_column(hashed, "kinds")
    else:
        rows = columns = list(islice(undecoded_stream(dataset), num))
        hashes = np.array([_hash_kinds(reader.kinds(row)) for row in rows], np.int64)
    # Rows with equal hashes have the same shape. Sort the shapes, the most frequent first
    _, first, shape_of, counts = np.unique(hashes, return_index=True, return_inverse=True, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    first_rows = first[order].tolist()
    shapes = [reader.kinds(columns[row]) for row in first_rows]
    sorted_index = np.argsort(order)  # the inverse permutation: for each shape its index after the sort
    return RowKinds(rows, shapes, first_rows, sorted_index[shape_of])


def _is_read(name: str, feature: Any) -> bool:
    """Return whether a column with this feature may have texts or settings."""
    if isinstance(feature, List | LargeList) and isinstance(feature.feature, Value):
        feature = feature.feature  # a list of numbers, such as an embedding, has no text
    if isinstance(feature, Value):
        return str(feature.dtype) in TEXTS
    return name not in IMAGES and not isinstance(feature, Image | Audio | Video)
