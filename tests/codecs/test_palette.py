"""``palette``: smaller payloads for few colours, lossless for any number."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sb3_extra_buffers.codecs import ObsSpec, get_codec, palette
from sb3_extra_buffers.codecs.registry import codec_from_config, is_available
from sb3_extra_buffers.errors import CorruptPayloadError
from tests.contracts.codec import check_round_trip, decode

INNER = "gzip6"


def frames(n_colours: int, n: int = 3, channels: int = 3, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Noise of exactly ``n_colours``, which only a palette can compress."""
    rng = np.random.default_rng(seed)
    distinct = rng.permutation(np.unique(rng.integers(0, 2**24, 2 * n_colours)))[:n_colours]
    colours = distinct.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :channels]
    picks = rng.integers(0, n_colours, (n, 40 * 30))
    picks[:, :n_colours] = np.arange(n_colours)
    batch: npt.NDArray[np.uint8] = colours[rng.permuted(picks, axis=1)].reshape(n, 40, 30, channels)
    return batch


def bound(batch: npt.NDArray[Any], inner: str = INNER) -> tuple[Any, npt.NDArray[np.uint8]]:
    spec = ObsSpec(batch.shape[1:], batch.dtype)
    return get_codec("palette", inner=inner).bind(spec), spec.to_rows(batch)


@pytest.mark.parametrize("n_colours", [1, 2, 255, 256, 257, 1000])
@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("planar", [False, True])
def test_round_trip_for_any_number_of_colours(n_colours: int, channels: int, planar: bool) -> None:
    batch = frames(n_colours, channels=channels)
    codec, rows = bound(np.moveaxis(batch, -1, 1) if planar else batch)

    check_round_trip(codec, rows)
    check_round_trip(codec.train(rows), rows)


@pytest.mark.parametrize("planar", [False, True])
def test_few_colours_are_smaller_than_with_the_inner_codec_alone(planar: bool) -> None:
    batch = frames(200)
    codec, rows = bound(np.moveaxis(batch, -1, 1) if planar else batch)
    plain, own, learnt = (
        sum(map(len, each.encode_batch(rows))) for each in (get_codec(INNER), codec, codec.train(rows))
    )

    assert own < 0.9 * plain
    assert learnt < 0.8 * own


def test_round_trip_of_colours_that_were_not_learnt() -> None:
    codec, rows = bound(frames(50))
    trained = codec.train(rows)

    check_round_trip(trained, bound(frames(50, seed=1))[1])
    check_round_trip(trained, bound(frames(300, seed=1))[1])
    assert codec.train(bound(frames(300))[1]) == codec  # too many to learn


def test_colours_with_colliding_hashes_are_distinguished() -> None:
    # for each hash factor, a pair of colours that collide
    colours = np.arange(100_000, dtype=np.uint32)
    pairs = []
    for factor in palette._FACTORS:
        hashes = palette._hash(colours, factor)
        order = np.argsort(hashes, kind="stable")
        at = np.flatnonzero(np.diff(hashes[order]) == 0)[0]
        pairs += [colours[order[at]], colours[order[at + 1]]]
    codec, rows = bound(np.array(pairs, "<u4").view(np.uint8).reshape(1, 2, -1, 4))

    check_round_trip(codec, rows)
    check_round_trip(codec.train(rows), rows)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((84, 84), np.uint8), ((5,), np.float32), ((6, 6, 3), np.uint16), ((), np.uint8), ((0, 3), np.uint8)],
)
def test_rows_that_are_not_images_go_to_the_inner_codec(shape: tuple[int, ...], dtype: Any) -> None:
    codec, rows = bound(np.ones((2, *shape), dtype))

    check_round_trip(codec, rows)
    for payload, plain in zip(codec.encode_batch(rows), get_codec(INNER).encode_batch(rows), strict=True):
        assert len(payload) == len(plain) + 1


def test_palette_index_out_of_range_is_refused() -> None:
    codec, rows = bound(np.zeros((1, 4, 4, 3), np.uint8), inner="none")
    payload = bytearray(codec.encode(rows[0].data))
    assert payload[:2] == bytes([1, 0])  # its own palette, of one colour
    payload[2] = 1

    with pytest.raises(CorruptPayloadError, match="colour 1 of 1"):
        decode(codec, bytes(payload), rows.shape[1])


def test_payload_of_a_learnt_palette_needs_that_palette() -> None:
    codec, rows = bound(frames(50))

    with pytest.raises(CorruptPayloadError, match="kind 2"):
        decode(codec, codec.train(rows).encode(rows[0].data), rows.shape[1])


def test_payloads_are_read_where_other_packages_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = get_codec("palette").bind(ObsSpec((8, 8, 3), np.dtype(np.uint8))).resolved()
    row = np.arange(192, dtype=np.uint8)
    payload, config, pickled = codec.encode(row.data), codec.config(), pickle.dumps(codec)
    monkeypatch.setattr(palette, "is_available", lambda name: not is_available(name))

    for restored in (codec_from_config("palette", config), pickle.loads(pickled)):
        out = np.zeros_like(row)
        restored.decode_into(memoryview(payload), out.data)
        np.testing.assert_array_equal(out, row)
