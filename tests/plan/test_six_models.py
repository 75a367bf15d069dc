"""Models of one's own, as a new user writes them: what the planner makes of each."""

import importlib.util

import pytest

from benchmarks.planner import six_models
from jcuts.plan.cost import traced_model
from jcuts.plan.search.exhaustive import search
from jcuts.plan.search.plan_space import Space
from jcuts.plan.spec import cluster
from jcuts.plan.spec.workload import SOFTWARE, Training

H100 = cluster.load("dgx-h100")


def _needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@pytest.mark.parametrize(
    ("name", "layers", "parameters"),
    [
        pytest.param("flax_transformer", 12, 46.0e6, marks=_needs("flax")),
        pytest.param("equinox_mlp", 7, 8.16e6, marks=_needs("equinox")),
        ("scan_over_layers", 24, 367.5e6),
        ("mixture_of_experts", 8, 134.2e6),
        ("dlrm", None, 3330e6),
        ("u_net", None, 7.78e6),
    ],
)
def test_a_model_of_ones_own_is_planned(name, layers, parameters):
    made = traced_model.model(*getattr(six_models, name)(), name=name)
    assert made.total_parameters == pytest.approx(parameters, rel=0.01)
    if layers:
        assert made.layers == layers
    work = Training(made.batch, **SOFTWARE["jax"])
    best = search(made, H100, work, gpus=8, space=Space(offload=()), explain=0).best
    assert best.plan.gpus == 8 and best.seconds > 0
    if name == "dlrm":
        assert best.plan.table * best.plan.row == 8
