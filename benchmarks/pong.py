"""PPO on Pong with the rollout compressed on the GPU and with SB3's own buffer.

Both runs start from one seed with deterministic kernels, so every iteration must give the same losses and weights. Each
writes one row per iteration; the trained agent is then evaluated on whole games.

``--collect FOLDER …`` copies the results of runs to ``benchmarks/data``; ``--render`` renders page and plot from there.
"""

from __future__ import annotations

import argparse
import copy
import csv
import datetime
import os
import platform
import shutil
import time
import zlib
from pathlib import Path
from typing import Any

# read by cuBLAS when it starts: makes its results deterministic
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import numpy as np
import stable_baselines3
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.utils import LinearSchedule

from benchmarks.results import DATA, ROOT, read_rows, replace_rows, write_rows
from sb3_extra_buffers.errors import MissingExtraError
from sb3_extra_buffers.gpu_buffers import GpuRolloutBuffer
from sb3_extra_buffers.training_utils.atari import make_env
from sb3_extra_buffers.training_utils.eval_model import EvalResult, eval_model

DOCS = ROOT / "docs"
GAME = "PongNoFrameskip-v4"
# suffix of the buffer's name for a run that continued from the model of an earlier one
RESUMED = "-resumed"
LOSSES = ("loss", "policy_gradient_loss", "value_loss", "entropy_loss", "approx_kl")
# columns that must be bit-identical in both runs
SAME = ("timesteps", "episodes", "mean_reward", *LOSSES, "weights")
CURVE = ("buffer", "iteration", "seconds", *SAME)


class Curve(BaseCallback):
    """Writes a row after each iteration, anneals the entropy coefficient, and stops the training at its limits."""

    def __init__(self, path: Path, buffer: str, options: argparse.Namespace) -> None:
        super().__init__()
        self._buffer, self._stop_at, self._limit = buffer, options.stop_at, options.seconds
        self._entropies, self._schedule = (options.entropy, options.last_entropy), options.timesteps
        self.rows: list[dict[str, Any]] = []
        self._file = path.open("w", newline="")
        self._writer = csv.DictWriter(self._file, CURVE, lineterminator="\n")
        self._writer.writeheader()
        self._over = False
        self.stored = 0
        # weights of the last part of the training, by number of steps
        self.agents: dict[int, dict[str, torch.Tensor]] = {}

    def _on_training_start(self) -> None:
        self._start = time.perf_counter()
        self._episodes = 0

    def _on_step(self) -> bool:
        self._episodes += sum("episode" in info for info in self.locals["infos"])
        return not self._over

    def _on_rollout_start(self) -> None:
        # every rollout but the first follows an update
        if self.num_timesteps:
            self._row()

    def _on_rollout_end(self) -> None:
        model: Any = self.model
        first, last = self._entropies
        model.ent_coef = last + (first - last) * max(1 - self.num_timesteps / self._schedule, 0)
        # only now and then, so that it does not affect the time
        if len(self.rows) % 20 == 0:
            rollout = model.rollout_buffer
            dense = self._buffer == "sb3"
            self.stored = int(rollout.observations.nbytes if dense else rollout.memory_usage().total)

    def _on_training_end(self) -> None:
        if not self._over:
            self._row()
        self._file.close()

    def _row(self) -> None:
        finished = [episode["r"] for episode in self.model.ep_info_buffer or ()]
        mean = float(np.mean(finished)) if finished else float("nan")
        weights = torch.cat([part.detach().flatten() for part in self.model.policy.parameters()]).cpu().numpy()
        row: dict[str, Any] = {
            "buffer": self._buffer,
            "iteration": len(self.rows) + 1,
            # the weights have been copied, so the device is done
            "seconds": round(time.perf_counter() - self._start, 3),
            "timesteps": self.num_timesteps,
            "episodes": self._episodes,
            "mean_reward": mean,
            "weights": f"{zlib.crc32(weights):08x}",
        }
        # all digits, so that rounding hides no difference
        row |= {name: repr(float(self.logger.name_to_value[f"train/{name}"])) for name in LOSSES}
        self._writer.writerow(row)
        self._file.flush()
        self.rows.append(row)
        if len(self.rows) % 5 == 1:
            speed = row["timesteps"] / row["seconds"]
            print(f"{self._buffer}: {row['timesteps']:,} steps, {row['seconds']:.0f} s, ", end="")
            print(f"{speed:,.0f} steps/s, {self._episodes} games, mean reward {mean:.2f}", flush=True)
        self._over = row["seconds"] > self._limit or (len(finished) == 100 and mean >= self._stop_at)
        if self.num_timesteps > (0.6 + 0.08 * len(self.agents)) * self._schedule:
            self.agents[self.num_timesteps] = copy.deepcopy(self.model.policy.state_dict())


