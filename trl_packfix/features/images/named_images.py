"""Move the images that messages name into a column `images`, and leave a placeholder in place of each image.

This is the first step for the user's dataset; checks and recipes then find the images where TRL reads them. OpenAI
writes `{"type": "image_url", "image_url": {"url": ...}}`, Qwen `{"type": "image", "image": ...}`. TRL reads
images from a column only, and a chat template writes the placeholder of an image without its pixels.
"""

import base64
import re
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, Image, IterableDataset, LargeList, List

from ...compat import main_process_first
from ...samples.checks import (
    columns_of,
    first_rows,
    has_images,
    has_transform,
    undecoded_feature,
    undecoded_stream,
)
from ...samples.texts import MESSAGES, PAIR, struct_columns, without_nulls

COLUMNS = (*MESSAGES, *PAIR)  # "messages" and the other names of columns of messages, "prompt" and "completion"
KEYS = ("image", "image_url", "input_image")  # keys of a part of a content that name an image
# Finds one of these keys in JSON ("image": ...), or in the text of a column's type ({'image': Value('string')})
NAMED_IMAGE = re.compile(rf"""["']({"|".join(KEYS)})["'] *:""")
AnyDataset = TypeVar("AnyDataset")


def with_named_images(dataset: AnyDataset, name: str) -> AnyDataset:
    """Return a dataset in which a column `images` has the images that messages name, and messages have placeholders.

    A placeholder is `{"type": "image"}`. The files of images are opened when rows are read.

    Args:
        dataset: A table, a stream, or a dictionary of them. A dataset that has a column of images already or names no
            images, and any other object, is returned as it is.
        name: The dataset's name in messages.

    Raises:
        ValueError: If an image is named by an address of the web.
    """
    if isinstance(dataset, dict):
        return type(dataset)({key: with_named_images(value, key) for key, value in dataset.items()})
    columns = [column for column in columns_of(dataset) if column in COLUMNS]
    if not columns or has_images(dataset) or has_transform(dataset) or not _names_images(dataset, columns):
        return dataset
    move: Any = partial(_move_images, columns=columns, name=name)
    # No image is decoded: it would be encoded again when the row is written
    if isinstance(dataset, IterableDataset):
        # A mapped stream has no features. They say which keys of the rows Arrow has added, so these are removed now
        move = partial(move, structs=struct_columns(dataset.features))
        stream: Any = undecoded_stream(dataset).map(move, with_indices=True)
        return stream
    assert isinstance(dataset, Dataset)
    table = dataset
    with main_process_first():
        for column in columns:
            encoded = undecoded_feature(table.features[column])
            if encoded != table.features[column]:
                table = table.cast_column(column, encoded)
        features = {column: _without_images(kind) for column, kind in table.features.items()}
        kinds = Features(features | {"images": List(Image())})
        moved: Any = table.map(move, with_indices=True, features=kinds, desc=f"Moving images of the {name} dataset")
    return moved


def _names_images(dataset: Any, columns: list[str]) -> bool:
    """Return whether a message names an image: in any row of a table, or in the first rows of a stream."""
    if isinstance(dataset, IterableDataset):
        return any(_move_images(row, 0, columns=columns, name="")["images"] for row in first_rows(dataset))
    # No row has to be read if the types of the columns have no such key. A column of JSON may have any key
    types = [str(dataset.features[column]) for column in columns]
    if not any("Json" in text or NAMED_IMAGE.search(text) for text in types):
        return False
    tables = dataset.select_columns(columns).with_format("arrow").iter(1000)
    return any(_contains_name(chunk) for table in tables for column in columns for chunk in table.column(column).chunks)


def _contains_name(values: pa.Array) -> bool:
    """Return whether values, which may be nested, contain one of `KEYS` with a value that is not None.

    In JSON the key is enough: a value of null is not told apart, and `_move_images` then finds no image.
    """
    kind = values.type
    if isinstance(kind, pa.JsonType):
        return bool(pc.any(pc.match_substring_regex(values.storage, NAMED_IMAGE.pattern)).as_py())
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _contains_name(values.flatten())
    if not pa.types.is_struct(kind):
        return False
    fields = {kind.field(i).name: values.field(i) for i in range(kind.num_fields)}
    images = [column for key, column in fields.items() if key in KEYS]
    other_values = [column for key, column in fields.items() if key not in KEYS]
    return any(column.null_count < len(column) for column in images) or any(map(_contains_name, other_values))


def _without_images(feature: Any) -> Any:
    """Return the feature of a column of messages whose parts have no images."""
    if isinstance(feature, List | LargeList):
        return type(feature)(_without_images(feature.feature))
    if isinstance(feature, dict):
        return {key: _without_images(inner) for key, inner in feature.items() if key not in KEYS}
    return feature


def _move_images(
    row: Mapping[str, Any],
    number: int,
    *,
    columns: list[str],
    name: str,
    structs: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the columns of messages of a row, with a placeholder in place of each image, and the column `images`.

    Args:
        row: the columns of the row.
        number: the number of the row, for messages.
        columns: names of the columns with messages.
        name: name of the dataset, for messages.
        structs: the `struct_columns` from which keys that Arrow has added are removed; these are returned, too.
    """
    row = without_nulls(row, structs)
    images: list[Any] = []

    def move_image(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        part = {key: value for key, value in part.items() if not _is_null(key, value)}
        key = next((key for key in KEYS if key in part), None)
        if key is None:
            return part
        images.append(_to_stored_image(part[key], f"Row {number} of the {name} dataset"))
        return {"type": "image"}

    def move_images_of_message(message: Any) -> Any:
        content = message.get("content") if isinstance(message, dict) else None
        return message | {"content": [*map(move_image, content)]} if isinstance(content, list) else message

    lists = {column: row[column] for column in columns if isinstance(row[column], list)}
    changed = {column: [*map(move_images_of_message, messages)] for column, messages in lists.items()}
    # Write every content as a list of parts. To the first plain text of the user TRL would add a placeholder for each
    # image of the row, beside the placeholders that are there
    if images:
        changed = {column: [*map(_with_parts, messages)] for column, messages in changed.items()}
    without_added_keys = {column: row[column] for column in structs if column in row}
    return {**without_added_keys, **changed, "images": images}


def _is_null(key: str, value: Any) -> bool:
    """Return whether a value of a part says nothing: None or, for an image, a dictionary such as {"url": None}."""
    return value is None or (key in KEYS and isinstance(value, dict) and not any(value.values()))


def _with_parts(message: Any) -> Any:
    """Return a message whose content, if it is a text, is a list of one part."""
    if isinstance(message, dict) and isinstance(message.get("content"), str):
        return message | {"content": [{"type": "text", "text": message["content"]}]}
    return message


def _to_stored_image(value: Any, where: str) -> Any:
    """Return an image as `datasets` stores it: its path or its bytes."""
    if isinstance(value, dict) and "url" in value:
        value = value["url"]
    if not isinstance(value, str):
        return value if isinstance(value, dict) else Image().encode_example(value)
    if re.match(r"https?://", value):
        raise ValueError(
            f"{where} names the image `{value[:80]}`. Images are read in each epoch, and are not fetched from the web. "
            "Download them, and name their files, or give their bytes in a column `images`."
        )
    if value.startswith("data:"):
        text = value.partition(",")[2]
        try:
            return {"path": None, "bytes": base64.b64decode(text)}
        except ValueError:  # cut off, for example: bytes that are no image make it a bad row, as a broken file does
            return {"path": None, "bytes": text.encode()}
    return {"path": value.removeprefix("file://"), "bytes": None}
