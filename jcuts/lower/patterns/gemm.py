"""Matches contractions and convolutions (implicit GEMM) to batched GEMM: axes ``b``, ``m``, ``n``, reduction axis
``k``.

Every operand must be one array:

    out[b, m, n] = epilogue(sum over k of prologue(left[b, m, k], vectors[k]) * right[b, k, n])

The prologue, where there is one, is element-wise (a norm with known statistics, an activation), in float32; its
operand and result are float32 or bfloat16.

A convolution's k counts taps and channels, m batch and space: addresses of the left operand hold quotients of both, and
guards (padding, read as zeros; such operands have no prologue).  Within a *run* of k (the channels of one tap)
addresses are affine.

``left`` (A) and ``right`` (B) are chosen so that n is contiguous in the first result; the equation's operands may be
exchanged for that.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jcuts.base.identity_memo import IdentityMemo
from jcuts.kernel_ir.index import Atom, Index, unflatten
from jcuts.kernel_ir.loop_transforms import collapse_program, map_indices
from jcuts.kernel_ir.node import Graph, Guard, Node
from jcuts.kernel_ir.numpy_semantics import apply
from jcuts.kernel_ir.program import ITEM_SIZE, Acc, Axis, Phase, Program, Red
from jcuts.lower.delinearize import delinearize

B = "b"
"""Axis of the batch."""
ROWS = "m"
"""Axis of the left operand's rows."""
COLUMNS = "n"
"""Axis of the right operand's columns."""
K = "k"
"""The summed axis."""
S = "s"
"""The split of K where it is split over the grid (split-K)."""
TYPES = {"float32": "tf32", "bfloat16": "bf16", "float16": "f16"}
"""Operand type of ``mma`` for each storage type that is accumulated in float32."""
WIDE = "float64"
"""What is added up in itself."""
COPY = (16, 8, 4)
"""Bytes of one asynchronous copy into shared memory."""
LEAST_TERMS = 8
MOST_OPERANDS = 1 << 10
"""GEMMs whose operands are kept."""
CARRIED = frozenset({"load", "const", "convert", "widen", "add", "sub", "mul", "neg", "abs", "max", "min", "clamp"})
"""What may stand before a product of bfloat16: computed in float32 and rounded once, at its end."""


@dataclass(frozen=True)
class GemmOperand:
    """One operand of a GEMM: a buffer, its address, its guards.

    Attributes:
        buffer, dtype: the array. index: address of an element.
        guards: where it is read; elsewhere it is zero.
        outer: its axis that is not summed, m or n.
        along_terms: neighbouring k are neighbours in memory, else neighbouring m (or n).
        width: elements of one asynchronous copy.
        run: k from a multiple of which on so many addresses are ``step`` elements apart.
    """

    buffer: str
    dtype: str
    index: Index
    guards: tuple[Guard, ...]
    outer: str
    along_terms: bool
    width: int
    run: int
    step: int

    @property
    def k_offset(self) -> Index:
        """The part of the address that depends on k."""
        return Index(0, tuple(t for t in self.index.terms if _axes(t[0]) & {K, S}))

    @property
    def outer_offset(self) -> Index:
        """The part of the address that depends on batch, row or column."""
        return self.index - self.k_offset

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return ITEM_SIZE[self.dtype]


