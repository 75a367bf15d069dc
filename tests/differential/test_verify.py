"""`jcuts.verify`: verdicts, bisection, crashes and hangs as results, reproducers, the command at 80 columns."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from jax import lax
from rich.console import Console

import jcuts
from benchmarks.known_issues import xla_wrong_results
from jcuts.base.errors import UsageError
from jcuts.cli.comparisons import verify as command
from jcuts.cli.main import main
from jcuts.differential import bisect, judge
from jcuts.differential import options as xla_options
from jcuts.differential.report import Finding, VerifyReport, WayReport
from jcuts.differential.run import flat_program, input_sets
from jcuts.differential.ways import WAYS, Run
from jcuts.trace import jaxapi
from jcuts.tune.verify.inputs import NORMAL, SPECIAL

RNG = np.random.default_rng(7)
X = RNG.standard_normal((64, 33)).astype(np.float32)
YNN_BUGS = pytest.mark.skipif(jaxlib.version.__version__ != "0.10.2", reason="a bug of jaxlib 0.10.2")


def example():
    """For the command."""
    return (X,)


def normalised(x):
    return (x - x.mean(1, keepdims=True)) / jnp.sqrt(x.var(1, keepdims=True) + 1e-5)


def verdict_of(function, change, *, special=False):
    """The verdict on results of `jax.numpy` that ``change`` alters."""
    closed = flat_program(function, X)
    sets = input_sets(closed, [X], 2, 0, special)
    reference = judge.Reference(closed, "cpu", frozenset())
    expected = [reference.expected(kind, inputs) for kind, inputs in sets]
    got = [[change(np.array(y)) for y in jaxapi.eval_closed(closed, *inputs)] for _, inputs in sets]
    return judge.judge(judge.problem_of(closed, 2.0), expected, got)


def test_right_results_are_right():
    verdict = verdict_of(normalised, lambda y: y, special=True)
    (output,) = verdict.outputs
    assert verdict.status == judge.OK
    assert sum(output.histogram) == 2 * X.size
    assert 0 < output.rms_ulp < output.limit_ulp < 100


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y.astype(jnp.bfloat16).astype(np.float32),  # lower precision
        lambda y: np.where(np.arange(y.size).reshape(y.shape) == 700, y + 1e-3, y),  # one element
        lambda y: np.where(np.arange(y.shape[0])[:, None] < 60, y, np.float32(0)),  # a tile that is not written
    ],
)
def test_wrong_results_are_wrong(change):
    verdict = verdict_of(normalised, change)
    assert verdict.status == judge.WRONG
    assert verdict.outputs[0].rms_ulp > verdict.outputs[0].limit_ulp > 0
    assert "XLA" not in verdict.message


def test_lost_nans_are_counted_apart():
    def lost(y):
        return np.where(np.isnan(y), np.float32(0), y)

    verdict = verdict_of(lambda x: jnp.maximum(x, 0.25) * 3, lost, special=True)
    (output,) = verdict.outputs
    assert verdict.status == judge.SPECIAL
    assert output.nan_lost > 0 and output.nan_made == output.infinite == 0
    assert output.histogram[0] == sum(output.histogram) == 2 * X.size


def test_discrete_results_must_be_equal():
    def other(y):
        return np.where(np.arange(y.size) == 3, (y + 1) % 33, y).astype(y.dtype)

    verdict = verdict_of(lambda x: jnp.argmax(x, 1), other)
    assert verdict.status == judge.WRONG and verdict.outputs[0].unequal == 2


def test_ulp_is_numpys_spacing():
    values = np.array([1.0, 3.5, 1e-3, 1e30, 0.0, 2.0**-130])
    np.testing.assert_array_equal(
        judge.ulp(values, np.dtype(np.float32))[:4], np.spacing(values[:4].astype(np.float32)).astype(np.float64)
    )
    assert (judge.ulp(values, np.dtype(np.float32))[4:] == 2.0**-149).all()
    assert judge.ulp(np.array([1.0]), np.dtype(jnp.bfloat16))[0] == 2.0**-7


def test_fresh_inputs_are_of_the_examples_kind():
    probabilities = np.abs(X) / 5
    indices = np.arange(64, dtype=np.int32)
    closed = flat_program(lambda p, i, z: jnp.log(p)[i] + z, probabilities, indices, np.zeros(33, np.float32))
    sets = input_sets(closed, [probabilities, indices, np.zeros(33, np.float32)], 2, 0, True)
    assert [kind for kind, _ in sets] == [NORMAL, NORMAL, SPECIAL]
    for _, (p, i, z) in sets[:2]:
        assert p.min() >= probabilities.min() and p.max() <= probabilities.max()
        assert (i == indices).all() and z.std() > 0.3
    assert not np.array_equal(sets[0][1][0], sets[1][1][0])
    assert not np.isfinite(sets[2][1][0]).all()


def test_options_have_reasons_and_are_known_to_some_jaxlib():
    refused = xla_options.refused("cpu")
    assert "xla_cpu_experimental_ynn_fusion_type" not in refused
    assert all(len(option.reason) > 10 for option in xla_options.registry())
    joined = xla_options.compiler_options(xla_options.registry(), {"xla_gpu_autotune_level"})
    assert joined["xla_disable_hlo_passes"].count("algsimp") == 2 and "xla_gpu_autotune_level" not in joined


@pytest.mark.parametrize("name", WAYS)
def test_every_way_computes_the_function(name):
    closed = flat_program(normalised, X)
    run = Run("cpu", {"xla_backend_optimization_level": 0} if WAYS[name].is_xla else {}, xla_options.refused("cpu"))
    (got,) = WAYS[name].build(closed, run)(X)
    np.testing.assert_allclose(got, normalised(X.astype(np.float64)), rtol=2e-5, atol=2e-5)
    assert (run.notes.get("kernels", 0) > 0) == (name == "jcuts")


@pytest.mark.parametrize("first, last", [(0, 0), (3, 3), (2, 9), (0, 30), (30, 30)])
def test_halving_finds_the_smallest_part(first, last):
    asked = []

    def is_wrong(start, stop):
        asked.append((start, stop))
        return start <= first and stop > last

    assert bisect.smallest_part(31, is_wrong) == (first, last + 1)
    assert len(asked) <= 12


def test_nothing_by_itself_is_wrong():
    assert bisect.smallest_part(31, lambda start, stop: False) is None


def test_a_right_function_and_its_json(tmp_path, capsys):
    here = f"{__name__}:normalised", "--args", f"{__name__}:example"
    options = "--seeds", "1", "--ways", "xla,op by op,jcuts", "--json", str(tmp_path / "report.json")
    assert main(["verify", *here, *options]) == 0
    found = json.loads((tmp_path / "report.json").read_text())
    assert [way["status"] for way in found["ways"]] == ["ok"] * 3
    assert found["ways"][2]["kernels"] >= 1 and found["findings"] == []
    assert "every way is right" in capsys.readouterr().out


def test_what_does_not_end_hangs():
    """2^24 + 1 is no float32: this loop ends in float64 alone."""

    def endless(x):
        return lax.while_loop(lambda v: v < 2.0**24 + 2, lambda v: v + 1, x + np.float32(2.0**24 - 3))

    report = jcuts.verify(endless, np.float32(0), seeds=1, seconds=0.5, ways=["xla"], special=False, bisection=False)
    (way,) = report.ways
    assert (way.status, way.message) == ("hangs", "hangs after 0.5 s")
    assert report.verdict == "xla hangs"


@YNN_BUGS
def test_a_wrong_sum_is_bisected_and_reproduced(tmp_path, monkeypatch):
    monkeypatch.setattr(bisect, "pass_names", lambda session, part: ["dce", "dot-library-rewriter"])
    function, args = xla_wrong_results.cases()["sum_of_squares"]
    report = jcuts.verify(
        function, *args, seeds=1, special=False, ways=["xla", "op by op"], write_to=tmp_path / "repro.py"
    )
    assert report.verdict == "xla is wrong; op by op is right"
    (finding,) = report.findings
    assert finding.primitives == ("dot_general", "integer_pow", "reduce_sum")
    assert "xla_wrong_results.py" in finding.where[0]
    assert finding.options[0][0].startswith("xla_cpu_experimental_ynn_fusion_type")
    assert finding.passes == ("dot-library-rewriter",)
    assert report.reproducer == str(tmp_path / "repro.py")  # it has failed without jcuts
    assert "jcuts" not in (tmp_path / "repro.py").read_text().split("DATA")[0]


@pytest.mark.slow
@YNN_BUGS
def test_passes_are_those_that_xla_runs():
    function, args = xla_wrong_results.cases()["sum_of_squares"]
    report = jcuts.verify(function, *args, seeds=1, special=False, ways=["xla", "op by op"])
    assert "dot-library-rewriter" in report.findings[0].passes


@YNN_BUGS
def test_a_crash_is_a_result():
    function, args = xla_wrong_results.cases()["rank_7_reduce"]
    report = jcuts.verify(function, *args, seeds=1, special=False, ways=["xla"], bisection=False)
    assert (report.ways[0].status, report.ways[0].message) == ("crashes", "the process ends with SIGSEGV")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"ways": ["lla"]}, "no way 'lla'"),
        ({"ways": []}, "is empty"),
        ({"seeds": 0}, "seeds=0"),
        ({"seconds": -1.0}, "seconds=-1"),
        ({"tolerance": float("nan")}, "tolerance=nan"),
        ({"tune": "maybe"}, "tune='maybe'"),
    ],
)
def test_impossible_options_are_named(options, message):
    with pytest.raises(UsageError, match=message):
        jcuts.verify(normalised, X, **options)


def made_report():
    output = judge.OutputErrors(0, "float32", (8, 8), (60, 3, 1, 0, 0, 0, 0, 0), 1.25, 1.0, 20.0).__dict__
    bad = {**output, "status": "wrong", "rms_ulp": 1e6, "nan_lost": 12, "message": "far too far"}
    ways = (
        WayReport("xla", "", "wrong", "output 0: " + "a long message " * 12, (bad,), 0.5),
        WayReport("op by op", "", "ok", "", (output,), 0.5),
        WayReport("jcuts", "", "hangs", "hangs after 60 s", (), 0.0),
        WayReport("no fusion", "", "no reference"),
    )
    finding = Finding(
        "xla", "wrong", "", (4, 7), ("mul", "add", "mul"), ("m.py:3 (f)",), options=(("a=1", "why " * 40),)
    )
    report = VerifyReport("f", "cpu", {"jax": "0.10.2", "jaxlib": "0.10.2", "numpy": "2.4"}, 9, 3, True)
    return replace(report, ways=ways, findings=(finding,), notes=("a note",), reproducer="f.py")


def test_the_report_fits_80_columns():
    out = io.StringIO()
    command.show(made_report(), Console(file=out, width=80, highlight=False))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("f: jcuts hangs, xla is wrong; op by op is right")
    text = out.getvalue()
    assert "equations 4 to 6 (2 mul, add)" in text and "hangs after 60 s" in text and "94%" in text
    assert json.loads(json.dumps(made_report().to_dict()))["ways"][0]["outputs"][0]["nan_lost"] == 12
