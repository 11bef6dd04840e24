"""Buffers that live in a folder: every step that was completed is there after the process has gone, however it went."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import ExtraBuffersError, FileFormatError, FileWriteError, LayoutError, SharingError
from sb3_extra_buffers.files import disk, kinds, locking
from sb3_extra_buffers.files.journal import Journal, read_journal
from sb3_extra_buffers.files.loading import SavedParts
from sb3_extra_buffers.files.locking import FolderLock
from sb3_extra_buffers.files.saving import Save, SaveReport, next_number, state_of
from sb3_extra_buffers.files.values import decode, encode
from sb3_extra_buffers.stores.file_heap import FileHeap
from sb3_extra_buffers.stores.frames import FrameStore
from sb3_extra_buffers.stores.heap import Heap
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.view import StoreView

Array = npt.NDArray[Any]

# steps and bytes after which the journal begins anew
_RECORDS = 1000
_JOURNAL_BYTES = 1 << 24
# dead bytes of a heap that are not worth moving the others for
_SPARE = 1 << 22

_alive: weakref.WeakSet[LiveFolder] = weakref.WeakSet()


def keep_in_file(buffer: Any, path: str | os.PathLike[str]) -> LiveFolder:
    """Let ``buffer`` live in the folder ``path``, which must be new or hold nothing else but this buffer."""
    _check_can_live(buffer)
    folder = Path(path)
    with disk.named_errors(folder, f"making {folder}"):
        disk.make_folder(folder)
        live = LiveFolder(buffer, folder, FolderLock(folder))
    live.begin()
    return live


def StartsInFile(buffer: Any, folder: Path) -> LiveFolder:  # noqa: N802  # it stands for an object
    """What lets ``buffer`` live in the new folder ``folder`` from its first step on, when everything is set up."""
    with disk.named_errors(folder, f"making {folder}"):
        return LiveFolder(buffer, folder, FolderLock(folder))


def resume(folder: Path, target: type[Any] | None) -> Any:
    """What lives in ``folder``, to go on there."""
    saved = SavedParts.of_folder(folder)
    with disk.named_errors(folder, f"opening {folder}"):
        lock = FolderLock(folder)
    saved = SavedParts.of_folder(folder)  # nobody writes to it any more
    buffer = saved.load(target, in_file=True)
    _check_can_live(buffer)
    LiveFolder(buffer, folder, lock).begin()
    return buffer


def check_new(path: str | os.PathLike[str]) -> Path:
    """``path``, if a buffer can begin there."""
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(entry.name != locking.NAME for entry in folder.iterdir())):
        raise FileWriteError(17, f"{folder} is not empty; load or open the buffer that is there, or choose a new path")
    with disk.named_errors(folder, f"making {folder}"):
        disk.make_folder(folder)
    return folder


def _check_can_live(buffer: Any) -> None:
    if not isinstance(buffer, StoreView) and not hasattr(buffer, "next_observations"):
        raise LayoutError(
            f"a {type(buffer).__name__} cannot live in a file: replay buffers of the host and arrays can; save() it"
        )


class LiveFolder:
    """Keeps a folder up to date with a buffer, and others from writing to it.

    Payloads lie in files that the heaps write to. Everything else is saved now and then, as `save` does it; in between,
    a journal takes down each step. Nothing that the last manifest speaks of is written over, so a state is always that
    manifest and the journal that it names.

    A buffer calls `prepare_step` before it changes anything, `record_step` as the last thing before a step counts, and
    `undo_step` if it does not count after all. An array's store calls `record_change`.
    """

    def __init__(self, buffer: Any, folder: Path, lock: FolderLock) -> None:
        self._buffer = weakref.ref(buffer)
        self.folder, self._lock = folder, lock
        self._journal: Journal | None = None
        self._memory = StepMemory()
        self._undo: tuple[int, int, StepMemory] | None = None
        self._n_cells = self._retry_at = 0
        _alive.add(self)

    @property
    def buffer(self) -> Any:
        return self._buffer()

    def lives_in(self, folder: Path) -> bool:
        """Whether ``folder`` is this one."""
        return os.path.realpath(folder) == os.path.realpath(self.folder)

    def begin(self, recover: bool = True) -> None:
        """Save, and listen to the buffer from now on."""
        self.checkpoint(recover=recover)
        buffer = self.buffer
        vars(buffer)["_live"] = self
        if isinstance(buffer, StoreView):
            buffer.store.on_change = self.record_change

    def close(self) -> None:
        """Let go of the folder; the buffer goes on in memory."""
        buffer = self.buffer
        if buffer is not None:
            for store in self._stores():
                store.make_heap = store.on_change = None
            vars(buffer).pop("_live", None)
        if self._journal is not None:
            self._journal.close()
        self._lock.release()

    # ---- checkpoints ----

    def checkpoint(self, sync: bool = True, recover: bool = True) -> SaveReport:
        """Save everything, and begin a new journal; a step that is about to be added has nothing to ``recover``."""
        self._check_owner()
        buffer = self.buffer
        with (
            getattr(buffer, "_lock", None) or contextlib.nullcontext(),
            disk.named_errors(self.folder, f"saving to {self.folder}"),
        ):
            self._see_to_heaps()
            journal = self._new_journal(sync)
            writing: Save | None = None
            try:
                with state_of(buffer, recover) as (parts, taken):
                    writing = Save(buffer, self.folder, parts, taken, sync, journal.path.name)
                    return writing.run()
            finally:
                if writing is not None and writing.counts():
                    if self._journal is not None:
                        self._journal.close()
                    self._journal, self._memory, self._undo, self._retry_at = journal, StepMemory(), None, 0
                    self._n_cells = sum(store.n_cells for store in parts.stores.values())
                else:
                    journal.close()
                    with contextlib.suppress(OSError):
                        disk.unlink(journal.path)

    def _stores(self) -> list[ObservationStore]:
        return list(kinds.parts_of(self.buffer).stores.values())

    def _see_to_heaps(self) -> None:
        """Move heaps to files, and what is live in files that are mostly dead to new ones."""
        for place, store in enumerate(self._stores()):
            store.make_heap = functools.partial(self._new_heap, place, store._heap_bytes)
            inner = store._inner
            if not isinstance(inner, FrameStore):
                continue
            inner.settle()
            heap = inner.heap
            if not isinstance(heap, FileHeap):
                _move_heap(inner, store.make_heap())
            elif heap.dead_bytes > heap.live_bytes + _SPARE:
                inner._drop_view()
                try:
                    heap.compact(self._heap_path(place))
                finally:
                    inner._sync()

    def _new_heap(self, place: int, limit: int | None) -> FileHeap:
        return FileHeap(self._heap_path(place), limit)

    def _heap_path(self, place: int) -> Path:
        return self.folder / f"heap-{place}-{next_number(self.folder, f'heap-{place}-*.bin'):04}.bin"

    def _new_journal(self, sync: bool = True) -> Journal:
        journal = Journal(self.folder / f"journal-{next_number(self.folder, 'journal-*.bin'):04}.bin")
        if sync:
            journal.flush()
        return journal

    def _check_owner(self) -> None:
        if not self._lock.is_ours:
            raise SharingError(
                f"{self.folder} belongs to the process that opened it; load() it there, or pickle the buffer, "
                "for a copy in this one"
            )

    # ---- steps ----

    def prepare_step(self) -> None:
        """Save, if the journal is long; where that fails, the journal grows on, unless it cannot."""
        self._check_owner()
        self._undo, journal = None, self._journal
        if journal is None:
            self.begin(recover=False)
        elif journal.broken:
            self.checkpoint(recover=False)
        elif journal.n_records >= max(_RECORDS, self._retry_at) or journal.n_bytes > _JOURNAL_BYTES:
            try:
                self.checkpoint(recover=False)
            except ExtraBuffersError:
                self._retry_at = journal.n_records + _RECORDS // 10

    def record_step(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Take down a step; when this returns, it outlives the process."""
        journal, before = self._journal, self._memory
        if journal is not None:
            words, arrays, memory = before.write(self.buffer, obs, next_obs, action, reward, done, infos)
            self._undo = journal.n_bytes, journal.n_records, before
            journal.append(words, arrays)
            self._memory = memory

    def undo_step(self) -> None:
        """Forget the step that was taken down since `prepare_step`, if one was."""
        undo, self._undo = self._undo, None
        if undo is not None and self._journal is not None:
            self._memory = undo[2]
            with contextlib.suppress(ExtraBuffersError):
                self._journal.truncate(*undo[:2])

    def record_change(self, kind: str, *arrays: Array) -> None:
        """Take down a change to an array's store."""
        self._check_owner()
        if self._journal is not None:
            if self._journal.broken or self.buffer.store.n_cells != self._n_cells:
                # a sibling was made: the journal is about an array that had none
                self.checkpoint()
            size = self._journal.n_bytes, self._journal.n_records
            try:
                self._journal.append({"kind": kind}, list(arrays))
            except BaseException:
                with contextlib.suppress(ExtraBuffersError):
                    self._journal.truncate(*size)
                raise


