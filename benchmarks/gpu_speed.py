"""Times of ``add`` and ``sample``: the parts ``sample``, ``add`` and ``others`` of the GPU benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.utils import set_random_seed

from benchmarks import feed, gpu_feed
from benchmarks.gpu_timing import capture, kernel_us, time_us, wall_us
from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer
from sb3_extra_buffers.stores.device_base import IndexBatch

if TYPE_CHECKING:
    from benchmarks.gpu import Report

SPACE = spaces.Box(0, 255, (4, 84, 84), np.uint8)
ACTIONS = spaces.Discrete(9)
GAME = "MsPacman"
N_ENVS = gpu_feed.N_GAMES
# sizes of the batches, and numbers of environments, that are measured
BATCHES = (32, 256)
NUMPY_ENVS = (4, 16, 64, 256, 1024)
TENSOR_ENVS = (4, 16, 64, 256, 1024)


def make_buffer(kind: str, n_transitions: int, device: str, space: spaces.Box = SPACE, n_envs: int = N_ENVS) -> Any:
    """SB3's buffer, or a GPU buffer with the method ``kind``; ``"delta, pinned"`` is in pinned memory."""
    if kind == "sb3":
        return ReplayBuffer(n_transitions, space, ACTIONS, device, n_envs=n_envs)
    method, _, pinned = kind.partition(", ")
    place: Any = "pinned" if pinned and device == "cuda" else device
    options: dict[str, Any] = {"compression_method": method, "buffer_device": place}
    return GpuReplayBuffer(n_transitions, space, ACTIONS, device, n_envs=n_envs, **options)


def transition(step: feed.Step, number: int) -> tuple[Any, ...]:
    """The arguments of ``add``; rewards are the numbers of the transitions."""
    n_envs = len(step.dones)
    rewards = np.arange(number * n_envs, (number + 1) * n_envs, dtype=np.float32)
    actions = (np.arange(n_envs) + number) % int(ACTIONS.n)
    return step.obs, step.next_obs, actions, rewards, step.dones, [{} for _ in range(n_envs)]


def check(buffers: Mapping[str, Any]) -> None:
    """End the run unless all buffers return the same batch as SB3's at the same seed."""
    set_random_seed(0)
    expected = buffers["sb3"].sample(512)
    for name, buffer in buffers.items():
        set_random_seed(0)
        batch = buffer.sample(512)
        if not all(torch.equal(a, b) for a, b in zip(batch[:5], expected[:5], strict=True)):
            raise SystemExit(f"{name} returns other batches than SB3; it is not timed")


def sample(report: Report, quick: bool) -> None:
    """``sample`` through SB3's class and of the tensor buffer, and the decoding kernels alone."""
    device, n_steps, repeats = report.device, 300 if quick else 6_000, 5 if quick else 300
    n_transitions = n_steps * N_ENVS
    report.setting = f"{GAME}, {n_transitions:,} transitions"
    names = ("sb3", "none", "delta", "delta, pinned", "rle", "zstd")
    buffers = {name: make_buffer(name, n_transitions, device) for name in names}
    tensor_buffers = make_tensor_buffers(n_transitions, device)
    for number, step in enumerate(gpu_feed.record(GAME, n_steps).streams(N_ENVS, n_steps)):
        columns = transition(step, number)
        for buffer in buffers.values():
            buffer.add(*columns)
        if tensor_buffers:
            row = tensor_row(columns, device)
            for buffer in tensor_buffers.values():
                buffer.add(row)
    check(buffers)
    for size in BATCHES:
        runs = {name: (lambda b=buffer, n=size: b.sample(n)) for name, buffer in buffers.items()}
        report.add(f"sample({size})", "us", wall_us(runs, device, repeats))
    decode(report, {name: buffers[name] for name in ("none", "delta", "delta, pinned")}, n_transitions, repeats)
    if tensor_buffers:
        sample_tensors(report, tensor_buffers, buffers["sb3"], repeats)
    # what SB3 holds for the same transitions, without its other columns
    dense = buffers["sb3"].observations.nbytes + buffers["sb3"].next_observations.nbytes
    held = {name: [100 * buffer.memory_usage().total / dense] for name, buffer in buffers.items() if name != "sb3"}
    report.add("memory, of SB3's observations", "%", held)


