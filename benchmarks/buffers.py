"""Compressed SB3 buffers compared with SB3's own, in one process, calls interleaved; writes ``buffers.csv``.

Cases: ``replay`` (add and sample, first filling the buffer, then overwriting), ``rollout`` (one iteration of PPO),
``vector`` (observations of 17 floats), ``save`` (pickles), ``ppo`` and ``dqn`` (training, wall clock).
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.buffers import ReplayBuffer, RolloutBuffer
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl
from tqdm import tqdm, trange

from benchmarks import feed
from benchmarks.results import DATA, replace_rows, run_info
from benchmarks.timing import interleave
from sb3_extra_buffers.compressed import CompressedReplayBuffer, CompressedRolloutBuffer, init_jit

IMAGES = spaces.Box(0, 255, (4, 84, 84), np.uint8)
BATCHES = (32, 256)

Rows = Iterator[tuple[str, str, float, float]]


def medians(taken: list[list[float]], scale: float = 1e6) -> tuple[float, float]:
    ours, theirs = (scale * statistics.median(times) for times in taken)
    return ours, theirs


def replay(game: str = "MsPacman", n_steps: int = 10_000) -> Rows:
    """Adding to an empty buffer, then to a full one; then sampling."""
    actions, rewards, infos = np.zeros((4, 1), np.int64), np.zeros(4, np.float32), [{}] * 4
    pair = [
        kind(4 * n_steps, IMAGES, spaces.Discrete(9), "cpu", n_envs=4)
        for kind in (CompressedReplayBuffer, ReplayBuffer)
    ]
    for name in ("filling", "overwriting"):
        taken: list[list[float]] = [[], []]
        for position, step in enumerate(tqdm(feed.steps(game, n_steps), f"{game} {name}", n_steps)):
            step_times = interleave(
                [lambda b=b, s=step: b.add(s.obs, s.next_obs, actions, rewards, s.dones, infos) for b in pair],
                1,
                position,
            )
            for times, new_times in zip(taken, step_times, strict=True):
                times += new_times
        yield f"add, {name}, median", "us", *medians(taken)
        yield f"add, {name}, total", "s", sum(taken[0]), sum(taken[1])
    for batch in BATCHES:
        yield f"sample({batch})", "us", *medians(interleave([lambda b=b, n=batch: b.sample(n) for b in pair], 200))
    usage = pair[0].memory_usage()
    yield "held", "MB", usage.total / 1e6, (pair[1].observations.nbytes + pair[1].next_observations.nbytes) / 1e6


def vector(n_steps: int = 20_000) -> Rows:
    """A vector observation of 17 floats."""
    space, actions = spaces.Box(-1, 1, (17,), np.float32), spaces.Box(-1, 1, (6,), np.float32)
    pair = [kind(n_steps, space, actions, "cpu") for kind in (CompressedReplayBuffer, ReplayBuffer)]
    draw = np.random.default_rng(0)
    obs, action = draw.random((1, 17), np.float32), draw.random((1, 6), np.float32)
    rest = (np.ones(1, np.float32), np.zeros(1, bool), [{}])
    yield "add", "us", *medians(interleave([lambda b=b: b.add(obs, obs, action, *rest) for b in pair], n_steps))
    for batch in BATCHES:
        yield f"sample({batch})", "us", *medians(interleave([lambda b=b, n=batch: b.sample(n) for b in pair], 1000))


def rollout(game: str = "Pong", n_steps: int = 128, repeats: int = 12) -> Rows:
    """Everything that one iteration of PPO does with its buffer: 8 environments, 4 epochs, batches of 256."""
    pair = [
        kind(n_steps, IMAGES, spaces.Discrete(6), "cpu", n_envs=8) for kind in (CompressedRolloutBuffer, RolloutBuffer)
    ]
    early, late = feed.steps(game, 10_000), feed.steps(game, 10_000)
    for _ in range(5000):
        next(late)
    zeros, actions, tensor = np.zeros(8, np.float32), np.zeros(8, np.int64), torch.zeros(8)
    taken: dict[str, list[list[float]]] = {name: [[], []] for name in ("reset", "add", "first epoch", "later epochs")}

    def measure(name: str, call: Callable[[Any], Any]) -> None:
        call_times = interleave([lambda b=b: call(b) for b in pair], 1, len(taken[name][0]))
        for times, new_times in zip(taken[name], call_times, strict=True):
            times += new_times

    for _ in trange(repeats, desc=f"{game} rollouts"):
        measure("reset", lambda buffer: buffer.reset())
        for _ in range(n_steps):
            obs = np.concatenate([next(early).obs, next(late).obs])
            measure("add", lambda buffer, obs=obs: buffer.add(obs, actions, zeros, zeros, tensor, tensor))
        for buffer in pair:
            buffer.compute_returns_and_advantage(tensor, zeros)
        for epoch in range(4):
            measure("later epochs" if epoch else "first epoch", lambda buffer: [None for _ in buffer.get(256)])
    for name, times in taken.items():
        yield f"{name}, median", "us", *medians(times)
    ours, theirs = (sum(sum(times[i]) for times in taken.values()) / repeats for i in (0, 1))
    yield "everything, an iteration", "ms", 1e3 * ours, 1e3 * theirs
    usage = pair[0].memory_usage()
    yield "held", "MB", usage.total / 1e6, usage.dense / 1e6


def save(game: str = "MsPacman", n_transitions: int = 100_000) -> Rows:
    """Pickles, as `save_replay_buffer` writes them."""
    n_steps = n_transitions // 4
    actions, rewards, infos = np.zeros((4, 1), np.int64), np.zeros(4, np.float32), [{}] * 4
    ours: Any = CompressedReplayBuffer(n_transitions, IMAGES, spaces.Discrete(9), "cpu", n_envs=4)
    theirs: Any = ReplayBuffer(n_transitions, IMAGES, spaces.Discrete(9), "cpu", n_envs=4)
    source = feed.steps(game, 10_000)
    for position in trange(n_steps, desc=f"{game} filling"):
        if position % 10_000 == 0:
            source = feed.steps(game, 10_000)
        step = next(source)
        for buffer in (ours, theirs):
            buffer.add(step.obs, step.next_obs, actions, rewards, step.dones, infos)
    dense = theirs.observations.nbytes
    with tempfile.TemporaryDirectory() as folder:
        figures = []
        for name, buffer in (("ours", ours), ("sb3", theirs)):
            path = Path(folder) / f"{name}.pkl"
            tracemalloc.start()
            save_to_pkl(path, buffer)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            start = time.perf_counter()
            save_to_pkl(path, buffer)
            saved = time.perf_counter() - start
            start = time.perf_counter()
            load_from_pkl(path)
            loaded = time.perf_counter() - start
            figures.append((path.stat().st_size / 1e6, peak / 1e6, saved, loaded))
            path.unlink()
    names = (("file", "MB"), ("extra memory while saving", "MB"), ("saving", "s"), ("loading", "s"))
    for (name, unit), mine, other in zip(names, *figures, strict=True):
        yield name, unit, mine, other
    yield "one dense copy of the observations", "MB", dense / 1e6, dense / 1e6


def train(make: Callable[[bool], Any], n_steps: int, rounds: int, name: str) -> Rows:
    """Train two models from the same seed in alternation; they must end with the same weights."""
    models = [make(True), make(False)]
    # both use the global generators: save and restore their state for each model
    states = [_random_states()] * 2
    taken: list[list[float]] = [[], []]
    for number in trange(rounds + 1, desc=name):
        order = [0, 1] if number % 2 else [1, 0]
        for i in order:
            _set_random_states(states[i])
            start = time.perf_counter()
            models[i].learn(n_steps, reset_num_timesteps=False)
            seconds = time.perf_counter() - start
            states[i] = _random_states()
            if number:  # the first round warms up
                taken[i].append(seconds)
    weights = [model.policy.state_dict() for model in models]
    if not all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0]):
        raise SystemExit(f"{name}: the weights of the two models differ; no result is reported")
    yield f"{n_steps} steps, median of {rounds}", "s", *medians(taken, 1.0)


def _random_states() -> Any:
    return np.random.get_state(), torch.get_rng_state(), random.getstate()  # noqa: NPY002  # SB3's


def _set_random_states(states: Any) -> None:
    np.random.set_state(states[0])  # noqa: NPY002  # SB3's
    torch.set_rng_state(states[1])
    random.setstate(states[2])


def ppo() -> Rows:
    from sb3_extra_buffers.training_utils.atari import make_env

    def make(ours: bool) -> Any:
        kind = CompressedRolloutBuffer if ours else RolloutBuffer
        env = make_env("PongNoFrameskip-v4", n_envs=8, framestack=4, seed=1)
        return PPO(
            "CnnPolicy", env, n_steps=128, batch_size=256, n_epochs=4, seed=1, device="cpu", rollout_buffer_class=kind
        )

    yield from train(make, 1024, 15, "PPO on Pong")


def dqn() -> Rows:
    from sb3_extra_buffers.training_utils.atari import make_env

    def make(ours: bool) -> Any:
        kind = CompressedReplayBuffer if ours else ReplayBuffer
        env = make_env("MsPacmanNoFrameskip-v4", n_envs=1, framestack=4, seed=1)
        return DQN(
            "CnnPolicy", env, buffer_size=20_000, learning_starts=500, seed=1, device="cpu", replay_buffer_class=kind
        )

    yield from train(make, 1000, 9, "DQN on MsPacman")


CASES: dict[str, Callable[[], Rows]] = {
    "vector": vector, "replay": replay, "rollout": rollout, "save": save, "ppo": ppo, "dqn": dqn,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    init_jit("auto")
    path = DATA / "buffers.csv"
    info = run_info()
    for case in options.cases:
        rows = []
        for figure, unit, ours, theirs in CASES[case]():
            print(f"{case}: {figure}: {ours:.4g} {unit}, SB3 {theirs:.4g} {unit}: {ours / theirs:.3f}x", flush=True)
            rows.append(info | {"case": case, "figure": figure, "unit": unit, "ours": ours, "sb3": theirs})
        replace_rows(path, rows, ("case",))


if __name__ == "__main__":
    main()
