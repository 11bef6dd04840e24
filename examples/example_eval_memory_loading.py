"""Compare the time that compression methods take to sample the transitions of a trained DQN.

Latency is the time for one batch. ``--compression auto,zstd-5`` compares these methods only.
"""

from __future__ import annotations

import time

import torch
from common import parse
from comparison import fill_buffers, report
from stable_baselines3.common.utils import set_random_seed


def main() -> None:
    options = parse(
        __doc__, timesteps=40_000, n_envs=4, quick=400, game="mspacman", buffer_size=40_000, batch_size=256, batches=100
    )
    buffers, _ = fill_buffers(options)
    n_batches = 2 if options.quick else options.batches
    milliseconds, expected = {}, None
    for name, buffer in buffers.items():
        buffer.sample(options.batch_size)
        set_random_seed(options.seed)
        start = time.perf_counter()
        for _ in range(n_batches):
            batch = buffer.sample(options.batch_size)
        milliseconds[name] = 1e3 * (time.perf_counter() - start) / n_batches
        # with the same seed, all buffers return the same batch
        expected = batch if expected is None else expected
        if not torch.equal(batch.observations, expected.observations):
            raise SystemExit(f"{name} returns other batches than SB3's buffer; please report this as a bug")
    report(buffers, milliseconds, "ms", options.output / "memory_loading.png")


if __name__ == "__main__":
    main()
