"""Train PPO on ViZDoom's segmentation masks with a compressed rollout buffer."""

from __future__ import annotations

from common import buffer_arguments, parse
from stable_baselines3 import PPO

from sb3_extra_buffers.compressed import CompressedRolloutBuffer, warmup
from sb3_extra_buffers.stores.usage import format_bytes
from sb3_extra_buffers.training_utils.doom import make_env
from sb3_extra_buffers.training_utils.eval_model import eval_model


def main() -> None:
    options = parse(
        __doc__,
        timesteps=1_000_000,
        n_envs=4,
        quick=256,
        game=None,
        scenario="defend_the_center",
        observation="classes",
    )
    warmup()
    env = make_env(options.scenario, options.n_envs, observation=options.observation, res=(120, 160), seed=options.seed)
    model = PPO(
        "CnnPolicy",
        env,
        n_steps=128 if options.quick else 1024,
        batch_size=32 if options.quick else 256,
        n_epochs=1 if options.quick else 4,
        # class ids are small numbers that a division by 255 would make indistinguishable
        policy_kwargs={"normalize_images": options.observation == "rgb"},
        seed=options.seed,
        device=options.device,
        verbose=1,
        **buffer_arguments(options, CompressedRolloutBuffer, "rollout"),
    )
    model.learn(options.timesteps, progress_bar=not options.quick)
    model.save(options.output / f"ppo_{options.scenario}.zip")
    if options.compression != "raw":
        usage = model.rollout_buffer.memory_usage()
        print(usage)
        print(f"as RGB, SB3's buffer would take {format_bytes(3 * usage.dense_observations)} for the observations")
    eval_model(model, env, 2 if options.quick else 100, name="Final", progress_bar=not options.quick)
    env.close()


if __name__ == "__main__":
    main()
