"""``sb3-extra-buffers``: its commands, their options, and what they print."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sb3_extra_buffers import __version__
from sb3_extra_buffers.cli.contents import Contents, memory_of, open_any
from sb3_extra_buffers.errors import ExtraBuffersError, FileFormatError, FileWriteError
from sb3_extra_buffers.files.parts import views_of
from sb3_extra_buffers.files.repairing import repair
from sb3_extra_buffers.files.verifying import verify
from sb3_extra_buffers.stores.usage import format_bytes

_EXPORTS = {".h5": "hdf5", ".hdf5": "hdf5", ".zarr": "zarr"}
_PICKLES = {".pkl", ".pickle"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status: 0, 1 for what was found, 2 for what went wrong."""
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
    parser = argparse.ArgumentParser(prog="sb3-extra-buffers", description="Look inside saved buffers.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command")

    info = _command(commands, "info", _info, "what is in a file: memory, codec, episodes, returns")
    info.add_argument("--json", action="store_true", help="as one JSON object")
    check = _command(commands, "verify", _verify, "look for damage; status 1 if there is any")
    check.add_argument("--deep", action="store_true", help="decode every observation as well")
    mend = _command(commands, "repair", _repair, "save what is whole of a damaged buffer as another")
    mend.add_argument("target", type=Path)

    sheet = _command(commands, "montage", _montage, "a contact sheet of observations (PNG)")
    sheet.add_argument("--count", type=int, default=64, help="how many pictures (64)")
    sheet.add_argument("--columns", type=int, default=8)
    film = _command(commands, "play", _play, "an episode as a film (.gif or .mp4)")
    film.add_argument("--episode", type=int, help="which one, counted from 0; all of environment 0 if not given")
    film.add_argument("--steps", type=int, default=1000, help="at most this many (1000)")
    film.add_argument("--fps", type=float, default=15)
    page = _command(commands, "view", _view, "one HTML page to scrub through episodes")
    page.add_argument("--steps", type=int, default=2000, help="at most this many (2000)")
    for command, name in ((sheet, "montage.png"), (film, "play.gif"), (page, "view.html")):
        command.add_argument("-o", "--output", type=Path, default=Path(name), help=f"({name})")
        command.add_argument("--key", help="which observations, where they are a Dict")
    for command in (sheet, film):
        command.add_argument("--scale", type=int, default=1, help="enlarge pixels so many times")

    convert = _command(commands, "convert", _convert, "SB3's pickle to ours; ours to HDF5, zarr or Minari")
    convert.add_argument("target", type=Path, help="a folder, NAME.h5, NAME.zarr, or with --to minari a dataset's name")
    convert.add_argument("--to", choices=["ours", "hdf5", "zarr", "minari"], help="if the name does not say it")
    convert.add_argument("--trust", action="store_true", help="load a pickle, and run whatever is in it")
    convert.add_argument("--method", default="auto", help="compression method for a pickle's observations (auto)")

    for name, run, text in (
        ("bench", _bench, "try the methods on a file or an environment id"),
        ("recommend", _bench, "the same, and name one"),
    ):
        trial = _command(commands, name, run, text, metavar="FILE_OR_ENV")
        trial.set_defaults(name=name)
        trial.add_argument("--steps", type=int, default=500, help="steps to try them on (500)")
        trial.add_argument("--methods", help="a list with commas; all that are installed if not given")
        trial.add_argument("--key", help="which observations, where they are a Dict")
        trial.add_argument("-o", "--output", type=Path, help="plot it (PNG)")
    return parser


def _command(commands: Any, name: str, run: Any, text: str, metavar: str = "path") -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.add_argument("path", metavar=metavar)
    command.set_defaults(run=run)
    return command


# ---- looking ----


def _info(args: argparse.Namespace) -> int:
    facts = describe(args.path)
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        for name, value in facts.items():
            print(f"{name}: {value}")
    return 0


def describe(path: str) -> dict[str, Any]:
    """What `info` prints."""
    saved, buffer = open_any(path)
    contents = Contents(buffer)
    record = saved.record
    facts: dict[str, Any] = {
        "path": str(path),
        "class": type(buffer).__name__,
        "kind": saved.kind,
        "format_version": record["version"],
        "library": record.get("library"),
        "saved": record.get("saved"),
        "bytes_on_disk": sum(entry.stat().st_size for entry in Path(path).iterdir()),
        "steps": contents.n_steps,
        "environments": contents.n_envs,
        "transitions": contents.n_transitions,
    }
    if not contents.is_array:
        facts |= {
            "capacity": int(buffer.buffer_size) * contents.n_envs,
            "observation_space": str(buffer.observation_space),
            "action_space": str(buffer.action_space),
        }
    usage = memory_of(buffer)
    if usage is not None:
        facts |= {"memory": format_bytes(usage.total), "percent_of_dense": round(100 * usage.ratio, 3)}
        for key, method in usage.codecs.items():
            facts[f"codec.{key}" if key else "codec"] = method
    for name, view in views_of(buffer):
        facts[f"shape.{name}"] = f"{view.shape} {view.dtype}"
    if not contents.is_array:
        facts |= _episode_facts(contents)
    if saved.journal is not None:
        from sb3_extra_buffers.files.journal import read_journal

        facts["steps_since_checkpoint"] = sum(1 for _ in read_journal(saved.journal))
    return facts


