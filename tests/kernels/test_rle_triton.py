"""The Triton kernel and its reference decode run lengths to what the codec encoded.

`test_delta_triton` also runs these under Triton's interpreter.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt
import pytest
import torch

from sb3_extra_buffers.codecs.registry import get_codec
from sb3_extra_buffers.codecs.rle import RleCodec
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.kernels.rle_torch import decode_rle_reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)
SPECS = [
    ObsSpec((60, 60), np.dtype(np.uint8)),
    ObsSpec((300,), np.dtype(np.uint8)),
    ObsSpec((7,), np.dtype(np.uint8)),
    ObsSpec((33, 5), np.dtype(np.float32)),
    ObsSpec((40,), np.dtype(np.float64)),
]


def payloads(spec: ObsSpec) -> tuple[RleCodec, list[bytes], npt.NDArray[np.uint8]]:
    """Rows of equal, distinct and mixed values."""
    random = np.random.default_rng(0)
    n_elem = spec.nbytes // spec.dtype.itemsize
    rows = np.zeros((6, n_elem), spec.dtype)
    rows[1] = np.arange(n_elem)
    rows[2] = random.integers(0, 2, n_elem)
    rows[3] = np.repeat(random.integers(0, 200, n_elem), 9)[:n_elem]
    rows[4, -1] = 5
    codec = get_codec("rle").bind(spec)
    assert isinstance(codec, RleCodec)
    flat = rows.view(np.uint8)
    # the last row has no payload: it is all zeros
    return codec, [*codec.encode_batch(flat[:5]), b""], flat


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("kernel", ["reference", "triton"])
def test_decoded_rows_equal_the_encoded_ones(kernel: str, device: str, spec: ObsSpec) -> None:
    if kernel == "triton" and device == "cpu" and not INTERPRETED:
        pytest.skip("on a CPU, kernels run only under Triton's interpreter")
    codec, encoded, rows = payloads(spec)
    # payloads in any order, with gaps
    order = [3, 0, 5, 1, 4, 2]
    heap, starts = b"\xff" * 5, np.zeros(6, np.int64)
    for row in order:
        starts[row] = len(heap)
        heap += encoded[row] + b"\xff" * row
    lengths = np.array([len(payload) for payload in encoded], np.int32)
    heap_, starts_, lengths_ = (
        torch.from_numpy(np.array(array)).to(device) for array in (np.frombuffer(heap, np.uint8), starts, lengths)
    )
    out = torch.full((6, spec.nbytes), 0xAA, dtype=torch.uint8, device=device)
    elem, run = np.dtype(codec.elem).itemsize, np.dtype(codec.run).itemsize
    if kernel == "triton":
        from sb3_extra_buffers.kernels.rle_triton import decode_rle

        decode_rle(heap_, starts_, lengths_, out, elem, run)
    else:
        decode_rle_reference(heap_, starts_, lengths_, out, elem, run)
    np.testing.assert_array_equal(out.cpu().numpy(), rows)
