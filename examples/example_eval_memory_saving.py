"""Compare the memory and the time to add transitions of compression methods, with the transitions of a DQN."""

from __future__ import annotations

from common import load_model, make_game, parse
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_extra_buffers.codecs import is_available
from sb3_extra_buffers.codecs.registry import parse_method
from sb3_extra_buffers.compressed import CompressedReplayBuffer, init_jit
from sb3_extra_buffers.stores.usage import format_bytes
from sb3_extra_buffers.training_utils.buffer_warmup import warm_up

METHODS = ["auto", "delta", "delta2", "zstd-100", "zstd-5", "zstd-1", "zstd3", "lz4-frame/1", "lz4-block/1"]
METHODS += ["igzip0", "igzip1", "gzip1", "rle", "none"]


def make_buffers(env, size: int, methods: list[str]) -> dict[str, ReplayBuffer]:
    """Create SB3's own buffer as the baseline, and a compressed one for each method that is installed."""
    common = (size, env.observation_space, env.action_space)
    options = {"optimize_memory_usage": True, "handle_timeout_termination": False}
    buffers = {"baseline": ReplayBuffer(*common, device="cpu", n_envs=env.num_envs, **options)}
    for method in methods:
        name = parse_method(method)[0]
        if name == "auto" or is_available(name):
            init_jit(method)
            buffers[method] = CompressedReplayBuffer(
                *common, device="cpu", n_envs=env.num_envs, compression_method=method, **options
            )
    return buffers


def observation_bytes(buffer: ReplayBuffer) -> int:
    """Return the memory of a buffer's observations."""
    if isinstance(buffer, CompressedReplayBuffer):
        usage = buffer.memory_usage()
        return usage.total - usage.other
    return buffer.observations.nbytes


def main() -> None:
    options = parse(__doc__, timesteps=49_900, n_envs=4, buffer_size=40_000)
    if options.quick:
        options.buffer_size = 100
    env = make_game(options)
    model = load_model(options, "DQN")
    methods = ["auto", "zstd-5", "rle"] if options.quick else METHODS
    buffers = make_buffers(env, options.buffer_size, methods)
    seconds = warm_up(model, env, buffers, options.timesteps, deterministic=True, progress_bar=not options.quick)
    env.close()
    dense = observation_bytes(buffers["baseline"])
    print(f"{'Compression':<12} {'Memory':>8} {'Memory %':>9} {'Latency':>8}")
    for name in sorted(buffers, key=seconds.__getitem__):
        size = observation_bytes(buffers[name])
        print(f"{name:<12} {format_bytes(size):>8} {size / dense:>9.1%} {seconds[name]:>7.1f}s")


if __name__ == "__main__":
    main()
