"""Convolutions under a workspace limit in ``jcuts.optimize``, from a hand-written database and a cuDNN on the host."""

from __future__ import annotations

import contextlib
import dataclasses
import io

import jax
import numpy as np
import pytest
from rich.console import Console

import jcuts
from jcuts.base import knobs
from jcuts.base.errors import CandidateRejected, WorkerFailed
from jcuts.base.settings import Settings
from jcuts.microbatch.benchmark import Found
from jcuts.microbatch.convolution import Convolution
from jcuts.microbatch.database import Database
from jcuts.microbatch.timings import MicroConfig
from jcuts.pipeline import microbatch_convs
from jcuts.pipeline import passes as pipeline_passes
from jcuts.report import rich_tables
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from jcuts.tune.cudnn import tables as cudnn_tables
from jcuts.tune.cudnn.measurer import Measurer, measured, measured_in_slices, this_device, to_slice
from jcuts.xla.cudnn import call as cudnn_call
from jcuts.xla.cudnn.match import LIBRARY, Site

SPACE = 4096  # bytes per sample and algorithm number, as tests/xla/fake_cudnn.cc asks for
BATCH = 6
FORMATS = ("NHWC", "HWIO", "NHWC")


def layer(x, w, stride=1):
    return jax.lax.conv_general_dilated(x, w, (stride, stride), ((1, 1), (1, 1)), dimension_numbers=FORMATS)


def net(p, x):
    y = jax.nn.relu(layer(x, p[0]))
    return (layer(y, p[1], 2) ** 2).mean()


def arguments():
    rng = np.random.default_rng(0)
    p = [rng.standard_normal(s).astype(np.float32) for s in ((3, 3, 4, 8), (3, 3, 8, 8))]
    return p, rng.standard_normal((BATCH, 8, 8, 4)).astype(np.float32)


def fill(fn, *args, own: float = 1.0, own_space: int = 0, own_algorithm: str = LIBRARY) -> list[Site]:
    """Times for every convolution of a function: half the batch by algorithm 2 is fastest, alone it is slow.

    undivided, algorithm 0: 0.9 s    by 3, algorithm 2: 0.2 s each, 3 * 2 * 4096 B    by 1, algorithm 0: 0.3 s
    """
    from jcuts.rewrite.simplify import simplify
    from jcuts.trace.inline import inline

    database = Database(knobs.current().cache_dir / "microbatch.sqlite")
    device = this_device("cpu")
    flat = simplify(inline(jax.make_jaxpr(fn)(*args)))
    found = [site for site in microbatch_convs.sites(flat) if isinstance(site, Site)]
    for site in found:
        names = cudnn_call.algorithms(site.convolution.kind)
        rows = {
            site.batch: [
                MicroConfig(site.batch, names[0], "tf32", 0.9, 0),
                MicroConfig(site.batch, own_algorithm, "tf32", own, own_space),
            ],
            3: [MicroConfig(3, names[2], "tf32", 0.2, 3 * 2 * SPACE)],
            1: [MicroConfig(1, names[0], "tf32", 0.3, 0)],
        }
        for batch, micros in rows.items():
            database.record(device, site.convolution, batch, micros)
    return found


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), found, expected)


def optimized(fn, **more):
    return jcuts.optimize(fn, **{"tune": "cached", "mode": "fusion", **more})


step = jax.value_and_grad(net)


