"""Watch what was trained, PPO or DQN: in a window, or as a GIF or MP4."""

from __future__ import annotations

from common import load_model, make_eval_game, parse

from sb3_extra_buffers.recording import record_agent


def main() -> None:
    options = parse(__doc__, timesteps=1000, algorithm="PPO", picture="agent.gif", window=0)
    model = load_model(options, options.algorithm)
    if options.quick:
        options.timesteps = 20
    # only SB3's own environments render
    mode = {"render_mode": "human" if options.window else "rgb_array"}
    env = make_eval_game(options, native=False, n_envs=1, env_kwargs=mode)
    if options.window:
        obs = env.reset()
        for _ in range(options.timesteps):
            obs = env.step(model.predict(obs, deterministic=True)[0])[0]
    else:
        path = options.output / options.picture
        record = record_agent(model, env, options.timesteps, render=True)
        record.export(path, fps=15)
        print(f"{len(record)} steps, rewards {record.rewards.sum():.0f}: {path}")
        print(record.memory_usage())
    env.close()


if __name__ == "__main__":
    main()
