"""Rewrites gradients of patch embeddings (`jax.lax.conv_general_dilated`, stride = filter) as matrix products (GEMMs).

    conv(x, dy dilated)        becomes        patches(x)^T dy               (gradient of the filter)
    conv(dy dilated, rev(w))   becomes        unpatches(dy w^T)             (gradient of the image)

Where the stride equals the filter, patches do not overlap: splitting the image into them is a transposition
(space-to-depth), each pixel belongs to one tap of one patch, and both gradients are one product.  cuDNN is slow with
such strides.  The forward pass stays a convolution.  A transposed convolution whose stride equals its filter has the
form of the second gradient and is rewritten too.

Padding may be anything; rows at the end that no patch reads have a gradient of zero.  The sums have the same terms but
products with the zeros of the dilation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax import lax

from jcuts.rewrite.backward.transposed_filter_gradients import (
    exchanged_precision,
    extents,
    is_ungrouped,
    padded,
    unreversed,
)
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline

Label = tuple[str, int]
"""What a dimension is: a letter, and the number of the spatial dimension."""
BATCH = ("batch", 0)
FEATURE = ("feature", 0)
OUT = ("out", 0)
PATCH = "patch"
TAP = "tap"


def patch_gradients(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Rewrites gradients of convolutions whose stride equals their filter; the program and their number."""
    made = {v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}
    eqns, count = [], 0
    for eqn in closed.jaxpr.eqns:
        if is_ungrouped(eqn) and _is_filter_gradient(eqn):
            eqns.append(_filter_product(eqn))
        elif is_ungrouped(eqn) and _is_data_gradient(eqn):
            eqns.append(_data_product(eqn, unreversed(eqn, made)))
        else:
            eqns.append(eqn)
        count += eqns[-1] is not eqn
    if not count:
        return closed, 0
    return jaxapi.dce(inline(jaxapi.with_eqns(closed, eqns))), count


def _is_filter_gradient(eqn: Any) -> bool:
    """Whether the filter's dilation is the extent of the result: its taps, times a stride that equals their number."""
    dilation, (_, _, result) = tuple(eqn.params["rhs_dilation"]), extents(eqn)
    return dilation == result and math.prod(dilation) > 1 and all(d == 1 for d in eqn.params["lhs_dilation"])


def _is_data_gradient(eqn: Any) -> bool:
    """Whether the image's dilation is the extent of the filter, so that every pixel of the result sees one tap."""
    dilation, (_, window, _) = tuple(eqn.params["lhs_dilation"]), extents(eqn)
    return dilation == window and math.prod(dilation) > 1 and all(d == 1 for d in eqn.params["rhs_dilation"])


def _filter_product(eqn: Any) -> Any:
    """The equation of the filter's gradient: out[o] = sum over j of image[o + s j] dy[j]."""
    params, (_, patches, taps) = eqn.params, extents(eqn)
    numbers = params["dimension_numbers"]
    config = _config(numbers.lhs_spec, params["padding"])
    image = _labels(numbers.lhs_spec, (BATCH, FEATURE), (PATCH, TAP))
    cotangent = _labels(numbers.rhs_spec, (OUT, FEATURE), (PATCH,))
    result = _labels(numbers.out_spec, (BATCH, OUT), (TAP,))
    shape = eqn.invars[0].aval.shape
    sizes = {BATCH: shape[numbers.lhs_spec[0]], FEATURE: shape[numbers.lhs_spec[1]]}
    sizes |= {(PATCH, number): count for number, count in enumerate(patches)}
    sizes |= {(TAP, number): count for number, count in enumerate(taps)}

    def product(x: Any, dy: Any) -> Any:
        split = lax.reshape(padded(x, config), [sizes[label] for label in image])
        return _contracted(split, image, dy, cotangent, result, params)

    return jaxapi.call_eqn(product, eqn.invars, eqn.outvars).replace(source_info=eqn.source_info)


