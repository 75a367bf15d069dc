"""Microbenchmark kernels of a GPU in PTX: FMA and tensor-core rates, issue, memory and shared-memory reads, latencies,
grid barrier.

Every kernel has the arguments (data, cycles, count, mask): it repeats its body ``count`` times, and thread 0 of every
block writes the cycles from the first to the last iteration of its block.  Accumulators are independent of each other,
and what they hold is stored where it equals a number that it never has, so that no assembler drops them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

THREADS = 512
"""Of a block: four warps per scheduler, and 128 registers for each thread."""
WARPS = THREADS // 32
UNROLL = 4
"""Rounds over the accumulators in one iteration."""
LOADS = 8
"""Loads of one iteration, all under way at once."""
VECTOR = 16
"""Bytes of a load."""
HOPS = 16
"""Dependent loads of one iteration."""
RING = 256
"""Words of the ring in shared memory that a chain of loads follows."""
AMPERE = (8, 0)
HOPPER = (9, 0)
PTX_VERSION = "8.0"
NEWEST = (9, 0)
"""Newest capability that PTX of this version names: newer devices compile it themselves."""
_NEVER = "0x7EADBEEF"


@dataclass(frozen=True)
class Bench:
    """One kernel.

    Attributes:
        name: of its entry. work: of one block in one iteration: FLOP, bytes, warp instructions, hops of a chain.
        registers: declarations; before, body, after: its code around and in the loop; threads: of a block.
        since: oldest compute capability that has its instructions.
    """

    name: str
    work: float
    registers: tuple[str, ...]
    before: tuple[str, ...]
    body: tuple[str, ...]
    after: tuple[str, ...] = ()
    threads: int = THREADS
    since: tuple[int, int] = (7, 0)

    def text(self) -> str:
        """Its PTX, without the module's head."""
        lines = [
            f".visible .entry {self.name}(.param .u64 p_data, .param .u64 p_cycles, .param .u32 p_count, "
            ".param .u32 p_mask)",
            f".maxntid {self.threads}, 1, 1",
            "{",
            ".reg .pred %more, %first, %never;",
            ".reg .b32 %count, %mask, %thread, %block, %sink;",
            ".reg .b64 %data, %cycles, %begun, %ended, %at;",
            *self.registers,
            "ld.param.u64 %data, [p_data];",
            "ld.param.u64 %cycles, [p_cycles];",
            "ld.param.u32 %count, [p_count];",
            "ld.param.u32 %mask, [p_mask];",
            "cvta.to.global.u64 %data, %data;",
            "cvta.to.global.u64 %cycles, %cycles;",
            "mov.u32 %thread, %tid.x;",
            "mov.u32 %block, %ctaid.x;",
            "mov.u32 %sink, 0;",
            *self.before,
            "bar.sync 0;",
            "mov.u64 %begun, %clock64;",
            "LOOP:",
            *self.body,
            "sub.u32 %count, %count, 1;",
            "setp.ne.u32 %more, %count, 0;",
            "@%more bra LOOP;",
            *self.after,
            "bar.sync 0;",
            "mov.u64 %ended, %clock64;",
            f"setp.eq.u32 %never, %sink, {_NEVER};",
            "@%never st.global.u32 [%data], %sink;",
            "sub.u64 %ended, %ended, %begun;",
            "setp.eq.u32 %first, %thread, 0;",
            "mad.wide.u32 %at, %block, 8, %cycles;",
            "@%first st.global.u64 [%at], %ended;",
            "ret;",
            "}",
        ]
        return "\n".join(lines) + "\n"


def _named(name: str, count: int) -> list[str]:
    return [f"%{name}{k}" for k in range(count)]


def _fma(kind: str, accumulators: int) -> Bench:
    """Independent chains of FMAs. Args: kind: "f32" or "f64"."""
    names = _named("x", accumulators)
    before = [f"cvt.rn.{kind}.u32 %a, %mask;", *(f"cvt.rn.{kind}.u32 {name}, %thread;" for name in names)]
    body = [f"fma.rn.{kind} {name}, {name}, %a, %a;" for _ in range(UNROLL) for name in names]
    flop = 2.0 * THREADS * UNROLL * accumulators
    registers = (f".reg .{kind} %a, {', '.join(names)};",)
    return Bench(f"fma_{kind}", flop, registers, tuple(before), tuple(body), tuple(_sunk(names, kind)))


def _sunk(names: Sequence[str], kind: str) -> list[str]:
    """The sum of accumulators as a word of the sink."""
    sums = [f"add.rn.{kind} {names[0]}, {names[0]}, {name};" for name in names[1:]]
    return [*sums, f"cvt.rni.s32.{kind} %sink, {names[0]};"]


