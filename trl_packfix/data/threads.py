"""Threads of a communication library enter Python when they like: forks and the end of the process wait for them.

Imports nothing heavy, so that a test can fork often.
"""

import atexit
import gc
import os
import sys
import time
from functools import cache


@cache
def wait_for_threads_before_forks() -> None:
    """From now on let threads that are entering Python arrive before this process is forked (Python 3.11 only).

    A thread of gloo enters Python to give a tensor back after a collective, and takes a lock of the interpreter on its
    way. A data loader worker that is forked at that moment waits for this lock for ever, before its first line, and the
    other ranks wait for the batch. Can go with Python 3.11, of which 3.11.7 has the error and 3.12 has not.
    https://github.com/python/cpython/issues/112275
    """
    if sys.version_info < (3, 12):
        os.register_at_fork(before=_wait_for_threads)


def _wait_for_threads() -> None:
    time.sleep(0.01)  # gives the GIL away: who waits for it arrives
    was_enabled = gc.isenabled()
    gc.disable()  # a collection under the lock could wait for a thread that wants the lock
    try:
        sys._current_frames()  # takes the lock and gives it back: who holds it now does so no longer
    finally:
        if was_enabled:
            gc.enable()


@cache
def wait_for_threads_at_exit() -> None:
    """Let threads that are about to enter Python arrive before the interpreter is taken down (until Python 3.13).

    A thread of gloo that gives a tensor back to an interpreter that is ending is ended itself, inside C++ that does not
    allow it: "terminate called without an active exception", and a run that saved everything has failed.
    https://github.com/python/cpython/issues/87135
    """
    if sys.version_info < (3, 14):
        atexit.register(time.sleep, 0.1)