def as_gemm(program: Program, *, exact: bool = False) -> Program | None:
    """The program with GEMM axes, unscheduled; None if it is not a GEMM, or if its arithmetic rules out tensor cores.

    float32 GEMMs with ``precision`` HIGH or HIGHEST do not match: tensor cores round operands to TF32, which is XLA's
    default on GPUs too.  ``exact``: match those and float64 GEMMs instead, and no others.
    """
    if len(program.phases) != 1:
        return None
    wide = any(acc.dtype == WIDE for acc in program.phases[0].accs)
    if (wide or bool(dict(program.params).get("precision"))) != exact:
        return None
    whole = collapse_program(_padding_as_zeros(program) if wide else program)
    program = delinearize(whole)
    phase = program.phases[0]
    loads = _factors(phase, WIDE if wide else "float32")
    if loads is None or math.prod(r.extent for r in phase.reds) < LEAST_TERMS:
        return None
    factors = phase.body.nodes[phase.accs[0].values[0]].args
    names = [a.name for a in (*phase.axes, *phase.reds)]
    strides = [{a: n.index.stride(a) for a in names} for n in loads if n.index is not None]
    if len(strides) != 2 or any(s is None for found in strides for s in found.values()):
        return None
    first, second = strides
    if not all(first[r.name] and second[r.name] for r in phase.reds):
        return None
    if any(not first[a.name] and not second[a.name] for a in phase.axes):
        return None
    batch = [a for a in phase.axes if first[a.name] and second[a.name]]
    if batch and program is not whole:  # groups of features
        return None
    free = [[a for a in phase.axes if found[a.name] and a not in batch] for found in strides]
    last = next((a for a in phase.axes if phase.stores[0].address.stride(a.name) == 1), None)
    if last is None or last in batch or any(s.guards for s in phase.stores):
        return None
    left, right = (1, 0) if last in free[0] else (0, 1)
    if len(free[right]) != 1:  # the columns of a thread's accumulators are neighbours in memory
        return None
    if not _is_plain(phase.body, factors[right]):  # a prologue is for the operand that passes through registers
        return None
    if loads[right].guards or any(
        g.index.values() or free[right][0].name in g.index.axes() for g in loads[left].guards
    ):
        return None
    made = _renamed(program, (factors[left], factors[right]), batch, free[left], free[right][0])
    return made if all(side is not None for side in _sides(made)) else None


