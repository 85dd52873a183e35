"""docs/images/*.png, made from real data by the code they show: `python tools/pictures.py --data DIR`.

DIR holds t0_p3_sample.jsonl, qmsum_train.jsonl, gsm8k_train.jsonl and smollm2_tokenizer/.
"""

import argparse
import contextlib
import io
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text
from transformers import AutoTokenizer

from trl_packfix import SFTConfig
from trl_packfix.cli import main as trl_packfix
from trl_packfix.cli.dry_run import planner_for
from trl_packfix.cli.sources import load_rows
from trl_packfix.cli.tokens import tokenise
from trl_packfix.data.reader import TokenReader
from trl_packfix.planning.costs import LLAMA_7B
from trl_packfix.reporting.packs import first_packs, pack_text
from trl_packfix.training.planner import documents_of

IMAGES = Path(__file__).parents[1] / "docs" / "images"
FONT = "DejaVu Sans Mono"
POINTS = 9
LINE = 1.45
DPI = 110
MOST_BYTES = 300_000


def screenshot(path: Path, renderable: object, columns: int) -> None:
    """What `rich` prints on a terminal of so many columns, as a picture."""
    # In memory only: without a legacy terminal, of 256 colours, whatever machine this runs on
    console = Console(file=io.StringIO(), force_terminal=True, width=columns, color_system="256", legacy_windows=False)
    rows = console.render_lines(renderable, pad=False)
    cell = POINTS * 0.602 / 72  # inches; 0.602 is the width of a letter of this font
    height = POINTS * LINE / 72
    size = (columns * cell + 0.4, len(rows) * height + 0.3)
    figure = Figure(figsize=size, facecolor="#16181d")
    FigureCanvasAgg(figure)
    for line, row in enumerate(rows):
        column = 0
        for segment in row:
            style = segment.style
            color = style.color.get_truecolor(MONOKAI).hex if style and style.color else "#e6e6e6"
            figure.text(
                (0.2 + column * cell) / size[0],
                1 - (0.15 + (line + 0.5) * height) / size[1],
                segment.text.replace("$", r"\$"),
                color=color,
                fontfamily=FONT,
                fontsize=POINTS,
                fontweight="bold" if style and style.bold else "normal",
                va="center",
            )
            column += segment.cell_length
    figure.savefig(path, dpi=DPI)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    data = parser.parse_args().data
    IMAGES.mkdir(exist_ok=True)
    tokenizer = str(data / "smollm2_tokenizer")
    t0, long, even = (str(data / f"{name}.jsonl") for name in ("t0_p3_sample", "qmsum_train", "gsm8k_train"))
    flags = ["--tokenizer", tokenizer, "--batch-size", "1"]
    trl_packfix(["show", t0, *flags, "--max-length", "2048", "--world-size", "2", "--plot", f"{IMAGES}/packs.png"])

    config = SFTConfig("unused", packing=True, max_length=512, per_device_train_batch_size=2, use_cpu=True, bf16=False)
    tokens, _ = tokenise(load_rows(t0), AutoTokenizer.from_pretrained(tokenizer), config)
    reader = TokenReader(tokens)
    (pack,) = first_packs(planner_for(documents_of(reader, config), config, 1, cost_model=LLAMA_7B), reader, 1)
    screenshot(IMAGES / "show.png", pack_text(pack, AutoTokenizer.from_pretrained(tokenizer)), columns=112)

    with contextlib.redirect_stdout(io.StringIO()) as plan:
        words = ["--strategy", "stream", "--world-size", "8", "64", "--accumulation", "4", "--tflops", "350"]
        trl_packfix(["plan", long, t0, even, *flags, *words])
    screenshot(IMAGES / "plan.png", Text(plan.getvalue().rstrip()), columns=140)

    for path in sorted(IMAGES.glob("*.png")):
        size = path.stat().st_size
        print(f"{path.name}: {size:,} bytes")
        assert size < MOST_BYTES, f"{path} is too large for a README"


if __name__ == "__main__":
    main()
