"""`CompressedArray` beside the NumPy array it stands for, over generated index expressions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sb3_extra_buffers.compressed import CompressedArray
from sb3_extra_buffers.errors import ArgumentError, IndexOutOfRangeError
from tests.contracts.store import Walk, examples, method_params

LEADS = [(6,), (6, 3), (4, 3, 2)]
OBSERVATIONS = [(), (5,), (4, 6, 6)]


def filled(
    lead: tuple[int, ...], per_obs: tuple[int, ...], method: str, decided: bool, seed: int = 0
) -> tuple[CompressedArray, npt.NDArray[np.uint8]]:
    """An array and a NumPy array with the same contents: full, with a method chosen, or two observations only."""
    array = CompressedArray(lead, per_obs, np.uint8, compression_method=method)
    dense = np.zeros((*lead, *per_obs), np.uint8)
    if decided:
        values = Walk((*lead, *per_obs), seed).frames(1)[0]
        for step in range(lead[0]):
            array[step] = dense[step] = values[step]
        array.store.choose_method()
    else:
        for step in (0, lead[0] - 1):
            where = (step,) + (0,) * (len(lead) - 1)
            array[where] = dense[where] = np.full(per_obs, step + 1, np.uint8)
    return array, dense


@st.composite
def parts(draw: st.DrawFn, size: int, length: int | None, beyond: bool) -> Any:
    """An index for one axis; ``length`` is that of integer arrays, or None for none."""
    low, high = (-size - 2, size + 1) if beyond else (-size, size - 1)
    kinds = ["int", "int64", "slice", "slice", "all"]
    if length is not None:
        kinds += ["array", "list", "column", "mask"]
    kind = draw(st.sampled_from(kinds))
    if kind == "int":
        return draw(st.integers(low, high))
    if kind == "int64":
        return np.int64(draw(st.integers(low, high)))
    if kind == "slice":
        return draw(st.slices(size))
    if kind == "all":
        return slice(None)
    if kind == "mask":
        return np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    assert length is not None
    values = draw(st.lists(st.integers(low, high), min_size=length, max_size=length))
    if kind == "list":
        return values
    array = np.array(values, draw(st.sampled_from([np.int64, np.int32, np.intp])))
    return array[:, None] if kind == "column" else array


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...], beyond: bool = False) -> Any:
    """An index expression for an array of ``shape``: any mix that NumPy knows."""
    style = draw(st.sampled_from(["plain", "mixed", "mixed", "mixed", "mask", "ellipsis", "one", "ints"]))
    if style == "mask":
        n_axes = draw(st.integers(1, len(shape)))
        seed = draw(st.integers(0, 999))
        mask = np.random.default_rng(seed).random(shape[:n_axes]) < draw(st.sampled_from([0.0, 0.2, 0.8, 1.0]))
        rest = [draw(parts(size, None, beyond)) for size in shape[n_axes:][: draw(st.integers(0, 2))]]
        return (mask, *rest) if rest else mask
    if style == "one":
        return draw(parts(shape[0], draw(st.integers(0, 4)), beyond))
    if style == "ints":
        array = draw(st.lists(st.integers(-shape[0], shape[0] - 1), min_size=4, max_size=4))
        return np.array(array).reshape(2, 2)
    length = None if style == "plain" else draw(st.sampled_from([0, 1, 3, 3]))
    count = draw(st.integers(0, len(shape)))
    index = [draw(parts(size, length, beyond)) for size in shape[:count]]
    if style == "ellipsis":
        tail = draw(st.integers(0, len(shape) - count))
        index = [*index, ..., *(draw(parts(size, length, beyond)) for size in shape[len(shape) - tail :])]
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        index.insert(draw(st.integers(0, len(index))), None)
    return tuple(index)


def answer(get: Any) -> Any:
    """What an index expression gives: an array, or the error it ends in."""
    try:
        return get()
    except IndexError as error:
        return error


def check_read(array: CompressedArray, dense: npt.NDArray[Any], index: Any, beyond: bool = False) -> None:
    wanted, found = answer(lambda: dense[index]), answer(lambda: array[index])
    if isinstance(wanted, IndexError):
        assert isinstance(found, IndexError), f"{index!r} should be an error, gave {found!r}"
        return
    if isinstance(found, IndexError):
        # NumPy does not look at indices out of range where nothing is selected
        if beyond and np.size(wanted) == 0:
            return
        raise found
    assert np.shape(found) == np.shape(wanted)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.same_without_extras
@pytest.mark.parametrize("decided", [False, True], ids=["collected", "chosen"])
@pytest.mark.parametrize("method", method_params("auto", "delta", "zstd", "none"))
@pytest.mark.parametrize("per_obs", OBSERVATIONS, ids=str)
@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_reads_what_numpy_reads(lead: tuple[int, ...], per_obs: tuple[int, ...], method: str, decided: bool) -> None:
    array, dense = filled(lead, per_obs, method, decided)

    @examples(45 if method in ("auto", "delta") else 12)
    @given(indices(dense.shape, beyond=False))
    def inside(index: Any) -> None:
        check_read(array, dense, index)

    @examples(15 if method in ("auto", "delta") else 5)
    @given(indices(dense.shape, beyond=True))
    def beyond(index: Any) -> None:
        check_read(array, dense, index, beyond=True)

    inside()
    beyond()
    assert array.shape == dense.shape


@pytest.mark.same_without_extras
@pytest.mark.parametrize("decided", [False, True], ids=["collected", "chosen"])
@pytest.mark.parametrize("method", method_params("auto", "delta", "zstd", "none"))
@pytest.mark.parametrize("per_obs", OBSERVATIONS, ids=str)
@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_writes_what_numpy_writes(lead: tuple[int, ...], per_obs: tuple[int, ...], method: str, decided: bool) -> None:
    array, dense = filled(lead, per_obs, method, decided)

    @examples(30 if method in ("auto", "delta") else 12)
    @given(
        indices(dense.shape, beyond=False), st.integers(0, 9999), st.sampled_from(["full", "scalar", "last", "ones"])
    )
    def write(index: Any, seed: int, kind: str) -> None:
        target = answer(lambda: dense[index])
        assume(not isinstance(target, IndexError))
        shape = np.shape(target)
        if kind == "last":
            shape = shape[1:]
        elif kind == "ones":
            shape = (1, 1, *shape)
        elif kind == "scalar":
            shape = ()
        value: Any = np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)
        if kind == "scalar":
            value = int(value)

        try:
            dense[index] = value
        except (TypeError, ValueError):
            assume(False)  # NumPy is strict about leading axes of one in places; here they are always forgotten
        array[index] = value

        np.testing.assert_array_equal(np.asarray(array), dense)
        array.store.check()

    write()


@pytest.mark.parametrize("method", method_params("auto", "delta", "none"))
def test_the_last_of_several_writes_to_one_place_counts(method: str) -> None:
    for per_obs in OBSERVATIONS:
        array, dense = filled((6, 3), per_obs, method, True)
        steps, envs = np.array([0, 2, 0, 2, 0]), np.array([1, 1, 1, 1, 1])
        values = np.arange(5, dtype=np.uint8).reshape(5, *(1,) * len(per_obs)) + np.zeros((5, *per_obs), np.uint8)
        array[steps, envs] = dense[steps, envs] = values
        np.testing.assert_array_equal(np.asarray(array), dense)
        array[[1, 1, 1]] = dense[[1, 1, 1]] = values[:3, None]
        np.testing.assert_array_equal(np.asarray(array), dense)
        if per_obs:
            array[[3, 3], 0, ..., -1] = dense[[3, 3], 0, ..., -1] = values[:2, ..., -1]
            np.testing.assert_array_equal(np.asarray(array), dense)


@pytest.mark.parametrize("decided", [False, True], ids=["collected", "chosen"])
def test_forms_that_buffers_use(decided: bool) -> None:
    array, dense = filled((6, 3), (4, 6, 6), "auto", decided)
    steps, envs = np.array([0, 5, 2, 2]), np.array([2, 0, 1, 1])
    forms: list[Any] = [
        (steps, envs),
        (steps, envs, slice(None)),
        ((steps + 1) % 6, envs, slice(None)),
        (steps, envs, ..., ),
        steps,
        slice(None, 4),
        slice(2, None),
        3,
        -1,
        (3, 1),
        (steps, 1, slice(None), 3),
        (steps[:, None], envs[None]),
        (slice(None), 0),
        ...,
        (),
        np.array(3),
        (np.array(2), np.array(1)),
        (steps.astype(np.uint8), envs.astype(np.int16)),
        (steps.tolist(), envs.tolist()),
        True,
        np.True_,
        None,
    ]  # fmt: skip
    for form in forms:
        check_read(array, dense, form)


@pytest.mark.parametrize("method", method_params("delta", "zstd", "none"))
def test_indices_of_every_memory_layout_select_the_same_observations(method: str) -> None:
    """`np.unravel_index`, for one, returns columns of a table."""
    array, dense = filled((6, 3), (4, 6, 6), method, True)
    other = array.next_view()
    steps, envs = np.array([0, 5, 2, 2, 4]), np.array([2, 0, 1, 1, 2])
    frozen = steps.copy()
    frozen.flags.writeable = False
    pairs: list[Any] = [
        np.stack([steps, envs], axis=1).T,
        (steps[::2], envs[::2]),
        (steps[::-1], envs[::-1]),
        (frozen, np.broadcast_to(np.int64(1), 5)),
        np.unravel_index(np.array([17, 3, 8]), (6, 3)),
    ]
    for pair in pairs:
        np.testing.assert_array_equal(array.read_with([other], tuple(pair))[0], dense[tuple(pair)])
        table = np.ravel_multi_index(tuple(pair), (6, 3))
        strided = np.stack([table, table], axis=1).T
        np.testing.assert_array_equal(array.store.read(strided)[1].reshape(-1, 4, 6, 6), dense[tuple(pair)])


@pytest.mark.parametrize(
    "index",
    [6, -7, (0, 3), (0, -4), (0, 0, 5), (np.array([6]), np.array([0])), (np.array([0]), np.array([3])), [0, 6], [-7],
     (0, 0, 0, 0), (..., 0, ...), 1.5, "a", np.zeros(5, bool), np.zeros((6, 2), bool), [0.5],
     (np.array([0, 1]), np.array([0, 1, 2])), (np.array([0, 1]), 0, np.array([0, 1, 2])), (slice(None), [5]),
     (0, 0, np.array([9])), (..., np.zeros(4, bool))],
    ids=repr,
)  # fmt: skip
def test_an_index_that_numpy_refuses_is_refused(index: Any) -> None:
    array, dense = filled((6, 3), (5,), "auto", True)
    for twin, error in ((dense, IndexError), (array, IndexOutOfRangeError)):
        with pytest.raises(error):
            twin[index]
        with pytest.raises(error):
            twin[index] = 0
    np.testing.assert_array_equal(np.asarray(array), dense)


def swap_and_flatten(array: Any) -> Any:
    """Stable-Baselines3's, word for word but for the name of its argument."""
    shape = array.shape
    if len(shape) < 3:
        shape = (*shape, 1)
    return array.swapaxes(0, 1).reshape(shape[0] * shape[1], *shape[2:])


