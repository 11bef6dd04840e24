"""Compare TorchRL replay buffers with a compressed and a dense storage."""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from sb3_extra_buffers.replay_buffers import CompressedStorage

N_ENVS = 4


def play(n_steps: int) -> Any:
    """Yield steps of four games of Ms. Pac-Man, with stacked frames, as TensorDicts."""
    from ale_py.vector_env import AtariVectorEnv

    env = AtariVectorEnv("ms_pacman", num_envs=N_ENVS, stack_num=4, img_height=84, img_width=84, grayscale=True)
    rng = np.random.default_rng(0)
    obs, _ = env.reset(seed=0)
    obs = np.array(obs)
    for _ in range(n_steps):
        actions = rng.integers(0, env.single_action_space.n, N_ENVS)
        next_obs, rewards, terminated, truncated, _ = env.step(actions)
        next_obs = np.array(next_obs)
        yield TensorDict(
            {
                "observation": torch.from_numpy(obs),
                "action": torch.from_numpy(actions),
                "next": {
                    "observation": torch.from_numpy(next_obs),
                    "reward": torch.from_numpy(np.asarray(rewards, np.float32)[:, None]),
                    "done": torch.from_numpy((np.asarray(terminated) | np.asarray(truncated))[:, None]),
                },
            },
            batch_size=[N_ENVS],
        )
        obs = next_obs
    env.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--timesteps", type=int, default=8000, help="transitions of the four games together (default: 8000)"
    )
    parser.add_argument("--quick", action="store_true", help="use 512 transitions only")
    options = parser.parse_args()
    n_steps = 128 if options.quick else options.timesteps // N_ENVS
    size = n_steps * N_ENVS
    buffers = {
        storage.__name__: TensorDictReplayBuffer(storage=storage(size), batch_size=256)
        for storage in (CompressedStorage, LazyTensorStorage)
    }
    seconds = dict.fromkeys(buffers, 0.0)
    for data in play(n_steps):
        for name, buffer in buffers.items():
            copy = data.clone()
            start = time.perf_counter()
            buffer.extend(copy)
            seconds[name] += time.perf_counter() - start
    batches = []
    for name, buffer in buffers.items():
        torch.manual_seed(0)
        start = time.perf_counter()
        batches.append(buffer.sample())
        print(f"{name}: extend {1e6 * seconds[name] / size:.0f} us, sample(256) {time.perf_counter() - start:.4f} s")
    print("identical samples:", bool((batches[0] == batches[1]).all()))
    print(buffers["CompressedStorage"].storage.memory_usage())


if __name__ == "__main__":
    main()
