"""Contents listing: what an artefact holds, as JSON data and as lines of text; nothing of it is loaded or run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from jax import numpy as jnp

from jcuts.artifact import device
from jcuts.artifact.container import Container
from jcuts.artifact.load import read
from jcuts.artifact.manifest import Manifest, Signature


def contents(path: str | Path, key: Any = None) -> dict[str, Any]:
    """All of the manifest, the sections with sizes and SHA-256, and what is other on this machine.

    Raises: ArtifactError: no artefact, damaged, or not signed with the key.
    """
    file, found = read(Path(path), key)
    compared = device.differences(found)
    return {
        "identity": file.identity,
        "signed": file.signed,
        **asdict(found),
        "sections": [{"name": n, "bytes": len(d), "sha256": file.digests[n]} for n, d in file.sections.items()],
        "differences": {"blocking": list(compared.blocking), "other": list(compared.other)},
    }


def text(path: str | Path, key: Any = None) -> str:
    """The same for people, without the single sections. Raises: as `contents`."""
    file, found = read(Path(path), key)
    lines = [
        f"{found.name}, {sum(map(len, file.sections.values())):,} bytes, {'signed' if file.signed else 'not signed'}",
        f"identity  {file.identity}",
        f"made for  {_device(found.device)}",
        "made with " + ", ".join(f"{name} {version}" for name, version in found.made.items()),
        f"weights   {_weights(found)}",
        f"kernels   {_kernels(found, file)}",
    ]
    for number, signature in enumerate(found.signatures):
        lines += [f"signature {number}", *("  " + line for line in _signature(signature))]
    compared = device.differences(found)
    lines += [f"cannot run here: {difference}" for difference in compared.blocking]
    lines += [f"other here: {difference}" for difference in compared.other]
    lines += [line for line in [device.note_on_cores(found)] if line]
    return "\n".join(lines)


def _device(made: dict[str, Any]) -> str:
    if made["platform"] == "cpu":
        return f"{made['machine']}, {made['model']}, {made['cores']} cores; instructions {' '.join(made['features'])}"
    pair = {name: ".".join(map(str, made[name])) for name in ("capability", "driver")}
    return f"{made['name']}, compute capability {pair['capability']}, driver for CUDA {pair['driver']}"


def _weights(found: Manifest) -> str:
    size = sum(int(np.prod(t.type.shape)) * jnp.dtype(t.type.dtype).itemsize for t in found.tensors)
    place = f"beside, in {found.file}" if found.file else found.weights
    return f"{len(found.tensors)} arrays, {size:,} bytes, {place}"


def _kernels(found: Manifest, file: Container) -> str:
    size = sum(len(data) for name, data in file.sections.items() if name.startswith("code."))
    return f"{len(found.kernels)}, {size:,} bytes of code, called as {', '.join(found.targets) or 'nothing'}"


def _signature(signature: Signature) -> list[str]:
    takes = ", ".join(map(str, signature.inputs)) or "nothing"
    lines = [f"takes {takes}", f"gives {', '.join(map(str, signature.outputs)) or 'nothing'}"]
    if signature.statics:
        lines.append("static " + ", ".join(f"{s.name or s.position}={s.value!r}" for s in signature.statics))
    decision = signature.decision if isinstance(signature.decision, dict) else {}
    lines.append(f"runs {decision.get('chosen')}: {decision.get('reason')}")
    if signature.program.options:
        lines.append(f"options of XLA: {signature.program.options}")
    for row in signature.choices if isinstance(signature.choices, list) else []:
        if isinstance(row, dict) and row.get("chosen") != "xla":
            seconds = f"{_us(row.get('seconds'))} us, XLA {_us(row.get('xla_seconds'))} us"
            lines.append(f"kernel {row.get('count')} x {row.get('name')}: {row.get('chosen')} ({seconds})")
    rows = [r for r in signature.evidence if isinstance(r, dict)] if isinstance(signature.evidence, list) else []
    for row in rows:
        if "unchecked" in row:
            lines.append(f"seed {row.get('seed')}: not compared with float64: {row['unchecked']}")
        else:
            lines.append(
                f"seed {row.get('seed')}, output {row.get('output')}: error {_short(row.get('error'))} "
                f"{row.get('measure')}, limit {_short(row.get('limit'))}, XLA's {_short(row.get('xla'))}"
            )
    return lines


def _us(seconds: Any) -> str:
    return f"{seconds * 1e6:.1f}" if isinstance(seconds, (int, float)) else "-"


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, (int, float)) else str(value)
