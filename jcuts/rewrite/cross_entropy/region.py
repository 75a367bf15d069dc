"""Data-flow analysis of a product's consumers: what must be computed per row while the product's result is never whole.

Starting at a matrix product (logits), every equation that uses *wide* values (more numbers per row than the product's
operand has) works row by row or sums over the rows, or there is no region.  *Narrow* row values (log-sum-exp, the loss
of a token, gradients of the hidden state) leave the region as whole arrays, sums (gradients of the weights) as they
are.  Narrow equations on the way from one wide value to another belong to it.

Levels: what depends on all rows (a cotangent that depends on the mean of the losses) is known only when a loop over
them has ended.  Wide equations behind it are of the next level, in a loop of their own that computes the wide values
that it needs again (rematerialisation).  The gradient of a mean, or of any weighted sum whose weights do not depend on
the logits, has one level: a single loop computes the losses and their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jcuts.rewrite.cross_entropy.rows import SUM, RowRule, Rows, row_rule
from jcuts.rewrite.matmul_patterns import DOT, Program
from jcuts.trace import jaxapi

MOST_LEVELS = 2
"""Loops of a region: the second computes the logits once more, as rematerialisation does; a third would twice."""
SAME_NUMBERS = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "convert_element_type", "copy")


@dataclass(frozen=True)
class Loop:
    """What one loop over chunks of rows computes.

    Attributes:
        eqns: in program order.
        inputs: values from outside, with their rows (None: every chunk needs all of it).
        rows: row values that are results.
        sums: sums over all rows that are results.
    """

    eqns: tuple[Any, ...]
    inputs: tuple[tuple[Any, Rows | None], ...]
    rows: tuple[Any, ...]
    sums: tuple[Any, ...]


@dataclass
class Region:
    """The equations around one product whose result is computed chunk by chunk.

    Attributes:
        seed: the product.
        rows_of: value -> its rows, for all that is computed per row.
        rules: id of an equation -> its rule.
        reason: why there is no region; '' if there is one.
    """

    program: Program
    seed: Any
    count: int
    width: int
    rows_of: dict[Any, Rows] = field(default_factory=dict)
    rules: dict[int, RowRule] = field(default_factory=dict)
    reason: str = ""
    _inside: dict[Any, int] = field(default_factory=dict)  # value -> the level whose loop computes it per row
    _after: dict[Any, int] = field(default_factory=dict)  # value -> the level whose loop must have ended before
    _roots: dict[int, list[Any]] = field(default_factory=dict)
    _pulled: set[Any] = field(default_factory=set)  # values that do not depend on the product
    _from_wide: dict[tuple[Any, Rows], bool] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, seed: Any, rows: Rows) -> Region:
        """The region of a product with its rows in the result."""
        out = seed.outvars[0].aval
        count = int(np.prod([out.shape[d] for d in rows]))
        (contracted, _), _ = seed.params["dimension_numbers"]
        width = int(np.prod([seed.invars[0].aval.shape[d] for d in contracted]))
        region = cls(program, seed, count, width)
        region._grow(rows)
        return region

    def is_wide(self, atom: Any) -> bool:
        """Whether a row value has more numbers per row than the product's operand."""
        return atom.aval.size // self.count > self.width

    def has_softmax(self) -> bool:
        """Whether exponentials of wide values are summed over each row."""
        made = self.program.made
        for eqns in self._roots.values():
            for eqn in eqns:
                maker = made.get(eqn.invars[0]) if jaxapi.primitive_name(eqn) == SUM else None
                while maker is not None and jaxapi.primitive_name(maker) in SAME_NUMBERS:
                    maker = made.get(maker.invars[0])
                if maker is not None and jaxapi.primitive_name(maker) == "exp" and not self.rules[id(eqn)].sums:
                    return True
        return False

    # -- growing --------------------------------------------------------------------------------------------------
    def _grow(self, rows: Rows) -> None:
        rule = row_rule(self.seed, (None, None), (rows,))
        if rule is None:
            self.reason = "the product mixes its rows"
            return
        if not self.is_wide(self.seed.outvars[0]):
            self.reason = "the product's result is no larger than its operand"
            return
        self._add(self.seed, rule, 0)
        for eqn in self.program.closed.jaxpr.eqns:
            if eqn is not self.seed and any(self._depends(a) for a in _variables(eqn)):
                self._place(eqn)
                if self.reason:
                    return
        wide = [v for v in self.program.closed.jaxpr.outvars if not jaxapi.is_literal(v) and v in self._inside]
        if any(self.is_wide(v) for v in wide):
            self.reason = "a wide value is a result of the program"
        elif max(self._roots, default=0) >= MOST_LEVELS:
            self.reason = f"more than {MOST_LEVELS} loops"

    def _place(self, eqn: Any) -> None:
        """Decides whether an equation that depends on the region belongs to it."""
        ins = self._rows_of_operands(eqn)
        wide = any(a in self._inside and self.is_wide(a) for a in _variables(eqn))
        rule = None
        if any(rows is not None for rows in ins):
            rule = row_rule(eqn, ins, (None,) * len(eqn.outvars), self._counts_rows)
        if rule is None and wide:
            self.reason = f"{jaxapi.primitive_name(eqn)} uses a wide value and does not work row by row"
        elif rule is None or (rule.sums and not wide):
            whole = [max(self._inside.get(a, 0), self._after.get(a, 0)) for a in _variables(eqn)]
            self._after.update((v, max(whole)) for v in eqn.outvars)
        else:
            self._add(eqn, rule, max((self._ready(a) for a in _variables(eqn)), default=0))

    def _rows_of_operands(self, eqn: Any) -> list[Rows | None]:
        return [None if jaxapi.is_literal(a) else self.rows_of.get(a) for a in eqn.invars]

    def _depends(self, atom: Any) -> bool:
        return atom in self._after or (atom in self._inside and atom not in self._pulled)

    def _ready(self, atom: Any) -> int:
        """The first level whose loop may use a value."""
        return self._inside[atom] if atom in self._inside else self._after.get(atom, -1) + 1

    def _add(self, eqn: Any, rule: RowRule, level: int) -> None:
        for atom, rows in zip(eqn.invars, rule.ins, strict=True):
            if rows is not None and self._is_from_wide(atom, rows):
                level = max(level, self._pull(atom, rows))
        self.rules[id(eqn)] = rule
        if rule.sums:
            self._after.update((v, level) for v in eqn.outvars)
            self._roots.setdefault(level, []).append(eqn)
            return
        for var, rows in zip(eqn.outvars, rule.outs, strict=True):
            assert rows is not None, "only a single result is a sum"
            self._inside[var], self.rows_of[var] = level, rows
        takes_wide = any(r is not None and self.is_wide(a) for a, r in zip(eqn.invars, rule.ins, strict=True))
        if takes_wide and not any(self.is_wide(v) for v in eqn.outvars):
            self._roots.setdefault(level, []).append(eqn)

    def _is_from_wide(self, atom: Any, rows: Rows) -> bool:
        """Whether a row value is wide or is computed, row by row, from wide values (sums over one-hot labels)."""
        if jaxapi.is_literal(atom):
            return False
        if self.is_wide(atom):
            return True
        if atom in self._inside:
            return False
        if (atom, rows) not in self._from_wide:
            eqn = self.program.made.get(atom)
            rule = None if eqn is None or len(eqn.outvars) != 1 else self._rule_of_result(eqn, rows)
            pairs = [] if eqn is None or rule is None else list(zip(eqn.invars, rule.ins, strict=True))
            self._from_wide[atom, rows] = any(r is not None and self._is_from_wide(a, r) for a, r in pairs)
        return self._from_wide[atom, rows]

    def _rule_of_result(self, eqn: Any, rows: Rows) -> RowRule | None:
        return row_rule(eqn, self._rows_of_operands(eqn), (rows,), self._counts_rows)

    def _pull(self, atom: Any, rows: Rows) -> int:
        """Takes the equations of an operand that does not depend on the product (one-hot labels) into the region.

        What cannot be computed row by row stays outside, a whole array.  Returns: the level.
        """
        if atom in self._inside:
            if self.rows_of[atom] != rows:
                self.reason = "two equations disagree about the rows of a value"
            return self._inside[atom]
        eqn = self.program.made.get(atom)
        rule = None if eqn is None or len(eqn.outvars) != 1 else self._rule_of_result(eqn, rows)
        if rule is None:
            return self._after.get(atom, -1) + 1
        roots = {level: list(found) for level, found in self._roots.items()}
        self._add(eqn, rule, max((self._ready(a) for a in _variables(eqn)), default=0))
        self._roots = roots  # computed where something needs it
        self._pulled.add(atom)
        return self._inside[atom]

    def _counts_rows(self, indices: Any) -> bool:
        """Whether the first column of an index array is 0, 1, 2, ..."""
        eqn = self.program.made.get(indices)
        if eqn is not None and jaxapi.primitive_name(eqn) == "concatenate":
            return eqn.params["dimension"] == 1 and eqn.invars[0].aval.shape[1] == 1 and self._is_range(eqn.invars[0])
        return False

    def _is_range(self, atom: Any) -> bool:
        while not jaxapi.is_literal(atom) and (eqn := self.program.made.get(atom)) is not None:
            name = jaxapi.primitive_name(eqn)
            if name == "iota":
                shape = eqn.params["shape"]
                return shape[eqn.params["dimension"]] == int(np.prod(shape)) == self.count
            if name == "select_n":  # x where it is not negative, else x + n
                if not self._is_never(eqn.invars[0]):
                    return False
                atom = eqn.invars[1]
            elif name in SAME_NUMBERS and eqn.invars[0].aval.size == atom.aval.size:
                atom = eqn.invars[0]
            else:
                return False
        value = None if jaxapi.is_literal(atom) else self.program.consts.get(atom)
        if value is None or jaxapi.is_tracer(value):
            return False
        return np.array_equal(np.asarray(value).reshape(-1), np.arange(self.count))

    def _is_never(self, test: Any) -> bool:
        """Whether a test for negative row numbers is always false."""
        eqn = self.program.made.get(test)
        if eqn is not None:
            is_sign = jaxapi.primitive_name(eqn) == "lt" and _is_zero(eqn.invars[1])
            return is_sign and self._is_range(eqn.invars[0])
        value = self.program.consts.get(test)
        return value is not None and not jaxapi.is_tracer(value) and not np.asarray(value).any()

    # -- loops ----------------------------------------------------------------------------------------------------
    def loops(self) -> list[Loop]:
        """One loop per level that has results."""
        members = [self._members(level) for level in sorted(self._roots)]
        inputs = [self._inputs(mine) for mine in members]
        # What an equation needs that two loops compute is made by the first.
        shared = [{a for other in inputs if other is not mine for a, _ in other} for mine in inputs]
        return [self._loop(*parts) for parts in zip(members, inputs, shared, strict=True)]

    def _members(self, level: int) -> set[int]:
        """Ids of the equations that the results of a level need, but for narrow values of earlier loops."""
        found: set[int] = set()
        work = list(self._roots[level])
        while work:
            eqn = work.pop()
            if id(eqn) in found:
                continue
            found.add(id(eqn))
            for atom, rows in zip(eqn.invars, self.rules[id(eqn)].ins, strict=True):
                if rows is None or atom not in self._inside:
                    continue
                maker = self.program.made[atom]
                if self.is_wide(atom) or self._inside[atom] == level or atom in self._pulled:
                    work.append(maker)
        return found

    def _inputs(self, members: set[int]) -> tuple[tuple[Any, Rows | None], ...]:
        inner = [e for e in self.program.closed.jaxpr.eqns if id(e) in members]
        made = {v for e in inner for v in e.outvars}
        pairs = [pair for e in inner for pair in zip(e.invars, self.rules[id(e)].ins, strict=True)]
        return tuple(dict.fromkeys((a, rows) for a, rows in pairs if not jaxapi.is_literal(a) and a not in made))

    def _loop(self, members: set[int], inputs: Sequence[tuple[Any, Rows | None]], shared: set[Any]) -> Loop:
        jaxpr = self.program.closed.jaxpr
        inner = [e for e in jaxpr.eqns if id(e) in members]
        used = shared | {a for e in jaxpr.eqns if id(e) not in members for a in _variables(e)}
        used.update(v for v in jaxpr.outvars if not jaxapi.is_literal(v))
        results = [(v, e) for e in inner for v in e.outvars if v in used and v not in self._pulled]
        sums = tuple(v for v, e in results if self.rules[id(e)].sums)
        narrow = tuple(v for v, e in results if not self.rules[id(e)].sums and not self.is_wide(v))
        return Loop(tuple(inner), tuple(inputs), narrow, sums)


