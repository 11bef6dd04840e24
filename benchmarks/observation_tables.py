"""Tables and a plot of `benchmarks.observations`, for the console and the documentation."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.observations import FLOAT_PAIRS, OPTIMIZED, Row
from benchmarks.results import factor, percent, quantity

# times in the tables, and the columns of the measurements; add to a full buffer, because while SB3's is filled, its add
# mostly waits for memory to be mapped
TIMES = {"add": "overwrite_us_p50", "sample 32": "sample32_us_p50", "sample 256": "sample256_us_p50"}

# kinds of streams in the order of the tables, with their titles
KINDS = {
    "Atari": "Atari games",
    "games": "other games, RGB and grey",
    "robots": "simulated robots, RGB",
    "video": "real video",
    "video with noise": "real video with sensor noise",
    "depth": "depth cameras",
    "float images": "images as floats",
    "noise": "random pixels",
    "vectors": "vectors",
}


def share(row: Row) -> float:
    """Resident memory as a fraction of SB3's with ``optimize_memory_usage=True``."""
    return float(row["resident_bytes"]) / float(row["optimized_bytes"])


def dense_share(row: Row) -> float:
    """Resident memory as a fraction of the observations in one array."""
    return float(row["resident_bytes"]) / (float(row["obs_bytes"]) * float(row["n_transitions"]))


def ratio(row: Row, figure: str) -> float:
    """A figure relative to SB3's default buffer in the same run."""
    return float(row[figure]) / float(row[f"sb3_{figure}"])


def cost(row: Row) -> float:
    """What ``auto`` is to minimise: memory times the time of sample(256).

    The 20th percentile of the times, which varies less than the median: the methods are not timed side by side.
    """
    return float(row["reported_bytes"]) * float(row["sample256_us_p20"])


def of_auto(rows: Iterable[Row]) -> list[Row]:
    """The rows of ``auto`` by kind, then in the order of the file."""
    kinds = list(KINDS)
    return sorted((row for row in rows if row["method"] == "auto"), key=lambda row: kinds.index(row["kind"]))


def best_methods(rows: Iterable[Row]) -> dict[str, Row]:
    """The named method of the lowest cost for each stream that has any."""
    best: dict[str, Row] = {}
    for row in rows:
        if row["method"] not in ("auto", OPTIMIZED) and (
            row["stream"] not in best or cost(row) < cost(best[row["stream"]])
        ):
            best[row["stream"]] = row
    return best


def regrets(rows: list[Row]) -> dict[str, float]:
    """The cost of ``auto`` relative to that of the best named method, by stream."""
    best = best_methods(rows)
    return {row["stream"]: cost(row) / cost(best[row["stream"]]) for row in of_auto(rows) if row["stream"] in best}


def float_growth(rows: list[Row]) -> dict[str, float]:
    """Bytes that float images take with ``auto``, relative to the same images as uint8, by stream."""
    held = {row["stream"]: float(row["resident_bytes"]) for row in of_auto(rows)}
    return {name: held[name] / held[other] for name, other in FLOAT_PAIRS.items() if {name, other} <= held.keys()}


# ---- console ----


def report(rows: list[Row]) -> str:
    """Every method on one stream, smallest first, then SB3's buffer with ``optimize_memory_usage=True``."""
    first = rows[0]
    regret = regrets(rows).get(first["stream"])
    head = f"{first['stream']}, {first['shape']} {first['dtype']}, {int(first['n_transitions']):,} transitions"
    lines = [head + (f"; auto costs {factor(regret)} the best method" if regret else "")]
    for row in sorted((row for row in rows if row["resident_bytes"]), key=share):
        reported = float(row["reported_bytes"]) / float(row["optimized_bytes"])
        memory = f"memory {percent(share(row)):>7} (reported {percent(reported):>7})"
        chosen = "  " + "; ".join(filter(None, (row["chosen"], row["why"]))) if row["method"] == "auto" else ""
        lines.append(f"  {row['method']:14} {memory}  {_times(row)}{chosen}")
    lines += [f"  {row['method']:48}  {_times(row)}" for row in rows if row["method"] == OPTIMIZED]
    return "\n".join(lines)


def _times(row: Row) -> str:
    columns = {**TIMES, "add, filling": "add_us_p50", "fill": "fill_s"}
    return "  ".join(f"{title} {factor(ratio(row, column)):>6}" for title, column in columns.items())


