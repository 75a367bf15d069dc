"""Versions of kernel families: what a stored choice of a kernel depends on, by content.

The version of a family is a hash of the code that makes and compiles its schedules: its own packages, every module of
jcuts that these import, directly or not, the dispatch over all families, and the fitted coefficients and hardware
numbers that all these read.  Comments, docstrings, provenance of coefficients, and the families that only the dispatch
imports are no part of it: those have versions of their own.

Modules outside the families' packages (`kernel_ir`, `lower`, ``codegen/cuda/ptx``, ...) count for each family that
reaches them.  What they import from a family's package is not followed: it would tie all families together by the
dispatch.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jcuts.base import knobs
from jcuts.base.fingerprint import digest
from jcuts.base.module_code import ModuleFiles

GPU_FAMILIES = (
    "attention",
    "b2b_gemm",
    "conv",
    "elementwise",
    "gemm",
    "gemv",
    "inverted_residual",
    "recurrence",
    "reduction",
    "scan",
    "skinny_gemm",
    "warp_specialized",
    "window",
)
"""Kernel families of GPUs: packages of these names in ``schedule/gpu`` and ``codegen/cuda``."""
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "cpu": ("jcuts.schedule.cpu", "jcuts.codegen.cpu", "jcuts.codegen.llvm", "jcuts.codegen.vecmath"),
    **{name: (f"jcuts.schedule.gpu.{name}", f"jcuts.codegen.cuda.{name}") for name in GPU_FAMILIES},
}
"""Family -> its packages, as far as there are; all kernels of CPUs are one family."""
GPU_DISPATCH = ("jcuts.schedule.gpu.candidates", "jcuts.codegen.cuda.compile")
"""Modules that every GPU family's schedules go through."""

_CONTRACTION = ("gemm", "gemv", "skinny_gemm", "conv", "warp_specialized", "reduction", "window")
ASKED: Mapping[str, tuple[str, ...]] = {
    "attention": ("attention",),
    "attention_backward": ("attention",),
    "block": ("inverted_residual",),
    "column_sums": ("gemm", "conv", "reduction"),
    "contraction": _CONTRACTION,
    "convolution": _CONTRACTION,
    "layer_fusion": ("b2b_gemm",),
    "map": ("elementwise",),
    "recurrence": ("recurrence", "reduction", "elementwise"),
    "reduction": ("reduction",),
    "row_column_sums": ("reduction",),
    "rows": ("reduction",),
    "scan": ("reduction", "scan"),
    "window": ("window", "reduction"),
}
"""Template of an unscheduled program -> the GPU families that are asked for its schedules; of another template all."""

PARTITION = ("jcuts.fusion", "jcuts.lower", "jcuts.ops", "jcuts.kernel_ir", "jcuts.pipeline")
"""Packages that decide, with the kernels' times, which equations become one kernel."""
PROGRAM = (
    *(*PARTITION, "jcuts.trace", "jcuts.rewrite", "jcuts.arch", "jcuts.microbatch"),
    *("jcuts.primitive", "jcuts.xla", "jcuts.jit"),
)
"""Packages that make the whole programs which are compared at the end, and compare them."""
_PROSE = frozenset({"source", "samples", "error", "date", "meaning", "unit"})
"""Keys of data files that no number depends on."""


class ScheduleVersions:
    """Versions of one source tree. Args: files: its modules."""

    def __init__(self, files: ModuleFiles) -> None:
        self.files = files
        self._versions: dict[tuple[str, ...], str] = {}
        self._targets: dict[str, set[str]] = {}
        self._data: dict[Path, dict[str, Any]] = {}

    def family(self, name: str) -> str:
        """The version of a family. Raises KeyError for a name that is none."""
        mine = FAMILIES[name]
        others = [package for family in FAMILIES if family != "cpu" for package in FAMILIES[family]]
        return self._version((name, *mine), (*mine, *(() if name == "cpu" else GPU_DISPATCH)), others)

    def packages(self, packages: Iterable[str]) -> str:
        """The version of packages, without what they import."""
        names = tuple(packages)
        return self._version(("packages", *names), names, None)

    def emitter(self, platform: str) -> str:
        """The version of all that turns a kernel program into object code for 'cpu' or 'cuda'."""
        return self._version(("emitter", platform), (f"jcuts.codegen.{platform}",), ())

    def reached(self, roots: Iterable[str], families: Iterable[str] | None) -> dict[str, Path]:
        """Modules that the roots reach by imports, with their files.

        Args: families: packages into which only modules of such packages lead; None follows no import at all.
        """
        kept = None if families is None else tuple(families)
        todo = [module for root in roots for module in self.files.inside(root)]
        found: dict[str, Path] = {}
        while todo:
            module = todo.pop()
            file = self.files.file(module)
            if module in found or file is None or module == "jcuts" or _is_in(module, ("jcuts.base",)):
                continue
            found[module] = file
            if kept is None:
                continue
            inner = _is_in(module, kept)
            todo += [target for target in self._imports(module, file) if inner or not _is_in(target, kept)]
        return found

    def _imports(self, module: str, file: Path) -> set[str]:
        """Modules that a module imports, and the packages that they lie in."""
        if module in self._targets:
            return self._targets[module]
        found = set()
        for name, names in self.files.code(file).imports:
            if name.split(".")[0] == "jcuts":
                found |= {name, *(f"{name}.{inner}" for inner in names)}
        found |= {name.rpartition(".")[0] for name in found if name.count(".") > 1}
        self._targets[module] = {name for name in found if self.files.file(name) is not None}
        return self._targets[module]

    def _version(self, name: tuple[str, ...], roots: Iterable[str], families: Iterable[str] | None) -> str:
        if name not in self._versions:
            reached = self.reached(roots, families)
            code = {module: self.files.code(file) for module, file in sorted(reached.items())}
            tables = sorted({table for module in code.values() for table in module.tables})
            arch = self.files.root / "arch"
            hardware = sorted(arch.rglob("*.toml")) if any(file.parent == arch for file in reached.values()) else []
            self._versions[name] = digest(
                name,
                [(module, known.code) for module, known in code.items()],
                [(*table, self._table(*table)) for table in tables],
                [(file.name, _numbers(self._toml(file))) for file in hardware],
            )[:16]
            self.files.keep()
        return self._versions[name]

    def _table(self, family: str, table: str) -> Any:
        """Numbers of a table of fitted coefficients, and of those that it inherits from; of all of them for ''."""
        found = [(f.name, self._toml(f)) for f in sorted((self.files.root / "schedule" / family).glob("fit_*.toml"))]
        if not table:
            return [(name, _numbers(data)) for name, data in found]
        lines = []
        for name, data in found:
            wanted = table
            while isinstance(entry := data.get(wanted), dict):
                lines.append((name, wanted, _numbers(entry)))
                wanted = str(entry.get("inherits", ""))
        return lines

    def _toml(self, file: Path) -> dict[str, Any]:
        if file not in self._data:
            self._data[file] = tomllib.loads(file.read_text(encoding="utf-8"))
        return self._data[file]


def _is_in(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def _numbers(value: Any) -> Any:
    """TOML data without prose."""
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items() if key not in _PROSE}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    return value if isinstance(value, (bool, int, float, str)) else str(value)


@functools.cache
def here() -> ScheduleVersions:
    """Versions of the jcuts that runs."""
    root = Path(__file__).resolve().parent.parent
    return ScheduleVersions(ModuleFiles(root, knobs.current().cache_dir / "module_code.json"))
