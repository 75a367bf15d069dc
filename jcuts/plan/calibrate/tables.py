"""CSV data files of the planner: reader, and paths of the measured tables that come with the package."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from jcuts.base.csv_file import read_csv

__all__ = ["read_csv", "shipped"]


def shipped(name: str) -> Path:
    """Path of a table that comes with the package, e.g. ``table_5_6.csv``."""
    return Path(str(resources.files("jcuts.plan") / "data" / name))
