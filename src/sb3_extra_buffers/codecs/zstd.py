"""``zstd``: Zstandard, alone or with a dictionary trained on the first observations."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import zstandard

from sb3_extra_buffers.codecs.base import Bytes, Codec, Ints, check_level, check_payloads
from sb3_extra_buffers.codecs.spec import ByteRows
from sb3_extra_buffers.codecs.zstd_direct import DirectContext, DirectDecoder, is_direct
from sb3_extra_buffers.errors import CodecOptionError, CorruptPayloadError

if TYPE_CHECKING:
    from typing_extensions import Self

_EMPTY = b"\x01\x00\x00"  # payload of an empty row: one empty block
_MAX_CONTEXTS = 32  # per thread; each takes some 100 KiB
_MAX_BLOCK_BYTES = 1 << 17  # zstd splits longer rows into several blocks
_NO_ADDRESSES = np.zeros(0, np.int64)
_SAMPLE_FACTOR = 100  # sample bytes per byte of dictionary, as zstd's documentation advises


@dataclass(frozen=True, slots=True)
class ZstdCodec(Codec):
    """Zstandard at ``level`` 1 to 22 (smallest) or -1 to -100 (fastest).

    ``dictionary`` is the size in bytes of the dictionary that `train` may learn; 0 for none.
    A payload is a zstd frame without its header. The header follows from the size of the row and is put back for
    decoding, so a payload cannot ask for more memory than the row takes.
    """

    codec_id: ClassVar[str] = "zstd"
    options: ClassVar[tuple[str, ...]] = ("level", "dictionary")
    level: int = -3
    dictionary: int = 0
    learnt: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        check_level(self.codec_id, self.level, [range(-100, 0), range(1, 23)], "1..22 or -100..-1")
        if isinstance(self.dictionary, bool) or not isinstance(self.dictionary, int) or self.dictionary < 0:
            raise CodecOptionError(f"zstd dictionary must be a size in bytes, or 0 for none, got {self.dictionary!r}")

    def describe(self) -> str:
        # not super(): dataclass(slots=True) replaces the class that it refers to
        method = Codec.describe(self)
        return f"{method} with a dictionary of {len(self.learnt)} bytes" if self.learnt else method

    @property
    def trainable(self) -> bool:
        return self.dictionary > 0

    def train(self, rows: ByteRows) -> Self:
        """Return a copy with the best dictionary for ``rows``, or without one if none helps.

        Which kind of dictionary wins depends on the game, so each is tried on held-out rows.
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
                raise AssertionError(f"zstd wrote the frame header {frame[:14]!r}, expected {header!r}")
            payloads.append(frame[len(header) :])
        return payloads

    def decode_into(self, payload: memoryview, out: memoryview) -> None:
        self.row_decoder(len(out))(payload, out)

    def row_decoder(self, nbytes: int) -> Callable[[memoryview, memoryview], None]:
        header, decompress = _header(nbytes), _context(_decompressor, self).decompress

        def decode(payload: memoryview, out: memoryview) -> None:
            if not nbytes and payload != _EMPTY:
                # zstandard ignores what follows the header of an empty frame
                raise CorruptPayloadError(f"zstd: a payload of {len(payload)} bytes cannot be an empty row")
            try:
                out[:] = decompress(header + payload, allow_extra_data=False)
            except zstandard.ZstdError as problem:
                raise CorruptPayloadError(f"zstd: {problem}") from problem

        return decode

    def heap_decoder(self, heap: Bytes, starts: Ints, lengths: Ints, out: ByteRows) -> Callable[[int, int], None]:
        check_payloads(heap, starts, lengths, out)
        suitable = 0 < out.shape[1] <= _MAX_BLOCK_BYTES and len(out) > 0 and out.flags.carray
        if not suitable or not is_direct() or not _are_single_blocks(heap, starts, lengths):
            return Codec.heap_decoder(self, heap, starts, lengths, out)
        header = _header(out.shape[1])

        def decode(first: int, stop: int) -> None:
            part = slice(first, stop)
            decoder = _context(DirectDecoder, self.learnt)
            bad = decoder.decode(header, heap, starts[part], lengths[part], out[part])
            if bad >= 0:
                raise CorruptPayloadError(
                    f"zstd: a payload of {lengths[part][bad]} bytes does not decode to a row of {out.shape[1]}"
                )

        return decode


def compress_bytes(data: Any, level: int, dictionary: RawDictionary | None = None) -> bytes:
    """Compress bytes of any length; `decompress_bytes` needs that length and the same dictionary."""
    if dictionary is not None:
        return dictionary.compress(data)
    compressed: bytes = _context(_bytes_compressor, level).compress(data)
    return compressed


class RawDictionary:
    """A dictionary of raw content, prepared for compression; not thread-safe."""

    def __init__(self, content: Bytes, level: int, nbytes: int) -> None:
        """``nbytes`` is the length of the data to be compressed."""
        prepared = zstandard.ZstdCompressionDict(content.tobytes(), dict_type=zstandard.DICT_TYPE_RAWCONTENT)
        params = zstandard.ZstdCompressionParameters.from_level(
            level, source_size=nbytes, dict_size=content.size, write_content_size=False, write_dict_id=False
        )
        prepared.precompute_compress(compression_params=params)
        self._compressor = zstandard.ZstdCompressor(compression_params=params, dict_data=prepared)

    def compress(self, data: Any) -> bytes:
        """Compress ``data``."""
        compressed: bytes = self._compressor.compress(data)
        return compressed


