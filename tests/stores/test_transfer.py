"""Packets carry observations as they are stored, from store to store, and are not trusted."""

from __future__ import annotations

import contextlib
import json
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.compressed import CompressedArray
from sb3_extra_buffers.errors import CorruptPayloadError, HeapFullError, IndexOutOfRangeError, SpecMismatchError
from sb3_extra_buffers.files import load, open_saved, save
from sb3_extra_buffers.stores.heap import Heap
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.restore import pack_payloads, place_payloads
from sb3_extra_buffers.stores.transfer import RowPacket, export_rows, import_rows
from sb3_extra_buffers.stores.transfer_cache import KeyframeCache, split_known
from sb3_extra_buffers.stores.transfer_encoder import RowEncoder
from tests.contracts.store import KERNELS, Stacked, Walk, examples, method_params, run_fresh, transitions
from tests.torture.interrupts import Injector

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


@pytest.mark.parametrize(("frames", "target_frames"), [(4, 8), (8, 4), (4, 32), (32, 8)])
def test_segments_of_any_length_are_filed(frames: int, target_frames: int) -> None:
    source, rows = filled("delta", options={"frames": frames})
    target, model = filled("delta", seed=1, options={"frames": target_frames})

    import_rows(target, np.arange(50, 90), np.zeros(40, np.int64), sent(export_rows(source, np.arange(10, 50))))

    target.check()
    model[50:90] = rows[10:50]
    np.testing.assert_array_equal(contents(target), model)


@pytest.mark.parametrize("method", ["delta", "camera", "gzip"])
def test_stores_that_were_loaded_read_only_are_exported(method: str) -> None:
    store, model = filled(method)
    parts = store.to_parts()
    assert parts.heap is not None
    payloads = pack_payloads(parts.heap)
    arrays = {name: array.copy() for name, array in (parts.arrays | payloads).items()}
    for array in arrays.values():
        array.flags.writeable = False

    def refer(heap: Heap, payload_ids: Any) -> None:
        place_payloads(heap, payload_ids, arrays["starts"], arrays["payload"], copied=False)

    loaded = ObservationStore.from_parts(parts.record, arrays, refer, read_only=True)

    np.testing.assert_array_equal(sent(export_rows(loaded, pairs(60, 20))).read(), model[pairs(60, 20)])


@pytest.mark.parametrize(("method", "shape", "dtype"), [("palette", (24, 24, 3), "u1"), ("table", (24, 24), "f4")])
def test_tables_that_were_loaded_are_exported(method: str, shape: tuple[int, ...], dtype: str, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 2, (20, *shape)).astype(dtype)
    array = CompressedArray((20,), shape, dtype, compression_method=method)
    array[:] = images
    array.store.choose_method()
    save(array, tmp_path / "saved")
    for loaded in (load(tmp_path / "saved"), open_saved(tmp_path / "saved")):
        rows = sent(export_rows(loaded.store, np.arange(20)[None])).read()
        np.testing.assert_array_equal(rows[0].view(dtype).reshape(images.shape), images)


def contents(store: ObservationStore) -> Any:
    return store.read(np.arange(store.n_obs))


@pytest.mark.parametrize("method", ["delta", "camera", "gzip", "palette", "auto"])
def test_windows_are_read_as_they_are_stored(method: str) -> None:
    store, model = filled(method)
    windows = np.array([[4, 6, 8, 10], [31, 33, 35, 37], [112, 114, 116, 238]])
    packet = sent(export_rows(store, windows))

    np.testing.assert_array_equal(packet.read(), model[windows])
    np.testing.assert_array_equal(packet.read_windows(4), model[windows])
    if store.layout is not None and store.layout.stack > 1:
        newest = packet.read_windows(4, newest_only=True)
        np.testing.assert_array_equal(newest, model[windows][..., -store.layout.frame_bytes :])
    with pytest.raises(SpecMismatchError):
        packet.read_windows(5)


