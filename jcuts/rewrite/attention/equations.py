"""Recognises the backward pass of an attention in a flat jaxpr, as autodiff writes it.

From an exponential on, the softmax is followed by `softmax_algebra`; products with its weights say which dimension is
what.  Dimensions are labelled: those of the scores by their number, features by `FEATURE`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jcuts.rewrite.attention.softmax_algebra import GRADIENT, PRODUCT, REMOVED, SUM, WEIGHT, Rows, SoftmaxAlgebra
from jcuts.rewrite.matmul_patterns import DOT
from jcuts.trace import jaxapi
from jcuts.trace.equation_index import EquationIndex
from jcuts.trace.precision import asked, rounded_type

FEATURE = -1
"""Label of the dimension of features."""
ELEMENTWISE = (
    *("add", "sub", "mul", "div", "neg", "max", "min", "add_any", "select_n", "convert_element_type"),
    *("copy", "copy_p", "stop_gradient", "transpose", "clamp"),
)
"""What may stand between the products and the softmax."""
MOST_BETWEEN = 24
FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class RowSums:
    """How rowsum(dO * O) is computed.

    Attributes:
        out, gradient: O and dO. shape: what O is reshaped to first. turn: how it is transposed then, to lie as dO.
        axis: the features of dO. order: the transpose of the sums to the scores' order.
    """

    out: Any
    gradient: Any
    shape: tuple[int, ...] | None
    turn: tuple[int, ...] | None
    axis: int
    order: tuple[int, ...]


@dataclass(frozen=True)
class BackwardEquations:
    """The equations of a backward pass.

    Attributes:
        rows: shapes of the softmax. total, largest: its sums of exponentials and its maxima.
        scores: Q K^T; score_mod: what makes the softmax's operand of it.
        gradient: dO V^T and the changes of layout and type behind it.
        weight: P; weights: the conversions from there to dV's product.
        changed: dS; change: what stands between it and the products of dQ and dK.
        query, key, value: the products dQ, dK and dV.
    """

    rows: Rows
    total: Any
    largest: Any
    scores: Any
    score_mod: tuple[Any, ...]
    gradient: tuple[Any, ...]
    weight: Any
    weights: tuple[Any, ...]
    changed: Any
    change: tuple[Any, ...]
    query: Any
    key: Any
    value: Any
    row_sums: RowSums

    @property
    def ends(self) -> tuple[Any, Any, Any]:
        """The products of the results."""
        return self.query, self.key, self.value


@dataclass(frozen=True)
class _Product:
    """A product with an operand whose dimensions are labelled: the other one, and the result."""

    eqn: Any
    other: Any
    labels: tuple[int, ...]
    out: tuple[int, ...]
    contracted: tuple[int, ...]


def find_backward_equations(index: EquationIndex, exponential: Any) -> BackwardEquations | None:
    """The backward pass of the attention with this exponential; None where it is none, or not a plain one."""
    softmax = _softmax(index, exponential)
    if softmax is None:
        return None
    rows, total, largest, masked = softmax
    powers = exponential.outvars[0]
    algebra = SoftmaxAlgebra(rows, {powers: {(1, 0, 1, 0): 1.0}, total: {SUM: 1.0}})
    index.behind((powers, total), algebra.evaluate)
    products = _weight_products(index, algebra, rows)
    if products is None:
        return None
    forward, backward, weight, chain = products
    gradient = _gradient(index, forward, backward, len(rows.shape))
    scores = _scores(index, masked, rows)
    if gradient is None or scores is None:
        return None
    algebra.known[gradient[-1].outvars[0]] = {GRADIENT: 1.0}
    index.behind(tuple(algebra.known), algebra.evaluate)
    wanted = {PRODUCT: 1.0, REMOVED: -1.0}
    changes = [v for v in algebra.known if v.aval.shape == rows.shape and algebra.is_(v, wanted)]
    product, score_mod, key_operand = scores
    ends = _ends(index, changes[-1], product, key_operand) if changes else None
    row_sums = _row_sums(index, forward, backward, rows)
    if ends is None or row_sums is None:
        return None
    if not all(is_plain(e) for e in (product, gradient[0], forward.eqn, backward.eqn, *ends[1:])):
        return None
    allowed = {id(e) for e in (*chain, *_all_moves(index, forward, weight), forward.eqn, backward.eqn)}
    for value in (powers, weight):
        rest = [u for u in index.using(value) if id(u) not in allowed and u.outvars[0] not in algebra.known]
        if rest or value in index.results:
            return None
    change, query, key = ends
    return BackwardEquations(
        rows, total, largest, product, score_mod, gradient, weight, chain, changes[-1], change, query, key,
        backward.eqn, row_sums,
    )  # fmt: skip


# -- forward --------------------------------------------------------------------------------------------------------
def _softmax(index: EquationIndex, exponential: Any) -> tuple[Rows, Any, Any, Any] | None:
    """Shapes, sums of exponentials, maxima and scores of the softmax with this exponential."""
    powers = exponential.outvars[0]
    shifted = index.maker(exponential.invars[0], "sub")
    sources = [powers, *(e.outvars[0] for e in index.using(powers, "convert_element_type"))]
    sums = [e for v in sources for e in index.using(v, "reduce_sum") if len(e.params["axes"]) == 1]
    if shifted is None or len(sums) != 1 or str(powers.aval.dtype) not in FLOATS or powers.aval.ndim < 2:
        return None
    rows = Rows(tuple(powers.aval.shape), int(sums[0].params["axes"][0]))
    masked, largest = shifted.invars
    if any(jaxapi.is_literal(a) for a in shifted.invars) or masked.aval.shape != rows.shape:
        return None
    if largest.aval.shape == rows.shape:
        wide = index.maker(largest, "broadcast_in_dim")
        if wide is None or len(wide.invars) != 1 or jaxapi.is_literal(wide.invars[0]):
            return None
        largest = wide.invars[0]
        if not rows.is_broadcast(largest.aval.shape, rows.shape, wide.params["broadcast_dimensions"]):
            return None
    if not rows.is_row(largest.aval.shape) or rows.shape[rows.axis] == 1:
        return None
    return rows, sums[0].outvars[0], largest, masked


def _scores(index: EquationIndex, masked: Any, rows: Rows) -> tuple[Any, tuple[Any, ...], Any] | None:
    """Q K^T, the equations between it and the softmax, and K."""
    size, products = masked.aval.size, {}
    stack, between, labels = [masked], [], {masked: tuple(range(len(rows.shape)))}
    while stack:
        value = stack.pop()
        made = index.made.get(value)
        name = "" if made is None else jaxapi.primitive_name(made)
        if made is None or name not in (DOT, *ELEMENTWISE):
            continue
        if name == DOT:
            products[id(made)] = made
            continue
        between.append(made)
        for atom in made.invars:
            if jaxapi.is_literal(atom) or atom.aval.size != size or atom in labels:
                continue
            order = made.params["permutation"] if name == "transpose" else range(len(rows.shape))
            labels[atom] = tuple(labels[value][list(order).index(d)] for d in range(len(rows.shape)))
            stack.append(atom)
        if len(between) > MOST_BETWEEN:
            return None
    if len(products) != 1:
        return None
    (product,) = products.values()
    out = product.outvars[0]
    between = [e for e in between if index.depends_on(e.outvars[0], out)]
    inside = {id(e) for e in between}
    for value in (out, *(e.outvars[0] for e in between)):
        users = [u for u in index.using(value) if id(u) not in inside]
        last = [u for u in users if value is masked and jaxapi.primitive_name(u) in ("sub", "reduce_max")]
        if value in index.results or len(last) != len(users):
            return None
    free = _free_labels(product, labels[out])
    keys = [operand for operand, mine in zip(product.invars, free, strict=True) if rows.axis in mine]
    if len(keys) != 1 or product.invars[0] is product.invars[1]:
        return None
    return product, index.in_order(between), keys[0]


def is_plain(product: Any) -> bool:
    """Whether a product asks for no more than its operands' own type, and for no sharding."""
    precision = product.params["precision"]
    if asked(precision) or product.params.get("out_sharding") is not None:
        return False
    return "Algorithm" not in type(precision).__name__ or bool(rounded_type(precision))