@dataclass(frozen=True)
class Shape:
    """An ``mma.sync``: its shape and types, registers of the operands, whether these are float64."""

    m: int
    n: int
    k: int
    types: str
    a: int
    b: int
    double: bool = False


def _mma(name: str, shape: Shape, since: tuple[int, int]) -> Bench:
    """Independent accumulators of tensor-core products."""
    sets, kind, letter = 4, "f64" if shape.double else "f32", "b64" if shape.double else "b32"
    count = shape.m * shape.n // 32
    a, b = _named("a", shape.a), _named("b", shape.b)
    groups = [_named(f"x{group}_", count) for group in range(sets)]
    every = [one for group in groups for one in group]
    operand = "cvt.rn.f64.u32 {0}, %thread;" if shape.double else "mov.b32 {0}, %mask;"
    before = [operand.format(one) for one in (*a, *b)]
    before += [f"cvt.rn.{kind}.u32 {one}, %thread;" for one in every]
    body = []
    for _ in range(UNROLL):
        for group in groups:
            total, left, right = ", ".join(group), ", ".join(a), ", ".join(b)
            opcode = f"mma.sync.aligned.m{shape.m}n{shape.n}k{shape.k}.row.col.{shape.types}"
            body.append(f"{opcode} {{{total}}}, {{{left}}}, {{{right}}}, {{{total}}};")
    flop = 2.0 * shape.m * shape.n * shape.k * WARPS * UNROLL * sets
    operands = f".reg .{'f64' if shape.double else letter} {', '.join([*a, *b])};"
    registers = (operands, f".reg .{kind} {', '.join(every)};")
    return Bench(name, flop, registers, tuple(before), tuple(body), tuple(_sunk(every, kind)), since=since)


def _issue() -> Bench:
    """FMAs and integer instructions in turns: two pipes, so that the schedulers and not one of them decide."""
    floats, words = _named("x", 16), _named("r", 16)
    before = ["cvt.rn.f32.u32 %a, %mask;", *(f"cvt.rn.f32.u32 {name}, %thread;" for name in floats)]
    before += [f"add.u32 {name}, %thread, {k};" for k, name in enumerate(words)]
    body = []
    for turn in range(UNROLL):
        for x, r in zip(floats, words, strict=True):
            body.append(f"fma.rn.f32 {x}, {x}, %a, %a;")
            body.append(f"{'xor.b32' if turn % 2 else 'add.u32'} {r}, {r}, %mask;")
    after = [*_sunk(floats, "f32"), *(f"xor.b32 %sink, %sink, {r};" for r in words)]
    registers = (f".reg .f32 %a, {', '.join(floats)};", f".reg .b32 {', '.join(words)};")
    return Bench("issue", 2.0 * 16 * UNROLL * WARPS, registers, tuple(before), tuple(body), tuple(after))


def _read_global() -> Bench:
    """Reads ``mask`` + 1 vectors again and again, all threads side by side, past the L1 cache."""
    values = [_named(f"v{k}_", 4) for k in range(LOADS)]
    every = [one for vector in values for one in vector]
    before = [
        "mov.u32 %threads, %nctaid.x;",
        f"mul.lo.u32 %threads, %threads, {THREADS};",
        f"mad.lo.u32 %here, %block, {THREADS}, %thread;",
    ]
    body = []
    for k, vector in enumerate(values):
        body += ["and.b32 %place, %here, %mask;", f"mad.wide.u32 %q{k}, %place, {VECTOR}, %data;"]
        body += [f"ld.global.cg.v4.u32 {{{', '.join(vector)}}}, [%q{k}];", "add.u32 %here, %here, %threads;"]
    body += [f"xor.b32 %sink, %sink, {one};" for one in every]
    registers = (
        f".reg .b32 %threads, %here, %place, {', '.join(every)};",
        f".reg .b64 {', '.join(_named('q', LOADS))};",
    )
    return Bench("read_global", float(THREADS * LOADS * VECTOR), registers, tuple(before), tuple(body))


def _read_shared() -> Bench:
    """Reads 16 bytes per thread, neighbours side by side: without bank conflicts."""
    step = 32 * VECTOR
    values = [_named(f"v{k}_", 4) for k in range(LOADS)]
    before = ["mov.u32 %place, memory;", f"mad.lo.u32 %place, %thread, {VECTOR}, %place;"]
    loads = [f"ld.volatile.shared.v4.u32 {{{', '.join(v)}}}, [%place+{k * step}];" for k, v in enumerate(values)]
    registers = (
        f".shared .align 128 .b8 memory[{THREADS * VECTOR + LOADS * step}];",
        f".reg .b32 %place, {', '.join(one for vector in values for one in vector)};",
    )
    return Bench("read_shared", float(THREADS * LOADS * VECTOR), registers, tuple(before), tuple(loads))


