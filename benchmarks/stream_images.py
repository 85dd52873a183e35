"""Waiting documents of a stream with images: how many, their memory, and how full the packs are.

    python benchmarks/stream_images.py # about five minutes
    python benchmarks/stream_images.py --num 200

The rows of `benchmarks/images.py`: JPEGs of 0.2 to 0.4 megapixels, one per row. With each bound on the bytes that wait:
the documents that wait after the first step, the bytes of their images as files, decoded, and as the processor returns
them; the checkpoint of the stream; and, over one pass, efficiency of packs of 8,192 tokens.
"""

import io
import warnings
from itertools import islice

import datasets
import torch
from common import Row, describe, make_parser, write_csv
from datasets import Dataset
from images import FAMILIES, photos, processor

from trl_packfix.data.image_rows import RowProcessor
from trl_packfix.data.stream import MOST_BYTES, PackedStream
from trl_packfix.data.stream_images import ENCODED, StreamImages

MIB = 2**20


def measure(dataset: Dataset, process: RowProcessor, most_bytes: int) -> Row:
    images = StreamImages(process)
    stream = PackedStream(
        dataset.to_iterable_dataset(), batch_size=1, max_length=8192, images=images, most_bytes=most_bytes
    )
    list(islice(stream, 1))
    waiting = [document for pack in stream._closed for document in pack] + list(stream._waiting.values())
    rows = [document[ENCODED] for document in waiting]
    decoded = [image.decode() for row in rows for image in row.images]
    file = io.BytesIO()
    torch.save(stream.state_dict(1), file)
    sample = rows[:50]
    pixels = sum(row.process(process)["pixel_values"].nbytes for row in sample) * len(rows) / len(sample)
    packs, tokens = 0, 0
    for pack in stream:
        if stream.num_passes:
            break
        packs, tokens = packs + 1, tokens + sum(len(document["input_ids"]) for document in pack)
    return {
        "most_mib": most_bytes / MIB,
        "waiting": len(rows),
        "encoded_mib": sum(image.num_bytes for row in rows for image in row.images) / MIB,
        "decoded_mib": sum(3 * image.width * image.height for image in decoded) / MIB,
        "processed_mib": pixels / MIB,
        "checkpoint_mib": file.tell() / MIB,
        "packs": packs,
        "efficiency": tokens / (packs * 8192),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--families", nargs="+", default=("qwen2_5_vl",), choices=FAMILIES)
    parser.add_argument("--num", type=int, default=1500, help="rows (default: 1500)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    datasets.disable_progress_bars()
    print(describe())
    print("| family, bound, MiB | waiting | as files, MiB | decoded | processed | checkpoint | efficiency |")
    print("|---|---|---|---|---|---|---|")
    dataset, table = photos(args.num), []
    for family in args.families:
        for most_bytes in (MOST_BYTES, 4 * MIB, MIB):
            row = measure(dataset, processor(family), most_bytes)
            sizes = " | ".join(
                f"{row[f'{name}_mib']:,.1f}" for name in ("encoded", "decoded", "processed", "checkpoint")
            )
            print(
                f"| {family}, {row['most_mib']:.0f} | {row['waiting']:,} | {sizes} | {row['efficiency']:.4f} |",
                flush=True,
            )
            table.append({"family": family} | row)
    write_csv(args.csv, table)


if __name__ == "__main__":
    main()
