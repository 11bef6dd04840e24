"""Train DQN on an Atari game with a compressed replay buffer."""

from __future__ import annotations

from common import buffer_arguments, make_eval_game, make_game, parse
from runs import train
from stable_baselines3 import DQN

from sb3_extra_buffers.compressed import CompressedReplayBuffer, warmup


def main() -> None:
    options = parse(__doc__, timesteps=10_000_000, buffer_size=1_000_000)
    warmup()
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
        device=options.device,
        verbose=1,
        **buffer_arguments(options, CompressedReplayBuffer, "replay"),
    )
    train(model, options, "DQN", make_eval_game(options))


if __name__ == "__main__":
    main()
