"""Render ``docs/benchmarks.md``, its plot, and the tables of other pages from the CSV files in ``benchmarks/data``."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

from benchmarks.results import DATA, ROOT, read_rows

DOCS = ROOT / "docs"
README = ROOT / "README.md"

Row = dict[str, str]
# times of a replay buffer, in the order of the tables
TIMES = ("add_us", "fill_s", "sample32_us", "sample256_us")


def rows(name: str) -> list[Row]:
    """Measurements of one suite; none if it was not run."""
    return read_rows(DATA / f"{name}.csv")


def share(row: Row) -> float:
    """Resident memory as a fraction of one dense copy."""
    return float(row["resident_bytes"]) / float(row["dense_bytes"])


def ratio(row: Row, column: str) -> float:
    """A time relative to SB3's in the same run."""
    return float(row[column]) / float(row[f"sb3_{column}"])


def megabytes(row: Row) -> str:
    count = float(row["resident_bytes"]) / 1e6
    return f"{count:.1f} MB" if count < 1000 else f"{count / 1000:.2f} GB"


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
    header = ["method", "resident", "% of dense", "add", "fill", "sample 32", "sample 256"]
    lines = []
    for row in sorted(measured, key=share):
        name = f"`{row['method']}`" if row["method"] != "sb3" else "SB3's `ReplayBuffer`"
        lines.append([name, megabytes(row), f"{share(row):.2%}"] + [f"{ratio(row, column):.2f}x" for column in TIMES])
    return table(header, lines)


def game_table(measured: list[Row]) -> str:
    """One method on many games, with the mean and the worst."""
    header = ["game", "% of dense", "add", "fill", "sample 32", "sample 256"]
    lines = [
        [row["game"], f"{share(row):.2%}", *(f"{ratio(row, column):.2f}x" for column in TIMES)]
        for row in sorted(measured, key=share)
    ]
    for name, merge in (("**mean**", statistics.mean), ("**worst**", max)):
        merged = [merge([ratio(row, column) for row in measured]) for column in TIMES]
        lines.append([name, f"**{merge([share(row) for row in measured]):.2%}**", *(f"**{x:.2f}x**" for x in merged)])
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
GAME_TITLES = {"ms_pacman": "MsPacman"}
FIGURES = {
    "everything, an iteration": "total per iteration",
    "held": "observations",
    "add of 4 envs": "add (4 environments)",
    "memory of none": "memory, relative to `none`",
}
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
        for row in (row for row in measured if row["case"] == case):
            ours, theirs = float(row["ours"]), float(row["sb3"])
            # three digits, never in scientific notation
            figures = [f"{float(f'{value:.3g}'):,.15g} {row['unit']}" for value in (ours, theirs)]
            name = FIGURES.get(row["figure"], row["figure"])
            lines.append([title, name, *figures, f"{ours / theirs:.3g}x"])
            title = ""
    return table(["benchmark", "figure", "compressed", "SB3", "ratio"], lines)


def plot(measured: list[Row], path: Path) -> None:
    """Plot memory versus sampling time, both relative to SB3's buffer."""
    figure, axes = plt.subplots(figsize=(8, 5.5), layout="constrained")
    ours = {"auto", "delta", "delta2", "delta3", "zstd3+dictionary"}
    for row in measured:
        x, y = ratio(row, "sample256_us"), 100 * share(row)
        highlight = row["method"] in ours
        size, color, layer = (60, "tab:red", 3) if highlight else (28, "tab:grey", 2)
        axes.scatter(x, y, s=size, color=color, zorder=layer)
        label = "SB3 (dense)" if row["method"] == "sb3" else row["method"]
        axes.annotate(label, (x, y), xytext=(5, 3), textcoords="offset points", fontsize=9 if highlight else 6.5)
    axes.set(
        xscale="log", yscale="log", xlabel="time of sample(256), SB3's buffer = 1", ylabel="resident memory, % of dense"
    )
    axes.set_title(f"{measured[0]['game']}, {int(measured[0]['n_transitions']):,} transitions: down and left is better")
    axes.grid(which="both", alpha=0.3)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def summary() -> str:
    """The summary in the README and on the home page."""
    parts = []
    games = [row for row in rows("games") if row["method"] == "auto"]
    if games:
        memory = [share(row) for row in games]
        filling = [ratio(row, "fill_s") for row in games]
        sampling = [ratio(row, "sample256_us") for row in games]
        parts.append(
            f"- **{statistics.mean(memory):.2%}** of the memory of one dense copy, for observations *and* next "
            f"observations: mean of {len(games)} Atari games (worst {max(memory):.2%})\n"
            f"- filling takes **{statistics.mean(filling):.2f}x** and sampling 256 transitions "
            f"**{statistics.mean(sampling):.2f}x** the time of SB3's `ReplayBuffer` (worst {max(sampling):.2f}x)\n"
        )
    for row in rows("million"):
        parts.append(
            f"- {int(row['n_transitions']):,} {GAME_TITLES.get(row['game'], row['game'])} transitions with all columns "
            f"in **{float(row['resident_bytes']) / 1e9:.2f} GB** of resident memory "
            f"({2 * float(row['dense_bytes']) / 1e9:.0f} GB in SB3's default buffer)\n"
        )
    if games:
        parts.append(f"\n{provenance(games)}")
    return "".join(parts)


