"""Prioritised sampling on the device, compared with TorchRL's: the part ``tree`` of the GPU benchmarks."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu_timing import Run, capture, wall_us

if TYPE_CHECKING:
    from benchmarks.gpu import Report

ALPHA, BETA, EPSILON = 0.6, 0.4, 1e-6


class Length:
    """A storage of which TorchRL's sampler only needs the length and the device."""

    def __init__(self, length: int, device: str) -> None:
        self._length, self.device = length, torch.device(device)
        self.ndim, self.shape = 1, torch.Size([length])

    def __len__(self) -> int:
        return self._length


def prioritized(report: Report, quick: bool) -> None:
    """Draw a batch from a full buffer, with weights, and update its priorities."""
    device, repeats = report.device, 5 if quick else 300
    capacity, batch = (10_000, 512) if quick else (1_000_000, 65_536)
    report.setting = f"{capacity:,} priorities"
    runs = {"ours": make_ours(capacity, batch, device)}
    theirs, where = make_theirs(capacity, batch, device)
    runs["torchrl"] = theirs
    print(f"TorchRL's tree is on {where}", flush=True)
    if device == "cuda":
        runs["ours, graph"] = capture(runs["ours"]).replay
    # TorchRL's tree in main memory takes about 20 ms
    report.add(f"prioritised sample and update of {batch:,} ({where})", "us", wall_us(runs, device, repeats))


def make_ours(capacity: int, batch: int, device: str) -> Run:
    """Samples one number per transition as well, because a buffer has to have a column."""
    from sb3_extra_buffers.tensor_buffers import TensorReplayBuffer

    n_envs = capacity // 10
    specs = {"rewards": ((), torch.float32)}
    options: dict[str, Any] = {"alpha": ALPHA, "beta": BETA, "epsilon": EPSILON}
    buffer = TensorReplayBuffer(capacity, specs, n_envs=n_envs, device=device, **options)
    for step in range(capacity // n_envs):
        buffer.add({"rewards": torch.arange(step * n_envs, (step + 1) * n_envs, device=device, dtype=torch.float32)})
    every = torch.arange(capacity, device=device)
    buffer.update_priorities(every, priorities_of(capacity, device))
    out = buffer.sample(batch)
    check(out["indices"], capacity)
    errors = priorities_of(batch, device)

    def run() -> None:
        buffer.sample(batch, out=out)
        buffer.update_priorities(out["indices"], errors)

    return run


def make_theirs(capacity: int, batch: int, device: str) -> tuple[Run, str]:
    """TorchRL's sampler on the device if its tree can be had there, else in main memory; and where it is."""
    from torchrl.data.replay_buffers import samplers

    place = device if device == "cpu" or has_cuda_tree() else "cpu"
    sampler: Any = samplers.PrioritizedSampler(capacity, ALPHA, BETA, EPSILON, device=place)
    storage: Any = Length(capacity, place)
    every = torch.arange(capacity, device=place)
    sampler.extend(every)
    sampler.update_priority(every, priorities_of(capacity, place), storage=storage)
    errors = priorities_of(batch, device)
    check(sampler.sample(storage, batch)[0], capacity)

    def run() -> None:
        index, info = sampler.sample(storage, batch)
        # where training is on the device, it needs the indices and weights there
        torch.as_tensor(index).to(device)
        torch.as_tensor(info["priority_weight"]).to(device)
        sampler.update_priority(index, errors.to(place), storage=storage)

    return run, "its CUDA tree" if place == "cuda" else "its CPU tree"


def priorities_of(n: int, device: str) -> torch.Tensor:
    return (torch.rand(n, generator=torch.Generator().manual_seed(0)) + 0.1).to(device)


def check(indices: Any, capacity: int) -> None:
    """End the run unless transitions are drawn about in proportion to their priorities to the power of alpha."""
    index = torch.as_tensor(indices).flatten().cpu()
    weights = (priorities_of(capacity, "cpu") + EPSILON) ** ALPHA
    expected = float((weights**2).sum() / weights.sum())  # mean weight of a drawn transition
    if index.min() < 0 or index.max() >= capacity:
        raise SystemExit("indices are out of range; nothing is timed")
    if abs(float(weights[index].mean()) - expected) > 0.05 * expected:
        raise SystemExit("transitions are not drawn in proportion to their priorities; nothing is timed")


def has_cuda_tree() -> bool:
    """Whether TorchRL has its tree on the GPU: built in, or built here from the sources in its package."""
    import torchrl
    from torchrl.data.replay_buffers.samplers import prioritized as module

    if getattr(module, "CudaSumSegmentTreeFp32", None) is not None:
        return True
    sources = Path(torchrl.__file__).parent / "csrc"
    if not (sources / "cuda_segment_tree.cu").exists():
        return False
    try:
        from torch.utils.cpp_extension import load

        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "{}.{}".format(*torch.cuda.get_device_capability()))
        built: Any = load(
            "_torchrl",  # the name that its sources have
            [str(sources / name) for name in ("pybind.cpp", "utils.cpp", "cuda_segment_tree.cu")],
            extra_cflags=["-DWITH_CUDA", "-O2"],
            extra_cuda_cflags=["-DWITH_CUDA", "-O3"],
            extra_include_paths=[str(sources)],
            build_directory=tempfile.mkdtemp(),
            with_cuda=True,
        )
    except Exception as error:
        print(f"TorchRL's CUDA tree cannot be built: {error}", flush=True)
        return False
    for kind in ("Sum", "Min"):
        for dtype in ("Fp32", "Fp64"):
            name = f"Cuda{kind}SegmentTree{dtype}"
            setattr(module, name, getattr(built, name))
    return True
