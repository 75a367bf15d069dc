"""Another device or version is refused by name or falls back; loading needs neither numba, compilers nor a database."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jcuts
from jcuts.artifact import contents, device, load
from jcuts.base import fingerprint
from jcuts.base.errors import ArtifactMismatch, NativeError, UnsupportedError, UsageError
from jcuts.cli.main import main
from jcuts.xla import native_library
from tests.artifact.functions import convolutions, same

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    fn, args, _ = convolutions()
    path = tmp_path_factory.mktemp("saved") / "net.jcuts"
    fn.save(path, *args)
    return fn, args, path


def another_cpu(monkeypatch, **changes):
    here = fingerprint.cpu()
    monkeypatch.setattr(fingerprint, "cpu", lambda: {**here, **changes})


def another_version(monkeypatch, **changes):
    here = fingerprint.package_version
    monkeypatch.setattr(fingerprint, "package_version", lambda name: changes.get(name) or here(name))


# -- what an exported program does not have --------------------------------------------------------------------------
def test_no_derivative_and_no_batching_rule(saved):
    fn, args, path = saved
    found = jcuts.load(path)

    def total(*xs):
        return jax.tree.reduce(lambda a, b: a + b.sum(), found(*xs), 0.0)

    for wrong in (jax.grad(total), lambda *xs: jax.jvp(total, xs, xs), jax.jit(jax.value_and_grad(total))):
        with pytest.raises(UnsupportedError, match=r"has no derivative: save jax.value_and_grad\("):
            wrong(*args)
    many = [np.stack([x, x]) for x in args]
    with pytest.raises(UnsupportedError, match=r"has no batching rule: save jax.vmap\("):
        jax.vmap(found)(*many)
    assert same(jax.jit(lambda *xs: found(*xs))(*args), fn(*args))


# -- other CPUs -------------------------------------------------------------------------------------------------------
def test_missing_instructions(saved, monkeypatch, caplog):
    fn, args, path = saved
    another_cpu(monkeypatch, model="Old CPU", features=("sse", "sse2"))
    with pytest.raises(ArtifactMismatch, match=r"this Old CPU lacks .*avx") as caught:
        jcuts.load(path)
    assert len(caught.value.differences) == 1
    with pytest.raises(ArtifactMismatch, match="lacks"):
        jcuts.load(path, on_mismatch="run")
    found = jcuts.load(path, on_mismatch="fallback")
    assert found.is_fallback and "plain XLA runs" in caplog.text
    np.testing.assert_allclose(found(*args), fn(*args), rtol=1e-5)
    assert same(found(*args), jax.jit(fn.__wrapped__)(*args))
    assert found.stats()["signatures"][0]["fallback"]
    with pytest.raises(ArtifactMismatch, match="cannot run here"):
        jcuts.register_targets(path)


def test_another_machine(saved, monkeypatch):
    another_cpu(monkeypatch, machine="aarch64")
    with pytest.raises(ArtifactMismatch, match="machine: made for x86_64, here aarch64"):
        jcuts.load(saved[2])


def test_another_model(saved, monkeypatch):
    fn, args, path = saved
    another_cpu(monkeypatch, model="New CPU", features=(*fingerprint.cpu()["features"], "amx_tile"))
    with pytest.raises(ArtifactMismatch, match=r"here New CPU.*on_mismatch='run'"):
        jcuts.load(path)
    found = jcuts.load(path, on_mismatch="run")
    assert same(found(*args), fn(*args)) and "New CPU" in found.differences[0]


def test_mitigations_are_no_instructions(saved, monkeypatch):
    fewer = tuple(name for name in fingerprint.cpu()["features"] if name not in ("ibrs", "rdtscp", "hypervisor"))
    another_cpu(monkeypatch, features=fewer)
    assert not jcuts.load(saved[2]).is_fallback


def test_another_number_of_cores(saved, monkeypatch, caplog):
    fn, args, path = saved
    monkeypatch.setattr(fingerprint, "usable_cores", lambda: 64)
    assert same(jcuts.load(path)(*args), fn(*args))
    assert "here are 64: bits are the same" in caplog.text


def test_disabled(saved, monkeypatch):
    fn, args, path = saved
    monkeypatch.setenv("JCUTS_DISABLE", "1")
    found = jcuts.load(path)
    assert found.is_fallback and found.differences == ("JCUTS_DISABLE is set",)
    assert same(found(*args), jax.jit(fn.__wrapped__)(*args))


# -- other versions ---------------------------------------------------------------------------------------------------
def test_another_jaxlib(saved, monkeypatch):
    fn, args, path = saved
    another_version(monkeypatch, jaxlib="0.99.0")
    with pytest.raises(ArtifactMismatch, match=r"jaxlib: made with [\d.]+, here 0.99.0"):
        jcuts.load(path)
    assert jcuts.load(path, on_mismatch="fallback").is_fallback
    assert same(jcuts.load(path, on_mismatch="run")(*args), fn(*args))


def test_64_bit_types(saved):
    with jax.enable_x64(True), pytest.raises(ArtifactMismatch, match="jax_enable_x64: made with False, here True"):
        jcuts.load(saved[2])


def test_no_native_library(saved, monkeypatch):
    def missing():
        raise NativeError("it is not there")

    monkeypatch.setattr(native_library, "load", missing)
    monkeypatch.setattr("jcuts.xla.cpu_launcher._target_registered", False)
    with pytest.raises(NativeError, match="it is not there"):
        jcuts.load(saved[2])
    found = jcuts.load(saved[2], on_mismatch="fallback")
    assert found.is_fallback and "native code: it is not there" in found.differences


def test_policies(saved):
    with pytest.raises(UsageError, match="refuse, fallback, run"):
        jcuts.load(saved[2], on_mismatch="hope")


# -- GPUs -------------------------------------------------------------------------------------------------------------
H100 = {"platform": "cuda", "name": "NVIDIA H100", "capability": (9, 0), "driver": (13, 0)}


@pytest.mark.parametrize(
    ("change", "blocking", "other"),
    [
        ({}, [], []),
        ({"capability": (8, 0), "name": "NVIDIA A100"}, ["made for NVIDIA H100 (9.0), here NVIDIA A100 (8.0)"], []),
        ({"name": "NVIDIA H200"}, [], ["GPU: made for NVIDIA H100, here NVIDIA H200"]),
        ({"driver": (12, 9)}, ["CUDA driver: made with 13.0, here 12.9"], []),
        ({"driver": (13, 1)}, [], ["CUDA driver: made with 13.0, here 13.1"]),
    ],
)
def test_gpus(saved, monkeypatch, change, blocking, other):
    monkeypatch.setattr(device, "platform_here", lambda: "cuda")
    monkeypatch.setattr(device, "this_gpu", lambda: {**H100, **change})
    found = device.differences(dataclasses.replace(load.read(saved[2])[1], device=H100))
    for expected, have in ((blocking, found.blocking), (other, found.other)):
        assert len(expected) == len(have) and all(e in h for e, h in zip(expected, have, strict=True))


def test_a_gpu_for_a_cpu(saved, monkeypatch):
    monkeypatch.setattr(device, "platform_here", lambda: "cuda")
    with pytest.raises(ArtifactMismatch, match="platform: made for cpu, here cuda"):
        jcuts.load(saved[2])


# -- an empty environment ---------------------------------------------------------------------------------------------
BARE = """
import importlib.abc, json, sys
import numpy as np

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("numba", "llvmlite", "cvxpy", "rich", "safetensors"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hidden())
import jax
import jcuts
path, expected = sys.argv[1:]
with np.load(expected) as known:
    x, y, exported = known["x"], known["y"], known["exported"].tobytes()
