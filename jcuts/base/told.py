"""One warning about a cache directory that cannot be used, however many parts of jcuts run into it."""

from __future__ import annotations

import logging
from pathlib import Path

from jcuts.base import knobs

_told: set[str] = set()


def unusable_cache(log: logging.Logger, text: str, *values: object, folder: Path | None = None) -> None:
    """Logs a warning the first time for a directory (by default the cache directory), at level INFO from then on."""
    where = str(knobs.current().cache_dir if folder is None else folder)
    level = logging.INFO if where in _told else logging.WARNING
    _told.add(where)
    log.log(level, text, *values)
