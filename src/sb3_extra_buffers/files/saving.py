"""Saving: append what is new, then put the new manifest in the old one's place."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import secrets
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers import __version__
from sb3_extra_buffers.errors import ExtraBuffersError, FileWriteError, NotSaveableError, UnsupportedVersionError
from sb3_extra_buffers.files import manifest
from sb3_extra_buffers.files.blocks import (
    MAGIC,
    STRETCH,
    Appender,
    NamedArray,
    named_errors,
    put_arrays,
)
from sb3_extra_buffers.files.links import Link, StoreLink, get_link, set_link
from sb3_extra_buffers.files.values import Encoder
from sb3_extra_buffers.stores.arena import SLACK, lengthen
from sb3_extra_buffers.stores.file_heap import FileHeap
from sb3_extra_buffers.stores.heap import Heap, merge_runs
from sb3_extra_buffers.stores.snapshot import StoreParts, take_apart, touched_pages
from sb3_extra_buffers.stores.view import StoreView

Array = npt.NDArray[Any]

_OURS = re.compile(r"(data|heap)-\d+(-\d+)?\.bin|journal-\d+\.bin|manifest\.(json|previous\.json|json\.tmp)")
# dead bytes that are not worth writing everything anew for
_SPARE = 1 << 22


class SaveReport(NamedTuple):
    """What a save did."""

    folder: Path
    n_bytes: int
    """Bytes written."""
    incremental: bool
    """Whether most of it was there already."""


def save(
    buffer: Any,
    path: str | os.PathLike[str],
    base: str | os.PathLike[str] | None = None,
    sync: bool = True,
    journal: str | None = None,
) -> SaveReport:
    """Save ``buffer`` as the folder ``path``; what was saved there before stays whole until the new state is.

    A second save to the same folder writes what is new. So does one to a new folder with ``base``, the folder of
    the last save: the two then share their files as far as these agree, by links, and either may be deleted.

    Args:
        buffer: A compressed buffer or array.
        path: The folder; it is made if it is not there.
        base: The folder of this buffer's last save, to share files with.
        sync: Whether to wait until everything is on the disk. Without it, a save survives the end of the process but
            not the end of the power.
        journal: The file in ``path`` that later steps will be taken down in, for a buffer that lives there.
    """
    folder = Path(path)
    live = vars(buffer).get("_live")
    if journal is None and live is not None and live.folder == folder:
        report: SaveReport = live.checkpoint(sync)
        return report
    encoder = Encoder()
    with contextlib.ExitStack() as locks:
        state = encode_buffer(buffer, encoder)
        for store in encoder.stores:
            locks.enter_context(store._lock)
        parts = [take_apart(store) for store in encoder.stores]
        with named_errors(folder, f"saving to {folder}"):
            return _Save(buffer, folder, state, encoder, parts, sync, journal).run(None if base is None else Path(base))


def encode_buffer(buffer: Any, encoder: Encoder) -> Any:
    """The state of ``buffer`` as JSON, its arrays and stores listed in ``encoder``."""
    if isinstance(buffer, StoreView):
        return encoder.encode_view(buffer, "view")
    state = buffer.__getstate__() if hasattr(buffer, "__getstate__") else vars(buffer)
    if not isinstance(state, dict):
        raise NotSaveableError(f"a {type(buffer).__name__} cannot be saved: its state is no dict")
    return {name: encoder.encode(value, name) for name, value in state.items()}


class _Save:
    def __init__(
        self,
        buffer: Any,
        folder: Path,
        state: Any,
        encoder: Encoder,
        parts: list[StoreParts],
        sync: bool,
        journal: str | None,
    ) -> None:
        self.buffer, self.folder, self.state, self.encoder, self.parts = buffer, folder, state, encoder, parts
        self.sync, self.journal = sync, journal
        self.save_id = secrets.token_hex(8)

    def run(self, base: Path | None) -> SaveReport:
        there = self._look()
        number = there.get("number")
        self.number_there = number if type(number) is int else 0
        link = self._usable_link(there.get("save_id"), base)
        if link is None or link.folder != self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            link = None if link is None else self._share(link)
        out = self._begin(link)
        try:
            record, new = self._write(out, link)
            text = manifest.dump(record)
            out.put(manifest.tail(text, out.put(text)))
            # from here on a save that builds upon another is on the disk, whatever becomes of the manifest
            out.flush(self.sync)
            manifest.replace(self.folder, text, self.sync and link is None)
        except BaseException:
            out.undo()
            if link is None:
                out.path.unlink(missing_ok=True)
            raise
        out.close()
        new.data_size = out.end
        if self.sync and link is None:
            manifest.sync_folder(self.folder)
        n_bytes = out.n_bytes + len(text)
        for part in self.parts:
            if part.inner is not None:
                part.inner.saved()
        new.seen = _stat(self.folder)
        set_link(self.buffer, new)
        # nothing that could be removed comes about by adding to a file
        new.alone = link is not None and link.folder == self.folder and link.alone and self.journal is None
        if not new.alone:
            new.alone = _remove_others(self.folder, _files_of(record))
        return SaveReport(self.folder, n_bytes, link is not None)

    def _look(self) -> dict[str, Any]:
        """What is in the folder; read again only if somebody else has been there."""
        link = get_link(self.buffer)
        if link is not None and link.folder == self.folder and link.seen and link.seen == _stat(self.folder):
            return {"save_id": link.save_id, "number": link.number}
        return _look_at(self.folder)

    def _usable_link(self, there: Any, base: Path | None) -> Link | None:
        """The last save, if what it wrote can be built upon."""
        link = get_link(self.buffer)
        if link is None or link.data_size > 2 * link.live_bytes + _SPARE:
            return None
        if link.folder == self.folder:
            return link if there == link.save_id else None
        if base is None or link.folder != base:
            return None
        try:
            found = manifest.newest(base).get("save_id")
        except ExtraBuffersError:
            return None
        return link if found == link.save_id else None

    def _share(self, link: Link) -> Link | None:
        """Give the data file of ``link`` a second name in this folder."""
        name = link.data_name
        if (self.folder / name).exists():
            return None
        try:
            os.link(link.folder / name, self.folder / name)
        except OSError:
            return None
        return link

    def _begin(self, link: Link | None) -> Appender:
        if link is not None:
            return Appender(self.folder / link.data_name, new=False)
        number = next_number(self.folder, "data-*.bin")
        out = Appender(self.folder / f"data-{number:04}.bin", new=True)
        out.put(MAGIC)
        return out

    def _write(self, out: Appender, link: Link | None) -> tuple[dict[str, Any], Link]:
        payload_bytes = 0
        stores: list[StoreLink | None] = []
        records = []
        arrays: list[NamedArray] = []
        for place, part in enumerate(self.parts):
            record, tables = dict(part.record), dict(part.arrays)
            known = None if link is None or place >= len(link.stores) else link.stores[place]
            made, touched = None, {}
            if part.heap is not None and part.inner is not None:
                if isinstance(part.heap, FileHeap) and part.heap.file.parent == self.folder:
                    made = _count_payloads(part.heap, known)
                    record["heap"] = {"name": part.heap.file.name, "size": part.heap.end + SLACK}
                    if self.sync:
                        part.heap.flush()
                else:
                    made = _put_payloads(out, part.heap, known)
                    payload_bytes += part.heap.live_bytes
                tables |= {"starts": made.starts, "chunks": made.chunks}
                if known is not None and known.heap is made.heap and known.file == made.file:
                    # stretches are only ever added
                    touched = touched_pages(part.inner) | {"chunks": np.zeros(0, np.int64)}
            record["options"] = self.encoder.encode(record["options"], f"store{place}.options")
            record["arrays"] = list(tables)
            arrays += [NamedArray(f"store{place}.{name}", array, touched.get(name)) for name, array in tables.items()]
            stores.append(made)
            records.append(record)
        arrays += [NamedArray(f"state.{name}", array) for name, array in self.encoder.arrays.items()]
        written, where = put_arrays(out, arrays, None if link is None else link.arrays)
        live_bytes = written.live_bytes + payload_bytes
        kind = type(self.buffer)
        number = 1 + max(self.number_there, 0 if link is None else link.number)
        record = {
            "format": manifest.FORMAT,
            "version": manifest.VERSION,
            "library": __version__,
            "saved": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "save_id": self.save_id,
            "folder_id": self.save_id if link is None or link.folder != self.folder else link.folder_id,
            "number": number,
            "class": kind.__qualname__,
            "module": kind.__module__,
            "data": {"name": out.path.name, "size": out.end, "live_bytes": live_bytes},
            "state": self.state,
            "stores": records,
            "arrays": {name: array.to_json() for name, array in written.records.items()},
            "index": where,
        } | ({} if self.journal is None else {"journal": self.journal})
        new = Link(
            self.folder,
            self.save_id,
            str(record["folder_id"]),
            number,
            out.path.name,
            out.end,
            live_bytes,
            written,
            stores,
        )
        return record, new


def _stat(folder: Path) -> tuple[int, ...]:
    """What tells one manifest from another without reading it."""
    try:
        found = os.stat(f"{folder}{os.sep}{manifest.NAME}")
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _look_at(folder: Path) -> dict[str, Any]:
    """The manifest that is in ``folder``, if there is one; an error if the folder is somebody else's."""
    if not folder.exists():
        return {}
    if not folder.is_dir():
        raise FileWriteError(17, f"{folder} is a file; a buffer is saved as a folder: choose another path")
    strangers = [entry.name for entry in os.scandir(folder) if not _OURS.fullmatch(entry.name)]
    if strangers:
        raise FileWriteError(
            17, f"{folder} holds other things, such as {strangers[0]!r}; choose a folder of its own for the buffer"
        )
    try:
        return manifest.newest(folder)
    except UnsupportedVersionError:
        raise
    except ExtraBuffersError:
        return {}


