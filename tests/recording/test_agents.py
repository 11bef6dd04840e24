"""Recording an agent with the wrapper, the callback and `record_agent`, and exporting images."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from sb3_extra_buffers.errors import EmptyBufferError, ExportError, FileWriteError
from sb3_extra_buffers.recording import (
    DummyRecordBuffer,
    FramelessRecordBuffer,
    RecordBuffer,
    RecordCallback,
    RecordWrapper,
    record_agent,
)


class GrayEnv(gymnasium.Env[Any, Any]):
    """Frames of one grey level each, brighter with every step; 5 steps per episode; always the same array."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  # Gymnasium's name
    render_mode = "rgb_array"

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (36, 40, 1), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(3)
        self.frame = np.zeros((36, 40, 1), np.uint8)

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        self.frame[...] = 10
        return self.frame, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.frame += 10
        return self.frame, float(action), False, bool(self.frame[0, 0, 0] == 60), {"lives": 3, "text": "x"}

    def render(self) -> Any:
        return np.repeat(self.frame, 3, axis=2)


def gray_levels(buffer: Any) -> list[int]:
    return [int(np.ravel(frame)[0]) for frame in np.asarray(buffer.frames)]


def play(env: Any, n_steps: int) -> None:
    env.reset()
    for step in range(n_steps):
        ended = env.step(step % 3)[3]
        if ended:
            env.reset()


class CyclingModel:
    """Takes actions 0, 1 and 2 in turn."""

    n = -1

    def predict(self, obs: Any, **_: Any) -> tuple[Any, None]:
        self.n += 1
        return np.full(len(obs), self.n % 3), None


def test_wrapper_records_the_observation_that_was_acted_on() -> None:
    env = RecordWrapper(GrayEnv(), info_keys=["lives"])
    play(env, 7)
    buffer = env.record_buffer

    assert isinstance(buffer, RecordBuffer)
    assert gray_levels(buffer) == [10, 20, 30, 40, 50, 10, 20]
    assert buffer.actions.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert buffer.rewards.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert buffer.features["lives"].tolist() == [3] * 7
    assert [episode.whole for episode in buffer.episodes] == [True, False]
    env.reset()  # before the episode has ended
    assert buffer.episodes[-1].stop == 7
    assert buffer.dones[-1]


def test_wrapper_records_rendered_frames_and_accepts_any_buffer() -> None:
    env = RecordWrapper(GrayEnv(), render=True)
    play(env, 3)
    mine = RecordWrapper(GrayEnv(), buffer=RecordBuffer((36, 40), 1, size=2, compression_method="rle"))
    play(mine, 7)
    off = RecordWrapper(GrayEnv(), buffer=DummyRecordBuffer())
    play(off, 7)

    assert isinstance(env.record_buffer, RecordBuffer)
    assert env.record_buffer.frame_shape == (36, 40, 3)
    assert gray_levels(env.record_buffer) == [10, 20, 30]
    assert gray_levels(mine.record_buffer) == [10, 20]
    assert len(off.record_buffer or "") == 0


def test_wrapper_records_no_frames_if_observations_are_not_images() -> None:
    env = RecordWrapper(gymnasium.make("CartPole-v1"))
    env.reset(seed=0)
    for _ in range(3):
        env.step(1)

    assert isinstance(env.record_buffer, FramelessRecordBuffer)
    assert env.record_buffer.actions.tolist() == [1, 1, 1]


@pytest.mark.parametrize(("algorithm", "render"), [("PPO", False), ("DQN", False), ("DQN", True)])
def test_callback_records_during_training(algorithm: str, render: bool, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    import stable_baselines3
    from stable_baselines3.common.vec_env import DummyVecEnv

    env: Any = DummyVecEnv([lambda: GrayEnv(), lambda: RecordWrapper(GrayEnv())])
    options: Any = {"n_steps": 4, "batch_size": 8, "n_epochs": 1} if algorithm == "PPO" else {"buffer_size": 50}
    small = {"features_extractor_kwargs": {"features_dim": 16}}
    model = getattr(stable_baselines3, algorithm)(
        "CnnPolicy", env, device="cpu", seed=0, policy_kwargs=small, **options
    )
    callback = RecordCallback(env_index=1, render=render, path=tmp_path / "agent.gif")
    model.learn(16, callback=callback)
    buffer, wrapped = callback.record_buffer, env.envs[1].record_buffer

    assert buffer is not None
    assert gray_levels(buffer) == gray_levels(wrapped) == [10, 20, 30, 40, 50, 10, 20, 30]
    assert buffer.actions.tolist() == wrapped.actions.tolist()
    assert buffer.rewards.tolist() == wrapped.rewards.tolist()
    assert buffer.dones.tolist() == wrapped.dones.tolist()
    assert (tmp_path / "agent.gif").stat().st_size > 100


def test_callback_rejects_an_env_index_out_of_range() -> None:
    from stable_baselines3 import PPO

    with pytest.raises(IndexError, match="env_index is 1, but there are 1"):
        PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, device="cpu").learn(
            8, callback=RecordCallback(env_index=1)
        )


