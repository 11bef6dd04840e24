"""Circular records of frames, rewards, actions and features."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.registry import codec_options
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import EmptyBufferError, SpecMismatchError
from sb3_extra_buffers.recording.columns import Column, Row
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.usage import MemoryUsage
from sb3_extra_buffers.stores.view import StoreView

if TYPE_CHECKING:
    from gymnasium import spaces
    from typing_extensions import Self

__all__ = [
    "BaseRecordBuffer",
    "DummyRecordBuffer",
    "Episode",
    "FramelessRecordBuffer",
    "Record",
    "RecordBuffer",
]

Array = npt.NDArray[Any]


class Record(NamedTuple):
    """What was recorded at one step; for several steps, each part has an axis more."""

    frame: Any
    """What the agent saw; None where no frames are recorded."""
    reward: Any
    """What it was given for its action."""
    action: Any
    """What it did."""
    features: dict[str, Any]
    """Whatever else was recorded, by name."""
    done: Any
    """Whether the episode ended with this step."""


class Episode(NamedTuple):
    """Records ``start`` up to ``stop`` of a buffer."""

    start: int
    stop: int
    reward: float
    """Sum of its rewards, as far as they are still held."""
    whole: bool
    """Whether it is held from its first step to its end."""

    @property
    def indices(self) -> slice:
        """Index a buffer with it to get the episode's records."""
        return slice(self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start


class BaseRecordBuffer:
    """The last ``size`` records, oldest first: when it is full, each new one takes the place of the oldest.

    ``buffer[0]`` is the oldest record held and ``buffer[-1]`` the newest. A record that does not fit is an error, and
    nothing of it is kept.

    Args:
        size: The most records held.
        action_space: What actions must be part of; None to let the first action decide their shape and dtype.
        features: Dtype of each named feature, such as ``{"health": "float32", "position": ("float32", (3,))}``; None
            to let the first record decide.
    """

    #: what a file calls this kind of buffer
    kind = ""

    def __init__(
        self,
        size: int = 40_000,
        *,
        action_space: spaces.Space[Any] | None = None,
        features: Mapping[str, npt.DTypeLike] | None = None,
    ) -> None:
        if isinstance(size, bool) or not hasattr(size, "__index__") or size < 1:
            raise ValueError(f"size must be a whole number from 1 on, got {size!r}")
        self.size = int(size)
        self.action_space = action_space
        self._n_added = 0
        self._rewards = np.zeros(self.size, np.float64)
        self._dones = np.zeros(self.size, bool)
        # whether an episode begins with the record
        self._starts = np.zeros(self.size, bool)
        self._ended = True
        self._actions = Column("action", self.size)
        self._features: dict[str, Column] | None = None
        if features is not None:
            self._features = {name: Column(f"feature {name!r}", self.size, dtype) for name, dtype in features.items()}

    # ---- writing ----

    def add(self, frame: Any, reward: Any, action: Any, features: Any = None, done: Any = False) -> None:
        """Record a step.

        Args:
            frame: What the agent saw when it acted.
            reward: What it was given.
            action: What it did: a number, an array, or dicts and tuples of them.
            features: Further values by name; a bare value goes by the name ``"features"``.
            done: Whether the episode ended with it.
        """
        # everything is checked before anything is written
        ready = self._fit_frame(frame)
        amount = np.asarray(reward)
        if amount.size != 1 or amount.dtype.kind not in "biuf":
            raise SpecMismatchError(f"a reward is one number, got {reward!r}; record one environment at a time")
        if self.action_space is not None and not self.action_space.contains(action):
            raise SpecMismatchError(f"action {action!r} is not part of {self.action_space}")
        row = self._actions.fit(action)
        rows = self._fit_features(features)
        place = self._n_added % self.size
        self._write_frame(place, ready)
        self._actions.write(place, row)
        for name, part in rows.items():
            (self._features or {})[name].write(place, part)
        self._rewards[place] = amount.item()
        self._starts[place] = self._ended
        self._dones[place] = self._ended = bool(done)
        self._n_added += 1

    def end_episode(self) -> None:
        """The newest record was the last of its episode."""
        if len(self):
            self._dones[(self._n_added - 1) % self.size] = True
        self._ended = True

    def reset(self) -> None:
        """Forget all records."""
        self._n_added, self._ended = 0, True
        self._dones[:], self._starts[:] = False, False

    def _fit_features(self, features: Any) -> dict[str, Row]:
        if features is None:
            named: Mapping[str, Any] = {}
        else:
            named = features if isinstance(features, Mapping) else {"features": features}
        known = self._features
        if known is None:
            made = {str(name): Column(f"feature {name!r}", self.size) for name in named}
            rows = {str(name): made[str(name)].fit(value) for name, value in named.items()}
            self._features = made
            return rows
        if named.keys() != known.keys():
            raise SpecMismatchError(
                f"features are {sorted(map(str, named))}, but this buffer records {sorted(known)}; "
                "every record needs the same names"
            )
        return {name: known[name].fit(value) for name, value in named.items()}

    def _fit_frame(self, frame: Any) -> Any:
        """``frame`` ready to be written, or an error."""
        return None

    def _write_frame(self, place: int, frame: Any) -> None:
        """Keep what `_fit_frame` returned."""

    # ---- reading ----

    def __len__(self) -> int:
        return min(self._n_added, self.size)

    @property
    def full(self) -> bool:
        """Whether the next record takes the place of another."""
        return self._n_added >= self.size

    def _places(self, index: Any) -> Any:
        """Where the records that ``index`` selects lie."""
        n = len(self)
        first = self._n_added % self.size if self.full else 0
        if isinstance(index, slice):
            selected: Any = np.arange(*index.indices(n))
        else:
            selected = np.asarray(index)
            if selected.dtype == bool:
                if selected.shape != (n,):
                    raise IndexError(f"a mask of shape {selected.shape} for {n} records")
                selected = np.flatnonzero(selected)
            elif selected.dtype.kind not in "iu" and selected.size:
                raise IndexError(f"records are selected by whole numbers, slices or masks, not {index!r}")
            if ((selected < -n) | (selected >= n)).any():
                raise IndexError(f"index {index} is out of bounds for {n} records")
            selected = np.where(selected < 0, selected + n, selected).astype(np.int64)
        places = (selected + first) % self.size
        return int(places) if places.ndim == 0 else places

    def _order(self) -> npt.NDArray[np.int64]:
        """Where the records lie, oldest first."""
        places: npt.NDArray[np.int64] = self._places(slice(None))
        return places

    def __getitem__(self, index: Any) -> Record:
        """One record, or for a slice, mask or list of numbers one whose parts have an axis more."""
        places = self._places(index)
        return Record(
            self._read_frame(places),
            self._rewards[places],
            self._actions.read(places),
            {name: column.read(places) for name, column in (self._features or {}).items()},
            self._dones[places],
        )

    def __iter__(self) -> Iterator[Record]:
        return (self[index] for index in range(len(self)))

    def _read_frame(self, places: Any) -> Any:
        return None

    @property
    def frames(self) -> Any:
        """All frames, oldest first, decoded as they are indexed; None where none are recorded."""
        return None

    @property
    def rewards(self) -> npt.NDArray[np.float64]:
        """All rewards, oldest first."""
        return self._rewards[self._order()]

    @property
    def actions(self) -> Any:
        """All actions, oldest first."""
        return self._actions.read(self._order())

    @property
    def features(self) -> dict[str, Any]:
        """All features by name, oldest first."""
        places = self._order()
        return {name: column.read(places) for name, column in (self._features or {}).items()}

    @property
    def dones(self) -> npt.NDArray[np.bool_]:
        """Which records were the last of their episode, oldest first."""
        return self._dones[self._order()]

    @property
    def episodes(self) -> list[Episode]:
        """Episodes held, oldest first; the first may have lost its beginning, the last may still go on."""
        places = self._order()
        dones, starts, rewards = self._dones[places], self._starts[places], self._rewards[places]
        stops = [*(np.flatnonzero(dones) + 1).tolist()]
        if len(self) and not dones[-1]:
            stops.append(len(self))
        found, start = [], 0
        for stop in stops:
            whole = bool(starts[start] and dones[stop - 1])
            found.append(Episode(start, stop, float(rewards[start:stop].sum()), whole))
            start = stop
        return found

    def memory_usage(self) -> MemoryUsage:
        """What is held, by purpose."""
        columns = [self._actions, *(self._features or {}).values()]
        rest = self._rewards.nbytes + self._dones.nbytes + self._starts.nbytes
        return MemoryUsage(0, 0, 0, rest + sum(column.nbytes for column in columns), 0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} of {self.size} records)"

    # ---- files and pictures ----

    def save(self, path: str | os.PathLike[str]) -> Path | None:
        """Write all records to one file, which `load` reads; no pickle is involved."""
        from sb3_extra_buffers.recording.files import save

        return save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], compression_method: str | None = None) -> Self:
        """Read what `save` wrote; ``compression_method`` takes the place of the one it had."""
        from sb3_extra_buffers.recording.files import load

        return load(cls, path, compression_method)

    def export(
        self,
        path: str | os.PathLike[str],
        which: slice | Episode | int | None = None,
        *,
        fps: float = 30,
        scale: int = 1,
        channels: Sequence[int] | int | None = None,
        stretch: bool = False,
    ) -> Path | None:
        """Write frames as pictures: ``.gif`` and ``.mp4`` move, ``.png`` shows them side by side.

        Args:
            path: Where to; what it ends with decides the format.
            which: An episode, a slice of records, or one record; None for all.
            fps: Frames per second.
            scale: How many pixels wide and high a pixel becomes.
            channels: One or three channels to show; None for the newest of a stack.
            stretch: Whether the smallest value becomes black and the largest white, as is good for labels.
        """
        from sb3_extra_buffers.recording.export import export

        return export(self, path, which, fps=fps, scale=scale, channels=channels, stretch=stretch)


