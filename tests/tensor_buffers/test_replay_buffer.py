"""`TensorReplayBuffer` returns what was added, whatever the method, the device and the way it is called."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from sb3_extra_buffers.errors import (
    ArgumentError,
    CodecOptionError,
    EmptyBufferError,
    HeapFullError,
    PriorityError,
    SpecMismatchError,
    StaleIndexError,
    UnknownCodecError,
)
from sb3_extra_buffers.tensor_buffers import TensorReplayBuffer

GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)
DEVICES = ["cpu", GPU]
SHAPE = (4, 12, 10)
SPECS: dict[str, Any] = {
    "obs": (SHAPE, torch.uint8),
    "actions": ((), torch.int64),
    "rewards": ((), torch.float32),
    "dones": ((), torch.bool),
    "truncations": ((), torch.bool),
    "logits": ((3,), torch.float16),
}


class Game:
    """Stacks of moving images; ``actions`` number the transitions in the order of `add`."""

    def __init__(self, n_envs: int, seed: int = 0) -> None:
        self.rng, self.n_envs = np.random.default_rng(seed), n_envs
        self.frames = self.rng.integers(0, 256, (n_envs, *SHAPE), np.uint8)
        self.steps: list[dict[str, np.ndarray]] = []

    def step(self) -> dict[str, np.ndarray]:
        frame = self.frames[:, -1:].copy()
        frame[:, :, self.rng.integers(12), self.rng.integers(10)] = self.rng.integers(256)
        following = np.concatenate([self.frames[:, 1:], frame], axis=1)
        dones, truncations = self.rng.random((2, self.n_envs)) < 0.1
        step = {
            "obs": self.frames,
            "next_obs": following,
            "actions": np.arange(self.n_envs) + len(self.steps) * self.n_envs,
            "rewards": self.rng.normal(size=self.n_envs).astype(np.float32),
            "dones": dones & ~truncations,
            "truncations": truncations,
            "logits": self.rng.normal(size=(self.n_envs, 3)).astype(np.float16),
        }
        self.steps.append(step)
        fresh = self.rng.integers(0, 256, (self.n_envs, *SHAPE), np.uint8)
        ended = (dones | truncations)[:, None, None, None]
        self.frames = np.where(ended, fresh, following)
        return step

    def column(self, name: str) -> np.ndarray:
        """Everything that was added, by transition number."""
        return np.concatenate([step[name] for step in self.steps])


def make(device: str = "cpu", n_added: int = 40, capacity: int = 60, **options: Any) -> tuple[TensorReplayBuffer, Game]:
    n_envs = options.pop("n_envs", 3)
    arguments: dict[str, Any] = {"compression_method": "delta", "seed": 0} | options
    buffer = TensorReplayBuffer(capacity, SPECS, n_envs, device, **arguments)
    game = Game(n_envs)
    for _ in range(n_added):
        buffer.add(on_device(game.step(), device))
    return buffer, game


def on_device(step: dict[str, np.ndarray], device: str) -> dict[str, Any]:
    if device == "cpu":
        return dict(step)
    return {name: torch.as_tensor(value, device=device) for name, value in step.items()}


def assert_is_of(batch: dict[str, torch.Tensor], game: Game, names: Any = None) -> None:
    """Every transition of ``batch`` was added like this."""
    numbers = batch["actions"].cpu().numpy()
    for name in names or batch:
        np.testing.assert_array_equal(batch[name].cpu(), game.column(name)[numbers], name)


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", ["delta", "none", "auto", "zstd"])
@pytest.mark.parametrize("n_added", [1, 12, 45])
def test_batches_are_transitions_that_were_added(device: str, method: str, n_added: int) -> None:
    if method == "zstd":
        pytest.importorskip("zstandard")
    buffer, game = make(device, n_added, compression_method=method)
    buffer.check()

    batch = buffer.sample(2000)

    assert_is_of(batch, game)
    n_held = min(n_added * 3, 60)
    assert len(buffer) == n_held
    assert {name: tensor.dtype for name, tensor in batch.items() if name != "next_obs"} == {
        name: dtype for name, (_, dtype) in SPECS.items()
    }
    # all that are held and no others
    numbers = set(batch["actions"].tolist())
    assert numbers == set(range(n_added * 3 - n_held, n_added * 3))


@pytest.mark.parametrize("device", DEVICES)
def test_arrays_and_tensors_of_other_dtypes_and_devices_may_be_added(device: str) -> None:
    buffer, game = make(device, 3)
    step = game.step()
    buffer.add({
        **step,
        "obs": torch.as_tensor(step["obs"], device=device),
        "rewards": step["rewards"].astype(np.float64),
        "actions": step["actions"].astype(np.int32),
        "logits": torch.as_tensor(step["logits"], device=device).float(),
        "dones": torch.as_tensor(step["dones"]),
    })  # fmt: skip

    assert_is_of(buffer.sample(200), game)


@pytest.mark.parametrize("device", DEVICES)
def test_arrays_that_cannot_be_written_to_may_be_added(device: str) -> None:
    buffer, game = make(device, n_added=0)
    step = game.step()
    for array in step.values():
        array.flags.writeable = False

    buffer.add(step)

    assert_is_of(buffer.sample(8), game)


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_added_may_be_overwritten_afterwards(device: str) -> None:
    buffer, game = make(device, 5)
    step = on_device(game.step(), device)
    given = {name: torch.as_tensor(value).clone() for name, value in step.items()}
    buffer.add(given)
    for value in given.values():
        value.zero_()

    assert_is_of(buffer.sample(200), game)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"image_dtype": torch.float32, "random_shift": 2}, {"alpha": 0.5}])
def test_a_batch_is_written_to_given_tensors(device: str, options: dict[str, Any]) -> None:
    buffer, game = make(device, **options)
    twin, _ = make(device, **options)
    out = buffer.sample(16)
    addresses = {name: tensor.data_ptr() for name, tensor in out.items()}
    # next observations elsewhere in memory
    apart = {name: torch.full_like(tensor, 7) for name, tensor in out.items()}

    filled = buffer.sample(16, out=out)
    assert {name: tensor.data_ptr() for name, tensor in filled.items()} == addresses
    twin.sample(16)
    assert equal(filled, twin.sample(16))
    for _ in range(2):
        assert equal(buffer.sample(16, out=apart), twin.sample(16))
    assert equal(buffer.sample(16, out=out), twin.sample(16))
    with pytest.raises(SpecMismatchError, match=r"\(15, 4, 12, 10\)"):
        buffer.sample(15, out=out)
    assert equal(buffer.sample(16, out=apart), twin.sample(16))
    assert_is_of(apart, game, ["rewards", "dones", "logits"])


@pytest.mark.parametrize("device", DEVICES)
def test_seeds_and_generators_decide_what_is_drawn(device: str) -> None:
    buffer, _ = make(device, seed=1)
    same, _ = make(device, seed=1)
    other, _ = make(device, seed=2)
    given, _ = make(device, seed=None, generator=torch.Generator(device).manual_seed(1))
    default, _ = make(device, seed=None)
    torch.manual_seed(1)

    first = buffer.sample(64)
    assert equal(first, same.sample(64))
    assert equal(first, given.sample(64))
    assert equal(first, default.sample(64))
    assert not equal(first, other.sample(64))
    assert not equal(first, buffer.sample(64))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"n_steps": 3, "alpha": 0.7}])
def test_copies_draw_the_same_batches_and_are_independent(device: str, options: dict[str, Any]) -> None:
    buffer, game = make(device, **options)
    if options:
        drawn = buffer.sample(8)
        buffer.update_priorities(drawn["indices"], drawn["rewards"])
    copies = [copy.deepcopy(buffer), copy.copy(buffer), pickle.loads(pickle.dumps(buffer))]
    expected = buffer.sample(32)
    buffer.add(on_device(game.step(), device))

    for copied in copies:
        copied.check()
        assert len(copied) == 60
        assert copied.n_added == 120
        assert equal(copied.sample(32), expected)
    copies[0].add(on_device(game.step(), device))
    copies[0].check()


@pytest.mark.parametrize("device", DEVICES)
def test_several_observations_and_vectors(device: str) -> None:
    specs: dict[str, Any] = {
        "image": ((12, 10, 3), np.uint8),
        "vector": (5, torch.float32),
        "next_vector": (5, torch.float32),
        "actions": ((2,), torch.bfloat16),
    }
    buffer = TensorReplayBuffer(100, specs, 2, device, observations=("image", "vector"), compression_method="none")
    rng = np.random.default_rng(0)
    images, vectors = rng.integers(0, 256, (61, 2, 12, 10, 3), np.uint8), rng.normal(size=(61, 2, 5)).astype("f4")
    vectors[:, :, 0] = np.arange(122).reshape(61, 2)
    for i in range(60):
        buffer.add({
            "image": images[i], "next_image": images[i + 1], "vector": vectors[i], "next_vector": vectors[i + 1],
            "actions": torch.as_tensor(vectors[i, :, :2]),
        })  # fmt: skip
    batch = {name: tensor.cpu() for name, tensor in buffer.sample(64).items()}

    numbers = batch["vector"][:, 0].long().numpy()
    assert numbers.min() >= 20
    np.testing.assert_array_equal(batch["image"], images.reshape(122, 12, 10, 3)[numbers])
    np.testing.assert_array_equal(batch["next_image"], images.reshape(122, 12, 10, 3)[numbers + 2])
    np.testing.assert_array_equal(batch["next_vector"], vectors.reshape(122, 5)[numbers + 2])
    assert torch.equal(batch["actions"], torch.as_tensor(vectors.reshape(122, 5)[numbers, :2]).bfloat16())
    assert "image: none" in str(buffer.memory_usage())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"alpha": 0.6}])
def test_an_emptied_buffer_draws_only_what_is_added_afterwards(device: str, options: dict[str, Any]) -> None:
    buffer, game = make(device, 25, **options)
    buffer.reset()
    buffer.check()
    assert len(buffer) == 0
    with pytest.raises(EmptyBufferError, match="add transitions"):
        buffer.sample(4)
    for _ in range(2):
        buffer.add(on_device(game.step(), device))

    buffer.check()
    assert set(buffer.sample(100)["actions"].tolist()) == set(range(75, 81))


def test_memory_is_compared_with_dense_tensors() -> None:
    buffer, _ = make(n_added=100, capacity=600)
    usage = buffer.memory_usage()

    assert usage.transitions == 300
    assert usage.dense == 300 * (2 * 480 + 8 + 4 + 1 + 1 + 6)
    assert usage.total < usage.dense
    assert "in dense tensors" in str(usage)
    assert "300 of 600 transitions on cpu" in repr(buffer)


# ---- n-step returns ----


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n_added", [7, 20, 33])
@pytest.mark.parametrize("n_steps", [2, 5])
def test_n_step_batches_are_those_of_sb3(
    device: str, n_added: int, n_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gymnasium import spaces
    from stable_baselines3.common.buffers import NStepReplayBuffer

    buffer, game = make(device, n_added, n_steps=n_steps, gamma=0.97)
    sb3 = NStepReplayBuffer(
        60, spaces.Box(0, 255, SHAPE, np.uint8), spaces.Discrete(999), "cpu", 3, n_steps=n_steps, gamma=0.97
    )
    for step in game.steps:
        infos = [{"TimeLimit.truncated": bool(value)} for value in step["truncations"]]
        ended = step["dones"] | step["truncations"]
        sb3.add(step["obs"], step["next_obs"], step["actions"][:, None], step["rewards"], ended, infos)
    batch = {name: tensor.cpu() for name, tensor in buffer.sample(200).items()}
    steps, envs = np.divmod(batch["actions"].numpy(), 3)
    monkeypatch.setattr(np.random, "randint", lambda *_, **__: envs)
    expected = sb3._get_samples(steps % 20)

    assert torch.equal(batch["actions"], expected.actions[:, 0])
    assert torch.equal(batch["obs"], expected.observations)
    assert torch.equal(batch["next_obs"], expected.next_observations)
    assert torch.equal(batch["rewards"], expected.rewards[:, 0])
    assert torch.equal(batch["dones"].float(), expected.dones[:, 0])
    assert expected.discounts is not None
    assert torch.equal(batch["discounts"], expected.discounts[:, 0])


@pytest.mark.parametrize("device", DEVICES)
def test_rewards_and_dones_may_have_an_axis_of_length_1_and_any_dtype(device: str) -> None:
    specs: dict[str, Any] = {"obs": (2, "f4"), "rewards": ((1,), "f4"), "dones": ((1,), "f4")}
    buffer = TensorReplayBuffer(10, specs, device=device, n_steps=3, gamma=0.5)
    for reward, done in ((1.0, -0.0), (2.0, 1.0), (4.0, 0.0), (8.0, 0.0)):
        obs = np.full((1, 2), reward, np.float32)
        buffer.add({"obs": obs, "next_obs": obs + 1, "rewards": [[reward]], "dones": [[done]]})
    batch = {name: tensor.cpu() for name, tensor in buffer.sample(100).items()}

    expected = {1.0: (2.0, 0.25, 3.0), 2.0: (2.0, 0.5, 3.0), 4.0: (8.0, 0.25, 9.0), 8.0: (8.0, 0.5, 9.0)}
    assert batch["rewards"].shape == batch["dones"].shape == (100, 1)
    columns = [batch["obs"][:, 0], batch["rewards"], batch["discounts"], batch["next_obs"][:, 0]]
    rows = torch.stack([column.flatten() for column in columns], 1).tolist()
    assert {first: tuple(rest) for first, *rest in rows} == expected


# ---- priorities ----


@pytest.mark.parametrize("device", DEVICES)
def test_priorities_and_weights_are_those_of_the_sb3_buffer(device: str) -> None:
    from gymnasium import spaces

    from sb3_extra_buffers.compressed import CompressedPrioritizedReplayBuffer

    buffer, game = make(device, 10, alpha=0.6, beta=0.5)
    sb3: Any = CompressedPrioritizedReplayBuffer(
        60, spaces.Box(0, 255, SHAPE, np.uint8), spaces.Discrete(999), "cpu", 3, alpha=0.6, beta=0.5
    )
    for step in game.steps:
        sb3.add(step["obs"], step["next_obs"], step["actions"][:, None], step["rewards"], step["dones"], [{}] * 3)
    rng = np.random.default_rng(0)
    for _ in range(15):
        batch = buffer.sample(32)
        assert_is_of(batch, game, ["obs", "next_obs", "rewards"])
        assert torch.equal(batch["indices"], batch["actions"])
        errors = rng.random(32).astype(np.float32) * 3
        indices = batch["indices"].cpu().numpy()
        weights = (sb3._tree.minimum / sb3._tree.read(indices % 60)) ** 0.5
        np.testing.assert_allclose(batch["weights"].cpu(), weights, rtol=1e-6)
        buffer.update_priorities(batch["indices"], torch.as_tensor(errors, device=device))
        sb3.update_priorities(indices, errors)
        step = game.step()
        buffer.add(on_device(step, device))
        sb3.add(step["obs"], step["next_obs"], step["actions"][:, None], step["rewards"], step["dones"], [{}] * 3)
    buffer.check()
    np.testing.assert_allclose(buffer.priorities.cpu(), sb3.priorities, rtol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
def test_transitions_are_drawn_in_proportion_to_their_priorities(device: str) -> None:
    buffer, _ = make(device, 4, alpha=1.0, epsilon=1e-9)
    numbers = torch.arange(12, device=device)
    # given twice: the last one counts
    buffer.update_priorities(torch.cat([numbers, numbers]), torch.cat([numbers * 0 + 9.0, -numbers.float()]))

    counts = torch.bincount(buffer.sample(66_000)["indices"], minlength=12).cpu()
    # one from each of 66,000 equal parts: 1,000 for each unit of priority, give or take one
    assert (counts - torch.arange(12) * 1000).abs().max() <= 1


@pytest.mark.parametrize("device", DEVICES)
def test_beta_can_be_changed(device: str) -> None:
    buffer, _ = make(device, 4, alpha=1.0, beta=1.0)
    buffer.update_priorities(torch.arange(12), torch.arange(12) + 1.0)
    batch = buffer.sample(50)
    np.testing.assert_allclose(batch["weights"].cpu(), 1 / (batch["indices"].cpu() + 1.0), rtol=1e-5)

    buffer.beta = 0.0
    assert bool((buffer.sample(50)["weights"] == 1).all())


def test_invalid_updates_raise_on_the_cpu_and_change_nothing() -> None:
    buffer, _ = make(n_added=25, alpha=0.6)
    before = buffer.priorities

    with pytest.raises(StaleIndexError, match=r"1 of 2 indices \(the first is 14\).*holds 15 to 74"):
        buffer.update_priorities(torch.tensor([15, 14]), torch.ones(2))
    with pytest.raises(PriorityError, match=r"1 of 2 TD errors are NaN or infinite \(the first is nan\)"):
        buffer.update_priorities(torch.tensor([15, 16]), torch.tensor([1.0, torch.nan]))
    with pytest.raises(PriorityError, match=r"2 indices .* and 1 TD errors"):
        buffer.update_priorities(torch.tensor([15, 16]), torch.ones(1))
    with pytest.raises(PriorityError, match=r"1 TD errors \(torch.bool\)"):
        buffer.update_priorities(torch.tensor([15]), torch.tensor([True]))
    with pytest.raises(PriorityError, match="create it with alpha"):
        make()[0].update_priorities(torch.tensor([15]), torch.ones(1))

    assert torch.equal(buffer.priorities, before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_invalid_updates_are_skipped_and_counted_on_a_gpu() -> None:
    buffer, _ = make("cuda", n_added=25, alpha=1.0)
    indices, errors = [15, 14, 75, 16], [4.0, 9.0, 9.0, float("nan")]
    buffer.update_priorities(torch.tensor(indices, device="cuda"), torch.tensor(errors, device="cuda"))

    assert buffer.skipped_updates == 3
    assert sorted(buffer.priorities.flatten().tolist())[-2:] == pytest.approx([1, 4 + 1e-6])
    buffer.check()


# ---- images ----


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_images_are_scaled(device: str, dtype: torch.dtype) -> None:
    buffer, _ = make(device, image_dtype=dtype)
    twin, _ = make(device)

    batch, expected = buffer.sample(20), twin.sample(20)
    for name in ("obs", "next_obs"):
        assert torch.equal(batch[name], (expected[name].float() * (1 / 255)).to(dtype))
    assert torch.equal(batch["rewards"], expected["rewards"])


@pytest.mark.parametrize("device", DEVICES)
def test_images_are_shifted_at_random_and_frames_of_a_stack_together(device: str) -> None:
    specs: dict[str, Any] = {"obs": ((3, 12, 10), torch.uint8)}
    buffer = TensorReplayBuffer(10, specs, device=device, compression_method="none", random_shift=2, seed=0)
    # the value of a pixel is its position; all frames are the same
    image = np.broadcast_to(np.arange(120, dtype=np.uint8).reshape(12, 10), (1, 3, 12, 10))
    buffer.add({"obs": image, "next_obs": image})

    batch = {name: tensor.cpu() for name, tensor in buffer.sample(500).items()}
    shifts = {}
    for name, images in batch.items():
        assert bool((images == images[:, :1]).all())
        # in the middle no border is seen: the pixel is where it came from
        shifts[name] = torch.stack([images[:, 0, 6, 5] // 10 - 6, images[:, 0, 6, 5] % 10 - 5], 1)
        assert {tuple(shift) for shift in shifts[name].to(torch.int8).tolist()} == {
            (down, right) for down in range(-2, 3) for right in range(-2, 3)
        }
    assert not torch.equal(shifts["obs"], shifts["next_obs"])


# ---- mistakes ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity must be an integer of at least 1, got 0"),
        ({"specs": {}}, "specs must be a dict"),
        ({"specs": {"obs": 3}}, r"specs\['obs'\] must be a pair of shape and dtype, got 3"),
        ({"specs": {"obs": ((3,), "nosuch")}}, "nosuch"),
        ({"observations": ("image",)}, r"observations must name some of 'obs', .* got \('image',\)"),
        ({"specs": {"obs": ((3,), torch.uint8), "next_obs": ((4,), torch.uint8)}}, "'next_obs' must have the shape"),
        ({"specs": {"obs": ((3,), torch.bfloat16)}}, "cannot be stored as torch.bfloat16"),
        ({"device": "meta"}, "device='meta' cannot be used"),
        ({"device": "nosuch"}, "device='nosuch' is not a torch device"),
        ({"compression_method": 3}, "compression_method must be a string, got 3"),
        ({"alpha": 2}, "alpha must be from 0"),
        ({"alpha": "x"}, "alpha must be a number, got 'x'"),
        ({"beta": "x"}, "beta must be a number, got 'x'"),
        ({"gamma": None}, "gamma must be a number, got None"),
        ({"scale": None}, "scale must be a number, got None"),
        ({"seed": "x"}, "seed must be an integer of at least 0"),
        ({"generator": 3}, "generator must be a torch.Generator, got 3"),
        ({"beta": -1}, "beta must be 0 or more, got -1"),
        ({"epsilon": 0}, "epsilon must be above 0"),
        ({"gamma": 1.5}, "gamma must be from 0 to 1"),
        ({"image_dtype": torch.int32}, "image_dtype must be a floating-point dtype"),
        ({"random_shift": -1}, "random_shift must be an integer of at least 0"),
        ({"seed": 1, "generator": torch.Generator()}, "a generator or a seed, not both"),
        ({"observations": ("obs", "next_obs")}, "observations must name some of"),
        (
            {"alpha": 0.5, "specs": {"obs": ((3,), "u1"), "weights": ((), "f4")}},
            "have weights; give your field another",
        ),
        ({"random_shift": 2, "specs": {"obs": ((3,), torch.uint8)}}, "no observation is an image"),
        ({"n_steps": 3, "specs": {"obs": ((3,), torch.uint8)}}, "needs a field 'rewards' with one float32 per"),
    ],
)
def test_invalid_arguments_are_named(options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"capacity": 60, "specs": SPECS, "device": "cpu"} | options
    with pytest.raises((ArgumentError, UnknownCodecError), match=message):
        TensorReplayBuffer(**arguments)


def test_a_heap_that_is_full_refuses_a_step() -> None:
    rng = np.random.default_rng(0)
    buffer = TensorReplayBuffer(
        1000, {"obs": (SHAPE, "u1")}, device="cpu", compression_method="delta", heap_bytes=20_000, alpha=0.5
    )

    def fill() -> None:
        for _ in range(1000):
            obs = rng.integers(0, 256, (2, 1, *SHAPE), np.uint8)
            buffer.add({"obs": obs[0], "next_obs": obs[1]})

    with pytest.raises(HeapFullError, match="heap_bytes"):
        fill()
    buffer.check()
    assert len(buffer) == buffer.n_added > 10


def test_unknown_options_of_a_method_are_named() -> None:
    with pytest.raises(CodecOptionError, match="nosuch"):
        make(compression_kwargs={"nosuch": 1})


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(UnknownCodecError, match="nosuch"):
        make(compression_method="nosuch")


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_that_does_not_fit_is_refused_and_nothing_is_added(device: str) -> None:
    buffer, game = make(device, 6)
    step = game.step()
    good = on_device(step, device)
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"obs": step["obs"][:2]},
            r"obs must be uint8 of shape \(3, 4, 12, 10\).*, got uint8 of shape \(2, 4, 12, 10\)",
        ),
        ({"next_obs": step["obs"].astype(np.float32)}, "next_obs must be uint8 .* got float32"),
        ({"next_obs": torch.zeros((3, *SHAPE), device=device)}, "next_obs must be uint8 .* got float32"),
        ({"rewards": np.zeros((3, 1))}, r"rewards must be float32 of shape \(3,\).* got float64 of shape \(3, 1\)"),
        ({"actions": np.full(3, 0.5)}, "actions"),
        ({"extra": 1}, "a step must be a dict of obs, next_obs, actions, .*; got obs, .*, extra"),
    ]
    for wrong, message in cases:
        with pytest.raises(SpecMismatchError, match=message):
            buffer.add({**good, **wrong})
    with pytest.raises(SpecMismatchError, match="a step must be a dict of"):
        buffer.add({name: value for name, value in good.items() if name != "rewards"})

    assert len(buffer) == 18
    buffer.check()
    assert_is_of(buffer.sample(100), game)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16])
@pytest.mark.parametrize("name", ["dones", "truncations"])
def test_a_done_that_is_no_number_is_refused(name: str, dtype: torch.dtype) -> None:
    buffer = TensorReplayBuffer(8, {"obs": (2, "float32"), name: ((), dtype)}, 2, "cpu", observations=["obs"])
    step = {"obs": np.zeros((2, 2), np.float32), "next_obs": np.ones((2, 2), np.float32)}
    buffer.add({**step, name: np.array([0, 1], np.float32)})

    for value in (np.array([0, np.nan], np.float32), np.array([np.inf, 0], np.float32)):
        for given in (value, torch.from_numpy(value)):
            with pytest.raises(SpecMismatchError, match=name):
                buffer.add({**step, name: given})
    assert len(buffer) == 2


def test_outputs_that_do_not_fit_are_refused() -> None:
    buffer, _ = make()
    out = buffer.sample(8)
    with pytest.raises(
        SpecMismatchError, match=r"out\['obs'\] must be a contiguous tensor, torch.uint8 \(9, 4, 12, 10\)"
    ):
        buffer.sample(9, out=out)
    with pytest.raises(SpecMismatchError, match="out must be a dict of obs, next_obs"):
        buffer.sample(8, out={"obs": out["obs"]})
    with pytest.raises(SpecMismatchError, match=r"out\['rewards'\] must be .* without requires_grad"):
        buffer.sample(8, out=out | {"rewards": torch.zeros(8, requires_grad=True)})
    with pytest.raises(SpecMismatchError, match=r"out\['next_obs'\] and out\['obs'\] share memory"):
        buffer.sample(8, out=out | {"next_obs": out["obs"]})
    with pytest.raises(ArgumentError, match="batch_size must be an integer of at least 1, got 0"):
        buffer.sample(0)


@pytest.mark.parametrize("options", [{}, {"alpha": 0.6, "n_steps": 2}])
def test_an_interrupted_step_is_added_completely_or_not_at_all(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, game = make(n_added=25, **options)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for owner, name in (
        (type(buffer), "_write_rest"),
        (type(buffer._tables.transitions), "write"),
        (type(next(iter(buffer._stores.values()))), "plan"),
    ):
        n_added = buffer.n_added
        step = game.step()
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                buffer.add(step)
        buffer.recover()
        buffer.check()
        assert buffer.n_added in (n_added, n_added + 3)
        if buffer.n_added == n_added:
            game.steps.pop()
        assert_is_of(buffer.sample(200), game, ["obs", "logits"])


# ---- without frameworks ----


def test_neither_sb3_nor_gymnasium_is_imported() -> None:
    code = """
import sys
sys.modules["stable_baselines3"] = sys.modules["gymnasium"] = None
import torch
from sb3_extra_buffers.tensor_buffers import TensorReplayBuffer
buffer = TensorReplayBuffer(64, {"obs": ((4, 84, 84), torch.uint8)}, device="cpu", alpha=0.5)
obs = torch.zeros((1, 4, 84, 84), dtype=torch.uint8)
for _ in range(70):
    buffer.add({"obs": obs, "next_obs": obs})
assert buffer.sample(8)["obs"].shape == (8, 4, 84, 84)
print(buffer.memory_usage())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