def make_model(buffer: str, env: Any, options: argparse.Namespace, n_steps: int) -> PPO:
    ours: dict[str, Any] = {
        "rollout_buffer_class": GpuRolloutBuffer,
        "rollout_buffer_kwargs": {"compression_method": buffer, "buffer_device": options.device},
    }
    return PPO(
        "CnnPolicy",
        env,
        n_steps=n_steps,
        batch_size=min(options.batch_size, n_steps * options.n_envs),
        n_epochs=options.epochs,
        learning_rate=LinearSchedule(options.learning_rate, options.learning_rate / 10, 1.0),
        clip_range=LinearSchedule(options.clip_range, options.clip_range / 10, 1.0),
        ent_coef=options.entropy,
        vf_coef=0.5,
        gamma=0.99,
        gae_lambda=0.95,
        policy_kwargs={"optimizer_kwargs": {"eps": 1e-5, "fused": options.device == "cuda"}},
        seed=options.seed,
        device=options.device,
        **({} if buffer == "sb3" else ours),
    )


def train(buffer: str, env: Any, options: argparse.Namespace) -> tuple[PPO, Curve]:
    """Train a model and write the row of the run; return the model and its learning curve."""
    # warm up: compile and tune
    warm = make_model(buffer, env, options, 8)
    warm.learn(2 * 8 * options.n_envs, log_interval=None)  # type: ignore[arg-type]  # None: no logs
    # from here on everything depends on the seed only, including the games
    model = make_model(buffer, env, options, options.n_steps)
    if options.resume:
        model.policy.load_state_dict(PPO.load(options.resume, device=options.device).policy.state_dict())
        buffer += RESUMED
    curve = Curve(options.output / f"pong_curve_{buffer}.csv", buffer, options)
    model.learn(options.timesteps, callback=curve, log_interval=None)  # type: ignore[arg-type]
    last = curve.rows[-1]
    packages = {"torch": torch, "numpy": np, "stable-baselines3": stable_baselines3}
    versions = [f"Python {platform.python_version()}", *(f"{name} {m.__version__}" for name, m in packages.items())]
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    run = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{gpu}, {os.cpu_count()} CPU cores",
        "versions": ", ".join(versions),
        "buffer": buffer,
        "timesteps": last["timesteps"],
        "seconds": last["seconds"],
        "mean_reward": last["mean_reward"],
        "rollout_bytes": curve.stored,
    }
    settings = (
        "n_envs",
        "n_steps",
        "batch_size",
        "epochs",
        "learning_rate",
        "clip_range",
        "entropy",
        "last_entropy",
        "seed",
        "stop_at",
    )
    run |= {name: vars(options)[name] for name in settings} | {"schedule": options.timesteps}
    write_rows(options.output / f"pong_run_{buffer}.csv", [run])
    size = f"a rollout of {curve.stored / 1e6:.2f} MB"
    print(f"{buffer}: {run['timesteps']:,} steps in {run['seconds']} s, {size}", flush=True)
    return model, curve


def evaluate(model: PPO, curve: Curve, env: Any, options: argparse.Namespace) -> None:
    """Evaluate the last agent on whole games and, if it is not good enough, earlier ones; save and keep the best.

    Pong has no lives, and clipping does not change its rewards, so the training environments can be used.
    """
    evaluated: dict[str, list[dict[str, Any]]] = {}
    best = -np.inf
    n_steps = curve.rows[-1]["timesteps"]
    agents = curve.agents | {n_steps: copy.deepcopy(model.policy.state_dict())}
    for timesteps, weights in sorted(agents.items(), reverse=True):
        name = "Final" if timesteps == n_steps else "Best"
        if best >= options.good:
            break
        model.policy.load_state_dict(weights)
        env.seed(options.seed + 10_000)
        result = eval_model(model, env, options.episodes, name=name, progress_bar=False)
        print(f"after {timesteps:,} steps: {result.rewards.mean():.2f}", flush=True)
        rows = [
            {"agent": name, "timesteps": timesteps, "reward": reward, "length": length}
            for reward, length in zip(result.rewards, result.lengths, strict=True)
        ]
        if name == "Final" or result.rewards.mean() > best:
            evaluated[name] = rows
        if result.rewards.mean() > best:
            best, best_weights = result.rewards.mean(), weights
            save(model, options.output / "pong_model.zip")
        write_rows(options.output / "pong_eval.csv", [row for rows in evaluated.values() for row in rows])
    model.policy.load_state_dict(best_weights)


