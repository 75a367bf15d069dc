"""What `run.py` does in processes of their own: the modes of `jcuts.optimize`, a warm start, planning alone."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.networks import device_profile, interleaved_timing, on_gpu, roofline

MODES = ("no_fusion", "fusion", "mixed")
PRETENDED = ("NVIDIA H200", (9, 0), 132)


def modes(spec: str, out: Path, dry: bool, seconds: float, which: Sequence[str] = MODES) -> dict[str, Any]:
    """One network in the three modes: times of whole programs, and of all subsets by kind.

    Whole programs of ``no_fusion`` and ``fusion`` are not chosen by comparison: they run as they are (``as called``)
    and with the compiler options that the programs of ``mixed`` may have (``options``), as XLA does.
    """
    import jax

    import jcuts
    from jcuts.base import fingerprint
    from jcuts.jit import variant_space
    from jcuts.tune import session

    platform = on_gpu.pretend(dry)
    fn, args = on_gpu.workload(spec, dry)
    jax.block_until_ready(args)
    option = next(iter(variant_space.options(platform)), "")
    flags = variant_space.compiler_options(f"xla:{option}", platform) or None
    row: dict[str, Any] = {
        "part": "modes",
        "network": spec,
        "flags": flags or {},
        "versions": fingerprint.versions(),
        "device": str(jax.devices()[0].device_kind),
        "modes": {},
    }
    closed = roofline.traced(fn, args)
    row["counts"] = roofline.summary(closed, row["device"])
    session.set_progress(on_gpu.Stages())
    calls: dict[str, Callable[[], Any]] = {}
    made_by: dict[str, Any] = {}
    for mode in which:
        on_gpu.note(f"{spec}: {mode}")
        ours = jcuts.optimize(on_gpu.named(fn, mode), mode=mode)
        start = time.perf_counter()
        jax.block_until_ready(ours(*args))
        spent = time.perf_counter() - start
        report, decision = ours.explain(*args), ours.decision(*args)
        made: dict[str, Any] = {
            "first_call_seconds": spent,
            "kernels": report.kernels,
            "equations": report.equations,
            "decision": decision and decision.to_dict(),
            "stages": report.seconds,
            "by_kind": roofline.by_kind(report.subsets),
            "shares": roofline.shares_of(ours, args, closed, platform),
            "subsets": [{**on_gpu.subset_row(s), "kind": s.kind} for s in report.subsets],
            "left": [[r.op, r.reason, r.count] for r in report.refusals],
        }
        calls[mode], made_by[mode] = functools.partial(ours, *args), ours
        row["modes"][mode] = made
        on_gpu.save(out, row, "modes_")
    plain = jax.jit(on_gpu.named(fn, "plain")).lower(*args)
    calls["xla"] = bound(plain.compile(), args)
    if flags:
        calls["xla options"] = bound(plain.compile(compiler_options=flags), args)
        for mode in (m for m in which if m != "mixed"):
            calls[f"{mode} options"] = bound(made_by[mode].lower(*args).compile(compiler_options=flags), args)
    row["times"] = interleaved_timing.timed(calls, seconds)
    on_gpu.save(out, row, "modes_")
    want, row["errors_against"] = on_gpu.reference(spec, fn, args, dry)
    row["errors"] = {n: on_gpu.error_of(on_gpu.first_rows(c(), want), want) for n, c in calls.items()}
    row["profiles"] = {}
    kinds = {mode: kinds_of(row["modes"][mode]["subsets"]) for mode in which}
    for name in calls:
        try:
            seen = device_profile.profiled(calls[name], out / f"profile_{on_gpu.label(spec)}", most=1000)
        except Exception as error:
            on_gpu.note(f"no profile of {name}: {type(error).__name__}: {error}")
            continue
        of = kinds.get(name.split()[0], {})
        row["profiles"][name] = {
            **seen,
            "largest": seen["largest"][:25],
            "by_kind": roofline.profile_by_kind(seen["largest"], of),
        }
    return row | {"finished": True}


def bound(compiled: Any, args: Sequence[Any]) -> Callable[[], Any]:
    """A call of a compiled program with its arguments."""
    return functools.partial(compiled, *args)


def kinds_of(subsets: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Kind by the start of the name of its kernel's functions, for all kernels of this process."""
    from jcuts.xla import kernel_cache

    by_program = {s["chosen"].rpartition("/")[2]: s["kind"] for s in subsets if s["chosen"] != "xla"}
    known = {digest[:8]: getattr(kernel, "digest", "")[:12] for digest, kernel in kernel_cache._kernels.items()}
    return {known[program]: kind for program, kind in by_program.items() if known.get(program)}


def warm(spec: str, dry: bool) -> dict[str, Any]:
    """A process that finds the tuning database: seconds of its first call, and those of `jax.jit`'s."""
    import jax

    import jcuts

    on_gpu.pretend(dry)
    fn, args = on_gpu.workload(spec, dry)
    jax.block_until_ready(args)
    start = time.perf_counter()
    jax.block_until_ready(jax.jit(on_gpu.named(fn, "plain"))(*args))
    plain = time.perf_counter() - start
    ours = jcuts.optimize(on_gpu.named(fn, "ours"))
    start = time.perf_counter()
    jax.block_until_ready(ours(*args))
    spent = time.perf_counter() - start
    decision = ours.decision(*args)
    stages = ours.explain(*args).seconds
    again = decision is not None and decision.tries > 1  # its first decision was noisy: whole programs ran again
    return {
        "seconds": spent,
        "plain_seconds": plain,
        "stages": stages,
        "chosen": decision and decision.chosen,
        "measured_again": again,
    }


