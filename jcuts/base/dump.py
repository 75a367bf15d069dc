"""``JCUTS_DUMP=dir``: every stage of every function as a numbered text file.

    dir/train_step/01_jaxpr.txt
    dir/train_step/02_regions.txt
    dir/train_step-2/01_jaxpr.txt          (the same function, planned again)

Each file starts with a line that says what made it and how long that took.  Off, a dump costs one comparison per stage.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from jcuts.base import knobs

log = logging.getLogger("jcuts.dump")

_COMMENT = {"txt": "#", "py": "#", "ll": ";", "ptx": "//", "s": "#", "mlir": "//"}


def _safe(name: str) -> str:
    """A file name out of any function or stage name: never empty, hidden, long, or a path."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("._-")[:80] or "function"


class Dump:
    """Writes the stages of one planned function; made by ``open_dump``."""

    def __init__(self, function: str, folder: Path | None) -> None:
        self.function = function
        self.folder = folder
        self._number = itertools.count(1)
        self._last = time.perf_counter()

    @property
    def enabled(self) -> bool:
        """Whether anything is written; ask before computing something costly only to print it."""
        return self.folder is not None

    def stage(
        self, name: str, text: str | Callable[[], str], *, suffix: str = "txt", seconds: float | None = None
    ) -> Path | None:
        """Writes one stage.

        Args:
            name: of the stage: ``"jaxpr"`` becomes ``01_jaxpr.txt``.
            text: the contents, or a function that makes them (called only when dumping).
            suffix: of the file; JSON gets no header line, since it has no comments.
            seconds: how long the stage took [s]; by default the time since the stage before.
        Returns: the file, or None when dumping is off or the disk refuses (logged: a dump never stops a program).
        """
        if self.folder is None:
            return None
        now = time.perf_counter()
        took = now - self._last if seconds is None else seconds
        path = self.folder / f"{next(self._number):02d}_{_safe(name)}.{suffix}"
        body = text if isinstance(text, str) else text()
        header = ""
        if suffix != "json":
            header = f"{_COMMENT.get(suffix, '#')} stage {name} of {self.function}, {took * 1e3:.3f} ms\n"
        try:
            path.write_text(header + body + ("" if body.endswith("\n") else "\n"), encoding="utf-8")
        except OSError as error:
            log.warning("stage %s of %s not dumped: %s", name, self.function, error)
            return None
        finally:
            # Printing is not part of the next stage.
            self._last = time.perf_counter()
        return path

    def beside(self, stage: Path, files: Callable[[], Mapping[str, bytes]]) -> None:
        """Writes more files of a stage: ``01_jaxpr.txt`` gets ``01_jaxpr.py`` and whatever else belongs to it.

        Args: stage: its file; files: makes their contents, by suffix (called only when dumping).
        """
        try:
            for suffix, data in files().items():
                stage.with_suffix(f".{suffix}").write_bytes(data)
        except OSError as error:
            log.warning("stage %s of %s not dumped: %s", stage.stem, self.function, error)
        finally:
            self._last = time.perf_counter()


def open_dump(function: str) -> Dump:
    """A ``Dump`` below ``JCUTS_DUMP``, in a new folder of its own; one that writes nothing if the knob is unset."""
    base = knobs.current().dump
    if base is None:
        return Dump(function, None)
    name = _safe(function)
    for number in itertools.count(1):
        folder = base / (name if number == 1 else f"{name}-{number}")
        try:
            os.makedirs(base, exist_ok=True)
            os.mkdir(folder)
        except FileExistsError:
            if not base.is_dir():
                log.warning("JCUTS_DUMP=%s is not a directory: nothing is dumped", base)
                return Dump(function, None)
            continue
        except OSError as error:
            log.warning("JCUTS_DUMP=%s cannot be used: %s", base, error)
            return Dump(function, None)
        return Dump(function, folder)
    raise AssertionError("unreachable: the count never ends")
