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
    theirs = make_theirs(capacity, batch, device)
    report.setting = f"{capacity:,} priorities"
    runs = {"buffer": make_buffer(capacity, batch, device), "tree": make_tree(capacity, batch, device)}
    if device == "cuda":
        runs |= {f"{name}, graph": capture(run).replay for name, run in runs.items()}
    if theirs is not None:
        report.setting += f"; TorchRL's tree on {theirs[1]}"
        runs["torchrl"] = theirs[0]
    report.add(f"prioritised sample and update of {batch:,}", "us", wall_us(runs, device, repeats))


def make_buffer(capacity: int, batch: int, device: str) -> Run:
    """A `TensorReplayBuffer`, which also gathers the other fields of the transitions: as small as they can be."""
    from sb3_extra_buffers.tensor_buffers import TensorReplayBuffer

    n_envs = 1000
    options: dict[str, Any] = {"alpha": ALPHA, "beta": BETA, "epsilon": EPSILON, "compression_method": "none"}
    specs = {"obs": ((4,), torch.uint8), "rewards": ((), torch.float32)}
    buffer = TensorReplayBuffer(capacity, specs, n_envs=n_envs, device=device, **options)
    obs, rewards = torch.zeros((n_envs, 4), dtype=torch.uint8, device=device), torch.zeros(n_envs, device=device)
    for _ in range(capacity // n_envs):
        buffer.add({"obs": obs, "next_obs": obs, "rewards": rewards})
    buffer.update_priorities(torch.arange(capacity, device=device), errors_of(capacity, device))
    out = buffer.sample(batch)
    check(out["indices"], capacity, "the buffer")
    errors = errors_of(batch, device)

    def run() -> None:
        buffer.sample(batch, out=out)
        buffer.update_priorities(out["indices"], errors)

    return run


def make_tree(capacity: int, batch: int, device: str) -> Run:
    """The tree of that buffer alone, as TorchRL's sampler is."""
    from sb3_extra_buffers.kernels.sum_tree_torch import TorchSumTree

    kind: type[TorchSumTree] = TorchSumTree
    if device == "cuda":
        from sb3_extra_buffers.kernels.sum_tree_triton import TritonSumTree

        kind = TritonSumTree
    counts = torch.full((2,), capacity, device=device)
    tree = kind(capacity, counts, ALPHA, BETA, EPSILON)
    tree.fill(0, capacity)
    tree.update(torch.arange(capacity, device=device), errors_of(capacity, device))
    uniform = torch.empty(batch, dtype=torch.float64, device=device)
    leaves, numbers = torch.empty((2, batch), dtype=torch.int64, device=device)
    weights, errors = torch.empty(batch, device=device), errors_of(batch, device)

    def run() -> None:
        uniform.uniform_()
        tree.draw(uniform, leaves, numbers, weights)
        tree.update(numbers, errors)

    tree.draw(uniform.uniform_(), leaves, numbers, weights)
    check(numbers, capacity, "the tree")
    return run


def make_theirs(capacity: int, batch: int, device: str) -> tuple[Run, str] | None:
    """TorchRL's sampler on the device if its tree can be had there, else in main memory; and where it is."""
    from torchrl.data.replay_buffers import samplers

    trees = find_trees(device)
    if "" not in trees:
        return None
    place = "cuda" if "Cuda" in trees else "cpu"
    sampler: Any = samplers.PrioritizedSampler(capacity, ALPHA, BETA, EPSILON, device=place)
    storage: Any = Length(capacity, place)
    every = torch.arange(capacity, device=place)
    sampler.extend(every)
    sampler.update_priority(every, errors_of(capacity, place), storage=storage)
    errors = errors_of(batch, device)
    check(sampler.sample(storage, batch)[0], capacity, "TorchRL")

    def run() -> None:
        index, info = sampler.sample(storage, batch)
        # where training is on the device, it needs the indices and weights there
        torch.as_tensor(index).to(device)
        torch.as_tensor(info["priority_weight"]).to(device)
        sampler.update_priority(index, errors.to(place), storage=storage)

    return run, "the GPU" if place == "cuda" else "the CPU"


def errors_of(n: int, device: str) -> torch.Tensor:
    return (torch.rand(n, generator=torch.Generator().manual_seed(0)) + 0.1).to(device)


def check(indices: Any, capacity: int, whose: str) -> None:
    """End the run unless transitions are drawn about in proportion to their priorities to the power of alpha."""
    index = torch.as_tensor(indices).flatten().cpu()
    weights = (errors_of(capacity, "cpu") + EPSILON) ** ALPHA
    expected = float((weights**2).sum() / weights.sum())  # mean weight of a drawn transition
    if index.min() < 0 or index.max() >= capacity:
        raise SystemExit(f"indices of {whose} are out of range; nothing is timed")
    if abs(float(weights[index].mean()) - expected) > 0.05 * expected:
        raise SystemExit(f"{whose} does not draw transitions in proportion to their priorities; nothing is timed")


_TREES = [f"{kind}SegmentTree{dtype}" for kind in ("Sum", "Min") for dtype in ("Fp32", "Fp64")]
_HEADERS = {"": "segment_tree.h", "Cuda": "cuda_segment_tree.h"}


def find_trees(device: str) -> set[str]:
    """Where TorchRL has its trees: in main memory (``""``), on the GPU (``"Cuda"``), or both.

    Wheels that were built for another version of PyTorch have none; those in main memory are then built here, from the
    sources in the package. Most wheels have none for the GPU.
    """
    from torchrl.data.replay_buffers.samplers import prioritized as module

    wanted = {"", "Cuda"} if device == "cuda" else {""}
    missing = {kind for kind in wanted if any(getattr(module, kind + name, None) is None for name in _TREES)}
    wanted -= missing - {""}
    missing &= {""}
    if not missing:
        return wanted
    try:
        built = build_trees(missing)
    except Exception as error:  # no compiler, or another layout of the package
        print(f"TorchRL's trees cannot be built: {error}", flush=True)
        return wanted - missing
    for kind in missing:
        for name in _TREES:
            setattr(module, kind + name, getattr(built, kind + name))
    return wanted


def build_trees(kinds: set[str]) -> Any:
    import torchrl
    from torch.utils.cpp_extension import CUDA_HOME, load

    sources, folder = Path(torchrl.__file__).parent / "csrc", Path(tempfile.mkdtemp())
    lines = ["#include <torch/extension.h>", *(f'#include "{_HEADERS[kind]}"' for kind in kinds)]
    lines.append("PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {")
    for kind in kinds:
        for operation in ("Sum", "Min"):
            for dtype, name in (("float", "Fp32"), ("double", "Fp64")):
                lines.append(f'  torchrl::Define{kind}{operation}SegmentTree<{dtype}>("{name}", m);')
    (folder / "trees.cpp").write_text("\n".join([*lines, "}", ""]))
    files, includes = [folder / "trees.cpp"], [sources]
    if "Cuda" in kinds:
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "{}.{}".format(*torch.cuda.get_device_capability()))
        files.append(sources / "cuda_segment_tree.cu")
        if not (Path(CUDA_HOME or "") / "include" / "cusparse.h").exists():
            # PyTorch's headers include those of CUDA's libraries, which are packages of their own
            includes += [path.parent for path in Path(torch.__file__).parents[1].glob("nvidia/*/include/cusparse.h")]
    return load(
        "torchrl_trees",
        [str(file) for file in files],
        extra_cflags=["-O2"],
        extra_include_paths=[str(path) for path in includes],
        build_directory=str(folder),
        with_cuda="Cuda" in kinds,
    )
