"""Container file with a section table: SHA-256 of every section and of the header, optional HMAC, atomic replacement.

    preamble   magic (8 bytes), version u32, sections u32, file size u64
    table      per section: name (48 bytes, zero padded), offset u64, size u64, SHA-256 (32 bytes)
    seal       SHA-256 of preamble and table, HMAC-SHA-256 of the same (zeros: not signed)
    sections   in the table's order, each at a multiple of 64, zeros between them

Numbers are little-endian.  A reader checks all of it before it looks at any section; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jcuts.base.errors import ArtifactError

MAGIC = b"\x89jcuts\r\n"
VERSION = 1
ALIGNMENT = 64
_PREAMBLE = struct.Struct("<8sIIQ")
_ENTRY = struct.Struct("<48sQQ32s")
_HASH = hashlib.sha256().digest_size
_UNSIGNED = bytes(_HASH)
_NAME = re.compile(r"[a-z]+(\.[0-9]+)?")
_MOST_SECTIONS = 1 << 20

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Container:
    """The sections of a checked file.

    Attributes:
        sections: name -> read-only bytes. digests: name -> SHA-256, hexadecimal.
        identity: SHA-256 of the header, which covers every section. signed: whether it has an HMAC.
    """

    sections: Mapping[str, memoryview]
    digests: Mapping[str, str]
    identity: str
    signed: bool

    def section(self, name: str) -> memoryview:
        """Raises: ArtifactError if there is none of this name."""
        try:
            return self.sections[name]
        except KeyError:
            raise ArtifactError(f"the artefact has no section {name!r}", section=name) from None


def checksum(data: Bytes) -> str:
    """SHA-256, hexadecimal: of sections, weights, code and programs."""
    return hashlib.sha256(data).hexdigest()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _header(sections: Mapping[str, Bytes]) -> tuple[bytes, list[int]]:
    """Preamble and table, and where each section begins."""
    at = _aligned(_PREAMBLE.size + len(sections) * _ENTRY.size + 2 * _HASH)
    table, places = [], []
    for name, data in sections.items():
        at = _aligned(at)
        places.append(at)
        table.append(_ENTRY.pack(name.encode("ascii"), at, len(data), hashlib.sha256(data).digest()))
        at += len(data)
    return _PREAMBLE.pack(MAGIC, VERSION, len(sections), at) + b"".join(table), places


def pack(sections: Mapping[str, Bytes], *, key: bytes | None = None) -> tuple[str, list[Bytes]]:
    """A file's identity (SHA-256 of its header), and its bytes in parts.

    Args: sections: name -> bytes. key: for the HMAC, None for none.
    Raises: ArtifactError: an impossible name.
    """
    if bad := [name for name in sections if not _NAME.fullmatch(name)]:
        raise ArtifactError(f"{bad[0]!r} is no name of a section", section=bad[0])
    header, places = _header(sections)
    digest = hashlib.sha256(header).digest()
    parts: list[Bytes] = [header, digest, hmac.digest(key, header, "sha256") if key else _UNSIGNED]
    at = len(header) + 2 * _HASH
    for place, data in zip(places, sections.values(), strict=True):
        parts += [bytes(place - at), data]
        at = place + len(data)
    return digest.hex(), parts


def replace_files(files: Sequence[tuple[Path, Iterable[Bytes]]]) -> None:
    """Writes files atomically: all are on disk under temporary names before the first one takes its place.

    Raises: ArtifactError: one cannot be written (then nothing has changed).
    """
    staged: list[tuple[Path, Path]] = []
    path = Path()
    try:
        for path, parts in files:
            temporary = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}.tmp")
            staged.append((temporary, path))
            with open(temporary, "xb") as file:
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
        while staged:
            temporary, path = staged[0]
            os.replace(temporary, path)
            del staged[0]
            _flush_folder(path.parent)
    except OSError as error:
        raise ArtifactError(f"cannot write {path}: {error.strerror or error}", path=str(path)) from error
    finally:
        for temporary, _ in staged:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _flush_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system lets a folder be flushed
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def read(path: Path, *, key: bytes | None = None) -> Container:
    """Reads a file and checks all of it.

    Args: key: demands an HMAC made with it; None: a signature is not looked at.
    Raises: ArtifactError: unreadable, no artefact, of another format, damaged, or not signed with this key.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error.strerror or error}", path=str(path)) from error
    try:
        return _parse(data, key)
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error.message}", path=str(path), **error.values) from None


