"""The interface of every store on the host, and what a saved store is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.spec import ByteRows
from sb3_extra_buffers.errors import SpecMismatchError
from sb3_extra_buffers.kernels.policy import ReadWork, read_ns, write_ns
from sb3_extra_buffers.stores.usage import MemoryUsage

if TYPE_CHECKING:
    from sb3_extra_buffers.stores.frames import FrameStore
    from sb3_extra_buffers.stores.heap import Heap
    from sb3_extra_buffers.stores.layout import StackLayout

Indices = npt.NDArray[np.int64]
Array = npt.NDArray[Any]
#: Fills an empty heap from saved payloads; called with the heap and the payload ids, oldest first.
FillHeap = Callable[["Heap", npt.NDArray[np.int32]], None]


class Trial(NamedTuple):
    """Estimated memory and times of a store, from a trial on some observations."""

    frame_bytes: float
    """Average bytes per stored frame; each distinct frame is stored once."""
    read_ns: float
    """Modelled nanoseconds to read an observation and its successor in a large batch."""
    write_ns: float
    """Modelled nanoseconds to write a new frame, on average."""
    step_ns: float
    """The part of `write_ns` that is spent in every write; the rest is spent in the write that completes a segment."""


class Store(ABC):
    """Observations as rows of bytes, behind indices that count from 0.

    An index that was never written reads as zeros. Row ``i`` of a write continues stream ``streams[i]``; streams only
    help to encode. Rows are read back exactly as they were written.

    A write is a transaction. Whatever interrupts it leaves ``dirty`` set, and the next call restores what the store
    held before (`recover`). A completed write can be undone until the next change or `commit` (`undo_write`).

    Stores are created by `registry.make_store`. They are not thread-safe, except that several threads may `read` while
    ``dirty`` is unset and no thread changes anything; `ObservationStore` takes care of that.
    """

    #: Whether a change was interrupted or is under way.
    dirty: bool
    #: How observations are cut into frames; None if they are kept whole.
    layout: StackLayout | None = None
    #: Holds encoded observations; None if there are none.
    heap: Heap | None = None

    @property
    def frames(self) -> FrameStore | None:
        """The frame store that holds the payloads; None if there is none."""
        return None

    @classmethod
    @abstractmethod
    def accepts(cls, codec: Codec, layout: StackLayout) -> bool:
        """Whether this kind of store can keep frames of ``layout`` that ``codec`` encodes."""

    @abstractmethod
    def allocate(self, n_obs: int) -> None:
        """Append ``n_obs`` unwritten observations."""

    @abstractmethod
    def write(self, indices: Indices, streams: Indices, rows: ByteRows) -> None:
        """Store one row per index."""

    def write_step(self, index: int, next_index: int, rows: ByteRows, next_rows: ByteRows) -> None:
        """Store a row of every stream from ``index`` on, and their successors from ``next_index`` on, as one write."""
        streams = np.arange(len(rows))
        indices = np.concatenate([streams + index, streams + next_index])
        self.write(indices, np.concatenate([streams, streams]), np.concatenate([rows, next_rows]))

    @abstractmethod
    def read(self, indices: Indices) -> ByteRows:
        """Return new rows of shape ``[*indices.shape, nbytes]``; ``indices`` has one axis, or two: ``[set, n]``."""

    def read_windows(self, indices: Indices, newest_only: bool = False, out: ByteRows | None = None) -> ByteRows:
        """Return rows of shape ``[batch, length, nbytes]``: in ``out``, which is C-contiguous, or in new memory.

        ``indices [batch, length]`` may be any; decoding is fastest if each row of them is a window, consecutive
        observations of one stream. ``newest_only`` returns the newest frame of each stack instead of observations; a
        store without stacks ignores it.
        """
        rows = self.read(indices.reshape(-1))
        rows = rows.reshape(*indices.shape, rows.shape[-1])
        if newest_only and self.layout is not None:
            rows = self.layout.newest(rows)
        return put_rows(out, rows)

    @abstractmethod
    def erase(self, indices: Indices) -> None:
        """Make ``indices`` unwritten, and free what they took."""

    @abstractmethod
    def clear(self) -> None:
        """Make every index unwritten; what the codec has learnt stays."""

    @abstractmethod
    def recover(self) -> None:
        """Restore the state before a change that was interrupted, if there was one. Can be interrupted itself."""

    @abstractmethod
    def commit(self) -> None:
        """Make the last write permanent."""

    @abstractmethod
    def undo_write(self) -> bool:
        """Undo the last write; return False if it was committed or something else was changed since."""

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """An upper bound of what `memory_usage` counts, cheap enough for every step."""

    @abstractmethod
    def memory_usage(self) -> MemoryUsage:
        """Bytes in use, by purpose; all else is left to the caller."""

    @abstractmethod
    def count_written(self) -> int:
        """How many indices were written; a frame store takes observations of zeros for unwritten ones."""

    @abstractmethod
    def check(self) -> None:
        """Raise `AssertionError` if the tables contradict each other."""

    @abstractmethod
    def describe(self) -> str:
        """The method in use, as a user would write it."""

    def train(self, rows: ByteRows) -> None:  # noqa: B027  # most codecs have nothing to learn
        """Let the codec learn from ``rows``; before anything is written."""

    def use_heap(self, make_heap: Callable[[], Heap]) -> None:  # noqa: B027  # a store without a heap ignores it
        """Keep encoded observations in a heap of another kind; before anything is written."""

    def find_written(self) -> Indices | None:
        """The written indices in ascending order, possibly with some that read as zeros; None means all indices."""
        return None

    @classmethod
    def trial(cls, layout: StackLayout, codec: Codec, streams: Indices, rows: ByteRows, n_streams: int) -> Trial:
        """Estimate what ``rows`` would need in a store of this class; row ``i`` continues stream ``streams[i]``.

        Times are modelled (`kernels.policy`), never measured: the same observations always lead to the same choice.
        This default assumes that each frame is decoded by itself.
        """
        nbytes = cls.trial_bytes(layout, codec, streams, rows, n_streams)
        n_frames, size = layout.stack + 1, layout.frame_bytes
        work = ReadWork(2 * layout.spec.nbytes, n_frames, n_frames * size, n_frames * nbytes)
        return Trial(nbytes, read_ns(codec.codec_id, work), *write_ns(codec.codec_id, size, nbytes))

    @classmethod
    @abstractmethod
    def trial_bytes(cls, layout: StackLayout, codec: Codec, streams: Indices, rows: ByteRows, n_streams: int) -> float:
        """The bytes per frame that ``rows`` would take in such a store, on average."""

    @abstractmethod
    def to_parts(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """Return a JSON-ready record and the arrays to save; the arrays are the store's own, valid until it changes."""

    @abstractmethod
    def __getstate__(self) -> dict[str, Any]:
        """A copy that later writes do not change."""

    @abstractmethod
    def __setstate__(self, state: dict[str, Any]) -> None: ...


