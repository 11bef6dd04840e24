"""Creates the golden folders of TorchRL's kinds, which every later version must load.

``python -m tests.replay_buffers.golden`` makes those that are not there; what is there is never made again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sb3_extra_buffers import files
from sb3_extra_buffers._torchrl.service_state import ServiceState
from sb3_extra_buffers.replay_buffers.compressed_storage import CompressedStorage
from sb3_extra_buffers.replay_buffers.experience_memory import ReplayBuffer
from tests.replay_buffers.trajectories import trajectory

SAVED = Path(__file__).parents[1] / "golden" / "saved"
CPU = torch.device("cpu")


def storage(**options: Any) -> CompressedStorage:
    made = CompressedStorage(40, **options)
    for first in (0, 20, 40):
        made.set(torch.arange(first, first + 20) % 40, trajectory(60, 2, seed=11)[first : first + 20])
    return made


def experience(kind: Any) -> ReplayBuffer:
    made = ReplayBuffer(CPU, CPU, 40, storage=kind)
    data = trajectory(50, 1, seed=12)
    made.add_batch(data if kind == "compressed" else data.exclude("observation", ("next", "observation")))
    return made


def service() -> ServiceState:
    writers = {"a": (3, torch.tensor([4, 5]))}
    return ServiceState(storage(), {}, {"_cursor": 20, "_write_count": 60}, writers)


#: by the tag of the kind
MAKERS: dict[str, Callable[[], Any]] = {
    "torchrl-storage": storage,
    "torchrl-storage-gzip": lambda: storage(compression_method="gzip1", n_envs=2),
    "experience": lambda: experience("compressed"),
    "experience-tensors": lambda: experience("auto"),
    "replay-service": service,
}

if __name__ == "__main__":
    for name, make in MAKERS.items():
        if not (SAVED / name).exists():
            files.save(make(), SAVED / name)
            print(f"made {name}")
