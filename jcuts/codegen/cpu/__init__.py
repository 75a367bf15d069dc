"""CPU back end: scheduled program -> numba loop nest with LLVM tile bodies -> relocatable object code."""
