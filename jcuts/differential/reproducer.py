"""Writes a wrong part of a program as one Python file that fails by itself: it needs JAX and NumPy alone."""

from __future__ import annotations

import base64
import io
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jcuts.base.errors import UsageError, WorkerFailed
from jcuts.differential import program_text
from jcuts.differential.report import Finding, VerifyReport, finding_text
from jcuts.differential.session import CRASHED, HUNG, Session
from jcuts.differential.ways import OP_BY_OP, XLA
from jcuts.trace import jaxapi

MOST_BYTES = 4 << 20
"""Operands and expected results that a file may hold, compressed."""
SECONDS = 60

_MAIN = '''
def arrays(data):
    """Arrays that were saved by numpy.savez, compressed and written as text."""
    with np.load(io.BytesIO(zlib.decompress(base64.b85decode(data))), allow_pickle=False) as file:
        return dict(file)


def typed(array, dtype):
    """An array of a type that the .npy format does not know."""
    return array.view(jnp.dtype(dtype)) if jnp.dtype(dtype).kind == "V" else array


def apart(got, want):
    """Elements that are NaN on one side alone, and the largest difference relative to the root mean square."""
    got, want = np.asarray(got), np.asarray(want)
    if got.dtype.kind in "biu":
        return int((got != want).sum()), 0.0
    kind = np.complex128 if got.dtype.kind == "c" else np.float64
    got, want = got.astype(kind), want.astype(kind)
    finite = np.isfinite(got) & np.isfinite(want)
    size = np.sqrt(np.mean(np.abs(want[finite]) ** 2)) if finite.any() else 1.0
    error = np.max(np.abs(got - want)[finite], initial=0.0) / max(size, np.finfo(np.float32).tiny)
    return int((np.isnan(got) != np.isnan(want)).sum()), float(error)


def main():
    faulthandler.dump_traceback_later({seconds}, exit=True)  # a hang ends here
    print("jax", jax.__version__, "jaxlib", jaxlib.version.__version__)
    saved, failed = arrays(DATA), False
    for number in range({sets}):
        operands = [typed(saved[f"set{{number}}.in{{k}}"], d) for k, d in enumerate({inputs})]
        wanted = [typed(saved[f"set{{number}}.out{{k}}"], d) for k, d in enumerate({outputs})]
        results = {call}(*operands)
        for k, (got, want) in enumerate(zip(results, wanted, strict=True)):
            unlike, error = apart(got, want)
            bad = unlike > 0 or error > LIMITS[k]
            failed |= bad
            print(f"inputs {{number}}, result {{k}}: {{unlike}} elements of another kind (NaN), error {{error:.3g}} of "
                  f"float64's root mean square, allowed {{LIMITS[k]:.3g}}", "WRONG" if bad else "right")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
'''


def written(report: VerifyReport, session: Session, closed: jaxapi.Closed, path: Path) -> VerifyReport:
    """Writes the reproducer of the first finding about XLA, and tries it in a process that cannot import jcuts.

    Returns: the report with the path, or with a note where there is no file that fails.
    """
    found = next((f for f in report.findings if f.way in (OP_BY_OP, XLA)), None)
    if found is None:
        return report.noted("no reproducer: XLA's own program is right, or was not bisected")
    try:
        text = source(report, found, session, closed)
    except WorkerFailed as error:
        return report.noted(f"no reproducer: {error.message}")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}", path=str(path)) from error
    status = run_alone(path)
    if status == 0:
        return report.noted(f"{path} does not fail in a process of its own")
    return replace(report, reproducer=str(path))


