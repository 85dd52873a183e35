"""Features in tests of the core, which must pass where the folder of a feature is missing.

These tests import no feature. A case that needs one gets it as the core does, from the settings of a run, and is
skipped without the folder:

    @needs("prefixes")
    @pytest.mark.parametrize("name", marked(CASES))  # where the settings of a case switch a feature on

What tests of the core take from the tests of a feature, such as its faults, is in a module of `tests/features/NAME`.
"""

import importlib
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trl_packfix.data.collator import PackedDataCollator
from trl_packfix.feature import FIELDS, PLAIN, Feature, features_of

from .paths import ROOT

PRESENT = frozenset(file.parent.name for file in (ROOT / "trl_packfix" / "features").glob("*/__init__.py"))
"""The features whose folders are there."""


def needs(feature: str) -> pytest.MarkDecorator:
    """Return the mark that skips a test where the folder of a feature is missing."""
    return pytest.mark.skipif(feature not in PRESENT, reason=f"`trl_packfix/features/{feature}` is missing")


def features_in(settings: Mapping[str, Any]) -> set[str]:
    """Return the names of the features that these settings switch on."""
    return {field.feature for name, field in FIELDS.items() if settings.get(name, field.off) != field.off}


def marked(cases: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """Return the names of the cases as parameters of a test, each marked with the features of its settings."""
    return [pytest.param(name, marks=[*map(needs, features_in(cases[name]))]) for name in cases]


def sharing(setting: str = "pack", plain: Feature = PLAIN) -> Feature:
    """Return the feature of a run with this `share_prefixes`. Without the folder only "off" has one."""
    return features_of(SimpleNamespace(share_prefixes=setting), plain)


def sharing_collator(**kwargs: Any) -> Any:
    """Return the collator of packs whose documents share prefixes from one common row on."""
    return replace(sharing().make_collator(PackedDataCollator(**kwargs)), min_shared=1)


def module_of_tests(feature: str, name: str) -> ModuleType | None:
    """Return a module of the tests of a feature; None where the folder of the feature is missing."""
    return importlib.import_module(f"features.{feature}.{name}") if feature in PRESENT else None
