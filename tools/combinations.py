"""Write docs/combinations.md: which features go together, from the records that refuse (`tools/combinations.py`)."""

import re
from pathlib import Path

from trl_packfix.training.choices import PACKING
from trl_packfix.training.features import EXPERIMENTAL, FEATURES, Feature, feature_that_refuses

PAGE = Path(__file__).parents[1] / "docs" / "combinations.md"
BEGIN = """\
# What goes with what

Made from the records by which settings are refused (`tools/combinations.py`); a test makes every pair. An empty cell:
they work together.
"""


def page() -> str:
    """The page as text."""
    every = [each for each in FEATURES if each.page and each.choice != PACKING]
    features = [one for one in every if any(feature_that_refuses(one.choice, other.choice) for other in every)]
    free = [f"[{each.choice.name}]({each.page})" for each in every if each not in features]
    # The lower triangle: a row ends before its own column
    rows = [[f"[{each.choice.name}]({each.page})", *_cells(each, features[:i])] for i, each in enumerate(features)]
    parts = [
        BEGIN,
        _table(["", *(each.choice.name for each in features[:-1])], rows),
        f"Goes with all of these: {', '.join(free)}.\n",
        f"Experimental, because no GPU has run them yet: {', '.join(choice.name for choice in EXPERIMENTAL)}.\n",
        "## Why not\n\nIn short; the error has the whole reason, and says what to set.\n",
    ]
    for i, each in enumerate(FEATURES):
        if each.conflicts:
            parts += [f"### {each.choice.name}\n", _refusals(each, FEATURES[:i])]
    return "\n".join(parts)


def _refusals(feature: Feature, before: tuple[Feature, ...]) -> str:
    """A sentence for each thing that the feature refuses, and the name of an earlier feature that refuses the same."""
    same = next(
        (each for each in before if each.conflicts and each.conflicts.items() <= feature.conflicts.items()), None
    )
    text = "" if same is None else f"- what {same.choice.name} refuses, for the same reasons\n"
    names: dict[str, list[str]] = {}
    for other, cause in feature.conflicts.items():
        if same is None or other not in same.conflicts:
            names.setdefault(short(cause), []).append(other.name)
    return text + "".join(f"- {'; '.join(others)}: {sentence}.\n" for sentence, others in names.items())


def short(cause: str) -> str:
    """A cause without what follows from it."""
    return re.split(r", so |; |, and ", cause)[0]


def _cells(feature: Feature, features: list[Feature]) -> list[str]:
    return [_cell(feature, other) for other in features]


def _cell(one: Feature, other: Feature) -> str:
    refusing = feature_that_refuses(one.choice, other.choice)
    if refusing is None:
        return ""
    anchor = "".join(letter for letter in refusing.choice.name.lower() if letter.isalnum() or letter in "_- ")
    return f"[no](#{anchor.replace(' ', '-')})"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    PAGE.write_text(page())
