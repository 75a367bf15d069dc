"""An optimiser's updates as one kernel in place, and by XLA (run with ``-m gpu``)."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jcuts.pipeline import weight_prep
from jcuts.rewrite.backward import multi_tensor_update
from jcuts.trace import jaxapi
from jcuts.xla.cpu_ffi_call import call_kernel
from jcuts.xla.kernel_cache import kernel_for
from tests.rewrite import test_multi_tensor_update as updates

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("step", [updates.sgd, updates.adamw, updates.lion])
@pytest.mark.parametrize("donated", [True, False])
def test_a_kernel_updates_what_xla_updates(step, donated):
    """Where arguments are not donated XLA copies what the kernel overwrites: the arguments stay as they were."""
    made, _ = multi_tensor_update.multi_tensor_updates(updates.flat(step, updates.arguments(step)))
    (call,) = updates.calls_of(made)
    pairs = multi_tensor_update.in_place(call, made.jaxpr.invars)
    kernel = kernel_for(weight_prep._program(call))
    rng = np.random.default_rng(5)
    operands = [np.asarray(0.5 + rng.random(v.aval.shape), v.aval.dtype) for v in call.invars]
    (inside,) = (body for _, _, body in jaxapi.inner_jaxprs(call))
    wanted = jax.jit(lambda *xs: jaxapi.eval_closed(inside, *xs))(*operands)
    run = jax.jit(lambda *xs: call_kernel(kernel, *xs, aliases=pairs), donate_argnums=tuple(pairs) if donated else ())
    arrays = [jax.device_put(x) for x in operands]
    for got, want in zip(run(*arrays), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    for number, (array, operand) in enumerate(zip(arrays, operands, strict=True)):
        if not (donated and number in pairs):
            np.testing.assert_array_equal(array, operand)