def _put_payloads(out: Appender, heap: Heap, known: StoreLink | None) -> StoreLink:
    """Append the payloads that the file does not have."""
    known = known if known is not None and known.heap is heap and known.file is None else None
    slots = heap.unsaved(everything=known is None)
    starts = np.zeros(0, np.int64) if known is None else known.starts
    if len(starts) != len(heap.starts):
        starts = lengthen(starts[: len(heap.starts)], len(heap.starts))
    lengths = heap.lengths[slots].astype(np.int64)
    packed = np.cumsum(lengths) - lengths
    # should the save fail, these are put again: until one succeeds they are unsaved
    starts[slots] = out.end + packed
    made = [] if known is None else [known.chunks]
    for start, _, length in merge_runs(heap.starts[slots], packed, lengths):
        data = heap.data[start : start + length]
        made.append(_checksums(data, out.put(data)))
    return StoreLink(heap, starts, np.concatenate([np.zeros((0, 3), np.int64), *made]))


def _count_payloads(heap: FileHeap, known: StoreLink | None) -> StoreLink:
    """Take the checksums of what was written to a file of its own."""
    known = known if known is not None and known.heap is heap and known.file == heap.file else None
    made = np.zeros((0, 3), np.int64) if known is None else known.chunks
    begin = int(made[-1, 0] + made[-1, 1]) if len(made) else 0
    chunks = np.concatenate([made, _checksums(heap.data[begin : heap.end], begin)])
    return StoreLink(heap, heap.starts.copy(), chunks, heap.file)


