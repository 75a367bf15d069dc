"""Pattern matcher ``conv_general_dilated`` -> cuDNN: forward, backward-data or backward-filter convolution of a layer.

Autodiff writes the gradients of a layer y = conv(x, w) as convolutions of their own (`jax._src.lax.convolution`):

    dx = conv(dy, rev(w)), dy dilated by the layer's strides, w with its channel dimensions exchanged
    dw = conv(x, dy), x's and dy's channels in the place of the batch, steps and dilation of the window exchanged

`recognise` finds the layer behind them.  Every match is valid; the order of preference decides only what is measured.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jcuts.base.errors import Refusal, UsageError
from jcuts.microbatch.convolution import MATHS, Convolution
from jcuts.microbatch.timings import Division
from jcuts.trace import jaxapi
from jcuts.xla.cudnn import call as cudnn_call

LIBRARY = "xla/scratch"
"""Name of XLA's own convolution in tables: its workspace is the convolution's own, as a limit is on workspaces."""
PRIMITIVE = "conv_general_dilated"
Order = tuple[int, ...]


@dataclass(frozen=True)
class Site:
    """An equation matched to a cuDNN convolution.

    Attributes:
        convolution: the kernel of the layer.
        batch: its samples.
        operands: variables, in the order of `cudnn.call`.
        orders: dimensions of operands and result as of there.
        precision: least exactness that the program asks for.
        flipped: the window is reversed.
        regroup: the second operand is a grouped filter as autodiff rearranged it, to be put back.
    """

    convolution: Convolution
    batch: int
    operands: tuple[Any, Any]
    orders: tuple[Order, Order, Order]
    precision: str
    flipped: bool = False
    regroup: bool = False


def recognise(eqn: Any, maker: Callable[[Any], Any] = lambda _: None) -> Site | Refusal:
    """The cuDNN convolution that an equation is, or why cuDNN cannot compute it.

    Args: maker: gives the equation that makes a variable, or None.
    """
    params, spec = eqn.params, eqn.params["dimension_numbers"]
    lhs, rhs = (v.aval for v in eqn.invars)
    out = eqn.outvars[0].aval
    dtype = np.dtype(out.dtype).name
    if not lhs.dtype == rhs.dtype == out.dtype or dtype not in MATHS:
        return Refusal(PRIMITIVE, f"{lhs.dtype} x {rhs.dtype} -> {out.dtype} is not a type of cuDNN's")
    if not 1 <= len(spec.lhs_spec) - 2 <= 3:
        return Refusal(PRIMITIVE, f"{len(spec.lhs_spec) - 2} spatial dimensions")
    if 0 in (*lhs.shape, *rhs.shape, *out.shape):
        return Refusal(PRIMITIVE, "an empty array")
    precision = asked(params.get("precision"), dtype)
    if precision is None:
        return Refusal(PRIMITIVE, f"precision={params.get('precision')} names an algorithm; only XLA honours it")
    try:
        site = _site(eqn, spec, maker, dtype, precision)
    except UsageError as error:
        return Refusal(PRIMITIVE, error.message)
    return site


def _site(eqn: Any, spec: Any, maker: Callable[[Any], Any], dtype: str, precision: str) -> Site | Refusal:
    stretched = any(d != 1 for d in eqn.params["lhs_dilation"])
    gradient = spec.lhs_spec[1] == 0 and spec.rhs_spec[1] == 0 and spec.lhs_spec[0] != 0
    if int(eqn.params["batch_group_count"]) != 1 or (gradient and not stretched):
        return _backward_filter(eqn, spec, dtype, precision)
    unreversed = _unreversed(eqn, spec, maker)
    if stretched or (unreversed is not None and all(s == 1 for s in eqn.params["window_strides"])):
        site = _backward_data(eqn, spec, dtype, precision)
        if isinstance(site, Site) and unreversed is not None:
            return replace(site, operands=(site.operands[0], unreversed), flipped=False)
        if isinstance(site, Site) or stretched:
            return site
    return _forward(eqn, spec, dtype, precision)


def _unreversed(eqn: Any, spec: Any, maker: Callable[[Any], Any]) -> Any:
    """The filter before the window reversal, None if the equation's filter is not a reversal."""
    reverse = maker(eqn.invars[1])
    if reverse is None or jaxapi.primitive_name(reverse) != "rev":
        return None
    return reverse.invars[0] if sorted(reverse.params["dimensions"]) == sorted(spec.rhs_spec[2:]) else None


