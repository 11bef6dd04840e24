"""Parts of `example_cleanrl_graph.py`: capturing a CUDA graph, and a dense buffer to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def capture(update: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Return a function that replays ``update`` as a CUDA graph; on the CPU, ``update`` itself."""
    if device.type != "cuda":
        return update
    # a few calls on another stream first, as torch's documentation asks for
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            update()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update()
    return graph.replay


class DenseBuffer:
    """NumPy arrays in main memory, sampled with NumPy; batches are copied to ``device``, images as scaled floats."""

    def __init__(self, capacity: int, specs: dict[str, Any], n_envs: int, device: torch.device) -> None:
        self.n_steps, self.n_envs, self.device, self.n_added = capacity // n_envs, n_envs, device, 0
        self.rng = np.random.default_rng(0)
        specs = {**specs, "next_obs": specs["obs"]}
        self.columns = {name: np.zeros((self.n_steps, n_envs, *shape), dtype) for name, (shape, dtype) in specs.items()}

    def add(self, step: dict[str, Any]) -> None:
        for name, column in self.columns.items():
            column[self.n_added % self.n_steps] = step[name]
        self.n_added += 1

    def sample(self, batch_size: int) -> dict[str, torch.Tensor]:
        steps = self.rng.integers(min(self.n_added, self.n_steps), size=batch_size)
        envs = self.rng.integers(self.n_envs, size=batch_size)
        batch = {name: torch.from_numpy(column[steps, envs]) for name, column in self.columns.items()}
        batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
        return {name: tensor / 255 if tensor.ndim > 1 else tensor for name, tensor in batch.items()}

    def memory_usage(self) -> str:
        return f"{sum(column.nbytes for column in self.columns.values()) / 1e6:,.1f} MB in dense arrays"