def test_every_convolution_of_a_training_step_is_divided(host_cudnn, cache_dir):
    args = arguments()
    fill(step, *args)
    fast = optimized(step, workspace_limit=1 << 20)
    report = fast.explain(*args)
    assert [d.layer for d in report.divisions] == [
        "conv1 forward",
        "conv2 forward",
        "conv3 backward-filter",
        "conv4 backward-data",
        "conv5 backward-filter",
    ]
    for row in report.divisions:
        assert row.division.startswith("2 x 3 cudnn/") and row.division.endswith(":tf32")
        assert row.seconds == pytest.approx(0.4) and row.undivided == 0.9 and row.workspace == 6 * SPACE
        assert row.xla_seconds == 1.0 and len(row.front) == 2 and "test_microbatch_convs.py" in row.where
    host_cudnn.calls()
    close(fast(*args), step(*args))
    launched = [call for call in host_cudnn.calls() if "algorithm=" in call]
    assert len(launched) == 10 and all("n=3 k=8 algorithm=2 math=0" in call for call in launched)
    text = str(report)
    assert "5 of 5 convolutions by cuDNN: workspaces of 120.0 KiB in all, 24.0 KiB at once" in text
    assert "front of" in text and "ffi_call" not in text.split("note:")[0]
    assert report.to_dict()["divisions"][0]["workspace"] == 6 * SPACE
    page = report.to_html(cache_dir / "page.html").read_text()
    assert "<h2>Convolutions</h2>" in page and "conv5 backward-filter" in page
    console = Console(record=True, width=220, file=io.StringIO())
    console.print(rich_tables.report_tables(report))
    assert "Pareto fronts" in console.export_text()


def test_the_network_for_offline_analysis(host_cudnn, cache_dir):
    from jcuts.microbatch.analysis import analyse
    from jcuts.rewrite.simplify import simplify
    from jcuts.trace.inline import inline

    args = arguments()
    fill(step, *args)
    network = microbatch_convs.network_of(simplify(inline(jax.make_jaxpr(step)(*args))), "step")
    found = analyse(network, Database(cache_dir / "microbatch.sqlite"), this_device("cpu"), total=12 * SPACE)
    assert found.rows[0].use.name == "conv1 forward" and found.total <= 12 * SPACE


def test_nothing_is_sliced_or_joined(host_cudnn, cache_dir):
    args = arguments()
    fill(step, *args)
    lowered = optimized(step, workspace_limit=1 << 20).lower(*args)
    text = lowered.compile().as_text()
    assert text.count('custom_call_target="jcuts_cudnn_host"') == 5
    for word in (" slice(", " concatenate(", " dynamic-slice(", " dynamic-update-slice("):
        assert word not in text
    assert "reverse" not in text  # of filters, for gradients: cuDNN takes them as they are


def test_the_limit_decides(host_cudnn, cache_dir):
    args = arguments()
    fill(net, *args)
    (tight, _) = optimized(net, workspace_limit=100).explain(*args).divisions
    assert tight.division == "1 x 6 cudnn/IMPLICIT_GEMM:tf32" and tight.workspace == 0
    (total, _) = optimized(net, total_workspace=6 * SPACE).explain(*args).divisions
    assert total.division.startswith("2 x 3") and total.workspace == 6 * SPACE
    close(optimized(net, workspace_limit=100)(*args), net(*args))


@pytest.mark.parametrize("own, space, kept", [(0.41, 0, True), (0.43, 0, False), (0.01, 1 << 21, False)])
def test_mixed_keeps_xla_where_that_is_fastest_within_the_limit(host_cudnn, cache_dir, own, space, kept):
    args = arguments()
    fill(net, *args, own=own, own_space=space)
    report = optimized(net, mode="mixed", workspace_limit=1 << 20).explain(*args)
    rows = report.divisions
    assert [bool(row.division) for row in rows] == [not kept] * 2 and (microbatch_convs.RACE in report.notes) != kept
    if kept:
        assert rows[0].why == "its own convolution is the fastest within the limit" and rows[0].xla_seconds == own


def decided(args, own_space, limit):
    fill(net, *args, own=1e-9, own_space=own_space)
    fast = jcuts.optimize(net, mode="mixed", workspace_limit=limit)  # decisions are kept by limit
    with knobs.scope(max_candidates=1):
        close(fast(*args), net(*args))
    return fast.decision(*args), fast.explain(*args)


