"""Makes the golden folders that every later version must load: a small one of each kind.

``python -m tests.golden.saved.make`` makes those that are missing. Existing ones are never made again, so that they
stay as older versions wrote them. To add a kind, add a line to `MAKERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sb3_extra_buffers import files
from sb3_extra_buffers.replay_buffers.embodied import CompressedEmbodiedReplay
from tests.files.filing import BUFFERS, Feed, assert_same, finish, make_array, make_table_array

HERE = Path(__file__).parent
N_STEPS = 20


class Golden(NamedTuple):
    """How to make an object from a fixed seed, and how to compare it with the loaded one."""

    make: Callable[[], Any]
    compare: Callable[[Any, Any], None] = assert_same
    one_file: bool = False


def buffer(name: str, n_steps: int = N_STEPS) -> Golden:
    def make() -> Any:
        made, feed = BUFFERS[name](), Feed(7)
        for _ in range(26 if "rollout" in name else n_steps):
            feed.add_to(made)
        return made

    return Golden(make)


def same_array(ours: Any, theirs: Any) -> None:
    assert (ours[...] == theirs[...]).all()
    theirs.store.check()


def make_embodied() -> CompressedEmbodiedReplay:
    replay, rng = CompressedEmbodiedReplay(5, 40, compression_method="delta"), np.random.default_rng(7)
    for number in range(40):
        for worker in range(2):
            image = rng.integers(0, 2, (16, 16, 3), np.uint8)
            replay.add({"image": image, "reward": np.float32(number), "is_first": number % 9 == 0}, worker)
    return replay


def same_embodied(ours: CompressedEmbodiedReplay, theirs: CompressedEmbodiedReplay) -> None:
    assert len(ours) == len(theirs) == 40
    batches = ours.sample(64), theirs.sample(64)  # both draw with the same seed
    for key in ("image", "reward", "is_first"):
        np.testing.assert_array_equal(batches[0][key], batches[1][key])


#: by tag
MAKERS: dict[str, Golden] = {
    "array": Golden(lambda: make_array(20)[0], same_array),
    "array-palette": Golden(lambda: make_table_array("palette"), same_array),
    "array-table": Golden(lambda: make_table_array("table"), same_array),
    "replay": buffer("replay-delta", 40),
    "replay-gzip": buffer("replay-gzip", 40),
    "replay-camera": buffer("replay-camera", 40),
    "replay-scroll": buffer("replay-scroll", 40),
    "replay-scroll2": buffer("replay-scroll2", 40),
    "replay-shared-frames": buffer("replay-dense", 40),
    "replay-undecided": buffer("replay", 3),
    "dict-replay": buffer("dict"),
    "dict-replay-timeline": buffer("dict", 40),
    "n-step-replay": buffer("n-step"),
    "dict-n-step-replay": buffer("dict-n-step"),
    "her-replay": buffer("her-infos"),
    "prioritized-replay": buffer("prioritized"),
    "dict-prioritized-replay": buffer("dict-prioritized"),
    "sequence-replay": buffer("sequence", 40),
    "dict-sequence-replay": buffer("dict-sequence"),
    "rollout": buffer("rollout"),
    "dict-rollout": buffer("dict-rollout"),
    "maskable-rollout": buffer("maskable-rollout"),
    "maskable-dict-rollout": buffer("maskable-dict-rollout"),
    "recurrent-rollout": buffer("recurrent-rollout"),
    "recurrent-dict-rollout": buffer("recurrent-dict-rollout"),
    "gpu-replay": buffer("gpu-frames"),
    "gpu-replay-rle": buffer("gpu-rle"),
    "gpu-n-step-replay": buffer("gpu-n-step"),
    "gpu-prioritized-replay": buffer("gpu-prioritized"),
    "gpu-sequence-replay": buffer("gpu-sequence", 40),
    "gpu-her-replay": buffer("gpu-her"),
    "gpu-rollout": buffer("gpu-frames-rollout"),
    "embodied": Golden(make_embodied, same_embodied),
}


def load(name: str) -> Any:
    loaded = (files.load_file if MAKERS[name].one_file else files.load)(HERE / name)
    finish(loaded)
    return loaded


def main() -> None:
    for name, golden in MAKERS.items():
        if not (HERE / name).exists():
            (files.save_file if golden.one_file else files.save)(golden.make(), HERE / name)
            print(f"made {name}")


if __name__ == "__main__":
    main()
