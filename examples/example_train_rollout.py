"""Train PPO on an Atari game with a compressed rollout buffer."""

from __future__ import annotations

from common import make_eval_game, make_game, model_path, parse
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import EvalCallback

from sb3_extra_buffers.compressed import CompressedRolloutBuffer, init_jit


def main() -> None:
    options = parse(__doc__, timesteps=10_000_000)
    init_jit(options.compression if options.compression != "raw" else "auto")
    env, eval_env = make_game(options), make_eval_game(options)
    buffer = {
        "rollout_buffer_class": CompressedRolloutBuffer,
        "rollout_buffer_kwargs": {"compression_method": options.compression},
    }
    model = PPO(
        "CnnPolicy",
        env,
        learning_rate=lambda left: 2.5e-4 * left,
        n_steps=16 if options.quick else 128,
        batch_size=32 if options.quick else 256,
        n_epochs=1 if options.quick else 4,
        clip_range=lambda left: 0.1 * left,
        ent_coef=0.01,
        vf_coef=0.5,
        seed=options.seed,
        device=options.device,
        verbose=1,
        **(buffer if options.compression != "raw" else {}),
    )
    path = model_path(options, "PPO")
    best = EvalCallback(
        eval_env,
        n_eval_episodes=1 if options.quick else 20,
        eval_freq=max(options.timesteps // 100 // options.n_envs, 32),
        best_model_save_path=str(path.with_suffix("")),
    )
    model.learn(options.timesteps, callback=best, progress_bar=not options.quick)
    model.save(path)
    if options.compression != "raw":
        print(f"a rollout takes {model.rollout_buffer.memory_usage()}")
    print(f"saved {path}")
    env.close()
    eval_env.close()


if __name__ == "__main__":
    main()