def test_windows_share_the_segments_that_they_touch() -> None:
    store, _ = filled("delta", 200)
    window = np.arange(40, 120)

    one_by_one = sum(export_rows(store, window[at : at + 1]).nbytes for at in range(len(window)))

    assert export_rows(store, window).nbytes < one_by_one / 4


def test_only_the_frames_that_are_needed_are_sent() -> None:
    store, _ = filled("none", 40)
    first_of_segment = np.arange(store.n_obs)[store.inner.frame_ids[:, -1] % store.inner.per_segment == 1][:1]  # type: ignore[union-attr]
    packet = export_rows(store, first_of_segment)
    assert packet.nbytes < 4 * (STACK + 1) * store.spec.nbytes // STACK


# ---- keyframes ----


def test_receivers_name_the_keyframes_that_they_have() -> None:
    store, rows = filled("delta", 200)
    cache = KeyframeCache()
    sizes = []
    for number in range(3):
        lease, indices = cache.lease(), pairs(200, 100, number)
        buffers = export_rows(store, indices).to_buffers(split_known(lease.known))
        sizes.append(sum(map(len, buffers)))
        np.testing.assert_array_equal(RowPacket.from_buffers(store.spec, buffers, lease).read(), rows[indices])
    assert len(cache) > 0
    assert max(sizes[1:]) < sizes[0]

    with pytest.raises(CorruptPayloadError, match="does not have"):
        RowPacket.from_buffers(store.spec, buffers)


def test_a_lease_keeps_what_the_cache_drops() -> None:
    store, rows = filled("delta", 200)
    cache = KeyframeCache(max_entries=1)
    RowPacket.from_buffers(store.spec, export_rows(store, np.arange(400)).to_buffers(), cache.lease())
    assert len(cache) == 1
    lease = cache.lease()
    buffers = export_rows(store, np.arange(400)).to_buffers(split_known(lease.known))
    for number in range(5):
        cache.add(bytes([number]) * 16, np.zeros(10, np.uint8))

    np.testing.assert_array_equal(RowPacket.from_buffers(store.spec, buffers, lease).read(), rows[:400])


def test_a_cache_of_keyframes_is_bounded() -> None:
    cache = KeyframeCache(max_entries=5, max_bytes=1000)
    for number in range(20):
        cache.add(bytes([number]) * 16, np.zeros(100, np.uint8))
    assert len(cache) == 5
    cache.touch(bytes([15]) * 16)
    cache.add(b"large" + bytes(11), np.zeros(800, np.uint8))
    assert len(cache) == 3
    assert bytes([15]) * 16 in split_known(cache.lease().known)


@pytest.mark.parametrize("method", method_params("delta", "scroll2"))
def test_keyframes_that_the_store_has_are_shared(method: str) -> None:
    source, rows = filled(method, 400)
    target, _ = filled(method, 400, seed=3)
    indices = np.arange(0, 400)
    frames = target.frames
    assert frames is not None
    n_keyframes = []
    for first in (0, 400, 800):
        import_rows(target, indices + first, indices % 2, sent(export_rows(source, indices)))
        n_keyframes.append(np.count_nonzero(frames.state.keyframe_refs))
    target.check()
    assert n_keyframes[1] <= n_keyframes[0]
    np.testing.assert_array_equal(target.read(indices + 800), rows[:400])


# ---- transactions ----


@pytest.mark.parametrize("method", ["delta", "none", "gzip", "palette"])
def test_an_import_can_be_undone(method: str) -> None:
    source, rows = filled(method)
    target, model = filled(method, seed=1)
    packet = sent(export_rows(source, np.arange(10)))
    target.commit()

    import_rows(target, np.arange(20, 30), np.zeros(10, np.int64), packet)
    assert target.undo_write()

    target.check()
    np.testing.assert_array_equal(contents(target), model)
    import_rows(target, np.arange(20, 30), np.zeros(10, np.int64), packet)
    target.commit()
    assert not target.undo_write()
    np.testing.assert_array_equal(contents(target)[20:30], rows[:10])