def _chase_global() -> Bench:
    """One thread follows a ring of addresses in memory, past the L1 cache."""
    body = ["ld.global.cg.u64 %next, [%next];"] * HOPS
    after = ("cvt.u32.u64 %sink, %next;",)
    return Bench(
        "chase_global", float(HOPS), (".reg .b64 %next;",), ("mov.u64 %next, %data;",), tuple(body), after, threads=32
    )


def _chase_shared() -> Bench:
    """One thread follows a ring of addresses in shared memory, which all threads have laid."""
    before = (
        "mov.u32 %base, ring;",
        "mov.u32 %here, %thread;",
        "LAY:",
        "add.u32 %there, %here, 33;",
        f"and.b32 %there, %there, {RING - 1};",
        "mad.lo.u32 %there, %there, 4, %base;",
        "mad.lo.u32 %place, %here, 4, %base;",
        "st.shared.u32 [%place], %there;",
        "add.u32 %here, %here, 32;",
        f"setp.lt.u32 %more, %here, {RING};",
        "@%more bra LAY;",
        "mov.u32 %place, %base;",
    )
    body = ("ld.volatile.shared.u32 %place, [%place];",) * HOPS
    registers = (f".shared .align 16 .b32 ring[{RING}];", ".reg .b32 %base, %here, %there, %place;")
    return Bench("chase_shared", float(HOPS), registers, before, body, ("mov.u32 %sink, %place;",), threads=32)


def _grid_barrier() -> Bench:
    """All blocks wait for each other: a counter in memory that only grows (``data``, zero before)."""
    before = ("mov.u32 %blocks, %nctaid.x;", "mov.u32 %wanted, 0;", "setp.eq.u32 %first, %thread, 0;")
    body = (
        "add.u32 %wanted, %wanted, %blocks;",
        "bar.sync 0;",
        "@!%first bra WAITED;",
        "atom.add.release.gpu.global.u32 %seen, [%data], 1;",
        "SPIN:",
        "ld.acquire.gpu.global.u32 %seen, [%data];",
        "setp.lt.u32 %never, %seen, %wanted;",
        "@%never bra SPIN;",
        "WAITED:",
        "bar.sync 0;",
    )
    return Bench("grid_barrier", 1.0, (".reg .b32 %blocks, %wanted, %seen;",), before, body, threads=128)


def _nothing() -> Bench:
    return Bench("nothing", 1.0, (), (), ("add.u32 %sink, %sink, 1;",), threads=32)


def benches(capability: tuple[int, int]) -> dict[str, Bench]:
    """The kernels that a compute capability has, by name; those of compute units are named as `GpuArch` names them."""
    units = {
        "ffma": _fma("f32", 16),
        "fp64": _fma("f64", 8),
        "fp64_mma": _mma("mma_f64", Shape(8, 8, 4, "f64.f64.f64.f64", 1, 1, True), AMPERE),
        "tf32_mma": _mma("mma_tf32", Shape(16, 8, 8, "f32.tf32.tf32.f32", 4, 2), AMPERE),
        "bf16_mma": _mma("mma_bf16", Shape(16, 8, 16, "f32.bf16.bf16.f32", 4, 2), AMPERE),
        "fp16_mma": _mma("mma_f16", Shape(16, 8, 16, "f32.f16.f16.f32", 4, 2), AMPERE),
    }
    if capability < AMPERE:
        units["fp16_mma"] = _mma("mma_f16", Shape(16, 8, 8, "f32.f16.f16.f32", 2, 1), (7, 5))
    if capability >= HOPPER:
        units["fp64_mma"] = _mma("mma_f64", Shape(16, 8, 16, "f64.f64.f64.f64", 8, 4, True), HOPPER)
    others = (
        *(_issue(), _read_global(), _read_shared(), _chase_global(), _chase_shared()),
        *(_grid_barrier(), _nothing()),
    )
    found = units | {bench.name: bench for bench in others}
    return {name: bench for name, bench in found.items() if capability >= bench.since}


def module_text(capability: tuple[int, int]) -> str:
    """PTX of all kernels for a compute capability."""
    named = min(capability, NEWEST)
    head = f".version {PTX_VERSION}\n.target sm_{named[0]}{named[1]}\n.address_size 64\n"
    return "\n".join([head, *(bench.text() for bench in benches(capability).values())])
