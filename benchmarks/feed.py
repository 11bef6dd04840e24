"""Real observations to benchmark with: games are played once and recorded; reading stacks the frames again."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

N_ENVS = 4
STACK = 4
SIZE = (84, 84)
SEED = 7

Array = npt.NDArray[Any]


class Step(NamedTuple):
    """One step of a vectorised environment, as a replay buffer gets it."""

    obs: Array
    next_obs: Array
    dones: npt.NDArray[np.bool_]


def cache_dir() -> Path:
    """Folder of recorded games; ``SB3_EXTRA_BUFFERS_CACHE`` overrides it."""
    folder = Path(os.environ.get("SB3_EXTRA_BUFFERS_CACHE", Path(__file__).parent / ".cache"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def make_game(name: str) -> Any:
    """SB3's preprocessed Atari game ``name``, without frame stacking, or ``vizdoom-rgb`` or ``vizdoom-labels``."""
    if name.startswith("vizdoom"):
        from benchmarks.doom import make_doom

        return make_doom(name, N_ENVS, SEED)
    import ale_py
    import gymnasium
    from stable_baselines3.common.env_util import make_atari_env

    gymnasium.register_envs(ale_py)
    return make_atari_env(f"{name}NoFrameskip-v4", n_envs=N_ENVS, seed=SEED)


class Frames(NamedTuple):
    """The frames of all environments after one step, as a vectorised environment that resets itself returns them."""

    frames: Array
    dones: npt.NDArray[np.bool_]
    terminal: dict[int, Array]  # environment -> last frame of the episode that ended in this step


def play(name: str) -> Generator[Frames]:
    """Play ``name`` without end: the frames of the first reset, then those of every step.

    Names of :mod:`benchmarks.streams` are played by that module; any other name is a game, played with random actions.
    """
    from benchmarks import streams

    if name in streams.STREAMS:
        yield from streams.play(name, N_ENVS, SEED)
        return
    env = make_game(name)
    actions = np.random.default_rng(0)
    try:
        yield Frames(env.reset(), np.zeros(N_ENVS, bool), {})
        while True:
            frames, _, dones, infos = env.step(actions.integers(0, env.action_space.n, N_ENVS))
            yield Frames(frames, dones, {int(e): infos[e]["terminal_observation"] for e in np.flatnonzero(dones)})
    finally:
        env.close()


def record(name: str, n_steps: int) -> Path:
    """Play ``name`` for ``n_steps`` unless it is recorded already; return the folder.

    ``frames.bin`` has the frames of the first reset and of every step, one after another. ``ends.npz`` has ``shape``
    and ``dtype`` of the frames of one step, ``dones`` of every step, and the ``frames`` that episodes ended with,
    ``where`` giving the step and the environment of each.
    """
    folder = cache_dir() / f"{name}-{n_steps}"
    if (folder / "ends.npz").exists():
        return folder
    from tqdm import trange

    folder.mkdir(parents=True, exist_ok=True)
    dones = np.zeros((n_steps, N_ENVS), bool)
    ends: dict[tuple[int, int], Array] = {}
    with contextlib.closing(play(name)) as playing, (folder / "frames.bin").open("wb") as file:
        first = next(playing).frames
        np.ascontiguousarray(first).tofile(file)
        for step in trange(n_steps, desc=f"playing {name}", leave=False, file=sys.stderr):
            frames, dones[step], terminal = next(playing)
            np.ascontiguousarray(frames).tofile(file)
            ends.update({(step, e): frame for e, frame in terminal.items()})
    order = sorted(ends)
    # ends.npz marks the recording as complete, so it must never be visible half written
    partial = folder / "ends-partial.npz"
    np.savez(
        partial,
        dones=dones,
        where=np.array(order, np.int64).reshape(-1, 2),
        frames=np.array([ends[key] for key in order], first.dtype).reshape(-1, *first.shape[1:]),
        shape=np.array(first.shape),
        dtype=np.array(first.dtype.str),
    )
    partial.rename(folder / "ends.npz")
    return folder


def steps(name: str, n_steps: int, stack: int = STACK, channels_last: bool = False) -> Iterator[Step]:
    """The recording as transitions of stacked frames, as ``VecFrameStack`` would return them.

    Images have their channels first unless ``channels_last``; anything else is stacked along its last axis.
    Reads one step at a time, so that the recording does not count as resident memory.
    """
    folder = record(name, n_steps)
    ends = dict(np.load(folder / "ends.npz"))
    dtype = ends["frames"].dtype
    shape = tuple(int(length) for length in ends["shape"])
    count = int(np.prod(shape))
    channels_last = channels_last or len(shape) < 4
    axis = -1 if channels_last else 1

    def arrange(frames: Array) -> Array:
        """Move the channels of recorded frames to where observations have them."""
        return frames if channels_last else np.ascontiguousarray(np.moveaxis(frames, -1, 1))

    terminal = dict(zip(map(tuple, ends["where"].tolist()), arrange(ends["frames"]), strict=True))
    with (folder / "frames.bin").open("rb") as file:

        def read() -> Array:
            return arrange(np.fromfile(file, dtype, count).reshape(shape))

        first = read()
        channels = first.shape[axis]
        leading: tuple[Any, ...] = (...,) if channels_last else (slice(None),)
        newest = (*leading, slice(-channels, None))
        all_but_newest = (*leading, slice(None, -channels))
        all_but_oldest = (*leading, slice(channels, None))
        obs = np.concatenate([np.zeros_like(first)] * (stack - 1) + [first], axis=axis)
        for step in range(n_steps):
            following = np.concatenate([obs[all_but_oldest], read()], axis=axis)
            next_obs = following.copy()
            for e in np.flatnonzero(ends["dones"][step]):
                next_obs[newest][e] = terminal[step, int(e)]
                following[all_but_newest][e] = 0
            yield Step(obs, next_obs, ends["dones"][step])
            obs = following


def native_steps(game: str, n_steps: int, seed: int = SEED) -> Iterator[Step]:
    """``n_steps`` of an Atari game from ale-py's own vector environment: fast, not recorded."""
    from ale_py.vector_env import AtariVectorEnv

    env: Any = AtariVectorEnv(
        game, num_envs=N_ENVS, num_threads=1, stack_num=STACK, img_height=SIZE[0], img_width=SIZE[1], grayscale=True
    )
    actions = np.random.default_rng(seed)
    obs, _ = env.reset(seed=seed)
    obs = np.array(obs)
    for _ in range(n_steps):
        next_obs, _, terminations, truncations, _ = env.step(actions.integers(0, env.single_action_space.n, N_ENVS))
        next_obs = np.array(next_obs)
        yield Step(obs, next_obs, np.asarray(terminations) | np.asarray(truncations))
        obs = next_obs
    env.close()
