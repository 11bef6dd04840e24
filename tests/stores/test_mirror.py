"""A `HeapMirror` holds what its heap holds while the heap wraps, grows and repacks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sb3_extra_buffers.stores.heap import Heap
from sb3_extra_buffers.stores.mirror import HeapMirror
from sb3_extra_buffers.stores.staging import Staging

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("longest", [900, 9000])
def test_the_mirror_holds_every_payload_of_the_heap(device: str, longest: int) -> None:
    random = np.random.default_rng(longest)
    heap = Heap(200)
    mirror = HeapMirror(Staging(torch.device(device)))
    repacks = 0
    for turn in range(300):
        # usually the oldest first, as in a replay buffer; sometimes at random
        first = int(random.integers(0, 200)) if turn % 17 == 0 else turn * 3 % 200
        frame_ids = list(dict.fromkeys(((first + np.arange(random.integers(1, 6))) % 200).tolist()))
        heap.write(
            frame_ids, [random.integers(0, 256, random.integers(1, longest)).astype(np.uint8) for _ in frame_ids]
        )
        if turn % 41 == 40:
            heap.free(list(range(0, 200, 2)))
        if turn == 200:
            repacks = heap.n_repacks
            heap.clear()
        if turn % 3 == 0:
            found = mirror.follow(heap).cpu().numpy()
            for payload_id in np.flatnonzero(heap.lengths):
                start, length = int(heap.starts[payload_id]), int(heap.lengths[payload_id])
                np.testing.assert_array_equal(found[start : start + length], heap.data[start : start + length])
    assert repacks > 0
    assert mirror.nbytes >= heap.data.size
