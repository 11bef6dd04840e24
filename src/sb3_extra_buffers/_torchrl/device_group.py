"""Groups whose rows are on a GPU: steps written in order are compressed, all other rows stay raw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers._torchrl.groups import StoredGroup, split_steps
from sb3_extra_buffers._torchrl.indexing import Positions, keep_last
from sb3_extra_buffers._torchrl.tensors import to_numpy
from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec
from sb3_extra_buffers.stores.device_base import Batch, DevicePlace, IndexBatch
from sb3_extra_buffers.stores.device_observation import DeviceObservationStore
from sb3_extra_buffers.stores.locks import fork_safe_lock
from sb3_extra_buffers.stores.staging import torch_dtype
from sb3_extra_buffers.stores.usage import MemoryUsage

__all__ = ["DeviceGroup"]

# raw rows that are tolerated before everything is written again in order: 1 / 8 of all rows, but at least 256
_RAW_SHARE = 8
_MIN_RAW = 256
# rows copied at a time
_CHUNK = 256


class _Ordered(NamedTuple):
    """A store, the step of the storage that is its step 0, and the step to write next; None while it is empty."""

    store: DeviceObservationStore
    origin: int = 0
    next_step: int | None = None


class DeviceGroup(StoredGroup):
    """A group in a `DeviceObservationStore`, which is written step after step, each step with a row of every stream.

    Rows that arrive in any other order, and rows of incomplete steps, are kept uncompressed (raw) on the same device.
    When an eighth of all rows is raw, all rows are written to a new store, in the order of their positions.

    An interrupted write can be repeated: raw rows take precedence over rows in the store, and are dropped once they
    are in the store.
    """

    reads_tensors = True

    def _create_store(self, n_streams: int) -> None:
        # rows after the last whole step stay raw
        self.n_steps = max(self.n_rows // n_streams, 1)
        self._ordered = _Ordered(self._new_store(n_streams, self.config.method))
        self._raw = [_RawRows(self.n_rows, self.spec, self.device) for _ in self.keys]
        self._dtype = torch_dtype(self.spec.dtype)
        self._lock = fork_safe_lock()

    @property
    def store(self) -> DeviceObservationStore:  # type: ignore[override]  # read-only here
        """The rows that were written in order."""
        return self._ordered.store

    def _new_store(self, n_streams: int, method: str) -> DeviceObservationStore:
        options = self.config.options if method == self.config.method else {}
        place = DevicePlace(self.device)
        return DeviceObservationStore(self.spec, self.n_steps, n_streams, len(self.keys), place, method, options)

    # ---- writing ----

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` on the device, in the dtype of the store."""
        staged = tensor.detach().to(self.device).contiguous()
        return staged if self._dtype is staged.dtype else staged.view(self._dtype)

    def write(self, positions: Positions, batches: Sequence[ByteRows | torch.Tensor]) -> None:
        """Store rows of bytes, or tensors from `stage`, step by step."""
        n_streams = self.store.n_streams
        with self._lock:
            for first, stop in split_steps(positions, n_streams):
                step = int(positions[first]) // n_streams
                parts = [self._as_batch(rows[first:stop]) for rows in batches]
                if stop - first == n_streams and self._is_next(step):
                    self._write_step(step, parts)
                    continue
                for raw, rows in zip(self._raw, parts, strict=True):
                    raw.put(positions[first:stop], rows)
                self._write_if_complete(step)
            self._reorder_if_needed(int(positions[-1]) // n_streams if len(positions) else 0)

    def write_key(self, which: int, positions: Positions, rows: ByteRows) -> None:
        with self._lock:
            last = keep_last(positions)
            self._raw[which].put(positions[last], self._as_batch(rows[last]))
            self._reorder_if_needed(0)

    def _as_batch(self, rows: ByteRows | torch.Tensor) -> Batch:
        return rows if isinstance(rows, torch.Tensor) else self.spec.from_rows(np.ascontiguousarray(rows))

    def _is_next(self, step: int) -> bool:
        next_step = self._ordered.next_step
        return step < self.n_steps if next_step is None else step == next_step

    def _write_step(self, step: int, batches: Sequence[Batch]) -> None:
        store, origin, next_step = self._ordered
        origin = step if next_step is None else origin
        store.write((step - origin) % self.n_steps, batches)
        self._ordered = _Ordered(store, origin, (step + 1) % self.n_steps)
        positions = self._positions_of(step)
        for raw in self._raw:
            raw.drop(positions)

    def _positions_of(self, step: int) -> Positions:
        return step * self.store.n_streams + np.arange(self.store.n_streams)

    def _write_if_complete(self, step: int) -> None:
        """Write ``step`` if it is the next one and all of its rows have arrived."""
        positions = self._positions_of(step)
        if self._is_next(step) and all(raw.holds(positions) for raw in self._raw):
            self._write_step(step, [raw.get(positions) for raw in self._raw])

    def _reorder_if_needed(self, newest: int) -> None:
        """Write everything again, starting with the step after ``newest``, if too many rows are raw."""
        if max(raw.count for raw in self._raw) <= max(self.n_rows // _RAW_SHARE, _MIN_RAW):
            return
        n_streams, choice = self.store.n_streams, self.store.choice
        store = self._new_store(n_streams, self.config.method if choice is None else choice.method)
        first = (newest + 1) % self.n_steps
        per_chunk = max(_CHUNK // n_streams, 1)
        for begin in range(0, self.n_steps, per_chunk):
            steps = (first + np.arange(begin, min(begin + per_chunk, self.n_steps))) % self.n_steps
            positions = (steps[:, None] * n_streams + np.arange(n_streams)).reshape(-1)
            batches = self._read(positions, range(len(self.keys)))
            for i in range(len(steps)):
                part = slice(i * n_streams, (i + 1) * n_streams)
                store.write(begin + i, [batch[part] for batch in batches])
        self._ordered = _Ordered(store, first, first)
        for raw in self._raw:
            raw.drop(np.arange(self.n_steps * n_streams))

    # ---- reading ----

    def read(self, positions: Positions | torch.Tensor, which: Sequence[int] | None = None) -> list[torch.Tensor]:
        with self._lock:
            batch = self._read(positions, range(len(self.keys)) if which is None else which)
        return [part.view(self.dtype) if part.dtype is not self.dtype else part for part in batch]

    def read_rows(self, positions: Positions, which: Sequence[int] | None = None) -> list[ByteRows]:
        return [self.as_rows(part) for part in self.read(positions, which)]

    def _read(self, positions: Positions | torch.Tensor, which: Sequence[int]) -> list[torch.Tensor]:
        store, origin, next_step = self._ordered
        if next_step is None or not len(positions):
            shape = (len(which), len(positions), *self.spec.shape)
            batch = torch.zeros(shape, dtype=self._dtype, device=self.device)
        else:
            steps, streams = positions // store.n_streams, positions % store.n_streams
            # behind the last whole step this finds another row, which the raw one then replaces
            indices = (steps - origin) % self.n_steps * store.n_streams + streams
            sets: list[Any] = [indices + key * store.n_obs for key in which]
            on_gpu = isinstance(positions, torch.Tensor)
            batch = store.read(IndexBatch(None, torch.stack(sets)) if on_gpu else IndexBatch(np.stack(sets)))
        for part, key in zip(batch, which, strict=True):
            self._raw[key].fill(positions, part)
        return list(batch)

    # ---- maintenance ----

    def clear(self) -> None:
        with self._lock:
            # first, so that nothing half cleared is read
            self._ordered = _Ordered(self.store)
            for raw in self._raw:
                raw.drop(np.arange(self.n_rows))
            self.store.clear()

    def memory_usage(self) -> MemoryUsage:
        """Return the memory in use, by purpose; raw rows count as payload."""
        usage = self.store.memory_usage()
        payload = usage.payload + sum(raw.nbytes for raw in self._raw)
        return replace(usage, payload=payload)

    def check(self) -> None:
        self.store.check()
        for raw in self._raw:
            raw.check()

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = fork_safe_lock()
        # the CPU, if the rows come from a GPU that this machine lacks
        self.device = self.store.place.device


class _RawRows:
    """Rows of one key, uncompressed on a device.

    ``_entries`` maps a position to an entry of ``_rows``, or -1; ``_owners`` maps it back. An entry is in use only if
    both agree: a single assignment to ``_entries`` adds rows or drops them.
    """

    def __init__(self, n_rows: int, spec: ObsSpec, device: torch.device) -> None:
        self._entries = np.full(n_rows, -1, np.int32)
        self._owners = np.zeros(0, np.int64)
        self._rows = torch.empty((0, *spec.shape), dtype=torch_dtype(spec.dtype), device=device)
        self._spec = spec

    def _in_use(self) -> npt.NDArray[np.bool_]:
        in_use: npt.NDArray[np.bool_] = self._entries[self._owners] == np.arange(len(self._owners))
        return in_use

    @property
    def count(self) -> int:
        return int(np.count_nonzero(self._in_use())) if len(self._owners) else 0

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes + self._entries.nbytes + self._owners.nbytes

    def put(self, positions: Positions, batch: Batch) -> None:
        values = batch if isinstance(batch, torch.Tensor) else torch.from_numpy(np.require(batch, requirements="W"))
        entries = self._entries[positions]
        new = np.unique(positions[entries < 0])
        free = np.flatnonzero(~self._in_use())
        if len(free) < len(new):
            n_entries = len(self._owners)
            n_added = max(n_entries, 16, len(new))
            # rows first: every owner needs one
            self._rows = torch.cat([self._rows[:n_entries], self._rows.new_empty((n_added, *self._rows.shape[1:]))])
            self._owners = np.concatenate([self._owners, np.zeros(n_added, np.int64)])
            free = np.flatnonzero(~self._in_use())
        chosen = free[: len(new)].astype(np.int32)
        entries[entries < 0] = chosen[np.searchsorted(new, positions[entries < 0])]
        self._rows[torch.from_numpy(entries.astype(np.int64)).to(self._rows.device)] = values.to(self._rows.device)
        self._owners[chosen] = new
        self._entries[new] = chosen

    def holds(self, positions: Positions) -> bool:
        """Whether all of ``positions`` are here."""
        return bool((positions < len(self._entries)).all() and (self._entries[positions] >= 0).all())

    def get(self, positions: Positions) -> torch.Tensor:
        return self._rows[torch.from_numpy(self._entries[positions].astype(np.int64)).to(self._rows.device)]

    def fill(self, positions: Positions | torch.Tensor, out: torch.Tensor) -> None:
        """Copy the rows that are here into ``out``, which has a row for each of ``positions``."""
        if not self.count:
            return
        if isinstance(positions, torch.Tensor):
            entries = torch.from_numpy(self._entries).to(out.device)[positions].long()
            is_here = (entries >= 0).view(-1, *(1 for _ in self._spec.shape))
            torch.where(is_here, self._rows[entries.clamp(min=0)], out, out=out)
        else:
            here = np.flatnonzero(self._entries[positions] >= 0)
            if len(here):
                out[torch.from_numpy(here).to(out.device)] = self.get(positions[here])

    def drop(self, positions: Positions) -> None:
        if len(self._owners):
            self._entries[positions] = -1
            if not self.count:
                self._owners = np.zeros(0, np.int64)
                self._rows = self._rows[:0].clone()

    def check(self) -> None:
        positions = np.flatnonzero(self._entries >= 0)
        entries = self._entries[positions]
        if (entries >= len(self._owners)).any() or len(self._rows) < len(self._owners):
            raise AssertionError("a position refers to a raw row that does not exist")
        if not np.array_equal(self._owners[entries], positions):
            raise AssertionError("two positions refer to one raw row, or a raw row to another position")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": to_numpy(self._rows), "device": str(self._rows.device)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        device = state.pop("device")
        self.__dict__.update(state)
        absent = device.startswith("cuda") and not torch.cuda.is_available()
        self._rows = torch.from_numpy(np.array(state["_rows"])).to("cpu" if absent else device)
