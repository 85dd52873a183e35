"""Work around two races in CPython. One is between a thread of gloo and a fork, the other between it and the exit.

Gloo is the backend that ranks on CPUs use for collectives. Streams and data loaders call
`wait_for_threads_before_forks` before they start workers, and the trainer calls `wait_for_threads_at_exit`.

This module imports only the standard library, so that a test can fork often: a process with torch forks slowly.
"""

import atexit
import gc
import os
import sys
import time
from functools import cache


@cache
def wait_for_threads_before_forks() -> None:
    """Wait before each later fork of this process until threads that are entering Python have done so.

    This is needed for Python 3.11 only, and does nothing on later versions.

    A gloo thread enters Python to release a tensor after a collective. For this it takes a lock of the interpreter. A
    data loader worker that is forked at that moment waits for this lock forever, before its first line runs, and the
    other ranks wait for its batch. Python 3.11.7 has this error, 3.12 does not: remove this with Python 3.11.
    https://github.com/python/cpython/issues/112275
    """
    if sys.version_info < (3, 12):
        os.register_at_fork(before=_wait_for_threads)


def _wait_for_threads() -> None:
    """Wait until threads that are entering Python have done so."""
    # First release the GIL, so that a thread that waits for it can enter Python
    time.sleep(0.01)
    # Then wait until no other thread has the lock of the interpreter: `sys._current_frames` takes the lock itself, and
    # releases it again
    was_enabled = gc.isenabled()
    # A garbage collection runs code of other libraries. While the lock is held, this code could wait for a thread that
    # itself waits for the lock
    gc.disable()
    try:
        sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()


@cache
def wait_for_threads_at_exit() -> None:
    """Wait at the exit of this process until threads that are about to enter Python have done so.

    This is needed up to Python 3.13, and does nothing on later versions.

    A gloo thread that releases a tensor while the interpreter shuts down is terminated inside C++ code, which does not
    allow it. The process aborts with "terminate called without an active exception", so a run that has saved everything
    is reported as failed.
    https://github.com/python/cpython/issues/87135
    """
    if sys.version_info < (3, 14):
        atexit.register(time.sleep, 0.1)
