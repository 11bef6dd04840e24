"""Bad arguments to every public method of every buffer: a named error, and nothing is changed.

``python -m tests.torture.arguments`` prints a table of what is not named.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch as th

from sb3_extra_buffers.errors import ExtraBuffersError
from tests.torture.running import Outcome, Report, brief, run_trials
from tests.torture.saveables import Saveable, saveables
from tests.torture.subjects import N_ENVS, Contents, Sb3, Step, difference, make_steps

#: one subject for every public class
CLASSES = {
    "CompressedReplayBuffer": "delta", "CompressedDictReplayBuffer": "dict", "CompressedNStepReplayBuffer": "n-step",
    "CompressedPrioritizedReplayBuffer": "prioritized", "CompressedHerReplayBuffer": "her",
    "CompressedSequenceReplayBuffer": "sequence", "GpuSequenceReplayBuffer": "gpu-sequence",
    "CompressedRolloutBuffer": "rollout", "CompressedDictRolloutBuffer": "dict-rollout",
    "CompressedMaskableRolloutBuffer": "maskable-rollout", "CompressedRecurrentRolloutBuffer": "recurrent-rollout",
    "CompressedArray": "array-delta", "GpuReplayBuffer": "gpu-delta", "GpuRolloutBuffer": "gpu-rollout-delta",
    "RecordBuffer": "recording", "CompressedStorage": "torchrl-delta", "ReplayBuffer": "experience",
    "CompressedReplayService": "service", "CompressedEmbodiedReplay": "embodied",
}  # fmt: skip

Call = tuple[str, list[Any], dict[str, Any]]

#: methods that take no argument worth changing, or that are Gymnasium's, NumPy's and TorchRL's own business
_PLAIN = {
    "size", "reset", "memory_usage", "held_bytes", "check", "set_env", "beta_now", "to_parts", "checkpoint",
    "end_episode", "from_parts",
    "truncate_last_trajectory", "swap_and_flatten", "describe", "load", "open", "save", "export", "astype", "sibling",
    "process_id", "to_torch", "tolist", "copy", "close", "sample_all", "empty_copy", "share", "state_dict", "read_with",
    "stop_sharing", "replay_step",
    "write_with", "write_fitted", "check_data", "load_state_dict", "recover", "stats", "contents", "rate", "empty",
    "all", "any", "argmax", "argmin", "flatten", "item", "max", "mean", "min", "ravel", "std", "sum", "tobytes",
    "transpose", "var", "replay",
}  # fmt: skip

#: called by other layers of the library, never by users, and with arguments that are checked before
HOOKS = {
    "answer", "check_layout", "check_sequences", "compression", "gather", "load_items", "locate_whole", "new_table",
    "next_view", "obs_views", "restore_obs_views", "restore_priorities", "restore_sequences",
    "sequence_columns", "set_length", "set_position", "step_states", "stored_on", "take_over", "use_table",
    "with_step_states",
}  # fmt: skip


# ---- valid calls ----


def calls(name: str, made: Any, step: Step, place: Path) -> Iterator[Call]:
    """Valid calls of the methods of what is called ``name``."""
    subject = getattr(saveables()[name], "subject", None)
    if isinstance(subject, Sb3):
        yield "add", *subject.arguments(made, step)
        if hasattr(made, "sample"):
            yield "sample", [8], {}
        if hasattr(made, "advantages"):
            yield "get", [8], {}
            yield "compute_returns_and_advantage", [th.zeros(N_ENVS), np.zeros(N_ENVS, bool)], {}
        elif "gpu" not in name:
            args, named = subject.arguments(made, step)
            for env, info in enumerate(args[5] if "recurrent_state" in named else []):
                info["recurrent_state"] = {key: part[env] for key, part in named["recurrent_state"].items()}
            yield "extend", [[args[0]], [args[1]], [args[2]], [args[3]], [args[4]], [args[5]]], {}
        if hasattr(made, "sample_sequences"):
            yield "sample_sequences", [8, 3, 1, 2], {"episode_end": "pad", "sample": "steps", "frames": "newest"}
            batch = made.sample_sequences(4, 3)
            yield "update_priorities", [batch, np.ones((4, 3))], {}
            yield "update_recurrent_states", [batch, {"h": np.ones((4, 3, 3), np.float32)}], {"offset": 0}
            yield "holds", [batch], {}
        elif hasattr(made, "update_priorities"):
            indices = made.sample(4).indices
            yield "update_priorities", [indices, np.ones(4)], {}
            yield "holds", [indices], {}
        if hasattr(made, "reconstruct_nextobs"):
            yield "reconstruct_obs", [0, 0], {}
            yield "reconstruct_nextobs", [0, 0], {}
        elif hasattr(made, "reconstruct_obs"):
            yield "reconstruct_obs", [0], {}
        return
    if name == "array-delta":
        yield "__setitem__", [0, step.image], {}
        yield "__setitem__", [(np.array([0, 1]), np.array([0, 1])), step.image], {}
        yield "__getitem__", [(np.array([0, 1]), np.array([0, 1]))], {}
        yield "read_windows", [np.array([[0, 1]]), np.array([0])], {}
        yield "reshape", [made.shape], {}
        yield "swapaxes", [0, 1], {}
        yield "erase", [0], {}
        yield "fill", [0], {}
    elif name == "recording":
        yield "add", [step.image[0], 1.0, 2, {"speed": step.vectors[0, 0]}, False], {}
        yield "__getitem__", [0], {}
        yield "recompress", ["rle"], {}
    elif name == "embodied":
        yield "add", [{"image": step.image[0], "speed": step.vectors[0, 0], "reward": step.reward[0]}, 0], {}
        batch = made.sample(2)
        yield "sample", [2, "train"], {}
        yield "dataset", [2, 1, 1, 1], {}
        yield "update", [{"stepid": batch["stepid"], "reward": batch["reward"]}], {}
        yield "load", [None, None, 3], {}
    elif name == "torchrl-delta":
        data = made.get(th.arange(N_ENVS)).clone()
        yield "set", [th.arange(N_ENVS), data], {}
        yield "get", [th.arange(N_ENVS)], {}
        yield "get_fields", [th.arange(N_ENVS), ["pixels"]], {}
    elif name == "experience":
        data = made.sample_by_index(range(N_ENVS)).exclude("index").clone()
        yield "add", [data[0]], {}
        yield "add_batch", [data], {}
        for method in ("sample_batch", "sample_random", "calculate_num_batches", "get_next_batch"):
            yield method, [2], {}
        yield "sample_by_index", [[0, 1]], {}
        yield "sample_by_index_fields", [[0, 1], ["pixels"]], {}
        yield "create_epoch_iterator", [2, 1], {}
        yield "get_steps_and_iterator", [1, 1, 2], {}
    elif name == "service":
        from sb3_extra_buffers._torchrl.wire import decode_packet

        packet = made.packed(th.arange(N_ENVS))
        yield "extend", [packet], {}
        yield "extend", [decode_packet(packet).clone()], {}
        yield "add", [decode_packet(packet)[0].clone()], {}
        yield "packed", [th.arange(N_ENVS)], {}
        yield "sample", [4], {}
        yield "draw", [4, 3], {}
        yield "extend_packets", [[packet]], {}
        yield "update_priority", [th.arange(N_ENVS), th.ones(N_ENVS)], {}
        yield "update_tensordict_priority", [decode_packet(packet).clone()], {}


# ---- bad values ----


def bad_values(value: Any) -> Iterator[tuple[str, Any]]:
    """Values that cannot take the place of ``value``, or only where the method is generous."""
    yield from [
        ("None", None), ("text", "text"), ("object", object()), ("empty list", []), ("empty dict", {}), ("NaN", np.nan),
        ("negative", -1), ("huge", 10**30), ("complex", 1j), ("a set", {1, 2}), ("bytes", b"xx"),
        ("type", int), ("slice", slice(3, 1)), ("float", 0.5),
        ("list of text", ["a"] * N_ENVS), ("list of None", [None] * N_ENVS), ("ragged", [[1], [1, 2]]),
    ]  # fmt: skip
    if not isinstance(value, int):
        yield "far out", 10**6  # as the size of a batch that would only take long
    if isinstance(value, th.Tensor):
        yield from [
            ("one more", th.cat([value, value])), ("one less", value[:-1]), ("empty", value[:0]),
            ("three", th.zeros(3)), ("array", value.numpy()),
            ("complex tensor", value.to(th.complex64)), ("NaN tensor", value.to(th.float32) * float("nan")),
        ]  # fmt: skip
    if isinstance(value, np.ndarray):
        yield from bad_arrays(value)
    if isinstance(value, dict):
        for key, part in value.items():
            yield f"without {key}", {name: other for name, other in value.items() if name != key}
            if isinstance(part, np.ndarray):
                for said, other in bad_arrays(part):
                    yield f"{key} {said}", {**value, key: other}
            yield f"{key} None", {**value, key: None}
        yield "other keys", {f"{key}x": part for key, part in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        yield from [
            ("too few infos", value[:-1] if len(value) > 2 else []), ("too many infos", [*value, {}]),
            ("infos that are None", [None] * len(value)), ("infos of text", ["x"] * len(value)),
            ("bad flag", [{"TimeLimit.truncated": "yes"}] * len(value)),
            ("bad flag array", [{"TimeLimit.truncated": np.zeros(3)}] * len(value)),
        ]  # fmt: skip
    if isinstance(value, tuple):
        yield "shorter", value[:-1]
        yield "longer", (*value, value[0])
    if hasattr(value, "batch_size"):  # a TensorDict
        for key in ("pixels", "reward"):
            for said, other in (
                ("dtype", value.get(key).to(th.float64)), ("shape", value.get(key)[..., :1]), ("none", None),
            ):  # fmt: skip
                changed = value.clone()
                if other is None:
                    changed = changed.exclude(key)
                else:
                    changed.set(key, other)
                yield f"{key} {said}", changed
        yield "another key", value.clone().set("x", value.get("reward"))


def bad_arrays(value: Any) -> Iterator[tuple[str, Any]]:
    """Arrays of other shapes and dtypes, and with other values."""
    yield "one row less", value[:-1] if len(value) > 1 else value[:0]
    yield "a row more", np.concatenate([value, value[:1]])
    yield "no row", value[:0]
    yield "three axes more", value[None, None, None]
    yield "an axis more", value[..., None]
    yield "last axis cut", value[..., :-1]
    yield "complex array", value.astype(np.complex64)
    yield "object array", value.astype(object)
    yield "text array", value.astype(str)
    yield "structured", np.zeros(value.shape, [("a", "i4")])
    yield "dates", np.zeros(value.shape, "datetime64[s]")
    if value.dtype.kind in "biu":
        yield "half", value.astype(np.float64) + 0.5
        yield "too large", value.astype(np.int64) + 2**40
        yield "below", value.astype(np.int64) - 1000
        yield "NaN array", np.full(value.shape, np.nan)
    else:
        yield "too large", np.full(value.shape, 1e300)


#: what SB3 takes and so must we: method, argument, how to write it
GENEROUS: list[tuple[str, int, Callable[[Any], Any]]] = [
    ("add", 3, list), ("add", 3, lambda value: 1.0), ("add", 4, list), ("add", 4, lambda value: value.astype(np.int64)),
    ("add", 4, lambda value: value.astype(np.float32)), ("add", 2, lambda value: value.reshape(-1)),
    ("add", 2, lambda value: value.astype(np.int32)), ("add", 3, lambda value: value.astype(np.float64)),
    ("add", 3, lambda value: value[None]),
]  # fmt: skip


# ---- trials ----


class Bench:
    """A buffer to try calls on, made again whenever one has changed it."""

    def __init__(self, name: str, steps: list[Step]) -> None:
        self.saveable: Saveable = saveables()[name]
        self.name, self.steps = name, steps
        self._folder = tempfile.TemporaryDirectory()
        self._n_made = 0
        self.renew()

    def renew(self) -> None:
        self._n_made += 1
        self.place = Path(self._folder.name) / str(self._n_made)
        self.place.mkdir()
        self.made = self.saveable.make(self.place)
        for step in self.steps[:13]:
            self.saveable.add(self.made, step)
        self.before = self.contents()

    def contents(self) -> Contents:
        return {name: np.copy(value) for name, value in self.saveable.contents(self.made).items()}


def cases(name: str, bench: Bench) -> list[tuple[str, str, Call]]:
    """Every call with one argument replaced: the argument, how, and the call."""
    found = []
    for method, positional, named in calls(name, bench.made, bench.steps[13], bench.place):
        if not hasattr(bench.made, method):
            continue
        for place, value in enumerate(positional):
            for said, bad in bad_values(value):
                changed = [*positional[:place], bad, *positional[place + 1 :]]
                found.append((f"{method}[{place}]", said, (method, changed, named)))
        for key, value in named.items():
            for said, bad in bad_values(value):
                found.append((f"{method}[{key}]", said, (method, positional, {**named, key: bad})))
    return found


def uncovered(name: str) -> list[str]:
    """Public methods of ours that no call is known for."""
    with tempfile.TemporaryDirectory() as place:
        bench = Bench(name, make_steps(0, 14))
        known = {method for method, _, _ in calls(name, bench.made, bench.steps[13], Path(place))}
        found = []
        for method, function in inspect.getmembers(type(bench.made), callable):
            ours = "sb3_extra_buffers" in (getattr(function, "__module__", "") or "")
            if ours and not method.startswith("_") and method not in known | _PLAIN | HOOKS:
                found.append(method)
        return found


def torture(name: str, stride: int = 1, seed: int = 0) -> Report:
    """Try every bad value in the place of every argument, or every ``stride``-th."""
    steps = make_steps(seed, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        count = len(cases(name, Bench(name, steps)))
    state: dict[str, Any] = {}

    def set_up() -> None:
        warnings.simplefilter("ignore")
        state["bench"] = Bench(name, steps)
        state["cases"] = cases(name, state["bench"])

    def trial(number: int) -> Outcome:
        bench = state["bench"]
        where, said, call = state["cases"][number * stride]
        outcome, line = _try(bench, call)
        if outcome not in ("refused", "read"):
            bench.renew()
        return Counter([outcome]), [f"{where}, {said}: {line}"] if line else []

    return run_trials(f"arguments {name}", trial, -(-count // stride), set_up=set_up)


def _try(bench: Bench, call: Call) -> tuple[str, str]:
    method, positional, named = call
    error: BaseException | None = None
    try:
        result = getattr(bench.made, method)(*positional, **named)
        if inspect.isgenerator(result):
            next(result, None)
    except BaseException as found:
        error = found
    try:
        what = difference(bench.contents(), bench.before)
        bench.saveable.contents(bench.made)
    except Exception as broken:
        return "inconsistent", f"then {brief(broken)}"
    if error is None:
        return ("accepted" if what else "read"), ""
    if what is not None:
        return "wrong", f"{brief(error)}, but {what}"
    if not isinstance(error, ExtraBuffersError):
        return "unnamed", brief(error)
    return "refused", ""


def generous(name: str) -> list[str]:
    """What SB3 takes and we do not, or not in the same way."""
    saveable, steps, found = saveables()[name], make_steps(0, 16), []
    subject: Any = getattr(saveable, "subject", None)
    if not isinstance(subject, Sb3) or hasattr(subject.make_model(), "advantages"):
        return []
    for method, place, change in GENEROUS:
        bench, model = Bench(name, steps), subject.make_model()
        for step in steps[:13]:
            subject.add(model, step)
        positional, named = subject.arguments(model, steps[13])
        positional[place] = change(positional[place])
        try:
            getattr(model, method)(*copy.deepcopy(positional), **named)
        except Exception:
            continue
        try:
            getattr(bench.made, method)(*positional, **named)
            what = difference(bench.contents(), subject.contents(model))
        except Exception as error:
            what = brief(error)
        if what is not None:
            found.append(f"{method}[{place}] as {positional[place]!r}: {what}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="one kind")
    parser.add_argument("--examples", type=int, default=12)
    args = parser.parse_args()
    defects = 0
    for class_name, name in CLASSES.items():
        if name not in saveables() or (args.only and args.only != name):
            continue
        report = torture(name)
        report.name = f"arguments of {class_name}"
        report.print(args.examples)
        stricter = generous(name)
        for line in stricter:
            print(f"    SB3 takes {line}", flush=True)
        missing = uncovered(name)
        if missing:
            print(f"    not tried: {', '.join(missing)}", flush=True)
        defects += report.defects + len(stricter) + len(missing)
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
