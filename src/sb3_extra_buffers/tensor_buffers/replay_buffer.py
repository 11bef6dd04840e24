"""`TensorReplayBuffer`: a replay buffer of named tensors that is sampled on its device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sb3_extra_buffers.arguments import MAX_ERROR, check_alpha, check_beta, check_count, check_epsilon, check_number
from sb3_extra_buffers.errors import (
    EmptyBufferError,
    GraphCaptureError,
    PriorityError,
    SpecMismatchError,
    StaleIndexError,
    UnknownCodecError,
)
from sb3_extra_buffers.kernels.sum_tree_torch import TorchSumTree
from sb3_extra_buffers.stores.device_base import DevicePlace, IndexBatch, PlannedWrite, finish_writes, usable_device
from sb3_extra_buffers.stores.device_observation import DeviceObservationStore
from sb3_extra_buffers.stores.reentry import writes
from sb3_extra_buffers.stores.staging import Staging
from sb3_extra_buffers.stores.transactions import Transactional
from sb3_extra_buffers.stores.usage import MemoryUsage
from sb3_extra_buffers.tensor_buffers import compiling
from sb3_extra_buffers.tensor_buffers.batches import Outputs, Scratch
from sb3_extra_buffers.tensor_buffers.fields import parse_fields
from sb3_extra_buffers.tensor_buffers.options import Settings, find_device, make_generator
from sb3_extra_buffers.tensor_buffers.tables import TransitionTables

__all__ = ["TensorReplayBuffer"]

# batch sizes whose scratch memory is kept
_MAX_SCRATCH = 8


class TensorReplayBuffer(Transactional):
    """A replay buffer of named tensors for training loops without a framework, on the CPU or a CUDA device.

    Observations are compressed losslessly and decoded on the device; everything else is stored as plain tensors. On a
    CUDA device, `sample` and `update_priorities` never wait for the GPU: they can be captured in a CUDA graph, and
    called under ``torch.compile(fullgraph=True)``. Each replay of a graph draws a new batch from all transitions that
    are held at that time.

    A transition has the fields of ``specs``, and for each observation ``obs`` the next observation ``next_obs``. The
    fields ``rewards``, ``dones`` and ``truncations`` have a special meaning only if ``n_steps`` is above 1. Then a
    batch contains n-step returns as ``rewards``; the ``dones``, ``truncations`` and next observation of the last step
    that each return includes; and ``discounts``, the factor for the value of the next observation. A return ends early
    after a step with ``dones`` or ``truncations``, and at the newest step.

    With ``alpha``, transitions are drawn with probability proportional to ``(abs(TD error) + epsilon) ** alpha``, and a
    batch also contains importance ``weights``, and ``indices`` for `update_priorities`. A new transition gets the
    highest priority so far.

    Buffers can be pickled and deep-copied; a buffer that was pickled on a GPU loads where there is none.

    Args:
        capacity: Maximum number of transitions, in all environments together.
        specs: Shape and dtype of each field, by name, for a single environment; ``next_`` fields need not be listed.
        n_envs: Number of parallel environments.
        device: Where transitions are stored and batches are returned: ``"cpu"``, ``"cuda"`` or ``"auto"``.
        observations: The fields that are observations; steps and batches also have ``next_<name>`` for each.
        compression_method: How observations are compressed: ``"auto"``, ``"delta"``, ``"none"`` (the same as None) or
            another method. A CUDA graph can include `sample` if it is ``"delta"`` or ``"none"``, or if ``"auto"`` chose
            one of them.
        compression_kwargs: Options of that method.
        heap_bytes: Upper limit for the encoded observations of each field; a step that does not fit raises
            `HeapFullError` and changes nothing. None for no limit.
        n_steps: Number of steps of an n-step return; 1 for ordinary transitions.
        gamma: Discount factor of n-step returns.
        alpha: How strongly priorities count, from 0 (uniform) to 1 (proportional); None to draw without priorities.
        beta: How far importance weights correct the sampling bias: 0 not at all, 1 fully. Can be changed at any time.
        epsilon: Added to absolute TD errors.
        image_dtype: Return images, uint8 with at least two axes, in this floating-point dtype, multiplied by ``scale``.
        scale: Factor that images are multiplied by, if ``image_dtype`` is given.
        random_shift: Shift each image by up to this many pixels in a random direction, repeating its border: DrQ's
            augmentation. The frames of a stack are shifted together, an observation and its successor separately.
        channels_last: Whether images are (height, width, channels) rather than (channels, height, width).
        generator: Draws batches; None for torch's default generator of the device.
        seed: Draw batches with a generator of the buffer's own, with this seed.

    Examples:
        >>> import torch
        >>> from sb3_extra_buffers.tensor_buffers import TensorReplayBuffer
        >>> specs = {"obs": ((4, 84, 84), torch.uint8), "actions": ((), torch.int64), "rewards": ((), torch.float32)}
        >>> buffer = TensorReplayBuffer(1000, specs, n_envs=2, device="cpu", seed=0)
        >>> obs = torch.zeros((2, 4, 84, 84), dtype=torch.uint8)
        >>> buffer.add({"obs": obs, "next_obs": obs, "actions": torch.tensor([0, 1]), "rewards": torch.ones(2)})
        >>> batch = buffer.sample(32)
        >>> {name: tuple(tensor.shape) for name, tensor in batch.items()}
        {'obs': (32, 4, 84, 84), 'next_obs': (32, 4, 84, 84), 'actions': (32,), 'rewards': (32,)}
        >>> len(buffer)
        2
    """

    # Writes are transactions: see `_commit`. Transitions are numbered across all environments, in the order of `add`; a
    # transition is stored at its number modulo the capacity.

    # a step or "reset", while it is under way
    _unfinished: _Step | str | None = None

    def __init__(
        self,
        capacity: int,
        specs: Mapping[str, tuple[Any, Any]],
        n_envs: int = 1,
        device: str | torch.device = "auto",
        *,
        observations: Sequence[str] = ("obs",),
        compression_method: str | None = "auto",
        compression_kwargs: Mapping[str, Any] | None = None,
        heap_bytes: int | None = None,
        n_steps: int = 1,
        gamma: float = 0.99,
        alpha: float | None = None,
        beta: float = 0.4,
        epsilon: float = 1e-6,
        image_dtype: torch.dtype | None = None,
        scale: float = 1 / 255,
        random_shift: int = 0,
        channels_last: bool = False,
        generator: torch.Generator | None = None,
        seed: int | None = None,
    ) -> None:
        n_envs = check_count(n_envs, "n_envs")
        n_ring_steps = max(check_count(capacity, "capacity") // n_envs, 1)
        self.device = find_device(device)
        stored, columns = parse_fields(specs, observations)
        self._settings = Settings(
            n_ring_steps * n_envs, n_envs, stored, columns, n_steps, check_number(gamma, "gamma"),
            None if alpha is None else check_alpha(alpha), check_epsilon(epsilon), image_dtype,
            check_number(scale, "scale"), random_shift, bool(channels_last),
        )  # fmt: skip
        self._beta = check_beta(beta)
        #: Draws batches; None for torch's default generator of the device.
        self.generator = make_generator(generator, seed, self.device)
        if heap_bytes is not None:
            check_count(heap_bytes, "heap_bytes")
        place, method = DevicePlace(self.device), "none" if compression_method is None else compression_method
        if not isinstance(method, str):
            raise UnknownCodecError(f"compression_method must be a string, got {method!r}")
        self._stores = {
            name: DeviceObservationStore(
                field.obs_spec(), n_ring_steps, n_envs, 2, place, method, compression_kwargs, heap_bytes
            )
            for name, field in stored.items()
        }
        #: Transitions added so far.
        self.n_added = 0
        self._n_held = 0
        self._set_up()
        for store in self._stores.values():
            store.compile_kernels()

    def _set_up(self) -> None:
        """Create everything that is not pickled."""
        settings = self._settings
        self.n_envs, self.n_steps, self.gamma = settings.n_envs, settings.n_steps, settings.gamma
        #: Transitions that the buffer holds when it is full.
        self.capacity = settings.capacity
        self.alpha, self.epsilon = settings.alpha, settings.epsilon
        self._make_lock()
        self._number = compiling.register(self)
        self._staging = Staging(self.device)
        self._scratch: dict[int, tuple[Scratch, list[torch.Tensor | None]]] = {}
        # scratch memory that a CUDA graph refers to is never freed
        self._captured: list[Any] = []
        # the batch that was filled last: its size, and its tensors by name and as outputs
        self._last_out: tuple[int, dict[str, torch.Tensor], Outputs] = (0, {}, Outputs([], [], []))
        self._tables = TransitionTables(settings, self._beta, self.device)
        self._layout, self._tree = self._tables.layout, self._tables.tree
        #: The fields other than observations, ``[step, env, ...]``.
        self.columns = self._tables.columns
        # orders updates of priorities and samples in compiled functions
        self._order = torch.zeros(1, device=self.device)

    # ---- adding ----

    def add(self, step: Mapping[str, Any]) -> None:
        """Add one step of all environments; the oldest one is overwritten when the buffer is full.

        After an exception, the buffer holds the whole step or what it held before. Cannot be captured in a CUDA graph.

        Args:
            step: Each field, and the next observations, with the environments first: tensors on any device, or arrays.
        """
        self._refuse_capture("add")
        self._check_names(step)
        with self._lock:
            self._check_writable()
            self._ensure_recovered()
            position = self.n_added // self.n_envs % self._settings.n_ring_steps
            plans = [self._plan(store, name, step, position) for name, store in self._stores.items()]
            plans.sort(key=_cannot_fail)
            values = self._checked_columns(step)
            n_held = min(self._n_held + self.n_envs, self.capacity)
            after = {"n_added": self.n_added + self.n_envs, "_n_held": n_held, "_unfinished": None}
            self._commit(_Step(position, plans, values, after))

    def _check_names(self, step: Mapping[str, Any]) -> None:
        wanted = [name for key in self._stores for name in (key, f"next_{key}")] + list(self.columns)
        if not isinstance(step, Mapping) or len(step) != len(wanted) or any(name not in step for name in wanted):
            got = ", ".join(map(str, step)) if isinstance(step, Mapping) else repr(step)
            raise SpecMismatchError(f"a step must be a dict of {', '.join(wanted)}; got {got}")

    def _plan(self, store: DeviceObservationStore, name: str, step: Mapping[str, Any], position: int) -> PlannedWrite:
        field = self._settings.observations[name]
        batches = [field.check_observations(step[key], key, self.n_envs, self.device) for key in (name, f"next_{name}")]
        on_device = [isinstance(batch, torch.Tensor) for batch in batches]
        if any(on_device) and not all(on_device):
            # one is on the device already: the other follows
            batches = [
                batch if isinstance(batch, torch.Tensor) else _from_numpy(batch).to(self.device) for batch in batches
            ]
        return store.plan(position, batches)

    def _checked_columns(self, step: Mapping[str, Any]) -> list[torch.Tensor]:
        """The values of all columns, in the order of the layout."""
        values = [field.check_values(step[field.name], self.n_envs, self.device) for field in self._layout.columns]
        arrays = [value for value in values if isinstance(value, np.ndarray)]
        if arrays and self.device.type == "cuda":
            uploaded = iter(self._staging.upload(arrays))
        else:
            uploaded = map(_from_numpy, arrays)
        return [next(uploaded) if isinstance(value, np.ndarray) else value for value in values]

    @writes
    def _commit(self, step: _Step) -> None:
        """Write a step; after an exception, the buffer holds all of it or is unchanged."""
        try:
            self._unfinished = step
            for plan in step.plans:
                plan.commit()
            self._write_rest(step)
        except BaseException:
            self._recover()
            raise

    def _write_rest(self, step: _Step) -> None:
        """Write everything other than observations; idempotent."""
        self._tables.write(step.position, step.columns, step.after["n_added"], step.after["_n_held"])
        # one call, which no signal can interrupt
        self.__dict__.update(step.after)

    def _finish_step(self, unfinished: _Step | str) -> None:
        if not isinstance(unfinished, _Step):
            self.reset()
        elif finish_writes(unfinished.plans):
            self._write_rest(unfinished)
        else:
            self._unfinished = None

    @writes
    def reset(self) -> None:
        """Remove all transitions."""
        self._refuse_capture("reset")
        with self._lock:
            self._check_writable()
            if isinstance(self._unfinished, _Step):
                self._ensure_recovered()
            # may be interrupted and run again
            self._unfinished = "reset"
            for store in self._stores.values():
                store.clear()
            if self._tree is not None:
                self._tree.clear()
            # a multiple of the capacity, so that the next step is at index 0 and old indices stay stale
            n_added = -(-self.n_added // self.capacity) * self.capacity
            self._tables.write_counts(n_added, 0)
            self.__dict__.update(n_added=n_added, _n_held=0, _unfinished=None)

    def __len__(self) -> int:
        """Transitions held."""
        return self._n_held

    # ---- sampling ----

    def sample(self, batch_size: int, out: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Draw ``batch_size`` transitions, with replacement.

        Args:
            batch_size: Number of transitions.
            out: Tensors to write the batch to, such as an earlier batch. Nothing is allocated then, except for scratch
                memory at the first call with this batch size.

        Returns:
            The batch by name: observations, ``next_`` observations and all other fields, on the device of the buffer.
        """
        layout = self._layout
        if torch.compiler.is_compiling():
            outs = layout.allocate(batch_size)
            order = [] if self._tree is None else [self._order]
            compiling.sample_into(self._number, [*outs.pairs, *outs.columns, *outs.extras, *order])
            batch = layout.as_dict(outs)
            if out is None:
                return batch
            return {name: out[name].copy_(tensor) for name, tensor in batch.items()}
        batch_size = check_count(batch_size, "batch_size")
        if out is None:
            # host stores return new memory
            outs = layout.allocate(batch_size, lazily=self.device.type == "cpu")
            self._fill(outs, layout.allocate_scratch(batch_size))
            return layout.as_dict(outs)
        scratch, spare = self._kept_scratch(batch_size)
        last_size, tensors, outs = self._last_out
        # fast path: skip the checks of tensors that were filled before
        if batch_size != last_size or not _are_same(out, tensors):
            layout.check(out, batch_size)
            outs = layout.outputs_in(out, spare)
            self._last_out = batch_size, dict(out), outs
        self._fill(outs, scratch)
        layout.copy_pairs(outs, out)
        return dict(out)

    def _kept_scratch(self, count: int) -> tuple[Scratch, list[torch.Tensor | None]]:
        kept = self._scratch.get(count)
        if kept is None:
            if len(self._scratch) >= _MAX_SCRATCH:
                self._scratch.clear()
            kept = self._layout.allocate_scratch(count), [None] * len(self._stores)
            self._scratch[count] = kept
        if self._is_capturing():
            self._captured.append(kept)
        return kept

    def fill_outputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fill the tensors of a batch, in the order of the layout, for compiled functions."""
        layout = self._layout
        n_pairs, n_columns = len(layout.observations), len(layout.columns)
        outs = Outputs(
            list(tensors[:n_pairs]),
            list(tensors[n_pairs : n_pairs + n_columns]),
            list(tensors[n_pairs + n_columns : n_pairs + n_columns + len(layout.extras)]),
        )
        self._fill(outs, layout.allocate_scratch(tensors[0].shape[1]))

    def _fill(self, outs: Outputs, scratch: Scratch) -> None:
        """Draw a batch and write it to ``outs``. Does not wait for the GPU, unless the host decodes observations."""
        with self._lock:
            if self._unfinished is not None:
                self._ensure_recovered()
            if self._n_held == 0:
                raise EmptyBufferError("the buffer is empty; add transitions before sampling")
            if self._is_capturing():
                self._check_capturable()
            uniform, indices = scratch.uniform, scratch.indices
            count = indices.shape[1]
            uniform.uniform_(0, 1, generator=self.generator)
            self._tables.draw(uniform[:count], indices, outs)
            wanted = IndexBatch(indices.numpy() if self.device.type == "cpu" else None, indices)
            start = count
            for i, store in enumerate(self._stores.values()):
                transform, stored, pair = self._layout.transforms[i], scratch.stored[i], outs.pairs[i]
                if transform is None:
                    outs.pairs[i] = store.read(wanted, pair)
                    continue
                assert pair is not None
                stored = store.read(wanted, stored)
                end = start + 4 * count if transform.pad else start
                shifts = uniform[start:end].view(-1, 2)
                transform.apply(stored.flatten(0, 1), shifts if transform.pad else uniform, pair.flatten(0, 1))
                start = end

    # ---- graphs ----

    def _is_capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _refuse_capture(self, what: str) -> None:
        if self._is_capturing():
            raise GraphCaptureError(f"{what}() cannot be part of a CUDA graph; call it between replays")

    def _check_capturable(self) -> None:
        for name, store in self._stores.items():
            if store.inner is None or not store.inner.can_be_captured:
                reason = "no method is chosen yet; add more steps before the capture"
                if store.inner is not None:
                    reason = f"the host takes part in decoding {store.describe()}; use 'delta' or 'none'"
                raise GraphCaptureError(f"sampling {name!r} cannot be part of a CUDA graph: {reason}")

    # ---- priorities ----

    @property
    def beta(self) -> float:
        """How far importance weights correct the sampling bias: 0 not at all, 1 fully."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._refuse_capture("setting beta")
        self._beta = check_beta(value)
        if self._tree is not None:
            self._tree.options[1].fill_(self._beta)

    def update_priorities(self, indices: torch.Tensor, td_errors: torch.Tensor) -> None:
        """Set priorities from the absolute values of TD errors.

        On the CPU, an index of a transition that is no longer held raises `StaleIndexError`, and a TD error that is not
        finite raises `PriorityError`; no priority is changed then. On a GPU, such updates are skipped, because raising
        an error would mean waiting for the GPU; `skipped_updates` counts them.

        Args:
            indices: The ``indices`` of a batch, or some of them. If an index is repeated, its last TD error counts.
            td_errors: A TD error for each index.
        """
        if torch.compiler.is_compiling():
            compiling.update_priorities(self._number, self._order, indices, td_errors)
        else:
            self.write_priorities(indices, td_errors)

    def write_priorities(self, indices: Any, td_errors: Any) -> None:
        """`update_priorities`, for compiled functions."""
        tree = self._need_tree()
        numbers, errors = _as_tensor(indices, self.device), _as_tensor(td_errors, self.device)
        are_numbers = errors.dtype != torch.bool and not errors.dtype.is_complex
        are_indices = not numbers.dtype.is_floating_point and numbers.dtype != torch.bool
        if not are_numbers or not are_indices or len(numbers) != len(errors):
            raise PriorityError(
                f"got {len(numbers)} indices ({numbers.dtype}) and {len(errors)} TD errors ({errors.dtype}); pass the "
                "indices of a batch and one TD error for each index"
            )
        numbers = numbers.long()
        with self._lock:
            if self._unfinished is not None:
                self._ensure_recovered()
            if self.device.type == "cpu":
                self._check_updates(numbers, errors)
            tree.update(numbers, errors)

    def _need_tree(self) -> TorchSumTree:
        if self._tree is None:
            raise PriorityError("this buffer draws without priorities; create it with alpha=0.6, for example")
        return self._tree

    def _check_updates(self, numbers: torch.Tensor, errors: torch.Tensor) -> None:
        bad = ~(errors.abs() <= MAX_ERROR)
        if bool(bad.any()):
            raise PriorityError(
                f"{int(bad.sum())} of {len(errors)} TD errors are NaN or infinite (the first is "
                f"{errors[bad][0].item()}); check whether the training diverged"
            )
        first = self.n_added - self._n_held
        gone = (numbers < first) | (numbers >= self.n_added)
        if bool(gone.any()):
            raise StaleIndexError(
                f"{int(gone.sum())} of {len(numbers)} indices (the first is {numbers[gone][0].item()}) are not in the "
                f"buffer, which holds {first} to {self.n_added - 1}; update priorities before adding more steps"
            )

    @property
    def priorities(self) -> torch.Tensor:
        """The priority of each transition, ``[step, env]``, to the power of alpha; zero where there is none."""
        return self._need_tree().leaves.view(-1, self.n_envs).clone()

    @property
    def skipped_updates(self) -> int:
        """Number of priority updates that the GPU has skipped so far; waits for the GPU."""
        return 0 if self._tree is None else int(self._tree.n_skipped)

    # ---- reports ----

    def memory_usage(self) -> MemoryUsage:
        """Bytes held, compared with dense tensors for the same transitions."""
        with self._lock:
            self._ensure_recovered()
            usages = {name: store.memory_usage() for name, store in self._stores.items()}
        usage = sum((replace(part, codecs={name: part.codecs[""]}) for name, part in usages.items()), MemoryUsage())
        if len(usages) == 1:
            usage = replace(usage, codecs={"": next(iter(usage.codecs.values()))})
        column_bytes = self._tables.bytes_per_transition
        # main memory only counts once it has been written to
        other = column_bytes * (self._n_held if self.device.type == "cpu" else self.capacity)
        other += 0 if self._tree is None else self._tree.nbytes
        dense_obs = 2 * self._n_held * sum(store.spec.nbytes for store in self._stores.values())
        return replace(
            usage,
            other=usage.other + other,
            transitions=self._n_held,
            dense=dense_obs + self._n_held * column_bytes,
            dense_observations=dense_obs,
            baseline="dense tensors",
        )

    def check(self) -> None:
        """Raise `AssertionError` if tables contradict each other."""
        with self._lock:
            self._ensure_recovered()
            for store in self._stores.values():
                store.check()
            self._tables.check(self.n_added, self._n_held)

    def __repr__(self) -> str:
        methods = ", ".join(f"{name}: {store.describe()}" for name, store in self._stores.items())
        return f"<TensorReplayBuffer: {self._n_held:,} of {self.capacity:,} transitions on {self.device}; {methods}>"

    # ---- copies ----

    def __getstate__(self) -> dict[str, Any]:
        # pickle and deepcopy read the state later, so it must not change with the next step
        with self._lock:
            self._ensure_recovered()
            state = {name: self.__dict__[name] for name in ("_settings", "_beta", "n_added", "_n_held")}
            state["device"], state["tables"] = str(self.device), self._tables.state()
            state["stores"] = {name: store.frozen() for name, store in self._stores.items()}
            if self.generator is not None:
                state["generator"] = self.generator.get_state(), self.generator.initial_seed()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({name: state[name] for name in ("_settings", "_beta", "n_added", "_n_held")})
        saved = torch.device(state["device"])
        self.device, self._stores, self.generator = usable_device(saved), state["stores"], None
        if "generator" in state:
            drawn, seed = state["generator"]
            self.generator = torch.Generator(self.device).manual_seed(seed)
            if self.device.type == saved.type:
                self.generator.set_state(drawn)
        self._set_up()
        self._tables.restore(state["tables"], self.n_added, self._n_held)


class _Step:
    """A step of every environment: checked, staged, and ready to be written."""

    __slots__ = ("after", "columns", "plans", "position")

    def __init__(
        self, position: int, plans: list[PlannedWrite], columns: list[torch.Tensor], after: dict[str, Any]
    ) -> None:
        self.position, self.plans, self.columns = position, plans, columns
        self.after = after  # attributes of the buffer once the step is written


def _are_same(out: Any, tensors: dict[str, torch.Tensor]) -> bool:
    return (
        isinstance(out, dict)
        and len(out) == len(tensors)
        and all(out.get(name) is tensor for name, tensor in tensors.items())
    )


def _cannot_fail(plan: PlannedWrite) -> bool:
    return not plan.may_fail


def _from_numpy(array: np.ndarray[Any, Any]) -> torch.Tensor:
    # torch warns about memory that it cannot write to, such as JAX's
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _as_tensor(values: Any, device: torch.device) -> torch.Tensor:
    """``values`` as a flat tensor on ``device``."""
    tensor = values.detach() if isinstance(values, torch.Tensor) else _from_numpy(np.asarray(values))
    return tensor.to(device).reshape(-1)
