"""Define what the core knows of features: capabilities in folders `features/NAME/` that the core never imports.

The *core* is all modules outside of `features/`. A feature imports the core. The core works without the folder: it
finds the package of a feature by its name (`find_folder`), or gets the `Feature` of a run from the fields of the config
that belong to it (`features_of`), and calls its hooks where a run with the feature differs. So hardly any module asks
whether a feature is on.

A hook gets an object that a run has without the feature, and returns the object that it has with the feature. The hooks
of `Feature` itself change nothing. This module imports no module of the package, so the docstrings name the classes.
Words: planning puts *units* into *packs*, rows of several documents; a unit is a document, or several that must stay
together. The *probe* tests a model: documents in a pack must not change each other.
"""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar, NamedTuple, TypeVar

T = TypeVar("T")


class FeatureField(NamedTuple):
    """A field of `SFTConfig` that belongs to a feature."""

    feature: str  # the name of the folder
    off: Any  # the value with which the feature is off
    regrouping: tuple[Any, ...] = ()  # the values with which planning has other units than documents


# The fields of `SFTConfig` that belong to features, by name. A second feature with fields adds its own
FIELDS = {"share_prefixes": FeatureField("prefixes", off="off", regrouping=("family",))}


class Feature:
    """A feature with the settings of a run. This class itself is a run without any feature.

    There are two subclasses, for shared prefixes and for images. Both override `make_probe_class`, images also
    `make_unpacked_class`, and prefixes all other hooks. Images need no other hook, because objects of their own read
    and collate their rows (`training/reading.py`).
    """

    # Whether documents may share rows. Attention then looks up the keys of a document by an index, and of all attention
    # implementations only that of this package can, `packfix_varlen`
    is_on = False
    has_towers = False  # whether packs have inputs for vision towers, parts of the model that read no text
    regroups = False  # whether planning has other units than documents, see `FeatureField.regrouping`
    # Parts of messages
    packs_text: ClassVar[str] = ""  # what is the case in packs with the feature: "documents share prefixes"
    documents_text: ClassVar[str] = ""  # the documents in these packs: "documents that share prefixes"
    off_text: ClassVar[str] = ""  # the setting that switches the feature off, in backticks
    copies_text: ClassVar[str] = ""  # what takes `copied_bytes`: "copied keys of shared prefixes"
    copied_bytes: int = 0  # the most bytes that attention on a device copies for the feature
    # The fields of `Packing` that belong to features, with their values in this run
    settings: Mapping[str, Any] = MappingProxyType({name: field.off for name, field in FIELDS.items()})

    @property
    def plain(self) -> "Feature":
        """The feature of the run without shared rows, such as images. Packs with it are tested first."""
        return self

    def refuse_lengths(self, num_documents: int) -> None:
        """Raise ValueError if the feature cannot plan with the lengths of documents alone, and needs their tokens."""

    def sort_tokens(self, reader: Any, documents: Any) -> Any:
        """Return the order of the `Documents` of a reader by their tokens (`TokenOrder`), or None if it is not used."""
        return None

    def make_units(self, units: T, planner: Any, step_of_documents: Any = None) -> T:
        """Return the `Units` to plan for a `Planner`, made from the documents as units.

        `step_of_documents` is given if packed training must have the same documents in each optimizer step as unpacked
        training: the step of each document, (N,). All documents of a unit then have the same step.
        """
        return units

    def make_collator(self, collator: T, *, keeps_last_rows: bool = False, compare: Any = None) -> T:
        """Return the collator of packs, made from the `PackedDataCollator` of the run.

        With `keeps_last_rows` also the last token of each document, which predicts nothing, has a row of its own.
        `compare` returns the content by which documents are compared; None compares tokens.
        """
        return collator

    def in_evaluation(self, *, can_sort: bool, shares: bool) -> "Feature":
        """Return the feature for packs of an evaluation, which may allow less than training (`training/evaluation.py`).

        `can_sort` is whether documents can be sorted by tokens, `shares` whether they may share rows.
        """
        return self

    def make_probe_class(self, probe_class: type[T]) -> type[T]:
        """Return the class of the probe for packs with the feature, made from the class of the probe of plain packs."""
        return probe_class

    def make_unpacked_class(self, unpacked_class: type[T]) -> type[T]:
        """Return the class of the hooks that run documents as rows of padded batches, made from the class given."""
        return unpacked_class

    def refuse_model(self, reason: str, on_leak: str) -> None:
        """Raise PackingLeakError because of `reason`, a clause, or warn that training goes on without the feature."""

    def report_section(self, planner: Any) -> Any:
        """Return the report's section on the feature in the first epoch, without reading a token, or None."""
        return None


PLAIN = Feature()  # a run without features


def regroups(values_by_name: Mapping[str, tuple[Any, ...]]) -> bool:
    """Return whether one of some values of config fields makes planning have other units than documents.

    Args:
        values_by_name: values of each field by its name, for example the values before and after a restart.
    """
    return any(value in field.regrouping for name, field in FIELDS.items() for value in values_by_name.get(name, ()))


def features_of(settings: Any, plain: Feature = PLAIN) -> Feature:
    """Return the feature of a run, from `settings`: a config, or another object that has the fields of features.

    It is combined with `plain`, which all packs have because of the rows of the dataset (`training/reading.py`).

    Raises:
        ValueError: a field switches a feature on, and its folder is missing.
    """
    feature = plain
    for name, field in FIELDS.items():
        value = getattr(settings, name)
        if value == field.off:
            continue
        folder = find_folder(field.feature)
        if folder is None:
            raise ValueError(
                f"`{name}={value!r}` was given, and this installation of trl_packfix is without its folder "
                f"`features/{field.feature}`, which does it. Set `{name}={field.off!r}`, or install trl_packfix anew."
            )
        feature = folder.FEATURE(value, feature)
    return feature


def find_folder(name: str) -> ModuleType | None:
    """Import the folder of a feature ("images"), or a module in it ("images.towers"); None without the folder."""
    features = f"{__package__}.features"
    try:
        return import_module(f"{features}.{name}")
    except ModuleNotFoundError as error:
        if error.name not in (features, f"{features}.{name.split('.')[0]}"):
            raise  # the module in the folder, or a module that the feature imports
        return None


def require_folder(feature: str, public_name: str) -> None:
    """Raise ImportError if the folder of a feature is missing that defines the public name `public_name`."""
    if find_folder(feature) is None:
        raise ImportError(
            f"`{public_name}` was imported, and this installation of trl_packfix is without its folder "
            f"`features/{feature}`, which defines it. Install trl_packfix anew."
        )
