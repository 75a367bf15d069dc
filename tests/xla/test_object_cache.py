"""The object cache: round trip, corruption, foreign directories, full disks, size limit; and the linker's refusals."""

from __future__ import annotations

import errno
import logging
import os
import tempfile

import pytest

from jcuts.base import keys, knobs
from jcuts.base.errors import CacheError, NativeError
from jcuts.xla import elf, jit_linker, object_cache
from tests.xla import kernels


@pytest.fixture
def kernel():
    return kernels.affine(2, 16)


def stored(cache_dir):
    return sorted(cache_dir.glob("objects/*/*"))


def test_round_trip(cache_dir, kernel):
    assert object_cache.fetch(kernel.digest) is None
    assert object_cache.store(kernel)
    assert object_cache.fetch(kernel.digest) == kernel
    (path,) = stored(cache_dir)
    assert path.name == kernel.digest + ".jco"
    assert path.parent.name == keys.object_folder()
    assert object_cache.usage() == (1, path.stat().st_size)
    assert (cache_dir.stat().st_mode & 0o777) == 0o700
    assert (path.stat().st_mode & 0o077) == 0


def test_storing_twice_writes_once(cache_dir, kernel):
    object_cache.store(kernel)
    (path,) = stored(cache_dir)
    before = path.stat().st_mtime_ns
    assert object_cache.store(kernel)
    assert path.stat().st_mtime_ns == before


DAMAGES = ["truncate", "flip a bit of the code", "flip a bit of the header", "empty", "garbage"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_ignored_logged_and_removed(cache_dir, kernel, damage, caplog):
    object_cache.store(kernel)
    (path,) = stored(cache_dir)
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        data = data[: len(data) // 2]
    elif damage == "flip a bit of the code":
        data[-10] ^= 1
    elif damage == "flip a bit of the header":
        data[len(object_cache.MAGIC) + 70] ^= 1
    elif damage == "empty":
        data = bytearray()
    else:
        data = bytearray(os.urandom(1000))
    path.write_bytes(bytes(data))
    with caplog.at_level(logging.WARNING, "jcuts.objects"):
        assert object_cache.fetch(kernel.digest) is None
    assert kernel.digest in caplog.text
    assert stored(cache_dir) == []
    assert object_cache.store(kernel)
    assert object_cache.fetch(kernel.digest) == kernel


def test_a_file_under_another_digest_is_refused(cache_dir, kernel):
    with pytest.raises(CacheError, match="another kernel"):
        object_cache.decode(object_cache.encode(kernel), "f" * 32)


def test_a_file_of_other_compilers_is_refused(kernel, monkeypatch):
    data = object_cache.encode(kernel)
    monkeypatch.setattr(keys, "object_folder", lambda: "0" * 32)
    with pytest.raises(CacheError, match="installation"):
        object_cache.decode(data, kernel.digest)


@pytest.mark.parametrize("digest", ["../../etc/passwd", "", ".hidden", "a/b", "x" * 200])
def test_a_digest_is_never_a_path(cache_dir, digest, caplog):
    assert object_cache.fetch(digest) is None
    assert "digest" in caplog.text


def test_a_directory_of_another_user_is_refused(cache_dir, kernel, monkeypatch, caplog):
    object_cache.store(kernel)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert object_cache.fetch(kernel.digest) is None
    assert not object_cache.store(kernel)
    assert "belongs to user" in caplog.text


def test_a_directory_that_others_may_write_is_refused(cache_dir, kernel, caplog):
    object_cache.store(kernel)
    (cache_dir / "objects").chmod(0o777)
    assert object_cache.fetch(kernel.digest) is None
    assert "chmod 700" in caplog.text


def test_a_file_in_place_of_the_directory(cache_dir, kernel, caplog):
    cache_dir.write_text("in the way")
    assert not object_cache.store(kernel)
    assert object_cache.fetch(kernel.digest) is None
    assert "cannot use the cache directory" in caplog.text


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_full_or_read_only_disk_is_logged(cache_dir, kernel, monkeypatch, code, caplog):
    def refuse(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    assert not object_cache.store(kernel)
    assert os.strerror(code) in caplog.text


def test_no_temporary_file_survives_a_failed_write(cache_dir, kernel, monkeypatch):
    def refuse(descriptor):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", refuse)
    assert not object_cache.store(kernel)
    assert stored(cache_dir) == []


def test_clean_drops_the_least_recently_used(cache_dir):
    made = [kernels.affine(2, 16, scale=float(2**n)) for n in range(5)]
    for kernel in made:
        object_cache.store(kernel)
    for n, kernel in enumerate(made):
        path = object_cache.root() / keys.object_folder() / f"{kernel.digest}.jco"
        os.utime(path, (1000 + n, 1000 + n))
    assert object_cache.fetch(made[0].digest) == made[0]  # now the most recent
    size = object_cache.usage()[1]
    assert object_cache.clean(limit_bytes=size * 2 // 5 + 10) == 3
    assert [object_cache.fetch(k.digest) is not None for k in made] == [True, False, False, False, True]


def test_clean_follows_the_knob(cache_dir, kernel):
    object_cache.store(kernel)
    with knobs.scope(cache_max_mb=1e-6):
        assert object_cache.clean() == 1
    assert object_cache.usage() == (0, 0)


def test_elf_symbols():
    symbols = elf.read_symbols(kernels.tanh(2, 16).object_code)
    assert "kernel" in symbols.defined
    assert symbols.undefined == {"tanhf"}


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"not an object file" * 20, b"\x7fELF\x02\x01\x01" + b"\xff" * 200])
def test_bytes_that_are_no_object_file(data):
    with pytest.raises(NativeError, match="ELF") as caught:
        jit_linker.link(data, "kernel")
    assert caught.value.size == len(data)  # type: ignore[attr-defined]


def test_a_truncated_object_file_is_refused():
    code = kernels.affine(2, 16).object_code
    for size in range(64, len(code), 97):
        with pytest.raises(NativeError):
            jit_linker.link(code[:size], "kernel")


def test_a_missing_entry_point_is_refused():
    with pytest.raises(NativeError, match="does not define 'other'"):
        jit_linker.link(kernels.affine(2, 16).object_code, "other")


def test_an_unknown_external_symbol_is_refused_instead_of_aborting():
    kernel = kernels.elementwise(
        "%r = call float @no_such_function_anywhere(float %v)",
        tiles=1,
        block=4,
        declarations="declare float @no_such_function_anywhere(float)",
    )
    with pytest.raises(NativeError, match="no_such_function_anywhere") as caught:
        jit_linker.link(kernel.object_code, kernel.symbol)
    assert caught.value.missing == ["no_such_function_anywhere"]  # type: ignore[attr-defined]


def test_code_of_another_machine_is_refused():
    code = bytearray(kernels.affine(2, 16).object_code)
    code[18:20] = (243).to_bytes(2, "little")  # RISC-V
    with pytest.raises(NativeError, match="object code is for 243"):
        jit_linker.link(bytes(code), "kernel")


def test_an_unusable_directory_is_one_warning(cache_dir, kernel, caplog):
    cache_dir.write_text("in the way")
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert not object_cache.store(kernel) and object_cache.fetch(kernel.digest) is None
    assert [r.levelno for r in caplog.records].count(logging.WARNING) == 1
