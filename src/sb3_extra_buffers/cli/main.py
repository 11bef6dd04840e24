"""The ``sb3-extra-buffers`` command line: subcommands, their options and output."""

from __future__ import annotations

import argparse
import errno
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sb3_extra_buffers import __version__
from sb3_extra_buffers.cli.reader import BufferReader, memory_of, open_buffer
from sb3_extra_buffers.errors import ExtraBuffersError, FileFormatError, FileWriteError
from sb3_extra_buffers.files.parts import views_of
from sb3_extra_buffers.files.repairing import repair
from sb3_extra_buffers.files.verifying import verify
from sb3_extra_buffers.stores.usage import format_bytes

_EXPORTS = {".h5": "hdf5", ".hdf5": "hdf5", ".zarr": "zarr"}
_PICKLES = {".pkl", ".pickle"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return 0 on success, 1 if ``verify`` found damage, 2 after an error."""
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        status: int = args.run(args)
    except ExtraBuffersError as problem:
        print(f"{parser.prog}: {type(problem).__name__}: {problem}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sb3-extra-buffers", description="Inspect, check, convert and benchmark saved buffers."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command")

    info = _command(commands, "info", _info, "show what a saved buffer holds: memory, codec, episodes, returns")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    check = _command(commands, "verify", _verify, "check a saved buffer for damage; exit status 1 if there is any")
    check.add_argument("--deep", action="store_true", help="also decode every observation")
    mend = _command(commands, "repair", _repair, "save the undamaged part of a buffer to a new folder")
    mend.add_argument("target", type=Path, help="folder to create")

    sheet = _command(commands, "montage", _montage, "write a contact sheet of observations (PNG)")
    sheet.add_argument("--count", type=int, default=64, help="number of images (default: 64)")
    sheet.add_argument("--columns", type=int, default=8, help="images per row (default: 8)")
    animation = _command(commands, "play", _play, "write an episode as an animation (GIF or MP4)")
    animation.add_argument("--episode", type=int, help="number of the episode, from 0 (default: all of environment 0)")
    animation.add_argument("--steps", type=int, default=1000, help="maximum number of steps (default: 1000)")
    animation.add_argument("--fps", type=float, default=15, help="frames per second (default: 15)")
    page = _command(commands, "view", _view, "write an HTML page to browse the episodes")
    page.add_argument("--steps", type=int, default=2000, help="maximum number of steps (default: 2000)")
    for command, name in ((sheet, "montage.png"), (animation, "play.gif"), (page, "view.html")):
        command.add_argument("-o", "--output", type=Path, default=Path(name), help=f"file to write (default: {name})")
        command.add_argument("--key", help="key of the observations to show, if they are a Dict")
    for command in (sheet, animation):
        command.add_argument("--scale", type=int, default=1, help="factor by which pixels are enlarged (default: 1)")

    text = "convert an SB3 pickle to a saved buffer, or a saved buffer to HDF5, zarr or Minari"
    convert = _command(commands, "convert", _convert, text, "a .pkl file, or folder of a saved buffer")
    convert.add_argument("target", type=Path, help="a folder, NAME.h5, NAME.zarr or, with --to minari, a dataset name")
    convert.add_argument(
        "--to", choices=["ours", "hdf5", "zarr", "minari"], help="target format (default: from the target's suffix)"
    )
    convert.add_argument("--trust", action="store_true", help="load a pickle, which runs any code it contains")
    convert.add_argument("--method", default="auto", help="compression method for a pickle (default: auto)")

    for name, text in (
        ("bench", "benchmark compression methods on a saved buffer or an environment"),
        ("recommend", "benchmark compression methods and recommend one"),
    ):
        trial = _command(commands, name, _bench, text, "folder of a saved buffer, or the id of an environment")
        trial.set_defaults(name=name)
        trial.add_argument("--steps", type=int, default=500, help="number of steps to use (default: 500)")
        trial.add_argument("--methods", help="comma-separated methods (default: all that are installed)")
        trial.add_argument("--key", help="key of the observations to use, if they are a Dict")
        trial.add_argument("-o", "--output", type=Path, help="PNG file to plot the results to")
    return parser


def _command(
    commands: Any, name: str, run: Any, text: str, source: str = "folder of a saved buffer"
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.add_argument("path", help=source)
    command.set_defaults(run=run)
    return command


# ---- inspecting and checking ----


def _info(args: argparse.Namespace) -> int:
    facts = describe(args.path)
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        for name, value in facts.items():
            print(f"{name}: {value}")
    return 0


def describe(path: str) -> dict[str, Any]:
    """Return what ``info`` prints."""
    saved, buffer = open_buffer(path)
    reader = BufferReader(buffer)
    record = saved.record
    facts: dict[str, Any] = {
        "path": str(path),
        "class": type(buffer).__name__,
        "kind": saved.kind,
        "format_version": record["version"],
        "library": record.get("library"),
        "saved": record.get("saved"),
        "bytes_on_disk": sum(file.stat().st_size for file in Path(path).iterdir()),
        "steps": reader.n_steps,
        "environments": reader.n_envs,
        "transitions": reader.n_transitions,
    }
    if not reader.is_array:
        facts |= {
            "capacity": int(buffer.buffer_size) * reader.n_envs,
            "observation_space": str(buffer.observation_space),
            "action_space": str(buffer.action_space),
        }
    usage = memory_of(buffer)
    if usage is not None:
        percent = None if usage.ratio is None else round(100 * usage.ratio, 3)
        facts |= {"memory": format_bytes(usage.total), "percent_of_dense": percent}
        for key, method in usage.codecs.items():
            facts[f"codec.{key}" if key else "codec"] = method
    for name, view in views_of(buffer):
        facts[f"shape.{name}"] = f"{view.shape} {view.dtype}"
    if not reader.is_array:
        facts |= _episode_facts(reader)
    if saved.journal is not None:
        from sb3_extra_buffers.files.journal import read_journal

        facts["steps_since_checkpoint"] = sum(1 for _ in read_journal(saved.journal))
    return facts


def _episode_facts(reader: BufferReader) -> dict[str, Any]:
    episodes = [episode for episode in reader.episodes() if episode.ended]
    facts: dict[str, Any] = {"episodes": len(episodes)}
    if episodes:
        returns = np.array([episode.total_reward for episode in episodes])
        lengths = np.array([len(episode.steps) for episode in episodes])
        for name, values in (("return", returns), ("length", lengths)):
            for statistic in ("mean", "min", "max"):
                facts[f"{name}_{statistic}"] = round(float(getattr(values, statistic)()), 4)
    return facts


def _verify(args: argparse.Namespace) -> int:
    count = 0
    for finding in verify(args.path, args.deep):
        print(f"damaged: {finding}")
        count += 1
    print(f"{args.path}: " + (f"{count} findings" if count else "ok"))
    return 1 if count else 0


def _repair(args: argparse.Namespace) -> int:
    report = repair(args.path, args.target)
    for finding in report.findings:
        print(f"found: {finding}")
    print(f"kept: {report.n_steps}" if report.findings else "kept: all")
    print(f"lost: {report.n_lost}")
    print(f"saved: {args.target}")
    return 0


# ---- images ----


def _montage(args: argparse.Namespace) -> int:
    from sb3_extra_buffers.cli.images import montage
    from sb3_extra_buffers.recording.images import encode_png

    _, buffer = open_buffer(args.path)
    sheet = montage(BufferReader(buffer), args.count, args.columns, args.key, args.scale)
    _write(args.output, encode_png(sheet))
    return 0


def _play(args: argparse.Namespace) -> int:
    from sb3_extra_buffers.cli.images import episode_images, write_animation

    _, buffer = open_buffer(args.path)
    images = episode_images(BufferReader(buffer), args.episode, args.key, args.steps, args.scale)
    write_animation(args.output, images, args.fps)
    print(f"saved: {args.output} ({len(images)} frames)")
    return 0


def _view(args: argparse.Namespace) -> int:
    from sb3_extra_buffers.cli.html_view import make_page

    _, buffer = open_buffer(args.path)
    reader, usage = BufferReader(buffer), memory_of(buffer)
    facts = f"{type(buffer).__name__}: {reader.n_transitions} transitions of {reader.n_envs} environments"
    if usage is not None:
        facts += f"; memory: {str(usage).splitlines()[0]}"
    page = make_page(Path(args.path).name, facts, reader, args.key, args.steps)
    _write(args.output, page.encode())
    return 0


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as problem:
        raise FileWriteError(problem.errno, f"cannot write {path}: {problem.strerror}") from problem
    print(f"saved: {path} ({len(data)} bytes)")


# ---- converting and benchmarking ----


def _convert(args: argparse.Namespace) -> int:
    from sb3_extra_buffers.cli import convert

    source = Path(args.path)
    kind = args.to or _EXPORTS.get(args.target.suffix.lower(), "ours")
    if args.target.exists():
        raise FileWriteError(errno.EEXIST, f"{args.target} already exists; choose another name")
    if source.is_file():
        if kind != "ours":
            raise FileFormatError(f"{source} is a file: convert it to a saved buffer first, then that to {kind}")
        if source.suffix.lower() not in _PICKLES:
            raise FileFormatError(f"{source} is neither a saved buffer nor a pickle (.pkl)")
        buffer = convert.from_pickle(source, args.target, args.trust, args.method)
        print(f"class: {type(buffer).__name__}")
    else:
        saved, buffer = open_buffer(source)
        if kind == "hdf5":
            convert.to_hdf5(saved, buffer, args.target)
        elif kind == "zarr":
            convert.to_zarr(saved, buffer, args.target)
        elif kind == "minari":
            convert.to_minari(buffer, args.target)
        else:
            raise FileFormatError(f"{source} is a saved buffer already; use a target .h5 or .zarr, or pass --to")
    print(f"saved: {args.target} ({kind})")
    return 0


def _bench(args: argparse.Namespace) -> int:
    from sb3_extra_buffers.cli import bench

    methods = args.methods.split(",") if args.methods else bench.available_methods()
    observations = bench.load_observations(args.path, args.steps, args.key)
    results = sorted(bench.run_benchmark(observations, methods), key=lambda result: result.percent)
    n_steps, n_envs, *shape = observations.shape
    print(f"observations: {n_steps * n_envs} of {'x'.join(map(str, shape))} {observations.dtype}")
    print(bench.format_table(results))
    if args.name == "recommend":
        best = bench.recommend(results)
        print(f"recommended: {best.method} ({best.percent:.2f} % of dense, {best.read_us:.1f} us per observation read)")
    if args.output is not None:
        bench.plot(results, args.output, Path(args.path).name)
        print(f"saved: {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