def targets(rows: list[Row]) -> str:
    """The figures that `auto` is judged by, each with its limit, where they were measured."""
    lines = []
    for title, values, merge, limit in _targets(rows):
        if values:
            value = merge(list(values.values()))
            worst = max(values, key=values.__getitem__)
            verdict = "met" if value <= limit else "MISSED"
            lines.append(f"{title:46} {value:8.3f}  limit {limit:5.2f}  {verdict:6}  largest: {worst}")
    return "\n".join(lines)


def _targets(rows: list[Row]) -> list[tuple[str, dict[str, float], Callable[[list[float]], float], float]]:
    auto = of_auto(rows)
    vectors = [row for row in auto if row["kind"] == "vectors"]
    images = [row for row in auto if row["kind"] != "vectors"]
    mean, geometric, median = statistics.mean, statistics.geometric_mean, statistics.median

    def shares(some: list[Row]) -> dict[str, float]:
        return {row["stream"]: share(row) for row in some}

    def ratios(some: list[Row], column: str) -> dict[str, float]:
        return {row["stream"]: ratio(row, column) for row in some}

    return [
        ("memory, worst", shares(auto), max, 1.0),
        ("memory, mean", shares(auto), mean, 0.15),
        ("memory, mean of images", shares(images), mean, 0.15),
        ("memory, real video", shares([row for row in auto if row["kind"] == "video"]), max, 0.4),
        ("memory, video with noise", shares([row for row in auto if row["kind"] == "video with noise"]), max, 0.95),
        ("memory, floats relative to uint8", float_growth(rows), max, 1.1),
        ("sample(32), worst", ratios(auto, "sample32_us_p50"), max, 2.0),
        ("sample(256), worst", ratios(auto, "sample256_us_p50"), max, 2.0),
        ("sample(256), geometric mean", ratios(auto, "sample256_us_p50"), geometric, 0.9),
        ("add to a full buffer, worst", ratios(auto, "overwrite_us_p50"), max, 4.0),
        ("add to a full buffer, median", ratios(auto, "overwrite_us_p50"), median, 4.0),
        ("add while filling, worst", ratios(auto, "add_us_p50"), max, 4.0),
        ("add while filling, median", ratios(auto, "add_us_p50"), median, 4.0),
        ("filling, total, worst", ratios(auto, "fill_s"), max, 4.0),
        ("memory x sample(256), auto to best method", regrets(rows), max, 1.5),
        ("vectors: sample(32), worst", ratios(vectors, "sample32_us_p50"), max, 0.4),
        ("vectors: sample(256), worst", ratios(vectors, "sample256_us_p50"), max, 0.4),
        ("vectors: add, worst", ratios(vectors, "overwrite_us_p50"), max, 0.9),
    ]


# ---- documentation ----


def kind_table(rows: list[Row]) -> str:
    """``auto`` on each kind of observations: mean memory and geometric means of times, with the worst streams."""
    from benchmarks.render import table

    auto = of_auto(rows)
    lines = []
    for kind, title in {**KINDS, "": "**all**"}.items():
        some = [row for row in auto if kind in ("", row["kind"])]
        if some:
            held = [share(row) for row in some]
            times = [[ratio(row, column) for row in some] for column in TIMES.values()]
            cells = [_with_worst(percent, statistics.mean(held), held)]
            cells += [_with_worst(factor, statistics.geometric_mean(values), values) for values in times]
            lines.append([title, str(len(some)), *cells])
    return table(["observations", "streams", "memory", *(f"`{_call(title)}`" for title in TIMES)], lines)


def _call(title: str) -> str:
    """``sample 32`` is ``sample(32)``."""
    name, _, batch = title.partition(" ")
    return f"{name}({batch})" if batch else name


def _with_worst(show: Callable[[float], str], value: float, values: list[float]) -> str:
    return show(value) if len(values) == 1 else f"{show(value)} (worst {show(max(values))})"


