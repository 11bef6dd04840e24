"""Watch a trained model, PPO or DQN: in a window, or as a GIF or MP4."""

from __future__ import annotations

from argparse import Namespace

from common import load_model, make_eval_game, parse
from runs import record


def show(options: Namespace) -> None:
    """Play in a window."""
    model = load_model(options, options.algorithm)
    env = make_eval_game(options, native=False, n_envs=1, env_kwargs={"render_mode": "human"})
    obs = env.reset()
    for _ in range(options.timesteps):
        obs = env.step(model.predict(obs, deterministic=True)[0])[0]
    env.close()


def main() -> None:
    options = parse(__doc__, timesteps=1000, algorithm="PPO", picture="agent.gif", window=0)
    if options.window:
        show(options)
    else:
        record(options, options.algorithm)


if __name__ == "__main__":
    main()
