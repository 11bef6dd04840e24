"""How compiled kernels see arrays: as a pointer and a shape, without reference counts. Imports numba.

A numba array brings code that counts references, and code for negative indices, to every place that uses it. Kernels
made of it took three times as long to compile.
"""

from __future__ import annotations

import operator
from typing import Any, get_type_hints

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import from_dtype, types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, infer_getattr, infer_global, signature
from numba.extending import (
    intrinsic,
    lower_builtin,
    lower_getattr_generic,
    make_attribute_wrapper,
    models,
    register_model,
)

from sb3_extra_buffers.kernels.state import Bytes, FrameConfig, FrameState, Ints, Ints32

_WORD = ir.IntType(64)


# ---- columns ----


class ColumnType(types.Type):
    """A C-contiguous array that someone else keeps alive. Indices are not checked and do not wrap."""

    def __init__(self, dtype: Any, ndim: int) -> None:
        self.dtype, self.ndim = dtype, ndim
        super().__init__(f"Column({dtype}, {ndim})")


@register_model(ColumnType)
class _ColumnModel(models.StructModel):
    def __init__(self, manager: Any, column: ColumnType) -> None:
        members = [("data", types.CPointer(column.dtype)), ("shape", types.UniTuple(types.intp, column.ndim))]
        super().__init__(manager, column, members)


make_attribute_wrapper(ColumnType, "shape", "shape")


