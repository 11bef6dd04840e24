"""The ``sb3-extra-buffers`` command line: commands, their options, output and errors.

Modules are imported by the commands that need them: ``--help`` is immediate, and ``info`` needs neither torch nor SB3.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sb3_extra_buffers import __version__
from sb3_extra_buffers.errors import (
    ArgumentError,
    CodecLevelError,
    CodecOptionError,
    ExportError,
    ExtraBuffersError,
    FileWriteError,
    UnknownCodecError,
    UntrustedFileError,
)

# exit statuses
_FAILURE, _USAGE, _INTERRUPTED = 1, 2, 130

_USAGE_ERRORS = (
    ArgumentError, CodecLevelError, CodecOptionError, ExportError, UnknownCodecError, UntrustedFileError,
)  # fmt: skip
_SOURCE = "saved buffer or recording"
_EXPORTS = {".h5": "hdf5", ".hdf5": "hdf5", ".zarr": "zarr"}
_PICKLES = {".pkl", ".pickle"}
_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif")
_ANIMATIONS = (".gif", ".mp4")
_PAGES = (".html", ".htm")
# the size that `view` stops at without --all; browsers open a page of this size at once
_MAX_PAGE_BYTES = 32e6
_PLOTS = (".png", ".svg", ".pdf", ".jpg", ".jpeg")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return 0 on success, 1 if it failed or found damage, 2 if its arguments are wrong."""
    if hasattr(sys.stdout, "reconfigure"):
        # paths may contain what the terminal cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    program = "sb3-extra-buffers"
    try:
        try:
            args = _parser().parse_args(arguments)
            program = f"{program} {args.command}"
            status: int = args.run(args)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        # the reader of the output, such as head, has seen enough
        _discard_output()
        return _FAILURE
    except (Exception, KeyboardInterrupt) as problem:
        if sys.flags.dev_mode:
            raise
        status, message = _explain(problem)
        print(f"{program}: error: {_one_line(message)}", file=sys.stderr)
    return status


def _one_line(text: str) -> str:
    """Return ``text`` without line breaks, and with escapes for what cannot be printed."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in " ".join(text.split()))


def _explain(problem: BaseException) -> tuple[int, str]:
    """Return the exit status and the message for an exception."""
    if isinstance(problem, KeyboardInterrupt):
        return _INTERRUPTED, "interrupted"
    if isinstance(problem, OSError) and not isinstance(problem, ExtraBuffersError):
        if problem.filename is None:
            _discard_output()
        reason = problem.strerror or str(problem) or type(problem).__name__
        return _FAILURE, reason if problem.filename is None else f"{problem.filename}: {reason}"
    status = _USAGE if isinstance(problem, _USAGE_ERRORS) else _FAILURE
    if isinstance(problem, ExtraBuffersError):
        # str() of an OSError starts with its number
        return status, str(getattr(problem, "strerror", None) or problem)
    if isinstance(problem, MemoryError):
        return status, f"not enough memory: {problem}" if str(problem) else "not enough memory"
    return status, (
        f"unexpected {type(problem).__name__}: {problem}; this is a bug: please report it with the traceback that "
        "python -X dev -m sb3_extra_buffers prints"
    )


def _discard_output() -> None:
    """Drop what stdout still holds, so that Python does not try to write it again at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ---- arguments ----


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)


