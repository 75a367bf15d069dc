"""The pass manager and pass list of the compiler: closed jaxpr in, closed jaxpr with custom calls out.

    inline      flat jaxpr: no calls, no dead code, constants known   trace/inline.py, rewrite/simplify.py
    logits      logits of a softmax loss in chunks of tokens          chunk_logits.py, rewrite/cross_entropy/
    rewrite     the variant's rewrites, by name; of training steps    rewrite/registry.py, rewrite/backward/registry.py
    chunk       the batch in chunks where caches are too small        batch_chunking.py, rewrite/chunk_batch.py
    divide      convolutions by cuDNN under a workspace limit         microbatch_convs.py
    group       def-use graph -> regions with unscheduled programs    computation.py, fusion/greedy.py, lower/region.py
    partition   the stored partition, or what the variant's is        kernel_selection.py, partition_store.py
    collect     the tuning problems of its regions                    kernel_selection.py, tune/session.py
    tune        a choice for every problem: stored, or measured now   tune/parent/tuner.py
    resolve     every region's winner                                 kernel_selection.py
    search      better partitions by measured times                   measured_partition.py, fusion/partition_space.py
    prepare     kernels for weights that are arguments (GPU)          weight_prep.py
    compile     winners -> object code                                rebuild.py, xla/kernel_cache.py
    rebuild     jaxpr with calls of the winners                       rebuild.py, xla/rebuild.py
    restore     1x1 convolutions whose products no kernel took        restore_convs.py, rewrite/pointwise_conv.py
    chain       one call for kernels that follow each other, for      rebuild.py, xla/chains/fuse.py,
                loops over such (CPU)                                 xla/chains/loop.py

Bodies of scan, while and cond go through the same list; all their regions are tuned in one session.  A new pass is one
entry of `PASSES`; what it took, its dumps and its verifier come from `run`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jcuts.arch.chosen import chosen_cpu
from jcuts.base import collector, keys
from jcuts.base.dump import open_dump
from jcuts.base.errors import UsageError
from jcuts.base.settings import Settings, Variant
from jcuts.kernel_ir.printer import program_text
from jcuts.kernel_ir.program import Program
from jcuts.kernel_ir.run import to_json as programs_json
from jcuts.pipeline import (
    batch_chunking,
    chunk_logits,
    inplace_update,
    kernel_selection,
    loop_bodies,
    microbatch_convs,
    rebuild,
    report_rows,
    restore_convs,
    weight_prep,
)
from jcuts.pipeline.computation import Computation, Fuel, group
from jcuts.pipeline.outcome import Outcome
from jcuts.pipeline.state import DumpedStage, Pass, State, nothing
from jcuts.pipeline.verify import verify_jaxpr, verify_partition, verify_programs, verify_winners
from jcuts.report.function_report import FunctionReport
from jcuts.rewrite.backward.registry import backward_rewrites
from jcuts.rewrite.registry import Rewritten, rewritten
from jcuts.rewrite.simplify import simplify
from jcuts.rewrite.splat_constants import splat_constants
from jcuts.schedule.cpu.bound import host_arch
from jcuts.trace import jaxapi
from jcuts.trace.canonical import canonical_digest
from jcuts.trace.inline import inline
from jcuts.trace.runnable import runnable_files
from jcuts.trace.source import as_source
from jcuts.tune import session, time_budget
from jcuts.tune.session import RegionProblems
from jcuts.xla import devices as xla_devices
from jcuts.xla import native_library
from jcuts.xla.chains import fuse as chains_fuse

MEMO_LIMIT = 64
"""Outcomes that a process remembers."""
SHARED_LIMIT = 48
"""Results of passes, shared by the variants of a function, that a process remembers: about 16 per set of rewrites."""


# -- the passes -----------------------------------------------------------------------------------------------------
def _inline(state: State) -> State:
    make = lambda: simplify(inline(state.original))  # noqa: E731
    return replace(state, closed=_once(f"{state.digest} inlined", state.settings.form, make))


def _logits(state: State) -> State:
    closed, note = chunk_logits.chunk_logits(state.closed, state.settings, state.platform)
    return replace(state, closed=closed, chunked_logits=0 if note is None else note.count).noted(note)


def _rewrite(state: State) -> State:
    form, inlined = state.settings.form, state.closed
    rules, rewrites = form.rewrites if form is not None else (), Rewritten(inlined)
    if rules:
        rewrites = _once(f"{state.digest} {rules}", form, lambda: rewritten(inlined, rules))
    closed = _once(f"{state.digest} {rules} numbers", form, lambda: splat_constants(rewrites.closed))
    divides, gains = microbatch_convs.is_asked(state.settings), False
    has_kernels = form is None or form.regions != "none"
    uses = {"cache_bytes": host_arch().l2, "gains": None if state.unusable else loop_bodies.gain_as_one}
    for further in backward_rewrites(state.platform, divides=divides, has_kernels=has_kernels, **uses):
        key = f"{state.digest} {rules} {further.name} {divides} {has_kernels}"
        before, closed = closed, _once(key, form, functools.partial(further.apply, closed))
        gains |= further.gains_alone and closed is not before
    count, convolutions = sum(rewrites.counts.values()), rewrites.convolutions
    state = replace(state, closed=closed, rewrites=count, convolutions=convolutions, gains_alone=gains)
    return state.noted(rewrites if rewrites.counts else None)


def _chunk(state: State) -> State:
    if state.settings.mode == "no_fusion" or state.platform != "cpu":
        return state
    closed, chunks = batch_chunking.chunk_batch(state.closed)
    return replace(state, closed=closed, chunked=chunks is not None).noted(chunks)


def _divide(state: State) -> State:
    division = microbatch_convs.divide_convolutions(
        state.closed, state.settings, state.platform, may_measure=state.may_measure, name=state.name
    )
    return replace(state, closed=division.closed, division=division).noted(division.note or None)


def _group(state: State) -> State:
    computation = group(state.closed, state.settings, Fuel(), state.platform, wait=state.platform != "cpu")
    if state.platform != "cpu":
        rates = "" if state.unusable else xla_devices.rates_of_another()
        loop_bodies.take_recurrences(computation, fuse=not state.unusable and state.settings.mode != "no_fusion")
    else:
        cpu = chosen_cpu()
        rates = f"schedules are ranked by the numbers of {cpu.source} (JCUTS_ARCH)" if cpu is not None else ""
    return replace(state, computation=computation).noted(rates or None)


def _partition(state: State) -> State:
    return replace(state, partition=kernel_selection.choose_partition(state.top, state.settings, state.platform))


def _collect(state: State) -> State:
    certain = weight_prep.programs(state.top) if state.may_measure and state.platform != "cpu" else ()
    return replace(state, problems=replace(kernel_selection.collect_problems(state.regions), certain=certain))


def _tune(state: State) -> State:
    return replace(state, tuned=session.tune_problems(state.collected, may_measure=state.may_measure))


def _resolve(state: State) -> State:
    assert state.tuned is not None, "the pass 'tune' comes first"
    kernel_selection.resolve(state.regions, state.collected, state.tuned)
    return state


def _search(state: State) -> State:
    return state.noted(kernel_selection.search(state.regions, state.collected, may_measure=state.may_measure))


def _prepare(state: State) -> State:
    if state.platform != "cpu" and state.regions.origin != "none":
        weight_prep.add_weight_prep_kernels(state.top, donates=state.settings.donates)
    return state


def _compile(state: State) -> State:
    return replace(state, calls=rebuild.compile_winners(state.top)).noted(inplace_update.note(state.top))


def _rebuild(state: State) -> State:
    return replace(state, closed=rebuild.with_calls(state.top, state.calls))


def _chain(state: State) -> State:
    closed = rebuild.with_chains(state.closed, state.settings, state.platform)
    return replace(state, closed=closed).noted(chains_fuse.note(closed))


# -- the list -------------------------------------------------------------------------------------------------------
def _is_jaxpr(state: State) -> None:
    verify_jaxpr(state.closed, state.original)


def _is_partition(state: State, *more: Callable[[Computation], None]) -> None:
    for check in (verify_partition, verify_programs, *more):
        check(state.top)


def _has_winners(state: State) -> None:
    _is_partition(state, verify_winners)


def _jaxpr_stage(name: str, when: Callable[[State], bool] = lambda state: True) -> DumpedStage:
    return DumpedStage(
        name,
        lambda state: as_source(state.closed, state.name),
        runs=lambda state: runnable_files(state.closed),
        when=when,
    )


def _programs_file(programs: Sequence[Program]) -> dict[str, bytes]:
    return {"json": programs_json(programs).encode()}


def _region_programs(state: State) -> list[Program]:
    found = {s.program.digest: s.program for level in state.top.walk() for s in level.subsets}
    return list(found.values())


def _programs_text(state: State) -> str:
    return "\n".join(program_text(s.program) for level in state.top.walk() for s in level.subsets)


FLAT = _jaxpr_stage("flat")
LOGITS = _jaxpr_stage("logits", lambda state: bool(state.chunked_logits))
REWRITES = _jaxpr_stage("rewrites", lambda state: bool(state.rewrites))
CHUNKS = _jaxpr_stage("pieces", lambda state: state.chunked)
DIVIDED = _jaxpr_stage("divided", lambda state: state.division is not None and bool(state.division.count))
SUBSETS = DumpedStage("subsets", _programs_text, runs=lambda state: _programs_file(_region_programs(state)))
RESTORED = _jaxpr_stage("restored", lambda state: bool(state.restored))
REWRITTEN = DumpedStage("rewritten", lambda state: as_source(state.closed, state.name))
KERNELS = DumpedStage(
    "kernels",
    lambda state: rebuild.kernel_texts(state.top),
    suffix="py",
    runs=lambda state: _programs_file(rebuild.winners(state.top)),
)

PASSES = (
    Pass("inline", _inline, _is_jaxpr, (FLAT,), any_platform=True),
    Pass("logits", _logits, _is_jaxpr, (LOGITS,), any_platform=True),
    Pass("rewrite", _rewrite, _is_jaxpr, (REWRITES,), any_platform=True),
    Pass("chunk", _chunk, _is_jaxpr, (CHUNKS,), stage="pieces", any_platform=True),
    Pass("divide", _divide, _is_jaxpr, (DIVIDED,), any_platform=True),
    Pass("group", _group, nothing, (SUBSETS,)),
    Pass("partition", _partition, _is_partition, stage="select"),
    Pass("collect", _collect, nothing, stage="select"),
    Pass("tune", _tune, nothing, stage="select", times=True),
    Pass("resolve", _resolve, _has_winners, stage="select", times=True),
    Pass("search", _search, _has_winners, stage="select", times=True),
    Pass("prepare", _prepare, _has_winners, stage="select"),
    Pass("compile", _compile, nothing, stage="rebuild"),
    Pass("rebuild", _rebuild, _is_jaxpr),
    Pass("restore", restore_convs.restore_convs, _is_jaxpr, (RESTORED,), stage="rebuild"),
    Pass("chain", _chain, _is_jaxpr, (REWRITTEN, KERNELS), stage="rebuild"),
)
COLLECTED = 1 + [p.name for p in PASSES].index("collect")
"""So many passes come before anything is tuned."""


def with_substitutes(substitutes: Mapping[str, Callable[[State], State]]) -> tuple[Pass, ...]:
    """The list with other functions for some passes, by name; their dumps and verifiers stay.

    For tests and experiments that replace `PASSES` (random schedules, made-up times).
    Raises: UsageError for a name that no pass has.
    """
    if unknown := substitutes.keys() - {p.name for p in PASSES}:
        raise UsageError(
            f"no pass is called {', '.join(sorted(unknown))}; there are {', '.join(p.name for p in PASSES)}"
        )
    return tuple(replace(p, apply=substitutes.get(p.name, p.apply)) for p in PASSES)


def run(state: State, passes: Sequence[Pass] = PASSES) -> State:
    """A state after some passes, one after the other."""
    for times, some in itertools.groupby(passes, key=lambda p: p.times):
        with session.shared_worker_session() if times else contextlib.nullcontext():
            for one in some:
                state = one(state)
    return state


# -- planning a function --------------------------------------------------------------------------------------------
_memo: OrderedDict[str, Outcome] = OrderedDict()
_shared: OrderedDict[str, Any] = OrderedDict()
_memo_lock = threading.Lock()


class Planning:
    """State of a function stopped before tuning (all passes up to `collect`).

    Attributes: problems: what is tuned next, None where nothing is: the outcome is known, or there are no kernels.
    """

    def __init__(self, state: State | None, program: str, known: Outcome | None = None) -> None:
        self._state, self._program, self._known = state, program, known
        self.problems: RegionProblems | None = None if state is None or not state.may_measure else state.problems
        if state is not None and state.settings.tune != "auto":
            self.problems = None

    def finish(self) -> Outcome:
        """The rest of the list. Raises: UnsupportedError with ``strict=True``."""
        if self._state is None:
            assert self._known is not None
            return self._known
        state = run(self._state, PASSES[COLLECTED:])
        outcome = report_rows.outcome_of(state)
        with _memo_lock:
            _memo[_memo_key(self._program, state.settings)] = outcome
            while len(_memo) > MEMO_LIMIT:
                _memo.popitem(last=False)
        return outcome


def optimize_jaxpr(
    closed: jaxapi.Closed,
    settings: Settings,
    *,
    platform: str,
    may_measure: bool,
    examples: Sequence[Any] | None = None,
) -> Outcome:
    """Plans one function.

    Args:
        closed: the original jaxpr. settings: the user's options.
        platform: 'cpu', or 'cuda' ('gpu' is JAX's other name for it); other platforms are left to XLA.
        may_measure: True only at a concrete top-level call; otherwise cached choices, else XLA's own code.
        examples: concrete arguments, for inputs whose values matter (indices, loop bounds).
    Returns: the rewritten jaxpr and the report. Equal programs give equal outcomes in every process that shares the
        tuning database.
    Raises: UnsupportedError with ``strict=True``.
    """
    started = start_planning(closed, settings, platform=platform, may_measure=may_measure, examples=examples)
    return started.finish()


def start_planning(
    closed: jaxapi.Closed,
    settings: Settings,
    *,
    platform: str,
    may_measure: bool,
    examples: Sequence[Any] | None = None,
) -> Planning:
    """`optimize_jaxpr` up to where its problems are known: several functions can then be tuned in one session."""
    name = getattr(closed.jaxpr.debug_info, "func_name", "") or "function"
    reason = unusable(platform)
    asked = microbatch_convs.is_asked(settings) or settings.chunk_logits
    if reason and not (asked and platform in ("cpu", *xla_devices.NAMES)):
        report = FunctionReport(name, settings.mode, platform, notes=(f"left to XLA: {reason}",))
        return Planning(None, "", Outcome(closed, report))
    platform = "cpu" if platform == "cpu" else "cuda"
    original = canonical_digest(closed, consts="digest")
    program = keys.plan(original, repr(settings), platform)
    with _memo_lock:
        found = _memo.get(_memo_key(program, settings))
    if found is not None and (not may_measure or settings.tune != "auto" or _is_settled(found)):
        return Planning(None, program, found)
    dump = open_dump(name)
    dump.stage("jaxpr", lambda: str(closed.jaxpr))
    state = State(closed, closed, name, settings, platform, may_measure, reason, original, dump)
    with collector.paused():
        return Planning(run(state, PASSES[:COLLECTED]), program)


def _once(key: str, form: Variant | None, make: Callable[[], Any]) -> Any:
    """What the forms of a function have in common, made once for all of them (`computation.group` knows it again)."""
    with _memo_lock:
        known = _shared.get(key)
    if known is not None:
        return known
    made = make()
    if form is not None:
        with _memo_lock:
            _shared[key] = made
            while len(_shared) > SHARED_LIMIT:
                _shared.popitem(last=False)
    return made


def unusable(platform: str) -> str:
    """Why no kernels can be used on a platform, or ''."""
    if platform == "cpu":
        usable, why = native_library.native_available()
        return "" if usable else why
    return xla_devices.unusable() if platform in xla_devices.NAMES else f"no kernels for platform {platform}"


def _memo_key(program: str, settings: Settings) -> str:
    """A plan depends on the tuning database, but for ``tune="off"``."""
    stored = "" if settings.tune == "off" else str(session.generation())
    return keys.remembered_plan(program, stored, microbatch_convs.generation(settings))


def forget() -> None:
    """Drops memoised plans (tests; after the database changed)."""
    with _memo_lock:
        _memo.clear()
        _shared.clear()


def _is_settled(outcome: Outcome) -> bool:
    timed = (
        not (time_budget.current().again or outcome.report.postponed)
        and not outcome.report.unmeasured
        and all(row.why != microbatch_convs.NOT_TIMED for row in outcome.report.divisions)
    )
    return timed and all(s.origin == "measured" for s in outcome.report.subsets)
