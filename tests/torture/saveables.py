"""What can be on a disk: one small thing of every kind, how it gets there, and how it is used again."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from sb3_extra_buffers import files, recording
from sb3_extra_buffers.stores.view import StoreView
from tests.torture.subjects import (
    N_ENVS,
    SIZE,
    ArraySubject,
    Contents,
    GoalEnv,
    Sb3,
    Step,
    StorageSubject,
    Subject,
    check_stores,
    make_steps,
    subjects,
)


class Saveable:
    """How a kind is saved below a folder, loaded and used."""

    #: whether it can be opened where it lies, verified and repaired
    in_folder = False
    #: whether every step is on the disk when it was added
    live = False

    def __init__(self, name: str) -> None:
        self.name = name

    def make(self, place: Path) -> Any:
        """A new one; a live one begins to live below ``place``."""
        raise NotImplementedError

    def add(self, made: Any, step: Step) -> None:
        """Write a step to it."""
        raise NotImplementedError

    def save(self, made: Any, place: Path) -> None:
        """Save it below ``place``, again where it was saved before."""
        raise NotImplementedError

    def path(self, place: Path) -> Path:
        """Where it is then."""
        return place / "saved"

    def load(self, place: Path) -> Any:
        """Load it again."""
        raise NotImplementedError

    def contents(self, made: Any) -> Contents:
        """All that can be read of it."""
        raise NotImplementedError

    def use(self, made: Any, place: Path, steps: list[Step]) -> None:
        """Everything that a user may do with what was loaded; it may be anything."""
        raise NotImplementedError

    def fill(self, place: Path, steps: list[Step], n_saves: int = 3) -> list[Contents]:
        """Save it several times over, and tell what it held each time."""
        made, states = self.make(place), []
        when = [len(steps) * (turn + 1) // n_saves - 1 for turn in range(n_saves)]
        for number, step in enumerate(steps):
            self.add(made, step)
            if number in when:
                self.save(made, place)
                states.append({name: np.copy(value) for name, value in self.contents(made).items()})
        self.close(made)
        return states

    def close(self, made: Any) -> None:
        """Let go of files."""


class Filed(Saveable):
    """Buffers and arrays that `files.save` saves."""

    in_folder = True

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject.name)
        self.subject, self.live = subject, subject.in_file

    def make(self, place: Path) -> Any:
        return self.subject.make(place)

    def add(self, made: Any, step: Step) -> None:
        self.subject.prepare(made)
        self.subject.add(made, step)

    def path(self, place: Path) -> Path:
        return place / ("live" if self.live else "saved")

    def save(self, made: Any, place: Path) -> None:
        if not self.live:
            files.save(made, self.path(place), sync=False)

    def load(self, place: Path) -> Any:
        return set_up(files.load(self.path(place)))

    def contents(self, made: Any) -> Contents:
        return self.subject.contents(made)

    def use(self, made: Any, place: Path, steps: list[Step]) -> None:
        use_buffer(made, place)


def set_up(buffer: Any) -> Any:
    """Set what a user sets after loading."""
    if isinstance(buffer, HerReplayBuffer) and buffer.env is None:
        buffer.set_env(GoalEnv())  # type: ignore[arg-type]  # all that HER calls
    return buffer


def use_buffer(buffer: Any, place: Path) -> None:
    """Check, read, sample, add, forget and save a buffer or an array of whatever shape."""
    check_stores(buffer)
    read_all(buffer)
    if isinstance(buffer, StoreView):
        if buffer.shape[0]:
            buffer[0] = np.zeros(buffer.shape[1:], buffer.dtype)
            buffer[-1] = np.ones(buffer.shape[1:], buffer.dtype)
        check_stores(buffer)
        buffer.store.clear()
        check_stores(buffer)
        files.save(buffer, place / "out", sync=False)
        return
    sample_all(buffer)
    before = read_all(buffer)
    for name in ("rewards", "dones", "actions"):
        if name in before and before[name].shape[:2] != (buffer.buffer_size, buffer.n_envs):
            raise AssertionError(f"{name} has shape {before[name].shape}")
    add_samples(buffer, 5)
    check_stores(buffer)
    sample_all(buffer)
    files.save(buffer, place / "out", sync=False)
    buffer.reset()
    check_stores(buffer)
    add_samples(buffer, 2)
    check_stores(buffer)


def read_all(buffer: Any) -> Contents:
    """Every column and every observation."""
    if isinstance(buffer, StoreView):
        return {"array": np.asarray(buffer)}
    for subject in subjects().values():
        if type(subject) is Sb3 and not hasattr(buffer, "reconstruct_obs"):
            return subject.contents(buffer)
    found = {}
    for name in ("rewards", "dones", "actions", "pos", "full"):
        if hasattr(buffer, name):
            found[name] = np.asarray(getattr(buffer, name))
    rollout = hasattr(buffer, "advantages")
    for at in range(buffer.buffer_size * buffer.n_envs if rollout else buffer.buffer_size):
        if rollout:
            buffer.reconstruct_obs(at)
        else:
            for env in range(buffer.n_envs):
                buffer.reconstruct_obs(at, env)
                buffer.reconstruct_nextobs(at, env)
    return found


def sample_all(buffer: Any) -> None:
    """Draw from a buffer if there is anything to draw."""
    if hasattr(buffer, "advantages"):
        return
    if buffer.size() and not (isinstance(buffer, HerReplayBuffer) and not buffer.ep_length.any()):
        buffer.sample(16)
        if hasattr(buffer, "sample_sequences"):
            batch = buffer.sample_sequences(16, 3, 1, 2, online=True)
            buffer.update_recurrent_states(batch, batch.recurrent_states)


def add_samples(buffer: Any, count: int) -> None:
    """Steps drawn from the buffer's own spaces."""
    for number in range(count):
        if hasattr(buffer, "advantages") and buffer.full:
            buffer.reset()
        obs, next_obs = _draw(buffer.observation_space, buffer.n_envs), _draw(buffer.observation_space, buffer.n_envs)
        action = np.asarray(_draw(buffer.action_space, buffer.n_envs))
        reward, done = np.full(buffer.n_envs, float(number), np.float32), np.full(buffer.n_envs, number % 3 == 2)
        more: dict[str, Any] = {}
        if hasattr(buffer, "recurrent_states"):
            states = buffer.recurrent_states.items()
            more["recurrent_state"] = {name: np.ones((buffer.n_envs, *shape)) for name, shape in states}
        if not hasattr(buffer, "advantages"):
            infos = [{"TimeLimit.truncated": False}] * buffer.n_envs
            buffer.add(obs, next_obs, action, reward, done, infos, **more)
            continue
        if hasattr(buffer, "action_masks"):
            more["action_masks"] = np.ones((buffer.n_envs, buffer.mask_dims))
        if hasattr(buffer, "hidden_state_shape"):
            from sb3_contrib.common.recurrent.type_aliases import RNNStates

            hidden = th.zeros(buffer.hidden_state_shape[1:])
            more["lstm_states"] = RNNStates((hidden, hidden), (hidden, hidden))
        buffer.add(obs, action, reward, done, th.zeros(buffer.n_envs), th.zeros(buffer.n_envs), **more)


