"""Prioritised 3-step DQN with a million MsPacman transitions on a desktop: writes ``benchmarks/data/desktop.csv``.

``limit`` fills the buffer and trains in a process that is killed when its resident set passes ``--limit``. ``speed``
loads that buffer in another process, beside SB3's DQN with a dense buffer, and lets both train in turns. The dense
buffer alone nearly takes the limit, so no limit applies there. A buffer that lost a transition ends the run.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import feed, render
from benchmarks.measure import checksums
from benchmarks.results import DATA, ROOT, factor, percent, quantity, replace_rows, run_child, run_info

GAME = "MsPacman"
# as SB3's default of one gradient step for four steps of one environment
N_ENVS = 4
N_STEPS = 3
BATCH = 32
#: The agent that fills the buffers plays at random this often, and so do the trained ones.
EPSILON = 0.05
#: That agent repeats its action for so many steps, which takes less time.
HELD = 4
PAGE = "https://github.com/sb3-extra-buffers/sb3-extra-buffers/blob/main/docs/prioritized.md"
CUTS = (0.2, 0.5, 0.8)
TITLES = {
    "ours": "`prioritized(DQN)`, 3-step, compressed",
    "sb3": "SB3's `DQN`, uniform, 1-step, dense",
    "sb3_3step": "SB3's `DQN`, uniform, 3-step, dense",
}


class Sizes(NamedTuple):
    """How much is measured; a block is what one model trains before the next one's turn."""

    transitions: int = 1_000_000
    sb3_transitions: int = 50_000
    # one step of all environments out of so many is compared after filling
    compared_every: int = 1000
    updates: int = 1000
    block_updates: int = 50
    blocks: int = 22


QUICK = Sizes(4000, 400, 100, 8, 4, 4)
# the first blocks compile kernels and fill caches
WARM_UP = 2


# ---- the limit ----


def peak_resident(process: int | str = "self") -> int:
    """The largest resident set of a process so far, as recorded by the kernel; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def run_limited(limit: int, *arguments: str) -> dict[str, Any]:
    """Run this module in a fresh process, and kill it once more than ``limit`` bytes were resident; return its result.

    The kernel records the peak, so that a short one between two checks is noticed too.
    """
    if not peak_resident():
        raise SystemExit("the limit is enforced with VmHWM of /proc/self/status, which only Linux has")
    command = [sys.executable, "-m", "benchmarks.desktop", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            while process.poll() is None:
                check_peak(peak_resident(process.pid), limit)
                time.sleep(0.02)
        except BaseException:
            # it must not outlive the check
            process.kill()
            raise
        output = process.stdout.read() if process.stdout else ""
    if process.returncode:
        raise SystemExit(f"training failed with status {process.returncode}; see its message above")
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    check_peak(result["peak_bytes"], limit)
    return result


def check_peak(peak: int, limit: int) -> None:
    """End the run if ``peak`` is beyond ``limit``."""
    if peak > limit:
        raise SystemExit(
            f"{quantity(peak, 'B')} were resident and the limit is {quantity(limit, 'B')}: training was stopped, "
            "nothing is reported"
        )


# ---- models and buffers ----


def make_game() -> Any:
    from sb3_extra_buffers.training_utils.atari import make_env

    return make_env(f"{GAME}NoFrameskip-v4", n_envs=N_ENVS, framestack=feed.STACK, seed=feed.SEED, native=True)


def make_model(kind: str, n_transitions: int) -> Any:
    """A DQN with SB3's network and an environment of its own; a key of `TITLES` says which."""
    from stable_baselines3 import DQN

    from sb3_extra_buffers.compressed import prioritized

    make: Any = prioritized(DQN) if kind == "ours" else DQN
    return make(
        "CnnPolicy",
        make_game(),
        buffer_size=n_transitions,
        learning_starts=0,
        batch_size=BATCH,
        train_freq=1,
        gradient_steps=1,
        n_steps=1 if kind == "sb3" else N_STEPS,
        exploration_initial_eps=EPSILON,
        exploration_final_eps=EPSILON,
        seed=0,
        device="cpu",
    )


def trained_agent(env: Any) -> Any:
    """The small network of the examples, which has learned to play."""
    examples = str(ROOT / "examples")
    if examples not in sys.path:
        sys.path.append(examples)
    from small_dqn import load_small_dqn

    return load_small_dqn(env, "cpu").q_net


def fill(model: Any, compared_every: int) -> dict[int, tuple[int, ...]]:
    """Let a trained agent play until the buffer is full; return checksums of every ``compared_every``-th step.

    The model continues from the last observation.
    """
    import torch

    env, buffer, draw = model.get_env(), model.replay_buffer, np.random.default_rng(0)
    agent = trained_agent(env)
    recorded = {}
    obs = env.reset()
    for position in range(buffer.buffer_size):
        if position % HELD == 0:
            with torch.no_grad():
                actions = agent(torch.from_numpy(obs)).argmax(1).numpy()
            actions = np.where(draw.random(N_ENVS) < EPSILON, draw.integers(0, env.action_space.n, N_ENVS), actions)
        following, rewards, dones, infos = env.step(actions)
        next_obs = following.copy()
        for e in np.flatnonzero(dones):
            next_obs[e] = infos[e]["terminal_observation"]
        buffer.add(obs, next_obs, actions, rewards, dones, infos)
        if position % compared_every == 0:
            recorded[position] = checksums(*columns(obs, next_obs, actions, rewards, dones))
        obs = following
    model._last_obs = obs
    return recorded


