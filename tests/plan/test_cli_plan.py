"""The commands: plan, cluster, validate; JSON and HTML; user errors are one line and exit status 2."""

import itertools
import json
import xml.etree.ElementTree as ET

import pytest

from jcuts.cli.main import main
from jcuts.plan import cluster, fit, html, measure, model, specfile
from jcuts.plan.plans import Plan
from jcuts.plan.search import cost_plans
from jcuts.plan.workload import Training


def test_plan_as_json_and_page(capsys, tmp_path):
    page = tmp_path / "p.html"
    assert (
        main(
            [
                "plan",
                "--model",
                "gpt3-1.3b",
                "--cluster",
                "dgx-a100",
                "--gpus",
                "8",
                "--batch",
                "64",
                "--json",
                "-",
                "--html",
                str(page),
                "--place",
            ]
        )
        == 0
    )
    made = json.loads(capsys.readouterr().out)
    assert made["plans"][0]["gpus"] == 8 and made["plans_per_second"] > 0 and made["placement"]["fractions"]
    assert Plan.from_json(made["plans"][0]["plan"]).gpus == 8
    text = page.read_text()
    assert "Timeline" in text and "stage 1" in text
    svg = ET.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    assert len(svg.findall("rect")) > 4


def test_plan_as_a_table(capsys):
    assert (
        main(
            ["plan", "--model", "gpt3-1.3b", "--cluster", "thesis-a", "--gpus", "4", "--batch", "16", "--explain", "3"]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "█" in text and "why the neighbours lost" in text and "plans in" in text


def test_plan_of_a_users_function(capsys, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def net():\n"
        "    s = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)\n"
        "    return (lambda w, x: jnp.tanh(x @ w['a']) @ w['b']), {'a': s(256, 512), 'b': s(512, 8)}, s(64, 256)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--model", "mine:net", "--cluster", "dgx-a100", "--gpus", "2", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 256 * 512 + 512 * 8


def test_serving(capsys):
    assert main(["plan", "--model", "opt-6.7b", "--cluster", "t4-gcp", "--serve", "512", "32", "--top", "2"]) == 0
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "gpt3-175", "--cluster", "dgx-a100"], "did you mean 'gpt3-175b'"),
        (["--model", "bert-large", "--cluster", "dgx"], "did you mean"),
        (["--model", "bert-large", "--cluster", "dgx-a100", "--gpus", "13"], "use 8 or 16"),
        (
            ["--model", "gpt3-175b", "--cluster", "dgx-a100", "--gpus", "8", "--batch", "8", "--offload"],
            "short of gpu memory by",
        ),
        (["--model", "nowhere:net", "--cluster", "dgx-a100"], "nowhere"),
        (["--model", "bert-large", "--cluster", "dgx-a100", "--batch", "-1"], "--batch -1"),
    ],
)
def test_user_errors(capsys, arguments, said):
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("jcuts: ") and error.count("\n") == 1


def test_validate_megatron(capsys):
    from jcuts.plan.tables import shipped

    assert main(["validate", str(shipped("megatron_seqsel_table5.csv")), "--ablate", "--json", "-"]) == 0
    (made,) = json.loads(capsys.readouterr().out)
    assert made["mape"] <= 0.035 and made["calibrated_on"] == [] and made["ablation"]["gemm_efficiency"] > made["mape"]
    assert main(["validate", str(shipped("megatron_seqsel_table5.csv")), "--calibrate", "1,99"]) == 2
    assert "has no rows [99]" in capsys.readouterr().err


def test_cluster_list(capsys):
    assert main(["cluster", "list"]) == 0
    assert "dgx-a100" in capsys.readouterr().out


def test_measured_machine_is_a_cluster_file(tmp_path):
    seen = []
    made = measure.Measured()
    measure._memory(made_with_gpu(made), True)
    measure._launches(made)
    measure._collectives(made, True)
    measure._storage(made, tmp_path, True)
    made.tables["gpu"] |= {"name": "CPU", "memory_gib": 4.0}
    made.tables["nodes"] = {"count": 1, "gpus": 4}
    fit.constants(made)
    text = fit.to_toml(made, "here")
    found = cluster.from_table(specfile.parse(text, "here.toml"))
    assert found.gpus == 4 and found.storage is not None and found.storage.read > 0 and fit.finite(made)
    assert "direct I/O" in text or "buffered" in text
    assert {kind for kind, *_ in made.collectives} == {
        "all-reduce",
        "all-gather",
        "reduce-scatter",
        "all-to-all",
        "ppermute",
    }
    assert not list(tmp_path.iterdir()) and not seen


def made_with_gpu(made):
    """What the product measurement leaves (it takes longest, and has its own test)."""
    made.tables["gpu"] = {"peak_tflops": 0.1, "gemm_efficiency": 0.9, "skinny_tflops": 0.05}
    made.sources["gemm_efficiency"] = "test"
    return made


def test_timeline_covers_the_step_and_never_overlaps_in_a_stage():
    made, place, work = model.load("gpt3-1.3b"), cluster.load("dgx-a100").resized(8), Training(64)
    for plan in (
        Plan(pipeline=4, data=2, micro=2),
        Plan(pipeline=8, schedule="gpipe"),
        Plan(data=8, optimizer="host", activations="host"),
    ):
        ranked = cost_plans(made, place, [plan], work)[0]
        spans = html.timeline(ranked, work)
        assert max(span.end for span in spans) == pytest.approx(ranked.seconds, rel=0.02)
        for lane in {span.lane for span in spans if span.lane.startswith("stage")}:
            mine = sorted((span.start, span.end) for span in spans if span.lane == lane)
            assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(mine))
        if plan.optimizer == "host":
            assert any(span.lane == "host" for span in spans)
