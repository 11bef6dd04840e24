"""Render ``docs/benchmarks.md``, its plot, and the tables of other pages from the CSV files in ``benchmarks/data``."""

from __future__ import annotations

import functools
import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from benchmarks import cold_start
from benchmarks.results import DATA, ROOT, factor, percent, quantity, read_rows

DOCS = ROOT / "docs"
README = ROOT / "README.md"

Row = dict[str, str]
# times of a replay buffer, in the order of the tables
TIMES = ("add_us", "fill_s", "sample32_us", "sample256_us")


def rows(name: str) -> list[Row]:
    """Measurements of one suite; none if it was not run."""
    return read_rows(DATA / f"{name}.csv")


def sb3_bytes(row: Row) -> float:
    """What SB3's `ReplayBuffer` holds by default: both observations, and 20 bytes of other columns per transition."""
    return 2 * float(row["dense_bytes"]) + 20 * float(row["n_transitions"])


def share(row: Row) -> float:
    """Resident memory as a fraction of SB3's default."""
    return float(row["resident_bytes"]) / sb3_bytes(row)


def ratio(row: Row, column: str) -> float:
    """A time relative to SB3's in the same run."""
    return float(row[column]) / float(row[f"sb3_{column}"])


def resident(row: Row) -> str:
    return quantity(float(row["resident_bytes"]), "B")


def table(header: list[str], lines: list[list[str]]) -> str:
    head = f"| {' | '.join(header)} |\n|{'---|' * len(header)}\n"
    return head + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def provenance(measured: list[Row]) -> str:
    """When, where and with which versions a suite was measured."""
    dates = sorted({row["date"] for row in measured})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"Measured {when} on {measured[-1]['machine']}; {measured[-1]['versions']}.\n"


def method_table(measured: list[Row]) -> str:
    """All methods on one game, smallest first."""
    header = ["method", "resident", "% of SB3's", "add", "fill", "sample 32", "sample 256"]
    lines = []
    for row in sorted(measured, key=share):
        name = f"`{row['method']}`" if row["method"] != "sb3" else "SB3, `optimize_memory_usage=True`"
        lines.append([name, resident(row), percent(share(row)), *(factor(ratio(row, column)) for column in TIMES)])
    return table(header, lines)


def game_table(measured: list[Row]) -> str:
    """One method on many games, with the mean and the worst."""
    header = ["game", "% of SB3's", "add", "fill", "sample 32", "sample 256"]
    lines = [
        [row["game"], percent(share(row)), *(factor(ratio(row, column)) for column in TIMES)]
        for row in sorted(measured, key=share)
    ]
    for name, merge in (("**mean**", statistics.mean), ("**worst**", max)):
        merged = [merge([ratio(row, column) for row in measured]) for column in TIMES]
        memory = percent(merge([share(row) for row in measured]))
        lines.append([name, f"**{memory}**", *(f"**{factor(value)}**" for value in merged)])
    return table(header, lines)


# titles of benchmarks, games, figures and formats by their names in the CSV files
CASES = {
    "replay": "`CompressedReplayBuffer`, MsPacman, 40,000 transitions",
    "rollout": "`CompressedRolloutBuffer`, Pong, 8 environments x 128 steps, batches of 256",
    "vector": "`CompressedReplayBuffer`, observations of 17 floats",
    "save": "`save_replay_buffer`, MsPacman, 100,000 transitions",
    "ppo": "training PPO on Pong, 8 environments x 128 steps, 4 epochs",
    "dqn": "training DQN on MsPacman",
}
GAME_TITLES = {"ms_pacman": "MsPacman", "vizdoom-rgb": "ViZDoom, RGB", "vizdoom-labels": "ViZDoom, masks"}
FIGURES = {
    "everything, an iteration": "total per iteration",
    "held": "observations",
}
# paragraphs before the table of a method
NOTES = {"delta3": ["`delta3` is for archives: it takes the least memory, and is several times slower to read.\n"]}
FORMATS = {
    "byte runs": "byte runs",
    "mask tree": "mask tree",
    "mask tree, tiles of 2x4": "mask tree, tiles of 2x4",
    "mask tree, repeats as bits": "mask tree with repeat bits",
    "the same, tiles of 2x4": "mask tree with repeat bits, tiles of 2x4",
    "the same, better of one and two frames before": "mask tree with repeat bits, best of the previous two frames",
    "stored, segments of 4": "as stored, segments of 4",
    "stored, segments of 8": "as stored, segments of 8",
    "stored, segments of 16": "as stored, segments of 16",
    "stored, segments of 32": "as stored, segments of 32",
    "stored, segments of 8, heavy ones packed": "as stored, segments of 8, large ones packed with LZ4",
}


