"""Writes docs/where_to_add.md: "where do I add or change ...", and the tree with the first line of every docstring.

    python scripts/where_to_add.py [--check]

Every path of a row must exist.  ``--check`` writes nothing and fails where the page is not what would be written.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "where_to_add.md"
PACKAGE = "jcuts"

ROWS: list[tuple[str, str, tuple[str, ...]]] = [
    (
        "a JAX primitive",
        "one rule, equation -> `Op` or refusal, in the file of its family (docs/add_op.md)",
        ("jcuts/ops/registry.py", "jcuts/ops/elementwise.py", "docs/add_op.md"),
    ),
    (
        "a rewrite of the program that may change roundings",
        "a file, an entry in `RULES`; then which variants use it",
        ("jcuts/rewrite/registry.py", "jcuts/jit/variant_space.py"),
    ),
    ("a rewrite that changes no value", "a function in the list of `simplify`", ("jcuts/rewrite/simplify.py",)),
    ("a compiler pass", "the list of stages on one closed jaxpr", ("jcuts/pipeline/passes.py",)),
    (
        "how equations are grouped into kernels",
        "greedy grouping; candidate regions and exact cover",
        ("jcuts/fusion/greedy.py", "jcuts/fusion/partition_space.py", "jcuts/fusion/exact_cover.py"),
    ),
    (
        "how a region becomes a kernel program",
        "the builder; row reductions and scans have files of their own",
        ("jcuts/lower/builder.py", "jcuts/lower/reduction/row_reduction.py", "jcuts/lower/scan.py"),
    ),
    (
        "a canonical form that kernels recognise",
        "a recogniser: program -> operands, or why not",
        ("jcuts/lower/patterns",),
    ),
    (
        "a CPU schedule",
        "enumeration, loop candidates, cycle model",
        (
            "jcuts/schedule/cpu/candidates.py",
            "jcuts/schedule/cpu/loop_candidates.py",
            "jcuts/schedule/cpu/cycle_model.py",
            "jcuts/estimate/cpu_kernel.py",
        ),
    ),
    (
        "a GPU kernel family",
        "an entry in each half of the registry: schedules; kernel, launch and split. Then a rule that asks for it",
        (
            "jcuts/schedule/gpu/families.py",
            "jcuts/schedule/gpu/enumeration.py",
            "jcuts/codegen/cuda/families.py",
            "jcuts/codegen/cuda/tile_kernel.py",
            "jcuts/base/schedule_versions.py",
            "docs/add_kernel_family.md",
        ),
    ),
    (
        "a GPU schedule for row reductions (softmax, norms)",
        "`row_reduction`, `row_reduction_teams`, `online_softmax`; the kernels",
        ("jcuts/schedule/gpu/reduction", "jcuts/codegen/cuda/reduction/row.py"),
    ),
    (
        "a GPU schedule for column reductions",
        "`columns`, `column_softmax`, `welford`; the kernels",
        ("jcuts/schedule/gpu/reduction/column.py", "jcuts/codegen/cuda/reduction"),
    ),
    (
        "a GPU schedule for GEMM",
        "tiles and cycle model of `mma.sync`, of `wgmma`",
        ("jcuts/schedule/gpu/gemm/mma.py", "jcuts/schedule/gpu/gemm/wgmma.py", "jcuts/schedule/gpu/gemm/cost.py"),
    ),
    (
        "a GPU schedule for convolutions",
        "implicit GEMM with halo reuse; few input channels",
        ("jcuts/schedule/gpu/conv", "jcuts/codegen/cuda/conv"),
    ),
    (
        "what a GEMM epilogue can do",
        "the exit graph on accumulators; staging through shared memory",
        (
            "jcuts/codegen/cuda/gemm/epilogue.py",
            "jcuts/codegen/cuda/gemm/epilogue_bulk_copy.py",
            "jcuts/schedule/gpu/gemm/epilogue_smem.py",
        ),
    ),
    ("a PTX instruction", "a function on the LLVM builder", ("jcuts/codegen/cuda/ptx",)),
    (
        "horizontal fusion (several small kernels in one launch)",
        "the program, and its kernel",
        ("jcuts/lower/horizontal.py", "jcuts/codegen/cuda/elementwise/horizontal.py", "jcuts/pipeline/weight_prep.py"),
    ),
    (
        "a transcendental function",
        "CPU and GPU polynomials with error bounds; SFU approximations",
        ("jcuts/codegen/vecmath", "jcuts/codegen/cuda/ptx/sfu_math.py", "docs/vecmath.md"),
    ),
    (
        "an architecture (CPU or GPU)",
        "a TOML file; compute capabilities that code is generated for",
        (
            "jcuts/arch/data",
            "jcuts/arch/sm_limits.toml",
            "jcuts/arch/cpu_cores.toml",
            "jcuts/codegen/cuda/toolchain/target.py",
            "jcuts/schedule/gpu/machine.py",
            "docs/add_architecture.md",
        ),
    ),
    (
        "a number that `jcuts arch measure` takes",
        "a loop or a kernel; what it becomes in the file",
        (
            "jcuts/tune/hardware/cpu_loops.py",
            "jcuts/tune/hardware/cpu_machine.py",
            "jcuts/tune/hardware/gpu_kernels.py",
            "jcuts/tune/hardware/gpu_machine.py",
        ),
    ),
    (
        "the acceptance tolerance of kernels",
        "the rule; bounds for floats",
        ("jcuts/tune/verify/acceptance.py", "jcuts/tune/verify/float_rules.py"),
    ),
    (
        "the accuracy check of whole rewritten programs",
        "against a float64 run of the function",
        ("jcuts/jit/accuracy/float64_check.py",),
    ),
    (
        "how a candidate is timed",
        "CPU and GPU timing; noise and interleaving",
        (
            "jcuts/tune/measure/cpu_timing.py",
            "jcuts/tune/measure/gpu_timing.py",
            "jcuts/tune/measure/statistics.py",
        ),
    ),
    (
        "which candidate wins",
        "per region; whole programs",
        ("jcuts/tune/select.py", "jcuts/jit/end_to_end_benchmark.py"),
    ),
    (
        "a request to the measuring process",
        "handlers in the worker; the queue in the parent",
        ("jcuts/tune/worker/requests.py", "jcuts/tune/parent/tuning_queue.py"),
    ),
    (
        "a cache or database key",
        "one function each, which says what enters the key; the canonical jaxpr as text",
        ("jcuts/base/keys.py", "jcuts/trace/canonical.py"),
    ),
    (
        "what a server's calls wait for, or how batches are padded",
        "the first call of a signature; what follows behind it; sizes, padding, cutting; which program a call finds",
        (
            "jcuts/jit/serving/serve_tuning.py",
            "jcuts/jit/serving/batch_buckets.py",
            "jcuts/jit/dispatch/signature_table.py",
            "docs/serving.md",
        ),
    ),
    (
        "what a team checks in",
        "files of rows; when they are followed; what is missing; what is pinned",
        (
            "jcuts/tune/portable/row_files.py",
            "jcuts/tune/portable/file_store.py",
            "jcuts/jit/checked_in/completeness.py",
            "jcuts/jit/checked_in/pinning.py",
            "jcuts/cli/artifacts/tune.py",
        ),
    ),
    (
        "what a stored choice depends on",
        "packages and templates of the kernel families; when rows of other versions count",
        ("jcuts/base/schedule_versions.py", "jcuts/tune/database.py", "docs/tuning.md"),
    ),
    (
        "a custom call (launcher)",
        "FFI handlers in C++, their registration",
        ("custom_calls", "jcuts/xla/cpu_launcher.py", "jcuts/xla/cuda_launcher.py"),
    ),
    (
        "what an artefact holds, or when it is refused",
        "the manifest's schema (a change is a new `FORMAT`); what is compared with the machine; what is saved",
        ("jcuts/artifact/manifest.py", "jcuts/artifact/device.py", "jcuts/jit/export/saving.py", "docs/artifacts.md"),
    ),
    ("a planner collective", "its cost", ("jcuts/plan/cost/collectives.py",)),
    (
        "a planner layer or model",
        "layers, models, clusters",
        ("jcuts/plan/spec/layers.py", "jcuts/plan/spec/model.py", "jcuts/plan/spec/cluster.py"),
    ),
    (
        "a convolution algorithm under a workspace limit",
        "divisions; the pass that uses them",
        ("jcuts/microbatch", "jcuts/pipeline/microbatch_convs.py"),
    ),
    ("a setting of `jcuts.optimize`", "public keywords; the frozen record", ("jcuts/api.py", "jcuts/base/settings.py")),
    ("an environment variable", "all `JCUTS_*` in one typed file", ("jcuts/base/knobs.py",)),
    (
        "what `explain` shows",
        "report data; rich tables; the page",
        ("jcuts/report/report_data.py", "jcuts/report/rich_tables.py", "jcuts/report/html/page.py"),
    ),
    (
        "a way in which `jcuts verify` runs a function, an XLA option that it suspects",
        "one entry of `WAYS`; an entry of the data file",
        ("jcuts/differential/ways.py", "jcuts/differential/data"),
    ),
    ("a CLI command", "a module, and its name in `COMMANDS`", ("jcuts/cli/main.py",)),
    ("an error", "one tree below `JcutsError`", ("jcuts/base/errors.py",)),
    ("behaviour under a JAX transformation", "rules of `jcuts_call_p`", ("jcuts/primitive",)),
]
"""(what, how, paths from the repository's root)."""


def first_line(file: Path) -> str:
    """The first sentence of a module's docstring, or its first line where the sentence is longer."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    line = " ".join(text.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.:])\s{1,2}(?=[A-Z`])", line)[0]
    return (sentence if sentence.endswith(".") else line).replace("|", "\\|")


def missing() -> list[str]:
    """Paths of `ROWS` that do not exist."""
    return [path for _, _, paths in ROWS for path in paths if not (ROOT / path).exists()]


def undocumented() -> list[str]:
    """Modules and packages without a docstring."""
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    return [str(f.relative_to(ROOT)) for f in files if not first_line(f)]


def page() -> str:
    """The text of docs/where_to_add.md."""
    lines = [
        "# Where do I add or change ...",
        "",
        "Written by `python scripts/where_to_add.py`; a test checks that it is up to date and that every path exists.",
        "",
        "| what | how | where |",
        "|---|---|---|",
    ]
    for what, how, paths in ROWS:
        lines.append(f"| {what} | {how} | {', '.join(f'`{p}`' for p in paths)} |")
    lines += ["", "# The tree", "", "First lines of the docstrings, by folder."]
    for init in sorted((ROOT / PACKAGE).rglob("__init__.py")):
        folder = init.parent
        lines += ["", f"## `{folder.relative_to(ROOT)}/`", "", first_line(init), ""]
        modules = sorted(f for f in folder.glob("*.py") if f.name != "__init__.py")
        if modules:
            lines += ["| file | what it is |", "|---|---|"]
            lines += [f"| `{f.name}` | {first_line(f)} |" for f in modules]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Exit status 1: a path is missing, a module has no docstring, or (``--check``) the page is out of date."""
    parser = argparse.ArgumentParser(description="Writes docs/where_to_add.md from the tree.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page is out of date")
    check = parser.parse_args(argv).check
    faults = [f"no such path: {path}" for path in missing()] + [f"no docstring: {path}" for path in undocumented()]
    text = page()
    if check:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            faults.append(f"docs/{PAGE.name} is out of date: run python scripts/where_to_add.py")
    else:
        PAGE.write_text(text, encoding="utf-8")
    print("\n".join(faults) or f"{len(ROWS)} rows", file=sys.stderr if faults else sys.stdout)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
