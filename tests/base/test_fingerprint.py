"""Hashes are unambiguous, stable and honest."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jcuts.base import fingerprint, keys
from jcuts.base.errors import UsageError
from jcuts.base.fingerprint import digest

parts = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner).map(tuple),
    max_leaves=6,
)


def canonical(x):
    """Equal only if the parts are: Python thinks that 1 == 1.0 == True."""
    if isinstance(x, tuple):
        return ("tuple", tuple(canonical(y) for y in x))
    return (type(x).__name__, repr(x))


@given(st.lists(parts, max_size=4), st.lists(parts, max_size=4))
def test_equal_exactly_if_the_parts_are_equal(a, b):
    assert (digest(*a) == digest(*b)) == (canonical(tuple(a)) == canonical(tuple(b)))


def test_known_value():
    # Keys on disk depend on it: a change here orphans every cache.
    assert digest() == "e3b0c44298fc1c149afbf4c8996fb924"
    assert digest("a", 1, 2.5, None, True, b"x", (1, "y"), {"k": [3]}) == digest(
        "a", 1, 2.5, None, True, b"x", [1, "y"], {"k": (3,)}
    )


def test_boundaries_matter():
    assert len({digest("ab", "c"), digest("a", "bc"), digest(("ab", "c")), digest("abc"), digest(b"abc")}) == 5


def test_order_of_dicts_and_sets_does_not():
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest({"x", "y", "z"}) == digest({"z", "y", "x"})


def test_other_types_are_refused():
    with pytest.raises(UsageError, match="object"):
        digest(object())


def test_stable_across_processes():
    code = (
        "from jcuts.base.fingerprint import *; from jcuts.base import keys; "
        "print(digest({'a', 'b', 'c'}), source_hash(), keys.cpu_device(), keys.object_folder())"
    )
    command = [sys.executable, "-c", code]
    runs = {subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)}
    here = (digest({"a", "b", "c"}), fingerprint.source_hash(), keys.cpu_device(), keys.object_folder())
    assert runs == {" ".join(here) + "\n"}


def test_versions_without_importing_anything_heavy():
    code = (
        "import sys; from jcuts.base import fingerprint, keys; fingerprint.versions(); keys.packages(); "
        "keys.cpu_device(); keys.object_folder(); keys.schedules('cuda', 'contraction'); "
        "print([m for m in ('jax', 'jaxlib', 'numba', 'llvmlite', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_versions():
    import jax
    import numba

    found = fingerprint.versions()
    assert found["jax"] == jax.__version__
    assert found["numba"] == numba.__version__
    assert fingerprint.package_version("no-such-distribution-here") == "none"


def test_cpuinfo():
    x86 = "processor : 0\nmodel name\t: Some CPU @ 3GHz\nflags\t\t: sse avx2 avx\n\nprocessor : 1\nmodel name: other\n"
    assert fingerprint.parse_cpuinfo(x86) == ("Some CPU @ 3GHz", ("avx", "avx2", "sse"))
    assert fingerprint.parse_cpuinfo("Features : fp asimd\n") == ("", ("asimd", "fp"))
    assert fingerprint.parse_cpuinfo("") == ("", ())


def test_cpu():
    here = fingerprint.cpu()
    assert here["cores"] >= 1  # type: ignore[operator]
    assert here["machine"]
