"""The HTML page of ``view``: the data in it, and how it behaves in a browser."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from sb3_extra_buffers.cli.charts import action_names_of, to_json
from sb3_extra_buffers.cli.frames import FrameReader
from sb3_extra_buffers.cli.html_view import make_page
from sb3_extra_buffers.cli.main import main
from sb3_extra_buffers.cli.reader import BufferReader, memory_of, open_buffer
from sb3_extra_buffers.compressed import (
    CompressedArray,
    CompressedDictReplayBuffer,
    CompressedReplayBuffer,
    CompressedRolloutBuffer,
)
from sb3_extra_buffers.errors import ArgumentError, EmptyBufferError, FileFormatError, UnknownEnvironmentError
from sb3_extra_buffers.files import load
from sb3_extra_buffers.recording import FramelessRecordBuffer, RecordBuffer
from tests.cli.browser import CHROMIUM, Browser, start_browser
from tests.cli.png import decode_png
from tests.files.filing import BUFFERS, Feed

pytestmark = pytest.mark.same_without_extras

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>@DATA@"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A replay buffer of 26 steps of two environments that has wrapped around; episodes have nine steps."""
    buffer, feed = BUFFERS["replay-delta"](), Feed()
    for _ in range(40):
        feed.add_to(buffer)
    buffer.save(tmp_path / "saved")
    return tmp_path / "saved"


def robot(n_steps: int = 30, key: str = "camera") -> CompressedDictReplayBuffer:
    """A buffer with an RGB image, a vector and actions of three numbers; episodes have ten steps."""
    space = spaces.Dict(
        {key: spaces.Box(0, 255, (12, 16, 3), np.uint8), "state": spaces.Box(-np.inf, np.inf, (4,), np.float32)}
    )
    buffer = CompressedDictReplayBuffer(64, space, spaces.Box(-1, 1, (3,)), device="cpu")
    rng = np.random.default_rng(0)
    for step in range(n_steps):
        obs = {key: rng.integers(0, 256, (1, 12, 16, 3), np.uint8), "state": rng.normal(size=(1, 4)).astype(np.float32)}
        done = np.array([step % 10 == 9])
        infos = [{"TimeLimit.truncated": step == 19}]
        buffer.add(obs, obs, rng.uniform(-1, 1, (1, 3)), rng.normal(size=1).astype(np.float32), done, infos)
    return buffer


def page_of(buffer: Any, title: str = "a buffer", **options: Any) -> str:
    return make_page(title, type(buffer).__name__, BufferReader(buffer), memory_of(buffer), **options).html


def data_in(page: str) -> Any:
    return json.loads(page.split('type="application/json">')[1].split("</script>")[0])


def data_of(buffer: Any, **options: Any) -> Any:
    return data_in(page_of(buffer, **options))


def chart_of(data: Any, title: str, episode: int = 0) -> Any:
    """Return the curves of a chart."""
    number = [chart["title"] for chart in data["charts"]].index(title)
    return data["episodes"][episode]["charts"][number]


def image_of(data: Any, episode: int, step: int, key: str = "", frame: int = -1) -> Any:
    n_frames = next(panel["n_frames"] for panel in data["panels"] if panel["key"] == key)
    numbers = data["episodes"][episode]["images"][key][step * n_frames : (step + 1) * n_frames]
    return decode_png(base64.b64decode(data["images"][numbers[frame]]))


# ---- data ----


