"""The work of :mod:`benchmarks.service` done by Reverb, in an environment of its own: ``make reverb``.

Each frame is stored once, and an item is a trajectory of five frames: an observation and the next one, four frames
each. Server and client share a process, which is the fastest that Reverb offers.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import numpy as np

from benchmarks import feed

BATCH = 256
PACKET = 64


def main(game: str, n_steps: int, n_packets: int, n_batches: int, rounds: int) -> dict[str, Any]:
    import reverb
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    steps = [step.obs[:, -1] for step in feed.steps(game, n_steps)]
    frames = np.stack(steps)  # [step, env, height, width]
    size = frames.shape[2:]
    signature = {
        "frames": tf.TensorSpec([feed.STACK + 1, *size], tf.uint8),
        "action": tf.TensorSpec([1], tf.int64),
        "reward": tf.TensorSpec([1], tf.float32),
        "done": tf.TensorSpec([1], tf.bool),
    }
    table = reverb.Table(
        "replay", reverb.selectors.Uniform(), reverb.selectors.Fifo(), n_steps * feed.N_ENVS,
        reverb.rate_limiters.MinSize(1), signature=signature,
    )  # fmt: skip
    server = reverb.Server([table], port=None)
    client = reverb.Client(f"localhost:{server.port}")
    writers = [client.trajectory_writer(num_keep_alive_refs=feed.STACK + 1) for _ in range(feed.N_ENVS)]
    position = 0

    def send(n: int) -> None:
        nonlocal position
        for _ in range(n):
            for _ in range(PACKET):
                for env, writer in enumerate(writers):
                    writer.append(
                        {
                            "frames": frames[position % n_steps, env],
                            "action": np.int64(0),
                            "reward": np.float32(0),
                            "done": np.bool_(False),
                        }
                    )
                    if position >= feed.STACK:
                        history = writer.history
                        writer.create_item(
                            "replay",
                            1.0,
                            {
                                "frames": history["frames"][-feed.STACK - 1 :],
                                "action": history["action"][-1:],
                                "reward": history["reward"][-1:],
                                "done": history["done"][-1:],
                            },
                        )
                position += 1
            for writer in writers:
                writer.flush()

    send(n_steps // PACKET)
    dataset = reverb.TrajectoryDataset.from_table_signature(
        f"localhost:{server.port}", "replay", max_in_flight_samples_per_worker=2 * BATCH
    )
    batches = iter(dataset.map(lambda sample: sample.data).batch(BATCH, drop_remainder=True).prefetch(2))
    known = {frame.tobytes() for frame in frames.reshape(-1, *size)}
    if not all(frame.tobytes() in known for frame in next(batches)["frames"].numpy()[:8].reshape(-1, *size)):
        raise AssertionError("Reverb returned frames that were not stored; it is not timed")
    rates: dict[str, list[float]] = {"in": [], "out": []}
    for _ in range(rounds):
        start = time.perf_counter()
        send(n_packets)
        rates["in"].append(n_packets * PACKET * feed.N_ENVS / (time.perf_counter() - start))
        start = time.perf_counter()
        for _ in range(n_batches):
            batch = next(batches)["frames"].numpy()
            _ = np.ascontiguousarray(batch[:, :-1]), np.ascontiguousarray(batch[:, 1:])
        rates["out"].append(n_batches * BATCH / (time.perf_counter() - start))
    return {way: statistics.median(values) for way, values in rates.items()}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], *map(int, sys.argv[2:]))))
