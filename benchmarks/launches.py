"""Thread blocks of FlashAttention-2 without work, in one launch per layer and in launches by length; a count, no time.

    python benchmarks/launches.py --csv launches.csv      # a few seconds

The grid of a launch is (longest / tile) x documents x heads: forward with tiles of 128 queries, twice (checkpointing);
backward with tiles of 64 queries in two small kernels and of 128 keys. Simulated lengths (lognormal; median, sigma).
Columns: `idle_one` and `idle_by_length` are the blocks without work of a step, in millions, in one launch and as
`data/by_length.py` divides the pack; `launches` the mean number of launches per layer. The shares are those of a step
by a model on paper: 100 and 300 such blocks per microsecond, 300 TFLOP/s in attention and 450 or 300 in products.
Nothing was measured on a GPU.
"""

import numpy as np
from common import describe, make_parser, tell, write_csv

from trl_packfix.data.by_length import launches

# layers, heads, hidden size, parameters, FLOP/s of the products
MODELS = {"8B": (32, 32, 4096, 8.0e9, 450e12), "0.5B": (24, 14, 896, 0.49e9, 300e12)}
# median, sigma, max_length, batch size, pad_documents_to_multiple_of
CASES = {
    "FLAN-like, 8 x 2,048": (114, 1.27, 2048, 8, None),
    "OrcaMath-like, 8 x 1,024": (165, 0.38, 1024, 8, None),
    "chat, 4 x 8,192": (600, 1.0, 8192, 4, None),
    "long tail, 1 x 32,768": (350, 1.5, 32768, 1, None),
    "long tail, 2 x 32,768": (350, 1.5, 32768, 2, None),
    "long tail, 1 x 131,072": (600, 1.7, 131072, 1, None),
    "FLAN-like, 8 x 2,048, 128 documents": (114, 1.27, 2048, 8, 128),
    "FLAN-like, 2 x 8,192, 128 documents": (114, 1.27, 8192, 2, 128),
    "FLAN-like, 8 x 2,048, 640 documents": (114, 1.27, 2048, 8, 640),
}
PACKS = 40


def tiles(lengths: np.ndarray | int) -> np.ndarray:
    """Blocks of all grids per head, for documents of these lengths."""
    lengths = np.asarray(lengths)
    return 3 * -(-lengths // 128) + 2 * -(-lengths // 64)


def simulated(rng: np.random.Generator, median: float, sigma: float, max_length: int, capacity: int) -> np.ndarray:
    lengths: list[int] = []
    while sum(lengths) < capacity:
        lengths.append(int(np.clip(rng.lognormal(np.log(median), sigma), 2, max_length)))
    return np.sort(lengths[:-1] or lengths)[::-1]


def main() -> None:
    args = make_parser(__doc__).parse_args()
    print(describe())
    rows = []
    for name, (median, sigma, max_length, batch_size, static) in CASES.items():
        rng = np.random.default_rng(0)
        packs = [simulated(rng, median, sigma, max_length, batch_size * max_length) for _ in range(PACKS)]
        one = by_length = number = 0
        for lengths in packs:
            padding = 0 if static is None else -len(lengths) % static
            bounds = np.concatenate([[0], np.append(lengths, np.zeros(padding, dtype=int)).cumsum()])
            longest = int(lengths[0]) if static is None else max_length
            single = (len(bounds) - 1) * int(tiles(longest))
            found = launches(bounds, longest)
            divided = sum((last - first) * int(tiles(most)) for first, last, *_, most in found) if found else single
            useful = int(tiles(lengths).sum())
            one, by_length, number = one + single - useful, by_length + divided - useful, number + max(1, len(found))
        for model, (layers, heads, hidden, parameters, rate) in MODELS.items():
            blocks = [layers * heads * idle / PACKS for idle in (one, by_length)]
            squares = [float((x.astype(float) ** 2).sum()) for x in packs]
            step = np.mean(
                [
                    8 * parameters * x.sum() / rate + layers * 9 * hidden * s / 300e12
                    for x, s in zip(packs, squares, strict=True)
                ]
            )
            row = {"case": name, "model": model, "launches": number / PACKS}
            row |= {"idle_one": blocks[0] / 1e6, "idle_by_length": blocks[1] / 1e6}
            for kind, count in zip(("one", "by_length"), blocks, strict=True):
                row |= {f"share_{kind}_low": count / 300e6 / step, f"share_{kind}_high": count / 100e6 / step}
            rows.append(row)
            tell(row, ".4f")
    write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
