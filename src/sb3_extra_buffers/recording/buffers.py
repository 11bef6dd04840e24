"""The record buffers: with compressed frames, without frames, and one that records nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.arguments import as_array, check_count
from sb3_extra_buffers.codecs.registry import codec_options
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import (
    CodecOptionError,
    EmptyBufferError,
    FileFormatError,
    NotSaveableError,
    SpecMismatchError,
)
from sb3_extra_buffers.recording.base import BaseRecordBuffer
from sb3_extra_buffers.stores.checks import entry, require, whole
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.usage import MemoryUsage
from sb3_extra_buffers.stores.view import StoreView

if TYPE_CHECKING:
    from gymnasium import spaces
    from typing_extensions import Self

    from sb3_extra_buffers.files.parts import LoadedParts, Parts

__all__ = ["DummyRecordBuffer", "FramelessRecordBuffer", "RecordBuffer", "make_recording"]

Array = npt.NDArray[Any]

# frames to decode at a time when they are recompressed
_BLOCK = 256


class RecordBuffer(BaseRecordBuffer):
    """Records compressed frames, rewards, actions and features.

    Args:
        res: Height and width of a frame.
        ch_num: Number of channels, or of frames in a stack. Frames have shape ``(ch_num, *res)`` or
            ``(*res, ch_num)``, or ``res`` if there is one channel; the first frame sets the shape of all.
        size: Maximum number of records.
        dtype: Dtype of frames; they are never cast.
        compression_method: ``"auto"``, or a method such as ``"delta"``, ``"zstd-5"`` or ``"none"``.
        compression_kwargs: Options of the method.
        action_space: Space that actions must belong to; None if the first action sets their shape and dtype.
        features: Dtype of each named feature that a record may have; None if the first value of each sets it.

    Examples:
        >>> import numpy as np
        >>> from sb3_extra_buffers.recording import RecordBuffer
        >>> record_buffer = RecordBuffer(res=(84, 84), ch_num=4, size=40_000)
        >>> record_buffer.add(np.zeros((4, 84, 84), np.uint8), 1.0, 3, {"health": 100.0})
        >>> float(record_buffer[-1].features["health"])
        100.0
    """

    def __init__(
        self,
        res: tuple[int, int] = (84, 84),
        ch_num: int = 4,
        size: int = 40_000,
        *,
        dtype: npt.DTypeLike = np.uint8,
        compression_method: str = "auto",
        compression_kwargs: Mapping[str, Any] | None = None,
        action_space: spaces.Space[Any] | None = None,
        features: Mapping[str, npt.DTypeLike] | None = None,
    ) -> None:
        super().__init__(size, action_space=action_space, features=features)
        sides = tuple(res) if hasattr(res, "__iter__") and not isinstance(res, str) else ()
        if len(sides) != 2:
            raise SpecMismatchError(f"res must be (height, width), got {res!r}")
        self.res = (check_count(sides[0], "the height in res"), check_count(sides[1], "the width in res"))
        self.ch_num = check_count(ch_num, "ch_num")
        try:
            self.dtype = np.dtype(dtype)
        except TypeError as problem:
            raise SpecMismatchError(f"{dtype!r} is not a dtype: {problem}") from problem
        if not isinstance(compression_kwargs, Mapping | None):
            raise CodecOptionError(f"compression_kwargs must be a dict of options, got {compression_kwargs!r}")
        self.compression_method = compression_method
        self.compression_kwargs = dict(compression_kwargs or {})
        # the first frame may replace this; made here so that an invalid method raises in the constructor
        self._frames = self._make_frames((self.ch_num, *self.res), compression_method, self.compression_kwargs)

    def _make_frames(self, shape: tuple[int, ...], method: str, options: dict[str, Any]) -> StoreView:
        store = ObservationStore(ObsSpec(shape, self.dtype), 1, method, codec_options(method, options, None))
        return StoreView(store, (self.size,))

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """Shape of a frame as added; channels first before the first frame."""
        return self._frames.obs_shape

    def _frame_shapes(self) -> list[tuple[int, ...]]:
        """Shapes that the first frame may have."""
        shapes: list[tuple[int, ...]] = [(self.ch_num, *self.res), (*self.res, self.ch_num)]
        return [*shapes, self.res] if self.ch_num == 1 else shapes

    def _check_frame(self, frame: Any) -> tuple[StoreView, Array]:
        array = as_array(frame, "the frame")
        allowed = [self.frame_shape] if self._n_added else self._frame_shapes()
        if array.shape not in allowed:
            raise SpecMismatchError(
                f"the frame has shape {array.shape}, expected {' or '.join(map(str, allowed))}; "
                "set res=(height, width) and ch_num to match"
            )
        if array.dtype != self.dtype:
            raise SpecMismatchError(
                f"the frame has dtype {array.dtype}, expected {self.dtype}; convert it, or create the buffer with "
                f"dtype={array.dtype.name!r}"
            )
        if array.shape == self.frame_shape:
            return self._frames, array
        return self._make_frames(array.shape, self.compression_method, self.compression_kwargs), array

    def _read_frames(self, positions: Any) -> Any:
        return self._frames[positions]

    @property
    def frames(self) -> StoreView:
        """All frames, oldest first; indexes like an array and decodes only what is selected."""
        return StoreView(self._frames.store, (len(self),), indices=self._order())

    def _clear_frames(self) -> None:
        self._frames.store.clear()

    def memory_usage(self) -> MemoryUsage:
        """Memory of the buffer, by purpose."""
        columns, frames = super().memory_usage(), self._frames.memory_usage()
        dense = len(self) * self._frames.store.spec.nbytes
        return columns + replace(frames, transitions=0, dense=dense, dense_observations=dense)

    def recompress(self, compression_method: str) -> None:
        """Compress all frames again with ``compression_method``."""
        with self._lock:
            order = self._order()
            frames = self._make_frames(self.frame_shape, compression_method, {})
            for start in range(0, len(order), _BLOCK):
                positions = order[start : start + _BLOCK]
                # in the order they were added, so that each resembles the frame before it
                for position, frame in zip(positions.tolist(), self._frames[positions], strict=True):
                    frames[position] = frame
            self.__dict__.update(_frames=frames, compression_method=compression_method, compression_kwargs={})

    def to_parts(self) -> Parts:
        from sb3_extra_buffers.files.values import value_to_json

        with self._lock:
            parts = super().to_parts()
            parts.description["frames"] = {
                "res": list(self.res),
                "ch_num": self.ch_num,
                "compression_method": self.compression_method,
                "compression_kwargs": value_to_json(self.compression_kwargs, "compression_kwargs"),
            }
            parts.stores["frames"] = self._frames.store
            return parts

    @classmethod
    def from_parts(cls, parts: LoadedParts) -> Self:
        """Rebuild a buffer from a file; everything is checked."""
        from sb3_extra_buffers.files.parts import make_view
        from sb3_extra_buffers.files.values import value_from_json

        store, saved = parts.stores["frames"], parts.entry("frames", kind=dict)
        res = entry(saved, "res", kind=list)
        require(len(res) == 2, f"res is {res!r}, expected height and width")
        height, width = (whole(side, "height or width", 1, 1 << 31) for side in res)
        method = entry(saved, "compression_method", kind=str)
        require(method == store.method, f"frames are stored with {store.method!r}, not with {method!r}")
        self = cls(
            (height, width),
            whole(entry(saved, "ch_num"), "ch_num", 1, 1 << 31),
            parts.number("size", low=1),
            dtype=store.spec.dtype,
            compression_method=method,
            compression_kwargs=value_from_json(entry(saved, "compression_kwargs", kind=dict)),
        )
        self._restore_columns(parts)
        shapes = self._frame_shapes()
        fits = store.n_obs == self.size and store.n_streams == 1 and store.spec.shape in shapes
        require(fits, f"a store of {store.n_obs} frames of {store.spec} does not hold {self.size} of {shapes[0]}")
        self._frames = make_view(StoreView, store, (self.size,))
        return self


class FramelessRecordBuffer(BaseRecordBuffer):
    """Records rewards, actions and features; frames are ignored.

    Accepts the arguments of `RecordBuffer`, so that either can replace the other, or a size alone:
    ``FramelessRecordBuffer(100)``.

    Examples:
        >>> from sb3_extra_buffers.recording import FramelessRecordBuffer
        >>> record_buffer = FramelessRecordBuffer(1000)
        >>> record_buffer.add(None, reward=1.0, action=3)
        >>> record_buffer.rewards
        array([1.])
    """

    def __init__(
        self,
        res: tuple[int, int] | SupportsIndex | None = None,
        ch_num: int | None = None,
        size: int = 40_000,
        *,
        action_space: spaces.Space[Any] | None = None,
        features: Mapping[str, npt.DTypeLike] | None = None,
        **_: Any,
    ) -> None:
        if not isinstance(res, (tuple, list, np.ndarray, type(None))):
            size = check_count(res, "size")
        super().__init__(size, action_space=action_space, features=features)

    @classmethod
    def from_parts(cls, parts: LoadedParts) -> Self:
        """Rebuild a buffer from a file; everything is checked."""
        self = cls(size=parts.number("size", low=1))
        self._restore_columns(parts)
        return self


class DummyRecordBuffer(BaseRecordBuffer):
    """Records nothing and accepts every call: turns recording off without changing the code around it.

    Examples:
        >>> from sb3_extra_buffers.recording import DummyRecordBuffer
        >>> record_buffer = DummyRecordBuffer(res=(84, 84), ch_num=4, size=40_000)
        >>> record_buffer.add(None, 1.0, 3)
        >>> len(record_buffer)
        0
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__(1)

    def add(self, frame: Any = None, reward: Any = None, action: Any = None, *_: Any, **__: Any) -> None:
        """Ignore ``frame``, ``reward`` and ``action``."""

    def end_episode(self) -> None:
        """Do nothing."""

    def to_parts(self) -> Parts:
        raise NotSaveableError("a DummyRecordBuffer records nothing that could be saved")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write nothing to ``path``."""

    def export(self, path: str | os.PathLike[str], *_: Any, **__: Any) -> None:
        """Write nothing to ``path``."""

    @classmethod
    def load(cls, path: str | os.PathLike[str], compression_method: str | None = None) -> Self:
        """Return a new buffer; ``path`` and ``compression_method`` are ignored."""
        raise EmptyBufferError("a DummyRecordBuffer writes no files, so there is nothing to load")


def make_recording(parts: LoadedParts) -> BaseRecordBuffer:
    """Rebuild the record buffer that ``parts`` were taken from."""
    has_frames = parts.entry("frames") is not None
    cls = RecordBuffer if has_frames else FramelessRecordBuffer
    if parts.target is not None and not issubclass(cls, parts.target):
        raise FileFormatError(
            f"the file holds a {cls.__name__}, not a {parts.target.__name__}; BaseRecordBuffer.load reads both"
        )
    require(set(parts.stores) == ({"frames"} if has_frames else set()), f"got stores {sorted(parts.stores)}")
    return cls.from_parts(parts)
