"""Train, evaluate and record the agents of the documentation: PPO on Pong, PPO on MsPacman and DQN on MsPacman.

SB3's algorithms train the agents with the settings of the example scripts, in ale-py's vector environment, with
compressed buffers: on the GPU if there is one. ``--seconds`` limits one part of a training; the same command continues
it, with exactly the result of a training in one part (see ``agent_runs.py``). ``--buffer dense`` trains with SB3's own
buffer, and ``--compare`` checks that both trainings are identical. Several agents or buffers run at the same time, each
in its own process.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import agent_tables
from benchmarks.agent_runs import Run
from benchmarks.agent_training import AGENTS, EXAMPLE_ENVS, SEGMENT, Settings
from benchmarks.results import whole

any_count = partial(whole, least=0)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agent", nargs="+", choices=AGENTS, default=list(AGENTS))
    parser.add_argument("--buffer", nargs="+", choices=["compressed", "dense"], default=["compressed"])
    parser.add_argument("--output", type=Path, default=Path("logs/agents"), help="folder for all runs")
    training = parser.add_argument_group("training")
    training.add_argument("--seconds", type=float, default=math.inf, help="time limit of this part of the training")
    training.add_argument("--stop-at", type=whole, help="steps at which to stop, before the end of the training")
    training.add_argument("--timesteps", type=whole, default=10_000_000, help="length of the training and schedules")
    training.add_argument(
        "--segment", type=whole, help=f"steps after which a part can end (default: {SEGMENT:,} for each environment)"
    )
    training.add_argument("--row-steps", type=whole, default=1000, help="minimum steps between rows of the log")
    training.add_argument("--n-envs", type=whole, default=EXAMPLE_ENVS)
    training.add_argument(
        "--evaluation-games", type=any_count, default=50, help="games of each evaluation, to keep the best agent"
    )
    training.add_argument("--evaluation-steps", type=whole, default=500_000, help="steps between evaluations")
    training.add_argument(
        "--set", nargs="+", type=hyperparameter, default=[], metavar="NAME=VALUE", help="hyperparameters to change"
    )
    training.add_argument("--seed", type=any_count, default=0)
    training.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    training.add_argument("--position", type=int, help=argparse.SUPPRESS)
    actions = parser.add_argument_group("instead of training")
    actions.add_argument("--compare", action="store_true", help="compare the trainings with both buffers")
    actions.add_argument("--evaluate", nargs="+", choices=["best", "final"], help="play whole games and report")
    actions.add_argument("--games", type=whole, default=1000, help="games to evaluate on")
    actions.add_argument("--record", action="store_true", help="record the best agent as a GIF")
    actions.add_argument("--record-steps", type=whole, default=600, help="length of that GIF")
    actions.add_argument("--collect", action="store_true", help="copy all results to benchmarks/data and docs/images")
    actions.add_argument("--render", action="store_true", help="render README and docs from benchmarks/data")
    return parser.parse_args(arguments)


def hyperparameter(text: str) -> tuple[str, Any]:
    """The name and value of ``NAME=VALUE``, where the value is JSON."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        raise argparse.ArgumentTypeError(
            f"expected NAME=VALUE with a value in JSON, such as n_steps=64, got {text!r}"
        ) from None


def settings_of(options: argparse.Namespace, agent: str, buffer: str) -> Settings:
    lengths = ("timesteps", "row_steps", "n_envs", "evaluation_games", "evaluation_steps")
    return Settings(
        agent,
        buffer,
        segment=options.segment or SEGMENT * options.n_envs,
        overrides=dict(options.set),
        **{name: getattr(options, name) for name in ("seed", "device", *lengths)},
    )


def work(options: argparse.Namespace, agent: str, buffer: str) -> None:
    """Train one agent, or evaluate and record it."""
    folder = options.output / f"{agent}-{buffer}"
    if not (options.evaluate or options.record):
        run = Run(folder, settings_of(options, agent, buffer))
        run.train(options.stop_at or options.timesteps, options.seconds, options.position)
        return
    run = Run.open(folder, options.device)
    for which in options.evaluate or []:
        run.evaluate(which, options.games)
    if options.record:
        run.record("best", options.record_steps)


def side_by_side(pairs: list[tuple[str, str]], arguments: Sequence[str]) -> None:
    """Run each pair of agent and buffer in its own process; raise SystemExit if one fails."""
    base = [sys.executable, "-m", "benchmarks.agents", *arguments]
    # the last of repeated options is used
    children = [
        subprocess.Popen([*base, "--agent", agent, "--buffer", buffer, "--position", str(position)])
        for position, (agent, buffer) in enumerate(pairs)
    ]
    failed = [pair for pair, child in zip(pairs, children, strict=True) if child.wait()]
    if failed:
        raise SystemExit(f"failed: {', '.join(f'{agent} with the {buffer} buffer' for agent, buffer in failed)}")


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    pairs = [(agent, buffer) for agent in options.agent for buffer in options.buffer]
    if options.compare:
        agent_tables.compare_all(options.output, options.agent)
    if options.collect:
        agent_tables.collect(options.output)
    if options.render:
        agent_tables.render_pages()
    if options.compare or options.collect or options.render:
        return
    if len(pairs) > 1:
        side_by_side(pairs, arguments)
    else:
        work(options, *pairs[0])


if __name__ == "__main__":
    main()
