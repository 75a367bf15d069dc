"""Mutation fuzzing of artefacts: every damaged file is a typed error or gives the same bits, and never a crash.

    python benchmarks/artifact/mutated_files.py --count 10000

Files are damaged at random, half of them with all checksums of the container computed again: bytes, blocks, lengths,
fields of the section table, values of the manifest.  Children load and call them, and say before each which one comes
next, so that a crash is seen and counted.  Object code and programs whose SHA-256 is entered into the manifest anew are
new code, which nobody can tell from another: such files are not made here.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PREAMBLE = struct.Struct("<8sIIQ")
ENTRY = struct.Struct("<48sQQ32s")
SEAL = 64
"""Bytes of the header's SHA-256 and of the HMAC."""


# -- damage -----------------------------------------------------------------------------------------------------------
def damaged(data: bytes, number: int) -> tuple[str, bytes]:
    """The damaged file of a number: what was done, and its bytes."""
    rng = random.Random(number)
    kind = rng.choice(("bytes", "block", "length", "bytes", "manifest", "manifest", "manifest", "table", "payload"))
    if kind == "length":
        return "length", _other_length(data, rng)
    if kind == "manifest":
        return "manifest, checksums anew", _with_manifest(data, rng)
    if kind == "table":
        return "table, checksums anew", _with_table(data, rng)
    if kind == "payload":
        return "payload, checksums anew", _with_payload(data, rng)
    found = bytearray(data)
    head = PREAMBLE.size + ENTRY.size * _count(data) + SEAL
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(head if rng.random() < 0.4 else len(found))
        if kind == "bytes":
            found[at] = rng.choice((found[at] ^ 1 << rng.randrange(8), rng.randrange(256)))
        else:
            size = rng.randrange(1, 257)
            found[at : at + size] = rng.choice((bytes(size), rng.randbytes(size), bytes(found[:size])))
    return kind, bytes(found[: len(data)])


def _other_length(data: bytes, rng: random.Random) -> bytes:
    at, size = rng.randrange(len(data)), rng.randrange(1, 4096)
    cut, gone = data[:at], data[:at] + data[at + size :]
    return rng.choice((cut, gone, data + rng.randbytes(size), data[:at] + rng.randbytes(size) + data[at:]))


def _count(data: bytes) -> int:
    return PREAMBLE.unpack_from(data)[2]


def _sections(data: bytes) -> dict[bytes, bytes]:
    found = {}
    for n in range(_count(data)):
        name, offset, size, _ = ENTRY.unpack_from(data, PREAMBLE.size + n * ENTRY.size)
        found[name] = data[offset : offset + size]
    return found


def _packed(sections: dict[bytes, bytes], magic: bytes, version: int) -> bytes:
    """A file with right checksums."""

    def up(n: int) -> int:
        return -(-n // 64) * 64

    start = up(PREAMBLE.size + len(sections) * ENTRY.size + SEAL)
    table, body = b"", b""
    for name, part in sections.items():
        body += bytes(up(start + len(body)) - start - len(body))
        table += ENTRY.pack(name, start + len(body), len(part), hashlib.sha256(part).digest())
        body += part
    header = PREAMBLE.pack(magic, version, len(sections), start + len(body)) + table
    sealed = header + hashlib.sha256(header).digest() + bytes(32)
    return sealed + bytes(start - len(sealed)) + body


def _with_payload(data: bytes, rng: random.Random) -> bytes:
    sections = _sections(data)
    name = rng.choice(list(sections))
    part = bytearray(sections[name])
    if rng.random() < 0.3 and len(sections) > 2:
        other = rng.choice(list(sections))
        sections[name], sections[other] = sections[other], sections[name]
    elif part:
        for _ in range(rng.choice((1, 1, 4))):
            part[rng.randrange(len(part))] = rng.randrange(256)
        sections[name] = bytes(part)
    return _packed(sections, data[:8], 1)


def _with_table(data: bytes, rng: random.Random) -> bytes:
    end = PREAMBLE.size + ENTRY.size * _count(data)
    header = bytearray(data[:end])
    at = rng.randrange(8, end)
    size = rng.choice((1, 4, 8))
    header[at : at + size] = rng.choice((rng.randbytes(size), bytes(size), b"\xff" * size))
    header = header[:end]
    return bytes(header) + hashlib.sha256(header).digest() + data[end + 32 :]


def _with_manifest(data: bytes, rng: random.Random) -> bytes:
    sections = _sections(data)
    name = next(iter(sections))
    if rng.random() < 0.2:
        text = bytearray(sections[name])
        for _ in range(rng.choice((1, 2))):
            text[rng.randrange(len(text))] = rng.choice(b'0123456789abc"{}[],:x\\\xff')
        sections[name] = bytes(text)
    else:
        found = json.loads(sections[name])
        places = list(_places(found))
        for _ in range(rng.choice((1, 1, 2))):
            _change(*rng.choice(places), rng)
        sections[name] = json.dumps(found, sort_keys=True, separators=(",", ":")).encode()
    return _packed(sections, data[:8], 1)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from _places(item)


def _change(holder: Any, key: Any, rng: random.Random) -> None:
    try:
        old = holder[key]
    except (KeyError, IndexError):
        return
    action = rng.randrange(6)
    if action == 0 and isinstance(holder, dict):
        del holder[key]
    elif action == 1 and isinstance(holder, dict):
        holder[f"{key}x"] = holder.pop(key)
    elif action == 2 and isinstance(holder, list):
        rng.shuffle(holder)
    elif action == 3 and isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), old)
    elif isinstance(old, bool) or old is None:
        holder[key] = rng.choice((True, False, None, 1, "x"))
    elif isinstance(old, int):
        holder[key] = rng.choice((old + 1, old - 1, 0, -1, 1 << 40, 1 << 70, 1.5, "1", None))
    elif isinstance(old, str):
        at = rng.randrange(len(old) + 1)
        holder[key] = rng.choice((old[:at] + "a" + old[at + 1 :], old[:at], "", old + "\n", "../x", 7, None))
    else:
        holder[key] = rng.choice(({}, [], 0, "x", None, [old], {"a": old}))


