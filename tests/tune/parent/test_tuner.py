"""Tuning end to end with small kernels: good, wrong, crashing, hanging; two processes; killed parents; bad disks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.errors import CandidateRejected, WorkerFailed
from jcuts.base.settings import Settings
from jcuts.codegen.artifact import CompiledKernel
from jcuts.trace import jaxapi
from jcuts.tune import resource_errors
from jcuts.tune.baseline.xla_export import export_subset, with_exports
from jcuts.tune.choice import SCREENED, UNCHECKED
from jcuts.tune.database import Store
from jcuts.tune.measure import cuda_driver
from jcuts.tune.parent.job import TuningJob, make_job
from jcuts.tune.parent.machine_lock import measuring_lock
from jcuts.tune.parent.tuner import TuningBudget, tune
from jcuts.tune.parent.tuning_queue import TuningQueue
from jcuts.tune.parent.worker_pool import WorkerPool
from jcuts.tune.parent.worker_session import DEVICE, REFERENCE, XLA, shared_worker_session
from jcuts.tune.problem import Candidate, Input, Output, Problem, stablehlo_payload
from jcuts.tune.replay import Recording
from jcuts.tune.select import select_stored
from jcuts.tune.worker import requests
from tests.tune import objects

pytestmark = pytest.mark.usefixtures("xla_as_shipped", "private_places")

ROOT = Path(__file__).resolve().parents[3]
QUICK = TuningBudget(seconds=0.02, finalists=2, timeout=20.0, workers=2, seed=1)
PARENT = """
import sys
from jcuts.base import knobs
from jcuts.tune.parent.tuner import TuningBudget, tune
from jcuts.tune.database import Store
from tests.tune import objects

class Tell:
    def update(self, stage, done, total, name):
        print(stage, flush=True)

if __name__ == "__main__":
    print("main", flush=True)
    store = Store(sys.argv[1], device="d", versions="v")
    problems = [objects.problem(*kinds.split(","), name=f"n{i}") for i, kinds in enumerate(sys.argv[2].split(";"))]
    found = tune(problems, store, effort=TuningBudget(seconds=0.02, timeout=20.0, workers=2), progress=Tell())
    print("winner", *(c.winner for c in found.values()), flush=True)
