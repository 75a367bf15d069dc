"""Attribution of XLA's kernels to jaxpr equations by ``op_name`` metadata of the optimised HLO module.

The program is compiled from a jaxpr whose equations each have a name scope (`jax.named_scope`), which XLA carries
through its passes as ``metadata={op_name=...}``.  A fusion is made of the operations of several equations: its time is
divided among them by the bytes that each operation reads or writes, whichever are more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

SCOPE = "jcuts_equation_"
"""Name scope of an equation, followed by its number."""
FREE = frozenset(
    {"parameter", "constant", "broadcast", "iota", "bitcast", "tuple", "get-tuple-element", "reshape", "after-all"}
)
"""Operations that neither read nor write memory, or nothing that the rest of their fusion does not."""
PARTIAL = frozenset({"slice", "dynamic-slice", "gather"})
"""Operations that read as much of their operand as they write."""

_COMMENT = re.compile(r"/\*.*?\*/")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\([^=]*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_SHAPE = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|body)=%?([\w.\-]+)")
_NAME = re.compile(r'op_name="([^"]*)"')
_OPERAND = re.compile(r"%([\w.\-]+)")
_EQUATION = re.compile(SCOPE + r"(\d+)")

Shares = dict[int, float]


@dataclass(frozen=True)
class _Instruction:
    """One HLO instruction: its operation, bytes of its result, operands, computation that it calls and equation."""

    operation: str
    size: float
    operands: tuple[str, ...]
    called: str | None
    equation: int | None


@dataclass
class _Module:
    """Instructions of all computations by name (unique within a module), and the names of each computation."""

    instructions: dict[str, _Instruction] = field(default_factory=dict)
    computations: dict[str, list[str]] = field(default_factory=dict)


def equation_shares(text: str) -> dict[str, Shares]:
    """Share of every equation in the time of every instruction of an optimised HLO module.

    Args: text: the module as ``compiled.as_text()`` prints it.
    Returns: instruction -> equation number -> share; the shares of an instruction sum to one.  Instructions that XLA
        made for no equation (copies of layouts, say) are left out.
    """
    module = _parsed(text)
    found = {}
    for name in module.instructions:
        weights = _weights(module, name)
        total = sum(weights.values())
        if total > 0.0:
            found[name] = {equation: weight / total for equation, weight in weights.items()}
    return found


def equation_seconds(text: str, seconds: Mapping[str, float]) -> dict[int, float]:
    """Time of every equation [s]. Args: text: see `equation_shares`; seconds: measured, by instruction."""
    shares = equation_shares(text)
    found: dict[int, float] = {}
    for name, time in seconds.items():
        for equation, share in shares.get(name, {}).items():
            found[equation] = found.get(equation, 0.0) + share * time
    return found


def _parsed(text: str) -> _Module:
    module = _Module()
    names: list[str] = []
    for line in map(_without_comments, text.splitlines()):
        if head := _COMPUTATION.match(line):
            names = module.computations.setdefault(head[1], [])
        elif made := _INSTRUCTION.match(line):
            name, shape, operation, rest = made.groups()
            called, scope = _CALLED.search(rest), _NAME.search(rest)
            equation = _EQUATION.search(scope[1]) if scope else None
            module.instructions[name] = _Instruction(
                operation,
                _bytes(shape),
                tuple(_OPERAND.findall(rest.partition("), ")[0])),
                called[1] if called else None,
                int(equation[1]) if equation else None,
            )
            names.append(name)
    return module


def _without_comments(line: str) -> str:
    """A line without ``/*index=5*/``, which stands before every fifth element of a tuple."""
    return _COMMENT.sub("", line)


def _weights(module: _Module, name: str) -> Shares:
    """Bytes by equation of an instruction, or of all in the computation that it calls."""
    mine = module.instructions[name]
    if mine.operation == "fusion" and mine.called in module.computations:
        found: Shares = {}
        for inner in module.computations[mine.called]:
            for equation, weight in _weights(module, inner).items():
                found[equation] = found.get(equation, 0.0) + weight
        if found:
            return found
    if mine.equation is None or mine.operation in FREE:
        return {}
    sizes = [module.instructions[o].size for o in mine.operands if o in module.instructions]
    if mine.operation in PARTIAL:
        return {mine.equation: max(2.0 * mine.size, 1.0)}
    if mine.operation == "dynamic-update-slice" and len(sizes) > 1:
        return {mine.equation: max(2.0 * sizes[1], 1.0)}
    return {mine.equation: max(mine.size, sum(sizes), 1.0)}


def _bytes(shape: str) -> float:
    """Bytes of a shape as HLO prints it, of all elements of a tuple."""
    total = 0.0
    for _, bits, extents in _SHAPE.findall(shape):
        total += (int(bits) / 8 if bits else 1.0) * math.prod(int(n) for n in extents.split(",") if n)
    return total
