"""Write ``docs/benchmarks.md`` and its plots from the measurements in ``benchmarks/data``; nothing is typed by hand."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

DATA = Path(__file__).parent / "data"
DOCS = Path(__file__).parents[1] / "docs"
README = Path(__file__).parents[1] / "README.md"

Row = dict[str, str]


def rows(name: str) -> list[Row]:
    """Measurements of one suite, or none if it was not run."""
    path = DATA / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def share(row: Row) -> float:
    """Resident memory as a part of one dense copy."""
    return float(row["resident_bytes"]) / float(row["dense_bytes"])


def times(row: Row, what: str) -> float:
    """A time as a multiple of SB3's in the same run."""
    return float(row[what]) / float(row[f"sb3_{what}"])


def megabytes(row: Row) -> str:
    count = float(row["resident_bytes"]) / 1e6
    return f"{count:.1f} MB" if count < 1000 else f"{count / 1000:.2f} GB"


def table(header: list[str], lines: list[list[str]]) -> str:
    head = f"| {' | '.join(header)} |\n|{'---|' * len(header)}\n"
    return head + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def about(measured: list[Row]) -> str:
    """When, where and with what a suite was measured."""
    dates = sorted({row["date"] for row in measured})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"Measured {when} on {measured[-1]['machine']}; {measured[-1]['versions']}.\n"


def method_table(measured: list[Row]) -> str:
    """All methods on one game, smallest first."""
    header = ["method", "resident", "% of dense", "add", "fill", "sample 32", "sample 256"]
    lines = []
    for row in sorted(measured, key=share):
        name = f"`{row['method']}`" if row["method"] != "sb3" else "SB3's `ReplayBuffer`"
        lines.append(
            [name, megabytes(row), f"{share(row):.2%}"]
            + [f"{times(row, what):.2f}x" for what in ("add_us", "fill_s", "sample32_us", "sample256_us")]
        )
    return table(header, lines)


def game_table(measured: list[Row]) -> str:
    """One method on many games, with the mean and the worst."""
    header = ["game", "% of dense", "add", "fill", "sample 32", "sample 256"]
    timed = ("add_us", "fill_s", "sample32_us", "sample256_us")
    lines = [
        [row["game"], f"{share(row):.2%}", *(f"{times(row, what):.2f}x" for what in timed)]
        for row in sorted(measured, key=share)
    ]
    for name, merge in (("**mean**", statistics.mean), ("**worst**", max)):
        merged = [merge([times(row, what) for row in measured]) for what in timed]
        lines.append([name, f"**{merge([share(row) for row in measured]):.2%}**", *(f"**{x:.2f}x**" for x in merged)])
    return table(header, lines)


CASES = {
    "replay": "`CompressedReplayBuffer`, MsPacman, 40,000 transitions",
    "rollout": "`CompressedRolloutBuffer`, Pong, 8 environments x 128 steps, batches of 256",
    "vector": "`CompressedReplayBuffer`, 17 floats",
    "save": "`save_replay_buffer`, MsPacman, 100,000 transitions",
    "ppo": "training PPO on Pong, 8 environments x 128 steps, 4 epochs",
    "dqn": "training DQN on MsPacman",
}


def buffer_table(measured: list[Row]) -> str:
    """What was measured of the SB3 buffers, in both and as a ratio."""
    lines = []
    for case, title in CASES.items():
        for row in (row for row in measured if row["case"] == case):
            ours, theirs = float(row["ours"]), float(row["sb3"])
            figures = [f"{value:.3g} {row['unit']}" for value in (ours, theirs)]
            lines.append([title, row["figure"], *figures, f"{ours / theirs:.3g}x"])
            title = ""
    return table(["what", "figure", "ours", "SB3's", "ratio"], lines)


