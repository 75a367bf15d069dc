"""Accuracy check of rewritten whole programs against a float64 run of the user's function."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jcuts.base.errors import summary
from jcuts.jit.accuracy.result_norms import all_norms, kept
from jcuts.jit.variant_names import form_of, is_xla
from jcuts.rewrite.matmul_patterns import CONVOLUTION, DOT
from jcuts.trace import jaxapi
from jcuts.tune.verify.float64_eval import evaluate, widened_dtype
from jcuts.tune.verify.tolerances import ELEMENT_FACTOR, FLOOR_ULP
from jcuts.xla import devices as xla_devices

log = logging.getLogger("jcuts")

_CANCELS = "zero but for rounding"
"""Role of the outputs that are sums of terms which cancel."""
NO_AUTOTUNE: dict[str, Any] = {
    "xla_gpu_autotune_level": 0
}  # the float64 program runs once: nothing is worth tuning in it


class Float64Judge:
    """Judges rewritten programs by a float64 run of the user's program, which is made on first use.

    With e(a) = |a - r| / |r| in L2 norm over an output and m(a) = max |a - r| / rms(r), a result c is right where
        e(c) <= tolerance * e(xla) + floor   and   m(c) <= 4 tolerance * m(xla) + floor,
    with floor = 4 eps sqrt(longest sum of products), and e(xla), m(xla) the largest of all outputs of the same role and
    magnitude (`output_roles`): an optimiser divides a gradient near zero by its own size, and in which of the layers
    that rounds to the other sign is chance.

    A sum that cancels (the gradient of a bias that a batch norm takes away again) is zero but for rounding, in float64
    as well: there e is the ratio of two roundings, which is comparable between magnitudes and shapes, and its size in
    one output is chance.  Outputs with e(xla) > 1 / sqrt(eps) are therefore alike, whatever their role.

    Args:
        closed: the user's program; leaves: its arguments; tolerance: as a multiple of XLA's own error.
        roles: of every output, those of one role are alike; by default each is its own.
    Attributes:
        of_every_form: whether programs without rewrites of their own are judged too: all have some of a training step.
    """

    def __init__(
        self,
        closed: jaxapi.Closed,
        leaves: Sequence[Any],
        tolerance: float,
        platform: str,
        roles: Sequence[str] = (),
    ) -> None:
        self.closed, self.leaves, self.tolerance, self.platform = closed, leaves, tolerance, platform
        self.roles = tuple(roles) or tuple(map(str, range(len(closed.jaxpr.outvars))))
        self.of_every_form = False
        self._reference: list[Any] | None = None
        self._program: Any = None
        self._failure = ""
        self._ahead: threading.Thread | None = None

    @property
    def failure(self) -> str:
        """Why there are no float64 results, '' where there are, or where nobody asked."""
        return self._failure

    def at(self, leaves: Sequence[Any]) -> Float64Judge:
        """The judge of other arguments of the same types, with the same compiled program."""
        other = Float64Judge(self.closed, leaves, self.tolerance, self.platform, self.roles)
        self._wait()
        if self._program is None:
            with jax.enable_x64(True):
                self._program = self._wide()[0]
        other._program = self._program
        return other

    def __call__(self, name: str, xla: Any, result: Any) -> str | None:
        """Why a program's result is not good enough, None if it is (or if nothing was rewritten)."""
        if is_xla(name):
            return None
        form = form_of(name)
        rewritten = self.of_every_form or (form is not None and form.rewrites)
        return self.compare(xla, result) if rewritten else None

    def compare(self, xla: Any, result: Any) -> str | None:
        """Why a result is further from float64 than plain XLA's allows, None if it is not."""
        reference = self.reference()
        if reference is None:
            return f"it cannot be checked against float64: {self._failure}"
        for row in self.errors(jax.tree.leaves(xla, is_leaf=lambda x: x is None), jax.tree.leaves(result)):
            if not row.error <= row.limit:
                return f"output {row.output} {row}"
        return None

    def errors(self, xla: Sequence[Any], result: Sequence[Any]) -> list[ErrorRow]:
        """Errors of every floating output by both measures, with their limits; the float64 results are there.

        Args: xla: plain XLA's results, None for outputs without numbers. Outputs that are zero everywhere are left out.
        """
        floor = FLOOR_ULP * math.sqrt(longest_sum(self.closed))
        found: list[tuple[tuple[str, int, str], ErrorRow, float]] = []
        groups = {
            output: (r, c, x)
            for output, (r, x, c) in enumerate(zip(self.reference() or (), xla, result, strict=True))
            if x is not None and jnp.issubdtype(c.dtype, np.floating)
        }
        for (output, (_, c, _)), apart in zip(groups.items(), all_norms(list(groups.values())), strict=True):
            if not apart.size:
                continue
            least, decade = floor * float(jnp.finfo(c.dtype).eps), math.floor(math.log10(apart.rms))
            for measure, factor, unit, (mine, theirs) in (
                ("in L2 norm", 1.0, apart.size, apart.errors),
                ("in one element", ELEMENT_FACTOR, apart.rms, apart.largest),
            ):
                cancels = theirs / unit > 1.0 / math.sqrt(float(jnp.finfo(c.dtype).eps))
                key = (_CANCELS, 0, measure) if cancels else (self.roles[output], decade, measure)
                found.append((key, ErrorRow(output, measure, mine / unit, theirs / unit, least), factor))
        worst: dict[tuple[str, int, str], float] = {}
        for key, row, _ in found:
            worst[key] = max(worst.get(key, 0.0), row.xla)
        return [row._replace(limit=factor * self.tolerance * worst[key] + row.limit) for key, row, factor in found]

    def reference(self) -> list[Any] | None:
        """The float64 results, None where they cannot be had."""
        if self._reference is None and not self._failure:
            start = time.perf_counter()
            try:
                self._reference = self._run()
                log.info("the program in float64: %.2f s", time.perf_counter() - start)
            except Exception as error:  # memory, a primitive without a float64 form: then no rewrite is trusted
                self._failure = summary(error)
        return self._reference

    def compile_ahead(self) -> None:
        """Begins to compile the float64 program on a thread of its own, beside XLA's other compilations."""

        def compiled() -> None:
            try:
                self._compile()
            except Exception as error:  # `compile` meets it again
                log.info("the program in float64 is not compiled ahead: %s", summary(error))

        self._ahead = threading.Thread(target=compiled, name="jcuts-float64", daemon=True)
        self._ahead.start()

    def compile(self) -> None:
        """Compiles the float64 program, which takes longer than its run, or waits for that."""
        self._wait()
        if self._program is None:
            self._compile()

    def _wait(self) -> None:
        if self._ahead is not None:
            self._ahead.join()

    def _compile(self) -> None:
        with jax.enable_x64(True):
            program, operands = self._wide()
            self._program = program.lower(operands).compile()

    def precompute(self) -> None:
        """Makes the float64 results if that can be done now; else it is tried again when they are needed."""
        if self.reference() is None:
            self._failure = ""

    def _run(self) -> list[np.ndarray]:
        self._wait()
        with jax.enable_x64(True):
            program, operands = self._wide()
            return kept((self._program or program)(operands))

    def _wide(self) -> tuple[Any, tuple[Any, ...]]:
        """The float64 program, jitted, and its operands."""
        jaxpr, consts = self.closed.jaxpr, self.closed.consts
        # Constants as arguments: XLA would fold them, slowly, into a program that runs once.
        opened = jaxapi.make_closed(
            [], [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns, [], like=self.closed
        )
        lean = NO_AUTOTUNE if self.platform in xla_devices.NAMES else None
        operands = (*consts, *self.leaves)
        wide = [widened_dtype(jnp.result_type(x)) for x in operands]

        def program(xs: Sequence[Any]) -> list[Any]:  # one by one outside they would be a program each
            return evaluate(opened, [jnp.asarray(x, dtype) for x, dtype in zip(xs, wide, strict=True)])

        return jax.jit(program, compiler_options=lean), operands


class ErrorRow(NamedTuple):
    """Error of one output against float64: the program's, XLA's, and the program's limit."""

    output: int
    measure: str
    error: float
    xla: float
    limit: float

    def __str__(self) -> str:
        return (
            f"is off by {self.error:.3g} of float64 {self.measure}, allowed {self.limit:.3g} (XLA's own error is "
            f"{self.xla:.3g})"
        )


def output_roles(outputs: Any) -> tuple[str, ...]:
    """What the outputs of a function stand for, in order: those of one role share the error that XLA makes in any.

    Outputs of one type and shape whose paths differ by names and places of layers alone are of one role: in which layer
    an optimiser's first step, the sign of a gradient near zero, flips in rounding is chance.  The first step into the
    tree counts, and so do attributes: parameters and the optimiser's states (``.mu``, ``.nu``) are not alike.

    Args: outputs: a tree of arrays or of their types.
    """
    return tuple(
        " ".join(
            [
                *map(str, path[:1]),
                *(str(k) for k in path[1:] if isinstance(k, jax.tree_util.GetAttrKey)),
                f"{x.dtype}{x.shape}",
            ]
        )
        for path, x in jax.tree_util.tree_flatten_with_path(outputs)[0]
    )


def longest_sum(closed: jaxapi.Closed) -> int:
    """Most products that one convolution or matrix product of a program sums up, at least 1."""
    longest = 1
    for eqn in closed.jaxpr.eqns:
        name = jaxapi.primitive_name(eqn)
        if name == CONVOLUTION:
            weights, spec = eqn.invars[1].aval, eqn.params["dimension_numbers"].rhs_spec
            longest = max(longest, weights.size // max(1, weights.shape[spec[0]]))
        elif name == DOT:
            contracted = eqn.params["dimension_numbers"][0][0]
            longest = max(longest, math.prod(eqn.invars[0].aval.shape[d] for d in contracted))
        for _, _, body in jaxapi.inner_jaxprs(eqn):
            longest = max(longest, longest_sum(body))
    return longest
