"""Helpers of the tests of heaps, stores and arrays: observations like those of a game, and a model to compare with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, settings

from sb3_extra_buffers.codecs import ByteRows, is_available
from sb3_extra_buffers.kernels import has_numba
from sb3_extra_buffers.stores.base import Store
from sb3_extra_buffers.stores.frames import FrameStore

UNWRITTEN = 0xAA  # decode targets are filled with this, so that a byte that was not written shows

KERNELS = [
    pytest.param(True, id="compiled", marks=pytest.mark.skipif(not has_numba(), reason="numba is not installed")),
    pytest.param(False, id="reference"),
]

# the same examples every time; TEST_EXAMPLES=10 tries ten times as many, and new ones
_MORE = int(os.environ.get("TEST_EXAMPLES", "0"))


def examples(count: int, steps: int = 30) -> settings:
    """Settings for a Hypothesis test or state machine."""
    return settings(
        max_examples=count * max(_MORE, 1),
        stateful_step_count=steps,
        derandomize=not _MORE,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not is_available(name), reason=f"the package of {name} is not installed")


def method_params(*methods: str) -> list[Any]:
    """Methods as test parameters, each skipped where its package is missing."""
    wanted = {"delta2": "zstd", "delta3": "zstd", "scroll2": "zstd"}
    return [
        pytest.param(method, marks=needs(wanted.get(method, method.rstrip("0123456789-") or method)))
        if method != "auto" else pytest.param(method)
        for method in methods
    ]  # fmt: skip


class Walk:
    """Frames like a game's: most resemble the one before, some are quite different."""

    def __init__(self, shape: tuple[int, ...], seed: int = 0, dtype: npt.DTypeLike = np.uint8) -> None:
        self.rng = np.random.default_rng(seed)
        self.shape = shape
        self.frame = self._noise(4).astype(dtype)
        self.seen = [self.frame]

    def _noise(self, n_values: int) -> npt.NDArray[Any]:
        return self.rng.integers(0, n_values, self.shape)

    def step(self) -> npt.NDArray[Any]:
        """The next frame."""
        kind = self.rng.choice(
            ["sprite", "stay", "scroll", "back", "zero", "shift", "noise"], p=[0.55, 0.1, 0.1, 0.08, 0.05, 0.07, 0.05]
        )
        frame = self.frame.copy()
        flat = frame.reshape(-1)
        if kind == "sprite":
            at = int(self.rng.integers(flat.size))
            flat[at : at + int(self.rng.integers(1, 9))] = self.rng.integers(256)
        elif kind == "scroll":
            frame = np.roll(frame, 1, axis=0)
        elif kind == "shift":
            # every byte changes, in a way that packs well
            frame = frame + frame.dtype.type(1)
        elif kind == "back":
            frame = self.seen[int(self.rng.integers(len(self.seen)))].copy()
        elif kind == "zero":
            frame[...] = 0
        elif kind == "noise":
            frame[...] = self._noise(256)
        self.frame = frame
        self.seen = [*self.seen[-7:], frame]
        return frame

    def frames(self, count: int) -> npt.NDArray[Any]:
        return np.stack([self.step() for _ in range(count)])


class Stacked:
    """One env behind a frame stack: what a `VecFrameStack` hands out, with episodes that end."""

    def __init__(self, walk: Walk, stack: int, axis: str, episode: int = 9) -> None:
        self.walk, self.stack, self.axis, self.episode = walk, stack, axis, episode
        self.left = episode
        self._planes = [np.zeros_like(walk.frame)] * stack
        self._push(walk.step())

    def _push(self, frame: npt.NDArray[Any]) -> None:
        self._planes = [*self._planes[1:], frame]

    @property
    def observation(self) -> npt.NDArray[Any]:
        if self.stack == 1:
            return self._planes[0]
        return np.stack(self._planes, axis=0 if self.axis == "first" else -1)

    def step(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """``(obs, next_obs)`` of one transition; a terminal observation where the episode ends."""
        before = self.observation
        self._push(self.walk.step())
        after = self.observation
        self.left -= 1
        if self.left == 0:
            # the stack is filled with zeros before the first frame of an episode
            self.left = self.episode + int(self.walk.rng.integers(5))
            self._planes = [np.zeros_like(self.walk.frame)] * self.stack
            self._push(self.walk.step())
        return before, after


def transitions(
    shape: tuple[int, ...], stack: int, axis: str, n_envs: int, n_steps: int, seed: int = 0
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Steps of several envs: ``(obs, next_obs)``, each ``[env, ...]``."""
    envs = [Stacked(Walk(shape, seed * 100 + env), stack, axis) for env in range(n_envs)]
    for _ in range(n_steps):
        pairs = [env.step() for env in envs]
        yield np.stack([before for before, _ in pairs]), np.stack([after for _, after in pairs])


def n_frames_held(store: FrameStore) -> int:
    return int(store.state.counts.sum())


def n_frames_live(store: FrameStore) -> int:
    return int(np.count_nonzero(store.state.refs))


def check_content(store: FrameStore, model: dict[int, bytes]) -> None:
    """Raise unless ``store`` holds what ``model`` says, and zeros everywhere else."""
    check_rows(store, model, list(range(len(store.frame_ids))), store.layout.spec.nbytes)


def check_rows(store: Store, model: dict[int, bytes], indices: list[int], nbytes: int) -> None:
    """Raise unless ``store`` holds at ``indices`` what ``model`` says, and zeros where it says nothing."""
    rows = store.read(np.array(indices, np.int64))
    for index, row in zip(indices, rows, strict=True):
        assert row.tobytes() == model.get(index, bytes(nbytes)), f"index {index} does not hold what was written to it"


def write_rows(store: Store, indices: list[int], streams: list[int], rows: ByteRows) -> None:
    store.write(np.array(indices, np.int64), np.array(streams, np.int64), rows)


def poison_empty(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
    """Let ``np.empty`` of ``modules`` return bytes of `UNWRITTEN`."""

    class Poisoned:
        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        @staticmethod
        def empty(shape: Any, dtype: Any = float, **kwargs: Any) -> npt.NDArray[Any]:
            array = np.empty(shape, dtype, **kwargs)
            array.reshape(-1).view(np.uint8)[...] = UNWRITTEN
            return array

    for module in modules:
        monkeypatch.setattr(module, "np", Poisoned())


def run_fresh(code: str, *arguments: str, timeout: float = 120) -> str:
    """Run ``code`` in a new interpreter and return its output; fail with everything it printed."""
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, timeout=timeout, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    if run.returncode:
        raise AssertionError(
            f"ended with {run.returncode} (negative: a signal)\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
        )
    return run.stdout


#: source for `run_fresh`: the resident set of this process, in bytes
RESIDENT = """
import ctypes, gc, os
def resident():
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)  # what malloc keeps for later is nobody's
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
"""

needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="/proc tells the resident set")
