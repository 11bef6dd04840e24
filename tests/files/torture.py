"""What a file must survive: damage anywhere, and the end of its writer at any moment.

``python -m tests.files.torture`` does it at length, `make test` in brief.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sb3_extra_buffers.errors import ExtraBuffersError
from sb3_extra_buffers.files import live, load, manifest, open_saved, save
from sb3_extra_buffers.files.blocks import BLOCK
from sb3_extra_buffers.files.checking import repair
from sb3_extra_buffers.files.loading import SavedParts
from tests.files.filing import BUFFERS, Feed, contents, finish, make_array

# ---- damage ----


def damage(data: bytes, rng: random.Random) -> bytes:
    """``data`` with a bit flipped, an end cut off, or a stretch overwritten."""
    kind = rng.choices(["flip", "cut", "zeros", "noise", "double"], [8, 4, 1, 1, 1])[0]
    at = rng.randrange(max(len(data), 1))
    if kind == "flip" and data:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == "cut":
        return data[:at]
    stretch = data[at : at + rng.choice([1, 8, 100, 4096])]
    new = {"zeros": bytes(len(stretch)), "noise": rng.randbytes(len(stretch)), "double": stretch * 2}[
        kind if kind != "flip" else "zeros"
    ]
    return data[:at] + new + data[at + len(stretch) :]


def make_saved(folder: Path, name: str) -> list[dict[str, Any]]:
    """Save a buffer several times over; return what it held each time."""
    if name == "array":
        array, truth = make_array(60, "delta")
        save(array, folder, sync=False)
        return [{"array": truth}]
    buffer, feed = BUFFERS[name](), Feed()
    states = []
    for turn in range(26 if "rollout" in name else 40):
        feed.add_to(buffer)
        if turn in (5, 15, 25, 35, 39):
            save(buffer, folder, sync=False)
            states.append({key: np.copy(value) for key, value in contents(buffer).items()})
    return states


def read_all(path: Path, how: Callable[[Path], Any]) -> dict[str, Any]:
    buffer = how(path)
    if not hasattr(buffer, "buffer_size"):
        return {"array": np.asarray(buffer)}
    finish(buffer)
    return contents(buffer)


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(value, second[key]) for key, value in first.items())


def whole_steps(truth: dict[str, Any], found: dict[str, Any]) -> bool:
    """Whether what a repair kept is part of what there was, in its order."""
    if "array" in truth:
        kept = np.array(
            [np.array_equal(a, b) or not b.any() for a, b in zip(truth["array"], found["array"], strict=True)]
        )
        partly = [((a == b) | (b == 0)).all() for a, b in zip(truth["array"], found["array"], strict=True)]
        return bool(kept.all() or all(partly))
    size, pos, full = int(found["buffer_size."]), int(found["pos."]), bool(found["full."])
    evicted, ring = int(found.get("_n_evicted.", 0)), "advantages." not in found
    count = (size if full else pos) - evicted
    order = ((pos if full and ring else 0) + evicted + np.arange(count)) % size
    names = [name for name in truth if name.partition(".")[0] in ("observations", "next_observations", "rewards")]
    # steps stay where they were
    return all(np.array_equal(truth[name][order], found[name][order]) for name in names)


def fuzz(name: str, count: int, seed: int = 0, repairs: int = 10) -> Counter[str]:
    """Damage a saved buffer ``count`` times; it must be refused by name, or read as it was."""
    rng, outcomes = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as place:
        folder, scratch = Path(place) / "saved", Path(place) / "damaged"
        states = make_saved(folder, name)
        truth = states[-1]
        assert same(truth, read_all(folder, load)), "the file is not even right before it is damaged"
        originals = {path.name: path.read_bytes() for path in folder.iterdir()}
        shutil.copytree(folder, scratch)
        names = sorted(originals)
        for turn in range(count):
            # small files are as important as large ones
            which = rng.choice(names) if turn % 2 else max(names, key=lambda each: len(originals[each]))
            (scratch / which).write_bytes(damage(originals[which], rng))
            how = open_saved if turn % 3 == 0 else load
            try:
                found = read_all(scratch, how)
            except ExtraBuffersError as error:
                outcomes[type(error).__name__] += 1
            else:
                assert same(truth, found), f"turn {turn}: damage in {which} was not noticed"
                outcomes["as it was"] += 1
            if turn % repairs == 0:
                outcomes[try_repair(scratch, Path(place) / "repaired", states)] += 1
            (scratch / which).write_bytes(originals[which])
    return outcomes


def try_repair(folder: Path, target: Path, states: list[dict[str, Any]]) -> str:
    shutil.rmtree(target, ignore_errors=True)
    try:
        repair(folder, target)
    except ExtraBuffersError:
        return "beyond repair"
    found = read_all(target, load)
    assert any(whole_steps(truth, found) for truth in states), "a repair made something up"
    return "repaired"


def forge(name: str, count: int, seed: int = 0) -> Counter[str]:
    """Files with other contents and right checksums, as a stranger could make them: an error or a buffer, no crash."""
    rng, outcomes = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "saved"
        make_saved(folder, name)
        record = manifest.read(folder)
        data_path = next(folder.glob("data-*.bin"))
        original = data_path.read_bytes()
        saved = SavedParts.of_folder(folder)
        index = saved.blocks.index.copy()
        for turn in range(count):
            changed = json.loads(json.dumps(record))
            if turn % 2:
                change_somewhere(changed, rng)
            else:
                # a table, with its checksum put right
                names = [name for name, array in saved.blocks.records.items() if array.n_blocks]
                array = saved.blocks.records[rng.choice(names)]
                entry = index[array.first]
                at, size = int(entry["offset"]), min(array.nbytes, BLOCK)
                if at:
                    block = bytearray(original[at : at + size])
                    for _ in range(rng.choice([1, 2, 8])):
                        block[rng.randrange(size)] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
                    new_index = index.copy()
                    new_index["crc32"][array.first] = zlib.crc32(block)
                    table = new_index.tobytes()
                    where = changed["index"]["offset"]
                    changed["index"]["crc32"] = zlib.crc32(table)
                    data = original[:at] + bytes(block) + original[at + size :]
                    data_path.write_bytes(data[:where] + table + data[where + len(table) :])
            manifest.replace(folder, manifest.dump(changed | {"number": 10**9}), sync=False)
            try:
                buffer = (open_saved if turn % 4 < 2 else load)(folder)
            except ExtraBuffersError as error:
                outcomes[type(error).__name__] += 1
            else:
                outcomes["loaded"] += 1
                exercise(buffer)
            data_path.write_bytes(original)
    return outcomes


def change_somewhere(record: Any, rng: random.Random) -> None:
    """Replace one value of a JSON tree."""
    where: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)):
            where.append((node, key))
            if isinstance(node[key], (dict, list)):
                walk(node[key])

    walk(record)
    node, key = rng.choice(where)
    values: list[Any] = [0, -1, 1, 2**31, 2**62, 10**40, 1.5, "", "x", None, True, [], {}, [[]], {"$array": "x"}]
    values += [[1] * 40, {"$torch": "load"}, {"$dtype": "O"}, {"$what": 1}, "journal-0001.bin", "../../etc/passwd"]
    if isinstance(node[key], int) and rng.random() < 0.5:
        values = [node[key] + 1, node[key] - 1, node[key] * 2, -node[key]]
    node[key] = rng.choice(values)


def exercise(buffer: Any) -> None:
    """Use a buffer of unknown origin: whatever it says, the process must live."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if hasattr(buffer, "buffer_size"):
                finish(buffer)
                buffer.sample(16) if hasattr(buffer, "sample") else None
            contents(buffer) if hasattr(buffer, "buffer_size") else np.asarray(buffer)
        except Exception:  # any error will do
            pass


