"""Train PPO on an Atari game with a rollout buffer whose observations stay on the GPU."""

from __future__ import annotations

import torch
from common import make_game, model_path, parse
from stable_baselines3 import PPO

from sb3_extra_buffers.gpu_buffers import GpuRolloutBuffer


def main() -> None:
    options = parse(__doc__, timesteps=10_000_000, buffer_device="")
    best = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(best if options.device == "auto" else options.device)
    env = make_game(options)
    # what is recommended for images
    method = "delta" if options.compression == "auto" else options.compression
    model = PPO(
        "CnnPolicy",
        env,
        learning_rate=lambda left: 2.5e-4 * left,
        n_steps=16 if options.quick else 128,
        batch_size=32 if options.quick else 256,
        n_epochs=1 if options.quick else 4,
        clip_range=lambda left: 0.1 * left,
        ent_coef=0.01,
        rollout_buffer_class=GpuRolloutBuffer,
        rollout_buffer_kwargs={"compression_method": method, "buffer_device": options.buffer_device or device.type},
        seed=options.seed,
        device=device,
        verbose=1,
    )
    model.learn(options.timesteps, progress_bar=not options.quick)
    path = model_path(options, "PPO")
    model.save(path)
    print(f"a rollout takes {model.rollout_buffer.memory_usage()}")
    print(f"saved {path}")
    env.close()


if __name__ == "__main__":
    main()
