"""Train PPO on an Atari game with a rollout buffer whose observations stay on the GPU."""

from __future__ import annotations

from common import make_game, parse
from runs import gpu_buffer_arguments, train
from stable_baselines3 import PPO
from stable_baselines3.common.utils import LinearSchedule

from sb3_extra_buffers.gpu_buffers import GpuRolloutBuffer


def main() -> None:
    options = parse(__doc__, timesteps=10_000_000, buffer_device="")
    model = PPO(
        "CnnPolicy",
        make_game(options),
        learning_rate=LinearSchedule(2.5e-4, 0.0, 1.0),
        n_steps=128,
        batch_size=256,
        n_epochs=1 if options.quick else 4,
        clip_range=LinearSchedule(0.1, 0.0, 1.0),
        ent_coef=0.01,
        seed=options.seed,
        verbose=1,
        **gpu_buffer_arguments(options, GpuRolloutBuffer, "rollout"),
    )
    train(model, options, "PPO")


if __name__ == "__main__":
    main()
