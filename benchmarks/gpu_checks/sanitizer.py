"""Every kernel template under compute-sanitizer, between red zones, and 1,000 times for equal bits.

    python benchmarks/gpu_checks/sanitizer.py --out results                 # with a GPU
    python benchmarks/gpu_checks/sanitizer.py --out results --compile-only  # without: compiles what would be run

Kernels of every case of ``tests/gpu/cases.py`` are compiled in parallel.  Then, in processes that use the driver alone:

    memcheck, racecheck, synccheck, initcheck   every kernel under ``compute-sanitizer``, on buffers of exactly
                                                their sizes; left out where there is no compute-sanitizer
    fenced                                      every kernel on fenced, poisoned memory, twice with different poison
    repeat                                      every kernel 1,000 times on poisoned results: equal bits

``OUT/gpu_sanitize.json`` has the counts; ``OUT/sanitize_*.log`` what the tools printed.  A deliberately wrong kernel
runs under each tool first: a tool that does not find it is not believed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
REPEATS = 1000
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
LIMIT_S = 240.0
CONTROLS = {
    "memcheck": "  st.global.u32 [%rd1+4096], %r1;",
    "racecheck": "  xor.b32 %r2, %r1, 32;\n  cvt.u64.u32 %rd2, %r1;\n  shl.b64 %rd2, %rd2, 2;\n  mov.u64 %rd3, cells;\n"
    "  add.s64 %rd2, %rd2, %rd3;\n  st.shared.u32 [%rd2], %r1;\n  cvt.u64.u32 %rd2, %r2;\n  shl.b64 %rd2, %rd2, 2;\n"
    "  add.s64 %rd2, %rd2, %rd3;\n  ld.shared.u32 %r3, [%rd2];\n  st.global.u32 [%rd1], %r3;",
    "synccheck": "  setp.lt.u32 %p1, %r1, 40;\n  @!%p1 bra DONE;\n  bar.sync 0;\nDONE:",
    "initcheck": "  ld.global.u32 %r3, [%rd1+64];\n  add.u32 %r3, %r3, %r1;\n  st.global.u32 [%rd1], %r3;",
}
"""Wrong code for each tool to find: a write past the end, a race, a barrier that threads miss, a read of nothing."""
_CONTROL = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry control(.param .u64 out)
{{
  .reg .b32 %r<6>; .reg .b64 %rd<6>; .reg .pred %p<2>;
  .shared .align 4 .b8 cells[256];
  ld.param.u64 %rd1, [out];
  mov.u32 %r1, %tid.x;
{body}
  ret;
}}
"""


