"""Partial sums of many arrays in one kernel, through the interpreter and the PTX machine, against float64."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.reduction.multi_tensor_sums import sums_shape
from jcuts.codegen.cuda.toolchain.image import Image
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.kernel_ir.interpret import interpret
from jcuts.kernel_ir.node import Graph
from jcuts.kernel_ir.program import Program, Store
from jcuts.kernel_ir.verify import verify
from jcuts.lower.reduction.multi_tensor_sums import ArraySum, multi_tensor_sums, partial_sums_of
from jcuts.lower.weight_transpose import MOST
from jcuts.pipeline import weight_prep
from jcuts.rewrite.backward.multi_tensor_norm import CHUNK
from tests import programs
from tests.ptx import machine as ptx_machine
from tests.rewrite.test_multi_tensor_norm import rewritten

SM90 = CudaTarget((9, 0))
compiled = pytest.mark.cuda_compilers
RNG = np.random.default_rng(43)
SIZES = (2, 3, 31, 1023, 1024, 4099, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 4097)
"""Parts of a vector, of a warp, of an unrolled step; one chunk, and several whose last is partial."""


def arrays(sizes=SIZES, dtype=np.float32):
    return [jnp.asarray(RNG.standard_normal(n), dtype) for n in sizes]


def made(fn, *args):
    """The call of partial sums in a function's program, and its kernel program."""
    _, _, (call,), _ = rewritten(fn, *args)
    program = weight_prep._program(call)
    assert program is not None
    return call, program


def square_sums(xs):
    return sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in xs)


def run(program, operands):
    kernel = compiler.compile_program(program, SM90)
    return ptx_machine.run_kernel(compiler.ptx_of(program, SM90), kernel, operands)[0]


def squares_of(x):
    """Partial sums of squares in float64."""
    x = np.asarray(x, np.float64).ravel()
    return [np.sum(x[k : k + CHUNK] ** 2) for k in range(0, x.size, CHUNK)]


def test_the_program():
    xs = arrays(SIZES[:6])
    _, program = made(square_sums, xs + arrays((5, 6)))
    verify(program, all_addresses=True)
    assert Program.from_json(program.to_json()) == program
    assert len(sums_shape(program).functions) == 1  # one copy of the code for all sizes
    operands = [*map(np.asarray, xs), *arrays((5, 6))]
    wanted = np.concatenate([squares_of(x) for x in operands])
    np.testing.assert_allclose(interpret(program, operands)[0], wanted, rtol=2e-5)


