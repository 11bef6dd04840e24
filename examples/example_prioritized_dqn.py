"""Train DQN with prioritised replay on an Atari game, with unmodified SB3."""

from __future__ import annotations

import argparse

import numpy as np
from stable_baselines3 import DQN

from sb3_extra_buffers.compressed import BufferUsageCallback, prioritized
from sb3_extra_buffers.training_utils.atari import make_env


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--game", default="MsPacmanNoFrameskip-v4", help="id of an Atari game (default: %(default)s)")
    parser.add_argument("--timesteps", type=int, default=1_000_000, help="steps of all environments together")
    parser.add_argument("--n-envs", type=int, default=4)
    parser.add_argument(
        "--alpha", type=float, default=0.6, help="weight of TD errors; 0 is uniform replay (default: 0.6)"
    )
    parser.add_argument("--quick", action="store_true", help="train for 480 steps only")
    options = parser.parse_args()
    timesteps = 480 if options.quick else options.timesteps

    env = make_env(options.game, n_envs=options.n_envs, framestack=4, seed=0, native=True)
    model = prioritized(DQN)(
        "CnnPolicy",
        env,
        learning_rate=1e-4,
        buffer_size=500_000,
        learning_starts=320 if options.quick else 20_000,
        target_update_interval=80 if options.quick else 10_000,
        exploration_fraction=0.1,
        n_steps=3,
        # beta increases from 0.4 to 1 during training
        replay_buffer_kwargs={"alpha": options.alpha, "beta": (0.4, 1.0)},
        seed=0,
        verbose=0 if options.quick else 1,
    )
    model.learn(timesteps, callback=BufferUsageCallback(), progress_bar=not options.quick)

    buffer = model.replay_buffer
    priorities = buffer.priorities[buffer.priorities > 0]
    share = np.sort(priorities)[-len(priorities) // 10 :].sum() / priorities.sum()
    print(f"{len(priorities):,} transitions of {options.game}, {timesteps:,} steps, {model._n_updates:,} updates")
    print(f"the 10% with the largest TD errors get {share:.0%} of the samples")
    print(buffer.memory_usage())
    env.close()


if __name__ == "__main__":
    main()
