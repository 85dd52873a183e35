"""What keys of other trainers' files are called here, and what such files mean where they are silent.

The tables are in `foreign_keys.yaml`.
"""

from collections.abc import Iterable, Set
from pathlib import Path

import yaml

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
RENAMED = {name: field for field, names in TABLES["renamed"].items() for name in names}
EXPLAINED = {name: note for note, names in TABLES["explained"].items() for name in names}
NOT_NEEDED = TABLES["removed"]


def hints(names: Iterable[str]) -> str:
    """Sentences that say what keys of other trainers are called here, to be put into a message; "" if none is known.

    >>> hints(["sequence_len", "train_on_inputs", "learning_rat"])
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
