"""Registry and driver of the optional graph rewrites: they preserve a program's meaning but may change roundings.

    logits   softmax loss of h . W, and its gradient  ->  a loop over chunks of tokens         (`cross_entropy.head`)
    scales   y = conv(x, w) * s   ->  conv(x, w * s)          w, s constants, s one factor per output channel
    dots     conv(x, w), 1x1      ->  dot(x, w)               no padding, stride, dilation or groups (`pointwise_conv`)
    pools    pool(x . w), pool(x) . w  ->  each other, where that is less work         (`commute_pool_matmul`)
    siblings x . w1, x . w2, ...  ->  slices of x . [w1 w2 ...]                          (`horizontal_matmul`)
    rounds   x . w                ->  x . v^T, where v is w^T rounded to TF32                 (`tf32_weights`)
    joins    x . w1, x . w2, ...  ->  the same as siblings, concatenated in every call    (`horizontal_matmul_args`)
    turns    x . w                ->  x . v^T, v = round(w^T) in every call: w is an argument (`tf32_weight_args`)
    recomputes  weights of attention in the backward pass, from the logsumexp          (`attention_backward`)
    vectors  gain * rsqrt(variance) of arguments  ->  one call before everything else        (`hoist_vectors`)
    winograd conv(x, w), 3x3      ->  F(4x4, 3x3): transforms and one batched product           (`winograd_conv`)
    ffts     conv(x, w), many taps ->  FFTs and one batched product of complex numbers               (`fft_conv`)
    slots    concatenations that grow, or whose operands kernels produce  ->  in-place updates of one array
                                                                 (`inplace_concat_chain`, `inplace_concat`)

Which of them are applied together is decided in `jit.variant_space`, by measurement.  `scales` (scale folding) turns an
inference batch norm, also one behind a bias, into one addition, which XLA and jcuts fuse into its producer or user.
Weights and factors must be constants: an argument would be multiplied again in every call.  `dots` makes pointwise
convolutions available to GEMM libraries and to XLA's own fused matmuls; those that no kernel takes may be convolutions
again in the end (`pipeline.restore_convs`).  `pools` and `siblings` come after it, and take
convolutions as well.  `winograd` and `ffts` are for convolutions that ask for more precision than TF32's.  `rounds`
does once what libraries do in every call, for kernels that ask for it.  All but `slots` and `vectors` change roundings
(of a weight; of the order of a sum), so results are checked against float64.  A scan's body is rewritten with the
constants that the scan hands to it; its weights are not rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jcuts.rewrite.attention.backward import recompute_attention
from jcuts.rewrite.commute_pool_matmul import commute_pool_matmul
from jcuts.rewrite.cross_entropy.head import chunk_cross_entropy
from jcuts.rewrite.fft_conv import fft_conv
from jcuts.rewrite.hoist_vectors import hoist_vectors
from jcuts.rewrite.horizontal_matmul import horizontal_matmul
from jcuts.rewrite.horizontal_matmul_args import horizontal_matmul_args
from jcuts.rewrite.inplace_concat import undo_eliminated_concat
from jcuts.rewrite.inplace_concat_chain import inplace_concat_chain
from jcuts.rewrite.matmul_patterns import Program, channel_of, constant_of, new_value
from jcuts.rewrite.pointwise_conv import Convolutions, conv1x1_to_dot, pointwise_convolutions
from jcuts.rewrite.simplify import CONTROL_FLOW, simplify
from jcuts.rewrite.tf32_weight_args import tf32_weight_args
from jcuts.rewrite.tf32_weights import tf32_weights
from jcuts.rewrite.winograd_conv import winograd_conv
from jcuts.trace import jaxapi

DOTS = "dots"
REMAT = ("checkpoint", "remat2")
MULTIPLY = "mul"
ADD = "add"
FLOATS = ("float32", "float64")


@dataclass(frozen=True)
class Rewritten:
    """Result of rewriting: the program and what was applied.

    Attributes:
        closed: the program.
        counts: rule -> how often it was applied (rules that found nothing are missing).
        convolutions: those that `dots` lowered, as they were before it.
    """

    closed: jaxapi.Closed
    counts: dict[str, int] = field(default_factory=dict)
    convolutions: Convolutions = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.counts:
            return "rewrites: none applied"
        return "rewrites: " + ", ".join(f"{name} {count} times" for name, count in self.counts.items())


Rule = Callable[[jaxapi.Closed], tuple[jaxapi.Closed, int]]


def rewritten(closed: jaxapi.Closed, rules: Sequence[str]) -> Rewritten:
    """Applies rules, in the order of `RULES`, to a program after `simplify`, and to its loop bodies.

    Raises: KeyError for a rule that there is not.
    """
    counts: dict[str, int] = {}
    convolutions: Convolutions = {}
    unknown = set(rules) - set(RULES)
    if unknown:
        raise KeyError(f"unknown rewrites {sorted(unknown)}: choose from {list(RULES)}")
    for name in (name for name in RULES if name in rules):
        if name == DOTS:
            convolutions = pointwise_convolutions(closed)
        closed, count = _applied(closed, name)
        if count:
            counts[name] = count
            closed = simplify(closed)  # products of constants that a rule made, broadcasts that it left behind
    if "slots" in counts:
        closed, _ = everywhere(closed, lambda body: (undo_eliminated_concat(body), 1))
    return Rewritten(closed, counts, convolutions)


def applicable(closed: jaxapi.Closed) -> tuple[str, ...]:
    """The rules that change a program."""
    return tuple(name for name in RULES if _applied(closed, name)[1])


def _applied(closed: jaxapi.Closed, name: str) -> tuple[jaxapi.Closed, int]:
    if name in OUTSIDE:
        return RULES[name](closed)
    return everywhere(closed, RULES[name], (*CONTROL_FLOW, *REMAT) if name in IN_REMAT else CONTROL_FLOW)


def everywhere(closed: jaxapi.Closed, rule: Rule, names: Sequence[str] = CONTROL_FLOW) -> tuple[jaxapi.Closed, int]:
    """A rule applied to a program and to the bodies of its loops and branches; the program, and how often.

    Args: names: of the primitives whose bodies are rewritten.
    """
    total, eqns = 0, []
    consts = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    for eqn in closed.jaxpr.eqns:
        name = jaxapi.primitive_name(eqn)
        bodies = [body for _, _, body in jaxapi.inner_jaxprs(eqn)] if name in names else []
        # These primitives pass no constants to their bodies.
        if bodies and not any(body.consts for body in bodies):
            if name == "scan":
                eqn, count = _in_scan(eqn, bodies[0], consts, rule, names)
            else:
                eqn, count = _in_bodies(eqn, bodies, rule, names)
            total += count
        eqns.append(eqn)
    if total:
        closed = jaxapi.make_closed(
            list(consts), closed.jaxpr.invars, closed.jaxpr.outvars, eqns, list(consts.values()), like=closed
        )
        closed = Program(closed).with_eqns({})
    closed, count = rule(closed)
    return closed, total + count


def _in_bodies(eqn: Any, bodies: Sequence[jaxapi.Closed], rule: Rule, names: Sequence[str]) -> tuple[Any, int]:
    done = [everywhere(body, rule, names) for body in bodies]
    count = sum(count for _, count in done)
    if not count or any(body.consts for body, _ in done):
        return eqn, 0
    return jaxapi.with_inner_jaxprs(eqn, [body for body, _ in done]), count


def _in_scan(
    eqn: Any, body: jaxapi.Closed, consts: dict[Any, Any], rule: Rule, names: Sequence[str]
) -> tuple[Any, int]:
    """A scan with its body rewritten, given the program's constants among its loop-invariant operands.

    Args: consts: of the program around it; constants that the body needs then are added.
    """
    fixed, jaxpr = jaxapi.scan_constants(eqn), body.jaxpr
    known = {
        v: consts[a]
        for v, a in zip(jaxpr.invars[:fixed], eqn.invars[:fixed], strict=True)
        if not jaxapi.is_literal(a) and a in consts
    }
    given = [v for v in jaxpr.invars if v not in known]
    bound = jaxapi.make_closed(list(known), given, jaxpr.outvars, jaxpr.eqns, list(known.values()), like=body)
    bound, count = everywhere(bound, rule, names)
    if not count:
        return eqn, 0
    atoms: dict[int, Any] = {id(value): atom for atom, value in consts.items()}
    for var, value in zip(bound.jaxpr.constvars, bound.consts, strict=True):
        if id(value) not in atoms:
            atoms[id(value)] = jaxapi.new_var(var.aval)
            consts[atoms[id(value)]] = value
    kept = [v not in known for v in jaxpr.invars]
    operands = [atoms[id(value)] for value in bound.consts]
    opened = jaxapi.make_closed(
        [], [*bound.jaxpr.constvars, *bound.jaxpr.invars], bound.jaxpr.outvars, bound.jaxpr.eqns, [], like=bound
    )
    rest = [a for a, k in zip(eqn.invars, kept, strict=True) if k]
    fixed = len(operands) + sum(kept[:fixed])
    return jaxapi.with_scan_body(eqn, [*operands, *rest], fixed, opened), count


# -- a factor per channel in the weights ----------------------------------------------------------------------------
def _fold_scale(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Scale folding: scales move before biases and into the weights, then biases are merged."""
    closed, _ = _swapped(closed)
    closed, count = _absorbed(closed)
    if count:
        closed, _ = _joined(closed)
    return closed, count


