"""What a result of the MLP study says about its machine: `described`, and `written`, which saves it as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("jax", "jaxlib", "numpy", "numba")


def described() -> dict[str, Any]:
    """Processor, cores that this process may use, load of the last minute, versions, date."""
    from jcuts.arch.detect import describe_cpu

    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": describe_cpu().name,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
    }


def written(path: Path, result: Mapping[str, Any]) -> None:
    """Saves a result and says where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path}")
