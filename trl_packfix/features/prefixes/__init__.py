"""Documents of a pack that begin alike compute their common beginning once."""

from typing import Any

from .sharing import PrefixSharing

FEATURE = PrefixSharing


def estimate_savings(planner: Any, reader: Any) -> Any:
    """Return the `PrefixSavings` of a run, also with "off", and estimates for the other settings; None if not known.

    The module that does this is imported when the function is called, because most runs need no estimate.
    """
    from .savings import estimated_savings, planned_savings

    # With "family", the plan has the savings, and no token is read. With "pack" and "off" tokens are read.
    return planned_savings(planner) if planner.packing.feature.regroups else estimated_savings(planner, reader)