def _free_labels(product: Any, out: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Labels of the free dimensions of both operands."""
    (left, _), (batch, _) = product.params["dimension_numbers"]
    rows = product.invars[0].aval.ndim - len(left) - len(batch)
    return out[len(batch) : len(batch) + rows], out[len(batch) + rows :]


# -- products with the weights --------------------------------------------------------------------------------------
def _product(eqn: Any, operand: Any, labels: Sequence[int]) -> _Product | None:
    """A product with an operand of known labels; None where the other one has more than features of its own."""
    side = 0 if eqn.invars[0] is operand else 1
    other = eqn.invars[1 - side]
    contract, batch = eqn.params["dimension_numbers"]
    if other is operand or jaxapi.is_literal(other):
        return None
    theirs: list[int | None] = [None] * other.aval.ndim
    for mine, his in ((contract[side], contract[1 - side]), (batch[side], batch[1 - side])):
        for a, b in zip(mine, his, strict=True):
            theirs[b] = labels[a]
    if theirs.count(None) != 1:
        return None
    found = tuple(FEATURE if label is None else label for label in theirs)
    used = (*contract[side], *batch[side])
    free = [labels[d] for d in range(len(labels)) if d not in used]
    ends = (free, [FEATURE]) if side == 0 else ([FEATURE], free)
    out = (*(labels[d] for d in batch[side]), *ends[0], *ends[1])
    contracted = tuple(labels[d] for d in contract[side] if operand.aval.shape[d] != 1)
    return _Product(eqn, other, found, out, contracted)


def _weight_products(
    index: EquationIndex, algebra: SoftmaxAlgebra, rows: Rows
) -> tuple[_Product, _Product, Any, tuple[Any, ...]] | None:
    """O = P V and dV = P^T dO, P, and the conversions of P for dV."""
    every = tuple(range(len(rows.shape)))
    forward: list[_Product] = []
    backward: list[_Product] = []
    for value in [v for v in algebra.known if v.aval.shape == rows.shape and algebra.is_(v, {WEIGHT: 1.0})]:
        for eqn in index.using(value, DOT):
            found = _product(eqn, value, every)
            if found is None or len(found.contracted) != 1:
                return None
            (forward if found.contracted == (rows.axis,) else backward).append(found)
    if len(forward) != 1 or len(backward) != 1:
        return None
    operand = next(a for a in backward[0].eqn.invars if a is not backward[0].other)
    chain = []
    while (made := index.maker(operand, "convert_element_type")) is not None:
        chain.append(made)
        operand = made.invars[0]
    return forward[0], backward[0], operand, tuple(reversed(chain))


def _all_moves(index: EquationIndex, forward: _Product, weight: Any) -> list[Any]:
    """Conversions of the weights for the forward product."""
    found, operand = [], next(a for a in forward.eqn.invars if a is not forward.other)
    while operand is not weight and (made := index.maker(operand, "convert_element_type")) is not None:
        found.append(made)
        operand = made.invars[0]
    return found


def _gradient(index: EquationIndex, forward: _Product, backward: _Product, rank: int) -> tuple[Any, ...] | None:
    """dO V^T and what brings it into the layout and type of the scores."""
    wanted = {forward.other, backward.other}
    products = [e for e in index.using(backward.other, DOT) if set(e.invars) == wanted]
    if len(products) != 1 or len(wanted) != 2:
        return None
    (eqn,) = products
    names = {forward.other: forward.labels, backward.other: backward.labels}
    contract, batch = eqn.params["dimension_numbers"]
    sides = [[names[operand][d] for d in dims] for operand, dims in zip(eqn.invars, contract, strict=True)]
    batches = [[names[operand][d] for d in dims] for operand, dims in zip(eqn.invars, batch, strict=True)]
    if sides != [[FEATURE], [FEATURE]] or batches[0] != batches[1]:
        return None
    free = [
        [names[operand][d] for d in range(operand.aval.ndim) if d not in (*contract[k], *batch[k])]
        for k, operand in enumerate(eqn.invars)
    ]
    labels, found = [*batches[0], *free[0], *free[1]], [eqn]
    while labels != list(range(rank)):
        users = index.using(found[-1].outvars[0])
        name = jaxapi.primitive_name(users[0]) if len(users) == 1 else ""
        if name == "transpose":
            labels = [labels[d] for d in users[0].params["permutation"]]
        elif name != "convert_element_type":
            return None
        found.append(users[0])
    return tuple(found)


# -- behind the softmax ---------------------------------------------------------------------------------------------
def _ends(index: EquationIndex, changed: Any, scores: Any, key: Any) -> tuple[tuple[Any, ...], Any, Any] | None:
    """What stands between dS and the products of dQ and dK, and these; None where dS is needed for more."""
    inside, products, stack = {changed}, {}, [changed]
    between: list[Any] = []
    while stack:
        value = stack.pop()
        if value in index.results:
            return None
        for user in index.using(value):
            name = jaxapi.primitive_name(user)
            if name == DOT:
                products[id(user)] = user
            elif name in ELEMENTWISE and len(between) < MOST_BETWEEN:
                if user.outvars[0] not in inside:
                    between.append(user)
                    inside.add(user.outvars[0])
                    stack.append(user.outvars[0])
            else:
                return None
    beside = {a for e in between for a in e.invars if not jaxapi.is_literal(a) and a not in inside}
    if any(index.depends_on(a, scores.outvars[0]) for a in beside):
        return None
    found = {}
    for eqn in products.values():
        others = [a for a in eqn.invars if a not in inside]
        if len(others) != 1 or others[0] not in scores.invars:
            return None
        found[others[0] is key] = eqn
    if len(products) != 2 or len(found) != 2:
        return None
    return index.in_order(between), found[True], found[False]


def _row_sums(index: EquationIndex, forward: _Product, backward: _Product, rows: Rows) -> RowSums | None:
    """How to multiply O and dO in layouts that both have, if there are such."""
    outs = [(forward.eqn.outvars[0], forward.out)]
    while len(users := index.using(outs[-1][0], "transpose")) == 1:
        labels = outs[-1][1]
        outs.append((users[0].outvars[0], tuple(labels[d] for d in users[0].params["permutation"])))
    grads = [(backward.other, backward.labels)]
    while (made := index.maker(grads[-1][0], "transpose")) is not None:
        order, labels = list(made.params["permutation"]), grads[-1][1]
        grads.append((made.invars[0], tuple(labels[order.index(d)] for d in range(len(order)))))
    pairs = [(o, g) for o in reversed(outs) for g in reversed(grads) if o[1] == g[1]]
    (out, mine), (gradient, labels) = pairs[0] if pairs else (outs[-1], grads[0])
    if sorted(mine) != sorted(labels) or out.aval.size != gradient.aval.size:
        return None
    turn = None if mine == labels else tuple(mine.index(label) for label in labels)
    shape, users = None, index.using(out)
    reshaped = index.using(out, "reshape")
    if len(users) == len(reshaped) == 1 and turn is None and reshaped[0].params["dimensions"] is None:
        out, shape = reshaped[0].outvars[0], tuple(out.aval.shape)
    axis = labels.index(FEATURE)
    rest = [label for label in labels if label != FEATURE]
    if sorted(rest) != [d for d in range(len(rows.shape)) if d != rows.axis]:
        return None
    return RowSums(out, gradient, shape, turn, axis, tuple(rest.index(label) for label in sorted(rest)))
