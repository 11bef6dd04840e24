"""Observations behind a device as a store of the host, which any machine can read, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.stores.device_observation import DeviceObservations, IndexBatch, _Dense, _OnHost
from sb3_extra_buffers.stores.observation import ObservationStore

Array = npt.NDArray[Any]
# steps that cross at once
_CHUNK = 256


def to_host(of: DeviceObservations, steps: Sequence[int]) -> ObservationStore | list[Array]:
    """The store that has them if they are on the host; dense ones as ``[step, stream, ...]`` for each set; all others
    encoded again, ``steps`` in the order in which they were written.
    """
    inner = of._inner
    if isinstance(inner, _OnHost):
        return inner.store
    if isinstance(inner, _Dense):
        return list(inner.rows.cpu().numpy().reshape(of.n_sets, *of.shape))
    store = ObservationStore(of.spec, of.n_streams, of.method, of.options)
    store.allocate(of.n_obs * of.n_sets)
    _write(
        of,
        steps,
        lambda indices: of.read(IndexBatch(indices)).cpu().numpy(),
        lambda step, sets: _put(store, step, sets),
    )
    return store


def _put(store: ObservationStore, step: int, sets: Array) -> None:
    streams = np.arange(store.n_streams)
    for place, batch in enumerate(sets):
        first = place * (store.n_obs // len(sets)) + step * store.n_streams
        store.write(first + streams, streams, store.spec.to_rows(batch))


def from_host(into: DeviceObservations, found: ObservationStore | Sequence[Array], steps: Sequence[int]) -> None:
    """Let ``into``, which was just made, hold ``steps`` of what `to_host` gave."""
    if isinstance(found, ObservationStore):
        if isinstance(into._inner, _OnHost) and found.heap_bytes == into._heap_bytes:
            into._inner.store = found
            return
        store = found
        _write(into, steps, lambda indices: into.spec.from_rows(store.read(indices.ravel())), into.write)
    else:
        flat = np.concatenate([rows.reshape(into.n_obs, *into.spec.shape) for rows in found])
        _write(into, steps, lambda indices: flat[indices], into.write)


def _write(
    of: DeviceObservations, steps: Sequence[int], read: Callable[[Array], Array], write: Callable[[int, Any], None]
) -> None:
    for first in range(0, len(steps), _CHUNK):
        chunk = np.asarray(steps[first : first + _CHUNK])
        indices = chunk[:, None] * of.n_streams + np.arange(of.n_streams)
        sets = read((np.arange(of.n_sets)[:, None, None] * of.n_obs + indices).reshape(of.n_sets, -1))
        by_step = sets.reshape(of.n_sets, len(chunk), *of.step_shape).swapaxes(0, 1)
        for step, batches in zip(chunk.tolist(), by_step, strict=True):
            write(step, batches)
