"""GPU buffers on a recorded game, compared with SB3's buffer and a dense tensor; writes ``benchmarks/data/gpu.csv``.

Needs a CUDA device. Each figure is the median of many repeats after a warm-up, up to the point where the device is
done. A batch that differs from SB3's ends the run.
"""

from __future__ import annotations

import argparse
import csv
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import stable_baselines3
import torch
from gymnasium import spaces
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import VecFrameStack

from benchmarks import feed
from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer, GpuRolloutBuffer
from sb3_extra_buffers.stores.device_frames import DeviceFrameStore
from sb3_extra_buffers.stores.device_timeline import DeviceTimelineStore

DATA = Path(__file__).parent / "data" / "gpu.csv"
SPACE = spaces.Box(0, 255, (4, 84, 84), np.uint8)
FIELDS = [
    "date",
    "time",
    "device",
    "versions",
    "game",
    "n_transitions",
    "buffer",
    "figure",
    "unit",
    "p20",
    "p50",
    "p80",
]
ALGORITHMS = ("DQN", "PPO")
BUFFERS = {
    "delta": {"compression_method": "delta", "buffer_device": "cuda"},
    "delta, pinned": {"compression_method": "delta", "buffer_device": "pinned"},
    "none": {"compression_method": "none", "buffer_device": "cuda"},
    "rle": {"compression_method": "rle", "buffer_device": "cuda"},
    "zstd": {"compression_method": "zstd", "buffer_device": "cuda"},
}


