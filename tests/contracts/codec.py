"""The codec contract, as checks that take a codec."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from sb3_extra_buffers.codecs import ByteRows, Codec, ObsSpec, available_codecs, codec_from_config, get_codec
from sb3_extra_buffers.errors import CorruptPayloadError, SpecMismatchError

UNWRITTEN = 0xAA  # decode targets are filled with this, to reveal bytes that are not written

SPECS = [
    ObsSpec((84, 84), np.dtype(np.uint8)),
    ObsSpec((210, 160, 3), np.dtype(np.uint8)),
    ObsSpec((4, 20, 20), np.dtype(np.uint8)),
    ObsSpec((3, 9, 7), np.dtype(np.uint8)),
    ObsSpec((6, 5, 4), np.dtype(np.int8)),
    ObsSpec((7, 11), np.dtype(np.uint16)),
    ObsSpec((5, 3), np.dtype(np.bool_)),
    ObsSpec((17,), np.dtype(np.float32)),
    ObsSpec((12, 2), np.dtype(np.float64)),
    ObsSpec((3,), np.dtype(np.complex128)),
    ObsSpec((6,), np.dtype(">i4")),
    ObsSpec((), np.dtype(np.float64)),
    ObsSpec((1,), np.dtype(np.uint8)),
    ObsSpec((0, 4), np.dtype(np.float32)),
]

# every codec at its default level, and at the ends of its range of levels
_LEVELS = {
    "gzip": (0, 1, 9),
    "igzip": (0, 3),
    "zstd": (-100, 1, 19),
    "lz4-frame": (-20, 1, 16),
    "lz4-block": (-20, 1, 12),
}
METHODS = [
    *available_codecs(),
    *(f"{name}/{level}" for name in available_codecs() for level in _LEVELS.get(name, ())),
]


def sample_rows(spec: ObsSpec, seed: int = 0) -> ByteRows:
    """Rows that are easy, typical and impossible to compress."""
    rng = np.random.default_rng(seed)
    nbytes = spec.nbytes
    noise = rng.integers(0, 256, (2, nbytes))
    flat = np.repeat(np.array([[0], [255]]), nbytes, axis=1)
    runs = np.repeat(rng.integers(0, 5, (2, nbytes // 9 + 1)), 9, axis=1)[:, :nbytes]
    sprite = runs.copy()
    sprite[:, nbytes // 3 : nbytes // 2] = 7
    return np.concatenate([noise, flat, runs, sprite, runs[:1]]).astype(np.uint8)


def build(method: str, spec: ObsSpec) -> Codec:
    try:
        return get_codec(method).bind(spec)
    except SpecMismatchError as refusal:
        pytest.skip(str(refusal))


def train(codec: Codec, rows: ByteRows) -> Codec:
    """Train ``codec`` on more rows than it needs."""
    return codec.train(np.concatenate([rows ^ np.uint8(i) for i in range(12)]))


def decode(codec: Codec, payload: bytes, nbytes: int) -> ByteRows:
    """Decode between guard bytes, and check that those are unchanged."""
    padded = np.full(nbytes + 128, UNWRITTEN, np.uint8)
    try:
        codec.decode_into(memoryview(payload), padded[64 : 64 + nbytes].data)
    finally:
        assert (padded[:64] == UNWRITTEN).all()
        assert (padded[64 + nbytes :] == UNWRITTEN).all()
    return padded[64 : 64 + nbytes]


def check_round_trip(codec: Codec, rows: ByteRows) -> None:
    payloads = codec.encode_batch(rows)

    out = np.full_like(rows, UNWRITTEN)
    codec.decode_batch([memoryview(payload) for payload in payloads], out)
    np.testing.assert_array_equal(out, rows)
    for row, payload in zip(rows, payloads, strict=True):
        np.testing.assert_array_equal(decode(codec, payload, len(row)), row)


def check_bound(codec: Codec, rows: ByteRows) -> None:
    for payload in codec.encode_batch(rows):
        assert len(payload) <= codec.bound(rows.shape[1])


def check_deterministic(codec: Codec, rows: ByteRows) -> None:
    payloads = codec.encode_batch(rows)

    assert all(isinstance(payload, bytes) for payload in payloads)
    assert codec.encode_batch(rows[::-1].copy()) == payloads[::-1]
    assert [pickle.loads(pickle.dumps(codec)).encode(row.data) for row in rows] == payloads


def check_is_its_configuration(codec: Codec, name: str, rows: ByteRows) -> None:
    payloads = codec.encode_batch(rows)  # first, so that the codec has cached its contexts
    written = json.loads(json.dumps(codec.config()))

    for copy in (pickle.loads(pickle.dumps(codec)), codec_from_config(name, written)):
        assert copy == codec
        assert hash(copy) == hash(codec)
        assert copy.encode_batch(rows) == payloads
    np.testing.assert_array_equal(
        decode(codec_from_config(codec.codec_id, written), payloads[0], rows.shape[1]), rows[0]
    )


def heap_of(payloads: list[bytes]) -> tuple[npt.NDArray[np.uint8], list[int], list[int]]:
    """Put payloads into a heap, with gaps between and around them."""
    heap, starts = b"\xee" * 3, []
    for payload in payloads:
        starts.append(len(heap))
        heap += payload + b"\xee" * (len(heap) % 4)
    return np.frombuffer(heap, np.uint8), starts, [len(payload) for payload in payloads]


def check_heap(codec: Codec, rows: ByteRows) -> None:
    heap, starts, lengths = heap_of(codec.encode_batch(rows))
    order = np.array([3, 0, 0, len(rows) - 1, 1])  # any order, with repetitions

    for source in (heap, heap.copy()):  # read-only as from a file, and writable
        out = np.full((len(order), rows.shape[1]), UNWRITTEN, np.uint8)
        codec.decode_heap(source, np.array(starts, np.int64)[order], np.array(lengths, np.int64)[order], out)
        np.testing.assert_array_equal(out, rows[order])

    none = np.empty(0, np.int64)
    codec.decode_heap(heap, none, none, np.empty((0, rows.shape[1]), np.uint8))


def check_refuses_payloads_outside(codec: Codec, rows: ByteRows) -> None:
    heap, starts, lengths = heap_of(codec.encode_batch(rows))
    out = np.full((1, rows.shape[1]), UNWRITTEN, np.uint8)
    far = np.iinfo(np.int64).max
    for start, length in ((-1, lengths[0]), (heap.size, 1), (starts[0], heap.size), (far, far), (0, -1)):
        try:
            codec.decode_heap(heap, np.array([start], np.int64), np.array([length], np.int64), out)
        except CorruptPayloadError:
            continue
        raise AssertionError(f"a payload at {start} of {length} bytes was read from a heap of {heap.size} bytes")


def mutations(payload: bytes, seed: int, n: int) -> Iterator[bytes]:
    """Damaged copies of ``payload``: bits flipped, bytes lost, added, overwritten."""
    rng = np.random.default_rng(seed)
    yield b""
    yield payload[:-1]
    yield payload + b"\x00"
    yield payload + payload
    yield b"\xff" * len(payload)
    yield bytes(len(payload))
    for _ in range(n):
        damaged = bytearray(payload) or bytearray(1)
        # half of the damage goes to the front, where headers and lengths are
        end = len(damaged) if rng.random() < 0.5 else min(len(damaged), 12)
        match rng.integers(4):
            case 0:
                damaged[rng.integers(end)] ^= 1 << int(rng.integers(8))
            case 1:
                del damaged[int(rng.integers(end)) :]
            case 2:
                at = int(rng.integers(end))
                damaged[at : at + 4] = rng.bytes(4)
            case _:
                at = int(rng.integers(end))
                damaged[at:at] = rng.bytes(int(rng.integers(1, 9)))
        yield bytes(damaged)


def check_survives_damage(codec: Codec, rows: ByteRows, n: int = 60) -> None:
    """A damaged payload raises or, without a checksum, gives another row; it never causes a large allocation."""
    nbytes = rows.shape[1]
    payloads = codec.encode_batch(rows)
    decode(codec, payloads[0], nbytes)  # creates cached contexts before memory is traced
    tracemalloc.start()
    try:
        for seed, payload in enumerate(payloads):
            for damaged in mutations(payload, seed, n):
                try:
                    decode(codec, damaged, nbytes)
                except CorruptPayloadError:
                    continue
        assert tracemalloc.get_traced_memory()[1] < 16 * nbytes + 2**20
    finally:
        tracemalloc.stop()
    # and the codec still works
    np.testing.assert_array_equal(decode(codec, payloads[0], nbytes), rows[0])


def check_refuses_rows_of_another_size(codec: Codec) -> None:
    payload = codec.encode(memoryview(b"\x07" * 2**24))
    tracemalloc.start()
    try:
        for nbytes in (0, 64, 4096):
            try:
                decode(codec, payload, nbytes)
            except CorruptPayloadError:
                continue
            raise AssertionError(f"a row of 16 MiB was decoded into {nbytes} bytes")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
