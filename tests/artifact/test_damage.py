"""Damaged and foreign files are typed errors, with checksums computed anew or not; saving replaces files whole."""

from __future__ import annotations

import errno
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import jcuts
from jcuts.artifact import container, manifest, trees
from jcuts.base.errors import ArtifactError, UnsupportedError
from tests.artifact.functions import convolutions, same

ROOT = Path(__file__).resolve().parents[2]
FUZZED = 300


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function, its arguments, and its artefact."""
    fn, args, _ = convolutions()
    path = tmp_path_factory.mktemp("saved") / "net.jcuts"
    fn.save(path, *args)
    return fn, args, path


def benchmark(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / "artifact" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_damaged_files_are_typed_errors_or_the_same_bits(tmp_path):
    script = benchmark("mutated_files")
    found = script.outcomes(*script.example(tmp_path), FUZZED)
    assert sum(found.values()) == FUZZED
    assert {outcome for _, outcome in found} <= {"ArtifactError", "ArtifactMismatch", "same", "undamaged"}
    assert sum(times for (_, outcome), times in found.items() if outcome == "ArtifactError") > FUZZED // 2


@pytest.mark.parametrize("size", [0, 1, 8, 20, 24, 100, 1000, -1])
def test_cut_short(saved, tmp_path, size):
    path = tmp_path / "net.jcuts"
    path.write_bytes(saved[2].read_bytes()[:size])
    with pytest.raises(ArtifactError, match=r"net\.jcuts: "):
        jcuts.load(path)


@pytest.mark.parametrize("data", [b"", b"\x7fELF" + bytes(200), b"PK\x03\x04" + bytes(200), b"{}"])
def test_foreign(tmp_path, data):
    path = tmp_path / "net.jcuts"
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match="no artefact of jcuts"):
        jcuts.load(path)


def test_unreadable(tmp_path):
    with pytest.raises(ArtifactError, match="cannot read"):
        jcuts.load(tmp_path / "nothing.jcuts")
    with pytest.raises(ArtifactError, match="cannot read"):
        jcuts.load(tmp_path)


def test_another_format(saved, tmp_path):
    data = bytearray(saved[2].read_bytes())
    data[8] = 9
    path = tmp_path / "net.jcuts"
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"has format 9, this jcuts reads 1: save it again"):
        jcuts.load(path)


def test_container_round_trip(tmp_path):
    path = tmp_path / "x"
    sections = {"manifest": b"abc", "code.0": b"", "weight.10": bytes(range(100))}
    identity, parts = container.pack(sections)
    container.replace_files([(path, parts)])
    found = container.read(path)
    assert {name: bytes(data) for name, data in found.sections.items()} == sections
    assert found.identity == identity and not found.signed
    with pytest.raises(ArtifactError, match=r"no section 'code\.1'"):
        found.section("code.1")
    with pytest.raises(ArtifactError, match="no name of a section"):
        container.pack({"../x": b""})


# -- signatures -------------------------------------------------------------------------------------------------------
def test_signature(saved, tmp_path):
    fn, args, _ = saved
    key, path = tmp_path / "key", tmp_path / "net.jcuts"
    key.write_bytes(os.urandom(32))
    fn.save(path, *args, key=key)
    assert same(jcuts.load(path, key=key)(*args), fn(*args))
    assert same(jcuts.load(path, key=key.read_bytes())(*args), fn(*args))
    assert container.read(path).signed
    with pytest.raises(ArtifactError, match="not signed with this key"):
        jcuts.load(path, key=bytes(32))
    with pytest.raises(ArtifactError, match="is not signed, and a key was given"):
        jcuts.load(saved[2], key=key)
    with pytest.raises(ArtifactError, match="cannot read the key"):
        jcuts.load(path, key=tmp_path / "nothing")


def test_changed_and_signed_no_more(saved, tmp_path):
    fn, args, _ = saved
    path = tmp_path / "net.jcuts"
    fn.save(path, *args, key=bytes(range(32)))
    file = container.read(path)
    sections = dict(file.sections)
    sections["manifest"] = bytes(sections["manifest"]).replace(b'"reason":"', b'"reason":"really ')
    container.replace_files([(path, container.pack(sections)[1])])
    assert same(jcuts.load(path)(*args), fn(*args))
    with pytest.raises(ArtifactError, match="is not signed"):
        jcuts.load(path, key=bytes(range(32)))


# -- manifest and structures ------------------------------------------------------------------------------------------
def test_manifest_round_trip(saved):
    data = bytes(container.read(saved[2]).section("manifest"))
    assert manifest.from_json(data).to_json() == data


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"format":1', b'"format":2'),
        (b'"format":1', b'"format":1,"more":0'),
        (b'"x64":false', b'"x64":0'),
        (b'"x64":false', b'"x64":NaN'),
        (b'"dtype":"float32"', b'"dtype":"object"'),
        (b'"shape":[', b'"shape":[-1,'),
        (b'"shape":[', b'"shape":[99999999999999,99999999999999,'),
        (b'"tiles":', b'"tiles":0.5,"tile":'),
        (b'"donated":[]', b'"donated":[7]'),
        (b'"weights":"inside"', b'"weights":"under"'),
        (b"{", b"{" * 5000),
        (b'"', b"\xff"),
    ],
)
def test_manifests_that_are_none(saved, old, new):
    data = bytes(container.read(saved[2]).section("manifest"))
    assert old in data
    with pytest.raises(ArtifactError):
        manifest.from_json(data.replace(old, new))


@pytest.mark.parametrize(
    "data",
    [
        *(1, "x", {"list": 0}, {"set": [0]}, {"list": [1]}, {"list": [0, 0]}, {"dict": [["a", 0], ["a", 1]]}, [0], {}),
        *({"dict": [["b", 0], ["a", 1]]}, {"dict": [[0.5, 0]]}, {"named": "os:system", "fields": [], "items": []}),
        *({"named": "os:stat_result", "fields": ["a"], "items": [0]}, {"named": 1, "fields": 2, "items": []}),
    ],
)
def test_structures_that_are_none(data):
    with pytest.raises(ArtifactError):
        trees.decode(data, 1 if data != {"dict": [["b", 0], ["a", 1]]} else 2)


def test_deep_structures():
    import jax

    deep: object = 0
    for _ in range(300):
        deep = [deep]
    with pytest.raises(UnsupportedError, match="nested"):
        trees.encode(jax.tree.structure(deep), "the arguments")


# -- atomic replacement -----------------------------------------------------------------------------------------------
def test_full_disk_leaves_the_old_file(saved, tmp_path, monkeypatch):
    fn, args, _ = saved
    path = tmp_path / "net.jcuts"
    path.write_bytes(b"old")

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArtifactError, match="No space left"):
        fn.save(path, *args)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there(saved, tmp_path):
    fn, args, _ = saved
    with pytest.raises(ArtifactError, match="cannot write"):
        fn.save(tmp_path / "nowhere" / "net.jcuts", *args)


SAVER = """
import sys, os
from pathlib import Path
from jcuts.artifact import container
print("ready", flush=True)
n = 0
while True:
    n += 1
    _, parts = container.pack({"manifest": bytes([n % 256]) * 3_000_000})
    container.replace_files([(Path(sys.argv[1]), parts)])
"""


def test_killed_while_saving(tmp_path):
    path = tmp_path / "x.jcuts"
    for delay in (0.05, 0.11, 0.17):
        child = subprocess.Popen([sys.executable, "-c", SAVER, str(path)], cwd=ROOT, stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        while not path.exists():
            time.sleep(0.01)
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        data = container.read(path).section("manifest")
        assert len(data) == 3_000_000 and len(np.unique(np.frombuffer(data, np.uint8))) == 1
