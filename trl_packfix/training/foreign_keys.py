"""What settings of other trainers and of earlier TRL are called here, and what their files mean where silent.

The tables are in `foreign_keys.yaml`.
"""

from collections.abc import Callable, Collection, Iterable, Set
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import ParamSpec

import yaml

Arguments = ParamSpec("Arguments")
TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
RENAMED = {name: field for field, names in TABLES["renamed"].items() for name in names}
EXPLAINED = {name: note for note, names in TABLES["explained"].items() for name in names}
NOT_NEEDED = TABLES["removed"]


def describe_foreign_keys(names: Iterable[str]) -> str:
    """Sentences that say what keys of other trainers are called here, to be put into a message; "" if none is known.

    >>> describe_foreign_keys(["sequence_len", "train_on_inputs", "learning_rat"])
    ' `sequence_len` is `max_length` here. `train_on_inputs` is `assistant_only_loss` here (with the opposite value).'
    """
    sentences = ""
    for name in names:
        if name in RENAMED:
            note = f" ({EXPLAINED[name]})" if name in EXPLAINED else ""
            sentences += f" `{name}` is `{RENAMED[name]}` here{note}."
        elif name in NOT_NEEDED:
            sentences += f" `{name}` can be removed: {NOT_NEEDED[name]}."
    return sentences


def other_defaults(names: Set[str]) -> str:
    """A sentence with what another trainer does where a file with these keys is silent; "" if it is not known.

    >>> other_defaults({"random_state", "max_seq_length", "r", "packing", "learning_rate", "optim", "use_peft"})[:84]
    ' unsloth has other defaults. To train what it trained, also set `load_in_4bit: true`'
    """
    for trainer, table in TABLES["trainers"].items():
        if len(names & {*table["known_by"]}) > 1:
            given = names | {RENAMED[name].split(":")[0] for name in names & RENAMED.keys()}
            unset = [f"`{name}: {value}`" for name, value in table["defaults"].items() if name not in given]
            texts = ", ".join(unset).replace("True`", "true`").replace("False`", "false`")
            return f" {trainer} has other defaults. To train what it trained, also set {texts}." if unset else ""
    return ""


def with_hints(init: Callable[Arguments, None], fields: Collection[str] = ()) -> Callable[Arguments, None]:
    """`init` with a TypeError that says what an argument of others is called here; `fields` are those of its config."""
    own = signature(init).parameters

    @wraps(init)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        sentences = {name: _place(name, own, fields) for name in kwargs if name not in own}
        if any(sentences.values()):
            names = ", ".join(f"`{name}`" for name, sentence in sentences.items() if sentence)
            kind = init.__qualname__.partition(".")[0]
            raise TypeError(f"{names} was given to `{kind}`, which has no such argument.{''.join(sentences.values())}")
        init(*args, **kwargs)

    return checked


def _place(name: str, own: Collection[str], fields: Collection[str]) -> str:
    """What an unknown argument is here, as a sentence; "" if that is not known."""
    if name == "tokenizer" and "processing_class" in own:
        return " `tokenizer` is `processing_class` here."
    if name in fields:
        return f" Set it in the config: `args=SFTConfig({name}=...)`."
    field = RENAMED.get(name, "").partition(":")[0]
    hint = describe_foreign_keys([name]) if name in NOT_NEEDED or field in own or field in fields else ""
    return hint + f" Set it in the config: `args=SFTConfig({field}=...)`." * (field in fields)
