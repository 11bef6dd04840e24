"""The common part of stores of uncompressed observations on a device: staging and launching a step, reading a batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.errors import SpecMismatchError
from sb3_extra_buffers.kernels.launcher import Columns
from sb3_extra_buffers.stores import device_base
from sb3_extra_buffers.stores.device_base import AttributeWrite, Batch, DeviceRing, DeviceStore, on_host
from sb3_extra_buffers.stores.device_pieces import SlotChange
from sb3_extra_buffers.stores.staging import Lease, Staging, StagingLayout, torch_dtype

__all__ = ["StagedWrite", "UncompressedDeviceStore"]

Array = npt.NDArray[Any]

# bytes of staged rows that the device may not have read yet; a single step may have more
_STAGED_BYTES = 8 << 20


class StagedWrite(AttributeWrite):
    """A staged step; committing it is idempotent."""

    __slots__ = ("change", "lease", "step")

    def __init__(
        self, store: UncompressedDeviceStore, lease: Lease, step: int, change: SlotChange, after: dict[str, Any]
    ) -> None:
        self.lease, self.step, self.change = lease, step, change
        super().__init__(store, after)


class UncompressedDeviceStore(DeviceStore):
    """Copies a step to pinned memory, from which a single launch writes it; ``place.pinned`` keeps all rows there.

    The rows staged last stay in staging memory until the next step is planned, which compares its rows with them.
    """

    ring: DeviceRing
    device: torch.device
    _triton: bool

    def _use_ring(self, ring: DeviceRing, triton: bool | None) -> None:
        self.ring, self.device = ring, ring.place.device
        self._triton = self.device.type == "cuda" and device_base.has_triton() if triton is None else triton

    def _set_up_staging(self, step_bytes: int, *parts: tuple[tuple[int, ...], np.dtype[Any]]) -> None:
        """Prepare staging memory for steps that consist of ``parts``; the first one is filled by `_pack_job`."""
        # the last rows must stay as they are while the next step is staged
        self._staging = Staging(self.device, min(max(_STAGED_BYTES // max(step_bytes, 1), 3), 8))
        self._staging_layout = StagingLayout(*parts)
        self._bound_kernels: Any = None
        # the last row of each stream, in staging memory; None if they are unknown
        self._last: Array | None = None

    @property
    def kernels(self) -> Any:
        """The Triton kernels, bound to the tables."""
        if self._bound_kernels is None:
            self._bound_kernels = self._bind_kernels()
        return self._bound_kernels

    @abstractmethod
    def _bind_kernels(self) -> Any:
        """The Triton kernels for the tables; an optional import."""

    # ---- writing ----

    def plan(self, step: int, batches: Sequence[Batch]) -> StagedWrite:
        ring = self.ring
        if len(batches) != ring.n_sets:
            raise SpecMismatchError(f"expected {ring.n_sets} batches, one per set, got {len(batches)}")
        arrays = [self._checked(on_host(batch)) for batch in batches]
        # unknown until this write is committed: the staging memory of the last rows may be used again
        last, self._last = self._last, None
        lease = self._staging.acquire(self._staging_layout)
        write = self._plan_rows(step, arrays, last, lease)
        if self._triton:
            self._pack_job(write)
            _ = self.kernels  # this can fail; the launch cannot
        return write

    def _checked(self, batch: Array) -> Array:
        """``batch`` in the dtype and shape of the ring, or an error."""
        spec, n_streams = self.ring.spec, self.ring.n_streams
        if batch.shape != (n_streams, *spec.shape) or batch.dtype != spec.dtype:
            batch = spec.to_batch(batch)
            if len(batch) != n_streams:
                raise SpecMismatchError(f"expected an observation for each of {n_streams} streams, got {len(batch)}")
        return batch

    @abstractmethod
    def _plan_rows(self, step: int, batches: Sequence[Array], last: Array | None, lease: Lease) -> StagedWrite:
        """Stage checked batches in ``lease``, and reserve memory for what the device does not have yet."""

    @abstractmethod
    def _pack_job(self, write: Any) -> None:
        """Tell the kernel where everything goes."""

    def launch(self, write: Any) -> None:
        """Write a step to the device; with Triton, by a single launch."""
        if self._triton:
            self._launch_kernel(write)
            self._staging.release(write.lease)
        else:
            self._write_reference(write)

    @abstractmethod
    def _launch_kernel(self, write: Any) -> None: ...

    @abstractmethod
    def _write_reference(self, write: Any) -> None:
        """What the kernel does, with torch."""

    # ---- reading ----

    def _empty(self, lead: tuple[int, ...]) -> torch.Tensor:
        spec = self.ring.spec
        return torch.empty((*lead, *spec.shape), dtype=torch_dtype(spec.dtype), device=self.device)

    @property
    def can_read_batch(self) -> bool:
        return self._triton and self.ring.spec.nbytes > 0

    def read_batch(
        self,
        indices: torch.Tensor,
        floats: torch.Tensor,
        actions: torch.Tensor,
        records: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Copy observations and gather the columns of a batch in one launch, see `DeviceFrameStore.read_batch`."""
        if out is None:
            out = self._empty(indices.shape)
        self.kernels.read(indices, out, Columns(floats, actions, records))
        return out