class _Parser(argparse.ArgumentParser):
    """Reports an error on one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(_USAGE, f"{self.prog}: error: {_one_line(message)}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="sb3-extra-buffers",
        description="Inspect, check, show, convert and benchmark saved buffers.",
        epilog="Exit status: 0 on success, 1 if the command fails or finds damage, 2 if its arguments are wrong.",
        formatter_class=_HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")

    info = _command(commands, "info", _info, "show what a saved buffer holds: memory, method, episodes, returns")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    check = _command(commands, "verify", _verify, "check a saved buffer for damage; exit with status 1 if there is any")
    check.add_argument("--deep", action="store_true", help="also decode every observation")
    mend = _command(commands, "repair", _repair, "save the undamaged part of a buffer to a new folder")
    mend.add_argument("target", type=Path, help="folder to create")

    sheet = _command(commands, "montage", _montage, "write evenly spaced observations to one image")
    sheet.add_argument("--count", type=_count, metavar="N", default=64, help="number of observations (default: 64)")
    sheet.add_argument("--columns", type=_count, metavar="N", default=8, help="observations per row (default: 8)")
    film = _command(commands, "play", _play, "write an episode as an animation")
    film.add_argument("--episode", type=int, metavar="N", help="episode, from 0 (default: all of environment 0)")
    length = film.add_mutually_exclusive_group()
    length.add_argument(
        "--steps", type=_count, metavar="N", default=1000, help="write at most this many steps (default: 1000)"
    )
    length.add_argument("--all", action="store_true", help="write all steps")
    film.add_argument("--fps", type=_fps, default=15, help="frames per second (default: 15)")
    page = _command(commands, "view", _view, "write an HTML page to browse the episodes")
    page.add_argument("--episodes", type=_numbers, metavar="N,N", help="episodes to include, such as 0,3,7-9")
    length = page.add_mutually_exclusive_group()
    length.add_argument(
        "--steps", type=_count, metavar="N", default=2000, help="include at most this many steps (default: 2000)"
    )
    length.add_argument("--all", action="store_true", help="include all steps, however large the page becomes")
    names = page.add_mutually_exclusive_group()
    names.add_argument(
        "--action-names", type=_names, metavar="NAME,NAME", default=(), help="names of the actions, such as NOOP,FIRE"
    )
    names.add_argument("--env", metavar="ID", help="Atari environment to take the names of the actions from")
    _add_output(sheet, "montage.png", _IMAGES)
    _add_output(film, "play.gif", _ANIMATIONS)
    _add_output(page, "view.html", _PAGES)
    for command in (sheet, film, page):
        command.add_argument("--key", help="key of the observations to show, if they are a Dict")
    for command in (sheet, film):
        command.add_argument(
            "--scale", type=_count, metavar="N", default=1, help="factor by which to enlarge images (default: 1)"
        )

    text = "convert an SB3 pickle to a saved buffer, or a saved buffer to HDF5, zarr or Minari"
    convert = _command(commands, "convert", _convert, text, "pickle (.pkl), or saved buffer or recording")
    convert.add_argument("target", type=Path, help="folder, NAME.h5, NAME.zarr or, with --to minari, dataset to create")
    convert.add_argument(
        "--to", choices=["folder", "hdf5", "zarr", "minari"], help="format to write (default: from the target's suffix)"
    )
    convert.add_argument("--trust", action="store_true", help="load the pickle, which runs any code that it contains")
    convert.add_argument("--method", default="auto", help="compression method to use for a pickle (default: auto)")

    for name, text in (
        ("bench", "benchmark compression methods on a saved buffer or an environment"),
        ("recommend", "benchmark compression methods and recommend one"),
    ):
        trial = _command(commands, name, _bench, text, "saved buffer or recording, or the id of an environment")
        trial.add_argument("--steps", type=_count, metavar="N", default=500, help="steps to use (default: 500)")
        trial.add_argument(
            "--methods", metavar="NAME,NAME", help="methods to compare (default: all that are installed)"
        )
        trial.add_argument("--key", help="key of the observations to use, if they are a Dict")
        trial.add_argument(
            "--prefer", choices=["memory", "speed"], help="give memory or speed more weight in the score"
        )
        _add_output(trial, None, _PLOTS, "plot the results to this file")
    return parser


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, source: str = _SOURCE
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.", formatter_class=_HelpFormatter
    )
    command.add_argument("path", help=source)
    command.set_defaults(run=run)
    return command


def _add_output(
    command: argparse.ArgumentParser, default: str | None, suffixes: Sequence[str], text: str = "file to write"
) -> None:
    notes = [", ".join(suffixes)] + ([f"default: {default}"] if default else [])

    def output(text: str) -> Path:
        path = Path(text)
        # files are replaced without asking, so never one of a saved buffer
        if path.suffix.lower() not in suffixes:
            raise argparse.ArgumentTypeError(f"{text!r} must end in {', '.join(suffixes[:-1])} or {suffixes[-1]}")
        return path

    command.add_argument(
        "-o", "--output", type=output, metavar="FILE", default=default, help=f"{text} ({'; '.join(notes)})"
    )


def _count(text: str) -> int:
    with contextlib.suppress(ValueError):
        if 1 <= (value := int(text)) < 1 << 31:
            return value
    raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {(1 << 31) - 1}, got {text[:40]!r}")


def _fps(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.1 <= (value := float(text)) <= 240:
            return value
    raise argparse.ArgumentTypeError(f"must be a number from 0.1 to 240, got {text[:40]!r}")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _numbers(text: str) -> list[int]:
    """Parse ``0,3,7-9``."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            added = range(int(first), int(last or first) + 1)
        except ValueError:
            added = range(0)
        if not 0 < len(added) < 1 << 20:
            raise argparse.ArgumentTypeError(f"must be numbers such as 0,3,7-9, got {text[:40]!r}")
        numbers += added
    return numbers


