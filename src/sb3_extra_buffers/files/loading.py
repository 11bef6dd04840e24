"""Loading: every size, offset and id is checked against what is there before it is used."""

from __future__ import annotations

import dataclasses
import os
import re
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import DamagedFileError, ExtraBuffersError, FileFormatError, ReadOnlyBufferError
from sb3_extra_buffers.files import manifest
from sb3_extra_buffers.files.blocks import CHUNK, MAGIC, ArrayRecord, BlockReader, SavedArrays, map_file, read_index
from sb3_extra_buffers.files.links import Link, StoreLink, set_link
from sb3_extra_buffers.files.values import Decoder, our_class, set_state
from sb3_extra_buffers.stores.arena import SLACK
from sb3_extra_buffers.stores.file_heap import FileHeap
from sb3_extra_buffers.stores.frames import FrameStore
from sb3_extra_buffers.stores.heap import Heap
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.snapshot import check_extents, put_together
from sb3_extra_buffers.stores.view import StoreView

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


def load(path: str | os.PathLike[str], kind: type[Any] | None = None) -> Any:
    """The buffer that was saved as ``path``, in memory; the next save to ``path`` writes only what is new.

    Args:
        path: The folder.
        kind: The class to load; ``None`` for whichever of this library's classes it is.
    """
    return SavedBuffer(Path(path)).load(kind)


def open_saved(path: str | os.PathLike[str], kind: type[Any] | None = None, mode: Literal["r", "r+"] = "r") -> Any:
    """The buffer that was saved as ``path``, in its file: payloads stay there until they are asked for.

    Mode ``"r"`` is for reading: any number of processes may do that at once, and what is read is checked when it is
    first touched. Of a buffer that lives in its file they see the last checkpoint. Mode ``"r+"`` goes on in the file,
    as ``storage="mmap"`` does; only one process may do that.
    """
    if mode not in ("r", "r+"):
        raise ValueError(f"mode must be 'r' or 'r+', got {mode!r}")
    saved = SavedBuffer(Path(path))
    if mode == "r":
        return saved.load(kind, read_only=True)
    from sb3_extra_buffers.files.live import keep_in_file

    buffer = saved.load(kind, in_file=True)
    keep_in_file(buffer, saved.folder)
    return buffer


