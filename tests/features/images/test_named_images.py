"""Images that messages name are trained as if they were in a column."""

import base64
import copy
import itertools
import json
import pathlib

import pytest
from datasets import Dataset, Features, Image, IterableDataset, Json, LargeList, List, Value
from support import vision
from support.chats import answer, user
from support.models import build_tokenizer
from support.versions import current_models

from trl_packfix import check_data
from trl_packfix.features.images.named_images import with_named_images

NUM = 6


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return the paths of pictures of different sizes."""
    folder = tmp_path_factory.mktemp("pictures")
    paths = [folder / f"{i}.png" for i in range(NUM)]
    for i, path in enumerate(paths):
        vision.picture(56 + 28 * i, 56, i).save(path)
    return [str(path) for path in paths]


def data_url(path):
    with pathlib.Path(path).open("rb") as file:
        return "data:image/png;base64," + base64.b64encode(file.read()).decode()


FORMS = {
    "path": lambda path: {"type": "image", "image": path},
    "file": lambda path: {"type": "image", "image": f"file://{path}"},
    "url": lambda path: {"type": "image_url", "image_url": {"url": path}},
    "data": lambda path: {"type": "image_url", "image_url": {"url": data_url(path)}},
    "text": lambda path: {"type": "input_image", "image_url": path},
}


def rows(files, form, *, plain=False):
    """Return conversations with an image each, the last without."""
    table = []
    for i, path in enumerate(files):
        content = [{"type": "text", "text": f"what {i}?"}]
        if i < NUM - 1:
            content.insert(0, form(path))
        messages = [user(content), answer([{"type": "text", "text": "red" * i}])]
        table.append({"messages": [answer("I see"), *messages] if plain else messages})
    return table


def in_column(files):
    """Return the conversations with the images in a column."""
    placed = rows(files, lambda path: {"type": "image"})
    pictures = [[path] * (i < NUM - 1) for i, path in enumerate(files)]
    kinds = {"messages": Dataset.from_list(placed).features["messages"], "images": List(Image())}
    return Dataset.from_list(
        [row | {"images": picture} for row, picture in zip(placed, pictures, strict=True)], features=Features(kinds)
    )


def contents(dataset):
    """Return messages without keys that are None, and the pixels of images."""
    without_none = lambda entry: {key: value for key, value in entry.items() if value is not None}  # noqa: E731
    messages = [json.loads(json.dumps(row["messages"]), object_hook=without_none) for row in dataset]
    return messages, [[(image.size, image.tobytes()) for image in row["images"]] for row in dataset]


@pytest.mark.parametrize("form", FORMS)
def test_images_of_messages_become_a_column(form, files):
    expected = contents(in_column(files))
    for features in (None, Features({"messages": List(Json())})):
        table = Dataset.from_list(rows(files, FORMS[form]), features=features)
        assert contents(with_named_images(table, "train")) == expected


def test_images_of_json_in_a_stream_become_a_column(files):
    stream = Dataset.from_list(rows(files, FORMS["url"]), features=Features({"messages": List(Json())}))
    first = next(iter(with_named_images(stream.to_iterable_dataset(), "train")))
    assert first["images"] == [{"path": files[0], "bytes": None}]
    assert first["messages"][0]["content"] == [{"type": "image"}, {"type": "text", "text": "what 0?"}]


@pytest.mark.parametrize("list_type", [List, LargeList])
def test_messages_keep_no_key_of_images(list_type, files):
    """Large lists are what `Dataset.from_polars` and other tables of Arrow have."""
    part = {"type": Value("string"), "image": Value("string"), "text": Value("string")}
    messages = list_type({"role": Value("string"), "content": list_type(part)})
    table = Dataset.from_list(rows(files, FORMS["path"]), features=Features({"messages": messages}))
    moved = with_named_images(table, "train")
    assert moved.features["messages"].feature["content"].feature.keys() == {"type", "text"}


def test_decoded_images_inside_messages_become_a_column(files):
    part = {"type": Value("string"), "image": Image(), "text": Value("string")}
    kinds = Features({"messages": List({"role": Value("string"), "content": List(part)})})
    table = Dataset.from_list(rows(files, FORMS["path"]), features=kinds)
    assert contents(with_named_images(table, "train")) == contents(in_column(files))


def test_other_datasets_stay_as_they_are(files):
    text = Dataset.from_list([{"messages": [user([{"type": "text", "text": "the image"}])]}])
    as_json = Dataset.from_list(text.to_list(), features=Features({"messages": List(Json())}))
    plain = Dataset.from_dict({"text": ["image_url"]})
    for dataset in (text, as_json, text.to_iterable_dataset(), plain, in_column(files), None):
        assert with_named_images(dataset, "train") is dataset


BROKEN = {
    "data that is cut off": [user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBOR"}}])],
    "data that is no base64": [user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,é"}}])],
    "no message": [user([{"type": "image", "image": "a.png"}]), None],
}


@current_models
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_row_is_a_bad_row(name, files, tmp_path):
    table = [row["messages"] for row in rows(files, FORMS["path"])]
    table[2] = BROKEN[name]
    dataset = Dataset.from_dict({"messages": table}, features=Features({"messages": List(Json())}))
    with pytest.raises(ValueError, match="(?s)1 of 6 rows of the train dataset.*Row 2:"):
        vision.make(tmp_path, "qwen2_5_vl", dataset, max_length=400)
    trainer = vision.make(tmp_path, "qwen2_5_vl", dataset, max_length=400, bad_rows="drop")
    trainer.get_train_dataloader()
    assert trainer.packing_report.ledger.dropped["bad_row"].documents == 1


def test_rows_of_a_stream_stay_as_they_are_given(files):
    table = rows(files, FORMS["path"])
    table[0]["messages"].append(answer("I see"))
    given = copy.deepcopy(table)
    moved = with_named_images(IterableDataset.from_generator(lambda: iter(table)), "train")
    assert next(iter(moved))["messages"][-1]["content"] == [{"type": "text", "text": "I see"}]
    assert table == given


def test_an_address_without_a_value_names_no_image(files):
    table = rows(files, FORMS["url"])
    table[1] = {"messages": [user([{"type": "text", "text": "what?", "image_url": {"url": None}}])]}
    moved = with_named_images(Dataset.from_list(table), "train")
    assert moved[1]["images"] == []
    assert moved[1]["messages"][0]["content"] == [{"type": "text", "text": "what?"}]


def test_an_address_of_the_web_is_refused(files):
    table = Dataset.from_list(rows(["https://example.org/a.png"], FORMS["url"]))
    with pytest.raises(ValueError, match="Row 0 of the train dataset names the image `https://example.org/a.png`"):
        with_named_images(table, "train")


def test_text_beside_images_becomes_parts(files):
    table = Dataset.from_list(rows(files, FORMS["url"], plain=True), features=Features({"messages": List(Json())}))
    first, *_, last = with_named_images(table, "train")
    assert first["messages"][0]["content"] == [{"type": "text", "text": "I see"}]
    assert last["messages"][0]["content"] == "I see"  # a row without images is not changed


def test_a_stream_loses_the_keys_that_arrow_has_added(files):
    """Arrow gives the calls of all rows the arguments of each, as None; the features say so, and `map` drops them."""
    table = []
    for path, arguments in zip(files, ({"a": "x"}, {"b": "y"}), strict=False):
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": arguments}}}]
        calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
        messages = [user([FORMS["path"](path)]), {"role": "assistant", "content": None, "tool_calls": calls}]
        table.append({"messages": messages, "tools": tools})
    stream = Dataset.from_list(table).to_iterable_dataset()
    row = next(iter(with_named_images(stream, "train")))
    assert row["images"][0]["path"] == files[0]
    assert row["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"a": "x"}
    assert row["tools"][0]["function"]["parameters"]["properties"] == {"a": "x"}


@current_models
def test_named_images_are_trained_as_those_of_a_column(files, tmp_path):
    def batches(dataset, **settings):
        trainer = vision.make(tmp_path, "qwen2_5_vl", dataset, max_length=400, max_steps=2, **settings)
        first = itertools.islice(trainer.get_train_dataloader(), 2)
        return [(b["input_ids"].tolist(), b["labels"].tolist(), b["pixel_values"].tolist()) for b in first], trainer

    named = Dataset.from_list(rows(files, FORMS["url"]))
    column = in_column(files)
    # In JSON files, contents that are texts in some rows and parts in others are columns of JSON
    as_json = Dataset.from_list(
        column.cast_column("images", List(Image(decode=False))).to_list(),
        features=Features({"messages": List({"role": Value("string"), "content": Json()}), "images": List(Image())}),
    )
    streams = [table.to_iterable_dataset() for table in (named, column, as_json)]
    for table, same in ((named, column), (streams[0], streams[1]), (streams[2], streams[1])):
        named_batches, trainer = batches(table, assistant_only_loss=True)
        assert named_batches == batches(same, assistant_only_loss=True)[0]
    pad = trainer.processing_class.tokenizer.convert_tokens_to_ids(trainer.processing_class.image_token)
    tokens, labels, _ = named_batches[0]
    assert pad in tokens[0]
    assert pad not in labels[0]


def test_media_that_cannot_be_opened_are_refused(files):
    video = Dataset.from_list([{"messages": [user([{"type": "video", "video": "a.mp4"}])]}])
    images = Dataset.from_list(rows(files, FORMS["url"]))
    processor = vision.build_processor("qwen2_5_vl")
    with pytest.raises(ValueError, match="has `video` in their messages, and no column of images"):
        check_data(video, processor).raise_if_lost()
    assert check_data(images, processor).complete
    with pytest.raises(ValueError, match="have `image_url` in their messages"):  # of a model of text
        check_data(images, build_tokenizer()).raise_if_lost()
