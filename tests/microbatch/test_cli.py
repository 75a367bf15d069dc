"""`jcuts microbatch` and `jcuts best-batch`: from a database file to tables, JSON and a page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.microbatch.modelled_device import NETWORKS, Modelled, resnet, training_step
from jcuts.cli.main import main
from jcuts.cli.microbatch import parse_bytes
from jcuts.microbatch import batch_division_dp
from jcuts.microbatch.analysis import analyse, network_times
from jcuts.microbatch.database import Database
from jcuts.microbatch.errors import MissingTimesError
from jcuts.microbatch.network import Network
from jcuts.microbatch.pareto import desirable
from jcuts.microbatch.timings import MicroConfig, policy_sizes

MIB = 1 << 20


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """AlexNet at batch 64 on two made-up devices, powers of two."""
    path = tmp_path_factory.mktemp("db") / "times.db"
    database, network = Database(path), training_step("AlexNet", 64)
    for measure in (Modelled("fast"), Modelled("slow", flops=5e12, bytes_=3e11)):
        for convolution in {use.convolution for use in network.uses}:
            for size in policy_sizes("powerOfTwo", 64):
                database.record(measure.device, convolution, size, measure(convolution, size))
    database.record_network(network)
    return path


@pytest.fixture(autouse=True)
def wide(monkeypatch, cache_dir):
    monkeypatch.setenv("COLUMNS", "250")


def test_networks_are_the_published_ones():
    assert [len(NETWORKS[name]) for name in ("AlexNet", "ResNet-18", "ResNet-50", "ResNet-152")] == [5, 20, 53, 155]
    assert len(NETWORKS["DenseNet-40"]) == 1 + 36 + 2
    assert resnet(50)[-1] == (7, 512, 1, 2048, 1)
    assert len(training_step("AlexNet", 8).uses) == 14


def test_wr(made, capsys):
    assert main(["microbatch", "analyse", str(made), "--device", "fast", "--limit", "8MiB"]) == 0
    shown = capsys.readouterr().out
    assert "AlexNet, batch 64 on fast" in shown and "WR, at most 8.0 MiB per kernel" in shown
    assert shown.count("forward") == 5 and shown.count("backward_filter") == 5
    assert "undivided under the same limits" in shown and "live at once" in shown


def test_wd_json_adds_up(made, capsys):
    command = ["microbatch", "analyse", str(made), "--device", "fast", "--total", "112MiB", "--json", "-"]
    assert main(command) == 0
    paper = json.loads(capsys.readouterr().out)
    assert main([*command, "--constraint", "liveness"]) == 0
    alive = json.loads(capsys.readouterr().out)
    spaces = [kernel["division"]["workspace"] for kernel in paper["kernels"]]
    assert sum(spaces) == paper["workspace_total"] <= 112 * MIB == paper["limit"]
    assert max(spaces) == paper["workspace_peak"]  # kernels run one after the other
    assert alive["workspace_peak"] <= 112 * MIB < alive["workspace_total"]
    assert alive["seconds"] <= paper["seconds"] <= paper["undivided_seconds"]
    assert sum(k["division"]["seconds"] for k in paper["kernels"]) == pytest.approx(paper["seconds"])
    for kernel in paper["kernels"]:
        assert kernel["division"] in kernel["desirable"]
        assert sum(part["count"] * part["batch"] for part in kernel["division"]["parts"]) == kernel["batch"] == 64


def test_front_and_page(made, tmp_path, capsys):
    page = tmp_path / "page.html"
    command = ["microbatch", "analyse", str(made), "--device", "fast", "--limit", "64MiB", "--html", str(page)]
    assert main([*command, "--front", "conv2 forward"]) == 0
    shown = capsys.readouterr().out
    front = analysis(made, limit=64 * MIB).rows[1].desirable
    assert "Desirable set of conv2 forward" in shown
    assert len([line for line in shown.splitlines() if "# " in line]) == len(front) > 2
    assert len([line for line in shown.splitlines() if line.startswith("│ * ")]) == 1
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and text.count("<figure>") >= 5
    assert "conv2 forward" in text and "http" not in text
    assert text.count("<circle") == sum(
        len(row.desirable) for row in analysis(made, limit=64 * MIB).rows if len(row.desirable) > 1
    )


def test_policies_and_limits_only_help_as_they_grow(made):
    seconds = [analysis(made, limit=limit).seconds for limit in (8 * MIB, 64 * MIB, 512 * MIB, None)]
    assert seconds == sorted(seconds, reverse=True)
    undivided, powers = (analysis(made, limit=8 * MIB, policy=p) for p in ("undivided", "powerOfTwo"))
    assert powers.seconds < undivided.seconds == undivided.undivided
    assert all(len(row.division.parts) == 1 for row in undivided.rows)
    # WD with the same total as WR is never slower, and uses what WR leaves unused.
    count = len(powers.rows)
    assert analysis(made, total=count * 8 * MIB).seconds <= powers.seconds


def analysis(path: Path, **options):
    database = Database(path)
    return analyse(database.network(), database, database.device("fast"), **options)


def test_ls_and_merge(made, tmp_path, capsys):
    assert main(["microbatch", "ls", str(made)]) == 0
    shown = capsys.readouterr().out
    assert "fast (driver 0, no library)" in shown and "AlexNet, batch 64" in shown
    assert main(["microbatch", "merge", str(tmp_path / "all.db"), str(made)]) == 0
    assert f"{len(Database(made).entries())} entries taken over" in capsys.readouterr().out
    assert Database(tmp_path / "all.db").entries() == Database(made).entries()


def test_best_batch_from_a_database(made, capsys):
    command = ["best-batch", "--batch", "64", "--devices", "fast", "slow", "fast", "--db", str(made), "--multiple", "8"]
    assert main([*command, "--limit", "8MiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["sizes"]) == 64 and found["names"] == ["fast", "slow", "fast"]
    assert found["sizes"][1] < found["sizes"][0]
    assert found["seconds"] <= found["even"] and found["seconds"] < found["alone"]
    assert main(command) == 0
    assert "even split" in capsys.readouterr().out


def test_network_times_are_sums_of_divisions(made):
    database = Database(made)
    device, network = database.device("slow"), database.network()
    found = network_times(network, database, device, 12, limit=MIB)
    expected = sum(
        batch_division_dp.divide(database.table(device, use.convolution), 12, MIB).seconds for use in network.uses
    )
    assert found.seconds[12] == pytest.approx(expected) and sorted(found.seconds) == list(range(1, 13))
    with pytest.raises(MissingTimesError, match="no times of"):
        network_times(training_step("ResNet-18", 8), database, device, 8)


def test_best_batch_from_published_times_and_from_a_file(tmp_path, capsys):
    assert main(["best-batch", "--batch", "64", "--devices", "P100", "V100", "T4", "1080Ti"]) == 0
    shown = capsys.readouterr().out
    assert "DeepBench" in shown and "interpolated" not in shown
    assert main(["best-batch", "--batch", "40", "--devices", "P100", "V100", "--interpolate", "--multiple", "2"]) == 0
    assert "interpolated" in capsys.readouterr().out  # 40 = 10 + 30
    table = tmp_path / "times.csv"
    table.write_text("# by hand\ndevice,batch,seconds\na,1,1.0\na,2,2.0\na,3,3.0\nb,1,9\n")
    assert main(["best-batch", "--batch", "3", "--devices", "a", "b", "--times", str(table)]) == 0
    assert "left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["microbatch", "ls", "none.db"], "no such file"),
        (["microbatch", "analyse", "DB"], "more than one device"),
        (["microbatch", "analyse", "DB", "--device", "H200"], "no times of 'H200'"),
        (["microbatch", "analyse", "DB", "--device", "fast", "--network", "VGG"], "no network 'VGG'"),
        (["microbatch", "analyse", "DB", "--device", "fast", "--limit", "lots"], "--limit 'lots'"),
        (["microbatch", "analyse", "DB", "--device", "fast", "--front", "conv9"], "no such kernel"),
        (["microbatch", "analyse", "DB", "--device", "fast", "--html", "/none/x.html"], "cannot be written"),
        (["best-batch", "--batch", "0", "--devices", "V100"], "batch=0"),
        (["best-batch", "--batch", "512", "--devices", "V100"], "add up to 512"),
        (["best-batch", "--batch", "8", "--devices", "K80"], "no float32 times"),
        (["best-batch", "--batch", "8", "--devices", "V100", "--limit", "1"], "goes with --db"),
        (["best-batch", "--batch", "8", "--devices", "x", "--times", "none.csv"], "none.csv"),
    ],
)
def test_errors_are_one_line(made, arguments, message, capsys):
    assert main([str(made) if word == "DB" else word for word in arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("jcuts: ") and message in err and err.count("\n") == 1


def test_a_limit_that_nothing_fits_says_what_would_do(tmp_path, capsys):
    path = tmp_path / "t.db"
    database, network = Database(path), training_step("AlexNet", 4)
    use, measure = network.uses[1], Modelled()
    heavy = [micro for micro in measure(use.convolution, 4) if micro.workspace]
    database.record(measure.device, use.convolution, 4, heavy)
    database.record_network(Network("one", (use,)))
    assert main(["microbatch", "analyse", str(path), "--limit", "0"]) == 2
    least = min(micro.workspace for micro in heavy)
    assert f"the least that does is {least} B" in capsys.readouterr().err
    assert main(["microbatch", "analyse", str(path), "--limit", str(least)]) == 0
    assert main(["microbatch", "analyse", str(path), "--total", "0"]) == 2


@pytest.mark.parametrize(
    ("text", "value"), [("0", 0), ("64MiB", 64 * MIB), ("64 m", 64 * MIB), ("1.5KiB", 1536), ("7b", 7), ("2g", 2 << 30)]
)
def test_bytes(text, value):
    assert parse_bytes("--limit", text) == value


def test_modelled_sets_hold_the_fastest(made):
    database = Database(made)
    device = database.device("fast")
    for use in database.network().uses:
        table = database.table(device, use.convolution)
        found = desirable(table, use.batch)
        assert found[-1].ticks == batch_division_dp.divide(table, use.batch).ticks
        assert np.all(np.diff([d.workspace for d in found]) > 0)


def test_true_half_against_pseudo_half(tmp_path, capsys):
    network = training_step("AlexNet", 8, "float16")
    use = network.uses[1]
    database, device = Database(tmp_path / "half.db"), Modelled("here").device
    for size in (8, 4):
        micros = [
            MicroConfig(size, "GEMM", "float16", 0.1 * size, 0),
            MicroConfig(size, "GEMM", "float32", 0.2, 100 * size),
        ]
        database.record(device, use.convolution, size, micros)
    database.record_network(Network("half", (use,)))
    assert main(["microbatch", "analyse", str(tmp_path / "half.db"), "--limit", "400", "--json", "-"]) == 0
    (kernel,) = json.loads(capsys.readouterr().out)["kernels"]
    assert [kernel[name]["seconds"] for name in ("true_half", "pseudo_half")] == pytest.approx([0.8, 0.4])
    assert kernel["division"] == kernel["pseudo_half"]
    assert main(["microbatch", "analyse", str(tmp_path / "half.db"), "--limit", "0"]) == 0
    shown = capsys.readouterr().out
    assert "TRUE_HALF" in shown and "PSEUDO_HALF" in shown and "800 ms" in shown and "400 ms" not in shown


def test_memory_of_activations_and_workspaces_together(tmp_path, capsys):
    network = training_step("AlexNet", 64)
    network = Network("AlexNet", network.uses, tuple(abs(7 - k) * MIB for k in range(len(network.uses))))
    database, device = Database(tmp_path / "times.db"), Modelled("here")
    for convolution in {use.convolution for use in network.uses}:
        for size in policy_sizes("powerOfTwo", 64):
            database.record(device.device, convolution, size, device(convolution, size))
    database.record_network(network)
    command = ["microbatch", "analyse", str(tmp_path / "times.db"), "--memory", "16MiB"]
    assert main([*command, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    spaces = [kernel["division"]["workspace"] for kernel in found["kernels"]]
    assert max(w + h for w, h in zip(spaces, network.held, strict=True)) == found["memory_peak"] <= 16 * MIB
    assert max(spaces) > 9 * MIB  # where activations leave more than at their peak
    for use, kernel, held in zip(network.uses, found["kernels"], network.held, strict=True):
        table = database.table(device.device, use.convolution)
        best = batch_division_dp.divide(table, use.batch, 16 * MIB - held)
        assert kernel["division"]["seconds"] == best.seconds
    assert main(command) == 0 and "with what is live beside them" in capsys.readouterr().out
    database.record_network(Network("AlexNet", network.uses))
    assert main(command) == 2 and "does not say what is live" in capsys.readouterr().err
