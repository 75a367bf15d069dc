"""Forms of text in which two records can be compared: code with numbered names, short digests, ranges and runs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

_DROPPED = re.compile(r"^(?:; ModuleID =|source_filename =|//).*$\n?", re.MULTILINE)
_NAMES = re.compile(
    r"(?P<mangled>(?:cfunc\.)?_ZN[\w$.]+)"  # numba's: modules, functions, how many there were before
    r"|(?P<constant>\.const\.[\w$.<>]+)"
    r"|(?P<symbol>\bjcuts_\w+)"  # some are of a digest that holds hashes of sources
    r"|(?P<path>(?:/[\w.+-]+)+\.py\b)|(?P<module>\bjcuts(?:\.\w+)+)|(?P<address>\b0x[0-9a-f]{9,16}\b(?=>))"
)


def normal(text: str) -> str:
    """A text of code in which mangled names, digests, modules and paths are numbered as they occur.

    >>> normal("call @_ZN5numba3abcB2v12E(i32 1)") == normal("call @_ZN5numba3abdB3v112E(i32 1)")
    True
    """
    known: dict[str, str] = {}

    def numbered(found: re.Match[str]) -> str:
        kind = str(found.lastgroup)
        return known.setdefault(found.group(), f"<{kind} {len(known)}>")

    return _NAMES.sub(numbered, _DROPPED.sub("", text))


def digest(text: str) -> str:
    """A short digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def ranges(numbers: Sequence[int]) -> str:
    """``[3, 4, 5, 9]`` as ``3-5,9``."""
    found: list[list[int]] = []
    for n in numbers:
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def runs(names: Sequence[str]) -> str:
    """``add add mul`` as ``add*2 mul``."""
    found: list[list[Any]] = []
    for name in names:
        if found and found[-1][0] == name:
            found[-1][1] += 1
        else:
            found.append([name, 1])
    return " ".join(name if n == 1 else f"{name}*{n}" for name, n in found)
