"""`BaseRecordBuffer`: a ring of records, written in transactions."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.arguments import check_count
from sb3_extra_buffers.errors import SpecMismatchError
from sb3_extra_buffers.recording.columns import Column, Target, as_scalar
from sb3_extra_buffers.recording.records import Episode, Record, find_episodes, resolve_index
from sb3_extra_buffers.stores.checks import require
from sb3_extra_buffers.stores.locks import fork_safe_lock
from sb3_extra_buffers.stores.reentry import is_inside, refuse, writes
from sb3_extra_buffers.stores.usage import MemoryUsage
from sb3_extra_buffers.stores.view import StoreView

if TYPE_CHECKING:
    from gymnasium import spaces
    from typing_extensions import Self

    from sb3_extra_buffers.files.parts import LoadedParts, Parts

__all__ = ["BaseRecordBuffer"]

Array = npt.NDArray[Any]

_RESET = "reset"


@dataclass(slots=True)
class _Change:
    """A validated change of a buffer: everything that is left to write."""

    position: int
    targets: list[Target]
    attributes: dict[str, Any]
    """New values of the buffer's attributes, set in one call after everything else is written."""
    frames: StoreView | None = None
    frame: Array | None = None
    frame_written: bool = False


class BaseRecordBuffer:
    """The last ``size`` records: once the buffer is full, each new record replaces the oldest.

    ``buffer[0]`` is the oldest record and ``buffer[-1]`` the newest. An invalid record raises and changes nothing.
    After any other exception, such as a ``KeyboardInterrupt``, the buffer holds the whole record or none of it.

    Args:
        size: Maximum number of records.
        action_space: Space that actions must belong to; None if the first action sets their shape and dtype.
        features: Dtype of each named feature that a record may have, such as
            ``{"health": "float32", "position": ("float32", (3,))}``; None if the first value of each sets it.

    Examples:
        >>> from sb3_extra_buffers.recording import BaseRecordBuffer, RecordBuffer
        >>> isinstance(RecordBuffer(size=100), BaseRecordBuffer)
        True
    """

    # what an exception interrupted: a change, `_RESET`, or None
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
        # whether the record is the first of an episode
        self._starts = np.zeros(self.size, bool)
        # whether the newest record ended its episode
        self._ended = True
        self._actions = Column("action", self.size)
        self._features: dict[str, Column] = {}
        # whether records may have other features
        self._declared = features is not None
        if features is not None:
            if not isinstance(features, Mapping) or not all(isinstance(name, str) for name in features):
                raise SpecMismatchError(f"features must map names to dtypes, got {features!r}")
            self._features = {name: Column(f"feature {name!r}", self.size, dtype) for name, dtype in features.items()}

    # ---- writing ----

    def add(self, frame: Any, reward: Any, action: Any, features: Any = None, done: Any = False) -> None:
        """Record a step.

        Args:
            frame: What the agent saw when it acted.
            reward: Reward for the action.
            action: What the agent did: a number, an array, or dicts and tuples of them.
            features: Additional values by name, any of which a record may lack; a bare value is recorded as
                ``"features"``.
            done: Whether the episode ended with this step.
        """
        with self._lock:
            self._ensure_recovered()
            # check everything and allocate memory before anything is written
            frames, array = self._check_frame(frame)
            number, ended = as_scalar(reward, "reward"), bool(as_scalar(done, "done"))
            attributes: dict[str, Any] = {"_n_added": self._n_added + 1, "_ended": ended, "_unfinished": None}
            if frames is not None:
                attributes["_frames"] = frames
            targets = self._check_action(action, attributes) + self._check_features(features, attributes)
            targets += [(self._rewards, number), (self._starts, self._ended), (self._dones, ended)]
            self._apply(_Change(self._n_added % self.size, targets, attributes, frames, array))

    def end_episode(self) -> None:
        """Mark the newest record as the last of its episode."""
        with self._lock:
            self._ensure_recovered()
            targets: list[Target] = [(self._dones, True)] if len(self) else []
            self._apply(_Change((self._n_added - 1) % self.size, targets, {"_ended": True, "_unfinished": None}))

    @writes
    def reset(self) -> None:
        """Remove all records."""
        with self._lock:
            if isinstance(self._unfinished, _Change):
                self._ensure_recovered()
            try:
                self._unfinished = _RESET
                self._clear_frames()
                self.__dict__.update(_n_added=0, _ended=True, _unfinished=None)
            except BaseException:
                self._recover()
                raise

    @writes
    def _apply(self, change: _Change) -> None:
        """Make ``change``; after an exception, all of it or none of it."""
        if change.frames is not None:
            change.frames.store.commit()  # `undo_write` takes back what is written from here on
        try:
            self._unfinished = change
            if change.frames is not None:
                change.frames[change.position] = change.frame
                change.frame_written = True
            self._finish(change)
        except BaseException:
            self._recover()
            raise

    def _finish(self, change: _Change) -> None:
        """Write everything but the frame; repeating this after an interrupt is harmless."""
        for array, value in change.targets:
            array[change.position] = value
        # one call into C, which signal handlers cannot interrupt
        self.__dict__.update(change.attributes)

    @writes
    def _ensure_recovered(self) -> None:
        """`_recover`, unless a change is still running: then this call comes from a signal handler inside it."""
        if self._unfinished is not None and is_inside(lambda owner: owner is self):
            raise refuse(f"this {type(self).__name__}")
        self._recover()

    def _recover(self) -> None:
        """Finish or undo what an exception interrupted. If this is interrupted as well, the next call completes it."""
        change = self._unfinished
        if change is None:
            return
        if not isinstance(change, _Change):
            self.reset()
        elif change.frames is not None and not change.frame_written:
            change.frames.store.undo_write()
            self._unfinished = None
        else:
            self._finish(change)

    def _check_action(self, action: Any, attributes: dict[str, Any]) -> list[Target]:
        if self.action_space is not None:
            try:
                contained = self.action_space.contains(action)
            except (TypeError, ValueError, AttributeError, IndexError):
                contained = False
            if not contained:
                raise SpecMismatchError(f"action {action!r} is not in {self.action_space}")
        attributes["_actions"], targets = self._actions.prepare(action)
        return targets

    def _check_features(self, features: Any, attributes: dict[str, Any]) -> list[Target]:
        if features is None:
            named: dict[str, Any] = {}
        elif isinstance(features, Mapping):
            named = {str(name): value for name, value in features.items()}
            if len(named) != len(features):
                raise SpecMismatchError(f"features {list(features)} have names that are equal as strings")
        else:
            named = {"features": features}
        columns = attributes["_features"] = dict(self._features)
        new = named.keys() - columns.keys()
        if new and self._declared:
            raise SpecMismatchError(f"got features {sorted(named)}, but this buffer was created for {sorted(columns)}")
        for name in named:
            if name in new:
                columns[name] = column = Column(f"feature {name!r}", self.size)
                if self._n_added:
                    column.missing = np.zeros(self.size, np.bool_)
                    column.missing[: len(self)] = True
        targets: list[Target] = []
        for name, column in columns.items():
            prepared = column.prepare(named[name]) if name in named else column.prepare_missing()
            columns[name], column_targets = prepared
            targets += column_targets
        return targets

    def _check_frame(self, frame: Any) -> tuple[StoreView | None, Array | None]:
        """Return the view to write ``frame`` to and the frame as an array, or raise if it is invalid."""
        return None, None

    def _clear_frames(self) -> None:
        """Remove all frames; may be repeated."""

    # ---- reading ----

    def __len__(self) -> int:
        return min(self._n_added, self.size)

    def __bool__(self) -> bool:
        # as without __len__: an empty recording is still a recording
        return True

    @property
    def full(self) -> bool:
        """Whether the next record replaces the oldest."""
        return self._n_added >= self.size

    def _positions(self, index: Any) -> Any:
        """Return the positions in the ring of the records that ``index`` selects."""
        if self._unfinished is not None:
            with self._lock:
                self._ensure_recovered()
        positions = (resolve_index(index, len(self)) + self._oldest) % self.size
        return int(positions) if positions.ndim == 0 else positions

    @property
    def _oldest(self) -> int:
        return self._n_added % self.size if self.full else 0

    def _order(self) -> npt.NDArray[np.int64]:
        """Return the positions of all records, oldest first."""
        positions: npt.NDArray[np.int64] = self._positions(slice(None))
        return positions

    def __getitem__(self, index: Any) -> Record:
        """Return one record; for a slice, mask or list of integers, a `Record` with an additional leading axis.

        A feature that some of several records lack is a masked array; one record has only the features it was given.
        """
        positions = self._positions(index)
        return Record(
            self._read_frames(positions),
            self._rewards[positions],
            self._actions.read(positions),
            {name: column.read(positions) for name, column in self._features.items() if column.has(positions)},
            self._dones[positions],
        )

    def __iter__(self) -> Iterator[Record]:
        return (self[index] for index in range(len(self)))

    def _read_frames(self, positions: Any) -> Any:
        return None

    @property
    def frames(self) -> StoreView | None:
        """All frames, oldest first, decoded when indexed; None if the buffer records no frames."""
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
        """All features by name, oldest first; a masked array where some records lack the feature."""
        positions = self._order()
        return {name: column.read(positions) for name, column in self._features.items()}

    @property
    def dones(self) -> npt.NDArray[np.bool_]:
        """Whether each record is the last of its episode, oldest first."""
        return self._dones[self._order()]

    @property
    def episodes(self) -> list[Episode]:
        """Episodes, oldest first; the first may have lost its beginning, the last may not have ended."""
        positions = self._order()
        return find_episodes(self._dones[positions], self._starts[positions], self._rewards[positions])

    def memory_usage(self) -> MemoryUsage:
        """The memory that the buffer holds, and what plain arrays would hold for the same records."""
        arrays: list[Any] = [*self._plain_columns().values(), *self._nested_columns().values()]
        # memory that was never written is not resident
        columns = sum(array.nbytes for array in arrays) * len(self) // self.size
        return MemoryUsage(other=columns, transitions=len(self), dense=columns, baseline="NumPy arrays")

    def _plain_columns(self) -> dict[str, Array]:
        return {"rewards": self._rewards, "dones": self._dones, "starts": self._starts}

    def _nested_columns(self) -> dict[str, Column]:
        """Columns of actions and features, by their names in files."""
        features = {f"feature {name}": column for name, column in self._features.items()}
        return {"action": self._actions} | features

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} of {self.size} records)"

    # ---- copies ----

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            self._ensure_recovered()
            state = {name: value for name, value in vars(self).items() if name not in ("_lock", "_unfinished")}
            # pickle reads the state after the lock is released
            return copy.deepcopy(state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = fork_safe_lock(of_buffer=True)

    # ---- files ----

    @property
    def lock(self) -> Any:
        """Held while the buffer is changed or saved."""
        return self._lock

    def to_parts(self) -> Parts:
        """Return what is written to a file: a tag, a description, columns and stores."""
        from sb3_extra_buffers.files.parts import Parts

        with self._lock:
            self._ensure_recovered()
            n = len(self)
            arrays = {name: array[:n] for name, array in self._plain_columns().items()}
            structures: dict[str, Any] = {}
            for key, column in self._nested_columns().items():
                structures[key], column_arrays = column.to_parts(key, n)
                arrays |= column_arrays
            description = {
                "size": self.size,
                "n_records": n,
                "oldest": self._oldest,
                "ended": self._ended,
                "features": list(self._features),
                "shapes": structures,
                "frames": None,
            }
            return Parts("recording", description, arrays, {})

    def _restore_columns(self, parts: LoadedParts) -> None:
        """Fill a new buffer with everything but the frames in ``parts``, all of which is checked."""
        n = parts.number("n_records", stop=self.size + 1)
        oldest = parts.number("oldest", stop=self.size if n == self.size else 1)
        for name, array in self._plain_columns().items():
            array[:n] = parts.column(name, array.dtype, (n,))
        self._n_added, self._ended = n + oldest, parts.entry("ended", kind=bool)
        self._check_episodes()
        names = parts.entry("features")
        if names is not None:
            valid = isinstance(names, list) and all(isinstance(name, str) for name in names)
            require(valid and len(set(names)) == len(names), f"features {names!r} are not a list of distinct names")
            self._features = {name: Column(f"feature {name!r}", self.size) for name in names}
        columns, structures = self._nested_columns(), parts.entry("shapes", kind=dict)
        require(structures.keys() == columns.keys(), f"got columns {sorted(structures)}, expected {sorted(columns)}")
        known = {*self._plain_columns()}
        for key, column in columns.items():
            entry = structures[key]
            if entry is None:
                require(not n or key != "action", f"the {n} records have no actions")
            else:
                known |= column.restore(parts, key, entry, n)
        require(known == parts.columns.keys(), f"unknown columns: {sorted(parts.columns.keys() - known)}")

    def _check_episodes(self) -> None:
        """Raise unless an episode starts exactly where the one before it ended."""
        order = self._order()
        dones, starts = self._dones[order], self._starts[order]
        consistent = bool((starts[1:] == dones[:-1]).all()) and self._ended == (bool(dones[-1]) if len(dones) else True)
        require(consistent and (not len(dones) or self.full or bool(starts[0])), "episodes start where none ended")

    def save(self, path: str | os.PathLike[str]) -> Path | None:
        """Write all records to the file ``path``, without pickle; `load` reads it."""
        from sb3_extra_buffers.files.saving import save_file

        return save_file(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], compression_method: str | None = None) -> Self:
        """Read the file ``path`` that `save` wrote; ``compression_method`` recompresses the frames."""
        from sb3_extra_buffers.files.loading import load_file

        if not os.path.exists(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        loaded: Self = load_file(path, cls)
        if compression_method is not None:
            loaded.recompress(compression_method)
        return loaded

    def recompress(self, compression_method: str) -> None:
        """Compress all frames again with ``compression_method``; does nothing if the buffer records no frames."""

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
        """Write frames as an animation (``.gif``, ``.mp4``) or as a contact sheet (``.png``).

        Args:
            path: File to write; its suffix selects the format.
            which: An episode, a slice of records or one record; None for all.
            fps: Frames per second.
            scale: Factor by which pixels are enlarged.
            channels: One or three channels to show; None for the newest frame of a stack.
            stretch: Map the smallest value to black and the largest to white, for example to make labels visible.
        """
        from sb3_extra_buffers.recording.export import export

        return export(self, path, which, fps=fps, scale=scale, channels=channels, stretch=stretch)
