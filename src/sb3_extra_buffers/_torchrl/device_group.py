"""Keys of the data whose rows live on a GPU: those written in turn as differences, the others as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers._torchrl.groups import Key, steps_of
from sb3_extra_buffers._torchrl.stored_tensor import GroupLeaf, Positions, as_rows, to_numpy
from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec
from sb3_extra_buffers.stores.device_observation import DeviceObservations, DevicePlace, IndexBatch
from sb3_extra_buffers.stores.locks import fork_safe_lock
from sb3_extra_buffers.stores.staging import torch_dtype
from sb3_extra_buffers.stores.usage import MemoryUsage

__all__ = ["DeviceGroup"]

# rows out of turn that are held as they are before everything is put in order: a share of all, and a few at least
_LOOSE_SHARE = 8
_LOOSE_LEAST = 256
# rows that cross to the host at once
_CHUNK = 256


class _Turn(NamedTuple):
    """A store, the step of the data that is its first, and the one whose turn is next; None before the first."""

    store: DeviceObservations
    origin: int = 0
    next: int | None = None


class DeviceGroup:
    """A key, and the one that repeats it, on a GPU, in `DeviceObservations`: what a `Group` is on the host.

    Those are written in turn, step after step, each of all streams. Rows that come in another order, and steps of
    which a part has come, are *loose*: kept as they are, on the same device. When an eighth of all rows is loose,
    everything is written again in the order of the positions.

    A write that was interrupted may be repeated: loose rows are seen before those of the store, and are dropped when
    the store has theirs.
    """

    def __init__(
        self,
        keys: Sequence[Key],
        spec: ObsSpec,
        dtype: torch.dtype,
        n_rows: int,
        n_streams: int,
        device: torch.device,
        method: str,
        options: dict[str, Any],
    ) -> None:
        self.keys = list(keys)
        self.spec, self.dtype, self.n_rows, self.device = spec, dtype, n_rows, device
        self.method, self.options = method, options
        # rows after the last whole step stay loose
        self.n_steps = max(n_rows // n_streams, 1)
        self._turn = _Turn(self._new_store(n_streams, method))
        self.leaves = [GroupLeaf(self, place) for place in range(len(keys))]
        self._loose = [_LooseRows(n_rows, spec, device) for _ in keys]
        self._lock = fork_safe_lock()

    @property
    def store(self) -> DeviceObservations:
        """What is held in turn."""
        return self._turn.store

    def _new_store(self, n_streams: int, method: str) -> DeviceObservations:
        place = DevicePlace(self.device)
        options = self.options if method == self.method else {}
        return DeviceObservations(self.spec, self.n_steps, n_streams, len(self.keys), place, method, options)

    # ---- writing ----

    def write(self, positions: Positions, batches: Sequence[ByteRows]) -> None:
        """Store ``batches`` of rows, one for each key, as if they came one step after the other."""
        n_streams = self.store.n_streams
        with self._lock:
            for first, stop in steps_of(positions, n_streams):
                step = int(positions[first]) // n_streams
                parts = [np.ascontiguousarray(rows[first:stop]) for rows in batches]
                if stop - first == n_streams and self._is_next(step):
                    self._write_step(step, parts)
                    continue
                for loose, rows in zip(self._loose, parts, strict=True):
                    loose.put(positions[first:stop], rows)
                self._complete(step)
            self._put_in_order(int(positions[-1]) // n_streams if len(positions) else 0)

    def write_set(self, place: int, positions: Positions, rows: ByteRows) -> None:
        """Store ``rows`` of one key alone."""
        with self._lock:
            # the last of those for one position counts
            last = np.sort(len(positions) - 1 - np.unique(positions[::-1], return_index=True)[1])
            self._loose[place].put(positions[last], rows[last])
            self._put_in_order(0)

    def _is_next(self, step: int) -> bool:
        return step == self._turn.next if self._turn.next is not None else step < self.n_steps

    def _write_step(self, step: int, rows: Sequence[ByteRows]) -> None:
        store, origin, due = self._turn
        origin = step if due is None else origin
        store.write((step - origin) % self.n_steps, [self.spec.from_rows(part) for part in rows])
        self._turn = _Turn(store, origin, (step + 1) % self.n_steps)
        indices = step * self.store.n_streams + np.arange(self.store.n_streams)
        for loose in self._loose:
            loose.drop(indices)

    def _complete(self, step: int) -> None:
        """Write a step whose turn it is when the last of its rows has come."""
        indices = step * self.store.n_streams + np.arange(self.store.n_streams)
        if self._is_next(step) and all(loose.holds(indices) for loose in self._loose):
            self._write_step(step, [as_rows(self.spec, loose.get(indices)) for loose in self._loose])

    def _put_in_order(self, newest: int) -> None:
        """Write everything again, the step after ``newest`` first, if much of it is loose."""
        if max(loose.count for loose in self._loose) <= max(self.n_rows // _LOOSE_SHARE, _LOOSE_LEAST):
            return
        store, n_streams = self.store, self.store.n_streams
        choice = store.choice
        fresh = self._new_store(n_streams, self.method if choice is None else choice.method)
        first = (newest + 1) % self.n_steps
        per_chunk = max(_CHUNK // n_streams, 1)
        for begin in range(0, self.n_steps, per_chunk):
            steps = (first + np.arange(begin, min(begin + per_chunk, self.n_steps))) % self.n_steps
            indices = (steps[:, None] * n_streams + np.arange(n_streams)).reshape(-1)
            rows = [as_rows(self.spec, part) for part in self._read(range(len(self.keys)), indices)]
            for place in range(len(steps)):
                part = slice(place * n_streams, (place + 1) * n_streams)
                fresh.write(begin + place, [self.spec.from_rows(row[part]) for row in rows])
        self._turn = _Turn(fresh, first, first)
        for loose in self._loose:
            loose.drop(np.arange(self.n_steps * n_streams))

    # ---- reading ----

    def read(self, positions: Positions) -> list[torch.Tensor]:
        """The rows at ``positions`` for each key; frames they share are decoded once."""
        return self.read_sets(range(len(self.keys)), positions)

    def read_sets(self, places: Sequence[int], positions: Positions) -> list[torch.Tensor]:
        """The tensors at ``positions`` for some of the keys."""
        with self._lock:
            found = self._read(places, positions)
        return [part.view(self.dtype) if part.dtype is not self.dtype else part for part in found]

    def read_rows(self, places: Sequence[int], positions: Positions) -> list[ByteRows]:
        """The same as rows on the host."""
        return [as_rows(self.spec, part) for part in self.read_sets(places, positions)]

    def _read(self, places: Sequence[int], positions: Positions) -> list[torch.Tensor]:
        store, origin, due = self._turn
        shape = (len(places), len(positions), *self.spec.shape)
        if due is None or not len(positions):
            batch = torch.zeros(shape, dtype=torch_dtype(self.spec.dtype), device=self.device)
        else:
            steps, streams = np.divmod(positions, store.n_streams)
            # those after the last whole step are loose
            indices = (steps - origin) % self.n_steps * store.n_streams + streams
            sets = np.stack([indices + place * store.n_obs for place in places])
            batch = store.read(IndexBatch(sets))
        for part, place in zip(batch, places, strict=True):
            self._loose[place].fill(positions, part)
        return list(batch)

    # ---- the rest ----

    def rewrite(self, n_streams: int, count: int) -> DeviceGroup:
        """A group of as many rows with other streams that holds the first ``count`` of this one's."""
        places = range(len(self.keys))
        return self.with_streams(n_streams).take(lambda positions: self.read_rows(places, positions), count)

    def with_streams(self, n_streams: int) -> DeviceGroup:
        """An empty one like this, with another number of streams."""
        return DeviceGroup(
            self.keys, self.spec, self.dtype, self.n_rows, n_streams, self.device, self.method, self.options
        )

    def take(self, read: Callable[[Positions], list[ByteRows]], count: int, first: int = 0) -> DeviceGroup:
        """Write the rows that ``read`` gives for ``count`` positions, those from ``first`` on before the others."""
        n_streams = self.store.n_streams
        begin = first - first % n_streams
        order = np.concatenate([np.arange(begin, count), np.arange(0, begin)])
        for at in range(0, count, _CHUNK):
            self.write(order[at : at + _CHUNK], read(order[at : at + _CHUNK]))
        return self

    def clear(self) -> None:
        """Make every position unwritten."""
        with self._lock:
            # first, so that nothing half cleared is read
            self._turn = _Turn(self.store)
            for loose in self._loose:
                loose.drop(np.arange(self.n_rows))
            self.store.clear()

    def memory_usage(self) -> MemoryUsage:
        """What is held, by purpose; loose rows among the payload."""
        usage = self.store.memory_usage()
        loose = sum(part.nbytes for part in self._loose)
        dense = self.n_rows * len(self.keys) * self.spec.nbytes
        return replace(usage, payload=usage.payload + loose, dense=dense)

    def describe(self) -> str:
        """The method in use, where it runs and why."""
        return self.store.describe()

    def check(self) -> None:
        """Raise if anything inside disagrees."""
        self.store.check()
        for loose in self._loose:
            loose.check()

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = fork_safe_lock()
        # where there is no GPU, what came from one is read on the host
        self.device = self.store.place.device
        for leaf in self.leaves:
            leaf.device = self.device


