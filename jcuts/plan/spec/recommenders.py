"""Recommendation models (DLRM) as layers: embedding tables, bottom and top multilayer perceptrons, dot interaction."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from jcuts.plan.spec import toml_file
from jcuts.plan.spec.layers import BYTES, Block, Gemm, Model, Stream


def _perceptron(name: str, sizes: Sequence[int], tables: tuple[float, ...] = (), first: Sequence[Stream] = ()) -> Block:
    """Dense layers with ReLU; sizes from the input on."""
    pairs = list(itertools.pairwise(sizes))
    products = [Gemm(f"{a} x {b}", 1, b, a) for a, b in pairs]
    moved = BYTES * float(sum(b for _, b in pairs))
    activations = Stream("bias, relu", 2 * moved, 3 * moved, "no", len(pairs), len(pairs))
    return Block(
        name,
        1,
        (*first, *products, activations),
        replicated=float(sum(a * b + b for a, b in pairs)),
        saved_replicated=moved + sum(op.forward / 2 for op in first),
        boundary=BYTES * float(sizes[-1]),
        tables=tables,
    )


def from_table(table: toml_file.Table) -> Model:
    """A DLRM from its TOML table: ``tables`` (rows of each), ``width`` (values per row), ``lookups`` (rows per table
    and sample, summed), ``bottom`` and ``top`` (sizes of the perceptrons; the top's input is the dot interaction).

    Source: arXiv 1906.00091, section 2.  Raises: ModelError with file, line and key.
    """
    name, batch = table.text_of("name"), table.integer("batch", 1)
    width, lookups = table.integer("width"), table.integer("lookups", 1)
    rows, bottom, top = (table.integers(key) for key in ("tables", "bottom", "top"))
    if bottom[-1] != width:
        raise table.error("bottom", f"must end with width={width}, which the interaction needs, not {bottom[-1]}")
    table.done()
    found = BYTES * float(len(rows) * width)
    look_up = Stream("look-ups", 2 * lookups * found, 4 * lookups * found, "no", len(rows), len(rows))
    vectors = len(rows) + 1
    pairs = vectors * (vectors - 1) // 2
    interaction = Stream("concatenate, take the triangle", 4 * found, 8 * found, "no", 2, 2)
    first = _perceptron("look-ups and bottom", bottom, tuple(float(n * width) for n in rows), (look_up,))
    second = _perceptron("interaction and top", [width + pairs, *top], (), (interaction,))
    dots = Gemm("dot interaction", vectors, vectors, width, per_sample="batch")
    blocks = (first, replace(second, operations=(dots, *second.operations)))
    return Model(name, blocks, batch=batch, sample="sample", lookup_pooled=found, lookup_rows=lookups * found)
