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
from sb3_extra_buffers.files import disk, kinds, locking, manifest
from sb3_extra_buffers.files.journal import Journal, read_journal
from sb3_extra_buffers.files.loading import SavedParts
from sb3_extra_buffers.files.locking import FolderLock
from sb3_extra_buffers.files.saving import OURS, Save, SaveReport, next_file, state_of
from sb3_extra_buffers.files.values import decode, encode
from sb3_extra_buffers.stores.checks import column, only_named_errors, require, whole, within
from sb3_extra_buffers.stores.file_heap import FileHeap
from sb3_extra_buffers.stores.frames import FrameStore
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.view import StoreView

Array = npt.NDArray[Any]

# steps and bytes after which the journal begins anew
_RECORDS = 1000
_JOURNAL_BYTES = 1 << 24
# dead bytes of a heap that are not worth moving the others for
_SPARE = 1 << 22

_alive: weakref.WeakSet[LiveFolder] = weakref.WeakSet()


def StartsInFile(buffer: Any, folder: Path) -> LiveFolder:  # noqa: N802  # it stands for an object
    """What lets ``buffer`` live in the new folder ``folder`` from its first step on, when everything is set up."""
    _check_can_live(buffer)
    with disk.named_errors(folder, f"making {folder}"):
        disk.make_folder(folder)
        return LiveFolder(buffer, folder, FolderLock(folder))


def keep_in_file(buffer: Any, folder: Path) -> LiveFolder:
    """Let ``buffer`` live in ``folder`` from now on, which must be new or hold nothing else but this buffer."""
    live = StartsInFile(buffer, folder)
    live.begin()
    return live


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
    # what a process left that was killed before its first checkpoint is in nobody's way
    names = {entry.name for entry in folder.iterdir()} - {locking.NAME} if folder.is_dir() else set()
    begun = manifest.NAME not in names and all(OURS.fullmatch(name) for name in names)
    if folder.exists() and not (folder.is_dir() and begun):
        raise FileWriteError(17, f"{folder} is not empty; load or open the buffer that is there, or choose a new path")
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
        # the next observations of the last step
        self._known: dict[str, Array] = {}
        self._undo: tuple[int, int, dict[str, Array]] | None = None
        self._n_obs = self._retry_at = 0
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
            journal = Journal(next_file(self.folder, "journal"))
            if sync:
                journal.flush()
            writing: Save | None = None
            try:
                with state_of(buffer, recover) as (parts, taken):
                    writing = Save(buffer, self.folder, parts, taken, sync, journal.path.name)
                    return writing.run()
            finally:
                if writing is not None and writing.counts():
                    if self._journal is not None:
                        self._journal.close()
                    self._journal, self._known, self._undo, self._retry_at = journal, {}, None, 0
                    self._n_obs = sum(store.n_obs for store in parts.stores.values())
                else:
                    journal.close()
                    with contextlib.suppress(OSError):
                        disk.unlink(journal.path)

    def _stores(self) -> list[ObservationStore]:
        return list(kinds.parts_of(self.buffer).stores.values())

    def _see_to_heaps(self) -> None:
        """Move heaps to files, and what is live in files that are mostly dead to new ones."""
        for place, store in enumerate(self._stores()):
            store.make_heap = functools.partial(self._new_heap, place, store.heap_bytes)
            store.run_exclusively(functools.partial(self._see_to_heap, place, store))

    def _see_to_heap(self, place: int, store: ObservationStore) -> None:
        inner = store.inner
        if not isinstance(inner, FrameStore):
            return
        inner.collect_segments()
        heap = inner.heap
        if not isinstance(heap, FileHeap):
            inner.move_payloads(self._new_heap(place, store.heap_bytes))
        elif heap.dead_bytes > heap.live_bytes + _SPARE:
            file = next_file(self.folder, f"heap-{place}")
            inner.compact_heap(lambda: heap.compact(file))

    def _new_heap(self, place: int, limit: int | None) -> FileHeap:
        return FileHeap(next_file(self.folder, f"heap-{place}"), limit)

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
        if self._journal is not None:
            self._append(*_pack_step(self.buffer, self._known, obs, next_obs, action, reward, done, infos))

    def _append(self, words: dict[str, Any], arrays: list[Array], known: dict[str, Array]) -> None:
        journal: Any = self._journal
        self._undo = journal.n_bytes, journal.n_records, self._known
        journal.append(words, arrays)
        self._known = known

    def undo_step(self) -> None:
        """Forget the step that was taken down since `prepare_step`, if one was."""
        undo, self._undo = self._undo, None
        if undo is not None and self._journal is not None:
            self._known = undo[2]
            with contextlib.suppress(ExtraBuffersError):
                self._journal.truncate(*undo[:2])

    def record_change(self, kind: str, *arrays: Array) -> None:
        """Take down a change to an array's store."""
        self._check_owner()
        if self._journal is not None:
            if self._journal.broken or self.buffer.store.n_obs != self._n_obs:
                # a sibling was made: the journal is about an array that had none
                self.checkpoint()
            try:
                self._append({"kind": kind}, list(arrays), {})
            except BaseException:
                self.undo_step()
                raise


