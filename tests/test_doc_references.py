"""Files and modules that docs and docstrings name exist."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("doc_references", ROOT / "scripts" / "doc_references.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_name_leads_somewhere(script: ModuleType) -> None:
    assert script.faults([script.PACKAGE]) == []


@pytest.mark.parametrize(
    "text", ["`jcuts.region.gpu`", "`codegen.cuda.product`", "`lower/patterns/nothing.py`", "`docs/none.md`"]
)
def test_a_name_that_leads_nowhere_is_found(script: ModuleType, text: str) -> None:
    assert list(script.unknown(text)) == [text.strip("`")]


@pytest.mark.parametrize(
    "text", ["`codegen/cuda/gemm/epilogue.py`", "`kernel_ir.program.Program`", "`jcuts.plan.cost`"]
)
def test_a_name_that_leads_somewhere_is_fine(script: ModuleType, text: str) -> None:
    assert list(script.unknown(text)) == []