"""


def memory_store() -> Store:
    return Store(None, device="d", versions="v")


def start(tmp_path: Path, kinds: str) -> subprocess.Popen:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JCUTS_CACHE_DIR": str(tmp_path / "cache")}
    return subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "t.db"), kinds],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


def children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == pid:
                found.append(int(entry.name))
        except (OSError, IndexError, ValueError):
            continue
    return found


def is_running(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def test_every_bad_candidate_is_rejected_and_the_rest_goes_on():
    problem = objects.problem(*objects.KINDS)
    store = memory_store()
    recording = Recording()
    effort = TuningBudget(seconds=0.02, finalists=2, timeout=3.0, workers=2)
    (choice,) = tune([problem], store, effort=effort, recording=recording).values()
    reasons = {r.label: r.error for r in choice.rejections}
    assert reasons == {
        "wrong": "AccuracyRejected",
        "slightly wrong": "AccuracyRejected",
        "nan": "AccuracyRejected",
        "unwritten": "AccuracyRejected",
        "out of bounds": "AccuracyRejected",
        "clobbers": "AccuracyRejected",
        "no nan": "AccuracyRejected",
        "lower precision": "AccuracyRejected",
        "skipped tile": "AccuracyRejected",
        "kept result": "AccuracyRejected",
        "garbage": "CompileRejected",
        "abort": "WorkerFailed",
        "segfault": "WorkerFailed",
        "forever": "WorkerFailed",
        "greedy": "WorkerFailed",
    }
    details = {r.label: r.values for r in choice.rejections}
    assert details["segfault"]["status"] == -signal.SIGSEGV
    assert details["abort"]["status"] == -signal.SIGABRT
    assert details["forever"]["reason"] == "timeout"
    assert details["slightly wrong"]["error_ulp"] > details["slightly wrong"]["limit_ulp"]
    assert {m.label for m in choice.measurements} == {"xla", "right", "slow"}
    assert choice.winner in ("xla", "right") and choice.origin == "measured"
    assert store.lookup(problem.digest) == choice
    assert recording.replay("mixed")[problem.digest].winner == choice.winner
    forced = tune([problem], store, settings=Settings(mode="fusion"))[problem.digest]
    assert forced.winner == "right" and forced.kernel
    assert [p for p in Path(os.environ["TMPDIR"]).iterdir() if p.is_dir()] == []


def test_candidates_that_are_checked_last_win_only_if_they_are_right():
    problem = objects.problem(*objects.KINDS)
    store = memory_store()
    effort = TuningBudget(seconds=0.02, finalists=99, timeout=3.0, workers=2, checks_last=True)
    (choice,) = tune([problem], store, effort=effort, settings=Settings(mode="fusion")).values()
    reasons = {r.label: r.error for r in choice.rejections}
    assert choice.winner in ("right", "slow") and choice.origin == "measured" and choice.kernel
    assert {"garbage", "abort", "segfault", "forever", "greedy"} <= set(reasons)
    wrong = {label for label, error in reasons.items() if error == "AccuracyRejected"}
    methods = {m.label: m.method for m in choice.measurements}
    assert not wrong & set(methods)
    # Whatever nobody looked at has a time that counts for nothing, and no kernel in the choice.
    unchecked = {label for label, method in methods.items() if method == UNCHECKED}
    assert {choice.winner} == set(choice.kernels) == set(methods) - unchecked - {"xla"}
    assert unchecked | wrong | {choice.winner} >= {"wrong", "nan", "slow"}
    kept = store.lookup(problem.digest)
    assert kept is not None and kept.measurements == choice.measurements and kept.winner in ("xla", choice.winner)
    (choice,) = tune([objects.problem("wrong", "nan")], store, effort=effort, settings=Settings(mode="fusion")).values()
    assert choice.uses_library and {r.label: r.error for r in choice.rejections} == dict.fromkeys(
        ("wrong", "nan"), "AccuracyRejected"
    )
    assert [p for p in Path(os.environ["TMPDIR"]).iterdir() if p.is_dir()] == []


def test_a_mode_that_wants_a_kernel_measures_again_where_none_was_checked():
    problem = objects.problem("slow")
    store = memory_store()
    effort = TuningBudget(seconds=0.02, timeout=20.0, workers=2, seed=1, checks_last=True)
    (mixed,) = tune([problem], store, effort=effort).values()
    assert mixed.uses_library and {m.label for m in mixed.measurements} == {"xla", "slow"} and not mixed.kernels
    assert not mixed.rejections and not mixed.is_enough("fusion")
    (forced,) = tune([problem], store, settings=Settings(mode="fusion"), effort=effort).values()
    assert forced.winner == "slow" and forced.is_enough("fusion")
    (again,) = tune([problem], store).values()
    assert again.uses_library and again.kernels
    wanted = replace(problem, wanted=True)
    assert wanted.digest == problem.digest and tune([wanted], store)[problem.digest].winner == "slow"


def test_a_problem_for_which_a_kernel_is_wanted_gets_one_among_others():
    """Where XLA's code alone is faster: the problem's answer for others stays XLA's."""
    problem, other = replace(objects.problem("slow"), wanted=True), objects.problem("slow", "right")
    store = memory_store()
    effort = TuningBudget(seconds=0.02, timeout=20.0, workers=2, seed=1, checks_last=True)
    found = tune([problem, other], store, effort=effort)
    assert found[problem.digest].winner == "slow" and found[problem.digest].kernel
    assert found[other.digest].winner != "slow"
    assert tune([replace(problem, wanted=False)], store, settings=Settings(tune="cached"))[problem.digest].uses_library


def measured_job(folder: Path, times: dict[str, tuple[float, float]]) -> TuningJob:
    """A job whose candidates took so long [s], with a half width of the middle half of the samples [s]."""
    folder.mkdir(exist_ok=True)
    job = make_job(objects.problem(*(label for label in times if label != "xla")), folder, 0)
    job.compiled = dict.fromkeys((c.label for c in job.problem.candidates), "digest")
    entries = [
        {"label": label, "seconds": t, "low": t - w, "high": t + w, "runs": 4, "method": "chain"}
        for label, (t, w) in times.items()
    ]
    job.answer = {"measurements": entries, "overhead": 0.0, "seconds": 1.0}
    return job


def test_who_is_checked_is_who_wins_in_the_end(tmp_path):
    first, second = sorted(objects.problem("right", "slow").candidates, key=lambda c: c.digest)
    # Both kernels beat XLA, are equal to each other, and the preferred one alone is too close to XLA.
    noisy = {"xla": (1.12, 0.1), first.label: (1.08, 0.1), second.label: (1.0, 0.1)}
    job = measured_job(tmp_path / "ties", noisy)
    checked = []
    while (label := job.next_to_verify("mixed")) is not None:
        checked.append(label)
        job.passed.append(label)
    assert checked == [first.label, second.label]
    assert job.choice().winner == first.label
    # Without the faster one there is nothing to be sure of.
    job = measured_job(tmp_path / "wrong", noisy)
    job.passed.append(first.label)
    job.reject(second.label, CandidateRejected("wrong"))
    assert job.next_to_verify("mixed") is None and job.choice().uses_library


def test_noise_of_a_wrong_candidate_is_no_noise_of_the_others(tmp_path):
    job = measured_job(tmp_path / "noise", {"xla": (1.0, 0.001), "wrong": (0.8, 0.1), "right": (0.95, 0.001)})
    job.reject("wrong", CandidateRejected("wrong"))
    assert job.next_to_verify("mixed") == "right"
    job.passed.append("right")
    assert job.next_to_verify("mixed") is None
    assert job.choice().winner == "right" and job.choice().margin == 0.01


