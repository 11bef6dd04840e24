"""Train SBX's DQN (JAX) with a compressed replay buffer; needs the extra ``sbx``."""

from __future__ import annotations

from common import buffer_arguments, make_game, parse

from sb3_extra_buffers.compressed import CompressedReplayBuffer, warmup


def main() -> None:
    options = parse(__doc__, timesteps=1_000_000, buffer_size=500_000)
    try:
        from sbx import DQN
    except ImportError:
        raise SystemExit("this example needs SBX: pip install sbx-rl") from None
    warmup()
    env = make_game(options)
    model = DQN(
        "CnnPolicy",
        env,
        buffer_size=1000 if options.quick else options.buffer_size,
        learning_starts=400 if options.quick else 100_000,
        train_freq=4,
        seed=options.seed,
        verbose=1,
        **buffer_arguments(options, CompressedReplayBuffer, "replay"),
    )
    model.learn(options.timesteps, progress_bar=not options.quick)
    if options.compression != "raw":
        print(model.replay_buffer.memory_usage())
    env.close()


if __name__ == "__main__":
    main()
