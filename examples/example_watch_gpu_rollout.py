"""Watch what `example_train_gpu_rollout.py` trained, as a GIF or MP4."""

from __future__ import annotations

from common import load_model, make_eval_game, parse

from sb3_extra_buffers.recording import record_agent


def main() -> None:
    options = parse(__doc__, timesteps=1000, picture="agent.gif")
    model = load_model(options, "PPO")
    steps = 20 if options.quick else options.timesteps
    # only SB3's own environments render
    env = make_eval_game(options, native=False, n_envs=1, env_kwargs={"render_mode": "rgb_array"})
    path = options.output / options.picture
    record = record_agent(model, env, steps, render=True)
    record.export(path, fps=15)
    print(f"{len(record)} steps, rewards {record.rewards.sum():.0f}: {path}")
    env.close()


if __name__ == "__main__":
    main()