def film(model: Any, path: Path, options: argparse.Namespace) -> None:
    """Record part of a game as the agent sees it."""
    from sb3_extra_buffers.recording import record_agent

    env = make_env(GAME, 1, framestack=4, native=True, seed=options.seed + 10_000)
    try:
        recorded = record_agent(model, env, options.film_steps)
        recorded.export(path, scale=2, fps=30)
        print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB")
    except MissingExtraError as missing:
        print(f"no recording: {missing}")
    env.close()


def save(model: PPO, path: Path) -> None:
    """Save the agent without the state of the optimiser, which is twice as large as its weights."""
    model.policy.optimizer = model.policy.optimizer_class(model.policy.parameters())
    model.save(path)


def differences(curves: list[dict[str, str]]) -> tuple[int, list[int]]:
    """Number of iterations that both runs have, and which of them differ."""
    by_buffer: dict[str, list[tuple[str, ...]]] = {}
    for row in curves:
        if not row["buffer"].endswith(RESUMED):
            by_buffer.setdefault(row["buffer"], []).append(tuple(row[name] for name in SAME))
    if len(by_buffer) != 2:
        raise SystemExit(f"expected the curves of two buffers, found {', '.join(by_buffer) or 'none'}")
    pairs = list(zip(*by_buffer.values(), strict=False))
    return len(pairs), [number for number, (ours, theirs) in enumerate(pairs, 1) if ours != theirs]


def collect(folders: list[Path]) -> None:
    """Copy the results of runs to ``benchmarks/data`` and ``docs/images``."""
    for kind in ("curve", "run"):
        paths = [path for folder in folders for path in sorted(folder.glob(f"pong_{kind}_*.csv"))]
        rows = [row for path in paths for row in read_rows(path)]
        if rows:
            replace_rows(DATA / f"pong_{kind}s.csv", rows, ("buffer",))
    for folder in folders:
        for name, target in (("pong_eval.csv", DATA), ("pong.gif", DOCS / "images")):
            if (folder / name).exists():
                target.mkdir(exist_ok=True)
                shutil.copyfile(folder / name, target / name)


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
            render.quantity(int(row["rollout_bytes"]), "B"),
        ]
        for name, row in runs.items()
    ]
    same = ""
    if "sb3" in runs:
        shared, different = differences(curves)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--buffers",
        nargs="+",
        default=["delta", "sb3"],
        help="compression methods in this order; sb3 is SB3's own buffer",
    )
    parser.add_argument("--output", type=Path, default=Path("logs/pong"), help="folder for curves, model and recording")
    parser.add_argument("--n-envs", type=int, default=128)
    parser.add_argument("--n-steps", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--clip-range", type=float, default=0.2)
    parser.add_argument("--entropy", type=float, default=0.01, help="entropy coefficient at the start")
    parser.add_argument(
        "--last-entropy", type=float, default=0.0, help="entropy coefficient at the end of the schedules"
    )
    parser.add_argument("--resume", type=Path, help="model of an earlier run to continue from, with a new optimiser")
    parser.add_argument("--timesteps", type=int, default=3_000_000, help="length of the training and of its schedules")
    parser.add_argument("--stop-at", type=float, default=20.6, help="stop at this mean reward of the last 100 games")
    parser.add_argument("--seconds", type=float, default=1e9, help="time limit of a training run")
    parser.add_argument("--episodes", type=int, default=100, help="games to evaluate the first run on; 0 for none")
    parser.add_argument(
        "--good", type=float, default=20.0, help="mean reward above which no earlier agent is evaluated"
    )
    parser.add_argument("--film-steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--collect", type=Path, nargs="+", help="folders of runs to copy to benchmarks/data")
    parser.add_argument("--render", action="store_true", help="only render the page from the CSV files")
    options = parser.parse_args()
    if options.collect or options.render:
        from benchmarks.render import insert

        collect(options.collect or [])
        plot(DOCS / "images" / "pong_curve.png")
        insert(DOCS / "training.md", "pong", section())
        return
    options.output.mkdir(parents=True, exist_ok=True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # uninitialised memory is never read, so filling it would only cost time
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    # validating the arguments of distributions takes longer than using them
    torch.distributions.Distribution.set_default_validate_args(False)
    env = make_env(GAME, options.n_envs, framestack=4, native=True, seed=options.seed)
    curves = []
    for position, buffer in enumerate(options.buffers):
        model, curve = train(buffer, env, options)
        curves += read_rows(options.output / f"pong_curve_{buffer}{RESUMED if options.resume else ''}.csv")
        if position == 0 and options.episodes:
            evaluate(model, curve, env, options)
            film(model, options.output / "pong.gif", options)
    if len(options.buffers) == 2:
        shared, different = differences(curves)
        print(f"{shared} iterations, {len(different)} differ")
        if different:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
