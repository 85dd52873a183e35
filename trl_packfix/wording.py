"""Write numbers with their nouns, for messages and reports. This module imports nothing."""


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun, which gets an "s" unless the number is 1.

    >>> count_of(1, "row"), count_of(1200, "row")
    ('1 row', '1,200 rows')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
