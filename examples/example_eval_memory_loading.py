"""Compare the sampling time of compression methods; example_eval_memory_saving.py compares their memory."""

from __future__ import annotations

import time

import torch
from common import load_model, make_game, parse
from example_eval_memory_saving import METHODS, make_buffers, observation_bytes
from stable_baselines3.common.utils import set_random_seed

from sb3_extra_buffers.stores.usage import format_bytes
from sb3_extra_buffers.training_utils.buffer_warmup import warm_up


def main() -> None:
    options = parse(__doc__, timesteps=40_000, n_envs=4, buffer_size=40_000, batch_size=256, batches=100)
    if options.quick:
        options.buffer_size, options.batches = 100, 2
    env = make_game(options)
    model = load_model(options, "DQN")
    buffers = make_buffers(env, options.buffer_size, ["auto", "zstd-5", "rle"] if options.quick else METHODS)
    warm_up(model, env, buffers, options.timesteps, deterministic=True, progress_bar=not options.quick)
    env.close()
    expected = None
    print(f"{'Compression':<12} {'Memory':>8} {f'sample({options.batch_size})':>16}")
    for name, buffer in buffers.items():
        buffer.sample(options.batch_size)
        set_random_seed(options.seed)
        start = time.perf_counter()
        for _ in range(options.batches):
            batch = buffer.sample(options.batch_size)
        seconds = (time.perf_counter() - start) / options.batches
        # with the same seed, all buffers return the same batch
        expected = batch if expected is None else expected
        if not torch.equal(batch.observations, expected.observations):
            raise SystemExit(f"{name} returns other batches than SB3's buffer; please report this as a bug")
        print(f"{name:<12} {format_bytes(observation_bytes(buffer)):>8} {1e3 * seconds:>13.2f} ms")


if __name__ == "__main__":
    main()