@infer_global(len)
class _Length(AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        return signature(types.intp, *args) if isinstance(args[0], ColumnType) else None


@infer_global(operator.getitem)
class _GetItem(AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        column, index = args
        return signature(column.dtype, column, _index_type(column, index)) if isinstance(column, ColumnType) else None


@infer_global(operator.setitem)
class _SetItem(AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        column, index, _ = args
        if not isinstance(column, ColumnType):
            return None
        return signature(types.none, column, _index_type(column, index), column.dtype)


def _index_type(column: ColumnType, index: Any) -> Any:
    n_indices = len(index) if isinstance(index, types.BaseTuple) else 1
    if n_indices != column.ndim:
        raise TypeError(f"{column} takes {column.ndim} indices, got {index}")
    return types.UniTuple(types.intp, column.ndim) if isinstance(index, types.BaseTuple) else types.intp


@lower_builtin(len, ColumnType)
def _lower_len(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    column = cgutils.create_struct_proxy(signature.args[0])(context, builder, value=args[0])
    return builder.extract_value(column.shape, 0)


@lower_builtin(operator.getitem, ColumnType, types.Integer)
@lower_builtin(operator.getitem, ColumnType, types.BaseTuple)
def _lower_getitem(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.load(_element(context, builder, signature, args))


@lower_builtin(operator.setitem, ColumnType, types.Integer, types.Any)
@lower_builtin(operator.setitem, ColumnType, types.BaseTuple, types.Any)
def _lower_setitem(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    builder.store(args[2], _element(context, builder, signature, args))
    return context.get_dummy_value()


def _element(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return the pointer to an element."""
    kind, index_kind = signature.args[:2]
    column = cgutils.create_struct_proxy(kind)(context, builder, value=args[0])
    index = args[1]
    if isinstance(index_kind, types.BaseTuple):
        index, *others = cgutils.unpack_tuple(builder, args[1])
        for axis, other in enumerate(others, 1):
            index = builder.add(builder.mul(index, builder.extract_value(column.shape, axis)), other)
    return builder.gep(column.data, [index])


def make_column(context: Any, builder: Any, kind: ColumnType, address: Any, shape: list[Any]) -> Any:
    """Return a column of the bytes at ``address``, an integer or a pointer."""
    column = cgutils.create_struct_proxy(kind)(context, builder)
    pointer = column.data.type
    convert = builder.bitcast if isinstance(address.type, ir.PointerType) else builder.inttoptr
    column.data = convert(address, pointer)
    column.shape = cgutils.pack_array(builder, shape)
    return column._getvalue()


def data_pointer(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """Return the pointer to the first byte of a numba array or a column."""
    if isinstance(kind, ColumnType):
        data = cgutils.create_struct_proxy(kind)(context, builder, value=value).data
    else:
        data = context.make_array(kind)(context, builder, value).data
    return builder.bitcast(data, cgutils.voidptr_t)


@intrinsic
def as_column(typing_context: Any, array: Any) -> Any:
    """View a numba array, which must be C-contiguous, as a column. The caller keeps the array alive: see `keep`."""
    if array.layout != "C":
        raise TypingError(f"a column must be a C-contiguous array, got {array}; call as_contiguous first")
    kind = ColumnType(array.dtype, array.ndim)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        made = context.make_array(signature.args[0])(context, builder, args[0])
        return make_column(context, builder, kind, made.data, cgutils.unpack_tuple(builder, made.shape))

    return kind(array), generate


@intrinsic
def keep(typing_context: Any, array: Any, result: Any) -> Any:
    """Return ``result``. numba frees an array after its last use; this is one, for columns that view ``array``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return args[1]

    return result(array, result), generate


@intrinsic
def flat(typing_context: Any, column: Any) -> Any:
    """View a column of any shape as one dimension, of unknown length: one compiled function serves all shapes."""
    kind = ColumnType(column.dtype, 1)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = data_pointer(context, builder, signature.args[0], args[0])
        return make_column(context, builder, kind, address, [_WORD(0)])

    return kind(column), generate


def _part(dtype: Any) -> Any:
    @intrinsic
    def part(typing_context: Any, column: Any, start: Any, count: Any) -> Any:
        kind = ColumnType(dtype, 1)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            first = builder.gep(data_pointer(context, builder, signature.args[0], args[0]), [args[1]])
            return make_column(context, builder, kind, first, [args[2]])

        return kind(column, types.intp, types.intp), generate

    return part


#: ``part(column, start, count)`` views ``count`` bytes, or int64, from byte ``start`` of a column on
part = _part(types.uint8)
int64_part = _part(types.int64)


def column_at(dtype: Any, ndim: int) -> Any:
    """Return a function ``at(address, shape)`` for compiled code, which views the memory at an address as a column."""
    kind = ColumnType(dtype, ndim)
    words = types.UniTuple(types.int64, ndim)

    @intrinsic
    def at(typing_context: Any, address: Any, shape: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return make_column(context, builder, kind, args[0], cgutils.unpack_tuple(builder, args[1]))

        return kind(types.int64, words), generate

    return at


def _on_stack(dtype: Any) -> Any:
    @intrinsic
    def on_stack(typing_context: Any, count: Any) -> Any:
        kind = ColumnType(dtype, 1)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            memory = builder.alloca(context.get_value_type(dtype), args[0])
            return make_column(context, builder, kind, memory, [args[0]])

        return kind(types.intp), generate

    return on_stack


#: ``stack_int64(count)``: a column on the stack, freed with the function it is called in. Not to be called in a loop.
stack_int64 = _on_stack(types.int64)


# ---- the tables of a store ----


class TablesType(types.Type):
    """`FrameState` in compiled code: the address of what `bind_state` lays out."""


class ConfigType(types.Type):
    """`FrameConfig` in compiled code: the same address."""


TABLES, _CONFIG = TablesType("Tables"), ConfigType("Config")


@register_model(TablesType)
@register_model(ConfigType)
class _AddressModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _WORD.as_pointer())


_DTYPES = {Bytes: np.uint8, Ints: np.int64, Ints32: np.int32}
_NDIM = {"recent": 3, "recent_ids": 2, "undo_ids": 2, "last_stack": 2, "keyframe_cost": 2}
_COLUMNS = {
    name: (np.dtype(_DTYPES[hint]), _NDIM.get(name, 1))
    for name, hint in get_type_hints(FrameState).items()
    if name != "config"
}
_TYPES = {name: ColumnType(from_dtype(dtype), ndim) for name, (dtype, ndim) in _COLUMNS.items()}
# where the entries of each column start: after the configuration, an address and a shape each
_STARTS = dict(
    zip(
        _COLUMNS,
        (len(FrameConfig._fields) + np.cumsum([0, *(1 + ndim for _, ndim in _COLUMNS.values())])).tolist(),
        strict=False,
    )
)


class _Bound(bytearray):
    """The memory of bound tables, with the arrays that they point to."""

    __slots__ = ("state",)
    state: FrameState


def bind_state(state: FrameState, known: dict[str, Any]) -> Ints:
    """Convert ``state`` to what the compiled kernels take; the result keeps the arrays alive.

    ``known`` holds the entries of columns that are the same as at the last call, because each takes a microsecond.
    numba takes 0.2 us to inspect each array that it is passed; so it gets one with the addresses of all.
    """
    entries = list(state.config)
    for name in _COLUMNS:
        entries += known.get(name) or known.setdefault(name, _entries_of(name, getattr(state, name)))
    memory = _Bound(8 * len(entries))
    memory.state = state
    bound: npt.NDArray[np.int64] = np.frombuffer(memory, np.int64)
    bound[:] = entries
    return bound


def _entries_of(name: str, column: Any) -> tuple[int, ...]:
    dtype, ndim = _COLUMNS[name]
    if column.dtype != dtype or column.ndim != ndim or not column.flags.c_contiguous:
        raise TypeError(f"column {name} must be a contiguous {dtype} array of {ndim} dimensions")
    return (column.ctypes.data, *column.shape)


@intrinsic
def tables_at(typing_context: Any, bound: Any) -> Any:
    """The tables that ``bound`` describes, as kernels use them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = data_pointer(context, builder, signature.args[0], args[0])
        return builder.bitcast(data, _WORD.as_pointer())

    return TABLES(bound), generate


def _load_entry(builder: Any, tables: Any, position: int) -> Any:
    entry = builder.load(builder.gep(tables, [_WORD(position)]))
    # nobody changes the entries while a kernel runs, which the compiler cannot know
    entry.set_metadata("invariant.load", builder.module.add_metadata([]))
    return entry


@infer_getattr
class _TablesAttributes(AttributeTemplate):
    key = TablesType

    def generic_resolve(self, tables: Any, name: str) -> Any:
        return _CONFIG if name == "config" else _TYPES.get(name)


@infer_getattr
class _ConfigAttributes(AttributeTemplate):
    key = ConfigType

    def generic_resolve(self, config: Any, name: str) -> Any:
        return types.int64 if name in FrameConfig._fields else None


@lower_getattr_generic(TablesType)
def _lower_column(context: Any, builder: Any, kind: Any, tables: Any, name: str) -> Any:
    if name == "config":
        return tables
    start = _STARTS[name]
    shape = [_load_entry(builder, tables, start + 1 + axis) for axis in range(_TYPES[name].ndim)]
    return make_column(context, builder, _TYPES[name], _load_entry(builder, tables, start), shape)


@lower_getattr_generic(ConfigType)
def _lower_setting(context: Any, builder: Any, kind: Any, tables: Any, name: str) -> Any:
    return _load_entry(builder, tables, FrameConfig._fields.index(name))
