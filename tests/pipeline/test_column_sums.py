"""A training step planned for a GPU: convolutions that take over the sums of batch norms, and the rebuilt program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.settings import Settings
from jcuts.kernel_ir.interpret import interpret
from jcuts.pipeline import computation, kernel_selection, partition_store, rebuild
from jcuts.pipeline import passes as pipeline_passes
from jcuts.rewrite.backward.separate_deviations import separate_deviations
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.trace import jaxapi
from jcuts.tune import session
from jcuts.xla import devices as xla_devices
from jcuts.xla.rebuild import traced_eqns
from tests.fusion.test_match_column_sums import loss

AUTO = Settings()


def arguments():
    rng = np.random.default_rng(0)
    normal = lambda *s: rng.standard_normal(s).astype(np.float32)  # noqa: E731
    ones, zeros = np.ones(64, np.float32), np.zeros(64, np.float32)
    weights = [(normal(3, 3, 32, 64) / 17, ones, zeros), (normal(1, 1, 64, 64) / 8, ones, zeros)]
    return weights, normal(4, 6, 7, 32), normal(4, 6, 7, 64)


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(xla_devices, "machine", lambda: gpu_candidates.GpuMachine(132, capability=(9, 0)))
    monkeypatch.setattr(xla_devices, "this", lambda: xla_devices.Gpu("H100", (9, 0), 132))
    monkeypatch.setattr(pipeline_passes.xla_devices, "unusable", lambda: "")


@pytest.fixture
def rebuilt(on_gpu, monkeypatch):
    """What the passes make of a function whose column sums are kernels, all else XLA's; kernels are interpreted."""
    calls = []

    def eqns(program, inputs, outputs, like, place=None, aliases=None):
        calls.append(program)
        types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in outputs]
        run = lambda *xs: tuple(interpret(program, [np.asarray(x) for x in xs]))  # noqa: E731
        return traced_eqns(lambda *xs: list(jax.pure_callback(run, tuple(types), *xs)), inputs, outputs, like)

    def choose_partition(top, settings, platform):
        for level in top.walk():
            computation.add_candidates(level.subsets, platform)
        return kernel_selection.Partition(top, settings, platform)

    def resolve(partition, problems, choices):
        for subset in partition.regions:
            subset.chosen = subset.ranked[0][0] if subset.program.template == "column_sums" else None

    monkeypatch.setattr(rebuild, "kernel_for", lambda program: program)
    monkeypatch.setattr(rebuild, "kernel_eqns", eqns)
    monkeypatch.setattr(kernel_selection, "choose_partition", choose_partition)
    monkeypatch.setattr(kernel_selection, "resolve", resolve)

    def make(function, *args):
        pipeline_passes.forget()
        closed = jaxapi.closed_jaxpr_of(function, *args)
        settings = Settings(tune="off")
        outcome = pipeline_passes.optimize_jaxpr(closed, settings, platform="cuda", may_measure=False)
        pipeline_passes.forget()
        jaxapi.check(outcome.closed)
        return outcome.closed, calls

    return make


def test_the_rebuilt_step_computes_the_same(rebuilt):
    step, given = jax.value_and_grad(loss), arguments()
    closed, calls = rebuilt(step, *given)
    assert len(calls) == 3  # two convolutions forward, the data gradient between them
    assert [dict(program.params)["sums"] for program in calls][:2] == [2, 2]
    got = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *jax.tree.leaves(given))
    for one, want in zip(got, jax.tree.leaves(step(*given)), strict=True):
        np.testing.assert_allclose(one, want, rtol=2e-3, atol=2e-4 * float(jnp.abs(want).max()))


def test_regions_become_problems_and_a_stored_partition(on_gpu, monkeypatch):
    from tests.pipeline.test_kernel_selection import Measured

    def level():
        pipeline_passes.forget()
        state = jaxapi.closed_jaxpr_of(jax.value_and_grad(loss), *arguments())
        closed = separate_deviations(pipeline_passes.simplify(pipeline_passes.inline(state)))
        return computation.group(closed, AUTO, computation.Fuel(), "cuda")

    made: list[str] = []

    def measured(problems, choices):
        for subset in problems.regions:
            subset.chosen, subset.choice = subset.ranked[0][0], Measured(1.0)
            made.append(subset.program.template)

    monkeypatch.setattr(session, "tune_problems", lambda problems, *, may_measure: {})
    monkeypatch.setattr(session, "resolve", measured)
    top = level()
    partition = kernel_selection.choose_partition(top, AUTO, "cuda")
    problems = kernel_selection.collect_problems(partition)
    kernel_selection.resolve(partition, problems, {})
    assert made.count("column_sums") == 3
    sums = [s for s in top.subsets if s.program.template == "column_sums"]
    for subset in sums:
        problem = problems.problems[subset.identity]
        assert dict(problem.schedules).keys() == {"conv", "gemm", "reduction"} and problem.expected > 1
        assert len(problem.outputs) == len(subset.program.outputs)
    again = level()
    assert partition_store.from_json(again, partition_store.load_partition(top))
    assert [s.program for s in again.subsets] == [s.program for s in top.subsets]
