"""The hooks of shared prefixes, and those of a run without them."""

import inspect

import pytest
from support.features import sharing

from trl_packfix.data.collator import PackedDataCollator
from trl_packfix.feature import FIELDS, PLAIN, Feature, regroups
from trl_packfix.features.prefixes.collator import PrefixCollator
from trl_packfix.features.prefixes.probe import PrefixProbe
from trl_packfix.isolation.probe import Probe
from trl_packfix.planning.packing import Packing
from trl_packfix.training.config import SFTConfig

HOOKS = [name for name, value in vars(Feature).items() if inspect.isfunction(value)]


def test_the_interface_has_few_hooks():
    assert len(HOOKS) <= 13


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_a_feature_is_off_by_default(name):
    assert SFTConfig.__dataclass_fields__[name].default == FIELDS[name].off
    assert Packing.__dataclass_fields__[name].default == FIELDS[name].off


def test_a_run_without_a_feature_changes_nothing():
    feature = sharing("off")
    assert feature is PLAIN
    collator = PackedDataCollator(8, 3)
    assert feature.make_collator(collator, keeps_last_rows=True) is collator
    assert feature.make_probe_class(Probe) is Probe
    assert feature.make_units("units", None) == "units"
    assert feature.sort_tokens(None, None) is None
    assert feature.report_section(None) is None
    assert feature.copied_bytes == 0
    assert not feature.is_on
    assert not feature.regroups
    assert feature.settings == {"share_prefixes": "off"}
    feature.refuse_lengths(3)


def test_packs_that_share_are_made_like_the_packs_of_the_run():
    feature = sharing("pack")
    collator = feature.make_collator(PackedDataCollator(8, 3, 2, 64), keeps_last_rows=True)
    assert collator == PrefixCollator(8, 3, 2, 64, keeps_last_rows=True)
    assert feature.make_probe_class(Probe) is PrefixProbe
    assert feature.sort_tokens(None, None) is None  # only units of families need it
    with pytest.raises(ValueError, match="was given with the lengths of 3 documents"):
        feature.refuse_lengths(3)


@pytest.mark.parametrize(
    ("setting", "can_sort", "shares", "expected"),
    [
        ("family", True, True, "family"),
        ("family", False, True, "pack"),
        ("family", True, False, "off"),
        ("pack", False, True, "pack"),
        ("pack", True, False, "off"),
        ("off", True, True, "off"),
    ],
)
def test_evaluation_shares_where_it_can(setting, can_sort, shares, expected):
    feature = sharing(setting).in_evaluation(can_sort=can_sort, shares=shares)
    assert feature.settings == {"share_prefixes": expected}


def test_only_families_are_other_units():
    assert regroups({"share_prefixes": ("pack", "family")})
    assert regroups({"share_prefixes": ("family", "off")})
    assert not regroups({"share_prefixes": ("off", "pack")})
    assert not regroups({"seed": ("family", 1)})