@pytest.mark.parametrize("method", ["delta", "gzip", "auto"])
def test_the_last_of_equal_indices_counts(method: str) -> None:
    source, rows = filled(method)
    target, model = filled(method, seed=1)
    indices = np.array([5, 6, 5, 7, 5])
    packet = sent(export_rows(source, np.arange(5)))

    import_rows(target, indices, np.zeros(5, np.int64), packet)
    assert target.undo_write()
    np.testing.assert_array_equal(contents(target), model)
    import_rows(target, indices, np.zeros(5, np.int64), packet)

    target.check()
    np.testing.assert_array_equal(target.read(np.array([5, 6, 7])), rows[[4, 1, 3]])


@pytest.mark.parametrize("method", ["delta", "gzip"])
def test_an_import_that_does_not_fit_changes_nothing(method: str) -> None:
    source, _ = filled(method, 200)
    target = ObservationStore(spec_of(), N_ENVS, method, heap_bytes=12_000)
    target.allocate(400)
    import_rows(target, np.arange(8), np.zeros(8, np.int64), sent(export_rows(source, np.arange(8))))
    target.choose_method()
    import_rows(target, np.arange(8, 16), np.zeros(8, np.int64), sent(export_rows(source, np.arange(8, 16))))
    before = contents(target)

    with pytest.raises(HeapFullError):
        import_rows(target, np.arange(16, 400), np.zeros(384, np.int64), sent(export_rows(source, np.arange(16, 400))))

    target.check()
    np.testing.assert_array_equal(contents(target), before)


@pytest.mark.parametrize("method", ["delta", "none", "gzip"])
def test_an_interrupted_import_has_happened_as_a_whole_or_not_at_all(method: str) -> None:
    source, rows = filled(method, 30)
    packet = sent(export_rows(source, np.arange(24)))
    target, model = filled(method, 30, seed=1)
    indices, streams = np.arange(10, 34), np.zeros(24, np.int64)
    after = model.copy()
    after[10:34] = rows[:24]
    with Injector() as counter:
        import_rows(target, indices, streams, packet)
    target.undo_write()
    rng = np.random.default_rng(0)
    for at in rng.integers(1, counter.count, 60).tolist():
        with Injector(at, KeyboardInterrupt()) as injector, contextlib.suppress(KeyboardInterrupt):
            import_rows(target, indices, streams, packet)
        found = contents(target)
        target.check()
        assert np.array_equal(found, model) or np.array_equal(found, after), injector.where
        if np.array_equal(found, after):
            # as it was, by plain writes
            target.write(indices, streams, model[indices])
        np.testing.assert_array_equal(contents(target), model)


@pytest.mark.parametrize("method", ["delta", "gzip"])
def test_packets_exported_beside_a_writer_hold_a_state_between_two_writes(method: str) -> None:
    store, rows = filled(method, 20)
    other = filled(method, 20, seed=1)[1]
    indices, done = np.arange(store.n_obs), threading.Event()
    packets = [sent(export_rows(filled(method, 20, seed=seed)[0], indices)) for seed in range(2)]

    def write() -> None:
        number = 0
        while not done.is_set():
            number += 1
            import_rows(store, indices, indices % 2, packets[number % 2])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(30):
            found = sent(export_rows(store, indices)).read()
            assert np.array_equal(found, rows) or np.array_equal(found, other)
    finally:
        done.set()
        writer.join()
    store.check()


def test_invalid_indices_change_nothing() -> None:
    source, _ = filled("delta")
    target, model = filled("delta", seed=1)
    packet = sent(export_rows(source, np.arange(5)))
    for indices, error in (
        (np.arange(target.n_obs - 2, target.n_obs + 3), IndexOutOfRangeError),
        (np.arange(-1, 4), IndexOutOfRangeError),
        (np.arange(4), SpecMismatchError),
    ):
        with pytest.raises(error):
            import_rows(target, indices, np.zeros(len(indices), np.int64), packet)
    with pytest.raises(IndexOutOfRangeError):
        export_rows(source, np.array([source.n_obs]))
    with pytest.raises(IndexOutOfRangeError):
        packet.read(np.array([5]))
    np.testing.assert_array_equal(contents(target), model)


