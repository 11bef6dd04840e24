"""The observations of one key on a torch device: collected until a method is chosen, then kept in a store for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.codecs.registry import get_codec
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import IndexOutOfRangeError, MissingExtraError, SpecMismatchError
from sb3_extra_buffers.kernels.launcher import TableLayout
from sb3_extra_buffers.stores import device_base
from sb3_extra_buffers.stores.choice import Choice, MethodChoice, may_be_stacked
from sb3_extra_buffers.stores.device_base import (
    AttributeWrite,
    Batch,
    DevicePlace,
    DeviceRing,
    DeviceStore,
    IndexBatch,
    PlannedWrite,
    on_host,
    put_in,
)
from sb3_extra_buffers.stores.device_host import HostDecodedStore
from sb3_extra_buffers.stores.layout import StackLayout, likely_layout
from sb3_extra_buffers.stores.registry import find_store
from sb3_extra_buffers.stores.staging import torch_dtype
from sb3_extra_buffers.stores.usage import MemoryUsage

__all__ = ["DeviceObservationStore"]

Array = npt.NDArray[Any]

# Steps to collect before a method is chosen, even if fewer would have enough observations: methods are tried on runs
# of consecutive ones. At most this fraction of all steps.
_MIN_STEPS, _STEPS_SHARE = 8, 16
# the most streams of a store that only compiles kernels: more than enough for the kernels of many streams
_COMPILED_STREAMS = 512
_logger = logging.getLogger("sb3_extra_buffers")


class DeviceObservationStore(DeviceStore):
    """``n_steps`` steps of ``n_streams`` observations per set (``obs``, ``next_obs``), read as tensors.

    Steps are written in order; the oldest is overwritten. On a CUDA device the first steps are held as they come, until
    it is clear how observations are stacked and, with ``auto``, which method suits them; then they move to a
    `DeviceStore` of the registry. Tensors are held on the device, and copied to the host once, for this decision. On
    other devices a host store does the same by itself.

    ``heap_bytes`` limits encoded observations, including those held before a method is chosen.
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
        self.ring = DeviceRing(spec, n_steps, n_streams, n_sets, place, heap_bytes)
        self.chooser = MethodChoice(spec, method, options)
        #: The method in use and why, once it is known.
        self.choice: Choice | None = self.chooser.choice
        #: Where observations are once a method was chosen.
        self.inner: DeviceStore | None = None
        self._collected: list[tuple[int, list[Batch]]] = []
        self._columns: TableLayout | None = None
        self._set_sizes()
        if device_base.stays_on_host(place.device):
            self.inner = HostDecodedStore(self.ring, None, None, method, self.chooser.options)
        elif self.choice is not None and self.choice.is_raw and not may_be_stacked(spec):
            # vectors and other small observations are not cut into frames
            self.inner = self._make_store(StackLayout(spec), self.choice)
        elif self.choice is not None:
            self._check_triton(place.device, self.choice)

    def _set_sizes(self) -> None:
        """Sizes as attributes, for speed."""
        ring = self.ring
        self.spec, self.place, self.n_obs = ring.spec, ring.place, ring.n_obs
        self.n_steps, self.n_streams, self.n_sets = ring.n_steps, ring.n_streams, ring.n_sets
        #: Shape of a batch that `write` takes, and its dtype.
        self.step_shape, self.dtype = (ring.n_streams, *ring.spec.shape), ring.spec.dtype
        #: The dtype of tensors that `plan` takes; None if it takes arrays only.
        self.tensor_dtype = None if device_base.stays_on_host(ring.place.device) else torch_dtype(self.dtype)
        self.shape = (ring.n_steps, *self.step_shape)

    def _check_triton(self, device: torch.device, choice: Choice) -> None:
        codec = get_codec(choice.method, **self.chooser.codec_options)
        if device.type == "cuda" and codec.codec_id == "delta" and not device_base.has_triton():
            raise MissingExtraError(
                f"compression_method='delta' on a CUDA device needs 'triton': {MissingExtraError.hint('gpu')}; "
                "or keep the observations on the host with buffer_device='cpu'"
            )

    @property
    def method(self) -> str:
        """The user's method."""
        return self.chooser.method

    @property
    def batch_reader(self) -> Any:
        """The store that reads whole batches in one launch (`DeviceFrameStore.read_batch`), or None."""
        inner = self.inner
        return inner if inner is not None and inner.can_read_batch else None

    def compile_kernels(self, columns: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None) -> None:
        """Compile the GPU kernels now rather than in the middle of training, for the layout that the shape suggests.

        Triton caches compiled kernels on disk. ``columns`` are those of a batch, see `DeviceFrameStore.read_batch`.
        """
        if self.choice is None or not device_base.runs_kernels(self.place.device):
            return
        if get_codec(self.choice.method, **self.chooser.codec_options).codec_id not in ("delta", "none"):
            return  # the host encodes
        begin, inner = time.monotonic(), self.inner
        if inner is None:
            # a single step, in as many streams as decide which kernels are used
            few = replace(self.ring, n_steps=1, n_streams=min(self.n_streams, _COMPILED_STREAMS), heap_bytes=None)
            inner = self._make_store(likely_layout(self.spec), self.choice, few)
            zeros = np.zeros((few.n_streams, *self.spec.shape), self.dtype)
            inner.write(0, [zeros] * self.n_sets)
        indices = torch.zeros((self.n_sets, 1), dtype=torch.int64, device=self.place.device)
        if columns is not None and inner.can_read_batch:
            inner.read_batch(indices, *columns)  # type: ignore[attr-defined]  # since it can
        else:
            inner.read(IndexBatch(None, indices))
        seconds = time.monotonic() - begin
        level = logging.WARNING if seconds > 1 else logging.INFO
        message = "compiled GPU kernels for observations of shape %s in %.1f s; Triton caches them on disk"
        _logger.log(level, message, self.spec.shape, seconds)

    # ---- writing ----

    def write(self, step: int, batches: Sequence[Batch]) -> None:
        """Store one batch of ``n_streams`` observations per set as step ``step``: all of it, or nothing."""
        if not 0 <= step < self.n_steps:
            raise IndexOutOfRangeError(f"step {step} is outside of a ring of {self.n_steps} steps")
        checked = [self._checked(batch) for batch in batches]
        if len(checked) != self.n_sets or any(len(batch) != self.n_streams for batch in checked):
            raise SpecMismatchError(
                f"expected {self.n_sets} batches of {self.n_streams} observations, got {[len(b) for b in checked]}"
            )
        super().write(step, checked)

    def _checked(self, batch: Batch) -> Batch:
        """``batch`` in the dtype of the ring; tensors on another device, or of another dtype, become arrays."""
        if isinstance(batch, torch.Tensor):
            is_here = device_base.is_on(batch, self.place.device) and batch.dtype is torch_dtype(self.dtype)
            if is_here and batch.shape == self.step_shape:
                return batch.contiguous()
        return self.spec.to_batch(on_host(batch))

    def plan(self, step: int, batches: Sequence[Batch]) -> PlannedWrite:
        inner = self.inner
        if inner is not None:
            return inner.plan(step, batches)
        # copied: the caller may use the memory again
        held = [b.clone() if isinstance(b, torch.Tensor) else np.array(self.spec.to_batch(b)) for b in batches]
        # a step is written again if its first write was interrupted after this
        collected = [*(entry for entry in self._collected if entry[0] != step), (step, held)]
        if len(collected) >= self._n_trial_steps() or step == self.n_steps - 1:
            return AttributeWrite(self, self._choose_store(collected))
        return AttributeWrite(self, {"_collected": collected})

    def _n_trial_steps(self) -> int:
        """How many steps to collect first."""
        ring = self.ring
        n_trial = self.chooser.n_trial(self.n_obs * self.n_sets, ring.heap_bytes)
        n_steps = -(-n_trial // (self.n_streams * self.n_sets))
        return n_steps if ring.heap_bytes is not None else max(n_steps, min(_MIN_STEPS, self.n_steps // _STEPS_SHARE))

    def _choose_store(self, collected: list[tuple[int, list[Batch]]]) -> dict[str, Any]:
        """Choose a method for what was collected and store it; return the new attributes."""
        # of many streams, as many as it takes to have enough observations
        n_trial = self.chooser.n_trial(self.n_obs * self.n_sets, self.ring.heap_bytes)
        n_shown = min(max(-(-n_trial // (len(collected) * self.n_sets)), 1), self.n_streams)
        every = self.n_streams // n_shown
        # obs and next_obs of a stream follow each other
        batches = [batch[::every] for _, sets in collected for batch in sets]
        if all(isinstance(batch, torch.Tensor) for batch in batches):
            batches = list(on_host(torch.stack(batches)))  # type: ignore[arg-type]  # tensors
        n_shown = len(batches[0])
        rows = np.concatenate([self.spec.to_rows(on_host(batch)) for batch in batches])
        streams = np.tile(np.arange(n_shown), len(batches))
        may_stay_dense = self.ring.heap_bytes is None
        layout, choice = self.chooser.decide(streams, rows, n_shown, may_stay_dense, "cuda")
        assert choice is not None  # there are rows to decide by
        inner = self._make_store(layout, choice)
        inner.train(rows)
        for step, sets in collected:
            inner.plan(step, sets).commit()
        return {"choice": choice, "inner": inner, "_collected": []}

    def _make_store(self, layout: StackLayout, choice: Choice, ring: DeviceRing | None = None) -> DeviceStore:
        """The store of the registry for ``choice``."""
        codec = self.chooser.make_codec(choice, layout)
        make = find_store(codec, layout, "cuda")
        store: DeviceStore = make(ring or self.ring, layout, codec, choice.method, self.chooser.codec_options)
        if self._columns is not None:
            store.use_columns(self._columns)
        return store

    def use_columns(self, table: TableLayout | None) -> None:
        self._columns = table
        if self.inner is not None:
            self.inner.use_columns(table)

    # ---- reading ----

    def read(self, indices: IndexBatch, out: torch.Tensor | None = None) -> torch.Tensor:
        if self.inner is not None:
            return self.inner.read(indices, out)
        return put_in(out, self._read_collected(indices))

    def read_windows(
        self, indices: IndexBatch, newest_only: bool = False, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.inner is not None:
            return self.inner.read_windows(indices, newest_only, out)
        return put_in(out, self._read_collected(indices))

    def _read_collected(self, indices: IndexBatch) -> torch.Tensor:
        """Observations that are held as they came, wherever that is."""
        device, dtype = self.place.device, torch_dtype(self.dtype)
        if not self._collected or 0 in indices.shape:
            return torch.zeros((*indices.shape, *self.spec.shape), dtype=dtype, device=device)
        batches = [batch for _, sets in self._collected for batch in sets]
        if all(isinstance(batch, torch.Tensor) for batch in batches):
            held, wanted = torch.stack(batches), indices.on(device)  # type: ignore[arg-type]  # tensors
        else:
            held = torch.from_numpy(np.stack([on_host(batch) for batch in batches]))
            wanted = torch.from_numpy(indices.host)
        at = wanted % self.n_obs
        # steps are collected in order
        nth = (at // self.n_streams - self._collected[0][0]) % self.n_steps
        is_held = nth < len(self._collected)
        nth = torch.where(is_held, nth, 0) * self.n_sets + wanted // self.n_obs
        is_held = is_held.view(*is_held.shape, *(1 for _ in self.spec.shape))
        return torch.where(is_held, held[nth, at % self.n_streams], held.new_zeros(())).to(device)

    # ---- the rest ----

    def clear(self) -> None:
        """Make every index unwritten; the chosen method stays."""
        self._collected = []
        if self.inner is not None:
            self.inner.clear()

    def compact(self) -> None:
        if self.inner is not None:
            self.inner.compact()

    @property
    def collected_bytes(self) -> int:
        """Bytes held as they came, before a method is chosen."""
        return sum(rows.nbytes for _, sets in self._collected for rows in sets)

    def describe(self) -> str:
        """The method in use, where it runs and why."""
        inner = self.inner
        if isinstance(inner, HostDecodedStore) and inner.store.inner is None:
            return inner.store.describe()
        choice = self.choice or (None if inner is None else inner.choice)
        if inner is None and choice is not None and choice.is_raw:
            return choice.method  # held as it comes, which is no different
        if inner is None or choice is None:
            per_step = self.n_streams * self.n_sets
            return self.chooser.describe_pending(len(self._collected) * per_step, self._n_trial_steps() * per_step)
        location = inner.location if self.place.device.type != "cpu" else ""
        return self.chooser.describe(choice, choice.method + location)

    def memory_usage(self) -> MemoryUsage:
        """Bytes in use, on any device; the caller adds the number of transitions."""
        inner = self.inner
        is_raw = self.choice is not None and self.choice.is_raw
        usage = MemoryUsage(self.collected_bytes, decided=is_raw) if inner is None else inner.memory_usage()
        return replace(usage, codecs={"": self.describe()})

    def check(self) -> None:
        if self.inner is not None:
            self.inner.check()

    def frozen(self) -> DeviceObservationStore:
        copied = object.__new__(DeviceObservationStore)
        inner = None if self.inner is None else self.inner.frozen()
        copied.__dict__.update(self.__dict__, _collected=list(self._collected), inner=inner)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        collected = [(step, [on_host(batch) for batch in sets]) for step, sets in self._collected]
        state = {name: self.__dict__[name] for name in ("ring", "chooser", "choice", "inner")}
        return state | {"_collected": collected}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _columns=None)
        self._set_sizes()