def source(report: VerifyReport, found: Finding, session: Session, closed: jaxapi.Closed) -> str:
    """The text of the file. Raises: WorkerFailed: operands cannot be had, or are too large to be written."""
    start, stop = found.equations
    part = closed if (start, stop) == (0, len(closed.jaxpr.eqns)) else program_text.window(closed, start, stop)
    text, constants = program_text.source_of(part)
    with tempfile.TemporaryDirectory(prefix="jcuts-reproducer-") as folder:
        file = Path(folder) / "arrays.npz"
        answer = session.ask(found.way, window=[start, stop], save=str(file))
        if not file.exists():
            raise WorkerFailed(f"its operands cannot be computed op by op: {answer.get('message', answer['status'])}")
        with np.load(file, allow_pickle=False) as loaded:
            arrays = dict(loaded)
    arrays = _fewer(arrays, found)
    data = _packed({**arrays, **{f"constant{k}": _plain(c) for k, c in enumerate(constants)}})
    if len(data) > MOST_BYTES:
        raise WorkerFailed(f"its operands take {len(data) >> 20} MiB compressed, more than {MOST_BYTES >> 20}")
    sets = len({name.partition(".")[0] for name in arrays})
    main = _MAIN.format(
        seconds=SECONDS,
        sets=sets,
        inputs=[v.aval.dtype.name for v in part.jaxpr.invars],
        outputs=[v.aval.dtype.name for v in part.jaxpr.outvars],
        call="program" if found.way == OP_BY_OP and found.status not in (CRASHED, HUNG) else "jax.jit(program)",
    )
    title = finding_text(found).replace('"""', "'''").replace("\\", "/")
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    wrapped = "\n".join(data[k : k + 100] for k in range(0, len(data), 100))
    return (
        f'"""{title}\n\n{report.name}, {found.status}: {found.message}\n'
        f'found with {versions} on {report.platform}\n"""\n'
        "import base64\nimport faulthandler\nimport io\nimport zlib\n\nimport jaxlib\n"
        + program_text.PRELUDE
        + f'\njax.config.update("jax_platforms", "{report.platform}")\n'
        + f'jax.config.update("jax_enable_x64", {jaxapi.x64_enabled()})\n\n\n{text}\n'
        + f"LIMITS = {_limits(part, found)}\n"
        + f'DATA = """\n{wrapped}\n""".replace("\\n", "")\n'
        + main.replace("def main():", _CONSTANTS.format(dtypes=[c.dtype.name for c in constants]) + "\n\ndef main():")
    )


_CONSTANTS = """CONSTANTS = [typed(arrays(DATA)[f"constant{{k}}"], d) for k, d in enumerate({dtypes})]
"""


def _limits(part: jaxapi.Closed, found: Finding) -> list[float]:
    """Allowed error of every result relative to its root mean square: sqrt(eps), far above what rounding does."""
    kinds = [v.aval.dtype for v in part.jaxpr.outvars]
    return [float(np.sqrt(float(_eps(d)))) if d.kind not in "biu" else 0.0 for d in kinds]


def _eps(dtype: Any) -> float:
    import ml_dtypes

    return float(ml_dtypes.finfo(np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype).eps)


def _fewer(arrays: Mapping[str, np.ndarray], found: Finding) -> dict[str, np.ndarray]:
    """The first set of ordinary inputs, and the one with special values where it is about these."""
    names = sorted({name.partition(".")[0] for name in arrays})
    kept = names[-1:] if found.status == "special values" else names[:1]
    return {f"set0.{name.partition('.')[2]}": value for name, value in arrays.items() if name.partition(".")[0] in kept}


def _plain(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.itemsize}") if array.dtype.kind == "V" else array


def _packed(arrays: Mapping[str, np.ndarray]) -> str:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return base64.b85encode(zlib.compress(buffer.getvalue(), 9)).decode().replace("\\", "\\\\")


def run_alone(path: Path, seconds: float = 2 * SECONDS) -> int:
    """Exit status of a reproducer in a process in which jcuts cannot be imported."""
    text = "import runpy, sys; sys.modules['jcuts'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    variables = {k: v for k, v in os.environ.items() if not k.startswith("JCUTS_")}
    try:
        done = subprocess.run(
            [sys.executable, "-c", text, str(path)], env=variables, capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return -1
    return done.returncode
