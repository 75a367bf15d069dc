"""What a function has to do, counted from its jaxpr: FLOP, bytes, times no run can beat, and who does which share.

*FLOP*: two per product and sum of a matrix product or convolution (`plan.from_jaxpr.products_of`), one per element of
an element-wise result, one per element that a reduction reads, one per element of every window.  *Operations*: what
computes or moves something; reshapes, broadcasts and other views are none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jcuts.plan.cost.jaxpr import bytes_of, inner, products_of
from jcuts.plan.cost.primitive_kinds import FREE, REDUCTIONS

VIEWS = FREE | {"convert_element_type", "ffi_call"}
"""Equations that are no operations; a type that changes is part of what reads it, jcuts' kernels are counted apart."""
MOVES = frozenset(
    {
        "concatenate",
        "pad",
        "slice",
        "transpose",
        "rev",
        "gather",
        "dynamic_slice",
        "select_n",
        "dynamic_update_slice",
        "copy",
    }
)
WINDOWS = ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min")
UNITS = {"float32": "tf32_mma", "bfloat16": "bf16_mma", "float16": "fp16_mma"}
"""The fastest unit that may multiply numbers of a type at the default precision."""


def equations(jaxpr: Any, times: float = 1.0) -> Iterator[tuple[Any, float]]:
    """(equation, how often it runs) of a jaxpr and of all loops and calls in it."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        bodies = inner(eqn)
        for body, count in bodies:
            yield from equations(body, times * count)
        if not bodies:
            yield eqn, times


def flop_of(eqn: Any) -> float:
    """Floating-point operations of one equation."""
    name = eqn.primitive.name
    product = products_of(eqn)
    if product is not None:
        return 2.0 * product.m * product.n * product.k * product.batch
    if name in VIEWS or name in MOVES:
        return 0.0
    size = float(sum(math.prod(v.aval.shape) for v in eqn.outvars if hasattr(v.aval, "shape")))
    if name in WINDOWS:
        return size * math.prod(eqn.params["window_dimensions"])
    if name in REDUCTIONS:
        return float(math.prod(eqn.invars[0].aval.shape))
    return size


@dataclass(frozen=True)
class Counts:
    """Of a whole program: FLOP, operations, bytes of operands and results of the program, and of its products.

    ``products`` are (FLOP, bytes, unit) of every product and convolution; ``simple_flop`` is the rest.
    """

    flop: float
    operations: float
    bytes: float
    simple_flop: float
    products: tuple[tuple[float, float, str], ...]


def count(closed: Any) -> Counts:
    """Counts a closed jaxpr; constants are operands."""
    jaxpr = closed.jaxpr
    flop, operations, products = 0.0, 0.0, []
    for eqn, times in equations(jaxpr):
        work = times * flop_of(eqn)
        flop += work
        operations += times * (eqn.primitive.name not in VIEWS)
        if (product := products_of(eqn)) is not None:
            moved = times * sum(map(bytes_of, (*eqn.invars[:2], *eqn.outvars)))
            narrow = product.batch > 1 and product.n < 8  # depthwise: matrix units have nothing to share
            products.append((work, moved, "ffma" if narrow else UNITS.get(eqn.invars[0].aval.dtype.name, "ffma")))
    ends = {id(v): bytes_of(v) for v in (*jaxpr.invars, *jaxpr.constvars, *jaxpr.outvars) if hasattr(v, "aval")}
    return Counts(flop, operations, sum(ends.values()), flop - sum(p[0] for p in products), tuple(products))


def roofline(counts: Counts, arch: Any) -> dict[str, float]:
    """Times [s] from a GPU's peak rates (`arch.gpu.GpuArch`).

    ``compute``: all FLOP at the peak of the units they may use.  ``memory``: what the program is given and gives back,
    once through memory.  ``bound``: the larger of both.  ``layers``: the sum over products of the larger of its FLOP
    and of its operands and result through memory, everything else for nothing: what perfect kernels take that keep
    nothing in caches.
    """
    compute = counts.simple_flop / arch.peak("ffma")
    layers = 0.0
    for flop, moved, unit in counts.products:
        spent = flop / arch.peak(unit)
        compute += spent
        layers += max(spent, moved / arch.bw_global)
    memory = counts.bytes / arch.bw_global
    return {"compute": compute, "memory": memory, "bound": max(compute, memory), "layers": layers}


def arch_of(kind: str) -> Any:
    """The description of a GPU by what JAX calls it; an H200 for anything unknown."""
    from jcuts.arch.load import list_gpus, load_gpu

    found = [name for name in list_gpus() if name.lower() in kind.lower()]
    return load_gpu(found[0] if found else "h200")


def summary(closed: Any, kind: str) -> dict[str, Any]:
    """FLOP, bytes, operations and roofline of a program, as data."""
    made, arch = count(closed), arch_of(kind)
    return {
        "flop": made.flop,
        "bytes": made.bytes,
        "operations": made.operations,
        "arch": arch.name,
        "product_flop": made.flop - made.simple_flop,
        "roofline": roofline(made, arch),
    }


# -- who does what --------------------------------------------------------------------------------------------------
def planned(closed: Any, settings: Any, platform: str) -> tuple[Any, Any]:
    """(the program that is planned, what became of it) under some settings; nothing is measured."""
    from jcuts.pipeline import passes as pipeline_passes
    from jcuts.rewrite.registry import rewritten
    from jcuts.rewrite.simplify import simplify
    from jcuts.trace.inline import inline

    flat = simplify(inline(closed))
    if settings.form is not None and settings.form.rewrites:
        flat = rewritten(flat, settings.form.rewrites).closed
    outcome = pipeline_passes.optimize_jaxpr(closed, settings, platform=platform, may_measure=False)
    return flat, outcome.closed


def shares(before: Any, after: Any) -> dict[str, float]:
    """Shares of a program's FLOP, and of its operations, that kernels of jcuts run.

    Args: before: the program; after: the same with kernels in it: what is not left there, they do.
    """
    whole, rest = count(before), count(after)
    return {
        "flop": 1.0 - rest.flop / whole.flop if whole.flop else 0.0,
        "operations": 1.0 - rest.operations / whole.operations if whole.operations else 0.0,
        "product_flop": _share(whole.flop - whole.simple_flop, rest.flop - rest.simple_flop),
    }


def _share(whole: float, rest: float) -> float:
    return 1.0 - rest / whole if whole else 0.0


def shares_of(ours: Any, args: Sequence[Any], closed: Any, platform: str) -> dict[str, Any]:
    """Shares of what an `Optimized` runs for some arguments: none where plain XLA won.

    ``best_kernels`` are those of the fastest program with kernels, whoever won.
    """
    import dataclasses

    from jcuts.jit import variant_space

    decision = ours.decision(*args)
    chosen = decision.chosen if decision is not None else variant_space.end_to_end_benchmark.JCUTS
    name = chosen
    if variant_space.is_xla(chosen):
        lost = [n for n in decision.speed if not variant_space.is_xla(n)]
        name = max(lost, key=lambda n: decision.speed[n][0]) if lost else variant_space.end_to_end_benchmark.JCUTS
    settings = dataclasses.replace(ours.settings, form=variant_space.form_of(name))
    found = shares(*planned(closed, settings, platform))
    none = dict.fromkeys(found, 0.0)
    return {
        "program": chosen,
        **(none if variant_space.is_xla(chosen) else found),
        "best_kernels": {"program": name, **found},
    }


# -- by kind, as the thesis' Figure 5.2 ------------------------------------------------------------------------------
KINDS = ("complex", "complex (fusion)", "simple", "simple (fusion)")


def by_kind(subsets: Sequence[Any]) -> dict[str, dict[str, float]]:
    """Seconds by kind of subset (`report.SubsetReport`): of jcuts' kernels, of XLA where it was chosen, and counts.

    ``vendor`` is what XLA takes for all of them, each compiled alone: the vendor's libraries for products and
    convolutions.  Subsets without both times count nowhere but in ``untimed``.
    """
    names = ("jcuts", "xla", "vendor", "ours_alone", "kernels", "left", "untimed")
    table = {kind: dict.fromkeys(names, 0.0) for kind in KINDS}
    for s in subsets:
        row = table[s.kind]
        ours = s.chosen != "xla"
        row["kernels" if ours else "left"] += s.count
        if s.seconds is None or s.xla_seconds is None:
            row["untimed"] += s.count
            continue
        row["jcuts" if ours else "xla"] += s.count * (s.seconds if ours else s.xla_seconds)
        row["vendor"] += s.count * s.xla_seconds
        row["ours_alone"] += s.count * s.seconds
    return table


LIBRARIES = (
    "gemm",
    "xmma",
    "cutlass",
    "cudnn",
    "fprop",
    "wgrad",
    "dgrad",
    "winograd",
    "nvjet",
    "implicit",
    "conv",
    "dot",
    "cublas",
    "gemv",
    "fft",
)


def kind_of_kernel(name: str, kinds: dict[str, str]) -> str:
    """Kind of a kernel by its name. Args: kinds: of jcuts' kernels, by the first 8 digits of their digest."""
    if "jcuts" in name:
        return next((kind for digest, kind in kinds.items() if digest in name), "jcuts")
    small = name.lower()
    if any(word in small for word in LIBRARIES):
        return "complex (fusion)" if "fusion" in small else "complex"
    return "simple (fusion)" if "fusion" in small and not small.startswith("wrapped") else "simple"


def profile_by_kind(largest: Sequence[Sequence[Any]], kinds: dict[str, str]) -> dict[str, float]:
    """Seconds per step by kind, from the kernels of a profile ([name, calls, seconds])."""
    found: dict[str, float] = {}
    for name, _, seconds in largest:
        kind = kind_of_kernel(name, kinds)
        found[kind] = found.get(kind, 0.0) + seconds
    return found


def traced(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """The closed jaxpr of a function."""
    import jax

    return jax.jit(fn).trace(*args).jaxpr
