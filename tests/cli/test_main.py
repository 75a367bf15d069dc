"""The command line: every command, exit statuses, and one clear line per error."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jcuts import __version__
from jcuts.base import fingerprint
from jcuts.base.errors import JcutsError, NativeError, UsageError
from jcuts.base.sqlite_file import SqliteFile, why_read_only
from jcuts.cli import cache, demo, doctor, doctor_gpu, doctor_trials, explain, printing
from jcuts.cli.main import main
from jcuts.codegen.cuda import compile as compiler
from jcuts.tune.database import Store
from jcuts.xla import cuda_launcher, native_library, object_cache
from jcuts.xla import devices as xla_devices


@pytest.fixture(autouse=True)
def wide(monkeypatch, cache_dir):
    monkeypatch.setenv("COLUMNS", "300")


def fill(store: Store, n: int = 2) -> None:
    for i in range(n):
        store.put_guard(f"guard-{i}", {"chosen": "jcuts", "seconds": {"jcuts": 0.00125, "xla": 0.002}})


# ---------------------------------------------------------------- main


@pytest.mark.parametrize("arguments", [[], ["frobnicate"], ["cache"], ["cache", "frob"], ["demo", "--batch", "x"]])
def test_wrong_use_exits_2_and_shows_usage(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: jcuts" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, f"jcuts {__version__}\n")


def test_python_m_jcuts():
    done = subprocess.run([sys.executable, "-m", "jcuts", "explain", "nonsense"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "jcuts: 'nonsense' must look like package.module:name\n")


def test_an_error_of_jcuts_is_one_line_and_exits_2(capsys):
    assert main(["explain", "nonsense"]) == 2
    err = capsys.readouterr().err
    assert err == "jcuts: 'nonsense' must look like package.module:name\n"


def test_a_malformed_variable_is_one_line(monkeypatch, capsys):
    monkeypatch.setenv("JCUTS_FUEL", "lots")
    assert main(["cache", "ls"]) == 2
    assert "JCUTS_FUEL='lots'" in capsys.readouterr().err


def test_traceback_on_request():
    with pytest.raises(UsageError):
        main(["--traceback", "explain", "nonsense"])


# ---------------------------------------------------------------- doctor


def status(checks, name):
    return [c.status for c in checks if c.name == name]


def test_doctor_finds_a_healthy_machine(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for word in ("native library", "launcher", "object cache", "tuning database", "every number right", "jax.jit"):
        assert word in out


def test_doctor_names_a_missing_native_library_and_goes_on(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("JCUTS_NATIVE", str(tmp_path / "gone.so"))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "gone.so is not a file" in out
    assert "tuning database" in out


def test_a_wrong_path_of_the_native_library_is_told_once(monkeypatch, tmp_path, caplog):
    gone = tmp_path / "not there.so"
    monkeypatch.setenv("JCUTS_NATIVE", str(gone))
    with caplog.at_level(logging.WARNING, "jcuts"):
        for _ in range(2):
            assert native_library.native_available()[0] is False
            with pytest.raises(NativeError, match=r"not there\.so is not a file"):
                native_library.library_path()
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "jcuts.native"]
    assert f"JCUTS_NATIVE={gone}" in warning and "left to XLA" in warning


def test_doctor_says_that_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(cuda_launcher, "driver_version", lambda: None)
    assert list(doctor_gpu.examine()) == [("GPU", True, "no NVIDIA driver: kernels for the CPU only", "")]


def test_doctor_says_what_a_gpu_lacks(monkeypatch):
    device = SimpleNamespace(device_kind="NVIDIA H200", compute_capability="9.0", core_count=132)
    monkeypatch.setattr(cuda_launcher, "driver_version", lambda: (12, 4))
    monkeypatch.setattr(jax, "local_devices", lambda backend: [device, device])
    monkeypatch.setattr(compiler, "available", lambda: "there is neither ptxas nor nvJitLink")
    monkeypatch.setattr(cuda_launcher, "available", lambda: "the library is missing")
    monkeypatch.setattr(xla_devices, "unusable", lambda: "the driver supports CUDA 12.4 only")
    lines = {name: (good, found) for name, good, found, _ in doctor_gpu.examine()}
    assert lines["GPU driver"] == (True, "supports CUDA 12.4")
    assert lines["GPU"] == (True, "2 x NVIDIA H200, compute capability 9.0")
    assert lines["GPU rates"] == (True, "those of H200; memory 4.82 TB/s")
    assert lines["GPU compilers"] == (False, "there is neither ptxas nor nvJitLink")
    assert lines["GPU launcher"] == (False, "the library is missing")
    assert lines["GPU kernels"] == (False, "functions on the GPU are left to XLA: the driver supports CUDA 12.4 only")


def test_doctor_knows_a_driver_without_jax_for_it(monkeypatch):
    def none(backend):
        raise RuntimeError("Unknown backend cuda")

    monkeypatch.setattr(cuda_launcher, "driver_version", lambda: (13, 0))
    monkeypatch.setattr(jax, "local_devices", none)
    assert [(name, good) for name, good, _, _ in doctor_gpu.examine()] == [("GPU driver", True), ("GPU", False)]


def test_doctor_names_a_malformed_variable(monkeypatch):
    monkeypatch.setenv("JCUTS_THREADS", "-3")
    checks = list(doctor.examine())
    assert any(c.status == doctor.BAD and "JCUTS_THREADS" in c.found for c in checks)


def test_doctor_notices_a_misspelt_variable(monkeypatch):
    monkeypatch.setenv("JCUTS_FULE", "3")
    checks = list(doctor.examine())
    assert any(c.status == doctor.WARNING and "JCUTS_FULE" in c.found for c in checks)


def test_doctor_refuses_an_open_cache_directory(cache_dir):
    cache_dir.mkdir(mode=0o700)
    (cache_dir / "objects").mkdir()
    (cache_dir / "objects").chmod(0o777)
    (check,) = [c for c in doctor.examine() if c.name == "object cache"]
    assert check.status == doctor.BAD
    assert "chmod 700" in check.found


def test_doctor_finds_a_database_that_cannot_be_written(cache_dir, monkeypatch):
    (check,) = [c for c in doctor.examine() if c.name == "tuning database"]
    assert check.status == doctor.GOOD
    path = cache.open_store().path
    cache.open_store().put_guard("key", {"chosen": "xla"})
    (check,) = [c for c in doctor.examine() if c.name == "tuning database"]
    assert check.status == doctor.GOOD and "1 entries" in check.found
    if os.geteuid():
        path.chmod(0o400)
        assert "readonly" in why_read_only(path)
        path.chmod(0o600)
    monkeypatch.setattr(doctor, "why_read_only", lambda path: "attempt to write a readonly database")
    (check,) = [c for c in doctor.examine() if c.name == "tuning database"]
    assert check.status == doctor.BAD and f"{path} cannot be written" in check.found
    assert "JCUTS_CACHE_DIR" in check.advice


def test_a_busy_database_is_writable_and_stays_as_it_is(tmp_path):
    path = tmp_path / "a.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("CREATE TABLE t (x)")
        before = path.read_bytes()
        assert why_read_only(path) == "" and path.read_bytes() == before
        db.execute("BEGIN IMMEDIATE")
        assert why_read_only(path) == ""
    path.with_name("a.db-journal").mkdir()  # no change can be begun
    assert why_read_only(path)
    path.with_name("a.db-journal").rmdir()
    path.write_bytes(b"no database at all, but a file of some length")
    assert "not a database" in why_read_only(path)
    assert "Not a directory" in why_read_only(path / "below" / "b.db")


def test_doctor_reports_a_check_that_dies(monkeypatch):
    def crash():
        raise RuntimeError("boom")

    monkeypatch.setattr(doctor_trials, "run_kernel", crash)
    assert any(c.status == doctor.BAD and "boom" in c.found for c in doctor.examine())


def test_doctor_knows_version_ranges(monkeypatch):
    monkeypatch.setattr(doctor, "_requirements", lambda: {"numpy": ">=2.0,<2.1", "jax": ">=0.10"})
    found = fingerprint.package_version("numpy")
    (check,) = doctor._versions()
    assert check.status == (doctor.GOOD if doctor.version_fits(found, "<2.1") else doctor.BAD)
    assert not doctor.version_fits("0.9.9", ">=0.10")
    assert not doctor.version_fits("none", ">=0.10")
    assert doctor.version_fits("2.4.6", ">=2.0, <2.5")


# ---------------------------------------------------------------- cache


def test_cache_ls_shows_entries(capsys):
    fill(cache.open_store())
    assert main(["cache", "ls", "--here"]) == 0
    out = capsys.readouterr().out
    assert "guard-0" in out
    assert "jcuts" in out
    assert "1.25 ms" in out
    assert "2 entries; 0 kernels" in out


def test_cache_ls_tells_once_that_the_database_is_damaged(cache_dir, capsys, caplog):
    cache_dir.mkdir(mode=0o700, exist_ok=True)
    (cache_dir / "tuning.db").write_bytes(b"nothing of the kind")
    assert main(["cache", "ls"]) == 2
    assert capsys.readouterr().err.count("is damaged") == 1
    assert "is damaged" not in caplog.text


def test_cache_ls_names_other_machines_and_versions(cache_dir, capsys):
    fill(cache.open_store(), 1)
    for versions in ('{"jax": "0.9.1", "jcuts": "abcdef0123"}', "not JSON"):
        fill(Store(cache_dir / "tuning.db", device="f" * 32, versions=versions), 1)
    assert main(["cache", "ls"]) == 0
    out = capsys.readouterr().out
    for text in ("jax 0.9.1, jcuts abcdef01", "not JSON", "f" * 12, "these", "3 entries"):
        assert text in out


def test_cache_moves_between_machines(tmp_path, monkeypatch, capsys):
    fill(cache.open_store())
    file = tmp_path / "out.json"
    assert main(["cache", "export", str(file)]) == 0
    assert json.loads(file.read_text())["entries"]
    for name, arguments in (("import", [str(file)]), ("merge", [str(file), str(file)])):
        monkeypatch.setenv("JCUTS_CACHE_DIR", str(tmp_path / name))
        assert main(["cache", name, *arguments]) == 0
        assert len(cache.open_store().ls()) == 2
    assert "2 entries taken over" in capsys.readouterr().out


def test_cache_import_of_nonsense_changes_nothing(tmp_path, capsys):
    fill(cache.open_store())
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    assert main(["cache", "import", str(bad)]) == 2
    assert main(["cache", "merge", str(tmp_path / "missing.json")]) == 2
    assert capsys.readouterr().err.count("jcuts: ") == 2
    assert len(cache.open_store().ls()) == 2


def test_cache_export_to_an_impossible_place(capsys):
    assert main(["cache", "export", "/proc/nowhere/x.json"]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_cache_clear_asks(monkeypatch, capsys):
    fill(cache.open_store())
    object_cache.store(doctor_trials.smoke_kernel())
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert main(["cache", "clear"]) == 1
    assert object_cache.usage()[0] == 1
    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert main(["cache", "clear"]) == 0
    assert (object_cache.usage()[0], cache.open_store().ls()) == (0, [])
    assert "2 entries and 1 kernels removed" in capsys.readouterr().out


@pytest.mark.parametrize("action", [["ls"], ["export", "x.json"], ["clear", "--yes"]])
def test_cache_of_a_path_that_is_no_directory(action, tmp_path, monkeypatch, capsys):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("JCUTS_CACHE_DIR", str(file))
    monkeypatch.chdir(tmp_path)
    assert main(["cache", *action]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"jcuts: the cache directory {file} is not a directory\n")


def test_nothing_is_said_to_be_done_to_a_database_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    fill(cache.open_store())
    file = str(tmp_path / "out.json")
    assert main(["cache", "export", file]) == 0
    monkeypatch.setattr(Store, "ls", lambda self, **_: [])
    monkeypatch.setattr(SqliteFile, "open", _read_only)
    capsys.readouterr()
    for action in (["import", file], ["merge", file], ["clear", "--yes"]):
        assert main(["cache", *action]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "cannot write the tuning database" in err


def _read_only(self, *, write):
    raise sqlite3.OperationalError("attempt to write a readonly database")


def test_cache_ls_of_an_object_cache_that_nobody_may_read(monkeypatch, capsys):
    def refused(self, pattern):
        raise PermissionError(13, "Permission denied", str(self))
        yield

    monkeypatch.setattr(type(object_cache.root()), "glob", refused)
    assert main(["cache", "ls"]) == 0
    assert "0 kernels" in capsys.readouterr().out


def test_cache_clear_without_anybody_to_ask(monkeypatch, capsys):
    def nobody(question):
        raise EOFError

    fill(cache.open_store())
    monkeypatch.setattr("builtins.input", nobody)
    assert main(["cache", "clear"]) == 2
    assert "--yes" in capsys.readouterr().err
    assert main(["cache", "clear", "--yes"]) == 0


# ---------------------------------------------------------------- explain


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "explained_module.py").write_text(
        textwrap.dedent("""
        import jax.numpy as jnp
        import jcuts
        def fn(x, y):
            return jnp.tanh(x) * 2 + y
        fast = jcuts.optimize(fn, tune="off")
        def example():
            return jnp.ones((8, 16)), jnp.ones((16,))
        named = {"x": 1.0, "y": 2.0}
        class space:
            one = 3.0
        """)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "explained_module"
    sys.modules.pop("explained_module", None)


def test_load(module):
    assert explain.load(f"{module}:fn").__name__ == "fn"
    assert explain.load(f"{module}:space.one") == 3.0


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("no_colon", "must look like"),
        (":fn", "must look like"),
        ("no_such_module_at_all:fn", "cannot import"),
        ("explained_module:nothing", "has no 'nothing'"),
        ("explained_module:fn.nothing", "has no 'nothing'"),
    ],
)
def test_load_refuses(module, reference, reason):
    with pytest.raises(UsageError, match=reason) as caught:
        explain.load(reference)
    assert caught.value.reference == reference  # type: ignore[attr-defined]


def test_example_arguments(module):
    assert explain.example_arguments(None) == ((), {})
    positional, keywords = explain.example_arguments(f"{module}:example")
    assert [x.shape for x in positional] == [(8, 16), (16,)]
    assert keywords == {}
    assert explain.example_arguments(f"{module}:named") == ((), {"x": 1.0, "y": 2.0})
    assert explain.example_arguments(f"{module}:space.one") == ((3.0,), {})


def test_explain_shows_kernels_refusals_and_writes_files(module, tmp_path, capsys):
    (tmp_path / f"{module}.py").write_text(
        textwrap.dedent("""
        import jax, jax.numpy as jnp, numpy as np
        def mlp(params, x):
            for w, b in params:
                x = jax.nn.relu(x @ w + b)
            return jnp.sort(x)
        def example():
            random = np.random.default_rng(0)
            layers = [(random.random((a, b), np.float32), np.ones(b, np.float32)) for a, b in ((12, 20), (20, 9))]
            return layers, random.random((5, 12), np.float32)
        """)
    )
    page, data = tmp_path / "report.html", tmp_path / "report.json"
    options = ["--args", f"{module}:example", "--mode", "fusion", "--tune", "off"]
    assert main(["explain", f"{module}:mlp", *options, "--html", str(page), "--json", str(data)]) == 0
    out = capsys.readouterr().out
    for text in ("Subsets", "dot_general", "contraction/", "Left to XLA", "sort", "no op rule", "2 kernel calls"):
        assert text in out
    assert f"{tmp_path.name}/{module}.py:5 (mlp)" in out
    assert str(tmp_path) not in out
    assert "contraction/" in page.read_text()
    report = json.loads(data.read_text())
    assert {s["chosen"].split("/")[0] for s in report["subsets"]} == {"contraction"}
    assert report["refusals"][0]["op"] == "sort"


def test_explain_shows_the_guards_decision(module, capsys):
    assert main(["explain", f"{module}:fast", "--args", f"{module}:example"]) == 0
    out = capsys.readouterr().out
    assert "whole function: jcuts" in out
    assert "tanh" in out
    if "not measured yet" in out:
        assert "is measured by --tune auto" in out
    assert main(["explain", f"{module}:fast", "--args", f"{module}:example", "--tune", "off"]) == 0
    assert "--tune auto" not in capsys.readouterr().out


def test_explain_without_arguments_says_how_to_give_them(module, capsys):
    assert main(["explain", f"{module}:fn"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "fn(x, y)" in err and "--args" in err
    assert main(["explain", f"{module}:fn", "--args", f"{module}:space.one"]) == 2
    assert "does not fit" in capsys.readouterr().err


def test_explain_does_not_ignore_options_of_an_optimised_function(module, capsys):
    fast = [f"{module}:fast", "--args", f"{module}:example"]
    assert main(["explain", *fast, "--mode", "fusion"]) == 2
    assert "optimised already, with mode='mixed'" in capsys.readouterr().err
    assert main(["explain", *fast, "--mode", "mixed", "--tune", "off"]) == 0
    assert main(["explain", f"{module}:fast.__wrapped__", *fast[1:], "--mode", "fusion", "--tune", "off"]) == 0
    assert "mode fusion on cpu" in capsys.readouterr().out


def test_explain_names_the_line_of_the_users_error(module, tmp_path, capsys):
    source = "def bad(x):\n    y = x\n    return y.nothing\ndef none():\n    return 1 / 0\n"
    (tmp_path / f"{module}.py").write_text(source)
    (tmp_path / "given.py").write_text("one = (1.0,)\n")
    assert main(["explain", f"{module}:bad", "--args", "given:one"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"{module}.py:3: " in err and "AttributeError" in err
    assert main(["explain", f"{module}:bad", "--args", f"{module}:none"]) == 2
    assert f"{module}.py:5: " in (err := capsys.readouterr().err) and "ZeroDivisionError" in err
    sys.modules.pop("given", None)


def test_explain_cannot_write_there(module, capsys):
    arguments = ["explain", f"{module}:fast", "--args", f"{module}:example", "--html", "/proc/nowhere/x.html"]
    assert main(arguments) == 2
    assert "cannot be written" in capsys.readouterr().err


# ---------------------------------------------------------------- demo


def test_interleave_times_every_function_equally():
    calls = []
    functions = {name: lambda x, name=name: calls.append(name) or x for name in "ab"}
    times = demo.interleave(functions, (np.ones(3),), seconds=0.0, least=4)
    assert calls == ["a", "b"] * 4
    assert [len(t) for t in times.values()] == [4, 4]


@pytest.mark.parametrize("arguments", [["--batch", "0"], ["--seconds", "0"], ["--seconds", "nan"]])
def test_demo_refuses_impossible_numbers(arguments, capsys):
    assert main(["demo", *arguments]) == 2
    assert "must be" in capsys.readouterr().err


def test_demo_lists_the_networks():
    pytest.importorskip("keras")
    with pytest.raises(JcutsError, match="MobileNetV2"):
        demo.build("NoSuchNetwork", 1)


# ---------------------------------------------------------------- tables


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12.3, "12.3 s"), (0.00123, "1.23 ms"), (45e-6, "45.0 us"), (250e-9, "250 ns"), (0.0, "0.00 ns"), (999, "999 s")],
)
def test_duration(seconds, text):
    assert printing.duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (3 * 2**20, "3.0 MiB"), (2**42, "4.0 TiB"), (2**31, "2.0 GiB")]
)
def test_size(count, text):
    assert printing.size(count) == text
