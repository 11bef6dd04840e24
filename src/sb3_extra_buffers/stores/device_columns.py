"""Columns of a buffer on a torch device: actions, rewards and other numbers, everything but observations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.kernels.columns_torch import NStepReturns, gather_columns_reference, n_step_reference
from sb3_extra_buffers.kernels.launcher import Columns, StepColumns, TableLayout
from sb3_extra_buffers.stores.device_base import runs_kernels
from sb3_extra_buffers.stores.staging import LaunchDone, Lease, Staging, StagingLayout, torch_dtype

__all__ = ["DeviceColumns", "DeviceRollout", "DeviceTable"]

Array = npt.NDArray[Any]

_FLOAT32 = np.dtype(np.float32)


class StagedColumns(NamedTuple):
    """Columns of a step, and the staging memory that they are in."""

    columns: StepColumns
    lease: Lease | None
    staging: Staging

    def release(self, done: LaunchDone | None = None) -> None:
        """Allow the memory to be used again when ``done`` says so, or once everything launched so far is done."""
        if self.lease is not None:
            self.staging.release(self.lease, done)


class DeviceTable:
    """Columns of ``n_steps`` steps of ``n_streams`` rows. Writing a step does not wait for the device.

    `views` has the columns by name, NumPy arrays on the CPU and tensors elsewhere; assigning to them changes the table.
    """

    #: The columns: actions, then the `written` columns that are given with a step, then computed ones.
    names: tuple[str, ...]
    written: int
    layout: TableLayout
    views: dict[str, Any]

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
        self.torch_action_dtype = torch_dtype(action_dtype)
        #: Shape of the actions of a step.
        self.action_shape = (n_streams, action_dim)
        self._triton = runs_kernels(device) if triton is None else triton
        #: Whether `plan` takes tensors on the device; elsewhere, it takes arrays only.
        self.takes_tensors = device.type != "cpu" or self._triton
        self._allocate()
        if device.type == "cpu":
            self.views = {name: view.numpy() for name, view in self.views.items()}
        self._written = list(self.views.values())[: 1 + self.written]
        number = ((n_streams,), _FLOAT32)
        self._staging = Staging(device)
        self._staging_layout = StagingLayout((self.action_shape, action_dtype), *[number] * self.written)
        self._bound_kernels: Any = None

    def _allocate(self) -> None:
        """Create the table: its memory, its `layout`, and `views` as tensors."""
        raise NotImplementedError

    def _zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> torch.Tensor:
        if self.device.type == "cpu":
            # NumPy's zeros take no memory until they are written
            return torch.from_numpy(np.zeros(shape, dtype))
        return torch.zeros(shape, dtype=torch_dtype(dtype), device=self.device)

    @property
    def kernels(self) -> Any:
        """The Triton kernels, bound to the table."""
        if self._bound_kernels is None:
            from sb3_extra_buffers.kernels.columns_triton import ColumnKernels  # optional: needs Triton

            self._bound_kernels = ColumnKernels(self.layout, self.lead[1])
        return self._bound_kernels

    @property
    def padding(self) -> int:
        """Bytes of the table that belong to no column."""
        return 0

    # ---- writing ----

    def plan(self, values: Sequence[Any]) -> Any:
        """Prepare to write a step of checked values: actions, then numbers; numbers left out are stored as 0.

        Each is an array or, if `takes_tensors`, a contiguous tensor on the device: actions in the dtype of the table,
        numbers as float32 or bool, one for each stream.
        """
        if not self.takes_tensors:
            return tuple(values)
        if self._triton and self._bound_kernels is None:
            _ = self.kernels  # this can fail; the launch cannot
        lease = None
        sources = []
        for i, value in enumerate(values):
            if type(value) is np.ndarray or not isinstance(value, torch.Tensor):
                if lease is None:
                    lease = self._staging.acquire(self._staging_layout)
                lease.arrays[i][...] = value
                value = lease.tensors[i]
            sources.append(value)
        return StagedColumns(StepColumns(sources[0], tuple(sources[1:])), lease, self._staging)

    def commit(self, step: int, planned: Any) -> None:
        """Write what was planned as ``step``; idempotent."""
        written = self._written
        if type(planned) is tuple:
            for view, value in zip(written, planned, strict=False):
                view[step] = value
            for view in written[len(planned) :]:
                view[step] = 0
            return
        if self._triton:
            self.kernels.write(step, planned.columns)
        else:
            action, numbers = planned.columns
            for view, value in zip(written, (action, *numbers), strict=False):
                view[step].copy_(value, non_blocking=True)
            for view in written[1 + len(numbers) :]:
                view[step].zero_()
        planned.release()

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
        if isinstance(view, torch.Tensor):
            # torch takes no arrays that are reversed
            view.copy_(column if isinstance(column, torch.Tensor) else torch.from_numpy(np.array(column)))
        else:
            view[...] = column.cpu() if isinstance(column, torch.Tensor) else column

    def to(self, device: torch.device) -> Any:
        """The same columns on ``device``."""
        moved = type(self)(*self.lead, self.action_dim, self.action_dtype, device)
        for name, view in self.views.items():
            moved.assign(name, view)
        return moved

    @classmethod
    def from_arrays(cls, arrays: dict[str, Array], device: torch.device) -> Any:
        """A table with these columns, as `arrays` returns them."""
        actions = arrays["actions"]
        n_steps, n_streams, action_dim = actions.shape
        table = cls(n_steps, n_streams, action_dim, actions.dtype, device)
        for name, column in arrays.items():
            table.assign(name, column)
        return table


class DeviceColumns(DeviceTable):
    """The columns of a replay buffer, as one record per transition (`kernels.launcher.Columns`).

    The kernels that read the observations of a batch also gather its records.
    """

    names = ("actions", "rewards", "dones", "timeouts")
    written = 3

    def _allocate(self) -> None:
        (n_steps, n_streams), itemsize = self.lead, self.action_dtype.itemsize
        at = 16 if itemsize == 8 else 12
        action, align = self.action_dim * itemsize, max(itemsize, 4)
        size = -(-(at + action) // align) * align
        #: uint8 ``[step * n_streams + stream, record_bytes]``
        self.records = self._zeros((n_steps * n_streams, size), np.dtype(np.uint8))
        numbers = self.records.view(torch.float32)
        self.layout = TableLayout(
            numbers, 1, size // 4, 3, self.records, (size, at, action, 1 << max(action - 1, 0).bit_length())
        )
        by_step, first = numbers.view(n_steps, n_streams, -1), at // itemsize
        actions = self.records.view(self.torch_action_dtype).view(n_steps, n_streams, -1)
        self.views = {"actions": actions[..., first : first + self.action_dim]}
        self.views |= {name: by_step[..., i] for i, name in enumerate(self.names[1:])}

    @property
    def padding(self) -> int:
        """Bytes of records that belong to no column."""
        return self.records.numel() - sum(int(view.nbytes) for view in self.views.values())

    # ---- reading ----

    def empty(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for a batch: numbers ``[2, count, 1]`` and actions."""
        floats = torch.empty((2, count, 1), dtype=torch.float32, device=self.device)
        return floats, torch.empty((count, self.action_dim), dtype=self.torch_action_dtype, device=self.device)

    def n_step(
        self,
        indices: torch.Tensor,
        powers: torch.Tensor,
        newest: int,
        normalize: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> NStepReturns:
        """n-step returns of the transitions at ``indices``, which are on the device or in pinned memory.

        ``powers`` are those of gamma from 0 to the number of steps, on the device. ``normalize`` normalises rewards.
        """
        count, n_streams = len(indices), self.lead[1]
        # NumPy, and so SB3, adds eight or more numbers in another order than the kernel
        if not self._triton or normalize is not None or len(powers) > 8 or not count:
            return n_step_reference(indices.to(self.device), self.records, powers, newest, n_streams, normalize)
        numbers = [torch.empty((count, 1), dtype=torch.float32, device=self.device) for _ in range(3)]
        out = NStepReturns(torch.empty((2, count), dtype=torch.int64, device=self.device), *numbers)
        self.kernels.n_step(indices, powers, newest, len(self.records), out)
        return out

    def gather(self, indices: torch.Tensor, floats: torch.Tensor, actions: torch.Tensor) -> None:
        """Fill a batch with the records at ``indices``, which are on the device or in pinned memory."""
        columns = Columns(floats, actions, self.records)
        if not len(actions):
            return
        if self._triton:
            self.kernels.gather(indices, columns)
        else:
            gather_columns_reference(indices.to(self.device), columns)


class DeviceRollout(DeviceTable):
    """The columns of a rollout buffer, each contiguous."""

    names = ("actions", "rewards", "episode_starts", "values", "log_probs", "advantages", "returns")
    written = 4
    #: The rows of `numbers` that a batch contains.
    batch = slice(2, 6)

    def _allocate(self) -> None:
        n_steps, n_streams = self.lead
        #: float32 ``[column, step, stream]``
        self.numbers = self._zeros((6, n_steps, n_streams), _FLOAT32)
        self.actions = self._zeros((*self.lead, self.action_dim), self.action_dtype)
        action = self.action_dim * self.action_dtype.itemsize
        self.layout = TableLayout(
            self.numbers, n_steps * n_streams, 1, 4, self.actions.view(-1).view(torch.uint8),
            (action, 0, action, 1 << max(action - 1, 0).bit_length()),
        )  # fmt: skip
        self.views = {"actions": self.actions} | dict(zip(self.names[1:], self.numbers.unbind(0), strict=True))

    def clear(self) -> None:
        """Make all columns zero."""
        self.numbers.zero_()
        self.actions.zero_()

    @property
    def computes_returns(self) -> bool:
        """Whether `compute_returns` is possible."""
        return self._triton

    def compute_returns(self, last_values: Any, dones: Any, gamma: float, gae_lambda: float) -> None:
        """Compute advantages and returns as SB3 does, in one launch.

        ``last_values`` and ``dones`` have a number for each stream: arrays of float32, or tensors.
        """
        from sb3_extra_buffers.kernels.columns_triton import compute_gae  # optional: needs Triton

        given = [v if isinstance(v, torch.Tensor) else self._staging.upload([v])[0] for v in (last_values, dones)]
        last, ended = (v.to(self.numbers.device, torch.float32, non_blocking=True).contiguous() for v in given)
        compute_gae(self.numbers, last, ended, gamma, gae_lambda)

    def gather(self, indices: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``actions [obs, ...]`` at ``indices``, and the other columns of a batch ``[column, row]``."""
        numbers = self.numbers[self.batch].view(4, -1)
        # along the rows, so that each column is contiguous
        return actions.index_select(0, indices), numbers.index_select(1, indices)