# ---- the arguments of ``add`` as a record, and back ----
#
# An observation is mostly the next one of the step before, and a next one mostly the observation moved on by a frame:
# of rows that can be guessed so, nothing is written.


def _pack_step(
    buffer: Any, known: dict[str, Array], obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any
) -> tuple[dict[str, Any], list[Array], dict[str, Array]]:
    """A record, and the next observations, which those of the step that follows are guessed from."""
    arrays: list[Array] = []
    keys, following = [], {}
    for key, leaf in _each_leaf(buffer.observations):
        shape = leaf.shape[1:]
        now, then = (_rows(part if key is None else part[key], shape, leaf.dtype) for part in (obs, next_obs))
        width = _frame_bytes(leaf) or now.shape[1]
        for rows, guess in ((now, known.get(key or "")), (then[:, : then.shape[1] - width], now[:, width:])):
            same = np.zeros(len(rows), np.bool_) if guess is None else (rows == guess).all(axis=1)
            arrays += [same, rows[~same]]
        arrays.append(then[:, then.shape[1] - width :])
        keys.append([key, width])
        following[key or ""] = then.copy()
    words: dict[str, Any] = {"kind": "add", "keys": keys}
    if getattr(buffer, "copy_info_dict", False):
        words["infos"] = [encode(info, "infos") for info in infos]
    elif buffer.handle_timeout_termination:
        words["truncated"] = [bool(info.get("TimeLimit.truncated", False)) for info in infos]
    return words, [*arrays, *map(np.asarray, (action, reward, done))], following


def _unpack_step(buffer: Any, known: dict[str, Array], words: dict[str, Any], arrays: list[Array]) -> tuple[Any, ...]:
    """The arguments that `_pack_step` was given, or an error; ``known`` is brought up to date."""
    leaves, keys = dict(_each_leaf(buffer.observations)), words["keys"]
    fits = [key for key, _ in keys] == list(leaves) and len(arrays) == 5 * len(keys) + 3
    require(fits, "a record of the journal is of another buffer")
    parts = iter(arrays)
    found: tuple[dict[str | None, Array], ...] = ({}, {})
    for key, width in keys:
        leaf = leaves[key]
        n_bytes = int(np.prod(leaf.shape[2:], dtype=np.int64)) * leaf.dtype.itemsize
        rest = n_bytes - whole(width, "the width of a frame", 0, n_bytes + 1)
        now = _guessed(known.get(key or ""), next(parts), next(parts), (leaf.shape[1], n_bytes))
        then = _guessed(now[:, width:], next(parts), next(parts), (leaf.shape[1], rest))
        tails = column({"tails": next(parts)}, "tails", np.uint8, (leaf.shape[1], width))
        known[key or ""] = then = np.concatenate([then, tails], axis=1)
        for rows, target in zip((now, then), found, strict=True):
            target[key] = rows.view(leaf.dtype).reshape(leaf.shape[1:])
    infos = [decode(info) for info in words.get("infos", [])]
    infos += [{"TimeLimit.truncated": bool(truncated)} for truncated in words.get("truncated", [])]
    fits = len(infos) in (0, 1, buffer.n_envs) and all(isinstance(info, dict) for info in infos)
    require(fits, "a record of the journal has other infos than steps")
    return (*(part[None] if set(part) == {None} else part for part in found), *parts, infos)


def _guessed(guess: Array | None, same: Array, rows: Array, shape: tuple[int, int]) -> Array:
    """Rows of which some are as was guessed."""
    column({"flags": same}, "flags", np.bool_, shape[:1])
    column({"rows": rows}, "rows", np.uint8, (shape[0] - int(same.sum()), shape[1]))
    require(guess is not None or not same.any(), "a record of the journal goes on from one that is not there")
    out = np.zeros(shape, np.uint8) if guess is None else guess.copy()
    out[~same] = rows
    return out


def replay(buffer: Any, path: Path) -> int:
    """Do again what a journal tells of; return the number of records."""
    known: dict[str, Array] = {}
    count = 0
    for words, arrays in read_journal(path):
        with only_named_errors(f"{path}: record {count}"):
            kind = words.get("kind")
            if kind == "add" and not isinstance(buffer, StoreView):
                type(buffer).add(buffer, *_unpack_step(buffer, known, words, arrays))
            elif kind in ("write", "erase", "clear") and isinstance(buffer, StoreView):
                _check_change(buffer.store, kind, arrays)
                getattr(buffer.store, kind)(*arrays)
            else:
                raise FileFormatError(f"{path} holds a record of kind {kind!r}, which is unknown here")
        count += 1
    return count


def _check_change(store: ObservationStore, kind: str, arrays: list[Array]) -> None:
    names = ("cells", "streams", "rows")[: {"write": 3, "erase": 1, "clear": 0}[kind]]
    found = dict(zip(names, arrays, strict=True))
    for name, stop in (("cells", store.n_obs), ("streams", store.n_streams)):
        if name in found:
            within(column(found, name, np.int64, arrays[0].shape[:1]), 0, stop, f"one of {name}")
    if "rows" in found:
        column(found, "rows", np.uint8, (len(arrays[0]), store.spec.nbytes))


def _each_leaf(leaves: Any) -> list[tuple[str | None, Any]]:
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