@pytest.mark.parametrize("decided", [False, True], ids=["collected", "chosen"])
@pytest.mark.parametrize("method", method_params("auto", "delta", "none"))
def test_other_leading_axes(method: str, decided: bool) -> None:
    array, dense = filled((6, 4), (4, 6, 6), method, decided)
    views = [
        (swap_and_flatten(array), swap_and_flatten(dense)),
        (array.swapaxes(0, 1), dense.swapaxes(0, 1)),
        (array.reshape(24, 4, 6, 6), dense.reshape(24, 4, 6, 6)),
        (array.reshape((2, 3, 4, 4, 6, 6)), dense.reshape(2, 3, 4, 4, 6, 6)),
        (array.reshape(-1, 4, 6, 6), dense.reshape(-1, 4, 6, 6)),
        (array.reshape(3, -1, 4, 6, 6).swapaxes(1, 0), dense.reshape(3, -1, 4, 6, 6).swapaxes(1, 0)),
    ]
    for view, wanted in views:
        assert view.shape == wanted.shape
        assert len(view) == len(wanted)
        np.testing.assert_array_equal(np.asarray(view), wanted)
        picks = np.array([0, len(wanted) - 1, 1])
        np.testing.assert_array_equal(view[picks], wanted[picks])
        np.testing.assert_array_equal(view[1:, ..., 2], wanted[1:, ..., 2])
    flat, wanted = views[0]
    flat[5] = 77  # the same cells under another name
    assert (np.asarray(array)[5 % 6, 5 // 6] == 77).all()


def test_swap_and_flatten_of_scalars_and_vectors() -> None:
    for per_obs in ((5,), (1,)):
        array, dense = filled((6, 4), per_obs, "auto", True)
        np.testing.assert_array_equal(np.asarray(swap_and_flatten(array)), swap_and_flatten(dense))


def test_axes_of_an_observation_stay() -> None:
    array, _ = filled((6, 4), (4, 6, 6), "delta", True)
    with pytest.raises(ValueError, match="must end in"):
        array.reshape(6, 4, 4, 36)
    with pytest.raises(ValueError):
        array.reshape(7, -1, 4, 6, 6)
    with pytest.raises(IndexError, match="leading axes"):
        array.swapaxes(1, 2)
    with pytest.raises(ArgumentError, match="cannot have a sibling"):
        array.reshape(24, 4, 6, 6).next_view()
