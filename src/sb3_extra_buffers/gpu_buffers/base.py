"""What GPU replay and rollout buffers share: stores for observations, steps as transactions, and copies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces

from sb3_extra_buffers._sb3.options import StorageOptions
from sb3_extra_buffers._sb3.report import ReportingBuffer
from sb3_extra_buffers._sb3.steps import fit_actions, fit_observations
from sb3_extra_buffers.arguments import check_count, narrow
from sb3_extra_buffers.codecs.registry import codec_options, get_codec
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import ArgumentError, CodecOptionError, SpecMismatchError, UnknownCodecError
from sb3_extra_buffers.files.folders import SavedAsFolder
from sb3_extra_buffers.gpu_buffers.tensors import (
    fit_action_tensor,
    fit_flag_numbers,
    fit_numbers,
    fit_observation_tensor,
)
from sb3_extra_buffers.gpu_buffers.utils import estimate_total_heap_bytes, find_smallest_dtype, numpy_dtype_to_torch
from sb3_extra_buffers.stores import device_base
from sb3_extra_buffers.stores.device_base import (
    DevicePlace,
    IndexBatch,
    PlannedWrite,
    finish_writes,
    is_on,
    usable_device,
)
from sb3_extra_buffers.stores.device_columns import DeviceTable
from sb3_extra_buffers.stores.device_observation import DeviceObservationStore
from sb3_extra_buffers.stores.reentry import writes
from sb3_extra_buffers.stores.staging import torch_dtype
from sb3_extra_buffers.stores.transactions import Transactional
from sb3_extra_buffers.stores.usage import MemoryUsage

if TYPE_CHECKING:
    from sb3_extra_buffers.files.parts import Parts

__all__ = ["BaseGpuBuffer", "find_gpu_buffer_dtypes"]


def find_gpu_buffer_dtypes(
    obs_shape: int | tuple[int, ...], elem_dtype: th.dtype = th.uint8, compression_method: str = "rle"
) -> dict[str, Any]:
    """Return the ``dtypes`` argument of GPU buffers.

    Args:
        obs_shape: Shape of one observation.
        elem_dtype: Its dtype.
        compression_method: The method that the buffer will use; an unknown one raises `UnknownCodecError`.

    Examples:
        >>> from sb3_extra_buffers.gpu_buffers import find_gpu_buffer_dtypes
        >>> find_gpu_buffer_dtypes((4, 84, 84))
        {'elem_type': torch.uint8, 'runs_type': torch.uint16}
    """
    if compression_method != "auto":
        get_codec(compression_method)  # raises if the method does not exist
    n_elements = int(np.prod(obs_shape, dtype=np.int64))
    return {"elem_type": elem_dtype, "runs_type": find_smallest_dtype(n_elements)}


class Step:
    """A step of every environment: checked, staged, and ready to be written."""

    __slots__ = ("after", "columns", "extra", "plans", "position")

    def __init__(
        self, position: int, plans: list[PlannedWrite], columns: Any, after: dict[str, Any], extra: Any = None
    ) -> None:
        self.position, self.plans, self.columns = position, plans, columns
        self.extra = extra  # for `_step_added`
        self.after = after  # attributes of the buffer once the step is written


class TableColumn:
    """An attribute that is a column of the buffer's table; assigning to it replaces the values."""

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    def __get__(self, buffer: Any, owner: Any = None) -> Any:
        return self if buffer is None else buffer._column(self._name)

    def __set__(self, buffer: Any, column: Any) -> None:
        if "_table" in vars(buffer):  # constructors of older versions of SB3 assign None
            buffer._table.assign(self._name, column)


