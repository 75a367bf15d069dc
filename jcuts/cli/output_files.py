"""Files that a command writes: JSON and text, checked before anything is computed; failures are usage errors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from jcuts.base.errors import UsageError


def write(target: str, document: Any) -> None:
    """JSON into a file; ``-`` is standard output.  Raises: UsageError if it cannot be written."""
    text = json.dumps(document, indent=1)
    if target == "-":
        print(text)
    else:
        write_text(target, text + "\n")


def write_text(target: str, text: str) -> None:
    """Writes a file.  Raises: UsageError if that fails."""
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{target}: cannot be written: {error.strerror}", path=target) from error


def check_writable(target: str | None) -> None:
    """Raises UsageError, before anything is searched, for a file that cannot be written: no folder, no permission."""
    if target is None or target == "-":
        return
    path = Path(target)
    if not path.parent.is_dir():
        raise UsageError(f"{target}: cannot be written: there is no folder {path.parent}", path=target)
    if path.is_dir():
        raise UsageError(f"{target}: cannot be written: it is a folder", path=target)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{target}: cannot be written: permission denied", path=target)