def test_page_contains_every_step_and_every_frame(saved: Path, tmp_path: Path) -> None:
    assert main(["view", str(saved), "-o", str(tmp_path / "page.html")]) == 0

    data = data_in((tmp_path / "page.html").read_text())
    buffer = load(saved)
    reader = BufferReader(buffer)
    assert data["title"] == "saved"
    assert data["notes"] == []
    assert data["panels"] == [{"key": "", "n_frames": 2, "is_stack": True}]
    assert sum(episode["n_shown"] for episode in data["episodes"]) == 52
    for number, (shown, episode) in enumerate(zip(data["episodes"], reader.episodes(), strict=True)):
        rows = reader.order[episode.steps]
        assert (shown["env"], shown["length"]) == (episode.env, len(rows))
        assert [(shown["row"] + step) % data["capacity"] for step in range(len(rows))] == rows.tolist()
        assert chart_of(data, "action", number) == [buffer.actions[rows, episode.env, 0].tolist()]
        np.testing.assert_allclose(chart_of(data, "reward", number)[0], episode.rewards, rtol=1e-5)
        np.testing.assert_allclose(chart_of(data, "return so far", number)[0], np.cumsum(episode.rewards), rtol=1e-4)
        np.testing.assert_allclose(shown["return"], episode.rewards.sum(), rtol=1e-4)
        assert shown["ended"] == bool(buffer.dones[rows[-1], episode.env])
        for step, row in enumerate(rows):
            for frame in range(2):
                expected = buffer.observations[row, episode.env][frame]
                np.testing.assert_array_equal(image_of(data, number, step, frame=frame), expected)
    # frames that several observations share are stored once
    frames = buffer.observations[:].reshape(-1, 18 * 20)
    assert len(data["images"]) == len(np.unique(frames, axis=0))


def test_memory_is_reported_in_the_words_of_memory_usage(saved: Path) -> None:
    buffer = load(saved)

    data = data_of(buffer)

    assert data["memory"] == str(buffer.memory_usage()).splitlines()
    assert ["class", "CompressedReplayBuffer"] in data["facts"]
    assert ["transitions", "52"] in data["facts"]


def test_episodes_cut_at_either_end_are_marked(saved: Path) -> None:
    wrapped = data_of(load(saved))["episodes"]
    started = data_of(robot(25))["episodes"]

    # steps 14 to 39 of both environments are left; episodes end after steps 17, 26 and 35
    ends = [(episode["length"], episode["cut_at_start"], episode["ended"]) for episode in wrapped]
    assert ends[::2] == ends[1::2] == [(4, True, True), (9, False, True), (9, False, True), (4, False, False)]
    assert [episode["cut_at_start"] for episode in started] == [False, False, False]
    assert [episode["ended"] for episode in started] == [True, True, False]
    assert [episode["timeout"] for episode in started] == [False, True, False]


def test_a_rollout_knows_where_its_episodes_start() -> None:
    box = spaces.Box(-1, 1, (3,))
    marks = []
    for start in (0, 1):
        buffer = CompressedRolloutBuffer(6, box, spaces.Discrete(2), device="cpu")
        for step in range(6):
            import torch as th

            starts = np.array([step == 4 or (step == 0 and bool(start))])
            buffer.add(np.full((1, 3), step / 6), np.ones((1, 1)), np.ones(1), starts, th.ones(1), th.ones(1))
        data = data_of(buffer)
        marks.append([(episode["length"], episode["cut_at_start"], episode["ended"]) for episode in data["episodes"]])
        assert chart_of(data, "value and return")[0] == [1] * 4
    assert marks == [[(4, True, True), (2, False, False)], [(4, False, True), (2, False, False)]]