def test_changes_are_reported_as_rows() -> None:
    source, rows = filled("delta")
    target, _ = filled("delta", seed=1)
    reported = []
    target.on_change = lambda *change: reported.append(change)

    import_rows(target, np.arange(5), np.zeros(5, np.int64), sent(export_rows(source, np.arange(5))))

    assert [change[0] for change in reported] == ["write"]
    np.testing.assert_array_equal(reported[0][3], rows[:5])


# ---- packets are not trusted ----


@pytest.mark.parametrize("method", METHODS)
def test_damaged_packets_raise_or_hold_other_rows(method: str) -> None:
    source, _ = filled(method)
    target, model = filled(method, seed=1)
    buffers = [bytearray(part) for part in export_rows(source, pairs(60, 20)).to_buffers()]
    to = pairs(60, 20, 5)
    rng = np.random.default_rng(0)
    n_refused = 0
    for turn in range(300):
        damaged = [bytearray(part) for part in buffers]
        part = int(rng.integers(len(damaged)))
        kind = turn % 4
        if kind == 0:
            damaged[part][int(rng.integers(len(damaged[part])))] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            at = int(rng.integers(len(damaged[part])))
            damaged[part][at : at + 4] = rng.integers(0, 256, 4).astype(np.uint8).tobytes()[: len(damaged[part]) - at]
        elif kind == 2:
            del damaged[part][int(rng.integers(len(damaged[part]))) :]
        else:
            other = int(rng.integers(len(damaged)))
            damaged[part], damaged[other] = damaged[other], damaged[part]
        try:
            packet = RowPacket.from_buffers(source.spec, damaged)
            import_rows(target, to, np.zeros(40, np.int64), packet)
        except CorruptPayloadError:
            n_refused += 1
            np.testing.assert_array_equal(contents(target), model)
            continue
        target.check()
        # whatever was filed can be read
        contents(target)
        target.undo_write()
        if not np.array_equal(contents(target), model):  # decoded and collected
            target, model = filled(method, seed=1)
    assert n_refused > 100