def plot(measured: list[Row], path: Path) -> None:
    """Memory against sampling time, both relative to SB3's buffer."""
    figure, axes = plt.subplots(figsize=(8, 5.5), layout="constrained")
    ours = {"auto", "delta", "delta2", "delta3", "zstd3+dictionary"}
    for row in measured:
        x, y = times(row, "sample256_us"), 100 * share(row)
        mine = row["method"] in ours
        axes.scatter(x, y, s=60 if mine else 28, color="tab:red" if mine else "tab:grey", zorder=3 if mine else 2)
        label = "SB3 (dense)" if row["method"] == "sb3" else row["method"]
        axes.annotate(label, (x, y), xytext=(5, 3), textcoords="offset points", fontsize=9 if mine else 6.5)
    axes.set(
        xscale="log", yscale="log", xlabel="time of sample(256), SB3's buffer = 1", ylabel="resident memory, % of dense"
    )
    axes.set_title(f"{measured[0]['game']}, {int(measured[0]['n_transitions']):,} transitions: down and left is better")
    axes.grid(which="both", alpha=0.3)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def summary() -> str:
    """The few lines of the README, between its markers."""
    parts = []
    games = [row for row in rows("games") if row["method"] == "auto"]
    if games:
        memory = [share(row) for row in games]
        fast = [times(row, "sample256_us") for row in games]
        parts.append(
            f"- **{statistics.mean(memory):.2%}** of the memory of one dense copy, mean of {len(games)} Atari games "
            f"(worst {max(memory):.2%}), observations *and* next observations\n"
            f"- filling takes **{statistics.mean(times(row, 'fill_s') for row in games):.2f}x** and sampling 256 "
            f"transitions **{statistics.mean(fast):.2f}x** the time of SB3's `ReplayBuffer` (worst {max(fast):.2f}x)\n"
        )
    for row in rows("million"):
        parts.append(
            f"- {int(row['n_transitions']):,} {row['game'].replace('_', ' ')} transitions with all columns in "
            f"**{float(row['resident_bytes']) / 1e9:.2f} GB** of resident memory "
            f"({2 * float(row['dense_bytes']) / 1e9:.0f} GB in SB3's default buffer)\n"
        )
    if games:
        parts.append(f"\n{about(games)}")
    return "".join(parts)


def main() -> None:
    DOCS.mkdir(exist_ok=True)
    parts = [
        "# Benchmarks\n",
        "Every figure here is rendered from the CSV files in `benchmarks/data` by `make docs`; `make bench` measures "
        "the first table anew. Memory is the growth of the resident set in a fresh process while 84x84x4 stacks, four "
        "environments and both observations and next observations are stored, relative to *one* dense copy of the "
        "observations. Times are multiples of SB3's `ReplayBuffer` in the same process, calls interleaved: adding and "
        "filling against `optimize_memory_usage=True`, sampling against SB3's default. Below 1 is faster than SB3.\n",
    ]
    fills = [float(row["sb3_fill_s"]) for name in ("table", "games") for row in rows(name) if row["sb3_fill_s"]]
    if fills:
        parts.append(
            f"SB3 took {min(fills):.1f} to {max(fills):.1f} s to fill, depending on what the system asked for memory "
            "that is touched for the first time: of the ratios, those for filling vary most.\n"
        )
    measured = rows("table")
    if measured:
        plot(measured, DOCS / "memory_speed.png")
        parts += [
            f"## Methods on {measured[0]['game']}\n",
            "![memory against sampling time](memory_speed.png)\n",
            method_table(measured),
            about(measured),
        ]
    for method in sorted({row["method"] for row in rows("games")}):
        some = [row for row in rows("games") if row["method"] == method]
        parts += [f"## `{method}` on {len(some)} games\n", game_table(some), about(some)]
    for name, title in (("million", "One million transitions"), ("doom", "ViZDoom"), ("plain", "Without numba")):
        some = rows(name)
        if some:
            parts += [f"## {title}\n", other_table(some), about(some)]
    some = rows("buffers")
    if some:
        parts += ["## The buffers beside SB3's\n", buffer_table(some), about(some)]
    (DOCS / "benchmarks.md").write_text("\n".join(parts))
    for page in (README, DOCS / "index.md"):
        insert(page, "figures", summary())
    insert(DOCS / "architecture.md", "formats", format_table())
    insert(DOCS / "gpu.md", "gpu", gpu_table())
    insert(DOCS / "files.md", "files", file_table())


def insert(path: Path, name: str, text: str) -> None:
    """Replace what lies between the markers of ``name``."""
    before, begin, rest = path.read_text().partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    if not end:
        raise SystemExit(f"{path} has no markers for {name!r}")
    path.write_text(f"{before}{begin}{text}{end}{after}")


