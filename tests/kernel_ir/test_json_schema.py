"""Programs from files are data: what is no program is refused, nothing of it runs, nothing of it leaves its buffers."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys

import pytest

from jcuts.base.errors import IRError, SchemaError
from jcuts.codegen.cpu.emit import emit_source
from jcuts.kernel_ir.program import Program
from jcuts.kernel_ir.verify import read, verify
from tests import programs
from tests.gpu.cases import normal
from tests.kernel_ir import fuzz
from tests.ops.cases import conv


@pytest.fixture(scope="module")
def convolution() -> str:
    """A convolution with padding: loads with guards."""
    return programs.trace(conv, normal(1, 6, 7, 2), normal(3, 3, 2, 3)).program().to_text()


def edited(text, change):
    data = json.loads(text)
    change(data)
    return data


def test_mutated_programs(tmp_path):
    found = fuzz.run(fuzz.MUTATIONS, tmp_path / "canary")
    print(found)
    assert found.mutations == fuzz.MUTATIONS and sum(found.refused.values()) + found.accepted == fuzz.MUTATIONS
    assert found.programs > 400 and len(found.templates) >= 11 and found.interpreted > 100 and found.compiled > 5


def test_a_name_with_a_newline_is_no_name(convolution, tmp_path):
    canary = tmp_path / "canary"
    code = f"x\n    __import__('os').system('touch {canary}')\n    #"
    places = {
        "phase": lambda d: d["phases"][0].update(name=code),
        "program": lambda d: d.update(name=code),
        "template": lambda d: d.update(template=code),
        "buffer": lambda d: d["buffers"][0].__setitem__(0, code),
        "axis": lambda d: d["phases"][0]["axes"][0].__setitem__(0, code),
        "red": lambda d: d["phases"][0]["reds"][0].__setitem__(0, code),
        "parameter": lambda d: d["params"].append(["cuda", code]),
        "parameter name": lambda d: d["params"].append([code, 1]),
        "operation": lambda d: d["phases"][0]["body"][-1].update(op=code),
        "when": lambda d: d["phases"][0].update(when=code),
        "once": lambda d: d["phases"][0].update(once=[code]),
        "attribute": lambda d: d["phases"][0]["exit"][0].update(attrs=[["number", code]]),
        "value": lambda d: d["phases"][0]["body"][0].update(value=code),
        "unknown": lambda d: d.update({code: 1}),
    }
    for change in places.values():
        with pytest.raises(SchemaError):
            read(edited(convolution, change))
    assert not canary.exists()


def test_the_verifier_looks_at_names_of_programs_that_no_file_held(convolution):
    program = Program.from_json(convolution)
    assert "\n" not in program.phases[0].name
    for odd in ("a\nb", "tile", "for", "x_lo"):
        phase = program.phases[0]
        axes = (type(phase.axes[0])(odd, phase.axes[0].extent), *phase.axes[1:])
        with pytest.raises(IRError, match="names no axis"):
            verify(
                type(program)(
                    program.name,
                    program.buffers,
                    (),
                    (),
                    (type(phase)(phase.name, axes, phase.reds, phase.accs, phase.body, phase.exit, phase.stores),),
                    1,
                )
            )


def test_generated_text_has_no_names_of_phases(convolution):
    program = Program.from_json(convolution)
    assert "conv_general_dilated" not in emit_source(program).text


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", "[" * 100_000, '{"format": 1}', '{"format": true}'])
def test_what_is_no_program(text):
    with pytest.raises(SchemaError):
        read(text)


WRONG = {
    "an address beyond the buffer": lambda d: _load(d)["index"].__setitem__(0, 1000),
    "no guard": lambda d: _load(d).pop("guards"),
    "a wider guard": lambda d: _load(d)["guards"][0].__setitem__(2, 100),
    "a larger loop": lambda d: d["phases"][0]["axes"][1].__setitem__(1, 60),
    "a term twice": lambda d: _load(d)["index"].append(_load(d)["index"][1]),
    "a smaller operand": lambda d: d["buffers"][0].__setitem__(2, [1, 2, 3, 2]),
    "a smaller result": lambda d: d["buffers"][-1].__setitem__(2, [1, 2, 3, 3]),
    "a number that overflows": lambda d: _load(d)["index"][1].__setitem__(0, 1 << 53),
    "a missing argument": lambda d: d["phases"][0]["body"][-1]["args"].pop(),
    "another type": lambda d: d["phases"][0]["body"][-1].update(dtype="int32"),
    "a number that is true": lambda d: d.update(lanes=True),
    "a number that is NaN": lambda d: d.update(lanes=float("nan")),
    "a negative extent": lambda d: d["phases"][0]["axes"][0].__setitem__(1, -1),
    "a result that nothing writes": lambda d: d["phases"][0].update(stores=[]),
    "too many points at once": lambda d: [a.__setitem__(2, 4096) for a in d["phases"][0]["axes"][:2]],
}


def _load(data):
    return next(node for node in data["phases"][0]["body"] if "guards" in node)


@pytest.mark.parametrize("what", WRONG)
def test_programs_that_are_wrong_are_refused(convolution, what):
    with pytest.raises(IRError):
        read(edited(convolution, WRONG[what]))
    read(convolution)


IMPORTED = """
import sys
import jax, numpy as np
import jcuts
x = np.random.default_rng(0).standard_normal((24, 40)).astype(np.float32)
f = jcuts.optimize(jax.nn.softmax, mode="fusion")
print("right", np.abs(np.asarray(f(x)) - np.asarray(jax.jit(jax.nn.softmax)(x))).max() < 1e-6)
"""


def test_an_imported_row_runs_no_code(tmp_path, with_module_code):
    """The whole way: an export with code in a phase's name, imported, and the function called."""

    def run(cache, *command):
        env = {**os.environ, "JCUTS_CACHE_DIR": str(cache), "JCUTS_MAX_CANDIDATES": "2"}
        done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    one, two = (with_module_code(tmp_path / name) for name in ("one", "two"))
    export, canary = tmp_path / "export.json", tmp_path / "canary"
    assert "right True" in run(one, "-c", IMPORTED)
    run(one, "-m", "jcuts", "cache", "export", str(export))
    data, found = json.loads(export.read_text()), 0
    for entry in data["entries"]:
        for label, text in entry["value"].get("programs", {}).items() if entry["kind"] == "choice" else ():
            program = json.loads(text)
            program["phases"][0]["name"] += f"\n    __import__('os').system('touch {canary}')\n    #"
            entry["value"]["programs"][label] = json.dumps(program)
            found += 1
    assert found
    export.write_text(json.dumps(data))
    run(two, "-m", "jcuts", "cache", "import", str(export))
    assert "right True" in run(two, "-c", IMPORTED)
    with contextlib.closing(sqlite3.connect(two / "tuning.db")) as db, db:
        (text,) = db.execute("SELECT choice FROM choices").fetchone()
    db.close()
    assert "system" not in text and not canary.exists()