def test_plain_xla_is_no_candidate_where_it_takes_more_than_the_limit(host_cudnn, cache_dir):
    decision, report = decided(arguments(), 1 << 21, 1 << 20)
    assert decision.chosen.startswith("jcuts") and all(row.division for row in report.divisions)
    assert "conv1 forward (2.0 MiB), conv2 forward (2.0 MiB)" in decision.rejected["xla"]
    assert "more workspace than is allowed" in str(report) and not any("nothing else fits" in n for n in report.notes)


def test_plain_xla_competes_where_it_keeps_to_the_limit(host_cudnn, cache_dir):
    decision, report = decided(arguments(), 1 << 20, 2 << 20)
    assert "xla" not in decision.rejected and not any(row.division for row in report.divisions)


def test_where_nothing_keeps_the_limit_xla_competes_and_a_note_says_so(host_cudnn, cache_dir):
    args = arguments()
    sites_ = fill(net, *args, own=1e-9, own_space=1 << 21)
    first = cudnn_call.algorithms("forward")[0]
    big, own = MicroConfig(BATCH, first, "tf32", 0.9, 1 << 22), MicroConfig(BATCH, LIBRARY, "tf32", 1e-9, 1 << 21)
    database, device = Database(cache_dir / "microbatch.sqlite"), this_device("cpu")
    database.record(device, sites_[0].convolution, BATCH, [big, own])
    for size in (1, 3):
        database.record(device, sites_[0].convolution, size, [])
    fast = jcuts.optimize(net, mode="mixed", workspace_limit=(1 << 20) + 1)
    with knobs.scope(max_candidates=1):
        close(fast(*args), net(*args))
    report = fast.explain(*args)
    assert "xla" not in fast.decision(*args).rejected
    assert [bool(row.division) for row in report.divisions] == [False, True]
    note = "XLA's own convolutions take more than 1.0 MiB, and nothing else fits: conv1 forward (2.0 MiB)"
    assert any(note in text for text in report.notes)


def test_a_division_must_be_clearly_faster_than_a_single_call(host_cudnn, cache_dir):
    args = arguments()
    database = Database(cache_dir / "microbatch.sqlite")
    for site in fill(net, *args):
        names = cudnn_call.algorithms(site.convolution.kind)
        single = MicroConfig(BATCH, names[1], "tf32", 0.41, SPACE * BATCH)
        database.record(this_device("cpu"), site.convolution, BATCH, [single])
    rows = optimized(net, workspace_limit=1 << 20).explain(*args).divisions
    assert all(row.division == "1 x 6 cudnn/IMPLICIT_PRECOMP_GEMM:tf32" for row in rows)


def test_simpler_calls_keep_to_a_sum_of_workspaces(host_cudnn, cache_dir, monkeypatch):
    args, total = arguments(), 20 * SPACE
    database = Database(cache_dir / "microbatch.sqlite")
    for site in fill(net, *args):
        names = cudnn_call.algorithms(site.convolution.kind)
        single = MicroConfig(BATCH, names[1], "tf32", 0.41, total)
        database.record(this_device("cpu"), site.convolution, BATCH, [single])
    closed = simplify(inline(jax.make_jaxpr(net)(*args)))
    for constraint, most in (("liveness", 2 * total), ("paper", total)):
        monkeypatch.setattr(microbatch_convs, "CONSTRAINT", constraint)
        settings = Settings(mode="fusion", total_workspace=total)
        rows = microbatch_convs.divide_convolutions(closed, settings, "cpu", may_measure=False).rows
        assert all(row.division for row in rows) and sum(row.workspace for row in rows) <= most
        assert all(row.division.startswith("1 x") == (constraint == "liveness") for row in rows)


def test_mixed_divides_nothing_while_xla_s_own_is_not_timed(host_cudnn, cache_dir):
    args = arguments()
    fill(net, *args, own_algorithm="somebody's")
    rows = optimized(net, mode="mixed", workspace_limit=1 << 20).explain(*args).divisions
    assert all("not timed" in row.why and not row.division for row in rows)