@pytest.mark.parametrize("render", [False, True])
def test_record_agent(render: bool) -> None:
    from stable_baselines3.common.vec_env import DummyVecEnv

    buffer = record_agent(CyclingModel(), DummyVecEnv([GrayEnv]), n_steps=8, render=render)

    assert gray_levels(buffer) == [10, 20, 30, 40, 50, 10, 20, 30]
    assert buffer.actions.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert buffer.episodes[0].reward == 4


# ---- export ----


def make_painted_buffer(n: int = 6, ch_num: int = 4, last: bool = False) -> RecordBuffer:
    buffer = RecordBuffer((20, 30), ch_num, size=50)
    for number in range(n):
        frame = np.zeros((ch_num, 20, 30), np.uint8)
        for channel in range(ch_num):
            frame[channel, 2:9, 3:13] = 20 * number + channel + 1
        buffer.add(np.moveaxis(frame, 0, -1) if last else frame, 0, 0, done=number == 2)
    return buffer


def read_images(path: Path) -> list[Any]:
    from PIL import Image, ImageSequence

    with Image.open(path) as image:
        return [np.array(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]


@pytest.mark.parametrize("last", [False, True])
def test_gif_shows_the_newest_frame_of_each_stack(tmp_path: Path, last: bool) -> None:
    pytest.importorskip("PIL")
    pictures = read_images(
        make_painted_buffer(last=last).export(tmp_path / "deep" / "run.gif", fps=20, scale=2) or Path()
    )

    assert [picture.shape for picture in pictures] == [(40, 60, 3)] * 6
    assert [int(picture[10, 10, 1]) for picture in pictures] == [20 * number + 4 for number in range(6)]
    assert all(int(picture[0, 0, 0]) == 0 for picture in pictures)


def test_export_of_selected_frames_and_channels(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    buffer = make_painted_buffer()

    def exported_pixels(**options: Any) -> list[list[int]]:
        return [
            picture[5, 5].tolist() for picture in read_images(buffer.export(tmp_path / "x.gif", **options) or Path())
        ]

    assert len(exported_pixels(which=buffer.episodes[0])) == 3
    assert exported_pixels(which=slice(4, None), channels=0) == [[81] * 3, [101] * 3]
    assert exported_pixels(which=-1, channels=(0, 1, 2)) == [[101, 102, 103]]


def test_png_shows_one_frame_or_a_contact_sheet(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    buffer = make_painted_buffer(ch_num=3)
    (one,) = read_images(buffer.export(tmp_path / "one.png", which=2) or Path())
    (sheet,) = read_images(buffer.export(tmp_path / "sheet.png") or Path())

    assert one.shape == (20, 30, 3)
    assert one[5, 5].tolist() == [41, 42, 43]
    assert sheet.shape == (2 * 20, 3 * 30, 3)
    assert sheet[20 + 5, 2 * 30 + 5].tolist() == [101, 102, 103]


def test_export_of_labels_and_floats(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    labels = RecordBuffer((20, 30), 1, size=4)
    labels.add(np.full((20, 30), 2, np.uint8), 0, 0)
    labels.add(np.full((20, 30), 6, np.uint8), 0, 0)
    floats = RecordBuffer((20, 30), 1, size=4, dtype=np.float32)
    floats.add(np.full((20, 30), 0.2, np.float32), 0, 0)

    (sheet,) = read_images(labels.export(tmp_path / "labels.png", stretch=True) or Path())
    assert (sheet[0, 0, 0], sheet[0, 35, 0]) == (0, 255)
    (picture,) = read_images(floats.export(tmp_path / "floats.png") or Path())
    assert picture[0, 0, 0] == 51


def test_mp4_has_all_frames(tmp_path: Path) -> None:
    cv2: Any = pytest.importorskip("cv2")
    buffer = RecordBuffer((33, 45), 1, size=20)
    for number in range(12):
        buffer.add(np.full((33, 45), 20 * number, np.uint8), 0, 0)
    film = cv2.VideoCapture(str(buffer.export(tmp_path / "run.mp4", fps=10)))
    shown = []
    while True:
        there, picture = film.read()
        if not there:
            break
        shown.append(picture)

    assert film.get(cv2.CAP_PROP_FPS) == 10
    assert [picture.shape for picture in shown] == [(34, 46, 3)] * 12
    np.testing.assert_allclose([picture.mean() for picture in shown], np.arange(12) * 20, atol=6)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"path": "x.bmp"}, ExportError, r"\.gif, \.mp4, \.png"),
        ({"which": slice(9, 9)}, EmptyBufferError, "selects none of 6"),
        ({"which": 6}, IndexError, "out of bounds for 6"),
        ({"channels": 4}, ExportError, "one or three of 4, got 4"),
        ({"channels": (0, 1)}, ExportError, "one or three of 4"),
        ({"fps": 0}, ExportError, "fps"),
        ({"fps": 1e-9}, ExportError, "fps"),
        ({"fps": True}, ExportError, "fps"),
        ({"scale": 1 << 62}, ExportError, "too large"),
    ],
)
def test_export_rejects_invalid_arguments(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    path = tmp_path / options.pop("path", "x.gif")
    with pytest.raises(error, match=message):
        make_painted_buffer().export(path, **options)
    assert not path.exists()


@pytest.mark.parametrize("suffix", [".gif", ".png", ".mp4"])
def test_a_failed_export_leaves_the_file_that_was_there(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip({".gif": "PIL", ".mp4": "cv2"}.get(suffix, "numpy"))
    buffer, path, n_enlarged = make_painted_buffer(), tmp_path / f"run{suffix}", 0
    buffer.export(path)
    before = path.read_bytes()

    def interrupt(images: Any, scale: int) -> Any:
        nonlocal n_enlarged
        n_enlarged += 1
        if n_enlarged == 4:
            raise KeyboardInterrupt
        return images

    monkeypatch.setattr("sb3_extra_buffers.recording.export.enlarge", interrupt)
    with pytest.raises(KeyboardInterrupt):
        buffer.export(path)
    assert [(path, path.read_bytes()) for path in tmp_path.iterdir()] == [(path, before)]


@pytest.mark.parametrize("suffix", [".gif", ".png", ".mp4"])
def test_export_to_a_path_that_cannot_be_written_raises_a_named_error(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip({".gif": "PIL", ".mp4": "cv2"}.get(suffix, "numpy"))
    (tmp_path / f"folder{suffix}").mkdir()
    (tmp_path / "file").touch()
    for path in (tmp_path / f"folder{suffix}", tmp_path / "file" / f"x{suffix}", tmp_path / f"{'x' * 300}{suffix}"):
        with pytest.raises(FileWriteError):
            make_painted_buffer().export(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", f"folder{suffix}"]


def test_an_mp4_is_not_written_to_a_path_that_crashes_opencv(tmp_path: Path) -> None:
    pytest.importorskip("cv2")
    folder = tmp_path / "\udc80"
    folder.mkdir()
    with pytest.raises(ExportError, match="not valid Unicode"):
        make_painted_buffer().export(folder / "x.mp4")


def test_values_that_are_not_finite_are_exported(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    buffer = RecordBuffer((20, 30), 1, size=4, dtype=np.float32)
    for value in (np.nan, -np.inf, np.inf, 0.5, 1):
        buffer.add(np.full((20, 30), value, np.float32), 0, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (sheet,) = read_images(buffer.export(tmp_path / "x.png", stretch=True) or Path())
    assert sheet[[0, 0, 20, 20], [0, 30, 0, 30], 0].tolist() == [0, 255, 0, 255]


def test_export_without_frames_raises(tmp_path: Path) -> None:
    with pytest.raises(EmptyBufferError, match="FramelessRecordBuffer holds no frames"):
        FramelessRecordBuffer().export(tmp_path / "x.gif")
    with pytest.raises(EmptyBufferError, match="none of 0"):
        RecordBuffer().export(tmp_path / "x.gif")