def direct_addresses() -> Ints:
    """Return the addresses that compiled code needs to call zstd in this thread; empty if it cannot."""
    addresses: Ints = _context(DirectContext).addresses if is_direct() else _NO_ADDRESSES
    return addresses


def decompress_bytes(compressed: Any, nbytes: int, dictionary: Bytes | None = None) -> bytes:
    """Undo `compress_bytes`, or raise `CorruptPayloadError` if that does not give ``nbytes``."""
    if dictionary is None:
        decompressor = _context(zstandard.ZstdDecompressor)
    else:
        content = zstandard.ZstdCompressionDict(dictionary.tobytes(), dict_type=zstandard.DICT_TYPE_RAWCONTENT)
        decompressor = zstandard.ZstdDecompressor(dict_data=content)
    try:
        data: bytes = decompressor.decompress(compressed, max_output_size=nbytes, allow_extra_data=False)
    except zstandard.ZstdError as problem:
        raise CorruptPayloadError(f"zstd: {problem}") from problem
    if len(data) != nbytes:
        raise CorruptPayloadError(f"zstd: {len(compressed)} bytes decompress to {len(data)} bytes, not {nbytes}")
    return data


def _are_single_blocks(heap: Bytes, starts: Ints, lengths: Ints) -> bool:
    """Whether each payload is exactly one block; zstd itself would accept an empty frame after it."""
    if lengths.min() < 3:
        return False
    block_headers = heap[starts].astype(np.int64) | heap[starts + 1].astype(np.int64) << 8
    block_headers |= heap[starts + 2].astype(np.int64) << 16
    # bit 0: last block; bits 1 and 2: type; then the size, except that a block of type 1 is one repeated byte
    sizes = np.where(block_headers >> 1 & 3 == 1, 1, block_headers >> 3)
    return bool(((block_headers & 1 == 1) & (lengths == 3 + sizes)).all())


def _header(nbytes: int) -> bytes:
    """Return the frame header of a row: single segment, content size, no checksum, no dictionary id."""
    if nbytes < 256:
        return b"\x28\xb5\x2f\xfd\x20" + nbytes.to_bytes(1, "little")
    if nbytes < 65536 + 256:
        return b"\x28\xb5\x2f\xfd\x60" + (nbytes - 256).to_bytes(2, "little")
    return b"\x28\xb5\x2f\xfd\xa0" + nbytes.to_bytes(4, "little")


class _Contexts(threading.local):
    """zstd contexts for reuse, per thread: never pickled or shared."""

    def __init__(self) -> None:
        self.cached: dict[tuple[Any, ...], Any] = {}


_contexts = _Contexts()
if hasattr(os, "register_at_fork"):
    # a forked child starts without any: its copy of a context could be in the middle of a call
    os.register_at_fork(after_in_child=lambda: _contexts.cached.clear())


def _context(make: Callable[..., Any], *key: Any) -> Any:
    cached = _contexts.cached
    context = cached.get((make, *key))
    if context is None:
        if len(cached) >= _MAX_CONTEXTS:
            cached.clear()
        context = cached[(make, *key)] = make(*key)
    return context


def _bytes_compressor(level: int) -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(level=level, write_content_size=False, write_checksum=False)


def _compressor(codec: ZstdCodec, nbytes: int) -> zstandard.ZstdCompressor:
    params = zstandard.ZstdCompressionParameters.from_level(
        codec.level,
        source_size=nbytes,
        dict_size=len(codec.learnt),
        # a window that covers the row makes it a single segment at every level
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
    # zstandard does not accept dict_data=None
    return zstandard.ZstdDecompressor() if learnt is None else zstandard.ZstdDecompressor(dict_data=learnt)


def _dictionary(codec: ZstdCodec) -> zstandard.ZstdCompressionDict | None:
    return zstandard.ZstdCompressionDict(codec.learnt) if codec.learnt else None


def _dictionaries(codec: ZstdCodec, rows: ByteRows) -> Iterator[bytes]:
    """Yield candidates: zstd's trainer with two settings, and some of the rows as they are."""
    size = codec.dictionary
    samples = [row.tobytes() for row in rows]
    # zstd's trainer reads past the end of very short samples and crashes; such rows need no dictionary
    if rows.shape[1] >= 128 and len(rows) >= 8 and size >= 1024:
        for segment in ({}, {"k": min(max(rows.shape[1] // 4, 64), size // 4), "d": 6}):
            # fails where the samples are too similar
            with contextlib.suppress(zstandard.ZstdError):
                yield zstandard.train_dictionary(size, samples, level=codec.level, **segment).as_bytes()
    n_whole = -(-size // rows.shape[1])
    content = rows[np.linspace(0, len(rows) - 1, n_whole, dtype=np.intp)].tobytes()[-size:]
    # zstd would parse content with this magic number as a trained dictionary
    content = content.removeprefix(b"\x37\xa4\x30\xec")
    if len(content) >= 8:
        yield content
