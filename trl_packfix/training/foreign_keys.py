"""Hints for settings of other trainers and of earlier versions of TRL.

A user who gives a setting of another trainer gets an error, and the sentences of this module tell how to write the
setting for this package ("here"). The command line calls `describe_foreign_keys` and `other_defaults` for keys of a
config file. `with_hints` wraps the constructors of `SFTConfig` and `SFTTrainer` for their arguments. The tables of
names and defaults are in `foreign_keys.yaml`.
"""

from collections.abc import Callable, Collection, Iterable, Set
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import ParamSpec

import yaml

Arguments = ParamSpec("Arguments")
TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
# Maps the name of a setting in another trainer to the field here, with its value if one value is meant (`field: value`)
RENAMED = {name: field for field, names in TABLES["renamed"].items() for name in names}
# Maps the name of a setting in another trainer to a note on how its values differ from the values of the field
EXPLAINED = {name: note for note, names in TABLES["explained"].items() for name in names}
# Maps the name of a setting in another trainer to the reason why it is not needed here
NOT_NEEDED = TABLES["removed"]


def describe_foreign_keys(names: Iterable[str]) -> str:
    """Return a sentence for each name of another trainer's setting, with its name here; "" if no name is known.

    Each sentence begins with a space, to follow another sentence of a message.

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
    """Return a text with settings that another trainer has by default, and that a file of its keys leaves unset.

    A file belongs to another trainer if at least two of its keys are known only there. The text has a line for each
    setting, as in YAML; it is "" if the trainer is not known, or if the file leaves none of these settings unset.

    >>> other_defaults({"random_state", "max_seq_length", "r", "packing", "learning_rate", "optim"}).splitlines()[:2]
    ['unsloth has other defaults. To train what it trained, also set', '  load_in_4bit: true']
    """
    for trainer, table in TABLES["trainers"].items():
        if len(names & {*table["known_by"]}) > 1:
            # The fields that the file sets, under their names here
            set_fields = names | {RENAMED[name].split(":")[0] for name in names & RENAMED.keys()}
            lines = ""
            for name, value in table["defaults"].items():
                if name not in set_fields:
                    yaml_value = str(value).lower() if isinstance(value, bool) else value
                    lines += f"\n  {name}: {yaml_value}"
            first_line = f"{trainer} has other defaults. To train what it trained, also set"
            return first_line + lines if lines else ""
    return ""


def with_hints(init: Callable[Arguments, None], fields: Collection[str] = ()) -> Callable[Arguments, None]:
    """Return a constructor that raises TypeError with a hint if it gets an argument of another trainer.

    Args:
        init: the constructor.
        fields: fields of the config that the constructor takes as an argument, if it takes one.
    """
    parameters = signature(init).parameters

    @wraps(init)
    def init_with_hints(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        hints = {name: _argument_hint(name, parameters, fields) for name in kwargs if name not in parameters}
        if any(hints.values()):
            names = ", ".join(f"`{name}`" for name, hint in hints.items() if hint)
            class_name = init.__qualname__.partition(".")[0]
            raise TypeError(
                f"{names} was given to `{class_name}`, which has no such argument.{''.join(hints.values())}"
            )
        init(*args, **kwargs)

    return init_with_hints


def _argument_hint(name: str, parameters: Collection[str], fields: Collection[str]) -> str:
    """Return sentences that say how to give an unknown argument here; "" if the name is not known.

    Args:
        name: the unknown argument.
        parameters: the arguments that the constructor has.
        fields: the fields of its config.
    """
    if name == "tokenizer" and "processing_class" in parameters:
        return " `tokenizer` is `processing_class` here."
    if name in fields:
        return f" Set it in the config: `args=SFTConfig({name}=...)`."
    field = RENAMED.get(name, "").partition(":")[0]  # "" for an unknown name
    hint = ""
    # A hint for a field helps only if this constructor, or its config, has the field
    if name in NOT_NEEDED or field in parameters or field in fields:
        hint = describe_foreign_keys([name])
    if field in fields:
        hint += f" Set it in the config: `args=SFTConfig({field}=...)`."
    return hint
