"""Registry of the rewrites that always apply, most of them for training steps, in their order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from jcuts.rewrite.backward.deviation_sums import deviation_sums
from jcuts.rewrite.backward.explicit_padding import fold_padding
from jcuts.rewrite.backward.multi_tensor_norm import multi_tensor_norms
from jcuts.rewrite.backward.multi_tensor_update import multi_tensor_updates
from jcuts.rewrite.backward.one_hot import gathers_before_elementwise, one_hot_scatters
from jcuts.rewrite.backward.patch_gradients import patch_gradients
from jcuts.rewrite.backward.rematerialize import rematerialize
from jcuts.rewrite.backward.rematerialize_conversions import rematerialize_conversions
from jcuts.rewrite.backward.separate_deviations import separate_deviations
from jcuts.rewrite.backward.separate_sums import separate_sums
from jcuts.rewrite.backward.sparse_updates import sparse_updates
from jcuts.rewrite.backward.stored_residuals import stored_residuals
from jcuts.rewrite.backward.transposed_filter_gradients import transposed_filter_gradients
from jcuts.rewrite.loops.fission import loop_fission
from jcuts.rewrite.loops.hoist_weight_gradients import hoist_weight_gradients
from jcuts.rewrite.loops.horizontal import Gains, merge_loops
from jcuts.rewrite.position_masks import position_masks
from jcuts.trace import jaxapi


@dataclass(frozen=True)
class BackwardRewrite:
    """A rewrite of a flat jaxpr.

    Attributes:
        name: for keys of what is remembered. apply: gives the program after it.
        gpu_only: whether it serves kernels for GPUs alone.
        makes_asymmetric: whether convolutions may be padded differently on their two sides, which cuDNN's divided ones
            cannot be.
        with_kernels: whether it serves variants with kernels alone.
        gains_alone: whether XLA's own code is much faster behind it, so that the program races without kernels too.
        by_cache: whether ``apply`` also takes the bytes of a core's L2 cache (0 on a GPU).
        by_model: whether ``apply`` also takes ``gains`` (`loops.horizontal.Gains`).
    """

    name: str
    apply: Callable[..., jaxapi.Closed]
    gpu_only: bool = False
    makes_asymmetric: bool = False
    with_kernels: bool = False
    gains_alone: bool = False
    by_cache: bool = False
    by_model: bool = False


REWRITES = (
    BackwardRewrite("masks", lambda closed: position_masks(closed)[0], gpu_only=True, with_kernels=True),
    BackwardRewrite("one-hot scatters", lambda closed: one_hot_scatters(closed)[0]),
    BackwardRewrite("sparse updates", lambda closed: sparse_updates(closed)[0], gains_alone=True),
    BackwardRewrite("row gathers", lambda closed: gathers_before_elementwise(closed)[0]),
    BackwardRewrite(
        "projections", lambda closed, cache: loop_fission(closed, cache)[0], gains_alone=True, by_cache=True
    ),
    BackwardRewrite("weight gradients", lambda closed: hoist_weight_gradients(closed)[0]),
    BackwardRewrite(
        "merged loops",
        lambda closed, gains: merge_loops(closed, gains)[0],
        gpu_only=True,
        with_kernels=True,
        by_model=True,
    ),
    BackwardRewrite("padding", lambda closed: fold_padding(closed)[0], makes_asymmetric=True),
    BackwardRewrite("transposed filters", lambda closed: transposed_filter_gradients(closed)[0], gains_alone=True),
    BackwardRewrite("patches", lambda closed: patch_gradients(closed)[0], gains_alone=True),
    BackwardRewrite("deviation sums", lambda closed: deviation_sums(closed)[0]),
    BackwardRewrite("residuals", lambda closed: rematerialize(closed)[0], gpu_only=True),
    BackwardRewrite("stored residuals", lambda closed: stored_residuals(closed)[0], gpu_only=True, with_kernels=True),
    BackwardRewrite("deviations", separate_deviations, gpu_only=True),
    BackwardRewrite(
        "conversions", lambda closed: rematerialize_conversions(closed)[0], gpu_only=True, with_kernels=True
    ),
    BackwardRewrite("sums", lambda closed: separate_sums(closed)[0], gpu_only=True),
    BackwardRewrite("norms", lambda closed: multi_tensor_norms(closed)[0], gpu_only=True, with_kernels=True),
    BackwardRewrite("updates", lambda closed: multi_tensor_updates(closed)[0], gpu_only=True, with_kernels=True),
)


def backward_rewrites(
    platform: str, *, divides: bool, has_kernels: bool = True, cache_bytes: int = 0, gains: Gains | None = None
) -> Iterator[BackwardRewrite]:
    """Those for a platform.

    Args:
        divides: whether convolutions are divided under a workspace limit. has_kernels: whether the variant has any.
        cache_bytes: of a core's L2 cache, on a CPU.
        gains: the time model of loops; None: rewrites that ask it are left out.
    """
    for rewrite in REWRITES:
        if rewrite.by_cache:
            rewrite = replace(
                rewrite, apply=functools.partial(rewrite.apply, cache=cache_bytes if platform == "cpu" else 0)
            )
        if rewrite.by_model and gains is not None:
            rewrite = replace(rewrite, apply=functools.partial(rewrite.apply, gains=gains))
        if (rewrite.gpu_only and platform == "cpu") or (rewrite.by_model and gains is None):
            continue
        if not (rewrite.makes_asymmetric and divides) and (has_kernels or not rewrite.with_kernels):
            yield rewrite
