"""CUDA kernels without a GPU: golden sources, what the assembler reports, and what a PTX machine computes."""

from __future__ import annotations

import itertools
import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.base.errors import CacheError, CompileRejected, UsageError
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.launch_source import emit_source
from jcuts.codegen.cuda.ptx import sfu_math
from jcuts.codegen.cuda.split_kernels import split_into_kernels
from jcuts.codegen.cuda.toolchain import programmatic_launch, ptxas
from jcuts.codegen.cuda.toolchain.image import Image, Launch, Resources
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.kernel_ir.interpret import interpret
from jcuts.kernel_ir.verify import verify
from jcuts.schedule.gpu import candidates as gpu_candidates
from tests import programs
from tests.gpu import cases
from tests.ops.cases import conv
from tests.ptx import machine as ptx_machine

MACHINE = gpu_candidates.GpuMachine(132)
SM80, SM90 = CudaTarget((8, 0)), CudaTarget((9, 0))
compiled = pytest.mark.cuda_compilers


def zeros(*shape):
    return np.zeros(shape, np.float32)


TEMPLATES = {
    "map": (lambda x, b: jnp.maximum(x, 0) * b, (zeros(64, 52), zeros(52))),
    "transpose": (lambda x: x.T * 2, (zeros(128, 96),)),
    "depthwise": (lambda x, w: conv(x, w, groups=20), (zeros(4, 15, 15, 20), zeros(3, 3, 1, 20))),
    "product": (lambda x, w, b: jax.nn.relu(x @ w + b), (zeros(3136, 144), zeros(144, 24), zeros(24))),
    "gemv": (lambda x, w, b: jax.nn.relu(x @ w + b), (zeros(1, 2048), zeros(2048, 1000), zeros(1000))),
    "skinny_gemm": (lambda x, w, b: jax.nn.relu(x @ w + b), (zeros(8, 2048), zeros(2048, 1000), zeros(1000))),
    "product_groups": (lambda x, w, b: jax.nn.relu(x @ w + b), (zeros(384, 768), zeros(768, 3072), zeros(3072))),
    "patch": (lambda x, w: conv(x, w, strides=(2, 2)), (zeros(8, 224, 224, 3), zeros(7, 7, 3, 64))),
    "convolution": (lambda x, w: conv(x, w), (zeros(1, 28, 28, 128), zeros(3, 3, 128, 128))),
    "reduction": (lambda x: x.sum(1), (zeros(3000, 300),)),
    "columns": (lambda x: x.sum(0), (zeros(3000, 64),)),
    "filter_gradient": (cases._filter_gradient((3, 3)), (zeros(8, 28, 28, 64), zeros(8, 28, 28, 64))),
    "pool_gradient": (
        cases._pool_gradient(lax.max, -np.inf, 3, 2, "SAME"),
        (zeros(4, 28, 28, 64), zeros(4, 14, 14, 64)),
    ),
    "statistics": (cases.batch_statistics, (zeros(30000, 64),)),
    "softmax_columns": (lambda x: jax.nn.softmax(x, 0), (zeros(64, 4096),)),
    "running_sum": (lambda x: jnp.cumsum(x, 1), (zeros(300, 3000),)),
    "running_sum_columns": (lambda x: jnp.cumsum(x, 0), (zeros(3000, 256),)),
    "tables": (cases.CASES["tables"][0], (np.zeros((128, 5), np.int32), *(zeros(100, 64) for _ in range(5)))),
    "rows": (lambda x: jax.nn.softmax(x), (zeros(3000, 300),)),
    "online_softmax": (lambda x: jax.nn.softmax(x), (zeros(300, 32000),)),
}


