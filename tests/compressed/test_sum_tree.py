"""The tree that priorities are drawn from, beside a plain array of them."""

from __future__ import annotations

import contextlib
import copy
import pickle

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.utils import set_random_seed

from sb3_extra_buffers._sb3.sum_tree import FAN_OUT, SumTree
from tests.torture.interrupts import Injector

# one node, some nodes, and two levels above the leaves
SIZES = [1, 5, FAN_OUT, FAN_OUT + 1, 3000, 70_000]

priorities = st.one_of(st.just(0.0), st.floats(1e-30, 1e30), st.sampled_from([1e-6, 1.0, 3.0]))


def brute_find(leaves: npt.NDArray[np.float64], point: float) -> int:
    """The first leaf that ends beyond ``point``."""
    return int(np.flatnonzero(np.cumsum(leaves) > point)[0])


@given(st.data(), st.sampled_from(SIZES[:5]))
@settings(max_examples=60, deadline=None)
def test_it_agrees_with_an_array(data: st.DataObject, n_leaves: int) -> None:
    tree, model = SumTree(n_leaves, compiled=data.draw(st.sampled_from([None, False]))), np.zeros(n_leaves)
    for _ in range(data.draw(st.integers(1, 8))):
        if data.draw(st.booleans()):
            where = data.draw(st.lists(st.integers(0, n_leaves - 1), min_size=1, max_size=40))
            what = np.array([data.draw(priorities) for _ in where])
            tree.write(np.array(where), what)
            for leaf, value in zip(where, what, strict=True):  # the last one counts
                model[leaf] = value
        else:
            first = data.draw(st.integers(0, n_leaves - 1))
            part = slice(first, data.draw(st.integers(first + 1, n_leaves)))
            value = data.draw(priorities)
            tree.write(part, value)
            model[part] = value
        if data.draw(st.booleans()):
            tree.check()
    assert np.array_equal(tree.read(slice(0, n_leaves)), model)
    assert tree.minimum == (model[model > 0].min() if model.any() else np.inf)
    assert tree.total == pytest.approx(model.sum(), rel=1e-12)
    tree.check()
    if model.any():
        drawn = tree.draw(64)
        assert (model[drawn] > 0).all()


@given(st.integers(0, 2**32 - 1), st.sampled_from(SIZES))
@settings(max_examples=40, deadline=None)
def test_find_returns_the_leaf_at_each_point(seed: int, n_leaves: int) -> None:
    # whole numbers add up exactly in any order, so that there is one right answer
    random = np.random.default_rng(seed)
    leaves = random.integers(0, 4, n_leaves).astype(float)
    leaves[random.integers(n_leaves)] = 5.0
    tree = SumTree(n_leaves)
    tree.write(slice(0, n_leaves), leaves)
    assert tree.total == leaves.sum()
    points = np.append(random.random(30) * tree.total, [0.0, random.integers(leaves.sum()), tree.total])
    found = tree.find(points)
    last = np.flatnonzero(leaves)[-1]
    assert found.tolist() == [brute_find(leaves, point) if point < tree.total else last for point in points]