class BaseGpuBuffer(ReportingBuffer, Transactional, SavedAsFolder):
    """Base class of `GpuReplayBuffer` and `GpuRolloutBuffer`: checks the method, and stores observations on a device.

    Args:
        compression_method: The method; None for ``"none"``.
        compression_kwargs: Options of that method.
        decompression_kwargs: Options for decoding; no method has any.
        flatten_config: Accepted for compatibility; the observation space makes it redundant.

    Examples:
        >>> from sb3_extra_buffers.gpu_buffers import BaseGpuBuffer, GpuReplayBuffer
        >>> issubclass(GpuReplayBuffer, BaseGpuBuffer)
        True
    """

    # A write is a transaction. Everything it needs is checked and staged first, as a `Step`; then observations and
    # columns are written, and a single call at the end advances the position. After an exception in between, the step
    # is completed or undone before the exception is raised again or, if that is interrupted too, at the next use.
    #
    # Internally, observations are always a dict by key; a Box has the single key "". `_as_sb3` converts back.

    # a step or "reset", while it is under way
    _unfinished: Step | str | None = None
    # the columns: everything but observations, on the device of the batches
    _table: Any
    _table_type: type[DeviceTable]
    _sampling = "numpy"
    # called with the position and `Step.extra` before the step counts; must be idempotent
    _step_added: Any = None

    device: th.device
    n_envs: int
    buffer_size: int
    observation_space: Any
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
            raise UnknownCodecError(f"compression_method must be a string, got {compression_method!r}")
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

    @property
    def sampling(self) -> str:
        """How indices are drawn: by ``"numpy"``, in SB3's order, or on the ``"device"``."""
        return self._sampling

    def _set_sampling(self, sampling: str) -> None:
        if sampling not in ("numpy", "device"):
            raise ArgumentError(f"sampling must be 'numpy' or 'device', got {sampling!r}")
        self._sampling = sampling

    def _column(self, name: str) -> Any:
        """The column ``name``: a NumPy array on the CPU, elsewhere a tensor."""
        return self._table.views[name]

    def _current_table(self) -> Any:
        """The table on the device of the batches; SB3 changes the device of buffers that it loads."""
        if self._table.device != self.device:
            self._table = self._table.to(self.device)
            self._share_columns()
        return self._table

    def _share_columns(self) -> None:
        """Let the first store write columns in the same launch as observations, if it is on the same device."""
        table = self._table
        for store in self.obs_stores.values():
            is_shared = table.takes_tensors and store.place.device.type == table.device.type
            store.use_columns(table.layout if is_shared else None)
            break

    def _make_stores(
        self,
        n_sets: int,
        options: StorageOptions,
        buffer_device: th.device | str | None,
        heap_bytes: int | None,
    ) -> None:
        if heap_bytes is not None:
            heap_bytes = check_count(heap_bytes, "heap_bytes")
        if not isinstance(options.dtypes, Mapping | None):
            raise SpecMismatchError(f"dtypes must be a dict from find_gpu_buffer_dtypes, got {options.dtypes!r}")
        self.storage_options, self.heap_bytes = options, heap_bytes
        place = _find_place(self.device if buffer_device is None else buffer_device)
        self.buffer_device = "pinned" if place.pinned else str(place.device)
        space = self.observation_space
        self._is_dict = isinstance(space, spaces.Dict)
        parts: dict[str, Any] = dict(space.spaces) if isinstance(space, spaces.Dict) else {"": space}
        #: The observations by key, ``""`` for a Box.
        self.obs_stores: dict[str, DeviceObservationStore] = {}
        # dtypes of the keys that are stored in a smaller dtype than that of the space
        self._dtypes: dict[str, tuple[np.dtype[Any], th.dtype]] = {}
        for key, part in parts.items():
            shape = self.obs_shape[key] if self._is_dict else self.obs_shape
            spec = ObsSpec(tuple(shape), np.dtype(part.dtype))
            stored_dtype = options.stored_dtype(key, spec)
            if stored_dtype != spec.dtype:
                self._dtypes[key] = spec.dtype, numpy_dtype_to_torch(spec.dtype)
                spec = ObsSpec(spec.shape, stored_dtype)
            method = options.method_for(key, spec)
            kwargs = self.compression_kwargs if method == self.compression_method else {}
            limit = heap_bytes
            if limit is not None:
                # two steps more: what a step replaces is freed when the next one is written
                flat_len, elem_type = math.prod(spec.shape), numpy_dtype_to_torch(spec.dtype)
                n_cells, runs_type = 2 * n_sets * self.n_envs, find_smallest_dtype(flat_len)
                limit += estimate_total_heap_bytes(n_cells, flat_len, elem_type, runs_type, method)
            self.obs_stores[key] = DeviceObservationStore(
                spec, self.buffer_size, self.n_envs, n_sets, place, method, kwargs, limit
            )

    def _compile_kernels(self, columns: Any = None) -> None:
        """Compile the Triton kernels while the buffer is empty, rather than in the middle of training."""
        table = self._table
        self._share_columns()
        if not device_base.runs_kernels(table.device):
            return
        n_envs = self.n_envs
        numbers = [np.zeros(n_envs, np.float32)] * table.written
        table.commit(0, table.plan([np.zeros(table.action_shape, table.action_dtype), *numbers]))
        for store in self.obs_stores.values():
            # the first store gathers the columns of a batch too
            store.compile_kernels(columns)
            columns = None

    # ---- writing ----

    def _plan(self, step: int, observations: Sequence[Any], names: Sequence[str]) -> list[PlannedWrite]:
        """Check and stage ``observations`` of all environments, one for each of ``names``, without writing them."""
        if self._is_dict:
            self._check_keys(observations, names)
            by_key: Sequence[Any] = observations
        else:
            store = self.obs_stores[""]
            shape, dtype = store.step_shape, store.dtype
            for obs in observations:
                if self._dtypes or type(obs) is not np.ndarray or obs.dtype != dtype or obs.shape != shape:
                    break
            else:
                # fast path: skip validation when shape and dtype already match
                return [store.plan(step, observations)]
            if not self._dtypes and all(_fits(obs, store) for obs in observations):
                return [store.plan(step, observations)]
            by_key = [{"": obs} for obs in observations]
        batches = []
        for key, store in self.obs_stores.items():
            batch = [obs[key] for obs in by_key]
            given = [f"{name}[{key!r}]" for name in names] if self._is_dict else names
            batches.append(self._fit_tensors(key, store, batch, given) or self._fit_arrays(key, store, batch, given))
        plans = [store.plan(step, batch) for store, batch in zip(self.obs_stores.values(), batches, strict=True)]
        if len(plans) > 1:
            plans.sort(key=_cannot_fail)
        return plans

    def _fit_tensors(
        self, key: str, store: DeviceObservationStore, batch: Sequence[Any], names: Sequence[str]
    ) -> list[th.Tensor] | None:
        """Return ``batch`` as tensors on the device of ``store``; None if it must be checked and stored as arrays."""
        place = store.place.device
        has_tensors = any(isinstance(obs, th.Tensor) and is_on(obs, place) for obs in batch)
        if not has_tensors or key in self._dtypes or device_base.stays_on_host(place):
            return None
        shape, dtype = store.step_shape, torch_dtype(store.dtype)
        fitted = []
        for observations, name in zip(batch, names, strict=True):
            if not isinstance(observations, th.Tensor):
                array = np.ascontiguousarray(fit_observations(observations, shape, store.dtype, name))
                observations = th.from_numpy(array if array.flags.writeable else array.copy())
            if not _fits(observations, store):
                converted = fit_observation_tensor(observations, shape, dtype, place, name)
                if converted is None:
                    return None
                observations = converted
            fitted.append(observations)
        return fitted

    def _fit_arrays(
        self, key: str, store: DeviceObservationStore, batch: Sequence[Any], names: Sequence[str]
    ) -> list[npt.NDArray[Any]]:
        """``batch`` as arrays in the shape and dtype of ``store``."""
        shape, dtype = store.step_shape, self._dtypes[key][0] if key in self._dtypes else store.dtype
        fitted = []
        for array, name in zip(batch, names, strict=True):
            if type(array) is not np.ndarray or array.dtype != dtype or array.shape != shape:
                array = np.ascontiguousarray(fit_observations(array, shape, dtype, name))
            fitted.append(array if dtype == store.dtype else narrow(array, store.dtype, name))
        return fitted

    def _fit_action(self, action: Any) -> Any:
        """Actions of a step for the table: an array or, if they are on its device, a tensor."""
        table = self._table
        if type(action) is np.ndarray and action.dtype == table.action_dtype and action.shape == (self.n_envs,):
            if table.action_dim == 1:
                return action.reshape(table.action_shape)
        elif table.takes_tensors and isinstance(action, th.Tensor) and is_on(action, table.device):
            fitted = fit_action_tensor(action, table.action_shape, table.torch_action_dtype)
            if fitted is not None:
                return fitted
        return fit_actions(np.empty((0, *table.action_shape), table.action_dtype), action)

    def _fit_numbers(self, values: Any, name: str) -> Any:
        """A number for each environment, as an array or a tensor like `_fit_action`."""
        return fit_numbers(values, self.n_envs, name, self._table.device if self._table.takes_tensors else None)

    def _fit_flags(self, values: Any, name: str) -> Any:
        """Like `_fit_numbers`, for whether episodes ended or began."""
        return fit_flag_numbers(values, self.n_envs, name, self._table.device if self._table.takes_tensors else None)

    def _check_keys(self, observations: Sequence[Any], names: Sequence[str]) -> None:
        keys = list(self.obs_stores)
        for obs, name in zip(observations, names, strict=True):
            missing = [key for key in keys if key not in obs] if isinstance(obs, Mapping) else keys
            if missing:
                raise SpecMismatchError(f"{name} lacks {', '.join(missing)}; the space has {', '.join(keys)}")

    @writes
    def _commit(self, step: Step) -> None:
        """Write a step; after an exception, the buffer holds all of it or is unchanged."""
        try:
            columns_taken = False
            for plan in step.plans:
                columns_taken |= plan.take_columns(step.columns)
            self._unfinished = step
            for plan in step.plans:
                plan.commit()
            if not columns_taken:
                self._table.commit(step.position, step.columns)
            if self._step_added is not None:
                self._step_added(step.position, step.extra)
            # one call, which no signal can interrupt
            self.__dict__.update(step.after)
        except BaseException:
            self._recover()
            raise

    def _columns_by_step(self, columns: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        return columns

    def _finish_step(self, unfinished: Step | str) -> None:
        if not isinstance(unfinished, Step):
            self.reset()
        elif finish_writes(unfinished.plans):
            self._table.commit(unfinished.position, unfinished.columns)
            if self._step_added is not None:
                self._step_added(unfinished.position, unfinished.extra)
            self.__dict__.update(unfinished.after)
        else:
            self._unfinished = None

    def _prepare_write(self) -> None:
        self._check_writable()
        self._ensure_recovered()

    def reset(self) -> None:
        """Remove everything that was added."""
        raise NotImplementedError

    @writes
    def _clear(self, after: dict[str, Any]) -> None:
        """Make every observation unwritten, then set the attributes ``after``."""
        if self.read_only or isinstance(self._unfinished, Step):
            self._prepare_write()
        try:
            # may be interrupted and run again
            self._unfinished = "reset"
            for store in self.obs_stores.values():
                store.clear()
            self._clear_columns()
            self.__dict__.update(after, _unfinished=None)
        except BaseException:
            self._recover()
            raise

    def _clear_columns(self) -> None:
        """Clear columns for which that is necessary. May be interrupted and run again."""

    # ---- reading ----

    def _read(self, indices: IndexBatch) -> dict[str, th.Tensor]:
        """Observations ``[set, n, ...]`` by key, on the device of the samples."""
        return {key: self._convert(store.read(indices), key) for key, store in self.obs_stores.items()}

    def _as_sb3(self, by_key: dict[str, Any]) -> Any:
        return by_key if self._is_dict else by_key[""]

    def _convert(self, observations: th.Tensor, key: str = "") -> th.Tensor:
        if observations.device.type != self.device.type:
            observations = observations.to(self.device)
        if key in self._dtypes:
            observations = observations.to(self._dtypes[key][1])
        options = self.storage_options
        if options.normalize_images and observations.dtype == th.uint8 and observations.ndim >= 5:
            return observations.float() / 255.0
        return observations.float() if options.output_dtype == "float" else observations

    def _read_flat(self, index: int) -> th.Tensor:
        """One observation as a flat tensor; the keys of a Dict are concatenated."""
        by_key = self._read(IndexBatch(np.array([[index]], np.int64)))
        return th.cat([part.reshape(-1) for part in by_key.values()])

    # ---- memory ----

    def _extra_bytes(self) -> int:
        return super()._extra_bytes() + int(self._table.padding)

    def _columns(self) -> dict[str, Any]:
        return super()._columns() | ({} if "_table" not in vars(self) else self._table.views)

    def _observation_usage(self, n_written: int) -> MemoryUsage:
        usages = {key: store.memory_usage() for key, store in self.obs_stores.items()}
        return sum((replace(usage, codecs={key: usage.codecs[""]}) for key, usage in usages.items()), MemoryUsage())

    def _observation_specs(self) -> dict[str, ObsSpec]:
        return {
            key: ObsSpec(store.spec.shape, self._dtypes[key][0] if key in self._dtypes else store.dtype)
            for key, store in vars(self).get("obs_stores", {}).items()
        }

    def check(self) -> None:
        """Raise `AssertionError` if the tables of a store contradict each other."""
        with self._lock:
            self._ensure_recovered()
            for store in self.obs_stores.values():
                store.check()

    # ---- copies ----

    def to_parts(self) -> Parts:
        with self._lock:
            self._ensure_recovered()
            return super().to_parts()

    def __getstate__(self) -> dict[str, Any]:
        # pickle and deepcopy read the state later, so it must not change with the next step
        with self._lock:
            self._ensure_recovered()
            state = {
                name: value.copy() if isinstance(value, np.ndarray) else value
                for name, value in self.__dict__.items()
                if name not in ("_lock", "_unfinished")
            }
            state |= self._saved_columns()
            del state["_table"]
            state["obs_stores"] = {key: store.frozen() for key, store in self.obs_stores.items()}
        return state

    def _saved_columns(self) -> dict[str, npt.NDArray[Any]]:
        """Copies of the columns, as earlier versions have pickled them."""
        arrays: dict[str, npt.NDArray[Any]] = self._table.arrays()
        return arrays

    def __setstate__(self, state: dict[str, Any]) -> None:
        columns = {name: state.pop(name) for name in self._table_type.names}
        self.__dict__.update(state, device=usable_device(state["device"]))
        self._table = self._table_type.from_arrays(self._columns_by_step(columns), self.device)
        self._share_columns()
        self._make_lock()


def _fits(observations: Any, store: DeviceObservationStore) -> bool:
    """Whether ``observations`` is a tensor that ``store`` takes as it is."""
    return (
        isinstance(observations, th.Tensor)
        and observations.dtype is store.tensor_dtype
        and observations.shape == store.step_shape
        and observations.is_contiguous()
        and not observations.requires_grad
        and is_on(observations, store.place.device)
    )


def _cannot_fail(plan: PlannedWrite) -> bool:
    return not plan.may_fail


def _find_place(device: th.device | str) -> DevicePlace:
    if str(device) == "pinned":
        if not th.cuda.is_available():
            raise ArgumentError(
                "buffer_device='pinned' is host memory that a GPU reads, and there is no GPU; "
                "leave buffer_device out, or pass 'cpu'"
            )
        return DevicePlace(th.device("cuda"), pinned=True)
    if str(device) == "auto":
        device = "cuda" if th.cuda.is_available() else "cpu"
    return DevicePlace(th.device(device))


def heap_limit(max_slot_bytes: int | None, heap_bytes: int | None, n_obs: int) -> int | None:
    """Return ``heap_bytes``, or the limit that the deprecated ``max_slot_bytes`` sets."""
    if max_slot_bytes is None:
        return heap_bytes
    import warnings

    warnings.warn(
        "max_slot_bytes is deprecated; pass heap_bytes, the limit of all observations",
        DeprecationWarning,
        stacklevel=3,
    )
    return max_slot_bytes * n_obs if heap_bytes is None else heap_bytes
