"""In-process linker of CPU kernels (LLVM's MCJIT, through llvmlite): loads relocatable object code and keeps it there.

numba is not needed to run a kernel, only to compile one.
"""

from __future__ import annotations

import platform
import threading
from typing import Any

from jcuts.base.errors import NativeError
from jcuts.xla.elf import read_symbols

_MATH_LIBRARIES = ("libm.so.6", "libm.so", "libm.dylib")

_lock = threading.Lock()
# Executables keep raw function pointers, so engines are never freed.
_engines: list[Any] = []
_prepared = False


def _binding() -> Any:
    global _prepared
    try:
        from llvmlite import binding
    except ImportError as error:
        raise NativeError(f"llvmlite cannot be imported ({error}): install numba to run jcuts' kernels") from error
    if not _prepared:
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        for name in _MATH_LIBRARIES:
            try:
                binding.load_library_permanently(name)
                break
            except RuntimeError:
                continue
        _prepared = True
    return binding


def link(object_code: bytes, symbol: str) -> int:
    """Links one object file and returns the address of ``symbol``; the code stays for the life of the process.

    Args:
        object_code: relocatable ELF of this machine.
        symbol: name of a function that it defines.
    Raises:
        NativeError: not ELF, another machine, the symbol is missing, or a name that nothing in this process defines.
    """
    symbols = read_symbols(object_code)
    if symbols.machine != platform.machine():
        raise NativeError(
            f"object code is for {symbols.machine}, this machine is {platform.machine()}",
            found=symbols.machine,
            expected=platform.machine(),
        )
    if symbol not in symbols.defined:
        raise NativeError(f"object code does not define {symbol!r}", symbol=symbol)
    with _lock:
        binding = _binding()
        missing = sorted(name for name in symbols.undefined if not binding.address_of_symbol(name))
        if missing:
            raise NativeError(
                f"object code of {symbol!r} needs {', '.join(missing)}, which this process does not have: "
                "only libm may be used",
                symbol=symbol,
                missing=missing,
            )
        try:
            machine = binding.Target.from_default_triple().create_target_machine()
            engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
            engine.add_object_file(binding.ObjectFileRef.from_data(object_code))
            engine.finalize_object()
            address = int(engine.get_function_address(symbol))
        except RuntimeError as error:
            raise NativeError(f"cannot link the object code of {symbol!r}: {error}", symbol=symbol) from error
        if not address:
            raise NativeError(f"the linker found no address for {symbol!r}", symbol=symbol)
        _engines.append(engine)
        return address