class StepMemory:
    """Turns the arguments of a replay buffer's ``add`` into records and back.

    An observation is mostly the next one of the step before, and a next one mostly the observation moved on by a
    frame: only what is neither is written.
    """

    def __init__(self, following: dict[str, Array] | None = None) -> None:
        self._next = following or {}

    def write(
        self, buffer: Any, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any
    ) -> tuple[dict[str, Any], list[Array], StepMemory]:
        """A record, and the memory of after it."""
        arrays: list[Array] = []
        keys, following = [], {}
        for key, leaf in _leaves(buffer):
            shape = leaf.shape[1:]
            rows = [_rows(part if key is None else part[key], shape, leaf.dtype) for part in (obs, next_obs)]
            known = self._next.get(key or "")
            same = np.zeros(len(rows[0]), np.bool_) if known is None else (rows[0] == known).all(axis=1)
            frame = _frame_bytes(leaf)
            moved = (rows[1][:, :-frame] == rows[0][:, frame:]).all(axis=1) if frame else np.zeros(len(same), np.bool_)
            arrays += [same, rows[0][~same], moved, rows[1][moved, -frame:] if frame else rows[1][:0]]
            arrays.append(rows[1][~moved])
            keys.append([key, frame])
            following[key or ""] = rows[1].copy()
        words: dict[str, Any] = {"kind": "add", "keys": keys}
        if getattr(buffer, "copy_info_dict", False):
            words["infos"] = [encode(info, "infos") for info in infos]
        elif buffer.handle_timeout_termination:
            words["truncated"] = [bool(info.get("TimeLimit.truncated", False)) for info in infos]
        arrays += [np.asarray(part) for part in (action, reward, done)]
        return words, arrays, StepMemory(following)

    def read(self, buffer: Any, words: dict[str, Any], arrays: list[Array]) -> tuple[Any, ...]:
        """The arguments that `write` was given, or an error."""
        leaves = dict(_leaves(buffer))
        keys = words["keys"]
        if [key for key, _ in keys] != list(leaves) or len(arrays) != 5 * len(keys) + 3:
            raise FileFormatError("a record of the journal is of another buffer")
        parts = iter(arrays)
        found: list[dict[str | None, Array]] = [{}, {}]
        for key, frame in keys:
            leaf = leaves[key]
            n_envs, nbytes = leaf.shape[1], int(np.prod(leaf.shape[2:], dtype=np.int64)) * leaf.dtype.itemsize
            same, fresh, moved, frames, whole = (next(parts) for _ in range(5))
            flags = all(part.shape == (n_envs,) and part.dtype == np.bool_ for part in (same, moved))
            if not flags or type(frame) is not int or not 0 <= frame < max(nbytes, 1) or (moved.any() and not frame):
                raise FileFormatError("a record of the journal is of another buffer")
            n_moved = int(moved.sum())
            due = ((n_envs - int(same.sum()), nbytes), (n_moved, frame), (n_envs - n_moved, nbytes))
            for part, shape in zip((fresh, frames, whole), due, strict=True):
                if part.dtype != np.uint8 or (part.shape != shape and part.size + shape[0] * shape[1]):
                    raise FileFormatError("a record of the journal is of another buffer")
            known = self._next.get(key or "")
            if same.any() and known is None:
                raise FileFormatError("a record of the journal goes on from one that is not there")
            obs, following = np.zeros((n_envs, nbytes), np.uint8), np.zeros((n_envs, nbytes), np.uint8)
            if known is not None:
                obs[same] = known[same]
            obs[~same] = fresh.reshape(-1, nbytes)
            if frame:
                following[moved, :-frame] = obs[moved, frame:]
                following[moved, -frame:] = frames
            following[~moved] = whole.reshape(-1, nbytes)
            self._next[key or ""] = following
            for rows, target in ((obs, found[0]), (following, found[1])):
                target[key] = rows.view(leaf.dtype).reshape(leaf.shape[1:])
        action, reward, done = parts
        infos = [decode(info) for info in words.get("infos", [])]
        infos += [{"TimeLimit.truncated": bool(truncated)} for truncated in words.get("truncated", [])]
        if len(infos) not in (0, 1, buffer.n_envs) or not all(isinstance(info, dict) for info in infos):
            raise FileFormatError("a record of the journal has other infos than steps")
        pair = [part[None] if set(part) == {None} else part for part in found]
        return (*pair, action, reward, done, infos)


