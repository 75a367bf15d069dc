"""Chains of kernel calls: random programs on simulated memory, against every call for itself."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jcuts.codegen.artifact import CompiledKernel
from jcuts.codegen.cuda.toolchain.image import SYMBOL, Image, Launch
from jcuts.trace import jaxapi
from jcuts.xla import cuda_launcher
from jcuts.xla.chains import arena, peak_memory
from jcuts.xla.chains import fuse as chains_fuse

POISON = np.float32(-7e30)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setattr(cuda_launcher, "ensure_registered", lambda: None)
    monkeypatch.setattr(cuda_launcher, "add_kernel", lambda kernel: None)


class Fakes:
    """Kernels that are numpy functions of whole buffers, by digest."""

    def __init__(self):
        self.steps, self.shapes, self.inputs = {}, {}, {}

    def kernel(self, shapes, outs, *, scratch=0, part=0, seed=0):
        """A sum with weights; ``part``: elements of the first result that are written, 0 for all."""
        digest = f"k{len(self.steps)}"
        weights = np.random.default_rng(seed).standard_normal((len(outs), len(shapes))).astype(np.float32)

        def run(operands, results, memory):
            if scratch:
                assert memory.nbytes >= scratch
                memory[: scratch // 4] = POISON  # whatever lives there dies
            before = [x.copy() for x in operands]
            values = [[w * x.sum() + w for w, x in zip(ws, operands, strict=True)] for ws in weights]
            for k, (value, out) in enumerate(zip(values, results, strict=True)):
                count = part if part and k == 0 else out.size
                out.reshape(-1)[:count] = sum(value) + np.arange(count, dtype=np.float32)
            only_read = len(operands) - bool(part)  # the last one is updated in place
            for old, new in zip(before[:only_read], operands, strict=False):
                np.testing.assert_array_equal(old, new)  # its blocks may read while others write

        self.steps[digest] = run
        image = Image("sm_90", "r", (Launch("k", (1, 1, 1), (32, 1, 1), ()),), b"x")
        ins = tuple((s, "float32") for s in shapes)
        return CompiledKernel(digest, SYMBOL, image.pack(), 1, scratch, ins, tuple((s, "float32") for s in outs))

    def evaluate(self, closed, args):
        """The jaxpr, with calls on simulated memory: results and scratch memory hold poison at first."""
        jaxpr = closed.jaxpr
        env = dict(zip(jaxpr.constvars, closed.consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))

        def read(atom):
            return np.asarray(atom.val if jaxapi.is_literal(atom) else env[atom])

        for eqn in jaxpr.eqns:
            values = [read(a) for a in eqn.invars]
            if jaxapi.primitive_name(eqn) != "ffi_call":
                outs = jaxapi.bind_eqn(eqn, values)
            else:
                outs = self._call(eqn, values)
            env.update(zip(eqn.outvars, map(np.asarray, outs), strict=True))
        return [read(a) for a in jaxpr.outvars]

    def _call(self, eqn, values):
        poison = {np.dtype(np.float32): POISON, np.dtype(np.uint8): 0xDB}
        outs = [np.full(v.aval.shape, poison[v.aval.dtype], v.aval.dtype) for v in eqn.outvars]
        for operand, result in eqn.params["input_output_aliases"] or ():
            outs[result] = values[operand] = values[operand].copy()
        attributes = dict(eqn.params["attributes"])
        before = [v.copy() for v in values]
        if eqn.params["target_name"] == cuda_launcher.TARGET:
            count = int(attributes["num_outputs"])
            first = outs[0].reshape(-1)[int(attributes["start"]) // 4 :]
            memory = outs[count].view(np.float32) if len(outs) > count else np.zeros(0, np.float32)
            self.steps[attributes["digest"]](values, [first, *outs[1:count]], memory)
        else:
            self._chain(attributes, values, outs)
        aliased = {k for k, _ in eqn.params["input_output_aliases"] or ()}
        for k, (old, new) in enumerate(zip(before, values, strict=True)):
            assert k in aliased or np.array_equal(old, new)  # operands are only read
        return outs

    def _chain(self, attributes, values, outs):
        wiring = [int(n) for n in np.asarray(getattr(attributes["wiring"], "val", attributes["wiring"]))]
        scratch = outs[-1].view(np.uint8) if int(attributes["scratch_bytes"]) else np.zeros(0, np.uint8)
        at = 0
        for digest in str(attributes["digests"]).split():
            count, own = wiring[at], wiring[at + 1]
            buffers = []
            for k in range(count):
                kind, number, start = wiring[at + 2 + 3 * k : at + 5 + 3 * k]
                assert start % 16 == 0
                base = (values, outs, [scratch])[kind][number]
                buffers.append(base.reshape(-1).view(np.uint8)[start:])
            at += 2 + 3 * count
            shapes = self.shapes[digest]
            arrays = [b[: 4 * n].view(np.float32) for b, n in zip(buffers, shapes, strict=True)]
            inputs, memory = self.inputs[digest], scratch[own:].view(np.float32)
            self.steps[digest](arrays[:inputs], arrays[inputs:], memory)
        assert at == len(wiring)


def _random_program(seed):
    """(the fakes, a closed jaxpr of kernel calls, reshapes and sums, arguments)"""
    rng = np.random.default_rng(seed)
    fakes = Fakes()

    def kernel(shapes, outs, **how):
        made = fakes.kernel(shapes, outs, **how, seed=int(rng.integers(1 << 30)))
        sizes = [int(np.prod(s)) for s in (*shapes, *outs)]
        part = how.get("part", 0)
        fakes.shapes[made.digest] = sizes if not part else [*sizes[: len(shapes)], part, *sizes[len(shapes) + 1 :]]
        fakes.inputs[made.digest] = len(shapes)
        return made

    def function(*xs):
        values = list(xs)
        for _ in range(int(rng.integers(3, 16))):
            kind = rng.integers(7)
            picked = [values[int(k)] for k in rng.integers(len(values), size=int(rng.integers(1, 4)))]
            if kind <= 2:
                outs = [(int(rng.integers(1, 5)), 4 * int(rng.integers(1, 5))) for _ in range(int(rng.integers(1, 3)))]
                made = kernel([x.shape for x in picked], outs, scratch=int(rng.integers(2)) * 64)
                values += cuda_launcher.call_kernel(made, *picked)
            elif kind <= 4 and values[-1].size >= 8:
                whole = values[-1] if rng.integers(2) else picked[0]
                if whole.size < 8:
                    continue
                start = 4 * int(rng.integers(0, whole.size // 4))
                made = kernel([*(x.shape for x in picked), whole.shape], [whole.shape], part=min(4, whole.size - start))
                values += cuda_launcher.call_kernel(made, *picked, whole, place=(len(picked), 4 * start))
            elif kind == 5:
                values.append(picked[0].reshape(-1, *picked[0].shape[:-1]))
            else:
                values.append(picked[0] * 0.5)
        return [values[int(k)] for k in rng.integers(len(values), size=3)] + [values[-1]]

    args = [rng.standard_normal((2, 8)).astype(np.float32) for _ in range(2)]
    return fakes, jaxapi.closed_jaxpr_of(function, *args), args


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_chains_compute_what_single_calls_do(first):
    merged = 0
    for seed in range(first, first + 50):
        fakes, closed, args = _random_program(seed)
        closed = jaxapi.dce(closed)
        after = chains_fuse.fuse_calls(closed)
        jaxapi.check(after)
        assert len(after.jaxpr.outvars) == len(closed.jaxpr.outvars)
        merged += chains_fuse.calls(closed) - chains_fuse.calls(after)
        for want, got in zip(fakes.evaluate(closed, args), fakes.evaluate(after, args), strict=True):
            np.testing.assert_array_equal(want, got)
    assert merged > 50


def test_kernels_between_which_nothing_stands_are_one_call():
    fakes = Fakes()
    a = fakes.kernel([(2, 8)], [(2, 8)])
    b = fakes.kernel([(16,)], [(16,)])

    def function(x):
        (y,) = cuda_launcher.call_kernel(a, x)
        (z,) = cuda_launcher.call_kernel(b, y.reshape(16))
        (w,) = cuda_launcher.call_kernel(b, z)
        return w + 1

    after = chains_fuse.fuse_calls(jaxapi.closed_jaxpr_of(function, jax.ShapeDtypeStruct((2, 8), np.float32)))
    names = [e.params.get("target_name", jaxapi.primitive_name(e)) for e in after.jaxpr.eqns]
    assert names == [cuda_launcher.CHAIN, "add"]
    assert chains_fuse.note(after) == "3 kernels that can follow each other run in one call (of 3)"
    attributes = dict(after.jaxpr.eqns[0].params["attributes"])
    assert attributes["digests"] == "k0 k1 k1 " and int(attributes["scratch_bytes"]) > 0


def test_kernels_of_chains_count_as_often_as_they_run():
    fakes = Fakes()
    kernel = fakes.kernel([(2, 8)], [(2, 8)])

    def pair(x, _=None):
        return cuda_launcher.call_kernel(kernel, *cuda_launcher.call_kernel(kernel, x))[0], None

    def chained(function):
        closed = jaxapi.closed_jaxpr_of(function, jax.ShapeDtypeStruct((2, 8), np.float32))
        for eqn in closed.jaxpr.eqns:
            bodies = [chains_fuse.fuse_calls(body) for _, _, body in jaxapi.inner_jaxprs(eqn)]
            closed = jaxapi.with_eqns(
                closed, [jaxapi.with_inner_jaxprs(e, bodies) if e is eqn else e for e in closed.jaxpr.eqns]
            )
        return chains_fuse.fuse_calls(closed)

    twice = chained(lambda x: jax.lax.scan(pair, pair(x)[0], length=50)[0])
    assert chains_fuse.joined(twice) == 2 + 50 * 2 and "4 kernels" in str(chains_fuse.note(twice))
    never = chained(lambda x: jax.lax.scan(pair, x, length=0)[0])
    assert chains_fuse.joined(never) == 0
    loop = chained(lambda x: jax.lax.while_loop(lambda c: c[0, 0] < 9, lambda c: pair(c)[0], x))
    assert chains_fuse.joined(loop) == float("inf")
    assert chains_fuse.joined(chained(lambda x: cuda_launcher.call_kernel(kernel, x)[0])) == 0


def test_a_kernel_that_also_reads_what_it_overwrites_gets_its_old_value():
    fakes = Fakes()
    viewed = fakes.kernel([(16,), (2, 8)], [(2, 8)], part=8)
    twice = fakes.kernel([(2, 8), (16,), (2, 8)], [(2, 8)], part=8)
    first = fakes.kernel([(2, 8)], [(2, 8)])
    fakes.shapes, fakes.inputs = {"k0": [16, 16, 8], "k1": [16, 16, 16, 8], "k2": [16, 16]}, {"k0": 2, "k1": 3, "k2": 1}

    def function(x, y):
        (x,) = cuda_launcher.call_kernel(first, x)
        (a,) = cuda_launcher.call_kernel(viewed, x.reshape(16), x, place=(1, 0))
        (b,) = cuda_launcher.call_kernel(twice, a, y.reshape(16), a, place=(2, 0))
        (c,) = cuda_launcher.call_kernel(first, b)
        return c

    args = [np.arange(16, dtype=np.float32).reshape(2, 8) + k for k in range(2)]
    closed = jaxapi.dce(jaxapi.closed_jaxpr_of(function, *args))
    after = chains_fuse.fuse_calls(closed)
    jaxapi.check(after)
    np.testing.assert_array_equal(fakes.evaluate(closed, args)[0], fakes.evaluate(after, args)[0])


def test_chains_take_little_more_memory_than_calls(monkeypatch):
    """Results that are reduced one by one, operands that are made one by one."""
    fakes = Fakes()
    large, count = 1 << 20, 16
    grow = fakes.kernel([(4,)], [(large,)])
    shrink = fakes.kernel([(large,)], [(4,)])

    def function(x):
        total = x
        for k in range(count):
            (wide,) = cuda_launcher.call_kernel(grow, x + k)
            (y,) = cuda_launcher.call_kernel(shrink, jax.numpy.sort(wide))
            total = total + y
        return total

    closed = jaxapi.closed_jaxpr_of(function, jax.ShapeDtypeStruct((4,), np.float32))
    single = peak_memory.bytes_of(closed, chains_fuse.VIEWS)
    assert 8 * large <= single < 9 * large
    free = chains_fuse.fuse_calls(closed)
    assert peak_memory.bytes_of(free, chains_fuse.VIEWS) >= 4 * large * count and chains_fuse.calls(free) == 0
    for room in (0, 20 * large):
        monkeypatch.setattr(chains_fuse, "MORE_BYTES", room)
        after = chains_fuse.fuse_calls(closed)
        jaxapi.check(after)
        assert peak_memory.bytes_of(after, chains_fuse.VIEWS) <= single + max(room, single * chains_fuse.MORE_SHARE)
    assert any(e.params.get("target_name") == cuda_launcher.CHAIN for e in after.jaxpr.eqns)


@pytest.mark.parametrize("halvings", [1, 2, 99])
@pytest.mark.parametrize("seed", range(40))
def test_parts_of_a_function_are_chained_by_themselves(halvings, seed, monkeypatch):
    """Halves, quarters, and single calls: what is left where there is no memory to spare."""
    fakes, closed, args = _random_program(seed)
    closed = jaxapi.dce(closed)
    monkeypatch.setattr(chains_fuse, "MORE_BYTES", 0)
    monkeypatch.setattr(chains_fuse, "MORE_SHARE", 0.0)
    limits = iter([0, *[1] * halvings])
    monkeypatch.setattr(peak_memory, "bytes_of", lambda closed, views: next(limits, 0))
    after = chains_fuse.fuse_calls(closed)
    jaxapi.check(after)
    for want, got in zip(fakes.evaluate(closed, args), fakes.evaluate(after, args), strict=True):
        np.testing.assert_array_equal(want, got)


@pytest.mark.parametrize("seed", range(20))
def test_values_that_live_together_lie_apart(seed):
    rng = np.random.default_rng(seed)
    spans = []
    for _ in range(40):
        begin = int(rng.integers(30))
        spans.append((begin, begin + int(rng.integers(6)), int(rng.integers(1, 3000))))
    offsets, size = arena.assign_offsets(spans)
    for k, (begin, end, length) in enumerate(spans):
        assert offsets[k] % arena.ALIGNMENT == 0 and offsets[k] + length <= size
        for n in range(k):
            first, last, other = spans[n]
            together = first <= end and begin <= last
            assert not together or offsets[k] + length <= offsets[n] or offsets[n] + other <= offsets[k]
    most = max(sum(n for b, e, n in spans if b <= step <= e) for step in range(40))
    assert most <= size <= 1.5 * most + 40 * arena.ALIGNMENT