def columns(obs: Any, next_obs: Any, actions: Any, rewards: Any, dones: Any) -> list[Any]:
    """A step in the dtypes in which SB3's buffer holds it."""
    return [obs, next_obs, actions.astype(np.int64), rewards.astype(np.float32), dones.astype(np.float32)]


def verify(buffer: Any, recorded: dict[int, tuple[int, ...]]) -> int:
    """Refuse to report on a buffer that is not full or does not return what was added.

    Returns the number of transitions that were compared: observations, next observations and all other columns.
    """
    if not buffer.full:
        raise SystemExit("the buffer is not full; nothing is reported")
    buffer.check()
    buffer.observations.store.check()
    arrays = buffer.observations, buffer.next_observations, buffer.actions, buffer.rewards, buffer.dones
    for position, expected in recorded.items():
        if checksums(*columns(*(array[position] for array in arrays))) != expected:
            raise SystemExit(f"step {position} was not returned as it was added; nothing is reported")
    return len(recorded) * N_ENVS


def dense_bytes(model: Any, n_transitions: int) -> int:
    """Bytes of all arrays of SB3's buffer for so many transitions."""
    from stable_baselines3.common.buffers import ReplayBuffer

    some = 100 * N_ENVS
    theirs = ReplayBuffer(some, model.observation_space, model.action_space, "cpu", N_ENVS)
    arrays = [value for value in vars(theirs).values() if isinstance(value, np.ndarray)]
    return sum(array.nbytes for array in arrays) * n_transitions // some


def saved_buffer(sizes: Sizes) -> Path:
    return feed.cache_dir() / f"desktop-{sizes.transitions}"


# ---- measurements ----


def measure_limit(sizes: Sizes) -> dict[str, Any]:
    """Fill a buffer, check it, train with it and save it for `measure_speed`; to be run with a limit."""
    model = make_model("ours", sizes.transitions)
    start = time.perf_counter()
    recorded = fill(model, sizes.compared_every)
    fill_s = time.perf_counter() - start
    n_compared = verify(model.replay_buffer, recorded)
    start = time.perf_counter()
    model.learn(sizes.updates * N_ENVS, reset_num_timesteps=False)
    learn_s = time.perf_counter() - start
    if model._n_updates != sizes.updates:
        raise SystemExit(f"{model._n_updates} gradient steps were made, not {sizes.updates}; nothing is reported")
    model.replay_buffer.check()
    model.save_replay_buffer(saved_buffer(sizes))
    return {
        "transitions": len(model.replay_buffer),
        "buffer_bytes": model.replay_buffer.memory_usage().total,
        "dense_bytes": dense_bytes(model, sizes.transitions),
        "compared": n_compared,
        "fill_s": f"{fill_s:.4g}",
        "updates": sizes.updates,
        "learn_s": f"{learn_s:.4g}",
        "peak_bytes": peak_resident(),
    }


def measure_speed(sizes: Sizes) -> dict[str, Any]:
    """Milliseconds per step of each model, which train in turns with full buffers."""
    models = {kind: make_model(kind, sizes.sb3_transitions) for kind in TITLES}
    ours = models["ours"]
    ours.load_replay_buffer(saved_buffer(sizes))
    # its games are over: do not let a return continue in a new one
    newest = ours.replay_buffer.pos - 1
    ours.replay_buffer.dones[newest] = ours.replay_buffer.timeouts[newest] = 1
    for kind in ("sb3", "sb3_3step"):
        fill(models[kind], sizes.sb3_transitions)
    times: dict[str, list[float]] = {kind: [] for kind in models}
    for block in range(sizes.blocks):
        first = block % len(models)
        for kind in [*models, *models][first : first + len(models)]:
            start = time.perf_counter()
            models[kind].learn(sizes.block_updates * N_ENVS, reset_num_timesteps=False)
            times[kind].append(1e3 * (time.perf_counter() - start) / sizes.block_updates)
    if any(model._n_updates != sizes.blocks * sizes.block_updates for model in models.values()):
        raise SystemExit("the models made different numbers of gradient steps; nothing is reported")
    taken = {kind: np.array(values[WARM_UP:]) for kind, values in times.items()}
    result: dict[str, Any] = {
        "transitions": len(ours.replay_buffer),
        "sb3_transitions": sizes.sb3_transitions,
        "blocks": sizes.blocks - WARM_UP,
        "block_updates": sizes.block_updates,
    }
    for kind, values in taken.items():
        result |= quantiles(f"{kind}_ms", values)
    # of the blocks that were trained one after another
    result |= quantiles("ratio", taken["ours"] / taken["sb3"])
    return result | quantiles("ratio_3step", taken["ours"] / taken["sb3_3step"])