@compiled
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_kernel(dtype):
    """As exact as a blocked sum, and bit by bit the same in two runs."""
    xs = arrays(dtype=dtype)
    _, program = made(square_sums, xs)
    operands = [*map(np.asarray, xs)]
    kernel = compiler.compile_program(program, SM90)
    (launch,) = Image.unpack(kernel.object_code).launches
    assert launch.grid == (sum(-(-n // CHUNK) for n in SIZES), 1, 1)
    got = run(program, operands)
    np.testing.assert_allclose(got, np.concatenate([squares_of(x) for x in xs]), rtol=5e-7)
    np.testing.assert_array_equal(got, run(program, operands))


@compiled
def test_several_functions():
    """Squares, sums, sums of absolute values, of a function that is not 0 at 0 with a number; two of one array."""

    def total(xs, scale):
        first = sum(jnp.sum(x * x) for x in xs[:4]) + sum(map(jnp.sum, xs[:3]))
        return first + sum(jnp.sum(jnp.abs(x)) for x in xs[4:6]) + sum(jnp.sum(jnp.exp(x * scale)) for x in xs[6:])

    xs = arrays((700, 4, 129, 33, 2, 513, 1000, CHUNK + 3))
    call, program = made(total, xs, jnp.float32(0.25))
    assert len(sums_shape(program).functions) == 4
    known = {x.shape: np.asarray(x) for x in xs} | {(): np.float32(0.25)}
    operands = [known[v.aval.shape] for v in call.invars]
    np.testing.assert_allclose(run(program, operands), interpret(program, operands)[0], rtol=1e-5, atol=1e-4)


@compiled
def test_infinities_and_nans_are_in_their_own_sums():
    """Neither a neighbour's nor that of another block of the array; an overflow is an infinity."""
    xs = [np.array(x) for x in arrays((40, 40, 40, CHUNK + 5, 3, 3, 2, 2))]
    xs[0][39], xs[1][0], xs[3][CHUNK + 4], xs[5][2], xs[6][:] = np.nan, -np.inf, np.inf, 1e30, 0
    _, program = made(square_sums, [*map(jnp.asarray, arrays((40, 40, 40, CHUNK + 5, 3, 3, 2, 2)))])
    got = run(program, xs)
    with np.errstate(over="ignore"):
        wanted = np.concatenate([squares_of(x) for x in xs]).astype(np.float32)
    assert not np.isfinite(wanted[[0, 1, 4, 6]]).any() and np.isfinite(np.delete(wanted, [0, 1, 4, 6])).all()
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.more_with_cuda_compilers
def test_many_arrays_have_one_copy_of_the_code():
    """As many as a kernel has parameters for, with the registers that full occupancy leaves a thread."""
    operands = [((k, 1 << 15), "float32") for k in range(1, MOST)]
    sums = [ArraySum(None, (k,), 2 * (k + 1), CHUNK) for k in range(MOST - 1)]
    program = multi_tensor_sums(operands, sums)
    assert program is not None and multi_tensor_sums([*operands, ((2,), "float32")], sums) is None
    if compiler.available():
        return
    (launch,) = Image.unpack(compiler.compile_program(program, SM90).object_code).launches
    assert launch.resources.registers <= 40 and launch.resources.stack == 0
    assert compiler.ptx_of(program, SM90).count("ld.global.nc.v4") <= 8


def square():
    return programs.trace(lambda x: x * x, np.zeros(100, np.float32)).program()


def test_what_is_no_element_wise_function_of_one_array():
    def of(fn, *shapes):
        program = programs.trace(fn, *(np.zeros(shape, np.float32) for shape in shapes)).program()
        operands = [(shape, "float32") for shape in shapes]
        return multi_tensor_sums(operands, [ArraySum(program, tuple(range(len(shapes))), 1, 100)])

    assert of(lambda x: x * x, (100,)) is not None and of(lambda x: x * x, (10, 1, 10)) is not None
    assert of(lambda x, s: x * s, (100,), ()) is not None
    assert of(lambda x, y: x * y, (100,), (100,)) is None
    assert of(lambda x: x.T * 1.5, (4, 25)) is None
    assert of(lambda x, y: x * y, (10, 10), (10,)) is None
    assert of(lambda x: (x * x, x + 1), (100,)) is None
    assert of(lambda x: x.sum(0), (100, 2)) is None
    assert multi_tensor_sums([((100,), "float32")], [ArraySum(square(), (0,), 2, 100)]) is None
    assert multi_tensor_sums([((100,), "bfloat16")], [ArraySum(None, (0,), 1, 100)]) is None


def test_programs_of_nobody_are_refused():
    program = multi_tensor_sums([((100,), "float32")], [ArraySum(square(), (0,), 2, 64)])
    assert program is not None and partial_sums_of(program) is not None
    (phase,) = program.phases
    (store,) = phase.stores
    others = {
        "a store elsewhere": replace(phase, stores=(Store(store.buffer, store.address * 1 + 1, store.value),)),
        "another reduction": replace(phase, accs=(replace(phase.accs[0], combine="max"),)),
        "no guard": replace(
            phase, body=Graph([replace(n, guards=(), value=None) if n.op == "load" else n for n in phase.body.nodes])
        ),
        "unrolled": replace(phase, reds=(replace(phase.reds[0], unroll=2),)),
    }
    for name, other in others.items():
        with pytest.raises(CompileRejected, match="partial sums"):
            sums_shape(replace(program, phases=(other,)))
        assert partial_sums_of(replace(program, phases=(other,))) is None, name
    with pytest.raises(CompileRejected, match="threads"):
        sums_shape(replace(program, params=(("cuda", "partial_sums"), ("threads", 128))))
    odd = multi_tensor_sums([((100,), "float32")], [ArraySum(None, (0,), 2, 63)])
    with pytest.raises(CompileRejected, match="aligned"):
        sums_shape(odd)
