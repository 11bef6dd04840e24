"""`Staging`: memory is not used again before the device is done with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sb3_extra_buffers.stores.staging import LaunchDone, Staging

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
