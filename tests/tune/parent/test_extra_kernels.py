"""Kernels that a plan needs besides those that were tuned, compiled by the processes of a session."""

from __future__ import annotations

import dataclasses
import types
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base import knobs
from jcuts.base.errors import CompileRejected
from jcuts.base.settings import Settings, Variant
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.kernel_ir.program import Program
from jcuts.pipeline import computation, inplace_update, kernel_selection
from jcuts.rewrite.registry import rewritten
from jcuts.rewrite.simplify import simplify
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from jcuts.tune import session
from jcuts.tune.database import Store
from jcuts.tune.parent import extra_kernels
from jcuts.tune.parent.worker_session import shared_worker_session
from jcuts.tune.problem import Output, Problem
from jcuts.tune.select import keep_xla
from jcuts.xla import devices as xla_devices
from jcuts.xla import kernel_cache
from tests.pipeline.test_inplace_update import block_of

SETTINGS = Settings(form=Variant(("slots",)))


@pytest.fixture
def level(monkeypatch, tmp_path):
    """A dense block whose layers write into its array, for a GPU that is not here."""
    monkeypatch.setattr(xla_devices, "machine", lambda: gpu_candidates.GpuMachine(132, capability=(9, 0)))
    monkeypatch.setattr(xla_devices, "this", lambda: xla_devices.Gpu("H200", (9, 0), 132))
    monkeypatch.setattr(xla_devices, "target", lambda: CudaTarget((9, 0)))
    monkeypatch.setattr(kernel_cache, "_kernels", {})
    monkeypatch.setattr(computation, "_rankings", {})
    monkeypatch.setattr(session, "_store", Store(None, device="test", versions="1"))
    x = jnp.asarray(np.ones((2, 6, 6, 16)), jnp.float32)
    closed = rewritten(simplify(inline(jaxapi.closed_jaxpr_of(block_of, x))), ("slots",)).closed
    with knobs.scope(cache_dir=tmp_path / "cache", compile_workers=4):
        yield computation.group(closed, SETTINGS, computation.Fuel(), "cuda")


@pytest.mark.cuda_compilers
def test_processes_of_a_session_compile_what_writes_into_larger_arrays(level, monkeypatch):
    computation.add_candidates(level.subsets, "cuda")
    for subset in level.subsets:
        subset.chosen = subset.ranked[0][0] if subset.ranked and subset.inputs else None
    wanted = [p for subset in level.subsets for p in inplace_update.programs(level, subset)]
    changed = [p for p in wanted if p not in [s.chosen for s in level.subsets]]
    assert len(changed) >= 3
    extra_kernels.compile_kernels(wanted)  # nobody is at hand
    assert len(kernel_cache.missing(wanted)) == len({p.digest for p in wanted})
    spoilt = dataclasses.replace(wanted[0], params=tuple((k, v) for k, v in wanted[0].params if k != "threads"))
    with shared_worker_session() as shop:
        extra_kernels.compile_kernels(wanted)  # none is at hand that compiles for GPUs
        assert kernel_cache.missing(wanted)
        shop.pool("cuda", 4)
        extra_kernels.compile_kernels([*wanted, spoilt])
    monkeypatch.setattr(compiler, "compile_program", None)  # nobody compiles anything in this process
    assert not kernel_cache.missing(wanted)
    for program in wanted:
        made = kernel_cache.kernel_for(program)
        assert made.inputs == tuple((b.shape, b.dtype) for b in program.inputs) and made.object_code


@pytest.mark.more_with_cuda_compilers
def test_what_does_not_compile_is_not_compiled_again(level, monkeypatch):
    computation.add_candidates(level.subsets, "cuda")
    program = next(s.ranked[0][0] for s in level.subsets if s.ranked)
    monkeypatch.setattr(kernel_cache.object_cache, "fetch", lambda digest: None)
    monkeypatch.setattr(kernel_cache, "_compiler_of", lambda program: (program.digest, None))

    class Refusing:
        def submit(self, group, request, timeout, done):
            done(CompileRejected("spills"))

    assert extra_kernels.submit_extra_kernels(Refusing(), [program, program]) == [program]
    assert extra_kernels.submit_extra_kernels(Refusing(), [program]) == []
    with pytest.raises(CompileRejected, match="spills"):
        kernel_cache.kernel_for(program)


def test_a_session_compiles_ahead_each_program_once(level, monkeypatch):
    computation.add_candidates(level.subsets, "cuda")
    first, second = [s.ranked[0][0] for s in level.subsets if s.ranked][:2]
    monkeypatch.setattr(kernel_cache, "missing", list)
    asked = []

    class Pool:
        def submit(self, group, request, timeout, done):
            asked.append(Program.from_json(request["program"]).digest)

        def poll(self):
            asked.append("handed out")

    shop = types.SimpleNamespace(ahead=set(), pool=lambda platform, workers: Pool())
    extra_kernels.compile_ahead(shop, [first])
    extra_kernels.compile_ahead(shop, [first, second])
    extra_kernels.compile_ahead(shop, [second])
    assert asked == [first.digest, "handed out", second.digest, "handed out"]


def test_a_session_knows_which_programs_choices_need(level, monkeypatch):
    asked = {}

    def tune(problems, store, *, further=None, **_):
        asked.update({p.digest: p for p in problems})
        if further is not None:
            asked["further"] = further
        return {p.digest: keep_xla(p) for p in problems}

    monkeypatch.setattr(session, "tune", tune)
    monkeypatch.setattr(session.store(), "lookup", lambda digest: "known")  # no process starts to import anything
    partition = kernel_selection.choose_partition(level, SETTINGS, "cuda")
    session.tune_together([kernel_selection.collect_problems(partition)])
    further = asked.pop("further")
    found = 0
    for digest in asked:
        subset = next(s for s in level.subsets if s.identity == asked[digest].identity)
        program = subset.ranked[0][0]
        programs = further(digest, program)
        assert programs == inplace_update.programs(level, subset, program)
        found += programs != [program]
    assert further("another", program) == []
    assert found >= 3


def test_convolutions_and_others_take_turns():
    one = Problem("p", (), (Output((1,), "float32"),), space="s", device="a GPU")
    given = [replace(one, identity=str(k), text="conv_general_dilated" if k < 6 else "dot_general") for k in range(9)]
    assert [p.identity for p in session.interleave_conv_problems(given)] == [
        "0",
        "6",
        "1",
        "2",
        "7",
        "3",
        "4",
        "8",
        "5",
    ]
    assert session.interleave_conv_problems(given[:3]) == given[:3] and session.interleave_conv_problems([]) == []
