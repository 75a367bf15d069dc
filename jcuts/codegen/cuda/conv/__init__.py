"""Convolutions on tensor cores: persistent implicit GEMM with halo reuse (``wgmma``), and few-channel convolutions.

In: programs that `lower/patterns/conv_window.py` and `few_channel_conv.py` recognise.  Convolutions without halo reuse
are GEMMs with gathered operands (`gemm/`).
"""