def times_us(run: Callable[[], Any], repeats: int = 300) -> list[float]:
    """Microseconds until the device is done, for each repeat."""
    for _ in range(repeats // 3):
        run()
    taken = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        taken.append(1e6 * (time.perf_counter() - start))
    return taken


def graph_us(run: Callable[[], Any], repeats: int = 50) -> list[float]:
    """Microseconds of the kernels alone: replays of a CUDA graph of ten runs."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    taken = []
    for _ in range(repeats):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(1e3 * begin.elapsed_time(end) / 10)
    return taken


class Report:
    """Collects the rows of the CSV file and prints each."""

    def __init__(self, game: str, n_transitions: int, append: bool = False) -> None:
        versions = f"Python {platform.python_version()}, torch {torch.__version__}, triton {_version('triton')}, "
        versions += f"numpy {np.__version__}, stable-baselines3 {stable_baselines3.__version__}"
        now = datetime.now(timezone.utc)
        self._same = [
            now.date().isoformat(),
            f"{now:%H:%M}",
            torch.cuda.get_device_name(),
            versions,
            game,
            n_transitions,
        ]
        self.rows: list[list[Any]] = []
        self._earlier: list[list[str]] = []
        if append:
            with DATA.open(newline="") as file:
                self._earlier = list(csv.reader(file))[1:]

    def add(self, buffer: str, figure: str, unit: str, values: list[float]) -> None:
        cuts = statistics.quantiles(values, n=10) if len(values) > 1 else values * 9
        self.rows.append([*self._same, buffer, figure, unit, *(round(cuts[i], 3) for i in (1, 4, 7))])
        print(f"{buffer:14} {figure:22} {cuts[4]:10.2f} {unit}", flush=True)

    def write(self) -> None:
        with DATA.open("w", newline="") as file:
            csv.writer(file).writerows([FIELDS, *self._earlier, *self.rows])


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def measure(game: str, n_steps: int, report: Report) -> None:
    """Times of add, sample and decode, and the memory."""
    n_transitions = n_steps * feed.N_ENVS
    actions = spaces.Discrete(9)
    theirs = ReplayBuffer(n_transitions, SPACE, actions, "cuda", n_envs=feed.N_ENVS)
    ours = {
        name: GpuReplayBuffer(n_transitions, SPACE, actions, "cuda", n_envs=feed.N_ENVS, **kwargs)
        for name, kwargs in BUFFERS.items()
    }
    columns = np.zeros(feed.N_ENVS, np.int64), np.zeros(feed.N_ENVS, np.float32)
    last = []
    for step, (obs, next_obs, dones) in enumerate(feed.steps(game, n_steps)):
        transition = (obs, next_obs, *columns, dones, [{}] * feed.N_ENVS)
        if n_steps - step <= 500:
            last.append(transition)
            continue
        for buffer in (theirs, *ours.values()):
            buffer.add(*transition)
    for name, buffer in (("sb3", theirs), *ours.items()):
        taken = []
        for transition in last:
            torch.cuda.synchronize()
            start = time.perf_counter()
            buffer.add(*transition)
            torch.cuda.synchronize()
            taken.append(1e6 * (time.perf_counter() - start))
        report.add(name, "add of 4 envs", "us", taken)

    for name, buffer in ours.items():
        set_random_seed(0)
        expected = theirs.sample(512)
        set_random_seed(0)
        batch = buffer.sample(512)
        if not all(torch.equal(a, b) for a, b in zip(batch[:5], expected[:5], strict=True)):
            raise SystemExit(f"{name} returns other batches than SB3; it is not timed")
    for size in (32, 256):
        for name, buffer in (("sb3", theirs), *ours.items()):
            repeats = 50 if name in ("sb3", "rle", "zstd") else 300
            report.add(name, f"sample({size})", "us", times_us(lambda b=buffer, n=size: b.sample(n), repeats))

    indices = torch.randint(0, n_transitions, (1, 256), device="cuda")
    indices = torch.cat([indices, indices + n_transitions])
    for name, buffer in ours.items():
        store = buffer.obs_stores[""].inner
        out = torch.empty((2, 256, 4, 7056), dtype=torch.uint8, device="cuda")
        if isinstance(store, DeviceFrameStore | DeviceTimelineStore):
            kernels = store.kernels(store.state) if isinstance(store, DeviceFrameStore) else store.kernels
            report.add(name, "decode kernels, 256", "us", graph_us(lambda k=kernels, o=out: k.read(indices, o)))
    dense = torch.zeros((2 * n_transitions, *SPACE.shape), dtype=torch.uint8, device="cuda")
    report.add("none", "dense gather, 256", "us", graph_us(lambda: dense[indices.flatten()]))
    for name, buffer in ours.items():
        report.add(name, "memory of dense", "%", [100 * buffer.memory_usage().total / dense.nbytes])


#: Observations that are not Atari's, and the methods to measure on them.
OTHERS: dict[str, tuple[spaces.Box, tuple[str, ...]]] = {
    "vector": (spaces.Box(-np.inf, np.inf, (17,), np.float32), ("none",)),
    "camera": (spaces.Box(0, 255, (64, 64, 3), np.uint8), ("none", "camera", "auto")),
    "float camera": (spaces.Box(0, 1, (64, 64, 3), np.float32), ("none", "camera", "table:none", "auto")),
}


def synthetic(space: spaces.Box, n_steps: int) -> Iterator[tuple[Any, Any, Any]]:
    """Steps of four streams, in episodes of 200: numbers that drift, or a picture that moves under a little noise."""
    random = np.random.default_rng(0)
    shape = (feed.N_ENVS, *space.shape)

    def first() -> Any:
        if len(space.shape) == 1:
            return random.standard_normal(shape)
        return random.integers(-3, 4, shape).cumsum(axis=1).cumsum(axis=2) % 256

    def shown(state: Any) -> Any:
        if len(space.shape) == 1:
            return state.astype(np.float32)
        pixels = (state + random.integers(0, 3, shape)).astype(np.uint8)
        return pixels if space.dtype == np.uint8 else pixels.astype(np.float32) / np.float32(255)

    state = first()
    obs = shown(state)
    for step in range(n_steps):
        is_end = step % 200 == 199
        drifts = len(space.shape) == 1
        state = state + 0.01 * random.standard_normal(shape) if drifts else np.roll(state, 1, axis=2)
        next_obs = shown(state)
        yield obs, next_obs, np.full(feed.N_ENVS, is_end, np.float32)
        if is_end:
            state = first()
        obs = shown(state) if is_end else next_obs


def measure_others(n_steps: int, report: Report) -> None:
    """Times of add and sample, and the memory relative to observations and next observations in dense tensors."""
    actions = spaces.Discrete(9)
    n_transitions = n_steps * feed.N_ENVS
    columns = np.zeros(feed.N_ENVS, np.int64), np.zeros(feed.N_ENVS, np.float32)
    for kind, (space, methods) in OTHERS.items():
        buffers: dict[str, Any] = {"sb3": ReplayBuffer(n_transitions, space, actions, "cuda", n_envs=feed.N_ENVS)}
        for method in methods:
            kwargs: dict[str, Any] = {"compression_method": method, "buffer_device": "cuda"}
            buffers[method] = GpuReplayBuffer(n_transitions, space, actions, "cuda", n_envs=feed.N_ENVS, **kwargs)
        taken: dict[str, list[float]] = {name: [] for name in buffers}
        for obs, next_obs, dones in synthetic(space, n_steps):
            for name, buffer in buffers.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                buffer.add(obs, next_obs, *columns, dones, [{}] * feed.N_ENVS)
                torch.cuda.synchronize()
                taken[name].append(1e6 * (time.perf_counter() - start))
        for name, buffer in buffers.items():
            report.add(f"{kind}: {name}", "add of 4 envs", "us", taken[name][n_steps // 2 :])
            set_random_seed(0)
            expected = buffers["sb3"].sample(512)
            set_random_seed(0)
            batch = buffer.sample(512)
            if not all(torch.equal(a, b) for a, b in zip(batch[:5], expected[:5], strict=True)):
                raise SystemExit(f"{kind}: {name} returns other batches than SB3; it is not timed")
            for size in (32, 256):
                report.add(f"{kind}: {name}", f"sample({size})", "us", times_us(lambda b=buffer, n=size: b.sample(n)))
            if name != "sb3":
                dense = 2 * n_transitions * int(np.prod(space.shape)) * space.dtype.itemsize
                print(buffer.memory_usage())
                share = 100 * buffer.memory_usage().observations / dense
                report.add(f"{kind}: {name}", "memory of dense", "%", [share])


def train_all(report: Report, names: tuple[str, ...]) -> None:
    import ale_py
    import gymnasium

    gymnasium.register_envs(ale_py)
    # deterministic, so that two training runs can be compared
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    for name in names:
        train(name, report)
        report.write()


# timed runs of each training, after one that compiles and tunes
_ROUNDS = 4


def train(name: str, report: Report) -> None:
    """Seconds of a short training run on Pong with either buffer, alternating; compares the weights."""
    kinds: dict[str, dict[str, Any]] = {"sb3": {}, "delta": {}}
    common: dict[str, Any] = {"device": "cuda", "seed": 0}
    if name == "DQN":
        kinds["delta"] = {"replay_buffer_class": GpuReplayBuffer, "replay_buffer_kwargs": BUFFERS["delta"]}
        common |= {"buffer_size": 20_000, "learning_starts": 1000, "batch_size": 32}
    else:
        kinds["delta"] = {"rollout_buffer_class": GpuRolloutBuffer, "rollout_buffer_kwargs": BUFFERS["delta"]}
        common |= {"n_steps": 128, "batch_size": 256, "n_epochs": 4}
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    weights: dict[str, list[torch.Tensor]] = {}
    for turn in range(_ROUNDS + 1):
        # alternate which one comes first
        for kind, buffer in list(kinds.items())[:: 1 if turn % 2 else -1]:
            env = VecFrameStack(make_atari_env("PongNoFrameskip-v4", n_envs=4, seed=0), 4)
            model = (DQN if name == "DQN" else PPO)("CnnPolicy", env, **common, **buffer)
            start = time.perf_counter()
            model.learn(5000 if turn else 1200)
            torch.cuda.synchronize()
            if turn:
                taken[kind].append(time.perf_counter() - start)
            weights[kind] = [parameter.detach().clone() for parameter in model.policy.parameters()]
            env.close()
    same = all(torch.equal(a, b) for a, b in zip(weights["sb3"], weights["delta"], strict=True))
    for kind, seconds in taken.items():
        report.add(kind, f"{name}, 5000 steps", "s", seconds)
    report.add("delta", f"{name}, same weights", "yes is 1", [float(same)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--game", default="MsPacman")
    parser.add_argument("--steps", type=int, default=25_000, help="steps of each of the four environments")
    parser.add_argument("--only", choices=["buffers", "others", *ALGORITHMS])
    parser.add_argument("--append", action="store_true", help="keep the rows of earlier runs")
    options = parser.parse_args()
    report = Report(options.game, options.steps * feed.N_ENVS, options.append)
    if options.only in (None, "buffers"):
        measure(options.game, options.steps, report)
        report.write()
    if options.only in (None, "others"):
        measure_others(min(options.steps, 5000), report)
        report.write()
    train_all(report, ALGORITHMS if options.only is None else tuple({options.only} & set(ALGORITHMS)))


if __name__ == "__main__":
    main()
