"""Programmatic dependent launch: places ``griddepcontrol.wait`` as late as correctness allows, behind L2 prefetches.

A kernel may be launched before the one in front of it has ended (PTX ISA, ``griddepcontrol``).  Until that one is
complete it may compute, but touch no memory that others touch.  The address arithmetic of a kernel's first copies takes
a hundred instructions and more, up to a third of a microsecond: it comes before the wait.  So do prefetches into the L2
cache (`l2_prefetch`).

When it allows the next one to be launched (``griddepcontrol.launch_dependents``) decides how far ahead weights travel.
A kernel that prefetches does so behind its wait: the weights of one kernel at a time lie in the L2 cache ahead.  All
others do so first of all: a norm, or the sums of a split, between two products do not keep the second one's weights
waiting.  Order stays what it was: a kernel passes its wait when the one in front is complete, which that one is only
after its own wait, so that by induction all in front are.

ptxas would move the wait to the front and the computation behind it, to save registers.  A dummy instruction between
them, predicated so that it practically never executes, reads the first values that are used behind the wait; ptxas
keeps it and the wait in order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

WAIT = "griddepcontrol.wait;"
"""Nothing is read or written before the grid in front is complete and visible.  Other launches pay nothing."""
LAUNCH = "griddepcontrol.launch_dependents;"
"""Only when all blocks are there, or have ended, is the next grid launched: none of them waits for room."""
MOST = 40
"""Numbers that are computed before the wait for certain: as many registers as every kernel has to spare there."""
COMPUTES = frozenset(
    {
        "abs",
        "add",
        "and",
        "bfe",
        "bfi",
        "brev",
        "clz",
        "cvt",
        "cvta",
        "div",
        "lop3",
        "mad",
        "max",
        "min",
        "mov",
        "mul",
        "mul24",
        "neg",
        "not",
        "or",
        "popc",
        "prmt",
        "rem",
        "selp",
        "set",
        "setp",
        "shf",
        "shl",
        "shr",
        "sub",
        "xor",
    }
)
"""Instructions that only write registers (without ``.cc``: then a carry, too, that the next one reads)."""
_LINE = re.compile(r"\t(?:ld\.param|([a-z0-9]+))[.\w]*\s[^;{}]*;")
_REGISTER = re.compile(r"%[a-z_]+\d+\b")
_ENDS = re.compile(r"\s*(?:@|\$|bra|brx|ret|exit|call|[{}])")


def insert_grid_dependency_wait(
    lines: Sequence[str], place: int, prefetches: Sequence[str] = (), *, ready: bool = True
) -> list[str]:
    """The lines of a PTX kernel with ``griddepcontrol.wait`` and ``griddepcontrol.launch_dependents`` inserted.

    What the first block of instructions computes from parameters comes before the wait, in its order.

    Args:
        place: the line in front of which the instructions begin.
        prefetches: instructions in front of all others (`l2_prefetch.prefetch_instructions`).
        ready: whether what can be computed before the wait is.
    """
    head, wait = lines[:place], ["\t" + WAIT]
    if prefetches:
        head, wait = [*head, *prefetches], [*wait, "\t" + LAUNCH]
    else:
        head = [*head, "\t" + LAUNCH]
    if not ready:
        return [*head, *wait, *lines[place:]]
    early: list[str] = []
    late: list[str] = []
    made: set[str] = set()  # by what comes before the wait
    touched: set[str] = set()  # by what stays behind it
    end = place
    while end < len(lines) and not _ENDS.match(lines[end]):
        line = lines[end]
        names = _REGISTER.findall(line)
        if _computes(line) and touched.isdisjoint(names):
            early.append(line)
            made |= set(names[:1])
        else:
            late.append(line)
            touched |= set(names)
        end += 1
    rest = [*late, *lines[end:]]
    return [*head, *early, *_hoistable_prefix(_first_used(rest, made)), *wait, *rest]


def _computes(line: str) -> bool:
    found = _LINE.fullmatch(line)
    return found is not None and (found[1] is None or found[1] in COMPUTES) and ".cc" not in line


def _first_used(lines: Iterable[str], made: set[str]) -> list[str]:
    """The first of these registers that are used, 32 or 64 bits wide."""
    found: dict[str, None] = {}
    for line in lines:
        for name in _REGISTER.findall(line):
            if name in made and re.fullmatch(r"%rd?\d+", name):
                found.setdefault(name)
        if len(found) >= MOST:
            break
    return list(found)[:MOST]


def _hoistable_prefix(names: Sequence[str]) -> list[str]:
    """Instructions that read registers, and that ptxas neither drops nor moves behind a wait."""
    if not names:
        return []
    lines = [".reg .b64 %wait_d1;", ".reg .b32 %wait_r1;", ".reg .pred %wait_p1;", "mov.b64 \t%wait_d1, 0;"]
    lines += [f"or.b64 \t%wait_d1, %wait_d1, {name};" for name in names if name.startswith("%rd")]
    lines += ["cvt.u32.u64 \t%wait_r1, %wait_d1;"]
    lines += [f"or.b32 \t%wait_r1, %wait_r1, {name};" for name in names if not name.startswith("%rd")]
    lines += ["setp.eq.s32 \t%wait_p1, %wait_r1, 0;", "@%wait_p1 nanosleep.u32 0;"]
    return [f"\t{line}" for line in lines]
