"""`DeviceTimelineStore`: every observation as written, each frame stored once.

`test_delta_triton` also runs these under Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.errors import IndexOutOfRangeError, SpecMismatchError
from sb3_extra_buffers.stores.device_base import DevicePlace, DeviceRing, IndexBatch
from sb3_extra_buffers.stores.device_timeline import DeviceTimelineStore
from sb3_extra_buffers.stores.layout import StackLayout
from tests.gpu import never_waits, noting
from tests.stores.test_device_columns import check_columns, random_columns
from tests.torture.interrupts import Injector

pytestmark = pytest.mark.same_without_extras

Array = npt.NDArray[Any]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
interpreted = pytest.mark.skipif(not INTERPRETED, reason="on a CPU, kernels run only under Triton's interpreter")
# device, Triton, pinned
PLACES = [
    pytest.param(("cpu", False, False), id="reference"),
    pytest.param(("cpu", True, False), id="interpreter", marks=interpreted),
    pytest.param(("cuda", True, False), id="cuda", marks=GPU),
    pytest.param(("cuda", False, False), id="cuda without Triton", marks=GPU),
    pytest.param(("cuda", True, True), id="pinned", marks=GPU),
    pytest.param(("cuda", False, True), id="pinned without Triton", marks=GPU),
]
KERNEL_PLACES = PLACES[1:3]
FLOAT, BYTE = np.dtype(np.float32), np.dtype(np.uint8)
LAYOUTS = {
    "vector": StackLayout(ObsSpec((17,), FLOAT)),
    "number": StackLayout(ObsSpec((), np.dtype(np.int64))),
    "odd": StackLayout(ObsSpec((7,), BYTE)),
    "doubles": StackLayout(ObsSpec((5,), np.dtype(np.float64))),
    "flags": StackLayout(ObsSpec((4, 6), np.dtype(np.bool_)), 4, "first"),
    "camera": StackLayout(ObsSpec((3, 40, 37), BYTE)),
    "stack": StackLayout(ObsSpec((4, 12, 12), BYTE), 4, "first"),
    "odd stack": StackLayout(ObsSpec((3, 5, 7), BYTE), 3, "first"),
    "channels last": StackLayout(ObsSpec((9, 9, 4), BYTE), 4, "last"),
    "RGB last": StackLayout(ObsSpec((6, 5, 6), BYTE), 2, "last"),
    "float stack": StackLayout(ObsSpec((2, 5, 5), FLOAT), 2, "first"),
    "large stack": StackLayout(ObsSpec((2, 90, 61), BYTE), 2, "first"),
}


def make(layout: StackLayout, n_steps: int, n_streams: int, n_sets: int, place: tuple[str, bool, bool]) -> Any:
    device, triton, pinned = place
    ring = DeviceRing(layout.spec, n_steps, n_streams, n_sets, DevicePlace(torch.device(device), pinned))
    return DeviceTimelineStore(ring, layout, triton=triton)


class Episodes:
    """Observations of some streams; episodes end at random, and frames sometimes stand still."""

    def __init__(self, layout: StackLayout, n_streams: int, seed: int = 0, p_end: float = 0.15) -> None:
        self.layout, self.p_end = layout, p_end
        self.random = np.random.default_rng(seed)
        self.stacks = [self._first() for _ in range(n_streams)]

    def _frame(self) -> Array:
        limit = 2 if self.layout.spec.dtype == np.bool_ else 256
        return self.random.integers(0, limit, self.layout.frame_bytes).astype(np.uint8)

    def _first(self) -> list[Array]:
        frame, stack = self._frame(), self.layout.stack
        pad = frame if self.random.random() < 0.5 else np.zeros_like(frame)
        return [pad] * (stack - 1) + [frame]

    def _rows(self) -> Array:
        layout = self.layout
        rows = []
        for stack in self.stacks:
            frames = np.stack(stack)
            if layout.axis == "last" and layout.stack > 1:
                unit = layout.spec.shape[-1] // layout.stack * layout.spec.dtype.itemsize
                frames = frames.reshape(layout.stack, -1, unit).swapaxes(0, 1)
            rows.append(np.ascontiguousarray(frames).reshape(-1))
        return layout.spec.from_rows(np.stack(rows))

    def step(self, n_sets: int = 2) -> list[Array]:
        """``obs`` and ``next_obs`` of all streams."""
        obs = self._rows()
        for i, stack in enumerate(self.stacks):
            self.stacks[i] = [*stack[1:], stack[-1] if self.random.random() < 0.2 else self._frame()]
        following = self._rows()
        for i in range(len(self.stacks)):
            if self.random.random() < self.p_end:
                self.stacks[i] = self._first()
        return [obs, following][:n_sets]


def as_bytes(observations: Array) -> Array:
    return np.ascontiguousarray(observations).reshape(-1).view(np.uint8)


def contents(store: Any) -> Array:
    ring = store.ring
    indices = np.arange(ring.n_sets * ring.n_obs).reshape(ring.n_sets, -1)
    found: Array = store.read(IndexBatch(indices)).cpu().numpy()
    assert found.shape == (*indices.shape, *ring.spec.shape)
    assert found.dtype == ring.spec.dtype
    return found


class Model:
    """A store and the plain arrays that it must equal."""

    def __init__(self, store: Any) -> None:
        self.store, ring = store, store.ring
        self.arrays = np.zeros((ring.n_sets, ring.n_steps, ring.n_streams, *ring.spec.shape), ring.spec.dtype)
        self.n_writes = 0

    def write(self, step: int, batches: list[Array]) -> None:
        """Write a step; arrays and tensors take turns."""
        self.n_writes += 1
        self.arrays[:, step] = batches
        given: list[Any] = [np.array(batch) for batch in batches]
        if self.n_writes % 5 > 2:
            given = [torch.from_numpy(batch).to(self.store.device) for batch in given]
        self.store.write(step, given)
        for batch in given:
            batch[...] = 7  # the caller may use the memory again

    def check(self) -> None:
        self.store.check()
        np.testing.assert_array_equal(as_bytes(contents(self.store)), as_bytes(self.arrays))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("n_sets", [1, 2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_step_is_kept_until_it_is_overwritten(name: str, n_sets: int, place: tuple[str, bool, bool]) -> None:
    layout = LAYOUTS[name]
    model = Model(make(layout, 9, 3, n_sets, place))
    episodes = Episodes(layout, 3)
    model.check()
    # the interpreter is slow
    for i in range(20 if INTERPRETED else 27):
        model.write(i % 9, episodes.step(n_sets))
        if i % (11 if INTERPRETED else 4) == 0:
            model.check()
    model.check()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("n_steps", [1, 2, 3])
@pytest.mark.parametrize("name", ["vector", "stack"])
def test_short_rings(name: str, n_steps: int, place: tuple[str, bool, bool]) -> None:
    model = Model(make(LAYOUTS[name], n_steps, 2, 2, place))
    episodes = Episodes(LAYOUTS[name], 2)
    for i in range(8):
        model.write(i % n_steps, episodes.step())
        model.check()


@pytest.mark.parametrize("name", ["vector", "stack"])
def test_steps_are_written_in_order_from_any_step(name: str) -> None:
    model = Model(make(LAYOUTS[name], 6, 2, 2, ("cpu", False, False)))
    episodes = Episodes(LAYOUTS[name], 2)
    for i in range(4, 17):
        model.write(i % 6, episodes.step())
        model.check()
    for wrong in (4, 0, 6, -1):
        with pytest.raises(IndexOutOfRangeError, match=f"expected step 5, got {wrong}"):
            model.store.plan(wrong, episodes.step())
    model.check()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["vector", "camera", "stack", "channels last"])
def test_a_plan_that_is_dropped_leaves_no_trace(name: str, place: tuple[str, bool, bool]) -> None:
    model = Model(make(LAYOUTS[name], 7, 2, 2, place))
    episodes = Episodes(LAYOUTS[name], 2)
    for i in range(20):
        for _ in range(i % 4):
            model.store.plan(i % 7, Episodes(LAYOUTS[name], 2, seed=i).step())
        model.write(i % 7, episodes.step())
        if not INTERPRETED or i % 5 == 4:
            model.check()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["camera", "stack"])
def test_a_refused_step_costs_no_memory(name: str, place: tuple[str, bool, bool]) -> None:
    layout = LAYOUTS[name]
    n_steps = 12 if INTERPRETED else 40
    model, undisturbed = (Model(make(layout, n_steps, 2, 2, place)) for _ in range(2))
    episodes = Episodes(layout, 2, p_end=0.0)
    for i in range(n_steps):
        batches = episodes.step()
        for wrong, message in (
            (batches[:1], "expected 2 batches, one per set, got 1"),
            ([batches[0], batches[1][:1]], "each of 2 streams, got 1"),
            ([batches[0], batches[1][:, 1:]], "expected a batch of"),
        ):
            with pytest.raises(SpecMismatchError, match=message):
                model.store.plan(i, wrong)
        model.write(i, batches)
        undisturbed.write(i, batches)
        if torch.cuda.is_available():
            # memory is also reserved for writes in flight: there are none
            torch.cuda.synchronize()
    model.check()
    # obs is still known to equal the next_obs of the step before, and is not stored twice
    assert model.store.memory_usage().payload == undisturbed.store.memory_usage().payload


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["vector", "stack"])
def test_a_write_may_be_repeated(name: str, place: tuple[str, bool, bool]) -> None:
    model = Model(make(LAYOUTS[name], 5, 2, 2, place))
    episodes = Episodes(LAYOUTS[name], 2)
    for i in range(13):
        batches = episodes.step()
        plan = model.store.plan(i % 5, batches)
        plan.commit()
        plan.finish()  # as after an exception that came too late
        model.arrays[:, i % 5] = batches
        model.check()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["vector", "stack"])
def test_a_pickled_store_continues_where_it_was(name: str, place: tuple[str, bool, bool]) -> None:
    model = Model(make(LAYOUTS[name], 7, 2, 2, place))
    episodes = Episodes(LAYOUTS[name], 2)
    for i in range(17):
        model.write(i % 7, episodes.step())
    again = Model(pickle.loads(pickle.dumps(model.store)))
    again.arrays[...] = model.arrays
    again.check()
    for i in range(17, 30):
        batches = episodes.step()
        again.write(i % 7, batches)
        again.check()
    np.testing.assert_array_equal(as_bytes(contents(model.store)), as_bytes(model.arrays))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["vector", "camera", "stack"])
def test_a_cleared_store_is_empty_and_can_be_filled_again(name: str, place: tuple[str, bool, bool]) -> None:
    model = Model(make(LAYOUTS[name], 7, 2, 2, place))
    for seed in range(3):
        episodes = Episodes(LAYOUTS[name], 2, seed)
        for i in range(11):
            model.write(i % 7, episodes.step())
        model.store.clear()
        model.arrays[...] = 0
        model.check()


@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("name", ["vector", "stack"])
def test_an_interrupted_step_is_stored_as_a_whole_or_not_at_all(name: str, as_tensors: bool) -> None:
    layout = LAYOUTS[name]
    store = make(layout, 5, 2, 2, ("cpu", False, False))
    episodes = Episodes(layout, 2, p_end=0.4)
    for i in range(8):
        store.write(i % 5, episodes.step())
    saved, before = pickle.dumps(store), contents(store)
    given: list[list[Any]] = [episodes.step() for _ in range(2)]
    if as_tensors:
        given = [[torch.from_numpy(batch) for batch in sets] for sets in given]
    with Injector() as counter:
        store.write(3, given[0])
    after = contents(store)
    store.write(4, given[1])
    later, seen = contents(store), set()
    for point in range(1, counter.count, max(counter.count // 150, 1)):
        again = pickle.loads(saved)
        injector = Injector(point, KeyboardInterrupt())
        with contextlib.suppress(KeyboardInterrupt), injector:
            again.write(3, given[0])
        if not injector.where:
            break
        found = contents(again)
        is_whole = np.array_equal(as_bytes(found), as_bytes(after))
        assert is_whole or np.array_equal(as_bytes(found), as_bytes(before)), injector.where
        seen.add(is_whole)
        again.check()
        if not is_whole:
            again.write(3, given[0])
        again.write(4, given[1])
        again.check()
        np.testing.assert_array_equal(as_bytes(contents(again)), as_bytes(later), injector.where)
    assert seen == {False, True}


def odd_steps(layout: StackLayout, n_streams: int, kind: str, seed: int = 0) -> Iterator[list[Array]]:
    """Transitions that are not those of episodes."""
    random = np.random.default_rng(seed)

    def observations() -> Array:
        rows = random.integers(0, 256, (n_streams, layout.spec.nbytes)).astype(np.uint8)
        return layout.spec.from_rows(rows)

    episodes = Episodes(layout, n_streams, seed, p_end=0.0)
    queue = [observations()] if kind != "three steps apart" else [episodes.step(1)[0] for _ in range(4)]
    while True:
        if kind == "noise":
            yield [observations(), observations()]
        elif kind == "standing still":
            if random.random() < 0.1:
                queue = [observations()]
            yield [queue[0], queue[0]]
        elif kind == "three steps apart":
            yield [queue[0], queue[3]]
            queue = [*queue[1:], episodes.step(1)[0]]
        elif kind == "zeros":
            yield [np.zeros_like(queue[0]), np.zeros_like(queue[0])]
        else:
            # every episode has one step
            first, following = Episodes(layout, n_streams, int(random.integers(1000)), p_end=0.0).step()
            yield [first, following]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["noise", "standing still", "three steps apart", "zeros", "one step"])
@pytest.mark.parametrize(("name", "n_sets"), [("vector", 2), ("stack", 1), ("stack", 2), ("RGB last", 2)])
def test_observations_that_are_no_episodes(name: str, n_sets: int, kind: str, place: tuple[str, bool, bool]) -> None:
    model = Model(make(LAYOUTS[name], 5, 2, n_sets, place))
    # the interpreter is slow
    n_steps = 60 if not place[1] or place[0] == "cuda" else 11
    for i, sets in enumerate(itertools.islice(odd_steps(LAYOUTS[name], 2, kind), n_steps)):
        model.write(i % 5, sets[-n_sets:])
        if i % 3 == 0:
            model.check()
    model.check()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["stack", "doubles"])
def test_tensors_may_be_at_any_address(name: str, place: tuple[str, bool, bool]) -> None:
    model = Model(make(LAYOUTS[name], 5, 2, 2, place))
    store, spec = model.store, LAYOUTS[name].spec
    if spec.dtype != np.uint8:
        pytest.skip("torch itself aligns tensors of wider dtypes")
    episodes = Episodes(LAYOUTS[name], 2)
    for i in range(7):
        sets = episodes.step()
        memory = torch.zeros((2, 2 * spec.nbytes + 3), dtype=torch.uint8, device=store.device)
        tensors = [part[3:].view(2, *spec.shape) for part in memory]
        for tensor, batch in zip(tensors, sets, strict=True):
            tensor.copy_(torch.from_numpy(batch))
        store.write(i % 5, tensors)
        model.arrays[:, i % 5] = sets
    model.check()
    out = torch.zeros(4 * spec.nbytes + 1, dtype=torch.uint8, device=store.device)[1:].view(2, 2, *spec.shape)
    indices = np.array([[0, 9], [10, 17]])
    store.read(IndexBatch(indices), out)
    np.testing.assert_array_equal(out.cpu(), model.arrays.reshape(20, *spec.shape)[indices])


@pytest.mark.parametrize("name", ["vector", "stack"])
def test_tensors_of_another_shape_or_dtype_are_refused(name: str) -> None:
    store = make(LAYOUTS[name], 5, 2, 2, ("cpu", False, False))
    good = [torch.from_numpy(batch) for batch in Episodes(LAYOUTS[name], 2).step()]
    for wrong in (good[1][:1], good[1].double(), good[1][None]):
        with pytest.raises(SpecMismatchError, match="expected a tensor of"):
            store.plan(0, [good[0], wrong])


@pytest.mark.parametrize("place", [place for place in PLACES if place.id != "interpreter"])
@pytest.mark.parametrize("as_tensors", [False, True])
def test_long_episodes_take_little_more_than_one_row_per_step(as_tensors: bool, place: tuple[str, bool, bool]) -> None:
    n_steps, n_streams = 1000, 2
    for name in ("camera", "large stack"):
        layout = LAYOUTS[name]
        store = make(layout, n_steps, n_streams, 2, place)
        episodes = Episodes(layout, n_streams, p_end=0.0)
        for i in range(n_steps + 50):
            sets: list[Any] = episodes.step()
            if as_tensors:
                sets = [torch.from_numpy(batch).to(store.device) for batch in sets]
            store.write(i % n_steps, sets)
        # without Triton, a tensor grows by half
        slack = 1.04 if place[1] else 1.55
        assert store.memory_usage().payload < slack * n_steps * n_streams * layout.frame_bytes


@pytest.mark.parametrize("place", PLACES[2:3] + PLACES[4:5])
@pytest.mark.parametrize("name", ["vector", "stack", "channels last"])
def test_writing_and_reading_tensors_never_waits_for_the_gpu(name: str, place: tuple[str, bool, bool]) -> None:
    layout = LAYOUTS[name]
    model = Model(make(layout, 40, 3, 2, place))
    episodes = Episodes(layout, 3)
    steps = [[torch.from_numpy(batch).cuda() for batch in episodes.step()] for _ in range(60)]
    indices = torch.randint(0, 120, (2, 64), device="cuda")
    out = torch.empty((2, 64, *layout.spec.shape), dtype=steps[0][0].dtype, device="cuda")
    for i in range(3):
        model.store.write(i, steps[i])  # compile
    model.store.read(IndexBatch(None, indices), out)
    torch.cuda.synchronize()
    names: list[str] = []
    with noting(names), never_waits():
        for i in range(3, 60):
            model.store.write(i % 40, steps[i])
        model.store.read(IndexBatch(None, indices), out)
    assert any("write" in name for name in names)
    assert not any("DtoH" in name or "HtoD" in name for name in names), names
    for i in range(60):
        model.arrays[:, i % 40] = [batch.cpu().numpy() for batch in steps[i]]
    model.check()


@pytest.mark.parametrize("place", PLACES[2:3] + PLACES[4:5])
@pytest.mark.parametrize("name", ["vector", "stack"])
def test_reading_can_be_captured_in_a_graph(name: str, place: tuple[str, bool, bool]) -> None:
    layout = LAYOUTS[name]
    model = Model(make(layout, 50, 3, 2, place))
    episodes = Episodes(layout, 3)
    for i in range(4):
        model.write(i, episodes.step())
    indices = torch.zeros((2, 32), dtype=torch.int64, device="cuda")
    out = model.store.read(IndexBatch(None, indices)).clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.store.read(IndexBatch(None, indices), out)
    for i in range(4, 130):
        model.write(i % 50, episodes.step())
        if i % 13 == 0:
            wanted = torch.randint(0, 150, (32,))
            indices.copy_(torch.stack([wanted, wanted + 150]))
            graph.replay()
            expected = model.arrays.reshape(300, *layout.spec.shape)[indices.cpu().numpy()]
            np.testing.assert_array_equal(as_bytes(out.cpu().numpy()), as_bytes(expected))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["camera", "large stack"])
def test_a_nearly_empty_store_takes_little_memory(name: str, place: tuple[str, bool, bool]) -> None:
    layout = LAYOUTS[name]
    store = make(layout, 10_000, 2, 2, place)
    episodes = Episodes(layout, 2)
    for i in range(20):
        store.write(i, episodes.step())

    assert store.memory_usage().payload < 0.05 * 20_000 * layout.frame_bytes


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["vector", "stack"])
def test_a_part_of_the_sets_can_be_read(name: str, place: tuple[str, bool, bool]) -> None:
    model = Model(make(LAYOUTS[name], 7, 2, 2, place))
    episodes = Episodes(LAYOUTS[name], 2)
    for i in range(12):
        model.write(i % 7, episodes.step())
    flat = model.arrays.reshape(28, *LAYOUTS[name].spec.shape)
    for indices in (np.array([[14, 20, 27, 15]]), np.array([[3, 20], [21, 0]]), np.zeros((2, 0), np.int64)):
        found = model.store.read(IndexBatch(indices)).cpu().numpy()
        np.testing.assert_array_equal(as_bytes(found), as_bytes(flat[indices]))


@pytest.mark.parametrize("place", KERNEL_PLACES)
@pytest.mark.parametrize(
    ("name", "n_actions", "dtype"),
    # the columns do not depend on the observations, so each kind of both once
    [
        ("vector", 1, np.int64),
        ("vector", 3, np.float32),
        ("odd", 5, np.int8),
        ("number", 3, np.float32),
        ("camera", 1, np.int64),
        ("stack", 1, np.int64),
        ("stack", 5, np.int8),
        ("channels last", 3, np.float32),
    ],
)
def test_columns_are_gathered_with_a_batch(
    name: str, n_actions: int, dtype: type, place: tuple[str, bool, bool]
) -> None:
    store = make(LAYOUTS[name], 7, 2, 2, place)
    episodes = Episodes(LAYOUTS[name], 2)
    for i in range(9):
        store.write(i % 7, episodes.step())
    count = 37
    table, columns = random_columns(7, 2, n_actions, dtype, str(store.device))
    floats, actions = table.empty(count)
    random = np.random.default_rng(0)
    indices = random.integers(0, 14, (2, count)) + np.array([[0], [14]])

    assert store.can_read_batch
    rows = store.read_batch(torch.from_numpy(indices).to(store.device), floats, actions, table.records)

    expected = store.read(IndexBatch(indices))
    assert rows.dtype == expected.dtype
    np.testing.assert_array_equal(as_bytes(rows.cpu().numpy()), as_bytes(expected.cpu().numpy()))
    check_columns(floats, actions, columns, indices[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["vector", "camera", "stack"])
def test_a_store_pickled_with_pieces_is_read_without_triton(name: str) -> None:
    pytest.importorskip("triton")
    if not INTERPRETED:
        pytest.skip("on a CPU, kernels run only under Triton's interpreter")
    model = Model(make(LAYOUTS[name], 200, 2, 2, ("cpu", True, False)))
    episodes = Episodes(LAYOUTS[name], 2)
    for i in range(30):
        model.write(i, episodes.step())
    again = Model(pickle.loads(pickle.dumps(model.store)))
    again.arrays[...] = model.arrays
    assert not again.store.can_read_batch
    again.check()
    for i in range(30, 40):
        again.write(i, episodes.step())
    again.check()