def test_what_was_not_measured_is_left_to_xla(host_cudnn, cache_dir):
    args = arguments()
    fast = optimized(net, workspace_limit=1 << 20)
    assert {row.why for row in fast.explain(*args).divisions} == {microbatch_convs.NOT_TIMED}
    close(fast(*args), net(*args))
    fill(net, *args)  # the plan that is remembered is not used any more
    assert all(row.division for row in fast.explain(*args).divisions)


def test_impossible_limits_and_layers_have_reasons(host_cudnn, cache_dir):
    def odd(x, w):
        return jax.lax.conv_general_dilated(x, w, (2, 2), ((0, 1), (0, 1)), dimension_numbers=FORMATS)

    x, w = np.ones((2, 4, 4, 3), np.float32), np.ones((3, 3, 3, 2), np.float32)
    (row,) = optimized(odd, workspace_limit=1 << 20).explain(x, w).divisions
    assert "padding that differs" in row.why
    report = optimized(net, workspace_limit=1 << 20, tune="off").explain(*arguments())
    assert any("tune='off'" in note for note in report.notes) and not report.divisions


def test_without_cudnn_a_note_says_so(cache_dir):
    report = optimized(net, workspace_limit=1 << 20).explain(*arguments())
    assert any("cuDNN does not compute on platform cpu" in note for note in report.notes)
    assert not optimized(net).explain(*arguments()).notes or "cuDNN" not in str(optimized(net).explain(*arguments()))


def test_transformations_of_the_result(host_cudnn, cache_dir):
    p, x = arguments()
    fast = optimized(net, workspace_limit=1 << 20)
    fill(step, p, x)
    close(jax.grad(lambda p: fast(p, x))(p), jax.grad(lambda p: net(p, x))(p))
    batched = jax.vmap(net, (None, 0))
    xs = np.stack([x, 2 * x])
    fill(batched, p, xs)
    host_cudnn.calls()
    close(jax.vmap(fast, (None, 0))(p, xs), batched(p, xs))
    assert any("algorithm=" in call for call in host_cudnn.calls())
    close(jax.jit(lambda p: fast(p, x) + 1)(p), net(p, x) + 1)


def test_bodies_of_loops(host_cudnn, cache_dir):
    def loop(x, ws):
        return jax.lax.scan(lambda x, w: (jax.nn.relu(layer(x, w)), None), x, ws)[0]

    rng = np.random.default_rng(0)
    x, ws = rng.standard_normal((4, 5, 5, 3)), rng.standard_normal((2, 3, 3, 3, 3))
    args = x.astype(np.float32), ws.astype(np.float32)
    fill(loop, *args)
    fast = optimized(loop, workspace_limit=1 << 20)
    (row,) = fast.explain(*args).divisions
    assert row.division
    close(fast(*args), loop(*args))


def test_an_error_of_cudnn_names_the_layer(host_cudnn, cache_dir):
    args = arguments()
    fill(net, *args)
    fast = optimized(net, workspace_limit=1 << 20)
    fast(*args)
    host_cudnn.fail("Forward")
    with pytest.raises(
        Exception, match=r"convolution conv1 forward \[pipeline/test_microbatch_convs.py:\d+ \(layer\)\]"
    ):
        fast(*args).block_until_ready()


def test_missing_times_are_measured_at_the_first_call(host_cudnn, cache_dir):
    def small(x, w):
        return layer(x, w)

    x, w = np.ones((3, 5, 5, 2), np.float32), np.ones((3, 3, 2, 2), np.float32)
    with knobs.scope(max_candidates=1):
        fast = jcuts.optimize(small, workspace_limit=1 << 20)
        close(fast(x, w), small(x, w))
    (row,) = fast.explain(x, w).divisions
    assert row.xla_seconds is not None and row.front
    (network,) = Database(cache_dir / "microbatch.sqlite").networks()  # for the command line
    assert network.name.startswith("small ") and network.held
    (entry,) = {(e.convolution, e.device) for e in Database(cache_dir / "microbatch.sqlite").entries()}
    assert entry[1] == this_device("cpu")