def _checksums(data: npt.NDArray[np.uint8], offset: int) -> npt.NDArray[np.int64]:
    """Offset, length and checksum of each stretch of ``data``, which lies at ``offset`` of a file."""
    view = data.data
    parts = [view[at : at + STRETCH] for at in range(0, len(view), STRETCH)]
    rows = [(offset + STRETCH * place, len(part), zlib.crc32(part)) for place, part in enumerate(parts)]
    return np.array(rows, np.int64).reshape(-1, 3)


def next_number(folder: Path, pattern: str) -> int:
    """A number that no file of this ``pattern`` has yet."""
    return 1 + max((int(path.stem.rsplit("-", 1)[1]) for path in folder.glob(pattern)), default=0)


def _files_of(record: dict[str, Any]) -> set[str]:
    """The files that a manifest speaks of."""
    heaps = [store.get("heap") for store in record["stores"]]
    return {record["data"]["name"], record.get("journal", ""), *(heap["name"] for heap in heaps if heap)}


def _remove_others(folder: Path, used: set[str]) -> bool:
    """Delete files that neither this manifest nor the one before speaks of; whether only this one's are left."""
    found = {path.name for path in folder.glob("*-*.bin")}
    if found <= used:
        return True
    with contextlib.suppress(ExtraBuffersError, AttributeError, KeyError, TypeError):
        used |= _files_of(manifest.read(folder, manifest.PREVIOUS))
    for name in found - used:
        if _OURS.fullmatch(name):
            with contextlib.suppress(OSError):
                (folder / name).unlink()
    return False
