"""The command line: output, written files and errors."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer, RolloutBuffer
from stable_baselines3.common.save_util import save_to_pkl

from sb3_extra_buffers.cli.images import read_images
from sb3_extra_buffers.cli.main import main
from sb3_extra_buffers.cli.reader import BufferReader, open_buffer
from sb3_extra_buffers.compressed import CompressedArray
from sb3_extra_buffers.files import load
from sb3_extra_buffers.recording import RecordBuffer
from sb3_extra_buffers.stores.usage import format_bytes
from tests.cli.png import decode_png
from tests.files.filing import ACTIONS, BOX, BUFFERS, DICT, N_ENVS, Feed, assert_same, batches, contents, make_array


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A replay buffer of 26 steps of two environments that has wrapped around; episodes have nine steps."""
    buffer, feed = BUFFERS["replay-delta"](), Feed()
    for _ in range(40):
        feed.add_to(buffer)
    buffer.save(tmp_path / "saved")
    return tmp_path / "saved"


def run(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


def facts_of(text: str) -> dict[str, str]:
    """The facts in the output of ``info``, without continued lines."""
    return dict(line.split(": ", 1) for line in text.splitlines() if not line.startswith("  "))


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["info", "verify", "repair", "montage", "play", "view", "convert", "bench", "recommend"]

    for arguments in (["--help"], *([name, "--help"] for name in names)):
        with pytest.raises(SystemExit) as end:
            run(*arguments)
        assert end.value.code == 0
    output = capsys.readouterr().out
    offered = re.findall(r"^    (\w+)\b", output.partition("usage: sb3-extra-buffers info")[0], re.MULTILINE)
    assert offered == names
    assert "exit with status 1 if there is any" in output


def test_python_m_runs_the_command(saved: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "sb3_extra_buffers", "info", str(saved)], capture_output=True, text=True, check=True
    )

    assert facts_of(process.stdout)["class"] == "CompressedReplayBuffer"


