"""Networks ranked for GPUs that are not here: RTX 2080 (assembled) and V100 (no assembler takes it any more)."""

from __future__ import annotations

import itertools
import json
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.arch.load import load_gpu
from jcuts.base.errors import UsageError
from jcuts.cli.main import main
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.toolchain import ptxas
from jcuts.pipeline import offline_ranking
from tests.ops.cases import conv

_WHY = compiler.available()
compiled = pytest.mark.cuda_compilers
OF_LATER_GPUS = ("cp.async", ".NaN.", "mma.sync", "bf16", "tf32", "f16x2.f32", "ldmatrix")


@pytest.fixture(scope="module")
def mobilenet():
    pytest.importorskip("keras")
    from benchmarks.networks import workloads

    return workloads.network("MobileNetV2", 1, size=32)


def block(x, w, d):
    """A product, a depthwise convolution and a softmax."""
    y = jnp.clip(conv(x, d, padding="SAME", groups=8), 0, 6)
    return jax.nn.softmax(y.reshape(2, -1) @ w)


def block_arguments():
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal(s).astype(np.float32) for s in ((2, 7, 9, 8), (504, 130), (3, 3, 1, 8)))


def is_sorted(values):
    return all(a >= b for a, b in itertools.pairwise(values))


@pytest.mark.xdist_group("ranking")
@pytest.mark.parametrize("name", ["RTX 2080", "V100"])
def test_mobilenet_is_ranked(mobilenet, name, monkeypatch):
    monkeypatch.setattr(compiler, "available", lambda: "no compiler here")
    function, arguments = mobilenet
    found = offline_ranking.rank(function, *arguments, arch=load_gpu(name))
    assert found.target == "" and "no compiler here" in str(found.why)
    assert sum(o.count for o in found.operations) > 50
    for operation in found.operations:
        assert bool(operation.candidates) != (operation.refused is not None)
        assert is_sorted([c.score for c in operation.candidates])
        assert all(0 < c.score <= 1 and 0 < c.bound <= c.seconds for c in operation.candidates)
        assert not any(dict(c.program.params)["cuda"] in ("product", "patch") for c in operation.candidates)
    convolutions = [o for o in found.operations if o.primitives.get("conv_general_dilated") and o.candidates]
    assert sum(o.count for o in convolutions) == 17 + 12 + 8  # depthwise; of at most 64 terms; of a single pixel
    refused = {o.refused.reason for o in found.operations if o.refused is not None}
    assert refused == {offline_ranking.NO_FORM}


@compiled
@pytest.mark.xdist_group("ranking")
def test_mobilenet_is_assembled_for_turing(mobilenet, tmp_path):
    function, arguments = mobilenet
    found = offline_ranking.rank(function, *arguments, arch=load_gpu("RTX 2080"), limit=2)
    assert found.target == "sm_75" and found.why is None
    for operation in found.operations:
        good = [c for c in operation.candidates if not c.rejected]
        assert bool(good) != (operation.refused is not None)
        assert is_sorted([-c.seconds for c in good]) and all(0 < c.pul <= 1 and c.seconds > 0 for c in good)
    written = offline_ranking.write_ptx(found, tmp_path)
    assert len(written) == sum(not o.refused for o in found.operations) > 10
    for path in written:
        text = path.read_text()
        assert ".target sm_75" in text and not [word for word in OF_LATER_GPUS if word in text]
        assert ptxas.assemble(text, "sm_75")[:4] == b"\x7fELF"


def test_an_mlp_is_ranked_as_a_whole_beside_its_parts(monkeypatch):
    monkeypatch.setattr(compiler, "available", lambda: "no compiler here")
    shapes = ((4096, 96), (96, 384), (384,), (384, 96))
    arguments = [np.zeros(s, np.float32) for s in shapes]
    found = offline_ranking.rank(lambda x, w, b, v: jax.nn.gelu(x @ w + b) @ v + x, *arguments, arch=load_gpu("H100"))
    pairs = [[dict(c.program.params)["cuda"] for c in o.candidates] for o in found.operations]
    assert len(pairs) == 3 and set(pairs[2]) == {"b2b"} and not set(pairs[0] + pairs[1]) & {"b2b"}
    assert found.operations[2].primitives["dot_general"] == 2
    old = offline_ranking.rank(lambda x, w, b, v: jax.nn.gelu(x @ w + b) @ v + x, *arguments, arch=load_gpu("V100"))
    assert len(old.operations) == 2


@compiled
def test_volta_is_ranked_and_says_why_it_is_not_assembled(tmp_path):
    found = offline_ranking.rank(block, *block_arguments(), arch=load_gpu("V100"), limit=3)
    assert isinstance(found.why, UsageError)
    assert found.why.values == {"capability": (7, 0), "oldest": (7, 5)} and "no machine code" in found.why.message
    assert found.target == "sm_75"  # registers are those of its code
    ranked = [o for o in found.operations if o.candidates]
    assert ranked and all(0 < c.pul <= 1 and c.registers > 8 for o in ranked for c in o.candidates)
    turing = offline_ranking.rank(block, *block_arguments(), arch=load_gpu("RTX 2080"), limit=3)
    assert [o.name for o in turing.operations] == [o.name for o in found.operations]
    assert [c.pul for o in turing.operations for c in o.candidates] != [c.pul for o in ranked for c in o.candidates]
    with pytest.raises(UsageError, match=r"7\.0 is older than 7\.5"):
        offline_ranking.write_ptx(found, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.more_with_cuda_compilers
def test_newer_gpus_multiply_on_matrix_units():
    found = offline_ranking.rank(block, *block_arguments(), arch=load_gpu("A100"), limit=2)
    forms = {dict(c.program.params)["cuda"] for o in found.operations for c in o.candidates}
    assert forms & {"product", "skinny"} and not any(o.refused for o in found.operations)


@pytest.mark.more_with_cuda_compilers
@pytest.mark.parametrize("name", ["V100", "own file"])
def test_the_command_ranks(name, tmp_path, monkeypatch, capsys):
    module = types.ModuleType("ranked_module")
    module.block, module.arguments = block, block_arguments
    monkeypatch.setitem(sys.modules, "ranked_module", module)
    monkeypatch.setenv("COLUMNS", "300")
    if name == "own file":
        shipped = Path(offline_ranking.__file__).parents[1] / "arch" / "data" / "rtx2080.toml"
        own = tmp_path / "own.toml"
        own.write_text(shipped.read_text().replace('"RTX 2080"', '"MINE"'))
        name = str(own)
    data = tmp_path / "ranking.json"
    options = ["--args", "ranked_module:arguments", "--arch", name, "--limit", "1", "--json", str(data)]
    assert main(["explain", "ranked_module:block", *options]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "dot_general" in text and "conv_general_dilated" in text
    assert ("no machine code" in text) == (name == "V100" and not _WHY)
    written = json.loads(data.read_text())
    assert written["arch"] == ("V100" if name == "V100" else "MINE")
    assert [o["refused"] is None for o in written["operations"]].count(False) == 1
    assert main(["explain", "ranked_module:block", "--args", "ranked_module:arguments", "--arch", "V10"]) == 2
    assert "did you mean" in capsys.readouterr().err