class SavedBuffer:
    """A folder with a saved buffer: its manifest read, its files mapped, nothing believed yet."""

    def __init__(self, folder: Path, record: dict[str, Any] | None = None) -> None:
        self.folder = folder
        self.record = manifest.newest(folder) if record is None else record
        data = _entry(self.record, "data", dict)
        data_name, size = _file_name(data.get("name"), "data-"), data.get("size")
        if type(size) is not int or not len(MAGIC) <= size < 1 << 60:
            raise FileFormatError(f"{folder}: a data file of {size!r} bytes is none")
        self.data_path, self.data_size = folder / data_name, size
        self.data = map_file(self.data_path, size)
        if self.data[: len(MAGIC)].tobytes() != MAGIC:
            raise DamagedFileError(f"{self.data_path} does not begin as a data file does")
        index = read_index(self.data, self.record.get("index"), self.data_path)
        # a block outside the file is found when it is read
        records = {
            name: ArrayRecord.from_json(array, len(index))
            for name, array in _entry(self.record, "arrays", dict).items()
        }
        self.blocks = BlockReader(self.data, index, records, self.data_path)

    @property
    def class_name(self) -> str:
        return str(self.record.get("class"))

    # ---- loading ----

    def load(
        self, kind: type[Any] | None = None, read_only: bool = False, in_file: bool = False, replayed: bool = True
    ) -> Any:
        """The buffer in memory, as a view of the file, or with its heaps there; ``replayed`` with its journal."""
        kind = self.find_class(kind)
        parts = [self._load_store(place, read_only, in_file) for place in range(self.n_stores)]
        decoder = self.decoder([store for store, _ in parts], printed=not read_only)
        buffer = make_buffer(kind, self.record.get("state"), decoder)
        if read_only:
            forbid_writing(buffer)
            return buffer
        set_link(buffer, self._link([link for _, link in parts]))
        if not in_file and hasattr(getattr(buffer, "_options", None), "storage"):
            buffer._options = dataclasses.replace(buffer._options, storage="memory", path=None)
        if self.journal is not None and replayed:
            from sb3_extra_buffers.files.live import replay

            replay(buffer, self.journal)
        return buffer

    @property
    def journal(self) -> Path | None:
        """What happened since this was saved, for a buffer that lives in its file."""
        name = self.record.get("journal")
        return None if name is None else self.folder / _file_name(name, "journal-")

    def find_class(self, kind: type[Any] | None) -> type[Any]:
        """``kind``, if it is what was saved; where it is not given, the class of ours that was."""
        name = self.class_name
        if kind is None:
            try:
                return our_class(f"{self.record.get('module')}:{name}")
            except FileFormatError:
                raise FileFormatError(
                    f"{self.folder} holds a {self.record.get('module')}.{name}, which is not of this library; "
                    f"call load() of that class"
                ) from None
        if kind.__qualname__ != name:
            raise FileFormatError(f"{self.folder} holds a {name}, not a {kind.__qualname__}; call {name}.load()")
        return kind

    @property
    def n_stores(self) -> int:
        return len(_entry(self.record, "stores", list))

    def store_record(self, place: int) -> dict[str, Any]:
        record = _entry(self.record, "stores", list)[place]
        if not isinstance(record, dict):
            raise FileFormatError(f"{self.folder}: store {place} is unreadable")
        return record

    def decoder(self, stores: list[ObservationStore], printed: bool = False) -> Decoder:
        # objects come beside columns of numbers: there can't be more of them than bytes of those
        most = sum(record.nbytes for record in self.blocks.records.values())
        return Decoder(lambda name: self.blocks.read(f"state.{name}", printed), stores, most)

    def payload_file(self, place: int) -> tuple[Path, int]:
        """Where the payloads of a store are, and how much of that file was written."""
        heap = self.store_record(place).get("heap")
        if heap is None:
            return self.data_path, self.data_size
        if not isinstance(heap, dict) or type(heap.get("size")) is not int or not 0 < heap["size"] < 1 << 60:
            raise FileFormatError(f"{self.folder}: store {place} does not say where its observations are")
        return self.folder / _file_name(heap.get("name"), "heap-"), heap["size"]

    def _load_store(self, place: int, read_only: bool, in_file: bool) -> tuple[ObservationStore, StoreLink | None]:
        record = dict(self.store_record(place))
        names = record.get("arrays")
        if not isinstance(names, list):
            raise FileFormatError(f"{self.folder}: store {place} does not say what it is made of")
        arrays = {name: self.blocks.read(f"store{place}.{name}", not read_only) for name in map(str, names)}
        record["options"] = self.decoder([]).decode(record.get("options"))
        links: list[StoreLink] = []

        def fill(heap: Heap, slots: npt.NDArray[np.int32]) -> None:
            links.append(self._fill_heap(place, heap, slots, arrays, read_only))

        store = put_together(record, arrays, fill, read_only)
        if read_only:
            store.read_only = True
            if isinstance(store._inner, FrameStore):
                path, size = self.payload_file(place)
                _, chunks = payload_tables(arrays, len(links[0].starts), size)
                store._inner.guard = Guard(store._inner, chunks, map_file(path, size), path)
        elif in_file and links and isinstance(store._inner, FrameStore):
            self._stay_in_file(place, store._inner, links[0])
        return store, links[0] if links else None

    def _stay_in_file(self, place: int, inner: FrameStore, link: StoreLink) -> None:
        """Let a store write on in the file that its payloads are in, where they have one of their own."""
        path, size = self.payload_file(place)
        if path == self.data_path:
            return
        heap = FileHeap(path, inner.heap.limit)
        slots = inner.heap.unsaved(everything=True)
        heap.attach(inner.heap, slots, link.starts[slots], size - SLACK)
        opened = inner._state.lengths == 0
        heap.starts[opened] = inner.heap.starts[opened]
        heap.saved()
        inner.heap = link.heap = heap
        link.file = path
        inner._sync()

    def _fill_heap(
        self, place: int, heap: Heap, slots: npt.NDArray[np.int32], arrays: dict[str, Array], read_only: bool
    ) -> StoreLink:
        path, size = self.payload_file(place)
        data = self.data if path == self.data_path else map_file(path, size)
        starts, chunks = payload_tables(arrays, len(heap.lengths), size)
        check_extents(starts[slots], heap.lengths[slots], size)
        check_covered(starts[slots], heap.lengths[slots], chunks)
        slots = slots[np.argsort(starts[slots], kind="stable")]
        if read_only:
            heap.look_into(slots, map_file(path, size, private=True), starts[slots])
        else:
            bad = damaged_chunks(data, chunks)
            if len(bad):
                raise DamagedFileError(
                    f"{path}: {len(bad)} of {len(chunks)} stretches of observations are damaged, the first "
                    f"at byte {chunks['offset'][bad[0]]}; 'sb3-extra-buffers repair' keeps what is whole"
                )
            heap.adopt_all(slots, data, starts[slots])
        heap.saved()
        return StoreLink(heap, starts, arrays["chunks"])

    def _link(self, stores: list[StoreLink | None]) -> Link:
        live_bytes, number = _entry(self.record, "data", dict).get("live_bytes"), self.record.get("number")
        return Link(
            self.folder,
            str(self.record.get("save_id")),
            str(self.record.get("folder_id")),
            number if type(number) is int else 0,
            self.data_path.name,
            self.data_size,
            live_bytes if type(live_bytes) is int else 0,
            SavedArrays(self.blocks.records, self.blocks.index.copy(), self.blocks.prints),
            stores,
        )


