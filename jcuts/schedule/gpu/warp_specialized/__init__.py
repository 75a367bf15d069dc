"""Warp-specialised GEMM and implicit-GEMM schedules (producer and consumer warps), ranked by a cycle model."""
