"""Serialisation: exported programs, kernels and weights of several signatures into one container, each stored once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jcuts.artifact import container, device, kernels, trees, weights
from jcuts.artifact.manifest import (
    ARGUMENTS,
    BESIDE,
    INSIDE,
    ArrayType,
    Kernel,
    Manifest,
    Program,
    Signature,
    Static,
    Tensor,
    seal,
)
from jcuts.base import fingerprint
from jcuts.base.errors import UnsupportedError
from jcuts.codegen.artifact import CompiledKernel
from jcuts.codegen.cuda.toolchain.image import is_image
from jcuts.xla import elf_loader


@dataclass(frozen=True)
class ExportedProgram:
    """A program: ``export(name)`` serialises it under a name (``jax.export``).

    ``weights`` are its first operands, ``options`` XLA's for it.
    """

    export: Callable[[str], bytes]
    weights: Sequence[Any]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SavedCall:
    """One call to be saved: `jcuts.artifact.manifest.Signature` before its parts have places in a file.

    Attributes:
        platform: 'cpu' or 'cuda'.
        in_tree, out_tree: ``PyTreeDef`` of the dynamic arguments (positional and keyword) and of the result.
        inputs, outputs: avals. program: what was tuned; plain: XLA's own.
        kernels: under the names that `program` has for them. targets: FFI targets that it calls.
    """

    platform: str
    in_tree: Any
    out_tree: Any
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    statics: Sequence[Static]
    donated: Sequence[int]
    program: ExportedProgram
    plain: ExportedProgram
    kernels: Mapping[str, CompiledKernel]
    targets: Sequence[str]
    decision: Any = None
    choices: Any = None
    evidence: Any = None


class _Weights:
    """The distinct weights of all programs, in the order in which they are met."""

    def __init__(self, mode: str, names: Mapping[str, str]) -> None:
        self.mode = mode
        self.tensors: dict[str, Tensor] = {}
        self.data: dict[str, bytes] = {}
        self._names = names
        self._keys: dict[tuple[str, ArrayType], str] = {}

    def keys(self, arrays: Sequence[Any], prefix: str) -> tuple[str, ...]:
        """Keys of arrays; those that are new get names with this prefix.

        Raises: UnsupportedError: weights that are arguments have equal values, so that programs do not tell which is
            which (the same array twice is one weight).
        """
        found = tuple(self._key(x, prefix) for x in arrays)
        if self.mode == ARGUMENTS and len({id(x) for x in arrays}) != len(set(found)):
            twice = next(key for key in found if found.count(key) > 1)
            raise UnsupportedError(
                f"weights={ARGUMENTS!r} needs weights that differ, and there is another one equal to "
                f"{self.tensors[twice].name}: save with trained or random ones"
            )
        return found

    def _key(self, x: Any, prefix: str) -> str:
        data = weights.contents(x)
        sha = container.checksum(data)
        content = sha, weights.array_type(x)
        if content not in self._keys:
            name = self._names.get(sha, f"{prefix}{len(self.tensors)}")
            taken = {t.name for t in self.tensors.values()}
            name = name if name not in taken else f"{name}.{len(self.tensors)}"
            is_stored = self.mode != ARGUMENTS
            tensor = Tensor(name, content[1], sha if is_stored else container.checksum(name.encode()))
            self._keys[content] = tensor.key
            self.tensors[tensor.key] = tensor
            if is_stored:
                self.data[tensor.key] = data
        return self._keys[content]


def save(
    path: Path,
    name: str,
    calls: Sequence[SavedCall],
    *,
    platform: str,
    x64: bool,
    mode: str = INSIDE,
    names: Any = None,
    key: Any = None,
) -> str:
    """Writes an artefact.

    Args:
        name: of the function. calls: at least one. platform: 'cpu' or 'cuda'. x64: whether JAX has 64-bit types.
        mode: where weights go: inside, beside (``<stem>.safetensors``), or nowhere (they are arguments).
        names: a pytree that holds the weights, which are named by their path in it. key: for the HMAC.
    Returns: the file's identity.
    Raises: UnsupportedError: something has no form in an artefact. ArtifactError: the file cannot be written.
    """
    secret = container.read_key(key)
    found = _Weights(mode, _names_of(names))
    sections: dict[str, container.Bytes] = {"manifest": b""}
    codes: dict[str, Kernel] = {}
    code_bytes: list[bytes] = []

    signatures = []
    for call in calls:
        plain = _program(call.plain, found.keys(call.plain.weights, "w"))
        tuned = _program(call.program, found.keys(call.program.weights, "prepared"))
        if mode == ARGUMENTS and (odd := set(plain.weights) ^ set(tuned.weights)):
            _refuse_folded(odd, found.tensors)
        for kernel_name, kernel in call.kernels.items():
            if kernel_name not in codes:
                _check_loadable(kernel)
                header = {**kernel.header(), "digest": kernel_name}
                codes[kernel_name] = Kernel(header, container.checksum(kernel.object_code))
                code_bytes.append(kernel.object_code)
        signatures.append(
            Signature(
                trees.encode(call.in_tree, "the arguments"),
                trees.encode(call.out_tree, "the result"),
                tuple(_type(x, "argument") for x in call.inputs),
                tuple(_type(x, "result") for x in call.outputs),
                tuple(call.statics),
                tuple(call.donated),
                tuned,
                plain,
                tuple(call.kernels),
                call.decision,
                call.choices,
                call.evidence,
            )
        )
    manifest = Manifest(
        name=name,
        made={"jcuts": fingerprint.package_version("jcuts"), **device.versions_here()},
        device=device.this_gpu() if platform == "cuda" else device.this_cpu(_external(calls)),
        x64=x64,
        targets=tuple(sorted({target for call in calls for target in call.targets})),
        weights=mode,
        file=path.stem + ".safetensors" if mode == BESIDE else "",
        tensors=tuple(found.tensors.values()),
        kernels=tuple(codes.values()),
        signatures=tuple(signatures),
    )
    sealed = [
        _serialised(manifest, signature, call, sections) for signature, call in zip(signatures, calls, strict=True)
    ]
    manifest = replace(manifest, signatures=tuple(sealed))
    sections |= {kernels.section_of(n): code for n, code in enumerate(code_bytes)}
    files: list[tuple[Path, Sequence[container.Bytes]]] = []
    if mode == BESIDE:
        files.append((path.parent / manifest.file, [weights.pack_beside(manifest.tensors, found.data)]))
    elif mode == INSIDE:
        sections |= {weights.section_of(n): found.data[t.key] for n, t in enumerate(manifest.tensors)}
    sections["manifest"] = manifest.to_json()
    identity, parts = container.pack(sections, key=secret)
    container.replace_files([*files, (path, parts)])
    return identity


def _program(exported: ExportedProgram, keys: tuple[str, ...]) -> Program:
    return Program("", "", keys, dict(exported.options))


def _serialised(
    manifest: Manifest, signature: Signature, call: SavedCall, sections: dict[str, container.Bytes]
) -> Signature:
    """The signature with its programs exported under its seal, each into a section."""
    made = {}
    for kind, exported in (("program", call.program), ("plain", call.plain)):
        data = exported.export(seal(manifest, signature))
        section = f"{kind}.{sum(name.startswith(kind) for name in sections)}"
        sections[section] = data
        found: Program = getattr(signature, kind)
        made[kind] = replace(found, section=section, sha256=container.checksum(data))
    return replace(signature, **made)


def rename_kernels(found: Mapping[str, CompiledKernel]) -> dict[str, CompiledKernel]:
    """Kernels by digest, with the names that they have in artefacts."""
    made = {}
    for digest, kernel in found.items():
        name = kernels.renamed(kernel, container.checksum(kernel.object_code))
        made[digest] = replace(kernel, digest=name)
    return made


def _external(calls: Sequence[SavedCall]) -> tuple[str, ...]:
    return kernels.external_symbols({name: kernel for call in calls for name, kernel in call.kernels.items()})


def _check_loadable(kernel: CompiledKernel) -> None:
    """Can the loader place this code?  Found out where it is saved, not where it is needed."""
    if is_image(kernel.object_code):
        return
    if why := elf_loader.supported():
        raise UnsupportedError(f"an artefact for this machine cannot hold kernels: {why}")
    elf_loader.load(kernel.object_code, kernel.symbol)


def _type(aval: Any, what: str) -> ArrayType:
    try:
        return weights.array_type(aval)
    except TypeError as error:
        raise UnsupportedError(f"an {what} of type {aval} cannot be saved: {error}".replace("an r", "a r")) from error


def _refuse_folded(odd: set[str], tensors: Mapping[str, Tensor]) -> None:
    names = sorted(tensors[key].name for key in odd)
    raise UnsupportedError(
        f"weights={ARGUMENTS!r} needs a tuned program of the same weights, and this one has others computed from them "
        f"({', '.join(names[:4])}{', ...' if len(names) > 4 else ''}): make the weights arguments of the function, so "
        "that it is tuned for weights that change",
        weights=names,
    )


def _names_of(tree: Any) -> dict[str, str]:
    """SHA-256 of contents -> path in a pytree, with points between its parts."""
    import jax

    found: dict[str, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = ".".join(str(getattr(p, "key", getattr(p, "idx", getattr(p, "name", p)))) for p in path)
        found.setdefault(container.checksum(weights.contents(leaf)), name or "weight")
    return found
