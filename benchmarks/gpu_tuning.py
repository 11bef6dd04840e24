"""Where the time of GPU buffers goes: ``delta`` with other constants, uploads, and the parts of an iteration of PPO.

Prints times, and writes nothing. Constants are those that `kernels.delta_triton` calls tuned; the first line of each
table has the current ones. In ``read`` and ``write``, batches that differ from SB3's end the run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import PPO

from benchmarks import gpu_feed, gpu_speed
from benchmarks.gpu import quantiles
from benchmarks.gpu_timing import kernel_us, time_us, wait
from benchmarks.gpu_training import Stopwatch
from sb3_extra_buffers.gpu_buffers import GpuRolloutBuffer
from sb3_extra_buffers.kernels import delta_triton, launcher
from sb3_extra_buffers.stores import staging
from sb3_extra_buffers.stores.device_base import IndexBatch
from sb3_extra_buffers.training_utils.atari import make_env

# parts, warps and registers of the reading kernel
READERS = [(2, 2, 80), (2, 2, 96), (2, 2, 112), (2, 4, 64), (2, 4, 72), (2, 4, 88), (1, 2, 88), (1, 4, 72)]
# warps, chunks that are encoded together, and registers of the writing kernel
WRITERS = [(8, 8, 128), (8, 4, 255), (8, 2, 255), (4, 8, 255), (4, 4, 255), (4, 2, 255), (16, 8, 128), (16, 4, 128)]
WRITER_ENVS = (4, 64)
# programs, warps, chunks that are encoded together, and registers of the kernel that writes many streams
MANY_WRITERS = [(528, 4, 2, 128), (264, 8, 8, 128), (1056, 2, 2, 128), (396, 4, 4, 168)]
MANY_ENVS = (512, 1024)
# bytes of steps of 64, 256, 512 and 1,024 Atari environments, and the smallest piece, as a power of two
UPLOADS = [n_envs * 4 * 84 * 84 for n_envs in (64, 256, 512, 1024)]
PIECE_BITS = (19, 20, 21, 22)


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


def many(device: str, quick: bool) -> None:
    """Add tensors of many environments: time on the device alone, the constants taking turns."""
    n_steps = 8 if quick else 200
    tuned = delta_triton._MANY
    for n_envs in (300,) if quick else MANY_ENVS:
        space = spaces.Box(0, 255, gpu_feed.Scene.SHAPE, np.uint8)
        efforts = [tuned, *(delta_triton._Effort(*constants) for constants in MANY_WRITERS)]
        buffers = []
        for delta_triton._MANY in efforts:
            # its kernels are bound now
            buffers.append(gpu_speed.make_buffer("delta", n_steps // 2 * n_envs, device, space, n_envs))
        taken: list[list[float]] = [[] for _ in efforts]
        for step in gpu_feed.Scene(n_envs, device).steps(n_steps):
            for delta_triton._MANY, buffer, times in zip(efforts, buffers, taken, strict=True):
                times.append(device_us(lambda b=buffer, s=step: b.add(*s, []), device))
        delta_triton._MANY = tuned
        for effort, times in zip(efforts, taken, strict=True):
            show(f"add {n_envs} tensors: programs, warps, ...", effort, times[n_steps // 4 :])


def device_us(run: Callable[[], Any], device: str) -> float:
    """Microseconds that one call keeps the device busy; without a GPU, of the call."""
    if device != "cuda":
        return time_us(run, device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    wait(device)
    torch.cuda._sleep(500_000)  # type: ignore[no-untyped-call]  # until the host has launched everything
    begin.record()
    run()
    end.record()
    wait(device)
    return 1e3 * begin.elapsed_time(end)


def upload(device: str, quick: bool) -> None:
    """Upload a step of NumPy arrays that is not in the caches, in pieces of other sizes and in one copy."""
    repeats, tuned = 3 if quick else 100, staging._PIECE_BITS
    for n_bytes in UPLOADS[:1] if quick else UPLOADS:
        arrays = np.random.default_rng(0).integers(0, 256, (max(2**28 // n_bytes, 2), n_bytes), np.uint8)
        uploads = {bits: staging.Staging(torch.device(device), 2) for bits in PIECE_BITS}
        taken: dict[Any, list[float]] = {bits: [] for bits in (*PIECE_BITS, "one copy")}
        for number in range(repeats):
            array = arrays[number % len(arrays)]
            for bits, each in uploads.items():
                staging._PIECE_BITS = (bits, bits)
                taken[bits].append(time_us(lambda s=each, a=array: s.upload_in_pieces(a), device))
                # what was uploaded is in the caches now
                arrays[(number + 1) % len(arrays)].sum()
            taken["one copy"].append(time_us(lambda a=array: torch.from_numpy(a).to(device), device))
        staging._PIECE_BITS = tuned
        for bits, times in taken.items():
            show(f"upload {n_bytes:,} bytes: bits of a piece", (bits,), times[repeats // 5 :])


def show(what: str, constants: tuple[Any, ...], taken: list[float]) -> None:
    low, median, high = quantiles(taken)
    print(f"{what:42} {constants!s:20} {median:8.2f} us  ({low:.2f} to {high:.2f})", flush=True)


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
    measures = {"read": read, "write": write, "many": many, "upload": upload, "ppo": ppo}
    parser.add_argument("what", nargs="*", help=f"of {', '.join(measures)} (default: all)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="a CPU can only run upload and ppo")
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
