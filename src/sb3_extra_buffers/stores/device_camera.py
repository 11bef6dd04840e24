"""``camera`` segments in a host store, mirrored to a GPU that decodes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.kernels.camera import FIRST_FRAME, FRAME_BEFORE, STRIDE, camera_geometry
from sb3_extra_buffers.kernels.camera_groups import CameraGroups, CameraShape, group_frames
from sb3_extra_buffers.kernels.state import PACKED_CAMERA
from sb3_extra_buffers.stores import device_base
from sb3_extra_buffers.stores.device_base import DeviceRing, DeviceStore, IndexBatch, put_in
from sb3_extra_buffers.stores.device_host import HostDecodedStore
from sb3_extra_buffers.stores.device_layout import join_frames
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.mirror import HeapMirror
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.packed import PackedStore
from sb3_extra_buffers.stores.usage import MemoryUsage

__all__ = ["DeviceCameraStore"]

Array = npt.NDArray[Any]


class _Batch:
    """The distinct frames of a batch, and for each frame of an observation which of them it is."""

    def __init__(self, inner: PackedStore, indices: npt.NDArray[np.int64]) -> None:
        ids = inner.frame_ids[indices] - 1
        distinct, inverse = np.unique(ids, return_inverse=True)
        self.n_frames, self.order = len(distinct), inverse.reshape(-1)
        segments, positions = np.divmod(distinct, inner.per_segment)
        # a frame of zeros has the id -1, so it comes first
        self.has_zeros = bool(self.n_frames and distinct[0] < 0)
        starts = inner.state.starts[np.maximum(segments, 0)]
        flags = inner.heap.data[np.maximum(starts, 0)]
        is_sealed = (starts >= 0) & ((flags == PACKED_CAMERA) | (flags == 0)) & (distinct >= 0)
        rows = np.flatnonzero(is_sealed)
        self.groups = group_frames(starts[rows], positions[rows], rows)
        # open segments, which the device does not have
        self.others = np.flatnonzero(~is_sealed & (distinct >= 0))
        self.other_frames = inner._decode_ids(distinct[self.others]) if len(self.others) else None


class DeviceCameraStore(HostDecodedStore):
    """``camera`` segments in a host heap that is mirrored on the GPU, which decodes the distinct frames of a batch.

    Frames of open segments are not in the heap yet and are sent with the batch.
    """

    location = ""
    _mirror: HeapMirror | None = None
    # whether segments may come from another version, whose frames may have other references
    _is_foreign = False

    def __init__(
        self,
        ring: DeviceRing,
        layout: StackLayout | None,
        codec: Codec | None,
        method: str,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(ring, layout, codec, method, options)
        self._triton = ring.place.device.type == "cuda"

    @staticmethod
    def accepts(codec: Codec, layout: StackLayout) -> bool:
        if codec.codec_id != "camera" or not device_base.has_triton():
            return False
        return CameraShape(*camera_geometry(layout.frame_spec).tolist()).is_supported

    def read(self, indices: IndexBatch, out: torch.Tensor | None = None) -> torch.Tensor:
        inner = self.store.inner
        if self._triton and 0 not in indices.shape and isinstance(inner, PackedStore) and self._can_decode(inner):
            return put_in(out, self._read_segments(inner, indices.host))
        return super().read(indices, out)

    def read_windows(
        self, indices: IndexBatch, newest_only: bool = False, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self._triton:
            return DeviceStore.read_windows(self, indices, newest_only, out)
        return super().read_windows(indices, newest_only, out)

    def _can_decode(self, inner: PackedStore) -> bool:
        if self._is_foreign:
            with self.store.lock:
                self._triton &= _has_known_references(inner)
            self._is_foreign = False
        # segments from a file that was not verified: the host checks them first
        return self._triton and inner.codec.codec_id == "camera" and inner.validator is None

    def adopt(self, store: ObservationStore) -> bool:
        self._is_foreign |= super().adopt(store)
        return self._is_foreign

    def _read_segments(self, inner: PackedStore, indices: npt.NDArray[np.int64]) -> torch.Tensor:
        from sb3_extra_buffers.kernels.camera_triton import decode_camera  # optional: needs Triton

        layout, staging = inner.layout, self._staging
        with self.store.lock:
            inner.recover()
            if self._mirror is None:
                self._mirror = HeapMirror(staging)
            batch = _Batch(inner, indices)
            heap = self._mirror.follow(inner.heap)
            order, *groups = staging.upload([batch.order, *batch.groups])
        frames = torch.empty((batch.n_frames, layout.frame_bytes), dtype=torch.uint8, device=staging.device)
        if batch.has_zeros:
            frames[0].zero_()
        shape = CameraShape(*inner.state.geometry.tolist())
        decode_camera(heap, CameraGroups(*groups), frames, shape, inner.per_segment, inner.state.config.length_bytes)
        if batch.other_frames is not None:
            rows, others = self._frame_staging.upload([batch.other_frames, batch.others])
            frames.index_copy_(0, others, rows)
        return join_frames(frames[order].view(*indices.shape, layout.stack, -1), layout)

    def memory_usage(self) -> MemoryUsage:
        usage = super().memory_usage()
        return usage if self._mirror is None else replace(usage, other=usage.other + self._mirror.nbytes)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mirror": None, "_is_foreign": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._triton &= self.ring.place.device.type == "cuda"


def _has_known_references(inner: PackedStore) -> bool:
    """Whether the frames of all sealed segments refer to those that `group_frames` expects."""
    heap, width = inner.heap, inner.state.config.length_bytes
    sealed = np.flatnonzero(heap.lengths)
    sealed = sealed[heap.data[heap.starts[sealed]] == PACKED_CAMERA]
    position = np.arange(inner.per_segment)
    starts_group = position % STRIDE == 0
    for segments in np.array_split(sealed, max(len(sealed) >> 12, 1)):
        starts, counts = heap.starts[segments][:, None], inner.state.counts[segments][:, None]
        exists = position < counts
        table = (starts + 2 + np.where(exists, position, 0) * width)[..., None] + np.arange(width)
        lengths = heap.data[table].reshape(-1, width).view(f"<u{width}").reshape(exists.shape).astype(np.int64)
        at = starts + 2 + counts * width + np.cumsum(np.where(exists, lengths, 0), axis=1) - lengths
        is_coded = exists & (lengths < inner.layout.frame_bytes) & (position > 1)
        references = np.where(is_coded, heap.data[np.where(is_coded, at, 0)], 0)
        if ((references == FRAME_BEFORE) & starts_group).any() or ((references == FIRST_FRAME) & ~starts_group).any():
            return False
    return True
