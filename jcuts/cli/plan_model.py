"""The model of ``jcuts plan``: a preset, a TOML file, or a user's function from a module or a file."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from jcuts.base.errors import JcutsError, UsageError
from jcuts.plan.spec import model as models
from jcuts.plan.spec.layers import Model


def from_name(name: str, *, sequence: int | None = None, flash: bool = False) -> Model:
    """A preset by name or a TOML file by path.  Raises: UsageError, ModelError."""
    if name.endswith(".py"):
        raise UsageError(f"--model {name} is a Python file: name its function, as in {name}:net", model=name)
    return models.load(name, sequence=sequence, flash=flash)


def is_function(name: str) -> bool:
    """Whether a name is ``MODULE:FUNCTION`` or ``FILE:FUNCTION`` (a Python file)."""
    return ":" in name


def example(name: str) -> tuple[Any, ...]:
    """(function, parameters, *inputs) of ``MODULE:FUNCTION`` or ``FILE:FUNCTION`` (a Python file).

    Raises: UsageError for a module or function that is not there, cannot be called, fails, or returns something else;
    of a failure it names the user's line.
    """
    place, _, function = name.rpartition(":")
    factory = _attribute(name, place, function)
    try:
        inspect.signature(factory).bind()
    except (TypeError, ValueError) as error:  # not callable, or not without arguments
        raise UsageError(
            f"--model {name} must be a function of no arguments that returns (function, parameters, *inputs): {error}",
            model=name,
        ) from error
    made = guarded(name, factory)
    if not isinstance(made, tuple) or len(made) < 3 or not callable(made[0]):
        raise UsageError(
            f"--model {name} must return (function, parameters, *inputs), where inputs begin with the batch axis"
        )
    return made


def guarded(model: str, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Calls a user's code.  Raises: UsageError that names the user's line in place of any other exception."""
    try:
        return call(*arguments, **keywords)
    except JcutsError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise UsageError(f"--model {model}: {_last_line(error)}{type(error).__name__}: {_first(error)}") from error


def _first(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else repr(error)


def _last_line(error: BaseException) -> str:
    """``file, line N: `` of the innermost frame outside of installed packages and of jcuts."""
    own = (str(Path(__file__).resolve().parents[1]), sysconfig.get_paths()["stdlib"], "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "site-packages" not in frame.filename and not frame.filename.startswith(own):
            return f"{frame.filename}, line {frame.lineno}: "
    return ""


def _attribute(name: str, place: str, function: str) -> Any:
    module = guarded(name, _module, name, place)
    if not hasattr(module, function):
        raise UsageError(f"--model {name}: {place} has no function {function!r}", model=name)
    return getattr(module, function)


def _module(name: str, place: str) -> ModuleType:
    """The module of a dotted name, or of a file; a file's folder and the current one are on the path."""
    path = Path(place)
    if path.suffix == ".py" or "/" in place:
        path = path if path.suffix else path.with_suffix(".py")
        if not path.is_file():
            raise UsageError(f"--model {name}: there is no file {path}", model=name)
        spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
        if spec is None or spec.loader is None:
            raise UsageError(f"--model {name}: {path} is not a Python file", model=name)
        sys.path.insert(0, str(path.resolve().parent))
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name and place.split(".")[0] == error.name.split(".")[0]:
            raise UsageError(
                f"--model {name}: no module {place!r} in {Path.cwd()} or on the path: "
                "give the file, as in folder/file.py:function",
                model=name,
            ) from error
        raise
