"""Parallel compilation of whole programs before they are benchmarked."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jcuts.base import fingerprint
from jcuts.jit import end_to_end_benchmark
from jcuts.jit.variant_space import form_of, is_xla, numeric_rewrites
from jcuts.tune import device_slices

log = logging.getLogger("jcuts")


def precompile_variants(lowered: Mapping[str, Callable[[], Any]]) -> dict[str, int]:
    """Compiles several programs at once; each then runs without compiling.  Returns: peak memory of each [bytes].

    Lowering stays on this thread.  Plain XLA comes first and alone: its algorithms are timed as they would be without
    jcuts, beside nothing that may disturb that.  Programs whose products and convolutions are those of another come
    after it: XLA finds in memory which of its algorithms were fastest.  A program that fails here fails again when it
    is run, where that is dealt with.
    """
    most = 1 if device_slices.current().sliced else fingerprint.usable_cores()
    made = {}
    peaks: dict[str, int] = {}
    start = time.perf_counter()
    for name, lower in lowered.items():
        with contextlib.suppress(Exception):
            made[name] = lower()
    begin = time.perf_counter()
    others = [n for n in made if n != end_to_end_benchmark.XLA]
    # The last of a kind is kept: programs with options may know algorithms already (`tune.baseline.autotune_cache`).
    first = {_arithmetic(name): name for name in sorted(others, key=lambda name: ":" in name)}.values()
    first = [n for n in first if not is_xla(n)]
    waves = ([n for n in made if n == end_to_end_benchmark.XLA], first, [n for n in others if n not in first])
    for wave in filter(None, waves):
        last = time.perf_counter()
        with ThreadPoolExecutor(max(1, min(len(wave), most))) as pool:
            for name, future in {name: pool.submit(made[name].compile) for name in wave}.items():
                if (error := future.exception()) is not None:
                    text = str(error).splitlines()[0] if str(error) else type(error).__name__
                    log.info("program %s does not compile: %s", name, text)
                elif (peak := peak_bytes(future.result())) is not None:
                    peaks[name] = peak
        log.info("compiled in %.2f s: %s", time.perf_counter() - last, ", ".join(wave))
    spent = time.perf_counter() - begin
    log.info("%d programs lowered in %.2f s, compiled in %.2f s", len(made), begin - start, spent)
    return peaks


def peak_bytes(executable: Any) -> int | None:
    """Peak memory of a compiled program by XLA's buffer assignment (`memory_analysis`), None where it is not known.

    Arguments, results and temporary buffers; a donated argument and the result in its place count once.
    """
    analysis = executable.memory_analysis() if hasattr(executable, "memory_analysis") else None
    if analysis is None:
        return None
    once = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return int(once + analysis.temp_size_in_bytes)


def _arithmetic(name: str) -> tuple[str, ...]:
    return numeric_rewrites(None if is_xla(name) else form_of(name))
