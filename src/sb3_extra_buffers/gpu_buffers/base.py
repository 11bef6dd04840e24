"""Base class and helpers of the GPU buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces

from sb3_extra_buffers._sb3.leaves import fit
from sb3_extra_buffers._sb3.options import StorageOptions
from sb3_extra_buffers.codecs.registry import codec_options, get_codec
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import SpecMismatchError
from sb3_extra_buffers.files.folders import SavedAsFolder
from sb3_extra_buffers.gpu_buffers.utils import find_smallest_dtype, torch_dtype_to_numpy
from sb3_extra_buffers.stores.device_observation import CellBatch, DeviceObservations, DevicePlace
from sb3_extra_buffers.stores.usage import MemoryUsage

__all__ = ["BaseGpuBuffer", "find_gpu_buffer_dtypes"]


def find_gpu_buffer_dtypes(
    obs_shape: int | tuple[int, ...], elem_dtype: th.dtype = th.uint8, compression_method: str = "rle"
) -> dict[str, Any]:
    """Find Torch dtypes for GPU buffer compression."""
    if compression_method != "auto":
        get_codec(compression_method)  # an unknown method is an error now
    n_elements = int(np.prod(obs_shape, dtype=np.int64))
    return {"elem_type": elem_dtype, "runs_type": find_smallest_dtype(n_elements)}


class BaseGpuBuffer(SavedAsFolder):
    """Observations behind a torch device, for buffers of SB3's layout.

    ``flatten_config`` is accepted for the documents' sake; the space says all that it could.
    """

    device: th.device
    n_envs: int
    buffer_size: int
    observation_space: spaces.Space[Any]
    obs_shape: Any

    def __init__(
        self,
        compression_method: str | None = None,
        compression_kwargs: Mapping[str, Any] | None = None,
        decompression_kwargs: Mapping[str, Any] | None = None,
        flatten_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.compression_method = "none" if compression_method is None else compression_method
        self.compression_kwargs = codec_options(self.compression_method, compression_kwargs, decompression_kwargs)
        if self.compression_method != "auto":
            get_codec(self.compression_method, **self.compression_kwargs)
        self.flatten_config = dict(flatten_config or {})

    def _make_stores(
        self,
        n_sets: int,
        options: StorageOptions,
        buffer_device: th.device | str | None,
        heap_bytes: int | None,
    ) -> None:
        """Storage for every key of the space; a Box has one, without a name."""
        self._options = options
        place = _place(self.device if buffer_device is None else buffer_device)
        self.buffer_device = "pinned" if place.pinned else str(place.device)
        self.heap_bytes = heap_bytes
        space = self.observation_space
        keyed = isinstance(space, spaces.Dict)
        parts: dict[str, Any] = dict(space.spaces) if isinstance(space, spaces.Dict) else {"": space}
        self._stores: dict[str, DeviceObservations] = {}
        for key, part in parts.items():
            shape = self.obs_shape[key] if keyed else self.obs_shape
            spec = ObsSpec(tuple(shape), np.dtype(part.dtype))
            _numpy_dtypes(options).check_dtypes(key or None, part, spec)
            method = options.method_for(key or None, spec)
            kwargs = self.compression_kwargs if method == self.compression_method else {}
            self._stores[key] = DeviceObservations(
                spec, self.buffer_size, self.n_envs, n_sets, place, method, kwargs, heap_bytes
            )

    def _fit(self, observations: Any, name: str) -> dict[str, Any]:
        """Observations of all environments, by key, in the spaces' shapes and dtypes."""
        if "" in self._stores:
            return {"": _fit(self._stores[""], observations, name)}
        missing = [key for key in self._stores if key not in observations]
        if missing:
            raise SpecMismatchError(
                f"the observation lacks {', '.join(missing)}; the space has {', '.join(self._stores)}"
            )
        return {key: _fit(store, observations[key], f"{name}[{key!r}]") for key, store in self._stores.items()}

    def _read(self, cells: CellBatch) -> Any:
        """Observations ``[set, n, ...]`` on the buffer's device, by key where the space has keys."""
        found = {key: self._finish(store.read(cells)) for key, store in self._stores.items()}
        return found.get("", found)

    def _finish(self, observations: th.Tensor) -> th.Tensor:
        if observations.device.type != self.device.type:
            observations = observations.to(self.device)
        options = self._options
        if options.normalize_images and observations.dtype == th.uint8 and observations.ndim >= 5:
            return observations.float() / 255.0
        return observations.float() if options.output_dtype == "float" else observations

    def memory_usage(self) -> MemoryUsage:
        """What the observations take, wherever they are, and what they would take dense."""
        total = MemoryUsage(0, 0, 0, 0, 0)
        for key, store in self._stores.items():
            usage = store.memory_usage()
            total += MemoryUsage(
                usage.payload, usage.index, usage.keyframes, usage.other, usage.dense, {key: usage.codecs[""]}
            )
        return total

    def check(self) -> None:
        """Raise if anything inside disagrees."""
        for store in self._stores.values():
            store.check()


def _fit(store: DeviceObservations, observations: Any, name: str) -> Any:
    if type(observations) is np.ndarray and observations.shape == store.shape[1:] and observations.dtype == store.dtype:
        return observations
    return np.ascontiguousarray(fit(store, observations, name))  # type: ignore[arg-type]  # it has a shape and a dtype


def _place(device: th.device | str) -> DevicePlace:
    if str(device) == "pinned":
        if not th.cuda.is_available():
            raise ValueError(
                "buffer_device='pinned' is memory that a GPU reads over the bus, and there is none; "
                "leave buffer_device out, or pass 'cpu'"
            )
        return DevicePlace(th.device("cuda"), pinned=True)
    if str(device) == "auto":
        device = "cuda" if th.cuda.is_available() else "cpu"
    return DevicePlace(th.device(device))


def _numpy_dtypes(options: StorageOptions) -> StorageOptions:
    """The options with NumPy's dtypes in place of torch's."""
    from dataclasses import replace

    def translate(named: Any) -> Any:
        if isinstance(named, Mapping):
            return {key: translate(value) for key, value in named.items()}
        return torch_dtype_to_numpy(named) if isinstance(named, th.dtype) else named

    return options if options.dtypes is None else replace(options, dtypes=translate(options.dtypes))


def old_slot_bytes(max_slot_bytes: int | None, heap_bytes: int | None, n_cells: int) -> int | None:
    """``heap_bytes``, or what the deprecated ``max_slot_bytes`` makes of it."""
    if max_slot_bytes is None:
        return heap_bytes
    import warnings

    warnings.warn("max_slot_bytes is deprecated; pass heap_bytes, for all cells", DeprecationWarning, stacklevel=3)
    return max_slot_bytes * n_cells if heap_bytes is None else heap_bytes
