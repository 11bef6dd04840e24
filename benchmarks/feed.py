"""Real observations to benchmark with: games are played once and recorded; reading stacks the frames again."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
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


def record(name: str, n_steps: int) -> Path:
    """Play ``name`` with random actions unless it is recorded already; return the folder."""
    folder = cache_dir() / f"{name}-{n_steps}"
    if (folder / "ends.npz").exists():
        return folder
    from tqdm import trange

    folder.mkdir(parents=True, exist_ok=True)
    env = make_game(name)
    actions = np.random.default_rng(0)
    dones = np.zeros((n_steps, N_ENVS), bool)
    ends: dict[tuple[int, int], Array] = {}
    with (folder / "frames.bin").open("wb") as file:
        frames = env.reset()
        np.ascontiguousarray(frames).tofile(file)
        for step in trange(n_steps, desc=f"playing {name}", leave=False, file=sys.stderr):
            frames, _, dones[step], infos = env.step(actions.integers(0, env.action_space.n, N_ENVS))
            np.ascontiguousarray(frames).tofile(file)
            for e in np.flatnonzero(dones[step]):
                ends[step, int(e)] = infos[e]["terminal_observation"]
    env.close()
    order = sorted(ends)
    np.savez(
        folder / "ends.npz",
        dones=dones,
        where=np.array(order, np.int64).reshape(-1, 2),
        frames=np.array([ends[key] for key in order], np.uint8).reshape(-1, *frames.shape[1:]),
        shape=np.array(frames.shape),
    )
    return folder


def steps(name: str, n_steps: int, stack: int = STACK) -> Iterator[Step]:
    """The recorded game as transitions of channel-first stacks, as ``VecFrameStack`` would return them.

    Reads one step at a time, so that the recording does not count as resident memory.
    """
    folder = record(name, n_steps)
    ends = dict(np.load(folder / "ends.npz"))
    terminal = {(int(step), int(e)): frame for (step, e), frame in zip(ends["where"], ends["frames"], strict=True)}
    shape = tuple(int(length) for length in ends["shape"])
    count = int(np.prod(shape))
    with (folder / "frames.bin").open("rb") as file:

        def read() -> Array:
            frames = np.fromfile(file, np.uint8, count).reshape(shape)
            return np.moveaxis(frames, -1, 1)  # channels first

        first = read()
        channels = first.shape[1]
        obs = np.zeros((N_ENVS, stack * channels, *first.shape[2:]), np.uint8)
        obs[:, -channels:] = first
        for step in range(n_steps):
            following = np.concatenate([obs[:, channels:], read()], axis=1)
            next_obs = following.copy()
            for e in np.flatnonzero(ends["dones"][step]):
                next_obs[e, -channels:] = np.moveaxis(terminal[step, int(e)], -1, 0)
                following[e, :-channels] = 0
            yield Step(obs, next_obs, ends["dones"][step])
            obs = following


def native_steps(game: str, n_steps: int, seed: int = SEED) -> Iterator[Step]:
    """``n_steps`` of an Atari game from ale-py's own vector environment: fast, not recorded."""
    from ale_py.vector_env import AtariVectorEnv

    env = AtariVectorEnv(
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
