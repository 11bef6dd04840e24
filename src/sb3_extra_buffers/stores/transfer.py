"""Packets of observations, encoded as in the store that exports them; they can be decoded, or imported without that."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec
from sb3_extra_buffers.errors import (
    CorruptPayloadError,
    ExtraBuffersError,
    IndexOutOfRangeError,
    MissingExtraError,
    SpecMismatchError,
)
from sb3_extra_buffers.stores.base import Array, Indices, Store
from sb3_extra_buffers.stores.checks import only_named_errors, parse_dtype, parse_shape, require, whole
from sb3_extra_buffers.stores.locks import this_thread
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.portable import EncodedFrames, PortableFrameStore
from sb3_extra_buffers.stores.portable_segments import fingerprint
from sb3_extra_buffers.stores.reentry import reads
from sb3_extra_buffers.stores.transfer_cache import Lease
from sb3_extra_buffers.stores.transfer_parts import Content, SharedPart, export_content, open_content

__all__ = ["MAX_ROW_BYTES", "RowPacket", "export_rows", "import_rows", "rows_packet"]

#: Limit for the decoded observations of one packet, in bytes.
MAX_ROW_BYTES = 1 << 32
_MAX_RECORD = 1 << 22
_FINGERPRINT_BYTES = 16


class _Header(NamedTuple):
    """The contents of the first buffer of a packet, validated."""

    shape: tuple[int, ...]
    record: Mapping[str, Any]
    arrays: list[tuple[str, np.dtype[Any], tuple[int, ...]]]
    shared: list[tuple[bytes, int, bool]]  # fingerprint, bytes, whether it is in the packet


class RowPacket:
    """Observations of one spec, encoded as in the store that exported them.

    ``shape`` is the shape of the exported indices: usually ``[n]``, or ``[set, n]`` for observations and next
    observations that share frames. A packet is independent of the store that exported it.
    """

    def __init__(self, spec: ObsSpec, shape: tuple[int, ...], content: Content, compiled: bool | None = None) -> None:
        self.spec, self.shape = spec, shape
        self.n_rows = math.prod(shape)
        self._content, self._compiled = content, compiled
        self._opened: tuple[Store, EncodedFrames | None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the packet, apart from its header."""
        return sum(array.nbytes for array in self._content.arrays.values()) + sum(
            part.data.nbytes for part in self._content.shared
        )

    @property
    def store(self) -> Store:
        """A store of ``n_rows`` observations that reads this packet; raises `CorruptPayloadError` if it is damaged."""
        return self._open()[0]

    @property
    def frames(self) -> EncodedFrames | None:
        """The encoded frames; None if the packet has rows, or indices into a table."""
        return self._open()[1]

    def _open(self) -> tuple[Store, EncodedFrames | None]:
        if self._opened is None:
            with _only_corrupt():
                self._opened = open_content(self.spec, self.n_rows, self._content, self._compiled)
        return self._opened

    def read(self, rows: Indices | None = None) -> ByteRows:
        """Decode the packet, ``[*shape, nbytes]``, or some of its rows, counted over all axes."""
        shape = self.shape if rows is None else rows.shape
        if rows is None:
            rows = np.arange(self.n_rows).reshape(shape if 0 < len(shape) < 3 else -1)
        elif rows.size and (int(rows.min()) < 0 or int(rows.max()) >= self.n_rows):
            raise IndexOutOfRangeError(f"rows {rows.min()} to {rows.max()} of a packet that has {self.n_rows}")
        store = self.store
        read = store.read(rows).reshape(*shape, self.spec.nbytes)
        if isinstance(store, PortableFrameStore):
            store.share_pace()
        return read

    def read_windows(self, length: int, newest_only: bool = False) -> ByteRows:
        """Decode the packet as windows of ``length`` consecutive rows, ``[window, length, nbytes]``.

        Each frame of a window is decoded once. ``newest_only`` returns the newest frame of each stack.
        """
        if length < 1 or self.n_rows % length:
            raise SpecMismatchError(f"{self.n_rows} observations are not windows of {length}")
        store = self.store
        windows = store.read_windows(np.arange(self.n_rows).reshape(-1, length), newest_only)
        if isinstance(store, PortableFrameStore):
            store.share_pace()
        return windows

    def verify(self) -> None:
        """Raise `CorruptPayloadError` unless every frame can be decoded."""
        store = self.store
        if isinstance(store, PortableFrameStore):
            store.verify_frames()
        else:
            self.read()

    # ---- as buffers ----

    def to_buffers(self, known: Collection[bytes] = ()) -> list[Any]:
        """Return the packet as a list of objects that support the buffer protocol.

        ``known`` are the fingerprints of the parts that the receiver has already (`Lease.known`); they are left out.
        """
        content = self._content
        shared = [[part.mark.hex(), part.data.nbytes, part.mark not in known] for part in content.shared]
        arrays = [[name, array.dtype.str, list(array.shape)] for name, array in content.arrays.items()]
        header = {"shape": list(self.shape), "record": content.record, "arrays": arrays, "shared": shared}
        buffers: list[Any] = [json.dumps(header, separators=(",", ":")).encode()]
        buffers += [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in content.arrays.values()]
        included = [part.data for part in content.shared if part.mark not in known]
        if included:
            buffers.append(np.concatenate(included))
        return buffers

    @classmethod
    def from_buffers(
        cls, spec: ObsSpec, buffers: Sequence[Any], lease: Lease | None = None, compiled: bool | None = None
    ) -> RowPacket:
        """Return the packet in ``buffers``, which are not trusted, or raise `CorruptPayloadError`.

        ``lease`` has the parts that `to_buffers` left out. The packet refers to the memory of ``buffers``.
        """
        with _only_corrupt():
            views = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
            require(len(views) > 0 and views[0].size <= _MAX_RECORD, "the header is missing or too long")
            header = _read_header(json.loads(views[0].tobytes()))
            n_rows = math.prod(header.shape)
            require(n_rows * max(spec.nbytes, 1) <= MAX_ROW_BYTES, f"{n_rows} rows of {spec.nbytes} bytes")
            n_included = sum(nbytes for _, nbytes, included in header.shared if included)
            n_buffers = 1 + len(header.arrays) + bool(n_included)
            require(len(views) == n_buffers, f"{len(views)} buffers instead of {n_buffers}")
            arrays = {}
            for (name, dtype, shape), view in zip(header.arrays, views[1:], strict=False):
                nbytes = math.prod(shape) * dtype.itemsize
                require(view.size == nbytes, f"{view.size} bytes of {name!r} instead of {nbytes}")
                arrays[name] = _aligned(view, dtype).reshape(shape)
            require(not n_included or views[-1].size == n_included, "the keyframes are cut short")
            shared = _find_shared(header, views[-1], lease)
            packet = cls(spec, header.shape, Content(header.record, arrays, shared), compiled)
        packet.store  # noqa: B018  # checks the content
        return packet


