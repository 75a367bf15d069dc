"""Minimal ELF reader: undefined and defined symbols of a relocatable object file.

The JIT linker aborts the whole process on a symbol that it cannot resolve, so object code is checked before linking.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from jcuts.base.errors import NativeError

_SECTION_SYMTAB = 2
_MACHINES = {62: "x86_64", 183: "aarch64"}


@dataclass(frozen=True)
class ObjectSymbols:
    """Symbols of an object file: ``defined`` names with a section, ``undefined`` names to be found elsewhere."""

    machine: str
    defined: frozenset[str]
    undefined: frozenset[str]


def read_symbols(data: bytes) -> ObjectSymbols:
    """Parses the symbol table of a 64-bit little-endian relocatable ELF file.

    Raises:
        NativeError: the bytes are not such a file, or are cut short.
    """
    try:
        return _read(data)
    except (struct.error, LookupError, ValueError, OverflowError) as error:
        raise NativeError(
            f"object code of {len(data)} bytes is not a readable ELF file ({error})", size=len(data)
        ) from error


def _read(data: bytes) -> ObjectSymbols:
    if data[:4] != b"\x7fELF" or data[4] != 2 or data[5] != 1:
        raise ValueError("no 64-bit little-endian ELF header")
    kind, machine = struct.unpack_from("<HH", data, 16)
    if kind != 1:
        raise ValueError(f"ELF type {kind} is not relocatable")
    (section_offset,) = struct.unpack_from("<Q", data, 40)
    entry_size, entries = struct.unpack_from("<HH", data, 58)
    # name, type, flags, address, offset, size, link, info, alignment, entry size
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, section_offset + i * entry_size) for i in range(entries)]
    if any(s[1] != 8 and s[4] + s[5] > len(data) for s in sections):  # 8: NOBITS takes no space
        raise ValueError("cut short")
    defined: set[str] = set()
    undefined: set[str] = set()
    for section in sections:
        if section[1] != _SECTION_SYMTAB:
            continue
        strings_offset, strings_size = sections[section[6]][4], sections[section[6]][5]
        strings = data[strings_offset : strings_offset + strings_size]
        for offset in range(section[4], section[4] + section[5], 24):
            name_offset, _, _, index, _, _ = struct.unpack_from("<IBBHQQ", data, offset)
            name = strings[name_offset : strings.index(b"\0", name_offset)].decode()
            if name:
                (undefined if index == 0 else defined).add(name)
    # The linker makes the global offset table itself.
    undefined.discard("_GLOBAL_OFFSET_TABLE_")
    return ObjectSymbols(_MACHINES.get(machine, str(machine)), frozenset(defined), frozenset(undefined))
