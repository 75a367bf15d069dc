"""Tunes programs on this machine and writes the results as data of the package (`jcuts.tune.portable.shipped`).

    python scripts/ship_database.py                 # the twelve programs of benchmarks/serving/first_calls.py
    python scripts/ship_database.py --networks      # MobileNetV2 at batch 1 as well, weights as arguments (needs keras)

On a host with a GPU the rows are about the GPU.  Files of other devices stay; those of this one are replaced.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MOST_BYTES = 1_000_000
NETWORKS = ("MobileNetV2",)


def programs(networks: bool) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Names, functions and arguments of what is tuned."""
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks" / "serving")]
    first_calls = importlib.import_module("first_calls")
    import jax
    import jax.numpy as jnp

    from jcuts.cli.demo import build

    for name, (function, arguments) in first_calls.PROGRAMS.items():
        yield name, function, arguments()
    for name in NETWORKS if networks else ():
        network = build(name, 1)
        yield name, network.apply, (jax.tree.map(jnp.asarray, network.weights), jnp.asarray(network.images))


def main() -> None:
    """Tunes, writes, and says how large all of it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", action="store_true")
    parser.add_argument("--tune-seconds", type=float, default=math.inf, help="per program; default: no limit")
    parser.add_argument("--only", nargs="*", help="programs to tune; their files are added")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(
            {"JCUTS_CACHE_DIR": folder, "JCUTS_SHIPPED": "0", "JCUTS_PROGRESS": "0", "JCUTS_LOCK_PATIENCE_S": "3600"}
        )
        import jcuts
        from jcuts.tune import session
        from jcuts.tune.portable import shipped
        from jcuts.tune.portable.file_store import FileStore

        store = session.store()
        assert isinstance(store, FileStore)
        with store.noting() as noted:
            for name, function, args in programs(arguments.networks):
                if arguments.only and name not in arguments.only:
                    continue
                fn = jcuts.optimize(function, tune_seconds=arguments.tune_seconds)
                fn.prepare(*args)
                print(f"{name}: {fn.decision(*args).chosen}", flush=True)
        rows = store.rows_of(noted)
        if not arguments.only:
            shipped.remove(shipped.FOLDER)
        count = shipped.write(shipped.FOLDER, rows)
    size = sum(path.stat().st_size for path in shipped.FOLDER.rglob("*.json"))
    print(f"{count} files written; all of them have {size} bytes")
    if size > MOST_BYTES:
        raise SystemExit(f"that is more than the {MOST_BYTES} that a wheel may have of them")


if __name__ == "__main__":
    main()