def benchmarks_page() -> str:
    """``docs/benchmarks.md``."""
    parts = [
        "# Benchmarks\n",
        "`make docs` renders all figures from the CSV files in `benchmarks/data`; `make bench` measures the first "
        "table again. Memory is the growth of the resident set of a fresh process while it stores observations and "
        "next observations of four environments (84x84x4 stacks), relative to *one* dense copy of the observations. "
        "Times are relative to SB3's `ReplayBuffer` in the same process, with calls interleaved: adding and filling "
        "compared with `optimize_memory_usage=True`, sampling with SB3's default. Below 1 is faster than SB3.\n",
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
        parts += [f"## `{method}` on {len(some)} games\n", game_table(some), provenance(some)]
    for name, title in (("million", "One million transitions"), ("doom", "ViZDoom"), ("plain", "Without numba")):
        some = rows(name)
        if some:
            parts += [f"## {title}\n", other_table(some), provenance(some)]
    some = rows("buffers")
    if some:
        parts += ["## Buffers compared with SB3's\n", buffer_table(some), provenance(some)]
    return "\n".join(parts)


def main() -> None:
    (DOCS / "benchmarks.md").write_text(benchmarks_page())
    if rows("table"):
        plot(rows("table"), DOCS / "memory_speed.png")
    for page in (README, DOCS / "index.md"):
        insert(page, "figures", summary())
    insert(DOCS / "architecture.md", "formats", format_table())
    insert(DOCS / "gpu.md", "gpu", gpu_table())
    insert(DOCS / "files.md", "files", file_table())


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


GPU_BUFFERS = {
    "sb3": "SB3",
    "none": "`none`",
    "delta": "`delta`",
    "delta, pinned": "`delta`, pinned",
    "rle": "`rle`",
    "zstd": "`zstd`",
}


def gpu_table() -> str:
    """Medians of the GPU measurements, one column per buffer."""
    measured = rows("gpu")
    if not measured:
        return ""
    first = measured[0]
    by_figure: dict[tuple[str, str], list[Row]] = {}
    for row in measured:
        by_figure.setdefault((row["figure"], row["buffer"]), []).append(row)
    lines = []
    for figure in dict.fromkeys(row["figure"] for row in measured):
        if "same weights" not in figure:
            values = [_medians(by_figure.get((figure, buffer), [])) for buffer in GPU_BUFFERS]
            lines.append([FIGURES.get(figure, figure), *values])
    same = [row["figure"].split(",")[0] for row in measured if "same weights" in row["figure"] and float(row["p50"])]
    weights = f"{' and '.join(same)} ended with the same weights as with SB3's buffer.\n" if same else ""
    head = f"{int(first['n_transitions']):,} transitions of {first['game']}, four environments, 84x84x4:\n"
    starts = {row["time"] for row in measured if row["unit"] == "us"}
    runs = f", in {len(starts)} runs on different machines" if len(starts) > 1 else ""
    stamp = f"Measured {first['date']} on {first['device']}{runs}; {first['versions']}.\n"
    return f"\n{head}\n{table(['median', *GPU_BUFFERS.values()], lines)}\n{weights}\n{stamp}\n"


def _medians(measured: list[Row]) -> str:
    """The median of each run, in the order of the runs."""
    if not measured:
        return ""
    values = [float(row["p50"]) for row in measured]
    texts = [f"{value:.4g}" if value < 1e4 else f"{value:.0f}" for value in values]
    return f"{', '.join(dict.fromkeys(texts))} {measured[0]['unit']}"


def file_table() -> str:
    """Saved buffers of several sizes, and SB3's pickle where it was measured."""
    measured = rows("files")
    if not measured:
        return ""
    header, columns = [""], []
    for row in measured:
        header.append(f"{int(row['n_transitions']):,} transitions")
        new = f", {float(row['incremental_bytes']) / 1e6:.1f} MB written"
        columns.append(
            [
                f"{float(row['bytes']) / 1e6:.1f} MB",
                f"{float(row['save_s']):.3f} s",
                f"{float(row['save_peak_bytes']) / 1e6:.1f} MB",
                f"{float(row['incremental_s']):.3f} s{new}",
                f"{float(row['load_s']):.3f} s",
                f"{float(row['open_s']):.3f} s, {float(row['open_resident_bytes']) / 1e6:.1f} MB resident",
            ]
        )
        if row["sb3_bytes"]:
            header.append(f"{int(row['n_transitions']):,}, SB3's pickle")
            size, seconds = float(row["sb3_bytes"]) / 1e6, float(row["sb3_save_s"])
            columns.append([f"{size:.1f} MB", f"{seconds:.3f} s", "", "a full save", "", ""])
    names = ["size", "save", "additional memory while saving", "save after 1000 new transitions", "load", "open"]
    lines = [list(line) for line in zip(names, *columns, strict=True)]
    return f"\n{table(header, lines)}\n{provenance(measured)}\n"


def other_table(measured: list[Row]) -> str:
    """A table with those of the optional columns that all rows have."""
    optional: list[tuple[str, Any]] = [
        ("add", lambda row: f"{ratio(row, 'add_us'):.2f}x"),
        ("fill", lambda row: f"{ratio(row, 'fill_s'):.2f}x"),
        ("sample 32", lambda row: f"{ratio(row, 'sample32_us'):.2f}x"),
        ("sample 256", lambda row: f"{ratio(row, 'sample256_us'):.2f}x"),
        ("sample 32, relative to 10,000 transitions", lambda row: f"{_against_small(row, 32):.2f}x"),
        ("sample 256, relative to 10,000 transitions", lambda row: f"{_against_small(row, 256):.2f}x"),
    ]
    columns = [(name, show) for name, show in optional if all(_is_measured(show, row) for row in measured)]
    header = ["game", "method", "transitions", "resident", "% of dense", *(name for name, _ in columns)]
    lines = [
        [
            GAME_TITLES.get(row["game"], row["game"]),
            f"`{row['method']}`",
            f"{int(row['n_transitions']):,}",
            megabytes(row),
            f"{share(row):.2%}",
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