def products(program: Program) -> list[Any]:
    """Matrix products without batch dimensions whose result is larger than an operand, and is exponentiated."""
    found = []
    users: dict[Any, list[Any]] = {}
    for eqn in program.closed.jaxpr.eqns:
        for atom in _variables(eqn):
            users.setdefault(atom, []).append(eqn)
    for eqn in program.closed.jaxpr.eqns:
        if jaxapi.primitive_name(eqn) == DOT and eqn.params.get("out_sharding") is None:
            _, (batch, _) = eqn.params["dimension_numbers"]
            size = eqn.outvars[0].aval.size
            if not batch and any(size > a.aval.size > 0 for a in eqn.invars) and _is_exponentiated(eqn, users):
                found.append(eqn)
    return found


def _is_exponentiated(product: Any, users: dict[Any, list[Any]]) -> bool:
    """Whether element-wise operations and slices of at least half lead from a product's result to an exponential."""
    least, seen, work = product.outvars[0].aval.size // 2, set(), [product]
    while work:
        eqn = work.pop()
        if id(eqn) in seen:
            continue
        seen.add(id(eqn))
        if jaxapi.primitive_name(eqn) == "exp":
            return True
        if eqn is product or jaxapi.primitive_name(eqn) != DOT:
            work += [user for v in eqn.outvars if v.aval.size > least for user in users.get(v, ())]
    return False


def rows_of_product(eqn: Any, side: int) -> Rows:
    """Dimensions of a product's result that are those of one operand."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    free = eqn.invars[0].aval.ndim - len(contracted)
    return tuple(range(free)) if side == 0 else tuple(range(free, eqn.outvars[0].aval.ndim))


def _variables(eqn: Any) -> list[Any]:
    return [a for a in eqn.invars if not jaxapi.is_literal(a)]


def _is_zero(atom: Any) -> bool:
    return jaxapi.is_literal(atom) and np.ndim(atom.val) == 0 and atom.val == 0
