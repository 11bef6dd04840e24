"""What makes a write to a storage a transaction: a record to undo or repeat it, and a cursor that moves with it."""

from __future__ import annotations

import threading
import weakref
from multiprocessing.sharedctypes import Synchronized
from types import FrameType
from typing import Any

__all__ = ["Cursor", "Write", "follow_cursor"]


class Write:
    """A call that stores items, from the moment a writer announces it until ``done``.

    ``before`` are the attributes of the storage as they were. ``repeat`` says that items which could be read are
    being overwritten: from then on the call is completed, not undone. ``done`` is the commit.
    """

    __slots__ = (
        "before", "checked", "cursor", "data", "dense", "done", "index", "length", "positions", "repeat", "rows",
        "thread",
    )  # fmt: skip

    def __init__(self, data: Any, checked: bool = False) -> None:
        self.data = data
        self.checked = checked
        self.thread = threading.get_ident()
        self.done = False
        self.before: tuple[dict[str, Any], int, int | None] | None = None
        self.repeat = False
        # what is written: rows for each group or None, values for each dense leaf, where they go
        self.positions: Any = None
        self.rows: list[Any] = []
        self.index: Any = None
        self.dense: list[tuple[Any, Any]] = []
        # the cursor to remember and the length afterwards; None leaves both
        self.cursor: Any = None
        self.length: int | None = None


class Cursor:
    """A writer's cursor. TorchRL's writers move it before they store anything, and leave it there if that fails.

    This one is put back when it is read next, unless the write that it was moved for took place.
    """

    def __init__(self, writer: Any, storage: Any) -> None:
        self._inner = writer._cursor_value
        self._writer, self._storage = weakref.ref(writer), weakref.ref(storage)
        # the write, cursor and write count before it, and where the cursor was moved to
        self._moved: tuple[Write, int, int, int] | None = None

    @property
    def value(self) -> int:
        """Where the next item goes."""
        if self._moved is not None:
            self._put_back(*self._moved)
        return int(self._inner.value)

    @value.setter
    def value(self, value: int) -> None:
        storage, writer = self._storage(), self._writer()
        write = None if storage is None else storage.announced
        if write is None or write.done or writer is None:
            self._moved = None
        else:
            self._moved = write, int(self._inner.value), int(writer._write_count), value
        self._inner.value = value

    def _put_back(self, write: Write, cursor: int, count: int, moved_to: int) -> None:
        if not write.done and write.thread != threading.get_ident():
            # under way in another thread
            return
        storage, writer = self._storage(), self._writer()
        if storage is not None:
            storage.recover()
        if not write.done and self._inner.value == moved_to:
            self._inner.value = cursor
            if writer is not None:
                writer._write_count = count
        self._moved = None

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __reduce__(self) -> Any:
        # other processes have the plain one
        return _same, (self._inner,)


def _same(value: Any) -> Any:
    return value


def follow_cursor(storage: Any, caller: FrameType | None) -> None:
    """Have the cursor of the writer that calls ``storage`` move with what is written.

    Storages are not told who writes to them, and buffers that were copied are not attached to theirs.
    """
    writer = None if caller is None else caller.f_locals.get("self")
    if (
        isinstance(getattr(writer, "_cursor_value", None), Synchronized)
        and getattr(writer, "_storage", None) is storage
    ):
        writer._cursor_value = Cursor(writer, storage)  # type: ignore[union-attr]  # it has one
