"""Primitives by what they cost in a compiled step: nothing, a reduction, a buffer, a call, a collective."""

from __future__ import annotations

FREE = frozenset(
    {
        "broadcast_in_dim",
        "reshape",
        "squeeze",
        "expand_dims",
        "iota",
        "stop_gradient",
        "pcast",
        "pvary",
        "axis_index",
        "sharding_constraint",
        "copy",
        "copy_p",
        "optimization_barrier",
        "name",
        "split",
        "bitcast_convert_type",
        "random_wrap",
        "random_unwrap",
        "device_put",
        "create_token",
    }
)
"""Equations that XLA turns into views, indices or nothing."""

REDUCTIONS = frozenset(
    {
        "reduce_sum",
        "reduce_max",
        "reduce_min",
        "reduce_prod",
        "reduce_and",
        "reduce_or",
        "argmax",
        "argmin",
        "cumsum",
        "cumlogsumexp",
        "cummax",
        "cumprod",
    }
)

HEAVY = (
    frozenset(
        {
            "dot_general",
            "conv_general_dilated",
            "gather",
            "scatter",
            "scatter-add",
            "scatter_add",
            "sort",
            "top_k",
            "fft",
            "cholesky",
            "triangular_solve",
            "dynamic_slice",
            "dynamic_update_slice",
            "concatenate",
            "transpose",
            "psum",
            "ppermute",
            "all_gather",
            "all_to_all",
            "reduce_scatter",
            "psum2",
            "psum_invariant",
            "rng_bit_generator",
            "random_bits",
            "threefry2x32",
            "reduce_window",
            "reduce_window_max",
            "reduce_window_sum",
            "select_and_scatter_add",
            "while",
            "scan",
            "cond",
        }
    )
    | REDUCTIONS
)
"""Equations whose results are buffers of their own; all others fuse into their consumers or producers."""

COLLECTIVES = {
    "psum": "all-reduce",
    "psum2": "all-reduce",
    "psum_invariant": "all-reduce",
    "ppermute": "collective-permute",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "reduce_scatter": "reduce-scatter",
}

VIEWS = frozenset(
    {
        "reshape",
        "squeeze",
        "expand_dims",
        "copy",
        "pcast",
        "pvary",
        "optimization_barrier",
        "name",
        "stop_gradient",
        "transpose",
        "sharding_constraint",
        "psum",
        "psum2",
        "psum_invariant",
    }
)
"""Results that are their operand seen otherwise (a transpose becomes the layout that its producer writes; an all-reduce
works in place)."""

BUFFERS = HEAVY - {"transpose", "dynamic_slice", "concatenate"}
"""Equations whose results XLA always writes to memory."""

EXPENSIVE = frozenset(
    {
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "tanh",
        "logistic",
        "erf",
        "erfc",
        "erf_inv",
        "sin",
        "cos",
        "tan",
        "pow",
        "rsqrt",
        "sqrt",
        "div",
        "lgamma",
        "digamma",
    }
)
"""Elementwise equations that fusion does not duplicate in every consumer (``HloInstruction::IsExpensive``)."""

CALLS = frozenset(
    {
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "remat",
        "checkpoint",
        "remat2",
        "custom_lin",
    }
)
"""Calls of a jaxpr that XLA inlines."""

REPEATS = frozenset({"broadcast_in_dim", "reshape", "pcast", "pvary", "convert_element_type"})
"""Equations whose result holds the numbers of their operand."""

UPDATES = frozenset({"scatter", "scatter-add", "scatter_add", "dynamic_update_slice"})
"""Write into their first operand's buffer; only what is updated moves."""
