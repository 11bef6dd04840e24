"""Train the small DQN whose weights are in ``examples/dqn_mspacman.npz``: ten minutes on a CPU.

``python scripts/train_mspacman.py`` needs ``pip install '.[fast,extra]'``. The committed weights scored 747 +/- 382
in 20 whole games; untrained ones score about 200. Results vary a lot between runs and machines.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from small_dqn import WEIGHTS, load_small_dqn, make_small_dqn, save_weights

from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.training_utils.atari import make_env
from sb3_extra_buffers.training_utils.eval_model import eval_model

GAME = "MsPacmanNoFrameskip-v4"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timesteps", type=int, default=106_500)
    parser.add_argument("--episodes", type=int, default=20, help="episodes of the evaluation (default: 20)")
    parser.add_argument("--output", type=Path, default=WEIGHTS)
    options = parser.parse_args()
    torch.set_num_threads(1)  # more threads do not pay off with a network this small
    model = make_small_dqn(
        make_env(GAME, n_envs=8, framestack=4, seed=0, native=True),
        buffer_size=options.timesteps,
        learning_rate=lambda remaining: 5e-4 * (0.73 + 0.27 * remaining),
        learning_starts=10_000,
        train_freq=2,
        gradient_steps=2,
        batch_size=64,
        target_update_interval=4000,
        exploration_fraction=1.0,
        exploration_final_eps=0.14,
        n_steps=3,
        replay_buffer_class=CompressedReplayBuffer,
        replay_buffer_kwargs={"n_steps": 3, "gamma": 0.99},
        device="cpu",
        seed=0,
        verbose=1,
    )
    model.learn(options.timesteps, log_interval=100)
    save_weights(model, options.output)
    print(f"saved {options.output}, {options.output.stat().st_size / 1000:.0f} kB; {model.num_timesteps:,} steps")
    print(model.replay_buffer.memory_usage())
    whole_games = {"terminal_on_life_loss": False, "clip_reward": False}
    env = make_env(GAME, n_envs=10, framestack=4, seed=100, native=True, wrapper_kwargs=whole_games)
    eval_model(load_small_dqn(env, path=options.output), env, options.episodes, name="Final")
    env.close()


if __name__ == "__main__":
    main()
