"""Buffers that live in a file: every step that was completed is there after the process has gone, however it went."""

from __future__ import annotations

import functools
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import FileFormatError, FileWriteError, LayoutError
from sb3_extra_buffers.files.blocks import named_errors
from sb3_extra_buffers.files.journal import Journal, read_journal
from sb3_extra_buffers.files.saving import SaveReport, next_number, save
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


def keep_in_file(buffer: Any, path: str | os.PathLike[str]) -> LiveFile:
    """Let ``buffer`` live in the folder ``path``, which must be new or hold nothing else but this buffer."""
    if not isinstance(buffer, StoreView) and not hasattr(buffer, "next_observations"):
        raise LayoutError(
            f"a {type(buffer).__name__} cannot live in a file: replay buffers of the host and arrays can; save() it"
        )
    live = LiveFile(buffer, Path(path))
    live.begin()
    return live


def check_new(path: str | os.PathLike[str]) -> Path:
    """``path``, if a buffer can begin there."""
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileWriteError(
            17, f"{folder} is not empty; load or open the buffer that is there, or choose a new path"
        )  # fmt: skip
    with named_errors(folder, f"making {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


class LiveFile:
    """Keeps a folder up to date with a buffer.

    Payloads lie in files that the heaps write to. Everything else is saved now and then, as `save` does it; in between,
    a journal takes down each step. Nothing that the last manifest speaks of is written over, so a state is always that
    manifest and the journal that it names.
    """

    def __init__(self, buffer: Any, folder: Path) -> None:
        self._buffer = weakref.ref(buffer)
        self.folder = folder
        self._journal: Journal | None = None
        self._memory = StepMemory()
        self._n_cells = 0
        self._behind = False

    @property
    def buffer(self) -> Any:
        return self._buffer()

    def begin(self) -> None:
        """Move the heaps to files, save, and listen to the buffer from now on."""
        buffer = self.buffer
        with named_errors(self.folder, f"making {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            for place, store in enumerate(stores_of(buffer)):
                store.make_heap = functools.partial(self._new_heap, place, store._heap_bytes)
                if isinstance(store._inner, FrameStore) and not isinstance(store._inner.heap, FileHeap):
                    _move_heap(store._inner, store.make_heap())
        self.checkpoint()
        if isinstance(buffer, StoreView):
            buffer.store.on_change = self._record_change
        else:
            vars(buffer)["add"] = _Recorder(buffer, self)
        vars(buffer)["_live"] = self

    def _new_heap(self, place: int, limit: int | None) -> FileHeap:
        number = next_number(self.folder, f"heap-{place}-*.bin")
        return FileHeap(self.folder / f"heap-{place}-{number:04}.bin", limit)

    def checkpoint(self, sync: bool = False) -> SaveReport:
        """Save everything, and begin a new journal."""
        with named_errors(self.folder, f"saving to {self.folder}"):
            for place, store in enumerate(stores_of(self.buffer)):
                inner = store._inner
                if isinstance(inner, FrameStore):
                    inner.settle()
                    heap = inner.heap
                    if isinstance(heap, FileHeap) and heap.dead_bytes > heap.live_bytes + _SPARE:
                        inner._drop_view()
                        number = next_number(self.folder, f"heap-{place}-*.bin")
                        try:
                            heap.compact(self.folder / f"heap-{place}-{number:04}.bin")
                        finally:
                            inner._sync()
            number = next_number(self.folder, "journal-*.bin")
            journal = Journal(self.folder / f"journal-{number:04}.bin")
            report = save(self.buffer, self.folder, sync=sync, journal=journal.path.name)
        if self._journal is not None:
            self._journal.close()
        self._journal, self._memory, self._behind = journal, StepMemory(), False
        self._n_cells = sum(store.n_cells for store in stores_of(self.buffer))
        return report

    # ---- taking down ----

    def record_add(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take down a call of ``add`` that has been done."""
        words, arrays = self._memory.write(self.buffer, args, kwargs)
        self._append(words, arrays)

    def _record_change(self, kind: str, *arrays: Array) -> None:
        if self.buffer.store.n_cells != self._n_cells:
            # a sibling was made: the journal is about an array that had none
            self.checkpoint()
        else:
            self._append({"kind": kind}, list(arrays))

    def _append(self, words: dict[str, Any], arrays: list[Array]) -> None:
        journal = self._journal
        if journal is None:
            return
        if self._behind:
            # a step is missing there, but not here
            self.checkpoint()
            return
        try:
            with named_errors(journal.path, "taking down a step"):
                journal.append(words, arrays)
        except OSError:
            self._behind = True
            raise
        if journal.n_records >= _RECORDS or journal.n_bytes > _JOURNAL_BYTES:
            self.checkpoint()


class _Recorder:
    """``add`` of a buffer that lives in a file."""

    def __init__(self, buffer: Any, live: LiveFile) -> None:
        self._buffer, self._live = weakref.ref(buffer), live

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        buffer: Any = self._buffer()
        type(buffer).add(buffer, *args, **kwargs)
        self._live.record_add(args, kwargs)


class StartsInFile:
    """``add`` of a buffer that will live in a file from its first step on."""

    def __init__(self, buffer: Any, folder: Path) -> None:
        self._buffer, self._folder = weakref.ref(buffer), folder

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        buffer: Any = self._buffer()
        keep_in_file(buffer, self._folder)
        buffer.add(*args, **kwargs)


_NAMES = ("obs", "next_obs", "action", "reward", "done", "infos")


class StepMemory:
    """Turns calls of a replay buffer's ``add`` into records and back.

    An observation is mostly the next one of the step before, and a next one mostly the observation moved on by a
    frame: only what is neither is written.
    """

    def __init__(self) -> None:
        self._next: dict[str, Array] = {}

    def write(self, buffer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], list[Array]]:
        call = dict(zip(_NAMES, args, strict=False)) | kwargs
        arrays: list[Array] = []
        keys = []
        for key, leaf in _leaves(buffer):
            shape = leaf.shape[1:]
            rows = [_rows(call[name] if key is None else call[name][key], shape, leaf.dtype) for name in _NAMES[:2]]
            known = self._next.get(key or "")
            same = np.zeros(len(rows[0]), np.bool_) if known is None else (rows[0] == known).all(axis=1)
            frame = _frame_bytes(leaf)
            moved = (rows[1][:, :-frame] == rows[0][:, frame:]).all(axis=1) if frame else np.zeros(len(same), np.bool_)
            arrays += [same, rows[0][~same], moved, rows[1][moved, -frame:] if frame else rows[1][:0]]
            arrays.append(rows[1][~moved])
            keys.append([key, frame])
            self._next[key or ""] = rows[1].copy()
        rest = [np.asarray(call[name]) for name in ("action", "reward", "done")]
        infos = call["infos"]
        words: dict[str, Any] = {"kind": "add", "keys": keys}
        if getattr(buffer, "copy_info_dict", False):
            from sb3_extra_buffers.files.values import InlineEncoder

            words["infos"] = [InlineEncoder().encode(info, "infos") for info in infos]
        elif buffer.handle_timeout_termination:
            words["truncated"] = [bool(info.get("TimeLimit.truncated", False)) for info in infos]
        return words, arrays + rest

    def read(self, buffer: Any, words: dict[str, Any], arrays: list[Array]) -> tuple[Any, ...]:
        """The arguments that ``write`` was given."""
        parts = iter(arrays)
        found: list[dict[str | None, Array]] = [{}, {}]
        leaves = dict(_leaves(buffer))
        for key, frame in words["keys"]:
            leaf = leaves[key]
            n_envs, nbytes = leaf.shape[1], int(np.prod(leaf.shape[2:], dtype=np.int64)) * leaf.dtype.itemsize
            same, fresh, moved, frames, whole = (next(parts) for _ in range(5))
            if same.shape != (n_envs,) or moved.shape != (n_envs,) or not (0 <= frame < max(nbytes, 1)):
                raise FileFormatError("a record of the journal is of another buffer")
            obs, following = np.zeros((n_envs, nbytes), np.uint8), np.zeros((n_envs, nbytes), np.uint8)
            obs[same] = self._next[key or ""][same] if same.any() else 0
            obs[~same] = fresh
            if frame:
                following[moved, :-frame] = obs[moved, frame:]
                following[moved, -frame:] = frames
            following[~moved] = whole
            self._next[key or ""] = following
            for rows, target in ((obs, found[0]), (following, found[1])):
                target[key] = rows.view(leaf.dtype).reshape(leaf.shape[1:])
        action, reward, done = parts
        if "infos" in words:
            from sb3_extra_buffers.files.values import Decoder

            infos = [Decoder(_no_array, []).decode(info) for info in words["infos"]]
        else:
            infos = [{"TimeLimit.truncated": bool(truncated)} for truncated in words.get("truncated", [])]
        pair = [part[None] if set(part) == {None} else part for part in found]
        return (*pair, action, reward, done, infos)


def replay(buffer: Any, path: Path) -> int:
    """Do again what a journal tells of; return the number of steps."""
    memory, count = StepMemory(), 0
    for words, arrays in read_journal(path):
        try:
            kind = words.get("kind")
            if kind == "add":
                type(buffer).add(buffer, *memory.read(buffer, words, arrays))
            elif kind in ("write", "erase", "clear") and isinstance(buffer, StoreView):
                store = buffer.store
                _check_change(store, arrays)
                getattr(store, str(kind))(*arrays)
            else:
                raise FileFormatError(f"{path} holds a record of kind {kind!r}, which is unknown here")
        except (KeyError, ValueError, TypeError, StopIteration, IndexError) as problem:
            if isinstance(problem, FileFormatError):
                raise
            raise FileFormatError(f"{path}: record {count} makes no sense: {problem}") from problem
        count += 1
    return count


def stores_of(buffer: Any) -> list[ObservationStore]:
    """The stores of a buffer, each once, in the order in which they are saved."""
    from sb3_extra_buffers.files.saving import encode_buffer
    from sb3_extra_buffers.files.values import Encoder

    encoder = Encoder()
    encode_buffer(buffer, encoder)
    return encoder.stores


def _move_heap(inner: FrameStore, heap: Heap) -> None:
    """Put the payloads of a store into another heap."""
    inner._drop_view()  # the heap knows of all of them only now
    old = inner.heap
    slots = old.unsaved(everything=True)
    heap.grow(len(old.lengths))
    for slot in slots.tolist():
        heap.put(slot, np.frombuffer(old.read(slot), np.uint8))
    opened = inner._state.lengths == 0
    heap.starts[opened] = old.starts[opened]
    inner.heap = heap
    inner._sync()


def _check_change(store: ObservationStore, arrays: list[Array]) -> None:
    for cells, stop in zip(arrays[:2], (store.n_cells, store.n_streams), strict=False):
        if cells.dtype != np.int64 or cells.ndim != 1 or (cells.size and not 0 <= cells.min() <= cells.max() < stop):
            raise FileFormatError("a record of the journal is of another array")
    if len(arrays) == 3 and (arrays[2].dtype != np.uint8 or arrays[2].shape != (len(arrays[0]), store.spec.nbytes)):
        raise FileFormatError("a record of the journal is of another array")


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


def _no_array(name: str) -> Array:
    raise FileFormatError(f"a journal has no array {name!r}")