found = jcuts.load(path)
bits = [np.asarray(found(x)).tobytes() == y.tobytes()]
if len(sys.argv) > 2:
    again = jax.export.deserialize(bytearray(exported))
    bits.append(np.asarray(jax.jit(again.call)(x)[0]).tobytes() == y.tobytes())
layers = ("api", "jit", "primitive", "pipeline", "tune", "fusion", "schedule", "lower", "plan")
loaded = sorted({n.split(".")[1] for n in sys.modules if n.startswith("jcuts.")} & set(layers))
print(json.dumps([bits, found.is_fallback, len(found.manifest.kernels), loaded]))
"""


def test_without_numba_compilers_and_database(saved, tmp_path):
    fn, (x,), path = saved
    expected = tmp_path / "expected.npz"
    exported = np.frombuffer(jcuts.load(path).export_bytes(), np.uint8)
    np.savez(expected, x=np.asarray(x), y=np.asarray(fn(x)), exported=exported)
    environment = {**os.environ, "JCUTS_CACHE_DIR": str(tmp_path / "empty"), "PATH": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(BARE), str(path), str(expected)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    bits, is_fallback, kernels, layers = json.loads(done.stdout.splitlines()[-1])
    assert bits == [True, True] and not is_fallback and kernels > 0 and layers == []
    assert not (tmp_path / "empty").exists()


# -- the command line -------------------------------------------------------------------------------------------------
@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "saved_function.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "w = jnp.eye(8) + 1\n"
        "def fn(x):\n    return jax.nn.softmax(x @ w)\n"
        "def one():\n    return (jnp.ones((4, 8)),)\n"
        "two = (jnp.ones((2, 8)),)\n"
        "named = {'layer': w}\n"
    )
    monkeypatch.chdir(tmp_path)
    yield SimpleNamespace(path=tmp_path / "out.jcuts")
    sys.modules.pop("saved_function", None)
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]


def test_build_and_inspect(module, capsys, monkeypatch):
    command = ["build", "saved_function:fn", "--args", "saved_function:one", "--args", "saved_function:two"]
    command += ["--out", str(module.path), "--names", "saved_function:named", "--mode", "fusion", "--tune", "off"]
    assert main(command) == 0
    identity = capsys.readouterr().out.split()[-1]
    found = jcuts.load(module.path)
    assert found.identity == identity and len(found.signatures) == 2
    assert main(["inspect", str(module.path)]) == 0
    text = capsys.readouterr().out
    for expected in (identity, "takes float32[4,8]", "kernel 1 x", "limit", "1 arrays, 256 bytes, inside", "jaxlib"):
        assert expected in text
    assert main(["inspect", "--json", str(module.path)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["tensors"][0]["name"] == "layer" and shown["signatures"][0]["evidence"][0]["seed"] == 0
    assert shown == json.loads(json.dumps(contents.contents(module.path)))
    another_cpu(monkeypatch, features=("sse",))
    assert main(["inspect", str(module.path)]) == 1
    assert "cannot run here: CPU" in capsys.readouterr().out


def test_mistakes_on_the_command_line(module, capsys):
    assert main(["inspect", str(module.path)]) == 2
    assert "cannot read" in capsys.readouterr().err
    command = ["build", "saved_function:fn", "--args", "saved_function:one", "--out"]
    assert main([*command, "nowhere/out.jcuts"]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main([*command, str(module.path), "--args", "saved_function:named"]) == 2
    assert "a further --args" in capsys.readouterr().err
