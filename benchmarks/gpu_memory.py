"""Memory of rollouts on the device and in pinned host memory: the part ``memory`` of the GPU benchmarks."""

from __future__ import annotations

import gc
import multiprocessing
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces

from benchmarks import gpu_feed
from benchmarks.gpu_timing import wait

if TYPE_CHECKING:
    from benchmarks.gpu import Report

SPACE = spaces.Box(0, 255, (4, 84, 84), np.uint8)
ACTIONS = spaces.Discrete(6)
GAME = "Pong"
METHODS = ("none", "delta")
# environments and steps of a rollout
SHAPES = ((512, 32), (128, 64))


def rollouts(report: Report, quick: bool) -> None:
    """What a complete rollout holds, relative to SB3's `RolloutBuffer`."""
    report.setting = GAME
    shapes = ((8, 8),) if quick else SHAPES
    cases = [(method, *shape, report.device) for shape in shapes for method in METHODS]
    # each in a fresh process: pools of memory are shared by the buffers of a process
    with multiprocessing.get_context("spawn").Pool(len(cases), maxtasksperchild=1) as pool:
        shares = pool.starmap(share, cases, chunksize=1)
    for i, (n_envs, n_steps) in enumerate(shapes):
        found = shares[i * len(METHODS) : (i + 1) * len(METHODS)]
        values = {method: [100 * value] for method, value in zip(METHODS, found, strict=True)}
        report.add(f"memory of a rollout, {n_envs} x {n_steps}", "%", values)


def share(method: str, n_envs: int, n_steps: int, device: str) -> float:
    """Bytes of a `GpuRolloutBuffer` as a fraction of SB3's columns and observations for the same rollout."""
    from stable_baselines3.common.buffers import RolloutBuffer

    from sb3_extra_buffers.gpu_buffers import GpuRolloutBuffer

    recording = gpu_feed.record(GAME, n_steps + 4 * n_envs)
    before = device_and_pinned(device)
    ours = GpuRolloutBuffer(
        n_steps, SPACE, ACTIONS, device, n_envs=n_envs, compression_method=method, buffer_device=device
    )
    theirs = RolloutBuffer(n_steps, SPACE, ACTIONS, device, n_envs=n_envs)
    for buffer in (ours, theirs):
        for step in recording.streams(n_envs, n_steps):
            zeros, values = np.zeros(n_envs, np.float32), torch.zeros(n_envs, device=device)
            actions = np.zeros((n_envs, 1), np.int64)
            buffer.add(step.obs, actions, zeros, step.dones.astype(np.float32), values, values)
        del values
    gc.collect()
    wait(device)
    usage = ours.memory_usage()
    on_device, pinned = (now - then for now, then in zip(device_and_pinned(device), before, strict=True))
    names = ("observations", "actions", "rewards", "episode_starts", "values", "log_probs", "advantages", "returns")
    dense = sum(getattr(theirs, name).nbytes for name in names)
    batch, expected = (next(first_batches(buffer)) for buffer in (ours, theirs))
    if not torch.equal(batch.observations, expected.observations):
        raise SystemExit(f"{method} returns other batches than SB3; its memory is not reported")
    grown = f"grown by {on_device:,} bytes on the device and {pinned:,} in pinned memory"
    print(f"{method}, {n_envs} x {n_steps}: {grown}, reported {usage.total:,}, dense {dense:,}", flush=True)
    # memory_usage() also counts what was taken from pools, and pageable memory
    return max(on_device + pinned, usage.total) / dense


def device_and_pinned(device: str) -> tuple[int, int]:
    """Bytes that torch has allocated on the device and in pinned memory."""
    if device != "cuda":
        return 0, 0
    torch.cuda.synchronize()
    # empty before the first allocation
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    return int(torch.cuda.memory_allocated()), int(pinned)


def first_batches(buffer: Any) -> Any:
    np.random.seed(0)  # noqa: NPY002  # SB3's
    return buffer.get(256)
