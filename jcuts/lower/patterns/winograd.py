"""Matches phases to Winograd's minimal filtering: which axes are tiles, taps, reduced channels and features.

The origin of the program does not matter; what is needed is ``sum_{t, c} data[d + t, c] * weight[t, c, k]`` with one or
two output axes ``d`` on which the data factor depends only through ``d + t``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph
from jcuts.kernel_ir.program import Axis, Phase, Program, Red
from jcuts.lower import toom_cook

MAX_EXIT = 64  # nodes of an exit graph, which is copied for every output of a tile


@dataclass(frozen=True)
class Dim:
    """A tiled output axis: a transformed one (with its reduction axis ``tap``) or a batch axis (``tap`` is '')."""

    axis: str
    extent: int
    tap: str = ""
    taps: int = 1

    def unit(self, points: int) -> int:
        """Outputs per tile along this axis."""
        return toom_cook.outputs_of(points, self.taps) if self.tap else 1

    def count(self, points: int) -> int:
        """Tiles along this axis."""
        return -(-self.extent // self.unit(points))


@dataclass(frozen=True)
class WinogradRoles:
    """Result of `match`: the roles of a phase's axes and of the factors of its product."""

    dims: tuple[Dim, ...]
    feature: Axis
    channel: Red
    data: int
    weight: int

    @property
    def transformed(self) -> tuple[Dim, ...]:
        """The dimensions with taps."""
        return tuple(d for d in self.dims if d.tap)


def match(program: Program) -> WinogradRoles | None:
    """The roles of an unscheduled program's axes, or None."""
    if len(program.phases) != 1 or dict(program.params).get("precision"):
        return None
    phase = program.phases[0]
    if len(phase.accs) != 1 or len(phase.exit.nodes) > MAX_EXIT:
        return None
    (acc,) = phase.accs
    product = phase.body.nodes[acc.values[0]]
    if acc.combine != "add" or product.op != "mul" or product.dtype not in ("float32", "float64"):
        return None
    for data, weight in (product.args, product.args[::-1]):
        form = _roles(phase, data, weight)
        if form is not None:
            return form
    return None


def _roles(phase: Phase, data: int, weight: int) -> WinogradRoles | None:
    of_data, of_weight = indices_of(phase.body, data), indices_of(phase.body, weight)
    if any(i.values() for i in (*of_data, *of_weight)):
        return None
    in_data, in_weight = axes_of(of_data), axes_of(of_weight)
    features = [a for a in phase.axes if a.name in in_weight]
    if len(features) != 1 or features[0].name in in_data or any(a.name not in in_data | in_weight for a in phase.axes):
        return None
    partner: dict[str, Red] = {}
    channels: list[Red] = []
    for red in phase.reds:
        if red.name not in in_data or red.name not in in_weight:
            return None
        axis = next(
            (a for a in phase.axes if a.name not in partner and _depends_on_sum(of_data, a.name, red.name)), None
        )
        if axis is None:
            channels.append(red)
        else:
            partner[axis.name] = red
    if len(channels) != 1 or not 1 <= len(partner) <= 2:
        return None
    dims = [Dim(a.name, a.extent) for a in phase.axes if a.name != features[0].name and a.name not in partner]
    dims += [
        Dim(a.name, a.extent, partner[a.name].name, partner[a.name].extent) for a in phase.axes if a.name in partner
    ]
    form = WinogradRoles(tuple(dims), features[0], channels[0], data, weight)
    return form if _contiguous(phase, form) else None


def indices_of(graph: Graph, value: int) -> list[Index]:
    nodes = [graph.nodes[n] for n in graph.needed([value])]
    return [i for node in nodes for i in (node.index, *(g.index for g in node.guards)) if i is not None]


def axes_of(indices: Sequence[Index]) -> frozenset[str]:
    return frozenset(itertools.chain.from_iterable(i.axes() for i in indices))


def _depends_on_sum(indices: Sequence[Index], axis: str, tap: str) -> bool:
    """Does everything depend on the two axes through their sum alone?"""
    steps = [(i.stride(axis), i.stride(tap)) for i in indices]
    return any(a for a, _ in steps) and all(a is not None and a == t for a, t in steps)


def _contiguous(phase: Phase, form: WinogradRoles) -> bool:
    """Lanes run along channels of the data and along features of weights and results."""

    def along(value: int, axis: str) -> bool:
        nodes = [phase.body.nodes[n] for n in phase.body.needed([value])]
        steps = [n.index.stride(axis) for n in nodes if n.op == "load" and n.index is not None]
        return 1 in steps and all(s in (0, 1) for s in steps)

    return (
        along(form.data, form.channel.name)
        and along(form.weight, form.feature.name)
        and all(s.address.stride(form.feature.name) == 1 and not s.guards for s in phase.stores)
    )