class _LooseRows:
    """Rows as they are on a device, found by position.

    The place of a row counts if its owner, a position, points back to it: one assignment to the table of positions
    makes new rows known, or forgets them.
    """

    def __init__(self, n_rows: int, spec: ObsSpec, device: torch.device) -> None:
        self._places = np.full(n_rows, -1, np.int32)
        self._owners = np.zeros(0, np.int64)
        self._rows = torch.empty((0, *spec.shape), dtype=torch_dtype(spec.dtype), device=device)
        self._spec = spec

    def _used(self) -> npt.NDArray[np.bool_]:
        used: npt.NDArray[np.bool_] = self._places[self._owners] == np.arange(len(self._owners))
        return used

    @property
    def count(self) -> int:
        return int(np.count_nonzero(self._used())) if len(self._owners) else 0

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes + self._places.nbytes + self._owners.nbytes

    def put(self, positions: Positions, rows: ByteRows) -> None:
        values = torch.from_numpy(np.require(self._spec.from_rows(rows), requirements="W"))
        places = self._places[positions]
        new = np.unique(positions[places < 0])
        free = np.flatnonzero(~self._used())
        if len(free) < len(new):
            held = len(self._owners)
            more = max(held, 16, len(new))
            # rows first: there must be one for every owner
            self._rows = torch.cat([self._rows[:held], self._rows.new_empty((more, *self._rows.shape[1:]))])
            self._owners = np.concatenate([self._owners, np.zeros(more, np.int64)])
            free = np.flatnonzero(~self._used())
        chosen = free[: len(new)].astype(np.int32)
        places[places < 0] = chosen[np.searchsorted(new, positions[places < 0])]
        self._rows[torch.from_numpy(places.astype(np.int64)).to(self._rows.device)] = values.to(self._rows.device)
        self._owners[chosen] = new
        self._places[new] = chosen

    def _index(self, positions: Positions) -> torch.Tensor:
        return torch.from_numpy(self._places[positions].astype(np.int64)).to(self._rows.device)

    def holds(self, positions: Positions) -> bool:
        """Whether all of them are here."""
        return bool((positions < len(self._places)).all() and (self._places[positions] >= 0).all())

    def get(self, positions: Positions) -> torch.Tensor:
        return self._rows[self._index(positions)]

    def fill(self, positions: Positions, out: torch.Tensor) -> None:
        """Put those that are here where they belong in ``out``."""
        if self.count:
            here = np.flatnonzero(self._places[positions] >= 0)
            if len(here):
                out[torch.from_numpy(here).to(out.device)] = self.get(positions[here])

    def drop(self, positions: Positions) -> None:
        if len(self._owners):
            self._places[positions] = -1
            if not self.count:
                self._owners = np.zeros(0, np.int64)
                self._rows = self._rows[:0].clone()

    def check(self) -> None:
        held = np.flatnonzero(self._places >= 0)
        places = self._places[held]
        if (places >= len(self._owners)).any() or len(self._rows) < len(self._owners):
            raise AssertionError("a loose row is nowhere")
        if not np.array_equal(self._owners[places], held):
            raise AssertionError("places of loose rows are used twice or lost")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": to_numpy(self._rows), "device": str(self._rows.device)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        device = state.pop("device")
        self.__dict__.update(state)
        absent = device.startswith("cuda") and not torch.cuda.is_available()
        self._rows = torch.from_numpy(np.array(state["_rows"])).to("cpu" if absent else device)