def buffer_table(measured: list[Row]) -> str:
    """Compressed SB3 buffers and SB3's own, with the ratio of the two."""
    lines = []
    for case, title in CASES.items():
        for row in (row for row in measured if row["case"] == case and "dense copy" not in row["figure"]):
            ours, theirs = float(row["ours"]), float(row["sb3"])
            figures = [quantity(value, row["unit"]) for value in (ours, theirs)]
            name = FIGURES.get(row["figure"], row["figure"])
            lines.append([title, name, *figures, factor(ours / theirs)])
            title = ""
    return table(["benchmark", "figure", "compressed", "SB3", "ratio"], lines)


# colours and greys that are readable on white and on dark pages
FAMILIES = {
    "zstd": "#4c78a8",
    "lz4": "#54a24b",
    "gzip, igzip": "#b279a2",
    "rle": "#9d755d",
    "none": "#8a8f98",
}
HIGHLIGHT, BASELINE, INK = "#e45756", "#f58518", "#80868f"


def family(method: str) -> str:
    """The entry of the plot's legend for ``method``."""
    stem = method.removeprefix("i")
    return next((name for name in FAMILIES if stem.startswith(name.partition(",")[0])), "delta")


def pareto_front(points: list[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """The points that no other one beats in both coordinates, from left to right."""
    front: list[tuple[str, float, float]] = []
    for point in sorted(points, key=lambda point: point[1:]):
        if not front or point[2] < front[-1][2]:
            front.append(point)
    return front


def plot(measured: list[Row], path: Path) -> None:
    """Plot memory versus sampling time, both relative to SB3's buffer; the best methods and SB3 are labelled."""
    points = [
        (row["method"], ratio(row, "sample256_us"), 100 * share(row)) for row in measured if row["method"] != "sb3"
    ]
    front = pareto_front(points)
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for name, color in FAMILIES.items():
        some = [point[1:] for point in points if family(point[0]) == name]
        axes.scatter(*zip(*some, strict=True), s=26, color=color, label=name, zorder=2)
    some = [point[1:] for point in points if family(point[0]) == "delta"]
    axes.scatter(*zip(*some, strict=True), s=60, color=HIGHLIGHT, label="auto, delta", zorder=3)
    axes.plot(*zip(*[point[1:] for point in front], strict=True), color=HIGHLIGHT, linewidth=1, zorder=1)
    optimized = next(100 * share(row) for row in measured if row["method"] == "sb3")
    axes.scatter([1, 1], [100, optimized], s=110, marker="*", color=BASELINE, zorder=3)
    bold = {"textcoords": "offset points", "fontsize": 10, "weight": "bold"}
    for name, y in (("SB3's ReplayBuffer", 100), ("SB3, optimize_memory_usage=True", optimized)):
        axes.annotate(name, (1, y), xytext=(9, 4), color=BASELINE, **bold)
    for name, x, y in front:
        # between two others, to the left, where the line is lower
        side = -1 if front[0][0] != name != front[-1][0] else 1
        place = {"xytext": (6 * side, 7), "ha": "right" if side < 0 else "left"}
        axes.annotate(name, (x, y), color=HIGHLIGHT, **place, **bold)
    times, shares = [point[1] for point in points], [point[2] for point in points]
    style(axes, (min(times) / 1.3, 1.5 * max(times)), (min(shares) / 1.5, 160))
    axes.set_ylabel("memory, relative to SB3's ReplayBuffer", color=INK)
    axes.legend(frameon=False, labelcolor=INK, fontsize=9, loc="upper right")
    title = f"{measured[0]['game']}, {int(measured[0]['n_transitions']):,} transitions: down and left is better"
    axes.set_title(title, color=INK)
    figure.savefig(path, dpi=144, transparent=True, metadata={"Software": None})
    plt.close(figure)


def style(axes: Any, xlim: tuple[float, float], ylim: tuple[float, float]) -> None:
    """Logarithmic axes with plain numbers, a light grid, and a colour that is readable on any page."""
    axes.set(xscale="log", yscale="log", xlim=xlim, ylim=ylim)
    ticks = [digit * 10.0**power for power in range(-2, 3) for digit in (1, 2, 5)]
    for axis, unit in ((axes.xaxis, "x"), (axes.yaxis, " %")):
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_major_formatter(FixedFormatter([f"{tick:g}{unit}" for tick in ticks]))
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("time of sample(256), relative to SB3", color=INK)
    axes.tick_params(colors=INK)
    axes.grid(color=INK, alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(INK)


def summary() -> str:
    """The summary in the README and on the home page."""
    from benchmarks import desktop, headline, observation_tables

    million = "".join(
        f"{int(row['n_transitions']):,} {GAME_TITLES.get(row['game'], row['game'])} transitions with all columns take "
        f"**{resident(row)}** of resident memory, {quantity(sb3_bytes(row), 'B')} in SB3's `ReplayBuffer`.\n\n"
        for row in rows("million")
    )
    others = observation_tables.summary(rows("observations"))
    return f"\n{headline.table()}{million}{desktop.summary(rows('desktop'))}{others}" if rows("headline") else ""


def benchmarks_page() -> str:
    """``docs/benchmarks.md``."""
    from benchmarks import observation_tables

    parts = [
        "# Benchmarks\n",
        "`make docs` renders all figures from the CSV files in `benchmarks/data`; `make bench` measures the first "
        "table again.\n",
        "*Memory* is the growth of the resident set of a fresh process while it stores transitions of four "
        "environments (84x84x4 stacks), in percent of what SB3's `ReplayBuffer` holds for the same transitions by "
        "default: both observations and all other columns.\n",
        "*Times* are relative to SB3's `ReplayBuffer` in the same process, with calls interleaved; below 1 is faster "
        "than SB3. Sampling is compared with SB3's default, `add` and filling with `optimize_memory_usage=True`, with "
        "which SB3 holds one observation per transition instead of two.\n",
        "For the tables of methods, games and ViZDoom, and those without numba, glibc keeps freed memory while times "
        "are measured, because mapping the pages of a large batch again takes longer than copying it. Arrays above "
        "32 MB are mapped again nevertheless: the times of ViZDoom's RGB batches of 256, 59 MB each, include that with "
        "both buffers.\n",
    ]
    fills = [float(row["sb3_fill_s"]) for name in ("table", "games") for row in rows(name) if row["sb3_fill_s"]]
    if fills:
        parts.append(
            f"Filling SB3's buffer took {min(fills):.1f} to {max(fills):.1f} s, depending on page-fault cost, so the "
            "ratios for filling vary the most.\n"
        )
    measured = rows("table")
    if measured:
        parts += [
            f"## Methods on {measured[0]['game']}\n",
            "![memory versus sampling time](memory_speed.png)\n",
            method_table(measured),
            provenance(measured),
        ]
    for method in sorted({row["method"] for row in rows("games")}):
        some = [row for row in rows("games") if row["method"] == method]
        parts += [f"## `{method}` on {len(some)} games\n", *NOTES.get(method, []), game_table(some), provenance(some)]
    for name, title in (("million", "One million transitions"), ("doom", "ViZDoom"), ("plain", "Without numba")):
        some = rows(name)
        if some:
            parts += [f"## {title}\n", other_table(some), provenance(some)]
    if rows("observations"):
        parts += observation_tables.section(rows("observations"))
    some = rows("buffers")
    if some:
        parts += ["## Buffers compared with SB3's\n", buffer_table(some), provenance(some)]
    return "\n".join(parts)


def main() -> None:
    from benchmarks import gpu_tables, observation_tables

    (DOCS / "benchmarks.md").write_text(benchmarks_page())
    if rows("table"):
        plot(rows("table"), DOCS / "memory_speed.png")
    if rows("observations"):
        observation_tables.plot(rows("observations"), DOCS / "observations.png")
    for page in (README, DOCS / "index.md"):
        insert(page, "figures", summary())
    insert(DOCS / "architecture.md", "formats", format_table())
    insert(DOCS / "gpu.md", "gpu", gpu_tables.section(rows("gpu")))
    gpu_tables.plot(rows("gpu"), DOCS / gpu_tables.PLOT)
    insert(DOCS / "files.md", "files", file_table())
    insert(DOCS / "faq.md", "cold start", cold_start.summary())


def insert(path: Path, name: str, text: str) -> None:
    """Replace the text between the markers of ``name``."""
    before, begin, rest = path.read_text().partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    if not end:
        raise SystemExit(f"{path} has no markers for {name!r}")
    path.write_text(f"{before}{begin}{text}{end}{after}")


def format_table() -> str:
    """The formats that were tried, by game."""
    measured = rows("formats")
    if not measured:
        return ""
    games = list(dict.fromkeys(row["game"] for row in measured))
    sizes = {(row["format"], row["game"]): float(row["percent_of_stack"]) for row in measured}
    lines = [[title, *(f"{sizes[name, game]:.2f}" for game in games)] for name, title in FORMATS.items()]
    return f"\n{table(['format', *games], lines)}\n{provenance(measured)}\n"


def file_table() -> str:
    """Saved buffers of several sizes, and SB3's pickle where it was measured."""
    measured = sorted(rows("files"), key=lambda row: int(row["n_transitions"]))
    if not measured:
        return ""
    header, columns = [""], []
    for row in measured:
        header.append(f"{int(row['n_transitions']):,} transitions")
        size, seconds = (functools.partial(_column, row, unit=unit) for unit in ("B", "s"))
        columns.append(
            [
                size("bytes"),
                seconds("save_s"),
                size("save_peak_bytes"),
                f"{seconds('incremental_s')}, {size('incremental_bytes')} written",
                seconds("load_s"),
                f"{seconds('open_s')}, {size('open_resident_bytes')} resident",
            ]
        )
        if row["sb3_bytes"]:
            header.append(f"{int(row['n_transitions']):,}, SB3's pickle")
            columns.append([size("sb3_bytes"), seconds("sb3_save_s"), "", "a full save", "", ""])
    names = ["size", "save", "additional memory while saving", "save after 1000 new transitions", "load", "open"]
    lines = [list(line) for line in zip(names, *columns, strict=True)]
    return f"\n{table(header, lines)}\n{provenance(measured)}\n"


def _column(row: Row, name: str, unit: str) -> str:
    return quantity(float(row[name]), unit)


def other_table(measured: list[Row]) -> str:
    """A table with those of the optional columns that all rows have."""
    optional: list[tuple[str, Any]] = [
        ("add", lambda row: factor(ratio(row, "add_us"))),
        ("fill", lambda row: factor(ratio(row, "fill_s"))),
        ("sample 32", lambda row: factor(ratio(row, "sample32_us"))),
        ("sample 256", lambda row: factor(ratio(row, "sample256_us"))),
        ("sample 32, relative to 10,000 transitions", lambda row: factor(_against_small(row, 32))),
        ("sample 256, relative to 10,000 transitions", lambda row: factor(_against_small(row, 256))),
    ]
    columns = [(name, show) for name, show in optional if all(_is_measured(show, row) for row in measured)]
    header = ["game", "method", "transitions", "resident", "% of SB3's", *(name for name, _ in columns)]
    lines = [
        [
            GAME_TITLES.get(row["game"], row["game"]),
            f"`{row['method']}`",
            f"{int(row['n_transitions']):,}",
            resident(row),
            percent(share(row)),
        ]
        + [show(row) for _, show in columns]
        for row in measured
    ]
    return table(header, lines)


def _against_small(row: Row, batch: int) -> float:
    return float(row[f"sample{batch}_us"]) / float(row[f"small_sample{batch}_us"])


def _is_measured(show: Any, row: Row) -> bool:
    try:
        show(row)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    main()
