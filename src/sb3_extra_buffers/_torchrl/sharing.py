"""One storage for several processes: its creator holds the groups and answers the requests of the others."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from multiprocessing import AuthenticationError, current_process
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from sb3_extra_buffers._torchrl.groups import Group
from sb3_extra_buffers.errors import SharingError

__all__ = ["GroupServer", "RemoteGroup"]

# methods of a group that other processes may call
_REQUESTS = ("read_rows", "write", "write_key", "clear", "memory_usage", "check", "describe")
_ENDED = "the process that created this storage has ended, and its contents are gone"


class GroupServer:
    """Answers requests for the groups of ``storage`` until the storage is garbage collected.

    Clients must know the authentication key of this process, as its children do.
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
                # a client with another key, or one that is gone already
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
        self._listener.close()

    def _serve(self, connection: Connection) -> None:
        with connection:
            while True:
                try:
                    group, request, arguments = connection.recv()
                except (OSError, EOFError):
                    return
                storage = self._storage()
                if storage is None:
                    return
                try:
                    if request not in _REQUESTS:
                        raise SharingError(f"unknown request {request!r}")
                    answer = True, storage.answer(group, request, arguments)
                except Exception as error:
                    # raised by the client
                    answer = False, error
                del storage
                connection.send(answer)


def _wake(address: Any, authkey: bytes) -> None:
    """Connect to a server whose storage is gone, so that it stops waiting and closes."""
    with contextlib.suppress(OSError, EOFError):
        Client(address, authkey=authkey).close()


def _forward(request: str) -> Any:
    """Return a method that has ``request`` answered by the other process."""

    def method(group: RemoteGroup, *arguments: Any) -> Any:
        return group.ask(request, *arguments)

    return method


class RemoteGroup(Group):
    """A group of a storage in another process."""

    read_rows, write, write_key, clear, memory_usage, check, describe = map(_forward, _REQUESTS)

    def __init__(self, address: Any, number: int, group: Group) -> None:
        super().__init__(group.config, group.device)
        self._address, self._number = address, number

    def ask(self, request: str, *arguments: Any) -> Any:
        """Send a request and return the answer, or raise the other process's error."""
        connection, lock = _connect(self._address)
        try:
            with lock:
                connection.send((self._number, request, arguments))
                succeeded, answer = connection.recv()
        except BaseException as error:
            # a request or an answer may be incomplete: the next request needs a new connection
            _disconnect(self._address, connection)
            if not isinstance(error, (OSError, EOFError)):
                raise
            raise SharingError(_ENDED) from error
        if not succeeded:
            raise answer
        return answer


# by process: a forked child must not use the connections of its parent
_connections: dict[tuple[int, Any], tuple[Connection, threading.Lock]] = {}
_connecting = threading.Lock()


def _connect(address: Any) -> tuple[Connection, threading.Lock]:
    """Return this process's connection to ``address``, and the lock to hold while using it."""
    with _connecting:
        known = _connections.get((os.getpid(), address))
        if known is None:
            try:
                connection = Client(address, authkey=bytes(current_process().authkey))
            except (OSError, EOFError) as error:
                raise SharingError(_ENDED) from error
            known = _connections[os.getpid(), address] = connection, threading.Lock()
        return known


def _disconnect(address: Any, connection: Connection) -> None:
    """Drop a connection; the next request opens a new one."""
    key = (os.getpid(), address)
    known = _connections.get(key)
    if known is not None and known[0] is connection:
        del _connections[key]
    with contextlib.suppress(OSError):
        connection.close()
