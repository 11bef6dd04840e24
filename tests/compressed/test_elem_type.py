"""``dtypes["elem_type"]``: observations are stored in a smaller dtype, and samples are SB3's, to the last bit."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.buffers import (
    DictReplayBuffer,
    DictRolloutBuffer,
    NStepReplayBuffer,
    ReplayBuffer,
    RolloutBuffer,
)

from sb3_extra_buffers import files
from sb3_extra_buffers.arguments import narrow
from sb3_extra_buffers.cli.main import main
from sb3_extra_buffers.compressed import (
    CompressedDictReplayBuffer,
    CompressedDictRolloutBuffer,
    CompressedHerReplayBuffer,
    CompressedNStepReplayBuffer,
    CompressedPrioritizedReplayBuffer,
    CompressedReplayBuffer,
    CompressedRolloutBuffer,
    find_buffer_dtypes,
)
from sb3_extra_buffers.errors import SpecMismatchError
from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer, GpuRolloutBuffer, find_gpu_buffer_dtypes
from sb3_extra_buffers.stores import device_base
from tests.compressed.test_buffers_her import bits, walk
from tests.contracts.buffer import (
    Step,
    assert_same_contents,
    assert_same_rollout,
    assert_same_samples,
    contents,
    is_same,
    play,
    sample,
)
from tests.contracts.store import method_params

ACTIONS = spaces.Discrete(4)
N_ENVS = 2
BYTES = spaces.Box(0, 255, (4, 20, 16), np.uint8)
FLOATS = spaces.Box(0, 255, (4, 20, 16), np.float32)
DICT = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (4, 20, 16), np.float32),
        "codes": spaces.Box(-1000, 1000, (5,), np.int64),
        "speed": spaces.Box(-1, 1, (3,), np.float32),
    }
)
DICT_TYPES = {"image": {"elem_type": np.uint8}, "codes": {"elem_type": np.int16}}
U8 = {"elem_type": np.uint8}


def widened(space: Any, n_steps: int = 60, seed: int = 0) -> Iterator[Step]:
    """Steps whose images are whole numbers from 0 to 255, in the dtype of ``space``."""
    is_dict = isinstance(space, spaces.Dict)
    narrow_space: Any = spaces.Dict({**space.spaces, "image": BYTES}) if is_dict else BYTES
    for step in play(narrow_space, N_ENVS, n_steps, seed, ACTIONS):
        if is_dict:
            obs, after = ({**part, "image": part["image"].astype(np.float32)} for part in step[:2])
        else:
            obs, after = (part.astype(space.dtype) for part in step[:2])
        yield Step(obs, after, *step[2:])


def fill(*buffers: Any, n_steps: int = 60) -> None:
    for step in widened(buffers[0].observation_space, n_steps):
        for buffer in buffers:
            buffer.add(*step)


def make(cls: Any, space: Any, size: int = 80, **options: Any) -> Any:
    if cls.__module__.startswith("stable_baselines3"):
        options = {name: value for name, value in options.items() if name in inspect.signature(cls).parameters}
    return cls(size, space, ACTIONS, "cpu", n_envs=N_ENVS, **options)


REPLAY: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "float32 as uint8": (CompressedReplayBuffer, ReplayBuffer, FLOATS, {"dtypes": U8}),
    "int64 as uint8": (
        CompressedReplayBuffer,
        ReplayBuffer,
        spaces.Box(0, 255, (4, 20, 16), np.int64),
        {"dtypes": find_buffer_dtypes((4, 20, 16), np.uint8, "rle"), "compression_method": "rle"},
    ),
    "uncompressed": (CompressedReplayBuffer, ReplayBuffer, FLOATS, {"dtypes": U8, "compression_method": "none"}),
    "gzip": (CompressedReplayBuffer, ReplayBuffer, FLOATS, {"dtypes": U8, "compression_method": "gzip1"}),
    "dict": (CompressedDictReplayBuffer, DictReplayBuffer, DICT, {"dtypes": DICT_TYPES}),
    "n-step": (CompressedNStepReplayBuffer, NStepReplayBuffer, FLOATS, {"dtypes": U8, "n_steps": 3, "gamma": 0.9}),
    "gpu": (GpuReplayBuffer, ReplayBuffer, FLOATS, {"dtypes": find_gpu_buffer_dtypes((4, 20, 16))}),
    "gpu delta": (GpuReplayBuffer, ReplayBuffer, FLOATS, {"dtypes": U8, "compression_method": "delta"}),
    "gpu dict": (GpuReplayBuffer, DictReplayBuffer, DICT, {"dtypes": DICT_TYPES, "compression_method": "delta"}),
}


@pytest.mark.parametrize("name", REPLAY)
def test_replay_buffers_sample_what_sb3_samples(name: str, tmp_path: Path) -> None:
    cls, reference, space, options = REPLAY[name]
    ours, theirs = make(cls, space, **options), make(reference, space, **options)
    fill(ours, theirs)
    assert_same_samples(ours, theirs)
    if not name.startswith("gpu"):
        assert_same_contents(contents(theirs), contents(ours))
    for other in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours), _saved(ours, tmp_path)):
        fill(other, theirs, n_steps=9)
        assert_same_samples(other, theirs, seed=1)
        fill(ours, n_steps=9)
        assert_same_samples(ours, theirs, seed=2)
        # the same state again for the next copy
        ours, theirs = make(cls, space, **options), make(reference, space, **options)
        fill(ours, theirs)


def _saved(buffer: Any, tmp_path: Path) -> Any:
    files.save(buffer, tmp_path / "buffer")
    return files.load(tmp_path / "buffer")


def test_a_vector_of_floats_takes_a_quarter_as_uint8() -> None:
    space = spaces.Box(0, 255, (1000,), np.float32)
    narrowed, plain = make(CompressedReplayBuffer, space, dtypes=U8), make(CompressedReplayBuffer, space)
    assert narrowed.observations.dtype == np.float32
    assert narrowed.held_bytes() < 0.3 * plain.held_bytes()


@pytest.mark.parametrize("cls", [CompressedReplayBuffer, GpuReplayBuffer])
def test_memory_is_compared_with_the_dtype_of_the_space(cls: Any) -> None:
    ours, theirs = make(cls, FLOATS, dtypes=U8, compression_method="none"), make(ReplayBuffer, FLOATS)
    fill(ours, theirs)
    usage = ours.memory_usage()
    assert usage.dense_observations == theirs.observations.nbytes + theirs.next_observations.nbytes
    # a quarter, and observations and their successors share the frames of stacks
    assert usage.observation_ratio == pytest.approx(0.053, rel=0.04)


def test_prioritized_and_mmap_buffers(tmp_path: Path) -> None:
    ours, theirs = make(CompressedPrioritizedReplayBuffer, FLOATS, dtypes=U8), make(ReplayBuffer, FLOATS)
    fill(ours, theirs)
    batch = sample(ours, 32, 0)[0]
    steps, envs = np.divmod(batch.indices % (ours.buffer_size * N_ENVS), N_ENVS)
    np.testing.assert_array_equal(batch.observations, theirs.observations[steps, envs])
    kept = make(CompressedReplayBuffer, FLOATS, dtypes=U8, storage="mmap", path=tmp_path / "folder")
    fill(kept)
    del kept
    assert_same_samples(files.load(tmp_path / "folder"), theirs)


def test_hindsight_replay_computes_rewards_in_the_dtype_of_the_space() -> None:
    env = bits(N_ENVS)
    space: Any = env.observation_space
    types = {key: {"elem_type": np.bool_} for key in space}
    wide = spaces.Dict({key: spaces.Box(0, 1, part.shape, np.int64) for key, part in space.items()})
    arguments: dict[str, Any] = {"env": env, "device": "cpu", "n_envs": N_ENVS}
    ours = CompressedHerReplayBuffer(80, wide, env.action_space, dtypes=types, **arguments)
    theirs = HerReplayBuffer(80, wide, env.action_space, **arguments)
    for obs, next_obs, *rest in walk(env, 60):
        obs, next_obs = ({key: part.astype(np.int64) for key, part in each.items()} for each in (obs, next_obs))
        ours.add(obs, next_obs, *rest)
        theirs.add(obs, next_obs, *rest)
    assert ours.observations["achieved_goal"].stored_dtype == np.bool_
    assert_same_samples(ours, theirs, batch_size=40)


NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not th.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize(
    "buffer_device",
    # the GPU stores with reference kernels, in main memory
    ["reference", pytest.param("cuda", marks=NEEDS_GPU), pytest.param("pinned", marks=NEEDS_GPU)],
)
@pytest.mark.parametrize("method", method_params("none", "delta", "rle", "zstd"))
@pytest.mark.parametrize("space", [FLOATS, DICT], ids=["box", "dict"])
def test_on_a_gpu(space: Any, method: str, buffer_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = "cuda"
    if buffer_device == "reference":
        monkeypatch.setattr(device_base, "stays_on_host", lambda device: False)
        monkeypatch.setattr(device_base, "has_triton", lambda: True)
        device = buffer_device = "cpu"
    reference: Any = DictReplayBuffer if space is DICT else ReplayBuffer
    dtypes = DICT_TYPES if space is DICT else U8
    options: Any = {"dtypes": dtypes, "compression_method": method, "buffer_device": buffer_device}
    ours = GpuReplayBuffer(80, space, ACTIONS, device, n_envs=N_ENVS, **options)
    theirs = reference(80, space, ACTIONS, device, n_envs=N_ENVS)
    fill(ours, theirs)
    for seed in range(3):
        assert_same_samples(ours, theirs, seed=seed)


ROLLOUT: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "box": (CompressedRolloutBuffer, RolloutBuffer, FLOATS, {"dtypes": U8}),
    "uncompressed": (CompressedRolloutBuffer, RolloutBuffer, FLOATS, {"dtypes": U8, "compression_method": "none"}),
    "dict": (CompressedDictRolloutBuffer, DictRolloutBuffer, DICT, {"dtypes": DICT_TYPES}),
    "gpu": (GpuRolloutBuffer, RolloutBuffer, FLOATS, {"dtypes": U8, "compression_method": "delta"}),
}


@pytest.mark.parametrize("name", ROLLOUT)
def test_rollouts_are_those_of_sb3(name: str, tmp_path: Path) -> None:
    cls, reference, space, options = ROLLOUT[name]
    ours, theirs = make(cls, space, 20, **options), make(reference, space, 20)
    for step in widened(space, 20):
        for buffer in (ours, theirs):
            buffer.add(step.obs, step.action, step.reward, step.done, th.zeros(N_ENVS), th.zeros(N_ENVS))
    loaded = _saved(ours, tmp_path)
    assert_same_rollout(ours, theirs, 7)
    assert_same_rollout(loaded, theirs, 7)


@pytest.mark.parametrize("value", [0.5, -1, 256, np.nan, np.inf, -0.0])
@pytest.mark.parametrize("name", ["float32 as uint8", "uncompressed", "dict", "gpu", "gpu dict"])
def test_a_value_that_does_not_survive_raises_and_changes_nothing(name: str, value: float) -> None:
    cls, _, space, options = REPLAY[name]
    ours = make(cls, space, **options)
    fill(ours)
    before = sample(ours, 32, 0)[0], ours.pos
    step = next(widened(space, 1))
    after = copy.deepcopy(step.next_obs)
    (after["image"] if isinstance(after, dict) else after)[1, 2, 3, 4] = value
    with pytest.raises(SpecMismatchError, match=r"next_obs.* holds .*elem_type.* uint8 .*0 to 255") as problem:
        ours.add(step.obs, after, *step[2:])
    assert f" holds {np.float32(value)}," in str(problem.value)
    assert ours.pos == before[1]
    is_same(sample(ours, 32, 0)[0], before[0])
    fill(ours, n_steps=1)


def test_the_command_line_shows_the_dtype_of_the_space(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = make(CompressedReplayBuffer, FLOATS, dtypes=U8)
    fill(ours)
    files.save(ours, tmp_path / "buffer")
    assert main(["info", str(tmp_path / "buffer")]) == 0
    assert "4x20x16 float32" in capsys.readouterr().out


def test_one_mapping_for_a_dict_applies_to_its_images() -> None:
    ours = make(CompressedDictReplayBuffer, DICT, dtypes=U8)
    assert ours.observations["image"].stored_dtype == np.uint8
    assert ours.observations["image"].dtype == np.float32
    assert ours.observations["codes"].dtype == np.int64


def test_an_elem_type_for_each_key_is_named() -> None:
    with pytest.raises(SpecMismatchError, match=r"dtypes\['elem_type'\] is \{'image': 'uint8'\}, which NumPy"):
        make(CompressedDictReplayBuffer, DICT, dtypes={"elem_type": {"image": "uint8"}})


@given(
    source=st.sampled_from(["f8", "f4", "i8", "i4", "u8", "u2"]),
    target=st.sampled_from(["f4", "f2", "i4", "i2", "i1", "u4", "u2", "u1", "?"]),
    data=st.data(),
)
def test_narrow_keeps_every_bit_or_raises(source: str, target: str, data: Any) -> None:
    array = data.draw(hnp.arrays(source, hnp.array_shapes(max_dims=2, max_side=4)))
    if data.draw(st.booleans()):
        with np.errstate(all="ignore"):
            array = array.astype(target).astype(source)
    with np.errstate(all="ignore"):
        converted = array.astype(target)
        survives = converted.astype(source).tobytes() == array.tobytes()
        # an integer that becomes infinity does not survive, even if the processor turns it into the same integer again
        survives &= array.dtype.kind == "f" or bool(np.isfinite(converted).all())
    if not survives:
        with pytest.raises(SpecMismatchError, match="elem_type"):
            narrow(array, np.dtype(target), "obs")
        return
    stored = narrow(array, np.dtype(target), "obs")
    assert stored.dtype == np.dtype(target)
    assert stored.astype(source).tobytes() == array.tobytes()
