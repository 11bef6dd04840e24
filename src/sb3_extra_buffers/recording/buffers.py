"""Circular records of frames, rewards, actions and features."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.registry import codec_options
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import (
    CodecOptionError,
    EmptyBufferError,
    IndexOutOfRangeError,
    NotSaveableError,
    SpecMismatchError,
    UnknownCodecError,
)
from sb3_extra_buffers.recording.columns import Column, Row, check_count, one_number
from sb3_extra_buffers.stores.locks import fork_safe_lock
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.usage import MemoryUsage
from sb3_extra_buffers.stores.view import StoreView

if TYPE_CHECKING:
    from gymnasium import spaces
    from typing_extensions import Self

    from sb3_extra_buffers.files.parts import Parts

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


class _Change:
    """What a call is about to change, checked and ready: a frame, rows of columns, attributes."""

    __slots__ = ("after", "frame", "frames", "place", "rows", "written")

    def __init__(
        self, place: int, rows: list[tuple[Array, Any]], after: dict[str, Any], frames: Any = None, frame: Any = None
    ) -> None:
        self.place, self.rows, self.frames, self.frame = place, rows, frames, frame
        self.written = frames is None
        # the buffer's attributes once all of it is written
        self.after = after


class BaseRecordBuffer:
    """The last ``size`` records, oldest first: when it is full, each new one takes the place of the oldest.

    ``buffer[0]`` is the oldest record held and ``buffer[-1]`` the newest. A record that does not fit is an error, and
    nothing of it is kept; whatever else is raised while one is added, the buffer holds all of it or is as it was.

    Args:
        size: The most records held.
        action_space: What actions must be part of; None to let the first action decide their shape and dtype.
        features: Dtype of each named feature, such as ``{"health": "float32", "position": ("float32", (3,))}``; None
            to let the first record decide.
    """

    # a change that is under way, or "reset"
    _unfinished: _Change | str | None = None

    def __init__(
        self,
        size: int = 40_000,
        *,
        action_space: spaces.Space[Any] | None = None,
        features: Mapping[str, npt.DTypeLike] | None = None,
    ) -> None:
        self.size = check_count(size, "size")
        self._lock = fork_safe_lock(of_buffer=True)
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
            if not isinstance(features, Mapping) or not all(isinstance(name, str) for name in features):
                raise SpecMismatchError(f"features are dtypes by name, got {features!r}")
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
        with self._lock:
            self._recover()
            # everything is checked, and memory is taken, before anything is written
            place = self._n_added % self.size
            frames, fitted = self._fit_frame(frame)
            amount, ended = one_number(reward, "reward"), bool(one_number(done, "done"))
            after: dict[str, Any] = {"_n_added": self._n_added + 1, "_ended": ended, "_unfinished": None}
            if frames is not None:
                after["_frames"] = frames
            rows = self._fit_action(action, after) + self._fit_features(features, after)
            rows += [(self._rewards, amount), (self._starts, self._ended), (self._dones, ended)]
            self._apply(_Change(place, rows, after, frames, fitted))

    def end_episode(self) -> None:
        """The newest record was the last of its episode."""
        with self._lock:
            self._recover()
            rows: list[tuple[Array, Any]] = [(self._dones, True)] if len(self) else []
            self._apply(_Change((self._n_added - 1) % self.size, rows, {"_ended": True, "_unfinished": None}))

    def reset(self) -> None:
        """Forget all records."""
        with self._lock:
            if isinstance(self._unfinished, _Change):
                self._recover()
            try:
                # may be run again wherever it is interrupted
                self._unfinished = "reset"
                self._clear_frames()
                self.__dict__.update(_n_added=0, _ended=True, _unfinished=None)
            except BaseException:
                self._recover()
                raise

    def _apply(self, change: _Change) -> None:
        """Make a change; after an exception all of it is made, or nothing."""
        frames, place = change.frames, change.place
        if frames is not None:
            frames.store.commit()  # what can be taken back is what is written from now on
        try:
            self._unfinished = change
            if frames is not None:
                frames[place] = change.frame
                change.written = True
            for column, value in change.rows:
                column[place] = value
            # one call, which no signal can interrupt
            self.__dict__.update(change.after)
        except BaseException:
            self._recover()
            raise

    def _recover(self) -> None:
        """Finish what an exception interrupted, or take it back. May be interrupted and run again."""
        change = self._unfinished
        if change is None:
            return
        if not isinstance(change, _Change):
            self.reset()
        elif change.written:
            for column, value in change.rows:
                column[change.place] = value
            self.__dict__.update(change.after)
        else:
            change.frames.store.undo_write()
            self._unfinished = None

    def _fit_action(self, action: Any, after: dict[str, Any]) -> list[tuple[Array, Any]]:
        if self.action_space is not None:
            try:
                contained = self.action_space.contains(action)
            except (TypeError, ValueError, AttributeError, IndexError):
                contained = False
            if not contained:
                raise SpecMismatchError(f"action {action!r} is not part of {self.action_space}")
        row = self._actions.fit(action)
        column = self._actions
        if not column.arrays:
            column = after["_actions"] = self._actions.made_for(row)
        return column.pairs(row)

    def _fit_features(self, features: Any, after: dict[str, Any]) -> list[tuple[Array, Any]]:
        if features is None:
            named: dict[str, Any] = {}
        elif isinstance(features, Mapping):
            named = {str(name): value for name, value in features.items()}
            if len(named) != len(features):
                raise SpecMismatchError(f"features {list(features)} have names that are the same as text")
        else:
            named = {"features": features}
        known = self._features
        if known is not None and named.keys() != known.keys():
            raise SpecMismatchError(
                f"features are {sorted(named)}, but this buffer records {sorted(known)}; "
                "every record needs the same names"
            )
        columns = {name: Column(f"feature {name!r}", self.size) for name in named} if known is None else dict(known)
        pairs: list[tuple[Array, Any]] = []
        for name, value in named.items():
            row: Row = columns[name].fit(value)
            if not columns[name].arrays:
                columns[name] = columns[name].made_for(row)
            pairs += columns[name].pairs(row)
        after["_features"] = columns
        return pairs

    def _fit_frame(self, frame: Any) -> tuple[Any, Any]:
        """The view that ``frame`` goes to and the frame as it is written there, or an error."""
        return None, None

    def _clear_frames(self) -> None:
        """Forget all frames."""

    # ---- reading ----

    def __len__(self) -> int:
        return min(self._n_added, self.size)

    @property
    def full(self) -> bool:
        """Whether the next record takes the place of another."""
        return self._n_added >= self.size

    def _places(self, index: Any) -> Any:
        """Where the records that ``index`` selects lie."""
        if self._unfinished is not None:
            with self._lock:
                self._recover()
        n = len(self)
        first = self._n_added % self.size if self.full else 0
        try:
            selected: Any = np.arange(*index.indices(n)) if isinstance(index, slice) else np.asarray(index)
        except (TypeError, ValueError) as problem:
            raise IndexOutOfRangeError(f"{index!r} selects no records: {problem}") from problem
        if not isinstance(index, slice):
            if selected.dtype == bool:
                if selected.shape != (n,):
                    raise IndexOutOfRangeError(f"a mask of shape {selected.shape} for {n} records")
                selected = np.flatnonzero(selected)
            elif selected.dtype.kind not in "iu" and selected.size:
                raise IndexOutOfRangeError(f"records are selected by whole numbers, slices or masks, not {index!r}")
            if ((selected < -n) | (selected >= n)).any():
                raise IndexOutOfRangeError(f"index {index} is out of bounds for {n} records")
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

    # ---- copies ----

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            self._recover()
            state = {name: value for name, value in vars(self).items() if name not in ("_lock", "_unfinished")}
            # pickle looks at these later on: they must not change until then
            return copy.deepcopy(state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = fork_safe_lock(of_buffer=True)

    # ---- files and pictures ----

    @property
    def lock(self) -> Any:
        """Held while this is changed or saved."""
        return self._lock

    def to_parts(self) -> Parts:
        """What this is made of, for a file: a tag, a description, columns and stores."""
        from sb3_extra_buffers.files.registry import registered_parts

        with self._lock:
            self._recover()
            return registered_parts(self)

    def save(self, path: str | os.PathLike[str]) -> Path | None:
        """Write all records to one file, which `load` reads; no pickle is involved."""
        from sb3_extra_buffers.files.saving import save_file

        return save_file(self, path)

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
            raise SpecMismatchError(f"res is height and width, got {res!r}")
        self.res = (check_count(sides[0], "the height in res"), check_count(sides[1], "the width in res"))
        self.ch_num = check_count(ch_num, "ch_num")
        try:
            self.dtype = np.dtype(dtype)
        except TypeError as problem:
            raise SpecMismatchError(f"dtype {dtype!r} is none: {problem}") from problem
        if not isinstance(compression_kwargs, Mapping | None):
            raise CodecOptionError(f"compression_kwargs must be a dict of options, got {compression_kwargs!r}")
        if not isinstance(compression_method, str):
            raise UnknownCodecError(f"compression_method must be a method's name, got {compression_method!r}")
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

    def _fit_frame(self, frame: Any) -> tuple[Any, Any]:
        try:
            array = np.asarray(frame)
        except (TypeError, ValueError) as problem:
            raise SpecMismatchError(f"a frame is {type(frame).__name__}, which is no array: {problem}") from problem
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
        return self._frames if array.shape == self.frame_shape else self._make_frames(array.shape), array

    def _read_frame(self, places: Any) -> Any:
        return self._frames[places]

    @property
    def frames(self) -> StoreView:
        """All frames, oldest first: indexes like an array, and decodes what is asked for."""
        return StoreView(self._frames.store, (len(self),), indices=self._order())

    def _clear_frames(self) -> None:
        self._frames.store.clear()

    def memory_usage(self) -> MemoryUsage:
        return self._frames.memory_usage() + super().memory_usage()


class FramelessRecordBuffer(BaseRecordBuffer):
    """Records rewards, actions and features; frames are taken and dropped.

    It takes the arguments of `RecordBuffer`, so that one can stand in for the other.
    """

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

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__(1)

    def add(self, frame: Any = None, reward: Any = None, action: Any = None, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def end_episode(self) -> None:
        """Do nothing."""

    def to_parts(self) -> Parts:
        raise NotSaveableError("a DummyRecordBuffer records nothing that could be saved")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write nothing."""

    def export(self, path: str | os.PathLike[str], *_: Any, **__: Any) -> None:
        """Write nothing."""

    @classmethod
    def load(cls, path: str | os.PathLike[str], compression_method: str | None = None) -> Self:
        raise EmptyBufferError("a DummyRecordBuffer writes no file that could be read")
