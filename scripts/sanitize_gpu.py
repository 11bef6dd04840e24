"""Run every GPU kernel on small inputs, for NVIDIA's compute-sanitizer.

    python scripts/sanitize_gpu.py                                        # first: compiles the kernels
    compute-sanitizer --tool memcheck python scripts/sanitize_gpu.py
    compute-sanitizer --tool racecheck python scripts/sanitize_gpu.py --parts delta,none

Each part also compares batches with those of SB3's buffer. Without a GPU (``--device cpu``), reference kernels run.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

# each tensor gets an allocation of its own, so that an access outside of it is outside of every allocation
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer, RolloutBuffer
from stable_baselines3.common.utils import set_random_seed

from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer, GpuRolloutBuffer

STACK = spaces.Box(0, 255, (4, 20, 19), np.uint8)
IMAGE = spaces.Box(0, 255, (24, 20, 3), np.uint8)
VIDEO = spaces.Box(0, 255, (64, 64, 3), np.uint8)
LARGE = spaces.Box(0, 255, (150, 150, 3), np.uint8)  # above 65,535 bytes
VECTOR = spaces.Box(-np.inf, np.inf, (7,), np.float32)
ACTIONS = spaces.Discrete(5)


def steps(space: spaces.Box, n_envs: int, n_steps: int) -> Iterator[tuple[Any, ...]]:
    """Transitions of episodes that end at random: frames with a few changes, stacked where the space is."""
    random = np.random.default_rng(0)
    stack = space.shape[0] if space is STACK else 1

    def first() -> Any:
        shape = space.shape[1:] if stack > 1 else space.shape
        return random.integers(0, 256, shape).astype(space.dtype)

    def follow(frame: Any) -> Any:
        frame = frame.copy()
        chosen = random.integers(0, frame.size, max(frame.size // 50, 1))
        frame.reshape(-1)[chosen] = random.integers(0, 256, len(chosen)).astype(frame.dtype)
        return frame

    def observe(frames: list[list[Any]]) -> Any:
        return np.stack([np.stack(each) if stack > 1 else each[0] for each in frames])

    frames = [[np.zeros_like(first())] * (stack - 1) + [first()] for _ in range(n_envs)]
    for _ in range(n_steps):
        obs = observe(frames)
        frames = [[*each[1:], follow(each[-1])] for each in frames]
        next_obs = observe(frames)
        dones = random.random(n_envs) < 0.05
        frames = [
            [np.zeros_like(each[0])] * (stack - 1) + [first()] if done else each
            for each, done in zip(frames, dones, strict=True)
        ]
        rewards = random.standard_normal(n_envs).astype(np.float32)
        yield obs, next_obs, random.integers(0, 5, n_envs), rewards, dones.astype(np.float32)


def on_device(step: tuple[Any, ...], device: str) -> list[torch.Tensor]:
    return [torch.as_tensor(part, device=device) for part in step]


def replay(method: str, space: spaces.Box, n_envs: int, device: str, buffer_device: str = "") -> None:
    """Fill a replay buffer past its end with arrays and tensors in turns, and sample from it."""
    size = 12 * n_envs
    options: dict[str, Any] = {"compression_method": method, "buffer_device": buffer_device or device}
    ours = GpuReplayBuffer(size, space, ACTIONS, device, n_envs=n_envs, **options)
    theirs = ReplayBuffer(size, space, ACTIONS, device, n_envs=n_envs)
    infos: list[dict[str, Any]] = [{} for _ in range(n_envs)]
    for number, step in enumerate(steps(space, n_envs, 31)):
        theirs.add(*step, infos)
        ours.add(*(on_device(step, device) if number % 2 else step), infos)
        if number % 6 == 5:
            same(ours, theirs)
    same(ours, theirs)
    ours.reset()


def same(ours: Any, theirs: Any) -> None:
    batches = []
    for buffer in (ours, theirs):
        set_random_seed(0)
        batches.append(buffer.sample(33))
    for found, expected in zip(batches[0][:5], batches[1][:5], strict=True):
        if not torch.equal(found, expected):
            raise SystemExit("a batch differs from SB3's")


def rollout(method: str, space: spaces.Box, n_envs: int, device: str) -> None:
    """Two rollouts: returns, and all batches."""
    ours = GpuRolloutBuffer(
        11, space, ACTIONS, device, 0.95, n_envs=n_envs, compression_method=method, buffer_device=device
    )
    theirs = RolloutBuffer(11, space, ACTIONS, device, 0.95, n_envs=n_envs)
    for _ in range(2):
        last: Any = None
        for number, (obs, _, actions, rewards, dones) in enumerate(steps(space, n_envs, 11)):
            values = torch.linspace(0, 1, n_envs, device=device) + number
            last = actions[:, None], rewards, dones
            theirs.add(obs, *last, values, -values)
            given = on_device((obs, *last), device) if number % 2 else (obs, *last)
            ours.add(*given, values, -values)
        batches = []
        for buffer in (ours, theirs):
            buffer.compute_returns_and_advantage(torch.ones(n_envs, device=device), last[2])
            set_random_seed(0)
            batches.append([part for batch in buffer.get(17) for part in batch])
            buffer.reset()
        if not all(torch.equal(found, expected) for found, expected in zip(*batches, strict=True)):
            raise SystemExit("a rollout differs from SB3's")


def tensors(device: str, **options: Any) -> None:
    """The tensor buffer: samples, n-step returns, priorities and augmented images."""
    from sb3_extra_buffers.tensor_buffers import TensorReplayBuffer

    n_envs = 3
    specs = {
        "obs": (STACK.shape, torch.uint8),
        "actions": ((), torch.int64),
        "rewards": ((), torch.float32),
        "dones": ((), torch.float32),
    }
    buffer = TensorReplayBuffer(12 * n_envs, specs, n_envs=n_envs, device=device, seed=0, **options)
    names = ("obs", "next_obs", "actions", "rewards", "dones")
    for step in steps(STACK, n_envs, 31):
        buffer.add(dict(zip(names, on_device(step, device), strict=True)))
    batch = buffer.sample(33)
    for _ in range(3):
        buffer.sample(33, out=batch)
        if "indices" in batch:
            errors = torch.linspace(0, 5, 33, device=device)
            # repeated indices too
            buffer.update_priorities(batch["indices"], errors)
    buffer.check()


def tree(device: str) -> None:
    """Priorities of several levels, checked against sums that are computed anew."""
    from sb3_extra_buffers.kernels.sum_tree_torch import TorchSumTree

    kind: type[TorchSumTree] = TorchSumTree
    if device == "cuda":
        from sb3_extra_buffers.kernels.sum_tree_triton import TritonSumTree

        kind = TritonSumTree
    for n_leaves, batch in ((1, 1), (31, 7), (33, 40), (5000, 999)):
        counts = torch.full((2,), n_leaves, device=device)
        priorities = kind(n_leaves, counts, 0.6, 0.4, 1e-6)
        priorities.fill(0, n_leaves)
        uniform = torch.linspace(0, 0.99, batch, dtype=torch.float64, device=device)
        leaves, numbers = torch.empty((2, batch), dtype=torch.int64, device=device)
        weights = torch.empty(batch, device=device)
        for _ in range(3):
            priorities.draw(uniform, leaves, numbers, weights)
            priorities.update(numbers, weights + 0.5)
        priorities.check()


def parts(device: str) -> dict[str, list[Callable[[], None]]]:
    """What there is to run, by part."""
    pinned = "pinned" if device == "cuda" else device
    return {
        "delta": [
            lambda: replay("delta", STACK, 3, device),
            lambda: replay("delta", IMAGE, 40, device),
            lambda: replay("delta", LARGE, 2, device),
            # many streams are written by other kernels, and their steps are uploaded in pieces
            lambda: replay("delta", VIDEO, 280, device),
            lambda: replay("delta", STACK, 2, device, pinned),
        ],
        "none": [
            lambda: replay("none", STACK, 3, device),
            lambda: replay("none", IMAGE, 40, device),
            lambda: replay("none", VECTOR, 5, device),
            lambda: replay("none", IMAGE, 2, device, pinned),
        ],
        "rollout": [lambda: rollout("delta", STACK, 5, device), lambda: rollout("none", VECTOR, 37, device)],
        "others": [
            lambda: replay("camera", IMAGE, 2, device),
            lambda: replay("rle", STACK, 2, device),
            lambda: replay("palette:none", IMAGE, 2, device),
        ],
        "tree": [lambda: tree(device)],
        "tensors": [
            lambda: tensors(device, compression_method="delta"),
            lambda: tensors(device, compression_method="none", n_steps=3),
            lambda: tensors(device, compression_method="delta", alpha=0.6),
            lambda: tensors(device, compression_method="none", image_dtype=torch.float32, random_shift=4),
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--parts", help="delta, none, rollout, others, tree and tensors (default: all)")
    options = parser.parse_args()
    available = parts(options.device)
    chosen = options.parts.split(",") if options.parts else list(available)
    unknown = set(chosen) - set(available)
    if unknown:
        parser.error(f"unknown part: {', '.join(sorted(unknown))}")
    for part in chosen:
        start = time.perf_counter()
        for run in available[part]:
            run()
        if options.device == "cuda":
            torch.cuda.synchronize()
        print(f"{part}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
