"""Deduplicated warnings: each is logged once, however many parts of jcuts raise it."""

from __future__ import annotations

import logging
from pathlib import Path

from jcuts.base import knobs

_told: set[str] = set()


def unusable_cache(log: logging.Logger, text: str, *values: object, folder: Path | None = None) -> None:
    """Logs a warning the first time for a directory (by default the cache directory), at level INFO from then on."""
    warn_once(log, str(knobs.current().cache_dir if folder is None else folder), text, *values)


def warn_once(log: logging.Logger, about: str, text: str, *values: object) -> None:
    """Logs a warning the first time about something, at level INFO from then on."""
    level = logging.INFO if about in _told else logging.WARNING
    _told.add(about)
    log.log(level, text, *values)
