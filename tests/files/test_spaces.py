"""Spaces as JSON: they round-trip, and invalid records are refused."""

from __future__ import annotations

import inspect
import json
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from sb3_extra_buffers.errors import FileFormatError, NotSaveableError
from sb3_extra_buffers.files.spaces import space_from_json, space_to_json

SPACES: list[spaces.Space[Any]] = [
    spaces.Box(0, 255, (4, 84, 84), np.uint8),
    spaces.Box(-np.inf, np.inf, (3,), np.float64),
    spaces.Box(np.array([-1.5, 0.1, -np.inf], np.float32), np.array([2.0, 0.3, 7.0], np.float32)),
    spaces.Box(np.zeros((), np.float32), np.ones((), np.float32)),
    spaces.Discrete(6),
    spaces.Discrete(6, start=-2),
    spaces.Discrete(np.iinfo(np.int64).max),
    spaces.MultiDiscrete([3, 4, 5]),
    spaces.MultiDiscrete(np.array([[3, 4], [5, 6]])),
    spaces.MultiBinary(7),
    spaces.MultiBinary((2, 3)),
    spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Box(np.zeros(2, np.float32), np.ones(2, np.float32))}),
]
if "dtype" in inspect.signature(spaces.Discrete).parameters:  # not in older versions of gymnasium
    SPACES += [spaces.Discrete(6, dtype=np.int32), spaces.Discrete(6, start=-2, dtype=np.int8)]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_spaces_round_trip(space: spaces.Space[Any]) -> None:
    record = json.loads(json.dumps(space_to_json(space), allow_nan=False))

    again = space_from_json(record)

    assert again == space
    assert again.dtype == space.dtype
    if isinstance(space, spaces.Dict):
        assert list(again.keys()) == list(space.keys())


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"kind": "Graph"},
        {"kind": "Discrete", "n": -1, "start": 0},
        {"kind": "Discrete", "n": "6", "start": 0},
        {"kind": "Discrete", "n": 300, "start": 0, "dtype": "|u1"},
        {"kind": "Discrete", "n": 6, "start": 0, "dtype": "<f4"},
        {"kind": "Box", "shape": [10**12], "dtype": "|u1", "low": 0, "high": 1},
        {"kind": "Box", "shape": [2], "dtype": "<f4", "low": 0, "high": 1e40},
        {"kind": "Box", "shape": [2], "dtype": "O", "low": 0, "high": 1},
        {"kind": "Box", "shape": [2], "dtype": "<f4", "low": [0], "high": 1},
        {"kind": "Dict", "spaces": [["a"]]},
        {
            "kind": "Dict",
            "spaces": [
                [name, {"kind": "Box", "shape": [1 << 25], "dtype": "|u1", "low": 0, "high": 1}] for name in "abc"
            ],
        },
    ],
)
def test_invalid_spaces_are_refused(record: Any) -> None:
    with pytest.raises(FileFormatError):
        space_from_json(record)


def test_an_unsupported_space_is_named() -> None:
    with pytest.raises(NotSaveableError, match="Text"):
        space_to_json(spaces.Text(5))


@pytest.mark.parametrize("key", ["", 1, ("a", "b")])
def test_keys_that_a_file_cannot_name_are_refused_when_saving(key: Any) -> None:
    with pytest.raises(NotSaveableError, match="use a non-empty string"):
        space_to_json(spaces.Dict({key: spaces.Discrete(2)}))
