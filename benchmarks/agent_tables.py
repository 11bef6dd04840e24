"""Compares runs of ``python -m benchmarks.agents``, and renders their results from the CSV files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.agent_training import AGENTS, EXAMPLE_ENVS, METHOD, SAME
from benchmarks.results import DATA, ROOT, factor, percent, quantity, read_rows, replace_rows
from sb3_extra_buffers.training_utils.eval_model import EvalResult

DOCS = ROOT / "docs"
README = ROOT / "README.md"
Row = dict[str, Any]
FILES = {name: f"agents_{name}.csv" for name in ("runs", "pairs", "curves", "games")}
# mean rewards of the best and the final agent in the documentation of sb3-extra-buffers 0.5.0 on PyPI
DOCUMENTED = {
    "ppo-pong": ("21.0 +/- 0.00", "21.0 +/- 0.02"),
    "ppo-mspacman": ("2667.0 +/- 290.00", "2500.9 +/- 221.03"),
    "dqn-mspacman": ("3300.0 +/- 770.79", "3379.2 +/- 453.78"),
}


def differences(ours: list[Row], theirs: list[Row], same: Iterable[str] = SAME) -> tuple[int, list[str]]:
    """The number of rows that two logs have in common, and for each that differs in a column of ``same``, where."""
    pairs = list(zip(ours, theirs, strict=False))
    different = []
    for our, their in pairs:
        columns = [f"{name} {our[name]} and {their[name]}" for name in same if our[name] != their[name]]
        if columns:
            different.append(f"row {our['iteration']}: {', '.join(columns)}")
    return len(pairs), different


def comparison(output: Path, agent: str) -> Row | None:
    """Compare both trainings of ``agent`` in ``output``; None without two logs."""
    folders = [output / f"{agent}-{buffer}" for buffer in ("compressed", "dense")]
    logs = [read_rows(folder / "log.csv") for folder in folders]
    if not all(logs):
        return None
    states = [json.loads((folder / "run.json").read_text()) for folder in folders]
    # segments may have changed after the rows that are compared
    settings = [state["settings"] | {"buffer": "", "segment": 0} for state in states]
    if settings[0] != settings[1]:
        raise SystemExit(f"{agent}: the trainings have different settings: {settings[0]} and {settings[1]}")
    shared, different = differences(*logs)
    parts = [state["progress"]["parts"][0] for state in states]
    # times are those of the first part, if it was on one machine; later ones need not be at the same time
    first = min(float(part["timesteps"]) for part in parts)
    timed = [[row for row in log[:shared] if float(row["timesteps"]) <= first][-1] for log in logs]
    return {
        **{name: parts[0][name] for name in ("date", "machine", "versions")},
        "agent": agent,
        "rows": shared,
        "different": len(different),
        "first_difference": different[0] if different else "",
        "timesteps": logs[0][shared - 1]["timesteps"],
        "timed_steps": timed[0]["timesteps"],
        "seconds": timed[0]["seconds"],
        "dense_seconds": timed[1]["seconds"],
        "same_machine": int(parts[0]["machine"] == parts[1]["machine"]),
    }


def compare_all(output: Path, agents: list[str]) -> None:
    """Print whether the trainings of each agent are identical; raise SystemExit unless all are."""
    failed = False
    for agent in agents:
        found = comparison(output, agent)
        if found is None:
            print(f"{agent}: needs the logs of both trainings in {output}")
        elif found["different"]:
            print(f"{agent}: {found['different']} of {found['rows']} rows differ; {found['first_difference']}")
        else:
            ratio = float(found["seconds"]) / float(found["dense_seconds"])
            print(
                f"{agent}: {found['rows']:,} rows of the log, {int(found['timesteps']):,} steps: identical rewards, "
                f"losses and weights; the first {int(found['timed_steps']):,} took {found['seconds']} s compressed, "
                f"{found['dense_seconds']} s dense ({ratio:.2f}x)"
            )
        failed |= found is None or bool(found["different"])
    if failed:
        raise SystemExit(1)


def collect(output: Path, data: Path = DATA, images: Path = DOCS / "images") -> None:
    """Copy the results of all runs in ``output`` to the CSV files in ``data``, and recordings to ``images``."""
    for agent in AGENTS:
        pair = comparison(output, agent)
        if pair is not None:
            replace_rows(data / FILES["pairs"], [pair], ("agent",))
        for buffer in ("compressed", "dense"):
            folder = output / f"{agent}-{buffer}"
            if (folder / "run.json").exists():
                _collect_run(folder, agent, buffer, data)
        folder = output / f"{agent}-compressed"
        games = read_rows(folder / "games.csv")
        if games:
            replace_rows(data / FILES["games"], games, ("agent", "model"))
        if (folder / "play.gif").exists():
            shutil.copyfile(folder / "play.gif", images / f"agent_{agent}.gif")


def _collect_run(folder: Path, agent: str, buffer: str, data: Path) -> None:
    state = json.loads((folder / "run.json").read_text())
    progress, settings = state["progress"], state["settings"]
    parts = progress["parts"]
    run = {
        **{name: parts[-1][name] for name in ("date", "machine", "versions")},
        "agent": agent,
        "buffer": buffer,
        **{name: settings[name] for name in ("device", "seed", "n_envs", "segment")},
        "overrides": json.dumps(settings["overrides"]) if settings["overrides"] else "",
        "schedule": settings["timesteps"],
        "timesteps": progress["timesteps"],
        "seconds": round(progress["seconds"], 1),
        "parts": len(parts),
        "buffer_bytes": progress["buffer_bytes"],
        "dense_bytes": progress["dense_bytes"],
    }
    replace_rows(data / FILES["runs"], [run], ("agent", "buffer"))
    evaluations = {int(steps): reward for steps, reward in progress["evaluations"]}
    log = [row for row in read_rows(folder / "log.csv") if int(row["timesteps"]) <= progress["timesteps"]]
    # about 100 rows, and those of evaluations: the whole log is long
    every = max(len(log) // 100, 1)
    rows = [row for number, row in enumerate(log) if number % every == 0 or int(row["timesteps"]) in evaluations]
    curve = [
        {
            "agent": agent,
            "buffer": buffer,
            **{name: row[name] for name in ("timesteps", "seconds", "games", "mean_reward", "weights")},
            "evaluation": evaluations.get(int(row["timesteps"]), ""),
        }
        for row in rows
    ]
    replace_rows(data / FILES["curves"], curve, ("agent", "buffer"))


def load(data: Path = DATA) -> dict[str, list[Row]]:
    """The rows of all CSV files."""
    return {name: read_rows(data / file) for name, file in FILES.items()}


def results(games: list[Row], agent: str) -> dict[str, tuple[int, EvalResult]]:
    """For the best and the final agent: after how many steps, and the evaluation."""
    evaluated = {}
    for which in ("best", "final"):
        rows = [row for row in games if (row["agent"], row["model"]) == (agent, which)]
        if rows:
            rewards = np.repeat([float(row["reward"]) for row in rows], [int(row["games"]) for row in rows])
            # lengths are neither recorded nor reported
            evaluated[which] = int(rows[0]["timesteps"]), EvalResult(rewards, np.zeros(len(rewards), np.int64), 0)
    return evaluated


def summary(measured: dict[str, list[Row]]) -> str:
    """The table in the README: mean rewards beside the documented ones; empty without evaluations."""
    from benchmarks import render  # needs matplotlib, which training does not

    lines, counts, n_envs = [], set(), set()
    for agent, spec in AGENTS.items():
        evaluated = results(measured["games"], agent)
        run = _run(measured, agent)
        if not evaluated or run is None:
            continue
        means = [
            f"{evaluated[which][1].mean:.1f} +/- {evaluated[which][1].std:.2f}" if which in evaluated else ""
            for which in ("best", "final")
        ]
        counts |= {len(result.rewards) for _, result in evaluated.values()}
        n_envs |= {int(run["n_envs"])}
        lines.append([spec.title, f"{int(run['timesteps']):,}", *means, *DOCUMENTED[agent]])
    if not lines:
        return ""
    header = ["agent", "steps", "best", "final", "best, 0.5.0 on PyPI", "final, 0.5.0 on PyPI"]
    played, environments = (" or ".join(f"{count:,}" for count in sorted(found)) for found in (counts, n_envs))
    if n_envs != {EXAMPLE_ENVS}:
        environments += f" instead of {EXAMPLE_ENVS}"
    note = (
        f"Mean reward and standard deviation over {played} whole games, of agents trained with compressed buffers and "
        f"the settings of the example scripts, with {environments} environments. The columns for 0.5.0 are from its "
        "documentation, for 10,000,000 steps and 10,000 games; its PPO on Pong has no frame stack, ours has a stack of "
        "4.\n"
    )
    return f"\n{render.table(header, lines)}\n{note}\n"


def section(measured: dict[str, list[Row]]) -> str:
    """The results on the training page; empty without runs."""
    from benchmarks import render

    runs = [run for agent in AGENTS if (run := _run(measured, agent)) is not None]
    if not runs:
        return ""
    parts = [summary(measured), "![reward during training](images/agents.png)\n"]
    parts += [_agent(run, measured) for run in runs]
    parts.append(render.provenance(runs))
    return "\n" + "\n".join(part.strip("\n") + "\n" for part in parts if part) + "\n"


def _run(measured: dict[str, list[Row]], agent: str) -> Row | None:
    return next((run for run in measured["runs"] if (run["agent"], run["buffer"]) == (agent, "compressed")), None)


def _agent(run: Row, measured: dict[str, list[Row]]) -> str:
    """One agent in words: training, memory, comparison with the dense buffer, evaluation and recording."""
    agent, steps = run["agent"], int(run["timesteps"])
    spec = AGENTS[agent]
    prefix = "Gpu" if run["device"].startswith("cuda") else "Compressed"
    done = f"{steps:,}" if steps >= int(run["schedule"]) else f"{steps:,} of {int(run['schedule']):,}"
    held, dense = float(run["buffer_bytes"]), float(run["dense_bytes"])
    changed = f" Changed hyperparameters: `{run['overrides']}`." if run["overrides"] else ""
    text = (
        f"### {spec.title}\n\n"
        f"{done} steps in {float(run['seconds']):,.0f} s, with `{prefix}{spec.kind.title()}Buffer` and `{METHOD}`: "
        f"{quantity(held, 'B')}, {percent(held / dense)} of the {quantity(dense, 'B')} in SB3's.{changed}"
        f"{_pair(measured, agent)}\n"
    )
    evaluated = results(measured["games"], agent)
    if evaluated:
        lines = "\n".join(result.report(which.title()) for which, (_, result) in evaluated.items())
        ages = ", ".join(f"{which}: after {age:,} steps" for which, (age, _) in evaluated.items())
        text += f"\n```text\n{lines}\n```\n\nWhole games with deterministic actions; {ages}.\n"
    if (DOCS / "images" / f"agent_{agent}.gif").exists():
        text += f"\n![the agent {spec.title} playing](images/agent_{agent}.gif)\n"
    return text


def _pair(measured: dict[str, list[Row]], agent: str) -> str:
    """The comparison with SB3's buffer, in a sentence."""
    for pair in measured["pairs"]:
        if pair["agent"] != agent:
            continue
        steps = f"{int(pair['timesteps']):,}"
        if int(pair["different"]):
            text = (
                f" In the first {steps} steps, {pair['different']} of {pair['rows']} rows of the log differ from SB3's."
            )
        else:
            text = (
                f" In the first {steps} steps, rewards, losses and weights were bit-identical to those with SB3's "
                f"buffer in all {int(pair['rows']):,} rows of the log."
            )
        if pair["same_machine"] == "1":
            ours, theirs = float(pair["seconds"]), float(pair["dense_seconds"])
            text += (
                f" The first {int(pair['timed_steps']):,} took {ours:,.0f} s, and {theirs:,.0f} s with SB3's "
                f"({factor(ours / theirs)}), all trainings at the same time."
            )
        return text
    return ""


