"""What README and docs say is so: snippets run, commands and flags exist, links resolve, messages are quoted."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RAISED = ("ValueError", "RuntimeError", "ImportError", "PackingLeakError", "OwnMaskError")


def template(argument: ast.expr) -> str:
    """A message as it stands in the source, with … where a value is put in, and without backticks."""
    parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
    text = "".join(part.value if isinstance(part, ast.Constant) else "…" for part in parts)
    return text.replace("`", "")


def messages() -> list[tuple[str, str]]:
    """(file, template) of each message that a user can see."""
    found = []
    for file in sorted((ROOT / "trl_packfix").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                if isinstance(node.exc.func, ast.Name) and node.exc.func.id in RAISED:
                    found.append((file.name, template(node.exc.args[0])))
    return found


MESSAGES = messages()
QUOTES = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)


def test_messages_are_found():
    assert len(MESSAGES) > 60 and len(QUOTES) > 60
    assert any("packing=True was given with max_length=None" in text for _, text in MESSAGES)


@pytest.mark.parametrize("quote", QUOTES)
def test_a_quoted_message_exists(quote):
    assert any(quote in text for _, text in MESSAGES), f"no message says {quote!r}: correct docs/troubleshooting.md"


@pytest.mark.parametrize("file, text", MESSAGES, ids=[f"{file}: {text[:40]}" for file, text in MESSAGES])
def test_every_message_is_explained(file, text):
    assert any(quote in text for quote in QUOTES), f"add a row to docs/troubleshooting.md that quotes {text!r}"