def test_sizes_that_fill_the_limit_are_measured_too(host_cudnn, cache_dir, monkeypatch):
    asked = []

    def between(table, batch, limit, *, precision):
        asked.append((batch, limit, precision))
        return (3,)

    monkeypatch.setattr(cudnn_tables, "sizes_between", between)
    x, w = np.ones((4, 5, 5, 4), np.float32), np.ones((3, 3, 4, 4), np.float32)
    with knobs.scope(max_candidates=1):
        jcuts.optimize(layer, mode="fusion", workspace_limit=1 << 20, total_workspace=1 << 19)(x, w)
    assert asked == [(4, 1 << 19, "tf32")]
    sizes = {entry.batch for entry in Database(cache_dir / "microbatch.sqlite").entries()}
    assert sizes == {1, 2, 3, 4}


def test_what_slices_make_fit_is_measured_once(host_cudnn, cache_dir, monkeypatch):
    def wide(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"))

    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 2, 4, 4)).astype(np.float32)
    w = rng.standard_normal((16, 2, 3, 3)).astype(np.float32)
    (site,) = (s for s in microbatch_convs.sites(jax.make_jaxpr(wide)(x, w)) if isinstance(s, Site))
    device, database = this_device("cpu"), Database(cache_dir / "microbatch.sqlite")
    transform = cudnn_call.algorithms("forward").index("cudnn/FFT")
    for n in (1, 2, 4):  # one sample of the transform fits
        micros = [
            MicroConfig(n, "cudnn/IMPLICIT_GEMM", "tf32", 1.0 * n, 0),
            MicroConfig(n, "cudnn/FFT", "tf32", 0.01 + 0.001 * n, n * transform * SPACE),
        ]
        database.record(device, site.convolution, n, micros)
    monkeypatch.setenv("FAKE_CUDNN_OUTPUTS", "16")
    closed, limit = jax.make_jaxpr(wide)(x, w), 2 * transform * SPACE - 1
    settings, asked = Settings(mode="fusion", workspace_limit=limit), []
    slices = Measurer.slices
    monkeypatch.setattr(Measurer, "slices", lambda self, c, n, wanted: asked.append(n) or slices(self, c, n, wanted))
    for _ in range(2):
        cudnn_tables._database.cache_clear()  # another process
        (row,) = microbatch_convs.divide_convolutions(closed, settings, "cpu", may_measure=True).rows
    assert asked == [2] and row.division == "2 x 2 cudnn/FFT/slices=2:tf32"  # two slices of 4 samples do not fit
    assert row.undivided == 4.0 and row.workspace == transform * SPACE + site.convolution.result_bytes
    remarks = Database(cache_dir / "microbatch.sqlite").remarks(device, site.convolution, 2)
    assert remarks == {"slices": f"cudnn/FFT tf32 {limit}"}
    host_cudnn.calls()
    fast = jcuts.optimize(wide, mode="fusion", workspace_limit=limit, tune="cached")
    close(fast(x, w), wide(x, w))
    calls = [call for call in host_cudnn.calls() if "k=8 algorithm=4" in call]
    assert len(calls) == 4


def test_slices_that_fail_are_not_tried_again(host_cudnn, cache_dir, monkeypatch):
    c = Convolution("forward", 2, 16, (4, 4), (3, 3))
    device, database = this_device("cpu"), Database(None)
    for n in (1, 2):
        database.record(device, c, n, [MicroConfig(n, "cudnn/FFT", "float32", 0.01, 1000 * n)])

    def none(*_):
        raise CandidateRejected("none runs", reason="x")

    monkeypatch.setattr(Measurer, "slices", none)
    with Measurer(device, "cpu", seconds=0.01) as measurer:
        table = measured_in_slices(c, 2, (999,), ("float32",), database, measurer)
    assert len(table.micros) == 2 and not to_slice(c, 2, (999,), ("float32",), database, device)
    assert to_slice(c, 2, (998,), ("float32",), database, device)  # another limit is another question


