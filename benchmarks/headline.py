"""What a user notices, compared with SB3's default buffers: writes ``benchmarks/data/headline.csv``.

Memory, ``add``, ``sample`` and training, for Atari games and for observations that compress poorly, in main memory
(``--device cpu``) or on a GPU (``--device cuda``). Memory is measured in fresh processes. Times are medians of calls
that alternate between the two buffers in one process; a batch or a trained model that differs from SB3's ends the run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

# read by cuBLAS when it starts: makes its results deterministic
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import numpy as np
from gymnasium import spaces

from benchmarks import feed
from benchmarks.measure import resident
from benchmarks.results import DATA, factor, percent, replace_rows, run_child, run_info
from benchmarks.timing import interleave, quantiles

GAMES = ("Pong", "MsPacman", "Breakout", "Seaquest", "BeamRider", "Enduro", "Frostbite", "Zaxxon")
# neither typical nor easy: RGB frames of a 3D game, vectors, and images that cannot be compressed
OTHERS = ("vizdoom-rgb", "17 floats", "noise")
BATCHES = (32, 256)
TRAININGS = {"cpu": ("PPO, 8 environments", "DQN"), "cuda": ("PPO, 128 environments", "PPO, 512 environments", "DQN")}
METHOD: dict[str, Any] = {"compression_method": "auto"}

Times = list[list[float]]


def stream(name: str, n_steps: int) -> Iterator[feed.Step]:
    """``n_steps`` of four environments."""
    if name not in ("17 floats", "noise"):
        yield from feed.steps(name, n_steps)
        return
    draw = np.random.default_rng(0)
    ends = np.zeros(feed.N_ENVS, bool)

    def make() -> Any:
        if name == "noise":
            return draw.integers(0, 256, (feed.N_ENVS, feed.STACK, *feed.SIZE), np.uint8)
        return draw.normal(size=(feed.N_ENVS, 17)).astype(np.float32)

    obs = make()
    for _ in range(n_steps):
        next_obs = make()
        yield feed.Step(obs, next_obs, ends)
        obs = next_obs


def n_steps_of(name: str) -> int:
    """Steps of each environment: 20,000 transitions, fewer where one takes half a megabyte."""
    return 1000 if name == "vizdoom-rgb" else 5000


def make_buffer(name: str, device: str, kind: str) -> Any:
    """An empty buffer for all steps of a stream, ours or SB3's."""
    from stable_baselines3.common.buffers import ReplayBuffer

    from sb3_extra_buffers.compressed import CompressedReplayBuffer
    from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer

    obs = next(stream(name, n_steps_of(name))).obs
    low, high = (-np.inf, np.inf) if obs.dtype == np.float32 else (0, 255)
    ours = GpuReplayBuffer if device == "cuda" else CompressedReplayBuffer
    extra = METHOD if kind == "ours" else {}
    return (ours if kind == "ours" else ReplayBuffer)(
        n_steps_of(name) * feed.N_ENVS,
        spaces.Box(low, high, obs.shape[1:], obs.dtype.type),
        spaces.Discrete(4),
        device,
        n_envs=feed.N_ENVS,
        **extra,
    )


def transition(step: feed.Step) -> tuple[Any, ...]:
    columns = np.zeros((feed.N_ENVS, 1), np.int64), np.zeros(feed.N_ENVS, np.float32)
    return (step.obs, step.next_obs, *columns, step.dones, [{} for _ in range(feed.N_ENVS)])


def memory(name: str, device: str) -> dict[str, Any]:
    """Growth of this process and of its memory on the device while a buffer is filled, and what SB3's would hold."""
    # everything that happens only once, such as compiling, does not count
    for _ in range(2):
        buffer = make_buffer(name, device, "ours")
        for step in stream(name, n_steps_of(name)):
            buffer.add(*transition(step))
        buffer.sample(32)
        del buffer
    before = resident() + device_bytes(device)
    buffer = make_buffer(name, device, "ours")
    for step in stream(name, n_steps_of(name)):
        buffer.add(*transition(step))
    grown = resident() + device_bytes(device) - before
    theirs = make_buffer(name, device, "sb3")
    columns = (theirs.observations, theirs.next_observations, theirs.actions, theirs.rewards, theirs.dones)
    dense = sum(column.nbytes for column in (*columns, theirs.timeouts))
    # pinned staging memory comes from a pool that the first buffers may have filled already
    held = max(grown, buffer.memory_usage().total) if device == "cuda" else grown
    return {"memory": [[held] * 3, [dense] * 3]}


def device_bytes(device: str) -> int:
    if device == "cpu":
        return 0
    import torch

    torch.cuda.synchronize()
    return int(torch.cuda.memory_allocated())


