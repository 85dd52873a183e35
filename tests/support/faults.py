"""Faults that tests plant: each is a context in which the package is wrong."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

Fault = Callable[[], AbstractContextManager]


def changed(owner: Any, name: str, wrong: Callable) -> Fault:
    """Return a fault that runs `wrong(right, *arguments)` in place of a function `name` of `owner`.

    A name that `owner` has no more raises here, when the faults are imported, and not only in `make faults`.
    """
    assert hasattr(owner, name), f"{owner} has no {name}: follow the new name here"

    def fault():
        right = getattr(owner, name)
        return mock.patch.object(owner, name, lambda *args, **more: wrong(right, *args, **more))

    return fault


def together(*faults: Fault) -> Fault:
    """Return a fault that is all of these."""

    @contextmanager
    def fault():
        with ExitStack() as stack:
            for make_fault in faults:
                stack.enter_context(make_fault())
            yield

    return fault
