"""A tensor whose rows lie in a store: TorchRL indexes it like any other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_map

from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec
from sb3_extra_buffers.errors import IndexOutOfRangeError, SpecMismatchError
from sb3_extra_buffers.stores.observation import ObservationStore

__all__ = [
    "GroupLeaf",
    "Leaf",
    "Positions",
    "StoredTensor",
    "as_rows",
    "bits_of",
    "leaf_spec",
    "to_numpy",
    "to_torch",
    "wrap",
]

Positions = npt.NDArray[np.int64]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(dtype: torch.dtype) -> torch.dtype:
    """``dtype`` where NumPy has it too; else one of the same size to see its bits through."""
    try:
        torch.empty(0, dtype=dtype).numpy()
    except TypeError:
        if dtype.itemsize not in _BITS:
            raise SpecMismatchError(f"tensors of {dtype} have no bytes that could be stored") from None
        return _BITS[dtype.itemsize]
    return dtype


def to_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The elements of ``tensor`` on the host, one after the other, without a copy where they already are."""
    tensor = tensor.detach().to("cpu").contiguous()
    bits = bits_of(tensor.dtype)
    return (tensor if bits is tensor.dtype else tensor.view(bits)).numpy()


def to_torch(array: npt.NDArray[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Undo `to_numpy`; on the CPU the tensor takes over the array's memory."""
    tensor = torch.from_numpy(array)
    if tensor.dtype is not dtype:
        tensor = tensor.view(dtype)
    return tensor if device.type == "cpu" else tensor.to(device)


class Leaf:
    """One key of the data: ``n_rows`` tensors of one shape and dtype in cells of a store."""

    def __init__(self, store: ObservationStore, n_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.store = store
        self.n_rows = n_rows
        self.dtype = dtype
        self.device = device
        # a stream is found by position, so every leaf begins with the first of them
        steps = -(-n_rows // store.n_streams)
        self.base = store.allocate(steps * store.n_streams)

    @property
    def spec(self) -> ObsSpec:
        return self.store.spec

    @property
    def shape(self) -> tuple[int, ...]:
        return self.store.spec.shape

    def describe(self) -> str:
        """The method in use and why."""
        return self.store.describe()

    def read(self, positions: Positions) -> torch.Tensor:
        """The tensors at ``positions``, of any shape, freshly decoded."""
        rows = self.store.read(np.ascontiguousarray(positions).reshape(-1) + self.base)
        return self.as_tensor(rows, positions.shape)

    def as_tensor(self, rows: ByteRows, lead: tuple[int, ...]) -> torch.Tensor:
        array = rows.view(self.store.spec.dtype).reshape((*lead, *self.shape))
        return to_torch(array, self.dtype, self.device)

    def as_rows(self, tensor: torch.Tensor) -> ByteRows:
        """``tensor`` of shape ``(*lead, *shape)`` as rows."""
        return as_rows(self.store.spec, tensor)

    def write(self, positions: Positions, tensor: torch.Tensor) -> None:
        """Store one tensor for each of ``positions``."""
        flat = np.ascontiguousarray(positions).reshape(-1)
        self.store.write(flat + self.base, flat % self.store.n_streams, self.as_rows(tensor))


class GroupLeaf:
    """One key of a group that does the reading and writing itself."""

    def __init__(self, group: Any, place: int) -> None:
        self.group, self.place = group, place
        self.dtype: torch.dtype = group.dtype
        self.device: torch.device = group.device

    @property
    def spec(self) -> ObsSpec:
        spec: ObsSpec = self.group.spec
        return spec

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    def describe(self) -> str:
        """The method in use and why."""
        text: str = self.group.describe()
        return text

    def read(self, positions: Positions) -> torch.Tensor:
        """The tensors at ``positions``, of any shape, freshly decoded."""
        rows: torch.Tensor = self.group.read_sets([self.place], np.ascontiguousarray(positions).reshape(-1))[0]
        return rows.reshape((*positions.shape, *self.shape))

    def as_rows(self, tensor: torch.Tensor) -> ByteRows:
        """``tensor`` of shape ``(*lead, *shape)`` as rows."""
        return as_rows(self.spec, tensor)

    def write(self, positions: Positions, tensor: torch.Tensor) -> None:
        """Store one tensor for each of ``positions``."""
        self.group.write_set(self.place, np.ascontiguousarray(positions).reshape(-1), self.as_rows(tensor))


def as_rows(spec: ObsSpec, tensor: torch.Tensor) -> ByteRows:
    """A tensor of observations as rows on the host."""
    rows: ByteRows = to_numpy(tensor).reshape(-1, math.prod(spec.shape)).view(np.uint8)
    return rows


def leaf_spec(shape: tuple[int, ...], dtype: torch.dtype) -> ObsSpec:
    """What one row of such tensors is to a store."""
    return ObsSpec(tuple(shape), torch.empty(0, dtype=bits_of(dtype)).numpy().dtype)


class StoredTensor(torch.Tensor):
    """Looks like a tensor of shape ``(len(rows), *inner, *leaf.shape)``; holds none of its elements.

    Slices of the first axis are further stored tensors, and so is this one with its first two leading axes swapped,
    as TorchRL's buffers show it; all else that is read is decoded into plain tensors. What is written to it, also to
    a slice and in place, is written to the store.
    """

    leaf: Any  # a `Leaf` or a `GroupLeaf`
    rows: range
    inner_shape: tuple[int, ...]
    swapped: bool

    @staticmethod
    def __new__(cls, leaf: Any, rows: range, inner: tuple[int, ...] = (), swapped: bool = False) -> StoredTensor:
        lead = (inner[0], len(rows), *inner[1:]) if swapped else (len(rows), *inner)
        shape = (*lead, *leaf.shape)
        tensor: StoredTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=leaf.dtype, device=leaf.device)
        tensor.leaf, tensor.rows, tensor.inner_shape, tensor.swapped = leaf, rows, inner, swapped
        return tensor

    def __init__(self, leaf: Any, rows: range, inner: tuple[int, ...] = (), swapped: bool = False) -> None:
        pass

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # takes what torch passes
        return f"StoredTensor(shape={tuple(self.shape)}, dtype={self.dtype}, {self.leaf.describe()})"

    def dense(self) -> torch.Tensor:
        """All of it, decoded."""
        tensor: torch.Tensor = self.leaf.read(self._table())
        return tensor

    def overwrite(self, tensor: torch.Tensor) -> None:
        """Replace all of it by ``tensor``, which must have its shape and dtype."""
        self.leaf.write(self._table(), tensor)

    def _table(self) -> Positions:
        """Positions of all rows, in the shape of the leading axes."""
        width = math.prod(self.inner_shape)
        steps = np.arange(self.rows.start, self.rows.stop, self.rows.step, dtype=np.int64)
        table = (steps[:, None] * width + np.arange(width)).reshape(len(self.rows), *self.inner_shape)
        return table.swapaxes(0, 1) if self.swapped else table

    def with_axes_swapped(self, one: int, other: int) -> StoredTensor | None:
        """This with two axes in each other's place, or None if they are not the first two leading ones."""
        if not self.inner_shape or {one % self.ndim, other % self.ndim} != {0, 1}:
            return None
        return StoredTensor(self.leaf, self.rows, self.inner_shape, not self.swapped)

    # ---- indices ----

    def read_at(self, index: Any) -> torch.Tensor:
        """``self[index]``."""
        parts = _parts(index)
        if len(parts) == 1 and isinstance(parts[0], slice) and not self.swapped:
            return StoredTensor(self.leaf, self.rows[parts[0]], self.inner_shape)
        positions = self._positions(parts)
        if positions is None:
            return self.dense()[index]
        tensor: torch.Tensor = self.leaf.read(positions)
        return tensor

    def write_at(self, index: Any, value: Any) -> None:
        """``self[index] = value``."""
        parts = _parts(index)
        positions = self._positions(parts)
        if positions is None:
            whole = self.dense()
            whole[index] = _plain(value)
            self.overwrite(whole)
            return
        value = torch.as_tensor(_plain(value))
        shape = (*positions.shape, *self.leaf.shape)
        if value.dtype != self.dtype:
            raise SpecMismatchError(f"cannot write {value.dtype} where {self.dtype} is stored; convert it first")
        try:
            value = value.expand(shape)
        except RuntimeError:
            raise SpecMismatchError(
                f"cannot write a tensor of {tuple(value.shape)} where {shape} is expected"
            ) from None
        self.leaf.write(positions, value)

    def _positions(self, parts: tuple[Any, ...]) -> Positions | None:
        """Where the rows lie that ``parts`` select; None where they select parts of rows."""
        lead = tuple(self.shape[: 1 + len(self.inner_shape)])
        if not parts or (len(parts) == 1 and parts[0] is Ellipsis):
            return self._table()
        if any(part is None or part is Ellipsis or isinstance(part, bool) for part in parts):
            return None
        axes = sum(part.ndim if isinstance(part, np.ndarray) and part.dtype == np.bool_ else 1 for part in parts)
        if axes > len(lead):
            return None
        try:
            if len(lead) == 1 and isinstance(parts[0], np.ndarray) and parts[0].dtype != np.bool_:
                # without a table of all rows
                chosen = wrap(parts[0], lead[0])
                return chosen * self.rows.step + self.rows.start
            return np.asarray(self._table()[parts])
        except IndexError as error:
            raise IndexOutOfRangeError(f"{error} (rows are {lead})") from None

    # ---- torch ----

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.__getitem__ and isinstance(args[0], StoredTensor):
            return args[0].read_at(args[1])
        if func is torch.Tensor.__setitem__ and isinstance(args[0], StoredTensor):
            return args[0].write_at(args[1], args[2])
        if func in (torch.Tensor.transpose, torch.transpose) and isinstance(args[0], StoredTensor):
            axes = [*args[1:], *kwargs.values()]
            swapped = args[0].with_axes_swapped(*axes) if all(isinstance(axis, int) for axis in axes) else None
            if swapped is not None:
                return swapped
        if func in _NEED_MEMORY:
            return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks the operation
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:
            return StoredTensor(args[0].leaf, args[0].rows, args[0].inner_shape, args[0].swapped)
        decoded: dict[int, tuple[StoredTensor, torch.Tensor]] = {}

        def plain(value: Any) -> Any:
            if not isinstance(value, StoredTensor):
                return value
            if id(value) not in decoded:
                decoded[id(value)] = value, value.dense()
            return decoded[id(value)][1]

        out = func(*tree_map(plain, args), **tree_map(plain, kwargs))
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            # one, or the many of an operation on lists
            for written in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(written, StoredTensor):
                    written.overwrite(decoded[id(written)][1])
                    out = written if out is decoded[id(written)][1] else out
        return out


# these look at a tensor's memory, past everything that could decode it on the way
_NEED_MEMORY = {
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.item,
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
    torch.Tensor.share_memory_,
    torch.Tensor.__array__,
    torch.Tensor.__deepcopy__,
    torch.Tensor.__reduce_ex__,
}


def _plain(value: Any) -> Any:
    return value.dense() if isinstance(value, StoredTensor) else value


def _parts(index: Any) -> tuple[Any, ...]:
    """An index as NumPy understands it, one part after the other."""
    parts = index if isinstance(index, tuple) else (index,)
    return tuple(_part(part) for part in parts)


def _part(part: Any) -> Any:
    if isinstance(part, torch.Tensor):
        array = part.detach().cpu().numpy()
        return array if array.ndim else (bool(array) if array.dtype == np.bool_ else int(array))
    if isinstance(part, (list, range)):
        array = np.asarray(part)
        return array.astype(np.int64) if not array.size else array
    return int(part) if isinstance(part, np.integer) else part


def wrap(indices: npt.NDArray[Any], size: int) -> Positions:
    """Indices counted from the front, or an error if one is outside."""
    if indices.dtype.kind not in "iu":
        raise IndexOutOfRangeError(f"indices must be integers, got {indices.dtype}")
    indices = indices.astype(np.int64, copy=False)
    # one comparison finds those past the end and, read as huge numbers, the negative ones
    if (indices.view(np.uint64) >= size).any():
        outside = indices[(indices < -size) | (indices >= size)]
        if outside.size:
            raise IndexOutOfRangeError(f"index {outside[0]} is out of range: {size} are stored")
        indices = np.where(indices < 0, indices + size, indices)
    return indices
