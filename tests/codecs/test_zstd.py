"""``zstd``: dictionaries, payloads without headers, and the compiled decoding loop."""

from __future__ import annotations

import json

import numpy as np
import numpy.typing as npt
import pytest

from sb3_extra_buffers.codecs import Codec, codec_from_config, get_codec
from sb3_extra_buffers.errors import CorruptPayloadError
from tests.contracts.codec import check_round_trip

zstandard = pytest.importorskip("zstandard", exc_type=ImportError)
zstd_direct = pytest.importorskip("sb3_extra_buffers.codecs.zstd_direct")


def similar_rows(n: int, nbytes: int = 2000) -> npt.NDArray[np.uint8]:
    """Copies of one row of noise, with one byte changed in each."""
    rng = np.random.default_rng(0)
    rows = np.repeat(rng.integers(0, 256, (1, nbytes), np.uint8), n, axis=0)
    rows[np.arange(n), rng.integers(0, nbytes, n)] ^= 0x55
    return rows


def size(codec: Codec, rows: npt.NDArray[np.uint8]) -> int:
    return sum(map(len, codec.encode_batch(rows)))


def test_a_dictionary_makes_similar_rows_small() -> None:
    rows = similar_rows(64)
    codec = get_codec("zstd3", dictionary=4096)

    trained = codec.train(rows[:32])

    assert codec.trainable
    assert size(trained, rows[32:]) < size(codec, rows[32:]) / 10
    assert "dictionary" in trained.describe()
    check_round_trip(trained, rows)


def test_without_the_option_nothing_is_learnt() -> None:
    codec = get_codec("zstd3")

    assert not codec.trainable
    assert codec.train(similar_rows(64)) == codec


def test_a_dictionary_that_does_not_help_is_not_kept() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 500), np.uint8)
    codec = get_codec("zstd3", dictionary=4096)

    assert codec.train(noise) == codec


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 100, 127, 128, 5000])
@pytest.mark.parametrize("n", [0, 1, 2, 8, 40])
@pytest.mark.parametrize("dictionary", [1, 8, 300, 4096])
def test_training_on_rows_of_any_number_and_size(n: int, nbytes: int, dictionary: int) -> None:
    codec = get_codec("zstd", dictionary=dictionary)
    for rows in (
        np.zeros((n, nbytes), np.uint8),
        similar_rows(n, nbytes) if nbytes else np.zeros((n, 0), np.uint8),
    ):
        trained = codec.train(rows)
        check_round_trip(trained, rows)
        assert len(getattr(trained, "learnt")) <= dictionary  # noqa: B009  # not a field of every codec


def test_training_again_replaces_the_dictionary() -> None:
    first = get_codec("zstd3", dictionary=4096).train(similar_rows(32))
    second = first.train(similar_rows(32) ^ np.uint8(0x3C))

    assert first != second
    check_round_trip(second, similar_rows(4))


def test_trained_codec_is_rebuilt_from_its_configuration() -> None:
    rows = similar_rows(40)
    codec = get_codec("zstd3", dictionary=4096).train(rows)

    again = codec_from_config("zstd", json.loads(json.dumps(codec.config())))

    assert again == codec
    assert again.encode_batch(rows) == codec.encode_batch(rows)


def test_payloads_carry_no_header() -> None:
    for nbytes in (0, 1, 255, 256, 65791, 65792, 2_000_000):
        for level in (-100, 1, 9):
            codec = get_codec("zstd", level=level)
            payload = codec.encode(memoryview(bytes(nbytes)))
            whole = zstandard.ZstdCompressor(level=level, write_checksum=False).compress(bytes(nbytes))
            assert len(payload) <= len(whole) - 6
            assert not payload.startswith(zstandard.FRAME_HEADER)


def test_round_trip_of_large_rows_with_a_dictionary() -> None:
    rows = np.tile(similar_rows(8, 50_000), (1, 30))
    codec = get_codec("zstd1", dictionary=16384).train(rows)

    check_round_trip(codec, rows)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("dictionary", [0, 4096])
@pytest.mark.parametrize("nbytes", [40, 2000, 300_000])  # the last one takes several blocks
def test_heap_decoder_decodes_in_parts(
    nbytes: int, dictionary: int, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if direct and not zstd_direct.is_direct():
        pytest.skip("needs numba and a zstandard that exports zstd's functions")
    monkeypatch.setattr("sb3_extra_buffers.codecs.zstd.is_direct", lambda: direct)
    rows = similar_rows(70, nbytes)
    rows[3] = 9
    codec = get_codec("zstd3", dictionary=dictionary).train(rows[:10])
    payloads = codec.encode_batch(rows)
    lengths = np.array([len(payload) for payload in payloads], np.int64)
    heap = np.frombuffer(b"??" + b"".join(payloads), np.uint8)
    starts = 2 + np.cumsum(lengths) - lengths
    out = np.full_like(rows, 0xAA)

    decode = codec.heap_decoder(heap, starts, lengths, out)
    decode(0, 30)
    decode(30, len(rows))

    np.testing.assert_array_equal(out, rows)
    for change in (-1, 1):  # a truncated payload, and one with a trailing byte
        wrong = lengths.copy()
        wrong[7] += change
        with pytest.raises(CorruptPayloadError):
            codec.heap_decoder(heap, starts, wrong, out)(0, len(rows))


def test_compiled_loop_detects_the_same_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    if not zstd_direct.is_direct():
        pytest.skip("needs numba and a zstandard that exports zstd's functions")
    rows = np.ascontiguousarray(np.repeat(similar_rows(1, 40), 50, axis=1))
    codec = get_codec("zstd3")
    payload = np.frombuffer(codec.encode_batch(rows)[0], np.uint8)
    random = np.random.default_rng(0)
    outcomes = []
    for _ in range(400):
        damaged = payload.copy()
        damaged[random.integers(3, len(payload))] = random.integers(256)
        decoded: list[bytes | None] = []
        for direct in (True, False):
            monkeypatch.setattr("sb3_extra_buffers.codecs.zstd.is_direct", lambda direct=direct: direct)
            out = np.zeros_like(rows)
            try:
                codec.heap_decoder(damaged, np.zeros(1, np.int64), np.array([len(payload)]), out)(0, 1)
                decoded.append(out.tobytes())
            except CorruptPayloadError:
                decoded.append(None)
        assert decoded[0] == decoded[1]
        outcomes.append(decoded[0])
    assert None in outcomes