def _data_product(eqn: Any, straight: Any) -> Any:
    """The equation of the image's gradient: out[s j + r] = dy[j] w[s - 1 - r], then padded or cut.

    Args: straight: the filter before its reversal, or None.
    """
    params, (patches, taps, _) = eqn.params, extents(eqn)
    numbers = params["dimension_numbers"]
    padding = [(low - size + 1, high - size + 1) for (low, high), size in zip(params["padding"], taps, strict=True)]
    config = _config(numbers.out_spec, padding)
    cotangent = _labels(numbers.lhs_spec, (BATCH, FEATURE), (PATCH,))
    window = _labels(numbers.rhs_spec, (OUT, FEATURE), (TAP,))
    result = _labels(numbers.out_spec, (BATCH, OUT), (PATCH, TAP))
    covered = list(eqn.outvars[0].aval.shape)
    for place, count, size in zip(numbers.out_spec[2:], patches, taps, strict=True):
        covered[place] = count * size

    def product(dy: Any, w: Any) -> Any:
        taps_of = lax.rev(w, numbers.rhs_spec[2:]) if straight is None else w
        values = _contracted(dy, cotangent, taps_of, window, result, params)
        return padded(lax.reshape(values, covered), config)

    operands = [eqn.invars[0], eqn.invars[1] if straight is None else straight]
    return jaxapi.call_eqn(product, operands, eqn.outvars).replace(source_info=eqn.source_info)


def _config(spec: Sequence[int], padding: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """`jax.lax.pad`'s numbers for padding of the spatial dimensions of a layout."""
    config = [(0, 0, 0)] * len(spec)
    for place, (low, high) in zip(spec[2:], padding, strict=True):
        config[place] = (int(low), int(high), 0)
    return config


def _labels(spec: Sequence[int], leading: tuple[Label, Label], parts: tuple[str, ...]) -> list[Label]:
    """Labels of an array's dimensions in its own order.

    Args: spec: places of two dimensions and of the spatial ones. leading: labels of the two. parts: what every spatial
    dimension consists of.
    """
    at: dict[int, list[Label]] = {spec[0]: [leading[0]], spec[1]: [leading[1]]}
    at.update((place, [(part, number) for part in parts]) for number, place in enumerate(spec[2:]))
    return [label for place in sorted(at) for label in at[place]]


def _contracted(a: Any, of_a: list[Label], b: Any, of_b: list[Label], result: list[Label], params: Any) -> Any:
    """Sum of products over all labels that the result does not have, as a product of two matrices.

    Args: of_a, of_b: labels of the operands. result: labels of the result. params: of the convolution.
    """
    summed = [label for label in of_b if label not in result]
    sides = [_matrix(x, of_x, [k for k in result if k in of_x], summed) for x, of_x in ((a, of_a), (b, of_b))]
    precision = params["precision"]
    if result[0] in of_b:
        sides, precision = sides[::-1], exchanged_precision(precision)
    (left, k_left, of_left, left_sizes), (right, k_right, of_right, right_sizes) = sides
    product = lax.dot_general(
        left,
        right,
        (((k_left,), (k_right,)), ((), ())),
        precision=precision,
        preferred_element_type=params["preferred_element_type"],
    )
    made = [*of_left, *of_right]
    return _transposed(lax.reshape(product, (*left_sizes, *right_sizes)), made, result)


def _matrix(x: Any, labels: list[Label], free: list[Label], summed: list[Label]) -> tuple[Any, int, list[Label], Any]:
    """An operand as a matrix: it, its dimension that is summed over, the labels of the other and their extents.

    Contiguous runs stay contiguous: the last dimension keeps its place.
    """
    last = labels[-1] in summed
    ordered = _transposed(x, labels, [*free, *summed] if last else [*summed, *free])
    extents_of = dict(zip(labels, x.shape, strict=True))
    kept, terms = [extents_of[k] for k in free], math.prod(extents_of[k] for k in summed)
    shape = (math.prod(kept), terms) if last else (terms, math.prod(kept))
    return lax.reshape(ordered, shape), int(last), free, kept


def _transposed(x: Any, labels: Sequence[Label], wanted: Sequence[Label]) -> Any:
    """A value with its dimensions in another order."""
    return lax.transpose(x, [labels.index(label) for label in wanted])