def k_tiles_per_split(total: int, terms: int, split: int) -> tuple[int, int]:
    """(k-tiles of ``terms`` per split, splits) of a split-K GEMM with at most ``split`` splits.

    >>> k_tiles_per_split(1000, 32, 5)
    (7, 5)
    """
    tiles = -(-total // terms)
    share = -(-tiles // split)
    return share, -(-tiles // share)


def k_extent(program: Program) -> int:
    """The K extent (of one split, which has guards for k beyond the last)."""
    return int(str(dict(program.params).get("terms", program.phases[0].reds[0].extent)))


def gemm_operands(program: Program) -> tuple[GemmOperand, GemmOperand]:
    """A (left) and B (right) operand of a GEMM."""
    phase = program.phases[0]
    key = phase.body, len(phase.body.nodes), phase.accs, tuple(phase.ranges().items()), k_extent(program)
    if (known := _operands.get(*key)) is not None:
        return known
    left, right = _sides(program)
    assert left is not None and right is not None
    return _operands.keep((left, right), *key)


_operands: IdentityMemo[tuple[GemmOperand, GemmOperand]] = IdentityMemo(MOST_OPERANDS)
"""By the body graph, which all schedules of a GEMM share."""


def _factors(phase: Phase, dtype: str = "float32") -> tuple[Node, Node] | None:
    """The two loads whose product is summed. Args: dtype: of product and sum."""
    if len(phase.accs) != 1 or (phase.accs[0].combine, phase.accs[0].dtype) != ("add", dtype):
        return None
    product = phase.body.nodes[phase.accs[0].values[0]]
    if product.op != "mul" or product.dtype != dtype:
        return None
    found = []
    for number in product.args:
        node = _operand(phase.body, number, {r.name for r in phase.reds})
        if node is None or node.index is None or node.index.values():
            return None
        if node.dtype not in (TYPES if dtype != WIDE else (WIDE,)):
            return None
        if node.guards and node.value != 0:
            return None
        found.append(node)
    return (found[0], found[1]) if found[0].dtype == found[1].dtype else None


def prologue(program: Program) -> int | None:
    """Node number of the A factor in a GEMM's body graph, where it is more than a load (a prologue)."""
    body = program.phases[0].body
    number = _product(program.phases[0]).args[0]
    return None if _is_plain(body, number) else number


def prologue_is_zero_safe(program: Program) -> bool:
    """Whether a prologue of zeros is finite: then k beyond the last, whose weights are zeros, add nothing."""
    number, body = prologue(program), program.phases[0].body
    values: dict[int, np.ndarray] = {}
    with np.errstate(all="ignore"):
        for n in () if number is None else body.needed([number]):
            node = body.nodes[n]
            if node.op in ("load", "const"):
                values[n] = np.asarray(0.0 if node.op == "load" else node.value, np.float32)
            else:
                types, args = [body.nodes[a].dtype for a in node.args], [values[a] for a in node.args]
                values[n] = apply(node.op, node.dtype, types, args, dict(node.attrs))
    return number is None or bool(np.isfinite(values[number]))


def k_vectors(program: Program) -> list[Node]:
    """Vectors along K that a GEMM's prologue reads besides the A operand."""
    number, body = prologue(program), program.phases[0].body
    if number is None:
        return []
    nodes = [body.nodes[n] for n in body.needed([number])]
    return [n for n in nodes if n.op == "load" and n.index is not None and n.index.axes() <= {K, S}]


def _padding_as_zeros(program: Program) -> Program:
    """A float64 convolution with its zero padding multiplied like other pixels, as in cuDNN.

    What is traced leaves such products out, as XLA does on CPUs: infinite weights make the difference.
    """
    phase = program.phases[0]
    nodes = phase.body.nodes
    masked = nodes[phase.accs[0].values[0]]
    if masked.op != "select":
        return program
    holds, product, zero = (nodes[a] for a in masked.args)
    if (holds.op, product.op, zero.op, zero.value) != ("guard", "mul", "const", 0):
        return program
    if not any((nodes[a].op, nodes[a].value, nodes[a].guards) == ("load", 0, holds.guards) for a in product.args):
        return program
    phase = replace(phase, accs=(replace(phase.accs[0], values=(masked.args[1],)),))
    return replace(program, phases=(phase,))


def _operand(body: Graph, number: int, terms: Collection[str]) -> Node | None:
    """The load of a factor: itself, or the one in its prologue that depends on more than k."""
    node = body.nodes[number]
    if _is_plain(body, number):
        return body.nodes[node.args[0]] if node.op == "widen" else node
    nodes = [body.nodes[n] for n in body.needed([number])]
    loads = [n for n in nodes if n.op == "load"]
    if any(not n.args and n.op not in ("load", "const") for n in nodes) or node.dtype != "float32":
        return None  # guards, positions
    if any(n.guards or n.index is None or n.index.values() for n in loads):
        return None
    main = [n for n in loads if n.index is not None and not n.index.axes() <= set(terms)]
    types = {n.dtype for n in loads if n not in main}
    if len(main) != 1 or not types <= {"float32"}:
        return None
    if node.op == "widen" and body.nodes[node.args[0]].dtype == main[0].dtype == "bfloat16":
        fits = all(n.op in CARRIED and n.dtype in ("float32", "bfloat16") and not n.declared for n in nodes)
    else:
        fits = main[0].dtype == "float32"
    return main[0] if fits else None


def _is_plain(body: Graph, number: int) -> bool:
    """Whether a factor is a plain load."""
    node = body.nodes[number]
    return node.op == "load" or (node.op == "widen" and body.nodes[node.args[0]].op == "load")


def _renamed(program: Program, factors: tuple[int, int], batch: list[Axis], rows: list[Axis], column: Axis) -> Program:
    """The program over the axes b, m and n, with one reduction axis k."""
    phase = program.phases[0]
    groups: dict[str, Sequence[Axis | Red]] = {B: batch, ROWS: rows, COLUMNS: [column], K: phase.reds}
    ranges = {name: math.prod(a.extent for a in group) for name, group in groups.items()}
    where: dict[str, Index] = {}
    for name, group in groups.items():
        places = unflatten(Index.axis(name), tuple(a.extent for a in group), ranges)
        where.update(zip((a.name for a in group), places, strict=True))
    made = map_indices(phase, lambda index: index.substitute(where, ranges))
    body = Graph()
    dtype = phase.accs[0].dtype
    total = body.apply("mul", dtype, *phase.body.copy_into(body, factors, where, ranges))
    axes = tuple(Axis(name, ranges[name]) for name in (B, ROWS, COLUMNS) if name != B or batch)
    acc = Acc("add", dtype, (total,))
    phase = replace(made, axes=axes, reds=(Red(K, ranges[K]),), accs=(acc,), body=body)
    return replace(program, phases=(phase,), params=())


# -- operands -------------------------------------------------------------------------------------------------------
def _sides(program: Program) -> tuple[GemmOperand | None, GemmOperand | None]:
    phase = program.phases[0]
    product, ranges = _product(phase), phase.ranges()
    group = Index.axis(S) * ranges[K] + Index.axis(K) if S in ranges else Index.axis(K)
    found = []
    for number, outer in zip(product.args, (ROWS, COLUMNS), strict=True):
        node = _operand(phase.body, number, (K, S))
        if node is None:
            return None, None
        guards = tuple(g for g in node.guards if g.index != group)
        found.append(_side(replace(node, guards=guards), outer, ranges, k_extent(program)))
    return found[0], found[1]


def _product(phase: Phase) -> Node:
    product = phase.body.nodes[phase.accs[0].values[0]]
    if product.op == "select":  # of a group of terms, those that there are
        product = phase.body.nodes[product.args[1]]
    return product


def _side(node: Node, outer: str, ranges: dict[str, int], total: int) -> GemmOperand | None:
    index = node.index
    assert index is not None
    run = math.gcd(_contiguous_k(index), *(_contiguous_k(g.index) for g in node.guards)) or ranges[K]
    if any(_axes(atom) & {K, S} and _axes(atom) - {K, S} for atom, _ in index.terms):
        return None
    one, two = (_number(index, {K: k}) for k in (0, 1))
    side = GemmOperand(node.buffer, node.dtype, index, node.guards, outer, False, 1, run, two - one)
    for along in (True, False):
        if (side.step if along else index.stride(outer)) != 1:
            continue
        place = side.outer_offset if along else side.outer_offset - Index.axis(outer)
        steps = [place.const, *(coef for _, coef in place.terms), total if run == ranges[K] else run]
        starts = np.arange(0, ranges[K], run if along else 1)
        if not along:
            steps[-1] = ranges[outer]
        groups = np.arange(ranges.get(S, 1))[:, None]
        offsets = np.abs(np.asarray(_number(side.k_offset, {K: starts[None, :], S: groups})))
        steps.append(int(np.gcd.reduce(offsets, axis=None)))
        for width in (b // side.item for b in COPY if b >= side.item):
            if all(step % width == 0 for step in steps):
                return replace(side, along_terms=along, width=width)
    return None


def _axes(atom: Atom) -> frozenset[str]:
    return Index(0, ((atom, 1),)).axes()


def _contiguous_k(index: Index) -> int:
    """Largest run of k along which an expression is linear, a divisor of all runs (0: it is always linear)."""
    found = 0
    for atom, _ in index.terms:
        if atom.inner is not None and K in atom.inner.axes():
            plain = atom.inner.stride(K)
            found = math.gcd(found, _contiguous_k(atom.inner))
            if plain is None or plain:
                rest = [c for a, c in atom.inner.terms if a.inner is None and a.name != K]
                direct = any(a.name == K for a, _ in atom.inner.terms)
                found = math.gcd(found, atom.modulus, atom.inner.const, *rest) if direct else found
    return found


def _number(index: Index, where: Mapping[str, Any]) -> Any:
    """The expression at a point, or at arrays of points (axes that are not named are 0)."""
    total = index.const
    for atom, coef in index.terms:
        part = where.get(atom.name, 0) if atom.inner is None else _number(atom.inner, where)
        part = part // atom.modulus if atom.kind == "div" else part % atom.modulus if atom.kind == "mod" else part
        total = total + coef * part
    return total