def _episode_facts(contents: Contents) -> dict[str, Any]:
    episodes = [episode for episode in contents.episodes() if episode.ended]
    facts: dict[str, Any] = {"episodes": len(episodes)}
    if episodes:
        totals = np.array([episode.total for episode in episodes])
        lengths = np.array([len(episode.steps) for episode in episodes])
        for name, values in (("return", totals), ("length", lengths)):
            for figure in ("mean", "min", "max"):
                facts[f"{name}_{figure}"] = round(float(getattr(values, figure)()), 4)
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


def _montage(args: argparse.Namespace) -> int:
    from sb3_extra_buffers.cli.pictures import encode_png, montage

    _, buffer = open_any(args.path)
    sheet = montage(Contents(buffer), args.count, args.columns, args.key, args.scale)
    _write(args.output, encode_png(sheet))
    return 0


def _play(args: argparse.Namespace) -> int:
    from sb3_extra_buffers.cli.pictures import film, write_film

    _, buffer = open_any(args.path)
    pictures = film(Contents(buffer), args.episode, args.key, args.steps, args.scale)
    write_film(args.output, pictures, args.fps)
    print(f"saved: {args.output} ({len(pictures)} pictures)")
    return 0


def _view(args: argparse.Namespace) -> int:
    from sb3_extra_buffers.cli.html_view import make_page

    _, buffer = open_any(args.path)
    contents = Contents(buffer)
    usage = memory_of(buffer)
    held = "" if usage is None else f", {format_bytes(usage.total)} in memory ({100 * usage.ratio:.2f} % of dense)"
    facts = f"{type(buffer).__name__}: {contents.n_transitions} transitions of {contents.n_envs} environments{held}"
    page = make_page(Path(args.path).name, facts, contents, args.key, args.steps)
    _write(args.output, page.encode())
    return 0


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as problem:
        raise FileWriteError(problem.errno, f"{path} cannot be written: {problem.strerror}") from problem
    print(f"saved: {path} ({len(data)} bytes)")


# ---- converting and measuring ----


def _convert(args: argparse.Namespace) -> int:
    from sb3_extra_buffers.cli import converting

    source = Path(args.path)
    kind = args.to or _EXPORTS.get(args.target.suffix.lower(), "ours")
    if args.target.exists():
        raise FileWriteError(17, f"{args.target} exists already; choose another name")
    if source.is_file():
        if kind != "ours":
            raise FileFormatError(f"{source} is a file: convert it to ours first, and then to {kind}")
        if source.suffix.lower() not in _PICKLES:
            raise FileFormatError(f"{source} is neither a saved buffer nor a pickle (.pkl)")
        buffer = converting.from_pickle(source, args.target, args.trust, args.method)
        print(f"class: {type(buffer).__name__}")
    else:
        saved, buffer = open_any(source)
        if kind == "hdf5":
            converting.to_hdf5(saved, buffer, args.target)
        elif kind == "zarr":
            converting.to_zarr(saved, buffer, args.target)
        elif kind == "minari":
            converting.to_minari(buffer, args.target)
        else:
            raise FileFormatError(f"{source} is one of ours already; name the target .h5 or .zarr, or pass --to")
    print(f"saved: {args.target} ({kind})")
    return 0


def _bench(args: argparse.Namespace) -> int:
    from sb3_extra_buffers.cli import bench

    methods = args.methods.split(",") if args.methods else bench.available_methods()
    observations = bench.observations_from(args.path, args.steps, args.key)
    rows = sorted(bench.bench(observations, methods), key=lambda row: row.percent)
    shape = "x".join(map(str, observations.shape[2:]))
    print(f"observations: {observations.shape[0] * observations.shape[1]} of {shape} {observations.dtype}")
    print(bench.table(rows))
    if args.name == "recommend":
        best = bench.recommend(rows)
        print(f"recommended: {best.method} ({best.percent:.2f} % of dense, {best.read_us:.1f} us to read one)")
    if args.output is not None:
        bench.plot(rows, args.output, Path(args.path).name)
        print(f"saved: {args.output}")
    return 0


def commands() -> Iterator[str]:
    """The names of the commands."""
    for action in _parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices


if __name__ == "__main__":
    sys.exit(main())
