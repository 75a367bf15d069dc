"""IR verifier between passes: well-typed jaxprs, executable partitions, well-formed kernel programs.

Enabled by ``JCUTS_VERIFY=1`` (the tests set it): a wrong program is then found at the pass that made it.
"""

from __future__ import annotations

from typing import Any

from jcuts.base.errors import IRError
from jcuts.fusion.dag import Dag, is_acyclic_cover, is_convex
from jcuts.kernel_ir.verify import verify as verify_program
from jcuts.pipeline.computation import Computation
from jcuts.pipeline.rebuild import winners
from jcuts.trace import jaxapi


def verify_jaxpr(closed: jaxapi.Closed, original: jaxapi.Closed) -> None:
    """A jaxpr is well typed, defines what it uses, and takes and gives what the original does.

    Raises: IRError.
    """
    try:
        jaxapi.check(closed)
    except Exception as error:  # JAX has no public class for it
        raise IRError(f"ill-formed jaxpr: {error}") from error
    if len(closed.consts) != len(closed.jaxpr.constvars):
        raise IRError(f"{len(closed.consts)} constants for {len(closed.jaxpr.constvars)} variables")
    for kind, now, before in (
        ("arguments", closed.in_avals, original.in_avals),
        ("results", closed.out_avals, original.out_avals),
    ):
        if [_type(a) for a in now] != [_type(a) for a in before]:
            raise IRError(f"other {kind}: {[str(a) for a in now]} instead of {[str(a) for a in before]}")


def _type(aval: Any) -> tuple[Any, ...]:
    return getattr(aval, "shape", None), getattr(aval, "dtype", None)


def verify_partition(top: Computation) -> None:
    """Regions are disjoint, convex and acyclic together; every equation is in one, a loop, or left to XLA.

    Raises: IRError.
    """
    for level in top.walk():
        dag = Dag.of((n.number for n in level.graph.nodes), level.graph.edges())
        covered: set[int] = set()
        for region in level.subsets:
            if not region.members or not region.members <= dag.nodes or region.members & covered:
                raise IRError(f"region {sorted(region.members)}: empty, of another jaxpr, or overlaps another region")
            if not is_convex(dag, region.members):
                raise IRError(f"region {sorted(region.members)} is not convex: it could not run as one kernel")
            covered |= region.members
        if not is_acyclic_cover(
            dag, [*(s.members for s in level.subsets), *(frozenset({n}) for n in dag.nodes - covered)]
        ):
            raise IRError("regions need each other's results in a cycle")
        if twice := covered & (level.left_out.keys() | level.bodies.keys()):
            raise IRError(f"equations {sorted(twice)} are in a region and left to XLA")
        if lost := dag.nodes - covered - level.left_out.keys() - level.bodies.keys():
            raise IRError(f"equations {sorted(lost)} are in no region, and nothing says why")


def verify_programs(top: Computation) -> None:
    """The regions' programs are well formed, and take and give what their equations do. Raises: IRError."""
    seen: set[str] = set()
    for level in top.walk():
        for region in level.subsets:
            for buffers, values in (
                (region.program.inputs, region.inputs),
                (region.program.outputs, region.outputs),
            ):
                if [(tuple(b.shape), b.dtype) for b in buffers] != [(v.aval.shape, v.aval.dtype.name) for v in values]:
                    raise IRError(f"{region.program.name} does not take or give what its equations do")
            if region.program.digest not in seen:
                seen.add(region.program.digest)
                verify_program(region.program)


def verify_winners(top: Computation) -> None:
    """The scheduled programs that were chosen are well formed. Raises: IRError."""
    for program in winners(top):
        verify_program(program)
