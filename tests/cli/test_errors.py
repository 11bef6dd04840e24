"""Whatever the command line is given, it answers with one line and an exit status, never with a traceback."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.save_util import save_to_pkl

from sb3_extra_buffers.cli.main import main
from sb3_extra_buffers.compressed import CompressedDictReplayBuffer, CompressedReplayBuffer
from sb3_extra_buffers.errors import MissingExtraError
from sb3_extra_buffers.files import load, save_file
from tests.files.filing import ACTIONS, BOX, BUFFERS, Feed

# the options of each command after its path; OUT is a file or folder to write
COMMANDS = {
    "info": [],
    "info --json": ["--json"],
    "verify": ["--deep"],
    "repair": ["OUT"],
    "montage": ["-o", "OUT.png"],
    "play": ["-o", "OUT.gif"],
    "view": ["-o", "OUT.html"],
    "convert": ["OUT.h5"],
    "convert --trust": ["OUT", "--trust"],
    "bench": ["-o", "OUT.png", "--methods", "none"],
    "recommend": ["-o", "OUT.png", "--methods", "none"],
}
GOLDEN = Path(__file__).parents[1] / "golden" / "saved"
every_command = pytest.mark.parametrize("command", COMMANDS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("buffers") / "saved"
    fill(BUFFERS["replay-delta"]()).save(folder)
    return folder


def fill(buffer: Any) -> Any:
    feed = Feed()
    for _ in range(20):
        feed.add_to(buffer)
    return buffer


def run(*arguments: Any) -> int:
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as end:  # of argparse
        return int(end.code or 0)


def attempt(command: str, source: Any, output: Path) -> int:
    options = [option.replace("OUT", str(output)) for option in COMMANDS[command]]
    return run(command.partition(" ")[0], source, *options)


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The message on stderr, which must be a single line."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("sb3-extra-buffers")
    assert "unexpected" not in lines[0]
    return lines[0]


# ---- what is read ----


def write_pickle(path: Path, value: Any) -> Path:
    path.write_bytes(pickle.dumps(value))
    return path


def write_bytes(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def foreign_folder(path: Path) -> Path:
    path.mkdir()
    (path / "manifest.json").write_text('{"name": "a web page"}')
    return path


def damaged(name: str, change: Callable[[Path], Any]) -> Callable[[Path, Path], Path]:
    def make(folder: Path, saved: Path) -> Path:
        shutil.copytree(saved, folder / "copy")
        change(next((folder / "copy").glob(name)))
        return folder / "copy"

    return make


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


NOT_SAVED: dict[str, Callable[[Path, Path], Any]] = {
    "missing": lambda folder, _: folder / "nowhere",
    "below a file": lambda folder, _: write_bytes(folder / "file", b"text") / "below",
    "name too long": lambda folder, _: folder / ("x" * 300),
    "empty name": lambda folder, _: "",
    "odd characters": lambda folder, _: folder / "\udcff\n\x1b[31m",
    "empty folder": lambda folder, _: folder,
    "foreign folder": lambda folder, _: foreign_folder(folder / "site"),
    "empty file": lambda folder, _: write_bytes(folder / "empty", b""),
    "random bytes": lambda folder, _: write_bytes(folder / "noise.bin", np.random.default_rng(0).bytes(5000)),
    "text": lambda folder, _: write_bytes(folder / "notes.txt", b"hello"),
    "zip": lambda folder, _: write_bytes(folder / "model.zip", b"PK\x03\x04" + bytes(100)),
    "device": lambda folder, _: "/dev/null",
    "pickle of a list": lambda folder, _: write_pickle(folder / "list.pkl", [1, 2]),
    "pickle of another suffix": lambda folder, _: write_pickle(folder / "list.dat", [1, 2]),
    "broken pickle": lambda folder, _: write_bytes(folder / "broken.pkl", b"\x80\x04broken"),
    "empty pickle": lambda folder, _: write_bytes(folder / "empty.pkl", b""),
    "pickle of a missing class": lambda folder, _: write_bytes(folder / "other.pkl", b"cnowhere\nThing\n."),
}
DAMAGED: dict[str, Callable[[Path, Path], Any]] = {
    "data cut": damaged("data-*.bin", cut),
    "data deleted": damaged("data-*.bin", Path.unlink),
    "data is a folder": damaged("data-*.bin", replace_by_folder),
    "manifest cut": damaged("manifest.json", cut),
    "manifest emptied": damaged("manifest.json", lambda path: path.write_bytes(b"")),
    "manifest deleted": damaged("manifest.json", Path.unlink),
    "manifest is a folder": damaged("manifest.json", replace_by_folder),
    "manifest is a link": damaged("manifest.json", replace_by_link),
}


@every_command
@pytest.mark.parametrize("kind", NOT_SAVED)
def test_what_is_not_a_saved_buffer_is_named(
    kind: str, command: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    source = NOT_SAVED[kind](tmp_path / "in", saved)

    # a pickle cannot be converted to HDF5
    assert attempt(command, source, tmp_path / "out" / "result") == (
        1 if command != "convert" or "pickle" not in kind else 2
    )

    message = error_of(capsys)
    if "pickle" in kind and command == "convert --trust":
        assert "cannot be unpickled" in message or "cannot be converted: it holds a list, not an SB3 buffer" in message
    elif command not in ("convert", "bench", "recommend"):
        expected = (
            "not a saved buffer",
            "no such file",
            "is empty",
            "cannot be read",
            "too long",
            "not a regular file",
        )
        assert any(part in message for part in expected)
        is_pickle = "pickle" in kind and kind != "empty pickle"
        assert ("convert it first: sb3-extra-buffers convert" in message) == is_pickle
    assert not list((tmp_path / "out").iterdir())


@every_command
@pytest.mark.parametrize("kind", DAMAGED)
def test_damage_is_named(
    kind: str, command: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    source = DAMAGED[kind](tmp_path, saved)

    status = attempt(command, source, tmp_path / "out" / "result")

    output = capsys.readouterr()
    assert "Traceback" not in output.err + output.out
    assert "unexpected" not in output.err
    if command == "verify":
        assert status == 1
        assert "damaged" in output.out
    elif command == "repair" and status == 0:
        assert run("verify", tmp_path / "out" / "result", "--deep") == 0
    else:
        assert status == 1
        assert len(output.err.splitlines()) == 1
        assert not list((tmp_path / "out").iterdir())


@every_command
def test_vectors_and_empty_buffers_need_no_traceback(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vectors = CompressedReplayBuffer(10, spaces.Box(-1, 1, (3,)), ACTIONS, device="cpu")
    zeros = np.zeros((1, 3), np.float32)
    vectors.add(zeros, zeros, np.zeros((1, 1)), np.full(1, np.inf), np.ones(1), [{}])
    vectors.save(tmp_path / "vectors")
    BUFFERS["replay-delta"]().save(tmp_path / "empty")

    for name in ("vectors", "empty"):
        status = attempt(command, tmp_path / name, tmp_path / f"{name}-out")
        output = capsys.readouterr()
        assert status in (0, 1, 2)
        assert "unexpected" not in output.err
        assert len(output.err.splitlines()) == (status != 0)
        if command in ("montage", "play") or (command, name) == ("view", "empty"):
            assert status == 1
            assert ("not images" if name == "vectors" else "the buffer is empty") in output.err


def test_what_only_some_commands_can_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchrl")
    storage = GOLDEN / "torchrl-storage"

    assert run("info", storage) == 0
    output = capsys.readouterr().out
    assert "class: CompressedStorage" in output
    assert "in TorchRL's LazyTensorStorage" in output
    assert run("verify", storage) == 0
    assert run("montage", storage, "-o", tmp_path / "x.png") == 1
    assert "holds a CompressedStorage, which only the commands info, verify and repair can read" in error_of(capsys)


@pytest.mark.parametrize("name", sorted(path.parent.name for path in GOLDEN.glob("*/manifest.json")))
def test_info_describes_everything_that_was_ever_saved(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        load(GOLDEN / name)
    except MissingExtraError as problem:
        pytest.skip(str(problem))

    assert run("info", GOLDEN / name) == 0
    assert "class: " in capsys.readouterr().out


# ---- what is written ----


UNWRITABLE: dict[str, Callable[[Path], Path]] = {
    "no such folder": lambda folder: folder / "nowhere" / "result",
    "below a file": lambda folder: write_bytes(folder / "file", b"text") / "result",
    "not a disk": lambda folder: Path("/proc/result"),
    "name too long": lambda folder: folder / ("x" * 300),
}


@pytest.mark.parametrize("command", [name for name, options in COMMANDS.items() if options and options != ["--json"]])
@pytest.mark.parametrize("kind", UNWRITABLE)
def test_what_cannot_be_written_is_named(
    kind: str, command: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if command == "verify":
        pytest.skip("verify writes nothing")
    if command == "convert":
        pytest.importorskip("h5py")
    if kind == "no such folder" and command in ("repair", "convert --trust"):
        pytest.skip("saving creates missing folders")
    source = saved
    if command == "convert --trust":
        buffer = fill(ReplayBuffer(52, BOX, ACTIONS, device="cpu", n_envs=2))
        save_to_pkl(tmp_path / "buffer.pkl", buffer)
        source = tmp_path / "buffer.pkl"
    output = UNWRITABLE[kind](tmp_path)

    assert attempt(command, source, output) == 1

    assert "result" in (message := error_of(capsys)) or "x" * 300 in message
    assert not os.path.lexists(output)


@pytest.mark.parametrize(("suffix", "keys"), [(".h5", ["a", "a/b"]), (".zarr", [".."])])
def test_keys_that_a_format_cannot_hold_are_named(
    suffix: str, keys: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip({".h5": "h5py", ".zarr": "zarr"}[suffix])
    space = spaces.Dict({key: spaces.Box(0, 1, (3,)) for key in keys})
    CompressedDictReplayBuffer(20, space, ACTIONS, "cpu").save(tmp_path / "saved")
    assert run("convert", tmp_path / "saved", tmp_path / f"x{suffix}") == 1
    assert f"cannot be written under the name 'observations/{keys[-1]}'" in error_of(capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@contextlib.contextmanager
def without_privileges() -> Iterator[None]:
    """Permissions do not apply to root."""
    user = os.geteuid()
    if not user:
        os.seteuid(65534)
    try:
        yield
    finally:
        if not user:
            os.seteuid(user)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "convert --trust"])
def test_missing_permissions_are_named(command: str, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if command == "convert":
        pytest.importorskip("h5py")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        for copy in ("readable", "closed", "unreadable"):
            shutil.copytree(saved, folder / copy)
        # modules are imported with all privileges
        attempt(command, folder / "readable", folder / "out")
        capsys.readouterr()
        (folder / "closed").chmod(0)
        (folder / "unreadable" / "manifest.json").chmod(0)
        with without_privileges():
            for copy in ("closed", "unreadable", "readable"):
                status = attempt(command, folder / copy, folder / "out2")
                output = capsys.readouterr()
                if copy == "readable" and command in ("info", "info --json", "verify"):
                    assert status == 0
                else:
                    assert status == 1
                    assert "permission denied" in (output.out + output.err).lower()
                    assert len(output.err.splitlines()) == (command != "verify" or copy == "closed")
        (folder / "closed").chmod(0o755)


def test_outputs_that_exist(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "mine.h5").write_text("mine")

    assert run("montage", saved, "-o", tmp_path / "folder.png") == 1
    assert "folder.png: it is a directory" in error_of(capsys)
    for arguments in (["convert", saved, tmp_path / "mine.h5"], ["repair", saved, tmp_path / "mine.h5"]):
        assert run(*arguments) == 1
        assert "mine.h5 already exists; choose another name" in error_of(capsys)
    assert (tmp_path / "mine.h5").read_text() == "mine"


# ---- wrong arguments ----


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="the system has no file whose reads fail")
def test_a_file_that_cannot_be_read_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("info", "/proc/self/mem") == 1
    assert "/proc/self/mem cannot be read: Input/output error" in error_of(capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: command"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["info"], "the following arguments are required: path"),
        (["info", "SAVED", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["repair", "SAVED"], "the following arguments are required: target"),
        *(
            (["montage", "SAVED", option, value], f"argument {option}: must be a whole number from 1 to")
            for option in ("--count", "--columns", "--scale")
            for value in ("0", "-3", "1.5", "many", "9" * 5000)
        ),
        (["play", "SAVED", "--steps", "0"], "argument --steps: must be a whole number from 1 to"),
        (["play", "SAVED", "--steps", "5", "--all"], "--all: not allowed with argument --steps"),
        (["play", "SAVED", "--episode", "first"], "argument --episode: invalid int value: 'first'"),
        (["play", "SAVED", "--episode", "99"], "there is no episode 99; episodes are numbered 0 to 5"),
        *(
            (["play", "SAVED", "--fps", value], "argument --fps: must be a number from 0.1 to 240")
            for value in ("0", "-1", "nan", "inf", "1e-300", "fast")
        ),
        (["play", "SAVED", "-o", "film.avi"], "'film.avi' must end in .gif or .mp4"),
        (["play", "SAVED", "-o", "film"], "'film' must end in .gif or .mp4"),
        (["montage", "SAVED", "-o", "sheet.tga"], "'sheet.tga' must end in .png, .jpg, .jpeg, .webp or .gif"),
        (["view", "SAVED", "-o", "OUT/manifest.json"], "manifest.json' must end in .html or .htm"),
        (["bench", "SAVED", "-o", "plot.txt"], "'plot.txt' must end in .png, .svg, .pdf, .jpg or .jpeg"),
        (["montage", "SAVED", "--key", "nowhere", "-o", "OUT/x.png"], "there are no images under the key 'nowhere'"),
        (["view", "SAVED", "--episodes", "1,x"], "argument --episodes: must be numbers such as 0,3,7-9, got '1,x'"),
        (["view", "SAVED", "--episodes", "0-99999999999"], "argument --episodes: must be numbers such as 0,3,7-9"),
        (["view", "SAVED", "--episodes", "5-2"], "argument --episodes: must be numbers such as 0,3,7-9"),
        (["view", "SAVED", "--episodes", "99", "-o", "OUT/x.html"], "there is no episode 99"),
        (["view", "SAVED", "--steps", "-1"], "argument --steps: must be a whole number from 1 to"),
        (["convert", "SAVED", "OUT/x", "--to", "csv"], "argument --to: invalid choice: 'csv'"),
        (["convert", "SAVED", "OUT/x"], "is a saved buffer already; use a target .h5 or .zarr, or pass --to"),
        (["convert", "PICKLE", "OUT/x.h5", "--trust"], "convert it to a saved buffer first, then that to hdf5"),
        (["convert", "PICKLE", "OUT/x"], "loading it runs any code it contains; pass --trust if you created it"),
        *(
            (["convert", "PICKLE", "OUT/x", "--trust", "--method", method], f"unknown compression method {method!r}")
            for method in ("nonsense", "", "delta delta")
        ),
        (["convert", "PICKLE", "OUT/x", "--trust", "--method", "gzip99"], "gzip"),
        (["bench", "SAVED", "--methods", "nonsense"], "unknown compression method 'nonsense'"),
        (["bench", "SAVED", "--methods", " , "], "--methods must name at least one method, got ' , '"),
        (["recommend", "SAVED", "--methods", "none,gzip99"], "gzip"),
        (["bench", "SAVED", "--steps", "x"], "argument --steps: must be a whole number from 1 to"),
    ],
)  # fmt: skip
def test_wrong_arguments_exit_with_status_2(
    arguments: list[str], message: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"SAVED": str(saved), "PICKLE": str(write_pickle(tmp_path / "list.pkl", [1]))}
    (tmp_path / "out").mkdir()

    assert run(*(names.get(each, each.replace("OUT", str(tmp_path / "out"))) for each in arguments)) == 2

    assert message in error_of(capsys)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    "name", ["NoSuchThing-v7", "CartPole-v999", "nowhere:Env-v0", "ALE/NoSuchGame-v5", "NoSuchNoFrameskip-v4", "::"]
)
@pytest.mark.filterwarnings("ignore")  # of gymnasium
def test_unknown_environments_are_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name.startswith("ALE/") or "NoFrameskip" in name:
        pytest.importorskip("ale_py")

    assert run("bench", name, "--methods", "none") == 1

    assert name.rpartition("/")[2].partition("NoFrameskip")[0] in error_of(capsys)


# ---- pipes and interrupts ----


def start(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sb3_extra_buffers", *map(str, arguments)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=120, env=env, **options)


@pytest.mark.parametrize("arguments", [["info"], ["info", "--json"], ["--help"]])
def test_a_closed_pipe_is_not_an_error_message(arguments: list[str], saved: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        process = start(*arguments, *[saved] * (arguments != ["--help"]), stdout=writing)
    finally:
        os.close(writing)

    assert (process.returncode, process.stderr) == (1, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_line(saved: Path) -> None:
    with open("/dev/full", "w") as full:
        process = start("info", saved, stdout=full)

    assert process.returncode == 1
    assert process.stderr == "sb3-extra-buffers info: error: No space left on device\n"


def test_an_interrupt_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "CartPole-v1", "--steps", 5, "--methods", "none") == 0
    capsys.readouterr()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        assert run("bench", "CartPole-v1", "--steps", 2_000_000_000, "--methods", "none") == 130
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    assert error_of(capsys) == "sb3-extra-buffers bench: error: interrupted"


def test_a_bug_is_one_line_that_says_how_to_report_it(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("no such luck")

    monkeypatch.setattr("sb3_extra_buffers.cli.info.describe", fail)

    assert run("info", saved) == 1
    assert "unexpected ZeroDivisionError: no such luck; this is a bug" in capsys.readouterr().err


def test_single_files_are_read_like_folders(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(fill(BUFFERS["replay-delta"]()), tmp_path / "one.bin")

    for command in ("info", "verify", "montage", "view", "bench"):
        assert attempt(command, tmp_path / "one.bin", tmp_path / "out") == 0
    assert "transitions: 40" in capsys.readouterr().out
