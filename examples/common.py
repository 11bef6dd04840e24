"""What the examples share: arguments, games and where models lie."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sb3_extra_buffers.training_utils.atari import make_env

GAMES = {"pong": "PongNoFrameskip-v4", "mspacman": "MsPacmanNoFrameskip-v4"}


def parse(description: str | None, timesteps: int, n_envs: int = 8, **more: Any) -> argparse.Namespace:
    """The arguments of an example; ``more`` adds options of its own, by their defaults."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--game", choices=GAMES, default="pong")
    parser.add_argument("--compression", default="auto", help="a method such as delta or zstd-5; raw for SB3's buffer")
    parser.add_argument("--timesteps", type=int, help=f"steps of all environments together ({timesteps:,})")
    parser.add_argument("--n-envs", type=int, default=n_envs)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("logs"), help="where models and pictures go")
    parser.add_argument("--quick", action="store_true", help="seconds instead of hours: to see that it runs")
    for name, default in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    options = parser.parse_args()
    options.timesteps = options.timesteps or (64 if options.quick else timesteps)
    options.n_envs = min(options.n_envs, 2) if options.quick else options.n_envs
    options.env_id = GAMES[options.game]
    return options


def make_game(options: argparse.Namespace, **more: Any) -> Any:
    """The game, in ale-py's own threads; a quick look ends it after a few seconds of play."""
    limit = {"max_num_frames_per_episode": 120} if options.quick else {}
    settings = {"native": True, "seed": options.seed, "n_envs": options.n_envs, "framestack": 4} | more
    settings["env_kwargs"] = limit | settings.get("env_kwargs", {})
    return make_env(env_id=options.env_id, **settings)


def make_eval_game(options: argparse.Namespace, **more: Any) -> Any:
    """The same, scored as the game does it: whole games, rewards not clipped."""
    wrapper = {"terminal_on_life_loss": False, "clip_reward": False}
    return make_game(options, wrapper_kwargs=wrapper, **more)


def model_path(options: argparse.Namespace, algorithm: str) -> Path:
    return Path(options.output) / f"{algorithm.lower()}_{options.game}.zip"


def load_model(options: argparse.Namespace, algorithm: str) -> Any:
    """The trained model; for a quick look an untrained one will do."""
    import stable_baselines3

    cls, path = getattr(stable_baselines3, algorithm), model_path(options, algorithm)
    if path.exists():
        # what is loaded plays only, so that it needs no room for experience
        custom = {"buffer_size": 1, "optimize_memory_usage": False} if algorithm == "DQN" else {}
        return cls.load(path, device=options.device, custom_objects=custom)
    if not options.quick:
        raise SystemExit(f"there is no model at {path}; train one first, or pass --quick for an untrained one")
    size = {"buffer_size": 100} if algorithm == "DQN" else {}
    return cls("CnnPolicy", make_game(options), device=options.device, **size)