def _floats(eqn: Any, name: str) -> bool:
    return jaxapi.primitive_name(eqn) == name and str(eqn.outvars[0].aval.dtype) in FLOATS


def _swapped(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """(y + b) * s -> y * s + b s, where y is a product whose weights can take s."""
    program = Program(closed)
    replaced: dict[int, list[Any]] = {}
    for eqn in closed.jaxpr.eqns:
        if not _floats(eqn, MULTIPLY):
            continue
        for total, factor in (eqn.invars, eqn.invars[::-1]):
            addition = program.maker(total, ADD)
            if addition is None:
                continue
            for y, bias in (addition.invars, addition.invars[::-1]):
                product = program.product(y)
                if product is None:
                    continue
                scale, shift = (_per_channel(a, product, program.made, program.consts) for a in (factor, bias))
                if scale is None or shift is None or _scaled(product, scale, program.consts) is None:
                    continue
                moved = shift.astype(np.float64) * scale.astype(np.float64)
                if not np.isfinite(moved.astype(eqn.outvars[0].aval.dtype)).all():
                    continue
                operand, before = program.operand(moved, product, bias, eqn)
                scaled = new_value(eqn.outvars[0].aval.shape, eqn.outvars[0].aval)
                replaced[id(addition)] = []
                replaced[id(eqn)] = [
                    *before,
                    eqn.replace(invars=[y, factor], outvars=[scaled]),
                    addition.replace(invars=[scaled, operand], outvars=eqn.outvars),
                ]
                break
            if id(eqn) in replaced:
                break
    return (program.with_eqns(replaced), len(replaced)) if replaced else (closed, 0)


def _joined(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """(y + b) + c -> y + (b + c), where y is a product and b and c are constants per channel."""
    program = Program(closed)
    replaced: dict[int, list[Any]] = {}
    for eqn in closed.jaxpr.eqns:
        if not _floats(eqn, ADD):
            continue
        for total, second in (eqn.invars, eqn.invars[::-1]):
            addition = program.maker(total, ADD)
            if addition is None or id(addition) in replaced:
                continue
            for y, first in (addition.invars, addition.invars[::-1]):
                product = program.product(y)
                if product is None:
                    continue
                shifts = [_per_channel(a, product, program.made, program.consts) for a in (first, second)]
                if shifts[0] is None or shifts[1] is None:
                    continue
                joined = shifts[0].astype(np.float64) + shifts[1].astype(np.float64)
                operand, before = program.operand(joined, product, second, eqn)
                replaced[id(addition)] = []
                replaced[id(eqn)] = [*before, eqn.replace(invars=[y, operand])]
                break
            if id(eqn) in replaced:
                break
    return (program.with_eqns(replaced), len(replaced)) if replaced else (closed, 0)


def _absorbed(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """y * s -> the matmul or convolution that computes y, with its weights times s."""
    program = Program(closed)
    replaced: dict[int, list[Any]] = {}
    count = 0
    for eqn in closed.jaxpr.eqns:
        if not _floats(eqn, MULTIPLY):
            continue
        for y, factor in (eqn.invars, eqn.invars[::-1]):
            product = program.product(y)
            if product is None:
                continue
            scale = _per_channel(factor, product, program.made, program.consts)
            if scale is None or (scaled := _scaled(product, scale, program.consts)) is None:
                continue
            weights = jaxapi.new_var(product.invars[1].aval)
            program.consts[weights] = scaled
            replaced[id(product)] = [
                product.replace(invars=[product.invars[0], weights, *product.invars[2:]], outvars=eqn.outvars)
            ]
            replaced[id(eqn)] = []
            count += 1
            break
    return (program.with_eqns(replaced), count) if count else (closed, 0)


def _per_channel(factor: Any, product: Any, made: dict[Any, Any], constants: dict[Any, Any]) -> np.ndarray | None:
    """The factors, one per output channel; None where they are no constants or vary along another dimension."""
    place = channel_of(product)
    if place is None:
        return None
    shape = product.outvars[0].aval.shape
    if jaxapi.is_literal(factor):
        return np.full(shape[place[0]], factor.val) if np.ndim(factor.val) == 0 else None
    value = constant_of(factor, made, constants)
    if value is None:
        return None
    if value.ndim == 0:
        return np.full(shape[place[0]], value)
    wanted = [1] * len(shape)
    wanted[place[0]] = shape[place[0]]
    return value.reshape(-1) if list(value.shape) == wanted else None


def _scaled(product: Any, scale: np.ndarray, constants: dict[Any, Any]) -> Any:
    """Weights times factors, in the weights' own type; None where they are no constants or leave its range."""
    atom = product.invars[1]
    value = None if jaxapi.is_literal(atom) else constants.get(atom)
    place = channel_of(product)
    if value is None or place is None or jaxapi.is_tracer(value) or not hasattr(value, "dtype"):
        return None
    if value.size == 0 or str(value.dtype) not in FLOATS or value.dtype != product.outvars[0].aval.dtype:
        return None
    shape = [1] * value.ndim
    shape[place[1]] = scale.size
    weights = np.asarray(value)
    with np.errstate(all="ignore"):
        found = (weights.astype(np.float64) * scale.astype(np.float64).reshape(shape)).astype(weights.dtype)
    tiny = np.finfo(weights.dtype).smallest_normal
    # A weight that overflows, or that falls below the normal numbers, has lost what the factor alone would keep.
    lost = ~np.isfinite(found) | ((np.abs(found) < tiny) & (weights != 0) & (scale.reshape(shape) != 0))
    return None if lost.any() or not np.isfinite(scale).all() else jaxapi.constant(found)


RULES: dict[str, Rule] = {
    "logits": chunk_cross_entropy,
    "scales": _fold_scale,
    DOTS: conv1x1_to_dot,
    "pools": commute_pool_matmul,
    "siblings": horizontal_matmul,
    "recomputes": recompute_attention,
    "winograd": winograd_conv,
    "ffts": fft_conv,
    "rounds": tf32_weights,
    "joins": horizontal_matmul_args,
    "turns": tf32_weight_args,
    "vectors": hoist_vectors,
    "slots": inplace_concat_chain,
}
"""Every rewrite by its name, in the order in which they are applied."""
OUTSIDE = ("rounds", "joins", "turns", "vectors")
"""Rules that leave bodies of control flow alone: kernels there do not know what their operands are."""
IN_REMAT = ("logits",)
"""Rules that rewrite rematerialised bodies, too, which memory is the reason for."""
