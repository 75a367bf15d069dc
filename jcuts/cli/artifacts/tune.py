"""Tunes a function offline for example arguments; writes what was measured as files that can be checked in."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from jcuts.base.errors import CacheError, JcutsError, UsageError
from jcuts.base.settings import MODES, Settings
from jcuts.cli.explain import add_signatures, example_arguments, load
from jcuts.cli.printing import console, table

HELP = "tune a function, and write its results as files to check in"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_signatures(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of JSON files, one per problem (default: none)")
    parser.add_argument("--key", type=Path, metavar="FILE", help="a key of at least 16 bytes: sign the files with it")
    parser.add_argument("--mode", choices=MODES, help=f"mode for a plain function; default: {Settings().mode}")
    parser.add_argument("--tune-seconds", type=float, metavar="S", help="tuning time per signature; default: no limit")
    parser.add_argument("--again", action="store_true", help="compare whole programs anew where that was done before")
    parser.add_argument("--pin", action="store_true", help="keep these choices in later versions of jcuts, too")
    parser.add_argument(
        "--check", action="store_true", help="measure nothing: status 1, and a list, if anything is missing"
    )


def run(arguments: argparse.Namespace) -> int:
    """Tunes every signature, prints a line for each, writes the files."""
    from jcuts.tune import session
    from jcuts.tune.portable import row_files
    from jcuts.tune.portable.file_store import FileStore, read_key

    key = read_key(arguments.key)
    if key is not None and arguments.out is None:
        raise UsageError("--key signs files: name their folder with --out")
    if arguments.out is not None:
        _check_folder(arguments.out)
    fn = _function(arguments)
    calls = [example_arguments(reference) for reference in arguments.args]
    if arguments.check:
        return _check(fn, calls)
    store = session.store()
    assert isinstance(store, FileStore)  # the user's own: no command sets another one
    with store.noting() as noted:
        rows = [_tuned(fn, call, again=arguments.again, pinned=arguments.pin) for call in calls]
    out = console()
    out.print(table(fn.__name__, ("arguments", "program", "kernels", "not measured", "seconds"), rows, right=(2, 3, 4)))
    if arguments.out is not None:
        written = row_files.write(arguments.out, store.rows_of(noted), key)
        out.print(f"{written.fresh} files written to {arguments.out}, {written.same} were the same already")
    if store.unwritten is not None:
        raise store.unwritten
    return 0


def _function(arguments: argparse.Namespace) -> Any:
    """The optimised function. Raises: UsageError: it is optimised already, in a way that does not tune at once."""
    import jcuts

    fn = load(arguments.function)
    plain = getattr(fn, "optimized", fn)  # of a function with batch_buckets: its signatures are those that are padded
    if not isinstance(plain, jcuts.Optimized):
        seconds = math.inf if arguments.tune_seconds is None else arguments.tune_seconds
        mode = arguments.mode or Settings().mode
        require = "complete" if arguments.check else None
        return jcuts.optimize(fn, mode=mode, tune_seconds=seconds, require=require)
    if plain.settings.tune in ("off", "cached"):
        raise UsageError(f"{arguments.function} is optimised with tune={plain.settings.tune!r}, which measures nothing")
    if arguments.check and plain.settings.require is None:
        raise UsageError(
            f"{arguments.function} is optimised without require='complete': name the plain function for --check, or "
            "its __wrapped__"
        )
    return plain


def _tuned(fn: Any, call: tuple[tuple[Any, ...], dict[str, Any]], *, again: bool, pinned: bool) -> tuple[str, ...]:
    """Tunes one signature; its line of the table."""
    args, kwargs = call
    again = again or fn.settings.require is not None  # then only `.tune()` measures
    if not again:
        fn.chosen(*args, **kwargs)  # measures what is not known
    report = fn.explain(*args, **kwargs)
    if again or report.unmeasured:  # the function's own limit of time was too short
        report = fn.tune(*args, **kwargs)
    decision = fn.decision(*args, **kwargs)
    if pinned:
        fn.pin(*args, **kwargs)
    row = next(row for row in reversed(fn.stats()["signatures"]) if row["program"] == decision.chosen)
    kernels = sum(subset.chosen != "xla" for subset in report.subsets)
    seconds = sum(decision.spent.values())
    arguments = _shortened(row["arguments"])
    return arguments, decision.chosen, str(kernels), str(report.unmeasured), f"{seconds:.1f}"


def _shortened(types: list[str], most: int = 3) -> str:
    return ", ".join(["..."] * (len(types) > most) + types[-most:])


def _check(fn: Any, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> int:
    """Whether everything was measured that calls need; prints what was not."""
    status = 0
    for args, kwargs in calls:
        try:
            fn.chosen(*args, **kwargs)
        except JcutsError as error:
            console().print(str(error), markup=False)
            status = 1
    if not status:
        console().print(f"{fn.__name__}: complete for {len(calls)} signatures")
    return status


def _check_folder(folder: Path) -> None:
    """Raises: CacheError: results could not be written there, which is better known before tuning."""
    probe = folder / ".jcuts-tune"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise CacheError(f"cannot write to {folder}: {error.strerror or error}", path=str(folder)) from None
