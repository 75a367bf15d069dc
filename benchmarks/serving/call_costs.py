"""What a call costs beside ``jax.jit``'s: signatures, leaves, programs, methods; what the import costs beside JAX's.

    python benchmarks/serving/call_costs.py --out costs.json

Calls are dispatched, not waited for, of a function that does next to nothing: the least of several rounds, in us per
call, taken in turn with those of ``jax.jit``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jcuts
from jcuts.api import Optimized
from jcuts.jit.decision import JCUTS, XLA, Decision, MemoryStore

LEAVES = (1, 10, 100, 300)
SIGNATURES = (1, 2, 10)
ROUNDS = 7
CALLS = 2000
IMPORT = """
import sys, time
start = time.perf_counter()
import jax, jax.numpy
middle = time.perf_counter()
if sys.argv[1] == "jcuts":
    import jcuts
    jcuts.optimize(lambda x: x)
print(time.perf_counter() - middle)
"""


class AsTold(MemoryStore):
    """Decisions that no measurement took. Args: programs: one per signature, in turn."""

    def __init__(self, programs: Sequence[str]) -> None:
        super().__init__()
        self._programs, self._seen = programs, 0

    def guard(self, key: str) -> dict[str, Any]:
        self._seen += 1  # twice for each signature: pinned, and not
        chosen = self._programs[self._seen // 2 % len(self._programs)]
        return Decision(chosen, "as the benchmark says", measured=True).to_dict()


def small(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """The function: one of its leaves matters."""
    return x * params["w0"]


def optimized(fn: Callable[..., Any], programs: Sequence[str], **options: Any) -> Optimized:
    """A function that runs these programs, without tuning."""
    return Optimized(fn, jcuts.optimize(fn, tune="cached").settings, options, AsTold(programs))


def microseconds(fn: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> float:
    """Time of one call [us], over all of these calls in turn."""
    start = time.perf_counter()
    for _ in range(CALLS // len(calls)):
        for call in calls:
            fn(*call)
    return (time.perf_counter() - start) / (CALLS // len(calls) * len(calls)) * 1e6


def both(mine: Callable[..., Any], plain: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> dict[str, float]:
    """Least times of both sides [us], and their ratio."""
    for _ in range(2):
        for call in calls:
            jax.block_until_ready((mine(*call), plain(*call)))
    found = [(microseconds(mine, calls), microseconds(plain, calls)) for _ in range(ROUNDS)]
    ours, theirs = (min(side) for side in zip(*found, strict=True))
    return {"jcuts_us": ours, "jit_us": theirs, "ratio": ours / theirs}


def call_rows() -> list[dict[str, Any]]:
    """A row for every number of leaves, signatures and programs, and for methods."""
    rows: list[dict[str, Any]] = []
    for leaves in LEAVES:
        params = {f"w{i}": jnp.ones(()) for i in range(leaves)}  # and the array
        for signatures in SIGNATURES:
            calls = [(params, jnp.ones(8 + i)) for i in range(signatures)]
            for programs in ((JCUTS,), (JCUTS, XLA)) if signatures > 1 else ((JCUTS,), (XLA,)):
                found = both(optimized(small, programs), jax.jit(small), calls)
                rows.append(
                    {"leaves": leaves + 1, "signatures": signatures, "programs": "+".join(programs), "kind": "function"}
                    | found
                )
    rows.append({"leaves": 1, "signatures": 1, "programs": JCUTS, "kind": "method"} | method_row())
    return rows


def method_row() -> dict[str, float]:
    """The same for a method whose object is static."""

    def scaled(self: Any, x: jax.Array) -> jax.Array:
        return x * 2

    mine = type("Mine", (), {"scaled": optimized(scaled, (JCUTS,), static_argnums=0)})()
    plain = type("Plain", (), {"scaled": jax.jit(scaled, static_argnums=0)})()
    return both(lambda x: mine.scaled(x), lambda x: plain.scaled(x), [(jnp.ones(8),)])


def import_seconds(runs: int = 5) -> dict[str, float]:
    """Median seconds of `import jcuts` and a first `optimize`, after JAX's import."""

    def once() -> float:
        done = subprocess.run(
            [sys.executable, "-c", IMPORT, "jcuts"], capture_output=True, text=True, check=True, timeout=120
        )
        return float(done.stdout)

    return {"import_over_jax_s": statistics.median(once() for _ in range(runs))}


def main() -> None:
    """Prints a table; writes the numbers where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file of the numbers")
    parser.add_argument("--no-import", action="store_true", help="leave the time of the import out")
    arguments = parser.parse_args()
    found: dict[str, Any] = {"jax": jax.__version__, "backend": jax.default_backend(), "calls": call_rows()}
    for row in found["calls"]:
        what = f"{row['kind']:9} {row['leaves']:4} leaves {row['signatures']:3} signatures {row['programs']:10}"
        print(f"{what} {row['jcuts_us']:8.1f} us, jit {row['jit_us']:8.1f} us: {row['ratio']:.2f}")
    if not arguments.no_import:
        found |= import_seconds()
        print(f"import over jax's: {found['import_over_jax_s']:.3f} s")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
