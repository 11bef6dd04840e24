"""The measurements of ``docs/gpu.md``, rendered from the rows of ``benchmarks/data/gpu.csv``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.render import BASELINE, FAMILIES, HIGHLIGHT, INK, Row, table
from benchmarks.results import factor, quantity

NAMES = {
    "sb3": "SB3",
    "none": "`none`",
    "delta": "`delta`",
    "delta, pinned": "`delta`, pinned",
    "rle": "`rle`",
    "zstd": "`zstd`",
    "torchrl": "TorchRL",
    "dense": "dense arrays, no graph",
    "buffer": "`TensorReplayBuffer`",
    "buffer, graph": "as a graph",
    "tree": "its tree alone",
    "tree, graph": "its tree alone, as a graph",
}
# rows of the first table, in this order; the others of their parts follow
MAIN_PARTS = ("sample", "add", "memory", "ppo")
MAIN = ("sb3", "none", "delta")
METHODS = ("none", "delta", "delta, pinned", "rle", "zstd")
# beside the page
PLOT = "gpu_add.png"


def figures(rows: list[Row], *parts: str) -> dict[str, dict[str, Row]]:
    """The rows of some parts, by figure and buffer, in the order of the parts."""
    found: dict[str, dict[str, Row]] = {}
    for part in parts:
        for row in rows:
            if row["part"] == part:
                found.setdefault(row["figure"], {})[row["buffer"]] = row
    return found


def value(row: Row | None) -> str:
    return "" if row is None else quantity(float(row["p50"]), row["unit"])


def of(row: Row | None, other: str) -> str:
    """The ratio to another candidate of the same run."""
    return factor(float(row[f"of_{other}"])) if row and row.get(f"of_{other}") else ""


def main_table(rows: list[Row]) -> str:
    """SB3's buffer, `none` and `delta`, with the ratios of `delta` to both."""
    lines = []
    for figure, by_buffer in figures(rows, *MAIN_PARTS).items():
        delta = by_buffer.get("delta")
        if delta is not None:
            values = [value(by_buffer.get(name)) for name in MAIN]
            # a share of dense memory is a ratio already
            ratios = ["", ""] if delta["unit"] == "%" else [of(delta, "none"), of(delta, "sb3")]
            lines.append([figure, *values, *ratios])
    return table(["median", *(NAMES[name] for name in MAIN), "`delta` / `none`", "`delta` / SB3"], lines)


def method_table(rows: list[Row]) -> str:
    """All methods that are measured."""
    names = ("sample(32)", "sample(256)", "decode kernels, 256", "memory, of SB3's observations")
    found = figures(rows, "sample")
    lines = [[name, *(value(found[name].get(method)) for method in METHODS)] for name in names if name in found]
    return table(["median", *(NAMES[method] for method in METHODS)], lines)


def other_table(rows: list[Row], part: str, reference: str) -> str:
    """The candidates of one figure, each with its ratio to ``reference``."""
    parts = []
    for figure, by_buffer in figures(rows, part).items():
        lines = [[NAMES.get(name, name), value(row), of(row, reference)] for name, row in by_buffer.items()]
        parts.append(table([figure, "median", f"relative to {NAMES[reference]}"], lines))
    return "\n".join(parts)


def section(rows: list[Row]) -> str:
    """The text between the markers of ``docs/gpu.md``."""
    if not rows:
        return ""
    settings = {row["part"]: row["setting"] for row in rows}
    parts = []
    if any(row["part"] in MAIN_PARTS for row in rows):
        parts += [main_table(rows)]
    if series(rows):
        parts += [f"![time of add by the number of environments]({PLOT})\n"]
    if "sample" in settings:
        parts += [f"{settings['sample']}, by method:\n", method_table(rows)]
    if "tree" in settings:
        parts += [f"{settings['tree']}:\n", other_table(rows, "tree", "torchrl")]
    if "dqn" in settings:
        parts += [f"{settings['dqn']}:\n", other_table(rows, "dqn", "dense")]
    shown = [row for row in rows if row["part"] in (*MAIN_PARTS, "tree", "dqn")]
    return "\n" + "\n".join([*parts, stamps(shown)]) + "\n"


def stamps(rows: list[Row]) -> str:
    """When, where and with which versions each part was measured; equal ones together."""
    parts: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        machine = ", ".join(filter(None, (row["device"], row["machine"])))
        names = parts.setdefault((row["date"], machine, row["versions"]), [])
        if row["part"] not in names:
            names.append(row["part"])
    return "\n".join(
        f"Measured {date} on {machine}; {versions} ({', '.join(names)}).\n"
        for (date, machine, versions), names in parts.items()
    )


def series(rows: list[Row]) -> dict[tuple[str, str], dict[int, Row]]:
    """Rows of ``add`` by the kind of input and the buffer, then by the number of environments, if there are several."""
    found: dict[tuple[str, str], dict[int, Row]] = {}
    for row in rows:
        match = re.fullmatch(r"add of (\d+) environments, (.+)", row["figure"])
        if match:
            found.setdefault((match[2], row["buffer"]), {})[int(match[1])] = row
    return {key: by_count for key, by_count in found.items() if len(by_count) > 1}


def plot(rows: list[Row], path: Path) -> None:
    """Plot the time of ``add`` over the number of environments, if it was measured for several."""
    found = series(rows)
    kinds = list(dict.fromkeys(kind for kind, _ in found))
    if not kinds:
        return
    colors = {"sb3": BASELINE, "none": FAMILIES["none"], "delta": HIGHLIGHT}
    titles = {"NumPy": "NumPy arrays, 84x84x4", "tensors": "tensors on the GPU, 64x64x3"}
    figure, grid = plt.subplots(1, len(kinds), figsize=(8, 4), sharey=True, layout="constrained", squeeze=False)
    for axes, kind in zip(grid[0], kinds, strict=True):
        for name, color in colors.items():
            points = sorted((count, row) for count, row in found.get((kind, name), {}).items())
            counts = [count for count, _ in points]
            low, middle, high = ([float(row[cut]) for _, row in points] for cut in ("p20", "p50", "p80"))
            axes.plot(counts, middle, color=color, marker="o", markersize=4, label=NAMES[name].strip("`"))
            axes.fill_between(counts, low, high, color=color, alpha=0.2, linewidth=0)
        style(axes, titles.get(kind, kind), sorted({count for key in found for count in found[key]}))
    grid[0][0].set_ylabel("time of one add", color=INK)
    grid[0][0].legend(frameon=False, labelcolor=INK, fontsize=9)
    figure.savefig(path, dpi=144, transparent=True, metadata={"Software": None})
    plt.close(figure)


def style(axes: Any, title: str, counts: list[int]) -> None:
    axes.set(xscale="log", yscale="log", title=title)
    axes.title.set_color(INK)
    axes.xaxis.set_major_locator(FixedLocator(counts))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda time, _: quantity(time, "us").replace(".00", "")))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("environments", color=INK)
    axes.tick_params(colors=INK)
    axes.grid(color=INK, alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(INK)
