"""Files that a request names, in the parent's private folder: the problem, XLA's side, inputs, expected results."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from jcuts.tune.problem import Output, Problem
from jcuts.tune.verify import sampling as verify_sampling
from jcuts.tune.verify.expected import OutputReference
from jcuts.tune.verify.inputs import dtype_of, is_float, load

_NARROW = re.compile(r":~?(bf16|f16|f8\w*)\[")
"""A value of such a type in a program as text (`trace.canonical`)."""


def import_jax() -> Any:
    import jax
    import jax.export

    # Artifacts carry their own types; without this their 64-bit operands would be cut on the way in.
    jax.config.update("jax_enable_x64", True)
    return jax


def problem_of(request: dict[str, Any]) -> Problem:
    return read_problem(request["problem"])


@functools.lru_cache(maxsize=4)
def read_problem(path: str) -> Problem:
    return Problem.from_json(json.loads(Path(path).read_text()))


@functools.lru_cache(maxsize=64)
def library_of(path: str) -> Any:
    """XLA's side of a problem, jitted: what the reference has compiled serves the measurement too."""
    jax = import_jax()
    return jax.jit(jax.export.deserialize(bytearray(read_problem(path).library or b"")).call)


def read_inputs(problem: Problem, folder: Path, number: int, *, short: bool = False) -> list[np.ndarray]:
    files = [(folder / f"{number}.in{i}.npy", spec) for i, spec in enumerate(problem.inputs)]
    return [load(file, spec.shape, spec.dtype, short=short) for file, spec in files]


@functools.lru_cache(maxsize=1)
def expected_outputs(path: str, folder: str, kinds: tuple[str, ...]) -> list[list[OutputReference]]:
    """What every output must look like, one entry per set of inputs: the same for all candidates of a problem."""
    problem = read_problem(path)
    seen = [verify_sampling.sample_positions(problem, o) for o in problem.outputs]
    return [
        [_expected(Path(folder), number, i, kind, spec, seen[i]) for number, kind in enumerate(kinds)]
        for i, spec in enumerate(problem.outputs)
    ]


@functools.lru_cache(maxsize=8)
def kept_inputs(path: str, folder: str, number: int) -> list[np.ndarray]:
    """A set of inputs, read once for all candidates of a problem (which `Launcher` and `GpuLauncher` copy).

    Large ones are the values that they repeat: runners make the whole of them.
    """
    return read_inputs(read_problem(path), Path(folder), number, short=True)


@functools.lru_cache(maxsize=2)
def xla_result(path: str, folder: str, i: int) -> np.ndarray:
    """All of XLA's result on the first set of inputs."""
    spec = read_problem(path).outputs[i]
    return load(Path(folder) / f"0.whole{i}.npy", spec.shape, spec.dtype)


def _expected(folder: Path, number: int, i: int, kind: str, spec: Output, seen: np.ndarray | None) -> OutputReference:
    shape, dtype = spec.shape if seen is None else seen.shape, spec.dtype
    kind_of = dtype_of(dtype).kind
    wide = dtype if kind_of in "biu" else "complex128" if kind_of == "c" else "float64"
    low, unsure, rounded = (folder / f"{number}.{name}{i}.npy" for name in ("low", "unsure", "rounded"))
    bounds: tuple[np.ndarray | None, np.ndarray | None] = (None, None)
    if low.exists():
        bounds = (load(low, shape, wide), load(folder / f"{number}.high{i}.npy", shape, wide))
    return OutputReference(
        kind,
        load(folder / f"{number}.xla{i}.npy", shape, dtype),
        load(folder / f"{number}.ref{i}.npy", shape, wide),
        *bounds,
        load(unsure, shape, "float64" if kind_of in "biu" else wide) if unsure.exists() else None,
        load(rounded, shape, wide) if rounded.exists() else None,
    )


def has_narrow_floats(problem: Problem) -> bool:
    """Whether floats narrower than float32 come up in a problem, if only on the way from its inputs to its outputs."""
    types = [dtype_of(x.dtype) for x in (*problem.inputs, *problem.outputs)]
    return any(is_float(d) and d.itemsize < 4 for d in types) or _NARROW.search(problem.text) is not None
