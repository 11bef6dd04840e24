"""The ``camera`` format: round trips, compiled against reference kernels, committed bytes, damaged segments."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.kernels import camera, compiled_kernels, has_numba
from tests.contracts.store import KERNELS, UNWRITTEN, examples
from tests.kernels.wrapping import callable_from_python

Bytes = npt.NDArray[np.uint8]

SHAPES = [
    (8, 8),
    (17, 23),
    (20, 21, 3),
    (3, 17, 24),
    (16, 16, 3),
    (9, 10, 4),
    (4, 9, 30),
    (16, 9, 2),
    (3, 17, 70),
    (2, 16, 130),
    (11, 64),
    (40,),
    (2, 3, 4, 5),
]
DTYPES = ["u1", "i2", "f4", "f8", "?", "c16"]
WIDTH = 4  # bytes of a length in the segments of these tests


class Segment(NamedTuple):
    data: Bytes  # table of lengths, coded frames, `camera.OVERREAD` bytes
    body: int
    end: int
    n_frames: int
    size: int
    geometry: Any


def contents(shape: tuple[int, ...], dtype: str, count: int, seed: int = 0) -> list[tuple[str, npt.NDArray[Any]]]:
    """Frames of a moving camera, of a standing one, of a sensor with noise, and of noise alone with a cut."""
    rng = np.random.default_rng(seed)
    scene = rng.normal(0, 8, (*shape[:-1], shape[-1] + count)).cumsum(axis=-1) + 100
    moving = np.stack([scene[..., i : i + shape[-1]] for i in range(count)])
    standing = np.repeat(moving[:1], count, axis=0)
    standing.reshape(count, -1)[count // 2 :, -1] += 40
    noise = rng.integers(0, 256, (count, *shape))
    noise[-1] = noise[-2]
    kinds = {
        "moving": moving,
        "standing": standing,
        "grainy": standing + rng.normal(0, 2, moving.shape),
        "noise": noise,
    }
    return [(name, frames.astype(dtype)) for name, frames in kinds.items()]


def pack(frames: npt.NDArray[Any], compiled: bool) -> Segment:
    count, spec = len(frames), ObsSpec(frames.shape[1:], frames.dtype)
    geometry, size = camera.camera_geometry(spec), spec.nbytes
    rows = spec.to_rows(frames).reshape(-1).copy()
    target, lengths = np.full(count * size + 64, UNWRITTEN, np.uint8), np.zeros(count, np.int64)
    if compiled:
        total = compiled_kernels("camera").pack_segment(rows, count, size, geometry, target, lengths)
    else:
        scratch = np.full(camera.camera_scratch_bytes(size, geometry), UNWRITTEN, np.uint8)
        total = camera.pack_camera(rows, 0, count, size, geometry, target, 0, lengths, scratch)
    assert total == lengths.sum()
    assert lengths.max() <= size
    assert (target[total:] == UNWRITTEN).all()
    table = np.frombuffer(lengths.astype("<u4").tobytes(), np.uint8)
    data = np.concatenate([table, target[:total], np.full(camera.OVERREAD, UNWRITTEN, np.uint8)])
    return Segment(data, table.size, table.size + total, count, size, geometry)


def unpack(segment: Segment, positions: list[int], compiled: bool, streaming: bool = False) -> Bytes | None:
    """Return the bytes of the frames at ``positions``; None if the segment is damaged."""
    size = segment.size
    # frames at aligned addresses can be written past the caches
    wanted, gap = np.array(positions), 16 + -size % 16 if streaming else 5
    targets = gap + np.arange(len(wanted))[::-1] * (size + gap)
    out = np.full(len(wanted) * (size + gap) + gap, UNWRITTEN, np.uint8)
    arguments = (segment.data, segment.body, segment.end, 0, WIDTH, segment.n_frames, wanted, targets)
    if compiled:
        good = compiled_kernels("camera").unpack_segment(*arguments, out, segment.geometry, streaming)
    else:
        work = np.full(camera.camera_work_bytes(size, segment.geometry), UNWRITTEN, np.uint8)
        good = camera.unpack_camera(*arguments, len(wanted), out, segment.geometry, work)
    inside = np.zeros(out.size, bool)
    for target in targets:
        inside[target : target + size] = True
    assert (out[~inside] == UNWRITTEN).all()
    return np.stack([out[target : target + size] for target in targets]) if good else None


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trip(shape: tuple[int, ...], compiled: bool) -> None:
    for dtype in DTYPES:
        for name, frames in contents(shape, dtype, 7):
            segment = pack(frames, compiled)
            rows = ObsSpec(shape, frames.dtype).to_rows(frames)
            for positions in (list(range(7)), [0], [3], [6], [1, 1, 4, 5], [2, 6, 6]):
                decoded = unpack(segment, positions, compiled, streaming=len(positions) > 1)
                assert decoded is not None
                np.testing.assert_array_equal(decoded, rows[positions], f"{dtype} {name} {positions}")


@pytest.mark.skipif(not has_numba(), reason="numba is not installed")
@examples(150)
@given(
    shape=st.lists(st.integers(1, 20), max_size=4).map(tuple),
    dtype=st.sampled_from(DTYPES),
    count=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
def test_compiled_and_reference_kernels_agree(shape: tuple[int, ...], dtype: str, count: int, seed: int) -> None:
    for name, frames in contents(shape or (1,), dtype, count + 1, seed):
        frames = frames.reshape(len(frames), *shape)
        compiled, reference = pack(frames, True), pack(frames, False)
        assert compiled.data.tobytes() == reference.data.tobytes(), name
        positions = np.random.default_rng(seed).integers(0, count, 4)
        positions.sort()
        decoded = unpack(compiled, positions.tolist(), True)
        assert decoded is not None
        assert decoded.tobytes() == ObsSpec(shape, frames.dtype).to_rows(frames)[positions].tobytes(), name


@pytest.mark.parametrize("compiled", KERNELS)
def test_size_of_coded_frames(compiled: bool) -> None:
    sizes = {}
    for name, frames in contents((64, 64, 3), "u1", 8):
        segment = pack(frames, compiled)
        sizes[name] = (segment.end - segment.body) / frames.nbytes
    assert sizes["noise"] <= 1
    assert sizes["grainy"] < 0.7
    assert sizes["standing"] < 0.11  # of which the first frame, 1/8
    depth = np.add.outer(np.arange(8), np.add.outer(np.arange(64), 3 * np.arange(64))).astype(np.uint16) * 7
    segment = pack(depth, compiled)
    assert segment.end - segment.body < 0.2 * depth.nbytes


GOLDEN = {
    "rgb": ("u1", (4, 17, 18, 3), "2f55b0871fbbf730330eb6478ea814468bc594ae156aeb2d0c408536612f40c9"),
    "depth": ("u2", (3, 16, 11), "7c083ee638b03113d3617a861edf6737059794176ac2dc53707e38efa058adb5"),
    "floats": ("f4", (2, 2, 9, 8), "4c6ea870a49c9dfde0dbff2c57561a55c3d3d5653217d442815e996fadc78ca6"),
}


def golden_frames(dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    index = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    values = index * index // 7 % 5 + index // 5 % 200
    return values.astype(dtype) if dtype != "f4" else (values / 8).astype(np.float32)


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("name", GOLDEN)
def test_coded_bytes_stay_the_same(name: str, compiled: bool) -> None:
    dtype, shape, digest = GOLDEN[name]
    frames = golden_frames(dtype, shape)
    segment = pack(frames, compiled)
    coded = segment.data[: segment.end].tobytes()
    assert len(coded) < frames.nbytes
    assert hashlib.sha256(coded).hexdigest() == digest


#: a segment of two frames of 9 x 9 bytes, as first released
GOLDEN_SEGMENT = bytes.fromhex(
    "470000000d000000000f0e2a0d0a96254b030006000002000ea581262b43aaaa82200882500aaaaaaaaa822008422908aaaaaaaa160000000002000200020002000200020002001ea9c20ea581020001010928820080020000200008"
)


@pytest.mark.parametrize("compiled", KERNELS)
def test_committed_segment_is_decoded(compiled: bool) -> None:
    data = np.frombuffer(GOLDEN_SEGMENT + bytes(camera.OVERREAD), np.uint8).copy()
    geometry = camera.camera_geometry(ObsSpec((9, 9), np.dtype(np.uint8)))
    decoded = unpack(Segment(data, 8, len(GOLDEN_SEGMENT), 2, 81, geometry), [0, 1], compiled)
    assert decoded is not None
    first = np.add.outer(np.arange(9), 3 * np.arange(9)) % 20 + 7
    np.testing.assert_array_equal(decoded.reshape(2, 9, 9), [first, first + (first == 9)])


@pytest.mark.skipif(not has_numba(), reason="numba is not installed")
@pytest.mark.parametrize("shape", [(17, 23, 3), (3, 9, 20), (16, 12)], ids=str)
def test_damaged_segments_are_refused_or_give_other_bytes(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    for dtype in ("u1", "u2", "f4"):
        for _, frames in contents(shape, dtype, 5):
            segment = pack(frames, True)
            for _ in range(40):
                data, end = segment.data.copy(), segment.end
                kind = rng.integers(4)
                if kind == 0:
                    data[rng.integers(end)] ^= 1 << int(rng.integers(8))
                elif kind == 1:
                    end = int(rng.integers(segment.body, end))
                elif kind == 2:
                    at = int(rng.integers(segment.body, end))
                    data[at : min(at + 6, end)] = rng.integers(0, 256, min(6, end - at))
                else:
                    position = int(rng.integers(5))
                    changed = rng.integers(0, segment.size + 2, 1).astype("<u4")
                    data[WIDTH * position : WIDTH * (position + 1)] = changed.view(np.uint8)
                damaged = segment._replace(data=data, end=end)
                positions = np.sort(rng.integers(0, 5, 3)).tolist()
                # neither reads nor writes outside (`unpack` checks writes), and both find the same damage
                decoded, expected = unpack(damaged, positions, True), unpack(damaged, positions, False)
                assert (decoded is None) == (expected is None)
                np.testing.assert_array_equal(decoded, expected)


@pytest.mark.skipif(not has_numba(), reason="numba is not installed")
@pytest.mark.parametrize("missing", [(), ("_HAS_VBMI",), ("_HAS_VBMI", "_HAS_BMI2")], ids=str)
def test_processors_with_fewer_instructions_pack_the_same(
    missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sb3_extra_buffers.kernels import camera_intrinsics

    for feature in missing:
        monkeypatch.setattr(camera_intrinsics, feature, False)
    # compiled here, with these features
    pack_unit = callable_from_python(camera_intrinsics.pack_unit, "target, at, source, start, widths")
    unpack_unit = callable_from_python(camera_intrinsics.unpack_unit, "target, at, source, start, widths, ends")
    gather_values = callable_from_python(camera_intrinsics.gather_values, "values, width")
    spread_widths = callable_from_python(camera_intrinsics.spread_widths, "header, offsets")
    rng = np.random.default_rng(0)
    for i in range(50):
        widths = rng.integers(0, 9, 8) if i > 8 else np.full(8, i)
        values = rng.integers(0, 1 << widths[:, None], (8, 8)).astype(np.uint8)
        bits = "".join(
            format(v, f"0{w}b")[::-1] if w else "" for row, w in zip(values, widths, strict=True) for v in row
        )
        expected = np.packbits(np.array(list(bits), np.uint8), bitorder="little")
        packed, word = np.full(96, UNWRITTEN, np.uint8), widths.astype(np.uint8).view(np.uint64)[0]
        pack_unit(packed, 3, values, 0, word)
        np.testing.assert_array_equal(packed[3 : 3 + widths.sum()], expected)
        source = np.concatenate([expected, np.full(camera.OVERREAD, UNWRITTEN, np.uint8)])
        unpacked = np.full(80, UNWRITTEN, np.uint8)
        unpack_unit(unpacked, 5, source, 0, word, np.cumsum(widths).astype(np.uint8).view(np.uint64)[0])
        np.testing.assert_array_equal(unpacked[5:69].reshape(8, 8), values)
        assert (unpacked[:5] == UNWRITTEN).all()
        assert (unpacked[69:] == UNWRITTEN).all()
        n_bits = i % 4
        offsets = rng.integers(0, 1 << n_bits, 8).astype(np.uint8)
        row = gather_values(offsets.view(np.uint64)[0], np.uint64(n_bits))
        spread = spread_widths(1 << 4 | n_bits << 2 | 3, np.uint64(row))
        np.testing.assert_array_equal(np.array([spread], np.uint64).view(np.uint8), offsets + 1)


@pytest.mark.parametrize("compiled", KERNELS)
def test_positions_that_a_segment_does_not_have_are_refused(compiled: bool) -> None:
    segment = pack(contents((8, 8), "u1", 3)[0][1], compiled)
    assert unpack(segment, [3], compiled) is None
    assert unpack(segment, [-1], compiled) is None


def test_geometry() -> None:
    def geometry(shape: tuple[int, ...], dtype: str = "u1") -> list[int]:
        return list(map(int, camera.camera_geometry(ObsSpec(shape, np.dtype(dtype)))))

    assert geometry((84, 96)) == [84, 96, 1, 0, 1]
    assert geometry((84, 96, 3)) == [84, 96, 3, 0, 1]
    assert geometry((3, 84, 96), "f4") == [84, 96, 3, 1, 4]
    assert geometry((7,), "u2") == [1, 7, 1, 0, 2]
    assert geometry(()) == [1, 1, 1, 0, 1]
    assert geometry((2, 3, 4, 5)) == [24, 5, 1, 0, 1]
    assert geometry((6, 5), "c16") == [6, 80, 1, 0, 1]