def _parse(data: bytes, key: bytes | None) -> Container:
    if not data.startswith(MAGIC):
        raise ArtifactError("this is no artefact of jcuts (its first bytes are others)")
    if len(data) < _PREAMBLE.size:
        raise ArtifactError("the file is cut short: it ends in the header", size=len(data))
    _, version, count, size = _PREAMBLE.unpack_from(data)
    if version != VERSION:
        raise ArtifactError(
            f"the artefact has format {version}, this jcuts reads {VERSION}: save it again", found=version
        )
    if size != len(data):
        raise ArtifactError(f"the file has {len(data)} bytes, its header says {size}", found=len(data), expected=size)
    end = _PREAMBLE.size + count * _ENTRY.size
    if count > _MOST_SECTIONS or end + 2 * _HASH > len(data):
        raise ArtifactError(f"the header says {count} sections, for which the file is too short", count=count)
    header, sealed = data[:end], data[end + _HASH : end + 2 * _HASH]
    if hashlib.sha256(header).digest() != data[end : end + _HASH]:
        raise ArtifactError("the header is damaged: its SHA-256 does not fit")
    _check_signature(header, sealed, key)
    sections, digests = _sections(data, header, count)
    return Container(sections, digests, hashlib.sha256(header).hexdigest(), sealed != _UNSIGNED)


def _check_signature(header: bytes, sealed: bytes, key: bytes | None) -> None:
    if key is None:
        return
    if sealed == _UNSIGNED:
        raise ArtifactError("the artefact is not signed, and a key was given: save it with this key")
    if not hmac.compare_digest(hmac.digest(key, header, "sha256"), sealed):
        raise ArtifactError("the artefact is not signed with this key, or was changed afterwards")


def _sections(data: bytes, header: bytes, count: int) -> tuple[dict[str, memoryview], dict[str, str]]:
    view = memoryview(data)
    sections: dict[str, memoryview] = {}
    digests: dict[str, str] = {}
    at = len(header) + 2 * _HASH
    for number in range(count):
        padded, offset, size, digest = _ENTRY.unpack_from(header, _PREAMBLE.size + number * _ENTRY.size)
        name = _name(padded, number)
        if name in sections:
            raise ArtifactError(f"two sections are called {name!r}", section=name)
        if offset != _aligned(at) or offset + size > len(data):
            raise ArtifactError(f"section {name!r} lies where none may be", section=name, offset=offset, size=size)
        if any(view[at:offset]):
            raise ArtifactError(f"there is something between the sections, in front of {name!r}", section=name)
        sections[name] = view[offset : offset + size]
        if hashlib.sha256(sections[name]).digest() != digest:
            raise ArtifactError(f"section {name!r} is damaged: its SHA-256 does not fit", section=name)
        digests[name] = digest.hex()
        at = offset + size
    if at != len(data):
        raise ArtifactError(f"there are {len(data) - at} bytes behind the last section", size=len(data) - at)
    return sections, digests


def _name(padded: bytes, number: int) -> str:
    text = padded.rstrip(b"\0").decode("ascii", errors="replace")
    if not _NAME.fullmatch(text):
        raise ArtifactError(f"section {number} has the impossible name {text!r}", section=text)
    return text


def read_key(value: Any) -> bytes | None:
    """A key: bytes, or the path of a file that holds it; at least 16 bytes.

    Raises: ArtifactError: unreadable, or too short.
    """
    if value is None:
        return None
    if not isinstance(value, bytes):
        try:
            value = Path(value).read_bytes()
        except OSError as error:
            raise ArtifactError(f"cannot read the key {value}: {error.strerror}", path=str(value)) from error
    if len(value) < 16:
        raise ArtifactError(f"the key has {len(value)} bytes, at least 16 are needed", size=len(value))
    return value
