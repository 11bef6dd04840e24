"""Journals: incomplete last records are dropped, damage is an error."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sb3_extra_buffers.errors import DamagedFileError, FileFormatError, FileWriteError, NotSaveableError
from sb3_extra_buffers.files import disk
from sb3_extra_buffers.files.journal import Journal, read_journal

SECTOR = 512


def write(path: Path, n_records: int = 3, n_bytes: int = 2000) -> bytes:
    """Write a journal whose records have sectors of zeros and sectors of noise."""
    journal = Journal(path)
    for number in range(n_records):
        noise = np.random.default_rng(number).integers(1, 256, n_bytes).astype(np.uint8)
        journal.append({"number": number}, [np.arange(number + 3), np.zeros(n_bytes, np.uint8), noise])
    journal.close()
    return path.read_bytes()


def numbers(path: Path) -> list[int]:
    return [fields["number"] for fields, _ in read_journal(path)]


def test_records_round_trip(tmp_path: Path) -> None:
    write(tmp_path / "journal")

    for number, (fields, arrays) in enumerate(read_journal(tmp_path / "journal")):
        assert fields == {"number": number}
        np.testing.assert_array_equal(arrays[0], np.arange(number + 3))
        assert [array.size for array in arrays[1:]] == [2000, 2000]


@pytest.mark.parametrize("n_bytes", [0, 1, 700, 2000])
def test_a_flipped_bit_anywhere_is_damage(n_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    data = write(path, n_bytes=n_bytes)

    for offset in range(0, len(data), 7):
        path.write_bytes(data[:offset] + bytes([data[offset] ^ 4]) + data[offset + 1 :])
        with pytest.raises(DamagedFileError, match=r"record \d at byte \d+ is damaged; .*repair"):
            list(read_journal(path))


def test_an_incomplete_last_record_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    data = write(path)

    for cut in range(1, len(data) // 3, 13):
        path.write_bytes(data[:-cut])
        assert numbers(path) == [0, 1]


def test_zeros_at_the_end_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    data = write(path)

    for count in (1, 20, 4096, 100_000):
        path.write_bytes(data + bytes(count))
        assert numbers(path) == [0, 1, 2]


def test_a_last_record_with_unwritten_sectors_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    data = write(path)
    journal = Journal(tmp_path / "short")
    journal.append({"number": 0}, [])
    last = len(data) - (len(data) - journal.n_bytes) // 3

    for sector in range(last // SECTOR + 1, -(-len(data) // SECTOR)):
        changed = bytearray(data)
        missing = slice(sector * SECTOR, min((sector + 1) * SECTOR, len(data)))
        if any(changed[missing]):
            changed[missing] = bytes(missing.stop - missing.start)
            path.write_bytes(changed)
            assert numbers(path) == [0, 1]


def test_an_unwritten_sector_before_complete_records_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    data = bytearray(write(path))
    data[:SECTOR] = bytes(SECTOR)
    path.write_bytes(data)

    with pytest.raises(DamagedFileError, match="record 0 at byte 0 is damaged"):
        list(read_journal(path))


def test_records_of_another_journal_are_damage(tmp_path: Path) -> None:
    first, second = write(tmp_path / "first"), write(tmp_path / "second")
    size = len(first) // 3 + 20
    (tmp_path / "mixed").write_bytes(first + second[size:])

    with pytest.raises(DamagedFileError, match="record 3"):
        list(read_journal(tmp_path / "mixed"))


def test_truncate_removes_appended_records(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append({"number": 0})
    size = journal.n_bytes
    journal.append({"number": 1}, [np.ones(9)])
    journal.truncate(size, n_records=1)
    journal.append({"number": 2})

    assert numbers(tmp_path / "journal") == [0, 2]
    assert (journal.n_records, journal.n_bytes) == (2, (tmp_path / "journal").stat().st_size)


def test_reopen_continues_after_the_last_complete_record(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(write(path)[:-9])
    journal = Journal.reopen(path)
    journal.append({"number": 7})

    assert numbers(path) == [0, 1, 7]


@pytest.mark.parametrize("sync", [False, True])
def test_a_failed_append_leaves_the_journal_unchanged(
    sync: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "journal", sync)
    journal.append({"number": 0}, [np.ones(100)])

    def half(descriptor: int, parts: Any) -> None:
        os.write(descriptor, b"".join(parts)[:40])
        refuse()

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_all", half)
        with pytest.raises(FileWriteError, match="No space left"):
            journal.append({"number": 1})
    journal.append({"number": 2})
    assert numbers(journal.path) == [0, 2]

    # if the file cannot be truncated either, nothing may be appended
    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_all", half)
        patch.setattr(disk, "truncate", refuse)
        with pytest.raises(FileWriteError, match="No space left"):
            journal.append({"number": 3})
    assert journal.broken
    with pytest.raises(FileWriteError, match="begin another journal"):
        journal.append({"number": 4})
    assert numbers(journal.path) == [0, 2]


def refuse(*args: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_with_sync_every_record_is_on_the_disk_when_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(disk, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    journal = Journal(tmp_path / "journal", sync=True)
    for number in range(3):
        journal.append({"number": number})
        assert synced[-1] == journal.n_bytes


@pytest.mark.parametrize(
    "fields",
    [{"n": float("nan")}, {"n": object()}, {"n": np.arange(3)}],
)  # fmt: skip
def test_fields_that_are_not_json_are_refused_before_writing(fields: dict[str, Any], tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    with pytest.raises(NotSaveableError):
        journal.append(fields)
    with pytest.raises(NotSaveableError):
        journal.append({}, [np.array(["text"])])
    assert journal.n_bytes == (tmp_path / "journal").stat().st_size == 0


def forged(change: Callable[[dict[str, Any]], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A journal whose record was changed by ``change``, with valid checksums."""
    path = tmp_path / "journal"
    kept = json.dumps

    def dumps(parsed: dict[str, Any], **options: Any) -> str:
        change(parsed)
        return kept(parsed)

    monkeypatch.setattr(json, "dumps", dumps)
    Journal(path).append({"number": 0}, [np.arange(4)])
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda parsed: parsed["arrays"].append(["<i8", [1 << 40]]),
        lambda parsed: parsed["arrays"].append(["|O", [1]]),
        lambda parsed: parsed["arrays"].append(["<i8", [-1]]),
        lambda parsed: parsed["arrays"].append(["<i8", [0] * 40]),
        lambda parsed: parsed["arrays"].append(3),
        lambda parsed: parsed.update(arrays=3),
        lambda parsed: parsed.update(words=[]),
        lambda parsed: parsed.pop("words"),
    ],
)
def test_forged_records_are_refused(
    change: Callable[[dict[str, Any]], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = forged(change, tmp_path, monkeypatch)

    with pytest.raises(FileFormatError):
        list(read_journal(path))