def _draw(space: Any, count: int) -> Any:
    if hasattr(space, "spaces"):
        return {key: _draw(part, count) for key, part in space.spaces.items()}
    return np.stack([np.asarray(space.sample()) for _ in range(count)])


class Recorded(Saveable):
    """A recording in a single file."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.subject = subjects()["record"]

    def make(self, place: Path) -> Any:
        return self.subject.make(place)

    def add(self, made: Any, step: Step) -> None:
        self.subject.add(made, step)

    def path(self, place: Path) -> Path:
        return place / "saved.rec"

    def save(self, made: Any, place: Path) -> None:
        made.save(self.path(place))

    def load(self, place: Path) -> Any:
        return recording.RecordBuffer.load(self.path(place))

    def contents(self, made: Any) -> Contents:
        return self.subject.contents(made)

    def use(self, made: Any, place: Path, steps: list[Step]) -> None:
        for record in made:
            del record
        made.episodes  # noqa: B018  # computed
        made.memory_usage()
        np.asarray(made.frames)
        frame, names = np.zeros(made.frame_shape, made.dtype), made.features
        for _ in range(3):
            if len(made):
                last = made[-1]
                made.add(frame, 1.0, last.action, {name: last.features[name] for name in names} or None, False)
        made.frames.store.check()
        made.save(place / "out.rec")
        made.reset()
        made.frames.store.check()


class Stored(Saveable):
    """TorchRL's storage, by `dumps` and `loads`."""

    def __init__(self, subject: StorageSubject) -> None:
        super().__init__(subject.name)
        self.subject = subject

    def make(self, place: Path) -> Any:
        return self.subject.make(place)

    def add(self, made: Any, step: Step) -> None:
        self.subject.add(made, step)

    def save(self, made: Any, place: Path) -> None:
        made.dumps(self.path(place))

    def load(self, place: Path) -> Any:
        storage = self.subject.make(place)
        storage.loads(self.path(place))
        return storage

    def contents(self, made: Any) -> Contents:
        return self.subject.contents(made)

    def use(self, made: Any, place: Path, steps: list[Step]) -> None:
        made.check()
        made.memory_usage()
        count = len(made)
        if count:
            made.get(th.arange(count))
            made.get(slice(0, count))
            made.set(th.arange(min(count, N_ENVS)), made.get(th.arange(min(count, N_ENVS))).clone())
        for step in steps[:3]:
            self.subject.add(made, step)
        made.check()
        self.subject.contents(made)
        made.dumps(place / "out")
        made._empty()
        made.check()