def test_a_crash_costs_one_algorithm(host_cudnn, cache_dir, monkeypatch):
    c = Convolution("forward", 2, 3, (6, 6), (3, 3))
    monkeypatch.setenv("FAKE_CUDNN_CRASH", "2")
    with Measurer(this_device("cpu"), "cpu", seconds=0.05) as measurer:
        table = measured(c, 2, Database(None), measurer, policy="undivided", library=False)
    names = {m.algorithm for m in table.micros}
    assert "cudnn/IMPLICIT_GEMM" in names and "cudnn/GEMM" not in names and "cudnn/FFT" in names
    assert [label for _, _, label, why in measurer.left_out if "crashed" in why] == [
        "cudnn/GEMM float32",
        "cudnn/GEMM tf32",
    ]


def test_too_many_crashes_are_remembered(host_cudnn, cache_dir, monkeypatch):
    monkeypatch.setattr("jcuts.tune.cudnn.measurer.MOST_CRASHES", 1)
    monkeypatch.setenv("FAKE_CUDNN_CRASH", "2")  # with float32 and with TF32
    c, database = Convolution("forward", 2, 3, (6, 6), (3, 3)), Database(cache_dir / "microbatch.sqlite")
    with Measurer(this_device("cpu"), "cpu", seconds=0.05) as measurer:
        assert not measured(c, 2, database, measurer, policy="undivided", library=False).micros
    remarks = Database(cache_dir / "microbatch.sqlite").remarks(this_device("cpu"), c, 2)
    assert remarks["crashed"].startswith("cudnn/GEMM tf32")
    assert not database.missing(this_device("cpu"), c, (2,))


def test_a_plan_without_kernels_still_divides(host_cudnn, cache_dir, monkeypatch):
    args = arguments()
    fill(net, *args)
    monkeypatch.setattr(pipeline_passes, "unusable", lambda _: "no compiler")
    closed = jax.make_jaxpr(net)(*args)
    settings = Settings(mode="fusion", tune="cached", workspace_limit=1 << 20)
    outcome = pipeline_passes.optimize_jaxpr(closed, settings, platform="cpu", may_measure=False)
    assert outcome.closed is not closed and "no kernels: no compiler" in outcome.report.notes
    assert all(row.division for row in outcome.report.divisions)
    close(jax.jit(lambda *xs: jaxapi.eval_closed(outcome.closed, *xs))(*jax.tree.leaves(args))[0], net(*args))


def test_no_disk_to_measure_with_leaves_convolutions_to_xla(host_cudnn, cache_dir, monkeypatch):
    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jcuts.tune.cudnn.measurer.tempfile.mkdtemp", full)
    x, w = np.ones((3, 5, 5, 2), np.float32), np.ones((3, 3, 2, 2), np.float32)
    closed = jax.make_jaxpr(layer)(x, w)
    found = microbatch_convs.divide_convolutions(closed, Settings(workspace_limit=1 << 20), "cpu", may_measure=True)
    assert found.closed is closed and "No space left on device" in found.note


def test_other_platforms_are_left_alone(monkeypatch):
    monkeypatch.setattr(
        microbatch_convs, "divide_convolutions", lambda *_, **__: pytest.fail("cuDNN is not for this platform")
    )
    closed = jax.make_jaxpr(net)(*arguments())
    outcome = pipeline_passes.optimize_jaxpr(
        closed, Settings(workspace_limit=1 << 20), platform="tpu", may_measure=False
    )
    assert outcome.closed is closed and outcome.report.notes == ("left to XLA: no kernels for platform tpu",)


