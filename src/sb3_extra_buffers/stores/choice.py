"""`auto`: which method suits some observations, found by trying."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sb3_extra_buffers.codecs.delta import DeltaCodec
from sb3_extra_buffers.codecs.registry import get_codec, is_available
from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec
from sb3_extra_buffers.kernels import frame_kernels
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.segments import SegmentStore

# observations smaller than this cost more to look up than to keep
_SMALL_BYTES = 512
# method, and what a byte of it counts for: a slower decoder must be that much smaller
_CANDIDATES = (("delta", 1.0), ("palette", 1.6), ("zstd1", 1.6), ("gzip1", 3.0))
# a codec that saves less than this is not worth its time
_WORTH = 0.9


@dataclass(frozen=True, slots=True)
class Choice:
    """A method and why it was taken."""

    method: str
    why: str


def choose_unseen(spec: ObsSpec) -> Choice | None:
    """The choice where no trial is needed: vectors and other small observations stay dense."""
    if len(spec.shape) < 2 or spec.nbytes < _SMALL_BYTES:
        return Choice("none", f"auto: {spec.nbytes} bytes are too few to compress")
    return None


def choose(
    layout: StackLayout, indices: Any, streams: Any, rows: ByteRows, n_streams: int, may_stay_dense: bool = True
) -> Choice:
    """Try the candidates on the first observations; the smallest wins, slow ones with a handicap."""
    spec, size = layout.frame_spec, layout.frame_bytes
    frames = layout.split(rows, frame_kernels()).reshape(-1, size)
    different = dict.fromkeys(frame.tobytes() for frame in frames)
    frames = np.frombuffer(b"".join(different), np.uint8).reshape(-1, size)
    sizes: dict[str, float] = {}
    scores: dict[str, float] = {"none": float(size)} if may_stay_dense else {}
    for method, weight in _CANDIDATES:
        name = method.rstrip("0123456789")
        if not is_available(name) or (name == "palette" and 3 not in spec.shape[:1] + spec.shape[-1:]):
            continue
        if name == "gzip" and "zstd1" in sizes:
            continue
        codec = get_codec(method).bind(spec)
        if isinstance(codec, DeltaCodec):
            sizes[method] = _try_delta(layout, codec, indices, streams, rows, n_streams)
        else:
            sizes[method] = sum(map(len, codec.encode_batch(frames))) / max(len(frames), 1)
        scores[method] = max(sizes[method], 1.0) * weight / _WORTH
    best = min(scores, key=lambda method: scores[method])
    tried = ", ".join(f"{method} {nbytes:.0f}" for method, nbytes in sizes.items())
    return Choice(best, f"auto: {layout}; bytes for a frame of {size}: {tried}")


def _try_delta(
    layout: StackLayout, codec: DeltaCodec, indices: Any, streams: Any, rows: ByteRows, n_streams: int
) -> float:
    """Bytes per frame, the first keyframes apart: there are few more in the long run, as a rule."""
    store = SegmentStore(layout, int(indices.max()) + 1, n_streams, codec)
    store.write(indices, streams, rows)
    nbytes, n_frames = store.difference_bytes()
    return nbytes / max(n_frames, 1)
