"""XLA CPU compiler options worth a try per workload: vector width, fast math, scheduler, oneDNN, YNNPACK, effort."""

from __future__ import annotations

_YNN_ALL = (
    "LIBRARY_FUSION_TYPE_DOT,LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION,"
    "LIBRARY_FUSION_TYPE_ELTWISE,LIBRARY_FUSION_TYPE_REDUCE"
)

CPU_FLAG_SETS: dict[str, dict[str, object]] = {
    "ynn_convolution": {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"},
    "onednn_custom_call": {"xla_cpu_experimental_onednn_custom_call": True},
    "vector_width_512": {"xla_cpu_prefer_vector_width": 512},
    "fast_math": {"xla_cpu_enable_fast_math": True},
    "fast_min_max": {"xla_cpu_enable_fast_min_max": True},
    "concurrency_scheduler": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_CONCURRENCY_OPTIMIZED"},
    "concurrency_scheduler_old": {"xla_cpu_enable_concurrency_optimized_scheduler": True},
    "memory_scheduler": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"},
    "onednn": {"xla_cpu_use_onednn": True},
    "onednn_fusion": {"xla_cpu_experimental_onednn_fusion_type": "LIBRARY_FUSION_TYPE_DOT"},
    "ynn_all": {"xla_cpu_experimental_ynn_fusion_type": _YNN_ALL},
    "ynn_none": {"xla_cpu_experimental_ynn_fusion_type": ""},
    "xnnpack": {"xla_cpu_use_xnnpack": True},
    "xnn_dot": {"xla_cpu_experimental_xnn_fusion_type": "LIBRARY_FUSION_TYPE_DOT"},
    "no_thunk_runtime": {"xla_cpu_use_thunk_runtime": False},
    "no_fusion_emitters": {"xla_cpu_use_fusion_emitters": False},
    "multi_output_fusion": {"xla_cpu_use_multi_output_fusion": True},
    "effort_exec_1": {"exec_time_optimization_effort": 1.0},
    "optimization_level_o3": {"optimization_level": 39},  # the enumeration EffortLevel of XLA
}
"""By name: ``compiler_options`` of a compilation. What a jaxlib does not have, it refuses; the refusal is recorded."""

DRY_CPU_SETS: dict[str, dict[str, object]] = {
    "fast_math": {"xla_cpu_enable_fast_math": True},
    "unknown": {"xla_no_such_option": True},
}
"""For a run at tiny sizes: one that works and one that is refused."""