def _aligned(view: npt.NDArray[np.uint8], dtype: np.dtype[Any]) -> Array:
    """``view`` as an array of ``dtype``; copied if it is not aligned."""
    return (view if view.ctypes.data % dtype.itemsize == 0 else view.copy()).view(dtype)


def _read_header(header: Any) -> _Header:
    record, shared = header["record"], []
    require(isinstance(record, dict) and isinstance(header["arrays"], list), "the header is not a description")
    arrays = [(str(name), parse_dtype(dtype), parse_shape(shape)) for name, dtype, shape in header["arrays"]]
    require(len({name for name, _, _ in arrays}) == len(arrays), "an array occurs twice")
    for mark, nbytes, included in header["shared"]:
        require(isinstance(mark, str) and len(mark) == 2 * _FINGERPRINT_BYTES, f"invalid fingerprint {mark!r}")
        require(type(included) is bool, f"invalid flag {included!r}")
        shared.append((bytes.fromhex(mark), whole(nbytes, "the size of a keyframe", 1, 1 << 31), included))
    return _Header(parse_shape(header["shape"]), record, arrays, shared)


def _find_shared(header: _Header, data: npt.NDArray[np.uint8], lease: Lease | None) -> list[SharedPart]:
    """Return the shared parts, from the packet or, if it leaves them out, from ``lease``."""
    parts, first = [], 0
    for mark, nbytes, included in header.shared:
        if included:
            part = data[first : first + nbytes]
            first += nbytes
            require(fingerprint(part) == mark, "a keyframe differs from its fingerprint")
            if lease is not None:
                part = lease.add(mark, part)
        else:
            held = None if lease is None else lease.get(mark)
            require(held is not None, "the packet leaves out a keyframe that the receiver does not have")
            assert held is not None
            part = held
            require(part.size == nbytes, f"a keyframe of {part.size} bytes where {nbytes} are expected")
        parts.append(SharedPart(mark, part))
    return parts