def format_table() -> str:
    """The formats that were tried, game by game."""
    measured = rows("formats")
    if not measured:
        return ""
    games = list(dict.fromkeys(row["game"] for row in measured))
    sizes = {(row["format"], row["game"]): float(row["percent_of_stack"]) for row in measured}
    formats = dict.fromkeys(row["format"] for row in measured)
    lines = [[name, *(f"{sizes[name, game]:.2f}" for game in games)] for name in formats]
    return f"\n{table(['per frame', *games], lines)}\n{about(measured)}\n"


GPU_BUFFERS = {
    "sb3": "SB3's",
    "none": "`none`",
    "delta": "`delta`",
    "delta, pinned": "`delta`, pinned",
    "rle": "`rle`",
    "zstd": "`zstd`",
}


def gpu_table() -> str:
    """Medians of what was measured on a GPU, a column for each buffer, and trainings beside SB3's; of every run."""
    measured = rows("gpu")
    if not measured:
        return ""
    first = measured[0]
    found: dict[tuple[str, str], list[Row]] = {}
    for row in measured:
        found.setdefault((row["figure"], row["buffer"]), []).append(row)
    lines = []
    for figure in dict.fromkeys(row["figure"] for row in measured):
        if "same weights" not in figure:
            lines.append([figure, *(_medians(found.get((figure, buffer), [])) for buffer in GPU_BUFFERS)])
    same = [row["figure"].split(",")[0] for row in measured if "same weights" in row["figure"] and float(row["p50"])]
    learnt = f"{' and '.join(same)} ended with the same weights as with SB3's buffer.\n" if same else ""
    head = f"{int(first['n_transitions']):,} transitions of {first['game']}, four environments, 84x84x4:\n"
    times = {row["time"] for row in measured if row["unit"] == "us"}
    runs = f", in {len(times)} runs on machines of their own" if len(times) > 1 else ""
    about = f"Measured {first['date']} on {first['device']}{runs}; {first['versions']}.\n"
    return f"\n{head}\n{table(['median', *GPU_BUFFERS.values()], lines)}\n{learnt}\n{about}\n"


def _medians(measured: list[Row]) -> str:
    """The median of each run, in the order of the runs."""
    if not measured:
        return ""
    values = [float(row["p50"]) for row in measured]
    shown = [f"{value:.4g}" if value < 1e4 else f"{value:.0f}" for value in values]
    return f"{', '.join(dict.fromkeys(shown))} {measured[0]['unit']}"


def file_table() -> str:
    """Saved buffers of several sizes, and SB3's pickle where there was one."""
    measured = rows("files")
    if not measured:
        return ""
    header, columns = [""], []
    for row in measured:
        header.append(f"{int(row['n_transitions']):,}")
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
            header.append("SB3's pickle of them")
            size, seconds = float(row["sb3_bytes"]) / 1e6, float(row["sb3_save_s"])
            columns.append([f"{size:.1f} MB", f"{seconds:.3f} s", "", "all of it again", "", ""])
    names = ["bytes", "save", "memory on top, while saving", "save again after 1000 new transitions", "load", "open"]
    lines = [[name, *(column[place] for column in columns)] for place, name in enumerate(names)]
    return f"\n{table(header, lines)}\n{about(measured)}\n"


def other_table(measured: list[Row]) -> str:
    """Whatever columns the rows have."""
    wanted: list[tuple[str, Any]] = [
        ("add", lambda row: f"{times(row, 'add_us'):.2f}x"),
        ("fill", lambda row: f"{times(row, 'fill_s'):.2f}x"),
        ("sample 32", lambda row: f"{times(row, 'sample32_us'):.2f}x"),
        ("sample 256", lambda row: f"{times(row, 'sample256_us'):.2f}x"),
        ("sample 32 against 10,000", lambda row: f"{_against_small(row, 32):.2f}x"),
        ("sample 256 against 10,000", lambda row: f"{_against_small(row, 256):.2f}x"),
    ]
    known = [(name, show) for name, show in wanted if all(_shows(show, row) for row in measured)]
    header = ["game", "method", "transitions", "resident", "% of dense", *(name for name, _ in known)]
    lines = [
        [row["game"], f"`{row['method']}`", f"{int(row['n_transitions']):,}", megabytes(row), f"{share(row):.2%}"]
        + [show(row) for _, show in known]
        for row in measured
    ]
    return table(header, lines)


def _against_small(row: Row, batch: int) -> float:
    return float(row[f"sample{batch}_us"]) / float(row[f"small_sample{batch}_us"])


def _shows(show: Any, row: Row) -> bool:
    try:
        show(row)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    main()
