"""Shared by the tests of files: buffers of every kind, reproducible transitions, and a complete comparison."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv

from sb3_extra_buffers import compressed as door
from sb3_extra_buffers import gpu_buffers
from sb3_extra_buffers.compressed import CompressedArray
from sb3_extra_buffers.errors import FileWriteError
from sb3_extra_buffers.stores import device_base
from sb3_extra_buffers.stores.device_base import IndexBatch
from sb3_extra_buffers.stores.device_columns import DeviceTable
from sb3_extra_buffers.stores.device_observation import DeviceObservationStore
from sb3_extra_buffers.stores.view import StoreView
from tests.contracts.store import Stacked, Walk

N_ENVS = 2
IMAGE = (2, 18, 20)
BOX = spaces.Box(0, 255, IMAGE, np.uint8)
DICT = spaces.Dict({"pixels": BOX, "speed": spaces.Box(-np.inf, np.inf, (3,), np.float32)})
GOALS = spaces.Dict(
    {
        "observation": BOX,
        "achieved_goal": spaces.Box(-1, 1, (2,), np.float32),
        "desired_goal": spaces.Box(-1, 1, (2,), np.float32),
    }
)
ACTIONS = spaces.Discrete(5, start=0)


class GoalEnv:
    """The part of a VecEnv that HER uses."""

    def env_method(self, name: str, achieved: Any, desired: Any, infos: Any, **_: Any) -> list[Any]:
        assert name == "compute_reward"
        return [np.abs(achieved - desired).sum(axis=-1).astype(np.float32)]


class Feed:
    """Transitions for any of the buffers; feeds with the same seed give the same ones."""

    def __init__(self, seed: int = 0, episode: int = 9) -> None:
        self.rng = np.random.default_rng(seed)
        self.envs = [Stacked(Walk(IMAGE[1:], 10 * seed + env), IMAGE[0], "first", episode) for env in range(N_ENVS)]
        self.step = 0
        self.episode = episode

    def images(self) -> tuple[Any, Any]:
        pairs = [env.step() for env in self.envs]
        return np.stack([pair[0] for pair in pairs]), np.stack([pair[1] for pair in pairs])

    def add_to(self, *buffers: Any, numbered: bool = False) -> None:
        """Add the next transition to all of ``buffers``; if ``numbered``, its reward is its number."""
        obs, next_obs = self.images()
        self.step += 1
        done = np.full(N_ENVS, self.step % self.episode == 0)
        action = self.rng.integers(0, 5, (N_ENVS, 1))
        reward = self.rng.normal(size=N_ENVS).astype(np.float32)
        if numbered:
            reward[:] = self.step
        infos = [{"TimeLimit.truncated": bool(done[0] and self.step % 2)} for _ in range(N_ENVS)]
        floats = self.rng.normal(size=(2, N_ENVS, 3)).astype(np.float32)
        for buffer in buffers:
            space = buffer.observation_space
            pair: list[Any] = [obs, next_obs]
            if space == DICT:
                pair = [{"pixels": image, "speed": part} for image, part in zip(pair, floats, strict=True)]
            elif space == GOALS:
                goals = np.clip(floats[..., :2], -1, 1)
                pair = [
                    {"observation": image, "achieved_goal": part, "desired_goal": goals[0]}
                    for image, part in zip(pair, goals, strict=True)
                ]
            if getattr(buffer, "recurrent_states", None):
                states = {"h": np.repeat(reward[:, None], 4, axis=1)}
                buffer.add(pair[0], pair[1], action, reward, done, infos, recurrent_state=states)
            elif not hasattr(buffer, "advantages"):
                buffer.add(pair[0], pair[1], action, reward, done, infos)
            else:
                self._add_to_rollout(buffer, pair[0], action, reward, done)

    def _add_to_rollout(self, buffer: Any, obs: Any, action: Any, reward: Any, done: Any) -> None:
        import torch as th

        values, log_probs = (th.tensor(reward + shift, dtype=th.float32) for shift in (1, 2))
        more: dict[str, Any] = {}
        if hasattr(buffer, "action_masks"):
            more["action_masks"] = np.stack([reward > shift for shift in np.linspace(-1, 1, 5)], axis=1)
        if hasattr(buffer, "hidden_state_shape"):
            from sb3_contrib.common.recurrent.type_aliases import RNNStates

            hidden = th.arange(buffer.hidden_state_shape[1] * N_ENVS * 4).reshape(-1, N_ENVS, 4) * float(reward[0])
            more["lstm_states"] = RNNStates((hidden, hidden + 1), (hidden + 2, hidden + 3))
        buffer.add(obs, action, reward, done, values, log_probs, **more)


def replay(name: str, space: spaces.Space[Any] = BOX, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        return getattr(door, name)(26 * N_ENVS, space, ACTIONS, device="cpu", n_envs=N_ENVS, **options)

    return make


def rollout(name: str, space: spaces.Space[Any] = BOX, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        return getattr(door, name)(26, space, ACTIONS, device="cpu", n_envs=N_ENVS, **options)

    return make


def goals(copy_info_dict: bool = False) -> Callable[[], Any]:
    def make() -> Any:
        env: VecEnv = GoalEnv()  # type: ignore[assignment]  # all that HER calls
        return door.CompressedHerReplayBuffer(
            26 * N_ENVS, GOALS, ACTIONS, env, device="cpu", n_envs=N_ENVS, copy_info_dict=copy_info_dict
        )

    return make


def device(
    name: str, space: spaces.Space[Any] = BOX, method: str = "delta", reference: bool = False, **options: Any
) -> Any:
    """A buffer of `gpu_buffers` on the CPU; with ``reference``, its observations are kept as on a GPU."""

    def make() -> Any:
        size = 26 if "Rollout" in name else 26 * N_ENVS
        kept = device_base.stays_on_host
        if reference:
            device_base.stays_on_host = lambda device: False
        try:
            kind: Any = getattr(gpu_buffers, name)
            return kind(size, space, ACTIONS, device="cpu", n_envs=N_ENVS, compression_method=method, **options)
        finally:
            device_base.stays_on_host = kept

    return make


#: every class of buffer, in each configuration that saves different parts
BUFFERS: dict[str, Callable[[], Any]] = {
    "replay": replay("CompressedReplayBuffer"),
    "replay-delta": replay("CompressedReplayBuffer", compression_method="delta"),
    "replay-gzip": replay("CompressedReplayBuffer", compression_method="gzip1"),
    "replay-rle": replay("CompressedReplayBuffer", compression_method="rle"),
    "replay-palette": replay("CompressedReplayBuffer", compression_method="palette"),
    "replay-dense": replay("CompressedReplayBuffer", compression_method="none"),
    "replay-camera": replay("CompressedReplayBuffer", compression_method="camera"),
    "replay-limit": replay("CompressedReplayBuffer", compression_method="delta", max_bytes=40_000),
    "n-step": replay("CompressedNStepReplayBuffer", n_steps=3, gamma=0.9),
    "dict": replay("CompressedDictReplayBuffer", DICT),
    "dict-n-step": replay("CompressedDictNStepReplayBuffer", DICT, n_steps=2),
    "prioritized": replay("CompressedPrioritizedReplayBuffer", alpha=0.7, beta=0.5),
    "sequence": replay("CompressedSequenceReplayBuffer", recurrent_states={"h": (4,)}, prioritized=True),
    "dict-sequence": replay("CompressedDictSequenceReplayBuffer", DICT),
    "her": goals(),
    "her-infos": goals(copy_info_dict=True),
    "rollout": rollout("CompressedRolloutBuffer"),
    "dict-rollout": rollout("CompressedDictRolloutBuffer", DICT),
    "dict-prioritized": replay("CompressedDictPrioritizedReplayBuffer", DICT, alpha=0.7, beta=0.5),
    "gpu": device("GpuReplayBuffer"),
    "gpu-rle": device("GpuReplayBuffer", method="rle"),
    "gpu-dict": device("GpuReplayBuffer", DICT),
    "gpu-dense": device("GpuReplayBuffer", method="none"),
    "gpu-frames": device("GpuReplayBuffer", reference=True),
    "gpu-n-step": device("GpuNStepReplayBuffer", n_steps=2, gamma=0.9),
    "gpu-prioritized": device("GpuPrioritizedReplayBuffer", DICT, n_steps=2, alpha=0.7, beta=0.5),
    "gpu-sequence": device("GpuSequenceReplayBuffer", recurrent_states={"h": (4,)}, prioritized=True),
    "gpu-her": device("GpuHerReplayBuffer", GOALS, env=GoalEnv(), copy_info_dict=True),
    "gpu-rollout": device("GpuRolloutBuffer"),
    "gpu-frames-rollout": device("GpuRolloutBuffer", DICT, reference=True),
}

if importlib.util.find_spec("lz4") is not None:
    BUFFERS["replay-scroll"] = replay("CompressedReplayBuffer", compression_method="scroll")
if importlib.util.find_spec("zstandard") is not None and importlib.util.find_spec("lz4") is not None:
    BUFFERS["replay-scroll2"] = replay("CompressedReplayBuffer", compression_method="scroll2")
if importlib.util.find_spec("sb3_contrib") is not None:
    BUFFERS |= {
        "maskable-rollout": rollout("CompressedMaskableRolloutBuffer"),
        "maskable-dict-rollout": rollout("CompressedMaskableDictRolloutBuffer", DICT),
        "recurrent-rollout": rollout("CompressedRecurrentRolloutBuffer", hidden_state_shape=(26, 1, N_ENVS, 4)),
        "recurrent-dict-rollout": rollout(
            "CompressedRecurrentDictRolloutBuffer", DICT, hidden_state_shape=(26, 1, N_ENVS, 4)
        ),
    }


def make_array(n_steps: int = 40, method: str = "auto") -> tuple[CompressedArray, Any]:
    """An array, and the values that it holds."""
    array = CompressedArray((n_steps, N_ENVS), IMAGE, np.uint8, compression_method=method)
    truth = np.zeros(array.shape, np.uint8)
    feed = Feed(3)
    for step in range(0, n_steps, 1):
        truth[step] = feed.images()[0]
        array[step] = truth[step]
    return array, truth


def make_table_array(method: str) -> CompressedArray:
    """Images of few colours, with some of many among them (``palette``), or as floats (``table``)."""
    walk, rng = Walk((9, 14), 5), np.random.default_rng(6)
    images = np.stack([walk.step() for _ in range(40)])
    if method == "table":
        images = images.astype(np.float32) / np.float32(255)
    else:
        images = np.stack([images, images // 2, 255 - images], axis=-1)
        images[20:33] = rng.integers(0, 256, images[20:33].shape)
    array = CompressedArray(40, images.shape[1:], images.dtype, compression_method=method)
    for step, image in enumerate(images):
        array[step] = image
    return array


def finish(buffer: Any) -> None:
    """Set the env of a HER buffer, as users do after loading."""
    if hasattr(buffer, "env") and buffer.env is None:
        buffer.set_env(GoalEnv())


def batches(buffer: Any, seed: int = 5) -> list[Any]:
    """What the buffer samples from a fixed random state."""
    np.random.seed(seed)  # noqa: NPY002  # SB3 draws from this generator
    if hasattr(buffer, "advantages"):
        if not buffer.full:
            return []
        import copy

        # get() rearranges a rollout
        return [plain(part) for part in copy.deepcopy(buffer).get(7)]
    windows = [plain(buffer.sample_sequences(5, 4, 1, 2))] if hasattr(buffer, "sample_sequences") else []
    return [plain(buffer.sample(11)) for _ in range(3)] + windows


def plain(samples: Any) -> list[Any]:
    found: list[Any] = []
    for part in samples:
        if isinstance(part, dict):
            found += [np.asarray(tensor) for tensor in part.values()]
        elif isinstance(part, tuple):
            found += plain(part)
        elif part is not None:
            found.append(np.asarray(part))
    return found


def contents(buffer: Any) -> dict[str, Any]:
    """Everything that a buffer holds, by name."""
    found: dict[str, Any] = buffer.sequence_columns() if hasattr(buffer, "sequence_columns") else {}
    for name, value in vars(buffer).items():
        # _column_bytes is computed when it is first asked for, _adds_directly follows from how observations are stored
        if name in ("_options", "storage_options", "read_only", "_column_bytes", "_adds_directly"):
            continue
        parts = value if isinstance(value, dict) else {"": value}
        for key, part in parts.items():
            if isinstance(part, (np.ndarray, StoreView)):
                found[f"{name}.{key}"] = np.asarray(part)
            elif isinstance(part, DeviceTable):
                found |= part.arrays()
            elif isinstance(part, DeviceObservationStore):
                indices = IndexBatch(np.arange(part.n_obs * part.n_sets)[None])
                found[f"{name}.{key}"] = part.read(indices).numpy()
            elif isinstance(part, (int, float, str, bool)):
                found[f"{name}.{key}"] = part
    return found


def assert_same(ours: Any, theirs: Any) -> None:
    """Assert that both hold the same and sample the same batches from the same random state."""
    first, second = contents(ours), contents(theirs)
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name], err_msg=name)
    for mine, other in zip(batches(ours), batches(theirs), strict=True):
        for left, right in zip(mine, other, strict=True):
            np.testing.assert_array_equal(left, right)
    for view in vars(ours).values():
        if isinstance(view, StoreView):
            view.store.check()
    if isinstance(theirs, gpu_buffers.BaseGpuBuffer):
        theirs.check()


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def fill_disk(folder: Path, n_free: int) -> None:
    """Fill a file system up to ``n_free`` pages."""
    filler = folder / "filler"
    filler.unlink(missing_ok=True)
    usage = os.statvfs(folder)
    filler.write_bytes(bytes(max(usage.f_bavail - n_free, 0) * usage.f_bsize))


def save_or_say(attempt: Callable[[], Any]) -> str:
    """The message about a full disk, or "" if there was enough space."""
    try:
        attempt()
    except FileWriteError as error:
        said = str(error)
    else:
        return ""
    assert "No space left on device" in said
    return said
