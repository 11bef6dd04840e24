"""Record the model trained by `example_train_gpu_rollout.py`, as a GIF or MP4."""

from __future__ import annotations

from common import parse
from runs import record

if __name__ == "__main__":
    record(parse(__doc__, timesteps=1000, picture="agent.gif"), "PPO")