def quantiles(name: str, values: Any) -> dict[str, str]:
    return {f"{name}_p{100 * cut:.0f}": f"{np.quantile(values, cut):.5g}" for cut in CUTS}


# ---- documents ----


def summary(rows: list[dict[str, Any]]) -> str:
    """What the README says about it."""
    by_what = {row["what"]: row for row in rows}
    if by_what.keys() != {"limit", "speed"}:
        return ""
    limit, speed = by_what["limit"], by_what["speed"]
    return (
        f"[Prioritised]({PAGE}) 3-step DQN with {int(limit['transitions']):,} transitions trains in a process limited "
        f"to {quantity(float(limit['limit_bytes']), 'B')} of resident memory. Measured in another process, "
        f"a step takes **{factor(float(speed['ratio_p50']))}** the time of a step of SB3's DQN with "
        f"{int(speed['sb3_transitions']):,} transitions.\n\n"
    )


def section(rows: list[dict[str, Any]]) -> str:
    """The measurements as ``docs/prioritized.md`` shows them."""
    by_what = {row["what"]: row for row in rows}
    parts = [show(by_what[what]) for what, show in (("limit", limit_text), ("speed", speed_table)) if what in by_what]
    return "\n" + "\n".join([*parts, render.provenance(rows), ""]) if parts else ""


def limit_text(row: dict[str, Any]) -> str:
    limit, peak, held, dense = (
        quantity(float(row[f"{name}_bytes"]), "B") for name in ("limit", "peak", "buffer", "dense")
    )
    share = percent(float(row["buffer_bytes"]) / float(row["dense_bytes"]))
    return (
        f"`python -m benchmarks.desktop` fills a buffer with {int(row['transitions']):,} {GAME} transitions of four "
        f"environments, compares {int(row['compared']):,} of them with what was added, trains for "
        f"{int(row['updates']):,} gradient steps and saves the buffer, all in one process that is killed when more "
        f"than {limit} are resident. The peak was **{peak}**, including Python, PyTorch and the networks. The buffer "
        f"takes {held} with its priorities; SB3's arrays would take {dense} ({share}). Filling took "
        f"{quantity(float(row['fill_s']), 's')}.\n"
    )


def speed_table(row: dict[str, Any]) -> str:
    lines = []
    for kind, title in TITLES.items():
        count = int(row["transitions" if kind == "ours" else "sb3_transitions"])
        cuts = [quantity(float(row[f"{kind}_ms_p{100 * cut:.0f}"]), "ms") for cut in CUTS]
        relative = {"ours": "", "sb3": row["ratio_p50"], "sb3_3step": row["ratio_3step_p50"]}[kind]
        lines.append([title, f"{count:,}", *cuts, factor(float(relative)) if relative else ""])
    header = ["model", "transitions", "p20", "median", "p80", "compressed, relative to it"]
    note = (
        "Time per step: one gradient step with a batch of 32 and one step of each of the four environments, in SB3's "
        "`learn` with `CnnPolicy`, with one thread of PyTorch. The three models train in turns in one process, "
        f"{row['block_updates']} steps at a time; the quantiles are those of {row['blocks']} turns, the last "
        "column is the median of the ratios in each round of turns. This process has no limit, because it also holds "
        "the dense buffers.\n"
    )
    return f"{render.table(header, lines)}\n{note}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=["limit", "speed"], default=["limit", "speed"])
    parser.add_argument("--limit", type=float, default=3.0, help="gigabytes that may be resident (default: 3)")
    parser.add_argument("--quick", action="store_true", help="a small buffer; print instead of writing the file")
    parser.add_argument("--render", action="store_true", help="only render the page from the CSV file")
    parser.add_argument("--child", choices=["limit", "speed"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not 0 < options.limit < math.inf:
        parser.error(f"--limit must be a positive number of gigabytes, got {options.limit}")
    limit, sizes = int(1e9 * options.limit), QUICK if options.quick else Sizes()
    quick = ["--quick"] if options.quick else []
    if options.child:
        import torch

        # threads that wait for each other would measure what else the machine does
        torch.set_num_threads(1)
        print(json.dumps({"limit": measure_limit, "speed": measure_speed}[options.child](sizes)))
        return
    rows = []
    for what in [] if options.render else options.what:
        if what == "limit":
            measured = run_limited(limit, "--child", what, *quick) | {"limit_bytes": limit}
        else:
            measured = run_child("benchmarks.desktop", "--child", what, *quick)
        rows.append(run_info("ale-py") | {"what": what, "game": GAME} | measured)
        print(json.dumps(rows[-1], indent=1))
        if not options.quick:
            replace_rows(DATA / "desktop.csv", rows[-1:], ("what",))
    if options.quick:
        print(section(rows))
        return
    render.insert(render.DOCS / "prioritized.md", "desktop", section(render.rows("desktop")))


if __name__ == "__main__":
    main()