# runs in a process of its own: a read outside the packet ends it
FUZZ = """
import ctypes, json, mmap, sys
import numpy as np
from sb3_extra_buffers.errors import CorruptPayloadError
from sb3_extra_buffers.stores.transfer import RowPacket, export_rows
from tests.stores.test_transfer import filled

method, compiled, count = sys.argv[1], sys.argv[2] == "True", int(sys.argv[3])
store, _ = filled(method, compiled=compiled)
buffers = [np.frombuffer(bytearray(part), np.uint8) for part in export_rows(store, np.arange(100)).to_buffers()]
names = [entry[0] for entry in json.loads(buffers[0].tobytes())["arrays"]]
# right before a page that must not be read
at = 1 + names.index("data")
pages = -(-buffers[at].size // mmap.PAGESIZE) * mmap.PAGESIZE
area = mmap.mmap(-1, pages + mmap.PAGESIZE)
address = ctypes.addressof(ctypes.c_char.from_buffer(area))
if sys.platform == "linux":
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + pages), mmap.PAGESIZE, 0) == 0
data = np.frombuffer(area, np.uint8)[pages - buffers[at].size : pages]
data[:] = buffers[at]
truth, buffers[at] = buffers[at], data
rng = np.random.default_rng(0)
refused = read = 0
for turn in range(count):
    places = rng.integers(0, data.size, rng.integers(1, 4))
    if turn % 2:
        # the last segment, which ends where the packet does
        places = data.size - 65 - places % 200
    data[places] = rng.choice([0, 1, 2, 3, 255, int(rng.integers(256))], len(places))
    try:
        packet = RowPacket.from_buffers(store.spec, buffers, compiled=compiled)
        packet.verify()
        packet.read()
        read += 1
    except CorruptPayloadError:
        refused += 1
    data[:] = truth
print(refused, read)
"""


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("method", method_params("delta", "delta2", "scroll", "camera"))
def test_damaged_packets_are_not_read_past_their_end(method: str, compiled: bool) -> None:
    refused, _ = map(int, run_fresh(FUZZ, method, str(compiled), "400").split())
    assert refused > 20


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["record"].update(kind="pickle"),
        lambda header: header["record"].update(stack=1 << 40),
        lambda header: header["record"].update(stack=0),
        lambda header: header["record"].update(axis="middle"),
        lambda header: header["record"].update(codec=["os", "os", {}]),
        lambda header: header["record"].update(codec=["gzip", "gzip", {"level": 6}]),
        lambda header: header["record"]["codec"][2].update(frames=1 << 20),
        lambda header: header["record"].update(shared=[0, 1 << 20]),
        lambda header: header["record"].update(shared=[-1, 1]),
        lambda header: header.update(shape=[1 << 40]),
        lambda header: header.update(shape=[-1]),
        lambda header: header["arrays"][0].__setitem__(1, "O"),
        lambda header: header["arrays"][0].__setitem__(2, [1 << 40, 4]),
        lambda header: header["shared"][0].__setitem__(1, 1 << 40),
        lambda header: header["shared"][0].__setitem__(2, 1),
        lambda header: header["shared"][0].__setitem__(0, "../" * 10 + "xx"),
        lambda header: header.pop("arrays"),
    ],
)
def test_forged_headers_raise(change: Any) -> None:
    source, _ = filled("delta")
    buffers = export_rows(source, np.arange(60)).to_buffers()
    header = json.loads(buffers[0])
    change(header)
    with pytest.raises(CorruptPayloadError):
        RowPacket.from_buffers(source.spec, [json.dumps(header).encode(), *buffers[1:]])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ids", 0x7FFF), ("ids", 0xFFFF), ("lengths", 0), ("lengths", 1), ("lengths", 7), ("lengths", -1),
        ("lengths", 0x7FFFFFFF), ("owners", 0x7FFF), ("owners", -2), ("owners", -0x8000), ("data", 0), ("data", 0xFF),
    ],
)  # fmt: skip
def test_forged_tables_raise(name: str, value: int) -> None:
    source, _ = filled("delta")
    buffers = export_rows(source, np.arange(60)).to_buffers()
    header = json.loads(buffers[0])
    number = [entry[0] for entry in header["arrays"]].index(name)
    dtype = np.dtype(header["arrays"][number][1])
    for where in (slice(None), slice(-1, None), slice(1)):
        if name == "data" and where != slice(None):
            continue
        forged = np.frombuffer(bytearray(buffers[1 + number]), dtype)
        forged[where] = value
        with pytest.raises(CorruptPayloadError):
            RowPacket.from_buffers(source.spec, [*buffers[: 1 + number], forged, *buffers[2 + number :]])


@pytest.mark.parametrize("buffers", [[], [b""], [b"{}"], [b"null"], [b"[1]"], [b"\xff\xff"], [b"{" * 10_000]])
def test_anything_but_a_packet_raises(buffers: list[bytes]) -> None:
    with pytest.raises(CorruptPayloadError):
        RowPacket.from_buffers(spec_of(), buffers)


# ---- collectors ----


@pytest.mark.parametrize("axis", ["first", "last"])
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_collectors_encode_what_they_collect(method: str, n_envs: int, axis: str) -> None:
    encoder = RowEncoder(spec_of(axis), n_envs, method)
    steps = list(transitions(SHAPE, STACK, axis, n_envs, 90))
    for first, stop in ((0, 1), (1, 30), (30, 60), (60, 90)):
        rows, next_rows = (
            np.concatenate([step[which].reshape(n_envs, -1) for step in steps[first:stop]]) for which in range(2)
        )
        cut = len(rows) if stop != 60 else len(rows) - 1  # not a whole step
        packet = sent(encoder.encode([rows[:cut], next_rows[:cut]]))
        np.testing.assert_array_equal(packet.read(), np.stack([rows[:cut], next_rows[:cut]]))
        packet.verify()
    single = sent(RowEncoder(spec_of(axis), n_envs, method).encode([rows]))
    np.testing.assert_array_equal(single.read(), rows[None])


