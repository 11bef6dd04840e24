"""Columns, tables and kernels at addresses, for kernels that take a few integers instead of many arrays.

Imports numba: only the compiled half of `kernels` may import this module. Whoever passes an address keeps the memory
alive.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sb3_extra_buffers.codecs.jit import without_signals
from sb3_extra_buffers.kernels.columns_numba import TABLES, column_at

_WORD, _INT32 = ir.IntType(64), ir.IntType(32)

# ``rows_at(address, shape)``: the memory at an address as a column
bytes_at, rows_at, frames_at = (column_at(types.uint8, ndim) for ndim in (1, 2, 3))
int64_at, int32_at, int32_rows_at = column_at(types.int64, 1), column_at(types.int32, 1), column_at(types.int32, 2)
float32_at, float64_at = column_at(types.float32, 1), column_at(types.float64, 1)


@intrinsic
def tables_from(typing_context: Any, address: Any) -> Any:
    """`tables_at` for the address of bound tables."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], _WORD.as_pointer())

    return TABLES(types.int64), generate


@intrinsic
def call_native(typing_context: Any, address: Any, arguments: Any) -> Any:
    """Call the kernel at a `native_address`; it must not raise."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # as numba calls compiled functions: with pointers to the result and to the exception, returning a status
        values = cgutils.unpack_tuple(builder, args[1])
        result = cgutils.alloca_once(builder, _WORD)
        kind = ir.FunctionType(_INT32, [_WORD.as_pointer(), cgutils.voidptr_t, *[_WORD] * len(values)])
        function = builder.inttoptr(args[0], kind.as_pointer())
        builder.call(function, [result, cgutils.voidptr_t(None), *values])
        return builder.load(result)

    return types.int64(types.int64, types.UniTuple(types.int64, len(arguments))), generate


def native_address(kernel: Any, n_arguments: int) -> int:
    """Return the address of a kernel that takes and returns int64, for `call_native`; compiles it if necessary."""
    signature = (types.int64,) * n_arguments
    if signature not in kernel.overloads:
        without_signals(kernel.compile, signature)
    compiled = kernel.overloads[signature]
    address: int = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    return address
