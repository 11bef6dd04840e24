"""Columns of transitions on a device: written by step, gathered by index."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from sb3_extra_buffers.stores.device_columns import DeviceColumns

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
#: Device, and whether Triton's kernels run.
PLACES = [
    pytest.param(("cpu", False), id="cpu"),
    pytest.param(
        ("cpu", True), id="interpreted", marks=pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
    ),
    pytest.param(("cuda", True), id="cuda", marks=on_gpu),
    pytest.param(("cuda", False), id="cuda without Triton", marks=on_gpu),
]
ACTIONS = [(1, np.int64), (3, np.float32), (5, np.int8), (2, np.int32), (1, np.uint8), (3, np.int64), (1, np.int16)]

Arrays = dict[str, Any]


def random_columns(
    n_steps: int, n_streams: int, n_actions: int, dtype: Any, device: str, triton: bool | None = None
) -> tuple[DeviceColumns, Arrays]:
    """A full table, and what it holds."""
    table = DeviceColumns(n_steps, n_streams, n_actions, np.dtype(dtype), torch.device(device), triton)
    random, lead = np.random.default_rng(n_actions), (n_steps, n_streams)
    expected = {
        "actions": random.integers(0, 100, (*lead, n_actions)).astype(dtype),
        "rewards": random.standard_normal(lead).astype(np.float32),
        "dones": random.integers(0, 2, lead).astype(np.float32),
        "timeouts": random.integers(0, 2, lead).astype(np.float32),
    }
    for step in range(n_steps):
        table.commit(step, table.plan(tuple(expected[name][step] for name in table.names)))
    return table, expected


def check_columns(floats: torch.Tensor, actions: torch.Tensor, expected: Arrays, indices: Any) -> None:
    flat = {name: column.reshape(-1, *column.shape[2:])[indices] for name, column in expected.items()}
    np.testing.assert_array_equal(floats[0, :, 0].cpu(), flat["dones"] * (1 - flat["timeouts"]))
    np.testing.assert_array_equal(floats[1, :, 0].cpu(), flat["rewards"])
    np.testing.assert_array_equal(actions.cpu(), flat["actions"])
    assert actions.cpu().numpy().dtype == flat["actions"].dtype


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("n_actions", "dtype"), ACTIONS)
def test_columns_are_gathered_by_index(n_actions: int, dtype: Any, place: tuple[str, bool]) -> None:
    table, expected = random_columns(7, 3, n_actions, dtype, *place)
    for count in (0, 1, 37):
        indices = np.random.default_rng(count).integers(0, 21, count)
        floats, actions = table.empty(count)
        table.gather(torch.from_numpy(indices).to(table.device), floats.fill_(7), actions.fill_(7))
        check_columns(floats, actions, expected, indices)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("n_actions", "dtype"), ACTIONS)
def test_views_show_columns_and_can_be_assigned_to(n_actions: int, dtype: Any, place: tuple[str, bool]) -> None:
    table, expected = random_columns(7, 3, n_actions, dtype, *place)
    for name, view in table.views.items():
        assert isinstance(view, np.ndarray) == (place[0] == "cpu")
        np.testing.assert_array_equal(torch.as_tensor(view).cpu(), expected[name])
        view[2] = 1
        expected[name][2] = 1
    for name, column in table.arrays().items():
        np.testing.assert_array_equal(column, expected[name])
        assert column.dtype == expected[name].dtype
    moved = table.to(torch.device("cpu"))
    moved.assign("rewards", np.zeros((7, 3)))
    assert not moved.views["rewards"].any()
    np.testing.assert_array_equal(moved.views["actions"], expected["actions"])
