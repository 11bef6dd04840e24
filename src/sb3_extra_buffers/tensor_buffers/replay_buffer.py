"""`TensorReplayBuffer`: a replay buffer of named tensors that is sampled on its device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sb3_extra_buffers.arguments import check_count
from sb3_extra_buffers.errors import (
    ArgumentError,
    EmptyBufferError,
    GraphCaptureError,
    PriorityError,
    SpecMismatchError,
    StaleIndexError,
)
from sb3_extra_buffers.kernels.images_torch import ImageTransform
from sb3_extra_buffers.kernels.sum_tree_torch import MAX_ERROR, TorchSumTree
from sb3_extra_buffers.kernels.transitions_torch import Endings, TorchTransitions
from sb3_extra_buffers.stores.device_base import (
    DevicePlace,
    IndexBatch,
    PlannedWrite,
    finish_writes,
    has_triton,
    usable_device,
)
from sb3_extra_buffers.stores.device_observation import DeviceObservationStore
from sb3_extra_buffers.stores.staging import Staging
from sb3_extra_buffers.stores.transactions import Transactional
from sb3_extra_buffers.stores.usage import MemoryUsage
from sb3_extra_buffers.tensor_buffers import compiling
from sb3_extra_buffers.tensor_buffers.batches import BatchLayout, Outputs, Scratch
from sb3_extra_buffers.tensor_buffers.fields import Field, parse_fields
from sb3_extra_buffers.tensor_buffers.options import check_beta, check_options, find_device

__all__ = ["TensorReplayBuffer"]

# transitions are numbered with 32 bits in some kernels
_MAX_TRANSITIONS = 1 << 30
# batch sizes whose scratch memory is kept
_MAX_SCRATCH = 8


class TensorReplayBuffer(Transactional):
    """A replay buffer of named tensors for training loops without a framework, on the CPU or a CUDA device.

    Observations are compressed losslessly and decoded on the device; everything else is stored as plain tensors. On a
    CUDA device, `sample` and `update_priorities` never wait for the GPU: they can be captured in a CUDA graph, and
    called under ``torch.compile(fullgraph=True)``. Each replay of a graph draws a new batch among all transitions held
    by then.

    A transition has the fields of ``specs``, and for each observation ``obs`` its successor ``next_obs``. The fields
    ``rewards``, ``dones`` and ``truncations`` have a meaning only if ``n_steps`` is above 1. Then a batch holds n-step
    returns as ``rewards``; ``dones``, ``truncations`` and the next observation of the last step that a return includes;
    and ``discounts``, what to multiply the value of the next observation by. A return ends early after a step with
    ``dones`` or ``truncations``, and at the newest step.

    With ``alpha``, transitions are drawn with probability proportional to ``(abs(TD error) + epsilon) ** alpha``, and a
    batch also holds importance ``weights``, and ``indices`` for `update_priorities`. A new transition gets the highest
    priority seen so far.

    Buffers can be pickled and deep-copied; a buffer that was pickled on a GPU loads where there is none.

    Args:
        capacity: Transitions to hold, of all environments together.
        specs: Shape (without the environment) and dtype of each field, by name; ``next_`` fields need not be named.
        n_envs: Environments that are added together.
        device: Where transitions are stored and batches are returned: ``"cpu"``, ``"cuda"`` or ``"auto"``.
        observations: The fields that are observations and have a successor ``next_<name>``.
        compression_method: How observations are compressed: ``"auto"``, ``"delta"``, ``"none"`` or another method.
            A CUDA graph can include `sample` if it is ``"delta"`` or ``"none"``, or ``"auto"`` chose one of them.
        compression_kwargs: Options of that method.
        heap_bytes: The most that the encoded observations of a field may take.
        n_steps: Steps of a return.
        gamma: Discount factor of n-step returns.
        alpha: How strongly priorities count, from 0 (uniform) to 1 (proportional); None to draw without priorities.
        beta: How far importance weights correct the sampling bias: 0 not at all, 1 fully. Can be changed at any time.
        epsilon: Added to absolute TD errors.
        image_dtype: Return images, uint8 with at least two axes, in this floating-point dtype, multiplied by ``scale``.
        scale: What to multiply images by.
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

    # A write is a transaction: see `_commit`. Transitions are counted over all environments, in the order of `add`; the
    # index of a transition is its number modulo the capacity.

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
        compression_method: str = "auto",
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
        self.n_envs = check_count(n_envs, "n_envs")
        self.n_steps, self.gamma = check_count(n_steps, "n_steps"), float(gamma)
        n_ring_steps = max(check_count(capacity, "capacity") // self.n_envs, 1)
        #: Transitions that the buffer holds when it is full.
        self.capacity = n_ring_steps * self.n_envs
        if self.capacity > _MAX_TRANSITIONS:
            raise ArgumentError(f"capacity must be at most {_MAX_TRANSITIONS}, got {capacity}")
        self.device = find_device(device)
        self._observations, self._columns = parse_fields(specs, observations)
        check_options(self.gamma, alpha, beta, epsilon, image_dtype)
        self.alpha, self._beta, self.epsilon = alpha, float(beta), float(epsilon)
        self.image_dtype, self.scale, self.channels_last = image_dtype, float(scale), bool(channels_last)
        self.random_shift = check_count(random_shift, "random_shift", 0)
        if generator is not None and seed is not None:
            raise ArgumentError("pass a generator or a seed, not both")
        if generator is not None and generator.device.type != self.device.type:
            raise ArgumentError(f"the generator is on {generator.device}, the buffer on {self.device}")
        if seed is not None:
            generator = torch.Generator(self.device).manual_seed(seed)
        #: Draws batches; None for torch's default generator of the device.
        self.generator = generator
        if heap_bytes is not None:
            check_count(heap_bytes, "heap_bytes")
        place = DevicePlace(self.device)
        self._stores = {
            name: DeviceObservationStore(
                field.obs_spec(),
                n_ring_steps,
                self.n_envs,
                2,
                place,
                compression_method,
                compression_kwargs,
                heap_bytes,
            )
            for name, field in self._observations.items()
        }
        #: Transitions added so far.
        self.n_added = 0
        self._n_held = 0
        self._make_tables()

    def _make_tables(self) -> None:
        """Create everything on the device other than observations, for an empty buffer."""
        self._make_lock()
        self._number = compiling.register(self)
        self._staging = Staging(self.device)
        self._scratch: dict[int, tuple[Scratch, list[torch.Tensor | None]]] = {}
        # scratch memory that a CUDA graph refers to is kept for ever
        self._captured: list[Any] = []
        n_ring_steps = self.capacity // self.n_envs
        # also on the device, so that a graph does not freeze them
        self._counts = torch.zeros(2, dtype=torch.int64, device=self.device)
        #: The fields other than observations, ``[step, env, ...]``.
        self.columns = {
            name: torch.zeros((n_ring_steps, self.n_envs, *field.shape), dtype=field.dtype, device=self.device)
            for name, field in self._columns.items()
        }
        use_triton = _use_triton(self.device)
        self._tree = self._make_tree(use_triton)
        gathered = [field for name, field in self._columns.items() if self.n_steps == 1 or name != "rewards"]
        self._transitions = self._make_transitions(use_triton, gathered)
        extras = [Field("discounts", (), torch.float32)] if self.n_steps > 1 else []
        if self._tree is not None:
            extras += [Field("indices", (), torch.int64), Field("weights", (), torch.float32)]
        transforms = [self._make_transform(use_triton, field) for field in self._observations.values()]
        columns = gathered + [field for field in self._columns.values() if field not in gathered]
        self._layout = BatchLayout(list(self._observations.values()), transforms, columns, extras, self.device)
        # orders updates of priorities and samples in compiled functions
        self._order = torch.zeros(1, device=self.device)
        if use_triton:
            self._compile_kernels()

    def _compile_kernels(self) -> None:
        """Launch every kernel once while the buffer is empty: Triton compiles it now, rather than during training."""
        layout = self._layout
        outs, scratch = layout.allocate(2), layout.allocate_scratch(2)
        scratch.uniform.zero_()
        zeros = [torch.zeros_like(self.columns[field.name][0]) for field in layout.columns]
        self._transitions.write(0, zeros, 0, 0)
        if self._tree is not None:
            self._tree.compile_kernels(scratch.uniform[:2], scratch.indices[0], *outs.extras[-2:])
        self._gather(scratch.uniform[:2] if self._tree is None else None, scratch.indices, outs)
        for transform, stored, pair in zip(layout.transforms, scratch.stored, outs.pairs, strict=True):
            if transform is not None and stored is not None and pair is not None:
                transform.apply(stored[0], torch.zeros((2, 2), dtype=torch.float64, device=self.device), pair[0])

    def _make_tree(self, use_triton: bool) -> TorchSumTree | None:
        if self.alpha is None:
            return None
        tree_class: type[TorchSumTree] = TorchSumTree
        if use_triton:
            from sb3_extra_buffers.kernels.sum_tree_triton import TritonSumTree  # optional: needs Triton

            tree_class = TritonSumTree
        return tree_class(self.capacity, self._counts, self.alpha, self._beta, self.epsilon)

    def _make_transitions(self, use_triton: bool, gathered: list[Field]) -> TorchTransitions:
        flat = {name: column.view(self.capacity, -1) for name, column in self.columns.items()}
        endings = None
        if self.n_steps > 1:
            self._check_endings()
            # as SB3 computes them
            powers = self.gamma ** np.arange(self.n_steps + 1, dtype=np.float32)
            truncations = flat["truncations"].view(-1) if "truncations" in flat else None
            endings = Endings(
                flat["rewards"].view(-1), flat["dones"].view(-1), truncations, torch.from_numpy(powers).to(self.device)
            )
        at_end = [self.n_steps > 1 and field.name in ("dones", "truncations") for field in gathered]
        columns = [flat[field.name] for field in gathered]
        transitions_class: type[TorchTransitions] = TorchTransitions
        if use_triton:
            from sb3_extra_buffers.kernels.transitions_triton import TritonTransitions  # optional: needs Triton

            transitions_class = TritonTransitions
        return transitions_class(self._counts, self.n_envs, columns, self.capacity, endings, at_end)

    def _check_endings(self) -> None:
        wanted = {"rewards": "float32", "dones": "bool"}
        for name in wanted:
            field = self._columns.get(name)
            if field is None or math.prod(field.shape) != 1 or (name == "rewards" and field.dtype != torch.float32):
                got = "none" if field is None else f"{field.dtype} {field.shape}"
                raise ArgumentError(
                    f"n_steps={self.n_steps} needs a field {name!r} with one {wanted[name]} per transition, got {got}"
                )

    def _make_transform(self, use_triton: bool, field: Field) -> ImageTransform | None:
        if not field.is_image or (self.image_dtype is None and not self.random_shift):
            return None
        transform_class: type[ImageTransform] = ImageTransform
        if use_triton:
            from sb3_extra_buffers.kernels.images_triton import TritonImageTransform  # optional: needs Triton

            transform_class = TritonImageTransform
        dtype, scale = (field.dtype, None) if self.image_dtype is None else (self.image_dtype, self.scale)
        return transform_class(field.shape, dtype, scale, self.random_shift, self.channels_last, self.device)

    # ---- adding ----

    def add(self, step: Mapping[str, Any]) -> None:
        """Add one step of all environments; the oldest one is overwritten when the buffer is full.

        All of it is added or, if this raises, nothing. It cannot be part of a CUDA graph.

        Args:
            step: Each field, and the next observations, with the environments first: tensors on any device, or arrays.
        """
        self._refuse_capture("add")
        self._check_names(step)
        with self._lock:
            self._check_writable()
            self._recover()
            position = self.n_added // self.n_envs % (self.capacity // self.n_envs)
            plans = [self._plan(store, name, step, position) for name, store in self._stores.items()]
            plans.sort(key=_cannot_fail)
            values = self._checked_columns(step)
            n_held = min(self._n_held + self.n_envs, self.capacity)
            after = {"n_added": self.n_added + self.n_envs, "_n_held": n_held, "_unfinished": None}
            self._commit(_Step(position, plans, values, after))

    def _check_names(self, step: Mapping[str, Any]) -> None:
        wanted = [name for field in self._observations for name in (field, f"next_{field}")] + list(self._columns)
        if not isinstance(step, Mapping) or len(step) != len(wanted) or any(name not in step for name in wanted):
            got = ", ".join(map(str, step)) if isinstance(step, Mapping) else repr(step)
            raise SpecMismatchError(f"a step must be a dict of {', '.join(wanted)}; got {got}")

    def _plan(self, store: DeviceObservationStore, name: str, step: Mapping[str, Any], position: int) -> PlannedWrite:
        field = self._observations[name]
        batches = [field.check_observations(step[key], key, self.n_envs, self.device) for key in (name, f"next_{name}")]
        on_device = [isinstance(batch, torch.Tensor) for batch in batches]
        if any(on_device) and not all(on_device):
            # one is on the device already: the other follows
            batches = [torch.as_tensor(batch, device=self.device) for batch in batches]
        return store.plan(position, batches)

    def _checked_columns(self, step: Mapping[str, Any]) -> list[torch.Tensor]:
        """The values of all columns, in the order of the layout."""
        values = [field.check_values(step[field.name], self.n_envs, self.device) for field in self._layout.columns]
        arrays = [value for value in values if isinstance(value, np.ndarray)]
        if arrays and self.device.type == "cuda":
            uploaded = iter(self._staging.upload(arrays))
        else:
            uploaded = map(torch.from_numpy, arrays)
        return [next(uploaded) if isinstance(value, np.ndarray) else value for value in values]

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
        """Write everything other than observations; doing it twice has no further effect."""
        first = step.position * self.n_envs
        if self._tree is not None:
            self._tree.fill(first, self.n_envs)
        self._transitions.write(first, step.columns, step.after["n_added"], step.after["_n_held"])
        # one call, which no signal can interrupt
        self.__dict__.update(step.after)

    def _finish_step(self, unfinished: _Step | str) -> None:
        if not isinstance(unfinished, _Step):
            self.reset()
        elif finish_writes(unfinished.plans):
            self._write_rest(unfinished)
        else:
            self._unfinished = None

    def reset(self) -> None:
        """Remove all transitions."""
        self._refuse_capture("reset")
        with self._lock:
            self._check_writable()
            if isinstance(self._unfinished, _Step):
                self._recover()
            # may be interrupted and run again
            self._unfinished = "reset"
            for store in self._stores.values():
                store.clear()
            if self._tree is not None:
                self._tree.clear()
            # a multiple of the capacity, so that the next step is at index 0 and old indices stay stale
            n_added = -(-self.n_added // self.capacity) * self.capacity
            self._counts.copy_(torch.tensor([n_added, 0]))
            self.__dict__.update(n_added=n_added, _n_held=0, _unfinished=None)

    def __len__(self) -> int:
        """Transitions held."""
        return self._n_held

    # ---- sampling ----

    def sample(self, batch_size: int, out: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Draw ``batch_size`` transitions, with replacement.

        Args:
            batch_size: Transitions to draw.
            out: Tensors to write the batch to, such as an earlier batch. Nothing is allocated then, apart from scratch
                memory at the first call with a batch size.

        Returns:
            The batch by name: observations, ``next_`` observations and all other fields, on the device of the buffer.
        """
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ArgumentError(f"batch_size must be an integer of at least 1, got {batch_size!r}")
        layout = self._layout
        if torch.compiler.is_compiling():
            outs = layout.allocate(batch_size)
            order = [] if self._tree is None else [self._order]
            compiling.sample_into(self._number, [*outs.pairs, *outs.columns, *outs.extras, *order])
            batch = layout.as_dict(outs)
            if out is None:
                return batch
            return {name: out[name].copy_(tensor) for name, tensor in batch.items()}
        if out is None:
            # host stores return new memory
            outs = layout.allocate(batch_size, lazily=self.device.type == "cpu")
            self._fill(outs, layout.allocate_scratch(batch_size))
            return layout.as_dict(outs)
        layout.check(out, batch_size)
        scratch, spare = self._kept_scratch(batch_size)
        outs = layout.outputs_in(out, spare)
        self._fill(outs, scratch)
        layout.copy_pairs(outs, out)
        return dict(out)

    def _kept_scratch(self, count: int) -> tuple[Scratch, list[torch.Tensor | None]]:
        kept = self._scratch.get(count)
        if kept is None:
            if len(self._scratch) >= _MAX_SCRATCH:
                self._scratch.clear()
            kept = self._layout.allocate_scratch(count), [None] * len(self._observations)
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
        """Draw a batch and write it to ``outs``. Nothing here waits for a GPU that decodes the observations."""
        if self._unfinished is not None:
            self.recover()
        if self._n_held == 0:
            raise EmptyBufferError("the buffer is empty; add transitions before sampling")
        if self._is_capturing():
            self._check_capturable()
        uniform, indices = scratch.uniform, scratch.indices
        count = indices.shape[1]
        uniform.uniform_(0, 1, generator=self.generator)
        draws: torch.Tensor | None = uniform[:count]
        if self._tree is not None:
            self._tree.draw(uniform[:count], indices[0], *outs.extras[-2:])
            draws = None
        self._gather(draws, indices, outs)
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

    def _gather(self, draws: torch.Tensor | None, indices: torch.Tensor, outs: Outputs) -> None:
        if self.n_steps > 1:
            self._transitions.gather(draws, indices, outs.columns[:-1], outs.columns[-1], outs.extras[0])
        else:
            self._transitions.gather(draws, indices, outs.columns)

    # ---- graphs ----

    def _is_capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _refuse_capture(self, what: str) -> None:
        if self._is_capturing():
            raise GraphCaptureError(f"{what}() cannot be part of a CUDA graph; call it between replays")

    def _check_capturable(self) -> None:
        from sb3_extra_buffers.stores.device_frames import DeviceFrameStore
        from sb3_extra_buffers.stores.device_shared import DeviceSharedStore
        from sb3_extra_buffers.stores.device_timeline import DeviceTimelineStore

        for name, store in self._stores.items():
            if not isinstance(store.inner, DeviceFrameStore | DeviceSharedStore | DeviceTimelineStore):
                reason = "no method is chosen yet; add more steps before the capture"
                if store.inner is not None:
                    reason = f"{store.describe()} is not decoded by the GPU alone; pass compression_method='delta'"
                raise GraphCaptureError(f"sampling {name!r} cannot be part of a CUDA graph: {reason}")

    # ---- priorities ----

    @property
    def beta(self) -> float:
        """How far importance weights correct the sampling bias: 0 not at all, 1 fully."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._refuse_capture("setting beta")
        check_beta(value)
        self._beta = float(value)
        if self._tree is not None:
            self._tree.options[1].fill_(self._beta)

    def update_priorities(self, indices: torch.Tensor, td_errors: torch.Tensor) -> None:
        """Set priorities from TD errors, whose absolute values count.

        On the CPU, an index of a transition that is not held any more and a TD error that is not finite raise, and no
        priority is changed. A GPU cannot raise without waiting: it skips them, and `skipped_updates` counts them.

        Args:
            indices: ``indices`` of a batch, or some of them. The last of repeated indices counts.
            td_errors: A TD error for each index.
        """
        if torch.compiler.is_compiling():
            compiling.update_priorities(self._number, self._order, indices, td_errors)
        else:
            self.write_priorities(indices, td_errors)

    def write_priorities(self, indices: Any, td_errors: Any) -> None:
        """`update_priorities`, for compiled functions."""
        tree = self._tree
        if tree is None:
            raise PriorityError("this buffer draws without priorities; create it with alpha=0.6, for example")
        numbers, errors = _as_tensor(indices, self.device), _as_tensor(td_errors, self.device)
        if numbers.dtype.is_floating_point or numbers.dtype == torch.bool or len(numbers) != len(errors):
            raise PriorityError(
                f"got {len(numbers)} indices ({numbers.dtype}) and {len(errors)} TD errors; pass the indices of a "
                "batch and one error for each"
            )
        numbers = numbers.long()
        with self._lock:
            if self._unfinished is not None:
                self._recover()
            if self.device.type == "cpu":
                self._check_updates(numbers, errors)
            tree.update(numbers, errors)

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
                f"buffer, which holds {first} to {self.n_added - 1}; update before adding"
            )

    @property
    def priorities(self) -> torch.Tensor:
        """The priority of each transition, ``[step, env]``, to the power of alpha; zero where there is none."""
        if self._tree is None:
            raise PriorityError("this buffer draws without priorities; create it with alpha=0.6, for example")
        return self._tree.leaves.view(-1, self.n_envs).clone()

    @property
    def skipped_updates(self) -> int:
        """Updates of priorities that the GPU has skipped so far; waits for it."""
        return 0 if self._tree is None else int(self._tree.n_skipped)

    # ---- reports ----

    def memory_usage(self) -> MemoryUsage:
        """Bytes held, compared with dense tensors for the same transitions."""
        with self._lock:
            self._recover()
            usages = {name: store.memory_usage() for name, store in self._stores.items()}
        usage = sum((replace(part, codecs={name: part.codecs[""]}) for name, part in usages.items()), MemoryUsage())
        if len(usages) == 1:
            usage = replace(usage, codecs={"": next(iter(usage.codecs.values()))})
        column_bytes = sum(field.nbytes for field in self._columns.values())
        # main memory is used once it is written
        other = column_bytes * (self._n_held if self.device.type == "cpu" else self.capacity)
        other += 0 if self._tree is None else self._tree.nbytes
        dense_obs = 2 * self._n_held * sum(field.nbytes for field in self._observations.values())
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
            self._recover()
            for store in self._stores.values():
                store.check()
            if self._counts.tolist() != [self.n_added, self._n_held]:
                raise AssertionError(
                    f"the device counts {self._counts.tolist()}, the host {self.n_added, self._n_held}"
                )
            if self._tree is not None:
                self._tree.check()
                if int((self._tree.leaves > 0).sum()) != self._n_held:
                    raise AssertionError("a transition has no priority, or a priority no transition")

    def __repr__(self) -> str:
        methods = ", ".join(f"{name}: {store.describe()}" for name, store in self._stores.items())
        return f"<TensorReplayBuffer: {self._n_held:,} of {self.capacity:,} transitions on {self.device}; {methods}>"

    # ---- copies ----

    def __getstate__(self) -> dict[str, Any]:
        # pickle and deepcopy read the state later, so it must not change with the next step
        with self._lock:
            self._recover()
            state = {name: self.__dict__[name] for name in _PLAIN}
            state["device"] = str(self.device)
            state["stores"] = {name: store.frozen() for name, store in self._stores.items()}
            state["columns"] = {name: _on_host(column) for name, column in self.columns.items()}
            if self._tree is not None:
                state["priorities"] = _on_host(self._tree.leaves), _on_host(self._tree.max_priority)
            if self.generator is not None:
                state["generator"] = self.generator.get_state(), self.generator.initial_seed()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({name: state[name] for name in _PLAIN})
        saved = torch.device(state["device"])
        self.device = usable_device(saved)
        self.generator = None
        if "generator" in state:
            drawn, seed = state["generator"]
            self.generator = torch.Generator(self.device).manual_seed(seed)
            if self.device.type == saved.type:
                self.generator.set_state(drawn)
        self._stores = state["stores"]
        self._make_tables()
        for name, column in state["columns"].items():
            self.columns[name].copy_(column)
        self._counts.copy_(torch.tensor([self.n_added, self._n_held]))
        if self._tree is not None:
            leaves, highest = state["priorities"]
            self._tree.max_priority.copy_(highest)
            self._tree.write_leaves(leaves.to(self.device))


# attributes that are pickled as they are
_PLAIN = (
    "n_envs", "n_steps", "gamma", "capacity", "alpha", "_beta", "epsilon", "image_dtype", "scale", "channels_last",
    "random_shift", "n_added", "_n_held", "_observations", "_columns",
)  # fmt: skip


class _Step:
    """A step of every environment: checked, staged, and ready to be written."""

    __slots__ = ("after", "columns", "plans", "position")

    def __init__(
        self, position: int, plans: list[PlannedWrite], columns: list[torch.Tensor], after: dict[str, Any]
    ) -> None:
        self.position, self.plans, self.columns = position, plans, columns
        self.after = after  # attributes of the buffer once the step is written


def _use_triton(device: torch.device) -> bool:
    return device.type == "cuda" and has_triton()


def _cannot_fail(plan: PlannedWrite) -> bool:
    return not plan.may_fail


def _as_tensor(values: Any, device: torch.device) -> torch.Tensor:
    """``values`` as a flat tensor on ``device``."""
    tensor = values.detach() if isinstance(values, torch.Tensor) else torch.as_tensor(np.asarray(values))
    return tensor.to(device).reshape(-1)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True)
