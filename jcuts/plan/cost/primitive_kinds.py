"""Primitives by what they cost in a compiled step: nothing, a reduction, a buffer of their own, a collective."""

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
