"""`Staging`: memory is not used again before the device is done with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sb3_extra_buffers.stores.staging import LaunchDone, Staging

PLACES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]
SHAPES: list[Any] = [((3,), np.dtype(np.int64)), ((2, 5), np.dtype(np.float32))]


@pytest.mark.parametrize("known", [True, False], ids=["same layout", "new layout"])
def test_memory_that_a_launch_still_reads_is_waited_for(known: bool) -> None:
    staging, reported = Staging(torch.device("cpu"), depth=2), np.zeros(1, np.int64)
    waits = []

    def wait() -> None:
        waits.append(1)
        reported[0] = 2

    layout = staging.layout(*SHAPES)
    first, second = staging.acquire(layout), staging.acquire(layout)
    assert first.block is not second.block
    # of the two launches, which are numbered, only the first is done
    for launch, lease in enumerate((first, second), 1):
        lease.block.copied = LaunchDone(launch, reported, wait)
    reported[0] = 1
    again = layout if known else staging.layout(*SHAPES[:1])

    taken = [staging.acquire(again)]
    waited = len(waits)
    taken.append(staging.acquire(again))

    assert {lease.block for lease in taken} == {first.block, second.block}
    assert len(waits) == 1
    # blocks take turns: the second one was in use
    assert waited == (taken[0].block is second.block)
    assert taken[0].arrays[0].shape == (3,)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("n_bytes", [0, 1, 1000, 1 << 19, (1 << 20) + 3, (5 << 22) + 1])
@pytest.mark.parametrize("read_only", [False, True])
def test_large_arrays_arrive_whole_and_later_changes_do_not(device: str, n_bytes: int, read_only: bool) -> None:
    staging = Staging(torch.device(device), depth=2)
    array = np.random.default_rng(0).integers(0, 256, n_bytes, np.uint8)
    expected = array.copy()
    array.flags.writeable = not read_only

    # twice: the second time, memory is used again
    uploaded = [staging.upload_in_pieces(array) for _ in range(2)]
    array.flags.writeable = True
    array ^= 255

    for tensor in uploaded:
        assert tensor.device.type == device
        np.testing.assert_array_equal(tensor.cpu().numpy(), expected)
    # two pieces of at most 4 MB
    assert staging.nbytes <= 2 << 22
