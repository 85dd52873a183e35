"""Write docs/rules.md: every rule with its module and its tests, from the marks at the tests (`make rules`)."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("rules.md")
# From what everything needs to what users call; last, files that belong to no wing
WINGS = ("planning", "attention", "data", "isolation", "training", "reporting", "cli", "survey")
BEGIN = """\
# Rules

Each rule is implemented in one file, and has a test that fails without it. This page is made from the marks at the
tests, `@pytest.mark.rule(file, rule)`, by `make rules`.
"""
Rule = tuple[str, str]  # file, and what it keeps


def rules() -> dict[Rule, list[str]]:
    """Names of the tests that prove each rule, such as "tests/data/test_spans.py::test_a_document"."""
    found = defaultdict(list)
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.rule":
                    rule_file, rule = map(ast.literal_eval, mark.args)
                    found[rule_file, rule].append(f"{file.relative_to(ROOT)}::{node.name}")
    return dict(found)


def wing(file: str) -> str:
    """The wing of a file of the package; "the rest" for any other file."""
    return next((name for name in WINGS if file.startswith(f"trl_packfix/{name}/")), "the rest")


def page() -> str:
    """The page as text."""
    parts = [BEGIN]
    for name in (*WINGS, "the rest"):
        rows = [
            f"| {rule} | `{file}` | {', '.join(f'`{test}`' for test in tests)} |\n"
            for (file, rule), tests in sorted(rules().items())
            if wing(file) == name
        ]
        parts.append(f"## {name.capitalize()}\n\n| rule | file | tests |\n|---|---|---|\n{''.join(rows)}")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
