"""Code of the chosen kernels for the HTML report: kernel program, numba source, assembly or PTX."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jcuts.base.errors import JcutsError
from jcuts.kernel_ir.printer import program_text
from jcuts.xla import kernel_cache

MOST_CHARACTERS = 60_000
"""Of one listing; what is longer is cut, and says so."""


def listings(program: Any) -> list[tuple[str, str]]:
    """Titles and texts of a scheduled kernel program; what cannot be made here says why."""
    on_gpu = kernel_cache.is_for_gpu(program)
    makers: list[tuple[str, Callable[[], str]]] = [
        ("kernel program", functools.partial(program_text, program)),
        ("source", functools.partial(kernel_cache.source_text, program)),
        ("PTX" if on_gpu else "assembly", functools.partial(_ptx if on_gpu else _assembly, program)),
    ]
    return [(title, _text(make)) for title, make in makers]


def _text(make: Callable[[], str]) -> str:
    try:
        text = make()
    except (JcutsError, ImportError, OSError) as error:
        return f"not available: {error}"
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]}\n... {len(text) - MOST_CHARACTERS} characters more"


def _assembly(program: Any) -> str:
    from jcuts.codegen.cpu.compile import assembly_of

    return assembly_of(program)


def _ptx(program: Any) -> str:
    from jcuts.codegen.cuda.compile import ptx_of
    from jcuts.xla import devices

    return ptx_of(program, devices.target())
