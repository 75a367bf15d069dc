"""A layer of a decoder whose chain is unbroken: planned for an H200, run on the PTX machine, against `jax.jit`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.networks import modes, partition_gpu
from jcuts.base.settings import UNBROKEN, Settings, Variant
from jcuts.codegen.cuda import compile as compiler
from jcuts.pipeline import passes, rebuild
from jcuts.trace import jaxapi
from jcuts.xla.rebuild import traced_eqns
from tests.codegen.cuda.gemm.test_mma import SM90, compiled
from tests.gpu.test_appends import layer, normal
from tests.ptx import machine as ptx_machine

HEADS, DEPTH, LENGTH = 8, 64, 64
WIDTH = HEADS * DEPTH


def execute(ran, program, place, *operands):
    """One kernel call on the PTX machine. Args: ran: gains the program."""
    arrays = [np.asarray(x) for x in operands]
    kernel, ptx = compiler.compile_program(program, SM90), compiler.ptx_of(program, SM90)
    ran.append(program)
    if place is None:
        return tuple(ptx_machine.run_kernel(ptx, kernel, arrays))
    array = arrays[place[0]].copy()
    return tuple(ptx_machine.run_kernel(ptx, kernel, arrays, start=place[1], array=array))


def planned(closed, ran, monkeypatch):
    """The rebuilt function with every kernel as a call of the PTX machine."""

    def call(kernel, inputs, outputs, like, place=None, aliases=None):
        results = tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in outputs)
        run = functools.partial(execute, ran, kernel, place)
        return traced_eqns(lambda *xs: jax.pure_callback(run, results, *xs), inputs, outputs, like)

    monkeypatch.setattr(rebuild, "kernel_for", lambda program: program)
    monkeypatch.setattr(rebuild, "kernel_eqns", call)
    monkeypatch.setattr(rebuild.extra_kernels, "compile_kernels", list)
    form, with_kernels = Variant((), UNBROKEN), passes.with_substitutes({"chain": lambda state: state})
    with modes.pretended({}, lambda problem, region: [*partition_gpu.predicted(problem), 1.0]):
        passes.PASSES = with_kernels
        return passes.optimize_jaxpr(closed, Settings(form=form), platform="cuda", may_measure=True).closed


@compiled
@pytest.mark.parametrize("position", [0, 17, LENGTH - 1])
def test_a_layer_appends_and_attends(position, monkeypatch):
    w = {"qkv": normal(WIDTH, 3 * WIDTH) * WIDTH**-0.5, "out": normal(WIDTH, WIDTH, seed=1) * WIDTH**-0.5}
    caches = tuple(normal(1, LENGTH, HEADS, DEPTH, seed=s) for s in (4, 5))
    x, cos, sin = normal(1, 1, WIDTH), normal(DEPTH // 2, seed=2), normal(DEPTH // 2, seed=3)
    arguments = caches, x, w, cos, sin, jnp.int32(position)
    ran: list = []
    closed = planned(jaxapi.closed_jaxpr_of(layer, *arguments), ran, monkeypatch)
    got = jaxapi.eval_closed(closed, *jax.tree.leaves(arguments))
    want = jax.tree.leaves(jax.jit(layer)(*arguments))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=0.06)
    appended = [p.outputs[0].offset is not None for p in ran]
    assert [p.template for p in ran].count("map") == 3 and sum(appended) == 2
    assert {p.template for p in ran} == {"contraction", "map", "attention"} and len(ran) == 6
