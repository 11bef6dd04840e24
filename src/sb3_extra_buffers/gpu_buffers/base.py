"""Base class and helpers of the GPU buffers."""

from __future__ import annotations

import copyreg
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces

from sb3_extra_buffers._sb3.options import StorageOptions
from sb3_extra_buffers._sb3.steps import fit_observations
from sb3_extra_buffers.arguments import check_count
from sb3_extra_buffers.codecs.registry import codec_options, get_codec
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import (
    CodecOptionError,
    IndexOutOfRangeError,
    ReadOnlyBufferError,
    SpecMismatchError,
    UnknownCodecError,
)
from sb3_extra_buffers.files.folders import SavedAsFolder
from sb3_extra_buffers.gpu_buffers.utils import find_smallest_dtype, torch_dtype_to_numpy
from sb3_extra_buffers.stores.device_observation import (
    DeviceObservations,
    DevicePlace,
    IndexBatch,
    PlannedWrite,
    finish_writes,
)
from sb3_extra_buffers.stores.locks import fork_safe_lock
from sb3_extra_buffers.stores.usage import MemoryUsage

if TYPE_CHECKING:
    from sb3_extra_buffers.files.parts import Parts

__all__ = ["BaseGpuBuffer", "find_gpu_buffer_dtypes"]


def find_gpu_buffer_dtypes(
    obs_shape: int | tuple[int, ...], elem_dtype: th.dtype = th.uint8, compression_method: str = "rle"
) -> dict[str, Any]:
    """Find Torch dtypes for GPU buffer compression."""
    if compression_method != "auto":
        get_codec(compression_method)  # an unknown method is an error now
    n_elements = int(np.prod(obs_shape, dtype=np.int64))
    return {"elem_type": elem_dtype, "runs_type": find_smallest_dtype(n_elements)}


# no count is as large; more bytes than any memory has
_MOST = 1 << 48


class Step:
    """A step of every environment: checked, staged, and ready to be written."""

    __slots__ = ("after", "columns", "plans", "position")

    def __init__(
        self,
        position: int,
        plans: list[PlannedWrite],
        columns: Sequence[tuple[npt.NDArray[Any], Any]],
        after: dict[str, Any],
    ) -> None:
        self.position, self.plans, self.columns = position, plans, columns
        # the buffer's attributes once all of it is written
        self.after = after


