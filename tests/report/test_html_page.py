"""The HTML page of a report: well formed, self-contained, complete, and safe against what users write."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import jcuts
from jcuts.pipeline import report_rows
from jcuts.report import rich_tables, verdict
from jcuts.report.function_report import FunctionReport
from jcuts.report.html import charts, kernel_code, partition_graph
from jcuts.report.html.page import document
from jcuts.report.report_data import CandidateReport, GraphNode, RefusalReport, SubsetReport
from jcuts.tune.choice import Choice, Measurement, Rejection

NASTY = "</title><script>alert('x')</script>&\"<b"
RNG = np.random.default_rng(1)
X, W = (RNG.standard_normal(s).astype(np.float32) for s in ((64, 96), (96, 128)))


def example(x, w):
    return jax.nn.softmax(jnp.maximum(x @ w, 0)) + jnp.sort(x @ w, axis=1)


def region(number, chosen="map/1", seconds=2e-5, xla=4e-5, **values):
    known = {
        "name": "add",
        "operations": {"dot_general": 1, "add": number + 1},
        "where": [f"{NASTY}/m.py:{number} (f)"],
        "level": "register",
        "kind": "complex (fusion)",
        "chosen": chosen,
        "origin": "measured",
        "params": {},
        "score": 0.5,
        "bound_seconds": 1e-6,
        "seconds": seconds,
        "xla_seconds": xla,
        "count": 2,
        "flop": 1e6,
        "bytes": 1e5,
        "predicted_seconds": 1.5e-5,
    }
    return SubsetReport(**{**known, **values})


def made(**values):
    candidates = (CandidateReport("map/1", 2e-5, 1e-6, 0.4, "loop"), CandidateReport(NASTY, None, 0, 0, "", NASTY))
    graph = (
        GraphNode("dot_general", NASTY, 0, 0),
        GraphNode("add", "m.py:1", 0, 0, reads=(0,)),
        GraphNode("sort", "m.py:2", -1, -1, NASTY, reads=(1,)),
        GraphNode("tanh", "m.py:3", 1, 1, reads=(1, 2)),
    )
    known = {
        "name": NASTY,
        "mode": "mixed",
        "platform": "cpu",
        "subsets": (region(0, candidates=candidates), region(1, "xla", why="a tie", kind="simple"), region(2)),
        "refusals": (RefusalReport("sort", NASTY, NASTY),),
        "equations": 4,
        "source": f"def {NASTY}",
        "graph": graph,
        "peaks": {"flop": 1e11, "bytes": 1e10},
        "notes": (NASTY,),
        "guard": {"chosen": "jcuts", "reason": NASTY, "speed": {"jcuts": [1.5, 1.4, 1.6]}, "rejected": {NASTY: NASTY}},
    }
    return FunctionReport(**{**known, **values})


def tree(page):
    """The page as XML: raises where it is not well formed."""
    first, _, rest = page.partition("\n")
    assert first == "<!doctype html>"
    return ElementTree.fromstring(rest)


def words(element):
    return " ".join(" ".join(element.itertext()).split())


def check_self_contained(page):
    assert "<script" not in page.lower() and "@import" not in page and "url(" not in page.replace("url(#plot)", "")
    for element in tree(page).iter():
        assert element.tag not in ("script", "link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "href", "onload", "onclick"} & set(element.attrib)


def test_what_users_write_is_escaped_everywhere():
    page = document(made())
    check_self_contained(page)
    assert page.count("<title>") == page.count("</title>")
    assert f"jcuts: {NASTY}" in words(tree(page))


def test_all_parts_are_there():
    root = tree(document(made()))
    heads = [h.text for h in root.iter("h2")]
    for wanted in ("The regions that matter", "Partition", "Roofline", "Time by kind of region", "Regions"):
        assert wanted in heads
    for wanted in ("Candidates, and why each lost", "Where XLA won", "Left to XLA", "Rewritten program"):
        assert wanted in heads
    assert "1.50 times as fast as jax.jit (1.40 to 1.60)" in words(root)
    regions = next(t for t in root.iter("table") if "predicted us" in words(t))
    assert len(list(regions.iter("tr"))) == 1 + 3
    drawings = {svg.get("aria-label"): svg for svg in root.iter("svg")}
    before, after = (
        drawings[k] for k in ("equations of the function before fusion", "regions and equations after fusion")
    )
    assert len(list(before.iter("rect"))) == 4 and len(list(after.iter("rect"))) == 3
    assert [t.text for t in after.iter("text")].count("dot_general +1") == 1
    kernels = list(drawings["roofline"].iter("g"))
    assert len(kernels) == 2 and "measured 20.0 us, predicted 15.0 us, bound 1.0 us" in words(kernels[0])
    assert len(list(drawings["time by kind"].iter("rect"))) == 4


def test_an_empty_report_is_a_page():
    page = document(FunctionReport("f", "mixed", "cpu"))
    check_self_contained(page)
    assert "XLA runs all of it" in page


def test_a_planned_function_has_graph_candidates_and_code(tmp_path):
    optimised = jcuts.optimize(example, mode="fusion", tune="off")
    report = optimised.explain(X, W)
    assert len(report.graph) == report.equations
    assert {n.row for n in report.graph if n.row >= 0} == set(range(len(report.subsets)))
    for row, subset in enumerate(report.subsets):
        members = [n.primitive for n in report.graph if n.row == row]
        assert sorted(members) == sorted(subset.operations) or len(members) >= len(subset.operations)
    assert [n.reason for n in report.graph if n.primitive == "sort"] == ["no op rule for this primitive"]
    assert report.peaks["flop"] > 1e9 and report.peaks["bytes"] > 1e8
    page = report.to_html(tmp_path / "report.html").read_text()
    check_self_contained(page)
    text = words(tree(page))
    assert "test_html_page.py" in text and "no op rule for this primitive" in text
    listings = [d for d in tree(page).iter("details") if d.find("summary").text == "assembly"]
    assert len(listings) == sum(s.chosen != "xla" for s in report.subsets)
    assert all("not available" not in words(d) and len(words(d)) > 500 for d in listings)
    assert "programs" not in report.to_dict() or report.to_dict()["programs"] == ()


def test_code_that_cannot_be_made_says_why(monkeypatch):
    def refuse(program):
        raise ImportError("no compiler here")

    monkeypatch.setattr(kernel_code.kernel_cache, "source_text", refuse)
    report = jcuts.optimize(example, mode="fusion", tune="off").explain(X, W)
    program = next(p for p in report.programs if p is not None)
    assert dict(kernel_code.listings(program))["source"] == "not available: no compiler here"


def test_candidates_say_why_they_lost():
    times = [
        Measurement("a", 1e-5, 1e-5, 1e-5, 9, "loop", 1e-6, 0.5),
        Measurement("xla", 3e-5, 3e-5, 3e-5, 9, "loop"),
        Measurement("b", 5e-5, 5e-5, 5e-5, 2, "screen"),
    ]
    choice = Choice("p", "a", "d", "measured", tuple(times), (Rejection("c", "AccuracyRejected", "too far"),), 0.02)
    rows = report_rows.candidate_rows(choice)
    assert [r.lost for r in rows] == [
        "",
        "3.00 times the time of the fastest",
        "only looked at (screen), not in the final comparison",
        "AccuracyRejected: too far",
    ]
    tied = replace(choice, winner="xla")
    assert report_rows.candidate_rows(tied)[0].lost == "within the noise of 2.0% of the winner"


def test_layers_go_below_what_they_read():
    reads = [(), (0,), (4,), (1, 2), ()]
    depth = partition_graph.layers(reads)
    assert all(depth[r] < depth[node] for node, read in enumerate(reads) for r in read)


def test_charts_need_times():
    report = FunctionReport("f", "mixed", "cpu", (region(0, seconds=None, xla=None),))
    assert charts.time_by_kind(report) == ""
    assert charts.roofline(replace(report, subsets=(region(0, flop=0.0),))) == ""
    assert "roof" not in charts.roofline(report).replace("roofline", "")  # no peaks, no roof


@pytest.mark.parametrize(
    "guard, text, gain",
    [
        ({"chosen": "xla", "reason": "slower"}, "plain jax.jit runs: slower", 0),
        ({"chosen": "jcuts", "speed": {"jcuts": [2.0, 2.0, 2.0]}}, "2.00 times as fast as jax.jit", 2.0),
        (None, "4 kernel calls, the whole function not timed against jax.jit", None),
    ],
)
def test_the_verdict_leads(guard, text, gain):
    said = verdict.verdict(made(guard=guard))
    assert (said.text, said.gain) == (text, gain)


def test_the_regions_that_matter_gain_most():
    found = made(
        subsets=(region(0, xla=3e-5), region(1, "xla"), region(2, xla=9e-5), region(3, seconds=5e-5, xla=None))
    )
    lines = verdict.most_important(found)
    assert [line.gain for line in lines] == ["4.50x", "1.50x", "not timed"]
    assert lines[0].times == "2 x 20.0 us (XLA 90.0), 5% of its bound" and lines[0].gained


def test_a_terminal_of_80_columns_leads_with_verdict_gain_and_three_regions():
    out = io.StringIO()
    Console(width=80, file=out).print(rich_tables.report_tables(made(name="f", subsets=(region(0), region(2)))))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "f: 1.50 times as fast as jax.jit (1.40 to 1.60)"
    assert "2.00x  dot_general, add" in out.getvalue().split("whole function")[0]
    assert re.search(r"2 x 20.0 us \(XLA 40.0\)", out.getvalue())
