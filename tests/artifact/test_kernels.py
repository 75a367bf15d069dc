"""Calls of kernels in programs are read and checked: targets, names, types, tiles, scratch memory."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax import export

import jcuts
from jcuts.artifact import container, kernels, load
from jcuts.base import knobs
from jcuts.base.errors import ArtifactError
from jcuts.jit.export import saving
from tests.artifact.functions import array, convolutions, fused


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Single calls and kernels of an artefact whose kernels have scratch memory."""
    with knobs.scope(chains=False):
        return contents(tmp_path_factory.mktemp("saved") / "net.jcuts")


@pytest.fixture(scope="module")
def chained(tmp_path_factory):
    """The same kernels in one call."""
    return contents(tmp_path_factory.mktemp("chained") / "net.jcuts")


def contents(path):
    fused(lambda x: jax.nn.softmax(x @ x.T)).save(path, array(64, 64))
    file, found = load.read(path)
    exported = export.deserialize(bytearray(file.section(found.signatures[0].program.section)))
    return kernels.calls(exported.mlir_module()), kernels.read(found, file), found.targets


def test_chains_fit(chained):
    (call,), found, targets = chained
    assert targets == ("jcuts_cpu_chain",) and set(call.kernels) == set(found) and len(found) > 1
    kernels.check_calls(*chained)


@pytest.mark.parametrize("name", ["wiring", "sizes"])
def test_every_number_of_a_chain_is_checked(chained, name):
    """Any one of them changed: refused, or another place inside the arena, which the checksums alone can tell."""
    (call,), found, targets = chained
    refused = 0
    for place, value in enumerate(call.arrays[name]):
        for new in (-1, 1 << 40):
            changed = (*call.arrays[name][:place], new, *call.arrays[name][place + 1 :])
            if name == "sizes" and place % 3 and new > value:
                continue  # more scratch memory or slots than needed: only the arena's size limits them
            with pytest.raises(ArtifactError, match="does not fit"):
                kernels.check_calls([replace(call, arrays={**call.arrays, name: changed})], found, targets)
            refused += 1
    assert refused > len(call.arrays[name])


@pytest.mark.parametrize(
    "changes", [{"arrays": {}}, {"numbers": {"arena_bytes": 8}}, {"operands": ()}, {"results": (((1,), "float32"),)}]
)
def test_chains_that_do_not_fit(chained, changes):
    (call,), found, targets = chained
    with pytest.raises(ArtifactError, match="does not fit"):
        kernels.check_calls([replace(call, **changes)], found, targets)


@pytest.mark.parametrize(
    "text, size, numbers",
    [
        ("[1, -2, 3]", 3, (1, -2, 3)),
        ("7", 3, (7, 7, 7)),
        ("0x0100000000000000FFFFFFFFFFFFFFFF", 2, (1, -1)),
        ("", 0, ()),
    ],
)
def test_arrays_of_attributes(text, size, numbers):
    assert kernels._array(text, size) == numbers


def test_calls_fit(saved):
    calls, found, _ = saved
    assert {name for call in calls for name in call.kernels} == set(found)
    assert any(kernel.scratch_bytes for kernel in found.values())
    kernels.check_calls(*saved)


@pytest.mark.parametrize(
    "changes",
    [
        {"tiles": 99},
        {"scratch_bytes": 1 << 30},
        {"inputs": (((64, 63), "float32"),)},
        {"inputs": (((64, 64), "float16"),)},
        {"inputs": ()},
        {"outputs": (((64, 64), "float32"), ((64, 64), "float32"))},
    ],
)
def test_kernels_that_do_not_fit(saved, changes):
    calls, found, targets = saved
    name = next(call.kernels[0] for call in calls if len(found[call.kernels[0]].inputs) == 1)
    with pytest.raises(ArtifactError, match="does not fit it"):
        kernels.check_calls(calls, {**found, name: replace(found[name], **changes)}, targets)


@pytest.mark.parametrize(
    "changes",
    [{"slots": 0}, {"slots": 1 << 40}, {"scratch_bytes": -1}, {"tiles": 7}, {"num_outputs": 0}],
)
def test_calls_that_do_not_fit(saved, changes):
    calls, found, targets = saved
    call = next(call for call in calls if found[call.kernels[0]].scratch_bytes)
    with pytest.raises(ArtifactError, match="does not fit it"):
        kernels.check_calls([replace(call, numbers={**call.numbers, **changes})], found, targets)


def test_calls_of_something_else(saved):
    calls, found, targets = saved
    with pytest.raises(ArtifactError, match="which is not among"):
        kernels.check_calls(calls, found, ())
    with pytest.raises(ArtifactError, match="which the artefact lacks"):
        kernels.check_calls(calls, {}, targets)
    with pytest.raises(ArtifactError, match="cannot be read"):
        kernels.calls("stablehlo.custom_call @jcuts_cpu_launch(%0) : nothing")


def test_calls_of_gpu_kernels():
    """Lowered for a GPU that is not here: single calls, with a result in place of an operand, and chains."""
    shape = jax.ShapeDtypeStruct((4, 8), np.float32)

    def program(x):
        y = jax.ffi.ffi_call("jcuts_cuda_launch", shape, input_output_aliases={0: 0})(
            x, digest="a.1", num_outputs=np.int64(1), scratch_bytes=np.int64(0), start=np.int64(0)
        )
        return jax.ffi.ffi_call("jcuts_cuda_chain", shape)(
            y, digests="b.1 c.2 ", wiring=np.arange(8), scratch_bytes=np.int64(16)
        )

    checks = [export.DisabledSafetyCheck.custom_call(target) for target in kernels.CUDA_TARGETS]
    exported = export.export(jax.jit(program), platforms=["cuda"], disabled_checks=checks)(shape)
    one, chain = kernels.calls(exported.mlir_module())
    assert (one.kernels, chain.kernels) == (("a.1",), ("b.1", "c.2"))
    assert one.operands == chain.results == (((4, 8), "float32"),)
    named = {"a.1": None, "b.1": None, "c.2": None}
    kernels.check_calls([one, chain], named, kernels.CUDA_TARGETS)  # type: ignore[arg-type]


def test_names_in_calls_and_chains():
    names = {"a": "a.1", "b": "b.2"}
    one = SimpleNamespace(params={"attributes": (("digest", "a"), ("tiles", 3))})
    chain = SimpleNamespace(params={"attributes": (("digests", "a b a "), ("wiring", "kept"))})
    assert saving._renamed_attributes(one, names) == (("digest", "a.1"), ("tiles", 3))
    assert saving._renamed_attributes(chain, names) == (("digests", "a.1 b.2 a.1 "), ("wiring", "kept"))


def test_code_and_name_belong_together(tmp_path):
    fn, args, _ = convolutions()
    path = tmp_path / "net.jcuts"
    fn.save(path, *args)
    file = container.read(path)
    first, second = [name for name in file.sections if name.startswith("code.")][:2]
    sections = dict(file.sections)
    sections[first], sections[second] = sections[second], sections[first]
    container.replace_files([(path, container.pack(sections)[1])])
    with pytest.raises(ArtifactError, match="does not hold the code of kernel"):
        jcuts.load(path)


def test_equal_kernels_have_equal_names_in_every_artefact(tmp_path):
    fn, (x,), _ = convolutions()
    fn.save(tmp_path / "a.jcuts", x)
    fn.save(tmp_path / "b.jcuts", x, signatures=[(x[:1],)])
    a, b = ({k.name for k in jcuts.load(tmp_path / f"{n}.jcuts").manifest.kernels} for n in "ab")
    assert a < b
