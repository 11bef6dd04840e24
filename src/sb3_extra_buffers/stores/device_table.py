"""Observations as indices into a table of colours or numbers, which the device expands: ``palette`` and ``table``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.registry import get_codec
from sb3_extra_buffers.codecs.spec import ByteRows
from sb3_extra_buffers.kernels.expand_torch import INSIDE, OUTSIDE, expand_reference
from sb3_extra_buffers.stores import device_base
from sb3_extra_buffers.stores.device_base import Batch, DeviceRing, DeviceStore, IndexBatch, PlannedWrite, on_host
from sb3_extra_buffers.stores.device_host import HostDecodedStore
from sb3_extra_buffers.stores.device_pieces import Pieces, SlotChange, SlotPool, word_dtype
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.registry import find_store
from sb3_extra_buffers.stores.staging import torch_dtype
from sb3_extra_buffers.stores.tables import TableStore
from sb3_extra_buffers.stores.unit_table import UnitTable, find_geometry
from sb3_extra_buffers.stores.usage import MemoryUsage

__all__ = ["DeviceTableStore"]

Array = npt.NDArray[Any]

# the inner method of a palette, unless the user named one
_DEFAULT_INNER = "delta"


class _TableWrite(PlannedWrite):
    """The indices of a step, planned by the inner store, and the rows that are outside of the table."""

    __slots__ = ("change", "inner", "outside", "places", "step", "store")

    def __init__(
        self,
        store: DeviceTableStore,
        step: int,
        inner: PlannedWrite,
        places: npt.NDArray[np.int32],
        outside: ByteRows,
        change: SlotChange,
    ) -> None:
        self.store, self.step, self.inner = store, step, inner
        self.places, self.outside, self.change = places, outside, change

    def commit(self) -> None:
        self.inner.commit()
        self._commit_rest()

    def finish(self) -> None:
        self.inner.finish()
        self._commit_rest()

    def _commit_rest(self) -> None:
        """Commit everything but the inner store's write; idempotent."""
        self.store.put(self.step, self.places, self.outside, self.change.taken)
        self.store.slots.commit(self.change)


