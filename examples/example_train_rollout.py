"""Train PPO on an Atari game with a compressed rollout buffer."""

from __future__ import annotations

from common import buffer_arguments, make_eval_game, make_game, parse
from runs import train
from stable_baselines3 import PPO
from stable_baselines3.common.utils import LinearSchedule

from sb3_extra_buffers.compressed import CompressedRolloutBuffer, warmup


def main() -> None:
    options = parse(__doc__, timesteps=10_000_000)
    warmup()
    model = PPO(
        "CnnPolicy",
        make_game(options),
        learning_rate=LinearSchedule(2.5e-4, 0.0, 1.0),
        n_steps=128,
        batch_size=256,
        n_epochs=1 if options.quick else 4,
        clip_range=LinearSchedule(0.1, 0.0, 1.0),
        ent_coef=0.01,
        vf_coef=0.5,
        seed=options.seed,
        device=options.device,
        verbose=1,
        **buffer_arguments(options, CompressedRolloutBuffer, "rollout"),
    )
    train(model, options, "PPO", make_eval_game(options))


if __name__ == "__main__":
    main()
