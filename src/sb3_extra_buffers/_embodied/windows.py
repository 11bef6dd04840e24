"""`WindowStore`: windows of consecutive steps of several streams, for `CompressedEmbodiedReplay`."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sb3_extra_buffers._embodied.chunks import NONE, Change, ChunkTable, Entry
from sb3_extra_buffers._embodied.steps import Step, StepStore
from sb3_extra_buffers.stores.arena import lengthen
from sb3_extra_buffers.stores.base import Indices
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.reentry import writes
from sb3_extra_buffers.stores.transactions import Transactional

# limits the size of chunks to a share of the capacity: evicted steps of each stream's oldest chunk still take memory
_CHUNKS_PER_CAPACITY, _MIN_CHUNK = 64, 16
# chunks in addition to those that the capacity fills, because each stream has two that are partly used
_SPARE_CHUNKS = 128
# steps that are copied at a time from one replay to another
_BLOCK = 1024


class _Stream(NamedTuple):
    """The steps of one worker. Its next window begins at ``start`` in ``start_chunk``; it has ``n_pending`` steps."""

    number: int
    chunk: int = NONE
    n_used: int = 0
    start_chunk: int = NONE
    start: int = 0
    n_pending: int = 0
    n_added: int = 0


# a copied stream: the id of the other replay, and how many steps this one had before the stream, which tells it apart
_Followed = tuple[bytes, int, int]


class WindowStore(Transactional):
    """The newest ``capacity`` windows of ``length`` consecutive steps of one stream; None for no limit.

    Windows are numbered in the order in which their last steps were added. The numbers ``_first_window`` to
    ``_next_window - 1`` are held.
    """

    def __init__(
        self,
        length: int,
        capacity: int | None,
        chunksize: int,
        online: bool,
        compressed_keys: Sequence[str] | None,
        compression_method: str,
        compression_kwargs: Mapping[str, Any],
    ) -> None:
        self._make_lock()
        self.length, self.capacity, self.chunksize, self.online = length, capacity, chunksize, online
        self.compressed_keys = None if compressed_keys is None else tuple(compressed_keys)
        self.compression_method, self.compression_kwargs = compression_method, dict(compression_kwargs)
        #: The first bytes of the ids of all steps of this replay, which no other replay has.
        self.replay_id = secrets.token_bytes(8)
        self._steps: StepStore | None = None
        size = chunksize
        if capacity is not None:
            size = min(size, max(capacity // _CHUNKS_PER_CAPACITY, _MIN_CHUNK))
        self._table = ChunkTable(size, self._n_chunks(size))
        self._streams: dict[Hashable, _Stream] = {}
        # how many steps of other replays, by their ids, have been loaded or were evicted before they could be
        self._n_loaded: dict[bytes, int] = {}
        # the number of the last step of each stream that another replay may continue, by the name of its copy here
        self._followed: dict[_Followed, int] = {}
        self._n_streams = self._n_added = 0
        # a ring of the slots that windows begin at
        self._ring: Indices = lengthen(np.zeros(0, np.int64), 1024 if capacity is None else capacity + 1)
        self._first_window = self._next_window = 0
        # windows that `sample` returns next
        self._queue: deque[int] = deque()

    def _n_chunks(self, size: int) -> int:
        if self.capacity is None:
            return _SPARE_CHUNKS
        return -(-(self.capacity + self.length) // size) + _SPARE_CHUNKS

    def __len__(self) -> int:
        """The number of windows."""
        return self._next_window - self._first_window

    # ---- adding ----

    @writes
    def _add_step(self, step: Step, worker: Hashable, copied: Sequence[Entry] = ()) -> None:
        """Add a step, which must match the first step, to the stream of ``worker``; with it, set ``copied``."""
        with self._lock:
            self._ensure_recovered()
            steps = self._steps
            if steps is None:
                how = self.compressed_keys, self.compression_method, self.compression_kwargs
                steps = StepStore.for_step(step, self._table.n_slots, *how)
            step = steps.check(step)
            position = self._n_added
            try:
                self._add(steps, step, worker, copied)
            except BaseException as problem:
                self._fail(problem, position)

    def _add(self, steps: StepStore, step: Step, worker: Hashable, copied: Sequence[Entry]) -> None:
        stream = self._streams.get(worker)
        if stream is None:
            stream = _Stream(self._n_streams)
            steps.add_stream(stream.number)
        table = self._reserve(steps)
        change = Change([*copied], {"_steps": steps, "_n_added": self._n_added + 1, "_unfinished": None})
        change.attributes["_n_streams"] = max(self._n_streams, stream.number + 1)
        stream = self._plan_step(change, stream)
        slot = stream.chunk * table.size + stream.n_used - 1
        change.set(self._streams, worker, stream)
        for key, column in steps.columns.items():
            change.set(column, slot, step[key])
        self._begin_step()
        steps.write_images(slot, stream.number, step)
        # from here on, the step is completed whatever happens
        self._unfinished = change
        self._finish_step(change)
        if change.attributes.get("_next_window") is not None:
            self._window_added()
            self._evict()

    def _window_added(self) -> None:
        """Called when there is a new window, before the oldest is evicted."""

    def _reserve(self, steps: StepStore) -> ChunkTable:
        """Make sure that there is an unused chunk, and space for another window."""
        table = self._table
        if table.is_full:
            # not twice as many: a store takes two ranges of equal size for observations and next observations
            n_chunks = len(table) + len(table) // 2 + 1
            steps.reserve(n_chunks * table.size)
            table.grow(n_chunks)
        if len(self) >= len(self._ring):
            windows = np.arange(self._first_window, self._next_window)
            longer: Indices = lengthen(np.zeros(0, np.int64), 2 * len(self._ring))
            longer[windows % len(longer)] = self._ring[windows % len(self._ring)]
            self._ring = longer
        return table

    def _plan_step(self, change: Change, stream: _Stream) -> _Stream:
        """Plan the slot of the next step of ``stream`` and the window that it completes; return the updated stream."""
        table, before = self._table, NONE
        chunk, n_used, start_chunk, start = stream.chunk, stream.n_used, stream.start_chunk, stream.start
        if chunk == NONE or n_used == table.size:
            before = chunk
            chunk, n_references = table.begin(change, before)
            n_used = 0
            if start_chunk == NONE or (start_chunk == before and start == table.size):
                start_chunk, start = chunk, 0
        else:
            n_references = int(table.references[chunk])
        # a reference for the step, because a window may begin with it
        change.set(table.references, chunk, n_references + 1)
        change.set(table.used, chunk, n_used + 1)
        change.set(table.numbers, chunk * table.size + n_used, self._n_added)
        n_pending, n_added = stream.n_pending + 1, stream.n_added + 1
        if n_pending >= self.length:
            window = self._next_window
            change.set(self._ring, window % len(self._ring), start_chunk * table.size + start)
            change.attributes["_next_window"] = window + 1
            if self.online and n_added % self.length == 0:
                change.online = window
            start, n_pending = start + 1, n_pending - 1
            if start == table.size and n_pending:
                # now, because the chunk may be freed, and its link lost, before the next step of the stream
                start_chunk = chunk if start_chunk == before else int(table.successors[start_chunk])
                start = 0
        return _Stream(stream.number, chunk, n_used + 1, start_chunk, start, n_pending, n_added)

    def _evict(self, limit: int | None = None) -> None:
        """Remove the oldest windows until there are at most ``limit``, by default `capacity`."""
        limit = self.capacity if limit is None else limit
        while limit is not None and len(self) > limit:
            change = Change(attributes={"_first_window": self._first_window + 1, "_unfinished": None})
            self._table.evict(change, int(self._ring[self._first_window % len(self._ring)]))
            self._unfinished = change
            self._finish_step(change)

    def _slots_of(self, windows: Sequence[int]) -> Indices:
        starts = self._ring[np.asarray(windows, np.int64) % len(self._ring)]
        return self._table.window_slots(starts, self.length)

    # ---- transactions ----

    def _written_stores(self) -> list[ObservationStore]:
        return [] if self._steps is None else list(self._steps.stores.values())

    def _finish_step(self, unfinished: Change) -> None:
        unfinished.apply()
        window = unfinished.online
        if window is not None and (not self._queue or self._queue[-1] < window):
            self._queue.append(window)
        if unfinished.freed and self._steps is not None:
            size = self._table.size
            for chunk in unfinished.freed:
                self._steps.erase(chunk * size, (chunk + 1) * size)
        # one call into C, which signal handlers cannot interrupt
        self.__dict__.update(unfinished.attributes)

    def _recover(self) -> None:
        if self._unfinished is not None:
            super()._recover()
        if not self.read_only:
            self._evict()

    def _position(self) -> int:
        return self._n_added

    def check(self) -> None:
        """Raise `AssertionError` if windows, streams and chunks contradict each other; for tests."""
        with self._lock:
            self._ensure_recovered()
            table = self._table
            held = np.arange(self._first_window, self._next_window)
            counts = np.bincount(self._ring[held % len(self._ring)] // table.size, minlength=len(table))
            for stream in self._streams.values():
                counts[stream.chunk] += 1
                pending = table.window_slots(np.array([stream.start_chunk * table.size + stream.start]), self.length)
                np.add.at(counts, pending[0, : stream.n_pending] // table.size, 1)
            following = table.successors[table.serials > 0]
            np.add.at(counts, following[following != NONE], 1)
            if not np.array_equal(counts, table.references):
                raise AssertionError("the reference count of a chunk is wrong")
            if not np.array_equal(counts > 0, table.serials > 0) or len(table.by_serial) != (counts > 0).sum():
                raise AssertionError("a chunk is in use that nothing refers to, or the reverse")
            if self._steps is not None and not self.read_only:
                for store in self._steps.stores.values():
                    store.check()

    # ---- loading ----

    def _take_over(self, loaded: WindowStore, amount: int | None = None) -> None:
        """Take the steps of ``loaded``, which must not be used afterwards."""
        if loaded._steps is None:
            return
        starts = loaded._restore_windows(self.length)
        first = self._next_window
        n_ring = max(len(self._ring), len(starts) + 1)
        ring: Indices = lengthen(np.zeros(0, np.int64), n_ring)
        ring[(first + np.arange(len(starts))) % n_ring] = starts
        self.__dict__.update(
            _steps=loaded._steps, _table=loaded._table, replay_id=loaded.replay_id, _n_added=loaded._n_added,
            _streams={}, _n_streams=0, _ring=ring, _first_window=first, _next_window=first + len(starts),
            _queue=deque(), _followed={},
        )  # fmt: skip
        self._n_loaded[loaded.replay_id] = loaded._n_added
        self._evict()
        if amount is not None:
            self._evict(amount)

    def _restore_windows(self, length: int) -> Indices:
        """End all streams; return the slots that windows begin at."""
        assert self._steps is not None
        starts, freed = self._table.close_streams(length)
        size = self._table.size
        for chunk in freed:
            if not self.read_only:
                self._steps.erase(chunk * size, (chunk + 1) * size)
        return starts

    def _copy(self, other: WindowStore) -> None:
        """Add the steps of ``other`` that have not been loaded before: to copies of its streams, or as new streams."""
        if other._steps is None:
            return
        name, begun = other.replay_id, self._n_added
        known = self._n_loaded.get(name, 0)
        if name == self.replay_id:
            known = max(known, self._n_added)
        followed = {number: copy for copy, number in self._followed.items() if copy[0] == name}
        ends = np.array([*followed], np.int64)
        all_numbers, copies, chains = other._table.numbers, [], []
        for _, slots in other._table.chains():
            numbers = all_numbers[slots]
            copied = np.flatnonzero(np.isin(numbers, ends))
            if len(copied):
                copies.append(followed[int(numbers[copied[-1]])])
                chains.append(slots[copied[-1] + 1 :])
            else:
                copies.append((name, begun, len(copies)))
                chains.append(slots[numbers >= known])
        slots = np.concatenate(chains) if chains else np.zeros(0, np.int64)
        streams = np.repeat(np.arange(len(chains)), [len(chain) for chain in chains])
        order = np.argsort(all_numbers[slots], kind="stable")
        for first in range(0, len(order), _BLOCK):
            part = order[first : first + _BLOCK]
            block = other._steps.read(slots[part][:, None])
            steps = zip(streams[part].tolist(), all_numbers[slots[part]].tolist(), strict=True)
            for row, (stream, number) in enumerate(steps):
                copied_to = copies[stream]
                step = {key: values[row, 0] for key, values in block.items()}
                progress = [(self._n_loaded, name, number + 1), (self._followed, copied_to, number)]
                self._add_step(step, copied_to, progress)
        self._n_loaded[name] = max(known, other._n_added)
        for copy in {*followed.values()} - {*copies}:
            self._end_stream(copy)

    @writes
    def _end_stream(self, worker: Hashable) -> None:
        """Free what only the next steps of this stream would need, if there is one; its windows stay."""
        table = self._table
        while (stream := self._streams.get(worker)) is not None:
            change = Change(attributes={"_unfinished": None})
            chunk, shorter = stream.chunk, None
            if stream.n_pending:
                chunk, start, n_pending = stream.start_chunk, stream.start + 1, stream.n_pending - 1
                shorter = stream._replace(start=start, n_pending=n_pending)
                if start == table.size and n_pending:
                    shorter = shorter._replace(start_chunk=int(table.successors[chunk]), start=0)
            change.set(self._streams, worker, shorter)
            if shorter is None:
                change.set(self._followed, worker, None)
            table.release(change, chunk)
            self._unfinished = change
            self._finish_step(change)
