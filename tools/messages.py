"""Write docs/messages.csv: every error message of the package, from the source (`python tools/messages.py`)."""

import ast
import csv
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "trl_packfix"
PAGE = Path(__file__).parents[1] / "docs" / "messages.csv"
RAISED = (
    "ValueError",
    "RuntimeError",
    "ImportError",
    "PackingLeakError",
    "OwnMaskError",
    "KernelError",
    "TowerAttentionError",
    "OwnAttentionError",
    "UnknownTurnError",
)


def messages() -> list[tuple[str, str]]:
    """(module, message) of each error that a user can see, with … where a value is put in, and without backticks."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            error = node.exc if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) else None
            if error is not None and error.args and isinstance(error.func, ast.Name) and error.func.id in RAISED:
                found.append((file.relative_to(PACKAGE).with_suffix("").as_posix(), _template(error.args[0])))
    return [(module, text) for module, text in found if text != "…"]  # a message of another rank, told here again


def _template(argument: ast.expr) -> str:
    parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
    text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)
    return " ".join(text.replace("`", "").split())


if __name__ == "__main__":
    with PAGE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["message", "module"])
        writer.writerows((text, module) for module, text in messages())
