"""Packets that were accepted, appended to a file: what a restarted buffer reads to be where it was."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from sb3_extra_buffers.errors import DamagedFileError, FileWriteError

__all__ = ["Journal"]

_RECORD = struct.Struct("<II")  # length and checksum of the packet that follows


class Journal:
    """Packets in the order they were appended. What is appended survives the process; with ``sync``, the machine."""

    def __init__(self, path: Path, sync: bool = False) -> None:
        self.path, self.sync = path, sync
        self.nbytes = 0
        self._file: int | None = None

    def replay(self) -> Iterator[bytes]:
        """Every whole packet; a last one that was cut short is dropped from the file.

        One that is damaged with others behind it is an error: those were acknowledged.
        """
        if not self.path.exists():
            return
        with self.path.open("r+b") as file:
            at = 0
            while True:
                head = file.read(_RECORD.size)
                if len(head) == _RECORD.size:
                    length, expected = _RECORD.unpack(head)
                    packet = file.read(length)
                    if len(packet) == length and zlib.crc32(packet) == expected:
                        at = file.tell()
                        yield packet
                        continue
                    behind = self.path.stat().st_size - file.tell()
                    if len(packet) == length and behind:
                        raise DamagedFileError(
                            f"{self.path}: the packet at byte {at} is not what was written, and {behind} bytes follow "
                            f"it; to go on without them, keep a copy and cut the file to {at} bytes"
                        )
                # nobody was told that this one was written
                file.truncate(at)
                self.nbytes = at
                return

    def append(self, packet: bytes) -> None:
        """Write ``packet``; on return it is there."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        record = memoryview(_RECORD.pack(len(packet), zlib.crc32(packet)) + packet)
        end = os.lseek(self._file, 0, os.SEEK_END)
        try:
            while len(record):
                record = record[os.write(self._file, record) :]
            if self.sync:
                os.fsync(self._file)
        except OSError as error:
            # half a packet must not stand before the next
            os.ftruncate(self._file, end)
            raise FileWriteError(
                f"{self.path} has {end} bytes and takes no {len(packet)} more: {error}. These items are in memory but "
                "not in the file: send them again once there is room, or they are lost when the process ends"
            ) from error
        self.nbytes += _RECORD.size + len(packet)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
