"""Replay buffers that other processes on the same machine read through shared memory."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from stable_baselines3.common.vec_env import VecNormalize

from sb3_extra_buffers.arguments import as_array, check_count
from sb3_extra_buffers.errors import ArgumentError, IndexOutOfRangeError, OutOfMemoryError, SharingError
from sb3_extra_buffers.files.parts import LoadedParts
from sb3_extra_buffers.files.registry import class_of, from_parts, tag_of
from sb3_extra_buffers.stores.checks import only_named_errors, require
from sb3_extra_buffers.stores.locks import fork_safe_lock
from sb3_extra_buffers.stores.shared_memory import SharedView, SharedWriter, check_supported
from sb3_extra_buffers.stores.shared_stores import SharedArrays, SharedReaders, SharedStore, StoreSharing, part_lock
from sb3_extra_buffers.stores.transactions import HELD

__all__ = ["BufferSharing", "SharedHandle", "SharedReader"]

Array = npt.NDArray[Any]

# attempts to read a batch while the owner adds steps, before the owner has to wait for the whole batch
_MAX_ATTEMPTS = 3


class SharedHandle:
    """Handle to a shared buffer. Pass it, or its name, to other processes on this machine, which then `open` it.

    A handle can be pickled. It does not keep the buffer alive.

    Attributes:
        name: With this name, any process of the same user can open the buffer; see `SharedReader.open`.

    Examples:
        >>> import pickle
        >>> from gymnasium import spaces
        >>> from sb3_extra_buffers.compressed import CompressedReplayBuffer
        >>> buffer = CompressedReplayBuffer(1000, spaces.Box(0, 255, (4, 84, 84), "uint8"), spaces.Discrete(6))
        >>> handle = buffer.share()
        >>> pickle.loads(pickle.dumps(handle)).open().size()
        0
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def open(self, seed: int | None = None) -> SharedReader:
        """Return a reader; ``seed`` is the seed of its random generator."""
        return SharedReader(self.name, seed)

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedHandle, (self.name,)

    def __repr__(self) -> str:
        return f"SharedHandle({self.name!r})"


# ---- the owner ----

_sharings: weakref.WeakSet[BufferSharing] = weakref.WeakSet()


