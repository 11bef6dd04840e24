"""Training with GPU buffers: the parts ``ppo`` and ``dqn`` of the GPU benchmarks."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback

from benchmarks.gpu_timing import wait
from benchmarks.results import ROOT
from sb3_extra_buffers.gpu_buffers import GpuRolloutBuffer
from sb3_extra_buffers.training_utils.atari import make_env

if TYPE_CHECKING:
    from benchmarks.gpu import Report

METHODS = ("sb3", "none", "delta")


class Stopwatch(BaseCallback):
    """Starts when the environments have been reset."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def _on_training_start(self) -> None:
        wait(self._device)
        self.start = time.perf_counter()

    def _on_step(self) -> bool:
        return True

    def stop(self) -> float:
        """Seconds since the start, when the device is done."""
        wait(self._device)
        return time.perf_counter() - self.start


def ppo(report: Report, quick: bool) -> None:
    """Seconds of one iteration of PPO on Pong, from one seed; all runs must end with the same weights."""
    device = report.device
    n_envs, n_steps, batch_size, iterations, rounds = (8, 8, 32, 1, 1) if quick else (512, 32, 2048, 2, 3)
    report.setting = f"Pong, {n_envs} environments x {n_steps} steps, 4 epochs in batches of {batch_size}"
    if device == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
        # uninitialised memory is never read, so filling it would only cost time
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
    # hundreds of games take long to create, so that all runs share them
    env = make_env("PongNoFrameskip-v4", n_envs=n_envs, framestack=4, native=True, seed=1)
    taken: dict[str, list[float]] = {method: [] for method in METHODS}
    weights = set()
    # the first round compiles and tunes
    for turn in range(rounds + 1):
        for method in METHODS[:: 1 if turn % 2 else -1]:
            options: dict[str, Any] = {}
            if method != "sb3":
                options["rollout_buffer_class"] = GpuRolloutBuffer
                options["rollout_buffer_kwargs"] = {"compression_method": method, "buffer_device": device}
            model = PPO(
                "CnnPolicy", env, n_steps=n_steps, batch_size=batch_size, n_epochs=4, seed=1, device=device, **options
            )
            stopwatch = Stopwatch(device)
            model.learn((iterations if turn else 1) * n_envs * n_steps, callback=stopwatch)
            if turn:
                taken[method].append(stopwatch.stop() / iterations)
                values = [value.detach().cpu().numpy().tobytes() for value in model.policy.state_dict().values()]
                weights.add(hashlib.sha256(b"".join(values)).hexdigest())
            del model
    env.close()
    if len(weights) > 1:
        raise SystemExit("the trained weights differ; nothing is reported")
    report.add(f"PPO, {n_envs} environments, iteration", "s", taken)


# the example prints its speed every 5,000 steps; before the second of these it also fills the buffer and compiles
_DQN_STEPS, _DQN_FILL, _DQN_START = 26_000, 4_000, 10_000


def dqn(report: Report, quick: bool) -> None:
    """Milliseconds per 1000 steps of a CleanRL-style DQN: its update as one CUDA graph, or with dense NumPy arrays."""
    steps = ["--buffer-size", "10000" if quick else "200000"]
    steps += ["--quick"] if quick else ["--timesteps", str(_DQN_STEPS), "--learning-starts", str(_DQN_FILL)]
    report.setting = "Pong, 8 environments, 2 updates in batches of 32 every 8 steps"
    # the examples run in their own folder
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    taken = {}
    for name, options in (
        ("delta", ["--compression", "delta"]),
        ("none", ["--compression", "none"]),
        ("dense", ["--buffer", "dense-cpu"]),
    ):
        command = [sys.executable, "example_cleanrl_graph.py", *steps, *options]
        begin = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT / "examples", env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
        taken[name] = [1e3 * (time.perf_counter() - begin)] if quick else milliseconds(done.stdout)
    report.add("CleanRL-style DQN, 1000 steps", "ms", taken)


def milliseconds(printed: str) -> list[float]:
    """Milliseconds per 1000 steps of each interval in which only training happened."""
    lines = re.findall(r"^ *([\d,]+) steps, ([\d,]+) per second", printed, re.MULTILINE)
    pairs = [tuple(int(number.replace(",", "")) for number in line) for line in lines]
    # speeds are averages since the start
    clock = {steps: steps / speed for steps, speed in pairs if steps >= _DQN_START}
    intervals = zip(clock.items(), list(clock.items())[1:], strict=False)
    return [1e6 * (end - begin) / (last - first) for (first, begin), (last, end) in intervals]
