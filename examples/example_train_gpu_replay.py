"""Train DQN on an Atari game with a replay buffer whose observations stay on the GPU."""

from __future__ import annotations

import torch
from common import make_game, model_path, parse
from stable_baselines3 import DQN

from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer


def main() -> None:
    options = parse(__doc__, timesteps=10_000_000, buffer_size=1_000_000, buffer_device="")
    best = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(best if options.device == "auto" else options.device)
    env = make_game(options)
    # what is recommended for images; "pinned" for a buffer_device keeps more than the GPU holds
    method = "delta" if options.compression == "auto" else options.compression
    model = DQN(
        "CnnPolicy",
        env,
        learning_rate=1e-4,
        buffer_size=1000 if options.quick else options.buffer_size,
        learning_starts=32 if options.quick else 100_000,
        exploration_fraction=0.1,
        exploration_final_eps=0.01,
        replay_buffer_class=GpuReplayBuffer,
        replay_buffer_kwargs={"compression_method": method, "buffer_device": options.buffer_device or device.type},
        seed=options.seed,
        device=device,
        verbose=1,
    )
    model.learn(options.timesteps, progress_bar=not options.quick)
    path = model_path(options, "DQN")
    model.save(path)
    print(f"{model.replay_buffer.size() * env.num_envs:,} transitions take {model.replay_buffer.memory_usage()}")
    print(f"saved {path}")
    env.close()


if __name__ == "__main__":
    main()
