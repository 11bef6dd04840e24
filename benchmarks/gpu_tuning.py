"""Where the time of GPU buffers goes: kernels of ``delta`` with other constants, and the parts of an iteration of PPO.

Prints times, and writes nothing. Constants are those that `kernels.delta_triton` calls tuned; the first line of each
table has the current ones. Batches that differ from SB3's end the run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from stable_baselines3 import PPO

from benchmarks import gpu_feed, gpu_speed
from benchmarks.gpu import quantiles
from benchmarks.gpu_timing import kernel_us, time_us, wait
from benchmarks.gpu_training import Stopwatch
from sb3_extra_buffers.gpu_buffers import GpuRolloutBuffer
from sb3_extra_buffers.kernels import delta_triton, launcher
from sb3_extra_buffers.stores.device_base import IndexBatch
from sb3_extra_buffers.training_utils.atari import make_env

# parts, warps and registers of the reading kernel
READERS = [(2, 2, 80), (2, 2, 96), (2, 2, 112), (2, 4, 64), (2, 4, 72), (2, 4, 88), (1, 2, 88), (1, 4, 72)]
# warps, chunks that are encoded together, and registers of the writing kernel
WRITERS = [(8, 8, 128), (8, 4, 255), (8, 2, 255), (4, 8, 255), (4, 4, 255), (4, 2, 255), (16, 8, 128), (16, 4, 128)]
WRITER_ENVS = (4, 64)


def read(device: str, quick: bool) -> None:
    """Decode observations and next observations of 256 transitions."""
    n_steps, repeats = (300, 5) if quick else (6_000, 300)
    buffers = {name: gpu_speed.make_buffer(name, n_steps * gpu_speed.N_ENVS, device) for name in ("sb3", "delta")}
    recording = gpu_feed.record(gpu_speed.GAME, n_steps)
    for number, step in enumerate(recording.streams(gpu_speed.N_ENVS, n_steps)):
        for buffer in buffers.values():
            buffer.add(*gpu_speed.transition(step, number))
    store = buffers["delta"].obs_stores[""]
    indices = torch.randint(0, n_steps * gpu_speed.N_ENVS, (1, 256), device=device)
    batch = IndexBatch(None, torch.cat([indices, indices + n_steps * gpu_speed.N_ENVS]))
    out = torch.empty((2, 256, *gpu_speed.SPACE.shape), dtype=torch.uint8, device=device)
    tuned = delta_triton._PARTS, delta_triton._READ_WARPS, delta_triton._READ_REGISTERS
    for constants in (tuned, *READERS):
        delta_triton._PARTS, delta_triton._READ_WARPS, delta_triton._READ_REGISTERS = constants
        store.inner._bound_reader = None
        launcher._compiled.clear()
        gpu_speed.check(buffers)
        show("read 256: parts, warps, registers", constants, kernel_us(lambda: store.read(batch, out), device, repeats))


def write(device: str, quick: bool) -> None:
    """Add a step of NumPy arrays."""
    repeats = 5 if quick else 200
    recording = gpu_feed.record(gpu_speed.GAME, 300)
    tuned = delta_triton._FEW
    for n_envs in WRITER_ENVS:
        for constants in (tuned[1:], *WRITERS):
            delta_triton._FEW = delta_triton._Effort(tuned.n_programs, *constants)
            names = ("sb3", "delta")
            buffers = {name: gpu_speed.make_buffer(name, 100 * n_envs, device, n_envs=n_envs) for name in names}
            taken = []
            for number, step in enumerate(recording.streams(n_envs, repeats + 50)):
                columns = gpu_speed.transition(step, number)
                buffers["sb3"].add(*columns)
                taken.append(time_us(lambda b=buffers["delta"], c=columns: b.add(*c), device))
            gpu_speed.check(buffers)
            show(f"add {n_envs}: warps, chunks, registers", constants, taken[50:])


def show(what: str, constants: tuple[int, ...], taken: list[float]) -> None:
    low, median, high = quantiles(taken)
    print(f"{what:36} {constants!s:18} {median:8.2f} us  ({low:.2f} to {high:.2f})", flush=True)


# environments, steps, size of batches, and iterations to time
PPO_SIZES = [(512, 32, 2048, 2), (32, 128, 256, 3), (8, 128, 256, 8)]


def ppo(device: str, quick: bool) -> None:
    for sizes in [(8, 8, 32, 1)] if quick else PPO_SIZES:
        ppo_parts(device, *sizes)


def ppo_parts(device: str, n_envs: int, n_steps: int, batch_size: int, n_iterations: int) -> None:
    """Seconds of one iteration of PPO, by what they are spent on, waiting for the device in between."""
    env = make_env("PongNoFrameskip-v4", n_envs=n_envs, framestack=4, native=True, seed=1)
    options = {"compression_method": "delta", "buffer_device": device}
    for name in ("sb3", "delta"):
        kwargs: dict[str, Any] = {"n_steps": n_steps, "batch_size": batch_size, "n_epochs": 4, "seed": 1}
        if name != "sb3":
            kwargs |= {"rollout_buffer_class": GpuRolloutBuffer, "rollout_buffer_kwargs": options}
        model = PPO("CnnPolicy", env, device=device, **kwargs)
        model.learn(n_envs * n_steps)  # compiles
        taken = dict.fromkeys(("env.step", "policy", "buffer.add", "buffer.get", "train"), 0.0)
        for owner, method, part in (
            (env, "step", "env.step"),
            (model.policy, "forward", "policy"),
            (model.rollout_buffer, "add", "buffer.add"),
            (model, "train", "train"),
        ):
            setattr(owner, method, timed(getattr(owner, method), taken, part, device))
        buffer: Any = model.rollout_buffer
        buffer.get = timed_batches(buffer.get, taken, device)
        stopwatch = Stopwatch(device)
        model.learn(n_iterations * n_envs * n_steps, callback=stopwatch, reset_num_timesteps=False)
        total = stopwatch.stop() / n_iterations
        parts = {part: seconds / n_iterations for part, seconds in taken.items()}
        parts["train"] -= parts["buffer.get"]
        parts["other"] = total - sum(parts.values())
        del env.step
        print(
            f"PPO, {n_envs} x {n_steps}, {name}: {total:.3f} s;",
            ", ".join(f"{part} {seconds:.3f}" for part, seconds in parts.items()),
            flush=True,
        )
    env.close()


def timed(call: Callable[..., Any], taken: dict[str, float], part: str, device: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        wait(device)
        start = time.perf_counter()
        result = call(*args, **kwargs)
        wait(device)
        taken[part] += time.perf_counter() - start
        return result

    return run


def timed_batches(get: Callable[..., Any], taken: dict[str, float], device: str) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        batches = get(*args)
        following = timed(lambda: next(batches, None), taken, "buffer.get", device)
        return iter(following, None)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measures = {"read": read, "write": write, "ppo": ppo}
    parser.add_argument("what", nargs="*", help=f"of {', '.join(measures)} (default: all)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="without a GPU, only ppo can run")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few repeats")
    options = parser.parse_args()
    for what in options.what or measures:
        if what not in measures:
            parser.error(f"unknown: {what}")
        begin = time.perf_counter()
        measures[what](options.device, options.quick)
        print(f"{what}: {time.perf_counter() - begin:.0f} s\n", flush=True)


if __name__ == "__main__":
    main()