def stream_table(rows: list[Row]) -> str:
    """``auto`` on every stream, what it chose, and the named method of the lowest memory times sampling time."""
    from benchmarks.render import table

    best, regret = best_methods(rows), regrets(rows)
    lines = []
    for row in of_auto(rows):
        name = row["stream"]
        lines.append(
            [
                name,
                f"{row['shape']} {row['dtype']}",
                f"{int(row['n_transitions']):,}",
                row["chosen"],
                quantity(float(row["resident_bytes"]), "B"),
                percent(share(row)),
                percent(dense_share(row)),
                *(factor(ratio(row, column)) for column in (*TIMES.values(), "fill_s")),
                f"`{best[name]['method']}`, {factor(regret[name])}" if name in best else "",
            ]
        )
    header = ["stream", "observation", "transitions", "`auto` chose", "resident", "% of SB3's", "% of one array"]
    return table([*header, *TIMES, "fill", "best method, `auto` relative to it"], lines)


def section(rows: list[Row]) -> list[str]:
    """The part of the benchmarks page."""
    from benchmarks.render import provenance

    return [
        "## Other observations\n",
        "Recordings of four environments are replayed into replay buffers until these are full, and a quarter further. "
        "`make streams` records them, `python -m benchmarks.observations` measures. *Memory* is the "
        "growth of the resident set, in percent of all arrays of SB3's `ReplayBuffer` with "
        "`optimize_memory_usage=True`, which holds one observation per transition. *Times* are medians relative to "
        "SB3's default buffer, in one process with calls interleaved, after checking that batches equal SB3's bit for "
        "bit. `add` is measured on full buffers; *fill* is the total time until they are full. Names ending in `x4` "
        "are stacks of four frames; `last` means channels last.\n",
        "`auto` by kind of observation; memory is the mean, times are geometric means:\n",
        kind_table(rows),
        "![memory versus sampling time of all streams](observations.png)\n",
        "Every stream. The last column has the method with the smallest product of memory and `sample(256)`, and the "
        "product with `auto` relative to it:\n",
        stream_table(rows),
        provenance(rows),
    ]


def summary(rows: list[Row]) -> str:
    """A short table for the README and the home page."""
    from benchmarks.render import provenance

    if not rows:
        return ""
    note = (
        "Memory is relative to SB3's buffer with `optimize_memory_usage=True`, times are relative to SB3's default "
        "buffer: means over recorded streams, with the worst in parentheses. `add` is measured on full buffers.\n"
    )
    return f"{kind_table(rows)}\n{note}\n{provenance(rows)}\n"


# readable on white and on dark pages; one for each kind
_COLORS = ("#e45756", "#4c78a8", "#54a24b", "#b279a2", "#eeca3b", "#72b7b2", "#9d755d", "#8a8f98", "#d67195")


def plot(rows: list[Row], path: Path) -> None:
    """Plot memory versus sampling time of ``auto``, one point per stream; the worst ones are labelled."""
    from matplotlib import pyplot as plt

    from benchmarks.render import BASELINE, INK, style

    auto = of_auto(rows)
    points = {row["stream"]: (ratio(row, "sample256_us_p50"), 100 * share(row)) for row in auto}
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for (kind, title), color in zip(KINDS.items(), _COLORS, strict=True):
        some = [points[row["stream"]] for row in auto if row["kind"] == kind]
        if some:
            axes.scatter(*zip(*some, strict=True), s=34, color=color, label=title, zorder=2)
    axes.scatter([1], [100], s=110, marker="*", color=BASELINE, zorder=3)
    bold = {"textcoords": "offset points", "fontsize": 10, "weight": "bold"}
    axes.annotate("SB3, optimize_memory_usage=True", (1, 100), xytext=(9, 4), color=BASELINE, **bold)
    # none has both more memory and a longer time
    worst = [
        name for name, point in points.items()
        if not any(other[0] >= point[0] and other[1] >= point[1] for key, other in points.items() if key != name)
    ]  # fmt: skip
    for name in worst:
        axes.annotate(name, points[name], xytext=(6, -12), textcoords="offset points", fontsize=8, color=INK)
    xs, ys = zip(*points.values(), strict=True)
    style(axes, (0.7 * min(*xs, 1), 1.6 * max(*xs, 1)), (0.6 * min(*ys, 100), 1.7 * max(*ys, 100)))
    axes.set_ylabel("memory, relative to SB3's smallest buffer", color=INK)
    axes.set_title(f"auto on {len(points)} streams: down and left is better", color=INK)
    axes.legend(frameon=False, labelcolor=INK, fontsize=8, loc="lower right")
    figure.savefig(path, dpi=144, transparent=True, metadata={"Software": None})
    plt.close(figure)
