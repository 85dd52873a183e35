"""Tests of two features are left out where the folder of the other one is missing."""

from support.features import PRESENT

collect_ignore = [] if "images" in PRESENT else ["test_image_prefixes.py"]