@pytest.mark.parametrize("n_leaves", SIZES)
def test_empty_leaves_are_never_drawn(n_leaves: int) -> None:
    random = np.random.default_rng(3)
    tree = SumTree(n_leaves)
    # sizes so far apart that sums are rounded everywhere
    leaves = 10.0 ** random.uniform(-30, 30, n_leaves) * (random.random(n_leaves) < 0.5)
    leaves[n_leaves // 2] = 1.0
    tree.write(slice(0, n_leaves), leaves)
    set_random_seed(0)
    for n_draws in (1, 7, 256):
        drawn = tree.draw(n_draws)
        assert drawn.shape == (n_draws,)
        assert (leaves[drawn] > 0).all()


def test_every_part_of_the_total_gives_one_draw() -> None:
    tree = SumTree(4)
    tree.write(np.arange(4), np.array([1.0, 0.0, 2.0, 1.0]))
    for seed in range(20):
        set_random_seed(seed)
        assert tree.draw(4).tolist() == [0, 2, 2, 3]


def test_frequencies_follow_priorities() -> None:
    random = np.random.default_rng(0)
    n_leaves, n_draws = 5000, 400_000
    tree, leaves = SumTree(n_leaves), random.exponential(1.0, n_leaves)
    tree.write(slice(0, n_leaves), leaves)
    drawn = tree.find(random.random(n_draws) * tree.total)
    expected = leaves / leaves.sum() * n_draws
    counts = np.bincount(drawn, minlength=n_leaves)
    usual = expected > 5
    chi_square = ((counts - expected) ** 2 / expected)[usual].sum()
    # mean and deviation of the chi-square distribution; six of them is one in a billion
    assert abs(chi_square - usual.sum()) < 6 * np.sqrt(2 * usual.sum())


def test_rounding_errors_do_not_add_up() -> None:
    random = np.random.default_rng(0)
    tree = SumTree(10_000)
    for _ in range(1000):
        tree.write(random.integers(0, 10_000, 1000), 10.0 ** random.uniform(-12, 12, 1000))
        assert tree.total > 0
    tree.check()
    tree.write(slice(0, 10_000), 0.0)
    tree.write(np.array([17]), 0.1)
    assert (tree.total, tree.minimum) == (0.1, 0.1)
    tree.clear()
    assert (tree.total, tree.minimum) == (0.0, np.inf)


def test_check_detects_damage() -> None:
    tree = SumTree(100_000)
    tree.write(np.array([5, 70_000]), np.array([1.0, 2.0]))
    tree.check()
    damaged = copy.deepcopy(tree)
    assert damaged.total == 3.0
    damaged._sums[1][3] += 1e-9
    with pytest.raises(AssertionError, match="sum of its children"):
        damaged.check()
    tree.write(np.array([6]), np.nan)
    with pytest.raises(AssertionError, match="not finite"):
        tree.check()


@pytest.mark.parametrize("n_leaves", [*SIZES, 1024, 1025, 32 * 1024 + 1])
def test_compiled_kernels_agree_to_the_last_bit(n_leaves: int) -> None:
    pytest.importorskip("numba")
    random = np.random.default_rng(n_leaves)
    tree, reference = SumTree(n_leaves), SumTree(n_leaves, compiled=False)
    for turn in range(12):
        # sizes further and further apart, so that every sum and difference is rounded
        leaves = np.arange(n_leaves) if turn == 0 else random.integers(0, n_leaves, random.integers(1, 300))
        values = 10.0 ** random.uniform(-3 * turn, 3 * turn, len(leaves)) * (random.random(len(leaves)) < 0.8)
        values[-1] = 1.0  # the last of repeated leaves counts
        found = []
        for each in (tree, reference):
            each.write_each(leaves + turn * n_leaves, values)
            points = np.append(np.linspace(0, each.total, 301), [np.nextafter(each.total, 0), 2 * each.total])
            set_random_seed(turn)
            drawn = [part for count in (1, 7, 256) for part in each.draw_and_read(count)]
            found.append([each.total, each.minimum, each.find(points), *drawn, *each.levels])
        for ours, theirs in zip(*found, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert tree._bound is not None
    assert reference._bound is None


@pytest.mark.parametrize("compiled", [None, False])
def test_an_empty_tree_draws_nothing(compiled: bool | None) -> None:
    tree = SumTree(100, compiled=compiled)
    for _ in range(2):
        assert len(tree.draw(5)) == 0
        assert tree.minimum == np.inf
        tree.write(np.array([3, 4]), np.array([2.0, 1.0]))
        leaves, priorities, minimum = tree.draw_and_read(3)
        assert leaves.tolist() == [3, 3, 4] or leaves.tolist() == [3, 4, 4]
        np.testing.assert_array_equal(priorities, tree.read(leaves))
        assert minimum == 1.0
        assert len(tree.draw(0)) == 0
        tree.clear()


@pytest.mark.parametrize("compiled", [None, False])
def test_an_interrupt_of_clear_leaves_the_old_tree_or_an_empty_one(compiled: bool | None) -> None:
    for at in range(1, 1000):
        tree = SumTree(70_000, compiled)
        tree.write_each(np.arange(9), np.ones(9))
        with contextlib.suppress(KeyboardInterrupt), Injector(at, KeyboardInterrupt()) as injector:
            tree.clear()
        # compiled code must not write to levels that have been freed
        tree.write_each(np.array([9, 69_999]), np.array([4.0, 2.0]))
        tree.check()
        assert tree.total in (6, 15)
        assert tree.read(np.array([9, 69_999])).tolist() == [4, 2]
        if injector.count < at:
            break
    assert 20 < at < 999
    assert tree.total == 6


@pytest.mark.parametrize("n_leaves", SIZES)
def test_copies_draw_the_same(n_leaves: int) -> None:
    random = np.random.default_rng(n_leaves)
    tree = SumTree(n_leaves)
    for _ in range(20):
        tree.write(random.integers(0, n_leaves, 50), random.exponential(1.0, 50))
        assert tree.total > 0
    for again in (copy.deepcopy(tree), pickle.loads(pickle.dumps(tree))):
        again.check()
        assert (again.total, again.minimum) == (tree.total, tree.minimum)
        draws = []
        for each in (tree, again):
            set_random_seed(0)
            draws.append(each.draw(300))
        assert draws[0].tolist() == draws[1].tolist()
        before = tree.total
        again.write(np.array([0]), 9.0)
        assert tree.total == before
