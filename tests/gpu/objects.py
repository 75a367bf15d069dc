"""CUDA images for tests, from hand-written PTX: kernels that compute x*x + 1, well-behaved and not."""

from __future__ import annotations

import numpy as np

from jcuts.codegen.cuda.toolchain import ptxas
from jcuts.codegen.cuda.toolchain.image import SYMBOL, Image, Launch
from jcuts.trace import jaxapi
from jcuts.tune.baseline.xla_export import with_exports
from jcuts.tune.problem import Candidate, Input, Output, Problem, object_payload
from jcuts.xla import cuda_launcher

SIZE, THREADS = 4096, 128
AVAL = ((SIZE,), "float32")
_PTX = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry square(.param .u64 x, .param .u64 y)
{{
  .reg .b32 %r<6>; .reg .b64 %rd<8>; .reg .f32 %f<4>; .reg .pred %p<2>;
  ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y];
  mov.u32 %r1, %ctaid.x; mov.u32 %r2, %tid.x; mov.u32 %r3, %ntid.x;
  mad.lo.s32 %r4, %r1, %r3, %r2;
  mul.wide.s32 %rd3, %r4, 4;
  add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
  ld.global.f32 %f1, [%rd4];
{body}
  st.global.f32 [%rd5], %f2;
  ret;
}}
"""
_RIGHT = "  fma.rn.f32 %f2, %f1, %f1, 0f3F800000;"
BODIES = {
    "right": _RIGHT,
    "wrong": "  add.f32 %f2, %f1, 0f3F800000;",
    "beside": _RIGHT + "\n  st.global.f32 [%rd5+16384], %f2;",
    "clobbers": _RIGHT + "\n  st.global.f32 [%rd4], %f2;",
    "illegal": _RIGHT + "\n  mov.u64 %rd6, 4096;\n  st.global.f32 [%rd6], %f2;",
    "hangs": _RIGHT
    + "\nSPIN:\n  ld.volatile.global.u32 %r5, [%rd1];\n  setp.ne.u32 %p1, %r5, 12345678;\n  @%p1 bra SPIN;",
    "trap": _RIGHT + "\n  trap;",
}


def image(name: str, arch: str) -> Image:
    """One of `BODIES`, assembled."""
    cubin = ptxas.assemble(_PTX.format(body=BODIES[name]), arch)
    launch = Launch("square", (SIZE // THREADS, 1, 1), (THREADS, 1, 1), ((0, 0), (1, 0)))
    return Image(arch, f"test {name}", (launch,), cubin)


def problem(names: list[str], device: str, arch: str) -> Problem:
    """x*x + 1 of 4096 numbers, with these candidates."""
    candidates = []
    for place, name in enumerate(names):
        payload = object_payload(
            image(name, arch).pack(), SYMBOL, tiles=1, scratch_bytes=0, inputs=(AVAL,), outputs=(AVAL,)
        )
        candidates.append(Candidate("object", payload, name, 1.0 - place / 100))
    closed = jaxapi.closed_jaxpr_of(lambda x: x * x + 1, np.zeros(SIZE, np.float32))
    bare = Problem(
        identity=f"square {' '.join(names)}",
        inputs=(Input((SIZE,), "float32"),),
        outputs=(Output((SIZE,), "float32"),),
        candidates=tuple(candidates),
        degree=2,
        name="square",
        device=device,
    )
    return with_exports(bare, closed, platform=bare.platform)


def is_called(compiled):
    """Whether XLA's program calls kernels of jcuts', alone or several in one call."""
    return any(f'"{target}"' in compiled.as_text() for target in (cuda_launcher.TARGET, cuda_launcher.CHAIN))