def decode(report: Report, buffers: Mapping[str, Any], n_transitions: int, repeats: int) -> None:
    """Both observations of 256 transitions, without anything that the host does."""
    device = report.device
    indices = torch.randint(0, n_transitions, (1, 256), device=device)
    indices = torch.cat([indices, indices + n_transitions])
    taken = {}
    for name, buffer in buffers.items():
        store = buffer.obs_stores[""]
        out = torch.empty((2, 256, *SPACE.shape), dtype=torch.uint8, device=device)
        batch = IndexBatch(None, indices)
        taken[name] = kernel_us(lambda s=store, b=batch, o=out: s.read(b, o), device, repeats)
    tensor = torch.zeros((2 * n_transitions, *SPACE.shape), dtype=torch.uint8, device=device)
    flat = indices.flatten()
    taken["dense tensor"] = kernel_us(lambda: tensor[flat], device, repeats)
    report.add("decode kernels, 256", "us", taken)


# ---- the tensor buffer ----


def make_tensor_buffers(n_transitions: int, device: str, n_envs: int = N_ENVS) -> dict[str, Any]:
    from sb3_extra_buffers.tensor_buffers import TensorReplayBuffer

    specs = {
        "obs": (SPACE.shape, torch.uint8),
        "actions": ((), torch.int64),
        "rewards": ((), torch.float32),
        "dones": ((), torch.bool),
    }
    return {
        method: TensorReplayBuffer(n_transitions, specs, n_envs=n_envs, device=device, compression_method=method)
        for method in ("none", "delta")
    }


def tensor_row(columns: tuple[Any, ...], device: str) -> dict[str, torch.Tensor]:
    names = ("obs", "next_obs", "actions", "rewards", "dones")
    return {name: torch.as_tensor(value, device=device) for name, value in zip(names, columns[:5], strict=True)}


def sample_tensors(report: Report, buffers: Mapping[str, Any], theirs: ReplayBuffer, repeats: int) -> None:
    """``sample(256)`` into given tensors, called and as the replay of a CUDA graph."""
    device = report.device
    calls, replays = {}, {}
    for name, buffer in buffers.items():
        out = buffer.sample(256)

        def run(buffer: Any = buffer, out: Any = out) -> None:
            buffer.sample(256, out=out)

        calls[name] = run
        replays[name] = capture(run).replay if device == "cuda" else run
        for once in (run, replays[name]):
            once()
            check_tensors(name, out, theirs)
    report.add("tensor buffer, sample(256)", "us", wall_us(calls, device, repeats))
    report.add("tensor buffer, sample(256), graph", "us", wall_us(replays, device, repeats))


def check_tensors(name: str, batch: Mapping[str, torch.Tensor], theirs: ReplayBuffer) -> None:
    """End the run unless ``batch`` has the transitions that its rewards are the numbers of."""
    steps, envs = np.divmod(batch["rewards"].cpu().numpy().astype(np.int64).ravel(), theirs.n_envs)
    pairs = (
        ("obs", theirs.observations[steps, envs]),
        ("next_obs", theirs.next_observations[steps, envs]),
        ("actions", theirs.actions[steps, envs, 0]),
    )
    for key, expected in pairs:
        if not np.array_equal(batch[key].cpu().numpy(), expected):
            raise SystemExit(f"{key} of the tensor buffer with {name} differ from SB3's; it is not timed")


# ---- add ----


