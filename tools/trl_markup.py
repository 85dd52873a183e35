"""Docstrings are written in the markup of TRL's (and transformers') documentation. mkdocstrings reads Google's.

mkdocs.yml loads `TRLMarkup`, which rewrites each docstring before it is parsed.
"""

import re
from typing import Any

try:
    from griffe import Extension
except ImportError:  # it comes with the extra `docs`, and the tests need `as_google` only
    Extension = object


def plain_type(match: re.Match[str]) -> str:
    """The type of an argument. Its default is in the signature.

    >>> plain_type(PARAMETER.match("    args ([`trl.SFTConfig`] or [`~transformers.TrainingArguments`], *optional*):"))
    '    args (trl.SFTConfig or TrainingArguments, optional):'
    """
    indent, name, kind = match.groups()
    kind = re.sub(r", defaults to .*|[*`\[\]]", "", kind)
    kind = re.sub(r"~[.\w]+[.]", "", kind)
    return f"{indent}{name} ({kind}):"


PARAMETER = re.compile(r"^( +)(\w+) \((.*?[`\]].*?)\):", re.MULTILINE)
EXAMPLE = re.compile(r"^( *)>>> .*\n(?: *\S.*\n?)*", re.MULTILINE)


def as_google(text: str) -> str:
    """Types without markup, references as code, and examples as blocks of code up to the next empty line."""
    text = PARAMETER.sub(plain_type, text)
    text = re.sub(r"\[(`)~?([\w.]+`)\]", r"\1\2", text)
    text = re.sub(r" +# doctest:.*", "", text)
    return EXAMPLE.sub(lambda block: f"{block[1]}```pycon\n{block[0].rstrip()}\n{block[1]}```\n", text)


class TRLMarkup(Extension):  # type: ignore[misc]
    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_google(obj.docstring.value)
