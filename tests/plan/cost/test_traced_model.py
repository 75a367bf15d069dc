"""Users' functions as models: loops over layers and over time, stacked parameters, training steps, embedding tables."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from benchmarks.planner import six_models
from jcuts.base.errors import UsageError
from jcuts.plan.cost import spmd_step, traced_model
from jcuts.plan.cost.compute import gemm_time
from jcuts.plan.cost.jaxpr import products_of
from jcuts.plan.cost.repetition import Run, runs
from jcuts.plan.cost.training_step import estimate
from jcuts.plan.search.exhaustive import search
from jcuts.plan.search.no_plan import NoPlanError
from jcuts.plan.search.plan import Plan, Plans
from jcuts.plan.search.plan_space import Space
from jcuts.plan.search.ranked import cost_plans
from jcuts.plan.spec import cluster
from jcuts.plan.spec.layers import Gemm, Stream
from jcuts.plan.spec.workload import SOFTWARE, Training

H100 = cluster.load("dgx-h100")
LAYERS, HIDDEN, WIDE = 48, 8192, 32768


def _struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def _layer(x, up, down):
    return x + jax.nn.gelu(x @ up) @ down


def _scanned(params, x):
    return jax.lax.scan(lambda c, w: (_layer(c, *w), None), x, params)[0]


def _indexed(params, x):
    for i in range(params[0].shape[0]):
        x = _layer(x, params[0][i], params[1][i])
    return x


def _fori(params, x):
    return jax.lax.fori_loop(0, params[0].shape[0], lambda i, c: _layer(c, params[0][i], params[1][i]), x)


def _unrolled(params, x):
    for up, down in params:
        x = _layer(x, up, down)
    return x


STACKED = (_struct(LAYERS, HIDDEN, WIDE), _struct(LAYERS, WIDE, HIDDEN))
SEPARATE = [(_struct(HIDDEN, WIDE), _struct(WIDE, HIDDEN))] * LAYERS
INPUT = _struct(16, 1024, HIDDEN)
WORK = Training(512, **SOFTWARE["jax"])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def unrolled():
    return traced_model.model(_unrolled, SEPARATE, INPUT)


@pytest.mark.parametrize("form", [_scanned, _indexed, _fori], ids=["scan", "python loop", "fori_loop"])
def test_a_scan_over_layers_is_that_many_layers(unrolled, form):
    """48 layers of 8192/32768: stacked parameters are cut along the stack; time and memory as of separate layers."""
    made = traced_model.model(form, STACKED, INPUT)
    assert made.layers == unrolled.layers == LAYERS
    assert made.total_parameters == unrolled.total_parameters == 2 * LAYERS * HIDDEN * WIDE
    assert max(block.total_parameters for block in made.blocks) == 2 * HIDDEN * WIDE
    where = H100.resized(32)
    space = Space(offload=(), zero=(0, 1), schedules=("1f1b",))
    ours, theirs = (search(each, where, WORK, space=space, explain=0).best for each in (made, unrolled))
    assert ours.plan == theirs.plan
    assert ours.seconds == pytest.approx(theirs.seconds, rel=0.02)
    for plan in (Plan(data=2, pipeline=16), Plan(data=4, pipeline=8, zero=1), Plan(data=32, micro=2, recompute="full")):
        a, b = (cost_plans(each, where, [plan], WORK)[0] for each in (made, unrolled))
        assert a.seconds == pytest.approx(b.seconds, rel=0.02)
        assert a.memory["gpu"] == pytest.approx(b.memory["gpu"], rel=0.02)


def test_a_remat_scan_with_embedding_and_head_is_layers_between_two_edges():
    def loss(params, tokens):
        x = params["embed"][tokens]
        body = jax.checkpoint(lambda c, w: (_layer(c, *w), None))
        x = jax.lax.scan(body, x, params["layers"])[0]
        return jnp.mean(jax.nn.logsumexp(x @ params["head"], -1))

    params = {"embed": _struct(1000, 256), "layers": (_struct(6, 256, 512), _struct(6, 512, 256))}
    made = traced_model.model(loss, params | {"head": _struct(256, 1000)}, _struct(8, 64, dtype=jnp.int32))
    assert made.layers == 6 and made.embed is not None and made.head is not None
    assert made.embed.total_parameters == made.head.total_parameters == 256 * 1000
    assert made.blocks[0].boundary == 2 * 64 * 256 and made.tables == ()


def _gru(params, x):
    def cell(h, now):
        gates = jax.nn.sigmoid(now @ params["wx"] + h @ params["wh"])
        new = jnp.tanh(now @ params["cx"] + h @ params["ch"])
        return gates * h + (1 - gates) * new, None

    return jax.lax.scan(cell, jnp.zeros((x.shape[0], 512), x.dtype), jnp.moveaxis(x, 1, 0))[0] @ params["out"]


GRU = {name: _struct(512, 512) for name in ("wx", "wh", "cx", "ch")} | {"out": _struct(512, 32)}


def test_a_scan_over_time_is_never_cut_into_stages():
    made = traced_model.model(_gru, GRU, _struct(32, 100, 512))
    recurrent = [b for b in (*made.blocks, made.head) if b is not None and b.total_parameters >= 4 * 512 * 512]
    assert len(recurrent) == 1 and recurrent[0].count == 1
    assert recurrent[0].forward_flops == 100 * 4 * 2 * 512 * 512
    best = search(made, H100, Training(33), gpus=3, space=Space(offload=())).best
    assert best.plan.pipeline == 1 and best.plan.data == 3
    with pytest.raises(UsageError, match="fewer than 3 stage chunks"):
        cost_plans(made, H100.resized(3), [Plan(pipeline=3)], Training(33))


def test_layers_that_scan_over_time_are_cut_between_layers():
    def stacked(params, x):
        for layer in params:
            state = jnp.zeros((x.shape[0], 64), x.dtype)
            cell = lambda h, now, w=layer: ((h2 := jnp.tanh(now @ w["x"] + h @ w["h"])), h2)  # noqa: E731
            x = jnp.moveaxis(jax.lax.scan(cell, state, jnp.moveaxis(x, 1, 0))[1], 0, 1)
        return x

    params = [{"x": _struct(64, 64), "h": _struct(64, 64)}] * 5
    made = traced_model.model(stacked, params, _struct(8, 20, 64))
    assert made.layers == 5 and made.blocks[0].total_parameters == 2 * 64 * 64


def _loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)


def _step(params, x, y):
    value, gradients = jax.value_and_grad(_loss)(params, x, y)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)


@pytest.mark.parametrize("step", [_step, jax.grad(_loss)], ids=["update", "gradients"])
def test_a_whole_training_step_is_recognised(step):
    params = {"a": _struct(64, 128), "b": _struct(128, 8)}
    with pytest.raises(UsageError, match=r"whole training step.*give the loss function"):
        traced_model.model(step, params, _struct(32, 64), _struct(32, 8), name="mine")
    assert traced_model.model(_loss, params, _struct(32, 64), _struct(32, 8)).total_parameters == 64 * 128 + 128 * 8


TABLES, ROWS, WIDTH = 8, 4_000_000, 1024


def _dlrm(params, dense, ids):
    found = [table[ids[:, i]].sum(1) for i, table in enumerate(params["tables"])]
    x = jnp.concatenate([jax.nn.relu(dense @ params["bottom"]), *found], -1)
    for w in params["top"]:
        x = jax.nn.relu(x @ w)
    return x


DLRM = {
    "tables": [_struct(ROWS, WIDTH)] * TABLES,
    "bottom": _struct(13, WIDTH),
    "top": [_struct((TABLES + 1) * WIDTH, 1024), _struct(1024, 1024), _struct(1024, 1)],
}


def test_embedding_tables_are_divided_by_tables_and_rows():
    """66 GB of tables, 590 GB with gradients and Adam's state, on GPUs of 80 GB: only divided they fit."""
    made = traced_model.model(_dlrm, DLRM, _struct(256, 13), _struct(256, TABLES, 4, dtype=jnp.int32))
    assert made.tables == (float(ROWS * WIDTH),) * TABLES
    assert made.lookup_rows == 2 * TABLES * 4 * WIDTH and made.lookup_pooled == 2 * TABLES * WIDTH
    work, where = Training(4096), H100.resized(16)
    best = search(made, where, work, space=Space(offload=())).best
    assert best.plan.table * best.plan.row == 16 and best.parts["embedding"] > 0
    assert best.memory["gpu"] <= where.gpu.memory
    bare = replace(made, blocks=tuple(replace(b, tables=(), replicated=b.total_parameters) for b in made.blocks))
    with pytest.raises(NoPlanError):
        search(bare, where, work, space=Space(offload=(), zero=(0,)))
    tables, rows = (cost_plans(made, where, [Plan(data=16, micro=256, table=t, row=16 // t)], work)[0] for t in (8, 1))
    assert tables.gpu_parts["parameters"] == pytest.approx(rows.gpu_parts["parameters"], rel=0.01)
    pooled = cost_plans(made, where.resized(8), [Plan(data=8, micro=512, table=8)], work)[0]
    unpooled = cost_plans(made, where.resized(8), [Plan(data=8, micro=512, row=8)], work)[0]
    assert unpooled.parts["embedding"] > 1.3 * pooled.parts["embedding"]


def test_whole_tables_of_unequal_sizes_fill_ranks_unequally():
    block = replace(traced_model.model(_gru, GRU, _struct(4, 8, 512)).blocks[0], tables=(5.0, 3.0, 2.0, 2.0))
    made = replace(traced_model.model(_gru, GRU, _struct(4, 8, 512)), blocks=(block,))
    assert made.largest_share(1) == 1 and made.largest_share(2) == 7 / 12 and made.largest_share(4) == 5 / 12


def test_repeated_layers_are_found_in_any_sequence():
    assert runs("xabcabcaby", [1.0] * 10) == [Run(1, 3, 2)]
    assert runs("aabb", [1, 1, 5, 5]) == [Run(0, 1, 2), Run(2, 1, 2)]
    assert runs("abcd", [1.0] * 4) == [] == runs("", [])
    assert runs("aaaa", [0.0] * 4) == []  # no work, no layers


def test_parameters_may_be_a_module_with_functions_in_it():
    """An equinox module is a tree with functions and flags among its leaves."""
    net = {"w": _struct(64, 128), "activation": jnp.tanh, "out": _struct(128, 8), "scale": 2}
    made = traced_model.model(lambda m, x: m["activation"](x @ m["w"]) @ m["out"] * m["scale"], net, _struct(32, 64))
    assert made.total_parameters == 64 * 128 + 128 * 8


def test_a_u_net_hands_its_skip_connections_on():
    def net(params, x):
        kept = []
        for i, w in enumerate(params["down"]):
            x = jax.nn.relu(x @ w)
            kept += [x] if i < 2 else []
        for w in params["up"]:
            x = jax.nn.relu(jnp.concatenate([x, kept.pop()], -1) @ w)
        return x

    params = {"down": [_struct(16, 32), _struct(32, 64), _struct(64, 64)], "up": [_struct(128, 32), _struct(64, 16)]}
    made = traced_model.model(net, params, _struct(8, 10, 16))
    assert made.layers >= 4 and made.total_parameters == 16 * 32 + 32 * 64 + 64 * 64 + 128 * 32 + 64 * 16
    # The two values that the other side needs, and the running one: more than the running one alone.
    assert max(block.boundary for block in made.blocks) >= 2 * 10 * (32 + 64)


def test_depthwise_convolutions_are_bound_by_memory():
    def net(params, x):
        form = jax.lax.conv_dimension_numbers(x.shape, params["w"].shape, ("NHWC", "HWIO", "NHWC"))
        return jax.lax.conv_general_dilated(
            x, params["w"], (1, 1), "SAME", dimension_numbers=form, feature_group_count=64
        )

    made = traced_model.model(net, {"w": _struct(3, 3, 1, 64)}, _struct(8, 16, 16, 64))
    assert made.forward_flops == 0 and made.blocks[0].operations[0].forward == 2 * 2 * 16 * 16 * 64


def _streams(made):
    return {op.name: op for block in made.blocks for op in block.operations if isinstance(op, Stream)}


def test_an_elementwise_chain_moves_its_end_only():
    """tanh(x w) * 2 + 1, then a product: of three equations one result is written and read."""
    made = traced_model.model(lambda w, x: (jnp.tanh(x @ w[0]) * 2 + 1) @ w[1], [_struct(32, 32)] * 2, _struct(8, 32))
    assert {name: op.forward for name, op in _streams(made).items()} == {"add": 2 * 2 * 32}


def test_a_ragged_product_is_as_many_products_as_it_has_experts():
    """64 rows of 16 dealt to 4 experts: 2 x 64 x 16 x 32 FLOP, and every expert's weights once through memory."""

    def net(w, x):
        sizes = jnp.full((4,), x.shape[0] // 4, jnp.int32)
        return jax.lax.ragged_dot(x, w, sizes)

    made = traced_model.model(net, _struct(4, 16, 32), _struct(64, 16))
    (op,) = [op for block in made.blocks for op in block.operations if isinstance(op, Gemm)]
    assert made.forward_flops * 64 == 2 * 64 * 16 * 32 and op.batch == 4 and op.m * 64 == 16
    gradients = jax.make_jaxpr(jax.grad(lambda w, x: net(w, x).sum(), (0, 1)))(_struct(4, 16, 32), _struct(64, 16))
    found = [product for e in gradients.eqns if (product := products_of(e)) is not None]
    assert all(2 * g.m * g.n * g.k * g.batch == 2 * 64 * 16 * 32 for g in found) and len(found) >= 2


def test_products_of_32_bits_take_twice_as_long():
    narrow, wide = (_struct(4096, 4096, dtype=kind) for kind in (jnp.bfloat16, jnp.float32))
    nets = [traced_model.model(lambda w, x: x @ w, w, _struct(4096, 4096, dtype=w.dtype)) for w in (narrow, wide)]
    one, two = (net.blocks[0].operations[0] for net in nets)
    assert (one.bytes, two.bytes) == (2, 4)
    assert gemm_time(H100.gpu, 4096, 4096, 4096, width=4) == 2 * gemm_time(H100.gpu, 4096, 4096, 4096)


def test_only_parameters_that_are_cast_are_moved_by_casts():
    """Half of the values are 32-bit ones that the function casts; 18 of 34 bytes per value are casts."""
    w = {"a": _struct(64, 64, dtype=jnp.float32), "b": _struct(64, 64)}
    made = traced_model.model(lambda w, x: x @ w["a"].astype(x.dtype) @ w["b"], w, _struct(8, 64))
    assert made.casts == 0.5
    plans, work = Plans.of([Plan()]), Training(1, **SOFTWARE["jax"])
    time = [estimate(replace(made, casts=c), H100.resized(1), plans, work).time.compute[0] for c in (0.0, 0.5, 1.0)]
    moved = 18 * 0.5 * 2 * 64 * 64 / (H100.gpu.bandwidth * H100.gpu.memory_efficiency)
    assert time[1] - time[0] == pytest.approx(moved) and time[2] - time[1] == pytest.approx(moved)


@pytest.mark.parametrize(("name", "most"), [("scan_over_layers", 0.1), ("u_net", 0.1)])
def test_a_plan_on_one_gpu_costs_what_the_functions_own_program_does(name, most):
    """Forward and backward of all samples at once, by layers and (``spmd_step``) by the derivative's program."""
    function, parameters, *inputs = getattr(six_models, name)()
    made, one = traced_model.model(function, parameters, *inputs), H100.resized(1)
    work = Training(made.batch, **SOFTWARE["jax"])
    planned = estimate(made, one, Plans.of([Plan(micro=made.batch)]), work).time.compute[0]
    own = spmd_step.step_time(jax.value_and_grad(function), parameters, *inputs, cluster=one).seconds
    assert planned == pytest.approx(own, rel=most)