def add(report: Report, quick: bool) -> None:
    """``add`` of NumPy arrays and of tensors on the device, by the number of environments."""
    repeats = 5 if quick else 300
    recording = gpu_feed.record(GAME, 200 if quick else 2000)
    for n_envs in NUMPY_ENVS[:2] if quick else NUMPY_ENVS:
        # copying the frames of a thousand environments takes long with any buffer
        add_arrays(report, recording, n_envs, repeats if n_envs < 1000 else repeats // 3)
    for n_envs in TENSOR_ENVS[:2] if quick else TENSOR_ENVS:
        add_tensors(report, n_envs, repeats)


def add_arrays(report: Report, recording: gpu_feed.Recording, n_envs: int, repeats: int) -> None:
    device = report.device
    warm_up = max(repeats // 5, 8)
    n_steps = warm_up + repeats
    report.setting = f"{GAME}, NumPy arrays"
    # half of the steps are overwritten, as in a buffer that is full
    names = ("sb3", "none", "delta")
    buffers = {name: make_buffer(name, n_steps // 2 * n_envs, device, n_envs=n_envs) for name in names}
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number, step in enumerate(recording.streams(n_envs, n_steps)):
        columns = transition(step, number)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            time = time_us(lambda b=buffers[name], c=columns: b.add(*c), device)
            if number >= warm_up:
                taken[name].append(time)
    check(buffers)
    report.add(f"add of {n_envs} environments, NumPy", "us", taken)


def add_tensors(report: Report, n_envs: int, repeats: int) -> None:
    """``add`` of 64x64x3 tensors that are on the device already; SB3 needs them on the host."""
    device, warm_up = report.device, max(repeats // 5, 8)
    n_steps = warm_up + repeats
    report.setting = "moving sprites, 64x64x3, tensors on the device"
    space = spaces.Box(0, 255, gpu_feed.Scene.SHAPE, np.uint8)
    names = ("sb3", "none", "delta")
    buffers = {name: make_buffer(name, n_steps // 2 * n_envs, device, space, n_envs) for name in names}
    taken: dict[str, list[float]] = {name: [] for name in names}
    infos: list[dict[str, Any]] = [{} for _ in range(n_envs)]
    for number, step in enumerate(gpu_feed.Scene(n_envs, device).steps(n_steps)):
        for name in names[number % len(names) :] + names[: number % len(names)]:

            def run(buffer: Any = buffers[name], step: gpu_feed.TensorStep = step, sb3: bool = name == "sb3") -> None:
                columns = [column.cpu().numpy() for column in step] if sb3 else step
                buffer.add(*columns, infos)

            time = time_us(run, device)
            if number >= warm_up:
                taken[name].append(time)
    check(buffers)
    report.add(f"add of {n_envs} environments, tensors", "us", taken)


# ---- observations that are not Atari's ----

OTHERS: dict[str, tuple[spaces.Box, tuple[str, ...]]] = {
    "vector": (spaces.Box(-np.inf, np.inf, (17,), np.float32), ("none",)),
    "camera": (spaces.Box(0, 255, (64, 64, 3), np.uint8), ("none", "camera", "auto")),
    "float camera": (spaces.Box(0, 1, (64, 64, 3), np.float32), ("none", "camera", "table:none", "auto")),
}


def synthetic(space: spaces.Box, n_steps: int) -> Iterator[feed.Step]:
    """Steps of four streams, in episodes of 200: numbers that drift, or a picture that moves under a little noise."""
    random = np.random.default_rng(0)
    shape = (N_ENVS, *space.shape)
    drifts = len(space.shape) == 1

    def first() -> Any:
        if drifts:
            return random.standard_normal(shape)
        return random.integers(-3, 4, shape).cumsum(axis=1).cumsum(axis=2) % 256

    def shown(state: Any) -> Any:
        if drifts:
            return state.astype(np.float32)
        pixels = (state + random.integers(0, 3, shape)).astype(np.uint8)
        return pixels if space.dtype == np.uint8 else pixels.astype(np.float32) / np.float32(255)

    state = first()
    obs = shown(state)
    for step in range(n_steps):
        is_end = step % 200 == 199
        state = state + 0.01 * random.standard_normal(shape) if drifts else np.roll(state, 1, axis=2)
        next_obs = shown(state)
        yield feed.Step(obs, next_obs, np.full(N_ENVS, is_end))
        if is_end:
            state = first()
        obs = shown(state) if is_end else next_obs


def others(report: Report, quick: bool) -> None:
    """``add``, ``sample`` and the memory for vectors and camera images."""
    device, n_steps, repeats = report.device, 250 if quick else 5000, 5 if quick else 300
    n_transitions = n_steps * N_ENVS
    for kind, (space, methods) in OTHERS.items():
        report.setting = f"{kind}, {n_transitions:,} transitions"
        names = ("sb3", *methods)
        buffers = {name: make_buffer(name, n_transitions, device, space) for name in names}
        taken: dict[str, list[float]] = {name: [] for name in names}
        for number, step in enumerate(synthetic(space, n_steps)):
            columns = transition(step, number)
            for name, buffer in buffers.items():
                taken[name].append(time_us(lambda b=buffer, c=columns: b.add(*c), device))
        check(buffers)
        report.add(f"{kind}, add of 4 environments", "us", {name: times[-repeats:] for name, times in taken.items()})
        for size in BATCHES:
            runs = {name: (lambda b=buffer, n=size: b.sample(n)) for name, buffer in buffers.items()}
            report.add(f"{kind}, sample({size})", "us", wall_us(runs, device, repeats))
        dense = 2 * n_transitions * int(np.prod(space.shape)) * space.dtype.itemsize
        held = {name: [100 * buffers[name].memory_usage().observations / dense] for name in methods}
        report.add(f"{kind}, memory", "%", held)