def rows_for(out: ByteRows | None, shape: tuple[int, ...]) -> ByteRows:
    """Return ``out`` if it can hold rows of ``shape``, new memory if it is None; raise otherwise."""
    if out is None:
        return np.empty(shape, np.uint8)
    if out.shape != shape or out.dtype != np.uint8 or not out.flags.carray:
        raise SpecMismatchError(
            f"out must be a writable C-contiguous array of shape {shape} and dtype uint8, "
            f"got shape {out.shape} and dtype {out.dtype}"
        )
    return out


def put_rows(out: ByteRows | None, rows: ByteRows) -> ByteRows:
    """``rows``, copied to ``out`` if it is given."""
    if out is None:
        return rows
    rows_for(out, rows.shape)[...] = rows
    return out


class FrozenStore:
    """The copied state of a store."""

    def __init__(self, store: type[Store], state: dict[str, Any]) -> None:
        self.store, self.state = store, state

    @classmethod
    def of(cls, store: Store) -> FrozenStore:
        """Copy the state of ``store``."""
        return cls(type(store), store.__getstate__())

    def thaw(self) -> Store:
        """Return a store with this state."""
        thawed = object.__new__(self.store)
        thawed.__setstate__(dict(self.state))
        return thawed


class StoreParts(NamedTuple):
    """A store to be saved: settings as JSON, tables as arrays, payloads in a heap."""

    record: dict[str, Any]
    arrays: dict[str, Array]
    heap: Heap | None
    inner: FrameStore | None