def test_limits_leave_out_steps_and_say_so(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    buffer = load(saved)
    limited, chosen = data_of(buffer, max_steps=6), data_of(buffer, episodes=[2, 7])
    small = data_of(buffer, max_bytes=1)

    # all episodes are listed, with their full length and return
    for data in (limited, chosen, small):
        assert [episode["length"] for episode in data["episodes"]] == [4, 4, 9, 9, 9, 9, 4, 4]
        assert all(isinstance(episode["return"], float) for episode in data["episodes"])
    assert [episode["n_shown"] for episode in limited["episodes"]] == [4, 2, 0, 0, 0, 0, 0, 0]
    assert [episode["n_shown"] for episode in chosen["episodes"]] == [0, 0, 9, 0, 0, 0, 0, 4]
    assert [episode["n_shown"] for episode in small["episodes"]] == [4, 0, 0, 0, 0, 0, 0, 0]
    assert len(chosen["images"]) < 26
    assert "6 of 52 steps" in limited["notes"][0]
    assert "--all" in limited["notes"][0]
    np.testing.assert_array_equal(image_of(chosen, 7, 3), buffer.observations[(buffer.pos - 1) % 26, 1][-1])


def test_view_options(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def view(*options: str) -> Any:
        assert main(["view", str(saved), "-o", str(tmp_path / "page.html"), *options]) == 0
        return data_in((tmp_path / "page.html").read_text())

    shown = [episode["n_shown"] for episode in view("--episodes", "0,5-6", "--steps", "10")["episodes"]]
    assert shown == [4, 0, 0, 0, 0, 6, 0, 0]
    assert "left out: 42 of 52 steps" in capsys.readouterr().out
    assert sum(episode["n_shown"] for episode in view("--all")["episodes"]) == 52
    assert "left out" not in capsys.readouterr().out
    names = view("--action-names", "a, b,c,d,e")["charts"][2]["values"]
    assert names == [[0, "a"], [1, "b"], [2, "c"], [3, "d"], [4, "e"]]
    for options, words in (
        (["--episodes", "1,x"], "0,3,7-9"),
        (["--episodes", "8"], "numbered 0 to 7"),
        (["--action-names", "a,b"], "2 action names"),
        (["--key", "pixels"], "'pixels'"),
        (["--env", "NoSuchGame-v0"], "NoSuchGame-v0"),
    ):
        try:
            status: Any = main(["view", str(saved), "-o", str(tmp_path / "none.html"), *options])
        except SystemExit as end:
            status = end.code
        assert status not in (0, None)
        assert words in capsys.readouterr().err
    assert not (tmp_path / "none.html").exists()


def test_every_key_of_a_dict_is_shown() -> None:
    buffer = robot()

    data, vectors = data_of(buffer), data_of(buffer, key="state")

    assert [panel["key"] for panel in data["panels"]] == ["camera"]
    np.testing.assert_array_equal(image_of(data, 1, 4, "camera"), buffer.observations["camera"][14, 0])
    np.testing.assert_allclose(chart_of(data, "state", 1), buffer.observations["state"][10:20, 0].T, rtol=1e-5)
    np.testing.assert_allclose(chart_of(data, "action", 1), buffer.actions[10:20, 0].T, rtol=1e-5)
    assert vectors["panels"] == []
    assert chart_of(vectors, "state") == chart_of(data, "state")
    with pytest.raises(ArgumentError, match=r"'lidar'; keys: \['camera', 'state'\]"):
        page_of(buffer, key="lidar")


def test_names_of_actions() -> None:
    named = data_of(robot(), action_names=["steer", "gas", "brake"])

    assert next(chart["curves"] for chart in named["charts"] if chart["title"] == "action") == ["steer", "gas", "brake"]
    with pytest.raises(ArgumentError, match="2 action names for actions of 3 values"):
        page_of(robot(), action_names=["steer", "gas"])


def test_names_of_actions_are_known_for_atari() -> None:
    pytest.importorskip("ale_py")

    assert action_names_of("ALE/Pong-v5") == ["NOOP", "FIRE", "RIGHT", "LEFT", "RIGHTFIRE", "LEFTFIRE"]
    with pytest.raises(UnknownEnvironmentError, match="CartPole-v1 does not name its actions"):
        action_names_of("CartPole-v1")


def test_observations_need_not_be_images() -> None:
    buffer = CompressedReplayBuffer(9, spaces.Box(-9, 9, (40,)), spaces.MultiDiscrete([3, 4]), device="cpu")
    for step in range(7):
        obs = np.full((1, 40), step, np.float32)
        buffer.add(obs, obs, np.array([[step % 3, step % 4]]), np.array([np.nan, np.inf, 1][step % 3 :][:1]),
                   np.array([False]), [{}])  # fmt: skip

    data = data_of(buffer)

    assert data["panels"] == data["images"] == []
    assert chart_of(data, "action") == [[0, 1, 2, 0, 1, 2, 0], [0, 1, 2, 3, 0, 1, 2]]
    assert chart_of(data, "observation")[31] == list(range(7))
    # JSON has no numbers for these
    assert chart_of(data, "reward")[0][:3] == ["nan", "inf", 1.0]
    assert data["episodes"][0]["return"] == "nan"
    assert data["charts"][-1]["note"] == "8 more values are not shown"


def test_recordings_are_shown_with_their_features(tmp_path: Path) -> None:
    recording = RecordBuffer((16, 20), 1, 12)
    frames = np.random.default_rng(0).integers(0, 256, (15, 16, 20), np.uint8)
    for step, frame in enumerate(frames):
        features = {"health": 100 - step, "place": np.array([step, 0.5])}
        recording.add(frame, float(step), step % 4, features, done=step in (6, 11))
    recording.save(tmp_path / "run.npz")

    data = data_of(open_buffer(tmp_path / "run.npz")[1], action_names=["NOOP", "FIRE", "LEFT", "RIGHT"])

    # records 3 to 14 are left
    marks = [(episode["length"], episode["cut_at_start"], episode["ended"]) for episode in data["episodes"]]
    assert marks == [(4, True, True), (5, False, True), (3, False, False)]
    assert chart_of(data, "action", 1) == [[3, 0, 1, 2, 3]]
    assert chart_of(data, "health", 1) == [[93, 92, 91, 90, 89]]
    assert chart_of(data, "place", 2) == [[12, 13, 14], [0.5] * 3]
    np.testing.assert_array_equal(image_of(data, 2, 2), frames[14])
    assert main(["view", str(tmp_path / "run.npz"), "-o", str(tmp_path / "page.html")]) == 0


def test_values_that_a_record_lacks_are_gaps() -> None:
    values = np.ma.MaskedArray(np.array([1.5, np.nan, 2.0]), [False, False, True])

    assert to_json(values) == [1.5, "nan", None]


def test_recordings_with_nested_actions_and_no_frames() -> None:
    recording = FramelessRecordBuffer(size=5)
    for step in range(3):
        recording.add(None, 1.0, {"move": step, "look": (np.array([0.5, step]), step)})

    data = data_of(recording)

    assert data["panels"] == []
    assert chart_of(data, "action/move") == [[0, 1, 2]]
    assert chart_of(data, "action/look/0") == [[0.5] * 3, [0, 1, 2]]
    assert data["episodes"][0]["cut_at_start"] is False


def test_arrays_have_images_only() -> None:
    array = CompressedArray((5, 2), (12, 12), np.uint8)
    array[:] = np.random.default_rng(0).integers(0, 256, (5, 2, 12, 12), np.uint8)

    data = data_of(array)

    assert data["charts"] == []
    assert not data["has_ends"]
    np.testing.assert_array_equal(image_of(data, 1, 3), array[3, 1])
    with pytest.raises(EmptyBufferError, match="nothing to show"):
        page_of(CompressedArray((0, 2), (12, 12), np.uint8))


@pytest.mark.parametrize(("shape", "dtype"), [((12, 12), "complex64"), ((12, 0), "uint8")])
def test_observations_that_cannot_be_shown_are_named(shape: tuple[int, ...], dtype: str) -> None:
    with pytest.raises(FileFormatError, match=re.escape(f"observations of shape {shape} and dtype {dtype}")):
        page_of(CompressedArray((3,), shape, np.dtype(dtype)))


@pytest.mark.parametrize("scale", [1, 255])
@pytest.mark.parametrize(
    ("shape", "n_frames", "n_channels"),
    [
        ((18, 20), 1, 1),
        ((1, 18, 20), 1, 1),
        ((18, 20, 1), 1, 1),
        ((18, 20, 3), 1, 3),
        ((3, 18, 20), 1, 3),
        ((5, 18, 20), 5, 1),
        ((6, 18, 20), 2, 3),
        ((4, 18, 20, 3), 4, 3),
        ((4, 18, 20, 1), 4, 1),
        ((2, 4, 18, 20), 8, 1),
        ((17, 18, 20), 17, 1),
    ],
)
def test_observations_of_any_shape_become_images(
    shape: tuple[int, ...], n_frames: int, n_channels: int, scale: int
) -> None:
    truth = np.random.default_rng(0).integers(0, 256, (5, *shape), np.uint8)
    values = truth if scale == 1 else truth.astype(np.float32) / scale
    array = CompressedArray((5,), shape, values.dtype, compression_method="none")
    array[:] = values

    frames = FrameReader(BufferReader(array), array)
    images = frames.read(np.arange(5), np.zeros(5, np.int64))

    assert frames.n_frames == n_frames
    assert images.shape == (5, n_frames, 18, 20, n_channels)
    # the last frame of an observation is its last planes
    last = (
        truth.reshape(5, -1, 18, 20)[:, -n_channels:]
        if shape[-1] > 4
        else truth.reshape(5, -1, 18, 20, shape[-1])[:, -1]
    )
    np.testing.assert_array_equal(images[:, -1], np.moveaxis(last, 1, -1) if shape[-1] > 4 else last)


def test_a_stack_is_found_however_it_is_stored() -> None:
    for method in ("none", "delta"):
        for axis, planes in (("first", 1), ("last", 1), ("last", 3)):
            frames = np.random.default_rng(0).integers(0, 256, (12, 18, 20, planes), np.uint8)
            stacked = np.stack([np.concatenate(frames[step : step + 3], axis=-1) for step in range(10)])
            if axis == "first":
                stacked = np.ascontiguousarray(np.moveaxis(stacked, -1, 1))
            array = CompressedArray((10,), stacked.shape[1:], np.uint8, compression_method=method)
            array[:] = stacked

            found = FrameReader(BufferReader(array), array)

            assert (found.is_stack, found.n_frames) == (True, 3)
            np.testing.assert_array_equal(found.read(np.array([7]), np.array([0]))[0], frames[7:10])


# ---- safety ----


class Tags(html.parser.HTMLParser):
    """The tags of a page, and the text of its title."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_strings_of_the_buffer_do_not_become_markup() -> None:
    names = [HOSTILE, "@TITLE@", "\ud800\u2028"]
    page = page_of(robot(key=HOSTILE), HOSTILE + "\ud800", action_names=names)
    plain = page_of(robot())

    # the page can be written, and has no element that it would not have without these strings
    page.encode()
    assert [tag for tag, _ in Tags(page).tags] == [tag for tag, _ in Tags(plain).tags]
    assert len(Tags(page).named("script")) == 2
    data = data_in(page)
    assert data["title"] == HOSTILE + "\ud800"
    assert data["panels"][0]["key"] == HOSTILE
    assert next(chart["curves"] for chart in data["charts"] if chart["title"] == "action") == names


def test_the_page_may_run_only_its_own_script() -> None:
    page = page_of(robot())

    policy = next(
        str(meta["content"])
        for meta in Tags(page).named("meta")
        if meta.get("http-equiv") == "Content-Security-Policy"
    )  # fmt: skip
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["img-src"] == "data:"
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert rules[f"{tag}-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    # nothing is loaded from anywhere
    assert "http" not in page.replace("http-equiv", "")
    assert "url(" not in page
    assert "@import" not in page


# ---- in a browser ----


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with start_browser(tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.fixture
def page(saved: Path, browser: Browser, tmp_path: Path) -> Iterator[Path]:
    """A page of the wrapped buffer, open in the browser."""
    path = tmp_path / "page.html"
    names = ["NOOP", "FIRE", "LEFT", "RIGHT", "JUMP"]
    path.write_text(page_of(load(saved), action_names=names))
    browser.open(path)
    yield path
    assert browser.problems() == []
    assert browser.requests() == [path.as_uri()]


def position(browser: Browser) -> str:
    return str(browser.evaluate("document.body.dataset.at"))


def test_keyboard(page: Path, browser: Browser) -> None:
    assert position(browser) == "0:0"
    for key, shift, expected in (
        ("ArrowRight", False, "0:1"),
        ("End", False, "0:3"),
        ("ArrowRight", False, "0:3"),
        ("]", False, "1:0"),
        ("]", False, "2:0"),
        ("ArrowRight", True, "2:8"),
        ("ArrowLeft", False, "2:7"),
        ("Home", False, "2:0"),
        ("[", False, "1:0"),
    ):
        browser.press(key, shift)
        assert position(browser) == expected
    assert browser.evaluate("document.getElementById('keys').open") is False
    browser.press("?")
    assert browser.evaluate("document.getElementById('keys').open") is True
    browser.press("ArrowRight")
    assert position(browser) == "1:0"
    browser.press("?")
    assert browser.evaluate("document.getElementById('keys').open") is False


def test_playing_stops_at_the_end_and_starts_again(page: Path, browser: Browser) -> None:
    browser.evaluate("setSpeed(60)")
    browser.press(" ")
    assert browser.text("#play") == "Pause"
    browser.wait_for("document.body.dataset.at === '0:3'")
    browser.wait_for("document.getElementById('play').textContent === 'Play'")
    browser.press("+")
    assert browser.evaluate("document.getElementById('speed').value") == "120"
    browser.evaluate("setSpeed(1)")
    browser.click("#play")
    # from the beginning, and slowly enough to be paused there
    assert position(browser) == "0:0"
    browser.click("#play")
    assert browser.text("#play") == "Play"


def test_what_is_shown_for_a_step(page: Path, browser: Browser, saved: Path) -> None:
    buffer = load(saved)
    reader = BufferReader(buffer)
    episode = reader.episodes()[4]
    browser.open(page, "#4:8")

    row = reader.order[episode.steps[8]]
    action = int(buffer.actions[row, episode.env, 0])
    assert position(browser) == "4:8"
    assert browser.text("#action") == f"{['NOOP', 'FIRE', 'LEFT', 'RIGHT', 'JUMP'][action]} ({action})"
    assert float(browser.text("#reward")) == pytest.approx(float(buffer.rewards[row, episode.env]), rel=1e-3)
    assert float(browser.text("#return")) == pytest.approx(float(episode.rewards.sum()), rel=1e-3)
    assert browser.text("#row") == f"[{row}, {episode.env}]"
    assert browser.text("#end").startswith("yes")
    assert browser.text("[data-chart=action] .legend b") == ["NOOP", "FIRE", "LEFT", "RIGHT", "JUMP"][action]
    labels = browser.evaluate(
        "[...document.querySelectorAll('[data-chart=action] text')].map(text => text.textContent)"
    )
    assert {"NOOP", "FIRE", "LEFT", "RIGHT", "JUMP", "step"} <= set(labels)
    browser.press("ArrowLeft")
    assert browser.text("#end") == "no"


def test_a_click_or_drag_on_a_chart_moves_to_the_step(page: Path, browser: Browser) -> None:
    browser.open(page, "#2:0")

    for chart in ("reward", "return so far", "action"):
        for across, step in ((0.999, 8), (0.001, 0)):
            browser.click(f"[data-chart='{chart}'] svg", across)
            assert position(browser) == f"2:{step}"
    middle = browser.evaluate("charts[0].axes.x(4) / document.querySelector('[data-chart=reward] svg').clientWidth")
    browser.click("[data-chart=reward] svg", middle)
    assert position(browser) == "2:4"
    cursor = float(browser.evaluate("document.querySelector('[data-chart=action] .cursor').getAttribute('x1')"))
    assert cursor == pytest.approx(browser.evaluate("charts[2].axes.x(4)"), abs=0.1)
    browser.click("[data-chart=reward] svg", middle, to=0.99)
    assert position(browser) == "2:8"
    browser.click("[data-chart=reward] svg", middle)
    assert position(browser) == "2:4"
    # the return of each episode selects an episode
    across = browser.evaluate("overviewAxes.x(6) / document.getElementById('returns').clientWidth")
    browser.click("#returns", across)
    assert position(browser) == "6:0"
    browser.click("[data-episode='3']")
    assert position(browser) == "3:0"
    browser.wait_for("location.hash === '#3:0'")


def test_frames_of_a_stack_can_be_selected(page: Path, browser: Browser) -> None:
    data = data_in(page.read_text())

    def shown() -> list[str]:
        sources = browser.evaluate("[...document.querySelectorAll('.frames img')].map(image => image.src)")
        return [source.removeprefix("data:image/png;base64,") for source in sources]

    older, newest = (data["images"][number] for number in data["episodes"][0]["images"][""][:2])
    assert shown() == [newest]
    browser.click(".choices button")
    assert shown() == [older]
    for expected in ([newest], [older, newest], [older]):
        browser.press("f")
        assert shown() == expected
    browser.press("ArrowRight")
    assert shown() == [data["images"][data["episodes"][0]["images"][""][2]]]
    assert browser.evaluate("document.querySelector('.frames img').decode().then(() => true)")


def test_partial_episodes_are_marked_in_the_list(page: Path, browser: Browser) -> None:
    def badges(selector: str) -> Any:
        return browser.evaluate(f"[...document.querySelectorAll('{selector} .badge')].map(badge => badge.textContent)")

    marks = [badges(f"#list li:nth-child({number + 1})") for number in range(8)]
    assert marks == [["cut at start"]] * 2 + [[]] * 4 + [["cut at end"]] * 2
    assert badges("#readout") == ["cut at start"]
    browser.press("]")
    browser.press("]")
    assert badges("#readout") == []


def test_curves_can_be_hidden(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page_of(robot()))
    browser.open(path)

    def n_curves() -> Any:
        return browser.evaluate("document.querySelectorAll('[data-chart=state] .curve').length")

    assert n_curves() == 4
    browser.click("[data-chart=state] .legend button")
    assert n_curves() == 3
    browser.click("[data-chart=state] .legend button")
    assert n_curves() == 4
    assert browser.problems() == []


def test_episodes_that_are_left_out_say_how_to_include_them(browser: Browser, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page_of(load(saved), max_steps=6))
    browser.open(path, "#1:1")

    assert "first 2 of 4 steps of this episode" in browser.text("#missing")
    browser.press("]")
    assert "--episodes 2" in browser.text("#missing")
    assert browser.evaluate("document.getElementById('content').hidden") is True
    browser.press(" ")
    browser.press("[")
    assert position(browser) == "1:0"
    assert browser.evaluate("document.getElementById('content').hidden") is False
    assert browser.problems() == []


def test_every_kind_of_page_opens(browser: Browser, tmp_path: Path) -> None:
    vectors = CompressedReplayBuffer(9, spaces.Box(-9, 9, (40,)), spaces.Discrete(2), device="cpu")
    for reward in (np.nan, np.inf, -1.0):
        vectors.add(np.ones((1, 40)), np.ones((1, 40)), np.ones((1, 1)), np.array([reward]), np.array([True]), [{}])
    array = CompressedArray((5, 2), (12, 12), np.uint8)
    array[:] = 3
    recording = RecordBuffer((16, 20), 1, 12)
    recording.add(np.zeros((16, 20), np.uint8), 1.0, {"a": 1, "b": (2.0, 3)}, {"health": 5})
    for number, buffer in enumerate((vectors, array, recording, robot())):
        path = tmp_path / f"{number}.html"
        path.write_text(page_of(buffer))
        browser.open(path)
        browser.press("]")
        browser.press("End")
        assert browser.problems() == []
        assert browser.text("#title") == "a buffer"


def test_hostile_strings_are_shown_as_text(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page_of(robot(key=HOSTILE), HOSTILE, action_names=[HOSTILE, "b", "c"]))
    browser.open(path)

    assert browser.text("#title") == HOSTILE
    assert browser.text("figcaption h2") == HOSTILE
    assert browser.evaluate("window.hacked === undefined")
    assert browser.requests() == [path.as_uri()]
    assert browser.problems() == []
    # even a script that found its way into the page would not run
    browser.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {text: 'window.hacked = 1'}))"
    )
    assert browser.evaluate("window.hacked === undefined")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 900, 1600])
def test_the_page_fits_the_window(browser: Browser, page: Path, tmp_path: Path, width: int, dark: bool) -> None:
    image = pytest.importorskip("PIL.Image")
    browser.open(page, "#2:4", width=width, height=1100, dark=dark)

    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    browser.screenshot(tmp_path / "shot.png")
    with image.open(tmp_path / "shot.png") as opened:
        shot = np.asarray(opened.convert("RGB"))
    assert shot.shape == (1100, width, 3)
    # the page is light or dark, and the observation is visible
    assert (shot.mean() < 110) == dark
    box = browser.evaluate("document.querySelector('.frames img').getBoundingClientRect().toJSON()")
    seen = shot[int(box["y"]) + 8 : int(box["bottom"]) - 8, int(box["x"]) + 8 : int(box["right"]) - 8]
    data = data_in(page.read_text())
    assert set(np.unique(seen)) <= set(np.unique(image_of(data, 2, 4)))
    assert len(np.unique(seen)) > 1
