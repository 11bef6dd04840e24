"""Budgets, bad input, figures in logs, and classes made from other classes."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import DQN, PPO, HerReplayBuffer
from stable_baselines3.common.buffers import (
    BaseBuffer,
    DictReplayBuffer,
    DictRolloutBuffer,
    NStepReplayBuffer,
    ReplayBuffer,
    RolloutBuffer,
)
from stable_baselines3.common.logger import configure

import sb3_extra_buffers.compressed as module
from sb3_extra_buffers.compressed import (
    BufferUsageCallback,
    CompressedDictReplayBuffer,
    CompressedNStepReplayBuffer,
    CompressedReplayBuffer,
    CompressedRolloutBuffer,
    compressed,
)
from sb3_extra_buffers.errors import (
    ArgumentError,
    BudgetExceededError,
    CodecOptionError,
    EmptyBufferError,
    IndexOutOfRangeError,
    LayoutError,
    SpecMismatchError,
    UnknownCodecError,
)
from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer
from tests.contracts.buffer import ACTIONS, SPACES, assert_same_contents, assert_same_samples, contents, play
from tests.contracts.store import RESIDENT, needs_proc, run_fresh
from tests.contracts.vec_env import make_envs

DISCRETE = ACTIONS["discrete"]
IMAGE = SPACES["frames first"]
ATARI = spaces.Box(0, 255, (4, 84, 84), np.uint8)


def noise(count: int) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (1, 4, 20, 16)).astype(np.uint8) for _ in range(count)]


class TestBudget:
    """`max_bytes`."""

    @pytest.mark.parametrize(
        ("size", "limit"), [(10**9, 60_000), (10**9, 150_000), (400, 60_000), (400, 150_000)]
    )  # fmt: skip
    def test_the_oldest_steps_are_evicted(self, size: int, limit: int) -> None:
        ours = CompressedReplayBuffer(size, IMAGE, DISCRETE, "cpu", n_envs=2, max_bytes=limit)
        played = list(play(IMAGE, 2, 500))
        for number, step in enumerate(played):
            ours.add(*step)
            assert ours.held_bytes() <= limit
            assert ours.memory_usage().total <= ours.held_bytes()
            if number % 25 == 0:
                self.check_batch(ours, played[: number + 1])
        self.check_batch(ours, played)
        assert 10 < ours.size() < 500
        assert "not compressed yet" not in ours.memory_usage().codecs[""]

    @pytest.mark.parametrize("name", ["frames first", "vector"])
    def test_a_position_that_was_assigned_after_an_eviction_is_named(self, name: str) -> None:
        limit = 60_000 if name == "frames first" else 6_000
        # uncompressed vectors would never be evicted: the buffer holds as many steps as fit
        options: Any = {"compression_method": "gzip1"} if name == "vector" else {}
        buffer = CompressedReplayBuffer(10**4, SPACES[name], DISCRETE, "cpu", max_bytes=limit, **options)
        # next observations of other steps, which take more space
        played = [step._replace(next_obs=step.obs + 1) for step in play(SPACES[name], 1, 150)]
        for step in played:
            buffer.add(*step)
            if buffer.n_evicted > 10:
                break
        assert buffer.n_evicted > 10
        buffer.pos, buffer.full = 0, False
        for step in played[:3]:
            with pytest.raises(IndexOutOfRangeError, match="had been evicted"):
                buffer.sample(4)
            buffer.add(*step)
        buffer.reset()
        buffer.add(*played[0])
        assert buffer.sample(4).rewards.unique().tolist() == played[0].reward.tolist()

    @staticmethod
    def check_batch(ours: Any, played: Any) -> None:
        """Batches are of the newest ``size`` steps, and each of them is drawn."""
        newest = played[-ours.size() :]
        seen = {
            (step.obs[env].tobytes(), step.next_obs[env].tobytes(), float(step.reward[env])): number
            for number, step in enumerate(newest)
            for env in range(2)
        }
        batch = ours.sample(40 * len(newest))
        rows = zip(batch.observations.numpy(), batch.next_observations.numpy(), batch.rewards.numpy(), strict=True)
        drawn = {seen[obs.tobytes(), after.tobytes(), float(reward[0])] for obs, after, reward in rows}
        assert drawn == set(range(len(newest)))

    def test_on_max_bytes_raise_refuses_new_steps(self) -> None:
        limit = 200_000
        ours = CompressedReplayBuffer(600, IMAGE, DISCRETE, "cpu", max_bytes=limit, on_max_bytes="raise")
        theirs = ReplayBuffer(600, IMAGE, DISCRETE, "cpu")
        with pytest.raises(BudgetExceededError, match=f"max_bytes={limit}") as caught:  # noqa: PT012  # at some step
            for obs, after in itertools.pairwise(noise(400)):
                step: Any = (obs, after, np.zeros(1, np.int64), np.zeros(1), np.zeros(1), [{}])
                ours.add(*step)
                theirs.add(*step)
        assert isinstance(caught.value, MemoryError)
        assert_same_contents(contents(theirs), contents(ours))
        # not before it had to
        assert ours.held_bytes() > limit
        assert 40 < ours.size() < 400

    def test_on_max_bytes_raise_needs_memory_for_all_steps(self) -> None:
        for space in (IMAGE, SPACES["vector"]):
            with pytest.raises(BudgetExceededError, match="lower buffer_size"):
                CompressedReplayBuffer(10**6, space, DISCRETE, "cpu", max_bytes=10**6, on_max_bytes="raise")

    def test_vectors_get_fewer_steps(self) -> None:
        ours = CompressedReplayBuffer(10**6, SPACES["vector"], DISCRETE, "cpu", max_bytes=50_000)
        theirs = ReplayBuffer(ours.buffer_size, SPACES["vector"], DISCRETE, "cpu")
        for step in play(SPACES["vector"], 1, 700):
            ours.add(*step)
            theirs.add(*step)
        assert ours.full
        assert 45_000 < ours.held_bytes() <= 50_000
        assert_same_samples(ours, theirs)

    def test_incompressible_observations_stay_within_the_budget(self) -> None:
        # nothing compresses it, and what stays dense would be there for good
        ours = CompressedReplayBuffer(2000, IMAGE, DISCRETE, "cpu", max_bytes=200_000)
        played = noise(400)
        for obs, after in itertools.pairwise(played):
            ours.add(obs, after, np.zeros(1, np.int64), np.zeros(1), np.zeros(1), [{}])
            assert ours.held_bytes() <= 200_000
        assert ours.size() > 20
        batch = ours.sample(8)
        kept = {each.tobytes() for each in played}
        assert all(obs.numpy().tobytes() in kept for obs in batch.observations)

    @pytest.mark.parametrize("n_steps", [1, 3])
    def test_dicts_and_n_steps(self, n_steps: int) -> None:
        space = SPACES["dict"]
        ours = CompressedDictReplayBuffer(800, space, DISCRETE, "cpu", n_envs=2, max_bytes=90_000, n_steps=n_steps)
        played = list(play(space, 2, 300))
        for step in played:
            ours.add(*step)
            assert ours.held_bytes() <= 90_000
        known = {step.obs["vector"][env].tobytes() for step in played[-ours.size() :] for env in range(2)}
        batch = ours.sample(200)
        assert {row.numpy().tobytes() for row in batch.observations["vector"]} <= known
        images = {step.next_obs["frames_first"][env].tobytes() for step in played for env in range(2)}
        assert {row.numpy().tobytes() for row in batch.next_observations["frames_first"]} <= images

    @pytest.mark.parametrize("limit", [0, -1])
    def test_max_bytes_must_be_positive(self, limit: int) -> None:
        with pytest.raises(ValueError, match="max_bytes must be a positive number of bytes"):
            CompressedReplayBuffer(10, IMAGE, DISCRETE, "cpu", max_bytes=limit)

    @pytest.mark.parametrize("name", ["ReplayBuffer", "NStepReplayBuffer", "PrioritizedReplayBuffer"])
    def test_max_bytes_may_have_a_unit(self, name: str) -> None:
        buffer = getattr(module, f"Compressed{name}")(10, IMAGE, DISCRETE, "cpu", max_bytes="1.5 MB")
        assert buffer.storage_options.max_bytes == buffer.storage_options.evict_above == 1_500_000
        with pytest.raises(ArgumentError, match="got 'much'"):
            getattr(module, f"Compressed{name}")(10, IMAGE, DISCRETE, "cpu", max_bytes="much")

    def test_max_bytes_must_allow_one_step(self) -> None:
        with pytest.raises(BudgetExceededError, match="max_bytes=90"):
            CompressedReplayBuffer(10, IMAGE, DISCRETE, "cpu", n_envs=4, max_bytes=90)

    def test_on_max_bytes_must_be_evict_or_raise(self) -> None:
        with pytest.raises(ValueError, match="'evict' or 'raise'"):
            CompressedReplayBuffer(10, IMAGE, DISCRETE, "cpu", max_bytes=10**6, on_max_bytes="drop")  # type: ignore[arg-type]

    @needs_proc
    def test_held_bytes_agree_with_the_resident_set(self) -> None:
        said = run_fresh(
            RESIDENT
            + """
