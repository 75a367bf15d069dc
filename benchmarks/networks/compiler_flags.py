"""XLA compiler options worth a try per workload: command buffers, Triton, cuDNN, autotuning, scheduling, effort."""

from __future__ import annotations

FLAG_SETS: dict[str, dict[str, object]] = {
    "graph_min_1": {"xla_gpu_graph_min_graph_size": 1},
    "graph_min_20": {"xla_gpu_graph_min_graph_size": 20},
    "no_command_buffers": {"xla_gpu_enable_command_buffer": ""},
    "command_buffers_fusion": {"xla_gpu_enable_command_buffer": "FUSION"},
    "command_buffers_libraries": {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION",
        "xla_gpu_graph_min_graph_size": 1,
    },
    "command_buffers_control": {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE",
        "xla_gpu_graph_min_graph_size": 1,
    },
    "update_always": {"xla_gpu_command_buffer_update_mode": "ALWAYS_UPDATE"},
    "update_never": {"xla_gpu_command_buffer_update_mode": "NEVER_UPDATE"},
    "no_triton_gemm": {"xla_gpu_enable_triton_gemm": False},
    "autotune_0": {"xla_gpu_autotune_level": 0},
    "autotune_2": {"xla_gpu_autotune_level": 2},
    "exhaustive_tiling": {"xla_gpu_exhaustive_tiling_search": True},
    "latency_hiding": {"xla_gpu_enable_latency_hiding_scheduler": True},
    "cudnn_gemm_fusion_1": {"xla_gpu_cudnn_gemm_fusion_level": 1},
    "cudnn_gemm_fusion_3": {"xla_gpu_cudnn_gemm_fusion_level": 3},
    "cudnn_layer_norm": {"xla_gpu_enable_cudnn_layer_norm": True},
    "effort_exec_1": {"exec_time_optimization_effort": 1.0},
    "effort_memory_1": {"memory_fitting_effort": 1.0},
    "optimization_level_o1": {"optimization_level": 19},  # the enumeration EffortLevel of XLA
    "optimization_level_o3": {"optimization_level": 39},
}
"""By name: ``compiler_options`` of a compilation. What a jaxlib does not have, it refuses; the refusal is recorded."""

DRY_SETS: dict[str, dict[str, object]] = {
    "no_fast_math": {"xla_cpu_enable_fast_math": False},
    "unknown": {"xla_no_such_option": True},
}
"""For a run on a CPU that only finds typos: one that works and one that is refused."""
