"""``zstd``: Zstandard, on its own or with a dictionary learnt from the first observations."""

from __future__ import annotations

import base64
import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import zstandard

from sb3_extra_buffers.codecs.base import Codec, check_level, check_segments
from sb3_extra_buffers.codecs.spec import ByteRows
from sb3_extra_buffers.codecs.zstd_direct import DirectDecoder, is_direct
from sb3_extra_buffers.errors import CodecOptionError, CorruptPayloadError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ZstdCodec"]

_EMPTY = b"\x01\x00\x00"  # the one block of a frame of nothing
_MAX_CONTEXTS = 32  # a thread's; each is some 100 KiB
_ONE_BLOCK = 1 << 17
_SAMPLE_FACTOR = 100  # sample bytes for each byte of dictionary, as zstd's documentation advises


@dataclass(frozen=True, slots=True)
class ZstdCodec(Codec):
    """Zstandard at ``level`` 1 to 22 (smallest) or -1 to -100 (fastest).

    ``dictionary`` is the size in bytes of the dictionary that `train` may learn; 0 learns none.
    A payload is a frame without its header: that follows from the size of the row, so it is put
    back for decoding, and what a payload says can never ask for more memory than the row takes.
    """

    codec_id: ClassVar[str] = "zstd"
    options: ClassVar[tuple[str, ...]] = ("level", "dictionary")
    level: int = -3
    dictionary: int = 0
    learnt: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        check_level(self.codec_id, self.level, [range(-100, 0), range(1, 23)], "1..22 or -100..-1")
        if isinstance(self.dictionary, bool) or not isinstance(self.dictionary, int) or self.dictionary < 0:
            raise CodecOptionError(f"zstd dictionary is a size in bytes, 0 for none, got {self.dictionary!r}")

    def config(self) -> dict[str, Any]:
        learnt = base64.b64encode(self.learnt).decode("ascii")
        return {"level": self.level, "dictionary": self.dictionary, "learnt": learnt}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(**{**config, "learnt": base64.b64decode(config.get("learnt", ""), validate=True)})

    def describe(self) -> str:
        # super() needs the class that slots=True has replaced
        method = Codec.describe(self)
        return f"{method} with a dictionary of {len(self.learnt)} bytes" if self.learnt else method

    @property
    def trainable(self) -> bool:
        return self.dictionary > 0

    def train(self, rows: ByteRows) -> Self:
        """Return a copy with the dictionary that serves ``rows`` best, or none if none helps.

        Which kind of dictionary wins depends on the game, so each is tried on rows it has not seen.
        """
        if not self.trainable or not rows.size:
            return self
        n_samples = max(_SAMPLE_FACTOR * self.dictionary // rows.shape[1], 4)
        step = max(len(rows) // n_samples, 1)
        samples = dict.fromkeys(row.tobytes() for row in rows[::step][:n_samples])
        rows = np.frombuffer(b"".join(samples), np.uint8).reshape(len(samples), -1)
        held_out = np.arange(len(rows)) % 4 == 3
        untrained = replace(self, learnt=b"")
        tried = [untrained]
        tried += [replace(self, learnt=learnt) for learnt in _dictionaries(self, rows[~held_out])]
        return min(tried, key=lambda codec: sum(map(len, codec.encode_batch(rows[held_out]))))

    def bound(self, nbytes: int) -> int:
        # ZSTD_COMPRESSBOUND
        return nbytes + (nbytes >> 8) + (max(131072 - nbytes, 0) >> 11)

    def encode(self, row: memoryview) -> bytes:
        return self.encode_batch(np.frombuffer(row, np.uint8)[None])[0]

    def encode_batch(self, rows: ByteRows) -> list[bytes]:
        header = _header(rows.shape[1])
        compress = _context(_compressor, self, rows.shape[1]).compress
        payloads = []
        for row in rows:
            frame: bytes = compress(row.data)
            if not frame.startswith(header):
                raise AssertionError(f"zstd wrote the header {frame[:14]!r} where {header!r} was due")
            payloads.append(frame[len(header) :])
        return payloads

    def decode_into(self, payload: memoryview, out: memoryview) -> None:
        header = _header(len(out))
        if not len(out) and payload != _EMPTY:
            # zstandard does not look at what follows a header that announces nothing
            raise CorruptPayloadError(f"zstd: a payload of {len(payload)} bytes for a row of none")
        try:
            row = _context(_decompressor, self).decompress(header + payload, allow_extra_data=False)
        except zstandard.ZstdError as problem:
            raise CorruptPayloadError(f"zstd: {problem}") from problem
        out[:] = row

    def decode_heap(
        self,
        heap: npt.NDArray[np.uint8],
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        out: ByteRows,
    ) -> None:
        check_segments(heap, starts, lengths, out)
        nbytes = out.shape[1]
        if not nbytes:
            return Codec.decode_heap(self, heap, starts, lengths, out)
        header = _header(nbytes)
        source, target, end = heap.data, out.reshape(-1).data, 0
        try:
            decompress = _context(_decompressor, self).decompress
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
                row = decompress(header + source[start : start + length], allow_extra_data=False)
                target[end : end + nbytes] = row
                end += nbytes
        except zstandard.ZstdError as problem:
            raise CorruptPayloadError(f"zstd: {problem}") from problem

    def heap_decoder(
        self,
        heap: npt.NDArray[np.uint8],
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        out: ByteRows,
    ) -> Callable[[int, int], None]:
        check_segments(heap, starts, lengths, out)
        suits = 0 < out.shape[1] <= _ONE_BLOCK and len(out) > 0 and out.flags.carray
        if not suits or not is_direct() or not _are_single_blocks(heap, starts, lengths):
            return Codec.heap_decoder(self, heap, starts, lengths, out)
        header = _header(out.shape[1])

        def decode(first: int, stop: int) -> None:
            part = slice(first, stop)
            decoder = _context(DirectDecoder, self.learnt)
            bad = decoder.decode(header, heap, starts[part], lengths[part], out[part])
            if bad >= 0:
                raise CorruptPayloadError(f"zstd: a payload of {lengths[part][bad]} bytes makes no row")

        return decode


def _are_single_blocks(
    heap: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> bool:
    """Whether each payload is one block and ends with it; zstd would not mind a frame of nothing behind it."""
    if lengths.min() < 3:
        return False
    heads = heap[starts].astype(np.int64) | heap[starts + 1].astype(np.int64) << 8
    heads |= heap[starts + 2].astype(np.int64) << 16
    # a bit for the last block, two for its kind, and its size; a repeated byte takes one, however many it makes
    sizes = np.where(heads >> 1 & 3 == 1, 1, heads >> 3)
    return bool(((heads & 1 == 1) & (lengths == 3 + sizes)).all())


def _header(nbytes: int) -> bytes:
    """The frame header of a row: one segment, its size, no checksum and no dictionary's name."""
    if nbytes < 256:
        return b"\x28\xb5\x2f\xfd\x20" + nbytes.to_bytes(1, "little")
    if nbytes < 65536 + 256:
        return b"\x28\xb5\x2f\xfd\x60" + (nbytes - 256).to_bytes(2, "little")
    return b"\x28\xb5\x2f\xfd\xa0" + nbytes.to_bytes(4, "little")


class _Contexts(threading.local):
    """What zstd keeps between calls. Belongs to one thread, so it is never pickled or shared."""

    def __init__(self) -> None:
        self.made: dict[tuple[Any, ...], Any] = {}


_contexts = _Contexts()
if hasattr(os, "register_at_fork"):
    # a child begins with none: its copy could be of a context that was at work
    os.register_at_fork(after_in_child=lambda: _contexts.made.clear())


def _context(make: Callable[..., Any], *key: Any) -> Any:
    made = _contexts.made
    context = made.get((make, *key))
    if context is None:
        if len(made) >= _MAX_CONTEXTS:
            made.clear()
        context = made[(make, *key)] = make(*key)
    return context


def _compressor(codec: ZstdCodec, nbytes: int) -> zstandard.ZstdCompressor:
    params = zstandard.ZstdCompressionParameters.from_level(
        codec.level,
        source_size=nbytes,
        dict_size=len(codec.learnt),
        # a window over the whole row makes one segment of it, whatever the level
        window_log=max((nbytes - 1).bit_length(), 10),
        write_content_size=True,
        write_checksum=False,
        write_dict_id=False,
    )
    learnt = _dictionary(codec)
    if learnt is not None:
        learnt.precompute_compress(compression_params=params)
    return zstandard.ZstdCompressor(compression_params=params, dict_data=learnt)


def _decompressor(codec: ZstdCodec) -> zstandard.ZstdDecompressor:
    learnt = _dictionary(codec)
    # zstandard takes no None here
    return zstandard.ZstdDecompressor() if learnt is None else zstandard.ZstdDecompressor(dict_data=learnt)


def _dictionary(codec: ZstdCodec) -> zstandard.ZstdCompressionDict | None:
    return zstandard.ZstdCompressionDict(codec.learnt) if codec.learnt else None


def _dictionaries(codec: ZstdCodec, rows: ByteRows) -> Iterator[bytes]:
    """Candidates: what zstd's trainer makes of ``rows``, long segments of them, and some as they are."""
    size = codec.dictionary
    samples = [row.tobytes() for row in rows]
    # zstd's trainer reads past the end of samples of a few bytes and dies; such rows need no dictionary
    if rows.shape[1] >= 128 and len(rows) >= 8 and size >= 1024:
        for segment in ({}, {"k": min(max(rows.shape[1] // 4, 64), size // 4), "d": 6}):
            # the samples may yet be too much alike to learn from
            with contextlib.suppress(zstandard.ZstdError):
                yield zstandard.train_dictionary(size, samples, level=codec.level, **segment).as_bytes()
    n_whole = -(-size // rows.shape[1])
    content = rows[np.linspace(0, len(rows) - 1, n_whole, dtype=np.intp)].tobytes()[-size:]
    # what begins like a trained dictionary would be taken for one
    content = content.removeprefix(b"\x37\xa4\x30\xec")
    if len(content) >= 8:
        yield content
