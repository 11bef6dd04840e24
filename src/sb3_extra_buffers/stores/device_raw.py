"""Observations as they are, in one tensor on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.stores.device_base import DeviceRing, DeviceStore, IndexBatch, PlannedWrite
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.staging import torch_dtype
from sb3_extra_buffers.stores.usage import MemoryUsage

__all__ = ["DeviceRawStore"]

Array = npt.NDArray[Any]


class _RawWrite(PlannedWrite):
    """Rows that are on the device already, and where they go."""

    __slots__ = ("sources", "targets")

    def __init__(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        self.targets, self.sources = targets, sources

    def commit(self) -> None:
        for target, source in zip(self.targets, self.sources, strict=True):
            target.copy_(source)


class DeviceRawStore(DeviceStore):
    """Observations as they are; ``place.pinned`` keeps them in host memory."""

    def __init__(self, ring: DeviceRing, *unused: Any) -> None:
        self.ring = ring
        shape = (ring.n_obs * ring.n_sets, *ring.spec.shape)
        self.rows = torch.zeros(shape, dtype=torch_dtype(ring.spec.dtype), device=self._rows_device)

    @staticmethod
    def accepts(codec: Codec, layout: StackLayout) -> bool:
        return codec.codec_id == "none"

    @property
    def _rows_device(self) -> torch.device:
        place = self.ring.place
        return torch.device("cpu") if place.pinned else place.device

    def plan(self, step: int, batches: Sequence[Array]) -> _RawWrite:
        rows, n_streams = self.rows, self.ring.n_streams
        first, n_obs = step * n_streams, self.ring.n_steps * n_streams
        targets, sources = [], []
        for batch in batches:
            flags = batch.flags
            if not (flags.c_contiguous and flags.writeable):
                batch = np.require(batch, requirements=("C", "W"))
            source = torch.from_numpy(batch)
            # from pageable memory: returns when the rows have been read, so the caller may change them
            sources.append(source.to(rows.device) if rows.is_cuda else source)
            targets.append(rows[first : first + n_streams])
            first += n_obs
        return _RawWrite(targets, sources)

    def read(self, indices: IndexBatch) -> torch.Tensor:
        device = self.ring.place.device
        wanted = indices.on(device)
        observations = self.rows[wanted.reshape(-1).to(self.rows.device)].to(device)
        return observations.reshape(*wanted.shape, *self.ring.spec.shape)

    def clear(self) -> None:
        self.rows.zero_()

    def memory_usage(self) -> MemoryUsage:
        # a tensor is allocated as a whole
        return MemoryUsage(self.rows.numel() * self.rows.element_size())

    def check(self) -> None:
        """There are no tables."""

    def to_host(self) -> list[Array]:
        ring = self.ring
        return list(self.rows.cpu().numpy().reshape(ring.n_sets, ring.n_steps, ring.n_streams, *ring.spec.shape))

    def frozen(self) -> DeviceRawStore:
        copied = object.__new__(DeviceRawStore)
        copied.__dict__.update(self.__dict__, rows=self.rows.to("cpu", copy=True))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {"ring": self.ring, "rows": self.rows.cpu().numpy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.ring = state["ring"]
        self.rows = torch.from_numpy(state["rows"]).to(self._rows_device)