def make_buffer(kind: type[Any], state: Any, decoder: Decoder) -> Any:
    """A buffer of class ``kind`` from its state."""
    if not isinstance(state, dict):
        raise FileFormatError("the state of the buffer is unreadable")
    if issubclass(kind, StoreView):
        try:
            return decoder.view(state, kind)
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            if isinstance(problem, ExtraBuffersError):
                raise
            raise FileFormatError(f"the saved array makes no sense: {problem}") from problem
    attributes = {name: decoder.decode(value) for name, value in state.items()}
    _check_attributes(attributes)
    buffer = object.__new__(kind)
    try:
        set_state(buffer, attributes)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError, OverflowError) as problem:
        if isinstance(problem, ExtraBuffersError):
            raise
        raise FileFormatError(f"this is no state of a {kind.__name__}: {problem}") from problem
    return buffer


def _check_attributes(attributes: dict[str, Any]) -> None:
    """Raise unless columns and observations are as long as the buffer says."""
    if "_options" in attributes and not dataclasses.is_dataclass(attributes["_options"]):
        raise FileFormatError("the options of the buffer are unreadable")
    size, n_envs = attributes.get("buffer_size"), attributes.get("n_envs")
    position, full = attributes.get("pos"), attributes.get("full")
    if type(size) is not int or type(n_envs) is not int or type(position) is not int or type(full) is not bool:
        raise FileFormatError("buffer_size, n_envs, pos and full must be there, as numbers and a bool")
    if size < 1 or n_envs < 1 or not 0 <= position <= size:
        raise FileFormatError(f"position {position} of {size} steps of {n_envs} environments makes no sense")
    for name in ("observations", "next_observations", "_leaves", "_stores"):
        leaves = attributes.get(name)
        for leaf in leaves.values() if isinstance(leaves, dict) else [leaves]:
            shape = getattr(leaf, "shape", None)
            # a rollout that is being read is laid out as one row of transitions
            # and the observations of a GPU's rollout are elsewhere
            if shape is not None and 0 not in shape and shape[:2] != (size, n_envs) and shape[:1] != (size * n_envs,):
                raise FileFormatError(f"{name} has shape {shape} where {size} steps of {n_envs} environments are due")


def forbid_writing(buffer: Any) -> None:
    """Make adding to a buffer an error; reading is as it was."""
    if isinstance(buffer, StoreView):
        return

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ReadOnlyBufferError(f"this {type(buffer).__name__} was opened to be read; load() it to add to a copy")

    for name in ("add", "extend", "reset"):
        vars(buffer)[name] = refuse


# ---- payloads ----


