"""What explain says about losers: subsets that XLA won, candidates and whole programs that are out."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from jcuts.base.errors import UsageError
from jcuts.pipeline import report_rows
from jcuts.report import report_data, rich_tables
from jcuts.report.function_report import FunctionReport
from jcuts.report.report_data import RefusalReport, SubsetReport
from jcuts.tune.choice import POSTPONED, Choice, Measurement, Rejection


class Lost:
    """As much of a subset as the reason needs."""

    def __init__(self, *measurements, rejections=(), origin="measured", margin=0.02):
        kernels = {m.label: "k" for m in measurements if m.label != "xla"}
        self.choice = Choice("p", "xla", "", origin, tuple(measurements), tuple(rejections), margin, kernels=kernels)


def time_of(label, seconds, method="loop"):
    return Measurement(label, seconds, seconds, seconds, 9, method)


def test_a_slower_kernel_shows_its_time():
    seconds, why = report_rows.why_lost(Lost(time_of("xla", 1e-5), time_of("a", 2e-5), time_of("b", 4e-5, "screen")))
    assert seconds == 2e-5 and why == "XLA is 2.00 times as fast as the best of 2 kernels"


def test_a_tie_is_named():
    seconds, why = report_rows.why_lost(Lost(time_of("xla", 1.01e-5), time_of("a", 1e-5)))
    assert seconds == 1e-5 and "gains 1.0%: within the noise of 2.0%" in why


def test_a_time_of_another_clock_is_no_gain():
    seconds, why = report_rows.why_lost(Lost(time_of("xla", 2e-5), time_of("a", 1e-5, "screen")))
    assert seconds is None and why == "the best of 1 kernels was only looked at (screen), and did not compete"


def test_rejections_are_the_reason_where_nothing_was_timed():
    texts = {"a": "too far", "b": "too far", "c": "x"}
    out = [Rejection(label, "AccuracyRejected", text) for label, text in texts.items()]
    seconds, why = report_rows.why_lost(Lost(rejections=out))
    assert seconds is None
    assert why == "every kernel was rejected: AccuracyRejected: too far (and 1 more reasons)"
    assert "cannot be compared" in report_rows.why_lost(Lost(rejections=[Rejection("xla", "WorkerFailed", "died")]))[1]


def test_nothing_known_and_postponed():
    assert report_rows.why_lost(Lost(origin="library"))[1] == "not measured yet"
    waited = Lost(origin="library", rejections=[Rejection("xla", POSTPONED, "process 7 was measuring: tuned later")])
    assert waited.choice.is_postponed and "process 7" in report_rows.why_lost(waited)[1]


def subset(chosen, why="", rejected=()):
    return SubsetReport(
        "dot",
        {"dot_general": 1},
        ["m.py:3 (f)"],
        "none",
        "complex",
        chosen,
        "measured",
        {},
        0.5,
        1e-6,
        2e-5,
        1e-5,
        1,
        90.0,
        10.0,
        list(rejected),
        why,
    )


def shown(found):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(rich_tables.report_tables(found))
    return " ".join(console.export_text().split())


def test_all_forms_show_reasons_and_an_honest_headline(tmp_path):
    found = FunctionReport(
        "f",
        "mixed",
        "cpu",
        (
            subset("contraction/1"),
            subset("xla", "XLA is 2.00 times as fast as the best of 2 kernels", ["a: too far", "b: too far"]),
        ),
    ).with_guard(
        {
            "chosen": "xla",
            "reason": "every other program is out",
            "is_final": False,
            "rejected": {"jcuts": "3.5 times the time of the best program"},
        }
    )
    page = found.to_html(tmp_path / "r.html").read_text()
    with pytest.raises(UsageError, match=r"cannot write .*no_folder.r.html: No such file"):
        found.to_html(tmp_path / "no_folder" / "r.html")
    for text in (str(found), shown(found), page):
        assert "0% of the FLOP" in text and "1 kernel calls, with 50% of the FLOP" in text
        assert "XLA is 2.00 times as fast as the best of 2 kernels" in text
        assert "too far (2 candidates)" in text
        assert "3.5 times the time of the best program" in text
        assert "a later process measures again" in text


def test_gains_of_kernels_stand_beside_that_of_the_whole_function():
    found = FunctionReport("f", "mixed", "cpu", (subset("contraction/1"), subset("xla", "a tie")))
    assert report_data.alone_line(found) == ""
    speed = {"xla": [1.0] * 3, "xla:wide": [3.0] * 3, "jcuts": [0.9] * 3, "jcuts:wide": [1.25] * 3}
    found = found.with_guard({"chosen": "jcuts:wide", "reason": "", "speed": speed})
    line = report_data.alone_line(found)
    assert "1 kernel calls" in line and "20.0 us instead of 10.0 us (0.50x)" in line and line.endswith(": 1.25x")
    assert line in str(found) and " ".join(line.split()) in shown(found)


def test_the_headline_of_a_function_that_runs_kernels():
    found = FunctionReport("f", "mixed", "cpu", (subset("contraction/1"),))
    found = found.with_guard({"chosen": "jcuts", "reason": ""})
    assert "1 kernel calls, 100% of the FLOP" in report_data.summary(found)


def test_equal_refusals_are_one_line(tmp_path):
    found = (
        RefusalReport("add", "too little work", "a.py:3 (f)"),
        RefusalReport("add", "too little work", "a.py:9 (f)", 2),
        RefusalReport("add", "too little work", "a.py:11 (f)"),
        RefusalReport("sort", "no op rule", "a.py:4 (f)"),
    )
    made = FunctionReport("f", "mixed", "cpu", refusals=found)
    assert [line for line in str(made).split("\n") if line.startswith("left to XLA")] == [
        "left to XLA: 4 x add: too little work [a.py:3 (f); a.py:9 (f); 1 more]",
        "left to XLA: 1 x sort: no op rule [a.py:4 (f)]",
    ]
    assert made.to_html(tmp_path / "r.html").read_text().count("too little work") == 1
