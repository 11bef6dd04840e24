"""The command line: what it prints, what it writes, and how it says no."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer, RolloutBuffer
from stable_baselines3.common.save_util import save_to_pkl

from sb3_extra_buffers.cli.contents import Contents, open_any, to_rgb
from sb3_extra_buffers.cli.html_view import make_page
from sb3_extra_buffers.cli.main import commands, main
from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.files import load
from tests.files.filing import ACTIONS, BOX, BUFFERS, DICT, N_ENVS, Feed, assert_same, batches, contents, make_array


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A replay buffer that has gone round once and a half: 26 steps of two environments, episodes of nine."""
    buffer, feed = BUFFERS["replay-delta"](), Feed()
    for _ in range(40):
        feed.add_to(buffer)
    buffer.save(tmp_path / "saved")
    return tmp_path / "saved"


def run(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


def facts_of(text: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in text.splitlines())


def test_every_command_is_offered_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["info", "verify", "repair", "montage", "play", "view", "convert", "bench", "recommend"]

    assert list(commands()) == names
    for name in names:
        with pytest.raises(SystemExit) as end:
            run(name, "--help")
        assert end.value.code == 0
    assert "status 1 if there is any" in capsys.readouterr().out


def test_the_module_is_the_command(saved: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-m", "sb3_extra_buffers", "info", str(saved)], capture_output=True, text=True, check=True
    )

    assert facts_of(said.stdout)["class"] == "CompressedReplayBuffer"


def test_info_tells_what_is_there(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    buffer = load(saved)

    assert run("info", saved) == 0
    facts = facts_of(capsys.readouterr().out)
    assert run("info", saved, "--json") == 0
    again = json.loads(capsys.readouterr().out)

    assert facts["transitions"] == "52"
    assert facts["codec"].startswith("delta")
    assert facts["shape.observations"] == "(26, 2, 2, 18, 20) uint8"
    assert facts["observation_space"] == str(BOX)
    # 40 steps, the last 26 are held; episodes end at 18, 27 and 36, the first of them is there in part
    assert again["episodes"] == 6
    order = (buffer.pos + np.arange(26)) % 26
    rewards, dones = buffer.rewards[order], buffer.dones[order].astype(bool)
    first = rewards[: np.flatnonzero(dones[:, 0])[0] + 1, 0].sum(dtype=np.float64)
    totals = [episode.total for episode in Contents(buffer).episodes()]
    assert pytest.approx(first) == totals[0]
    assert again["return_max"] == pytest.approx(max(e.total for e in Contents(buffer).episodes() if e.ended), abs=1e-3)
    assert int(facts["bytes_on_disk"]) == sum(path.stat().st_size for path in saved.iterdir())


@pytest.mark.parametrize("name", BUFFERS)
def test_every_kind_can_be_looked_at(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    buffer, feed = BUFFERS[name](), Feed()
    for _ in range(26):
        feed.add_to(buffer)
    buffer.save(tmp_path / "saved")

    assert run("info", tmp_path / "saved") == 0
    assert run("verify", tmp_path / "saved", "--deep") == 0
    assert run("montage", tmp_path / "saved", "-o", tmp_path / "sheet.png", "--count", 4) == 0

    said = capsys.readouterr().out
    assert "transitions: " in said
    assert said.splitlines()[-2].endswith("saved: ok")


def test_arrays_can_be_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    array, truth = make_array()
    array.save(tmp_path / "saved")

    assert run("info", tmp_path / "saved") == 0
    assert run("verify", tmp_path / "saved", "--deep") == 0
    assert run("montage", tmp_path / "saved", "-o", tmp_path / "sheet.png", "--count", 3, "--columns", 3) == 0

    assert facts_of(capsys.readouterr().out.splitlines()[1])["class"] == "CompressedArray"
    sheet = decode_png((tmp_path / "sheet.png").read_bytes())
    np.testing.assert_array_equal(sheet[2:20, 2:22], truth[0, 0, -1])


def test_damage_is_found_and_repaired(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = next(saved.glob("data-*.bin"))
    store = load(saved).observations.store._inner
    broken = bytearray(data.read_bytes())
    broken[60] ^= 1  # in the oldest segment
    data.write_bytes(broken)

    assert run("verify", saved) == 1
    assert "damaged: " in capsys.readouterr().out
    assert run("repair", saved, tmp_path / "repaired") == 0
    facts = facts_of("\n".join(capsys.readouterr().out.splitlines()[-3:]))
    assert run("verify", tmp_path / "repaired", "--deep") == 0

    assert int(facts["kept"]) + int(facts["lost"]) == 52
    assert 0 < int(facts["lost"]) < 52
    assert load(tmp_path / "repaired").size() * N_ENVS == int(facts["kept"])
    assert store is not None


def decode_png(data: bytes) -> Any:
    """The pixels of a PNG as `encode_png` writes it."""
    at, parts, size = 8, b"", (0, 0, 0)
    while at < len(data):
        length = struct.unpack(">I", data[at : at + 4])[0]
        name, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert zlib.crc32(name + body) == struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0]
        if name == b"IHDR":
            width, height, _, kind = struct.unpack(">IIBB", body[:10])
            size = (height, width, {0: 1, 2: 3}[kind])
        parts += body if name == b"IDAT" else b""
        at += 12 + length
    rows = np.frombuffer(zlib.decompress(parts), np.uint8).reshape(size[0], 1 + size[1] * size[2])
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(size).squeeze()


def test_a_montage_shows_the_newest_frames_in_order(saved: Path, tmp_path: Path) -> None:
    buffer = load(saved)

    assert run("montage", saved, "-o", tmp_path / "sheet.png", "--count", 52, "--columns", 10, "--scale", 2) == 0

    sheet = decode_png((tmp_path / "sheet.png").read_bytes())
    for place in (0, 1, 9, 10, 51):
        step, env = (buffer.pos + place // 2) % 26, place % 2
        top, left = 2 + place // 10 * 38, 2 + place % 10 * 42
        shown = sheet[top : top + 36 : 2, left : left + 40 : 2]
        np.testing.assert_array_equal(shown, buffer.observations[step, env][-1])


def test_other_libraries_read_the_pictures(saved: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    run("montage", saved, "-o", tmp_path / "sheet.png")
    run("play", saved, "-o", tmp_path / "film.gif", "--episode", 1)

    with image.open(tmp_path / "sheet.png") as opened:
        sheet = np.asarray(opened)
    np.testing.assert_array_equal(sheet, decode_png((tmp_path / "sheet.png").read_bytes()))
    with image.open(tmp_path / "film.gif") as film:
        n_frames, shown = film.n_frames, np.asarray(film.convert("RGB"))
    _, buffer = open_any(saved)
    contents = Contents(buffer)
    episode = contents.episodes()[1]
    first = contents.pictures()[episode.steps[:1], np.array([episode.env])][0]
    np.testing.assert_array_equal(shown, first)
    assert 1 < n_frames <= len(episode.steps)  # equal pictures are shown longer


def test_films_as_mp4(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cv2 = pytest.importorskip("cv2")

    assert run("play", saved, "-o", tmp_path / "film.mp4", "--steps", 12) == 0

    film = cv2.VideoCapture(str(tmp_path / "film.mp4"))
    count = 0
    while film.read()[0]:
        count += 1
    assert count == 12
    assert "12 pictures" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("shape", "channels"), [((18, 20), 1), ((1, 18, 20), 1), ((18, 20, 3), 3), ((3, 18, 20), 3), ((4, 18, 20), 1)]
)
def test_observations_of_any_layout_become_pictures(shape: tuple[int, ...], channels: int) -> None:
    rng = np.random.default_rng(0)
    batch = rng.integers(0, 255, (5, *shape), np.uint8)

    pictures = to_rgb(batch)

    assert pictures.shape == (5, 18, 20, 3)
    if shape == (4, 18, 20):
        # four planes are colours with transparency, or frames: either way the picture is one of them
        assert all(
            any((picture[..., 0] == plane).all() for plane in obs) for picture, obs in zip(pictures, batch, strict=True)
        )
    floats = to_rgb(batch.astype(np.float32) / 255)
    assert np.abs(floats.astype(int) - pictures).max() <= 1
    assert channels in (1, 3)


# ---- the page ----


def test_a_page_holds_every_step(saved: Path, tmp_path: Path) -> None:
    assert run("view", saved, "-o", tmp_path / "page.html") == 0

    page = (tmp_path / "page.html").read_text()
    data = json.loads(page.split('type="application/json">')[1].split("</script>")[0])
    buffer = load(saved)
    contents = Contents(buffer)
    assert sum(len(episode["frames"]) for episode in data) == 52
    for shown, episode in zip(data, contents.episodes(), strict=True):
        rows = contents.order[episode.steps]
        assert shown["actions"] == [str(action) for action in buffer.actions[rows, episode.env, 0]]
        np.testing.assert_allclose(shown["rewards"], episode.rewards, atol=1e-4)
        np.testing.assert_allclose(shown["totals"], np.cumsum(episode.rewards), atol=1e-3)
        assert shown["dones"] == buffer.dones[rows, episode.env].astype(bool).tolist()
        import base64

        last = decode_png(base64.b64decode(shown["frames"][-1]))
        np.testing.assert_array_equal(last, buffer.observations[rows[-1], episode.env][-1])
    # nothing comes from elsewhere
    assert "http" not in page.replace("http-equiv", "")
    assert "src=" not in page.split("<script")[0]


def test_a_page_says_what_it_leaves_out(saved: Path) -> None:
    _, buffer = open_any(saved)

    page = make_page("<b>", "facts", Contents(buffer), None, 20)

    assert "the first 20 of 52 transitions" in page
    assert "&lt;b&gt;" in page


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed here")
def test_the_page_works_in_a_browser(saved: Path, tmp_path: Path) -> None:
    run("view", saved, "-o", tmp_path / "page.html")
    buffer = load(saved)
    contents = Contents(buffer)
    episode = contents.episodes()[2]
    page = f"file://{tmp_path / 'page.html'}#2:4"

    dom = browse("--dump-dom", page, home=tmp_path / "home")
    browse(f"--screenshot={tmp_path / 'shot.png'}", "--window-size=900,700", page, home=tmp_path / "home")

    assert 'data-at="2:4"' in dom
    assert f'<td id="step">5 of {len(episode.steps)}</td>' in dom
    row = contents.order[episode.steps[4]]
    assert f'<td id="action">{buffer.actions[row, episode.env, 0]}</td>' in dom
    image = pytest.importorskip("PIL.Image")
    with image.open(tmp_path / "shot.png") as opened:
        shot = np.asarray(opened.convert("L"))
    assert shot.shape == (700, 900)
    # the picture is there: its brightest and darkest values, over an area as large as it is shown
    picture = buffer.observations[row, episode.env][-1]
    found = np.isin(shot, np.unique(picture)).mean()
    assert found > 0.05
    assert len(np.unique(shot)) > 10


def browse(*arguments: str, home: Path) -> str:
    said = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000",
         f"--user-data-dir={home}", *arguments],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return said.stdout


# ---- converting ----


def fill_plain(kind: Any, space: Any, n_steps: int = 40, **options: Any) -> Any:
    buffer, feed = kind(26 * N_ENVS, space, ACTIONS, device="cpu", n_envs=N_ENVS, **options), Feed()
    for _ in range(n_steps):
        feed.add_to(buffer)
    return buffer


@pytest.mark.parametrize(
    ("kind", "space", "options"),
    [
        (ReplayBuffer, BOX, {}),
        (ReplayBuffer, BOX, {"optimize_memory_usage": True, "handle_timeout_termination": False}),
        (DictReplayBuffer, DICT, {}),
    ],
)
@pytest.mark.parametrize("n_steps", [11, 40])
def test_a_pickle_of_sb3_becomes_ours(
    kind: Any, space: Any, options: Any, n_steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = fill_plain(kind, space, n_steps, **options)
    save_to_pkl(tmp_path / "buffer.pkl", theirs)

    assert run("convert", tmp_path / "buffer.pkl", tmp_path / "ours") == 2
    assert "UntrustedFileError" in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()
    assert run("convert", tmp_path / "buffer.pkl", tmp_path / "ours", "--trust") == 0

    ours = load(tmp_path / "ours")
    assert type(ours).__name__ == f"Compressed{kind.__name__}"
    for mine, other in zip(batches(ours), batches(theirs), strict=True):
        for left, right in zip(mine, other, strict=True):
            np.testing.assert_array_equal(left, right)


def test_a_pickled_rollout_and_one_of_ours_are_converted_too(tmp_path: Path) -> None:
    rollout, feed = RolloutBuffer(26, BOX, ACTIONS, device="cpu", n_envs=N_ENVS), Feed()
    ours = BUFFERS["replay"]()
    for _ in range(26):
        feed.add_to(rollout, ours)
    for name, buffer in (("rollout", rollout), ("ours", ours)):
        save_to_pkl(tmp_path / f"{name}.pkl", buffer)
        assert run("convert", tmp_path / f"{name}.pkl", tmp_path / name, "--trust") == 0

    assert_same(ours, load(tmp_path / "ours"))
    for mine, other in zip(batches(load(tmp_path / "rollout")), batches(rollout), strict=True):
        for left, right in zip(mine, other, strict=True):
            np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("suffix", ["h5", "zarr"])
@pytest.mark.parametrize("name", ["replay-delta", "dict", "rollout", "gpu-dict", "gpu-rollout"])
def test_columns_and_observations_are_written_as_they_are(name: str, suffix: str, tmp_path: Path) -> None:
    module = pytest.importorskip("h5py" if suffix == "h5" else "zarr")
    buffer, feed = BUFFERS[name](), Feed()
    for _ in range(26):
        feed.add_to(buffer)
    buffer.save(tmp_path / "saved")
    target = tmp_path / f"out.{suffix}"

    assert run("convert", tmp_path / "saved", target) == 0

    group = module.File(target) if suffix == "h5" else module.open_group(str(target), mode="r")
    if "gpu" in name:
        held = {name.partition(".")[2]: part for name, part in contents(buffer).items() if name.startswith("_stores.")}
        leaves = {key: part[0, : buffer.buffer_size * N_ENVS] for key, part in held.items()}
        leaves = {key: part.reshape(buffer.buffer_size, N_ENVS, *part.shape[1:]) for key, part in leaves.items()}
        observed = leaves.get("", leaves)
    else:
        observed = buffer.observations
    pairs = (
        {f"observations/{key}": leaf for key, leaf in observed.items()}
        if isinstance(observed, dict)
        else {"observations": observed}
    )
    for path, leaf in (pairs | {"rewards": buffer.rewards, "actions": buffer.actions}).items():
        np.testing.assert_array_equal(group[path][:], leaf)
        assert group[path].dtype == leaf.dtype
    assert json.loads(group.attrs["manifest"])["kind"] == buffer.to_parts().kind
    assert run("convert", tmp_path / "saved", target) == 2  # it is there already


@pytest.mark.filterwarnings("ignore")  # Minari's own
def test_minari_reads_the_episodes(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari")

    assert run("convert", saved, tmp_path / "data" / "game-v0", "--to", "minari") == 0

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "data"))
    dataset = minari.load_dataset("game-v0")
    buffer = load(saved)
    contents = Contents(buffer)
    assert dataset.total_steps == 52
    seen = {env: [] for env in range(N_ENVS)}  # type: dict[int, list[Any]]
    episodes = list(dataset.iterate_episodes())
    for episode in episodes:
        assert len(episode.observations) == len(episode.rewards) + 1
    # every transition of the buffer is in it, bit for bit
    transitions = {
        (obs.tobytes(), after.tobytes(), int(action), float(reward), bool(end))
        for episode in episodes
        for obs, after, action, reward, end in zip(
            episode.observations[:-1], episode.observations[1:], episode.actions, episode.rewards,
            episode.terminations, strict=True,
        )
    }  # fmt: skip
    for step in contents.order:
        for env in seen:
            ended = bool(buffer.dones[step, env] and not buffer.timeouts[step, env])
            assert (
                buffer.observations[step, env].tobytes(), buffer.next_observations[step, env].tobytes(),
                int(buffer.actions[step, env, 0]), float(buffer.rewards[step, env]), ended,
            ) in transitions  # fmt: skip


# ---- measuring ----


def test_methods_are_tried_on_a_file_and_one_is_named(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")

    assert run("recommend", saved, "--methods", "none,gzip1,delta", "-o", tmp_path / "plot.png") == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "observations: 52 of 2x18x20 uint8"
    table = {line.split()[0]: float(line.split()[1]) for line in lines[2:5]}
    assert table.keys() == {"none", "gzip1", "delta"}
    assert list(table.values()) == sorted(table.values())
    assert lines[5].startswith("recommended: ")
    assert (tmp_path / "plot.png").stat().st_size > 5000


def test_methods_are_tried_on_an_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "CartPole-v1", "--steps", 20, "--methods", "none,rle") == 0

    assert "observations: 20 of 4 float32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["info", "/nowhere"], "FileFormatError: /nowhere: no such file or directory"),
        (["bench", "NoSuchThing-v7"], "FileFormatError: 'NoSuchThing-v7' is neither a saved buffer nor an environment"),
        (["convert", __file__, "/nowhere/else"], "is neither a saved buffer nor a pickle"),
    ],
)
def test_what_goes_wrong_is_named_in_one_line(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2

    said = capsys.readouterr().err
    assert error in said
    assert said.startswith("sb3-extra-buffers: ")
    assert "Traceback" not in said


def test_vectors_are_no_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gymnasium import spaces

    buffer = CompressedReplayBuffer(10, spaces.Box(-1, 1, (3,)), ACTIONS, device="cpu")
    zeros = np.zeros((1, 3), np.float32)
    buffer.add(zeros, zeros, np.zeros((1, 1)), np.zeros(1), np.zeros(1), [{}])
    buffer.save(tmp_path / "saved")

    assert run("montage", tmp_path / "saved") == 2
    assert "no pictures" in capsys.readouterr().err
