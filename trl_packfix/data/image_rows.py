"""Documents with images: rows of a vision dataset, measured once and processed when they are read.

A processor turns the text and the images of a row into tokens and pixels. Only its result says how many tokens an image
has, so it runs once for every row before training, and the numbers that planning needs are cached: the length, the
trained tokens, where the last image ends, what the vision tower reads. Images are decoded then, since a broken one must
be found before training. They are not processed where another of the same size was (`image_sizes`), except in every
16th row, whose numbers are compared. Pixels are not kept. Whoever reads a document (a worker of the data loader)
decodes its images and runs the processor, and must get the same tokens.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from datasets import Dataset, Features, Value
from datasets import Sequence as ListOf
from torch import Tensor
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from ..compat import training_every_token
from ..samples.apply import CONTEXT, EARLIER, GROWS, NUMBERS, ROW, TURN, TURNS
from ..samples.conversation import Conversation
from ..samples.row import BAD_ROW, Cached, MaskCounts, TurnCounts
from ..samples.turns import TurnRule
from .collator import IGNORE_INDEX, READ
from .encoded_images import decoded
from .image_sizes import depends_on_sizes, processing_sizes
from .prefix_collator import Compared
from .reader import Rows, TokenReader

logger = logging.getLogger(__name__)

CHECKED = 16  # of so many rows one is processed, to compare with what the sizes of its images give
NUM_SHOWN = 10  # rows that a message names
IMAGES_FROM = 2**31  # numbers that stand for images where documents are compared: above all tokens
# Marks tokens of images where a processor returns it: 1 is an image, 0 is text
TOKEN_KINDS = ("mm_token_type_ids", "token_type_ids")
MEASURES = Features(
    {
        "length": Value("int64"),
        "trained": Value("int64"),
        "first_is_labelled": Value("bool"),
        "image_start": Value("int64"),
        "image_stop": Value("int64"),
        "image_count": Value("int64"),
        "image_values": Value("int64"),
        "image_squares": Value("int64"),
        # To sort documents by their beginnings: tokens, first and stop of each image one after the other, hashes
        "tokens": ListOf(Value("uint32")),
        "is_target": ListOf(Value("bool")),
        "spans": ListOf(Value("int64")),
        "contents": ListOf(Value("binary")),
        "digest": Value("binary"),
        "differs": Value("bool"),
        BAD_ROW: Value("string"),
    }
)
TURN_MEASURES = Features(MEASURES | dict.fromkeys(NUMBERS, Value("int64")))  # with one document per assistant turn


class RowProcessor:
    """One row of the dataset -> one document: its tokens, labels, and what the model needs of its images.

    The row goes through TRL's collator alone, which gives what it gives in a batch of TRL, without padding.

    Args:
        collate: TRL's collator; its `max_length` and padding are ignored, because documents are cut later.
    """

    def __init__(self, collate: DataCollatorForVisionLanguageModeling):
        self.processor = collate.processor
        self._collate = replace(collate, max_length=None, pad_to_multiple_of=None)
        self._by_size: RowProcessor | None = None

    def __reduce__(self) -> Any:
        return RowProcessor, (self._collate,)  # without the sizes known so far: `datasets` hashes it to find its cache

    @property
    def by_size(self) -> "RowProcessor":
        """The same without processing images, if others of the same size were processed: pixels are left out."""
        if self._by_size is None:
            self._by_size = RowProcessor(replace(self._collate, processor=processing_sizes(self.processor)))
        return self._by_size

    @cached_property
    def settings(self) -> bytes:
        """What decides the pixels of an image, besides the image."""
        return str(self.processor.image_processor.to_json_string()).encode()

    @cached_property
    def special_tokens(self) -> list[int]:
        """Tokens that no text has, such as those around an image."""
        tokenizer: Any = getattr(self.processor, "tokenizer", self.processor)
        return sorted({*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()})

    def without_masks(self) -> "RowProcessor":
        """The same for rows in which every token is trained."""
        return RowProcessor(training_every_token(self._collate))

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """The document of a row: `input_ids` and `labels` as arrays, (tokens,), the rest as tensors of one row."""
        row = with_images(row)
        if row.get("completion") == "":  # TRL joins its tokens, and those of an empty text are no whole numbers
            text = {self._collate.dataset_text_field: row["prompt"], "images": row["images"]}
            document = self.without_masks()(text)
            return document | {"labels": np.full_like(document["labels"], IGNORE_INDEX)}
        document = dict(self._collate([row]))
        document.pop("attention_mask", None)  # all ones: one row has no padding
        for name in ("input_ids", "labels"):
            document[name] = document[name][0].numpy()
        return document

    def image_span(self, document: dict[str, Any]) -> tuple[int, int]:
        """Index of the first token of an image, and after the last; (0, 0) without images.

        The whole document if it cannot be known.
        """
        if "pixel_values" not in document:
            return 0, 0
        is_image = self._is_image(document)
        where = np.flatnonzero(is_image)
        return (int(where[0]), int(where[-1]) + 1) if len(where) else (0, len(is_image))

    def cut(self, document: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
        """The tokens of a part of a document, and the images among them. It does not begin or end inside an image."""
        if start == 0 and stop == len(document["input_ids"]):
            return document
        spans = self._image_spans(document)
        within = [i for i, (first, behind) in enumerate(spans) if first >= start and behind <= stop]
        overlapping = [i for i, (first, behind) in enumerate(spans) if behind > start and first < stop]
        assert within == overlapping, "a document is never cut inside an image"
        cut = {name: document[name][start:stop] for name in ("input_ids", "labels")}
        cut |= {name: document[name][:, start:stop] for name in TOKEN_KINDS if name in document}
        if within:
            cut |= images_between(document, within[0], within[-1] + 1, num=len(spans))
        return cut

    def _is_image(self, document: dict[str, Any]) -> npt.NDArray[np.bool_]:
        is_image = document["input_ids"] == getattr(self.processor, "image_token_id", -1)
        for name in TOKEN_KINDS:
            if name in document:
                is_image = is_image | (document[name][0].numpy() != 0)
        return np.asarray(is_image)

    def compare(self, documents: Sequence[dict[str, Any]]) -> list[Compared]:
        """What is compared to find common beginnings: tokens and, in place of its first placeholder, each image.

        Two images have the same number there if the processor returns the same for them. All images of a document count
        as one if their outputs cannot be told apart.
        """
        numbers: dict[bytes, int] = {}
        compared = []
        for document in documents:
            tokens, spans = np.asarray(document["input_ids"]).astype(np.int64), self._image_spans(document)
            for i, (first, _) in enumerate(spans):
                content = _content(images_between(document, i, i + 1, num=len(spans)))
                tokens[first] = IMAGES_FROM + numbers.setdefault(content, len(numbers))
            compared.append(Compared(tokens, spans))
        return compared

    def image_contents(self, document: dict[str, Any], images: list[Any]) -> list[tuple[tuple[int, int], bytes]]:
        """The span of each image that `compare` tells apart, and a hash of it from the image as it was given.

        Images of one content may have more tokens in one document than in another, and then are not the same.
        """
        spans = self._image_spans(document)
        images_of_spans = [[image] for image in images] if len(spans) == len(images) else [images] * len(spans)
        return [
            ((first, stop), _hash_of_images(hashlib.blake2b(self.settings + b"%d" % (stop - first)), images_of_span))
            for (first, stop), images_of_span in zip(spans, images_of_spans, strict=True)
        ]

    def _image_spans(self, document: dict[str, Any]) -> list[tuple[int, int]]:
        """The span of each image whose outputs can be told apart from the others, else the one of all."""
        first, stop = self.image_span(document)
        if first == stop:
            return []
        edges = np.flatnonzero(np.diff(self._is_image(document)[first:stop].astype(np.int8))) + first + 1
        starts, stops = [first, *edges[1::2].tolist()], [*edges[::2].tolist(), stop]
        spans = list(zip(starts, stops, strict=True))
        return spans if _ends_of_images(document, len(spans)) is not None else [(first, stop)]


def measure(
    dataset: Dataset,
    process: RowProcessor,
    name: str,
    *,
    num_proc: int | None,
    drops: bool,
    rule: TurnRule | None = None,
) -> Dataset:
    """Run the processor on every row and keep the numbers of `MEASURES`; `datasets` caches them beside the data.

    Images of a size that was processed already are not processed again. If one of the rows compared differs, all are.

    Args:
        name: of the dataset, for messages.
        drops: rows that cannot be processed get length 0 and their reason in `BAD_ROW`.
        rule: measure a document for each assistant turn of a row that is trained, and note which (`NUMBERS`). A
            conversation without such a turn is one document, in which nothing is trained.

    Raises:
        ValueError: the dataset has a transform; rows cannot be processed and `drops` is False.
    """
    if dataset.format["type"] == "custom":
        raise ValueError(
            f"The {name} dataset of {len(dataset)} rows has images and a transform (`Dataset.with_transform`), and "
            "packing is on. Packing must know the length of every document before training, and a transform may make "
            "another image at each reading. Materialise it with `Dataset.map`, or set `packing=False`."
        )

    def run(every: int) -> Dataset:
        return dataset.map(
            Cached(_measures if rule is None else _measures_of_turns),
            with_indices=True,
            batched=rule is not None,
            batch_size=1,
            fn_kwargs={"process": process, "every": every} | ({} if rule is None else {"rule": rule}),
            remove_columns=dataset.column_names,
            features=MEASURES if rule is None else TURN_MEASURES,
            num_proc=num_proc,
            desc=f"Measuring {name} dataset",
        )

    if depends_on_sizes(process.processor):
        measured = run(CHECKED)
        differs = np.flatnonzero(measured["differs"])
        if len(differs):
            logger.warning(
                "%d of %d compared rows of the %s dataset have another length than the sizes of their images give; the "
                "first is row %d. The processor runs on every row instead, which takes longer.",
                *(len(differs), -(-len(measured) // CHECKED), name, differs[0]),
            )
            measured = run(1)
    else:
        measured = run(1)
    if not drops:
        bad = np.flatnonzero(np.array(measured[BAD_ROW]) != "")
        if len(bad):
            first = measured.select(bad[:NUM_SHOWN])[BAD_ROW]
            raise ValueError(
                f"{len(bad)} of {len(measured)} rows of the {name} dataset with images cannot be processed; the first "
                f"are {bad[:NUM_SHOWN].tolist()}. Row {bad[0]}: {first[0]}. Every image must be found and decoded, and "
                "every placeholder in the text needs exactly one image. Correct or remove these rows "
                '(`dataset.select`), or set `bad_rows="drop"`, which drops and counts them.'
            )
    return measured


def measures_of(
    row: dict[str, Any], index: int, process: RowProcessor, *, every: int, rule: TurnRule | None
) -> dict[str, list[Any]]:
    """The numbers of the documents of a row, as columns; see `measure`."""
    if rule is None:
        return {name: [value] for name, value in _measures(row, index, process, every).items()}
    return _measures_of_turns({name: [value] for name, value in row.items()}, [index], process, every, rule)


def _measures_of_turns(
    batch: Any, indices: list[int], process: RowProcessor, every: int, rule: TurnRule
) -> dict[str, list[Any]]:
    """The numbers of the documents of one conversation, as columns."""
    try:
        row = {name: values[0] for name, values in dict(batch).items()}
        conversation, turns, counts = rule.choose(Conversation.from_row(row, images_of(row)))
        turns = turns or [-1]
    except Exception as error:
        columns = {name: [value] for name, value in _unmeasured(error).items()}
        return columns | _numbers_of_turns(indices[0], [-1], grows=[False], counts=MaskCounts())
    documents, texts = [], [""]
    for turn in turns:
        try:
            sample = rule.row_of_turn(conversation, turn, process.processor)
        except Exception as error:
            documents.append(_unmeasured(error))
            texts.append("")
        else:
            documents.append(_measures(sample, indices[0], process, every))
            texts.append(sample["prompt"] + sample["completion"])
    grows = [before != "" and text.startswith(before) for before, text in pairwise(texts)]
    columns = {name: [document[name] for document in documents] for name in MEASURES}
    return columns | _numbers_of_turns(indices[0], turns, grows=grows, counts=counts)


def _numbers_of_turns(row: int, turns: list[int], *, grows: list[bool], counts: MaskCounts) -> dict[str, list[int]]:
    columns = {ROW: [row] * len(turns), TURN: turns, GROWS: [int(each) for each in grows]}
    of_row = {TURNS: counts.turns, CONTEXT: counts.context, EARLIER: counts.earlier}  # at the first of its documents
    return columns | {name: [count] + [0] * (len(turns) - 1) for name, count in of_row.items()}


def _measures(row: Any, index: int, process: RowProcessor, every: int) -> dict[str, Any]:
    """The numbers of a row. Its images are processed in one of `every` rows, and in all with 1."""
    try:
        # Reading the row decodes its images, so a missing or broken one is found here.
        row = with_images(row)
        by_size = None if every == 1 else _numbers_by_size(row, process)
        if by_size is not None and index % every:
            return by_size
        numbers = _numbers(row, process)
        return numbers | {"differs": every > 1 and by_size != numbers}
    except Exception as error:  # any error of the processor, the image library or the file system
        return _unmeasured(error)


def _unmeasured(error: Exception) -> dict[str, Any]:
    """The numbers of a row that cannot be processed, and why."""
    text = next(iter(str(error).splitlines()), "")[:200].rstrip(". ")
    numbers = {name: 0 for name, kind in MEASURES.items() if kind == Value("int64")}
    lists: dict[str, Any] = {"tokens": [], "is_target": [], "spans": [], "contents": []}
    reason = f"{type(error).__name__}: {text}"
    return numbers | lists | {"first_is_labelled": False, "digest": b"", "differs": False, BAD_ROW: reason}


def _numbers_by_size(row: dict[str, Any], process: RowProcessor) -> dict[str, Any] | None:
    try:
        return _numbers(row, process.by_size)
    except Exception:  # the processor itself then says what is wrong with the row
        return None


def _numbers(row: dict[str, Any], process: RowProcessor) -> dict[str, Any]:
    document = process(row)
    tokens, labels = document["input_ids"], document["labels"]
    sizes, images = sequence_sizes(document), images_of(row)
    start, stop = process.image_span(document)
    contents = process.image_contents(document, images)
    return {
        "length": len(tokens),
        "trained": int((labels[1:] != IGNORE_INDEX).sum()),
        "first_is_labelled": bool(len(labels) and labels[0] != IGNORE_INDEX),
        "image_start": start,
        "image_stop": stop,
        "image_count": len(images),
        "image_values": int(sizes.sum()),
        "image_squares": int((sizes**2).sum()),
        "tokens": tokens.tolist(),
        "is_target": (labels != IGNORE_INDEX).tolist(),
        "spans": [place for span, _ in contents for place in span],
        "contents": [content for _, content in contents],
        "digest": _digest(document, images, process.settings),
        "differs": False,
        BAD_ROW: "",
    }


def images_of(row: Any) -> list[Any]:
    """The images of a row of the dataset; [] if it has none."""
    images = [row["image"]] if "image" in row else row.get("images")
    return [image for image in images or [] if image is not None]


def with_images(row: Any) -> dict[str, Any]:
    """The row with all its images in `images`, decoded."""
    return {name: row[name] for name in row if name != "image"} | {
        "images": [decoded(image) for image in images_of(row)]
    }


def sequence_sizes(document: dict[str, Any]) -> Tensor:
    """Numbers in each sequence that the vision tower reads, shape (S,): an image, or a tile of one.

    Processors return images as the patches of all of them, with the grid of each; or as tiles, as patches of several
    images or as images of one size each, padded with zeros to the most tiles.
    """
    pixels = document.get("pixel_values")
    if pixels is None:
        return torch.zeros(0, dtype=torch.int64)
    grid = document.get("image_grid_thw")
    if grid is not None:
        return grid.prod(-1) * (pixels.numel() // pixels.shape[0])
    sequences = pixels.reshape(-1, *pixels.shape[-3 if pixels.dim() > 3 else -2 :]).flatten(1)
    return sequences.any(1) * sequences.shape[1]


def images_between(document: dict[str, Any], first: int, stop: int, *, num: int) -> dict[str, Tensor]:
    """What the processor returns for the images `first` to `stop - 1` of the `num` images of a document, by name."""
    names = document.keys() - READ - {*TOKEN_KINDS}
    if (first, stop) == (0, num):
        return {name: document[name] for name in names}
    ends = _ends_of_images(document, num)
    assert ends is not None  # else they count as one
    images = {}
    for name, (axis, stops) in ends.items():
        begin = 0 if first == 0 else stops[first - 1]
        images[name] = document[name].narrow(axis, begin, (0 if stop == 0 else stops[stop - 1]) - begin)
    return images


def _ends_of_images(document: dict[str, Any], num: int) -> dict[str, tuple[int, list[int]]] | None:
    """For each output of the processor its axis of images, and where each of `num` images ends there; None if unknown.

    An output has one entry per image, or the patches of all images, with the grid of each.
    """
    grid = document.get("image_grid_thw")
    patches = [] if grid is None or len(grid) != num else grid.prod(-1).cumsum(0).tolist()
    ends = {}
    for name in document.keys() - READ - {*TOKEN_KINDS}:
        shape = document[name].shape
        if patches and name == "pixel_values" and shape[0] == patches[-1]:
            ends[name] = 0, patches
        elif num in shape[:1] or (shape[:1] == (1,) and num in shape[1:2]):
            ends[name] = 0 if shape[0] == num else 1, [*range(1, num + 1)]
        else:
            return None
    return ends


def _content(images: dict[str, Tensor]) -> bytes:
    """Hash of what the processor returns for images."""
    digest = hashlib.blake2b()
    for name in sorted(images):
        values = images[name].contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)} ".encode())
        digest.update(values.flatten().view(torch.uint8).numpy().data)
    return digest.digest()


def _digest(document: dict[str, Any], images: list[Any], settings: bytes) -> bytes:
    """Hash of the tokens and labels of a document, of its images, and of what the processor makes of them."""
    digest = hashlib.sha256(settings if images else b"")
    for name in ("input_ids", "labels"):
        digest.update(np.ascontiguousarray(document[name], dtype="<i8").data)
    return _hash_of_images(digest, images)


def _hash_of_images(digest: Any, images: list[Any]) -> bytes:
    for image in images:
        pixels = np.asarray(image)
        digest.update(f"{pixels.dtype} {pixels.shape}".encode() + pixels.tobytes())
    return bytes(digest.digest())


def _with_neighbours(
    first: npt.NDArray[np.int64], stop: npt.NDArray[np.int64], is_special: npt.NDArray[np.bool_]
) -> list[tuple[int, int]]:
    """The spans of images with the special tokens next to them; of those between two images each gets a half."""
    spans = []
    low, high = np.append(0, stop)[:-1], np.append(first, len(is_special))[1:]
    for start, behind, least, most in zip(first.tolist(), stop.tolist(), low.tolist(), high.tolist(), strict=True):
        before, after = start, behind
        while before > least and is_special[before - 1]:
            before -= 1
        while after < most and is_special[after]:
            after += 1
        if before == least > 0:
            before = start - (start - least + 1) // 2
        if after == most < len(is_special):
            after = behind + (most - behind) // 2
        spans.append((before, after))
    return spans


class ImageRows(Rows):
    """The documents of a dataset with images: `Rows` for planning, from what was measured.

    Args:
        dataset: raw rows, in a form of TRL's vision datasets; images are decoded when a row is read. Of a stream a
            list of rows, whose images are encoded.
        process: makes the document of a row, or of a turn.
        measures: from `measure`, one row per document.
        turns: what was counted, with one document per assistant turn.
        rule: by which turns are chosen.
    """

    def __init__(
        self,
        dataset: Dataset | list[dict[str, Any]],
        process: RowProcessor,
        measures: Dataset,
        *,
        turns: TurnCounts | None = None,
        rule: TurnRule | None = None,
    ):
        self.turns = turns
        self._rule = rule
        self._dataset, self._process = dataset, process
        self._table = measures
        self.compare = process.compare
        table = measures.with_format("arrow")[:]
        is_per_turn = ROW in measures.column_names
        self.conversations = table[ROW].to_numpy() if is_per_turn else None
        self._turns: npt.NDArray[np.int64] | None = table[TURN].to_numpy() if is_per_turn else None
        self.lengths = table["length"].to_numpy()
        self._trained: npt.NDArray[np.int64] = table["trained"].to_numpy()
        self._first_is_labelled: npt.NDArray[np.bool_] = table["first_is_labelled"].to_numpy()
        self.image_stops = table["image_stop"].to_numpy()
        self.image_counts: npt.NDArray[np.int64] = table["image_count"].to_numpy()
        self.image_values: npt.NDArray[np.int64] = table["image_values"].to_numpy()
        self.image_squares: npt.NDArray[np.int64] = table["image_squares"].to_numpy()

    def digests(self, rows: npt.NDArray[np.int64]) -> bytes:
        column = self._table.with_format("arrow")[:]["digest"]
        return b"".join(column.take(rows).to_pylist())

    @cached_property
    def _spans(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The row, the first token and the stop of each image that is told apart, all of shape (S,), in order."""
        spans = self._table.with_format("arrow")[:]["spans"].combine_chunks()
        first, stop = spans.flatten().to_numpy().reshape(-1, 2).T
        return np.repeat(np.arange(len(self)), spans.value_lengths().to_numpy() // 2), first, stop

    @property
    def compared(self) -> TokenReader:
        """The tokens of all rows, with the number of an image in place of its first placeholder: images by content."""
        table = self._table.with_format("arrow")[:]
        tokens = table["tokens"].combine_chunks()
        flat = tokens.flatten().to_numpy().copy()
        ends = np.cumsum(tokens.value_lengths().to_numpy(), dtype=np.int64)
        numbers: dict[bytes, int] = {}
        contents = table["contents"].combine_chunks().flatten().to_pylist()
        row, first, _ = self._spans
        begins = np.concatenate([[0], ends[:-1]])[: len(ends)]
        flat[begins[row] + first] = [IMAGES_FROM + numbers.setdefault(content, len(numbers)) for content in contents]
        offsets = pa.array(np.concatenate([[0], ends]), pa.int64())
        return TokenReader(Dataset(pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, flat)})))

    def cuts(self, row: int, max_length: int) -> list[int] | None:
        """Where the document of a row is cut into fragments of at most `max_length` tokens, from 0 to its length.

        An image, with the special tokens around it, is in one fragment; all images are where tiles of one are told
        apart. None if that has more tokens.
        """
        of_row, first, stop = self._spans
        place = slice(*np.searchsorted(of_row, [row, row + 1]))
        tokens, _ = self.tokens(row)
        is_special = np.isin(tokens, self._process.special_tokens)
        first, stop = first[place], stop[place]
        if len(first) != self.image_counts[row]:
            first, stop = first[:1], stop[-1:]
        images = _with_neighbours(first, stop, is_special)
        edges = [0]
        while edges[-1] < len(tokens):
            end = min(edges[-1] + max_length, len(tokens))
            end = min((start for start, behind in images if start < end < behind), default=end)
            if end <= edges[-1]:
                return None
            edges.append(end)
        return edges

    def of_images(
        self, row: npt.NDArray[np.int64], start: npt.NDArray[np.int64], stop: npt.NDArray[np.int64]
    ) -> dict[str, npt.NDArray[np.int64]]:
        """What `Documents` has of the images of each span, (N,). Those of a row are of one size in a part of it."""
        of_row, first, behind = self._spans
        size = int(self.lengths.max(initial=0)) + 1
        begins = of_row * size + first
        before, after, whole = (
            np.searchsorted(begins, places) for places in (row * size + start, row * size + stop, row * size)
        )
        num, all_of_row = after - before, np.maximum(np.searchsorted(begins, (row + 1) * size) - whole, 1)
        has, share = num > 0, num / all_of_row
        first, behind = (np.append(places, 0) for places in (first, behind))
        return {
            "image_values": np.rint(self.image_values[row] * share).astype(np.int64),
            "image_squares": np.rint(self.image_squares[row] * share).astype(np.int64),
            "image_count": np.rint(self.image_counts[row] * share).astype(np.int64),
            "image_start": np.where(has, first[np.minimum(before, len(first) - 1)] - start, 0),
            "image_stop": np.where(has, behind[after - 1] - start, 0),
        }

    def outside_images(
        self, rows: npt.NDArray[np.int64], start: npt.NDArray[np.int64], common: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """How many tokens of these rows from `start` on are common if no run may begin inside an image, shape (N,).

        Of `common` tokens the last is not shared; if the others end inside an image, those before it are.
        """
        of_row, first, stop = self._spans
        if not len(of_row):
            return common
        size, last = int(self.lengths.max()) + 1, start + common - 1
        place = np.searchsorted(of_row * size + first, rows * size + last) - 1  # the last that begins before
        is_inside = (place >= 0) & (of_row[place] == rows) & (last < stop[place]) & (first[place] >= start)
        return np.where(is_inside, first[place] + 1 - start, common)

    def count_trained(
        self, row: npt.NDArray[np.int64], start: npt.NDArray[np.int64], stop: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Trained tokens of each span, shape (N,)."""
        counts = self._trained[row].copy()
        for i in np.flatnonzero((start > 0) | (stop < self.lengths[row])):
            counts[i] = self.tokens(row[i])[1][start[i] + 1 : stop[i]].sum()
        return counts

    def first_is_labelled(self, row: npt.NDArray[np.int64], start: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        is_labelled = self._first_is_labelled[row].copy()
        for i in np.flatnonzero(start > 0):
            is_labelled[i] = self.tokens(row[i])[1][start[i]]
        return is_labelled

    def tokens(self, row: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """The tokens of a row's document, and which of them are labels, both of shape (tokens,)."""
        measures = self._table.with_format("arrow")[int(row)]
        tokens, is_target = (measures[name][0].values for name in ("tokens", "is_target"))
        return tokens.to_numpy().astype(np.int64), is_target.to_numpy(zero_copy_only=False)

    def row(self, row: int) -> dict[str, Any]:
        """A row of the dataset; or of one of its turns, with the images up to this turn."""
        if self.conversations is None or self._turns is None or self._rule is None:
            return dict(self._dataset[row])
        conversation_row = self._dataset[int(self.conversations[row])]
        conversation = self._rule.choose(
            Conversation.from_row(conversation_row, images_of(conversation_row))
        ).conversation
        return self._rule.row_of_turn(conversation, int(self._turns[row]), self._process.processor)

    def read(self, row: int, start: int, stop: int) -> dict[str, Any]:
        """The tokens of a span of a row's document, and the images among them.

        Raises:
            ValueError: the processor gives another number of tokens than when the row was measured.
        """
        row, length = int(row), int(self.lengths[row])
        document = self._process(self.row(row))
        num_tokens = len(document["input_ids"])
        if num_tokens != length:
            raise ValueError(
                f"Row {row} of the dataset with images has {num_tokens} tokens, and it had {length} when it was "
                "measured before training. Packs are planned from these lengths, so they must not change. Leave the "
                "image files as they are during training, and use a processor without random augmentation."
            )
        return self._process.cut(document, start, stop)