def test_16_bit_micro_batches_begin_at_16_bytes(host_cudnn, cache_dir):
    def odd(x, w):  # 5 x 5 x 3 numbers per sample: only 8 of them are a multiple of 16 bytes
        return layer(x, w)

    rng = np.random.default_rng(0)
    x = rng.standard_normal((19, 5, 5, 3)).astype(np.float16)
    w = rng.standard_normal((3, 3, 3, 3)).astype(np.float16)
    (site,) = (s for s in microbatch_convs.sites(jax.make_jaxpr(odd)(x, w)) if isinstance(s, Site))
    names = cudnn_call.algorithms("forward")
    database = Database(cache_dir / "microbatch.sqlite")
    for batch, seconds in ((1, 0.01), (2, 0.01), (3, 0.02), (8, 0.1), (16, 0.5), (19, 9.0)):
        micro = MicroConfig(batch, names[2], "float32", seconds, 2 * batch * SPACE)
        database.record(this_device("cpu"), site.convolution, batch, [micro])
    fast = optimized(odd, workspace_limit=1 << 20)
    (row,) = fast.explain(x, w).divisions
    assert row.division == "2 x 8 cudnn/GEMM:float32 + 1 x 3 cudnn/GEMM:float32"
    host_cudnn.calls()
    np.testing.assert_allclose(fast(x, w), odd(x, w), rtol=2e-3, atol=2e-3)
    launched = [call for call in host_cudnn.calls() if "algorithm=" in call]
    assert len(launched) == 3 and all("at=0,0" in call for call in launched)


def test_times_taken_otherwise_are_not_used(host_cudnn, cache_dir, monkeypatch):
    args = arguments()
    fill(net, *args)
    closed, settings = jax.make_jaxpr(net)(*args), Settings(mode="fusion", tune="cached", workspace_limit=1 << 20)
    assert microbatch_convs.divide_convolutions(closed, settings, "cpu", may_measure=False).count == 2
    monkeypatch.setattr("jcuts.tune.cudnn.measurer.TIMING", 10**6)
    rows = microbatch_convs.divide_convolutions(closed, settings, "cpu", may_measure=False).rows
    assert {row.why for row in rows} == {microbatch_convs.NOT_TIMED}
    assert this_device("cpu", accuracy="vendor") != this_device("cpu")
    other = dataclasses.replace(settings, convolution_accuracy="vendor")
    assert {row.why for row in microbatch_convs.divide_convolutions(closed, other, "cpu", may_measure=False).rows} == {
        microbatch_convs.NOT_TIMED
    }
    with knobs.scope(cudnn_graphs=True):
        assert "in calls" in this_device("cpu").library  # the host has no graphs


def test_calls_may_be_captured_unless_the_user_says_no(host_cudnn, cache_dir, monkeypatch):
    args = arguments()
    fill(net, *args)
    closed, settings = jax.make_jaxpr(net)(*args), Settings(mode="fusion", tune="cached", workspace_limit=1 << 20)
    asked, call_site = [], microbatch_convs.call_site

    def recorded(*args, graph, **more):
        asked.append(graph)
        return call_site(*args, graph=graph, **more)

    monkeypatch.setattr(microbatch_convs, "call_site", recorded)
    for chosen in ({}, {"cudnn_graphs": False}):
        with knobs.scope(**chosen):
            microbatch_convs.divide_convolutions(closed, settings, "cpu", may_measure=False)
    assert asked == [True] * 2 + [False] * 2


