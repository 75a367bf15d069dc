"""Loading: checks an artefact and its device, registers kernels, and gives a callable; nothing is compiled or tuned.

An artefact is code: who loads one trusts it like a shared library. Checksums find damage, the optional HMAC finds
changes by those who do not have its key.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jcuts.artifact import container, device, kernels, manifest, weights
from jcuts.artifact.loaded import Loaded
from jcuts.base import knobs
from jcuts.base.errors import ArtifactError, ArtifactMismatch, NativeError, UsageError

log = logging.getLogger("jcuts.artifact")

REFUSE = "refuse"
FALLBACK = "fallback"
RUN = "run"
POLICIES = (REFUSE, FALLBACK, RUN)


def load(path: str | Path, *, on_mismatch: str = REFUSE, key: Any = None, types: Sequence[type] = ()) -> Loaded:
    """A function out of an artefact (`jcuts.Optimized.save`, ``jcuts build``).

    Needs jax, numpy and the native library; neither numba nor a compiler, nor a tuning database.

    Args:
        on_mismatch: what to do on another device, driver or version of jax than the artefact was made for:
            ``refuse`` (an error that names each difference), ``fallback`` (XLA's own program of the function, which is
            inside, with a warning), ``run`` (the tuned programs all the same where they can run, else the error).
        key: bytes or path of a key: demands the HMAC that ``save(..., key=...)`` made.
        types: classes of named tuples in arguments or results, besides those of modules that are imported.
    Returns: a `Loaded`.
    Raises: ArtifactError: no artefact, damaged, or not signed with the key.  ArtifactMismatch: made for something else.
        NativeError: no native library (``on_mismatch="fallback"`` runs plain XLA).
    """
    if on_mismatch not in POLICIES:
        raise UsageError(f"on_mismatch={on_mismatch!r} must be one of {', '.join(POLICIES)}", on_mismatch=on_mismatch)
    path = Path(path)
    file, found = read(path, key)
    compared = device.differences(found)
    is_fallback = knobs.current().disable or _is_fallback(path, found, compared, on_mismatch)
    if knobs.current().disable:
        compared = device.Differences(("JCUTS_DISABLE is set", *compared.blocking), compared.other)
    if found.kernels and not is_fallback and (note := device.note_on_cores(found)):
        log.warning("%s: %s", path, note)
    code = kernels.read(found, file)
    if not is_fallback and code:
        try:
            kernels.register(code, found.device["platform"])
        except NativeError as error:
            if on_mismatch != FALLBACK:
                raise
            compared = device.Differences((*compared.blocking, f"native code: {error.message}"), compared.other)
            is_fallback = _is_fallback(path, found, compared, on_mismatch)
    loaded = Loaded(
        found,
        file,
        weights.read(found, file, path),
        code,
        differences=compared.all,
        is_fallback=is_fallback,
        types=types,
    )
    loaded.prepare()
    return loaded


def _is_fallback(path: Path, found: manifest.Manifest, compared: device.Differences, policy: str) -> bool:
    counted = compared.blocking if policy == RUN else compared.all
    if not counted:
        if compared.other:
            log.info("%s runs although %s", path, "; ".join(compared.other))
        return False
    if policy == FALLBACK:
        log.warning("%s: plain XLA runs: %s", path, "; ".join(counted))
        return True
    blocks = "" if compared.blocking else ", or on_mismatch='run' to run it all the same"
    raise ArtifactMismatch(
        f"{path} was saved for something else: {'; '.join(counted)}. Save it here, or load it with "
        f"on_mismatch='fallback' to run plain XLA{blocks}",
        path=str(path),
        differences=compared.all,
        name=found.name,
    )


def read(path: Path, key: Any = None) -> tuple[container.Container, manifest.Manifest]:
    """A checked file and its manifest. Raises: ArtifactError."""
    file = container.read(path, key=container.read_key(key))
    try:
        return file, manifest.from_json(file.section("manifest"))
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error.message}", path=str(path), **error.values) from error.__cause__


def register_targets(path: str | Path, *, key: Any = None) -> tuple[str, ...]:
    """Registers the kernels of an artefact and the FFI targets that call them, for programs that name them.

    What ``Loaded.export_bytes`` gives, and programs that were exported with a loaded function inside, run in a process
    that has called this.

    Returns: the targets' names.
    Raises: as `load`, which refuses what was made for another device.
    """
    path = Path(path)
    file, found = read(path, key)
    blocking = device.differences(found).blocking
    if blocking:
        raise ArtifactMismatch(
            f"{path} cannot run here: {'; '.join(blocking)}", path=str(path), differences=blocking, name=found.name
        )
    kernels.register(kernels.read(found, file), found.device["platform"])
    return found.targets
