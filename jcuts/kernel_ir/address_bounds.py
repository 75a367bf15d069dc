"""Static bounds check by interval analysis: proves that every address of a phase lies inside its buffer.

Properties of generated code that the proof uses: a loop over an axis covers exactly its extent (lanes beyond it are
masked), a load or store with guards touches memory only where all of them hold, run-time values are integers of their
nodes' types.  An access is accepted where its interval lies inside the buffer:

- The interval of ``const + sum(coef * atom)`` is the sum of its atoms' intervals.
- A guard bounds an expression: ``address == q * guarded + rest`` gives another interval for every ``q`` that removes an
  atom.  All intervals hold, so that their intersection does.
- Where guards speak of ``e // d`` or ``e % d``, the address's ``e`` is ``d * (e // d) + e % d``.
- Where a guard bounds ``e + d * k``, the address's ``e // d`` is ``(e + d * k) // d - k``, and ``e % d`` has the same
  remainder.
- An axis that the grid splits runs inside its block: where ``i_lo`` occurs, ``i`` is ``i_lo`` plus a number below the
  block's size.  `verify` makes sure that blocks are whole steps of the loop.
- A run-time value has the interval of the operations that made it (constants, minima, maxima, clamps, conversions,
  choices), else that of its type.

The proof is sound but not complete: an access that is inside for another reason is refused.  Lowering produces some
(guarded loads of convolutions with dilated inputs), so the proof is required only of programs that come from outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jcuts.base.errors import IRError
from jcuts.kernel_ir.index import Atom, Index
from jcuts.kernel_ir.node import Graph, Guard, Node
from jcuts.kernel_ir.program import Phase, Program

Interval = tuple[int, int]
FAR = 1 << 200
"""Stands for infinity: no sum of what the schema allows comes near it."""
WIDEST = 1 << 62
"""Below this stay numbers on the way to an index on a CPU: arithmetic has 64 bits."""
WIDEST_ON_GPU = 1 << 31
"""The same in kernels for GPUs, whose arithmetic has 32 bits."""
INSIDE = "'"
"""What the place of an axis inside its block is called: no axis has it in its name."""
MOST_FACTS = 6

_BITS = {
    "bool": (0, 1),
    **{f"int{n}": (-(1 << (n - 1)), (1 << (n - 1)) - 1) for n in (8, 16, 32, 64)},
    **{f"uint{n}": (0, (1 << n) - 1) for n in (8, 16, 32, 64)},
}


def check_bounds(program: Program, phase: Phase) -> None:
    """Raises IRError, naming the phase and the access, where an address cannot be proved to stay inside its buffer."""
    axes: dict[str, Interval] = {}
    for grid in program.grid:
        axes[f"{grid.axis}_lo"] = (0, (grid.blocks - 1) * grid.block)
        axes[grid.axis + INSIDE] = (0, min(grid.block, grid.extent) - 1)
        if grid.axis in program.serial:
            axes[grid.axis] = (0, grid.extent - 1)
    axes |= {a.name: (0, a.extent - 1) for a in (*phase.axes, *phase.reds)}
    split = {g.axis: Index.axis(f"{g.axis}_lo") + Index.axis(g.axis + INSIDE) for g in program.grid}
    sizes = {b.name: b.reach for b in program.buffers}
    widest = WIDEST_ON_GPU if "cuda" in dict(program.params) else WIDEST
    for graph in (phase.body, phase.exit):
        space = _Space(axes, split, graph, widest)
        for node in graph.nodes:
            if node.op == "load" and node.index is not None:
                space.inside(
                    f"{program.name}/{phase.name}: load", node.buffer, sizes[node.buffer], node.index, node.guards
                )
            else:
                space.small(f"{program.name}/{phase.name}: {node.op}", node.index, node.guards)
    space = _Space(axes, split, phase.exit, widest)
    for store in phase.stores:
        where = f"{program.name}/{phase.name}: store"
        space.inside(where, store.buffer, sizes[store.buffer], store.address, store.guards)


class _Space:
    """Intervals of the axes of a phase and of the values of one of its graphs."""

    def __init__(self, axes: Mapping[str, Interval], split: Mapping[str, Index], graph: Graph, widest: int) -> None:
        self.axes, self.split, self.graph, self.widest = axes, split, graph, widest
        self.known: dict[int, Interval] = {}
        self.plain: dict[Index, Interval] = {}

    def small(self, where: str, index: Index | None, guards: Sequence[Guard]) -> None:
        """Raises IRError where numbers on the way to an index, or to its guards, leave 64-bit integers."""
        for expression in (*([] if index is None else [index]), *(g.index for g in guards)):
            if not self.fits(expression):
                raise IRError(f"{where}: index {expression} overflows")

    def fits(self, index: Index, inner: bool = False) -> bool:
        """Whether every sum in an expression, in whatever order it is made, stays in the integers that hold it."""
        reach = abs(index.const)
        for atom, coef in index.terms:
            if atom.inner is not None and not self.fits(atom.inner, inner=True):
                return False
            low, high = self.atom(atom, ())
            if atom.kind == "value" and coef == 1 and not inner:
                continue  # sums wrap around, and what a guard or a buffer bounds has not
            reach += abs(coef) * max(abs(low), abs(high))
        return reach < self.widest

    def inside(self, where: str, buffer: str, size: int, address: Index, guards: Sequence[Guard]) -> None:
        """Raises IRError unless the address is inside a buffer of that size wherever the guards hold."""
        self.small(where, address, guards)
        low, high = self.interval(address, ())
        if low >= 0 and high < size:
            return
        facts = tuple((g.index, (-FAR if g.low is None else g.low, FAR if g.high is None else g.high)) for g in guards)
        if len(facts) > MOST_FACTS:
            facts = tuple(sorted(facts, key=lambda fact: -len(fact[0].axes() & address.axes()))[:MOST_FACTS])
        low, high = _both((low, high), self.interval(address, facts))
        if (low < 0 or high >= size) and not address.axes().isdisjoint(f"{axis}_lo" for axis in self.split):
            moved = tuple((self.moved(index), bounds) for index, bounds in facts)
            low, high = _both((low, high), self.interval(self.moved(address), moved))
        if low < 0 or high >= size:
            digits = _digits([address, *(index for index, _ in facts)])
            if digits:
                low, high = _both((low, high), self.interval(_in_digits(address, digits), facts))
        if low < 0 or high >= size:
            low, high = _both((low, high), self.interval(_rebased(address, [index for index, _ in facts]), facts))
        if low > high:
            return  # the guards exclude each other: nothing is touched
        if low < 0 or high >= size:
            found = " .. ".join("?" if abs(x) >= WIDEST else str(x) for x in (low, high))
            raise IRError(f"{where}: address {address} leaves {buffer} ({found} of {size})", buffer=buffer)

    def moved(self, index: Index) -> Index:
        """The expression with axes of the grid as their block's first point and the place inside it."""
        found = Index(index.const)
        for atom, coef in index.terms:
            if atom.kind == "axis":
                part = self.split.get(atom.name) or Index(0, ((atom, 1),))
            elif atom.inner is not None:
                part = Index(0, ((Atom(atom.kind, inner=self.moved(atom.inner), modulus=atom.modulus), 1),))
            else:
                part = Index(0, ((atom, 1),))
            found = found + part * coef
        return found

    def interval(self, index: Index, facts: Sequence[tuple[Index, Interval]]) -> Interval:
        """Smallest and largest value where the facts hold."""
        if not facts and index in self.plain:
            return self.plain[index]
        low = high = index.const
        for atom, coef in index.terms:
            bottom, top = self.atom(atom, facts)
            low, high = low + min(coef * bottom, coef * top), high + max(coef * bottom, coef * top)
        found = (low, high)
        if not facts:
            self.plain[index] = found
        for number, (guarded, bounds) in enumerate(facts):
            factors = dict(guarded.terms)
            tried = set()
            for atom, coef in index.terms:
                q = coef // factors[atom] if atom in factors and coef % factors[atom] == 0 else 0
                if not q or q in tried:
                    continue
                tried.add(q)
                bottom, top = self.interval(_minus(index, guarded, q), facts[number + 1 :])
                least, most = _both(bounds, self.interval(guarded, ()))
                if least > most:
                    return (0, -1)  # never holds
                found = _both(found, (bottom + min(q * least, q * most), top + max(q * least, q * most)))
        return found

    def atom(self, atom: Atom, facts: Sequence[tuple[Index, Interval]]) -> Interval:
        """Interval of one factor."""
        if atom.kind == "axis":
            if atom.name not in self.axes:
                raise IRError(f"axis {atom.name!r} is used outside its loop")
            return self.axes[atom.name]
        if atom.kind == "value" or atom.inner is None:
            return self.value(atom.value)
        low, high = self.interval(atom.inner, facts)
        low, high = max(low, -FAR), min(high, FAR)
        if atom.kind == "div":
            return low // atom.modulus, high // atom.modulus
        if low // atom.modulus == high // atom.modulus:
            return low % atom.modulus, high % atom.modulus
        return 0, atom.modulus - 1

    def value(self, number: int) -> Interval:
        """Interval of an integer node."""
        if number not in self.known:
            node = self.graph.nodes[number]
            if node.dtype not in _BITS:
                raise IRError(f"value {number} of an index is {node.dtype}, which is no integer")
            whole = _BITS[node.dtype]
            self.known[number] = whole  # also ends what would go round in circles
            found = self.made(node)
            self.known[number] = whole if found is None or found[0] < whole[0] or found[1] > whole[1] else found
        return self.known[number]

    def made(self, node: Node) -> Interval | None:
        """Interval of what an operation makes; None where only its type is known."""
        if node.op == "const" and isinstance(node.value, int):
            return int(node.value), int(node.value)
        if node.op == "index" and node.index is not None:
            return self.interval(node.index, ())
        args = [a for a in node.args if self.graph.nodes[a].dtype in _BITS]
        if len(args) != len(node.args):
            return None
        if node.op in ("convert", "widen"):
            return self.value(args[0])
        if node.op == "select":
            return _either(self.value(args[1]), self.value(args[2]))
        if node.op == "clamp":
            least, x, most = (self.value(a) for a in args)
            return min(max(x[0], least[0]), most[0]), min(max(x[1], least[1]), most[1])
        if node.op in ("min", "max"):
            pick = min if node.op == "min" else max
            left, right = self.value(args[0]), self.value(args[1])
            return pick(left[0], right[0]), pick(left[1], right[1])
        if node.op in ("add", "sub"):
            left, right = self.value(args[0]), self.value(args[1])
            if node.op == "sub":
                right = -right[1], -right[0]
            return left[0] + right[0], left[1] + right[1]
        return None


