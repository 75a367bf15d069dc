"""Output redirection of a solver's banner: HiGHS prints one when its first object is made, past Python and its options.

Standard output belongs to the user's program and may be JSON: the banner goes to standard error.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator


@functools.cache
def keep_off_stdout() -> None:
    """Lets HiGHS print its banner now, to standard error; once per process, as it does.  Later solvers are silent."""
    try:
        import highspy  # pyright: ignore[reportMissingImports]
    except ImportError:  # the solver's caller says so
        return
    with _stdout_to_stderr():
        highspy.Highs()


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """What is written to file descriptor 1 meanwhile, by any thread, goes to descriptor 2: nothing is lost."""
    kept = None
    with contextlib.suppress(OSError, ValueError):  # a process without standard output, or one that was replaced
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
    try:
        yield
    finally:
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)
