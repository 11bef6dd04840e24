"""Actions, rewards, dones and timeouts of a ring of steps, as records on a torch device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.kernels.columns_torch import gather_columns_reference
from sb3_extra_buffers.kernels.launcher import Columns
from sb3_extra_buffers.stores import device_base
from sb3_extra_buffers.stores.staging import Lease, Staging, StagingLayout, torch_dtype

__all__ = ["COLUMN_NAMES", "DeviceColumns"]

Array = npt.NDArray[Any]

COLUMN_NAMES = ("actions", "rewards", "dones", "timeouts")
_BYTE = np.dtype(np.uint8)


def record_dtype(action_dim: int, action_dtype: np.dtype[Any]) -> np.dtype[Any]:
    """A record as `launcher.Columns` describes it."""
    itemsize = action_dtype.itemsize
    at = 16 if itemsize == 8 else 12
    end = at + action_dim * itemsize
    align = max(itemsize, 4)
    number = np.dtype(np.float32)
    return np.dtype({
        "names": COLUMN_NAMES,
        "formats": [(action_dtype, (action_dim,)), number, number, number],
        "offsets": [at, 0, 4, 8],
        "itemsize": -(-end // align) * align,
    })  # fmt: skip


class DeviceColumns:
    """A table of records, one for each step and stream; `views` are its columns, to read and to assign to.

    On the CPU they are NumPy arrays, elsewhere tensors.
    """

    def __init__(
        self,
        n_steps: int,
        n_streams: int,
        action_dim: int,
        action_dtype: np.dtype[Any],
        device: torch.device,
        triton: bool | None = None,
    ) -> None:
        self.device, self.lead = device, (n_steps, n_streams)
        self.action_dim, self.action_dtype = action_dim, action_dtype
        self.dtype = record_dtype(action_dim, action_dtype)
        self._triton = device.type == "cuda" and device_base.has_triton() if triton is None else triton
        size = (n_steps * n_streams, self.dtype.itemsize)
        #: uint8 ``[step * n_streams + stream, record_bytes]``
        self.records: torch.Tensor
        if device.type == "cpu":
            # memory from NumPy is zero until it is written, without being touched
            self.records = torch.from_numpy(np.zeros(size, np.uint8))
            host = self.records.numpy().view(self.dtype).reshape(self.lead)
            self.views: dict[str, Any] = {name: host[name] for name in COLUMN_NAMES}
        else:
            self.records = torch.zeros(size, dtype=torch.uint8, device=device)
            self.views = {name: self._view(name) for name in COLUMN_NAMES}
        self._steps = self.records.view(n_steps, -1)
        self._action_dtype = torch_dtype(action_dtype)
        self._staging = Staging(device)
        self._layout = StagingLayout(((n_streams, self.dtype.itemsize), _BYTE))
        self._kernels: Any = None

    def _view(self, name: str) -> torch.Tensor:
        """A column as a tensor."""
        assert self.dtype.fields is not None
        field, at = self.dtype.fields[name][:2]
        items = self.records.view(torch_dtype(field.base)).view(*self.lead, -1)
        first = at // field.base.itemsize
        return items[..., first : first + self.action_dim] if field.shape else items[..., first]

    # ---- writing ----

    def plan(self, values: tuple[Any, ...]) -> Any:
        """Prepare to write one step of `COLUMN_NAMES`, the last of which may be left out; checked arrays."""
        if self.device.type == "cpu":
            return values
        lease = self._staging.acquire(self._layout)
        row = lease.arrays[0].view(self.dtype)[:, 0]
        for name, value in zip(COLUMN_NAMES, values, strict=False):
            row[name] = value
        if len(values) < len(COLUMN_NAMES):
            row["timeouts"] = 0
        return lease

    def commit(self, step: int, planned: Any) -> None:
        """Write what was planned as ``step``; doing it twice has no further effect."""
        if isinstance(planned, Lease):
            self._steps[step].copy_(planned.whole[: self._steps.shape[1]], non_blocking=True)
            self._staging.release(planned)
            return
        for view, value in zip(self.views.values(), planned, strict=False):
            view[step] = value

    # ---- reading ----

    def empty(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for a batch: numbers ``[2, count, 1]`` and actions."""
        floats = torch.empty((2, count, 1), dtype=torch.float32, device=self.device)
        return floats, torch.empty((count, self.action_dim), dtype=self._action_dtype, device=self.device)

    def gather(self, indices: torch.Tensor, floats: torch.Tensor, actions: torch.Tensor) -> None:
        """Fill a batch with the records at ``indices``, one for each row; on the device or in pinned memory."""
        columns = Columns(floats, actions, self.records)
        if not len(actions):
            return
        if not self._triton:
            gather_columns_reference(indices.to(self.device), columns)
            return
        if self._kernels is None:
            from sb3_extra_buffers.kernels.columns_triton import ColumnGather  # optional: needs Triton

            self._kernels = ColumnGather(self.records.device)
        self._kernels.gather(indices, columns)

    # ---- copies ----

    def arrays(self) -> dict[str, Array]:
        """Copies of the columns, in host memory."""
        return {
            name: view.cpu().numpy().copy() if isinstance(view, torch.Tensor) else view.copy()
            for name, view in self.views.items()
        }

    def assign(self, name: str, column: Any) -> None:
        """Replace a column."""
        view = self.views[name]
        view[...] = torch.as_tensor(column, device=self.device) if isinstance(view, torch.Tensor) else column

    def to(self, device: torch.device) -> DeviceColumns:
        """The same columns on ``device``."""
        moved = DeviceColumns(*self.lead, self.action_dim, self.action_dtype, device)
        moved.records.copy_(self.records)
        return moved
