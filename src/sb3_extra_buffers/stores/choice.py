"""Which method stores observations: the one that the user named, or with ``auto`` the best of a trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sb3_extra_buffers.codecs.base import Codec
from sb3_extra_buffers.codecs.registry import get_codec, is_available
from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec
from sb3_extra_buffers.errors import CodecOptionError
from sb3_extra_buffers.stores.base import Indices
from sb3_extra_buffers.stores.layout import StackLayout, find_layout
from sb3_extra_buffers.stores.registry import find_store

# smaller observations cost more to look up than to keep
_SMALL_BYTES = 512
# observations to try methods on: enough to see a stack advance, few enough to hold
_TRIAL_BYTES = 4 << 20
_MIN_TRIAL, _MAX_TRIAL = 16, 256
# method, and what a byte of it counts for: a slower decoder must be that much smaller
_CANDIDATES = (("delta", 1.0), ("palette", 1.0), ("zstd1", 1.6), ("gzip1", 3.0))
# a codec must save at least a tenth
_WORTH = 0.9


@dataclass(frozen=True, slots=True)
class Choice:
    """A method, and why it was chosen (empty if the user named it)."""

    method: str
    why: str

    @property
    def is_raw(self) -> bool:
        """Whether observations are stored uncompressed."""
        return self.method == "none"


def may_be_stacked(spec: ObsSpec) -> bool:
    """Whether observations may consist of frames that are worth sharing; vectors and small observations are not."""
    return len(spec.shape) >= 2 and spec.nbytes >= _SMALL_BYTES


def choose_unseen(spec: ObsSpec) -> Choice | None:
    """The choice of ``auto`` where no trial is needed: vectors and other small observations stay uncompressed."""
    if not may_be_stacked(spec):
        return Choice("none", f"auto: {spec.nbytes} bytes are too few to compress")
    return None


class MethodChoice:
    """Chooses the method of one store; host and device stores use the same rules.

    ``choice`` is known from the start where the user named a method or no trial is needed, else None: then `n_trial`
    observations are collected for `decide`. The object never changes, so that a store can undo a decision together
    with the write that led to it.
    """

    def __init__(self, spec: ObsSpec, method: str = "auto", options: Mapping[str, Any] | None = None) -> None:
        self.spec, self.method, self.options = spec, method, dict(options or {})
        self.choice: Choice | None
        if method == "auto":
            if self.options:
                raise CodecOptionError(
                    f"compression_method='auto' takes no options, got {', '.join(map(repr, self.options))}; "
                    "name a method to use them"
                )
            self.choice = choose_unseen(spec)
        else:
            # bad input is an error now, not at step 3,000,000
            codec = get_codec(method, **self.options).bind(spec)
            self.choice = Choice("none" if codec.codec_id == "none" else method, "")
        if spec.nbytes == 0:
            self.choice = Choice("none", "observations of no bytes")

    def n_trial(self, n_obs: int, heap_bytes: int | None = None) -> int:
        """How many observations to collect first, for a store of ``n_obs`` that may hold ``heap_bytes``."""
        n_trial = min(max(_TRIAL_BYTES // self.spec.nbytes, _MIN_TRIAL), _MAX_TRIAL, max(n_obs // 2, 1))
        return n_trial if heap_bytes is None else min(n_trial, heap_bytes // self.spec.nbytes + 1)

    def decide(
        self, streams: Indices, rows: ByteRows, n_streams: int, may_stay_dense: bool = True
    ) -> tuple[StackLayout, Choice | None]:
        """Return the layout of ``rows`` and the method for them; None if there are no rows to try methods on.

        Row ``i`` belongs to ``streams[i]``. ``may_stay_dense`` is whether ``auto`` may leave rows uncompressed.
        """
        layout = find_layout(self.spec, [rows[streams == stream] for stream in np.unique(streams)])
        if self.choice is not None or not len(rows):
            return layout, self.choice
        return layout, _try_candidates(layout, streams, rows, n_streams, may_stay_dense)

    def make_codec(self, choice: Choice, layout: StackLayout) -> Codec:
        """The codec of ``choice`` for frames of ``layout``."""
        return get_codec(choice.method, **self.options).bind(layout.frame_spec)

    @staticmethod
    def describe(choice: Choice | None, in_use: str) -> str:
        """The method ``in_use`` and why it was chosen."""
        return f"{in_use} ({choice.why})" if choice is not None and choice.why else in_use

    def describe_pending(self, n_collected: int, n_trial: int) -> str:
        """The user's method, while ``n_collected`` observations are held for `decide`."""
        event = "the method is chosen" if self.choice is None else "compression starts"
        return f"{self.method} (not compressed yet: {event} after {n_trial} observations, {n_collected} so far)"


def _try_candidates(
    layout: StackLayout, streams: Indices, rows: ByteRows, n_streams: int, may_stay_dense: bool
) -> Choice:
    """Try the candidates on the first observations; the smallest wins, slow ones with a handicap."""
    spec, size = layout.frame_spec, layout.frame_bytes
    sizes: dict[str, float] = {}
    scores: dict[str, float] = {"none": float(size)} if may_stay_dense else {}
    for method, weight in _CANDIDATES:
        name = method.rstrip("0123456789")
        if not is_available(name) or (name == "palette" and 3 not in spec.shape[:1] + spec.shape[-1:]):
            continue
        if name == "gzip" and "zstd1" in sizes:
            continue
        codec = get_codec(method).bind(spec)
        sizes[method] = find_store(codec, layout).trial_bytes(layout, codec, streams, rows, n_streams)
        scores[method] = max(sizes[method], 1.0) * weight / _WORTH
    best = min(scores, key=lambda method: scores[method])
    tried = ", ".join(f"{method} {nbytes:.0f}" for method, nbytes in sizes.items())
    return Choice(best, f"auto: {layout}; bytes for a frame of {size}: {tried}")
