"""Models on the command line: users' files and functions, training steps, given plans, lists, Pareto fronts."""

import json
from dataclasses import replace

import pytest

from jcuts.base.errors import UsageError
from jcuts.cli.main import main
from jcuts.plan.search import fixed
from jcuts.plan.spec import cluster, model
from jcuts.plan.spec.workload import Training

MINE = """import jax, jax.numpy as jnp
shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
weights = {"a": shape(256, 512), "b": shape(512, 8)}
loss = lambda w, x: jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2)
def net():
    return loss, weights, shape(64, 256)
def step():
    update = lambda w, x: jax.tree.map(lambda p, g: p - g, w, jax.grad(loss)(w, x))
    return update, weights, shape(64, 256)
def dropped():
    def with_key(w, x, key):
        return loss(w, jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0))
    return with_key, weights, shape(64, 256), jax.eval_shape(jax.random.key, 0)
def module():
    given = weights | {"activation": jnp.tanh}
    def gradients(w, x):
        arrays = {name: w[name] for name in ("a", "b")}
        return jax.value_and_grad(lambda p: jnp.mean((w["activation"](x @ p["a"]) @ p["b"]) ** 2))(arrays)
    return gradients, given, shape(64, 256)
def fails():
    return 1 / 0
def wrong_shapes():
    return (lambda w, x: x @ w["b"]), weights, shape(64, 256)
"""
WHERE = ["--cluster", "dgx-a100", "--gpus", "2"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "their_net.py").write_text(MINE)
    return tmp_path


@pytest.mark.parametrize("place", ["./their_net.py", "{folder}/their_net.py", "their_net"])
def test_a_function_by_file_path_or_module(capsys, folder, monkeypatch, place):
    monkeypatch.chdir(folder)
    name = place.format(folder=folder) + ":net"
    assert main(["plan", "--model", name, *WHERE, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 256 * 512 + 512 * 8


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("fails", "their_net.py, line 21: ZeroDivisionError: division by zero"),
        ("wrong_shapes", "cannot be traced: dot_general requires contracting dimensions"),
        ("absent", "has no function 'absent'"),
    ],
)
def test_what_a_users_code_does_wrong_is_one_line(capsys, folder, function, said):
    assert main(["plan", "--model", f"{folder}/their_net.py:{function}", *WHERE]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "/nowhere/x.py:net", *WHERE], "there is no file /nowhere/x.py"),
        (["--model", "no_such_module:net", *WHERE], "give the file, as in folder/file.py:function"),
        (
            ["--model", "gpt3-1.3b", *WHERE, "--html", "/nonexist/x"],
            "/nonexist/x: cannot be written: there is no folder",
        ),
        (
            ["--model", "gpt3-1.3b", *WHERE, "--json", "/nonexist/x"],
            "/nonexist/x: cannot be written: there is no folder",
        ),
        (["--model", "gpt3-1.3b", *WHERE, "--json", "/"], "it is a folder"),
        (["--cluster", "dgx-a100"], "--model is missing: jcuts plan --list"),
        (["--model", "gpt3-1.3b", *WHERE, "--fix", "dta=2"], "did you mean 'data'?"),
        (["--model", "gpt3-1.3b", *WHERE, "--fix", "data=4"], "takes 4 GPUs"),
        (["--model", "gpt3-1.3b", *WHERE, "--fix", "zero=x"], "must be a whole number"),
        (["--model", "gpt3-1.3b", *WHERE, "--fix", "policy=xr"], "choose ar (activation-resident) or pr"),
        (["--model", "gpt3-1.3b", *WHERE, "--fix", "data=2", "--html", "x.html"], "--html does not go with --fix"),
        (["--model", "folder/net.py", *WHERE], "is a Python file: name its function, as in folder/net.py:net"),
        (["--model", "gpt3-1.3b", *WHERE, "--fix", "data=2,expert=2"], "gpt3-1.3b has no expert axis"),
        (["--model", "gpt3-1.3b", *WHERE, "--pareto", "--place"], "--place does not go with --pareto"),
    ],
)
def test_mistakes_of_the_command_line(capsys, arguments, said):
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("jcuts: ") and error.count("\n") == 1


