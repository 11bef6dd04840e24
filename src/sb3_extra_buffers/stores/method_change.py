"""Changing the method of stored observations: when to compare methods again, on which observations, and the copy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from sb3_extra_buffers.codecs.spec import ByteRows
from sb3_extra_buffers.stores.base import Indices, Store
from sb3_extra_buffers.stores.choice import Choice

# `auto` compares methods again when this many observations have been written, and each time their number has grown
# fourfold, up to the last comparison
FIRST_COMPARISON, _LAST_COMPARISON, _NEVER = 1 << 10, 1 << 18, 1 << 62
# `delta` is kept without comparing again where it takes less than this share of the uncompressed observations
_SMALL_SHARE = 0.05
# consecutive observations of a run, and how many bytes of observations are read to compare methods: at least two runs,
# at most eight
_RUN, _SAMPLE_BYTES = 32, 6 << 20
# bytes of observations that are copied at a time when the method changes
_CHUNK_BYTES = 4 << 20


def next_comparison(last: int) -> int:
    """The number of written observations at which methods are compared after the comparison at ``last``."""
    return 4 * last if last < _LAST_COMPARISON else _NEVER


def is_small_enough(now: Choice, held_bytes: int, dense_bytes: int) -> bool:
    """Whether ``now``, the choice in use, is `delta` and so small that there is nothing to gain by comparing again."""
    return now.method.endswith("delta") and held_bytes < _SMALL_SHARE * dense_bytes


def sample_runs(store: Store, row_bytes: int, n_first: int, n_streams: int) -> tuple[Indices, ByteRows]:
    """Read short runs of consecutive observations from all parts of a store; return the run of each row, and the rows.

    Only the first ``n_first`` indices are read: the others are usually next observations of the same steps.
    """
    written = store.find_written()
    written = np.arange(n_first) if written is None else written[written < n_first]
    steps = np.unique(written // n_streams)
    n_rows = min(max(_SAMPLE_BYTES // row_bytes, 2 * _RUN), 8 * _RUN)
    n_runs = min(n_rows // _RUN, max(len(steps) // _RUN, 1))
    # ordered by time: runs alternate, as streams do
    run = np.arange(n_runs)
    begins = steps[np.linspace(0, max(len(steps) - _RUN, 0), n_runs).astype(np.int64)] if len(steps) else run[:0]
    times = begins[None] + np.arange(_RUN)[:, None]
    indices, runs = (
        times * n_streams + run[: len(begins)] % n_streams,
        np.broadcast_to(run[: len(begins)], times.shape),
    )
    inside = indices < n_first
    rows = store.read(indices[inside])
    stored = rows.any(axis=1)
    return runs[inside][stored], rows[stored]


def copy_observations(
    old: Store, new: Store, row_bytes: int, ranges: Sequence[int], n_streams: int, position: int
) -> None:
    """Copy every observation of ``old`` to ``new``, which is empty, and commit them.

    ``ranges`` are the sizes of the ranges that were allocated. ``position`` is the index that is written next.
    """
    trained = False
    for indices, streams in _in_order(old, row_bytes, ranges, n_streams, position):
        rows = old.read(indices)
        stored = rows.any(axis=1)  # zeros need not be written: unwritten observations read as zeros
        if not trained and stored.any():
            new.train(rows[stored])
            trained = True
        new.write(indices[stored], streams[stored], rows[stored])
    new.commit()


def _in_order(
    store: Store, row_bytes: int, ranges: Sequence[int], n_streams: int, position: int
) -> Iterator[tuple[Indices, Indices]]:
    """All indices and their streams in chunks, oldest first, observations with their successors.

    Assumes that steps were written in order and that the one at ``position`` is the oldest. Otherwise the copy
    is still correct, but takes more memory.
    """
    n_all, written = sum(ranges), store.find_written()
    is_written = np.ones(n_all, bool) if written is None else np.zeros(n_all, bool)
    if written is not None:
        is_written[written] = True
    per_chunk = max(_CHUNK_BYTES // max(row_bytes, 1), n_streams)
    first = 0
    for n_obs, group in itertools.groupby(ranges):
        # ranges of equal size are observations and next observations of the same steps
        n_ranges = len(list(group))
        n_steps = -(-n_obs // n_streams)
        oldest = (position - first) % max(n_obs, 1) // n_streams
        per_part = max(per_chunk // (n_ranges * n_streams), 1)
        steps = np.roll(np.arange(n_steps), -oldest)
        for part in np.split(steps, range(per_part, n_steps, per_part)):
            shape = (len(part), n_ranges, n_streams)
            offsets = np.broadcast_to(part[:, None, None] * n_streams + np.arange(n_streams), shape)
            indices = offsets + first + n_obs * np.arange(n_ranges)[:, None]
            wanted = (offsets < n_obs) & is_written[np.minimum(indices, n_all - 1)]
            if wanted.any():
                yield indices[wanted], np.broadcast_to(np.arange(n_streams), shape)[wanted]
        first += n_obs * n_ranges
