"""Renders the results of an earlier training of PPO on Pong, with 128 environments and settings of its own.

``benchmarks.agents`` has replaced the program that measured them: these CSV files are not measured again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.agent_tables import differences
from benchmarks.results import DATA, ROOT, quantity, read_rows
from sb3_extra_buffers.training_utils.eval_model import EvalResult

DOCS = ROOT / "docs"
# suffix of the buffer's name for a run that continued from the model of an earlier one
RESUMED = "-resumed"
LOSSES = ("loss", "policy_gradient_loss", "value_loss", "entropy_loss", "approx_kl")
# columns that must be bit-identical in both runs
SAME = ("timesteps", "episodes", "mean_reward", *LOSSES, "weights")


def section() -> str:
    """The section of the training page."""
    from benchmarks import render  # needs matplotlib, which training runs do not

    runs = {row["buffer"]: row for row in read_rows(DATA / "pong_runs.csv")}
    curves = read_rows(DATA / "pong_curves.csv")
    lines = [
        [
            titles(name)[0],
            f"{int(row['timesteps']):,}",
            f"{float(row['seconds']):.0f} s",
            f"{int(row['timesteps']) / float(row['seconds']):,.0f}",
            quantity(int(row["rollout_bytes"]), "B"),
        ]
        for name, row in runs.items()
    ]
    same = ""
    if "sb3" in runs:
        ours, theirs = ([row for row in curves if row["buffer"] == name] for name in ("delta", "sb3"))
        shared, different = differences(ours, theirs, SAME)
        same = f"{len(different)} of the {shared} iterations that both runs have in common differ. "
        if not different:
            same = (
                f"The {shared} iterations that both runs have in common gave bit-identical rewards, losses and "
                "weights. "
            )
    settings = " ".join(described(name, run) for name, run in runs.items() if name != "sb3")
    parts = [
        "\n![reward of the last 100 games](images/pong_curve.png)\n",
        render.table(["rollout buffer", "steps", "training time", "steps/s", "observations of a rollout"], lines),
        f"{same}{settings}\n",
        pair(read_rows(DATA / "pong_pair.csv")),
        report(
            read_rows(DATA / "pong_eval.csv"), sum(int(row["timesteps"]) for name, row in runs.items() if name != "sb3")
        ),
    ]
    if (DOCS / "images" / "pong.gif").exists():
        parts.append("![the trained agent playing Pong](images/pong.gif)\n")
    parts.append(render.provenance(list(runs.values())))
    return "\n".join(parts) + "\n"


def titles(name: str) -> tuple[str, str]:
    """The name of a run in the table, and in the plot."""
    if name == "sb3":
        return "SB3's `RolloutBuffer`", "SB3's RolloutBuffer"
    method, resumed, _ = name.partition(RESUMED)
    suffix = ", continued" if resumed else ""
    return f"`GpuRolloutBuffer`, `{method}`{suffix}", f"GpuRolloutBuffer, {method}{suffix}"


def described(name: str, run: dict[str, str]) -> str:
    """The settings of a run, in words."""
    start = "The continued run used" if name.endswith(RESUMED) else "The runs used"
    entropy = " decreasing to ".join(dict.fromkeys((run["entropy"], run["last_entropy"])))
    return (
        f"{start} {run['n_envs']} environments x {run['n_steps']} steps, {run['epochs']} epochs in batches of "
        f"{run['batch_size']}, a learning rate of {run['learning_rate']} and a clip range of {run['clip_range']}, both "
        f"decreasing to a tenth at {int(run['schedule']):,} steps, an entropy coefficient of {entropy}, and seed "
        f"{run['seed']}."
    )


def pair(rows: list[dict[str, str]]) -> str:
    """Time of both buffers for the same few iterations on one machine, if measured."""
    if not rows:
        return ""
    seconds = {row["buffer"]: float(row["seconds"]) for row in rows}
    ours = next(name for name in seconds if name != "sb3")
    return (
        "The rows of the table were measured on different machines of this kind, whose processors differ in speed: do "
        f"not compare their times. On one machine, the first {int(rows[0]['timesteps']):,} steps took "
        f"{seconds[ours]:.1f} s with `{ours}` and "
        f"{seconds['sb3']:.1f} s with SB3's buffer ({seconds[ours] / seconds['sb3']:.2f}x), {rows[0]['remark']}.\n"
    )


def report(played: list[dict[str, str]], n_steps: int) -> str:
    """The evaluation as `eval_model` prints it; ``n_steps`` are the total steps of the last agent over all runs."""
    lines, ages = [], []
    last = max((int(row["timesteps"]) for row in played), default=0)
    for agent in dict.fromkeys(row["agent"] for row in played):
        some = [row for row in played if row["agent"] == agent]
        rewards = np.array([float(row["reward"]) for row in some])
        lengths = np.array([int(row["length"]) for row in some])
        lines.append(EvalResult(rewards, lengths, int(lengths.sum())).report(agent))
        ages.append(f"{agent}: after {n_steps - last + int(some[0]['timesteps']):,} steps in total")
    if not played:
        return ""
    return "```text\n{}\n```\n\nWhole games with deterministic actions. {}.\n".format("\n".join(lines), ", ".join(ages))


def plot(path: Path) -> None:
    """Plot reward over steps, where both curves coincide, and over time."""
    from matplotlib import pyplot as plt

    runs = {row["buffer"]: row for row in read_rows(DATA / "pong_runs.csv")}
    curves = read_rows(DATA / "pong_curves.csv")

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for name in dict.fromkeys(row["buffer"] for row in curves):
        rows = [row for row in curves if row["buffer"] == name]
        reward = [float(row["mean_reward"]) for row in rows]
        look: dict[str, Any] = {"color": "tab:red", "label": titles(name)[1]}
        if name == "sb3":
            look |= {"color": "black", "linestyle": ":", "zorder": 3}
        elif name.endswith(RESUMED):
            look["color"] = "tab:orange"
        # a continued run starts where the earlier one ended
        before = runs.get(name.removesuffix(RESUMED), {}) if name.endswith(RESUMED) else {}
        for axis, column, scale in ((axes[0], "timesteps", 1e6), (axes[1], "seconds", 1.0)):
            axis.plot([(float(row[column]) + float(before.get(column, 0))) / scale for row in rows], reward, **look)
    axes[0].set(xlabel="million steps", ylabel="reward, last 100 games")
    axes[1].set(xlabel="seconds")
    axes[0].legend(loc="lower right", fontsize=8)
    for part in axes:
        part.grid(alpha=0.3)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    from benchmarks.render import insert

    plot(DOCS / "images" / "pong_curve.png")
    insert(DOCS / "training.md", "pong", section())


if __name__ == "__main__":
    main()