def _forward(eqn: Any, spec: Any, dtype: str, precision: str) -> Site | Refusal:
    params, (x, w), y = eqn.params, (v.aval for v in eqn.invars), eqn.outvars[0].aval
    layout = _layout(spec.lhs_spec)
    strides, dilation = _ints(params["window_strides"]), _ints(params["rhs_dilation"])
    made = _layer(
        "forward",
        x,
        spec.lhs_spec,
        y,
        spec.out_spec,
        tuple(w.shape[d] for d in spec.rhs_spec[2:]),
        strides,
        dilation,
        _pairs(params["padding"]),
        int(params["feature_group_count"]),
        dtype,
        layout,
    )
    if isinstance(made, Refusal):
        return made
    orders = tuple(_order(s, layout) for s in (spec.lhs_spec, spec.rhs_spec, spec.out_spec))
    return Site(made, x.shape[spec.lhs_spec[0]], tuple(eqn.invars), orders, precision)  # type: ignore[arg-type]


def _backward_data(eqn: Any, spec: Any, dtype: str, precision: str) -> Site | Refusal:
    params, (dy, w), dx = eqn.params, (v.aval for v in eqn.invars), eqn.outvars[0].aval
    if any(s != 1 for s in params["window_strides"]):
        return Refusal(PRIMITIVE, "steps over a stretched input")
    layout = _layout(spec.lhs_spec)
    window, dilation = tuple(w.shape[d] for d in spec.rhs_spec[2:]), _ints(params["rhs_dilation"])
    low = tuple((r - 1) * d - p for r, d, (p, _) in zip(window, dilation, _pairs(params["padding"]), strict=True))
    groups = int(params["feature_group_count"])
    made = _layer(
        "backward_data",
        dx,
        spec.out_spec,
        dy,
        spec.lhs_spec,
        window,
        _ints(params["lhs_dilation"]),
        dilation,
        tuple((p, p) for p in low),
        groups,
        dtype,
        layout,
    )
    if isinstance(made, Refusal):
        return made
    filters = (spec.rhs_spec[1], spec.rhs_spec[0], *spec.rhs_spec[2:])  # K is what is summed over, C what comes out
    orders = (_order(spec.lhs_spec, layout), _order(filters, layout), _order(spec.out_spec, layout))
    return Site(
        made, dx.shape[spec.out_spec[0]], tuple(eqn.invars), orders, precision, flipped=True, regroup=groups > 1
    )


def _backward_filter(eqn: Any, spec: Any, dtype: str, precision: str) -> Site | Refusal:
    params, (x, dy), dw = eqn.params, (v.aval for v in eqn.invars), eqn.outvars[0].aval
    groups = int(params["batch_group_count"])
    if any(d != 1 for d in params["lhs_dilation"]) or int(params["feature_group_count"]) != 1:
        return Refusal(PRIMITIVE, "the gradient of a filter over a stretched or grouped input")
    images = (spec.lhs_spec[1], spec.lhs_spec[0], *spec.lhs_spec[2:])  # N is what is summed over
    results = (spec.rhs_spec[1], spec.rhs_spec[0], *spec.rhs_spec[2:])
    filters = (spec.out_spec[1], spec.out_spec[0], *spec.out_spec[2:])
    layout = _layout(images)
    made = _layer(
        "backward_filter",
        x,
        images,
        dy,
        results,
        tuple(dw.shape[d] for d in filters[2:]),
        _ints(params["rhs_dilation"]),
        _ints(params["window_strides"]),
        tuple((low, low) for low, _ in _pairs(params["padding"])),
        groups,
        dtype,
        layout,
    )
    if isinstance(made, Refusal):
        return made
    orders = (_order(images, layout), _order(results, layout), _order(filters, layout))
    return Site(made, x.shape[images[0]], tuple(eqn.invars), orders, precision)  # type: ignore[arg-type]


def _layer(
    kind: str,
    x: Any,
    x_spec: Order,
    y: Any,
    y_spec: Order,
    window: Order,
    strides: Order,
    dilation: Order,
    padding: Sequence[tuple[int, int]],
    groups: int,
    dtype: str,
    layout: str,
) -> Convolution | Refusal:
    """The layer with symmetric padding, if it has the equation's result shape."""
    low = tuple((p, p) for p, _ in padding)
    spatial = tuple(x.shape[d] for d in x_spec[2:])
    if any(p < 0 for p, _ in low):
        return Refusal(PRIMITIVE, f"negative padding {tuple(padding)}")
    made = Convolution(
        kind,
        x.shape[x_spec[1]],
        y.shape[y_spec[1]],
        spatial,
        window,
        strides=strides,
        padding=low,
        dilation=dilation,
        groups=groups,
        dtype=dtype,
        layout=layout,
    )
    found = tuple(y.shape[d] for d in y_spec[2:])
    if made.result != found:
        return Refusal(PRIMITIVE, f"padding that differs on the two sides: {tuple(padding)}")
    return made


def _layout(images: Order) -> str:
    """NHWC where channels come last in memory, else NCHW."""
    return "NHWC" if images[1] == len(images) - 1 and len(images) > 2 else "NCHW"


def _order(spec: Order, layout: str) -> Order:
    """Dimensions of an array from the outermost to the innermost that the layout wants."""
    batch, feature, *space = spec
    return (batch, *space, feature) if layout == "NHWC" else (batch, feature, *space)


def _ints(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(v) for v in values)