# ---- the end of the writer ----


def save_for_ever(folder: Path, name: str, seed: int, say: Callable[..., Any]) -> None:
    """Add and save, and say so each time, until somebody ends it."""
    feed, rng = Feed(seed), random.Random(seed)
    buffer = load(folder) if (folder / manifest.NAME).exists() else BUFFERS[name]()
    finish(buffer)
    number = int(buffer.rewards.max())
    say("ready", number)
    while True:
        for _ in range(rng.choice([1, 1, 3, 10])):
            feed.add_to(buffer)
            number += 1
            # every state can be told from every other
            buffer.rewards[(buffer.pos - 1) % buffer.buffer_size] = number
        say("begin", number, digest(buffer))
        save(buffer, folder, sync=False)
        say("saved", number)


def live_for_ever(folder: Path, name: str, seed: int, early: bool, say: Callable[..., Any]) -> None:
    """Add to a buffer that lives in a file, and say so each time, until somebody ends it."""
    live._RECORDS, live._SPARE = 7, 1 << 12  # so that everything happens often
    if early:
        say("ready")
    if (folder / manifest.NAME).exists():
        buffer = open_saved(folder, mode="r+")
    else:
        buffer = BUFFERS[name]()
        live.keep_in_file(buffer, folder)
    feed = Feed(seed)
    for _ in range(int(buffer.rewards.max())):
        feed.add_to()
    while True:
        feed.add_to(buffer, numbered=True)
        say("added", feed.step)


