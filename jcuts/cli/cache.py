"""Lists, moves and clears jcuts' files on disk: the tuning database and the object cache."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jcuts.base import keys, knobs
from jcuts.base.errors import CacheError
from jcuts.cli.printing import console, duration, size, table
from jcuts.tune.database import Store
from jcuts.tune.database_rows import Row

HELP = "list, export, import, merge or clear tuning results"


def open_store() -> Store:
    """The tuning database of this user, for this machine and these versions."""
    from jcuts.tune.parent.tuner import default_store  # brings in JAX: not for `jcuts --help`

    return default_store()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    ls = actions.add_parser("ls", help="list the entries, oldest first")
    ls.add_argument("--here", action="store_true", help="only those of this machine and these versions")
    export = actions.add_parser("export", help="write every entry to a JSON file")
    export.add_argument("file", type=Path)
    import_ = actions.add_parser("import", help="read a file that export wrote; the newer of two entries stays")
    import_.add_argument("file", type=Path)
    merge = actions.add_parser("merge", help="read several exported files, all of them or none")
    merge.add_argument("files", type=Path, nargs="+")
    clear = actions.add_parser("clear", help="remove every entry and every kernel")
    clear.add_argument("--yes", action="store_true", help="do not ask")
    for action in (ls, export, import_, merge, clear):
        action.set_defaults(do=_ACTIONS[action.prog.rsplit(" ", 1)[-1]])


def run(arguments: argparse.Namespace) -> int:
    """Runs one action; faults of the database (damaged, read-only) end as a typed error."""
    folder = knobs.current().cache_dir
    if os.path.lexists(folder) and not folder.is_dir():
        raise CacheError(f"the cache directory {folder} is not a directory", path=str(folder))
    log = logging.getLogger("jcuts.tune")
    log.addFilter(_is_no_error)
    try:
        store = open_store()
        status = arguments.do(store, arguments)
    finally:
        log.removeFilter(_is_no_error)
    if store.errors:
        raise store.errors[-1]
    return status


def _is_no_error(record: logging.LogRecord) -> bool:
    """Whether a line of the log is not one that `run` ends with anyway."""
    return not (isinstance(record.args, tuple) and any(isinstance(arg, CacheError) for arg in record.args))


def _ls(store: Store, arguments: argparse.Namespace) -> int:
    from jcuts.xla import object_cache

    rows = store.ls(all_devices=not arguments.here)
    out = console()
    columns = ("kind", "key", "winner", "time", "machine", "versions", "when")
    out.print(table(str(store.path), columns, [_line(store, row) for row in rows], right=(3,)))
    count, total = object_cache.usage()
    out.print(f"{len(rows)} entries; {count} kernels of {size(total)} in {object_cache.root()}")
    return 0


def _line(store: Store, row: Row) -> tuple[str, ...]:
    winner = str(row.value.get("winner") or row.value.get("chosen") or "")
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.created))
    machine = "this" if row.device == store.device else row.device[:12]  # `keys.GPU_DEVICE`: any host of that GPU
    versions = "these" if store.has_these_versions(row) else _versions_text(row.versions)
    kind = f"{row.kind}, pinned" if row.value.get("pinned") is True else row.kind
    return (kind, row.key[:16], winner, _seconds(row.value, winner), machine, versions, when)


def _versions_text(versions: str) -> str:
    """The part of a versions key that people recognise, or its beginning."""
    packages, _, code = versions.partition(keys.CODE)
    if (jax := re.search(r"\bjax ([^,]+)", packages)) is not None:
        return f"jax {jax[1]}, code {code[:8]}" if code else f"jax {jax[1]}"
    try:
        known = json.loads(versions)
        return f"jax {known['jax']}, jcuts {known['jcuts'][:8]}"
    except (ValueError, KeyError, TypeError):
        return versions[:20]


def _seconds(value: dict[str, Any], winner: str) -> str:
    """Time of the winner, from either form of entry: a choice's list of measurements or a guard's table."""
    times = value.get("seconds")
    found = times.get(winner) if isinstance(times, dict) else None
    for entry in value.get("measurements") or ():
        if isinstance(entry, dict) and entry.get("label") == winner:
            found = entry.get("seconds")
    return duration(found) if isinstance(found, (int, float)) else ""


def _export(store: Store, arguments: argparse.Namespace) -> int:
    console().print(f"{store.export(arguments.file)} entries written to {arguments.file}")
    return 0


def _import(store: Store, arguments: argparse.Namespace) -> int:
    taken = store.import_(arguments.file)
    _check_written(store)
    console().print(f"{taken} entries taken over from {arguments.file}")
    return 0


def _merge(store: Store, arguments: argparse.Namespace) -> int:
    taken = store.merge(arguments.files)
    _check_written(store)
    console().print(f"{taken} entries taken over from {len(arguments.files)} files")
    return 0


def _check_written(store: Store) -> None:
    """Raises: CacheError: what was to be stored or removed did not reach the file."""
    if store.unwritten is not None:
        raise store.unwritten


def _clear(store: Store, arguments: argparse.Namespace) -> int:
    from jcuts.xla import object_cache

    count, total = object_cache.usage()
    if not arguments.yes:
        what = f"{len(store.ls())} entries and {count} kernels ({size(total)})"
        try:
            answer = input(f"Remove {what} below {knobs.current().cache_dir}? [y/N] ")
        except EOFError:
            raise CacheError("nothing was removed: there is nobody to ask, so pass --yes") from None
        if answer.strip().lower() not in ("y", "yes"):
            console().print("nothing was removed")
            return 1
    removed = store.clear()
    _check_written(store)
    kernels = object_cache.clean(limit_bytes=0) if count else 0
    console().print(f"{removed} entries and {kernels} kernels removed")
    return 0


_ACTIONS: dict[str, Callable[[Store, argparse.Namespace], int]] = {
    "ls": _ls,
    "export": _export,
    "import": _import,
    "merge": _merge,
    "clear": _clear,
}
