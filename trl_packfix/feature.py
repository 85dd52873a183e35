"""What the core knows of features: capabilities in folders `features/NAME/` that the core never imports.

A feature imports the core. The core works without the folder: it finds the package of a feature by its name
(`find_folder`), or gets the `Feature` of a run from the fields of the config that belong to it (`features_of`), and
calls its hooks where a run with the feature differs. So a run has one path, and no module asks whether it is on.

A hook gets what a run has without the feature, and returns what it has with it. The hooks of `Feature` itself change
nothing. This module imports no module of the package, so hooks have few types here; each names its types.
"""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar, NamedTuple, TypeVar

T = TypeVar("T")


class FeatureField(NamedTuple):
    """A field of `SFTConfig` that belongs to a feature."""

    feature: str  # the name of the folder
    off: Any  # the value without the feature
    regrouping: tuple[Any, ...] = ()  # values with which planning has other units than documents


# The fields of `SFTConfig` that belong to features, by name. A second feature with fields adds its own
FIELDS = {"share_prefixes": FeatureField("prefixes", off="off", regrouping=("family",))}


class Feature:
    """A feature with its settings of a run; this class is a run without any.

    Shared prefixes and images make a probe. `make_unpacked_class` is for images. The other hooks are for prefixes: what
    images need there is in the objects that read and collate the rows (`training/reading.py`).
    """

    is_on = False
    has_towers = False  # whether packs have inputs of parts of the model that read no text
    regroups = False  # whether planning has other units than documents, see `FeatureField.regrouping`
    packs_text: ClassVar[str] = ""  # begins sentences on packs with the feature: "documents share prefixes"
    documents_text: ClassVar[str] = ""  # the documents of these packs: "documents that share prefixes"
    off_text: ClassVar[str] = ""  # what to set to be without it, in backticks
    copies_text: ClassVar[str] = ""  # names the memory of `copied_bytes`: "copied keys of shared prefixes"
    copied_bytes: int = 0  # bytes that attention on a device copies at most for the feature
    settings: Mapping[str, Any] = MappingProxyType({})  # the fields of `Packing` that say so, with their values
    needs_lookup: bool = False  # whether attention looks up the keys of documents, which only `packfix_varlen` does

    @property
    def plain(self) -> "Feature":
        """The feature that all packs have, also those without this one, which is combined with it; proved first."""
        return self

    def refuse_lengths(self, num_documents: int) -> None:
        """Raise ValueError if the feature needs more than the lengths of documents. Only tokens can be missing."""

    def sort_tokens(self, reader: Any, documents: Any) -> Any:
        """Return the `TokenOrder` of the `Documents` of a reader, cached with them; None if it is not needed."""
        return None

    def make_units(self, units: T, planner: Any, step_of_documents: Any = None) -> T:
        """Return the `Units` to plan; `step_of_documents` has the step that each document must keep, (N,), or None."""
        return units

    def make_collator(self, collator: T, *, keeps_last_rows: bool = False, compare: Any = None) -> T:
        """Return the collator of packs, from the `PackedDataCollator` of the run.

        `keeps_last_rows` gives a row to every token, also to one on whose output no document is trained. `compare`
        returns the content of documents; None compares tokens.
        """
        return collator

    def in_evaluation(self, *, can_sort: bool, shares: bool) -> "Feature":
        """Return the feature in packs of an evaluation. Only a feature with plans of its own differs there.

        `can_sort` is whether documents can be sorted by tokens: with images, all would be processed. `shares` is
        whether documents may share rows: the model is proved, and the loss can be computed.
        """
        return self

    def make_probe_class(self, probe_class: type[T]) -> type[T]:
        """Return the class of the probe that packs with the feature are proved with, from that of plain packs."""
        return probe_class

    def make_unpacked_class(self, unpacked_class: type[T]) -> type[T]:
        """Return the class of the hooks that run documents as rows of padded batches, from that for plain packs."""
        return unpacked_class

    def refuse_model(self, reason: str, on_leak: str) -> None:
        """Raise PackingLeakError, or warn that training goes on without the feature. Others cannot be left out."""

    def report_section(self, planner: Any) -> Any:
        """Return what the feature does in the first epoch, without reading a token; None if it does nothing."""
        return None

    def estimate(self, planner: Any, reader: Any) -> Any:
        """Return the same for `trl-packfix plan`, which may read tokens, also for a feature that is off."""
        return self.report_section(planner)


PLAIN = Feature()  # a run without features


def regroups(changed: Mapping[str, tuple[Any, ...]]) -> bool:
    """Return whether planning has other units by one of the values, given by the names of the fields."""
    return any(value in field.regrouping for name, field in FIELDS.items() for value in changed.get(name, ()))


def features_of(settings: Any, plain: Feature = PLAIN) -> Feature:
    """Return the feature of a run whose `settings`, a config or another object, have the fields that belong to it.

    It is combined with `plain`, which all packs have because of the rows of the dataset (`training/reading.py`).

    Raises:
        ValueError: a field switches a feature on, and its folder is missing.
    """
    feature = plain
    for name, field in FIELDS.items():
        value = getattr(settings, name)
        folder = find_folder(field.feature)
        if folder is not None:
            feature = folder.FEATURE(value, feature)
        elif value != field.off:
            raise ValueError(
                f"`{name}={value!r}` was given, and this installation of trl_packfix is without its folder "
                f"`features/{field.feature}`, which does it. Set `{name}={field.off!r}`, or install trl_packfix anew."
            )
    return feature


def find_folder(name: str) -> ModuleType | None:
    """Import the folder of a feature and return its package; None if the folder is not there."""
    package_name = f"{__package__}.features.{name}"
    try:
        return import_module(package_name)
    except ModuleNotFoundError as error:
        if error.name not in (package_name, f"{__package__}.features"):
            raise  # a module that the feature imports
        return None


def require_folder(feature: str, public_name: str) -> None:
    """Raise ImportError if the folder of a feature is missing, from which a public name is imported."""
    if find_folder(feature) is None:
        raise ImportError(
            f"`{public_name}` was imported, and this installation of trl_packfix is without its folder "
            f"`features/{feature}`, which defines it. Install trl_packfix anew."
        )