class Experience(Saveable):
    """The experience memory, with its contents."""

    def __init__(self, name: str, storage: str) -> None:
        super().__init__(name)
        self.storage, self._rows = storage, StorageSubject("", "auto")._rows

    def make(self, place: Path) -> Any:
        from sb3_extra_buffers.replay_buffers import ReplayBuffer

        cpu, more = th.device("cpu"), {"n_envs": N_ENVS} if self.storage == "compressed" else {}
        return ReplayBuffer(cpu, cpu, SIZE * N_ENVS, storage=self.storage, **more)  # type: ignore[arg-type]

    def add(self, made: Any, step: Step) -> None:
        from tensordict import TensorDict

        rows = {name: th.from_numpy(rows) for name, rows in self._rows(step).items()}
        made.add_batch(TensorDict(rows, batch_size=[N_ENVS]))

    def save(self, made: Any, place: Path) -> None:
        made.save(self.path(place) / "memory", contents=True)

    def load(self, place: Path) -> Any:
        made = self.make(place)
        made.load(self.path(place) / "memory")
        return made

    def contents(self, made: Any) -> Contents:
        if not made.size:
            return {}
        data = made.sample_all()
        numbers = {name: np.array(value) for name, value in made.metadata.items()}
        return {name: data.get(name).numpy() for name in ("pixels", "next", "speed", "reward", "action")} | numbers

    def use(self, made: Any, place: Path, steps: list[Step]) -> None:
        if made.size:
            made.sample_all()
            made.sample_batch(7)
        for step in steps[:3]:
            self.add(made, step)
        made.save(place / "out" / "memory", contents=True)
        made.reset()


