"""Observations of one key behind a torch device: first collected, then stored as suits them and the device."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.codecs.delta import DeltaCodec
from sb3_extra_buffers.codecs.registry import get_codec, is_available
from sb3_extra_buffers.codecs.rle import RleCodec
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import IndexOutOfRangeError, MissingExtraError, SpecMismatchError
from sb3_extra_buffers.stores.choice import Choice, MethodChoice
from sb3_extra_buffers.stores.device import DeviceFrameStore, DeviceWrite, has_triton, join_frames, suits_device
from sb3_extra_buffers.stores.mirror import HeapMirror, decode_runs
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.payloads import PayloadStore
from sb3_extra_buffers.stores.staging import Lease, Staging, torch_dtype
from sb3_extra_buffers.stores.usage import MemoryUsage

__all__ = ["DeviceObservations", "DevicePlace", "IndexBatch", "PlannedWrite", "finish_writes"]

Array = npt.NDArray[Any]

_BYTE = np.dtype(np.uint8)


@dataclass(frozen=True)
class DevicePlace:
    """Where observations are kept: on ``device``, or in pinned memory of the host beside it."""

    device: torch.device
    pinned: bool = False


@dataclass
class IndexBatch:
    """Cells to read, ``[set, n]``, on the host and, once somebody needs it, on the device."""

    host: npt.NDArray[np.int64]
    uploaded: torch.Tensor | None = field(default=None, repr=False)

    def on(self, device: torch.device) -> torch.Tensor:
        if self.uploaded is None or self.uploaded.device.type != device.type:
            self.uploaded = torch.from_numpy(self.host).to(device)
        return self.uploaded


class DeviceObservations:
    """``n_steps`` steps of ``n_streams`` observations, ``n_sets`` of each (``obs``, ``next_obs``), as tensors.

    Steps are written in turn, the oldest overwritten. ``delta`` on a CUDA device lives there as a whole, and so do
    observations without compression. Other methods are decoded on the host; a batch of them crosses in one copy.

    ``heap_bytes`` is the most that encoded observations may take, those counted that are collected before a method is
    chosen. Writing is a transaction: see `plan`.
    """

    def __init__(
        self,
        spec: ObsSpec,
        n_steps: int,
        n_streams: int,
        n_sets: int,
        place: DevicePlace,
        method: str = "auto",
        options: Mapping[str, Any] | None = None,
        heap_bytes: int | None = None,
    ) -> None:
        self.spec, self.n_steps, self.n_streams, self.n_sets = spec, n_steps, n_streams, n_sets
        self.place, self.method, self.options = place, method, dict(options or {})
        #: shape of a batch that `write` takes, and its dtype
        self.step_shape, self.dtype = (n_streams, *spec.shape), spec.dtype
        self._heap_bytes = heap_bytes
        self._pending: list[tuple[int, list[Array]]] = []
        self._inner: _Dense | _OnHost | DeviceFrameStore | None = None
        self._chooser = MethodChoice(spec, method, self.options)
        self.choice: Choice | None = self._chooser.choice
        named = None if self.choice is None else get_codec(self.choice.method, **self.options)
        if place.device.type == "cuda" and isinstance(named, DeltaCodec) and not has_triton():
            raise MissingExtraError(
                "compression_method='delta' on a CUDA device needs 'triton': pip install 'sb3-extra-buffers[gpu]'; "
                "or keep the observations on the host with buffer_device='cpu'"
            )
        if self.choice is not None and self.choice.is_raw:
            self._inner = _Dense(self)
        elif stays_on_host(place.device):
            self._inner = _OnHost(self, method)

    @property
    def n_obs(self) -> int:
        """Cells of one set."""
        return self.n_steps * self.n_streams

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.n_steps, *self.step_shape)

    @property
    def direct(self) -> DeviceFrameStore | None:
        """The store that reads whole batches in one launch, where there is one by now."""
        inner = self._inner
        return inner if isinstance(inner, DeviceFrameStore) and inner.direct else None

    def write(self, step: int, batches: Sequence[Array]) -> None:
        """Store one batch of ``n_streams`` observations for each set as step ``step``; whole, or not at all."""
        if not 0 <= step < self.n_steps:
            raise IndexOutOfRangeError(f"step {step} is outside of a ring of {self.n_steps} steps")
        fitted = [self.spec.to_batch(batch) for batch in batches]
        if len(fitted) != self.n_sets or any(len(batch) != self.n_streams for batch in fitted):
            raise SpecMismatchError(
                f"expected {self.n_sets} batches of {self.n_streams} observations, got {[len(part) for part in fitted]}"
            )
        plan = self.plan(step, fitted)
        try:
            plan.commit()
        except BaseException:
            finish_writes([plan])
            raise

    def plan(self, step: int, batches: Sequence[Array]) -> PlannedWrite:
        """`write` up to the point where something changes, for batches that have been checked.

        ``commit`` makes the step visible. Of a plan that ``may_fail``, which is to be committed before all others,
        it can raise. Whatever happens on the way, `finish_writes` then makes good.
        """
        inner = self._inner
        if inner is not None:
            return inner.plan(step, batches)
        rows = [self.spec.to_rows(batch).copy() for batch in batches]
        pending = [*self._pending, (step, rows)]
        n_rows = len(pending) * self.n_streams * len(rows)
        if n_rows >= self._chooser.n_trial(self.n_obs * self.n_sets, self._heap_bytes) or step == self.n_steps - 1:
            return _StateWrite(self, self._choose_method(pending))
        return _StateWrite(self, {"_pending": pending})

    def read(self, indices: IndexBatch) -> torch.Tensor:
        """Fresh observations ``[set, n, *shape]`` on the device."""
        if isinstance(self._inner, (DeviceFrameStore, _Dense)):
            return self._inner.read(indices.on(self.place.device))
        if self._inner is not None:
            return self._inner.read(indices.host)
        out = np.zeros((indices.host.size, self.spec.nbytes), np.uint8)
        newest = dict(self._pending)
        for place, index in enumerate(indices.host.ravel().tolist()):
            chosen, rest = divmod(index, self.n_obs)
            step, stream = divmod(rest, self.n_streams)
            if step in newest:
                out[place] = newest[step][chosen][stream]
        observations = self.spec.from_rows(out).reshape(*indices.host.shape, *self.spec.shape)
        return torch.from_numpy(observations).to(self.place.device)

    def _choose_method(self, pending: list[tuple[int, list[Array]]]) -> dict[str, Any]:
        """Choose by what was seen, and store it so, beside the state of now; return the new one."""
        # obs and next_obs of a stream, one after the other
        rows = np.stack([np.stack(sets) for _, sets in pending]).reshape(-1, self.spec.nbytes)
        streams = np.tile(np.arange(self.n_streams), len(rows) // self.n_streams)
        layout, choice = self._chooser.decide(streams, rows, self.n_streams)
        assert choice is not None  # there are rows
        codec = self._chooser.make_codec(choice, layout)
        inner: _Dense | _OnHost | DeviceFrameStore
        if choice.method == "none":
            inner = _Dense(self)
        elif isinstance(codec, DeltaCodec) and suits_device(layout, codec) and has_triton():
            inner = DeviceFrameStore(
                layout, self.n_steps, self.n_streams, codec, self.place.device, self.n_sets, self._heap_bytes,
                self.place.pinned,
            )  # fmt: skip
        else:
            inner = _OnHost(self, choice.method)
        for step, sets in pending:
            inner.plan(step, [self.spec.from_rows(part) for part in sets]).commit()
        return {"choice": choice, "_inner": inner, "_pending": []}

    def clear(self) -> None:
        """Make every cell unwritten; what was decided stays. May be called again wherever it was interrupted."""
        self._pending = []
        if self._inner is not None:
            self._inner.clear()

    def compact(self) -> None:
        """Lay what is live in the heap one after the other, where there is a heap."""
        if isinstance(self._inner, DeviceFrameStore):
            self._inner.compact()

    def describe(self) -> str:
        """The method in use, where it runs and why."""
        where = "" if not isinstance(self._inner, _OnHost) or self.place.device.type == "cpu" else " on the host"
        in_use = None if self._inner is None or self.choice is None else f"{self.choice.method}{where}"
        n_collected = len(self._pending) * self.n_streams * self.n_sets
        return self._chooser.describe(self.choice, in_use, n_collected)

    def memory_usage(self) -> MemoryUsage:
        """What is held, wherever it is, and what the same observations would take dense."""
        dense = self.n_obs * self.n_sets * self.spec.nbytes
        if self._inner is None:
            held = sum(row.nbytes for _, sets in self._pending for row in sets)
            usage = MemoryUsage(held, 0, 0, 0, dense)
        else:
            usage = self._inner.memory_usage()
        return replace(usage, dense=dense, codecs={"": self.describe()})

    def check(self) -> None:
        """Raise if anything inside disagrees."""
        if self._inner is not None:
            self._inner.check()

    def frozen(self) -> DeviceObservations:
        """A copy in the host's memory to be pickled, which later writes do not change."""
        copied = object.__new__(DeviceObservations)
        copied.__dict__.update(self.__dict__)
        copied._pending = list(self._pending)
        if self._inner is not None:
            copied._inner = self._inner.frozen()
        return copied

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "place": (str(self.place.device), self.place.pinned)}
        del state["step_shape"], state["dtype"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        device, pinned = state.pop("place")
        self.__dict__.update(state)
        self.step_shape, self.dtype = (self.n_streams, *self.spec.shape), self.spec.dtype
        absent = device.startswith("cuda") and not torch.cuda.is_available()
        self.place = DevicePlace(torch.device("cpu" if absent else device), pinned and not absent)


def stays_on_host(device: torch.device) -> bool:
    """Whether nothing is gained by keeping encoded observations on ``device``."""
    return device.type != "cuda"


class _StateWrite:
    """New attributes of `DeviceObservations`: rows that were collected, or a store made of them."""

    __slots__ = ("after", "of")
    may_fail = False

    def __init__(self, of: DeviceObservations, after: dict[str, Any]) -> None:
        self.of, self.after = of, after

    def commit(self) -> None:
        self.of.__dict__.update(self.after)

    finish = commit


class _DenseWrite:
    """Rows on their device, and where they go."""

    __slots__ = ("sources", "targets")
    may_fail = False

    def __init__(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        self.targets, self.sources = targets, sources

    def commit(self) -> None:
        for target, source in zip(self.targets, self.sources, strict=True):
            target.copy_(source)

    finish = commit


class _Dense:
    """Observations as they are, in one tensor on the device."""

    def __init__(self, of: DeviceObservations) -> None:
        device = torch.device("cpu") if of.place.pinned else of.place.device
        shape = (of.n_obs * of.n_sets, *of.spec.shape)
        self.rows = torch.zeros(shape, dtype=torch_dtype(of.spec.dtype), device=device)
        self._spec, self._n_obs, self._n_streams = of.spec, of.n_obs, of.n_streams
        self._place = of.place

    def plan(self, step: int, batches: Sequence[Array]) -> _DenseWrite:
        rows, at = self.rows, step * self._n_streams
        targets, sources = [], []
        for batch in batches:
            flags = batch.flags
            if not (flags.c_contiguous and flags.writeable):
                batch = np.require(batch, requirements=("C", "W"))
            source = torch.from_numpy(batch)
            # from pageable memory this waits until the rows have been read, so that they may change afterwards
            sources.append(source.to(rows.device) if rows.is_cuda else source)
            targets.append(rows[at : at + self._n_streams])
            at += self._n_obs
        return _DenseWrite(targets, sources)

    def read(self, indices: torch.Tensor) -> torch.Tensor:
        found = self.rows[indices.reshape(-1).to(self.rows.device)].to(self._place.device)
        return found.reshape(*indices.shape, *self._spec.shape)

    def clear(self) -> None:
        self.rows.zero_()

    def memory_usage(self) -> MemoryUsage:
        return MemoryUsage(self.rows.numel() * self.rows.element_size(), 0, 0, 0, 0)

    def check(self) -> None:
        """Nothing can disagree here."""

    def frozen(self) -> _Dense:
        copied = object.__new__(_Dense)
        copied.__dict__.update(self.__dict__)
        copied.rows = self.rows.to("cpu", copy=True)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        place = (str(self._place.device), self._place.pinned)
        return {**self.__dict__, "rows": self.rows.cpu().numpy(), "_place": place}

    def __setstate__(self, state: dict[str, Any]) -> None:
        device, pinned = state.pop("_place")
        self.__dict__.update(state)
        absent = device.startswith("cuda") and not torch.cuda.is_available()
        self._place = DevicePlace(torch.device("cpu" if absent else device), pinned and not absent)
        self.rows = torch.from_numpy(state["rows"]).to("cpu" if self._place.pinned else self._place.device)


class _HostWrite:
    """A step for an `ObservationStore`, whose writes are all or nothing, and can be taken back."""

    __slots__ = ("batches", "first", "of", "written")
    may_fail = True

    def __init__(self, of: _OnHost, step: int, batches: Sequence[Array]) -> None:
        self.of, self.first, self.batches = of, step * of._n_streams, batches
        self.written = False
        # what `cancel` takes back is what is written from now on
        of.store.commit()

    def commit(self) -> None:
        of, first = self.of, self.first
        store = of.store
        if len(self.batches) == 2:
            obs, next_obs = self.batches
            if obs.dtype == _BYTE and obs.flags.c_contiguous and next_obs.flags.c_contiguous:
                # fast path: the bytes are rows already
                shape = (len(obs), store.spec.nbytes)
                store.write_step(first, first + of._n_obs, obs.reshape(shape), next_obs.reshape(shape))
            else:
                to_rows = store.spec.to_rows
                store.write_step(first, first + of._n_obs, to_rows(obs), to_rows(next_obs))
        else:
            store.write(first + of._streams, of._streams, store.spec.to_rows(self.batches[0]))
        self.written = True

    def cancel(self) -> None:
        """Have the store as it was before, whether it was written to or not."""
        self.written = False
        self.of.store.undo_write()


class _OnHost:
    """An `ObservationStore` of the host whose batches cross to the device in one copy.

    Each distinct frame of a batch crosses once. A GPU decodes run lengths itself, from a copy of the heap that it has.
    """

    def __init__(self, of: DeviceObservations, method: str) -> None:
        # the same payloads, read many times faster
        method = "rle-jit" if method == "rle" and is_available("rle-jit") else method
        self.store = ObservationStore(of.spec, of.n_streams, method, of.options, of._heap_bytes)
        self.store.allocate(of.n_obs * of.n_sets)
        self._n_obs, self._n_streams = of.n_obs, of.n_streams
        self._streams = np.arange(of.n_streams)
        self._staging = Staging(of.place.device)
        # whole frames take so much room that two of them must do
        self._frames = Staging(of.place.device, 2)
        self._mirror: HeapMirror | None = None

    def plan(self, step: int, batches: Sequence[Array]) -> _HostWrite:
        return _HostWrite(self, step, batches)

    def read(self, indices: npt.NDArray[np.int64]) -> torch.Tensor:
        staging, inner = self._staging, self.store.inner
        if staging.device.type == "cuda" and isinstance(inner, PayloadStore) and indices.size:
            codec = inner.codec
            if isinstance(codec, RleCodec) and inner.validator is None and has_triton():
                return self._read_runs(inner, codec, indices)
            return self._read_frames(inner, indices)
        spec = self.store.spec
        rows = self.store.read(indices).reshape(-1, spec.nbytes)
        observations = spec.from_rows(rows).reshape(*indices.shape, *spec.shape)
        if staging.device.type == "cpu":
            return torch.from_numpy(observations)
        return staging.upload([observations])[0]

    def _read_frames(self, inner: PayloadStore, indices: npt.NDArray[np.int64]) -> torch.Tensor:
        lease: list[Lease] = []

        def make(n_frames: int, size: int) -> Array:
            # no more sizes than need be, so that memory is laid out once for each
            n_rows = -(-n_frames // 64) * 64
            layout = self._frames.layout(((n_rows, size), np.dtype(np.uint8)), ((where,), np.dtype(np.int64)))
            lease.append(self._frames.acquire(layout))
            return lease[0].arrays[0][:n_frames]

        where = indices.size * inner.layout.stack
        with self.store.lock:
            inverse = inner.read_distinct(indices, make)[1]
        lease[0].arrays[1][:] = inverse.ravel()
        frames, order = self._frames.send(lease[0])
        return join_frames(frames[order].view(*indices.shape, inner.layout.stack, -1), inner.layout)

    def _read_runs(self, inner: PayloadStore, codec: RleCodec, indices: npt.NDArray[np.int64]) -> torch.Tensor:
        with self.store.lock:
            if self._mirror is None:
                self._mirror = HeapMirror(self._staging)
            heap = self._mirror.follow(inner.heap)
            starts, lengths = self._staging.upload(inner.find(indices))
        return join_frames(decode_runs(codec, heap, starts, lengths, inner.layout.frame_bytes), inner.layout)

    def clear(self) -> None:
        self.store.clear()

    def memory_usage(self) -> MemoryUsage:
        usage = self.store.memory_usage()
        return usage if self._mirror is None else replace(usage, other=usage.other + self._mirror.nbytes)

    def check(self) -> None:
        self.store.check()

    def frozen(self) -> _OnHost:
        copied = object.__new__(_OnHost)
        copied.__dict__.update(self.__dict__)
        copied.store = copy.deepcopy(self.store)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mirror": None}


PlannedWrite = _StateWrite | _DenseWrite | _HostWrite | DeviceWrite


def finish_writes(plans: Sequence[PlannedWrite]) -> bool:
    """Make good what an exception left of ``plans``: all of them are written, or none; return whether they are.

    They are, if no store of the host is missing. May be run again wherever it was interrupted.
    """
    hosts = [plan for plan in plans if isinstance(plan, _HostWrite)]
    if not all(host.written for host in hosts):
        for host in hosts:
            host.cancel()
        return False
    for plan in plans:
        if not isinstance(plan, _HostWrite):
            plan.finish()
    return True