def speed(name: str, device: str) -> dict[str, Any]:
    """Microseconds of add and sample: p20, p50 and p80 of each buffer."""
    pair = [make_buffer(name, device, kind) for kind in ("ours", "sb3")]
    wait = waiter(device)
    taken: Times = [[], []]
    for position, step in enumerate(stream(name, n_steps_of(name))):
        columns = transition(step)
        new = interleave([lambda b=b, c=columns: (b.add(*c), wait()) for b in pair], 1, position)
        for times, new_times in zip(taken, new, strict=True):
            times += new_times
    # the first calls compile kernels and choose a method
    result = {"add": [quantiles(times[600:]) for times in taken]}
    check(pair)
    for batch in BATCHES:
        repeats = 300 if batch == 32 else 120
        taken = interleave([lambda b=b, n=batch: (b.sample(n), wait()) for b in pair], repeats)
        result[f"sample({batch})"] = [quantiles(times[20:]) for times in taken]
    return result


def waiter(device: str) -> Callable[[], None]:
    """A function that waits until the device is done."""
    if device == "cpu":
        return lambda: None
    import torch

    return torch.cuda.synchronize


def check(pair: list[Any]) -> None:
    """End the run unless both buffers return the same batch at the same seed."""
    import torch

    batches = []
    for buffer in pair:
        np.random.seed(0)  # noqa: NPY002  # SB3's
        batches.append(buffer.sample(512))
    if not all(torch.equal(a, b) for a, b in zip(batches[0][:5], batches[1][:5], strict=True)):
        raise SystemExit("the batches differ from SB3's; nothing is reported")


