"""A kernel is compiled once where a test wants its machine code, for what a launch needs, and its PTX, to run it."""

from __future__ import annotations

import sys
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _compile_once(monkeypatch):
    """The PTX that `compile_program` assembled is what the next `ptx_of` of the program gives, in the same test.

    Only the next one: whoever compiles twice gets two results.
    """
    compiler = sys.modules.get("jcuts.codegen.cuda.compile")
    if compiler is None:
        return
    compile_ptx = compiler._ptx
    assembled: dict[Any, tuple[str, str]] = {}

    def ptx(program: Any, source: Any, target: Any, symbol: str) -> str:
        key = (program.digest, source.text, target)
        text, name = assembled.pop(key, ("", ""))
        if text and not symbol.startswith("jcuts_"):
            return text.replace(name, symbol)
        text = compile_ptx(program, source, target, symbol)
        if symbol.startswith("jcuts_"):
            assembled[key] = text, symbol
        return text

    monkeypatch.setattr(compiler, "_ptx", ptx)
