"""Tables and a plot of `benchmarks.peers` for ``docs/peers.md``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.peer_systems import SYSTEMS
from benchmarks.peer_systems.base import LENGTH, N_WINDOWS, PRIORITIES, STREAMS, UNIFORM, WINDOWS
from benchmarks.results import factor, percent, quantity, read_rows

Row = dict[str, str]

OURS, REFERENCE, FILES = "ours", "sb3", "files"
PLOT = "peers.png"
# figures of the two tables of a stream, and the measurement that has them
SAMPLING = {"add": "`add`", "sample32": "`sample(32)`", "sample256": "`sample(256)`"}
OTHERS = {WINDOWS: f"{N_WINDOWS} windows of {LENGTH}", PRIORITIES: "prioritised 256", "save": "save", "load": "load"}
_PART = {WINDOWS: WINDOWS, PRIORITIES: PRIORITIES, "save": FILES, "load": FILES}
# one of each per system, readable on white and on dark pages
_COLORS = ("#f58518", "#f58518", "#b279a2", "#b279a2", "#e45756", "#4c78a8", "#4c78a8", "#4c78a8", "#e45756", "#54a24b",
           "#54a24b", "#9d755d", "#72b7b2", "#72b7b2", "#eeca3b", "#8a8f98", "#8a8f98")  # fmt: skip
_MARKERS = "*PosDosv^osXosDos"


def rows() -> list[Row]:
    """The committed measurements."""
    from benchmarks.peers import CSV

    return read_rows(CSV)


def by_stream(measured: list[Row]) -> dict[str, dict[str, Row]]:
    """Rows by stream and system, in the order of the catalogues."""
    found: dict[str, dict[str, Row]] = {}
    for stream in STREAMS:
        some = {row["system"]: row for row in measured if row["stream"] == stream}
        if some:
            found[stream] = {name: some[name] for name in SYSTEMS if name in some}
    return found


def reasons(row: Row) -> dict[str, str]:
    """Why figures are missing, by measurement."""
    found: dict[str, str] = json.loads(row["reasons"] or "{}")
    return found


def ratio(row: Row, figure: str) -> float | None:
    """A time relative to SB3's in the same process; None if it was not measured.

    The 20th percentiles are compared, which depend less on what else the machine does than medians.
    """
    ours, theirs = row[f"{figure}_us_p20"], row[f"sb3_{figure}_us_p20"]
    return float(ours) / float(theirs) if ours else None


def held(row: Row) -> float | None:
    """Bytes in memory and in files that the buffer works on, for each transition."""
    if not row["resident_bytes"]:
        return None
    return (float(row["resident_bytes"]) + float(row["disk_bytes"])) / float(row["n_transitions"])


def share(row: Row, systems: dict[str, Row]) -> float | None:
    """What is held relative to SB3's default buffer, or None."""
    ours, theirs = held(row), held(systems[REFERENCE])
    return ours / theirs if ours is not None and theirs is not None else None


class Notes:
    """Reasons that are numbered below a table."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, text: str) -> str:
        if text not in self.texts:
            self.texts.append(text)
        return f"<sup>{self.texts.index(text) + 1}</sup>"

    def lines(self) -> str:
        return "".join(
            f"{number}. {text[0].upper()}{text[1:].rstrip('.')}.\n" for number, text in enumerate(self.texts, 1)
        )


def time_cell(row: Row, figure: str, notes: Notes) -> str:
    """The median, and in parentheses its ratio to SB3's."""
    relative = ratio(row, figure)
    if relative is None:
        why = reasons(row)
        return f"-{notes.mark(why.get(_PART.get(figure, UNIFORM)) or why.get(UNIFORM, 'not measured'))}"
    text = quantity(float(row[f"{figure}_us_p50"]), "us")
    return text if row["system"] == REFERENCE else f"{text} ({factor(relative)})"


def memory_cells(row: Row, systems: dict[str, Row], notes: Notes) -> list[str]:
    relative = share(row, systems)
    if relative is None:
        return [f"-{notes.mark(reasons(row).get('memory', 'not measured'))}", ""]
    text = quantity(float(row["resident_bytes"]), "B")
    if float(row["disk_bytes"]):
        text += f", files of {quantity(float(row['disk_bytes']), 'B')}"
    if row["n_transitions"] != systems[REFERENCE]["n_transitions"]:
        text += notes.mark(f"{int(row['n_transitions']):,} transitions; the percentage is for as many of SB3's")
    return [text, percent(relative)]


def stream_tables(systems: dict[str, Row]) -> str:
    """Both tables of one stream."""
    from benchmarks.render import table

    notes = Notes()
    first = [
        [title(row), *memory_cells(row, systems, notes), *(time_cell(row, figure, notes) for figure in SAMPLING)]
        for row in systems.values()
    ]
    second = []
    for row in systems.values():
        size = quantity(float(row["file_bytes"]), "B") if row["file_bytes"] else ""
        second.append([title(row), *(time_cell(row, figure, notes) for figure in OTHERS), size])
    text = table(["buffer", "memory", "% of SB3's", *SAMPLING.values()], first)
    text += f"\n{table(['buffer', *OTHERS.values(), 'file'], second)}"
    return f"{text}\n{notes.lines()}" if notes.texts else text


