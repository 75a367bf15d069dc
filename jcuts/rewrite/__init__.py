"""Rewrites of a flat jaxpr: value-preserving clean-up, and optional rewrites that compete by measurement.

In: a flat jaxpr of `trace/`.  Out: a flat jaxpr with the same meaning.  `simplify.py` and `splat_constants.py` change
no value; `registry.py` lists the optional rules, one file each.  Which combinations compete is decided in
`jit/variant_space.py`.
"""
