"""What the records take from jcuts: the only file of this folder that names jcuts' modules, classes and functions.

Where something is renamed or moved, this file follows and the records stay comparable.  Nothing of it is recorded by
its name: regions are equation numbers, programs are their JSON, code is text.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

# What plans functions, and what makes code of programs.
from jcuts import optimize
from jcuts.base import knobs
from jcuts.base.errors import JcutsError
from jcuts.base.settings import Settings, Variant
from jcuts.codegen.cpu import compile as cpu_compile
from jcuts.codegen.cpu import emit as cpu_emit
from jcuts.codegen.cuda import compile as cuda_compile
from jcuts.codegen.cuda.launch_source import emit_source as emit_launch
from jcuts.codegen.cuda.split_kernels import split_into_kernels
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.jit import variant_space
from jcuts.kernel_ir.program import Program
from jcuts.pipeline import computation, inplace_update, kernel_selection, passes
from jcuts.pipeline.outcome import Outcome
from jcuts.report.function_report import FunctionReport
from jcuts.schedule.cpu import candidates as cpu_candidates
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.machine import GpuMachine
from jcuts.trace import jaxapi
from jcuts.trace.canonical import canonical_digest
from jcuts.tune import session
from jcuts.tune.choice import LIBRARY, Choice, Measurement
from jcuts.tune.database import Store
from jcuts.xla import devices as xla_devices

CPU = "cpu"
GPUS = {(9, 0): "H200", (8, 0): "A100"}
"""The GPUs that are planned for, by compute capability."""
PLAIN = Variant()


# -- targets ----------------------------------------------------------------------------------------------------------
def capability_of(target: str) -> tuple[int, int] | None:
    """Compute capability of a target such as ``sm_90``; None for the CPU."""
    if target == CPU:
        return None
    major, minor = divmod(int(target.removeprefix("sm_")), 10)
    return major, minor


def why_not(target: str) -> str:
    """Why no code can be made for a target here, or ''."""
    return "" if target == CPU else cuda_compile.available()


@contextlib.contextmanager
def acting_as(target: str) -> Iterator[None]:
    """Plans are made for a target; for a GPU that is absent, and nothing is measured."""
    found = capability_of(target)
    here = [
        mock.patch.object(passes, "unusable", lambda platform: ""),
        mock.patch.object(session, "tune_problems", lambda *_, **__: session.TunedChoices({}, {})),
        mock.patch.object(session, "resolve", _resolve),
        mock.patch.object(kernel_selection, "_store_partition", lambda *_: None),
        knobs.scope(raise_errors=True, compile_workers=8),
    ]
    if found is not None:
        one = xla_devices.Gpu("absent", found, GpuMachine.named(GPUS[found]).sms)
        here.append(mock.patch.object(xla_devices, "this", lambda: one))
    with contextlib.ExitStack() as stack:
        for context in here:
            stack.enter_context(context)
        yield


# -- planning ---------------------------------------------------------------------------------------------------------
def begin() -> None:
    """Forgets what is kept of other functions; plans of one function share what they have in common."""
    passes.forget()
    computation._rankings.clear()
    computation._grouped.clear()


def trace(fn: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """The closed jaxpr of a function."""
    return jaxapi.closed_jaxpr_of(fn, *arguments)


def identity(closed: Any) -> str:
    """Digest of a closed jaxpr's canonical text."""
    return str(canonical_digest(closed))


def settings_of(closed: Any, target: str, modes: Sequence[str]) -> dict[str, Any]:
    """What is planned: each mode, and on a GPU every form that a first call would plan (in ``mixed`` mode)."""
    found: dict[str, Any] = {}
    for mode in modes:
        found[mode] = Settings(mode=mode)
    if target != CPU and "mixed" in modes:
        del found["mixed"]
        for form in variant_space.candidate_variants(closed, "cuda"):
            found[f"mixed {form if form is not None else PLAIN}".strip()] = Settings(mode="mixed", form=form)
    return found


def plan(closed: Any, settings: Any, target: str) -> dict[str, Any]:
    """The regions of a function, as a first call would tune them; call within `acting_as`.

    The search for the best cover sees made-up times (`_seconds`) instead of measured ones, so that it goes on as it
    would with a clock, to the same end each time.

    Returns: ``levels``, one for the function and for each body in it: its regions with their programs, and what is
    left to XLA.  ``asked``: the regions that were tuned on the way, others of the same equations among them.
    """
    _asked.clear()
    chosen = 1 + [p.name for p in passes.PASSES].index("prepare")  # what follows compiles
    with mock.patch.object(session, "_store", Store(None, device="none", versions="1")):
        platform = CPU if target == CPU else "cuda"
        started = passes.start_planning(closed, settings, platform=platform, may_measure=True)
        top = passes.run(started._state, passes.PASSES[passes.COLLECTED : chosen]).top
    everywhere = top.walk()
    return {
        "levels": [_level(level, target) for level in everywhere],
        "asked": [_region(subset, None) for subset in _asked.values()],
    }


_asked: dict[tuple[Any, ...], Any] = {}
"""Regions that were to be tuned since the last plan began."""


