"""Shared by the examples that compare compression methods: fill one buffer per method, print a table, draw a plot."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common import load_model, make_game
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_extra_buffers.codecs import is_available
from sb3_extra_buffers.codecs.registry import parse_method
from sb3_extra_buffers.compressed import CompressedReplayBuffer, init_jit, warmup
from sb3_extra_buffers.stores.usage import format_bytes
from sb3_extra_buffers.training_utils.buffer_warmup import warm_up

METHODS = ["none", "zstd-100", "zstd-50", "lz4-frame/1", "gzip0", "zstd-5", "zstd-20", "zstd-3", "zstd-1", "zstd1"]
METHODS += ["zstd3", "igzip0", "rle", "lz4-block/1", "igzip1", "zstd5", "lz4-block/5", "lz4-frame/5", "gzip1", "gzip3"]
METHODS += ["igzip3", "zstd10", "lz4-block/9", "lz4-frame/9", "lz4-block/12", "lz4-frame/12", "zstd15", "zstd22"]
METHODS += ["rle-jit", "delta", "delta2", "delta3", "auto"]


def fill_buffers(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, float]]:
    """Let the DQN play; return SB3's buffer and one for each installed method, and the seconds each took to fill."""
    warmup()  # so that no buffer's latency includes compiling
    env = make_game(options)
    model = load_model(options, "DQN")
    size = options.timesteps if options.quick else options.buffer_size
    common = (size, env.observation_space, env.action_space, "cpu", env.num_envs)
    settings = {"optimize_memory_usage": True, "handle_timeout_termination": False}
    buffers: dict[str, Any] = {"baseline": ReplayBuffer(*common, **settings)}
    for method in METHODS if options.compression == "auto" else options.compression.split(","):
        name = parse_method(method)[0]
        if name == "auto" or is_available(name):
            init_jit(method)
            buffers[method] = CompressedReplayBuffer(*common, compression_method=method, **settings)
    print(f"{options.timesteps:,} transitions of {options.env_id}, {env.num_envs} environments, buffer size {size:,}")
    print("baseline: SB3's ReplayBuffer(optimize_memory_usage=True)\n")
    seconds = warm_up(model, env, buffers, options.timesteps, progress_bar=not options.quick)
    env.close()
    return buffers, seconds


def report(buffers: dict[str, Any], latency: dict[str, float], unit: str, path: Path) -> None:
    """Print memory and latency of the methods, fastest first, and plot them."""
    dense = buffers["baseline"].observations.nbytes
    sizes = {name: buffer.memory_usage().observations for name, buffer in buffers.items() if name != "baseline"}
    sizes = {"baseline": dense} | sizes
    print(f"{'Compression':<12} {'Memory':>8} {'Memory %':>9} {'Latency':>10}")
    for name in sorted(sizes, key=latency.__getitem__):
        print(f"{name:<12} {format_bytes(sizes[name]):>8} {sizes[name] / dense:>9.1%} {latency[name]:>7.2f} {unit}")
    plot({name: 100 * size / dense for name, size in sizes.items()}, latency, unit, path)


def plot(percent: dict[str, float], latency: dict[str, float], unit: str, path: Path) -> None:
    """Draw memory and latency of each method as bars, both on logarithmic axes."""
    import matplotlib.pyplot as plt

    names = sorted(percent, key=latency.__getitem__, reverse=True)
    colors = ["C1" if name == "baseline" else "C0" for name in names]
    panels = {"memory, % of the baseline": percent, f"latency, {unit}": latency}
    figure, axes = plt.subplots(1, 2, figsize=(9, 1 + 0.2 * len(names)), sharey=True, layout="constrained")
    for panel, (label, values) in zip(axes, panels.items(), strict=True):
        bars = panel.barh(names, [values[name] for name in names], color=colors)
        panel.bar_label(bars, fmt="%.3g", fontsize=7, padding=2)
        panel.set(xscale="log", xlabel=label)
        panel.margins(x=0.1, y=0.01)
        panel.xaxis.set_major_formatter("{x:g}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"saved {path}")
