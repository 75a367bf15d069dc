"""CPUs and GPUs as data (`CpuArch`, `GpuArch`, TOML files in ``data/``), and detection of this machine's CPU."""