def title(row: Row) -> str:
    return SYSTEMS[row["system"]].title


def best_table(streams: dict[str, dict[str, Row]]) -> str:
    """The best buffer by each figure, and this library's where that is another."""
    from benchmarks.render import table

    figures = {"": "memory and files", **SAMPLING, **OTHERS}
    lines = []
    for figure, name in figures.items():
        cells = []
        for systems in streams.values():
            values = {key: share(row, systems) if not figure else ratio(row, figure) for key, row in systems.items()}
            # SB3's ratio to itself differs from 1 by chance
            known = {key: value for key, value in values.items() if value is not None}
            if REFERENCE in known:
                known[REFERENCE] = 1.0
            cells.append(_best(known, percent if not figure else factor))
        lines.append([name, *cells])
    return table(["", *(STREAMS[stream].title for stream in streams)], lines)


def _best(values: dict[str, float], show: Any) -> str:
    best = min(values, key=values.__getitem__)
    text = f"{SYSTEMS[best].title} {show(values[best])}"
    return text if best == OURS or OURS not in values else f"{text}; ours {show(values[OURS])}"


def plot(streams: dict[str, dict[str, Row]], path: Path) -> None:
    """Memory against the time of ``sample(256)``, a panel for each stream."""
    from matplotlib import pyplot as plt

    from benchmarks.render import INK, style

    figure, panels = plt.subplots(2, 2, figsize=(10, 8), layout="constrained")
    handles: dict[str, Any] = {}
    for axes, (stream, systems) in zip(panels.flat, streams.items(), strict=False):
        points = {}
        for key, row in systems.items():
            x, y = ratio(row, "sample256"), share(row, systems)
            if x is not None and y is not None:
                points[key] = (1.0 if key == REFERENCE else x, 100 * y)
        for key, color, marker in zip(SYSTEMS, _COLORS, _MARKERS, strict=True):
            if key in points:
                size = 110 if key in (OURS, REFERENCE) else 45
                name = SYSTEMS[key].title.replace("*", "").replace("`", "")
                handles[name] = axes.scatter(*points[key], s=size, color=color, marker=marker, zorder=3)
        xs, ys = zip(*points.values(), strict=True)
        style(axes, (0.6 * min(xs), 2 * max(xs)), (0.5 * min(ys), 2 * max(ys)))
        axes.set_title(STREAMS[stream].title, color=INK, fontsize=11)
        axes.set_ylabel("memory and files, relative to SB3", color=INK)
        axes.tick_params(labelsize=7)
    for axes in panels.flat[len(streams) :]:
        axes.set_visible(False)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, labelcolor=INK, fontsize=8
    )
    figure.savefig(path, dpi=144, transparent=True, metadata={"Software": None})
    plt.close(figure)


def sections() -> dict[str, str]:
    """The parts of the page by the names of their markers."""
    streams = by_stream(rows())
    parts = []
    for stream, systems in streams.items():
        row = systems[REFERENCE]
        head = f"{int(row['n_transitions']):,} transitions with observations of {row['shape']} {row['dtype']}."
        parts.append(f"### {STREAMS[stream].title[0].upper()}{STREAMS[stream].title[1:]}\n\n{head}\n")
        parts.append(stream_tables(systems))
    return {
        "peer summary": f"\n{best_table(streams)}\n",
        "peers": "\n" + "\n".join(parts) + f"\n{provenance(streams)}\n\n",
        "peer calls": calls(streams),
    }


def provenance(streams: dict[str, dict[str, Row]]) -> str:
    """When, where and with which versions."""
    every = [row for systems in streams.values() for row in systems.values() if row["versions"]]
    dates = sorted({row["date"] for row in every})
    own = sorted({row["versions"] for row in every if row["system"] == REFERENCE})
    other = sorted({row["versions"] for row in every if row["system"] == "reverb"})
    text = f"Measured {' to '.join(dict.fromkeys((dates[0], dates[-1])))} on {every[-1]['machine']}; {'; '.join(own)}."
    return f"{text} Reverb: {'; '.join(other)}." if other else text


def calls(streams: dict[str, dict[str, Row]]) -> str:
    """Version and calls of each system."""
    text = "\n"
    for name, system in SYSTEMS.items():
        found = {systems[name]["version"] for systems in streams.values() if name in systems} - {""}
        package = system.package or "sb3-extra-buffers"
        number = " and ".join(sorted(found)) or "not measured"
        version = f" {number}" if system.title == package else f", {package} {number}"
        text += f"{system.title}{version}:\n\n```py\n{system.calls}\n```\n\n"
    return text


def write() -> None:
    """Render the page and its plot."""
    from benchmarks import render

    for name, text in sections().items():
        render.insert(render.DOCS / "peers.md", name, text)
    plot(by_stream(rows()), render.DOCS / PLOT)
