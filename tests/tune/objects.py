"""Object code for tests: small kernels written against the kernel ABI, in LLVM IR, well-behaved and not."""

from __future__ import annotations

import functools

from llvmlite import binding

from jcuts.tune.problem import Candidate, Input, Output, Problem, object_payload

SIZE = 4096
TILES = 8
SHAPE = (SIZE,)
AVAL = (SHAPE, "float32")

_HEADER = """
declare float @llvm.fma.f32(float, float, float)
declare void @abort()
define void @kernel(ptr %buffers, i64 %begin, i64 %end, ptr %scratch) {{
entry:
  %in.slot = getelementptr ptr, ptr %buffers, i64 0
  %in = load ptr, ptr %in.slot
  %out.slot = getelementptr ptr, ptr %buffers, i64 1
  %out = load ptr, ptr %out.slot
  %first = mul i64 %begin, {per_tile}
  %last.all = mul i64 %end, {per_tile}
  %last = sub i64 %last.all, {short}
  br label %loop
loop:
  %i = phi i64 [ %first, %entry ], [ %next, %body.end ]
  %more = icmp slt i64 %i, %last
  br i1 %more, label %body, label %done
body:
  %x.slot = getelementptr float, ptr %in, i64 %i
  %x = load float, ptr %x.slot
{body}
  %y.slot = getelementptr float, ptr %out, i64 %i
  store float %y, ptr %y.slot
  br label %body.end
body.end:
  %next = add i64 %i, 1
  br label %loop
done:
{done}
  ret void
}}
"""

_RIGHT = "  %x2 = fmul float %x, %x\n  %y = fadd float %x2, 1.0"
_BODIES = {
    "right": (_RIGHT, ""),
    "wrong": ("  %y = fadd float %x, 1.0", ""),
    "slightly wrong": (
        _RIGHT.replace("%y = fadd float %x2, 1.0", "%z = fadd float %x2, 1.0")
        + "\n  %y = fmul float %z, 0x3FF0010000000000",
        "",
    ),
    "nan": ("  %y = fdiv float 0.0, 0.0", ""),
    "abort": ("  call void @abort()\n  %y = fadd float %x, 1.0", ""),
    "segfault": ("  store float %x, ptr null\n  %y = fadd float %x, 1.0", ""),
    "out of bounds": (_RIGHT, "  %far = getelementptr float, ptr %out, i64 4100\n  store float 1.0, ptr %far"),
    "clobbers": (_RIGHT, "  store float 7.0, ptr %in"),
    "lower precision": (
        "  %b = bitcast float %x to i32\n  %h = and i32 %b, -65536\n  %xh = bitcast i32 %h to float\n"
        "  %x2 = fmul float %xh, %xh\n  %y = fadd float %x2, 1.0",
        "",
    ),
    "skipped tile": (
        f"  %tile = udiv i64 %i, {SIZE // TILES}\n  %skips = icmp eq i64 %tile, 1\n"
        "  %old.slot = getelementptr float, ptr %out, i64 %i\n  %old = load float, ptr %old.slot\n"
        "  %x2 = fmul float %x, %x\n  %z = fadd float %x2, 1.0\n  %y = select i1 %skips, float %old, float %z",
        "",
    ),
    "kept result": (
        "  %old.slot = getelementptr float, ptr %out, i64 %i\n  %old = load float, ptr %old.slot\n"
        "  %kept = fcmp one float %old, 0.0\n"
        "  %x2 = fmul float %x, %x\n  %z = fadd float %x2, 1.0\n  %y = select i1 %kept, float %old, float %z",
        "",
    ),
    "no nan": (
        "  %ord = fcmp ord float %x, %x\n  %x0 = select i1 %ord, float %x, float 0.0\n"
        "  %x2 = fmul float %x0, %x0\n  %y = fadd float %x2, 1.0",
        "",
    ),
}
_FOREVER = """
define void @kernel(ptr %buffers, i64 %begin, i64 %end, ptr %scratch) {
entry:
  %slot = alloca i64
  br label %loop
loop:
  store volatile i64 1, ptr %slot
  br label %loop
}
"""
_SLOW = """
define void @kernel(ptr %buffers, i64 %begin, i64 %end, ptr %scratch) {{
entry:
  %slot = alloca i64
  br label %wait
wait:
  %n = phi i64 [ 0, %entry ], [ %n1, %wait ]
  store volatile i64 %n, ptr %slot
  %n1 = add i64 %n, 1
  %again = icmp slt i64 %n1, 3000000
  br i1 %again, label %wait, label %work
work:
  call void @fast(ptr %buffers, i64 %begin, i64 %end, ptr %scratch)
  ret void
}}
"""
KINDS = (*_BODIES, "unwritten", "forever", "slow", "garbage", "greedy")
GREEDY_BYTES = 1 << 60  # of scratch memory: more than any machine has


@functools.cache
def object_code(kind: str) -> bytes:
    """Relocatable object code of one kind of kernel; the right ones compute x * x + 1."""
    if kind == "garbage":
        return b"\x7fELF not an object"
    if kind == "forever":
        text = _FOREVER
    elif kind == "slow":
        text = (
            _render("right").replace("@kernel", "@fast").replace("define void", "define internal void") + _SLOW.format()
        )
    else:
        text = _render("right" if kind in ("unwritten", "greedy") else kind, short=1 if kind == "unwritten" else 0)
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    module = binding.parse_assembly(text)
    module.verify()
    machine = binding.Target.from_default_triple().create_target_machine(opt=2, reloc="pic", codemodel="small")
    return machine.emit_object(module)


def _render(kind: str, short: int = 0) -> str:
    body, done = _BODIES[kind]
    return _HEADER.format(per_tile=SIZE // TILES, body=body, done=done, short=short)


def candidate(kind: str, label: str | None = None, **estimates: float) -> Candidate:
    """A candidate of one kind."""
    scratch = GREEDY_BYTES if kind == "greedy" else 0
    payload = object_payload(
        object_code(kind), "kernel", tiles=TILES, scratch_bytes=scratch, inputs=(AVAL,), outputs=(AVAL,)
    )
    return Candidate("object", payload, label or kind, **estimates)


def problem(*kinds: str, name: str = "square plus one", exports: bool = True) -> Problem:
    """The problem x * x + 1 with candidates of some kinds."""
    made = Problem(
        identity=name,
        inputs=(Input(SHAPE, "float32"),),
        outputs=(Output(SHAPE, "float32"),),
        candidates=tuple(candidate(kind) for kind in kinds),
        name=name,
    )
    if not exports:
        return made
    library, reference, perturb = _exports()
    return made.with_exports(library, reference, perturb)


@functools.cache
def _exports() -> tuple[bytes, bytes, bool]:
    import jax.numpy as jnp

    from jcuts.trace import jaxapi
    from jcuts.tune.baseline.xla_export import export_subset

    closed = jaxapi.closed_jaxpr_of(lambda x: x * x + 1, jnp.zeros(SHAPE, jnp.float32))
    exports = export_subset(closed)
    return exports.library, exports.reference, exports.perturb
