"""All groups of a partition's regions that can be one kernel: inverted residuals, then back-to-back GEMMs."""

from __future__ import annotations

from collections.abc import Sequence

from jcuts.fusion.match_b2b_gemm import b2b_gemm_groups
from jcuts.fusion.match_inverted_residual import inverted_residual_groups
from jcuts.fusion.region_group import HasForm, Part, RegionGroup
from jcuts.lower.tensor_graph import TensorGraph

KINDS = (inverted_residual_groups, b2b_gemm_groups)
"""Matchers of a graph and a partition, the preferred first."""


def region_groups(graph: TensorGraph, cover: Sequence[Part], has_form: HasForm) -> list[RegionGroup]:
    """The groups of all kinds; no region is in two of them."""
    found: list[RegionGroup] = []
    for groups in KINDS:
        taken = {members for group in found for members, _ in group.parts}
        found += groups(graph, [part for part in cover if part[0] not in taken], has_form)
    return found
