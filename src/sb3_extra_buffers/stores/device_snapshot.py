"""Observations behind a device as a host store, which any machine can read, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.stores.device_base import IndexBatch
from sb3_extra_buffers.stores.device_observation import DeviceObservationStore
from sb3_extra_buffers.stores.observation import ObservationStore

Array = npt.NDArray[Any]
# steps that are copied at a time
_CHUNK = 256


def to_host(store: DeviceObservationStore, steps: Sequence[int]) -> ObservationStore | list[Array]:
    """The observations in a host store, or raw ones as arrays ``[step, stream, ...]`` per set.

    Observations that are encoded on the device are encoded again; ``steps`` are those written, in order.
    """
    on_host = None if store.inner is None else store.inner.to_host()
    if on_host is not None:
        return on_host
    copied = ObservationStore(store.spec, store.n_streams, store.method, store.chooser.options)
    for i in range(store.n_sets):
        copied.allocate(store.n_obs, are_next=i == 1)
    streams = np.arange(store.n_streams)

    def write(step: int, sets: Array) -> None:
        rows = [store.spec.to_rows(batch) for batch in sets]
        first = step * store.n_streams
        if len(rows) == 2:
            copied.write_step(first, store.n_obs + first, *rows)
        else:
            for i, batch in enumerate(rows):
                copied.write(i * store.n_obs + first + streams, streams, batch)

    _copy(store, steps, lambda indices: store.read(IndexBatch(indices)).cpu().numpy(), write)
    return copied


def from_host(store: DeviceObservationStore, saved: ObservationStore | Sequence[Array], steps: Sequence[int]) -> None:
    """Fill ``store``, which is new, with ``steps`` of what `to_host` returned."""
    if isinstance(saved, ObservationStore):
        if store.inner is not None and store.inner.adopt(saved):
            return
        rows_of = saved.read
        _copy(store, steps, lambda indices: store.spec.from_rows(rows_of(indices.ravel())), store.write)
    else:
        flat = np.concatenate([rows.reshape(store.n_obs, *store.spec.shape) for rows in saved])
        _copy(store, steps, lambda indices: flat[indices], store.write)


def _copy(
    store: DeviceObservationStore,
    steps: Sequence[int],
    read: Callable[[Array], Array],
    write: Callable[[int, Any], None],
) -> None:
    """Pass the observations of ``steps``, read by indices, to ``write`` step by step."""
    for first in range(0, len(steps), _CHUNK):
        chunk = np.asarray(steps[first : first + _CHUNK])
        indices = chunk[:, None] * store.n_streams + np.arange(store.n_streams)
        sets = read((np.arange(store.n_sets)[:, None, None] * store.n_obs + indices).reshape(store.n_sets, -1))
        by_step = sets.reshape(store.n_sets, len(chunk), *store.step_shape).swapaxes(0, 1)
        for step, batches in zip(chunk.tolist(), by_step, strict=True):
            write(step, batches)