def plot(measured: dict[str, list[Row]], path: Path) -> None:
    """Plot the reward of each agent over steps."""
    from matplotlib import pyplot as plt

    agents = [agent for agent in AGENTS if _run(measured, agent) is not None]
    figure, axes = plt.subplots(1, len(agents), figsize=(4 * len(agents), 3.4), layout="constrained", squeeze=False)
    for agent, axis in zip(agents, axes[0], strict=True):
        for buffer, color, style in (("compressed", "tab:red", "-"), ("dense", "black", ":")):
            curve = [row for row in measured["curves"] if (row["agent"], row["buffer"]) == (agent, buffer)]
            name = "SB3's buffer" if buffer == "dense" else "compressed"
            for column, label, width in (("mean_reward", "last 100 games", 1.0), ("evaluation", "evaluation", 1.8)):
                points = [(int(row["timesteps"]) / 1e6, float(row[column])) for row in curve if row[column]]
                if points:
                    options: Row = {"color": color, "linestyle": style, "linewidth": width}
                    options["alpha"] = 1.0 if column == "evaluation" else 0.5
                    axis.plot(*zip(*points, strict=True), label=f"{name}, {label}", **options)
        final = float(DOCUMENTED[agent][1].partition(" ")[0])
        axis.axhline(final, color="tab:blue", linewidth=1, linestyle="--", label="final, documentation of 0.5.0")
        axis.set(title=AGENTS[agent].title, xlabel="million steps")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("reward")
    axes[0][-1].legend(fontsize=7, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def render_pages() -> None:
    """Render README and training page."""
    from benchmarks.render import insert

    measured = load()
    insert(README, "agents", summary(measured))
    insert(DOCS / "training.md", "agents", section(measured))
    if measured["runs"]:
        plot(measured, DOCS / "images" / "agents.png")
