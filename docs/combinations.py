"""Write docs/combinations.md: which features go together, from the records that refuse (`make combinations`)."""

from pathlib import Path

from trl_packfix.training.choices import PACKING
from trl_packfix.training.features import FEATURES, Feature, feature_that_refuses

PAGE = Path(__file__).with_name("combinations.md")
BEGIN = """\
# What goes with what

Made from the records in `trl_packfix/training/features.py`, by which settings are refused (`make combinations`). A test
makes every pair and compares: a "no" is refused with the reason below, and every other pair is accepted.
"""


def page() -> str:
    """The page as text."""
    features = [each for each in FEATURES if each.page and each.choice != PACKING]
    names = [each.choice.name for each in features]
    proved = [each for each in FEATURES if each.proof]
    refusing = [each for each in FEATURES if each.conflicts]
    parts = [
        BEGIN,
        _table(["", *names], [[f"[{each.choice.name}]({each.page})", *_cells(each, features)] for each in features]),
        "## What is proved\n\nOn the model that is trained, before the first step, on all ranks.\n",
        _table(["feature", "proof"], [[f"[{each.choice.name}]({each.page})", each.proof] for each in proved]),
        "## Why not\n\nThese are the messages: what was given with the feature, why it cannot work, what to set.\n",
    ]
    for each in refusing:
        rows = [[other.name, cause, each.remedy(other)] for other, cause in each.conflicts.items()]
        parts += [f"### {each.choice.name}\n", _table(["with", "why it cannot work", "set instead"], rows)]
    return "\n".join(parts)


def _cells(feature: Feature, features: list[Feature]) -> list[str]:
    return [_cell(feature, other) for other in features]


def _cell(one: Feature, other: Feature) -> str:
    if one.choice.name.split("=")[0] == other.choice.name.split("=")[0]:  # one setting
        return ""
    refusing = feature_that_refuses(one.choice, other.choice)
    if refusing is None:
        return "yes"
    anchor = "".join(letter for letter in refusing.choice.name.lower() if letter.isalnum() or letter in "_- ")
    return f"[no](#{anchor.replace(' ', '-')})"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    PAGE.write_text(page())