def _resolve(collected: Any, _: Any) -> None:
    """Stands in for `session.resolve`: the first candidate wins, with a time that its program determines."""
    for subset in collected.regions:
        _asked.setdefault((tuple(sorted(subset.members)), program_digest(subset.program)), subset)
        subset.equivalence_share = collected.shares[subset.identity]
        if not subset.ranked:
            continue
        times = [Measurement(name, s, s, s, 5, "loop") for name, s in _seconds(subset)]
        winner = min(times, key=lambda t: t.seconds)
        subset.choice = Choice("none", winner.label, "none", "measured", tuple(times))
        subset.chosen, subset.origin = (None if winner.label == LIBRARY else subset.ranked[0][0]), "measured"


def _seconds(subset: Any) -> list[tuple[str, float]]:
    """Made-up times of a region: of XLA, and of the first candidate, between half and twice that."""
    program = subset.ranked[0][0]
    moved = sum(buffer.bytes for buffer in program.buffers if buffer.role != "local")
    base = 1e-6 + 1e-12 * moved
    factor = 0.5 + 1.5 * int(program_digest(program)[:6], 16) / 0xFFFFFF
    return [(LIBRARY, 1.2 * base), ("kernel", base * factor)]


def _level(level: Any, target: str) -> dict[str, Any]:
    left = Counter(f"{refusal.op}: {refusal.reason}" for refusal in level.left_out.values())
    return {
        "identity": identity(level.closed),
        "equations": [jaxapi.primitive_name(eqn) for eqn in level.closed.jaxpr.eqns],
        "regions": [_region(subset, level if target != CPU else None) for subset in level.subsets],
        "left": dict(sorted(left.items())),
    }


def _region(subset: Any, level: Any) -> dict[str, Any]:
    more = [p for p in inplace_update.programs(level, subset) if p is not subset.chosen] if level is not None else []
    return {
        "members": sorted(subset.members),
        "operations": [e.primitive.name for e in subset.closed.jaxpr.eqns],
        "identity": subset.identity,
        "program": subset.program,
        "chosen": subset.chosen,
        "share": getattr(subset, "equivalence_share", 0),
        "ranked": list(subset.ranked),
        "placed": more,
    }


def every_schedule(program: Any, target: str, limit: int) -> list[tuple[Any, float]]:
    """All schedules of a program with their scores, best first; the program itself where it has its schedule."""
    if "cuda" in dict(program.params):
        return [(program, 1.0)] if target != CPU else []
    found = capability_of(target)
    if found is None:
        return list(cpu_candidates.candidates(program, computation.machine(), limit))
    return list(gpu_candidates.candidates(program, GpuMachine.named(GPUS[found]), limit))


def refusal_of(error: Exception) -> str | None:
    """The first line of an error that jcuts raises on purpose, None for any other one."""
    return str(getattr(error, "message", error)).splitlines()[0] if isinstance(error, JcutsError) else None


@contextlib.contextmanager
def recording(into: list[Any]) -> Iterator[Callable[..., Any]]:
    """A decorator that is ``jcuts.optimize``, whose programs are left to XLA; their jaxprs go into the list."""

    def kept(closed: Any, *_: Any, **__: Any) -> Any:
        into.append(closed)
        return Outcome(closed, FunctionReport("function", "mixed", CPU, notes=("only recorded",)))

    with mock.patch.object(passes, "optimize_jaxpr", kept):
        yield functools.partial(optimize, tune="off")


# -- programs ---------------------------------------------------------------------------------------------------------
def is_program(value: Any) -> bool:
    """Whether this is a kernel program."""
    return isinstance(value, Program)


def program_text(program: Any) -> str:
    """A program as JSON text without its name, which is no part of the kernel."""
    data = program.to_json()
    data.pop("name")
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def program_digest(program: Any) -> str:
    """Digest of `program_text`."""
    return str(program.digest)[:20]


def program_from(text: str) -> Any:
    """The inverse of `program_text`."""
    return Program.from_json({**json.loads(text), "name": "kernel"})


def kind_of(program: Any) -> str:
    """Template and form of a scheduled program."""
    form = dict(program.params).get("cuda", "")
    return f"{program.template}/{form}" if form else str(program.template)


def parameters(program: Any) -> list[str]:
    """Names of a schedule's parameters: a kind of schedule, where values are left out."""
    return [name for name, _ in program.params]


def described(program: Any) -> str:
    """A scheduled program in one readable line."""
    params = " ".join(f"{k}={v}" for k, v in program.params)
    tiles = "; ".join(
        ",".join(f"{x.name}:{x.extent}/{x.unroll}{'v' if x.vector else ''}" for x in (*phase.axes, *phase.reds))
        for phase in program.phases[:3]
    )
    types = ",".join(dict.fromkeys(b.dtype for b in program.buffers))
    return f"{program.template} {types} [{params}] lanes {program.lanes} {tiles}"


# -- code -------------------------------------------------------------------------------------------------------------
def code_of(program: Any, target: str) -> dict[str, str]:
    """The texts of a scheduled program: what the code generators write, and what the compilers make of it.

    Raises: errors for which `refusal_of` has a text, where a schedule is refused.
    """
    found = capability_of(target)
    if found is None:
        return {"source": cpu_emit.emit_source(program).text, "llvm": cpu_compile.llvm_of(program)}
    pieces, scratch = split_into_kernels(program)
    text = [f"# {scratch} bytes of scratch memory"]
    for piece in pieces:
        source = emit_launch(piece.program)
        launch = (source.blocks, source.threads, source.shared, source.cluster, source.least)
        text.append(f"# launch {launch}, arguments {piece.arguments}\n{source.text}")
    return {"source": "\n".join(text), "ptx": cuda_compile.ptx_of(program, CudaTarget(found))}
