"""Compiled kernels against the reference kernels, on memory filled so that unwritten bytes show."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sb3_extra_buffers.codecs import ObsSpec, get_codec
from sb3_extra_buffers.codecs.delta import BLOCK, apply_delta, encode_delta, padded
from sb3_extra_buffers.errors import CorruptPayloadError
from sb3_extra_buffers.kernels import frame_kernels
from sb3_extra_buffers.stores.frames import FrameStore
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.registry import make_store
from sb3_extra_buffers.stores.segments import SegmentStore
from tests.contracts.store import KERNELS, UNWRITTEN, Walk, method_params
from tests.kernels.wrapping import callable_from_python

SIZES = [1, 7, 8, 63, 64, 65, 511, 512, 513, 4095, 4096, 4097, 7056, 70_000]
UINT8 = np.dtype(np.uint8)
Bytes = npt.NDArray[np.uint8]


def pairs(size: int) -> list[tuple[str, Bytes, Bytes]]:
    """Rows and references that differ nowhere, in a few bytes, in many, everywhere, and at the edges."""
    rng = np.random.default_rng(size)
    base = rng.integers(0, 4, size).astype(np.uint8)
    zero = np.zeros(size, np.uint8)
    cases: list[tuple[str, Bytes, Bytes]] = [
        ("same", base, base.copy()),
        ("zeros", zero, zero.copy()),
        ("from zero", base, zero),
        ("to zero", zero, base),
        ("all changed", base ^ np.uint8(255), base),
        ("noise", rng.integers(0, 256, size).astype(np.uint8), base),
    ]
    for name, where in (("first", [0]), ("last", [size - 1]), ("both ends", [0, size - 1])):
        row = base.copy()
        row[where] ^= np.uint8(0x80)
        cases.append((name, row, base))
    for share in (0.002, 0.05, 0.3, 0.6):
        row = base.copy()
        changed = rng.random(size) < share
        row[changed] = rng.integers(0, 256, int(changed.sum()))
        cases.append((f"{share} changed", row, base))
        row = base.copy()
        row[changed] = 200
        cases.append((f"{share} changed to one value", row, base))
    row = base.copy()
    row[size // 3 : size // 2 + 1] = 9
    cases.append(("one block", row, base))
    return cases


@pytest.mark.parametrize("size", SIZES)
def test_apply_delta_undoes_encode_delta(size: int) -> None:
    for name, row, reference in pairs(size):
        payload = encode_delta(row, reference)
        assert len(payload) <= size, name
        target = np.full(padded(size), UNWRITTEN, np.uint8)
        target[:size] = reference
        apply_delta(np.frombuffer(payload, np.uint8), target, size)
        np.testing.assert_array_equal(target[:size], row, name)


@pytest.mark.parametrize("size", SIZES)
def test_compiled_and_reference_encode_agree(size: int) -> None:
    encode = callable_from_python(pytest.importorskip("sb3_extra_buffers.kernels.delta_numba").encode)
    lines = -(-size // 64) * 64
    scratch = np.full(padded(size) // BLOCK * (BLOCK + BLOCK // 4), UNWRITTEN, np.uint8)
    for name, row, reference in pairs(size):
        # rows are zero-padded to whole lines; the bytes around them must not matter
        rows = np.full((3, lines), UNWRITTEN, np.uint8)
        rows[1] = np.pad(row, (0, lines - size))
        references = np.full((3, lines), 0x55, np.uint8)
        references[1] = np.pad(reference, (0, lines - size))
        target = np.full(3 * size + 2 * BLOCK, UNWRITTEN, np.uint8)
        at = 13

        length = encode(target, at, rows.reshape(-1), lines, references.reshape(-1), lines, size, scratch)

        wanted = encode_delta(row, reference)
        assert (target[:at] == UNWRITTEN).all()
        if length >= size:
            assert wanted == row.tobytes(), name
        else:
            assert target[at : at + length].tobytes() == wanted, name


@pytest.mark.parametrize("unit", ["words", "lines"])
@pytest.mark.parametrize("size", SIZES)
def test_compiled_and_reference_apply_agree(size: int, unit: str) -> None:
    compiled = pytest.importorskip("sb3_extra_buffers.kernels.delta_numba")
    if unit == "lines" and not compiled.HAS_LINES:
        pytest.skip("this processor cannot move bytes under a mask")
    apply = callable_from_python(getattr(compiled, f"apply_{unit}"))
    for name, row, reference in pairs(size):
        payload = encode_delta(row, reference)
        if len(payload) in (0, size):
            continue  # handled by the caller
        target = np.full(padded(size), UNWRITTEN, np.uint8)
        target[:size] = reference
        n_tops = padded(size) // BLOCK
        source = np.concatenate([np.frombuffer(payload, np.uint8), np.full(64, UNWRITTEN, np.uint8)])
        work = [np.full(n_tops * BLOCK // 8 + 8, -1, np.int32), np.full(n_tops * BLOCK // 64 + 8, -1, np.int32)]
        values = np.full(n_tops * BLOCK + 64, UNWRITTEN, np.uint8)

        assert apply(source, 0, len(payload), target, size, *work, values), name

        np.testing.assert_array_equal(target[:size], row, name)


def build(method: str, frame: tuple[int, ...], stack: int, compiled: bool, axis: Any = "first") -> Any:
    shape = frame if stack == 1 else (stack, *frame) if axis == "first" else (*frame, stack)
    layout = StackLayout(ObsSpec(shape, UINT8), stack, axis)
    return make_store(layout, 200, 2, get_codec(method).bind(layout.frame_spec), compiled=compiled)


def light_rows(frame: tuple[int, ...], stack: int, n_rows: int, seed: int) -> Bytes:
    """Stacks in which little changes, so that no segment is compressed; episodes end now and then."""
    rng = np.random.default_rng(seed)
    current = rng.integers(0, 5, frame).astype(np.uint8)
    planes = [np.zeros(frame, np.uint8)] * stack
    rows = []
    for step in range(n_rows):
        current = current.copy()
        current.reshape(-1)[rng.integers(0, current.size, 2)] = rng.integers(0, 256)
        planes = [*planes[1:], current] if step % 23 else [*[np.zeros(frame, np.uint8)] * (stack - 1), current]
        rows.append(np.stack(planes).reshape(-1))
    return np.stack(rows)


def write_all(store: FrameStore, rows: list[Bytes]) -> None:
    for step in range(len(rows[0])):
        indices = np.array([2 * step % 200, (2 * step + 1) % 200])
        store.write(indices, np.arange(2), np.stack([rows[0][step], rows[1][step]]))


@pytest.mark.parametrize(("frame", "stack"), [((16, 16), 1), ((30, 21), 4), ((260, 260), 2)])
def test_compiled_and_reference_kernels_write_the_same_bytes(frame: tuple[int, ...], stack: int) -> None:
    pytest.importorskip("numba")
    n_steps = 260 if frame[0] < 100 else 40
    rows = [light_rows(frame, stack, n_steps, seed) for seed in (1, 2)]
    fast, slow = (build("delta", frame, stack, compiled) for compiled in (True, False))
    assert isinstance(fast, SegmentStore)
    assert isinstance(slow, SegmentStore)
    # reference kernels end segments sooner, because they decode more slowly
    slow._replace(config=fast.state.config)
    for store in (fast, slow):
        write_all(store, rows)

    np.testing.assert_array_equal(fast.frame_ids, slow.frame_ids)
    for column in (
        "counts",
        "live",
        "keyframes",
        "refs",
        "lengths",
        "open_segments",
        "keyframe_refs",
        "stream_keyframes",
    ):
        np.testing.assert_array_equal(getattr(fast.state, column), getattr(slow.state, column), column)
    sealed = np.flatnonzero(fast.state.lengths).tolist()
    assert sealed
    for segment in sealed:
        assert bytes(fast.heap.read(segment)) == bytes(slow.heap.read(segment))
        assert fast.heap.read(segment)[0] == 0


@pytest.mark.parametrize("written_compiled", [True, False], ids=["compiled-to-reference", "reference-to-compiled"])
@pytest.mark.parametrize("axis", ["first", "last"])
@pytest.mark.parametrize("method", method_params("delta", "delta2"))
def test_compiled_and_reference_kernels_continue_each_others_stores(
    method: str, axis: str, written_compiled: bool
) -> None:
    pytest.importorskip("numba")
    frame, stack = (24, 18), 4
    store = build(method, frame, stack, written_compiled, axis)
    planes = [Walk(frame, seed).frames(263) for seed in range(2)]
    stack_axis = 0 if axis == "first" else -1
    rows = [
        np.stack([np.stack(list(walk[step : step + 4]), axis=stack_axis).reshape(-1) for step in range(260)])
        for walk in planes
    ]
    write_all(store, [part[:150] for part in rows])
    wanted = store.read(np.arange(200))
    assert store.heap.live_bytes

    stored = pickle.dumps(store)
    other = pickle.loads(stored)
    other._compiled = not written_compiled
    other = pickle.loads(pickle.dumps(other))

    assert other._kernels.compiled is not written_compiled
    np.testing.assert_array_equal(other.read(np.arange(200)), wanted)
    for again in (store, other):
        for step in range(150, 260):
            again.write(
                np.array([2 * step % 200, (2 * step + 1) % 200]), np.arange(2), np.stack([p[step] for p in rows])
            )
        again.check()
    np.testing.assert_array_equal(other.read(np.arange(200)), store.read(np.arange(200)))


@pytest.mark.parametrize("compiled", KERNELS)
def test_read_writes_all_of_the_target_and_nothing_else(compiled: bool) -> None:
    frame, stack = (30, 21), 4
    store = build("delta", frame, stack, compiled)
    rows = [light_rows(frame, stack, 90, seed) for seed in (3, 4)]
    write_all(store, rows)
    size = store.layout.frame_bytes
    sets = np.array([[0, 5, 199, 3], [2, 7, 197, 3]])
    nbytes = sets.size * stack * size
    guarded = np.full(nbytes + 128, UNWRITTEN, np.uint8)
    out = guarded[64:-64]
    kernels = frame_kernels(compiled)
    # in two parts, as two threads would
    for first, stop in ((0, 2), (2, 4)):
        code = kernels.read_frames(
            store._tables(), store.frame_ids, sets, out, first, stop, np.zeros(0, np.int64), False
        )
        assert code == -1
    assert (guarded[:64] == UNWRITTEN).all()
    assert (guarded[-64:] == UNWRITTEN).all()
    np.testing.assert_array_equal(out.reshape(2, 4, -1), store.read(sets))


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("unit", [1, 2, 3, 4, 5, 8, 12])
@pytest.mark.parametrize("stack", [1, 2, 3, 4, 5, 20])
def test_split_and_join(stack: int, unit: int, compiled: bool) -> None:
    kernels = frame_kernels(compiled)
    rng = np.random.default_rng(0)
    for pixels in (1, 2, 3, 9, 20, 31, 32, 33, 35, 63, 64, 65, 95, 127, 128, 129, 441):
        observations = rng.integers(0, 256, (3, pixels, stack, unit)).astype(np.uint8)
        # bytes after the rows that are split or joined must stay as they are
        frames = np.full((4, stack, pixels * unit), UNWRITTEN, np.uint8)

        kernels.split_stack(observations, frames[:3])

        np.testing.assert_array_equal(frames[:3].reshape(3, stack, pixels, unit), observations.transpose(0, 2, 1, 3))
        assert (frames[3] == UNWRITTEN).all()
        joined = np.full((4, pixels, stack, unit), UNWRITTEN, np.uint8)
        kernels.join_stack(frames[:3], joined[:3])
        np.testing.assert_array_equal(joined[:3], observations)
        assert (joined[3] == UNWRITTEN).all()


@pytest.mark.parametrize("pixels", [32, 64])
@pytest.mark.parametrize(("unit", "stack"), [(1, 2), (1, 3), (3, 2), (3, 3), (3, 4)])
def test_blocks_of_a_stack(unit: int, stack: int, pixels: int) -> None:
    """Those of this processor and those of others."""
    intrinsics = pytest.importorskip("sb3_extra_buffers.kernels.intrinsics")
    names = "target, to, source, at, size, unit, stack"
    join = callable_from_python(getattr(intrinsics, f"join_block_{pixels}"), f"{names}, streaming")
    split = callable_from_python(getattr(intrinsics, f"split_block_{pixels}"), names)
    rng = np.random.default_rng(0)
    # the block is in the middle of larger frames
    size = (pixels + 9) * unit
    source = rng.integers(0, 256, stack * size).astype(np.uint8)
    wanted = source.reshape(stack, -1, unit)[:, 4 : 4 + pixels].swapaxes(0, 1).reshape(-1)
    for streaming in (0, 1):
        target = np.full(wanted.size + 256, UNWRITTEN, np.uint8)
        at = 64 - target.ctypes.data % 64 + (0 if streaming else 5)

        join(target, at, source, 4 * unit, size, unit, stack, streaming)

        np.testing.assert_array_equal(target[at : at + wanted.size], wanted)
        assert (target[:at] == UNWRITTEN).all()
        assert (target[at + wanted.size :] == UNWRITTEN).all()
    frames = np.full_like(source, UNWRITTEN)
    split(frames, 4 * unit, target, at, size, unit, stack)
    inside = np.zeros((stack, pixels + 9, unit), bool)
    inside[:, 4 : 4 + pixels] = True
    np.testing.assert_array_equal(frames, np.where(inside.reshape(-1), source, UNWRITTEN))


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("frame", [(5, 7, 3), (60, 61, 3), (60, 61, 1), (60, 61, 2)])
@pytest.mark.parametrize("stack", [2, 3, 4])
@pytest.mark.parametrize("method", ["delta", "none"])
def test_stacks_along_the_last_axis_are_read_as_written(
    method: str, stack: int, frame: tuple[int, ...], compiled: bool
) -> None:
    layout = StackLayout(ObsSpec((*frame[:2], stack * frame[2]), UINT8), stack, "last")
    store: Any = make_store(layout, 200, 2, get_codec(method).bind(layout.frame_spec), compiled=compiled)
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (2, 8 + stack, *frame)).astype(np.uint8)
    rows = [
        np.stack([np.concatenate(list(part[step : step + stack]), axis=-1).reshape(-1) for step in range(8)])
        for part in frames
    ]
    write_all(store, rows)
    wanted = np.stack(rows, axis=1).reshape(16, -1)
    # the larger batch is one that is written past the caches
    for n_rows in (1, 5, (4 << 20) // wanted.shape[1] + 1 if compiled else 7):
        sets = rng.integers(0, 16, (2, n_rows))
        np.testing.assert_array_equal(store.read(sets).reshape(2, n_rows, -1), wanted[sets])


@pytest.mark.parametrize("offset", [0, 1, 4, 16])
@pytest.mark.parametrize("stack", [2, 3, 4])
def test_stacks_are_joined_at_any_address(stack: int, offset: int) -> None:
    pytest.importorskip("numba")
    layout = StackLayout(ObsSpec((61, 60, 3 * stack), UINT8), stack, "last")
    store: Any = make_store(layout, 200, 2, get_codec("delta").bind(layout.frame_spec), compiled=True)
    rows = [np.random.default_rng(seed).integers(0, 256, (8, layout.spec.nbytes)).astype(np.uint8) for seed in (0, 1)]
    write_all(store, rows)
    wanted = np.stack(rows, axis=1).reshape(16, -1)
    for n_rows in (4, (8 << 20) // layout.spec.nbytes + 1):
        sets = np.arange(n_rows)[None] % 16
        nbytes = n_rows * layout.spec.nbytes
        guarded = np.full(nbytes + 192, UNWRITTEN, np.uint8)
        start = 64 - guarded.ctypes.data % 64 + offset
        out = guarded[start : start + nbytes]

        tables = store._tables()
        code = frame_kernels(True).read_frames(
            tables, store.frame_ids, sets, out, 0, n_rows, np.zeros(0, np.int64), False
        )

        assert code == -1
        np.testing.assert_array_equal(out.reshape(n_rows, -1), wanted[sets[0]])
        assert (guarded[:start] == UNWRITTEN).all()
        assert (guarded[start + nbytes :] == UNWRITTEN).all()


@pytest.mark.parametrize("compiled", KERNELS)
def test_error_names_the_damaged_segment(compiled: bool) -> None:
    store = build("delta", (16, 16), 1, compiled)
    rows = [light_rows((16, 16), 1, 100, seed) for seed in (5, 6)]
    write_all(store, rows)
    state = store.state
    segment = int(np.flatnonzero(state.lengths)[0])
    state.heap[state.starts[segment]] = 77  # unknown flags

    with pytest.raises(CorruptPayloadError, match=f"segment {segment} "):
        store.read(np.arange(200))


def test_reference_kernels_are_used_without_numba() -> None:
    assert frame_kernels(False).compiled is False
    pytest.importorskip("numba")
    assert frame_kernels().compiled is True
    assert frame_kernels(True) is frame_kernels()