# ---- inspecting and checking ----


def _info(args: argparse.Namespace) -> int:
    from sb3_extra_buffers.cli.info import as_json, as_text, describe

    facts = describe(args.path)
    print(as_json(facts) if args.json else as_text(facts))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from sb3_extra_buffers.files.verifying import verify

    count = 0
    for finding in verify(args.path, args.deep):
        print(f"damaged: {finding}")
        count += 1
    print(f"{args.path}: " + (f"damaged ({count} finding{'s' * (count > 1)})" if count else "ok"))
    return _FAILURE if count else 0


def _repair(args: argparse.Namespace) -> int:
    from sb3_extra_buffers.files.repairing import repair

    _check_is_new(args.target)
    report = repair(args.path, args.target)
    for finding in report.findings:
        print(f"damaged: {finding}")
    print(f"kept: {report.n_steps} of {report.n_steps + report.n_lost}" if report.findings else "kept: all")
    print(f"saved: {args.target}")
    return 0


# ---- images ----


def _montage(args: argparse.Namespace) -> int:
    from sb3_extra_buffers.cli.images import encode_image, montage
    from sb3_extra_buffers.cli.reader import BufferReader, open_buffer
    from sb3_extra_buffers.files import disk

    output = _checked_output(args.output)
    reader = BufferReader(open_buffer(args.path)[1])
    sheet = montage(reader, args.count, args.columns, args.key, args.scale)
    with disk.replacing(output) as staged:
        staged.write_bytes(encode_image(sheet, output.suffix))
    print(f"saved: {output} ({min(args.count, reader.n_transitions)} of {reader.n_transitions} observations)")
    return 0


def _play(args: argparse.Namespace) -> int:
    from sb3_extra_buffers.cli.images import choose_steps, read_images, write_animation
    from sb3_extra_buffers.cli.reader import BufferReader, open_buffer
    from sb3_extra_buffers.files import disk

    output = _checked_output(args.output)
    reader = BufferReader(open_buffer(args.path)[1])
    steps, env = choose_steps(reader, args.episode)
    shown = steps if args.all else steps[: args.steps]
    with disk.replacing(output) as staged:
        write_animation(staged, read_images(reader, args.key, shown, shown * 0 + env), args.fps, args.scale)
    print(f"saved: {output} ({len(shown)} frames)")
    if len(shown) < len(steps):
        print(f"left out: {len(steps) - len(shown)} of {len(steps)} steps; pass --all to write all of them")
    if args.episode is None and reader.n_envs > 1:
        print(f"left out: {reader.n_envs - 1} of {reader.n_envs} environments; select an episode with --episode")
    return 0


