"""The file format, written a second time: reads containers and journals, and writes forged ones with right checksums.

Of the library nothing is used but the description of the format, so that a fault of the one does not hide in the other.
"""

from __future__ import annotations

import copy
import json
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.torture.mutations import mutate_array, mutate_bytes, mutate_json

Array = npt.NDArray[Any]

_BLOCK = 4096
_SLACK = 64
_DATA_MAGIC = b"sb3-extra-buffers data "
_INDEX = np.dtype([("offset", "<u8"), ("crc32", "<u4")])
_TAIL = struct.Struct("<8sQQI")
_TAIL_MAGIC = b"SEBsaved"
_RECORD = struct.Struct("<4s8sQIII")
_RECORD_MAGIC = b"SEBr"

#: a saved folder or file, by path below where it was saved; a single file has the path ""
Tree = dict[str, bytes]


def read_tree(path: Path) -> Tree:
    """The bytes of every file."""
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(each.relative_to(path)): each.read_bytes() for each in sorted(path.rglob("*")) if each.is_file()}


def write_tree(tree: Tree, path: Path) -> None:
    """Write what `read_tree` read."""
    for name, data in tree.items():
        target = path / name if name else path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


# ---- containers ----


class Container:
    """A manifest, the arrays it lists and the payloads beside them."""

    def __init__(self, tree: Tree, name: str) -> None:
        """``name`` is that of a manifest, or of a single file that has one at its end."""
        self.tree, self.name = tree, name
        self.folder = name.rpartition("/")[0]
        if name.endswith("manifest.json"):
            self.record = _parse_manifest(tree[name])
            self.data_name = self._beside(self.record["data"]["name"])
        else:
            self.data_name = name
            self.record = _parse_manifest(_copy_at_end(tree[name]))
        self.data = tree[self.data_name]
        where = self.record["index"]
        self.index = np.frombuffer(self.data, _INDEX, where["n_blocks"], where["offset"])

    def _beside(self, name: str) -> str:
        return f"{self.folder}/{name}" if self.folder else name

    def tables(self) -> dict[tuple[str, str], Array]:
        """Every array by the store it belongs to (columns have none) and its name."""
        found = {("", key): self._read(record) for key, record in self.record["columns"].items()}
        for store, about in self.record["stores"].items():
            found |= {(store, key): self._read(record) for key, record in about["arrays"].items()}
        return found

    def _read(self, record: Any) -> Array:
        dtype, shape, first = record
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        parts = []
        for block in range(-(-nbytes // _BLOCK)):
            size, offset = min(_BLOCK, nbytes - block * _BLOCK), int(self.index["offset"][first + block])
            parts.append(self.data[offset : offset + size] if offset else bytes(size))
        return np.frombuffer(b"".join(parts), dtype).reshape(shape)

    def payload_name(self, store: str) -> str:
        """The file that the payloads of a store are in."""
        heap = self.record["stores"][store].get("heap")
        return self.data_name if heap is None else self._beside(heap["name"])

    def write(self, tables: dict[tuple[str, str], Array], change: Any = None) -> Tree:
        """The tree with other ``tables``, and ``change`` done to the manifest; every checksum is right."""
        tree, record = dict(self.tree), copy.deepcopy(self.record)
        # what was there stays; everything else comes behind it
        end = min(len(self.data), self.record["data"]["size"])
        data, entries = bytearray(tree[self.data_name][:end]), list[tuple[int, int]]()
        for (store, name), array in tables.items():
            flat = np.ascontiguousarray(array).tobytes()
            described = [array.dtype.str, list(array.shape), len(entries)]
            (record["stores"][store]["arrays"] if store else record["columns"])[name] = described
            for at in range(0, len(flat), _BLOCK):
                part = flat[at : at + _BLOCK]
                entries.append((len(data), zlib.crc32(part)))
                data += part
        index = np.array(entries, _INDEX).tobytes()
        record["index"] = {"offset": len(data), "n_blocks": len(entries), "crc32": zlib.crc32(index)}
        data += index + bytes(_SLACK)
        record["data"]["size"] = len(data)
        if change is not None:
            change(record)
        text = _dump_manifest(record)
        fields = _TAIL.pack(_TAIL_MAGIC, len(data), len(text), zlib.crc32(text))
        data += text + fields + zlib.crc32(fields).to_bytes(4, "little")
        tree[self.data_name] = bytes(data)
        if self.name != self.data_name:
            tree[self.name] = text
        return tree


def _parse_manifest(data: bytes) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(data)
    del record["crc32"]
    return record


def _dump_manifest(record: Any) -> bytes:
    if isinstance(record, dict):
        lines = [f" {json.dumps(str(key))}: {json.dumps(value)}" for key, value in record.items()]
        body = ("{\n" + ",\n".join(lines)).encode()
    else:
        body = json.dumps(record).encode()
    return body + f',\n "crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode()


def _copy_at_end(data: bytes) -> bytes:
    _, offset, length, _ = _TAIL.unpack(data[-_TAIL.size - 4 : -4])
    return data[offset : offset + length]


def _ends_as_saved(data: bytes) -> bool:
    return data.startswith(_DATA_MAGIC) and data[-_TAIL.size - 4 :].startswith(_TAIL_MAGIC)


def _is_ours(data: bytes) -> bool:
    return bool({"columns", "stores", "index", "data"} <= json.loads(data).keys())


def containers_of(tree: Tree) -> list[str]:
    """Names to make a `Container` of."""
    manifests = [name for name, data in tree.items() if name.rpartition("/")[2] == "manifest.json" and _is_ours(data)]
    folders = {name.rpartition("/")[0] for name in manifests}
    single = [
        name for name, data in tree.items() if name.rpartition("/")[0] not in folders and _ends_as_saved(data)
    ]  # fmt: skip
    return manifests + single


# ---- journals ----


def read_records(data: bytes) -> list[tuple[bytes, Any, bytes]]:
    """Id of the journal, JSON and further bytes of each record."""
    found, at = [], 0
    while at + _RECORD.size + 4 <= len(data):
        _, journal, _, length, _, _ = _RECORD.unpack_from(data, at)
        body = data[at + _RECORD.size + 4 :][:length]
        end = 4 + int.from_bytes(body[:4], "little")
        found.append((journal, json.loads(body[4:end]), body[end:]))
        at += _RECORD.size + 4 + length
    return found


def write_records(records: list[tuple[bytes, Any, bytes]]) -> bytes:
    """Undo `read_records`, with numbers and checksums put right."""
    data = b""
    for number, (journal, said, rest) in enumerate(records):
        text = json.dumps(said).encode()
        body = len(text).to_bytes(4, "little") + text + rest
        fields = _RECORD.pack(_RECORD_MAGIC, journal, number, len(body), zlib.crc32(body), 0)
        data += fields + zlib.crc32(fields).to_bytes(4, "little") + body
    return data


def journals_of(tree: Tree) -> list[str]:
    """Names of the journals that hold anything."""
    return [name for name, data in tree.items() if data.startswith(_RECORD_MAGIC)]


# ---- forgeries ----


def forge(tree: Tree, rng: random.Random) -> tuple[Tree, str]:
    """``tree`` with something changed that no checksum tells; and what it was."""
    choices: list[tuple[float, Any]] = []
    for name in containers_of(tree):
        choices += [(3, (_forge_manifest, name)), (6, (_forge_table, name)), (1, (_forge_payload, name))]
    choices += [(3, (_forge_journal, name)) for name in journals_of(tree)]
    covered = {name for _, (_, name) in choices}
    for name in tree:
        if name.endswith(".json") and name not in covered:
            choices.append((2, (_forge_text, name)))
        elif name not in covered:
            choices.append((0.2, (_forge_bytes, name)))
    how, name = rng.choices([each for _, each in choices], [weight for weight, _ in choices])[0]
    forged, said = how(tree, name, rng)
    return forged, f"{name}: {said}"


def _forge_manifest(tree: Tree, name: str, rng: random.Random) -> tuple[Tree, str]:
    container, said = Container(tree, name), []

    def change(record: Any) -> None:
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            said.append(mutate_json(record, rng))

    return container.write(container.tables(), change), "manifest: " + "; ".join(said)


def _forge_table(tree: Tree, name: str, rng: random.Random) -> tuple[Tree, str]:
    container = Container(tree, name)
    tables, said = container.tables(), []
    if not tables:
        return _forge_manifest(tree, name, rng)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        key = rng.choice(list(tables))
        if rng.random() < 0.04 and len(tables) > 1:
            del tables[key]
            record = container.record
            del (record["stores"][key[0]]["arrays"] if key[0] else record["columns"])[key[1]]
            said.append(f"table {key} removed")
            continue
        tables[key], how = mutate_array(tables[key], rng, list(tables.values()))
        said.append(f"table {key}: {how}")
    return container.write(tables), "; ".join(said)


def _forge_payload(tree: Tree, name: str, rng: random.Random) -> tuple[Tree, str]:
    """Other bytes where payloads lie, and the checksums of their stretches put right."""
    container = Container(tree, name)
    tables = container.tables()
    stores = [store for store, key in tables if key == "chunks" and len(tables[store, key])]
    if not stores:
        return _forge_table(tree, name, rng)
    store = rng.choice(stores)
    chunks = tables[store, "chunks"].copy()
    place = rng.randrange(len(chunks))
    offset, length, _ = map(int, chunks[place])
    where = container.payload_name(store)
    data = bytearray(container.tree[where])
    for _ in range(rng.choice([1, 2, 16, length])):
        data[offset + rng.randrange(length)] = rng.choice([0, 255, rng.randrange(256)])
    chunks[place, 2] = zlib.crc32(data[offset : offset + length])
    tables[store, "chunks"] = chunks
    container.tree = {**container.tree, where: bytes(data)}
    return container.write(tables), f"payloads of {store}"


def _forge_journal(tree: Tree, name: str, rng: random.Random) -> tuple[Tree, str]:
    records = [(journal, copy.deepcopy(said), rest) for journal, said, rest in read_records(tree[name])]
    at = rng.randrange(len(records))
    journal, said, rest = records[at]
    how = rng.choice(["words", "arrays", "bytes", "order", "twice", "gone"])
    if how == "words":
        how += " " + mutate_json(said.get("words", said) if isinstance(said, dict) else said, rng)
    elif how == "arrays":
        how += " " + mutate_json(said, rng)
        if rng.random() < 0.5:
            rest = rest + bytes(rng.randrange(1 << 12))
    elif how == "bytes":
        rest = mutate_bytes(rest, rng)
    elif how == "order":
        other = rng.randrange(len(records))
        records[other], records[at] = records[at], records[other]
    elif how == "twice":
        records.insert(at, records[at])
    else:
        del records[at]
    if how.split()[0] in ("words", "arrays", "bytes"):
        records[at] = (journal, said, rest)
    return {**tree, name: write_records(records)}, f"record {at}: {how}"


def _forge_text(tree: Tree, name: str, rng: random.Random) -> tuple[Tree, str]:
    record = json.loads(tree[name])
    said = mutate_json(record, rng)
    return {**tree, name: json.dumps(record).encode()}, said


def _forge_bytes(tree: Tree, name: str, rng: random.Random) -> tuple[Tree, str]:
    return {**tree, name: mutate_bytes(tree[name], rng)}, "bytes"
