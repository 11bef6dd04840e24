"""The power fails at any moment: what `save` returned from, and what was acknowledged with ``sync=True``, is there.

Every operation on the disk is recorded while a scenario runs. From the record the disks are made that a power cut may
leave behind: what was synced is there; of everything since, any part may be missing, pages of a file as well as names
in a folder.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sb3_extra_buffers import files
from sb3_extra_buffers.errors import ExtraBuffersError, FileFormatError
from sb3_extra_buffers.stores.file_heap import FileHeap
from tests.torture.running import Outcome, Report, brief, run_trials
from tests.torture.saveables import Saveable, Service, saveables, set_up
from tests.torture.subjects import Contents, difference, make_steps

_PAGE = 4096


# ---- recording ----


@dataclass
class Event:
    """What an operation did: to the data of files, to the names in folders, or that it waited for the disk."""

    data: dict[int, bytes] = field(default_factory=dict)  # file: what it holds now
    names: dict[tuple[int, str], int | None] = field(default_factory=dict)  # (folder, name): file or folder, or gone
    synced: int | None = None  # a file or a folder
    said: str = ""


class Recorder:
    """Records what happens below a folder, whoever does it: after every call that changes a disk, it looks."""

    _CALLS = ("open", "write", "writev", "pwrite", "ftruncate", "posix_fallocate", "replace", "rename", "unlink",
              "remove", "link", "mkdir", "rmdir", "fsync", "fdatasync", "close")  # fmt: skip

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events: list[Event] = []
        self._data: dict[int, bytes] = {}
        self._names: dict[tuple[int, str], int] = {}
        self._busy = False
        self.folders: set[int] = set()
        # the system uses inodes of deleted files again; these numbers are never used again
        self._numbers: dict[int, int] = {}
        self._n_numbers = 0
        self.root_number = self._number(root.stat().st_ino)

    def _number(self, inode: int) -> int:
        if inode not in self._numbers:
            self._n_numbers += 1
            self._numbers[inode] = self._n_numbers
        return self._numbers[inode]

    def __enter__(self) -> Recorder:
        self._kept = {name: getattr(os, name) for name in self._CALLS if hasattr(os, name)}
        for name, call in self._kept.items():
            setattr(os, name, self._instead(name, call))
        self._flush = FileHeap.flush
        recorder, flush = self, FileHeap.flush

        def flush_heap(heap: FileHeap) -> None:
            recorder.look("before a flush")
            flush(heap)
            recorder.events.append(
                Event(synced=recorder._number(os.stat(heap.file).st_ino), said=f"flush {heap.file.name}")
            )

        FileHeap.flush = flush_heap  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        for name, call in self._kept.items():
            setattr(os, name, call)
        FileHeap.flush = self._flush  # type: ignore[method-assign]
        self.look("end")

    def _instead(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if self._busy:
                return call(*args, **kwargs)
            if name in ("fsync", "fdatasync"):
                self.look("before a sync")
                number = self._number(os.fstat(args[0]).st_ino)
                result = call(*args, **kwargs)
                self.events.append(Event(synced=number, said=name))
                return result
            result = call(*args, **kwargs)
            self.look(name)
            return result

        return recorded

    def look(self, said: str) -> None:
        """Record how the folder differs from when it was last looked at."""
        if self._busy:
            return
        self._busy = True
        try:
            names, data = {}, {}
            todo = [self.root]
            while todo:
                folder = todo.pop()
                parent = self._number(folder.stat().st_ino)
                self.folders.add(parent)
                for entry in os.scandir(folder):
                    number = self._number(entry.stat(follow_symlinks=False).st_ino)
                    names[parent, entry.name] = number
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(Path(entry.path))
                    elif entry.name != "lock":
                        data[number] = Path(entry.path).read_bytes()
        finally:
            self._busy = False
        event = Event(said=said)
        event.data = {number: held for number, held in data.items() if self._data.get(number) != held}
        event.names = {key: number for key, number in names.items() if self._names.get(key) != number}
        event.names |= dict.fromkeys(self._names.keys() - names.keys())
        self._data, self._names = data, names
        here = {self.root_number, *names.values()}
        self._numbers = {inode: number for inode, number in self._numbers.items() if number in here}
        if event.data or event.names:
            self.events.append(event)


# ---- what is left ----


class Disk:
    """What a disk may hold after some of the events, of which the last ones may not have got there."""

    def __init__(self, recorder: Recorder, stop: int, rng: random.Random, mode: str) -> None:
        self.root, self.folders = recorder.root_number, recorder.folders
        durable: dict[int, bytes] = {}
        since: dict[int, list[bytes]] = {}
        names: dict[tuple[int, str], int] = {}
        pending: list[dict[tuple[int, str], int | None]] = []
        for event in recorder.events[:stop]:
            for inode, held in event.data.items():
                since.setdefault(inode, []).append(held)
            if event.names:
                pending.append(event.names)
            if event.synced is None:
                continue
            if event.synced in self.folders:
                pending = _sync_names(names, pending, event.synced)
            elif event.synced in since:
                durable[event.synced] = since.pop(event.synced)[-1]
        for change in pending:
            if mode == "all" or (mode == "some" and rng.random() < 0.5):
                _apply(names, change)
        self.names = names
        self.data = dict(durable)
        for inode, versions in since.items():
            before = durable.get(inode, b"")
            self.data[inode] = (
                versions[-1] if mode == "all" else before if mode == "none" else _mix(before, versions, rng)
            )

    def write(self, path: Path) -> None:
        """Make it a folder."""
        self._write_folder(self.root, path)

    def _write_folder(self, folder: int, path: Path) -> None:
        path.mkdir(exist_ok=True)
        for (parent, name), inode in self.names.items():
            if parent != folder:
                continue
            if inode in self.folders:
                self._write_folder(inode, path / name)
            else:
                (path / name).write_bytes(self.data.get(inode, b""))


def _apply(names: dict[tuple[int, str], int], change: dict[tuple[int, str], int | None]) -> None:
    for key, inode in change.items():
        if inode is None:
            names.pop(key, None)
        else:
            names[key] = inode


def _sync_names(
    names: dict[tuple[int, str], int], pending: list[dict[tuple[int, str], int | None]], folder: int
) -> list[dict[tuple[int, str], int | None]]:
    """Apply the changes of one folder; return those that are left."""
    left = []
    for change in pending:
        here = {key: inode for key, inode in change.items() if key[0] == folder}
        _apply(names, here)
        rest = {key: inode for key, inode in change.items() if key[0] != folder}
        if rest:
            left.append(rest)
    return left


def _mix(before: bytes, versions: list[bytes], rng: random.Random) -> bytes:
    """Pages of what a file held at several moments; its end may be missing."""
    newest = versions[-1]
    how = rng.random()
    if how < 0.2:
        return newest
    if how < 0.35:
        return before
    if how < 0.55:
        return newest[: rng.randint(min(len(before), len(newest)), len(newest))]
    choices, out = [before, *versions], bytearray()
    size = rng.choice([len(newest), len(newest), len(rng.choice(versions))])
    for at in range(0, size, _PAGE):
        page = rng.choice(choices)[at : at + _PAGE] if rng.random() < 0.5 else newest[at : at + _PAGE]
        out += page.ljust(min(_PAGE, size - at), b"\0")[: size - at]
    return bytes(out)


# ---- scenarios ----


@dataclass
class Story:
    """A scenario that was run: its events, the state after each step, and from when on which state was promised."""

    recorder: Recorder
    states: list[Contents]
    #: after this many events, at least the state of this number must be there
    promises: list[tuple[int, int]]
    #: after this many events, there may be the state of this number
    begun: list[tuple[int, int]]
    load: Callable[[Path], Contents]


Scenario = Callable[[Path, int], Story]


def _copied(contents: Contents) -> Contents:
    return {name: np.copy(value) for name, value in contents.items()}


def _run(
    saveable: Saveable, root: Path, seed: int, keep: Callable[[Any, int], bool], count: int = 30, each: bool = False
) -> Story:
    """Add steps; ``keep`` saves after some of them and says whether that is a promise."""
    states: list[Contents] = [{}]
    promises: list[tuple[int, int]] = []
    begun: list[tuple[int, int]] = []
    with Recorder(root) as recorder:
        made = saveable.make(root)
        for number, step in enumerate(make_steps(seed, count)):
            if saveable.live:
                begun.append((len(recorder.events), number + 1))
            saveable.add(made, step)
            states.append(_copied(saveable.contents(made)))
            recorder.look("step")
            if each:
                promises.append((len(recorder.events), number + 1))
            begun.append((len(recorder.events), number + 1))
            if keep(made, number):
                recorder.look("saved")
                promises.append((len(recorder.events), number + 1))
        saveable.close(made)
    return Story(recorder, states, promises, begun, lambda place: saveable.contents(_load(saveable, place)))


def _load(saveable: Saveable, place: Path) -> Any:
    try:
        return saveable.load(place)
    except ExtraBuffersError:
        if not saveable.in_folder:
            raise
        files.repair(saveable.path(place), place / "repaired")
        return set_up(files.load(place / "repaired"))


def saved(name: str) -> Scenario:
    """Save every few steps."""

    def run(root: Path, seed: int) -> Story:
        saveable = saveables()[name]

        def keep(made: Any, number: int) -> bool:
            if number % 5 != 4:
                return False
            if saveable.in_folder:
                files.save(made, saveable.path(root), sync=True)
            else:
                saveable.save(made, root)
            return True

        return _run(saveable, root, seed, keep)

    return run


def saved_beside(name: str) -> Scenario:
    """Save to a new folder each time, sharing what the one before has."""

    def run(root: Path, seed: int) -> Story:
        saveable, previous = saveables()[name], list[Path]()

        def keep(made: Any, number: int) -> bool:
            if number % 5 != 4:
                return False
            folder = root / f"{number:04}"
            files.save(made, folder, sync=True, base=previous[-1] if previous else None)
            previous.append(folder)
            return True

        story = _run(saveable, root, seed, keep)

        def load(place: Path) -> Contents:
            # the newest that can be read
            folders = sorted(each for each in place.iterdir() if each.is_dir())
            for folder in reversed(folders):
                try:
                    return saveable.contents(set_up(files.load(folder)))
                except ExtraBuffersError:
                    if folder == folders[0]:
                        raise
            raise FileFormatError("nothing is there")

        story.load = load
        return story

    return run


def lives(name: str) -> Scenario:
    """A buffer in a folder, with a checkpoint now and then."""

    def run(root: Path, seed: int) -> Story:
        saveable = saveables()[name]

        def keep(made: Any, number: int) -> bool:
            if number % 7 != 6:
                return False
            files.save(made, saveable.path(root), sync=True)
            return True

        return _run(saveable, root, seed, keep)

    return run


def serves(sync: bool) -> Scenario:
    """The Ray service, each packet acknowledged."""

    def run(root: Path, seed: int) -> Story:
        saveable = Service("service", sync=sync)

        def keep(made: Any, number: int) -> bool:
            if number % 9 == 8:
                made.checkpoint()
                return sync
            return False

        return _run(saveable, root, seed, keep, count=24, each=sync)

    return run


def scenarios() -> dict[str, Scenario]:
    """Every scenario by name."""
    found: dict[str, Scenario] = {
        "save delta": saved("delta"),
        "save zstd": saved("zstd") if "zstd" in saveables() else saved("gzip"),
        "save none": saved("none"),
        "save array": saved("array-delta"),
        "save gpu": saved("gpu-delta"),
        "save her": saved("her"),
        "save with base": saved_beside("delta"),
        "mmap": lives("mmap"),
        "mmap evict": lives("evict-mmap"),
        "recording": saved("recording"),
    }
    if "torchrl-delta" in saveables():
        found |= {"torchrl": saved("torchrl-delta"), "experience": saved("experience")}
    if "service" in saveables():
        found |= {"service": serves(sync=True)}
    return found


def torture(name: str, count: int, seed: int = 0) -> Report:
    """Cut the power ``count`` times: at every moment once, and at random ones."""
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        story = scenarios()[name](Path(place), seed)
    n_events = len(story.recorder.events)

    def trial(number: int) -> Outcome:
        rng = random.Random(f"{seed} {name} {number}")
        modes = ["none", "all"]
        if number < 2 * n_events and count >= 4 * n_events:
            stop, mode = number // 2 + 1, modes[number % 2]
        else:
            stop, mode = rng.randint(1, n_events), rng.choice(["some", "some", "some", "none", "all"])
        return _look(story, stop, Disk(story.recorder, stop, rng, mode), mode)

    return run_trials(f"power cuts, {name} ({n_events} operations)", trial, count)


def _look(story: Story, stop: int, disk: Disk, mode: str) -> Outcome:
    least = max((state for at, state in story.promises if at <= stop), default=0)
    most = max((state for at, state in story.begun if at <= stop), default=0)
    where = f"after {stop} operations ({story.recorder.events[stop - 1].said}), {mode} of what was not synced"
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        place = Path(name) / "disk"
        disk.write(place)
        try:
            found = story.load(place)
        except ExtraBuffersError as error:
            if least:
                return Counter({"wrong": 1}), [f"{where}: state {least} was promised, but {brief(error)}"]
            return Counter({"nothing was promised": 1}), []
        except Exception as error:
            if isinstance(error, FileNotFoundError) and not least:
                return Counter({"nothing was promised": 1}), []
            return Counter({"unnamed": 1}), [f"{where}: {brief(error)}"]
    for state in range(most, -1, -1):
        if difference(found, story.states[state]) is None:
            if state < least:
                return Counter({"wrong": 1}), [f"{where}: state {least} was promised, {state} is there"]
            return Counter(["newest" if state == most else "as promised"]), []
    if not least and not any(value.any() for value in found.values() if value.dtype.kind in "biuf"):
        return Counter({"nothing was promised": 1}), []
    what = difference(found, story.states[least])
    return Counter({"wrong": 1}), [f"{where}: neither of states {least} to {most}: {what}"]


def each_scenario(count: int, seed: int, only: str | None) -> Iterator[Report]:
    """A report for every scenario."""
    names = [only] if only else list(scenarios())
    for name in names:
        try:
            yield torture(name, -(-count // len(names)), seed)
        except Exception as error:
            yield Report(f"power cuts, {name}", Counter({"unnamed": 1}), [f"trial: it cannot be run: {brief(error)}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=4_000, help="states of all scenarios together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one scenario")
    parser.add_argument("--examples", type=int, default=3)
    args = parser.parse_args()
    defects = 0
    for report in each_scenario(args.count, args.seed, args.only):
        report.print(args.examples)
        defects += report.defects
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