class DeviceTableStore(DeviceStore):
    """A device store of rows of indices, and the table that they refer to.

    The host looks up the units of new rows; ``inner`` stores one byte for each. Rows with a colour or number for which
    the table has no space are stored uncompressed; ``places`` says where each observation is.
    """

    layout: StackLayout

    def __init__(
        self,
        ring: DeviceRing,
        layout: StackLayout,
        codec: Codec,
        method: str,
        options: Mapping[str, Any],
        triton: bool | None = None,
    ) -> None:
        self.ring, self.layout, self.device = ring, layout, ring.place.device
        self._triton = device_base.runs_kernels(self.device) if triton is None else triton
        geometry = find_geometry(layout)
        assert geometry is not None  # see `accepts`
        self._index_spec = geometry.inner.spec
        inner_method, inner_codec, make = _find_inner(codec, layout)
        self.table = UnitTable(ring.spec.dtype, geometry.unit, geometry.plane)
        inner_ring = replace(ring, spec=geometry.inner.spec)
        self.inner: DeviceStore = make(inner_ring, geometry.inner, inner_codec, inner_method, {})
        n_rows, dtype = ring.n_obs * ring.n_sets, word_dtype(ring.spec.nbytes)
        n_words = ring.spec.nbytes // dtype.itemsize
        # rows outside of the table; those of an overwritten step stay in use until the new step is committed
        n_outside = n_rows + ring.n_sets * ring.n_streams
        self._outside = Pieces(n_outside, n_outside // 4, 1, n_words, dtype, ring.place, self._triton)
        self.slots = SlotPool()
        #: int32 [obs_index]: where an observation is (`kernels.expand_torch`), on the device and on the host.
        self.device_places = torch.zeros(n_rows, dtype=torch.int32, device=self.device)
        self.places = np.zeros((ring.n_sets, ring.n_steps, ring.n_streams), np.int32)
        self._uploaded: tuple[Array | None, torch.Tensor | None] = (None, None)

    @staticmethod
    def accepts(codec: Codec, layout: StackLayout) -> bool:
        # if the inner store decodes on the host, the indices are expanded there too
        return TableStore.accepts(codec, layout) and not issubclass(_find_inner(codec, layout)[2], HostDecodedStore)

    def train(self, rows: ByteRows) -> None:
        if self.table.is_empty and len(rows):
            self.table.learn(rows)

    def _device_table(self) -> torch.Tensor:
        """The entries as int64 ``[entry]`` on the device."""
        expanded, table = self._uploaded
        if table is None or expanded is not self.table.expanded:
            expanded = self.table.expanded
            table = torch.from_numpy(expanded.view(np.int64).copy()).to(self.device)
            self._uploaded = expanded, table
        return table

    # ---- writing ----

    def plan(self, step: int, batches: Sequence[Batch]) -> _TableWrite:
        ring = self.ring
        rows = np.concatenate([ring.spec.to_rows(ring.spec.to_batch(on_host(batch))) for batch in batches])
        self.train(rows)
        mapped = np.empty((len(rows), self._index_spec.nbytes), np.uint8)
        # entries that this adds stay if the step is not written, which does no harm
        is_outside = self.table.map(rows, mapped)
        by_set = self._index_spec.from_rows(mapped).reshape(len(batches), -1, *self._index_spec.shape)
        inner = self.inner.plan(step, list(by_set))
        places = np.full(len(rows), INSIDE, np.int32)
        outside = rows[:0] if is_outside is None else rows[is_outside]
        taken = self.slots.peek(len(outside))
        if is_outside is not None:
            places[is_outside] = taken + OUTSIDE
            self._outside.reserve(int(taken.min()), int(taken.max()) + 1)
        old = self.places[:, step].ravel()
        change = self.slots.plan(taken, old[old >= OUTSIDE] - OUTSIDE)
        self._device_table()  # this can fail; the rest cannot
        return _TableWrite(self, step, inner, places.reshape(self.places[:, step].shape), outside, change)

    def put(self, step: int, places: npt.NDArray[np.int32], outside: ByteRows, slots: Array) -> None:
        """Store the rows of a step that are outside of the table, and where each row of it is; idempotent."""
        self._outside.put(slots, outside)
        if not np.array_equal(self.places[:, step], places) or len(outside):
            self.device_places.view(*self.places.shape)[:, step] = torch.from_numpy(places).to(self.device)
            self.places[:, step] = places

    # ---- reading ----

    def read(self, indices: IndexBatch, out: torch.Tensor | None = None) -> torch.Tensor:
        spec, table = self.ring.spec, self.table
        n_rows = math.prod(indices.shape)
        if out is None:
            out = torch.empty((*indices.shape, *spec.shape), dtype=torch_dtype(spec.dtype), device=self.device)
        if not n_rows:
            return out
        rows = out.view(-1).view(torch.uint8).view(n_rows, spec.nbytes)
        mapped = self.inner.read(indices).reshape(n_rows, -1)
        wanted = indices.on(self.device).reshape(-1)
        if self._triton:
            from sb3_extra_buffers.kernels.expand_triton import expand  # optional: needs Triton

            outside = self._outside
            expand(
                mapped, self._device_table(), self.device_places, wanted, outside.addresses, outside.per_piece, rows,
                table.unit, table.plane,
            )  # fmt: skip
        else:
            expand_reference(
                mapped, self._device_table(), self.device_places, wanted, self._outside.whole, rows, table.unit,
                table.plane,
            )  # fmt: skip
        return out

    # ---- the rest ----

    def clear(self) -> None:
        self.inner.clear()
        self.device_places.zero_()
        self.places[:] = 0
        self.slots.clear()

    def compact(self) -> None:
        self.inner.compact()

    def memory_usage(self) -> MemoryUsage:
        usage = self.inner.memory_usage()
        index = self.device_places.nbytes + self.places.nbytes + self.slots.nbytes + self.table.nbytes
        return replace(usage, payload=usage.payload + self._outside.nbytes, index=usage.index + index)

    def check(self) -> None:
        self.inner.check()
        self.table.check()
        if not np.array_equal(self.device_places.cpu().numpy(), self.places.ravel()):
            raise AssertionError("the host and the device disagree about where observations are")
        self.slots.check(self.places[self.places >= OUTSIDE] - OUTSIDE)

    def frozen(self) -> DeviceTableStore:
        copied = object.__new__(DeviceTableStore)
        copied.__dict__.update(
            self.__dict__, inner=self.inner.frozen(), table=self.table.copy(), _outside=self._outside.frozen(),
            slots=self.slots.copy(), places=self.places.copy(),
        )  # fmt: skip
        return copied

    def __getstate__(self) -> dict[str, Any]:
        names = ("ring", "layout", "_index_spec", "inner", "table", "_outside", "slots", "places")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.device = self.ring.place.device
        self._triton = self._outside.triton
        self.device_places = torch.from_numpy(self.places.ravel()).to(self.device, copy=True)
        self._uploaded = None, None


def _find_inner(codec: Codec, layout: StackLayout) -> tuple[str, Codec, type[Any]]:
    """The method of the indices, its codec, and the device store for it."""
    geometry = find_geometry(layout)
    assert geometry is not None
    method: str = codec.inner or _DEFAULT_INNER  # type: ignore[attr-defined]  # a PaletteCodec or TableCodec
    inner = get_codec(method).bind(geometry.inner.frame_spec)
    return method, inner, find_store(inner, geometry.inner, "cuda")