class BufferSharing:
    """Keeps a replay buffer in shared memory; readers wait while it changes."""

    def __init__(self, buffer: Any, in_files: bool = False) -> None:
        check_supported()
        parts = buffer.to_parts()
        _check_shareable(buffer, parts)
        self._buffer = weakref.ref(buffer)
        self._writer = SharedWriter(in_files)
        # whether a change of the whole buffer is under way; changes of its stores are then parts of it
        self._in_step = False
        # whether readers know where everything is; the descriptions of all stores that they have, if these are whole
        self._is_described = False
        self._published: dict[str, Any] | None = None
        # whether this is the copy of a forked child
        self._is_inherited = False
        self.handle = SharedHandle(self._writer.name)
        self._columns = SharedArrays(self._writer.place)
        columns = self._share_columns(buffer, parts)
        self._static = {"kind": parts.kind, "description": parts.description, "columns": columns}
        self._stores = {name: StoreSharing(store, self._writer.place) for name, store in parts.stores.items()}
        for store in parts.stores.values():
            # one lock for everything, so that a thread that begins a change holds all of it
            store.lock = buffer.lock
            store.readers = SharedReaders(self._begin_store, self._end_store, self._abandon_store)
        buffer._cache_views()
        _sharings.add(self)
        self.begin()
        self.end()

    def _share_columns(self, buffer: Any, parts: Any) -> dict[str, Any]:
        """Move columns, and observations in plain arrays, to shared memory."""
        described, observations = {}, {name: dict(views.by_key) for name, views in buffer.obs_views().items()}
        of_sequences = {}
        for name, column in parts.columns.items():
            shared, described[name] = self._columns.share(name, column)
            if name in _sequence_columns(buffer):
                of_sequences[name] = shared
                continue
            attribute, _, key = name.removeprefix("extra/").partition(".")
            if attribute in observations:
                observations[attribute][key] = shared
            else:
                setattr(buffer, attribute, shared)
        self._columns.end()
        if of_sequences:
            buffer._use_sequence_columns(of_sequences)
        buffer.restore_obs_views(observations)
        return described

    # ---- changes ----

    def begin(self) -> None:
        """Begin a step: wait for active readers, and let no other reader begin."""
        if self._is_inherited:
            raise SharingError(
                "this buffer is shared by the parent process, and cannot be used here; open its handle to read it"
            )
        self._in_step = True
        self._writer.begin()

    def end(self) -> None:
        """End a step: publish it, and let readers continue."""
        self._in_step = False
        self._end_store()

    def abandon(self) -> None:
        """Let readers continue after an interrupt in `end`."""
        self._in_step = False
        self._writer.abandon()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """`begin` and `end`; may be part of another change."""
        is_part = self._in_step
        try:
            self.begin()
            yield
        finally:
            self._in_step = is_part
            try:
                self._end_store()
            except BaseException:
                self._abandon_store()
                raise

    def _begin_store(self) -> None:
        if self._is_inherited:
            self.begin()
        if not self._in_step:
            self._writer.begin()

    def _end_store(self) -> None:
        writer = self._writer
        if self._in_step or not writer.is_changing:
            return
        is_complete = False
        try:
            is_complete = self._publish()
        finally:
            writer.end(is_complete)

    def _abandon_store(self) -> None:
        if not self._in_step:
            self._writer.abandon()

    def _publish(self) -> bool:
        """Share what is new; return whether readers may read it."""
        buffer = self._buffer()
        if buffer is None or not (buffer._unfinished is None or buffer._unfinished is HELD):
            return False
        state = self._writer.state
        state[0], state[1], state[2], state[3] = buffer.pos, buffer.full, buffer.n_evicted, buffer.n_added
        for sharing in self._stores.values():
            store = sharing.store
            if store is not None and store.inner is not None and store.inner.dirty:
                return False
            if not sharing.is_current():
                # first: after an interrupt, the next change publishes what this one has moved
                self._is_described = False
                sharing.update()
        if not self._is_described:
            stores = {name: sharing.description for name, sharing in self._stores.items()}
            if stores != self._published:
                self._published = None
                self._writer.describe(self._static | {"stores": stores})
                self._published = stores
            self._is_described = True
        return True

    def close(self) -> None:
        """Stop sharing; the buffer can be used as before."""
        self._writer.close()

    def _leave(self) -> None:
        """Called in a forked child, whose copy of the buffer must not be used: the parent changes the shared memory."""
        self._is_inherited = True
        buffer = self._buffer()
        if buffer is not None:
            lock = _ParentLock(self)
            buffer._lock = lock
            for store in filter(None, (sharing.store for sharing in self._stores.values())):
                store.lock = lock
                if isinstance(store.readers, SharedReaders):
                    store.readers.exclude_threads()  # reading then needs the lock


class _ParentLock:
    """Replaces the lock of a buffer that the parent process shares; entering it raises `SharingError`."""

    def __init__(self, sharing: BufferSharing) -> None:
        self._sharing = sharing

    def __enter__(self) -> None:
        self._sharing.begin()

    def __exit__(self, *exc: object) -> None:
        """Never called, because entering raises."""


def _check_shareable(buffer: Any, parts: Any) -> None:
    name = type(buffer).__name__
    if getattr(buffer, "mmap_folder", None) is not None:
        raise SharingError(f"this {name} is kept in a folder; open the folder read-only instead of sharing it")
    if buffer.read_only:
        raise SharingError(f"this {name} was opened read-only; share the buffer that is written to")
    if "priorities" in parts.columns:
        raise SharingError(f"a {name} with priorities cannot be shared: readers could not update them")
    for column in parts.columns.keys() - _sequence_columns(buffer).keys():
        attribute = column.removeprefix("extra/").partition(".")[0]
        if not isinstance(vars(buffer).get(attribute), np.ndarray | dict):
            raise SharingError(f"a {name} cannot be shared: {column} is not an array with a row for each step")


def _sequence_columns(buffer: Any) -> dict[str, Array]:
    columns: dict[str, Array] = buffer.sequence_columns() if hasattr(buffer, "sequence_columns") else {}
    return columns


@atexit.register
def _close_all() -> None:
    for sharing in list(_sharings):
        with contextlib.suppress(Exception):
            sharing.close()


