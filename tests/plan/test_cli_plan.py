"""The commands: plan, cluster, validate; JSON and HTML; user errors are one line and exit status 2."""

import itertools
import json
import re
import xml.etree.ElementTree as ET

import pytest

from jcuts.cli.main import main
from jcuts.plan import html_report
from jcuts.plan.calibrate import fit, measure
from jcuts.plan.search.plan import Plan
from jcuts.plan.search.ranked import cost_plans
from jcuts.plan.spec import cluster, model, toml_file
from jcuts.plan.spec.workload import Training


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
                "--micro",
                "4",
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


@pytest.mark.parametrize("what", ["net", "seven"])
def test_a_model_must_be_a_function_of_no_arguments(capsys, tmp_path, monkeypatch, what):
    (tmp_path / "theirs.py").write_text("seven = 7\ndef net(w, x):\n    return x @ w\n")
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--model", f"theirs:{what}", "--cluster", "dgx-a100"]) == 2
    error = capsys.readouterr().err
    assert "a function of no arguments that returns (function, parameters, *inputs)" in error and error.count("\n") == 1


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


CLUSTER = """[[nodes]]
count = 1
gpus = 4
[nodes.gpu]
peak_tflops = 100
memory_gib = 16
bandwidth_gbs = 1000
[intra]
bandwidth_gbs = 50
"""
MODEL = "layers = 2\nhidden = 64\nheads = 4\nsequence = 32\nvocabulary = 100\n"


@pytest.mark.parametrize(
    ("arguments", "cluster_file", "model_file", "said"),
    [
        (["--gpus", "0"], CLUSTER, MODEL, "--gpus 0 must be positive"),
        (["--gpus", "3"], CLUSTER, MODEL, "no plan divides: batch 1, 2 layers, 4 heads"),
        (["--gpus", "6"], CLUSTER, MODEL, "6 GPUs are not whole nodes of c (4 GPUs each): use 4 or 8"),
        (["--gpus", "8"], CLUSTER, MODEL, "cluster c is one node of 4; its file needs an [inter] link"),
        ([], CLUSTER.replace("= 50", "= -50"), MODEL, "c.toml:9: intra.bandwidth_gbs: must be positive, not -50"),
        ([], CLUSTER.replace("bandwidth_gbs = 50", ""), MODEL, "c.toml:8: intra.bandwidth_gbs: is missing"),
        ([], CLUSTER.replace("bandwidth_gbs = 1000", ""), MODEL, "c.toml:4: nodes.gpu.bandwidth_gbs: is missing"),
        ([], CLUSTER.replace("[intra]\n", "[intra\n"), MODEL, "c.toml:8"),
        ([], CLUSTER, MODEL.replace("heads = 4", "heads = four"), "m.toml:3"),
        ([], CLUSTER, MODEL.replace("layers", "layer"), "m.toml:1: layers: is missing: is 'layer' meant to be it?"),
        ([], CLUSTER, MODEL.replace("= 64", "= 65"), "heads: must divide hidden=65"),
        (
            ["--serve", "8", "8", "--pareto"],
            CLUSTER,
            MODEL,
            "--pareto is for training",
        ),
    ],
)
def test_bad_input_is_named(capsys, tmp_path, arguments, cluster_file, model_file, said):
    (tmp_path / "c.toml").write_text(cluster_file)
    (tmp_path / "m.toml").write_text(model_file)
    files = ["--model", str(tmp_path / "m.toml"), "--cluster", str(tmp_path / "c.toml")]
    assert main(["plan", *files, *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("jcuts: ") and error.count("\n") == 1


def test_what_does_not_fit_says_what_would(capsys, tmp_path):
    (tmp_path / "c.toml").write_text(CLUSTER)
    where = ["--cluster", str(tmp_path / "c.toml")]
    assert main(["plan", "--model", "gpt3-13b", *where, "--batch", "8"]) == 2
    error = capsys.readouterr().err
    found = re.search(r"is short of gpu memory by ([0-9.]+) GiB per GPU; it fits on ([0-9]+) GPUs", error)
    assert found is not None and float(found[1]) > 1 and int(found[2]) > 4


def test_software_prices_its_own_passes(capsys):
    seconds = {}
    for name in ("jax", "megatron", "lean"):
        arguments = ["--model", "gpt3-1.3b", "--cluster", "dgx-a100", "--gpus", "8", "--batch", "64", "--offload"]
        assert main(["plan", *arguments, "--recompute", "none", "--software", name, "--json", "-"]) == 0
        seconds[name] = json.loads(capsys.readouterr().out)["plans"][0]["seconds"]
    assert seconds["lean"] < seconds["megatron"] and seconds["lean"] < seconds["jax"]


def test_validate_megatron(capsys):
    from jcuts.plan.calibrate.tables import shipped

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
    found = cluster.from_table(toml_file.parse(text, "here.toml"))
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
        spans = html_report.timeline(ranked, work)
        assert max(span.end for span in spans) == pytest.approx(ranked.seconds, rel=0.02)
        for lane in {span.lane for span in spans if span.lane.startswith("stage")}:
            mine = sorted((span.start, span.end) for span in spans if span.lane == lane)
            assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(mine))
        if plan.optimizer == "host":
            assert any(span.lane == "host" for span in spans)
        begun = {(span.lane, span.label): span.start for span in spans}
        for stage in range(2, plan.pipeline + 1):  # nothing begins before the neighbour has handed its input on
            assert begun[f"stage {stage}", "forward 1"] > begun[f"stage {stage - 1}", "forward 1"]
            assert begun[f"stage {stage - 1}", "backward 1"] > begun[f"stage {stage}", "backward 1"]


@pytest.mark.parametrize("count", [4, 8])
def test_timeline_of_a_pipeline_has_the_textbook_bubble(count):
    for schedule in ("gpipe", "1f1b"):
        spans = html_report._schedule(schedule, 4, count, 2.0, 1.0)
        assert max(end for *_, end in spans) == 3 * (count + 3)
