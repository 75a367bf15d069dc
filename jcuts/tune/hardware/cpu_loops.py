"""Microbenchmark loops of one CPU core in LLVM IR: FMA throughput and latency, ALU, load and store ports, the clock.

A loop repeats a body of instructions that no optimiser may remove or merge: dependent FMAs of opaque operands, volatile
loads and stores, and for the clock a chain of additions in inline assembly, each of which takes one cycle.  Rates are
instructions per cycle: the clock's loop runs beside every other, so that a clock that changes falls on both.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm

from jcuts.base.errors import ModelError

CHAINS = 12
"""Independent accumulators of the throughput loop: latency times ports of every known core, or more."""
ACCESSES = 32
"""Loads or stores of one iteration."""
EACH = {"fma": CHAINS, "latency": CHAINS, "alu": 2 * CHAINS, "load": ACCESSES, "store": ACCESSES}
"""Instructions of an iteration of every loop."""
LINK = 64
"""Additions of one iteration of the clock's loop."""
ROUNDS = 12
"""Runs of each loop; the fastest counts."""
LOOP_SECONDS = 4e-3
"""What one run takes, about."""
TICK = 1e-9
"""Resolution of the clock: no time is shorter."""
BLINK_SECONDS = 2e-4
"""What one run of the clock's loop takes, about, where the highest clock is looked for."""
PAGE_FLOATS = 2048
"""Of the buffer that loads and stores touch: it stays in the first-level cache."""
_ADD = {"x86_64": "addq $$1, $0", "aarch64": "add $0, $0, #1"}
"""One cycle in every core: an addition to a register that waits for the one before."""

Loop = Callable[[int], float]
"""Runs so many iterations; seconds."""


@dataclass(frozen=True)
class CoreRates:
    """What one core was seen to do, full-width vector instructions.

    Attributes:
        clock: [Hz]; fma, alu, load, store: per cycle; latency: cycles from one FMA to one that adds to it.
    """

    clock: float
    fma: float
    alu: float
    load: float
    store: float
    latency: float


def core_rates(machine: str, simd_bits: int) -> CoreRates:
    """Measures the core that this thread runs on.  Args: machine: ``"x86_64"`` or ``"aarch64"``.

    Raises: ModelError for another one.
    """
    if machine not in _ADD:
        raise ModelError(f"no loop counts cycles of {machine!r}: choose from {sorted(_ADD)}", machine=machine)
    lanes = simd_bits // 32
    clock = 0.0
    found = {}
    for name, each in EACH.items():
        loop, beat = _compiled(name, machine, lanes), _compiled("clock", machine, lanes)
        instructions = _fastest(loop, each)
        hertz = _fastest(beat, LINK)
        clock = max(clock, hertz)
        found[name] = instructions / hertz
    latency = 1.0 / found.pop("latency")
    return CoreRates(clock=clock, latency=latency, **found)


def highest_clock(machine: str, lanes: int, seconds: float) -> float:
    """The clock of the fastest of many short runs [Hz]: it changes with what other cores do, so it is watched for so
    long.  Args: lanes: floats of a vector register.
    """
    loop, end = _compiled("clock", machine, lanes), time.perf_counter() + seconds
    count, best = 1000, 0.0
    while loop(count) < BLINK_SECONDS:
        count *= 2
    while time.perf_counter() < end:
        best = max(best, count * LINK / loop(count))
    return best


def _fastest(loop: Loop, each: int) -> float:
    """Instructions per second of a loop: of its fastest run. Args: each: instructions of an iteration."""
    count = 1000
    while (took := loop(count)) < LOOP_SECONDS / 4:
        count *= 4
    count = max(1, int(count * LOOP_SECONDS / took))
    return count * each / min(loop(count) for _ in range(ROUNDS))


@functools.cache
def _compiled(name: str, machine: str, lanes: int) -> Loop:
    """A loop as machine code of this CPU."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()  # of the inline assembly
    module = llvm.parse_assembly(loop_text(name, machine, lanes))
    module.verify()
    features = llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple()
    made = target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=2)
    engine = llvm.create_mcjit_compiler(module, made)
    engine.finalize_object()
    call = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_void_p)(engine.get_function_address("loop"))
    buffer = (ctypes.c_float * (PAGE_FLOATS + 32))()
    place = (ctypes.addressof(buffer) + 127) // 128 * 128

    def run(count: int, _keep: Any = (engine, buffer)) -> float:
        begun = time.perf_counter()
        call(count, place)
        return max(time.perf_counter() - begun, TICK)

    return run


def loop_text(name: str, machine: str, lanes: int) -> str:
    """LLVM IR of a loop ``void loop(i64 count, float* buffer)``.

    Args: name: "clock", or of `EACH`; lanes: floats of a vector register.
    """
    vector = f"<{lanes} x float>"
    body: list[str] = []
    phis: list[str] = []
    ends: list[str] = []
    before: list[str] = []
    if name == "clock":
        phis = [f"%a0 = phi i64 [ 0, %entry ], [ %a{LINK}, %body ]"]
        add = f'call i64 asm sideeffect "{_ADD[machine]}", "=r,0"'
        body = [f"%a{k + 1} = {add}(i64 %a{k})" for k in range(LINK)]
    elif name in ("fma", "latency"):
        chains = CHAINS if name == "fma" else 1
        deep = CHAINS // chains
        for n in range(chains):
            phis.append(f"%f{n}_0 = phi {vector} [ %x, %entry ], [ %f{n}_{deep}, %body ]")
            for k in range(deep):
                arguments = f"{vector} %f{n}_{k}, {vector} %x, {vector} %x"
                body.append(f"%f{n}_{k + 1} = call {vector} @llvm.fma.v{lanes}f32({arguments})")
            ends += [f"%e{n} = getelementptr {vector}, ptr %buffer, i64 {n}", f"store {vector} %f{n}_{deep}, ptr %e{n}"]
    elif name == "alu":  # additions and exclusive ors in turns: neither folds into the other
        words = f"<{lanes} x i32>"
        before = [f"%w = load volatile {words}, ptr %buffer"]
        for n in range(CHAINS):
            phis.append(f"%i{n} = phi {words} [ %w, %entry ], [ %o{n}, %body ]")
            body += [f"%s{n} = add {words} %i{n}, %w", f"%o{n} = xor {words} %s{n}, %w"]
            ends += [f"%e{n} = getelementptr {words}, ptr %buffer, i64 {n}", f"store {words} %o{n}, ptr %e{n}"]
    else:
        for k in range(ACCESSES):
            body.append(f"%p{k} = getelementptr {vector}, ptr %buffer, i64 {k % (PAGE_FLOATS // lanes)}")
            access = f"%l{k} = load volatile {vector}, ptr %p{k}"
            body.append(access if name == "load" else f"store volatile {vector} %x, ptr %p{k}")
    lines = [
        f"declare {vector} @llvm.fma.v{lanes}f32({vector}, {vector}, {vector})",
        "define void @loop(i64 %count, ptr %buffer) {",
        "entry:",
        f"%x = load volatile {vector}, ptr %buffer",
        *before,
        "br label %body",
        "body:",
        "%step = phi i64 [ 0, %entry ], [ %next, %body ]",
        *phis,
        *body,
        "%next = add i64 %step, 1",
        "%more = icmp slt i64 %next, %count",
        "br i1 %more, label %body, label %end",
        "end:",
        *ends,
        "ret void",
        "}",
    ]
    return "\n".join(lines) + "\n"
