"""Play a real Atari game and hold what it shows in a `CompressedArray`, beside NumPy: ``make demo``."""

from __future__ import annotations

import argparse
import time

import ale_py
import gymnasium
import numpy as np
import psutil
import torch
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import VecFrameStack, VecTransposeImage
from tqdm import trange

from sb3_extra_buffers.compressed import CompressedArray, init_jit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--game", default="MsPacmanNoFrameskip-v4")
    parser.add_argument("--steps", type=int, default=5000, help="steps of each of the four environments")
    parser.add_argument("--method", default="auto", help="a compression method, such as delta3 or zstd-5")
    options = parser.parse_args()

    gymnasium.register_envs(ale_py)
    env = VecTransposeImage(VecFrameStack(make_atari_env(options.game, n_envs=4, seed=0), 4))
    shape = (options.steps, env.num_envs)
    init_jit(options.method)  # compiles on the first run on a machine, which takes some seconds

    process = psutil.Process()
    arrays = {
        "NumPy": np.zeros((*shape, *env.observation_space.shape), np.uint8),
        "CompressedArray": CompressedArray(shape, env.observation_space.shape, compression_method=options.method),
    }
    seconds, resident = dict.fromkeys(arrays, 0.0), dict.fromkeys(arrays, 0)
    obs = env.reset()
    for step in trange(options.steps, desc=options.game):
        for name, array in arrays.items():
            before, start = process.memory_info().rss, time.perf_counter()
            array[step] = obs
            seconds[name] += time.perf_counter() - start
            resident[name] += process.memory_info().rss - before
        obs, _, _, _ = env.step([env.action_space.sample() for _ in range(env.num_envs)])
    env.close()

    random = np.random.default_rng(0)
    reading = dict.fromkeys(arrays, 0.0)
    for _ in trange(200, desc="reading batches of 256"):
        where = random.integers(0, options.steps, 256), random.integers(0, env.num_envs, 256)
        batches = []
        for name, array in arrays.items():
            start = time.perf_counter()
            # as a tensor of its own, the way a buffer hands it to the learner
            batch = array[where]
            batches.append(torch.from_numpy(batch) if name == "CompressedArray" else torch.tensor(batch))
            reading[name] += time.perf_counter() - start
        if not torch.equal(*batches):
            raise SystemExit("the two arrays differ; please report this")

    print(f"\n{options.steps * env.num_envs:,} observations of {options.game}, every batch compared byte for byte")
    print(f"{'':>16} {'resident':>10} {'write a step':>14} {'read 256':>10}")
    for name in arrays:
        print(
            f"{name:>16} {resident[name] / 1e6:>7.1f} MB {1e6 * seconds[name] / options.steps:>11.0f} us "
            f"{1e3 * reading[name] / 200:>7.2f} ms"
        )
    print(f"\n{arrays['CompressedArray'].memory_usage()}")


if __name__ == "__main__":
    main()
