"""Observations in a host store, whose batches are sent to a device."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.registry import is_available
from sb3_extra_buffers.codecs.rle import RleCodec
from sb3_extra_buffers.stores import device_base
from sb3_extra_buffers.stores.choice import Choice
from sb3_extra_buffers.stores.device_base import (
    Batch,
    CancellableWrite,
    DeviceRing,
    DeviceStore,
    IndexBatch,
    on_host,
    put_in,
)
from sb3_extra_buffers.stores.device_layout import join_frames
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.mirror import HeapMirror
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.payloads import PayloadStore
from sb3_extra_buffers.stores.staging import Lease, Staging
from sb3_extra_buffers.stores.usage import MemoryUsage

__all__ = ["DeviceRleStore", "HostDecodedStore"]

Array = npt.NDArray[Any]
_BYTE, _INT64 = np.dtype(np.uint8), np.dtype(np.int64)


class _HostWrite(CancellableWrite):
    """A step for an `ObservationStore`, which can undo its last write."""

    __slots__ = ("batches", "first", "n_obs", "store")

    def __init__(self, store: ObservationStore, first: int, n_obs: int, batches: Sequence[Array]) -> None:
        self.store, self.first, self.n_obs, self.batches = store, first, n_obs, batches
        self.written = False
        # from here on `cancel` undoes what is written
        store.commit()

    def commit(self) -> None:
        store, first = self.store, self.first
        to_rows = store.spec.to_rows
        if len(self.batches) == 2:
            obs, next_obs = self.batches
            if obs.dtype == _BYTE and obs.flags.c_contiguous and next_obs.flags.c_contiguous:
                # fast path: the observations are rows of bytes already
                shape = (len(obs), store.spec.nbytes)
                store.write_step(first, first + self.n_obs, obs.reshape(shape), next_obs.reshape(shape))
            else:
                store.write_step(first, first + self.n_obs, to_rows(obs), to_rows(next_obs))
        else:
            streams = np.arange(store.n_streams)
            store.write(first + streams, streams, to_rows(self.batches[0]))
        self.written = True

    def cancel(self) -> None:
        self.written = False
        self.store.undo_write()


class HostDecodedStore(DeviceStore):
    """A host store of any method; a batch is decoded on the host and sent in one copy, each distinct frame once."""

    location = " on the host"

    def __init__(
        self,
        ring: DeviceRing,
        layout: StackLayout | None,
        codec: Codec | None,
        method: str,
        options: Mapping[str, Any],
    ) -> None:
        # the same payloads, decoded many times faster
        method = "rle-jit" if method == "rle" and is_available("rle-jit") else method
        self.ring = ring
        self.store = ObservationStore(ring.spec, ring.n_streams, method, options, ring.heap_bytes)
        for i in range(ring.n_sets):
            self.store.allocate(ring.n_obs, are_next=i == 1)
        self._staging = Staging(ring.place.device)
        # whole frames take so much memory that two blocks must do
        self._frame_staging = Staging(ring.place.device, 2)

    @property
    def layout(self) -> StackLayout | None:  # type: ignore[override]  # known once the store has chosen it
        return None if self.store.inner is None else self.store.inner.layout

    @property
    def choice(self) -> Choice | None:  # type: ignore[override]  # likewise
        return self.store.choice

    def plan(self, step: int, batches: Sequence[Batch]) -> _HostWrite:
        n_streams, n_obs = self.ring.n_streams, self.ring.n_obs
        return _HostWrite(self.store, step * n_streams, n_obs, [on_host(batch) for batch in batches])

    def read(self, indices: IndexBatch, out: torch.Tensor | None = None) -> torch.Tensor:
        wanted, spec = indices.host, self.store.spec
        on_gpu = self._staging.device.type == "cuda"
        if on_gpu and isinstance(self.store.inner, PayloadStore) and wanted.size:
            return put_in(out, self._read_payloads(self.store.inner, wanted))
        rows = self.store.read(wanted).reshape(wanted.size, spec.nbytes)
        observations = spec.from_rows(rows).reshape(*wanted.shape, *spec.shape)
        return put_in(out, self._staging.upload([observations])[0] if on_gpu else torch.from_numpy(observations))

    def read_windows(
        self, indices: IndexBatch, newest_only: bool = False, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        on_gpu = self._staging.device.type == "cuda"
        if on_gpu and isinstance(self.store.inner, PayloadStore):
            return super().read_windows(indices, newest_only, out)
        wanted, spec = indices.host, self.store.spec
        if out is not None and not on_gpu:
            memory = out.numpy().reshape(*wanted.shape, math.prod(out.shape[2:])).view(np.uint8)
            self.store.read_windows(wanted, newest_only, memory)
            return out
        rows = self.store.read_windows(wanted, newest_only)
        if rows.shape[-1] != spec.nbytes:
            assert self.layout is not None  # rows are frames of stacks
            spec = self.layout.frame_spec
        observations = rows.view(spec.dtype).reshape(*wanted.shape, *spec.shape)
        return put_in(out, self._staging.upload([observations])[0] if on_gpu else torch.from_numpy(observations))

    def _read_payloads(self, inner: PayloadStore, indices: npt.NDArray[np.int64]) -> torch.Tensor:
        """Decode each distinct frame into staging memory; the GPU joins them to observations."""
        leases: list[Lease] = []

        def make_rows(n_frames: int, size: int) -> Array:
            # round up, so that there are few layouts
            n_rows = -(-n_frames // 64) * 64
            layout = self._frame_staging.layout(((n_rows, size), _BYTE), ((indices.size * inner.layout.stack,), _INT64))
            leases.append(self._frame_staging.acquire(layout))
            return leases[0].arrays[0][:n_frames]

        with self.store.lock:
            inverse = inner.read_distinct(indices, make_rows)[1]
        leases[0].arrays[1][:] = inverse.ravel()
        frames, order = self._frame_staging.send(leases[0])
        return join_frames(frames[order].view(*indices.shape, inner.layout.stack, -1), inner.layout)

    def clear(self) -> None:
        self.store.clear()

    def memory_usage(self) -> MemoryUsage:
        return self.store.memory_usage()

    def check(self) -> None:
        self.store.check()

    def to_host(self) -> ObservationStore:
        return self.store

    def adopt(self, store: ObservationStore) -> bool:
        if store.heap_bytes != self.ring.heap_bytes:
            return False
        self.store = store
        return True

    def frozen(self) -> HostDecodedStore:
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__, store=copy.deepcopy(self.store))
        return copied


class DeviceRleStore(HostDecodedStore):
    """Run lengths in a host heap that is mirrored on the GPU, which decodes them there."""

    _mirror: HeapMirror | None = None

    @staticmethod
    def accepts(codec: Codec, layout: StackLayout) -> bool:
        return isinstance(codec, RleCodec) and device_base.has_triton()

    def _read_payloads(self, inner: PayloadStore, indices: npt.NDArray[np.int64]) -> torch.Tensor:
        codec = inner.codec
        if inner.validator is not None or not isinstance(codec, RleCodec):
            return super()._read_payloads(inner, indices)  # payloads from a file: the host checks them first
        from sb3_extra_buffers.kernels.rle_triton import decode_rle  # optional: needs Triton

        with self.store.lock:
            if self._mirror is None:
                self._mirror = HeapMirror(self._staging)
            heap = self._mirror.follow(inner.heap)
            starts, lengths = self._staging.upload(inner.find(indices))
        size = inner.layout.frame_bytes
        frames = torch.empty((*starts.shape, size), dtype=torch.uint8, device=heap.device)
        decode_rle(heap, starts, lengths, frames, np.dtype(codec.elem).itemsize, np.dtype(codec.run).itemsize)
        return join_frames(frames, inner.layout)

    def memory_usage(self) -> MemoryUsage:
        usage = super().memory_usage()
        return usage if self._mirror is None else replace(usage, other=usage.other + self._mirror.nbytes)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mirror": None}
