"""Kernels that take over the update of an array in place: which do, and what the program is then."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.base.errors import NativeError
from jcuts.base.settings import Settings, Variant
from jcuts.codegen.cuda import compile as compiler
from jcuts.pipeline import computation, kernel_selection, rebuild
from jcuts.pipeline import passes as pipeline_passes
from jcuts.rewrite import inplace_concat
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.trace import jaxapi
from jcuts.xla import cuda_launcher
from jcuts.xla import devices as xla_devices
from jcuts.xla.rebuild import traced_eqns
from tests.codegen.cuda.gemm.test_mma import SM90, compiled
from tests.ptx import machine as ptx_machine
from tests.rewrite.test_inplace_concat import inception

RNG = np.random.default_rng(8)
NUMBERS = ("NHWC", "HWIO", "NHWC")


def values(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


START = values(16, 16)
W = [values(3, 3, 16 + 8 * k, 8) for k in range(3)]


def block(x):
    """Three layers behind a product."""
    return block_of(jax.nn.relu(x @ START))


def block_of(x):
    """Three layers, each of which reads all before it."""
    for w in W:
        y = jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NUMBERS))
        x = jnp.concatenate([x, y], -1)
    return x * 2


@pytest.fixture
def rebuilt(monkeypatch):
    """What `pipeline` makes of a function for a GPU on which every subset takes its first kernel."""
    calls = []

    def eqns(kernel, inputs, outputs, like, place=None, aliases=None):
        calls.append((kernel, place, [v.aval.shape for v in inputs], [v.aval.shape for v in outputs]))
        avals = [v.aval for v in outputs]
        return traced_eqns(
            lambda *xs: [jnp.zeros(a.shape, a.dtype) + jnp.sum(xs[-1]).astype(a.dtype) for a in avals],
            inputs,
            outputs,
            like,
        )

    def choose_partition(top, settings, platform):
        for level in top.walk():
            computation.add_candidates(level.subsets, platform)
        return kernel_selection.Partition(top, settings, platform)

    def resolve(partition, problems, choices):
        for subset in partition.regions:
            subset.chosen = subset.ranked[0][0] if subset.ranked and subset.inputs else None

    monkeypatch.setattr(xla_devices, "machine", lambda: gpu_candidates.GpuMachine(132, capability=(9, 0)))
    monkeypatch.setattr(xla_devices, "this", lambda: xla_devices.Gpu("H200", (9, 0), 132))
    monkeypatch.setattr(pipeline_passes.xla_devices, "unusable", lambda: "")
    monkeypatch.setattr(rebuild, "kernel_for", lambda program: program)
    monkeypatch.setattr(rebuild, "kernel_eqns", eqns)
    monkeypatch.setattr(kernel_selection, "choose_partition", choose_partition)
    monkeypatch.setattr(kernel_selection, "resolve", resolve)

    def make(function, *args, form=("slots",)):
        closed = jaxapi.closed_jaxpr_of(function, *args)
        pipeline_passes.forget()
        computation._rankings.clear()
        outcome = pipeline_passes.optimize_jaxpr(
            closed, Settings(form=Variant(form), tune="off"), platform="cuda", may_measure=False
        )
        pipeline_passes.forget()
        computation._rankings.clear()
        jaxapi.check(outcome.closed)
        return outcome, calls

    return make


def names(closed):
    return [jaxapi.primitive_name(e) for e in closed.jaxpr.eqns]


def test_layers_of_a_dense_block_write_into_its_array(rebuilt):
    outcome, calls = rebuilt(block, values(2, 6, 6, 16))
    left = names(outcome.closed)
    assert not {"dynamic_update_slice", "concatenate", "pad"} & set(left)
    places = [place for _, place, _, _ in calls if place is not None]
    assert places == [(None, 0), (0, 64), (0, 96), (0, 128)]  # the first begins the array, all others read it as well
    for kernel, place, inputs, outputs in calls:
        if place is not None:
            assert outputs == [(2, 6, 6, 40)] and kernel.outputs[0].shape == (2, 6, 6, 40)
            assert len(inputs) == len(kernel.inputs) and (place[0] is None or inputs[place[0]] == (2, 6, 6, 40))
    assert "kernels write 4 results into the arrays that they become part of" in outcome.report.notes
    assert not any(r.op == "dynamic_update_slice" for r in outcome.report.refusals)


def test_an_array_that_is_an_argument_is_copied_once(rebuilt):
    outcome, calls = rebuilt(lambda x: jnp.exp(block_of(x)), values(2, 6, 6, 16))
    assert [place for _, place, _, _ in calls if place is not None] == [(2, 64), (0, 96), (0, 128), (None, 0)]
    assert any("kernels write 3 results" in n and "copy 1 there" in n for n in outcome.report.notes)


def test_zeros_that_somebody_reads_are_written(rebuilt):
    """An array that begins as zeros and is not full when it is read, or read beside an update, or its own part."""

    def zeros():
        return jnp.zeros((64, 32), jnp.float32)

    def put(array, part, start):
        return lax.dynamic_update_slice(array, part, (0, start))

    def not_full(x):
        return jnp.sin(put(zeros(), x @ W[0][0, 0], 8))

    def a_slice_too_wide(x):
        first = put(zeros(), x @ W[0][0, 0], 0)
        return put(put(first, first[:, 4:12] * 2, 8), x, 16)

    def twice(x):
        array = x[:, :1] * 0 + zeros()
        return put(array, x @ W[0][0, 0], 8), array

    def full(x):
        return put(put(put(zeros(), x @ W[0][0, 0], 8), x[:, :8], 0), x, 16)

    for function, expected in ((not_full, 0), (a_slice_too_wide, 0), (twice, 0), (full, 1)):
        _, calls = rebuilt(function, values(64, 16), form=())
        assert sum(place is not None and place[0] is None for _, place, _, _ in calls) == expected
        calls.clear()


def test_a_full_array_may_be_updated_where_nobody_knows(rebuilt, monkeypatch):
    monkeypatch.setattr(inplace_concat, "LEAST_BYTES", 1)

    def function(x, k):
        both = jnp.concatenate([x @ W[0][0, 0], x @ W[0][1, 0]], -1)
        return lax.dynamic_update_slice(both, jnp.sin(x[:, :4]), (0, k))

    outcome, calls = rebuilt(function, values(64, 16), np.int32(3))
    assert names(outcome.closed).count("dynamic_update_slice") == 1
    assert [place for _, place, _, _ in calls if place is not None] == [(None, 0), (2, 32)]


def test_an_update_that_is_not_known_or_used_elsewhere_stays(rebuilt):
    def moving(array, x, k):
        y = x @ W[0][0, 0]
        return lax.dynamic_update_slice(array, y, (0, k))

    def twice(array, x):
        y = x @ W[0][0, 0]
        return lax.dynamic_update_slice(array, y, (0, 4)), y

    def of_itself(array):
        y = array[:, :16] @ W[0][0, 0]
        return lax.dynamic_update_slice(array, y, (0, 12))

    x, array = values(64, 16), values(64, 32)
    for function, args in ((moving, (array, x, np.int32(4))), (twice, (array, x)), (of_itself, (array,))):
        outcome, calls = rebuilt(function, *args, form=())
        assert "dynamic_update_slice" in names(outcome.closed)
        assert all(place is None for _, place, _, _ in calls)


def test_a_line_of_a_cache_is_written_at_a_position_that_is_an_argument(rebuilt):
    def append(cache, x, k):
        zero = jnp.zeros_like(k)
        return lax.dynamic_update_slice(cache, (x @ START).reshape(1, 4, 16), (zero, k, zero))

    cache, x = values(1, 64, 16), values(4, 16)
    for position in (np.int32(3), np.int64(3)):
        with jax.enable_x64(True):
            outcome, calls = rebuilt(append, cache, x, position, form=())
        assert "dynamic_update_slice" not in names(outcome.closed)
        ((kernel, place, inputs, outputs),) = [call for call in calls if call[1] is not None]
        assert place == (len(inputs) - 2, 0) and inputs[-2:] == [(1, 64, 16), ()] and outputs == [(1, 64, 16)]
        offset = kernel.outputs[0].offset
        assert (offset.limit, offset.stride) == (60, 16) and kernel.inputs[-1].dtype == position.dtype.name
        calls.clear()


def test_positions_without_a_kernel_stay_with_xla(rebuilt):
    """A type that is not known, a part of two dimensions, an array that the kernel reads."""

    def append(cache, x, *k):
        return lax.dynamic_update_slice(cache, (x @ START)[None], k)

    def of_itself(cache, k):
        return lax.dynamic_update_slice(cache, (cache[0, :4] @ START)[None], (0, k, 0))

    cache, x, zero = values(1, 64, 16), values(4, 16), np.uint32(0)
    wide = values(1, 64, 32), x, np.int32(0), np.int32(1), np.int32(2)
    for function, args in (
        (append, (cache, x, zero, np.uint32(1), zero)),
        (append, wide),
        (of_itself, (cache, np.int32(1))),
    ):
        outcome, calls = rebuilt(function, *args, form=())
        assert "dynamic_update_slice" in names(outcome.closed)
        assert all(place is None for _, place, _, _ in calls)


def test_a_kernel_that_cannot_be_made_in_place_runs_beside_the_update(rebuilt, monkeypatch):
    def kernel_for(program):
        if any(b.name == "onto" for b in program.buffers):
            raise NativeError("too many registers")
        return program

    monkeypatch.setattr(rebuild, "kernel_for", kernel_for)
    outcome, calls = rebuilt(
        lambda a, x: lax.dynamic_update_slice(a, x @ W[0][0, 0], (0, 8)), values(64, 32), values(64, 16), form=()
    )
    assert "dynamic_update_slice" in names(outcome.closed)
    assert [(place, outputs) for _, place, _, outputs in calls] == [(None, [(64, 8)])]
    assert not any("kernels write" in note for note in outcome.report.notes)


def test_an_update_that_the_program_has_is_taken_over_as_well(rebuilt):
    outcome, calls = rebuilt(
        lambda a, x: lax.dynamic_update_slice(a, x @ W[0][0, 0], (0, 8)), values(64, 32), values(64, 16), form=()
    )
    assert "dynamic_update_slice" not in names(outcome.closed)
    assert [place for _, place, _, _ in calls] == [(2, 32)]


def test_xla_copies_no_array_that_kernels_update(rebuilt, monkeypatch):
    """Custom calls in the place of kernels, compiled by XLA: all that is left are the calls."""
    monkeypatch.setattr(inplace_concat, "LEAST_BYTES", 1)

    def call(kernel, inputs, outputs, like, place=None, aliases=None):
        results = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in outputs]
        aliases = None if place is None or place[0] is None else {place[0]: 0}
        ffi = jax.ffi.ffi_call(cuda_launcher.KEEP, results, input_output_aliases=aliases)
        return traced_eqns(lambda *xs: ffi(*xs), inputs, outputs, like)

    monkeypatch.setattr(rebuild, "kernel_eqns", call)
    for function, width in ((inception(16), 16), (block, 16)):
        outcome, _ = rebuilt(function, values(1, 6, 6, width), form=("dots", "pools", "siblings", "slots"))
        cuda_launcher._register(cuda_launcher.KEEP, "cpu")
        found = jax.jit(lambda *xs, c=outcome.closed: jaxapi.eval_closed(c, *xs)).lower(values(1, 6, 6, width))
        text = found.compile().as_text() or ""
        assert text.count(" custom-call(") >= 4 and " copy(" not in text and "dynamic-update-slice" not in text


@compiled
@pytest.mark.parametrize("function", [inception(16), block], ids=["inception", "dense"])
def test_an_array_of_nan_gives_right_results(function, rebuilt, monkeypatch):
    """All kernels run on the PTX machine; what a kernel that begins an array does not write is NaN."""
    monkeypatch.setattr(inplace_concat, "LEAST_BYTES", 1)
    ran = []

    def execute(program, place, *operands):
        operands = [np.asarray(x) for x in operands]
        kernel, ptx = compiler.compile_program(program, SM90), compiler.ptx_of(program, SM90)
        ran.append(place)
        if place is None:
            return tuple(ptx_machine.run_kernel(ptx, kernel, operands))
        shape, dtype = kernel.outputs[0]
        array = np.full(shape, np.nan, dtype) if place[0] is None else operands[place[0]]
        return tuple(ptx_machine.run_kernel(ptx, kernel, operands, start=place[1], array=array))

    def call(kernel, inputs, outputs, like, place=None, aliases=None):
        results = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in outputs]
        run = functools.partial(execute, kernel, place)
        return traced_eqns(lambda *xs: jax.pure_callback(run, tuple(results), *xs), inputs, outputs, like)

    monkeypatch.setattr(rebuild, "kernel_eqns", call)
    x = values(1, 6, 6, 16)
    outcome, _ = rebuilt(function, x, form=("dots", "pools", "siblings", "slots"))
    (result,) = jaxapi.eval_closed(outcome.closed, x)
    exact = np.asarray(jax.jit(function)(x), np.float64)
    assert (None, 0) in ran and sum(p is not None and p[0] is not None for p in ran) == 3
    assert np.abs(np.asarray(result) - exact).max() < 1e-2 * np.abs(exact).max()