def training(name: str, device: str) -> dict[str, Any]:
    """Seconds of training runs of one seed with either buffer, in alternation; all must end with the same weights."""
    import torch
    from stable_baselines3.common.callbacks import BaseCallback

    if device == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
        # uninitialised memory is never read, so filling it would only cost time
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
    wait = waiter(device)

    class Stopwatch(BaseCallback):
        """Starts when the environments have been reset."""

        def _on_training_start(self) -> None:
            wait()
            self.start = time.perf_counter()

        def _on_step(self) -> bool:
            return True

    env = None
    taken: Times = [[], []]
    weights = set()
    # the first two runs compile and tune
    for number, kind in enumerate(("ours", "sb3", "ours", "sb3", "sb3", "ours", "ours", "sb3")):
        # hundreds of games take a minute to create; SB3's wrappers do not start a game over that is still going on
        if env is None or not is_native(name, device):
            env = make_training_env(name, device)
        model, n_steps = make_model(name, device, kind, env)
        stopwatch = Stopwatch()
        model.learn(n_steps if number > 1 else n_steps // 3, callback=stopwatch)
        wait()
        if number > 1:
            taken[kind == "sb3"].append(time.perf_counter() - stopwatch.start)
            values = [value.detach().cpu().numpy().tobytes() for value in model.policy.state_dict().values()]
            weights.add(hashlib.sha256(b"".join(values)).hexdigest())
        del model
    if len(weights) > 1:
        raise SystemExit(f"{name}: the trained weights differ; nothing is reported")
    return {name: [quantiles(times) for times in taken]}


def is_native(name: str, device: str) -> bool:
    """Whether ale-py's own vector environment plays the games."""
    return device == "cuda" and name != "DQN"


def make_training_env(name: str, device: str) -> Any:
    from sb3_extra_buffers.training_utils.atari import make_env

    if name == "DQN":
        return make_env("MsPacmanNoFrameskip-v4", n_envs=1, framestack=4, seed=1)
    n_envs = int(name.split()[1])
    return make_env("PongNoFrameskip-v4", n_envs=n_envs, framestack=4, native=is_native(name, device), seed=1)


def make_model(name: str, device: str, kind: str, env: Any) -> tuple[Any, int]:
    """A new model with either buffer, and the steps of a run."""
    from stable_baselines3 import DQN, PPO

    from sb3_extra_buffers.compressed import CompressedReplayBuffer, CompressedRolloutBuffer
    from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer, GpuRolloutBuffer

    gpu = device == "cuda"
    family = "replay" if name == "DQN" else "rollout"
    classes = {
        ("replay", False): CompressedReplayBuffer,
        ("replay", True): GpuReplayBuffer,
        ("rollout", False): CompressedRolloutBuffer,
        ("rollout", True): GpuRolloutBuffer,
    }
    options: dict[str, Any] = {"seed": 1, "device": device}
    if kind == "ours":
        options[f"{family}_buffer_class"] = classes[family, gpu]
        options[f"{family}_buffer_kwargs"] = METHOD
    if name == "DQN":
        return DQN("CnnPolicy", env, buffer_size=20_000, learning_starts=500, **options), 3000 if gpu else 1200
    n_envs = env.num_envs
    n_steps, batch_size, iterations = {8: (128, 256, 1), 128: (64, 512, 9), 512: (32, 2048, 6)}[n_envs]
    model = PPO("CnnPolicy", env, n_steps=n_steps, batch_size=batch_size, n_epochs=4, **options)
    return model, iterations * n_envs * n_steps


def report(device: str, name: str, measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the CSV file; printed too."""
    info = run_info() | {"device": device_name(device), "kind": device}
    rows = []
    for figure, (ours, theirs) in measured.items():
        unit = "bytes" if figure == "memory" else "us"
        names = [f"{who}_{cut}" for who in ("ours", "sb3") for cut in ("p20", "p50", "p80")]
        values = [f"{value:.6g}" for value in (*ours, *theirs)]
        rows.append(info | {"stream": name, "figure": figure, "unit": unit} | dict(zip(names, values, strict=True)))
        print(f"{device}, {name}, {figure}: {ours[1]:.4g} {unit}, SB3 {theirs[1]:.4g}: {ours[1] / theirs[1]:.4f}x")
    return rows


def table() -> str:
    """The table at the top of the README: rows of figures, columns of typical and worst cases."""
    from benchmarks import render

    rows = render.rows("headline")
    lines = []
    for kind in ("cuda", "cpu"):
        measured = [row for row in rows if row["kind"] == kind]
        if not measured:
            continue
        first = measured[0]
        place = first["device"] if kind == "cuda" else f"CPU: {first['machine']}"
        lines.append([f"**{place}**", *[""] * (2 + len(OTHERS))])
        figures = [*reversed(TRAININGS[kind][:-1]), TRAININGS[kind][-1], "memory", "add"]
        for figure in [*figures, *(f"sample({batch})" for batch in BATCHES)]:
            ratios = {row["stream"]: ratio(row) for row in measured if row["figure"] == figure}
            if ratios:
                lines.append(table_line(figure, ratios))
    header = ["", "typical", "worst Atari game", *(TITLES[name] for name in OTHERS)]
    n_games = {
        kind: len({row["stream"] for row in rows if row["kind"] == kind} & set(GAMES)) for kind in ("cuda", "cpu")
    }
    note = (
        "Each figure is relative to SB3's own buffer holding the same transitions, all columns and both observations: "
        "0.50x is half the time, 1 % a hundredth of the memory. Batches and trained weights are bit-identical. "
        f"Typical is the median of {n_games['cpu']} Atari games on the CPU and {n_games['cuda']} on the GPU, with "
        "observations of 84x84x4. `sample` on the GPU includes copying SB3's batch there.\n"
    )
    placed = [row | {"machine": f"{row['device']}: {row['machine']}"} if row["kind"] == "cuda" else row for row in rows]
    by_kind = [[row for row in placed if row["kind"] == kind] for kind in ("cuda", "cpu")]
    stamps = [render.provenance(measured) for measured in by_kind if measured]
    return f"{render.table(header, lines)}\n{note}\n{''.join(stamps)}\n"


TITLES = {"vizdoom-rgb": "ViZDoom, RGB", "17 floats": "17 floats", "noise": "noise"}
TRAINED_ON = {"PPO": "Pong", "DQN": "MsPacman"}


def ratio(row: dict[str, str]) -> float:
    return float(row["ours_p50"]) / float(row["sb3_p50"])


def table_line(figure: str, ratios: dict[str, float]) -> list[str]:
    """One row of the table."""

    def show(value: float | None) -> str:
        if value is None:
            return ""
        return percent(value) if figure == "memory" else factor(value)

    if figure[:3] in TRAINED_ON:
        title = f"training {figure[:3]} on {TRAINED_ON[figure[:3]]}{figure[3:]}"
        return [title, f"**{show(next(iter(ratios.values()), None))}**", *[""] * (1 + len(OTHERS))]
    games = {name: value for name, value in ratios.items() if name in GAMES}
    worst = max(games, key=games.__getitem__)
    typical = f"**{show(statistics.median(games.values()))}**"
    title = figure if figure == "memory" else f"`{figure}`"
    return [title, typical, f"{show(games[worst])} ({worst})", *(show(ratios.get(name)) for name in OTHERS)]


def device_name(device: str) -> str:
    if device == "cpu":
        return "main memory"
    import torch

    return f"{torch.cuda.get_device_name()}, {os.cpu_count()} CPU cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=TRAININGS, default="cpu")
    parser.add_argument("--streams", nargs="*", help="games, vizdoom-rgb, '17 floats' or noise (default: all)")
    parser.add_argument("--what", nargs="+", choices=["memory", "speed"], default=["memory", "speed"])
    parser.add_argument("--trainings", nargs="*", help="such as DQN (default: all of the device)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        what, name = json.loads(options.child)
        measure = {"memory": memory, "speed": speed, "training": training}[what]
        print(json.dumps(measure(name, options.device)))
        return
    streams = GAMES + OTHERS if options.streams is None else options.streams
    trainings = TRAININGS[options.device] if options.trainings is None else options.trainings
    cases = [(what, name) for name in streams for what in options.what]
    for what, name in cases + [("training", name) for name in trainings]:
        if what == "memory" and name not in ("17 floats", "noise"):
            feed.record(name, n_steps_of(name))
        measured = run_child("benchmarks.headline", "--device", options.device, "--child", json.dumps([what, name]))
        title = "MsPacman" if name == "DQN" else "Pong" if what == "training" else name
        replace_rows(DATA / "headline.csv", report(options.device, title, measured), ("kind", "stream", "figure"))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
