"""Folds zero padding into the convolutions that read it, as XLA's simplifier does (`FoldConvInputPad`).

    p = pad(x, 0);  conv(p, w);  conv(p, d)        becomes        conv(x, w, padding);  conv(x, d, padding)

A layer that pads before a strided convolution (keras' ZeroPadding2D) leaves an array that the convolution and its
filter gradient both read: written once, read twice, of no use.  Padding with one reader stays where it is, for the
kernel of that reader applies it to what it loads.  Padding that anything but convolutions reads stays.
"""

from __future__ import annotations

from typing import Any

from jcuts.trace import jaxapi

PAD = "pad"
CONVOLUTION = "conv_general_dilated"


def fold_padding(closed: jaxapi.Closed) -> tuple[jaxapi.Closed, int]:
    """Replaces padding that several convolutions read; returns the program and the number of these arrays."""
    readers: dict[Any, list[Any]] = {}
    for eqn in closed.jaxpr.eqns:
        for atom in {a for a in eqn.invars if not jaxapi.is_literal(a)}:
            readers.setdefault(atom, []).append(eqn)
    results = {v for v in closed.jaxpr.outvars if not jaxapi.is_literal(v)}
    pads = {
        eqn.outvars[0]: eqn
        for eqn in closed.jaxpr.eqns
        if jaxapi.primitive_name(eqn) == PAD and _is_plain(eqn) and eqn.outvars[0] not in results
    }
    found = {
        padded: pad
        for padded, pad in pads.items()
        if len(readers.get(padded, ())) > 1 and all(_folds(reader, padded, pad) for reader in readers[padded])
    }
    if not found:
        return closed, 0
    made = {id(reader): _folded(reader, pad) for padded, pad in found.items() for reader in readers[padded]}
    eqns = [made.get(id(eqn), eqn) for eqn in closed.jaxpr.eqns]
    return jaxapi.dce(jaxapi.with_eqns(closed, eqns)), len(found)


def _is_plain(pad: Any) -> bool:
    """Whether an array is padded with zeros at its ends alone."""
    array, value = pad.invars
    zero = jaxapi.is_literal(value) and not jaxapi.is_literal(array) and value.val == 0
    return bool(zero) and all(low >= 0 and high >= 0 and not inner for low, high, inner in pad.params["padding_config"])


def _folds(reader: Any, padded: Any, pad: Any) -> bool:
    """Whether a reader is a convolution over the padded dimensions of its input."""
    if jaxapi.primitive_name(reader) != CONVOLUTION or reader.invars[0] is not padded or reader.invars[1] is padded:
        return False
    batch, feature, *_ = reader.params["dimension_numbers"].lhs_spec
    return not any(any(pad.params["padding_config"][d]) for d in (batch, feature))


def _folded(convolution: Any, pad: Any) -> Any:
    """A convolution of what was padded.  Padding lies outside dilation, which spreads it."""
    params = convolution.params
    config = [pad.params["padding_config"][d] for d in params["dimension_numbers"].lhs_spec[2:]]
    padding = tuple(
        (int(before + low * dilation), int(after + high * dilation))
        for (before, after), (low, high, _), dilation in zip(
            params["padding"], config, params["lhs_dilation"], strict=True
        )
    )
    return convolution.replace(invars=[pad.invars[0], *convolution.invars[1:]], params={**params, "padding": padding})
