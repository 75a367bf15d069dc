"""Several small maps in one kernel, through the interpreter and the PTX machine."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.elementwise.horizontal import combined_shape
from jcuts.codegen.cuda.toolchain.image import Image
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.kernel_ir.interpret import interpret
from jcuts.kernel_ir.program import Program
from jcuts.lower.horizontal import horizontal_fuse
from jcuts.lower.weight_transpose import MOST
from jcuts.pipeline import weight_prep
from jcuts.rewrite.registry import rewritten
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from tests.ptx import machine as ptx_machine

SM90 = CudaTarget((9, 0))
compiled = pytest.mark.cuda_compilers
RNG = np.random.default_rng(29)
WIDTHS = (96, 1, 1000, 256, 257, 31)


def norm(y, gain, bias, mean, variance):
    scale = gain * jax.lax.rsqrt(variance + 1e-3)
    return y * scale + (bias - mean * scale)


def network(layers, x):
    for w, *parameters in layers:
        x = jnp.tanh(norm(x @ w, *parameters))
    return x


def values(*shape):
    return jnp.asarray(0.5 + RNG.random(shape), jnp.float32)


def calls(widths):
    """The calls that make all vectors of a network with layers of these widths, and their operands."""
    layers, last = [], 7
    for n in widths:
        layers.append((values(last, n), *(values(n) for _ in range(4))))
        last = n
    arguments = (layers, values(3, 7))
    closed = simplify(inline(jaxapi.closed_jaxpr_of(network, *arguments)))
    known = dict(zip(closed.jaxpr.invars, jax.tree.leaves(arguments), strict=True))
    new = rewritten(closed, ("vectors",)).closed
    known = dict(zip(new.jaxpr.invars, known.values(), strict=True))
    found = [e for e in new.jaxpr.eqns if jaxapi.primitive_name(e) in ("jit", "pjit")]
    return [(e, [np.asarray(known[a]) for a in e.invars]) for e in found]


def compare(results, call, operands):
    (inside,) = (body for _, _, body in jaxapi.inner_jaxprs(call))
    wanted = jaxapi.eval_closed(inside, *operands)
    assert len(results) == len(wanted)
    for got, want in zip(results, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_the_program():
    ((call, operands),) = calls(WIDTHS)
    program = weight_prep._program(call)
    assert Program.from_json(program.to_json()) == program and len(program.outputs) == 2 * (len(WIDTHS) - 1)
    compare(interpret(program, operands), call, operands)


@compiled
def test_the_kernel():
    ((call, operands),) = calls(WIDTHS)
    program = weight_prep._program(call)
    kernel = compiler.compile_program(program, SM90)
    (launch,) = Image.unpack(kernel.object_code).launches
    assert launch.grid[0] == sum(-(-n // (256 if n % 4 else 1024)) for n in WIDTHS if n > 1)
    compare(ptx_machine.run_kernel(compiler.ptx_of(program, SM90), kernel, operands), call, operands)


def test_a_call_has_no_more_buffers_than_a_kernel():
    found = calls([16] * 90)
    assert len(found) == 3
    for call, operands in found:
        assert len(operands) + len(call.outvars) <= MOST
        compare(interpret(weight_prep._program(call), operands), call, operands)


def test_what_is_no_map_along_one_axis():
    ((call, _),) = calls(WIDTHS[:1])
    program = weight_prep._program(call)
    (phase,) = program.phases
    two = replace(phase, axes=(replace(phase.axes[0], unroll=2),))
    with pytest.raises(CompileRejected, match="maps"):
        combined_shape(replace(program, phases=(two,)))
    plain = replace(program, phases=(two,), params=())
    assert horizontal_fuse([plain], [range(4)], [range(2)]) is None
