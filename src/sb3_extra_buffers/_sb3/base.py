"""What compressed buffers of every kind have in common."""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch as th

from sb3_extra_buffers._sb3.algorithm import check_loaded
from sb3_extra_buffers._sb3.leaves import Array, Leaves, each_leaf, take_decoded
from sb3_extra_buffers._sb3.options import OPTION_NAMES, StorageOptions
from sb3_extra_buffers.errors import (
    ExtraBuffersError,
    OutOfMemoryError,
    ReadOnlyBufferError,
    UnsupportedVersionError,
)
from sb3_extra_buffers.files.folders import SavedAsFolder
from sb3_extra_buffers.stores.locks import fork_safe_lock
from sb3_extra_buffers.stores.view import StoreView

#: version of the pickled state; pickles of other versions are refused
STATE_VERSION = 3

#: what Python, NumPy and torch raise where there is no memory
NO_MEMORY = (MemoryError, th.cuda.OutOfMemoryError)

#: while a step is being written to the stores
WRITING = "writing"

# what belongs to this process or to a file: a copy has nothing of that
_NOT_COPIED = frozenset({"_lock", "_live", "_last_save", "_read_only", "_step"})


class CompressedBuffer(SavedAsFolder):
    """Options, tensors, pickles, and what makes adding a step a transaction.

    A step is first written to the stores, which can take it back. Then ``_step`` is set, by one assignment, to
    everything that is left to do; whatever interrupts that, `_recover` does it again from the beginning.
    """

    _options: StorageOptions
    #: What keeps a file up to date with this buffer, if anything does.
    _live: Any = None
    _read_only = False
    #: None between two steps; `WRITING` while stores may have to take a step back; then what is left to do.
    _step: Any = None

    if TYPE_CHECKING:
        device: th.device

    def _take_options(self, **options: Any) -> None:
        """Remember how observations are to be kept; the first call wins (`OptionsFirst`)."""
        if "_options" not in self.__dict__:
            self._options = StorageOptions(**options)
        self._lock = fork_safe_lock(of_buffer=True)

    # ---- transactions ----

    def _check_writable(self) -> None:
        if self._read_only:
            raise ReadOnlyBufferError(f"this {type(self).__name__} was opened to be read; load() it to add to a copy")

    def _recover(self) -> None:
        """Finish or take back a step that was interrupted."""

    def _begin_step(self, leaves: Any) -> list[Any]:
        """Be ready to take back what is written to stores from now on; the keys of those, None for a Box."""
        keys = [key for key, leaf in each_leaf(leaves) if isinstance(leaf, StoreView)]
        for key in keys:
            (leaves if key is None else leaves[key]).store.commit()
        self._step = WRITING
        return keys

    def _undo_step(self, leaves: Any) -> None:
        for _, leaf in each_leaf(leaves):
            if isinstance(leaf, StoreView):
                leaf.store.undo_write()
        if self._live is not None:
            self._live.undo_step()
        self._step = None

    def _fail(self, problem: BaseException, position: Any) -> None:
        """Recover from ``problem`` in a step that began at ``position`` and raise it, memory errors by a name of ours.

        Returns if there was no memory at the end of the step, and recovering has completed it.
        """
        with contextlib.suppress(Exception):
            self._recover()  # if this fails as well, the next use of the buffer does it
        if not isinstance(problem, MemoryError) or isinstance(problem, ExtraBuffersError):
            raise problem
        if self._step is not None or self._position() == position:
            raise OutOfMemoryError(f"there is no memory for another step: {problem}; nothing was changed") from problem

    def _position(self) -> Any:
        """What every step changes."""
        raise NotImplementedError

    # ---- tensors ----

    def to_torch(self, array: Any, copy: bool = True) -> Any:
        """`BaseBuffer.to_torch`; observations that were just decoded are not copied once more."""
        if isinstance(array, dict):
            return {key: self.to_torch(part, copy) for key, part in array.items()}
        if take_decoded(array):
            return self._to_torch(array)
        return super().to_torch(array, copy)  # type: ignore[misc]  # SB3's BaseBuffer comes after this class

    def _obs_to_torch(self, observations: Any) -> Any:
        if isinstance(observations, dict):
            return {key: self._obs_to_torch(part) for key, part in observations.items()}
        return self._convert(self._to_torch(observations))

    def _as_asked(self, samples: Any) -> Any:
        """Samples with their observations in the dtype that ``output_dtype`` and ``normalize_images`` ask for."""
        options = self._options
        if options.output_dtype == "raw" and not options.normalize_images:
            return samples
        names = {"observations", "next_observations"} & set(samples._fields)
        return samples._replace(**{name: self._convert(getattr(samples, name)) for name in names})

    def _convert(self, observations: Any) -> Any:
        if isinstance(observations, dict):
            return {key: self._convert(part) for key, part in observations.items()}
        if self._options.normalize_images and observations.dtype == th.uint8 and observations.ndim >= 4:
            return observations.float() / 255.0
        return observations.float() if self._options.output_dtype == "float" else observations

    def _to_torch(self, array: Array) -> th.Tensor:
        """A tensor of the buffer's device; on the CPU it takes over the array's memory."""
        tensor = th.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)

    # ---- files ----

    def _settle_in_file(self) -> None:
        """Begin to live in a file if that was asked for; with the first step, when everything has been set up."""
        if self._options.storage != "mmap" or self._options.path is None:
            return
        from sb3_extra_buffers.files.mmap_buffer import check_new, create_folder

        self._live = create_folder(self, check_new(self._options.path))

    # ---- pickles ----

    def __getstate__(self) -> dict[str, Any]:
        return self._frozen_state(self.__dict__)

    def _frozen_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """``state`` as it is between two steps: copies of all that a step changes."""
        with self._lock:
            self._recover()
            known: dict[int, Any] = {}
            kept = {name: _freeze(value, known) for name, value in state.items() if name not in _NOT_COPIED}
        return kept | {"_state_version": STATE_VERSION}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._check_state(state)
        self.__dict__.update(state)
        self._lock = fork_safe_lock(of_buffer=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = object.__new__(type(self))
        memo[id(self)] = made
        # plain arrays are copies already
        state = {
            name: value if type(value) is np.ndarray and not value.dtype.hasobject else copy.deepcopy(value, memo)
            for name, value in self.__getstate__().items()
        }
        made.__setstate__(state)
        return made

    def _check_state(self, state: dict[str, Any]) -> None:
        version = state.pop("_state_version", 0)
        if version != STATE_VERSION:
            raise UnsupportedVersionError(
                f"this {type(self).__name__} was pickled with state version {version}, but this release reads version "
                f"{STATE_VERSION}; use the release that wrote it, and save() for files that later releases can read"
            )
        check_loaded(self, state)


def _freeze(value: Any, known: dict[int, Any]) -> Any:
    """``value``, or a copy of it where steps change it; what was one thing stays one thing."""
    if id(value) in known:
        return known[id(value)]
    made = value
    if type(value) is np.ndarray:
        made = value.copy()
    elif isinstance(value, StoreView):
        made = object.__new__(type(value))
        made.__dict__.update(vars(value))
        made.store = _freeze(value.store, known)
    elif hasattr(value, "frozen"):
        made = value.frozen()
    elif isinstance(value, Leaves):
        made = Leaves({key: _freeze(leaf, known) for key, leaf in value.items()})
    known[id(value)] = made
    return made


class OptionsFirst:
    """For classes that stand before ours and know nothing of its options.

    Takes the options before a constructor that would not pass them on, and applies them to samples that were made
    without us.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        taken = {name: kwargs.pop(name) for name in OPTION_NAMES & kwargs.keys()}
        self._options = StorageOptions(**taken)
        super().__init__(*args, **kwargs)

    def _get_samples(self, *args: Any, **kwargs: Any) -> Any:
        samples = super()._get_samples(*args, **kwargs)  # type: ignore[misc]  # this stands before a buffer
        return self._as_asked(samples)  # type: ignore[attr-defined]  # behind which is a CompressedBuffer
