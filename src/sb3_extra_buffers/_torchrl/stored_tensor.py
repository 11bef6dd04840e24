"""`StoredTensor`: one key of a group as a tensor that TorchRL indexes like any other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map  # torch has no public tree functions

from sb3_extra_buffers._torchrl.groups import Group
from sb3_extra_buffers._torchrl.indexing import Positions, numpy_index, wrap_indices
from sb3_extra_buffers.errors import IndexOutOfRangeError, SpecMismatchError

__all__ = ["SelectedTensor", "StoredTensor"]


class StoredTensor(torch.Tensor):
    """Looks like a tensor of shape ``(len(steps), *inner_shape, *shape)``, but its elements are in a group.

    Slices along the first axis are stored tensors as well, and so is the transposition of the first two leading axes,
    which TorchRL's buffers show. Everything else that is read is decoded into plain tensors. Writes, also in place and
    to slices, go to the group.
    """

    group: Group
    which: int  # the key's number in the group
    steps: range
    inner_shape: tuple[int, ...]
    swapped: bool

    @staticmethod
    def __new__(
        cls, group: Group, which: int, steps: range, inner: tuple[int, ...] = (), swapped: bool = False
    ) -> StoredTensor:
        lead = (inner[0], len(steps), *inner[1:]) if swapped else (len(steps), *inner)
        shape = (*lead, *group.spec.shape)
        tensor: StoredTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=group.dtype, device=group.device)
        tensor.group, tensor.which, tensor.steps, tensor.inner_shape, tensor.swapped = (
            group,
            which,
            steps,
            inner,
            swapped,
        )
        return tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # takes what torch passes
        return f"StoredTensor(shape={tuple(self.shape)}, dtype={self.dtype}, {self.group.describe()})"

    def dense(self) -> torch.Tensor:
        """Decode the whole tensor."""
        return self._read(self._positions())

    def overwrite(self, tensor: torch.Tensor) -> None:
        """Replace the whole tensor by one of the same shape and dtype."""
        self._write(self._positions(), tensor)

    def with_axes_swapped(self, axis: int, other: int) -> StoredTensor | None:
        """Return the transposition of the first two leading axes, or None for any other axes."""
        if not self.inner_shape or {axis % self.ndim, other % self.ndim} != {0, 1}:
            return None
        return StoredTensor(self.group, self.which, self.steps, self.inner_shape, not self.swapped)

    def alias(self) -> StoredTensor:
        """Return another tensor over the same rows."""
        return StoredTensor(self.group, self.which, self.steps, self.inner_shape, self.swapped)

    # ---- indexing ----

    def read_at(self, index: Any) -> torch.Tensor:
        """``self[index]``."""
        parts = numpy_index(index)
        if len(parts) == 1 and isinstance(parts[0], slice) and not self.swapped:
            return StoredTensor(self.group, self.which, self.steps[parts[0]], self.inner_shape)
        positions = self._positions_at(parts)
        return self.dense()[index] if positions is None else self._read(positions)

    def write_at(self, index: Any, value: Any) -> None:
        """``self[index] = value``."""
        positions = self._positions_at(numpy_index(index))
        if positions is None:
            whole = self.dense()
            whole[index] = _decoded(value)
            self.overwrite(whole)
            return
        value = torch.as_tensor(_decoded(value))
        shape = (*positions.shape, *self.group.spec.shape)
        if value.dtype != self.dtype:
            raise SpecMismatchError(f"cannot write {value.dtype} to a tensor of {self.dtype}; convert it first")
        try:
            value = value.expand(shape)
        except RuntimeError:
            raise SpecMismatchError(f"cannot write a tensor of shape {tuple(value.shape)} to shape {shape}") from None
        self._write(positions, value)

    def _read(self, positions: Positions) -> torch.Tensor:
        rows = self.group.read(np.ascontiguousarray(positions).reshape(-1), [self.which])[0]
        return rows if positions.ndim == 1 else rows.reshape((*positions.shape, *self.group.spec.shape))

    def _write(self, positions: Positions, tensor: torch.Tensor) -> None:
        self.group.write_key(self.which, np.ascontiguousarray(positions).reshape(-1), self.group.as_rows(tensor))

    def _positions(self) -> Positions:
        """Return the positions of all rows, in the shape of the leading axes."""
        width = math.prod(self.inner_shape)
        steps = np.arange(self.steps.start, self.steps.stop, self.steps.step, dtype=np.int64)
        positions = (steps[:, None] * width + np.arange(width)).reshape(len(self.steps), *self.inner_shape)
        return positions.swapaxes(0, 1) if self.swapped else positions

    def _positions_at(self, parts: tuple[Any, ...]) -> Positions | None:
        """Return the positions that an index selects, or None if it selects parts of rows."""
        lead = tuple(self.shape[: 1 + len(self.inner_shape)])
        if not parts or (len(parts) == 1 and parts[0] is Ellipsis):
            return self._positions()
        if any(part is None or part is Ellipsis or isinstance(part, bool) for part in parts):
            return None
        axes = sum(part.ndim if isinstance(part, np.ndarray) and part.dtype == np.bool_ else 1 for part in parts)
        if axes > len(lead):
            return None
        try:
            if len(lead) == 1 and isinstance(parts[0], np.ndarray) and parts[0].dtype != np.bool_:
                # without an array of all positions
                return wrap_indices(parts[0], lead[0]) * self.steps.step + self.steps.start
            return np.asarray(self._positions()[parts])
        except IndexError as error:
            raise IndexOutOfRangeError(f"{error} (the leading axes are {lead})") from None

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
            return func(*tree_map(_decoded, args), **tree_map(_decoded, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks the operation
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0].alias()
        # keyed by identity: an argument that is passed twice must stay one tensor
        decoded: dict[int, tuple[StoredTensor, torch.Tensor]] = {}

        def decode(value: Any) -> Any:
            if not isinstance(value, StoredTensor):
                return value
            if id(value) not in decoded:
                decoded[id(value)] = value, value.dense()
            return decoded[id(value)][1]

        result = func(*tree_map(decode, args), **tree_map(decode, kwargs or {}))
        # an operator tells its argument names nowhere else
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            # `_foreach` operations write to lists of tensors
            for written in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(written, StoredTensor):
                    written.overwrite(decoded[id(written)][1])
                    result = written if result is decoded[id(written)][1] else result
        return result


class SelectedTensor(StoredTensor):
    """The rows at ``positions``: a copy, as any tensor that is indexed by integers, but decoded when it is first used.

    Must be used, if at all, before the rows change.
    """

    positions: Any  # an array, or a tensor if the group reads those
    _decoded: torch.Tensor | None

    @staticmethod
    def __new__(cls, group: Group, which: int, positions: Positions | torch.Tensor) -> SelectedTensor:
        shape = (*positions.shape, *group.spec.shape)
        tensor: SelectedTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=group.dtype, device=group.device)
        tensor.group, tensor.which, tensor.positions, tensor._decoded = group, which, positions, None
        return tensor

    def dense(self) -> torch.Tensor:
        if self._decoded is None:
            rows = self.group.read(self.positions.reshape(-1), [self.which])[0]
            self._decoded = rows.reshape(self.shape)
        return self._decoded

    def overwrite(self, tensor: torch.Tensor) -> None:
        self._decoded = tensor

    def with_axes_swapped(self, axis: int, other: int) -> None:
        return None

    def alias(self) -> SelectedTensor:
        tensor = SelectedTensor(self.group, self.which, self.positions)
        tensor._decoded = self.dense()
        return tensor

    def read_at(self, index: Any) -> torch.Tensor:
        return self.dense()[index]

    def write_at(self, index: Any, value: Any) -> None:
        self.dense()[index] = _decoded(value)


# these access a tensor's memory without dispatching an operation
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


def _decoded(value: Any) -> Any:
    return value.dense() if isinstance(value, StoredTensor) else value
