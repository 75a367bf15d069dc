"""Roofline of a workload: FLOP and compulsory bytes counted from its jaxpr, over peak rates of the GPU's data file.

*FLOP*: two per product and sum of a matrix product or convolution, one per element of any other floating-point result.
*Bytes*: what the program is given and gives back, once through memory; of a table that is only indexed the rows that
are read, of an array that is written in place the slice that is written.  Hardware rates are read as plain data from
`jcuts/arch/data`: nothing of the package is imported.
"""

from __future__ import annotations

import math
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[2] / "jcuts" / "arch" / "data"
MATRIX_UNITS = {"float32": "tf32_mma", "bfloat16": "bf16_mma", "float16": "fp16_mma"}
"""The fastest unit that may multiply numbers of a type at JAX's default precision."""
INDEXED = ("gather", "dynamic_slice")
NO_WORK = frozenset(
    ("reshape", "broadcast_in_dim", "squeeze", "transpose", "slice", "concatenate", "pad", "convert_element_type")
) | {"copy", "copy_p", "rev", "gather", "dynamic_slice", "dynamic_update_slice", "iota", "select_n", "stop_gradient"}
"""Equations that move or choose values and compute none."""


@dataclass(frozen=True)
class Counts:
    """FLOP by compute unit, and compulsory bytes."""

    flop: dict[str, float]
    bytes: float


def bodies(eqn: Any) -> list[tuple[Any, float]]:
    """(jaxpr, how often it runs) of the loops, branches and calls of an equation; of branches the first."""
    times = float(eqn.params.get("length", 1)) if eqn.primitive.name == "scan" else 1.0
    found = []
    for name, value in eqn.params.items():
        if name in ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "cond_jaxpr"):
            continue
        value = value[0] if name == "branches" else value
        jaxpr = getattr(value, "jaxpr", value)
        if hasattr(jaxpr, "eqns"):
            found.append((jaxpr, times))
    return found


def equations(jaxpr: Any, times: float = 1.0) -> Iterator[tuple[Any, float]]:
    """(equation, how often it runs) of a jaxpr and of all that it calls."""
    for eqn in jaxpr.eqns:
        inner = bodies(eqn)
        for body, count in inner:
            yield from equations(body, times * count)
        if not inner:
            yield eqn, times


def size(variable: Any) -> int:
    """Elements of a variable."""
    return math.prod(getattr(variable.aval, "shape", ()))


def bytes_of(variable: Any) -> float:
    """Bytes of a variable."""
    return float(size(variable) * getattr(getattr(variable.aval, "dtype", None), "itemsize", 0))


def work(eqn: Any) -> tuple[str, float]:
    """(compute unit, FLOP) of one equation."""
    name, out = eqn.primitive.name, sum(map(size, eqn.outvars))
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        depth = math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
        return MATRIX_UNITS.get(eqn.invars[0].aval.dtype.name, "ffma"), 2.0 * out * depth
    if name == "conv_general_dilated":
        kernel, spec = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"].rhs_spec
        products = math.prod(kernel[d] for d in spec[1:]) / math.prod(eqn.params["lhs_dilation"])
        groups = max(eqn.params["feature_group_count"], eqn.params["batch_group_count"])
        narrow = groups > 1 and (kernel[spec[1]] == 1 or kernel[spec[0]] == groups)  # depthwise: no matrix product
        unit = "ffma" if narrow else MATRIX_UNITS.get(eqn.invars[0].aval.dtype.name, "ffma")
        return unit, 2.0 * out * products / eqn.params["batch_group_count"]
    if name.startswith("reduce_window"):
        return "ffma", float(out * math.prod(eqn.params.get("window_dimensions", (1,))))
    if name.startswith(("reduce_", "arg", "cum")):
        return "ffma", float(size(eqn.invars[0]))
    return "ffma", 0.0 if name in NO_WORK else float(out)


def count(closed: Any) -> Counts:
    """Counts of a closed jaxpr; constants are operands."""
    flop: dict[str, float] = defaultdict(float)
    for eqn, times in equations(closed.jaxpr):
        unit, found = work(eqn)
        flop[unit] += times * found
    return Counts(dict(flop), compulsory(closed.jaxpr))


def compulsory(jaxpr: Any) -> float:
    """Bytes that have to pass through memory once: operands that are read, results that are written."""
    while len(jaxpr.eqns) == 1 and len(bodies(jaxpr.eqns[0])) == 1 and jaxpr.eqns[0].primitive.name != "scan":
        jaxpr = bodies(jaxpr.eqns[0])[0][0]  # a function that is only a call of another
    indexed: dict[Any, float] = defaultdict(float)
    whole, in_place = set(), {}
    for eqn in jaxpr.eqns:
        for at, v in enumerate(eqn.invars):
            if not hasattr(v, "count") and not _is_variable(v):
                continue
            if eqn.primitive.name in INDEXED and at == 0:
                indexed[v] += bytes_of(eqn.outvars[0])
            else:
                whole.add(v)
        if eqn.primitive.name == "dynamic_update_slice":
            in_place[eqn.outvars[0]] = bytes_of(eqn.invars[1])
    total = 0.0
    for v in (*jaxpr.invars, *jaxpr.constvars):
        total += bytes_of(v) if v in whole else min(bytes_of(v), indexed.get(v, 0.0))
    return total + sum(in_place.get(v, bytes_of(v)) if _is_variable(v) else 0.0 for v in jaxpr.outvars)


def _is_variable(v: Any) -> bool:
    """Whether it is a variable, no literal."""
    return not hasattr(v, "val")


def hardware(kind: str) -> dict[str, Any] | None:
    """Data of a GPU by what JAX calls it; None for what has no file (a CPU)."""
    for path in sorted(DATA.glob("*.toml")):
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        if data["name"].lower() in kind.lower().replace(" ", ""):
            return data
    return None


def roofline(counts: Counts, kind: str) -> dict[str, Any]:
    """Counts and lower bounds of the time [s]: all FLOP at the peak of their units, bytes at the peak bandwidth.

    peak = multiprocessors * FLOP per cycle and multiprocessor * highest clock,   bound = max(compute, memory)
    """
    found: dict[str, Any] = {"flop": sum(counts.flop.values()), "flop_by_unit": counts.flop, "bytes": counts.bytes}
    data = hardware(kind)
    if data is None:
        return found
    cycles = data["num_sm"]["value"] * data["clock"]["value"]
    rates = data["flop_per_clock_sm"]
    unit_seconds = [f / (cycles * rates.get(u, rates["ffma"])["value"]) for u, f in counts.flop.items()]
    compute, memory = sum(unit_seconds), counts.bytes / data["bw_global"]["value"]
    return found | {"gpu": data["name"], "compute": compute, "memory": memory, "bound": max(compute, memory)}
