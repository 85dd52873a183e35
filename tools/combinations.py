"""Write docs/combinations.md: which features go together, from the records that refuse (`tools/combinations.py`)."""

import re
from pathlib import Path

from trl_packfix.training.choices import PACKING
from trl_packfix.training.conflicts import CONFLICTS, EXPERIMENTAL, ChoiceConflicts

PAGE = Path(__file__).parents[1] / "docs" / "combinations.md"


def page() -> str:
    """The page as text."""
    tested = [f"[{each.choice.name}]({each.page})" for each in CONFLICTS if each.page and each.choice != PACKING]
    parts = [
        "# What goes with what\n",
        "A test makes every pair of these. A pair works unless one of the two is listed below, under the other: "
        f"{', '.join(tested)}.\n",
        f"Experimental, as several GPUs have not run them: {', '.join(choice.name for choice in EXPERIMENTAL)}.\n",
        "What is listed is refused before work starts; the error says what to set.\n",
    ]
    for i, each in enumerate(CONFLICTS):
        if each.conflicts:
            parts += [f"## {each.choice.name}\n", _refusals(each, CONFLICTS[:i])]
    return "\n".join(parts)


def _refusals(feature: ChoiceConflicts, before: tuple[ChoiceConflicts, ...]) -> str:
    """A sentence for each thing that the feature refuses, and the name of an earlier feature that refuses the same."""
    same = next(
        (each for each in before if each.conflicts and each.conflicts.items() <= feature.conflicts.items()), None
    )
    text = "" if same is None else f"- what {same.choice.name} refuses\n"
    names: dict[str, list[str]] = {}
    for other, cause in feature.conflicts.items():
        if same is None or other not in same.conflicts:
            names.setdefault(short(cause), []).append(other.name)
    return text + "".join(f"- {'; '.join(others)}: {sentence}.\n" for sentence, others in names.items())


def short(cause: str) -> str:
    """A cause without what follows from it."""
    return re.split(r", so |; |, and ", cause)[0]


if __name__ == "__main__":
    PAGE.write_text(page())
