"""One storage for several processes: the one that made it holds what is compressed, the others ask it."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Sequence
from multiprocessing import AuthenticationError, current_process
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch

from sb3_extra_buffers._torchrl.stored_tensor import GroupLeaf, Positions, to_torch
from sb3_extra_buffers.codecs.spec import ByteRows, ObsSpec
from sb3_extra_buffers.errors import SharingError
from sb3_extra_buffers.stores.usage import MemoryUsage

__all__ = ["GroupServer", "RemoteGroup"]

# what others may ask of a group
_REQUESTS = ("read_rows", "write", "write_set", "clear", "memory_usage", "check", "describe")


class GroupServer:
    """Answers other processes that ask for the groups of ``storage``, until that is gone.

    They must know this process's authentication key, as those do that it starts.
    """

    def __init__(self, storage: Any) -> None:
        self._storage = weakref.ref(storage)
        self._authkey = bytes(current_process().authkey)
        self._listener = Listener(authkey=self._authkey)
        self.address: Any = self._listener.address
        threading.Thread(target=self._accept, name="compressed-storage", daemon=True).start()
        weakref.finalize(storage, _wake, self.address, self._authkey)

    def _accept(self) -> None:
        while self._storage() is not None:
            try:
                connection = self._listener.accept()
            except (AuthenticationError, OSError, EOFError):
                # somebody who does not know the key, or is gone already
                continue
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()
        self._listener.close()

    def _answer(self, connection: Connection) -> None:
        with connection:
            while True:
                try:
                    place, request, arguments = connection.recv()
                except (OSError, EOFError):
                    return
                storage = self._storage()
                if storage is None:
                    return
                try:
                    if request not in _REQUESTS:
                        raise SharingError(f"nobody may ask for {request!r}")
                    with storage._lock:
                        storage.recover()
                        answer = True, getattr(storage.groups[place], request)(*arguments)
                except Exception as error:
                    # the other one's to deal with
                    answer = False, error
                del storage
                connection.send(answer)


def _wake(address: Any, authkey: bytes) -> None:
    """Let a server find out that it is no longer needed."""
    with contextlib.suppress(OSError, EOFError):
        Client(address, authkey=authkey).close()


class RemoteGroup:
    """A group of a storage that another process holds."""

    def __init__(self, address: Any, place: int, group: Any) -> None:
        self.address, self.place = address, place
        self.keys: list[Any] = list(group.keys)
        self.spec: ObsSpec = group.leaves[0].spec
        self.dtype: torch.dtype = group.leaves[0].dtype
        self.device: torch.device = group.leaves[0].device
        self.leaves = [GroupLeaf(self, place) for place in range(len(self.keys))]

    def _ask(self, request: str, *arguments: Any) -> Any:
        connection, lock = _connect(self.address)
        try:
            with lock:
                connection.send((self.place, request, arguments))
                fine, answer = connection.recv()
        except BaseException as error:
            # half a question, or an answer that nobody waits for: the next one needs a line of its own
            _hang_up(self.address, connection)
            if not isinstance(error, (OSError, EOFError)):
                raise
            raise SharingError("the process that holds this storage has ended, and what it held with it") from error
        if not fine:
            raise answer
        return answer

    def read(self, positions: Positions) -> list[torch.Tensor]:
        """The rows at ``positions`` for each key."""
        return self.read_sets(range(len(self.keys)), positions)

    def read_rows(self, places: Sequence[int], positions: Positions) -> list[ByteRows]:
        """The rows at ``positions`` for some of the keys."""
        rows: list[ByteRows] = self._ask("read_rows", list(places), positions)
        return rows

    def read_sets(self, places: Sequence[int], positions: Positions) -> list[torch.Tensor]:
        """The tensors at ``positions`` for some of the keys."""
        found = self.read_rows(places, positions)
        shape = (len(positions), *self.spec.shape)
        return [to_torch(rows.view(self.spec.dtype).reshape(shape), self.dtype, self.device) for rows in found]

    def write(self, positions: Positions, batches: Sequence[ByteRows]) -> None:
        """Store ``batches`` of rows, one for each key."""
        self._ask("write", positions, list(batches))

    def write_set(self, place: int, positions: Positions, rows: ByteRows) -> None:
        """Store ``rows`` of one key alone."""
        self._ask("write_set", place, positions, rows)

    def clear(self) -> None:
        """Make every position unwritten."""
        self._ask("clear")

    def memory_usage(self) -> MemoryUsage:
        """What the other process holds, by purpose."""
        usage: MemoryUsage = self._ask("memory_usage")
        return usage

    def check(self) -> None:
        """Raise if anything inside disagrees."""
        self._ask("check")

    def describe(self) -> str:
        """The method in use and why."""
        text: str = self._ask("describe")
        return text


_connections: dict[tuple[int, Any], tuple[Connection, threading.Lock]] = {}
_connecting = threading.Lock()


def _connect(address: Any) -> tuple[Connection, threading.Lock]:
    """This process's line to ``address``; a forked child has its own."""
    with _connecting:
        known = _connections.get((os.getpid(), address))
        if known is None:
            try:
                connection = Client(address, authkey=bytes(current_process().authkey))
            except (OSError, EOFError) as error:
                raise SharingError("the process that holds this storage has ended, and what it held with it") from error
            known = _connections[os.getpid(), address] = connection, threading.Lock()
        return known


def _hang_up(address: Any, connection: Connection) -> None:
    """Forget a line; whoever asks next makes a new one."""
    key = (os.getpid(), address)
    known = _connections.get(key)
    if known is not None and known[0] is connection:
        del _connections[key]
    with contextlib.suppress(OSError):
        connection.close()
