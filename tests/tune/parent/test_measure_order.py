"""XLA's side of problems that follows from others: families, parts, convolutions with their ReLU apart."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jcuts.trace.canonical import canonical_text
from jcuts.tune.baseline import conv_relu_bound, interpolate
from jcuts.tune.choice import FAMILY, LIBRARY, PROFILED, Choice, Measurement
from jcuts.tune.parent.job import TuningJob
from jcuts.tune.parent.measure_order import measure_in_order
from jcuts.tune.problem import Candidate, Input, Output, Problem
from jcuts.tune.time_budget import TimeBudget

S = jax.ShapeDtypeStruct


def text_of(function, *shapes):
    return canonical_text(jax.make_jaxpr(function)(*(S(shape, "float32") for shape in shapes)))


def layer(channels, image=14, total=1024, start=0):
    """A layer of a dense block: slice, scale, ReLU, product."""

    def function(x, scale, w):
        y = jnp.maximum(x[..., start : start + channels] * scale, 0)
        return jnp.maximum(y.reshape(-1, channels) @ w, 0)

    return text_of(function, (4, image, image, total), (channels,), (channels, 128))


def test_layers_that_differ_in_one_size_are_a_family():
    texts = {f"{n:04}": layer(n) for n in range(288, 1024, 32)} | {"other": layer(288, image=7), "none": ""}
    found = interpolate.interpolation_neighbours(texts)
    assert 2 * len(found) > len(texts) and not {"0288", "0992", "other", "none"} & set(found)
    kept = sorted(int(n) for n in set(texts) - set(found) - {"other", "none"})
    assert all(b <= interpolate.STEP * a for a, b in itertools.pairwise(kept))
    for key, place in found.items():
        low, high = int(place.low), int(place.high)
        assert low in kept and high in kept and low < int(key) < high
        assert place.share == pytest.approx((int(key) - low) / (high - low))
        ends = (low * 1.0, low * 2.0), (high * 1.0, high * 2.0)
        assert place.seconds(*ends) == pytest.approx((int(key), 2 * int(key)))


def test_few_problems_or_two_sizes_are_no_family():
    assert not interpolate.interpolation_neighbours({f"{n}": layer(n) for n in (256, 288, 320)})
    assert not interpolate.interpolation_neighbours(
        {f"{n}": layer(n, image=n // 32) for n in (256, 288, 320, 352, 384)}
    )


def test_equal_problems_in_other_places_stand_for_each_other():
    texts = {f"{n}/{k}": layer(n, start=k) for n in (256, 320, 384, 448) for k in range(2)}
    found = interpolate.interpolation_neighbours(texts)
    assert {"256/1", "320/1", "384/1", "448/1"} <= set(found)
    assert found["448/1"].low == found["448/1"].high == "448/0" and found["448/1"].share == 0


def test_neighbours_that_disagree_tell_nothing():
    place = interpolate.InterpolationPair("a", "b", 0.5)
    assert place.seconds((2.0, 2.0), (3.0, 3.0)) == (2.5, 2.5)
    assert place.seconds((2.0, 2.0), (4.5, 4.5)) is None and place.seconds((2.0, 2.0), (1.5, 1.5)) is None


def convolution(after, groups=1, before=lambda x: x * 2):
    def function(x, w, b):
        layout = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(before(x), w, (1, 1), "SAME", None, None, layout, groups)
        return after(y, b)

    return text_of(function, (2, 8, 8, 16), (3, 3, 16 // groups, 32), (32,))


def test_relus_behind_convolutions_are_found():
    assert conv_relu_bound.conv_relu_result_bytes(convolution(lambda y, b: jnp.maximum(y + b, 0))) == [
        4 * 2 * 8 * 8 * 32
    ]
    assert conv_relu_bound.conv_relu_result_bytes(convolution(lambda y, b: jnp.maximum(y + b + y, 0))) == [
        4 * 2 * 8 * 8 * 32
    ]
    for after in (lambda y, b: y + b, lambda y, b: jnp.maximum(y * b, 0), lambda y, b: jnp.clip(y + b, 0, 6)):
        assert conv_relu_bound.conv_relu_result_bytes(convolution(after)) == []
    assert conv_relu_bound.conv_relu_result_bytes(convolution(lambda y, b: jnp.maximum(y + b, 0), groups=16)) == []
    assert (
        conv_relu_bound.conv_relu_result_bytes(convolution(lambda y, b: jnp.maximum(y + b, 0), before=lambda x: x))
        == []
    )
    assert conv_relu_bound.conv_relu_result_bytes(layer(64)) == [] and conv_relu_bound.conv_relu_result_bytes("") == []


def test_passes_over_results_take_their_bytes_twice():
    assert conv_relu_bound.memory_pass_seconds([6, 12], 10.0) == pytest.approx(
        36 / (conv_relu_bound.SHARE * 10.0) + 2 * conv_relu_bound.LAUNCH
    )
    assert conv_relu_bound.memory_pass_seconds([6], 0.0) == math.inf


def test_what_is_not_clear_is_not_settled():
    assert (
        interpolate.decide_from_bounds(None, 1.0, 2.0, 1.1) == 2.0
        and interpolate.decide_from_bounds(None, 1.0, 2.0, 1.1, math.inf) is None
    )
    assert interpolate.decide_from_bounds(9.0, 1.0, 2.0, 1.1, math.inf) is None
    assert (
        interpolate.decide_from_bounds(2.0, 1.0, 2.0, 1.1) == 2.0
        and interpolate.decide_from_bounds(1.9, 1.0, 2.0, 1.1) is None
    )
    assert (
        interpolate.decide_from_bounds(0.9, 1.0, 2.0, 1.1) == 1.0
        and interpolate.decide_from_bounds(0.95, 1.0, 2.0, 1.1) is None
    )
    assert interpolate.decide_from_bounds(2.1, 1.0, 2.0, 1.1, 1.25) is None


class Timed:
    """A session that gives each problem the times it is told: XLA's, the kernel's, and the passes of one apart."""

    def __init__(self, times, seconds=math.inf):
        self.times, self.told, self.asked, self.again = times, [], [], []
        self.time = TimeBudget(seconds)

    def report_progress(self, stage, name):
        self.told.append(name)

    def measure(self, job, expected=None):
        name = job.problem.name
        self.asked.append((name, expected is None, bool(job.apart)))
        xla, kernel, *_ = self.times[name]
        rows = [("k", kernel)] if kernel else []
        rows += [(LIBRARY, xla)] if expected is None else []
        job.answer = {
            "measurements": [
                {"label": label, "seconds": s, "low": s, "high": s, "runs": 5, "method": "chain"} for label, s in rows
            ],
            "overhead": 0.0,
            "passes": self.times[name][2] if job.apart else 0.0,
        }

    def send_again(self, jobs):
        for job in jobs:
            job.remeasure_baseline()
        self.again += [job.problem.name for job in jobs]


def job_of(tmp_path, name, **more):
    spec = Input((4,), "float32")
    problem = Problem(name, (spec,), (Output((4,), "float32"),), (Candidate("object", "{}", "k"),), name=name)
    return TuningJob(problem, tmp_path, tmp_path / name, compiled={"k": "digest"}, **more)


def run(tmp_path, times, seconds=math.inf, **more):
    jobs = [job_of(tmp_path, name, **more.get(name, {})) for name in times]
    digests = {job.problem.name: job.problem.digest for job in jobs}
    for job in jobs:
        if job.between is not None:
            job.between = interpolate.InterpolationPair(
                digests[job.between.low], digests[job.between.high], job.between.share
            )
        job.parts = tuple(digests[part] for part in job.parts)
    session = Timed(times, seconds)
    done = [job.problem.name for job in measure_in_order(session, jobs, lambda digest: None)]  # type: ignore[arg-type]
    assert sorted(done) == sorted(times) and sorted(session.told) == sorted(times)
    return session, {job.problem.name: job for job in jobs}


def library(job):
    (row,) = [row for row in job.answer["measurements"] if row["label"] == LIBRARY]
    return row["seconds"], row["method"]


def test_clear_members_of_a_family_are_not_measured_in_full(tmp_path):
    place = interpolate.InterpolationPair("low", "high", 0.5)
    times = {
        "low": (2.0, 1.0),
        "wins": (9.0, 1.9),
        "close": (2.7, 2.4),
        "loses": (9.0, 4.0),
        "far": (9.0, None),
        "high": (3.0, 1.0),
    }
    session, jobs = run(tmp_path, times, **{name: {"between": place} for name in ("wins", "close", "loses", "far")})
    assert session.again == ["close"] and library(jobs["close"]) == (2.7, "chain")
    assert all(library(jobs[name]) == (2.5, FAMILY) and jobs[name].expected for name in ("wins", "loses", "far"))
    assert jobs["wins"].next_to_verify("mixed") == "k" and jobs["loses"].next_to_verify("mixed") is None
    assert not jobs["low"].expected and not jobs["close"].expected
    assert session.asked.count(("wins", False, False)) == 1 and ("close", True, False) in session.asked


def test_relus_are_measured_with_their_convolution_where_it_matters(tmp_path):
    times = {"wins": (3.0, 1.0, 1.5), "close": (3.0, 2.0, 1.5), "loses": (3.0, 3.0, 1.5), "plain": (3.0, 2.0, 0.0)}
    session, jobs = run(tmp_path, times, **{name: {"apart": [4]} for name in ("wins", "close", "loses")})
    assert session.again == ["close", "loses"]  # XLA's own program will run where it wins
    assert library(jobs["wins"]) == (1.5, FAMILY)
    assert all(library(jobs[name]) == (3.0, "chain") for name in ("close", "loses", "plain"))
    assert session.asked[-2:] == [("close", True, False), ("loses", True, False)]


def test_where_kernels_gain_little_all_of_xla_is_compiled(tmp_path):
    times = {"wins": (3.0, 1.0, 1.5), "much": (50.0, 48.0)}
    session, jobs = run(tmp_path, times, wins={"apart": [4]})
    assert session.again == ["wins"] and library(jobs["wins"]) == (3.0, "chain")


def test_wholes_take_as_long_as_their_parts(tmp_path):
    times = {"whole": (9.0, 3.0), "slow": (5.0, 4.5), "a": (2.0, 1.0), "b": (3.0, 1.0, 1.0)}
    session, jobs = run(tmp_path, times, whole={"parts": ("a", "b")}, slow={"parts": ("a", "b")}, b={"apart": [4]})
    assert library(jobs["whole"]) == (4.0, FAMILY)  # the least that the parts take
    assert session.again == ["slow"] and library(jobs["slow"]) == (5.0, "chain")


def test_where_time_is_limited_no_program_of_xla_is_compiled_for_a_whole(tmp_path):
    times = {
        "slow": (5.0, 4.9),
        "loses": (4.0, 5.1),
        "unknown": (9.0, 1.0),
        "a": (2.0, 1.0),
        "b": (3.0, 1.0),
        "c": (1, 1),
    }
    wholes = {"slow": {"parts": ("a", "b")}, "loses": {"parts": ("a", "b")}, "unknown": {"parts": ("a", "gone")}}
    digests = {"gone": "of a problem that was not reached"}
    jobs = [job_of(tmp_path, name, **wholes.get(name, {})) for name in times]
    digests |= {job.problem.name: job.problem.digest for job in jobs}
    for job in jobs:
        job.parts = tuple(digests[part] for part in job.parts)
    session = Timed(times, 60.0)
    found = {job.problem.name: job for job in measure_in_order(session, jobs, lambda digest: None)}  # type: ignore[arg-type]
    assert session.again == [] and set(found) == set(times)
    assert library(found["slow"]) == (5.0, FAMILY) and found["slow"].next_to_verify("mixed") == "k"
    assert library(found["loses"]) == (5.0, FAMILY) and found["loses"].next_to_verify("mixed") is None
    assert found["unknown"].skipped and found["unknown"].answer is None  # another round knows its parts


@pytest.mark.parametrize(("seconds", "again"), [(math.inf, ["close"]), (60.0, [])])
def test_where_a_profile_tells_xlas_time_its_program_is_compiled_only_in_close_cases(tmp_path, seconds, again):
    times = {"wins": (9.0, 1.0), "close": (2.0, 1.9), "loses": (9.0, 4.0), "plain": (3.0, 1.0)}
    jobs = [job_of(tmp_path, name, profiled=name != "plain") for name in times]
    session, profile = Timed(times, seconds), {job.problem.digest: 2.0 for job in jobs}
    told = (lambda _: None, profile.get)
    found = {job.problem.name: job for job in measure_in_order(session, jobs, *told)}  # type: ignore[arg-type]
    assert session.again == again and set(found) == set(times)
    assert library(found["wins"]) == library(found["loses"]) == (2.0, PROFILED)
    assert library(found["close"]) == ((2.0, "chain") if again else (2.0, PROFILED))
    assert library(found["plain"]) == (3.0, "chain")
    assert found["wins"].next_to_verify("mixed") == "k" and found["loses"].next_to_verify("mixed") is None


def test_where_the_profile_failed_xlas_program_is_compiled(tmp_path):
    times = {"a": (2.0, 1.0)}
    session = Timed(times, math.inf)
    jobs = [job_of(tmp_path, "a", profiled=True)]
    (job,) = measure_in_order(session, jobs, lambda _: None, lambda _: None)  # type: ignore[arg-type]
    assert session.again == ["a"] and library(job) == (2.0, "chain")


def test_what_is_missing_is_measured(tmp_path):
    place = interpolate.InterpolationPair("a", "b", 0.5)
    session, jobs = run(tmp_path, {"a": (2.0, 1.0), "b": (9.0, 1.0), "c": (3.0, 1.0)}, c={"between": place})
    assert session.again == ["c"] and library(jobs["c"]) == (3.0, "chain") and session.asked[-1][0] == "c"


def test_times_that_follow_from_others_are_no_base_for_more():
    def timed(method):
        return Choice("p", LIBRARY, "", "measured", (Measurement(LIBRARY, 2.0, 2.0, 2.0, 5, method),))

    assert timed(FAMILY).seconds(LIBRARY) == 2.0 and timed(FAMILY).measured_seconds(LIBRARY) is None
    assert timed(PROFILED).seconds(LIBRARY) == 2.0 and timed(PROFILED).measured_seconds(LIBRARY) is None
    assert timed("chain").measured_seconds(LIBRARY) == 2.0 and timed("chain").measured_seconds("k") is None