class Guard:
    """Checks stretches of a file when they are first read."""

    def __init__(self, inner: FrameStore, chunks: Array, data: Bytes, path: Path) -> None:
        self._inner, self._chunks, self._data, self._path = inner, chunks, data, path
        self._ends = chunks["offset"] + chunks["length"]
        self._checked = np.zeros(len(chunks), np.bool_)
        self._n_left = len(chunks)

    def __call__(self, cells: npt.NDArray[np.int64]) -> None:
        """Raise if a payload of ``cells`` lies in a stretch that is damaged."""
        if not self._n_left:
            return
        ids = np.unique(self._inner.slots[cells])
        segments = np.unique((ids[ids > 0] - 1) // self._inner.per_segment)
        lengths = self._inner.heap.lengths[segments]
        segments, lengths = segments[lengths > 0], lengths[lengths > 0]
        starts = self._inner.heap.starts[segments]
        for place in chunks_of(starts, lengths, self._chunks).tolist():
            if not self._checked[place]:
                offset, length, crc = self._chunks[place].tolist()
                if zlib.crc32(self._data[offset : offset + length].data) != crc:
                    raise DamagedFileError(
                        f"{self._path}: observations at byte {offset} are damaged; 'sb3-extra-buffers repair' keeps "
                        "what is whole"
                    )
                self._checked[place] = True
                self._n_left -= 1


def chunks_of(starts: Array, lengths: Array, chunks: Array) -> npt.NDArray[np.int64]:
    """Which of ``chunks`` hold any byte of these payloads."""
    first = np.searchsorted(chunks["offset"], starts, "right") - 1
    last = np.searchsorted(chunks["offset"], starts + lengths.astype(np.int64) - 1, "right") - 1
    if not len(first):
        return np.zeros(0, np.int64)
    longest = int((last - first).max()) + 1
    places = first[:, None] + np.arange(longest)
    return np.unique(places[places <= last[:, None]])


def payload_tables(arrays: dict[str, Array], n_slots: int, size: int) -> tuple[npt.NDArray[np.int64], Array]:
    """Where payloads lie, and the stretches that have checksums."""
    starts, table = arrays.get("starts"), arrays.get("chunks")
    if starts is None or starts.shape != (n_slots,) or starts.dtype != np.int64:
        raise FileFormatError(f"{n_slots} segments have no places in the file")
    if table is None or table.ndim != 2 or table.shape[1] != 3 or table.dtype != np.int64:
        raise FileFormatError("the checksums of the observations are unreadable")
    offsets, lengths, crcs = table.T
    ends = offsets + lengths
    fits = (
        (offsets >= 0).all() and (lengths > 0).all() and (lengths < 1 << 31).all() and (ends <= size).all()
        and (offsets[1:] >= ends[:-1]).all() and (crcs >= 0).all() and (crcs < 1 << 32).all()
    )  # fmt: skip
    if not fits:
        raise FileFormatError("the stretches of observations are not one after the other")
    chunks = np.zeros(len(table), CHUNK)
    chunks["offset"], chunks["length"], chunks["crc32"] = offsets, lengths, crcs
    return starts, chunks


def check_covered(starts: Array, lengths: Array, chunks: Array) -> None:
    """Raise unless every byte of the payloads has a checksum, and no two payloads share one."""
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], starts[order] + lengths[order].astype(np.int64)
    if (ends[:-1] > starts[1:]).any():
        raise FileFormatError("two segments overlap")
    # bytes with a checksum before a place: between both ends of a payload there must be as many as it has
    covered = np.concatenate([[0], np.cumsum(chunks["length"], dtype=np.int64)])

    def covered_to(places: Array) -> Array:
        index = np.searchsorted(chunks["offset"], places, "right")
        whole = covered[np.maximum(index - 1, 0)]
        inside = np.zeros(len(places), np.int64)
        some = index > 0
        before = index[some] - 1
        inside[some] = np.minimum(places[some] - chunks["offset"][before], chunks["length"][before])
        return np.where(some, whole + inside, 0)

    if (covered_to(ends) - covered_to(starts) != ends - starts).any():
        raise FileFormatError("a segment lies where there is no checksum")


def damaged_chunks(data: Bytes, chunks: Array) -> list[int]:
    """Stretches whose checksum differs."""
    return [
        place
        for place, (offset, length, crc) in enumerate(chunks.tolist())
        if zlib.crc32(data[offset : offset + length].data) != crc
    ]


def _file_name(name: Any, prefix: str) -> str:
    """``name``, if it is a file of the folder and not somewhere else."""
    if not isinstance(name, str) or not re.fullmatch(rf"{prefix}[0-9-]+\.bin", name):
        raise FileFormatError(f"{name!r} is no file of a saved buffer")
    return name


def _entry(record: dict[str, Any], name: str, kind: type[Any]) -> Any:
    value = record.get(name)
    if not isinstance(value, kind):
        raise FileFormatError(f"the manifest has no {name}")
    return value