def replay(buffer: Any, path: Path) -> int:
    """Do again what a journal tells of; return the number of records."""
    memory, count = StepMemory(), 0
    for words, arrays in read_journal(path):
        try:
            kind = words.get("kind")
            if kind == "add" and not isinstance(buffer, StoreView):
                type(buffer).add(buffer, *memory.read(buffer, words, arrays))
            elif kind in ("write", "erase", "clear") and isinstance(buffer, StoreView):
                _check_change(buffer.store, kind, arrays)
                getattr(buffer.store, kind)(*arrays)
            else:
                raise FileFormatError(f"{path} holds a record of kind {kind!r}, which is unknown here")
        except (KeyError, ValueError, TypeError, IndexError, AttributeError, OverflowError) as problem:
            if isinstance(problem, ExtraBuffersError):
                raise
            raise FileFormatError(f"{path}: record {count} makes no sense: {problem}") from problem
        count += 1
    return count


def _check_change(store: ObservationStore, kind: str, arrays: list[Array]) -> None:
    due: list[tuple[tuple[int, ...], Any]] = []
    if kind != "clear":
        count = len(arrays[0]) if arrays and arrays[0].ndim else 0
        due = [((count,), np.int64), ((count,), np.int64), ((count, store.spec.nbytes), np.uint8)]
        due = due if kind == "write" else due[:1]
    if [(array.shape, array.dtype) for array in arrays] != due:
        raise FileFormatError("a record of the journal is of another array")
    for numbers, stop in zip(arrays[:2], (store.n_cells, store.n_streams), strict=False):
        if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < stop:
            raise FileFormatError("a record of the journal is of another array")


