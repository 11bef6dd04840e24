"""The contract of a codec: rows of bytes to payloads and back, losslessly."""

from __future__ import annotations

import base64
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec
from sb3_extra_buffers.errors import CodecLevelError, CodecOptionError, CorruptPayloadError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Bytes", "Codec", "Ints", "check_frames", "check_level", "check_payloads", "decompress_into", "read_only"]

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


class Codec(ABC):
    """Lossless, stateless transform of byte rows.

    Subclasses are frozen dataclasses whose fields (numbers, strings, bytes) are the whole configuration, so codecs
    compare, hash, pickle and print by value. Two classes may share a ``codec_id`` only if each can decode what the
    other encoded. Equal rows give equal payloads.
    """

    __slots__ = ()

    codec_id: ClassVar[str]
    #: Name of this implementation in method strings, where it differs from ``codec_id``.
    name: ClassVar[str] = ""
    #: Fields that users may set; ``None`` for all. The others are set by `bind` and `train`.
    options: ClassVar[tuple[str, ...] | None] = None

    def config(self) -> dict[str, Any]:
        """Return the fields as JSON values; together with ``codec_id`` they rebuild the codec."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]  # a dataclass
        return {
            name: base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value
            for name, value in values.items()
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Undo `config`."""
        binary = {f.name for f in fields(cls) if isinstance(f.default, bytes)}  # type: ignore[arg-type]  # a dataclass
        return cls(
            **{
                name: base64.b64decode(value, validate=True) if name in binary else value
                for name, value in config.items()
            }
        )

    def resolved(self) -> Self:
        """Return this codec with defaults that depend on installed packages made explicit, for payloads to be saved."""
        return self

    def describe(self) -> str:
        """Return the method string a user would write for this codec, such as ``"zstd-5"``."""
        name, level = self.name or self.codec_id, getattr(self, "level", None)
        if level is None:
            return name
        return f"{name}{level}" if re.fullmatch("[A-Za-z]+", name) else f"{name}/{level}"

    def bind(self, spec: ObsSpec) -> Self:
        """Return a copy configured for ``spec``; most codecs need no configuration and return self."""
        return self

    @property
    def trainable(self) -> bool:
        """Whether `train` would learn anything from sample rows."""
        return False

    def train(self, rows: ByteRows) -> Self:
        """Return a copy that has learnt from ``rows``; it can decode only what it encodes itself."""
        return self

    @abstractmethod
    def bound(self, nbytes: int) -> int:
        """Return the size of the largest payload that a row of ``nbytes`` can produce."""

    @abstractmethod
    def encode(self, row: memoryview) -> bytes:
        """Encode one row."""

    @abstractmethod
    def decode_into(self, payload: memoryview, out: memoryview) -> None:
        """Fill ``out`` with the row of ``payload``, or raise `CorruptPayloadError`.

        Payloads are not trusted: read nothing outside ``payload``, write nothing outside ``out``, and allocate no more
        memory than the row needs. After an error the contents of ``out`` are undefined.
        """

    def encode_batch(self, rows: ByteRows) -> list[bytes]:
        """Encode every row. Override this where the library underneath has a batch call."""
        return [self.encode(row.data) for row in rows]

    def row_decoder(self, nbytes: int) -> Callable[[memoryview, memoryview], None]:
        """Return `decode_into` for rows of ``nbytes``. Override this where some work can be done once per batch."""
        return self.decode_into

    def decode_batch(self, payloads: Sequence[memoryview], out: ByteRows) -> None:
        """Decode ``payloads[i]`` into ``out[i]``."""
        decode = self.row_decoder(out.shape[1])
        for payload, row in zip(payloads, out, strict=True):
            decode(payload, row.data)

    def decode_heap(self, heap: Bytes, starts: Ints, lengths: Ints, out: ByteRows) -> None:
        """Decode ``heap[starts[i] : starts[i] + lengths[i]]`` into ``out[i]``."""
        check_payloads(heap, starts, lengths, out)
        decode, view = self.row_decoder(out.shape[1]), heap.data
        for start, length, row in zip(starts.tolist(), lengths.tolist(), out, strict=True):
            decode(view[start : start + length], row.data)

    def heap_decoder(self, heap: Bytes, starts: Ints, lengths: Ints, out: ByteRows) -> Callable[[int, int], None]:
        """Return a function that decodes rows ``first`` to ``stop`` like `decode_heap`; any thread may call it."""

        def decode(first: int, stop: int) -> None:
            part = slice(first, stop)
            self.decode_heap(heap, starts[part], lengths[part], out[part])

        return decode


def check_payloads(heap: Bytes, starts: Ints, lengths: Ints, out: ByteRows) -> None:
    """Raise unless there is one payload for each row of ``out``, and all of them are inside ``heap``."""
    if not len(starts) == len(lengths) == len(out):
        raise ValueError(
            f"expected one start and length per row, got {len(starts)}, {len(lengths)} for {len(out)} rows"
        )
    # compare without adding, which could overflow
    if len(starts) and (starts.min() < 0 or lengths.min() < 0 or (starts > heap.size - lengths).any()):
        raise CorruptPayloadError(f"a payload extends beyond the heap of {heap.size} bytes; its index is damaged")


def decompress_into(name: str, decompressor: Any, errors: Any, payload: memoryview, out: memoryview) -> None:
    """Decompress one gzip member or LZ4 frame, which must be exactly ``payload`` and give exactly ``out``."""
    try:
        # a limit one byte above the row shows a longer one without decompressing it further
        row = decompressor.decompress(payload, len(out) + 1)
    except errors as problem:
        raise CorruptPayloadError(f"{name}: {problem}") from problem
    if not decompressor.eof or decompressor.unused_data or len(row) != len(out):
        raise CorruptPayloadError(f"{name}: a payload of {len(payload)} bytes does not decode to a row of {len(out)}")
    out[:] = row


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a read-only view: numba compiles once per combination of array flags, and this leaves one combination."""
    view = array.view(np.ndarray)
    view.flags.writeable = False
    return view


def check_level(name: str, level: object, allowed: Sequence[range], described: str) -> None:
    """Raise `CodecLevelError` unless ``level`` is an integer in one of the ``allowed`` ranges."""
    try:
        number = operator.index(level)  # type: ignore[arg-type]  # raises TypeError for anything else
    except TypeError:
        number = None
    if isinstance(level, bool) or number is None or not any(number in levels for levels in allowed):
        raise CodecLevelError(f"{name} level must be {described}, got {level!r}")


def check_frames(name: str, frames: Any) -> int:
    """Return the number of frames per segment as an int; raise unless it fits the byte that it is stored in."""
    try:
        count = 0 if isinstance(frames, (bool, np.bool_)) else operator.index(frames)
    except TypeError:
        count = 0
    if not 1 <= count <= 255:
        raise CodecOptionError(f"{name} frames (per segment) must be 1..255, got {frames!r}")
    return count
