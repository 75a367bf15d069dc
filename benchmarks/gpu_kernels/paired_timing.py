"""What benchmarks of one layer share: chains of XLA's code and of kernels, judged by float64 and timed in turns."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

COPY = "copy"
"""A program that computes something else, for its time alone."""


def options_of(
    description: str | None,
    name: str,
    *,
    most: int,
    schedules: str,
    budget: float,
    only: str = "",
    what: str = "layer",
) -> argparse.ArgumentParser:
    """The options that all these benchmarks have; each adds its own.

    Args: name: of the folder for results. most, schedules: default and meaning of ``--most``. budget: seconds.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(name))
    parser.add_argument("--only", default=only, help=f"only {what}s whose name contains one of these")
    parser.add_argument("--most", type=int, default=most, help=schedules)
    parser.add_argument("--budget", type=float, default=budget, help="seconds")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--build", action="store_true", help="only compile; needs no GPU")
    return parser


def judged(
    row: dict[str, Any],
    compiled: dict[str, Any],
    lowered: dict[str, Any],
    params: dict[str, Any],
    sets: Sequence[tuple[Any, ...]],
    wide: Any,
) -> None:
    """Fills ``row["programs"]`` with times, errors over the reference's root mean square, and parameters.

    What does not compile, or is more than 4 times as far off as XLA, goes to ``row["rejected"]``.

    Args: compiled: chains by name, "xla" among them; lowered: those still to be compiled; params: of kernels; sets: of
        operands; wide: what the first set gives in float64.
    """
    from benchmarks.gpu_kernels import run

    with jax.enable_x64(True):
        scale = float(jnp.sqrt(jnp.mean(wide * wide)))
        off = jax.jit(lambda got, want: jnp.abs(got.astype(jnp.float64) - want).max())
    with ThreadPoolExecutor(12) as pool:
        for name, future in {name: pool.submit(low.compile) for name, low in lowered.items()}.items():
            try:
                compiled[name] = future.result()
            except Exception as error:
                row["rejected"][name] = f"{type(error).__name__}: {str(error)[:300]}"
    errors: dict[str, float] = {}
    for name, chain in list(compiled.items()):
        try:
            got = jax.tree.leaves(chain(sets)[0])[0]
            with jax.enable_x64(True):
                errors[name] = float(off(got, wide)) / scale
            if name != COPY and not errors[name] <= 4 * errors["xla"] + 1e-5:
                row["rejected"][name] = f"error {errors[name]:.3g}, XLA's is {errors['xla']:.3g}: {params.get(name)}"
                del compiled[name]
        except Exception as error:
            row["rejected"][name] = f"{type(error).__name__}: {str(error)[:300]}: {params.get(name)}"
            del compiled[name]
    for name, spent in run.timed(compiled, sets, len(sets), sets[0][0]).items():
        row["programs"][name] = {"params": params.get(name, {}), "error": errors[name], **spent}


def listed(row: dict[str, Any]) -> None:
    """Prints the programs of a layer, fastest first, and what was rejected."""
    for name, p in sorted(row["programs"].items(), key=lambda item: item[1]["median"]):
        print(f"    {p['median'] * 1e6:9.2f} {p['error']:.1e} {name} {p['params'] or ''}")
    for name, why in row["rejected"].items():
        print(f"    {name} rejected: {why[:200]}")


def in_turn(
    work: Iterable[tuple[str, Callable[[], dict[str, Any]]]],
    show: Callable[[dict[str, Any]], None],
    out: Path,
    budget: float,
    start: float,
) -> None:
    """Measures layers within a budget, shows each, and writes all after each.

    Args: work: name of a layer and what measures it. budget, start: seconds and the clock's start.
    """
    rows: list[dict[str, Any]] = []
    for name, measure in work:
        if time.perf_counter() - start > budget:
            print(f"{name}: out of time")
            continue
        try:
            rows.append(measure())
            show(rows[-1])
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}")
        print(f"    {time.perf_counter() - start:.0f} s", flush=True)
        out.write_text(json.dumps(rows, indent=1))
