"""Packets carry observations as they are stored, from store to store, and are not trusted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import CorruptPayloadError, IndexOutOfRangeError, SpecMismatchError
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.transfer import RowPacket, export_rows, import_rows
from sb3_extra_buffers.stores.transfer_cache import KeyframeCache, split_known
from tests.contracts.store import KERNELS, method_params, transitions

METHODS = method_params(
    "delta", "delta2", "none", "scroll", "scroll2", "camera", "zstd", "lz4-block", "gzip", "rle", "palette", "auto"
)
SHAPE, STACK, N_ENVS = (12, 12), 4, 2


def spec_of(axis: str = "first") -> ObsSpec:
    shape = (STACK, *SHAPE) if axis == "first" else (*SHAPE, STACK)
    return ObsSpec(shape, np.dtype(np.uint8))


def filled(
    method: str, n_steps: int = 60, seed: int = 0, compiled: bool | None = None, axis: str = "first", **settings: Any
) -> tuple[ObservationStore, Any]:
    """A store of observations and next observations, and their rows."""
    store = ObservationStore(spec_of(axis), N_ENVS, method, compiled=compiled, **settings)
    first = store.allocate(n_steps * N_ENVS)
    following = store.allocate(n_steps * N_ENVS)
    assert (first, following) == (0, n_steps * N_ENVS)
    model = np.zeros((2 * n_steps * N_ENVS, store.spec.nbytes), np.uint8)
    for step, (obs, next_obs) in enumerate(transitions(SHAPE, STACK, axis, N_ENVS, n_steps, seed)):
        rows, next_rows = obs.reshape(N_ENVS, -1), next_obs.reshape(N_ENVS, -1)
        at = step * N_ENVS
        store.write_step(at, following + at, rows, next_rows)
        model[at : at + N_ENVS], model[following + at : following + at + N_ENVS] = rows, next_rows
    return store, model


def sent(packet: RowPacket, **settings: Any) -> RowPacket:
    """The packet as a receiver sees it."""
    return RowPacket.from_buffers(packet.spec, [bytes(part) for part in packet.to_buffers()], **settings)


def pairs(n_steps: int, count: int, seed: int = 0) -> Any:
    """Random indices of observations and their next observations."""
    rows = np.random.default_rng(seed).integers(0, n_steps * N_ENVS, count)
    return np.stack([rows, rows + n_steps * N_ENVS])


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("method", METHODS)
def test_packets_hold_what_the_store_holds(method: str, compiled: bool) -> None:
    store, model = filled(method, compiled=compiled)
    for indices in (pairs(60, 20), np.arange(store.n_obs), np.arange(3), np.zeros(0, np.int64)):
        packet = sent(export_rows(store, indices), compiled=compiled)

        np.testing.assert_array_equal(packet.read(), model[indices])
        packet.verify()
        some = np.arange(packet.n_rows)[::3]
        np.testing.assert_array_equal(packet.read(some), model[indices].reshape(-1, store.spec.nbytes)[some])


@pytest.mark.parametrize("axis", ["first", "last"])
@pytest.mark.parametrize("target_method", ["same", "delta", "gzip"])
@pytest.mark.parametrize("method", METHODS)
def test_packets_are_filed_in_other_stores(method: str, target_method: str, axis: str) -> None:
    source, rows = filled(method, axis=axis)
    target, model = filled(method if target_method == "same" else target_method, seed=1, axis=axis)
    streams = np.zeros(40, np.int64)
    for number in range(6):
        indices, to = pairs(60, 20, number), pairs(60, 20, number + 100)
        import_rows(target, to, streams, sent(export_rows(source, indices)))
        target.check()
        model[to[0]], model[to[1]] = rows[indices[0]], rows[indices[1]]
        np.testing.assert_array_equal(target.read(np.arange(target.n_obs)), model)
        # plain writes go on
        for step, (obs, next_obs) in enumerate(transitions(SHAPE, STACK, axis, N_ENVS, 4, seed=number + 7)):
            at = 2 * (step + number)
            target.write_step(at, 120 + at, obs.reshape(2, -1), next_obs.reshape(2, -1))
            model[at : at + 2], model[120 + at : 122 + at] = obs.reshape(2, -1), next_obs.reshape(2, -1)
        target.check()
    np.testing.assert_array_equal(target.read(np.arange(target.n_obs)), model)