# -- children ---------------------------------------------------------------------------------------------------------
def child(source: Path, expected: Path, first: int, last: int) -> None:
    """Loads and calls the damaged files of some numbers; a line before each and one with its outcome."""
    import jax

    import jcuts
    from jcuts.base.errors import JcutsError

    data = source.read_bytes()
    with np.load(expected) as known:
        args = [known[f"arg{n}"] for n in range(sum(name.startswith("arg") for name in known))]
        results = [known[f"out{n}"] for n in range(sum(name.startswith("out") for name in known))]
    tree = jax.tree.structure(jcuts.load(source)(*args))
    # In memory where there is such a file system: ten thousand files.
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        path = Path(folder) / source.name
        for number in range(first, last):
            what, found = damaged(data, number)
            print(json.dumps([number, what]), flush=True)
            path.write_bytes(found)
            if found == data:
                outcome = "undamaged"
            else:
                try:
                    result = jcuts.load(path)(*args)
                    outcome = "same" if _same(result, tree, results) else "DIFFERENT"
                except JcutsError as error:
                    outcome = type(error).__name__
                except Exception as error:
                    outcome = f"UNTYPED {type(error).__name__}: {str(error)[:200]}"
            print(json.dumps([number, what, outcome]), flush=True)


def _same(result: Any, tree: Any, expected: list[np.ndarray]) -> bool:
    import jax

    found = [np.asarray(x) for x in jax.tree.leaves(result)]
    return jax.tree.structure(result) == tree and all(
        f.dtype == e.dtype and f.shape == e.shape and f.tobytes() == e.tobytes()
        for f, e in zip(found, expected, strict=True)
    )


def outcomes(source: Path, expected: Path, count: int, *, each: int = 500) -> collections.Counter[tuple[str, str]]:
    """How often each (damage, outcome) was met among the files of the numbers below ``count``."""
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    at = 0
    while at < count:
        command = [sys.executable, str(Path(__file__)), "--child", str(source), str(expected), str(at)]
        command.append(str(min(count, at + each)))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        for line in lines:
            if len(line) == 3:
                found[line[1], line[2]] += 1
        if done.returncode:
            if not lines or len(lines[-1]) == 3:
                raise SystemExit(f"a child failed before its first file, or after its last: {done.returncode}")
            found[lines[-1][1], f"CRASH {done.returncode} at {lines[-1][0]}"] += 1
            at = lines[-1][0] + 1
        else:
            at = min(count, at + each)
    return found


def example(folder: Path) -> tuple[Path, Path]:
    """An artefact of a small function with two signatures, and arguments with results of the first."""
    import jax
    import jax.numpy as jnp

    import jcuts

    random_ = np.random.default_rng(0)

    def weight(*shape: int) -> Any:
        return jnp.asarray(random_.standard_normal(shape).astype(np.float32) / 8)

    w = {"conv": weight(3, 3, 8, 16), "dense": weight(16, 32)}

    @jcuts.optimize(mode="fusion", tune="off")
    def net(x: Any) -> Any:
        y = jax.lax.conv_general_dilated(x, w["conv"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        y = jax.nn.relu(y).mean((1, 2))
        return {"probabilities": jax.nn.softmax(y @ w["dense"]), "features": (y, [y.sum()])}

    x = random_.standard_normal((2, 12, 12, 8)).astype(np.float32)
    path, expected = folder / "net.jcuts", folder / "expected.npz"
    net.save(path, x, signatures=[(x[:1],)])
    results = [np.asarray(r) for r in jax.tree.leaves(net(x))]
    np.savez(expected, arg0=x, **{f"out{n}": r for n, r in enumerate(results)})
    return path, expected


def main() -> int:
    """Prints how often each outcome was met; status 1 where one was bad."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10000)
    parser.add_argument("--child", nargs=4, metavar=("FILE", "EXPECTED", "FIRST", "LAST"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        source, expected, first, last = arguments.child
        child(Path(source), Path(expected), int(first), int(last))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = outcomes(*example(Path(folder)), arguments.count)
    for (what, outcome), times in sorted(found.items()):
        print(f"{times:6}  {what}: {outcome}")
    bad = sum(times for (_, outcome), times in found.items() if outcome.split()[0] in ("DIFFERENT", "UNTYPED", "CRASH"))
    print(f"{sum(found.values())} files, {bad} crashes, untyped errors or other results")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
