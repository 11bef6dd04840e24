"""Two collectors, a compressed buffer and a learner with Ray; a collector and the buffer are killed during the run.

``python examples/example_ray.py`` starts its own Ray; ``--address auto`` joins a cluster.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from typing import Any

import ray
import torch
from example_torchrl import N_ENVS, play

from sb3_extra_buffers.replay_buffers import CompressedRayReplayBuffer


@ray.remote(num_cpus=0)
class Collector:
    """Plays, and sends 32 steps at a time."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.acknowledged = 0

    def process_id(self) -> int:
        return os.getpid()

    def collect(self, n_steps: int) -> int:
        pending = []
        for data in play(n_steps):
            pending.append(data)
            if len(pending) == 32:
                self.buffer.extend(torch.cat(pending))
                self.acknowledged += len(pending) * N_ENVS
                pending = []
        return self.acknowledged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="address of a running cluster (default: start a local one)")
    parser.add_argument("--timesteps", type=int, default=2560, help="transitions per collector (default: 2560)")
    parser.add_argument("--quick", action="store_true", help="send 512 transitions only")
    parser.add_argument("--folder", default=None, help="folder for the buffer's files (default: a temporary one)")
    options = parser.parse_args()
    n_steps = (512 if options.quick else options.timesteps) // N_ENVS
    here = os.path.dirname(os.path.abspath(__file__))
    ray.init(
        address=options.address,
        runtime_env={"env_vars": {"PYTHONPATH": here}},
        **({} if options.address else {"num_cpus": 2, "include_dashboard": False, "log_to_driver": False}),
    )
    folder = options.folder or tempfile.mkdtemp()
    buffer = CompressedRayReplayBuffer(100_000, batch_size=64, folder=folder, remote_config={"num_cpus": 0})
    collectors = [Collector.remote(buffer.client()) for _ in range(2)]  # type: ignore[attr-defined]  # Ray adds it
    victim = ray.get(collectors[0].process_id.remote())
    running = [collector.collect.remote(n_steps) for collector in collectors]
    while len(buffer) < 256:
        time.sleep(0.05)

    os.kill(victim, signal.SIGKILL)
    print("killed a collector; the learner continues:", buffer.sample()["observation"].shape)
    n_before = len(buffer)
    os.kill(buffer.process_id(), signal.SIGKILL)
    print(f"killed the buffer; it restarted with {len(buffer)} transitions, {n_before} were acknowledged before")
    print(f"{ray.get(running[1])} transitions of the other collector were acknowledged; {len(buffer)} are stored")
    usage = buffer.memory_usage()
    print(f"they take {usage.total / 1e6:.2f} MB: {usage.ratio:.2%} of those in {usage.baseline}")
    buffer.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
