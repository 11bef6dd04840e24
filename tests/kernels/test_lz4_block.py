"""LZ4 blocks: our encoder and decoder, each against those of the ``lz4`` package."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sb3_extra_buffers.kernels import has_numba, lz4_block
from sb3_extra_buffers.kernels.lz4_block import OVERRUN
from tests.contracts.store import KERNELS, UNWRITTEN, examples
from tests.kernels.wrapping import callable_from_python

Bytes = npt.NDArray[np.uint8]
SIZES = [1, 4, 5, 11, 12, 13, 14, 15, 16, 17, 64, 255, 270, 271, 272, 1000, 5000]


@cache
def functions(compiled: bool) -> tuple[Callable[..., int], Callable[..., bool]]:
    if not compiled:
        return lz4_block.pack_block, lz4_block.unpack_block
    from sb3_extra_buffers.kernels import compiling, frames_numba

    return frames_numba.pack_block, callable_from_python(compiling.compiled(lz4_block.unpack_block))


def contents(size: int) -> list[tuple[str, Bytes]]:
    rng = np.random.default_rng(size)
    periods = [np.tile(rng.integers(0, 256, n), size // n + 1)[:size] for n in (2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17)]
    runs = np.repeat(rng.integers(0, 4, size // 9 + 1), 9)[:size]
    mixed = np.where(rng.random(size) < 0.2, rng.integers(0, 256, size), runs)
    far = np.concatenate([rng.integers(0, 256, size // 2), np.zeros(size, int)])[:size]
    # literals of many lengths between matches
    cut = np.concatenate([np.append(rng.integers(0, 256, n), [0] * 20) for n in range(90)])[:size]
    simple = [("noise", rng.integers(0, 256, size)), ("zeros", np.zeros(size)), ("cut", cut)]
    more = [("runs", runs), ("mixed", mixed), ("far", far), *((f"period {i}", part) for i, part in enumerate(periods))]
    return [(name, data.astype(np.uint8)) for name, data in [*simple, *more]]


def pack(packer: Callable[..., int], data: Bytes, capacity: int) -> bytes | None:
    source = np.concatenate([data, np.full(64, UNWRITTEN, np.uint8)])
    target = np.full(capacity + 64, UNWRITTEN, np.uint8)
    length = packer(source, data.size, target[:capacity])
    assert (target[capacity:] == UNWRITTEN).all()
    assert (source[data.size :] == UNWRITTEN).all()
    return target[:length].tobytes() if length else None


def unpack(unpacker: Callable[..., bool], block: bytes, size: int, needed: int | None = None) -> Bytes | None:
    source = np.concatenate([np.full(7, UNWRITTEN, np.uint8), np.frombuffer(block, np.uint8), np.zeros(64, np.uint8)])
    target = np.full(size + OVERRUN + 64, UNWRITTEN, np.uint8)
    needed = size if needed is None else needed
    good = unpacker(source, 7, 7 + len(block), target[: size + OVERRUN], size, needed)
    assert (target[size + OVERRUN :] == UNWRITTEN).all()
    return target[:size] if good else None


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("size", SIZES)
def test_round_trip(size: int, compiled: bool) -> None:
    packer, unpacker = functions(compiled)
    for name, data in contents(size):
        block = pack(packer, data, size * 2 + 32)
        assert block is not None
        np.testing.assert_array_equal(unpack(unpacker, block, size), data, name)
        for needed in (0, 1, size // 2, size - 1):
            part = unpack(unpacker, block, size, needed)
            assert part is not None
            np.testing.assert_array_equal(part[:needed], data[:needed], name)


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("size", SIZES)
def test_lz4_package_reads_ours_and_we_read_theirs(size: int, compiled: bool) -> None:
    lz4 = pytest.importorskip("lz4.block")
    packer, unpacker = functions(compiled)
    for name, data in contents(size):
        ours = pack(packer, data, size * 2 + 32)
        assert lz4.decompress(ours, uncompressed_size=size) == data.tobytes(), name
        for mode in ({"mode": "default"}, {"mode": "high_compression", "compression": 9}):
            theirs = lz4.compress(data.tobytes(), store_size=False, **mode)
            np.testing.assert_array_equal(unpack(unpacker, theirs, size), data, name)


@pytest.mark.skipif(not has_numba(), reason="numba is not installed")
def test_compiled_and_reference_encoders_agree() -> None:
    for size in SIZES:
        for name, data in contents(size):
            blocks = [pack(functions(compiled)[0], data, 2 * size + 32) for compiled in (True, False)]
            assert blocks[0] == blocks[1], (size, name)


@pytest.mark.skipif(not has_numba(), reason="the reference kernels would take too long")
def test_repeats_beyond_the_window_are_not_used() -> None:
    packer, unpacker = functions(True)
    rng = np.random.default_rng(0)
    part = rng.integers(0, 256, 3000).astype(np.uint8)
    for gap in (62_000, 65_535 - 3000, 65_536, 70_000):
        data = np.concatenate([part, rng.integers(0, 256, gap).astype(np.uint8), part])
        block = pack(packer, data, 2 * data.size)
        assert block is not None
        np.testing.assert_array_equal(unpack(unpacker, block, data.size), data)


@pytest.mark.parametrize("compiled", KERNELS)
def test_block_that_does_not_fit_is_reported(compiled: bool) -> None:
    packer, _ = functions(compiled)
    for name, data in contents(600):
        whole = pack(packer, data, 1300)
        assert whole is not None
        for capacity in (*range(1, 40), 100, 300, 599, 600):
            block = pack(packer, data, capacity)
            assert block is None or block == whole, name


@pytest.mark.parametrize("compiled", KERNELS)
def test_damaged_blocks_are_refused_or_give_other_bytes(compiled: bool) -> None:
    packer, unpacker = functions(compiled)
    rng = np.random.default_rng(0)
    for size in (40, 300):
        for _, data in contents(size):
            block = pack(packer, data, 2 * size + 32)
            assert block is not None
            for _ in range(200 if compiled else 40):
                damaged = bytearray(block)
                kind = rng.integers(4)
                if kind == 0:
                    damaged[rng.integers(len(damaged))] ^= 1 << int(rng.integers(8))
                elif kind == 1:
                    del damaged[int(rng.integers(len(damaged))) :]
                elif kind == 2:
                    damaged = bytearray(rng.bytes(len(damaged)))
                else:
                    at = int(rng.integers(len(damaged)))
                    damaged[at : at + 3] = b"\xff\xff\xff"
                decoded = unpack(unpacker, bytes(damaged), size)  # guards are checked inside
                assert decoded is None or decoded.size == size
            assert unpack(unpacker, block, size + 1) is None
            assert unpack(unpacker, block, size - 1) is None
            assert unpack(unpacker, b"", size) is None


@pytest.mark.skipif(not has_numba(), reason="numba is not installed")
def test_compiled_and_reference_decoders_agree() -> None:
    from hypothesis import given
    from hypothesis import strategies as st

    fast, slow = functions(True)[1], functions(False)[1]

    @examples(300)
    @given(st.binary(min_size=1, max_size=40), st.integers(0, 80))
    def check(block: bytes, size: int) -> None:
        decoded: list[Any] = [unpack(unpacker, block, size) for unpacker in (fast, slow)]
        assert (decoded[0] is None) == (decoded[1] is None)
        if decoded[0] is not None:
            np.testing.assert_array_equal(decoded[0], decoded[1])

    check()
