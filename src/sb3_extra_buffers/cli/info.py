"""What ``info`` prints about a saved buffer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sb3_extra_buffers.cli.reader import BufferReader, memory_of, obs_shape, open_buffer, open_saved
from sb3_extra_buffers.errors import FileFormatError
from sb3_extra_buffers.files import registry
from sb3_extra_buffers.files.journal import read_journal
from sb3_extra_buffers.files.saved_parts import SavedParts
from sb3_extra_buffers.stores.usage import MemoryUsage, format_bytes


def describe(path: str) -> dict[str, Any]:
    """Return facts about a saved buffer; docs/cli.md lists them."""
    saved = open_saved(path)
    facts: dict[str, Any] = {
        "path": str(path),
        "class": class_of(saved),
        "kind": saved.kind,
        "format_version": saved.record["version"],
        "library": saved.record.get("library"),
        "saved": saved.record.get("saved"),
        "bytes_on_disk": _bytes_on_disk(saved.path),
    }
    if saved.kind in ("torchrl-storage", "experience", "replay-service", "embodied"):
        return facts | {"memory": memory_of(registry.from_parts(saved.read_parts(measured=True)))}
    _, buffer = open_buffer(path, measured=True)
    reader = BufferReader(buffer)
    facts |= {"steps": reader.n_steps, "environments": reader.n_envs, "transitions": reader.n_transitions}
    if reader.is_recording:
        facts["capacity"] = buffer.size
    elif not reader.is_array:
        facts |= {
            "capacity": buffer.buffer_size * reader.n_envs,
            "observation_space": str(buffer.observation_space),
            "action_space": str(buffer.action_space),
        }
    facts |= {"observations": _observation_facts(reader), "memory": memory_of(buffer)}
    if not reader.is_array:
        facts |= _episode_facts(reader)
    if saved.journal is not None:
        facts["steps_since_checkpoint"] = sum(1 for _ in read_journal(saved.journal))
    return facts


def class_of(saved: SavedParts) -> str:
    """Return the name of the class that was saved."""
    if saved.kind == "recording":
        return "RecordBuffer" if saved.stores else "FramelessRecordBuffer"
    return registry.class_name(saved.kind)


def _bytes_on_disk(path: Path) -> int:
    files = path.iterdir() if path.is_dir() else [path]
    try:
        return sum(file.stat().st_size for file in files)
    except OSError as problem:
        raise FileFormatError(f"{path} cannot be read: {problem.strerror}") from problem


def _observation_facts(reader: BufferReader) -> dict[str, Any]:
    """Return shape and dtype of one observation of each key; ``""`` unless observations are a Dict."""
    leaves = reader.leaves()
    return {key: {"shape": [*obs_shape(leaf)], "dtype": str(leaf.dtype)} for key, leaf in leaves.items()}


def _episode_facts(reader: BufferReader) -> dict[str, Any]:
    """Return how many complete episodes the buffer holds, with their returns and lengths."""
    episodes = [episode for episode in reader.episodes() if episode.is_complete]
    facts: dict[str, Any] = {"episodes": len(episodes)}
    if episodes:
        facts["returns"] = _statistics([episode.total_reward for episode in episodes])
        facts["lengths"] = _statistics([len(episode.steps) for episode in episodes])
    return facts


def _statistics(values: list[float]) -> dict[str, float]:
    return {name: float(getattr(np, name)(values)) for name in ("mean", "min", "max")}


# ---- formats ----


def as_json(facts: dict[str, Any]) -> str:
    """Format facts as JSON; numbers that JSON does not have are null."""
    return json.dumps(_plain(facts), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, MemoryUsage):
        return value.as_dict()
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_text(facts: dict[str, Any]) -> str:
    """Format facts as lines of ``name: value``."""
    return "\n".join(line for name, value in facts.items() for line in _lines(name, value))


def _lines(name: str, value: Any) -> Iterator[str]:
    if name == "observations":
        for key, fact in value.items():
            yield f"{name}{f'.{key}' * bool(key)}: {'x'.join(map(str, fact['shape']))} {fact['dtype']}"
    elif name == "bytes_on_disk":
        yield f"{name}: {value:,} ({format_bytes(value)})"
    elif isinstance(value, MemoryUsage):
        first, *rest = str(value).splitlines()
        yield f"{name}: {first}"
        yield from (f"  {line}" for line in rest)
    elif isinstance(value, dict):
        yield f"{name}: " + ", ".join(f"{statistic} {number:.6g}" for statistic, number in value.items())
    elif value is not None:
        yield f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}"