def test_what_collectors_send_takes_as_much_memory_as_what_is_written() -> None:
    n_steps = 512
    written = ObservationStore(spec_of(), 1, "delta")
    imported = ObservationStore(spec_of(), 1, "delta")
    for store in (written, imported):
        store.allocate(n_steps)
        store.allocate(n_steps)
    steps = [
        (obs.reshape(1, -1), after.reshape(1, -1)) for obs, after in transitions(SHAPE, STACK, "first", 1, n_steps)
    ]
    encoder = RowEncoder(spec_of(), 1, "delta")
    for first in range(0, n_steps, 64):
        rows, next_rows = (np.concatenate([step[which] for step in steps[first : first + 64]]) for which in range(2))
        for step in range(64):
            at = first + step
            written.write_step(at, n_steps + at, *steps[at])
        indices = np.arange(first, first + 64)
        import_rows(
            imported, np.stack([indices, indices + n_steps]), np.zeros(128, np.int64), encoder.encode([rows, next_rows])
        )
    np.testing.assert_array_equal(contents(written), contents(imported))
    imported.check()
    ours, plain = imported.memory_usage(), written.memory_usage()
    # the first stack of a packet repeats frames of the packet before
    assert ours.payload + ours.keyframes < 1.25 * (plain.payload + plain.keyframes)


# ---- any order of events ----


class TransferMachine(RuleBasedStateMachine):
    """Two stores and their models: writes, erasures, packets from one to the other, copies."""

    method = "delta"
    compiled: bool | None = None

    def __init__(self) -> None:
        super().__init__()
        self.stores = [ObservationStore(spec_of(), 2, self.method, compiled=self.compiled) for _ in range(2)]
        self.models = [np.zeros((40, spec_of().nbytes), np.uint8) for _ in range(2)]
        self.walks = [Stacked(Walk(SHAPE, seed), STACK, "first") for seed in range(2)]
        for store in self.stores:
            store.allocate(40)

    @rule(which=st.integers(0, 1), first=st.integers(0, 39), count=st.integers(1, 12), stream=st.integers(0, 1))
    def write(self, which: int, first: int, count: int, stream: int) -> None:
        indices = (first + np.arange(count)) % 40
        rows = np.stack([self.walks[stream].step()[0].reshape(-1) for _ in range(count)])
        self.stores[which].write(indices, np.full(count, stream), rows)
        self.models[which][indices] = rows

    @rule(which=st.integers(0, 1), indices=st.lists(st.integers(0, 39), max_size=12))
    def erase(self, which: int, indices: list[int]) -> None:
        self.stores[which].erase(np.array(indices, np.int64))
        self.models[which][indices] = 0

    @rule(which=st.integers(0, 1), moves=st.lists(st.tuples(st.integers(0, 39), st.integers(0, 39)), max_size=16))
    def send(self, which: int, moves: list[tuple[int, int]]) -> None:
        source, target = (np.array([move[side] for move in moves], np.int64) for side in range(2))
        packet = sent(export_rows(self.stores[which], source), compiled=self.compiled)
        rows = self.models[which][source]
        np.testing.assert_array_equal(packet.read(), rows)
        import_rows(self.stores[1 - which], target, np.zeros(len(moves), np.int64), packet)
        for index, row in zip(target, rows, strict=True):
            self.models[1 - which][index] = row

    @rule(which=st.integers(0, 1))
    def copy(self, which: int) -> None:
        self.stores[which] = pickle.loads(pickle.dumps(self.stores[which]))

    @invariant()
    def holds(self) -> None:
        for store, model in zip(self.stores, self.models, strict=True):
            store.check()
            np.testing.assert_array_equal(contents(store), model)


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize(
    "method", method_params("delta", "delta2", "none", "scroll", "camera", "gzip", "auto", "palette")
)
def test_stores_hold_what_was_sent_in_any_order(method: str, compiled: bool) -> None:
    machine = type("Machine", (TransferMachine,), {"method": method, "compiled": compiled})
    run_state_machine_as_test(machine, settings=examples(6, 25))
