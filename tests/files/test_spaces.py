"""Spaces as JSON: they round-trip, and invalid records are refused."""

from __future__ import annotations

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
    spaces.MultiDiscrete([3, 4, 5]),
    spaces.MultiDiscrete(np.array([[3, 4], [5, 6]])),
    spaces.MultiBinary(7),
    spaces.MultiBinary((2, 3)),
    spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Box(np.zeros(2, np.float32), np.ones(2, np.float32))}),
]


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
