"""Exported programs (``jax.export``): operands bound to constants inside of their StableHLO module."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax._src.interpreters import mlir as _mlir
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir import ir as _ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import hlo as _hlo

_MAIN = "main"


def with_constants(exported: Any, constants: Sequence[Any]) -> Any:
    """An ``Exported`` whose first operands are bound to arrays; it takes the others.

    They become constants of the function itself, as closed-over arrays are.  Passed by its caller they would be the
    same after inlining, but XLA's passes then meet them in another order, and round differently here and there.

    Args: exported: of a function of one tuple of arrays and any number of further arrays. constants: NumPy arrays for
        all of the tuple.
    """
    count, avals = len(constants), exported.in_avals[len(constants) :]
    return dataclasses.replace(
        exported,
        mlir_module_serialized=_bound(exported, constants) if constants else exported.mlir_module_serialized,
        in_tree=jax.tree.structure(((*[0] * len(avals),), {})),
        in_avals=avals,
        in_shardings_hlo=exported.in_shardings_hlo[count:],
        _in_named_shardings=exported._in_named_shardings[count:],
        module_kept_var_idx=tuple(number - count for number in exported.module_kept_var_idx if number >= count),
        _get_vjp=None,
    )


def _bound(exported: Any, constants: Sequence[Any]) -> bytes:
    """The serialised module, with constants in place of the first operands."""
    count, kept = len(constants), exported.module_kept_var_idx
    with _mlir.make_ir_context(), _ir.Location.unknown():
        module = _jax.mlir.deserialize_portable_artifact(exported.mlir_module_serialized)
        main: Any = _ir.SymbolTable(module.operation)[_MAIN]
        block = main.entry_block
        first = len(block.arguments) - len(kept)  # behind the platform's index, if there is one
        bound = [(first + place, constants[number]) for place, number in enumerate(kept) if number < count]
        with _ir.InsertionPoint.at_block_begin(block):
            for place, array in bound:
                block.arguments[place].replace_all_uses_with(_mlir.ir_constant(array))
        gone = {place for place, _ in bound}
        attributes = [a for place, a in enumerate(main.arg_attrs) if place not in gone]
        for place in sorted(gone, reverse=True):
            block.erase_argument(place)
        types = [argument.type for argument in block.arguments]
        main.attributes["function_type"] = _ir.TypeAttr.get(_ir.FunctionType.get(types, list(main.type.results)))
        main.arg_attrs = _ir.ArrayAttr.get(attributes)
        module.operation.verify()
        return _jax.mlir.serialize_portable_artifact(module, _hlo.get_current_version())