# -- what is run ------------------------------------------------------------------------------------------------------
def every_case() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Name, function and arguments of every template case."""
    from tests.gpu import cases

    for name, (fn, arguments) in cases.CASES.items():
        yield name, fn, arguments
    for dtype in cases.DTYPES:
        for name, (fn, arguments) in cases.typed(dtype).items():
            yield f"{dtype} {name}", fn, arguments
    for dtype in cases.MATRIX_TYPES:
        for name, (fn, arguments) in cases.products(dtype).items():
            yield f"{dtype} {name}", fn, arguments


def recognised() -> Iterator[tuple[str, Any, list[Any]]]:
    """Name, program and operands of templates whose programs are found in more than one subset, or by their weights."""
    import numpy as np

    from jcuts.lower.weight_transpose import transpose_program
    from tests import programs
    from tests.codegen.cuda.b2b_gemm import test_kernel as mlps
    from tests.codegen.cuda.inverted_residual.test_bfloat16 import BLOCKS as HALVES
    from tests.codegen.cuda.inverted_residual.test_kernel import BLOCKS, program_of, traced_number
    from tests.gpu.cases import attention
    from tests.gpu.test_products import NORMS, ROUNDED, behind_a_norm, norm_of_bfloat16
    from tests.ptx.tensor_core import round_tf32

    rng = np.random.default_rng(3)
    for dtype in ("float32", "bfloat16"):
        sizes = ((2, 37, 3, 40), (2, 53, 3, 40), (2, 53, 3, 40))
        arrays = [rng.standard_normal(s).astype(np.float32).astype(_numpy(dtype)) for s in sizes]
        traced = programs.trace(attention(), *arrays)
        members, program = traced.attention()
        yield f"{dtype} attention", program, traced.operands(members)
    blocks = {f"block {name}": layers for name, layers in BLOCKS.items()}
    blocks.update((f"bfloat16 block {name}", layers) for name, layers in HALVES.items())
    for name, layers in blocks.items():
        program, traced = program_of(layers, layers.arguments())
        numbers = [traced_number(traced, t) for t in traced.graph.subset_inputs(traced.everything)]
        yield name, program, [traced.arguments[n] for n in numbers]
    pairs = {f"MLP {name}": layers for name, layers in mlps.CASES.items()}
    pairs.update((f"bfloat16 MLP {name}", layers) for name, layers in mlps.HALVES.items())
    for name, layers in pairs.items():
        program, traced = mlps.program_of(layers, layers.arguments())
        yield name, program, mlps.operands_of(traced)
    for name, (fn, shapes) in ROUNDED.items():
        arrays = [rng.standard_normal(s).astype(np.float32) for s in shapes]
        arrays[1] = round_tf32(arrays[1])
        traced = programs.trace(fn, *arrays)
        yield f"rounded {name}", traced.rounded(), traced.operands()
    for size in NORMS:
        traced = programs.trace(behind_a_norm, *norm_of_bfloat16(*size))
        yield f"bfloat16 norm of {size[0]} rows", traced.product(), traced.operands()
    sizes = [(3, 3, 5, 17), (64, 64), (1, 1, 130, 24), (4, 1), (2, 3, 65)]
    arrays = [rng.standard_normal(s).astype(np.float32) for s in sizes]
    yield "weights turned", transpose_program([(s, (s[-1], *s[:-1])) for s in sizes]), arrays


@functools.cache
def _listed(only: str) -> tuple[list[tuple[str, Any, list[Any]]], dict[str, str]]:
    """Name, program and operands of the cases that are asked for, and why others have none: the same on every GPU."""
    import jax

    from jcuts.kernel_ir.program import Program
    from tests import programs

    listed, skipped = [], {}
    with jax.enable_x64(True):
        for name, fn, arguments in every_case():
            if not _named(name, only):
                continue
            traced = programs.trace(fn, *arguments)
            built = traced.build()
            if isinstance(built, Program):
                listed.append((name, built, traced.operands()))
            else:
                skipped[name] = str(built)
        listed += [entry for entry in recognised() if _named(entry[0], only)]
    return listed, skipped


def prepare(folder: Path, each: int, jobs: int, capability: tuple[int, int], only: str) -> dict[str, Any]:
    """Compiles schedules of every case and writes their operands; gives the list that `launch` reads."""
    import jax
    import numpy as np

    from benchmarks.gpu_kernels.parallel_compile import compile_all
    from jcuts.kernel_ir.program import Program
    from jcuts.schedule.gpu import candidates as gpu_candidates
    from jcuts.tune.verify.inputs import save

    found: list[tuple[str, Program, list[np.ndarray]]] = []
    listed_programs, unbuilt = _listed(only)
    skipped = dict(unbuilt)
    with jax.enable_x64(True):
        for name, built, operands in listed_programs:
            ranked = (
                [built]
                if "cuda" in dict(built.params)
                else [
                    p
                    for p, _ in gpu_candidates.candidates(
                        built, gpu_candidates.GpuMachine(132, capability=capability), 1 << 20
                    )
                ]
            )
            if not ranked:
                skipped[name] = "no kernel form"
                continue
            # The best, the best of every kind, and others from all over the list: other vectors, teams and splits.
            kinds: dict[frozenset[str], int] = {}
            for k, made in enumerate(ranked):
                kinds.setdefault(frozenset(parameter for parameter, _ in made.params), k)
            spread = (round(k * (len(ranked) - 1) / max(1, each - 1)) for k in range(each))
            places = dict.fromkeys([0, *kinds.values(), *spread])
            found += [(name, ranked[k], [np.asarray(x) for x in operands]) for k in places]
    start = time.perf_counter()
    kernels = compile_all([p for _, p, _ in found], folder / "kernels", capability, jobs)
    entries, refused = [], []
    for number, (name, program, operands) in enumerate(found):
        made = kernels[program.digest]
        if made.path is None:
            refused.append({"case": name, "reason": made.reason[:300], "stack": made.stack})
            continue
        for k, value in enumerate(operands):
            save(folder / f"{number}.in{k}.npy", value)
        types = [[list(x.shape), x.dtype.name] for x in operands]
        entries.append(
            {
                "case": name,
                "kernel": str(made.path),
                "operands": types,
                "number": number,
                "template": program.template,
                "params": dict(program.params),
            }
        )
    listed = {"entries": entries}
    (folder / "list.json").write_text(json.dumps(listed))
    return {
        "cases": len({e["case"] for e in entries}),
        "kernels": len(entries),
        "templates": sorted({f"{e['template']}/{e['params']['cuda']}" for e in entries}),
        "refused": refused,
        "skipped": skipped,
        "compile_seconds": round(time.perf_counter() - start, 1),
    }


def _named(name: str, parts: str) -> bool:
    return any(part in name for part in parts.split(","))


# -- processes that launch --------------------------------------------------------------------------------------------
def launch(folder: Path, how: str, repeats: int) -> int:
    """Runs every kernel of the list; ``how``: 'exact' (for the sanitizer), 'fenced' or 'repeat'."""
    from jcuts.tune.kernel_file import read_kernel
    from jcuts.tune.measure import cuda_driver, gpu_launch
    from jcuts.tune.verify.inputs import load

    device = cuda_driver.device()
    failures, ran = [], 0
    for entry in json.loads((folder / "list.json").read_text())["entries"]:
        types = entry["operands"]
        inputs = [
            load(folder / f"{entry['number']}.in{k}.npy", tuple(shape), dtype) for k, (shape, dtype) in enumerate(types)
        ]
        launcher = gpu_launch.GpuLauncher(read_kernel(Path(entry["kernel"])), device)
        print(f"kernel {entry['case']} {entry['params']}", flush=True)
        try:
            if how == "exact":
                _exact(launcher, inputs, [0x00], 1)
            elif how == "repeat":
                if len(set(_exact(launcher, inputs, [0xAB, 0xFF, 0x00], repeats))) > 1:
                    failures.append([entry["case"], "results differ from run to run"])
            else:
                one, other = (launcher.run(inputs, poison) for poison in (0xAB, 0xFF))
                if any(a.tobytes() != b.tobytes() for a, b in zip(one, other, strict=True)):
                    failures.append([entry["case"], "a result depends on what was in memory before"])
        except Exception as error:  # every kind is a finding here
            failures.append([entry["case"], f"{type(error).__name__}: {error}"[:300]])
        ran += 1
    print(json.dumps({"ran": ran, "failures": failures}), flush=True)
    return int(bool(failures))


def _exact(launcher: Any, inputs: Sequence[Any], poisons: Sequence[int], repeats: int) -> list[bytes]:
    """Runs a kernel on buffers of exactly their sizes; all results of every run as bytes.

    With one repeat nothing is written into results and scratch memory before: initcheck finds what reads them.
    """
    import numpy as np

    kernel, device = launcher.kernel, launcher.device
    sizes = [int(np.prod(shape, dtype=np.int64)) * np.dtype(_numpy(dtype)).itemsize for shape, dtype in kernel.outputs]
    operands = [device.allocate(x.nbytes) for x in inputs]
    results = [device.allocate(size) for size in sizes]
    scratch = device.allocate(max(1, kernel.scratch_bytes))
    found = []
    try:
        for address, value in zip(operands, inputs, strict=True):
            device.upload(address, value)
        for number in range(repeats):
            if repeats > 1:
                poison = poisons[number % len(poisons)]
                for address, size in [*zip(results, sizes, strict=True), (scratch, kernel.scratch_bytes)]:
                    device.fill(address, poison, size)
            launcher.launch([*operands, *results], scratch)
            device.synchronize()
            pieces = (device.download(a, s).tobytes() for a, s in zip(results, sizes, strict=True))
            found.append(b"".join(pieces))
    finally:
        for address in (*operands, *results, scratch):
            device.release(address)
    return found


def _numpy(dtype: str) -> Any:
    from jcuts.tune.verify.inputs import dtype_of

    return dtype_of(dtype)


def control(tool: str) -> int:
    """Launches the wrong kernel that a tool must find."""
    from jcuts.codegen.artifact import CompiledKernel
    from jcuts.codegen.cuda.toolchain import ptxas
    from jcuts.codegen.cuda.toolchain.image import SYMBOL, Image, Launch
    from jcuts.tune.measure import cuda_driver, gpu_launch

    device = cuda_driver.device()
    major, minor = device.attribute(75), device.attribute(76)
    cubin = ptxas.assemble(_CONTROL.format(body=CONTROLS[tool]), f"sm_{major}{minor}")
    image = Image(f"sm_{major}{minor}", "control", (Launch("control", (1, 1, 1), (64, 1, 1), ((0, 0),)),), cubin)
    kernel = CompiledKernel(f"control {tool}", SYMBOL, image.pack(), 1, 0, (), (((32,), "uint32"),))
    _exact(gpu_launch.GpuLauncher(kernel, device), [], [0], 1)
    return 0


# -- the parent -------------------------------------------------------------------------------------------------------
def sanitizer() -> str:
    """Path of compute-sanitizer, or ''."""
    places = [
        shutil.which("compute-sanitizer"),
        "/usr/local/cuda/bin/compute-sanitizer",
        "/usr/local/cuda/compute-sanitizer/compute-sanitizer",
    ]
    return next((p for p in places if p and os.access(p, os.X_OK)), "")


def under(tool: str, more: Sequence[str], log: Path, limit: float) -> dict[str, Any]:
    """One process of this script under a tool (or alone, for tool ''): counts and how it ended."""
    command = [sys.executable, str(Path(__file__).resolve()), *more]
    if tool:
        command = [sanitizer(), "--tool", tool, "--print-limit", "50", *command]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return {"status": "timeout", "seconds": limit}
    log.write_text(done.stdout + done.stderr)
    row: dict[str, Any] = {"status": done.returncode, "seconds": round(time.perf_counter() - start, 1)}
    if tool:
        errors = [int(n) for n in SUMMARY.findall(done.stdout + done.stderr)]
        row["errors"] = sum(errors) if errors else None
    for line in reversed(done.stdout.splitlines()):
        if line.startswith('{"ran"'):
            row.update(json.loads(line))
            break
    if "ran" not in row:
        row["tail"] = (done.stdout + done.stderr)[-600:]
    return row


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_results"))
    parser.add_argument("--each", type=int, default=3, help="schedules of every case")
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--only", default="", help="cases whose names contain one of these (with commas)")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--capability", default="9.0", help="of the GPU, where --compile-only cannot ask it")
    parser.add_argument("--launch", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--how", default="exact", help=argparse.SUPPRESS)
    parser.add_argument("--control", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.control:
        return control(options.control)
    if options.launch:
        return launch(options.launch, options.how, options.repeats)
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("JCUTS_CACHE_DIR", str((options.out / "cache").resolve()))
    os.environ["JAX_PLATFORMS"] = "cpu"  # the parent only traces; the GPU is for the processes that launch
    folder = (options.out / "sanitize").resolve()
    folder.mkdir(exist_ok=True)
    if options.compile_only:
        major, minor = (int(x) for x in options.capability.split("."))
    else:
        from jcuts.tune.measure import cuda_driver

        device = cuda_driver.device()
        major, minor = device.attribute(75), device.attribute(76)
    result: dict[str, Any] = prepare(folder, options.each, options.jobs, (major, minor), options.only)
    print(json.dumps(result, indent=1), flush=True)
    if not options.compile_only:
        checks(result, folder, options)
    (options.out / "gpu_sanitize.json").write_text(json.dumps(result, indent=1) + "\n")
    return int(not result.get("clean", options.compile_only))


def checks(result: dict[str, Any], folder: Path, options: argparse.Namespace) -> None:
    """Everything that needs the GPU; ``result["clean"]`` says whether nothing was found."""
    here = ["--launch", str(folder), "--repeats", str(options.repeats)]
    rows: dict[str, Any] = {}
    for how in ("fenced", "repeat"):
        rows[how] = under("", [*here, "--how", how], options.out / f"sanitize_{how}.log", LIMIT_S)
        print(how, json.dumps(rows[how]), flush=True)
    believed = []
    for tool in options.tools.split(",") if sanitizer() else []:
        planted = under(tool, ["--control", tool], options.out / f"sanitize_{tool}_control.log", 60.0)
        rows[tool] = {"planted_error_found": bool(planted.get("errors")), "planted": planted}
        if planted.get("errors"):
            believed.append(tool)
            rows[tool].update(under(tool, here, options.out / f"sanitize_{tool}.log", LIMIT_S))
        print(tool, json.dumps(rows[tool]), flush=True)
        (options.out / "gpu_sanitize.json").write_text(json.dumps({**result, "checks": rows}, indent=1) + "\n")
    result["checks"] = rows
    result["sanitizer"] = sanitizer() or "not found"
    own = all(rows[how].get("failures") == [] and rows[how].get("ran") for how in ("fenced", "repeat"))
    result["clean"] = own and all(rows[t].get("errors") == 0 and rows[t].get("ran") for t in believed)


if __name__ == "__main__":
    raise SystemExit(main())