def test_where_all_that_raced_are_wrong_a_mode_that_wants_a_kernel_takes_one_that_did_not():
    problem = objects.problem("wrong", "nan", "slow")
    store = memory_store()
    # Enough runs that a pause of the machine in one of them does not make a kernel look as slow as the slow one.
    effort = TuningBudget(seconds=0.3, finalists=2, timeout=20.0, workers=2, seed=1, checks_last=True)
    (forced,) = tune([problem], store, settings=Settings(mode="fusion"), effort=effort).values()
    assert {r.label for r in forced.rejections} == {"wrong", "nan"}
    assert {m.label: m.method for m in forced.measurements}["slow"] == SCREENED
    assert forced.winner == "slow" and forced.kernels and forced.is_enough("fusion")
    # Nothing is left to find out: neither this mode nor the other measures again.
    kept = store.lookup(problem.digest)
    assert kept is not None and select_stored(kept, "fusion").winner == "slow"
    assert tune([problem], store, settings=Settings(mode="fusion", tune="cached"))[problem.digest].winner == "slow"
    assert tune([problem], store, settings=Settings(tune="cached"))[problem.digest].uses_library


def test_database_estimates_and_unknown_need_no_process(monkeypatch):
    def never(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr("jcuts.tune.parent.worker_session.WorkerPool", never)
    problem = objects.problem("right", "wrong", exports=False)
    store = memory_store()
    assert tune([problem], store, settings=Settings(tune="cached"))[problem.digest].origin == "library"
    off = tune([problem], store, settings=Settings(tune="off"))[problem.digest]
    assert off.origin == "estimated"
    assert store.ls() == []


def test_prepare_is_asked_only_for_what_is_missing():
    asked = []
    full = objects.problem("right")
    lazy = Problem("square plus one", full.inputs, full.outputs, space="all", name="lazy")

    def prepare(problem):
        asked.append(problem.name)
        return Problem(
            problem.identity,
            problem.inputs,
            problem.outputs,
            full.candidates,
            "all",
            library=full.library,
            reference=full.reference,
            name=problem.name,
        )

    store = memory_store()
    first = tune([lazy], store, effort=QUICK, prepare=prepare)
    again = tune([lazy, lazy], store, effort=QUICK, prepare=prepare)
    assert asked == ["lazy"]
    assert first == again
    fused = tune([lazy], store, settings=Settings(mode="fusion"), prepare=prepare)[lazy.digest]
    assert fused.winner == "right" and fused.winner_digest == full.candidates[0].digest


def test_a_subset_that_cannot_be_exported_stays_with_xla():
    def prepare(_):
        raise CandidateRejected("no export", subset="s")

    (choice,) = tune([objects.problem("right", exports=False)], memory_store(), prepare=prepare).values()
    assert choice.uses_library and choice.rejections[0].message == "no export"


def test_problem_without_exports_stays_with_xla():
    store = memory_store()
    (choice,) = tune([objects.problem("right", exports=False)], store, effort=QUICK).values()
    assert choice.uses_library and choice.origin == "library"
    assert choice.rejections[-1].label == "xla"


def test_compiler_options_are_candidates():
    base = objects.problem("right")
    assert base.library is not None
    good = Candidate("stablehlo", stablehlo_payload(base.library, {"xla_cpu_enable_fast_math": False}), "flags")
    bad = Candidate("stablehlo", stablehlo_payload(base.library, {"xla_no_such_option": True}), "unknown flag")
    problem = Problem("flags", base.inputs, base.outputs, (good, bad), library=base.library, reference=base.reference)
    (choice,) = tune([problem], memory_store(), effort=QUICK).values()
    assert {m.label for m in choice.measurements} == {"xla", "flags"}
    assert [r.label for r in choice.rejections] == ["unknown flag"]


def test_integers_argmax_and_given_inputs(tmp_path):
    indices = np.array([0, 3, 3, 1], np.int32)
    np.save(tmp_path / "i.npy", indices)

    def function(x, i):
        return jnp.argmax(x, axis=1), x[i]

    closed = jaxapi.closed_jaxpr_of(function, jnp.zeros((4, 5)), jnp.asarray(indices))
    problem = with_exports(
        Problem(
            "argmax and rows",
            (Input((4, 5), "float32"), Input((4,), "int32", "given", str(tmp_path / "i.npy"))),
            (Output((4,), "int32", exact=True), Output((4, 5), "float32")),
        ),
        closed,
    )
    assert problem.perturb
    same = Candidate("stablehlo", stablehlo_payload(problem.library or b""), "same")
    other = export_subset(
        jaxapi.closed_jaxpr_of(lambda x, i: (jnp.argmin(x, axis=1), x[i]), jnp.zeros((4, 5)), jnp.asarray(indices))
    )
    wrong = Candidate("stablehlo", stablehlo_payload(other.library), "argmin")
    full = Problem(
        "argmax and rows",
        problem.inputs,
        problem.outputs,
        (same, wrong),
        library=problem.library,
        reference=problem.reference,
        perturb=True,
    )
    (choice,) = tune([full], memory_store(), effort=QUICK).values()
    assert {m.label for m in choice.measurements} == {"xla", "same"}
    assert [(r.label, r.values["rule"]) for r in choice.rejections] == [("argmin", "exact")]


def test_float64_is_judged_by_what_rounding_does_to_it():
    """y + y tanh(y) for y < -7: another rounding of tanh moves the small result by millions of ulp."""

    def variant(factor):
        def function(x):
            y = -7.0 - jnp.abs(x)
            return y + y * (jnp.tanh(y) * factor)

        return jaxapi.closed_jaxpr_of(function, jnp.zeros(64, jnp.float64))

    with jax.enable_x64(True):
        problem = with_exports(
            Problem("cancels", (Input((64,), "float64"),), (Output((64,), "float64"),)), variant(1.0)
        )
        candidates = tuple(
            Candidate("stablehlo", stablehlo_payload(export_subset(variant(1.0 + error)).library), name)
            for name, error in (("rounded", 2.0**-52), ("wrong", 2.0**-44))
        )
    assert problem.unsure and not problem.perturb
    full = Problem(
        "cancels",
        problem.inputs,
        problem.outputs,
        candidates,
        library=problem.library,
        reference=problem.reference,
        unsure=True,
    )
    assert Problem.from_json(full.to_json()).unsure
    (choice,) = tune([full], memory_store(), effort=QUICK).values()
    assert {m.label for m in choice.measurements} == {"xla", "rounded"}
    assert [r.label for r in choice.rejections] == ["wrong"]


def test_no_process_can_be_started(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    store = memory_store()
    (choice,) = tune([objects.problem("right")], store, effort=QUICK).values()
    assert choice.uses_library
    assert choice.rejections[0].values["reason"] == "start"
    assert store.ls() == []  # says nothing about the problem


def test_a_full_disk_in_a_measuring_process_says_nothing_of_the_problem(tmp_path, monkeypatch):
    shown = "from jcuts.tune.verify import inputs\nfrom jcuts.tune.worker import main\n"
    shown += "inputs.save.__code__ = (lambda path, array: open('/dev/full', 'wb').write(bytes(1 << 16))).__code__\n"
    (tmp_path / "full.py").write_text(shown + "main.serve()\n")
    start_ = subprocess.Popen
    monkeypatch.setattr(
        "jcuts.tune.parent.worker_pool.subprocess.Popen",
        lambda command, **more: start_([sys.executable, "-P", str(tmp_path / "full.py")], **more),
    )
    store, problem = memory_store(), objects.problem("right")
    (choice,) = tune([problem], store, effort=QUICK).values()
    assert choice.uses_library and choice.is_postponed
    assert store.lookup(problem.digest) is None
    with pytest.raises(OSError) as caught, open("/dev/full", "wb", buffering=0) as file:
        np.zeros(1 << 16).tofile(file)
    assert resource_errors.is_disk(caught.value) and not resource_errors.is_disk(FileNotFoundError(2, "no such file"))


def test_no_space_for_session_files(monkeypatch, tmp_path, caplog):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkdtemp", full)
    (choice,) = tune([objects.problem("right")], memory_store(), effort=QUICK).values()
    assert choice.uses_library
    assert "stays with XLA" in caplog.text


def test_a_smaller_group_ends_idle_processes_and_leaves_its_queue_to_another(tmp_path):
    answers = []
    with WorkerPool(tmp_path, {"many": 3, "one": 1}) as pool:
        for _ in range(3):
            pool.submit("many", {"op": "hello"}, 60.0, answers.append)
        pool.drain()
        assert len(pool.pids()) == 3
        pool.shrink("many", 1)
        pool.poll()
        assert len(pool.pids()) == 1
        pool.submit("many", {"op": "hello"}, 60.0, answers.append)
        pool.shrink("many", 0, "one")
        pool.drain()
        assert len(pool.pids()) == 1 and not pool.workers["many"]
    assert [answer["ok"] for answer in answers] == [True] * 4


def test_idle_processes_give_up_their_share_of_a_gpu_where_measuring_runs_out_of_memory(tmp_path):
    problem = objects.problem("right")
    asked: list[bool] = []

    class Shared(WorkerPool):
        def submit(self, group, request, timeout, done):
            asked.append(bool(self.workers[REFERENCE]))
            short = WorkerFailed("full", reason="memory", running="")
            times = {
                "measurements": [
                    {"label": "xla", "seconds": 1.0, "low": 1.0, "high": 1.0, "runs": 3, "method": "chain"}
                ],
                "overhead": 0.0,
                "seconds": 1.0,
            }
            done(short if asked[-1] else times)

    with Shared(tmp_path, {XLA: 1, DEVICE: 2, REFERENCE: 2}) as pool:
        WorkerPool.submit(pool, REFERENCE, {"op": "hello"}, 60.0, lambda _: None)
        pool.drain()
        session = TuningQueue(pool, QUICK, None)
        job = make_job(problem, tmp_path, 0)
        label = problem.candidates[0].label
        job.kinds, job.passed, job.compiled = ["normal"], [label], {label: "digest"}
        session.measure(job)
        choice = job.choice()
        assert asked == [True, False] and not pool.pids()
    assert choice.origin == "measured" and not job.transient


def test_after_a_shortage_the_measuring_process_starts_anew_without_what_it_measured_with(tmp_path):
    class Full(WorkerPool):
        def submit(self, group, request, timeout, done):
            if group == REFERENCE:
                done(WorkerFailed("full", reason="memory", running=""))
            else:
                super().submit(group, request, timeout, done)

    answers: list[Any] = []
    with Full(tmp_path, {XLA: 1, DEVICE: 2, REFERENCE: 2}) as pool:
        session = TuningQueue(pool, QUICK, None)
        for _ in range(3):
            session._submit(XLA, {"op": "hello"}, answers.append)
            pool.drain()
            WorkerPool.submit(pool, REFERENCE, {"op": "hello"}, 60.0, lambda _: None)  # goes to the heir
            session._submit(REFERENCE, {"op": "hello"}, answers.append)
            pool.drain()
        pids = [answer["pid"] for answer in answers]
        assert pids[0] != pids[1] and set(pids[1:]) == {pids[1]} and pool.pids() == [pids[1]]
        # What runs there meanwhile is left alone.
        pool.sizes[REFERENCE] = 2
        session._submit(XLA, {"op": "hello"}, answers.append)
        session._submit(REFERENCE, {"op": "hello"}, answers.append)
        pool.drain()
        assert [answer["pid"] for answer in answers[-2:]] == [pids[1]] * 2


def test_after_a_shortage_half_of_the_processes_go_on_and_no_more_of_them_at_once(tmp_path):
    class Narrow(WorkerPool):
        most = 0

        def submit(self, group, request, timeout, done):
            if group == REFERENCE and self.sizes[REFERENCE] > 2:
                done(WorkerFailed("full", reason="memory", running=""))
            else:
                super().submit(group, request, timeout, done)

        def _dispatch(self):
            super()._dispatch()
            self.most = max(self.most, sum(worker.task is not None for worker in self.workers[REFERENCE]))

    answers: list[Any] = []
    with Narrow(tmp_path, {XLA: 1, DEVICE: 5, REFERENCE: 8}) as pool:
        for _ in range(4):  # which are idle then
            WorkerPool.submit(pool, REFERENCE, {"op": "hello"}, 60.0, lambda _: None)
        pool.drain()
        pool.most = 0
        session = TuningQueue(pool, QUICK, None)
        for _ in range(5):
            session._submit(REFERENCE, {"op": "hello"}, answers.append)
        pool.drain()
        assert pool.sizes == {XLA: 1, DEVICE: 1, REFERENCE: 2} and pool.most == 2 and not pool.workers[XLA]
    assert [answer["ok"] for answer in answers] == [True] * 5


def test_pool_reports_a_worker_that_answers_nonsense(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nread line\necho nonsense\nsleep 60\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    answers = []
    with WorkerPool(tmp_path, {"g": 1}) as pool:
        pool.submit("g", {"op": "hello"}, 5.0, answers.append)
        pool.drain()
    assert isinstance(answers[0], WorkerFailed) and answers[0].values["reason"] == "protocol"


def test_what_a_process_said_just_before_its_end_is_heard(tmp_path, monkeypatch):
    script = tmp_path / "python"
    running = '{\\"id\\": 1, \\"event\\": \\"running\\", \\"label\\": \\"%s\\"}'
    script.write_text(f'#!/bin/sh\nread line\necho "{running % "first"}"\necho "{running % "guilty"}"\nexit 70\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    answers = []
    with WorkerPool(tmp_path, {"g": 1}) as pool:
        pool.submit("g", {"op": "hello"}, 5.0, answers.append)
        pool.poll()
        time.sleep(0.5)  # this process was busy: all comes at once
        pool.drain()
    assert answers[0].values["running"] == "guilty" and answers[0].values["status"] == 70


@pytest.mark.usefixtures("workers_from_scratch")
def test_workers_are_gone_after_an_exception(tmp_path):
    pids: list[int] = []
    with pytest.raises(KeyboardInterrupt), WorkerPool(tmp_path, {"g": 2}) as pool:

        def interrupt(_):
            pids.extend(pool.pids())
            raise KeyboardInterrupt

        pool.submit("g", {"op": "hello"}, 30.0, interrupt)
        pool.drain()
    assert pids and not any(is_running(pid) for pid in pids)


def test_main_is_not_run_again_and_two_processes_share_one_result(tmp_path):
    kinds = "right,wrong;right,slow"
    both = [start(tmp_path, kinds) for _ in range(2)]
    outputs = []
    for process in both:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        outputs.append(out.splitlines())
    assert [out.count("main") for out in outputs] == [1, 1]
    assert outputs[0][-1] == outputs[1][-1]
    # Each problem was measured by one of the two only.
    assert sum(out.count("measure") for out in outputs) == 2
    store = Store(tmp_path / "t.db", device="d", versions="v")
    assert len(store.ls()) == 2 and store.errors == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("stage", ["compile", "check"])
def test_kill_nine_of_the_parent_leaves_no_worker_and_no_harm(tmp_path, stage):
    parent = start(tmp_path, "right,forever")
    assert parent.stdout is not None
    for line in parent.stdout:
        if line.strip() == stage:
            break
    workers = children(parent.pid)
    assert workers
    parent.send_signal(signal.SIGKILL)
    parent.communicate(timeout=30)
    end = time.monotonic() + 20
    while any(is_running(pid) for pid in workers) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in workers)
    problem = objects.problem("right", name="after")
    store = Store(tmp_path / "t.db", device="d", versions="v")
    (choice,) = tune([problem], store, effort=QUICK).values()
    assert choice.origin == "measured" and store.errors == []
    # The dead session's folder was removed by the next session.
    assert [p.name for p in Path(os.environ["TMPDIR"]).iterdir() if p.is_dir()] == []


def test_lock_is_exclusive_patient_and_released(tmp_path):
    path = tmp_path / "lock"
    with measuring_lock(patience=0.0, path=path) as held:
        assert held
        with measuring_lock(patience=0.05, path=path, poll=0.01) as second:
            assert not second
        asked = []
        with measuring_lock(
            patience=60.0, path=path, poll=0.01, done=lambda: asked.append(1) or len(asked) > 2
        ) as third:
            assert not third
        assert len(asked) == 3
    with measuring_lock(patience=0.0, path=path) as held:
        assert held
    with measuring_lock(patience=0.0, path=tmp_path / "no" / "folder") as held:
        assert held  # there can be no lock: measuring goes on without


def test_progress_counts():
    seen = []

    class Tell:
        def update(self, stage, done, total, name):
            seen.append((stage, done, total))

    tune([objects.problem("right", "wrong")], memory_store(), effort=QUICK, progress=Tell())
    assert ("compile", 2, 2) in seen and ("check", 2, 2) in seen and seen[-1] == ("measure", 1, 1)


@pytest.mark.usefixtures("workers_from_scratch")
def test_choice_survives_json():
    problem = objects.problem("right")
    store = memory_store()
    (choice,) = tune([problem], store, effort=QUICK).values()
    assert json.loads(json.dumps(choice.to_json()))["winner"] == choice.winner
    assert choice.overhead_seconds > 0 and 0.01 <= choice.margin <= 0.10


def test_calls_in_a_workshop_share_their_processes(tmp_path):
    store = memory_store()
    with shared_worker_session() as shop:
        pool = shop.pool("cpu", QUICK.workers)
        tune([objects.problem("right", name="one")], store, effort=QUICK)
        first = set(pool.pids())
        with shared_worker_session() as same:
            assert same is shop
            tune([objects.problem("right", "slow", name="two")], store, effort=QUICK)
        assert first and first <= set(pool.pids())
        assert not list((tmp_path / "tmp").glob("*/call*"))
    assert not pool.pids()
    assert not any(is_running(pid) for pid in first)


def test_a_call_that_breaks_off_leaves_nothing_to_the_next_one():
    def prepare(problem):
        if problem.name == "bad":
            raise KeyboardInterrupt
        return problem

    problems = [objects.problem("right", name="fine"), objects.problem("right", "wrong", name="bad")]
    with shared_worker_session() as shop:
        with pytest.raises(KeyboardInterrupt):
            tune(problems, memory_store(), effort=QUICK, prepare=prepare)
        pool = shop.pool("cpu", QUICK.workers)
        assert not pool.pids()
        assert not any(pool.queues.values())
        (choice,) = tune(problems[:1], memory_store(), effort=QUICK).values()
        assert choice.origin == "measured"


def test_a_shortage_of_memory_postpones_and_is_not_stored():
    store = Store(None, device="d", versions="v")
    problem = objects.problem("greedy")
    choice = tune([problem], store, effort=QUICK)[problem.digest]
    assert choice.is_postponed and choice.uses_library
    assert "not enough free memory" in choice.rejections[0].message and "MemoryError" in choice.rejections[0].message
    assert store.lookup(problem.digest) is None


def test_one_greedy_candidate_does_not_postpone_the_others():
    store = Store(None, device="d", versions="v")
    problem = objects.problem("greedy", "right")
    choice = tune([problem], store, effort=QUICK)[problem.digest]
    assert choice.origin == "measured" and choice.seconds("right")
    assert [r.label for r in choice.rejections] == ["greedy"]
    assert store.lookup(problem.digest) is not None


def test_what_fits_nowhere_does_not_keep_the_win_of_xla_from_being_stored():
    store = memory_store()
    problem = objects.problem("greedy", "slow")
    effort = TuningBudget(seconds=0.02, timeout=20.0, workers=2, seed=1, checks_last=True)
    (choice,) = tune([problem], store, effort=effort).values()
    assert choice.origin == "measured" and choice.uses_library and choice.seconds("slow")
    assert [r.label for r in choice.rejections] == ["greedy"] and store.lookup(problem.digest) is not None


@pytest.mark.parametrize("label", ["right", "xla"])
def test_a_shortage_while_the_fastest_is_checked_postpones(tmp_path, label):
    job = measured_job(tmp_path, {"xla": (1.0, 0.001), "right": (0.5, 0.001), "slow": (2.0, 0.001)})
    short = WorkerFailed("full", reason="memory")
    job.fail(short) if label == "xla" else job.reject(label, short)
    assert job.next_to_verify("mixed") is None
    assert job.choice().is_postponed and job.transient


def test_a_postponed_choice_knows_who_is_wrong():
    """A mode that wants a kernel follows the estimate meanwhile: not to one that was just rejected."""
    problem = objects.problem("wrong", "greedy")
    (choice,) = tune([problem], memory_store(), settings=Settings(mode="fusion"), effort=QUICK).values()
    assert choice.is_postponed and choice.rejections[0].label == "xla"
    assert {r.label: r.error for r in choice.rejections[1:]} == {"wrong": "AccuracyRejected", "greedy": "WorkerFailed"}


def test_what_was_checked_before_an_interruption_is_stored():
    class Impatient:
        def update(self, stage, done, total, name):
            if (stage, done) == ("check", 2):
                raise KeyboardInterrupt

    problems, store = [objects.problem("right", name=f"n{i}") for i in range(2)], memory_store()
    effort = TuningBudget(seconds=0.02, timeout=20.0, workers=2, seed=1, checks_last=True)
    with pytest.raises(KeyboardInterrupt):
        tune(problems, store, settings=Settings(mode="fusion"), effort=effort, progress=Impatient())
    assert [c is not None and bool(c.kernels) for c in map(store.lookup, [p.digest for p in problems])].count(True) == 1


def test_who_waits_for_the_machine_finds_all_results(monkeypatch):
    store, problem = memory_store(), objects.problem("right")
    found = []

    @contextlib.contextmanager
    def lock(**more):
        with measuring_lock(**more) as may:
            yield may
            found.append(store.lookup(problem.digest))

    monkeypatch.setattr("jcuts.tune.parent.tuner.measuring_lock", lock)
    effort = TuningBudget(seconds=0.02, timeout=20.0, workers=2, seed=1, checks_last=True)
    (choice,) = tune([problem], store, settings=Settings(mode="fusion"), effort=effort).values()
    assert choice.kernels and found[0] is not None and found[0].kernels == choice.kernels


@pytest.mark.parametrize("finalists", [1, 2])
def test_what_fails_between_candidates_is_the_fault_of_none(tmp_path, monkeypatch, finalists):
    job = make_job(objects.problem("right", "slow"), tmp_path, 0)
    kernels = {}
    for label in ("right", "slow"):
        kernels[label] = str(tmp_path / f"{label}.kernel")
        requests.compile_({"problem": str(job.file), "label": label, "out": kernels[label]}, lambda _: None)
    told: list[str] = []

    def full(*_, **__):
        raise MemoryError

    monkeypatch.setattr("jcuts.tune.measure.cpu_timing.compare", full)
    request = {
        "problem": str(job.file),
        "folder": str(tmp_path),
        "sets": 0,
        "kernels": kernels,
        "stablehlo": [],
        "seconds": 0.01,
        "finalists": finalists,
    }
    before = jax.config.jax_enable_x64
    try:
        with pytest.raises(MemoryError):
            requests.measure(request, told.append)
    finally:
        jax.config.update("jax_enable_x64", before)
    assert {"right", "slow"} < set(told) and told[-1] == ""


class Noting:
    """A pool whose processes answer at once; what they are asked is noted."""

    platform, sizes = "cuda", {REFERENCE: 2, DEVICE: 1, XLA: 1, "compile": 1}

    def __init__(self):
        self.asked: list[Any] = []
        self.workers = dict.fromkeys(self.sizes, ())
        self.busy = False
        self.rounds = 0  # of the event loop that are left

    def submit(self, group, request, timeout, done):
        self.asked.append((request["op"], len(request.get("problems", ()))))
        done({"kernel": "k", "programs": 1, "seconds": 0.0})

    def warm(self, group, what, timeout):
        self.asked.append(("warm", group))

    def is_busy(self, group):
        return self.busy

    def wait(self, seconds):
        self.rounds -= 1
        return self.rounds >= 0

    def poll(self):
        pass

    drain = poll

    def stop(self, group):
        self.asked.append(("stop", group))


@pytest.mark.parametrize("roomy", [False, True])
def test_processes_that_check_stay_where_the_gpu_is_roomy(tmp_path, monkeypatch, roomy):
    monkeypatch.setattr(cuda_driver, "is_roomy", lambda: roomy)
    pool = Noting()
    session = TuningQueue(pool, QUICK, None)  # type: ignore[arg-type]
    session.add(make_job(replace(objects.problem("right"), device="a GPU"), tmp_path, 0))
    session.finish()
    assert (("stop", DEVICE) in pool.asked) == (not roomy)


def test_xla_compiles_the_first_problems_on_a_gpu_while_others_are_prepared(tmp_path, monkeypatch):
    monkeypatch.setattr("jcuts.tune.parent.tuning_queue._AHEAD", 2)
    pool, state = Noting(), {"quiet": False}
    session = TuningQueue(pool, QUICK, None, quiet=lambda: state["quiet"])  # type: ignore[arg-type]
    jobs = [make_job(replace(objects.problem("right", name=f"n{i}"), device="a GPU"), tmp_path, i) for i in range(6)]
    for job in jobs[:3]:
        session.add(job)
    assert not [op for op, _ in pool.asked if op == "compile_ahead"]  # something else of this process uses the GPU
    state["quiet"] = True
    session.add(jobs[3])
    session.add(jobs[4])
    pool.busy = True
    session.add(jobs[5])  # XLA has enough to do
    assert [asked for asked in pool.asked if asked[0] == "compile_ahead"] == [("compile_ahead", 2)] * 2
    session.compile_ahead(jobs)
    rest = [asked for asked in pool.asked if asked[0] != "compile"]
    assert rest[2:] == [
        ("compile_ahead", 2),
        ("kernels_ahead", 6),
        ("run_ahead", 0),
        ("warm", DEVICE),
        ("warm", REFERENCE),
    ]
    assert session.sent == {str(job.file) for job in jobs}
    pool.asked.clear()
    session.send_again(jobs[:2])
    assert [op for op, _ in pool.asked] == ["compile_ahead", "run_ahead", "warm", "warm"]  # chains of kernels stay


def test_kernels_are_compiled_as_they_are_timed_where_all_of_them_will_be(tmp_path):
    pool = Noting()
    session = TuningQueue(pool, replace(QUICK, finalists=1), None)  # type: ignore[arg-type]
    kinds = [("right",), ("right", "slow"), ("right",)]
    jobs = [
        make_job(replace(objects.problem(*labels, name=f"n{i}"), device="a GPU"), tmp_path, i)
        for i, labels in enumerate(kinds)
    ]
    for job in jobs:
        session.add(job)
    jobs[2].failed = True
    assert session._few_kernels(jobs) == {str(jobs[0].file): {"right": str(jobs[0].kernels["right"])}}
    assert session._few_kernels(jobs) == {}


def test_what_is_ready_goes_to_xla_while_the_last_candidates_compile(tmp_path, monkeypatch):
    monkeypatch.setattr("jcuts.tune.parent.tuning_queue._AHEAD", 2)
    pool, answers = Noting(), iter([False, False, True, True])
    session = TuningQueue(pool, QUICK, None, quiet=lambda: next(answers))  # type: ignore[arg-type]
    jobs = [make_job(replace(objects.problem("right", name=f"n{i}"), device="a GPU"), tmp_path, i) for i in range(5)]
    pool.busy = True  # not asked before all are there
    for job in jobs:
        session.add(job)
    pool.busy, pool.rounds = False, 4
    session.finish()
    wanted = [("warm", DEVICE), ("warm", REFERENCE), ("compile_ahead", 2), ("compile_ahead", 2)]
    assert [asked for asked in pool.asked if asked[0] not in ("compile", "stop")] == wanted
    session.compile_ahead(jobs)
    assert [n for op, n in pool.asked if op == "compile_ahead"] == [2, 2, 1]


def test_without_the_lock_nothing_runs_on_the_gpu_before_all_are_compiled(tmp_path):
    pool = Noting()
    session = TuningQueue(pool, QUICK, None)  # type: ignore[arg-type]
    job = make_job(replace(objects.problem("right"), device="a GPU"), tmp_path, 0)
    session.add(job)
    session.finish()
    assert [op for op, _ in pool.asked] == ["compile", "stop"]
    session.compile_ahead([job])
    assert [op for op, _ in pool.asked][2:] == ["compile_ahead", "kernels_ahead", "run_ahead", "warm", "warm"]


def test_a_kernel_is_kept_as_soon_as_it_is_compiled(monkeypatch):
    from jcuts.xla import object_cache as cache

    kernel = CompiledKernel("a" * 32, "k", b"code", 1, 0, (((4,), "float32"),), (((4,), "float32"),))
    calls: list[int] = []

    def compile_() -> CompiledKernel:
        calls.append(1)
        return kernel

    assert requests._from_cache_or_compile(kernel.digest, compile_) == kernel and cache.fetch(kernel.digest) == kernel
    assert requests._from_cache_or_compile(kernel.digest, compile_) == kernel and calls == [1]