def candidates(fn, arguments, limit=1, machine=MACHINE):
    return [p for p, _ in gpu_candidates.candidates(programs.trace(fn, *arguments).program(), machine, limit)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_golden_source(name, golden):
    (program,) = candidates(*TEMPLATES[name])
    found, scratch = split_into_kernels(program)
    text = [f"# {dict(program.params)}, {scratch} bytes of scratch memory"]
    for part in found:
        source = emit_source(part.program)
        compile(source.text, name, "exec")
        text.append(f"# {source.blocks} blocks of {source.threads} threads, arguments {part.arguments}\n{source.text}")
    golden(f"cuda/{name}.txt", "\n".join(text))


@pytest.mark.parametrize(
    "name",
    [
        "full sum",
        "full sum odd",
        "column sum",
        "column max",
        "statistics",
        "middle",
        "batch statistics long",
        "batch norm",
        "depthwise filter gradient",
        "running sum of columns long",
        "running sum in the middle",
    ],
)
def test_split_programs_keep_their_meaning(name):
    fn, arguments = cases.CASES[name]
    traced = programs.trace(fn, *arguments)
    program, operands = traced.program(), traced.operands()
    wanted = interpret(program, operands)
    split = [p for p, _ in gpu_candidates.candidates(program, MACHINE, 1 << 30) if dict(p.params).get("split", 1) != 1]
    assert split
    for candidate in split[:: max(1, len(split) // 3)]:
        kernels, scratch = split_into_kernels(candidate)
        assert len(kernels) > 1 and scratch > 0
        memory = {(k, 0): operand for k, operand in enumerate(operands)}
        for kernel in kernels:
            verify(kernel.program)
            buffers = [b for b in kernel.program.buffers if b.role != "local"]
            places = dict(zip((b.name for b in buffers), kernel.arguments, strict=True))
            found = interpret(kernel.program, [memory[places[b.name]] for b in kernel.program.inputs])
            for buffer, value in zip(kernel.program.outputs, found, strict=True):
                number, offset = places[buffer.name]
                assert places[buffer.name] not in memory and (number >= 0 or offset + value.nbytes <= scratch)
                memory[places[buffer.name]] = value
        for k, want in enumerate(wanted):
            scale = max(1.0, float(np.sqrt(np.mean(np.square(want)))))
            np.testing.assert_allclose(memory[len(operands) + k, 0], want, rtol=2e-4, atol=2e-4 * scale)


@compiled
@pytest.mark.parametrize("target", [SM80, SM90], ids=lambda t: t.arch)
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_assemble_without_local_memory(name, target):
    (program,) = candidates(*TEMPLATES[name], machine=gpu_candidates.GpuMachine(132, capability=target.capability))
    image = Image.unpack(compiler.compile_program(program, target).object_code)
    assert image.arch == compiler.arch_of(program, target) and image.cubin[:4] == b"\x7fELF"
    for launch in image.launches:
        used = launch.resources
        assert 8 <= used.registers <= 255 and used.stack == 0 and used.shared < 48 << 10
        assert launch.block[0] * used.registers <= 65536


def machine_results(program, operands):
    kernel = compiler.compile_program(program, SM90)
    return ptx_machine.run_kernel(compiler.ptx_of(program, SM90), kernel, operands)


def check(fn, arguments, limit):
    with jax.enable_x64(True):
        traced = programs.trace(fn, *arguments)
        program, operands = traced.program(), traced.operands()
        plain = [np.asarray(x) for x in jax.tree.leaves(jax.jit(fn)(*arguments))]
        ran = 0
        for candidate, _ in gpu_candidates.candidates(program, MACHINE, limit):
            try:
                results = machine_results(candidate, operands)
            except CompileRejected as error:
                assert "local memory" in error.message
                continue
            for got, want in zip(results, plain, strict=True):
                compare(got, want, f"{candidate.params} {[a.unroll for a in candidate.phases[0].axes]}")
            ran += 1
        assert ran


def compare(got, want, what):
    if got.dtype.kind in "biu":
        np.testing.assert_array_equal(got, want, err_msg=what)
        return
    a, x = np.asarray(got, np.float64), np.asarray(want, np.float64)
    eps = float(jnp.finfo(want.dtype).eps)
    live = np.isfinite(x)
    scale = float(np.sqrt(np.mean(x[live] ** 2))) if live.any() else 1.0
    np.testing.assert_allclose(a, x, rtol=40 * eps, atol=60 * eps * scale, err_msg=what)


SMALL = [n for n in cases.CASES if n not in ("softmax long", "full sum", "full sum odd", "long odd")]


@compiled
@pytest.mark.parametrize("name", SMALL)
def test_a_machine_computes_what_xla_does(name):
    check(*cases.CASES[name], 2)


@compiled
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_storage_types(dtype):
    for fn, arguments in cases.typed(dtype).values():
        check(fn, arguments, 2)


@compiled
@pytest.mark.parametrize("name", ["exp", "exp2", "logistic", "tanh", "rsqrt", "erfc"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_special_functions_keep_their_bound(name, dtype):
    """The units' own error is not simulated: what is left is that of the formulas."""
    x = np.concatenate([np.linspace(-87, 87, 3001), np.geomspace(1e-6, 80, 1000), -np.geomspace(1e-6, 80, 1000)])
    x = np.abs(x) + 1e-3 if name == "rsqrt" else x
    x = (x if dtype == "float32" else np.clip(x, -9, 9)).astype(jnp.dtype(dtype))
    op = getattr(lax, name)
    (program,) = candidates(lambda v: op(v), (x,))
    (got,) = machine_results(program, [x])
    with jax.enable_x64(True):
        want = np.asarray(op(x.astype(np.float64)))
    info = jnp.finfo(jnp.dtype(dtype))
    normal = (np.abs(want) >= float(info.smallest_normal)) & (np.abs(want) <= float(info.max))
    unit = np.exp2(np.floor(np.log2(np.abs(want[normal])))) * float(info.eps)
    error = np.abs(got.astype(np.float64)[normal] - want[normal]) / unit
    bound = sfu_math.ERROR_ULP[name, "float32" if dtype == "float32" else "half"]
    assert error.max() <= bound + (0.0 if dtype == "float32" else 0.501)


@compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("other", ["float32", "float16"])
def test_selections_keep_negative_zero(dtype, other):
    x = np.array([-0.0, 0.0, -1.0, 2.0] * 32).astype(jnp.dtype(dtype))

    def function(v):
        inner = jnp.where(v > 0, jnp.asarray(0, other), v.astype(other))
        return inner, jnp.where(v > 0, v, inner.astype(dtype))

    (program,) = candidates(function, (x,))
    for got in machine_results(program, [x]):
        assert list(np.signbit(got[:4])) == [True, False, True, False]


@compiled
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_machine_flushes_if_asked(dtype):
    """float64 only: what XLA's code for CPUs does with it, against which no wider type stands."""
    x = np.array([float(jnp.finfo(dtype).smallest_normal), 3.0] * 16, dtype)
    with jax.enable_x64(True):
        program, *_ = candidates(lambda v: v * 0.5, (x,))
        kernel, text = compiler.compile_program(program, SM90), compiler.ptx_of(program, SM90)
        for flushes in (False, True):
            (got,) = ptx_machine.run_kernel(text, kernel, [x], flushes=flushes)
            assert got[1] == 1.5 and (got[0] == 0) == (flushes and dtype == "float64")


def test_a_machine_rounds_sums_of_products_once():
    """Against exact fractions, to nearest and towards zero; ties and tiny terms beside them among the operands."""
    rng = np.random.default_rng(6)
    a, b, c = (rng.standard_normal(600).astype(np.float32) for _ in range(3))
    c[:200] *= np.float32(2.0) ** rng.integers(-60, 60, 200).astype(np.float32)
    one = np.float32(1)
    near = np.float32(2.0**-24)  # half a unit of 1
    a[200:206], b[200:206] = [one, one, -one, one, one, one], [near, near, near, near, near * 3, -near / 2]
    c[200:206] = [one, 1 + 2 * near, -one, -one, one, one]
    a[206:208], b[206:208], c[206:208] = 2.0**-60, [2.0**-60, -(2.0**-60)], 1 + 2 * near
    ones, none = np.ones(600, np.float32), np.full(600, -0.0, np.float32)
    for op, to, (x, y, z) in [
        ("fma", "rn", (a, b, c)),
        ("fma", "rz", (a, b, c)),
        ("add", "rz", (a, ones, c)),
        ("sub", "rz", (a, ones, c)),
        ("mul", "rz", (a, b, none)),
    ]:
        operands = {"fma": (x, y, z), "add": (x, z), "sub": (x, -z), "mul": (x, y)}[op]
        got = ptx_machine._ARITHMETIC[op]([op, to, "f32"], *operands)
        for k in range(len(x)):
            exact = Fraction(float(x[k])) * Fraction(float(y[k])) + Fraction(float(z[k]))
            near_by = [np.nextafter(got[k], np.float32(-np.inf)), got[k], np.nextafter(got[k], np.float32(np.inf))]
            apart = [abs(Fraction(float(x)) - exact) for x in near_by]
            if to == "rn":
                tie = apart[1] in (apart[0], apart[2])
                assert apart[1] == min(apart) and (not tie or got[k].view(np.int32) % 2 == 0), k
            else:
                out = near_by[2 if exact > 0 else 0]
                assert abs(Fraction(float(got[k]))) <= abs(exact) and (abs(Fraction(float(out))) > abs(exact)), k


@compiled
def test_a_machine_computes_remainders_of_large_quotients():
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(64).astype(np.float32) for _ in range(2))
    x *= np.float32(10.0) ** rng.integers(0, 30, 64).astype(np.float32)
    program, *_ = candidates(lambda x, y: lax.rem(x, y), (x, y))
    (got,) = machine_results(program, [x, y])
    np.testing.assert_array_equal(got, np.fmod(x, y))


@compiled
def test_a_machine_rotates_words():
    """What the compiler makes of two shifts of one number (`shf`)."""
    x = np.random.default_rng(5).integers(0, 1 << 32, 96, np.uint32)
    program, *_ = candidates(lambda v: (v << 13) | (v >> 19), (x,))
    assert "shf." in compiler.ptx_of(program, SM90)
    (got,) = machine_results(program, [x])
    np.testing.assert_array_equal(got, (x << np.uint32(13)) | (x >> np.uint32(19)))


@compiled
@pytest.mark.parametrize("name", ["exp", "exp2", "logistic"])
def test_small_results_are_not_flushed(name):
    x = np.linspace(-88.5, -87.5, 64).astype(np.float32) * (1.5 if name == "exp2" else 1.0)
    op = getattr(lax, name)
    (program,) = candidates(lambda v: op(v), (x,))
    (got,) = machine_results(program, [x])
    with jax.enable_x64(True):
        want = np.asarray(op(x.astype(np.float64)))
    assert (want < 1.17e-38).any()
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=3e-45)


@compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_odd_functions_keep_the_sign_of_a_zero(dtype):
    x = np.tile([-0.0, 0.0, -1.0, 1.0], 8).astype(jnp.dtype(dtype))
    (program,) = candidates(lambda v: lax.tanh(v), (x,))
    (got,) = machine_results(program, [x])
    np.testing.assert_array_equal(np.signbit(got), np.signbit(x))


@compiled
@pytest.mark.parametrize(
    "name",
    [
        "chain",
        "transpose",
        "depthwise",
        "middle",
        "argmax",
        "softmax",
        "moments",
        "max pool gradient",
        "depthwise filter gradient",
        "depthwise input gradient stride",
        "average pool gradient",
        "softmax columns",
        "batch norm",
    ],
)
def test_every_schedule_of_a_family(name):
    fn, arguments = cases.CASES[name]
    found = candidates(fn, arguments, 1 << 30)
    assert len({p.digest for p in found}) == len(found) > 1
    check(*cases.CASES[name], 5)


def test_machine_finds_races_and_bad_addresses():
    head = ".version 8.0\n.target sm_80\n.address_size 64\n"
    entry = ".visible .entry k0(\n.param .u64 a,\n.param .u64 b\n)\n{\n"
    load = "ld.param.u64 %rd1, [a];\nld.param.u64 %rd2, [b];\nmov.u32 %r1, %tid.x;\nmul.wide.s32 %rd3, %r1, 4;\n"
    shared = "  .shared .align 16 .b8 s[128];\nmov.u32 %r2, s;\nshl.b32 %r3, %r1, 2;\nadd.s32 %r4, %r2, %r3;\n"
    bodies = {
        "writes outside": "add.s64 %rd4, %rd2, %rd3;\nst.global.b32 [%rd4+64], %r1;\nret;\n}\n",
        "reads outside": "add.s64 %rd4, %rd2, %rd3;\nld.global.nc.b32 %r5, [%rd4];\nret;\n}\n",
        "twice": "st.global.b32 [%rd2], %r1;\nret;\n}\n",
        "misaligned": "ld.global.nc.b32 %r5, [%rd1+2];\nret;\n}\n",
        "race": shared + "st.shared.b32 [%r4], %r1;\nld.shared.b32 %r5, [%r2+64];\nret;\n}\n",
        "only some": "setp.lt.u32 %p1, %r1, 3;\n@%p1 bra $L1;\nbar.sync 0;\n$L1:\nret;\n}\n",
    }
    x, y = np.zeros(32, np.float32), np.zeros(32, np.float32)
    for what, body in bodies.items():
        memory = ptx_machine.Memory([x, y], [False, True])
        module = ptx_machine.parse(head + entry + load + body)
        with pytest.raises(ptx_machine.Fault, match=what):
            ptx_machine.Machine(module, "k0", memory, memory.places, 1, 32).run()


@compiled
def test_kernels_of_one_call_touch_nothing_before_they_wait():
    fn, arguments = cases.CASES["softmax"]
    traced = programs.trace(fn, *arguments)
    program = gpu_candidates.candidates(traced.program(), MACHINE, 1)[0][0]
    for target, waits in ((CudaTarget((8, 0)), False), (CudaTarget((9, 0)), True)):
        ptx = compiler.ptx_of(program, target)
        assert ptx.count(programmatic_launch.WAIT) == waits * ptx.count(".visible .entry")
        image = Image.unpack(compiler.compile_program(program, target).object_code)
        assert {launch.waits for launch in image.launches} == {waits}
        ptx_machine.parse(ptx)
    late = ptx.replace("\t" + programmatic_launch.WAIT, "").replace(
        "\tret;", "\t" + programmatic_launch.WAIT + "\n\tret;"
    )
    with pytest.raises(ptx_machine.Fault, match="before it waits"):
        ptx_machine.parse(late)


def test_images_round_trip():
    used = Resources(40, 0, 64)
    launch = Launch("k", (3, 1, 1), (128, 1, 1), ((0, 0), (-1, 256)), 50_000, (2, 1, 1), True, True, used)
    image = Image("sm_90", "softmax", (launch,), b"cubin\n\0bytes")
    assert Image.unpack(image.pack()) == image
    for bad in (b"", b"\x7fELF", image.pack()[:30], image.pack().replace(b"symbol", b"sxmbol")):
        with pytest.raises(CacheError):
            Image.unpack(bad)


def test_refusals():
    with pytest.raises(UsageError, match=r"7\.0 is older than 7\.5, the oldest that the assembler"):
        CudaTarget((7, 0))
    with pytest.raises(CompileRejected, match="no 64-bit ELF"):
        ptxas.resources(b"not an object")
    (program,) = candidates(*TEMPLATES["map"])
    with pytest.raises(CompileRejected, match="no schedule for a GPU"):
        emit_source(programs.trace(TEMPLATES["map"][0], *TEMPLATES["map"][1]).program())
    with pytest.raises(CompileRejected, match="without a kernel"):
        ptxas.merge_modules([(".version 8.0", "k")])
    assert compiler.kernel_digest(program, SM80) != compiler.kernel_digest(program, SM90)


@compiled
def test_the_assembler_says_why():
    ptx = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k()\n{\n bogus.u32 %r1;\n ret;\n}\n"
    with pytest.raises(CompileRejected) as caught:
        ptxas.assemble(ptx, "sm_90")
    assert caught.value.values["log"]


def test_products_that_wait_for_each_other_are_what_ptxas_says(tmp_path, monkeypatch):
    stand_in = tmp_path / "ptxas"
    stand_in.write_text(
        f'#!/bin/sh\necho "Potential Performance Loss: {ptxas.SERIAL} due to ..." >&2\n'
        'for last; do :; done\nprintf cubin > "$last"\n'
    )
    stand_in.chmod(0o755)
    monkeypatch.setattr(ptxas, "assembler", lambda: str(stand_in))
    assert ptxas.assemble("", "sm_90a") == b"cubin"
    with pytest.raises(CompileRejected, match="wait for each other"):
        ptxas.assemble("", "sm_90a", overlapped=True)


@compiled
def test_local_memory_is_refused():
    """A program whose values cannot stay in registers."""

    def fn(x, w):
        return lax.reduce_window(x, 0.0, lax.add, (1, 1, 3, 1), (1, 1, 1, 1), "VALID") * w

    program = programs.trace(fn, zeros(1, 64, 66, 64), zeros(64)).program()
    from dataclasses import replace

    from jcuts.kernel_ir.loop_transforms import collapse_program

    plain = collapse_program(program)
    phase = plain.phases[0]
    unroll = dict(zip((a.name for a in phase.axes), itertools.repeat(8), strict=False))
    axes = tuple(replace(a, unroll=unroll[a.name] if a.extent > 1 else 1) for a in phase.axes)
    reds = tuple(replace(r, unroll=r.extent) for r in phase.reds)
    wide = replace(plain, phases=(replace(phase, axes=axes, reds=reds),), params=(("cuda", "point"), ("threads", 1024)))
    with pytest.raises(CompileRejected, match="local memory") as caught:
        compiler.compile_program(wide, SM90)
    assert caught.value.values["stack"] > 0


@compiled
def test_a_window_computes_the_activation_before_it():
    """What `region.absorb` makes: bias and relu6 before a padded depthwise convolution, repeated for every use."""
    from jcuts.lower.region import lower_region

    def block(x, b, d):
        y = jnp.clip(x + b, 0.5, 6.0)  # not zero where x is: padding comes after the activation
        return jax.nn.relu(conv(y, d, padding="SAME", groups=8))

    rng = np.random.default_rng(4)
    arguments = [rng.standard_normal(s).astype(np.float32) * 3 for s in ((2, 7, 6, 8), (8,), (3, 3, 1, 8))]
    traced = programs.trace(block, *arguments)
    program = lower_region(traced.graph, traced.everything, cheap=4.0)
    for candidate, _ in gpu_candidates.candidates(program, MACHINE, 6):
        (got,) = machine_results(candidate, traced.operands())
        np.testing.assert_allclose(got, block(*arguments), rtol=1e-5, atol=1e-5)


@compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_addresses_beyond_two_gigabytes(dtype):
    """Elements have 32-bit numbers, bytes have 64 bits: also where an instruction adds a constant to an address."""
    start, rows = 3 * 2**28 * 4 // np.dtype(jnp.dtype(dtype)).itemsize // 64, 2**17
    x = np.broadcast_to(np.zeros((), jnp.dtype(dtype)), (start + rows, 64))
    w = np.broadcast_to(np.zeros((), jnp.dtype(dtype)), (64, 64))
    if x.size > 2**31 - 1:
        x = x[-(2**31 // 64 - 1) :]
    for fn, operands in ((lambda x: x[-rows:] * 2, (x,)), (lambda x, w: x[-rows:] @ w, (x, w))):
        found = gpu_candidates.candidates(programs.trace(fn, *operands).program(), gpu_candidates.GpuMachine(132), 3)
        assert found
        for program, _ in found:
            ptx = compiler.ptx_of(program, CudaTarget((9, 0)))
            constants = [int(c) for c in re.findall(r"\[%\w+\+(-?\d+)\]", ptx)]
            assert all(abs(c) < 2**31 for c in constants)
            assert "mul.wide.s32" in ptx or "cvt.s64.s32" in ptx or "mul.wide.u32" in ptx


@compiled
@pytest.mark.parametrize("target", ["int8", "uint8"])
@pytest.mark.parametrize("source", ["uint16", "int16", "int32"])
@pytest.mark.parametrize("terms", [2, 4, 6])
def test_integers_that_were_cut_are_multiplied_as_such(source, target, terms):
    """NVVM multiplies pairs of bytes at once, and would take 16 bits that lie side by side for bytes."""

    def fn(x, y):
        a, b = (v.astype(target).astype(jnp.int32) for v in (x, y))
        return jnp.einsum("k,nk->n", a, jnp.broadcast_to(a, b.shape)), b @ a

    rng = np.random.default_rng(terms)
    x, y = (rng.integers(0, 30000, shape).astype(source) for shape in ((terms,), (8, terms)))
    for part in (0, 1):
        traced = programs.trace(lambda x, y, part=part: fn(x, y)[part], x, y)
        for made, _ in gpu_candidates.candidates(traced.program(), MACHINE, 2):
            np.testing.assert_array_equal(machine_results(made, traced.operands())[0], fn(x, y)[part])


def test_negations_are_spelled_otherwise():
    """However they are written; not where there are no minima, and no other differences."""
    head, name = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k(\n)\n{\n", "k"
    lines = "\tneg.s32 \t%r1, %r2;\n\tsub.s16 \t%rs1, 0, %rs2;\n\tsub.s32 \t%r3, %r4, %r5;\n"
    plain = ptxas.merge_modules([(head + lines + "}\n", name)])
    assert lines in plain
    found = ptxas.merge_modules([(head + lines + "\tmin.s32 \t%r6, %r1, %r3;\n}\n", name)])
    assert "\tnot.b32\t%r1, %r2;\n\tadd.s32\t%r1, %r1, 1;\n" in found.replace(" \t", "\t")
    assert "\tnot.b16\t%rs1, %rs2;\n\tadd.s16\t%rs1, %rs1, 1;\n" in found.replace(" \t", "\t")
    assert "sub.s32 \t%r3, %r4, %r5;" in found and "neg" not in found


@compiled
@pytest.mark.parametrize("dtype", ["int32", "uint32", "int16", "int8"])
@pytest.mark.parametrize("fn", [lambda x: (-x).min(0), lambda x: (-x).max(0), lambda x: jnp.minimum(-x[0], -x[1])])
def test_nothing_is_negated_beside_minima_of_integers(fn, dtype):
    """ptxas 13.0 forgets a sign where it makes one instruction of two minima; the assembler here may be another one."""
    x = np.random.default_rng(3).integers(np.iinfo(dtype).min, np.iinfo(dtype).max, (5, 11, 24), dtype, endpoint=True)
    x[:2, 0, 0] = np.iinfo(dtype).min
    traced = programs.trace(fn, x)
    for made, _ in gpu_candidates.candidates(traced.program(), MACHINE, 3):
        ptx = compiler.ptx_of(made, SM90)
        assert not re.search(r"neg\.s(16|32)|sub\.s(16|32)\s+%\w+, 0,", ptx)
        np.testing.assert_array_equal(machine_results(made, traced.operands())[0], fn(x))