class BaseGpuBuffer(SavedAsFolder):
    """Observations behind a torch device, for buffers of SB3's layout.

    A write is a transaction. What it needs is checked and staged first, as a `Step`; then observations and columns are
    written, and the last of all is one call that moves the position on. An exception in between is made good before it
    is passed on, and if that is interrupted as well, when the buffer is used next.

    ``flatten_config`` is accepted for the documents' sake; the space says all that it could.
    """

    # what is under way: a step, or "reset"
    _unfinished: Step | str | None = None
    read_only = False
    _lock: Any

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
        if not isinstance(self.compression_method, str):
            raise UnknownCodecError(f"compression_method must be a method's name, got {compression_method!r}")
        for name, options in (
            ("compression_kwargs", compression_kwargs),
            ("decompression_kwargs", decompression_kwargs),
        ):
            if not isinstance(options, Mapping | None):
                raise CodecOptionError(f"{name} must be a dict of options, got {options!r}")
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
        if heap_bytes is not None:
            check_count(heap_bytes, "heap_bytes")
        if not isinstance(options.dtypes, Mapping | None):
            raise SpecMismatchError(f"dtypes must be a dict, as find_gpu_buffer_dtypes gives, got {options.dtypes!r}")
        self.storage_options = options
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
            _numpy_dtypes(options).check_dtypes(key, part, spec)
            method = options.method_for(key, spec)
            kwargs = self.compression_kwargs if method == self.compression_method else {}
            self._stores[key] = DeviceObservations(
                spec, self.buffer_size, self.n_envs, n_sets, place, method, kwargs, heap_bytes
            )

    # ---- writing ----

    def _plan(self, step: int, observations: Sequence[Any], names: Sequence[str]) -> list[PlannedWrite]:
        """What writing ``observations`` of all environments, one for each of ``names``, takes; or an error."""
        stores = self._stores
        if "" in stores:
            store = stores[""]
            shape, dtype = store.step_shape, store.dtype
            # fast path: skip validation when shape and dtype already match
            for obs in observations:
                if type(obs) is not np.ndarray or obs.dtype != dtype or obs.shape != shape:
                    fitted = [fit_batch(store, obs, name) for obs, name in zip(observations, names, strict=True)]
                    return [store.plan(step, fitted)]
            return [store.plan(step, observations)]
        for obs, name in zip(observations, names, strict=True):
            missing = [key for key in stores if key not in obs] if isinstance(obs, Mapping) else list(stores)
            if missing:
                raise SpecMismatchError(f"{name} lacks {', '.join(missing)}; the space has {', '.join(stores)}")
        by_key = [
            [fit_batch(store, obs[key], f"{name}[{key!r}]") for obs, name in zip(observations, names, strict=True)]
            for key, store in stores.items()
        ]
        plans = [store.plan(step, batches) for store, batches in zip(stores.values(), by_key, strict=True)]
        # those that can still be refused come first
        plans.sort(key=_cannot_fail)
        return plans

    def _commit(self, step: Step) -> None:
        """Write a step; after an exception, the buffer holds all of it or is as it was."""
        try:
            self._unfinished = step
            for plan in step.plans:
                plan.commit()
            position = step.position
            for column, values in step.columns:
                column[position] = values
            # one call, which no signal can interrupt
            self.__dict__.update(step.after)
        except BaseException:
            self._recover()
            raise

    def _recover(self) -> None:
        """Finish what an exception interrupted, or take it back. May be interrupted and run again."""
        step = self._unfinished
        if isinstance(step, Step):
            if finish_writes(step.plans):
                for column, values in step.columns:
                    column[step.position] = values
                self.__dict__.update(step.after)
            else:
                self._unfinished = None
        elif step is not None:
            self.reset()

    def _check_writable(self) -> None:
        if self.read_only:
            raise ReadOnlyBufferError("this buffer was opened to be read; load() it to write to a copy")
        self._recover()

    def reset(self) -> None:
        raise NotImplementedError

    # ---- reading ----

    def _read(self, indices: IndexBatch) -> Any:
        """Observations ``[set, n, ...]`` on the buffer's device, by key where the space has keys."""
        found = {key: self._finish(store.read(indices)) for key, store in self._stores.items()}
        return found.get("", found)

    def _finish(self, observations: th.Tensor) -> th.Tensor:
        if observations.device.type != self.device.type:
            observations = observations.to(self.device)
        options = self.storage_options
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
        with self._lock:
            self._recover()
            for store in self._stores.values():
                store.check()

    # ---- copies ----

    def to_parts(self) -> Parts:
        """What this is made of, for a file: a tag, a description, columns and stores."""
        with self._lock:
            self._recover()
            return super().to_parts()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # pickle and deepcopy look at what this returns later on: it must not change until then
        with self._lock:
            state = self.__getstate__()
            for name, value in state.items():
                if isinstance(value, np.ndarray):
                    state[name] = value.copy()
            state["_stores"] = {key: store.frozen() for key, store in self._stores.items()}
        return copyreg.__newobj__, (type(self),), state  # type: ignore[attr-defined]  # as object has it

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            self._recover()
            state = self.__dict__.copy()
        for name in ("_lock", "_unfinished"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = fork_safe_lock(of_buffer=True)


def _cannot_fail(plan: PlannedWrite) -> bool:
    return not plan.may_fail


def fit_batch(store: DeviceObservations, observations: Any, name: str) -> Any:
    """``observations`` of all environments in the space's shape and dtype, or an error."""
    return np.ascontiguousarray(fit_observations(observations, store.step_shape, store.dtype, name))


def check_index(value: Any, count: int, name: str) -> int:
    """``value`` as an index below ``count``; negative ones count from the end."""
    try:
        number = operator.index(value)
    except TypeError:
        number = count
    if not -count <= number < count:
        raise IndexOutOfRangeError(f"{name} must be a whole number from {-count} to {count - 1}, got {value!r}")
    return number % count


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


def old_slot_bytes(max_slot_bytes: int | None, heap_bytes: int | None, n_obs: int) -> int | None:
    """``heap_bytes``, or what the deprecated ``max_slot_bytes`` makes of it."""
    if max_slot_bytes is None:
        return heap_bytes
    import warnings

    warnings.warn("max_slot_bytes is deprecated; pass heap_bytes, for all cells", DeprecationWarning, stacklevel=3)
    return max_slot_bytes * n_obs if heap_bytes is None else heap_bytes