def _digits(expressions: Sequence[Index]) -> dict[Atom, int]:
    """Atom -> divisor, of atoms that some of these expressions divide."""
    found: dict[Atom, int] = {}
    left = [atom for index in expressions for atom, _ in index.terms]
    while left:
        atom = left.pop()
        if atom.inner is not None:
            left += [inner for inner, _ in atom.inner.terms]
            if not atom.inner.const and len(atom.inner.terms) == 1 and atom.inner.terms[0][1] == 1:
                found[atom.inner.terms[0][0]] = atom.modulus
    return found


def _in_digits(index: Index, digits: Mapping[Atom, int]) -> Index:
    """The expression with quotients and remainders for atoms that have divisors."""
    terms = dict(index.terms)
    for _ in range(4):
        for atom in [atom for atom in terms if atom in digits]:
            coef, one, divisor = terms.pop(atom), Index(0, ((atom, 1),)), digits[atom]
            for kind, factor in (("div", divisor), ("mod", 1)):
                part = Atom(kind, inner=one, modulus=divisor)
                terms[part] = terms.get(part, 0) + coef * factor
    return _of_terms(index.const, terms)


def _rebased(index: Index, guarded: Sequence[Index]) -> Index:
    """The expression with quotients and remainders of what guards bound, if the gap is a multiple of the divisor."""
    terms: dict[Atom, int] = {}
    const = index.const
    for atom, coef in index.terms:
        fitting = [] if atom.inner is None else [(g, _minus(g, atom.inner, 1)) for g in guarded]
        for other, gap in fitting:
            if atom.inner == other or gap.const % atom.modulus or any(c % atom.modulus for _, c in gap.terms):
                continue
            same = Atom(atom.kind, inner=other, modulus=atom.modulus)
            terms[same] = terms.get(same, 0) + coef
            if atom.kind == "div":
                const -= coef * (gap.const // atom.modulus)
                for axis, c in gap.terms:
                    terms[axis] = terms.get(axis, 0) - coef * (c // atom.modulus)
            break
        else:
            terms[atom] = terms.get(atom, 0) + coef
    return _of_terms(const, terms)


def _minus(index: Index, other: Index, factor: int) -> Index:
    terms = dict(index.terms)
    for atom, coef in other.terms:
        terms[atom] = terms.get(atom, 0) - coef * factor
    return _of_terms(index.const - other.const * factor, terms)


def _of_terms(const: int, terms: Mapping[Atom, int]) -> Index:
    """An expression as it is: sums of indices would put quotients and remainders together again."""
    return Index(const, tuple((atom, coef) for atom, coef in terms.items() if coef))


def _both(left: Interval, right: Interval) -> Interval:
    return max(left[0], right[0]), min(left[1], right[1])


def _either(left: Interval, right: Interval) -> Interval:
    return min(left[0], right[0]), max(left[1], right[1])