# -- planning for a GPU that is not here ----------------------------------------------------------------------------
@contextlib.contextmanager
def pretended(tuned: dict[str, Any], seconds: Callable[[Any, Any], Sequence[float]] | None = None) -> Iterator[None]:
    """An H200 is here, and every problem is measured at once; what is pretended to be measured is stored.

    The database is in memory and empty at first; nothing is compiled.

    Args:
        tuned: filled, by digest.
        seconds: a problem with its candidates, and its region -> times of these and of XLA; by default the first
            candidate wins.
    """
    from dataclasses import replace

    from jcuts.pipeline import passes
    from jcuts.tune import session
    from jcuts.tune.choice import Measurement
    from jcuts.tune.database import Store
    from jcuts.tune.select import keep_xla
    from jcuts.xla import devices as xla_devices

    def tune(problems: Sequence[Any], store: Any, *, settings: Any, prepare: Any = None, **_: Any) -> dict[str, Any]:
        found = {}
        for problem in problems:
            choice = store.lookup(problem.digest)
            if choice is None and settings.tune == "auto":
                full = prepare_candidates(problem, prepare)
                tuned[problem.digest] = len(full.candidates)
                choice = replace(keep_xla(problem), origin="measured", measurements=times_of(full, prepare))
                pairs = zip(choice.measurements, (*full.candidates, None), strict=True)
                best = min(pairs, key=lambda pair: pair[0].seconds)[1]
                if best is not None:
                    choice = replace(
                        choice,
                        winner=best.label,
                        winner_digest=best.digest,
                        programs={best.label: best.payload},
                        kernels={best.label: best.digest},
                        digests={best.label: best.digest},
                    )
                store.put(choice)
            found[problem.digest] = choice or keep_xla(problem)
        return found

    def times_of(problem: Any, prepare: Any) -> tuple[Any, ...]:
        labels = [*(c.label for c in problem.candidates), "xla"]
        times: Sequence[float] = [1e-6 * (n + 1) for n in range(len(labels))]
        if seconds is not None:
            times = seconds(problem, prepare.__self__.region_of[problem.digest])
        return tuple(Measurement(x, s, s, s, 7, "chain") for x, s in zip(labels, times, strict=True))

    old = session.tune, xla_devices.this, xla_devices.unusable
    session.tune, xla_devices.this, xla_devices.unusable = tune, lambda: xla_devices.Gpu(*PRETENDED), lambda: ""
    no_kernels: dict[str, Any] = dict.fromkeys(("compile", "rebuild", "chain"), lambda state: state)
    kept, passes.PASSES = passes.PASSES, passes.with_substitutes(no_kernels)
    session.set_store(Store(None, device="pretended", versions="none"))
    try:
        yield
    finally:
        session.set_store(None)
        passes.PASSES = kept
        session.tune, xla_devices.this, xla_devices.unusable = old


def prepare_candidates(problem: Any, prepare: Any) -> Any:
    """The problem with its candidates, without the exports that only a measuring process needs."""
    from jcuts.tune import session

    kept, session.with_exports = session.with_exports, lambda full, *_, **__: full
    try:
        return prepare(problem)
    finally:
        session.with_exports = kept


def pretended_regions(closed: Any, settings: Any) -> list[tuple[Any, Any]]:
    """The tuning problems of a function that is planned for an H200, each with its candidates and its first region."""
    from jcuts.pipeline import passes

    found: dict[str, tuple[Any, Any]] = {}

    def times(problem: Any, region: Any) -> Sequence[float]:
        found.setdefault(problem.digest, (problem, region))
        return [1e-6 * (n + 1) for n in range(len(problem.candidates) + 1)]

    with pretended({}, times):
        passes.optimize_jaxpr(closed, settings, platform="cuda", may_measure=True)
    return list(found.values())


def planning(spec: str, dry: bool) -> dict[str, Any]:
    """Python's share of a first call and of a warm start, for a pretended H200: nothing is compiled.

    ``cold`` plans every form that competes and makes all candidates, ``warm`` plans the last of them as a later process
    does, with everything known.
    """
    import dataclasses

    import jax

    from jcuts.base.settings import Settings
    from jcuts.jit import variant_space
    from jcuts.pipeline import computation
    from jcuts.pipeline import passes as pipeline_passes

    fn, args = on_gpu.workload(spec, dry)
    start = time.perf_counter()
    closed = roofline.traced(fn, args)
    row: dict[str, Any] = {"part": "planning", "network": spec, "trace_seconds": time.perf_counter() - start}
    tuned: dict[str, Any] = {}

    def plan(form: Any, may_measure: bool) -> Any:
        settings = dataclasses.replace(Settings(), form=form)
        return pipeline_passes.optimize_jaxpr(closed, settings, platform="cuda", may_measure=may_measure)

    with pretended(tuned):
        start, busy = time.perf_counter(), time.process_time()
        outcomes = {form: plan(form, True) for form in variant_space.candidate_variants(closed, "cuda")}
        row |= {
            "cold_seconds": time.perf_counter() - start,
            "cold_cpu_seconds": time.process_time() - busy,
            "forms": len(outcomes),
            "problems": len(tuned),
            "candidates": sum(tuned.values()),
        }
        with_kernels = [f for f in outcomes if f is None or f.regions not in ("none", "absorbing")]
        chosen = with_kernels[-1]
        row |= {"form": str(chosen), "subsets": len(outcomes[chosen].report.subsets)}
        pipeline_passes.forget()
        for known in (computation._rankings, computation._grouped):
            known.clear()
        jax.clear_caches()
        start, busy = time.perf_counter(), time.process_time()
        report = plan(chosen, False).report
        row |= {
            "warm_seconds": time.perf_counter() - start,
            "warm_cpu_seconds": time.process_time() - busy,
            "stages": report.seconds,
        }
    return row | {"finished": True}
