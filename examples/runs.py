"""Shared by the examples: train a model and save it, or record it while it plays."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from common import load_model, make_eval_game, model_path
from stable_baselines3.common.callbacks import EvalCallback

from sb3_extra_buffers.recording import record_agent


def train(model: Any, options: argparse.Namespace, algorithm: str, eval_env: Any = None) -> None:
    """Train ``model``, save it, and print the memory of its buffer; with ``eval_env``, also save the best model."""
    path = model_path(options, algorithm)
    callback = None
    if eval_env is not None:
        callback = EvalCallback(
            eval_env,
            n_eval_episodes=1 if options.quick else 20,
            eval_freq=max(options.timesteps // 100 // options.n_envs, 128),
            best_model_save_path=str(path.with_suffix("")),
        )
    model.learn(options.timesteps, callback=callback, progress_bar=not options.quick)
    model.save(path)
    if options.compression != "raw":
        print((model.replay_buffer if algorithm == "DQN" else model.rollout_buffer).memory_usage())
    print(f"saved {path}")
    model.get_env().close()


def gpu_buffer_arguments(options: argparse.Namespace, buffer_class: type[Any], kind: str) -> dict[str, Any]:
    """Return the arguments that make an SB3 algorithm keep its observations on the GPU, or on the CPU without one."""
    best = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(best if options.device == "auto" else options.device)
    kwargs = {
        # the recommended method for images
        "compression_method": "delta" if options.compression == "auto" else options.compression,
        # "pinned" stores more than the GPU has memory for
        "buffer_device": options.buffer_device or device.type,
    }
    return {"device": device, f"{kind}_buffer_class": buffer_class, f"{kind}_buffer_kwargs": kwargs}


def record(options: argparse.Namespace, algorithm: str) -> None:
    """Record the trained model and write an animation."""
    model = load_model(options, algorithm)
    steps = 20 if options.quick else options.timesteps
    # native environments cannot render
    env = make_eval_game(options, native=False, n_envs=1, env_kwargs={"render_mode": "rgb_array"})
    path = options.output / options.picture
    recording = record_agent(model, env, steps, render=True)
    recording.export(path, fps=15)
    print(f"{len(recording)} steps, rewards {recording.rewards.sum():.0f}: {path}")
    print(recording.memory_usage())
    env.close()
