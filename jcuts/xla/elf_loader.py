"""Static ELF loader: places the sections of relocatable x86-64 object code in memory and applies its relocations.

What `jcuts.xla.jit_linker` does with LLVM, for processes that have neither numba nor llvmlite.  Kernels are emitted
for the large code model, self-contained but for libm symbols, so that few kinds of relocations occur; any other kind is
refused by name.  Pages are never writable and executable at once.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jcuts.base.errors import NativeError
from jcuts.xla.elf import read_symbols

MACHINE = "x86_64"
_PAGE = mmap.PAGESIZE
_MOST_BYTES = 1 << 30
_MOST_ALIGNMENT = 4096
_WRITE = 1
_ALLOC = 2
_EXECUTE = 4
_SYMTAB = 2
_RELA = 4
_NOBITS = 8
_SECTION_ABSOLUTE = 0xFFF1
_SECTION_COMMON = 0xFFF2
_SECTION_RESERVED = 0xFF00
_TABLE = "_GLOBAL_OFFSET_TABLE_"
_PROT_READ = 1
_PROT_WRITE = 2
_PROT_EXECUTE = 4

_lock = threading.Lock()
_loaded: list[mmap.mmap] = []  # executables keep raw function pointers: nothing is ever unmapped


@dataclass(frozen=True)
class _Section:
    kind: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int


def supported() -> str:
    """'' if object code of this machine can be loaded without LLVM, else the reason."""
    found = platform.machine()
    return "" if found == MACHINE else f"object code of {found} needs llvmlite to be linked; artefacts hold {MACHINE}"


def undefined_symbols(object_code: bytes) -> frozenset[str]:
    """Names that object code takes from the process. Raises: NativeError: no readable ELF file."""
    return read_symbols(object_code).undefined - {_TABLE}


def load(object_code: bytes, symbol: str) -> int:
    """Loads one object file and returns the address of ``symbol``; the code stays for the life of the process.

    Args: object_code: relocatable ELF for x86-64.  symbol: name of a function that it defines.
    Raises:
        NativeError: not such a file, cut short, another machine, a kind of relocation that is not known, a symbol that
            is missing, or memory that may not be made executable.
    """
    symbols = read_symbols(object_code)
    if symbols.machine != MACHINE or platform.machine() != MACHINE:
        raise NativeError(
            f"object code is for {symbols.machine}, this machine is {platform.machine()}; {MACHINE} can be loaded",
            found=symbols.machine,
        )
    try:
        return _load(bytes(object_code), symbol)
    except (struct.error, LookupError, ValueError, OverflowError) as error:
        raise NativeError(f"object code of {symbol!r} cannot be loaded: {error}", symbol=symbol) from error


def _load(data: bytes, symbol: str) -> int:
    (section_offset,) = struct.unpack_from("<Q", data, 40)
    entry_size, entries = struct.unpack_from("<HH", data, 58)
    sections = []
    for i in range(entries):
        _, kind, flags, _, offset, size, link, info, alignment, _ = struct.unpack_from(
            "<IIQQQQIIQQ", data, section_offset + i * entry_size
        )
        sections.append(_Section(kind, flags, offset, size, link, info, max(1, alignment)))
    places, total, executable = _layout(sections)
    common, got = total, total + _common_bytes(data, sections)
    symbols = [s.size // 24 for s in sections if s.kind == _SYMTAB]
    if len(symbols) != 1:
        raise ValueError(f"it has {len(symbols)} symbol tables")
    total = got + 8 * symbols[0]
    memory = mmap.mmap(-1, max(total, _PAGE), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for number, place in places.items():
        section = sections[number]
        if section.kind != _NOBITS:
            memory[place : place + section.size] = data[section.offset : section.offset + section.size]
    addresses: dict[int, list[int | None]] = {}
    entry = None
    for number, section in enumerate(sections):
        if section.kind == _SYMTAB:
            named = _addresses_of(data, sections, section, places, base, base + common, base + got)
            addresses[number] = [address for _, address in named]
            entry = next((address for name, address in named if name == symbol and address), entry)
    for section in sections:
        if section.kind == _RELA and section.info in places:
            target = sections[section.info]
            _relocate(data, section, memory, places[section.info], target.size, base, got, addresses[section.link])
    if entry is None or not base <= entry < base + executable:
        raise NativeError(f"object code does not define the function {symbol!r}", symbol=symbol)
    writable = got > common or any(sections[n].flags & _WRITE for n in places)
    _protect(base, executable, max(total, _PAGE), writable)
    with _lock:
        _loaded.append(memory)
    return entry


def _layout(sections: list[_Section]) -> tuple[dict[int, int], int, int]:
    """Place of every section that belongs into memory, code first; all bytes, and those of the code's pages."""
    kept = [n for n, s in enumerate(sections) if s.flags & _ALLOC and s.size]
    code = [n for n in kept if sections[n].flags & _EXECUTE]
    places: dict[int, int] = {}
    at = 0

    def put(numbers: list[int]) -> None:
        nonlocal at
        for number in numbers:
            section = sections[number]
            if section.alignment > _MOST_ALIGNMENT or section.alignment & (section.alignment - 1):
                raise ValueError(f"a section is aligned to {section.alignment}")
            at = -(-at // section.alignment) * section.alignment
            places[number] = at
            at += section.size
            if at > _MOST_BYTES:
                raise ValueError(f"the sections take more than {_MOST_BYTES} bytes")

    put(code)
    at = executable = -(-at // _PAGE) * _PAGE
    put([n for n in kept if n not in code])
    return places, -(-at // _PAGE) * _PAGE, executable


def _symbols_of(data: bytes, sections: list[_Section], table: _Section) -> Iterator[tuple[str, int, int, int]]:
    """Name, section number, value and size of every symbol of a table."""
    strings = data[sections[table.link].offset : sections[table.link].offset + sections[table.link].size]
    for offset in range(table.offset, table.offset + table.size, 24):
        name_offset, _, _, index, value, size = struct.unpack_from("<IBBHQQ", data, offset)
        yield strings[name_offset : strings.index(b"\0", name_offset)].decode(), index, value, size


def _slot(size: int) -> int:
    return -(-size // 64) * 64


def _common_bytes(data: bytes, sections: list[_Section]) -> int:
    """Bytes of the symbols that have no section of their own (numba's environment pointer, which nothing reads)."""
    tables = [s for s in sections if s.kind == _SYMTAB]
    sizes = [size for t in tables for _, index, _, size in _symbols_of(data, sections, t) if index == _SECTION_COMMON]
    total = sum(_slot(size) for size in sizes)
    if total > _MOST_BYTES:
        raise ValueError(f"its common symbols take {total} bytes")
    return total


def _addresses_of(
    data: bytes, sections: list[_Section], table: _Section, places: dict[int, int], base: int, common: int, got: int
) -> list[tuple[str, int | None]]:
    """Name and address of every symbol of a table; None where it has no place in memory."""
    found: list[tuple[str, int | None]] = []
    for name, index, value, size in _symbols_of(data, sections, table):
        if index == _SECTION_ABSOLUTE:
            found.append((name, value))
        elif index == _SECTION_COMMON:
            found.append((name, common))
            common += _slot(size)
        elif index >= _SECTION_RESERVED:
            raise ValueError(f"{name!r} is in the reserved section {index:#x}")
        elif index == 0:
            found.append((name, got if name == _TABLE else _external(name) if name else None))
        elif index in places:
            if value > sections[index].size:
                raise ValueError(f"{name!r} lies outside of its section")
            found.append((name, base + places[index] + value))
        else:
            found.append((name, None))
    return found


def _external(name: str) -> int:
    for library in ("libm.so.6", "libc.so.6", None):
        try:
            return ctypes.cast(getattr(ctypes.CDLL(library), name), ctypes.c_void_p).value or 0
        except (OSError, AttributeError):
            continue
    raise NativeError(f"object code needs {name}, which this process does not have", missing=[name])


_WORDS = {
    **dict.fromkeys((1, 24, 25, 27, 29, 31), "<Q"),
    **dict.fromkeys((2, 4, 9, 11, 26, 41, 42), "<i"),
    10: "<I",
}
"""How each kind of relocation is stored: R_X86_64_64 (1), PC32, PLT32, ... (System V ABI, AMD64 supplement)."""
_RELATIVE = (2, 4, 9, 24, 26, 29, 41, 42)
_BY_SLOT = (9, 27, 41, 42)
"""What names the symbol's slot of the global offset table, and not the symbol."""
_FROM_TABLE = (25, 27, 31)
"""What counts from the table's beginning."""
_OF_TABLE = (26, 29)
"""What names the table itself."""


def _relocate(
    data: bytes, table: _Section, memory: Any, place: int, size: int, base: int, got: int, addresses: list[int | None]
) -> None:
    """Applies a relocation table. Args: place, size: of the section; got: place of its symbols' offset table."""
    for offset in range(table.offset, table.offset + table.size, 24):
        where, info, addend = struct.unpack_from("<QQq", data, offset)
        kind, number = info & 0xFFFFFFFF, info >> 32
        form, address = _WORDS.get(kind), addresses[number]
        if form is None:
            raise NativeError(f"object code has a relocation of kind {kind}, which is not known here", kind=kind)
        if kind in _OF_TABLE:
            address = base + got
        elif address is None:
            raise ValueError("a relocation names a symbol that has no place")
        elif kind in _BY_SLOT:
            struct.pack_into("<Q", memory, got + 8 * number, address)
            address = base + got + 8 * number
        if where + struct.calcsize(form) > size:
            raise ValueError("a relocation lies outside of its section")
        value = address + addend
        value -= base + place + where if kind in _RELATIVE else base + got if kind in _FROM_TABLE else 0
        try:
            struct.pack_into(form, memory, place + where, value % (1 << 64) if form == "<Q" else value)
        except struct.error:
            raise ValueError(f"a relocation of kind {kind} reaches too far") from None


def _protect(base: int, executable: int, total: int, writable: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    rest = _PROT_READ | (_PROT_WRITE if writable else 0)
    parts = [(base, executable, _PROT_READ | _PROT_EXECUTE), (base + executable, total - executable, rest)]
    for address, size, protection in parts:
        if size and libc.mprotect(address, size, protection):
            raise NativeError(f"memory cannot be made executable (errno {ctypes.get_errno()})")
