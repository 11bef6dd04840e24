"""What is tortured: one small buffer of every kind, beside a dense model that holds what it must hold."""

from __future__ import annotations

import copy
import importlib.util
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import (
    DictReplayBuffer,
    DictRolloutBuffer,
    NStepReplayBuffer,
    ReplayBuffer,
    RolloutBuffer,
)
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from sb3_extra_buffers import compressed, gpu_buffers, recording
from sb3_extra_buffers.codecs import is_available
from sb3_extra_buffers.stores.view import StoreView

Array = npt.NDArray[Any]
Contents = dict[str, Array]

N_ENVS = 2
SIZE = 20  # steps that a buffer holds: the ring wraps every 20 steps
IMAGE = (4, 36, 36)
BOX = spaces.Box(0, 255, IMAGE, np.uint8)
FLOATS = spaces.Box(0, 1, IMAGE, np.float32)
COLOURS = spaces.Box(0, 255, (*IMAGE[1:], 3), np.uint8)
VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)
DICT = spaces.Dict({"pixels": BOX, "speed": VECTOR})
GOAL = spaces.Box(-1, 1, (2,), np.float32)
GOALS = spaces.Dict({"observation": BOX, "achieved_goal": GOAL, "desired_goal": GOAL})
ACTIONS = spaces.Discrete(5, start=0)


# ---- steps ----


class Step(NamedTuple):
    """One step of every environment."""

    number: int
    image: Array
    next_image: Array
    vectors: Array  # [observation or next observation, env, 3]
    action: Array
    reward: Array
    done: Array
    infos: list[dict[str, Any]]


