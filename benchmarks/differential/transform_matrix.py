"""Print the transformation matrix: every way of using ``jcuts.optimize`` against ``jax.jit``, pass or fail.

python benchmarks/differential/transform_matrix.py
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main() -> int:
    """Run every case with measuring off and on; the exit status is the number of failures (at most 100)."""
    import jax
    from rich.console import Console
    from rich.table import Table

    import jcuts
    from tests.primitive.transform_cases import CASES, assert_same

    modes = ("off", "auto")
    table = Table(
        "case",
        *(f"tune={mode}" for mode in modes),
        title=f"jax {jax.__version__}, {jax.device_count()} {jax.default_backend()} devices: equal to jax.jit",
    )
    failures = 0
    for name, case in CASES.items():
        want = case(jax.jit)
        row = []
        for mode in modes:
            try:
                assert_same(want, case(functools.partial(jcuts.optimize, tune=mode)))
                row.append("pass")
            except Exception as error:
                failures += 1
                row.append(f"FAIL {type(error).__name__}: {str(error).splitlines()[0]}")
        table.add_row(name, *row)
    Console(width=120).print(table)
    total = len(CASES) * len(modes)
    print(f"{total - failures} of {total} pass")
    return min(failures, 100)


if __name__ == "__main__":
    sys.exit(main())
