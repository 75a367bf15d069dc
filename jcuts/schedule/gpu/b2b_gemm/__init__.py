"""Schedules of back-to-back GEMMs (fused MLP): block tiles and their cycle model."""
