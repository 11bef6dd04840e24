"""The comparison with other replay buffers times only those that return what was added, and shows all of them."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("psutil")

peers: Any = importlib.import_module("benchmarks.peers")
base: Any = importlib.import_module("benchmarks.peer_systems.base")
tables: Any = importlib.import_module("benchmarks.peer_tables")
npz: Any = importlib.import_module("benchmarks.peer_systems.npz")

# the systems that need no other environment, and what each can sample
HERE = {
    "sb3": [base.UNIFORM],
    "sb3-optimized": [base.UNIFORM],
    "ours": [base.UNIFORM, base.WINDOWS, base.PRIORITIES],
    "torchrl-tensor": [base.UNIFORM, base.WINDOWS],
    "torchrl-ours": [base.UNIFORM, base.WINDOWS],
    "npz": [base.UNIFORM],
    "npz-kept": [base.UNIFORM, base.WINDOWS],
}


def request_of(system: str, what: str, stream: str = "17 floats", limit: int | None = 300) -> dict[str, Any]:
    return {"system": system, "stream": stream, "what": what, "quick": True, "limit": limit}


@pytest.mark.filterwarnings("ignore")  # warnings of other libraries
@pytest.mark.parametrize(("system", "what"), [(name, what) for name, kinds in HERE.items() for what in kinds])
def test_buffers_return_what_was_added_and_are_timed_next_to_sb3(system: str, what: str) -> None:
    if system.startswith("torchrl"):
        pytest.importorskip("torchrl")

    found = peers.child(request_of(system, what))

    figure = {base.UNIFORM: "sample256"}.get(what, what)
    assert found[f"{figure}_us_p50"] > 0 < found[f"sb3_{figure}_us_p20"]
    assert found["n_transitions"] == 1200
    if what == base.UNIFORM and "npz" not in system:
        assert found["file_bytes"] > 1200 * 17 * 4 < found["sb3_file_bytes"]
        assert found["load_us_p50"] > 0


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> str:
    """A short recording of images."""
    monkeypatch.setenv("SB3_EXTRA_BUFFERS_CACHE", str(tmp_path))
    importlib.import_module("benchmarks.feed").record("noise", 24)
    monkeypatch.setitem(base.STREAMS, "noise", base.Stream("noise", 24, 20, 1, "noise"))
    return "noise"


@pytest.mark.parametrize("system", ["sb3-optimized", "ours"])
def test_images_are_replayed_from_their_recording(noise: str, system: str) -> None:
    found = peers.child(request_of(system, base.UNIFORM, noise, None))

    assert (found["shape"], found["dtype"], found["n_transitions"]) == ("4x84x84", "uint8", 80)


def test_memory_grows_by_about_what_is_stored() -> None:
    found = peers.child(request_of("sb3", "memory", limit=20_000))

    assert 80_000 * 2 * 17 * 4 < found["resident_bytes"] < 2 * 80_000 * (2 * 17 + 6 + 4) * 4
    assert found["disk_bytes"] == 0


class Corrupt(npz.NpzKept):  # type: ignore[misc]  # loaded at run time
    """Returns one wrong number in every batch."""

    def sample(self, batch: int) -> Any:
        obs, *rest = super().sample(batch)
        obs[batch // 2, 3] += 1
        return obs, *rest


class Scattered(npz.NpzKept):  # type: ignore[misc]
    """Returns windows whose last step is that of another window."""

    def windows(self) -> Any:
        obs, _, *rest = super().windows()
        return tuple(None if c is None else np.concatenate([c[:, :-1], c[::-1, -1:]], 1) for c in (obs, None, *rest))


@pytest.mark.parametrize(
    ("system", "what", "message"),
    [
        (Corrupt, base.UNIFORM, "is not as it was added; it is not timed"),
        (Scattered, base.WINDOWS, "windows are not of consecutive steps; it is not timed"),
    ],
)
def test_a_wrong_batch_is_not_timed(monkeypatch: pytest.MonkeyPatch, system: Any, what: str, message: str) -> None:
    monkeypatch.setitem(peers.SYSTEMS, "npz-kept", system)

    with pytest.raises(SystemExit, match=message):
        peers.child(request_of("npz-kept", what))


def test_overwritten_transitions_are_not_accepted() -> None:
    system = peers.SYSTEMS["sb3"](base.Case("17 floats", 8))
    ledger, steps = base.Ledger(), system.case.steps()
    first = next(steps)
    for step in (first, *(next(steps) for _ in range(8))):
        ledger.add(step)
        system.add(system.prepare(step))
    ledger.check(system, system.sample(32), "sb3")
    system.columns = lambda batch: base.Columns(*first)

    with pytest.raises(SystemExit, match="transitions that it should not hold"):
        ledger.check(system, system.sample(4), "sb3")


def test_the_page_shows_every_system_with_figures_or_a_reason() -> None:
    streams = tables.by_stream(tables.rows())

    assert streams.keys() == base.STREAMS.keys()
    for stream, systems in streams.items():
        assert systems.keys() == peers.SYSTEMS.keys(), stream
        text = tables.stream_tables(systems)
        assert text.count("\n| ") == 2 * len(systems) + 1
        assert "not measured" not in text, stream


def test_a_system_that_cannot_do_something_is_shown_with_the_reason() -> None:
    row = dict.fromkeys(peers.COLUMNS, "") | {"system": "sb3", "n_transitions": "100", "disk_bytes": "0"}
    row |= {"resident_bytes": "1000", "add_us_p50": "5.0", "add_us_p20": "4.0", "sb3_add_us_p20": "8.0"}
    other = row | {"system": "rlox", "reasons": '{"files": "no function for saving", "uniform": "does not build"}'}

    text = tables.stream_tables({"sb3": row, "rlox": other})

    assert "| rlox | 1.00 kB | 100 % | 5.00 µs (0.50x) | -<sup>2</sup> | -<sup>2</sup> |" in text
    assert "\n2. Does not build.\n3. No function for saving.\n" in text


def test_the_plot_has_a_panel_for_every_stream(tmp_path: Any) -> None:
    tables.plot(tables.by_stream(tables.rows()), tmp_path / "plot.png")

    assert (tmp_path / "plot.png").stat().st_size > 1000
