"""XLA compiler options worth a try per workload: command buffers, Triton, cuDNN, autotuning, scheduling, effort.

By name: ``compiler_options`` of a compilation, the most useful sets first.  What a jaxlib does not have, it refuses;
the refusal is recorded.  A set belongs to one of three groups, by what it changes:

`LAUNCH`      how kernels are launched: tried at a workload's smallest batch, where launching takes the largest share
`KERNELS`     which kernels there are: tried at its headline batch
`AUTOTUNING`  how autotuning chooses: tried at the headline batch, each in a process of its own
"""

from __future__ import annotations

Options = dict[str, object]

COMMANDS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL"
LAUNCH: dict[str, Options] = {
    "command_buffers_all": {
        "xla_gpu_enable_command_buffer": f"{COMMANDS},CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION,CONVOLUTION",
        "xla_gpu_graph_min_graph_size": 1,
    },
    "command_buffers_control": {
        "xla_gpu_enable_command_buffer": f"{COMMANDS},CONDITIONAL,WHILE",
        "xla_gpu_graph_min_graph_size": 1,
    },
    "graph_min_1": {"xla_gpu_graph_min_graph_size": 1},
    "no_command_buffers": {"xla_gpu_enable_command_buffer": ""},
    "command_buffers_libraries": {
        "xla_gpu_enable_command_buffer": f"{COMMANDS},DYNAMIC_SLICE_FUSION",
        "xla_gpu_graph_min_graph_size": 1,
    },
    "update_never": {"xla_gpu_command_buffer_update_mode": "NEVER_UPDATE"},
    "update_always": {"xla_gpu_command_buffer_update_mode": "ALWAYS_UPDATE"},
    "command_buffers_fusion": {"xla_gpu_enable_command_buffer": "FUSION"},
    "graph_min_20": {"xla_gpu_graph_min_graph_size": 20},
}
KERNELS: dict[str, Options] = {
    "no_triton_gemm": {"xla_gpu_enable_triton_gemm": False},
    "latency_hiding": {"xla_gpu_enable_latency_hiding_scheduler": True},
    "optimization_level_o3": {"optimization_level": 39},  # the enumeration EffortLevel of XLA
    "effort_exec_1": {"exec_time_optimization_effort": 1.0},
    "cudnn_layer_norm": {"xla_gpu_enable_cudnn_layer_norm": True},
    "optimization_level_o1": {"optimization_level": 19},
    "effort_memory_1": {"memory_fitting_effort": 1.0},
}
AUTOTUNING: dict[str, Options] = {
    "cudnn_gemm_fusion_3": {"xla_gpu_cudnn_gemm_fusion_level": 3},
    "cudnn_gemm_fusion_1": {"xla_gpu_cudnn_gemm_fusion_level": 1},
    "exhaustive_tiling": {"xla_gpu_exhaustive_tiling_search": True},
    "autotune_2": {"xla_gpu_autotune_level": 2},
    "autotune_0": {"xla_gpu_autotune_level": 0},
}
"""XLA keeps what autotuning chose by device and fusion, whatever the options were, and also between the compilations of
one process: beside plain XLA a set of these would find the choices of plain XLA and change nothing."""
FLAG_SETS: dict[str, Options] = {**LAUNCH, **KERNELS, **AUTOTUNING}
UNSHARED = frozenset({"no_triton_gemm", *AUTOTUNING})
"""Sets that are compiled without the folder that other compilations share their autotuning in."""

DRY_LAUNCH: dict[str, Options] = {"unknown": {"xla_no_such_option": True}}
DRY_KERNELS: dict[str, Options] = {"no_fast_math": {"xla_cpu_enable_fast_math": False}}
DRY_AUTOTUNING: dict[str, Options] = {"no_concurrency": {"xla_cpu_enable_concurrency_optimized_scheduler": False}}
"""For a run on a CPU that only finds typos: of each group one."""


def groups(platform: str) -> tuple[dict[str, Options], dict[str, Options], dict[str, Options]]:
    """`LAUNCH`, `KERNELS`, `AUTOTUNING` of a platform (JAX's name of it)."""
    return (DRY_LAUNCH, DRY_KERNELS, DRY_AUTOTUNING) if platform == "cpu" else (LAUNCH, KERNELS, AUTOTUNING)


def together(sets: dict[str, Options]) -> tuple[list[str], Options]:
    """Sets one after the other, without those that give an option another value: (their names, all options)."""
    names, options = [], {}
    for name, more in sets.items():
        if all(options.get(k, v) == v for k, v in more.items()):
            names.append(name)
            options |= more
    return names, options
