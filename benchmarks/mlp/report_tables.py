"""Published numbers of the course report: Tables 1 to 3, differences and times of its GEMM, its optimisation history.

Source: J. P. Binagia, "CME 213 Final Report", 2020: Tesla K80 GPUs, CUDA and MPI, float64; sections as named.
"""

from __future__ import annotations

from typing import NamedTuple

ALPHA = 2.0
BETA = 5.0
"""Of C = alpha A B + beta C, grading mode 4 (3.1)."""
SHAPES = {"test 1": (800, 1000, 784), "test 2": (800, 10, 1000)}
"""(M, N, K) of the same."""
BLOCKS = (4, 8, 16, 32)
"""Block sizes of Table 2."""


class Row(NamedTuple):
    """Table 1: relative differences of parallel from sequential weights (max and L2 norm), and seconds."""

    mode: int
    processes: int
    differences: tuple[float, float, float, float, float, float, float, float]
    """W[0], b[0], W[1], b[1], the max norm first of each."""
    seconds: float


TABLE_1 = (
    Row(1, 1, (1.40e-15, 1.26e-15, 3.75e-15, 1.75e-15, 3.64e-16, 8.40e-16, 1.53e-15, 8.59e-16), 18.4831),
    Row(1, 2, (1.61e-15, 1.45e-15, 4.64e-15, 2.04e-15, 4.75e-16, 1.01e-15, 1.69e-15, 9.68e-16), 11.6833),
    Row(1, 3, (1.68e-15, 1.52e-15, 4.92e-15, 2.14e-15, 5.11e-16, 1.14e-15, 1.84e-15, 9.96e-16), 14.883),
    Row(1, 4, (1.51e-15, 1.35e-15, 4.22e-15, 1.82e-15, 4.62e-16, 9.21e-16, 1.23e-15, 7.98e-16), 17.1794),
    Row(2, 1, (9.82e-09, 7.11e-09, 1.48e-08, 4.67e-09, 6.11e-11, 1.27e-10, 4.98e-10, 4.65e-10), 5.41098),
    Row(2, 2, (7.89e-09, 5.72e-09, 1.19e-08, 3.78e-09, 5.05e-11, 9.89e-11, 4.10e-10, 3.47e-10), 4.05076),
    Row(2, 3, (2.85e-08, 2.06e-08, 4.32e-08, 1.36e-08, 1.82e-10, 3.60e-10, 1.48e-09, 1.28e-09), 3.88052),
    Row(2, 4, (6.57e-09, 4.79e-09, 9.97e-09, 3.15e-09, 4.29e-11, 8.34e-11, 3.49e-10, 3.04e-10), 4.97615),
    Row(3, 1, (6.93e-12, 6.64e-12, 2.28e-11, 7.74e-12, 3.83e-14, 1.43e-13, 4.47e-13, 4.90e-13), 6.56215),
    Row(3, 2, (4.13e-11, 3.93e-11, 1.06e-10, 2.99e-11, 2.01e-13, 8.46e-13, 2.52e-12, 2.77e-12), 6.28473),
    Row(3, 3, (3.06e-12, 3.23e-12, 2.65e-11, 7.17e-12, 1.10e-14, 7.16e-14, 6.77e-14, 8.18e-14), 11.5126),
    Row(3, 4, (8.81e-12, 8.40e-12, 2.27e-11, 6.19e-12, 4.28e-14, 1.86e-13, 5.41e-13, 5.78e-13), 11.4637),
)
SEQUENTIAL_SECONDS = {1: 540.135, 2: 78.1479, 3: 12.7516}
"""Table 1, by grading mode."""
PRECISION = {1: 0.894333, 2: 0.924167, 3: 0.845167}
"""Table 1, of MNIST's validation samples."""
TABLE_2 = {
    "test 1": {4: 0.654227, 8: 0.140203, 16: 0.128672, 32: 0.132084},
    "test 2": {4: 0.009971, 8: 0.00299, 16: 0.002807, 32: 0.004545},
}
"""Seconds of the tiled GEMM by block size, before coalescing and padding."""
GEMM_SECONDS = {"test 1": 0.0652142, "test 2": 0.00172805}
"""4.4: block size 16, coalesced and padded."""
GEMM_DIFFERENCE = {"test 1": 1.85746e-16, "test 2": 3.2505e-16}
"""3.1."""
HISTORY = (92.1804, 56.596, 48.0565, 29.35, 26.6605)
"""4.2 and 4.4, seconds on 4 GPUs: at first; memory allocated once; fewer allocations; no copies; GEMM coalesced."""
TABLE_3 = {
    "gpuGEMM4d1()": 93.2,
    "elemwise()": 1.6,
    "sum()": 2.2,
    "sigmoidKernel()": 0.3,
    "addmat()": 1.8,
    "transpose()": 0.6,
    "repmatKernel()": 0.2,
}
"""Percent of the time of all kernels."""