@pytest.mark.parametrize("reason, later", [("memory", True), ("disk", True), ("timeout", False)])
def test_what_is_nobody_s_fault_is_tried_again(host_cudnn, cache_dir, monkeypatch, reason, later):
    x, w = np.ones((BATCH, 5, 5, 2), np.float32), np.ones((3, 3, 2, 2), np.float32)
    (site,) = fill(layer, x, w, own_algorithm="cudnn/GEMM")  # the library's own is missing, and nothing else
    for size in (2, 4):
        Database(cache_dir / "microbatch.sqlite").record(this_device("cpu"), site.convolution, size, [])
    closed = jax.make_jaxpr(layer)(x, w)
    failure = WorkerFailed("as the test asked", reason=reason)
    monkeypatch.setattr(Measurer, "_ask", lambda *_: failure)
    found = microbatch_convs.divide_convolutions(closed, Settings(workspace_limit=1 << 20), "cpu", may_measure=True)
    assert found.postponed == later and not found.rows[0].division
    cudnn_tables._database.cache_clear()  # another process
    remarks = Database(cache_dir / "microbatch.sqlite").remarks(this_device("cpu"), site.convolution, BATCH)
    assert remarks == ({} if later else {LIBRARY: "as the test asked"})


def test_a_library_that_fails_is_asked_once(host_cudnn, cache_dir, monkeypatch):
    asked = []

    def library(self, convolution, batch):
        asked.append(batch)
        return Found((), {LIBRARY: "it crashed"})

    monkeypatch.setattr(Measurer, "library", library)
    x, w = np.ones((BATCH, 5, 5, 2), np.float32), np.ones((3, 3, 2, 2), np.float32)
    closed = jax.make_jaxpr(layer)(x, w)
    for _ in range(2):
        cudnn_tables._database.cache_clear()  # another process
        found = microbatch_convs.divide_convolutions(closed, Settings(workspace_limit=1 << 20), "cpu", may_measure=True)
        assert "not timed" in found.rows[0].why
    assert asked == [BATCH]


def test_what_lacked_memory_is_measured_again_where_it_fits_the_limit(host_cudnn, cache_dir, monkeypatch):
    x, w = np.ones((BATCH, 5, 5, 2), np.float32), np.ones((3, 3, 2, 2), np.float32)
    (site,) = fill(layer, x, w)
    device, database = this_device("cpu"), Database(cache_dir / "microbatch.sqlite")
    known = [m for m in database.table(device, site.convolution).micros if m.batch == BATCH]
    database.record(device, site.convolution, BATCH, known, remarks={"memory": "1000"})
    closed, asked = jax.make_jaxpr(layer)(x, w), []
    call = Measurer.__call__
    monkeypatch.setattr(Measurer, "__call__", lambda self, c, n: asked.append(n) or call(self, c, n))
    for limit, settled in ((999, True), (1000, False)):
        cudnn_tables._database.cache_clear()
        asked.clear()
        settings = Settings(mode="fusion", workspace_limit=limit)
        microbatch_convs.divide_convolutions(closed, settings, "cpu", may_measure=True)
        assert (BATCH in asked) != settled
    assert (
        microbatch_convs.divide_convolutions(closed, settings, "cpu", may_measure=False).rows[0].why
        != microbatch_convs.NOT_TIMED
    )


def test_what_another_process_kept_from_being_timed_is_timed_later(host_cudnn, cache_dir, monkeypatch):
    x, w = np.ones((BATCH, 5, 5, 2), np.float32), np.ones((3, 3, 2, 2), np.float32)
    fill(layer, x, w, own_algorithm="cudnn/GEMM")  # the library's own is missing
    closed = jax.make_jaxpr(layer)(x, w)
    settings = Settings(workspace_limit=1 << 20)

    def planned():
        return pipeline_passes.optimize_jaxpr(closed, settings, platform="cpu", may_measure=True).report

    monkeypatch.setattr(pipeline_passes, "unusable", lambda _: "no compiler")
    with monkeypatch.context() as patch:
        patch.setattr(cudnn_tables, "measuring_lock", lambda **_: contextlib.nullcontext(False))
        assert planned().postponed
    report = planned()
    assert not report.postponed and report.divisions[0].xla_seconds is not None