def _move_heap(inner: FrameStore, heap: Heap) -> None:
    """Put the payloads of a store into another heap."""
    inner._drop_view()  # the heap knows of all of them only now
    old = inner.heap
    try:
        heap.grow(len(old.lengths))
        for slot in old.unsaved(everything=True).tolist():
            heap.put(slot, np.frombuffer(old.read(slot), np.uint8))
        opened = inner._state.lengths == 0
        heap.starts[opened] = old.starts[opened]
        inner.heap = heap
    finally:
        inner._sync()


def _leaves(buffer: Any) -> list[tuple[str | None, Any]]:
    leaves = buffer.observations
    return list(leaves.items()) if isinstance(leaves, dict) else [(None, leaves)]


def _rows(observations: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    array = np.asarray(observations).astype(dtype, copy=False)
    if array.shape != shape:
        array = array.reshape(shape) if array.size == int(np.prod(shape)) else np.broadcast_to(array, shape)
    return np.ascontiguousarray(array).reshape(shape[0], -1).view(np.uint8)


def _frame_bytes(leaf: Any) -> int:
    """Bytes by which a stacked observation moves on; 0 where it is no stack whose frames lie one after the other."""
    layout = leaf.store.layout if isinstance(leaf, StoreView) else None
    return layout.frame_bytes if layout is not None and layout.stack > 1 and layout.axis == "first" else 0


def _forbid_in_child() -> None:
    """A forked child shares the pages of heaps in files: it may read them, nothing more."""
    for live in list(_alive):
        with contextlib.suppress(Exception):
            for store in live._stores():
                store.read_only = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forbid_in_child)