def _view(args: argparse.Namespace) -> int:
    from sb3_extra_buffers.cli.charts import action_names_of
    from sb3_extra_buffers.cli.html_view import make_page
    from sb3_extra_buffers.cli.info import class_of
    from sb3_extra_buffers.cli.reader import BufferReader, memory_of, open_buffer
    from sb3_extra_buffers.files import disk
    from sb3_extra_buffers.stores.usage import format_bytes

    output = _checked_output(args.output)
    saved, buffer = open_buffer(args.path)
    reader = BufferReader(buffer)
    page = make_page(
        Path(args.path).resolve().name,
        class_of(saved),
        reader,
        memory_of(open_buffer(args.path, measured=True)[1]),
        key=args.key,
        episodes=args.episodes,
        max_steps=None if args.all else args.steps,
        max_bytes=None if args.all else _MAX_PAGE_BYTES,
        action_names=action_names_of(args.env) if args.env else args.action_names,
    )
    text = page.html.encode()
    with disk.replacing(output) as staged:
        staged.write_bytes(text)
    print(f"saved: {output} ({format_bytes(len(text))})")
    n_left_out = reader.n_transitions - page.n_steps
    if n_left_out:
        print(
            f"left out: {n_left_out} of {reader.n_transitions} steps; pass --episodes to choose others, --all for all"
        )
    return 0


def _checked_output(path: str | Path) -> Path:
    """Return the file to write; raise early, before minutes of work, if that will fail."""
    output = Path(path)
    if output.is_dir():
        raise FileWriteError(errno.EISDIR, f"cannot write {output}: it is a directory")
    if not output.parent.is_dir():
        raise FileWriteError(errno.ENOENT, f"cannot write {output}: {output.parent} is not a directory")
    # the file is written beside its place and then moved there
    if not os.access(output.parent, os.W_OK) or (output.exists() and not os.access(output, os.W_OK)):
        raise FileWriteError(errno.EACCES, f"cannot write {output}: permission denied")
    return output


def _check_is_new(target: Path) -> None:
    if os.path.lexists(target):
        raise FileWriteError(errno.EEXIST, f"{target} already exists; choose another name")


# ---- converting and benchmarking ----


def _convert(args: argparse.Namespace) -> int:
    from sb3_extra_buffers.cli import convert
    from sb3_extra_buffers.cli.reader import open_buffer

    source, target = Path(args.path), args.target
    kind = args.to or _EXPORTS.get(target.suffix.lower(), "folder")
    _check_is_new(target)
    if _is_pickle(source):
        if kind != "folder":
            raise ArgumentError(f"{source} is a pickle: convert it to a saved buffer first, then that to {kind}")
        name = convert.from_pickle(source, target, args.trust, args.method)
        print(f"class: {name}")
    else:
        saved, buffer = open_buffer(source)
        if kind == "folder":
            raise ArgumentError(f"{source} is a saved buffer already; use a target .h5 or .zarr, or pass --to")
        with _removed_on_failure(target):
            if kind == "hdf5":
                convert.to_hdf5(saved, buffer, target)
            elif kind == "zarr":
                convert.to_zarr(saved, buffer, target)
            else:
                convert.to_minari(buffer, target)
    print(f"saved: {target} ({kind})")
    return 0


def _is_pickle(path: Path) -> bool:
    if path.suffix.lower() in _PICKLES:
        return not path.is_dir()
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(1) == b"\x80"


@contextlib.contextmanager
def _removed_on_failure(target: Path) -> Iterator[None]:
    """Delete ``target``, which did not exist before, if writing it fails."""
    import shutil

    try:
        yield
    except BaseException:
        if target.is_dir():
            shutil.rmtree(target, ignore_errors=True)
        else:
            target.unlink(missing_ok=True)
        raise


def _bench(args: argparse.Namespace) -> int:
    from sb3_extra_buffers.cli import bench
    from sb3_extra_buffers.files import disk

    output = None if args.output is None else _checked_output(args.output)
    methods = None if args.methods is None else bench.parse_methods(args.methods)
    observations = bench.load_observations(args.path, args.steps, args.key)
    n_steps, n_envs, *shape = observations.shape
    methods = methods or bench.available_methods(observations)
    results = sorted(bench.run_benchmark(observations, methods, prefer=args.prefer), key=lambda result: result.percent)
    print(f"observations: {n_steps * n_envs} of {'x'.join(map(str, shape))} {observations.dtype}")
    print(bench.format_table(results))
    if args.command == "recommend":
        best = bench.recommend(results)
        print(f"recommended: {best.method}")
    if output is not None:
        with disk.replacing(output) as staged:
            bench.plot(results, staged, Path(args.path).name)
        print(f"saved: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