def test_info(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    buffer = load(saved)

    assert run("info", saved) == 0
    facts = facts_of(capsys.readouterr().out)
    assert run("info", saved, "--json") == 0
    as_json = json.loads(capsys.readouterr().out)

    assert facts["transitions"] == "52"
    assert facts["observations"] == "2x18x20 uint8"
    assert facts["observation_space"] == as_json["observation_space"] == str(BOX)
    n_bytes = sum(path.stat().st_size for path in saved.iterdir())
    assert facts["bytes_on_disk"].startswith(f"{n_bytes:,} (")
    sizes = {"bytes_on_disk": n_bytes, "steps": 26, "environments": 2, "transitions": 52, "capacity": 52}
    assert sizes.items() <= as_json.items()
    assert as_json["observations"] == {"": {"shape": [2, 18, 20], "dtype": "uint8"}}
    # the last 26 of 40 steps: episodes end at 18, 27 and 36, and the first and the last one are incomplete
    order = (buffer.pos + np.arange(26)) % 26
    rewards, last = buffer.rewards[order], np.flatnonzero(buffer.dones[order, 0])
    returns = [rewards[first + 1 : end + 1].sum(axis=0, dtype=np.float64) for first, end in itertools.pairwise(last)]
    assert as_json["episodes"] == 2 * len(returns) == 4
    expected = {"mean": np.mean(returns), "min": np.min(returns), "max": np.max(returns)}
    assert as_json["returns"] == pytest.approx(expected)
    assert as_json["lengths"] == {"mean": 9, "min": 9, "max": 9}
    usage = buffer.memory_usage()
    assert facts["memory"].endswith(f" of the {format_bytes(usage.dense)} in SB3's ReplayBuffer")
    assert as_json["memory"]["dense"] == 52 * (2 * 2 * 18 * 20 + 8 + 4 + 4 + 4)
    assert as_json["memory"]["ratio"] == pytest.approx(as_json["memory"]["total"] / as_json["memory"]["dense"])
    assert as_json["memory"]["codecs"][""].startswith("delta")


def test_json_is_valid_if_rewards_are_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    buffer, feed = BUFFERS["replay"](), Feed()
    for _ in range(20):
        feed.add_to(buffer)
    buffer.rewards[3] = np.nan
    buffer.save(tmp_path / "saved")

    assert run("info", tmp_path / "saved", "--json") == 0

    def fail(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    assert json.loads(capsys.readouterr().out, parse_constant=fail)["returns"]["mean"] is None


def test_an_episode_that_starts_a_full_buffer_is_complete_if_nothing_was_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    buffer, feed = BUFFERS["replay"](), Feed(episode=13)
    for n_steps, n_complete in ((26, 4), (27, 2)):
        while buffer.n_added < n_steps:
            feed.add_to(buffer)
        buffer.save(tmp_path / "saved")
        assert run("info", tmp_path / "saved", "--json") == 0
        assert json.loads(capsys.readouterr().out)["episodes"] == n_complete


def test_info_imports_neither_torch_nor_sb3_nor_numba(saved: Path) -> None:
    code = """
import sys
from sb3_extra_buffers.cli.main import main
assert main(["info", sys.argv[1]]) == 0
assert not {"torch", "stable_baselines3", "numba"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code, str(saved)], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_read_without_its_class_holds_the_same(name: str, tmp_path: Path) -> None:
    buffer, feed = BUFFERS[name](), Feed()
    for _ in range(26):
        feed.add_to(buffer)
    buffer.save(tmp_path / "saved")

    saved, read = open_buffer(tmp_path / "saved")

    assert (read.size(), read.pos, read.full) == (buffer.size(), buffer.pos, buffer.full)
    assert (read.observation_space, read.action_space) == (buffer.observation_space, buffer.action_space)
    parts = buffer.to_parts()
    for column in ("rewards", "actions"):
        np.testing.assert_array_equal(getattr(read, column), parts.columns[column])
    leaves = read.observations if isinstance(read.observations, dict) else {"": read.observations}
    count = 26 * N_ENVS
    for key, leaf in leaves.items():
        part = f"observations.{key}" if key else "observations"
        if part in parts.columns:
            np.testing.assert_array_equal(leaf, parts.columns[part])
        else:
            rows = parts.stores[part].read(np.arange(count))
            np.testing.assert_array_equal(np.asarray(leaf).reshape(count, -1).view(np.uint8), rows)
    assert hasattr(read, "next_observations") == ("rollout" not in name)
    usage = open_buffer(tmp_path / "saved", measured=True)[1].memory_usage()
    expected = load(tmp_path / "saved").memory_usage()
    assert usage.total == pytest.approx(expected.total, rel=0.02)
    for figure in ("transitions", "dense", "dense_observations", "baseline", "decided"):
        assert getattr(usage, figure) == getattr(expected, figure)
    assert {key: method.replace("-jit", "") for key, method in usage.codecs.items()} == expected.codecs
    assert saved.kind == parts.kind


@pytest.mark.parametrize("name", BUFFERS)
def test_every_kind_of_buffer_can_be_inspected(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    buffer, feed = BUFFERS[name](), Feed()
    for _ in range(26):
        feed.add_to(buffer)
    buffer.save(tmp_path / "saved")

    assert run("info", tmp_path / "saved") == 0
    assert run("verify", tmp_path / "saved", "--deep") == 0
    assert run("montage", tmp_path / "saved", "-o", tmp_path / "sheet.png", "--count", 4) == 0

    output = capsys.readouterr().out
    assert "transitions: " in output
    assert output.splitlines()[-2].endswith("saved: ok")


def test_arrays_can_be_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    array, truth = make_array()
    array.save(tmp_path / "saved")

    assert run("info", tmp_path / "saved") == 0
    assert run("verify", tmp_path / "saved", "--deep") == 0
    assert run("montage", tmp_path / "saved", "-o", tmp_path / "sheet.png", "--count", 3, "--columns", 3) == 0

    assert facts_of(capsys.readouterr().out.splitlines()[1])["class"] == "CompressedArray"
    sheet = decode_png((tmp_path / "sheet.png").read_bytes())
    np.testing.assert_array_equal(sheet[2:20, 2:22], truth[0, 0, -1])


def test_verify_finds_damage_and_repair_removes_it(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = next(saved.glob("data-*.bin"))
    broken = bytearray(data.read_bytes())
    broken[60] ^= 1  # in the oldest segment
    data.write_bytes(broken)

    assert run("verify", saved) == 1
    assert "damaged: " in capsys.readouterr().out
    assert run("repair", saved, tmp_path / "repaired") == 0
    report = re.fullmatch(r"damaged: .*\nkept: (\d+) of (\d+)\nsaved: (.*)\n", capsys.readouterr().out)
    assert report is not None
    kept, of, saved_to = report.groups()
    assert run("verify", tmp_path / "repaired", "--deep") == 0

    assert (of, saved_to) == ("52", str(tmp_path / "repaired"))
    assert 0 < int(kept) < 52
    assert load(tmp_path / "repaired").size() * N_ENVS == int(kept)


def test_montage_shows_the_newest_frames_in_order(saved: Path, tmp_path: Path) -> None:
    buffer = load(saved)

    assert run("montage", saved, "-o", tmp_path / "sheet.png", "--count", 52, "--columns", 10, "--scale", 2) == 0

    sheet = decode_png((tmp_path / "sheet.png").read_bytes())
    for number in (0, 1, 9, 10, 51):
        step, env = (buffer.pos + number // 2) % 26, number % 2
        top, left = 2 + number // 10 * 38, 2 + number % 10 * 42
        image = sheet[top : top + 36 : 2, left : left + 40 : 2]
        np.testing.assert_array_equal(image, buffer.observations[step, env][-1])


def test_pillow_reads_the_images(saved: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    run("montage", saved, "-o", tmp_path / "sheet.png")
    run("play", saved, "-o", tmp_path / "film.gif", "--episode", 1)

    with image.open(tmp_path / "sheet.png") as opened:
        sheet = np.asarray(opened)
    np.testing.assert_array_equal(sheet, decode_png((tmp_path / "sheet.png").read_bytes()))
    with image.open(tmp_path / "film.gif") as film:
        n_frames, shown = film.n_frames, np.asarray(film.convert("RGB"))
    _, buffer = open_buffer(saved)
    reader = BufferReader(buffer)
    episode = reader.episodes()[1]
    first = next(read_images(reader, None, episode.steps[:1], np.array([episode.env])))
    np.testing.assert_array_equal(shown, first)
    assert 1 < n_frames <= len(episode.steps)  # Pillow merges equal frames


@pytest.mark.parametrize(
    ("suffix", "image_format", "error"),
    [("png", "PNG", 0), ("PNG", "PNG", 0), ("jpg", "JPEG", 20), ("jpeg", "JPEG", 20), ("webp", "WEBP", 0),
     ("gif", "GIF", 0)],
)  # fmt: skip
def test_montage_writes_the_format_of_the_suffix(
    suffix: str, image_format: str, error: int, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = pytest.importorskip("PIL.Image")
    run("montage", saved, "-o", tmp_path / "expected.png")

    assert run("montage", saved, "-o", tmp_path / f"sheet.{suffix}") == 0

    assert f"sheet.{suffix} (52 of 52 observations)" in capsys.readouterr().out
    with image.open(tmp_path / f"sheet.{suffix}") as opened:
        assert opened.format == image_format
        sheet = np.asarray(opened.convert("L"), np.int16)
    expected = decode_png((tmp_path / "expected.png").read_bytes())
    assert np.abs(sheet - expected).mean() <= error
    assert sheet.shape == expected.shape


def test_play_says_what_it_left_out(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("PIL.Image")
    film = tmp_path / "film.gif"

    assert run("play", saved, "-o", film, "--steps", 10) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"saved: {film} (10 frames)",
        "left out: 16 of 26 steps; pass --all to write all of them",
        "left out: 1 of 2 environments; select an episode with --episode",
    ]
    assert run("play", saved, "-o", film, "--all", "--episode", -1) == 0
    assert capsys.readouterr().out.splitlines() == [f"saved: {film} (4 frames)"]


def test_recordings_can_be_inspected_shown_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    h5py, _ = pytest.importorskip("h5py"), pytest.importorskip("PIL.Image")
    record, feed = RecordBuffer((18, 20), 2, size=30), Feed(episode=10)
    for step in range(40):
        record.add(feed.images()[0][0], step, step % 5, {"speed": step / 2}, done=step % 10 == 9)
    record.save(tmp_path / "run.npz")

    assert run("info", tmp_path / "run.npz") == 0
    facts = facts_of(capsys.readouterr().out)
    assert {"class": "RecordBuffer", "transitions": "30", "capacity": "30", "episodes": "3"}.items() <= facts.items()
    assert facts["returns"] == "mean 245, min 145, max 345"
    for command, output in (("montage", "sheet.png"), ("play", "film.gif"), ("view", "page.html")):
        assert run(command, tmp_path / "run.npz", "-o", tmp_path / output) == 0
    assert run("convert", tmp_path / "run.npz", tmp_path / "run.h5") == 0
    with h5py.File(tmp_path / "run.h5") as file:
        np.testing.assert_array_equal(file["frames"], record.frames)
        np.testing.assert_array_equal(file["rewards"], np.arange(10, 40))
        np.testing.assert_array_equal(file["features/speed"], np.arange(10, 40) / 2)


def test_play_writes_mp4(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cv2 = pytest.importorskip("cv2")

    assert run("play", saved, "-o", tmp_path / "film.mp4", "--steps", 12) == 0

    film = cv2.VideoCapture(str(tmp_path / "film.mp4"))
    count = 0
    while film.read()[0]:
        count += 1
    assert count == 12
    assert "12 frames" in capsys.readouterr().out


# ---- converting ----


def make_sb3_buffer(kind: Any, space: Any, n_steps: int = 40, **options: Any) -> Any:
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
def test_convert_from_an_sb3_pickle(
    kind: Any, space: Any, options: Any, n_steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = make_sb3_buffer(kind, space, n_steps, **options)
    save_to_pkl(tmp_path / "buffer.pkl", theirs)

    assert run("convert", tmp_path / "buffer.pkl", tmp_path / "ours") == 2
    assert "loading it runs any code it contains; pass --trust" in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()
    assert run("convert", tmp_path / "buffer.pkl", tmp_path / "ours", "--trust") == 0

    ours = load(tmp_path / "ours")
    assert type(ours).__name__ == f"Compressed{kind.__name__}"
    for mine, other in zip(batches(ours), batches(theirs), strict=True):
        for left, right in zip(mine, other, strict=True):
            np.testing.assert_array_equal(left, right)


def test_convert_from_pickles_of_rollouts_and_compressed_buffers(tmp_path: Path) -> None:
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
def test_convert_to_hdf5_and_zarr(name: str, suffix: str, tmp_path: Path) -> None:
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
    assert run("convert", tmp_path / "saved", target) == 1  # the target exists


def test_a_minari_dataset_needs_a_version(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("minari")
    assert run("convert", saved, tmp_path / "game", "--to", "minari") == 2
    assert "must end in a version, as game-v0" in capsys.readouterr().err
    assert not (tmp_path / "game").exists()


@pytest.mark.filterwarnings("ignore")  # of Minari
def test_convert_to_minari(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari")

    assert run("convert", saved, tmp_path / "data" / "game-v0", "--to", "minari") == 0

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "data"))
    dataset = minari.load_dataset("game-v0")
    buffer = load(saved)
    reader = BufferReader(buffer)
    assert dataset.total_steps == 52
    seen = {env: [] for env in range(N_ENVS)}  # type: dict[int, list[Any]]
    episodes = list(dataset.iterate_episodes())
    for episode in episodes:
        assert len(episode.observations) == len(episode.rewards) + 1
    # every transition of the buffer is in the dataset, bit for bit
    transitions = {
        (obs.tobytes(), after.tobytes(), int(action), float(reward), bool(end))
        for episode in episodes
        for obs, after, action, reward, end in zip(
            episode.observations[:-1], episode.observations[1:], episode.actions, episode.rewards,
            episode.terminations, strict=True,
        )
    }  # fmt: skip
    for step in reader.order:
        for env in seen:
            ended = bool(buffer.dones[step, env] and not buffer.timeouts[step, env])
            assert (
                buffer.observations[step, env].tobytes(), buffer.next_observations[step, env].tobytes(),
                int(buffer.actions[step, env, 0]), float(buffer.rewards[step, env]), ended,
            ) in transitions  # fmt: skip


# ---- benchmarks ----


def test_recommend_on_a_saved_buffer(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")

    assert run("recommend", saved, "--methods", "none,gzip1,delta", "-o", tmp_path / "plot.png") == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "observations: 52 of 2x18x20 uint8"
    table = {line.split()[0]: float(line.split()[1]) for line in lines[2:5]}
    assert table.keys() == {"none", "gzip1", "delta"}
    assert list(table.values()) == sorted(table.values())
    assert lines[5].startswith("recommended: ")
    assert (tmp_path / "plot.png").stat().st_size > 5000


def test_bench_on_an_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "CartPole-v1", "--steps", 20, "--methods", "none,rle") == 0

    assert "observations: 20 of 4 float32" in capsys.readouterr().out


def test_recommend_for_vectors_with_nan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # as `auto`, which leaves vectors as they are
    vectors = CompressedArray((40, 2), (6,), np.float32)
    vectors[:] = np.where(np.arange(480).reshape(40, 2, 6) % 7, 1, np.nan)
    vectors.save(tmp_path / "vectors")

    assert run("recommend", tmp_path / "vectors", "--methods", "none,delta,table") == 0

    assert "recommended: none" in capsys.readouterr().out
