"""Checks that everything jcuts needs is in place on this machine, and says how to repair what is not."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata

from rich.markup import escape

from jcuts.base import fingerprint, knobs
from jcuts.base.errors import CacheError, JcutsError
from jcuts.base.sqlite_file import why_read_only
from jcuts.cli.printing import console, size, table

HELP = "check versions, native library, caches and CPU, and run one kernel"
GOOD = "ok"
WARNING = "warning"
BAD = "PROBLEM"
_STYLE = {GOOD: "green", WARNING: "yellow", BAD: "bold red"}


@dataclass(frozen=True)
class Check:
    """One line of the report: ``advice`` says what to do, and is empty when all is well."""

    name: str
    status: str
    found: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # no options


def run(arguments: argparse.Namespace) -> int:
    """Prints the report; 0 if nothing is broken (warnings are allowed), else 1."""
    del arguments
    checks = list(examine())
    rows = [(escape(c.name), f"[{_STYLE[c.status]}]{c.status}[/]", escape(c.found), escape(c.advice)) for c in checks]
    console().print(table("jcuts doctor", ("what", "", "found", "to do"), rows))
    return 1 if any(c.status == BAD for c in checks) else 0


def examine() -> Iterator[Check]:
    """All checks, ordered so that the first problem explains later ones."""
    for check in (_variables, _versions, _cpu, _native, _launcher, _gpu, _object_cache, _database, _kernel, _function):
        try:
            yield from check()
        except JcutsError as error:
            yield Check(check.__name__.strip("_").replace("_", " "), BAD, error.message)
        except Exception as error:  # a doctor that dies of the disease helps nobody
            yield Check(
                check.__name__.strip("_").replace("_", " "),
                BAD,
                f"{type(error).__name__}: {error}",
                "this is not expected: please report it",
            )


def _variables() -> Iterator[Check]:
    knobs.current()  # raises UsageError with the name of a malformed variable
    unknown = knobs.unknown_variables()
    if unknown:
        yield Check("environment", WARNING, f"unknown: {', '.join(unknown)}", "a misspelling? see jcuts/base/knobs.py")
        return
    default = knobs.parse({})
    changed = [f"{name}={value}" for name, value, _ in knobs.describe() if _differs(name, default)]
    yield Check("environment", GOOD, ", ".join(changed) or "every JCUTS_* variable at its default")
    if knobs.current().disable:
        yield Check("environment", WARNING, "JCUTS_DISABLE leaves every function to XLA", "unset it to use jcuts")


def _differs(name: str, default: knobs.Knobs) -> bool:
    field = name.removeprefix("JCUTS_").lower()
    return getattr(knobs.current(), field) != getattr(default, field)


def _requirements() -> dict[str, str]:
    """Name to version range, of what jcuts always needs; empty in a source tree that was never installed."""
    try:
        lines = metadata.requires("jcuts") or []
    except metadata.PackageNotFoundError:
        return {}
    found = {}
    for line in lines:
        match = re.fullmatch(r"([A-Za-z0-9_.-]+)\s*([<>=!~].*)?", line.split(";")[0].strip())
        if match and "extra ==" not in line:
            found[match.group(1)] = match.group(2) or ""
    return found


def version_fits(version: str, wanted: str) -> bool:
    """Whether a version is inside ``">=a,<b"``; only the leading numbers count.

    >>> version_fits("0.10.2", ">=0.10,<0.12"), version_fits("0.12.0", "<0.12,>=0.10")
    (True, False)
    """
    tests: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
        ">=": lambda a, b: a >= b,
        "<=": lambda a, b: a <= b,
        "<": lambda a, b: a < b,
        ">": lambda a, b: a > b,
    }
    for part in filter(None, wanted.replace(" ", "").split(",")):
        match = re.match(r"(>=|<=|<|>)(.+)", part)
        if match and not tests[match.group(1)](_numbers(version), _numbers(match.group(2))):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(n) for n in match.group(0).split(".")) if match else ()


def _versions() -> Iterator[Check]:
    wanted = _requirements()
    known = {name: v for name, v in fingerprint.versions().items() if name != "jcuts"}
    for name in sorted(set(wanted) - set(known)):
        known[name] = fingerprint.package_version(name)
    known = {
        name: version for name, version in known.items() if name == "python" or name in wanted or version != "none"
    }
    wrong = [f"{n} {known[n]} (needs {wanted[n]})" for n in wanted if not version_fits(known.get(n, ""), wanted[n])]
    text = ", ".join(f"{name} {version}" for name, version in known.items())
    if wrong:
        yield Check("versions", BAD, "; ".join(wrong), "install jcuts again: pip install --upgrade jcuts")
    else:
        yield Check("versions", GOOD, text)


def _cpu() -> Iterator[Check]:
    here = fingerprint.cpu()
    features = set(here["features"] if isinstance(here["features"], tuple) else ())
    simd = [name for name in ("avx512f", "avx2", "fma", "asimd", "sve") if name in features]
    text = f"{here['model']}, {here['cores']} cores, {' '.join(simd) or 'no SIMD beyond the baseline'}"
    if simd:
        yield Check("CPU", GOOD, text)
    else:
        yield Check("CPU", WARNING, text, "kernels run, but vector units make the difference")


def _native() -> Iterator[Check]:
    from jcuts.xla import native_library

    good, text = native_library.native_available()
    if not good:
        yield Check("native library", BAD, text, "until then every function is left to XLA")
        return
    built = divmod(int(native_library.load().jcuts_ffi_api_version()), 1000)
    running = native_library.runtime_ffi_version()
    speaks = f"{running[0]}.{running[1]}" if running else "of unknown version"
    yield Check("native library", GOOD, f"{text}, XLA FFI {built[0]}.{built[1]}; this jaxlib speaks {speaks}")


def _launcher() -> Iterator[Check]:
    from jcuts.xla import cpu_launcher

    cpu_launcher.ensure_registered()
    yield Check("launcher", GOOD, f"XLA accepts {cpu_launcher.TARGET!r}")


def _gpu() -> Iterator[Check]:
    """Driver, devices, compilers, launcher; nothing is started on a GPU that JAX does not use anyway."""
    from jcuts.cli import doctor_gpu

    for name, good, found, advice in doctor_gpu.examine():
        yield Check(name, GOOD if good else WARNING, found, advice)


def _object_cache() -> Iterator[Check]:
    from jcuts.xla import object_cache

    base = knobs.current().cache_dir
    try:
        object_cache.secure_directory(base)
        object_cache.secure_directory(object_cache.root())
    except CacheError as error:
        yield Check("object cache", BAD, error.message, "until then kernels are compiled again in every process")
        return
    probe = object_cache.root() / ".doctor"
    try:
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        yield Check(
            "object cache",
            BAD,
            f"{object_cache.root()} cannot be written: {error}",
            "free some space or set JCUTS_CACHE_DIR; until then kernels are compiled again in every process",
        )
        return
    count, total = object_cache.usage()
    yield Check("object cache", GOOD, f"{object_cache.root()}: {count} kernels, {size(total)}")


def _database() -> Iterator[Check]:
    from jcuts.cli.cache import open_store

    store = open_store()
    rows = store.ls()
    if store.errors:
        yield Check(
            "tuning database", BAD, store.errors[-1].message, "until then functions are tuned again in every process"
        )
        return
    if store.path is not None and (why := why_read_only(store.path)):
        yield Check(
            "tuning database",
            BAD,
            f"{store.path} cannot be written: {why}",
            "free some space, make it writable or set JCUTS_CACHE_DIR; until then every process tunes again",
        )
        return
    here = len(store.ls(all_devices=False))
    yield Check("tuning database", GOOD, f"{store.path}: {len(rows)} entries, {here} for this machine and version")


def _kernel() -> Iterator[Check]:
    from jcuts.cli import doctor_trials

    yield Check("kernel", GOOD, doctor_trials.run_kernel())


def _function() -> Iterator[Check]:
    from jcuts.cli import doctor_trials

    yield Check("function", GOOD, doctor_trials.run_function())
