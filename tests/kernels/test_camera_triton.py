"""The Triton kernel decodes frames of the camera format to what was encoded.

`test_delta_triton` also runs these under Triton's interpreter.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.kernels.camera import OVERREAD, camera_geometry, camera_scratch_bytes, pack_camera
from sb3_extra_buffers.kernels.camera_groups import CameraGroups, CameraShape, group_frames
from sb3_extra_buffers.kernels.state import PACKED_CAMERA

pytest.importorskip("triton")

Array = npt.NDArray[Any]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(not INTERPRETED, reason="on a CPU, kernels run only under Triton's interpreter"),
    ),
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]
SPECS = [
    ObsSpec((24, 32, 3), np.dtype(np.uint8)),
    ObsSpec((3, 17, 21), np.dtype(np.uint8)),
    ObsSpec((20, 13), np.dtype(np.uint8)),
    ObsSpec((9, 12, 4), np.dtype(np.uint8)),
    ObsSpec((2, 16, 19), np.dtype(np.uint8)),
    ObsSpec((18, 15), np.dtype(np.uint16)),
    ObsSpec((11, 10, 2), np.dtype(np.float32)),
]


def video(spec: ObsSpec, count: int, seed: int) -> Array:
    """Frames that drift, stand still, jump and are noise, as rows of bytes."""
    random = np.random.default_rng(seed)
    shape = (count, *spec.shape)
    if spec.dtype.kind == "f":
        frames = random.standard_normal(spec.shape).cumsum(axis=0) + 0.01 * random.standard_normal(shape)
    else:
        smooth = random.integers(-3, 4, spec.shape).cumsum(axis=0).cumsum(axis=1) % np.iinfo(spec.dtype).max
        frames = smooth + random.integers(0, 3, shape)
    frames = frames.astype(spec.dtype)
    for i in range(1, count):
        chance = random.random()
        if chance < 0.15:
            frames[i] = frames[i - 1]
        elif chance < 0.3:
            frames[i].reshape(-1).view(np.uint8)[:] = random.integers(0, 256, spec.nbytes)
        elif chance < 0.5:
            half = frames[i - 1].copy()
            half[: len(half) // 2] = frames[i][: len(half) // 2]
            frames[i] = half
    return frames.reshape(count, -1).view(np.uint8)


def segment(spec: ObsSpec, frames: Array, length_dtype: str) -> Array:
    geometry = camera_geometry(spec)
    lengths = np.zeros(len(frames), np.int64)
    target = np.zeros(frames.size + OVERREAD, np.uint8)
    scratch = np.zeros(camera_scratch_bytes(spec.nbytes, geometry), np.uint8)
    flat = np.concatenate([frames.reshape(-1), np.zeros(OVERREAD, np.uint8)])
    total = pack_camera(flat, 0, len(frames), spec.nbytes, geometry, target, 0, lengths, scratch)
    header = np.concatenate([[PACKED_CAMERA, len(frames)], lengths.astype(length_dtype).view(np.uint8)])
    return np.concatenate([header.astype(np.uint8), target[:total]])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("spec", "length_dtype"),
    # the dtype of the lengths does not depend on the observations, so two kinds of them are enough for the other one
    [(spec, "<u2") for spec in SPECS] + [(SPECS[1], "<u4"), (SPECS[-1], "<u4")],
    ids=str,
)
def test_decoded_frames_equal_the_encoded_ones(spec: ObsSpec, length_dtype: str, device: str) -> None:
    from sb3_extra_buffers.kernels.camera_triton import decode_camera

    shape = CameraShape(*camera_geometry(spec).tolist())
    assert shape.is_supported
    per_segment = 12
    videos = [video(spec, count, seed) for seed, count in enumerate([12, 7, 1])]
    starts, heap = [], np.full(5, 0xFF, np.uint8)
    for frames in videos:
        starts.append(heap.size)
        heap = np.concatenate([heap, segment(spec, frames, length_dtype), np.full(3, 0xFF, np.uint8)])
    heap = np.concatenate([heap, np.full(64, 0xFF, np.uint8)])
    # every frame that is not a multiple of 3
    chosen = [(i, k) for i, frames in enumerate(videos) for k in range(len(frames)) if k % 3 or len(frames) == 1]
    wanted = np.stack([videos[i][k] for i, k in chosen])
    rows = np.random.default_rng(0).permutation(len(chosen))
    columns = group_frames(np.array([starts[i] for i, _ in chosen]), np.array([k for _, k in chosen]), rows)
    groups = CameraGroups(*(torch.from_numpy(column).to(device) for column in columns))
    out = torch.full((len(wanted), spec.nbytes), 0xAA, dtype=torch.uint8, device=device)

    length_bytes = np.dtype(length_dtype).itemsize
    decode_camera(torch.from_numpy(heap).to(device), groups, out, shape, per_segment, length_bytes)

    np.testing.assert_array_equal(out.cpu().numpy()[rows], wanted)
