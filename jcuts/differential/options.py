"""Registry of XLA compiler options with the reason why each is suspected.

They are ``compiler_options`` of `jax.jit`; an installed jaxlib may not know one (`refused`).
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUSPICIOUS = "suspicious"
FUSION = "fusion"
PASS = "pass"
REFERENCE = "reference"
FILE = Path(__file__).parent / "data" / "xla_options.toml"


@dataclass(frozen=True)
class XlaOption:
    """One compiler option. Attributes: value: that switches the suspect off; groups: what it is used for."""

    name: str
    value: Any
    platform: str
    groups: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return f"{self.name}={self.value if self.value != '' else chr(39) * 2}"


@functools.cache
def registry() -> tuple[XlaOption, ...]:
    """All options, in the order of the file."""
    entries = tomllib.loads(FILE.read_text(encoding="utf-8"))["option"]
    return tuple(XlaOption(**{**entry, "groups": tuple(entry["groups"])}) for entry in entries)


def of_group(platform: str, *groups: str) -> list[XlaOption]:
    """The options of any of these groups on a platform (``cpu`` or ``cuda``)."""
    return [o for o in registry() if o.platform in (platform, "any") and set(groups) & set(o.groups)]


def compiler_options(options: Iterable[XlaOption], left_out: Iterable[str] = ()) -> dict[str, Any]:
    """``compiler_options`` of `jax.jit`; lists of passes are joined. Args: left_out: names that a jaxlib refuses."""
    found: dict[str, Any] = {}
    for option in options:
        if option.name in left_out:
            continue
        if option.name in found and option.name == "xla_disable_hlo_passes":
            found[option.name] += f",{option.value}"
        else:
            found[option.name] = option.value
    return found


def refused(platform: str) -> frozenset[str]:
    """Names of the registry's options that the installed jaxlib does not know (compiles a program of one operation)."""
    import jax

    found = set()
    for option in of_group(platform, SUSPICIOUS, FUSION, PASS, REFERENCE):
        try:
            jax.jit(lambda x: x, compiler_options={option.name: option.value}).lower(0).compile()
        except Exception as error:  # JAX wraps XLA's refusal in several kinds of errors
            if "No such compile option" in str(error) or "option" in str(error).lower():
                found.add(option.name)
            else:
                raise
    return frozenset(found)
