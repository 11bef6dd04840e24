"""What compressed replay and rollout buffers share: options, transactions, tensors and copies."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np
import torch as th

from sb3_extra_buffers._sb3.algorithm import check_loaded
from sb3_extra_buffers._sb3.options import OPTION_NAMES, StorageOptions
from sb3_extra_buffers._sb3.report import ReportingBuffer
from sb3_extra_buffers._sb3.views import Array, ObsViews, View
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import LayoutError, UnsupportedVersionError
from sb3_extra_buffers.files.folders import SavedAsFolder
from sb3_extra_buffers.stores.reentry import RawCopier, refuse, writes
from sb3_extra_buffers.stores.transactions import HELD, Transactional
from sb3_extra_buffers.stores.usage import MemoryUsage
from sb3_extra_buffers.stores.view import StoreView

if TYPE_CHECKING:
    from typing_extensions import Self

#: Version of the pickled state; pickles of other versions are refused.
STATE_VERSION = 4

#: What Python, NumPy and torch raise when memory runs out.
NO_MEMORY = (MemoryError, th.cuda.OutOfMemoryError)

# attributes that belong to this process or to a file, and those that `_use_views` sets again
_NOT_COPIED = frozenset(
    {"_lock", "mmap_folder", "last_save", "read_only", "_unfinished", "_stored", "_dense", "_raw", "_transitions"}
    | {"_sharing", "_window_reader", "_frame_steps", "_inner_tried"}
)

# whether SB3's own `_get_samples` is running: every array that it converts was just gathered or decoded
_converting_fresh_arrays: ContextVar[bool] = ContextVar("converting_fresh_arrays", default=False)


class CompressedBuffer(ReportingBuffer, Transactional, SavedAsFolder):
    """A buffer of SB3's that keeps its observations in `ObsViews`; everything else stays as SB3 laid it out."""

    _options: StorageOptions
    _views: ObsViews

    if TYPE_CHECKING:
        device: th.device
        observations: Any

    def _take_options(self, options: StorageOptions) -> None:
        """Keep ``options``, unless `OptionsFirst` has taken them already."""
        vars(self).setdefault("_options", options)
        self._make_lock()

    # ---- for files ----

    @property
    def storage_options(self) -> StorageOptions:
        """The options for storing observations that were passed to the constructor."""
        return self._options

    @storage_options.setter
    def storage_options(self, options: StorageOptions) -> None:
        self._options = options

    def obs_views(self) -> dict[str, ObsViews]:
        """The observations by attribute: ``observations`` and, in replay buffers, ``next_observations``."""
        return {"observations": self._views}

    def restore_obs_views(self, views: dict[str, dict[str, View]]) -> None:
        """Replace what `obs_views` returned; the keys of a dict are those of the space, ``""`` for a Box."""
        self._use_views(**{name: ObsViews(by_key, self._views.is_dict) for name, by_key in views.items()})

    def _use_views(self, observations: ObsViews) -> None:
        """Keep observations there from now on."""
        self._views = observations
        self.observations = observations.as_sb3()

    def check_layout(self, name: str) -> None:
        """Raise if a subclass called ``name`` keeps observations elsewhere than in the views."""
        if "_views" not in vars(self):
            raise LayoutError(
                f"{name} does not call super().__init__(), so its observations would not be compressed; call it there, "
                "with SB3's arguments"
            )
        for attribute, views in self.obs_views().items():
            used = getattr(self, attribute)
            by_key = used if isinstance(used, dict) else {"": used}
            if any(by_key.get(key) is not view for key, view in views.by_key.items()):
                raise LayoutError(
                    f"{name} replaces {attribute} with an array of its own, so they would not be compressed; "
                    "leave them where SB3's buffer puts them"
                )

    # ---- transactions ----

    def _written_stores(self) -> Iterable[Any]:
        return [view.store for view in self._views.stored.values()]

    def _undo_step(self) -> None:
        if self.mmap_folder is not None:
            self.mmap_folder.undo_step()
        super()._undo_step()

    @writes
    def _undisturbed(self) -> Self:
        """The buffer itself, once no write is left unfinished; the caller holds the lock.

        In a signal handler that has interrupted a write of this thread, or a read, it is a copy of the buffer between
        two steps. The interrupted call goes on afterwards as if nothing had happened.
        """
        is_read = any(view.store.readers.is_reading for view in self._views.stored.values())
        if not (is_read or self._is_inside()):
            if self._is_unfinished():
                self._recover()
            return self
        if self.mmap_folder is not None or getattr(self, "_sharing", None) is not None:
            raise refuse(f"this {type(self).__name__}, which is shared or in a memory-mapped folder,")
        copier = RawCopier()
        copied = object.__new__(type(self))
        copier.put(self, copied)
        for name, value in vars(self).items():
            if name not in _NOT_COPIED or name == "_unfinished":
                vars(copied)[name] = copier.copy(value)
        copied._after_setstate()
        copied._recover()
        return copied

    @contextlib.contextmanager
    def _unchanging(self) -> Iterator[Self]:
        """`_undisturbed`, which signal handlers cannot change meanwhile; the caller is marked with `writes`."""
        buffer = self._undisturbed()
        buffer._unfinished = HELD
        try:
            yield buffer
        finally:
            buffer._unfinished = None

    # ---- memory ----

    def memory_usage(self) -> MemoryUsage:
        """The memory that the buffer holds, and what SB3's own buffer would hold for the same transitions."""
        with self._lock:
            buffer = self._undisturbed()
            return super().memory_usage() if buffer is self else buffer.memory_usage()

    def _observation_usage(self, n_written: int) -> MemoryUsage:
        return self._views.memory_usage(self._obs_per_transition, n_written)

    def _observation_specs(self) -> dict[str, ObsSpec]:
        return self._views.specs() if "_views" in vars(self) else {}

    # ---- tensors ----

    def to_torch(self, array: Any, copy: bool = True) -> Any:
        """`BaseBuffer.to_torch`; arrays that SB3 has just read for a batch are not copied once more."""
        if _converting_fresh_arrays.get():
            return self._to_torch(array)
        return super().to_torch(array, copy)  # type: ignore[misc]  # SB3's BaseBuffer comes after this class

    def _sb3_samples(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run code of SB3 that makes a batch, all of whose arrays are fresh, and convert its observations."""
        token = _converting_fresh_arrays.set(True)
        try:
            samples = make(*args, **kwargs)
        finally:
            _converting_fresh_arrays.reset(token)
        return self._convert_samples(samples)

    def _convert_samples(self, samples: Any) -> Any:
        """Samples with observations in the dtype that ``output_dtype`` and ``normalize_images`` ask for."""
        options = self._options
        if options.output_dtype == "raw" and not options.normalize_images:
            return samples
        names = {"observations", "next_observations"} & set(samples._fields)
        return samples._replace(**{name: self._convert_each(getattr(samples, name)) for name in names})

    def _convert_each(self, observations: Any) -> Any:
        if isinstance(observations, dict):
            return {key: self._convert(tensor) for key, tensor in observations.items()}
        return self._convert(observations)

    def _convert(self, observations: th.Tensor) -> th.Tensor:
        if self._options.normalize_images and observations.dtype == th.uint8 and observations.ndim >= 4:
            return observations.float() / 255.0
        return observations.float() if self._options.output_dtype == "float" else observations

    def _obs_to_torch(self, observations: Any) -> Any:
        if isinstance(observations, dict):
            return {key: self._convert(self._to_torch(array)) for key, array in observations.items()}
        return self._convert(self._to_torch(observations))

    def _to_torch(self, array: Array) -> th.Tensor:
        """A tensor on the buffer's device; on the CPU it takes over the array's memory."""
        tensor = th.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)

    # ---- copies ----

    def __getstate__(self) -> dict[str, Any]:
        return self._frozen_state(lambda buffer: vars(buffer))

    @writes
    def _frozen_state(self, get_state: Callable[[Self], dict[str, Any]]) -> dict[str, Any]:
        """What ``get_state`` returns between two steps, with copies of everything that a step changes."""
        known: dict[int, Any] = {}
        with self._lock, self._unchanging() as buffer:
            state = get_state(buffer)
            frozen = {name: _freeze(value, known) for name, value in state.items() if name not in _NOT_COPIED}
        return frozen | {"_state_version": STATE_VERSION}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._check_state(state)
        self.__dict__.update(state)
        self._after_setstate()

    def _after_setstate(self) -> None:
        """Make again what is not copied."""
        self._make_lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        state = self.__getstate__()
        # plain arrays of the state are copies already
        memo.update({id(v): v for v in state.values() if type(v) is np.ndarray and not v.dtype.hasobject})
        copied.__setstate__(copy.deepcopy(state, memo))
        return copied

    def _check_state(self, state: dict[str, Any]) -> None:
        version = state.pop("_state_version", 0)
        if version != STATE_VERSION:
            raise UnsupportedVersionError(
                f"this {type(self).__name__} was pickled with state version {version}, but this release reads version "
                f"{STATE_VERSION}; load it with the release that wrote it, and use save() for files that later "
                "releases can read"
            )
        check_loaded(self, state)


def _freeze(value: Any, known: dict[int, Any]) -> Any:
    """Return a copy of what steps change, else ``value`` itself; one object that is met twice stays one."""
    if id(value) in known:
        return known[id(value)]
    frozen = value
    if type(value) is np.ndarray:
        frozen = value.copy()
    elif isinstance(value, StoreView):
        frozen = object.__new__(type(value))
        frozen.__dict__.update(vars(value))
        frozen.store = _freeze(value.store, known)
    elif type(value) is dict:
        frozen = {key: _freeze(part, known) for key, part in value.items()}
    elif isinstance(value, ObsViews):
        frozen = value.with_views(_freeze(value.by_key, known))
    elif hasattr(value, "frozen"):
        frozen = value.frozen()
    known[id(value)] = frozen
    return frozen


class OptionsFirst:
    """For classes ahead of a compressed buffer in the MRO that do not know its options.

    Takes the options before a constructor that would not pass them on, and applies them to samples that are made
    without the compressed buffer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._options = StorageOptions(**{name: kwargs.pop(name) for name in OPTION_NAMES & kwargs.keys()})
        super().__init__(*args, **kwargs)

    def _get_samples(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._convert_samples(super()._get_samples(*args, **kwargs))  # type: ignore[misc]  # a buffer follows