def _pairs(values: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    return tuple((int(low), int(high)) for low, high in values)


def asked(precision: Any, dtype: str) -> str | None:
    """Least precision that a ``precision`` parameter allows for a dtype; None if it names an algorithm.

    float32 without HIGHEST may be TF32, as in XLA; 16-bit types always compute in float32, as in XLA.
    """
    pair = precision if isinstance(precision, tuple) else (precision, precision)
    if any(p is not None and not isinstance(p, jax.lax.Precision) for p in pair):
        return None
    if dtype == "float32":
        return "float32" if jax.lax.Precision.HIGHEST in pair else "tf32"
    return {"float16": "float32"}.get(dtype, dtype)


def call_site(
    site: Site, division: Division, result: Any, a: Any, b: Any, *, layer: str, platform: str, graph: bool = False
) -> Any:
    """The kernel by cuDNN, divided, on the values of the equation's operands (traceable).

    Args: result: shape and dtype of the equation's result.  Others as of `cudnn.call`.
    """
    if site.regroup:
        b = ungrouped(b, site.orders[1], site.convolution)
    return cudnn_call.call(
        site.convolution,
        division,
        (a, b),
        result,
        layer=layer,
        orders=site.orders,
        platform=platform,
        flipped=site.flipped,
        graph=graph,
    )


def ungrouped(w: Any, order: Order, convolution: Convolution) -> Any:
    """A layer's grouped filter, recovered from the form that autodiff gives it in the gradient of the input.

    K/g x C  ->  K x C/g,    groups outermost in C before, in K after
    """
    groups = convolution.groups
    outer, inner = order[0], order[-1] if convolution.layout == "NHWC" else order[1]
    shape = list(w.shape)
    split = [*shape[:inner], groups, shape[inner] // groups, *shape[inner + 1 :]]
    dims = [d + (d > inner) for d in range(len(shape))]  # where the dimensions are now; the group is at `inner`
    dims[inner] = inner + 1
    order_out = [d for k in range(len(shape)) for d in ((inner, dims[k]) if k == outer else (dims[k],))]
    shape[inner] //= groups
    shape[outer] *= groups
    return jax.lax.reshape(jax.lax.transpose(jax.lax.reshape(w, split), order_out), shape)


# -- XLA's own ------------------------------------------------------------------------------------------------------
def library_maths(dtype: str) -> dict[str, Any]:
    """Math of XLA's convolutions -> the ``precision`` that selects it."""
    if dtype == "float32":
        return {"float32": jax.lax.Precision.HIGHEST, "tf32": jax.lax.Precision.DEFAULT}
    return {"float64" if dtype == "float64" else "float32+tensor": None}


def library_function(
    convolution: Convolution, batch: int, precision: Any = None
) -> tuple[Callable[[Any, Any], Any], list[jax.ShapeDtypeStruct]]:
    """The convolution by XLA: a function of its two operands in the order of `cudnn.call`, and their types.

    Operands are in the layout's own order: N C ..., K C ... or N ... C, K ... C.
    """
    c, space = convolution, "DHW"[3 - len(convolution.spatial) :]
    last = c.layout == "NHWC"
    image, filters = (f"N{space}C", f"O{space}I") if last else (f"NC{space}", f"OI{space}")

    def place(outer: int, inner: int, extents: Sequence[int]) -> jax.ShapeDtypeStruct:
        shape = (outer, *extents, inner) if last else (outer, inner, *extents)
        return jax.ShapeDtypeStruct(shape, jax.numpy.dtype(c.dtype))

    x = place(batch, c.channels, c.spatial)
    w = place(c.outputs, c.channels // c.groups, c.window)
    y = place(batch, c.outputs, c.result)

    def layer(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(
            x,
            w,
            c.strides,
            c.padding,
            rhs_dilation=c.dilation,
            feature_group_count=c.groups,
            dimension_numbers=(image, filters, image),
            precision=precision,
        )

    if c.kind == "forward":
        return layer, [x, w]
    if c.kind == "backward_data":
        return lambda dy, w: jax.linear_transpose(lambda x: layer(x, w), x)(dy)[0], [y, w]
    return lambda x, dy: jax.linear_transpose(lambda w: layer(x, w), w)(dy)[0], [x, y]


_SCRATCH = re.compile(r"\bu8\[(\d+)\]")
_CUDNN_CALLS = ("__cudnn$conv", "__cudnn$fusion")


def scratch_bytes(optimised: str) -> int | None:
    """The largest workspace of a convolution in an optimised program on a GPU [B], None where cuDNN computes none.

    Layouts that XLA changes before and after a convolution are not in it: in a whole program they are other equations'.

    Args: optimised: HLO as text.
    """
    found = None
    for line in optimised.splitlines():
        if any(name in line for name in _CUDNN_CALLS):
            result = line.partition(" = ")[2].partition("(%")[0]
            found = max(found or 0, *map(int, _SCRATCH.findall(result)), 0)
    return found
