"""Evaluate the best and the final model of a training run, PPO or DQN."""

from __future__ import annotations

from common import load_model, make_eval_game, model_path, parse
from stable_baselines3 import DQN, PPO

from sb3_extra_buffers.training_utils.eval_model import eval_model


def main() -> None:
    options = parse(__doc__, timesteps=0, n_envs=10, algorithm="PPO", episodes=100)
    env = make_eval_game(options)
    models = {"Final": load_model(options, options.algorithm)}
    best = model_path(options, options.algorithm).with_suffix("") / "best_model.zip"
    if best.exists():
        cls = {"PPO": PPO, "DQN": DQN}[options.algorithm]
        models = {"Best": cls.load(best, device=options.device)} | models
    for name, model in models.items():
        eval_model(model, env, 4 if options.quick else options.episodes, name=name, progress_bar=not options.quick)
    env.close()


if __name__ == "__main__":
    main()