@contextlib.contextmanager
def _only_corrupt() -> Iterator[None]:
    """Turn every error that invalid values cause into `CorruptPayloadError`."""
    try:
        with only_named_errors("a packet"):
            yield
    except (CorruptPayloadError, MissingExtraError):
        raise
    except ExtraBuffersError as problem:
        raise CorruptPayloadError(f"not a valid packet: {problem}") from problem


# ---- out ----


@reads
def export_rows(store: ObservationStore, indices: Indices) -> RowPacket:
    """Return the observations at ``indices``, with one axis or two, as they are encoded in ``store``."""
    if indices.size and (int(indices.min()) < 0 or int(indices.max()) >= store.n_obs):
        raise IndexOutOfRangeError(f"indices {indices.min()} to {indices.max()} of {store.n_obs} observations")
    content = None
    readers = store.readers
    with readers.stripes.get(this_thread.stripe) or readers.add_stripe():
        inner = store.inner
        if not (readers.writing or inner is None or inner.dirty):
            content = export_content(inner, indices)
    if content is None:
        with store.lock:
            inner = store.inner
            content = export_content(inner, indices) if inner is not None else None
            if content is None:
                return rows_packet(store.spec, store.read(indices))
    return RowPacket(store.spec, indices.shape, content, store.compiled)


def rows_packet(spec: ObsSpec, rows: ByteRows) -> RowPacket:
    """Return a packet of uncompressed rows, ``[*shape, nbytes]``."""
    content = Content({"kind": "rows"}, {"rows": rows.reshape(-1, spec.nbytes)}, [])
    return RowPacket(spec, rows.shape[:-1], content)


# ---- in ----


def import_rows(store: ObservationStore, indices: Indices, streams: Indices, packet: RowPacket) -> None:
    """Store the observations of ``packet`` at ``indices``, as one write; row ``i`` belongs to stream ``streams[i]``.

    If ``store`` uses the same method, segments are copied to it without decoding them. The next write to a stream does
    not continue these segments, but the last frames that were written to the stream. With another method, the packet is
    decoded and written.
    """
    indices, streams = indices.reshape(-1), streams.reshape(-1)
    if packet.spec != store.spec or not len(indices) == len(streams) == packet.n_rows:
        raise SpecMismatchError(
            f"a packet of {packet.n_rows} observations of {packet.spec} does not fit {len(indices)} of {store.spec}"
        )
    if indices.size and (int(indices.min()) < 0 or int(indices.max()) >= store.n_obs):
        raise IndexOutOfRangeError(f"indices {indices.min()} to {indices.max()} of {store.n_obs} observations")
    reader = packet.store
    if isinstance(reader, PortableFrameStore):
        # A valid header does not mean that the segments can be decoded. Decoding all of them takes a fraction of the
        # time that encoding them took; without it, a damaged packet would make every later batch that contains it fail
        packet.verify()
        frames = packet.frames

        def import_into(inner: Store) -> bool:
            if frames is None or not isinstance(inner, PortableFrameStore) or not inner.can_import(reader):
                return False
            inner.import_frames(indices, reader, frames)
            return True

        if store.write_encoded(indices, import_into):
            return
    # in the order in which the rows follow each other: an observation, then its next observation
    order = np.arange(packet.n_rows).reshape(packet.shape).T.reshape(-1)
    rows = packet.read(order)
    store.write(indices[order], streams[order], rows)
