"""The sum-tree draws in proportion to priorities, and its Triton kernels agree with the reference."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from sb3_extra_buffers.kernels.sum_tree_torch import FAN_OUT, TorchSumTree
from sb3_extra_buffers.stores.device_base import has_triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KINDS = [
    pytest.param(("torch", "cpu")),
    pytest.param(
        ("triton", "cpu"),
        marks=pytest.mark.skipif(not INTERPRETED, reason="on a CPU, kernels run only under Triton's interpreter"),
    ),
    *(
        pytest.param(
            (kind, "cuda"),
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")],
        )
        for kind in ("torch", "triton")
    ),
]


def make_tree(kind: tuple[str, str], n_leaves: int, n_added: int, alpha: float = 1.0, beta: float = 1.0) -> Any:
    """A tree whose transitions were all added, with priority 1."""
    counts = torch.tensor([n_added, min(n_added, n_leaves)], device=kind[1])
    tree_class: type[TorchSumTree] = TorchSumTree
    if kind[0] == "triton":
        from sb3_extra_buffers.kernels.sum_tree_triton import TritonSumTree

        assert has_triton()
        tree_class = TritonSumTree
    tree = tree_class(n_leaves, counts, alpha, beta, 1e-6)
    for first in range(0, min(n_added, n_leaves), 700):
        tree.fill(first, min(700, n_leaves - first))
    return tree


def draw(tree: Any, uniform: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    points = torch.as_tensor(np.asarray(uniform, np.float64), device=tree.sums.device)
    leaves, numbers = torch.full((2, len(points)), -7, dtype=torch.int64, device=points.device)
    weights = torch.full((len(points),), -7.0, device=points.device)
    tree.draw(points, leaves, numbers, weights)
    return leaves.cpu().numpy(), numbers.cpu().numpy(), weights.cpu().numpy()


def update(tree: Any, numbers: Any, errors: Any) -> None:
    device = tree.sums.device
    tree.update(torch.as_tensor(numbers, device=device), torch.as_tensor(errors, device=device))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_leaves", [1, FAN_OUT, FAN_OUT + 1, 1500])
def test_draws_follow_the_line_of_priorities(kind: tuple[str, str], n_leaves: int) -> None:
    rng = np.random.default_rng(n_leaves)
    tree = make_tree(kind, n_leaves, n_leaves)
    # whole numbers: every sum is exact, in any order
    priorities = rng.integers(0, 9, n_leaves)
    priorities[rng.integers(n_leaves)] = 5
    tree.write_leaves(torch.as_tensor(priorities, device=kind[1]))
    tree.check()
    uniform = rng.random(257)

    leaves, numbers, weights = draw(tree, uniform)

    points = (np.arange(257) + uniform) * (priorities.sum() / 257)
    np.testing.assert_array_equal(leaves, priorities.cumsum().searchsorted(points, side="right"))
    np.testing.assert_array_equal(numbers, leaves)
    np.testing.assert_allclose(weights, priorities[priorities > 0].min() / priorities[leaves], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_updates", [1, 40, 600])
def test_the_last_update_of_a_transition_counts(kind: tuple[str, str], n_updates: int) -> None:
    n_leaves, n_added = 1100, 2350
    rng = np.random.default_rng(n_updates)
    tree = make_tree(kind, n_leaves, n_added, alpha=0.6)
    expected = np.ones(n_leaves)
    highest = 1.0
    for _ in range(3):
        numbers = rng.integers(n_added - n_leaves, n_added, n_updates)
        numbers[n_updates // 2 :] = numbers[: n_updates - n_updates // 2]
        errors = rng.normal(size=n_updates).astype(np.float32) * 3
        update(tree, numbers, errors)
        for number, error in zip(numbers, np.abs(errors.astype(np.float64)) + 1e-6, strict=True):
            expected[number % n_leaves] = error**0.6
            highest = max(highest, error)
        tree.check()

    np.testing.assert_allclose(tree.leaves.cpu(), expected, rtol=1e-12)
    assert float(tree.max_priority) == pytest.approx(highest, rel=1e-12)
    assert int(tree.n_skipped) == 0
    leaves, numbers, _ = draw(tree, rng.random(64))
    np.testing.assert_array_equal(numbers % n_leaves, leaves)
    assert ((numbers >= n_added - n_leaves) & (numbers < n_added)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_transitions_that_are_gone_and_errors_that_are_not_finite_are_skipped(kind: tuple[str, str]) -> None:
    tree = make_tree(kind, 40, 100)
    update(tree, [59, 60, 100, 99, 61, 62, -1], [9.0, 2.0, 9.0, 3.0, np.nan, np.inf, 9.0])

    expected = np.ones(40)
    expected[60 % 40], expected[99 % 40] = 2 + 1e-6, 3 + 1e-6
    np.testing.assert_allclose(tree.leaves.cpu(), expected, rtol=1e-12)
    assert int(tree.n_skipped) == 5
    assert float(tree.max_priority) == pytest.approx(3 + 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_leaf_is_never_drawn_even_where_sums_are_rounded(kind: tuple[str, str]) -> None:
    rng = np.random.default_rng(0)
    tree = make_tree(kind, 1056, 1056)
    priorities = rng.random(1056) ** 20
    priorities[rng.random(1056) < 0.7] = 0
    tree.write_leaves(torch.as_tensor(priorities, device=kind[1]))

    for uniform in (np.zeros(300), np.full(300, np.nextafter(1, 0)), rng.random(300)):
        leaves, _, weights = draw(tree, uniform)
        assert (priorities[leaves] > 0).all()
        assert ((weights >= 0) & (weights <= 1)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_many_transitions_are_added_at_a_time(kind: tuple[str, str]) -> None:
    tree = make_tree(kind, 40_000, 0)
    tree.fill(100, 35_000)
    tree.fill(39_000, 999)

    tree.check()
    expected = np.zeros(40_000)
    expected[100:35_100] = expected[39_000:39_999] = 1
    np.testing.assert_array_equal(tree.leaves.cpu(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_is_empty_after_its_kernels_were_compiled(kind: tuple[str, str]) -> None:
    tree = make_tree(kind, 1100, 0)
    leaves, numbers = torch.zeros((2, 2), dtype=torch.int64, device=kind[1])
    weights = torch.zeros(2, device=kind[1])
    tree.compile_kernels(torch.zeros(2, dtype=torch.float64, device=kind[1]), leaves, numbers, weights)

    tree.check()
    assert not bool(tree.sums[:-1].any())
    assert int(tree.n_skipped) == 0
    assert float(tree.max_priority) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_update_is_repaired(kind: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make_tree(kind, 1100, 1100)
    with monkeypatch.context() as patched:
        patched.setattr(type(tree), "_update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            update(tree, [5, 6], [3.0, 4.0])
    update(tree, [7], [2.0])

    tree.check()
    assert float(tree.leaves[5]) == 9
    assert float(tree.leaves[7]) == pytest.approx(2 + 1e-6)


def interrupted(tree: Any, numbers: torch.Tensor, errors: torch.Tensor) -> None:
    tree.sums[5] = 9.0
    tree.claims[7] = (1 << 32) + 5
    raise KeyboardInterrupt