def _leave_all() -> None:
    for sharing in list(_sharings):
        sharing._leave()
    _sharings.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all)


# ---- readers ----


class _TablesReplacedError(Exception):
    """Tables were replaced while a batch was read; the batch must be read again."""


class SharedReader:
    """Reads a replay buffer that another process on this machine shares; see `CompressedReplayBuffer.share`.

    Batches are decoded in this process, from the owner's memory. Several threads may use a reader. Methods that read
    raise `OwnerEndedError` once the owner has ended or has stopped sharing, and `InterruptedChangeError` if it was
    killed in the middle of a step.

    Args:
        name: The name of a `SharedHandle`.
        seed: Seed of the generator that `sample` draws from.

    Raises:
        SharingError: No buffer is shared under this name, or it belongs to another user.

    Examples:
        >>> import numpy as np
        >>> from gymnasium import spaces
        >>> from sb3_extra_buffers.compressed import CompressedReplayBuffer, SharedReader
        >>> buffer = CompressedReplayBuffer(1000, spaces.Box(0, 255, (4, 84, 84), "uint8"), spaces.Discrete(6))
        >>> name = buffer.share().name
        >>> reader = SharedReader.open(name)  # in another process
        >>> obs = np.zeros((1, 4, 84, 84), np.uint8)
        >>> buffer.add(obs, obs, np.zeros((1, 1)), np.zeros(1), np.zeros(1), [{}])
        >>> reader.sample(32).observations.shape
        torch.Size([32, 4, 84, 84])
    """

    def __init__(self, name: str, seed: int | None = None) -> None:
        self._shared = SharedView(name)
        self._buffer: Any = None
        self._stores: dict[str, SharedStore] = {}
        self._generation = self._n_changes = -1
        # the number of changes at the previous batch
        self._n_changes_before = -1
        # held while drawing; a fork waits for it, so that the child's generator is in a valid state
        self._lock = fork_safe_lock(of_buffer=True)
        #: The generator that `sample` draws from.
        self.random = _generator(seed)
        with self._reading():
            pass

    @classmethod
    def open(cls, name: str | SharedHandle, seed: int | None = None) -> SharedReader:
        """Open a buffer that another process shares, by ``name`` or handle; ``seed`` is the seed of the generator."""
        return cls(name.name if isinstance(name, SharedHandle) else name, seed)

    def __repr__(self) -> str:
        return f"SharedReader({self.name!r}, {'live' if self.is_live else 'ended'})"

    @property
    def name(self) -> str:
        """The name of the shared buffer."""
        return self._shared.name

    @property
    def is_live(self) -> bool:
        """Whether the owner is running and still shares the buffer."""
        return self._shared.is_live

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Any]:
        """Yield the up-to-date buffer, which does not change in the meantime."""
        with self._shared.reading():
            if self._shared.n_changes != self._n_changes:
                with self._lock:
                    self._refresh()
            yield self._buffer

    def _refresh(self) -> None:
        shared = self._shared
        if shared.n_changes == self._n_changes:
            return
        if shared.generation != self._generation:
            with only_named_errors(f"the description of {self.name!r}"):
                self._attach(shared.description())
            self._generation = shared.generation
        buffer, state = self._buffer, shared.state
        buffer.pos, buffer.full, buffer.n_evicted, buffer.n_added = state[0], bool(state[1]), state[2], state[3]
        self._n_changes = shared.n_changes

    def _attach(self, described: Any) -> None:
        map_array = self._shared.map_array
        for name, store in described["stores"].items():
            if name in self._stores:
                self._stores[name].attach(store, map_array)
            else:
                self._stores[name] = SharedStore(store, map_array)
        if self._buffer is None:
            columns = {name: map_array(column) for name, column in described["columns"].items()}
            kind = described["kind"]
            require(tag_of(class_of(kind)) == kind, f"unknown kind {kind!r}")
            parts = LoadedParts(kind, described["description"], columns, dict(self._stores), read_only=True)
            self._buffer = from_parts(parts)

    # ---- reading ----

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draw ``batch_size`` transitions; ``env`` normalises the batch if it is a `VecNormalize`."""
        batch_size = check_count(batch_size, "batch_size", 0)
        for _ in range(_MAX_ATTEMPTS):
            with self._reading() as buffer:
                steps, envs = self._draw(buffer, batch_size)
                n_added, pos, generation = buffer.n_added, buffer.pos, self._generation
                is_idle, self._n_changes_before = self._n_changes_before == self._n_changes, self._n_changes
                if is_idle or buffer._raw:
                    return buffer._samples_at(steps, envs, env)
            # Steps are being added: do not make the owner wait for the whole batch
            part_lock.lock = partial(self._reading_part, generation)
            try:
                batch = buffer._samples_at(steps, envs, env)
            except _TablesReplacedError:
                continue
            finally:
                part_lock.lock = None
            with self._reading():
                if buffer.n_added == n_added or buffer._still_held(steps, n_added, pos):
                    return batch
        with self._reading() as buffer:
            return buffer._samples_at(*self._draw(buffer, batch_size), env)

    def _draw(self, buffer: Any, batch_size: int) -> tuple[Array, Array]:
        low, high, shift = buffer._range()
        try:
            with self._lock:
                steps = self.random.integers(low, high, batch_size)
                envs = self.random.integers(0, buffer.n_envs, batch_size)
        except MemoryError as problem:
            raise OutOfMemoryError(f"not enough memory for a batch of {batch_size}: {problem}") from problem
        return (steps + shift) % buffer.buffer_size if shift else steps, envs

    @contextlib.contextmanager
    def _reading_part(self, generation: int) -> Iterator[None]:
        """Keep the owner out for a part of a batch; raise if tables have been replaced."""
        with self._shared.reading():
            if self._shared.generation != generation:
                raise _TablesReplacedError
            yield

    def read(self, steps: Any, envs: Any, env: VecNormalize | None = None) -> Any:
        """Return the transitions at ``(steps[i], envs[i])``, as `sample` does.

        Args:
            steps: Positions in the owner's buffer, from 0 to ``buffer_size - 1``.
            envs: The environment of each transition.
            env: Normalises the batch if it is a `VecNormalize`.
        """
        steps, envs = _as_indices(steps, "steps"), _as_indices(envs, "envs")
        with self._reading() as buffer:
            for name, indices, size in (("step", steps, buffer.buffer_size), ("environment", envs, buffer.n_envs)):
                outside = indices[(indices < 0) | (indices >= size)]
                if len(outside):
                    raise IndexOutOfRangeError(f"{name} {outside[0]} is out of range; the buffer has {size} {name}s")
            if len(steps) != len(envs):
                raise IndexOutOfRangeError(f"got {len(steps)} steps but {len(envs)} environments; pass as many of each")
            return buffer._samples_at(steps, envs, env)

    def sample_sequences(self, *args: Any, **kwargs: Any) -> Any:
        """`CompressedSequenceReplayBuffer.sample_sequences` of the shared buffer, with its arguments.

        It draws from NumPy's global generator. The owner waits for the whole batch.
        """
        with self._reading() as buffer:
            if not hasattr(buffer, "sample_sequences"):
                raise SharingError(f"a {type(buffer).__name__} has no sequences; use CompressedSequenceReplayBuffer")
            return buffer.sample_sequences(*args, **kwargs)

    def size(self) -> int:
        """Number of steps of every environment that can be sampled now."""
        with self._reading() as buffer:
            return int(buffer.size())

    @property
    def n_added(self) -> int:
        """Steps added so far."""
        with self._reading() as buffer:
            return int(buffer.n_added)

    def __len__(self) -> int:
        """Number of transitions that can be sampled now, in all environments."""
        with self._reading() as buffer:
            return len(buffer)

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        raise SharingError("a reader belongs to its process; pass the handle to others, and open it there")


def _generator(seed: Any) -> np.random.Generator:
    try:
        return np.random.default_rng(seed)
    except (TypeError, ValueError) as problem:
        raise ArgumentError(f"seed must be an integer of at least 0 or None, got {seed!r}: {problem}") from problem


def _as_indices(values: Any, name: str) -> npt.NDArray[np.int64]:
    array = as_array(values, name).reshape(-1)
    if array.dtype.kind not in "iu" and array.size:
        raise IndexOutOfRangeError(f"{name} must be integers, got {array.dtype}")
    return array.astype(np.int64)