class Service(Saveable):
    """The class behind Ray's actor, used in this process."""

    live = True

    def __init__(self, name: str, sync: bool = False) -> None:
        super().__init__(name)
        self._rows, self.sync = StorageSubject("", "auto")._rows, sync

    def make(self, place: Path) -> Any:
        from sb3_extra_buffers.replay_buffers import CompressedStorage
        from sb3_extra_buffers.replay_buffers.ray import CompressedReplayService

        storage = CompressedStorage(SIZE * N_ENVS, n_envs=N_ENVS)
        return CompressedReplayService(storage=storage, batch_size=8, folder=str(self.path(place)), sync=self.sync)

    def add(self, made: Any, step: Step) -> None:
        from tensordict import TensorDict

        rows = {name: th.from_numpy(rows) for name, rows in self._rows(step).items()}
        made.extend(TensorDict(rows, batch_size=[N_ENVS]))

    def save(self, made: Any, place: Path) -> None:
        made.checkpoint()

    def load(self, place: Path) -> Any:
        return self.make(place)

    def contents(self, made: Any) -> Contents:
        from sb3_extra_buffers._torchrl.wire import decode_packet

        count = len(made)
        if not count:
            return {}
        data = decode_packet(made.packed(th.arange(count)))
        return {name: data.get(name).numpy() for name in ("pixels", "next", "speed", "reward", "action")}

    def use(self, made: Any, place: Path, steps: list[Step]) -> None:
        self.contents(made)
        if len(made):
            made.sample()
        for step in steps[:3]:
            self.add(made, step)
        made.checkpoint()
        self.contents(made)

    def fill(self, place: Path, steps: list[Step], n_saves: int = 3) -> list[Contents]:
        made = self.make(place)
        for number, step in enumerate(steps):
            self.add(made, step)
            if number == len(steps) // 2:
                self.save(made, place)
        return [self.contents(made)]


class Embodied(Saveable):
    """DreamerV3's replay; each environment is a worker."""

    def make(self, place: Path) -> Any:
        from sb3_extra_buffers.replay_buffers.embodied import CompressedEmbodiedReplay

        return CompressedEmbodiedReplay(3, SIZE * N_ENVS, self.path(place), 8, compression_method="delta")

    def add(self, made: Any, step: Step) -> None:
        for worker in range(N_ENVS):
            values = {"image": step.image[worker], "speed": step.vectors[0, worker], "reward": step.reward[worker]}
            made.add(values, worker)

    def save(self, made: Any, place: Path) -> None:
        made.save()

    def load(self, place: Path) -> Any:
        made = files.load(self.path(place))
        made.directory = self.path(place)
        return made

    def contents(self, made: Any) -> Contents:
        # all windows, oldest first
        windows = range(made._first_window, made._next_window)
        return made._steps.read(made._slots_of(windows)) if len(made) else {}

    def use(self, made: Any, place: Path, steps: list[Step]) -> None:
        self.contents(made)
        made.memory_usage()
        if len(made):
            batch = made.sample(8)
            made.update({"stepid": batch["stepid"], "reward": batch["reward"]})
        for step in steps[:3]:
            self.add(made, step)
        self.contents(made)
        for store in made._steps.stores.values():
            store.check()
        files.save(made, place / "out", sync=False)


def _saveables() -> Iterator[Saveable]:
    for subject in subjects().values():
        if isinstance(subject, (Sb3, ArraySubject)):
            yield Filed(subject)
        elif isinstance(subject, StorageSubject):
            yield Stored(subject)
    yield Recorded("recording")
    yield Embodied("embodied")
    if importlib.util.find_spec("torchrl") is not None:
        yield Experience("experience", "compressed")
        yield Experience("experience-tensors", "auto")
    if importlib.util.find_spec("ray") is not None:
        yield Service("service")


@cache
def saveables() -> dict[str, Saveable]:
    """Every kind by name."""
    return {saveable.name: saveable for saveable in _saveables()}


def look_at_folder(saveable: Saveable, place: Path) -> list[Any]:
    """Further ways to read a folder, each a function that may raise."""
    path = saveable.path(place)

    def read_in_place() -> None:
        opened = set_up(files.open_saved(path))
        read_all(opened)
        if not isinstance(opened, StoreView):
            sample_all(opened)

    def repair_it() -> None:
        files.repair(path, place / "repaired")
        use_buffer(set_up(files.load(place / "repaired")), place)

    def go_on() -> None:
        made = set_up(files.open_saved(path, mode="r+"))
        use_buffer(made, place)

    ways = [read_in_place, lambda: files.verify(path), repair_it]
    return [*ways, go_on] if saveable.live else ways


__all__ = ["Saveable", "make_steps", "saveables"]
