"""Train DQN on an Atari game with a compressed replay buffer."""

from __future__ import annotations

from common import make_eval_game, make_game, model_path, parse
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import EvalCallback

from sb3_extra_buffers.compressed import CompressedReplayBuffer, init_jit


def main() -> None:
    options = parse(__doc__, timesteps=10_000_000, buffer_size=1_000_000)
    init_jit(options.compression if options.compression != "raw" else "auto")
    env, eval_env = make_game(options), make_eval_game(options)
    buffer = {
        "replay_buffer_class": CompressedReplayBuffer,
        "replay_buffer_kwargs": {"compression_method": options.compression},
    }
    model = DQN(
        "CnnPolicy",
        env,
        learning_rate=1e-4,
        buffer_size=1000 if options.quick else options.buffer_size,
        learning_starts=32 if options.quick else 100_000,
        target_update_interval=1000,
        train_freq=4,
        gradient_steps=1,
        exploration_fraction=0.1,
        exploration_final_eps=0.01,
        seed=options.seed,
        device=options.device,
        verbose=1,
        **(buffer if options.compression != "raw" else {}),
    )
    path = model_path(options, "DQN")
    best = EvalCallback(
        eval_env,
        n_eval_episodes=1 if options.quick else 20,
        eval_freq=max(options.timesteps // 100 // options.n_envs, 32),
        best_model_save_path=str(path.with_suffix("")),
    )
    model.learn(options.timesteps, callback=best, progress_bar=not options.quick)
    model.save(path)
    if options.compression != "raw":
        print(f"{model.replay_buffer.size() * env.num_envs:,} transitions take {model.replay_buffer.memory_usage()}")
    print(f"saved {path}")
    env.close()
    eval_env.close()


if __name__ == "__main__":
    main()
