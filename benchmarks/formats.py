"""Sizes of the frame formats that were tried for `delta`, on real frames; writes ``benchmarks/data/formats.csv``.

Only sizes are measured, so the result does not depend on the machine. `benchmarks.render` has the formats' titles.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from benchmarks import feed
from benchmarks.results import DATA, run_info, write_rows
from sb3_extra_buffers.codecs.delta import DeltaCodec
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.kernels import policy
from sb3_extra_buffers.stores.layout import StackLayout
from sb3_extra_buffers.stores.segments import SegmentStore

GAMES = ["MsPacman", "Pong", "SpaceInvaders", "Asteroids", "Enduro", "Riverraid", "BeamRider", "BattleZone"]
STACK_BYTES = 4 * 84 * 84

Frames = npt.NDArray[np.uint8]  # [time, byte]


def tiles(frames: Frames) -> Frames:
    """Pixels reordered so that eight consecutive bytes are a tile of 2x4 pixels."""
    return frames.reshape(-1, 42, 2, 21, 4).transpose(0, 1, 3, 2, 4).reshape(len(frames), -1)


def runs(now: Frames, before: Frames) -> npt.NDArray[Any]:
    """Bytes per frame: two for each run of changed bytes, plus the new values."""
    changed = now != before
    starts = (changed[:, 1:] & ~changed[:, :-1]).sum(axis=1) + changed[:, 0]
    return 2 * starts + changed.sum(axis=1)


def tree(now: Frames, before: Frames, repeats: bool) -> npt.NDArray[Any]:
    """Bytes per frame of the mask tree; with ``repeats``, a value that repeats the previous one takes one bit."""
    changed = now != before
    bits = np.zeros((len(now), 8192), bool)
    bits[:, : changed.shape[1]] = changed
    size = np.full(len(now), 2)
    n_values = changed.sum(axis=1)
    for _ in range(3):
        bits = bits.reshape(len(now), -1, 8).any(axis=2)
        size += bits.sum(axis=1)
    if not repeats:
        return size + n_values
    fresh = np.zeros(len(now), np.int64)
    for index in range(len(now)):
        values = now[index][changed[index]]
        fresh[index] = values.size and 1 + np.count_nonzero(values[1:] != values[:-1])
    return size + (n_values + 7) // 8 + fresh


def stored(game: str, n_steps: int, n_frames: int, packed: bool) -> float:
    """Bytes per observation in a `SegmentStore` with segments of ``n_frames``."""
    layout = StackLayout(ObsSpec((4, 84, 84), np.dtype(np.uint8)), 4)
    # a store reads the constant when it is created
    with patch.object(policy, "COMPRESS_ABOVE", policy.COMPRESS_ABOVE if packed else 1.0):
        store = SegmentStore(layout, n_steps * feed.N_ENVS, feed.N_ENVS, DeltaCodec(frames=n_frames))
    streams = np.arange(feed.N_ENVS)
    for step, (obs, _, _) in zip(range(n_steps), feed.steps(game, 10_000), strict=False):
        store.write(streams + step * feed.N_ENVS, streams, obs.reshape(feed.N_ENVS, -1))
    return store.difference_bytes() / (n_steps * feed.N_ENVS)


def main(n_steps: int = 2500) -> None:
    info, rows = run_info(), []
    for game in tqdm(GAMES):
        steps = list(zip(range(n_steps), feed.steps(game, 10_000), strict=False))
        sizes: dict[str, list[float]] = {}
        for e in range(feed.N_ENVS):
            frames = np.stack([step.obs[e, -1].reshape(-1) for _, step in steps])
            now, before, older = frames[2:], frames[1:-1], frames[:-2]
            tiled, tiled_before = tiles(now), tiles(before)
            best = np.minimum(tree(now, before, True), tree(now, older, True))
            for name, size in {
                "byte runs": runs(now, before),
                "mask tree": tree(now, before, False),
                "mask tree, tiles of 2x4": tree(tiled, tiled_before, False),
                "mask tree, repeats as bits": tree(now, before, True),
                "the same, tiles of 2x4": tree(tiled, tiled_before, True),
                "the same, better of one and two frames before": best,
            }.items():
                sizes.setdefault(name, []).append(float(size.mean()))
        row = {name: np.mean(size) for name, size in sizes.items()}
        for n_frames in (4, 8, 16, 32):
            row[f"stored, segments of {n_frames}"] = stored(game, n_steps, n_frames, packed=False)
        row["stored, segments of 8, heavy ones packed"] = stored(game, n_steps, 8, packed=True)
        rows += [
            info | {"game": game, "format": name, "percent_of_stack": round(100 * size / STACK_BYTES, 3)}
            for name, size in row.items()
        ]
        print(game, *(f"{name}: {size:.0f} bytes" for name, size in row.items()), sep="\n  ")
    write_rows(DATA / "formats.csv", rows)


if __name__ == "__main__":
    main()
