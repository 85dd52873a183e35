"""Documents of a pack that begin alike compute their common beginning once."""

from .sharing import PrefixSharing

FEATURE = PrefixSharing