class _Game:
    """Stacks of frames that move on; a sprite before a keyframe, or for a while nothing but noise."""

    def __init__(self, seed: int, noise: float, episode: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.noise, self.episode, self.n_noisy, self.age = noise, episode, 0, 0
        self._begin()

    def _begin(self) -> None:
        self.keyframe = self.rng.integers(0, 6, IMAGE[1:], np.uint8) * 40
        self.keyframe[self.rng.integers(0, 30) :] = self.rng.integers(256)
        self.at = self.rng.integers(0, 30, 2)
        self.age = 0
        self.stack = np.zeros(IMAGE, np.uint8)
        self.stack[-1] = self._frame()

    def _frame(self) -> Array:
        if self.n_noisy == 0 and self.rng.random() < self.noise:
            self.n_noisy = int(self.rng.integers(2, 9))
        if self.n_noisy:
            self.n_noisy -= 1
            return self.rng.integers(0, 256, IMAGE[1:], np.uint8)
        frame = self.keyframe.copy()
        self.at = np.clip(self.at + self.rng.integers(-2, 3, 2), 0, 30)
        frame[self.at[0] : self.at[0] + 5, self.at[1] : self.at[1] + 5] = 255
        return frame

    def step(self) -> tuple[Array, Array, bool]:
        before = self.stack
        self.stack = np.concatenate([before[1:], self._frame()[None]])
        after = self.stack
        self.age += 1
        ends = self.age >= self.episode or self.rng.random() < 0.03
        if ends:
            self._begin()
        return before, after, bool(ends)


def make_steps(seed: int = 0, count: int = 70) -> list[Step]:
    """The same steps for the same seed; the number of the step is in every observation."""
    rng = np.random.default_rng(seed)
    games = [_Game(97 * seed + env, 0.02 if env == 0 else 0.12, 9 + 4 * env) for env in range(N_ENVS)]
    steps = []
    for number in range(count):
        parts = [game.step() for game in games]
        done = np.array([part[2] for part in parts])
        truncated = done & (number % 2 == 0)
        reward = rng.normal(size=N_ENVS).astype(np.float32)
        reward[0] = number
        steps.append(
            Step(
                number,
                np.stack([part[0] for part in parts]),
                np.stack([part[1] for part in parts]),
                np.clip(rng.normal(size=(2, N_ENVS, 3)), -1, 1).astype(np.float32),
                rng.integers(0, 5, (N_ENVS, 1)),
                reward,
                done,
                [{"TimeLimit.truncated": bool(each), "number": number} for each in truncated],
            )
        )
    return steps


# ---- subjects ----


class Subject:
    """How a kind of buffer is made, written to and read, and the model beside it."""

    #: whether the oldest steps may be gone before their place is taken
    evicts = False
    #: whether the buffer lives in a folder, which must read as the buffer does
    in_file = False

    def __init__(self, name: str) -> None:
        self.name = name

    def make(self, folder: Path) -> Any:
        """A new buffer."""
        raise NotImplementedError

    def make_model(self) -> Any:
        """A dense one."""
        raise NotImplementedError

    def prepare(self, buffer: Any) -> None:
        """What comes before `add` and is not part of it."""

    def add(self, buffer: Any, step: Step) -> None:
        """Write a step, to the buffer or the model."""
        raise NotImplementedError

    def contents(self, buffer: Any) -> Contents:
        """All that a user can read, of the buffer or the model."""
        raise NotImplementedError

    def check(self, buffer: Any) -> None:
        """Raise if tables inside disagree."""
        check_stores(buffer)

    def batch(self, buffer: Any, seed: int) -> list[Array]:
        """What is drawn from a random state; the same from the model."""
        return []


def check_stores(buffer: Any) -> None:
    """Run the `check` of a buffer and of every store it has."""
    if isinstance(buffer, StoreView):
        buffer.store.check()
        return
    for value in vars(buffer).values():
        for part in value.values() if isinstance(value, dict) else [value]:
            if isinstance(part, StoreView):
                part.store.check()
    if hasattr(buffer, "check"):
        buffer.check()


#: columns of SB3's buffers, where they have them
_COLUMNS = (
    "actions", "rewards", "dones", "timeouts", "episode_starts", "values", "log_probs", "action_masks",
    "hidden_states_pi", "cell_states_pi", "hidden_states_vf", "cell_states_vf",
    "ep_start", "ep_length", "_current_ep_start", "pos", "full", "priorities", "max_priority",
)  # fmt: skip


class Sb3(Subject):
    """A buffer of SB3's layout; SB3's own class is the model."""

    def __init__(
        self, name: str, make: Callable[[Path], Any], model: Callable[[], Any], space: spaces.Space[Any] = BOX
    ) -> None:
        super().__init__(name)
        self._make, self._model, self.space = make, model, space
        self.evicts, self.in_file = "evict" in name, "mmap" in name

    def make(self, folder: Path) -> Any:
        return self._make(folder)

    def make_model(self) -> Any:
        return self._model()

    def prepare(self, buffer: Any) -> None:
        if hasattr(buffer, "advantages") and buffer.full:
            buffer.reset()

    def observed(self, step: Step) -> tuple[Any, Any]:
        """Observation and next observation, as the space has them."""
        if self.space is BOX:
            return step.image, step.next_image
        if self.space is FLOATS:
            return step.image / np.float32(255), step.next_image / np.float32(255)
        if self.space is COLOURS:
            # the background has few colours, noise has many: some images are outside the palette
            greys = step.image[:, -1], step.next_image[:, -1]
            return tuple(np.stack([grey, grey // 2, np.roll(grey // 40, 1, 2)], axis=-1) for grey in greys)  # type: ignore[return-value]  # of two
        if self.space is DICT:
            return tuple(  # type: ignore[return-value]  # of two
                {"pixels": image, "speed": vector}
                for image, vector in zip((step.image, step.next_image), step.vectors, strict=True)
            )
        if self.space is VECTOR:
            return tuple(step.vectors)
        goal = step.vectors[0, :, 1:]
        return tuple(  # type: ignore[return-value]  # of two
            {"observation": image, "achieved_goal": vector[:, :2], "desired_goal": goal}
            for image, vector in zip((step.image, step.next_image), step.vectors, strict=True)
        )

    def arguments(self, buffer: Any, step: Step) -> tuple[list[Any], dict[str, Any]]:
        """What `add` is called with."""
        obs, next_obs = self.observed(step)
        if not hasattr(buffer, "advantages"):
            named = {}
            if hasattr(buffer, "recurrent_states"):
                named["recurrent_state"] = {"h": np.full((N_ENVS, 3), step.number, np.float32)}
            return [obs, next_obs, step.action, step.reward, step.done, step.infos], named
        value, log_prob = th.tensor(step.reward) + 1, th.tensor(step.reward) - 1
        more: dict[str, Any] = {}
        if hasattr(buffer, "action_masks"):
            more["action_masks"] = np.stack([step.reward % 2 > shift for shift in np.linspace(-1, 2, 5)], axis=1)
        if hasattr(buffer, "hidden_state_shape"):
            from sb3_contrib.common.recurrent.type_aliases import RNNStates

            hidden = th.arange(N_ENVS * 4).reshape(1, N_ENVS, 4) * float(step.number)
            more["lstm_states"] = RNNStates((hidden, hidden + 1), (hidden + 2, hidden + 3))
        return [obs, step.action, step.reward, step.done, value, log_prob], more

    def add(self, buffer: Any, step: Step) -> None:
        positional, named = self.arguments(buffer, step)
        buffer.add(*positional, **named)

    def contents(self, buffer: Any) -> Contents:
        found = {}
        for name in _COLUMNS:
            value = getattr(buffer, name, None)
            if value is not None:
                found[name] = np.array(value)
        infos = getattr(buffer, "infos", None)
        if hasattr(buffer, "sequence_columns"):
            found |= {name: np.array(column) for name, column in buffer.sequence_columns().items()}
        if infos is not None and isinstance(buffer, HerReplayBuffer):
            found["infos"] = np.array(repr(np.asarray(infos).tolist()))
        for name in ("observations", "next_observations"):
            value = getattr(buffer, name, None)
            if isinstance(value, dict):
                found |= {f"{name}.{key}": np.array(part) for key, part in value.items()}
            elif value is not None:
                found[name] = np.array(value)
        if self.evicts:
            self._forget_evicted(buffer, found)
        return found

    def _forget_evicted(self, buffer: Any, found: Contents) -> None:
        """Leave only the newest `size` steps of the observations; the model does not know how many that are."""
        found["size"] = np.array(buffer.size())

    def batch(self, buffer: Any, seed: int) -> list[Array]:
        np.random.seed(seed)  # noqa: NPY002  # SB3 draws from this generator
        if hasattr(buffer, "advantages"):
            if not buffer.full:
                return []
            # reading a rollout rearranges it
            return [part for samples in copy.deepcopy(buffer).get(11) for part in _flat(samples)]
        if hasattr(buffer, "sample_sequences"):
            buffer.sample_sequences(5, 4)
        if self.evicts or hasattr(buffer, "max_priority"):
            # draws depend on more than the model knows
            if hasattr(buffer, "sample"):
                buffer.sample(9)
            return []
        if isinstance(buffer, HerReplayBuffer) and not buffer.ep_length.any():
            return []
        return _flat(buffer.sample(9)) if buffer.size() else []


def _flat(samples: Any) -> list[Array]:
    found: list[Array] = []
    for part in samples:
        if isinstance(part, dict):
            found += [np.asarray(tensor) for tensor in part.values()]
        elif isinstance(part, tuple):
            found += [np.asarray(tensor) for tensor in part]
        elif part is not None:
            found.append(np.asarray(part))
    return found


class Gpu(Sb3):
    """A buffer of `gpu_buffers` on the CPU."""

    def contents(self, buffer: Any) -> Contents:
        if not isinstance(buffer, gpu_buffers.BaseGpuBuffer):
            found = super().contents(buffer)
            keys = [""] if self.space is BOX else sorted(DICT.spaces)
            for name in ("observations", "next_observations"):
                parts = [found.pop(name + (f".{key}" if key else ""), None) for key in keys]
                flat = [part.reshape(SIZE, N_ENVS, -1) for part in parts if part is not None]
                if flat:
                    found[name] = np.concatenate(flat, axis=2)
            return found
        found = {name: np.array(getattr(buffer, name)) for name in _COLUMNS if getattr(buffer, name, None) is not None}
        if isinstance(buffer, gpu_buffers.GpuSequenceReplayBuffer):
            found |= {name: np.array(column) for name, column in buffer.sequence_columns().items()}
        read: Any = buffer
        if isinstance(buffer, gpu_buffers.GpuReplayBuffer):
            for name, one in (("observations", read.reconstruct_obs), ("next_observations", read.reconstruct_nextobs)):
                rows = [one(step, env).numpy() for step in range(SIZE) for env in range(N_ENVS)]
                found[name] = np.stack(rows).reshape(SIZE, N_ENVS, -1)
        else:
            rows = [read.reconstruct_obs(at).numpy() for at in range(SIZE * N_ENVS)]
            found["observations"] = np.stack(rows).reshape(N_ENVS, SIZE, -1).swapaxes(0, 1)
        return found


class PlainPrioritized(ReplayBuffer):
    """SB3's buffer with a column of priorities."""

    def __init__(self, *args: Any, alpha: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.alpha, self.max_priority = alpha, 1.0
        self.priorities = np.zeros((self.buffer_size, self.n_envs))

    def add(self, *args: Any, **kwargs: Any) -> None:
        at = self.pos
        super().add(*args, **kwargs)
        self.priorities[at] = self.max_priority**self.alpha


class PlainSequences(ReplayBuffer):
    """SB3's buffer with the columns of a buffer of sequences."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        lead, self.max_priority, self.recurrent_states = (self.buffer_size, self.n_envs), 1.0, {"h": (3,)}
        self.is_first = np.zeros(lead, np.bool_)
        self.states, self.priorities = np.zeros((*lead, 3), np.float32), np.zeros(lead)
        self.next_is_first = np.ones(self.n_envs, np.bool_)

    def add(self, *args: Any, recurrent_state: Any = None, **kwargs: Any) -> None:
        at = self.pos
        super().add(*args, **kwargs)
        self.is_first[at], self.states[at] = self.next_is_first, recurrent_state["h"]
        self.next_is_first, self.priorities[at] = args[4].astype(bool), 1.0

    def sequence_columns(self) -> Contents:
        return {
            "is_first": self.is_first, "next_is_first": self.next_is_first, "states/h": self.states,
            "unseen_steps": np.zeros(self.n_envs, np.int64), "priorities": self.priorities,
        }  # fmt: skip


class GoalEnv:
    """As much of a VecEnv as HER asks for."""

    def env_method(self, name: str, achieved: Any, desired: Any, infos: Any, **_: Any) -> list[Any]:
        return [np.abs(achieved - desired).sum(axis=-1).astype(np.float32)]


class ArraySubject(Subject):
    """`CompressedArray`, written by item assignment."""

    def __init__(self, name: str, method: str) -> None:
        super().__init__(name)
        self.method = method

    def make(self, folder: Path) -> Any:
        return compressed.CompressedArray((SIZE, N_ENVS), IMAGE, np.uint8, compression_method=self.method)

    def make_model(self) -> Any:
        return np.zeros((SIZE, N_ENVS, *IMAGE), np.uint8)

    def add(self, buffer: Any, step: Step) -> None:
        at = step.number * 7 % SIZE if step.number % 5 == 0 else step.number % SIZE
        if step.number % 3:
            buffer[at] = step.image
        else:
            buffer[at : at + 2] = np.stack([step.image, step.next_image])[: len(range(SIZE)[at : at + 2])]

    def contents(self, buffer: Any) -> Contents:
        return {"array": np.array(buffer)}

    def batch(self, buffer: Any, seed: int) -> list[Array]:
        rng = np.random.default_rng(seed)
        return [np.asarray(buffer[rng.integers(0, SIZE, 9), rng.integers(0, N_ENVS, 9)])]


class RecordSubject(Subject):
    """`RecordBuffer`; records of one environment."""

    def make(self, folder: Path) -> Any:
        return recording.RecordBuffer(IMAGE[1:], IMAGE[0], SIZE, compression_method="delta")

    def make_model(self) -> Any:
        return deque(maxlen=SIZE)

    def add(self, buffer: Any, step: Step) -> None:
        row = (step.image[1], float(step.reward[1]), int(step.action[1, 0]), step.vectors[0, 1], bool(step.done[1]))
        if isinstance(buffer, deque):
            buffer.append(row)
        else:
            buffer.add(row[0], row[1], row[2], {"speed": row[3]}, row[4])

    def contents(self, buffer: Any) -> Contents:
        if isinstance(buffer, deque):
            names = ("frames", "rewards", "actions", "speed", "dones")
            return {name: np.array(part) for name, part in zip(names, zip(*buffer, strict=True), strict=False)}
        if not len(buffer):
            return {}
        return {
            "frames": np.array(buffer.frames),
            "rewards": np.array(buffer.rewards),
            "actions": np.array(buffer.actions),
            "speed": np.array(buffer.features["speed"]),
            "dones": np.array(buffer.dones),
        }


class StorageSubject(Subject):
    """TorchRL's storage, written where a writer would write."""

    def __init__(self, name: str, method: str) -> None:
        super().__init__(name)
        self.method = method

    def make(self, folder: Path) -> Any:
        from sb3_extra_buffers.replay_buffers import CompressedStorage

        return CompressedStorage(SIZE * N_ENVS, n_envs=N_ENVS, compression_method=self.method)

    def make_model(self) -> Any:
        return {}

    def add(self, buffer: Any, step: Step) -> None:
        at = np.arange(N_ENVS) + step.number * N_ENVS % (SIZE * N_ENVS)
        if isinstance(buffer, dict):
            for name, part in self._rows(step).items():
                column = buffer.setdefault(name, np.zeros((SIZE * N_ENVS, *part.shape[1:]), part.dtype))
                column[at] = part
            buffer["len"] = np.array(max(int(buffer.get("len", 0)), int(at[-1]) + 1))
            return
        from tensordict import TensorDict

        rows: dict[str, Any] = {name: th.from_numpy(part) for name, part in self._rows(step).items()}
        next_pixels = rows.pop("next")
        data = TensorDict({**rows, "next": {"pixels": next_pixels}}, batch_size=[N_ENVS])
        buffer.set(th.from_numpy(at), data)

    def _rows(self, step: Step) -> dict[str, Array]:
        return {
            "pixels": step.image,
            "next": step.next_image,
            "speed": step.vectors[0],
            "reward": step.reward[:, None],
            "action": step.action,
        }

    def contents(self, buffer: Any) -> Contents:
        if isinstance(buffer, dict):
            count = int(buffer.get("len", 0))
            return {name: column[:count] if name != "len" else column for name, column in buffer.items()}
        count = len(buffer)
        if not count:
            return {}
        data = buffer.get(th.arange(count))
        found = {name: data.get(name).numpy() for name in ("pixels", "speed", "reward", "action")}
        return {**found, "next": data.get(("next", "pixels")).numpy(), "len": np.array(count)}

    def check(self, buffer: Any) -> None:
        buffer.check()


def _replay(name: str, space: spaces.Space[Any] = BOX, **options: Any) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        more = {"path": folder / "live"} if options.get("storage") == "mmap" else {}
        kind = getattr(compressed, name)
        return kind(SIZE * N_ENVS, space, ACTIONS, device="cpu", n_envs=N_ENVS, **options, **more)

    return make


def _rollout(name: str, space: spaces.Space[Any] = BOX, **options: Any) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        return getattr(compressed, name)(SIZE, space, ACTIONS, device="cpu", n_envs=N_ENVS, **options)

    return make


def _gpu(name: str, method: str, space: spaces.Space[Any] = BOX, **options: Any) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        size = SIZE if "Rollout" in name else SIZE * N_ENVS
        kind = getattr(gpu_buffers, name)
        return kind(size, space, ACTIONS, device="cpu", n_envs=N_ENVS, compression_method=method, **options)

    return make


def _plain(kind: Any, space: spaces.Space[Any] = BOX, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        size = SIZE if issubclass(kind, RolloutBuffer) else SIZE * N_ENVS
        return kind(size, space, ACTIONS, device="cpu", n_envs=N_ENVS, **options)

    return make


def _her(kind: Any, **options: Any) -> Callable[..., Any]:
    def make(folder: Path | None = None) -> Any:
        return kind(
            SIZE * N_ENVS, GOALS, ACTIONS, GoalEnv(), device="cpu", n_envs=N_ENVS, copy_info_dict=True, **options
        )

    return make


def _subjects() -> Iterator[Subject]:
    replay, plain = "CompressedReplayBuffer", _plain(ReplayBuffer)
    for method in ("auto", "delta", "delta2", "zstd", "gzip", "rle", "palette", "none", "camera", "scroll", "scroll2"):
        if is_available({"delta2": "zstd", "scroll2": "zstd"}.get(method, method)) or method == "auto":
            yield Sb3(method, _replay(replay, compression_method=method), plain)
    for method, space in (("table:camera", FLOATS), ("palette:camera", COLOURS)):
        yield Sb3(method, _replay(replay, space, compression_method=method), _plain(ReplayBuffer, space), space)
    yield Sb3("vector", _replay(replay, VECTOR), _plain(ReplayBuffer, VECTOR), VECTOR)
    yield Sb3("mmap-vector", _replay(replay, VECTOR, storage="mmap"), _plain(ReplayBuffer, VECTOR), VECTOR)
    yield Sb3("mmap", _replay(replay, compression_method="delta", storage="mmap"), plain)
    yield Sb3("mmap-auto", _replay(replay, storage="mmap"), plain)
    yield Sb3("evict", _replay(replay, compression_method="delta", max_bytes=60_000), plain)
    yield Sb3("evict-mmap", _replay(replay, compression_method="delta", max_bytes=60_000, storage="mmap"), plain)
    made = _replay("CompressedNStepReplayBuffer", n_steps=3, gamma=0.9)
    yield Sb3("n-step", made, _plain(NStepReplayBuffer, n_steps=3, gamma=0.9))
    prioritized = _replay("CompressedPrioritizedReplayBuffer", compression_method="delta", alpha=0.7, beta=0.5)
    yield Sb3("prioritized", prioritized, _plain(PlainPrioritized, alpha=0.7))
    sequences: dict[str, Any] = {"recurrent_states": {"h": 3}, "prioritized": True}
    made = _replay("CompressedSequenceReplayBuffer", compression_method="delta", **sequences)
    yield Sb3("sequence", made, _plain(PlainSequences))
    made = _replay("CompressedSequenceReplayBuffer", compression_method="delta", storage="mmap", **sequences)
    yield Sb3("sequence-mmap", made, _plain(PlainSequences))
    yield Sb3("dict", _replay("CompressedDictReplayBuffer", DICT), _plain(DictReplayBuffer, DICT), DICT)
    yield Sb3(
        "her", _her(compressed.CompressedHerReplayBuffer, compression_method="delta"), _her(HerReplayBuffer), GOALS
    )
    rollout = _rollout("CompressedRolloutBuffer", compression_method="delta")
    yield Sb3("rollout", rollout, _plain(RolloutBuffer))
    yield Sb3("dict-rollout", _rollout("CompressedDictRolloutBuffer", DICT), _plain(DictRolloutBuffer, DICT), DICT)
    if importlib.util.find_spec("sb3_contrib") is not None:
        from sb3_contrib.common.maskable.buffers import MaskableRolloutBuffer
        from sb3_contrib.common.recurrent.buffers import RecurrentRolloutBuffer

        masked = _rollout("CompressedMaskableRolloutBuffer", compression_method="delta")
        yield Sb3("maskable-rollout", masked, _plain(MaskableRolloutBuffer))
        shape: dict[str, Any] = {"hidden_state_shape": (SIZE, 1, N_ENVS, 4)}
        recurrent = _rollout("CompressedRecurrentRolloutBuffer", compression_method="delta", **shape)
        yield Sb3("recurrent-rollout", recurrent, _plain(RecurrentRolloutBuffer, **shape))
    for method in ("none", "delta", "zstd"):
        if is_available(method):
            yield Gpu(f"gpu-{method}", _gpu("GpuReplayBuffer", method), plain)
            yield Gpu(f"gpu-rollout-{method}", _gpu("GpuRolloutBuffer", method), _plain(RolloutBuffer))
    yield Gpu("gpu-sequence", _gpu("GpuSequenceReplayBuffer", "delta", **sequences), _plain(PlainSequences))
    yield Gpu("gpu-dict", _gpu("GpuReplayBuffer", "delta", DICT), _plain(DictReplayBuffer, DICT), DICT)
    for method in ("delta", "zstd", "none"):
        if is_available(method):
            yield ArraySubject(f"array-{method}", method)
    yield RecordSubject("record")
    if importlib.util.find_spec("torchrl") is not None:
        for method in ("auto", "delta", "zstd"):
            if is_available(method) or method == "auto":
                yield StorageSubject(f"torchrl-{method}", method)


@cache
def subjects() -> dict[str, Subject]:
    """Every kind by name."""
    return {subject.name: subject for subject in _subjects()}


@cache
def warm_up() -> None:
    """Load the compiled kernels, so that no child has to."""
    for name in ("delta", "gpu-delta"):
        subject = subjects()[name]
        buffer = subject.make(Path())
        for step in make_steps(0, 30):
            subject.add(buffer, step)
        subject.contents(buffer)
        subject.batch(buffer, 0)


def use_reference_kernels() -> None:
    """Let this process, a child as a rule, find no compiled kernels."""
    from sb3_extra_buffers.kernels import dispatch, tables

    dispatch.has_numba = tables.has_numba = lambda: False  # type: ignore[attr-defined]  # imported there
    tables.table_kernels.cache_clear()
    dispatch.frame_kernels.cache_clear()
    dispatch.timeline_kernels.cache_clear()
    dispatch.step_kernels.cache_clear()


def difference(found: Contents, expected: Contents) -> str | None:
    """The first thing in which a buffer is not as expected."""
    found, expected = dict(found), dict(expected)
    size, expected_size = found.pop("size", None), expected.pop("size", None)
    if found.keys() != expected.keys():
        return f"it has {sorted(found)}, expected {sorted(expected)}"
    kept = None
    if size is not None and expected_size is not None:
        if not 0 < int(size) <= int(expected_size) and int(expected_size):
            return f"size is {size}, expected 1 to {expected_size}"
        kept = (int(found["pos"]) - 1 - np.arange(int(size))) % SIZE
    # small things first: they say more
    for name in sorted(found, key=lambda name: found[name].size):
        ours, theirs = found[name], expected[name]
        if kept is not None and "observations" in name:
            ours, theirs = ours[kept], theirs[kept]
        if ours.shape != theirs.shape:
            return f"{name} has shape {ours.shape}, expected {theirs.shape}"
        same = ours == theirs
        if not np.all(same):
            where = [int(axis[0]) for axis in np.nonzero(~np.asarray(same))] if np.ndim(same) else []
            return f"{name} differs first at {where[:2]}: {np.sum(~np.asarray(same))} values"
    return None
