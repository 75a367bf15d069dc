"""Agreement of baselines: what is read from compiled programs, and when two baselines count as equal."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from benchmarks.networks import baseline_agreement as agreement
from benchmarks.networks import workloads

HLO = """
  %a = (f32[64,64,112,112]{3,2,1,0}, u8[0]{0}) custom-call(%x, %w), custom_call_target="__cudnn$convForward", \
backend_config={"cudnn_conv_backend_config":{"activation_mode":"kNone","algorithm":{"algo_id":"67","math_type":"DEFAULT_MATH"}}}
  %b = (f32[64,64,56,56]{3,2,1,0}, u8[0]{0}) custom-call(%y, %v, %c), \
custom_call_target="__cudnn$convBiasActivationForward", \
backend_config={"cudnn_conv_backend_config":{"activation_mode":"kRelu","algorithm":{"algo_id":"51","math_type":"DEFAULT_MATH"}}}
  %d = f32[64,64,56,56]{3,2,1,0} fusion(%b), kind=kLoop, calls=%e
"""


def test_targets_epilogues_and_algorithms_of_convolutions():
    found = agreement.convolutions(HLO)
    assert found["targets"] == {"__cudnn$convForward kNone": 1, "__cudnn$convBiasActivationForward kRelu": 1}
    assert found["algorithms"] == {"67 DEFAULT_MATH": 1, "51 DEFAULT_MATH": 1}
    assert found["fusions"] == 1


def row(alone, raced, plain):
    sides = {"alone": {"plain": alone}, "comparison": {"raced": raced, "plain": plain, "jcuts": 0.5}}
    return {process: {"times": {s: [t, t, t] for s, t in times.items()}} for process, times in sides.items()}


def test_baselines_within_two_percent_agree():
    assert agreement.line("x", row(1.0, 1.019, 0.981)).endswith(": agree")
    assert agreement.line("x", row(1.0, 1.021, 1.0)).endswith("DISAGREE")
    assert agreement.line("x", row(1.0, 1.0, 0.97)).endswith("DISAGREE")


def test_what_was_not_measured_does_not_agree():
    only = {"alone": row(1.0, 1.0, 1.0)["alone"]}
    assert agreement.line("x", only) == "x: alone plain 1000.000 ms (1.000): not compared"
    without = {"comparison": row(1.0, 1.0, 1.0)["comparison"]}
    assert agreement.line("x", without).endswith(": not compared")
    assert agreement.verdict({}) == "not compared"


def test_fresh_batch_norms_compute_what_keras_makes():
    (fresh, (x,)), (trained, _) = (workloads.network("MobileNet", 1, size=32, fresh=fresh) for fresh in (True, False))
    a, b = np.asarray(fresh(x)), np.asarray(trained(x))
    assert np.isfinite(a).all() and np.isfinite(b).all() and not np.allclose(a, b)
    assert a.shape == b.shape == (1, 1000) and jnp.allclose(a.sum(), 1.0, atol=1e-3)
