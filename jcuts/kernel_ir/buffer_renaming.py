"""Renames the buffers of a phase, so that phases of several programs become one program's.

A result of one program becomes a local buffer that another one's phases read: values that stay in registers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph, Node
from jcuts.kernel_ir.program import Phase


def with_kept(phase: Phase, both: Mapping[str, str]) -> Phase:
    """The phase with a store into a local buffer beside the one into a result. Args: both: result -> local buffer."""
    more = (replace(s, buffer=both[s.buffer]) for s in phase.stores if s.buffer in both)
    return replace(phase, stores=(*phase.stores, *more))


def renamed(phase: Phase, names: Mapping[str, str], offsets: Mapping[str, Index] | None = None) -> Phase:
    """The phase with other names of its buffers. Args: offsets: what addresses in a buffer (by its old name) gain."""
    gains = offsets or {}

    def graph(source: Graph) -> Graph:
        made = Graph()
        for node in source.nodes:
            buffer = names.get(node.buffer, node.buffer)
            index = node.index
            if index is not None and node.buffer in gains:
                index = index + gains[node.buffer]
            if buffer != node.buffer or index is not node.index:
                node = Node(node.op, node.dtype, node.args, buffer, index, node.guards, node.value, node.attrs)
            made.add(node)
        return made

    stores = tuple(
        replace(s, buffer=names.get(s.buffer, s.buffer), address=s.address + gains.get(s.buffer, 0))
        for s in phase.stores
    )
    return replace(phase, body=graph(phase.body), exit=graph(phase.exit), stores=stores)
