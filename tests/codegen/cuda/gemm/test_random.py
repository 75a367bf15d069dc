"""Random matrix products and dense convolutions through the PTX machine, against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.lower.patterns.gemm import as_gemm
from jcuts.schedule.gpu import candidates as gpu_candidates
from tests import programs
from tests.ops.cases import conv
from tests.ptx import machine as ptx_machine
from tests.ptx.tensor_core import round_tf32

MACHINE, SM90 = gpu_candidates.GpuMachine(132), CudaTarget((9, 0))
pytestmark = pytest.mark.cuda_compilers
SUMS = (
    "mk,kn->mn",
    "km,kn->mn",
    "mk,nk->mn",
    "bmk,bkn->bmn",
    "mbk,bkn->mbn",
    "bmk,kn->bmn",
    "bmk,bnk->bnm",
    "mak,akn->mn",
)
LAYOUTS = (("NHWC", "HWIO", "NHWC"), ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("NHWC", "OHWI", "NHWC"))
ENDS = (lambda y: y, lambda y: jax.nn.relu(y * 1.5 + 1), lambda y: (jnp.tanh(y), y + 2))


def random_product(rng):
    """A function of two arrays and their shapes."""

    def pick(low, high):
        return int(rng.integers(low, high + 1))

    end = ENDS[pick(0, 2)]
    if rng.random() < 0.4:
        equation = str(rng.choice(SUMS))
        extents = {"a": pick(1, 4), "b": pick(1, 3), "m": pick(1, 70), "n": pick(1, 70), "k": pick(8, 90)}
        shapes = [tuple(extents[c] for c in part) for part in equation.split("->")[0].split(",")]
        return lambda x, w: end(jnp.einsum(equation, x, w)), shapes
    layout = LAYOUTS[pick(0, 3)]
    params = {"strides": (pick(1, 2), pick(1, 2)), "dilation": (pick(1, 2), pick(1, 2)), "layout": layout}
    params["padding"] = [((pick(0, 2), pick(0, 2)), (pick(0, 2), pick(0, 2))), "SAME"][pick(0, 1)]
    channels = int(rng.choice([12, 16, 32, 48]))
    image = {"N": pick(1, 3), "C": channels, "H": pick(5, 12), "W": pick(5, 12)}
    filters = {"O": pick(1, 40), "I": channels, "H": pick(1, 3), "W": pick(1, 3)}
    shapes = [tuple(of[c] for c in names) for of, names in zip((image, filters), layout, strict=False)]
    return lambda x, w: end(conv(x, w, **params)), shapes


@pytest.mark.parametrize("seed", range(16))
def test_random_products(seed):
    rng = np.random.default_rng([7, seed])
    while True:
        fn, shapes = random_product(rng)
        arguments = [rng.standard_normal(s).astype(np.float32) for s in shapes]
        traced = programs.trace(fn, *arguments)
        program = traced.program()
        found = [p for p, _ in gpu_candidates.candidates(program, MACHINE, 8) if dict(p.params)["cuda"] == "product"]
        assert not found or as_gemm(program) is not None
        if found:
            break
    with jax.enable_x64(True):
        wide = [jnp.asarray(round_tf32(a).astype(np.float64)) for a in arguments]
        wanted = [np.asarray(x) for x in jax.tree.leaves(fn(*wide))]
    for candidate in {p.digest: p for p in (found[0], found[int(rng.integers(len(found)))])}.values():
        kernel = compiler.compile_program(candidate, SM90)
        results = ptx_machine.run_kernel(compiler.ptx_of(candidate, SM90), kernel, traced.operands())
        assert len(results) == len(wanted)
        for want in wanted:  # a program's results come in an order of its own
            scale = float(np.sqrt(np.mean(np.square(want)))) or 1.0
            errors = [np.abs(got - want).max() for got in results if got.shape == want.shape]
            assert min(errors) <= 5e-6 * scale, (shapes, candidate.params, min(errors) / scale)