class RecordBuffer(BaseRecordBuffer):
    """Records frames, rewards, actions and features; frames are compressed.

    Args:
        res: Height and width of a frame.
        ch_num: Its channels, or the frames of a stack. Frames come as ``(ch_num, *res)`` or ``(*res, ch_num)``, and
            with a single channel as ``res``; the first one decides, and all come back like it.
        size: The most records held.
        dtype: Dtype of frames; they are not cast.
        compression_method: ``"auto"``, or a method such as ``"delta"``, ``"zstd-5"`` or ``"none"``.
        compression_kwargs: Options of that method.
        action_space: What actions must be part of; None to let the first action decide their shape and dtype.
        features: Dtype of each named feature; None to let the first record decide.

    Example:
        >>> record_buffer = RecordBuffer(res=(84, 84), ch_num=4, size=40_000)
        >>> record_buffer.add(np.zeros((4, 84, 84), np.uint8), 1.0, 3, {"health": 100.0})
        >>> record_buffer[-1].features["health"]
        np.float64(100.0)
    """

    kind = "frames"

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
        if len(res) != 2 or min(*res, ch_num) < 1:
            raise ValueError(f"res is height and width and ch_num counts channels, got {res!r} and {ch_num!r}")
        self.res = (int(res[0]), int(res[1]))
        self.ch_num = int(ch_num)
        self.dtype = np.dtype(dtype)
        self.compression_method = compression_method
        self.compression_kwargs = dict(compression_kwargs or {})
        # made now although the first frame may turn it round: a bad method is an error here
        self._frames = self._make_frames((self.ch_num, *self.res))

    def _make_frames(self, shape: tuple[int, ...]) -> StoreView:
        options = codec_options(self.compression_method, self.compression_kwargs, None)
        store = ObservationStore(ObsSpec(shape, self.dtype), 1, self.compression_method, options)
        return StoreView(store, (self.size,))

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """Shape of a frame as it was added; before the first one, channels first."""
        return self._frames.obs_shape

    def _fit_frame(self, frame: Any) -> Array:
        array = np.asarray(frame)
        shapes = [(self.ch_num, *self.res), (*self.res, self.ch_num)] + [self.res] * (self.ch_num == 1)
        allowed = shapes if self._n_added == 0 else [self.frame_shape]
        if array.shape not in allowed:
            wanted = " or ".join(map(str, allowed))
            raise SpecMismatchError(
                f"a frame has shape {array.shape}, expected {wanted}; make the buffer with res=(height, width) and "
                "ch_num of its channels"
            )
        if array.dtype != self.dtype:
            raise SpecMismatchError(
                f"a frame is {array.dtype}, expected {self.dtype}; convert it, or make the buffer with "
                f"dtype={array.dtype.name!r}"
            )
        return array

    def _write_frame(self, place: int, frame: Array) -> None:
        if frame.shape != self.frame_shape:
            self._frames = self._make_frames(frame.shape)
        self._frames[place] = frame

    def _read_frame(self, places: Any) -> Any:
        return self._frames[places]

    @property
    def frames(self) -> StoreView:
        """All frames, oldest first: indexes like an array, and decodes what is asked for."""
        return StoreView(self._frames.store, (len(self),), cells=self._order())

    def reset(self) -> None:
        super().reset()
        self._frames.store.clear()

    def memory_usage(self) -> MemoryUsage:
        return self._frames.memory_usage() + super().memory_usage()


class FramelessRecordBuffer(BaseRecordBuffer):
    """Records rewards, actions and features; frames are taken and dropped.

    It takes the arguments of `RecordBuffer`, so that one can stand in for the other.
    """

    kind = "frameless"

    def __init__(
        self,
        res: tuple[int, int] | None = None,
        ch_num: int | None = None,
        size: int = 40_000,
        *,
        action_space: spaces.Space[Any] | None = None,
        features: Mapping[str, npt.DTypeLike] | None = None,
        **_: Any,
    ) -> None:
        super().__init__(size, action_space=action_space, features=features)


class DummyRecordBuffer(BaseRecordBuffer):
    """Records nothing and takes every call: for switching recording off without changing the code around it."""

    kind = "dummy"

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__(1)

    def add(self, frame: Any = None, reward: Any = None, action: Any = None, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def end_episode(self) -> None:
        """Do nothing."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write nothing."""

    def export(self, path: str | os.PathLike[str], *_: Any, **__: Any) -> None:
        """Write nothing."""

    @classmethod
    def load(cls, path: str | os.PathLike[str], compression_method: str | None = None) -> Self:
        raise EmptyBufferError("a DummyRecordBuffer writes no file that could be read")