def kill_live(name: str, count: int, seed: int = 0) -> Counter[str]:
    """End the writer of a live file ``count`` times; each time every step that it completed must be there."""
    rng, outcomes = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as place:
        folder, reference, feed = Path(place) / "0", BUFFERS[name](), Feed(seed)
        for turn in range(count):
            lines = _run_and_kill(lambda say: live_for_ever(folder, name, seed, turn % 4 == 0, say), rng)  # noqa: B023  # called at once
            added = [int(line.split()[1]) for line in lines if line.startswith("added")]
            if (folder / manifest.NAME).exists():
                found = load(folder)
                finish(found)
                number = int(found.rewards.max())
                before = feed.step
                while feed.step < number:
                    feed.add_to(reference, numbered=True)
                # the step that was on its way may be there or not
                assert number >= (added[-1] if added else before), f"turn {turn}: step {added[-1:]} is lost"
                assert number <= (added[-1] if added else before) + 1, f"turn {turn}: step {number} is made up"
                assert digest(found) == digest(reference), f"turn {turn}: step {number} came back changed"
                outcomes["to the last step" if added and number == added[-1] else "one more or none"] += 1
            else:
                assert not added
                outcomes["nothing was there yet"] += 1
            if feed.step > 400:
                # long runs only make it slow to find the place again
                folder, reference, feed, seed = Path(place) / str(turn + 1), BUFFERS[name](), Feed(seed + 1), seed + 1
    return outcomes


def digest(buffer: Any) -> str:
    """A checksum of all that a buffer holds."""
    total = 0
    for name, value in sorted(contents(buffer).items()):
        plain = isinstance(value, np.ndarray) and value.dtype != object
        data = np.ascontiguousarray(value).tobytes() if plain else repr(value).encode()
        total = zlib.crc32(data, zlib.crc32(name.encode(), total))
    return f"{total:08x}"


def kill_writers(name: str, count: int, seed: int = 0) -> Counter[str]:
    """End a writer ``count`` times, at random moments; each time the last whole state must be there."""
    rng, outcomes = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "saved"
        turn = 0
        while turn < count:
            seed += 1
            lines = _run_and_kill(lambda say: save_for_ever(folder, name, seed, say), rng)  # noqa: B023  # called at once
            begun = {line.split()[1]: line.split()[2] for line in lines if line.startswith("begin")}
            done = [line.split()[1] for line in lines if line.startswith("saved")]
            if not begun:
                continue
            turn += 1
            if not done and not (folder / manifest.NAME).exists():
                outcomes["nothing was saved yet"] += 1
                shutil.rmtree(folder, ignore_errors=True)
                continue
            found = load(folder)
            finish(found)
            number = str(int(found.rewards.max()))
            newest = list(begun)[-1]
            if number in begun:
                assert digest(found) == begun[number], f"turn {turn}: state {number} came back changed"
                assert number in (newest, done[-1] if done else newest), f"turn {turn}: state {number} is an old one"
                outcomes["the newest" if number == newest else "the one before"] += 1
            else:
                assert not done, f"turn {turn}: state {number} is from before this writer"
                outcomes["as it was found"] += 1
    return outcomes


def _run_and_kill(write: Callable[[Any], None], rng: random.Random) -> list[str]:
    """What ``write`` said, in a process of its own, before that was ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # a copy of this process: nothing has to be imported or compiled again
        os.close(reading)
        try:
            write(lambda *words: os.write(writing, (" ".join(map(str, words)) + "\n").encode()))
        except BaseException:
            # it should never end by itself
            os.write(writing, ("failed " + traceback.format_exc().replace("\n", " | ") + "\n").encode())
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as said:
        first = said.readline()
        time.sleep(rng.random() ** 2 * 0.15)
        os.kill(child, signal.SIGKILL)
        rest = said.read()
    os.waitpid(child, 0)
    # the last line may have been cut as well
    lines = [line.decode() for line in (first + rest).splitlines(keepends=True) if line.endswith(b"\n")]
    failed = [line for line in lines if line.startswith("failed")]
    assert not failed, failed[0]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--forged", type=int, default=2_000)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    # whatever a file says, no more than this is taken
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
    names = ["replay-delta", "replay-gzip", "dict", "her", "n-step", "rollout", "gpu-frames", "array"]
    for what, run, total in (("damaged", fuzz, args.flips), ("forged", forge, args.forged)):
        for place, name in enumerate(names):
            print(what, name, dict(run(name, -(-total // len(names)), args.seed + place)), flush=True)
    if args.kills:
        for name in ("replay-delta", "replay-gzip"):
            print("killed while saving", name, dict(kill_writers(name, args.kills // 4, args.seed)), flush=True)
        for name in ("replay-delta", "her"):
            print("killed while living in a file", name, dict(kill_live(name, args.kills // 4, args.seed)), flush=True)


if __name__ == "__main__":
    main()