def test_a_training_step_is_priced_as_it_is(capsys, folder):
    assert main(["plan", "--model", f"{folder}/their_net.py:step", *WHERE]) == 0
    text = capsys.readouterr().out
    assert "is a whole training step" in text and "give the loss function" in text and "matrix products" in text
    assert main(["plan", "--model", f"{folder}/their_net.py:step", *WHERE, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["training_step"]["seconds"] > 0


@pytest.mark.parametrize("option", [["--serve", "8", "8"], ["--fix", "data=2"], ["--pareto"], ["--place"]])
def test_a_training_step_is_not_planned(capsys, folder, option):
    assert main(["plan", "--model", f"{folder}/their_net.py:step", *WHERE, *option]) == 2
    assert f"{option[0]} plans a model" in capsys.readouterr().err


def test_an_input_without_axes_has_no_batch(capsys, folder):
    """A random key: the plan is the one without it, but for the mask's kernel."""
    assert main(["plan", "--model", f"{folder}/their_net.py:dropped", *WHERE, "--json", "-"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["batch"] == 64 and made["parameters"] == 256 * 512 + 512 * 8


def test_a_module_with_functions_among_its_leaves_in_a_training_step(capsys, folder):
    assert main(["plan", "--model", f"{folder}/their_net.py:module", *WHERE, "--json", "-"]) == 0
    module = json.loads(capsys.readouterr().out)["training_step"]
    assert main(["plan", "--model", f"{folder}/their_net.py:step", *WHERE, "--json", "-"]) == 0
    assert module["flops"] == json.loads(capsys.readouterr().out)["training_step"]["flops"] > 0


def test_serving_a_function_says_what_serving_needs(capsys, folder):
    assert main(["plan", "--model", f"{folder}/their_net.py:net", *WHERE, "--serve", "64", "8"]) == 2
    error = capsys.readouterr().err
    assert "a TOML file of a transformer" in error and error.count("\n") == 1


def test_titles_and_legends_of_a_narrow_table_keep_their_lines(capsys, folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", "--model", f"{folder}/their_net.py:net", *WHERE, "--offload"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "net (1.35e+05 parameters), batch 64, 2 GPUs of dgx-a100"
    assert any("b micro-batch" in line for line in lines) and not any(line.endswith((" b", " d")) for line in lines)


def test_a_given_plan_is_priced_with_what_to_change_first(capsys):
    arguments = ["--model", "gpt3-1.3b", "--cluster", "dgx-a100", "--gpus", "8", "--batch", "64"]
    assert main(["plan", *arguments, "--fix", "data=4,tensor=2,zero=1,micro=2,policy=ar", "--json", "-"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["plan"]["data"] == 4 and made["plan"]["zero"] == 1 and made["short"] == ""
    gains = [change["gain"] for change in made["changes"] if change["gain"] is not None]
    assert gains == sorted(gains, reverse=True) and gains[0] > 0
    assert made["best"]["seconds"] <= made["seconds"] * (1 - gains[0]) * (1 + 1e-9)
    assert main(["plan", *arguments, "--fix", "data=8,micro=8"]) == 0
    text = capsys.readouterr().out
    assert "does not fit: short of gpu memory" in text and "what to change first" in text and "best of all" in text


def test_a_given_plan_is_completed():
    plan, assumed = fixed.parse("tensor=2, pipeline=2, schedule=interleaved, policy=pr, parameters=host", 16, 64)
    assert (plan.data, plan.micro, plan.chunks, assumed) == (4, 16, 2, "data 4, micro 16")
    assert plan.group == 1  # one micro-batch
    assert fixed.parse("data=2,micro=4,policy=pr,parameters=host,sequence_parallel=on", 2, 64)[0].group == 8
    bare = replace(cluster.load("h200-x4-measured"), storage=None)
    with pytest.raises(UsageError, match=r"has no \[storage\]"):
        made = fixed.parse("data=4,parameters=storage", 4, 64)[0]
        fixed.price(model.load("gpt3-1.3b"), bare, Training(64), made)


def test_lists_and_fronts_in_eighty_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", "--list"]) == 0
    text = capsys.readouterr().out
    assert "gpt3-175b" in text and "dgx-a100" in text
    arguments = ["--model", "gpt3-1.3b", "--cluster", "dgx-a100", "--gpus", "4", "--batch", "16", "--pareto"]
    assert main(["plan", *arguments, "--offload"]) == 0
    counts = [line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert {"1", "2", "4"} == set(filter(None, counts))
    assert main(["plan", *arguments[:-1], "--top", "3"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert all(line.count("█") in (0, 12) for line in shown if line.startswith("│")) and max(map(len, shown)) <= 80
