"""Train DQN on an Atari game with a replay buffer whose observations stay on the GPU."""

from __future__ import annotations

from common import make_game, parse
from runs import gpu_buffer_arguments, train
from stable_baselines3 import DQN

from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer


def main() -> None:
    options = parse(__doc__, timesteps=10_000_000, buffer_size=1_000_000, buffer_device="")
    model = DQN(
        "CnnPolicy",
        make_game(options),
        learning_rate=1e-4,
        buffer_size=1000 if options.quick else options.buffer_size,
        learning_starts=400 if options.quick else 100_000,
        target_update_interval=1000,
        train_freq=4,
        gradient_steps=1,
        exploration_fraction=0.1,
        exploration_final_eps=0.01,
        seed=options.seed,
        verbose=1,
        **gpu_buffer_arguments(options, GpuReplayBuffer, "replay"),
    )
    train(model, options, "DQN")


if __name__ == "__main__":
    main()