import numpy as np
from gymnasium import spaces
from sb3_extra_buffers.compressed import CompressedReplayBuffer, warmup
from tests.contracts.buffer import play
# compiling takes memory that stays
warmup()
space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
def fill(limit, n_steps):
    buffer = CompressedReplayBuffer(10**9, space, spaces.Discrete(4), "cpu", n_envs=2, max_bytes=limit)
    for step in play(space, 2, n_steps):
        buffer.add(*step)
    return buffer
warm = fill(2_000_000, 200)
del warm
before = resident()
buffer = fill(4_000_000, 1100)
print(resident() - before, buffer.held_bytes(), buffer.n_evicted)
"""
        )
        grown, held, evicted = map(int, said.split())
        assert evicted > 0
        assert held <= 4_000_000
        assert grown < 1.5 * 4_000_000


class TestBadInput:
    """A named error, and nothing changed."""

    BAD: dict[str, Any] = {  # noqa: RUF012  # cases, not state
        "shape": lambda step: step._replace(obs=step.obs[..., :-1]),
        "next shape": lambda step: step._replace(next_obs=step.next_obs[:, :-1]),
        "environments": lambda step: step._replace(obs=step.obs[:2], next_obs=step.next_obs[:2]),
        "one environment": lambda step: type(step)(*(part[:1] for part in step)),
        "negative": lambda step: step._replace(obs=step.obs.astype(np.int64) - 300),
        "large": lambda step: step._replace(next_obs=step.next_obs.astype(np.int64) + 2**40),
        "fraction": lambda step: step._replace(obs=step.obs + 0.5),
        "nan": lambda step: step._replace(next_obs=np.where(step.next_obs == step.next_obs.max(), np.nan, 0)),
        "objects": lambda step: step._replace(obs=step.obs.astype(object)),
        "text": lambda step: step._replace(obs="image"),
        "action": lambda step: step._replace(action=step.action[:2]),
        "action of nan": lambda step: step._replace(action=np.full(3, np.nan)),
        "action of a fraction": lambda step: step._replace(action=np.full(3, 0.5)),
        "reward": lambda step: step._replace(reward=np.zeros(2)),
        "done": lambda step: step._replace(done=np.zeros((3, 3))),
        "infos": lambda step: step._replace(infos=[{}, {}]),
        "iterator of infos": lambda step: step._replace(infos=iter([{}, {}])),
    }

    @pytest.mark.parametrize("name", ["frames first", "multi binary"])
    @pytest.mark.parametrize("bad", BAD)
    @pytest.mark.parametrize("n_steps", [0, 33])
    def test_replay(self, name: str, bad: str, n_steps: int) -> None:
        space = SPACES[name]
        ours = CompressedReplayBuffer(60, space, DISCRETE, "cpu", n_envs=3)
        *played, last = play(space, 3, n_steps + 1)
        for step in played:
            ours.add(*step)
        before = contents(ours)
        with pytest.raises(SpecMismatchError):
            ours.add(*self.BAD[bad](last))
        assert_same_contents(before, contents(ours))
        ours.add(*last)
        np.testing.assert_array_equal(np.asarray(ours.observations[len(played) % 20]), last.obs)

    @pytest.mark.parametrize("key", ["frames_first", "multi_binary"])
    def test_dicts(self, key: str) -> None:
        space = SPACES["dict"]
        ours = CompressedDictReplayBuffer(60, space, DISCRETE, "cpu", n_envs=3)
        *played, last = play(space, 3, 8)
        for step in played:
            ours.add(*step)
        before = contents(ours)
        half = {**last.next_obs, key: last.next_obs[key] + 0.5}
        missing = {name: part for name, part in last.obs.items() if name != key}
        for bad in (last._replace(next_obs=half), last._replace(obs=missing), last._replace(next_obs=missing)):
            with pytest.raises(SpecMismatchError, match=key):
                ours.add(*bad)
        assert_same_contents(before, contents(ours))

    def test_integers_of_another_width_are_taken_if_they_fit(self) -> None:
        ours = CompressedReplayBuffer(20, IMAGE, DISCRETE, "cpu", n_envs=2)
        theirs = ReplayBuffer(20, IMAGE, DISCRETE, "cpu", n_envs=2)
        for step in play(IMAGE, 2, 7):
            wide = step._replace(obs=step.obs.astype(np.int64), next_obs=step.next_obs.astype(np.float64))
            ours.add(*wide)
            theirs.add(*wide)
        assert_same_samples(ours, theirs)

    def test_an_empty_buffer(self) -> None:
        ours = CompressedReplayBuffer(20, IMAGE, DISCRETE, "cpu")
        with pytest.raises(EmptyBufferError, match="learning_starts"):
            ours.sample(4)
        for step in play(IMAGE, 1, 2):
            ours.add(*step)
        ours.reset()
        with pytest.raises(EmptyBufferError, match="learning_starts"):
            ours.sample(4)

    def test_dtypes_that_would_lose_data(self) -> None:
        with pytest.raises(SpecMismatchError, match="int8"):
            CompressedRolloutBuffer(20, IMAGE, DISCRETE, "cpu", dtypes={"elem_type": np.int8})
        with pytest.raises(SpecMismatchError, match="made-up"):
            CompressedReplayBuffer(20, IMAGE, DISCRETE, "cpu", dtypes={"elem_type": "made-up"})
        wider = CompressedReplayBuffer(20, IMAGE, DISCRETE, "cpu", dtypes={"elem_type": np.int32})
        assert wider.observations.dtype == wider.observations.stored_dtype == np.uint8

    @pytest.mark.parametrize("cls", [CompressedReplayBuffer, CompressedRolloutBuffer])
    def test_unknown_options_and_methods(self, cls: Any) -> None:
        with pytest.raises(UnknownCodecError, match="made-up"):
            cls(20, IMAGE, DISCRETE, "cpu", compression_method="made-up")
        with pytest.raises(CodecOptionError, match="decompression_kwargs"):
            cls(20, IMAGE, DISCRETE, "cpu", compression_method="gzip", decompression_kwargs={"wbits": 1})
        with pytest.raises(ValueError, match="output_dtype"):
            cls(20, IMAGE, DISCRETE, "cpu", output_dtype="double")
        with pytest.raises(TypeError, match="wrong_keyword"):
            cls(20, IMAGE, DISCRETE, "cpu", wrong_keyword=1)

    def test_n_steps_must_be_positive(self) -> None:
        with pytest.raises(ValueError, match="n_steps must be"):
            CompressedReplayBuffer(20, IMAGE, DISCRETE, "cpu", n_steps=0)

    @pytest.mark.parametrize("cls", [CompressedReplayBuffer, CompressedDictReplayBuffer, CompressedRolloutBuffer])
    def test_spaces_that_sb3_does_not_support(self, cls: Any) -> None:
        with pytest.raises(NotImplementedError, match="Tuple"):
            cls(20, spaces.Tuple([IMAGE, IMAGE]), DISCRETE, "cpu")


class TestCallback:
    """`BufferUsageCallback`."""

    @staticmethod
    def model(algorithm: Any, **options: Any) -> Any:
        envs = make_envs(IMAGE, DISCRETE, 2)
        return algorithm("MlpPolicy", envs, device="cpu", policy_kwargs={"net_arch": [8]}, **options)

    def test_usage_is_logged_to_stdout_tensorboard_and_csv(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pytest.importorskip("tensorboard")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

        model = self.model(DQN, buffer_size=200, learning_starts=500, replay_buffer_class=CompressedReplayBuffer)
        model.set_logger(configure(str(tmp_path), ["stdout", "csv", "tensorboard"]))
        model.learn(300, callback=BufferUsageCallback(log_freq=10), log_interval=2)
        model.logger.close()
        said = capsys.readouterr().out
        for name in ("size", "bytes", "sb3_bytes", "ratio", "observation_ratio", "method"):
            assert f" {name} " in said
        with (tmp_path / "progress.csv").open() as file:
            first, *_, last = csv.DictReader(file)
        # nothing is compressed yet
        assert float(first["buffer/size"]) > 0
        assert first["buffer/ratio"] == first["buffer/observation_ratio"] == ""
        usage = model.replay_buffer.memory_usage()
        assert usage.decided
        for name, value in {
            "size": 200, "bytes": usage.total, "sb3_bytes": usage.dense, "ratio": usage.ratio,
            "observation_ratio": usage.observation_ratio,
        }.items():  # fmt: skip
            assert float(last[f"buffer/{name}"]) == pytest.approx(value)
        assert usage.codecs[""].startswith(last["buffer/method"])
        events = EventAccumulator(str(tmp_path))
        events.Reload()
        assert {"buffer/ratio", "buffer/size"} <= set(events.Tags()["scalars"])

    @pytest.mark.parametrize("log_freq", [20, 10**6])
    def test_a_short_run_reports_at_its_end(self, tmp_path: Path, log_freq: int) -> None:
        model = self.model(DQN, buffer_size=200, learning_starts=500, replay_buffer_class=CompressedReplayBuffer)
        model.set_logger(configure(str(tmp_path), ["csv"]))
        callback = BufferUsageCallback(log_freq)
        # SB3 itself writes no log: no episode ends
        model.learn(64, callback=callback, log_interval=10**6)
        callback.on_training_end()  # RL Zoo calls it once more, which must not repeat the report
        model.logger.close()
        with (tmp_path / "progress.csv").open() as file:
            (row,) = csv.DictReader(file)
        assert float(row["buffer/size"]) == 64

    def test_log_freq_counts_calls_of_env_step(self) -> None:
        model = self.model(DQN, buffer_size=200, learning_starts=500, replay_buffer_class=CompressedReplayBuffer)
        sizes = []

        class Spy(BufferUsageCallback):
            def _record(self) -> None:
                super()._record()
                sizes.append(self.logger.name_to_value["buffer/size"])

        model.learn(64, callback=Spy(log_freq=10))
        # two environments: a call makes two steps, and SB3 calls back before it adds them
        assert sizes == [18, 38, 58, 64]

    @pytest.mark.parametrize("log_freq", [0, -1, 2.5, "often"])
    def test_a_bad_log_freq_is_refused(self, log_freq: Any) -> None:
        with pytest.raises(ValueError, match="log_freq must be an integer of at least 1"):
            BufferUsageCallback(log_freq)

    def test_rollouts(self, tmp_path: Path) -> None:
        model = self.model(
            PPO, n_steps=16, batch_size=8, n_epochs=1, rollout_buffer_class=CompressedRolloutBuffer
        )  # fmt: skip
        model.set_logger(configure(str(tmp_path), ["csv"]))
        model.learn(64, callback=BufferUsageCallback(log_freq=5))
        model.logger.close()
        with (tmp_path / "progress.csv").open() as file:
            sizes = [float(row["buffer/size"]) for row in csv.DictReader(file)]
        assert sizes[-1] == 32

    def test_gpu_buffers(self) -> None:
        model = self.model(
            DQN, buffer_size=200, learning_starts=500, replay_buffer_class=GpuReplayBuffer,
            replay_buffer_kwargs={"compression_method": "delta"},
        )  # fmt: skip
        recorded = {}

        class Spy(BufferUsageCallback):
            def _record(self) -> None:
                super()._record()
                recorded.update(self.logger.name_to_value)

        model.learn(400, callback=Spy())
        assert recorded["buffer/size"] == 200
        assert 0 < recorded["buffer/ratio"] < 2

    def test_a_model_without_a_compressed_buffer_is_refused(self) -> None:
        model = self.model(DQN, buffer_size=50)
        with pytest.raises(LayoutError, match="DQN has no compressed buffer"):
            model.learn(10, callback=BufferUsageCallback())


class Counting(ReplayBuffer):
    """Someone's own buffer."""

    def __init__(self, *args: Any, start: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.count = start
        self.numbers = np.zeros((self.buffer_size, self.n_envs))

    def add(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1
        self.numbers[self.pos] = self.count
        super().add(*args, **kwargs)


class TestMaking:
    """`compressed(SomeBuffer)`."""

    def test_it_behaves_like_the_original_class(self) -> None:
        made: Any = compressed(Counting)
        assert made is compressed(Counting)
        assert issubclass(made, Counting)
        ours: Any = made(40, IMAGE, DISCRETE, device="cpu", n_envs=2, start=5, compression_method="delta")
        theirs = Counting(40, IMAGE, DISCRETE, device="cpu", n_envs=2, start=5)
        for step in play(IMAGE, 2, 46):
            ours.add(*step)
            theirs.add(*step)
        assert_same_samples(ours, theirs)
        np.testing.assert_array_equal(ours.numbers, theirs.numbers)
        assert ours.memory_usage().codecs == {"": "delta"}

    def test_classes_of_sb3_map_to_the_documented_classes(self) -> None:
        for plain in (
            ReplayBuffer,
            DictReplayBuffer,
            RolloutBuffer,
            DictRolloutBuffer,
            NStepReplayBuffer,
            HerReplayBuffer,
        ):
            assert compressed(plain) is getattr(module, f"Compressed{plain.__name__}")
            assert compressed(compressed(plain)) is compressed(plain)

    def test_several_steps(self) -> None:
        class Mine(NStepReplayBuffer):
            """An n-step buffer of someone's own."""

        ours = compressed(Mine)(40, IMAGE, DISCRETE, device="cpu", n_envs=2, n_steps=4, gamma=0.9)
        theirs = NStepReplayBuffer(40, IMAGE, DISCRETE, device="cpu", n_envs=2, n_steps=4, gamma=0.9)
        assert isinstance(ours, CompressedNStepReplayBuffer)
        for step in play(IMAGE, 2, 46):
            ours.add(*step)
            theirs.add(*step)
        assert_same_samples(ours, theirs)

    def test_options_reach_rollout_buffers(self) -> None:
        class Mine(RolloutBuffer):
            """A rollout buffer of someone's own."""

        with pytest.raises(UnknownCodecError):
            compressed(Mine)(20, IMAGE, DISCRETE, device="cpu", compression_method="made-up")

    def test_a_class_that_would_not_be_compressed_is_refused(self) -> None:
        class Own(ReplayBuffer):
            """Has an array of its own where the observations should be."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.observations = np.zeros((self.buffer_size, self.n_envs, *self.obs_shape), np.uint8)

        class Skipping(ReplayBuffer):
            """Does not let SB3 lay it out."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                BaseBuffer.__init__(self, *args, **kwargs)

        with pytest.raises(LayoutError, match="replaces observations"):
            compressed(Own)(20, IMAGE, DISCRETE, device="cpu")
        with pytest.raises(LayoutError, match=r"super\(\).__init__"):
            compressed(Skipping)(20, IMAGE, DISCRETE, device="cpu")
        with pytest.raises(LayoutError, match="not one of SB3's buffers"):
            compressed(dict)
