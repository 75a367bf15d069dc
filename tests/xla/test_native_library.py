"""Finding, loading and refusing the native library."""

from __future__ import annotations

import pytest

from jcuts.base import knobs
from jcuts.base.errors import NativeError
from jcuts.xla import native_library


def test_the_built_library_is_found_and_loads():
    good, path = native_library.native_available()
    assert good, path
    assert path.endswith(native_library.LIBRARY)


def test_missing_override(tmp_path):
    with knobs.scope(native=tmp_path / "nothing.so"):
        with pytest.raises(NativeError, match="JCUTS_NATIVE") as caught:
            native_library.load()
        assert caught.value.tried == [str(tmp_path / "nothing.so")]  # type: ignore[attr-defined]
        good, reason = native_library.native_available()
    assert not good
    assert "not a file" in reason


def test_a_file_that_is_no_library(tmp_path):
    path = tmp_path / "text.so"
    path.write_text("hello")
    with knobs.scope(native=path), pytest.raises(NativeError, match="cannot load"):
        native_library.load()


def test_a_library_that_is_not_ours():
    from pathlib import Path

    found = next((p for p in Path("/").glob("lib/*/libm.so.6")), None)
    if found is None:
        pytest.skip("no libm at a known place")
    with knobs.scope(native=found), pytest.raises(NativeError, match="cannot load"):
        native_library.load()


def test_parse_ffi_version():
    header = "// x\n#define XLA_FFI_API_MAJOR 0\n  # define XLA_FFI_API_MINOR  12\n"
    assert native_library.parse_ffi_version(header) == (0, 12)
    assert native_library.parse_ffi_version("#define XLA_FFI_API_MAJOR 1\n") is None


def test_runtime_version_is_read_from_jaxlib():
    version = native_library.runtime_ffi_version()
    assert version is not None
    assert version >= (0, 1)


@pytest.mark.parametrize(("built", "running"), [((0, 3), (0, 3)), ((0, 3), (0, 4)), ((0, 3), None)])
def test_versions_that_fit(built, running):
    native_library.check_version(built, running)


@pytest.mark.parametrize(("built", "running"), [((0, 4), (0, 3)), ((0, 3), (1, 0)), ((1, 0), (0, 9))])
def test_versions_that_do_not_fit(built, running):
    with pytest.raises(NativeError, match="rebuild") as caught:
        native_library.check_version(built, running)
    assert (caught.value.built, caught.value.running) == (built, running)  # type: ignore[attr-defined]


def test_c_interface():
    lib = native_library.load()
    assert lib.jcuts_is_registered(b"never seen") == 0
    assert lib.jcuts_register(b"never seen", 0) == 1
    assert lib.jcuts_unregister(b"never seen") == 1
    assert lib.jcuts_register(b"seen", 4096) == 0
    assert lib.jcuts_is_registered(b"seen") == 1
    assert lib.jcuts_unregister(b"seen") == 0
    assert lib.jcuts_is_registered(b"seen") == 0
    assert lib.jcuts_bench(0, None, 1, 0, 0, 1, 1, None) == 1
