"""Train a small DQN on a real Atari game with a compressed replay buffer, then with SB3's own: ``make demo``.

Each run has its own process, so that its memory can be measured. Both must end with the same weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from typing import Any

import psutil
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_extra_buffers.compressed import CompressedReplayBuffer, warmup
from sb3_extra_buffers.stores.usage import format_bytes
from sb3_extra_buffers.training_utils.atari import make_env


def train(game: str, steps: int, method: str, compressed: bool) -> dict[str, Any]:
    """Train once; return the memory and time it took, and a hash of the final weights."""
    warmup(method)  # compiles the kernels; takes some seconds the first time
    env = make_env(game, n_envs=4, framestack=4, seed=0)
    buffer_arguments: dict[str, Any] = {
        "replay_buffer_class": CompressedReplayBuffer,
        "replay_buffer_kwargs": {"compression_method": method},
    }
    model = DQN(
        "CnnPolicy", env, buffer_size=4 * steps, learning_starts=steps // 4, train_freq=8, batch_size=32, seed=0,
        device="cpu", **(buffer_arguments if compressed else {"replay_buffer_class": ReplayBuffer}),
    )  # fmt: skip
    before, start = psutil.Process().memory_info().rss, time.perf_counter()
    model.learn(steps, progress_bar=True)
    seconds, growth = time.perf_counter() - start, psutil.Process().memory_info().rss - before
    buffer: Any = model.replay_buffer
    if compressed:
        size, report = buffer.memory_usage().total, str(buffer.memory_usage())
    else:
        columns = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
        size, report = sum(getattr(buffer, name)[: buffer.pos].nbytes for name in columns), ""
    weights = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.policy.state_dict().values()))
    return {"seconds": seconds, "growth": growth, "size": size, "weights": weights.hexdigest(), "report": report}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", default="PongNoFrameskip-v4", help="id of an Atari game (default: %(default)s)")
    parser.add_argument("--timesteps", type=int, default=4000, help="steps of all environments (default: 4000)")
    parser.add_argument("--quick", action="store_true", help="train for 600 steps only")
    parser.add_argument("--method", default="auto", help="a compression method, such as delta3 or zstd-5")
    parser.add_argument("--only", choices=["compressed", "sb3"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    steps = 600 if options.quick else options.timesteps
    if options.only:
        print(json.dumps(train(options.game, steps, options.method, options.only == "compressed")))
        return
    results = {}
    for kind in ("compressed", "sb3"):
        print(f"training DQN on {options.game} for {steps} steps, {kind} buffer", flush=True)
        output = subprocess.check_output([sys.executable, __file__, *sys.argv[1:], "--only", kind])
        results[kind] = json.loads(output.splitlines()[-1])
    print(f"\n{'':24}{'buffer':>12}{'process grew':>15}{'training':>12}")
    for name, result in zip(("CompressedReplayBuffer", "SB3's ReplayBuffer"), results.values(), strict=True):
        size, growth = (format_bytes(result[key]) for key in ("size", "growth"))
        print(f"{name:24}{size:>12}{growth:>15}{result['seconds']:>10.1f} s")
    ours, theirs = results.values()
    print(f"\n{ours['report']}\n{ours['seconds'] / theirs['seconds']:.2f}x the time")
    if ours["weights"] != theirs["weights"]:
        raise SystemExit("the weights of the two agents differ; please report this as a bug")
    print("both agents ended with the same weights, bit for bit")


if __name__ == "__main__":
    main()
