"""The contract every codec keeps: byte rows in, payloads out, and back without a bit changed."""

from __future__ import annotations

import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec
from sb3_extra_buffers.errors import CodecLevelError, CorruptPayloadError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Codec", "check_level", "check_segments", "read_only"]


class Codec(ABC):
    """Lossless, stateless transform of byte rows.

    Subclasses are frozen dataclasses whose fields are the whole configuration, so a codec
    compares, hashes, pickles and prints by value. Two classes may share a ``codec_id`` only if
    each can decode what the other encoded. Equal rows give equal payloads.
    """

    __slots__ = ()

    codec_id: ClassVar[str]
    #: What users call this implementation, where that is not its ``codec_id``.
    name: ClassVar[str] = ""
    #: Fields that users may set; ``None`` for all. The others are learnt in `bind` and `train`.
    options: ClassVar[tuple[str, ...] | None] = None

    def config(self) -> dict[str, Any]:
        """JSON-ready fields; ``codec_id`` plus this rebuilds the codec."""
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]  # a dataclass

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Undo `config`."""
        return cls(**config)

    def describe(self) -> str:
        """The method string a user would write for this codec, such as ``"zstd-5"``."""
        name, level = self.name or self.codec_id, getattr(self, "level", None)
        if level is None:
            return name
        return f"{name}{level}" if re.fullmatch("[A-Za-z]+", name) else f"{name}/{level}"

    def bind(self, spec: ObsSpec) -> Self:
        """Return a copy configured for ``spec``; most codecs do not care and return self."""
        return self

    @property
    def trainable(self) -> bool:
        """Whether `train` would learn anything from sample rows."""
        return False

    def train(self, rows: ByteRows) -> Self:
        """Return a copy that has learnt from ``rows``; it reads only payloads written after."""
        return self

    @abstractmethod
    def bound(self, nbytes: int) -> int:
        """Largest payload any row of ``nbytes`` can produce."""

    @abstractmethod
    def encode(self, row: memoryview) -> bytes:
        """Encode one row."""

    @abstractmethod
    def decode_into(self, payload: memoryview, out: memoryview) -> None:
        """Fill ``out`` with the row of ``payload``, or raise `CorruptPayloadError`.

        Payloads are not trusted: nothing outside ``payload`` is read, nothing outside ``out`` is
        written, and no more memory is taken than the row needs. After an error ``out`` is undefined.
        """

    def encode_batch(self, rows: ByteRows) -> list[bytes]:
        """Encode every row. Override when the library underneath has a batch call."""
        return [self.encode(row.data) for row in rows]

    def decode_batch(self, payloads: Sequence[memoryview], out: ByteRows) -> None:
        """Decode ``payloads[i]`` into ``out[i]``."""
        for payload, row in zip(payloads, out, strict=True):
            self.decode_into(payload, row.data)

    def decode_heap(
        self,
        heap: npt.NDArray[np.uint8],
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        out: ByteRows,
    ) -> None:
        """Decode ``heap[starts[i]:starts[i] + lengths[i]]`` into ``out[i]``."""
        check_segments(heap, starts, lengths, out)
        view = heap.data
        for start, length, row in zip(starts.tolist(), lengths.tolist(), out, strict=True):
            self.decode_into(view[start : start + length], row.data)

    def heap_decoder(
        self,
        heap: npt.NDArray[np.uint8],
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        out: ByteRows,
    ) -> Callable[[int, int], None]:
        """What decodes rows ``first`` to ``stop`` as `decode_heap` would, in whichever thread calls it."""

        def decode(first: int, stop: int) -> None:
            part = slice(first, stop)
            self.decode_heap(heap, starts[part], lengths[part], out[part])

        return decode


def check_segments(
    heap: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    out: ByteRows,
) -> None:
    """Raise unless there is one segment for each row of ``out``, and each lies inside ``heap``."""
    if not len(starts) == len(lengths) == len(out):
        raise ValueError(f"{len(starts)} starts and {len(lengths)} lengths for {len(out)} rows")
    # compared without adding, so that no sum can wrap round
    if len(starts) and (starts.min() < 0 or lengths.min() < 0 or (starts > heap.size - lengths).any()):
        raise CorruptPayloadError(f"a payload lies outside the heap of {heap.size} bytes")


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """``array`` for a compiled loop: numba compiles once more for each mix of flags, and this view has one type."""
    view = array.view(np.ndarray)
    view.flags.writeable = False
    return view


def check_level(name: str, level: object, allowed: Sequence[range], described: str) -> None:
    """Raise `CodecLevelError` unless ``level`` is an integer in one of the ``allowed`` ranges."""
    try:
        number = operator.index(level)  # type: ignore[arg-type]  # the point is to find out
    except TypeError:
        number = None
    if isinstance(level, bool) or number is None or not any(number in levels for levels in allowed):
        raise CodecLevelError(f"{name} level must be {described}, got {level!r}")
