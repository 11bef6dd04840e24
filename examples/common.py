"""Shared by the examples: command-line arguments, environments and models."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sb3_extra_buffers.training_utils.atari import make_env

GAMES = {"pong": "PongNoFrameskip-v4", "mspacman": "MsPacmanNoFrameskip-v4"}
HELP = {
    "algorithm": "PPO or DQN (default: PPO)",
    "episodes": "episodes to play",
    "buffer_size": "transitions that the buffer holds",
    "buffer_device": "where observations are kept: cuda, pinned or cpu (default: the device of the model)",
    "batch_size": "transitions in a batch",
    "batches": "batches to sample",
    "buffer": "tensor, or dense-cpu for NumPy arrays in main memory (default: tensor)",
    "learning_starts": "steps before the first update",
    "scenario": "scenario of ViZDoom, or the path of a configuration file",
    "observation": "rgb, labels or classes",
    "picture": "file to write in the output folder, .gif or .mp4",
    "window": "1 to play in a window instead of writing a file",
}


def parse(
    description: str | None, timesteps: int, n_envs: int = 8, quick: int = 512, game: str | None = "pong", **extra: Any
) -> argparse.Namespace:
    """Parse the arguments of an example.

    ``quick`` is the number of steps with ``--quick``, ``game`` the default Atari game or None, ``extra`` adds options.
    """
    parser = argparse.ArgumentParser(description=description)
    if game:
        parser.add_argument("--game", choices=GAMES, default=game, help=f"Atari game (default: {game})")
    parser.add_argument("--compression", default="auto", help="a method such as delta or zstd-5; raw for SB3's buffer")
    parser.add_argument("--timesteps", type=int, help=f"steps of all environments together (default: {timesteps:,})")
    parser.add_argument("--n-envs", type=int, default=n_envs, help=f"parallel environments (default: {n_envs})")
    parser.add_argument("--device", default="auto", help="device of the model, such as cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("logs"), help="folder for models and images")
    parser.add_argument("--quick", action="store_true", help="run for seconds instead of hours, to try it out")
    for name, default in extra.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=HELP.get(name))
    options = parser.parse_args()
    options.timesteps = options.timesteps or (quick if options.quick else timesteps)
    options.n_envs = min(options.n_envs, 2) if options.quick else options.n_envs
    if game:
        options.env_id = GAMES[options.game]
    return options


def make_game(options: argparse.Namespace, **env_options: Any) -> Any:
    """Create the game's environments, in ale-py's threads."""
    settings = {"native": True, "seed": options.seed, "n_envs": options.n_envs, "framestack": 4} | env_options
    return make_env(env_id=options.env_id, **settings)


def make_eval_game(options: argparse.Namespace, **env_options: Any) -> Any:
    """Create environments for evaluation: whole games, short ones with ``--quick``; rewards are not clipped."""
    limit = {"max_num_frames_per_episode": 120} if options.quick else {}
    env_options["env_kwargs"] = limit | env_options.get("env_kwargs", {})
    return make_game(options, wrapper_kwargs={"terminal_on_life_loss": False, "clip_reward": False}, **env_options)


def buffer_arguments(options: argparse.Namespace, buffer_class: type[Any], kind: str) -> dict[str, Any]:
    """Return the arguments that make an SB3 algorithm use ``buffer_class``; none for ``--compression raw``."""
    if options.compression == "raw":
        return {}
    kwargs = {"compression_method": options.compression}
    return {f"{kind}_buffer_class": buffer_class, f"{kind}_buffer_kwargs": kwargs}


def model_path(options: argparse.Namespace, algorithm: str) -> Path:
    return Path(options.output) / f"{algorithm.lower()}_{options.game}.zip"


def load_model(options: argparse.Namespace, algorithm: str) -> Any:
    """Load the model that was trained: by you, or for DQN on MsPacman the small one that comes with the examples."""
    import stable_baselines3
    from small_dqn import load_small_dqn

    cls, path = getattr(stable_baselines3, algorithm), model_path(options, algorithm)
    if path.exists():
        # the model only plays, so its replay buffer may be tiny
        custom = {"buffer_size": 1, "optimize_memory_usage": False} if algorithm == "DQN" else {}
        return cls.load(path, device=options.device, custom_objects=custom)
    if (algorithm, options.game) == ("DQN", "mspacman"):
        return load_small_dqn(make_game(options), options.device)
    if not options.quick:
        raise SystemExit(f"there is no model at {path}; train one first, or pass --quick to use an untrained model")
    size = {"buffer_size": 100} if algorithm == "DQN" else {}
    return cls("CnnPolicy", make_game(options), device=options.device, **size)
