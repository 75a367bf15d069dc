"""The published cost model of storage-based training, formula by formula.

Source: thesis chapter 4.2 (parameters: Tables 4.1-4.3), evaluated in Tables 5.5 and 5.6.  The formulas as printed do
not give Table 5.6; ``as_tabulated=True`` is the reading that does, ``as_tabulated=False`` the same formulas with the
policy labels and the two bandwidths put right.  ``docs/table_5_6.md`` says where table and text err.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jcuts.base.errors import ModelError, UsageError

PARAMETER_RESIDENT = "PR"
ACTIVATION_RESIDENT = "AR"
POLICIES = (PARAMETER_RESIDENT, ACTIVATION_RESIDENT)


@dataclass(frozen=True)
class ThesisModel:
    """Table 4.2: model parameters of a network.

    Attributes:
        num_op: parameterised operators in a forward and backward propagation.
        num_param: average parameters per operator.
        num_act: average output values per operator and sample.
        num_compute: average floating-point operations per operator and sample, forward and backward.
        batch_mini: samples per mini-batch.
        coef_optimizer: optimiser values per parameter value (4 for Adam).
    """

    name: str
    num_op: int
    num_param: float
    num_act: float
    num_compute: float
    batch_mini: int
    coef_optimizer: float = 4.0

    @classmethod
    def transformer(cls, name: str, layers: int, hidden: int, sequence: int, batch_mini: int) -> ThesisModel:
        """Two operators per layer, attention (4 h^2 parameters) and feed-forward (8 h^2), averaged.

        NUM_OP = 2 L, NUM_PARAM = 6 h^2, NUM_ACT = 1.5 h s, NUM_COMPUTE = 6 NUM_PARAM s (2 forward, 4 backward per
        parameter and token, attention scores left out as the table's model does).
        """
        if min(layers, hidden, sequence, batch_mini) <= 0:
            raise ModelError(f"{name}: layers, hidden, sequence and batch must be positive", model=name)
        return cls(name, 2 * layers, 6.0 * hidden**2, 1.5 * hidden * sequence, 36.0 * hidden**2 * sequence, batch_mini)


@dataclass(frozen=True)
class ThesisCluster:
    """Table 4.1: model parameters of a cluster.  Bandwidths in bytes/s per GPU, ``peak`` in FLOP/s."""

    name: str
    gpus: int
    peak: float
    storage: float
    p2p: float

    def __post_init__(self) -> None:
        for field in ("gpus", "peak", "storage", "p2p"):
            if not getattr(self, field) > 0:
                raise ModelError(
                    f"cluster {self.name}: {field} must be positive, not {getattr(self, field)}",
                    cluster=self.name,
                    field=field,
                    value=getattr(self, field),
                )


MODELS = {
    "GPT-3": ThesisModel.transformer("GPT-3", 96, 12288, 2048, 320_000),
    "Turing-NLG": ThesisModel.transformer("Turing-NLG", 78, 4256, 1024, 512),
}
CLUSTERS = {
    "A": ThesisCluster("A", 32, 285.48e12, 4.0e9, 16e9),
    "B": ThesisCluster("B", 32, 125e12, 1.6e9, 100e9),
    "C": ThesisCluster("C", 16, 285.48e12, 0.4e9, 16e9),
}
"""Table 5.5.  Two readings are forced by Table 5.6: B has 32 GPUs although Table 5.5 says 2 nodes of 8, and its
GPU-to-GPU figure is the inter-node one (100 GB/s), where A's is the intra-node one (16 GB/s)."""

NORMALISER = {
    ("GPT-3", "A"): 73114.0,
    ("GPT-3", "B"): 49557.0,
    ("Turing-NLG", "A"): 50.297,
    ("Turing-NLG", "B"): 45.739,
}
"""Seconds that Table 5.6 divides by: the one fitted number per model and cluster (about its smallest time)."""


@dataclass(frozen=True)
class Traffic:
    """Bytes per GPU and mini-batch (WP, DP and PP as the thesis counts them)."""

    forward_backward: float
    optimizer: float
    weight_partition: float
    data_parallel: float
    pipeline: float

    @property
    def storage(self) -> float:
        """COMM_STORAGE = COMM_FWDBWD + COMM_OPT."""
        return self.forward_backward + self.optimizer

    @property
    def gpu(self) -> float:
        """COMM_GPU = COMM_WP + COMM_DP + COMM_P."""
        return self.weight_partition + self.data_parallel + self.pipeline


def traffic(model: ThesisModel, d: int, w: int, p: int, policy: str, *, all_gradients: bool = False) -> Traffic:
    """Data movement of one mini-batch.

        COMM_FWDBWD (PR) = 4 NUM_ACT NUM_OP B / (d p)         (parameters stay, activations move)
        COMM_FWDBWD (AR) = 2 NUM_PARAM NUM_OP B / (w p)       (activations stay, parameters move)
        COMM_OPT = 8 COEF NUM_PARAM NUM_OP / (w p)
        COMM_WP = 2 (NUM_OP/p) (NUM_ACT/d) log2(w) B
        COMM_DP = 2 (NUM_PARAM/w) log2(d)
        COMM_P  = 2 (NUM_ACT/d) B                             (for every p, 1 included: as the table has it)

    Args: d, w, p: data-parallel groups, weight partitions, pipeline stages; policy: ``PR`` or ``AR``.
        all_gradients: multiply COMM_DP by NUM_OP/p, which the print forgets (it reduces one operator's gradient only).
    Returns: bytes.
    Raises: UsageError for a policy that does not exist or a dimension below 1.
    Source: thesis 4.2.2.
    """
    if policy not in POLICIES:
        raise UsageError(f"policy={policy!r} is unknown: choose one of {POLICIES}", policy=policy)
    if min(d, w, p) < 1:
        raise UsageError(f"(d, w, p) = {(d, w, p)}: every dimension must be at least 1", d=d, w=w, p=p)
    batch, ops = model.batch_mini, model.num_op
    if policy == PARAMETER_RESIDENT:
        moved = 4 * model.num_act * ops * batch / (d * p)
    else:
        moved = 2 * model.num_param * ops * batch / (w * p)
    reduced = ops / p if all_gradients else 1.0
    return Traffic(
        forward_backward=moved,
        optimizer=8 * model.coef_optimizer * model.num_param * ops / (w * p),
        weight_partition=2 * (ops / p) * (model.num_act / d) * math.log2(w) * batch,
        data_parallel=2 * (model.num_param / w) * math.log2(d) * reduced,
        pipeline=2 * (model.num_act / d) * batch,
    )


def communication_time(
    model: ThesisModel,
    cluster: ThesisCluster,
    dims: tuple[int, int, int],
    policy: str,
    *,
    as_tabulated: bool = False,
    all_gradients: bool = False,
) -> float:
    """TIME_COMM = COMM_STORAGE / BW_STORAGE + COMM_GPU / BW_P2P, in seconds.

    The print reads ``COMM_STORAGE/BW_STORAGE + COMM_DP + COMM_P``: one term and one divisor are missing (bytes are
    added to seconds); Table 5.6 has both.  With ``as_tabulated`` the table's two other deviations are kept: the columns
    PR and AR are exchanged, and its column PR divides storage traffic by BW_P2P and GPU traffic by BW_STORAGE.
    """
    d, w, p = dims
    if not as_tabulated:
        moved = traffic(model, d, w, p, policy, all_gradients=all_gradients)
        return moved.storage / cluster.storage + moved.gpu / cluster.p2p
    if policy == PARAMETER_RESIDENT:
        moved = traffic(model, d, w, p, ACTIVATION_RESIDENT, all_gradients=all_gradients)
        return moved.storage / cluster.p2p + moved.gpu / cluster.storage
    moved = traffic(model, d, w, p, PARAMETER_RESIDENT, all_gradients=all_gradients)
    return moved.storage / cluster.storage + moved.gpu / cluster.p2p


def compute_time(model: ThesisModel, cluster: ThesisCluster, gpus: int, efficiency: float = 1.0) -> float:
    """TIME_COMPUTE = NUM_COMPUTE NUM_OP B / (EFF PERF_peak d w p), in seconds."""
    if not 0 < efficiency <= 1:
        raise UsageError(f"efficiency={efficiency} must be in (0, 1]", efficiency=efficiency)
    return model.num_compute * model.num_op * model.batch_mini / (efficiency * cluster.peak * gpus)


def total_time(
    model: ThesisModel, cluster: ThesisCluster, dims: tuple[int, int, int], policy: str, *, efficiency: float = 1.0
) -> float:
    """TIME_TOT = max(TIME_COMPUTE, TIME_COMM): full overlap, as the thesis assumes.  Labels and bandwidths right."""
    gpus = dims[0] * dims[1] * dims[2]
    return max(compute_time(model, cluster, gpus, efficiency), communication_time(model, cluster, dims, policy))


def normalised(
    model: str, cluster: str, dims: tuple[int, int, int], policy: str, *, as_tabulated: bool = True
) -> float:
    """One cell of Table 5.6: communication time over the table's normaliser.

    >>> round(normalised("GPT-3", "A", (32, 1, 1), "PR"), 2)
    95.17
    """
    seconds = communication_time(MODELS[model], CLUSTERS[cluster], dims, policy, as_tabulated=as_tabulated)
    return seconds / NORMALISER[model, cluster]


def factorisations(count: int) -> list[tuple[int, int, int]]:
    """All (d, w, p) with d w p = count."""
    if count < 1:
        raise UsageError(f"{count} GPUs cannot be arranged", count=count)
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    return [(d, w, count // (d * w)) for d in divisors for w in divisors if count % (d * w) == 0]


def optima(
    model: ThesisModel,
    cluster: ThesisCluster,
    *,
    as_tabulated: bool,
    all_gradients: bool = False,
    max_stages: int | None = None,
) -> list[tuple[float, tuple[int, int, int], str]]:
    """Every (d, w, p) and policy of the cluster, shortest communication first: (seconds, dims, policy)."""
    return sorted(
        (
            communication_time(model, cluster, dims, policy, as_tabulated=as_tabulated, all_gradients=all_gradients),
            dims,
            policy,
        )
        for dims in factorisations(cluster.gpus)
        if max_stages is None or dims[2] <= max_stages
        for policy in POLICIES
    )
